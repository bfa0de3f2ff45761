//! The guard of a quorum lock, and the task that keeps it.

use std::fmt;
use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::{Asking, Event, Member, Plan, lost};
use crate::error::Error;
use crate::fencing::FencingToken;
use crate::guard::{LossReason, ReleaseOutcome, run_while};
use crate::hold::Hold;
use crate::kind::multi::any_lost;

/// A [`QuorumLock`](crate::QuorumLock), held by a majority of the servers.
///
/// Each server's hold is renewed on its own. A server that was not there, or was started again, is joined in the background;
/// one from which somebody deleted it is not.
/// Lost when fewer than a majority hold it, by their own deadlines and this process's clock; then nothing of it is kept.
///
/// # Drop behaviour
///
/// As a [`LockGuard`](crate::LockGuard): the releases are handed to the clients' backgrounds. To learn the outcome use
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
    /// Servers that lost it, other than by being started again: that cannot be, unless somebody deleted it.
    gone: Vec<(usize, Option<Arc<str>>)>,
    /// Of the member that was lost last.
    last_loss: Option<LossReason>,
    /// Nobody comes in any more.
    closed: bool,
}

impl QuorumGuard {
    pub(super) fn new(token: u64, members: Vec<Member>, asking: Asking) -> Self {
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
    /// [`LockGuard::lost`](crate::LockGuard::lost).
    pub fn lost(&self) -> CancellationToken {
        let _ = self.held.look();
        self.held.told.child_token()
    }

    /// Why the majority was lost; `None` while it holds.
    pub fn loss_reason(&self) -> Option<LossReason> {
        self.held.look()
    }

    /// Does `work`, but no longer than a majority holds the lock; as [`LockGuard::run`](crate::LockGuard::run).
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
                        if !reason.may_be_on_server() {
                            state.gone.push((member.at, member.run.clone()));
                        }
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

    /// Whether this run of its server has lost the lock before: others may have had it in between, from most servers.
    fn is_suspect(&self, member: &Member) -> bool {
        let state = self.state.lock();
        let mut gone = state.gone.iter();
        gone.any(|(at, run)| *at == member.at && *run == member.run)
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
                // Nor is it asked again.
                Event::Asked(_, Ok(Some(member))) if held.is_suspect(&member) => drop(member),
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

/// However long the lease is.
const LONGEST_REJOIN_WAIT: Duration = Duration::from_secs(1);
