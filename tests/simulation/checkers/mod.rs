//! Judges of a history: one pure function for each promise, and what it may assume of the run.
//!
//! | checker | promise | judges |
//! |---|---|---|
//! | `exclusion` | S1 | while memory is kept and clocks are sane |
//! | `belief` | S1, V1 | always: what is over stays over |
//! | `tokens` | S2 | while the server's clock never goes back, or counters are kept |
//! | `owners` | S3 | always; lengths of leases while clocks are sane |
//! | `orphans` | L1 | always |
//! | `waiting` | L2 | from when all faults are healed; wake-ups in a quiet run |
//! | `silence` | V1 | always |
//! | `losses` | none is false | always; more of a quiet run |
//! | `counts` | reentrancy | always |
//! | `chains` | L2 | their number always, their time in a quiet run |
//! | `order` | L2 | clients that never stood still, if all waiters answer |
//! | `queue` | L2, fair locks | while the server's memory is kept; places that are left over in a quiet run |
//! | `renewals` | L1 | always |
//! | `register` | S1, S2 | as `exclusion`, else as `tokens` |
//!
//! A history is read once, in order (`story`); each judge is another pass over what that found.

mod belief;
mod chains;
mod counts;
mod exclusion;
mod losses;
mod order;
mod orphans;
mod owners;
mod queue;
mod register;
mod renewals;
mod silence;
mod story;
mod tale;
mod tokens;
mod waiting;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leasehold::testing::Record;

use story::Story;

/// A promise that was not kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Who says so.
    pub checker: &'static str,
    /// When it was broken, in true time.
    pub at: Duration,
    /// How.
    pub what: String,
    /// What shows it: places in the history.
    pub records: Vec<usize>,
}

/// What a run was like: what may be expected of it.
#[derive(Clone, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a condition of its own, named after what it excludes"
)]
pub struct Conditions {
    /// No restart without memory, no failover to an old copy, nothing deleted or overwritten behind
    /// anybody's back, no forced release.
    pub memory_kept: bool,
    /// No token counter was deleted, nor lost with the memory.
    pub counters_kept: bool,
    /// Nobody took the expiry of a lock away.
    pub expiry_kept: bool,
    /// Rates of all clocks within 0.5 % of each other and of true time, no step forward of the server's
    /// clock. Without, rates still differ by no more than 12 %.
    pub clocks_sane: bool,
    /// No step back of the server's clock.
    pub clock_never_back: bool,
    /// All steps back of the server's clock together.
    pub stepped_back: Duration,
    /// No faults at all, and everybody's leases long enough for `slack`.
    pub quiet: bool,
    /// Each waiter is polled within 100 ms of its waking.
    pub polled: bool,
    /// How long a waiter may go without being polled, if not. Zero: nothing is known of that.
    pub stall: Duration,
    /// Those who wait for one name ask for leases of the same length.
    pub leases_alike: bool,
    /// The locks that somebody takes for a fixed time, without renewal, or with a longest one. Who
    /// waits for them may ask for another lease than the next in line.
    pub fixed_leases: BTreeSet<Arc<str>>,
    /// The read/write locks.
    pub two_sided: BTreeSet<Arc<str>>,
    /// The locks that are fair ones.
    pub fair: BTreeSet<Arc<str>>,
    /// Queues of fair locks were not lost with the server's memory.
    pub queues_kept: bool,
    /// The locks in whose place somebody puts something else. Of others no request is refused.
    pub spoilt: BTreeSet<Arc<str>>,
    /// The longest that one attempt may take.
    pub command_timeout: Duration,
    /// Longest time that a line may go without an attempt.
    pub cap: Duration,
    /// In a quiet run: from when a lock became free until somebody in line has it. Half a second where
    /// waiters poll; two ways of a message and a round trip otherwise.
    pub wake: Duration,
    /// How late what is due may come, because of the scheduler: all tasks of a chain together.
    pub slack: Duration,
    /// Which client stood still, from when to when; in order of time. One that was killed stands
    /// still for ever.
    pub frozen: Vec<(usize, Duration, Duration)>,
    /// From then on there are no faults, and broken connections are replaced. Zero in a quiet run.
    pub healed_from: Duration,
    /// From then on, besides, everybody had released or left.
    pub settled_from: Duration,
    /// So long after that, nothing is on the server and nobody asks for anything: the longest lease,
    /// one command timeout, and `stepped_back`.
    pub bound: Duration,
    /// The end of the run.
    pub end: Duration,
}

impl Conditions {
    /// Of a run without faults that lasts until `end`, with the crate's own timeouts.
    pub fn quiet(end: Duration) -> Self {
        Self {
            memory_kept: true,
            counters_kept: true,
            expiry_kept: true,
            clocks_sane: true,
            clock_never_back: true,
            stepped_back: Duration::ZERO,
            quiet: true,
            polled: true,
            stall: Duration::ZERO,
            leases_alike: true,
            fixed_leases: BTreeSet::new(),
            two_sided: BTreeSet::new(),
            fair: BTreeSet::new(),
            queues_kept: true,
            spoilt: BTreeSet::new(),
            command_timeout: Duration::from_secs(1),
            cap: Duration::from_secs(2),
            wake: Duration::from_millis(500),
            slack: Duration::ZERO,
            frozen: Vec::new(),
            healed_from: Duration::ZERO,
            settled_from: end,
            bound: Duration::ZERO,
            end,
        }
    }

    /// When `client` must have done what it had `room` for from `since` on: the time that it stood
    /// still does not count.
    fn due(&self, client: usize, since: Duration, room: Duration) -> Duration {
        let room = room + self.slack;
        let mut due = since.saturating_add(room);
        for (_, from, to) in self.frozen.iter().filter(|frozen| frozen.0 == client) {
            if *from <= due && *to > since {
                due = due.max(to.saturating_add(room));
            }
        }
        due
    }

    fn was_frozen(&self, client: usize) -> bool {
        self.frozen.iter().any(|frozen| frozen.0 == client)
    }

    fn is_frozen_at_end(&self, client: usize) -> bool {
        let at_end = |frozen: &&(usize, Duration, Duration)| frozen.0 == client;
        self.frozen
            .iter()
            .filter(at_end)
            .any(|(_, _, to)| *to >= self.end)
    }
}

/// All promises that the history breaks, under these conditions.
pub fn check(records: &[Record], conditions: &Conditions) -> Vec<Violation> {
    let story = Story::read(records);
    let judges = [
        exclusion::check,
        belief::check,
        tokens::check,
        owners::check,
        orphans::check,
        waiting::check,
        silence::check,
        losses::check,
        counts::check,
        order::check,
        renewals::check,
        register::check,
        queue::check,
        chains::check,
    ];
    judges
        .iter()
        .flat_map(|judge| judge(&story, conditions))
        .collect()
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.at.as_micros();
        let Self { checker, what, .. } = self;
        write!(f, "{checker}: {what} ({}.{:03} ms", ms / 1000, ms % 1000)?;
        for (nth, index) in self.records.iter().enumerate() {
            let before = match nth {
                0 if self.records.len() == 1 => ", line",
                0 => ", lines",
                _ => ",",
            };
            write!(f, "{before} {index}")?;
        }
        f.write_str(")")
    }
}

/// Collects what one judge finds.
struct Verdict<'a> {
    checker: &'static str,
    records: &'a [Record],
    found: Vec<Violation>,
}

impl<'a> Verdict<'a> {
    fn of(checker: &'static str, story: &Story<'a>) -> Self {
        Self {
            checker,
            records: story.records,
            found: Vec::new(),
        }
    }

    /// Broken at the last of these records.
    fn broken(&mut self, records: &[usize], what: impl Into<String>) {
        let at = records
            .last()
            .map_or(Duration::MAX, |index| self.records[*index].at);
        self.broken_at(at, records, what);
    }

    fn broken_at(&mut self, at: Duration, records: &[usize], what: impl Into<String>) {
        self.found.push(Violation {
            checker: self.checker,
            at,
            what: what.into(),
            records: records.to_vec(),
        });
    }
}

/// Times are computed from whole milliseconds, and rounded.
const ROUNDING: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use leasehold::LossReason;
    use leasehold::testing::{Answered, Done};

    use super::tale::{Tale, ms, rough, stormy};
    use super::*;

    /// Two clients: one enters twice, the other waits for it in a line of two.
    fn a_day() -> Tale {
        Tale::new()
            .joined(0, 0)
            .granted(0, 1)
            .at(1)
            .claimed(0, 1, 990)
            .departed(0, 0, true)
            .wrote(1)
            .at(10)
            .joined(1, 0)
            .taken(1, 2)
            .at(20)
            .joined(1, 1)
            .at(100)
            .depth(0, 1, 2)
            .prolonged(1, 1090)
            .at(200)
            .depth(0, 1, 1)
            .prolonged(1, 1090)
            .at(300)
            .renewed(0, 1)
            .prolonged(1, 1290)
            .at(600)
            .left(1)
            .released(0, 1)
            .at(601)
            .granted(1, 3)
            .claimed(1, 3, 1591)
            .departed(1, 0, true)
            .wrote(2)
            .at(620)
            .left(3)
            .released(1, 3)
            .granted(1, 4)
            .claimed(1, 4, 1610)
            .departed(1, 1, true)
            .left(4)
            .released(1, 4)
            .at(700)
    }

    #[test]
    fn a_day_without_faults_breaks_nothing() {
        assert_eq!(a_day().caught(), [""; 0]);
    }

    /// Renewals that are lost, answers that come late, copies that run late; a holder is told in time.
    #[test]
    fn bad_days_break_nothing() {
        let cut_off = Tale::new()
            .granted(0, 1)
            .claimed(0, 1, 990)
            .at(400)
            .sent(0, Done::Renew, 1, 1)
            .at(990)
            .lost(1, LossReason::DeadlinePassed)
            .sent(0, Done::Release, 1, 0)
            .at(1001)
            .vanished(true)
            .granted(1, 2)
            .unchanged(0, Done::Release, 1, 0, Answered::Gone)
            .late()
            .unchanged(0, Done::Renew, 1, 1, Answered::Gone)
            .claimed(1, 2, 1991)
            .left(2)
            .released(1, 2)
            .late()
            .unchanged(1, Done::Acquire, 2, 1, Answered::Late);
        assert_eq!(cut_off.caught_under(rough), [""; 0]);

        let robbed = Tale::new()
            .granted(0, 1)
            .claimed(0, 1, 990)
            .at(100)
            .vanished(false)
            .at(101)
            .granted(1, 2)
            .claimed(1, 2, 1091)
            .at(300)
            .unchanged(0, Done::Renew, 1, 1, Answered::Gone)
            .lost(1, LossReason::TakenByOther)
            .wrote(2)
            .wrote(1)
            .left(2)
            .released(1, 2);
        assert_eq!(robbed.caught_under(stormy), [""; 0]);
        assert_ne!(robbed.caught(), [""; 0]);
    }

    /// One of these runs for each schedule of a simulation.
    #[test]
    fn long_histories_are_judged_quickly() {
        let mut records = Vec::new();
        for _ in 0..200 {
            records.extend(a_day().records());
        }
        let conditions = Conditions::quiet(ms(700));
        #[expect(
            clippy::disallowed_methods,
            reason = "measures this machine, not the crate"
        )]
        let began = Instant::now();
        check(&records, &conditions);
        assert!(began.elapsed() < Duration::from_secs(5));
    }
}
