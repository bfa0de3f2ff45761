//! Waiting for a fair lock: each waiter stands in the server's queue by itself, in a line of its own.
//!
//! The order is the server's, so there is no hand-off and nobody here lets anybody pass. A waiter asks
//! for its turn when it comes, when it is told, and when the holder's lease is over while it is first.
//! In between it says every [`BEAT_EVERY`] that it is there (a *beat*), from the line's task: so also
//! while its future is not polled. If it does not beat for [`BEAT_LASTS`], others pass.
//!
//! 1. A place has one owner id, from the first request to the end: the grant, or the `Release` that
//!    takes the place away, which is sent whenever a request for it may have run.
//! 2. That `Release` sits out what is unanswered, as for a hold: a request that runs after it would put
//!    a waiter into the queue whom nobody serves.
//! 3. A grant that is not claimed in time ends the place with it. The waiter comes back at the tail when
//!    it is polled again: it had its turn.

use std::time::Duration;

use super::{Line, Next};
use crate::config::{BEAT_LASTS, FAIR_WAIT, millis};
use crate::dispatch::{Failure, Outcome};
use crate::kind::Kind;
use crate::observe;
use crate::store::{Answer, Channel, OwnerId, RefusalKind, Stay, Verb};

/// A place in the queue of the server, as far as is known of it.
#[derive(Debug)]
pub(super) struct Spot {
    owner: OwnerId,
    lease: Duration,
    /// The server has said that it is there.
    queued: bool,
    /// A request for it is under way.
    asking: bool,
    /// Server time until which an unanswered request may still run.
    open_until_us: Option<u64>,
}

impl Spot {
    /// Whether something of it may be on the server.
    fn may_be_there(&self) -> bool {
        self.queued || self.open_until_us.is_some()
    }
}

impl Line {
    pub(super) fn is_fair(&self) -> bool {
        self.kind == Kind::Fair
    }

    /// Where this line is told of a release.
    pub(super) fn channel(&self) -> Channel {
        let owner = self.state.lock().spot.as_ref().map(|spot| spot.owner);
        match owner {
            Some(owner) => Channel::Fair(self.name.clone(), owner.to_string().into()),
            None => self.kind.channel(&self.name),
        }
    }

    /// What to ask the server for: a turn, or only to keep the place until then.
    pub(super) fn ask_in_queue(&self, lease: Duration) -> (OwnerId, Verb) {
        let mut state = self.state.lock();
        let only_keep = std::mem::take(&mut state.only_keep);
        let spot = state.spot.get_or_insert_with(|| Spot {
            owner: self.engine.fresh_owner(),
            lease,
            queued: false,
            asking: false,
            open_until_us: None,
        });
        spot.asking = true;
        let stay = Stay {
            beat_ms: millis(BEAT_LASTS),
            wait_ms: millis(FAIR_WAIT),
        };
        let owner = spot.owner;
        if only_keep && spot.queued {
            return (owner, Verb::Beat { owner, stay });
        }
        drop(state);
        let verb = Verb::Enqueue {
            owner,
            lease_ms: millis(lease),
            token: self.engine.token_rule(&self.name),
            stay,
        };
        (owner, verb)
    }

    /// Takes an outcome into account as far as it concerns the place in the queue: what to do next, if that
    /// says it all.
    pub(super) fn heard_in_queue(&self, outcome: &mut Outcome) -> Option<Next> {
        let mut state = self.state.lock();
        let spot = state.spot.as_mut()?;
        spot.asking = false;
        let answered = match outcome {
            Outcome::Answered(answered) => answered,
            Outcome::Failed(Failure::Unanswered { open_until_us, .. }) => {
                spot.open_until_us = spot.open_until_us.max(Some(*open_until_us));
                return None;
            }
            Outcome::Failed(_) => return None,
        };
        spot.open_until_us = spot.open_until_us.max(answered.open_until_us);
        // It is the place that is swept when all is over, or the hold that it became.
        answered.open_until_us = None;
        match &answered.answer {
            Answer::Granted { .. } => {
                answered.open_until_us = spot.open_until_us;
                state.spot = None;
                None
            }
            Answer::Queued {
                first,
                remaining_ms,
            } => {
                spot.queued = true;
                state.taken_below = state.next;
                Some(match remaining_ms {
                    Some(0) => Next::Again,
                    // The others are told when it is their turn, or learn it by a beat.
                    left if *first => Next::Taken(left.map(Duration::from_millis)),
                    _ => Next::Taken(None),
                })
            }
            Answer::Gone(_) => {
                let owner = spot.owner;
                let lost = std::mem::take(&mut spot.queued);
                drop(state);
                if lost {
                    observe::place_lost(&self.engine, &self.name, owner);
                }
                Some(Next::Again)
            }
            // The place is there for a while yet.
            Answer::Refused(refusal) if spot.queued && refusal.kind == RefusalKind::OutOfMemory => {
                Some(Next::Taken(None))
            }
            _ => None,
        }
    }

    /// Gives the place in the queue up, if nobody stands in this line any more, or nobody may be served. While
    /// a request is under way its outcome comes first, and then this again.
    pub(super) fn leave_queue(&self) {
        let spot = {
            let mut state = self.state.lock();
            let asking = state.spot.as_ref().is_some_and(|spot| spot.asking);
            let wanted = !state.waiters.is_empty() && !self.engine.closing.is_cancelled();
            if asking || wanted {
                return;
            }
            state.spot.take()
        };
        if let Some(spot) = spot.filter(Spot::may_be_there) {
            self.sweep(spot.owner, spot.lease.max(BEAT_LASTS), spot.open_until_us);
        }
    }
}
