//! How one world follows another, and what must hold in each.

use std::time::Duration;

use tokio::time::Instant;

use super::idle::Idle;
use super::rules::{Config, Property, Rule};
use super::server::{Question, TICK_MS, Table};
use super::steps::Step;
use super::world::{Ask, Phase, Reply, Request, Server, Told, World, heir};
use crate::lease::Term;

/// The rules by which one world follows another.
pub(super) struct Model {
    pub(super) config: Config,
    table: Table,
    pub(super) idle: Idle,
    /// For how many ticks a lease of so many is believed, by the crate's own arithmetic.
    believed: Vec<i8>,
}

impl Model {
    pub(super) fn new(config: &Config) -> Self {
        let mut table = Table::new(config);
        Self {
            config: config.clone(),
            idle: Idle::new(&mut table),
            table,
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
            Step::Refuse(slot, half) => {
                if slot > 0 && world.requests.get(slot) == world.requests.get(slot - 1) {
                    return None;
                }
                let request = next.requests.get(slot)?;
                if !self.refuse(&mut next, request, half) {
                    return None;
                }
                next.requests.take(slot);
            }
            Step::Read(slot) => {
                let reply = next.replies.take(slot)?;
                self.read(&mut next, reply);
            }
            Step::Copy(slot) => {
                let request = world.requests.get(slot)?;
                if request.copied || next.requests.is_full() || !spend(&mut next.budget.copies) {
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
            Step::SetClock => {
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
            | Step::HandOff(hold)
            | Step::GiveUp(hold)
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
                conclusive: matches!(ask, Ask::Release | Ask::ReleaseBoth)
                    && (request.conclusive || world.holds[hold].open_left < 0),
                copied: request.copied,
                after_step: world.stepped,
            });
        }

        let greatest = world.greatest;
        if outcome.created && self.config.tokens {
            world.greatest = world.greatest.max(outcome.token);
        }
        let also = heir(hold).filter(|_| matches!(ask, Ask::HandOff(_) | Ask::ReleaseBoth));
        let of_this = before.has(hold) || also.is_some_and(|heir| before.has(heir));
        let of_another = before.entry.is_some() && !of_this;
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

    /// The server refuses a hand-off, be it half-way; whether this can happen.
    fn refuse(&mut self, world: &mut World, request: Request, half: bool) -> bool {
        let Request { ask, hold, .. } = request;
        if !matches!(ask, Ask::HandOff(_)) || !spend(&mut world.budget.refusals) {
            return false;
        }
        if half {
            // The heir's field was written, and the old one not yet removed.
            match &mut world.server.entry {
                Some(entry) if entry.hold == hold && !entry.half && request.left >= 0 => {
                    entry.half = true;
                }
                _ => return false,
            }
        }
        if !request.copy {
            world.replies.put(Reply {
                ask,
                hold,
                told: Told::Refused,
                token: self.config.oldest_token(),
                conclusive: false,
                copied: request.copied,
                after_step: world.stepped,
            });
        }
        true
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
}

/// Takes one from what is left, if there is any.
pub(super) fn spend(left: &mut i8) -> bool {
    let some = *left > 0;
    *left -= i8::from(some);
    some
}

/// The ticks at which a lease of so many ticks, granted at the moment it was asked for, is believed.
fn ticks_believed(left: i8) -> i8 {
    #[expect(
        clippy::disallowed_methods,
        reason = "any moment does: none is compared with now"
    )]
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
