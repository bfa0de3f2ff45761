//! The quorum lock: one lock on several independent servers, held while a majority has it.

use std::fmt;
use std::future::{Future, pending};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Kind;
use super::multi::any_lost;
use crate::client::LockClient;
use crate::config::{millis, validate_lease};
use crate::dispatch::{Answered, Failure, Job, Outcome};
use crate::engine::Engine;
use crate::env::{BoxFuture, later};
use crate::error::Error;
use crate::fencing::FencingToken;
use crate::guard::{Asked, LockGuard, LossReason, ReleaseOutcome, run_while};
use crate::hold::Hold;
use crate::lock::{Budget, refused};
use crate::store::{Answer, Cause, Op, Run, TokenRule, Verb};

/// One lock on several servers that know nothing of each other, held while a majority of them has it.
///
/// It goes on when a minority of the servers is lost, which no lock on one server does. It does not help against
/// a pause of the holder: for that there is the [`token`](QuorumGuard::token), as with one server. Which of the two is needed
/// says [Choosing](crate::manual::choosing).
///
/// It has the verbs of a [`Lock`](crate::Lock). On each server it is a plain lock of the same name, renewed by that
/// server's client. It is not re-entrant: a second acquisition waits, for its own flow of work too.
///
/// # What it needs
///
/// * **Servers without replication between them**, three or five, each by a client of its own, and the same in
///   every process. Of an even number more must answer and no more may be lost; it is allowed, because servers are added and
///   taken away one at a time (any majority of *n* and any of *n* + 1 have a server in common).
/// * **The same leases everywhere**, or [`longest_lease`](Self::longest_lease).
/// * **A server that was started again has forgotten.** It takes part in no new hold before the longest lease
///   has passed since it was started, by its own `INFO`, whether or not it has kept its data. That goes for the first start as well.
///   A hold that is there is taken there again, at once.
/// * **Nobody empties a server that runs** (`FLUSHALL`, eviction), and no replica takes its place: that cannot be told.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::{LockClient, QuorumLock};
///
/// let servers = [LockClient::in_memory(), LockClient::in_memory(), LockClient::in_memory()];
/// let mut lock = QuorumLock::new(servers, "leader");
/// let guard = lock.acquire().await?;
/// println!("leader under token {}", guard.token()?);
/// guard.release().await.into_result().expect("held all the time");
/// # Ok(()) }
/// ```
#[must_use = "a lock does nothing until it is acquired"]
pub struct QuorumLock {
    clients: Vec<LockClient>,
    name: Arc<str>,
    lease: Option<Duration>,
    longest: Option<Duration>,
}

/// What every part of one acquisition knows.
struct Plan {
    clients: Vec<LockClient>,
    name: Arc<str>,
    lease: Option<Duration>,
    longest: Duration,
}

/// The hold on one server.
struct Member {
    at: usize,
    guard: LockGuard,
    /// The server may have forgotten a hold of somebody else's.
    young: bool,
}

/// What one server answered, or failed to.
enum Event {
    Asked(usize, Result<Option<Member>, Error>),
    Remembered(Member, Result<(), Error>),
}

/// Those who owe an answer.
struct Asking {
    plan: Arc<Plan>,
    events: FuturesUnordered<BoxFuture<Event>>,
    /// By number: asked, and neither a member nor given up yet.
    open: Vec<bool>,
}

/// How one attempt at all servers ended.
enum Round {
    Held(QuorumGuard),
    /// Others have too many of them.
    Busy,
    /// Too many of them cannot be counted on; `silent` if that is not for their youth alone.
    Failed {
        error: Error,
        silent: bool,
    },
}

impl QuorumLock {
    /// The lock `name` on the servers of `clients`: three or more, each server once. No I/O; what cannot work is an
    /// [`Error::Config`] of the verb.
    pub fn new(clients: impl IntoIterator<Item = LockClient>, name: impl Into<Arc<str>>) -> Self {
        Self {
            clients: clients.into_iter().collect(),
            name: name.into(),
            lease: None,
            longest: None,
        }
    }

    /// Asks for a fixed lease that nobody renews, as [`Lock::lease`](crate::Lock::lease). A server that is lost is not
    /// joined again then.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
    }

    /// The longest lease that anybody gives this name: so long a server that was started again counts for no new
    /// hold. By default the longest of this lock's own and its clients'.
    pub fn longest_lease(mut self, longest: Duration) -> Self {
        self.longest = Some(longest);
        self
    }

    /// The name of the lock.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Waits for a majority of the servers, however long others hold it.
    ///
    /// All are asked at once, and again after a random time (a quarter of a second at most) while others hold it. Two round trips
    /// where it is free: to take it, and to have its token remembered. A server that is slow or dead is not waited for.
    ///
    /// # Errors
    ///
    /// * [`Error::Unreachable`], [`Error::Indeterminate`]: a majority could not be counted on for one default lease
    ///   (30 s). Nothing is held; what unanswered attempts took is released in the background.
    /// * [`Error::Conflict`], [`Error::Denied`], [`Error::OutOfMemory`], [`Error::Closed`]: as [`Lock::acquire`](crate::Lock::acquire), if
    ///   too many servers or clients say so.
    /// * [`Error::Config`]: a bad name or setting, fewer than three clients, or one server twice.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing held on any server: each gets its release in the background.
    ///
    /// # Panics
    ///
    /// In a Tokio runtime without timers (`enable_time`).
    pub async fn acquire(&mut self) -> Result<QuorumGuard, Error> {
        self.granted(Budget::Unlimited).await
    }

    /// As [`acquire`](Self::acquire), for at most `timeout`. Zero makes one attempt.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] when others held it; [`Error::Unreachable`] or [`Error::Indeterminate`] when a majority of the
    /// servers could not be counted on; otherwise as [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub async fn acquire_timeout(&mut self, timeout: Duration) -> Result<QuorumGuard, Error> {
        let budget = match self.clients.first() {
            Some(first) if !timeout.is_zero() => {
                Budget::Until(later(first.engine().now(), timeout))
            }
            _ => Budget::Once,
        };
        self.granted(budget).await
    }

    /// Takes the lock if a majority of the servers has it free: one attempt at each, no waiting for others.
    ///
    /// `None` also where several asked at the same time and none of them got a majority.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), after two command timeouts (2 s by default) at most.
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub async fn try_acquire(&mut self) -> Result<Option<QuorumGuard>, Error> {
        match self.plan()?.round(None).await? {
            Round::Held(guard) => Ok(Some(guard)),
            Round::Busy => Ok(None),
            Round::Failed { error, .. } => Err(error),
        }
    }

    /// Acquires the lock, does `work`, and releases; stops the work when the majority is lost.
    ///
    /// As [`Lock::run`](crate::Lock::run): the work's own error wins; work that succeeded under a lock that turns out lost is
    /// [`Error::Lost`]; an unconfirmed release is not an error.
    ///
    /// # Errors
    ///
    /// Those of [`acquire`](Self::acquire) and of `work`, and [`Error::Lost`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work and releases in the background.
    pub async fn run<T, E, F>(&mut self, work: F) -> Result<T, E>
    where
        E: From<Error>,
        F: AsyncFnOnce(&QuorumGuard) -> Result<T, E>,
    {
        let guard = self.acquire().await?;
        let value = guard.run(work(&guard)).await??;
        match guard.release().await {
            ReleaseOutcome::Lost(reason) => Err(lost(&self.name, reason).into()),
            _ => Ok(value),
        }
    }

    /// What was set, if it can work.
    fn plan(&self) -> Result<Arc<Plan>, Error> {
        let engines: Vec<_> = self.clients.iter().map(LockClient::engine).collect();
        if engines.len() < 3 {
            return Err(Error::config(
                "a quorum lock has three clients or more, each of a server of its own",
            ));
        }
        let mut longest = self.lease.unwrap_or_default();
        for client in &self.clients {
            let mut lock = client.lock(Arc::clone(&self.name));
            if let Some(lease) = self.lease {
                lock = lock.lease(lease);
            }
            longest = longest.max(lock.terms()?.lease);
        }
        if let Some(all) = self.longest {
            validate_lease("the longest lease", all)?;
            if all < longest {
                return Err(Error::config(format!(
                    "the longest lease of a quorum lock is {all:?}, but it has one of {longest:?} itself"
                )));
            }
            longest = all;
        }
        let plan = Plan {
            clients: self.clients.clone(),
            name: Arc::clone(&self.name),
            lease: self.lease,
            longest,
        };
        plan.check_servers()?;
        Ok(Arc::new(plan))
    }

    async fn granted(&self, budget: Budget) -> Result<QuorumGuard, Error> {
        let plan = self.plan()?;
        let engine = plan.engine(0);
        let started = engine.now();
        let end = match budget {
            Budget::Until(end) => Some(end),
            Budget::Unlimited | Budget::Once => None,
        };
        let mut silent_since = None;
        let mut wait = FIRST_WAIT;
        loop {
            let (error, silent) = match plan.round(end).await? {
                Round::Held(guard) => return Ok(guard),
                Round::Busy => (None, false),
                Round::Failed { error, silent } => (Some(error), silent),
            };
            let now = engine.now();
            silent_since = silent.then(|| silent_since.unwrap_or(now));
            let given_up =
                silent_since.is_some_and(|since| now >= later(since, engine.config.lease));
            // Between half and all of it, so that those who met do not meet again.
            let part = u32::from(engine.env.random().to_le_bytes()[0]);
            let next = later(now, wait / 2 + (wait / 2) * part / 255);
            wait = (wait * 2).min(LONGEST_WAIT);
            let over = matches!(budget, Budget::Once) || end.is_some_and(|end| next >= end);
            match error {
                Some(error) if over || given_up || !error.is_retryable() => return Err(error),
                None if over => {
                    if let Some(end) = end {
                        engine.env.sleep_until(end).await;
                    }
                    let waited = engine.now() - started;
                    return Err(engine.timed_out(Kind::Plain, &plan.name, waited));
                }
                _ => engine.env.sleep_until(next).await,
            }
        }
    }
}

impl fmt::Debug for QuorumLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuorumLock")
            .field("clients", &self.clients)
            .field("lease", &self.lease)
            .finish_non_exhaustive()
    }
}

impl Plan {
    fn engine(&self, at: usize) -> &Arc<Engine> {
        self.clients[at].engine()
    }

    fn majority(&self) -> usize {
        self.clients.len() / 2 + 1
    }

    /// One attempt at one server.
    async fn take(&self, at: usize) -> Result<Option<Member>, Error> {
        let client = &self.clients[at];
        // Of a flow of work of its own: it must not enter a hold again that another attempt left.
        let mut lock = client.lock(Arc::clone(&self.name));
        if let Some(lease) = self.lease {
            lock = lock.lease(lease);
        }
        let asked = client.engine().now();
        let guard = lock.try_acquire().await?;
        // The server that answered, or a later one: then this hold is lost anyway.
        let run = client.engine().store.run();
        let young = !run.is_some_and(|run| run.remembers(self.longest, asked));
        Ok(guard.map(|guard| Member { at, guard, young }))
    }

    /// Has the token remembered on one server.
    async fn raise(&self, hold: &Hold, token: u64) -> Result<(), Error> {
        let engine = &hold.engine;
        let lease = self.lease.unwrap_or(engine.config.lease);
        let rule = TokenRule {
            floor: token,
            ..engine.token_rule(&self.name)
        };
        let op = Op {
            kind: Kind::Plain,
            name: Arc::clone(&self.name),
            verb: Verb::Remember {
                lease_ms: millis(lease),
                token: rule,
            },
        };
        let (reply, outcome) = oneshot::channel();
        let timeout = hold.command_timeout();
        let give_up = later(engine.now(), timeout);
        let job = Job::new(op, timeout, give_up, Box::new(Asked { reply }));
        engine.dispatcher.post(job);
        match outcome.await.unwrap_or(Outcome::Failed(Failure::Closed)) {
            Outcome::Answered(Answered {
                answer: Answer::Remembered { .. },
                server_now_us,
                ..
            }) => {
                // Where the hold passes to another within the client, its token does not come from the server.
                engine.saw_token(&self.name, token, server_now_us);
                Ok(())
            }
            Outcome::Answered(Answered {
                answer: Answer::Refused(refusal),
                ..
            }) => Err(refused(self.name.to_string(), "acquire", refusal)),
            Outcome::Answered(_) | Outcome::Failed(Failure::Closed) => Err(Error::Closed),
            Outcome::Failed(Failure::NotSent(cause)) => Err(self.unreachable(cause)),
            Outcome::Failed(Failure::Unanswered { cause, .. }) => Err(self.unanswered(cause)),
        }
    }

    /// Above all that a majority gave or has seen.
    fn token_above(&self, members: &[Member]) -> u64 {
        let seen = members.iter().map(|member| {
            let hold = member.guard.hold();
            let floor = hold.engine.token_rule(&self.name).floor;
            hold.token.value().max(floor)
        });
        seen.max().unwrap_or_default().saturating_add(1)
    }

    /// Asks all servers at once, until a majority holds it under a token that a majority remembers, or cannot.
    async fn round(self: &Arc<Self>, end: Option<Instant>) -> Result<Round, Error> {
        let engine = self.engine(0);
        let (all, majority) = (self.clients.len(), self.majority());
        let started = engine.now();
        let mut asking = Asking::new(self);
        (0..all).for_each(|at| asking.ask(at, Duration::ZERO));
        // Those who have it; of these, those who know the token as well are members.
        let mut granted: Vec<Member> = Vec::new();
        let mut members: Vec<Member> = Vec::new();
        let mut token = None;
        let (mut taken, mut errors) = (0, Vec::new());
        let mut patience = None;
        loop {
            let old = |members: &[Member]| members.iter().filter(|it| it.counts()).count();
            if old(&members) >= majority
                && let Some(token) = token
            {
                self.check_servers()?;
                return Ok(Round::Held(QuorumGuard::new(token, members, asking)));
            }
            if token.is_none() && old(&granted) >= majority {
                token = Some(self.token_above(&granted));
            }
            if let Some(token) = token {
                granted.drain(..).for_each(|it| asking.remember(it, token));
            }
            // Others have some of them, and most have answered: the rest is given as long again.
            let answered = taken + granted.len();
            if patience.is_none() && taken > 0 && answered >= majority {
                let now = engine.now();
                patience = Some(later(now, (now - started).max(LEAST_PATIENCE)));
            }
            if old(&granted) + old(&members) + asking.len() < majority {
                break;
            }
            let limit = match (patience.filter(|_| token.is_none()), end) {
                (Some(patience), Some(end)) => Some(patience.min(end)),
                (patience, end) => patience.or(end),
            };
            let event = tokio::select! {
                biased;
                event = asking.next() => event,
                () = sleep(engine, limit) => None,
            };
            match event {
                Some(Event::Asked(_, Ok(Some(member)))) => granted.push(member),
                Some(Event::Asked(_, Ok(None))) => taken += 1,
                Some(Event::Remembered(member, Ok(()))) => members.push(member),
                Some(Event::Asked(_, Err(error)) | Event::Remembered(_, Err(error))) => {
                    errors.push(error);
                }
                None => break,
            }
        }
        self.check_servers()?;
        let young = granted.iter().chain(&members).filter(|it| it.young).count();
        let failed = errors.len() + asking.len() + young;
        if failed <= all - majority {
            return Ok(Round::Busy);
        }
        let silent = errors.len() + asking.len() > 0;
        let error = self.worst(errors, young);
        Ok(Round::Failed { error, silent })
    }

    /// One error for those of a majority: what waiting does not mend, or else the most that can be said.
    fn worst(&self, mut errors: Vec<Error>, young: usize) -> Error {
        let rank = |error: &Error| match error {
            error if !error.is_retryable() => 0,
            Error::OutOfMemory { .. } => 1,
            Error::Indeterminate { .. } => 2,
            _ => 3,
        };
        errors.sort_by_key(rank);
        match errors.into_iter().next() {
            Some(Error::Unreachable { source, .. }) => self.unreachable(Cause::new(source.to_string())),
            Some(error) => error,
            None if young > 0 => self.unreachable(Cause::new(format!(
                "{young} of them were started less than {:?} ago, and may have forgotten who holds it",
                self.longest
            ))),
            None => self.unanswered(Cause::new("no answer in time")),
        }
    }

    fn unreachable(&self, cause: Cause) -> Error {
        let all = self.clients.len();
        Error::Unreachable {
            subject: format!("a majority of the {all} servers for lock `{}`", self.name),
            source: cause.into(),
        }
    }

    fn unanswered(&self, cause: Cause) -> Error {
        Error::Indeterminate {
            name: self.name.to_string(),
            operation: "acquire",
            source: cause.into(),
        }
    }

    /// Refuses one server twice, as far as they tell.
    fn check_servers(&self) -> Result<(), Error> {
        let runs = self
            .clients
            .iter()
            .filter_map(|client| client.engine().store.run());
        let mut ids: Vec<_> = runs.filter_map(|run: Run| run.id).collect();
        ids.sort_unstable();
        if ids.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(Error::config(format!(
                "two clients of quorum lock `{}` are on one server",
                self.name
            )));
        }
        Ok(())
    }
}

impl Asking {
    fn new(plan: &Arc<Plan>) -> Self {
        Self {
            plan: Arc::clone(plan),
            events: FuturesUnordered::new(),
            open: vec![false; plan.clients.len()],
        }
    }

    fn len(&self) -> usize {
        self.events.len()
    }

    /// One attempt at one server, after a while, unless one is under way.
    fn ask(&mut self, at: usize, after: Duration) {
        if std::mem::replace(&mut self.open[at], true) {
            return;
        }
        let plan = Arc::clone(&self.plan);
        self.events.push(Box::pin(async move {
            let engine = plan.engine(at);
            if !after.is_zero() {
                engine.env.sleep_until(later(engine.now(), after)).await;
            }
            Event::Asked(at, plan.take(at).await)
        }));
    }

    /// Has the token remembered by one who granted.
    fn remember(&mut self, member: Member, token: u64) {
        let plan = Arc::clone(&self.plan);
        self.events.push(Box::pin(async move {
            let remembered = plan.raise(member.guard.hold(), token).await;
            Event::Remembered(member, remembered)
        }));
    }

    async fn next(&mut self) -> Option<Event> {
        let event = self.events.next().await?;
        match &event {
            Event::Asked(_, Ok(Some(_))) => {}
            Event::Asked(at, _) => self.open[*at] = false,
            Event::Remembered(member, _) => self.open[member.at] = false,
        }
        Some(event)
    }
}

impl Member {
    /// Whether it counts for a new hold.
    fn counts(&self) -> bool {
        !self.young && self.guard.is_held()
    }
}

/// Completes at `limit`; never without one.
async fn sleep(engine: &Engine, limit: Option<Instant>) {
    match limit {
        Some(limit) => engine.env.sleep_until(limit).await,
        None => pending().await,
    }
}

fn lost(name: &str, reason: LossReason) -> Error {
    Error::Lost {
        name: name.to_owned(),
        reason,
    }
}

/// A [`QuorumLock`], held by a majority of the servers.
///
/// Each server's hold is renewed on its own, and a server that lost it, or was not there, is joined again in the background.
/// Lost when fewer than a majority hold it, by their own deadlines and this process's clock; then nothing of it is kept.
///
/// # Drop behaviour
///
/// As a [`LockGuard`]: the releases are handed to the clients' backgrounds. To learn the outcome use
/// [`release`](Self::release).
#[must_use = "a guard that is not kept releases the lock at once: bind it to `_guard`, not to `_`"]
pub struct QuorumGuard {
    held: Arc<Held>,
    /// Ends the task that keeps it.
    over: CancellationToken,
}

/// What the guard and its keeper share.
struct Held {
    plan: Arc<Plan>,
    token: u64,
    state: Mutex<State>,
    /// A member came.
    changed: Notify,
    told: CancellationToken,
    loss: OnceLock<LossReason>,
}

#[derive(Default)]
struct State {
    members: Vec<Member>,
    /// Of the member that was lost last.
    last_loss: Option<LossReason>,
    /// Nobody comes in any more.
    closed: bool,
}

impl QuorumGuard {
    fn new(token: u64, members: Vec<Member>, asking: Asking) -> Self {
        let plan = Arc::clone(&asking.plan);
        let held = Arc::new(Held {
            plan: Arc::clone(&plan),
            token,
            state: Mutex::new(State {
                members,
                ..State::default()
            }),
            changed: Notify::new(),
            told: CancellationToken::new(),
            loss: OnceLock::new(),
        });
        let over = CancellationToken::new();
        let kept = Kept(Arc::clone(&held));
        let ended = over.clone();
        let task = async move { kept.keep(asking, ended).await };
        plan.engine(0).env.spawn(Box::pin(task));
        Self { held, over }
    }

    /// The name of the lock.
    pub fn name(&self) -> &str {
        &self.held.plan.name
    }

    /// The token of this hold, for the store to check: above those of all holds of this lock before.
    ///
    /// A majority of the servers remembered it before the lock was handed out. It does not compare with the tokens of
    /// plain locks of the same name. Local; no round trip.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] after the loss.
    pub fn token(&self) -> Result<FencingToken, Error> {
        self.ensure_held()?;
        Ok(FencingToken::new(self.held.token))
    }

    /// Whether a majority holds it, by this process's clock. Needs no task and no round trip.
    pub fn is_held(&self) -> bool {
        self.held.look().is_none()
    }

    /// [`is_held`](Self::is_held), for `?`.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`], with the reason of the loss that broke the majority.
    pub fn ensure_held(&self) -> Result<(), Error> {
        match self.held.look() {
            None => Ok(()),
            Some(reason) => Err(lost(self.name(), reason)),
        }
    }

    /// Time left until a majority counts as lost unless it is renewed; zero when it is lost.
    pub fn remaining(&self) -> Duration {
        if self.held.look().is_some() {
            return Duration::ZERO;
        }
        let state = self.held.state.lock();
        let mut left: Vec<_> = state
            .members
            .iter()
            .map(|it| it.guard.remaining())
            .collect();
        left.sort_unstable_by(|a, b| b.cmp(a));
        left.get(self.held.plan.majority() - 1)
            .copied()
            .unwrap_or_default()
    }

    /// How many servers hold it now. All of them, unless some were slow, lost, or are being joined again.
    pub fn servers(&self) -> usize {
        match self.held.look() {
            None => self.held.state.lock().members.len(),
            Some(_) => 0,
        }
    }

    /// A token that is cancelled when the majority is lost, and never by a normal release. It is a child, as that of
    /// [`LockGuard::lost`].
    pub fn lost(&self) -> CancellationToken {
        let _ = self.held.look();
        self.held.told.child_token()
    }

    /// Why the majority was lost; `None` while it holds.
    pub fn loss_reason(&self) -> Option<LossReason> {
        self.held.look()
    }

    /// Does `work`, but no longer than a majority holds the lock; as [`LockGuard::run`].
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if the majority was lost before `work` was done.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `work`; the guard stays as it is.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output, Error> {
        let told = async { lost(self.name(), self.held.until_lost().await) };
        run_while(|| self.ensure_held().err(), told, work).await
    }

    /// Leaves all servers, and says how that went: `Released` once a majority has confirmed it, so that one that is
    /// slow or dead is not waited for.
    ///
    /// `Lost` if the majority had been lost before; `Unconfirmed` after one command timeout (1 s by default) without a majority of answers. The
    /// background goes on after that.
    ///
    /// # Cancel safety
    ///
    /// The releases happen even if the future is dropped; only the outcome is missed.
    pub async fn release(self) -> ReleaseOutcome {
        if let Some(reason) = self.held.look() {
            return ReleaseOutcome::Lost(reason);
        }
        let majority = self.held.plan.majority();
        let members = self.held.close();
        self.over.cancel();
        let mut held = members.len();
        let releases = members.into_iter().map(|member| member.guard.release());
        let mut releases: FuturesUnordered<_> = releases.collect();
        let (mut released, mut longest) = (0, Duration::ZERO);
        while let Some(outcome) = releases.next().await {
            match outcome {
                ReleaseOutcome::Released | ReleaseOutcome::StillHeld { .. } => released += 1,
                ReleaseOutcome::Unconfirmed { at_most } => longest = longest.max(at_most),
                ReleaseOutcome::Lost(reason) => {
                    held -= 1;
                    if held < majority {
                        return ReleaseOutcome::Lost(reason);
                    }
                }
            }
            if released >= majority {
                return ReleaseOutcome::Released;
            }
        }
        ReleaseOutcome::Unconfirmed { at_most: longest }
    }
}

impl Drop for QuorumGuard {
    fn drop(&mut self) {
        // Whoever waits for `lost()` hears of a loss that nobody has looked at.
        let _ = self.held.look();
        let members = self.held.close();
        self.over.cancel();
        drop(members);
    }
}

impl fmt::Debug for QuorumGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuorumGuard")
            .field("name", &self.held.plan.engine(0).loggable(self.name()))
            .field("loss", &self.held.loss.get())
            .finish_non_exhaustive()
    }
}

impl Held {
    /// Looks at the members by the clock: lets go of those that are lost, and of all if no majority is left. Why it
    /// was lost, if it was.
    fn look(&self) -> Option<LossReason> {
        let mut gone = Vec::new();
        {
            let mut state = self.state.lock();
            let members = std::mem::take(&mut state.members);
            for member in members {
                match member.guard.loss_reason() {
                    None => state.members.push(member),
                    Some(reason) => {
                        state.last_loss = Some(reason);
                        gone.push(member);
                    }
                }
            }
            if !state.closed && state.members.len() < self.plan.majority() {
                let reason = state.last_loss.unwrap_or(LossReason::DeadlinePassed);
                self.note(&mut state, reason, &mut gone);
            }
        }
        drop(gone);
        self.loss.get().copied()
    }

    /// Lost for `reason`, whoever still has it.
    fn end(&self, reason: LossReason) {
        let mut gone = Vec::new();
        let mut state = self.state.lock();
        if !state.closed {
            self.note(&mut state, reason, &mut gone);
        }
        drop(state);
    }

    fn note(&self, state: &mut State, reason: LossReason, gone: &mut Vec<Member>) {
        state.closed = true;
        gone.append(&mut state.members);
        let _ = self.loss.set(reason);
        self.told.cancel();
    }

    /// Takes one more in, if the lock is still held; so there is no moment without a majority in between.
    fn add(&self, member: Member) {
        if self.look().is_some() {
            return;
        }
        let mut state = self.state.lock();
        if !state.closed {
            state.members.push(member);
            drop(state);
            self.changed.notify_waiters();
        }
    }

    /// All members, to be released.
    fn close(&self) -> Vec<Member> {
        let mut state = self.state.lock();
        state.closed = true;
        std::mem::take(&mut state.members)
    }

    fn absent(&self) -> Vec<usize> {
        let state = self.state.lock();
        let here = |at: &usize| state.members.iter().any(|member| member.at == *at);
        (0..self.plan.clients.len())
            .filter(|at| !here(at))
            .collect()
    }

    /// Completes when a member comes or is lost, with timers of its own.
    async fn change(&self) {
        let changed = self.changed.notified();
        let holds: Vec<Arc<Hold>> = {
            let state = self.state.lock();
            let guards = state.members.iter().map(|member| &member.guard);
            guards.map(|guard| Arc::clone(guard.hold())).collect()
        };
        if holds.is_empty() {
            return;
        }
        tokio::select! {
            () = changed => {}
            _ = any_lost(holds) => {}
        }
    }

    async fn until_lost(&self) -> LossReason {
        loop {
            let change = self.change();
            if let Some(reason) = self.look() {
                return reason;
            }
            change.await;
        }
    }
}

/// Held by the keeper. If that is dropped with its runtime, nobody keeps the lock.
struct Kept(Arc<Held>);

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.end(LossReason::ClientClosed);
    }
}

impl Kept {
    /// Takes in those who answer late, joins again those who lost it, and tells of the loss.
    async fn keep(self, mut asking: Asking, over: CancellationToken) {
        let held = &self.0;
        while held.look().is_none() {
            if held.plan.lease.is_none() {
                for at in held.absent() {
                    asking.ask(at, held.rejoin_wait());
                }
            }
            let event = tokio::select! {
                biased;
                () = over.cancelled() => break,
                () = held.change() => continue,
                Some(event) = asking.next() => event,
            };
            match event {
                Event::Asked(_, Ok(Some(member))) => asking.remember(member, held.token),
                Event::Remembered(member, Ok(())) => held.add(member),
                // Asked again, if it still counts.
                Event::Asked(..) | Event::Remembered(..) => {}
            }
        }
    }
}

impl Held {
    /// A tenth of a lease, so that a server that comes back is joined well within one.
    fn rejoin_wait(&self) -> Duration {
        let lease = self.plan.engine(0).config.lease;
        (lease / 10).min(LONGEST_REJOIN_WAIT)
    }
}

/// Between attempts while others hold it: so long at first, and at most.
const FIRST_WAIT: Duration = Duration::from_millis(16);
const LONGEST_WAIT: Duration = Duration::from_millis(250);

/// How long the last servers are waited for, at least, when most have answered and others have some.
const LEAST_PATIENCE: Duration = Duration::from_millis(10);

const LONGEST_REJOIN_WAIT: Duration = Duration::from_secs(1);
