//! No loss is false: what is said to be gone was gone, a deadline is not told before its time, and
//! without faults nothing is lost but by the holder's own choice.

use std::time::Duration;

use leasehold::LossReason;
use leasehold::testing::{Answered, Done, Holder, What};

use super::story::{Belief, Hold, Over, Story};
use super::{Conditions, ROUNDING, Verdict, Violation};

pub fn check(story: &Story<'_>, conditions: &Conditions) -> Vec<Violation> {
    let mut verdict = Verdict::of("losses", story);
    let forced: Vec<_> = story
        .ran()
        .filter(|(_, _, ran)| ran.did.verb == Done::Force && ran.answer == Answered::Done)
        .map(|(_, at, ran)| (ran.did.hold, at))
        .chain(unanswered_forces(story))
        .collect();
    for (id, hold) in &story.holds {
        let Some(Over {
            index,
            lost: Some(reason),
            ..
        }) = hold.over
        else {
            continue;
        };
        if let Some(wrong) = wrong(*id, hold, reason, &forced, conditions) {
            let shown = hold.beliefs.last().map(|belief| belief.index);
            let records: Vec<_> = shown.into_iter().chain([index]).collect();
            verdict.broken(&records, format!("{} {wrong}", Holder(*id)));
        }
    }
    verdict.found
}

/// Forced releases that were asked for: one whose answer was lost, and which then finds nothing, may
/// have done it. One that is about to be sent explains what is found gone at that moment.
fn unanswered_forces<'a>(story: &Story<'a>) -> impl Iterator<Item = (u64, Duration)> + use<'a> {
    story.iter().flat_map(|(_, at, what)| {
        let ops = match what {
            What::Sent { ops, .. } => ops.as_slice(),
            _ => &[],
        };
        let forces = ops.iter().filter(|did| did.verb == Done::Force);
        forces.map(move |did| (did.hold, at))
    })
}

/// What is wrong with a loss for this reason.
fn wrong(
    id: u64,
    hold: &Hold,
    reason: LossReason,
    forced: &[(u64, Duration)],
    conditions: &Conditions,
) -> Option<&'static str> {
    let over = hold.over?;
    let fixed = hold
        .name
        .as_ref()
        .is_some_and(|name| conditions.fixed_leases.contains(name));
    match reason {
        LossReason::DeadlinePassed => {
            if hold.beliefs.last()?.until > over.at + ROUNDING {
                return Some("is lost before its deadline");
            }
            (calm(hold, conditions) && !fixed).then_some("was not renewed in time")
        }
        LossReason::KeyGone | LossReason::TakenByOther => {
            let told = hold.gone.filter(|gone| gone.index < over.index);
            let trusted = conditions.memory_kept && conditions.clocks_sane;
            match told {
                None => Some("is said to be gone, and nobody had looked"),
                Some(gone) if gone.absurd && trusted => Some("is said to be gone, and was there"),
                Some(_) if trusted && calm(hold, conditions) => {
                    Some("was gone, and nothing had happened")
                }
                Some(_) => None,
            }
        }
        LossReason::Forced => {
            let by_force = forced
                .iter()
                .any(|(hold, at)| *hold == id && *at <= over.at);
            (!by_force).then_some("was not released by force")
        }
        // Nobody but its holder chooses these.
        _ => None,
    }
}

/// Whether there were no faults in the hold's time, and half of its lease was left when it began: a
/// grant may have been asked for before.
fn calm(hold: &Hold, conditions: &Conditions) -> bool {
    let fresh = |belief: &Belief| belief.until >= belief.at + hold.lease / 2;
    if !hold.beliefs.first().is_some_and(fresh) {
        return false;
    }
    hold.claim.is_some_and(|claim| {
        let frozen = conditions
            .frozen
            .iter()
            .any(|(client, _, to)| *client == claim.client && *to > claim.at);
        claim.at >= conditions.healed_from && !frozen
    })
}

#[cfg(test)]
mod tests {
    use super::super::Duration;
    use super::super::tale::{Tale, rough, stormy};
    use super::*;

    fn held() -> Tale {
        Tale::new().granted(0, 1).claimed(0, 1, 990).at(300)
    }

    #[test]
    fn a_loss_of_what_is_there_is_caught() {
        let tale = held()
            .unchanged(0, Done::Renew, 1, 1, Answered::Gone)
            .lost(1, LossReason::KeyGone)
            .at(5000);
        assert_eq!(tale.caught_under(rough), ["losses"]);
        let tale = held().lost(1, LossReason::KeyGone).at(5000);
        assert_eq!(tale.caught_under(stormy), ["losses"]);
    }

    #[test]
    fn a_loss_of_what_was_deleted_is_true() {
        let tale = held()
            .vanished(false)
            .unchanged(0, Done::Renew, 1, 1, Answered::Gone)
            .lost(1, LossReason::KeyGone)
            .at(5000);
        let deleted = |conditions: &mut Conditions| {
            rough(conditions);
            conditions.memory_kept = false;
        };
        assert_eq!(tale.caught_under(deleted), [""; 0]);
    }

    #[test]
    fn a_deadline_told_before_its_time_is_caught() {
        let tale = held().lost(1, LossReason::DeadlinePassed).at(5000);
        assert_eq!(tale.caught_under(rough), ["losses"]);
    }

    /// Nobody renewed it, though it was to be renewed.
    #[test]
    fn a_loss_without_faults_is_caught_unless_the_lease_is_fixed() {
        let tale = held().at(990).lost(1, LossReason::DeadlinePassed).at(5000);
        assert_eq!(tale.caught(), ["losses"]);
        let healed = |conditions: &mut Conditions| {
            rough(conditions);
            conditions.healed_from = Duration::ZERO;
        };
        assert_eq!(tale.caught_under(healed), ["losses"]);
        assert_eq!(tale.caught_under(rough), [""; 0]);
        let fixed = |conditions: &mut Conditions| {
            conditions.fixed_leases.insert("job".into());
        };
        assert_eq!(tale.caught_under(fixed), [""; 0]);
        for chosen in [LossReason::MaxHold, LossReason::ClientClosed] {
            assert_eq!(held().lost(1, chosen).at(5000).caught(), [""; 0]);
        }
    }

    #[test]
    fn force_without_force_is_caught() {
        let tale = held().lost(1, LossReason::Forced).at(5000);
        assert_eq!(tale.caught_under(stormy), ["losses"]);
        let tale = held()
            .does(1, Done::Force, 1, 0, Answered::Done, &[], None)
            .lost(1, LossReason::Forced)
            .at(5000);
        assert_eq!(tale.caught_under(stormy), [""; 0]);
    }
}
