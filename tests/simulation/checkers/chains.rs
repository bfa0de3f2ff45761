//! L2 between clients: a lock goes from hand to hand within one client for a bounded time only; then
//! it is free for a moment, and everybody is told.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold::testing::{Done, What};

use super::story::Story;
use super::{Conditions, Verdict, Violation};

pub fn check(story: &Story<'_>, conditions: &Conditions) -> Vec<Violation> {
    let mut verdict = Verdict::of("chains", story);
    let mut chains: BTreeMap<&Arc<str>, Chain> = BTreeMap::new();
    for (index, at, what) in story.iter() {
        let ran = match what {
            What::Ran(ran) => ran,
            What::Passed { hold } => {
                let hold = &story.holds[hold];
                if let Some((name, claim)) = hold.name.as_ref().zip(hold.claim) {
                    let chain = chains.entry(name).or_insert(Chain::begun(at, index));
                    if chain.is_too_long(at, conditions) {
                        let what =
                            format!("{name} stays with client {} for too long", claim.client);
                        verdict.broken(&[chain.index, index], what);
                        chains.remove(name);
                    }
                }
                continue;
            }
            What::Vanished { name, .. } => {
                chains.remove(name);
                continue;
            }
            _ => continue,
        };
        let Some((_, after)) = &ran.change else {
            continue;
        };
        let name = &ran.did.name;
        if ran.did.verb != Done::HandOff {
            // Free, or taken from the free state. A nested op changes counts only.
            if after.is_empty()
                || ran.did.count == 1 && ran.did.verb == Done::Acquire
                || ran.did.verb == Done::Enqueue
            {
                chains.remove(name);
            }
            continue;
        }
        let chain = chains.entry(name).or_insert(Chain::begun(at, index));
        if chain.is_too_long(at, conditions) {
            let what = format!("{name} stays with client {} for too long", ran.client);
            verdict.broken(&[chain.index, index], what);
            chains.remove(name);
        }
    }
    verdict.found
}

struct Chain {
    began: Duration,
    index: usize,
    length: u32,
}

impl Chain {
    fn begun(at: Duration, index: usize) -> Self {
        Self {
            began: at,
            index,
            length: 0,
        }
    }

    /// With one turn more.
    fn is_too_long(&mut self, at: Duration, conditions: &Conditions) -> bool {
        self.length += 1;
        let long = conditions.quiet && at > self.began + LASTS + conditions.slack;
        long || self.length > LENGTH
    }
}

/// The crate's own bounds where a client is alone, the time with room for a request on its way.
const LENGTH: u32 = 1 << 14;
const LASTS: Duration = Duration::from_millis(150);

#[cfg(test)]
mod tests {
    use super::super::tale::{Tale, rough};

    fn chain(until_ms: u64) -> Tale {
        let mut tale = Tale::new().granted(0, 1);
        for step in 0..until_ms / 10 {
            tale = tale.at(10 * step).hand_off(0, step + 1, step + 2);
        }
        tale
    }

    #[test]
    fn a_chain_that_ends_in_time_is_fine() {
        assert!(chain(140).caught().iter().all(|who| *who != "chains"));
    }

    #[test]
    fn a_chain_that_does_not_end_is_caught() {
        assert!(chain(300).caught().contains(&"chains"));
        // With faults, time alone says nothing.
        let caught = chain(300).caught_under(rough);
        assert!(!caught.contains(&"chains"));
        assert!(chain(170_000).caught_under(rough).contains(&"chains"));
    }

    #[test]
    fn a_release_between_ends_a_chain() {
        let tale = chain(100).at(100).released(0, 11);
        let tale = tale.at(101).granted(0, 20);
        let mut tale = tale;
        for step in 0..10 {
            tale = tale.at(102 + 10 * step).hand_off(0, 20 + step, 21 + step);
        }
        assert!(tale.caught().iter().all(|who| *who != "chains"));
    }

    /// Whatever the server is told of it.
    #[test]
    fn a_chain_of_which_the_server_does_not_hear_is_caught() {
        let passed = |until_ms: u64| {
            let mut tale = Tale::new().granted(0, 1);
            for step in 0..until_ms / 10 {
                tale = tale.at(10 * step).claimed_as(0, 1, 990, step + 1).passed(1);
            }
            tale
        };
        assert!(passed(140).caught().iter().all(|who| *who != "chains"));
        assert!(passed(300).caught().contains(&"chains"));
    }
}
