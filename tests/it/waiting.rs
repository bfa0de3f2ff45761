//! Waiting: in order of arrival, woken by messages, and never dependent on one.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use leasehold::{Error, LockClient, LockGuard, PubSub, ReleaseOutcome};
use tokio::task::JoinHandle;

use crate::common::*;
use crate::support::client_of;

type Waiting = JoinHandle<(LockGuard, Instant)>;

/// Starts to wait for the lock; tells when it was granted.
fn wait_for(client: &LockClient, name: &str) -> Waiting {
    let mut lock = client.lock(name);
    tokio::spawn(async move {
        let guard = lock.acquire().await.unwrap();
        (guard, Instant::now())
    })
}

/// B34: the release falls between the failed attempt and the moment the subscription is confirmed.
/// Nobody hears it, so the waiter tries once more when it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_before_the_subscription_is_confirmed_is_not_missed() {
    let proxy = Proxy::start(server().port());
    let holder = client_of(&server().url(), secs(30)).await;
    let waiter = client_of(&proxy.url(), secs(30)).await;
    let cli = server().cli().await;
    // The reply is late, or the request is: then the message is not even sent to us.
    for (fault, confirmed_late) in [
        (Fault::reply(command("SUBSCRIBE"), Act::Hold), true),
        (Fault::request(command("SUBSCRIBE"), Act::Hold), false),
    ] {
        let mut rounds = 0;
        loop {
            let name = unique_name();
            let guard = holder.lock(name.as_str()).acquire().await.unwrap();
            let held = proxy.inject(fault.clone());
            let waiting = wait_for(&waiter, &name);
            let asked = Instant::now();
            held.hit().await;
            assert_eq!(
                cli.subscribers(&channel(&name)).await,
                i64::from(confirmed_late)
            );
            assert_eq!(guard.release().await, ReleaseOutcome::Released);
            let finished = waiting.is_finished();
            held.release();
            let (released, ruler) = (Instant::now(), Ruler::start());
            // After a command timeout without a confirmation it polls.
            let quick = asked.elapsed() < ms(800);
            let (guard, granted) = waiting.await.unwrap();
            let took = granted.saturating_duration_since(released);
            drop(guard);
            proxy.heal();
            nothing_left(server(), &name).await;
            if quick {
                assert!(!finished, "nothing has told it yet");
                let limit = ms(200) + ruler.allowance();
                assert!(took < limit, "only {took:?} after the confirmation");
                break;
            }
            rounds += 1;
            assert!(rounds < 10, "never quick enough");
        }
    }
}

/// B34: the confirmation does not come at all. The waiter polls then; nobody sleeps to the end of a
/// lease of half a minute.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscription_that_is_never_confirmed_does_not_stop_the_waiter() {
    let proxy = Proxy::start(server().port());
    let holder = client_of(&server().url(), secs(30)).await;
    let waiter = client_of(&proxy.url(), secs(30)).await;
    let name = unique_name();
    let guard = holder.lock(name.as_str()).acquire().await.unwrap();
    let swallowed = proxy.inject(Fault::reply(
        command("SUBSCRIBE"),
        Act::Swallow(Then::Discard),
    ));
    let waiting = wait_for(&waiter, &name);
    swallowed.hit().await;
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    let (released, ruler) = (Instant::now(), Ruler::start());
    let (guard, granted) = waiting.await.unwrap();
    let took = granted - released;
    let limit = secs(2) + ms(500) + ruler.allowance();
    assert!(took < limit, "the cap is 2 s, not {took:?}");
    drop(guard);
    nothing_left(server(), &name).await;
}

/// B35: the subscription is cut and the release published in the same instant: nobody hears it.
/// On reconnect each waiter tries once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_while_the_subscription_is_cut_is_not_missed() {
    let server = Server::start();
    let (holder, waiter) = (
        client_of(&server.url(), secs(30)).await,
        client_of(&server.url(), secs(30)).await,
    );
    let cli = server.cli().await;
    for _ in 0..scaled(3, 100) {
        let name = unique_name();
        let guard = holder.lock(name.as_str()).acquire().await.unwrap();
        let token = guard.fencing_token().unwrap();
        let waiting = wait_for(&waiter, &name);
        cli.until_waiters(&name, 1).await;
        // In one transaction, so that nothing comes between: no receiver is left.
        cli.cmd(&["MULTI"]).await.ok();
        for part in [
            &["CLIENT", "KILL", "TYPE", "pubsub"][..],
            &["DEL", &name],
            &["PUBLISH", &channel(&name), "0"],
        ] {
            cli.cmd(part).await.ok();
        }
        let done = cli.cmd(&["EXEC"]).await.list();
        assert!(done[0].int() >= 1, "a subscriber was there: {done:?}");
        assert_eq!(done[2].int(), 0, "nobody heard it");
        let (released, ruler) = (Instant::now(), Ruler::start());
        let (next, granted) = waiting.await.unwrap();
        let took = granted.saturating_duration_since(released);
        let limit = secs(1) + ruler.allowance();
        assert!(took < limit, "resubscribed and tried after {took:?}");
        assert!(next.fencing_token().unwrap() > token);
        drop((guard, next));
        nothing_left(&server, &name).await;
    }
}

/// B35: after a restart of the server subscriptions are there again: the next release is heard, not
/// found by chance.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscriptions_come_back_after_a_restart() {
    let server = Server::start();
    let waiter = client_of(&server.url(), secs(30)).await;
    let name = unique_name();
    // A holder of another kind of client, that the restart does not disturb.
    let hold = ["HSET", &name, "7a1c7b9e-0000-4000-8000-000000000000:1", "1"];
    server.cmd(&hold).await.ok();
    server.cmd(&["PEXPIRE", &name, "60000"]).await.ok();
    let waiting = wait_for(&waiter, &name);
    server.cli().await.until_waiters(&name, 1).await;
    server.restart_keeping().await;
    let (back, ruler) = (Instant::now(), Ruler::start());
    let cli = server.cli().await;
    cli.until_waiters(&name, 1).await;
    let took = back.elapsed();
    assert!(took < secs(1) + ruler.allowance(), "{took:?}");
    // Past the attempt that follows each new subscription.
    eventually(secs(2), "tried once after the restart", async || {
        cli.script_calls().await >= 2
    })
    .await;
    assert!(!waiting.is_finished());
    cli.cmd(&["DEL", &name]).await.ok();
    cli.cmd(&["PUBLISH", &channel(&name), "0"]).await.ok();
    let released = Instant::now();
    let (guard, granted) = waiting.await.unwrap();
    let took = granted.saturating_duration_since(released);
    assert!(
        took < ms(500) + ruler.allowance(),
        "the message was not heard: {took:?}"
    );
    drop(guard);
    nothing_left(&server, &name).await;
}

/// B36: ten thousand messages while the runtime is busy with something else. What overflows wakes
/// everybody; the reader goes on.
#[tokio::test]
async fn a_flood_of_messages_does_not_stop_the_waiters() {
    let server = Server::start();
    let (holder, waiter) = (
        client_of(&server.url(), secs(30)).await,
        client_of(&server.url(), secs(30)).await,
    );
    let names: Vec<_> = (0..4).map(|_| unique_name()).collect();
    let mut guards = Vec::new();
    for name in &names {
        guards.push(holder.lock(name.as_str()).acquire().await.unwrap());
    }
    let waiting: Vec<_> = names.iter().map(|name| wait_for(&waiter, name)).collect();
    let cli = server.cli().await;
    for name in &names {
        cli.until_waiters(name, 1).await;
    }
    // By the server itself, in one go, while this thread (the only one of the runtime) waits for it.
    let flood = "for i = 1, 10000 do redis.call('PUBLISH', KEYS[1 + i % #KEYS], '0') end \
                 return redis.call('PUBLISH', KEYS[1], '0')";
    let channels: Vec<_> = names.iter().map(|name| channel(name)).collect();
    let mut args = vec![
        "-p".to_owned(),
        server.port().to_string(),
        "EVAL".into(),
        flood.into(),
        "4".into(),
    ];
    args.extend(channels);
    let said = std::process::Command::new("redis-cli").args(&args).output();
    let said = said.expect("`redis-cli` is there with `redis-server`");
    assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), "1");
    for (guard, waiting) in guards.into_iter().zip(waiting) {
        assert!(!waiting.is_finished());
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
        let (released, ruler) = (Instant::now(), Ruler::start());
        let (next, granted) = waiting.await.unwrap();
        let took = granted.saturating_duration_since(released);
        assert!(took < secs(1) + ruler.allowance(), "woken after {took:?}");
        drop(next);
    }
    for name in &names {
        nothing_left(&server, name).await;
    }
}

/// B38: names come and go by the hundred, waiters give up and come back. One connection serves them
/// all, nobody loses its subscription by another's leaving, and none is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscriptions_are_counted_by_name_and_all_end() {
    let server = Server::start();
    let (one, two) = (
        client_of(&server.url(), secs(30)).await,
        client_of(&server.url(), secs(30)).await,
    );
    let cli = server.cli().await;
    let prefix = unique_name();
    let connections = async || {
        let text = cli.cmd(&["CLIENT", "LIST"]).await.text();
        text.lines().count()
    };
    let names: Vec<String> = (0..scaled(40, 500))
        .map(|i| format!("{prefix}-{i}"))
        .collect();
    let until = Instant::now() + scaled(secs(2), secs(60));
    let churn = names.iter().flat_map(|name| {
        (0..scaled(6, 20)).map(|i| {
            let client = if i % 2 == 0 { one.clone() } else { two.clone() };
            let name = name.clone();
            tokio::spawn(async move {
                let mut granted = 0;
                while Instant::now() < until {
                    let chance = u64::from(uuid::Uuid::new_v4().as_bytes()[0]);
                    let patience = ms(150 + chance);
                    match client.lock(name.as_str()).acquire_timeout(patience).await {
                        Ok(guard) => {
                            granted += 1;
                            // The subject: others wait meanwhile, and some of them give up.
                            tokio::time::sleep(ms(chance / 2)).await;
                            // So many at once may have to wait for their answers longer than a command timeout.
                            let outcome = guard.release().await;
                            assert!(
                                matches!(
                                    outcome,
                                    ReleaseOutcome::Released | ReleaseOutcome::Unconfirmed { .. }
                                ),
                                "{outcome:?}"
                            );
                        }
                        Err(error) if error.is_retryable() => {}
                        Err(error) => panic!("{error:?}"),
                    }
                }
                granted
            })
        })
    });
    let all: Vec<_> = churn.collect();
    let mut most = 0;
    while Instant::now() < until {
        most = most.max(connections().await);
        // The subject: the number of connections, looked at from time to time.
        tokio::time::sleep(ms(50)).await;
    }
    let mut granted = 0;
    for task in all {
        granted += task.await.unwrap();
    }
    assert!(granted > names.len(), "there was progress: {granted}");
    assert!(
        most <= 5,
        "two connections for each client, and ours: {most}"
    );
    nothing_left(&server, &prefix).await;
    // And after all that, a message still reaches who waits for it.
    let name = &names[0];
    let guard = one.lock(name.as_str()).acquire().await.unwrap();
    let waiting = wait_for(&two, name);
    cli.until_waiters(name, 1).await;
    drop(guard);
    let (released, ruler) = (Instant::now(), Ruler::start());
    let (guard, granted) = waiting.await.unwrap();
    let took = granted.saturating_duration_since(released);
    assert!(took < ms(500) + ruler.allowance(), "{took:?}");
    drop(guard);
    nothing_left(&server, &prefix).await;
}

/// Takes the lock and says so, for the test below.
#[tokio::test]
async fn holder_worker() {
    let Some(mut me) = WorkerSide::if_spawned() else {
        return;
    };
    let lease = std::env::var("LEASE_MS").unwrap().parse().unwrap();
    let client = client_of(&std::env::var("URL").unwrap(), ms(lease)).await;
    while let Some(name) = me.line().await {
        let guard = client.lock(name).acquire().await.unwrap();
        me.say("held");
        std::mem::forget(guard);
    }
}

/// B39: the holder's process is killed: nobody publishes anything. The waiter's sleep ends with the
/// lease it last saw.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_holder_is_followed_within_its_lease() {
    let lease = ms(1500);
    let ruler = Ruler::start();
    let url = server().url();
    let waiter = client_of(&url, secs(30)).await;
    let cli = server().cli().await;
    for _ in 0..scaled(1, 100) {
        let env = [("URL", url.as_str()), ("LEASE_MS", "1500")];
        let mut holder = Worker::spawn("waiting::holder_worker", &env);
        // One is renewed for a while before, the other is not.
        for renewed in [true, false] {
            let name = unique_name();
            if renewed {
                holder.say(&name).await;
                holder.expect("held").await;
                let waiting = wait_for(&waiter, &name);
                cli.until_waiters(&name, 1).await;
                // The subject: a lease and a half, so that the waiter has seen renewals.
                tokio::time::sleep(lease * 3 / 2).await;
                assert!(!waiting.is_finished());
                holder.kill();
                let killed = Instant::now();
                let (guard, granted) = waiting.await.unwrap();
                let took = granted.saturating_duration_since(killed);
                assert!(
                    took < lease + ms(100) + ruler.allowance(),
                    "{took:?} after the kill"
                );
                drop(guard);
            } else {
                holder = Worker::spawn("waiting::holder_worker", &env);
                holder.say(&name).await;
                holder.expect("held").await;
                holder.kill();
                let killed = Instant::now();
                let (guard, granted) = wait_for(&waiter, &name).await.unwrap();
                let took = granted.saturating_duration_since(killed);
                assert!(
                    took < lease + ms(100) + ruler.allowance(),
                    "{took:?} after the kill"
                );
                drop(guard);
            }
            nothing_left(server(), &name).await;
        }
    }
}

/// B42: zero waiting is one round trip, whether the lock is free or not.
#[tokio::test]
async fn zero_waiting_is_one_round_trip() {
    let (first, second) = (
        client_of(&server().url(), secs(30)).await,
        client_of(&server().url(), secs(30)).await,
    );
    let name = unique_name();
    // The scripts are known to the server from here on.
    drop(second.lock(unique_name()).acquire().await.unwrap());
    let mut monitor = server().monitor().await;
    let mut lock = second.lock(name.as_str());
    let guard = lock.acquire_timeout(Duration::ZERO).await.unwrap();
    assert_eq!(monitor.script_calls(&name).await, 1);
    monitor.clear().await;
    let tried = first.lock(name.as_str()).try_acquire().await.unwrap();
    assert!(tried.is_none());
    let mut lock = first.lock(name.as_str());
    let zero = lock.acquire_timeout(Duration::ZERO).await;
    assert!(matches!(zero, Err(Error::TimedOut { .. })), "{zero:?}");
    assert_eq!(monitor.script_calls(&name).await, 2);
    assert_eq!(
        monitor
            .count(|line| line.contains(&name) && line.contains("SUBSCRIBE"))
            .await,
        0
    );
    drop(guard);
    nothing_left(server(), &name).await;
}

/// B42: a bounded wait ends when it said, whatever it is doing then, and nothing is left of it.
#[tokio::test]
async fn a_bounded_wait_ends_in_time() {
    let client = client_of(&server().url(), secs(30)).await;
    let name = unique_name();
    let ruler = Ruler::start();
    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    let waits = [1, 10, 60, 250].map(|patience| {
        let mut lock = client.lock(name.as_str());
        tokio::spawn(async move {
            let start = Instant::now();
            let error = lock.acquire_timeout(ms(patience)).await.unwrap_err();
            (ms(patience), start.elapsed(), error)
        })
    });
    for wait in waits {
        let (patience, took, error) = wait.await.unwrap();
        assert!(
            took >= patience && took < patience + ms(200) + ruler.allowance(),
            "{took:?}"
        );
        // It may be too short for the first answer.
        let busy = matches!(error, Error::TimedOut { .. });
        assert!(busy || patience < ms(10) + ruler.allowance(), "{error:?}");
    }
    drop(guard);
    nothing_left(server(), &name).await;
}

/// When each client asked for the lock, by its address.
async fn attempts(
    monitor: &mut Monitor,
    name: &str,
) -> std::collections::BTreeMap<String, Vec<f64>> {
    let mut times = std::collections::BTreeMap::<String, Vec<f64>>::new();
    for line in monitor.lines().await {
        let Some((time, rest)) = line.split_once(" [0 ") else {
            continue;
        };
        if rest.contains("\"EVAL") && rest.contains(name) {
            let who = rest.split(']').next().unwrap().to_owned();
            times.entry(who).or_default().push(time.parse().unwrap());
        }
    }
    times
}

/// B44: those who have to poll do not come in step: their pauses are by chance, grow, and are capped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pollers_do_not_come_in_step() {
    let server = Server::start();
    let lease = secs(30);
    let holder = client_of(&server.url(), lease).await;
    let name = unique_name();
    let guard = holder.lock(name.as_str()).acquire().await.unwrap();
    let mut clients = Vec::new();
    for _ in 0..scaled(8, 50) {
        let builder = LockClient::builder().url(server.url()).pubsub(PubSub::Off);
        clients.push(builder.connect_timeout(secs(5)).build().await.unwrap());
    }
    let mut monitor = server.monitor().await;
    let barrier = std::sync::Arc::new(tokio::sync::Barrier::new(clients.len()));
    let waiting: Vec<_> = clients
        .iter()
        .map(|client| {
            let (mut lock, barrier) = (client.lock(name.as_str()), barrier.clone());
            tokio::spawn(async move {
                barrier.wait().await;
                let guard = lock.acquire().await.unwrap();
                assert_eq!(guard.release().await, ReleaseOutcome::Released);
            })
        })
        .collect();
    // The subject: attempts over a while.
    let ruler = Ruler::start();
    tokio::time::sleep(ms(1500)).await;
    eventually(secs(10), "enough attempts of all", async || {
        let times = attempts(&mut monitor, &name).await;
        times.len() == clients.len() && times.values().all(|times| times.len() > 10)
    })
    .await;
    let allowance = ruler.allowance().as_secs_f64();
    let times = attempts(&mut monitor, &name).await;
    assert_eq!(times.len(), clients.len());
    for times in times.values() {
        let pauses: Vec<_> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!((8..60).contains(&pauses.len()), "{pauses:?}");
        assert!(
            pauses[0] < 0.05 + allowance && *pauses.last().unwrap() > 0.06,
            "{pauses:?}"
        );
        assert!(
            pauses.iter().all(|pause| *pause < 0.45 + allowance),
            "{pauses:?}"
        );
    }
    // The nth attempts of all are spread, and not at one moment. A busy machine may push some
    // together, not most.
    let spread = (5..10).filter(|&nth| {
        let times = times.values().map(|times| times[nth]);
        times.clone().fold(0.0, f64::max) - times.fold(f64::MAX, f64::min) > 0.02
    });
    assert!(spread.count() >= 2, "in step: {times:?}");

    drop(guard);
    let all = tokio::time::timeout(secs(20), join_all(waiting)).await;
    for task in all.expect("all come in turn") {
        task.unwrap();
    }
    nothing_left(&server, &name).await;
}

/// Waiters of one client are served in order of arrival, whichever way the lock comes free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_of_one_client_are_served_in_order_of_arrival() {
    let (one, two) = (
        client_of(&server().url(), secs(30)).await,
        client_of(&server().url(), secs(30)).await,
    );
    let cli = server().cli().await;
    for from_outside in [true, false] {
        let name = unique_name();
        let holder = if from_outside { &two } else { &one };
        let guard = holder.lock(name.as_str()).acquire().await.unwrap();
        let (told, mut order) = tokio::sync::mpsc::unbounded_channel();
        let mut waiting = Vec::new();
        for number in 0..10 {
            let (mut lock, told) = (one.lock(name.as_str()), told.clone());
            let mut acquiring = Box::pin(async move {
                let guard = lock.acquire().await.unwrap();
                told.send((number, guard.fencing_token().unwrap())).unwrap();
                tokio::task::yield_now().await;
                assert_eq!(guard.release().await, ReleaseOutcome::Released);
            });
            // In line from the first poll on.
            assert!(futures_util::poll!(&mut acquiring).is_pending());
            waiting.push(tokio::spawn(acquiring));
        }
        cli.until_waiters(&name, 1).await;
        assert!(order.try_recv().is_err(), "one is in already");
        // One attempt never overtakes the line.
        assert!(
            one.lock(name.as_str())
                .try_acquire()
                .await
                .unwrap()
                .is_none()
        );
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
        for task in waiting {
            task.await.unwrap();
        }
        drop(told);
        let mut served = Vec::new();
        while let Some(next) = order.recv().await {
            served.push(next);
        }
        let numbers: Vec<_> = served.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, (0..10).collect::<Vec<_>>());
        assert!(served.is_sorted_by_key(|(_, token)| *token));
        nothing_left(server(), &name).await;
    }
}

/// One release wakes one contender in each process, however many wait there: one of all gets in, and
/// each process asks the server once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_release_wakes_one_contender_of_each_process() {
    let holder = client_of(&server().url(), secs(30)).await;
    let cli = server().cli().await;
    let mut rounds = 0;
    loop {
        let name = unique_name();
        let guard = holder.lock(name.as_str()).acquire().await.unwrap();
        let mut clients = Vec::new();
        let mut waiting = Vec::new();
        let began = Instant::now();
        for _ in 0..3 {
            let client = client_of(&server().url(), secs(30)).await;
            waiting.extend((0..10).map(|_| wait_for(&client, &name)));
            clients.push(client);
        }
        cli.until_waiters(&name, 3).await;
        let mut monitor = server().monitor().await;
        // Each has tried again behind its subscription before the release.
        eventually(secs(2), "all are asleep", async || {
            let before = monitor.script_calls(&name).await;
            // The subject: nothing is asked for a while.
            tokio::time::sleep(ms(60)).await;
            monitor.script_calls(&name).await == before
        })
        .await;
        monitor.clear().await;
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
        eventually(secs(2), "one gets in", async || {
            waiting.iter().any(JoinHandle::is_finished)
        })
        .await;
        // The subject: that no more happens, long enough for it to happen.
        tokio::time::sleep(ms(200)).await;
        let finished = waiting.iter().filter(|task| task.is_finished()).count();
        assert_eq!(finished, 1);
        let calls = monitor.script_calls(&name).await;
        // After two seconds the sleeps end by themselves.
        let quick = began.elapsed() < ms(1800);
        assert!(
            (2..=4).contains(&calls) || !quick,
            "one release, and one attempt of each process: {calls} calls"
        );
        // The rest gets in by and by.
        while !waiting.is_empty() {
            let (done, _, rest) = futures_util::future::select_all(waiting).await;
            drop(done.unwrap());
            waiting = rest;
        }
        nothing_left(server(), &name).await;
        if quick {
            return;
        }
        rounds += 1;
        assert!(rounds < 10, "never quick enough");
    }
}

/// `x` and `{x}` are two locks with one channel, in Redisson's naming: a waiter for one takes no message
/// away from a waiter for the other, neither when it comes nor when it leaves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_names_on_one_channel_do_not_disturb_each_other() {
    let server = Server::start();
    for leaves in [false, true] {
        let client = client_of(&server.url(), secs(30)).await;
        let other = client_of(&server.url(), secs(30)).await;
        let plain = unique_name();
        let braced = format!("{{{plain}}}");
        let held = other.lock(plain.as_str()).acquire().await.unwrap();
        let kept = other.lock(braced.as_str()).acquire().await.unwrap();
        let first = wait_for(&client, &plain);
        let cli = server.cli().await;
        cli.until_waiters(&plain, 1).await;
        let mut monitor = server.monitor().await;
        let second = wait_for(&client, &braced);
        // Asked once, and again after its subscription: that is live.
        eventually(secs(5), "the second listens", async || {
            monitor.script_calls(&format!("\"{braced}\"")).await >= 2
        })
        .await;
        if leaves {
            second.abort();
            // What must not happen has this time for it: the first one's subscription goes too.
            tokio::time::sleep(ms(200)).await;
        }
        let (released, ruler) = (Instant::now(), Ruler::start());
        assert_eq!(held.release().await, ReleaseOutcome::Released);
        let (guard, granted) = first.await.unwrap();
        let took = granted.saturating_duration_since(released);
        let limit = secs(1) + ruler.allowance();
        assert!(took < limit, "heard of the release after {took:?}");
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
        assert_eq!(kept.release().await, ReleaseOutcome::Released);
        if !leaves {
            let (guard, _) = second.await.unwrap();
            assert_eq!(guard.release().await, ReleaseOutcome::Released);
        }
    }
}

/// Waits that end while others are being asked for: who tells a caller that his time is up, and who
/// forms the next request, look at each other's state.
#[test]
fn waits_that_end_under_load_do_not_lock_up() {
    let (done, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(4)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let client = LockClient::in_memory();
            let end = Instant::now() + scaled(ms(1500), secs(60));
            let mut tasks = Vec::new();
            for task in 0..64 {
                let client = client.clone();
                tasks.push(tokio::spawn(async move {
                    while Instant::now() < end {
                        let mut lock = client.lock(["a", "b"][task % 2]);
                        match lock.acquire_timeout(ms(1)).await {
                            Ok(guard) => {
                                tokio::time::sleep(ms(1)).await;
                                drop(guard);
                            }
                            Err(error) => assert!(error.is_retryable(), "{error:?}"),
                        }
                    }
                }));
            }
            for task in tasks {
                task.await.unwrap();
            }
        });
        done.send(()).unwrap();
    });
    let patience = scaled(secs(30), secs(120));
    told.recv_timeout(patience).expect("it stands still");
}
