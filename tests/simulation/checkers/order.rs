//! The waiters of one client are served first come, first served, but for those who leave.

use std::collections::BTreeMap;
use std::sync::Arc;

use leasehold::LockKind;
use leasehold::testing::What;

use super::story::Story;
use super::{Conditions, Verdict, Violation};

pub fn check(story: &Story<'_>, conditions: &Conditions) -> Vec<Violation> {
    let mut verdict = Verdict::of("order", story);
    if !conditions.polled || !conditions.leases_alike {
        return verdict.found;
    }
    // The last to come of those that were served.
    let mut latest: BTreeMap<(usize, LockKind, &Arc<str>), usize> = BTreeMap::new();
    for (index, _, what) in story.iter() {
        let What::Departed {
            client,
            kind,
            name,
            served: true,
            place,
        } = what
        else {
            continue;
        };
        let Some((number, joined)) = story.place(index) else {
            verdict.broken(
                &[index],
                format!("place {place} was served, and nobody stood there"),
            );
            continue;
        };
        // The order of a fair lock is the server's: `queue` judges it.
        let elsewhere = conditions.fixed_leases.contains(name) || conditions.fair.contains(name);
        if conditions.was_frozen(*client) || elsewhere {
            continue;
        }
        let latest = latest.entry((*client, *kind, name)).or_insert(number);
        if number < *latest {
            let other = &story.places[*latest];
            let records = [joined.joined, other.joined, index];
            verdict.broken(&records, format!("place {place} for {name} was overtaken"));
        }
        *latest = number.max(*latest);
    }
    verdict.found
}

#[cfg(test)]
mod tests {
    use super::super::tale::{Tale, ms};
    use super::super::{Conditions, Duration};

    /// Three places in line, and how they are left.
    fn left(places: [(u64, bool); 3]) -> Tale {
        let mut tale = Tale::new();
        for place in 0..3 {
            tale = tale.joined(0, place);
        }
        for (place, served) in places {
            tale = tale.departed(0, place, served);
        }
        tale
    }

    #[test]
    fn who_overtakes_is_caught() {
        let tale = left([(0, true), (2, true), (1, true)]);
        assert_eq!(tale.caught(), ["order"]);
        let unlike = |conditions: &mut Conditions| conditions.leases_alike = false;
        assert_eq!(tale.caught_under(unlike), [""; 0]);
        let frozen =
            |conditions: &mut Conditions| conditions.frozen = vec![(0, Duration::ZERO, ms(1))];
        assert_eq!(tale.caught_under(frozen), [""; 0]);
    }

    #[test]
    fn who_leaves_is_not_overtaken() {
        assert_eq!(left([(0, true), (2, true), (1, false)]).caught(), [""; 0]);
        assert_eq!(left([(1, false), (0, true), (2, true)]).caught(), [""; 0]);
    }

    /// A line that was empty numbers anew.
    #[test]
    fn numbers_may_come_again() {
        let tale = Tale::new().joined(0, 0).joined(0, 1).departed(0, 0, true);
        let tale = tale.departed(0, 1, true).joined(0, 0).departed(0, 0, true);
        assert_eq!(tale.caught(), [""; 0]);
    }
}
