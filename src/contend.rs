//! Waiting: the line of one client before one name, and the task that serves it.
//!
//! Everybody who wants a name stands in its line, in order of arrival. The first to come has an
//! attempt posted for it at once; only if that finds the lock taken is a task started, which
//! subscribes, tries again, and then sleeps until a message, the end of the holder's lease or the cap.
//!
//! A grant is an *offer* to the first in line who answers: it wakes the waiter, who claims it when
//! polled. What is not claimed within a moment goes to the next. So a waiter whose future is not
//! polled holds up nobody for long and holds nothing, and keeps its place.
//!
//! 1. An offer is never renewed, and at the claim its deadline is checked again.
//! 2. A waiter that leaves with an offer in its hands passes it on.
//! 3. Subscribe, confirm, try again, then sleep: a release between the failed attempt and the
//!    confirmation would be missed otherwise. The sleep is always capped.
//! 4. An owner id that is given up while an attempt with it is unanswered is swept: released now, and
//!    once more when no copy can run any more.
//! 5. The last level of a hold that is left goes to the next in line here, by one operation (the
//!    *hand-off*), so that a busy lock costs the server one script a turn. After some turns the chain
//!    ends with a real release, which every other process hears; if one does, this line stands back.
//! 6. In a rush it goes on without a word to the server (the *pass*), by tokens that the last hand-off set aside:
//!    under the same owner id, within the same lease, only while nothing of the hold is under way.
//! 7. Locks are taken in the order line-up (`Queues`), line, waiter. None is held while the dispatcher
//!    or a waker is called.

mod fair;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::Instant;

use crate::bug::{Bug, seeded};
use crate::config::{
    BEAT_EVERY, CHAIN_LENGTH, CHAIN_LENGTH_ALONE, CHAIN_TIME, MOST_PASSES, OFFER_WINDOW, POLL_CAP,
    POLL_FIRST, STAND_BACK, WAKE_CAP, millis,
};
use crate::dispatch::{Answered, Failure, Job, Outcome, Requester};
use crate::engine::Engine;
use crate::env::{later, until};
use crate::error::Error;
use crate::guard::ReleaseOutcome;
use crate::hold::{Hold, Terms};
use crate::kind::Kind;
use crate::lock::refused;
use crate::observe;
use crate::store::topic::{Listening, Subscription};
use crate::store::{Answer, Belief, Cause, Op, OwnerId, TokenRule, Verb};
use crate::sync::{Mutex, Notify};
use crate::watchdog::{Appointment, Timed};

/// Command timeouts after which a hand-off without an answer becomes a release.
const HAND_OFF_TRIES: u32 = 3;

/// Waiters that one grant is offered to, at most.
const MOST_OFFERS: u32 = 8;

/// The lines of one client, by kind and name.
#[derive(Default)]
pub(crate) struct Queues {
    by_name: Mutex<HashMap<Key, Arc<Line>>>,
    /// How many lines of fair locks there have been.
    fair: AtomicU64,
}

/// What a line is found by. Each waiter for a fair lock has a line of its own, with a number.
type Key = (Kind, Arc<str>, u64);

/// How somebody wants to wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish {
    pub(crate) terms: Terms,
    /// One attempt, no waiting.
    pub(crate) once: bool,
}

impl Queues {
    /// Takes a place at the end of the line; `None` if the wish is for one attempt and others stand
    /// there already.
    pub(crate) fn join(
        &self,
        engine: &Arc<Engine>,
        kind: Kind,
        name: &Arc<str>,
        wish: Wish,
        permit: OwnedSemaphorePermit,
    ) -> Option<Ticket> {
        let now = engine.now();
        let number = match kind {
            Kind::Plain | Kind::Read | Kind::Write => 0,
            Kind::Fair => self.fair.fetch_add(1, Ordering::Relaxed),
        };
        let mut by_name = self.by_name.lock();
        let line = match by_name.get(&(kind, Arc::clone(name), number)) {
            // Those who read keep nobody out who wants to read.
            Some(line) if wish.once && !kind.is_shared() && line.is_in_use() => return None,
            Some(line) => Arc::clone(line),
            None => {
                let line = Arc::new(Line::new(engine, kind, name, number));
                by_name.insert(line.key(), Arc::clone(&line));
                line
            }
        };
        let mut state = line.state.lock();
        let waiter = Arc::new(Waiter {
            number: state.next,
            joined: now,
            wish,
            state: Mutex::new(WaiterState {
                phase: WaitPhase::Waiting,
                waker: None,
                stalled: false,
                waited: !state.waiters.is_empty(),
            }),
        });
        state.add(&waiter);
        let first = state.waiters.len() == 1;
        let start = (state.serving == Serving::Nobody).then(|| {
            state.serving = if first {
                Serving::Directly
            } else {
                Serving::ByTask
            };
            state.serving
        });
        // An attempt that is under way was made for others.
        state.try_now |= start.is_none() && (first || wish.once);
        drop(state);
        drop(by_name);
        engine.store.believes(Belief::Joined {
            kind,
            name,
            place: waiter.number,
        });
        match start {
            Some(Serving::Directly) => {
                if !line.attempt(permit, None) {
                    // A hand-off was quicker, and the waiter has its offer already.
                    line.state.lock().serving = Serving::Nobody;
                    line.serve_the_rest();
                }
            }
            Some(_) => line.start_task(Next::Again),
            // The task sleeps for somebody who has left, or for those who do not answer.
            None => line.kick.notify_one(),
        }
        Some(Ticket {
            line,
            waiter,
            claimed: false,
        })
    }

    /// What somebody is told who waited for an acquisition of this name that waits for the server.
    pub(crate) fn trouble(&self, kind: Kind, name: &Arc<str>) -> Option<Error> {
        self.line(kind, name)?
            .trouble()
            .map(|trouble| trouble.error(name))
    }

    /// Nobody is served any more: lines hold the engine, and the engine its lines.
    pub(crate) fn end(&self) {
        let lines = std::mem::take(&mut *self.by_name.lock());
        drop(lines);
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.by_name.lock().is_empty()
    }

    /// The client is closing: what is on offer goes back, as nobody may claim it any more, and places in
    /// queues are given up.
    pub(crate) fn recall_offers(&self) {
        let mut lines: Vec<_> = self.by_name.lock().values().cloned().collect();
        lines.sort_unstable_by_key(|line| line.key());
        for line in lines {
            let waiters: Vec<_> = line.state.lock().waiters.values().cloned().collect();
            for waiter in waiters {
                line.take_back(&waiter);
            }
            line.leave_queue();
        }
    }

    /// This client has freed the name: whoever waits for it here may try, those elsewhere first. `heard`
    /// is how many connections were told.
    pub(crate) fn freed(&self, kind: Kind, name: &Arc<str>, heard: u64) {
        for side in kind.sides() {
            let Some(line) = self.line(*side, name) else {
                continue;
            };
            // One connection of this client listens, for whichever of its lines.
            let others = kind.sides().iter().filter(|other| *other != side);
            let listening = others
                .filter_map(|other| self.line(*other, name))
                .any(|other| other.state.lock().listening);
            line.freed(heard, listening);
        }
    }

    /// Those on this side may come in now, though the lock is not free.
    pub(crate) fn let_in(&self, side: Kind, name: &Arc<str>) {
        if let Some(line) = self.line(side, name) {
            line.state.lock().claimed_until = None;
            line.try_now();
        }
    }

    /// The last level of a hold was left: the next in line gets it, or it is released.
    pub(crate) fn pass_on(&self, hold: &Arc<Hold>, reply: Option<oneshot::Sender<ReleaseOutcome>>) {
        match self.line(hold.kind, &hold.name) {
            Some(line) if hold.may_be_handed_on() => line.hand_off(hold, reply),
            _ => {
                hold.is_left();
                hold.post_release(reply);
            }
        }
    }

    /// The line that all waiters of this client share; those of a fair lock share none.
    fn line(&self, kind: Kind, name: &Arc<str>) -> Option<Arc<Line>> {
        if kind == Kind::Fair {
            return None;
        }
        let key = (kind, Arc::clone(name), 0);
        self.by_name.lock().get(&key).cloned()
    }
}

impl fmt::Debug for Queues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queues")
            .field("lines", &self.by_name.lock().len())
            .finish_non_exhaustive()
    }
}

/// The line before one name.
struct Line {
    engine: Arc<Engine>,
    kind: Kind,
    name: Arc<str>,
    number: u64,
    state: Mutex<LineState>,
    /// Something changed for the task: see `LineState`.
    kick: Notify,
}

#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
struct LineState {
    waiters: BTreeMap<u64, Arc<Waiter>>,
    next: u64,
    /// How many of them want one attempt.
    once: usize,
    serving: Serving,
    /// Try without waiting for the time or a message.
    try_now: bool,
    /// An offer is in somebody's hands.
    offered: bool,
    /// A hold of this client is on its way to the next in line.
    handing: bool,
    /// A release was posted that ends a chain, and has no answer yet: that says whether others heard it.
    releasing: bool,
    /// Nobody is to try before: others were told that the lock is free, and have to get there first.
    stand_back: Option<Instant>,
    /// The last chain here was ended for the sake of others: until this line has the lock again, it lets them
    /// go first at each message, not only at its own release.
    had_its_turn: bool,
    /// How many hand-offs a chain may have.
    longest_chain: u32,
    /// The task sleeps, and wants to be woken only by `try_now` or an empty line.
    resting: bool,
    /// Releases of others are heard of.
    listening: bool,
    /// When somebody of this line got the lock last.
    moved_at: Option<Instant>,
    /// Those before this number were found to wait for somebody.
    taken_below: u64,
    /// The hold of our own client that somebody was told to have waited for.
    hinted: Option<OwnerId>,
    /// When to look for one next.
    hint_at: Option<Instant>,
    /// Our own client holds the lock until then, as far as we know.
    claimed_until: Option<Instant>,
    /// Since when the server has not answered, and what the last trouble was.
    trouble: Option<Trouble>,
    /// When the server answered last.
    heard: Option<Instant>,
    /// When the attempt under way was posted.
    asked: Option<Instant>,
    /// It was made for those before this number; those after it came later than its question.
    asked_below: u64,
    /// Of a fair lock: the place in the server's queue.
    spot: Option<fair::Spot>,
    /// Of a fair lock: nothing suggests that it is this one's turn.
    only_keep: bool,
}

/// Hand-offs one after the other, since the lock was taken from the server. Goes with the hold: a line
/// may come and go meanwhile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chain {
    began: Instant,
    length: u32,
}

impl Chain {
    /// With one more hand-off; `None` if others have their turn now.
    fn longer(chain: Option<Self>, longest: u32, now: Instant) -> Option<Self> {
        let before = chain.unwrap_or(Self {
            began: now,
            length: 0,
        });
        let on = before.length < longest && now < later(before.began, CHAIN_TIME);
        (on || seeded(Bug::EndlessChain)).then_some(Self {
            length: before.length.saturating_add(1),
            ..before
        })
    }
}

#[derive(Clone)]
struct Trouble {
    cause: Cause,
    /// An attempt may have run.
    unanswered: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Serving {
    Nobody,
    /// The first attempt is under way, without a task.
    Directly,
    ByTask,
}

struct Waiter {
    number: u64,
    joined: Instant,
    wish: Wish,
    state: Mutex<WaiterState>,
}

struct WaiterState {
    phase: WaitPhase,
    waker: Option<Waker>,
    /// Did not answer its last offer, and has not been polled since.
    stalled: bool,
    /// Others were before it, in line or with the lock: a slow answer alone is no waiting.
    waited: bool,
}

enum WaitPhase {
    Waiting,
    Offered(Arc<Hold>, Appointment),
    /// One attempt was wanted, and others hold the lock.
    Busy,
    Failed(Error),
    Gone,
}

/// What to do after an attempt.
#[derive(Debug)]
enum Next {
    /// An offer is out.
    Offered,
    /// Somebody else has it, until then at the latest as far as known.
    Taken(Option<Duration>),
    /// Try again at once.
    Again,
}

/// A hold that is held from now on, and its first level.
pub(crate) type Claimed = (Arc<Hold>, u32);

/// A waiter's place in line, held by the caller's future. Dropping it leaves the line.
pub(crate) struct Ticket {
    line: Arc<Line>,
    waiter: Arc<Waiter>,
    claimed: bool,
}

impl Ticket {
    /// The grant and its level, once this waiter's turn has come; `None` if one attempt was wanted
    /// and others hold the lock.
    pub(crate) fn poll_claim(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Claimed>, Error>> {
        let mut state = self.waiter.state.lock();
        match std::mem::replace(&mut state.phase, WaitPhase::Gone) {
            WaitPhase::Offered(hold, appointment) => {
                let waited = state.waited;
                drop(state);
                self.line.engine.watchdog.cancel(appointment);
                if let Some(level) = hold.claim(&self.waiter.wish.terms) {
                    self.claimed = true;
                    let waited = self.line.claimed(&self.waiter, &hold) || waited;
                    // `close` lists the holds after it has said so: what it cannot have seen ends here.
                    if self.line.engine.closing.is_cancelled() {
                        hold.leave(level, None);
                        return Poll::Ready(Err(Error::Closed));
                    }
                    let waited = waited.then(|| self.line.engine.now() - self.waiter.joined);
                    observe::acquired(
                        &self.line.engine,
                        &self.line.name,
                        hold.owner,
                        waited,
                        hold.server_end(),
                    );
                    return Poll::Ready(Ok(Some((hold, level))));
                }
                // Too late to be a grant. It goes back, and the place in line is kept.
                hold.discard();
                {
                    let mut state = self.waiter.state.lock();
                    state.phase = WaitPhase::Waiting;
                    state.waker = Some(cx.waker().clone());
                }
                self.line.put_back();
                Poll::Pending
            }
            WaitPhase::Busy => Poll::Ready(Ok(None)),
            WaitPhase::Failed(error) => Poll::Ready(Err(error)),
            WaitPhase::Waiting | WaitPhase::Gone => {
                state.phase = WaitPhase::Waiting;
                match &mut state.waker {
                    Some(waker) => waker.clone_from(cx.waker()),
                    none => *none = Some(cx.waker().clone()),
                }
                let back = std::mem::take(&mut state.stalled);
                drop(state);
                if back {
                    self.line.try_now();
                }
                Poll::Pending
            }
        }
    }

    /// What a caller is told whose time is up.
    pub(crate) fn out_of_time(&self) -> Error {
        let waited = self.line.engine.now() - self.waiter.joined;
        let name = &self.line.name;
        let trouble = self.line.trouble();
        if let Some(trouble) = trouble {
            return trouble.error(name);
        }
        self.line.engine.timed_out(self.line.kind, name, waited)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.line.engine.store.believes(Belief::Departed {
            kind: self.line.kind,
            name: &self.line.name,
            place: self.waiter.number,
            served: self.claimed,
        });
        if !self.claimed {
            self.line.leave(&self.waiter);
        }
    }
}

impl Trouble {
    fn error(&self, name: &str) -> Error {
        let source = self.cause.clone().into();
        if self.unanswered {
            Error::Indeterminate {
                name: name.to_owned(),
                operation: "acquire",
                source,
            }
        } else {
            Error::Unreachable {
                subject: format!("the server for lock `{name}`"),
                source,
            }
        }
    }
}

impl Waiter {
    /// Ends the wait with an answer that is not a grant; `false` if there is nothing to end, or an offer
    /// out.
    fn resolve(&self, phase: WaitPhase) -> bool {
        let waker = {
            let mut state = self.state.lock();
            if !matches!(state.phase, WaitPhase::Waiting) {
                return false;
            }
            state.phase = phase;
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        true
    }

    fn answers(&self) -> bool {
        let state = self.state.lock();
        matches!(state.phase, WaitPhase::Waiting) && !state.stalled
    }
}

impl Line {
    fn new(engine: &Arc<Engine>, kind: Kind, name: &Arc<str>, number: u64) -> Self {
        Self {
            engine: Arc::clone(engine),
            kind,
            name: Arc::clone(name),
            number,
            state: Mutex::new(LineState {
                waiters: BTreeMap::new(),
                // So that a place has a number that no other of this name and client has.
                next: number,
                once: 0,
                serving: Serving::Nobody,
                try_now: false,
                offered: false,
                handing: false,
                releasing: false,
                stand_back: None,
                had_its_turn: false,
                longest_chain: CHAIN_LENGTH,
                resting: false,
                listening: false,
                moved_at: None,
                taken_below: 0,
                hinted: None,
                hint_at: None,
                claimed_until: None,
                trouble: None,
                heard: None,
                asked: None,
                asked_below: 0,
                spot: None,
                only_keep: false,
            }),
            kick: Notify::new(),
        }
    }

    fn key(&self) -> Key {
        (self.kind, Arc::clone(&self.name), self.number)
    }

    fn op(&self, verb: Verb) -> Op {
        Op {
            kind: self.kind,
            name: Arc::clone(&self.name),
            verb,
        }
    }

    fn hear_of(&self, cause: &Cause, unanswered: bool) {
        self.state.lock().trouble = Some(Trouble {
            cause: cause.clone(),
            unanswered,
        });
    }

    /// Why nothing was heard of late, if nothing was.
    fn trouble(&self) -> Option<Trouble> {
        // Asked for longer than an answer takes, and nothing heard: "no answer" is not "no".
        let now = self.engine.now();
        let unheard = |state: &LineState| {
            let asked = state.asked?;
            let silent = state.heard.is_none() || asked + OFFER_WINDOW < now;
            silent.then(|| Trouble {
                cause: Cause::new("no answer in time"),
                unanswered: true,
            })
        };
        let trouble = {
            let state = self.state.lock();
            state.trouble.clone().or_else(|| unheard(&state))
        };
        // Nothing was asked meanwhile, but it would not have been answered. The line is not locked: the
        // dispatcher looks at it with its own lock held.
        trouble.or_else(|| {
            Some(Trouble {
                cause: self.engine.dispatcher.trouble()?,
                unanswered: false,
            })
        })
    }

    /// The first in line who would answer an offer.
    fn head(&self) -> Option<Arc<Waiter>> {
        self.state
            .lock()
            .waiters
            .values()
            .find(|waiter| waiter.answers())
            .cloned()
    }

    fn is_empty(&self) -> bool {
        self.state.lock().waiters.is_empty()
    }

    /// Whether somebody stands in line who would not let others pass.
    fn is_in_use(&self) -> bool {
        let state = self.state.lock();
        state
            .waiters
            .values()
            .any(|waiter| !waiter.state.lock().stalled)
    }

    fn try_now(&self) {
        self.state.lock().try_now = true;
        self.kick.notify_one();
    }

    /// `listening`: another line of this client is among those who heard it.
    fn freed(&self, heard: u64, listening: bool) {
        {
            let mut state = self.state.lock();
            state.claimed_until = None;
            state.releasing = false;
            if heard > u64::from(state.listening || listening) {
                state.longest_chain = CHAIN_LENGTH;
                if !state.waiters.is_empty() {
                    let pause = self.jittered(STAND_BACK);
                    state.stand_back = Some(later(self.engine.now(), pause));
                }
            } else if heard > 0 {
                // It was told to nobody but us, perhaps before this answer.
                state.stand_back = None;
                if std::mem::take(&mut state.had_its_turn) {
                    state.longest_chain = (4 * state.longest_chain).min(CHAIN_LENGTH_ALONE);
                }
            }
        }
        self.try_now();
    }

    /// Hands a hold whose last level was left to the next in line, unless others have their turn.
    fn hand_off(
        self: &Arc<Self>,
        hold: &Arc<Hold>,
        reply: Option<oneshot::Sender<ReleaseOutcome>>,
    ) {
        let engine = &self.engine;
        let head = self.head().filter(|_| !engine.closing.is_cancelled());
        if let Some(head) = &head
            && self.pass(hold, head)
        {
            if let Some(reply) = reply {
                let _ = reply.send(ReleaseOutcome::Released);
            }
            return;
        }
        hold.is_left();
        // A copy of the acquisition that is still open would make the old hold anew behind this.
        let (Some(head), false) = (head, hold.may_come_back()) else {
            return hold.post_release(reply);
        };
        let now = engine.now();
        let (longest, passing) = {
            let state = self.state.lock();
            (state.longest_chain, state.has_it())
        };
        let chain = Chain::longer(hold.chain, longest, now);
        let cut = chain.is_none();
        let Some(chain) = chain.filter(|_| !passing) else {
            let mut state = self.state.lock();
            state.releasing = true;
            state.had_its_turn |= cut;
            drop(state);
            return hold.post_release(reply);
        };
        let (to, lease) = (engine.fresh_owner(), head.wish.terms.first_lease());
        let reserve = {
            let mut state = self.state.lock();
            state.handing = true;
            state.claimed_until = None;
            state.taken_below = state.next;
            state.asked = Some(now);
            state.asked_below = state.next;
            // Where each has it for longer than a request takes, there is nothing to gain. Readers who join one that
            // wrote have its token, so with a read/write lock none may be given away.
            let rush = self.kind == Kind::Plain && hold.held_for(now) < engine.config.rush;
            let behind = state
                .waiters
                .values()
                .filter(|waiter| waiter.number != head.number);
            let fit = behind.take_while(|waiter| waiter.wish.terms.takes_over_from(lease));
            // Only as many as there are who will use them up: else tokens would run ahead of the clock.
            if rush {
                (0..MOST_PASSES).zip(fit).count() as u64
            } else {
                0
            }
        };
        let verb = Verb::HandOff {
            from: hold.owner,
            to,
            lease_ms: millis(lease),
            token: TokenRule {
                reserve,
                ..engine.token_rule(&self.name)
            },
        };
        let op = self.op(verb);
        let requester = HandOff {
            line: Arc::clone(self),
            hold: Arc::clone(hold),
            to,
            lease,
            chain,
            reserve,
            reply,
        };
        let timeout = engine.config.command_timeout_for(lease);
        // Not as long as the lease of who left it: those in line are to hear of a silent server in time.
        let patience = later(now, HAND_OFF_TRIES * timeout);
        let give_up = hold.term_deadline().min(patience);
        hold.may_last(later(now, timeout + lease));
        let job = Job::new(op, timeout, give_up, Box::new(requester));
        engine.dispatcher.post(job);
    }

    /// Passes a hold on to the next in line without a word to the server, to which all of this client are
    /// one: under the same owner id, within the same lease, with the next of the tokens that were reserved.
    fn pass(self: &Arc<Self>, hold: &Arc<Hold>, head: &Waiter) -> bool {
        let now = self.engine.now();
        if !hold.may_be_passed() || !head.wish.terms.takes_over() {
            return false;
        }
        let longest = self.state.lock().longest_chain;
        let Some(chain) = Chain::longer(hold.chain, longest, now) else {
            return false;
        };
        {
            let mut state = self.state.lock();
            if state.has_it() {
                return false;
            }
            // Until it is on offer: the line's task is not to ask for what this client has.
            state.handing = true;
            state.claimed_until = None;
            state.taken_below = state.next;
        }
        hold.is_passed();
        let next = hold.passed_on(chain);
        next.offered_again();
        let offered = self.offer(&next);
        self.state.lock().handing = false;
        if !offered {
            next.discard();
        }
        self.serve_the_rest();
        true
    }

    /// What became of a hand-off: if it was done, the new hold is offered.
    fn handed_off(self: &Arc<Self>, granted: Option<&Arc<Hold>>) {
        let now = self.engine.now();
        {
            let mut state = self.state.lock();
            state.handing = false;
            state.asked = None;
            if granted.is_some() {
                state.trouble = None;
                state.heard = Some(now);
            }
        }
        let Some(hold) = granted else {
            return self.try_now();
        };
        if seeded(Bug::HandOffStranded) && self.is_empty() {
            return;
        }
        self.pass_on(hold);
    }

    /// Posts an attempt for the head of the line. Its outcome goes to `reply`, or is dealt with on
    /// the spot.
    fn attempt(
        self: &Arc<Self>,
        permit: OwnedSemaphorePermit,
        reply: Option<oneshot::Sender<Next>>,
    ) -> bool {
        let Some(head) = self.head() else {
            return false;
        };
        let engine = &self.engine;
        let now = engine.now();
        let lease = head.wish.terms.first_lease();
        let timeout = engine.config.command_timeout_for(lease);
        let give_up = if head.wish.once {
            later(now, timeout)
        } else {
            let heard = self
                .state
                .lock()
                .heard
                .map_or(head.joined, |heard| heard.max(head.joined));
            later(heard, engine.config.lease).max(later(now, timeout))
        };
        {
            let mut state = self.state.lock();
            state.asked = Some(now);
            state.asked_below = state.next;
        }
        let once = head.wish.once;
        // From the asking on, whoever leaves the queue leaves it to the outcome to say so to the server.
        let by_task = reply.is_some() && self.is_fair();
        let _about = by_task.then(|| engine.dispatcher.about_to_post());
        let (owner, verb) = if self.is_fair() && !once {
            self.ask_in_queue(lease)
        } else {
            let owner = engine.fresh_owner();
            let verb = Verb::Acquire {
                owner,
                count: 1,
                lease_ms: millis(lease),
                token: engine.token_rule(&self.name),
            };
            (owner, verb)
        };
        let op = self.op(verb);
        let requester = Attempt {
            line: Arc::clone(self),
            owner,
            lease,
            reply,
        };
        let job = Job::new(op, timeout, give_up, Box::new(requester));
        engine.dispatcher.post(job.holding(permit).once(once));
        true
    }

    /// Deals with the outcome of an attempt.
    fn settle(self: &Arc<Self>, owner: OwnerId, lease: Duration, outcome: Outcome) -> Next {
        let next = self.settle_attempt(owner, lease, outcome);
        if self.is_fair() {
            self.leave_queue();
        }
        next
    }

    fn settle_attempt(
        self: &Arc<Self>,
        owner: OwnerId,
        lease: Duration,
        mut outcome: Outcome,
    ) -> Next {
        self.state.lock().asked = None;
        if let Outcome::Answered(_) = outcome {
            let mut state = self.state.lock();
            state.trouble = None;
            state.heard = Some(self.engine.now());
        }
        if let Some(next) = self.heard_in_queue(&mut outcome) {
            return next;
        }
        let answered = match outcome {
            Outcome::Answered(answered) => answered,
            Outcome::Failed(failure) => return self.failed(owner, lease, failure),
        };
        let granted = match answered.answer {
            Answer::Granted {
                token,
                remaining_ms,
            } => Some((token, remaining_ms)),
            _ => None,
        };
        if let Some((token, remaining_ms)) = granted {
            let hold = Hold::granted(
                &self.engine,
                self.kind,
                &self.name,
                owner,
                lease,
                token,
                remaining_ms,
                &answered,
                None,
                0,
            );
            // A grant read after its own deadline is not a grant, and one close to it is no use: it would be
            // lost before its first renewal.
            self.state.lock().had_its_turn = false;
            if hold.worth_offering() && self.offer(&hold) {
                return Next::Offered;
            }
            hold.discard();
            return Next::Again;
        }
        if let Some(open_until_us) = answered.open_until_us {
            self.sweep(owner, lease, Some(open_until_us));
        }
        match answered.answer {
            Answer::Taken { remaining_ms } => {
                self.resolve_once();
                let mut state = self.state.lock();
                state.taken_below = state.next;
                Next::Taken(remaining_ms.map(Duration::from_millis))
            }
            Answer::Refused(refusal) => {
                if let Some(head) = self.head()
                    && head.number < self.state.lock().asked_below
                {
                    let error = refused(self.name.to_string(), "acquire", refusal);
                    self.resolve(&head, WaitPhase::Failed(error));
                }
                Next::Again
            }
            _ => Next::Again,
        }
    }

    fn failed(self: &Arc<Self>, owner: OwnerId, lease: Duration, failure: Failure) -> Next {
        let trouble = match failure {
            Failure::NotSent(cause) => Trouble {
                cause,
                unanswered: false,
            },
            Failure::Unanswered {
                open_until_us,
                cause,
            } => {
                // A place in a queue is kept, and swept when it is given up.
                if self.state.lock().spot.is_none() {
                    self.sweep(owner, lease, Some(open_until_us));
                }
                Trouble {
                    cause,
                    unanswered: true,
                }
            }
            Failure::Closed => {
                let all: Vec<_> = self.state.lock().waiters.values().cloned().collect();
                for waiter in all {
                    self.resolve(&waiter, WaitPhase::Failed(Error::Closed));
                }
                return Next::Again;
            }
        };
        let now = self.engine.now();
        let patience = self.engine.config.lease;
        let (over, heard, asked_below) = {
            let mut state = self.state.lock();
            state.trouble = Some(trouble.clone());
            let heard = state.heard;
            let all: Vec<_> = state.waiters.values().cloned().collect();
            (all, heard, state.asked_below)
        };
        for waiter in over {
            let since = heard.map_or(waiter.joined, |heard| heard.max(waiter.joined));
            let only_attempt = waiter.wish.once && waiter.number < asked_below;
            if only_attempt || later(since, patience) <= now {
                self.resolve(&waiter, WaitPhase::Failed(trouble.error(&self.name)));
            }
        }
        Next::Again
    }

    /// Ends the wait of one waiter and takes it out of the line. One with an offer keeps its place: the
    /// offer may come back.
    fn resolve(&self, waiter: &Arc<Waiter>, phase: WaitPhase) {
        if waiter.resolve(phase) {
            self.state.lock().remove(waiter);
            self.leave_queue();
        }
    }

    /// Others hold the lock: tells those who wanted one attempt, and for whom this was it.
    fn resolve_once(&self) {
        let once: Vec<_> = {
            let state = self.state.lock();
            if state.once == 0 {
                return;
            }
            state
                .waiters
                .range(..state.asked_below)
                .map(|(_, waiter)| waiter)
                .filter(|waiter| waiter.wish.once)
                .cloned()
                .collect()
        };
        for waiter in once {
            self.resolve(&waiter, WaitPhase::Busy);
        }
    }

    /// Makes sure that no copy of an attempt with `owner` leaves a hold behind, or a place in a queue.
    fn sweep(&self, owner: OwnerId, lease: Duration, open_until_us: Option<u64>) {
        let timeout = self.engine.config.command_timeout_for(lease);
        let give_up = later(self.engine.now(), lease + timeout);
        let verb = Verb::Release {
            owner,
            count: 0,
            also: None,
        };
        let op = self.op(verb);
        let job = Job::unattended(op, timeout, give_up).sit_out(open_until_us);
        self.engine.dispatcher.post(job);
    }

    /// Offers a grant to the first in line who answers and wants this lease.
    fn offer(self: &Arc<Self>, hold: &Arc<Hold>) -> bool {
        if self.engine.closing.is_cancelled() {
            return false;
        }
        // One who has just ceased to wait is passed over, so each is asked once at most.
        let mut from = 0;
        loop {
            let next = {
                let mut state = self.state.lock();
                let next = state
                    .waiters
                    .range(from..)
                    .map(|(_, waiter)| waiter)
                    .find(|waiter| waiter.answers())
                    // With another lease it is this one's turn all the same: nobody overtakes it.
                    .filter(|waiter| hold.suits(&waiter.wish.terms))
                    .cloned();
                state.offered = next.is_some();
                if next.is_some() {
                    state.claimed_until = None;
                }
                next
            };
            let Some(waiter) = next else { return false };
            from = waiter.number + 1;
            let waker = {
                let mut state = waiter.state.lock();
                if !matches!(state.phase, WaitPhase::Waiting) || state.stalled {
                    continue;
                }
                let until = later(self.engine.now(), OFFER_WINDOW);
                let offer = Arc::new(Offer {
                    line: Arc::clone(self),
                    waiter: Arc::clone(&waiter),
                });
                let appointment = self.engine.watchdog.schedule(until, offer);
                state.phase = WaitPhase::Offered(Arc::clone(hold), appointment);
                state.waker.take()
            };
            if let Some(waker) = waker {
                waker.wake();
            }
            return true;
        }
    }

    /// Takes back what this waiter was offered and has not claimed. It keeps its place in line, unless
    /// it wanted one attempt.
    fn take_back(self: &Arc<Self>, waiter: &Waiter) {
        let (hold, appointment) = {
            let mut state = waiter.state.lock();
            match std::mem::replace(&mut state.phase, WaitPhase::Waiting) {
                WaitPhase::Offered(hold, appointment) => {
                    if waiter.wish.once {
                        state.phase = WaitPhase::Busy;
                    } else {
                        state.stalled = true;
                    }
                    (hold, appointment)
                }
                other => {
                    state.phase = other;
                    return;
                }
            }
        };
        self.engine.watchdog.cancel(appointment);
        if waiter.wish.once {
            self.state.lock().remove(waiter);
        }
        self.pass_on(&hold);
    }

    /// Lets an offer stand, and renews it, as one bug does.
    fn renew_offer(self: &Arc<Self>, waiter: &Arc<Waiter>, now: Instant) -> bool {
        let hold = {
            let mut state = waiter.state.lock();
            let WaitPhase::Offered(hold, appointment) = &mut state.phase else {
                return false;
            };
            let offer = Arc::new(Offer {
                line: Arc::clone(self),
                waiter: Arc::clone(waiter),
            });
            let until = later(now, OFFER_WINDOW);
            let watchdog = &self.engine.watchdog;
            *appointment = watchdog.reschedule(Some(*appointment), until, offer);
            Arc::clone(hold)
        };
        let job = hold.renewal(hold.lease(), Box::new(Unheard));
        self.engine.dispatcher.post(job);
        true
    }

    /// An offer came back: to the next who answers, else to the server.
    fn pass_on(self: &Arc<Self>, hold: &Arc<Hold>) {
        self.state.lock().offered = false;
        // A line in which nobody answers may not keep it from others.
        let again = hold.offered_again() < MOST_OFFERS && hold.worth_offering();
        if !(again && self.offer(hold)) {
            hold.discard();
        }
        self.serve_the_rest();
    }

    /// An offer was not used and is dealt with.
    fn put_back(self: &Arc<Self>) {
        {
            let mut state = self.state.lock();
            state.offered = false;
            state.try_now = true;
        }
        self.serve_the_rest();
    }

    /// Whether it was found to wait for somebody.
    fn claimed(self: &Arc<Self>, waiter: &Arc<Waiter>, hold: &Arc<Hold>) -> bool {
        let until = hold.server_end();
        let waited = {
            let mut state = self.state.lock();
            state.offered = false;
            state.moved_at = Some(self.engine.now());
            // Who reads keeps nobody out who wants to read.
            let shared = self.kind.is_shared();
            state.claimed_until = Some(until).filter(|_| !shared);
            state.try_now |= shared;
            state.remove(waiter);
            waiter.number < state.taken_below
        };
        self.serve_the_rest();
        waited
    }

    fn leave(self: &Arc<Self>, waiter: &Arc<Waiter>) {
        self.state.lock().remove(waiter);
        self.leave_queue();
        let phase = {
            let mut state = waiter.state.lock();
            state.waker = None;
            std::mem::replace(&mut state.phase, WaitPhase::Gone)
        };
        if let WaitPhase::Offered(hold, appointment) = phase {
            self.engine.watchdog.cancel(appointment);
            if seeded(Bug::WakeUpSwallowed) {
                hold.discard();
                return;
            }
            self.pass_on(&hold);
        } else {
            self.serve_the_rest();
        }
    }

    /// After a change of the line: its task looks again; one is started for those who wait without;
    /// an empty line that nobody serves goes.
    fn serve_the_rest(self: &Arc<Self>) {
        let mut by_name = self.engine.queues.by_name.lock();
        let mut state = self.state.lock();
        match (state.serving, state.waiters.is_empty()) {
            (Serving::ByTask, empty) => {
                if state.resting && !state.try_now && !empty {
                    return;
                }
                drop(state);
                drop(by_name);
                self.kick.notify_one();
            }
            (Serving::Directly, _) => {}
            (Serving::Nobody, true) => {
                if by_name
                    .get(&self.key())
                    .is_some_and(|line| Arc::ptr_eq(line, self))
                {
                    by_name.remove(&self.key());
                }
            }
            (Serving::Nobody, false) => {
                // Only the one with the offer: nothing to do unless it comes back.
                if state.offered && state.waiters.len() == 1 {
                    return;
                }
                state.serving = Serving::ByTask;
                drop(state);
                drop(by_name);
                self.start_task(Next::Again);
            }
        }
    }

    fn start_task(self: &Arc<Self>, next: Next) {
        let line = Arc::clone(self);
        self.engine
            .env
            .spawn(Box::pin(async move { line.serve(next).await }));
    }

    /// Ends the task's service if nobody stands in line.
    fn dismiss(self: &Arc<Self>) -> bool {
        let mut by_name = self.engine.queues.by_name.lock();
        let mut state = self.state.lock();
        if !state.waiters.is_empty() {
            return false;
        }
        state.serving = Serving::Nobody;
        if by_name
            .get(&self.key())
            .is_some_and(|line| Arc::ptr_eq(line, self))
        {
            by_name.remove(&self.key());
        }
        true
    }

    /// Serves the line until it is empty.
    async fn serve(self: Arc<Self>, mut next: Next) {
        let mut subscription: Option<Subscription> = None;
        let mut poll_pause = POLL_FIRST;
        while !self.dismiss() {
            match next {
                Next::Again => {}
                Next::Offered => {
                    // The offer is claimed, passed on or put back; each of them kicks.
                    let (has_it, claimed) = {
                        let state = self.state.lock();
                        (
                            state.has_it(),
                            state.claimed_until.filter(|_| !state.try_now),
                        )
                    };
                    if has_it {
                        self.kick.notified().await;
                        continue;
                    }
                    next = match claimed {
                        Some(until) => {
                            Next::Taken(Some(until.saturating_duration_since(self.engine.now())))
                        }
                        None => Next::Again,
                    };
                    continue;
                }
                // Somebody came, or freed it, since that was asked.
                Next::Taken(_) if self.state.lock().try_now => {}
                Next::Taken(remaining) => {
                    self.hint();
                    let channel = self.channel();
                    // Of a fair lock each place has a channel of its own.
                    let known = |subscription: &Subscription| subscription.channel() == &channel;
                    if !subscription.as_ref().is_some_and(known) {
                        let asked = self.engine.store.subscribe(&channel);
                        // A release may have come before the subscription was live: try once more.
                        self.until_listening(&asked, remaining).await;
                        if seeded(Bug::NoTryAfterSubscribing) {
                            self.sleep(&asked, remaining, &mut poll_pause).await;
                        }
                        subscription = Some(asked);
                    } else if let Some(subscription) = &subscription {
                        self.sleep(subscription, remaining, &mut poll_pause).await;
                    }
                }
            }
            self.stand_back().await;
            if self.head().is_none() {
                // All are stalled or have an offer: nothing is tried for those who would not answer.
                if self.is_empty() {
                    continue;
                }
                self.kick.notified().await;
                next = if self.state.lock().has_it() {
                    Next::Offered
                } else {
                    Next::Again
                };
                continue;
            }
            self.state.lock().try_now = false;
            if let Some(subscription) = &subscription {
                // What was heard so far is before this attempt.
                let _ = subscription.woken().now_or_never();
            }
            let Ok(permit) = Arc::clone(&self.engine.permits).acquire_owned().await else {
                return;
            };
            let (reply, outcome) = oneshot::channel();
            if !self.attempt(permit, Some(reply)) {
                next = Next::Again;
                continue;
            }
            next = outcome.await.unwrap_or(Next::Again);
        }
    }

    /// Lets those of other processes go first, once after a release that they heard.
    async fn stand_back(&self) {
        // The message of our own release may be quicker than its answer.
        let patience = later(self.engine.now(), OFFER_WINDOW);
        while self.state.lock().releasing {
            let kicked = until(&*self.engine.env, patience, self.kick.notified());
            if kicked.await.is_none() {
                break;
            }
        }
        let earliest = self.state.lock().stand_back.take();
        if let Some(earliest) = earliest {
            self.engine.env.sleep_until(earliest).await;
        }
    }

    /// Waits until the subscription is confirmed, but no longer than a sleep would be.
    async fn until_listening(&self, subscription: &Subscription, remaining: Option<Duration>) {
        let until = later(
            self.engine.now(),
            remaining.unwrap_or(WAKE_CAP).min(WAKE_CAP),
        );
        tokio::select! {
            biased;
            _ = subscription.settled() => {}
            () = self.until_try_now() => return,
            () = self.engine.env.sleep_until(until) => {}
        }
        // Whoever was first before would tell by a beat that it is his turn.
        self.state.lock().only_keep = true;
    }

    /// Sleeps until a message, a kick, the end of the holder's lease, or the cap. Both count
    /// anew when somebody of this line gets the lock: the server need not be asked for what is known.
    async fn sleep(
        self: &Arc<Self>,
        subscription: &Subscription,
        remaining: Option<Duration>,
        poll_pause: &mut Duration,
    ) {
        let cap = if subscription.listening() == Listening::Live {
            *poll_pause = POLL_FIRST;
            if self.is_fair() { BEAT_EVERY } else { WAKE_CAP }
        } else {
            let pause = *poll_pause;
            *poll_pause = (pause * 3 / 2).min(POLL_CAP);
            self.jittered(pause)
        };
        // A moment past the lease's end, not all at the same one.
        let until = |from: Instant, lasts: Option<Duration>| {
            let ends = lasts.map(|left| left + self.jittered(Duration::from_millis(4)));
            later(from, ends.unwrap_or(cap).min(cap))
        };
        let mut from = self.engine.now();
        let mut wakes = until(from, remaining);
        // Beats travel together.
        if self.is_fair() && remaining.is_none() && cap == BEAT_EVERY {
            wakes = self.engine.in_step(wakes, cap / 16);
        }
        if remaining.is_none() && seeded(Bug::UnboundedSleep) {
            wakes = later(wakes, Duration::MAX);
        }
        {
            let mut state = self.state.lock();
            state.listening = subscription.listening() == Listening::Live;
            state.resting = true;
        }
        loop {
            tokio::select! {
                biased;
                () = subscription.woken() => {
                    if seeded(Bug::WakeWithoutCheck) {
                        self.invent_a_grant();
                    }
                    let mut state = self.state.lock();
                    if state.had_its_turn {
                        let pause = self.jittered(STAND_BACK);
                        state.stand_back.get_or_insert(later(self.engine.now(), pause));
                    }
                    drop(state);
                    break;
                }
                () = self.until_try_now() => break,
                () = self.engine.env.sleep_until(wakes) => {}
            }
            let state = self.state.lock();
            match (state.moved_at, state.claimed_until) {
                (Some(moved), Some(ends)) if moved > from => {
                    wakes = until(moved, Some(ends.saturating_duration_since(moved)));
                    from = moved;
                }
                _ => {
                    drop(state);
                    let now = self.engine.now();
                    let over = remaining.is_some_and(|left| later(from, left) <= now);
                    self.state.lock().only_keep = !over;
                    break;
                }
            }
        }
        self.state.lock().resting = false;
    }

    /// Takes a message for the lock itself, as one bug does.
    fn invent_a_grant(self: &Arc<Self>) {
        let Some(head) = self.head() else { return };
        let lease = head.wish.terms.first_lease();
        let answered = Answered {
            answer: Answer::Nothing,
            sent: self.engine.now(),
            server_now_us: 0,
            unanswered_since: None,
            open_until_us: None,
        };
        let (owner, remaining_ms) = (self.engine.fresh_owner(), millis(lease));
        let (engine, name) = (&self.engine, &self.name);
        let hold = Hold::granted(
            engine,
            self.kind,
            name,
            owner,
            lease,
            1,
            remaining_ms,
            &answered,
            None,
            0,
        );
        self.offer(&hold);
    }

    /// A quarter of `pause`, and up to three quarters more by chance.
    fn jittered(&self, pause: Duration) -> Duration {
        let micros = u64::try_from(pause.as_micros()).unwrap_or(u64::MAX).max(2);
        let least = micros / 4;
        Duration::from_micros(least + self.engine.env.random() % (micros - least))
    }

    /// Completes when the line is to be looked at without more sleep.
    async fn until_try_now(&self) {
        loop {
            if self.state.lock().try_now || self.is_empty() {
                return;
            }
            self.kick.notified().await;
        }
    }

    /// Says once of a hold that somebody has waited a whole lease for it, in the same client. A line
    /// that moves on is no such case, however long it is.
    fn hint(&self) {
        let Some(head) = self.head() else { return };
        let now = self.engine.now();
        if now < later(head.joined, head.wish.terms.lease) {
            return;
        }
        // By the first of those who wait for it: the others wait for the same reason. And not at each
        // turn of a busy line: it looks through all holds of the client.
        let hinted = {
            let mut state = self.state.lock();
            if state.hint_at.is_some_and(|at| now < at) {
                return;
            }
            state.hint_at = Some(later(now, head.wish.terms.lease / 3));
            state.hinted
        };
        if let Some(hold) = self.engine.own_hold(self.kind, &self.name)
            && hinted != Some(hold.owner)
            && now >= later(hold.since(), head.wish.terms.lease)
        {
            self.state.lock().hinted = Some(hold.owner);
            let held_for = now.saturating_duration_since(hold.since());
            observe::waiting_on_own_client(&self.engine, &self.name, hold.owner, held_for);
        }
    }
}

impl LineState {
    fn add(&mut self, waiter: &Arc<Waiter>) {
        self.next += 1;
        self.once += usize::from(waiter.wish.once);
        self.waiters.insert(waiter.number, Arc::clone(waiter));
    }

    fn remove(&mut self, waiter: &Waiter) {
        if self.waiters.remove(&waiter.number).is_some() {
            self.once -= usize::from(waiter.wish.once);
        }
    }

    /// Somebody of this line has the lock, or is about to.
    fn has_it(&self) -> bool {
        self.offered || self.handing
    }
}

/// The end of an offer's window.
struct Offer {
    line: Arc<Line>,
    waiter: Arc<Waiter>,
}

impl Timed for Offer {
    fn due(self: Arc<Self>, now: Instant) -> Option<Job> {
        if !seeded(Bug::OfferRenewed) || !self.line.renew_offer(&self.waiter, now) {
            self.line.take_back(&self.waiter);
        }
        None
    }

    fn held(self: Arc<Self>) -> Option<Arc<Hold>> {
        None
    }
}

/// Nobody.
struct Unheard;

impl Requester for Unheard {
    fn done(self: Box<Self>, _: Outcome) {}
}

/// An attempt under way for a line.
struct Attempt {
    line: Arc<Line>,
    owner: OwnerId,
    lease: Duration,
    reply: Option<oneshot::Sender<Next>>,
}

impl Requester for Attempt {
    fn wanted(&self) -> bool {
        !self.line.is_empty()
    }

    fn trouble(&self, cause: &Cause, unanswered: bool) {
        self.line.hear_of(cause, unanswered);
    }

    fn done(self: Box<Self>, outcome: Outcome) {
        let Self {
            line,
            owner,
            lease,
            reply,
        } = *self;
        // Here and not in the line's task: a grant must be offered or given back before the
        // dispatcher can think that all is done.
        let next = line.settle(owner, lease, outcome);
        if let Some(reply) = reply {
            let _ = reply.send(next);
            return;
        }
        let mut state = line.state.lock();
        state.serving = Serving::Nobody;
        let alone_with_offer = matches!(next, Next::Offered) && state.waiters.len() <= 1;
        if state.waiters.is_empty() || alone_with_offer {
            drop(state);
            line.serve_the_rest();
        } else {
            state.serving = Serving::ByTask;
            drop(state);
            line.start_task(next);
        }
    }
}

/// A hand-off under way for a line.
struct HandOff {
    line: Arc<Line>,
    /// The hold that was left; nobody believes in it any more.
    hold: Arc<Hold>,
    /// Who is to have it next.
    to: OwnerId,
    lease: Duration,
    chain: Chain,
    /// Tokens that are reserved for those behind it.
    reserve: u64,
    reply: Option<oneshot::Sender<ReleaseOutcome>>,
}

impl Requester for HandOff {
    fn wanted(&self) -> bool {
        !self.line.is_empty()
    }

    fn trouble(&self, cause: &Cause, unanswered: bool) {
        self.line.hear_of(cause, unanswered);
    }

    fn done(self: Box<Self>, outcome: Outcome) {
        let Self {
            line,
            hold,
            to,
            lease,
            chain,
            reserve,
            reply,
        } = *self;
        let open_until_us = match &outcome {
            Outcome::Answered(answered) => {
                if let Answer::Granted {
                    token,
                    remaining_ms,
                } = answered.answer
                {
                    hold.handed_off(reply);
                    let (engine, name) = (&line.engine, &line.name);
                    let chain = Some(chain);
                    let next = Hold::granted(
                        engine,
                        line.kind,
                        name,
                        to,
                        lease,
                        token,
                        remaining_ms,
                        answered,
                        chain,
                        reserve,
                    );
                    line.handed_off(Some(&next));
                    return;
                }
                if let Answer::Gone(_) = answered.answer {
                    // Neither is there: the old one was lost, or the new one was and is over again.
                    line.handed_off(None);
                    hold.release_done(&outcome, reply);
                    return;
                }
                // Refused, be it half-way: a rule that forbids one command lets others pass.
                answered.open_until_us
            }
            Outcome::Failed(Failure::Unanswered { open_until_us, .. }) => Some(*open_until_us),
            Outcome::Failed(Failure::NotSent(_)) => {
                line.handed_off(None);
                hold.post_release(reply);
                return;
            }
            Outcome::Failed(Failure::Closed) => {
                line.handed_off(None);
                hold.release_done(&outcome, reply);
                return;
            }
        };
        // Whoever has it of the two, it is freed.
        line.handed_off(None);
        hold.release_with(to, lease, open_until_us, reply);
    }
}
