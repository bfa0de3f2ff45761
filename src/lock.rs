//! `Lock`: a name bound to a flow of work, with its settings, and the verbs.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::validate_lease;
use crate::contend::{Claimed, Wish};
use crate::context::{Flow, Place};
use crate::dispatch::{Answered, Failure, Outcome};
use crate::engine::{Engine, Handle};
use crate::env::later;
use crate::error::Error;
use crate::guard::{Asked, LockGuard, ReleaseOutcome};
use crate::hold::{Entered, Hold, Terms};
use crate::inspect::{self, Inspection};
use crate::key::validate_name;
use crate::kind::Kind;
use crate::store::{Answer, Cause, Refusal, RefusalKind};

/// A lock: a name, bound to the flow of work that would hold it, with its settings.
///
/// Making one costs nothing and talks to nobody. The verbs want `&mut`, so that one `Lock` has one
/// acquisition under way; make another `Lock` for another.
///
/// # What it promises, and what not
///
/// No two owners are both told "held" while the server keeps its data and its clock makes no jump;
/// docs/guarantees.md has the conditions in full. Where a violation would corrupt data, let the store
/// check the [`fencing_token`](LockGuard::fencing_token).
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::LockClient;
/// use std::time::Duration;
///
/// let client = LockClient::in_memory();
/// let guard = client.lock("report").acquire_timeout(Duration::from_secs(2)).await?;
/// assert!(client.lock("report").try_acquire().await?.is_none()); // another contender
/// guard.release().await.into_result().expect("held all the time");
/// # Ok(()) }
/// ```
#[must_use = "a lock does nothing until it is acquired"]
pub struct Lock {
    handle: Arc<Handle>,
    flow: Arc<Flow>,
    kind: Kind,
    name: Arc<str>,
    lease: Option<Duration>,
    max_hold: Option<Duration>,
}

/// How long a caller will wait.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Budget {
    Unlimited,
    Until(Instant),
    Once,
}

impl Lock {
    pub(crate) fn new(handle: Arc<Handle>, flow: Arc<Flow>, kind: Kind, name: Arc<str>) -> Self {
        Self {
            handle,
            flow,
            kind,
            name,
            lease: None,
            max_hold: None,
        }
    }

    /// Asks for a fixed lease that nobody renews: the hold ends after `lease` unless it is
    /// [extended](LockGuard::extend).
    ///
    /// From 100 ms to one year, in whole milliseconds; anything else is [`Error::Config`] of the verb.
    /// Without this the client's default lease (30 s) is used, and renewed.
    ///
    /// Of a nested level: a hold is renewed as long as one of its levels is, and a shorter lease shortens
    /// nothing.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
    }

    /// Bounds the time the lock is held, renewals or not: at the end the hold is lost with
    /// [`LossReason::MaxHold`](crate::LossReason::MaxHold), and the lease is made to end there.
    ///
    /// The smallest of the levels of a hold counts. A nested level cannot shorten the lease the server has
    /// given already: with a guard that is never dropped the server frees it one lease later. Same range as [`lease`](Self::lease).
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.max_hold = Some(max_hold);
        self
    }

    /// The name of the lock.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Waits for the lock, however long others hold it.
    ///
    /// If this flow of work holds the lock already, the hold count rises and nothing is waited for.
    /// One round trip when the lock is free; waiting adds one subscription per client and name.
    /// Waiters of one client are served in order of arrival.
    ///
    /// # Errors
    ///
    /// * [`Error::Unreachable`], [`Error::Indeterminate`]: the server gave no answer for one default
    ///   lease (30 s). Nothing is held; what an unanswered attempt took is released in the background.
    /// * [`Error::WouldDeadlock`]: this flow of work reads, and this is the [`write`](crate::RwLock::write)
    ///   side of the same lock.
    /// * [`Error::Lost`]: this flow of work has a hold of this name that was lost, and its guards are
    ///   still alive. Drop them first.
    /// * [`Error::Conflict`], [`Error::Denied`], [`Error::OutOfMemory`]: as the server says.
    /// * [`Error::Closed`]: the client was closed, or its runtime ended.
    /// * [`Error::Config`]: a bad name or setting; nothing was sent.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up the place in line and leaves nothing held: a grant under way is
    /// released when its answer arrives, at the latest one command timeout (1 s by default) later.
    ///
    /// # Panics
    ///
    /// In a Tokio runtime without timers (`enable_time`). Outside of any runtime it works.
    pub async fn acquire(&mut self) -> Result<LockGuard, Error> {
        match self.enter(Budget::Unlimited).await? {
            Some(guard) => Ok(guard),
            None => Err(self.timed_out(Duration::ZERO)),
        }
    }

    /// Waits for the lock for at most `timeout`, which covers connecting, waiting and clean-up.
    ///
    /// Zero makes one attempt.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] when others held it all the time; [`Error::Unreachable`] or
    /// [`Error::Indeterminate`] when the server gave no answer for `timeout`, or for one default lease
    /// (30 s) if that is less; otherwise as
    /// [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub async fn acquire_timeout(&mut self, timeout: Duration) -> Result<LockGuard, Error> {
        let started = self.engine().now();
        let budget = if timeout.is_zero() {
            Budget::Once
        } else {
            Budget::Until(later(started, timeout))
        };
        match self.enter(budget).await? {
            Some(guard) => Ok(guard),
            None => Err(self.timed_out(self.engine().now() - started)),
        }
    }

    /// Takes the lock if it is free: one attempt, one round trip, no waiting.
    ///
    /// `None` when others hold it, when others of this client stand in line for it (it never overtakes),
    /// or when another task of this same flow is acquiring it. Beware that `#[must_use]` cannot see into the `Option`: `try_acquire().await?;`
    /// releases at once.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), after one command timeout (1 s by default) at most.
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub async fn try_acquire(&mut self) -> Result<Option<LockGuard>, Error> {
        self.enter(Budget::Once).await
    }

    /// Acquires the lock, does `work`, and releases; stops the work when the lock is lost.
    ///
    /// The work's own error wins. Work that succeeded under a lock that turns out lost is
    /// [`Error::Lost`]; an unconfirmed release is not an error, because the work was done while the
    /// lock was held.
    ///
    /// # Errors
    ///
    /// Those of [`acquire`](Self::acquire) and of `work`, and [`Error::Lost`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work and releases the lock in the background.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
    /// # let client = leasehold::LockClient::in_memory();
    /// let rows = client
    ///     .lock("import")
    ///     .run(async |guard| {
    ///         let token = guard.fencing_token()?;
    ///         Ok::<_, leasehold::Error>(token.value().min(3))
    ///     })
    ///     .await?;
    /// # assert_eq!(rows, 3); Ok(()) }
    /// ```
    pub async fn run<T, E, F>(&mut self, work: F) -> Result<T, E>
    where
        E: From<Error>,
        F: AsyncFnOnce(&LockGuard) -> Result<T, E>,
    {
        let guard = self.acquire().await?;
        self.work(guard, work).await
    }

    /// As [`run`](Self::run), but waits for the lock for at most `timeout`, as
    /// [`acquire_timeout`](Self::acquire_timeout) does. The work may take as long as it likes.
    ///
    /// # Errors
    ///
    /// Those of [`acquire_timeout`](Self::acquire_timeout) and of `work`, and [`Error::Lost`].
    ///
    /// # Cancel safety
    ///
    /// As [`run`](Self::run).
    pub async fn run_timeout<T, E, F>(&mut self, timeout: Duration, work: F) -> Result<T, E>
    where
        E: From<Error>,
        F: AsyncFnOnce(&LockGuard) -> Result<T, E>,
    {
        let guard = self.acquire_timeout(timeout).await?;
        self.work(guard, work).await
    }

    async fn work<T, E, F>(&self, guard: LockGuard, work: F) -> Result<T, E>
    where
        E: From<Error>,
        F: AsyncFnOnce(&LockGuard) -> Result<T, E>,
    {
        let done = guard.run(work(&guard)).await?;
        let value = done?;
        match guard.release().await {
            ReleaseOutcome::Lost(reason) => Err(Error::Lost {
                name: self.name.to_string(),
                reason,
            }
            .into()),
            _ => Ok(value),
        }
    }

    /// Who holds the lock now, by looking at the server. Changes nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Unreachable`] or [`Error::Indeterminate`] without an answer within the command
    /// timeout; [`Error::Conflict`] when the key is not a lock; [`Error::Denied`]; [`Error::Closed`];
    /// [`Error::Config`] for a bad name.
    ///
    /// # Cancel safety
    ///
    /// Safe: it only reads.
    pub async fn inspect(&self) -> Result<Inspection, Error> {
        inspect::inspect(self.engine(), self.kind, &self.name).await
    }

    /// Frees the lock by force: looks who holds it, then removes that owner only, so that a later hold is
    /// never touched. Whether something was removed.
    ///
    /// Its holder is told: at once if it belongs to this client
    /// ([`LossReason::Forced`](crate::LossReason::Forced)), otherwise at its next renewal or release.
    /// Until then two may believe that they hold it. This is for operators.
    ///
    /// # Errors
    ///
    /// * [`Error::Unreachable`], [`Error::Indeterminate`]: no answer within the command timeout. May
    ///   be repeated.
    /// * [`Error::Conflict`], [`Error::Denied`], [`Error::Closed`], [`Error::Config`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves open whether the owner was removed.
    pub async fn force_release(&self) -> Result<bool, Error> {
        inspect::force_release(self.engine(), self.kind, &self.name).await
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.handle.engine
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    pub(crate) fn shared_name(&self) -> &Arc<str> {
        &self.name
    }

    /// Whether it and `other` are for the same flow of work.
    pub(crate) fn is_of_flow_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.flow, &other.flow)
    }

    /// Asks for what a hold would have that was entered by this lock and by `other`: renewed if one of them is,
    /// for the smaller `max_hold`.
    pub(crate) fn join_settings(&mut self, other: &Self) {
        self.lease = self
            .lease
            .zip(other.lease)
            .map(|(one, other)| one.max(other));
        let bound = |lock: &Self| lock.max_hold.or(lock.engine().config.max_hold);
        self.max_hold = bound(self).into_iter().chain(bound(other)).min();
    }

    pub(crate) fn terms(&self) -> Result<Terms, Error> {
        validate_name(&self.name)?;
        let config = &self.engine().config;
        if let Some(lease) = self.lease {
            validate_lease("a lease", lease)?;
        }
        if let Some(max_hold) = self.max_hold {
            validate_lease("max_hold", max_hold)?;
        }
        Ok(Terms {
            lease: self.lease.unwrap_or(config.lease),
            renewed: self.lease.is_none(),
            max_hold: self.max_hold.or(config.max_hold),
        })
    }

    pub(crate) async fn enter(&self, budget: Budget) -> Result<Option<LockGuard>, Error> {
        let terms = self.terms()?;
        let engine = self.engine();
        let started = engine.now();
        let place = self.flow.place(self.kind, &self.name);
        let _gate = match (place.try_enter(), budget) {
            (Some(gate), _) => gate,
            (None, Budget::Once) => {
                engine.ensure_open()?;
                return Ok(None);
            }
            (None, Budget::Unlimited | Budget::Until(_)) => {
                let entered = self.within(&engine.stopped, budget, place.enter());
                // What is rare has room of its own, so that it takes none where thousands wait.
                let entered = Box::pin(entered).await?;
                entered.ok_or_else(|| self.behind_own_flow(started))?
            }
        };
        if engine.stopped.is_cancelled() {
            return Err(Error::Closed);
        }
        if let Some(hold) = place.hold() {
            match hold.enter(self.kind, &terms) {
                Entered::Level { level, depth } => {
                    let guard = self.guard(place, &hold, level);
                    Box::pin(self.nested(&guard, depth, &terms, budget)).await?;
                    return Ok(Some(guard));
                }
                Entered::Within { level, lengthen } => {
                    let guard = self.guard(place, &hold, level);
                    if lengthen {
                        let renewed = guard.renew("acquire", terms.lease);
                        Box::pin(self.within(&engine.stopped, budget, renewed))
                            .await?
                            .ok_or_else(|| self.timed_out(engine.now() - started))??;
                    }
                    return Ok(Some(guard));
                }
                Entered::WouldDeadlock => {
                    return Err(Error::WouldDeadlock {
                        name: self.name.to_string(),
                    });
                }
                Entered::Lost(reason) => {
                    return Err(Error::Lost {
                        name: self.name.to_string(),
                        reason,
                    });
                }
                Entered::Over => {}
            }
        }
        engine.ensure_open()?;
        let Some((hold, level)) = self.first(&terms, budget).await? else {
            return Ok(None);
        };
        place.remember(&hold);
        Ok(Some(self.guard(place, &hold, level)))
    }

    fn guard(&self, place: Place, hold: &Arc<Hold>, level: u32) -> LockGuard {
        let (handle, flow) = (Arc::clone(&self.handle), Arc::clone(&self.flow));
        LockGuard::new(handle, flow, place, Arc::clone(hold), level)
    }

    /// The first level of a hold: in line with everybody else.
    async fn first(&self, terms: &Terms, budget: Budget) -> Result<Option<Claimed>, Error> {
        let engine = self.engine();
        let wish = Wish {
            terms: *terms,
            once: matches!(budget, Budget::Once),
        };
        // Once for all of it: waiting for a permit is part of the attempt.
        let budget = self.at_most_once(budget, terms);
        let permits = Arc::clone(&engine.permits);
        let permit = match Arc::clone(&permits).try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => match Box::pin(self.within(&engine.closing, budget, permits.acquire_owned()))
                .await?
            {
                Some(Ok(permit)) => permit,
                Some(Err(_)) => return Err(Error::Closed),
                None => {
                    return Err(self.unreachable(Cause::new("too many requests without an answer")));
                }
            },
        };
        let Some(mut ticket) = engine
            .queues
            .join(engine, self.kind, &self.name, wish, permit)
        else {
            return Ok(None);
        };
        let claim = poll_fn(|cx| ticket.poll_claim(cx));
        match self.within(&engine.closing, budget, claim).await? {
            Some(claimed) => claimed,
            None => Err(ticket.out_of_time()),
        }
    }

    /// Another level of a hold this flow has.
    async fn nested(
        &self,
        guard: &LockGuard,
        count: u32,
        terms: &Terms,
        budget: Budget,
    ) -> Result<(), Error> {
        let engine = self.engine();
        let hold = guard.hold();
        let give_up = match self.at_most_once(budget, terms) {
            Budget::Until(end) => end,
            Budget::Unlimited | Budget::Once => later(engine.now(), engine.config.lease),
        };
        let (reply, answer) = oneshot::channel();
        engine
            .dispatcher
            .post(hold.nested(count, terms.lease, give_up, Box::new(Asked { reply })));
        let unanswered = |cause: Cause| Error::Indeterminate {
            name: self.name.to_string(),
            operation: "acquire",
            source: cause.into(),
        };
        let answered = async {
            tokio::select! {
                biased;
                outcome = answer => Ok(outcome.unwrap_or(Outcome::Failed(Failure::Closed))),
                reason = hold.until_lost() => {
                    Err(Error::Lost { name: self.name.to_string(), reason })
                }
            }
        };
        let outcome = self
            .within(&engine.stopped, Budget::Until(give_up), answered)
            .await?
            .ok_or_else(|| unanswered(Cause::new("no answer in time")))??;
        match outcome {
            Outcome::Answered(Answered {
                answer: Answer::Held { remaining_ms },
                sent,
                ..
            }) => {
                hold.confirmed(sent, remaining_ms);
                guard.ensure_held()
            }
            Outcome::Answered(Answered {
                answer: Answer::Gone(instead),
                ..
            }) => {
                hold.lose(instead.into());
                guard.ensure_held()
            }
            Outcome::Answered(Answered {
                answer: Answer::Refused(refusal),
                ..
            }) => Err(refused(self.name.to_string(), "acquire", refusal)),
            Outcome::Answered(_) | Outcome::Failed(Failure::Closed) => Err(Error::Closed),
            Outcome::Failed(Failure::NotSent(cause)) => Err(self.unreachable(cause)),
            Outcome::Failed(Failure::Unanswered { cause, .. }) => Err(unanswered(cause)),
        }
    }

    /// One attempt lasts one command timeout.
    fn at_most_once(&self, budget: Budget, terms: &Terms) -> Budget {
        let engine = self.engine();
        match budget {
            Budget::Once => {
                let timeout = engine.config.command_timeout_for(terms.first_lease());
                Budget::Until(later(engine.now(), timeout))
            }
            other => other,
        }
    }

    /// Awaits `future` for as long as the budget lasts and nothing is over; `None` when the time is up.
    async fn within<T>(
        &self,
        over: &CancellationToken,
        budget: Budget,
        future: impl Future<Output = T>,
    ) -> Result<Option<T>, Error> {
        let engine = self.engine();
        tokio::select! {
            biased;
            () = over.cancelled() => Err(Error::Closed),
            value = future => Ok(Some(value)),
            () = end_of(engine, budget) => Ok(None),
        }
    }

    /// Another acquisition of this flow was under way all the time: for the lock, or for an answer.
    fn behind_own_flow(&self, started: Instant) -> Error {
        let engine = self.engine();
        let silent = engine.queues.trouble(self.kind, &self.name);
        let silent = silent.or_else(|| Some(self.unreachable(engine.dispatcher.trouble()?)));
        silent.unwrap_or_else(|| self.timed_out(engine.now() - started))
    }

    pub(crate) fn timed_out(&self, waited: Duration) -> Error {
        self.engine().timed_out(self.kind, &self.name, waited)
    }

    fn unreachable(&self, cause: Cause) -> Error {
        Error::Unreachable {
            subject: format!("the server for lock `{}`", self.name),
            source: cause.into(),
        }
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock")
            .field("name", &self.engine().loggable(&self.name))
            .field("kind", &self.kind)
            .field("lease", &self.lease)
            .field("max_hold", &self.max_hold)
            .finish_non_exhaustive()
    }
}

async fn end_of(engine: &Engine, budget: Budget) {
    match budget {
        Budget::Until(end) => engine.env.sleep_until(end).await,
        Budget::Unlimited | Budget::Once => std::future::pending().await,
    }
}

/// The error for a "no" of the server.
pub(crate) fn refused(name: String, operation: &'static str, refusal: Refusal) -> Error {
    let source = Cause::new(refusal.message).into();
    match refusal.kind {
        RefusalKind::Conflict => Error::Conflict { name, source },
        RefusalKind::Denied => Error::Denied {
            subject: format!("the server for lock `{name}`"),
            source,
        },
        RefusalKind::OutOfMemory => Error::OutOfMemory { name, source },
        RefusalKind::Unavailable => Error::Unreachable {
            subject: format!("the server for lock `{name}`"),
            source,
        },
        RefusalKind::Other => Error::Indeterminate {
            name,
            operation,
            source,
        },
    }
}
