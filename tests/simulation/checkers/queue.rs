//! The fair lock is granted in the order in which waiters came into the server's queue, but for those who
//! left it or were not heard of; and who is heard of keeps its place.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold::testing::{Answered, Done, HoldId, Holder, Ran};

use super::story::Story;
use super::{Conditions, Verdict, Violation};

pub fn check(story: &Story<'_>, conditions: &Conditions) -> Vec<Violation> {
    let mut verdict = Verdict::of("queue", story);
    if !conditions.queues_kept {
        return verdict.found;
    }
    let mut queues: BTreeMap<&Arc<str>, Vec<Waiter>> = BTreeMap::new();
    for (index, at, ran) in story.ran() {
        let name = &ran.did.name;
        if conditions.fair.contains(name) {
            let queue = queues.entry(name).or_default();
            ran_in(queue, &mut verdict, conditions, index, at, ran);
        }
    }
    for (name, queue) in &queues {
        for waiter in queue.iter().filter(|_| conditions.quiet) {
            let what = format!("{} stays in the queue of {name}", Holder(waiter.hold));
            verdict.broken_at(conditions.end, &[waiter.joined], what);
        }
    }
    verdict.found
}

/// Somebody who was told that he is in the queue.
struct Waiter {
    hold: HoldId,
    joined: usize,
    /// When the server heard of it last.
    heard: Duration,
    /// It was always heard of in time. Else it may have been skipped, and have come back as the last.
    sure: bool,
}

impl Waiter {
    /// Whether it surely counts as alive. Clocks may differ by 12 % at most.
    fn is_alive(&self, at: Duration) -> bool {
        at < self.heard + BEAT_LASTS * 7 / 8
    }
}

fn ran_in(
    queue: &mut Vec<Waiter>,
    verdict: &mut Verdict<'_>,
    conditions: &Conditions,
    index: usize,
    at: Duration,
    ran: &Ran,
) {
    let did = &ran.did;
    let place = queue.iter().position(|waiter| waiter.hold == did.hold);
    match (did.verb, ran.answer) {
        (Done::Enqueue | Done::Beat, Answered::Queued(_)) => match place {
            Some(place) => {
                let waiter = &mut queue[place];
                waiter.sure &= waiter.is_alive(at);
                waiter.heard = at;
            }
            None => queue.push(Waiter {
                hold: did.hold,
                joined: index,
                heard: at,
                sure: true,
            }),
        },
        (Done::Enqueue | Done::Acquire, Answered::Granted(_)) if ran.change.is_some() => {
            let before = place.unwrap_or(queue.len());
            // A clock that was set forward ends beats early.
            let of_place = |waiter: &&Waiter| waiter.sure && waiter.is_alive(at);
            let sure = place.is_none_or(|place| queue[place].sure);
            let overtaken = queue[..before].iter().find(of_place).filter(|_| sure);
            if let Some(waiter) = overtaken.filter(|_| conditions.clocks_sane) {
                let what = format!("{} is granted before {}", did, Holder(waiter.hold));
                verdict.broken(&[waiter.joined, index], what);
            }
            if let (Some(place), false) = (place, sure) {
                queue.remove(place);
            } else {
                let passed = queue.drain(..before + usize::from(place.is_some()));
                // Who was skipped and has come back stands somewhere behind.
                let back = passed.filter(|waiter| !waiter.sure && waiter.is_alive(at));
                let back: Vec<Waiter> = back.collect();
                queue.splice(..0, back);
            }
        }
        (Done::Beat, Answered::Gone) => {
            if let Some(place) = place {
                let waiter = queue.remove(place);
                if waiter.is_alive(at) && conditions.clocks_sane {
                    let what = format!("{} lost its place", Holder(waiter.hold));
                    verdict.broken(&[waiter.joined, index], what);
                }
            }
        }
        (Done::Release, _) if did.count == 0 => {
            if let Some(place) = place {
                queue.remove(place);
            }
        }
        _ => {}
    }
}

/// The crate's own bound.
const BEAT_LASTS: Duration = Duration::from_secs(6);

#[cfg(test)]
mod tests {
    use super::super::tale::{Tale, rough};
    use super::*;

    const QUEUED: Answered = Answered::Queued(false);

    fn fair(conditions: &mut Conditions) {
        rough(conditions);
        conditions.fair.insert(Arc::from("job"));
    }

    /// One holds, two wait.
    fn two_wait() -> Tale {
        let tale = Tale::new().granted(0, 1);
        let tale = tale.unchanged(0, Done::Enqueue, 2, 1, QUEUED).at(1);
        let tale = tale.unchanged(1, Done::Enqueue, 3, 1, QUEUED);
        tale.at(500).released(0, 1)
    }

    fn takes(tale: Tale, client: usize, hold: HoldId) -> Tale {
        let answer = Answered::Granted(9);
        let lease = Some(Duration::from_secs(1));
        let tale = tale.does(client, Done::Enqueue, hold, 1, answer, &[(hold, 1)], lease);
        tale.released(client, hold)
    }

    #[test]
    fn who_overtakes_is_caught() {
        assert_eq!(takes(two_wait(), 1, 3).caught_under(fair), ["queue"]);
        assert_eq!(takes(two_wait(), 0, 2).caught_under(fair), [""; 0]);
        let newcomer = takes(two_wait(), 1, 4);
        assert_eq!(newcomer.caught_under(fair), ["queue"]);
    }

    #[test]
    fn who_left_or_is_not_heard_of_is_not_overtaken() {
        let left = two_wait().unchanged(0, Done::Release, 2, 0, Answered::Gone);
        assert_eq!(takes(left, 1, 3).caught_under(fair), [""; 0]);
        // Heard of again when it may have been skipped, by whoever came first after all stood still.
        let late = two_wait().at(6_400).unchanged(1, Done::Beat, 3, 0, QUEUED);
        let late = late.unchanged(0, Done::Enqueue, 2, 1, QUEUED);
        assert_eq!(takes(late, 1, 3).caught_under(fair), [""; 0]);
        // It may have come back as the last, and is still before who comes after that.
        let back = two_wait().at(6_400);
        let back = back.unchanged(0, Done::Enqueue, 2, 1, QUEUED).at(6_401);
        let back = takes(back, 1, 3).at(6_402);
        let back = back.unchanged(1, Done::Enqueue, 5, 1, QUEUED);
        let caught = takes(back, 0, 2).caught_under(fair);
        assert!(!caught.contains(&"queue"), "{caught:?}");
        let dead = two_wait().at(5_900).unchanged(1, Done::Beat, 3, 0, QUEUED);
        assert_eq!(takes(dead.at(6_001), 1, 3).caught_under(fair), [""; 0]);
    }

    #[test]
    fn a_place_that_is_lost_in_time_is_caught() {
        let beat = |at, answer| two_wait().at(at).unchanged(1, Done::Beat, 3, 0, answer);
        assert_eq!(beat(4_000, Answered::Gone).caught_under(fair), ["queue"]);
        assert_eq!(beat(6_002, Answered::Gone).caught_under(fair), [""; 0]);
    }
}
