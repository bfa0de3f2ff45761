//! The table of operations as a pure function: what both stores do.
//!
//! This is the specification. The Lua scripts do the same, and `store::compare` checks that they
//! do. Times are in the clock of the store; a lease ends when its millisecond is over, as in Redis.

pub(crate) mod fair;
mod read_write;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::bug::{Bug, seeded};
use crate::kind::Kind;
use crate::store::{
    Answer, Channel, Instead, Op, OwnerId, Refusal, RefusalKind, Snapshot, TokenRule, Verb,
};

/// Does `op` at `now_us`. The channel, if any, is that of a lock which became free: wake who waits.
///
/// `deadline_us` is the end of the request: past it nothing is created, lengthened or counted.
pub(crate) fn apply(
    state: &mut State,
    now_us: u64,
    deadline_us: u64,
    op: &Op,
) -> (Answer, Option<Channel>) {
    let now = Now {
        us: now_us,
        ms: now_us / 1000,
        late: now_us > deadline_us && !seeded(Bug::LateAcquire),
    };
    state.purge(now.ms, PURGE_STEP);
    state.forget_if_expired(&op.name, now.ms);
    if let Verb::Remember { lease_ms, token } = op.verb {
        let answer = remember(state, &now, &op.name, lease_ms, token);
        return (answer.unwrap_or_else(Answer::Refused), None);
    }
    if let Kind::Read | Kind::Write = op.kind {
        return read_write::apply(state, &now, op);
    }
    if let Some(done) = fair::apply(state, &now, op) {
        return done;
    }

    let name = &op.name;
    let answer = match &op.verb {
        Verb::Acquire {
            owner,
            count: 1,
            lease_ms,
            token,
        } => take(state, &now, name, *owner, *lease_ms, *token).unwrap_or_else(Answer::Refused),
        Verb::Acquire {
            owner,
            count,
            lease_ms,
            ..
        } => nest(state, &now, name, *owner, *count, *lease_ms),
        Verb::Release {
            owner,
            count: 0,
            also,
        } => release(state, name, *owner, *also),
        Verb::Release { owner, count, .. } => leave(state, &now, name, *owner, *count),
        Verb::Renew {
            owner,
            count,
            lease_ms,
        } => renew(state, &now, name, *owner, *count, *lease_ms),
        Verb::HandOff {
            from,
            to,
            lease_ms,
            token,
        } => hand_off(state, &now, name, *from, *to, *lease_ms, *token)
            .unwrap_or_else(Answer::Refused),
        Verb::ForceRelease { owner } => force_release(state, name, owner),
        Verb::Downgrade { .. } | Verb::Upgrade { .. } => state.gone(name),
        // Done above.
        Verb::Enqueue { .. } | Verb::Beat { .. } | Verb::Remember { .. } => Answer::Nothing,
    };
    let removed = matches!(answer, Answer::Released { .. } | Answer::Removed);
    let freed = removed && !state.keys.contains_key(name);
    (answer, freed.then(|| op.kind.channel(name)))
}

/// Acquire, count 1.
fn take(
    state: &mut State,
    now: &Now,
    name: &Arc<str>,
    owner: OwnerId,
    lease_ms: u64,
    rule: TokenRule,
) -> Result<Answer, Refusal> {
    if seeded(Bug::CountByIncrement) && state.holds(name, &owner) {
        let count = state.count(name, &owner);
        state.set_count(name, &owner, count + 1);
    }
    match state.keys.get(name) {
        Some(Key {
            value: Value::Other,
            ..
        }) => return Err(conflict("the key is no hash")),
        Some(Key {
            value: Value::Hash(fields),
            expires_ms,
        }) => {
            if fields.contains_key(&owner.to_string()) {
                return already_granted(state, now, name, lease_ms, rule);
            }
            check_use(fields)?;
            return Ok(Answer::Taken {
                remaining_ms: now.left(*expires_ms),
            });
        }
        None => {}
    }
    if now.late {
        return Ok(Answer::Late);
    }
    let token = next_token(state, now, name, lease_ms, rule)?;
    let fields = BTreeMap::from([(owner.to_string(), "1".to_owned())]);
    state.put(name, Value::Hash(fields), Some(now.after(lease_ms)));
    Ok(Answer::Granted {
        token,
        remaining_ms: lease_ms,
    })
}

/// Acquire, count 2 and more.
fn nest(
    state: &mut State,
    now: &Now,
    name: &Arc<str>,
    owner: OwnerId,
    count: u32,
    lease_ms: u64,
) -> Answer {
    if !state.holds(name, &owner) {
        if seeded(Bug::NestedRecreates) && !state.keys.contains_key(name) {
            return state.recreate(name, now, owner, lease_ms);
        }
        return state.gone(name);
    }
    if now.late {
        return Answer::Late;
    }
    let count = if seeded(Bug::CountByIncrement) {
        state.count(name, &owner) + 1
    } else {
        count
    };
    state.set_count(name, &owner, count);
    Answer::Held {
        remaining_ms: state.lengthen(name, now, lease_ms),
    }
}

/// Release, count 0: removes, however late.
fn release(state: &mut State, name: &Arc<str>, owner: OwnerId, also: Option<OwnerId>) -> Answer {
    if seeded(Bug::ReleaseWithoutOwnerCheck) && state.keys.contains_key(name) {
        state.delete(name);
        return Answer::Released { heard: 0 };
    }
    if seeded(Bug::ReleaseInsistsOnCount) && state.count(name, &owner) > 1 {
        return Answer::Gone(Instead::Taken);
    }
    if seeded(Bug::CountByIncrement) && state.count(name, &owner) > 1 {
        let count = state.count(name, &owner);
        state.set_count(name, &owner, count - 1);
        return Answer::StillHeld { remaining_ms: 0 };
    }
    let mut removed = state.remove(name, &owner.to_string());
    if let Some(also) = also {
        removed |= state.remove(name, &also.to_string());
    }
    if removed {
        Answer::Released { heard: 0 }
    } else {
        state.gone(name)
    }
}

/// Release, count 1 and more: the deadline stays as it is.
fn leave(state: &mut State, now: &Now, name: &Arc<str>, owner: OwnerId, count: u32) -> Answer {
    if !state.holds(name, &owner) {
        return state.gone(name);
    }
    if now.late {
        return Answer::Late;
    }
    state.set_count(name, &owner, count);
    let expires_ms = state.keys.get(name).and_then(|key| key.expires_ms);
    Answer::StillHeld {
        // Without expiry there is nothing to promise; the next renewal gives it one.
        remaining_ms: now.left(expires_ms).unwrap_or(0),
    }
}

fn renew(
    state: &mut State,
    now: &Now,
    name: &Arc<str>,
    owner: OwnerId,
    count: u32,
    lease_ms: u64,
) -> Answer {
    if !state.holds(name, &owner) {
        if seeded(Bug::RenewalThatCreates) && !state.keys.contains_key(name) && !now.late {
            state.recreate(name, now, owner, lease_ms);
            return Answer::Renewed {
                remaining_ms: lease_ms,
            };
        }
        return state.gone(name);
    }
    if now.late {
        return Answer::Late;
    }
    state.set_count(name, &owner, count);
    Answer::Renewed {
        remaining_ms: state.lengthen(name, now, lease_ms),
    }
}

/// From one owner to another; never creates, never overwrites.
fn hand_off(
    state: &mut State,
    now: &Now,
    name: &Arc<str>,
    from: OwnerId,
    to: OwnerId,
    lease_ms: u64,
    rule: TokenRule,
) -> Result<Answer, Refusal> {
    if state.holds(name, &to) {
        if from != to {
            // There only if an earlier copy was refused half-way.
            state.remove(name, &from.to_string());
        }
        return already_granted(state, now, name, lease_ms, rule);
    }
    let blindly = seeded(Bug::HandOffCreates);
    if !state.holds(name, &from) && !blindly {
        return Ok(state.gone(name));
    }
    if now.late && !blindly {
        return Ok(Answer::Late);
    }
    let token = match last_token(state, name)? {
        Some(last) if seeded(Bug::HandOffKeepsToken) => last,
        _ => next_token(state, now, name, lease_ms, rule)?,
    };
    if blindly {
        state.recreate(name, now, to, lease_ms);
    }
    state.set_count(name, &to, 1);
    state.remove(name, &from.to_string());
    state.set_expiry(name, now.after(lease_ms));
    Ok(Answer::Granted {
        token,
        remaining_ms: lease_ms,
    })
}

/// A copy of what was done: the token it got, and what is left.
fn already_granted(
    state: &State,
    now: &Now,
    name: &Arc<str>,
    lease_ms: u64,
    rule: TokenRule,
) -> Result<Answer, Refusal> {
    let last = last_token(state, name)?;
    let expires_ms = state.keys.get(name).and_then(|key| key.expires_ms);
    Ok(Answer::Granted {
        token: last.map_or_else(
            || now.us.max(rule.floor.saturating_add(1)),
            |last| last.saturating_sub(rule.reserve),
        ),
        remaining_ms: now.left(expires_ms).unwrap_or(lease_ms),
    })
}

fn force_release(state: &mut State, name: &Arc<str>, owner: &str) -> Answer {
    if state.remove(name, owner) {
        Answer::Removed
    } else {
        Answer::Nothing
    }
}

/// The token counter's value, if there is one.
fn last_token(state: &State, name: &Arc<str>) -> Result<Option<u64>, Refusal> {
    let Some(counter) = state.counters.get(name) else {
        return Ok(None);
    };
    let text = &counter.text;
    let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let padded = text.len() > 1 && text.starts_with('0');
    match text.parse() {
        Ok(last) if plain && !padded && last < TOKEN_END => Ok(Some(last)),
        _ => Err(conflict(NO_COUNTER)),
    }
}

/// The next token, written to the counter.
fn next_token(
    state: &mut State,
    now: &Now,
    name: &Arc<str>,
    lease_ms: u64,
    rule: TokenRule,
) -> Result<u64, Refusal> {
    let last = last_token(state, name)?;
    let mut token = (last.unwrap_or(0) + 1)
        .max(now.us)
        .max(rule.floor.saturating_add(1));
    if seeded(Bug::BareCounter) {
        token = last.unwrap_or(0) + 1;
    }
    let greatest = token.saturating_add(rule.reserve);
    if greatest >= TOKEN_END {
        return Err(conflict(NO_COUNTER));
    }
    let expires_ms = match last {
        Some(last) if token == now.us && is_fresh(last, now, lease_ms, rule) => state
            .counters
            .get(name)
            .and_then(|counter| counter.expires_ms),
        _ => kept_until(state, now, name, lease_ms, rule),
    };
    state.put_counter(name, greatest.to_string(), expires_ms);
    Ok(token)
}

/// When a counter written anew ends; one that has no end keeps none.
fn kept_until(
    state: &State,
    now: &Now,
    name: &Arc<str>,
    lease_ms: u64,
    rule: TokenRule,
) -> Option<u64> {
    let counter = state.counters.get(name);
    if counter.is_some_and(|counter| counter.expires_ms.is_none()) {
        return None;
    }
    let kept_ms = rule.retention_ms?.max(lease_ms.saturating_mul(2));
    Some(now.after(kept_ms.saturating_add(kept_ms / 2)))
}

/// Remember: the counter rises to the rule's floor, or is there already.
fn remember(
    state: &mut State,
    now: &Now,
    name: &Arc<str>,
    lease_ms: u64,
    rule: TokenRule,
) -> Result<Answer, Refusal> {
    if let Some(last) = last_token(state, name)?
        && last >= rule.floor
    {
        return Ok(Answer::Remembered { token: last });
    }
    if now.late {
        return Ok(Answer::Late);
    }
    let expires_ms = kept_until(state, now, name, lease_ms, rule);
    state.put_counter(name, rule.floor.to_string(), expires_ms);
    Ok(Answer::Remembered { token: rule.floor })
}

/// Whether the counter was used before in this slice of time, a quarter of its retention: then its expiry
/// is far enough away.
fn is_fresh(last: u64, now: &Now, lease_ms: u64, rule: TokenRule) -> bool {
    let retention_ms = rule.retention_ms.unwrap_or(0);
    let slice_us = retention_ms.saturating_mul(250);
    retention_ms >= lease_ms.saturating_mul(2) && last / slice_us == now.us / slice_us
}

/// Refuses a hash that is plainly no lock of this kind. Looks at small ones only.
fn check_use(fields: &BTreeMap<String, String>) -> Result<(), Refusal> {
    if fields.len() > SMALL_HASH {
        return Ok(());
    }
    if fields.contains_key("mode") {
        return Err(conflict("the key is a read/write lock"));
    }
    let proper = fields
        .iter()
        .all(|(field, count)| is_owner(field) && is_count(count));
    if proper {
        Ok(())
    } else {
        Err(conflict("the key is a hash in other use"))
    }
}

/// `text:decimal`; a Java thread's number may be negative.
fn is_owner(field: &str) -> bool {
    field.rsplit_once(':').is_some_and(|(client, flow)| {
        let digits = flow.strip_prefix('-').unwrap_or(flow);
        let decimal = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        !client.is_empty() && decimal
    })
}

fn is_count(value: &str) -> bool {
    value.bytes().all(|byte| byte.is_ascii_digit()) && !value.is_empty() && !value.starts_with('0')
}

fn conflict(message: &str) -> Refusal {
    Refusal {
        kind: RefusalKind::Conflict,
        message: format!("CONFLICT {message}"),
    }
}

/// What is in the store.
#[derive(Clone, Debug, Default)]
pub(crate) struct State {
    keys: HashMap<Arc<str>, Key>,
    counters: HashMap<Arc<str>, Counter>,
    /// Leases of readers, by name, owner and number; `None`: without end.
    readers: BTreeMap<(Arc<str>, String, u32), Option<u64>>,
    /// Those of fair locks for which somebody waits.
    queues: HashMap<Arc<str>, fair::Queue>,
    /// Every expiry there is, the next one first.
    expiries: BTreeSet<(u64, Entry, Arc<str>)>,
}

/// The key of a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) value: Value,
    pub(crate) expires_ms: Option<u64>,
}

/// What a key holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    /// Owner ids and hold counts, if it is ours.
    Hash(BTreeMap<String, String>),
    /// Another type than a hash.
    #[cfg_attr(
        not(any(test, feature = "testing")),
        expect(dead_code, reason = "only a test puts one there")
    )]
    Other,
}

/// What is gone because its time is over.
#[cfg(feature = "testing")]
pub(crate) enum Gone {
    Lock(Arc<str>, Key),
    /// One of several who hold it.
    Reader(Arc<str>, String),
}

/// The counter of fencing tokens: text, since others may have spoiled it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Counter {
    pub(crate) text: String,
    pub(crate) expires_ms: Option<u64>,
}

impl State {
    /// The key of `name`, if it is there at `now_us`.
    pub(crate) fn key(&mut self, name: &Arc<str>, now_us: u64) -> Option<&Key> {
        self.forget_if_expired(name, now_us / 1000);
        self.keys.get(name)
    }

    /// The token counter of `name`, if it is there at `now_us`.
    pub(crate) fn counter(&mut self, name: &Arc<str>, now_us: u64) -> Option<&Counter> {
        self.forget_if_expired(name, now_us / 1000);
        self.counters.get(name)
    }

    /// Who holds `name`, and the last token.
    pub(crate) fn look(&mut self, name: &Arc<str>, now_us: u64) -> Result<Snapshot, Refusal> {
        let mut snapshot = Snapshot {
            token: self
                .counter(name, now_us)
                .and_then(|counter| counter.text.parse().ok()),
            ..Snapshot::default()
        };
        match self.key(name, now_us) {
            None => {}
            Some(Key {
                value: Value::Other,
                ..
            }) => {
                return Err(Refusal {
                    kind: RefusalKind::Conflict,
                    message: "the key is no hash".to_owned(),
                });
            }
            Some(Key {
                value: Value::Hash(fields),
                expires_ms,
            }) => {
                snapshot.mode = fields.get("mode").cloned();
                snapshot.remaining_ms = expires_ms.map(|at| at.saturating_sub(now_us / 1000));
                snapshot.holders = fields
                    .iter()
                    .filter_map(|(owner, count)| Some((owner.clone(), count.parse().ok()?)))
                    .collect();
            }
        }
        if snapshot.mode.is_some() {
            self.look_at_readers(name, now_us, &mut snapshot);
        }
        Ok(snapshot)
    }

    pub(crate) fn put(&mut self, name: &Arc<str>, value: Value, expires_ms: Option<u64>) {
        self.delete(name);
        if let Some(at) = expires_ms {
            self.expiries.insert((at, Entry::Key, Arc::clone(name)));
        }
        self.keys
            .insert(Arc::clone(name), Key { value, expires_ms });
    }

    /// The locks that have no holder in common with what `other` knows of them, by name.
    #[cfg(feature = "testing")]
    pub(crate) fn unknown_to(&self, other: &Self) -> BTreeMap<Arc<str>, Key> {
        let known = |name: &Arc<str>, key: &Key| match (&key.value, other.keys.get(name)) {
            (
                Value::Hash(fields),
                Some(Key {
                    value: Value::Hash(others),
                    ..
                }),
            ) => fields.keys().any(|owner| others.contains_key(owner)),
            _ => false,
        };
        let mut unknown = BTreeMap::new();
        for (name, key) in &self.keys {
            if !known(name, key) {
                unknown.insert(Arc::clone(name), key.clone());
            }
        }
        unknown
    }

    pub(crate) fn delete(&mut self, name: &Arc<str>) {
        if let Some(Key {
            expires_ms: Some(at),
            ..
        }) = self.keys.remove(name)
        {
            self.expiries.remove(&(at, Entry::Key, Arc::clone(name)));
        }
    }

    pub(crate) fn put_counter(&mut self, name: &Arc<str>, text: String, expires_ms: Option<u64>) {
        self.delete_counter(name);
        if let Some(at) = expires_ms {
            self.expiries.insert((at, Entry::Counter, Arc::clone(name)));
        }
        self.counters
            .insert(Arc::clone(name), Counter { text, expires_ms });
    }

    pub(crate) fn delete_counter(&mut self, name: &Arc<str>) {
        if let Some(Counter {
            expires_ms: Some(at),
            ..
        }) = self.counters.remove(name)
        {
            self.expiries
                .remove(&(at, Entry::Counter, Arc::clone(name)));
        }
    }

    /// How many keys and counters there are, those of the past that are not yet purged included.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.keys.len() + self.counters.len() + self.readers.len()
    }

    /// Forgets what ended before `now_ms`: a few at a time, so that no op pays for a million.
    fn purge(&mut self, now_ms: u64, at_most: usize) {
        for _ in 0..at_most {
            match self.expiries.first() {
                Some((at, ..)) if *at < now_ms => {}
                _ => return,
            }
            match self.expiries.pop_first() {
                Some((_, Entry::Key, name)) => drop(self.keys.remove(&name)),
                Some((_, Entry::Counter, name)) => drop(self.counters.remove(&name)),
                Some((_, Entry::Reader(owner, number), name)) => {
                    self.readers.remove(&(name, owner, number));
                }
                None => {}
            }
        }
    }

    /// Forgets all that ended before `now_us`, and returns the keys among it, and the readers of others.
    #[cfg(feature = "testing")]
    pub(crate) fn take_expired(&mut self, now_us: u64) -> Vec<Gone> {
        let mut expired = Vec::new();
        while let Some((at, entry, name)) = self.expiries.first().cloned() {
            if at >= now_us / 1000 {
                break;
            }
            self.expiries.pop_first();
            match entry {
                Entry::Key => {
                    let key = self
                        .keys
                        .remove(&name)
                        .map(|key| self.living_of(&name, key));
                    expired.extend(key.map(|key| Gone::Lock(name, key)));
                }
                Entry::Counter => drop(self.counters.remove(&name)),
                Entry::Reader(owner, number) => {
                    if self.ends_with(&name, &owner, number) {
                        expired.push(Gone::Reader(name, owner));
                    }
                }
            }
        }
        expired
    }

    fn forget_if_expired(&mut self, name: &Arc<str>, now_ms: u64) {
        let past = |expires_ms: Option<u64>| expires_ms.is_some_and(|at| at < now_ms);
        if self.keys.get(name).is_some_and(|key| past(key.expires_ms)) {
            self.delete(name);
        }
        if self
            .counters
            .get(name)
            .is_some_and(|counter| past(counter.expires_ms))
        {
            self.delete_counter(name);
        }
        self.forget_dead(name, now_ms);
    }

    fn fields(&mut self, name: &Arc<str>) -> Option<&mut BTreeMap<String, String>> {
        match self.keys.get_mut(name)? {
            Key {
                value: Value::Hash(fields),
                ..
            } => Some(fields),
            Key {
                value: Value::Other,
                ..
            } => None,
        }
    }

    fn holds(&mut self, name: &Arc<str>, owner: &OwnerId) -> bool {
        self.fields(name)
            .is_some_and(|fields| fields.contains_key(&owner.to_string()))
    }

    fn set_count(&mut self, name: &Arc<str>, owner: &OwnerId, count: u32) {
        if let Some(fields) = self.fields(name) {
            fields.insert(owner.to_string(), count.to_string());
        }
    }

    fn count(&mut self, name: &Arc<str>, owner: &OwnerId) -> u32 {
        self.fields(name)
            .and_then(|fields| fields.get(&owner.to_string())?.parse().ok())
            .unwrap_or(0)
    }

    /// Makes a hold anew, as some bugs do.
    fn recreate(&mut self, name: &Arc<str>, now: &Now, owner: OwnerId, lease_ms: u64) -> Answer {
        let fields = BTreeMap::from([(owner.to_string(), "1".to_owned())]);
        self.put(name, Value::Hash(fields), Some(now.after(lease_ms)));
        Answer::Held {
            remaining_ms: lease_ms,
        }
    }

    /// Moves the deadline forward, never back, and gives one where there is none. What is left then.
    fn lengthen(&mut self, name: &Arc<str>, now: &Now, lease_ms: u64) -> u64 {
        let Some(key) = self.keys.get(name) else {
            return 0;
        };
        if let Some(left) = now.left(key.expires_ms).filter(|left| *left >= lease_ms)
            && !seeded(Bug::RenewalShortens)
        {
            return left;
        }
        self.set_expiry(name, now.after(lease_ms));
        lease_ms
    }

    fn set_expiry(&mut self, name: &Arc<str>, at: u64) {
        let Some(key) = self.keys.get_mut(name) else {
            return;
        };
        if let Some(before) = key.expires_ms.replace(at) {
            self.expiries
                .remove(&(before, Entry::Key, Arc::clone(name)));
        }
        self.expiries.insert((at, Entry::Key, Arc::clone(name)));
    }

    /// Removes one field; a hash without fields is gone.
    fn remove(&mut self, name: &Arc<str>, field: &str) -> bool {
        let Some(fields) = self.fields(name) else {
            return false;
        };
        let removed = fields.remove(field).is_some();
        if fields.is_empty() {
            self.delete(name);
        }
        removed
    }

    fn gone(&self, name: &Arc<str>) -> Answer {
        Answer::Gone(if self.keys.contains_key(name) {
            Instead::Taken
        } else {
            Instead::Free
        })
    }
}

/// The moment an op runs.
struct Now {
    us: u64,
    ms: u64,
    late: bool,
}

impl Now {
    fn left(&self, expires_ms: Option<u64>) -> Option<u64> {
        expires_ms.map(|at| at.saturating_sub(self.ms))
    }

    fn after(&self, ms: u64) -> u64 {
        self.ms.saturating_add(ms)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Entry {
    Key,
    Counter,
    Reader(String, u32),
}

/// Tokens end 2^40 below what a Lua number counts exactly: room for two weeks of time in µs.
const TOKEN_END: u64 = (1 << 53) - (1 << 40);

const NO_COUNTER: &str = "the token counter is not a number that can be continued";

/// Hashes with more fields are not looked through.
const SMALL_HASH: usize = 16;

/// Expired entries an op forgets; it adds three at most.
const PURGE_STEP: usize = 32;
