//! V1: a holder is told of a loss no later than his deadline.

use leasehold::testing::Holder;

use super::story::{Over, Story};
use super::{Conditions, ROUNDING, Verdict, Violation};

pub fn check(story: &Story<'_>, conditions: &Conditions) -> Vec<Violation> {
    let mut verdict = Verdict::of("silence", story);
    for (id, hold) in &story.holds {
        let (Some(claim), Some(last)) = (hold.claim, hold.beliefs.last()) else {
            continue;
        };
        let until = last.until;
        let due = conditions.due(claim.client, until, ROUNDING);
        let id = Holder(*id);
        match hold.over {
            // He who leaves looks at the clock himself, however late he comes.
            Some(Over {
                index,
                at,
                lost: None,
            }) if at > until + ROUNDING && !hold.nobodys => {
                let what = format!("{id} was past its deadline when left, and not lost");
                verdict.broken(&[last.index, index], what);
            }
            Some(Over {
                index,
                at,
                lost: Some(_),
            }) if at > due => {
                let what = format!("{id} was told of its loss too late");
                verdict.broken(&[last.index, index], what);
            }
            None if conditions.end > due => {
                let what = format!("{id} was never told of its loss");
                verdict.broken_at(due, &[last.index], what);
            }
            _ => {}
        }
    }
    verdict.found
}

#[cfg(test)]
mod tests {
    use leasehold::LossReason;

    use super::super::tale::{Tale, ms, rough};
    use super::super::{Conditions, Duration};

    fn told_at(at: u64) -> Tale {
        let tale = Tale::new().granted(0, 1).claimed(0, 1, 990).at(at);
        tale.lost(1, LossReason::DeadlinePassed).at(9000)
    }

    #[test]
    fn a_loss_that_is_told_late_is_caught() {
        assert_eq!(told_at(991).caught_under(rough), [""; 0]);
        assert_eq!(told_at(1000).caught_under(rough), ["silence"]);
    }

    #[test]
    fn who_is_put_off_or_stands_still_is_late_by_so_much() {
        let slack = |slack: Duration| {
            move |conditions: &mut Conditions| {
                rough(conditions);
                conditions.slack = slack;
            }
        };
        assert_eq!(told_at(1000).caught_under(slack(ms(20))), [""; 0]);
        assert_eq!(told_at(1020).caught_under(slack(ms(20))), ["silence"]);
        let frozen = |conditions: &mut Conditions| {
            rough(conditions);
            conditions.frozen = vec![(0, ms(500), ms(980)), (0, ms(985), ms(3000))];
        };
        assert_eq!(told_at(3000).caught_under(frozen), [""; 0]);
        assert_eq!(told_at(3002).caught_under(frozen), ["silence"]);
    }

    #[test]
    fn a_loss_that_is_never_told_is_caught() {
        let tale = Tale::new().granted(0, 1).claimed(0, 1, 990).at(9000);
        assert_eq!(tale.caught_under(rough), ["silence"]);
        let killed = |conditions: &mut Conditions| {
            rough(conditions);
            conditions.frozen = vec![(0, ms(500), Duration::MAX)];
        };
        assert_eq!(tale.caught_under(killed), [""; 0]);
    }

    /// It is nobody's that he could have told.
    #[test]
    fn what_nobody_claimed_may_be_left_past_its_deadline() {
        let passed = Tale::new().granted(0, 1).claimed(0, 1, 990).passed(1);
        assert_eq!(
            passed.at(1000).left(1).released(0, 1).caught_under(rough),
            [""; 0]
        );
    }

    /// He leaves in good faith what was no longer his.
    #[test]
    fn who_leaves_past_his_deadline_without_a_word_is_caught() {
        let tale = Tale::new().granted(0, 1).claimed(0, 1, 990).at(995);
        assert_eq!(tale.left(1).released(0, 1).caught_under(rough), ["silence"]);
    }
}
