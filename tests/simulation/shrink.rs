//! Cuts a plan down while it still breaks the same promise.

use std::time::{Duration, Instant};

use crate::plan::{Hold, Inside, Plan, Step};
use crate::run::run;

/// The smallest plan found in that time that the same checker objects to.
pub fn shrink(plan: &Plan, checker: &str, patience: Duration) -> Plan {
    let end = Instant::now() + patience;
    let mut best = plan.clone();
    loop {
        let mut smaller = false;
        for candidate in candidates(&best) {
            if Instant::now() >= end {
                return best;
            }
            if breaks(&candidate, checker) {
                best = candidate;
                smaller = true;
                break;
            }
        }
        if !smaller {
            return best;
        }
    }
}

fn breaks(plan: &Plan, checker: &str) -> bool {
    run(plan)
        .violations
        .iter()
        .any(|violation| violation.checker == checker)
}

/// Plans with one thing less, the biggest first.
fn candidates(plan: &Plan) -> Vec<Plan> {
    let mut all = Vec::new();
    let mut with = |change: &dyn Fn(&mut Plan)| {
        let mut less = plan.clone();
        change(&mut less);
        all.push(less);
    };
    for task in (0..plan.tasks.len()).rev() {
        with(&|plan| plan.tasks.without(task));
    }
    for fault in (0..plan.faults.len()).rev() {
        with(&|plan| plan.faults.without(fault));
    }
    for (task, steps) in plan.tasks.iter().enumerate() {
        for step in (0..steps.steps.len()).rev() {
            with(&|plan| plan.tasks[task].steps.without(step));
        }
    }
    let network = &plan.network;
    if network.stray.0 > 0 {
        with(&|plan| plan.network.stray.0 = 0);
    }
    if network.lost_requests > 0 {
        with(&|plan| plan.network.lost_requests = 0);
    }
    if network.lost_replies > 0 {
        with(&|plan| plan.network.lost_replies = 0);
    }
    if network.doubled > 0 {
        with(&|plan| plan.network.doubled = 0);
    }
    if network.resets > 0 {
        with(&|plan| plan.network.resets = 0);
    }
    if network.lost_messages > 0 {
        with(&|plan| plan.network.lost_messages = 0);
    }
    if plan.put_off.0 > 0 {
        with(&|plan| plan.put_off.0 = 0);
    }
    for (task, steps) in plan.tasks.iter().enumerate() {
        for (step, what) in steps.steps.iter().enumerate() {
            let Step::Hold(hold) = what else { continue };
            for less in shorter(hold) {
                with(&move |plan| plan.tasks[task].steps[step] = Step::Hold(less.clone()));
            }
        }
    }
    all
}

/// Takes one thing out.
trait Without {
    fn without(&mut self, index: usize);
}

impl<T> Without for Vec<T> {
    fn without(&mut self, index: usize) {
        let _taken = self.remove(index);
    }
}

/// Holds with one thing less inside.
fn shorter(hold: &Hold) -> Vec<Hold> {
    let mut all = Vec::new();
    for place in (0..hold.inside.len()).rev() {
        let mut less = hold.clone();
        let removed = less.inside.remove(place);
        all.push(less);
        if let Inside::Nest(inner) = removed {
            for inner in shorter(&inner) {
                let mut less = hold.clone();
                less.inside[place] = Inside::Nest(Box::new(inner));
                all.push(less);
            }
        }
    }
    all
}
