//! Grants that come late, though not too late.

use std::future::{Future as _, poll_fn};
use std::task::Poll;
use std::time::Duration;

use leasehold::{LockClient, ReleaseOutcome};

use crate::common::*;
use crate::support::{all_scripts_known, client_of};

const LEASE: Duration = secs(3);

/// The kind of B07: the answer comes when most of the lease is over. Such a grant goes back, and the
/// holder begins with a lease that is worth having.
#[tokio::test]
async fn a_grant_with_little_left_is_not_handed_out() {
    let proxy = Proxy::start(server().port());
    let cli = server().cli().await;
    let builder = LockClient::builder().url(proxy.url()).lease(LEASE);
    let client = builder.command_timeout(ms(300)).build().await.unwrap();
    all_scripts_known(&client).await;
    let name = unique_name();
    proxy.inject(Fault::HoldReplies);
    let acquiring = {
        let mut lock = client.lock(name.as_str()).lease(LEASE);
        tokio::spawn(async move { lock.acquire().await })
    };
    eventually(secs(5), "a fifth of the lease is left", async || {
        let left = cli.pttl(&name).await;
        left > 0 && left < 600
    })
    .await;
    proxy.heal();
    let guard = acquiring.await.unwrap().unwrap();
    let left = guard.remaining();
    assert!(left > LEASE / 5, "{left:?}");
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    nothing_left(server(), &name).await;
}

/// Whoever answers is served in his turn, whatever lease he asks for: a grant that was made for one who
/// left does not pass him by because his lease is another.
#[tokio::test]
async fn nobody_is_overtaken_for_the_sake_of_his_lease() {
    let client = client_of(&server().url(), secs(10)).await;
    let other = client_of(&server().url(), secs(10)).await;
    for _ in 0..10 {
        let name = unique_name();
        let held = other.lock(name.as_str()).acquire().await.unwrap();
        let mut first = client.lock(name.as_str()).lease(secs(4));
        let mut first = Box::pin(first.acquire());
        // In line, and polled no more: the offer stays in its hands.
        assert!(
            poll_fn(|cx| Poll::Ready(first.as_mut().poll(cx)))
                .await
                .is_pending()
        );
        let (order, mut served) = tokio::sync::mpsc::unbounded_channel();
        let behind: Vec<_> = [6, 4]
            .into_iter()
            .map(|lease| {
                let mut lock = client.lock(name.as_str()).lease(secs(lease));
                let order = order.clone();
                let mut acquiring = Box::pin(async move { lock.acquire().await });
                async move {
                    let guard = acquiring.as_mut().await.unwrap();
                    order.send(lease).unwrap();
                    drop(guard);
                }
            })
            .map(tokio::spawn)
            .collect();
        server().cli().await.until_waiters(&name, 1).await;
        tokio::task::yield_now().await;
        held.release().await.into_result().unwrap();
        let cli = server().cli().await;
        eventually(secs(5), "it is taken", async || cli.exists(&name).await).await;
        drop(first);
        for task in behind {
            task.await.unwrap();
        }
        assert_eq!(
            (served.recv().await, served.recv().await),
            (Some(6), Some(4))
        );
    }
}
