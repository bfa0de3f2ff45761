//! Time: a grant that comes too late is none, a process that stood still notices, and of the levels
//! of one hold the longest lease and the shortest limit count.

use std::time::{Duration, Instant};

use leasehold::{Error, LockClient, LossReason, ReleaseOutcome};

use crate::common::*;
use crate::support::client_of;

/// B58: every answer takes longer than the lease. No guard comes of it, and nothing is left.
#[tokio::test]
async fn no_guard_comes_of_answers_later_than_the_lease() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let lease = ms(300);
    let client = client_of(&proxy.url(), secs(30)).await;
    let name = unique_name();
    proxy.inject(Fault::Delay {
        requests: Duration::ZERO,
        replies: lease * 6 / 5,
    });
    let mut lock = client.lock(name.as_str()).lease(lease);
    let tried = lock.acquire_timeout(lease * 4).await;
    let error = tried.map(|guard| guard.remaining()).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Indeterminate { .. } | Error::Unreachable { .. }
        ),
        "{error:?}"
    );
    proxy.heal();
    nothing_left(&server, &name).await;
    // It was tried, and is free.
    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
}

/// B58: one late answer, of an attempt given up long before. The hold that is believed in is the one
/// that a later attempt confirmed, by that attempt's clock.
#[tokio::test]
async fn a_late_answer_of_an_early_attempt_prolongs_nothing() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let lease = secs(3);
    let client = client_of(&proxy.url(), secs(30)).await;
    let name = unique_name();
    let cli = server.cli().await;
    // The server knows the script from here on: the answer below is the grant.
    drop(client.lock(unique_name()).acquire().await.unwrap());
    let late = proxy.inject(Fault::reply(bytes(&name), Act::Delay(lease * 6 / 5)));
    let guard = client
        .lock(name.as_str())
        .lease(lease)
        .acquire()
        .await
        .unwrap();
    assert!(late.is_hit());
    // Before the look at the server: what is believed must end first.
    let until = Instant::now() + guard.remaining();
    let left = Duration::from_millis(cli.pttl(&name).await.cast_unsigned());
    assert!(
        left + ms(100) < lease,
        "the first attempt took it, a timeout ago: {left:?}"
    );
    assert!(until <= Instant::now() + left, "believed beyond its end");
    assert_eq!(cli.count(&name).await, Some(1));
    guard.lost().cancelled().await;
    assert_eq!(guard.loss_reason(), Some(LossReason::DeadlinePassed));
    drop(guard);
    nothing_left(&server, &name).await;
}

/// B58: the answer was in time, and this process was not: it reads it when the lease is over. That is
/// no grant; the next attempt is.
#[test]
fn a_grant_read_too_late_is_not_a_grant() {
    // One thread for everything, so that it can stand still between sending and reading.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let lease = secs(2);
    let name = unique_name();
    let proxy = Proxy::start(server().port());
    runtime.block_on(async {
        // The default lease is how long a wait puts up with a server that says nothing.
        let client = client_of(&proxy.url(), secs(30)).await;
        let cli = server().cli().await;
        drop(client.lock(unique_name()).acquire().await.unwrap());
        for _ in 0..scaled(2, 20) {
            let mut lock = client.lock(name.as_str()).lease(lease);
            let held = proxy.inject(Fault::reply(bytes(&name), Act::Hold));
            let mut acquiring = Box::pin(lock.acquire());
            while !held.is_hit() {
                assert!(futures_util::poll!(&mut acquiring).is_pending());
                tokio::task::yield_now().await;
            }
            // The server has granted it. The answer comes while we stand still.
            held.release();
            // The subject: standing still for more than a lease.
            std::thread::sleep(lease * 6 / 5);
            let guard = acquiring.await.unwrap();
            let until = Instant::now() + guard.remaining();
            assert!(guard.is_held());
            let left = Duration::from_millis(cli.pttl(&name).await.cast_unsigned());
            assert!(until <= Instant::now() + left, "believed beyond its end");
            assert_eq!(cli.count(&name).await, Some(1));
            guard.confirm().await.unwrap();
            assert_eq!(guard.release().await, ReleaseOutcome::Released);
        }
        nothing_left(server(), &name).await;
    });
}

/// B58: the grant was offered in time, and claimed when its lease was over: the caller was not polled.
#[tokio::test]
async fn a_grant_claimed_too_late_is_not_a_grant() {
    let lease = secs(2);
    let client = client_of(&server().url(), secs(30)).await;
    let name = unique_name();
    let mut lock = client.lock(name.as_str()).lease(lease);
    let mut acquiring = Box::pin(lock.acquire());
    assert!(futures_util::poll!(&mut acquiring).is_pending());
    let cli = server().cli().await;
    // The subject: nobody polls it for more than a lease.
    tokio::time::sleep(lease * 6 / 5).await;
    let guard = acquiring.await.unwrap();
    let until = Instant::now() + guard.remaining();
    let left = Duration::from_millis(cli.pttl(&name).await.cast_unsigned());
    assert!(until <= Instant::now() + left, "believed beyond its end");
    assert!(guard.is_held());
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    nothing_left(server(), &name).await;
}

/// Holds the lock and looks at it without end, for the test below.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_worker() {
    let Some(mut me) = WorkerSide::if_spawned() else {
        return;
    };
    let lease = ms(std::env::var("LEASE_MS").unwrap().parse().unwrap());
    let client = client_of(&std::env::var("URL").unwrap(), lease).await;
    let name = std::env::var("NAME").unwrap();
    let guard = std::sync::Arc::new(client.lock(name).acquire().await.unwrap());
    let looked_at = std::sync::Arc::clone(&guard);
    // Its own thread: the first look after the stop is by nobody's leave.
    let (began, looks) = tokio::sync::oneshot::channel();
    let looker = std::thread::spawn(move || {
        let mut last = Instant::now();
        let _ = began.send(());
        loop {
            let held = looked_at.is_held();
            let now = Instant::now();
            // A pause of two leases can only be the stop.
            if now - last > lease * 2 {
                return (held, looked_at.is_held(), looked_at.loss_reason());
            }
            let why = looked_at.loss_reason();
            assert!(held, "lost without a stop: {why:?}, {:?} apart", now - last);
            last = now;
            // Leaves the processor to the others.
            std::thread::sleep(Duration::from_micros(200));
        }
    });
    looks.await.unwrap();
    me.say("held");
    let work = guard.run(async {
        let mut last = Instant::now();
        loop {
            tokio::time::sleep(ms(1)).await;
            assert!(last.elapsed() < lease, "work went on after the stop");
            last = Instant::now();
        }
    });
    let stopped: Result<(), Error> = work.await;
    assert!(matches!(stopped, Err(Error::Lost { .. })), "{stopped:?}");
    // Begun before the stop or behind it; the one behind it is what counts.
    let (_, first, reason) = looker.join().unwrap();
    me.say(&format!("held {first}, {reason:?}"));
    assert_eq!(me.line().await.as_deref(), Some("release"));
    let guard = std::sync::Arc::into_inner(guard).expect("the looker has ended");
    me.say(&format!("{:?}", guard.release().await));
}

/// B61: the holder's process stands still for three leases and another takes the lock. Its first look
/// afterwards says "lost", its work does not go on, and the other's hold is not touched.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_holder_notices_at_its_first_look() {
    let lease = ms(2500);
    let name = unique_name();
    let (url, millis) = (server().url(), lease.as_millis().to_string());
    let env = [
        ("URL", url.as_str()),
        ("LEASE_MS", millis.as_str()),
        ("NAME", name.as_str()),
    ];
    let mut holder = Worker::spawn("time::stopped_worker", &env);
    holder.expect("held").await;
    let client = client_of(&server().url(), secs(30)).await;
    holder.stop();
    let stopped = Instant::now();
    let ruler = Ruler::start();
    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    let took = stopped.elapsed();
    assert!(
        took < lease + ms(100) + ruler.allowance(),
        "entered after {took:?}"
    );
    // The subject: three leases of standing still.
    tokio::time::sleep((lease * 3).saturating_sub(took)).await;
    holder.cont();
    holder.expect("held false, Some(DeadlinePassed)").await;
    let cli = server().cli().await;
    let ours = cli.hash(&name).await;
    assert_eq!(ours.len(), 1);
    holder.say("release").await;
    holder.expect("Lost(DeadlinePassed)").await;
    assert_eq!(cli.hash(&name).await, ours);
    guard.confirm().await.unwrap();
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    holder.kill();
    nothing_left(server(), &name).await;
}

/// Rule 9: a re-entry with a longer lease lengthens it, with a shorter one leaves it; leaving shortens
/// nothing either.
#[tokio::test]
async fn a_reentry_lengthens_the_lease_and_never_shortens_it() {
    let client = client_of(&server().url(), secs(30)).await;
    let name = unique_name();
    let cli = server().cli().await;
    let mut ctx = client.context();
    let outer = ctx
        .lock(name.as_str())
        .lease(secs(30))
        .acquire()
        .await
        .unwrap();
    let left = async |from: i64, to: i64| {
        let left = cli.pttl(&name).await;
        assert!((from..=to).contains(&left), "{left} ms left");
    };
    left(25_000, 30_000).await;
    let shorter = ctx
        .lock(name.as_str())
        .lease(secs(2))
        .acquire()
        .await
        .unwrap();
    left(22_000, 30_000).await;
    assert!(outer.remaining() > secs(20) && shorter.remaining() > secs(20));
    let longer = ctx
        .lock(name.as_str())
        .lease(secs(60))
        .acquire()
        .await
        .unwrap();
    left(55_000, 60_000).await;
    assert!(outer.remaining() > secs(50), "one hold, one deadline");
    outer.extend(secs(5)).await.unwrap();
    left(52_000, 60_000).await;
    assert_eq!(
        longer.release().await,
        ReleaseOutcome::StillHeld { depth: 2 }
    );
    assert_eq!(
        shorter.release().await,
        ReleaseOutcome::StillHeld { depth: 1 }
    );
    left(45_000, 60_000).await;
    assert_eq!(outer.release().await, ReleaseOutcome::Released);
    // The lease was that hold's, and does not leak into the next.
    let next = client
        .lock(name.as_str())
        .lease(secs(10))
        .acquire()
        .await
        .unwrap();
    left(5_000, 10_000).await;
    drop(next);
    nothing_left(server(), &name).await;
}

/// Rule 9: a renewed level inside a fixed lease keeps the hold for as long as that level lives; then
/// what is left of the lease runs out.
#[tokio::test]
async fn a_hold_is_renewed_while_a_renewed_level_lives() {
    let client = client_of(&server().url(), secs(3)).await;
    tokio::join!(
        a_renewed_level_inside(&client, secs(3)),
        a_renewed_level_outside(&client, secs(3))
    );
}

async fn a_renewed_level_inside(client: &LockClient, lease: Duration) {
    let ruler = Ruler::start();
    let name = unique_name();
    let mut ctx = client.context();
    let outer = ctx
        .lock(name.as_str())
        .lease(lease)
        .acquire()
        .await
        .unwrap();
    let inner = ctx.lock(name.as_str()).acquire().await.unwrap();
    // The subject: twice the fixed lease.
    tokio::time::sleep(lease * 2).await;
    outer.confirm().await.unwrap();
    assert_eq!(
        inner.release().await,
        ReleaseOutcome::StillHeld { depth: 1 }
    );
    let left = Instant::now();
    assert!(outer.is_held());
    outer.lost().cancelled().await;
    assert!(
        left.elapsed() < lease + ms(100) + ruler.allowance(),
        "{:?}",
        left.elapsed()
    );
    assert!(
        left.elapsed() + ruler.taken() > lease / 3,
        "{:?}",
        left.elapsed()
    );
    assert_eq!(outer.loss_reason(), Some(LossReason::DeadlinePassed));
    drop(outer);
    nothing_left(server(), &name).await;
}

/// The other way round: a fixed level inside a renewed one stops nothing.
async fn a_renewed_level_outside(client: &LockClient, lease: Duration) {
    let name = unique_name();
    let mut ctx = client.context();
    let outer = ctx.lock(name.as_str()).acquire().await.unwrap();
    let inner = ctx
        .lock(name.as_str())
        .lease(ms(200))
        .acquire()
        .await
        .unwrap();
    // The subject: twice the lease that is renewed.
    tokio::time::sleep(lease * 2).await;
    inner.confirm().await.unwrap();
    // Released in the "wrong" order: the renewed level goes first.
    assert_eq!(
        outer.release().await,
        ReleaseOutcome::StillHeld { depth: 1 }
    );
    inner.lost().cancelled().await;
    drop(inner);
    nothing_left(server(), &name).await;
}

/// Rule 9: the smallest `max_hold` of all levels ends the hold, on the server as well: no renewal and
/// no longer lease of another level reaches beyond it.
#[tokio::test]
async fn the_smallest_max_hold_wins() {
    let lease = secs(2);
    let client = client_of(&server().url(), lease).await;
    tokio::join!(
        the_outer_max_hold_wins(&client, lease),
        an_inner_max_hold_ends_all_or_none(&client)
    );
}

async fn the_outer_max_hold_wins(client: &LockClient, lease: Duration) {
    let ruler = Ruler::start();
    let cli = server().cli().await;
    let max = ms(3500);
    // The margin by which a lease is longer on the server than we believe.
    let over = |ends: Instant| {
        let left = ends.saturating_duration_since(Instant::now());
        i64::try_from(left.as_millis()).unwrap() + 25
    };

    let name = unique_name();
    let mut ctx = client.context();
    let asked = Instant::now();
    let outer = ctx
        .lock(name.as_str())
        .max_hold(max)
        .acquire()
        .await
        .unwrap();
    let ends = Instant::now() + max;
    // Each of these would outlive it.
    let long = ctx
        .lock(name.as_str())
        .lease(secs(20))
        .acquire()
        .await
        .unwrap();
    // Before the look: what is left only becomes less.
    let most = over(ends);
    let left = cli.pttl(&name).await;
    assert!(left <= most, "{left} ms left of {most}");
    let longer = ctx
        .lock(name.as_str())
        .max_hold(secs(20))
        .acquire()
        .await
        .unwrap();
    outer.extend(secs(20)).await.unwrap();
    // Before the look: what is left only becomes less.
    let most = over(ends);
    let left = cli.pttl(&name).await;
    assert!(left <= most, "{left} ms left of {most}");
    assert!(outer.remaining() <= max);
    longer.lost().cancelled().await;
    assert!(
        Instant::now() + lease / 3 > asked + max,
        "renewed until then"
    );
    assert!(
        Instant::now() < ends + ms(150) + ruler.allowance(),
        "and no longer"
    );
    for guard in [&outer, &long, &longer] {
        assert_eq!(guard.loss_reason(), Some(LossReason::MaxHold));
    }
    // Nobody releases it: it ends by itself.
    std::mem::forget((outer, long, longer));
    cli.until_free(&name).await;
    assert!(
        Instant::now() < ends + ms(250) + ruler.allowance(),
        "the server keeps it longer"
    );
}

/// Set by an inner level, it ends all of them; left in time, it ends none.
async fn an_inner_max_hold_ends_all_or_none(client: &LockClient) {
    let (name, ruler, max) = (unique_name(), Ruler::start(), ms(1800));
    let mut ctx = client.context();
    let outer = ctx.lock(name.as_str()).acquire().await.unwrap();
    let inner = ctx
        .lock(name.as_str())
        .max_hold(max)
        .acquire()
        .await
        .unwrap();
    assert_eq!(
        inner.release().await,
        ReleaseOutcome::StillHeld { depth: 1 }
    );
    // The subject: the limit that is no longer there passes.
    tokio::time::sleep(max + ms(100)).await;
    outer.confirm().await.unwrap();
    let inner = ctx
        .lock(name.as_str())
        .max_hold(max)
        .acquire()
        .await
        .unwrap();
    let start = Instant::now();
    outer.lost().cancelled().await;
    assert!(
        start.elapsed() < max + ms(150) + ruler.allowance(),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(inner.loss_reason(), Some(LossReason::MaxHold));
    assert_eq!(
        outer.release().await,
        ReleaseOutcome::Lost(LossReason::MaxHold)
    );
    drop(inner);
    nothing_left(server(), &name).await;
}

/// A fixed lease longer than `max_hold` ends there too, with that reason.
#[tokio::test]
async fn max_hold_cuts_a_fixed_lease() {
    let client = client_of(&server().url(), secs(30)).await;
    let name = unique_name();
    let (start, ruler) = (Instant::now(), Ruler::start());
    let mut lock = client.lock(name.as_str()).lease(secs(20)).max_hold(ms(400));
    let guard = lock.acquire().await.unwrap();
    assert!(server().cli().await.pttl(&name).await <= 450);
    guard.lost().cancelled().await;
    assert!(
        start.elapsed() < ms(600) + ruler.allowance(),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(guard.loss_reason(), Some(LossReason::MaxHold));
    drop(guard);
    nothing_left(server(), &name).await;
}

/// The reason is not guessed: an outage that ends a lease before `max_hold` does is a missed deadline.
#[tokio::test]
async fn an_outage_just_before_max_hold_is_a_missed_deadline() {
    let server = Server::start();
    let lease = secs(3);
    let client = client_of(&server.url(), lease).await;
    let name = unique_name();
    let mut lock = client.lock(name.as_str()).max_hold(lease + ms(300));
    let mut rounds = 0;
    let guard = loop {
        let asked = Instant::now();
        let guard = lock.acquire().await.unwrap();
        // Not renewed any more: its lease ends some time before `max_hold`.
        server.stop();
        if asked.elapsed() < lease / 3 {
            break guard;
        }
        // It may have been renewed, up to `max_hold`.
        rounds += 1;
        assert!(rounds < 10, "never quick enough");
        server.cont();
        drop(guard);
    };
    guard.lost().cancelled().await;
    assert_eq!(guard.loss_reason(), Some(LossReason::DeadlinePassed));
    server.cont();
    drop(guard);
    nothing_left(&server, &name).await;
}
