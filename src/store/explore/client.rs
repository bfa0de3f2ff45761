//! The clients: what they post, and what they make of an answer.

use super::model::{DEADLINE, Model, spend};
use super::rules::Rule;
use super::steps::Step;
use super::world::{Ask, Hold, Phase, Reply, Request, Token, Told, World, process};

impl Model {
    /// A client reads a reply.
    pub(super) fn read(&self, world: &mut World, reply: Reply) {
        let number = reply.hold;
        if reply.copied && self.config.has(Rule::OnlyOwnCopies) {
            world.requests.update(|request| !request.copy);
        }
        if reply.after_step {
            world.aware[process(number)] = true;
        }
        let hold = &mut world.holds[number];
        match (reply.ask, reply.told) {
            (Ask::Acquire(attempt), told) => {
                hold.open &= !(1 << attempt);
                if hold.open == 0 {
                    hold.open_left = -1;
                }
                match told {
                    Told::Yes(belief) => self.granted(world, number, belief, reply.token),
                    Told::Taken if hold.phase == Phase::Waiting => {
                        if hold.open > 0 || is_under_way(world, number, is_acquire) {
                            self.end(world, number);
                        } else if self.config.has(Rule::OnlyOwnCopies) {
                            // The next attempt has an owner id that was never used.
                            world.holds[number] = Hold::IDLE;
                        } else {
                            world.holds[number].end(Phase::Done);
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
            (Ask::Release, _)
                if hold.phase == Phase::Ending
                    && (reply.conclusive || !self.config.has(Rule::SitOut)) =>
            {
                hold.end(Phase::Done);
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
    pub(super) fn by_client(&self, world: &mut World, step: Step, number: usize) -> bool {
        let hold = world.holds[number];
        let in_time = hold.phase == Phase::Held && hold.belief > 0;
        match step {
            Step::Start(_) => {
                // Hold 1 is of the same flow of work as hold 0, which comes first.
                let turn = number != 1 || world.holds[0].is_unwanted();
                if hold.phase != Phase::Idle || !turn || !self.config.holds.contains(&number) {
                    return false;
                }
                world.holds[number].phase = Phase::Waiting;
                self.send(world, Ask::Acquire(0), number);
            }
            Step::SendAgain(_) => {
                let ask = match hold.phase {
                    Phase::Waiting => next_attempt(world, number),
                    Phase::Held if hold.nesting > 0 => Ask::Nest(hold.nesting),
                    Phase::Ending => Ask::Release,
                    _ => return false,
                };
                // Due is what came late, was lost, or was not conclusive.
                let due = match ask {
                    Ask::Acquire(_) => hold.open == 0 && !is_under_way(world, number, is_acquire),
                    ask => !is_under_way(world, number, |other| other == ask),
                };
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
            floor: if let Ask::Acquire(_) = ask {
                world.floors[of]
            } else {
                self.config.oldest_token()
            },
            conclusive: ask == Ask::Release && world.holds[number].open == 0,
            copy: false,
            copied: false,
        });
        if let Ask::Acquire(attempt) = ask {
            let hold = &mut world.holds[number];
            hold.open |= 1 << attempt;
            hold.open_left = hold.open_left.max(left);
            hold.last_sent = 0;
        }
    }

    /// The last level was left, or the waiter: releases.
    fn end(&self, world: &mut World, number: usize) {
        world.holds[number].end(Phase::Ending);
        self.send(world, Ask::Release, number);
    }
}

/// Whether a request of this hold, or a reply to one, is under way.
fn is_under_way(world: &World, number: usize, is: impl Fn(Ask) -> bool) -> bool {
    world
        .requests
        .any(|request| request.hold == number && is(request.ask))
        || world
            .replies
            .any(|reply| reply.hold == number && is(reply.ask))
}

/// An acquire with a number that no other of this hold carries: answers are matched by attempt.
fn next_attempt(world: &World, number: usize) -> Ask {
    let open = world.holds[number].open;
    let in_use = |attempt: i8| {
        open & (1 << attempt) != 0
            || is_under_way(world, number, |ask| ask == Ask::Acquire(attempt))
    };
    let free = (0..ATTEMPTS).find(|attempt| !in_use(*attempt));
    Ask::Acquire(free.expect("so many are never under way"))
}

fn is_acquire(ask: Ask) -> bool {
    matches!(ask, Ask::Acquire(_))
}

/// Such an operation has no deadline, so its age tells nothing.
pub(super) fn is_done_however_late(ask: Ask) -> bool {
    matches!(ask, Ask::Release | Ask::Force)
}

/// As many as there is room for: each is a bit of `Hold::open`.
const ATTEMPTS: i8 = 7;
