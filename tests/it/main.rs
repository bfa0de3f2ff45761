//! Everything that needs no process of its own: one binary, a module per behaviour.
#![allow(
    clippy::disallowed_methods,
    reason = "tests run by the real clock; only the crate itself takes its time from `Env`"
)]

#[path = "../common/mod.rs"]
mod common;

mod chaos;
mod events;
mod harness;
mod outage;
mod slice;
mod time;
mod waiting;
mod watchdog;
