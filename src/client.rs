//! `LockClient`: one per service, cheap to clone; how it is built and how it ends.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use uuid::Uuid;

use crate::config::{Config, PubSub};
use crate::context::LockContext;
use crate::engine::{Engine, Handle};
use crate::env::{RealEnv, SharedEnv, later, until};
use crate::error::Error;
use crate::guard::ReleaseOutcome;
use crate::inspect::{self, Inspection};
use crate::key::KeyScheme;
use crate::kind::{Kind, RwLock};
use crate::lock::Lock;
use crate::store::memory::MemoryStore;
use crate::store::redis::{ConnectFailure, RedisConfig, RedisStore};
use crate::store::{RefusalKind, Store};

/// Connection, watchdog and waiting lines of one service. Cheap to clone; make one per process.
///
/// It belongs to the Tokio runtime it was built on: when that ends, calls answer
/// [`Error::Closed`], drops do nothing, and leases end by themselves. When the last client, context,
/// lock and guard are gone, the background ends once the posted releases are answered.
///
/// # Examples
///
/// ```no_run
/// # async fn example() -> Result<(), leasehold::Error> {
/// use leasehold::LockClient;
///
/// let client = LockClient::connect("redis://127.0.0.1:6379").await?;
/// let guard = client.lock("order:10").acquire().await?;
/// // ... the work that one process at a time may do ...
/// guard.release().await.into_result().expect("held all the time");
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct LockClient {
    handle: Arc<Handle>,
}

impl LockClient {
    /// Connects to the server at `url`, with defaults.
    ///
    /// `redis://[user:password@]host[:port][/database]`, `rediss://` for TLS (feature `tls`),
    /// `redis-sentinel://host:port/db?sentinelServiceName=name`, the `valkey` forms of these, and
    /// `memory://` for a store inside this client.
    ///
    /// # Errors
    ///
    /// * [`Error::Config`]: the URL cannot work; nothing was sent.
    /// * [`Error::Unreachable`]: no connection within the connect timeout (500 ms by default).
    /// * [`Error::Denied`]: wrong password or user.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future ends what it started.
    ///
    /// # Panics
    ///
    /// If called outside a Tokio runtime.
    pub async fn connect(url: &str) -> Result<Self, Error> {
        Self::builder().url(url).build().await
    }

    /// A client to be configured.
    pub fn builder() -> LockClientBuilder {
        LockClientBuilder {
            source: Source::Missing,
            config: Config::default(),
            command_timeout: None,
            lazy: false,
        }
    }

    /// A client with a store of its own inside: no server. For tests, demos and single processes.
    ///
    /// Contexts of this client and of its clones exclude each other; nothing else does.
    ///
    /// This store never fails. To try what a service does when a lock is lost or a server is away,
    /// or to have several clients, use `LockClientBuilder::simulated` with a `testing::Server` (feature
    /// `testing`); see [Testing](crate::manual::testing).
    ///
    /// # Panics
    ///
    /// If called outside a Tokio runtime.
    pub fn in_memory() -> Self {
        let env: SharedEnv = Arc::new(RealEnv::current());
        let client = client_id(&env);
        Self::on_memory(env, client, Config::default())
    }

    fn on_memory(env: SharedEnv, client: Uuid, config: Config) -> Self {
        let store = Arc::new(MemoryStore::new(Arc::clone(&env), client));
        Self::start(env, store, config, client)
    }

    pub(crate) fn start(
        env: SharedEnv,
        store: Arc<dyn Store>,
        config: Config,
        client: Uuid,
    ) -> Self {
        Self {
            handle: Handle::new(Engine::start(env, store, config, client)),
        }
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.handle.engine
    }

    /// A new contender.
    pub fn context(&self) -> LockContext {
        LockContext::new(Arc::clone(&self.handle))
    }

    /// A lock for a contender of its own: short for `client.context().lock(name)`.
    ///
    /// Two locks made this way exclude each other, also of one name in one task. To re-enter, use a
    /// [`context`](Self::context), or [`LockGuard::context`](crate::LockGuard::context).
    pub fn lock(&self, name: impl Into<Arc<str>>) -> Lock {
        self.context().lock(name)
    }

    /// A read/write lock for a contender of its own: short for `client.context().rw_lock(name)`.
    ///
    /// Its two sides, [`read`](RwLock::read) and [`write`](RwLock::write), belong to the same contender.
    pub fn rw_lock(&self, name: impl Into<Arc<str>>) -> RwLock {
        self.context().rw_lock(name)
    }

    /// A fair lock for a contender of its own: short for `client.context().fair_lock(name)`.
    ///
    /// See [`LockContext::fair_lock`].
    pub fn fair_lock(&self, name: impl Into<Arc<str>>) -> Lock {
        self.context().fair_lock(name)
    }

    /// Who holds the lock `name`, as [`Lock::inspect`].
    ///
    /// # Errors
    ///
    /// As [`Lock::inspect`].
    pub async fn inspect(&self, name: impl Into<Arc<str>>) -> Result<Inspection, Error> {
        inspect::inspect(&self.handle.engine, Kind::Plain, &name.into()).await
    }

    /// Frees the plain lock `name` by force, as [`Lock::force_release`]: looks who holds it, then removes that owner only, so that a
    /// later hold is never touched. Whether something was removed.
    ///
    /// Its holder is told: at once if it belongs to this client
    /// ([`LossReason::Forced`](crate::LossReason::Forced)), otherwise at its next renewal or release.
    /// Until then two may believe that they hold it. This is for operators.
    ///
    /// # Errors
    ///
    /// * [`Error::Unreachable`], [`Error::Indeterminate`]: no answer within the command timeout. May
    ///   be repeated.
    /// * [`Error::Conflict`], [`Error::Denied`], [`Error::Closed`], [`Error::Config`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves open whether the owner was removed.
    pub async fn force_release(&self, name: impl Into<Arc<str>>) -> Result<bool, Error> {
        inspect::force_release(&self.handle.engine, Kind::Plain, &name.into()).await
    }

    /// Ends the client in order, within `deadline`.
    ///
    /// No acquisition starts any more, and waiters get [`Error::Closed`]; a flow of work that holds a lock can
    /// still re-enter that one, to finish what it is at. Guards that are alive have
    /// until the deadline, less one command timeout, to be released by their owners; the rest are
    /// first told that they are lost ([`LossReason::ClientClosed`](crate::LossReason::ClientClosed)),
    /// then released. Posted releases are waited for.
    ///
    /// Called several times, also at once, the earliest deadline holds for all, and each hold is counted
    /// by one call.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the client closed for acquisitions; call it again to go on.
    pub async fn close(&self, deadline: Duration) -> CloseReport {
        let engine = &self.handle.engine;
        engine.closing.cancel();
        engine.dispatcher.refuse_acquires();
        engine.queues.recall_offers();
        let end = later(engine.now(), deadline);
        let patience = deadline.saturating_sub(engine.config.command_timeout);
        let patient_until = later(engine.now(), patience);
        let env = &*engine.env;
        until(env, patient_until, engine.until_no_grants()).await;
        let mut report = CloseReport {
            lost: 0,
            unconfirmed: 0,
        };
        let mut replies = Vec::new();
        for hold in engine.watchdog.holds() {
            let (reply, outcome) = oneshot::channel();
            if hold.close(reply) {
                report.lost += 1;
                replies.push(outcome);
            }
        }
        for reply in replies {
            match until(env, end, reply).await {
                Some(Ok(ReleaseOutcome::Released | ReleaseOutcome::Lost(_))) => {}
                _ => report.unconfirmed += 1,
            }
        }
        // Again, for an offer that was being made when the client began to close.
        engine.queues.recall_offers();
        until(env, end, engine.until_no_grants()).await;
        until(env, end, engine.dispatcher.until_idle()).await;
        until(env, end, engine.retract()).await;
        report.unconfirmed = report.unconfirmed.max(engine.dispatcher.releases());
        engine.end();
        report
    }
}

impl fmt::Debug for LockClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockClient")
            .field("engine", &self.handle.engine)
            .finish_non_exhaustive()
    }
}

/// What [`LockClient::close`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CloseReport {
    /// Holds whose guards were still alive: they were told, and released.
    pub lost: usize,
    /// Releases without an answer by the deadline: these locks are free when their leases end.
    pub unconfirmed: usize,
}

/// What a client is built from.
enum Source {
    Missing,
    Url(String),
    Redis(RedisSource),
    Memory,
    #[cfg(feature = "testing")]
    Simulated(crate::testing::Server),
}

/// A fred configuration or client to take the server's address and credentials from.
///
/// Made by `From`; see [`LockClientBuilder::redis`].
pub struct RedisSource {
    config: Box<fred::types::config::Config>,
}

impl fmt::Debug for RedisSource {
    /// Says nothing of the configuration: it has the password in it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisSource").finish_non_exhaustive()
    }
}

impl From<fred::types::config::Config> for RedisSource {
    fn from(config: fred::types::config::Config) -> Self {
        Self {
            config: Box::new(config),
        }
    }
}

impl From<&fred::clients::Client> for RedisSource {
    fn from(client: &fred::clients::Client) -> Self {
        use fred::interfaces::ClientLike as _;
        Self {
            config: Box::new(client.client_config()),
        }
    }
}

impl From<fred::clients::Client> for RedisSource {
    fn from(client: fred::clients::Client) -> Self {
        Self::from(&client)
    }
}

/// Configures and builds a [`LockClient`].
#[must_use = "a builder does nothing until it is built"]
pub struct LockClientBuilder {
    source: Source,
    config: Config,
    command_timeout: Option<Duration>,
    lazy: bool,
}

impl LockClientBuilder {
    /// The server, by URL; see [`LockClient::connect`].
    pub fn url(mut self, url: impl Into<String>) -> Self {
        self.source = Source::Url(url.into());
        self
    }

    /// The server, by a fred configuration, or by a fred client whose configuration is taken.
    ///
    /// Connections are always our own, with time limits and retries that suit a lock: the client
    /// given is neither used nor closed.
    pub fn redis(mut self, source: impl Into<RedisSource>) -> Self {
        self.source = Source::Redis(source.into());
        self
    }

    /// A store inside this client; see [`LockClient::in_memory`].
    pub fn in_memory(mut self) -> Self {
        self.source = Source::Memory;
        self
    }

    /// A simulated server, which has the faults of a real one on demand; see
    /// [`testing`](crate::testing).
    #[cfg(feature = "testing")]
    pub fn simulated(mut self, server: &crate::testing::Server) -> Self {
        self.source = Source::Simulated(server.clone());
        self
    }

    /// The client, in an environment of its own.
    #[cfg(feature = "testing")]
    pub(crate) fn simulate(
        self,
        server: &crate::testing::Server,
        env: SharedEnv,
        ppm: i64,
        rush: Duration,
    ) -> Result<LockClient, Error> {
        let mut config = self.checked()?;
        config.rush = rush;
        let client = client_id(&env);
        let store = server.join(&env, client, ppm, &config);
        Ok(LockClient::start(env, Arc::new(store), config, client))
    }

    /// Lease of holds that are renewed: 30 s by default; 100 ms to one year, in whole milliseconds.
    ///
    /// Renewed every third of it. A crash frees the lock within this time and one command timeout.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.config.lease = lease;
        self
    }

    /// Longest time any lock may be held; none by default. See [`Lock::max_hold`].
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.config.max_hold = Some(max_hold);
        self
    }

    /// What this client calls itself to those who [`inspect`](LockClient::inspect).
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.config.label = Some(label.into());
        self
    }

    /// How keys and channels are called; Redisson's names by default.
    pub fn key_scheme(mut self, scheme: KeyScheme) -> Self {
        self.config.scheme = scheme;
        self
    }

    /// Longest time to wait for the answer to one request: the smaller of 1 s and a sixth of the
    /// lease by default. A lock with a shorter lease has a sixth of that.
    pub fn command_timeout(mut self, timeout: Duration) -> Self {
        self.command_timeout = Some(timeout);
        self
    }

    /// How long [`build`](Self::build) tries to connect, and how long one attempt may take at any later time:
    /// 500 ms by default. A service that may start before its server sets it to some seconds.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.config.connect_timeout = timeout;
        self
    }

    /// How releases are heard of; as Redisson would by default.
    pub fn pubsub(mut self, mode: PubSub) -> Self {
        self.config.pubsub = mode;
        self
    }

    /// How long token counters outlive their last use, and at most half as long again: one hour by default,
    /// at least two leases; `None` for ever, needed where Java's fenced lock shares the name.
    pub fn token_retention(mut self, retention: Option<Duration>) -> Self {
        self.config.token_retention = retention;
        self
    }

    /// Replicas that must have a new hold before it counts: 0 by default.
    ///
    /// After a grant the server is asked (`WAIT`) how many replicas have it. While there are too few,
    /// it is asked again until the caller's time is over: then the call fails with
    /// [`Error::Indeterminate`], and the hold is released.
    ///
    /// This narrows, and does not close, the gap in which a failover forgets a hold: the election may
    /// choose a replica that had not acknowledged. Let the store check the
    /// [token](crate::LockGuard::fencing_token).
    ///
    /// Costs one more round trip, and that of the server to its replicas, with each acquisition. Each
    /// `WAIT` holds up the connection, renewals on it too, for 10 ms at a time (an idle server may
    /// take up to 100 ms to notice that these are over).
    pub fn replica_acks(mut self, replicas: u32) -> Self {
        self.config.replica_acks = replicas;
        self
    }

    /// Builds the client without waiting for a connection; off by default.
    pub fn lazy_connect(mut self, lazy: bool) -> Self {
        self.lazy = lazy;
        self
    }

    /// Shows names in events only as digests; off by default.
    pub fn digest_names(mut self, digest: bool) -> Self {
        self.config.digest_names = digest;
        self
    }

    /// Builds the client, connected unless [lazy](Self::lazy_connect).
    ///
    /// # Errors
    ///
    /// As [`LockClient::connect`]; [`Error::Config`] also for settings out of range, and when no
    /// server was named.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future ends what it started.
    ///
    /// # Panics
    ///
    /// If called outside a Tokio runtime.
    pub async fn build(mut self) -> Result<LockClient, Error> {
        let source = std::mem::replace(&mut self.source, Source::Missing);
        let lazy = self.lazy;
        let config = self.checked()?;
        let env: SharedEnv = Arc::new(RealEnv::current());
        let client = client_id(&env);
        let server = match source {
            #[cfg(feature = "testing")]
            Source::Simulated(server) => {
                let store = server.join(&env, client, 0, &config);
                return Ok(LockClient::start(env, Arc::new(store), config, client));
            }
            Source::Missing => {
                return Err(Error::config(
                    "no server named: call `url`, `redis` or `in_memory`",
                ));
            }
            Source::Memory => return Ok(LockClient::on_memory(env, client, config)),
            Source::Url(url) if url == "memory://" => {
                return Ok(LockClient::on_memory(env, client, config));
            }
            Source::Url(text) => RedisConfig::from_url(&text)?,
            Source::Redis(source) => RedisConfig::new(*source.config)?,
        };
        let server = RedisConfig {
            scheme: config.scheme.clone(),
            command_timeout: config.command_timeout,
            connect_timeout: config.connect_timeout,
            pubsub: config.pubsub,
            replica_acks: config.replica_acks,
            ..server
        };
        let hosts = server.hosts();
        let config = Config {
            server: Some(server.identity()),
            ..config
        };
        let store = RedisStore::connect(server, &env, client);
        // Whatever happens to this future from here on, the client ends with its last handle.
        let built = LockClient::start(env, Arc::clone(&store) as Arc<dyn Store>, config, client);
        if !lazy {
            let engine = &built.handle.engine;
            let deadline = later(engine.now(), engine.config.connect_timeout);
            let connected = store.first_connect(deadline).await;
            connected.map_err(|failure| not_connected(failure, &hosts))?;
        }
        Ok(built)
    }

    /// The settings, if they can work.
    fn checked(self) -> Result<Config, Error> {
        let mut config = self.config;
        config.command_timeout = self
            .command_timeout
            .unwrap_or_else(|| config.command_timeout.min(config.lease / 6));
        config.validate()?;
        Ok(config)
    }
}

impl fmt::Debug for LockClientBuilder {
    /// Leaves out the URL: it may have a password in it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockClientBuilder")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

fn not_connected(failure: ConnectFailure, hosts: &str) -> Error {
    match failure {
        ConnectFailure::Refused(refusal) if refusal.kind == RefusalKind::Denied => Error::Denied {
            subject: format!("the server at {hosts}"),
            source: refusal.message.into(),
        },
        ConnectFailure::Refused(refusal) => Error::config(format!(
            "the server at {hosts} cannot be used: {}",
            refusal.message
        )),
        ConnectFailure::Unreachable(cause) => Error::Unreachable {
            subject: format!("the server at {hosts}"),
            source: cause.into(),
        },
        ConnectFailure::Closed => Error::Closed,
    }
}

fn client_id(env: &SharedEnv) -> Uuid {
    let bits = (u128::from(env.random()) << 64) | u128::from(env.random());
    uuid::Builder::from_random_bytes(bits.to_be_bytes()).into_uuid()
}
