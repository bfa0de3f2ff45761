//! What stays after a great many names: nothing but token counters that expire. In a process of its
//! own, whose resident memory is looked at.
#![allow(
    clippy::disallowed_methods,
    reason = "tests run by the real clock; only the crate itself takes its time from `Env`"
)]

mod common;

use std::time::Instant;

use leasehold::{Error, LockClient, ReleaseOutcome};

use common::*;

/// One test at a time: they share the memory that they look at.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// Resident memory of this process, in KiB.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let digits = line.unwrap().split_whitespace().nth(1).unwrap();
    digits.parse().unwrap()
}

/// Takes and frees the names `from..to`, many at a time.
async fn through(client: &LockClient, from: usize, to: usize) {
    const TASKS: usize = 64;
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let client = client.clone();
            tokio::spawn(async move {
                for i in (from + task..to).step_by(TASKS) {
                    let guard = client.lock(format!("name:{i}")).acquire().await.unwrap();
                    // On a busy machine the answer may be late; what is left in the end is looked at below.
                    let outcome = guard.release().await;
                    assert!(!matches!(outcome, ReleaseOutcome::Lost(_)), "{outcome:?}");
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
}

/// B85: names come and go (`order:4711`) and must cost nothing when they are gone: not in this
/// process, and on the server only a counter with an expiry.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_that_are_gone_cost_nothing() {
    let _alone = ALONE.lock().await;
    let names = scaled(300_000, 1_000_000);
    let server = Server::start();
    let cli = server.cli().await;
    // The shortest retention there is: two leases.
    let client = LockClient::builder()
        .url(server.url())
        .lease(secs(3))
        .token_retention(Some(ms(1)))
        .build()
        .await
        .unwrap();
    let first = client.lock("name:0").acquire().await.unwrap();
    let token = first.fencing_token().unwrap();
    assert_eq!(first.release().await, ReleaseOutcome::Released);
    let tenth = names / 10;
    through(&client, 0, tenth).await;
    let base = resident();
    let mut most = base;
    for part in 1..10 {
        through(&client, part * tenth, (part + 1) * tenth).await;
        most = most.max(resident());
    }
    let grown = most.saturating_sub(base);
    assert!(
        grown < base / 10 + 2048,
        "{base} KiB after a tenth, {most} KiB at most"
    );
    // Token counters end six seconds after their last use, and the client's info with the client.
    let info = cli.keys_with("leasehold_client").await;
    assert_eq!(info.len(), 1, "{info:?}");
    assert!(cli.pttl(&info[0]).await > 0);
    let keys = cli.keys_with("").await;
    for key in keys.iter().take(2000) {
        let counter = key.starts_with("redisson_lock_token:");
        assert!(counter || *key == info[0], "{key} is left");
        assert!(cli.pttl(key).await != -1, "{key} stays for ever");
    }
    eventually(secs(30), "counters expire", async || {
        cli.keys_with("redisson_lock_token").await.is_empty()
    })
    .await;
    let again = client.lock("name:0").acquire().await.unwrap();
    assert!(
        again.fencing_token().unwrap() > token,
        "tokens rise all the same"
    );
    assert_eq!(again.release().await, ReleaseOutcome::Released);
    let _ = client.close(secs(2)).await;
    assert!(cli.keys_with("leasehold_client").await.is_empty());
    drop(client);
}

/// B87: a server that is silent, and callers who keep coming: what waits for it is bounded, callers
/// are told in their time, and all is well as soon as it answers.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_server_costs_bounded_memory_and_is_back_within_a_second() {
    let _alone = ALONE.lock().await;
    let server = Server::start();
    let client = LockClient::builder()
        .url(server.url())
        .lease(ms(1200))
        .build()
        .await
        .unwrap();
    server.stop();
    let end = Instant::now() + scaled(secs(4), secs(60));
    let attempts = async |until: Instant| {
        let mut calls = 0_u64;
        while Instant::now() < until {
            // 5 000 a second: fifty every ten milliseconds. The rhythm is the subject.
            for _ in 0..50 {
                let client = client.clone();
                calls += 1;
                tokio::spawn(async move {
                    let started = Instant::now();
                    let result = client
                        .lock(format!("name:{calls}"))
                        .acquire_timeout(ms(300))
                        .await;
                    assert!(
                        matches!(
                            result,
                            Err(Error::Unreachable { .. } | Error::Indeterminate { .. })
                        ),
                        "{result:?}"
                    );
                    assert!(started.elapsed() < secs(2), "{:?}", started.elapsed());
                });
            }
            tokio::time::sleep(ms(10)).await;
        }
        calls
    };
    attempts(Instant::now() + ms(1500)).await;
    let base = resident();
    let calls = attempts(end).await;
    let grown = resident().saturating_sub(base);
    assert!(calls > 2000, "{calls}");
    // Without a bound each call would leave a kilobyte or two.
    assert!(grown < base / 4 + 4096, "{base} KiB and {grown} more");
    tokio::time::sleep(ms(400)).await; // for the last calls to have their answers
    server.cont();
    let back = Instant::now();
    let guard = client.lock("back").acquire_timeout(secs(1)).await.unwrap();
    assert!(back.elapsed() < secs(1), "{:?}", back.elapsed());
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    let cli = server.cli().await;
    eventually(secs(5), "nothing held for nobody", async || {
        let mut left = cli.keys_with("name:").await;
        left.retain(|key| !key.contains("token"));
        left.is_empty()
    })
    .await;
}
