//! Which thread goes on: how the schedules of a test are chosen.

use std::env::{VarError, var};

use shuttle::scheduler::{PctScheduler, ReplayScheduler, Schedule, Scheduler, Task, TaskId};
use shuttle::{Config, Runner};

/// How a scenario's schedules are chosen.
#[derive(Clone, Copy, Debug)]
pub(super) enum How {
    /// All there are.
    All,
    /// All that differ in so many places from the one in which a thread runs until it has to wait.
    Deviating(usize),
    /// So many, by chance, of those that a thread of lower priority disturbs in few places: with each
    /// fault that needs `depth` such places found with a known probability (Burckhardt et al., 2010).
    Chance { schedules: usize, depth: usize },
}

/// Runs `scenario` under all these schedules, and says how many there were.
///
/// With `LEASEHOLD_SCHEDULE=name:schedule` it is that one only, and other scenarios are left out.
pub(super) fn explore(name: &str, how: How, scenario: impl Fn() + Send + Sync + 'static) -> usize {
    let mut config = Config::new();
    config.stack_size = 256 * 1024;
    // A run that takes so long has threads that wake each other for ever.
    config.max_steps = shuttle::MaxSteps::FailAfter(20_000);
    match var("LEASEHOLD_SCHEDULE") {
        Ok(asked) => match asked.split_once(':') {
            Some((of, schedule)) if of == name => {
                let scheduler = ReplayScheduler::new_from_encoded(schedule);
                return Runner::new(scheduler, config).run(scenario);
            }
            _ => return 0,
        },
        Err(VarError::NotPresent) => {}
        Err(error) => panic!("LEASEHOLD_SCHEDULE: {error}"),
    }
    let naming = Naming(name);
    let schedules = match how {
        How::All => Runner::new(ClockLast(Search::new(usize::MAX)), config).run(scenario),
        How::Deviating(most) => Runner::new(ClockLast(Search::new(most)), config).run(scenario),
        How::Chance { schedules, depth } => {
            // One seed: a test that fails must fail again.
            let scheduler = PctScheduler::new_from_seed(SEED, depth, schedules);
            Runner::new(ClockLast(scheduler), config).run(scenario)
        }
    };
    drop(naming);
    println!("{name}: {schedules} schedules, {how:?}");
    schedules
}

const SEED: u64 = 0x1ea5_e401d;

/// Says which scenario it was that failed.
struct Naming<'a>(&'a str);

impl Drop for Naming<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let name = self.0;
            eprintln!(
                "to replay the schedule above: LEASEHOLD_SCHEDULE={name}:<schedule> \
                 cargo test --all-features --lib interleavings"
            );
        }
    }
}

/// Lets the clock's thread, the first that a scenario starts, go on only when no other can; and none
/// that waits for a lock, which shuttle would wake now and then without reason.
#[derive(Debug)]
struct ClockLast<S>(S);

impl<S: Scheduler> Scheduler for ClockLast<S> {
    fn new_execution(&mut self) -> Option<Schedule> {
        self.0.new_execution()
    }

    fn next_task(
        &mut self,
        runnable: &[&Task],
        current: Option<TaskId>,
        yielding: bool,
    ) -> Option<TaskId> {
        let clock = TaskId::from(1);
        let others: Vec<&Task> = runnable
            .iter()
            .copied()
            .filter(|task| task.id() != clock && !task.can_spuriously_wakeup())
            .collect();
        let clock: Vec<&Task> = runnable
            .iter()
            .copied()
            .filter(|task| task.id() == clock)
            .collect();
        let next = if others.is_empty() { &clock } else { &others };
        self.0.next_task(next, current, yielding)
    }

    fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }
}

/// Depth first through all schedules with at most `most` deviations. By itself a thread runs on until
/// it has to wait, and then the next one by number does.
#[derive(Debug)]
struct Search {
    most: usize,
    begun: bool,
    choices: Vec<Choice>,
    step: usize,
    deviations: usize,
}

#[derive(Debug)]
struct Choice {
    taken: usize,
    options: usize,
}

impl Search {
    fn new(most: usize) -> Self {
        Self {
            most,
            begun: false,
            choices: Vec::new(),
            step: 0,
            deviations: 0,
        }
    }
}

impl Scheduler for Search {
    fn new_execution(&mut self) -> Option<Schedule> {
        if std::mem::replace(&mut self.begun, true) {
            while self
                .choices
                .pop_if(|choice| choice.taken + 1 == choice.options)
                .is_some()
            {}
            self.choices.last_mut()?.taken += 1;
        }
        (self.step, self.deviations) = (0, 0);
        Some(Schedule::new(0))
    }

    fn next_task(
        &mut self,
        runnable: &[&Task],
        current: Option<TaskId>,
        yielding: bool,
    ) -> Option<TaskId> {
        let options = if self.deviations < self.most {
            runnable.len()
        } else {
            1
        };
        if self.step == self.choices.len() {
            self.choices.push(Choice { taken: 0, options });
        }
        let taken = self.choices[self.step].taken;
        assert_eq!(
            self.choices[self.step].options, options,
            "not the same as before"
        );
        self.step += 1;
        self.deviations += usize::from(taken > 0);
        // The default comes first, the others by number from there on.
        let current = current.unwrap_or(TaskId::from(0));
        let first = runnable
            .iter()
            .position(|task| task.id() > current || (task.id() == current && !yielding))
            .unwrap_or(0);
        Some(runnable[(first + taken) % runnable.len()].id())
    }

    fn next_u64(&mut self) -> u64 {
        0
    }
}
