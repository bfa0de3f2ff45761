//! What several modules do with the crate under test.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use leasehold::{Error, Lock, LockClient, LockClientBuilder, LockContext, ReleaseOutcome};

use crate::common::*;

/// A client with the default timeouts.
pub(crate) async fn client_of(url: &str, lease: Duration) -> LockClient {
    connected(|| LockClient::builder().url(url).lease(lease)).await
}

/// The client that `builder` builds. On a busy machine the first connection may take more than its
/// timeout.
pub(crate) async fn connected(builder: impl Fn() -> LockClientBuilder) -> LockClient {
    loop {
        match builder().build().await {
            Ok(client) => return client,
            Err(Error::Unreachable { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
}

/// A kind of lock, and on which side of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Plain,
    Read,
    Write,
}

/// What every lock does, each of them does.
pub(crate) const SIDES: [Side; 3] = [Side::Plain, Side::Read, Side::Write];

impl Side {
    pub(crate) fn of(self, ctx: &mut LockContext, name: &str) -> Lock {
        match self {
            Self::Plain => ctx.lock(name),
            Self::Read => ctx.rw_lock(name).read(),
            Self::Write => ctx.rw_lock(name).write(),
        }
    }

    /// For a contender of its own.
    pub(crate) fn alone(self, client: &LockClient, name: &str) -> Lock {
        self.of(&mut client.context(), name)
    }

    /// One that keeps this one out, and is kept out by it.
    pub(crate) fn other(self) -> Self {
        match self {
            Self::Plain => Self::Plain,
            Self::Read | Self::Write => Self::Write,
        }
    }

    /// Redisson's channel of it.
    pub(crate) fn channel(self, name: &str) -> String {
        match self {
            Self::Plain => channel(name),
            Self::Read | Self::Write => format!("redisson_rwlock:{{{name}}}"),
        }
    }
}

/// The messages of an error and of all that caused it.
pub(crate) fn words(error: &Error) -> String {
    let mut words = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        words = format!("{words}: {cause}");
        source = cause.source();
    }
    words
}

/// Polls `future` exactly `polls` times, with a turn for everybody else after each, then drops it.
/// Its output, if it was done by then.
pub(crate) async fn polled<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    for _ in 0..polls {
        let now = poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await;
        if let Poll::Ready(output) = now {
            return Some(output);
        }
        tokio::task::yield_now().await;
    }
    None
}

/// 0, 1, 2, 3, ...: every moment at first, then wider steps.
pub(crate) fn next(polls: usize) -> usize {
    polls + 1 + polls / 24
}

/// Runs `work` on a runtime of one thread that looks at its sockets after each turn.
pub(crate) fn turn_by_turn(work: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .event_interval(1)
        .build()
        .unwrap()
        .block_on(work);
}

/// Lets the server know every script by its hash: otherwise the reply that a fault singles out may
/// be the one that says "which script?".
pub(crate) async fn all_scripts_known(client: &LockClient) {
    let name = unique_name();
    let mut ctx = client.context();
    let outer = ctx.lock(name.as_str()).acquire().await.unwrap();
    outer.confirm().await.unwrap();
    assert!(client.force_release(name.as_str()).await.unwrap());
    drop(outer);
    let again = ctx.lock(name.as_str()).acquire().await.unwrap();
    assert_eq!(again.release().await, ReleaseOutcome::Released);
    let rw = ctx.rw_lock(name.as_str());
    for mut lock in [rw.read(), rw.write()] {
        let guard = lock.acquire().await.unwrap();
        guard.confirm().await.unwrap();
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
    }
}

/// Asserts that nothing of the names with `prefix` is on the server any more, and that none is
/// renewed or taken during the time in which a hold would be renewed.
pub(crate) async fn nothing_goes_on(server: &Server, prefix: &str, lease: Duration) {
    nothing_left(server, prefix).await;
    let mut monitor = server.monitor().await;
    // The subject is what does not happen in this time.
    tokio::time::sleep(lease * 2 / 5).await;
    let calls = calls_but_releases(&mut monitor, prefix).await;
    assert!(calls.is_empty(), "{calls:#?}");
    nothing_left(server, prefix).await;
}

/// Script calls about a name, the ends of their lines, without those that tell its channel: so
/// renewals and takings. The second release of an acquisition that went unanswered may come late.
pub(crate) async fn calls_but_releases(monitor: &mut Monitor, part: &str) -> Vec<String> {
    let lines = monitor.lines().await.iter();
    let calls = lines.filter(|line| {
        line.contains("\"EVAL") && line.contains(part) && !line.contains("lock__channel:")
    });
    calls
        .map(|line| line.chars().skip(line.len().saturating_sub(300)).collect())
        .collect()
}

/// Asserts that the next contender of the same client gets the lock at once: the server has it free
/// and no waiter is in the way.
pub(crate) async fn next_one_enters(client: &LockClient, name: &str, within: Duration) {
    next_enters(Side::Plain, client, name, within).await;
}

/// The same of any kind.
pub(crate) async fn next_enters(side: Side, client: &LockClient, name: &str, within: Duration) {
    let start = Instant::now();
    let guard = side.other().alone(client, name);
    let guard = { guard }.acquire_timeout(within).await;
    let guard = guard.unwrap_or_else(|error| panic!("{:?} later: {error:?}", start.elapsed()));
    assert_eq!(guard.depth(), 1);
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
}
