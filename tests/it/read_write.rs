//! The read/write lock: many read or one writes, reading goes on where writing ends, and who crashes is
//! waited for no longer than his own lease.

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use leasehold::{Error, Lock, LockClient, LockGuard, LockKind, LossReason, ReleaseOutcome, RwLock};
use tokio::task::JoinHandle;

use crate::common::*;
use crate::support::*;

const LEASE: Duration = secs(30);

/// Well before the next look that a waiter has by himself.
const SOON: Duration = ms(700);

/// A client on each of the two stores.
async fn both() -> [LockClient; 2] {
    [
        LockClient::in_memory(),
        client_of(&server().url(), LEASE).await,
    ]
}

fn rw_channel(name: &str) -> String {
    format!("redisson_rwlock:{{{name}}}")
}

fn lease_key(name: &str, owner: &str, number: u32) -> String {
    format!("{{{name}}}:{owner}:rwlock_timeout:{number}")
}

/// Waits for the lock in a task; tells when it was granted.
fn wait_for(mut lock: Lock) -> JoinHandle<(LockGuard, Instant)> {
    tokio::spawn(async move {
        let guard = lock.acquire().await.unwrap();
        (guard, Instant::now())
    })
}

async fn tried(mut lock: Lock) -> Option<LockGuard> {
    lock.try_acquire().await.unwrap()
}

async fn free(client: &LockClient, name: &str) {
    let guard = tried(client.rw_lock(name).write()).await;
    let guard = guard.unwrap_or_else(|| panic!("`{name}` is not free"));
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
}

#[tokio::test]
async fn many_read_at_once_or_one_writes() {
    for client in both().await {
        let name = unique_name();
        let name = name.as_str();
        let mut readers = Vec::new();
        for _ in 0..5 {
            let reader = tried(client.rw_lock(name).read()).await;
            readers.push(reader.expect("nobody writes"));
        }
        while let Some(reader) = readers.pop() {
            assert!(tried(client.rw_lock(name).write()).await.is_none());
            assert_eq!(reader.release().await, ReleaseOutcome::Released);
        }
        let writer = tried(client.rw_lock(name).write()).await.expect("free");
        assert!(tried(client.rw_lock(name).write()).await.is_none());
        assert!(tried(client.rw_lock(name).read()).await.is_none());
        assert_eq!(writer.release().await, ReleaseOutcome::Released);
        free(&client, name).await;
    }
}

/// What Java would see, and what it would make: `RedissonReadLock`, `RedissonWriteLock`.
#[tokio::test]
async fn its_keys_are_redissons() {
    let client = client_of(&server().url(), LEASE).await;
    let cli = server().cli().await;
    let name = unique_name();
    let lease = i64::try_from(LEASE.as_millis()).unwrap();

    let reader = client
        .rw_lock(name.as_str())
        .read()
        .acquire()
        .await
        .unwrap();
    let mut hash = cli.hash(&name).await;
    assert_eq!(hash.remove("mode").as_deref(), Some("read"));
    let (owner, count) = hash.pop_first().unwrap();
    assert!(hash.is_empty());
    assert_eq!(count, "1");
    let key = lease_key(&name, &owner, 1);
    assert_eq!(
        cli.cmd(&["GET", &key]).await.text_if_any().as_deref(),
        Some("1")
    );
    for key in [&key, &name] {
        let left = cli.pttl(key).await;
        assert!((1..=lease).contains(&left), "{left} ms");
    }
    assert_eq!(reader.release().await, ReleaseOutcome::Released);
    assert!(!cli.exists(&key).await);

    let writer = client
        .rw_lock(name.as_str())
        .write()
        .acquire()
        .await
        .unwrap();
    let mut hash = cli.hash(&name).await;
    assert_eq!(hash.remove("mode").as_deref(), Some("write"));
    let (owner, count) = hash.pop_first().unwrap();
    assert!(owner.ends_with(":write"), "{owner}");
    assert_eq!(count, "1");
    assert_eq!(writer.release().await, ReleaseOutcome::Released);
    nothing_left(server(), &name).await;
}

#[tokio::test]
async fn a_name_is_one_kind_of_lock() {
    for client in both().await {
        let name = unique_name();
        let name = name.as_str();
        let plain = client.lock(name).acquire().await.unwrap();
        for mut lock in [client.rw_lock(name).read(), client.rw_lock(name).write()] {
            let error = lock.acquire().await.unwrap_err();
            assert!(matches!(error, Error::Conflict { .. }), "{error:?}");
        }
        let looked = client.rw_lock(name).inspect().await;
        assert!(matches!(looked, Err(Error::Conflict { .. })), "{looked:?}");
        let forced = client.rw_lock(name).force_release().await;
        assert!(matches!(forced, Err(Error::Conflict { .. })), "{forced:?}");
        assert_eq!(plain.release().await, ReleaseOutcome::Released);
        for mut lock in [client.rw_lock(name).read(), client.rw_lock(name).write()] {
            let held = lock.acquire().await.unwrap();
            let error = client.lock(name).acquire().await.unwrap_err();
            assert!(matches!(error, Error::Conflict { .. }), "{error:?}");
            let looked = client.inspect(name).await;
            assert!(matches!(looked, Err(Error::Conflict { .. })), "{looked:?}");
            let forced = client.force_release(name).await;
            assert!(matches!(forced, Err(Error::Conflict { .. })), "{forced:?}");
            assert_eq!(held.release().await, ReleaseOutcome::Released);
        }
    }
}

#[tokio::test]
async fn what_is_no_read_write_lock_is_a_conflict() {
    let client = client_of(&server().url(), LEASE).await;
    let cli = server().cli().await;
    let spoilt: [&[&str]; 6] = [
        &["SET", "KEY", "text"],
        &["HSET", "KEY", "a:1", "1"],
        &["HSET", "KEY", "mode", "write", "nobody", "1"],
        &["HSET", "KEY", "mode", "write", "a:1:write", "many"],
        &["HSET", "KEY", "mode", "neither"],
        &["HSET", "KEY", "mode", "Write", "a:1:write", "1"],
    ];
    for command in spoilt {
        let name = unique_name();
        let command = command.iter().map(|it| it.replace("KEY", &name));
        let command: Vec<_> = command.collect();
        let command: Vec<_> = command.iter().map(String::as_str).collect();
        cli.cmd(&command).await.ok();
        for mut lock in [
            client.rw_lock(name.as_str()).read(),
            client.rw_lock(name.as_str()).write(),
        ] {
            let error = lock.acquire().await.unwrap_err();
            assert!(
                matches!(error, Error::Conflict { .. }),
                "{command:?}: {error:?}"
            );
        }
        cli.cmd(&["DEL", &name]).await.ok();
    }
}

#[tokio::test]
async fn levels_are_counted_on_either_side() {
    for client in both().await {
        let name = unique_name();
        let mut ctx = client.context();
        let rw = ctx.rw_lock(name.as_str());
        for mut lock in [rw.read(), rw.write()] {
            let outer = lock.acquire().await.unwrap();
            let inner = lock.acquire().await.unwrap();
            assert_eq!(inner.depth(), 2);
            let seen = rw.inspect().await.unwrap();
            assert_eq!(seen.holder.unwrap().count, 2);
            assert_eq!(
                outer.fencing_token().unwrap(),
                inner.fencing_token().unwrap()
            );
            assert_eq!(
                inner.release().await,
                ReleaseOutcome::StillHeld { depth: 1 }
            );
            assert!(tried(client.rw_lock(name.as_str()).write()).await.is_none());
            assert_eq!(outer.release().await, ReleaseOutcome::Released);
            free(&client, &name).await;
        }
    }
}

/// Nobody else can enter, so the server is not asked.
#[tokio::test]
async fn to_read_while_one_writes_costs_no_round_trip() {
    let client = client_of(&server().url(), LEASE).await;
    let name = unique_name();
    let mut ctx = client.context();
    let rw = ctx.rw_lock(name.as_str());
    let write = rw.write().acquire().await.unwrap();
    let mut monitor = server().monitor().await;
    let read = rw.read().acquire().await.unwrap();
    let again = tried(rw.read()).await.expect("its own");
    assert_eq!(read.depth(), 3);
    assert_eq!(
        again.release().await,
        ReleaseOutcome::StillHeld { depth: 2 }
    );
    assert_eq!(read.release().await, ReleaseOutcome::StillHeld { depth: 1 });
    assert_eq!(monitor.script_calls(&name).await, 0);
    assert_eq!(write.release().await, ReleaseOutcome::Released);
    nothing_left(server(), &name).await;
}

/// A level that asks for more than the hold has got is worth a request.
#[tokio::test]
async fn to_read_for_longer_than_one_writes_lengthens_the_lease() {
    for client in both().await {
        let name = unique_name();
        let mut ctx = client.context();
        let rw = ctx.rw_lock(name.as_str());
        let write = rw.write().lease(secs(3)).acquire().await.unwrap();
        let read = rw.read().lease(secs(60)).acquire().await.unwrap();
        assert!(read.remaining() > secs(50), "{:?}", read.remaining());
        assert_eq!(
            write.release().await,
            ReleaseOutcome::StillHeld { depth: 1 }
        );
        assert!(read.remaining() > secs(50), "{:?}", read.remaining());
        assert_eq!(read.release().await, ReleaseOutcome::Released);
    }
}

/// In one step: a writer that waits does not come between, and readers come in at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reading_goes_on_where_writing_ends() {
    for client in both().await {
        let name = unique_name();
        let mut ctx = client.context();
        let rw = ctx.rw_lock(name.as_str());
        let write = rw.write().acquire().await.unwrap();
        let read = rw.read().acquire().await.unwrap();
        let reads_too = wait_for(client.rw_lock(name.as_str()).read());
        let writes = wait_for(client.rw_lock(name.as_str()).write());
        eventually(secs(5), "both wait", async || {
            rw.inspect().await.unwrap().waiting == Some(1)
        })
        .await;
        let token = read.fencing_token().unwrap();
        let (left, ruler) = (Instant::now(), Ruler::start());
        assert_eq!(
            write.release().await,
            ReleaseOutcome::StillHeld { depth: 1 }
        );
        let (other, at) = reads_too.await.unwrap();
        let took = at.saturating_duration_since(left);
        assert!(took < SOON + ruler.allowance(), "told only {took:?} later");
        assert!(!writes.is_finished());
        assert_eq!(read.fencing_token().unwrap(), token);
        assert_eq!(other.fencing_token().unwrap(), token);
        let seen = rw.inspect().await.unwrap();
        assert_eq!((seen.kind, seen.holders.len()), (LockKind::Read, 2));
        assert_eq!(read.release().await, ReleaseOutcome::Released);
        assert!(!writes.is_finished());
        let (left, ruler) = (Instant::now(), Ruler::start());
        assert_eq!(other.release().await, ReleaseOutcome::Released);
        let (writer, at) = writes.await.unwrap();
        let took = at.saturating_duration_since(left);
        assert!(took < SOON + ruler.allowance(), "told only {took:?} later");
        assert!(writer.fencing_token().unwrap() > token);
        drop(writer);
    }
}

/// Another process is told of it, too; Redisson publishes nothing then, and its readers sleep.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_of_other_clients_come_in_when_writing_ends() {
    let (one, other) = (
        client_of(&server().url(), LEASE).await,
        client_of(&server().url(), LEASE).await,
    );
    let cli = server().cli().await;
    let name = unique_name();
    let mut ctx = one.context();
    let rw = ctx.rw_lock(name.as_str());
    let write = rw.write().acquire().await.unwrap();
    let read = rw.read().acquire().await.unwrap();
    let waiting: Vec<_> = (0..3)
        .map(|_| wait_for(other.rw_lock(name.as_str()).read()))
        .collect();
    cli.until_subscribers(&rw_channel(&name), 1).await;
    let (left, ruler) = (Instant::now(), Ruler::start());
    assert_eq!(
        write.release().await,
        ReleaseOutcome::StillHeld { depth: 1 }
    );
    for waiting in join_all(waiting).await {
        let (guard, at) = waiting.unwrap();
        let took = at.saturating_duration_since(left);
        assert!(took < SOON + ruler.allowance(), "told only {took:?} later");
        drop(guard);
    }
    drop(read);
    nothing_left(server(), &name).await;
}

/// B52: redisson/redisson#4217, where what was left of it was not renewed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_goes_on_reading_is_renewed() {
    let lease = secs(2);
    let (one, other) = (
        client_of(&server().url(), lease).await,
        client_of(&server().url(), lease).await,
    );
    let name = unique_name();
    let mut ctx = one.context();
    let rw = ctx.rw_lock(name.as_str());
    let write = rw.write().acquire().await.unwrap();
    let read = rw.read().acquire().await.unwrap();
    drop(write);
    let end = Instant::now() + scaled(lease * 2, lease * 5);
    while Instant::now() < end {
        // The subject: time passes, and nobody writes.
        let mut writing = other.rw_lock(name.as_str()).write();
        let writing = writing.acquire_timeout(lease / 3).await;
        assert!(
            matches!(writing, Err(Error::TimedOut { .. })),
            "{writing:?}"
        );
        drop(tried(other.rw_lock(name.as_str()).read()).await.unwrap());
        read.confirm().await.unwrap();
    }
    assert_eq!(read.release().await, ReleaseOutcome::Released);
    free(&other, &name).await;
    nothing_left(server(), &name).await;
}

/// A renewal that was sent before and is answered after finds the hold under its other field.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_around_the_end_of_writing_is_no_loss() {
    let proxy = Proxy::start(server().port());
    let client = client_of(&proxy.url(), LEASE).await;
    for act in [Fault::request, Fault::reply] {
        let name = unique_name();
        let mut ctx = client.context();
        let rw = ctx.rw_lock(name.as_str());
        let write = rw.write().acquire().await.unwrap();
        let read = rw.read().acquire().await.unwrap();
        write.confirm().await.unwrap();
        let held = proxy.inject(act(command("EVALSHA"), Act::Hold));
        let (confirmed, released) = tokio::join!(read.confirm(), async {
            held.hit().await;
            let released = write.release();
            held.release();
            released.await
        });
        confirmed.unwrap();
        assert_eq!(released, ReleaseOutcome::StillHeld { depth: 1 });
        read.confirm().await.unwrap();
        assert_eq!(read.release().await, ReleaseOutcome::Released);
        proxy.heal();
        nothing_left(server(), &name).await;
    }
}

#[tokio::test]
async fn to_write_while_one_reads_is_an_error_at_once() {
    for client in both().await {
        let name = unique_name();
        let mut ctx = client.context();
        let rw = ctx.rw_lock(name.as_str());
        let would_deadlock = async || {
            for taken in [
                rw.write().acquire().await.map(Some),
                rw.write().try_acquire().await,
                rw.write().acquire_timeout(secs(9)).await.map(Some),
            ] {
                let error = taken.unwrap_err();
                assert!(matches!(error, Error::WouldDeadlock { .. }), "{error:?}");
                assert!(!error.is_retryable());
                assert!(words(&error).contains("try_upgrade"), "{error}");
            }
        };
        let read = rw.read().acquire().await.unwrap();
        would_deadlock().await;
        assert!(read.is_held());
        drop(read);
        let write = rw.write().acquire().await.unwrap();
        let read = rw.read().acquire().await.unwrap();
        // It writes already, and may do so again.
        drop(rw.write().acquire().await.unwrap());
        assert_eq!(
            write.release().await,
            ReleaseOutcome::StillHeld { depth: 1 }
        );
        would_deadlock().await;
        assert_eq!(read.release().await, ReleaseOutcome::Released);
        free(&client, &name).await;
    }
}

#[tokio::test]
async fn the_only_reader_may_go_on_writing() {
    for client in both().await {
        let name = unique_name();
        let mut ctx = client.context();
        let rw = ctx.rw_lock(name.as_str());
        for downgraded in [false, true] {
            let read = if downgraded {
                let _write = rw.write().acquire().await.unwrap();
                rw.read().acquire().await.unwrap()
            } else {
                rw.read().acquire().await.unwrap()
            };
            // Before it is asked for more, the server knows that it reads.
            read.confirm().await.unwrap();
            let before = read.fencing_token().unwrap();
            let write = RwLock::try_upgrade(read).await.map_err(|(_, error)| error);
            let write = write.unwrap();
            assert!(write.fencing_token().unwrap() > before);
            assert_eq!(write.depth(), 1);
            write.confirm().await.unwrap();
            assert!(tried(client.rw_lock(name.as_str()).read()).await.is_none());
            let seen = rw.inspect().await.unwrap();
            assert_eq!((seen.kind, seen.holders.len()), (LockKind::Write, 1));
            let again = rw.read().acquire().await.unwrap();
            assert_eq!(again.depth(), 2);
            drop(again);
            assert_eq!(write.release().await, ReleaseOutcome::Released);
            free(&client, &name).await;
        }
    }
}

/// Two readers who both wait to write wait for each other; so nobody waits.
#[tokio::test]
async fn one_of_several_readers_reads_on() {
    for client in both().await {
        let name = unique_name();
        let one = client
            .rw_lock(name.as_str())
            .read()
            .acquire()
            .await
            .unwrap();
        let other = client
            .rw_lock(name.as_str())
            .read()
            .acquire()
            .await
            .unwrap();
        let (one, error) = RwLock::try_upgrade(one).await.unwrap_err();
        assert!(matches!(error, Error::TimedOut { .. }), "{error:?}");
        one.confirm().await.unwrap();
        assert_eq!(one.depth(), 1);
        assert_eq!(other.release().await, ReleaseOutcome::Released);
        let write = RwLock::try_upgrade(one).await.map_err(|(_, error)| error);
        assert_eq!(write.unwrap().release().await, ReleaseOutcome::Released);
        free(&client, &name).await;
    }
}

#[tokio::test]
async fn no_other_guard_is_upgraded() {
    for client in both().await {
        let name = unique_name();
        let mut ctx = client.context();
        let rw = ctx.rw_lock(name.as_str());
        let refused = async |guard| {
            let (guard, error) = RwLock::try_upgrade(guard).await.unwrap_err();
            assert!(matches!(error, Error::Config { .. }), "{error:?}");
            guard.confirm().await.unwrap();
            guard
        };
        let outer = rw.read().acquire().await.unwrap();
        let inner = rw.read().acquire().await.unwrap();
        let inner = refused(inner).await;
        drop((outer, inner));
        let write = rw.write().acquire().await.unwrap();
        drop(refused(write).await);
        let plain = client
            .lock(format!("{name}-plain"))
            .acquire()
            .await
            .unwrap();
        drop(refused(plain).await);
    }
}

/// The answer is lost: the same request again finds it done.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upgrade_without_an_answer_is_asked_for_again() {
    let proxy = Proxy::start(server().port());
    let client = client_of(&proxy.url(), LEASE).await;
    let name = unique_name();
    let read = client
        .rw_lock(name.as_str())
        .read()
        .acquire()
        .await
        .unwrap();
    let swallowed = proxy.inject(Fault::reply(command("EVALSHA"), Act::Swallow(Then::Reset)));
    let write = RwLock::try_upgrade(read).await.map_err(|(_, error)| error);
    let write = write.unwrap();
    assert!(swallowed.is_hit());
    proxy.heal();
    let hash = server().cli().await.hash(&name).await;
    assert_eq!(hash.len(), 2, "{hash:?}");
    assert_eq!(write.release().await, ReleaseOutcome::Released);
    nothing_left(server(), &name).await;
}

/// Which of the two the server has nobody knows then, so it is neither.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upgrade_that_is_never_answered_is_a_loss() {
    let proxy = Proxy::start(server().port());
    let lease = secs(2);
    let client = client_of(&proxy.url(), lease).await;
    let name = unique_name();
    let read = client
        .rw_lock(name.as_str())
        .read()
        .acquire()
        .await
        .unwrap();
    proxy.black_hole();
    let (start, ruler) = (Instant::now(), Ruler::start());
    let (guard, error) = RwLock::try_upgrade(read).await.unwrap_err();
    assert!(start.elapsed() < lease * 2 + ruler.allowance(), "{error:?}");
    assert!(!guard.is_held(), "{error:?}");
    drop(guard);
    proxy.heal();
    nothing_left(server(), &name).await;
}

/// At every poll: neither the reader's hold nor the writer's is left.
#[test]
fn an_upgrade_dropped_at_any_poll_leaves_nothing() {
    turn_by_turn(async {
        let client = client_of(&server().url(), LEASE).await;
        let prefix = unique_name();
        let mut polls = 0;
        loop {
            let name = format!("{prefix}-{polls}");
            let mut ctx = client.context();
            let read = ctx.rw_lock(name.as_str()).read().acquire().await.unwrap();
            let done = polled(polls, RwLock::try_upgrade(read)).await;
            let done = done.map(|done| done.map(drop).map_err(|(_, error)| error));
            // The same flow of work has no trace of it either.
            let mut lock = ctx.rw_lock(name.as_str()).write();
            let again = lock.acquire_timeout(secs(2)).await.unwrap();
            assert_eq!(again.depth(), 1);
            assert_eq!(again.release().await, ReleaseOutcome::Released);
            if let Some(done) = done {
                done.unwrap();
                break;
            }
            polls = next(polls);
            assert!(polls < 20_000);
        }
        nothing_left(server(), &prefix).await;
    });
}

/// B22: redisson/redisson#7098, where a reader's renewal kept all others alive. One that is not renewed any
/// more is as good as crashed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_reader_is_waited_for_no_longer_than_his_own_lease() {
    let (dead, alive, writer) = (
        client_of(&server().url(), LEASE).await,
        client_of(&server().url(), secs(2)).await,
        client_of(&server().url(), LEASE).await,
    );
    let name = unique_name();
    let crashed = dead.rw_lock(name.as_str()).read().lease(secs(2));
    let crashed = ManuallyDrop::new({ crashed }.acquire().await.unwrap());
    let reader = alive.rw_lock(name.as_str()).read().acquire().await.unwrap();
    let writing = wait_for(writer.rw_lock(name.as_str()).write());
    // The subject: the one's lease passes, the other is renewed.
    tokio::time::sleep(secs(3)).await;
    assert!(!crashed.is_held());
    reader.confirm().await.unwrap();
    assert!(!writing.is_finished());
    let (left, ruler) = (Instant::now(), Ruler::start());
    assert_eq!(reader.release().await, ReleaseOutcome::Released);
    let (guard, at) = writing.await.unwrap();
    let took = at.saturating_duration_since(left);
    assert!(
        took < SOON + ruler.allowance(),
        "waits for a ghost: {took:?}"
    );
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    assert_eq!(crashed.loss_reason(), Some(LossReason::DeadlinePassed));
    let _ = ManuallyDrop::into_inner(crashed);
    nothing_left(server(), &name).await;
}

/// Of a process that is killed, with nobody else there to tell the writer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_whose_process_is_killed_frees_the_lock_with_his_lease() {
    let name = unique_name();
    let url = server().url();
    let mut worker = Worker::spawn(
        "read_write::reading_worker",
        &[("URL", &url), ("NAME", &name)],
    );
    worker.expect("reads").await;
    let client = client_of(&url, LEASE).await;
    let other = client
        .rw_lock(name.as_str())
        .read()
        .acquire()
        .await
        .unwrap();
    let writing = wait_for(client.rw_lock(name.as_str()).write());
    worker.kill();
    worker.wait().await;
    let (killed, ruler) = (Instant::now(), Ruler::start());
    drop(other);
    let (guard, at) = writing.await.unwrap();
    let took = at.saturating_duration_since(killed);
    assert!(took < secs(2) + SOON + ruler.allowance(), "{took:?}");
    drop(guard);
    server().cli().await.until_free(&name).await;
}

/// A process of the test above.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reading_worker() {
    let Some(mut me) = WorkerSide::if_spawned() else {
        return;
    };
    let env = |key| std::env::var(key).unwrap();
    let client = client_of(&env("URL"), secs(2)).await;
    let _guard = client.rw_lock(env("NAME")).read().acquire().await.unwrap();
    me.say("reads");
    me.line().await;
}

/// Java numbers the leases of a reader's holds; the longest counts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn javas_readers_and_writers_are_waited_for() {
    let client = client_of(&server().url(), LEASE).await;
    let cli = server().cli().await;
    let java = "b983c153-7421-469a-addb-44fb92259a1b:-7";
    let name = unique_name();
    let hset = ["HSET", &name, "mode", "read", java, "3"];
    cli.cmd(&hset).await.ok();
    cli.cmd(&["PEXPIRE", &name, "60000"]).await.ok();
    for (number, ttl) in [("1", "300"), ("3", "1200")] {
        let key = lease_key(&name, java, number.parse().unwrap());
        cli.cmd(&["SET", &key, "1", "PX", ttl]).await.ok();
    }
    let started = Instant::now();
    let reader = tried(client.rw_lock(name.as_str()).read()).await;
    assert!(reader.is_some());
    drop(reader);
    let ruler = Ruler::start();
    let (guard, at) = wait_for(client.rw_lock(name.as_str()).write())
        .await
        .unwrap();
    let took = at.saturating_duration_since(started);
    assert!(took > ms(900), "he has not left yet: {took:?}");
    assert!(took < secs(2) + ruler.allowance(), "{took:?}");
    drop(guard);
    cli.until_free(&name).await;

    let writes = format!("{java}:write");
    cli.cmd(&["HSET", &name, "mode", "write", &writes, "1"])
        .await
        .ok();
    cli.cmd(&["PEXPIRE", &name, "60000"]).await.ok();
    assert!(tried(client.rw_lock(name.as_str()).read()).await.is_none());
    assert!(tried(client.rw_lock(name.as_str()).write()).await.is_none());
    let reading = wait_for(client.rw_lock(name.as_str()).read());
    cli.until_subscribers(&rw_channel(&name), 1).await;
    // As Java's last unlock does it.
    cli.cmd(&["DEL", &name]).await.ok();
    let (left, ruler) = (Instant::now(), Ruler::start());
    cli.cmd(&["PUBLISH", &rw_channel(&name), "1"]).await.ok();
    let (guard, at) = reading.await.unwrap();
    let took = at.saturating_duration_since(left);
    assert!(took < SOON + ruler.allowance(), "{took:?}");
    drop(guard);
    nothing_left(server(), &name).await;
}

/// `1` wakes all who wait in Redisson's clients, `0` after it keeps one that does not wait yet from doing so; while others read, nobody could enter.
#[tokio::test]
async fn who_waits_is_told_when_somebody_may_come_in() {
    let client = client_of(&server().url(), LEASE).await;
    let name = unique_name();
    let mut monitor = server().monitor().await;
    let told = async |monitor: &mut Monitor| {
        let channel = rw_channel(&name);
        let lines = monitor.lines().await;
        let told = lines
            .iter()
            .filter(|line| line.contains("\"PUBLISH\"") && line.contains(&channel))
            .map(|line| line.rsplit('"').nth(1).unwrap().to_owned());
        let told: Vec<_> = told.collect();
        monitor.clear().await;
        told
    };
    let mut ctx = client.context();
    let rw = ctx.rw_lock(name.as_str());
    let write = rw.write().acquire().await.unwrap();
    let read = rw.read().acquire().await.unwrap();
    let other = client.rw_lock(name.as_str());
    assert_eq!(told(&mut monitor).await, [""; 0]);
    assert_eq!(
        write.release().await,
        ReleaseOutcome::StillHeld { depth: 1 }
    );
    assert_eq!(told(&mut monitor).await, ["1", "0"], "readers may");
    let reader = other.read().acquire().await.unwrap();
    assert_eq!(read.release().await, ReleaseOutcome::Released);
    assert_eq!(told(&mut monitor).await, [""; 0], "somebody reads");
    assert_eq!(reader.release().await, ReleaseOutcome::Released);
    assert_eq!(told(&mut monitor).await, ["1", "0"], "it is free");
    let write = other.write().acquire().await.unwrap();
    assert_eq!(write.release().await, ReleaseOutcome::Released);
    assert_eq!(told(&mut monitor).await, ["1", "0"], "it is free");
    nothing_left(server(), &name).await;
}

/// A store that checks tokens refuses none of those who read at once, and every writer before them.
#[tokio::test]
async fn tokens_of_readers_are_those_of_their_time() {
    for client in both().await {
        let name = unique_name();
        let rw = || client.rw_lock(name.as_str());
        let token = |guard: &LockGuard| guard.fencing_token().unwrap().value();
        let writer = rw().write().acquire().await.unwrap();
        let written = token(&writer);
        drop(writer);
        let first = rw().read().acquire().await.unwrap();
        let second = rw().read().acquire().await.unwrap();
        assert!(token(&first) > written);
        assert_eq!(token(&first), token(&second));
        drop(first);
        let third = rw().read().acquire().await.unwrap();
        assert_eq!(token(&second), token(&third));
        let read = token(&third);
        drop((second, third));
        let writer = rw().write().acquire().await.unwrap();
        assert!(token(&writer) > read);
        drop(writer);
    }
}

/// S2: also if the counter is lost meanwhile.
#[tokio::test]
async fn tokens_grow_over_a_lost_counter() {
    let client = client_of(&server().url(), LEASE).await;
    let cli = server().cli().await;
    let name = unique_name();
    let rw = || client.rw_lock(name.as_str());
    let mut last = 0;
    for round in 0..6 {
        let mut lock = if round % 2 == 0 {
            rw().write()
        } else {
            rw().read()
        };
        let guard = lock.acquire().await.unwrap();
        let token = guard.fencing_token().unwrap().value();
        assert!(token > last, "{token} after {last}");
        last = token;
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
        cli.cmd(&["DEL", &token_key(&name)]).await.ok();
    }
}

#[tokio::test]
async fn inspection_shows_who_reads_and_who_writes() {
    for client in both().await {
        let name = unique_name();
        let mut ctx = client.context();
        let rw = ctx.rw_lock(name.as_str());
        let seen = rw.inspect().await.unwrap();
        assert_eq!((seen.kind, seen.holder), (LockKind::Read, None));
        let long = rw.read().acquire().await.unwrap();
        let short = client.rw_lock(name.as_str()).read().lease(secs(5));
        let short = { short }.acquire().await.unwrap();
        let seen = rw.read().inspect().await.unwrap();
        assert_eq!(seen.kind, LockKind::Read);
        let left: BTreeMap<_, _> = seen
            .holders
            .iter()
            .map(|holder| (holder.remaining.unwrap() > secs(10), holder.owner.clone()))
            .collect();
        assert_eq!(left.len(), 2, "each with a lease of his own: {seen:?}");
        assert_ne!(left[&true], left[&false]);
        assert!(seen.token.is_some());
        drop((long, short));
        let write = rw.write().acquire().await.unwrap();
        let seen = rw.write().inspect().await.unwrap();
        assert_eq!((seen.kind, seen.holders.len()), (LockKind::Write, 1));
        assert_eq!(seen.holder.unwrap().pid, Some(std::process::id()));
        drop(write);
    }
}

#[tokio::test]
async fn force_removes_all_who_hold_it_and_tells_them() {
    for client in both().await {
        let name = unique_name();
        let rw = || client.rw_lock(name.as_str());
        assert!(!rw().force_release().await.unwrap());
        let readers = [
            rw().read().acquire().await.unwrap(),
            rw().read().acquire().await.unwrap(),
        ];
        assert!(rw().force_release().await.unwrap());
        for reader in readers {
            assert_eq!(reader.loss_reason(), Some(LossReason::Forced));
        }
        let write = rw().write().acquire().await.unwrap();
        assert!(rw().force_release().await.unwrap());
        assert_eq!(write.loss_reason(), Some(LossReason::Forced));
        free(&client, &name).await;
    }
}

/// All readers of a line come in together, whoever let them; nobody on either side is forgotten.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_lines_of_a_client_are_served() {
    for client in both().await {
        let name = unique_name();
        for _ in 0..scaled(5, 100) {
            let write = client
                .rw_lock(name.as_str())
                .write()
                .acquire()
                .await
                .unwrap();
            let waiting = (0..8).map(|place| {
                let rw = client.rw_lock(name.as_str());
                let mut lock = if place % 4 == 3 {
                    rw.write()
                } else {
                    rw.read()
                };
                tokio::spawn(async move {
                    let guard = lock.acquire().await.unwrap();
                    tokio::task::yield_now().await;
                    assert!(guard.is_held());
                    assert_eq!(guard.release().await, ReleaseOutcome::Released);
                })
            });
            let waiting: Vec<_> = waiting.collect();
            tokio::task::yield_now().await;
            let ruler = Ruler::start();
            let start = Instant::now();
            assert_eq!(write.release().await, ReleaseOutcome::Released);
            for waiting in join_all(waiting).await {
                waiting.unwrap();
            }
            let took = start.elapsed();
            assert!(took < SOON + ruler.allowance(), "somebody slept: {took:?}");
        }
    }
}

/// Readers together: none waits for another to end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_of_one_line_hold_it_at_once() {
    for client in both().await {
        let name = unique_name();
        let write = client
            .rw_lock(name.as_str())
            .write()
            .acquire()
            .await
            .unwrap();
        let waiting: Vec<_> = (0..10)
            .map(|_| wait_for(client.rw_lock(name.as_str()).read()))
            .collect();
        tokio::task::yield_now().await;
        drop(write);
        let guards: Vec<_> = join_all(waiting).await;
        let guards: Vec<_> = guards.into_iter().map(|it| it.unwrap().0).collect();
        assert!(guards.iter().all(LockGuard::is_held));
        let seen = client.rw_lock(name.as_str()).inspect().await.unwrap();
        assert_eq!(seen.holders.len(), 10);
    }
}

/// What one writes in two steps, nobody reads half of.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_reads_what_is_half_written() {
    let url = server().url();
    let clients = [client_of(&url, LEASE).await, client_of(&url, LEASE).await];
    let name = unique_name();
    let cli = server().cli().await;
    let (one, two) = (format!("one-{name}"), format!("two-{name}"));
    let tasks = (0..8).map(|task| {
        let (client, name) = (clients[task % 2].clone(), name.clone());
        let (one, two, port) = (one.clone(), two.clone(), server().port());
        tokio::spawn(async move {
            let cli = Cli::connect(port).await;
            let get = async |key: &str| -> u64 {
                let text = cli.cmd(&["GET", key]).await.text_if_any();
                text.map_or(0, |text| text.parse().unwrap())
            };
            let mut written = 0;
            for round in 0..scaled(20, 600) {
                let mut ctx = client.context();
                let rw = ctx.rw_lock(name.as_str());
                let write = if (task + round) % 4 == 0 {
                    let guard = rw.write().acquire().await.unwrap();
                    written += 1;
                    for key in [&one, &two] {
                        let next = (get(key).await + 1).to_string();
                        tokio::task::yield_now().await;
                        cli.cmd(&["SET", key, &next]).await.ok();
                    }
                    Some(guard)
                } else {
                    None
                };
                let read = rw.read().acquire().await.unwrap();
                drop(write);
                let before = get(&one).await;
                tokio::task::yield_now().await;
                assert_eq!(before, get(&two).await);
                assert_eq!(before, get(&one).await);
                assert_eq!(read.release().await, ReleaseOutcome::Released);
            }
            written
        })
    });
    let mut written = 0;
    for task in join_all(tasks.collect::<Vec<_>>()).await {
        written += task.unwrap();
    }
    let counted = cli.cmd(&["GET", &two]).await.text_if_any().unwrap();
    assert_eq!(counted, written.to_string());
    cli.cmd(&["DEL", &one, &two]).await.ok();
    nothing_left(server(), &name).await;
}

/// A rule is withdrawn while a reader asks to write, and given back: he reads on, and what was done of it by
/// half does not keep others out for a lease.
async fn upgrade_without_a_rule(command: &str) {
    let server = Server::start();
    let cli = server.cli().await;
    let user = ["ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all"];
    cli.cmd(&user).await.ok();
    let url = format!("redis://app:pw@127.0.0.1:{}", server.port());
    let client = client_of(&url, LEASE).await;
    let other = client_of(&server.url(), LEASE).await;
    let name = unique_name();
    let read = client
        .rw_lock(name.as_str())
        .read()
        .acquire()
        .await
        .unwrap();
    let rule = async |sign: &str| {
        let rule = format!("{sign}{command}");
        cli.cmd(&["ACL", "SETUSER", "app", &rule]).await.ok();
    };
    rule("-").await;
    let (read, error) = RwLock::try_upgrade(read).await.unwrap_err();
    assert!(matches!(error, Error::Denied { .. }), "{error:?}");
    rule("+").await;
    assert!(read.is_held());
    // Others may read with him, as soon as what was done by half is undone.
    let reader = other.rw_lock(name.as_str()).read();
    let (reader, _) = tokio::time::timeout(secs(10), wait_for(reader))
        .await
        .expect("others are kept out")
        .unwrap();
    read.confirm().await.unwrap();
    drop(reader);
    assert_eq!(read.release().await, ReleaseOutcome::Released);
    nothing_left(&server, &name).await;
}

#[tokio::test]
async fn an_upgrade_that_may_not_remove_the_reader_leaves_no_writer() {
    upgrade_without_a_rule("hdel").await;
}

#[tokio::test]
async fn an_upgrade_that_may_not_set_a_deadline_leaves_no_writer() {
    upgrade_without_a_rule("pexpire").await;
}
