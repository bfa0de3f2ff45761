//! What is over stays over: a hold is claimed once, and nothing prolongs it once it was left, lost,
//! or past its deadline; nor is it claimed after that.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold::testing::{HoldId, Holder, What};

use super::story::Story;
use super::{Conditions, ROUNDING, Verdict, Violation};

pub fn check(story: &Story<'_>, _: &Conditions) -> Vec<Violation> {
    let mut verdict = Verdict::of("belief", story);
    let mut states: BTreeMap<HoldId, State> = BTreeMap::new();
    for (index, at, what) in story.iter() {
        match what {
            What::Claimed { hold, until, .. } => {
                let until = *until;
                if until <= at {
                    verdict.broken(&[index], format!("{} was over when claimed", Holder(*hold)));
                }
                let claimed = State::Held { index, until };
                let before = states.insert(*hold, claimed);
                if let Some(before) =
                    before.filter(|before| !matches!(before, State::Passed { .. }))
                {
                    verdict.broken(&[before.index(), index], claimed_again(*hold));
                }
            }
            What::Prolonged { hold, until } => match states.get_mut(hold) {
                Some(State::Held {
                    index: since,
                    until: told,
                }) => {
                    if *told + ROUNDING < at {
                        let what = format!("{} was past its deadline, and is not", Holder(*hold));
                        verdict.broken(&[*since, index], what);
                    }
                    (*since, *told) = (index, *until);
                }
                Some(State::Over { index: since } | State::Passed { index: since }) => {
                    let what = format!("{} was over, and is not", Holder(*hold));
                    verdict.broken(&[*since, index], what);
                }
                None => verdict.broken(&[index], format!("{} was never claimed", Holder(*hold))),
            },
            What::Passed { hold } => match states.insert(*hold, State::Passed { index }) {
                Some(State::Held { .. }) => {}
                _ => verdict.broken(&[index], format!("{} was not held", Holder(*hold))),
            },
            What::Lost { hold, .. } | What::Left { hold } => {
                match states.insert(*hold, State::Over { index }) {
                    Some(State::Held { .. }) => {}
                    // Nobody claimed it.
                    Some(State::Passed { .. }) if matches!(what, What::Left { .. }) => {}
                    Some(State::Passed { .. }) => {
                        verdict.broken(&[index], format!("{} was nobody's to lose", Holder(*hold)));
                    }
                    Some(State::Over { index: since }) => {
                        verdict.broken(&[since, index], format!("{} ends twice", Holder(*hold)));
                    }
                    None => {
                        verdict.broken(&[index], format!("{} was never claimed", Holder(*hold)));
                    }
                }
            }
            _ => {}
        }
    }
    verdict.found
}

#[derive(Clone, Copy)]
enum State {
    Held {
        index: usize,
        until: Duration,
    },
    Over {
        index: usize,
    },
    /// Left by one, and not claimed by the next.
    Passed {
        index: usize,
    },
}

impl State {
    fn index(self) -> usize {
        match self {
            Self::Held { index, .. } | Self::Over { index } | Self::Passed { index } => index,
        }
    }
}

fn claimed_again(hold: HoldId) -> String {
    format!("{} is claimed twice", Holder(hold))
}

#[cfg(test)]
mod tests {
    use leasehold::LossReason;

    use super::super::tale::{Tale, rough};

    #[test]
    fn a_loss_that_reverts_is_caught() {
        let tale = Tale::new()
            .granted(0, 1)
            .claimed(0, 1, 990)
            .at(300)
            .renewed(0, 1)
            .at(990)
            .lost(1, LossReason::DeadlinePassed)
            .at(995)
            .prolonged(1, 1290);
        let caught = tale.caught_under(|conditions| {
            rough(conditions);
            conditions.end = super::super::tale::ms(2000);
        });
        assert_eq!(caught, ["belief"]);
    }

    /// Between the deadline and the answer, somebody could have looked.
    #[test]
    fn an_answer_that_comes_past_the_deadline_is_caught() {
        let tale = Tale::new()
            .granted(0, 1)
            .claimed(0, 1, 990)
            .at(500)
            .renewed(0, 1)
            .at(1000)
            .prolonged(1, 1490)
            .left(1)
            .released(0, 1);
        assert_eq!(tale.caught_under(rough), ["belief"]);
    }

    /// The answer to the request was read too late.
    #[test]
    fn a_grant_that_is_over_is_caught() {
        let tale = Tale::new()
            .granted(0, 1)
            .at(995)
            .claimed(0, 1, 995)
            .left(1)
            .released(0, 1);
        assert_eq!(tale.caught_under(rough), ["belief"]);
    }

    #[test]
    fn an_answer_after_the_end_is_caught() {
        let tale = Tale::new()
            .granted(0, 1)
            .claimed(0, 1, 990)
            .at(500)
            .renewed(0, 1)
            .left(1)
            .prolonged(1, 1490)
            .released(0, 1);
        assert_eq!(tale.caught(), ["belief"]);
    }

    #[test]
    fn a_hold_claimed_by_two_is_caught() {
        let tale = Tale::new()
            .granted(0, 1)
            .claimed(0, 1, 990)
            .claimed(0, 1, 990)
            .left(1)
            .released(0, 1);
        assert_eq!(tale.caught(), ["belief"]);
    }

    /// Within one client the next may have it, once the one before has left it.
    #[test]
    fn a_hold_that_is_passed_on_is_claimed_by_one_who_still_has_it() {
        let passed = |tale: Tale| {
            tale.passed(1)
                .claimed_as(0, 1, 990, 2)
                .left(1)
                .released(0, 1)
        };
        let claimed = || Tale::new().granted_as(0, 1, 1).claimed_as(0, 1, 990, 1);
        assert_eq!(passed(claimed()).caught(), [""; 0]);
        assert_eq!(claimed().passed(1).left(1).released(0, 1).caught(), [""; 0]);
        let twice = passed(claimed().passed(1));
        assert!(twice.caught().contains(&"belief"));
        let lost = claimed().passed(1).lost(1, LossReason::DeadlinePassed);
        assert!(lost.caught_under(rough).contains(&"belief"));
    }
}
