//! Histories made by hand, for the judges' own tests: a small honest server, and means to lie.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold::testing::{Answered, Did, Done, HoldId, Note, Owners, Ran, Record, What};
use leasehold::{LockKind, LossReason};

use super::{Conditions, check};

/// A history in the making. Times are in milliseconds.
pub struct Tale {
    records: Vec<Record>,
    now: Duration,
    name: Arc<str>,
    locks: BTreeMap<Arc<str>, Lock>,
    attempts: u64,
    tokens: u64,
    copy: bool,
    late: bool,
    other: Option<HoldId>,
    kind: LockKind,
}

#[derive(Clone, Default)]
struct Lock {
    owners: Owners,
    ends: Option<Duration>,
}

impl Tale {
    pub fn new() -> Self {
        Self {
            records: Vec::new(),
            now: Duration::ZERO,
            name: Arc::from("job"),
            locks: BTreeMap::new(),
            attempts: 0,
            tokens: 0,
            copy: false,
            late: false,
            other: None,
            kind: LockKind::Plain,
        }
    }

    /// What follows is asked on this side of a read/write lock.
    pub fn side(mut self, kind: LockKind) -> Self {
        self.kind = kind;
        self
    }

    /// What follows happens then.
    pub fn at(mut self, now_ms: u64) -> Self {
        self.now = ms(now_ms);
        self
    }

    /// What follows is about this lock.
    pub fn on(mut self, name: &str) -> Self {
        self.name = Arc::from(name);
        self
    }

    /// The next op was sent before, and runs only now, or once more.
    pub fn copy(mut self) -> Self {
        self.copy = true;
        self
    }

    /// The next op was sent long ago, and arrives past its deadline.
    pub fn late(mut self) -> Self {
        self.late = true;
        self.copy()
    }

    pub fn push(mut self, what: What) -> Self {
        let at = self.now;
        self.records.push(Record { at, what });
        self
    }

    /// A request that is granted, with a lease of a second; the token is the next one.
    pub fn granted(mut self, client: usize, hold: HoldId) -> Self {
        self.tokens += 1;
        let token = self.tokens;
        self.granted_as(client, hold, token)
    }

    pub fn granted_as(self, client: usize, hold: HoldId, token: u64) -> Self {
        let answer = Answered::Granted(token);
        self.does(
            client,
            Done::Acquire,
            hold,
            1,
            answer,
            &[(hold, 1)],
            Some(LEASE),
        )
    }

    /// The lock goes from one hold to the next, with a new token and a new lease.
    pub fn hand_off(mut self, client: usize, from: HoldId, to: HoldId) -> Self {
        self.tokens += 1;
        self.other = Some(from);
        let answer = Answered::Granted(self.tokens);
        self.does(
            client,
            Done::HandOff,
            to,
            1,
            answer,
            &[(to, 1)],
            Some(LEASE),
        )
    }

    /// A request that finds the lock taken.
    pub fn taken(self, client: usize, hold: HoldId) -> Self {
        self.unchanged(client, Done::Acquire, hold, 1, Answered::Taken)
    }

    /// Another level is entered, or an inner one left; the lease lasts as long again when entered.
    pub fn depth(self, client: usize, hold: HoldId, count: u32) -> Self {
        let entered = self.count(hold) < count;
        let (verb, lease) = if entered {
            (Done::Acquire, Some(LEASE))
        } else {
            (Done::Release, None)
        };
        self.does(
            client,
            verb,
            hold,
            count,
            Answered::Done,
            &[(hold, count)],
            lease,
        )
    }

    /// A renewal that finds its hold.
    pub fn renewed(self, client: usize, hold: HoldId) -> Self {
        let count = self.count(hold);
        let owners = [(hold, count)];
        self.does(
            client,
            Done::Renew,
            hold,
            count,
            Answered::Done,
            &owners,
            Some(LEASE),
        )
    }

    /// The last release, which finds its hold.
    pub fn released(self, client: usize, hold: HoldId) -> Self {
        self.does(client, Done::Release, hold, 0, Answered::Done, &[], None)
    }

    /// An op that changes nothing.
    pub fn unchanged(
        self,
        client: usize,
        verb: Done,
        hold: HoldId,
        count: u32,
        answer: Answered,
    ) -> Self {
        let owners = self.lock().owners;
        self.does(client, verb, hold, count, answer, &owners, None)
    }

    /// An op that is sent and runs, whatever it does to the owners. The lease then ends after `lease`,
    /// or when it did before.
    #[expect(
        clippy::too_many_arguments,
        reason = "an op, its answer and its effect"
    )]
    pub fn does(
        mut self,
        client: usize,
        verb: Done,
        hold: HoldId,
        count: u32,
        answer: Answered,
        owners: &[(HoldId, u32)],
        lease: Option<Duration>,
    ) -> Self {
        self.attempts += 1;
        let attempt = self.attempts;
        let did = Did {
            other: self.other.take(),
            ..self.did(verb, hold, count)
        };
        let sent = What::Sent {
            client,
            attempt,
            ops: vec![did.clone()],
        };
        let mut lock = self.lock();
        let before = std::mem::replace(&mut lock.owners, owners.to_vec());
        if let Some(lease) = lease {
            lock.ends = Some(self.now + lease);
        }
        if owners.is_empty() {
            lock.ends = None;
        }
        let left = lock.ends.map(|ends| ends.saturating_sub(self.now));
        let ran = Ran {
            client,
            attempt,
            did,
            late: std::mem::take(&mut self.late),
            answer,
            change: (before != owners).then(|| (before, owners.to_vec())),
            left_ms: left.and_then(|left| u64::try_from(left.as_millis()).ok()),
        };
        self.locks.insert(Arc::clone(&self.name), lock);
        let ran = What::Ran(ran);
        if std::mem::take(&mut self.copy) {
            self.push(ran)
        } else {
            self.push(sent).push(ran)
        }
    }

    /// A request that never arrives.
    pub fn sent(mut self, client: usize, verb: Done, hold: HoldId, count: u32) -> Self {
        self.attempts += 1;
        let (attempt, did) = (self.attempts, self.did(verb, hold, count));
        self.push(What::Sent {
            client,
            attempt,
            ops: vec![did],
        })
    }

    /// The holder is told "held", until then, with the token granted last.
    pub fn claimed(self, client: usize, hold: HoldId, until_ms: u64) -> Self {
        let token = self.tokens;
        self.claimed_as(client, hold, until_ms, token)
    }

    pub fn claimed_as(self, client: usize, hold: HoldId, until_ms: u64, token: u64) -> Self {
        let name = Arc::clone(&self.name);
        self.push(What::Claimed {
            client,
            name,
            hold,
            token,
            until: ms(until_ms),
        })
    }

    pub fn prolonged(self, hold: HoldId, until_ms: u64) -> Self {
        let until = ms(until_ms);
        self.push(What::Prolonged { hold, until })
    }

    pub fn lost(self, hold: HoldId, reason: LossReason) -> Self {
        self.push(What::Lost { hold, reason })
    }

    pub fn passed(self, hold: HoldId) -> Self {
        self.push(What::Passed { hold })
    }

    pub fn left(self, hold: HoldId) -> Self {
        self.push(What::Left { hold })
    }

    /// The key goes without an op: its lease is over, or somebody took it.
    pub fn vanished(mut self, expired: bool) -> Self {
        let (name, owners) = (Arc::clone(&self.name), self.lock().owners);
        self.locks.remove(&self.name);
        self.push(What::Vanished {
            name,
            owners,
            expired,
        })
    }

    pub fn joined(self, client: usize, place: u64) -> Self {
        let name = Arc::clone(&self.name);
        self.push(What::Joined {
            client,
            kind: LockKind::Plain,
            name,
            place,
        })
    }

    pub fn departed(self, client: usize, place: u64, served: bool) -> Self {
        let name = Arc::clone(&self.name);
        self.push(What::Departed {
            client,
            kind: LockKind::Plain,
            name,
            place,
            served,
        })
    }

    pub fn wrote(self, token: u64) -> Self {
        let name = Arc::clone(&self.name);
        self.push(What::Note(Note::Wrote { name, token }))
    }

    /// Who is said to break a promise, if this was a quiet run.
    pub fn caught(&self) -> Vec<&'static str> {
        self.caught_under(|_| {})
    }

    /// Who is said to break a promise, under other conditions than those of a quiet run.
    pub fn caught_under(&self, set: impl FnOnce(&mut Conditions)) -> Vec<&'static str> {
        let mut conditions = Conditions::quiet(self.now);
        set(&mut conditions);
        let mut who: Vec<_> = check(&self.records, &conditions)
            .iter()
            .map(|violation| violation.checker)
            .collect();
        who.dedup();
        who
    }

    pub fn records(self) -> Vec<Record> {
        self.records
    }

    fn did(&self, verb: Done, hold: HoldId, count: u32) -> Did {
        Did {
            kind: self.kind,
            name: Arc::clone(&self.name),
            verb,
            hold,
            count,
            other: None,
        }
    }

    fn lock(&self) -> Lock {
        self.locks.get(&self.name).cloned().unwrap_or_default()
    }

    fn count(&self, hold: HoldId) -> u32 {
        let owners = self.lock().owners;
        let own = owners.iter().find(|(other, _)| *other == hold);
        own.map_or(0, |(_, count)| *count)
    }
}

/// A run in which faults were possible, and nothing is known to have been kept.
pub fn stormy(conditions: &mut Conditions) {
    conditions.quiet = false;
    conditions.memory_kept = false;
    conditions.counters_kept = false;
    conditions.clocks_sane = false;
    conditions.healed_from = conditions.end;
}

/// A run with faults of the network, no others.
pub fn rough(conditions: &mut Conditions) {
    conditions.quiet = false;
    conditions.healed_from = conditions.end;
}

pub fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const LEASE: Duration = Duration::from_secs(1);
