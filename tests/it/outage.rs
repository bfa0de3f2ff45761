//! The server is away: every call ends in time with an error that says so, every holder is told before
//! his lease ends, and everything works again as soon as it can.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use leasehold::{Error, LockClient, LockGuard, LossReason, ReleaseOutcome};

use crate::common::server::Snapshot;
use crate::common::*;
use crate::support::{client_of, connected};

/// The ways in which a server can be away.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Outage {
    /// Its process stands still, connections stay open.
    Stopped,
    /// It is dead, connections are refused. It comes back with its memory.
    Killed,
    /// The network swallows everything, old and new connections alike, and goes on to swallow what
    /// is sent on the old ones.
    BlackHole,
    /// Requests arrive and are executed, answers do not come.
    NoReplies,
    /// Requests do not arrive until it is over; then all do.
    NoRequests,
}

/// A server, the road to it, and what is wrong with it.
struct Site {
    server: Server,
    proxy: Proxy,
    outage: Outage,
    memory: Option<Snapshot>,
}

impl Site {
    fn new(outage: Outage) -> Self {
        let server = Server::start();
        let proxy = Proxy::start(server.port());
        Self {
            server,
            proxy,
            outage,
            memory: None,
        }
    }

    /// The road that the outage is on.
    fn url(&self) -> String {
        match self.outage {
            Outage::Stopped | Outage::Killed => self.server.url(),
            _ => self.proxy.url(),
        }
    }

    async fn begin(&mut self) {
        self.prepare().await;
        self.strike();
    }

    /// What takes time.
    async fn prepare(&mut self) {
        if self.outage == Outage::Killed {
            self.memory = Some(self.server.snapshot().await);
        }
    }

    /// The beginning itself.
    fn strike(&self) {
        match self.outage {
            Outage::Stopped => self.server.stop(),
            Outage::Killed => self.server.kill(),
            Outage::BlackHole => self.proxy.black_hole(),
            Outage::NoReplies => drop(self.proxy.inject(Fault::HoldReplies)),
            Outage::NoRequests => drop(self.proxy.inject(Fault::HoldRequests)),
        }
    }

    async fn end(&self) {
        match self.outage {
            Outage::Stopped => self.server.cont(),
            Outage::Killed => {
                let memory = self.memory.as_ref().expect("it has begun");
                self.server.restart_from(memory).await;
            }
            _ => self.proxy.heal(),
        }
    }

    /// How soon everything works again.
    fn recovery(&self) -> Duration {
        match self.outage {
            Outage::BlackHole => secs(3),
            _ => secs(1),
        }
    }
}

/// "I had no answer", in one of its two forms.
fn is_outage(error: &Error) -> bool {
    let says_so = matches!(
        error,
        Error::Unreachable { .. } | Error::Indeterminate { .. }
    );
    says_so && error.is_retryable()
}

/// Point by point: with the server away nothing takes longer than it may.
#[expect(
    clippy::too_many_lines,
    reason = "one point after the other, all at once"
)]
async fn calls_end_in_time(outage: Outage) {
    let mut site = Site::new(outage);
    let lease = secs(6);
    // A sixth of the lease.
    let command_timeout = secs(1);
    let ruler = Ruler::start();
    let slack = || ms(200) + ruler.allowance();
    let client = client_of(&site.url(), lease).await;
    let direct = client_of(&site.server.url(), lease).await;
    let (name, busy) = (unique_name(), unique_name());
    let mut ctx = client.context();
    let held = ctx.lock(name.as_str()).acquire().await.unwrap();
    let to_release = client.lock(unique_name()).acquire().await.unwrap();
    let _others = direct.lock(busy.as_str()).acquire().await.unwrap();
    let mut waiting = client.lock(busy.as_str());
    let early = tokio::spawn(async move {
        let start = Instant::now();
        (waiting.acquire_timeout(secs(3)).await, start.elapsed())
    });
    site.server.cli().await.until_waiters(&busy, 1).await;
    site.begin().await;

    let bounded = async |patience: Duration| {
        let start = Instant::now();
        let mut lock = client.lock(unique_name());
        let error = lock.acquire_timeout(patience).await.unwrap_err();
        let took = start.elapsed();
        let limit = if patience.is_zero() {
            command_timeout
        } else {
            patience
        };
        assert!(is_outage(&error), "{error:?}");
        assert!(took <= limit + slack(), "{took:?} of {patience:?}");
    };
    let all_bounded = join_all([0, 40, 300, 1500].map(|patience| bounded(ms(patience))));
    let nested = async {
        let start = Instant::now();
        let again = ctx.lock(name.as_str()).acquire_timeout(ms(300)).await;
        let error = again.unwrap_err();
        assert!(is_outage(&error), "{error:?}");
        assert!(
            start.elapsed() <= ms(300) + slack(),
            "{:?}",
            start.elapsed()
        );
        assert_eq!((held.depth(), held.is_held()), (1, true));
    };
    let once = async {
        let start = Instant::now();
        let error = client.lock(unique_name()).try_acquire().await.unwrap_err();
        assert!(is_outage(&error), "{error:?}");
        assert!(
            start.elapsed() <= command_timeout + slack(),
            "{:?}",
            start.elapsed()
        );
    };
    let looks = async {
        let start = Instant::now();
        let error = client.inspect(busy.as_str()).await.unwrap_err();
        assert!(is_outage(&error), "{error:?}");
        assert!(
            start.elapsed() <= command_timeout + slack(),
            "{:?}",
            start.elapsed()
        );
    };
    let confirms = async {
        let start = Instant::now();
        let error = held.confirm().await.unwrap_err();
        assert!(is_outage(&error), "{error:?}");
        assert!(
            start.elapsed() <= command_timeout + slack(),
            "{:?}",
            start.elapsed()
        );
    };
    let releases = async {
        let start = Instant::now();
        let outcome = to_release.release().await;
        assert!(
            matches!(outcome, ReleaseOutcome::Unconfirmed { at_most } if at_most <= lease * 2),
            "{outcome:?}"
        );
        assert!(
            start.elapsed() <= command_timeout + slack(),
            "{:?}",
            start.elapsed()
        );
    };
    let connects = async {
        let start = Instant::now();
        let error = LockClient::connect(&site.url()).await.unwrap_err();
        assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
        assert!(
            start.elapsed() <= ms(500) + slack(),
            "{:?}",
            start.elapsed()
        );
    };
    futures_util::join!(
        all_bounded,
        nested,
        once,
        looks,
        confirms,
        releases,
        connects
    );
    let (early, took) = early.await.unwrap();
    let error = early.unwrap_err();
    assert!(
        is_outage(&error) || matches!(error, Error::TimedOut { .. }),
        "{error:?}"
    );
    assert!(took <= secs(3) + slack(), "{took:?}");
    site.end().await;
    drop(held);
    nothing_left(&site.server, &name).await;
}

/// B42, with the server frozen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_end_in_time_with_a_stopped_server() {
    calls_end_in_time(Outage::Stopped).await;
}

/// B42, with the server dead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_end_in_time_with_a_killed_server() {
    calls_end_in_time(Outage::Killed).await;
}

/// B42, with a network that says nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_end_in_time_in_a_black_hole() {
    calls_end_in_time(Outage::BlackHole).await;
}

/// `close` keeps its deadline with the server away, holds and waiters or not; everybody is told.
async fn close_keeps_its_deadline(outage: Outage) {
    let mut site = Site::new(outage);
    let lease = secs(6);
    let ruler = &Ruler::start();
    let direct = client_of(&site.server.url(), lease).await;
    let busy = unique_name();
    let _others = direct.lock(busy.as_str()).acquire().await.unwrap();
    let mut clients = Vec::new();
    for deadline in [0, 100, 800] {
        let client = client_of(&site.url(), lease).await;
        let mut guards = Vec::new();
        for _ in 0..20 {
            guards.push(client.lock(unique_name()).acquire().await.unwrap());
        }
        let waiting: Vec<_> = (0..5)
            .map(|_| {
                let mut lock = client.lock(busy.as_str());
                tokio::spawn(async move { lock.acquire().await })
            })
            .collect();
        clients.push((ms(deadline), client, guards, waiting));
    }
    let cli = site.server.cli().await;
    cli.until_waiters(&busy, i64::try_from(clients.len()).unwrap())
        .await;
    drop(cli);
    site.begin().await;
    let closing = clients
        .into_iter()
        .map(|(deadline, client, guards, waiting)| async move {
            let start = Instant::now();
            let report = client.close(deadline).await;
            let took = start.elapsed();
            assert!(
                took <= deadline + ms(100) + ruler.allowance(),
                "{took:?} of {deadline:?}"
            );
            assert_eq!(report.lost, guards.len());
            assert!(report.unconfirmed >= guards.len(), "{report:?}");
            let closed = Instant::now();
            for waiter in waiting {
                let told = waiter.await.unwrap();
                assert!(matches!(told, Err(Error::Closed)), "{told:?}");
            }
            let told = closed.elapsed();
            assert!(told < ms(100) + ruler.allowance(), "told after {told:?}");
            for guard in guards {
                assert_eq!(guard.loss_reason(), Some(LossReason::ClientClosed));
                assert!(guard.lost().is_cancelled());
            }
            let late = client.lock(unique_name()).acquire().await;
            assert!(matches!(late, Err(Error::Closed)), "{late:?}");
        });
    join_all(closing).await;
    site.end().await;
}

/// B88, with the server frozen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn close_keeps_its_deadline_with_a_stopped_server() {
    close_keeps_its_deadline(Outage::Stopped).await;
}

/// B88, with the server dead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn close_keeps_its_deadline_with_a_killed_server() {
    close_keeps_its_deadline(Outage::Killed).await;
}

/// B88, with a network that says nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn close_keeps_its_deadline_in_a_black_hole() {
    close_keeps_its_deadline(Outage::BlackHole).await;
}

/// The end of an outage is all that is needed: who waits gets in, who asks is answered, who holds is
/// renewed, and messages are heard again.
async fn everything_works_again(outage: Outage) {
    let mut site = Site::new(outage);
    let lease = secs(30);
    let client = client_of(&site.url(), lease).await;
    let (name, busy) = (unique_name(), unique_name());
    let held = client.lock(name.as_str()).acquire().await.unwrap();
    let direct = client_of(&site.server.url(), lease).await;
    let others = direct.lock(busy.as_str()).acquire().await.unwrap();
    let mut lock = client.lock(busy.as_str());
    let waiting = tokio::spawn(async move {
        let guard = lock.acquire().await.unwrap();
        (guard, Instant::now())
    });
    site.server.cli().await.until_waiters(&busy, 1).await;
    site.begin().await;
    // Begun in the outage, and not bounded: it goes through as soon as it can.
    let mut lock = client.lock(unique_name());
    let patient = tokio::spawn(async move {
        let guard = lock.acquire().await.unwrap();
        (guard, Instant::now())
    });
    // The subject: an outage longer than the timeouts, so that all that is tried has failed. Nobody's
    // lease ends in it.
    tokio::time::sleep(ms(2500)).await;
    assert!(!patient.is_finished() && !waiting.is_finished());
    site.end().await;
    let end = Instant::now();
    let ruler = Ruler::start();
    let within = |when: Instant, what: &str| {
        let took = when.saturating_duration_since(end);
        let limit = site.recovery() + ruler.allowance();
        assert!(took < limit, "{what}: {took:?} after {outage:?}");
    };
    let fresh = client.lock(unique_name()).acquire().await.unwrap();
    within(Instant::now(), "a fresh acquisition");
    let (guard, when) = patient.await.unwrap();
    within(when, "one begun in the outage");
    held.confirm().await.unwrap();
    within(Instant::now(), "a renewal");
    site.server.cli().await.until_waiters(&busy, 1).await;
    within(Instant::now(), "the subscription");
    assert!(!waiting.is_finished());
    // Whoever held it over the outage may use it and give it back.
    let released = others.release().await;
    assert_eq!(released, ReleaseOutcome::Released);
    let gone = Instant::now();
    let (entered, when) = waiting.await.unwrap();
    assert!(
        when - gone < secs(2) + ms(500) + ruler.allowance(),
        "{:?}",
        when - gone
    );
    for guard in [fresh, guard, held, entered] {
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
    }
    nothing_left(&site.server, &name).await;
    nothing_left(&site.server, &busy).await;
}

/// The server goes on: within a second, with no restart of anything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_works_again_after_a_stop() {
    everything_works_again(Outage::Stopped).await;
}

/// The server is back with its memory: within a second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_works_again_after_a_kill() {
    everything_works_again(Outage::Killed).await;
}

/// New connections are good again, while the old ones are open and dead for ever: within three.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_works_again_after_a_black_hole() {
    everything_works_again(Outage::BlackHole).await;
}

/// An idle client finds its connections dead at the first use, long after the black hole.
#[tokio::test]
async fn connections_that_died_in_silence_are_replaced_at_the_first_use() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let client = client_of(&proxy.url(), secs(30)).await;
    proxy.black_hole();
    proxy.heal();
    let (start, ruler) = (Instant::now(), Ruler::start());
    let guard = client.lock(unique_name()).acquire().await.unwrap();
    let took = start.elapsed();
    assert!(took < secs(3) + ruler.allowance(), "{took:?}");
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
}

/// Looks at the guard until it says that it is lost, by a thread that nobody holds up: when it said
/// "held" for the last time.
fn believed_until(guard: &LockGuard) -> Instant {
    let mut last = Instant::now();
    loop {
        let look = Instant::now();
        if !guard.is_held() {
            return last;
        }
        last = look;
        std::thread::sleep(Duration::from_micros(500));
    }
}

/// V1: with the server away a holder is told no later than the lease ends that was confirmed last, as
/// counted from its sending, and before anybody else enters; work under `run` has stopped by then;
/// and nothing that comes later takes the loss back.
async fn a_holder_is_told_in_time(outage: Outage) {
    let mut site = Site::new(outage);
    let lease = secs(2);
    let first = client_of(&site.url(), lease).await;
    // Its own lease is how long it puts up with the outage.
    let second = client_of(&site.server.url(), secs(30)).await;
    let name = unique_name();
    let mut ctx = first.context();
    let outer = ctx.lock(name.as_str()).acquire().await.unwrap();
    let inner = Arc::new(ctx.lock(name.as_str()).acquire().await.unwrap());
    let token = outer.fencing_token().unwrap();
    let mut lock = second.lock(name.as_str());
    let waiting = tokio::spawn(async move {
        let guard = lock.acquire().await.unwrap();
        (guard, Instant::now())
    });
    site.server.cli().await.until_waiters(&name, 1).await;
    // So that the first renewal is behind us, and the bound below is not the first lease's.
    let end = || Instant::now() + outer.remaining();
    let before = end();
    eventually(secs(5), "renewed once", async || end() > before + ms(50)).await;
    eventually(secs(5), "some of the lease is used up", async || {
        outer.remaining() + ms(100) < lease
    })
    .await;

    site.prepare().await;
    // Whatever is confirmed was sent before this.
    let begun = Instant::now();
    let ruler = Ruler::start();
    site.strike();
    let looker = Arc::clone(&inner);
    let believed = std::thread::spawn(move || believed_until(&looker));
    let mut worked = begun;
    let work = async {
        loop {
            tokio::time::sleep(ms(2)).await;
            worked = Instant::now();
        }
    };
    let (stopped, ()) = tokio::join!(inner.run(work), outer.lost().cancelled_owned());
    let told = Instant::now();
    let stopped: Result<(), Error> = stopped;
    assert!(matches!(stopped, Err(Error::Lost { .. })), "{stopped:?}");
    assert!(!outer.is_held() && !inner.is_held());
    assert_eq!(outer.loss_reason(), Some(LossReason::DeadlinePassed));
    let believed = believed.join().unwrap();
    assert!(
        believed - begun <= lease,
        "believed for {:?}",
        believed - begun
    );
    let late = ruler.allowance();
    assert!(
        told - begun <= lease + late,
        "told after {:?}",
        told - begun
    );
    assert!(
        worked - begun <= lease + late,
        "worked for {:?}",
        worked - begun
    );
    assert!(inner.lost().is_cancelled());

    if outage != Outage::BlackHole {
        site.end().await;
    }
    // Late answers, if there are any, come now. The subject: half a lease in which nobody takes the
    // loss back.
    let until = Instant::now() + lease / 2;
    while Instant::now() < until {
        assert!(!outer.is_held() && outer.lost().is_cancelled());
        assert_eq!(outer.remaining(), Duration::ZERO);
        tokio::time::sleep(ms(10)).await;
    }
    if outage == Outage::BlackHole {
        site.end().await;
    }
    for guard in [&outer, &*inner] {
        let lost = guard.confirm().await;
        assert!(matches!(lost, Err(Error::Lost { .. })), "{lost:?}");
        assert!(guard.extend(lease).await.is_err());
        assert!(guard.fencing_token().is_err());
        assert_eq!(guard.loss_reason(), Some(LossReason::DeadlinePassed));
    }
    let again = ctx.lock(name.as_str()).try_acquire().await;
    assert!(matches!(again, Err(Error::Lost { .. })), "{again:?}");
    drop((outer, inner));
    let (entered, when) = waiting.await.unwrap();
    assert!(
        told < when + late && believed < when,
        "another entered before the holder was told"
    );
    assert!(entered.fencing_token().unwrap() > token);
    entered.confirm().await.unwrap();
    assert_eq!(entered.release().await, ReleaseOutcome::Released);
    nothing_left(&site.server, &name).await;
}

/// V1, with the server frozen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_is_told_in_time_when_the_server_is_stopped() {
    a_holder_is_told_in_time(Outage::Stopped).await;
}

/// V1, with the server dead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_is_told_in_time_when_the_server_is_killed() {
    a_holder_is_told_in_time(Outage::Killed).await;
}

/// V1, with a network that says nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_is_told_in_time_in_a_black_hole() {
    a_holder_is_told_in_time(Outage::BlackHole).await;
}

/// V1: the server renews, and its answers do not come. Not confirmed is not renewed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_is_told_in_time_when_answers_do_not_come() {
    a_holder_is_told_in_time(Outage::NoReplies).await;
}

/// V1: renewals are held up on their way and arrive when it is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_is_told_in_time_when_requests_do_not_arrive() {
    a_holder_is_told_in_time(Outage::NoRequests).await;
}

/// A wait without a limit for the lock still has one for the server: one default lease.
#[tokio::test]
async fn a_wait_without_limit_ends_with_a_server_that_stays_away() {
    let site = Site::new(Outage::Stopped);
    let lease = ms(900);
    let client = client_of(&site.url(), lease).await;
    site.server.stop();
    let ruler = Ruler::start();
    let start = Instant::now();
    let error = client.lock(unique_name()).acquire().await.unwrap_err();
    let took = start.elapsed();
    assert!(is_outage(&error), "{error:?}");
    let limit = lease + ms(400) + ruler.allowance();
    assert!(took > lease / 2 && took < limit, "{took:?}");
    site.server.cont();
}

/// A server that falls silent while nothing is asked for a waiter: "no answer" is not "others hold it".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_of_a_silent_server_are_not_told_that_others_hold_the_lock() {
    let server = Server::start();
    let client = connected(|| {
        let builder = LockClient::builder().url(server.url()).lease(secs(6));
        builder.command_timeout(ms(300))
    })
    .await;
    let name = unique_name();
    // Sleeps for longer than this: no question of its own goes unanswered in that time.
    let patience = ms(1600);
    let mut rounds = 0;
    let error = loop {
        let guard = client.lock(name.as_str()).acquire().await.unwrap();
        let mut lock = client.lock(name.as_str());
        let start = Instant::now();
        let waiting = tokio::spawn(async move { lock.acquire_timeout(patience).await });
        let cli = server.cli().await;
        eventually(secs(10), "it listens, or has left", async || {
            waiting.is_finished() || cli.subscribers(&channel(&name)).await == 1
        })
        .await;
        server.stop();
        let outcome = guard.release().await;
        // Else the wait was over before anybody could know that the server is silent.
        let quick = start.elapsed() + ms(100) < patience;
        let error = waiting.await.unwrap();
        server.cont();
        if quick {
            assert!(
                matches!(outcome, ReleaseOutcome::Unconfirmed { .. }),
                "{outcome:?}"
            );
            break error.unwrap_err();
        }
        rounds += 1;
        assert!(rounds < 10, "never quick enough");
        drop(error);
        nothing_left(&server, &name).await;
    };
    assert!(
        matches!(
            error,
            Error::Unreachable { .. } | Error::Indeterminate { .. }
        ),
        "{error:?}"
    );
    nothing_left(&server, &name).await;
}
