//! S1 and S2 by what they are for: no update is lost, and late writes are refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use leasehold::{LockClient, LossReason, ReleaseOutcome};

use crate::common::{self, Cli, Ruler, Worker, WorkerSide, ms, secs};
use crate::support::client_of;

const PROCESSES: usize = 3;
const TASKS: usize = 4;

fn rounds() -> usize {
    common::scaled(25, 1000)
}

/// Reads, and writes one more: what two at once would spoil.
async fn add_one(cli: &Cli, counter: &str) {
    let before = cli.cmd(&["GET", counter]).await.text_if_any();
    let before: u64 = before.map_or(0, |text| text.parse().unwrap());
    tokio::task::yield_now().await;
    let after = (before + 1).to_string();
    cli.cmd(&["SET", counter, &after]).await.ok();
}

/// A process of the tests below, with several tasks: `run` counts up, with or without the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counting_worker() {
    let Some(mut me) = WorkerSide::if_spawned() else {
        return;
    };
    let env = |key| std::env::var(key).unwrap();
    let (url, port, name) = (env("URL"), env("PORT").parse().unwrap(), env("NAME"));
    let locked = env("LOCKED") == "yes";
    let client = client_of(&url, secs(30)).await;
    me.say("ready");
    assert_eq!(me.line().await.as_deref(), Some("run"));
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| {
            let (client, name) = (client.clone(), name.clone());
            tokio::spawn(async move {
                let cli = Cli::connect(port).await;
                let (counter, tokens) = (format!("count-{name}"), format!("tokens-{name}"));
                for _ in 0..rounds() {
                    if !locked {
                        add_one(&cli, &counter).await;
                        continue;
                    }
                    let mut ctx = client.context();
                    let outer = ctx.lock(name.as_str()).acquire().await.unwrap();
                    let inner = ctx.lock(name.as_str()).acquire().await.unwrap();
                    add_one(&cli, &counter).await;
                    let token = inner.fencing_token().unwrap().to_string();
                    cli.cmd(&["RPUSH", &tokens, &token]).await.ok();
                    drop(inner);
                    assert_eq!(outer.release().await, ReleaseOutcome::Released);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    me.say("done");
    me.line().await;
}

/// Runs the workers; answers with the count and the tokens in order of writing.
async fn count(name: &str, locked: &str) -> (usize, Vec<u64>) {
    let server = common::server();
    let (url, port) = (server.url(), server.port().to_string());
    let envs = [
        ("URL", url.as_str()),
        ("PORT", &port),
        ("NAME", name),
        ("LOCKED", locked),
    ];
    let mut workers: Vec<_> = (0..PROCESSES)
        .map(|_| Worker::spawn("exclusion::counting_worker", &envs))
        .collect();
    for worker in &mut workers {
        worker.expect("ready").await;
    }
    for worker in &mut workers {
        worker.say("run").await;
    }
    for worker in &mut workers {
        worker.expect("done").await;
    }
    let cli = server.cli().await;
    let (counter, list) = (format!("count-{name}"), format!("tokens-{name}"));
    let count = cli.cmd(&["GET", &counter]).await.text().parse().unwrap();
    let tokens = cli.cmd(&["LRANGE", &list, "0", "-1"]).await.texts();
    cli.cmd(&["DEL", &counter, &list]).await.ok();
    let tokens = tokens.iter().map(|token| token.parse().unwrap()).collect();
    for mut worker in workers {
        worker.close_stdin();
        assert!(worker.wait().await.success());
    }
    (count, tokens)
}

/// S1, S2, L2: processes times tasks, all after one name, each nesting: the sum is exact, tokens rise
/// from write to write, and everybody gets in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_update_is_lost_between_processes() {
    let name = common::unique_name();
    let (count, tokens) = count(&name, "yes").await;
    assert_eq!(count, PROCESSES * TASKS * rounds());
    assert_eq!(tokens.len(), count);
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
    common::nothing_left(common::server(), &name).await;
}

/// The test above proves something only if this loses updates.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn updates_are_lost_without_the_lock() {
    let (count, _) = count(&common::unique_name(), "no").await;
    assert!(count < PROCESSES * TASKS * rounds(), "{count}");
}

/// The same rules in the store in memory, with a counter in memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_update_is_lost_in_memory() {
    let client = LockClient::in_memory();
    let counter = Arc::new(AtomicU64::new(0));
    let rounds = common::scaled(200, 20_000);
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let (client, counter) = (client.clone(), Arc::clone(&counter));
            tokio::spawn(async move {
                for _ in 0..rounds {
                    let guard = client.lock("counter").acquire().await.unwrap();
                    let before = counter.load(Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    counter.store(before + 1, Ordering::SeqCst);
                    drop(guard);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(counter.load(Ordering::SeqCst), 8 * rounds);
}

/// What checks tokens: it refuses one smaller than the greatest it has seen.
const FENCED_SET: &str = "
    if tonumber(ARGV[2]) < tonumber(redis.call('HGET', KEYS[1], 'token') or 0) then return 0 end
    redis.call('HSET', KEYS[1], 'text', ARGV[1], 'token', ARGV[2])
    return 1";

async fn fenced_set(cli: &Cli, key: &str, text: &str, token: &str) -> bool {
    let reply = cli.cmd(&["EVAL", FENCED_SET, "1", key, text, token]).await;
    reply.int() == 1
}

/// A process that takes the lock and thinks until it is told that it lost it; then writes all the
/// same.
#[tokio::test]
async fn careless_worker() {
    let Some(mut me) = WorkerSide::if_spawned() else {
        return;
    };
    let env = |key| std::env::var(key).unwrap();
    let (name, port) = (env("NAME"), env("PORT").parse().unwrap());
    let client = client_of(&env("URL"), LEASE).await;
    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    let token = guard.fencing_token().unwrap().to_string();
    me.say("holds");
    // While it is stopped its end of the pipe fills: this line is the first thing it reads after.
    me.line().await;
    me.say(if guard.is_held() { "held" } else { "lost" });
    let cli = Cli::connect(port).await;
    let written = fenced_set(&cli, &format!("row-{name}"), "late", &token).await;
    me.say(if written { "written" } else { "refused" });
    me.say(&format!("{:?}", guard.release().await));
    me.line().await;
}

const LEASE: std::time::Duration = ms(1500);

async fn careless(name: &str) -> Worker {
    let server = common::server();
    let (url, port) = (server.url(), server.port().to_string());
    let envs = [("URL", url.as_str()), ("PORT", &port), ("NAME", name)];
    let mut worker = Worker::spawn("exclusion::careless_worker", &envs);
    worker.expect("holds").await;
    worker
}

/// B61, S2: a process stopped past its lease knows it at its first look, and its late write is refused
/// by its token; its release does not touch the next hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_slept_past_its_lease_cannot_write() {
    let (server, name) = (common::server(), common::unique_name());
    let (cli, row) = (server.cli().await, format!("row-{name}"));
    let client = client_of(&server.url(), secs(30)).await;
    let mut careless = careless(&name).await;
    careless.stop();
    let guard = client.lock(name.as_str()).acquire_timeout(secs(10)).await;
    let guard = guard.unwrap();
    let token = guard.fencing_token().unwrap().to_string();
    assert!(fenced_set(&cli, &row, "in time", &token).await);
    careless.say("go on").await;
    careless.cont();
    careless.expect("lost").await;
    careless.expect("refused").await;
    let lost = ReleaseOutcome::Lost(LossReason::DeadlinePassed);
    careless.expect(&format!("{lost:?}")).await;
    assert_eq!(cli.hash(&row).await["text"], "in time");
    guard.confirm().await.unwrap();
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    careless.close_stdin();
    assert!(careless.wait().await.success());
    cli.cmd(&["DEL", &row]).await.ok();
    common::nothing_left(server, &name).await;
}

/// B39, L1: a killed holder says nothing to anybody; who waits gets in when its lease ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_holder_is_followed_within_its_lease() {
    let (server, name) = (common::server(), common::unique_name());
    let cli = server.cli().await;
    let client = client_of(&server.url(), secs(30)).await;
    let careless = careless(&name).await;
    let mut lock = client.lock(name.as_str());
    let waiting = tokio::spawn(async move { lock.acquire().await.unwrap() });
    cli.until_waiters(&name, 1).await;
    careless.kill();
    let (killed, ruler) = (Instant::now(), Ruler::start());
    let next = waiting.await.unwrap();
    let took = killed.elapsed();
    // One lease and one command timeout (a sixth of it).
    let limit = LEASE + LEASE / 6 + ms(100) + ruler.allowance();
    assert!(took < limit, "{took:?}");
    drop(next);
    common::nothing_left(server, &name).await;
}
