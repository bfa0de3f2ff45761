//! How much time the machine takes from us, so that a bound on time is strict on a quiet machine and
//! still true on a busy one.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Measures, on a thread of its own that only sleeps, by how much its sleeps were too long. What the
/// crate does to its runtime does not show here. The thread is one for the whole process, so a ruler
/// costs nothing, and knows what went on shortly before it was started.
#[derive(Clone, Copy)]
pub struct Ruler {
    late_before: Duration,
}

impl Ruler {
    pub fn start() -> Self {
        Self {
            late_before: sleeper().late(),
        }
    }

    /// What was taken since the start.
    pub fn taken(&self) -> Duration {
        sleeper().late().saturating_sub(self.late_before)
    }

    /// What to add to a bound on a wait that others have a part in: threads that work, a server, a proxy.
    /// They are kept waiting longer than a thread that only sleeps, and on a busy machine one of them may
    /// stand still while that one does not. On a quiet machine it is next to nothing.
    pub fn allowance(&self) -> Duration {
        let taken = self.taken();
        let busy = taken.max(sleeper().lately()) > BUSY;
        taken * 2 + if busy { STALL } else { LITTLE }
    }
}

/// The thread's account.
struct Sleeper {
    late_us: AtomicU64,
    /// The same, of the last two seconds or so.
    lately_us: AtomicU64,
}

fn sleeper() -> &'static Sleeper {
    static SLEEPER: Sleeper = Sleeper {
        late_us: AtomicU64::new(0),
        lately_us: AtomicU64::new(0),
    };
    static STARTED: OnceLock<()> = OnceLock::new();
    STARTED.get_or_init(|| drop(std::thread::spawn(|| SLEEPER.sleep())));
    &SLEEPER
}

impl Sleeper {
    fn sleep(&self) {
        loop {
            let start = Instant::now();
            std::thread::sleep(STEP);
            let late = start.elapsed().saturating_sub(STEP + USUAL);
            let late = u64::try_from(late.as_micros()).unwrap_or(u64::MAX);
            self.late_us.fetch_add(late, Ordering::Relaxed);
            let lately = self.lately_us.load(Ordering::Relaxed);
            let lately = lately - lately.div_ceil(1000) + late;
            self.lately_us.store(lately, Ordering::Relaxed);
        }
    }

    fn late(&self) -> Duration {
        Duration::from_micros(self.late_us.load(Ordering::Relaxed))
    }

    fn lately(&self) -> Duration {
        Duration::from_micros(self.lately_us.load(Ordering::Relaxed))
    }
}

const STEP: Duration = Duration::from_millis(2);

/// What a sleep is too long by on a quiet machine.
const USUAL: Duration = Duration::from_micros(300);

/// More than this was taken in two seconds: others want the processors too.
const BUSY: Duration = Duration::from_millis(20);

/// How long one thread or process may stand still on a busy machine.
const STALL: Duration = Duration::from_millis(1500);

/// What several threads and processes need to pass something on.
const LITTLE: Duration = Duration::from_millis(50);
