//! One connection from its first byte to its last, and the task that replaces it.
//!
//! Each connection is a fred client of its own, without a reconnect policy: when it ends, all that
//! it had queued ends with it. So nothing is ever sent twice or late, and what was learned on one
//! connection (the server's clock) is never used on another.
//!
//! 1. A command goes out with one attempt, under fred's timer, which also takes back what is still
//!    queued; ours is behind it, because fred's answer never comes once its task has ended.
//! 2. `Link::over` is cancelled before anything else happens to a connection that is given up, so no
//!    command is handed to it from then on.
//! 3. Ending a connection is aborting fred's task: the socket closes with it. `quit` is never
//!    called; it waits for a silent server.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fred::clients::Client;
use fred::error::{Error as FredError, ErrorKind};
use fred::interfaces::ClientLike;
use fred::types::config::{
    Blocking, ConnectionConfig, Options, PerformanceConfig, TcpConfig, UnresponsiveConfig,
};
use fred::types::{ClusterHash, CustomCommand, RespVersion, Value};
use futures_util::future::join;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::replicas::check_wait;
use super::script::{Texts, clock, clock_args, decode, refusal};
use super::{RedisConfig, Shared, State, message};
use crate::env::{Env, SharedEnv, later, until};
use crate::store::clock::Clock;
use crate::store::{Cause, Refusal, RefusalKind, Run};

/// Why there is no connection.
#[derive(Clone, Debug)]
pub(crate) enum ConnectFailure {
    /// The server said no, and will until somebody changes something.
    Refused(Refusal),
    /// Not reached, or not ready; worth another try.
    Unreachable(Cause),
    /// Closed by us.
    Closed,
}

/// Why a command has no result.
#[derive(Clone, Debug)]
pub(super) enum Fault {
    /// An error reply, in the server's words.
    Server(String),
    /// It never left: certain.
    NotSent(Cause),
    /// It may have been executed.
    Unanswered(Cause),
    /// The same, because time ran out: the connection may be dead.
    TimedOut,
}

impl Fault {
    pub(super) fn cause(&self) -> Cause {
        match self {
            Self::Server(words) => Cause::new(words.as_str()),
            Self::NotSent(cause) | Self::Unanswered(cause) => cause.clone(),
            Self::TimedOut => Cause::new("no answer in time"),
        }
    }

    pub(super) fn from_fred(error: &FredError) -> Self {
        let words = error.details();
        match error.kind() {
            ErrorKind::Timeout => Self::TimedOut,
            // Still in fred's queue when its task ended, or refused by its state: both unwritten.
            ErrorKind::Canceled => Self::NotSent(Cause::new("the connection was lost")),
            ErrorKind::Unknown
                if words == "Failed to send command to router."
                    || words == "Client is not initialized." =>
            {
                Self::NotSent(Cause::new("the connection was lost"))
            }
            ErrorKind::IO => Self::Unanswered(Cause::new(words)),
            ErrorKind::Protocol => Self::Unanswered(Cause::new(format!(
                "what answered is no Redis server, or wants TLS: {words}"
            ))),
            _ if is_error_reply(words) => Self::Server(words.to_owned()),
            _ => Self::Unanswered(Cause::new(words)),
        }
    }
}

/// Error replies begin with a code in capitals; fred's own errors do not. fred itself does not tell
/// the two apart.
fn is_error_reply(words: &str) -> bool {
    let code = words.split(' ').next().unwrap_or_default();
    let is_code = |b: u8| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_';
    // Redis 6.2 says where in a script first.
    code == "@user_script:" || code.len() >= 2 && code.bytes().all(is_code)
}

/// A fred client and its task. Dropping it closes the socket.
pub(super) struct Connection {
    pub(super) client: Client,
    task: JoinHandle<Result<(), FredError>>,
}

impl Connection {
    /// Connects, authenticates and selects the database. `messages` is how many channel messages may
    /// wait to be read.
    pub(super) async fn open(
        env: &dyn Env,
        config: &RedisConfig,
        messages: usize,
    ) -> Result<Self, ConnectFailure> {
        let mut server = config.server.clone();
        server.fail_fast = true;
        server.blocking = Blocking::Block;
        server.version = RespVersion::RESP2;
        let performance = PerformanceConfig {
            // A failed attempt is told twice; with less room the first, the reason, would be lost.
            broadcast_channel_capacity: messages.max(EVENTS),
            ..PerformanceConfig::default()
        };
        let connection = ConnectionConfig {
            connection_timeout: config.connect_timeout,
            internal_command_timeout: config.connect_timeout,
            max_command_attempts: 1,
            max_command_buffer_len: 0,
            reconnect_on_auth_error: false,
            auto_client_setname: false,
            unresponsive: UnresponsiveConfig::default(),
            tcp: TcpConfig {
                nodelay: Some(true),
                ..TcpConfig::default()
            },
            ..ConnectionConfig::default()
        };
        let client = Client::new(server, Some(performance), Some(connection), None);

        // Listening begins at the first poll, and must before the task starts, which tells once.
        let mut connected = Box::pin(client.wait_for_connect());
        let early = std::future::poll_fn(|cx| {
            std::task::Poll::Ready(connected.as_mut().poll(cx).is_ready())
        })
        .await;
        debug_assert!(!early, "a fresh client is not connected");
        let mut this = Self {
            task: client.connect(),
            client: client.clone(),
        };
        // Each Sentinel may take a timeout to be tried, and so may the server behind it.
        let hosts = u32::try_from(config.server.server.hosts().len()).unwrap_or(u32::MAX);
        let limit = config
            .connect_timeout
            .saturating_mul(hosts.saturating_mul(2).saturating_add(2));
        let outcome = until(env, later(env.now(), limit), async {
            tokio::select! {
                biased;
                connected = &mut connected => connected,
                ended = &mut this.task => match ended {
                    Ok(Err(error)) => Err(error),
                    _ => Err(FredError::new_canceled()),
                },
            }
        })
        .await;
        match outcome {
            Some(Ok(())) => Ok(this),
            Some(Err(error)) => Err(connect_failure(&error)),
            None => Err(ConnectFailure::Unreachable(Cause::new(
                "no connection in time",
            ))),
        }
    }

    /// Completes when the connection is over, with the reason.
    pub(super) async fn ended(&mut self) -> Cause {
        match (&mut self.task).await {
            Ok(Err(error)) => Cause::new(error.to_string()),
            Ok(Ok(())) => Cause::new("connection closed"),
            Err(_) => Cause::new("connection task ended"),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

fn connect_failure(error: &FredError) -> ConnectFailure {
    let words = error.details();
    let begins = |with: &[&str]| with.iter().any(|prefix| words.starts_with(prefix));
    let kind = if begins(&[
        "WRONGPASS",
        "NOAUTH",
        "NOPERM",
        "ERR invalid password",
        "ERR AUTH",
    ]) {
        RefusalKind::Denied
    } else if begins(&[
        "ERR DB index",
        "ERR invalid DB index",
        "ERR SELECT is not allowed",
    ]) {
        RefusalKind::Other
    } else {
        return ConnectFailure::Unreachable(Cause::new(plain(&error.to_string())));
    };
    ConnectFailure::Refused(Refusal {
        kind,
        message: words.to_owned(),
    })
}

/// What the operating system said, out of fred's `IO Error: Os { code: .., message: ".." }`.
fn plain(words: &str) -> String {
    let said = words
        .split_once("message: \"")
        .and_then(|(_, rest)| rest.split_once('"'));
    said.map_or(words, |(said, _)| said).to_owned()
}

/// Sends one command and waits for its reply until `deadline`.
pub(super) async fn ask(
    env: &dyn Env,
    client: &Client,
    command: &'static str,
    args: Vec<Value>,
    deadline: Instant,
) -> Result<Value, Fault> {
    let left = deadline.saturating_duration_since(env.now());
    if left.is_zero() {
        return Err(Fault::NotSent(Cause::new("no time left to send it")));
    }
    // `custom` honours the options; fred's script helpers would ignore them.
    let client = client.with_options(&one_attempt(left));
    let command = CustomCommand::new_static(command, ClusterHash::Random, false);
    // fred's futures are of many kilobytes: boxed here, so that those around it are not.
    let reply = Box::pin(client.custom::<Value, _>(command, args));
    match until(env, later(deadline, GRACE), reply).await {
        Some(Ok(value)) => Ok(value),
        Some(Err(error)) => Err(Fault::from_fred(&error)),
        None => Err(Fault::TimedOut),
    }
}

/// Options of every command: never twice, never later than `timeout`.
pub(super) fn one_attempt(timeout: Duration) -> Options {
    Options {
        max_attempts: Some(1),
        // Zero would mean no timeout.
        timeout: Some(timeout.max(Duration::from_millis(1))),
        fail_fast: true,
        ..Options::default()
    }
}

/// The command connection of one generation, shared by all calls.
pub(super) struct Link {
    pub(super) generation: u64,
    client: Client,
    opened: Instant,
    server: AtomicU64,
    run: OnceLock<Run>,
    clock: Clock,
    over: CancellationToken,
    why: Mutex<Option<Cause>>,
    checking: AtomicBool,
}

impl Link {
    /// Gives the connection up. The first reason stays.
    pub(super) fn give_up(&self, why: Cause) {
        self.why.lock().get_or_insert(why);
        self.over.cancel();
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.is_cancelled()
    }

    pub(super) fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.opened)
    }

    /// Which server this is; see [`Health::Up`](crate::store::Health::Up).
    pub(super) fn server(&self) -> u64 {
        self.server.load(Ordering::Relaxed)
    }

    /// Which run of the server this is, once it was asked.
    pub(super) fn run(&self) -> Option<Run> {
        self.run.get().cloned()
    }

    fn set_server(&self, shared: &Shared, info: Option<&str>) {
        let run_id = info.and_then(|info| field(info, "run_id"));
        let now = shared.env.now();
        let (number, met) = shared.server_number(run_id, now);
        self.server.store(number, Ordering::Relaxed);
        // Whole seconds, of a clock that may have been anywhere within them.
        let uptime = info.and_then(|info| field(info, "uptime_in_seconds")?.parse().ok());
        let up = uptime.map_or(0, |seconds: u64| seconds.saturating_sub(1));
        let mut age = Duration::from_secs(if run_id.is_some() { up } else { 0 });
        // It took another one's place: a replica may have been up for long, and have missed something.
        if let Some(met) = met {
            age = age.min(now.saturating_duration_since(met));
        }
        let _ = self.run.set(Run {
            id: run_id.map(Arc::from),
            asked: now,
            age,
        });
    }

    pub(super) fn clock(&self) -> &Clock {
        &self.clock
    }

    pub(super) async fn ask(
        &self,
        env: &dyn Env,
        command: &'static str,
        args: Vec<Value>,
        deadline: Instant,
    ) -> Result<Value, Fault> {
        if self.is_over() {
            return Err(Fault::NotSent(self.reason()));
        }
        tokio::select! {
            biased;
            result = ask(env, &self.client, command, args, deadline) => result,
            () = self.over.cancelled() => Err(Fault::Unanswered(self.reason())),
        }
    }

    fn reason(&self) -> Cause {
        let why = self.why.lock();
        why.clone()
            .unwrap_or_else(|| Cause::new("the connection was lost"))
    }

    /// After a timeout: is anybody there? If not, the connection is given up.
    pub(super) fn check(self: &Arc<Self>, env: &SharedEnv, timeout: Duration) {
        if self.checking.swap(true, Ordering::AcqRel) {
            return;
        }
        let (link, task_env) = (Arc::clone(self), Arc::clone(env));
        env.spawn(Box::pin(async move {
            let deadline = later(task_env.now(), timeout);
            match link.ask(&*task_env, "PING", Vec::new(), deadline).await {
                // An error reply is a sign of life too.
                Ok(_) | Err(Fault::Server(_)) => {}
                Err(fault) => link.give_up(Cause::new(format!("silent server: {}", fault.cause()))),
            }
            link.checking.store(false, Ordering::Release);
        }));
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("generation", &self.generation)
            .field("over", &self.is_over())
            .finish_non_exhaustive()
    }
}

/// Waits between attempts to connect: none before the first, then 20 ms growing to 200 ms.
#[derive(Debug, Default)]
pub(super) struct BackOff {
    failures: u32,
}

impl BackOff {
    pub(super) fn reset(&mut self) {
        self.failures = 0;
    }

    pub(super) fn next(&mut self, env: &dyn Env) -> Duration {
        let failures = self.failures;
        self.failures = failures.saturating_add(1);
        if failures == 0 {
            return Duration::ZERO;
        }
        let longest = FIRST_WAIT
            .saturating_mul(1 << (failures - 1).min(8))
            .min(LONGEST_WAIT);
        // Between half and all of it, so that the clients of a restarted server do not come at once.
        longest / 2 + (longest / 2) * u32::from(env.random().to_le_bytes()[0]) / 255
    }
}

/// Keeps one command connection up until the store is closed.
pub(super) async fn supervise(shared: Arc<Shared>) {
    // However this task ends, nobody waits for a connection any more.
    let _closed = CloseOnDrop(Arc::clone(&shared));
    let closing = shared.closing.clone();
    tokio::select! {
        biased;
        () = closing.cancelled() => {}
        () = keep_connected(&shared) => {}
    }
}

struct CloseOnDrop(Arc<Shared>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Gives the link up when the supervisor's future is dropped in the middle of its life.
struct OverOnDrop(Arc<Link>);

impl Drop for OverOnDrop {
    fn drop(&mut self) {
        self.0.give_up(Cause::new("store closed"));
    }
}

async fn keep_connected(shared: &Arc<Shared>) {
    let env = &shared.env;
    let mut back_off = BackOff::default();
    let mut generation = 0;
    let mut told = None;
    loop {
        let wait = back_off.next(&**env);
        env.sleep_until(later(env.now(), wait)).await;
        match open_link(shared, generation + 1).await {
            Ok((link, mut connection)) => {
                generation += 1;
                told = None;
                tracing::debug!(target: "leasehold", generation, "connected");
                let link = OverOnDrop(Arc::new(link));
                shared.set(State::Up(Arc::clone(&link.0)));
                let why = tokio::select! {
                    biased;
                    () = link.0.over.cancelled() => link.0.reason(),
                    why = connection.ended() => why,
                };
                link.0.give_up(why.clone());
                if link.0.age(env.now()) > LONGEST_WAIT {
                    back_off.reset();
                }
                tracing::debug!(target: "leasehold", generation, %why, "connection lost");
                shared.set_down(why, None);
            }
            Err(ConnectFailure::Unreachable(why)) => {
                tracing::debug!(target: "leasehold", %why, "no connection to the server");
                shared.set_down(why, None);
            }
            Err(ConnectFailure::Refused(refusal)) => {
                // Once for each reason, though it is tried again.
                if told.as_ref() != Some(&refusal.message) {
                    tracing::warn!(target: "leasehold", why = %refusal.message, "refused by the server");
                    told = Some(refusal.message.clone());
                }
                let why = Cause::new(refusal.message.as_str());
                shared.set_down(why, Some(refusal));
                env.sleep_until(later(env.now(), REFUSED_WAIT)).await;
            }
            Err(ConnectFailure::Closed) => return,
        }
    }
}

/// Opens a connection and asks for what must be known before it is used.
async fn open_link(shared: &Shared, generation: u64) -> Result<(Link, Connection), ConnectFailure> {
    let env = &*shared.env;
    let mut connection = Connection::open(env, &shared.config, EVENTS).await?;
    let link = Link {
        generation,
        client: connection.client.clone(),
        opened: env.now(),
        server: AtomicU64::new(0),
        run: OnceLock::new(),
        clock: Clock::default(),
        over: CancellationToken::new(),
        why: Mutex::new(None),
        checking: AtomicBool::new(false),
    };
    let deadline = later(env.now(), shared.config.connect_timeout);
    tokio::select! {
        biased;
        checked = check_server(shared, &link, deadline) => checked?,
        why = connection.ended() => return Err(ConnectFailure::Unreachable(why)),
    }
    Ok((link, connection))
}

async fn check_server(
    shared: &Shared,
    link: &Link,
    deadline: Instant,
) -> Result<(), ConnectFailure> {
    let env = &*shared.env;
    let info = |section: &'static str| link.ask(env, "INFO", vec![section.into()], deadline);
    let (about_server, about_memory) = join(info("server"), info("memory")).await;
    match about_server {
        Ok(info) => {
            let info = info.as_str().unwrap_or_default();
            check_info(&info)?;
            link.set_server(shared, Some(&info));
        }
        // Not permitted: then we do not know, and take it as it is.
        Err(Fault::Server(_)) => link.set_server(shared, None),
        Err(fault) => return Err(ConnectFailure::Unreachable(fault.cause())),
    }
    if let Ok(info) = about_memory {
        warn_of_eviction(shared, &info.as_str().unwrap_or_default());
    }
    if shared.config.replica_acks > 0 {
        check_wait(env, link, deadline).await?;
    }
    // The script is there already, or is sent in full; a user who may do neither may ask plainly.
    // Failing that the clock stays unknown, and the first answer tells.
    let clock_message = |head: &str| message(head, &Texts::default(), &clock_args(0));
    for (command, args) in [
        ("EVALSHA", clock_message(&clock().sha)),
        ("EVAL", clock_message(&clock().text)),
        ("TIME", Vec::new()),
    ] {
        let sent = env.now();
        match link.ask(env, command, args, deadline).await {
            Ok(reply) => {
                let decoded = decode(&reply, &[]).map(|decoded| decoded.server_now_us);
                if let Some(server_us) = decoded.ok().or_else(|| read_time(&reply)) {
                    link.clock.learn(sent, env.now(), server_us);
                    return Ok(());
                }
            }
            Err(Fault::Server(words)) if refusal(&words).kind == RefusalKind::Unavailable => {
                return Err(ConnectFailure::Unreachable(Cause::new(words)));
            }
            Err(Fault::Server(_)) => {}
            Err(fault) => return Err(ConnectFailure::Unreachable(fault.cause())),
        }
    }
    Ok(())
}

/// One field of what `INFO` says.
fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .map(str::trim)
}

/// Says once that the server may throw locks away.
fn warn_of_eviction(shared: &Shared, info: &str) {
    let Some(policy) = field(info, "maxmemory_policy").filter(|policy| *policy != "noeviction")
    else {
        return;
    };
    if !shared.told_of_eviction.swap(true, Ordering::Relaxed) {
        tracing::warn!(target: "leasehold", policy,
            "the server evicts keys when its memory is full, and a lock is a key: set \
             maxmemory-policy to noeviction, or give locks a server of their own"
        );
    }
}

fn check_info(info: &str) -> Result<(), ConnectFailure> {
    let field = |name: &str| field(info, name);
    let refuse = |message: String| {
        Err(ConnectFailure::Refused(Refusal {
            kind: RefusalKind::Other,
            message,
        }))
    };
    match field("redis_mode") {
        Some("cluster") => return refuse("Redis Cluster is not supported yet".into()),
        Some("sentinel") => {
            return refuse("this is a Sentinel: use redis-sentinel:// to reach its server".into());
        }
        _ => {}
    }
    let version = field("redis_version").and_then(|version| {
        let mut numbers = version.split('.').map(str::parse::<u32>);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    });
    match version {
        Some((major, minor)) if (major, minor) < OLDEST_SERVER => refuse(format!(
            "server version {major}.{minor} is too old: 6.2 or newer is needed"
        )),
        _ => Ok(()),
    }
}

/// `[seconds, microseconds]`, as `TIME` answers.
fn read_time(time: &Value) -> Option<u64> {
    let Value::Array(parts) = time else {
        return None;
    };
    let [seconds, micros] = &**parts else {
        return None;
    };
    seconds
        .as_u64()?
        .checked_mul(1_000_000)?
        .checked_add(micros.as_u64()?)
}

const OLDEST_SERVER: (u32, u32) = (6, 2);

/// Fewest events of fred that may wait to be read.
const EVENTS: usize = 16;

/// How long after fred's timer ours goes off: only when fred's did not.
const GRACE: Duration = Duration::from_millis(20);

const FIRST_WAIT: Duration = Duration::from_millis(20);
const LONGEST_WAIT: Duration = Duration::from_millis(200);

/// Between attempts that the server refuses: somebody has to change a password or a rule first.
const REFUSED_WAIT: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_replies_are_told_from_errors_of_fred() {
        for words in [
            "ERR x",
            "NOSCRIPT No matching",
            "READONLY You",
            "OOM command",
            "LOADING",
        ] {
            assert!(is_error_reply(words), "{words}");
        }
        for words in [
            "",
            "Too many failed write attempts.",
            "channel closed",
            "Failed to route command.",
            "Os { code: 111 }",
        ] {
            assert!(!is_error_reply(words), "{words}");
        }
    }

    #[test]
    fn old_servers_are_refused_and_unknown_ones_taken() {
        let version = |v: &str| check_info(&format!("# Server\r\nredis_version:{v}\r\n"));
        assert!(version("6.0.16").is_err());
        assert!(version("5.9.9").is_err());
        for taken in ["6.2.0", "7.0.15", "10.0.0", "255.255.255", "unknown", ""] {
            assert!(version(taken).is_ok(), "{taken}");
        }
        assert!(check_info("").is_ok());
        assert!(check_info("redis_mode:cluster\r\n").is_err());
        assert!(check_info("redis_mode:standalone\r\n").is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn clock_follows_the_answers() {
        #[expect(clippy::disallowed_methods, reason = "the paused clock of a test")]
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let clock = Clock::default();
        assert_eq!(clock.estimate(at(0)), 0);
        clock.learn(at(0), at(1), 1_000_000);
        assert_eq!(clock.estimate(at(11)), 1_010_000);
        // A slow answer allows what is known already.
        clock.learn(at(11), at(111), 1_020_000);
        assert_eq!(clock.estimate(at(111)), 1_110_000);
        // A clock set back is followed, and so is one set forward.
        clock.learn(at(111), at(112), 500_000);
        assert_eq!(clock.estimate(at(112)), 501_000);
        clock.learn(at(112), at(113), 9_000_000);
        assert_eq!(clock.estimate(at(113)), 9_000_000);
    }
}
