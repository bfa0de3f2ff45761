//! Events: one for each change of state, with what is needed to act on it, and with nothing that must
//! not leave the process.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::{LockClient, LossReason, ReleaseOutcome};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

use crate::common::*;

/// One event of the crate.
#[derive(Clone, Debug)]
struct Told {
    level: Level,
    message: String,
    fields: BTreeMap<String, String>,
}

/// All events of the crate, in order.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<Told>>>);

impl<S: Subscriber> Layer<S> for Log {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if !event.metadata().target().starts_with("leasehold") {
            return;
        }
        let mut told = Told {
            level: *event.metadata().level(),
            message: String::new(),
            fields: BTreeMap::new(),
        };
        event.record(&mut told);
        self.0.lock().unwrap().push(told);
    }
}

impl Visit for Told {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        if field.name() == "message" {
            self.message = text;
        } else {
            self.fields.insert(field.name().to_owned(), text);
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.fields
            .insert(field.name().to_owned(), value.to_owned());
    }
}

impl Log {
    /// Listens to this thread, on which everything of a single-threaded test runs.
    fn listen() -> (Self, tracing::subscriber::DefaultGuard) {
        let log = Self::default();
        let subscriber = tracing_subscriber::registry().with(log.clone());
        (log, record_this_thread(subscriber))
    }

    fn all(&self) -> Vec<Told> {
        self.0.lock().unwrap().clone()
    }

    /// The events with this message, since the last look.
    fn of(&self, message: &str) -> Vec<Told> {
        let all = self.all().into_iter();
        all.filter(|told| told.message == message).collect()
    }

    /// Waits for the first event with this message.
    async fn until(&self, message: &str) -> Told {
        eventually(secs(10), message, async || !self.of(message).is_empty()).await;
        self.of(message).remove(0)
    }

    /// The messages, those on single tries aside.
    fn messages(&self) -> Vec<String> {
        let all = self.all().into_iter();
        all.filter(|told| told.level < Level::TRACE)
            .map(|told| told.message)
            .collect()
    }
}

impl Told {
    fn number(&self, field: &str) -> u64 {
        let text = self.fields.get(field);
        let text = text.unwrap_or_else(|| panic!("no {field} in {self:?}"));
        text.parse().unwrap()
    }

    /// That it says of which hold it speaks, and does not give its identity away.
    fn is_about(&self, name: &str) {
        assert_eq!(self.fields["name"], name, "{self:?}");
        let owner = &self.fields["owner"];
        assert!(
            owner.len() == 8 && owner.bytes().all(|byte| byte.is_ascii_hexdigit()),
            "{self:?}"
        );
    }
}

async fn client(url: &str, lease: Duration) -> LockClient {
    let builder = LockClient::builder().url(url).lease(lease).label("orders");
    builder.connect_timeout(secs(5)).build().await.unwrap()
}

/// One event for each change: acquired, acquired after waiting, late, recovered, lost; with name, owner
/// and what is left of the lease.
#[tokio::test]
async fn each_change_of_a_hold_is_told_once() {
    let (log, _listening) = Log::listen();
    let server = Server::start();
    let lease = ms(4500);
    let client = client(&server.url(), lease).await;
    let name = unique_name();

    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    let acquired = log.until("lock acquired").await;
    acquired.is_about(&name);
    assert!(
        (3000..=4500).contains(&acquired.number("remaining_ms")),
        "{acquired:?}"
    );

    let mut lock = client.lock(name.as_str());
    let waiting = tokio::spawn(async move { lock.acquire().await.unwrap() });
    server.cli().await.until_waiters(&name, 1).await;
    let cli = server.cli().await;
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    let guard = waiting.await.unwrap();
    let waited = log.until("lock acquired after waiting").await;
    waited.is_about(&name);
    assert!(waited.number("waited_ms") > 0, "{waited:?}");
    assert_ne!(waited.fields["owner"], acquired.fields["owner"]);

    // An outage shorter than the lease.
    server.stop();
    let late = log.until("lease renewal is late").await;
    server.cont();
    late.is_about(&name);
    assert_eq!(late.level, Level::WARN);
    assert!((1..4500).contains(&late.number("remaining_ms")), "{late:?}");
    let recovered = log.until("lease renewal recovered").await;
    recovered.is_about(&name);
    assert!(recovered.number("remaining_ms") > late.number("remaining_ms"));
    assert!(guard.is_held());

    cli.cmd(&["DEL", &name]).await.ok();
    guard.lost().cancelled().await;
    let lost = log.until("lock lost").await;
    lost.is_about(&name);
    assert_eq!(lost.fields["owner"], waited.fields["owner"]);
    assert_eq!(lost.fields["reason"], LossReason::KeyGone.to_string());
    let released = guard.release().await;
    assert_eq!(released, ReleaseOutcome::Lost(LossReason::KeyGone));
    nothing_left(&server, &name).await;
    for once in [
        "lock acquired",
        "lock acquired after waiting",
        "lease renewal is late",
        "lease renewal recovered",
        "lock lost",
    ] {
        assert_eq!(log.of(once).len(), 1, "{:?}", log.messages());
    }
}

/// The connection's changes are told once each, and a release without an answer is.
#[tokio::test]
async fn an_outage_and_its_end_are_told_once() {
    let (log, _listening) = Log::listen();
    let server = Server::start();
    let client = client(&server.url(), secs(3)).await;
    let name = unique_name();
    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    server.stop();
    let outcome = guard.release().await;
    assert!(
        matches!(outcome, ReleaseOutcome::Unconfirmed { .. }),
        "{outcome:?}"
    );
    let unconfirmed = log.until("release unconfirmed").await;
    unconfirmed.is_about(&name);
    unconfirmed.number("at_most_ms");
    log.until("connection to the server lost").await;
    // The subject: an outage of many tries.
    tokio::time::sleep(ms(1500)).await;
    server.cont();
    log.until("reconnected to the server").await;
    drop(client.lock(name.as_str()).acquire().await.unwrap());
    nothing_left(&server, &name).await;
    for once in [
        "release unconfirmed",
        "connection to the server lost",
        "reconnected to the server",
    ] {
        assert_eq!(log.of(once).len(), 1, "{:?}", log.messages());
    }
    let loud = log.all();
    let loud: Vec<_> = loud
        .iter()
        .filter(|told| told.level <= Level::INFO)
        .collect();
    assert!(loud.len() <= 4, "{loud:?}");
}

/// Who waits for his own client, a whole lease long, is told so once, with the holder's label and age:
/// most likely it is a lock taken twice in one flow of work.
#[tokio::test]
async fn waiting_for_oneself_is_told_once() {
    let (log, _listening) = Log::listen();
    let lease = secs(2);
    let client = client(&server().url(), lease).await;
    let name = unique_name();
    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    let again = client
        .lock(name.as_str())
        .acquire_timeout(lease * 5 / 2)
        .await;
    assert!(again.is_err());
    let told: Vec<_> = log.all();
    let told: Vec<_> = told
        .iter()
        .filter(|told| {
            told.message
                .starts_with("waiting for a lock that this same client holds")
        })
        .collect();
    assert_eq!(told.len(), 1, "{:?}", log.messages());
    assert_eq!(told[0].fields["label"], "orders");
    assert_eq!(told[0].fields["name"], name);
    assert!(told[0].number("held_for_ms") >= 2000);
    drop(guard);
    nothing_left(server(), &name).await;
}

/// A line that moves on is no self-deadlock, however long somebody stands in it.
#[tokio::test]
async fn a_busy_line_is_not_told_that_it_waits_for_itself() {
    let (log, _listening) = Log::listen();
    let client = client(&server().url(), ms(1500)).await;
    let name = unique_name();
    let mut tasks = Vec::new();
    for _ in 0..100 {
        let mut lock = client.lock(name.as_str());
        tasks.push(tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap();
            // So that the line takes two leases.
            tokio::time::sleep(ms(30)).await;
            drop(guard);
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let messages = log.messages();
    assert!(
        !messages.iter().any(|told| told.contains("same client")),
        "{messages:?}"
    );
    nothing_left(server(), &name).await;
}

/// A server that refuses every connection is told of once, not at each try.
#[tokio::test]
async fn a_refusal_is_told_once() {
    let (log, _listening) = Log::listen();
    let server = Server::start();
    let password = async |word: &str| {
        let cli = server.cli().await;
        let _ = cli.cmd(&["AUTH", "one"]).await;
        let _ = cli.cmd(&["AUTH", "two"]).await;
        let set = ["CONFIG", "SET", "requirepass", word];
        cli.cmd(&set).await.ok();
        let kill = ["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"];
        cli.cmd(&kill).await.ok();
    };
    password("one").await;
    let url = format!("redis://:one@127.0.0.1:{}", server.port());
    let client = client(&url, secs(9)).await;
    let guard = client.lock("job").acquire().await.unwrap();
    password("two").await;
    log.until("refused by the server").await;
    // Tried again each second; the passing of time is the subject.
    tokio::time::sleep(ms(2500)).await;
    assert_eq!(log.of("refused by the server").len(), 1);
    password("one").await;
    guard
        .confirm()
        .await
        .unwrap_or_else(|_| assert!(guard.is_held()));
    log.until("reconnected to the server").await;
    password("two").await;
    eventually(secs(10), "told again", async || {
        log.of("refused by the server").len() == 2
    })
    .await;
}

/// A server that became a replica refuses each renewal, and is looked for again after each: told once.
#[tokio::test]
async fn a_server_that_refuses_again_and_again_is_told_once() {
    let (log, _listening) = Log::listen();
    let server = Server::start();
    let client = client(&server.url(), secs(3)).await;
    let guard = client.lock("job").acquire().await.unwrap();
    server.cmd(&["REPLICAOF", "127.0.0.1", "1"]).await.ok();
    guard.lost().cancelled().await;
    log.until("lock lost").await;
    let mut lost = log.of("connection to the server lost");
    lost.retain(|told| told.level == Level::WARN);
    assert_eq!(lost.len(), 1, "{lost:?}");
    server.cmd(&["REPLICAOF", "NO", "ONE"]).await.ok();
    drop(guard);
    let again = client.lock("job").acquire_timeout(secs(10)).await;
    assert!(again.is_ok(), "{again:?}");
}

/// Servers close connections on which nothing happens: no warning, while nothing is held.
#[tokio::test]
async fn an_idle_connection_that_is_closed_is_no_warning() {
    let (log, _listening) = Log::listen();
    let server = Server::start();
    let client = client(&server.url(), secs(9)).await;
    let kill = ["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"];
    server.cmd(&kill).await.ok();
    log.until("reconnected to the server").await;
    assert_eq!(log.of("idle connection to the server lost").len(), 1);
    let guard = client.lock("job").acquire().await.unwrap();
    server.cmd(&kill).await.ok();
    log.until("connection to the server lost").await;
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
}

/// What leaves the process has no identity of a hold in it, with which one could be released, and no
/// password; with `digest_names` no name either.
#[tokio::test]
async fn events_give_nothing_away() {
    let (log, _listening) = Log::listen();
    let server = Server::start();
    let password = ["CONFIG", "SET", "requirepass", "s3cret-word"];
    server.cmd(&password).await.ok();
    let url = format!("redis://:s3cret-word@127.0.0.1:{}", server.port());
    let name = unique_name();
    let builder = LockClient::builder()
        .url(url)
        .lease(secs(2))
        .digest_names(true);
    let client = builder.connect_timeout(secs(5)).build().await.unwrap();
    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    let late = client.lock(name.as_str()).acquire_timeout(ms(2300)).await;
    assert!(late.is_err());
    server.stop();
    guard.lost().cancelled().await;
    drop(guard);
    log.until("connection to the server lost").await;
    server.cont();
    log.until("reconnected to the server").await;
    let all = log.all();
    assert!(all.len() >= 5, "{:?}", log.messages());
    for told in all {
        let text = format!("{told:?}");
        assert!(!text.contains("s3cret"), "{text}");
        assert!(!text.contains(&name), "{text}");
        for word in text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-' || c == ':')) {
            let is_owner = word.len() > 37
                && word.as_bytes()[36] == b':'
                && uuid::Uuid::try_parse(&word[..36]).is_ok();
            assert!(!is_owner, "{text}");
        }
    }
}

/// B91: the server is down under a thousand holds. Two events for each at most, with a bound on how
/// many come at once, and one for the connection.
#[tokio::test]
async fn an_outage_under_a_thousand_holds_is_told_in_measure() {
    let server = Server::start();
    let lease = secs(5);
    let client = client(&server.url(), lease).await;
    let prefix = unique_name();
    let names: Vec<_> = (0..1000).map(|i| format!("{prefix}-{i}")).collect();
    let guards = names.iter().map(|name| {
        let mut lock = client.lock(name.as_str());
        async move { lock.acquire().await.unwrap() }
    });
    let guards = futures_util::future::join_all(guards).await;
    // Everything is renewed once before it begins.
    for guard in &guards {
        guard.confirm().await.unwrap();
    }
    let (log, _listening) = Log::listen();
    server.stop();
    for guard in &guards {
        guard.lost().cancelled().await;
    }
    // The subject: the outage goes on for a while.
    tokio::time::sleep(scaled(ms(1500), secs(60))).await;
    drop(guards);
    server.cont();
    log.until("reconnected to the server").await;
    nothing_left(&server, &prefix).await;

    let mut of_hold = BTreeMap::<String, usize>::new();
    let mut others = BTreeMap::<String, usize>::new();
    for told in log.all() {
        match told.fields.get("name") {
            Some(name) => *of_hold.entry(name.clone()).or_default() += 1,
            None => *others.entry(told.message).or_default() += 1,
        }
    }
    assert!(!of_hold.is_empty(), "some of it is told");
    let most = of_hold.values().max().unwrap();
    assert!(*most <= 2, "{most} events of one hold");
    let told: usize = of_hold.values().sum();
    assert!(told <= 2000, "{told} events");
    assert!(others["connection to the server lost"] == 1, "{others:?}");
    assert!(others["reconnected to the server"] == 1, "{others:?}");
    let noise: usize = others.values().sum();
    assert!(noise <= scaled(40, 250), "{others:?}");
    // What was left out is counted.
    let summary: u64 = log
        .all()
        .iter()
        .filter_map(|told| told.fields.get("events")?.parse::<u64>().ok())
        .sum();
    assert!(
        told as u64 + summary >= 1000,
        "{told} told, {summary} counted"
    );
}
