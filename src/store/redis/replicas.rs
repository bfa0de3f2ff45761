//! Replicas that must have a new hold before it counts (`replica_acks`).
//!
//! After a grant, `WAIT` on the same connection tells how many replicas have all that was written on
//! it. Too few is "no answer": the same operation goes out again, finds its hold, and asks again; in
//! the end it is given up like any other, and swept.
//!
//! 1. `WAIT` holds up everything behind it on its connection, renewals too. So it is asked for a
//!    moment at a time, one at a time, with room between for what waits.
//! 2. Newer servers wait for what *this* connection wrote. The copy of a grant may come over another
//!    one than the grant did, and so writes its deadline again (`lock_acquire.lua`).
//! 3. Replicas that have a hold can still lose the election to one that has not: this narrows the gap
//!    of a failover and does not close it.

use tokio::time::Instant;

use super::connection::{ConnectFailure, Fault, Link};
use super::script::refusal;
use super::{Cause, Shared};
use crate::config::millis;
use crate::env::{Env, later, until};
use crate::store::{Answer, Refusal, RefusalKind};

impl Shared {
    /// Completes when enough replicas have what `answers` granted; at `end`, with how many had.
    pub(super) async fn acknowledged(
        &self,
        link: &Link,
        answers: &[Answer],
        end: Instant,
    ) -> Result<(), Cause> {
        let wanted = u64::from(self.config.replica_acks);
        let granted = |answer: &Answer| matches!(answer, Answer::Granted { .. });
        if wanted == 0 || !answers.iter().any(granted) {
            return Ok(());
        }
        let env = &*self.env;
        // A little earlier than the call's own end, so that the caller hears this reason.
        let end = end - end.saturating_duration_since(env.now()) / 8;
        let mut had = 0;
        loop {
            let too_few = || Cause::new(format!("{had} of {wanted} replicas acknowledged"));
            let turn = until(env, end, self.waiting.lock()).await;
            let turn = turn.ok_or_else(too_few)?;
            let left = end.saturating_duration_since(env.now());
            if left.is_zero() {
                return Err(too_few());
            }
            let moment = millis(left.min(MOMENT)).to_string();
            let args = vec![wanted.to_string().into(), moment.into()];
            match link.ask(env, "WAIT", args, end).await {
                Ok(acks) => had = acks.as_u64().unwrap_or(0),
                Err(Fault::TimedOut) => continue,
                Err(fault) => return Err(fault.cause()),
            }
            drop(turn);
            if had >= wanted {
                return Ok(());
            }
            env.sleep_until(later(env.now(), MOMENT)).await;
        }
    }
}

/// Whether `WAIT` may be used at all: told at connecting, not by each acquisition.
pub(super) async fn check_wait(
    env: &dyn Env,
    link: &Link,
    deadline: Instant,
) -> Result<(), ConnectFailure> {
    match link
        .ask(env, "WAIT", vec!["0".into(), "1".into()], deadline)
        .await
    {
        Err(Fault::Server(words)) => {
            let refusal = refusal(&words);
            Err(match refusal.kind {
                RefusalKind::Denied => ConnectFailure::Refused(Refusal {
                    message: format!("{} (replica_acks needs +wait)", refusal.message),
                    ..refusal
                }),
                // A replica, for the time being.
                _ => ConnectFailure::Unreachable(Cause::new(words)),
            })
        }
        Err(fault) => Err(ConnectFailure::Unreachable(fault.cause())),
        Ok(_) => Ok(()),
    }
}

/// How long one `WAIT` may hold up the connection.
const MOMENT: std::time::Duration = std::time::Duration::from_millis(10);
