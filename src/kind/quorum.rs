//! The quorum lock: one lock on several independent servers, held while a majority has it.

mod guard;

use std::fmt;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::sync::oneshot;
use tokio::time::Instant;

pub use self::guard::QuorumGuard;
use super::Kind;
use crate::client::LockClient;
use crate::config::{millis, validate_lease};
use crate::dispatch::{Answered, Failure, Job, Outcome};
use crate::engine::Engine;
use crate::env::{BoxFuture, later};
use crate::error::Error;
use crate::guard::{Asked, LockGuard, LossReason, ReleaseOutcome};
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
    /// Which run of the server granted it, where that tells.
    run: Option<Arc<str>>,
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
        let (mut silent_since, mut busy) = (None, false);
        let mut wait = FIRST_WAIT;
        loop {
            let (error, silent) = match plan.round(end).await? {
                Round::Held(guard) => return Ok(guard),
                Round::Busy => (None, false),
                // Cut short by the end of the caller's time, and others were there just before.
                Round::Failed { .. } if busy && end.is_some_and(|end| engine.now() >= end) => {
                    (None, false)
                }
                Round::Failed { error, silent } => (Some(error), silent),
            };
            busy = error.is_none();
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
        let young = !run
            .as_ref()
            .is_some_and(|run| run.remembers(self.longest, asked));
        let run = run.and_then(|run| run.id);
        Ok(guard.map(|guard| Member {
            at,
            guard,
            run,
            young,
        }))
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
        let silent = errors.len() + asking.len();
        if silent + young <= all - majority {
            return Ok(Round::Busy);
        }
        let silent = silent > all - majority;
        let error = if silent {
            self.worst(errors)
        } else {
            self.unreachable(Cause::new(format!(
                "{young} of them started less than {:?} ago, and may have forgotten who holds it",
                self.longest
            )))
        };
        Ok(Round::Failed { error, silent })
    }

    /// One error for those of too many servers: what waiting does not mend only if it is that of too many.
    fn worst(&self, mut errors: Vec<Error>) -> Error {
        let lasting = errors.iter().filter(|it| !it.is_retryable()).count();
        let lasting = lasting > self.clients.len() - self.majority();
        errors.retain(|error| lasting != error.is_retryable());
        errors.sort_by_key(|error| match error {
            Error::OutOfMemory { .. } => 0,
            Error::Indeterminate { .. } => 1,
            _ => 2,
        });
        match errors.into_iter().next() {
            Some(Error::Unreachable { source, .. }) => {
                self.unreachable(Cause::new(source.to_string()))
            }
            Some(error) => error,
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

/// Between attempts while others hold it: so long at first, and at most.
const FIRST_WAIT: Duration = Duration::from_millis(16);
const LONGEST_WAIT: Duration = Duration::from_millis(250);

/// How long the last servers are waited for, at least, when most have answered and others have some.
const LEAST_PATIENCE: Duration = Duration::from_millis(10);
