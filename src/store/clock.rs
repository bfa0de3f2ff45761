//! The server's clock, as far as its answers tell.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// The server's clock as one connection knows it.
///
/// An answer that says `s` and took from `sent` to `received` means: the server's clock shows at
/// `received` at least `s`, at most `s` plus the round trip. The estimate is kept inside of what the
/// last answer allows, so it follows a clock that is set back, and one slow answer does not spoil it.
#[derive(Debug, Default)]
pub(crate) struct Clock(Mutex<Option<(Instant, u64)>>);

impl Clock {
    pub(crate) fn learn(&self, sent: Instant, received: Instant, server_us: u64) {
        let round_trip = micros(received.saturating_duration_since(sent));
        let mut known = self.0.lock();
        let estimate = known.map_or(server_us, |known| Self::at(known, received));
        let estimate = estimate.clamp(server_us, server_us.saturating_add(round_trip));
        *known = Some((received, estimate));
    }

    /// What the server's clock shows `now`; 0 while unknown, which makes a request late, harmless,
    /// and its answer tells.
    pub(crate) fn estimate(&self, now: Instant) -> u64 {
        self.0.lock().map_or(0, |known| Self::at(known, now))
    }

    fn at((instant, us): (Instant, u64), now: Instant) -> u64 {
        us.saturating_add(micros(now.saturating_duration_since(instant)))
    }
}

pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
