//! leasehold and Redisson, on the same locks at the same time.
//!
//! Needs a JDK (17 or newer) and Maven; without them every test returns at once, and one line says so.
//! `LEASEHOLD_INTEROP=required` makes that a failure; `LEASEHOLD_REDISSON=3.52.0` chooses another Redisson.
//!
//! A test that has a `Java` can do with it what a Java program can do with Redisson's locks:
//!
//! ```ignore
//! let Some(java) = Java::shared() else { return };            // a JVM for all tests, started once
//! let there = java.client(&server.url(), secs(30)).await;     // Redisson.create, a watchdog of 30 s
//! let thread = there.thread();                                // a thread of its own: an owner
//! let lock = thread.lock(Kind::Fair, &name);                  // getFairLock(name)
//! lock.lock().ok().await;                                     // lock(); panics if it threw
//! let waiting = there.thread().lock(Kind::Fair, &name).lock(); // sent now, answered when it is granted
//! lock.unlock().ok().await;
//! let granted_at = waiting.ok().await;                        // when the answer came
//! let (class, message) = lock.unlock().error().await;         // IllegalMonitorStateException
//! let other = Java::another();                                 // a JVM of its own, ...
//! other.kill();                                               // ... for SIGKILL
//! ```
//!
//! All commands: the head of `java/src/main/java/interop/Driver.java`.
#![allow(
    clippy::disallowed_methods,
    reason = "tests run by the real clock; only the crate itself takes its time from `Env`"
)]

#[path = "../common/mod.rs"]
mod common;

mod driver;
mod ends;
mod java;
mod kinds;
mod load;
mod names;
mod neighbours;
mod plain;
mod tokens;

use std::time::Duration;

use common::*;
use leasehold::{Error, LockClient, LockClientBuilder};

/// A client that shares names with Java's fenced locks: the token counter stays.
async fn ours(lease: Duration) -> LockClient {
    let url = server().url();
    connected(|| {
        let builder = LockClient::builder().url(&url).lease(lease);
        builder.token_retention(None)
    })
    .await
}

/// The client that `builder` builds. On a busy machine the first connection may take more than its
/// timeout.
async fn connected(builder: impl Fn() -> LockClientBuilder) -> LockClient {
    loop {
        match builder().build().await {
            Ok(client) => return client,
            Err(Error::Unreachable { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
}

/// [`nothing_left`], but for what Redisson keeps of its own: the answers to its `unlock` calls, for some 20 s;
/// some versions remove them at once.
async fn nothing_of_ours_left(name: &str) {
    let cli = server().cli().await;
    for key in cli.keys_with(name).await {
        if key.starts_with("redisson_unlock_latch:") {
            cli.cmd(&["DEL", &key]).await.ok();
        }
    }
    nothing_left(server(), name).await;
}

/// The default lease of both.
const LEASE: Duration = secs(30);
