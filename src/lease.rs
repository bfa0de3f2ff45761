//! Arithmetic of leases: when a hold ends, as we must believe.

use std::time::Duration;

use tokio::time::Instant;

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
        Self {
            deadline: later(sent, remaining.saturating_sub(margin(remaining))),
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
