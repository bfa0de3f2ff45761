//! Everything there is at one moment: the server, the clients' holds, and what is under way.
//!
//! Times are in ticks from now, so that the same situation an hour later is the same state, and the
//! states are finite in number though time is not.

use std::fmt;

/// Everything there is.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct World {
    pub(super) server: Server,
    pub(super) holds: [Hold; HOLDS],
    /// Sorted, so that their order does not tell states apart.
    pub(super) requests: Slots<Request, 4>,
    pub(super) replies: Slots<Reply, 3>,
    /// Greatest token each process has seen.
    pub(super) floors: [Token; 2],
    /// Greatest token the server has granted.
    pub(super) greatest: Token,
    pub(super) budget: Budget,
    /// The server's clock made its step; which processes know.
    pub(super) stepped: bool,
    pub(super) aware: [bool; 2],
}

/// The server's memory of the one name. Never there with no time left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Server {
    pub(super) entry: Option<Entry>,
    pub(super) last: Option<Token>,
}

/// The field of the hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Entry {
    /// The hold whose request made it. The server knows the owner id only.
    pub(super) hold: usize,
    pub(super) count: i8,
    pub(super) left: i8,
    /// Beside it is the field of its heir: a hand-off was refused half-way.
    pub(super) half: bool,
}

/// A token: eighths of a tick from the server's now, or its plain value if tokens are a bare count.
pub(super) type Token = i8;

/// A hold, as its client sees it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Hold {
    pub(super) phase: Phase,
    /// Levels whose guards are alive.
    pub(super) depth: i8,
    /// Number of the nested acquire that is waited for; 0 if none is.
    pub(super) nesting: i8,
    /// Ticks to its own deadline.
    pub(super) belief: i8,
    /// First acquires that were sent and not answered: a bit for each.
    pub(super) open: i8,
    /// Ticks until the server takes none of them any more; -1 when that has passed.
    pub(super) open_left: i8,
    /// Ticks since the last of them was sent. Kept only without `Rule::AnsweredAttempt`.
    pub(super) last_sent: i8,
    /// Ticks since nobody wants it.
    pub(super) unwanted: i8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Phase {
    Idle,
    Waiting,
    Held,
    /// Its deadline passed; its guard is still alive.
    Lost,
    /// The server said that it is gone: nothing is posted for it any more.
    Gone,
    /// The last level was left, or the waiter: a release was posted.
    Ending,
    /// The last level was left, and a hand-off was posted.
    Handing,
    /// The hand-off was given up: a release of both was posted.
    EndingBoth,
    /// Somebody waits for a hand-off to it.
    Next,
    /// Nobody waits any more for the hand-off to it.
    NextLeft,
    /// A conclusive release was answered.
    Done,
}

/// What a request asks of the server.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Ask {
    /// `Acquire` to count 1; the number of the attempt.
    Acquire(i8),
    /// `Acquire` to count 2; the number tells one from the next.
    Nest(i8),
    /// `Release` to count 1.
    Leave,
    /// `Release` to count 0.
    Release,
    /// `Renew` with this count.
    Renew(i8),
    /// `ForceRelease`, by an operator who has seen this hold.
    Force,
    /// `HandOff` to the heir; the number of the attempt.
    HandOff(i8),
    /// `Release` to count 0, and in the same operation of the heir.
    ReleaseBoth,
}

/// A request under way.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Request {
    pub(super) ask: Ask,
    pub(super) hold: usize,
    /// Ticks since it was sent.
    pub(super) age: i8,
    /// Ticks until the server takes it for late; -1 when it does.
    pub(super) left: i8,
    pub(super) floor: Token,
    /// A release that was sent when no acquire was unanswered.
    pub(super) conclusive: bool,
    /// The network's copy. Nobody hears an answer to it: which of two equal ones is heard is all one.
    pub(super) copy: bool,
    /// There is, or was, a copy of it.
    pub(super) copied: bool,
}

/// A reply under way.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Reply {
    pub(super) ask: Ask,
    pub(super) hold: usize,
    pub(super) told: Told,
    pub(super) token: Token,
    /// A release after which no acquire of its hold can run.
    pub(super) conclusive: bool,
    /// The request had a copy.
    pub(super) copied: bool,
    /// It ran after the step of the server's clock.
    pub(super) after_step: bool,
}

/// An answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Told {
    /// Done. On its way: the ticks for which it may be believed.
    Yes(i8),
    Taken,
    Gone,
    Late,
    Refused,
}

/// What may still happen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(super) struct Budget {
    /// Requests that the network copies.
    pub(super) copies: i8,
    /// Requests that a client sends again.
    pub(super) resends: i8,
    pub(super) renewals: i8,
    pub(super) cancels: i8,
    /// Nested acquires.
    pub(super) nests: i8,
    /// Forced releases.
    pub(super) forces: i8,
    /// Losses of the server's memory.
    pub(super) losses: i8,
    /// Steps of the server's clock.
    pub(super) steps: i8,
    pub(super) hand_offs: i8,
    /// Hand-offs that the server refuses, half-way or before.
    pub(super) refusals: i8,
}

/// A sorted set of at most `N`; what finds no room is lost.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Slots<T, const N: usize>([Option<T>; N]);

impl<T: Copy + Ord, const N: usize> Slots<T, N> {
    pub(super) const EMPTY: Self = Self([None; N]);

    pub(super) fn get(&self, slot: usize) -> Option<T> {
        self.0[slot]
    }

    pub(super) fn is_full(&self) -> bool {
        self.0[N - 1].is_some()
    }

    /// Puts it where it belongs, if there is room.
    pub(super) fn put(&mut self, new: T) {
        if self.is_full() {
            return;
        }
        let mut carried = new;
        for slot in &mut self.0 {
            match slot {
                None => {
                    *slot = Some(carried);
                    return;
                }
                Some(there) if *there > carried => std::mem::swap(there, &mut carried),
                Some(_) => {}
            }
        }
    }

    pub(super) fn take(&mut self, slot: usize) -> Option<T> {
        let taken = self.0[slot];
        for next in slot + 1..N {
            self.0[next - 1] = self.0[next];
        }
        self.0[N - 1] = None;
        taken
    }

    /// Changes each, and forgets those for which the answer is `false`.
    pub(super) fn update(&mut self, mut change: impl FnMut(&mut T) -> bool) {
        if self.0[0].is_none() {
            return;
        }
        let before = std::mem::replace(self, Self::EMPTY);
        for mut one in before.0.into_iter().flatten() {
            if change(&mut one) {
                self.put(one);
            }
        }
    }

    pub(super) fn any(&self, mut is: impl FnMut(&T) -> bool) -> bool {
        for slot in &self.0 {
            match slot {
                Some(one) if is(one) => return true,
                Some(_) => {}
                None => return false,
            }
        }
        false
    }
}

impl Hold {
    pub(super) const IDLE: Self = Self {
        phase: Phase::Idle,
        depth: 0,
        nesting: 0,
        belief: 0,
        open: 0,
        open_left: -1,
        last_sent: 0,
        unwanted: 0,
    };

    /// Whether somebody believes in it now: by the clock alone.
    pub(super) fn is_believed(self) -> bool {
        self.phase == Phase::Held && self.depth > 0 && self.belief > 0
    }

    /// Whether nobody wants it on the server.
    pub(super) fn is_unwanted(self) -> bool {
        matches!(
            self.phase,
            Phase::Lost
                | Phase::Gone
                | Phase::Ending
                | Phase::Handing
                | Phase::EndingBoth
                | Phase::NextLeft
                | Phase::Done
        )
    }

    /// It ends now, unless it has ended before.
    pub(super) fn end(&mut self, phase: Phase) {
        if !self.is_unwanted() {
            self.unwanted = 0;
        }
        self.phase = phase;
        self.depth = 0;
        self.nesting = 0;
        self.belief = 0;
        self.last_sent = 0;
    }

    /// An answer confirms it for so long.
    pub(super) fn confirm(&mut self, belief: i8) {
        if self.phase == Phase::Held {
            self.belief = self.belief.max(belief);
        }
    }
}

impl World {
    pub(super) fn new(budget: Budget, oldest: Token) -> Self {
        Self {
            server: Server::EMPTY,
            holds: [Hold::IDLE; HOLDS],
            requests: Slots::EMPTY,
            replies: Slots::EMPTY,
            floors: [oldest; 2],
            greatest: oldest,
            budget,
            stepped: false,
            aware: [false; 2],
        }
    }

    /// Whether the server has this hold.
    pub(super) fn is_on_server(&self, hold: usize) -> bool {
        self.server.has(hold)
    }
}

impl Server {
    pub(super) const EMPTY: Self = Self {
        entry: None,
        last: None,
    };

    pub(super) fn has(&self, hold: usize) -> bool {
        self.entry.is_some_and(|entry| {
            entry.hold == hold || (entry.half && heir(entry.hold) == Some(hold))
        })
    }
}

/// The process a hold belongs to.
pub(super) fn process(hold: usize) -> usize {
    usize::from(hold == 2)
}

/// To which hold of the same process this one may be handed on.
pub(super) fn heir(hold: usize) -> Option<usize> {
    match hold {
        0 => Some(1),
        1 => Some(3),
        _ => None,
    }
}

/// Three of process 0, and hold 2 of process 1.
pub(super) const HOLDS: usize = 4;

impl fmt::Display for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.server.entry {
            None => write!(f, "server free")?,
            Some(entry) => write!(
                f,
                "server: hold {} x{}, {} left",
                entry.hold, entry.count, entry.left
            )?,
        }
        if self.server.entry.is_some_and(|entry| entry.half) {
            write!(f, ", and its heir")?;
        }
        for (number, hold) in self.holds.iter().enumerate() {
            if hold.phase != Phase::Idle {
                write!(f, "; {number}: {hold}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.phase {
            Phase::Held => write!(f, "held x{}, {} left", self.depth, self.belief),
            phase => write!(f, "{}", format!("{phase:?}").to_lowercase()),
        }
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let copy = if self.copy { ", the copy" } else { "" };
        write!(f, "{} of hold {}{copy}", self.ask, self.hold)
    }
}

impl fmt::Display for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of hold {}: {}", self.ask, self.hold, self.told)
    }
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Yes(0) => f.write_str("done"),
            Self::Yes(belief) => write!(f, "done, {belief} left"),
            Self::Taken => f.write_str("taken"),
            Self::Gone => f.write_str("gone"),
            Self::Late => f.write_str("late"),
            Self::Refused => f.write_str("refused"),
        }
    }
}

impl fmt::Display for Ask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Acquire(_) => "acquire(1)",
            Self::Nest(_) => "acquire(2)",
            Self::Leave => "release(1)",
            Self::Release => "release(0)",
            Self::Renew(_) => "renew",
            Self::Force => "force",
            Self::HandOff(_) => "hand-off",
            Self::ReleaseBoth => "release(0) of both",
        })
    }
}
