//! A web service, of which several instances run: one order is charged by one of them at a time.
//!
//! ```text
//! $ REDIS_URL=redis://127.0.0.1:6379 cargo run --example service    # address: first argument
//! listening on 127.0.0.1:8080, Ctrl-C or SIGTERM to stop
//! $ curl -X POST http://127.0.0.1:8080/orders/10/charge
//! order 10: charged once, token 1764500000000000
//! ```
//!
//! Each request is a flow of work of its own, with a context of its own: two requests for one order
//! exclude each other. When a client hangs up, axum drops the handler's future: what it held is
//! released, and its place in line given up.
#![allow(
    clippy::disallowed_methods,
    reason = "only the crate itself takes its time from elsewhere"
)]

use std::collections::HashMap;
use std::env;
use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::post;
use leasehold::{Error, LockClient, LockContext};
use tokio::net::TcpListener;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

/// The service keeps the client; locks and contexts are made per request.
#[derive(Clone)]
struct App {
    locks: LockClient,
    /// Stands for the database.
    charges: Arc<Mutex<HashMap<u64, u64>>>,
}

type Answer = Result<String, (StatusCode, String)>;

async fn charge_order(State(app): State<App>, Path(order): Path<u64>) -> Answer {
    let mut ctx = app.locks.context();
    charge(&mut ctx, &app, order)
        .await
        .map_err(|error| refusal(&error))
}

async fn charge(ctx: &mut LockContext, app: &App, order: u64) -> Result<String, Error> {
    let mut lock = ctx.lock(format!("order:{order}"));
    let guard = lock.acquire_timeout(Duration::from_secs(2)).await?;

    // Stops when the lock is lost: somebody else may be charging by then.
    let token = guard.fencing_token()?;
    let charged = guard.run(pay(app, order)).await?;

    // A database would get the token with the write, and refuse a smaller one than its last.
    guard.release().await.into_result().map_err(|reason| {
        let name = format!("order:{order}");
        Error::Lost { name, reason }
    })?;
    Ok(format!("order {order}: charged {charged}, token {token}\n"))
}

/// Reads, thinks, writes: two at once would both charge.
async fn pay(app: &App, order: u64) -> &'static str {
    let before = app.charges.lock().await.get(&order).copied();
    tokio::time::sleep(Duration::from_millis(50)).await;
    if before.is_some() {
        return "before";
    }
    *app.charges.lock().await.entry(order).or_default() += 1;
    "once"
}

/// Errors are sorted by what the caller can do next.
fn refusal(error: &Error) -> (StatusCode, String) {
    let status = match error {
        Error::TimedOut { .. } => StatusCode::CONFLICT, // others are at it
        _ if error.is_retryable() => StatusCode::SERVICE_UNAVAILABLE,
        Error::Closed => StatusCode::SERVICE_UNAVAILABLE, // this instance is shutting down
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    // The cause is for the operator, not for the caller.
    tracing::warn!(%status, cause = error.source(), "{error}");
    (status, format!("{error}\n"))
}

/// Ctrl-C, or SIGTERM as containers are stopped by.
async fn told_to_stop() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
            return;
        }
    }
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending::<()>().await; // no signals here: serve on
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().init();
    // No silent default: instances that do not share a server do not exclude each other.
    let url = env::var("REDIS_URL").map_err(|_| "set REDIS_URL (memory:// for one instance)")?;
    let address = env::args().nth(1).unwrap_or("127.0.0.1:8080".to_owned());
    let builder = LockClient::builder().url(&url).label("order service");
    let locks = builder.build().await?;
    let app = App {
        locks: locks.clone(),
        charges: Arc::default(),
    };
    let router = Router::new()
        .route("/orders/{order}/charge", post(charge_order))
        .with_state(app);

    let listener = TcpListener::bind(&address).await?;
    println!(
        "listening on {}, Ctrl-C or SIGTERM to stop",
        listener.local_addr()?
    );
    let stop = CancellationToken::new();
    let serving =
        axum::serve(listener, router).with_graceful_shutdown(stop.clone().cancelled_owned());
    let serving = async { serving.await };
    tokio::pin!(serving);
    tokio::select! {
        ended = &mut serving => return Ok(ended?),
        () = told_to_stop() => {}
    }

    // Both at once: requests that wait for a lock are told, those that hold one finish, and what is still
    // held after five seconds is told and released, so that leases need not run out.
    stop.cancel();
    let deadline = Duration::from_secs(5);
    let (report, served) = tokio::join!(
        locks.close(deadline),
        tokio::time::timeout(deadline, &mut serving)
    );
    println!("locks closed: {report:?}");
    if served.is_err() {
        println!("some requests were not served out");
    }
    Ok(())
}
