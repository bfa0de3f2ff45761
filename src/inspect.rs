//! Looking at a lock, and freeing it by force.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use crate::dispatch::{Answered, Failure, Job, Outcome};
use crate::engine::Engine;
use crate::env::{later, until};
use crate::error::Error;
use crate::fencing::FencingToken;
use crate::guard::{Asked, LossReason};
use crate::key::validate_name;
use crate::kind::Kind;
use crate::lock::refused;
use crate::observe::digest;
use crate::store::{Answer, Cause, NoReply, Op, Snapshot, Verb};

/// Which kind of lock a key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LockKind {
    /// The plain, reentrant lock.
    Plain,
    /// The fair lock: as the plain one, in order of arrival.
    Fair,
}

/// Who holds a lock, as the server told it at one moment.
///
/// What access rules forbid to read is `None`, no more.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inspection {
    /// Which kind of lock it is.
    pub kind: LockKind,
    /// Its holder; `None` when it is free.
    pub holder: Option<Holder>,
    /// The token of the newest hold, present or past; `None` when there is no counter.
    pub token: Option<FencingToken>,
    /// Processes that wait for a message of its release; for a fair lock, those who stand in its queue.
    pub waiting: Option<u64>,
}

/// The holder of a lock, seen from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// Eight digits that tell this owner from others; not the owner id itself, with which its lock
    /// could be released.
    pub owner: String,
    /// Hold count.
    pub count: u32,
    /// Remaining lease; `None` when the key has no expiry.
    pub remaining: Option<Duration>,
    /// What the holder's client calls itself.
    pub label: Option<String>,
    /// The holder's machine.
    pub host: Option<String>,
    /// The holder's process id.
    pub pid: Option<u32>,
}

pub(crate) async fn inspect(
    engine: &Arc<Engine>,
    kind: Kind,
    name: &Arc<str>,
) -> Result<Inspection, Error> {
    let snapshot = look(engine, kind, name, "inspect").await?;
    let info = snapshot.holder_info;
    Ok(Inspection {
        kind: match kind {
            Kind::Plain => LockKind::Plain,
            Kind::Fair => LockKind::Fair,
        },
        holder: snapshot.holders.first().map(|(owner, count)| Holder {
            owner: digest(owner),
            count: *count,
            remaining: snapshot.remaining_ms.map(Duration::from_millis),
            label: info.get("label").cloned(),
            host: info.get("host").cloned(),
            pid: info.get("pid").and_then(|pid| pid.parse().ok()),
        }),
        token: snapshot.token.map(FencingToken::new),
        waiting: snapshot.waiting,
    })
}

/// Looks who holds `name`, then removes that owner only; `false` when it was free or changed hands.
pub(crate) async fn force_release(
    engine: &Arc<Engine>,
    kind: Kind,
    name: &Arc<str>,
) -> Result<bool, Error> {
    const OPERATION: &str = "force_release";
    let snapshot = look(engine, kind, name, OPERATION).await?;
    let mut removed = false;
    for (owner, _) in snapshot.holders {
        let op = Op {
            kind,
            name: Arc::clone(name),
            verb: Verb::ForceRelease {
                owner: owner.clone(),
            },
        };
        let (reply, answer) = oneshot::channel();
        let timeout = engine.config.command_timeout;
        let give_up = later(engine.now(), timeout);
        engine
            .dispatcher
            .post(Job::new(op, timeout, give_up, Box::new(Asked { reply })));
        let outcome = until(&*engine.env, later(give_up, timeout / 4), answer).await;
        match outcome {
            Some(Ok(Outcome::Answered(Answered {
                answer,
                unanswered_since,
                ..
            }))) => match answer {
                // Not there any more after an attempt without an answer: that one did it.
                Answer::Removed | Answer::Nothing
                    if answer == Answer::Removed || unanswered_since.is_some() =>
                {
                    removed = true;
                    let own = engine.watchdog.holds().into_iter();
                    if let Some(hold) = own.into_iter().find(|hold| hold.owner.to_string() == owner)
                    {
                        hold.lose(LossReason::Forced);
                    }
                    engine.queues.freed(kind, name, 0);
                }
                Answer::Refused(refusal) => {
                    return Err(refused(name.to_string(), OPERATION, refusal));
                }
                _ => {}
            },
            Some(Ok(Outcome::Failed(Failure::NotSent(cause)))) => {
                return Err(no_reply(name, OPERATION, NoReply::NotSent(cause)));
            }
            Some(Ok(Outcome::Failed(Failure::Closed)) | Err(_)) => return Err(Error::Closed),
            Some(Ok(Outcome::Failed(Failure::Unanswered { cause, .. }))) => {
                return Err(unanswered(name, OPERATION, cause));
            }
            None => return Err(unanswered(name, OPERATION, Cause::new("no answer in time"))),
        }
    }
    Ok(removed)
}

async fn look(
    engine: &Arc<Engine>,
    kind: Kind,
    name: &Arc<str>,
    operation: &'static str,
) -> Result<Snapshot, Error> {
    validate_name(name)?;
    engine.ensure_open()?;
    let timeout = engine.config.command_timeout;
    let snapshot = engine.store.inspect(kind, name, timeout).await;
    snapshot.map_err(|no| no_reply(name, operation, no))
}

fn no_reply(name: &str, operation: &'static str, no: NoReply) -> Error {
    match no {
        NoReply::NotSent(cause) => Error::Unreachable {
            subject: format!("lock `{name}`"),
            source: cause.into(),
        },
        NoReply::Unanswered { cause, .. } => unanswered(name, operation, cause),
        NoReply::Refused(refusal) => refused(name.to_owned(), operation, refusal),
    }
}

fn unanswered(name: &str, operation: &'static str, cause: Cause) -> Error {
    Error::Indeterminate {
        name: name.to_owned(),
        operation,
        source: cause.into(),
    }
}
