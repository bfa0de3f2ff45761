//! Time, chance and spawning: the only room that asks the machine for any of them.
//!
//! Everything else goes through an [`Env`], so that a simulation can replace all three and replay a
//! run from one number.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::Instant;
use uuid::Uuid;

/// A boxed future of the crate's own.
pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Where time, chance and tasks come from.
pub(crate) trait Env: fmt::Debug + Send + Sync + 'static {
    /// The monotonic clock of this process.
    fn now(&self) -> Instant;
    /// Completes at `deadline`.
    fn sleep_until(&self, deadline: Instant) -> BoxFuture<()>;
    /// 64 unpredictable bits.
    fn random(&self) -> u64;
    /// Runs `task` on the client's runtime; dropped at once when that has ended.
    fn spawn(&self, task: BoxFuture<()>);
    /// Whether this is called from a task of the client's runtime: what is polled here may then go on
    /// there.
    fn is_here(&self) -> bool;
}

/// The `Env` a client carries.
pub(crate) type SharedEnv = Arc<dyn Env>;

/// A point in time `duration` from `now`, at most some thirty years away.
pub(crate) fn later(now: Instant, duration: Duration) -> Instant {
    now.checked_add(duration).unwrap_or_else(|| now + FAR_AWAY)
}

/// Runs `future` for at most until `deadline`; `None` when that came first.
pub(crate) async fn until<T>(
    env: &dyn Env,
    deadline: Instant,
    future: impl Future<Output = T>,
) -> Option<T> {
    tokio::select! {
        biased;
        value = future => Some(value),
        () = env.sleep_until(deadline) => None,
    }
}

/// The real thing: Tokio's clock, the operating system's random bits, the runtime of the builder.
#[derive(Debug)]
pub(crate) struct RealEnv {
    runtime: Handle,
}

impl RealEnv {
    /// The environment of the runtime this is called on.
    ///
    /// # Panics
    ///
    /// If called outside a Tokio runtime.
    pub(crate) fn current() -> Self {
        Self {
            runtime: Handle::current(),
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "this is the room that may")]
impl Env for RealEnv {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn sleep_until(&self, deadline: Instant) -> BoxFuture<()> {
        // A timer belongs to the runtime that polls it. A caller on another executor gets ours.
        let sleep = if Handle::try_current().is_ok() {
            tokio::time::sleep_until(deadline)
        } else {
            let _context = self.runtime.enter();
            tokio::time::sleep_until(deadline)
        };
        Box::pin(sleep)
    }

    fn random(&self) -> u64 {
        // Version and variant bits of one half fall on random bits of the other.
        let (high, low) = Uuid::new_v4().as_u64_pair();
        high ^ low.rotate_left(32)
    }

    fn spawn(&self, task: BoxFuture<()>) {
        drop(self.runtime.spawn(task));
    }

    fn is_here(&self) -> bool {
        Handle::try_current().is_ok_and(|current| current.id() == self.runtime.id())
    }
}

const FAR_AWAY: Duration = Duration::from_hours(30 * 365 * 24);
