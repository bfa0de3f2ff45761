//! What can happen next: to the clients, on the network, and to time.

use std::fmt;
use std::time::Duration;

use tokio::time::Instant;

use super::server::{PER_TICK, Question, TICK_MS, Table};
use super::world::{
    Ask, HOLDS, Hold, Phase, Reply, Request, Server, Slots, Told, Token, World, process,
};
use super::{Config, Property, Rule};
use crate::lease::Term;

/// Something that can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// A request reaches the server and runs.
    Run(usize),
    /// A client reads a reply.
    Read(usize),
    /// The network copies a request.
    Copy(usize),
    /// Wants the lock: sends the first acquire.
    Start(usize),
    /// Sends what it waits for once more.
    SendAgain(usize),
    /// The waiter leaves.
    Cancel(usize),
    /// The holder enters once more.
    Nest(usize),
    /// The inner waiter leaves.
    CancelNested(usize),
    /// A guard is dropped; the last one releases.
    Leave(usize),
    Renew(usize),
    /// The operator, who sees this hold on the server, removes it.
    Force(usize),
    /// The server comes back without its memory.
    LoseMemory,
    /// The server's clock is set.
    StepClock,
    Tick,
}

pub(super) const STEPS: [Step; 34] = [
    Step::Run(0),
    Step::Run(1),
    Step::Run(2),
    Step::Run(3),
    Step::Read(0),
    Step::Read(1),
    Step::Read(2),
    Step::Copy(0),
    Step::Copy(1),
    Step::Copy(2),
    Step::Copy(3),
    Step::Start(0),
    Step::Start(1),
    Step::Start(2),
    Step::SendAgain(0),
    Step::SendAgain(1),
    Step::SendAgain(2),
    Step::Cancel(0),
    Step::Cancel(1),
    Step::Cancel(2),
    Step::Nest(0),
    Step::CancelNested(0),
    Step::Leave(0),
    Step::Leave(1),
    Step::Leave(2),
    Step::Renew(0),
    Step::Renew(1),
    Step::Renew(2),
    Step::Force(0),
    Step::Force(1),
    Step::Force(2),
    Step::LoseMemory,
    Step::StepClock,
    Step::Tick,
];

/// The rules by which one world follows another.
pub(super) struct Model {
    config: Config,
    table: Table,
    /// For how many ticks a lease of so many is believed, by the crate's own arithmetic.
    believed: Vec<i8>,
}

impl Model {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            config: config.clone(),
            table: Table::new(config),
            believed: (0..16).map(ticks_believed).collect(),
        }
    }

    pub(super) fn start(&self) -> World {
        World::new(self.config.budget, self.config.oldest_token())
    }

    /// The world after `step`, and what this broke; `None` if it cannot happen.
    pub(super) fn step(&mut self, world: &World, step: Step) -> Option<(World, Option<Property>)> {
        let mut next = *world;
        let mut broken = None;
        match step {
            Step::Run(slot) => {
                if slot > 0 && world.requests.get(slot) == world.requests.get(slot - 1) {
                    return None;
                }
                let request = next.requests.take(slot)?;
                broken = self.run(&mut next, request);
            }
            Step::Read(slot) => {
                let reply = next.replies.take(slot)?;
                self.read(&mut next, reply);
            }
            Step::Copy(slot) => {
                let request = world.requests.get(slot)?;
                if request.copy || next.requests.is_full() || !spend(&mut next.budget.copies) {
                    return None;
                }
                next.requests.take(slot);
                let copied = true;
                next.requests.put(Request { copied, ..request });
                next.requests.put(Request {
                    copied,
                    copy: true,
                    ..request
                });
            }
            Step::LoseMemory => {
                if !spend(&mut next.budget.losses) {
                    return None;
                }
                next.server = Server::EMPTY;
                self.shift_server_clock(&mut next, self.config.clock_at_loss);
                self.tick(&mut next);
            }
            Step::StepClock => {
                if !spend(&mut next.budget.steps) {
                    return None;
                }
                next.stepped = true;
                self.shift_server_clock(&mut next, self.config.clock_step);
            }
            Step::Tick => self.tick(&mut next),
            Step::Start(hold)
            | Step::SendAgain(hold)
            | Step::Cancel(hold)
            | Step::Nest(hold)
            | Step::CancelNested(hold)
            | Step::Leave(hold)
            | Step::Renew(hold)
            | Step::Force(hold) => {
                if !self.by_client(&mut next, step, hold) {
                    return None;
                }
            }
        }
        self.forget_what_cannot_matter(&mut next);
        let broken = broken.or_else(|| self.broken(&next));
        Some((next, broken))
    }

    /// The property that does not hold in this world.
    fn broken(&self, world: &World) -> Option<Property> {
        let checked = |property| self.config.properties.contains(&property);
        let mut believed = 0;
        for (number, hold) in world.holds.iter().enumerate() {
            let on_server = world.is_on_server(number);
            if hold.is_believed() {
                believed += 1;
                if believed > 1 && checked(Property::OneBeliever) {
                    return Some(Property::OneBeliever);
                }
                if !on_server && checked(Property::BelievedIsHeld) {
                    return Some(Property::BelievedIsHeld);
                }
            }
            if on_server && hold.is_unwanted() {
                let bound = DEADLINE + self.config.lease;
                if hold.unwanted >= bound && checked(Property::UnwantedEnds) {
                    return Some(Property::UnwantedEnds);
                }
                if hold.phase == Phase::Done && checked(Property::ReleasedIsGone) {
                    return Some(Property::ReleasedIsGone);
                }
            }
        }
        None
    }

    /// A request runs on the server.
    fn run(&mut self, world: &mut World, request: Request) -> Option<Property> {
        let Request { ask, hold, .. } = request;
        let before = world.server;
        let late = request.left < 0;
        let outcome = self.table.ask(&Question {
            server: before,
            ask,
            hold,
            late,
            floor: request.floor,
        });
        world.server = outcome.server;
        if ask != Ask::Force && !request.copy {
            let told = match outcome.told {
                Told::Yes(left) => Told::Yes(self.belief(left, request.age)),
                other => other,
            };
            world.replies.put(Reply {
                ask,
                hold,
                told,
                token: outcome.token,
                conclusive: ask == Ask::Release
                    && (request.conclusive || world.holds[hold].open_left < 0),
                copied: request.copied,
                after_step: world.stepped,
            });
        }

        let greatest = world.greatest;
        if outcome.created && self.config.tokens {
            world.greatest = world.greatest.max(outcome.token);
        }
        let of_another = before.entry.is_some_and(|entry| entry.hold != hold);
        let of_this = before.entry.is_some_and(|entry| entry.hold == hold);
        let broken = if of_another && outcome.server.entry != before.entry {
            Property::OnlyItsOwn
        } else if of_this && !late && !matches!(outcome.told, Told::Yes(_)) {
            Property::NeverRefused
        } else if outcome.created && self.config.tokens && outcome.token <= greatest {
            Property::TokensRise
        } else {
            return None;
        };
        self.config.properties.contains(&broken).then_some(broken)
    }

    /// For how long an answer may be believed that says `left`, to a request sent `age` ticks ago.
    fn belief(&self, left: i8, age: i8) -> i8 {
        let whole = self.believed[usize::try_from(left).unwrap()];
        let from_sent =
            self.config.has(Rule::DeadlineFromSend) && self.config.has(Rule::AnsweredAttempt);
        if from_sent {
            (whole - age).max(0)
        } else {
            whole
        }
    }

    /// A client reads a reply.
    fn read(&self, world: &mut World, reply: Reply) {
        let number = reply.hold;
        if reply.copied && self.config.has(Rule::OnlyOwnCopies) {
            world.requests.update(|request| !request.copy);
        }
        if reply.after_step {
            world.aware[process(number)] = true;
        }
        let hold = &mut world.holds[number];
        match (reply.ask, reply.told) {
            (Ask::Acquire, told) => {
                hold.open = (hold.open - 1).max(0);
                if hold.open == 0 {
                    hold.open_left = -1;
                }
                match told {
                    Told::Yes(belief) => self.granted(world, number, belief, reply.token),
                    Told::Taken if hold.phase == Phase::Waiting => {
                        if hold.open > 0 {
                            self.end(world, number);
                        } else if self.config.has(Rule::OnlyOwnCopies) {
                            // The next attempt has an owner id that was never used.
                            *hold = Hold::IDLE;
                        } else {
                            hold.end(Phase::Done);
                        }
                    }
                    _ => {}
                }
            }
            (Ask::Nest(asked), told) if asked == hold.nesting => match told {
                Told::Yes(belief) => {
                    hold.nesting = 0;
                    hold.depth += 1;
                    hold.confirm(belief);
                }
                Told::Gone => hold.end(Phase::Gone),
                _ => {}
            },
            (Ask::Leave | Ask::Renew(_), Told::Yes(belief)) => hold.confirm(belief),
            (Ask::Leave | Ask::Renew(_), Told::Gone) if hold.phase == Phase::Held => {
                hold.end(Phase::Gone);
            }
            (Ask::Release, _) if hold.phase == Phase::Ending => {
                if reply.conclusive || !self.config.has(Rule::SitOut) {
                    hold.end(Phase::Done);
                }
            }
            _ => {}
        }
    }

    /// A grant is read. Past its own deadline it is none.
    fn granted(&self, world: &mut World, number: usize, belief: i8, token: Token) {
        let floor = &mut world.floors[process(number)];
        *floor = (*floor).max(token);
        let hold = &mut world.holds[number];
        let belief = if self.config.has(Rule::AnsweredAttempt) {
            belief
        } else {
            (self.config.lease - hold.last_sent).max(0)
        };
        match hold.phase {
            Phase::Waiting if belief > 0 => {
                hold.phase = Phase::Held;
                hold.depth = 1;
                hold.belief = belief;
            }
            Phase::Waiting => self.end(world, number),
            _ => hold.confirm(belief),
        }
    }

    /// Whether this client step can happen; does it.
    fn by_client(&self, world: &mut World, step: Step, number: usize) -> bool {
        let hold = world.holds[number];
        let in_time = hold.phase == Phase::Held && hold.belief > 0;
        match step {
            Step::Start(_) => {
                // Hold 1 is of the same flow of work as hold 0, which comes first.
                let turn = number != 1 || (world.holds[0].is_unwanted());
                if hold.phase != Phase::Idle || !turn || number == self.config.without_hold {
                    return false;
                }
                world.holds[number].phase = Phase::Waiting;
                self.send(world, Ask::Acquire, number);
            }
            Step::SendAgain(_) => {
                let ask = match hold.phase {
                    Phase::Waiting => Ask::Acquire,
                    Phase::Held if hold.nesting > 0 => Ask::Nest(hold.nesting),
                    Phase::Ending => Ask::Release,
                    _ => return false,
                };
                // A release that was answered before its acquire is over comes once more anyway.
                let due = ask == Ask::Release && !is_under_way(world, ask, number);
                if !due && !spend(&mut world.budget.resends) {
                    return false;
                }
                self.send(world, ask, number);
            }
            Step::Cancel(_) => {
                if hold.phase != Phase::Waiting || !spend(&mut world.budget.cancels) {
                    return false;
                }
                self.end(world, number);
            }
            Step::Nest(_) => {
                let asked = world.budget.nests;
                let may = in_time && hold.depth == 1 && hold.nesting == 0;
                if !may || !spend(&mut world.budget.nests) {
                    return false;
                }
                world.holds[number].nesting = asked;
                self.send(world, Ask::Nest(asked), number);
            }
            Step::CancelNested(_) => {
                if hold.nesting == 0 || !spend(&mut world.budget.cancels) {
                    return false;
                }
                world.holds[number].nesting = 0;
                if hold.depth == 0 {
                    self.end(world, number);
                } else if self.config.has(Rule::CleanUpToDepth) {
                    self.send(world, Ask::Leave, number);
                } else {
                    self.send(world, Ask::Release, number);
                }
            }
            Step::Leave(_) => match (hold.phase, hold.depth) {
                (Phase::Held, 1) if hold.nesting > 0 => {
                    world.holds[number].depth = 0;
                    if self.config.has(Rule::OpenLevelCounts) {
                        self.send(world, Ask::Leave, number);
                    } else {
                        self.send(world, Ask::Release, number);
                    }
                }
                (Phase::Held, 2) => {
                    world.holds[number].depth = 1;
                    self.send(world, Ask::Leave, number);
                }
                (Phase::Held, 1) | (Phase::Lost, _) => self.end(world, number),
                _ => return false,
            },
            Step::Renew(_) => {
                if !in_time || !spend(&mut world.budget.renewals) {
                    return false;
                }
                let depth = hold.depth + i8::from(hold.nesting > 0);
                self.send(world, Ask::Renew(depth), number);
            }
            Step::Force(_) => {
                if !world.is_on_server(number) || !spend(&mut world.budget.forces) {
                    return false;
                }
                self.send(world, Ask::Force, number);
            }
            _ => return false,
        }
        true
    }

    /// Posts a request. Its deadline is in the server's time, as its client knows it.
    fn send(&self, world: &mut World, ask: Ask, number: usize) {
        let of = process(number);
        let astray = if world.stepped && !world.aware[of] {
            self.config.clock_step
        } else {
            0
        };
        let left = DEADLINE - astray;
        world.requests.put(Request {
            ask,
            hold: number,
            age: 0,
            left: if is_done_however_late(ask) {
                0
            } else {
                left.max(self.config.latest())
            },
            floor: if ask == Ask::Acquire {
                world.floors[of]
            } else {
                self.config.oldest_token()
            },
            conclusive: ask == Ask::Release && world.holds[number].open == 0,
            copy: false,
            copied: false,
        });
        if ask == Ask::Acquire {
            let hold = &mut world.holds[number];
            hold.open += 1;
            hold.open_left = hold.open_left.max(left);
            hold.last_sent = 0;
        }
    }

    /// The last level was left, or the waiter: releases.
    fn end(&self, world: &mut World, number: usize) {
        world.holds[number].end(Phase::Ending);
        self.send(world, Ask::Release, number);
    }

    fn tick(&self, world: &mut World) {
        self.shift_server_clock(world, 1);
        let lease = self.config.lease;
        for hold in &mut world.holds {
            if hold.is_unwanted() {
                hold.unwanted = (hold.unwanted + 1).min(DEADLINE + lease);
            }
            if hold.phase == Phase::Held {
                hold.belief = (hold.belief - 1).max(0);
                if hold.belief == 0 {
                    hold.end(Phase::Lost);
                }
            }
            if hold.phase == Phase::Waiting && !self.config.has(Rule::AnsweredAttempt) {
                hold.last_sent = (hold.last_sent + 1).min(lease);
            }
        }
        world.requests.update(|request| {
            if !is_done_however_late(request.ask) {
                request.age = (request.age + 1).min(lease);
            }
            true
        });
        let from_sent =
            self.config.has(Rule::DeadlineFromSend) && self.config.has(Rule::AnsweredAttempt);
        world.replies.update(|reply| {
            if let Told::Yes(belief) = &mut reply.told
                && from_sent
            {
                *belief = (*belief - 1).max(0);
            }
            true
        });
    }

    /// The server's clock goes on, or is set, by so many ticks.
    fn shift_server_clock(&self, world: &mut World, by: i8) {
        if let Some(entry) = &mut world.server.entry {
            entry.left -= by;
            if entry.left <= 0 {
                world.server.entry = None;
            }
        }
        for hold in &mut world.holds {
            if hold.open_left >= 0 {
                hold.open_left = (hold.open_left - by).max(-1);
            }
            if hold.open_left < 0 {
                hold.open = 0;
            }
        }
        let latest = self.config.latest();
        let age_tokens = self.config.tokens && self.config.has(Rule::TokenFollowsClock);
        let oldest = self.config.oldest_token();
        let older = |token: Token| (token - by * PER_TICK).max(oldest);
        world.requests.update(|request| {
            if !is_done_however_late(request.ask) {
                request.left = (request.left - by).max(latest);
            }
            if age_tokens {
                request.floor = older(request.floor);
            }
            true
        });
        if !age_tokens {
            return;
        }
        world.replies.update(|reply| {
            reply.token = older(reply.token);
            true
        });
        world.server.last = world.server.last.map(older);
        world.floors = world.floors.map(older);
        world.greatest = older(world.greatest);
    }

    /// Takes out what makes states differ and can make no difference: as if it were lost.
    fn forget_what_cannot_matter(&self, world: &mut World) {
        let holds = world.holds;
        let on_server = world.server.entry.map(|entry| entry.hold);
        let mut acquiring = [false; HOLDS];
        world.requests.update(|request| {
            acquiring[request.hold] |= request.ask == Ask::Acquire;
            true
        });
        let latest = self.config.latest();
        let is_over = |hold: usize| {
            holds[hold].is_unwanted()
                && on_server != Some(hold)
                && !acquiring[hold]
                && self.config.has(Rule::OwnerPerHold)
        };
        world.requests.update(|request| {
            let hold = holds[request.hold];
            let late = request.left <= latest;
            match request.ask {
                Ask::Acquire => {
                    !late || hold.phase == Phase::Waiting || !self.config.has(Rule::AcquireDeadline)
                }
                Ask::Renew(_) if !self.config.has(Rule::RenewDeadline) => true,
                Ask::Renew(_) if !self.config.has(Rule::RenewCreatesNothing) => !late,
                Ask::Nest(_) | Ask::Leave | Ask::Renew(_) => !late && !is_over(request.hold),
                Ask::Release => !is_over(request.hold) || hold.phase != Phase::Done,
                Ask::Force => true,
            }
        });
        world.replies.update(|reply| {
            let hold = holds[reply.hold];
            match (reply.ask, hold.phase) {
                (Ask::Acquire, Phase::Waiting | Phase::Held) => true,
                (Ask::Acquire, Phase::Ending | Phase::Lost) => hold.open > 0,
                (Ask::Nest(asked), Phase::Held) => asked == hold.nesting,
                (Ask::Leave | Ask::Renew(_), Phase::Held) => true,
                (Ask::Release, Phase::Ending) => true,
                _ => false,
            }
        });
    }
}

fn is_under_way(world: &World, ask: Ask, number: usize) -> bool {
    world
        .requests
        .any(|request| request.ask == ask && request.hold == number)
        || world
            .replies
            .any(|reply| reply.ask == ask && reply.hold == number)
}

/// Such an operation has no deadline, so its age tells nothing.
fn is_done_however_late(ask: Ask) -> bool {
    matches!(ask, Ask::Release | Ask::Force)
}

/// Takes one from what is left, if there is any.
fn spend(left: &mut i8) -> bool {
    let some = *left > 0;
    *left -= i8::from(some);
    some
}

/// The ticks at which a lease of so many ticks, granted at the moment it was asked for, is believed.
fn ticks_believed(left: i8) -> i8 {
    #[expect(clippy::disallowed_methods, reason = "any moment does: none is compared with now")]
    let sent = Instant::now();
    let remaining_ms = (u64::try_from(left).unwrap() * TICK_MS).saturating_sub(1);
    let term = Term::confirmed(sent, remaining_ms);
    let tick = Duration::from_millis(TICK_MS);
    (0..=left + 1)
        .find(|ticks| sent + tick * u32::try_from(*ticks).unwrap() >= term.deadline)
        .unwrap_or(left + 2)
}

/// How long a request may take, in ticks.
pub(super) const DEADLINE: i8 = 1;

impl Step {
    /// In words, seen from the world before it.
    pub(super) fn describe(self, before: &World) -> String {
        match self {
            Self::Run(slot) => match before.requests.get(slot) {
                Some(request) => format!("runs: {request}"),
                None => String::new(),
            },
            Self::Read(slot) => match before.replies.get(slot) {
                Some(reply) => format!("read: {reply}"),
                None => String::new(),
            },
            Self::Copy(slot) => match before.requests.get(slot) {
                Some(request) => format!("copied: {request}"),
                None => String::new(),
            },
            other => format!("{other:?}"),
        }
    }
}
