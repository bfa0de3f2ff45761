//! Counts follow the holder's depth: an op leaves the count it asks for, and nobody asks for levels
//! that were not entered.

use std::collections::BTreeMap;

use leasehold::testing::{Did, Done, HoldId, Ran, What};

use super::story::Story;
use super::{Conditions, Verdict, Violation};

pub fn check(story: &Story<'_>, _: &Conditions) -> Vec<Violation> {
    let mut verdict = Verdict::of("counts", story);
    // The deepest level asked for so far.
    let mut deepest: BTreeMap<HoldId, u32> = BTreeMap::new();
    for (index, _, what) in story.iter() {
        match what {
            What::Sent { ops, .. } => {
                for did in ops {
                    let deepest = deepest.entry(did.hold).or_default();
                    if did.count > most(did, *deepest) {
                        verdict.broken(&[index], format!("{did} though it never was so deep"));
                    }
                    if matches!(
                        did.verb,
                        Done::Acquire | Done::Enqueue | Done::HandOff | Done::Downgrade
                    ) {
                        *deepest = did.count.max(*deepest);
                    }
                }
            }
            What::Ran(ran) => {
                if let Some(count) = left(ran).filter(|count| *count != ran.did.count) {
                    verdict.broken(&[index], format!("{} leaves {count}", ran.did));
                }
            }
            _ => {}
        }
    }
    verdict.found
}

/// The count that the op may ask for.
fn most(did: &Did, deepest: u32) -> u32 {
    match did.verb {
        // The level of an acquisition that is posted counts for a renewal, and it may never be sent.
        Done::Acquire | Done::Enqueue | Done::Renew | Done::HandOff | Done::Upgrade => deepest + 1,
        Done::Release | Done::Force | Done::Beat | Done::Remember => deepest,
        // Those who read within a hold that writes enter without asking.
        Done::Downgrade => u32::MAX,
    }
}

/// The count that the op left, if it changed it: zero without the hold.
fn left(ran: &Ran) -> Option<u32> {
    let (before, after) = ran.change.as_ref()?;
    let count = |owners: &[(HoldId, u32)]| {
        let own = owners.iter().find(|(hold, _)| *hold == ran.did.hold);
        own.map_or(0, |(_, count)| *count)
    };
    let (before, after) = (count(before), count(after));
    (before != after).then_some(after)
}

#[cfg(test)]
mod tests {
    use leasehold::testing::Answered;

    use super::super::tale::Tale;
    use super::*;

    fn held() -> Tale {
        Tale::new().granted(0, 1).claimed(0, 1, 990).depth(0, 1, 2)
    }

    fn ends(tale: Tale) -> Vec<&'static str> {
        tale.left(1).released(0, 1).caught()
    }

    #[test]
    fn a_count_other_than_asked_for_is_caught() {
        let twice = held().does(0, Done::Acquire, 1, 3, Answered::Done, &[(1, 4)], None);
        assert_eq!(ends(twice), ["counts"]);
        let inner = held().does(0, Done::Release, 1, 1, Answered::Done, &[(1, 3)], None);
        assert_eq!(ends(inner), ["counts"]);
        let renewal = held().does(0, Done::Renew, 1, 2, Answered::Done, &[(1, 1)], None);
        assert_eq!(ends(renewal), ["counts"]);
    }

    #[test]
    fn levels_that_were_never_entered_are_caught() {
        let leaves = held().does(0, Done::Release, 1, 3, Answered::Done, &[(1, 3)], None);
        assert_eq!(ends(leaves), ["counts"]);
        let enters = held().does(0, Done::Acquire, 1, 4, Answered::Done, &[(1, 4)], None);
        assert_eq!(ends(enters), ["counts"]);
    }

    #[test]
    fn levels_entered_and_left_are_fine() {
        let tale = held().depth(0, 1, 3).depth(0, 1, 2).renewed(0, 1);
        assert_eq!(ends(tale.depth(0, 1, 3).depth(0, 1, 1)), [""; 0]);
    }
}
