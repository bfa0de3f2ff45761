//! What must be true in each schedule, whatever happens in which order.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;

use crate::kind::Kind;
use crate::store::{Answer, Belief, Op, OwnerId, Verb};

#[derive(Debug, Default)]
pub(super) struct Judge {
    /// Until when each is believed in.
    believed: BTreeMap<OwnerId, Instant>,
    /// Those that were, and are not any more.
    ended: BTreeSet<OwnerId>,
    /// Those that their holder has left, and that somebody else of the same client may claim.
    passed: BTreeSet<OwnerId>,
    token: u64,
    /// Everybody who asked for the lock, and final releases for each that were run.
    asked: BTreeMap<OwnerId, usize>,
    granted: BTreeSet<OwnerId>,
    /// Holds that the server has forgotten.
    deleted: BTreeSet<OwnerId>,
    /// Those of whose operations one was not answered: it is sent again, or swept up after.
    unanswered: BTreeSet<OwnerId>,
    /// Those who let others read with them.
    sharing: BTreeSet<OwnerId>,
    /// Who writes in place of which reader.
    upgraded: BTreeMap<OwnerId, OwnerId>,
    /// Those who stood in the queue of a fair lock.
    queued: BTreeSet<OwnerId>,
    /// Hand-offs and upgrades that were done, and downgrades.
    pub(super) moved: usize,
}

impl Judge {
    /// `op` leaves a client.
    pub(super) fn sent(&mut self, op: &Op) {
        if let Verb::Acquire {
            owner, count: 1, ..
        }
        | Verb::HandOff { to: owner, .. }
        | Verb::Upgrade { to: owner, .. }
        | Verb::Enqueue { owner, .. } = op.verb
        {
            self.asked.entry(owner).or_default();
        }
    }

    pub(super) fn unanswered(&mut self, op: &Op) {
        if let Verb::Acquire { owner, .. }
        | Verb::Enqueue { owner, .. }
        | Verb::Release { owner, .. } = op.verb
        {
            self.unanswered.insert(owner);
        }
        if let Verb::HandOff { from, to, .. } | Verb::Upgrade { from, to, .. } = op.verb {
            self.unanswered.extend([from, to]);
        }
    }

    pub(super) fn deleted(&mut self) {
        self.deleted = self.granted.clone();
    }

    pub(super) fn believes(&mut self, belief: Belief<'_>, now: Instant) {
        match belief {
            Belief::Claimed {
                owner,
                token,
                deadline,
                ..
            } => {
                assert!(self.granted.contains(&owner), "believed, not granted");
                assert!(!self.ended.contains(&owner), "believed again");
                let shares = self.sharing.contains(&owner);
                let another = self.believed.iter().any(|(other, until)| {
                    let both_share = shares && self.sharing.contains(other);
                    let instead = self.upgraded.get(&owner) == Some(other);
                    let forgotten = self.deleted.contains(other);
                    now < *until && !both_share && !instead && !forgotten
                });
                // What the server has forgotten keeps nobody out, and may be told to its waiter yet.
                let forgotten = self.deleted.contains(&owner);
                assert!(forgotten || !another, "two believe at once");
                // One that was interrupted in its claim until its lease was over is no holder.
                let late = deadline <= now;
                // Those who read have the token of who wrote before them.
                let rises = self.token < token || (shares && self.token == token);
                assert!(forgotten || late || rises, "a token is not greater");
                self.token = self.token.max(token);
                self.passed.remove(&owner);
                self.believed.insert(owner, deadline);
            }
            Belief::Prolonged { owner, deadline } => {
                assert!(!self.ended.contains(&owner), "prolonged after its end");
                if let Some(until) = self.believed.get_mut(&owner) {
                    assert!(*until <= deadline, "shortened");
                    *until = deadline;
                }
            }
            Belief::Passed { owner } => {
                assert!(
                    self.believed.remove(&owner).is_some(),
                    "passed on, but not held"
                );
                self.passed.insert(owner);
            }
            Belief::Lost { owner, .. } | Belief::Left { owner } => {
                let passed = self.passed.remove(&owner);
                assert!(
                    self.believed.remove(&owner).is_some() || passed,
                    "ended, but not held"
                );
                self.ended.insert(owner);
            }
            Belief::Joined { .. } | Belief::Departed { .. } => {}
        }
    }

    /// The server did `op`.
    pub(super) fn ran(&mut self, op: &Op, answer: &Answer) {
        let granted = matches!(answer, Answer::Granted { .. });
        if let (
            Answer::Gone(_),
            Verb::Renew { owner, .. }
            | Verb::Downgrade { owner, .. }
            | Verb::Upgrade { from: owner, .. },
        ) = (answer, &op.verb)
        {
            // Its lease was over, and its client is told.
            self.deleted.insert(*owner);
        }
        match op.verb {
            Verb::Acquire {
                owner, count: 1, ..
            }
            | Verb::Enqueue { owner, .. } => {
                if granted {
                    self.granted.insert(owner);
                }
                if granted && op.kind == Kind::Read {
                    self.sharing.insert(owner);
                }
                if matches!(answer, Answer::Queued { .. }) {
                    self.queued.insert(owner);
                }
            }
            Verb::Downgrade { owner, .. } => {
                if matches!(answer, Answer::StillHeld { .. }) {
                    self.moved += 1;
                    self.sharing.insert(owner);
                }
            }
            Verb::Upgrade { from, to, .. } if granted => {
                self.moved += 1;
                self.granted.insert(to);
                self.upgraded.insert(to, from);
                // For the reader it is the release.
                *self.asked.get_mut(&from).expect("never asked for") += 1;
            }
            Verb::Release {
                owner,
                count: 0,
                also,
            } => {
                for owner in [owner].into_iter().chain(also) {
                    let releases = self.asked.get_mut(&owner);
                    *releases.expect("released, but never asked for") += 1;
                }
            }
            Verb::HandOff { from, to, .. } => {
                if granted {
                    self.moved += 1;
                    self.granted.insert(to);
                }
                // For the one that has it no more, it is the release.
                if matches!(answer, Answer::Late | Answer::Refused(_)) {
                    return;
                }
                *self
                    .asked
                    .get_mut(&from)
                    .expect("handed on, but never asked for") += 1;
            }
            _ => {}
        }
    }

    /// Nobody who waits is passed by.
    pub(super) fn in_order(op: &Op, answer: &Answer, first: Option<&String>) {
        if let (
            Kind::Fair,
            Verb::Acquire { owner, .. } | Verb::Enqueue { owner, .. },
            Answer::Granted { .. },
        ) = (op.kind, &op.verb, answer)
        {
            let in_turn = first.is_none_or(|first| *first == owner.to_string());
            assert!(in_turn, "somebody who waits was passed by");
        }
    }

    /// Exactly what was granted was released.
    pub(super) fn at_the_end(&self) {
        assert!(self.believed.is_empty(), "believed in at the end");
        let replaced: BTreeSet<_> = self.upgraded.values().copied().collect();
        for (owner, releases) in &self.asked {
            let least = self.granted.contains(owner) && !self.deleted.contains(owner);
            let most = if self.unanswered.contains(owner) {
                usize::MAX
            } else {
                usize::from(self.granted.contains(owner) || self.queued.contains(owner))
            };
            // Of a reader who is told too late that he writes, both are.
            let most = most.saturating_add(usize::from(replaced.contains(owner)));
            let right = (usize::from(least)..=most).contains(releases);
            assert!(right, "{releases} releases, {least}..{most} expected");
        }
    }
}
