//! What the tests stand on: real servers, a second road to look at them, and faults.
//!
//! Nothing here knows the crate under test; keys and channels are spelled as Redisson spells them.
#![allow(
    dead_code,
    unused_imports,
    reason = "each test binary uses its own part"
)]
#![allow(
    clippy::disallowed_methods,
    reason = "tests run by the real clock; only the crate itself takes its time from `Env`"
)]

pub mod cli;
pub mod faults;
pub mod log;
pub mod process;
pub mod resp;
pub mod ruler;
pub mod server;

use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub use cli::{Cli, Monitor};
pub use faults::{Act, Fault, Injected, Proxy, Then, bytes, command};
pub use log::{Log, record_this_thread};
pub use process::{Worker, WorkerSide};
pub use resp::Reply;
pub use ruler::Ruler;
pub use server::Server;

/// The server of this test binary. Tests run in parallel on it: use names of your own, and count
/// nothing that is counted for the whole server.
pub fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(Server::start)
}

/// A name that no other test uses, and that is part of no other such name.
pub fn unique_name() -> String {
    format!("test-{}", uuid::Uuid::new_v4().simple())
}

/// Milliseconds.
pub const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Seconds.
pub const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// Whether the long form of the tests was asked for, by `LEASEHOLD_LONG=1`.
pub fn long() -> bool {
    std::env::var("LEASEHOLD_LONG").is_ok_and(|value| value == "1")
}

/// `short`, or `long` when the long form of the tests was asked for.
pub fn scaled<T>(short: T, long_form: T) -> T {
    if long() { long_form } else { short }
}

/// Asks every few milliseconds until `condition` holds; panics, saying `what`, if it does not
/// within the time given, and what a busy machine takes.
pub async fn eventually(within: Duration, what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let (start, ruler) = (Instant::now(), Ruler::start());
    let mut pause = ms(1);
    loop {
        // Before the look: what was so in time is not missed because we looked too late.
        let waited = start.elapsed();
        if condition().await {
            return;
        }
        assert!(
            waited < within + ruler.allowance(),
            "not within {within:?}: {what}"
        );
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(ms(5));
    }
}

/// Redisson's channel of a lock.
pub fn channel(name: &str) -> String {
    redisson("redisson_lock__channel", name)
}

/// Redisson's key of a lock's fencing tokens.
pub fn token_key(name: &str) -> String {
    redisson("redisson_lock_token", name)
}

fn redisson(prefix: &str, name: &str) -> String {
    if name.contains('{') {
        format!("{prefix}:{name}")
    } else {
        format!("{prefix}:{{{name}}}")
    }
}

/// Asserts that `name` left nothing behind but its token counter: no key with the name in it and
/// no subscriber to a channel with the name in it, in whatever key scheme.
///
/// What was posted in the background has two seconds to arrive; so give leases more than that.
pub async fn nothing_left(server: &Server, name: &str) {
    let cli = server.cli().await;
    let within = secs(2);
    let (start, ruler) = (Instant::now(), Ruler::start());
    loop {
        let waited = start.elapsed();
        let mut left = cli.keys_with(name).await;
        left.retain(|key| !key.contains("_token:") && !key.contains(":token:"));
        left.extend(cli.channels_with(name).await);
        if left.is_empty() {
            return;
        }
        if waited > within + ruler.taken() {
            let hash = cli.hash_if_any(name).await;
            panic!("{within:?} later `{name}` has left {left:?}, in the hash {hash:?}");
        }
        tokio::time::sleep(ms(2)).await;
    }
}
