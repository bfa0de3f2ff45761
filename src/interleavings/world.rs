//! What surrounds the code under test: a clock that is set by hand, a server that is the model in Rust,
//! and what is true at the end.

use std::collections::BTreeMap;
use std::fmt;
use std::future::{pending, ready};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use parking_lot::Mutex as Plain;
use shuttle::future::block_on;
use shuttle::thread::{self, JoinHandle};
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;
use uuid::Uuid;

use super::judge::Judge;
use crate::LockClient;
use crate::config::Config;
use crate::engine::Engine;
use crate::env::{BoxFuture, Env, SharedEnv, later, until};
use crate::kind::Kind;
use crate::store::clock::micros;
use crate::store::memory::{EPOCH_US, State, apply};
use crate::store::topic::{Listening, Topics};
use crate::store::{
    Belief, Call, Cause, Channel, Health, NoReply, Reply, Run, Snapshot, Store, Subscription, Verb,
};
use crate::sync::{Mutex, Notify, point};

/// Who runs what the client spawns, and whether time passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Time {
    /// Never by itself: who waits for it waits for ever, and is a deadlock.
    Still,
    /// When all wait for it.
    Passing,
    /// As [`World::settle`] says, which runs all tasks in the thread that calls it.
    ByHand,
}

/// One run of a scenario.
pub(super) struct World {
    pub(super) clock: Clock,
    pub(super) server: Arc<Server>,
    clients: Plain<Vec<LockClient>>,
    engines: Vec<Weak<Engine>>,
}

impl World {
    /// So many clients of one server.
    pub(super) fn new(time: Time, clients: usize) -> Arc<Self> {
        let clock = Clock::new(time);
        let passing = clock.clone();
        // The first thread: `ClockLast` knows it by that.
        let passes = thread::spawn(move || passing.pass());
        let server = Arc::new(Server::new(&clock, passes));
        let mut engines = Vec::new();
        let mut handles = Vec::new();
        for number in 0..clients {
            let id = Uuid::from_u128(number as u128 + 1);
            let link = Link::new(&server);
            let env: SharedEnv = Arc::new(clock.clone());
            let client = LockClient::start(env, Arc::new(link), Config::default(), id);
            engines.push(Arc::downgrade(client.engine()));
            handles.push(client);
        }
        Arc::new(Self {
            clock,
            server,
            clients: Plain::new(handles),
            engines,
        })
    }

    pub(super) fn client(&self, number: usize) -> LockClient {
        self.clients.lock()[number].clone()
    }

    /// Runs all tasks until they wait, in this thread.
    pub(super) fn settle(&self) {
        self.clock.settle();
    }

    /// Everything ends, and nothing may be left.
    pub(super) fn end(self: Arc<Self>) {
        self.clients.lock().clear();
        if self.clock.shared.time == Time::ByHand {
            loop {
                self.settle();
                if self.clock.tasks() == 0 {
                    break;
                }
                assert!(self.clock.advance(), "a task waits for nothing");
            }
        } else {
            block_on(self.clock.until_no_tasks());
        }
        self.clock.end();
        let passes = self.server.passes.lock().take();
        passes.expect("ends once").join().expect("did not panic");
        for engine in &self.engines {
            assert!(engine.upgrade().is_none(), "a client outlives its tasks");
        }
        assert!(!self.server.holds_it(), "held at the end");
        let queue = self.server.state.lock().queue(&name());
        assert!(queue.is_empty(), "in the queue at the end");
        self.server.judge.lock().at_the_end();
    }

    /// What is checked of a client while it still lives, when nobody wants anything of it.
    pub(super) fn check_idle(&self) {
        for engine in self.engines.iter().filter_map(Weak::upgrade) {
            assert!(engine.queues.is_empty(), "somebody stands in line");
            assert!(!engine.watchdog.keeps_any(), "an appointment is kept");
            assert!(engine.is_idle(), "something is granted or under way");
        }
    }
}

/// The name of the one lock.
pub(super) fn name() -> Arc<str> {
    Arc::from("job")
}

/// Time and tasks.
#[derive(Clone)]
pub(super) struct Clock {
    shared: Arc<Shared>,
}

struct Shared {
    time: Time,
    began: Instant,
    inner: Plain<Inner>,
    ended: Notify,
}

struct Inner {
    now: Instant,
    timers: BTreeMap<(Instant, u64), Waker>,
    numbers: u64,
    tasks: usize,
    /// Those that `settle` runs.
    kept: Vec<BoxFuture<()>>,
    over: bool,
}

impl Clock {
    fn new(time: Time) -> Self {
        #[expect(
            clippy::disallowed_methods,
            reason = "any moment does: it is the first"
        )]
        let now = Instant::now();
        Self {
            shared: Arc::new(Shared {
                time,
                began: now,
                inner: Plain::new(Inner {
                    now,
                    timers: BTreeMap::new(),
                    numbers: 0,
                    tasks: 0,
                    kept: Vec::new(),
                    over: false,
                }),
                ended: Notify::new(),
            }),
        }
    }

    /// Moves time at some point of the schedule.
    pub(super) fn jump(&self, by: Duration) {
        point();
        let now = self.now() + by;
        self.set(now);
    }

    fn set(&self, now: Instant) {
        let due = {
            let mut inner = self.shared.inner.lock();
            inner.now = inner.now.max(now);
            let later = (inner.now, u64::MAX);
            let later = inner.timers.split_off(&later);
            std::mem::replace(&mut inner.timers, later)
        };
        for waker in due.into_values() {
            waker.wake();
        }
    }

    /// Moves time to the next moment that somebody waits for.
    fn advance(&self) -> bool {
        let next = self
            .shared
            .inner
            .lock()
            .timers
            .first_key_value()
            .map(|((at, _), _)| *at);
        next.map(|at| self.set(at)).is_some()
    }

    /// The clock's thread. It ends, and leaves a deadlock to be noticed, if nobody waits for time, or
    /// time is of no use.
    fn pass(&self) {
        let enough = self.now() + ENOUGH;
        while !self.shared.inner.lock().over {
            if self.shared.time != Time::Passing || self.now() > enough || !self.advance() {
                return;
            }
            thread::yield_now();
        }
    }

    fn end(&self) {
        self.shared.inner.lock().over = true;
    }

    fn tasks(&self) -> usize {
        self.shared.inner.lock().tasks
    }

    async fn until_no_tasks(&self) {
        loop {
            let ended = self.shared.ended.notified();
            if self.tasks() == 0 {
                return;
            }
            ended.await;
        }
    }

    fn settle(&self) {
        let woken = Arc::new(Woken(AtomicBool::new(true)));
        let waker = Waker::from(Arc::clone(&woken));
        while woken.0.swap(false, Ordering::SeqCst) {
            let tasks = std::mem::take(&mut self.shared.inner.lock().kept);
            for mut task in tasks {
                if task
                    .as_mut()
                    .poll(&mut Context::from_waker(&waker))
                    .is_pending()
                {
                    self.shared.inner.lock().kept.push(task);
                } else {
                    woken.0.store(true, Ordering::SeqCst);
                }
            }
        }
    }

    fn number(&self) -> u64 {
        let mut inner = self.shared.inner.lock();
        inner.numbers += 1;
        inner.numbers
    }
}

/// No scenario needs as much.
const ENOUGH: Duration = Duration::from_mins(10);

struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Clock").finish_non_exhaustive()
    }
}

impl Env for Clock {
    fn now(&self) -> Instant {
        self.shared.inner.lock().now
    }

    fn sleep_until(&self, deadline: Instant) -> BoxFuture<()> {
        Box::pin(Sleep {
            clock: self.clone(),
            key: (deadline, self.number()),
        })
    }

    fn random(&self) -> u64 {
        // Owners take all but the last bit.
        self.number() << 1
    }

    fn spawn(&self, task: BoxFuture<()>) {
        let running = Running::new(self);
        let task = async move {
            let _running = running;
            task.await;
        };
        if self.shared.time == Time::ByHand {
            self.shared.inner.lock().kept.push(Box::pin(task));
        } else {
            drop(shuttle::future::spawn(task));
        }
    }

    fn is_here(&self) -> bool {
        true
    }
}

/// Counts a task until it is dropped.
struct Running(Clock);

impl Running {
    fn new(clock: &Clock) -> Self {
        clock.shared.inner.lock().tasks += 1;
        Self(clock.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.shared.inner.lock().tasks -= 1;
        self.0.shared.ended.notify_waiters();
    }
}

struct Sleep {
    clock: Clock,
    key: (Instant, u64),
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut inner = self.clock.shared.inner.lock();
        if self.key.0 <= inner.now {
            return Poll::Ready(());
        }
        inner.timers.insert(self.key, cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.clock.shared.inner.lock().timers.remove(&self.key);
    }
}

/// The model of a server, and what was told of it.
pub(super) struct Server {
    clock: Clock,
    base: Instant,
    state: Mutex<State>,
    listeners: Plain<Vec<Arc<Topics>>>,
    pub(super) judge: Plain<Judge>,
    /// Calls whose replies are lost, counted from the next.
    lose: Plain<Vec<usize>>,
    /// What becomes of the next hand-offs.
    fates: Plain<Vec<Fate>>,
    passes: Plain<Option<JoinHandle<()>>>,
}

impl Server {
    fn new(clock: &Clock, passes: JoinHandle<()>) -> Self {
        Self {
            clock: clock.clone(),
            base: clock.now(),
            state: Mutex::default(),
            listeners: Plain::default(),
            judge: Plain::default(),
            lose: Plain::default(),
            fates: Plain::default(),
            passes: Plain::new(Some(passes)),
        }
    }

    fn now_us(&self) -> u64 {
        EPOCH_US + micros(self.clock.now() - self.base)
    }

    /// Loses the replies to these calls, counted from the next, which is 0.
    pub(super) fn lose_replies(&self, calls: &[usize]) {
        self.lose.lock().extend_from_slice(calls);
    }

    /// This becomes of the next hand-offs.
    pub(super) fn hand_offs(&self, fates: &[Fate]) {
        self.fates.lock().extend_from_slice(fates);
    }

    fn fate(&self, call: &Call) -> Option<Fate> {
        let mut fates = self.fates.lock();
        let handing = matches!(call.ops[0].verb, Verb::HandOff { .. });
        (handing && !fates.is_empty()).then(|| fates.remove(0))
    }

    fn loses_this(&self) -> bool {
        let mut lose = self.lose.lock();
        let this = lose.contains(&0);
        lose.retain(|calls| *calls > 0);
        for calls in lose.iter_mut() {
            *calls -= 1;
        }
        this
    }

    pub(super) fn holds_it(&self) -> bool {
        let now_us = self.now_us();
        let mut state = self.state.lock();
        let seen = state.look(&name(), now_us).expect("a lock");
        !seen.holders.is_empty()
    }

    /// Comes back without its memory, a moment later: tokens follow the clock.
    pub(super) fn lose_memory(&self) {
        let mut state = self.state.lock();
        *state = State::default();
        self.clock.set(self.clock.now() + Duration::from_millis(1));
        drop(state);
        self.judge.lock().deleted();
    }

    /// Forgets the lock.
    pub(super) fn delete(&self) {
        self.state.lock().delete(&name());
        self.judge.lock().deleted();
    }

    fn run(&self, call: &Call, deadline_us: u64) -> (u64, Vec<crate::store::Answer>) {
        let mut freed = Vec::new();
        let mut state = self.state.lock();
        let now_us = self.now_us();
        let answers: Vec<_> = call
            .ops
            .iter()
            .map(|op| {
                let queue = state.queue(&op.name);
                let (answer, wake) = apply(&mut state, now_us, deadline_us, op);
                freed.extend(wake);
                tell(&self.clock, || {
                    format!("{:?} {:?} -> {answer:?}", op.kind, op.verb)
                });
                let mut judge = self.judge.lock();
                judge.ran(op, &answer);
                if self.clock.shared.time == Time::Still {
                    Judge::in_order(op, &answer, queue.first());
                }
                answer
            })
            .collect();
        drop(state);
        let listeners = self.listeners.lock().clone();
        for topics in &listeners {
            for topic in freed.iter().filter_map(|channel| topics.get(channel)) {
                topic.wake();
            }
        }
        (now_us, answers)
    }
}

/// Says what happens, when a schedule is replayed.
fn tell(clock: &Clock, what: impl FnOnce() -> String) {
    if std::env::var_os("LEASEHOLD_SCHEDULE").is_some() {
        let since = clock.now() - clock.shared.began;
        println!("{since:?} {}", what());
    }
}

/// What becomes of a hand-off on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    LostRequest,
    LostReply,
    /// It runs when its time is up, and the reply comes too late.
    Late,
    /// It runs twice.
    Doubled,
}

/// One client's way to the server.
struct Link {
    server: Arc<Server>,
    topics: Arc<Topics>,
    health: watch::Sender<Health>,
}

impl Link {
    fn new(server: &Arc<Server>) -> Self {
        let topics = Arc::new(Topics::default());
        server.listeners.lock().push(Arc::clone(&topics));
        Self {
            server: Arc::clone(server),
            topics,
            health: watch::Sender::new(Health::Up {
                generation: 1,
                server: 1,
            }),
        }
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").finish_non_exhaustive()
    }
}

impl Store for Link {
    fn ready(&self, _timeout: Duration) -> Option<BoxFuture<()>> {
        None
    }

    /// The call runs in a thread of its own, or at once where tasks are run by hand.
    fn submit(&self, call: Call) -> BoxFuture<Result<Reply, NoReply>> {
        if *self.health.borrow() == Health::Closed {
            return Box::pin(ready(Err(NoReply::NotSent(Cause::new("closed")))));
        }
        let server = Arc::clone(&self.server);
        let clock = server.clock.clone();
        let (sent, timeout) = (clock.now(), call.timeout);
        let deadline_us = server.now_us() + micros(timeout);
        let fate = server.fate(&call);
        let lost = server.loses_this() || matches!(fate, Some(Fate::LostReply | Fate::Late));
        for op in &call.ops {
            server.judge.lock().sent(op);
        }
        let replied = move |(server_now_us, answers)| Reply {
            sent,
            server_now_us,
            answers,
        };
        if clock.shared.time == Time::ByHand {
            return Box::pin(ready(Ok(replied(server.run(&call, deadline_us)))));
        }
        let (reply, answer) = oneshot::channel();
        let (runs, ops) = (Arc::clone(&server), call.ops.clone());
        let end = later(sent, timeout);
        if let Some(Fate::Doubled) = fate {
            let (runs, call) = (Arc::clone(&runs), call.clone());
            for op in &ops {
                server.judge.lock().unanswered(op);
            }
            clock.spawn(Box::pin(async move {
                runs.run(&call, deadline_us);
            }));
        }
        let waits = clock.clone();
        clock.spawn(Box::pin(async move {
            if let Some(Fate::Late) = fate {
                waits.sleep_until(end).await;
            }
            if let Some(Fate::LostRequest) = fate {
                return;
            }
            let answers = runs.run(&call, deadline_us);
            point();
            if !lost {
                let _ = reply.send(replied(answers));
            }
        }));
        Box::pin(async move {
            match until(&clock, end, answer).await {
                Some(Ok(reply)) => return Ok(reply),
                Some(Err(_)) => clock.sleep_until(end).await,
                None => {}
            }
            for op in &ops {
                server.judge.lock().unanswered(op);
            }
            Err(NoReply::Unanswered {
                sent,
                deadline_us,
                cause: Cause::new("lost"),
            })
        })
    }

    fn subscribe(&self, channel: &Channel) -> Subscription {
        self.topics.subscribe(channel, Listening::Live)
    }

    fn inspect(&self, _: Kind, _: &Arc<str>, _: Duration) -> BoxFuture<Result<Snapshot, NoReply>> {
        Box::pin(pending())
    }

    fn announce(&self, _: BTreeMap<String, String>, _: Duration) -> BoxFuture<()> {
        Box::pin(ready(()))
    }

    fn retract(&self) -> BoxFuture<()> {
        Box::pin(ready(()))
    }

    fn health(&self) -> watch::Receiver<Health> {
        self.health.subscribe()
    }

    fn believes(&self, belief: Belief<'_>) {
        if std::thread::panicking() {
            // What is dropped on the way out proves nothing.
            return;
        }
        let now = self.server.clock.now();
        tell(&self.server.clock, || format!("{belief:?}"));
        self.server.judge.lock().believes(belief, now);
    }

    fn run(&self) -> Option<Run> {
        None
    }

    fn close(&self) {
        self.health.send_replace(Health::Closed);
    }
}
