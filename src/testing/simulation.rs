//! Many clients under one seed.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::executor::Executor;
use super::history::{History, Note, What};
use super::server::Server;
use crate::LockClient;
use crate::bug::{self, Bug};
use crate::client::LockClientBuilder;
use crate::env::{BoxFuture, Env, SharedEnv};
use crate::error::Error;

pub use super::executor::Ended;

/// A world of its own: time, chance, processes and a server, in one thread.
///
/// Nothing in it depends on anything but the seed and on what it is told to do, in that order: the
/// same calls give the same history. Ends when dropped.
pub struct Simulation {
    executor: Arc<Executor>,
    start: Instant,
    server: Server,
    history: History,
    processes: usize,
}

/// A process of a simulation: its clock, its tasks, one client.
#[derive(Clone)]
pub struct Process {
    index: usize,
    ppm: i64,
    env: Arc<ProcessEnv>,
    server: Server,
}

impl Simulation {
    /// A world of `seed`, with a server whose clock goes `ppm` millionths faster than true time.
    pub fn new(seed: u64, ppm: i64) -> Self {
        let executor = Executor::new(seed);
        let start = start();
        let history = History::default();
        let env = Arc::new(ProcessEnv {
            executor: Arc::clone(&executor),
            process: 0,
            start,
            ahead: Duration::ZERO,
            ppm: 0,
        });
        let server = Server::with(env, executor.bits(), ppm, Some(history.clone()));
        Self {
            executor,
            start,
            server,
            history,
            processes: 1,
        }
    }

    /// Builds `bug` into everything that this thread simulates from now on.
    pub fn seed_bug(bug: Option<Bug>) {
        bug::seed(bug);
    }

    /// The server.
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// What happened so far.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// Another process, whose clock is `ahead` of true time and goes `ppm` millionths faster.
    pub fn process(&mut self, ahead: Duration, ppm: i64) -> Process {
        let index = self.processes;
        self.processes += 1;
        Process {
            index,
            ppm,
            env: Arc::new(ProcessEnv {
                executor: Arc::clone(&self.executor),
                process: index,
                start: self.start,
                ahead,
                ppm,
            }),
            server: self.server.clone(),
        }
    }

    /// True time since the start.
    pub fn now(&self) -> Duration {
        self.executor.now()
    }

    /// Puts off tasks that could run, so often in a thousand, by so much at most.
    pub fn put_off(&self, in_a_thousand: u32, at_most: Duration) {
        self.executor.put_off(in_a_thousand, at_most);
    }

    /// Runs `work` beside everything else, in true time.
    pub fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.executor.spawn(0, Box::pin(work));
    }

    /// Completes after so much true time.
    pub fn sleep(&self, length: Duration) -> impl Future<Output = ()> + Send + use<> {
        self.executor.sleep_until(self.executor.now() + length)
    }

    /// Completes at this true time.
    pub fn sleep_until(&self, at: Duration) -> impl Future<Output = ()> + Send + use<> {
        self.executor.sleep_until(at)
    }

    /// Runs everything until the true time is `end`.
    pub fn run_until(&self, end: Duration) -> Ended {
        self.executor.run_until(end, MOST_POLLS)
    }
}

impl Drop for Simulation {
    fn drop(&mut self) {
        self.executor.end();
    }
}

impl fmt::Debug for Simulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Simulation").finish_non_exhaustive()
    }
}

impl Process {
    /// Its place among the processes; the server is 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// A client in this process, on the simulation's server.
    ///
    /// # Errors
    ///
    /// As [`LockClientBuilder::build`].
    pub fn client(&self, settings: LockClientBuilder) -> Result<LockClient, Error> {
        let env = Arc::clone(&self.env) as SharedEnv;
        // Every other client hands on by the server alone: nobody holds a lock for microseconds here.
        let rush = Duration::from_secs(u64::from(self.index.is_multiple_of(2)));
        settings.simulate(&self.server, env, self.ppm, rush)
    }

    /// Runs `work` in this process.
    pub fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.env.spawn(Box::pin(work));
    }

    /// Completes after so much of this process's time.
    pub fn sleep(&self, length: Duration) -> impl Future<Output = ()> + Send + use<> {
        self.env.sleep_until(self.env.now() + length)
    }

    /// Adds to the history what a workload saw.
    pub fn note(&self, note: Note) {
        self.server.inner.note(What::Note(note));
    }

    /// Runs nothing of this process for so long: as if it was stopped, or killed if that is for ever.
    pub fn freeze(&self, length: Duration) {
        self.server.inner.say(format!(
            "*** process {} stands still for {length:?}",
            self.index
        ));
        self.env.executor.freeze(self.index, length);
    }

    /// True time until which it stands still; in the past if it runs.
    pub fn frozen_until(&self) -> Duration {
        self.env.executor.frozen_until(self.index)
    }
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Process")
            .field("index", &self.index)
            .finish_non_exhaustive()
    }
}

/// Time, chance and tasks of one process.
#[derive(Debug)]
struct ProcessEnv {
    executor: Arc<Executor>,
    process: usize,
    /// What stands for the start of true time.
    start: Instant,
    ahead: Duration,
    ppm: i64,
}

impl Env for ProcessEnv {
    fn now(&self) -> Instant {
        let truly = self.executor.now();
        self.start + self.ahead + scaled(truly, 1_000_000 + self.ppm, 1_000_000)
    }

    fn sleep_until(&self, deadline: Instant) -> BoxFuture<()> {
        let shown = deadline
            .saturating_duration_since(self.start)
            .saturating_sub(self.ahead);
        // Not before the clock shows it: a nanosecond more for what the division cut off.
        let truly = scaled(shown, 1_000_000, 1_000_000 + self.ppm) + Duration::from_nanos(1);
        Box::pin(self.executor.sleep_until(truly))
    }

    fn random(&self) -> u64 {
        self.executor.bits()
    }

    fn spawn(&self, task: BoxFuture<()>) {
        self.executor.spawn(self.process, task);
    }

    fn is_here(&self) -> bool {
        true
    }
}

fn scaled(length: Duration, times: i64, by: i64) -> Duration {
    let nanos = i128::try_from(length.as_nanos()).unwrap_or(i128::MAX / 2_000_000);
    let scaled = nanos * i128::from(times) / i128::from(by);
    Duration::from_nanos(u64::try_from(scaled).unwrap_or(u64::MAX / 4))
}

#[expect(clippy::disallowed_methods, reason = "only differences to it count")]
fn start() -> Instant {
    Instant::now()
}

/// No sound run needs as many.
const MOST_POLLS: u64 = 3_000_000;
