//! Redisson's other locks on a name of ours, as far as they share the hash of the plain lock.

use std::time::{Duration, Instant};

use leasehold::{LockClient, LockGuard, ReleaseOutcome};
use tokio::task::JoinHandle;

use crate::java::{Java, Kind, redisson};
use crate::{LEASE, common::*, nothing_of_ours_left, ours};

/// How long a waiter of ours sleeps at most.
const CAP: Duration = secs(2);

fn wait_for(client: &LockClient, name: &str) -> JoinHandle<(LockGuard, Instant)> {
    let mut lock = client.lock(name);
    tokio::spawn(async move {
        let guard = lock.acquire().await.unwrap();
        (guard, Instant::now())
    })
}

/// The spin lock excludes us and we it. Its unlock tells nobody, so our waiter finds out by itself: by the cap of
/// its sleep, or by the end of the lease that it saw. It polls, so it has our lock soon after the release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spin_lock_excludes_and_is_found_free_without_a_message() {
    let Some(java) = Java::shared() else { return };
    let name = unique_name();
    let rust = ours(LEASE).await;
    let there = java.client(&server().url(), LEASE).await;
    let theirs = there.lock(Kind::Spin, &name);
    let cli = server().cli().await;

    theirs.lock().ok().await;
    assert!(rust.lock(&*name).try_acquire().await.unwrap().is_none());
    let waiting = wait_for(&rust, &name);
    cli.until_waiters(&name, 1).await;
    let mut monitor = server().monitor().await;
    let (released, ruler) = (Instant::now(), Ruler::start());
    theirs.unlock().ok().await;
    let told = |line: &str| line.contains("UBLISH\"") && line.contains(&name);
    let messages = monitor
        .count(|line| told(&line.to_uppercase().replace("TEST-", "test-")))
        .await;
    let (guard, granted) = waiting.await.unwrap();
    let took = granted.saturating_duration_since(released);
    assert!(took < CAP + ms(200) + ruler.allowance(), "{took:?}");
    assert_eq!(messages, 0);

    assert!(!theirs.try_lock().yes().await);
    let mut waiting = theirs.lock();
    // It does not subscribe: what tells of its attempts is that they are made.
    monitor.clear().await;
    eventually(secs(10), "it spins", async || {
        monitor.script_calls(&name).await >= 3
    })
    .await;
    assert!(waiting.is_pending());
    let (released, ruler) = (Instant::now(), Ruler::start());
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    let granted = waiting.ok().await;
    let took = granted.saturating_duration_since(released);
    // Its pauses grow to 128 ms.
    assert!(took < ms(400) + ruler.allowance(), "{took:?}");
    theirs.unlock().ok().await;

    let (asked, ruler) = (Instant::now(), Ruler::start());
    theirs.lock_for(ms(1500)).ok().await;
    let (guard, granted) = wait_for(&rust, &name).await.unwrap();
    let took = granted - asked;
    assert!(
        took >= ms(1500) && took < ms(1800) + ruler.allowance(),
        "{took:?}"
    );
    drop(guard);
    nothing_of_ours_left(&name).await;
}

/// The non-reentrant lock is a plain lock to us. That it refuses its own thread is its own affair, and changes
/// nothing that we see.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_non_reentrant_lock_excludes_and_wakes() {
    let Some(java) = Java::shared() else { return };
    let name = unique_name();
    let rust = ours(LEASE).await;
    let there = java.client(&server().url(), LEASE).await;
    let theirs = there.lock(Kind::NonReentrant, &name);
    let cli = server().cli().await;
    if redisson() < (4, 4, 0) {
        let (class, _) = theirs.lock().error().await;
        assert_eq!(class, "UnsupportedOperationException");
        return;
    }

    theirs.lock().ok().await;
    let (class, _) = theirs.try_lock().error().await;
    assert_eq!(class, "IllegalMonitorStateException");
    assert!(rust.lock(&*name).try_acquire().await.unwrap().is_none());
    let waiting = wait_for(&rust, &name);
    cli.until_waiters(&name, 1).await;
    let (released, ruler) = (Instant::now(), Ruler::start());
    theirs.unlock().ok().await;
    let (guard, granted) = waiting.await.unwrap();
    let took = granted.saturating_duration_since(released);
    assert!(took < ms(500) + ruler.allowance(), "{took:?}");
    cli.until_waiters(&name, 0).await;

    assert!(!theirs.try_lock().yes().await);
    let waiting = theirs.lock();
    cli.until_waiters(&name, 1).await;
    let (released, ruler) = (Instant::now(), Ruler::start());
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    let took = waiting.ok().await.saturating_duration_since(released);
    assert!(took < ms(500) + ruler.allowance(), "{took:?}");
    theirs.unlock().ok().await;
    nothing_of_ours_left(&name).await;
}

/// `getMultiLock` over names of which we hold one: it takes none of them, or all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_multi_lock_waits_for_the_name_that_we_hold() {
    let Some(java) = Java::shared() else { return };
    let base = unique_name();
    let [a, b, c] = ["a", "b", "c"].map(|part| format!("{base}:{part}"));
    let rust = ours(LEASE).await;
    let there = java.client(&server().url(), LEASE).await;
    let theirs = there.thread().multi_lock(&[&a, &b, &c]);
    let cli = server().cli().await;

    let guard = rust.lock(&*b).acquire().await.unwrap();
    assert!(!theirs.try_lock().yes().await);
    assert!(!theirs.try_lock_within(secs(1), None).yes().await);
    for free in [&a, &c] {
        cli.until_free(free).await;
    }
    let waiting = theirs.lock();
    cli.until_waiters(&b, 1).await;
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    waiting.ok().await;
    for name in [&a, &b, &c] {
        assert!(
            rust.lock(name.as_str())
                .try_acquire()
                .await
                .unwrap()
                .is_none()
        );
        assert_eq!(cli.count(name).await, Some(1));
    }

    let waiting = wait_for(&rust, &c);
    cli.until_waiters(&c, 1).await;
    let (released, ruler) = (Instant::now(), Ruler::start());
    theirs.unlock().ok().await;
    let (guard, granted) = waiting.await.unwrap();
    let took = granted.saturating_duration_since(released);
    assert!(took < ms(500) + ruler.allowance(), "{took:?}");
    assert!(!theirs.try_lock().yes().await);
    drop(guard);
    nothing_of_ours_left(&base).await;
}
