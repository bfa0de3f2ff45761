//! What a holder sees whose lease ends under it, and how its late write is refused.
//!
//! Needs no server. The lease is fixed (`.lease(..)` is never renewed) so that it ends on time;
//! with a renewed one the same happens when the server cannot be reached.
//!
//! ```text
//! $ cargo run --example lost_lease
//! run: stopped after 0.5 s: lock `report` is lost: its lease ended, and no renewal of it was confirmed
//! lost(): told after 0.5 s: its lease ended, and no renewal of it was confirmed
//! the new holder's write: accepted
//! the late write: refused, its token is old
//! release: Lost(DeadlinePassed)
//! ```
#![allow(
    clippy::disallowed_methods,
    reason = "only the crate itself takes its time from elsewhere"
)]

use std::time::{Duration, Instant};

use leasehold::{Error, FencingToken, LockClient};

/// What the lock protects: it remembers the greatest token, and refuses smaller ones.
#[derive(Default)]
struct Report {
    text: String,
    token: Option<FencingToken>,
}

impl Report {
    fn write(&mut self, text: &str, token: FencingToken) -> &'static str {
        if self.token.is_some_and(|greatest| token < greatest) {
            return "refused, its token is old";
        }
        self.token = Some(token);
        text.clone_into(&mut self.text);
        "accepted"
    }
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let client = LockClient::in_memory();
    let lease = Duration::from_millis(500);
    let mut report = Report::default();

    // One way: `run` stops the work when the lock is lost.
    let guard = client.lock("report").lease(lease).acquire().await?;
    let started = Instant::now();
    let work = tokio::time::sleep(Duration::from_mins(1));
    if let Err(error) = guard.run(work).await {
        let after = started.elapsed().as_secs_f32();
        println!("run: stopped after {after:.1} s: {error}");
    }
    drop(guard);

    // Another: `lost()` is a token to wait for, beside anything else.
    let guard = client.lock("report").lease(lease).acquire().await?;
    let token = guard.fencing_token()?; // a careless holder keeps it
    let lost = guard.lost();
    let started = Instant::now();
    tokio::select! {
        () = tokio::time::sleep(Duration::from_mins(1)) => unreachable!("the lease is shorter"),
        () = lost.cancelled() => {
            let after = started.elapsed().as_secs_f32();
            if let Some(reason) = guard.loss_reason() {
                println!("lost(): told after {after:.1} s: {reason}");
            }
        }
    }

    // Somebody else gets the lock, and writes. The careless holder writes after that.
    let next = client.lock("report").acquire().await?;
    let outcome = report.write("new", next.fencing_token()?);
    println!("the new holder's write: {outcome}");
    println!("the late write: {}", report.write("old", token));
    assert_eq!(report.text, "new");

    // The guard itself gives no token any more, and its release says what happened.
    assert!(matches!(guard.fencing_token(), Err(Error::Lost { .. })));
    println!("release: {:?}", guard.release().await);
    Ok(())
}
