//! `LockGuard`: one level of a hold, and how a hold ends.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::Duration;

use tokio::sync::{OwnedMutexGuard, oneshot};
use tokio_util::sync::CancellationToken;

use crate::config::validate_lease;
use crate::context::{Flow, LockContext, Place};
use crate::dispatch::{Answered, Failure, Outcome, Requester};
use crate::engine::Handle;
use crate::env::later;
use crate::error::Error;
use crate::fencing::FencingToken;
use crate::hold::{Hold, Left};
use crate::lock::refused;
use crate::store::Answer;

/// Why a hold ended although its holder had not released it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossReason {
    /// The lease ended, by our clock, before a renewal was confirmed.
    DeadlinePassed,
    /// The server no longer has the hold, and nobody has the lock: its memory was lost, the key was
    /// deleted or evicted, or another holder came and went.
    KeyGone,
    /// Somebody else has the lock.
    TakenByOther,
    /// This client's own [`force_release`](crate::LockClient::force_release).
    Forced,
    /// The longest time the lock may be held is over; see [`max_hold`](crate::Lock::max_hold).
    MaxHold,
    /// It was to go on [writing](crate::RwLock::try_upgrade), and whether it does was not answered.
    UpgradeUnconfirmed,
    /// The client was closed, or its runtime ended.
    ClientClosed,
}

impl LossReason {
    /// Whether the server may still have a hold lost for this reason.
    pub(crate) fn may_be_on_server(self) -> bool {
        match self {
            Self::DeadlinePassed | Self::MaxHold | Self::UpgradeUnconfirmed => true,
            // Gone, or released by whoever ended it.
            Self::KeyGone | Self::TakenByOther | Self::Forced | Self::ClientClosed => false,
        }
    }
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DeadlinePassed => "its lease ended, and no renewal of it was confirmed",
            Self::KeyGone => "the server no longer has it",
            Self::TakenByOther => "another owner has it",
            Self::Forced => "it was released by force",
            Self::MaxHold => "the longest time to hold it is over",
            Self::UpgradeUnconfirmed => "whether it went on writing was not answered",
            Self::ClientClosed => "the client was closed",
        })
    }
}

impl std::error::Error for LossReason {}

/// How a release went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a release can come too late: `Lost` and `Unconfirmed` say so"]
#[non_exhaustive]
pub enum ReleaseOutcome {
    /// The lock is free, or the next in line of this client has it. Where that one got it without a word to the
    /// server, a loss that nobody had noticed yet is not told here either.
    Released,
    /// An inner level was left; the lock is still held.
    StillHeld {
        /// Levels that remain.
        depth: u32,
    },
    /// The hold had ended before: what it protected may have been in other hands.
    Lost(LossReason),
    /// No answer came in time. The background goes on trying; the lock is free at the latest after
    /// `at_most`, when its lease ends.
    Unconfirmed {
        /// Longest time until the lock is free.
        at_most: Duration,
    },
}

impl ReleaseOutcome {
    /// `Err` if the hold had been lost before its release.
    ///
    /// # Errors
    ///
    /// The reason of the loss. `Unconfirmed` is not an error: the hold was still this holder's when
    /// it was released.
    pub fn into_result(self) -> Result<(), LossReason> {
        match self {
            Self::Lost(reason) => Err(reason),
            Self::Released | Self::StillHeld { .. } | Self::Unconfirmed { .. } => Ok(()),
        }
    }
}

/// One level of a hold. The last one out releases the lock.
///
/// A guard is `Send + Sync + 'static`: it may move between tasks and be dropped anywhere.
///
/// # Drop behaviour
///
/// Dropping a guard leaves its level. If it was the last one, the release is handed to the client's
/// background, which sends it, repeats it while it goes unanswered, and gives up when the lease has
/// ended anyway. `Drop` never blocks, awaits or panics, and works on any thread, outside a runtime
/// and while unwinding. To learn the outcome use [`release`](Self::release).
///
/// A guard that is never dropped (`mem::forget`) keeps its client alive, and is renewed until
/// [`close`](crate::LockClient::close) or the end of the runtime; set
/// [`max_hold`](crate::Lock::max_hold) to bound that.
///
/// # What it does not promise
///
/// Between a look at [`is_held`](Self::is_held) and the write that follows, any process can be paused
/// past its lease. Where two writers would corrupt data, let the store check the
/// [`fencing_token`](Self::fencing_token).
#[must_use = "a guard that is not kept releases the lock at once: bind it to `_guard`, not to `_`"]
pub struct LockGuard {
    handle: Arc<Handle>,
    flow: Arc<Flow>,
    /// Where the flow remembers this hold; `None` once left.
    place: Option<Place>,
    hold: Arc<Hold>,
    level: u32,
}

impl LockGuard {
    pub(crate) fn new(
        handle: Arc<Handle>,
        flow: Arc<Flow>,
        place: Place,
        hold: Arc<Hold>,
        level: u32,
    ) -> Self {
        Self {
            handle,
            flow,
            place: Some(place),
            hold,
            level,
        }
    }

    /// The name of the lock.
    pub fn name(&self) -> &str {
        &self.hold.name
    }

    /// The token of this hold, for the store to check; the same for all its levels.
    ///
    /// Local; no round trip.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] after the loss: a late token must not look like a good one.
    pub fn fencing_token(&self) -> Result<FencingToken, Error> {
        self.ensure_held()?;
        Ok(self.hold.token)
    }

    /// Whether the lock is held, by this process's clock. Needs no task and no round trip.
    pub fn is_held(&self) -> bool {
        self.hold.loss_reason().is_none()
    }

    /// [`is_held`](Self::is_held), for `?`.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`], with the reason.
    pub fn ensure_held(&self) -> Result<(), Error> {
        match self.hold.loss_reason() {
            None => Ok(()),
            Some(reason) => Err(self.lost_error(reason)),
        }
    }

    /// Time left until the lock counts as lost unless it is renewed; zero when it is lost.
    pub fn remaining(&self) -> Duration {
        if self.is_held() {
            self.hold
                .deadline()
                .saturating_duration_since(self.hold.engine.now())
        } else {
            Duration::ZERO
        }
    }

    /// How many levels the hold has, this one included.
    pub fn depth(&self) -> u32 {
        self.hold.depth()
    }

    /// The flow of work this guard belongs to, to re-enter the lock with: as
    /// [`LockContext::share`].
    pub fn context(&self) -> LockContext {
        LockContext::of(Arc::clone(&self.handle), Arc::clone(&self.flow))
    }

    /// A token that is cancelled when the hold is lost, and never by a normal release.
    ///
    /// It is a child: cancelling it tells nobody else. Wait for it beside the work, in a `select!`: a task
    /// that waits for nothing else does not end with a normal release.
    pub fn lost(&self) -> CancellationToken {
        self.hold.lost().child_token()
    }

    /// Why the hold was lost; `None` while it is held.
    pub fn loss_reason(&self) -> Option<LossReason> {
        self.hold.loss_reason()
    }

    /// Does `work`, but no longer than the lock is held.
    ///
    /// `work` is not polled any more once the lock is lost; tasks that it spawned go on. This has a timer of its own and does not
    /// depend on the background task.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if the hold was lost before `work` was done.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `work`; the guard stays as it is.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output, Error> {
        let told = async { self.lost_error(self.hold.until_lost().await) };
        run_while(|| self.ensure_held().err(), told, work).await
    }

    /// Asks the server whether it still has the hold: one round trip.
    ///
    /// # Errors
    ///
    /// * [`Error::Lost`]: it has not; the guard is lost from now on.
    /// * [`Error::Unreachable`], [`Error::Indeterminate`]: no answer within the command timeout;
    ///   the guard is as it was.
    ///
    /// # Cancel safety
    ///
    /// Safe: the question changes nothing.
    pub async fn confirm(&self) -> Result<(), Error> {
        self.renew("confirm", Duration::from_millis(1)).await
    }

    /// Makes the lease at least `lease` long from now; never shortens it, and never lengthens it beyond
    /// [`max_hold`](crate::Lock::max_hold).
    ///
    /// # Errors
    ///
    /// * [`Error::Config`]: not between 100 ms and one year, or not whole milliseconds.
    /// * [`Error::Lost`]: the hold is over.
    /// * [`Error::Unreachable`], [`Error::Indeterminate`]: no answer within the command timeout.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves open whether the lease was lengthened.
    pub async fn extend(&self, lease: Duration) -> Result<(), Error> {
        validate_lease("a lease", lease)?;
        self.renew("extend", lease).await
    }

    pub(crate) async fn renew(
        &self,
        operation: &'static str,
        lease: Duration,
    ) -> Result<(), Error> {
        self.ensure_held()?;
        let (reply, answer) = oneshot::channel();
        let mut job = self.hold.renewal(
            lease,
            Box::new(AskedOfHold {
                hold: Arc::clone(&self.hold),
                asked: Asked { reply },
            }),
        );
        let engine = &self.hold.engine;
        job.give_up = job
            .give_up
            .min(later(engine.now(), self.hold.command_timeout()));
        let name = || self.hold.name.to_string();
        engine.dispatcher.post(job);
        let outcome = tokio::select! {
            biased;
            reason = self.hold.until_lost() => return Err(self.lost_error(reason)),
            outcome = answer => outcome.unwrap_or(Outcome::Failed(Failure::Closed)),
        };
        match outcome {
            Outcome::Answered(Answered {
                answer: Answer::Renewed { remaining_ms },
                sent,
                ..
            }) => {
                self.hold.confirmed(sent, remaining_ms);
                self.ensure_held()
            }
            Outcome::Answered(Answered {
                answer: Answer::Gone(instead),
                ..
            }) => {
                let reason = LossReason::from(instead);
                Err(self.lost_error(self.hold.lose(reason).unwrap_or(reason)))
            }
            Outcome::Answered(Answered {
                answer: Answer::Refused(refusal),
                ..
            }) => Err(refused(name(), operation, refusal)),
            Outcome::Answered(_) | Outcome::Failed(Failure::Closed) => Err(Error::Closed),
            Outcome::Failed(Failure::NotSent(cause)) => Err(Error::Unreachable {
                subject: format!("the server for lock `{}`", self.hold.name),
                source: cause.into(),
            }),
            Outcome::Failed(Failure::Unanswered { cause, .. }) => Err(Error::Indeterminate {
                name: name(),
                operation,
                source: cause.into(),
            }),
        }
    }

    /// Leaves this level and says how that went. The last level out releases the lock.
    ///
    /// Waits one command timeout at most (1 s by default); the background goes on after that.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the release happens even if the future is dropped; only the outcome is missed.
    /// If it is dropped before, the guard in it is dropped, with the same effect.
    pub async fn release(mut self) -> ReleaseOutcome {
        let (reply, outcome) = oneshot::channel();
        let left = self.leave(Some(reply));
        let hold = Arc::clone(&self.hold);
        let instead = match left {
            Some(Left::Lost(reason)) => return ReleaseOutcome::Lost(reason),
            Some(Left::Inner { depth }) => ReleaseOutcome::StillHeld { depth },
            Some(Left::Last) | None => ReleaseOutcome::Unconfirmed {
                at_most: Duration::ZERO,
            },
        };
        let timeout = later(hold.engine.now(), hold.command_timeout());
        let outcome = tokio::select! {
            biased;
            outcome = outcome => outcome.ok(),
            () = hold.engine.env.sleep_until(timeout) => None,
        };
        let outcome = outcome.unwrap_or_else(|| match instead {
            ReleaseOutcome::Unconfirmed { .. } => ReleaseOutcome::Unconfirmed {
                at_most: hold
                    .server_end()
                    .saturating_duration_since(hold.engine.now()),
            },
            instead => instead,
        });
        match outcome {
            // Lost while the answer was waited for.
            ReleaseOutcome::StillHeld { .. } => {
                hold.loss_reason().map_or(outcome, ReleaseOutcome::Lost)
            }
            outcome => outcome,
        }
    }

    fn leave(&mut self, reply: Option<oneshot::Sender<ReleaseOutcome>>) -> Option<Left> {
        let place = self.place.take()?;
        let left = self.hold.leave(self.level, reply);
        if self.hold.depth() == 0 {
            place.forget(&self.hold);
        }
        Some(left)
    }

    pub(crate) fn lost_error(&self, reason: LossReason) -> Error {
        Error::Lost {
            name: self.hold.name.to_string(),
            reason,
        }
    }

    pub(crate) fn hold(&self) -> &Arc<Hold> {
        &self.hold
    }

    /// Waits for acquisitions of this name through its flow to be over; none begins while the answer is
    /// kept.
    pub(crate) async fn alone(&self) -> Option<OwnedMutexGuard<()>> {
        match &self.place {
            Some(place) => Some(place.enter().await),
            None => None,
        }
    }

    /// The same place of its flow, with another hold instead of this guard's, which is over.
    pub(crate) fn with_hold(mut self, hold: Arc<Hold>, level: u32) -> Self {
        let place = self.place.take();
        if let Some(place) = &place {
            place.remember(&hold);
        }
        Self {
            handle: Arc::clone(&self.handle),
            flow: Arc::clone(&self.flow),
            place,
            hold,
            level,
        }
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        let _ = self.leave(None);
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard")
            .field("hold", &self.hold)
            .finish_non_exhaustive()
    }
}

/// Does `work`, but no longer than nothing is lost: by `lost`, which looks at the clock, and by `told`, which has a
/// timer of its own.
pub(crate) async fn run_while<F: Future>(
    lost: impl Fn() -> Option<Error>,
    told: impl Future<Output = Error>,
    work: F,
) -> Result<F::Output, Error> {
    let mut told = pin!(told);
    let mut work = pin!(work);
    poll_fn(|cx| {
        // By the clock at each poll: a starved timer may not have fired yet.
        if let Some(error) = lost() {
            return Poll::Ready(Err(error));
        }
        if let Poll::Ready(error) = told.as_mut().poll(cx) {
            return Poll::Ready(Err(error));
        }
        let done = ready!(work.as_mut().poll(cx));
        // Also after its last step, which may have been a long one.
        Poll::Ready(match lost() {
            Some(error) => Err(error),
            None => Ok(done),
        })
    })
    .await
}

/// Hands the outcome of a renewal to whoever asked for it, as long as the hold is held.
struct AskedOfHold {
    hold: Arc<Hold>,
    asked: Asked,
}

impl Requester for AskedOfHold {
    fn wanted(&self) -> bool {
        self.asked.wanted() && self.hold.is_held()
    }

    fn done(self: Box<Self>, outcome: Outcome) {
        Box::new(self.asked).done(outcome);
    }
}

/// Hands an outcome to whoever awaits it.
pub(crate) struct Asked {
    pub(crate) reply: oneshot::Sender<Outcome>,
}

impl Requester for Asked {
    fn wanted(&self) -> bool {
        !self.reply.is_closed()
    }

    fn done(self: Box<Self>, outcome: Outcome) {
        let _ = self.reply.send(outcome);
    }
}
