//! S3: no op touches a hold other than the one it names, however late; and none does what its answer
//! denies.
//!
//! Also what else an op may never do: create when it renews, do anything but remove past its
//! deadline, shorten a lease somebody may believe in; and a lease does not end before its time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold::LockKind;
use leasehold::testing::{Answered, Did, Done, HoldId, Holder, Owners, Ran, What};

use super::story::{Story, writer_after};
use super::{Conditions, Verdict, Violation};

pub fn check(story: &Story<'_>, conditions: &Conditions) -> Vec<Violation> {
    let mut verdict = Verdict::of("owners", story);
    let comparable = conditions.clocks_sane && conditions.memory_kept && conditions.expiry_kept;
    // By name, and by hold where each has a lease of its own.
    let mut leases: BTreeMap<(&Arc<str>, Option<HoldId>), Lease> = BTreeMap::new();
    let mut writers: BTreeMap<&Arc<str>, Option<HoldId>> = BTreeMap::new();
    for (index, at, what) in story.iter() {
        let ran = match what {
            What::Ran(ran) => ran,
            What::Vanished { name, expired, .. } => {
                writers.remove(name);
                let ended = leases.extract_if(.., |(of, _), _| *of == name);
                for (_, before) in ended.collect::<Vec<_>>() {
                    if *expired && comparable && before.shortened(at, 0) {
                        let what = format!("the lease on {name} is over too early");
                        verdict.broken(&[before.index, index], what);
                    }
                }
                continue;
            }
            What::ReaderGone { name, hold } => {
                let before = leases.remove(&(name, Some(*hold)));
                let early = |before: &Lease| comparable && before.shortened(at, 0);
                if let Some(before) = before.filter(early) {
                    let what = format!("a reader's lease on {name} is over too early");
                    verdict.broken(&[before.index, index], what);
                }
                continue;
            }
            _ => continue,
        };
        let asks = matches!(ran.did.verb, Done::Acquire | Done::Enqueue | Done::HandOff);
        let refused = asks && ran.answer == Answered::Nothing;
        if refused && !conditions.spoilt.contains(&ran.did.name) {
            verdict.broken(&[index], format!("{} is refused for no reason", ran.did));
        }
        let writer = writers.entry(&ran.did.name).or_default();
        if let Some(wrong) = wrong(ran, *writer) {
            verdict.broken(&[index], format!("{} {wrong}", ran.did));
        }
        *writer = writer_after(*writer, ran);
        let plain = matches!(ran.did.kind, LockKind::Plain | LockKind::Fair);
        let lease = (&ran.did.name, (!plain).then_some(ran.did.hold));
        let before = leases.remove(&lease);
        if let Some((_, after)) = ran.change.as_ref().filter(|_| !plain) {
            // Released, or gone on under another id.
            let there = |hold| after.iter().any(|(owner, _)| Some(*owner) == hold);
            leases.retain(|(name, hold), _| *name != &ran.did.name || there(*hold));
        }
        let Some(left_ms) = ran.left_ms else { continue };
        let same = ran
            .change
            .as_ref()
            .is_none_or(|(before, after)| !plain || alike(before, after));
        if let Some(before) = before.filter(|_| same && comparable)
            && before.shortened(at, left_ms)
        {
            let what = format!("{} shortens the lease", ran.did);
            verdict.broken(&[before.index, index], what);
        }
        leases.insert(lease, Lease { index, at, left_ms });
    }
    verdict.found
}

/// What an op did that it must not.
fn wrong(ran: &Ran, writer: Option<HoldId>) -> Option<String> {
    let did = &ran.did;
    // From one to another: it takes the place of the one that it names besides.
    let hands_on = matches!(did.verb, Done::HandOff | Done::Upgrade);
    let alone = did.kind != LockKind::Read || did.verb == Done::Upgrade;
    let takes = matches!(did.verb, Done::Acquire | Done::Enqueue) && did.count == 1;
    let creates = hands_on || takes;
    let removes = did.count == 0 && matches!(did.verb, Done::Release | Done::Force);
    let Some((before, after)) = &ran.change else {
        // A copy of what lets a writer read on may come late, and finds it done.
        let moved = ran.answer == Answered::Done && !removes && did.verb != Done::Downgrade;
        return (ran.late && moved).then(|| "is done though late".to_owned());
    };
    match ran.answer {
        Answered::Granted(_) | Answered::Done => {}
        answer => return Some(format!("changes the owners, and is answered {answer:?}")),
    }
    if let Some(other) = other_changed(did, before, after) {
        return Some(format!("changes {}", Holder(other)));
    }
    let had = before.iter().any(|(hold, _)| *hold == did.hold);
    let has = after.iter().any(|(hold, _)| *hold == did.hold);
    let gone = |owners: &Owners| !owners.iter().any(|(hold, _)| Some(*hold) == did.other);
    match (had, has) {
        (false, true) if !creates => Some("creates".to_owned()),
        (false, true) if hands_on && (gone(before) || !gone(after)) => {
            Some("hands on what it had not, or keeps it".to_owned())
        }
        (false, true) if !hands_on && alone && !before.is_empty() => {
            Some("enters a lock that is taken".to_owned())
        }
        (false, true)
            if before
                .iter()
                .any(|(hold, _)| Some(*hold) == writer && !hands_on) =>
        {
            Some("reads while another writes".to_owned())
        }
        (false, true) if did.verb == Done::Upgrade && before.len() > 1 => {
            Some("writes while others read".to_owned())
        }
        (true, false) if !removes => Some("removes".to_owned()),
        (true, true) if removes => Some("does not remove".to_owned()),
        (true, true) if creates => Some("is done twice".to_owned()),
        (_, true) if ran.late => Some("is done though late".to_owned()),
        _ => None,
    }
}

/// A hold that the op does not name and that came, went or has another count.
fn other_changed(did: &Did, before: &Owners, after: &Owners) -> Option<u64> {
    let named = |hold| hold == did.hold || Some(hold) == did.other;
    let missing = |those: &Owners, these: &Owners| {
        those
            .iter()
            .find(|owner| !named(owner.0) && !these.contains(owner))
            .map(|(hold, _)| *hold)
    };
    missing(before, after).or_else(|| missing(after, before))
}

fn alike(before: &Owners, after: &Owners) -> bool {
    let ids = |owners: &Owners| owners.iter().map(|(hold, _)| *hold).collect::<Vec<_>>();
    ids(before) == ids(after)
}

/// What was left of a key's lease, when somebody looked.
struct Lease {
    index: usize,
    at: Duration,
    left_ms: u64,
}

impl Lease {
    /// Whether `left_ms` is less than what time alone has left. Clocks may differ by 0.5 %.
    fn shortened(&self, at: Duration, left_ms: u64) -> bool {
        let passed = at.saturating_sub(self.at);
        let left = Duration::from_millis(left_ms) + passed + passed / 200;
        left + Duration::from_millis(2) < Duration::from_millis(self.left_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tale::{Tale, ms, rough};
    use super::*;

    const DONE: Answered = Answered::Done;

    /// One hold, then what `act` does, then its end.
    fn meanwhile(act: impl FnOnce(Tale) -> Tale) -> Vec<&'static str> {
        let tale = Tale::new().granted(0, 1).claimed(0, 1, 990).at(100);
        act(tale).at(5000).caught_under(|conditions| {
            rough(conditions);
            // Only what the op itself does is judged here: its holder is no more.
            conditions.frozen = vec![(0, ms(0), Duration::MAX)];
            conditions.memory_kept = false;
        })
    }

    #[test]
    fn a_refusal_without_a_reason_is_caught() {
        let refused = || Tale::new().unchanged(0, Done::Acquire, 1, 1, Answered::Nothing);
        assert_eq!(refused().caught(), ["owners"]);
        let spoilt = refused().caught_under(|conditions| {
            conditions.spoilt.insert("job".into());
        });
        assert!(spoilt.is_empty());
    }

    #[test]
    fn an_op_that_touches_another_hold_is_caught() {
        let release = |tale: Tale| tale.does(1, Done::Release, 2, 0, DONE, &[], None);
        assert_eq!(meanwhile(|tale| release(tale.taken(1, 2))), ["owners"]);
        let force = |tale: Tale| tale.does(1, Done::Force, 2, 0, DONE, &[], None);
        assert_eq!(meanwhile(|tale| force(tale.taken(1, 2))), ["owners"]);
        let enters = |tale: Tale| {
            let both = [(1, 1), (2, 1)];
            tale.does(1, Done::Acquire, 2, 1, Answered::Granted(9), &both, None)
        };
        assert_eq!(meanwhile(enters), ["owners"]);
        let takes_over = |tale: Tale| {
            tale.does(
                1,
                Done::Acquire,
                2,
                1,
                Answered::Granted(9),
                &[(2, 1)],
                None,
            )
        };
        assert_eq!(meanwhile(takes_over), ["owners"]);
    }

    #[test]
    fn a_renewal_or_a_nested_request_that_creates_is_caught() {
        for verb in [Done::Renew, Done::Acquire] {
            let count = if verb == Done::Renew { 1 } else { 2 };
            let tale = Tale::new()
                .granted(0, 1)
                .claimed(0, 1, 990)
                .at(500)
                .vanished(false)
                .does(0, verb, 1, count, DONE, &[(1, count)], Some(ms(1000)))
                .left(1)
                .released(0, 1);
            let caught = tale.caught_under(|conditions| {
                rough(conditions);
                conditions.memory_kept = false;
            });
            assert_eq!(caught, ["owners"]);
        }
    }

    #[test]
    fn a_denial_that_changes_something_is_caught() {
        for answer in [
            Answered::Late,
            Answered::Gone,
            Answered::Taken,
            Answered::Nothing,
        ] {
            let denied = |tale: Tale| tale.does(0, Done::Release, 1, 0, answer, &[], None);
            assert_eq!(meanwhile(denied), ["owners"]);
        }
    }

    #[test]
    fn what_is_done_too_late_is_caught() {
        let grant = Tale::new()
            .late()
            .granted(0, 1)
            .claimed(0, 1, 990)
            .left(1)
            .released(0, 1);
        assert_eq!(grant.caught(), ["owners"]);
        assert_eq!(meanwhile(|tale| tale.late().renewed(0, 1)), ["owners"]);
        assert_eq!(meanwhile(|tale| tale.late().depth(0, 1, 2)), ["owners"]);
        assert_eq!(
            meanwhile(|tale| tale.left(1).late().released(0, 1)),
            [""; 0]
        );
    }

    #[test]
    fn a_lease_that_is_shortened_is_caught() {
        let shortened = |lease| {
            let tale = Tale::new()
                .granted(0, 1)
                .claimed(0, 1, 990)
                .at(100)
                .does(0, Done::Renew, 1, 1, DONE, &[(1, 1)], Some(lease))
                .left(1)
                .released(0, 1);
            tale.caught_under(rough)
        };
        assert_eq!(shortened(ms(500)), ["owners"]);
        assert_eq!(shortened(ms(900)), [""; 0]);
        assert_eq!(shortened(ms(1000)), [""; 0]);
    }

    #[test]
    fn a_lease_that_is_over_too_early_is_caught() {
        let ends_at = |then| {
            let tale = Tale::new().granted(0, 1).claimed(0, 1, 990).at(then);
            tale.vanished(true).caught_under(|conditions| {
                rough(conditions);
                // Its holder is not told: that is not judged here.
                conditions.frozen = vec![(0, ms(0), Duration::MAX)];
            })
        };
        assert!(ends_at(500).contains(&"owners"));
        assert!(!ends_at(1000).contains(&"owners"));
    }

    #[test]
    fn a_forced_release_of_the_one_named_is_fine() {
        let force = |tale: Tale| tale.does(1, Done::Force, 1, 0, DONE, &[], None);
        assert_eq!(meanwhile(force), [""; 0]);
    }
}
