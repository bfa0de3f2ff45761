//! Ownership is a value: it moves, it ends once, it belongs to nobody else. And how a client ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use leasehold::{Error, LockClient, LockContext, LockGuard, LossReason, ReleaseOutcome};

use crate::common::*;
use crate::support::client_of;

async fn client(server: &Server) -> LockClient {
    client_of(&server.url(), secs(30)).await
}

/// B78: a guard is owned by whoever has it, in whatever task or thread.
#[test]
fn guards_clients_and_contexts_may_go_anywhere() {
    fn anywhere<T: Send + Sync + 'static>() {}
    anywhere::<LockGuard>();
    anywhere::<LockClient>();
    anywhere::<LockContext>();
    anywhere::<leasehold::Lock>();
    anywhere::<Error>();
}

/// B78: acquired in one task, released in another on another thread, and on a plain thread.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guard_may_be_released_anywhere() {
    let server = server();
    let name = unique_name();
    let client = client(server).await;
    let (give, mut take) = tokio::sync::mpsc::channel::<LockGuard>(1);
    let releasing = tokio::spawn(async move {
        while let Some(guard) = take.recv().await {
            assert_eq!(guard.release().await, ReleaseOutcome::Released);
        }
    });
    for _ in 0..20 {
        let guard = client.lock(name.as_str()).acquire().await.unwrap();
        give.send(guard).await.unwrap();
    }
    drop(give);
    releasing.await.unwrap();
    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    std::thread::spawn(move || drop(guard)).join().unwrap();
    nothing_left(server, &name).await;
}

/// B78: sixteen threads with runtimes of their own, which pass guards of one client among them.
#[test]
fn guards_wander_through_sixteen_threads() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = server();
    let client = runtime.block_on(client(server));
    let name = unique_name();
    let inside = std::sync::atomic::AtomicBool::new(false);
    let (give, take) = std::sync::mpsc::channel::<LockGuard>();
    let take = std::sync::Mutex::new(take);
    std::thread::scope(|threads| {
        for _ in 0..16 {
            let (client, name, inside, give, take) = (&client, &name, &inside, give.clone(), &take);
            threads.spawn(move || {
                let own = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .unwrap();
                for _ in 0..scaled(20, 500) {
                    let guard = own.block_on(client.lock(name.as_str()).acquire()).unwrap();
                    assert!(!inside.swap(true, Ordering::SeqCst));
                    give.send(guard).unwrap();
                    // Perhaps another thread's, if that was faster; there is only one at a time.
                    let guard = take.lock().unwrap().recv().unwrap();
                    assert!(inside.swap(false, Ordering::SeqCst));
                    let outcome = own.block_on(guard.release());
                    assert_eq!(outcome, ReleaseOutcome::Released);
                }
            });
        }
    });
    runtime.block_on(nothing_left(server, &name));
}

/// B79: what is known of a hold lies in its guard, not in the thread: A's late release does not free
/// what B took on the same thread.
#[tokio::test]
async fn late_release_does_not_free_what_another_took_on_the_same_thread() {
    let server = server();
    let name = unique_name();
    let client = client(server).await;
    let a = client.lock(name.as_str()).lease(ms(200)).acquire().await;
    let a = a.unwrap();
    let b = client.lock(name.as_str()).acquire().await.unwrap();
    assert!(!a.is_held() && b.is_held());
    assert_eq!(
        a.release().await,
        ReleaseOutcome::Lost(LossReason::DeadlinePassed)
    );
    b.confirm().await.unwrap();
    assert_eq!(server.cli().await.count(&name).await, Some(1));
    // Nor does the context that a task carries along: nothing reads it but `current`.
    let scoped = client.context();
    let inside = scoped
        .scope(async { client.lock(name.as_str()).try_acquire().await })
        .await;
    assert!(inside.unwrap().is_none());
    assert_eq!(b.release().await, ReleaseOutcome::Released);
    nothing_left(server, &name).await;
}

/// B81: whoever got no guard cannot release; a refused attempt changes nothing for the holder, be it
/// dropped in whatever way.
#[tokio::test]
async fn a_refused_attempt_leaves_nothing_to_release() {
    let server = server();
    let name = unique_name();
    let client = client(server).await;
    let held = client.lock(name.as_str()).acquire().await.unwrap();
    let mut other = client.context();
    let mut lock = other.lock(name.as_str());
    assert!(lock.try_acquire().await.unwrap().is_none());
    let timed_out = lock.acquire_timeout(secs(1)).await;
    assert!(matches!(timed_out, Err(Error::TimedOut { .. })));
    drop(lock);
    drop(other);
    held.confirm().await.unwrap();
    assert_eq!(held.release().await, ReleaseOutcome::Released);
    nothing_left(server, &name).await;
}

/// B82: two locks of one process on one name exclude each other, also in one task; who wants to
/// re-enter says so with the context, and leaves as often as it entered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn re_entry_is_said_aloud_and_left_as_often_as_entered() {
    let server = server();
    let name = unique_name();
    let client = client(server).await;
    let cli = server.cli().await;
    let first = client.lock(name.as_str()).acquire().await.unwrap();
    let second = client.lock(name.as_str()).try_acquire().await.unwrap();
    assert!(second.is_none(), "re-entered without a word");
    let mut fork = first.context().fork();
    assert!(
        fork.lock(name.as_str())
            .try_acquire()
            .await
            .unwrap()
            .is_none()
    );

    let mut ctx = first.context();
    let second = ctx.lock(name.as_str()).acquire().await.unwrap();
    let third = ctx.lock(name.as_str()).try_acquire().await.unwrap();
    let third = third.unwrap();
    assert_eq!(cli.count(&name).await, Some(3));
    for (guard, left) in [(second, Some(2)), (first, Some(1)), (third, None)] {
        drop(guard);
        eventually(secs(2), "left", async || cli.count(&name).await == left).await;
    }

    let inside = Arc::new(AtomicUsize::new(0));
    let tasks = [0, 1].map(|_| {
        let (client, name, inside) = (client.clone(), name.clone(), inside.clone());
        tokio::spawn(async move {
            for _ in 0..scaled(200, 10_000) {
                let guard = client.lock(name.as_str()).acquire().await.unwrap();
                let before = inside.fetch_add(1, Ordering::SeqCst);
                assert_eq!(before, 0, "both inside");
                tokio::task::yield_now().await;
                inside.fetch_sub(1, Ordering::SeqCst);
                let _ = guard.release().await;
            }
        })
    });
    for task in tasks {
        task.await.unwrap();
    }
    nothing_left(server, &name).await;
}

/// B83: one type for each next step; each message names the lock, tells whether to try again, and
/// keeps its cause. (`Denied`, `Conflict` and `Config`: see `acl` and `bad_input`.)
#[tokio::test]
async fn errors_tell_the_next_step() {
    let server = Server::start();
    let name = unique_name();
    let client = client_of(&server.url(), secs(3)).await;
    let told = |error: &Error, retryable: bool, cause: bool| {
        assert!(error.to_string().contains(&name), "{error}");
        assert_eq!(error.is_retryable(), retryable, "{error:?}");
        assert_eq!(
            std::error::Error::source(error).is_some(),
            cause,
            "{error:?}"
        );
    };
    let held = client.lock(name.as_str()).acquire().await.unwrap();
    let busy = client.lock(name.as_str()).acquire_timeout(secs(1)).await;
    let Err(error @ Error::TimedOut { waited, .. }) = &busy else {
        panic!("{busy:?}");
    };
    told(error, true, false);
    assert!(*waited >= secs(1));
    // Held by the caller's own client, which it has no other way to know; then by another's.
    let says_own = |error: &Error| {
        let Error::TimedOut { own_client, .. } = error else {
            panic!("{error:?}");
        };
        assert_eq!(
            *own_client,
            error.to_string().contains("this client holds it")
        );
        *own_client
    };
    assert!(says_own(error));
    let other = client_of(&server.url(), secs(3)).await;
    let busy = other.lock(name.as_str()).acquire_timeout(ms(200)).await;
    assert!(!says_own(&busy.unwrap_err()));

    server.cmd(&["DEL", &name]).await.ok();
    let lost = held.confirm().await.unwrap_err();
    assert!(matches!(
        lost,
        Error::Lost {
            reason: LossReason::KeyGone,
            ..
        }
    ));
    told(&lost, false, false);
    drop(held);

    server.cmd(&["CONFIG", "SET", "maxmemory", "1"]).await.ok();
    let full = client.lock(name.as_str()).acquire().await.unwrap_err();
    assert!(matches!(full, Error::OutOfMemory { .. }), "{full:?}");
    told(&full, true, true);
    server.cmd(&["CONFIG", "SET", "maxmemory", "0"]).await.ok();

    server.stop();
    let silent = client.lock(name.as_str()).acquire_timeout(ms(200)).await;
    let silent = silent.unwrap_err();
    assert!(matches!(silent, Error::Indeterminate { .. }), "{silent:?}");
    told(&silent, true, true);
    // Not woken before: it would grant what was asked for, and the next in line would have it.
    server.kill();
    let gone = client.lock(name.as_str()).acquire_timeout(ms(200)).await;
    let gone = gone.unwrap_err();
    assert!(
        matches!(
            gone,
            Error::Unreachable { .. } | Error::Indeterminate { .. }
        ),
        "{gone:?}"
    );
    told(&gone, true, true);
    eventually(secs(3), "surely unreachable", async || {
        let gone = client.lock(name.as_str()).try_acquire().await;
        matches!(gone, Err(Error::Unreachable { .. }))
    })
    .await;
    let _ = client.close(ms(100)).await;
    let closed = client.lock(name.as_str()).acquire().await.unwrap_err();
    assert!(matches!(closed, Error::Closed) && !closed.is_retryable());
}

// ---- the end of a client ----

struct Busy {
    held: Vec<LockGuard>,
    waiting: Vec<tokio::task::JoinHandle<Result<LockGuard, Error>>>,
    names: Vec<String>,
}

/// A hundred holders and a hundred waiters for what they hold.
async fn hundreds(server: &Server, client: &LockClient, base: &str) -> Busy {
    let names: Vec<_> = (0..100).map(|i| format!("{base}:{i}")).collect();
    let mut held = Vec::new();
    for name in &names {
        held.push(client.lock(name.as_str()).acquire().await.unwrap());
    }
    let waiting = names
        .iter()
        .map(|name| {
            let mut lock = client.lock(name.as_str());
            tokio::spawn(async move { lock.acquire().await })
        })
        .collect();
    let cli = server.cli().await;
    eventually(secs(10), "all wait", async || {
        cli.channels_with(base).await.len() == 100
    })
    .await;
    Busy {
        held,
        waiting,
        names,
    }
}

/// B88: `close` tells waiters and holders, frees what is held, and raises no alarm.
#[tokio::test]
async fn close_ends_a_hundred_holders_and_waiters_in_order() {
    let log = Log::start();
    let server = Server::start();
    let client = client(&server).await;
    let base = unique_name();
    let busy = hundreds(&server, &client, &base).await;
    let (started, ruler) = (Instant::now(), Ruler::start());
    let closing = tokio::spawn({
        let client = client.clone();
        async move { client.close(ms(2500)).await }
    });
    for waiter in busy.waiting {
        let told = waiter.await.unwrap();
        assert!(matches!(told, Err(Error::Closed)), "{told:?}");
    }
    // One holder is done in time, the others are told.
    let mut held = busy.held;
    assert_eq!(
        held.pop().unwrap().release().await,
        ReleaseOutcome::Released
    );
    let report = closing.await.unwrap();
    let took = started.elapsed();
    assert!(took < ms(2700) + ruler.allowance(), "{took:?}");
    assert_eq!((report.lost, report.unconfirmed), (99, 0));
    for guard in &held {
        assert_eq!(guard.loss_reason(), Some(LossReason::ClientClosed));
    }
    let again = client.close(secs(1)).await;
    assert_eq!((again.lost, again.unconfirmed), (0, 0));
    drop(held);
    nothing_left(&server, &base).await;
    let cli = server.cli().await;
    assert!(cli.keys_with("leasehold_client").await.is_empty());
    eventually(secs(2), "no connections but ours", async || {
        let clients = cli.cmd(&["CLIENT", "LIST"]).await.text();
        clients.lines().count() == 1
    })
    .await;
    assert_eq!(log.count(&["ERROR"]), 0, "{}", log.text());
}

/// Work that holds a lock is finished while the client closes: it re-enters what it has, and gets nothing
/// new.
#[tokio::test]
async fn close_lets_a_holder_enter_again() {
    let server = server();
    let client = client(server).await;
    let name = unique_name();
    let mut ctx = client.context();
    let outer = ctx.lock(name.as_str()).acquire().await.unwrap();
    let closing = tokio::spawn({
        let client = client.clone();
        async move { client.close(secs(20)).await }
    });
    let fresh = unique_name();
    eventually(secs(5), "closing", async || {
        let new = client.lock(fresh.as_str()).try_acquire().await;
        matches!(new, Err(Error::Closed))
    })
    .await;
    let inner = ctx.lock(name.as_str()).acquire().await.unwrap();
    assert_eq!(server.cli().await.count(&name).await, Some(2));
    let tried = ctx.lock(name.as_str()).try_acquire().await.unwrap();
    assert_eq!(tried.expect("re-enters").depth(), 3);
    assert!(matches!(
        ctx.lock(fresh.as_str()).acquire().await,
        Err(Error::Closed)
    ));
    drop((inner, outer));
    let report = closing.await.unwrap();
    assert_eq!((report.lost, report.unconfirmed), (0, 0));
    assert!(matches!(
        ctx.lock(name.as_str()).acquire().await,
        Err(Error::Closed)
    ));
    nothing_left(server, &name).await;
}

/// However a client that closes and its callers meet: what was granted is told, and released.
#[test]
fn close_misses_no_hold() {
    let server = Server::start();
    for round in 0..scaled(12, 60) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(4)
            .enable_all()
            .build()
            .unwrap();
        let prefix = unique_name();
        let left = runtime.block_on(async {
            let client = client(&server).await;
            let got = Arc::new(AtomicUsize::new(0));
            for i in 0..300 {
                let (mut lock, got) = (client.lock(format!("{prefix}:{i}")), Arc::clone(&got));
                tokio::spawn(async move {
                    if let Ok(guard) = lock.acquire().await {
                        got.fetch_add(1, Ordering::Relaxed);
                        guard.lost().cancelled().await;
                        std::future::pending::<()>().await;
                    }
                });
            }
            let aim = 20 + (round * 23) % 260;
            while got.load(Ordering::Relaxed) < aim {
                tokio::task::yield_now().await;
            }
            // No patience: all is told and released at once.
            client.close(secs(1)).await;
            let cli = server.cli().await;
            let keys = cli.keys_with(&prefix).await.into_iter();
            keys.filter(|key| !key.contains("token"))
                .collect::<Vec<_>>()
        });
        assert!(left.is_empty(), "round {round}: {left:?}");
        runtime.shutdown_timeout(ms(100));
    }
}

/// A renewal that finds a hold gone which this client has just removed by force knows why.
#[tokio::test(start_paused = true)]
async fn forced_is_the_reason_also_at_the_moment_of_a_renewal() {
    let client = LockClient::in_memory();
    for at in [ms(9_999), secs(10), ms(10_001), secs(20)] {
        let name = unique_name();
        let guard = client.lock(name.as_str()).acquire().await.unwrap();
        tokio::time::sleep(at).await;
        assert!(client.force_release(name.as_str()).await.unwrap());
        assert_eq!(guard.loss_reason(), Some(LossReason::Forced), "{at:?}");
    }
}

/// One bound on the wait, none on the work.
#[tokio::test]
async fn run_with_a_bound_on_the_wait() {
    let server = server();
    let client = client(server).await;
    let name = unique_name();
    let done = client
        .lock(name.as_str())
        .run_timeout(secs(5), async |guard| {
            tokio::time::sleep(ms(50)).await;
            Ok::<_, Error>(guard.depth())
        })
        .await;
    assert_eq!(done.unwrap(), 1);
    let held = client.lock(name.as_str()).acquire().await.unwrap();
    let mut ran = false;
    let busy = client
        .lock(name.as_str())
        .run_timeout(ms(100), async |_| {
            ran = true;
            Ok::<_, Error>(())
        })
        .await;
    assert!(matches!(busy, Err(Error::TimedOut { .. })), "{busy:?}");
    assert!(!ran);
    drop(held);
    nothing_left(server, &name).await;
}

/// B88: a server that does not answer cannot hold up the end; the leases end by themselves.
#[tokio::test]
async fn close_returns_in_time_when_the_server_is_silent() {
    let log = Log::start();
    let server = Server::start();
    let client = client_of(&server.url(), secs(5)).await;
    let base = unique_name();
    let busy = hundreds(&server, &client, &base).await;
    server.stop();
    let (started, ruler) = (Instant::now(), Ruler::start());
    let report = client.close(ms(800)).await;
    let took = started.elapsed();
    assert!(took < ms(1000) + ruler.allowance(), "{took:?}");
    assert_eq!((report.lost, report.unconfirmed), (100, 100));
    for waiter in busy.waiting {
        assert!(matches!(waiter.await.unwrap(), Err(Error::Closed)));
    }
    assert!(busy.held.iter().all(|guard| !guard.is_held()));
    let count = busy.names.len();
    drop(busy.held);
    server.cont();
    assert_eq!(count, 100);
    let cli = server.cli().await;
    eventually(secs(7), "leases end", async || {
        let mut left = cli.keys_with(&base).await;
        left.retain(|key| !key.contains("token"));
        left.is_empty()
    })
    .await;
    assert_eq!(log.count(&["ERROR"]), 0, "{}", log.text());
}

/// B88: the last handle dropped ends all: connections, renewals, the client's info.
#[tokio::test]
async fn last_handle_dropped_ends_the_background() {
    let server = Server::start();
    let client = client(&server).await;
    let name = unique_name();
    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    let mut lock = client.lock(name.as_str());
    let waiting = tokio::spawn(async move { lock.acquire().await });
    let cli = server.cli().await;
    cli.until_waiters(&name, 1).await;
    drop(client);
    guard.confirm().await.unwrap();
    drop(guard);
    drop(waiting.await.unwrap().unwrap());
    nothing_left(&server, &name).await;
    eventually(secs(2), "no connections but ours", async || {
        let clients = cli.cmd(&["CLIENT", "LIST"]).await.text();
        clients.lines().count() == 1
    })
    .await;
    assert!(cli.keys_with("leasehold_client").await.is_empty());
}

// ---- deploys ----

/// Holds the lock NAME on the server URL with the lease LEASE until it is told to end by SIGTERM,
/// then closes its client as a service does.
#[tokio::test]
async fn service_worker() {
    let Some(me) = WorkerSide::if_spawned() else {
        return;
    };
    let var = |name: &str| std::env::var(name).unwrap();
    let mut end =
        tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()).unwrap();
    let client = client_of(&var("URL"), ms(var("LEASE").parse().unwrap())).await;
    me.say("ready");
    // On a busy machine the server may be silent for longer than a short lease.
    let guard = loop {
        match client.lock(var("NAME")).acquire().await {
            Ok(guard) => break guard,
            Err(error) => assert!(error.is_retryable(), "{error:?}"),
        }
    };
    me.say("held");
    end.recv().await;
    drop(guard);
    let report = client.close(secs(2)).await;
    me.say(&format!("closed {} {}", report.lost, report.unconfirmed));
}

async fn service(server: &Server, name: &str, lease: &str) -> Worker {
    let envs = [
        ("URL", server.url()),
        ("NAME", name.to_owned()),
        ("LEASE", lease.to_owned()),
    ];
    let envs: Vec<_> = envs.iter().map(|(k, v)| (*k, v.as_str())).collect();
    let mut worker = Worker::spawn("usability::service_worker", &envs);
    worker.expect("ready").await;
    worker
}

/// B89: deploys: the new process waits, the old one gets SIGTERM, and the lock is handed over at once.
#[tokio::test]
async fn sigterm_hands_the_lock_to_the_next_process_at_once() {
    let server = server();
    let name = unique_name();
    let cli = server.cli().await;
    let mut old = service(server, &name, "10000").await;
    old.expect("held").await;
    for _ in 0..scaled(3, 50) {
        let mut new = service(server, &name, "10000").await;
        cli.until_waiters(&name, 1).await;
        old.terminate();
        let (told, ruler) = (Instant::now(), Ruler::start());
        new.expect("held").await;
        let took = told.elapsed();
        assert!(took < ms(500) + ruler.allowance(), "{took:?}");
        old.expect("closed 0 0").await;
        assert!(old.wait().await.success());
        old = new;
    }
    old.terminate();
    assert!(old.wait().await.success());
    nothing_left(server, &name).await;
}

/// B89: after SIGKILL nobody says anything: the next process has the lock when the lease ends, and not
/// before.
#[tokio::test]
async fn sigkill_frees_the_lock_within_one_lease() {
    let server = server();
    let name = unique_name();
    let cli = server.cli().await;
    let mut old = service(server, &name, "2000").await;
    old.expect("held").await;
    for _ in 0..scaled(2, 50) {
        let mut new = service(server, &name, "2000").await;
        cli.until_waiters(&name, 1).await;
        let owner = cli.hash(&name).await;
        old.kill();
        let (killed, ruler) = (Instant::now(), Ruler::start());
        let left = cli.pttl(&name).await;
        new.expect("held").await;
        assert_ne!(cli.hash(&name).await, owner);
        let took = killed.elapsed();
        assert!(took < ms(2400) + ruler.allowance(), "{took:?}");
        assert!(
            took + ms(20) > ms(u64::try_from(left).unwrap()),
            "{took:?} with a lease of {left} ms left"
        );
        old.wait().await;
        old = new;
    }
    old.terminate();
    assert!(old.wait().await.success());
    nothing_left(server, &name).await;
}

/// Several calls of `close` at the same moment count each hold once, together.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn closes_at_the_same_moment_count_each_hold_once() {
    for _ in 0..5 {
        let client = LockClient::in_memory();
        let mut guards = Vec::new();
        for name in 0..2000 {
            guards.push(client.lock(format!("{name}")).acquire().await.unwrap());
        }
        let closes: Vec<_> = (0..4)
            .map(|_| {
                let client = client.clone();
                tokio::spawn(async move { client.close(ms(1050)).await.lost })
            })
            .collect();
        let mut lost = 0;
        for close in closes {
            lost += close.await.unwrap();
        }
        assert_eq!(lost, guards.len());
    }
}

/// The earliest deadline of several calls of `close` holds for all.
#[tokio::test]
async fn a_short_close_ends_a_long_one() {
    let client = LockClient::in_memory();
    let guard = client.lock("job").acquire().await.unwrap();
    let start = Instant::now();
    let long = client.close(secs(60));
    let (long, short) = tokio::join!(long, client.close(ms(20)));
    assert!(start.elapsed() < secs(30), "{:?}", start.elapsed());
    assert_eq!(long.lost + short.lost, 1);
    assert!(!guard.is_held());
}
