//! Distributed locks for Tokio services on Redis or Valkey: reentrant, renewed, cancellation-safe,
//! fenced, and told when lost.
//!
//! ```
//! use leasehold::{Error, LockClient};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Error> {
//! // On a server: LockClient::connect("redis://127.0.0.1:6379").await?
//! let client = LockClient::in_memory();
//!
//! let mut ctx = client.context(); // one flow of work: a request, a job
//! let guard = ctx.lock("order:10").acquire().await?; // waits; renewed from now on
//! let token = guard.fencing_token()?; // for the store to check
//!
//! let again = ctx.lock("order:10").acquire().await?; // the same flow enters it again
//! assert_eq!((again.depth(), again.fencing_token()?), (2, token));
//! drop(again); // dropping a guard releases too
//!
//! guard.release().await.into_result().expect("held all the time");
//! # Ok(()) }
//! ```
//!
//! | to | use |
//! |---|---|
//! | connect, once per service | [`LockClient`], [`LockClientBuilder`] |
//! | say which work belongs together | [`LockContext`]: [`share`](LockContext::share) is the same flow, [`fork`](LockContext::fork) another |
//! | share it among readers, or take it in order of arrival | [`LockContext::rw_lock`], [`LockContext::fair_lock`] |
//! | hold several together, all or none | [`MultiLock`] |
//! | hold one on a majority of several servers | [`QuorumLock`] |
//! | wait, with or without a limit, or try | [`Lock::acquire`], [`acquire_timeout`](Lock::acquire_timeout), [`try_acquire`](Lock::try_acquire), [`run`](Lock::run) |
//! | notice the loss of a lock | [`LockGuard::run`], [`lost`](LockGuard::lost), [`is_held`](LockGuard::is_held) |
//! | refuse the write of who lost it | [`LockGuard::fencing_token`] |
//! | end in order | [`LockClient::close`] |
//! | decide after an error | [`Error`], [`Error::is_retryable`] |
//!
//! What is promised, on which conditions, and what is not: [`manual::guarantees`]. No lock closes the
//! gap between a look at it and the write that follows; where that matters, let the store check the
//! token.
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

mod bug;
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
#[cfg(test)]
mod interleavings;
mod key;
mod kind;
mod lease;
mod lock;
pub mod manual;
mod observe;
mod store;
mod sync;
#[cfg(feature = "testing")]
pub mod testing;
mod watchdog;

pub use client::{CloseReport, LockClient, LockClientBuilder, RedisSource};
pub use config::PubSub;
pub use context::LockContext;
pub use error::{Error, Source};
pub use fencing::{Fence, FencingToken, NotAToken, Stale};
pub use guard::{LockGuard, LossReason, ReleaseOutcome};
pub use inspect::{Holder, Inspection, LockKind};
pub use key::KeyScheme;
pub use kind::{MultiGuard, MultiLock, MultiRelease, QuorumGuard, QuorumLock, RwLock};
pub use lock::Lock;

#[cfg(doctest)]
mod misuse;

/// The README's program.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
