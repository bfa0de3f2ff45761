//! Every way in which clients, network and time can meet the rules, within bounds.
//!
//! `apply` says what the server does with one operation. Here a small model of the clients and of the
//! network is put around it, and every world that can be reached is looked at, breadth first: messages
//! run late, twice, in any order or never, and clients start, leave, nest and renew when they like.
//!
//! The searches with all rules find nothing. For each rule there is one without it that finds what the
//! rule is for, so the search can fail, and no rule is there by habit.

mod search;
mod server;
mod steps;
mod world;

use search::{Verdict, search};
use world::{Budget, Token};

/// What must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Property {
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

/// A rule that can be taken away: of the server (in `server`), or of the clients (in `steps`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
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
}

/// What is searched.
#[derive(Clone)]
struct Config {
    /// Ticks.
    lease: i8,
    budget: Budget,
    properties: &'static [Property],
    without: Option<Rule>,
    tokens: bool,
    /// Ticks by which the server's clock is set, once, by `budget.steps`.
    clock_step: i8,
    /// Ticks by which it is set when the memory is lost.
    clock_at_loss: i8,
    /// A hold that is never started.
    without_hold: usize,
}

impl Config {
    fn has(&self, rule: Rule) -> bool {
        self.without != Some(rule)
    }

    fn goes_back(&self) -> i8 {
        -self.clock_step.min(self.clock_at_loss).min(0)
    }

    /// How late a request is told apart from one that is later: it matters where the clock may go back.
    fn latest(&self) -> i8 {
        -1 - self.goes_back()
    }

    /// A token older than all that can matter.
    fn oldest_token(&self) -> Token {
        if self.tokens && self.has(Rule::TokenFollowsClock) {
            -(self.goes_back() + 1) * server::PER_TICK
        } else {
            0
        }
    }
}

fn base() -> Config {
    Config {
        lease: 2,
        budget: Budget {
            copies: 1,
            cancels: 1,
            renewals: 1,
            ..Budget::default()
        },
        properties: &[
            Property::OneBeliever,
            Property::OnlyItsOwn,
            Property::UnwantedEnds,
            Property::ReleasedIsGone,
            Property::BelievedIsHeld,
            Property::NeverRefused,
        ],
        without: None,
        tokens: false,
        clock_step: 0,
        clock_at_loss: 0,
        without_hold: usize::MAX,
    }
}

#[test]
fn probe() {
    let start = std::time::Instant::now();
    let verdict = search(&base(), 300_000);
    println!("{verdict:?} {:?}", start.elapsed());
}
