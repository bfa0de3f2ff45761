//! S1: no two are both told "held", and none is told so for longer than the server keeps the lock.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold::testing::{Done, Holder, What};

use super::story::{Hold, Story};
use super::{Conditions, ROUNDING, Verdict, Violation};

pub fn check(story: &Story<'_>, conditions: &Conditions) -> Vec<Violation> {
    let mut verdict = Verdict::of("exclusion", story);
    if !conditions.memory_kept || !conditions.clocks_sane {
        return verdict.found;
    }
    let mut claimed: Vec<_> = story
        .holds
        .iter()
        .filter_map(|(id, hold)| Some((hold.claim?, hold.name.as_ref()?, *id, hold)))
        .collect();
    claimed.sort_unstable_by_key(|(claim, ..)| claim.index);
    // Who believes for the longest, of those before, and who believes to be alone.
    let mut last: BTreeMap<_, (usize, u64, Duration)> = BTreeMap::new();
    let mut alone: BTreeMap<_, (usize, u64, Duration)> = BTreeMap::new();
    for (claim, name, id, hold) in claimed {
        let Some(until) = hold.believed_until() else {
            continue;
        };
        let alone_until = hold.alone_until(until);
        let others = if alone_until.is_some() { &last } else { &alone };
        if let Some((index, other, end)) = others.get(name)
            && claim.at < *end.min(&until.max(claim.at + ROUNDING))
        {
            let (one, two) = (Holder(*other), Holder(id));
            verdict.broken(
                &[*index, claim.index],
                format!("{one} and {two} both hold {name}"),
            );
        }
        for (last, until) in [(&mut last, Some(until)), (&mut alone, alone_until)] {
            if let Some(until) = until
                && last.get(name).is_none_or(|(.., end)| *end < until)
            {
                last.insert(name, (claim.index, id, until));
            }
        }
        if !goes_on(story, id, hold) {
            unbacked(&mut verdict, id, hold, until);
        }
    }
    verdict.found
}

/// Whether a reader's hold went on as a writer's: nobody looks at its guard until that is answered, and the
/// writer's keeps others out.
fn goes_on(story: &Story<'_>, id: u64, hold: &Hold) -> bool {
    // A late copy of its request may bring it back for a while.
    let mut ends = hold.stays.iter().filter_map(|stay| stay.to_index);
    ends.any(|index| match &story.records[index].what {
        What::Ran(ran) => ran.did.verb == Done::Upgrade && ran.did.other == Some(id),
        _ => false,
    })
}

/// Belief that the server does not back: another could enter.
fn unbacked(verdict: &mut Verdict<'_>, id: u64, hold: &Hold, until: Duration) {
    let id = Holder(id);
    let ahead = hold.beliefs.iter().find(|belief| {
        let granted = belief.granted_until.unwrap_or(belief.at);
        belief.until > granted.saturating_add(ROUNDING)
    });
    if let Some(belief) = ahead {
        verdict.broken(
            &[belief.index],
            format!("{id} believes longer than its lease lasts"),
        );
        return;
    }
    let Some(claim) = hold.claim else { return };
    let stay = hold
        .stays
        .iter()
        .rfind(|stay| stay.from_index < claim.index);
    if let Some(stay) = stay.filter(|stay| stay.to.saturating_add(ROUNDING) < until) {
        let shown = stay.to_index.unwrap_or(stay.from_index);
        let records = [claim.index, shown];
        verdict.broken_at(
            stay.to,
            &records,
            format!("{id} was held, but not by the server"),
        );
    }
}

#[cfg(test)]
mod tests {
    use leasehold::testing::{Answered, Done};
    use leasehold::{LockKind, LossReason};

    use super::super::tale::{Tale, ms, rough, stormy};

    /// The second enters on the server's word, the first counts from the wrong moment.
    #[test]
    fn two_who_believe_at_once_are_caught() {
        let tale = Tale::new()
            .granted(0, 1)
            .at(100)
            .claimed(0, 1, 1090)
            .at(1005)
            .vanished(true)
            .granted(1, 2)
            .claimed(1, 2, 1990)
            .at(1090)
            .lost(1, LossReason::DeadlinePassed)
            .left(2)
            .released(1, 2);
        assert_eq!(tale.caught_under(rough), ["exclusion"]);
        assert_eq!(tale.caught_under(stormy), [""; 0]);
    }

    /// A reader and a writer of one lock; both entered on the server's word.
    fn beside(first: LockKind, second: LockKind) -> Tale {
        let both = [(1, 1), (2, 1)];
        let granted = Answered::Granted(1);
        Tale::new()
            .side(first)
            .granted_as(0, 1, 1)
            .claimed_as(0, 1, 990, 1)
            .at(10)
            .side(second)
            .does(1, Done::Acquire, 2, 1, granted, &both, Some(ms(990)))
            .claimed_as(1, 2, 990, 1)
            .at(20)
            .left(1)
            .side(first)
            .does(0, Done::Release, 1, 0, Answered::Done, &both[1..], None)
            .left(2)
            .side(second)
            .released(1, 2)
    }

    #[test]
    fn only_readers_hold_it_at_once() {
        let caught = |first, second| beside(first, second).caught_under(rough);
        let (read, write) = (LockKind::Read, LockKind::Write);
        assert_eq!(caught(read, read), [""; 0]);
        for (first, second) in [(read, write), (write, read), (write, write)] {
            let caught = caught(first, second);
            assert!(caught.contains(&"exclusion"), "{caught:?}");
            assert!(caught.contains(&"owners"), "{caught:?}");
        }
    }

    /// What was a writer's lets readers in from when its client has asked for that.
    #[test]
    fn who_reads_on_is_not_alone() {
        let tale = |asked: bool| {
            let write = Tale::new().side(LockKind::Write).granted_as(0, 1, 1);
            let mut tale = write.claimed_as(0, 1, 990, 1).at(10);
            if asked {
                tale = tale.unchanged(0, Done::Downgrade, 1, 1, Answered::Done);
            }
            let both = [(1, 1), (2, 1)];
            let granted = Answered::Granted(1);
            tale.side(LockKind::Read)
                .does(1, Done::Acquire, 2, 1, granted, &both, Some(ms(990)))
                .claimed_as(1, 2, 990, 1)
                .at(20)
                .left(2)
                .does(1, Done::Release, 2, 0, Answered::Done, &both[..1], None)
                .left(1)
                .side(LockKind::Write)
                .released(0, 1)
        };
        assert_eq!(tale(true).caught_under(rough), [""; 0]);
        let caught = tale(false).caught_under(rough);
        assert!(caught.contains(&"exclusion"), "{caught:?}");
        assert!(caught.contains(&"owners"), "{caught:?}");
    }

    /// Nobody else is there yet.
    #[test]
    fn a_belief_longer_than_the_lease_is_caught() {
        let tale = Tale::new()
            .granted(0, 1)
            .at(100)
            .claimed(0, 1, 1090)
            .left(1)
            .released(0, 1);
        assert_eq!(tale.caught(), ["exclusion"]);
        let tale = Tale::new()
            .granted(0, 1)
            .claimed(0, 1, 990)
            .at(300)
            .renewed(0, 1)
            .at(400)
            .prolonged(1, 1390)
            .left(1)
            .released(0, 1);
        assert_eq!(tale.caught(), ["exclusion"]);
    }

    /// A clean-up of one level that releases them all.
    #[test]
    fn a_hold_removed_while_believed_in_is_caught() {
        let tale = Tale::new()
            .granted(0, 1)
            .claimed(0, 1, 990)
            .at(300)
            .released(0, 1)
            .at(500)
            .left(1);
        assert_eq!(tale.caught(), ["exclusion"]);
    }

    #[test]
    fn one_after_the_other_is_fine() {
        let tale = Tale::new()
            .granted(0, 1)
            .claimed(0, 1, 990)
            .at(990)
            .lost(1, LossReason::DeadlinePassed)
            .at(1001)
            .vanished(true)
            .granted(1, 2)
            .claimed(1, 2, 1991)
            .left(2)
            .released(1, 2)
            .on("other")
            .granted(1, 3)
            .claimed(1, 3, 1991)
            .left(3)
            .released(1, 3);
        assert_eq!(tale.caught_under(rough), [""; 0]);
    }

    /// Its holder has stopped: he believes nothing past his deadline, whenever he says so.
    #[test]
    fn a_loss_told_late_is_no_overlap() {
        let tale = Tale::new()
            .granted(0, 1)
            .claimed(0, 1, 990)
            .at(1001)
            .vanished(true)
            .granted(1, 2)
            .claimed(1, 2, 1991)
            .at(1500)
            .lost(1, LossReason::DeadlinePassed)
            .unchanged(0, Done::Release, 1, 0, Answered::Gone)
            .left(2)
            .released(1, 2);
        let caught = tale.caught_under(|conditions| {
            rough(conditions);
            conditions.frozen = vec![(0, ms(500), ms(1500))];
        });
        assert_eq!(caught, [""; 0]);
    }
}
