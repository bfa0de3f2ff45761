//! How a service can try its bad days: a server in this process that misbehaves on demand, under Tokio's
//! paused clock. No Redis, and no waiting.
#![allow(
    clippy::disallowed_methods,
    reason = "a service lives by Tokio's clock; only the crate itself takes its time from `Env`"
)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use leasehold::testing::{Faults, Server};
use leasehold::{Error, FencingToken, LockClient, LockGuard, LossReason};

/// What the lock protects: refuses a token smaller than the last.
#[derive(Default)]
struct Ledger(AtomicU64);

impl Ledger {
    fn write(&self, token: FencingToken) -> bool {
        self.0.fetch_max(token.value(), Ordering::SeqCst) <= token.value()
    }
}

/// The service: reads, thinks for a while, writes.
async fn settle(client: &LockClient, ledger: &Ledger, thinks: Duration) -> Result<bool, Error> {
    let work = async |guard: &LockGuard| {
        let token = guard.fencing_token()?;
        tokio::time::sleep(thinks).await;
        Ok(ledger.write(token))
    };
    client.lock("account:7").run(work).await
}

async fn client(server: &Server) -> LockClient {
    let builder = LockClient::builder().simulated(server);
    builder.build().await.unwrap()
}

/// The server forgets the lock in the middle of the work, and another instance gets in. The first is
/// stopped before it writes.
#[tokio::test(start_paused = true)]
async fn work_stops_when_the_server_forgets_the_lock() {
    let server = Server::new();
    let (one, two) = (client(&server).await, client(&server).await);
    let ledger = Ledger::default();
    let long = settle(&one, &ledger, Duration::from_mins(1));
    let meanwhile = async {
        tokio::time::sleep(Duration::from_secs(20)).await;
        server.stop();
        server.start(false);
        settle(&two, &ledger, Duration::from_millis(10)).await
    };
    let (long, short) = tokio::join!(long, meanwhile);
    assert!(matches!(long, Err(Error::Lost { .. })), "{long:?}");
    assert!(short.unwrap(), "the second one writes");
}

/// Nothing comes through any more: the holder is told by its own clock, before its lease ends.
#[tokio::test(start_paused = true)]
async fn a_silent_server_is_a_loss_by_the_holders_own_clock() {
    let server = Server::new();
    let client = client(&server).await;
    let guard = client.lock("account:7").acquire().await.unwrap();
    let start = tokio::time::Instant::now();
    server.pause(Duration::from_hours(1));
    guard.lost().cancelled().await;
    assert_eq!(guard.loss_reason(), Some(LossReason::DeadlinePassed));
    assert!(start.elapsed() <= Duration::from_secs(30));
    // Whoever writes nevertheless is refused by the token of the next.
    assert!(guard.fencing_token().is_err());
}

/// Replies are lost all the time: slower, and right all the same.
#[tokio::test(start_paused = true)]
async fn lost_replies_cost_time_and_nothing_else() {
    let server = Server::new();
    let client = client(&server).await;
    let mut faults = Faults::none();
    faults.delay = Duration::from_millis(1)..=Duration::from_millis(5);
    faults.lost_replies = 100;
    server.set_faults(faults);
    let ledger = Ledger::default();
    for _ in 0..50 {
        assert!(
            settle(&client, &ledger, Duration::from_millis(10))
                .await
                .unwrap()
        );
    }
}
