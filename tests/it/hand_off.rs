//! Hand-off: a lock that is left goes to the next in line of the same client in one operation.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use leasehold::{Error, FencingToken, LockClient, LockGuard, ReleaseOutcome};
use tokio::task::JoinHandle;

use crate::common::ruler::Ruler;
use crate::common::*;
use crate::support::{client_of, connected, next, polled};

const LEASE: Duration = secs(10);

/// The hash by which the server knows the script.
fn script() -> String {
    let parts = [
        include_str!("../../src/store/redis/lua/prelude.lua"),
        include_str!("../../src/store/redis/lua/tokens.lua"),
        include_str!("../../src/store/redis/lua/lock_hand_off.lua"),
    ];
    fred::util::sha1_hash(&parts.join("\n"))
}

/// Lets the server know it, so that the reply that a fault singles out is an answer.
async fn script_known(client: &LockClient) {
    let name = unique_name();
    let first = client.lock(name.as_str()).acquire().await.unwrap();
    let second = waits(client, &name);
    server().cli().await.until_waiters(&name, 1).await;
    drop(first);
    let second = second.await.unwrap();
    assert_eq!(second.release().await, ReleaseOutcome::Released);
}

fn waits(client: &LockClient, name: &str) -> JoinHandle<LockGuard> {
    let mut lock = client.lock(name);
    tokio::spawn(async move { lock.acquire().await.unwrap() })
}

/// A holder and `waiters` behind it, in this order, all in line.
async fn line(
    client: &LockClient,
    name: &str,
    waiters: usize,
) -> (LockGuard, Vec<JoinHandle<LockGuard>>) {
    let first = client.lock(name).acquire().await.unwrap();
    let mut waiting = Vec::new();
    for _ in 0..waiters {
        waiting.push(waits(client, name));
        // Each takes its place when it is first polled.
        tokio::task::yield_now().await;
    }
    server().cli().await.until_waiters(name, 1).await;
    (first, waiting)
}

/// No more than one script a turn and no message between, as long as a chain lasts.
#[tokio::test]
async fn a_busy_lock_costs_no_more_than_one_script_a_turn() {
    const WAITERS: usize = 10;
    let client = client_of(&server().url(), LEASE).await;
    script_known(&client).await;
    // On a busy machine the turns may take longer than a chain may last, or longer than is quick: then once more.
    for _ in 0..50 {
        // Of those who have it for less than a millisecond, and of those who have it for longer.
        let (mut calls, mut seen) = ([0, 0], [0, 0]);
        let mut quick = true;
        for (slow, (calls, hand_offs_seen)) in [false, true]
            .into_iter()
            .zip(calls.iter_mut().zip(&mut seen))
        {
            let name = unique_name();
            let mut monitor = server().monitor().await;
            let (mut guard, waiting) = line(&client, &name, WAITERS).await;
            let before = monitor.script_calls(&name).await;
            let start = Instant::now();
            for next in waiting {
                let had = Instant::now();
                while slow && had.elapsed() < ms(2) {
                    std::hint::spin_loop();
                }
                let token = guard.fencing_token().unwrap();
                assert_eq!(guard.release().await, ReleaseOutcome::Released);
                guard = next.await.unwrap();
                assert!(guard.fencing_token().unwrap() > token);
            }
            assert_eq!(guard.release().await, ReleaseOutcome::Released);
            quick &= start.elapsed() < ms(90);
            let script = script();
            let hand_offs = |line: &str| line.contains(&script) && line.contains(&name);
            *hand_offs_seen = monitor.count(hand_offs).await;
            *calls = monitor.script_calls(&name).await - before;
            nothing_left(server(), &name).await;
        }
        // The first has it for long in any case. The last one has nobody behind it.
        if quick && seen[0] == 2 {
            assert_eq!(calls[0], 3);
            assert_eq!(seen[1], WAITERS);
            assert_eq!(calls[1], WAITERS + 1);
            return;
        }
    }
    panic!("never quick enough to look");
}

/// Each turn has a token of its own, greater than the one before, and the server names the true holder.
#[tokio::test]
async fn each_turn_is_a_hold_of_its_own() {
    let client = client_of(&server().url(), LEASE).await;
    let name = unique_name();
    let owner = async || {
        let seen = client.lock(name.as_str()).inspect().await.unwrap();
        let holder = seen.holder.unwrap();
        assert_eq!(holder.count, 1);
        assert!(holder.remaining.unwrap() > LEASE / 2);
        (holder.owner, seen.token.unwrap())
    };
    let (mut guard, waiting) = line(&client, &name, 5).await;
    for next in waiting {
        let (before, token) = owner().await;
        // Longer than a turn that is passed on within the client.
        tokio::time::sleep(ms(2)).await;
        assert_eq!(guard.fencing_token().unwrap(), token);
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
        guard = next.await.unwrap();
        assert!(guard.fencing_token().unwrap() > token);
        assert_ne!(owner().await.0, before);
        guard.confirm().await.unwrap();
    }
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    nothing_left(server(), &name).await;
}

/// Runs `turns` of a line of 8 as quickly as it can; the tokens in order.
async fn rush(client: &LockClient, name: &str, turns: usize) -> Vec<FencingToken> {
    let tokens = Arc::new(Mutex::new(Vec::new()));
    let tasks = (0..8).map(|_| {
        let (mut lock, tokens) = (client.lock(name), Arc::clone(&tokens));
        tokio::spawn(async move {
            for _ in 0..turns / 8 {
                let guard = lock.acquire().await.unwrap();
                tokens.lock().unwrap().push(guard.fencing_token().unwrap());
                assert_eq!(guard.release().await, ReleaseOutcome::Released);
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    let tokens = tokens.lock().unwrap().clone();
    assert_eq!(tokens.len(), turns);
    tokens
}

/// Where nobody else listens there is nobody to let in: the lock is really released only now and then, to see
/// whether that is still so.
#[tokio::test]
async fn a_line_that_is_alone_is_seldom_interrupted() {
    const TURNS: usize = 8_000;
    let released = async |others: bool| {
        let name = unique_name();
        let client = client_of(&server().url(), LEASE).await;
        let other = client_of(&server().url(), LEASE).await;
        let mut monitor = server().monitor().await;
        let (mut lock, over) = (
            other.lock(name.as_str()),
            Arc::new(AtomicBool::new(!others)),
        );
        let other = tokio::spawn({
            let over = Arc::clone(&over);
            async move {
                while !over.load(Ordering::Relaxed) {
                    let guard = lock.acquire().await.unwrap();
                    assert_eq!(guard.release().await, ReleaseOutcome::Released);
                    // Not so long that the line is alone when its chain ends.
                    tokio::task::yield_now().await;
                }
            }
        });
        rush(&client, &name, TURNS).await;
        over.store(true, Ordering::Relaxed);
        other.await.unwrap();
        let told = |line: &str| line.contains("\"PUBLISH\"") && line.contains(&name);
        let told = monitor.count(told).await;
        nothing_left(server(), &name).await;
        told
    };
    assert!(released(true).await > TURNS / 300);
    // On a busy machine time ends more of them, and the line is empty now and then: then once more.
    for _ in 0..50 {
        if released(false).await < TURNS / 500 {
            return;
        }
    }
    panic!("interrupted as often as if somebody listened");
}

/// Also between clients that take turns at it.
#[tokio::test]
async fn tokens_rise_also_where_the_server_does_not_hear_of_a_turn() {
    let name = unique_name();
    let clients = [
        client_of(&server().url(), LEASE).await,
        client_of(&server().url(), LEASE).await,
    ];
    let mut monitor = server().monitor().await;
    let mut last = None;
    for round in 0..6 {
        let client = &clients[round % 2];
        for token in rush(client, &name, 400).await {
            assert!(last.replace(token).is_none_or(|last| last < token));
        }
        let single = client.lock(name.as_str()).acquire().await.unwrap();
        let token = single.fencing_token().unwrap();
        assert!(last.replace(token).is_none_or(|last| last < token));
        assert_eq!(single.release().await, ReleaseOutcome::Released);
    }
    let calls = monitor.script_calls(&name).await;
    assert!(calls < 6 * 400, "{calls} calls: nothing was passed on");
    nothing_left(server(), &name).await;
}

/// Each time it was passed on at least once: the server knows it by the id of an earlier holder.
async fn passed(client: &LockClient, name: &str) -> LockGuard {
    loop {
        let (first, mut waiting) = line(client, name, 3).await;
        drop(first);
        let second = waiting.remove(0).await.unwrap();
        let token = second.fencing_token().unwrap();
        drop(second);
        let third = waiting.remove(0).await.unwrap();
        let quick = third.fencing_token().unwrap().value() == token.value() + 1;
        waiting.remove(0).abort();
        if quick {
            return third;
        }
        let _ = third.release().await;
    }
}

/// As anybody else, by its next renewal; and a lease that goes on is renewed.
#[tokio::test]
async fn who_got_it_within_the_client_is_told_of_its_loss() {
    let client = client_of(&server().url(), secs(3)).await;
    let name = unique_name();
    let guard = passed(&client, &name).await;
    // Over several leases.
    tokio::time::sleep(secs(7)).await;
    guard.confirm().await.unwrap();
    assert!(guard.loss_reason().is_none());
    server().cmd(&["DEL", &name]).await.ok();
    let lost = guard.lost();
    let told = tokio::time::timeout(secs(3), lost.cancelled()).await;
    told.expect("told within a lease");
    drop(guard);
    nothing_left(server(), &name).await;
}

/// What is passed on is what is left of a lease: only for those whose lease is renewed.
#[tokio::test]
async fn a_fixed_lease_is_a_whole_one_however_quick_the_line() {
    let client = client_of(&server().url(), LEASE).await;
    let other = client_of(&server().url(), LEASE).await;
    for _ in 0..50 {
        let name = unique_name();
        let (first, mut waiting) = line(&client, &name, 3).await;
        let mut fixed = client.lock(name.as_str()).lease(LEASE);
        let fixed = tokio::spawn(async move { fixed.acquire().await.unwrap() });
        tokio::task::yield_now().await;
        drop(first);
        drop(waiting.remove(0).await.unwrap());
        let second = waiting.remove(0).await.unwrap();
        let seen = other.lock(name.as_str()).inspect().await.unwrap();
        let may_be_passed = seen.token > second.fencing_token().ok();
        // For whom that token was reserved.
        let third = waiting.remove(0);
        third.abort();
        assert!(third.await.is_err());
        let asked = Instant::now();
        while asked.elapsed() < ms(60) {
            std::hint::spin_loop();
        }
        let released = Instant::now();
        assert_eq!(second.release().await, ReleaseOutcome::Released);
        let guard = fixed.await.unwrap();
        let (left, took) = (guard.remaining(), released.elapsed());
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
        nothing_left(server(), &name).await;
        if may_be_passed && took < ms(15) {
            // Less the margin: more than what is left of the one before.
            assert!(left > LEASE * 985 / 1000, "{left:?}");
            return;
        }
    }
    panic!("never quick enough to look");
}

/// The answer is lost after it was done, or the request before: the same operation goes out again, and
/// whoever was next has the lock once.
#[tokio::test]
async fn a_hand_off_without_an_answer_is_asked_for_again() {
    let proxy = Proxy::start(server().port());
    let builder = LockClient::builder().url(proxy.url()).lease(LEASE);
    let client = builder.command_timeout(ms(500)).build().await.unwrap();
    script_known(&client).await;
    let script = script();
    for then in [Then::Close, Then::Reset, Then::Discard] {
        for fault in [
            Fault::reply(bytes(&script), Act::Swallow(then)),
            Fault::request(bytes(&script), Act::Swallow(then)),
        ] {
            let name = unique_name();
            let (first, waiting) = line(&client, &name, 2).await;
            let token = first.fencing_token().unwrap();
            let lost = proxy.inject(fault);
            // As soon as it is known, or after a command timeout without an answer.
            assert!(matches!(
                first.release().await,
                ReleaseOutcome::Released | ReleaseOutcome::Unconfirmed { .. }
            ));
            assert!(lost.is_hit());
            let mut last = token;
            for next in waiting {
                let guard = next.await.unwrap();
                assert!(guard.fencing_token().unwrap() > last);
                last = guard.fencing_token().unwrap();
                guard.confirm().await.unwrap();
                assert_eq!(guard.release().await, ReleaseOutcome::Released);
            }
            proxy.heal();
            nothing_left(server(), &name).await;
        }
    }
}

/// Whoever was next leaves while the hand-off to it is under way: the lock goes to the one behind, or
/// is free.
#[tokio::test]
async fn a_hand_off_to_one_who_has_left_goes_on() {
    let proxy = Proxy::start(server().port());
    let client = client_of(&proxy.url(), LEASE).await;
    script_known(&client).await;
    for behind in [1, 0] {
        let name = unique_name();
        let (first, mut waiting) = line(&client, &name, 1 + behind).await;
        let held = proxy.inject(Fault::reply(bytes(script()), Act::Hold));
        let token = first.fencing_token().unwrap();
        let releasing = tokio::spawn(first.release());
        held.hit().await;
        let leaves = waiting.remove(0);
        leaves.abort();
        assert!(leaves.await.unwrap_err().is_cancelled());
        held.release();
        assert_eq!(releasing.await.unwrap(), ReleaseOutcome::Released);
        for next in waiting {
            let guard = next.await.unwrap();
            assert!(guard.fencing_token().unwrap() > token);
            assert_eq!(guard.release().await, ReleaseOutcome::Released);
        }
        proxy.heal();
        server().cli().await.until_free(&name).await;
        nothing_left(server(), &name).await;
    }
}

/// The future of the one who is next is dropped at each of its polls, while the lock is handed on
/// behind it: nobody is left without it.
#[tokio::test]
async fn a_waiter_dropped_at_any_poll_strands_nothing() {
    let client = client_of(&server().url(), LEASE).await;
    let cli = server().cli().await;
    let mut polls = 0;
    while polls < 60 {
        let name = unique_name();
        let first = client.lock(name.as_str()).acquire().await.unwrap();
        let mut lock = client.lock(name.as_str());
        let dropped = tokio::spawn(async move { polled(polls, lock.acquire()).await });
        tokio::task::yield_now().await;
        let last = waits(&client, &name);
        tokio::task::yield_now().await;
        drop(first);
        drop(dropped.await.unwrap());
        let guard = tokio::time::timeout(secs(5), last).await;
        let guard = guard
            .unwrap_or_else(|_| panic!("stranded after {polls} polls"))
            .unwrap();
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
        cli.until_free(&name).await;
        polls = next(polls);
    }
}

/// Somebody took the lock away from its holder: there is nothing to hand on, and nothing is made.
#[tokio::test]
async fn what_is_gone_is_not_handed_on() {
    let client = client_of(&server().url(), LEASE).await;
    let other = client_of(&server().url(), LEASE).await;
    script_known(&client).await;
    let name = unique_name();
    let (first, mut waiting) = line(&client, &name, 1).await;
    server().cmd(&["DEL", &name]).await.ok();
    let thief = other.lock(name.as_str()).acquire().await.unwrap();
    assert!(matches!(first.release().await, ReleaseOutcome::Lost(_)));
    thief.confirm().await.unwrap();
    assert_eq!(thief.release().await, ReleaseOutcome::Released);
    let guard = waiting.remove(0).await.unwrap();
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    nothing_left(server(), &name).await;
}

/// The server is killed in the middle of a chain and comes back empty: the line goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chain_goes_on_after_the_server_was_lost() {
    let server = Server::start();
    let client = client_of(&server.url(), secs(3)).await;
    let name = unique_name();
    let turns = Arc::new(AtomicU64::new(0));
    let over = Arc::new(AtomicBool::new(false));
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let (client, name) = (client.clone(), name.clone());
            let (turns, over) = (Arc::clone(&turns), Arc::clone(&over));
            tokio::spawn(async move {
                while !over.load(Ordering::Relaxed) {
                    if let Ok(guard) = client.lock(name.as_str()).acquire().await {
                        let _ = guard.release().await;
                        turns.fetch_add(1, Ordering::Relaxed);
                    }
                }
            })
        })
        .collect();
    let more = async |than: u64| {
        eventually(secs(20), "the line moves", async || {
            turns.load(Ordering::Relaxed) > than
        })
        .await;
    };
    more(100).await;
    server.kill();
    server.restart().await;
    let so_far = turns.load(Ordering::Relaxed);
    more(so_far + 100).await;
    over.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    nothing_left(&server, &name).await;
}

/// Lines that are never empty let another client in all the same, again and again.
async fn busy_lines_let_another_in(lines: usize) {
    let other = client_of(&server().url(), LEASE).await;
    let name = unique_name();
    let over = Arc::new(AtomicBool::new(false));
    let mut busy = Vec::new();
    for _ in 0..lines {
        let client = client_of(&server().url(), LEASE).await;
        let tasks = (0..16).map(|_| {
            let (mut lock, over) = (client.lock(name.as_str()), Arc::clone(&over));
            tokio::spawn(async move {
                let mut turns = 0_u64;
                while !over.load(Ordering::Relaxed) {
                    let guard = lock.acquire().await.unwrap();
                    assert_eq!(guard.release().await, ReleaseOutcome::Released);
                    turns += 1;
                }
                turns
            })
        });
        busy.push(tasks.collect::<Vec<_>>());
    }
    let mut waits = Vec::new();
    let mut last: Option<FencingToken> = None;
    for _ in 0..scaled(10, 300) {
        let start = Instant::now();
        let mut lock = other.lock(name.as_str());
        let guard = lock.acquire_timeout(secs(20)).await.unwrap();
        waits.push(start.elapsed());
        let token = guard.fencing_token().unwrap();
        assert!(last.replace(token).is_none_or(|last| last < token));
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
    }
    over.store(true, Ordering::Relaxed);
    for tasks in busy {
        let turns = join_all(tasks).await.into_iter().map(Result::unwrap);
        let turns: Vec<_> = turns.collect();
        let (least, most) = (turns.iter().min().unwrap(), turns.iter().max().unwrap());
        assert!(
            most - least <= 2 + most / 2,
            "first come, first served: {turns:?}"
        );
    }
    waits.sort_unstable();
    // A chain lasts 100 ms at most; whoever heard its end may lose the race to others a few times.
    assert!(waits[waits.len() / 2] < secs(1), "{waits:?}");
    nothing_left(server(), &name).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_line_does_not_starve_other_clients() {
    busy_lines_let_another_in(1).await;
}

/// Whoever had its turn lets others go first also when it is not the one that releases.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn busy_lines_do_not_starve_a_third_client_between_them() {
    busy_lines_let_another_in(3).await;
}

/// Closing while the lock is handed on: whoever waits is told, and nothing stays.
#[tokio::test]
async fn closing_in_the_middle_of_a_hand_off_leaves_nothing() {
    let proxy = Proxy::start(server().port());
    let client = client_of(&proxy.url(), LEASE).await;
    script_known(&client).await;
    let name = unique_name();
    let first = client.lock(name.as_str()).acquire().await.unwrap();
    let mut lock = client.lock(name.as_str());
    let waiting = tokio::spawn(async move { lock.acquire().await });
    server().cli().await.until_waiters(&name, 1).await;
    let held = proxy.inject(Fault::reply(bytes(script()), Act::Hold));
    drop(first);
    held.hit().await;
    let closing = tokio::spawn(async move { client.close(secs(3)).await });
    assert!(waiting.await.unwrap().is_err());
    held.release();
    let _ = closing.await.unwrap();
    server().cli().await.until_free(&name).await;
    nothing_left(server(), &name).await;
}

/// A rule is withdrawn while the lock is handed on, and given back: what was done of it by half is undone
/// by the release, and does not stay for a lease.
async fn rule_withdrawn(command: &str) {
    let server = Server::start();
    let cli = server.cli().await;
    let user = ["ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all"];
    cli.cmd(&user).await.ok();
    let url = format!("redis://app:pw@127.0.0.1:{}", server.port());
    let client = client_of(&url, secs(30)).await;
    let other = client_of(&server.url(), secs(30)).await;
    let name = unique_name();
    let first = client.lock(name.as_str()).acquire().await.unwrap();
    let next = waits(&client, &name);
    cli.until_waiters(&name, 1).await;
    let without = format!("-{command}");
    cli.cmd(&["ACL", "SETUSER", "app", &without]).await.ok();
    drop(first);
    eventually(secs(10), "a refusal", async || cli.refusals().await > 0).await;
    next.abort();
    let with = format!("+{command}");
    cli.cmd(&["ACL", "SETUSER", "app", &with]).await.ok();
    let got = other.lock(name.as_str()).acquire_timeout(secs(15)).await;
    assert!(got.is_ok(), "an orphan: {:?}", cli.hash_if_any(&name).await);
}

#[tokio::test]
async fn hand_off_that_may_not_remove_the_old_hold_leaves_no_orphan() {
    rule_withdrawn("hdel").await;
}

#[tokio::test]
async fn hand_off_that_may_not_set_a_deadline_leaves_no_orphan() {
    rule_withdrawn("pexpire").await;
}

/// The next in line wants a long lease, and whether it got the lock is not known: what the releaser is
/// told covers that lease.
#[tokio::test]
async fn unconfirmed_covers_the_lease_of_the_next_in_line() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let client = client_of(&proxy.url(), secs(3)).await;
    let cli = server.cli().await;
    let name = unique_name();
    // Once before, so that the server knows the script, and the reply that is lost is an answer.
    for lost in [false, true] {
        let first = client.lock(name.as_str()).acquire().await.unwrap();
        let mut lock = client.lock(name.as_str()).lease(secs(600));
        let next = tokio::spawn(async move { lock.acquire().await });
        cli.until_waiters(&name, 1).await;
        if lost {
            proxy.inject(Fault::reply(bytes(&name), Act::Swallow(Then::Discard)));
        }
        let outcome = first.release().await;
        if !lost {
            assert_eq!(outcome, ReleaseOutcome::Released);
            drop(next.await.unwrap());
            cli.until_free(&name).await;
            continue;
        }
        proxy.refuse();
        proxy.black_hole();
        let left = cli.pttl(&name).await;
        next.abort();
        let ReleaseOutcome::Unconfirmed { at_most } = outcome else {
            panic!("{outcome:?}")
        };
        assert!(left > 500_000, "{left}");
        assert!(
            at_most >= ms(left.unsigned_abs()),
            "{at_most:?} < {left} ms"
        );
    }
}

/// The server falls silent while a lock goes from hand to hand: whoever waits hears of it after one
/// default lease, however long the leases are that go round.
async fn silence_is_told(lease: Duration, asked: Duration) {
    let server = Server::start();
    for round in 0..scaled(2, 12) {
        let proxy = Proxy::start(server.port());
        let client = client_of(&proxy.url(), lease).await;
        let name = unique_name();
        let turns = Arc::new(AtomicU64::new(0));
        let tasks: Vec<_> = (0..12)
            .map(|_| {
                let (client, turns) = (client.clone(), Arc::clone(&turns));
                let mut lock = client.lock(name.as_str());
                if asked > lease {
                    lock = lock.lease(asked);
                }
                tokio::spawn(async move {
                    loop {
                        match lock.acquire().await {
                            Ok(guard) => drop(guard),
                            Err(error) => return (Instant::now(), error),
                        }
                        turns.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        eventually(secs(30), "turns", async || {
            turns.load(Ordering::Relaxed) > 60 + 17 * round
        })
        .await;
        let ruler = Ruler::start();
        let start = Instant::now();
        if round % 2 == 0 {
            proxy.black_hole();
        } else {
            proxy.cut(Then::Close);
            proxy.refuse();
        }
        let told = tokio::time::timeout(secs(60), join_all(tasks)).await;
        let told = told.expect("a hang").into_iter().map(Result::unwrap);
        for (at, error) in told {
            let outage = matches!(
                error,
                Error::Unreachable { .. } | Error::Indeterminate { .. }
            );
            assert!(outage, "{error:?}");
            let after = at.duration_since(start);
            assert!(after < lease + secs(1) + ruler.allowance(), "{after:?}");
        }
    }
}

#[tokio::test]
async fn silence_in_mid_chain_is_told_after_one_lease() {
    silence_is_told(secs(2), secs(2)).await;
}

#[tokio::test]
async fn silence_behind_a_long_fixed_lease_is_told_after_one_default_lease() {
    silence_is_told(secs(2), secs(20)).await;
}

/// Waiters whose futures nobody polls keep another client out for some offers, not for one each.
#[tokio::test]
async fn a_line_in_which_nobody_answers_lets_others_in() {
    let ruler = Ruler::start();
    let (client, other) = (
        client_of(&server().url(), LEASE).await,
        client_of(&server().url(), LEASE).await,
    );
    let name = unique_name();
    let first = client.lock(name.as_str()).acquire().await.unwrap();
    let mut waiting = Vec::new();
    for _ in 0..40 {
        let mut lock = client.lock(name.as_str());
        let mut waiter = Box::pin(async move { lock.acquire().await });
        assert!(polled(1, &mut waiter).await.is_none());
        waiting.push(waiter);
    }
    server().cli().await.until_waiters(&name, 1).await;
    let start = Instant::now();
    drop(first);
    let got = other
        .lock(name.as_str())
        .acquire_timeout(secs(20))
        .await
        .unwrap();
    let after = start.elapsed();
    assert!(after < secs(2) + ruler.allowance(), "{after:?}");
    drop((got, waiting));
    nothing_left(server(), &name).await;
}

/// It is refused half-way, and nobody hears of that; when the rule is given back, the same operation goes
/// out again: it finds the next one there, and the one before it as well.
#[tokio::test]
async fn a_hand_off_done_by_half_and_unheard_of_is_finished() {
    let server = Server::start();
    let cli = server.cli().await;
    let user = ["ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all"];
    cli.cmd(&user).await.ok();
    let proxy = Proxy::start(server.port());
    let url = proxy.url().replace("redis://", "redis://app:pw@");
    let builder = || LockClient::builder().url(&url).lease(secs(30));
    let client = connected(|| builder().command_timeout(ms(500))).await;
    for half in [false, true] {
        let name = unique_name();
        let first = client.lock(name.as_str()).acquire().await.unwrap();
        let next = waits(&client, &name);
        cli.until_waiters(&name, 1).await;
        if !half {
            // So that the server knows the script.
            drop(first);
            drop(next.await.unwrap());
            continue;
        }
        cli.cmd(&["ACL", "SETUSER", "app", "-hdel"]).await.ok();
        let lost = proxy.inject(Fault::reply(bytes(script()), Act::Swallow(Then::Discard)));
        let releasing = tokio::spawn(first.release());
        lost.hit().await;
        assert_eq!(cli.hash(&name).await.len(), 2, "it was not done by half");
        cli.cmd(&["ACL", "SETUSER", "app", "+hdel"]).await.ok();
        let guard = next.await.unwrap();
        assert!(matches!(
            releasing.await.unwrap(),
            ReleaseOutcome::Released | ReleaseOutcome::Unconfirmed { .. }
        ));
        assert_eq!(cli.hash(&name).await.len(), 1, "two have it");
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
        nothing_left(&server, &name).await;
    }
}

/// A client whose requests are given up after half a second without an answer.
async fn impatient(proxy: &Proxy) -> LockClient {
    let builder = || LockClient::builder().url(proxy.url()).lease(LEASE);
    let client = connected(|| builder().command_timeout(ms(500))).await;
    script_known(&client).await;
    client
}

/// It arrives past its deadline, when the same operation has been sent once more: the first does nothing,
/// and the second is not too late.
#[tokio::test]
async fn a_hand_off_that_comes_late_does_nothing() {
    let proxy = Proxy::start(server().port());
    let client = impatient(&proxy).await;
    let name = unique_name();
    let (first, mut waiting) = line(&client, &name, 1).await;
    let token = first.fencing_token().unwrap();
    let held = proxy.inject(Fault::request(bytes(script()), Act::Hold));
    let releasing = tokio::spawn(first.release());
    held.hit().await;
    // Past the deadline that it carries.
    tokio::time::sleep(ms(700)).await;
    held.release();
    assert!(matches!(
        releasing.await.unwrap(),
        ReleaseOutcome::Released | ReleaseOutcome::Unconfirmed { .. }
    ));
    let guard = waiting.remove(0).await.unwrap();
    assert!(guard.fencing_token().unwrap() > token);
    guard.confirm().await.unwrap();
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    proxy.heal();
    nothing_left(server(), &name).await;
}

/// Copies of it, while the next one holds the lock and when it is free: they change nothing.
#[tokio::test]
async fn copies_of_a_hand_off_change_nothing() {
    let proxy = Proxy::start(server().port());
    let client = client_of(&proxy.url(), LEASE).await;
    script_known(&client).await;
    let cli = server().cli().await;
    let name = unique_name();
    let (first, mut waiting) = line(&client, &name, 1).await;
    drop(first);
    let guard = waiting.remove(0).await.unwrap();
    let sent = proxy.requests(&bytes(script()));
    let copy = sent.last().expect("it was handed on");
    let before = (cli.hash(&name).await, cli.pttl(&name).await);
    proxy.replay(copy).await;
    let after = (cli.hash(&name).await, cli.pttl(&name).await);
    assert_eq!(before.0, after.0);
    assert!(after.1 <= before.1, "lengthened: {before:?} {after:?}");
    guard.confirm().await.unwrap();
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    proxy.replay(copy).await;
    nothing_left(server(), &name).await;
}

/// There is no answer, and whoever was next leaves: both holds are released, whichever of them the server
/// has, and nobody waits for a lease.
#[tokio::test]
async fn a_hand_off_that_nobody_waits_for_is_undone() {
    let other = client_of(&server().url(), LEASE).await;
    let script = script();
    for fault in [
        Fault::reply(bytes(&script), Act::Swallow(Then::Discard)),
        Fault::request(bytes(&script), Act::Swallow(Then::Discard)),
    ] {
        let proxy = Proxy::start(server().port());
        let client = impatient(&proxy).await;
        let name = unique_name();
        let (first, mut waiting) = line(&client, &name, 1).await;
        let lost = proxy.inject(fault);
        drop(first);
        lost.hit().await;
        let leaves = waiting.remove(0);
        leaves.abort();
        assert!(leaves.await.unwrap_err().is_cancelled());
        let ruler = Ruler::start();
        let start = Instant::now();
        let got = other.lock(name.as_str()).acquire().await.unwrap();
        let after = start.elapsed();
        assert!(after < LEASE / 2 + ruler.allowance(), "{after:?}");
        assert_eq!(got.release().await, ReleaseOutcome::Released);
        proxy.heal();
        nothing_left(server(), &name).await;
    }
}

/// The answer to an attempt to take it was lost, so a copy may yet run, and make the old hold anew when it
/// has been handed on: so it is released.
#[tokio::test]
async fn a_hold_that_may_come_back_is_not_handed_on() {
    let proxy = Proxy::start(server().port());
    let client = impatient(&proxy).await;
    for lost in [false, true] {
        let name = unique_name();
        let before = proxy.count(&bytes(script()));
        if lost {
            proxy.inject(Fault::reply(bytes(&name), Act::Swallow(Then::Reset)));
        }
        let (first, mut waiting) = line(&client, &name, 1).await;
        assert_eq!(first.release().await, ReleaseOutcome::Released);
        let guard = waiting.remove(0).await.unwrap();
        let handed_on = proxy.count(&bytes(script())) - before;
        assert_eq!(handed_on, usize::from(!lost));
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
        proxy.heal();
        nothing_left(server(), &name).await;
    }
}
