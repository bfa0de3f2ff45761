//! Fencing tokens.

use std::fmt;

/// A number that grows with each hold of a name, to be checked by what the lock protects.
///
/// A store that refuses a write with a token smaller than the greatest it has seen is safe even
/// against a holder that was paused past its lease. See [Kleppmann, "How to do distributed
/// locking"](https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html).
///
/// Tokens are below 2^53, so they fit a double and a signed 64-bit column. They are not consecutive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(u64);

impl FencingToken {
    pub(crate) fn new(value: u64) -> Self {
        Self(value)
    }

    /// The number.
    pub fn value(self) -> u64 {
        self.0
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<FencingToken> for u64 {
    fn from(token: FencingToken) -> Self {
        token.0
    }
}

impl From<FencingToken> for i64 {
    /// For SQL columns. Lossless: tokens are below 2^53.
    fn from(token: FencingToken) -> Self {
        Self::try_from(token.0).unwrap_or(Self::MAX)
    }
}
