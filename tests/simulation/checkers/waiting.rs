//! L2: while somebody stands in line, his client asks for the lock at least every `cap`; and in a
//! quiet run a lock that became free is soon somebody's.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use leasehold::LockKind;
use leasehold::testing::{Did, Done, HoldId, What};

use super::story::{Story, writer_after};
use super::{Conditions, Verdict, Violation};

pub fn check(story: &Story<'_>, conditions: &Conditions) -> Vec<Violation> {
    let mut verdict = Verdict::of("waiting", story);
    // Nothing is asked for those who do not answer.
    if conditions.polled || !conditions.stall.is_zero() {
        attempts(&mut verdict, story, conditions);
    }
    if conditions.quiet && conditions.polled {
        wake_ups(&mut verdict, story, conditions);
    }
    verdict.found
}

/// The client, side and name of a line.
type Whose<'a> = (usize, LockKind, &'a Arc<str>);

/// One client's line for a name.
#[derive(Default)]
struct Line {
    places: usize,
    /// The last sign of effort: an attempt, or the first to come.
    since: Duration,
    index: usize,
}

fn attempts(verdict: &mut Verdict<'_>, story: &Story<'_>, conditions: &Conditions) {
    let mut lines: BTreeMap<Whose<'_>, Line> = BTreeMap::new();
    for (index, at, what) in story.iter() {
        match what {
            What::Joined {
                client, kind, name, ..
            } => {
                let line = lines.entry((*client, *kind, name)).or_default();
                if line.places == 0 {
                    (line.since, line.index) = (at, index);
                }
                line.places += 1;
            }
            What::Departed {
                client, kind, name, ..
            } => {
                let whose = (*client, *kind, name);
                if let Some(line) = lines.get_mut(&whose) {
                    idle(verdict, conditions, whose, line, at);
                    line.places = line.places.saturating_sub(1);
                }
            }
            What::Sent { client, ops, .. } => {
                for Did { kind, name, .. } in ops.iter().filter(|did| is_attempt(did)) {
                    let whose = (*client, *kind, name);
                    if let Some(line) = lines.get_mut(&whose) {
                        idle(verdict, conditions, whose, line, at);
                        (line.since, line.index) = (at, index);
                    }
                }
            }
            _ => {}
        }
    }
    for (whose, line) in &mut lines {
        idle(verdict, conditions, *whose, line, conditions.end);
    }
}

fn is_attempt(did: &Did) -> bool {
    match did.verb {
        Done::HandOff | Done::Enqueue | Done::Beat => true,
        Done::Acquire => did.count == 1,
        _ => false,
    }
}

/// Whether a line in which somebody stands was left alone for too long until `now`.
fn idle(
    verdict: &mut Verdict<'_>,
    conditions: &Conditions,
    (client, _, name): Whose<'_>,
    line: &mut Line,
    now: Duration,
) {
    if line.places == 0 {
        return;
    }
    let since = line.since.max(conditions.healed_from);
    let due = conditions.due(
        client,
        since,
        conditions.cap + conditions.stall + ANSWER_ROOM,
    );
    if now > due {
        let what = format!("client {client} does not ask for {name}, for which it has waiters");
        verdict.broken_at(due, &[line.index], what);
        // Said once.
        line.since = now;
    }
}

/// A name: whether it is free, and who waits.
#[derive(Default)]
struct Lock {
    taken: bool,
    free_since: Duration,
    freed: Option<usize>,
    /// When and where they joined.
    waiting: BTreeSet<(Duration, usize)>,
}

impl Lock {
    /// Whether somebody has waited for the free lock for longer than `room`.
    fn neglected(&self, now: Duration, room: Duration) -> Option<(Duration, usize)> {
        let (joined, index) = self.waiting.first().filter(|_| !self.taken)?;
        let due = self.free_since.max(*joined).saturating_add(room);
        (now > due).then_some((due, *index))
    }
}

fn wake_ups(verdict: &mut Verdict<'_>, story: &Story<'_>, conditions: &Conditions) {
    let room = conditions.wake + conditions.slack;
    // Who reads may come in where others read.
    let mut locks: BTreeMap<(LockKind, &Arc<str>), Lock> = BTreeMap::new();
    let mut writers: BTreeMap<&Arc<str>, Option<HoldId>> = BTreeMap::new();
    let mut look = |lock: &mut Lock, name: &Arc<str>, now| {
        if let Some((due, index)) = lock.neglected(now, room) {
            let records: Vec<_> = lock.freed.into_iter().chain([index]).collect();
            verdict.broken_at(
                due,
                &records,
                format!("{name} is free, and who waits is not told"),
            );
            // Said once.
            lock.free_since = now;
        }
    };
    for (index, at, what) in story.iter() {
        match what {
            What::Ran(ran) => {
                // Who goes on as a reader with one level has the count he had.
                let after = match &ran.change {
                    Some((_, after)) => after.clone(),
                    None if ran.did.verb == Done::Downgrade => vec![(ran.did.hold, 1)],
                    None => continue,
                };
                let name = &ran.did.name;
                let writer = writers.entry(name).or_default();
                *writer = writer_after(*writer, ran);
                let sides: &[_] = match ran.did.kind {
                    one @ (LockKind::Plain | LockKind::Fair) => &[(one, !after.is_empty())],
                    _ => &[
                        (LockKind::Read, writer.is_some()),
                        (LockKind::Write, !after.is_empty()),
                    ],
                };
                for (side, taken) in sides {
                    let lock = locks.entry((*side, name)).or_default();
                    look(lock, name, at);
                    if lock.taken && !taken {
                        (lock.free_since, lock.freed) = (at, Some(index));
                    }
                    lock.taken = *taken;
                    // Those of one line come in one after the other.
                    let enters = ran.did.kind == LockKind::Read && ran.change.is_some();
                    if *side == LockKind::Read && enters {
                        lock.free_since = at;
                    }
                }
            }
            What::Joined { kind, name, .. } => {
                let lock = locks.entry((*kind, name)).or_default();
                lock.waiting.insert((at, index));
            }
            What::Departed { kind, name, .. } => {
                let lock = locks.entry((*kind, name)).or_default();
                look(lock, name, at);
                if let Some((_, place)) = story.place(index) {
                    lock.waiting.remove(&(place.joined_at, place.joined));
                }
            }
            _ => {}
        }
    }
    for ((_, name), lock) in &mut locks {
        look(lock, name, conditions.end);
    }
}

/// An attempt under way, or an offer that is not claimed, delays the next one by so much at most.
const ANSWER_ROOM: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::super::tale::{Tale, ms, rough};
    use super::*;

    /// Client 0 holds for ten seconds, client 1 waits and asks at these times.
    fn ten_seconds(asks: &[u64]) -> Tale {
        let mut tale = Tale::new().granted(0, 1).claimed(0, 1, 990).joined(1, 0);
        let renewals = (1..25).map(|round| (round * 400, true));
        let asks = asks.iter().map(|at| (*at, false));
        let mut all: Vec<_> = renewals.chain(asks).collect();
        all.sort_unstable();
        for (at, renewal) in all {
            tale = tale.at(at);
            tale = if renewal {
                tale.renewed(0, 1).prolonged(1, at + 990)
            } else {
                tale.taken(1, 100 + at)
            };
        }
        tale.at(10_000)
            .left(1)
            .released(0, 1)
            .granted(1, 2)
            .claimed(1, 2, 10_990)
            .departed(1, 0, true)
            .left(2)
            .released(1, 2)
    }

    #[test]
    fn a_line_that_nobody_serves_is_caught() {
        let often = ten_seconds(&[5, 10, 2010, 4011, 6013, 8013, 9900]);
        assert_eq!(often.caught(), [""; 0]);
        let rarely = ten_seconds(&[5, 10, 2010, 4011, 6013]);
        assert_eq!(rarely.caught(), ["waiting"]);
        let later = |conditions: &mut Conditions| {
            rough(conditions);
            conditions.healed_from = ms(8013);
        };
        assert_eq!(rarely.caught_under(later), [""; 0]);
        let frozen = |conditions: &mut Conditions| {
            rough(conditions);
            conditions.healed_from = ms(0);
            conditions.frozen = vec![(1, ms(7000), ms(7900))];
        };
        assert_eq!(rarely.caught_under(frozen), [""; 0]);
        let another = |conditions: &mut Conditions| {
            frozen(conditions);
            conditions.frozen[0].0 = 2;
        };
        assert_eq!(rarely.caught_under(another), ["waiting"]);
    }

    /// The message came before the subscription, and nobody tried again.
    #[test]
    fn a_wake_up_that_is_lost_is_caught_in_a_quiet_run() {
        let waits = |until| {
            Tale::new()
                .granted(0, 1)
                .claimed(0, 1, 990)
                .at(10)
                .joined(1, 0)
                .taken(1, 2)
                .left(1)
                .released(0, 1)
                .at(until)
                .granted(1, 3)
                .claimed(1, 3, until + 990)
                .departed(1, 0, true)
                .left(3)
                .released(1, 3)
        };
        assert_eq!(waits(900).caught(), ["waiting"]);
        assert_eq!(waits(900).caught_under(rough), [""; 0]);
        assert_eq!(waits(400).caught(), [""; 0]);
    }

    #[test]
    fn those_who_leave_are_owed_nothing() {
        let mut tale = Tale::new();
        for place in 0..10 {
            tale = tale
                .at(place * 300)
                .joined(0, place)
                .at(place * 300 + 400)
                .departed(0, place, false);
        }
        assert_eq!(tale.caught(), [""; 0]);
    }
}
