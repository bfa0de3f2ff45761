//! The clients: what they post, and what they make of an answer.

use super::model::{DEADLINE, Model, spend};
use super::rules::Rule;
use super::steps::Step;
use super::world::{Ask, Hold, Phase, Reply, Request, Token, Told, World, heir, process};

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
                        if hold.open > 0 || is_under_way(world, number, is_attempt) {
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
            (Ask::ReleaseBoth, _)
                if hold.phase == Phase::EndingBoth
                    && (reply.conclusive || !self.config.has(Rule::HandOffSitOut)) =>
            {
                hold.end(Phase::Done);
                end_heir(world, number);
            }
            (Ask::Release, _)
                if hold.phase == Phase::EndingBoth
                    && (reply.conclusive || !self.config.has(Rule::HandOffSitOut)) =>
            {
                // Only without `Rule::BothAreReleased`.
                hold.end(Phase::Done);
                end_heir(world, number);
            }
            (Ask::HandOff(attempt), told) if hold.phase == Phase::Handing => {
                hold.open &= !(1 << attempt);
                if hold.open == 0 {
                    hold.open_left = -1;
                }
                match told {
                    Told::Yes(belief) => self.handed_off(world, number, belief, reply.token),
                    // Neither is there, and neither comes back.
                    Told::Gone => {
                        hold.end(Phase::Done);
                        end_heir(world, number);
                    }
                    Told::Refused => self.give_up(world, number),
                    Told::Taken | Told::Late => {}
                }
            }
            _ => {}
        }
    }

    /// A hand-off was done: it is offered to who waits for it.
    fn handed_off(&self, world: &mut World, from: usize, belief: i8, token: Token) {
        let floor = &mut world.floors[process(from)];
        *floor = (*floor).max(token);
        let old = &mut world.holds[from];
        let (open, open_left) = (old.open, old.open_left);
        old.end(Phase::Done);
        (old.open, old.open_left) = (0, -1);
        let to = heir(from).expect("has an heir");
        let new = &mut world.holds[to];
        new.open = open;
        new.open_left = open_left;
        match new.phase {
            Phase::Next if belief > 0 => {
                new.phase = Phase::Held;
                new.depth = 1;
                new.belief = belief;
            }
            Phase::Next | Phase::NextLeft if self.config.has(Rule::StrandedIsReleased) => {
                self.end(world, to);
            }
            Phase::Next | Phase::NextLeft => new.end(Phase::Done),
            // Only without `Rule::HeirWaits`.
            _ => new.confirm(belief),
        }
    }

    /// It is not known what became of a hand-off: both are released in one operation.
    fn give_up(&self, world: &mut World, number: usize) {
        world.holds[number].end(Phase::EndingBoth);
        let heir = heir(number).expect("has an heir");
        world.holds[heir].end(Phase::NextLeft);
        self.send(world, self.clean_up(), number);
    }

    fn clean_up(&self) -> Ask {
        if self.config.has(Rule::BothAreReleased) {
            Ask::ReleaseBoth
        } else {
            Ask::Release
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
            Step::SendAgain(_) => return self.send_again(world, number),
            Step::Cancel(_) => {
                let waits = matches!(hold.phase, Phase::Waiting | Phase::Next);
                if !waits || !spend(&mut world.budget.cancels) {
                    return false;
                }
                if hold.phase == Phase::Next {
                    world.holds[number].end(Phase::NextLeft);
                } else {
                    self.end(world, number);
                }
            }
            Step::HandOff(_) => return self.hand_on(world, number),
            Step::GiveUp(_) => {
                if hold.phase != Phase::Handing {
                    return false;
                }
                self.give_up(world, number);
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

    /// Sends what is waited for once more, if that may be.
    fn send_again(&self, world: &mut World, number: usize) -> bool {
        let hold = world.holds[number];
        let ask = match hold.phase {
            Phase::Waiting => next_attempt(world, number),
            Phase::Held if hold.nesting > 0 => Ask::Nest(hold.nesting),
            Phase::Ending => Ask::Release,
            Phase::EndingBoth => self.clean_up(),
            // Not for those who have left.
            Phase::Handing if is_waited_for(world, number) => next_attempt(world, number),
            _ => return false,
        };
        // Due is what came late, was lost, or was not conclusive.
        let due = match ask {
            Ask::Acquire(_) | Ask::HandOff(_) => {
                hold.open == 0 && !is_under_way(world, number, is_attempt)
            }
            ask => !is_under_way(world, number, |other| other == ask),
        };
        if !due && !spend(&mut world.budget.resends) {
            return false;
        }
        self.send(world, ask, number);
        true
    }

    /// The last guard is dropped, and somebody waits: hands it on, if that may be.
    fn hand_on(&self, world: &mut World, number: usize) -> bool {
        let hold = world.holds[number];
        let in_time = hold.phase == Phase::Held && hold.belief > 0;
        let open = hold.open > 0 && self.config.has(Rule::OpenIsNotHandedOn);
        let may = in_time && hold.depth == 1 && hold.nesting == 0 && !open;
        let Some(to) = heir(number).filter(|to| world.holds[*to] == Hold::IDLE) else {
            return false;
        };
        if !may || !spend(&mut world.budget.hand_offs) {
            return false;
        }
        let attempt = next_attempt_of(world, number);
        world.holds[number].end(Phase::Handing);
        world.holds[to].phase = Phase::Next;
        if !self.config.has(Rule::HeirWaits) {
            let new = &mut world.holds[to];
            new.phase = Phase::Held;
            new.depth = 1;
            new.belief = self.config.lease;
        }
        self.send(world, Ask::HandOff(attempt), number);
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
            floor: if let Ask::Acquire(_) | Ask::HandOff(_) = ask {
                world.floors[of]
            } else {
                self.config.oldest_token()
            },
            conclusive: matches!(ask, Ask::Release | Ask::ReleaseBoth)
                && world.holds[number].open == 0,
            copy: false,
            copied: false,
        });
        if let Ask::Acquire(attempt) | Ask::HandOff(attempt) = ask {
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

/// An acquire or a hand-off with a number that no other of this hold carries: answers are matched by
/// attempt.
fn next_attempt(world: &World, number: usize) -> Ask {
    let attempt = next_attempt_of(world, number);
    match world.holds[number].phase {
        Phase::Handing => Ask::HandOff(attempt),
        _ => Ask::Acquire(attempt),
    }
}

fn next_attempt_of(world: &World, number: usize) -> i8 {
    let open = world.holds[number].open;
    let in_use = |attempt: i8| {
        let one = |ask| ask == Ask::Acquire(attempt) || ask == Ask::HandOff(attempt);
        open & (1 << attempt) != 0 || is_under_way(world, number, one)
    };
    let free = (0..ATTEMPTS).find(|attempt| !in_use(*attempt));
    free.expect("so many are never under way")
}

fn is_attempt(ask: Ask) -> bool {
    matches!(ask, Ask::Acquire(_) | Ask::HandOff(_))
}

/// Whether somebody waits for the hand-off of this hold.
fn is_waited_for(world: &World, number: usize) -> bool {
    heir(number).is_some_and(|to| world.holds[to].phase == Phase::Next)
}

/// Nobody waits for it, and it cannot come to be.
fn end_heir(world: &mut World, number: usize) {
    let heir = heir(number).expect("has an heir");
    world.holds[heir].end(Phase::Done);
}

/// Such an operation has no deadline, so its age tells nothing.
pub(super) fn is_done_however_late(ask: Ask) -> bool {
    matches!(ask, Ask::Release | Ask::ReleaseBoth | Ask::Force)
}

/// As many as there is room for: each is a bit of `Hold::open`.
const ATTEMPTS: i8 = 7;
