//! Chance from a seed.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::store::clock::micros;

/// `SplitMix64`: small, fast, and the same everywhere.
#[derive(Clone, Debug)]
pub struct Chance(u64);

impl Chance {
    /// The sequence of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// A number below `end`; 0 if that is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.bits() % end.max(1)
    }

    /// True so many times in a thousand.
    pub fn happens(&mut self, in_a_thousand: u32) -> bool {
        in_a_thousand > 0 && self.below(1000) < u64::from(in_a_thousand)
    }

    /// A length of time, in whole microseconds.
    pub fn within(&mut self, range: &RangeInclusive<Duration>) -> Duration {
        let least = micros(*range.start());
        let more = micros(*range.end()).saturating_sub(least);
        Duration::from_micros(least + self.below(more + 1))
    }

    /// One of `all`.
    ///
    /// # Panics
    ///
    /// If there are none.
    pub fn one_of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[usize::try_from(self.below(all.len() as u64)).unwrap_or(0)]
    }
}
