//! Holds that end otherwise than by their own release: by time, by a killed process, by force.

use std::time::{Duration, Instant};

use leasehold::{LossReason, ReleaseOutcome};

use crate::java::{Java, Kind};
use crate::{LEASE, common::*, nothing_of_ours_left, ours};

/// Long enough to be seen on a busy machine.
const SHORT: Duration = secs(2);

/// Not sooner than the lease allows, and no later than a little past its end.
fn assert_in_time(took: Duration, ruler: Ruler) {
    let limit = SHORT + ms(300) + ruler.allowance();
    assert!(took < limit, "{took:?}, not within {limit:?}");
}

/// Leases that nobody renews: each side waits for the other's end, which no message tells.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_ends_by_itself_is_followed_at_its_end() {
    let Some(java) = Java::shared() else { return };
    let name = unique_name();
    let rust = ours(LEASE).await;
    let there = java.client(&server().url(), LEASE).await;
    let theirs = there.lock(Kind::Plain, &name);

    let (asked, ruler) = (Instant::now(), Ruler::start());
    theirs.lock_for(SHORT).ok().await;
    let guard = rust.lock(&*name).acquire().await.unwrap();
    assert!(asked.elapsed() >= SHORT);
    assert_in_time(asked.elapsed(), ruler);
    let (class, _) = theirs.unlock().error().await;
    assert_eq!(class, "IllegalMonitorStateException");
    guard.confirm().await.unwrap();
    assert_eq!(guard.release().await, ReleaseOutcome::Released);

    let (asked, ruler) = (Instant::now(), Ruler::start());
    let mut lock = rust.lock(&*name).lease(SHORT);
    let guard = lock.acquire().await.unwrap();
    let granted = theirs.lock().ok().await;
    // It had told us before.
    assert_eq!(guard.loss_reason(), Some(LossReason::DeadlinePassed));
    assert!(granted - asked >= SHORT);
    assert_in_time(granted - asked, ruler);
    let lost = ReleaseOutcome::Lost(LossReason::DeadlinePassed);
    assert_eq!(guard.release().await, lost);
    assert_eq!(theirs.hold_count().await, 1);
    theirs.unlock().ok().await;
    nothing_of_ours_left(&name).await;
}

/// SIGKILL of the JVM that holds: our waiter has the lock when the lease ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_jvm_is_followed_within_its_lease() {
    if Java::shared().is_none() {
        return;
    }
    let (java, name) = (Java::another(), unique_name());
    let rust = ours(LEASE).await;
    let there = java.client(&server().url(), SHORT).await;
    there.lock(Kind::Plain, &name).lock().ok().await;
    let mut lock = rust.lock(&*name);
    let waiting = tokio::spawn(async move { lock.acquire().await.unwrap() });
    server().cli().await.until_waiters(&name, 1).await;
    java.kill();
    let (killed, ruler) = (Instant::now(), Ruler::start());
    let guard = waiting.await.unwrap();
    assert_in_time(killed.elapsed(), ruler);
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    nothing_of_ours_left(&name).await;
}

/// A process that holds the lock until it is killed.
#[tokio::test]
async fn holding_worker() {
    let Some(mut me) = WorkerSide::if_spawned() else {
        return;
    };
    let env = |key| std::env::var(key).unwrap();
    let builder = leasehold::LockClient::builder().url(env("URL"));
    let client = builder.lease(SHORT).build().await.unwrap();
    let guard = client.lock(env("NAME")).acquire().await.unwrap();
    me.say("holds");
    me.line().await;
    drop(guard);
}

/// SIGKILL of the Rust process that holds: Java's waiter has the lock when the lease ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_rust_process_is_followed_within_its_lease() {
    let Some(java) = Java::shared() else { return };
    let (url, name) = (server().url(), unique_name());
    let there = java.client(&url, LEASE).await;
    let envs = [("URL", url.as_str()), ("NAME", &name)];
    let mut worker = Worker::spawn("ends::holding_worker", &envs);
    worker.expect("holds").await;
    let theirs = there.lock(Kind::Plain, &name);
    let waiting = theirs.lock();
    server().cli().await.until_waiters(&name, 1).await;
    worker.kill();
    let (killed, ruler) = (Instant::now(), Ruler::start());
    let granted = waiting.ok().await;
    assert_in_time(granted.saturating_duration_since(killed), ruler);
    theirs.unlock().ok().await;
    nothing_of_ours_left(&name).await;
}

/// `forceUnlock` takes our hold away: we are told by the next renewal at the latest, with the reason; and
/// its message wakes who waits here.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forced_unlock_is_told_as_a_loss() {
    let Some(java) = Java::shared() else { return };
    let (rust, waiter) = (ours(secs(3)).await, ours(LEASE).await);
    let there = java.client(&server().url(), LEASE).await;
    let cli = server().cli().await;

    let name = unique_name();
    let theirs = there.lock(Kind::Plain, &name);
    let guard = rust.lock(&*name).acquire().await.unwrap();
    let (forced, ruler) = (Instant::now(), Ruler::start());
    assert!(theirs.force_unlock().yes().await);
    guard.lost().cancelled().await;
    // A third of the lease, at which it is renewed.
    let (took, limit) = (forced.elapsed(), secs(1) + ms(200) + ruler.allowance());
    assert!(took < limit, "{took:?}");
    assert_eq!(guard.loss_reason(), Some(LossReason::KeyGone));
    drop(guard);
    assert!(!theirs.force_unlock().yes().await);

    let guard = rust.lock(&*name).acquire().await.unwrap();
    let mut lock = waiter.lock(&*name);
    let waiting = tokio::spawn(async move { lock.acquire().await.unwrap() });
    cli.until_waiters(&name, 1).await;
    let (forced, ruler) = (Instant::now(), Ruler::start());
    assert!(theirs.force_unlock().yes().await);
    let next = waiting.await.unwrap();
    // Sooner than the cap of a waiter's sleep.
    let (took, limit) = (forced.elapsed(), secs(1) + ruler.allowance());
    assert!(took < limit, "{took:?}");
    guard.lost().cancelled().await;
    assert_eq!(guard.loss_reason(), Some(LossReason::TakenByOther));
    // Whose release then touches nobody.
    drop(guard);
    next.confirm().await.unwrap();
    drop(next);
    nothing_of_ours_left(&name).await;
}

/// `force_release` takes Java's hold away: its `unlock` says so, by an exception, and its waiter is woken.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn our_forced_release_is_an_illegal_monitor_state_there() {
    let Some(java) = Java::shared() else { return };
    let name = unique_name();
    let rust = ours(LEASE).await;
    let there = java.client(&server().url(), LEASE).await;
    let (theirs, others) = (
        there.lock(Kind::Plain, &name),
        there.lock(Kind::Plain, &name),
    );
    theirs.lock().ok().await;
    theirs.lock().ok().await;
    let waiting = others.lock();
    server().cli().await.until_waiters(&name, 1).await;
    let (forced, ruler) = (Instant::now(), Ruler::start());
    assert!(rust.force_release(&*name).await.unwrap());
    let granted = waiting.ok().await;
    let took = granted.saturating_duration_since(forced);
    assert!(took < ms(500) + ruler.allowance(), "{took:?}");
    assert_eq!(theirs.hold_count().await, 0);
    let (class, message) = theirs.unlock().error().await;
    assert_eq!(class, "IllegalMonitorStateException", "{message}");
    // That exception touched nobody's hold.
    assert_eq!(others.hold_count().await, 1);
    others.unlock().ok().await;
    assert!(!rust.force_release(&*name).await.unwrap());
    nothing_of_ours_left(&name).await;
}
