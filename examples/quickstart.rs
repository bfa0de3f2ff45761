//! The shortest useful program. Needs no server: the locks are kept in this process.
//!
//! ```text
//! $ cargo run --example quickstart
//! order:10 is ours, fencing token 1764500000000000
//! charged, at depth 2
//! order:10 is free again
//! ```

use leasehold::{Error, LockClient, LockContext, ReleaseOutcome};

#[tokio::main]
async fn main() -> Result<(), Error> {
    // On a server: LockClient::connect("redis://127.0.0.1:6379").await?
    let client = LockClient::in_memory();

    let mut ctx = client.context(); // one flow of work: a request, a job
    let guard = ctx.lock("order:10").acquire().await?; // waits; renewed from now on
    println!("order:10 is ours, fencing token {}", guard.fencing_token()?);

    charge(&mut ctx).await?; // takes the same lock: the same flow of work enters it again

    // Any other flow of work waits, in this process as in others.
    assert!(client.lock("order:10").try_acquire().await?.is_none());

    match guard.release().await {
        ReleaseOutcome::Released => println!("order:10 is free again"),
        other => println!("look into this: {other:?}"), // lost before, or no answer
    }
    Ok(())
}

async fn charge(ctx: &mut LockContext) -> Result<(), Error> {
    let inner = ctx.lock("order:10").acquire().await?;
    println!("charged, at depth {}", inner.depth());
    Ok(()) // dropping a guard releases too
}
