//! Grants that come late, though not too late.

use std::time::Duration;

use leasehold::{LockClient, ReleaseOutcome};

use crate::common::*;
use crate::support::all_scripts_known;

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
