//! Attacks that fit no other file: ends of clients at bad moments, storms, and keys spoiled behind
//! the holder's back.

use std::future::Future as _;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Waker};
use std::time::Instant;

use leasehold::{Error, LossReason, ReleaseOutcome};

use crate::common::{
    self, Act, Fault, Injected, Proxy, Ruler, Server, bytes, eventually, ms, nothing_left, secs,
    server, token_key, unique_name,
};
use crate::support::client_of;

/// Counts who believes to hold, and checks that tokens rise.
#[derive(Default)]
struct Believers {
    now: AtomicI64,
    token: AtomicU64,
    turns: AtomicUsize,
}

impl Believers {
    async fn turn(&self, guard: &leasehold::LockGuard) {
        let Ok(token) = guard.fencing_token() else {
            return;
        };
        let inside = self.now.fetch_add(1, Ordering::SeqCst);
        assert!(inside == 0 || !guard.is_held(), "two believers");
        let before = self.token.fetch_max(token.value(), Ordering::SeqCst);
        assert!(before < token.value(), "{before} then {}", token.value());
        tokio::task::yield_now().await;
        self.now.fetch_sub(1, Ordering::SeqCst);
        self.turns.fetch_add(1, Ordering::SeqCst);
    }
}

/// A waiter behind the proxy whose last handle has gone while the server's grant is on its way to it.
async fn gone_before_its_grant_comes(proxy: &Proxy, name: &str) -> Injected {
    let server = server();
    let holder = client_of(&server.url(), secs(30)).await;
    let waiter = client_of(&proxy.url(), secs(30)).await;
    let guard = holder.lock(name).acquire().await.unwrap();
    let mut monitor = server.monitor().await;
    let taking = {
        let (waiter, name) = (waiter.clone(), name.to_owned());
        tokio::spawn(async move { waiter.lock(name).acquire().await.map(drop) })
    };
    // Once at first, and once behind its subscription.
    eventually(secs(5), "it asked twice", async || {
        monitor.script_calls(name).await >= 2
    })
    .await;
    // Answered behind those, on the same connection: what comes now answers the release's message.
    waiter.inspect(name).await.unwrap();
    let reply = proxy.inject(Fault::reply(bytes(name), Act::Hold));
    guard.release().await.into_result().unwrap();
    reply.hit().await;
    taking.abort();
    drop(taking.await);
    drop(waiter);
    // The end of the wait has gone through the background.
    server.cli().await.until_waiters(name, 0).await;
    reply
}

/// The line's task has an attempt under way when the last handle goes: its grant must be given back
/// by a background that is ending.
#[tokio::test]
async fn a_grant_that_comes_after_the_last_handle_has_gone_is_given_back() {
    let (proxy, name) = (Proxy::start(server().port()), unique_name());
    let reply = gone_before_its_grant_comes(&proxy, &name).await;
    reply.release();
    nothing_left(server(), &name).await;
}

/// As above, but the reply is lost: the sweep must be sent all the same.
#[tokio::test]
async fn an_attempt_that_is_unanswered_when_the_last_handle_goes_is_swept() {
    let (proxy, name) = (Proxy::start(server().port()), unique_name());
    gone_before_its_grant_comes(&proxy, &name).await;
    proxy.cut(common::Then::Reset);
    nothing_left(server(), &name).await;
}

/// A grant is offered to a future that nobody polls just then; `close` must not forget it.
#[tokio::test]
async fn close_gives_back_a_grant_that_is_on_offer() {
    let server = server();
    let name = unique_name();
    let client = client_of(&server.url(), secs(30)).await;
    let mut lock = client.lock(name.as_str());
    let mut taking = Box::pin(lock.acquire());
    let polled = taking
        .as_mut()
        .poll(&mut Context::from_waker(Waker::noop()));
    assert!(polled.is_pending());
    let cli = server.cli().await;
    eventually(secs(1), "granted", async || cli.exists(&name).await).await;
    // Answered behind the grant: that one has come.
    client.inspect(name.as_str()).await.unwrap();
    let report = client.close(secs(2)).await;
    let ended = taking.await;
    assert!(matches!(ended, Err(Error::Closed)), "{ended:?}");
    assert_eq!((report.lost, report.unconfirmed), (0, 0));
    nothing_left(server, &name).await;
}

/// The same with tasks: `close` at a random moment of a busy line.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn close_in_a_busy_line_leaves_nothing() {
    let server = server();
    for round in 0..40_u64 {
        let name = unique_name();
        let client = client_of(&server.url(), secs(30)).await;
        let tasks: Vec<_> = (0..20)
            .map(|_| {
                let (client, name) = (client.clone(), name.clone());
                tokio::spawn(async move {
                    loop {
                        match client.lock(name.as_str()).acquire().await {
                            Ok(guard) => drop(guard),
                            Err(Error::Closed) => return,
                            Err(other) => panic!("{other:?}"),
                        }
                    }
                })
            })
            .collect();
        tokio::time::sleep(ms(3) + std::time::Duration::from_micros(137 * round)).await;
        let (one, two) = tokio::join!(client.close(secs(2)), client.close(secs(2)));
        assert_eq!((one.lost + two.lost), 0, "{one:?} {two:?}");
        for task in tasks {
            task.await.unwrap();
        }
        nothing_left(server, &name).await;
    }
}

/// A renewal was refused, the renewed level left and was entered again: it must be renewed again.
#[tokio::test]
async fn a_renewed_level_entered_again_after_a_refused_renewal_is_renewed() {
    let server = Server::start();
    let name = unique_name();
    let client = client_of(&server.url(), secs(2)).await;
    let mut ctx = client.context();
    let outer = ctx
        .lock(name.as_str())
        .lease(secs(4))
        .acquire()
        .await
        .unwrap();
    let inner = ctx.lock(name.as_str()).acquire().await.unwrap();
    let cli = server.cli().await;
    cli.cmd(&["ACL", "SETUSER", "default", "-pexpire"])
        .await
        .ok();
    eventually(secs(5), "renewals are refused", async || {
        cli.cmd(&["ACL", "LOG"]).await.list().iter().any(|entry| {
            let fields = entry.clone().list();
            fields.get(1).is_some_and(|count| count.int() >= 2)
        })
    })
    .await;
    drop(inner);
    cli.cmd(&["ACL", "SETUSER", "default", "+pexpire"])
        .await
        .ok();
    let again = ctx.lock(name.as_str()).acquire().await.unwrap();
    // Longer than the fixed lease.
    tokio::time::sleep(ms(4200)).await;
    assert_eq!(again.loss_reason(), None);
    drop((again, outer));
    nothing_left(&server, &name).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_with_random_patience_take_turns() {
    let server = server();
    let name = unique_name();
    let clients = [
        client_of(&server.url(), secs(30)).await,
        client_of(&server.url(), secs(30)).await,
    ];
    let believers = Arc::new(Believers::default());
    let (start, ruler) = (Instant::now(), Ruler::start());
    let tasks: Vec<_> = (0..200_usize)
        .map(|i| {
            let (client, name) = (clients[i % 2].clone(), name.clone());
            let believers = Arc::clone(&believers);
            tokio::spawn(async move {
                let mut lock = client.lock(name);
                let patience = ms((i as u64 * 7919) % 150);
                let got = match i % 4 {
                    0 => lock.acquire().await.map(Some),
                    1 => lock.acquire_timeout(patience).await.map(Some),
                    2 => tokio::time::timeout(patience, lock.acquire())
                        .await
                        .map_or(Ok(None), |got| got.map(Some)),
                    _ => lock.try_acquire().await,
                };
                match got {
                    Ok(Some(guard)) => {
                        believers.turn(&guard).await;
                        i % 4 == 0
                    }
                    // The last: patience ended before the first answer came.
                    Ok(None) | Err(Error::TimedOut { .. } | Error::Indeterminate { .. }) => false,
                    Err(other) => panic!("{other:?}"),
                }
            })
        })
        .collect();
    let mut patient = 0;
    for task in tasks {
        patient += usize::from(task.await.unwrap());
    }
    assert_eq!(patient, 50, "somebody starved");
    let took = start.elapsed();
    assert!(took < secs(8) + ruler.allowance(), "{took:?}");
    nothing_left(server, &name).await;
}

/// Scripts forgotten, connections killed, the server paused and asleep: nobody errs or stays behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storms_on_the_server_break_nothing() {
    let server = Server::start();
    let name = unique_name();
    let believers = Arc::new(Believers::default());
    let until = Instant::now() + secs(2);
    let mut tasks = Vec::new();
    for _ in 0..3 {
        let client = client_of(&server.url(), secs(30)).await;
        for _ in 0..4 {
            let (client, name) = (client.clone(), name.clone());
            let believers = Arc::clone(&believers);
            tasks.push(tokio::spawn(async move {
                let mut ctx = client.context();
                while Instant::now() < until {
                    let guard = ctx.lock(name.as_str()).acquire().await.unwrap();
                    believers.turn(&guard).await;
                    let inner = ctx.lock(name.as_str()).acquire().await;
                    drop(guard);
                    inner.unwrap().release().await.into_result().unwrap();
                }
            }));
        }
    }
    let cli = server.cli().await;
    for i in 0.. {
        if Instant::now() > until {
            break;
        }
        match i % 8 {
            0 | 2 | 4 => drop(cli.cmd(&["SCRIPT", "FLUSH"]).await),
            1 => drop(cli.cmd(&["CLIENT", "KILL", "TYPE", "pubsub"]).await),
            3 => drop(
                cli.cmd(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"])
                    .await,
            ),
            5 => drop(cli.cmd(&["CLIENT", "PAUSE", "60", "WRITE"]).await),
            6 => drop(cli.cmd(&["DEBUG", "SLEEP", "0.05"]).await),
            _ => drop(cli.cmd(&["CLIENT", "PAUSE", "60", "ALL"]).await),
        }
        tokio::time::sleep(ms(20)).await;
    }
    for task in tasks {
        tokio::time::timeout(secs(20), task)
            .await
            .expect("hangs")
            .unwrap();
    }
    assert!(believers.turns.load(Ordering::SeqCst) > 20);
    nothing_left(&server, &name).await;
}

/// Tasks of one flow enter and leave while another client wants the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_flow_in_many_tasks_is_one_owner() {
    let server = server();
    let name = unique_name();
    let flows = Arc::new(AtomicI64::new(0)); // +1 per guard of flow 0, +1000 per guard of flow 1
    let mut tasks = Vec::new();
    for unit in [1, 1000] {
        let client = client_of(&server.url(), secs(30)).await;
        let ctx = client.context();
        for i in 0..6_u64 {
            let mut ctx = ctx.share();
            let (name, flows) = (name.clone(), Arc::clone(&flows));
            tasks.push(tokio::spawn(async move {
                for j in 0..15_u64 {
                    let guard = ctx.lock(name.as_str()).acquire().await.unwrap();
                    let inside = flows.fetch_add(unit, Ordering::SeqCst) + unit;
                    assert!(inside < 1000 || inside % 1000 == 0, "both flows: {inside}");
                    if (i + j) % 3 == 0 {
                        tokio::task::yield_now().await;
                    }
                    assert_eq!(guard.loss_reason(), None);
                    flows.fetch_sub(unit, Ordering::SeqCst);
                    if (i + j) % 2 == 0 {
                        guard.release().await.into_result().unwrap();
                    } else {
                        std::thread::spawn(move || drop(guard)).join().unwrap();
                    }
                    tokio::task::yield_now().await;
                }
            }));
        }
    }
    for task in tasks {
        tokio::time::timeout(secs(10), task)
            .await
            .expect("hangs")
            .unwrap();
    }
    nothing_left(server, &name).await;
}

#[tokio::test]
async fn keys_spoiled_behind_the_holder_are_told_as_what_they_are() {
    let server = server();
    let cli = server.cli().await;
    let client = client_of(&server.url(), secs(30)).await;
    let name = unique_name();
    let lock = || client.lock(name.as_str());

    let guard = lock().acquire().await.unwrap();
    cli.cmd(&["DEL", &name]).await.ok();
    assert!(matches!(
        guard.confirm().await,
        Err(Error::Lost {
            reason: LossReason::KeyGone,
            ..
        })
    ));
    assert_eq!(
        guard.release().await,
        ReleaseOutcome::Lost(LossReason::KeyGone)
    );

    let guard = lock().acquire().await.unwrap();
    cli.cmd(&["SET", &name, "text"]).await.ok();
    assert!(matches!(
        guard.extend(secs(40)).await,
        Err(Error::Lost {
            reason: LossReason::TakenByOther,
            ..
        })
    ));
    drop(guard);
    let got = lock().try_acquire().await;
    assert!(matches!(got, Err(Error::Conflict { .. })), "{got:?}");
    let got = lock().acquire().await;
    assert!(matches!(got, Err(Error::Conflict { .. })), "{got:?}");
    cli.cmd(&["DEL", &name]).await.ok();

    let guard = lock().acquire().await.unwrap();
    cli.cmd(&["HSET", &name, "ffffffff-ffff-ffff-ffff-ffffffffffff:7", "1"])
        .await
        .ok();
    guard.confirm().await.unwrap();
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    assert!(lock().try_acquire().await.unwrap().is_none());
    assert!(client.force_release(name.as_str()).await.unwrap());

    let guard = lock().acquire().await.unwrap();
    let first = guard.fencing_token().unwrap();
    cli.cmd(&["DEL", &token_key(&name)]).await.ok();
    guard.release().await.into_result().unwrap();
    let guard = lock().acquire().await.unwrap();
    assert!(guard.fencing_token().unwrap() > first);
    cli.cmd(&["SET", &token_key(&name), "text"]).await.ok();
    guard.confirm().await.unwrap();
    let mut ctx = guard.context();
    drop(ctx.lock(name.as_str()).acquire().await.unwrap());
    guard.release().await.into_result().unwrap();
    for spoil in [["SET", "text"], ["SET", "9007199254740991"], ["LPUSH", "a"]] {
        let key = token_key(&name);
        cli.cmd(&["DEL", &key]).await.ok();
        cli.cmd(&[spoil[0], &key, spoil[1]]).await.ok();
        let got = lock().try_acquire().await;
        assert!(
            matches!(got, Err(Error::Conflict { .. })),
            "{spoil:?}: {got:?}"
        );
    }
    nothing_left(server, &name).await;
}

/// A key without expiry gets one again, and none that ends before the holder's belief does.
#[tokio::test]
async fn a_persisted_hold_outlives_what_its_holder_believes() {
    let server = server();
    let cli = server.cli().await;
    let client = client_of(&server.url(), secs(30)).await;
    for way in ["confirm", "extend", "nested", "max_hold"] {
        let name = unique_name();
        let mut ctx = client.context();
        let guard = ctx.lock(name.as_str()).acquire().await.unwrap();
        cli.cmd(&["PERSIST", &name]).await.ok();
        match way {
            "confirm" => guard.confirm().await.unwrap(),
            "extend" => guard.extend(ms(100)).await.unwrap(),
            "max_hold" => drop(ctx.lock(name.as_str()).max_hold(ms(100)).acquire().await),
            _ => drop(ctx.lock(name.as_str()).lease(ms(100)).acquire().await),
        }
        tokio::time::sleep(ms(150)).await;
        let other = client.lock(name.as_str()).try_acquire().await.unwrap();
        let believers = usize::from(guard.is_held()) + usize::from(other.is_some());
        assert_eq!(believers, 1, "after {way}");
        drop((guard, other));
        nothing_left(server, &name).await;
    }
}

#[tokio::test]
async fn odd_and_huge_names_exclude_and_free() {
    let server = server();
    let cli = server.cli().await;
    let client = client_of(&server.url(), secs(30)).await;
    let base = unique_name();
    for name in [
        format!("{base}\0\r\n$3\r\nfoo"),
        format!("{base}{{}}}}{{"),
        format!("{base} \u{1f512}\"'*?[a]\\"),
        format!("{base}{}", "x".repeat(64 * 1024 - base.len())),
    ] {
        let guard = client.lock(name.as_str()).acquire().await.unwrap();
        assert!(
            client
                .lock(name.as_str())
                .try_acquire()
                .await
                .unwrap()
                .is_none()
        );
        let mut lock = client.lock(name.as_str());
        let mut waiting = pin!(lock.acquire());
        tokio::select! {
            got = &mut waiting => panic!("{got:?}"),
            () = tokio::time::sleep(ms(50)) => {}
        }
        guard.release().await.into_result().unwrap();
        waiting
            .await
            .unwrap()
            .release()
            .await
            .into_result()
            .unwrap();
        assert!(!cli.exists(&name).await);
    }
    nothing_left(server, &base).await;
}

#[tokio::test]
async fn forgotten_guards_end_with_max_hold() {
    let server = server();
    let client = client_of(&server.url(), secs(30)).await;
    let name = unique_name();
    let mut ctx = client.context();
    let outer = ctx
        .lock(name.as_str())
        .max_hold(secs(2))
        .acquire()
        .await
        .unwrap();
    let inner = ctx
        .lock(name.as_str())
        .lease(secs(5))
        .acquire()
        .await
        .unwrap();
    inner.extend(secs(9)).await.unwrap();
    let lost = inner.lost();
    let (begun, ruler) = (Instant::now(), Ruler::start());
    std::mem::forget((outer, inner));
    let guard = client
        .lock(name.as_str())
        .acquire_timeout(secs(8))
        .await
        .unwrap();
    let took = begun.elapsed();
    assert!(took < secs(3) + ruler.allowance(), "{took:?}");
    assert!(lost.is_cancelled());
    let again = ctx.lock(name.as_str()).try_acquire().await;
    assert!(
        matches!(
            again,
            Err(Error::Lost {
                reason: LossReason::MaxHold,
                ..
            })
        ),
        "{again:?}"
    );
    guard.release().await.into_result().unwrap();
    nothing_left(server, &name).await;
}

/// The runtime ends under guards, waiters and releases; what is left answers and never panics.
#[test]
fn a_runtime_that_ends_in_the_middle_takes_nobody_with_it() {
    let server = Server::start();
    for round in 0..10_u64 {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let (client, guard, name) = runtime.block_on(async {
            let name = unique_name();
            let client = client_of(&server.url(), secs(30)).await;
            let guard = client.lock(name.as_str()).acquire().await.unwrap();
            for i in 0..20 {
                let (client, name) = (client.clone(), name.clone());
                tokio::spawn(async move {
                    let name = if i % 2 == 0 { name } else { unique_name() };
                    loop {
                        drop(client.lock(name.as_str()).acquire().await);
                    }
                });
            }
            tokio::time::sleep(ms(round)).await;
            (client, guard, name)
        });
        runtime.shutdown_timeout(secs(1));
        assert_eq!(guard.loss_reason(), Some(LossReason::ClientClosed));
        let other = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        other.block_on(async {
            let taking = tokio::time::timeout(secs(5), client.lock(name).acquire()).await;
            assert!(matches!(taking, Ok(Err(Error::Closed))), "{taking:?}");
            let released = tokio::time::timeout(secs(5), guard.release()).await;
            assert_eq!(released, Ok(ReleaseOutcome::Lost(LossReason::ClientClosed)));
            let closing = tokio::time::timeout(secs(5), client.close(ms(100)));
            assert_eq!(closing.await.unwrap().lost, 0);
        });
    }
}

/// A runtime that stands still past the lease: its holder is lost at the first look.
#[test]
fn a_runtime_that_is_not_driven_loses_in_time() {
    let server = server();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let name = unique_name();
    let (client, guard) = runtime.block_on(async {
        let client = client_of(&server.url(), secs(30)).await;
        let mut lock = client.lock(name.as_str()).lease(ms(300));
        let guard = lock.acquire().await.unwrap();
        (client, guard)
    });
    std::thread::sleep(ms(400));
    assert_eq!(guard.loss_reason(), Some(LossReason::DeadlinePassed));
    runtime.block_on(async {
        let next = client
            .lock(name.as_str())
            .acquire_timeout(secs(5))
            .await
            .unwrap();
        drop(guard);
        next.confirm().await.unwrap();
        next.release().await.into_result().unwrap();
        nothing_left(server, &name).await;
    });
}

/// Clients come and go with waiters and releases outstanding: no task stays.
#[tokio::test]
async fn clients_that_come_and_go_leave_no_task() {
    let server = server();
    let tasks = || {
        tokio::runtime::Handle::current()
            .metrics()
            .num_alive_tasks()
    };
    let base = tasks();
    let name = unique_name();
    for _ in 0..20 {
        let one = client_of(&server.url(), secs(30)).await;
        let two = client_of(&server.url(), secs(30)).await;
        let guard = one.lock(name.as_str()).acquire().await.unwrap();
        let waited = two.lock(name.as_str()).acquire_timeout(ms(15)).await;
        assert!(waited.is_err_and(|error| error.is_retryable()));
        drop((one, two, guard));
    }
    nothing_left(server, &name).await;
    eventually(secs(3), "all tasks end", async || tasks() <= base).await;
}

/// A forced release between renewals and releases of others: typed ends, no orphan.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forced_releases_race_with_everything() {
    let server = server();
    let name = unique_name();
    let until = Instant::now() + secs(1);
    let mut tasks = Vec::new();
    for _ in 0..2 {
        let client = client_of(&server.url(), secs(30)).await;
        for _ in 0..3 {
            let (client, name) = (client.clone(), name.clone());
            tasks.push(tokio::spawn(async move {
                while Instant::now() < until {
                    let guard = client.lock(name.as_str()).acquire().await.unwrap();
                    match guard.extend(secs(31)).await {
                        Ok(()) | Err(Error::Lost { .. }) => {}
                        Err(other) => panic!("{other:?}"),
                    }
                    match guard.release().await {
                        ReleaseOutcome::Released | ReleaseOutcome::Lost(_) => {}
                        other => panic!("{other:?}"),
                    }
                }
            }));
        }
    }
    let operator = client_of(&server.url(), secs(30)).await;
    while Instant::now() < until {
        operator.force_release(name.as_str()).await.unwrap();
    }
    for task in tasks {
        tokio::time::timeout(secs(5), task)
            .await
            .expect("hangs")
            .unwrap();
    }
    nothing_left(server, &name).await;
}

/// Without memory, holds are renewed, nested and released; new ones are refused as what they are.
#[tokio::test]
async fn a_full_server_keeps_holds_and_refuses_new_ones() {
    let server = Server::start_with(&["--maxmemory-policy", "noeviction"]);
    let name = unique_name();
    let client = client_of(&server.url(), secs(2)).await;
    let mut ctx = client.context();
    let guard = ctx.lock(name.as_str()).acquire().await.unwrap();
    let cli = server.cli().await;
    cli.cmd(&["CONFIG", "SET", "maxmemory", "1"]).await.ok();
    tokio::time::sleep(ms(2400)).await;
    guard.confirm().await.unwrap();
    let other = client.lock(unique_name()).acquire().await;
    assert!(matches!(other, Err(Error::OutOfMemory { .. })), "{other:?}");
    let nested = ctx.lock(name.as_str()).acquire().await;
    assert!(
        matches!(nested, Err(Error::OutOfMemory { .. })),
        "{nested:?}"
    );
    drop(nested);
    guard.ensure_held().unwrap();
    assert_eq!(guard.depth(), 1);
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    nothing_left(&server, &name).await;
}

/// The server comes back empty under waiters: one of them gets it, all get their turn.
#[tokio::test]
async fn waiters_outlive_a_server_that_comes_back_empty() {
    let server = Server::start();
    let name = unique_name();
    let one = client_of(&server.url(), secs(30)).await;
    let two = client_of(&server.url(), secs(30)).await;
    let guard = one.lock(name.as_str()).acquire().await.unwrap();
    let before = guard.fencing_token().unwrap();
    let taking: Vec<_> = (0..5)
        .map(|_| {
            let (two, name) = (two.clone(), name.clone());
            tokio::spawn(async move {
                let guard = two.lock(name).acquire().await.unwrap();
                let token = guard.fencing_token().unwrap();
                guard.release().await.into_result().unwrap();
                token
            })
        })
        .collect();
    server.cli().await.until_waiters(&name, 1).await;
    server.restart().await;
    let mut tokens = vec![before];
    for task in taking {
        tokens.push(
            tokio::time::timeout(secs(10), task)
                .await
                .expect("hangs")
                .unwrap(),
        );
    }
    assert!(tokens.is_sorted(), "{tokens:?}");
    // It asked before the others had the lock, or after.
    let released = guard.release().await;
    let lost = LossReason::KeyGone;
    let or = LossReason::TakenByOther;
    assert!(
        released == ReleaseOutcome::Lost(lost) || released == ReleaseOutcome::Lost(or),
        "{released:?}"
    );
    nothing_left(&server, &name).await;
}
