//! Time goes by, and takes with it what cannot matter any more.

use super::client::is_done_however_late;
use super::model::{DEADLINE, Model};
use super::rules::Rule;
use super::server::PER_TICK;
use super::world::{Ask, HOLDS, Phase, Token, Told, World, heir};

impl Model {
    pub(super) fn tick(&self, world: &mut World) {
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
    pub(super) fn shift_server_clock(&self, world: &mut World, by: i8) {
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
    pub(super) fn forget_what_cannot_matter(&self, world: &mut World) {
        let holds = world.holds;
        let server = world.server;
        let mut acquiring = [false; HOLDS];
        world.requests.update(|request| {
            acquiring[request.hold] |= matches!(request.ask, Ask::Acquire(_));
            if let (Ask::HandOff(_), Some(heir)) = (request.ask, heir(request.hold)) {
                acquiring[heir] = true;
            }
            true
        });
        let latest = self.config.latest();
        let is_over =
            |hold: usize| holds[hold].is_unwanted() && !server.has(hold) && !acquiring[hold];
        let are_over = |hold: usize| is_over(hold) && heir(hold).is_none_or(is_over);
        world.requests.update(|request| {
            let phase = holds[request.hold].phase;
            let late = request.left <= latest && self.idle.is_when_late(request);
            let over = is_over(request.hold) && self.idle.is_without_its_hold(request);
            match request.ask {
                Ask::Acquire(_) => !late || phase == Phase::Waiting,
                Ask::Nest(_) | Ask::Leave | Ask::Renew(_) => !late && !over,
                Ask::Release => !over || phase != Phase::Done,
                Ask::HandOff(_) => (!late && !over) || phase == Phase::Handing,
                Ask::ReleaseBoth => {
                    let both = are_over(request.hold) && self.idle.is_without_its_hold(request);
                    !both || phase != Phase::Done
                }
                Ask::Force => true,
            }
        });
        world.replies.update(|reply| {
            let hold = holds[reply.hold];
            match (reply.ask, hold.phase) {
                (Ask::Acquire(_), Phase::Ending | Phase::Lost) => hold.open > 0,
                (Ask::Nest(asked), Phase::Held) => asked == hold.nesting,
                (Ask::Acquire(_), Phase::Waiting | Phase::Held)
                | (Ask::Leave | Ask::Renew(_), Phase::Held)
                | (Ask::Release, Phase::Ending | Phase::EndingBoth)
                | (Ask::HandOff(_), Phase::Handing)
                | (Ask::ReleaseBoth, Phase::EndingBoth) => true,
                _ => false,
            }
        });
    }
}
