//! The fair lock: first come, first served, over clients, processes and languages.

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use leasehold::{Error, LockClient, LockGuard, LockKind, LossReason, PubSub, ReleaseOutcome};
use tokio::task::JoinHandle;

use crate::common::*;
use crate::support::*;

const LEASE: Duration = secs(30);

/// How long a waiter of ours counts as alive after it was last heard of.
const BEAT_LASTS: Duration = secs(6);

/// How often it is heard of.
const BEAT_EVERY: Duration = secs(2);

/// The owner id of a thread of Java's.
const JAVA: &str = "b983c153-7421-469a-addb-44fb92259a1b:57";

/// The keys of a fair lock's queue, as Redisson spells the first two: list, deadlines, our beats.
fn keys_of(name: &str) -> [String; 3] {
    [
        format!("redisson_lock_queue:{{{name}}}"),
        format!("redisson_lock_timeout:{{{name}}}"),
        format!("leasehold_lock_beat:{{{name}}}"),
    ]
}

async fn queue_of(cli: &Cli, name: &str) -> Vec<String> {
    let [queue, ..] = keys_of(name);
    cli.cmd(&["LRANGE", &queue, "0", "-1"]).await.texts()
}

/// Waits until so many stand in the queue.
async fn until_queued(cli: &Cli, name: &str, count: usize) {
    eventually(secs(5), "stand in the queue", async || {
        queue_of(cli, name).await.len() == count
    })
    .await;
}

/// Waits until all in the queue hear of it.
async fn until_listening(cli: &Cli, name: &str, count: usize) {
    eventually(secs(5), "listen", async || {
        let queue = queue_of(cli, name).await;
        let mut listening = 0;
        for owner in &queue {
            let channel = format!("{}:{owner}", channel(name));
            listening += cli.subscribers(&channel).await;
        }
        queue.len() == count && listening == i64::try_from(count).unwrap()
    })
    .await;
}

/// Java's clock: the server's, in ms.
async fn now_ms(cli: &Cli) -> u64 {
    let time = cli.cmd(&["TIME"]).await.texts();
    time[0].parse::<u64>().unwrap() * 1000 + time[1].parse::<u64>().unwrap() / 1000
}

/// Somebody of Java's comes into the queue, as its last, and counts as dead after `lasts`.
async fn java_queues(cli: &Cli, name: &str, lasts: Duration) {
    let [queue, deadlines, _] = keys_of(name);
    let at = now_ms(cli).await + u64::try_from(lasts.as_millis()).unwrap();
    cli.cmd(&["ZADD", &deadlines, &at.to_string(), JAVA])
        .await
        .ok();
    cli.cmd(&["RPUSH", &queue, JAVA]).await.ok();
}

/// The order in which turns came.
type Turns = Arc<Mutex<Vec<usize>>>;

/// Waits in a task, writes its number down when its turn comes, and lets go.
fn takes_a_turn(client: &LockClient, name: &str, number: usize, turns: &Turns) -> JoinHandle<()> {
    let (mut lock, turns) = (client.fair_lock(name), Arc::clone(turns));
    tokio::spawn(async move {
        let guard = lock.acquire().await.unwrap();
        turns.lock().unwrap().push(number);
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
    })
}

/// W09: the order is that of arrival at the server, whichever client one belongs to.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turns_come_in_order_of_arrival_over_clients() {
    let server = server();
    let cli = server.cli().await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(client_of(&server.url(), LEASE).await);
    }
    for _ in 0..scaled(3, 50) {
        let (name, turns) = (unique_name(), Turns::default());
        let held = clients[0].fair_lock(name.as_str()).acquire().await.unwrap();
        let mut waiting = Vec::new();
        for number in 0..12 {
            let client = &clients[number * 7 % 3];
            waiting.push(takes_a_turn(client, &name, number, &turns));
            until_queued(&cli, &name, number + 1).await;
        }
        assert_eq!(held.release().await, ReleaseOutcome::Released);
        for waiter in waiting {
            waiter.await.unwrap();
        }
        assert_eq!(*turns.lock().unwrap(), (0..12).collect::<Vec<_>>());
        nothing_left(server, &name).await;
    }
}

/// A process of the test below: several of its tasks wait, and never get it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queueing_worker() {
    let Some(mut me) = WorkerSide::if_spawned() else {
        return;
    };
    let env = |key| std::env::var(key).unwrap();
    let client = client_of(&env("URL"), LEASE).await;
    for _ in 0..20 {
        let mut lock = client.fair_lock(env("NAME"));
        tokio::spawn(async move {
            let _guard = lock.acquire().await.unwrap();
            std::future::pending::<()>().await;
        });
    }
    me.say("waiting");
    me.line().await;
}

/// B49, W18: those of a process that was killed are skipped as soon as their beats are over, all at once,
/// and not after minutes each.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_of_a_killed_process_are_skipped_within_seconds() {
    let server = server();
    let (cli, name) = (server.cli().await, unique_name());
    let client = client_of(&server.url(), LEASE).await;
    let held = client.fair_lock(name.as_str()).acquire().await.unwrap();
    let envs = [("URL", server.url()), ("NAME", name.clone())];
    let envs = envs.each_ref().map(|(key, value)| (*key, value.as_str()));
    let mut worker = Worker::spawn("fair::queueing_worker", &envs);
    worker.expect("waiting").await;
    until_listening(&cli, &name, 20).await;
    let turns = Turns::default();
    let behind = takes_a_turn(&client, &name, 7, &turns);
    until_queued(&cli, &name, 21).await;
    worker.kill();
    worker.wait().await;
    let (killed, ruler) = (Instant::now(), Ruler::start());
    assert_eq!(held.release().await, ReleaseOutcome::Released);
    behind.await.unwrap();
    let took = killed.elapsed();
    let limit = BEAT_LASTS + BEAT_EVERY / 2 + ruler.allowance();
    assert!(took < limit, "{took:?} after the kill");
    nothing_left(server, &name).await;
}

/// One who leaves in the middle is passed over at once, by message: the others keep their order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_gives_up_leaves_the_queue_and_the_others_keep_their_order() {
    let server = server();
    let (cli, name) = (server.cli().await, unique_name());
    let client = client_of(&server.url(), LEASE).await;
    let held = client.fair_lock(name.as_str()).acquire().await.unwrap();
    let turns = Turns::default();
    let mut waiting = Vec::new();
    for number in 0..6 {
        waiting.push(takes_a_turn(&client, &name, number, &turns));
        until_queued(&cli, &name, number + 1).await;
    }
    for leaving in [4, 2] {
        let leaver = waiting.remove(leaving);
        leaver.abort();
        assert!(leaver.await.unwrap_err().is_cancelled());
    }
    until_queued(&cli, &name, 4).await;
    let mut late = client.fair_lock(name.as_str());
    let late = late.acquire_timeout(ms(100)).await;
    assert!(matches!(late, Err(Error::TimedOut { .. })), "{late:?}");
    until_queued(&cli, &name, 4).await;
    drop(held);
    for waiter in waiting {
        waiter.await.unwrap();
    }
    assert_eq!(*turns.lock().unwrap(), [0, 1, 3, 5]);
    nothing_left(server, &name).await;
}

/// W20: the head is told that the lock is free and leaves; the next one does not wait for anything then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_that_leaves_a_free_lock_passes_the_message_on() {
    let server = server();
    let (cli, name) = (server.cli().await, unique_name());
    let client = client_of(&server.url(), LEASE).await;
    // Held by somebody who tells nobody: the key is taken away.
    cli.cmd(&["HSET", &name, "stranger:1", "1"]).await.ok();
    let turns = Turns::default();
    let first = takes_a_turn(&client, &name, 0, &turns);
    until_listening(&cli, &name, 1).await;
    let second = takes_a_turn(&client, &name, 1, &turns);
    until_listening(&cli, &name, 2).await;
    cli.cmd(&["DEL", &name]).await.ok();
    let (freed, ruler) = (Instant::now(), Ruler::start());
    first.abort();
    second.await.unwrap();
    let took = freed.elapsed();
    assert!(took < ms(500) + ruler.allowance(), "{took:?}");
    nothing_left(server, &name).await;
}

/// A thousand tasks of one client: all are served, in order, and nobody asks more often than he must.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_waiters_are_served_in_order_without_spinning() {
    let server = Server::start();
    let (cli, name) = (server.cli().await, unique_name());
    let client = client_of(&server.url(), LEASE).await;
    let held = client.fair_lock(name.as_str()).acquire().await.unwrap();
    let count = scaled(300, 1000);
    let turns = Turns::default();
    let mut waiting = Vec::new();
    let (start, before) = (Instant::now(), cli.script_calls().await);
    for number in 0..count {
        waiting.push(takes_a_turn(&client, &name, number, &turns));
        // Tasks may reach the server out of order; what it says counts.
        if number % 10 == 9 {
            tokio::task::yield_now().await;
        }
    }
    eventually(secs(20), "all in the queue", async || {
        queue_of(&cli, &name).await.len() == count
    })
    .await;
    let order = queue_of(&cli, &name).await;
    assert_eq!(held.release().await, ReleaseOutcome::Released);
    for waiter in waiting {
        waiter.await.unwrap();
    }
    assert_eq!(turns.lock().unwrap().len(), count);
    assert_eq!(order.len(), count);
    // Each: an arrival, a beat when it listens, a turn, a release; and beats as time goes by, 32 to a call.
    let calls = usize::try_from(cli.script_calls().await - before).unwrap();
    let beats = (start.elapsed().as_secs() / 2 + 1) * (count as u64 / 8 + 1);
    let most = 5 * count + usize::try_from(beats).unwrap();
    assert!(
        calls < most,
        "{calls} calls for {count} waiters, not {most}"
    );
    nothing_left(&server, &name).await;
}

/// W17: behind a head that is dead and cannot be known to be, nobody asks without a pause.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_spins_behind_a_dead_head() {
    let server = Server::start();
    let (cli, name) = (server.cli().await, unique_name());
    let client = client_of(&server.url(), LEASE).await;
    java_queues(&cli, &name, secs(3)).await;
    let turns = Turns::default();
    let start = Instant::now();
    let waiting: Vec<_> = (0..5)
        .map(|number| takes_a_turn(&client, &name, number, &turns))
        .collect();
    until_queued(&cli, &name, 6).await;
    let tried = client.fair_lock(name.as_str()).try_acquire().await.unwrap();
    assert!(tried.is_none(), "never overtakes");
    let before = cli.script_calls().await;
    tokio::time::sleep(ms(500)).await;
    let calls = cli.script_calls().await - before;
    if start.elapsed() < secs(2) {
        assert!(calls <= 15, "{calls} calls of five who wait");
    }
    let ruler = Ruler::start();
    for waiter in waiting {
        waiter.await.unwrap();
    }
    let took = start.elapsed();
    assert!(took >= ms(2990), "overtook one who was alive");
    assert!(
        took < secs(3) + BEAT_EVERY + ms(500) + ruler.allowance(),
        "{took:?}"
    );
    nothing_left(&server, &name).await;
}

/// W17: one of whom nobody knows until when he waits is given until the wait timeout, not for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_without_a_deadline_gets_one() {
    let server = server();
    let (cli, name) = (server.cli().await, unique_name());
    let client = client_of(&server.url(), LEASE).await;
    let [queue, deadlines, _] = keys_of(&name);
    cli.cmd(&["RPUSH", &queue, JAVA]).await.ok();
    let waits = client
        .fair_lock(name.as_str())
        .acquire_timeout(ms(300))
        .await;
    assert!(matches!(waits, Err(Error::TimedOut { .. })), "{waits:?}");
    let deadline = cli.cmd(&["ZSCORE", &deadlines, JAVA]).await.text();
    let left = deadline.parse::<u64>().unwrap() - now_ms(&cli).await;
    assert!((290_000..=300_000).contains(&left), "{left} ms");
    cli.cmd(&["DEL", &queue, &deadlines]).await.ok();
    nothing_left(server, &name).await;
}

/// Redisson's waiter is told on its own channel, keeps its turn, and has time to come for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_of_javas_has_its_turn_and_ours_keep_theirs() {
    let server = server();
    let (cli, name) = (server.cli().await, unique_name());
    let [queue, deadlines, beats] = keys_of(&name);
    let client = client_of(&server.url(), LEASE).await;
    let held = client.fair_lock(name.as_str()).acquire().await.unwrap();
    java_queues(&cli, &name, secs(300)).await;
    let turns = Turns::default();
    let ours = takes_a_turn(&client, &name, 0, &turns);
    until_listening_behind_java(&cli, &name).await;
    let java_channel = format!("{}:{JAVA}", channel(&name));
    let mut monitor = server.monitor().await;
    assert_eq!(held.release().await, ReleaseOutcome::Released);
    let told = format!("\"PUBLISH\" \"{java_channel}\" \"0\"");
    eventually(secs(2), "Java is told", async || {
        monitor.count(|line| line.contains(&told)).await == 1
    })
    .await;
    assert!(!ours.is_finished() && turns.lock().unwrap().is_empty());
    // Java takes it, as its script does: itself out, and 300 s off all others.
    for part in [
        &["MULTI"][..],
        &["LPOP", &queue],
        &["ZREM", &deadlines, JAVA],
        &["HSET", &name, JAVA, "1"],
        &["PEXPIRE", &name, "30000"],
    ] {
        cli.cmd(part).await.ok();
    }
    let owner = "return redis.call('LINDEX', KEYS[1], 0)";
    cli.cmd(&["EXEC"]).await.list();
    let owner = cli.cmd(&["EVAL", owner, "1", &queue]).await.text();
    cli.cmd(&["ZINCRBY", &deadlines, "-300000", &owner])
        .await
        .text();
    let deadline = async || {
        let text = cli.cmd(&["ZSCORE", &deadlines, &owner]).await.text();
        text.parse::<i64>().unwrap() - i64::try_from(now_ms(&cli).await).unwrap()
    };
    assert!(deadline().await > 200_000, "one wait for Java's on top");
    cli.cmd(&["ZINCRBY", &deadlines, "-600000", &owner])
        .await
        .text();
    assert!(deadline().await < 0);
    // The next beat lifts it.
    eventually(BEAT_EVERY + ms(500), "lifted", async || {
        deadline().await > 200_000
    })
    .await;
    assert!(cli.exists(&beats).await);
    // Java releases: removes the hash, tells the head.
    cli.cmd(&["DEL", &name]).await.ok();
    let ours_channel = format!("{}:{owner}", channel(&name));
    assert_eq!(cli.cmd(&["PUBLISH", &ours_channel, "0"]).await.int(), 1);
    let (told, ruler) = (Instant::now(), Ruler::start());
    ours.await.unwrap();
    assert!(told.elapsed() < ms(500) + ruler.allowance());
    nothing_left(server, &name).await;
}

async fn until_listening_behind_java(cli: &Cli, name: &str) {
    eventually(secs(5), "ours listens", async || {
        let queue = queue_of(cli, name).await;
        let Some(owner) = queue.get(1) else {
            return false;
        };
        cli.subscribers(&format!("{}:{owner}", channel(name))).await == 1
    })
    .await;
}

/// The plain lock and Java's have the same hash: they exclude each other, though they do not queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_plain_lock_of_the_same_name_excludes() {
    let server = server();
    let (cli, name) = (server.cli().await, unique_name());
    let client = client_of(&server.url(), LEASE).await;
    let plain = client.lock(name.as_str()).acquire().await.unwrap();
    assert!(
        client
            .fair_lock(name.as_str())
            .try_acquire()
            .await
            .unwrap()
            .is_none()
    );
    let turns = Turns::default();
    let fair = takes_a_turn(&client, &name, 0, &turns);
    until_listening(&cli, &name, 1).await;
    let (freed, ruler) = (Instant::now(), Ruler::start());
    drop(plain);
    fair.await.unwrap();
    let took = freed.elapsed();
    assert!(took < BEAT_EVERY + ms(500) + ruler.allowance(), "{took:?}");
    let fair = client.fair_lock(name.as_str()).acquire().await.unwrap();
    assert!(
        client
            .lock(name.as_str())
            .try_acquire()
            .await
            .unwrap()
            .is_none()
    );
    drop(fair);
    nothing_left(server, &name).await;
}

/// B34 and B35 for this lock: a lost message costs the time to the next beat.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_message_costs_no_more_than_a_beat() {
    let server = server();
    let cli = server.cli().await;
    let proxy = Proxy::start(server.port());
    let holder = client_of(&server.url(), LEASE).await;
    let client = client_of(&proxy.url(), LEASE).await;
    let name = unique_name();
    let held = holder.fair_lock(name.as_str()).acquire().await.unwrap();
    let turns = Turns::default();
    let waiting = takes_a_turn(&client, &name, 0, &turns);
    until_listening(&cli, &name, 1).await;
    let lost = proxy.inject(Fault::message(bytes(&name), Act::Swallow(Then::Discard)));
    drop(held);
    lost.hit().await;
    let (told, ruler) = (Instant::now(), Ruler::start());
    waiting.await.unwrap();
    let took = told.elapsed();
    assert!(took < BEAT_EVERY + ms(500) + ruler.allowance(), "{took:?}");
    nothing_left(server, &name).await;
}

/// Without messages at all, too: they look every quarter of a second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_messages_waiters_poll_in_order() {
    let server = server();
    let (cli, name) = (server.cli().await, unique_name());
    let client = connected(|| {
        let builder = LockClient::builder().url(server.url()).lease(LEASE);
        builder.pubsub(PubSub::Off)
    })
    .await;
    let held = client.fair_lock(name.as_str()).acquire().await.unwrap();
    let turns = Turns::default();
    let mut waiting = Vec::new();
    for number in 0..4 {
        waiting.push(takes_a_turn(&client, &name, number, &turns));
        until_queued(&cli, &name, number + 1).await;
    }
    drop(held);
    for waiter in waiting {
        waiter.await.unwrap();
    }
    assert_eq!(*turns.lock().unwrap(), [0, 1, 2, 3]);
    nothing_left(server, &name).await;
}

/// A place that the server forgot is taken again, at the tail, and that is told.
#[tokio::test]
async fn a_forgotten_place_is_taken_again_and_told() {
    let log = Log::start();
    let server = server();
    let (cli, name) = (server.cli().await, unique_name());
    let client = client_of(&server.url(), LEASE).await;
    let held = client.fair_lock(name.as_str()).acquire().await.unwrap();
    let turns = Turns::default();
    let waiting = takes_a_turn(&client, &name, 0, &turns);
    until_listening(&cli, &name, 1).await;
    for key in keys_of(&name) {
        cli.cmd(&["DEL", &key]).await.ok();
    }
    eventually(BEAT_EVERY + ms(500), "queued again", async || {
        queue_of(&cli, &name).await.len() == 1
    })
    .await;
    assert_eq!(
        log.count(&["place in the queue of a fair lock lost", &name]),
        1
    );
    // Any one of the keys by itself may be lost as well.
    for key in keys_of(&name) {
        cli.cmd(&["DEL", &key]).await.ok();
        tokio::time::sleep(BEAT_EVERY + ms(300)).await;
        assert_eq!(queue_of(&cli, &name).await.len(), 1, "without {key}");
    }
    drop(held);
    waiting.await.unwrap();
    nothing_left(server, &name).await;
}

/// B47: whoever waits for longer than any timeout of the queue keeps its place as long as it lives; by the
/// clock of the store, which is moved here.
#[tokio::test(start_paused = true)]
async fn long_waits_lose_no_place() {
    let client = LockClient::in_memory();
    let held = client.fair_lock("job").acquire().await.unwrap();
    let turns = Turns::default();
    let mut waiting = Vec::new();
    for number in 0..5 {
        waiting.push(takes_a_turn(&client, "job", number, &turns));
        tokio::time::sleep(ms(1)).await;
    }
    tokio::time::sleep(secs(20 * 60)).await;
    let seen = client.fair_lock("job").inspect().await.unwrap();
    assert_eq!((seen.kind, seen.waiting), (LockKind::Fair, Some(5)));
    drop(held);
    for waiter in waiting {
        waiter.await.unwrap();
    }
    assert_eq!(*turns.lock().unwrap(), [0, 1, 2, 3, 4]);
    assert_eq!(
        client.fair_lock("job").inspect().await.unwrap().waiting,
        Some(0)
    );
}

/// A waiter that is not polled when its turn comes holds up nobody for long, and comes back as the last.
#[tokio::test(start_paused = true)]
async fn a_waiter_that_is_not_polled_has_had_its_turn() {
    let client = LockClient::in_memory();
    let held = client.fair_lock("job").acquire().await.unwrap();
    let mut sleeper = client.fair_lock("job");
    let mut sleeper = pin!(sleeper.acquire());
    assert!(futures_util::poll!(sleeper.as_mut()).is_pending());
    tokio::time::sleep(ms(10)).await;
    let turns = Turns::default();
    let mut waiting = Vec::new();
    for number in 0..2 {
        waiting.push(takes_a_turn(&client, "job", number, &turns));
        tokio::time::sleep(ms(10)).await;
    }
    let freed = tokio::time::Instant::now();
    drop(held);
    for waiter in waiting {
        waiter.await.unwrap();
    }
    assert!(freed.elapsed() < ms(200), "{:?}", freed.elapsed());
    assert_eq!(*turns.lock().unwrap(), [0, 1]);
    assert_eq!(
        client.fair_lock("job").inspect().await.unwrap().holder,
        None
    );
    drop(sleeper.await.unwrap());
}

/// One flow of work enters again, others wait; it is free when the last level is left.
#[tokio::test]
async fn a_fair_lock_is_entered_again_by_its_own_flow() {
    for client in [
        LockClient::in_memory(),
        client_of(&server().url(), LEASE).await,
    ] {
        let name = unique_name();
        let mut ctx = client.context();
        let outer = ctx.fair_lock(name.as_str()).acquire().await.unwrap();
        let inner = ctx.fair_lock(name.as_str()).acquire().await.unwrap();
        let shared = ctx.share().fair_lock(name.as_str()).try_acquire().await;
        let innermost = shared.unwrap().unwrap();
        assert_eq!(innermost.depth(), 3);
        assert_eq!(
            inner.fencing_token().unwrap(),
            outer.fencing_token().unwrap()
        );
        outer.confirm().await.unwrap();
        assert_eq!(
            outer.release().await,
            ReleaseOutcome::StillHeld { depth: 2 }
        );
        assert!(
            client
                .fair_lock(name.as_str())
                .try_acquire()
                .await
                .unwrap()
                .is_none()
        );
        drop(inner);
        assert_eq!(innermost.release().await, ReleaseOutcome::Released);
        let next = client.fair_lock(name.as_str()).try_acquire().await.unwrap();
        assert_eq!(next.unwrap().release().await, ReleaseOutcome::Released);
        nothing_left(server(), &name).await;
    }
}

/// The ways to take it, dropped after each number of polls.
async fn takes(lock: &mut leasehold::Lock, way: usize) -> Result<(), Error> {
    match way {
        0 => lock.acquire().await.map(drop),
        1 => lock.acquire_timeout(secs(10)).await.map(drop),
        _ => lock.try_acquire().await.map(drop),
    }
}

/// L1: nothing held, nobody in the queue, whenever the future is dropped.
#[test]
fn a_taking_dropped_at_any_poll_leaves_nothing() {
    turn_by_turn(async {
        let server = server();
        let lease = secs(6);
        let client = client_of(&server.url(), lease).await;
        let other = client_of(&server.url(), lease).await;
        let prefix = unique_name();
        for (way, contended) in [(0, false), (0, true), (1, true), (2, false)] {
            let mut polls = 0;
            loop {
                let name = format!("{prefix}-{way}-{contended}-{polls}");
                let held = if contended {
                    Some(other.fair_lock(name.as_str()).acquire().await.unwrap())
                } else {
                    None
                };
                let done = {
                    let mut lock = client.fair_lock(name.as_str());
                    let mut taking = pin!(takes(&mut lock, way));
                    let half = if contended { polls / 2 } else { 0 };
                    let early = polled(half, taking.as_mut()).await;
                    drop(held);
                    match early {
                        None => polled(polls - half, taking.as_mut()).await,
                        early => early,
                    }
                };
                let next = client
                    .fair_lock(name.as_str())
                    .acquire_timeout(secs(2))
                    .await;
                assert_eq!(next.unwrap().release().await, ReleaseOutcome::Released);
                if let Some(done) = done {
                    done.unwrap();
                    break;
                }
                polls = crate::support::next(polls);
                assert!(polls < 20_000);
            }
        }
        nothing_goes_on(server, &prefix, lease).await;
    });
}

/// The same in memory, with somebody behind, who gets it in any case.
#[test]
fn a_taking_in_memory_dropped_at_any_poll_holds_up_nobody() {
    turn_by_turn(async {
        let client = LockClient::in_memory();
        let mut polls = 0;
        loop {
            let name = format!("job-{polls}");
            let held = client.fair_lock(name.as_str()).acquire().await.unwrap();
            let turns = Turns::default();
            let (done, behind) = {
                let mut lock = client.fair_lock(name.as_str());
                let mut taking = pin!(lock.acquire());
                let early = polled(polls / 2 + 1, taking.as_mut()).await;
                assert!(early.is_none());
                let behind = takes_a_turn(&client, &name, 1, &turns);
                tokio::task::yield_now().await;
                drop(held);
                let done = polled(polls / 2, taking.as_mut()).await;
                (done.map(|guard| drop(guard.unwrap())), behind)
            };
            let start = Instant::now();
            let served = tokio::time::timeout(secs(5), behind).await;
            served
                .unwrap_or_else(|_| panic!("stuck with {polls} polls"))
                .unwrap();
            assert!(start.elapsed() < BEAT_EVERY / 2, "by message, not by beat");
            let seen = client.fair_lock(name.as_str()).inspect().await.unwrap();
            assert_eq!((seen.holder, seen.waiting), (None, Some(0)));
            if done.is_some() {
                break;
            }
            polls += 1;
            assert!(polls < 10_000);
        }
    });
}

/// A request without an answer, while the waiter waits or after it has left, leaves nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_arrival_without_an_answer_leaves_nothing_and_loses_nothing() {
    let server = server();
    let (cli, proxy) = (server.cli().await, Proxy::start(server.port()));
    let client = client_of(&proxy.url(), LEASE).await;
    let other = client_of(&server.url(), LEASE).await;
    all_fair_scripts_known(&client).await;
    for leaves in [false, true] {
        let name = unique_name();
        let held = other.fair_lock(name.as_str()).acquire().await.unwrap();
        let lost = proxy.inject(Fault::reply(bytes(&name), Act::Swallow(Then::Discard)));
        let turns = Turns::default();
        let waiting = takes_a_turn(&client, &name, 0, &turns);
        lost.hit().await;
        until_queued(&cli, &name, 1).await;
        let owner = queue_of(&cli, &name).await.remove(0);
        if leaves {
            waiting.abort();
            eventually(secs(4), "leaves", async || {
                queue_of(&cli, &name).await.is_empty()
            })
            .await;
            drop(held);
        } else {
            // The next attempt finds the place of the first one.
            until_listening(&cli, &name, 1).await;
            assert_eq!(queue_of(&cli, &name).await, [owner]);
            drop(held);
            waiting.await.unwrap();
        }
        nothing_left(server, &name).await;
    }
}

async fn all_fair_scripts_known(client: &LockClient) {
    let name = unique_name();
    let held = client.fair_lock(name.as_str()).acquire().await.unwrap();
    let waits = client
        .fair_lock(name.as_str())
        .acquire_timeout(ms(200))
        .await;
    assert!(waits.is_err());
    assert!(held.release().await.into_result().is_ok());
}

/// Copies of what was sent, run again when their deadline is over, change nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_copies_bring_nobody_back() {
    let server = server();
    let (cli, proxy) = (server.cli().await, Proxy::start(server.port()));
    let client = client_of(&proxy.url(), LEASE).await;
    let name = unique_name();
    let held = client.fair_lock(name.as_str()).acquire().await.unwrap();
    let turns = Turns::default();
    let waiting = takes_a_turn(&client, &name, 0, &turns);
    until_listening(&cli, &name, 1).await;
    drop(held);
    waiting.await.unwrap();
    nothing_left(server, &name).await;
    let mut requests = proxy.requests(&bytes(&name));
    requests.retain(|wire| wire.windows(4).any(|part| part == b"EVAL"));
    assert!(
        requests.len() >= 5,
        "arrivals, a beat, releases: {}",
        requests.len()
    );
    // An attempt may take one second.
    tokio::time::sleep(secs(1) + ms(100)).await;
    let taken = client.fair_lock(name.as_str()).acquire().await.unwrap();
    for request in &requests {
        assert!(!proxy.replay(request).await.is_error());
        assert!(queue_of(&cli, &name).await.is_empty());
        taken.confirm().await.unwrap();
    }
    assert_eq!(taken.release().await, ReleaseOutcome::Released);
    for request in &requests {
        assert!(!proxy.replay(request).await.is_error());
    }
    nothing_left(server, &name).await;
}

/// Whatever is in the place of one of its keys: a typed error to who comes and to who waits, and the key
/// stays as it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_in_other_use_are_a_conflict() {
    let server = server();
    let cli = server.cli().await;
    let client = client_of(&server.url(), LEASE).await;
    let name = unique_name();
    for key in keys_of(&name).iter().chain([&name]) {
        cli.cmd(&["SET", key, "mine"]).await.ok();
        let come = client.fair_lock(name.as_str()).acquire().await;
        assert!(
            matches!(come, Err(Error::Conflict { .. })),
            "{key}: {come:?}"
        );
        let come = client.fair_lock(name.as_str()).try_acquire().await;
        assert!(
            matches!(come, Err(Error::Conflict { .. })),
            "{key}: {come:?}"
        );
        assert_eq!(cli.cmd(&["GET", key]).await.text(), "mine");
        cli.cmd(&["DEL", key]).await.ok();
        let held = client.fair_lock(name.as_str()).acquire().await.unwrap();
        let mut lock = client.fair_lock(name.as_str());
        let waiting = tokio::spawn(async move { lock.acquire().await.map(drop) });
        until_queued(&cli, &name, 1).await;
        cli.cmd(&["SET", key, "mine"]).await.ok();
        let waited = waiting.await.unwrap();
        assert!(
            matches!(waited, Err(Error::Conflict { .. })),
            "{key}: {waited:?}"
        );
        // The hold itself has nothing to do with the queue.
        let released = held.release().await;
        let lost = ReleaseOutcome::Lost(LossReason::TakenByOther);
        assert_eq!(released == lost, *key == name, "{key}: {released:?}");
        assert_eq!(cli.cmd(&["GET", key]).await.text(), "mine");
        for key in keys_of(&name).iter().chain([&name]) {
            cli.cmd(&["DEL", key]).await.ok();
        }
    }
    cli.cmd(&["HSET", &name, "mode", "read"]).await.ok();
    let come = client.fair_lock(name.as_str()).acquire().await;
    assert!(matches!(come, Err(Error::Conflict { .. })), "{come:?}");
    cli.cmd(&["DEL", &name]).await.ok();
    nothing_left(server, &name).await;
}

/// The operator's tools: who has it, how many wait; force tells the next one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forced_release_serves_the_next_in_the_queue() {
    let server = server();
    let (cli, name) = (server.cli().await, unique_name());
    let client = client_of(&server.url(), LEASE).await;
    let held: LockGuard = client.fair_lock(name.as_str()).acquire().await.unwrap();
    let turns = Turns::default();
    let waiting = takes_a_turn(&client, &name, 0, &turns);
    until_listening(&cli, &name, 1).await;
    let seen = client.fair_lock(name.as_str()).inspect().await.unwrap();
    assert_eq!((seen.kind, seen.waiting), (LockKind::Fair, Some(1)));
    assert_eq!(seen.holder.unwrap().count, 1);
    let (start, ruler) = (Instant::now(), Ruler::start());
    assert!(
        client
            .fair_lock(name.as_str())
            .force_release()
            .await
            .unwrap()
    );
    waiting.await.unwrap();
    assert!(start.elapsed() < ms(500) + ruler.allowance());
    assert_eq!(held.loss_reason(), Some(LossReason::Forced));
    drop(held);
    nothing_left(server, &name).await;
}

/// Who waits on a client that closes is told, and leaves the queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_takes_all_waiters_out_of_the_queue() {
    let server = server();
    let (cli, name) = (server.cli().await, unique_name());
    let other = client_of(&server.url(), LEASE).await;
    let client = client_of(&server.url(), LEASE).await;
    let held = other.fair_lock(name.as_str()).acquire().await.unwrap();
    let waiting: Vec<_> = (0..20)
        .map(|_| {
            let mut lock = client.fair_lock(name.as_str());
            tokio::spawn(async move { lock.acquire().await.map(drop) })
        })
        .collect();
    until_listening(&cli, &name, 20).await;
    client.close(secs(5)).await;
    for waiter in waiting {
        let told = waiter.await.unwrap();
        assert!(matches!(told, Err(Error::Closed)), "{told:?}");
    }
    assert!(queue_of(&cli, &name).await.is_empty());
    drop(held);
    nothing_left(server, &name).await;
}

/// A holder whose process ended without a word: the first one comes when the lease is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_ends_serves_the_first() {
    let server = server();
    let (cli, name) = (server.cli().await, unique_name());
    let client = client_of(&server.url(), LEASE).await;
    cli.cmd(&["HSET", &name, JAVA, "1"]).await.ok();
    cli.cmd(&["PEXPIRE", &name, "1500"]).await.ok();
    let (start, ruler) = (Instant::now(), Ruler::start());
    let guard = client.fair_lock(name.as_str()).acquire().await.unwrap();
    let took = start.elapsed();
    assert!(took < ms(1900) + ruler.allowance(), "{took:?}");
    drop(guard);
    nothing_left(server, &name).await;
}
