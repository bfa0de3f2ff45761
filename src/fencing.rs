//! Fencing tokens, and what a store checks them with.

use std::fmt;
use std::num::IntErrorKind;
use std::str::FromStr;

/// A number that grows with each hold of a name, to be checked by what the lock protects.
///
/// A store that refuses a write with a token smaller than the greatest it has seen is safe even
/// against a holder that was paused past its lease. See [Kleppmann, "How to do distributed
/// locking"](https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html).
///
/// Tokens are below 2^53, so they fit a double and a signed 64-bit column. They are not consecutive. Only those of one
/// name compare: one store, one lock.
///
/// # To a store and back
///
/// | to | as | back |
/// |---|---|---|
/// | SQL: `BIGINT NOT NULL DEFAULT 0` | `i64::from(token)` | `FencingToken::try_from(column)` |
/// | Redis, a header, a file: decimal digits | `token.to_string()` | `text.parse::<FencingToken>()` |
/// | this process: [`Fence`] | itself | [`Fence::greatest`] |
///
/// What is read back may be zero: "nothing was written under the lock so far", less than the token of any hold.
///
/// ```
/// use leasehold::FencingToken;
///
/// let token: FencingToken = "1764500000000000".parse()?;
/// assert_eq!(token.to_string(), "1764500000000000");
/// assert_eq!(FencingToken::try_from(i64::from(token))?, token);
/// assert!("-1".parse::<FencingToken>().is_err());
/// # Ok::<(), leasehold::NotAToken>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(u64);

/// No token is as great.
const LIMIT: u64 = 1 << 53;

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
    /// Decimal digits, nothing else: fit for a header, a script's argument, a file.
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

impl TryFrom<u64> for FencingToken {
    type Error = NotAToken;

    /// # Errors
    ///
    /// 2^53 and more.
    fn try_from(value: u64) -> Result<Self, NotAToken> {
        if value < LIMIT {
            Ok(Self(value))
        } else {
            Err(NotAToken::TOO_GREAT)
        }
    }
}

impl TryFrom<i64> for FencingToken {
    type Error = NotAToken;

    /// From a SQL column.
    ///
    /// # Errors
    ///
    /// Less than zero; 2^53 and more.
    fn try_from(value: i64) -> Result<Self, NotAToken> {
        u64::try_from(value)
            .map_err(|_| NotAToken::NEGATIVE)?
            .try_into()
    }
}

impl FromStr for FencingToken {
    type Err = NotAToken;

    /// From what `Display` writes.
    ///
    /// # Errors
    ///
    /// Anything but decimal digits (no sign, no space), and 2^53 and more.
    fn from_str(text: &str) -> Result<Self, NotAToken> {
        if !text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(NotAToken::NOT_DIGITS);
        }
        let value: u64 = text.parse().map_err(|error: std::num::ParseIntError| {
            if matches!(error.kind(), IntErrorKind::PosOverflow) {
                NotAToken::TOO_GREAT
            } else {
                NotAToken::NOT_DIGITS
            }
        })?;
        value.try_into()
    }
}

/// What was read is no fencing token; the message says what is wrong with it.
///
/// Do not take it for a small one and do not write: the column, key or header is in other use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a fencing token: {problem}")]
pub struct NotAToken {
    problem: &'static str,
}

impl NotAToken {
    const TOO_GREAT: Self = Self {
        problem: "2^53 or more",
    };
    const NEGATIVE: Self = Self {
        problem: "less than zero",
    };
    const NOT_DIGITS: Self = Self {
        problem: "not decimal digits",
    };
}

/// The greatest token seen, for data in this process: admits a write or refuses it.
///
/// Keep it with the data, behind the same lock: then check and write are one step. That is why
/// [`admit`](Self::admit) wants `&mut`. A check that is one step and a write that is another let a late
/// writer in between.
///
/// Data outside of this process need the check where they are: in the SQL statement, in the Redis script, in the
/// handler of the request. See [guarantees](crate::manual::guarantees#s2-fencing), which has all three.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::{Fence, FencingToken, LockClient, Stale};
///
/// #[derive(Default)]
/// struct Order { state: String, fence: Fence }
///
/// impl Order {
///     fn write(&mut self, state: &str, token: FencingToken) -> Result<(), Stale> {
///         self.fence.admit(token)?;
///         self.state = state.into();
///         Ok(())
///     }
/// }
///
/// let mut order = Order::default();
/// let client = LockClient::in_memory();
/// let first = client.lock("order:10").acquire().await?;
/// let old = first.fencing_token()?;
/// drop(first);
/// let second = client.lock("order:10").acquire().await?;
/// order.write("charged", second.fencing_token()?).unwrap();
/// assert!(order.write("cancelled", old).is_err());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fence {
    greatest: Option<FencingToken>,
}

impl Fence {
    /// A fence that has seen no token: it admits the first one, whichever that is.
    pub fn new() -> Self {
        Self::default()
    }

    /// Notes `token`, unless a greater one was noted before. The same one is admitted again: a hold writes as
    /// often as it likes.
    ///
    /// # Errors
    ///
    /// [`Stale`]: a later hold of the lock was here already. Nothing changes; do not write, and do not go on.
    pub fn admit(&mut self, token: FencingToken) -> Result<(), Stale> {
        match self.greatest {
            Some(greatest) if token < greatest => Err(Stale { token, greatest }),
            _ => {
                self.greatest = Some(token);
                Ok(())
            }
        }
    }

    /// The greatest token admitted so far; `None` if none was.
    pub fn greatest(&self) -> Option<FencingToken> {
        self.greatest
    }
}

impl From<FencingToken> for Fence {
    /// A fence that goes on from a token that was kept somewhere.
    fn from(greatest: FencingToken) -> Self {
        Self {
            greatest: Some(greatest),
        }
    }
}

/// A write came under a token that is not the greatest any more: its writer has lost the lock, and a later
/// holder has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the lock was lost: fencing token {token} is less than {greatest}, which was here before")]
#[non_exhaustive]
pub struct Stale {
    /// The late writer's.
    pub token: FencingToken,
    /// The greatest one seen.
    pub greatest: FencingToken,
}
