//! The history sorted by hold: what its client believed of it, and when the server had it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use leasehold::testing::{Answered, Did, Done, HoldId, Ran, Record, What};
use leasehold::{LockKind, LossReason};

use super::ROUNDING;

/// A history, read once.
pub struct Story<'a> {
    pub records: &'a [Record],
    pub holds: BTreeMap<HoldId, Hold>,
    /// When each client sent something.
    pub sent: BTreeMap<usize, Vec<Duration>>,
    /// Places in line, in order of joining.
    pub places: Vec<Place>,
    /// Which place a record speaks of, for those that speak of one.
    place_of: BTreeMap<usize, usize>,
}

/// A place in the line of one client before one name.
#[derive(Debug)]
pub struct Place {
    pub client: usize,
    pub name: Arc<str>,
    pub joined: usize,
    pub joined_at: Duration,
    pub departed: Option<usize>,
    pub served: bool,
}

/// All that is known of one hold.
#[derive(Debug, Default)]
pub struct Hold {
    pub name: Option<Arc<str>>,
    pub claim: Option<Claim>,
    /// What the claim and later confirmations said, in order, until it was over.
    pub beliefs: Vec<Belief>,
    /// Its first end, as its client tells it.
    pub over: Option<Over>,
    /// When the server had it: from its grant to its removal, or to the end of the lease.
    pub stays: Vec<Stay>,
    /// The longest lease that an answer stated.
    pub lease: Duration,
    /// Whose it is, as its requests tell.
    pub client: Option<usize>,
    /// When it was asked for last.
    pub asked: Option<Duration>,
    /// When its last release was sent.
    pub release: Option<Duration>,
    /// The first op that did not find it on the server, while its client believed in it or before.
    pub gone: Option<Gone>,
    /// It was passed on within its client, and nobody has claimed it since.
    pub nobodys: bool,
    /// Others may hold it as well: from the start, or since its client asked to go on as a reader.
    pub shared_from: Option<Duration>,
}

#[derive(Clone, Copy, Debug)]
pub struct Claim {
    pub index: usize,
    pub at: Duration,
    pub client: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct Belief {
    pub index: usize,
    pub at: Duration,
    pub until: Duration,
    /// Until when the server had it at that moment, unless told more; `None` if it had not.
    pub granted_until: Option<Duration>,
}

#[derive(Clone, Copy, Debug)]
pub struct Over {
    pub index: usize,
    pub at: Duration,
    /// `None`: its holder left.
    pub lost: Option<LossReason>,
}

#[derive(Clone, Copy, Debug)]
pub struct Stay {
    pub from_index: usize,
    pub from: Duration,
    /// What shows the end, if anything but the lease does.
    pub to_index: Option<usize>,
    /// [`Duration::MAX`] without expiry.
    pub to: Duration,
    /// Made by the second run of a request, or by a failover to an old copy, of which the client cannot
    /// know.
    pub by_copy: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct Gone {
    pub index: usize,
    /// Though all we know says that the server had it.
    pub absurd: bool,
}

impl Hold {
    /// When its client ceased to believe in it; `None` if it never did.
    pub fn believed_until(&self) -> Option<Duration> {
        let (first, rest) = self.beliefs.split_first()?;
        let until = rest.iter().fold(first.until, |until, belief| {
            if belief.at < until {
                belief.until
            } else {
                until
            }
        });
        Some(self.over.map_or(until, |over| until.min(over.at)))
    }

    /// When it ceased to be its client's alone; `None` if it never was.
    pub fn alone_until(&self, believed_until: Duration) -> Option<Duration> {
        let until = self
            .shared_from
            .map_or(believed_until, |shared| shared.min(believed_until));
        (self.shared_from != Some(Duration::ZERO)).then_some(until)
    }

    fn believe(&mut self, belief: Belief) {
        if self.over.is_none() {
            self.beliefs.push(belief);
        }
    }

    fn stay(&mut self) -> Option<&mut Stay> {
        self.stays.last_mut()
    }
}

impl<'a> Story<'a> {
    pub fn read(records: &'a [Record]) -> Self {
        let mut reader = Reader::default();
        for (index, record) in records.iter().enumerate() {
            reader.read(index, record);
        }
        Self {
            records,
            holds: reader.holds,
            sent: reader.sent,
            places: reader.places,
            place_of: reader.place_of,
        }
    }

    /// The place that the record at `index` speaks of, and its number among `places`.
    pub fn place(&self, index: usize) -> Option<(usize, &Place)> {
        let number = *self.place_of.get(&index)?;
        Some((number, &self.places[number]))
    }

    /// Records with their places.
    pub fn iter(&self) -> impl Iterator<Item = (usize, Duration, &'a What)> + use<'a> {
        let records = self.records.iter().enumerate();
        records.map(|(index, record)| (index, record.at, &record.what))
    }

    /// What the server did.
    pub fn ran(&self) -> impl Iterator<Item = (usize, Duration, &'a Ran)> + use<'a> {
        self.iter().filter_map(|(index, at, what)| match what {
            What::Ran(ran) => Some((index, at, ran)),
            _ => None,
        })
    }
}

/// Follows the server while the history is read.
#[derive(Default)]
struct Reader {
    holds: BTreeMap<HoldId, Hold>,
    locks: BTreeMap<Arc<str>, Lock>,
    sent: BTreeMap<usize, Vec<Duration>>,
    /// Acquisitions that have run: client, attempt and hold.
    acquired: BTreeSet<(usize, u64, HoldId)>,
    places: Vec<Place>,
    place_of: BTreeMap<usize, usize>,
    /// Places not departed from. A line that was empty numbers anew, also before everybody has
    /// looked who was told to leave: so there may be several of one number.
    open: BTreeMap<(usize, LockKind, Arc<str>, u64), VecDeque<usize>>,
}

/// A key, as far as the records tell.
#[derive(Default)]
struct Lock {
    /// Who holds it, and until when unless there is more to come.
    owners: BTreeMap<HoldId, Duration>,
}

impl Reader {
    fn read(&mut self, index: usize, record: &Record) {
        let at = record.at;
        match &record.what {
            What::Ran(ran) => self.ran(index, at, ran),
            What::Sent { client, ops, .. } => {
                self.sent.entry(*client).or_default().push(at);
                for did in ops {
                    self.asked(at, *client, did);
                }
            }
            What::Vanished { name, .. } => {
                if let Some(lock) = self.locks.get_mut(name) {
                    close(&mut self.holds, lock, |_| false, index, at);
                }
            }
            What::ReaderGone { name, hold } => {
                if let Some(lock) = self.locks.get_mut(name) {
                    close(&mut self.holds, lock, |owner| owner != *hold, index, at);
                }
            }
            What::Claimed {
                client,
                name,
                hold,
                until,
                ..
            } => {
                let granted_until = self.granted_until(*hold, name);
                let told = self.holds.entry(*hold).or_default();
                told.nobodys = false;
                told.name.get_or_insert_with(|| Arc::clone(name));
                told.claim.get_or_insert(Claim {
                    index,
                    at,
                    client: *client,
                });
                told.believe(Belief {
                    index,
                    at,
                    until: *until,
                    granted_until,
                });
            }
            What::Prolonged { hold, until } => {
                let name = self.holds.get(hold).and_then(|hold| hold.name.clone());
                let granted_until = name.and_then(|name| self.granted_until(*hold, &name));
                let told = self.holds.entry(*hold).or_default();
                told.believe(Belief {
                    index,
                    at,
                    until: *until,
                    granted_until,
                });
            }
            What::Passed { hold } => self.holds.entry(*hold).or_default().nobodys = true,
            What::Lost { hold, reason } => self.over(index, at, *hold, Some(*reason)),
            What::Left { hold } => self.over(index, at, *hold, None),
            What::Joined {
                client,
                kind,
                name,
                place,
            } => {
                let number = self.places.len();
                self.places.push(Place {
                    client: *client,
                    name: Arc::clone(name),
                    joined: index,
                    joined_at: at,
                    departed: None,
                    served: false,
                });
                self.place_of.insert(index, number);
                let key = (*client, *kind, Arc::clone(name), *place);
                self.open.entry(key).or_default().push_back(number);
            }
            What::Departed {
                client,
                kind,
                name,
                place,
                served,
            } => {
                let open = self
                    .open
                    .get_mut(&(*client, *kind, Arc::clone(name), *place));
                // Those of a line that is no more are not served.
                let number = open.and_then(|open| {
                    if *served {
                        open.pop_back()
                    } else {
                        open.pop_front()
                    }
                });
                if let Some(number) = number {
                    let place = &mut self.places[number];
                    (place.departed, place.served) = (Some(index), *served);
                    self.place_of.insert(index, number);
                }
            }
            _ => {}
        }
    }

    fn asked(&mut self, at: Duration, client: usize, did: &Did) {
        if did.verb == Done::Force {
            return;
        }
        let hold = self.holds.entry(did.hold).or_default();
        hold.client = Some(client);
        match did.verb {
            Done::Acquire | Done::Enqueue | Done::HandOff | Done::Upgrade => {
                hold.asked = Some(at);
                let reads = did.kind == LockKind::Read && did.verb == Done::Acquire;
                hold.shared_from = hold.shared_from.or(reads.then_some(Duration::ZERO));
            }
            Done::Downgrade => {
                hold.shared_from.get_or_insert(at);
            }
            Done::Release if did.count == 0 => hold.release = Some(at),
            _ => {}
        }
        if let Some(other) = did.other {
            let other = self.holds.entry(other).or_default();
            other.client = Some(client);
            // A reader that is to go on writing is released only if that is done.
            if did.verb != Done::Upgrade {
                other.release = Some(at);
            }
        }
    }

    fn over(&mut self, index: usize, at: Duration, hold: HoldId, lost: Option<LossReason>) {
        let hold = self.holds.entry(hold).or_default();
        hold.over.get_or_insert(Over { index, at, lost });
    }

    fn granted_until(&self, hold: HoldId, name: &Arc<str>) -> Option<Duration> {
        let lock = self.locks.get(name)?;
        lock.owners.get(&hold).copied()
    }

    fn ran(&mut self, index: usize, at: Duration, ran: &Ran) {
        let did = &ran.did;
        let takes = matches!(
            did.verb,
            Done::Acquire | Done::Enqueue | Done::HandOff | Done::Upgrade
        );
        let first = !takes || self.acquired.insert((ran.client, ran.attempt, did.hold));
        let Reader { holds, locks, .. } = self;
        if !locks.contains_key(&did.name) {
            locks.insert(Arc::clone(&did.name), Lock::default());
        }
        let Some(lock) = locks.get_mut(&did.name) else {
            return;
        };
        // An op on one side of a read/write lock tells of its own hold only.
        let plain = matches!(did.kind, LockKind::Plain | LockKind::Fair);
        let of_it = |owner: HoldId| plain || owner == did.hold;
        let end = lock.owners.get(&did.hold).copied();
        let absurd = end.is_some_and(|end| at < end);
        // Of a beat it speaks of the place in the queue, not of the hold; and a copy of what made a writer finds
        // none once it goes on as a reader.
        let reads_on = matches!(did.verb, Done::HandOff | Done::Upgrade)
            && holds
                .get(&did.hold)
                .is_some_and(|hold| hold.shared_from.is_some());
        let gone = ran.answer == Answered::Gone && did.verb != Done::Beat && !reads_on;
        if gone {
            // Clocks may differ by 0.5 %, and a lease lasts until its millisecond is over.
            let hold = holds.entry(did.hold).or_default();
            let room = hold.lease / 100 + ROUNDING * 2;
            let absurd = end.is_some_and(|end| at + room < end);
            hold.gone.get_or_insert(Gone { index, absurd });
            if let Some(reader) = did.other.filter(|_| did.verb == Done::Upgrade) {
                // Who was to go on writing is not there either.
                let end = lock.owners.get(&reader).copied();
                let absurd = end.is_some_and(|end| at + room < end);
                let hold = holds.entry(reader).or_default();
                hold.gone.get_or_insert(Gone { index, absurd });
            }
        }
        let found = matches!(ran.answer, Answered::Granted(_) | Answered::Done);
        let over = |lock: &Lock| {
            let mut owners = lock.owners.iter().filter(|(owner, _)| of_it(**owner));
            owners.all(|(_, end)| at >= *end)
        };
        match &ran.change {
            Some((before, after)) => {
                // What is missing before has ended without a record of its own.
                close(holds, lock, |owner| has(before, owner), index, at);
                // Those who are back without an op of their own came with an older copy of the server.
                let back: Vec<_> = ids(before)
                    .into_iter()
                    .filter(|owner| !lock.owners.contains_key(owner))
                    .collect();
                open(holds, lock, &back, index, at, &did.name);
                for owner in back {
                    let hold = holds.entry(owner).or_default();
                    let over = hold.over.is_some();
                    if let Some(stay) = hold.stay() {
                        stay.by_copy |= over;
                    }
                }
                for (owner, end) in &mut lock.owners {
                    if !has(after, *owner) {
                        *end = at;
                    }
                }
                close(holds, lock, |owner| has(after, owner), index, at);
                open(holds, lock, &ids(after), index, at, &did.name);
            }
            // Another has it, or this one: the server is another, with an older memory.
            None if gone && absurd => {
                close(holds, lock, |owner| !of_it(owner), index, at);
            }
            None if found && did.verb != Done::Force && end.is_none() => {
                close(holds, lock, |owner| !of_it(owner), index, at);
                open(holds, lock, &[did.hold], index, at, &did.name);
                let hold = holds.entry(did.hold).or_default();
                let over = hold.over.is_some();
                if let Some(stay) = hold.stay() {
                    stay.by_copy |= over;
                }
            }
            None if ran.left_ms.is_some() || found || ran.answer == Answered::Taken => {}
            // Gone with its lease, or, as only an op of its own can tell, without a record.
            None if over(lock) => close(holds, lock, |owner| !of_it(owner), index, at),
            // Lost with the memory, or without expiry: that will show.
            None => return,
        }
        let left = ran.left_ms.map(Duration::from_millis);
        for (owner, end) in &mut lock.owners {
            if !of_it(*owner) {
                continue;
            }
            *end = left.map_or(Duration::MAX, |left| at + left);
            let hold = holds.entry(*owner).or_default();
            hold.lease = hold.lease.max(left.unwrap_or_default());
            if let Some(stay) = hold.stay() {
                stay.to = *end;
                stay.by_copy |= stay.from_index == index && !first;
            }
        }
    }
}

/// Ends the stay of all but those that remain: now, or when the lease was over.
fn close(
    holds: &mut BTreeMap<HoldId, Hold>,
    lock: &mut Lock,
    remains: impl Fn(HoldId) -> bool,
    index: usize,
    at: Duration,
) {
    lock.owners.retain(|owner, end| {
        let remains = remains(*owner);
        if !remains && let Some(stay) = holds.entry(*owner).or_default().stay() {
            stay.to = (*end).min(at);
            stay.to_index = Some(index);
        }
        remains
    });
}

/// Begins the stay of those that are new.
fn open(
    holds: &mut BTreeMap<HoldId, Hold>,
    lock: &mut Lock,
    there: &[HoldId],
    index: usize,
    at: Duration,
    name: &Arc<str>,
) {
    for owner in there {
        if lock.owners.contains_key(owner) {
            continue;
        }
        lock.owners.insert(*owner, at);
        let hold = holds.entry(*owner).or_default();
        hold.name.get_or_insert_with(|| Arc::clone(name));
        hold.stays.push(Stay {
            from_index: index,
            from: at,
            to_index: None,
            to: at,
            by_copy: false,
        });
    }
}

/// Who writes under a read/write lock, once this op has run.
pub fn writer_after(writer: Option<HoldId>, ran: &Ran) -> Option<HoldId> {
    let did = &ran.did;
    let Some((_, after)) = &ran.change else {
        let asked = did.verb == Done::Downgrade && ran.answer == Answered::Done;
        return writer.filter(|writer| !(asked && *writer == did.hold));
    };
    let writes = match did.verb {
        Done::Acquire => did.kind == LockKind::Write && did.count == 1,
        Done::HandOff | Done::Upgrade => true,
        _ => false,
    };
    if writes {
        return Some(did.hold);
    }
    let goes_on = did.verb == Done::Downgrade;
    writer.filter(|writer| has(after, *writer) && !(goes_on && *writer == did.hold))
}

fn ids(owners: &[(HoldId, u32)]) -> Vec<HoldId> {
    owners.iter().map(|(hold, _)| *hold).collect()
}

fn has(owners: &[(HoldId, u32)], hold: HoldId) -> bool {
    owners.iter().any(|(owner, _)| *owner == hold)
}
