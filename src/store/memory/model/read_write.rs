//! The read/write lock's part of the table: see `lua/rw.lua` for what is in its keys.
//!
//! A reader whose lease is over is not there for anybody, though his field may be.

use std::collections::BTreeMap;
use std::sync::Arc;

#[cfg(feature = "testing")]
use super::Key;
use super::{
    Entry, Now, SMALL_HASH, State, Value, already_granted, conflict, is_count, is_owner,
    last_token, next_token,
};
use crate::bug::{Bug, seeded};
use crate::kind::Kind;
use crate::store::{Answer, Channel, Op, OwnerId, Refusal, Snapshot, TokenRule, Verb};

/// Does an op on one side. The channel, if any, is to be told: somebody may come in.
pub(super) fn apply(state: &mut State, now: &Now, op: &Op) -> (Answer, Option<Channel>) {
    let mut told = false;
    let answer = answer(state, now, op, &mut told).unwrap_or_else(Answer::Refused);
    (answer, told.then(|| op.kind.channel(&op.name)))
}

fn answer(state: &mut State, now: &Now, op: &Op, told: &mut bool) -> Result<Answer, Refusal> {
    let name = &op.name;
    match &op.verb {
        Verb::Acquire {
            owner,
            count: 1,
            lease_ms,
            token,
        } => match op.kind {
            Kind::Read => enter(state, now, name, *owner, *lease_ms, *token),
            _ => take(state, now, name, *owner, *lease_ms, *token),
        },
        Verb::Acquire {
            owner,
            count,
            lease_ms,
            ..
        } => Ok(nest(state, now, name, *owner, *count, *lease_ms)),
        Verb::Release {
            owner,
            count: 0,
            also,
        } => Ok(release(state, now, name, *owner, *also, told)),
        Verb::Release { owner, count, .. } => Ok(leave(state, now, name, *owner, *count)),
        Verb::Renew {
            owner,
            count,
            lease_ms,
        } => Ok(renew(state, now, name, *owner, *count, *lease_ms)),
        Verb::HandOff {
            from,
            to,
            lease_ms,
            token,
        } => hand_off(state, now, name, [*from, *to], *lease_ms, *token),
        Verb::Downgrade {
            owner,
            count,
            lease_ms,
        } => Ok(downgrade(state, now, name, *owner, *count, *lease_ms, told)),
        Verb::Upgrade {
            from,
            to,
            lease_ms,
            token,
        } => upgrade(state, now, name, [*from, *to], *lease_ms, *token),
        Verb::ForceRelease { owner } => Ok(force_release(state, now, name, owner, told)),
        // It has no queue; and what is remembered is no matter of its sides.
        Verb::Enqueue { .. } | Verb::Beat { .. } | Verb::Remember { .. } => Ok(state.gone(name)),
    }
}

/// Reads, count 1.
fn enter(
    state: &mut State,
    now: &Now,
    name: &Arc<str>,
    owner: OwnerId,
    lease_ms: u64,
    rule: TokenRule,
) -> Result<Answer, Refusal> {
    let before = state.keys.get(name).map(|key| key.expires_ms);
    if let Some(expires_ms) = before {
        if state.reads(name, &owner.to_string()) {
            return copy_of_entering(state, now, name, owner, lease_ms, rule);
        }
        if mode_of(state, name)? == "write" {
            check_fields(state, name)?;
            return Ok(Answer::Taken {
                remaining_ms: now.left(expires_ms),
            });
        }
    }
    if now.late {
        return Ok(Answer::Late);
    }
    // The first reader has a token of his own; those who join have the counter's.
    let joins = before.is_some() && !seeded(Bug::TokenPerReader);
    let token = match last_token(state, name)?.filter(|_| joins) {
        Some(last) => last,
        None => next_token(state, now, name, lease_ms, rule)?,
    };
    if before.is_none() {
        let fields = BTreeMap::from([("mode".to_owned(), "read".to_owned())]);
        let expires_ms = Some(now.after(lease_ms));
        state.put(name, Value::Hash(fields), expires_ms);
    }
    state.set_field(name, &owner.to_string(), 1);
    state.put_reader(name, &owner.to_string(), 1, Some(now.after(lease_ms)));
    let left = state
        .keys
        .get(name)
        .and_then(|key| now.left(key.expires_ms));
    if left.is_some_and(|left| left < lease_ms) {
        state.set_expiry(name, now.after(lease_ms));
    }
    Ok(Answer::Granted {
        token,
        remaining_ms: lease_ms,
    })
}

fn copy_of_entering(
    state: &State,
    now: &Now,
    name: &Arc<str>,
    owner: OwnerId,
    lease_ms: u64,
    rule: TokenRule,
) -> Result<Answer, Refusal> {
    let answer = already_granted(state, now, name, lease_ms, rule)?;
    Ok(match answer {
        Answer::Granted { token, .. } => Answer::Granted {
            token,
            remaining_ms: state.own_left(now, name, owner).unwrap_or(lease_ms),
        },
        other => other,
    })
}

/// Writes, count 1.
fn take(
    state: &mut State,
    now: &Now,
    name: &Arc<str>,
    owner: OwnerId,
    lease_ms: u64,
    rule: TokenRule,
) -> Result<Answer, Refusal> {
    if state.keys.contains_key(name) {
        if state.has(name, &writer(owner)) {
            return already_granted(state, now, name, lease_ms, rule);
        }
        mode_of(state, name)?;
        check_fields(state, name)?;
        let whole = state.whole(now, name);
        let (longest, dead) = state.others(now, name, whole, None);
        for reader in dead {
            state.remove(name, &reader);
        }
        if let Some(left) = longest {
            return Ok(taken(left));
        }
    }
    if now.late {
        return Ok(Answer::Late);
    }
    let token = next_token(state, now, name, lease_ms, rule)?;
    state.write(name, now, owner, lease_ms);
    Ok(Answer::Granted {
        token,
        remaining_ms: lease_ms,
    })
}

fn nest(
    state: &mut State,
    now: &Now,
    name: &Arc<str>,
    owner: OwnerId,
    count: u32,
    lease_ms: u64,
) -> Answer {
    let Some(held) = state.held_by(name, owner) else {
        return state.gone(name);
    };
    if now.late {
        return Answer::Late;
    }
    state.set_field(name, held.field(), count);
    Answer::Held {
        remaining_ms: state.lengthen_held(name, now, &held, lease_ms),
    }
}

/// Release, count 0: removes, however late.
fn release(
    state: &mut State,
    now: &Now,
    name: &Arc<str>,
    owner: OwnerId,
    also: Option<OwnerId>,
    told: &mut bool,
) -> Answer {
    if seeded(Bug::LateReleaseAfterDowngrade) && state.held_by(name, owner).is_none() {
        state.remove_writer(name);
    }
    let lived = state.held_by(name, owner).is_some();
    let mut wrote = state.remove(name, &writer(owner));
    let read = state.remove(name, &owner.to_string());
    if let Some(also) = also {
        wrote |= state.remove(name, &writer(also));
    }
    if !wrote && !read {
        return state.gone(name);
    }
    if read {
        state.delete_reader(name, &owner.to_string(), 1);
    }
    *told = settle(state, now, name);
    if wrote || lived {
        Answer::Released { heard: 0 }
    } else {
        state.gone(name)
    }
}

/// Release, count 1 and more: the deadline stays as it is.
fn leave(state: &mut State, now: &Now, name: &Arc<str>, owner: OwnerId, count: u32) -> Answer {
    let Some(held) = state.held_by(name, owner) else {
        return state.gone(name);
    };
    if now.late {
        return Answer::Late;
    }
    state.set_field(name, held.field(), count);
    Answer::StillHeld {
        remaining_ms: state.held_left(now, name, &held).unwrap_or(0),
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
    let Some(held) = state.held_by(name, owner) else {
        return state.gone(name);
    };
    if now.late {
        return Answer::Late;
    }
    if seeded(Bug::RenewalOfAllReaders) {
        state.lengthen_all(name, now, lease_ms);
    }
    state.set_field(name, held.field(), count);
    Answer::Renewed {
        remaining_ms: state.lengthen_held(name, now, &held, lease_ms),
    }
}

/// From one writer to another; never creates, never overwrites.
fn hand_off(
    state: &mut State,
    now: &Now,
    name: &Arc<str>,
    [from, to]: [OwnerId; 2],
    lease_ms: u64,
    rule: TokenRule,
) -> Result<Answer, Refusal> {
    if state.has(name, &writer(to)) {
        if from != to {
            // There only if an earlier copy was refused half-way.
            state.remove(name, &writer(from));
        }
        return already_granted(state, now, name, lease_ms, rule);
    }
    if !state.has(name, &writer(from)) {
        return Ok(state.gone(name));
    }
    if now.late {
        return Ok(Answer::Late);
    }
    let token = next_token(state, now, name, lease_ms, rule)?;
    state.set_field(name, &writer(to), 1);
    state.remove(name, &writer(from));
    state.set_expiry(name, now.after(lease_ms));
    Ok(Answer::Granted {
        token,
        remaining_ms: lease_ms,
    })
}

/// The writer goes on as a reader.
fn downgrade(
    state: &mut State,
    now: &Now,
    name: &Arc<str>,
    owner: OwnerId,
    count: u32,
    lease_ms: u64,
    told: &mut bool,
) -> Answer {
    match state.held_by(name, owner) {
        None => return state.gone(name),
        Some(held @ Held::Reading(_)) => {
            return Answer::StillHeld {
                remaining_ms: state.held_left(now, name, &held).unwrap_or(0),
            };
        }
        Some(Held::Writing(_)) => {}
    }
    if now.late {
        return Answer::Late;
    }
    let expires_ms = state.keys.get(name).and_then(|key| key.expires_ms);
    let left = now.left(expires_ms).unwrap_or(0).max(lease_ms);
    let reader = owner.to_string();
    state.put_reader(name, &reader, 1, Some(now.after(left)));
    state.set_field(name, &reader, count);
    state.set_mode(name, "read");
    state.remove(name, &writer(owner));
    state.set_expiry(name, now.after(left));
    *told = !seeded(Bug::DowngradeTellsNobody);
    Answer::StillHeld { remaining_ms: left }
}

/// The only reader goes on as the writer.
fn upgrade(
    state: &mut State,
    now: &Now,
    name: &Arc<str>,
    [from, to]: [OwnerId; 2],
    lease_ms: u64,
    rule: TokenRule,
) -> Result<Answer, Refusal> {
    let reader = from.to_string();
    if state.has(name, &writer(to)) {
        // There only if an earlier copy was refused half-way.
        state.remove(name, &reader);
        state.delete_reader(name, &reader, 1);
        return already_granted(state, now, name, lease_ms, rule);
    }
    if !state.reads(name, &reader) {
        return Ok(state.gone(name));
    }
    let whole = state.whole(now, name);
    let (longest, dead) = state.others(now, name, whole, Some(&reader));
    if let Some(left) = longest
        && !seeded(Bug::UpgradeAmongReaders)
    {
        return Ok(taken(left));
    }
    if now.late {
        return Ok(Answer::Late);
    }
    let token = next_token(state, now, name, lease_ms, rule)?;
    state.write(name, now, to, lease_ms);
    state.remove(name, &reader);
    state.delete_reader(name, &reader, 1);
    for reader in dead {
        state.remove(name, &reader);
    }
    Ok(Answer::Granted {
        token,
        remaining_ms: lease_ms,
    })
}

fn force_release(
    state: &mut State,
    now: &Now,
    name: &Arc<str>,
    field: &str,
    told: &mut bool,
) -> Answer {
    let fields = state.fields(name);
    let count = fields.and_then(|fields| fields.get(field).cloned());
    let Some(count) = count.filter(|_| field != "mode") else {
        return Answer::Nothing;
    };
    state.remove(name, field);
    if is_owner(field) && is_count(&count) {
        for number in holds(&count) {
            state.delete_reader(name, field, number);
        }
    }
    *told = settle(state, now, name);
    Answer::Removed
}

/// After a field was removed: forgets a lock that nobody holds any more, and lets readers in that the
/// writer kept out. Whether somebody may come in now.
fn settle(state: &mut State, now: &Now, name: &Arc<str>) -> bool {
    let Ok(mode) = mode_of(state, name) else {
        return false;
    };
    let fields = state.fields(name).map(|fields| fields.clone());
    let mut alive = false;
    for (field, count) in fields.unwrap_or_default() {
        if field == "mode" {
            continue;
        }
        if !(is_owner(&field) && is_count(&count)) {
            return false;
        }
        alive |= state.reader_left(now, name, &field, &count).is_some();
    }
    match (alive, mode.as_str()) {
        (true, "read") if seeded(Bug::ReadersForgotten) => state.delete(name),
        (true, "read") => return false,
        (true, _) => state.set_mode(name, "read"),
        (false, _) => state.delete(name),
    }
    true
}

/// `read` or `write`.
fn mode_of(state: &mut State, name: &Arc<str>) -> Result<String, Refusal> {
    let key = state.keys.get(name).map(|key| &key.value);
    if matches!(key, Some(Value::Other)) {
        return Err(conflict("the key is no hash"));
    }
    let mode = state
        .fields(name)
        .and_then(|fields| fields.get("mode").cloned());
    mode.filter(|mode| mode == "read" || mode == "write")
        .ok_or_else(|| conflict("the key is no read/write lock"))
}

/// Refuses a hash that is plainly no read/write lock. Looks at small ones only.
fn check_fields(state: &mut State, name: &Arc<str>) -> Result<(), Refusal> {
    let Some(fields) = state.fields(name).filter(|it| it.len() <= SMALL_HASH) else {
        return Ok(());
    };
    let ours = |field: &str| is_owner(field.strip_suffix(":write").unwrap_or(field));
    let proper = fields
        .iter()
        .all(|(field, count)| field == "mode" || ours(field) && is_count(count));
    if proper {
        Ok(())
    } else {
        Err(conflict("the key is a hash in other use"))
    }
}

/// The field of the writer.
fn writer(owner: OwnerId) -> String {
    format!("{owner}:write")
}

fn lease_of(name: &Arc<str>, owner: &str, number: u32) -> (Arc<str>, String, u32) {
    (Arc::clone(name), owner.to_owned(), number)
}

/// The numbers of a reader's leases.
fn holds(count: &str) -> std::ops::RangeInclusive<u32> {
    1..=count.parse().unwrap_or(MOST_HOLDS).min(MOST_HOLDS)
}

fn taken(left: u64) -> Answer {
    Answer::Taken {
        remaining_ms: (left != NO_END).then_some(left),
    }
}

/// The field by which an owner holds the lock.
enum Held {
    Reading(String),
    Writing(String),
}

impl Held {
    fn field(&self) -> &str {
        match self {
            Self::Reading(field) | Self::Writing(field) => field,
        }
    }
}

impl State {
    /// A reader's lease by number, as somebody else may make it.
    pub(crate) fn put_reader(
        &mut self,
        name: &Arc<str>,
        owner: &str,
        number: u32,
        expires_ms: Option<u64>,
    ) {
        self.delete_reader(name, owner, number);
        if let Some(at) = expires_ms {
            let entry = Entry::Reader(owner.to_owned(), number);
            self.expiries.insert((at, entry, Arc::clone(name)));
        }
        self.readers
            .insert(lease_of(name, owner, number), expires_ms);
    }

    pub(crate) fn delete_reader(&mut self, name: &Arc<str>, owner: &str, number: u32) {
        if let Some(Some(at)) = self.readers.remove(&lease_of(name, owner, number)) {
            let entry = Entry::Reader(owner.to_owned(), number);
            self.expiries.remove(&(at, entry, Arc::clone(name)));
        }
    }

    /// What is left of each reader's lease; without the dead.
    pub(super) fn look_at_readers(&self, name: &Arc<str>, now_us: u64, seen: &mut Snapshot) {
        let now = Now {
            us: now_us,
            ms: now_us / 1000,
            late: false,
        };
        let readers = &mut seen.readers;
        seen.holders.retain(|(reader, count)| {
            let left = self.reader_left(&now, name, reader, &count.to_string());
            if let Some(left) = left {
                readers.insert(reader.clone(), (left != NO_END).then_some(left));
            }
            left.is_some() || !is_owner(reader)
        });
    }

    /// All leases of readers of one name.
    #[cfg(test)]
    pub(crate) fn readers(&self, name: &Arc<str>) -> BTreeMap<(String, u32), Option<u64>> {
        self.readers
            .iter()
            .filter(|((of, ..), _)| of == name)
            .map(|((_, owner, number), at)| ((owner.clone(), *number), *at))
            .collect()
    }

    /// The key without the readers that are dead, as everybody sees it.
    #[cfg(feature = "testing")]
    pub(crate) fn living(&mut self, name: &Arc<str>, now_us: u64) -> Option<Key> {
        let key = self.key(name, now_us)?.clone();
        Some(self.living_of(name, key))
    }

    #[cfg(feature = "testing")]
    pub(super) fn living_of(&self, name: &Arc<str>, mut key: Key) -> Key {
        if let Value::Hash(fields) = &mut key.value
            && fields.remove("mode").is_some()
        {
            fields.retain(|field, count| {
                let mut leases = holds(count).map(|number| lease_of(name, field, number));
                !is_owner(field) || leases.any(|lease| self.readers.contains_key(&lease))
            });
        }
        key
    }

    /// Forgets a lease that is over. Whether its reader ends with it.
    #[cfg(feature = "testing")]
    pub(super) fn ends_with(&mut self, name: &Arc<str>, owner: &str, number: u32) -> bool {
        self.readers.remove(&lease_of(name, owner, number));
        let fields = self.fields(name);
        let Some(count) = fields.and_then(|fields| fields.get(owner).cloned()) else {
            return false;
        };
        let mut leases = holds(&count).map(|number| lease_of(name, owner, number));
        !leases.any(|lease| self.readers.contains_key(&lease))
    }

    /// When the lease ends that an op is about.
    #[cfg(feature = "testing")]
    pub(crate) fn lease_of(&mut self, op: &Op, now_us: u64) -> Option<u64> {
        let expires_ms = self.key(&op.name, now_us)?.expires_ms;
        let owner = match &op.verb {
            _ if op.kind.sides().len() == 1 => return expires_ms,
            Verb::Acquire { owner, .. }
            | Verb::Release { owner, .. }
            | Verb::Renew { owner, .. }
            | Verb::Downgrade { owner, .. }
            | Verb::HandOff { to: owner, .. }
            | Verb::Upgrade { to: owner, .. } => *owner,
            Verb::ForceRelease { .. }
            | Verb::Enqueue { .. }
            | Verb::Beat { .. }
            | Verb::Remember { .. } => return None,
        };
        match self.held_by(&op.name, owner)? {
            Held::Writing(_) => expires_ms,
            Held::Reading(reader) => *self.readers.get(&lease_of(&op.name, &reader, 1))?,
        }
    }

    /// Forgets the leases of this name that are over.
    pub(super) fn forget_dead(&mut self, name: &Arc<str>, now_ms: u64) {
        let first = lease_of(name, "", 0);
        let over: Vec<_> = self
            .readers
            .range(first..)
            .take_while(|((of, ..), _)| of == name)
            .filter(|(_, at)| at.is_some_and(|at| at < now_ms))
            .map(|((_, owner, number), _)| (owner.clone(), *number))
            .collect();
        for (owner, number) in over {
            self.delete_reader(name, &owner, number);
        }
    }

    /// What is left of a reader's longest lease; `None` if he is dead.
    fn reader_left(&self, now: &Now, name: &Arc<str>, reader: &str, count: &str) -> Option<u64> {
        holds(count)
            .filter_map(|number| self.readers.get(&lease_of(name, reader, number)))
            .map(|at| now.left(*at).unwrap_or(NO_END))
            .max()
    }

    /// What is left of the longest lease of all but `but`, if anybody holds the lock, and the readers
    /// who are dead. The writer's lasts as long as `whole`.
    fn others(
        &mut self,
        now: &Now,
        name: &Arc<str>,
        whole: u64,
        but: Option<&str>,
    ) -> (Option<u64>, Vec<String>) {
        let fields = self.fields(name).map(|fields| fields.clone());
        let (mut longest, mut dead) = (None, Vec::new());
        for (field, count) in fields.unwrap_or_default() {
            if field == "mode" || Some(field.as_str()) == but {
                continue;
            }
            let left = if is_owner(&field) && is_count(&count) {
                self.reader_left(now, name, &field, &count)
            } else {
                Some(whole)
            };
            match left {
                Some(_) => longest = longest.max(left),
                None => dead.push(field),
            }
        }
        (longest, dead)
    }

    /// What is left of the whole lock.
    fn whole(&self, now: &Now, name: &Arc<str>) -> u64 {
        let expires_ms = self.keys.get(name).and_then(|key| key.expires_ms);
        now.left(expires_ms).unwrap_or(NO_END)
    }

    fn has(&mut self, name: &Arc<str>, field: &str) -> bool {
        self.fields(name)
            .is_some_and(|fields| fields.contains_key(field))
    }

    fn held_by(&mut self, name: &Arc<str>, owner: OwnerId) -> Option<Held> {
        if self.has(name, &writer(owner)) {
            return Some(Held::Writing(writer(owner)));
        }
        let reader = owner.to_string();
        self.reads(name, &reader).then_some(Held::Reading(reader))
    }

    /// Whether a reader of ours is there and alive.
    fn reads(&mut self, name: &Arc<str>, reader: &str) -> bool {
        self.has(name, reader) && self.readers.contains_key(&lease_of(name, reader, 1))
    }

    fn set_field(&mut self, name: &Arc<str>, field: &str, count: u32) {
        if let Some(fields) = self.fields(name) {
            fields.insert(field.to_owned(), count.to_string());
        }
    }

    fn set_mode(&mut self, name: &Arc<str>, mode: &str) {
        if let Some(fields) = self.fields(name) {
            fields.insert("mode".to_owned(), mode.to_owned());
        }
    }

    /// Puts a writer in, beside what is there.
    fn write(&mut self, name: &Arc<str>, now: &Now, owner: OwnerId, lease_ms: u64) {
        if !self.keys.contains_key(name) {
            self.put(name, Value::Hash(BTreeMap::new()), None);
        }
        self.set_mode(name, "write");
        self.set_field(name, &writer(owner), 1);
        self.set_expiry(name, now.after(lease_ms));
    }

    /// As one bug does.
    fn lengthen_all(&mut self, name: &Arc<str>, now: &Now, lease_ms: u64) {
        let fields = self.fields(name).map(|fields| fields.clone());
        for reader in fields.unwrap_or_default().into_keys() {
            if is_owner(&reader) {
                self.put_reader(name, &reader, 1, Some(now.after(lease_ms)));
            }
        }
    }

    /// As one bug does.
    fn remove_writer(&mut self, name: &Arc<str>) {
        if let Some(fields) = self.fields(name) {
            fields.retain(|field, _| !field.ends_with(":write"));
        }
    }

    fn own_left(&self, now: &Now, name: &Arc<str>, owner: OwnerId) -> Option<u64> {
        let lease = lease_of(name, &owner.to_string(), 1);
        now.left(*self.readers.get(&lease)?)
    }

    fn held_left(&self, now: &Now, name: &Arc<str>, held: &Held) -> Option<u64> {
        match held {
            Held::Reading(reader) => now.left(*self.readers.get(&lease_of(name, reader, 1))?),
            Held::Writing(_) => now.left(self.keys.get(name)?.expires_ms),
        }
    }

    /// As `lengthen`, of this hold. A lock whose expiry somebody took away gets the longest of its
    /// readers' back.
    fn lengthen_held(&mut self, name: &Arc<str>, now: &Now, held: &Held, lease_ms: u64) -> u64 {
        let Held::Reading(reader) = held else {
            return self.lengthen(name, now, lease_ms);
        };
        let left = self.held_left(now, name, held).unwrap_or(0).max(lease_ms);
        self.put_reader(name, reader, 1, Some(now.after(left)));
        let expires_ms = self.keys.get(name).and_then(|key| key.expires_ms);
        let whole = now.left(expires_ms).unwrap_or_else(|| {
            let (longest, _) = self.others(now, name, left, Some(reader));
            longest.filter(|longest| *longest != NO_END).unwrap_or(left)
        });
        self.set_expiry(name, now.after(whole.max(left)));
        left
    }
}

/// Of a lease without end.
const NO_END: u64 = u64::MAX;

/// Holds of one reader that are looked at, whatever a count may say.
const MOST_HOLDS: u32 = 256;
