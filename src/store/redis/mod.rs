//! The store on a Redis or Valkey server, through fred.
//!
//! `connection` keeps one command connection up, `wake` one for messages; calls are made here.

mod connection;
mod replicas;
pub(crate) mod script;
mod url;
mod wake;

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use fred::types::Value;
use fred::types::config::{Config as FredConfig, ServerConfig};
use futures_util::future::{join_all, join4};
use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use self::connection::{Fault, Link, supervise};
use self::script::{Publish, Script, Texts, decode, encode, refusal, script_for};
use super::topic::{Listening, Topics};
use super::{
    Answer, Call, Cause, Channel, Health, NoReply, Refusal, RefusalKind, Reply, Run, Snapshot,
    Store, Subscription,
};
use crate::config::{DEFAULT_COMMAND_TIMEOUT, DEFAULT_CONNECT_TIMEOUT, PubSub};
use crate::env::{BoxFuture, SharedEnv, later, until};
use crate::error::Error;
use crate::key::KeyScheme;
use crate::kind::Kind;
use crate::store::clock::micros;

pub(crate) use self::connection::ConnectFailure;
pub(crate) use self::url::parse_url;

/// Where the server is and how to talk to it.
#[derive(Clone)]
pub(crate) struct RedisConfig {
    /// Of fred's settings only who and where: server, credentials, database, TLS.
    pub(crate) server: FredConfig,
    pub(crate) scheme: KeyScheme,
    pub(crate) command_timeout: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) pubsub: PubSub,
    /// Replicas that must have a new hold before it counts; see `replicas`.
    pub(crate) replica_acks: u32,
}

impl RedisConfig {
    /// The server of `server`, with defaults for the rest. Refuses what cannot work.
    pub(crate) fn new(server: FredConfig) -> Result<Self, Error> {
        url::validate(&server)?;
        Ok(Self {
            server,
            scheme: KeyScheme::default(),
            command_timeout: DEFAULT_COMMAND_TIMEOUT,
            connect_timeout: DEFAULT_CONNECT_TIMEOUT,
            pubsub: PubSub::default(),
            replica_acks: 0,
        })
    }

    /// The server of `url`; see [`parse_url`].
    pub(crate) fn from_url(url: &str) -> Result<Self, Error> {
        Self::new(parse_url(url)?)
    }

    /// Hosts and ports, to be shown.
    pub(crate) fn hosts(&self) -> String {
        let hosts = self.server.server.hosts();
        let hosts: Vec<_> = hosts.iter().map(ToString::to_string).collect();
        hosts.join(", ")
    }

    /// Which server this is, among all: the same for all who name it alike.
    pub(crate) fn identity(&self) -> String {
        let hosts = self.server.server.hosts();
        let mut hosts: Vec<_> = hosts.iter().map(ToString::to_string).collect();
        hosts.sort();
        let service = match &self.server.server {
            ServerConfig::Sentinel { service_name, .. } => service_name.as_str(),
            _ => "",
        };
        let database = self.server.database.unwrap_or_default();
        format!("{} {service:?} {database}", hosts.join(",").to_lowercase())
    }
}

impl fmt::Debug for RedisConfig {
    /// Without user name and password, which fred's own `Debug` shows.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisConfig")
            .field("hosts", &self.hosts())
            .field("scheme", &self.scheme)
            .field("command_timeout", &self.command_timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("pubsub", &self.pubsub)
            .field("replica_acks", &self.replica_acks)
            .finish_non_exhaustive()
    }
}

/// Holds on a Redis or Valkey server.
pub(crate) struct RedisStore {
    shared: Arc<Shared>,
}

/// What the store and its tasks have in common.
struct Shared {
    env: SharedEnv,
    config: RedisConfig,
    client_id: Uuid,
    publish: Publish,
    state: watch::Sender<State>,
    health: watch::Sender<Health>,
    topics: Arc<Topics>,
    closing: CancellationToken,
    /// Held by whoever waits for replicas: one at a time.
    waiting: AsyncMutex<()>,
    /// The server was found to evict keys, and that was said.
    told_of_eviction: AtomicBool,
    servers: Mutex<Servers>,
}

/// The servers that were found at the ends of connections.
#[derive(Default)]
struct Servers {
    count: u64,
    /// Of the last one, where it tells.
    run_id: Option<String>,
    /// When the last one took the place of another.
    met: Option<Instant>,
}

/// [`Health`], with what our own need besides.
#[derive(Clone, Debug)]
enum State {
    Connecting {
        since: Instant,
    },
    Up(Arc<Link>),
    Down {
        since: Instant,
        why: Cause,
        /// Where the server itself said no.
        refusal: Option<Refusal>,
    },
    Closed,
}

impl RedisStore {
    /// Starts connecting, on the runtime of `env`; does not wait for it.
    pub(crate) fn connect(config: RedisConfig, env: &SharedEnv, client_id: Uuid) -> Arc<Self> {
        let publish = match config.pubsub {
            // Redisson's rule: sharded messages only on a cluster.
            PubSub::Auto | PubSub::Plain => Publish::Plain,
            PubSub::Sharded => Publish::Sharded,
            PubSub::Both => Publish::Both,
            PubSub::Off => Publish::Off,
        };
        let shared = Arc::new(Shared {
            state: watch::Sender::new(State::Connecting { since: env.now() }),
            health: watch::Sender::new(Health::Connecting),
            topics: Arc::default(),
            closing: CancellationToken::new(),
            waiting: AsyncMutex::new(()),
            told_of_eviction: AtomicBool::new(false),
            servers: Mutex::default(),
            env: Arc::clone(env),
            config,
            client_id,
            publish,
        });
        env.spawn(Box::pin(supervise(Arc::clone(&shared))));
        if publish != Publish::Off {
            env.spawn(Box::pin(wake::listen(Arc::clone(&shared))));
        }
        Arc::new(Self { shared })
    }

    /// Completes with the first connection, with the server's refusal as soon as it gives one, or
    /// at `deadline` with the last trouble.
    pub(crate) async fn first_connect(&self, deadline: Instant) -> Result<(), ConnectFailure> {
        let mut state = self.shared.state.subscribe();
        let mut last = Cause::new("not connected in time");
        loop {
            match &*state.borrow_and_update() {
                State::Up(_) => return Ok(()),
                State::Closed => return Err(ConnectFailure::Closed),
                State::Connecting { .. } => {}
                State::Down { refusal, why, .. } => {
                    if let Some(refusal) = refusal {
                        return Err(ConnectFailure::Refused(refusal.clone()));
                    }
                    last = why.clone();
                }
            }
            match until(&*self.shared.env, deadline, state.changed()).await {
                Some(Ok(())) => {}
                Some(Err(_)) => return Err(ConnectFailure::Closed),
                None => return Err(ConnectFailure::Unreachable(last)),
            }
        }
    }
}

impl Store for RedisStore {
    fn ready(&self, timeout: Duration) -> Option<BoxFuture<()>> {
        if self.shared.link_now().is_some() {
            return None;
        }
        let shared = Arc::clone(&self.shared);
        Some(Box::pin(async move {
            let end = later(shared.env.now(), timeout);
            // Whether there is one now, the call finds out for itself.
            let _ = shared.link(end).await;
        }))
    }

    fn submit(&self, call: Call) -> BoxFuture<Result<Reply, NoReply>> {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            if tokio::runtime::Handle::try_current().is_ok() {
                return shared.call(call).await;
            }
            // fred's timers need a runtime around them, and this caller has none.
            let (sent, timeout) = (shared.env.now(), call.timeout);
            let (answer, answered) = oneshot::channel();
            let own = Arc::clone(&shared);
            shared.env.spawn(Box::pin(async move {
                let _ = answer.send(own.call(call).await);
            }));
            answered
                .await
                .unwrap_or_else(|_| Err(shared.runtime_ended(sent, timeout)))
        })
    }

    fn subscribe(&self, channel: &Channel) -> Subscription {
        let first = if self.shared.publish == Publish::Off || self.shared.closing.is_cancelled() {
            Listening::Refused
        } else {
            Listening::Pending
        };
        self.shared.topics.subscribe(channel, first)
    }

    fn inspect(
        &self,
        kind: Kind,
        name: &Arc<str>,
        timeout: Duration,
    ) -> BoxFuture<Result<Snapshot, NoReply>> {
        let (shared, name) = (Arc::clone(&self.shared), Arc::clone(name));
        Box::pin(async move { shared.inspect(kind, &name, timeout).await })
    }

    fn announce(&self, info: BTreeMap<String, String>, ttl: Duration) -> BoxFuture<()> {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move { shared.announce(info, ttl).await })
    }

    fn retract(&self) -> BoxFuture<()> {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            let key = shared.config.scheme.client(shared.client_id);
            shared.best_effort("DEL", vec![key.into()]).await;
        })
    }

    fn health(&self) -> watch::Receiver<Health> {
        self.shared.health.subscribe()
    }

    fn run(&self) -> Option<Run> {
        match &*self.shared.state.borrow() {
            State::Up(link) => link.run(),
            _ => None,
        }
    }

    fn close(&self) {
        self.shared.close();
    }
}

impl Drop for RedisStore {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("config", &self.shared.config)
            .field("health", &*self.shared.health.borrow())
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// Moves to another state, unless closed.
    fn set(&self, next: State) {
        let health = match &next {
            State::Connecting { .. } => Health::Connecting,
            State::Up(link) => Health::Up {
                generation: link.generation,
                server: link.server(),
            },
            State::Down { since, why, .. } => Health::Down {
                since: *since,
                why: Arc::clone(&why.0),
            },
            State::Closed => Health::Closed,
        };
        self.state.send_if_modified(|state| {
            let open = !matches!(state, State::Closed);
            if open {
                *state = next;
                self.health.send_replace(health);
            }
            open
        });
    }

    /// The number of the server just connected to, and when it took the place of another one. One that does not
    /// tell who it is may be another.
    fn server_number(&self, run_id: Option<&str>, now: Instant) -> (u64, Option<Instant>) {
        let mut servers = self.servers.lock();
        if run_id.is_none() || servers.run_id.as_deref() != run_id {
            servers.run_id = run_id.map(str::to_owned);
            servers.met = (servers.count > 0).then_some(now);
            servers.count += 1;
        }
        (servers.count, servers.met)
    }

    /// No connection; since when is kept from the first time on.
    fn set_down(&self, why: Cause, refusal: Option<Refusal>) {
        let since = match &*self.state.borrow() {
            State::Connecting { since } | State::Down { since, .. } => *since,
            State::Up(_) | State::Closed => self.env.now(),
        };
        self.set(State::Down {
            since,
            why,
            refusal,
        });
    }

    fn close(&self) {
        if let State::Up(link) = &*self.state.borrow() {
            link.give_up(Cause::new("store closed"));
        }
        self.set(State::Closed);
        self.closing.cancel();
        for topic in self.topics.all() {
            topic.set(Listening::Refused);
            topic.wake();
        }
    }

    fn link_now(&self) -> Option<Arc<Link>> {
        match &*self.state.borrow() {
            State::Up(link) if !link.is_over() => Some(Arc::clone(link)),
            _ => None,
        }
    }

    /// The connection, waited for until `end` at most, and only while an outage is young: a lasting
    /// one fails at once.
    async fn link(&self, end: Instant) -> Result<Arc<Link>, NoReply> {
        if let Some(link) = self.link_now() {
            return Ok(link);
        }
        let mut state = self.state.subscribe();
        loop {
            let (limit, why) = match &*state.borrow_and_update() {
                State::Up(link) if !link.is_over() => return Ok(Arc::clone(link)),
                State::Up(_) => (end, Cause::new("the connection was lost")),
                State::Connecting { since } => {
                    let patience = self.config.command_timeout.max(self.config.connect_timeout);
                    (later(*since, patience), Cause::new("not connected yet"))
                }
                State::Down {
                    refusal: Some(refusal),
                    ..
                } => return Err(NoReply::Refused(refusal.clone())),
                State::Down { since, why, .. } => {
                    (later(*since, self.config.command_timeout), why.clone())
                }
                State::Closed => return Err(NoReply::NotSent(Cause::new("store closed"))),
            };
            let limit = limit.min(end);
            if self.env.now() >= limit {
                return Err(NoReply::NotSent(why));
            }
            if let Some(Err(_)) = until(&*self.env, limit, state.changed()).await {
                return Err(NoReply::NotSent(Cause::new("store closed")));
            }
        }
    }

    async fn call(&self, call: Call) -> Result<Reply, NoReply> {
        let Call {
            attempt,
            timeout,
            ops,
        } = call;
        let env = &*self.env;
        let end = later(env.now(), timeout);
        // Not waited for: what is sent must be wanted at that moment, and who asked for it can tell.
        let link = self.link(env.now()).await?;
        let Some(first) = ops.first() else {
            return Err(NoReply::NotSent(Cause::new("a call without ops")));
        };
        let script = script_for(first);
        // The stamp comes before the deadline and both before the sending: what is derived from the
        // stamp may only be too early.
        let sent = env.now();
        let left = end.saturating_duration_since(sent);
        let deadline_us = link.clock().estimate(sent).saturating_add(micros(left));
        let (keys, args) = encode(
            &self.config.scheme,
            self.publish,
            attempt,
            deadline_us,
            &ops,
        );
        let unanswered = |cause| NoReply::Unanswered {
            sent,
            deadline_us,
            cause,
        };
        let value = match self.eval(&link, script, &keys, &args, end).await {
            Ok(value) => value,
            Err(Fault::NotSent(cause)) => return Err(NoReply::NotSent(cause)),
            Err(Fault::Unanswered(cause)) => {
                link.check(&self.env, self.config.command_timeout);
                return Err(unanswered(cause));
            }
            Err(Fault::TimedOut) => {
                link.check(&self.env, self.config.command_timeout);
                return Err(unanswered(Fault::TimedOut.cause()));
            }
            Err(Fault::Server(words)) => return Err(self.refused(&link, &words)),
        };
        let received = env.now();
        match decode(&value, &ops) {
            Ok(decoded) if decoded.attempt == attempt => {
                link.clock().learn(sent, received, decoded.server_now_us);
                let acknowledged = self.acknowledged(&link, &decoded.answers, end).await;
                acknowledged.map_err(unanswered)?;
                for answer in &decoded.answers {
                    if let Answer::Refused(refusal) = answer {
                        self.rebuild_if_demoted(&link, &refusal.message);
                    }
                }
                Ok(Reply {
                    sent,
                    server_now_us: decoded.server_now_us,
                    answers: decoded.answers,
                })
            }
            // Replies are mixed up, or not ours: what this connection says is worth nothing.
            Ok(_) => {
                let cause = Cause::new("the reply belongs to another request");
                link.give_up(cause.clone());
                Err(unanswered(cause))
            }
            Err(malformed) => {
                let cause = Cause::new(malformed.to_string());
                link.give_up(cause.clone());
                Err(unanswered(cause))
            }
        }
    }

    /// Runs the script by its hash; in full when the server has forgotten it. As nothing is sent
    /// twice by anybody else, `NOSCRIPT` means that it did not run.
    async fn eval(
        &self,
        link: &Link,
        script: &Script,
        keys: &Texts,
        args: &Texts,
        end: Instant,
    ) -> Result<Value, Fault> {
        let env = &*self.env;
        let by_hash = message(&script.sha, keys, args);
        match link.ask(env, "EVALSHA", by_hash, end).await {
            Err(Fault::Server(words)) if words.starts_with("NOSCRIPT") => {
                let in_full = message(&script.text, keys, args);
                link.ask(env, "EVAL", in_full, end).await
            }
            other => other,
        }
    }

    /// What an error reply to a whole call means.
    fn refused(&self, link: &Link, words: &str) -> NoReply {
        let refusal = refusal(words);
        let words = refusal.message.as_str();
        match refusal.kind {
            RefusalKind::Unavailable => {
                self.rebuild_if_demoted(link, words);
                NoReply::NotSent(Cause::new(words))
            }
            RefusalKind::Denied => NoReply::Refused(Refusal {
                message: with_missing_permission(refusal.message),
                ..refusal
            }),
            _ => NoReply::Refused(refusal),
        }
    }

    /// A replica now: Sentinel, or the name service, knows where the primary went.
    fn rebuild_if_demoted(&self, link: &Link, words: &str) {
        let demoted = words.starts_with("READONLY") || words.starts_with("MASTERDOWN");
        if demoted && link.age(self.env.now()) >= REBUILD_INTERVAL {
            link.give_up(Cause::new(words));
        }
    }

    fn runtime_ended(&self, sent: Instant, timeout: Duration) -> NoReply {
        let clock = match &*self.state.borrow() {
            State::Up(link) => link.clock().estimate(self.env.now()),
            _ => 0,
        };
        NoReply::Unanswered {
            sent,
            deadline_us: clock.saturating_add(micros(timeout)),
            cause: Cause::new("the runtime of the client has ended"),
        }
    }

    async fn inspect(
        &self,
        kind: Kind,
        name: &Arc<str>,
        timeout: Duration,
    ) -> Result<Snapshot, NoReply> {
        let env = &*self.env;
        let end = later(env.now(), timeout);
        let link = self.link(end).await?;
        let scheme = &self.config.scheme;
        let ask = |command, args: Vec<Value>| link.ask(env, command, args, end);
        let hash = scheme.hash(name);
        let count = match self.publish {
            Publish::Sharded => "SHARDNUMSUB",
            Publish::Plain | Publish::Both | Publish::Off => "NUMSUB",
        };
        let (holders, remaining, token, listeners) = join4(
            ask("HGETALL", vec![hash.as_ref().into()]),
            ask("PTTL", vec![hash.as_ref().into()]),
            ask("GET", vec![scheme.token(name).into()]),
            async {
                match kind {
                    Kind::Plain | Kind::Read | Kind::Write => {
                        let channel = scheme.channel(&kind.channel(name));
                        ask("PUBSUB", vec![count.into(), channel.into()]).await
                    }
                    Kind::Fair => {
                        let [queue, ..] = scheme.queue(name);
                        ask("LLEN", vec![queue.into()]).await
                    }
                }
            },
        )
        .await;
        let mut snapshot = Snapshot::default();
        match holders {
            Ok(fields) => {
                let fields = pairs(&fields).into_iter();
                for (owner, count) in fields {
                    match count.parse() {
                        Ok(count) => snapshot.holders.push((owner, count)),
                        Err(_) if owner == "mode" => snapshot.mode = Some(count),
                        Err(_) => {}
                    }
                }
            }
            Err(Fault::Server(words)) => {
                let refusal = refusal(&words);
                match refusal.kind {
                    // Hidden by an access rule: missing, like the rest.
                    RefusalKind::Denied => {}
                    RefusalKind::Unavailable => return Err(NoReply::NotSent(Cause::new(words))),
                    _ => return Err(NoReply::Refused(refusal)),
                }
            }
            Err(fault) => return Err(self.not_read(&link, &fault)),
        }
        for unread in [&remaining, &token, &listeners] {
            match unread {
                Ok(_) | Err(Fault::Server(_)) => {}
                Err(fault) => return Err(self.not_read(&link, fault)),
            }
        }
        if snapshot.mode.is_some() {
            self.look_at_readers(&link, name, end, &mut snapshot).await;
        }
        snapshot.remaining_ms = remaining.ok().and_then(|ttl| ttl.as_u64());
        snapshot.token = token.ok().and_then(|token| token.as_u64());
        snapshot.waiting = match listeners {
            Ok(Value::Array(counts)) => counts.get(1).and_then(Value::as_u64),
            Ok(length @ Value::Integer(_)) => length.as_u64(),
            _ => None,
        };
        if let Some(client) = snapshot
            .holders
            .iter()
            .find_map(|(owner, _)| client_of(owner))
            && let Ok(info) = ask("HGETALL", vec![scheme.client(client).into()]).await
        {
            snapshot.holder_info = pairs(&info).into_iter().collect();
        }
        Ok(snapshot)
    }

    /// What is left of each reader's lease; without the dead. Of a great many the first are looked at.
    async fn look_at_readers(
        &self,
        link: &Link,
        name: &Arc<str>,
        end: Instant,
        snapshot: &mut Snapshot,
    ) {
        let env = &*self.env;
        let base = self.config.scheme.readers(name);
        let mut looks = Vec::new();
        for (reader, count) in snapshot.holders.iter().take(MOST_READERS) {
            for number in 1..=(*count).min(MOST_HOLDS) {
                if reader.ends_with(":write") {
                    continue;
                }
                let (reader, key) = (
                    reader.clone(),
                    format!("{base}:{reader}:rwlock_timeout:{number}"),
                );
                looks.push(async move {
                    let left = link.ask(env, "PTTL", vec![key.into()], end).await;
                    // What is hidden counts as there.
                    let left = left.ok().and_then(|left| left.as_i64());
                    (reader, left.unwrap_or(-1))
                });
            }
        }
        for (reader, left) in join_all(looks).await {
            let longest = snapshot.readers.entry(reader).or_insert(Some(0));
            match left {
                -2 => {}
                -1 => *longest = None,
                left => *longest = longest.map(|longest| longest.max(left.unsigned_abs())),
            }
        }
        snapshot.readers.retain(|_, left| *left != Some(0));
        let readers = &snapshot.readers;
        let mut place = 0;
        snapshot.holders.retain(|(owner, _)| {
            place += 1;
            place > MOST_READERS || owner.ends_with(":write") || readers.contains_key(owner)
        });
    }

    /// A read without an answer: it changes nothing, so it counts as not sent.
    fn not_read(&self, link: &Arc<Link>, fault: &Fault) -> NoReply {
        if matches!(fault, Fault::TimedOut) {
            link.check(&self.env, self.config.command_timeout);
        }
        NoReply::NotSent(fault.cause())
    }

    async fn announce(&self, info: BTreeMap<String, String>, ttl: Duration) {
        let mut args: Vec<Value> = vec![
            ANNOUNCE.into(),
            "1".into(),
            self.config.scheme.client(self.client_id).into(),
            ttl.as_millis().max(1).to_string().into(),
        ];
        for (field, value) in info {
            args.push(field.into());
            args.push(value.into());
        }
        if args.len() > 4 {
            self.best_effort("EVAL", args).await;
        }
    }

    async fn best_effort(&self, command: &'static str, args: Vec<Value>) {
        let end = later(self.env.now(), self.config.command_timeout);
        let Ok(link) = self.link(end).await else {
            return;
        };
        if let Err(fault) = link.ask(&*self.env, command, args, end).await {
            tracing::debug!(target: "leasehold", command, cause = %fault.cause(), "not done");
        }
    }
}

/// `[script, number of keys, keys.., args..]`.
fn message(script: &str, keys: &Texts, args: &Texts) -> Vec<Value> {
    let mut message = Vec::with_capacity(2 + keys.len() + args.len());
    message.push(script.into());
    message.push(keys.len().to_string().into());
    message.extend(keys.values().chain(args.values()));
    message
}

/// Fields and values of a hash, as text.
fn pairs(hash: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().map(Cow::into_owned);
    match hash {
        Value::Array(items) => items
            .chunks_exact(2)
            .filter_map(|pair| Some((text(&pair[0])?, text(&pair[1])?)))
            .collect(),
        _ => Vec::new(),
    }
}

/// The client of an owner, `<client>:<hold>`.
fn client_of(owner: &str) -> Option<Uuid> {
    let owner = owner.strip_suffix(":write").unwrap_or(owner);
    let (client, _) = owner.rsplit_once(':')?;
    Uuid::try_parse(client).ok()
}

/// The server's words, and what an administrator has to add.
fn with_missing_permission(words: String) -> String {
    let missing = if words.contains("evalsha") {
        "needs +evalsha"
    } else if words.contains("'eval'") {
        "needs +eval, or the scripts loaded ahead"
    } else if words.contains("key") {
        "needs access to the keys of the lock"
    } else {
        return words;
    };
    format!("{words} ({missing})")
}

/// Writes all fields and the time to live in one step, so that nothing is left without one.
const ANNOUNCE: &str = "redis.call('HSET', KEYS[1], unpack(ARGV, 2)) \
                        redis.call('PEXPIRE', KEYS[1], ARGV[1]) return 1";

/// Readers of a lock that `inspect` asks for, and keys of each.
const MOST_READERS: usize = 64;
const MOST_HOLDS: u32 = 8;

/// A connection this young is not given up for another `READONLY`.
const REBUILD_INTERVAL: Duration = Duration::from_millis(200);
