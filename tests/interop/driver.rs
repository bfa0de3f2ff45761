//! The driver itself: a command that does nothing would make every test pass.

use crate::common::*;
use crate::java::{Java, Kind, redisson};
use crate::nothing_of_ours_left;

/// Each kind is the lock that it is called, by what Redisson leaves on the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_kind_is_the_lock_that_it_is_called() {
    let Some(java) = Java::shared() else { return };
    let there = java.client(&server().url(), secs(30)).await;
    let cli = server().cli().await;
    for kind in [
        Kind::Plain,
        Kind::Fair,
        Kind::Fenced,
        Kind::Spin,
        Kind::Read,
        Kind::Write,
        Kind::NonReentrant,
        Kind::NonReentrantFair,
    ] {
        let name = unique_name();
        let thread = there.thread();
        let (lock, other) = (thread.lock(kind, &name), there.lock(kind, &name));
        let non_reentrant = matches!(kind, Kind::NonReentrant | Kind::NonReentrantFair);
        if non_reentrant && redisson() < (4, 4, 0) {
            let (class, _) = lock.lock().error().await;
            assert_eq!(class, "UnsupportedOperationException");
            continue;
        }
        lock.lock().ok().await;
        assert!(lock.is_locked().await);
        assert_eq!(lock.hold_count().await, 1);
        let again = lock.try_lock();
        if non_reentrant {
            assert_eq!(again.error().await.0, "IllegalMonitorStateException");
        } else {
            assert!(again.yes().await);
            assert_eq!(lock.hold_count().await, 2);
            lock.unlock().ok().await;
        }
        let owner = thread.owner_id().await;
        let hash = cli.hash(&name).await;
        let fields: Vec<_> = hash.keys().map(String::as_str).collect();
        match kind {
            Kind::Read => assert_eq!((&hash["mode"][..], fields.len()), ("read", 2)),
            Kind::Write => assert_eq!(hash[&format!("{owner}:write")], "1"),
            _ => assert_eq!(fields, [&owner]),
        }
        assert_eq!(cli.exists(&token_key(&name)).await, kind == Kind::Fenced);
        // Two readers go together, nobody else.
        let shared = other.try_lock().yes().await;
        assert_eq!(shared, kind == Kind::Read, "{kind:?}");
        if shared {
            other.unlock().ok().await;
        }
        lock.unlock().ok().await;
        let never_held = there.lock(kind, &name).unlock();
        let old = redisson() < (3, 44, 0) && matches!(kind, Kind::Read | Kind::Write);
        if old || matches!(kind, Kind::Fair | Kind::NonReentrantFair) {
            // When nobody has it, these thank also who never had it.
            never_held.ok().await;
        } else {
            assert_eq!(never_held.error().await.0, "IllegalMonitorStateException");
        }
        cli.cmd(&["DEL", &token_key(&name)]).await.ok();
        nothing_of_ours_left(&name).await;
    }
}

/// A wait for a token ends with its budget, and with the lock. (Redisson may leave a subscription behind if the
/// budget ends before that is confirmed; so none here is short.)
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_can_be_waited_for() {
    let Some(java) = Java::shared() else { return };
    let name = unique_name();
    let there = java.client(&server().url(), secs(30)).await;
    let (holder, waiter) = (
        there.lock(Kind::Fenced, &name),
        there.lock(Kind::Fenced, &name),
    );
    assert_eq!(holder.lock_and_get_token().await, 1);
    assert!(!waiter.try_lock_and_get_token(secs(1), None).yes().await);
    holder.unlock().ok().await;
    let lease = Some(secs(10));
    assert_eq!(waiter.try_lock_and_get_token(secs(1), lease).int().await, 2);
    assert!((1..=10_000).contains(&waiter.ttl().await));
    waiter.unlock().ok().await;
    server().cmd(&["DEL", &token_key(&name)]).await.ok();
    nothing_of_ours_left(&name).await;
}

/// Commands of several threads are under way at once, and one that waits can be interrupted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn threads_wait_at_once_and_can_be_interrupted() {
    let Some(java) = Java::shared() else { return };
    let name = unique_name();
    let there = java.client(&server().url(), secs(30)).await;
    let cli = server().cli().await;
    let holder = there.lock(Kind::Plain, &name);
    holder.lock().ok().await;
    let thread = there.thread();
    let leaver = thread
        .lock(Kind::Plain, &name)
        .try_lock_within(secs(50), None);
    let mut waiter = there.lock(Kind::Plain, &name).lock();
    cli.until_waiters(&name, 1).await;
    thread.interrupt().ok().await;
    // By which name depends on whether it sleeps or has a command under way.
    let (class, _) = leaver.error().await;
    assert!(
        ["InterruptedException", "RedisException"].contains(&&*class),
        "{class}"
    );
    assert!(waiter.is_pending());
    holder.unlock().ok().await;
    waiter.ok().await;
    assert!(holder.force_unlock().yes().await);
    there.close().ok().await;
    // Not before: an interrupted thread may leave its subscription to its client.
    nothing_of_ours_left(&name).await;
    let lock = there.lock(Kind::Plain, &name).try_lock();
    assert!(lock.answer().await.text.starts_with("error "));
}
