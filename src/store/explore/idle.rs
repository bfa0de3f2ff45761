//! Which requests change nothing: told by `apply` itself, so that no rule is taken for granted.

use super::server::{Question, Table};
use super::world::{Ask, Entry, HOLDS, Request, Server, heir};

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
                let is_handing = matches!(ask, Ask::HandOff(_) | Ask::ReleaseBoth);
                if is_handing && heir(hold).is_none() {
                    continue;
                }
                for server in servers(table.config.lease) {
                    let half = server.entry.filter(|entry| entry.half);
                    // It is in nobody's hands, to be handed on.
                    let is_half = half.is_some_and(|entry| heir(entry.hold) == Some(hold));
                    let unheard_of = half.is_some() && table.config.budget.refusals == 0;
                    if unheard_of || (is_half && matches!(ask, Ask::HandOff(_))) {
                        continue;
                    }
                    let its_own = server.has(hold)
                        || (ask == Ask::ReleaseBoth && heir(hold).is_some_and(|to| server.has(to)));
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
        counts.flat_map(move |count| {
            (1..=lease).flat_map(move |left| {
                let halves = [false, true].into_iter();
                let halves = halves.filter(move |half| !half || heir(hold).is_some());
                halves.map(move |half| Entry {
                    hold,
                    count,
                    left,
                    half,
                })
            })
        })
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
        Ask::HandOff(_) => 6,
        Ask::ReleaseBoth => 7,
    }
}

const KINDS: usize = 8;

const ASKS: [Ask; 9] = [
    Ask::Acquire(0),
    Ask::Nest(1),
    Ask::Leave,
    Ask::Release,
    Ask::Renew(1),
    Ask::Renew(2),
    Ask::Force,
    Ask::HandOff(0),
    Ask::ReleaseBoth,
];

/// Counts above it are met in the same way.
const MOST: i8 = 3;
