//! Many clients on a simulated server, all of it decided by one seed, judged by the promises.
//!
//! docs/testing.md says how to run, replay, read and extend it.

#![allow(
    clippy::disallowed_methods,
    reason = "how long a search takes is told by the real clock; what it searches has its own"
)]

mod bugs;
mod checkers;
mod plan;
mod run;
mod shrink;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use leasehold::testing::Simulation;
use plan::{KINDS, Plan};
use run::{Outcome, run};

/// Five thousand schedules, or as many as `LEASEHOLD_SEEDS` says.
#[test]
fn no_schedule_breaks_a_promise() {
    let first = number("LEASEHOLD_FIRST").unwrap_or(0);
    search(first, number("LEASEHOLD_SEEDS").unwrap_or(5_000));
}

/// Seeds that have found a fault of the crate.
#[test]
fn what_was_found_once_stays_mended() {
    for seed in FOUND {
        let plan = Plan::of(seed, &BTreeSet::new());
        let as_it_was = plan.two_sided.is_empty() && plan.fair.is_empty();
        assert!(as_it_was, "seed {seed} is not what it was");
        judge(&plan, &run(&plan));
    }
    for seed in FOUND_BY_KINDS {
        let plan = Plan::of(seed, &BTreeSet::new());
        assert!(!plan.two_sided.is_empty(), "seed {seed} is not what it was");
        judge(&plan, &run(&plan));
    }
}

/// docs/failure-modes.md has a row for each.
const FOUND: [u64; 4] = [184_453, 382_133, 1_647_873, 1_765_835];

/// The same with read/write locks among them.
const FOUND_BY_KINDS: [u64; 5] = [58_947, 248_408, 1_503_089, 1_529_360, 1_688_856];

/// Replays the seed in `LEASEHOLD_SEED`, and shows everything that happened; with the mistake in
/// `LEASEHOLD_BUG`, if there is one.
#[test]
fn replay() {
    let Some(seed) = number("LEASEHOLD_SEED") else {
        return;
    };
    let bug = std::env::var("LEASEHOLD_BUG").ok();
    Simulation::seed_bug(bug.map(|name| bugs::named(&name)));
    let plan = Plan::of(seed, &off());
    let outcome = run(&plan);
    println!("{plan}");
    for (place, record) in outcome.records.iter().enumerate() {
        println!("{place:>4} {record}");
    }
    judge(&plan, &outcome);
}

/// Some seed has it, so what is done against it is tried; and docs/testing.md names it.
#[test]
fn each_kind_of_fault_happens() {
    let plans = (0..2_000).map(|seed| Plan::of(seed, &BTreeSet::new()));
    let happen: BTreeSet<_> = plans.flat_map(|plan| plan.kinds()).collect();
    assert_eq!(happen, BTreeSet::from(KINDS));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/testing.md");
    let documented = std::fs::read_to_string(path).unwrap();
    for kind in KINDS {
        assert!(documented.contains(&format!("`{kind}`")), "{kind}");
    }
}

/// One seed, one history.
#[test]
fn a_seed_replays_exactly() {
    for seed in 0..40 {
        let plan = Plan::of(seed, &BTreeSet::new());
        let (first, second) = (run(&plan).records, run(&plan).records);
        for (place, (one, other)) in first.iter().zip(&second).enumerate() {
            assert_eq!(one, other, "seed {seed}, record {place}");
        }
        assert_eq!(first.len(), second.len(), "seed {seed}");
    }
}

/// Runs seeds from `first` on; stops at the first that breaks a promise, and shows it cut down.
fn search(first: u64, seeds: u64) {
    let off = off();
    let start = Instant::now();
    let mut records = 0_u64;
    for seed in first..first + seeds {
        let plan = Plan::of(seed, &off);
        let outcome = run(&plan);
        records += outcome.records.len() as u64;
        judge(&plan, &outcome);
    }
    let took = start.elapsed();
    let millis = u64::try_from(took.as_millis()).unwrap().max(1);
    println!(
        "{seeds} schedules in {took:.1?}, {} a second, {} records each",
        seeds * 1000 / millis,
        records / seeds.max(1)
    );
}

/// Panics if a promise was broken, with all that helps to find out why.
fn judge(plan: &Plan, outcome: &Outcome) {
    if outcome.violations.is_empty() {
        return;
    }
    let checker = outcome.violations[0].checker;
    let small = shrink::shrink(plan, checker, Duration::from_secs(20));
    let outcome = run(&small);
    println!("{small}");
    for (place, record) in outcome.records.iter().enumerate() {
        println!("{place:>4} {record}");
    }
    for violation in &outcome.violations {
        println!("{violation}");
    }
    panic!(
        "seed {} breaks `{checker}`; faults used: {:?}. Again, in full:\n  \
         LEASEHOLD_SEED={} cargo test --features testing --test simulation -- --exact replay --nocapture",
        plan.seed,
        plan.kinds(),
        plan.seed
    );
}

/// Kinds of faults to leave out: `LEASEHOLD_OFF=doubled,freeze`.
fn off() -> BTreeSet<String> {
    let off = std::env::var("LEASEHOLD_OFF").unwrap_or_default();
    let off: BTreeSet<_> = off.split(',').filter(|kind| !kind.is_empty()).collect();
    for kind in &off {
        assert!(KINDS.contains(kind), "`{kind}` is none of {KINDS:?}");
    }
    off.into_iter().map(str::to_owned).collect()
}

fn number(variable: &str) -> Option<u64> {
    let value = std::env::var(variable).ok()?;
    let number = value.parse();
    Some(number.unwrap_or_else(|_| panic!("{variable}={value} is no number")))
}
