//! How much time the machine takes from us, so that a bound on time is strict on a quiet machine and
//! still true on a busy one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Measures, on a thread of its own that only sleeps, by how much its sleeps were too long. What the
/// crate does to its runtime does not show here.
pub struct Ruler {
    late_us: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
}

impl Ruler {
    pub fn start() -> Self {
        let ruler = Self {
            late_us: Arc::default(),
            over: Arc::default(),
        };
        let (late_us, over) = (Arc::clone(&ruler.late_us), Arc::clone(&ruler.over));
        std::thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                let start = Instant::now();
                std::thread::sleep(STEP);
                let late = start.elapsed().saturating_sub(STEP + USUAL);
                let late = u64::try_from(late.as_micros()).unwrap_or(u64::MAX);
                late_us.fetch_add(late, Ordering::Relaxed);
            }
        });
        ruler
    }

    /// What was taken since the start.
    pub fn taken(&self) -> Duration {
        Duration::from_micros(self.late_us.load(Ordering::Relaxed))
    }
}

impl Drop for Ruler {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

const STEP: Duration = Duration::from_millis(2);

/// What a sleep is too long by on a quiet machine.
const USUAL: Duration = Duration::from_micros(300);
