//! What the parts of one client share, and how its background begins and ends.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::config::{Config, MAX_OUTSTANDING};
use crate::contend::Queues;
use crate::dispatch::Dispatcher;
use crate::env::{SharedEnv, later};
use crate::error::Error;
use crate::guard::LossReason;
use crate::hold::Hold;
use crate::kind::Kind;
use crate::observe;
use crate::store::{Health, OwnerId, Store, TokenRule};
use crate::sync::{AtomicUsize, Mutex, Notify};
use crate::watchdog::Watchdog;

/// With more holds than this, none is looked for by its name.
const FEW_HOLDS: usize = 1024;

/// The inside of one client. Its background tasks hold it; users hold a [`Handle`].
pub(crate) struct Engine {
    pub(crate) env: SharedEnv,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) config: Config,
    pub(crate) client: Uuid,
    pub(crate) dispatcher: Dispatcher,
    pub(crate) watchdog: Watchdog,
    pub(crate) queues: Queues,
    /// Bounds the acquisitions posted and not answered.
    pub(crate) permits: Arc<Semaphore>,
    /// Cancelled when no acquisition may start any more: `close` was called, or the runtime ended.
    pub(crate) closing: CancellationToken,
    /// Cancelled when nothing is renewed any more.
    pub(crate) stopped: CancellationToken,
    pub(crate) events: observe::Limiter,
    started: Instant,
    grants: Grants,
    floors: Floors,
    /// When the server is to be told next who we are; `None` before the first hold.
    announce_at: Mutex<Option<Instant>>,
}

impl Engine {
    /// Starts the background of a client on `env`'s runtime.
    pub(crate) fn start(
        env: SharedEnv,
        store: Arc<dyn Store>,
        config: Config,
        client: Uuid,
    ) -> Arc<Self> {
        let engine = Arc::new(Self {
            dispatcher: Dispatcher::new(Arc::clone(&env), Arc::clone(&store)),
            watchdog: Watchdog::new(),
            queues: Queues::default(),
            permits: Arc::new(Semaphore::new(MAX_OUTSTANDING)),
            closing: CancellationToken::new(),
            stopped: CancellationToken::new(),
            events: observe::Limiter::default(),
            started: env.now(),
            grants: Grants::default(),
            floors: Floors::default(),
            announce_at: Mutex::new(None),
            env,
            store,
            config,
            client,
        });
        let running = Running {
            engine: Arc::clone(&engine),
        };
        engine.env.spawn(Box::pin(async move {
            let engine = &running.engine;
            tokio::join!(
                engine.dispatcher.run(),
                engine.watchdog.run(engine),
                observe::connection(engine),
                engine.follow_connections(),
            );
            engine.retract().await;
        }));
        engine
    }

    pub(crate) fn now(&self) -> Instant {
        self.env.now()
    }

    /// When to renew a `lease` that would be renewed at `at`: then or a little before. What is due at about
    /// the same time is due together, and travels together.
    pub(crate) fn together(&self, at: Instant, lease: Duration) -> Instant {
        // Of a third of it, the time between two renewals, a hundredth.
        self.in_step(at, (lease / 300).clamp(LEAST_STEP, LONGEST_STEP))
    }

    /// `at`, or less than a `step` before it, so that all such moments are whole steps apart.
    pub(crate) fn in_step(&self, at: Instant, step: Duration) -> Instant {
        let since = at.saturating_duration_since(self.started);
        let past = since.as_nanos() % step.as_nanos();
        let past = u64::try_from(past).unwrap_or_default();
        at.checked_sub(Duration::from_nanos(past)).unwrap_or(at)
    }

    /// An identity for one hold.
    pub(crate) fn fresh_owner(&self) -> OwnerId {
        OwnerId::new(self.client, self.env.random())
    }

    /// The name as it may appear in an event.
    pub(crate) fn loggable(&self, name: &str) -> String {
        if self.config.digest_names {
            observe::digest(name)
        } else {
            name.to_owned()
        }
    }

    pub(crate) fn token_rule(&self, name: &str) -> TokenRule {
        TokenRule {
            floor: self.floors.of(name),
            retention_ms: self.config.retention_ms(),
            reserve: 0,
        }
    }

    pub(crate) fn saw_token(&self, name: &Arc<str>, token: u64, server_now_us: u64) {
        self.floors.saw(name, token, server_now_us);
    }

    /// Refuses to start anything on a client that is ending.
    pub(crate) fn ensure_open(&self) -> Result<(), Error> {
        if self.closing.is_cancelled() {
            Err(Error::Closed)
        } else {
            Ok(())
        }
    }

    /// What a caller is told who waited for somebody else's hold.
    pub(crate) fn timed_out(&self, kind: Kind, name: &Arc<str>, waited: Duration) -> Error {
        Error::TimedOut {
            name: name.to_string(),
            waited,
            own_client: self.own_hold(kind, name).is_some(),
        }
    }

    /// A hold of this client, if it has one and not so many that the search would cost.
    pub(crate) fn own_hold(&self, kind: Kind, name: &Arc<str>) -> Option<Arc<Hold>> {
        if self.grants.live.load(Ordering::Relaxed) > FEW_HOLDS {
            return None;
        }
        let own = |hold: &Arc<Hold>| {
            hold.kind.sides() == kind.sides() && hold.name == *name && hold.is_held()
        };
        self.watchdog.holds().into_iter().find(own)
    }

    /// A hold was granted: it is on offer, or held.
    pub(crate) fn grant_begins(&self) {
        self.grants.live.fetch_add(1, Ordering::SeqCst);
    }

    /// It is neither any more; if it has to be released, the release is posted.
    pub(crate) fn grant_ends(&self) {
        if self.grants.live.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.grants.none.notify_waiters();
        }
    }

    /// Completes when no hold is on offer or held.
    pub(crate) async fn until_no_grants(&self) {
        loop {
            let none = self.grants.none.notified();
            if self.grants.live.load(Ordering::SeqCst) == 0 {
                return;
            }
            none.await;
        }
    }

    /// Whether nothing is held, on offer, or asked for.
    pub(crate) fn is_idle(&self) -> bool {
        self.grants.live.load(Ordering::SeqCst) == 0 && self.dispatcher.is_idle()
    }

    /// After each reconnection: sends what waited for it, and if the server is another one, or was
    /// restarted, asks it for every hold. So a holder whose lock it has forgotten learns that as soon as
    /// others could enter, not only by the next renewal.
    async fn follow_connections(&self) {
        let mut health = self.store.health();
        let mut last = None;
        loop {
            let now = health.borrow_and_update().clone();
            match now {
                Health::Up { generation, server } => {
                    if let Some((before, same)) = last
                        && generation != before
                    {
                        self.dispatcher.connected();
                        if server != same {
                            self.watchdog.ask_now();
                        }
                    }
                    last = Some((generation, server));
                }
                Health::Connecting | Health::Down { .. } => {}
                Health::Closed => return,
            }
            tokio::select! {
                biased;
                () = self.stopped.cancelled() => return,
                changed = health.changed() => {
                    if changed.is_err() {
                        return;
                    }
                }
            }
        }
    }

    /// Tells the server who we are, for two leases, if it has not been told for a while. Called while
    /// something is held.
    pub(crate) fn announce(&self, now: Instant) {
        {
            let mut announce_at = self.announce_at.lock();
            if announce_at.is_some_and(|at| now < at) {
                return;
            }
            *announce_at = Some(later(now, self.config.lease));
        }
        let info = about_this_process(self.config.label.as_deref());
        self.env
            .spawn(self.store.announce(info, self.config.lease * 2));
    }

    /// Takes back what `announce` told the server.
    pub(crate) async fn retract(&self) {
        let announced = self.announce_at.lock().take().is_some();
        if announced {
            self.store.retract().await;
        }
    }

    /// The end: nothing is sent or renewed any more, whoever waits is told.
    pub(crate) fn end(&self) {
        self.closing.cancel();
        self.stopped.cancel();
        self.dispatcher.end();
        for hold in self.watchdog.holds() {
            hold.lose(LossReason::ClientClosed);
        }
        self.queues.end();
        self.store.close();
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("client", &self.client)
            .finish_non_exhaustive()
    }
}

/// Held by the background task. Dropped with it, whether it returned, panicked or its runtime ended.
struct Running {
    engine: Arc<Engine>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.engine.end();
    }
}

/// What users of a client hold, by client, context, lock and guard. When the last is gone the
/// background ends, once what was posted is done.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) engine: Arc<Engine>,
}

impl Handle {
    pub(crate) fn new(engine: Arc<Engine>) -> Arc<Self> {
        Arc::new(Self { engine })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.engine.closing.cancel();
        self.engine.stopped.cancel();
        self.engine.dispatcher.finish();
    }
}

/// Holds on offer or held, counted so that `close` forgets none between the two.
#[derive(Debug, Default)]
struct Grants {
    live: AtomicUsize,
    none: Notify,
}

/// The greatest tokens seen, so that a token grows even if the server lost its counter and its clock
/// went back.
///
/// Tokens follow the server's clock, so one number serves all names whose tokens do. Names whose
/// counter runs ahead of the clock (set by hand, or shared with a counter of another kind) are kept
/// apart, a bounded number of them.
#[derive(Debug, Default)]
struct Floors {
    common: AtomicU64,
    ahead: Mutex<BTreeMap<Arc<str>, u64>>,
    any_ahead: AtomicBool,
}

impl Floors {
    fn of(&self, name: &str) -> u64 {
        let ahead = if self.any_ahead.load(Ordering::Relaxed) {
            self.ahead.lock().get(name).copied()
        } else {
            None
        };
        // After that: one that is forgotten there was counted here before.
        let common = self.common.load(Ordering::Relaxed);
        ahead.map_or(common, |ahead| common.max(ahead))
    }

    fn saw(&self, name: &Arc<str>, token: u64, server_now_us: u64) {
        if token <= server_now_us.saturating_add(AHEAD_US) {
            self.common.fetch_max(token, Ordering::Relaxed);
            return;
        }
        self.any_ahead.store(true, Ordering::Relaxed);
        let mut ahead = self.ahead.lock();
        if ahead.len() >= MAX_AHEAD && !ahead.contains_key(name) {
            // The smallest, and for all names from now on: what was seen is never forgotten.
            let least = ahead.iter().min_by_key(|(_, floor)| **floor);
            if let Some((name, floor)) = least.map(|(name, floor)| (Arc::clone(name), *floor)) {
                self.common.fetch_max(floor, Ordering::Relaxed);
                ahead.remove(&name);
            }
        }
        let floor = ahead.entry(Arc::clone(name)).or_default();
        *floor = (*floor).max(token);
    }
}

const MAX_AHEAD: usize = 1024;

/// Renewals that are due within so long of each other go together.
const LEAST_STEP: Duration = Duration::from_millis(8);
const LONGEST_STEP: Duration = Duration::from_millis(100);

/// How far a token may be ahead of the clock and still count as following it.
const AHEAD_US: u64 = 1_000_000;

fn about_this_process(label: Option<&str>) -> BTreeMap<String, String> {
    let mut about = BTreeMap::new();
    if let Some(label) = label {
        about.insert("label".to_owned(), label.to_owned());
    }
    if let Some(host) = host_name() {
        about.insert("host".to_owned(), host);
    }
    about.insert("pid".to_owned(), std::process::id().to_string());
    about
}

fn host_name() -> Option<String> {
    let told = std::fs::read_to_string("/proc/sys/kernel/hostname")
        .ok()
        .or_else(|| std::fs::read_to_string("/etc/hostname").ok())
        .or_else(|| std::env::var("HOSTNAME").ok())?;
    let host = told.trim();
    (!host.is_empty()).then(|| host.to_owned())
}
