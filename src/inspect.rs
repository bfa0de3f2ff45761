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
use crate::hold::Hold;
use crate::key::validate_name;
use crate::kind::Kind;
use crate::lock::refused;
use crate::observe::digest;
use crate::store::{Answer, Cause, NoReply, Op, Snapshot, Verb};

/// Which kind of lock a key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum LockKind {
    /// The plain, reentrant lock.
    Plain,
    /// The fair lock: as the plain one, in order of arrival.
    Fair,
    /// A read/write lock that somebody reads under, or nobody holds.
    Read,
    /// A read/write lock that somebody writes under.
    Write,
}

impl From<Kind> for LockKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Plain => Self::Plain,
            Kind::Fair => Self::Fair,
            Kind::Read => Self::Read,
            Kind::Write => Self::Write,
        }
    }
}

/// Who holds a lock, as the server told it at one moment.
///
/// What access rules forbid to read is `None`, no more.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inspection {
    /// Which kind of lock it is.
    pub kind: LockKind,
    /// Its holder, or the first of its readers; `None` when it is free.
    pub holder: Option<Holder>,
    /// All who hold it: several only where they read.
    pub holders: Vec<Holder>,
    /// The token of the newest hold, present or past; `None` when there is no counter. Where a lock goes from hand
    /// to hand within another client in less than a millisecond, some more are given away with it: then it is the
    /// last of those, and may be up to 31 ahead of the holder's.
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
    /// What the holder's client calls itself. Of the first holder only, as are the next two.
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
    let token = snapshot.token.map(FencingToken::new);
    // The counter may be ahead: by tokens that are given away already, to those behind an own holder.
    let token = engine.own_hold(kind, name).map_or(token, |own| {
        let seen = snapshot
            .holders
            .iter()
            .any(|(owner, _)| *owner == own.owner.to_string());
        if seen { Some(own.token) } else { token }
    });
    let info = snapshot.holder_info;
    let writes = snapshot.mode.as_deref() == Some("write");
    let mut holders: Vec<_> = snapshot
        .holders
        .iter()
        .map(|(owner, count)| Holder {
            owner: digest(owner.strip_suffix(WRITES).unwrap_or(owner)),
            count: *count,
            remaining: match snapshot.readers.get(owner) {
                Some(own) => own.map(Duration::from_millis),
                None => snapshot.remaining_ms.map(Duration::from_millis),
            },
            label: None,
            host: None,
            pid: None,
        })
        .collect();
    if let Some(first) = holders.first_mut() {
        first.label = info.get("label").cloned();
        first.host = info.get("host").cloned();
        first.pid = info.get("pid").and_then(|pid| pid.parse().ok());
    }
    Ok(Inspection {
        kind: match kind {
            Kind::Plain => LockKind::Plain,
            Kind::Fair => LockKind::Fair,
            Kind::Read | Kind::Write if writes => LockKind::Write,
            Kind::Read | Kind::Write => LockKind::Read,
        },
        holder: holders.first().cloned(),
        holders,
        token,
        waiting: snapshot.waiting,
    })
}

/// This client's hold of that owner id, if somebody believes in it.
fn own_hold(engine: &Arc<Engine>, id: &str) -> Option<Arc<Hold>> {
    let own = engine.watchdog.holds().into_iter();
    own.into_iter().find(|hold| hold.owner.to_string() == id)
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
        let id = owner.strip_suffix(WRITES).unwrap_or(&owner);
        let own = own_hold(engine, id);
        if let Some(hold) = &own {
            hold.expect_force(true);
        }
        let (reply, answer) = oneshot::channel();
        let timeout = engine.config.command_timeout;
        let give_up = later(engine.now(), timeout);
        engine
            .dispatcher
            .post(Job::new(op, timeout, give_up, Box::new(Asked { reply })));
        let outcome = until(&*engine.env, later(give_up, timeout / 4), answer).await;
        if let Some(hold) = &own
            && outcome
                .as_ref()
                .is_some_and(|outcome| !may_have_run(outcome))
        {
            hold.expect_force(false);
        }
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
                    // Meanwhile it may have gone on to somebody else of this client.
                    for hold in own.into_iter().chain(own_hold(engine, id)) {
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

/// Whether it removed something, or may yet.
fn may_have_run<E>(outcome: &Result<Outcome, E>) -> bool {
    match outcome {
        Ok(Outcome::Answered(Answered {
            answer,
            unanswered_since,
            ..
        })) => *answer == Answer::Removed || unanswered_since.is_some(),
        Ok(Outcome::Failed(Failure::NotSent(_))) => false,
        Ok(Outcome::Failed(Failure::Unanswered { .. } | Failure::Closed)) | Err(_) => true,
    }
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
    let snapshot = snapshot.map_err(|no| no_reply(name, operation, no))?;
    let conflict = match (kind, &snapshot.mode) {
        (Kind::Plain, Some(_)) => "the key is a read/write lock",
        (Kind::Read | Kind::Write, None) if !snapshot.holders.is_empty() => {
            "the key is no read/write lock"
        }
        _ => return Ok(snapshot),
    };
    let source = Cause::new(conflict).into();
    let name = name.to_string();
    Err(Error::Conflict { name, source })
}

/// What the field of a writer ends with.
const WRITES: &str = ":write";

fn no_reply(name: &str, operation: &'static str, no: NoReply) -> Error {
    match no {
        NoReply::NotSent(cause) => Error::Unreachable {
            subject: format!("the server for lock `{name}`"),
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
