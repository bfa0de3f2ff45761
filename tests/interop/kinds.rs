//! Redisson's fair and read/write locks and ours.

use std::time::Instant;

use leasehold::{Error, LockClient, ReleaseOutcome, RwLock};
use tokio::task::JoinHandle;

use crate::java::{Java, Kind};
use crate::{LEASE, common::*, nothing_of_ours_left, ours};

/// Until so many stand in the queue of a fair lock, whoever they are.
async fn until_queued(name: &str, n: i64) {
    let cli = server().cli().await;
    let key = format!("redisson_lock_queue:{{{name}}}");
    eventually(secs(20), "in the queue", async || {
        cli.cmd(&["LLEN", &key]).await.int() == n
    })
    .await;
}

/// One side of a read/write lock.
type Side = fn(&RwLock) -> leasehold::Lock;

fn waits(rust: &LockClient, name: &str) -> JoinHandle<Instant> {
    let mut lock = rust.fair_lock(name);
    tokio::spawn(async move {
        let guard = lock.acquire().await.unwrap();
        let at = Instant::now();
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
        at
    })
}

/// Whoever has it, the other does not get it, and nobody overtakes who waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fair_lock_is_held_by_one_language_at_a_time() {
    let Some(java) = Java::shared() else { return };
    let name = unique_name();
    let rust = ours(LEASE).await;
    let there = java.client(&server().url(), LEASE).await;
    let theirs = there.thread().lock(Kind::Fair, &name);

    theirs.lock().ok().await;
    assert!(
        rust.fair_lock(&*name)
            .try_acquire()
            .await
            .unwrap()
            .is_none()
    );
    let in_vain = rust.fair_lock(&*name).acquire_timeout(ms(300)).await;
    assert!(
        matches!(in_vain, Err(Error::TimedOut { .. })),
        "{in_vain:?}"
    );
    until_queued(&name, 0).await;
    theirs.unlock().ok().await;

    let guard = rust.fair_lock(&*name).acquire().await.unwrap();
    assert!(!theirs.try_lock().yes().await);
    assert!(!theirs.try_lock_within(ms(300), None).yes().await);
    until_queued(&name, 0).await;
    // One of ours waits: theirs may not overtake it, though the lock becomes free.
    let next = waits(&rust, &name);
    until_queued(&name, 1).await;
    assert!(!theirs.try_lock().yes().await);
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    next.await.unwrap();
    assert!(theirs.try_lock().yes().await);
    theirs.unlock().ok().await;
    nothing_of_ours_left(&name).await;
}

/// One queue for both: first come, first served, and each is told by the other's release. Those who
/// take it subtract their wait from all deadlines (Redisson) or not (ours): nobody loses a place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fair_queue_keeps_its_order_across_languages() {
    let Some(java) = Java::shared() else { return };
    let name = unique_name();
    let rust = ours(LEASE).await;
    let there = java.client(&server().url(), LEASE).await;
    for round in 0..scaled(2, 10) {
        let holder = there.thread().lock(Kind::Fair, &name);
        holder.lock().ok().await;
        let mut here = Vec::new();
        let mut waiting = Vec::new();
        // J R J R R J, or the other way round.
        for (at, theirs) in [true, false, true, false, false, true]
            .into_iter()
            .enumerate()
        {
            if theirs == (round % 2 == 0) {
                let lock = there.thread().lock(Kind::Fair, &name);
                waiting.push((at, lock.lock(), lock));
            } else {
                here.push((at, waits(&rust, &name)));
            }
            until_queued(&name, i64::try_from(at).unwrap() + 1).await;
        }
        let (released, ruler) = (Instant::now(), Ruler::start());
        holder.unlock().ok().await;
        // Each of theirs lets go when it has been seen to have it.
        let theirs = async {
            let mut granted = Vec::new();
            for (at, asked, lock) in waiting {
                granted.push((at, asked.ok().await));
                lock.unlock().ok().await;
            }
            granted
        };
        let ours = async {
            let mut granted = Vec::new();
            for (at, waiter) in here {
                granted.push((at, waiter.await.unwrap()));
            }
            granted
        };
        let (theirs, ours) = tokio::join!(theirs, ours);
        let mut order: Vec<_> = theirs.into_iter().chain(ours).collect();
        order.sort_by_key(|(_, at)| *at);
        let places: Vec<_> = order.iter().map(|(place, _)| *place).collect();
        assert_eq!(places, [0, 1, 2, 3, 4, 5], "{order:?}");
        let took = order[5].1 - released;
        assert!(
            took < secs(2) + ruler.allowance(),
            "by messages, not by beats: {took:?}"
        );
    }
    nothing_of_ours_left(&name).await;
}

/// Readers of both languages together, a writer of neither; and the other way round.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_share_across_languages_and_writers_do_not() {
    let Some(java) = Java::shared() else { return };
    let name = unique_name();
    let rust = ours(LEASE).await;
    let there = java.client(&server().url(), LEASE).await;
    let (reads, writes) = (
        there.thread().lock(Kind::Read, &name),
        there.thread().lock(Kind::Write, &name),
    );

    reads.lock().ok().await;
    let ours_reads = rust.rw_lock(&*name).read().acquire().await.unwrap();
    assert!(
        rust.rw_lock(&*name)
            .write()
            .try_acquire()
            .await
            .unwrap()
            .is_none()
    );
    assert!(!writes.try_lock().yes().await);
    // Theirs leaves: the hash stays for our reader, whose lease is seen by their scan.
    reads.unlock().ok().await;
    assert!(!writes.try_lock().yes().await);
    ours_reads.confirm().await.unwrap();
    assert_eq!(ours_reads.release().await, ReleaseOutcome::Released);

    writes.lock().ok().await;
    assert!(
        rust.rw_lock(&*name)
            .read()
            .try_acquire()
            .await
            .unwrap()
            .is_none()
    );
    assert!(
        rust.rw_lock(&*name)
            .write()
            .try_acquire()
            .await
            .unwrap()
            .is_none()
    );
    writes.unlock().ok().await;

    let guard = rust.rw_lock(&*name).write().acquire().await.unwrap();
    assert!(!reads.try_lock().yes().await);
    assert!(!writes.try_lock().yes().await);
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    nothing_of_ours_left(&name).await;
}

/// Each way in which somebody may come in is told to the other language: long before a lease or a cap
/// would end the wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_and_writers_wake_the_other_language() {
    let Some(java) = Java::shared() else { return };
    let name = unique_name();
    let rust = ours(LEASE).await;
    let there = java.client(&server().url(), LEASE).await;
    let (reads, writes) = (
        there.thread().lock(Kind::Read, &name),
        there.thread().lock(Kind::Write, &name),
    );
    let cli = server().cli().await;
    let channel = format!("redisson_rwlock:{{{name}}}");
    let soon = |since: Instant, at: Instant, ruler: &Ruler| {
        let took = at.saturating_duration_since(since);
        assert!(took < secs(1) + ruler.allowance(), "{took:?}");
    };
    let sides: [(Side, _); 2] = [(RwLock::read, &writes), (RwLock::write, &reads)];
    for (side, other) in sides.into_iter().chain([(RwLock::write as Side, &writes)]) {
        // Ours waits for theirs.
        other.lock().ok().await;
        let mut lock = side(&rust.rw_lock(&*name));
        let waiting = tokio::spawn(async move { (lock.acquire().await.unwrap(), Instant::now()) });
        cli.until_subscribers(&channel, 1).await;
        let (since, ruler) = (Instant::now(), Ruler::start());
        other.unlock().ok().await;
        let (guard, at) = waiting.await.unwrap();
        soon(since, at, &ruler);
        cli.until_subscribers(&channel, 0).await;
        // Theirs waits for ours.
        let waiting = other.lock();
        cli.until_subscribers(&channel, 1).await;
        let (since, ruler) = (Instant::now(), Ruler::start());
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
        soon(since, waiting.ok().await, &ruler);
        other.unlock().ok().await;
        cli.until_subscribers(&channel, 0).await;
    }
    // Writing goes over into reading here: their reader comes in, though nobody has released.
    let mut ctx = rust.context();
    let write = ctx.rw_lock(&*name).write().acquire().await.unwrap();
    let read = ctx.rw_lock(&*name).read().acquire().await.unwrap();
    let waiting = reads.lock();
    cli.until_subscribers(&channel, 1).await;
    let (since, ruler) = (Instant::now(), Ruler::start());
    drop(write);
    soon(since, waiting.ok().await, &ruler);
    read.confirm().await.unwrap();
    reads.unlock().ok().await;
    assert_eq!(read.release().await, ReleaseOutcome::Released);
    nothing_of_ours_left(&name).await;
}

/// A JVM that reads is killed while ours goes on reading: our writer waits for the dead one no longer than
/// its lease, whoever keeps the hash alive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_reader_of_the_other_language_is_outlived() {
    let Some(_java) = Java::shared() else { return };
    let name = unique_name();
    let lease = secs(3);
    let rust = ours(LEASE).await;
    let other = Java::another();
    let there = other.client(&server().url(), lease).await;
    there.thread().lock(Kind::Read, &name).lock().ok().await;
    let reads = rust.rw_lock(&*name).read().acquire().await.unwrap();
    let (killed, ruler) = (Instant::now(), Ruler::start());
    other.kill();
    let mut lock = rust.rw_lock(&*name).write();
    let waiting = tokio::spawn(async move { (lock.acquire().await.unwrap(), Instant::now()) });
    server()
        .cli()
        .await
        .until_subscribers(&format!("redisson_rwlock:{{{name}}}"), 1)
        .await;
    assert_eq!(reads.release().await, ReleaseOutcome::Released);
    let (guard, at) = waiting.await.unwrap();
    let took = at - killed;
    assert!(took < lease + secs(2) + ruler.allowance(), "{took:?}");
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    nothing_of_ours_left(&name).await;
}
