//! Lua against the model: the same ops on a real server and on `memory::apply`, which must agree in
//! every answer and in everything they leave behind.
//!
//! Random sequences run with the time as an argument, and waiting is done by shortening what is
//! left of every key, so that minutes pass in microseconds. Calls are single ops and batches, some
//! with each op twice; calls of before run again, as a copy by the network (with the deadline they
//! were sent with, mostly long past) or as another attempt.
//!
//! Needs `redis-server` on the path, or another server named by `LEASEHOLD_REDIS_SERVER`.
//! `scripts/soak` runs this on every server that `scripts/servers` knows.

mod scripts;
mod server;
mod steps;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::memory::{self, State};
use super::{Answer, Op};
use crate::kind::Kind;
use server::{Listener, Redis, Server};
use steps::{Step, any_steps};

#[test]
fn lua_does_what_the_model_does() {
    let server = Server::start();
    let redis = Redis::with_time_as_argument(server.connect());
    let told = Listener::start(server.connect());
    let connections = RefCell::new((redis, told));
    let counts = RefCell::new(Counts::default());
    let mut runner = TestRunner::new(Config {
        failure_persistence: None,
        ..Config::with_cases(cases())
    });
    runner
        .run(&any_steps(), |steps| {
            let (redis, told) = &mut *connections.borrow_mut();
            redis.connection.ask(&["FLUSHALL"]).unwrap();
            let mut both = Both::new(redis, told);
            for step in &steps {
                both.run(step)?;
            }
            counts.borrow_mut().add(&both.counts);
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
    let (redis, _) = &mut *connections.borrow_mut();
    println!("{}: {}", redis.connection.version(), counts.borrow());
}

/// A copy that arrives in the same moment finds its work done. (`lua_does_what_the_model_does`
/// carries this over to Lua.)
#[test]
fn a_second_copy_of_any_op_changes_nothing() {
    let mut runner = TestRunner::new(Config {
        failure_persistence: None,
        ..Config::with_cases(cases())
    });
    runner
        .run(&any_steps(), |steps| {
            let mut state = State::default();
            let mut now_us = EPOCH_US;
            for step in steps {
                match step {
                    Step::Call { ops, ends_in_us } => {
                        let deadline_us = deadline(now_us, ends_in_us);
                        for op in &ops {
                            let (first, _) = memory::apply(&mut state, now_us, deadline_us, op);
                            let left = everything(&mut state, now_us);
                            let (second, wake) = memory::apply(&mut state, now_us, deadline_us, op);
                            prop_assert_eq!(&left, &everything(&mut state, now_us));
                            prop_assert_eq!(wake, None);
                            match first {
                                Answer::Released { .. } => {
                                    prop_assert!(matches!(second, Answer::Gone(_)));
                                }
                                Answer::Removed => prop_assert_eq!(second, Answer::Nothing),
                                first => prop_assert_eq!(first, second),
                            }
                        }
                    }
                    Step::Again { .. } => {}
                    Step::Wait { ms } => now_us += ms * 1000,
                    Step::Foreign { name, what } => what.put_in_model(&mut state, name, now_us),
                }
            }
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

/// The model and the server, side by side.
struct Both<'a> {
    redis: &'a mut Redis,
    told: &'a mut Listener,
    state: State,
    now_us: u64,
    /// The calls so far, with their deadlines.
    before: Vec<(Vec<Op>, u64)>,
    attempt: u64,
    counts: Counts,
}

impl<'a> Both<'a> {
    fn new(redis: &'a mut Redis, told: &'a mut Listener) -> Self {
        Self {
            redis,
            told,
            state: State::default(),
            now_us: EPOCH_US,
            before: Vec::new(),
            attempt: 0,
            counts: Counts {
                sequences: 1,
                ..Counts::default()
            },
        }
    }

    fn run(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match step {
            Step::Call { ops, ends_in_us } => {
                let deadline_us = deadline(self.now_us, *ends_in_us);
                self.before.push((ops.clone(), deadline_us));
                self.call(deadline_us, ops)?;
            }
            Step::Again { back, ends_in_us } => {
                let place = self.before.len().checked_sub(1 + back);
                if let Some((ops, sent_with)) = place.map(|place| self.before[place].clone()) {
                    let deadline_us = ends_in_us.map(|ends| deadline(self.now_us, ends));
                    self.counts.again += 1;
                    self.call(deadline_us.unwrap_or(sent_with), &ops)?;
                }
            }
            Step::Wait { ms } => self.wait(*ms),
            Step::Foreign { name, what } => {
                what.put_in_model(&mut self.state, *name, self.now_us);
                what.put_in_redis(&mut self.redis.connection, *name, self.now_us);
            }
        }
        let model = everything(&mut self.state, self.now_us);
        let lua = self.redis.everything();
        for (model, lua) in model.iter().zip(&lua) {
            prop_assert_eq!(&model.fields, &lua.fields);
            prop_assert_eq!(&model.counter, &lua.counter);
            prop_assert_eq!(&model.list, &lua.list);
            prop_assert_eq!(&model.deadlines, &lua.deadlines);
            prop_assert_eq!(&model.beats, &lua.beats);
            let ttls = [
                (model.ttl_ms, lua.ttl_ms),
                (model.counter_ttl_ms, lua.counter_ttl_ms),
                (model.beats_ttl_ms, lua.beats_ttl_ms),
            ];
            for (model, lua) in ttls {
                prop_assert!(is_near(model, lua), "model {:?}, lua {:?}", model, lua);
            }
            let whose = |all: &BTreeMap<_, _>| all.keys().cloned().collect::<Vec<(String, u32)>>();
            prop_assert_eq!(whose(&model.readers), whose(&lua.readers));
            for ((reader, model), lua) in model.readers.iter().zip(lua.readers.values()) {
                prop_assert!(
                    is_near(*model, *lua),
                    "model {:?}, lua {:?}: {:?}",
                    model,
                    lua,
                    reader
                );
            }
        }
        Ok(())
    }

    fn call(&mut self, deadline_us: u64, ops: &[Op]) -> Result<(), TestCaseError> {
        self.attempt += 1;
        let decoded = self
            .redis
            .call(self.attempt, deadline_us, Some(self.now_us), ops);
        prop_assert_eq!(decoded.attempt, self.attempt);
        prop_assert_eq!(decoded.server_now_us, self.now_us);
        let mut woken = Vec::new();
        for (op, lua) in ops.iter().zip(decoded.answers) {
            let (mut model, wake) = memory::apply(&mut self.state, self.now_us, deadline_us, op);
            if let Answer::Released { heard } = &mut model {
                // One connection of the test listens.
                *heard = wake.iter().count() as u64;
            }
            woken.extend(wake);
            self.counts.fair += u64::from(op.kind == Kind::Fair);
            if let Answer::Queued { first, .. } = &model {
                self.counts.queued += 1;
                self.counts.behind += u64::from(!first);
            }
            let ((model, model_left), (lua, lua_left)) = (without_left(model), without_left(lua));
            prop_assert_eq!(model, lua, "{:?}", op);
            prop_assert!(
                is_near(model_left, lua_left),
                "model {:?}, lua {:?}: {:?}",
                model_left,
                lua_left,
                op
            );
        }
        let told = self.told.since_then(&mut self.redis.connection);
        prop_assert_eq!(&woken, &told);
        let counts = &mut self.counts;
        counts.calls += 1;
        counts.batches += u64::from(ops.len() > 1);
        counts.ops += ops.len() as u64;
        counts.messages += told.len() as u64;
        if deadline_us < self.now_us {
            counts.late += ops.len() as u64;
        }
        Ok(())
    }

    /// Lets time pass, and a little more if that would end next to somebody's deadline.
    fn wait(&mut self, mut ms: u64) {
        let left: Vec<_> = everything(&mut self.state, self.now_us)
            .iter()
            .flat_map(|name| {
                let own = [name.ttl_ms, name.counter_ttl_ms, name.beats_ttl_ms];
                let readers = name.readers.values().copied();
                own.into_iter().chain(readers).collect::<Vec<_>>()
            })
            .flatten()
            .collect();
        while left
            .iter()
            .any(|left| left.abs_diff(ms) <= SAFE_DISTANCE_MS)
        {
            ms += SAFE_DISTANCE_MS;
        }
        self.now_us += ms * 1000;
        self.redis.shorten(ms);
    }
}

/// What was compared, for the record.
#[derive(Debug, Default)]
struct Counts {
    sequences: u64,
    calls: u64,
    batches: u64,
    again: u64,
    ops: u64,
    late: u64,
    messages: u64,
    fair: u64,
    queued: u64,
    behind: u64,
}

impl Counts {
    fn add(&mut self, more: &Self) {
        self.sequences += more.sequences;
        self.calls += more.calls;
        self.batches += more.batches;
        self.again += more.again;
        self.ops += more.ops;
        self.late += more.late;
        self.messages += more.messages;
        self.fair += more.fair;
        self.queued += more.queued;
        self.behind += more.behind;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            sequences,
            calls,
            batches,
            again,
            ops,
            late,
            messages,
            fair,
            queued,
            behind,
        } = self;
        write!(
            f,
            "{sequences} sequences, {calls} calls ({batches} of several ops, {again} run again), \
             {ops} ops ({late} late), {messages} messages; of a fair lock {fair} ops, {queued} queued, \
             {behind} behind others"
        )
    }
}

/// All there is of one name.
#[derive(Debug, PartialEq)]
struct Everything {
    /// `None`: no key; without fields: another type.
    fields: Option<BTreeMap<String, String>>,
    ttl_ms: Option<u64>,
    counter: Option<String>,
    counter_ttl_ms: Option<u64>,
    /// What is left of the leases of readers.
    readers: BTreeMap<(String, u32), Option<u64>>,
    /// Of its queue; `None`: another type.
    list: Option<Vec<String>>,
    deadlines: Option<BTreeMap<String, u64>>,
    beats: Option<BTreeMap<String, u64>>,
    beats_ttl_ms: Option<u64>,
}

fn everything(state: &mut State, now_us: u64) -> Vec<Everything> {
    let left = |expires_ms: Option<u64>| expires_ms.map(|at| at - now_us / 1000);
    (0..NAMES)
        .map(|name| {
            let name = name_of(name);
            let key = state.key(&name, now_us).cloned();
            let counter = state.counter(&name, now_us).cloned();
            let readers = state.readers(&name);
            let queue = state.take_queue(&name, now_us / 1000);
            state.put_queue(&name, queue.clone());
            Everything {
                beats_ttl_ms: left(queue.beats_expire_ms),
                list: queue
                    .list
                    .proper()
                    .map(|list| list.iter().cloned().collect()),
                deadlines: queue.deadlines.proper().cloned(),
                beats: queue.beats.proper().cloned(),
                ttl_ms: left(key.as_ref().and_then(|key| key.expires_ms)),
                fields: key.map(|key| match key.value {
                    memory::Value::Hash(fields) => fields,
                    memory::Value::Other => BTreeMap::new(),
                }),
                counter_ttl_ms: left(counter.as_ref().and_then(|counter| counter.expires_ms)),
                counter: counter.map(|counter| counter.text),
                readers: readers
                    .into_iter()
                    .map(|(reader, at)| (reader, left(at)))
                    .collect(),
            }
        })
        .collect()
}

/// The answer with nothing left, and what was left. A refusal is compared by its kind.
fn without_left(mut answer: Answer) -> (Answer, Option<u64>) {
    let left = match &mut answer {
        Answer::Granted { remaining_ms, .. }
        | Answer::Taken {
            remaining_ms: Some(remaining_ms),
        }
        | Answer::Held { remaining_ms }
        | Answer::StillHeld { remaining_ms }
        | Answer::Queued {
            remaining_ms: Some(remaining_ms),
            ..
        }
        | Answer::Renewed { remaining_ms } => Some(std::mem::take(remaining_ms)),
        Answer::Refused(refusal) => {
            refusal.message.clear();
            None
        }
        _ => None,
    };
    (answer, left)
}

/// The server's own clock runs on while a sequence is tried.
fn is_near(model: Option<u64>, lua: Option<u64>) -> bool {
    match (model, lua) {
        (Some(model), Some(lua)) => model.abs_diff(lua) < SAFE_DISTANCE_MS,
        (model, lua) => model == lua,
    }
}

fn name_of(name: usize) -> Arc<str> {
    Arc::from(format!("n{name}"))
}

fn deadline(now_us: u64, ends_in_us: i64) -> u64 {
    now_us.checked_add_signed(ends_in_us).unwrap()
}

/// How many sequences: as many again and again in the long form.
fn cases() -> u32 {
    if std::env::var("LEASEHOLD_LONG").is_ok_and(|value| value == "1") {
        20_000
    } else {
        1500
    }
}

const NAMES: usize = 3;
const EPOCH_US: u64 = 1_700_000_000_000_000;

/// Two clocks that differ by less than this agree; no wait ends this close to a deadline.
const SAFE_DISTANCE_MS: u64 = 1000;
