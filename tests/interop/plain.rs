//! Redisson's plain lock and ours: who holds, who waits, who is woken.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use leasehold::{Error, LockClient, ReleaseOutcome};

use crate::java::{Java, Kind};
use crate::{LEASE, common::*, nothing_of_ours_left, ours};

/// Whoever has it, the other language does not get it, and sees that it is held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_language_holds_and_the_other_does_not() {
    let Some(java) = Java::shared() else { return };
    let name = unique_name();
    let rust = ours(LEASE).await;
    let there = java.client(&server().url(), LEASE).await;
    let theirs = there.lock(Kind::Plain, &name);

    theirs.lock().ok().await;
    assert!(rust.lock(&*name).try_acquire().await.unwrap().is_none());
    let in_vain = rust.lock(&*name).acquire_timeout(Duration::ZERO).await;
    assert!(matches!(in_vain, Err(Error::TimedOut { .. })));
    let holder = rust.inspect(&*name).await.unwrap().holder.unwrap();
    assert_eq!((holder.count, holder.label), (1, None));
    let left = holder.remaining.unwrap();
    assert!(left > secs(10) && left <= LEASE, "{left:?}");
    theirs.unlock().ok().await;

    let guard = rust.lock(&*name).try_acquire().await.unwrap().unwrap();
    assert!(!theirs.try_lock().yes().await);
    assert!(!theirs.try_lock_within(ms(0), None).yes().await);
    assert!(theirs.is_locked().await);
    assert_eq!(theirs.hold_count().await, 0);
    let left = theirs.ttl().await;
    assert!((10_000..=30_000).contains(&left), "{left}");
    let (class, _) = theirs.unlock().error().await;
    assert_eq!(class, "IllegalMonitorStateException");
    guard.confirm().await.unwrap();
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    assert!(theirs.try_lock().yes().await);
    theirs.unlock().ok().await;
    nothing_of_ours_left(&name).await;
}

/// How long wake-ups took, and whether each was within its bound.
#[derive(Default)]
struct WakeUps(Vec<(Duration, bool)>);

impl WakeUps {
    fn add(&mut self, took: Duration, ruler: Ruler) {
        self.0.push((took, took < ms(50) + ruler.allowance()));
    }

    /// The median, if most were within their bounds; and all were messages: neither a cap nor a lease
    /// ends as early.
    fn median(mut self) -> Duration {
        let late = self.0.iter().filter(|(_, in_time)| !in_time).count();
        assert!(2 * late < self.0.len(), "{:?}", self.0);
        self.0.sort();
        self.0[self.0.len() / 2].0
    }
}

/// A release is heard in the other language: half of the waiters have the lock within 50 ms.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_wakes_the_other_language() {
    let Some(java) = Java::shared() else { return };
    let rust = ours(LEASE).await;
    let there = java.client(&server().url(), LEASE).await;
    let cli = server().cli().await;
    let (mut here_first, mut there_first) = (WakeUps::default(), WakeUps::default());
    let name = unique_name();
    let theirs = there.lock(Kind::Plain, &name);
    for _ in 0..scaled(15, 201) {
        theirs.lock().ok().await;
        let mut lock = rust.lock(&*name);
        let waiting = tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap();
            (guard, Instant::now())
        });
        cli.until_waiters(&name, 1).await;
        let (released, ruler) = (Instant::now(), Ruler::start());
        theirs.unlock().ok().await;
        let (guard, granted) = waiting.await.unwrap();
        there_first.add(granted - released, ruler);
        // A subscription outlives its last waiter by a moment.
        cli.until_waiters(&name, 0).await;

        let waiting = theirs.lock();
        cli.until_waiters(&name, 1).await;
        let (released, ruler) = (Instant::now(), Ruler::start());
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
        let granted = waiting.ok().await;
        here_first.add(granted - released, ruler);
        theirs.unlock().ok().await;
        cli.until_waiters(&name, 0).await;
    }
    let (to_rust, to_java) = (there_first.median(), here_first.median());
    println!("woken by the other: Rust within {to_rust:?}, Java within {to_java:?} (medians)");
    nothing_of_ours_left(&name).await;
}

/// The hash has one field, the owner, with its count; and both sides read it alike.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counts_of_re_entry_are_seen_by_both() {
    let Some(java) = Java::shared() else { return };
    let name = unique_name();
    let rust = ours(LEASE).await;
    let thread = java.client(&server().url(), LEASE).await.thread();
    let theirs = thread.lock(Kind::Plain, &name);
    let cli = server().cli().await;
    let count = async |client: &LockClient| {
        let seen = client.inspect(&*name).await.unwrap();
        seen.holder.map(|holder| holder.count)
    };

    let owner = thread.owner_id().await;
    for depth in 1..=3 {
        theirs.lock().ok().await;
        assert_eq!(theirs.hold_count().await, depth);
        let hash = BTreeMap::from([(owner.clone(), depth.to_string())]);
        assert_eq!(cli.hash(&name).await, hash);
        assert_eq!(count(&rust).await, Some(depth.try_into().unwrap()));
    }
    for depth in [2, 1] {
        theirs.unlock().ok().await;
        assert_eq!(count(&rust).await, Some(depth));
        assert!(rust.lock(&*name).try_acquire().await.unwrap().is_none());
    }
    theirs.unlock().ok().await;
    assert_eq!(count(&rust).await, None);

    let mut ctx = rust.context();
    let outer = ctx.lock(&*name).acquire().await.unwrap();
    let inner = ctx.lock(&*name).acquire().await.unwrap();
    let hash = cli.hash(&name).await;
    let [(owner, count)] = &hash.into_iter().collect::<Vec<_>>()[..] else {
        panic!("one owner")
    };
    assert_eq!(count, "2");
    // As Java's: its client, and what reads as a thread.
    let (client, thread) = owner.split_once(':').unwrap();
    assert_eq!(client.len(), 36);
    assert!(thread.parse::<i64>().unwrap() >= 0);
    assert_eq!(theirs.hold_count().await, 0);
    assert_eq!(
        inner.release().await,
        ReleaseOutcome::StillHeld { depth: 1 }
    );
    assert_eq!(cli.count(&name).await, Some(1));
    assert!(!theirs.try_lock().yes().await);
    assert_eq!(outer.release().await, ReleaseOutcome::Released);
    assert!(!theirs.is_locked().await);
    nothing_of_ours_left(&name).await;
}

/// Both watchdogs keep what they hold for three leases; all the time the other side sees a lease that
/// goes on, and gets nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewed_lease_goes_on_for_the_other_language() {
    const SHORT: Duration = secs(3);
    let Some(java) = Java::shared() else { return };
    let (a, b) = (unique_name(), unique_name());
    let rust = ours(SHORT).await;
    let there = java.client(&server().url(), SHORT).await;
    let cli = server().cli().await;
    let theirs = there.lock(Kind::Plain, &a);
    theirs.lock().ok().await;
    let guard = rust.lock(&*b).acquire().await.unwrap();
    let owners = (cli.hash(&a).await, cli.hash(&b).await);
    let (start, other) = (Instant::now(), there.lock(Kind::Plain, &b));
    while start.elapsed() < 3 * SHORT {
        assert!(rust.lock(&*a).try_acquire().await.unwrap().is_none());
        let holder = rust.inspect(&*a).await.unwrap().holder.unwrap();
        let left = holder.remaining.unwrap();
        assert!(left > ms(0) && left <= SHORT, "{left:?}");
        assert!(!other.try_lock().yes().await);
        let left = other.ttl().await;
        assert!((1..=3000).contains(&left), "{left}");
        // The subject is what stays as time passes.
        tokio::time::sleep(ms(100)).await;
    }
    assert_eq!((cli.hash(&a).await, cli.hash(&b).await), owners);
    guard.ensure_held().unwrap();
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    theirs.unlock().ok().await;
    nothing_of_ours_left(&a).await;
    nothing_of_ours_left(&b).await;
}

/// `tryLock(wait, lease)` and `acquire_timeout`: the lock if it comes in time, else nothing, in time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_budget_is_kept_against_the_other_language() {
    const BUDGET: Duration = secs(1);
    let Some(java) = Java::shared() else { return };
    let name = unique_name();
    let rust = ours(LEASE).await;
    let there = java.client(&server().url(), LEASE).await;
    let (theirs, others) = (
        there.lock(Kind::Plain, &name),
        there.lock(Kind::Plain, &name),
    );
    let cli = server().cli().await;
    let limit = |ruler: Ruler| BUDGET + ms(100) + ruler.allowance();

    let guard = rust.lock(&*name).acquire().await.unwrap();
    let (start, ruler) = (Instant::now(), Ruler::start());
    let answer = theirs.try_lock_within(BUDGET, None).answer().await;
    let took = answer.at - start;
    assert_eq!(answer.text, "false");
    assert!(took >= BUDGET && took < limit(ruler), "{took:?}");
    let waiting = theirs.try_lock_within(secs(20), Some(secs(10)));
    cli.until_waiters(&name, 1).await;
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    assert!(waiting.yes().await);

    let (start, ruler) = (Instant::now(), Ruler::start());
    let in_vain = rust.lock(&*name).acquire_timeout(BUDGET).await;
    let took = start.elapsed();
    assert!(matches!(in_vain, Err(Error::TimedOut { .. })));
    assert!(took >= BUDGET && took < limit(ruler), "{took:?}");
    let mut lock = rust.lock(&*name);
    let waiting = tokio::spawn(async move { lock.acquire_timeout(secs(20)).await });
    cli.until_waiters(&name, 1).await;
    theirs.unlock().ok().await;
    let guard = waiting.await.unwrap().unwrap();
    assert!(!others.try_lock().yes().await);
    drop(guard);
    nothing_of_ours_left(&name).await;
}
