//! Guards, waiters and clients that end where nobody can wait: on a thread without a runtime, in a
//! panic, in a shutdown, by the thousand.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use leasehold::{Error, LockClient, LockGuard, LossReason, ReleaseOutcome};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Notify;

use crate::common::*;
use crate::support::{calls_but_releases, client_of};

/// Where a lease has to end by itself: the tests wait for that.
const SHORT: Duration = ms(1500);

fn one_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn two_threads() -> Runtime {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().unwrap()
}

/// Runs `look` on a runtime of its own.
fn meanwhile<T>(look: impl Future<Output = T>) -> T {
    one_thread().block_on(look)
}

/// Asserts that `name` is free, or is within the lease.
fn ends_by_itself(name: &str, lease: Duration) {
    meanwhile(async {
        let cli = server().cli().await;
        let what = format!("{name} has ended");
        eventually(lease + ms(100), &what, async || !cli.exists(name).await).await;
        nothing_left(server(), name).await;
    });
}

// ---- guards ----

/// B14 (a): nothing is there to release it with, and nothing may go wrong.
#[test]
fn a_guard_dropped_on_a_plain_thread_after_its_runtime_ended_is_silent() {
    for runtime in [one_thread(), two_threads()] {
        let name = unique_name();
        let (client, guard) = runtime.block_on(async {
            let client = client_of(&server().url(), SHORT).await;
            let guard = client.lock(name.as_str()).acquire().await.unwrap();
            (client, guard)
        });
        drop(runtime);
        // The holder is told, without a runtime.
        assert!(!guard.is_held());
        assert_eq!(guard.loss_reason(), Some(LossReason::ClientClosed));
        assert!(guard.lost().is_cancelled());
        assert!(guard.fencing_token().is_err());
        std::thread::spawn(move || drop(guard)).join().unwrap();
        std::thread::spawn(move || drop(client)).join().unwrap();
        ends_by_itself(&name, SHORT);
    }
}

/// The same while the runtime lives: a thread without one posts the release all the same.
#[test]
fn a_guard_dropped_on_a_plain_thread_releases() {
    let runtime = two_threads();
    let name = unique_name();
    let guard = runtime.block_on(async {
        let client = client_of(&server().url(), secs(30)).await;
        // The guard is all that is left of the client.
        client.lock(name.as_str()).acquire().await.unwrap()
    });
    std::thread::spawn(move || drop(guard)).join().unwrap();
    meanwhile(nothing_left(server(), &name));
}

/// B14 (b): guards in tasks that a shutdown drops, in whatever order it drops them.
#[test]
fn guards_dropped_by_the_shutdown_of_their_runtime_are_silent() {
    let prefix = unique_name();
    for round in 0..scaled(10, 100) {
        let runtime = if round % 2 == 0 {
            one_thread()
        } else {
            two_threads()
        };
        let panics = Arc::new(OnceLock::new());
        runtime.block_on(async {
            let client = client_of(&server().url(), SHORT).await;
            let mut ready = Vec::new();
            for task in 0..8 {
                let name = format!("{prefix}-{round}-{task}");
                let mut lock = client.lock(name.as_str());
                let (tell, told) = tokio::sync::oneshot::channel();
                let panics = Arc::clone(&panics);
                ready.push(told);
                tokio::spawn(async move {
                    let guard = Careful(Some(lock.acquire().await.unwrap()), panics);
                    tell.send(()).unwrap();
                    // In the middle of whatever it does: waiting, working, asking.
                    match task % 4 {
                        0 => std::future::pending().await,
                        1 => guard.get().run(std::future::pending()).await.unwrap(),
                        2 => while guard.get().confirm().await.is_ok() {},
                        _ => lock.acquire().await.map(drop).unwrap(),
                    }
                });
            }
            for told in ready {
                told.await.unwrap();
            }
        });
        if round % 3 == 0 {
            runtime.shutdown_background();
        } else {
            drop(runtime);
        }
        assert!(panics.get().is_none(), "round {round}: {panics:?}");
    }
    ends_by_itself(&prefix, SHORT);
}

/// Drops its guard, and writes down a panic: a shutdown would swallow it.
struct Careful(Option<LockGuard>, Arc<OnceLock<String>>);

impl Careful {
    fn get(&self) -> &LockGuard {
        self.0.as_ref().unwrap()
    }
}

impl Drop for Careful {
    fn drop(&mut self) {
        let guard = self.0.take();
        if catch_unwind(AssertUnwindSafe(|| drop(guard))).is_err() {
            let _ = self.1.set("a guard's drop panicked".to_owned());
        }
    }
}

/// B14 (c), B23: unwinding releases, in a task and on a plain thread.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_dropped_while_panicking_releases() {
    let server = server();
    let client = client_of(&server.url(), secs(30)).await;
    let name = unique_name();
    let cli = server.cli().await;
    for on_thread in [false, true] {
        let mut ctx = client.context();
        let outer = ctx.lock(name.as_str()).acquire().await.unwrap();
        let inner = ctx.lock(name.as_str()).acquire().await.unwrap();
        let work = move || {
            let (_outer, _inner) = (outer, inner);
            // Without the hook: a message of this panic would look like a failure.
            std::panic::resume_unwind(Box::new("on purpose"));
        };
        let (start, ruler) = (Instant::now(), Ruler::start());
        if on_thread {
            assert!(std::thread::spawn(work).join().is_err());
        } else {
            assert!(tokio::spawn(async move { work() }).await.is_err());
        }
        cli.until_free(&name).await;
        let took = start.elapsed();
        assert!(took < ms(200) + ruler.allowance(), "{took:?}");
    }
    // In the middle of an acquisition.
    let mut lock = client.lock(name.as_str());
    let task = tokio::spawn(async move {
        let mut acquiring = pin!(lock.acquire());
        let first = poll_fn(|cx| Poll::Ready(acquiring.as_mut().poll(cx))).await;
        assert!(first.is_pending());
        std::panic::resume_unwind(Box::new("on purpose"));
    });
    assert!(task.await.is_err());
    // In work under `run`.
    let mut lock = client.lock(name.as_str());
    let task = tokio::spawn(async move {
        lock.run(async |_: &LockGuard| -> Result<(), Error> {
            std::panic::resume_unwind(Box::new("on purpose"));
        })
        .await
    });
    assert!(task.await.is_err());
    nothing_left(server, &name).await;
}

/// B14 (d): the release waits for the runtime's one thread, and not the other way round.
#[test]
fn a_guard_dropped_in_a_current_thread_runtime_releases() {
    let runtime = one_thread();
    let name = unique_name();
    let client = runtime.block_on(async {
        let client = client_of(&server().url(), secs(30)).await;
        let guard = client.lock(name.as_str()).acquire().await.unwrap();
        drop(guard);
        nothing_left(server(), &name).await;
        client
    });
    // Dropped between two stays in the runtime.
    let guard = runtime
        .block_on(client.lock(name.as_str()).acquire())
        .unwrap();
    drop(guard);
    runtime.block_on(nothing_left(server(), &name));
}

/// The last guard keeps the background of its client.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_that_outlives_its_client_releases() {
    let server = server();
    let name = unique_name();
    let guard = {
        let client = client_of(&server.url(), secs(30)).await;
        client.lock(name.as_str()).acquire().await.unwrap()
    };
    guard.confirm().await.unwrap();
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    nothing_left(server, &name).await;
}

/// B15: releases nobody waits for, more than one connection takes at once, while the server stands
/// still for longer than their leases: they end, none of them hits a later owner.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_guards_dropped_while_the_server_stands_still_end_in_time() {
    let server = Server::start();
    let lease = secs(1);
    let client = client_of(&server.url(), secs(30)).await;
    let prefix = unique_name();
    let many = scaled(1500, 10_000);
    let mut guards = Vec::new();
    for number in 0..many {
        let name = format!("{prefix}-{number}");
        let mut lock = client.lock(name.as_str()).lease(lease);
        guards.push(lock.acquire().await.unwrap());
    }
    server.stop();
    let (start, ruler) = (Instant::now(), Ruler::start());
    drop(guards);
    let took = start.elapsed();
    let limit = ms(500) + ruler.allowance();
    assert!(took < limit, "drops do not wait: {took:?}");
    // Longer than any lease of theirs: the length of the pause is the subject.
    tokio::time::sleep(lease + ms(200)).await;
    server.cont();

    // Others come, at once; what still arrives of the old releases leaves them alone.
    let other = client_of(&server.url(), secs(30)).await;
    let mut later = Vec::new();
    for number in (0..many).step_by(10) {
        let name = format!("{prefix}-{number}");
        later.push(
            other
                .lock(name.as_str())
                .acquire_timeout(secs(5))
                .await
                .unwrap(),
        );
    }
    // This client is of use again, and its queue is empty soon.
    let own = client
        .lock(format!("{prefix}-own"))
        .acquire_timeout(secs(5))
        .await;
    assert_eq!(own.unwrap().release().await, ReleaseOutcome::Released);
    let report = client.close(secs(2)).await;
    assert_eq!((report.lost, report.unconfirmed), (0, 0));
    for guard in later {
        guard.confirm().await.unwrap();
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
    }
    nothing_left(&server, &prefix).await;
}

/// B15: on a server that never comes back, the background ends with the leases, and `close` says
/// what it does not know.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guards_dropped_after_the_server_is_gone_end_with_their_leases() {
    let server = Server::start();
    let client = client_of(&server.url(), SHORT).await;
    let prefix = unique_name();
    let mut guards = Vec::new();
    for number in 0..300 {
        let name = format!("{prefix}-{number}");
        guards.push(client.lock(name.as_str()).acquire().await.unwrap());
    }
    server.stop();
    drop(guards);
    // As long as the longest of their leases, and the time of one request.
    tokio::time::sleep(SHORT + SHORT / 6 + ms(300)).await;
    let (start, ruler) = (Instant::now(), Ruler::start());
    let report = client.close(secs(2)).await;
    assert_eq!((report.lost, report.unconfirmed), (0, 0));
    let took = start.elapsed();
    assert!(took < ms(500) + ruler.allowance(), "{took:?}");
}

// ---- clients ----

/// A client in a `static`, used from one runtime and then from another: an answer at once, no hang.
#[test]
fn a_client_whose_runtime_has_ended_answers_closed() {
    static CLIENT: OnceLock<LockClient> = OnceLock::new();
    for in_memory in [false, true] {
        let name = unique_name();
        let runtime = two_threads();
        let held = runtime.block_on(async {
            let client = if in_memory {
                LockClient::in_memory()
            } else {
                client_of(&server().url(), SHORT).await
            };
            let client = if in_memory {
                client
            } else {
                CLIENT.get_or_init(|| client).clone()
            };
            let guard = client.lock(name.as_str()).acquire().await.unwrap();
            (client, guard)
        });
        drop(runtime);
        let (client, guard) = held;
        let name = name.as_str();
        let questions = async {
            let mut lock = client.lock(name);
            assert!(matches!(lock.acquire().await, Err(Error::Closed)));
            assert!(matches!(lock.try_acquire().await, Err(Error::Closed)));
            let timed = lock.acquire_timeout(secs(60)).await;
            assert!(matches!(timed, Err(Error::Closed)));
            let ran = lock.run(async |_: &LockGuard| Ok::<_, Error>(())).await;
            assert!(matches!(ran, Err(Error::Closed)));
            assert!(matches!(lock.inspect().await, Err(Error::Closed)));
            assert!(matches!(
                client.force_release(name).await,
                Err(Error::Closed)
            ));
            assert!(matches!(guard.confirm().await, Err(Error::Lost { .. })));
            assert!(matches!(guard.extend(SHORT).await, Err(Error::Lost { .. })));
            assert!(guard.run(std::future::pending::<()>()).await.is_err());
            assert!(guard.context().lock(name).acquire().await.is_err());
            let lost = ReleaseOutcome::Lost(LossReason::ClientClosed);
            assert_eq!(guard.release().await, lost);
            client.close(secs(60)).await
        };
        let (start, ruler) = (Instant::now(), Ruler::start());
        let questions = async {
            tokio::time::timeout(secs(5), questions)
                .await
                .expect("it hangs")
        };
        let report = one_thread().block_on(questions);
        assert_eq!(report.lost, 0);
        let took = start.elapsed();
        assert!(took < ms(500) + ruler.allowance(), "{took:?}");
        ends_by_itself(name, SHORT);
    }
}

/// Whoever waits in another runtime is told as well: for a lock, and for an answer.
#[test]
fn a_waiter_in_another_runtime_is_told_when_the_clients_runtime_ends() {
    for waits_for_an_answer in [false, true] {
        let name = unique_name();
        let own = Server::start();
        let runtime = two_threads();
        let (client, guard) = runtime.block_on(async {
            let client = client_of(&own.url(), secs(30)).await;
            let guard = client.lock(name.as_str()).acquire().await.unwrap();
            (client, guard)
        });
        let waiting = {
            let (client, name) = (client.clone(), name.clone());
            std::thread::spawn(move || {
                one_thread().block_on(async {
                    let mut lock = client.lock(name.as_str());
                    lock.acquire().await.map(drop)
                })
            })
        };
        meanwhile(async { own.cli().await.until_waiters(&name, 1).await });
        if waits_for_an_answer {
            // A release on its way, to a server that does not answer.
            own.stop();
            let releasing = std::thread::spawn(move || one_thread().block_on(guard.release()));
            drop(runtime);
            let outcome = releasing.join().unwrap();
            assert!(
                matches!(
                    outcome,
                    ReleaseOutcome::Unconfirmed { .. }
                        | ReleaseOutcome::Lost(LossReason::ClientClosed)
                ),
                "{outcome:?}"
            );
            own.cont();
        } else {
            drop(runtime);
            drop(guard);
        }
        let (start, ruler) = (Instant::now(), Ruler::start());
        let told = waiting.join().unwrap();
        assert!(matches!(told, Err(Error::Closed)), "{told:?}");
        let took = start.elapsed();
        assert!(took < ms(500) + ruler.allowance(), "{took:?}");
        drop(client);
    }
}

/// The runtime it was built on does the work, and its timers serve who has none: any executor will
/// do to wait in.
#[test]
fn a_lock_can_be_taken_outside_of_any_runtime() {
    let runtime = two_threads();
    let name = unique_name();
    let client = runtime.block_on(client_of(&server().url(), secs(30)));
    let life = async {
        let mut lock = client.lock(name.as_str());
        let guard = lock.acquire_timeout(secs(5)).await.unwrap();
        let busy = client.lock(name.as_str()).acquire_timeout(secs(1)).await;
        assert!(matches!(busy, Err(Error::TimedOut { .. })), "{busy:?}");
        guard.confirm().await.unwrap();
        guard.run(async {}).await.unwrap();
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
    };
    parked(life);
    meanwhile(nothing_left(server(), &name));
}

/// The smallest executor there is: this thread, parked between two polls.
fn parked<F: Future>(future: F) -> F::Output {
    struct Thread(std::thread::Thread);
    impl Wake for Thread {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Thread(std::thread::current())));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        std::thread::park();
    }
}

// ---- waiters ----

/// Wakes nobody, but can be waited for.
#[derive(Default)]
struct Woken(Notify);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.notify_one();
    }
}

/// B17: a waiter that leaves with the wake-up in its hands passes it on. Three in line, the first is
/// woken and dropped before it is polled: the second gets the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_dropped_after_it_was_woken_passes_the_lock_on() {
    let in_memory = LockClient::in_memory();
    let on_server = client_of(&server().url(), secs(30)).await;
    for (client, rounds) in [
        (in_memory, scaled(2_000, 10_000)),
        (on_server, scaled(300, 10_000)),
    ] {
        let (name, ruler) = (unique_name(), Ruler::start());
        let mut slow = 0;
        for round in 0..rounds {
            let held = client.lock(name.as_str()).acquire().await.unwrap();
            let mut locks = [(); 3].map(|()| client.lock(name.as_str()));
            let [first, second, third] = &mut locks;
            let woken = Arc::new(Woken::default());
            let waker = Waker::from(Arc::clone(&woken));
            let mut first: Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(first.acquire());
            let mut second = pin!(second.acquire());
            let mut third = pin!(third.acquire());
            assert!(
                first
                    .as_mut()
                    .poll(&mut Context::from_waker(&waker))
                    .is_pending()
            );
            assert!(poll_once(second.as_mut()).await.is_none());
            assert!(poll_once(third.as_mut()).await.is_none());

            drop(held);
            let start = Instant::now();
            tokio::time::timeout(secs(10), woken.0.notified())
                .await
                .expect("nobody is woken");
            drop(first);
            let guard = tokio::time::timeout(secs(10), second).await;
            let guard = guard
                .unwrap_or_else(|_| panic!("lost in round {round}"))
                .unwrap();
            assert!(poll_once(third.as_mut()).await.is_none(), "counted twice");
            // A release's way to the server and a message's way back are in it. A busy machine may make
            // some rounds slow, but none as slow as a waiter is that trusts in a message.
            let took = start.elapsed();
            slow += usize::from(took > ms(100));
            let limit = ms(1500) + ruler.allowance();
            assert!(took < limit, "{took:?} in round {round}");
            drop(guard);
            let start = Instant::now();
            let guard = tokio::time::timeout(secs(10), third).await;
            let took = start.elapsed();
            let limit = ms(1500) + ruler.allowance();
            assert!(took < limit, "third: {took:?} in round {round}");
            drop(
                guard
                    .unwrap_or_else(|_| panic!("third lost in round {round}"))
                    .unwrap(),
            );
        }
        // Were the offer to the first one waited for, all rounds would be.
        let taken = usize::try_from(ruler.taken().as_millis() / 50).unwrap();
        let most = (rounds / 50 + taken).min(rounds / 2);
        assert!(slow <= most, "{slow} of {rounds} rounds were slow");
        nothing_left(server(), &name).await;
    }
}

async fn poll_once<F: Future>(mut future: Pin<&mut F>) -> Option<F::Output> {
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

/// B10: the caller leaves at any time of a pause of the server. All at once, one name each.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_that_leave_at_any_time_of_a_pause_leave_nothing() {
    let server = Server::start();
    let lease = secs(3);
    let client = client_of(&server.url(), lease).await;
    let prefix = unique_name();
    let cli = server.cli().await;
    cli.cmd(&["CLIENT", "PAUSE", "300", "WRITE"]).await.ok();
    let mut callers = Vec::new();
    for after in 0..scaled(200, 400) {
        let (client, name) = (client.clone(), format!("{prefix}-{after}"));
        callers.push(tokio::spawn(async move {
            let mut lock = client.lock(name.as_str());
            // When it leaves is the subject.
            let left = tokio::time::timeout(ms(2 * after), lock.acquire()).await;
            match left {
                Ok(Ok(guard)) => assert_eq!(guard.release().await, ReleaseOutcome::Released),
                Ok(Err(error)) => panic!("{error:?}"),
                Err(_) => {}
            }
        }));
    }
    for caller in callers {
        caller.await.unwrap();
    }
    // One command timeout after the end: until then an attempt may be on its way.
    tokio::time::sleep(lease / 6).await;
    nothing_left(&server, &prefix).await;
    let mut monitor = server.monitor().await;
    // A hold would be renewed by then.
    tokio::time::sleep(lease * 2 / 5).await;
    let calls = calls_but_releases(&mut monitor, &prefix).await;
    assert!(calls.is_empty(), "{calls:#?}");
    let report = client.close(secs(1)).await;
    assert_eq!((report.lost, report.unconfirmed), (0, 0));
}

/// B11: the outer limit of the caller is over, then the server comes back: nobody knows of a lock,
/// and there is none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_given_up_while_the_server_was_down_makes_no_lock_later() {
    let server = Server::start();
    let client = client_of(&server.url(), secs(3)).await;
    let name = unique_name();
    for down_before in [true, false] {
        if down_before {
            server.kill();
        } else {
            // Sent, and not answered before the server dies.
            server.stop();
        }
        let mut lock = client.lock(name.as_str());
        let outer = tokio::time::timeout(ms(200), lock.acquire()).await;
        assert!(outer.is_err(), "{outer:?}");
        server.restart().await;
        let mut monitor = server.monitor().await;
        let other = client
            .lock(format!("{name}-other"))
            .acquire_timeout(secs(3))
            .await;
        drop(other.unwrap());
        // Twice the time one request may take.
        tokio::time::sleep(scaled(secs(1), secs(3))).await;
        let made = monitor
            .count(|line| line.contains(&format!("redisson_lock_token:{{{name}}}")))
            .await;
        assert_eq!(made, 0);
        nothing_left(&server, &name).await;
    }
}

/// The runtime ends while an acquisition is under way: nothing of the client stays in memory.
#[test]
fn nothing_stays_of_a_client_whose_runtime_ended() {
    let server = Server::start();
    let name: Arc<str> = unique_name().into();
    let runtime = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let client = client_of(&server.url(), secs(10)).await;
        server.stop();
        let mut lock = client.lock(Arc::clone(&name));
        tokio::spawn(async move { lock.acquire().await.map(drop) });
        tokio::task::yield_now().await;
    });
    runtime.shutdown_timeout(secs(5));
    server.cont();
    assert_eq!(Arc::strong_count(&name), 1);
}
