//! Which requests change nothing: told by `apply` itself, so that no rule is taken for granted.

use super::server::{Question, Table};
use super::world::{Ask, Entry, HOLDS, Request, Server};

/// Requests that change nothing on the server, by kind and hold.
pub(super) struct Idle {
    /// Past their deadline, whoever holds the lock.
    when_late: [[bool; HOLDS]; KINDS],
    /// While their own hold is not there.
    without_its_hold: [[bool; HOLDS]; KINDS],
}

impl Idle {
    pub(super) fn new(table: &mut Table) -> Self {
        let mut idle = Self {
            when_late: [[true; HOLDS]; KINDS],
            without_its_hold: [[true; HOLDS]; KINDS],
        };
        for ask in ASKS {
            for hold in 0..HOLDS {
                for server in servers(table.config.lease) {
                    let its_own = server.entry.is_some_and(|entry| entry.hold == hold);
                    let mut changes = |late| {
                        let question = Question {
                            server,
                            ask,
                            hold,
                            late,
                            floor: table.config.oldest_token(),
                        };
                        table.ask(&question).server.entry != server.entry
                    };
                    idle.when_late[kind(ask)][hold] &= !changes(true);
                    idle.without_its_hold[kind(ask)][hold] &= its_own || !changes(false);
                }
            }
        }
        idle
    }

    pub(super) fn is_when_late(&self, request: &Request) -> bool {
        self.when_late[kind(request.ask)][request.hold]
    }

    pub(super) fn is_without_its_hold(&self, request: &Request) -> bool {
        self.without_its_hold[kind(request.ask)][request.hold]
    }
}

/// Each that there can be, and no token.
fn servers(lease: i8) -> impl Iterator<Item = Server> {
    let entries = (0..HOLDS).flat_map(move |hold| {
        let counts = 1..=MOST;
        counts.flat_map(move |count| (1..=lease).map(move |left| Entry { hold, count, left }))
    });
    let entries = entries.map(Some).chain([None]);
    entries.map(|entry| Server { entry, last: None })
}

fn kind(ask: Ask) -> usize {
    match ask {
        Ask::Acquire(_) => 0,
        Ask::Nest(_) => 1,
        Ask::Leave => 2,
        Ask::Release => 3,
        Ask::Renew(_) => 4,
        Ask::Force => 5,
    }
}

const KINDS: usize = 6;

const ASKS: [Ask; 7] = [
    Ask::Acquire(0),
    Ask::Nest(1),
    Ask::Leave,
    Ask::Release,
    Ask::Renew(1),
    Ask::Renew(2),
    Ask::Force,
];

/// Counts above it are met in the same way.
const MOST: i8 = 3;
