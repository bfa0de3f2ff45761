//! Tools to try bad days on: for services that use this crate, and for the crate itself.
//!
//! Only with the feature `testing`; not covered by the promises of semantic versioning.
//!
//! * [`Server`] is a server in this process that can be slow, silent, restarted or robbed. Clients
//!   reach it by [`LockClientBuilder::simulated`](crate::LockClientBuilder::simulated). Under Tokio's
//!   paused clock a test of a lost lease takes no time.
//! * [`Simulation`] runs many clients on such a server, all of it decided by one seed, and records
//!   what happened. `tests/simulation` is built on it.
#![allow(
    clippy::exhaustive_structs,
    clippy::exhaustive_enums,
    reason = "written out by tests, which follow the crate's version"
)]

mod chance;
mod executor;
mod history;
mod net;
mod server;
mod simulation;

pub use chance::Chance;
pub use history::{Answered, Did, Done, History, HoldId, Holder, Note, Owners, Ran, Record, What};
pub use server::{Faults, Server};
pub use simulation::{Ended, Process, Simulation};

pub use crate::bug::Bug;
