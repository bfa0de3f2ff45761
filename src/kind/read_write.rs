//! The read/write lock: its two sides, and the way from one to the other.

use std::fmt;
use std::sync::Arc;

use tokio::sync::{OwnedMutexGuard, oneshot};

use super::Kind;
use crate::context::Flow;
use crate::dispatch::{Answered, Failure, Outcome, Requester};
use crate::engine::Handle;
use crate::error::Error;
use crate::guard::{LockGuard, LossReason};
use crate::hold::{Hold, Terms};
use crate::inspect::{self, Inspection};
use crate::lock::{Lock, refused};
use crate::observe;
use crate::store::{Answer, Cause, OwnerId};
use crate::sync::Mutex;

/// A read/write lock: many may read at once, or one may write.
///
/// Each side is a [`Lock`], with the same verbs and the same guards. The lock is Redisson's
/// `RReadWriteLock` of that name, and can be shared with Java. A name is one kind of lock: a plain lock
/// finds this one's key in other use ([`Error::Conflict`]), and the reverse.
///
/// # Reading within writing, and the way back
///
/// A contender that writes may read as well: one more level of its hold, without a round trip. If the
/// write guards are dropped first, the hold goes on as a reader's, in one step: nobody else writes in
/// between, and other readers come in at once.
///
/// The other way round would wait for itself, and two at once for each other:
/// [`Error::WouldDeadlock`], at once. [`try_upgrade`](Self::try_upgrade) does it without waiting, for the only
/// reader.
///
/// # What it promises, and what not
///
/// Exclusion as of a plain [`Lock`], between a writer and everybody else. Each reader has a lease of his
/// own, so one that crashes is waited for no longer than that, however long others read.
///
/// Tokens: a writer's is greater than all before. Those who read at the same time have the same, at
/// least as great as that of every writer before them: a store that checks tokens refuses none of them,
/// and refuses what a writer before them still sends. (If the counter expires or is lost while some read,
/// those who join get a greater one.)
///
/// Readers come in as long as others read, so writers may wait for ever where somebody always reads.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::LockClient;
///
/// let client = LockClient::in_memory();
/// let one = client.rw_lock("prices").read().acquire().await?;
/// let other = client.rw_lock("prices").read().acquire().await?; // another contender: both read
/// assert!(client.rw_lock("prices").write().try_acquire().await?.is_none());
/// drop((one, other));
///
/// let prices = client.rw_lock("prices");
/// let write = prices.write().acquire().await?;
/// let read = prices.read().acquire().await?; // the same contender
/// write.release().await.into_result().expect("held all the time");
/// assert!(read.is_held()); // reads on, and others may
/// # Ok(()) }
/// ```
#[must_use = "a lock does nothing until it is acquired"]
pub struct RwLock {
    handle: Arc<Handle>,
    flow: Arc<Flow>,
    name: Arc<str>,
}

impl RwLock {
    pub(crate) fn new(handle: Arc<Handle>, flow: Arc<Flow>, name: Arc<str>) -> Self {
        Self { handle, flow, name }
    }

    /// The side of those who read: any number of them at once, while nobody writes.
    pub fn read(&self) -> Lock {
        self.side(Kind::Read)
    }

    /// The side of the one who writes, alone.
    pub fn write(&self) -> Lock {
        self.side(Kind::Write)
    }

    /// The name of the lock.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Goes from reading to writing without letting go, if nobody else reads. Does not wait for others; one
    /// round trip.
    ///
    /// `guard` must be the only one of its hold. The new guard has the same lease, renewed or not, and a
    /// new, greater token.
    ///
    /// # Errors
    ///
    /// The guard comes back, with
    ///
    /// * [`Error::TimedOut`]: others read as well. It reads on.
    /// * [`Error::Config`]: the guard is not one of a reader, or not the only one of its hold. It is as it
    ///   was.
    /// * [`Error::Unreachable`], [`Error::OutOfMemory`], [`Error::Denied`], [`Error::Conflict`]: it certainly
    ///   was not done. It reads on.
    /// * [`Error::Lost`], [`Error::Indeterminate`], [`Error::Closed`]: it is lost. Without an answer this
    ///   takes as long as its lease lasts, in which it is not renewed: which of the two the server has is
    ///   not known. It is released in the background.
    ///
    /// # Cancel safety
    ///
    /// Once polled it goes on if the future is dropped, and what it is then is released.
    pub async fn try_upgrade(guard: LockGuard) -> Result<LockGuard, (LockGuard, Error)> {
        let alone = guard.alone().await;
        let hold = Arc::clone(guard.hold());
        if let Err(error) = guard.ensure_held() {
            return Err((guard, error));
        }
        let Some(terms) = hold.begin_upgrade() else {
            let problem =
                "only a guard that reads, and is the only one of its hold, can be upgraded";
            return Err((guard, Error::config(problem)));
        };
        let to = hold.engine.fresh_owner();
        let (reply, answer) = oneshot::channel();
        let guard = Arc::new(Mutex::new(Some(guard)));
        let upgrade = Upgrade {
            hold: Arc::clone(&hold),
            guard: Arc::clone(&guard),
            to,
            terms,
            alone,
            reply,
        };
        let job = hold.upgrade(to, terms.first_lease(), Box::new(upgrade));
        hold.engine.dispatcher.post(job);
        let answer = answer.await;
        let guard = guard.lock().take();
        match (answer.unwrap_or(Err(Error::Closed)), guard) {
            (Ok(()), Some(guard)) => Ok(guard),
            (Err(error), Some(guard)) => Err((guard, error)),
            // Nobody else takes it.
            (_, None) => unreachable!("the guard is where it was put"),
        }
    }

    /// Who writes, or who reads, as [`Lock::inspect`].
    ///
    /// # Errors
    ///
    /// As [`Lock::inspect`].
    pub async fn inspect(&self) -> Result<Inspection, Error> {
        inspect::inspect(&self.handle.engine, Kind::Read, &self.name).await
    }

    /// Frees the lock by force: looks who writes or reads, then removes those only, so that a later hold is
    /// never touched. Whether anybody was removed.
    ///
    /// As [`LockClient::force_release`](crate::LockClient::force_release): for operators.
    ///
    /// # Errors
    ///
    /// As [`LockClient::force_release`](crate::LockClient::force_release).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves open who was removed.
    pub async fn force_release(&self) -> Result<bool, Error> {
        inspect::force_release(&self.handle.engine, Kind::Read, &self.name).await
    }

    fn side(&self, kind: Kind) -> Lock {
        Lock::new(
            Arc::clone(&self.handle),
            Arc::clone(&self.flow),
            kind,
            Arc::clone(&self.name),
        )
    }
}

impl fmt::Debug for RwLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RwLock")
            .field("name", &self.handle.engine.loggable(&self.name))
            .finish_non_exhaustive()
    }
}

/// A reader on its way to write.
struct Upgrade {
    /// The reader's hold.
    hold: Arc<Hold>,
    /// Its guard, replaced by the writer's. Of the caller and this: whoever is there last has it.
    guard: Arc<Mutex<Option<LockGuard>>>,
    to: OwnerId,
    terms: Terms,
    /// Nobody else of the flow enters meanwhile.
    alone: Option<OwnedMutexGuard<()>>,
    reply: oneshot::Sender<Result<(), Error>>,
}

impl Upgrade {
    /// Puts the writer's guard in place of the reader's, if that was held until then.
    fn granted(&self, token: u64, remaining_ms: u64, answered: &Answered) -> Result<(), Error> {
        let reader = &self.hold;
        let engine = &reader.engine;
        let lease = self.terms.first_lease();
        let writer = Hold::granted(
            engine,
            Kind::Write,
            &reader.name,
            self.to,
            lease,
            token,
            remaining_ms,
            answered,
            reader.chain,
            0,
        );
        let claimed = match engine.ensure_open() {
            Ok(()) => writer.claim(&self.terms),
            Err(_) => None,
        };
        let Some(level) = claimed else {
            reader.lose(LossReason::UpgradeUnconfirmed);
            writer.discard();
            return self.lost();
        };
        if !reader.upgraded() {
            writer.leave(level, None);
            return self.lost();
        }
        observe::acquired(engine, &reader.name, self.to, None, writer.server_end());
        let mut guard = self.guard.lock();
        *guard = guard.take().map(|guard| guard.with_hold(writer, level));
        Ok(())
    }

    /// Why the reader's hold is all there is, or not even that.
    fn denied(&self, outcome: Outcome) -> Error {
        let hold = &self.hold;
        let name = hold.name.to_string();
        let (error, open_until_us) = match outcome {
            Outcome::Answered(answered) => {
                let error = match answered.answer {
                    Answer::Gone(instead) => {
                        hold.lose(instead.into());
                        return self.lost().err().unwrap_or(Error::Closed);
                    }
                    Answer::Refused(refusal) => {
                        if answered.open_until_us.is_none() {
                            hold.undo_upgrade(self.to, self.terms.lease);
                        }
                        refused(name, OPERATION, refusal)
                    }
                    _ => Error::TimedOut {
                        name,
                        waited: std::time::Duration::ZERO,
                        own_client: false,
                    },
                };
                (error, answered.open_until_us)
            }
            Outcome::Failed(Failure::NotSent(cause)) => {
                let subject = format!("the server for lock `{name}`");
                let source = cause.into();
                (Error::Unreachable { subject, source }, None)
            }
            Outcome::Failed(Failure::Unanswered {
                open_until_us,
                cause,
            }) => (indeterminate(name, cause), Some(open_until_us)),
            Outcome::Failed(Failure::Closed) => {
                hold.lose(LossReason::ClientClosed);
                return Error::Closed;
            }
        };
        if let Some(open_until_us) = open_until_us {
            // It may be the writer by now, or yet become so: neither is believed in any more.
            hold.lose(LossReason::UpgradeUnconfirmed);
            hold.release_with(self.to, self.terms.lease, Some(open_until_us), None);
            return error;
        }
        hold.not_upgraded();
        error
    }

    fn lost(&self) -> Result<(), Error> {
        let reason = self.hold.loss_reason();
        Err(reason.map_or(Error::Closed, |reason| Error::Lost {
            name: self.hold.name.to_string(),
            reason,
        }))
    }
}

impl Requester for Upgrade {
    fn wanted(&self) -> bool {
        self.hold.is_held()
    }

    fn done(self: Box<Self>, outcome: Outcome) {
        let told = match &outcome {
            Outcome::Answered(
                answered @ Answered {
                    answer:
                        Answer::Granted {
                            token,
                            remaining_ms,
                        },
                    ..
                },
            ) => self.granted(*token, *remaining_ms, answered),
            _ => Err(self.denied(outcome)),
        };
        let Self { alone, reply, .. } = *self;
        drop(alone);
        let _ = reply.send(told);
    }
}

fn indeterminate(name: String, cause: Cause) -> Error {
    Error::Indeterminate {
        name,
        operation: OPERATION,
        source: cause.into(),
    }
}

const OPERATION: &str = "try_upgrade";
