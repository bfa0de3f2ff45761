//! What happened in a run, for checkers to judge and people to read.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::guard::LossReason;
use crate::inspect::LockKind;
use crate::store::{Answer, Op, Verb};

/// Everything that happened, in order.
#[derive(Clone, Debug, Default)]
pub struct History {
    records: Arc<Mutex<Vec<Record>>>,
}

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// True time since the start.
    pub at: Duration,
    /// What.
    pub what: What,
}

/// Identity of a hold: the number in its owner id.
pub type HoldId = u64;

/// The owners of a lock's hash, with their counts.
pub type Owners = Vec<(HoldId, u32)>;

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// The server did an op of a client.
    Ran(Ran),
    /// A key went without an op: its lease ended, or somebody took it.
    Vanished {
        /// The lock.
        name: Arc<str>,
        /// Who held it.
        owners: Owners,
        /// Its lease was over, by the server's clock; recorded when the server was next touched.
        expired: bool,
    },
    /// The lease of one reader ended, while others hold the lock; recorded when the server was next
    /// touched.
    ReaderGone {
        /// The lock.
        name: Arc<str>,
        /// The reader's hold.
        hold: HoldId,
    },
    /// A client sent a call.
    Sent {
        /// Which client, by order of joining.
        client: usize,
        /// Number of the attempt.
        attempt: u64,
        /// Its ops.
        ops: Vec<Did>,
    },
    /// A client believes to hold a lock from now on.
    Claimed {
        /// Which client.
        client: usize,
        /// The lock.
        name: Arc<str>,
        /// The hold.
        hold: HoldId,
        /// Its fencing token.
        token: u64,
        /// Until then, in true time, unless it is told more.
        until: Duration,
    },
    /// The belief in a hold lasts longer.
    Prolonged {
        /// The hold.
        hold: HoldId,
        /// Until then, in true time.
        until: Duration,
    },
    /// The client no longer believes in the hold, and says so to its holder.
    Lost {
        /// The hold.
        hold: HoldId,
        /// The reason given.
        reason: LossReason,
    },
    /// The holder has left the last level: a release is posted.
    Left {
        /// The hold.
        hold: HoldId,
    },
    /// The holder has left the last level, and the next of the same client may have it: nothing is posted.
    Passed {
        /// The hold, which goes on.
        hold: HoldId,
    },
    /// Somebody took a place in the line of a client.
    Joined {
        /// Which client.
        client: usize,
        /// On which side.
        kind: LockKind,
        /// The lock.
        name: Arc<str>,
        /// The place.
        place: u64,
    },
    /// The place was given up, or served.
    Departed {
        /// Which client.
        client: usize,
        /// On which side.
        kind: LockKind,
        /// The lock.
        name: Arc<str>,
        /// The place.
        place: u64,
        /// It got the lock.
        served: bool,
    },
    /// A fault was done to the server, the network or a process.
    Fault(String),
    /// The workload says something of its own.
    Note(Note),
}

/// What a workload saw or did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// Somebody wants a lock.
    Wants {
        /// The task.
        task: usize,
        /// The lock.
        name: Arc<str>,
    },
    /// He got it, or not, or left.
    Done {
        /// The task.
        task: usize,
        /// What he was told.
        told: String,
    },
    /// He wrote to what the lock protects, believing to hold it.
    Wrote {
        /// The lock.
        name: Arc<str>,
        /// With this token.
        token: u64,
    },
    /// Anything else, for people.
    Text(String),
}

/// An op that ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ran {
    /// Whose op.
    pub client: usize,
    /// Number of its attempt.
    pub attempt: u64,
    /// What it asked for.
    pub did: Did,
    /// Its deadline had passed.
    pub late: bool,
    /// What it was answered.
    pub answer: Answered,
    /// The owners before and after, if they changed.
    pub change: Option<(Owners, Owners)>,
    /// What is left of the lease afterwards, in true milliseconds; `None` without key or expiry. Of a
    /// read/write lock: of this hold's own.
    pub left_ms: Option<u64>,
}

/// An op, as a checker sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Did {
    /// What kind of lock, and on which side.
    pub kind: LockKind,
    /// The lock.
    pub name: Arc<str>,
    /// What to do.
    pub verb: Done,
    /// For which hold; a forced release names it by text.
    pub hold: HoldId,
    /// The count it sets.
    pub count: u32,
    /// The other hold it names: the one that hands it on, or one that is released with it.
    pub other: Option<HoldId>,
}

/// The kinds of ops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// `Acquire`.
    Acquire,
    /// `Release`.
    Release,
    /// `Renew`.
    Renew,
    /// `HandOff`.
    HandOff,
    /// `Downgrade`.
    Downgrade,
    /// `Upgrade`.
    Upgrade,
    /// `ForceRelease`.
    Force,
    /// `Enqueue`.
    Enqueue,
    /// `Beat`.
    Beat,
    /// `Remember`; of no hold.
    Remember,
}

/// The kinds of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answered {
    /// First acquisition done, with this token.
    Granted(u64),
    /// Others hold it.
    Taken,
    /// Past its deadline.
    Late,
    /// The hold is not there.
    Gone,
    /// Done: nested, renewed, released, removed.
    Done,
    /// Nothing to remove, or refused.
    Nothing,
    /// It stands in the queue of a fair lock, as the first or not.
    Queued(bool),
}

impl History {
    /// Adds a record.
    pub fn push(&self, at: Duration, what: What) {
        self.records.lock().push(Record { at, what });
    }

    /// All records so far, taken out.
    pub fn take(&self) -> Vec<Record> {
        std::mem::take(&mut self.records.lock())
    }
}

impl Did {
    pub(crate) fn of(op: &Op) -> Self {
        let (verb, owner, count) = match &op.verb {
            Verb::Acquire { owner, count, .. } => (Done::Acquire, owner.hold, *count),
            Verb::Release { owner, count, .. } => (Done::Release, owner.hold, *count),
            Verb::Renew { owner, count, .. } => (Done::Renew, owner.hold, *count),
            Verb::HandOff { to, .. } => (Done::HandOff, to.hold, 1),
            Verb::Downgrade { owner, count, .. } => (Done::Downgrade, owner.hold, *count),
            Verb::Upgrade { to, .. } => (Done::Upgrade, to.hold, 1),
            Verb::ForceRelease { owner } => (Done::Force, hold_of(owner), 0),
            Verb::Enqueue { owner, .. } => (Done::Enqueue, owner.hold, 1),
            Verb::Beat { owner, .. } => (Done::Beat, owner.hold, 0),
            Verb::Remember { .. } => (Done::Remember, 0, 0),
        };
        let other = match &op.verb {
            Verb::HandOff { from, .. } | Verb::Upgrade { from, .. } => Some(from.hold),
            Verb::Release { also, .. } => also.map(|also| also.hold),
            _ => None,
        };
        Self {
            kind: op.kind.into(),
            name: Arc::clone(&op.name),
            verb,
            hold: owner,
            count,
            other,
        }
    }
}

impl From<&Answer> for Answered {
    fn from(answer: &Answer) -> Self {
        match answer {
            Answer::Granted { token, .. } => Self::Granted(*token),
            Answer::Taken { .. } => Self::Taken,
            Answer::Late => Self::Late,
            Answer::Gone(_) => Self::Gone,
            Answer::Held { .. }
            | Answer::Released { .. }
            | Answer::StillHeld { .. }
            | Answer::Renewed { .. }
            | Answer::Remembered { .. }
            | Answer::Removed => Self::Done,
            Answer::Nothing | Answer::Refused(_) => Self::Nothing,
            Answer::Queued { first, .. } => Self::Queued(*first),
        }
    }
}

/// The hold in an owner's text; 0 if it is nobody of ours.
pub(crate) fn hold_of(owner: &str) -> HoldId {
    let owner = owner.strip_suffix(":write").unwrap_or(owner);
    owner
        .rsplit_once(':')
        .and_then(|(_, hold)| hold.parse().ok())
        .unwrap_or(0)
}

/// A hold's number, short enough to read.
#[derive(Clone, Copy)]
pub struct Holder(pub HoldId);

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}", self.0 & 0xffff)
    }
}

impl fmt::Debug for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.at.as_micros();
        write!(f, "{:>6}.{:03} ms  ", ms / 1000, ms % 1000)?;
        match &self.what {
            What::Ran(ran) => {
                let late = if ran.late { ", late" } else { "" };
                write!(
                    f,
                    "server      {} #{}{late} -> {:?}",
                    ran.did, ran.attempt, ran.answer
                )?;
                if let Some((before, after)) = &ran.change {
                    write!(f, "  {} => {}", owners(before), owners(after))?;
                }
                match ran.left_ms {
                    Some(left) => write!(f, "  ({left} ms left)"),
                    None => Ok(()),
                }
            }
            What::Vanished {
                name,
                owners: gone,
                expired,
            } => {
                let why = if *expired { "lease over" } else { "taken away" };
                write!(f, "server      {name} {} is gone: {why}", owners(gone))
            }
            What::ReaderGone { name, hold } => {
                let hold = Holder(*hold);
                write!(f, "server      {name} {hold} is gone: his lease is over")
            }
            What::Sent {
                client,
                attempt,
                ops,
            } => {
                write!(f, "client {client}    sends #{attempt}:")?;
                for op in ops {
                    write!(f, " {op};")?;
                }
                Ok(())
            }
            What::Claimed {
                client,
                name,
                hold,
                token,
                until,
            } => write!(
                f,
                "client {client}    HOLDS {name} as {}, token {token}, until {:.3} ms",
                Holder(*hold),
                until.as_secs_f64() * 1e3
            ),
            What::Prolonged { hold, until } => write!(
                f,
                "            {} holds until {:.3} ms",
                Holder(*hold),
                until.as_secs_f64() * 1e3
            ),
            What::Lost { hold, reason } => {
                write!(f, "            {} is LOST: {reason}", Holder(*hold))
            }
            What::Left { hold } => write!(f, "            {} is left", Holder(*hold)),
            What::Passed { hold } => write!(f, "            {} is passed on", Holder(*hold)),
            What::Joined {
                client,
                kind,
                name,
                place,
            } => write!(
                f,
                "client {client}    place {place} in line for {name}{}",
                side(*kind)
            ),
            What::Departed {
                client,
                kind,
                name,
                place,
                served,
            } => {
                let (how, side) = (if *served { "served" } else { "left" }, side(*kind));
                write!(
                    f,
                    "client {client}    place {place} for {name}{side}: {how}"
                )
            }
            What::Fault(fault) => write!(f, "*** {fault}"),
            What::Note(Note::Wants { task, name }) => write!(f, "task {task}      wants {name}"),
            What::Note(Note::Done { task, told }) => write!(f, "task {task}      {told}"),
            What::Note(Note::Wrote { name, token }) => {
                write!(f, "            wrote under {name} with token {token}")
            }
            What::Note(Note::Text(text)) => f.write_str(text),
        }
    }
}

impl fmt::Display for Did {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            name,
            verb,
            hold,
            count,
            other,
        } = self;
        let name = format!("{name}{}", side(*kind));
        if let Some(other) = other {
            let (hold, other) = (Holder(*hold), Holder(*other));
            return write!(f, "{verb:?}({name}, {hold} and {other}, {count})");
        }
        write!(f, "{verb:?}({name}, {}, {count})", Holder(*hold))
    }
}

fn side(kind: LockKind) -> &'static str {
    match kind {
        LockKind::Plain => "",
        LockKind::Fair => " (fair)",
        LockKind::Read => " (read)",
        LockKind::Write => " (write)",
    }
}

fn owners(owners: &Owners) -> String {
    let each: Vec<_> = owners
        .iter()
        .map(|(hold, count)| format!("{}: {count}", Holder(*hold)))
        .collect();
    format!("{{{}}}", each.join(", "))
}
