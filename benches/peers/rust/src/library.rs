//! The libraries, each as its own documentation would have it used, with its defaults.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fred::interfaces::{ClientLike as _, LuaInterface as _};

/// A lock, taken and given back.
pub trait Library: Clone + Send + Sync + 'static {
    type Held: Send;

    fn connect(url: &str) -> impl Future<Output = Self> + Send;
    fn lock(&self, name: &str) -> impl Future<Output = Self::Held> + Send;
    fn unlock(&self, held: Self::Held) -> impl Future<Output = ()> + Send;
}

const LEASE: Duration = Duration::from_secs(30);

#[derive(Clone)]
pub struct Leasehold(pub leasehold::LockClient);

impl Library for Leasehold {
    type Held = leasehold::LockGuard;

    async fn connect(url: &str) -> Self {
        Self(leasehold::LockClient::connect(url).await.unwrap())
    }

    async fn lock(&self, name: &str) -> Self::Held {
        self.0.lock(name).acquire().await.unwrap()
    }

    async fn unlock(&self, held: Self::Held) {
        held.release().await.into_result().unwrap();
    }
}

/// leasehold's other kinds of lock.
#[derive(Clone)]
pub struct Fair(leasehold::LockClient);

impl Library for Fair {
    type Held = leasehold::LockGuard;

    async fn connect(url: &str) -> Self {
        Self(leasehold::LockClient::connect(url).await.unwrap())
    }

    async fn lock(&self, name: &str) -> Self::Held {
        self.0.fair_lock(name).acquire().await.unwrap()
    }

    async fn unlock(&self, held: Self::Held) {
        held.release().await.into_result().unwrap();
    }
}

/// The two sides of a read/write lock.
#[derive(Clone)]
pub struct Side<const WRITE: bool>(leasehold::LockClient);

impl<const WRITE: bool> Library for Side<WRITE> {
    type Held = leasehold::LockGuard;

    async fn connect(url: &str) -> Self {
        Self(leasehold::LockClient::connect(url).await.unwrap())
    }

    async fn lock(&self, name: &str) -> Self::Held {
        let lock = self.0.rw_lock(name);
        let mut side = if WRITE { lock.write() } else { lock.read() };
        side.acquire().await.unwrap()
    }

    async fn unlock(&self, held: Self::Held) {
        held.release().await.into_result().unwrap();
    }
}

/// Three names at once.
#[derive(Clone)]
pub struct Multi(leasehold::LockClient);

impl Library for Multi {
    type Held = leasehold::MultiGuard;

    async fn connect(url: &str) -> Self {
        Self(leasehold::LockClient::connect(url).await.unwrap())
    }

    async fn lock(&self, name: &str) -> Self::Held {
        let mut context = self.0.context();
        let members = ["a", "b", "c"].map(|part| context.lock(format!("{name}:{part}")));
        leasehold::MultiLock::new(members).acquire().await.unwrap()
    }

    async fn unlock(&self, held: Self::Held) {
        drop(held.release().await);
    }
}

/// No lock at all: two `PING`s through fred, to show what the machine's round trip costs.
#[derive(Clone)]
pub struct Ping(fred::clients::Client);

impl Library for Ping {
    type Held = ();

    async fn connect(url: &str) -> Self {
        Self(Fred::connect(url).await.0)
    }

    async fn lock(&self, _: &str) {
        let _: String = self.0.ping(None).await.unwrap();
    }

    async fn unlock(&self, (): ()) {
        let _: String = self.0.ping(None).await.unwrap();
    }
}

/// The same on a bare socket.
#[derive(Clone)]
pub struct TcpPing(Arc<tokio::sync::Mutex<tokio::net::TcpStream>>);

impl TcpPing {
    async fn ping(&self) {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let mut socket = self.0.lock().await;
        socket.write_all(b"PING\r\n").await.unwrap();
        let mut answer = [0; 7];
        socket.read_exact(&mut answer).await.unwrap();
    }
}

impl Library for TcpPing {
    type Held = ();

    async fn connect(url: &str) -> Self {
        let address = url.trim_start_matches("redis://");
        let socket = tokio::net::TcpStream::connect(address).await.unwrap();
        socket.set_nodelay(true).unwrap();
        Self(Arc::new(tokio::sync::Mutex::new(socket)))
    }

    async fn lock(&self, _: &str) {
        self.ping().await;
    }

    async fn unlock(&self, (): ()) {
        self.ping().await;
    }
}

#[derive(Clone)]
pub struct Rslock(rslock::LockManager);

impl Library for Rslock {
    type Held = rslock::LockGuard;

    async fn connect(url: &str) -> Self {
        Self(rslock::LockManager::new(vec![url.to_owned()]))
    }

    async fn lock(&self, name: &str) -> Self::Held {
        self.0.acquire(name.as_bytes(), LEASE).await.unwrap()
    }

    async fn unlock(&self, held: Self::Held) {
        held.release().await;
    }
}

#[derive(Clone)]
pub struct Rlock(Arc<rlock::async_lock::RLock>);

impl Library for Rlock {
    type Held = rlock::async_lock::RLockGuard;

    async fn connect(url: &str) -> Self {
        Self(Arc::new(rlock::async_lock::RLock::new(url).await.unwrap()))
    }

    async fn lock(&self, name: &str) -> Self::Held {
        self.0.acquire_mutex(name).await.unwrap()
    }

    async fn unlock(&self, mut held: Self::Held) {
        held.release().await.unwrap();
    }
}

#[derive(Clone)]
pub struct Nadis(nadis::DistributedLock);

impl Library for Nadis {
    type Held = nadis::LockGuard;

    async fn connect(url: &str) -> Self {
        let profile = nadis::CompatibilityProfile::RustV2;
        let config = nadis::RedisConfig::new(url, "bench", profile);
        let client = nadis::RedisClient::connect(config).await.unwrap();
        Self(nadis::DistributedLock::new(client))
    }

    async fn lock(&self, name: &str) -> Self::Held {
        self.0.lock(name, None).await.unwrap()
    }

    async fn unlock(&self, held: Self::Held) {
        held.unlock().await.unwrap();
    }
}

const PRELUDE: &str = include_str!("../../../../src/store/redis/lua/prelude.lua");
const TOKENS: &str = include_str!("../../../../src/store/redis/lua/tokens.lua");
const LEVELS: &str = include_str!("../../../../src/store/redis/lua/levels.lua");
const ACQUIRE: &str = include_str!("../../../../src/store/redis/lua/lock_acquire.lua");
const RELEASE: &str = include_str!("../../../../src/store/redis/lua/lock_release.lua");

/// How one calls a script by hash.
pub trait Evalsha: Clone + Send + Sync + 'static {
    fn connect(url: &str) -> impl Future<Output = Self> + Send;
    fn load(&self, script: String) -> impl Future<Output = String> + Send;
    /// The third item of the answer: what the script says of its one operation.
    fn evalsha(
        &self,
        hash: &str,
        keys: Vec<String>,
        args: Vec<String>,
    ) -> impl Future<Output = i64> + Send;
}

/// leasehold's own two scripts, with all that they do (tokens, messages), called by a client of
/// Redis and nothing around it. When the lock is taken it is asked for again 1 to 5 ms later.
#[derive(Clone)]
pub struct Bare<C>(Arc<BareInner<C>>);

struct BareInner<C> {
    redis: C,
    acquire: String,
    release: String,
    attempt: AtomicU64,
    client: String,
}

pub struct BareHeld {
    name: String,
    owner: String,
}

const GRANTED: i64 = 1;
const RELEASED: i64 = 6;
const DEADLINE: &str = "4000000000000000";

impl<C: Evalsha> Library for Bare<C> {
    type Held = BareHeld;

    async fn connect(url: &str) -> Self {
        let redis = C::connect(url).await;
        let acquire = format!("{PRELUDE}\n{TOKENS}\n{LEVELS}\n{ACQUIRE}");
        let release = format!("{PRELUDE}\n{LEVELS}\n{RELEASE}");
        Self(Arc::new(BareInner {
            acquire: redis.load(acquire).await,
            release: redis.load(release).await,
            redis,
            attempt: AtomicU64::new(0),
            client: format!("9b1deb4d-3b7d-4bad-9bdd-{:012x}", std::process::id()),
        }))
    }

    async fn lock(&self, name: &str) -> BareHeld {
        let mut pause_ms = 1;
        loop {
            let attempt = self.0.attempt.fetch_add(1, Ordering::Relaxed);
            let owner = format!("{}:{attempt}", self.0.client);
            let keys = vec![name.to_owned(), format!("redisson_lock_token:{{{name}}}")];
            let args = vec![
                attempt.to_string(),
                DEADLINE.to_owned(),
                owner.clone(),
                "1".to_owned(),
                "30000".to_owned(),
                "0".to_owned(),
                "3600000".to_owned(),
            ];
            if self.0.redis.evalsha(&self.0.acquire, keys, args).await == GRANTED {
                let name = name.to_owned();
                return BareHeld { name, owner };
            }
            tokio::time::sleep(Duration::from_millis(pause_ms)).await;
            pause_ms = 5.min(pause_ms + 1);
        }
    }

    async fn unlock(&self, held: BareHeld) {
        let attempt = self.0.attempt.fetch_add(1, Ordering::Relaxed);
        let channel = format!("redisson_lock__channel:{{{}}}", held.name);
        let args = vec![
            attempt.to_string(),
            DEADLINE.to_owned(),
            "PLAIN".to_owned(),
            held.owner,
            "0".to_owned(),
            String::new(),
            channel,
        ];
        let answer = (self.0.redis).evalsha(&self.0.release, vec![held.name], args);
        assert_eq!(answer.await, RELEASED);
    }
}

#[derive(Clone)]
pub struct Fred(fred::clients::Client);

impl Evalsha for Fred {
    async fn connect(url: &str) -> Self {
        let config = fred::types::config::Config::from_url(url).unwrap();
        let client = fred::clients::Client::new(config, None, None, None);
        client.init().await.unwrap();
        Self(client)
    }

    async fn load(&self, script: String) -> String {
        self.0.script_load(script).await.unwrap()
    }

    async fn evalsha(&self, hash: &str, keys: Vec<String>, args: Vec<String>) -> i64 {
        let answer: Vec<i64> = self.0.evalsha(hash, keys, args).await.unwrap();
        answer[2]
    }
}

#[derive(Clone)]
pub struct RedisRs(redis::aio::MultiplexedConnection);

impl Evalsha for RedisRs {
    async fn connect(url: &str) -> Self {
        let client = redis::Client::open(url).unwrap();
        Self(client.get_multiplexed_async_connection().await.unwrap())
    }

    async fn load(&self, script: String) -> String {
        let mut command = redis::cmd("SCRIPT");
        command.arg("LOAD").arg(script);
        command.query_async(&mut self.0.clone()).await.unwrap()
    }

    async fn evalsha(&self, hash: &str, keys: Vec<String>, args: Vec<String>) -> i64 {
        let mut command = redis::cmd("EVALSHA");
        command.arg(hash).arg(keys.len()).arg(keys).arg(args);
        let answer: Vec<i64> = command.query_async(&mut self.0.clone()).await.unwrap();
        answer[2]
    }
}
