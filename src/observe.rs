//! What leaves the process: events, and names and owners in a form that may be logged.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::engine::Engine;
use crate::env::later;
use crate::guard::LossReason;
use crate::store::{Health, OwnerId};
use crate::sync::Mutex;

/// Eight hexadecimal digits that stand for `text`: enough to tell two apart, useless to forge one.
pub(crate) fn digest(text: &str) -> String {
    // FNV-1a, folded: a fixed function, so that one owner has one digest in all processes.
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for byte in text.bytes() {
        hash ^= u64::from(byte);
        hash = hash.wrapping_mul(0x0000_0100_0000_01b3);
    }
    format!("{:08x}", (hash >> 32) ^ (hash & 0xffff_ffff))
}

/// Bounds the events about single holds, so that an outage that hits thousands does not bury its own
/// cause: so many a second, then their number.
#[derive(Debug, Default)]
pub(crate) struct Limiter {
    window: Mutex<Window>,
}

#[derive(Debug, Default)]
struct Window {
    end: Option<Instant>,
    told: usize,
    untold: usize,
}

impl Limiter {
    /// Whether one more event may be told. The first that may not starts a summary.
    fn allows(engine: &Arc<Engine>) -> bool {
        let now = engine.now();
        let mut window = engine.events.window.lock();
        if window.end.is_none_or(|end| end <= now) {
            window.end = Some(later(now, Duration::from_secs(1)));
            window.told = 0;
        }
        window.told += 1;
        if window.told <= MOST_EVENTS {
            return true;
        }
        window.untold += 1;
        if window.untold == 1 {
            let (engine, end) = (Arc::clone(engine), window.end.unwrap_or(now));
            let summary = Arc::clone(&engine);
            engine.env.spawn(Box::pin(async move {
                summary.env.sleep_until(end).await;
                let events = std::mem::take(&mut summary.events.window.lock().untold);
                tracing::warn!(target: "leasehold", events,
                    "more events about single locks, not told one by one"
                );
            }));
        }
        false
    }
}

/// Events about single holds that are told in a second.
const MOST_EVENTS: usize = 100;

fn remaining(engine: &Engine, end: Instant) -> u64 {
    crate::config::millis(end.saturating_duration_since(engine.now()))
}

/// A hold was granted and claimed; `waited` since the caller asked.
pub(crate) fn acquired(
    engine: &Engine,
    name: &str,
    owner: OwnerId,
    waited: Option<Duration>,
    end: Instant,
) {
    let name = engine.loggable(name);
    let remaining_ms = remaining(engine, end);
    match waited {
        None => tracing::debug!(target: "leasehold", name, ?owner, remaining_ms, "lock acquired"),
        Some(waited) => {
            let waited_ms = crate::config::millis(waited);
            tracing::debug!(target: "leasehold", name,
                ?owner,
                remaining_ms,
                waited_ms,
                "lock acquired after waiting"
            );
        }
    }
}

/// A renewal has not been confirmed for a third of the lease.
pub(crate) fn late(engine: &Arc<Engine>, name: &str, owner: OwnerId, end: Instant) {
    if !Limiter::allows(engine) {
        return;
    }
    let (name, remaining_ms) = (engine.loggable(name), remaining(engine, end));
    tracing::warn!(target: "leasehold", name, ?owner, remaining_ms, "lease renewal is late");
}

/// A renewal that was late is confirmed.
pub(crate) fn recovered(engine: &Arc<Engine>, name: &str, owner: OwnerId, end: Instant) {
    if !Limiter::allows(engine) {
        return;
    }
    let (name, remaining_ms) = (engine.loggable(name), remaining(engine, end));
    tracing::info!(target: "leasehold", name, ?owner, remaining_ms, "lease renewal recovered");
}

/// A hold was lost while it was believed in.
pub(crate) fn lost(
    engine: &Arc<Engine>,
    name: &str,
    owner: OwnerId,
    reason: LossReason,
    end: Instant,
) {
    if !Limiter::allows(engine) {
        return;
    }
    let name = engine.loggable(name);
    // How long the server may keep it from everybody yet.
    let remaining_ms = if reason.may_be_on_server() {
        remaining(engine, end)
    } else {
        0
    };
    tracing::warn!(target: "leasehold", name, ?owner, %reason, remaining_ms, "lock lost");
}

/// A release was given up without an answer.
pub(crate) fn release_unconfirmed(
    engine: &Arc<Engine>,
    name: &str,
    owner: OwnerId,
    at_most: Duration,
) {
    if !Limiter::allows(engine) {
        return;
    }
    let name = engine.loggable(name);
    let at_most_ms = crate::config::millis(at_most);
    tracing::warn!(target: "leasehold", name, ?owner, at_most_ms, "release unconfirmed");
}

/// The server does not know a waiter's place in the queue of a fair lock any more: it comes again, as the
/// last.
pub(crate) fn place_lost(engine: &Arc<Engine>, name: &str, owner: OwnerId) {
    if !Limiter::allows(engine) {
        return;
    }
    let name = engine.loggable(name);
    tracing::warn!(target: "leasehold", name, ?owner,
        "place in the queue of a fair lock lost, queueing again"
    );
}

/// A waiter has waited a whole lease for a hold of its own client.
pub(crate) fn waiting_on_own_client(
    engine: &Arc<Engine>,
    name: &str,
    holder: OwnerId,
    held_for: Duration,
) {
    if !Limiter::allows(engine) {
        return;
    }
    let name = engine.loggable(name);
    let label = engine.config.label.as_deref().unwrap_or("");
    let held_for_ms = crate::config::millis(held_for);
    tracing::warn!(target: "leasehold", name,
        ?holder,
        label,
        held_for_ms,
        "waiting for a lock that this same client holds: pass its context to re-enter"
    );
}

/// How long the same reason is not told again.
const SAME_AGAIN: Duration = Duration::from_secs(30);

/// Tells of the connection's changes until the client stops: one event each.
pub(crate) async fn connection(engine: &Engine) {
    let mut health = engine.store.health();
    let mut was_up = false;
    // What was told of the last loss, and whether its end is to be told.
    let mut told: Option<(Arc<str>, Instant)> = None;
    let mut quiet = false;
    loop {
        let now = health.borrow_and_update().clone();
        match now {
            Health::Up { generation, .. } if quiet => {
                was_up = true;
                tracing::debug!(target: "leasehold", connection = generation, "reconnected to the server");
            }
            Health::Up { generation, .. } if !was_up => {
                was_up = true;
                if generation > 1 {
                    tracing::info!(target: "leasehold", connection = generation, "reconnected to the server");
                }
            }
            Health::Up { generation, .. } => {
                tracing::info!(target: "leasehold", connection = generation, "reconnected to the server");
            }
            Health::Down { why, .. } if was_up => {
                was_up = false;
                // One that refuses, as a read-only server does, is tried again and again.
                let now = engine.now();
                quiet = told
                    .as_ref()
                    .is_some_and(|(before, at)| *before == why && now < later(*at, SAME_AGAIN));
                if !quiet {
                    told = Some((Arc::clone(&why), now));
                }
                if quiet {
                    tracing::debug!(target: "leasehold", %why, "connection to the server lost");
                } else if engine.is_idle() {
                    // Servers close connections on which nothing happens.
                    tracing::info!(target: "leasehold", %why, "idle connection to the server lost");
                } else {
                    tracing::warn!(target: "leasehold", %why, "connection to the server lost");
                }
            }
            Health::Connecting | Health::Down { .. } => {}
            Health::Closed => return,
        }
        tokio::select! {
            biased;
            () = engine.stopped.cancelled() => return,
            changed = health.changed() => {
                if changed.is_err() {
                    return;
                }
            }
        }
    }
}
