//! Distributed locks for Tokio services on Redis or Valkey.
#![allow(dead_code)]
mod config;
mod env;
mod error;
mod guard;
mod key;
mod observe;
mod store;
pub use error::Error;
pub use guard::LossReason;
pub use key::KeyScheme;
