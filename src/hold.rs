//! One hold: the state machine between a grant and its end.
//!
//! | from | event | to |
//! |---|---|---|
//! | | granted by the store | `Offered` |
//! | `Offered` | claimed by its waiter in time | `Held` |
//! | `Offered` | not claimed, or too late | `Ended`, a release is posted |
//! | `Held` | nested acquire, inner release | `Held` |
//! | `Held` | last level left | `Releasing`, a release is posted |
//! | `Held` | last level left, and passed on to the next within the client | `Ended`; the next one's is `Offered` |
//! | `Held` | deadline, "gone", forced, `max_hold`, closed | `Lost`, for good |
//! | `Releasing` | the release is answered or given up | `Ended` |
//!
//! Invariants:
//!
//! 1. The levels here are the depth; the server's count only follows. A nested acquisition is a level
//!    from the moment it is posted, or the outer guard's release would end the hold under it.
//! 2. Only `Held` is renewed. The phase leaves `Held` before the release is posted, so no renewal is
//!    posted after it.
//! 3. `Lost` never reverts: an answer that comes later moves no deadline.
//! 4. The state is not locked while the dispatcher or a waker is called. The watchdog may be: it never
//!    calls back with its own lock held.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::bug::{self, Bug, seeded};
use crate::config::millis;
use crate::contend::Chain;
use crate::dispatch::{Answered, Failure, Job, Outcome, Requester};
use crate::engine::Engine;
use crate::env::later;
use crate::fencing::FencingToken;
use crate::guard::{LossReason, ReleaseOutcome};
use crate::kind::Kind;
use crate::lease::Term;
use crate::observe;
use crate::store::{Answer, Belief, Instead, Op, OwnerId, Verb};
use crate::sync::Mutex;
use crate::watchdog::{Appointment, Timed};

/// What one level of a hold asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) lease: Duration,
    /// Whether the watchdog renews it.
    pub(crate) renewed: bool,
    pub(crate) max_hold: Option<Duration>,
}

impl Terms {
    /// The lease to ask the server for at the start.
    pub(crate) fn first_lease(&self) -> Duration {
        self.max_hold.map_or(self.lease, |max| self.lease.min(max))
    }

    /// Whether a lease of which some has gone will do: it is renewed.
    pub(crate) fn takes_over(&self) -> bool {
        self.renewed && self.max_hold.is_none()
    }

    /// The same, of this one.
    pub(crate) fn takes_over_from(&self, lease: Duration) -> bool {
        self.takes_over() && self.first_lease() == lease
    }
}

/// One outermost acquisition, until its end.
pub(crate) struct Hold {
    pub(crate) engine: Arc<Engine>,
    pub(crate) kind: Kind,
    pub(crate) name: Arc<str>,
    pub(crate) owner: OwnerId,
    pub(crate) token: FencingToken,
    lease: Duration,
    /// The hand-offs by which it came here.
    pub(crate) chain: Option<Chain>,
    /// Tokens after this one that are reserved for those who get the lock next within this client.
    spare: u64,
    /// It came from another hold of this client, of which the server was not told: owner id and lease are
    /// the other's.
    passed: bool,
    /// Made when somebody wants to be told.
    lost: OnceLock<CancellationToken>,
    state: Mutex<State>,
}

#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
#[derive(Debug)]
struct State {
    phase: Phase,
    levels: Vec<Level>,
    next_level: u32,
    term: Term,
    since: Instant,
    /// When the next renewal is due; `None` while one is under way or none is wanted.
    renew_at: Option<Instant>,
    /// When to say that the renewal under way is late.
    late_at: Option<Instant>,
    told_late: bool,
    /// This client is about to remove it by force.
    forced: bool,
    /// How often it was on offer.
    offers: u32,
    /// The watchdog's renewal is under way.
    renewing: bool,
    /// The longest lease that was asked for and is not confirmed: the server's may be that long,
    /// also if who asked has gone.
    asked: Option<Duration>,
    appointment: Option<Appointment>,
    /// Server time until which an unanswered attempt of the acquisition may still run.
    open_until_us: Option<u64>,
    /// An operation that sets its count was not answered: a copy of it may still run.
    stray: bool,
    side: Side,
}

/// Which side of a read/write lock a hold is on, when it began as a writer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    /// The one it was acquired on.
    Own,
    /// It is to go on as a reader's, and the server has not been asked, or would not.
    ToRead,
    /// The server was asked.
    Asked,
    /// It goes on as a reader's.
    Reads,
    /// A reader's, which was asked to go on as the writer's: the server may know it by another name. It is
    /// not renewed, and what the server does not find is not lost for that.
    Upgrading,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Offered,
    Held,
    Releasing,
    Ended,
    Lost(LossReason),
}

#[derive(Clone, Copy, Debug)]
struct Level {
    id: u32,
    renewed: bool,
    lease: Duration,
    ends: Option<Instant>,
    /// Entered for reading.
    shared: bool,
}

/// What entering another level amounted to.
#[derive(Debug)]
pub(crate) enum Entered {
    /// A level, counted from now on, to be told to the server.
    Level {
        level: u32,
        depth: u32,
    },
    /// A level within a hold that writes, of which the server is not told: nobody else may enter. Its
    /// lease is to be asked for if `lengthen`.
    Within {
        level: u32,
        lengthen: bool,
    },
    /// To write within a hold that reads: it would wait for itself.
    WouldDeadlock,
    Lost(LossReason),
    /// The last level has just left: there is no hold to enter.
    Over,
}

/// What leaving a level amounted to.
#[derive(Debug)]
pub(crate) enum Left {
    /// Levels remain; the answer tells whether the server still has the hold.
    Inner { depth: u32 },
    /// It was the last one; the release was posted.
    Last,
    /// The hold had been lost before.
    Lost(LossReason),
}

impl Hold {
    /// A hold the store has granted; nobody believes in it yet.
    #[expect(clippy::too_many_arguments, reason = "all that is known of a grant")]
    pub(crate) fn granted(
        engine: &Arc<Engine>,
        kind: Kind,
        name: &Arc<str>,
        owner: OwnerId,
        lease: Duration,
        token: u64,
        remaining_ms: u64,
        answered: &Answered,
        chain: Option<Chain>,
        spare: u64,
    ) -> Arc<Self> {
        engine.saw_token(name, token + spare, answered.server_now_us);
        engine.grant_begins();
        Arc::new(Self {
            engine: Arc::clone(engine),
            kind,
            name: Arc::clone(name),
            owner,
            token: FencingToken::new(token),
            lease,
            chain,
            spare,
            passed: false,
            lost: OnceLock::new(),
            state: Mutex::new(State {
                phase: Phase::Offered,
                levels: Vec::with_capacity(1),
                next_level: 0,
                term: Term::confirmed(
                    if seeded(Bug::DeadlineFromReply) {
                        engine.now()
                    } else {
                        answered.sent
                    },
                    remaining_ms,
                ),
                since: answered.sent,
                renew_at: None,
                late_at: None,
                told_late: false,
                forced: false,
                offers: 0,
                renewing: false,
                asked: None,
                appointment: None,
                open_until_us: answered.open_until_us,
                stray: false,
                side: Side::Own,
            }),
        })
    }

    /// Whether the next in line within this client may have it without a word to the server, once its last
    /// level was left: by its lease, which goes on, and its tokens. Nothing may be under way that tells of it.
    pub(crate) fn may_be_passed(&self) -> bool {
        let half = later(self.engine.now(), self.lease / 2);
        let state = self.state.lock();
        let settled = state.asked.is_none() && !state.stray && state.open_until_us.is_none();
        let due = state.phase == Phase::Releasing && half < state.term.deadline;
        self.spare > 0 && settled && due && self.engine.dispatcher.has_no_lane(self.owner)
    }

    /// The hold of who gets it next: the same to the server, with the next token and what is left of the
    /// lease. This one has ended.
    pub(crate) fn passed_on(&self, chain: Chain) -> Arc<Self> {
        self.engine.grant_begins();
        let now = self.engine.now();
        let (mut term, forced) = {
            let mut state = self.state.lock();
            state.phase = Phase::Ended;
            (state.term, state.forced)
        };
        if seeded(Bug::PassRenews) {
            term = Term::confirmed(now, millis(self.lease));
        }
        Arc::new(Self {
            engine: Arc::clone(&self.engine),
            kind: self.kind,
            name: Arc::clone(&self.name),
            owner: self.owner,
            token: FencingToken::new(
                u64::from(self.token) + u64::from(!seeded(Bug::PassKeepsToken)),
            ),
            lease: self.lease,
            chain: Some(chain),
            spare: self.spare - 1,
            passed: true,
            lost: OnceLock::new(),
            state: Mutex::new(State {
                phase: Phase::Offered,
                levels: Vec::with_capacity(1),
                next_level: 0,
                term,
                since: now,
                renew_at: None,
                late_at: None,
                told_late: false,
                forced,
                offers: 0,
                renewing: false,
                asked: None,
                appointment: None,
                open_until_us: None,
                stray: false,
                side: Side::Own,
            }),
        })
    }

    /// Whether somebody with these terms may have it.
    pub(crate) fn suits(&self, terms: &Terms) -> bool {
        // What was passed on has less left than a whole lease.
        terms.first_lease() == self.lease && (!self.passed || terms.takes_over())
    }

    /// How long it has been held.
    pub(crate) fn held_for(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.state.lock().since)
    }

    /// Whether enough is left for somebody to begin with it.
    pub(crate) fn worth_offering(&self) -> bool {
        let until = later(self.engine.now(), self.lease / 4);
        seeded(Bug::LateGrantCounts) || until < self.state.lock().term.deadline
    }

    /// Begins to be believed in, unless its deadline has passed while it was offered.
    pub(crate) fn claim(self: &Arc<Self>, terms: &Terms) -> Option<u32> {
        let now = self.engine.now();
        let mut state = self.state.lock();
        let late = now >= state.term.deadline && !seeded(Bug::LateGrantCounts);
        if state.phase != Phase::Offered || late {
            return None;
        }
        state.phase = Phase::Held;
        // Counted from the sending: where the lease was cut for it, both end together.
        let mut ends = terms.max_hold.map(|max| later(state.since, max));
        if terms.first_lease() < terms.lease {
            ends = ends.map(|ends| ends.min(state.term.end));
        }
        state.since = now;
        let level = state.add_level(terms, ends, self.kind.is_shared());
        let known = seeded(Bug::WatchdogByName) && bug::enter(self.engine.client, &self.name);
        if terms.renewed && !known {
            let left = state.term.end.saturating_duration_since(now);
            let two_thirds = terms.first_lease() * 2 / 3;
            let fresh = left >= two_thirds;
            // Counted back from the end of the lease, which was confirmed by the grant.
            state.renew_at = Some(if fresh {
                let due = later(now, left.saturating_sub(two_thirds));
                self.engine.together(due, terms.lease).max(now)
            } else {
                now
            });
        }
        self.make_appointment(&mut state);
        let deadline = state.term.deadline;
        drop(state);
        self.engine.store.believes(Belief::Claimed {
            name: &self.name,
            owner: self.owner,
            token: self.token.into(),
            deadline,
        });
        self.engine.announce(now);
        Some(level)
    }

    /// Adds a level for a nested acquisition on this side about to be posted, and says to which count.
    pub(crate) fn enter(self: &Arc<Self>, side: Kind, terms: &Terms) -> Entered {
        let now = self.engine.now();
        let _ = self.check(now);
        let mut state = self.state.lock();
        match state.phase {
            Phase::Held => {}
            Phase::Lost(reason) => return Entered::Lost(reason),
            Phase::Offered | Phase::Releasing | Phase::Ended => return Entered::Over,
        }
        let within = side.is_shared() && state.writes();
        if !side.is_shared() && !state.writes() {
            return if seeded(Bug::UpgradeThatWaits) {
                Entered::Over
            } else {
                Entered::WouldDeadlock
            };
        }
        let lengthen = state
            .renewed_lease()
            .is_none_or(|lease| lease < terms.lease);
        let ends = terms.max_hold.map(|max| later(now, max));
        let level = state.add_level(terms, ends, side.is_shared());
        let depth = state.count();
        if terms.renewed && state.renew_at.is_none() && !state.renewing {
            state.renew_at = Some(later(now, terms.lease / 3));
        }
        self.make_appointment(&mut state);
        if within {
            Entered::Within { level, lengthen }
        } else {
            Entered::Level { level, depth }
        }
    }

    /// Takes a confirmation by the store into account.
    pub(crate) fn confirmed(self: &Arc<Self>, sent: Instant, remaining_ms: u64) {
        let mut state = self.state.lock();
        if state.phase == Phase::Held && self.engine.now() < state.term.deadline {
            self.prolong(&mut state, sent, remaining_ms);
            state.answered(remaining_ms);
            self.make_appointment(&mut state);
        }
    }

    fn prolong(&self, state: &mut State, sent: Instant, remaining_ms: u64) {
        let sent = if seeded(Bug::DeadlineFromReply) {
            self.engine.now()
        } else {
            sent
        };
        state.term = state.term.max(Term::confirmed(sent, remaining_ms));
        self.engine.store.believes(Belief::Prolonged {
            owner: self.owner,
            deadline: state.term.deadline,
        });
    }

    /// Whether the hold is held, by the clock; the first look past its deadline makes it lost.
    pub(crate) fn check(self: &Arc<Self>, now: Instant) -> Result<(), LossReason> {
        let over = {
            let state = self.state.lock();
            match state.phase {
                Phase::Lost(reason) => return Err(reason),
                Phase::Held => state.over(now),
                Phase::Offered | Phase::Releasing | Phase::Ended => None,
            }
        };
        match over {
            Some(reason) => Err(self.lose(reason).unwrap_or(reason)),
            None => Ok(()),
        }
    }

    /// Whether it was neither left nor lost so far; the clock is not looked at.
    pub(crate) fn is_held(&self) -> bool {
        self.state.lock().phase == Phase::Held
    }

    /// When it will be lost unless it is renewed.
    pub(crate) fn deadline(&self) -> Instant {
        let state = self.state.lock();
        state
            .ends()
            .map_or(state.term.deadline, |ends| ends.min(state.term.deadline))
    }

    pub(crate) fn depth(&self) -> u32 {
        self.state.lock().depth()
    }

    pub(crate) fn since(&self) -> Instant {
        self.state.lock().since
    }

    pub(crate) fn lost(&self) -> &CancellationToken {
        let lost = self.lost.get_or_init(CancellationToken::new);
        // Who ended it looked for somebody to tell perhaps before this.
        if matches!(self.state.lock().phase, Phase::Lost(_)) {
            lost.cancel();
        }
        lost
    }

    pub(crate) fn loss_reason(self: &Arc<Self>) -> Option<LossReason> {
        self.check(self.engine.now()).err()
    }

    /// The lease it was asked for with.
    pub(crate) fn lease(&self) -> Duration {
        self.lease
    }

    /// When the server frees it at the latest, if nothing else does.
    pub(crate) fn server_end(&self) -> Instant {
        self.state.lock().term.end
    }

    /// Completes with the reason when the hold is lost. Has a timer of its own.
    pub(crate) async fn until_lost(self: &Arc<Self>) -> LossReason {
        loop {
            if let Err(reason) = self.check(self.engine.now()) {
                return reason;
            }
            let deadline = self.deadline();
            if deadline <= self.engine.now() {
                // Neither lost nor held: released.
                self.lost().cancelled().await;
                continue;
            }
            tokio::select! {
                biased;
                () = self.lost().cancelled() => {}
                () = self.engine.env.sleep_until(deadline) => {}
            }
        }
    }

    /// Time one attempt for this hold may take.
    pub(crate) fn command_timeout(&self) -> Duration {
        self.engine.config.command_timeout_for(self.lease)
    }

    /// Ends the belief in this hold, for good. Answers with the reason that counts, `None` if the
    /// hold was over anyway.
    pub(crate) fn lose(&self, reason: LossReason) -> Option<LossReason> {
        match self.end_belief(reason) {
            Ok(()) => Some(reason),
            Err(earlier) => earlier,
        }
    }

    /// The same; an error if it had ended before, with the reason if it was lost.
    fn end_belief(&self, reason: LossReason) -> Result<(), Option<LossReason>> {
        let (appointment, term, reason) = {
            let mut state = self.state.lock();
            // What a renewal finds gone meanwhile is gone for that reason.
            let reason = match reason {
                LossReason::KeyGone | LossReason::TakenByOther if state.forced => {
                    LossReason::Forced
                }
                other => other,
            };
            match state.phase {
                Phase::Held => {}
                Phase::Lost(earlier) => return Err(Some(earlier)),
                Phase::Offered | Phase::Releasing | Phase::Ended => return Err(None),
            }
            state.phase = Phase::Lost(reason);
            (state.appointment.take(), state.term, reason)
        };
        if let Some(appointment) = appointment {
            self.engine.watchdog.cancel(appointment);
        }
        observe::lost(&self.engine, &self.name, self.owner, reason, term.end);
        self.engine.store.believes(Belief::Lost {
            owner: self.owner,
            reason,
        });
        if let Some(lost) = self.lost.get() {
            lost.cancel();
        }
        self.engine.grant_ends();
        Ok(())
    }

    /// Leaves a level. The last one out posts the release; `reply` hears how that went.
    pub(crate) fn leave(
        self: &Arc<Self>,
        level: u32,
        reply: Option<oneshot::Sender<ReleaseOutcome>>,
    ) -> Left {
        // A hold past its deadline is lost, even if nobody has looked yet.
        let _ = self.check(self.engine.now());
        let mut state = self.state.lock();
        let shared = state.levels.iter().any(|it| it.id == level && it.shared);
        state.levels.retain(|other| other.id != level);
        let mut depth = state.depth();
        if depth == 1 && state.asked.is_some() && seeded(Bug::NestedNotCounted) {
            depth = 0;
        }
        match state.phase {
            Phase::Held if depth > 0 => {
                if !state.levels.iter().any(|level| level.renewed) {
                    state.renew_at = None;
                }
                self.make_appointment(&mut state);
                let unanswered = state.asked.is_some();
                let (writes, count) = (state.writes(), state.count());
                if !shared && !writes {
                    state.side = Side::ToRead;
                }
                drop(state);
                if unanswered && seeded(Bug::NestedCleanUpReleasesAll) {
                    self.post_release(None);
                }
                if shared != writes {
                    self.post_inner_release(count, depth, reply);
                } else if shared {
                    // The server never heard of this level.
                    if let Some(reply) = reply {
                        let _ = reply.send(ReleaseOutcome::StillHeld { depth });
                    }
                } else {
                    self.post_downgrade(reply);
                }
                Left::Inner { depth }
            }
            Phase::Held => {
                state.phase = Phase::Releasing;
                let appointment = state.appointment.take();
                drop(state);
                if seeded(Bug::WatchdogByName) {
                    bug::leave(self.engine.client, &self.name);
                }
                if let Some(appointment) = appointment {
                    self.engine.watchdog.cancel(appointment);
                }
                self.engine.queues.pass_on(self, reply);
                self.engine.grant_ends();
                Left::Last
            }
            Phase::Lost(reason) => {
                // A copy of the acquisition may yet make it anew, whatever the server said.
                let may_come_back = state.open_until_us.is_some();
                drop(state);
                if depth == 0 && (reason.may_be_on_server() || may_come_back) {
                    self.post_release(None);
                }
                Left::Lost(reason)
            }
            Phase::Offered | Phase::Releasing | Phase::Ended => Left::Last,
        }
    }

    /// Keeps a grant that nobody wants, as one bug does.
    fn keep_for_nobody(self: &Arc<Self>) {
        let mut state = self.state.lock();
        if state.phase != Phase::Offered {
            return;
        }
        state.phase = Phase::Held;
        let terms = Terms {
            lease: self.lease,
            renewed: true,
            max_hold: None,
        };
        state.add_level(&terms, None, self.kind.is_shared());
        state.renew_at = Some(later(self.engine.now(), self.lease / 3));
        self.make_appointment(&mut state);
    }

    /// Gives back a grant that nobody believes in.
    pub(crate) fn discard(self: &Arc<Self>) {
        if seeded(Bug::RenewalOfAnAbandonedAcquire) {
            self.keep_for_nobody();
            return;
        }
        {
            let mut state = self.state.lock();
            if state.phase != Phase::Offered {
                return;
            }
            state.phase = Phase::Releasing;
        }
        if self.passed {
            self.is_left();
        }
        self.post_release(None);
        self.engine.grant_ends();
    }

    /// Nobody believes in it any more, and a release or a hand-off is about to be posted.
    pub(crate) fn is_left(&self) {
        let owner = self.owner;
        self.engine.store.believes(Belief::Left { owner });
    }

    /// Nobody believes in it, and somebody else of this client may.
    pub(crate) fn is_passed(&self) {
        let owner = self.owner;
        self.engine.store.believes(Belief::Passed { owner });
    }

    /// This client is about to remove it by force, or did not.
    pub(crate) fn expect_force(&self, forced: bool) {
        self.state.lock().forced = forced;
    }

    /// On the client's `close`: tells the holder first, then releases what he may no longer use.
    /// `false` if it was over anyway.
    pub(crate) fn close(self: &Arc<Self>, reply: oneshot::Sender<ReleaseOutcome>) -> bool {
        let closed = self.end_belief(LossReason::ClientClosed).is_ok();
        if closed {
            self.post_release(Some(reply));
        }
        closed
    }

    /// Asks the server for the hold at once, as after a gap in which it may have forgotten it.
    pub(crate) fn ask_now(self: &Arc<Self>) {
        let now = self.engine.now();
        {
            let mut state = self.state.lock();
            let idle = state.renewing || state.side == Side::Upgrading;
            if state.phase != Phase::Held || idle || state.over(now).is_some() {
                return;
            }
            if state.renewed_lease().is_some() {
                state.renew_at = Some(now);
                self.make_appointment(&mut state);
                return;
            }
            state.renewing = true;
        }
        let requester = Box::new(Renewal {
            hold: Arc::clone(self),
        });
        // No longer than it is believed in: this one is not renewed.
        let job = self.renewal(Duration::ZERO, requester);
        self.engine.dispatcher.post(job);
    }

    /// An operation on this hold under a new attempt: used by `confirm`, `extend` and the watchdog.
    pub(crate) fn renewal(&self, lease: Duration, requester: Box<dyn Requester>) -> Job {
        let now = self.engine.now();
        let (count, lease, deadline) = {
            let mut state = self.state.lock();
            let lease = state.to_ask(lease, now);
            state.asked = state.asked.max(Some(lease));
            (state.count().max(1), lease, state.term.deadline)
        };
        let verb = Verb::Renew {
            owner: self.owner,
            count,
            lease_ms: millis(lease).max(1),
        };
        Job::new(self.op(verb), self.command_timeout(), deadline, requester)
    }

    fn op(&self, verb: Verb) -> Op {
        Op {
            kind: self.kind,
            name: Arc::clone(&self.name),
            verb,
        }
    }

    /// A nested acquisition to `count`.
    pub(crate) fn nested(
        &self,
        count: u32,
        lease: Duration,
        give_up: Instant,
        requester: Box<dyn Requester>,
    ) -> Job {
        let lease = {
            let mut state = self.state.lock();
            let lease = state.to_ask(lease, self.engine.now());
            state.asked = state.asked.max(Some(lease));
            lease
        };
        let verb = Verb::Acquire {
            owner: self.owner,
            count,
            lease_ms: millis(lease).max(1),
            token: self.engine.token_rule(&self.name),
        };
        Job::new(self.op(verb), self.command_timeout(), give_up, requester)
    }

    fn post_inner_release(
        self: &Arc<Self>,
        count: u32,
        depth: u32,
        reply: Option<oneshot::Sender<ReleaseOutcome>>,
    ) {
        let verb = Verb::Release {
            owner: self.owner,
            count,
            also: None,
        };
        let give_up = later(self.engine.now(), self.command_timeout());
        let requester = Box::new(InnerRelease {
            hold: Arc::clone(self),
            depth,
            reply,
        });
        let job = Job::new(self.op(verb), self.command_timeout(), give_up, requester);
        self.engine.dispatcher.post(job);
    }

    /// Whether the next in line on its own side may have it when it is left.
    pub(crate) fn may_be_handed_on(&self) -> bool {
        !self.kind.is_shared() && self.state.lock().side == Side::Own
    }

    /// Asks the server to let the hold go on as a reader's, if that is still to be.
    fn post_downgrade(self: &Arc<Self>, reply: Option<oneshot::Sender<ReleaseOutcome>>) {
        let now = self.engine.now();
        let (depth, count, lease, give_up) = {
            let mut state = self.state.lock();
            if state.phase != Phase::Held || state.side != Side::ToRead {
                return;
            }
            state.side = Side::Asked;
            let lease = state.to_ask(state.renewed_lease().unwrap_or_default(), now);
            state.asked = state.asked.max(Some(lease));
            (state.depth(), state.count(), lease, state.term.deadline)
        };
        let verb = Verb::Downgrade {
            owner: self.owner,
            count,
            lease_ms: millis(lease).max(1),
        };
        let requester = Box::new(Downgrade {
            hold: Arc::clone(self),
            depth,
            reply,
        });
        let job = Job::new(self.op(verb), self.command_timeout(), give_up, requester);
        self.engine.dispatcher.post(job);
    }

    /// Asks the server to let the only reader go on as the writer, under the owner id `to`; with the terms
    /// of the one level there is. `None` if it is no such hold.
    pub(crate) fn begin_upgrade(&self) -> Option<Terms> {
        let mut state = self.state.lock();
        let &[level] = state.levels.as_slice() else {
            return None;
        };
        if state.phase != Phase::Held || !level.shared {
            return None;
        }
        if !matches!(state.side, Side::Own | Side::Reads) {
            return None;
        }
        state.side = Side::Upgrading;
        (state.renew_at, state.late_at) = (None, None);
        let now = self.engine.now();
        Some(Terms {
            lease: level.lease,
            renewed: level.renewed,
            max_hold: level.ends.map(|ends| ends.saturating_duration_since(now)),
        })
    }

    /// The job for that.
    pub(crate) fn upgrade(
        &self,
        to: OwnerId,
        lease: Duration,
        requester: Box<dyn Requester>,
    ) -> Job {
        // No less than the reader believes in: without an answer it goes on believing.
        let lease = self.state.lock().to_ask(lease, self.engine.now());
        let verb = Verb::Upgrade {
            from: self.owner,
            to,
            lease_ms: millis(lease).max(1),
            token: self.engine.token_rule(&self.name),
        };
        let timeout = self.command_timeout();
        Job::new(self.op(verb), timeout, self.term_deadline(), requester)
    }

    /// It goes on under another owner id: for this one it is over. `false` if it had been lost before.
    pub(crate) fn upgraded(self: &Arc<Self>) -> bool {
        // Its own end may have passed, and nobody has looked yet.
        let _ = self.check(self.engine.now());
        let appointment = {
            let mut state = self.state.lock();
            if state.phase != Phase::Held {
                return false;
            }
            state.phase = Phase::Ended;
            state.appointment.take()
        };
        if let Some(appointment) = appointment {
            self.engine.watchdog.cancel(appointment);
        }
        self.engine
            .store
            .believes(Belief::Left { owner: self.owner });
        if self.may_come_back() {
            // A copy of its acquisition would make it anew, once nobody writes any more.
            self.post_release(None);
        }
        self.engine.grant_ends();
        true
    }

    /// The upgrade to `to` was refused, be it half-way: what was made of it goes.
    pub(crate) fn undo_upgrade(&self, to: OwnerId, lease: Duration) {
        let timeout = self.command_timeout();
        let give_up = later(self.engine.now(), timeout + lease.max(self.lease));
        let verb = Verb::Release {
            owner: to,
            count: 0,
            also: None,
        };
        let job = Job::unattended(self.op(verb), timeout, give_up);
        self.engine.dispatcher.post(job);
    }

    /// It stays a reader's.
    pub(crate) fn not_upgraded(self: &Arc<Self>) {
        let now = self.engine.now();
        let mut state = self.state.lock();
        if state.side == Side::Upgrading {
            state.side = Side::Reads;
        }
        if state.phase == Phase::Held {
            state.renewing = false;
            state.renew_at = state.renewed_lease().map(|_| now);
            self.make_appointment(&mut state);
        }
    }

    /// Whether a copy of its acquisition may still run, and make it anew.
    pub(crate) fn may_come_back(&self) -> bool {
        self.state.lock().open_until_us.is_some()
    }

    /// When its lease as confirmed is over by our clock, whatever `max_hold` says.
    pub(crate) fn term_deadline(&self) -> Instant {
        self.state.lock().term.deadline
    }

    /// Counts one more offer of it to somebody in line. How many that are.
    pub(crate) fn offered_again(&self) -> u32 {
        let mut state = self.state.lock();
        state.offers += 1;
        state.offers
    }

    /// The server may keep it, or its successor, until then.
    pub(crate) fn may_last(&self, until: Instant) {
        let mut state = self.state.lock();
        state.term.end = state.term.end.max(until);
    }

    /// Releases this hold and, in the same operation, the one it may have been handed on to: a hand-off
    /// that was sent may have been done, also by half if it was refused, or may yet run until the server's
    /// clock passes `open_until_us`.
    pub(crate) fn release_with(
        self: &Arc<Self>,
        to: OwnerId,
        lease: Duration,
        open_until_us: Option<u64>,
        reply: Option<oneshot::Sender<ReleaseOutcome>>,
    ) {
        {
            let mut state = self.state.lock();
            state.open_until_us = state.open_until_us.max(open_until_us);
            state.asked = state.asked.max(Some(lease));
        }
        self.post_release_of(Some(to), reply);
    }

    pub(crate) fn post_release(self: &Arc<Self>, reply: Option<oneshot::Sender<ReleaseOutcome>>) {
        self.post_release_of(None, reply);
    }

    fn post_release_of(
        self: &Arc<Self>,
        also: Option<OwnerId>,
        reply: Option<oneshot::Sender<ReleaseOutcome>>,
    ) {
        let timeout = self.command_timeout();
        let (end, open_until_us, asked) = {
            let mut state = self.state.lock();
            if let Some(asked) = state.asked {
                let unconfirmed = later(self.engine.now(), timeout + asked);
                state.term.end = state.term.end.max(unconfirmed);
            }
            (state.term.end, state.open_until_us, state.asked)
        };
        let verb = Verb::Release {
            owner: self.owner,
            count: 0,
            also,
        };
        // The server frees it by itself at `end`; a copy still under way can add one lease.
        let give_up = if open_until_us.is_some() {
            let lease = asked.map_or(self.lease, |asked| asked.max(self.lease));
            end.max(later(self.engine.now(), timeout + lease))
        } else {
            end
        };
        let requester = Box::new(FinalRelease {
            hold: Arc::clone(self),
            reply,
        });
        let job = Job::new(self.op(verb), timeout, give_up, requester).sit_out(open_until_us);
        self.engine.dispatcher.post(job);
    }

    /// Moves the appointment to the next thing to do. Called with the state locked, for which reason
    /// the watchdog never calls us with its own lock held.
    fn make_appointment(self: &Arc<Self>, state: &mut State) {
        let at = state.next_appointment();
        let who = Arc::clone(self) as Arc<dyn Timed>;
        let old = state.appointment.take();
        state.appointment = Some(self.engine.watchdog.reschedule(old, at, who));
    }

    fn renewal_done(self: &Arc<Self>, outcome: &Outcome) {
        match outcome {
            Outcome::Answered(Answered {
                answer: Answer::Renewed { remaining_ms },
                sent,
                ..
            }) => {
                let recovered = {
                    let now = self.engine.now();
                    let mut state = self.state.lock();
                    if state.phase != Phase::Held || state.side == Side::Upgrading {
                        return;
                    }
                    if now < state.term.deadline {
                        self.prolong(&mut state, *sent, *remaining_ms);
                    }
                    state.answered(*remaining_ms);
                    state.renewing = false;
                    state.late_at = None;
                    state.renew_at = state.renewed_lease().map(|lease| {
                        let next = later(*sent, lease / 3);
                        self.engine.together(next, lease).max(now)
                    });
                    self.make_appointment(&mut state);
                    std::mem::take(&mut state.told_late).then_some(state.term.end)
                };
                if let Some(end) = recovered {
                    observe::recovered(&self.engine, &self.name, self.owner, end);
                }
                self.post_downgrade(None);
            }
            Outcome::Answered(Answered {
                answer: Answer::Gone(instead),
                ..
            }) => {
                if self.state.lock().side != Side::Upgrading {
                    self.lose(LossReason::from(*instead));
                }
            }
            // No answer is never "no": again, until the deadline decides.
            Outcome::Answered(_)
            | Outcome::Failed(Failure::NotSent(_) | Failure::Unanswered { .. }) => {
                let now = self.engine.now();
                let mut state = self.state.lock();
                state.renewing = false;
                let renewed = state.renewed_lease().is_some() && state.side != Side::Upgrading;
                if state.phase == Phase::Held && renewed {
                    state.renew_at = Some(later(now, self.command_timeout()));
                    self.make_appointment(&mut state);
                }
            }
            Outcome::Failed(Failure::Closed) => {}
        }
    }
}

impl Timed for Hold {
    fn due(self: Arc<Self>, now: Instant) -> Option<Job> {
        enum Due {
            Lose(LossReason),
            Renew(Duration),
            Late(Instant),
            Nothing,
        }
        let due = {
            let mut state = self.state.lock();
            if state.phase != Phase::Held {
                let appointment = state.appointment.take();
                drop(state);
                if let Some(appointment) = appointment {
                    self.engine.watchdog.cancel(appointment);
                }
                return None;
            }
            let due = if let Some(reason) = state.over(now) {
                Due::Lose(reason)
            } else if let Some(at) = state.renew_at.filter(|at| *at <= now) {
                state.renew_at = None;
                match state.renewed_lease() {
                    Some(lease) => {
                        state.renewing = true;
                        // From when it was due: our own lateness counts as well.
                        state.late_at = Some(later(at, self.lease / 3));
                        Due::Renew(lease)
                    }
                    None => Due::Nothing,
                }
            } else if state.late_at.is_some_and(|at| at <= now) {
                state.late_at = None;
                let told = std::mem::replace(&mut state.told_late, true);
                if told {
                    Due::Nothing
                } else {
                    Due::Late(state.term.end)
                }
            } else {
                Due::Nothing
            };
            if !matches!(due, Due::Lose(_)) {
                self.make_appointment(&mut state);
            }
            due
        };
        match due {
            Due::Lose(reason) => {
                self.lose(reason);
            }
            Due::Renew(lease) => {
                let requester = Box::new(Renewal {
                    hold: Arc::clone(&self),
                });
                return Some(self.renewal(lease, requester));
            }
            Due::Late(end) => observe::late(&self.engine, &self.name, self.owner, end),
            Due::Nothing => {}
        }
        None
    }

    fn held(self: Arc<Self>) -> Option<Arc<Hold>> {
        Some(self)
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        f.debug_struct("Hold")
            .field("name", &self.engine.loggable(&self.name))
            .field("owner", &self.owner)
            .field("token", &self.token)
            .field("phase", &state.phase)
            .field("depth", &state.depth())
            .finish_non_exhaustive()
    }
}

impl State {
    fn depth(&self) -> u32 {
        u32::try_from(self.levels.len()).unwrap_or(u32::MAX)
    }

    /// Whether one of its levels was entered for writing, or otherwise for its holder alone.
    fn writes(&self) -> bool {
        self.levels.iter().any(|level| !level.shared)
    }

    /// The levels that the server is told of: of those that read within one that writes it is not.
    fn count(&self) -> u32 {
        let writes = self.writes();
        let told = self.levels.iter().filter(|level| level.shared != writes);
        u32::try_from(told.count()).unwrap_or(u32::MAX)
    }

    fn add_level(&mut self, terms: &Terms, ends: Option<Instant>, shared: bool) -> u32 {
        let id = self.next_level;
        self.next_level = self.next_level.wrapping_add(1);
        self.levels.push(Level {
            id,
            renewed: terms.renewed,
            lease: terms.lease,
            ends,
            shared,
        });
        id
    }

    /// The server has told what is left: no lease asked for is longer, if this is as long.
    fn answered(&mut self, remaining_ms: u64) {
        let remaining = Duration::from_millis(remaining_ms);
        self.asked = self.asked.filter(|asked| *asked > remaining);
    }

    /// Where the smallest `max_hold` of the levels ends it.
    fn ends(&self) -> Option<Instant> {
        self.levels.iter().filter_map(|level| level.ends).min()
    }

    /// Why it is over by the clock, if it is.
    fn over(&self, now: Instant) -> Option<LossReason> {
        let ends = self.ends();
        if now < self.term.deadline && ends.is_none_or(|ends| now < ends) {
            return None;
        }
        // A lease that was confirmed up to there ends with `max_hold`, though our deadline comes a
        // little before; one that ends earlier was not renewed.
        Some(if ends.is_some_and(|ends| ends <= self.term.end) {
            LossReason::MaxHold
        } else {
            LossReason::DeadlinePassed
        })
    }

    /// The longest lease of a renewed level; `None` if none is.
    fn renewed_lease(&self) -> Option<Duration> {
        self.levels
            .iter()
            .filter(|level| level.renewed)
            .map(|level| level.lease)
            .max()
    }

    /// The lease to ask for: no more than `max_hold` allows; but at least what was confirmed already, or
    /// a key whose expiry somebody took away would get one that ends before. A level with a `max_hold`
    /// may be left again, and then that counts.
    fn to_ask(&self, lease: Duration, now: Instant) -> Duration {
        let lease = self
            .ends()
            .map_or(lease, |ends| lease.min(ends.saturating_duration_since(now)));
        lease.max(self.term.end.saturating_duration_since(now))
    }

    fn next_appointment(&self) -> Instant {
        [self.ends(), self.renew_at, self.late_at]
            .into_iter()
            .flatten()
            .fold(self.term.deadline, Instant::min)
    }
}

struct Renewal {
    hold: Arc<Hold>,
}

impl Requester for Renewal {
    fn wanted(&self) -> bool {
        self.hold.is_held()
    }

    fn done(self: Box<Self>, outcome: Outcome) {
        self.hold.renewal_done(&outcome);
    }
}

struct InnerRelease {
    hold: Arc<Hold>,
    depth: u32,
    reply: Option<oneshot::Sender<ReleaseOutcome>>,
}

impl Requester for InnerRelease {
    fn done(self: Box<Self>, outcome: Outcome) {
        let mut told = ReleaseOutcome::StillHeld { depth: self.depth };
        match outcome {
            Outcome::Answered(Answered {
                answer: Answer::StillHeld { remaining_ms },
                sent,
                ..
            }) => {
                self.hold.confirmed(sent, remaining_ms);
            }
            Outcome::Answered(Answered {
                answer: Answer::Gone(instead),
                ..
            }) => {
                // `None`: the last level has left meanwhile, and this was overtaken.
                if let Some(reason) = self.hold.lose(LossReason::from(instead)) {
                    told = ReleaseOutcome::Lost(reason);
                }
            }
            // The depth is ours; the next renewal puts the server's count right.
            Outcome::Answered(_) | Outcome::Failed(_) => self.hold.state.lock().stray = true,
        }
        if let Some(reply) = self.reply {
            let _ = reply.send(told);
        }
    }
}

/// A writer's hold that is to go on as a reader's.
struct Downgrade {
    hold: Arc<Hold>,
    depth: u32,
    reply: Option<oneshot::Sender<ReleaseOutcome>>,
}

impl Requester for Downgrade {
    fn wanted(&self) -> bool {
        self.hold.is_held()
    }

    fn done(self: Box<Self>, outcome: Outcome) {
        let Self { hold, depth, reply } = *self;
        let mut told = ReleaseOutcome::StillHeld { depth };
        match outcome {
            Outcome::Answered(Answered {
                answer: Answer::StillHeld { remaining_ms },
                sent,
                ..
            }) => {
                hold.state.lock().side = Side::Reads;
                hold.confirmed(sent, remaining_ms);
                hold.engine.queues.let_in(Kind::Read, &hold.name);
            }
            Outcome::Answered(Answered {
                answer: Answer::Gone(instead),
                ..
            }) => {
                if let Some(reason) = hold.lose(LossReason::from(instead)) {
                    told = ReleaseOutcome::Lost(reason);
                }
            }
            // It keeps readers out for longer than it should; the next renewal asks again.
            Outcome::Answered(_) | Outcome::Failed(_) => hold.state.lock().side = Side::ToRead,
        }
        if let Some(reply) = reply {
            let _ = reply.send(told);
        }
    }
}

struct FinalRelease {
    hold: Arc<Hold>,
    reply: Option<oneshot::Sender<ReleaseOutcome>>,
}

impl Requester for FinalRelease {
    fn wanted(&self) -> bool {
        let unheard = self.reply.as_ref().is_some_and(oneshot::Sender::is_closed);
        !(unheard && seeded(Bug::ReleaseDropsItsJob))
    }

    fn done(self: Box<Self>, outcome: Outcome) {
        self.hold.release_done(&outcome, self.reply);
    }
}

impl Hold {
    /// The next in line has it: for whoever had it, it is released.
    pub(crate) fn handed_off(&self, reply: Option<oneshot::Sender<ReleaseOutcome>>) {
        self.end_release();
        if let Some(reply) = reply {
            let _ = reply.send(ReleaseOutcome::Released);
        }
    }

    /// Ends the release; with the term that was confirmed, and whether somebody had believed in it.
    fn end_release(&self) -> (Term, bool) {
        let mut state = self.state.lock();
        let believed = state.phase == Phase::Releasing && state.next_level > 0;
        if state.phase == Phase::Releasing {
            state.phase = Phase::Ended;
        }
        (state.term, believed)
    }

    /// How the release went, or a hand-off that was none.
    pub(crate) fn release_done(
        &self,
        outcome: &Outcome,
        reply: Option<oneshot::Sender<ReleaseOutcome>>,
    ) {
        let (term, believed) = self.end_release();
        let at_most = term.end.saturating_duration_since(self.engine.now());
        let heard = match outcome {
            Outcome::Answered(Answered {
                answer: Answer::Released { heard },
                ..
            }) => *heard,
            _ => 0,
        };
        let told = match outcome {
            Outcome::Answered(Answered {
                answer: Answer::Released { .. },
                ..
            }) => ReleaseOutcome::Released,
            Outcome::Answered(Answered {
                answer: Answer::Gone(instead),
                unanswered_since,
                ..
            }) => {
                match unanswered_since {
                    // An earlier attempt of ours may have done it, while the hold was still ours.
                    Some(first) if *first < term.deadline => ReleaseOutcome::Released,
                    Some(_) => ReleaseOutcome::Unconfirmed { at_most },
                    None => ReleaseOutcome::Lost(LossReason::from(*instead)),
                }
            }
            Outcome::Answered(_) | Outcome::Failed(_) => ReleaseOutcome::Unconfirmed { at_most },
        };
        if believed {
            match told {
                ReleaseOutcome::Unconfirmed { at_most } => {
                    observe::release_unconfirmed(&self.engine, &self.name, self.owner, at_most);
                }
                ReleaseOutcome::Lost(reason) => {
                    observe::lost(&self.engine, &self.name, self.owner, reason, term.end);
                }
                _ => {}
            }
        }
        if !seeded(Bug::WakeUpSwallowed) {
            self.engine.queues.freed(self.kind, &self.name, heard);
        }
        if let Some(reply) = reply {
            let _ = reply.send(told);
        }
    }
}

impl From<Instead> for LossReason {
    fn from(instead: Instead) -> Self {
        match instead {
            Instead::Free => Self::KeyGone,
            Instead::Taken => Self::TakenByOther,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::{Config, TestRunner};

    use super::*;
    use crate::config::{MAX_LEASE, MIN_LEASE};

    /// What was confirmed is never shortened, and beyond it nothing is asked past the smallest `max_hold`.
    #[test]
    fn a_lease_that_is_asked_for_covers_what_is_believed_and_else_ends_with_max_hold() {
        check((states(), leases()), |((state, now), lease)| {
            let asked = state.to_ask(lease, now);
            let believed = state.term.end.saturating_duration_since(now);
            prop_assert!(asked >= believed);
            match state.ends() {
                None => prop_assert_eq!(asked, lease.max(believed)),
                Some(ends) => {
                    let allowed = ends.saturating_duration_since(now);
                    prop_assert_eq!(asked, lease.min(allowed).max(believed));
                }
            }
            Ok(())
        });
    }

    /// The one who looks and the timer agree on when it is over, and the timer comes no later.
    #[test]
    fn a_hold_is_over_at_its_deadline_or_its_first_max_hold() {
        check(states(), |(state, now)| {
            let first = state
                .levels
                .iter()
                .filter_map(|level| level.ends)
                .fold(state.term.deadline, Instant::min);
            prop_assert_eq!(state.over(now).is_some(), now >= first);
            prop_assert!(state.next_appointment() <= first);
            Ok(())
        });
    }

    #[test]
    fn a_first_lease_is_no_longer_than_either_limit() {
        check(
            (leases(), prop::option::of(leases())),
            |(lease, max_hold)| {
                let terms = Terms {
                    lease,
                    renewed: true,
                    max_hold,
                };
                let first = terms.first_lease();
                prop_assert!(first <= lease && max_hold.is_none_or(|max| first <= max));
                prop_assert!(first == lease || Some(first) == max_hold);
                Ok(())
            },
        );
    }

    /// An unconfirmed lease is forgotten only when the server has told of one as long.
    #[test]
    fn an_answer_settles_the_leases_it_covers() {
        check(
            (states(), leases(), any::<u64>()),
            |((mut state, _), asked, told)| {
                let remaining_ms = told % (2 * millis(MAX_LEASE));
                state.asked = Some(asked);
                state.answered(remaining_ms);
                let covered = Duration::from_millis(remaining_ms) >= asked;
                prop_assert_eq!(state.asked, (!covered).then_some(asked));
                Ok(())
            },
        );
    }

    /// A hold in any state of its clocks, and a moment around them.
    fn states() -> impl Strategy<Value = (State, Instant)> {
        let level = (any::<bool>(), leases(), prop::option::of(leases()));
        let told = 0..=millis(MAX_LEASE);
        let levels = prop::collection::vec(level, 0..4);
        (levels, told, prop::option::of(leases()), moments()).prop_map(
            |(levels, told, due, now)| {
                #[expect(
                    clippy::disallowed_methods,
                    reason = "any moment does: it is the first"
                )]
                let since = Instant::now();
                let levels = (0..).zip(levels).map(|(id, (renewed, lease, ends))| Level {
                    id,
                    renewed,
                    lease,
                    ends: ends.map(|ends| later(since, ends)),
                    shared: false,
                });
                let state = State {
                    phase: Phase::Held,
                    levels: levels.collect(),
                    next_level: 4,
                    term: Term::confirmed(since, told),
                    since,
                    renew_at: due.map(|due| later(since, due)),
                    late_at: None,
                    told_late: false,
                    forced: false,
                    offers: 0,
                    renewing: false,
                    asked: None,
                    appointment: None,
                    open_until_us: None,
                    stray: false,
                    side: Side::Own,
                };
                (state, later(since, now))
            },
        )
    }

    /// Short ones as often as long ones, so that they end before, at, and after one another.
    fn leases() -> impl Strategy<Value = Duration> {
        let shortest = millis(MIN_LEASE);
        prop_oneof![
            (shortest..shortest + 5),
            (shortest..60_000),
            (shortest..=millis(MAX_LEASE)),
        ]
        .prop_map(Duration::from_millis)
    }

    fn moments() -> impl Strategy<Value = Duration> {
        prop_oneof![
            Just(Duration::ZERO),
            leases(),
            leases().prop_map(|lease| 3 * lease)
        ]
    }

    fn check<S: Strategy>(values: S, test: impl Fn(S::Value) -> Result<(), TestCaseError>) {
        let mut runner = TestRunner::new(Config {
            failure_persistence: None,
            ..Config::default()
        });
        runner
            .run(&values, test)
            .unwrap_or_else(|failure| panic!("{failure}"));
    }
}
