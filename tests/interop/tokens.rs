//! Fencing tokens: one counter, whoever takes the lock.

use leasehold::{LockClient, ReleaseOutcome};

use crate::java::{Java, Kind};
use crate::{LEASE, common::*, connected, nothing_of_ours_left, ours};

/// S2 over both languages: each hold's token is greater than all before. Java counts on from ours by one, and
/// its `getToken` is the newest of anybody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_rise_over_both_languages() {
    let Some(java) = Java::shared() else { return };
    let name = unique_name();
    let rust = ours(LEASE).await;
    let there = java.client(&server().url(), LEASE).await;
    let theirs = there.lock(Kind::Fenced, &name);
    let cli = server().cli().await;
    let mut last = 0;
    for round in 0..scaled(20, 500) {
        // Sometimes one after the other of the same language.
        if round % 5 != 1 {
            let token = theirs.lock_and_get_token().await;
            assert_eq!(token, last + 1);
            // A nested one counts there, too.
            let nested = theirs.lock_and_get_token().await;
            assert_eq!(nested, token + 1);
            theirs.unlock().ok().await;
            theirs.unlock().ok().await;
            last = nested;
        }
        if round % 5 != 3 {
            let mut ctx = rust.context();
            let guard = ctx.lock(&*name).acquire().await.unwrap();
            let token = guard.fencing_token().unwrap().value();
            assert!(token > last, "{token} after {last}");
            // Not here.
            let nested = ctx.lock(&*name).acquire().await.unwrap();
            assert_eq!(nested.fencing_token().unwrap().value(), token);
            assert_eq!(theirs.token().await, token);
            drop(nested);
            assert_eq!(guard.release().await, ReleaseOutcome::Released);
            last = token;
        }
    }
    // Begun by Java, and kept as with Java: for ever.
    assert_eq!(cli.pttl(&token_key(&name)).await, -1);
    cli.cmd(&["DEL", &token_key(&name)]).await.ok();
    nothing_of_ours_left(&name).await;
}

/// Java's plain lock takes no token, so a write under it cannot be told from an old one: who shares a name and
/// checks tokens takes the fenced lock there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plain_lock_of_java_takes_no_token() {
    let Some(java) = Java::shared() else { return };
    let name = unique_name();
    let rust = ours(LEASE).await;
    let there = java.client(&server().url(), LEASE).await;
    let (plain, fenced) = (
        there.lock(Kind::Plain, &name),
        there.lock(Kind::Fenced, &name),
    );
    let guard = rust.lock(&*name).acquire().await.unwrap();
    let token = guard.fencing_token().unwrap().value();
    drop(guard);
    plain.lock().ok().await;
    assert_eq!(fenced.token().await, token);
    plain.unlock().ok().await;
    let guard = rust.lock(&*name).acquire().await.unwrap();
    assert!(guard.fencing_token().unwrap().value() > token);
    drop(guard);
    let key = token_key(&name);
    server().cmd(&["DEL", &key]).await.ok();
    nothing_of_ours_left(&name).await;
}

/// A counter that we made with a retention keeps it under Java's increments, and would begin anew after it, at 1:
/// hence `token_retention(None)` where names are shared. One that Java made has no end, and gets none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_counters_retention_is_that_of_who_made_it() {
    let Some(java) = Java::shared() else { return };
    let url = server().url();
    let there = java.client(&url, LEASE).await;
    let rust = connected(|| LockClient::builder().url(&url)).await;
    let cli = server().cli().await;
    for java_first in [true, false] {
        let name = unique_name();
        let key = token_key(&name);
        let theirs = there.lock(Kind::Fenced, &name);
        if java_first {
            assert_eq!(theirs.lock_and_get_token().await, 1);
            theirs.unlock().ok().await;
        }
        let guard = rust.lock(&*name).acquire().await.unwrap();
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
        let before = cli.pttl(&key).await;
        theirs.lock_and_get_token().await;
        theirs.unlock().ok().await;
        let after = cli.pttl(&key).await;
        if java_first {
            assert_eq!((before, after), (-1, -1));
        } else {
            assert!(before > 0 && after > 0 && after <= before);
        }
        cli.cmd(&["DEL", &key]).await.ok();
        nothing_of_ours_left(&name).await;
    }
}
