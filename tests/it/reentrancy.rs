//! Who re-enters, and who waits: a flow of work is a value, not a thread or a task.

use std::time::Instant;

use leasehold::{Error, LockClient, LockContext, LockGuard, LossReason, ReleaseOutcome};
use tokio::sync::mpsc;

use crate::common::{self, Cli, Ruler, Server, Worker, WorkerSide, ms, secs, unique_name};
use crate::support::client_of;

async fn client() -> LockClient {
    client_of(&common::server().url(), secs(30)).await
}

async fn until_count(cli: &Cli, name: &str, count: Option<i64>) {
    let what = format!("count {count:?}");
    common::eventually(secs(5), &what, async || cli.count(name).await == count).await;
}

/// The third level, in a function that knows nothing of the other two.
async fn innermost(ctx: &mut LockContext, name: &str) -> LockGuard {
    ctx.lock(name).acquire().await.unwrap()
}

/// Across await and spawn, in the order in which functions return.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_levels_across_await_and_spawn_count_1_2_3_2_1_and_gone() {
    let (server, name) = (common::server(), unique_name());
    let (cli, client) = (server.cli().await, client().await);
    let mut ctx = client.context();
    let outer = ctx.lock(name.as_str()).acquire().await.unwrap();
    assert_eq!(cli.count(&name).await, Some(1));

    let middle = ctx.lock(name.as_str()).acquire().await.unwrap();
    assert_eq!((cli.count(&name).await, middle.depth()), (Some(2), 2));

    let (mut shared, inside) = (ctx.share(), name.clone());
    let inner = tokio::spawn(async move { innermost(&mut shared, &inside).await });
    let inner = inner.await.unwrap();
    assert_eq!((cli.count(&name).await, inner.depth()), (Some(3), 3));
    assert_eq!(outer.depth(), 3, "all levels see one depth");
    assert_eq!(
        cli.hash(&name).await.len(),
        1,
        "one owner, whatever the depth"
    );
    let token = outer.fencing_token().unwrap();
    assert_eq!(inner.fencing_token().unwrap(), token);

    let still_held = |depth| ReleaseOutcome::StillHeld { depth };
    assert_eq!(inner.release().await, still_held(2));
    assert_eq!(cli.count(&name).await, Some(2));
    assert_eq!(middle.release().await, still_held(1));
    assert_eq!(cli.count(&name).await, Some(1));
    assert_eq!(outer.fencing_token().unwrap(), token);
    assert_eq!(outer.release().await, ReleaseOutcome::Released);
    assert!(!cli.exists(&name).await);
    common::nothing_left(server, &name).await;
}

/// Not only in the order in which functions return: all six, by drop and by release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guards_may_be_dropped_in_any_order() {
    let (server, client) = (common::server(), client().await);
    let cli = server.cli().await;
    let orders = [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ];
    for order in orders {
        for by_drop in [true, false] {
            let name = unique_name();
            let mut ctx = client.context();
            let mut guards = Vec::new();
            for _ in 0..3 {
                guards.push(Some(ctx.lock(name.as_str()).acquire().await.unwrap()));
            }
            for (left, which) in [Some(2), Some(1), None].into_iter().zip(order) {
                let guard = guards[which].take().unwrap();
                if by_drop {
                    drop(guard);
                } else {
                    let outcome = guard.release().await;
                    let expected = match left {
                        Some(depth) => ReleaseOutcome::StillHeld { depth },
                        None => ReleaseOutcome::Released,
                    };
                    assert_eq!(outcome, expected, "{order:?}");
                    assert_eq!(cli.count(&name).await, left.map(i64::from), "{order:?}");
                }
                until_count(&cli, &name, left.map(i64::from)).await;
                for guard in guards.iter().flatten() {
                    assert_eq!((guard.is_held(), Some(guard.depth())), (true, left));
                }
            }
            common::nothing_left(server, &name).await;
        }
    }
}

/// All at once, without waiting for the server between the drops: nothing stays, though inner
/// releases are under way when the last one is posted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guards_dropped_at_once_leave_nothing() {
    let (server, client) = (common::server(), client().await);
    for round in 0..common::scaled(30, 1000) {
        let name = unique_name();
        let mut ctx = client.context();
        let mut guards = Vec::new();
        for _ in 0..4 {
            guards.push(ctx.lock(name.as_str()).acquire().await.unwrap());
        }
        if round % 2 == 0 {
            guards.reverse();
        }
        drop(guards);
        // Whoever comes next gets it as soon as the release is there.
        let next = client.lock(name.as_str()).acquire_timeout(secs(2)).await;
        assert_eq!(next.unwrap().release().await, ReleaseOutcome::Released);
        common::nothing_left(server, &name).await;
    }
}

/// Tasks of one flow that enter at the same moment: one grant, and a level for each.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tasks_that_share_a_context_enter_one_hold() {
    const TASKS: u32 = 8;
    let (server, name) = (common::server(), unique_name());
    let (cli, client) = (server.cli().await, client().await);
    let ctx = client.context();
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| {
            let (mut ctx, name) = (ctx.share(), name.clone());
            tokio::spawn(async move { ctx.lock(name).acquire().await.unwrap() })
        })
        .collect();
    let mut guards = Vec::new();
    for task in tasks {
        guards.push(task.await.unwrap());
    }
    assert_eq!(cli.count(&name).await, Some(i64::from(TASKS)));
    assert_eq!(cli.hash(&name).await.len(), 1);
    let token = guards[0].fencing_token().unwrap();
    for guard in &guards {
        assert_eq!(
            (guard.depth(), guard.fencing_token().unwrap()),
            (TASKS, token)
        );
    }
    let leaving: Vec<_> = guards
        .into_iter()
        .map(|guard| tokio::spawn(async move { guard.release().await }))
        .collect();
    let mut last = 0;
    for task in leaving {
        match task.await.unwrap() {
            ReleaseOutcome::Released => last += 1,
            ReleaseOutcome::StillHeld { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(last, 1, "one of them was the last one out");
    common::nothing_left(server, &name).await;
}

/// B82: two acquisitions in one task are two contenders unless a context says otherwise.
#[tokio::test]
async fn nothing_re_enters_without_the_context() {
    for client in [client().await, LockClient::in_memory()] {
        let name = unique_name();
        let mut ctx = client.context();
        let guard = ctx.lock(name.as_str()).acquire().await.unwrap();
        let mut others = [client.context(), ctx.fork(), guard.context().fork()];
        for other in &mut others {
            let tried = other.lock(name.as_str()).try_acquire().await.unwrap();
            assert!(tried.is_none(), "another contender got in");
        }
        // Time enough for answers on a busy machine: without one it would not be `TimedOut`.
        let waited = ctx
            .fork()
            .lock(name.as_str())
            .acquire_timeout(secs(1))
            .await;
        assert!(matches!(waited, Err(Error::TimedOut { .. })), "{waited:?}");
        let mut same = [ctx.share(), guard.context()];
        for (n, same) in (2..).zip(&mut same) {
            let again = same.lock(name.as_str()).try_acquire().await.unwrap();
            assert_eq!(again.unwrap().depth(), 2, "share {n}");
        }
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
    }
}

/// A try that comes right after somebody has given up waiting finds the line's task asleep: it is one
/// attempt all the same, answered after one round trip.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_try_right_after_a_waiter_gave_up_is_one_round_trip() {
    let (server, name) = (common::server(), unique_name());
    let client = client().await;
    let holder = self::client().await;
    let guard = holder.lock(name.as_str()).acquire().await.unwrap();
    for round in 0..common::scaled(30, 300) {
        // Long enough, now and then, for the waiter's subscription to be there.
        let wait = ms(1 + round % 10);
        let waited = client.lock(name.as_str()).acquire_timeout(wait).await;
        assert!(waited.is_err());
        let (started, ruler) = (Instant::now(), Ruler::start());
        let tried = client.lock(name.as_str()).try_acquire().await;
        assert!(matches!(tried, Ok(None)), "round {round}: {tried:?}");
        // The command timeout is 1 s.
        let took = started.elapsed();
        assert!(took < ms(700) + ruler.allowance(), "{took:?}");
    }
    drop(guard);
    common::nothing_left(server, &name).await;
}

/// The one ambient thing there is, asked for by name: `scope` and `current`. Spawned tasks are
/// outside of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn current_is_the_context_of_the_scope_and_of_nothing_else() {
    let (server, name) = (common::server(), unique_name());
    let client = client().await;
    assert!(LockContext::current().is_none());
    let mut ctx = client.context();
    let guard = ctx.lock(name.as_str()).acquire().await.unwrap();
    let depth = ctx.scope(async {
        let mut same = LockContext::current().unwrap();
        let again = same.lock(name.as_str()).acquire().await.unwrap();
        let spawned = tokio::spawn(async { LockContext::current().is_some() });
        assert!(!spawned.await.unwrap());
        let other = client.lock(name.as_str()).try_acquire().await.unwrap();
        assert!(
            other.is_none(),
            "a client's lock does not look at the scope"
        );
        again.depth()
    });
    assert_eq!(depth.await, 2);
    assert!(LockContext::current().is_none());
    drop(guard);
    common::nothing_left(server, &name).await;
}

/// Names are entered one by one: a second name is another hold, with a token of its own.
#[tokio::test]
async fn names_of_one_context_are_holds_of_their_own() {
    let (server, names) = (common::server(), [(); 2].map(|()| unique_name()));
    let (cli, client) = (server.cli().await, client().await);
    let mut ctx = client.context();
    let first = ctx.lock(names[0].as_str()).acquire().await.unwrap();
    let second = ctx.lock(names[1].as_str()).acquire().await.unwrap();
    assert_eq!((first.depth(), second.depth()), (1, 1));
    let owners = [cli.hash(&names[0]).await, cli.hash(&names[1]).await];
    assert_ne!(owners[0], owners[1]);
    assert_eq!(first.release().await, ReleaseOutcome::Released);
    assert_eq!(cli.count(&names[1]).await, Some(1));
    assert_eq!(second.release().await, ReleaseOutcome::Released);
    common::nothing_left(server, &names[0]).await;
    common::nothing_left(server, &names[1]).await;
}

/// A waiter gets in after the last level has left, not after an inner one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inner_releases_let_nobody_in_and_the_last_one_does() {
    let (server, name) = (common::server(), unique_name());
    let (cli, client) = (server.cli().await, client().await);
    let other = self::client().await;
    let mut ctx = client.context();
    let mut guards = Vec::new();
    for _ in 0..3 {
        guards.push(ctx.lock(name.as_str()).acquire().await.unwrap());
    }
    let token = guards[0].fencing_token().unwrap();
    let mut lock = other.lock(name.as_str());
    let waiting = tokio::spawn(async move { lock.acquire().await.unwrap() });
    cli.until_waiters(&name, 1).await;
    for depth in [2, 1] {
        let outcome = guards.swap_remove(0).release().await;
        assert_eq!(outcome, ReleaseOutcome::StillHeld { depth });
        assert_eq!(cli.count(&name).await, Some(i64::from(depth)));
        assert!(!waiting.is_finished());
    }
    let last = guards.pop().unwrap();
    assert_eq!(last.release().await, ReleaseOutcome::Released);
    let next = waiting.await.unwrap();
    assert!(next.fencing_token().unwrap() > token);
    drop(next);
    common::nothing_left(server, &name).await;
}

/// B78: a guard is a value: acquired in one task, sent, released in another, on another thread.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_is_released_by_another_task() {
    let (server, name) = (common::server(), unique_name());
    let client = client().await;
    let (send, mut receive) = mpsc::channel::<LockGuard>(1);
    let releasing = tokio::spawn(async move {
        let mut released = 0;
        while let Some(guard) = receive.recv().await {
            assert_eq!(guard.release().await, ReleaseOutcome::Released);
            released += 1;
        }
        released
    });
    let rounds = common::scaled(50, 2000);
    for _ in 0..rounds {
        let guard = client.lock(name.as_str()).acquire().await.unwrap();
        send.send(guard).await.unwrap();
    }
    drop(send);
    assert_eq!(releasing.await.unwrap(), rounds);
    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    std::thread::spawn(move || drop(guard)).join().unwrap();
    common::nothing_left(server, &name).await;
}

/// B05, rule 8: re-entry is through a live hold. While guards of a lost one are alive the flow is
/// told so, without asking the server; afterwards the name is fresh. Others are not concerned.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_hold_is_not_entered_again() {
    let (server, name) = (common::server(), unique_name());
    let client = client().await;
    let mut monitor = server.monitor().await;
    let mut ctx = client.context();
    let mut fixed = ctx.lock(name.as_str()).lease(ms(200));
    let guard = fixed.acquire().await.unwrap();
    guard.lost().cancelled().await;
    monitor.clear().await;
    let again = ctx.lock(name.as_str()).acquire().await;
    assert!(
        matches!(
            again,
            Err(Error::Lost {
                reason: LossReason::DeadlinePassed,
                ..
            })
        ),
        "{again:?}"
    );
    assert_eq!(monitor.script_calls(&name).await, 0);

    let other = client.lock(name.as_str()).acquire_timeout(secs(5)).await;
    assert_eq!(other.unwrap().release().await, ReleaseOutcome::Released);

    drop(guard);
    let fresh = ctx.lock(name.as_str()).acquire_timeout(secs(5)).await;
    assert_eq!(fresh.unwrap().depth(), 1);
    common::nothing_left(server, &name).await;
}

/// B79, S3: all levels of a lost hold are left by drop and by release, while another flow of the
/// same process has the lock: it keeps it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn levels_of_a_lost_hold_leave_the_next_owner_alone() {
    let (server, name) = (common::server(), unique_name());
    let (cli, client) = (server.cli().await, client().await);
    let mut ctx = client.context();
    let mut guards = Vec::new();
    for _ in 0..3 {
        let lock = ctx.lock(name.as_str()).lease(ms(1500)).acquire().await;
        guards.push(lock.unwrap());
    }
    let mut next = client.context();
    let theirs = next.lock(name.as_str()).acquire_timeout(secs(6)).await;
    let theirs = theirs.unwrap();
    let inner = next.lock(name.as_str()).acquire().await.unwrap();
    let owner = cli.hash(&name).await;
    let lost = ReleaseOutcome::Lost(LossReason::DeadlinePassed);
    assert_eq!(guards.remove(1).release().await, lost);
    assert_eq!(guards.remove(1).release().await, lost);
    // The last one out posts a release of the lost hold's own id: wait until it has arrived.
    let mut monitor = server.monitor().await;
    assert_eq!(guards.remove(0).release().await, lost);
    common::eventually(secs(2), "the late release", async || {
        monitor.script_calls(&name).await > 0
    })
    .await;
    assert_eq!(cli.hash(&name).await, owner);
    theirs.confirm().await.unwrap();
    assert_eq!(inner.depth(), 2);
    drop(inner);
    assert_eq!(theirs.release().await, ReleaseOutcome::Released);
    common::nothing_left(server, &name).await;
}

/// Two flows of one process, in two tasks, each nesting: never both inside.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_contexts_exclude_each_other_in_one_process() {
    for client in [client().await, LockClient::in_memory()] {
        let name = unique_name();
        let inside = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
        let tasks: Vec<_> = (0..2)
            .map(|_| {
                let (mut ctx, name, inside) = (client.context(), name.clone(), inside.clone());
                tokio::spawn(async move {
                    for _ in 0..common::scaled(50, 2000) {
                        let outer = ctx.lock(name.as_str()).acquire().await.unwrap();
                        assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                        let inner = ctx.lock(name.as_str()).acquire().await.unwrap();
                        assert_eq!(inner.depth(), 2);
                        tokio::task::yield_now().await;
                        drop(inner);
                        assert_eq!(inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst), 1);
                        drop(outer);
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
    }
}

/// The other process of the tests below: `take NAME` and `try NAME` answer `got DEPTH` or `taken`,
/// `leave` drops the newest guard.
#[tokio::test]
async fn contender_worker() {
    let Some(mut me) = WorkerSide::if_spawned() else {
        return;
    };
    let url = std::env::var("URL").unwrap();
    let client = client_of(&url, secs(30)).await;
    let mut ctx = client.context();
    let mut guards: Vec<LockGuard> = Vec::new();
    while let Some(line) = me.line().await {
        match line.split_once(' ') {
            Some(("take", name)) => guards.push(ctx.lock(name).acquire().await.unwrap()),
            Some(("try", name)) => {
                let Some(guard) = ctx.lock(name).try_acquire().await.unwrap() else {
                    me.say("taken");
                    continue;
                };
                guards.push(guard);
            }
            _ => {
                let outcome = guards.pop().unwrap().release().await;
                me.say(&format!("{outcome:?}"));
                continue;
            }
        }
        me.say(&format!("got {}", guards.last().unwrap().depth()));
    }
}

/// The same between processes: nested there, tried here, and the other way round.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_contexts_exclude_each_other_between_processes() {
    let (server, name) = (common::server(), unique_name());
    let (cli, client) = (server.cli().await, client().await);
    let url = server.url();
    let mut other = Worker::spawn("reentrancy::contender_worker", &[("URL", &url)]);
    for depth in 1..=3 {
        other.say(&format!("take {name}")).await;
        other.expect(&format!("got {depth}")).await;
        assert_eq!(cli.count(&name).await, Some(depth));
        let here = client.lock(name.as_str()).try_acquire().await.unwrap();
        assert!(here.is_none());
    }
    let mut ctx = client.context();
    let mut lock = ctx.lock(name.as_str());
    let waiting = tokio::spawn(async move { lock.acquire().await.unwrap() });
    cli.until_waiters(&name, 1).await;
    for depth in [2, 1] {
        other.say("leave").await;
        other
            .expect(&format!("StillHeld {{ depth: {depth} }}"))
            .await;
        assert!(!waiting.is_finished());
    }
    other.say("leave").await;
    other.expect("Released").await;
    let outer = waiting.await.unwrap();
    let inner = ctx.lock(name.as_str()).acquire().await.unwrap();
    for guard in [inner, outer] {
        other.say(&format!("try {name}")).await;
        other.expect("taken").await;
        drop(guard);
    }
    cli.until_free(&name).await;
    other.say(&format!("try {name}")).await;
    other.expect("got 1").await;
    other.say("leave").await;
    other.expect("Released").await;
    common::nothing_left(server, &name).await;
}

/// "No answer" is not "no": also for one who waits behind an acquisition of the same flow, which waits
/// for the server. Behind one that waits for others it is.
#[tokio::test]
async fn behind_ones_own_flow_silence_is_told_from_others() {
    let server = Server::start();
    let client = client_of(&server.url(), secs(30)).await;
    let mut told = Vec::new();
    for silent in [false, true] {
        let name = unique_name();
        let held = client.lock(name.as_str()).acquire().await.unwrap();
        let ctx = client.context();
        let (mut one, mut two) = (ctx.share(), ctx.share());
        if silent {
            server.stop();
        }
        let mut first = one.lock(name.as_str());
        let first = tokio::spawn(async move { first.acquire_timeout(secs(4)).await.map(drop) });
        tokio::task::yield_now().await;
        let second = two.lock(name.as_str()).acquire_timeout(secs(2)).await;
        told.push(matches!(second.map(drop), Err(Error::TimedOut { .. })));
        assert!(first.await.unwrap().is_err());
        server.cont();
        drop(held);
    }
    assert_eq!(told, [true, false]);
}

/// The hold is lost while the answer to an inner release is waited for: that is what is told.
#[tokio::test]
async fn an_inner_release_of_a_lost_hold_says_so() {
    let server = Server::start();
    let client = client_of(&server.url(), secs(10)).await;
    let name = unique_name();
    let mut ctx = client.context();
    let fixed = secs(3);
    let outer = ctx
        .lock(name.as_str())
        .lease(fixed)
        .acquire()
        .await
        .unwrap();
    let inner = ctx
        .lock(name.as_str())
        .lease(fixed)
        .acquire()
        .await
        .unwrap();
    server.stop();
    // What is released just before the deadline has no answer by then.
    tokio::time::sleep(outer.remaining().saturating_sub(ms(100))).await;
    let told = inner.release().await;
    let held = outer.is_held();
    server.cont();
    assert_eq!(
        held,
        matches!(told, ReleaseOutcome::StillHeld { .. }),
        "{told:?}"
    );
}
