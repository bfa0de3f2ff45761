//! The multi lock: several locks held together, all or none, in one order for everybody.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::{
    Error, Lock, LockClient, LockContext, LossReason, MultiGuard, MultiLock, ReleaseOutcome,
};
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::common::*;
use crate::support::*;

const LEASE: Duration = secs(6);

/// Longest time for what should happen at once, on a busy machine: still no lease.
const SOON: Duration = secs(3);

/// Longest time for what has many turns: a deadlock, not a slow machine.
const STUCK: Duration = secs(120);

async fn client() -> LockClient {
    client_of(&server().url(), LEASE).await
}

/// On a server, and in memory.
async fn clients() -> [LockClient; 2] {
    [client().await, LockClient::in_memory()]
}

/// `n` names in alphabetical order, unlike all others.
fn names<const N: usize>() -> [String; N] {
    let name = unique_name();
    std::array::from_fn(|i| format!("{name}-{i}"))
}

fn locks<'a>(ctx: &mut LockContext, names: impl IntoIterator<Item = &'a String>) -> Vec<Lock> {
    names
        .into_iter()
        .map(|name| ctx.lock(name.as_str()))
        .collect()
}

/// Of a flow of work of its own.
fn multi<'a>(client: &LockClient, names: impl IntoIterator<Item = &'a String>) -> MultiLock {
    MultiLock::new(locks(&mut client.context(), names))
}

async fn free(client: &LockClient, names: &[String]) {
    for name in names {
        next_one_enters(client, name, SOON).await;
    }
}

/// The token counter of a name, so far.
async fn counter(cli: &Cli, name: &str) -> Option<String> {
    cli.cmd(&["GET", &token_key(name)]).await.text_if_any()
}

// ---- exclusion ----

/// Each member is a lock as any other: its holder keeps the whole out, and the whole keeps everybody out.
#[tokio::test]
async fn all_members_exclude_and_are_excluded() {
    for client in clients().await {
        let [a, b, c, d] = names();
        let mut ctx = client.context();
        let members = || {
            let mut ctx = client.context();
            let (rw, read) = (ctx.rw_lock(c.as_str()), ctx.rw_lock(d.as_str()).read());
            [
                ctx.lock(a.as_str()),
                ctx.fair_lock(b.as_str()),
                rw.write(),
                read,
            ]
        };
        let others = |ctx: &mut LockContext| {
            let (read, write) = (
                ctx.rw_lock(c.as_str()).read(),
                ctx.rw_lock(d.as_str()).write(),
            );
            [ctx.lock(a.as_str()), ctx.fair_lock(b.as_str()), read, write]
        };
        for mut other in others(&mut ctx) {
            let held = other.acquire().await.unwrap();
            let tried = MultiLock::new(members()).try_acquire().await.unwrap();
            assert!(tried.is_none(), "{other:?}");
            let late = MultiLock::new(members()).acquire_timeout(ms(50)).await;
            let late = late.unwrap_err();
            assert!(
                matches!(&late, Error::TimedOut { name, .. } if name == other.name()),
                "{late:?}"
            );
            drop(held);
        }
        let whole = MultiLock::new(members())
            .acquire_timeout(SOON)
            .await
            .unwrap();
        for mut other in others(&mut ctx) {
            assert!(other.try_acquire().await.unwrap().is_none(), "{other:?}");
        }
        // Who reads lets others read.
        let reads = ctx.rw_lock(d.as_str()).read().try_acquire().await.unwrap();
        drop(reads.unwrap());
        assert_eq!(whole.release().await.overall(), ReleaseOutcome::Released);
        for mut other in others(&mut ctx) {
            drop(other.acquire_timeout(SOON).await.unwrap());
        }
    }
}

/// Takes all, `rounds` times, and is alone with them each time.
async fn take_turns(mut lock: MultiLock, rounds: usize, inside: Arc<Mutex<u64>>) {
    for _ in 0..rounds {
        let guard = lock.acquire().await.unwrap();
        {
            let mut inside = inside.try_lock().expect("alone");
            *inside += 1;
            // Others run in between.
            tokio::task::yield_now().await;
        }
        guard.release().await.into_result().unwrap();
    }
}

/// B55: given in opposite orders, they are taken in one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn opposite_orders_never_lock_up_in_200_rounds() {
    const ROUNDS: usize = 200;
    let memory = LockClient::in_memory();
    // In memory only one client knows of the names.
    for (first, second) in [(client().await, client().await), (memory.clone(), memory)] {
        let [a, b] = names();
        let inside = Arc::new(Mutex::new(0));
        let turns = [
            take_turns(multi(&first, [&a, &b]), ROUNDS, Arc::clone(&inside)),
            take_turns(multi(&second, [&b, &a]), ROUNDS, Arc::clone(&inside)),
        ];
        let turns = turns.map(tokio::spawn);
        for turn in turns {
            timeout(STUCK, turn).await.expect("no deadlock").unwrap();
        }
        assert_eq!(*inside.lock().await, 2 * ROUNDS as u64);
        free(&second, &[a, b]).await;
    }
}

/// B55: twenty flows of work of four clients, each time in another order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_orders_of_five_names_never_lock_up() {
    let names: [String; 5] = names();
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(client().await);
    }
    let inside = Arc::new(Mutex::new(0));
    let rounds = scaled(4, 40);
    let tasks: Vec<_> = (0..20)
        .map(|task| {
            let (client, names) = (clients[task % 4].clone(), names.clone());
            let inside = Arc::clone(&inside);
            tokio::spawn(async move {
                for round in 0..rounds {
                    // Another order each time, as from a hand of cards.
                    let mut left = names.to_vec();
                    let mut order = Vec::new();
                    let mut draw = task * 31 + round * 17;
                    while !left.is_empty() {
                        order.push(left.remove(draw % left.len()));
                        draw = draw / 3 + 7 * order.len();
                    }
                    take_turns(multi(&client, &order), 1, Arc::clone(&inside)).await;
                }
            })
        })
        .collect();
    for task in tasks {
        timeout(STUCK, task).await.expect("no deadlock").unwrap();
    }
    assert_eq!(*inside.lock().await, 20 * rounds as u64);
    free(&clients[0], &names).await;
    nothing_left(server(), &names[0]).await;
}

/// One name on two servers: the order is that of the servers, whatever ids the clients drew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_order_of_servers_does_not_hang_on_who_asks() {
    let second = Server::start();
    let name = unique_name();
    for _ in 0..scaled(8, 40) {
        let inside = Arc::new(Mutex::new(0));
        let mut turns = Vec::new();
        for backwards in [false, true] {
            let mut members = Vec::new();
            for url in [server().url(), second.url()] {
                let client = client_of(&url, LEASE).await;
                members.push(client.lock(name.as_str()));
            }
            if backwards {
                members.reverse();
            }
            let lock = MultiLock::new(members);
            turns.push(tokio::spawn(take_turns(lock, 15, Arc::clone(&inside))));
        }
        for turn in turns {
            timeout(STUCK, turn).await.expect("no deadlock").unwrap();
        }
        assert_eq!(*inside.lock().await, 30);
    }
    nothing_left(server(), &name).await;
    nothing_left(&second, &name).await;
}

// ---- all or nothing ----

#[tokio::test]
async fn an_attempt_takes_all_or_nothing() {
    for client in clients().await {
        let names: [String; 3] = names();
        for taken in 0..3 {
            let held = client.lock(names[taken].as_str()).acquire().await.unwrap();
            let tried = multi(&client, &names).try_acquire().await.unwrap();
            assert!(tried.is_none());
            let zero = multi(&client, &names).acquire_timeout(Duration::ZERO).await;
            assert!(
                matches!(zero, Err(Error::TimedOut { ref name, .. }) if *name == names[taken]),
                "{zero:?}"
            );
            let rest: Vec<String> = names
                .iter()
                .filter(|name| **name != names[taken])
                .cloned()
                .collect();
            free(&client, &rest).await;
            assert!(held.is_held());
            held.release().await.into_result().unwrap();
        }
        let all = multi(&client, &names).try_acquire().await.unwrap().unwrap();
        assert!(all.is_held());
        drop(all);
        free(&client, &names).await;
    }
}

/// One limit for all, not one for each: both members are held, and the first is freed half-way.
#[tokio::test(start_paused = true)]
async fn one_limit_covers_all_members() {
    let client = LockClient::in_memory();
    let names: [String; 2] = names();
    let first = client.lock(names[0].as_str()).acquire().await.unwrap();
    let _second = client.lock(names[1].as_str()).acquire().await.unwrap();
    let start = tokio::time::Instant::now();
    let freed = async {
        tokio::time::sleep(secs(6)).await; // virtual: the subject is the time that is left
        first.release().await
    };
    let mut lock = multi(&client, &names);
    let (error, outcome) = futures_util::join!(lock.acquire_timeout(secs(10)), freed);
    assert_eq!(outcome, ReleaseOutcome::Released);
    match error.unwrap_err() {
        Error::TimedOut {
            name,
            waited,
            own_client,
        } => {
            assert_eq!(name, names[1]);
            assert!(own_client);
            assert!((secs(10)..secs(11)).contains(&waited), "{waited:?}");
        }
        other => panic!("{other:?}"),
    }
    assert!(
        (secs(10)..secs(11)).contains(&start.elapsed()),
        "{:?}",
        start.elapsed()
    );
    free(&client, &names[..1]).await;
}

/// B56: zero, the shortest, the longest, leases shorter than the wait: granted in time or not at all, and never to
/// two.
#[tokio::test(start_paused = true)]
async fn whatever_limits_and_leases_one_holds_or_none() {
    let limits = [
        Duration::ZERO,
        ms(1),
        ms(500),
        secs(2),
        secs(40),
        Duration::MAX,
    ];
    let leases = [
        None,
        Some(ms(100)),
        Some(ms(900)),
        Some(secs(3)),
        Some(secs(365 * 24 * 3600)),
    ];
    for limit in limits {
        for lease in leases {
            let client = LockClient::in_memory();
            let names: [String; 3] = names();
            let others = multi(&client, &names[1..]).acquire().await.unwrap();
            let held = Arc::new(Mutex::new(()));
            let inside = held.clone().lock_owned().await;
            let members = locks(&mut client.context(), &names).into_iter();
            let mut lock = MultiLock::new(members.map(|member| match lease {
                Some(lease) => member.lease(lease),
                None => member,
            }));
            let start = tokio::time::Instant::now();
            let leaves = async {
                tokio::time::sleep(secs(1)).await; // virtual
                drop(inside);
                drop(others);
            };
            let takes = async {
                let taken = lock.acquire_timeout(limit).await;
                (
                    taken.map(|guard| (guard, held.try_lock().is_ok())),
                    start.elapsed(),
                )
            };
            let ((), (taken, after)) = futures_util::join!(leaves, takes);
            match taken {
                Ok((guard, alone)) => {
                    assert!(
                        alone && limit > secs(1) && after < secs(2),
                        "{limit:?} {lease:?} {after:?}"
                    );
                    drop(guard);
                }
                Err(Error::TimedOut { .. }) => {
                    assert!(
                        limit < secs(1) && after < limit + ms(100),
                        "{limit:?} {lease:?} {after:?}"
                    );
                }
                Err(other) => panic!("{limit:?} {lease:?}: {other:?}"),
            }
            free(&client, &names).await;
        }
    }
}

/// B56: the first one's lease ends while the second is waited for: both are taken afresh.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_whose_lease_ends_meanwhile_is_taken_again() {
    let (client, other) = (client().await, client().await);
    let [a, b] = names();
    let cli = server().cli().await;
    let held = other.lock(b.as_str()).acquire().await.unwrap();
    let mut ctx = client.context();
    let members = [ctx.lock(a.as_str()).lease(ms(300)), ctx.lock(b.as_str())];
    let mut lock = MultiLock::new(members);
    let waiting = tokio::spawn(async move { lock.acquire_timeout(secs(60)).await });
    let first = eventually_some(async || counter(&cli, &a).await).await;
    eventually(SOON, "taken again", async || {
        counter(&cli, &a).await.is_some_and(|now| now > first)
    })
    .await;
    held.release().await.into_result().unwrap();
    let guard = waiting.await.unwrap().unwrap();
    guard.ensure_held().unwrap();
    let token = guard.members()[0].fencing_token().unwrap().to_string();
    assert!(token > first, "{token} after {first}");
    assert!(guard.remaining() <= ms(300));
    drop(guard);
    free(&client, &[a, b]).await;
}

async fn eventually_some<T>(mut what: impl AsyncFnMut() -> Option<T>) -> T {
    let mut found = None;
    eventually(SOON, "a value", async || {
        found = what().await;
        found.is_some()
    })
    .await;
    found.unwrap()
}

// ---- failures ----

/// Two servers, and one of them is gone: an error that names its member, in time, and nothing is left on the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_down_fails_the_whole_in_time() {
    let down = Server::start();
    let (up, gone) = (client().await, client_of(&down.url(), LEASE).await);
    let [a, b, c] = names();
    down.kill();
    // Behind a member that works, and before one.
    for unreachable in [&b, &a] {
        let limit = ms(700);
        let mut lock = MultiLock::new([
            if unreachable == &a {
                up.lock(b.as_str())
            } else {
                up.lock(a.as_str())
            },
            gone.lock(unreachable.as_str()),
            up.lock(c.as_str()),
        ]);
        for way in ["timeout", "try"] {
            let ruler = Ruler::start();
            let error = match way {
                "timeout" => lock.acquire_timeout(limit).await.unwrap_err(),
                _ => lock.try_acquire().await.unwrap_err(),
            };
            let longest = if way == "timeout" { limit } else { secs(1) };
            let (taken, allowed) = (ruler.taken(), longest + ruler.allowance());
            assert!(taken < allowed, "{way}: {taken:?}, not {allowed:?}");
            assert!(
                matches!(
                    error,
                    Error::Unreachable { .. } | Error::Indeterminate { .. }
                ),
                "{way}: {error:?}"
            );
            assert!(
                words(&error).contains(unreachable.as_str()),
                "{}",
                words(&error)
            );
            assert!(error.is_retryable());
        }
    }
    free(&up, &[a.clone(), b, c]).await;
    nothing_goes_on(server(), &a[..a.len() - 2], LEASE).await;
}

/// A member that is something else is named, and those before it are free.
#[tokio::test]
async fn a_member_that_is_in_other_use_is_named() {
    let client = client().await;
    let names: [String; 3] = names();
    let cli = server().cli().await;
    cli.cmd(&["SET", &names[2], "a value"]).await.ok();
    let error = multi(&client, &names).acquire().await.unwrap_err();
    assert!(
        matches!(&error, Error::Conflict { name, .. } if *name == names[2]),
        "{error:?}"
    );
    free(&client, &names[..2]).await;
    cli.cmd(&["DEL", &names[2]]).await.ok();
    nothing_left(server(), &names[0]).await;
}

/// What cannot work is said before anything is sent.
#[tokio::test]
async fn what_cannot_work_is_a_config_error() {
    for client in clients().await {
        let [a, b] = names();
        let mut ctx = client.context();
        let impossible = [
            (MultiLock::new([]), "at least one"),
            (
                MultiLock::new([ctx.lock(a.as_str()), ctx.lock("")]),
                "member ``",
            ),
            (
                MultiLock::new([ctx.lock(a.as_str()), ctx.lock(b.as_str()).lease(ms(1))]),
                b.as_str(),
            ),
            (
                MultiLock::new([ctx.lock(a.as_str()), ctx.fair_lock(a.as_str())]),
                "exclude each other",
            ),
            (
                MultiLock::new([
                    client.rw_lock(a.as_str()).write(),
                    client.rw_lock(a.as_str()).read(),
                ]),
                "exclude each other",
            ),
        ];
        for (mut lock, part) in impossible {
            for error in [
                lock.acquire().await.err(),
                lock.acquire_timeout(SOON).await.err(),
                lock.try_acquire().await.err(),
                lock.run(async |_| Ok::<_, Error>(())).await.err(),
            ] {
                let error = error.expect("refused");
                assert!(matches!(error, Error::Config { .. }), "{error:?}");
                assert!(error.to_string().contains(part), "{error}");
            }
        }
        free(&client, &[a, b]).await;
    }
}

/// A client that closes ends the wait for its member, and the others are free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_closes_ends_the_whole() {
    let (one, two, other) = (client().await, client().await, client().await);
    let names: [String; 2] = names();
    let held = other.lock(names[1].as_str()).acquire().await.unwrap();
    let members = [one.lock(names[0].as_str()), two.lock(names[1].as_str())];
    let waiting = tokio::spawn(async move { MultiLock::new(members).acquire().await });
    server().cli().await.until_waiters(&names[1], 1).await;
    two.close(secs(1)).await;
    let error = waiting.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Closed), "{error:?}");
    free(&one, &names[..1]).await;
    drop(held);
}

// ---- cancellation ----

#[derive(Clone, Copy, Debug)]
enum Way {
    Acquire,
    Timeout,
    Try,
    Run,
}

const WAYS: [Way; 4] = [Way::Acquire, Way::Timeout, Way::Try, Way::Run];

impl Way {
    async fn take(self, mut lock: MultiLock) -> Result<(), Error> {
        match self {
            Self::Acquire => lock.acquire().await.map(drop),
            Self::Timeout => lock.acquire_timeout(secs(10)).await.map(drop),
            Self::Try => lock.try_acquire().await.map(drop),
            Self::Run => {
                lock.run(async |guard: &MultiGuard| {
                    for _ in 0..10 {
                        guard.ensure_held()?;
                        tokio::task::yield_now().await;
                    }
                    Ok(())
                })
                .await
            }
        }
    }
}

/// B55: at each moment of taking five.
#[test]
fn a_taking_dropped_at_any_poll_leaves_nothing() {
    turn_by_turn(async {
        for client in clients().await {
            let prefix = unique_name();
            for way in WAYS {
                let mut polls = 0;
                loop {
                    let names: [String; 5] =
                        std::array::from_fn(|i| format!("{prefix}-{way:?}-{polls}-{i}"));
                    let mut ctx = client.context();
                    let lock = MultiLock::new(locks(&mut ctx, &names));
                    let done = polled(polls, way.take(lock)).await;
                    for name in &names {
                        // The same flow of work has no trace of it, and nobody else is kept out.
                        let again = ctx.lock(name.as_str()).acquire_timeout(SOON).await;
                        assert_eq!(again.unwrap().depth(), 1);
                        next_one_enters(&client, name, SOON).await;
                    }
                    if let Some(done) = done {
                        done.unwrap();
                        break;
                    }
                    polls = next(polls);
                    assert!(polls < 20_000);
                }
            }
            nothing_goes_on(server(), &prefix, LEASE).await;
        }
    });
}

/// B55: while the third of five is waited for.
#[test]
fn a_wait_dropped_at_any_poll_leaves_nothing() {
    turn_by_turn(async {
        let (client, other) = (client().await, client().await);
        let names: [String; 5] = names();
        let cli = server().cli().await;
        for way in WAYS {
            let held = other.lock(names[2].as_str()).acquire().await.unwrap();
            let mut polls = 0;
            // Beyond these it sleeps, subscribed.
            while polls < 400 {
                if let Some(done) = polled(polls, way.take(multi(&client, &names))).await {
                    assert!(matches!(way, Way::Try), "{done:?}");
                    done.unwrap();
                    break;
                }
                free(&client, &names[..2]).await;
                polls = next(polls);
            }
            cli.until_waiters(&names[2], 0).await;
            assert_eq!(cli.count(&names[2]).await, Some(1));
            held.release().await.into_result().unwrap();
            free(&client, &names).await;
        }
        nothing_goes_on(server(), &names[0][..names[0].len() - 2], LEASE).await;
    });
}

// ---- loss ----

/// Loss of one is loss of all; the rest stays on the server until the guard goes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loss_of_one_member_is_told_and_the_others_go_with_the_guard() {
    let client = client().await;
    let names: [String; 3] = names();
    let cli = server().cli().await;
    let guard = multi(&client, &names).acquire().await.unwrap();
    let lost = guard.lost();
    assert!(guard.is_held() && guard.remaining() > Duration::ZERO && !lost.is_cancelled());
    guard.confirm().await.unwrap();
    cli.cmd(&["DEL", &names[1]]).await.ok();
    // What the server knows earlier than the clock is told at the next renewal, or now.
    let named = |error: Error| {
        let reason = LossReason::KeyGone;
        assert!(
            matches!(&error, Error::Lost { name, reason: why } if *name == names[1] && *why == reason),
            "{error:?}"
        );
    };
    named(guard.confirm().await.unwrap_err());
    assert!(lost.is_cancelled());
    assert_eq!(guard.loss_reason(), Some(LossReason::KeyGone));
    assert!(!guard.is_held());
    assert_eq!(guard.remaining(), Duration::ZERO);
    named(guard.ensure_held().unwrap_err());
    named(guard.tokens().unwrap_err());
    named(guard.run(std::future::pending::<()>()).await.unwrap_err());
    for other in [&names[0], &names[2]] {
        assert_eq!(cli.count(other).await, Some(1));
    }
    let released = guard.release().await;
    let outcomes: Vec<_> = released
        .members()
        .iter()
        .map(|(name, outcome)| (name, *outcome))
        .collect();
    let gone = ReleaseOutcome::Lost(LossReason::KeyGone);
    assert_eq!(
        outcomes,
        [
            (&names[0], ReleaseOutcome::Released),
            (&names[1], gone),
            (&names[2], ReleaseOutcome::Released)
        ]
    );
    assert_eq!(released.overall(), gone);
    assert_eq!(released.into_result(), Err(LossReason::KeyGone));
    nothing_left(server(), &names[0][..names[0].len() - 2]).await;
}

/// Nobody looks: `lost()` is told by itself, whichever member it is, and stops the work.
#[tokio::test(start_paused = true)]
async fn a_lost_member_stops_the_work() {
    let client = LockClient::in_memory();
    let names: [String; 3] = names();
    for shortest in 0..3 {
        let members = locks(&mut client.context(), &names).into_iter().enumerate();
        let mut lock = MultiLock::new(members.map(|(at, member)| {
            if at == shortest {
                member.lease(ms(500))
            } else {
                member
            }
        }));
        let guard = lock.acquire().await.unwrap();
        let start = tokio::time::Instant::now();
        guard.lost().cancelled().await;
        assert!(start.elapsed() <= ms(500), "{:?}", start.elapsed());
        assert_eq!(guard.loss_reason(), Some(LossReason::DeadlinePassed));
        drop(guard);

        let start = tokio::time::Instant::now();
        let stopped = lock.run(async |_| -> Result<(), Error> { std::future::pending().await });
        let error = stopped.await.unwrap_err();
        assert!(
            matches!(&error, Error::Lost { name, .. } if *name == names[shortest]),
            "{error:?}"
        );
        assert!(start.elapsed() <= ms(500), "{:?}", start.elapsed());
        free(&client, &names).await;

        // Work that blocks the thread past the end is not "done under the lock".
        let late = lock.run(async |_| {
            tokio::time::advance(secs(1)).await;
            Ok::<_, Error>(())
        });
        let error = late.await.unwrap_err();
        assert!(matches!(error, Error::Lost { .. }), "{error:?}");
    }
    // Loss by force is told at once, and the reason is that of the first.
    let guard = multi(&client, &names).acquire().await.unwrap();
    let lost = guard.lost();
    assert!(client.force_release(names[2].as_str()).await.unwrap());
    lost.cancelled().await;
    assert!(client.force_release(names[0].as_str()).await.unwrap());
    let error = guard.ensure_held().unwrap_err();
    assert!(
        matches!(&error, Error::Lost { name, reason: LossReason::Forced } if *name == names[2]),
        "{error:?}"
    );
}

/// Nor is it told without one: by a release, a drop, or a child that is cancelled.
#[tokio::test(start_paused = true)]
async fn a_normal_release_is_no_loss() {
    let client = LockClient::in_memory();
    let names: [String; 2] = names();
    for dropped in [false, true] {
        let guard = multi(&client, &names).acquire().await.unwrap();
        guard.lost().cancel();
        let lost = guard.lost();
        assert!(!lost.is_cancelled());
        if dropped {
            drop(guard);
        } else {
            guard.release().await.into_result().unwrap();
        }
        free(&client, &names).await;
        // Virtual: longer than the leases that were left.
        tokio::time::sleep(secs(100)).await;
        assert!(!lost.is_cancelled());
    }
    // Whose runtime ends with its locks has lost them.
    let guard = multi(&client, &names).acquire().await.unwrap();
    let lost = guard.lost();
    client.close(Duration::ZERO).await;
    lost.cancelled().await;
    assert_eq!(guard.loss_reason(), Some(LossReason::ClientClosed));
}

// ---- tokens, levels, duplicates ----

#[tokio::test]
async fn tokens_are_per_member_and_rise() {
    for client in clients().await {
        let names: [String; 3] = names();
        let mut last = Vec::new();
        for _ in 0..5 {
            let reversed = names.iter().rev();
            let guard = multi(&client, reversed).acquire().await.unwrap();
            let tokens = guard.tokens().unwrap();
            let of: Vec<&str> = tokens.iter().map(|(name, _)| *name).collect();
            assert_eq!(of, names, "in their order, not in the one given");
            let tokens: Vec<_> = tokens.into_iter().map(|(_, token)| token).collect();
            for (now, before) in tokens.iter().zip(&last) {
                assert!(now > before, "{now} after {before}");
            }
            for (guard, token) in guard.members().iter().zip(&tokens) {
                assert_eq!(guard.fencing_token().unwrap(), *token);
            }
            last = tokens;
            guard.release().await.into_result().unwrap();
        }
    }
}

/// What this flow of work holds already is entered again, and stays held.
#[tokio::test]
async fn members_that_are_held_already_are_entered_again() {
    for client in clients().await {
        let names: [String; 3] = names();
        let mut ctx = client.context();
        let outer = ctx.lock(names[1].as_str()).acquire().await.unwrap();
        let token = outer.fencing_token().unwrap();
        let mut lock = MultiLock::new(locks(&mut ctx, &names));
        let guard = lock.try_acquire().await.unwrap().unwrap();
        let depths: Vec<u32> = guard
            .members()
            .iter()
            .map(leasehold::LockGuard::depth)
            .collect();
        assert_eq!(depths, [1, 2, 1]);
        assert_eq!(guard.tokens().unwrap()[1].1, token);
        // And within it, by the same flow: one of them, or all.
        let inner = ctx.lock(names[0].as_str()).acquire().await.unwrap();
        assert_eq!(inner.depth(), 2);
        let again = lock.acquire().await.unwrap();
        let again = again.release().await;
        assert_eq!(again.overall(), ReleaseOutcome::StillHeld { depth: 2 });
        drop(inner);
        let released = guard.release().await;
        let outcomes: Vec<_> = released
            .members()
            .iter()
            .map(|(_, outcome)| *outcome)
            .collect();
        let still = ReleaseOutcome::StillHeld { depth: 1 };
        assert_eq!(
            outcomes,
            [ReleaseOutcome::Released, still, ReleaseOutcome::Released]
        );
        assert_eq!(released.overall(), still);
        assert_eq!(outer.release().await, ReleaseOutcome::Released);
        free(&client, &names).await;

        // A level that was lost is not entered, and says which one it is.
        let outer = ctx.lock(names[1].as_str()).acquire().await.unwrap();
        assert!(client.force_release(names[1].as_str()).await.unwrap());
        let error = lock.acquire().await.unwrap_err();
        assert!(
            matches!(&error, Error::Lost { name, .. } if *name == names[1]),
            "{error:?}"
        );
        free(&client, &names).await;
        drop(outer);
        drop(lock.acquire().await.unwrap());
    }
}

/// One lock given several times is one member; the sides of a read/write lock are two, writing first.
#[tokio::test(start_paused = true)]
async fn a_lock_given_twice_is_one_member() {
    let client = LockClient::in_memory();
    let [a, b] = names();
    let given = [&b, &a, &b, &a].map(|name| client.lock(name.as_str()));
    let mut lock = MultiLock::new(given);
    assert_eq!(lock.names().collect::<Vec<_>>(), [&a, &b]);
    let guard = lock.acquire_timeout(secs(1)).await.unwrap();
    assert!(guard.members().iter().all(|guard| guard.depth() == 1));
    assert_eq!(guard.release().await.overall(), ReleaseOutcome::Released);

    // As if entered twice: renewed if one is, for the smaller longest time.
    let bounded = client.lock(a.as_str()).max_hold(secs(60));
    let mut lock = MultiLock::new([client.lock(a.as_str()).lease(ms(100)), bounded]);
    let guard = lock.acquire().await.unwrap();
    let start = tokio::time::Instant::now();
    guard.lost().cancelled().await;
    assert_eq!(guard.loss_reason(), Some(LossReason::MaxHold));
    assert!(
        (secs(58)..=secs(60)).contains(&start.elapsed()),
        "{:?}",
        start.elapsed()
    );
    drop(guard);

    let mut ctx = client.context();
    let rw = ctx.rw_lock(b.as_str());
    let guard = MultiLock::new([rw.read(), rw.write(), rw.read()])
        .acquire()
        .await
        .unwrap();
    assert_eq!(guard.members().len(), 2);
    assert_eq!(guard.members()[1].depth(), 2);
    guard.release().await.into_result().unwrap();
}

/// By two clients of one server, too: they would wait for each other.
#[tokio::test]
async fn a_lock_given_by_two_clients_of_a_server_is_one_member() {
    let [a, b] = names();
    let (one, two) = (client().await, client().await);
    let given = [
        one.lock(a.as_str()),
        two.lock(a.as_str()),
        two.lock(b.as_str()),
    ];
    let mut lock = MultiLock::new(given);
    assert_eq!(lock.names().collect::<Vec<_>>(), [&a, &b]);
    let guard = lock.acquire_timeout(SOON).await.unwrap();
    assert_eq!(guard.release().await.overall(), ReleaseOutcome::Released);
    // Two servers are two locks.
    let second = Server::start();
    let far = client_of(&second.url(), LEASE).await;
    let mut lock = MultiLock::new([one.lock(a.as_str()), far.lock(a.as_str())]);
    let guard = lock.acquire().await.unwrap();
    assert_eq!(guard.members().len(), 2);
    for client in [&one, &far] {
        assert!(
            client
                .lock(a.as_str())
                .try_acquire()
                .await
                .unwrap()
                .is_none()
        );
    }
    assert_eq!(guard.release().await.overall(), ReleaseOutcome::Released);
}

/// A member without an answer is unconfirmed, and takes no other's time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_says_of_each_member_how_it_went() {
    let second = Server::start();
    let (near, far) = (client().await, client_of(&second.url(), LEASE).await);
    let [a, b] = names();
    let mut lock = MultiLock::new([near.lock(b.as_str()), far.lock(a.as_str())]);
    let guard = lock.acquire().await.unwrap();
    second.stop();
    let ruler = Ruler::start();
    let released = guard.release().await;
    let (taken, allowed) = (ruler.taken(), secs(1) + ruler.allowance());
    assert!(taken < allowed, "{taken:?}, not {allowed:?}");
    assert_eq!(released.members()[1], (b.clone(), ReleaseOutcome::Released));
    let (name, outcome) = &released.members()[0];
    assert_eq!(*name, a);
    assert!(
        matches!(outcome, ReleaseOutcome::Unconfirmed { at_most } if *at_most <= LEASE),
        "{outcome:?}"
    );
    assert_eq!(released.overall(), *outcome);
    released.into_result().unwrap();
    second.cont();
    let start = Instant::now();
    second.cli().await.until_free(&a).await;
    assert!(start.elapsed() < LEASE);
    free(&near, &[b]).await;
}
