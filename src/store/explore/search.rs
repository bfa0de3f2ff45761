//! The search: every world that can be reached, those in few steps first.

use std::fmt::{self, Write as _};
use std::hash::{BuildHasher as _, BuildHasherDefault, Hasher};

use super::model::Model;
use super::rules::{Config, Property};
use super::steps::{STEPS, Step};
use super::world::World;

/// What a search came to.
#[derive(PartialEq, Eq)]
pub(super) enum Verdict {
    /// Every world was seen, and nothing found.
    SearchedAll { states: usize },
    /// The limit was reached, and nothing found.
    Cut { states: usize },
    /// A property does not hold; the shortest way there.
    Broken {
        property: Property,
        states: usize,
        trace: Vec<String>,
    },
}

/// Searches breadth first, so that the first violation found is one of the shortest.
pub(super) fn search(config: &Config, limit: usize) -> Verdict {
    let mut model = Model::new(config);
    let mut seen = Seen::default();
    seen.insert(model.start(), 0);
    let steps = STEPS.into_iter().filter(|step| step.is_within(config));
    let steps: Vec<_> = steps.collect();
    let mut at = 0;
    while at < seen.len() {
        let world = seen.world(at);
        for &step in &steps {
            let Some((next, broken)) = model.step(&world, step) else {
                continue;
            };
            if let Some(property) = broken {
                return Verdict::Broken {
                    property,
                    states: seen.len(),
                    trace: trace(&mut model, &seen, at, step),
                };
            }
            seen.insert(next, at);
        }
        if seen.len() >= limit {
            return Verdict::Cut { states: seen.len() };
        }
        at += 1;
    }
    Verdict::SearchedAll { states: seen.len() }
}

/// The steps to `last`, and that one more, a line for each.
fn trace(model: &mut Model, seen: &Seen, last: usize, more: Step) -> Vec<String> {
    let mut way = vec![last];
    while let Some(&at) = way.last().filter(|at| **at > 0) {
        way.push(seen.parent(at));
    }
    way.reverse();
    let mut ticks = 0;
    let mut lines = Vec::new();
    let mut tell = |before: &World, step: Step, after: &World| {
        ticks += i32::from(matches!(step, Step::Tick | Step::LoseMemory));
        let what = step.describe(before);
        let mut line = String::new();
        let _ = write!(line, "t{ticks:<2} {what:<42} | {after}");
        lines.push(line);
    };
    for pair in way.windows(2) {
        let (before, after) = (seen.world(pair[0]), seen.world(pair[1]));
        let step = STEPS
            .into_iter()
            .find(|step| {
                model
                    .step(&before, *step)
                    .is_some_and(|(next, _)| next == after)
            })
            .expect("a world follows from its parent");
        tell(&before, step, &after);
    }
    let before = seen.world(last);
    let (after, _) = model.step(&before, more).expect("it was possible before");
    tell(&before, more, &after);
    lines
}

/// The worlds seen so far, in order, and from which each was reached first.
#[derive(Default)]
struct Seen {
    worlds: Vec<(World, u32)>,
    /// Open addressing: one more than the number of a world, or 0.
    slots: Vec<u32>,
}

impl Seen {
    fn len(&self) -> usize {
        self.worlds.len()
    }

    fn world(&self, at: usize) -> World {
        self.worlds[at].0
    }

    fn parent(&self, at: usize) -> usize {
        usize::try_from(self.worlds[at].1).unwrap()
    }

    fn insert(&mut self, world: World, parent: usize) {
        if self.worlds.len() * 2 >= self.slots.len() {
            self.grow();
        }
        let slot = self.slot(&world);
        if self.slots[slot] == 0 {
            self.worlds.push((world, u32::try_from(parent).unwrap()));
            self.slots[slot] = u32::try_from(self.worlds.len()).unwrap();
        }
    }

    /// Where `world` is, or belongs.
    fn slot(&self, world: &World) -> usize {
        let mask = self.slots.len() - 1;
        let hash = BuildHasherDefault::<QuickHasher>::default().hash_one(world);
        let mut slot = usize::try_from(hash >> 32).unwrap() & mask;
        loop {
            match self.slots[slot] {
                0 => return slot,
                number if self.world(usize::try_from(number - 1).unwrap()) == *world => {
                    return slot;
                }
                _ => slot = (slot + 1) & mask,
            }
        }
    }

    fn grow(&mut self) {
        let size = (self.slots.len() * 4).max(1 << 12);
        self.slots = vec![0; size];
        for at in 0..self.worlds.len() {
            let slot = self.slot(&self.world(at));
            self.slots[slot] = u32::try_from(at + 1).unwrap();
        }
    }
}

/// Quick where nothing is optimized; nobody chooses our keys to spoil it.
#[derive(Default)]
pub(super) struct QuickHasher(u64);

impl QuickHasher {
    fn add(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(5) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Hasher for QuickHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.add(u64::from(*byte));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.add(u64::from(value));
    }

    fn write_i8(&mut self, value: i8) {
        self.add(u64::from(value.cast_unsigned()));
    }

    fn write_usize(&mut self, value: usize) {
        self.add(u64::try_from(value).unwrap());
    }

    fn write_isize(&mut self, value: isize) {
        self.write_usize(value.cast_unsigned());
    }
}

impl fmt::Debug for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SearchedAll { states } => write!(f, "nothing in all {states} states"),
            Self::Cut { states } => write!(f, "nothing in the first {states} states"),
            Self::Broken {
                property,
                states,
                trace,
            } => {
                writeln!(f, "{property:?} is broken, found after {states} states:")?;
                for line in trace {
                    writeln!(f, "  {line}")?;
                }
                Ok(())
            }
        }
    }
}
