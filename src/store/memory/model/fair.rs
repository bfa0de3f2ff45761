//! The fair lock: who holds it, as of the plain lock, and the queue before it.
//!
//! A waiter stands in three places, as in Redis: the list, the deadlines that Redisson's clients go by,
//! and the beats by which ours are known to be alive. Entries can be missing in each of them, where
//! somebody else took them away.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::{Now, State, Value, already_granted, check_use, conflict, next_token};
use crate::bug::{Bug, seeded};
use crate::kind::Kind;
use crate::store::{Answer, Channel, Op, OwnerId, Refusal, Stay, TokenRule, Verb};

/// The queue before one fair lock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Queue {
    /// Owner ids, the next one first.
    pub(crate) list: Typed<VecDeque<String>>,
    /// When each counts as dead for Redisson's clients, ms.
    pub(crate) deadlines: Typed<Times>,
    /// Until when each of ours is alive, ms.
    pub(crate) beats: Typed<Times>,
    /// When the beats are forgotten, ms.
    pub(crate) beats_expire_ms: Option<u64>,
}

pub(crate) type Times = BTreeMap<String, u64>;

/// What is under one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Typed<T> {
    /// As it should be; there is no key if it is empty.
    Proper(T),
    /// Another type.
    #[cfg_attr(not(test), expect(dead_code, reason = "only a test puts one there"))]
    Other,
}

impl<T: Default> Default for Typed<T> {
    fn default() -> Self {
        Self::Proper(T::default())
    }
}

impl<T> Typed<T> {
    /// What is there, if it is as it should be.
    #[cfg(test)]
    pub(crate) fn proper(&self) -> Option<&T> {
        match self {
            Self::Proper(value) => Some(value),
            Self::Other => None,
        }
    }
}

/// Does what differs from the plain lock; `None`: nothing does.
pub(super) fn apply(state: &mut State, now: &Now, op: &Op) -> Option<(Answer, Option<Channel>)> {
    let fair = op.kind == Kind::Fair;
    let name = &op.name;
    Some(match &op.verb {
        Verb::Acquire {
            owner,
            count: 1,
            lease_ms,
            token,
        } if fair => with_queue(state, now, name, |state, queue| {
            take(state, queue, now, name, *owner, *lease_ms, *token)
        }),
        Verb::Enqueue {
            owner,
            lease_ms,
            token,
            stay,
        } => with_queue(state, now, name, |state, queue| {
            enqueue(state, queue, now, name, *owner, *lease_ms, *token, *stay)
        }),
        Verb::Beat { owner, stay } => with_queue(state, now, name, |state, queue| {
            beat(state, queue, now, name, *owner, *stay)
        }),
        Verb::Release {
            owner,
            count: 0,
            also,
        } if fair => with_queue(state, now, name, |state, queue| {
            let answer = super::release(state, name, *owner, *also);
            let ended = matches!(answer, Answer::Released { .. });
            let free = !state.keys.contains_key(name);
            Ok((answer, queue.depart(now, &owner.to_string(), ended, free)))
        }),
        Verb::ForceRelease { owner } if fair => with_queue(state, now, name, |state, queue| {
            let answer = super::force_release(state, name, owner);
            if answer == Answer::Nothing {
                return Ok((answer, None));
            }
            let free = !state.keys.contains_key(name);
            Ok((answer, queue.depart(now, owner, true, free)))
        }),
        _ => return None,
    })
}

/// An answer, and who is told that it is his turn.
type Done = Result<(Answer, Option<String>), Refusal>;

fn with_queue(
    state: &mut State,
    now: &Now,
    name: &Arc<str>,
    work: impl FnOnce(&mut State, &mut Queue) -> Done,
) -> (Answer, Option<Channel>) {
    let mut queue = state.take_queue(name, now.ms);
    let done = work(state, &mut queue);
    state.put_queue(name, queue);
    match done {
        Ok((answer, told)) => {
            let told = told.filter(|_| !seeded(Bug::QueueNotTold));
            let channel = told.map(|owner| Channel::Fair(Arc::clone(name), owner.into()));
            (answer, channel)
        }
        Err(refusal) => (Answer::Refused(refusal), None),
    }
}

/// Acquire, count 1: without waiting.
fn take(
    state: &mut State,
    queue: &mut Queue,
    now: &Now,
    name: &Arc<str>,
    owner: OwnerId,
    lease_ms: u64,
    rule: TokenRule,
) -> Done {
    let holder = holder(state, now, name, owner, lease_ms, rule)?;
    if let Holder::Itself(granted) = holder {
        return Ok((granted, None));
    }
    queue.check()?;
    if now.late {
        return Ok((Answer::Late, None));
    }
    if let Holder::Another(remaining_ms) = holder {
        return Ok((Answer::Taken { remaining_ms }, None));
    }
    let first = queue.first_alive(now, None);
    if let Some(head) = first.who.filter(|_| !seeded(Bug::QueueOvertaken)) {
        let answer = Answer::Taken {
            remaining_ms: first.ends_ms.map(|at| at - now.ms),
        };
        return Ok((answer, first.skipped.then_some(head)));
    }
    let granted = grant(state, now, name, owner, lease_ms, rule)?;
    Ok((granted, None))
}

#[expect(clippy::too_many_arguments, reason = "all that an op says")]
fn enqueue(
    state: &mut State,
    queue: &mut Queue,
    now: &Now,
    name: &Arc<str>,
    owner: OwnerId,
    lease_ms: u64,
    rule: TokenRule,
    stay: Stay,
) -> Done {
    let holder = holder(state, now, name, owner, lease_ms, rule)?;
    if let Holder::Itself(granted) = holder {
        return Ok((granted, None));
    }
    queue.check()?;
    if now.late {
        return Ok((Answer::Late, None));
    }
    let owner_id = owner;
    let owner = owner.to_string();
    let mut first = queue.first_alive(now, Some(&owner));
    let its_turn = first.who.as_ref().is_none_or(|first| *first == owner);
    let free = matches!(holder, Holder::Nobody);
    if free && (its_turn || seeded(Bug::QueueOvertaken)) {
        let granted = grant(state, now, name, owner_id, lease_ms, rule)?;
        if first.who.is_some() && its_turn {
            queue.list().pop_front();
        }
        queue.forget(&owner);
        queue.greet_next(now.after(lease_ms).saturating_add(stay.wait_ms));
        return Ok((granted, None));
    }
    queue.mend(now, &mut first, &owner, stay);
    let stands = first.who.as_ref() == Some(&owner) || queue.has(&owner);
    // Entries are missing: it may be in the list all the same.
    let known = queue.deadlines().contains_key(&owner) || queue.beats().contains_key(&owner);
    if !stands && (known || queue.list().len() > queue.deadlines().len()) {
        queue.list().retain(|other| *other != owner);
    }
    queue.keep(now, &owner, stay);
    if !stands || seeded(Bug::QueuedTwice) {
        queue.list().push_back(owner.clone());
    }
    Ok(queued(now, &owner, &holder, first))
}

fn beat(
    state: &mut State,
    queue: &mut Queue,
    now: &Now,
    name: &Arc<str>,
    owner: OwnerId,
    stay: Stay,
) -> Done {
    if let Some(super::Key {
        value: Value::Other,
        ..
    }) = state.keys.get(name)
    {
        return Err(conflict("the key is no hash"));
    }
    queue.check()?;
    let owner = owner.to_string();
    if !queue.has(&owner) {
        return Ok((state.gone(name), None));
    }
    if now.late {
        return Ok((Answer::Late, None));
    }
    let mut first = queue.first_alive(now, Some(&owner));
    queue.mend(now, &mut first, &owner, stay);
    queue.keep(now, &owner, stay);
    let holder = match state.keys.get(name) {
        Some(key) => Holder::Another(now.left(key.expires_ms)),
        None => Holder::Nobody,
    };
    Ok(queued(now, &owner, &holder, first))
}

/// Who has the lock, as one owner sees it.
enum Holder {
    Nobody,
    /// This one, as an earlier copy found.
    Itself(Answer),
    /// With what is left of his lease.
    Another(Option<u64>),
}

fn holder(
    state: &State,
    now: &Now,
    name: &Arc<str>,
    owner: OwnerId,
    lease_ms: u64,
    rule: TokenRule,
) -> Result<Holder, Refusal> {
    let Some(key) = state.keys.get(name) else {
        return Ok(Holder::Nobody);
    };
    let Value::Hash(fields) = &key.value else {
        return Err(conflict("the key is no hash"));
    };
    if fields.contains_key(&owner.to_string()) {
        let granted = already_granted(state, now, name, lease_ms, rule)?;
        return Ok(Holder::Itself(granted));
    }
    check_use(fields)?;
    Ok(Holder::Another(now.left(key.expires_ms)))
}

fn grant(
    state: &mut State,
    now: &Now,
    name: &Arc<str>,
    owner: OwnerId,
    lease_ms: u64,
    rule: TokenRule,
) -> Result<Answer, Refusal> {
    let token = next_token(state, now, name, lease_ms, rule)?;
    let fields = BTreeMap::from([(owner.to_string(), "1".to_owned())]);
    state.put(name, Value::Hash(fields), Some(now.after(lease_ms)));
    Ok(Answer::Granted {
        token,
        remaining_ms: lease_ms,
    })
}

/// The first in the queue who is alive.
struct First {
    who: Option<String>,
    /// Until when; `None`: nobody knows.
    ends_ms: Option<u64>,
    /// Dead ones were before it.
    skipped: bool,
}

/// The answer to one who is in the queue. `first` was the first before this owner came.
fn queued(now: &Now, owner: &str, holder: &Holder, first: First) -> (Answer, Option<String>) {
    let other = first.who.filter(|first| first != owner);
    let answer = |first, remaining_ms| Answer::Queued {
        first,
        remaining_ms,
    };
    match (holder, other) {
        (Holder::Another(left), other) => {
            let remaining_ms = left.map(|left| left.max(1));
            (answer(other.is_none(), remaining_ms), None)
        }
        (_, None) => (answer(true, Some(0)), None),
        (_, Some(other)) => {
            let ends_ms = first.ends_ms.unwrap_or_default();
            let remaining_ms = Some(ends_ms.saturating_sub(now.ms).max(1));
            (answer(false, remaining_ms), first.skipped.then_some(other))
        }
    }
}

impl Queue {
    /// Refuses a key that is of another type.
    fn check(&self) -> Result<(), Refusal> {
        match self {
            Self {
                list: Typed::Proper(_),
                deadlines: Typed::Proper(_),
                beats: Typed::Proper(_),
                ..
            } => Ok(()),
            _ => Err(conflict("a key of the queue is of another type")),
        }
    }

    fn list(&mut self) -> &mut VecDeque<String> {
        proper(&mut self.list)
    }

    fn deadlines(&mut self) -> &mut Times {
        proper(&mut self.deadlines)
    }

    fn beats(&mut self) -> &mut Times {
        proper(&mut self.beats)
    }

    fn first_alive(&mut self, now: &Now, itself: Option<&str>) -> First {
        let mut skipped = false;
        loop {
            let head = self.list().front().cloned();
            let Some(head) = head else {
                return First {
                    who: None,
                    ends_ms: None,
                    skipped,
                };
            };
            let beat = self.beats().get(&head).copied();
            let ends_ms = beat.or_else(|| self.deadlines().get(&head).copied());
            let alive = ends_ms.is_none_or(|at| at > now.ms) || seeded(Bug::DeadNotSkipped);
            if alive || itself == Some(&head) {
                return First {
                    who: Some(head),
                    ends_ms: ends_ms.map(|at| at.max(now.ms)),
                    skipped,
                };
            }
            self.forget(&head);
            self.list().pop_front();
            skipped = true;
        }
    }

    /// Takes its deadline and its beat away; whether there was either.
    fn forget(&mut self, owner: &str) -> bool {
        let deadline = self.deadlines().remove(owner);
        let beat = self.beats().remove(owner);
        // A key without members is gone, and its expiry with it.
        if self.beats().is_empty() {
            self.beats_expire_ms = None;
        }
        deadline.or(beat).is_some()
    }

    /// One who is first and of whom nobody knows until when gets a deadline, or it would stay for ever.
    fn mend(&mut self, now: &Now, first: &mut First, itself: &str, stay: Stay) {
        if let (Some(who), None) = (&first.who, first.ends_ms)
            && who != itself
        {
            let ends_ms = now.after(stay.wait_ms);
            self.deadlines().insert(who.clone(), ends_ms);
            first.ends_ms = Some(ends_ms);
        }
    }

    /// Whether who has a deadline is in the list as well: looked for only where entries are missing.
    fn has(&mut self, owner: &str) -> bool {
        self.deadlines().contains_key(owner)
            && (self.list().len() >= self.deadlines().len()
                || self.list().iter().any(|other| other == owner))
    }

    /// Keeps a place for `beat_ms` more. Redisson's clients subtract their own wait from all deadlines when
    /// they take the lock, so ours has one wait for each of theirs on top.
    fn keep(&mut self, now: &Now, owner: &str, stay: Stay) {
        let others = |times: &Times| times.len() - usize::from(times.contains_key(owner));
        let theirs = others(self.deadlines()).saturating_sub(others(self.beats()));
        self.beats()
            .insert(owner.to_owned(), now.after(stay.beat_ms));
        let waits = stay.wait_ms.saturating_mul(1 + theirs as u64);
        let before = self.deadlines().get(owner).copied();
        let ends_ms = before.unwrap_or(0).max(now.after(waits));
        self.deadlines().insert(owner.to_owned(), ends_ms);
        let lasts_until = ends_ms.max(now.after(stay.beat_ms));
        self.beats_expire_ms = self.beats_expire_ms.max(Some(lasts_until));
    }

    /// One of Redisson's that is first from now on has the time it would have if it came now.
    fn greet_next(&mut self, least_ms: u64) {
        let Some(head) = self.list().front().cloned() else {
            return;
        };
        if !self.beats().contains_key(&head) {
            let deadline = self.deadlines().entry(head).or_default();
            *deadline = (*deadline).max(least_ms);
        }
    }

    /// Takes the owner out; who is to be told, if the lock is free. `ended`: a hold has just ended.
    fn depart(&mut self, now: &Now, owner: &str, ended: bool, free: bool) -> Option<String> {
        self.check().ok()?;
        if !seeded(Bug::PlaceKept) {
            if self.forget(owner) {
                if let Some(at) = self.list().iter().rposition(|other| other == owner) {
                    self.list().remove(at);
                }
            } else if !ended {
                return None;
            }
        }
        if free {
            self.first_alive(now, None).who
        } else {
            None
        }
    }

    fn is_empty(&self) -> bool {
        let empty =
            |times: &Typed<Times>| matches!(times, Typed::Proper(times) if times.is_empty());
        let nobody = matches!(&self.list, Typed::Proper(list) if list.is_empty());
        nobody && empty(&self.deadlines) && empty(&self.beats)
    }
}

/// What is there. Asked only after [`Queue::check`], so that nothing is replaced.
fn proper<T: Default>(typed: &mut Typed<T>) -> &mut T {
    loop {
        match typed {
            Typed::Proper(value) => return value,
            Typed::Other => *typed = Typed::default(),
        }
    }
}

impl State {
    /// The queue of `name`, without what expired, to be put back.
    pub(crate) fn take_queue(&mut self, name: &Arc<str>, now_ms: u64) -> Queue {
        let mut queue = self.queues.remove(name).unwrap_or_default();
        if queue.beats_expire_ms.is_some_and(|at| at < now_ms) {
            queue.beats = Typed::default();
            queue.beats_expire_ms = None;
        }
        queue
    }

    pub(crate) fn put_queue(&mut self, name: &Arc<str>, mut queue: Queue) {
        // A key without members is gone, and its expiry with it.
        if matches!(&queue.beats, Typed::Proper(beats) if beats.is_empty()) {
            queue.beats_expire_ms = None;
        }
        if !queue.is_empty() {
            self.queues.insert(Arc::clone(name), queue);
        }
    }

    /// Who stands in the queue of `name`.
    pub(crate) fn queue(&self, name: &Arc<str>) -> Vec<String> {
        match self.queues.get(name).map(|queue| &queue.list) {
            Some(Typed::Proper(list)) => list.iter().cloned().collect(),
            _ => Vec::new(),
        }
    }
}
