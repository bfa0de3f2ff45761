//! The multi lock: several locks held together, all or none.

use std::cmp::Reverse;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::{join_all, select_all};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::Kind;
use crate::env::later;
use crate::error::Error;
use crate::fencing::FencingToken;
use crate::guard::{LockGuard, LossReason, ReleaseOutcome, run_while};
use crate::hold::Hold;
use crate::lock::{Budget, Lock};

/// Several locks that are held together, all or none: of any kinds, of one client or of several.
///
/// It has the verbs of a [`Lock`], with the same meaning. Its guard is a [`MultiGuard`] and not a
/// [`LockGuard`]: it has one token for each member, and no depth of its own.
///
/// # Order
///
/// Members are taken one after the other, in an order of their own: by name, then by server, writers before
/// readers; whoever waits for one keeps those before it. Everybody takes them in that order, whatever order they
/// were given in, so two multi locks never wait for each other. That holds among multi locks. A flow of work that holds
/// `b` already and then asks for a multi lock of `a` and `b` is out of order: give it a limit
/// ([`acquire_timeout`](Self::acquire_timeout)), or take all at once.
///
/// A server is known by its address, as its client was given it. Only where *one name on several servers* is in a
/// multi lock does that matter for the order: give all processes the same addresses.
///
/// Two members that are one lock (the same name, kind and server) are one member, the first that was given: its
/// context and its client hold it, renewed if one of the two is, for the smaller
/// [`max_hold`](Lock::max_hold). Members that exclude each other are [`Error::Config`].
///
/// # Partial failure
///
/// What was taken is released, in the background, as soon as a later member fails, is not free in time, or the future
/// is dropped. Errors name the member. Each member has its own lease and its own renewals, from the moment it is taken. If
/// one is lost while a later one is waited for (a fixed [`lease`](Lock::lease) that ends, say), all are
/// released and taken afresh, within the same limit; so what is handed out is held, all of it, in that moment.
///
/// Servers are independent: nothing makes the members one transaction. Loss of one member is loss of all for the guard, by
/// the local clock as with any lock; the other members stay on their servers until the guard is dropped.
///
/// # Redisson
///
/// Nothing of a multi lock is on a server but its members, so it excludes Redisson's `RedissonMultiLock` over the
/// same names as it does any holder of them. That one takes its members in the order given: two of it, or it and this
/// one, avoid a deadlock only by giving up and starting again. It also sets the leases of all members once more at the end, without
/// looking whose they are, which can prolong somebody else's lock; here a member's lease is only ever touched by
/// its own renewals. And its leases are those of the whole, and are converted again on each attempt; here they are the
/// members'.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::{LockClient, MultiLock};
///
/// let client = LockClient::in_memory();
/// let mut ctx = client.context();
/// let mut transfer = MultiLock::new([ctx.lock("account:7"), ctx.lock("account:3")]);
/// let guard = transfer.acquire().await?;
/// assert!(client.lock("account:3").try_acquire().await?.is_none());
/// for (name, token) in guard.tokens()? {
///     println!("{name} under token {token}"); // in their order: account:3 first
/// }
/// guard.release().await.into_result().expect("held all the time");
/// # Ok(()) }
/// ```
#[must_use = "a lock does nothing until it is acquired"]
pub struct MultiLock {
    /// In the order in which they are taken.
    members: Vec<Lock>,
    /// Why they cannot be taken together.
    problem: Option<String>,
}

/// How an attempt at all members ended.
enum Round<'a> {
    All(MultiGuard),
    /// This one was not free at once.
    Busy(&'a Lock),
    /// One was lost before all were there.
    Lost(Error),
}

impl MultiLock {
    /// The locks of `members`, together. No I/O; what cannot work (no member, members that exclude each other, a bad
    /// name or setting) is an [`Error::Config`] of the verb.
    pub fn new(members: impl IntoIterator<Item = Lock>) -> Self {
        let mut members: Vec<Lock> = members.into_iter().collect();
        members.sort_by_cached_key(Seat::of);
        members.dedup_by(|later, first| {
            let same = Seat::of(later) == Seat::of(first);
            if same {
                first.join_settings(later);
            }
            same
        });
        let problem = if members.is_empty() {
            Some("a multi lock has at least one member".to_owned())
        } else {
            let pair = members
                .windows(2)
                .find(|pair| exclude_each_other(&pair[0], &pair[1]));
            pair.map(|pair| {
                format!(
                    "lock `{}` is in a multi lock twice, by kinds or flows of work that exclude each other",
                    pair[0].name()
                )
            })
        };
        Self { members, problem }
    }

    /// The names of the members, in the order in which they are taken.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.members.iter().map(Lock::name)
    }

    /// Waits for all members, however long others hold them.
    ///
    /// One after the other, each as [`Lock::acquire`] does: one round trip for each that is free. Those that
    /// this flow of work holds already are entered again.
    ///
    /// # Errors
    ///
    /// Those of [`Lock::acquire`], which name the member (but for [`Error::Closed`]: one of the clients is); then nothing
    /// is held. [`Error::Config`] also for what [`new`](Self::new) says.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up the place in line, and releases in the background those that were taken.
    ///
    /// # Panics
    ///
    /// In a Tokio runtime without timers (`enable_time`).
    pub async fn acquire(&mut self) -> Result<MultiGuard, Error> {
        self.granted(Budget::Unlimited).await
    }

    /// Waits for all members for at most `timeout`: one limit for all of them together.
    ///
    /// Zero makes one attempt at each, as [`try_acquire`](Self::try_acquire).
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] with the member that was not free, and the time of the whole call; otherwise those of
    /// [`Lock::acquire_timeout`], of the member. Nothing is held.
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub async fn acquire_timeout(&mut self, timeout: Duration) -> Result<MultiGuard, Error> {
        let budget = match self.members.first() {
            Some(first) if !timeout.is_zero() => {
                Budget::Until(later(first.engine().now(), timeout))
            }
            _ => Budget::Once,
        };
        self.granted(budget).await
    }

    /// Takes all members if all are free: one attempt and one round trip for each, no waiting.
    ///
    /// `None` at the first that is not free, as [`Lock::try_acquire`] says; those before it are released in the
    /// background.
    ///
    /// # Errors
    ///
    /// Those of [`Lock::try_acquire`], of the member, each after one command timeout (1 s by default) at most; and
    /// [`Error::Lost`] if one was lost before the last was there. Nothing is held.
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub async fn try_acquire(&mut self) -> Result<Option<MultiGuard>, Error> {
        Ok(self.gather(Budget::Once).await?.ok())
    }

    /// Acquires all members, does `work`, and releases; stops the work when one of them is lost.
    ///
    /// As [`Lock::run`]: the work's own error wins; work that succeeded under a member that turns out lost is
    /// [`Error::Lost`] with its name; an unconfirmed release is not an error.
    ///
    /// # Errors
    ///
    /// Those of [`acquire`](Self::acquire) and of `work`, and [`Error::Lost`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work and releases in the background.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
    /// # use leasehold::{LockClient, MultiLock};
    /// # let client = LockClient::in_memory();
    /// let mut both = MultiLock::new(["account:3", "account:7"].map(|name| client.lock(name)));
    /// let moved = both
    ///     .run(async |guard| {
    ///         let tokens = guard.tokens()?; // one for each account's row
    ///         Ok::<_, leasehold::Error>(tokens.len())
    ///     })
    ///     .await?;
    /// # assert_eq!(moved, 2); Ok(()) }
    /// ```
    pub async fn run<T, E, F>(&mut self, work: F) -> Result<T, E>
    where
        E: From<Error>,
        F: AsyncFnOnce(&MultiGuard) -> Result<T, E>,
    {
        let guard = self.acquire().await?;
        guard.work(work).await
    }

    /// As [`run`](Self::run), but waits for the members for at most `timeout`, as
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
        F: AsyncFnOnce(&MultiGuard) -> Result<T, E>,
    {
        let guard = self.acquire_timeout(timeout).await?;
        guard.work(work).await
    }

    async fn granted(&self, budget: Budget) -> Result<MultiGuard, Error> {
        let started = self.members.first().map(|first| first.engine().now());
        match self.gather(budget).await? {
            Ok(guard) => Ok(guard),
            Err(busy) => Err(busy.timed_out(self.waited(started))),
        }
    }

    /// All members, or the one that was not free at once.
    async fn gather(&self, budget: Budget) -> Result<Result<MultiGuard, &Lock>, Error> {
        if let Some(problem) = &self.problem {
            return Err(Error::config(problem.as_str()));
        }
        for member in &self.members {
            member.terms().map_err(|error| of_member(member, error))?;
        }
        let started = self.members.first().map(|first| first.engine().now());
        loop {
            match self.round(budget, started).await? {
                Round::All(guard) => return Ok(Ok(guard)),
                Round::Busy(member) => return Ok(Err(member)),
                Round::Lost(error) if matches!(budget, Budget::Once) => return Err(error),
                // Nobody was told that it is held; the caller is still willing to wait.
                Round::Lost(_) => {}
            }
        }
    }

    async fn round(&self, budget: Budget, started: Option<Instant>) -> Result<Round<'_>, Error> {
        let mut held = Members::with_capacity(self.members.len());
        for member in &self.members {
            let Some(budget) = self.what_is_left(budget, member) else {
                return Err(member.timed_out(self.waited(started)));
            };
            let next = tokio::select! {
                biased;
                (index, reason) = any_lost(held.holds()), if !held.0.is_empty() => {
                    return Ok(Round::Lost(held.0[index].lost_error(reason)));
                }
                next = member.enter(budget) => next.map_err(|error| self.in_all(started, error))?,
            };
            match next {
                Some(guard) => held.0.push(guard),
                None => return Ok(Round::Busy(member)),
            }
        }
        // The first ones may have been waiting for long: what is handed out is held, all of it.
        let guard = MultiGuard::new(held);
        Ok(match guard.ensure_held() {
            Ok(()) => Round::All(guard),
            Err(error) => Round::Lost(error),
        })
    }

    /// One limit for all, by the clock of the first; each member has its own client's.
    fn what_is_left(&self, budget: Budget, member: &Lock) -> Option<Budget> {
        let (Budget::Until(end), Some(first)) = (budget, self.members.first()) else {
            return Some(budget);
        };
        let left = end.saturating_duration_since(first.engine().now());
        (!left.is_zero()).then(|| Budget::Until(later(member.engine().now(), left)))
    }

    /// Whoever waited did so for the whole, not for one member.
    fn in_all(&self, started: Option<Instant>, error: Error) -> Error {
        match error {
            Error::TimedOut {
                name, own_client, ..
            } => Error::TimedOut {
                name,
                waited: self.waited(started),
                own_client,
            },
            other => other,
        }
    }

    fn waited(&self, started: Option<Instant>) -> Duration {
        let now = self.members.first().map(|first| first.engine().now());
        match (now, started) {
            (Some(now), Some(started)) => now.saturating_duration_since(started),
            _ => Duration::ZERO,
        }
    }
}

impl fmt::Debug for MultiLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MultiLock")
            .field("members", &self.members)
            .finish_non_exhaustive()
    }
}

/// Where a lock stands in the order of all locks. The same in every process, so nothing of it may hang on who asks:
/// a client's id comes last, for stores that are in one process anyway.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Seat {
    name: Arc<str>,
    server: Server,
    /// Who writes may go on to read; the other way round would wait for itself.
    kind: Reverse<Kind>,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Server {
    /// With the key scheme: two schemes are two keys.
    Named(String),
    InProcess(uuid::Uuid),
}

impl Seat {
    fn of(lock: &Lock) -> Self {
        let engine = lock.engine();
        let server = match &engine.config.server {
            Some(server) => Server::Named(format!("{server} {:?}", engine.config.scheme)),
            None => Server::InProcess(engine.client),
        };
        Self {
            name: Arc::clone(lock.shared_name()),
            server,
            kind: Reverse(lock.kind()),
        }
    }
}

/// Whether the one can never be held with the other; both are in order, and not the same.
fn exclude_each_other(one: &Lock, other: &Lock) -> bool {
    let (seat, next) = (Seat::of(one), Seat::of(other));
    let same_name = seat.name == next.name && seat.server == next.server;
    let same_hold = one.kind().sides() == other.kind().sides() && one.is_of_flow_of(other);
    same_name && !same_hold
}

fn of_member(member: &Lock, error: Error) -> Error {
    match error {
        Error::Config { problem } => {
            // A name that is too long is not repeated.
            let name: String = member.name().chars().take(100).collect();
            Error::config(format!("member `{name}` of a multi lock: {problem}"))
        }
        other => other,
    }
}

/// Completes when the first of `holds` is lost, with timers of its own.
pub(super) async fn any_lost(holds: Vec<Arc<Hold>>) -> (usize, LossReason) {
    let waits = holds
        .iter()
        .map(|hold| Box::pin(async move { hold.until_lost().await }));
    let (reason, index, _) = select_all(waits).await;
    (index, reason)
}

/// Guards in the order in which they were taken; they are dropped in the other one.
struct Members(Vec<LockGuard>);

impl Members {
    fn with_capacity(members: usize) -> Self {
        Self(Vec::with_capacity(members))
    }

    fn holds(&self) -> Vec<Arc<Hold>> {
        let holds = self.0.iter().map(|guard| Arc::clone(guard.hold()));
        holds.collect()
    }
}

impl Drop for Members {
    /// The last one first: whoever waits for the first one finds the others free, or nearly.
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}

/// All members of a [`MultiLock`], held.
///
/// Loss of one is loss of all. Like a [`LockGuard`] it is `Send + Sync + 'static`.
///
/// # Drop behaviour
///
/// Dropping it leaves each member, as dropping each member's guard does: the releases are handed to the clients'
/// backgrounds. That goes for the members that are still held when another is lost, too: they are kept until the guard is
/// dropped. To learn the outcomes use [`release`](Self::release).
#[must_use = "a guard that is not kept releases the locks at once: bind it to `_guard`, not to `_`"]
pub struct MultiGuard {
    members: Members,
    loss: Arc<Loss>,
    /// Watches the members for [`lost`](Self::lost); made when that is asked for first.
    watch: OnceLock<DropGuard>,
}

/// The first loss of a member.
#[derive(Default)]
struct Loss {
    first: OnceLock<(usize, LossReason)>,
    told: CancellationToken,
}

impl Loss {
    /// Notes a loss, unless there was one before; answers with the first.
    fn note(&self, index: usize, reason: LossReason) -> (usize, LossReason) {
        let first = *self.first.get_or_init(|| (index, reason));
        self.told.cancel();
        first
    }
}

impl MultiGuard {
    fn new(members: Members) -> Self {
        Self {
            members,
            loss: Arc::default(),
            watch: OnceLock::new(),
        }
    }

    /// The guards of the members, in the order in which they were taken: by name, then by server. For what is
    /// asked of one of them: [`fencing_token`](LockGuard::fencing_token), [`depth`](LockGuard::depth),
    /// [`extend`](LockGuard::extend).
    pub fn members(&self) -> &[LockGuard] {
        &self.members.0
    }

    /// The name and the token of each member, for the stores to check; in the order of
    /// [`members`](Self::members).
    ///
    /// Tokens of different names do not compare: each store checks that of its own lock. Local; no round trip.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] after the loss of any member: a late token must not look like a good one.
    pub fn tokens(&self) -> Result<Vec<(&str, FencingToken)>, Error> {
        self.ensure_held()?;
        let members = self.members().iter();
        let tokens = members.map(|guard| Ok((guard.name(), guard.fencing_token()?)));
        tokens.collect()
    }

    /// Whether all members are held, by this process's clock. Needs no task and no round trip.
    pub fn is_held(&self) -> bool {
        self.first_loss().is_none()
    }

    /// [`is_held`](Self::is_held), for `?`.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`], with the name of the member that was lost first, and the reason.
    pub fn ensure_held(&self) -> Result<(), Error> {
        match self.lost_error() {
            None => Ok(()),
            Some(error) => Err(error),
        }
    }

    /// Time left until the first member counts as lost unless it is renewed; zero when one is lost.
    pub fn remaining(&self) -> Duration {
        if !self.is_held() {
            return Duration::ZERO;
        }
        let least = self.members().iter().map(LockGuard::remaining).min();
        least.unwrap_or_default()
    }

    /// A token that is cancelled when the first member is lost, and never by a normal release.
    ///
    /// It is a child: cancelling it tells nobody else. The first call starts a task on the first member's client, which
    /// ends with this guard.
    pub fn lost(&self) -> CancellationToken {
        self.watch.get_or_init(|| self.watch());
        let _ = self.first_loss();
        self.loss.told.child_token()
    }

    /// Why the member that was lost first was lost; `None` while all are held. [`ensure_held`](Self::ensure_held)
    /// says which one.
    pub fn loss_reason(&self) -> Option<LossReason> {
        self.first_loss().map(|(_, reason)| reason)
    }

    /// Does `work`, but no longer than all members are held.
    ///
    /// As [`LockGuard::run`]: `work` is not polled any more once a member is lost; timers of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if a member was lost before `work` was done.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `work`; the guard stays as it is.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output, Error> {
        let told = async {
            let (index, reason) = any_lost(self.members.holds()).await;
            let (index, reason) = self.loss.note(index, reason);
            self.members()[index].lost_error(reason)
        };
        run_while(|| self.lost_error(), told, work).await
    }

    /// Asks the servers whether they still have the members: one round trip, all at once.
    ///
    /// # Errors
    ///
    /// * [`Error::Lost`]: one has not; the guard is lost from now on.
    /// * [`Error::Unreachable`], [`Error::Indeterminate`]: no answer from one of them within the command timeout; the
    ///   guard is as it was.
    ///
    /// # Cancel safety
    ///
    /// Safe: the question changes nothing.
    pub async fn confirm(&self) -> Result<(), Error> {
        let answers = join_all(self.members().iter().map(LockGuard::confirm)).await;
        self.ensure_held()?;
        answers.into_iter().collect()
    }

    /// Leaves all members, and says how that went for each.
    ///
    /// All at once; waits one command timeout at most (1 s by default). The background goes on after that.
    ///
    /// # Cancel safety
    ///
    /// The releases happen even if the future is dropped; only the outcome is missed.
    pub async fn release(mut self) -> MultiRelease {
        let _ = self.first_loss();
        let members = std::mem::take(&mut self.members.0);
        // The last one first, as when they are dropped.
        let releases = members.into_iter().rev().map(async |guard| {
            let name = guard.name().to_owned();
            (name, guard.release().await)
        });
        let mut members = join_all(releases).await;
        members.reverse();
        MultiRelease { members }
    }

    async fn work<T, E, F>(self, work: F) -> Result<T, E>
    where
        E: From<Error>,
        F: AsyncFnOnce(&Self) -> Result<T, E>,
    {
        let value = self.run(work(&self)).await??;
        for (name, outcome) in self.release().await.members {
            if let ReleaseOutcome::Lost(reason) = outcome {
                return Err(Error::Lost { name, reason }.into());
            }
        }
        Ok(value)
    }

    /// The member that was lost first, as far as anybody has looked, and why.
    fn first_loss(&self) -> Option<(usize, LossReason)> {
        if let Some(first) = self.loss.first.get() {
            return Some(*first);
        }
        let lost = |(index, guard): (usize, &LockGuard)| Some((index, guard.loss_reason()?));
        let (index, reason) = self.members().iter().enumerate().find_map(lost)?;
        Some(self.loss.note(index, reason))
    }

    fn lost_error(&self) -> Option<Error> {
        let (index, reason) = self.first_loss()?;
        Some(self.members()[index].lost_error(reason))
    }

    fn watch(&self) -> DropGuard {
        let over = CancellationToken::new();
        let (ended, loss) = (over.clone(), Arc::clone(&self.loss));
        let holds = self.members.holds();
        // If the task is dropped with its runtime, the members of that client are lost.
        let told = self.loss.told.clone().drop_guard();
        let task = async move {
            tokio::select! {
                biased;
                () = ended.cancelled() => drop(told.disarm()),
                (index, reason) = any_lost(holds) => {
                    loss.note(index, reason);
                }
            }
        };
        if let Some(first) = self.members().first() {
            first.hold().engine.env.spawn(Box::pin(task));
        }
        over.drop_guard()
    }
}

impl Drop for MultiGuard {
    fn drop(&mut self) {
        // Whoever waits for `lost()` hears of a loss that nobody has looked at.
        if self.watch.get().is_some() {
            let _ = self.first_loss();
        }
    }
}

impl fmt::Debug for MultiGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MultiGuard")
            .field("members", &self.members())
            .finish_non_exhaustive()
    }
}

/// How the release of a [`MultiGuard`] went.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a release can come too late: `Lost` and `Unconfirmed` say so"]
pub struct MultiRelease {
    members: Vec<(String, ReleaseOutcome)>,
}

impl MultiRelease {
    /// The name of each member, and how its release went; in the order in which they were taken.
    pub fn members(&self) -> &[(String, ReleaseOutcome)] {
        &self.members
    }

    /// The worst of all: `Lost` if one had been lost, else `Unconfirmed` with the longest time, else `StillHeld` with
    /// the greatest depth, else `Released`: all are free.
    pub fn overall(&self) -> ReleaseOutcome {
        let outcomes = || self.members.iter().map(|(_, outcome)| *outcome);
        let lost = outcomes().find(|outcome| matches!(outcome, ReleaseOutcome::Lost(_)));
        let unconfirmed = outcomes().filter_map(|outcome| match outcome {
            ReleaseOutcome::Unconfirmed { at_most } => Some(at_most),
            _ => None,
        });
        let still_held = outcomes().filter_map(|outcome| match outcome {
            ReleaseOutcome::StillHeld { depth } => Some(depth),
            _ => None,
        });
        let unconfirmed = unconfirmed.max();
        let still_held = still_held.max();
        lost.or_else(|| unconfirmed.map(|at_most| ReleaseOutcome::Unconfirmed { at_most }))
            .or_else(|| still_held.map(|depth| ReleaseOutcome::StillHeld { depth }))
            .unwrap_or(ReleaseOutcome::Released)
    }

    /// `Err` if a member had been lost before its release.
    ///
    /// # Errors
    ///
    /// The reason of the first loss among the members; as [`ReleaseOutcome::into_result`].
    pub fn into_result(self) -> Result<(), LossReason> {
        self.overall().into_result()
    }
}
