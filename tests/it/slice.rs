//! One life of a lock, end to end, on the memory store and on a real server.

use leasehold::{Error, LockClient, LossReason, ReleaseOutcome};

use crate::common::{self, ms, secs};
use crate::support::client_of;

async fn one_life(client: LockClient) {
    let name = common::unique_name();
    let mut ctx = client.context();
    let outer = ctx.lock(name.as_str()).acquire().await.unwrap();
    let inner = ctx.lock(name.as_str()).acquire().await.unwrap();
    assert_eq!(inner.depth(), 2);
    assert_eq!(
        inner.fencing_token().unwrap(),
        outer.fencing_token().unwrap()
    );
    assert!(
        client
            .lock(name.as_str())
            .try_acquire()
            .await
            .unwrap()
            .is_none()
    );
    let seen = client.inspect(name.as_str()).await.unwrap();
    assert_eq!(seen.holder.unwrap().count, 2);
    assert_eq!(
        inner.release().await,
        ReleaseOutcome::StillHeld { depth: 1 }
    );
    outer.confirm().await.unwrap();

    let mut second = client.lock(name.as_str());
    let waiting = tokio::spawn(async move { second.acquire().await });
    let first = outer.fencing_token().unwrap();
    assert_eq!(outer.release().await, ReleaseOutcome::Released);
    let granted = waiting.await.unwrap().unwrap();
    assert!(granted.fencing_token().unwrap() > first);
    drop(granted);

    let short = client
        .lock(name.as_str())
        .lease(ms(300))
        .acquire()
        .await
        .unwrap();
    short.lost().cancelled().await;
    assert_eq!(short.loss_reason(), Some(LossReason::DeadlinePassed));
    assert!(matches!(short.fencing_token(), Err(Error::Lost { .. })));
    drop(short);

    let forced = client.lock(name.as_str()).acquire().await.unwrap();
    let late = client.lock(name.as_str()).acquire_timeout(secs(1)).await;
    assert!(matches!(late, Err(Error::TimedOut { .. })), "{late:?}");
    assert!(client.force_release(name.as_str()).await.unwrap());
    assert_eq!(
        forced.release().await,
        ReleaseOutcome::Lost(LossReason::Forced)
    );

    let held = client.lock(name.as_str()).acquire().await.unwrap();
    let report = client.close(ms(1200)).await;
    assert_eq!((report.lost, report.unconfirmed), (1, 0));
    assert_eq!(held.loss_reason(), Some(LossReason::ClientClosed));
    assert!(matches!(
        client.lock(name.as_str()).acquire().await,
        Err(Error::Closed)
    ));
}

#[tokio::test]
async fn a_life_in_memory() {
    one_life(LockClient::in_memory()).await;
}

#[tokio::test]
async fn a_life_on_a_server() {
    let server = common::server();
    let client = client_of(&server.url(), secs(30)).await;
    tokio::time::timeout(secs(20), one_life(client))
        .await
        .unwrap();
}
