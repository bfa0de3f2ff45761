//! Where holds live: operations and answers as values, and the two stores that turn one into the
//! other.
//!
//! An [`Op`] says what should be true of one name, an [`Answer`] what the store found. Both stores
//! implement the same table (docs/protocol.md): Redis in Lua, memory in Rust. Everything above this
//! room is the same for both.

pub(crate) mod clock;
#[cfg(test)]
mod compare;
#[cfg(test)]
mod explore;
pub(crate) mod memory;
pub(crate) mod redis;
pub(crate) mod topic;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use uuid::Uuid;

use crate::env::BoxFuture;
use crate::guard::LossReason;
use crate::kind::Kind;
pub(crate) use topic::{Channel, Subscription};

/// Identity of one hold: the hash field, `<client uuid>:<63 random bits in decimal>`.
///
/// Used for one hold only, so that an old message can never match a newer hold.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct OwnerId {
    pub(crate) client: Uuid,
    pub(crate) hold: u64,
}

impl OwnerId {
    /// A fresh identity from 64 random bits, of which 63 are used: Java reads them as a `long`.
    pub(crate) fn new(client: Uuid, random: u64) -> Self {
        Self {
            client,
            hold: random >> 1,
        }
    }
}

impl fmt::Display for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.client.hyphenated(), self.hold)
    }
}

impl fmt::Debug for OwnerId {
    /// A digest: enough to tell two holds apart in a log, too little to forge one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::observe::digest(&self.to_string()))
    }
}

/// One thing to do to one name. Safe to repeat, however late: see the table in docs/protocol.md.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Op {
    pub(crate) kind: Kind,
    pub(crate) name: Arc<str>,
    pub(crate) verb: Verb,
}

/// What an [`Op`] does. Counts are set, never added to; presence of the owner id decides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    /// `count` 1 takes the free lock; 2 and more set the count of a hold that is there.
    Acquire {
        owner: OwnerId,
        count: u32,
        lease_ms: u64,
        token: TokenRule,
    },
    /// `count` 0 removes the hold, however late; 1 and more set the count that remains.
    Release {
        owner: OwnerId,
        count: u32,
        also: Option<OwnerId>,
    },
    /// Moves the deadline forward, never back; never creates. Puts the count right on the way.
    Renew {
        owner: OwnerId,
        count: u32,
        lease_ms: u64,
    },
    /// Passes a held lock from one owner to another of the same client, with a new lease and a new
    /// token. Never creates, never overwrites.
    HandOff {
        from: OwnerId,
        to: OwnerId,
        lease_ms: u64,
        token: TokenRule,
    },
    /// Lets the writer go on as a reader, under the same owner id, with this count.
    Downgrade {
        owner: OwnerId,
        count: u32,
        lease_ms: u64,
    },
    /// Lets the only reader go on as the writer, under another owner id of the same client, with a new
    /// lease and a new token. Never waits.
    Upgrade {
        from: OwnerId,
        to: OwnerId,
        lease_ms: u64,
        token: TokenRule,
    },
    /// Removes the named owner (text, as `inspect` showed it) and no other.
    ForceRelease { owner: String },
    /// Of a fair lock: takes it when it is this owner's turn, or else stands in its queue, where it
    /// counts as alive for `stay.beat_ms`.
    Enqueue {
        owner: OwnerId,
        lease_ms: u64,
        token: TokenRule,
        stay: Stay,
    },
    /// Keeps a place in the queue of a fair lock; never takes the lock, never makes a place.
    Beat { owner: OwnerId, stay: Stay },
    /// Raises the token counter to `token.floor`, a token given under several servers at once; never lowers
    /// it. Needs no hold.
    Remember { lease_ms: u64, token: TokenRule },
}

/// How long one who stands in the queue of a fair lock counts as alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stay {
    /// For us: from now on, in milliseconds.
    pub(crate) beat_ms: u64,
    /// For Redisson's clients: at least so long once it is first, in milliseconds. Theirs is called
    /// `fairLockWaitTimeout`.
    pub(crate) wait_ms: u64,
}

/// How the token of a first acquisition is made: `max(last + 1, server time in µs, floor + 1)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TokenRule {
    /// Greatest token this client has seen for the name; 0 if none.
    pub(crate) floor: u64,
    /// How long the counter is kept after its last use, in milliseconds; `None` is for ever. A
    /// counter found without expiry keeps none.
    pub(crate) retention_ms: Option<u64>,
    /// How many tokens after the granted one are given away with it: for those who get the lock next within this
    /// client. A hand-off has some.
    pub(crate) reserve: u64,
}

/// What the store found or did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// First acquisition or hand-off done, now or by an earlier copy of the same op.
    Granted { token: u64, remaining_ms: u64 },
    /// Somebody else holds it; `None`: without expiry.
    Taken { remaining_ms: Option<u64> },
    /// The deadline of the request had passed: nothing done.
    Late,
    /// The hold is not there: nothing done.
    Gone(Instead),
    /// Nested acquisition done.
    Held { remaining_ms: u64 },
    /// The hold was there and is removed. `heard`: how many were told that the lock is free.
    Released { heard: u64 },
    /// Nested release done.
    StillHeld { remaining_ms: u64 },
    /// Lease moved forward, or long enough already.
    Renewed { remaining_ms: u64 },
    /// Forced release done.
    Removed,
    /// Forced release found another owner or none.
    Nothing,
    /// It stands in the queue of a fair lock, `first` or not. In `remaining_ms` something changes
    /// without anybody's doing (`None`: nothing does); 0: it is its turn.
    Queued {
        first: bool,
        remaining_ms: Option<u64>,
    },
    /// The token counter, which is not below what was to be remembered.
    Remembered { token: u64 },
    /// This op alone was refused; nothing done for it.
    Refused(Refusal),
}

/// What is there instead of a hold that is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Instead {
    Free,
    Taken,
}

/// A "no" of the server that says why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) kind: RefusalKind,
    /// The server's words or ours; never a secret.
    pub(crate) message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RefusalKind {
    /// The key is in other use.
    Conflict,
    /// An ACL forbids it.
    Denied,
    /// `maxmemory` reached.
    OutOfMemory,
    /// Passing trouble of the server (READONLY, LOADING, MISCONF, NOREPLICAS, ...): nothing done;
    /// worth another try.
    Unavailable,
    /// Anything else: a fault of ours or of the server.
    Other,
}

/// Several ops of one verb that travel together.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    /// Number of this attempt, echoed by the answer; never used twice by a client.
    pub(crate) attempt: u64,
    /// How long the store may take: past this, in server time, nothing is created or lengthened,
    /// and past this, on our clock, the call ends as unanswered.
    pub(crate) timeout: Duration,
    /// All of the same verb, at least one.
    pub(crate) ops: Vec<Op>,
}

/// A call that was answered.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    /// Taken just before the call was handed to the transport.
    pub(crate) sent: Instant,
    /// The server's clock when it ran, µs since 1970.
    pub(crate) server_now_us: u64,
    /// One per op, in order.
    pub(crate) answers: Vec<Answer>,
}

/// A call without an answer. "No answer" is never "no".
#[derive(Clone, Debug)]
pub(crate) enum NoReply {
    /// It never left this process, or the server said that it did nothing: certain.
    NotSent(Cause),
    /// Handed to the transport at `sent`: it may have run, or may yet run until the server's clock
    /// passes `deadline_us`.
    Unanswered {
        sent: Instant,
        deadline_us: u64,
        cause: Cause,
    },
    /// The server refused the whole call: certain.
    Refused(Refusal),
}

/// Why there is no answer: the text, without secrets, of what went wrong below.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Cause(pub(crate) Arc<str>);

impl Cause {
    pub(crate) fn new(text: impl Into<Arc<str>>) -> Self {
        Self(text.into())
    }
}

/// How a store is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    /// Not connected yet.
    Connecting,
    /// Connected; `generation` counts connections, each being another, `server` the servers that were
    /// found at their ends, a restarted one being another.
    Up { generation: u64, server: u64 },
    /// Lost since; text says why.
    Down { since: Instant, why: Arc<str> },
    /// Closed by us, for good.
    Closed,
}

/// The server at the other end of the connection, and what it may have forgotten.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Another one after each start; `None` if it does not tell.
    pub(crate) id: Option<Arc<str>>,
    /// When it was asked, and how long it had remembered everything by then, at least.
    pub(crate) asked: Instant,
    pub(crate) age: Duration,
}

impl Run {
    /// Whether it has forgotten nothing for `length` before `at`.
    pub(crate) fn remembers(&self, length: Duration, at: Instant) -> bool {
        let since = at.saturating_duration_since(self.asked);
        let before = self.asked.saturating_duration_since(at);
        self.age.saturating_add(since).saturating_sub(before) >= length
    }
}

/// Who holds a name, as the store tells it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Snapshot {
    /// Fields of the hash, in no order: owner (text) and count.
    pub(crate) holders: Vec<(String, u32)>,
    /// Of a read/write lock: `read` or `write`.
    pub(crate) mode: Option<String>,
    /// What is left of the leases of readers who have one of their own; dead ones are not among `holders`.
    pub(crate) readers: BTreeMap<String, Option<u64>>,
    /// `None`: no expiry.
    pub(crate) remaining_ms: Option<u64>,
    pub(crate) token: Option<u64>,
    /// Processes listening for the release, or those in the queue of a fair lock; `None` where an ACL
    /// hides it.
    pub(crate) waiting: Option<u64>,
    /// What the holder's client says of itself (`label`, `host`, `pid`); empty where unknown.
    pub(crate) holder_info: BTreeMap<String, String>,
}

impl Snapshot {
    /// The client of the first holder, if it is one of ours.
    pub(crate) fn holding_client(&self) -> Option<Uuid> {
        let (owner, _) = self.holders.first()?;
        let owner = owner.strip_suffix(":write").unwrap_or(owner);
        owner.rsplit_once(':')?.0.parse().ok()
    }
}

/// What a client believes, and how its waiters fare.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(
    not(feature = "testing"),
    expect(dead_code, reason = "read by a simulation")
)]
pub(crate) enum Belief<'a> {
    /// A hold is held from now on, until then unless there is more to come.
    Claimed {
        name: &'a Arc<str>,
        owner: OwnerId,
        token: u64,
        deadline: Instant,
    },
    Prolonged {
        owner: OwnerId,
        deadline: Instant,
    },
    Lost {
        owner: OwnerId,
        reason: LossReason,
    },
    /// Its last level was left.
    Left {
        owner: OwnerId,
    },
    /// Its last level was left, and it goes on under this owner id: somebody else of this client may claim it.
    Passed {
        owner: OwnerId,
    },
    /// Somebody stands in line.
    Joined {
        kind: Kind,
        name: &'a Arc<str>,
        place: u64,
    },
    /// He was served, or left.
    Departed {
        kind: Kind,
        name: &'a Arc<str>,
        place: u64,
        served: bool,
    },
}

/// A place where holds live.
pub(crate) trait Store: fmt::Debug + Send + Sync + 'static {
    /// Completes when a call could be sent, or when a call of this `timeout` would have waited long
    /// enough for that; `None` if it can be sent at once.
    fn ready(&self, timeout: Duration) -> Option<BoxFuture<()>>;

    /// Does the ops of one call, now or not at all: [`ready`](Self::ready) is what waits. Dropping the
    /// future does not recall them.
    fn submit(&self, call: Call) -> BoxFuture<Result<Reply, NoReply>>;

    /// Listens to a channel; dropping the subscription ends it.
    fn subscribe(&self, channel: &Channel) -> Subscription;

    /// What is there now. Reads only.
    fn inspect(
        &self,
        kind: Kind,
        name: &Arc<str>,
        timeout: Duration,
    ) -> BoxFuture<Result<Snapshot, NoReply>>;

    /// Writes what this client says of itself, to be read by `inspect` for `ttl`. Best effort.
    fn announce(&self, info: BTreeMap<String, String>, ttl: Duration) -> BoxFuture<()>;

    /// Takes the announcement back. Best effort.
    fn retract(&self) -> BoxFuture<()>;

    /// State of the connection, and each change of it.
    fn health(&self) -> watch::Receiver<Health>;

    /// The server connected to now, which is the one that gave the answers that have come, or a later one.
    fn run(&self) -> Option<Run>;

    /// Told what this client believes. Only a simulation listens.
    fn believes(&self, _belief: Belief<'_>) {}

    /// Ends the connections; never hangs. What is not answered by then stays unanswered.
    fn close(&self);
}
