//! A fencing token in a header, checked by the service that has the resource.
//!
//! ```text
//! $ cargo run --example fencing_http
//! the new holder's write: 204
//! the late write: 412: the lock was lost: fencing token 1764500000000000 is less than ...
//! a write without a token: 428
//! report 7 is `second`
//! ```
//!
//! The resource knows nothing of locks: it remembers the greatest token for each report, and refuses a smaller
//! one with 412 (precondition failed). Who gets that has lost the lock, and repeats nothing.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::routing::get;
use leasehold::{Fence, FencingToken, LockClient};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const HEADER: &str = "fencing-token";

// ---- The resource.

#[derive(Default)]
struct Report {
    text: String,
    fence: Fence,
}

type Reports = Arc<Mutex<HashMap<u64, Report>>>;

type Answer<T> = std::result::Result<T, (StatusCode, String)>;

async fn write(
    State(reports): State<Reports>,
    Path(id): Path<u64>,
    headers: HeaderMap,
    text: String,
) -> Answer<StatusCode> {
    let refuse = |status, why: &dyn ToString| (status, why.to_string());
    let token = headers
        .get(HEADER)
        .ok_or_else(|| refuse(StatusCode::PRECONDITION_REQUIRED, &"send a fencing token"))?;
    let token: FencingToken = token
        .to_str()
        .map_err(|error| refuse(StatusCode::BAD_REQUEST, &error))?
        .parse()
        .map_err(|error| refuse(StatusCode::BAD_REQUEST, &error))?;

    // Check and write under one lock: nobody comes in between.
    let mut reports = reports.lock().expect("nobody panics with it");
    let report = reports.entry(id).or_default();
    report
        .fence
        .admit(token)
        .map_err(|stale| refuse(StatusCode::PRECONDITION_FAILED, &stale))?;
    report.text = text;
    Ok(StatusCode::NO_CONTENT)
}

async fn read(State(reports): State<Reports>, Path(id): Path<u64>) -> Answer<String> {
    let reports = reports.lock().expect("nobody panics with it");
    let report = reports
        .get(&id)
        .ok_or((StatusCode::NOT_FOUND, String::new()))?;
    Ok(report.text.clone())
}

/// Serves the resource on a free port, until the runtime ends.
#[allow(
    clippy::disallowed_methods,
    reason = "only the crate itself spawns otherwise"
)]
pub(crate) async fn serve() -> Result<SocketAddr> {
    let router = Router::new().route("/reports/{id}", get(read).put(write));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let service = axum::serve(listener, router.with_state(Reports::default()));
    tokio::spawn(async { service.await });
    Ok(address)
}

// ---- Its users. Any HTTP client does; this one has no dependencies.

pub(crate) async fn put(to: SocketAddr, id: u64, text: &str, token: &str) -> Result<(u16, String)> {
    call(to, "PUT", id, text, &format!("{HEADER}: {token}\r\n")).await
}

pub(crate) async fn call(
    to: SocketAddr,
    method: &str,
    id: u64,
    text: &str,
    headers: &str,
) -> Result<(u16, String)> {
    let mut connection = TcpStream::connect(to).await?;
    let length = text.len();
    let request = format!(
        "{method} /reports/{id} HTTP/1.1\r\nhost: {to}\r\nconnection: close\r\n{headers}\
         content-length: {length}\r\n\r\n{text}"
    );
    connection.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await?;
    let status = answer.split(' ').nth(1).ok_or("no status")?.parse()?;
    let (_, body) = answer.split_once("\r\n\r\n").ok_or("no end of head")?;
    Ok((status, body.to_owned()))
}

#[tokio::main]
pub(crate) async fn main() -> Result<()> {
    let locks = LockClient::in_memory(); // a server in earnest: its tokens outlive the process
    let resource = serve().await?;

    // A holder is stuck past the end of its lease, with its token in hand.
    let lease = Duration::from_millis(200);
    let stuck = locks.lock("report:7").lease(lease).acquire().await?;
    let old = stuck.fencing_token()?.to_string();
    put(resource, 7, "first", &old).await?;
    stuck.lost().cancelled().await;

    // The next one gets the lock, and writes. Then the first one wakes up.
    let next = locks.lock("report:7").acquire().await?;
    let token = next.fencing_token()?.to_string();
    let (written, _) = put(resource, 7, "second", &token).await?;
    println!("the new holder's write: {written}");
    let (late, why) = put(resource, 7, "too late", &old).await?;
    println!("the late write: {late}: {why}");
    let (without, _) = call(resource, "PUT", 7, "no token", "").await?;
    println!("a write without a token: {without}");
    let (_, text) = call(resource, "GET", 7, "", "").await?;
    println!("report 7 is `{text}`");

    assert_eq!((written, late, without), (204, 412, 428));
    assert_eq!(text, "second");
    Ok(())
}
