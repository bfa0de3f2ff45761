//! Arithmetic of leases: when a hold ends, as we must believe.

use std::time::Duration;

use tokio::time::Instant;

use crate::bug::{Bug, seeded};
use crate::env::later;

/// What we take off each lease: pays for clocks that run at different rates (1 % covers a
/// difference of 0.5 % both ways) and for the holder's reaction.
pub(crate) fn margin(lease: Duration) -> Duration {
    (lease / 100).max(Duration::from_millis(2))
}

/// The end of a lease as confirmed by one answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Term {
    /// Ours, earlier: past it we say "lost".
    pub(crate) deadline: Instant,
    /// The server's, at the latest: past it others can enter, whatever we did.
    pub(crate) end: Instant,
}

impl Term {
    /// From the stamp taken before the answered attempt was sent, and the lease it stated. Never
    /// from the time of reading, never from another attempt's stamp.
    pub(crate) fn confirmed(sent: Instant, remaining_ms: u64) -> Self {
        let remaining = Duration::from_millis(remaining_ms);
        let mut believed = remaining.saturating_sub(margin(remaining));
        if seeded(Bug::LossOnlyOnNo) {
            believed += Duration::from_hours(1);
        }
        Self {
            deadline: later(sent, believed),
            end: later(sent, remaining),
        }
    }

    /// The later of two confirmations: no answer shortens what an earlier one promised.
    pub(crate) fn max(self, other: Self) -> Self {
        Self {
            deadline: self.deadline.max(other.deadline),
            end: self.end.max(other.end),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::{Config, TestRunner};

    use super::*;
    use crate::config::{MAX_LEASE, MIN_LEASE, millis};

    /// Also for what no server would say: a number of another's making must not end the process.
    #[test]
    fn a_deadline_is_never_before_the_sending_nor_past_what_remains() {
        let told = prop_oneof![
            0..10_000_u64,
            0..=millis(MAX_LEASE),
            (u64::MAX - 1000)..=u64::MAX,
            any::<u64>(),
        ];
        check((stamps(), told), |(sent, remaining_ms)| {
            let remaining = Duration::from_millis(remaining_ms);
            let term = Term::confirmed(sent, remaining_ms);
            prop_assert!(sent <= term.deadline);
            prop_assert!(term.deadline <= term.end);
            prop_assert_eq!(term.end.duration_since(sent), remaining);
            let believed = term.deadline.duration_since(sent);
            prop_assert_eq!(believed, remaining.saturating_sub(margin(remaining)));
            Ok(())
        });
    }

    /// What a lease loses is 1 %, and at least what a holder needs to react; some of it is left.
    #[test]
    fn a_margin_is_small_beside_any_lease() {
        let leases = (millis(MIN_LEASE)..=millis(MAX_LEASE)).prop_map(Duration::from_millis);
        check(leases, |lease| {
            prop_assert!(margin(lease) >= Duration::from_millis(2));
            prop_assert!(margin(lease) >= lease / 100);
            prop_assert!(margin(lease) <= lease / 50);
            Ok(())
        });
    }

    /// In whatever order answers come, the latest promise counts.
    #[test]
    fn no_answer_shortens_what_another_promised() {
        let answer = || (stamps(), 0..=millis(MAX_LEASE));
        let answers = prop::collection::vec(answer(), 1..6);
        check(answers, |answers| {
            let terms: Vec<_> = answers
                .iter()
                .map(|(sent, remaining_ms)| Term::confirmed(*sent, *remaining_ms))
                .collect();
            let together = terms.iter().copied().reduce(Term::max);
            let reversed = terms.iter().rev().copied().reduce(Term::max);
            prop_assert_eq!(together, reversed);
            let deadline = terms.iter().map(|term| term.deadline).max();
            let end = terms.iter().map(|term| term.end).max();
            prop_assert_eq!(together.map(|term| term.deadline), deadline);
            prop_assert_eq!(together.map(|term| term.end), end);
            Ok(())
        });
    }

    /// A server ends a lease at a whole millisecond, so what is asked for is never less.
    #[test]
    fn a_duration_in_milliseconds_is_rounded_up() {
        let durations = any::<(u64, u32)>()
            .prop_map(|(secs, nanos)| Duration::new(secs >> 11, nanos % 1_000_000_000));
        check(durations, |duration| {
            let rounded = Duration::from_millis(millis(duration));
            prop_assert!(rounded >= duration);
            prop_assert!(rounded < duration + Duration::from_millis(1));
            Ok(())
        });
        assert_eq!(millis(Duration::MAX), u64::MAX);
    }

    /// Stamps within a few years of some moment.
    fn stamps() -> impl Strategy<Value = Instant> {
        #[expect(
            clippy::disallowed_methods,
            reason = "any moment does: none is compared with now"
        )]
        let base = Instant::now();
        (0..200_000_000_000_u64).prop_map(move |ms| base + Duration::from_millis(ms))
    }

    fn check<S: Strategy>(values: S, test: impl Fn(S::Value) -> Result<(), TestCaseError>) {
        let mut runner = TestRunner::new(Config {
            failure_persistence: None,
            ..Config::default()
        });
        runner
            .run(&values, test)
            .unwrap_or_else(|failure| panic!("{failure}"));
    }
}
