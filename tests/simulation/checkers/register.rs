//! What the lock protects: tokens of writes never go back, or, where exclusion is not promised, a store
//! that looks at them refuses only those who lost the lock.

use std::collections::BTreeMap;
use std::sync::Arc;

use leasehold::testing::{Note, What};

use super::story::Story;
use super::{Conditions, Verdict, Violation};

pub fn check(story: &Story<'_>, conditions: &Conditions) -> Vec<Violation> {
    let mut verdict = Verdict::of("register", story);
    let exclusive = conditions.memory_kept && conditions.clocks_sane;
    let fenced = conditions.clock_never_back || conditions.counters_kept;
    if !fenced {
        return verdict.found;
    }
    // The greatest token accepted, and the newest hold's.
    let mut accepted: BTreeMap<&Arc<str>, (u64, usize)> = BTreeMap::new();
    let mut newest: BTreeMap<&Arc<str>, u64> = BTreeMap::new();
    for (index, _, what) in story.iter() {
        match what {
            What::Claimed { name, token, .. } => {
                // By the server's order: who was granted it later may come for it sooner.
                let newest = newest.entry(name).or_default();
                *newest = (*newest).max(*token);
            }
            // Readers of a counter that is lost meanwhile have different tokens.
            What::Note(Note::Wrote { name, .. })
                if conditions.two_sided.contains(name) && !conditions.counters_kept => {}
            What::Note(Note::Wrote { name, token }) => {
                let before = accepted.get(name).filter(|(before, _)| token < before);
                let Some((before, shown)) = before else {
                    accepted.insert(name, (*token, index));
                    continue;
                };
                if exclusive {
                    let what = format!("{name} was written with token {token} after {before}");
                    verdict.broken(&[*shown, index], what);
                } else if newest.get(name) == Some(token) {
                    let what = format!("the newest holder of {name} is refused: {token}");
                    verdict.broken(&[*shown, index], what);
                }
            }
            _ => {}
        }
    }
    verdict.found
}

#[cfg(test)]
mod tests {
    use leasehold::testing::Done;

    use super::super::tale::{Tale, stormy};

    /// Whoever loses a lock and does not look writes late.
    fn written(tokens: [u64; 3]) -> Tale {
        let mut tale = Tale::new()
            .granted_as(0, 1, 5)
            .claimed_as(0, 1, 990, 5)
            .left(1)
            .released(0, 1)
            .granted_as(1, 2, 6)
            .claimed_as(1, 2, 990, 6);
        for token in tokens {
            tale = tale.wrote(token);
        }
        tale.left(2).released(1, 2).sent(1, Done::Release, 2, 0)
    }

    #[test]
    fn a_write_that_comes_too_late_is_caught() {
        assert_eq!(written([5, 6, 6]).caught(), [""; 0]);
        assert_eq!(written([5, 6, 5]).caught(), ["register"]);
        assert_eq!(written([5, 6, 5]).caught_under(stormy), [""; 0]);
    }

    /// A token of nobody has spoiled the register.
    #[test]
    fn a_holder_who_is_refused_is_caught() {
        assert_eq!(written([5, 9, 6]).caught_under(stormy), ["register"]);
    }
}
