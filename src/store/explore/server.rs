//! The server of the search: the crate's own `apply`, asked once for each different question.
//!
//! A rule that is taken away is taken away here, around `apply`, which stays as it is.

use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasherDefault;
use std::sync::Arc;

use uuid::Uuid;

use super::client::is_done_however_late;
use super::rules::{Config, Rule};
use super::search::QuickHasher;
use super::world::{Ask, Entry, Server, Token, Told, heir};
use crate::kind::Kind;
use crate::store::memory::{State, Value, apply};
use crate::store::{Answer, Op, OwnerId, TokenRule, Verb};

/// A request as it meets the server.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Question {
    pub(super) server: Server,
    pub(super) ask: Ask,
    pub(super) hold: usize,
    pub(super) late: bool,
    pub(super) floor: Token,
}

/// What the server makes of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Outcome {
    pub(super) server: Server,
    /// `Yes` with what is left of the lease.
    pub(super) told: Told,
    pub(super) token: Token,
    /// The lock was taken by this.
    pub(super) created: bool,
}

/// Answers questions, and remembers the answers: `apply` is a function of them alone.
pub(super) struct Table {
    pub(super) config: Config,
    name: Arc<str>,
    known: HashMap<Question, Outcome, BuildHasherDefault<QuickHasher>>,
}

impl Table {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            config: config.clone(),
            name: Arc::from("name"),
            known: HashMap::default(),
        }
    }

    pub(super) fn ask(&mut self, question: &Question) -> Outcome {
        if let Some(outcome) = self.known.get(question) {
            return *outcome;
        }
        let outcome = self.find_out(question);
        if is_done_however_late(question.ask) {
            let late = self.find_out(&Question {
                late: true,
                ..*question
            });
            assert_eq!(late, outcome, "done however late");
        }
        self.known.insert(*question, outcome);
        outcome
    }

    fn find_out(&self, question: &Question) -> Outcome {
        let before = question.server;
        let mut state = self.state(before);
        let answer = self.do_altered(&mut state, question);
        let mut server = self.read_back(&mut state, question);
        let holder = |server: &Server| server.entry.map(|entry| entry.hold);
        let moved = matches!(question.ask, Ask::HandOff(_)) && holder(&before) != holder(&server);
        let created = server.entry.is_some() && (before.entry.is_none() || moved);
        if !self.config.has(Rule::HandOffMakesToken) && matches!(question.ask, Ask::HandOff(_)) {
            server.last = before.last;
        }
        if !self.config.has(Rule::TokenFollowsClock) {
            server.last = match before.last {
                last if !created => last,
                last => Some(last.unwrap_or(0) + 1),
            };
        }
        if !self.config.tokens {
            server.last = None;
        }
        let (told, token) = match answer {
            Answer::Granted { remaining_ms, .. } => (Told::Yes(ticks(remaining_ms)), server.last),
            Answer::Held { remaining_ms }
            | Answer::StillHeld { remaining_ms }
            | Answer::Renewed { remaining_ms } => (Told::Yes(ticks(remaining_ms)), None),
            Answer::Released { .. } | Answer::Removed => (Told::Yes(0), None),
            Answer::Taken { .. } => (Told::Taken, None),
            Answer::Gone(_) | Answer::Nothing => (Told::Gone, None),
            Answer::Late => (Told::Late, None),
            Answer::Queued { .. } | Answer::Remembered { .. } => panic!("nobody here queues"),
            Answer::Refused(refusal) => panic!("nothing here is to be refused: {refusal:?}"),
        };
        Outcome {
            server,
            told,
            token: token.unwrap_or(0),
            created,
        }
    }

    fn state(&self, server: Server) -> State {
        let mut state = State::default();
        if let Some(entry) = server.entry {
            let field = self.owner(entry.hold).to_string();
            let mut fields = BTreeMap::from([(field, entry.count.to_string())]);
            if let Some(heir) = heir(entry.hold).filter(|_| entry.half) {
                fields.insert(self.owner(heir).to_string(), "1".to_owned());
            }
            let expires_ms = NOW_US / 1000 + lease_ms(entry.left);
            state.put(&self.name, Value::Hash(fields), Some(expires_ms));
        }
        if let Some(last) = server.last {
            state.put_counter(&self.name, token_us(last).to_string(), None);
        }
        state
    }

    fn read_back(&self, state: &mut State, question: &Question) -> Server {
        let entry = state.key(&self.name, NOW_US).map(|key| {
            let Value::Hash(fields) = &key.value else {
                panic!("the key is a hash");
            };
            // Who had it before, or else who asked, or the heir of either.
            let maker = question.server.entry.map(|entry| entry.hold);
            let askers = [maker, Some(question.hold)].into_iter().flatten();
            let heirs = askers.clone().filter_map(heir);
            let count_of = |hold: usize| fields.get(&self.owner(hold).to_string());
            let hold = askers.chain(heirs).find(|hold| count_of(*hold).is_some());
            let hold = hold.expect("the owner is one of those");
            let half = fields.len() == 2 && heir(hold).is_some_and(|to| count_of(to).is_some());
            assert!(half || fields.len() == 1, "a lock has one owner");
            Entry {
                hold,
                count: count_of(hold).unwrap().parse().unwrap(),
                left: ticks(key.expires_ms.unwrap() - NOW_US / 1000),
                half,
            }
        });
        let last = state
            .counter(&self.name, NOW_US)
            .map(|counter| token_of(counter.text.parse().unwrap()));
        Server { entry, last }
    }

    /// `apply`, unless a rule of the server is taken away.
    fn do_altered(&self, state: &mut State, question: &Question) -> Answer {
        let Question { ask, late, .. } = *question;
        let count = question
            .server
            .entry
            .filter(|entry| self.owner(entry.hold) == self.owner(question.hold))
            .map_or(0, |entry| entry.count);

        if !self.config.has(Rule::CountsAreSet) {
            return self.do_counting(state, question, count);
        }
        if !self.config.has(Rule::CountsAreNotTested) {
            let expected = match ask {
                Ask::Release => count <= 1,
                Ask::Nest(_) | Ask::Leave => (1..=2).contains(&count),
                _ => true,
            };
            if !expected {
                return Answer::Nothing;
            }
        }
        match ask {
            Ask::Acquire(_) if !self.config.has(Rule::AcquireDeadline) => {
                self.run(state, self.verb(question, ask), false)
            }
            Ask::Renew(_) if !self.config.has(Rule::RenewDeadline) => {
                self.run(state, self.verb(question, ask), false)
            }
            Ask::Renew(_)
                if !self.config.has(Rule::RenewCreatesNothing)
                    && question.server.entry.is_none() =>
            {
                self.run(state, self.verb(question, Ask::Acquire(0)), late)
            }
            Ask::HandOff(_) if !self.config.has(Rule::HandOffDeadline) => {
                self.run(state, self.verb(question, ask), false)
            }
            Ask::HandOff(_)
                if !self.config.has(Rule::HandOffCreatesNothing)
                    && question.server.entry.is_none() =>
            {
                let to = heir(question.hold).expect("has an heir");
                let taken = Question {
                    hold: to,
                    ..*question
                };
                self.run(state, self.verb(&taken, Ask::Acquire(0)), late)
            }
            Ask::HandOff(_)
                if !self.config.has(Rule::HandOffFromItsOwn)
                    && !question.server.has(question.hold)
                    && !heir(question.hold).is_some_and(|to| question.server.has(to)) =>
            {
                let Server { entry, last } = question.server;
                let entry = entry.map(|entry| Entry {
                    hold: question.hold,
                    half: false,
                    ..entry
                });
                *state = self.state(Server { entry, last });
                self.run(state, self.verb(question, ask), late)
            }
            _ => self.run(state, self.verb(question, ask), late),
        }
    }

    /// Counts go up and down by one instead of being set.
    fn do_counting(&self, state: &mut State, question: &Question, count: i8) -> Answer {
        let Question {
            ask, hold, late, ..
        } = *question;
        let owner = self.owner(hold);
        let count = u32::try_from(count).unwrap();
        let verb = match self.verb(question, ask) {
            Verb::Acquire {
                lease_ms, token, ..
            } if count > 0 => Verb::Acquire {
                owner,
                count: count + 1,
                lease_ms,
                token,
            },
            Verb::Release { .. } => Verb::Release {
                owner,
                count: count.saturating_sub(1),
                also: None,
            },
            verb => verb,
        };
        self.run(state, verb, late && !is_done_however_late(ask))
    }

    fn run(&self, state: &mut State, verb: Verb, late: bool) -> Answer {
        let op = Op {
            kind: Kind::Plain,
            name: Arc::clone(&self.name),
            verb,
        };
        apply(state, NOW_US, NOW_US - u64::from(late), &op).0
    }

    fn verb(&self, question: &Question, ask: Ask) -> Verb {
        let owner = self.owner(question.hold);
        let lease_ms = lease_ms(self.config.lease);
        let token = TokenRule {
            floor: self.floor_us(question.floor),
            retention_ms: None,
            reserve: 0,
        };
        let acquire = |count| Verb::Acquire {
            owner,
            count,
            lease_ms,
            token,
        };
        let release = |count| Verb::Release {
            owner,
            count,
            also: None,
        };
        match ask {
            Ask::Acquire(_) => acquire(1),
            Ask::Nest(_) => acquire(2),
            Ask::Leave => release(1),
            Ask::Release => release(0),
            Ask::Renew(count) => Verb::Renew {
                owner,
                count: u32::try_from(count).unwrap(),
                lease_ms,
            },
            Ask::Force => Verb::ForceRelease {
                owner: owner.to_string(),
            },
            Ask::HandOff(_) => Verb::HandOff {
                from: owner,
                to: self.owner(heir(question.hold).expect("has an heir")),
                lease_ms,
                token,
            },
            Ask::ReleaseBoth => Verb::Release {
                owner,
                count: 0,
                also: heir(question.hold).map(|to| self.owner(to)),
            },
        }
    }

    /// A hold's own, or else the context's: holds 0 and 1 are of one.
    fn owner(&self, hold: usize) -> OwnerId {
        let number = if self.config.has(Rule::OwnerPerHold) {
            hold
        } else {
            super::world::process(hold)
        };
        OwnerId {
            client: Uuid::nil(),
            hold: u64::try_from(number).unwrap(),
        }
    }

    fn floor_us(&self, floor: Token) -> u64 {
        if floor <= self.config.oldest_token() {
            0
        } else {
            token_us(floor)
        }
    }
}

/// A lease of so many ticks ends a millisecond early, because the server keeps it to the end of its
/// last millisecond.
fn lease_ms(ticks: i8) -> u64 {
    u64::try_from(ticks).unwrap() * TICK_MS - 1
}

fn ticks(left_ms: u64) -> i8 {
    i8::try_from((left_ms + 1) / TICK_MS).unwrap()
}

fn token_us(token: Token) -> u64 {
    let ticks = i64::from(token.div_euclid(PER_TICK));
    let rest = u64::try_from(token.rem_euclid(PER_TICK)).unwrap();
    NOW_US
        .checked_add_signed(ticks * i64::try_from(TICK_MS * 1000).unwrap())
        .unwrap()
        + rest
}

fn token_of(us: u64) -> Token {
    let from_now = i64::try_from(us).unwrap() - i64::try_from(NOW_US).unwrap();
    let tick_us = i64::try_from(TICK_MS * 1000).unwrap();
    let rest = from_now.rem_euclid(tick_us);
    assert!(rest < i64::from(PER_TICK), "too many tokens in one tick");
    i8::try_from(from_now.div_euclid(tick_us) * i64::from(PER_TICK) + rest).unwrap()
}

pub(super) const TICK_MS: u64 = 1000;

/// Tokens that one tick has room for.
pub(super) const PER_TICK: Token = 8;

const NOW_US: u64 = 1_700_000_000_000_000;
