//! Renewal, and the end of it: what is held stays held, what is over is never renewed again, and
//! nobody believes in a lease that ended.

use std::collections::BTreeSet;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use leasehold::{Error, LockGuard, LossReason, ReleaseOutcome};

use crate::common::faults::Matching;
use crate::common::*;
use crate::support::client_of;

/// The calls by hash about `name`, in order: hash of the script, and the whole line. (A server that
/// does not know the script yet gets it in full behind that.)
async fn scripts(monitor: &mut Monitor, name: &str) -> Vec<(String, String)> {
    let lines = monitor.lines().await.iter();
    lines
        .filter(|line| line.contains(name))
        .filter_map(|line| {
            let (_, command) = line.split_once("] \"")?;
            let mut words = command.split("\" \"");
            let by_hash = words.next()?.eq_ignore_ascii_case("evalsha");
            by_hash.then(|| (words.next().unwrap().to_owned(), (*line).clone()))
        })
        .collect()
}

/// Whether a call, the line of a monitor, was run before its own deadline. One that was held up on an
/// old connection may come behind what was sent after it, and does nothing then.
fn in_time(line: &str) -> bool {
    let (when, call) = line.split_once(" [").unwrap();
    let (_, command) = call.split_once("] \"").unwrap();
    let seconds: f64 = when.parse().unwrap();
    let mut words = command.split("\" \"").skip(2);
    let keys: usize = words.next().unwrap().parse().unwrap();
    // Behind the keys and the number of the attempt.
    let deadline_us: f64 = words.nth(keys + 1).unwrap().parse().unwrap();
    seconds * 1e6 <= deadline_us
}

/// Owners named in a line: `<uuid>:<decimal>`.
fn owners(line: &str) -> Vec<String> {
    line.split('"')
        .filter(|word| word.len() > 37 && word.as_bytes()[36] == b':' && word.contains('-'))
        .map(str::to_owned)
        .collect()
}

/// B19: renewal and release race at every distance from each other; the release always has the last
/// word. A renewal after it would keep a lock for nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_renewal_follows_a_release() {
    let server = Server::start();
    let lease = ms(1800);
    let client = client_of(&server.url(), lease).await;
    let name = unique_name();
    let mut monitor = server.monitor().await;
    drop(client.lock(name.as_str()).acquire().await.unwrap());
    server.cli().await.until_free(&name).await;
    let seen = scripts(&mut monitor, &name).await;
    let [(acquire, _), .., (release, _)] = &*seen else {
        panic!("{seen:?}");
    };
    assert_ne!(acquire, release);

    let rounds = scaled(60, 2500);
    let tasks = (0..8).map(|task| {
        let (client, name) = (client.clone(), format!("{name}-{task}"));
        tokio::spawn(async move {
            for round in 0..rounds {
                let guard = client.lock(name.as_str()).acquire().await.unwrap();
                for _ in 0..uuid::Uuid::new_v4().as_bytes()[0] % 4 {
                    tokio::task::yield_now().await;
                }
                if round % 8 == task {
                    // The subject: around the moment at which a renewal is due.
                    let off = u64::from(uuid::Uuid::new_v4().as_bytes()[0]) % 8;
                    tokio::time::sleep(ms(596 + off)).await;
                }
                if round % 2 == 0 {
                    drop(guard);
                } else {
                    // On a busy machine the answer may take longer than one waits for it.
                    let outcome = guard.release().await;
                    let done = matches!(
                        outcome,
                        ReleaseOutcome::Released | ReleaseOutcome::Unconfirmed { .. }
                    );
                    assert!(done, "{outcome:?}");
                }
            }
        })
    });
    for task in join_all(tasks).await {
        task.unwrap();
    }
    nothing_left(&server, &name).await;

    let mut last = std::collections::BTreeMap::new();
    let mut renewals = 0;
    for (script, line) in scripts(&mut monitor, &name).await {
        if script != *release && !in_time(&line) {
            continue;
        }
        for owner in owners(&line) {
            if let Some(before) = last.insert(owner, script.clone()) {
                renewals += usize::from(before != *release && script != *release);
            }
        }
    }
    assert!(last.len() > rounds, "owners were seen: {}", last.len());
    assert!(renewals > 0, "the race was on: renewals were sent");
    last.retain(|_, script| script != release);
    assert!(last.is_empty(), "not released in the end: {last:?}");
    monitor.clear().await;
    // The subject: two leases in which nothing may come.
    tokio::time::sleep(lease * 2).await;
    assert_eq!(monitor.script_calls(&name).await, 0);
}

/// B20: a call that returned an error never owns a renewal, also when one of its attempts runs after
/// all: the lock is free and stays free.
#[tokio::test]
async fn a_failed_acquire_is_never_renewed() {
    let server = Server::start();
    let lease = ms(600);
    let client = client_of(&server.url(), lease).await;
    let name = unique_name();
    let cli = server.cli().await;
    server.stop();
    for _ in 0..3 {
        let tried = client
            .lock(name.as_str())
            .acquire_timeout(ms(250))
            .await
            .unwrap_err();
        assert!(
            matches!(
                tried,
                Error::Indeterminate { .. } | Error::Unreachable { .. }
            ),
            "{tried:?}"
        );
    }
    server.cont();
    cli.cmd(&["PING"]).await.ok();
    let (back, ruler) = (Instant::now(), Ruler::start());
    cli.until_free(&name).await;
    assert!(
        back.elapsed() < lease + ruler.allowance(),
        "freed by {:?}",
        back.elapsed()
    );
    let other = client_of(&server.url(), secs(30)).await;
    let guard = other.lock(name.as_str()).try_acquire().await.unwrap();
    drop(guard.expect("another process locks"));
    nothing_left(&server, &name).await;
    let mut monitor = server.monitor().await;
    // The subject: two leases in which nothing may come, but the last of the releases that make sure.
    tokio::time::sleep(lease * 2).await;
    for (_, call) in scripts(&mut monitor, &name).await {
        assert!(
            call.contains("\" \"0\" \"\" \"redisson_lock__channel"),
            "{call}"
        );
    }
}

/// B23: unwinding drops the guard, which releases: the process lives on, the hold does not.
#[tokio::test]
async fn a_panic_releases() {
    let client = client_of(&server().url(), secs(30)).await;
    let name = unique_name();
    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    let died = tokio::spawn(async move {
        let _held = guard;
        panic!("a panic of the test");
    });
    assert!(died.await.unwrap_err().is_panic());
    let (died, ruler) = (Instant::now(), Ruler::start());
    server().cli().await.until_free(&name).await;
    assert!(
        died.elapsed() < ms(500) + ruler.allowance(),
        "freed only after {:?}",
        died.elapsed()
    );
    nothing_left(server(), &name).await;
}

/// B23: a guard that nobody will ever drop is bounded by `max_hold`, with the reason told.
#[tokio::test]
async fn a_forgotten_guard_ends_by_max_hold() {
    let lease = secs(2);
    let ruler = Ruler::start();
    let client = client_of(&server().url(), lease).await;
    let name = unique_name();
    let max = ms(3500);
    let asked = Instant::now();
    let guard = client
        .lock(name.as_str())
        .max_hold(max)
        .acquire()
        .await
        .unwrap();
    let forgotten = ManuallyDrop::new(guard);
    let held = Instant::now();
    forgotten.lost().cancelled().await;
    let lasted = asked.elapsed();
    assert_eq!(forgotten.loss_reason(), Some(LossReason::MaxHold));
    assert!(
        lasted + lease / 3 > max,
        "renewed until the end: {lasted:?}"
    );
    server().cli().await.until_free(&name).await;
    let gone = held.elapsed();
    assert!(
        gone < max + lease + ruler.allowance(),
        "key gone after {gone:?}"
    );
    nothing_left(server(), &name).await;
}

/// B24: after a loss the next hold of the same name, by the same flow, is renewed like any other.
#[tokio::test]
async fn the_hold_after_a_lost_one_is_renewed() {
    let server = Server::start();
    let lease = secs(2);
    let client = client_of(&server.url(), lease).await;
    let name = unique_name();
    let mut ctx = client.context();
    let mut last_token = None;
    for by_outage in [true, false] {
        let guard = ctx.lock(name.as_str()).acquire().await.unwrap();
        assert!(last_token < Some(guard.fencing_token().unwrap()));
        if by_outage {
            server.stop();
            guard.lost().cancelled().await;
            server.cont();
            assert_eq!(guard.loss_reason(), Some(LossReason::DeadlinePassed));
        } else {
            server.cmd(&["DEL", &name]).await.ok();
            guard.lost().cancelled().await;
            assert_eq!(guard.loss_reason(), Some(LossReason::KeyGone));
        }
        drop(guard);

        let guard = ctx.lock(name.as_str()).acquire().await.unwrap();
        let lost = guard.lost();
        // The subject: leases of holding.
        let lasted = tokio::time::timeout(lease * scaled(2, 5), lost.cancelled()).await;
        assert!(lasted.is_err(), "lost: {:?}", guard.loss_reason());
        guard.confirm().await.unwrap();
        last_token = Some(guard.fencing_token().unwrap());
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
    }
    nothing_left(&server, &name).await;
}

/// B25: broken connections are no answer: renewal is tried again until it fits no more. "Gone" is
/// one: told at once, and never asked again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_connections_lose_nothing_and_a_deleted_key_is_lost_at_once() {
    let server = Server::start();
    let lease = secs(2);
    let client = client_of(&server.url(), lease).await;
    let name = unique_name();
    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    let cli = server.cli().await;
    let started = Instant::now();
    for round in 1..=scaled(3, 20) {
        for kind in ["normal", "pubsub"] {
            cli.cmd(&["CLIENT", "KILL", "TYPE", kind]).await;
        }
        let next = tokio::time::Instant::from_std(started + lease * round);
        // The subject: a broken connection in each lease.
        tokio::select! {
            () = tokio::time::sleep_until(next) => {}
            () = guard.lost().cancelled_owned() => panic!("{:?}", guard.loss_reason()),
        }
    }
    guard.confirm().await.unwrap();
    let count = cli.count(&name).await;
    assert_eq!(count, Some(1));

    cli.cmd(&["DEL", &name]).await.ok();
    let (deleted, ruler) = (Instant::now(), Ruler::start());
    guard.lost().cancelled().await;
    let told = deleted.elapsed();
    assert_eq!(guard.loss_reason(), Some(LossReason::KeyGone));
    assert!(
        told < lease / 3 + lease / 6 + ruler.allowance(),
        "told after {told:?}"
    );
    let mut monitor = server.monitor().await;
    // The subject: a lease in which nothing may come.
    tokio::time::sleep(lease).await;
    assert_eq!(monitor.script_calls(&name).await, 0);
    assert_eq!(
        guard.release().await,
        ReleaseOutcome::Lost(LossReason::KeyGone)
    );
    nothing_left(&server, &name).await;
}

/// B25: the connection breaks again and again, in less time than it takes to call it a good one. The
/// hold is renewed in between, and the server sees neither a storm of connections nor one of renewals.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flapping_connection_loses_no_hold_and_storms_no_server() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let lease = secs(3);
    let client = client_of(&proxy.url(), lease).await;
    let name = unique_name();
    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    let mut monitor = server.monitor().await;
    let (start, mut breaks, mut slow) = (Instant::now(), 0, 0);
    while start.elapsed() < scaled(lease * 3 / 2, secs(60)) {
        proxy.cut(if breaks % 2 == 0 {
            Then::Close
        } else {
            Then::Reset
        });
        breaks += 1;
        let broken = Instant::now();
        // The subject: a rhythm of breaks.
        tokio::time::sleep(ms(50)).await;
        slow += usize::from(broken.elapsed() > ms(150));
        assert_eq!(guard.loss_reason(), None, "after {breaks} breaks");
    }
    eventually(lease, "confirmed", async || guard.confirm().await.is_ok()).await;
    let lasted = start.elapsed().as_millis();
    // Each connection begins with an `INFO`.
    let lines = monitor.lines().await.iter();
    let connections: BTreeSet<_> = lines
        .filter(|line| line.contains("\"INFO\""))
        .filter_map(|line| line.split(['[', ']']).nth(1))
        .collect();
    let connections = connections.len();
    let calls = monitor.script_calls(&name).await;
    // After six breaks there are at least 100 ms between two attempts to connect; and after six more,
    // when we were so slow that the connection was a good one.
    let most = usize::try_from(lasted / 100).unwrap() + 6 + 6 * slow;
    assert!(
        (4..=most).contains(&connections),
        "{connections} connections, {breaks} breaks, {lasted} ms"
    );
    // One each third of a lease; and each break may have cost the answer to one, in each of its two
    // forms: by the script's hash, and in full.
    let due = usize::try_from(lasted / (lease / 3).as_millis()).unwrap();
    let most = due + 2 + 2 * connections;
    assert!((3..=most).contains(&calls), "{calls} calls, {due} due");
    assert_eq!(server.cli().await.count(&name).await, Some(1));
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    nothing_left(&server, &name).await;
}

/// A restarted server may have forgotten the hold, so it is asked at once, also when the question is
/// lost with its connection; the same server, after a break, is not asked before a renewal is due.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_asks_at_once_after_each_restart_and_not_after_each_break() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    // Renewed each ten seconds.
    let client = client_of(&proxy.url(), secs(30)).await;
    let (name, other) = (unique_name(), unique_name());
    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    let asked = || proxy.count(&bytes(&name));
    let connected = || proxy.count(&command("INFO"));
    for _ in 0..scaled(3, 30) {
        let before = asked();
        let lost = proxy.inject(Fault::request(bytes(&name), Act::Swallow(Then::Close)));
        server.restart_keeping().await;
        eventually(secs(3), "asked, and asked again", async || {
            asked() >= before + 2
        })
        .await;
        assert!(lost.is_hit());
        guard.confirm().await.unwrap();
        // Lost once; then, and for the confirmation, by the script's hash and in full; and what was
        // asked of the connections that a restart breaks.
        let sent = asked() - before;
        assert!(sent <= 10, "{sent} requests after one restart");
        for then in [Then::Close, Then::Reset, Then::Close] {
            let (before, connections) = (asked(), connected());
            proxy.cut(then);
            eventually(secs(5), "connected again", async || {
                connected() > connections && client.inspect(other.as_str()).await.is_ok()
            })
            .await;
            assert_eq!(asked(), before, "asked the same server again");
        }
        assert_eq!(guard.loss_reason(), None);
    }
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    nothing_left(&server, &name).await;
}

/// B28: the server stands still. The holder is told by his own clock, no later than the lease that
/// was confirmed last ends, and is told before anybody else can enter.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_server_is_a_loss_before_the_lease_ends() {
    let server = Server::start();
    let lease = secs(3);
    // The second one's own lease is how long it puts up with the silence.
    let (first, second) = (
        client_of(&server.url(), lease).await,
        client_of(&server.url(), secs(30)).await,
    );
    let name = unique_name();
    let guard = first.lock(name.as_str()).acquire().await.unwrap();
    let token = guard.fencing_token().unwrap();
    let mut lock = second.lock(name.as_str());
    let waiting = tokio::spawn(async move { lock.acquire().await });
    server.cli().await.until_waiters(&name, 1).await;
    eventually(secs(5), "some of the lease is used up", async || {
        guard.remaining() + ms(150) < lease
    })
    .await;

    // Whatever was confirmed was sent before this.
    let stopping = Instant::now();
    let ruler = Ruler::start();
    server.stop();
    assert!(guard.is_held(), "told by the clock, not by the trouble");
    guard.lost().cancelled().await;
    let told = stopping.elapsed();
    assert_eq!(guard.loss_reason(), Some(LossReason::DeadlinePassed));
    assert!(told <= lease + ruler.allowance(), "told after {told:?}");
    assert!(matches!(guard.ensure_held(), Err(Error::Lost { .. })));
    server.cont();
    let entered = waiting.await.unwrap().unwrap();
    assert!(entered.fencing_token().unwrap() > token);
    // Whatever the server says now to renewals of before: lost is lost.
    assert!(matches!(guard.confirm().await, Err(Error::Lost { .. })));
    assert!(!guard.is_held());
    drop(guard);
    entered.confirm().await.unwrap();
    assert_eq!(entered.release().await, ReleaseOutcome::Released);
    nothing_left(&server, &name).await;
}

/// B29: the network swallows everything and says nothing. Each renewal has a timeout of its own, and
/// the lease is over by our clock before the server, which goes on, lets another in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_black_hole_is_a_loss_before_another_enters() {
    let proxy = Proxy::start(server().port());
    let lease = secs(3);
    let (first, second) = (
        client_of(&proxy.url(), lease).await,
        client_of(&server().url(), secs(30)).await,
    );
    let name = unique_name();
    let guard = first.lock(name.as_str()).acquire().await.unwrap();
    let mut lock = second.lock(name.as_str());
    let waiting = tokio::spawn(async move {
        let entered = lock.acquire().await.unwrap();
        (entered, Instant::now())
    });
    let cli = server().cli().await;
    cli.until_waiters(&name, 1).await;
    eventually(secs(5), "some of the lease is used up", async || {
        guard.remaining() + ms(150) < lease
    })
    .await;
    // Whatever was confirmed was sent before this.
    let hole = Instant::now();
    let ruler = Ruler::start();
    proxy.black_hole();
    guard.lost().cancelled().await;
    let told = Instant::now();
    let late = ruler.allowance();
    assert!(told <= hole + lease + late, "told after {:?}", told - hole);
    let (entered, when) = waiting.await.unwrap();
    assert!(!guard.is_held());
    assert!(
        told < when + late,
        "the second entered before the first was told"
    );
    // A dead network does not hold up the end.
    let closing = Instant::now();
    first.close(ms(300)).await;
    assert!(
        closing.elapsed() < ms(500) + ruler.allowance(),
        "{:?}",
        closing.elapsed()
    );
    drop(guard);
    entered.confirm().await.unwrap();
    assert_eq!(entered.release().await, ReleaseOutcome::Released);
    nothing_left(server(), &name).await;
}

/// B30: renewal extends, it never creates. Somebody came and went while the key was away, so the
/// hold is lost although the lock is free.
#[tokio::test]
async fn a_renewal_never_makes_a_key() {
    tokio::join!(a_renewal_makes_no_key(false), a_renewal_makes_no_key(true));
}

async fn a_renewal_makes_no_key(somebody_came: bool) {
    let (lease, ruler) = (secs(3), Ruler::start());
    let first = client_of(&server().url(), lease).await;
    let second = client_of(&server().url(), lease).await;
    let cli = server().cli().await;
    let name = unique_name();
    let mut monitor = server().monitor().await;
    let guard = first.lock(name.as_str()).acquire().await.unwrap();
    let token = guard.fencing_token().unwrap();
    cli.cmd(&["DEL", &name]).await.ok();
    if somebody_came {
        let between = second.lock(name.as_str()).acquire().await.unwrap();
        assert!(between.fencing_token().unwrap() > token);
        assert_eq!(between.release().await, ReleaseOutcome::Released);
    }
    let deleted = Instant::now();
    let before = monitor.script_calls(&name).await;
    guard.lost().cancelled().await;
    let took = deleted.elapsed();
    assert!(took < lease / 2 + ruler.allowance(), "{took:?}");
    assert_eq!(guard.loss_reason(), Some(LossReason::KeyGone));
    assert!(!cli.exists(&name).await);
    let told = monitor.script_calls(&name).await;
    assert!(told <= before + 2, "one renewal told, or its second copy");
    assert_eq!(
        guard.release().await,
        ReleaseOutcome::Lost(LossReason::KeyGone)
    );
    // The subject: more than the time to the next renewal, in which nothing may be made.
    tokio::time::sleep(lease / 2).await;
    assert!(!cli.exists(&name).await);
    assert_eq!(
        monitor.script_calls(&name).await,
        told,
        "something came after"
    );
    nothing_left(server(), &name).await;
}

/// B32: with every worker of the runtime blocked nothing of ours runs, and still the first look at
/// the guard says that it is lost.
#[test]
fn the_first_look_after_starvation_says_lost() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let lease = secs(2);
    let name = unique_name();
    let guard = runtime.block_on(async {
        let client = client_of(&server().url(), lease).await;
        client.lock(name.as_str()).acquire().await.unwrap()
    });
    let lost = guard.lost();
    let both = Arc::new(Barrier::new(3));
    for _ in 0..2 {
        let both = Arc::clone(&both);
        runtime.spawn(async move {
            both.wait();
            both.wait();
        });
    }
    both.wait();
    // The subject: one and a half leases in which both workers stand still.
    std::thread::sleep(lease * 3 / 2);
    assert!(!lost.is_cancelled(), "nothing of the client has run");
    assert!(!guard.is_held());
    assert_eq!(guard.loss_reason(), Some(LossReason::DeadlinePassed));
    assert_eq!(guard.remaining(), Duration::ZERO);
    assert!(matches!(guard.ensure_held(), Err(Error::Lost { .. })));
    assert!(matches!(guard.fencing_token(), Err(Error::Lost { .. })));
    assert!(lost.is_cancelled(), "whoever looks first tells the others");
    both.wait();
    drop(guard);
    runtime.block_on(nothing_left(server(), &name));
}

/// V1: `run` has a timer of its own: it stops the work in time although the client's runtime, and the
/// watchdog with it, stands still.
#[tokio::test]
async fn run_stops_the_work_while_the_watchdog_starves() {
    let lease = ms(1500);
    let name = unique_name();
    let (send, guard) = tokio::sync::oneshot::channel();
    let (go_on, gate) = std::sync::mpsc::channel::<()>();
    let on_thread = name.clone();
    let starved = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let client = client_of(&server().url(), lease).await;
            let asked = Instant::now();
            let guard = client.lock(on_thread).acquire().await.unwrap();
            assert!(send.send((guard, asked)).is_ok());
            // Blocks the only thread of the client's runtime.
            let _ = gate.recv();
        });
    });
    let (guard, asked) = guard.await.unwrap();
    let ruler = Ruler::start();
    let mut polled = Instant::now();
    let ticks = async {
        loop {
            tokio::time::sleep(ms(1)).await;
            polled = Instant::now();
        }
    };
    let stopped: Result<(), Error> = guard.run(ticks).await;
    let lasted = asked.elapsed();
    let limit = lease + ms(100) + ruler.allowance();
    assert!(
        matches!(
            stopped,
            Err(Error::Lost {
                reason: LossReason::DeadlinePassed,
                ..
            })
        ),
        "{stopped:?}"
    );
    assert!(polled - asked < limit, "{:?}", polled - asked);
    assert!(lasted < limit, "stopped only after {lasted:?}");
    let _ = go_on.send(());
    drop(guard);
    starved.join().unwrap();
    nothing_left(server(), &name).await;
}

/// V1: with the client's runtime gone the watchdog is dead; work under `run` stops, and says why.
#[test]
fn run_stops_the_work_when_the_watchdog_is_dead() {
    let name = unique_name();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let guard = runtime.block_on(async {
        let client = client_of(&server().url(), secs(3)).await;
        client.lock(name.as_str()).acquire().await.unwrap()
    });
    runtime.shutdown_timeout(secs(5));
    let own = tokio::runtime::Runtime::new().unwrap();
    let stopped = own.block_on(async {
        tokio::time::timeout(secs(5), guard.run(std::future::pending::<()>())).await
    });
    assert!(
        matches!(
            stopped,
            Ok(Err(Error::Lost {
                reason: LossReason::ClientClosed,
                ..
            }))
        ),
        "{stopped:?}"
    );
    assert!(!guard.is_held());
    drop(guard);
    // Nobody is left to release it.
    own.block_on(async {
        server().cli().await.until_free(&name).await;
        nothing_left(server(), &name).await;
    });
}

/// The proxy counts what the watchdog sends: one renewal each third of a lease, no more.
#[tokio::test]
async fn a_hold_costs_one_renewal_each_third_of_its_lease() {
    let proxy = Proxy::start(server().port());
    let lease = ms(1500);
    let client = client_of(&proxy.url(), lease).await;
    let name = unique_name();
    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    let about = Matching::Bytes(name.clone().into_bytes());
    let before = proxy.count(&about);
    let (start, ruler) = (Instant::now(), Ruler::start());
    // The subject: three leases of holding.
    tokio::time::sleep(lease * 3).await;
    let sent = proxy.count(&about) - before;
    let due = start.elapsed().as_millis() / (lease / 3).as_millis();
    let due = usize::try_from(due).unwrap();
    // On a busy machine one is late, or gets no answer in time and is sent again.
    let late = ruler.allowance().as_millis() / (lease / 3).as_millis();
    let late = usize::try_from(late).unwrap();
    let (least, most) = ((due - 2).saturating_sub(late).max(2), due + 2 + late);
    assert!((least..=most).contains(&sent), "{sent} sent, {due} due");
    drop(guard);
    nothing_left(server(), &name).await;
}

/// The work ends with a step that outlasts the lease, and nothing was polled meanwhile: it was done
/// without the lock, and says so.
#[tokio::test]
async fn run_tells_of_a_loss_during_the_last_step() {
    let client = client_of(&server().url(), secs(10)).await;
    let name = unique_name();
    let guard = client
        .lock(name.as_str())
        .lease(ms(300))
        .acquire()
        .await
        .unwrap();
    let done = guard.run(async { std::thread::sleep(ms(400)) }).await;
    assert!(matches!(done, Err(Error::Lost { .. })), "{done:?}");
}

/// Many holds are renewed in few calls, whatever moments they were taken at, and none is forgotten.
#[tokio::test]
async fn many_holds_are_renewed_in_few_calls() {
    const HOLDS: i64 = 256;
    let server = Server::start();
    let lease = secs(9);
    let client = client_of(&server.url(), lease).await;
    let name = unique_name();
    let mut guards = Vec::new();
    for number in 0..HOLDS {
        let mut lock = client.lock(format!("{name}-{number}"));
        guards.push(lock.acquire().await.unwrap());
    }
    let cli = server.cli().await;
    let before = cli.script_calls().await;
    // The subject: from lease to lease each has been renewed twice or more.
    tokio::time::sleep(lease).await;
    let calls = cli.script_calls().await - before;
    assert!(calls <= HOLDS, "{calls} calls for {} renewals", 2 * HOLDS);
    for number in 0..HOLDS {
        assert!(cli.exists(&format!("{name}-{number}")).await, "{number}");
    }
    assert!(guards.iter().all(LockGuard::is_held));
}
