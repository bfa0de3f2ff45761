//! Each mistake that is built in on purpose is found, or the workload and its judges are too weak.

use std::collections::BTreeSet;

use leasehold::testing::{Bug, Simulation};

use crate::number;
use crate::plan::Plan;
use crate::run::run;

/// The mistakes, and a seed near which each is found. `LEASEHOLD_BUGS=100000` looks from seed 0 on, that
/// far, and prints what docs/testing.md has in its table.
const BUGS: [(Bug, u64); 41] = [
    (Bug::CountByIncrement, 0),
    (Bug::ReleaseWithoutOwnerCheck, 0),
    (Bug::RenewalThatCreates, 0),
    (Bug::NoTryAfterSubscribing, 0),
    (Bug::DeadlineFromReply, 0),
    (Bug::WatchdogByName, 1600),
    (Bug::RenewalOfAnAbandonedAcquire, 0),
    (Bug::ReleaseDropsItsJob, 0),
    (Bug::WakeUpSwallowed, 0),
    (Bug::NestedRecreates, 0),
    (Bug::BareCounter, 0),
    (Bug::LossOnlyOnNo, 0),
    (Bug::LateAcquire, 0),
    (Bug::CleanUpOnce, 950),
    (Bug::ReleaseInsistsOnCount, 0),
    (Bug::NestedNotCounted, 2050),
    (Bug::OfferRenewed, 0),
    (Bug::WakeWithoutCheck, 0),
    (Bug::UnboundedSleep, 0),
    (Bug::NestedCleanUpReleasesAll, 0),
    (Bug::LateGrantCounts, 100),
    (Bug::RenewalShortens, 0),
    (Bug::HandOffStranded, 450),
    (Bug::HandOffKeepsToken, 0),
    (Bug::HandOffCreates, 0),
    (Bug::BatchSpoilt, 900),
    (Bug::EndlessChain, 0),
    (Bug::PassKeepsToken, 0),
    (Bug::PassRenews, 0),
    (Bug::RenewalOfAllReaders, 0),
    (Bug::DowngradeTellsNobody, 350),
    (Bug::LateReleaseAfterDowngrade, 0),
    (Bug::UpgradeThatWaits, 0),
    (Bug::UpgradeAmongReaders, 0),
    (Bug::TokenPerReader, 0),
    (Bug::ReadersForgotten, 0),
    (Bug::DeadNotSkipped, 650),
    (Bug::PlaceKept, 0),
    (Bug::QueueNotTold, 0),
    (Bug::QueueOvertaken, 0),
    (Bug::QueuedTwice, 0),
];

#[test]
fn each_bug_is_found() {
    let all = number("LEASEHOLD_BUGS");
    let only = std::env::var("LEASEHOLD_BUG").unwrap_or_default();
    let mut missed = Vec::new();
    for (bug, near) in BUGS {
        if !format!("{bug:?}").contains(&only) {
            continue;
        }
        let seeds = match all {
            Some(seeds) => 0..seeds,
            None => near..near + ENOUGH,
        };
        match first_found(bug, seeds) {
            Some((seed, checkers)) => println!("| {bug:?} | {checkers:?} | {seed} |"),
            None => missed.push(bug),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}

/// The mistake of that name.
pub fn named(name: &str) -> Bug {
    let named = BUGS.iter().find(|(bug, _)| format!("{bug:?}") == name);
    named.map_or_else(|| panic!("src/bug.rs has no `{name}`"), |(bug, _)| *bug)
}

/// The first of these seeds in which some judge objects, and who does.
fn first_found(
    bug: Bug,
    seeds: impl Iterator<Item = u64>,
) -> Option<(u64, BTreeSet<&'static str>)> {
    Simulation::seed_bug(Some(bug));
    let mut found = None;
    for seed in seeds {
        let plan = Plan::of(seed, &BTreeSet::new());
        let outcome = run(&plan);
        if !outcome.violations.is_empty() {
            let checkers = outcome.violations.iter().map(|found| found.checker);
            found = Some((seed, checkers.collect()));
            break;
        }
        // Built in anew: some bugs remember what they saw.
        Simulation::seed_bug(Some(bug));
    }
    Simulation::seed_bug(None);
    found
}

/// Seeds looked at in each run of the tests.
const ENOUGH: u64 = 200;
