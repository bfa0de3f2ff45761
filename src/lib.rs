//! Distributed locks for Tokio services on Redis or Valkey: reentrant, renewed, cancellation-safe,
//! fenced, and told when lost.
#![warn(
    missing_docs,
    unreachable_pub,
    unnameable_types,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::exhaustive_enums,
    clippy::exhaustive_structs
)]

mod client;
mod config;
mod contend;
mod context;
mod dispatch;
mod engine;
mod env;
mod error;
mod fencing;
mod guard;
mod hold;
mod inspect;
mod key;
mod lease;
mod lock;
mod observe;
mod store;
mod watchdog;

pub use client::{CloseReport, LockClient, LockClientBuilder, RedisSource};
pub use config::PubSub;
pub use context::LockContext;
pub use error::{Error, Source};
pub use fencing::FencingToken;
pub use guard::{LockGuard, LossReason, ReleaseOutcome};
pub use inspect::{Holder, Inspection, LockKind};
pub use key::KeyScheme;
pub use lock::Lock;
