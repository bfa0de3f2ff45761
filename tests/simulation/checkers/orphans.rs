//! L1: nothing is held for nobody for longer than a lease and one command timeout, and nothing at
//! all at the end.

use std::time::Duration;

use leasehold::testing::{Holder, What};

use super::story::{Hold, Place, Stay, Story};
use super::{Conditions, Verdict, Violation};

pub fn check(story: &Story<'_>, conditions: &Conditions) -> Vec<Violation> {
    let mut verdict = Verdict::of("orphans", story);
    for (id, hold) in &story.holds {
        for stay in &hold.stays {
            let over = match (hold.over, hold.claim) {
                (Some(over), _) => over.at,
                // Believed in until its client stopped or the run ended.
                (None, Some(_)) => continue,
                (None, None) => stay.from,
            };
            // Without expiry it stays until somebody takes it away.
            if !conditions.expiry_kept {
                continue;
            }
            let bound = over.saturating_add(if released_at_once(hold, conditions) {
                conditions.wake + OFFER_WINDOW + conditions.slack
            } else {
                room(hold, conditions)
            });
            if stay.to > bound {
                let shown = stay.to_index.unwrap_or(stay.from_index);
                let what = format!("{} stays on the server for nobody", Holder(*id));
                verdict.broken_at(bound, &[stay.from_index, shown], what);
            } else if let Some(due) = forgotten(story, hold, stay, conditions) {
                let what = format!("{} is there for nobody, and is not released", Holder(*id));
                verdict.broken_at(due, &[stay.from_index], what);
            }
        }
        still_there(&mut verdict, *id, hold, conditions);
    }
    at_rest(&mut verdict, story, conditions);
    verdict.found
}

/// Whether nothing delays the release: no fault, and no one who left it lost, at the end of its lease.
fn released_at_once(hold: &Hold, conditions: &Conditions) -> bool {
    let lost = hold.over.is_some_and(|over| over.lost.is_some());
    conditions.quiet && conditions.polled && !lost
}

/// When the client had to have sent the release, if it could send, and did not: once more for a hold
/// that a copy of its request made after the first release.
fn forgotten(
    story: &Story<'_>,
    hold: &Hold,
    stay: &Stay,
    conditions: &Conditions,
) -> Option<Duration> {
    let over = hold.over.map(|over| over.at);
    // What was lost is released when it is left, of which there is no record.
    let lost = hold.over.is_some_and(|over| over.lost.is_some());
    // Past the lease, as the client counts it, a release is given up.
    let ends = conditions.clock_never_back && conditions.clocks_sane && conditions.expiry_kept;
    if lost || stay.by_copy || !ends {
        return None;
    }
    let since = stay.from.max(over.or(hold.asked).unwrap_or_default());
    if hold.release.is_some_and(|release| release >= since) {
        return None;
    }
    // An answer to wait for, the copy's deadline, and offers that nobody claims.
    let room = conditions.command_timeout.min(hold.lease / 6) * 2 + OFFER_WINDOW * 4;
    let client = hold.client?;
    let due = conditions.due(client, since, room);
    let sent = story.sent.get(&client)?;
    let after = |at: Duration| sent.get(sent.partition_point(|sent| *sent <= at));
    // Again a while later: it may have been cut off, and have everything to send at once.
    let connected = after(due)?;
    let due = conditions.due(client, *connected, OFFER_WINDOW);
    (*after(due)? < stay.to).then_some(due)
}

/// How long a hold may outlive its end: an op sent before may run one command timeout later, and give
/// it a lease. What the scheduler puts off may not add to that: the server refuses what is late.
fn room(hold: &Hold, conditions: &Conditions) -> Duration {
    // Sane clocks differ by 0.5 %, others by 12 % at most.
    let part = if conditions.clocks_sane { 100 } else { 8 };
    let lease = hold.lease + hold.lease / part;
    lease + conditions.command_timeout + conditions.stepped_back + Duration::from_millis(5)
}

fn still_there(verdict: &mut Verdict<'_>, id: u64, hold: &Hold, conditions: &Conditions) {
    let Some(stay) = hold.stays.last() else {
        return;
    };
    let persistent = stay.to == Duration::MAX && !conditions.expiry_kept;
    if stay.to_index.is_none() && stay.to > conditions.end && !persistent {
        let what = format!("{} is still there at the end", Holder(id));
        verdict.broken_at(conditions.end, &[stay.from_index], what);
    }
}

/// At the end nothing is asked any more, and nobody stands in line.
fn at_rest(verdict: &mut Verdict<'_>, story: &Story<'_>, conditions: &Conditions) {
    let rest = conditions.settled_from.saturating_add(conditions.bound);
    let restless: Vec<_> = story
        .iter()
        .filter(|(_, at, what)| *at > rest && matches!(what, What::Ran(_) | What::Sent { .. }))
        .map(|(index, ..)| index)
        .collect();
    if let Some(first) = restless.first() {
        let what = format!("{} requests though all is over", restless.len());
        verdict.broken(&[*first], what);
    }
    for place in &story.places {
        let Place { client, name, .. } = place;
        if place.departed.is_none() && !conditions.is_frozen_at_end(*client) {
            let what = format!("somebody of client {client} waits for {name} at the end");
            verdict.broken_at(conditions.end, &[place.joined], what);
        }
    }
}

/// How long a grant may wait for its waiter to be polled.
const OFFER_WINDOW: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use leasehold::testing::{Answered, Done};

    use super::super::tale::{Tale, ms, rough};

    /// An offer that is renewed, or a grant to somebody who has gone.
    #[test]
    fn a_hold_that_nobody_claims_and_somebody_lengthens_is_caught() {
        let mut tale = Tale::new().granted(0, 1);
        for round in 1..12 {
            tale = tale
                .at(round * 400)
                .depth(0, 1, 1 + u32::try_from(round).unwrap());
        }
        let tale = tale.released(0, 1).at(5000);
        assert_eq!(tale.caught_under(rough), ["orphans"]);
    }

    /// A clean-up was sent once, and overtook the request.
    #[test]
    fn a_hold_made_anew_long_after_its_end_is_caught() {
        let tale = |later| {
            Tale::new()
                .granted(0, 1)
                .claimed(0, 1, 990)
                .left(1)
                .released(0, 1)
                .at(later)
                .granted(0, 1)
                .at(later + 2000)
        };
        assert_eq!(tale(1500).caught_under(rough), ["orphans"]);
        assert_eq!(tale(900).caught_under(rough), [""; 0]);
    }

    /// Its lease would end it, a good while later.
    #[test]
    fn a_release_that_is_not_sent_is_caught_in_a_quiet_run() {
        let tale = Tale::new().granted(0, 1).claimed(0, 1, 990).left(1);
        assert_eq!(tale.at(2000).caught(), ["orphans"]);
        let tale = Tale::new().granted(0, 1).claimed(0, 1, 990).left(1);
        assert_eq!(tale.at(2000).caught_under(rough), [""; 0]);
        let never_claimed = Tale::new().granted(0, 1).at(2000);
        assert_eq!(never_claimed.caught(), ["orphans"]);
    }

    #[test]
    fn a_hold_that_is_there_at_the_end_is_caught() {
        let tale = Tale::new().granted(0, 1).at(500);
        assert_eq!(tale.caught_under(rough), ["orphans"]);
        assert_eq!(tale.at(1001).caught_under(rough), [""; 0]);
    }

    /// The clean-up overtook the request, and is not repeated, though the client asks for other things.
    #[test]
    fn a_clean_up_that_is_not_repeated_is_caught() {
        let tale = |again: bool| {
            let mut tale = Tale::new()
                .sent(0, Done::Acquire, 1, 1)
                .at(100)
                .unchanged(0, Done::Release, 1, 0, Answered::Gone)
                .at(110)
                .copy()
                .granted(0, 1)
                .at(300);
            if again {
                tale = tale.sent(0, Done::Release, 1, 0);
            }
            tale.at(900).taken(0, 2).at(1050).taken(0, 3).at(5000)
        };
        assert_eq!(tale(false).caught_under(rough), ["orphans"]);
        assert_eq!(tale(true).caught_under(rough), [""; 0]);
    }

    #[test]
    fn who_asks_when_all_is_over_is_caught() {
        let tale = Tale::new()
            .granted(0, 1)
            .claimed(0, 1, 990)
            .left(1)
            .released(0, 1)
            .at(5000)
            .sent(0, Done::Release, 1, 0);
        let caught = tale.caught_under(|conditions| {
            conditions.settled_from = ms(1000);
            conditions.bound = ms(2000);
        });
        assert_eq!(caught, ["orphans"]);
        assert_eq!(tale.caught(), [""; 0]);
    }

    /// The process was killed.
    #[test]
    fn who_waits_at_the_end_is_caught_unless_he_stands_still() {
        let tale = Tale::new().joined(0, 0).at(1000);
        assert_eq!(tale.caught_under(rough), ["orphans"]);
        let caught = tale.caught_under(|conditions| {
            rough(conditions);
            conditions.frozen = vec![(0, ms(500), ms(9000))];
        });
        assert_eq!(caught, [""; 0]);
    }
}
