//! Does what a plan says, and has the checkers judge what happened.

use std::any::Any;
use std::collections::BTreeSet;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use leasehold::testing::{Ended, Faults, Note, Process, Record, Server, Simulation, What};
use leasehold::{Error, Lock, LockClient, LockContext, LockGuard, RwLock};

use crate::checkers::{Conditions, Violation, check};
use crate::plan::{
    End, Fault, Hold, Inside, NAMES, Plan, Polling, Side, Step, Way, Weather, name_of,
};

/// What became of a run.
pub struct Outcome {
    pub records: Vec<Record>,
    pub violations: Vec<Violation>,
}

/// Runs a plan.
pub fn run(plan: &Plan) -> Outcome {
    let mut world = World::of(plan);
    for (at, fault) in &plan.faults {
        let at = (*at).min(plan.heals_at);
        while let Some((up, keep)) = world.next_start(at) {
            world.run_until(up);
            world.server.start(keep);
        }
        world.run_until(at);
        world.suffer(at, fault);
    }
    world.run_until(plan.heals_at);
    world.heal(plan);
    let settled_from = world.settle(plan);
    let unfinished = world.unfinished(plan);
    let conditions = conditions(plan, world.frozen.clone(), plan.heals_at, settled_from);
    world.run_until(conditions.end);
    world.clients.clear();
    let records = world.simulation.history().take();
    let mut violations = check(&records, &conditions);
    let mut more = |checker, what: String| {
        violations.push(Violation {
            checker,
            at: settled_from,
            what,
            records: Vec::new(),
        });
    };
    if world.spinning {
        let what = "more polls than any sound run needs";
        more("spinning", what.to_owned());
    }
    if unfinished {
        let what = format!("tasks are not done {LONGEST:?} after the last fault");
        more("bounded waiting", what);
    }
    Outcome {
        records,
        violations,
    }
}

/// A run under way.
struct World {
    simulation: Simulation,
    server: Server,
    processes: Vec<Process>,
    clients: Vec<LockClient>,
    /// Tasks that are not done.
    busy: Arc<Mutex<BTreeSet<usize>>>,
    /// Which client stands still, from when to when.
    frozen: Vec<(usize, Duration, Duration)>,
    /// When the server starts again, and whether with its memory.
    starts: BTreeSet<(Duration, bool)>,
    spinning: bool,
}

impl World {
    /// Clients and tasks of a plan, at its beginning.
    fn of(plan: &Plan) -> Self {
        let simulation = Simulation::new(plan.seed, plan.server_ppm);
        let server = simulation.server().clone();
        server.set_faults(network(plan, false));
        simulation.put_off(plan.put_off.0, plan.put_off.1);
        let mut world = Self {
            server,
            processes: Vec::new(),
            clients: Vec::new(),
            busy: Arc::new(Mutex::new((0..plan.tasks.len()).collect())),
            frozen: Vec::new(),
            starts: BTreeSet::new(),
            spinning: false,
            simulation,
        };
        for client in &plan.clients {
            let process = world.simulation.process(client.ahead, client.ppm);
            let settings = LockClient::builder().lease(client.lease);
            let client = process.client(settings);
            world.clients.push(client.expect("sound settings"));
            world.processes.push(process);
        }
        for (index, task) in plan.tasks.iter().enumerate() {
            let process = &world.processes[task.client];
            let worker = Worker {
                index,
                process: process.clone(),
                client: world.clients[task.client].clone(),
                two_sided: plan.two_sided.clone(),
                fair: plan.fair.clone(),
            };
            let (task, busy) = (task.clone(), Arc::clone(&world.busy));
            let starts = process.sleep(task.starts);
            process.spawn(async move {
                starts.await;
                worker.work(&task.steps).await;
                drop(worker);
                busy.lock().unwrap().remove(&index);
            });
        }
        world
    }

    fn run_until(&mut self, at: Duration) {
        self.spinning |= self.simulation.run_until(at) == Ended::Spinning;
    }

    /// The server's next start, if it is due by then.
    fn next_start(&mut self, by: Duration) -> Option<(Duration, bool)> {
        let first = self.starts.first().copied();
        let due = first.filter(|(at, _)| *at <= by)?;
        self.starts.remove(&due);
        Some(due)
    }

    fn suffer(&mut self, at: Duration, fault: &Fault) {
        let server = &self.server;
        match fault {
            Fault::Pause(length) => server.pause(*length),
            Fault::Stop { down, keep } => {
                server.stop();
                self.starts.insert((at + *down, *keep));
            }
            Fault::Copy => server.copy(),
            Fault::FailOver => server.fail_over(),
            Fault::Disconnect => server.disconnect_all(),
            Fault::BlackHole => server.black_hole(),
            Fault::Delete(name) => server.delete(&name_of(*name)),
            Fault::DeleteCounter(name) => server.delete_counter(&name_of(*name)),
            Fault::Persist(name) => server.persist(&name_of(*name)),
            Fault::Overwrite(name, lease) => server.overwrite(&name_of(*name), *lease),
            Fault::Spoil(name, length) => server.spoil(&name_of(*name), *length),
            Fault::StepClock(by) => server.step_clock(*by),
            Fault::Freeze(client, length) => self.freeze(*client, at, at + *length),
            Fault::Kill(client) => self.freeze(*client, at, FOR_EVER),
            Fault::Close(client, deadline) => {
                let (process, deadline) = (&self.processes[*client], *deadline);
                let closing = self.clients[*client].clone();
                process.note(Note::Text(format!(
                    "*** client {client} closes within {deadline:?}"
                )));
                process.spawn(async move {
                    let _ = closing.close(deadline).await;
                });
            }
        }
    }

    fn freeze(&mut self, client: usize, from: Duration, to: Duration) {
        let process = &self.processes[client];
        if process.frozen_until() < to {
            self.frozen.push((client, from, to));
        }
        process.freeze(to.saturating_sub(from));
    }

    /// Ends all faults.
    fn heal(&mut self, plan: &Plan) {
        if !self.starts.is_empty() {
            self.server.start(self.starts.iter().all(|(_, keep)| *keep));
        }
        self.server.set_faults(network(plan, true));
        self.server.pause(Duration::ZERO);
        self.simulation.put_off(0, Duration::ZERO);
        self.say("*** all faults are over");
    }

    /// Lets everybody come to an end: what tasks do is bounded, and frozen ones wake up. When they had.
    fn settle(&mut self, plan: &Plan) -> Duration {
        // A renewal gives a lock its expiry back; who is not renewed is not there any more.
        self.run_until(plan.heals_at + LONGEST_LEASE);
        for name in 0..NAMES {
            self.server.delete_if_persistent(&name_of(name));
        }
        let last = plan.heals_at + LONGEST;
        while self.unfinished(plan) && self.simulation.now() < last {
            self.run_until(self.simulation.now() + STEP);
        }
        self.say("*** everybody has done his work");
        self.simulation.now()
    }

    /// Whether somebody who lives is not done.
    fn unfinished(&self, plan: &Plan) -> bool {
        let killed = |client: usize| {
            let for_ever = |(frozen, _, to): &(usize, Duration, Duration)| {
                *frozen == client && *to == FOR_EVER
            };
            self.frozen.iter().any(for_ever)
        };
        let busy = self.busy.lock().unwrap();
        busy.iter().any(|task| !killed(plan.tasks[*task].client))
    }

    fn say(&self, text: &str) {
        let note = What::Note(Note::Text(text.to_owned()));
        self.simulation.history().push(self.simulation.now(), note);
    }
}

fn network(plan: &Plan, healed: bool) -> Faults {
    let network = &plan.network;
    let mut faults = Faults::none();
    faults.delay = network.delay.0..=network.delay.1;
    faults.no_messages = network.no_messages;
    if !healed {
        faults.stray = network.stray;
        faults.lost_requests = network.lost_requests;
        faults.lost_replies = network.lost_replies;
        faults.doubled = network.doubled;
        faults.resets = network.resets;
        faults.lost_messages = network.lost_messages;
    }
    faults
}

fn conditions(
    plan: &Plan,
    frozen: Vec<(usize, Duration, Duration)>,
    healed_from: Duration,
    settled_from: Duration,
) -> Conditions {
    let any = |of: fn(&Fault) -> bool| plan.faults.iter().any(|(_, fault)| of(fault));
    let forced = plan
        .tasks
        .iter()
        .flat_map(|task| &task.steps)
        .any(|step| matches!(step, Step::Force(_)));
    let memory_lost =
        any(|fault| matches!(fault, Fault::Stop { keep: false, .. } | Fault::FailOver));
    let rates = plan.clients.iter().map(|client| client.ppm);
    let rates: Vec<_> = rates.chain([plan.server_ppm, 0]).collect();
    let apart = rates.iter().max().unwrap() - rates.iter().min().unwrap();
    let stepped_back: i64 = plan
        .faults
        .iter()
        .map(|(_, fault)| match fault {
            Fault::StepClock(by) => (-by).max(0),
            _ => 0,
        })
        .sum();
    let stepped_back = Duration::from_micros(u64::try_from(stepped_back).unwrap());
    let holds = plan.tasks.iter().flat_map(|task| &task.steps);
    let fixed: BTreeSet<_> = holds
        .filter_map(|step| match step {
            Step::Hold(hold) => Some(hold.name),
            _ => None,
        })
        .filter(|name| *name == 2)
        .map(name_of)
        .collect();
    let longest_lease = plan
        .clients
        .iter()
        .map(|client| client.lease)
        .max()
        .unwrap_or_default()
        .max(LONGEST_FIXED);
    let bound = longest_lease + Duration::from_secs(1) + stepped_back + SLACK;
    let mut conditions = Conditions::quiet(settled_from + bound + Duration::from_secs(3));
    conditions.memory_kept = !memory_lost
        && !forced
        && !any(|fault| {
            matches!(
                fault,
                Fault::Delete(_) | Fault::Overwrite(..) | Fault::Spoil(..)
            )
        });
    conditions.counters_kept =
        !memory_lost && !any(|fault| matches!(fault, Fault::DeleteCounter(_)));
    conditions.expiry_kept = !any(|fault| matches!(fault, Fault::Persist(_)));
    conditions.clocks_sane =
        apart <= 5_000 && !any(|fault| matches!(fault, Fault::StepClock(by) if *by > 0));
    conditions.clock_never_back = stepped_back.is_zero();
    conditions.stepped_back = stepped_back;
    // On a slow network the shortest leases are too short for an answer to come in time.
    let slow = plan.network.delay.1 > Duration::from_millis(5);
    conditions.quiet = plan.weather == Weather::Quiet && !slow;
    conditions.polled = conditions.quiet;
    conditions.stall = LONGEST_STALL;
    let way = plan.network.delay.1;
    conditions.wake = if plan.network.no_messages {
        Duration::from_millis(500)
    } else {
        // Others go first after a chain, and the answer to its release is waited for.
        way * 6 + SLACK * 2
    };
    conditions.leases_alike = true;
    conditions.fixed_leases = fixed;
    let spoilt = plan.faults.iter().filter_map(|(_, fault)| match fault {
        Fault::Spoil(name, _) => Some(name_of(*name)),
        _ => None,
    });
    conditions.spoilt = spoilt.collect();
    conditions.two_sided = plan.two_sided.iter().map(|name| name_of(*name)).collect();
    conditions.fair = plan.fair.iter().copied().map(name_of).collect();
    conditions.queues_kept = !memory_lost;
    conditions.slack = plan.put_off.1 * 12 + SLACK;
    conditions.frozen = frozen;
    conditions.healed_from = healed_from;
    conditions.settled_from = settled_from;
    conditions.bound = bound;
    conditions
}

const FOR_EVER: Duration = Duration::from_secs(1_000_000);
const LONGEST: Duration = Duration::from_mins(2);
const LONGEST_STALL: Duration = Duration::from_secs(4);
const LONGEST_LEASE: Duration = Duration::from_secs(5);
const LONGEST_FIXED: Duration = Duration::from_secs(2);
const STEP: Duration = Duration::from_millis(500);
const SLACK: Duration = Duration::from_millis(5);

/// How long reading goes on after writing.
const OUTLIVES: Duration = Duration::from_millis(30);

/// A guard that outlives the hold it was taken in, and how it ends.
type Kept<'a> = (LockGuard, &'a Hold);

/// Who does the steps of a task.
struct Worker {
    index: usize,
    process: Process,
    client: LockClient,
    two_sided: BTreeSet<usize>,
    fair: BTreeSet<usize>,
}

impl Worker {
    async fn work(&self, steps: &[Step]) {
        for step in steps {
            match step {
                Step::Pause(length) => self.process.sleep(*length).await,
                Step::Force(name) => {
                    let forced = if self.two_sided.contains(name) {
                        self.client.rw_lock(name_of(*name)).force_release().await
                    } else {
                        self.lock(&mut self.client.context(), *name)
                            .force_release()
                            .await
                    };
                    self.say(format!("forces {}: {forced:?}", name_of(*name)));
                }
                Step::Hold(hold) => {
                    // A panic ends the hold, not the run.
                    let mut context = self.client.context();
                    let done = caught(async { drop(self.hold(&mut context, hold).await) }).await;
                    if let Err(panic) = done
                        && !panic.is::<Planned>()
                    {
                        resume_unwind(panic);
                    }
                }
            }
        }
    }

    fn lock(&self, context: &mut LockContext, name: usize) -> Lock {
        if self.fair.contains(&name) {
            context.fair_lock(name_of(name))
        } else {
            context.lock(name_of(name))
        }
    }

    /// Takes a lock, does what is to be done, and lets go of it; then of what was taken inside to outlive
    /// it. Or keeps it, if that is to outlive another.
    fn hold<'a, 'h: 'a>(
        &'a self,
        context: &'a mut LockContext,
        hold: &'h Hold,
    ) -> Pin<Box<dyn Future<Output = Vec<Kept<'h>>> + Send + 'a>> {
        Box::pin(async move {
            let name = name_of(hold.name);
            self.note(Note::Wants {
                task: self.index,
                name: Arc::clone(&name),
            });
            let mut lock = match hold.side {
                Side::Plain => self.lock(context, hold.name),
                Side::Read => context.rw_lock(Arc::clone(&name)).read(),
                Side::Write => context.rw_lock(Arc::clone(&name)).write(),
            };
            if let Some(lease) = hold.lease {
                lock = lock.lease(lease);
            }
            if let Some(longest) = hold.longest {
                lock = lock.max_hold(longest);
            }
            let taken = self.polled(hold.taking, take(&mut lock, hold.way)).await;
            let guard = match taken {
                Some(Ok(Some(guard))) => guard,
                other => {
                    match other {
                        Some(Ok(_)) => self.done("finds it taken"),
                        Some(Err(error)) => self.done(&format!("{error}")),
                        None => self.done("leaves"),
                    }
                    return Vec::new();
                }
            };
            self.done("has it");
            let mut kept = Vec::new();
            for inside in &hold.inside {
                kept.extend(self.inside(context, &guard, &name, inside).await);
            }
            if hold.outlives {
                kept.push((guard, hold));
                return kept;
            }
            self.end(guard, hold).await;
            for (guard, hold) in kept {
                for inside in [Inside::Work(OUTLIVES), Inside::Write] {
                    self.inside(context, &guard, &name, &inside).await;
                }
                self.end(guard, hold).await;
            }
            Vec::new()
        })
    }

    async fn end(&self, guard: LockGuard, hold: &Hold) {
        match hold.end {
            End::Release(polling) => {
                let outcome = self.polled(polling, guard.release()).await;
                self.say(format!("released: {outcome:?}"));
            }
            End::Drop => drop(guard),
            End::Panic => {
                self.say("panics".to_owned());
                resume_unwind(Box::new(Planned));
            }
            End::Upgrade(polling, length) => {
                let name = name_of(hold.name);
                let guard = match self.polled(polling, RwLock::try_upgrade(guard)).await {
                    Some(Ok(guard)) => guard,
                    Some(Err((guard, error))) => {
                        self.say(format!("reads on: {error}"));
                        guard
                    }
                    None => return self.done("leaves"),
                };
                let _: Result<(), Error> = guard.run(self.process.sleep(length)).await;
                self.write(&guard, &name);
                let outcome = guard.release().await;
                self.say(format!("released: {outcome:?}"));
            }
        }
    }

    async fn inside<'h>(
        &self,
        context: &mut LockContext,
        guard: &LockGuard,
        name: &Arc<str>,
        inside: &'h Inside,
    ) -> Vec<Kept<'h>> {
        match inside {
            Inside::Work(length) => {
                let _: Result<(), Error> = guard.run(self.process.sleep(*length)).await;
            }
            Inside::Nest(hold) => return self.hold(context, hold).await,
            Inside::Confirm => {
                let confirmed = guard.confirm().await;
                self.say(format!("confirms: {confirmed:?}"));
            }
            Inside::Extend(length) => {
                let extended = guard.extend(*length).await;
                self.say(format!("extends: {extended:?}"));
            }
            Inside::Write => self.write(guard, name),
        }
        Vec::new()
    }

    fn write(&self, guard: &LockGuard, name: &Arc<str>) {
        if let Ok(token) = guard.fencing_token() {
            self.note(Note::Wrote {
                name: Arc::clone(name),
                token: token.value(),
            });
        }
    }

    /// Polls a future as planned; `None` if it was dropped.
    async fn polled<F: Future>(&self, polling: Polling, future: F) -> Option<F::Output> {
        let (polls, stall) = match polling {
            Polling::ToTheEnd => return Some(future.await),
            Polling::Dropped(polls) => (polls, None),
            Polling::Stalled(polls, length) | Polling::Abandoned(polls, length) => {
                (polls, Some(length))
            }
        };
        let mut future = pin!(future);
        let mut left = polls;
        let early = poll_fn(|cx| {
            if left == 0 {
                return Poll::Ready(None);
            }
            left -= 1;
            match future.as_mut().poll(cx) {
                Poll::Ready(output) => Poll::Ready(Some(output)),
                Poll::Pending if left == 0 => Poll::Ready(None),
                Poll::Pending => Poll::Pending,
            }
        })
        .await;
        match (early, stall) {
            (Some(output), _) => Some(output),
            (None, None) => None,
            (None, Some(length)) => {
                self.process.sleep(length).await;
                if matches!(polling, Polling::Abandoned(..)) {
                    return None;
                }
                Some(future.await)
            }
        }
    }

    fn done(&self, told: &str) {
        self.note(Note::Done {
            task: self.index,
            told: told.to_owned(),
        });
    }

    fn say(&self, what: String) {
        self.note(Note::Done {
            task: self.index,
            told: what,
        });
    }

    fn note(&self, note: Note) {
        self.process.note(note);
    }
}

async fn take(lock: &mut Lock, way: Way) -> Result<Option<LockGuard>, Error> {
    match way {
        Way::Acquire => lock.acquire().await.map(Some),
        Way::Timeout(patience) => lock.acquire_timeout(patience).await.map(Some),
        Way::Try => lock.try_acquire().await,
    }
}

/// A panic that a plan wanted.
struct Planned;

/// Runs `work`; its panic, if it ended in one.
async fn caught(work: impl Future<Output = ()>) -> Result<(), Box<dyn Any + Send>> {
    let mut work = Box::pin(work);
    poll_fn(
        move |cx| match catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(cx))) {
            Ok(Poll::Ready(())) => Poll::Ready(Ok(())),
            Ok(Poll::Pending) => Poll::Pending,
            Err(panic) => Poll::Ready(Err(panic)),
        },
    )
    .await
}
