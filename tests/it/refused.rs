//! What a server refuses for a moment, or to one of many.

use futures_util::future::join_all;
use leasehold::{Error, ReleaseOutcome};

use crate::common::*;
use crate::support::{all_scripts_known, client_of};

/// A server with a user `u` who may touch these keys only, and that user's URL.
async fn with_user(keys: &[&str]) -> (Server, String) {
    let server = Server::start();
    let url = format!("redis://u:p@127.0.0.1:{}", server.port());
    let rules = [
        "ACL",
        "SETUSER",
        "u",
        "on",
        ">p",
        "resetkeys",
        "&*",
        "+@all",
    ];
    server.cmd(&[&rules[..], keys].concat()).await.ok();
    (server, url)
}

/// The keys of the locks whose names begin with `ok`.
const ALLOWED: [&str; 3] = ["~ok*", "~*:{ok*", "~leasehold_client:*"];

/// The server looks at all keys of a call before it runs. What is forbidden to one of those that
/// travel together is not told to the others.
#[tokio::test]
async fn a_forbidden_name_is_refused_alone() {
    let (_server, url) = with_user(&ALLOWED).await;
    let client = client_of(&url, secs(10)).await;
    for round in 0..10 {
        let mut allowed: Vec<_> = (0..8)
            .map(|i| client.lock(format!("ok-{round}-{i}")))
            .collect();
        let mut forbidden = client.lock("forbidden");
        let allowed = join_all(allowed.iter_mut().map(leasehold::Lock::acquire));
        let (allowed, refused) = tokio::join!(allowed, forbidden.acquire());
        assert!(matches!(refused, Err(Error::Denied { .. })), "{refused:?}");
        for guard in allowed {
            drop(guard.unwrap());
        }
    }
}

/// The same for renewals and releases: a key that an administrator took away is lost, no other.
#[tokio::test]
async fn a_key_that_becomes_forbidden_costs_no_other_hold() {
    let (server, url) = with_user(&["~*"]).await;
    let client = client_of(&url, secs(3)).await;
    let (mut one, mut other) = (client.lock("no-1"), client.lock("ok-1"));
    let (one, other) = tokio::join!(one.acquire(), other.acquire());
    let (one, other) = (one.unwrap(), other.unwrap());
    let keys = [&["ACL", "SETUSER", "u", "resetkeys"][..], &ALLOWED].concat();
    server.cmd(&keys).await.ok();
    one.lost().cancelled().await;
    // Its lease is over as well, had it not been renewed.
    assert!(other.is_held());
    other.confirm().await.unwrap();
    drop((one, other));
    server.cli().await.until_free("ok-1").await;
}

/// "The background goes on trying": also when the first answer was a refusal that is then mended.
#[tokio::test]
async fn a_release_that_is_refused_is_repeated() {
    let server = Server::start();
    let client = client_of(&server.url(), secs(30)).await;
    let cli = server.cli().await;
    let name = unique_name();
    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    cli.cmd(&["ACL", "SETUSER", "default", "-hdel"]).await.ok();
    let told = guard.release().await;
    assert!(
        matches!(told, ReleaseOutcome::Unconfirmed { .. }),
        "{told:?}"
    );
    assert!(cli.exists(&name).await);
    cli.cmd(&["ACL", "SETUSER", "default", "+hdel"]).await.ok();
    cli.until_free(&name).await;
}

/// The same for the clean-up after an acquisition that was dropped and whose answer was lost.
#[tokio::test]
async fn a_clean_up_that_is_refused_is_repeated() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let client = client_of(&proxy.url(), secs(30)).await;
    all_scripts_known(&client).await;
    let cli = server.cli().await;
    let name = unique_name();
    cli.cmd(&["ACL", "LOG", "RESET"]).await.ok();
    cli.cmd(&["ACL", "SETUSER", "default", "-hdel"]).await.ok();
    let lost = proxy.inject(Fault::reply(bytes(&name), Act::Swallow(Then::Discard)));
    let acquiring = {
        let mut lock = client.lock(name.as_str());
        tokio::spawn(async move { lock.acquire().await.map(drop) })
    };
    lost.hit().await;
    acquiring.abort();
    eventually(secs(10), "the clean-up is refused", async || {
        !cli.cmd(&["ACL", "LOG"]).await.list().is_empty()
    })
    .await;
    assert!(cli.exists(&name).await);
    cli.cmd(&["ACL", "SETUSER", "default", "+hdel"]).await.ok();
    cli.until_free(&name).await;
}
