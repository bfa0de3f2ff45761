//! Names: whatever is in one, both languages derive the same keys and channels from it.

use std::time::Instant;

use leasehold::{KeyScheme, LockClient, ReleaseOutcome};

use crate::java::{Java, Kind};
use crate::{LEASE, common::*, connected, nothing_of_ours_left, ours};

/// The key (who holds excludes), the channel (who waits is woken, and listens where Redisson says) and the
/// token counter.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_name_means_the_same_keys_to_both() {
    let Some(java) = Java::shared() else { return };
    let base = unique_name();
    let rust = ours(LEASE).await;
    let there = java.client(&server().url(), LEASE).await;
    let cli = server().cli().await;
    let long = "x".repeat(5000);
    let odd = [
        "",
        ":{t}:b",
        "{",
        "}",
        "{}",
        "}{",
        "{{x}}",
        "{a}{b}",
        "a}b",
        " with spaces ",
        "\t",
        "\r\n",
        "\0",
        "\"'`\\",
        "%7B%s+&=?#/",
        "*[a-z]?",
        ":write",
        ":mode",
        "größe",
        "名前",
        "🔒",
        "e\u{301}",
        "\u{200f}\u{feff}",
        &long,
    ];
    for odd in odd {
        let name = format!("{base}{odd}");
        let theirs = there.lock(Kind::Fenced, &name);

        let guard = rust.lock(&*name).acquire().await.unwrap();
        let token = guard.fencing_token().unwrap().value();
        // Not `tryLockAndGetToken`: before Redisson 3.28.0 that misses a message now and then.
        let waiting = theirs.lock();
        cli.until_waiters(&name, 1).await;
        let (released, ruler) = (Instant::now(), Ruler::start());
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
        let took = waiting.ok().await.saturating_duration_since(released);
        assert_eq!(theirs.token().await, token + 1, "{name:?}");
        assert!(took < secs(1) + ruler.allowance(), "{name:?}: {took:?}");
        cli.until_waiters(&name, 0).await;

        assert!(cli.exists(&name).await, "{name:?}");
        assert!(cli.exists(&token_key(&name)).await, "{name:?}");
        let mut lock = rust.lock(&*name);
        let waiting = tokio::spawn(async move { lock.acquire().await.unwrap() });
        cli.until_waiters(&name, 1).await;
        let (released, ruler) = (Instant::now(), Ruler::start());
        theirs.unlock().ok().await;
        let guard = waiting.await.unwrap();
        let took = released.elapsed();
        assert!(took < secs(1) + ruler.allowance(), "{name:?}: {took:?}");
        assert!(guard.fencing_token().unwrap().value() > token + 1);
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
        cli.cmd(&["DEL", &token_key(&name)]).await.ok();
    }
    nothing_of_ours_left(&base).await;
}

/// A `NameMapper` changes the name before anything is derived from it; what it makes of the name is our
/// name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mapped_name_is_our_name() {
    let Some(java) = Java::shared() else { return };
    let name = unique_name();
    let rust = ours(LEASE).await;
    let prefix = [("prefix", "app:")];
    let there = java.client_with(&server().url(), LEASE, &prefix).await;
    let theirs = there.lock(Kind::Fenced, &name);
    let mapped = format!("app:{name}");
    let cli = server().cli().await;

    let token = theirs.lock_and_get_token().await;
    assert!(rust.lock(&*mapped).try_acquire().await.unwrap().is_none());
    assert!(rust.lock(&*name).try_acquire().await.unwrap().is_some());
    let mut lock = rust.lock(&*mapped);
    let waiting = tokio::spawn(async move { lock.acquire().await.unwrap() });
    cli.until_waiters(&mapped, 1).await;
    let (released, ruler) = (Instant::now(), Ruler::start());
    theirs.unlock().ok().await;
    let guard = waiting.await.unwrap();
    let took = released.elapsed();
    assert!(took < secs(1) + ruler.allowance(), "{took:?}");
    let ours = guard.fencing_token().unwrap().value();
    assert!(ours > token);

    let waiting = theirs.lock();
    cli.until_waiters(&mapped, 1).await;
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    waiting.ok().await;
    assert_eq!(theirs.token().await, ours + 1);
    theirs.unlock().ok().await;
    nothing_of_ours_left(&name).await;
}

/// `KeyScheme::Prefix` is for us alone: a Java service on the same name excludes nobody, so this is what
/// not to do. It also shows that the tests above could fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_prefix_of_ours_is_not_shared_with_java() {
    let Some(java) = Java::shared() else { return };
    let (url, name) = (server().url(), unique_name());
    let scheme = || KeyScheme::Prefix("app".into());
    let rust = connected(|| LockClient::builder().url(&url).key_scheme(scheme())).await;
    for prefix in ["", "app:"] {
        let settings = [("prefix", prefix)];
        let there = java.client_with(&url, LEASE, &settings).await;
        let theirs = there.lock(Kind::Plain, &name);
        theirs.lock().ok().await;
        let guard = rust.lock(&*name).try_acquire().await.unwrap();
        assert!(guard.is_some_and(|guard| guard.is_held()));
        theirs.unlock().ok().await;
    }
    nothing_of_ours_left(&name).await;
}
