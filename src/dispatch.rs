//! The dispatcher: owns every mutating operation from the moment it is posted until it is answered
//! or given up.
//!
//! What holds, and what breaks otherwise:
//!
//! 1. Posting needs no runtime and never blocks: it works in `Drop`, on any thread, while unwinding.
//! 2. Within one hold, operations of inner levels keep their order and travel one at a time (its
//!    *lane*). Between holds, releases and renewals go before acquisitions.
//! 3. A re-send is the same operation with a new attempt number and a new deadline. "No answer" is
//!    never "no".
//! 4. A final release that might overtake a copy of its own acquisition is sent again once the
//!    server's clock has passed the last copy's deadline (the *sit-out*); only that one is
//!    conclusive. Otherwise the copy would create a hold for nobody.
//! 5. An acquisition nobody wants any more is not sent, and not sent again.
//!
//! Calls form by themselves: what is posted while others are in flight goes out together, one verb to
//! a call. Where nothing is, who posts sends at once, from his own task, and the dispatcher's only
//! waits for the answer.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use crate::bug::{Bug, seeded};
use crate::env::{BoxFuture, SharedEnv, later};
use crate::kind::Kind;
use crate::store::{Answer, Call, Cause, NoReply, Op, OwnerId, RefusalKind, Reply, Store, Verb};
use crate::sync::{AtomicUsize, Mutex, Notify};

/// Who asked for an operation, and is told how it went, exactly once.
///
/// Called by the dispatcher with none of its locks held; must not block.
pub(crate) trait Requester: Send {
    /// Whether the operation should still be sent. Asked with the queue locked: must not post.
    fn wanted(&self) -> bool {
        true
    }

    /// An attempt went wrong, and another one may follow.
    fn trouble(&self, _cause: &Cause, _unanswered: bool) {}

    /// How it went.
    fn done(self: Box<Self>, outcome: Outcome);
}

/// How an operation went.
#[derive(Debug)]
pub(crate) enum Outcome {
    Answered(Answered),
    Failed(Failure),
}

/// An operation that was answered; the answer is never `Late`.
#[derive(Debug)]
pub(crate) struct Answered {
    pub(crate) answer: Answer,
    /// Stamp of the attempt that was answered.
    pub(crate) sent: Instant,
    pub(crate) server_now_us: u64,
    /// Stamp of the first attempt that was sent, if that one went unanswered.
    pub(crate) unanswered_since: Option<Instant>,
    /// Server time until which an unanswered attempt may still run.
    pub(crate) open_until_us: Option<u64>,
}

/// An operation that was given up.
#[derive(Debug)]
pub(crate) enum Failure {
    /// It was never sent: certain.
    NotSent(Cause),
    /// It may have run, or may yet run until the server's clock passes `open_until_us`.
    Unanswered { open_until_us: u64, cause: Cause },
    /// The client ended first. It may have run.
    Closed,
}

/// An operation to be done.
pub(crate) struct Job {
    op: Op,
    /// How long each attempt may take.
    timeout: Duration,
    /// When to stop trying.
    pub(crate) give_up: Instant,
    /// For a final release: server time that must have passed for it to be conclusive.
    sit_out_us: Option<u64>,
    /// Held by acquisitions, so that their number is bounded.
    permit: Option<OwnedSemaphorePermit>,
    once: bool,
    /// Goes in a call of its own: one with others was refused, and it may have been for their sake.
    alone: bool,
    /// Set for a release somebody waits for, while it is not done.
    counted: Option<Counted>,
    requester: Option<Box<dyn Requester>>,
    progress: Progress,
}

#[derive(Debug, Default)]
struct Progress {
    /// Put off because there was no connection.
    unconnected: bool,
    unanswered_since: Option<Instant>,
    open_until_us: Option<u64>,
    failures: u32,
    cause: Option<Cause>,
}

impl Job {
    pub(crate) fn new(
        op: Op,
        timeout: Duration,
        give_up: Instant,
        requester: Box<dyn Requester>,
    ) -> Self {
        Self {
            requester: Some(requester),
            ..Self::unattended(op, timeout, give_up)
        }
    }

    /// A job whose outcome interests nobody.
    pub(crate) fn unattended(op: Op, timeout: Duration, give_up: Instant) -> Self {
        Self {
            op,
            timeout,
            give_up,
            sit_out_us: None,
            permit: None,
            once: false,
            alone: false,
            counted: None,
            requester: None,
            progress: Progress::default(),
        }
    }

    pub(crate) fn sit_out(mut self, open_until_us: Option<u64>) -> Self {
        self.sit_out_us = open_until_us.filter(|_| !seeded(Bug::CleanUpOnce));
        self
    }

    pub(crate) fn holding(mut self, permit: OwnedSemaphorePermit) -> Self {
        self.permit = Some(permit);
        self
    }

    /// Not tried again once it is certain that it was not done.
    pub(crate) fn once(mut self, once: bool) -> Self {
        self.once = once;
        self
    }

    fn wanted(&self) -> bool {
        self.requester
            .as_ref()
            .is_none_or(|requester| requester.wanted())
    }

    /// Whether it may make a hold or a place, not only enter one again.
    fn begins(&self) -> bool {
        matches!(
            self.op.verb,
            Verb::Acquire { count: 1, .. } | Verb::Enqueue { .. } | Verb::Beat { .. }
        )
    }

    fn queue(&self) -> Queue {
        match self.op.verb {
            Verb::Release { .. } | Verb::ForceRelease { .. } | Verb::Downgrade { .. } => {
                Queue::Releases
            }
            Verb::Renew { .. } | Verb::Beat { .. } | Verb::Remember { .. } => Queue::Renewals,
            Verb::HandOff { .. } | Verb::Upgrade { .. } => Queue::HandOffs,
            Verb::Acquire { .. } | Verb::Enqueue { .. } => Queue::Acquires,
        }
    }

    /// The hold whose lane this travels in: operations of inner levels, which set the count, and those
    /// that change its side.
    fn lane(&self) -> Option<OwnerId> {
        match self.op.verb {
            Verb::Acquire {
                owner, count: 2.., ..
            }
            | Verb::Release {
                owner, count: 1.., ..
            }
            | Verb::Downgrade { owner, .. }
            | Verb::Upgrade { from: owner, .. } => Some(owner),
            _ => None,
        }
    }

    /// The hold that this ends.
    fn ends(&self) -> Option<OwnerId> {
        match self.op.verb {
            Verb::Release {
                owner, count: 0, ..
            }
            | Verb::HandOff { from: owner, .. } => Some(owner),
            _ => None,
        }
    }

    fn most_in_a_call(&self) -> usize {
        match self.op.kind {
            Kind::Plain | Kind::Fair if self.renews() => MAX_RENEWALS,
            _ => MAX_BATCH,
        }
    }

    fn renews(&self) -> bool {
        matches!(self.op.verb, Verb::Renew { .. })
    }

    /// Sent at least once, however late it comes up.
    fn must_be_sent(&self) -> bool {
        matches!(self.op.verb, Verb::Release { count: 0, .. })
    }

    fn tell(&mut self, outcome: Outcome) {
        self.permit = None;
        self.counted = None;
        if let Some(requester) = self.requester.take() {
            requester.done(outcome);
        }
    }

    fn failure(&mut self) -> Failure {
        let cause = self
            .progress
            .cause
            .take()
            .unwrap_or_else(|| Cause::new("not sent in time"));
        match self.progress.open_until_us {
            Some(open_until_us) => Failure::Unanswered {
                open_until_us,
                cause,
            },
            None => Failure::NotSent(cause),
        }
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("op", &self.op)
            .field("progress", &self.progress)
            .finish_non_exhaustive()
    }
}

/// One of the releases under way.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(releases: &Arc<AtomicUsize>) -> Self {
        releases.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(releases))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The queue of one client's operations, and the task that serves it.
pub(crate) struct Dispatcher {
    env: SharedEnv,
    store: Arc<dyn Store>,
    state: Mutex<State>,
    work: Notify,
    idle: Notify,
    /// Calls that were sent by who posted them, for the task to wait for.
    sent: Mutex<Vec<BoxFuture<Flight>>>,
    attempts: AtomicU64,
    releases: Arc<AtomicUsize>,
}

#[derive(Default)]
struct State {
    /// What waits to be sent, by [`Queue`].
    queues: [VecDeque<Job>; 4],
    /// Which queue had the last turn.
    turn: usize,
    /// Waiting for their next try.
    delayed: BTreeMap<(Instant, u64), Job>,
    /// Holds with an inner operation under way, and those behind it.
    lanes: HashMap<OwnerId, VecDeque<Job>>,
    delays: u64,
    /// Jobs that were sent and are not settled, and calls.
    in_flight: usize,
    flights: usize,
    /// When the last call that renews was sent, until one is answered.
    renewing_since: Option<Instant>,
    /// Those who are about to post something.
    about_to_post: usize,
    /// What went wrong with the last call, until one is answered.
    trouble: Option<Cause>,
    /// Take no more acquisitions.
    closing: bool,
    /// End once everything is done.
    finishing: bool,
    /// Ended: nothing is sent any more.
    ended: bool,
}

impl State {
    fn is_idle(&self) -> bool {
        self.about_to_post == 0 && self.has_nothing()
    }

    fn has_nothing(&self) -> bool {
        self.in_flight == 0 && self.queues.iter().all(VecDeque::is_empty) && self.delayed.is_empty()
    }

    fn enqueue(&mut self, job: Job) {
        self.queues[job.queue() as usize].push_back(job);
    }

    /// The next call's jobs, if there is room for one: what frees or keeps a lock in turn, and what asks
    /// for one when there is no such thing.
    fn take(&mut self, now: Instant, dropped: &mut Vec<Job>) -> Vec<Job> {
        let mut jobs = Vec::new();
        if self.flights < MAX_FLIGHTS {
            for step in 1..=URGENT {
                let turn = (self.turn + step) % URGENT;
                let is_renewals = turn == Queue::Renewals as usize;
                if is_renewals && self.renewals_again().is_some_and(|at| now < at) {
                    continue;
                }
                take_batch(&mut self.queues[turn], now, &mut jobs, dropped);
                if !jobs.is_empty() {
                    self.turn = turn;
                    break;
                }
            }
        }
        if jobs.is_empty() && self.flights < MAX_ACQUIRE_FLIGHTS {
            let acquires = &mut self.queues[Queue::Acquires as usize];
            take_batch(acquires, now, &mut jobs, dropped);
        }
        self.begin(&jobs, now);
        jobs
    }

    /// These go out as one call.
    fn begin(&mut self, jobs: &[Job], now: Instant) {
        if let Some(first) = jobs.first() {
            self.in_flight += jobs.len();
            self.flights += 1;
            if first.renews() {
                self.renewing_since = Some(now);
            }
        }
    }

    /// A call of so many jobs is settled.
    fn end(&mut self, jobs: usize, renews: bool) {
        self.in_flight -= jobs;
        self.flights -= 1;
        if renews {
            self.renewing_since = None;
        }
    }

    /// When the next call may renew, if one that does is under way: others get in between.
    fn renewals_again(&self) -> Option<Instant> {
        self.renewing_since
            .map(|since| later(since, RENEWALS_APART))
    }

    /// When there may be something to send, though nothing is answered or posted.
    fn next_look(&self) -> Option<Instant> {
        let delayed = self.delayed.first_key_value().map(|((at, _), _)| *at);
        let renewals = self.renewals_again().filter(|_| {
            self.flights < MAX_FLIGHTS && !self.queues[Queue::Renewals as usize].is_empty()
        });
        delayed.into_iter().chain(renewals).min()
    }

    fn delay(&mut self, until: Instant, job: Job) {
        self.delays += 1;
        self.delayed.insert((until, self.delays), job);
    }

    /// Moves what is due, or what nobody waits for any more, back into the queues.
    fn wake_delayed(&mut self, now: Instant) {
        while let Some(entry) = self.delayed.first_entry() {
            if entry.key().0 > now {
                break;
            }
            let job = entry.remove();
            self.enqueue(job);
        }
    }
}

/// A call that is over.
struct Flight {
    jobs: Vec<Job>,
    /// Those that nobody wanted any more when it could be sent: they were not.
    unwanted: Vec<Job>,
    result: Result<Reply, NoReply>,
}

impl Dispatcher {
    pub(crate) fn new(env: SharedEnv, store: Arc<dyn Store>) -> Self {
        Self {
            env,
            store,
            state: Mutex::default(),
            work: Notify::new(),
            idle: Notify::new(),
            sent: Mutex::default(),
            attempts: AtomicU64::new(1),
            releases: Arc::default(),
        }
    }

    /// Hands over a job. Never blocks; needs no runtime.
    pub(crate) fn post(&self, mut job: Job) {
        let mut overtaken = VecDeque::new();
        {
            let mut state = self.state.lock();
            if state.ended || (state.closing && job.begins()) {
                drop(state);
                job.tell(Outcome::Failed(Failure::Closed));
                return;
            }
            if let Some(owner) = job.lane() {
                if let Some(lane) = state.lanes.get_mut(&owner) {
                    lane.push_back(job);
                    return;
                }
                state.lanes.insert(owner, VecDeque::new());
            }
            if let Some(owner) = job.ends() {
                job.counted = job
                    .requester
                    .is_some()
                    .then(|| Counted::new(&self.releases));
                if let Some(lane) = state.lanes.get_mut(&owner) {
                    overtaken = std::mem::take(lane);
                }
            }
            // On an unwinding thread nothing but the queue is touched.
            let now = state.has_nothing() && job.wanted() && self.env.is_here();
            if now && !std::thread::panicking() {
                state.begin(std::slice::from_ref(&job), self.env.now());
                drop(state);
                self.send_now(job);
            } else {
                state.enqueue(job);
            }
        }
        self.work.notify_one();
        for mut job in overtaken {
            job.tell(Outcome::Failed(Failure::NotSent(Cause::new(
                "the hold was released",
            ))));
        }
    }

    /// Nothing ends while this is kept: somebody is about to post what nobody else could make up for.
    pub(crate) fn about_to_post(&self) -> AboutToPost<'_> {
        self.state.lock().about_to_post += 1;
        AboutToPost(self)
    }

    /// The same for many that no lane has to do with. They are sent by the task, so that they go together.
    pub(crate) fn post_renewals(&self, jobs: Vec<Job>) {
        if jobs.is_empty() {
            return;
        }
        let mut state = self.state.lock();
        if state.ended {
            drop(state);
            for mut job in jobs {
                job.tell(Outcome::Failed(Failure::Closed));
            }
            return;
        }
        for job in jobs {
            state.enqueue(job);
        }
        drop(state);
        self.work.notify_one();
    }

    /// Sends a job by itself, and leaves it to the task to wait for the answer.
    fn send_now(&self, job: Job) {
        let mut flight = self.flight(vec![job]);
        // Nobody is woken by this poll: the task polls again.
        let mut nobody = std::task::Context::from_waker(std::task::Waker::noop());
        let flight = match flight.as_mut().poll(&mut nobody) {
            Poll::Ready(done) => Box::pin(std::future::ready(done)),
            Poll::Pending => flight,
        };
        self.sent.lock().push(flight);
        if self.state.lock().ended {
            self.forget_sent();
        }
    }

    /// Takes no more acquisitions but of holds that there are. In one step with posting: none can slip in between the last look at
    /// what is under way and the end, and be granted to nobody.
    pub(crate) fn refuse_acquires(&self) {
        self.state.lock().closing = true;
    }

    /// There is a connection again: what was put off for want of one goes now.
    pub(crate) fn connected(&self) {
        {
            let mut state = self.state.lock();
            let delayed = std::mem::take(&mut state.delayed);
            for (at, mut job) in delayed {
                if std::mem::take(&mut job.progress.unconnected) {
                    state.enqueue(job);
                } else {
                    state.delayed.insert(at, job);
                }
            }
        }
        self.work.notify_one();
    }

    /// Ends the task once everything posted is done.
    pub(crate) fn finish(&self) {
        self.state.lock().finishing = true;
        self.work.notify_one();
    }

    /// Completes when nothing is posted that is not done.
    pub(crate) async fn until_idle(&self) {
        loop {
            let idle = self.idle.notified();
            {
                let state = self.state.lock();
                if state.ended || state.is_idle() {
                    return;
                }
            }
            idle.await;
        }
    }

    /// Nothing is sent from here on; whoever waits is told.
    pub(crate) fn end(&self) {
        let mut state = self.state.lock();
        state.ended = true;
        let mut jobs: Vec<Job> = Vec::new();
        jobs.extend(std::mem::take(&mut state.queues).into_iter().flatten());
        jobs.extend(std::mem::take(&mut state.delayed).into_values());
        // Each is told, so the order does not matter to anybody.
        jobs.extend(std::mem::take(&mut state.lanes).into_values().flatten());
        drop(state);
        for mut job in jobs {
            job.tell(Outcome::Failed(Failure::Closed));
        }
        self.forget_sent();
        self.idle.notify_waiters();
        self.work.notify_one();
    }

    /// Drops what was sent and nobody will wait for any more.
    fn forget_sent(&self) {
        let sent = std::mem::take(&mut *self.sent.lock());
        drop(sent);
    }

    /// Whether no operation of an inner level of this hold is under way.
    pub(crate) fn has_no_lane(&self, owner: OwnerId) -> bool {
        !self.state.lock().lanes.contains_key(&owner)
    }

    /// Whether nothing is posted that is not done.
    pub(crate) fn is_idle(&self) -> bool {
        self.state.lock().is_idle()
    }

    /// Why the server cannot be reached, if the last call was not answered.
    pub(crate) fn trouble(&self) -> Option<Cause> {
        self.state.lock().trouble.clone()
    }

    /// Releases posted and not answered.
    pub(crate) fn releases(&self) -> usize {
        self.releases.load(Ordering::Relaxed)
    }

    /// Serves the queue until told to finish.
    pub(crate) async fn run(&self) {
        let mut flights: FuturesUnordered<BoxFuture<Flight>> = FuturesUnordered::new();
        loop {
            flights.extend(self.sent.lock().drain(..));
            while let Some(flight) = self.next_flight() {
                flights.push(flight);
            }
            let retry = {
                let mut state = self.state.lock();
                if state.ended || (state.finishing && state.is_idle()) {
                    // In one step: what is posted from here on is not sent, as nobody would hear its answer.
                    state.ended = true;
                    return;
                }
                state.next_look()
            };
            tokio::select! {
                biased;
                Some(flight) = flights.next(), if !flights.is_empty() => self.settle(flight),
                () = self.work.notified() => {}
                () = wait(&self.env, retry) => {}
            }
        }
    }

    /// Forms the next call from what waits, if there is anything and room for it.
    fn next_flight(&self) -> Option<BoxFuture<Flight>> {
        let now = self.env.now();
        loop {
            let mut dropped = Vec::new();
            let jobs = {
                let mut state = self.state.lock();
                state.wake_delayed(now);
                let jobs = state.take(now, &mut dropped);
                // Whoever is told may post what follows: until then nothing is idle.
                state.in_flight += dropped.len();
                jobs
            };
            let ended = dropped.len();
            for mut job in dropped {
                self.leave_lane(&job);
                let failure = job.failure();
                job.tell(Outcome::Failed(failure));
            }
            if ended > 0 {
                self.state.lock().in_flight -= ended;
                self.tell_if_idle();
            }
            if !jobs.is_empty() {
                return Some(self.flight(jobs));
            }
            // What waited behind one that was dropped can go now.
            if ended == 0 {
                return None;
            }
        }
    }

    /// One call, from its sending to its answer.
    fn flight(&self, jobs: Vec<Job>) -> BoxFuture<Flight> {
        let now = self.env.now();
        let attempt = self.attempts.fetch_add(1, Ordering::Relaxed);
        let timeout = jobs[0].timeout;
        let ready = self.store.ready(timeout);
        let (store, env) = (Arc::clone(&self.store), Arc::clone(&self.env));
        Box::pin(async move {
            let mut flight = Flight {
                jobs,
                unwanted: Vec::new(),
                result: Err(NoReply::NotSent(Cause::new("not wanted any more"))),
            };
            if ready.is_none() {
                flight.result = store.submit(call(attempt, timeout, &flight.jobs)).await;
            }
            // The connection may have broken since we looked.
            let ready = match &flight.result {
                Err(NoReply::NotSent(_)) => ready.or_else(|| store.ready(timeout)),
                _ => None,
            };
            if let Some(ready) = ready {
                ready.await;
                // It may have been long: who asked can have left, and a hold can have ended.
                let (jobs, unwanted) = flight.jobs.into_iter().partition(Job::wanted);
                (flight.jobs, flight.unwanted) = (jobs, unwanted);
                let left = timeout.saturating_sub(env.now().saturating_duration_since(now));
                if !flight.jobs.is_empty() {
                    flight.result = store.submit(call(attempt, left, &flight.jobs)).await;
                }
            }
            flight
        })
    }

    fn settle(&self, flight: Flight) {
        let Flight {
            jobs,
            unwanted,
            result,
        } = flight;
        let count = jobs.len() + unwanted.len();
        let renews = jobs.iter().chain(&unwanted).next().is_some_and(Job::renews);
        let now = self.env.now();
        for mut job in unwanted {
            self.leave_lane(&job);
            let failure = job.failure();
            job.tell(Outcome::Failed(failure));
        }
        self.state.lock().trouble = match &result {
            Ok(_) | Err(NoReply::Refused(_)) => None,
            Err(NoReply::NotSent(cause) | NoReply::Unanswered { cause, .. }) => Some(cause.clone()),
        };
        match result {
            Ok(Reply {
                sent,
                server_now_us,
                answers,
            }) => {
                for (job, answer) in jobs.into_iter().zip(answers) {
                    self.answered(job, answer, sent, server_now_us, now);
                }
            }
            // The server looks at the keys of the whole call before it runs: one that is forbidden
            // refuses all. So each is asked by itself.
            Err(NoReply::Refused(refusal)) if jobs.len() > 1 => {
                for mut job in jobs {
                    job.alone = true;
                    if now < job.give_up || job.must_be_sent() {
                        self.once_more(job);
                    } else {
                        self.answered(job, Answer::Refused(refusal.clone()), now, 0, now);
                    }
                }
            }
            Err(NoReply::Refused(refusal)) => {
                for job in jobs {
                    self.answered(job, Answer::Refused(refusal.clone()), now, 0, now);
                }
            }
            Err(NoReply::NotSent(cause)) => {
                for mut job in jobs {
                    job.progress.cause = Some(cause.clone());
                    job.progress.unconnected = true;
                    self.again(job, now, true);
                }
            }
            Err(NoReply::Unanswered {
                sent,
                deadline_us,
                cause,
            }) => {
                for mut job in jobs {
                    let progress = &mut job.progress;
                    progress.cause = Some(cause.clone());
                    progress.unanswered_since.get_or_insert(sent);
                    progress.open_until_us = Some(
                        progress
                            .open_until_us
                            .map_or(deadline_us, |open| open.max(deadline_us)),
                    );
                    self.again(job, now, false);
                }
            }
        }
        self.state.lock().end(count, renews);
        self.tell_if_idle();
    }

    fn answered(
        &self,
        mut job: Job,
        answer: Answer,
        sent: Instant,
        server_now_us: u64,
        now: Instant,
    ) {
        match answer {
            // Nothing was done, and the store knows the server's time anew: at once again.
            Answer::Late => {
                job.progress
                    .cause
                    .get_or_insert_with(|| Cause::new("arrived past its deadline"));
                return self.again(job, now, false);
            }
            // A final release is repeated whatever the reason: rules and passwords are mended.
            Answer::Refused(ref refusal)
                if refusal.kind == RefusalKind::Unavailable || job.must_be_sent() =>
            {
                job.progress.cause = Some(Cause::new(refusal.message.clone()));
                return self.again(job, now, true);
            }
            _ => {}
        }
        self.leave_lane(&job);
        let sit_out = job.sit_out_us.filter(|open| server_now_us <= *open);
        job.tell(Outcome::Answered(Answered {
            answer,
            sent,
            server_now_us,
            unanswered_since: job.progress.unanswered_since,
            open_until_us: job.progress.open_until_us,
        }));
        // Not conclusive: a copy of the acquisition may still run after this. Once more, past it.
        if let Some(open) = sit_out
            && now < job.give_up
            && server_now_us > 0
        {
            let wait = Duration::from_micros(open - server_now_us) + Duration::from_millis(1);
            let mut state = self.state.lock();
            if !state.ended {
                state.delay(later(now, wait), job);
                drop(state);
                self.work.notify_one();
            }
        }
    }

    /// Puts a job back that has not run, and may be told so by nobody else.
    fn once_more(&self, mut job: Job) {
        let mut state = self.state.lock();
        if state.ended {
            drop(state);
            job.tell(Outcome::Failed(Failure::Closed));
        } else {
            state.enqueue(job);
        }
    }

    /// Sends a job again, now or a little later, or gives it up.
    fn again(&self, mut job: Job, now: Instant, pause: bool) {
        if now >= job.give_up || !job.wanted() || (pause && job.once) {
            self.leave_lane(&job);
            let failure = job.failure();
            job.tell(Outcome::Failed(failure));
            return;
        }
        let progress = &mut job.progress;
        progress.failures = progress.failures.saturating_add(1);
        let pause = pause || progress.failures > IMMEDIATE_TRIES;
        if let (Some(requester), Some(cause)) = (&job.requester, &progress.cause) {
            requester.trouble(cause, progress.open_until_us.is_some());
        }
        let mut state = self.state.lock();
        if state.ended {
            drop(state);
            job.tell(Outcome::Failed(Failure::Closed));
            return;
        }
        if pause {
            let until = later(now, self.pause(job.progress.failures)).min(job.give_up);
            state.delay(until, job);
        } else {
            state.enqueue(job);
        }
    }

    /// Grows from 5 to 100 ms, half of it by chance, so that many jobs do not come back in step.
    fn pause(&self, failures: u32) -> Duration {
        let millis = (5_u64 << failures.min(5)).min(100);
        Duration::from_millis(millis / 2 + self.env.random() % (millis / 2 + 1))
    }

    /// Lets the next inner operation of the same hold go.
    fn leave_lane(&self, job: &Job) {
        let Some(owner) = job.lane() else { return };
        let mut state = self.state.lock();
        let Some(lane) = state.lanes.get_mut(&owner) else {
            return;
        };
        match lane.pop_front() {
            Some(next) => state.enqueue(next),
            None => {
                state.lanes.remove(&owner);
            }
        }
    }

    fn tell_if_idle(&self) {
        if self.state.lock().is_idle() {
            self.idle.notify_waiters();
        }
    }
}

/// See [`Dispatcher::about_to_post`].
pub(crate) struct AboutToPost<'a>(&'a Dispatcher);

impl Drop for AboutToPost<'_> {
    fn drop(&mut self) {
        let finishing = {
            let mut state = self.0.state.lock();
            state.about_to_post -= 1;
            state.finishing
        };
        self.0.tell_if_idle();
        if finishing {
            self.0.work.notify_one();
        }
    }
}

impl fmt::Debug for Dispatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dispatcher").finish_non_exhaustive()
    }
}

fn call(attempt: u64, timeout: Duration, jobs: &[Job]) -> Call {
    Call {
        attempt,
        timeout,
        ops: jobs.iter().map(|job| job.op.clone()).collect(),
    }
}

/// The queues: those before the last in turn, and that when they are empty.
#[derive(Clone, Copy)]
enum Queue {
    Releases,
    Renewals,
    HandOffs,
    Acquires,
}

/// How many queues come before the last.
const URGENT: usize = Queue::Acquires as usize;

/// Takes jobs of one kind, one verb and one timeout from the front; sorts out those past their time.
fn take_batch(
    queue: &mut VecDeque<Job>,
    now: Instant,
    batch: &mut Vec<Job>,
    dropped: &mut Vec<Job>,
) {
    while let Some(job) = queue.front()
        && batch.len() < job.most_in_a_call()
    {
        let alike = batch.first().is_none_or(|first| {
            first.op.kind == job.op.kind
                && std::mem::discriminant(&first.op.verb) == std::mem::discriminant(&job.op.verb)
                && first.timeout == job.timeout
                && !first.alone
                && !job.alone
        });
        if !alike {
            return;
        }
        let Some(job) = queue.pop_front() else { return };
        let over = now >= job.give_up && !job.must_be_sent();
        if over || !job.wanted() {
            dropped.push(job);
        } else {
            batch.push(job);
        }
    }
}

async fn wait(env: &SharedEnv, until: Option<Instant>) {
    match until {
        Some(until) => env.sleep_until(until).await,
        None => std::future::pending().await,
    }
}

/// Tries that follow an unanswered one without a pause: its timeout was one.
const IMMEDIATE_TRIES: u32 = 2;

/// Operations in one call, at most: some 200 µs of the server's time.
const MAX_BATCH: usize = 32;

/// The same for renewals of holds that are one hash, which are cheaper.
const MAX_RENEWALS: usize = 64;

/// Between two calls that renew, unless the first is answered sooner: who wants a lock waits for one of them, not
/// for all that are due. On a slow connection, or where one is not answered, they go on.
const RENEWALS_APART: Duration = Duration::from_millis(5);

/// Calls in flight, at most; acquisitions leave room for releases and renewals.
const MAX_FLIGHTS: usize = 8;
const MAX_ACQUIRE_FLIGHTS: usize = 6;

#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "the time and the tasks of the tests"
)]
mod tests {
    use std::collections::BTreeMap;

    use tokio::sync::{oneshot, watch};
    use tokio::task::yield_now;
    use tokio::time::sleep;
    use uuid::Uuid;

    use super::*;
    use crate::env::RealEnv;
    use crate::store::{Channel, Health, Run, Snapshot, Subscription};

    /// Many renewals are some calls one after another, and what comes meanwhile waits for none but the first.
    #[tokio::test(start_paused = true)]
    async fn renewals_are_one_call_at_a_time_and_others_get_in_between() {
        let (dispatcher, store) = served();
        dispatcher.post_renewals((0..200).map(renewal).collect());
        assert_eq!(store.calls().await, [(true, 64)]);
        dispatcher.post(release(0));
        assert_eq!(store.calls().await, [(false, 1)]);
        store.answer_first();
        assert_eq!(store.calls().await, [(true, 64)]);
        dispatcher.post(release(1));
        assert_eq!(store.calls().await, [(false, 1)]);
        dispatcher.end();
    }

    /// A call that is not answered, or takes long on its way, holds up no other renewal for longer than that.
    #[tokio::test(start_paused = true)]
    async fn renewals_go_on_past_a_call_that_is_not_answered() {
        let (dispatcher, store) = served();
        dispatcher.post_renewals((0..200).map(renewal).collect());
        assert_eq!(store.calls().await, [(true, 64)]);
        // Tokio's timers are a millisecond late at most.
        let millisecond = Duration::from_millis(1);
        let mut waited = Duration::ZERO;
        for ops in [64, 64, 8] {
            let calls = loop {
                sleep(millisecond).await;
                waited += millisecond;
                let calls = store.calls().await;
                if !calls.is_empty() {
                    break calls;
                }
                assert!(waited <= RENEWALS_APART + 2 * millisecond);
            };
            assert_eq!(calls, [(true, ops)]);
            assert!(waited + 2 * millisecond >= RENEWALS_APART, "{waited:?}");
            waited = Duration::ZERO;
        }
        dispatcher.end();
    }

    fn served() -> (Arc<Dispatcher>, Arc<Calls>) {
        let store = Arc::new(Calls::default());
        let env = Arc::new(RealEnv::current());
        let dispatcher = Arc::new(Dispatcher::new(env, Arc::clone(&store) as Arc<dyn Store>));
        let serving = Arc::clone(&dispatcher);
        tokio::spawn(async move { serving.run().await });
        (dispatcher, store)
    }

    fn renewal(hold: u64) -> Job {
        let owner = OwnerId::new(Uuid::nil(), 2 * hold);
        unattended(Verb::Renew {
            owner,
            count: 1,
            lease_ms: 1000,
        })
    }

    fn release(hold: u64) -> Job {
        let owner = OwnerId::new(Uuid::nil(), 2 * hold);
        unattended(Verb::Release {
            owner,
            count: 0,
            also: None,
        })
    }

    fn unattended(verb: Verb) -> Job {
        let op = Op {
            kind: Kind::Plain,
            name: Arc::from("job"),
            verb,
        };
        let second = Duration::from_secs(1);
        Job::unattended(op, second, Instant::now() + 60 * second)
    }

    type Asked = (Call, oneshot::Sender<Result<Reply, NoReply>>);

    /// A store that keeps what it is asked until the test has it answered.
    #[derive(Debug, Default)]
    struct Calls {
        asked: Mutex<VecDeque<Asked>>,
        seen: AtomicU64,
    }

    impl Calls {
        /// Whether it renews, and of how many operations: of each call since the last time.
        async fn calls(&self) -> Vec<(bool, usize)> {
            for _ in 0..16 {
                yield_now().await;
            }
            let asked = self.asked.lock();
            let calls = asked.iter().map(|(call, _)| call);
            let seen = self.seen.load(Ordering::Relaxed);
            let new = calls.filter(|call| call.attempt > seen);
            let new: Vec<_> = new.collect();
            if let Some(last) = new.iter().map(|call| call.attempt).max() {
                self.seen.store(last, Ordering::Relaxed);
            }
            new.iter()
                .map(|call| {
                    let renews = matches!(call.ops[0].verb, Verb::Renew { .. });
                    (renews, call.ops.len())
                })
                .collect()
        }

        fn answer_first(&self) {
            let (call, reply) = self.asked.lock().pop_front().unwrap();
            let renewed = |_: &Op| Answer::Renewed { remaining_ms: 1000 };
            let answered = Reply {
                sent: Instant::now(),
                server_now_us: 1,
                answers: call.ops.iter().map(renewed).collect(),
            };
            assert!(reply.send(Ok(answered)).is_ok(), "somebody waits for it");
        }
    }

    impl Store for Calls {
        fn ready(&self, _timeout: Duration) -> Option<BoxFuture<()>> {
            None
        }

        fn submit(&self, call: Call) -> BoxFuture<Result<Reply, NoReply>> {
            let (reply, answer) = oneshot::channel();
            self.asked.lock().push_back((call, reply));
            Box::pin(async move { answer.await.unwrap() })
        }

        fn subscribe(&self, _channel: &Channel) -> Subscription {
            unreachable!("the dispatcher does not listen")
        }

        fn inspect(
            &self,
            _kind: Kind,
            _name: &Arc<str>,
            _timeout: Duration,
        ) -> BoxFuture<Result<Snapshot, NoReply>> {
            unreachable!("the dispatcher does not look")
        }

        fn announce(&self, _: BTreeMap<String, String>, _: Duration) -> BoxFuture<()> {
            unreachable!("the dispatcher does not announce")
        }

        fn retract(&self) -> BoxFuture<()> {
            unreachable!("the dispatcher does not announce")
        }

        fn health(&self) -> watch::Receiver<Health> {
            watch::Sender::new(Health::Connecting).subscribe()
        }

        fn run(&self) -> Option<Run> {
            unreachable!("the dispatcher does not ask")
        }

        fn close(&self) {}
    }
}
