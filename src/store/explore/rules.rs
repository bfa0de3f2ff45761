//! What is searched: the rules, the properties, and the bounds.

use super::server::PER_TICK;
use super::world::{Budget, Token};

/// What must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Property {
    /// S1: two holds never believe at once.
    OneBeliever,
    /// S2: each grant has a greater token than all before.
    TokensRise,
    /// S3: an operation changes only the hold it was made for.
    OnlyItsOwn,
    /// L1: a hold that nobody wants is gone a request's time and a lease later.
    UnwantedEnds,
    /// L1, "at once": a hold is gone for good when a conclusive release was answered.
    ReleasedIsGone,
    /// V1: a hold that is believed in is on the server.
    BelievedIsHeld,
    /// REF: the server does what is asked for a hold that it has.
    NeverRefused,
}

/// A rule that can be taken away: of the server (in `server`), or of the clients (in `client`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// A first acquire past its deadline takes nothing.
    AcquireDeadline,
    /// A renewal past its deadline lengthens nothing.
    RenewDeadline,
    /// Counts are set, not added to.
    CountsAreSet,
    /// No operation is refused because of the count that is there.
    CountsAreNotTested,
    /// Each hold has an owner id of its own, not that of its context.
    OwnerPerHold,
    /// A deadline counts from the sending, not from the reading of the answer.
    DeadlineFromSend,
    /// It counts from the attempt that was answered, with the lease that the answer states.
    AnsweredAttempt,
    /// A renewal never takes the lock.
    RenewCreatesNothing,
    /// An inner waiter that leaves releases to the depth that remains, not to 0.
    CleanUpToDepth,
    /// A nested acquire is a level from the moment it is posted.
    OpenLevelCounts,
    /// A release is conclusive only when no acquire can run after it.
    SitOut,
    /// There are no copies of a request that was answered: nobody below us sends twice.
    OnlyOwnCopies,
    /// Tokens are at least the server's time, not a bare count.
    TokenFollowsClock,
    /// A hand-off takes the lock from the hold it names, and from no other.
    HandOffFromItsOwn,
    /// A hand-off never takes a free lock.
    HandOffCreatesNothing,
    /// A hand-off past its deadline does nothing.
    HandOffDeadline,
    /// A hand-off makes a token.
    HandOffMakesToken,
    /// A hold whose acquire may yet run is not handed on.
    OpenIsNotHandedOn,
    /// Who is next believes when the hand-off was answered, not when it was sent.
    HeirWaits,
    /// A grant that finds nobody waiting is given back.
    StrandedIsReleased,
    /// Who gives a hand-off up, or hears that it was refused, releases both holds.
    BothAreReleased,
    /// That release is conclusive only when no hand-off can run after it.
    HandOffSitOut,
}

/// What is searched.
#[derive(Clone)]
pub(super) struct Config {
    /// Ticks.
    pub(super) lease: i8,
    pub(super) budget: Budget,
    pub(super) properties: &'static [Property],
    pub(super) without: Option<Rule>,
    pub(super) tokens: bool,
    /// Ticks by which the server's clock is set, once, by `budget.steps`.
    pub(super) clock_step: i8,
    /// Ticks by which it is set when the memory is lost.
    pub(super) clock_at_loss: i8,
    /// The holds that may be started: 0 and 1 are of one flow of work, 2 of another process. Those that
    /// one is handed on to, 1 and 3, are not.
    pub(super) holds: &'static [usize],
}

impl Config {
    pub(super) fn has(&self, rule: Rule) -> bool {
        self.without != Some(rule)
    }

    /// By how much, at most.
    fn goes_back(&self) -> i8 {
        -self.clock_step.min(self.clock_at_loss).min(0)
    }

    /// How late a request is told apart from one that is later: it matters where the clock may go back.
    pub(super) fn latest(&self) -> i8 {
        -1 - self.goes_back()
    }

    /// A token older than all that can matter.
    pub(super) fn oldest_token(&self) -> Token {
        if self.tokens && self.has(Rule::TokenFollowsClock) {
            -(self.goes_back() + 1) * PER_TICK
        } else {
            0
        }
    }
}
