//! L1: nothing is renewed that nobody believes in: neither before it is claimed, nor after it was left
//! or lost.
//!
//! A renewal may wait for a connection while its hold is lost: that one must be refused as late.

use std::collections::BTreeMap;

use leasehold::testing::{Answered, Done, Holder, What};

use super::story::Story;
use super::{Conditions, Verdict, Violation};

pub fn check(story: &Story<'_>, _: &Conditions) -> Vec<Violation> {
    let mut verdict = Verdict::of("renewals", story);
    // Sent after the loss, by client, attempt and hold.
    let mut stray = BTreeMap::new();
    for (index, _, what) in story.iter() {
        match what {
            What::Sent {
                client,
                attempt,
                ops,
            } => {
                for did in ops.iter().filter(|did| did.verb == Done::Renew) {
                    let hold = story.holds.get(&did.hold);
                    let claim = hold.and_then(|hold| hold.claim);
                    let over = hold.and_then(|hold| hold.over);
                    let id = Holder(did.hold);
                    match over.filter(|over| over.index < index) {
                        Some(over) if over.lost.is_some() => {
                            let request = (*client, *attempt, did.hold);
                            stray.insert(request, [over.index, index]);
                        }
                        Some(over) => {
                            let what = format!("{id} is renewed after it was left");
                            verdict.broken(&[over.index, index], what);
                        }
                        None if claim.is_some_and(|claim| claim.index < index) => {}
                        None => verdict.broken(&[index], format!("{id} is renewed for nobody")),
                    }
                }
            }
            What::Ran(ran) if ran.did.verb == Done::Renew && ran.answer == Answered::Done => {
                let request = (ran.client, ran.attempt, ran.did.hold);
                if let Some([over, sent]) = stray.get(&request) {
                    let what = format!("{} is renewed after its loss", Holder(ran.did.hold));
                    verdict.broken(&[*over, *sent, index], what);
                }
            }
            _ => {}
        }
    }
    verdict.found
}

#[cfg(test)]
mod tests {
    use leasehold::LossReason;

    use super::super::tale::{Tale, rough};
    use super::*;

    #[test]
    fn a_renewal_after_the_end_is_caught() {
        let left = Tale::new()
            .granted(0, 1)
            .claimed(0, 1, 990)
            .left(1)
            .sent(0, Done::Renew, 1, 1)
            .released(0, 1);
        assert_eq!(left.caught(), ["renewals"]);
        let lost = Tale::new()
            .granted(0, 1)
            .claimed(0, 1, 990)
            .at(990)
            .lost(1, LossReason::DeadlinePassed)
            .renewed(0, 1)
            .at(5000);
        assert_eq!(lost.caught_under(rough), ["renewals"]);
        let refused = Tale::new()
            .granted(0, 1)
            .claimed(0, 1, 990)
            .at(990)
            .lost(1, LossReason::DeadlinePassed)
            .unchanged(0, Done::Renew, 1, 1, Answered::Late)
            .at(5000);
        assert_eq!(refused.caught_under(rough), [""; 0]);
    }

    #[test]
    fn a_renewal_for_nobody_is_caught() {
        let offer = Tale::new()
            .granted(0, 1)
            .sent(0, Done::Renew, 1, 1)
            .claimed(0, 1, 990)
            .left(1)
            .released(0, 1);
        assert_eq!(offer.caught(), ["renewals"]);
        let never = Tale::new()
            .granted(0, 1)
            .sent(0, Done::Renew, 1, 1)
            .released(0, 1);
        assert_eq!(never.caught(), ["renewals"]);
    }
}
