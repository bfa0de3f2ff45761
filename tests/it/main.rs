//! Everything that needs no process of its own: one binary, a module per behaviour.
#![allow(
    clippy::disallowed_methods,
    reason = "tests run by the real clock; only the crate itself takes its time from `Env`"
)]

#[path = "../common/mod.rs"]
mod common;

mod acl;
mod api;
mod attacks;
mod bad_input;
mod cancellation;
mod chaos;
mod drops;
mod events;
mod exclusion;
mod fair;
mod fencing;
mod grants;
mod hand_off;
mod harness;
mod multi;
mod outage;
mod quorum;
mod read_write;
mod reentrancy;
mod refused;
mod replay;
mod retries;
mod server_faults;
mod slice;
mod support;
mod time;
mod tokens;
mod usability;
mod waiting;
mod watchdog;
