//! What a run does: made from a seed, and data from then on, so that it can be cut down.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leasehold::testing::Chance;

/// Everything that happens in a run, but for the order of things at one moment, which `seed` decides.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    /// The kind of day it is.
    pub weather: Weather,
    /// How much faster than true time the server's clock goes, in millionths.
    pub server_ppm: i64,
    pub clients: Vec<ClientPlan>,
    pub tasks: Vec<TaskPlan>,
    pub faults: Vec<(Duration, Fault)>,
    pub network: Network,
    /// The names whose locks are fair ones.
    pub fair: BTreeSet<usize>,
    /// How often in a thousand a task is put off, and by how much at most.
    pub put_off: (u32, Duration),
    /// When all faults end.
    pub heals_at: Duration,
    /// The names of read/write locks; the others are plain.
    pub two_sided: BTreeSet<usize>,
}

/// What a run may meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weather {
    /// Delays, dropped futures and panics; no faults.
    Quiet,
    /// Also what S1 has to stand: network, restarts that keep the memory, processes that stand still.
    Rough,
    /// Also what S1 excludes: memory lost, keys taken away, clocks beyond the bound.
    Wild,
}

/// Chances in a thousand; see `leasehold::testing::Faults`.
#[derive(Clone, Debug, Default)]
pub struct Network {
    pub delay: (Duration, Duration),
    pub stray: (u32, Duration),
    pub lost_requests: u32,
    pub lost_replies: u32,
    pub doubled: u32,
    pub resets: u32,
    pub lost_messages: u32,
    pub no_messages: bool,
}

#[derive(Clone, Debug)]
pub struct ClientPlan {
    pub ahead: Duration,
    pub ppm: i64,
    pub lease: Duration,
}

#[derive(Clone, Debug)]
pub struct TaskPlan {
    pub client: usize,
    pub starts: Duration,
    pub steps: Vec<Step>,
}

/// One thing that a task does.
#[derive(Clone, Debug)]
pub enum Step {
    Pause(Duration),
    Hold(Hold),
    /// The operator's way.
    Force(usize),
}

/// Takes a lock, does something, and lets go of it.
#[derive(Clone, Debug)]
pub struct Hold {
    pub name: usize,
    pub side: Side,
    pub way: Way,
    /// A fixed lease; renewed without.
    pub lease: Option<Duration>,
    pub longest: Option<Duration>,
    pub taking: Polling,
    pub inside: Vec<Inside>,
    pub end: End,
    /// Within another: ends a while after it.
    pub outlives: bool,
}

/// On which side of the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Plain,
    Read,
    Write,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Acquire,
    Timeout(Duration),
    Try,
}

/// How a future is polled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    ToTheEnd,
    /// So many times, then dropped.
    Dropped(usize),
    /// So many times, then not for so long, then to the end.
    Stalled(usize, Duration),
    /// So many times, then not for so long, then dropped.
    Abandoned(usize, Duration),
}

#[derive(Clone, Debug)]
pub enum Inside {
    Work(Duration),
    Nest(Box<Hold>),
    Confirm,
    Extend(Duration),
    Write,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Release(Polling),
    Drop,
    Panic,
    /// Goes on writing for so long, if nobody else reads.
    Upgrade(Polling, Duration),
}

/// What is done to the server, the network or a process.
#[derive(Clone, Debug)]
pub enum Fault {
    Pause(Duration),
    Stop {
        down: Duration,
        keep: bool,
    },
    Copy,
    FailOver,
    Disconnect,
    BlackHole,
    Delete(usize),
    DeleteCounter(usize),
    Persist(usize),
    Overwrite(usize, Duration),
    /// Another type of key in its place, for so long.
    Spoil(usize, Duration),
    StepClock(i64),
    Freeze(usize, Duration),
    Kill(usize),
    Close(usize, Duration),
}

impl Fault {
    /// What it is called on the command line, to be switched off by.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Pause(_) => "pause",
            Self::Stop { keep: true, .. } => "restart",
            Self::Stop { keep: false, .. } => "memory-loss",
            Self::Copy | Self::FailOver => "failover",
            Self::Disconnect => "disconnect",
            Self::BlackHole => "black-hole",
            Self::Delete(_) => "delete",
            Self::DeleteCounter(_) => "delete-counter",
            Self::Persist(_) => "persist",
            Self::Overwrite(..) => "overwrite",
            Self::Spoil(..) => "spoil",
            Self::StepClock(_) => "clock-step",
            Self::Freeze(..) => "freeze",
            Self::Kill(_) => "kill",
            Self::Close(..) => "close",
        }
    }
}

/// All kinds of faults.
pub const KINDS: [&str; 22] = [
    "black-hole",
    "clock-step",
    "close",
    "delete",
    "delete-counter",
    "disconnect",
    "doubled",
    "failover",
    "freeze",
    "kill",
    "lost-message",
    "lost-reply",
    "lost-request",
    "memory-loss",
    "overwrite",
    "pause",
    "persist",
    "put-off",
    "reset",
    "restart",
    "spoil",
    "stray",
];

/// The name of a lock.
pub fn name_of(name: usize) -> Arc<str> {
    Arc::from(["job", "order:7", "{tag}x"][name])
}

/// What the seed of a plan is mixed with for its crowd.
const CROWDED: u64 = 0x6372_6f77_6400;

/// What the seed of a plan is mixed with for the sides of its locks. Chosen so that all seeds which the
/// tests and docs/testing.md name have the plans they had before.
const SIDES: u64 = 0x07b8_7369_6465_7300;
/// And for its fair locks.
const FAIR: u64 = 0x0066_6169_7200;

/// How many names there are.
pub const NAMES: usize = 3;

impl Plan {
    /// The plan of a seed, without the kinds of faults in `off`.
    pub fn of(seed: u64, off: &BTreeSet<String>) -> Self {
        let mut chance = Chance::new(seed);
        let weather = match chance.below(10) {
            0..=1 => Weather::Quiet,
            2..=6 => Weather::Rough,
            _ => Weather::Wild,
        };
        let mut maker = Maker {
            chance,
            weather,
            names: 1,
        };
        maker.names = 1 + maker.chance.below(NAMES as u64);
        let mut plan = maker.plan(seed);
        maker.chance = Chance::new(seed ^ CROWDED);
        if maker.chance.happens(100) {
            maker.crowd(&mut plan);
        }
        maker.chance = Chance::new(seed ^ SIDES);
        if maker.chance.happens(300) {
            maker.sides(&mut plan);
        }
        // A chance of its own, so that the other plans are what they were before there were fair locks.
        maker.chance = Chance::new(seed ^ FAIR);
        if maker.chance.happens(200) {
            for name in 0..NAMES {
                if maker.chance.happens(600) && !plan.two_sided.contains(&name) {
                    plan.fair.insert(name);
                }
            }
        }
        plan.faults.retain(|(_, fault)| !off.contains(fault.kind()));
        let network = &mut plan.network;
        for (kind, rate) in [
            ("stray", &mut network.stray.0),
            ("lost-request", &mut network.lost_requests),
            ("lost-reply", &mut network.lost_replies),
            ("doubled", &mut network.doubled),
            ("reset", &mut network.resets),
            ("lost-message", &mut network.lost_messages),
            ("put-off", &mut plan.put_off.0),
        ] {
            if off.contains(kind) {
                *rate = 0;
            }
        }
        plan
    }

    /// The kinds of faults that this plan has.
    pub fn kinds(&self) -> BTreeSet<&'static str> {
        let mut kinds: BTreeSet<_> = self.faults.iter().map(|(_, fault)| fault.kind()).collect();
        let network = &self.network;
        for (kind, rate) in [
            ("stray", network.stray.0),
            ("lost-request", network.lost_requests),
            ("lost-reply", network.lost_replies),
            ("doubled", network.doubled),
            ("reset", network.resets),
            ("lost-message", network.lost_messages),
            ("put-off", self.put_off.0),
        ] {
            if rate > 0 {
                kinds.insert(kind);
            }
        }
        kinds
    }
}

struct Maker {
    chance: Chance,
    weather: Weather,
    names: u64,
}

impl Maker {
    fn plan(&mut self, seed: u64) -> Plan {
        let calm = self.weather == Weather::Quiet;
        let rates_beyond = self.weather == Weather::Wild && self.chance.happens(200);
        let clients: Vec<_> = (0..=self.chance.below(3))
            .map(|_| ClientPlan {
                ahead: self.ms(0, 5000),
                ppm: self.ppm(rates_beyond),
                lease: self.ms(600, 3000),
            })
            .collect();
        let lasts = self.ms(1500, 6000);
        let tasks = (0..2 + self.chance.below(5))
            .map(|_| TaskPlan {
                client: self.index(clients.len()),
                starts: self.ms(0, 1000),
                steps: self.steps(),
            })
            .collect();
        let mut faults = Vec::new();
        if !calm {
            for _ in 0..self.chance.below(5) {
                let at = self.ms(10, millis(lasts));
                let fault = self.fault(clients.len());
                if matches!(fault, Fault::FailOver) {
                    let before = at.saturating_sub(self.ms(1, 400));
                    faults.push((before, Fault::Copy));
                }
                faults.push((at, fault));
            }
            faults.sort_by_key(|(at, _)| *at);
        }
        let slow = self.chance.happens(150);
        let put_off = if calm || self.chance.happens(600) {
            (0, Duration::ZERO)
        } else {
            (self.rate(100), self.ms(1, 15))
        };
        Plan {
            seed,
            weather: self.weather,
            server_ppm: self.ppm(rates_beyond),
            clients,
            tasks,
            faults,
            network: Network {
                delay: if slow {
                    (Duration::from_millis(1), Duration::from_millis(40))
                } else {
                    (Duration::from_micros(50), Duration::from_millis(2))
                },
                stray: if calm {
                    (0, Duration::ZERO)
                } else {
                    (self.rate(40), self.ms(10, 800))
                },
                lost_requests: self.rate_unless(calm, 30),
                lost_replies: self.rate_unless(calm, 40),
                doubled: self.rate_unless(calm, 60),
                resets: self.rate_unless(calm, 40),
                lost_messages: self.rate_unless(calm, 400),
                no_messages: self.chance.happens(100),
            },
            fair: BTreeSet::new(),
            put_off,
            heals_at: lasts,
            two_sided: BTreeSet::new(),
        }
    }

    /// Makes read/write locks of some names. From a chance of its own, as a crowd is.
    fn sides(&mut self, plan: &mut Plan) {
        for name in 0..NAMES {
            if self.chance.happens(700) {
                plan.two_sided.insert(name);
            }
        }
        let reads = [300, 600, 900][self.index(3)];
        let steps = plan.tasks.iter_mut().flat_map(|task| &mut task.steps);
        for step in steps {
            if let Step::Hold(hold) = step
                && plan.two_sided.contains(&hold.name)
            {
                self.side(hold, reads);
            }
        }
        for (_, fault) in &mut plan.faults {
            // What is put in its place there is a plain lock's.
            if let Fault::Overwrite(name, _) = fault
                && plan.two_sided.contains(name)
            {
                *fault = Fault::Delete(*name);
            }
        }
    }

    fn side(&mut self, hold: &mut Hold, reads: u32) {
        hold.side = if self.chance.happens(reads) {
            Side::Read
        } else {
            Side::Write
        };
        if hold.side == Side::Read && self.chance.happens(200) {
            hold.end = End::Upgrade(self.polling(200, 0), self.ms(0, 40));
        }
        let crowded = hold.inside.is_empty();
        if crowded && hold.side == Side::Write && self.chance.happens(200) {
            let within = Hold {
                inside: vec![Inside::Work(self.ms(0, 5)), Inside::Write],
                ..hold.clone()
            };
            hold.inside.push(Inside::Nest(Box::new(within)));
        }
        for inside in &mut hold.inside {
            if let Inside::Nest(within) = inside {
                self.side(within, reads);
                // The outer one is left first, and reading goes on.
                let outlives = within.side == Side::Read && hold.side == Side::Write;
                within.outlives = outlives && self.chance.happens(500);
            }
        }
    }

    /// Many more tasks, which hold a lock for a moment each: lines, chains of hand-offs, full calls. From
    /// a chance of its own, so that all other plans are what they were before there were crowds.
    fn crowd(&mut self, plan: &mut Plan) {
        for _ in 0..6 + self.chance.below(8) {
            let mut steps = Vec::new();
            for _ in 0..4 + self.chance.below(10) {
                let name = self.name();
                let works = self.chance.happens(300);
                steps.push(Step::Hold(Hold {
                    name,
                    side: Side::Plain,
                    way: Way::Acquire,
                    lease: None,
                    longest: None,
                    taking: self.polling(60, 20),
                    inside: if works {
                        vec![Inside::Work(self.ms(0, 12))]
                    } else {
                        Vec::new()
                    },
                    end: if self.chance.happens(500) {
                        End::Release(self.polling(100, 0))
                    } else {
                        End::Drop
                    },
                    outlives: false,
                }));
            }
            plan.tasks.push(TaskPlan {
                client: self.index(plan.clients.len()),
                starts: self.ms(0, 300),
                steps,
            });
        }
        if self.weather == Weather::Wild {
            let fault = Fault::Spoil(self.name(), self.ms(5, 200));
            plan.faults.push((self.ms(50, 600), fault));
            plan.faults.sort_by_key(|(at, _)| *at);
        }
    }

    fn steps(&mut self) -> Vec<Step> {
        let mut steps = Vec::new();
        for _ in 0..2 + self.chance.below(6) {
            if self.chance.happens(400) {
                steps.push(Step::Pause(self.ms(0, 400)));
            }
            if self.weather == Weather::Wild && self.chance.happens(30) {
                steps.push(Step::Force(self.name()));
                continue;
            }
            let name = self.name();
            steps.push(Step::Hold(self.hold(name, 0)));
        }
        steps
    }

    fn hold(&mut self, name: usize, depth: usize) -> Hold {
        let way = match self.chance.below(10) {
            0..=5 => Way::Acquire,
            6..=8 => Way::Timeout(self.ms(0, 1500)),
            _ => Way::Try,
        };
        // Fixed leases on one of the names, so that the others' waiters want the same.
        let fixed = name == 2 && self.chance.happens(400);
        let lease = fixed.then(|| self.ms(200, 1500));
        let longest = (name == 2 && self.chance.happens(100)).then(|| self.ms(200, 1500));
        let mut inside = Vec::new();
        for _ in 0..self.chance.below(4) {
            inside.push(match self.chance.below(10) {
                0..=3 => Inside::Work(self.ms(0, 60)),
                4 => Inside::Work(self.ms(100, 2500)),
                5 => Inside::Confirm,
                6 if name == 2 => Inside::Extend(self.ms(200, 2000)),
                7 | 8 if depth < 2 => Inside::Nest(Box::new(self.hold(name, depth + 1))),
                _ => Inside::Write,
            });
        }
        Hold {
            name,
            side: Side::Plain,
            way,
            lease,
            longest,
            taking: self.polling(150, 60),
            inside,
            end: match self.chance.below(10) {
                0..=5 => End::Release(self.polling(200, 0)),
                6..=8 => End::Drop,
                _ => End::Panic,
            },
            outlives: false,
        }
    }

    fn polling(&mut self, dropped: u32, stalled: u32) -> Polling {
        let polls = usize::try_from(self.chance.below(8)).unwrap();
        if self.chance.happens(dropped) {
            Polling::Dropped(polls)
        } else if self.weather != Weather::Quiet && self.chance.happens(stalled) {
            if self.chance.happens(500) {
                Polling::Abandoned(polls, self.ms(0, 1500))
            } else {
                Polling::Stalled(polls, self.ms(50, 4000))
            }
        } else {
            Polling::ToTheEnd
        }
    }

    fn fault(&mut self, clients: usize) -> Fault {
        let client = self.index(clients);
        let rough = self.weather == Weather::Rough;
        match self.chance.below(if rough { 10 } else { 18 }) {
            0 | 1 => Fault::Pause(self.ms(10, 2000)),
            2 => Fault::Stop {
                down: self.ms(5, 2000),
                keep: true,
            },
            3 => Fault::Disconnect,
            4 => Fault::BlackHole,
            5 | 6 => Fault::Freeze(client, self.ms(20, 4000)),
            7 => Fault::Kill(client),
            8 => Fault::Close(client, self.ms(0, 2000)),
            9 => Fault::StepClock(-i64::try_from(self.ms(1, 3000).as_micros()).unwrap()),
            10 | 11 => Fault::Delete(self.name()),
            12 => Fault::DeleteCounter(self.name()),
            13 => Fault::Persist(self.name()),
            14 => Fault::Overwrite(self.name(), self.ms(50, 1000)),
            15 => Fault::StepClock(i64::try_from(self.ms(1, 3000).as_micros()).unwrap()),
            16 => Fault::FailOver,
            _ => Fault::Stop {
                down: self.ms(5, 1000),
                keep: false,
            },
        }
    }

    fn name(&mut self) -> usize {
        usize::try_from(self.chance.below(self.names)).unwrap()
    }

    fn index(&mut self, of: usize) -> usize {
        usize::try_from(self.chance.below(of as u64)).unwrap()
    }

    /// Within the bound of the promise, or beyond it.
    fn ppm(&mut self, beyond: bool) -> i64 {
        let most = if beyond { 60_000 } else { 2_400 };
        i64::try_from(self.chance.below(2 * most + 1)).unwrap() - i64::try_from(most).unwrap()
    }

    fn ms(&mut self, least: u64, most: u64) -> Duration {
        Duration::from_millis(least + self.chance.below(most.max(least) - least + 1))
    }

    /// None in half of the runs, else up to `most` in a thousand.
    fn rate(&mut self, most: u32) -> u32 {
        if self.chance.happens(500) {
            return 0;
        }
        1 + u32::try_from(self.chance.below(u64::from(most))).unwrap()
    }

    fn rate_unless(&mut self, calm: bool, most: u32) -> u32 {
        if calm { 0 } else { self.rate(most) }
    }
}

fn millis(length: Duration) -> u64 {
    u64::try_from(length.as_millis()).unwrap()
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "seed {}, {:?}, {} clients, heals at {:?}",
            self.seed,
            self.weather,
            self.clients.len(),
            self.heals_at
        )?;
        if !self.two_sided.is_empty() {
            let names = self.two_sided.iter().map(|name| name_of(*name));
            writeln!(f, "read/write locks: {:?}", names.collect::<Vec<_>>())?;
        }
        writeln!(f, "server's clock: {} ppm", self.server_ppm)?;
        writeln!(f, "fair: {:?}", self.fair)?;
        for (index, client) in self.clients.iter().enumerate() {
            writeln!(f, "client {index}: {client:?}")?;
        }
        for (index, task) in self.tasks.iter().enumerate() {
            let TaskPlan {
                client,
                starts,
                steps,
            } = task;
            writeln!(f, "task {index} of client {client}, from {starts:?}:")?;
            for step in steps {
                writeln!(f, "    {step:?}")?;
            }
        }
        for (at, fault) in &self.faults {
            writeln!(f, "at {at:?}: {fault:?}")?;
        }
        writeln!(f, "{:?}, put off {:?}", self.network, self.put_off)
    }
}
