//! Every default, with its reason, and the ranges that settings must keep.

use std::time::Duration;

use crate::error::Error;
use crate::key::KeyScheme;

/// Lease of a hold that is renewed: Redisson's `lockWatchdogTimeout`. Long enough for two missed
/// renewals, short enough for people to wait out after a crash.
pub(crate) const DEFAULT_LEASE: Duration = Duration::from_secs(30);

/// Shortest lease. Below it the timeouts derived from a lease are shorter than a busy machine's
/// hiccups.
pub(crate) const MIN_LEASE: Duration = Duration::from_millis(100);

/// Longest lease, one year: anything longer is a mistake in the unit.
pub(crate) const MAX_LEASE: Duration = Duration::from_hours(365 * 24);

/// Longest time to wait for the answer to one request; see [`command_timeout_for`].
pub(crate) const DEFAULT_COMMAND_TIMEOUT: Duration = Duration::from_secs(1);

/// How long one attempt to connect may take.
pub(crate) const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_millis(500);

/// How long a token counter outlives its last use: long enough for a short step back of the server's
/// clock, which is all it is needed for.
pub(crate) const DEFAULT_TOKEN_RETENTION: Duration = Duration::from_hours(1);

/// Longest sleep of a waiter that trusts in messages; bounds what a lost message can cost.
pub(crate) const WAKE_CAP: Duration = Duration::from_secs(2);

/// First and longest sleep of a waiter that has no messages to trust in.
pub(crate) const POLL_FIRST: Duration = Duration::from_millis(10);
pub(crate) const POLL_CAP: Duration = Duration::from_millis(250);

/// How many times, and for how long, a lock goes from one waiter of a client to the next before those of
/// other clients get their chance. The number grows fourfold, up to the other one, each time nobody else heard
/// that the lock was free.
pub(crate) const CHAIN_LENGTH: u32 = 256;
pub(crate) const CHAIN_LENGTH_ALONE: u32 = 1 << 14;
pub(crate) const CHAIN_TIME: Duration = Duration::from_millis(100);

/// Holds that last longer are handed on by the server each time: a request is not what they wait for.
pub(crate) const RUSH: Duration = Duration::from_millis(1);

/// How often a hold is passed on within its client between two words to the server, at most. Tokens, which
/// count these, do not run ahead of the server's clock: a turn takes longer than a token's microsecond.
pub(crate) const MOST_PASSES: u64 = 63;

/// How long the waiters of a client stand back at most once others were told that the lock is free.
pub(crate) const STAND_BACK: Duration = Duration::from_millis(5);

/// How long a granted lock waits for its waiter to be polled before the next one gets it.
pub(crate) const OFFER_WINDOW: Duration = Duration::from_millis(100);

/// How often a waiter for a fair lock says that it is there; as long as a lost message can cost.
pub(crate) const BEAT_EVERY: Duration = Duration::from_secs(2);

/// How long it counts as alive after that, so that two can be lost; what a crashed one costs who is
/// behind it.
pub(crate) const BEAT_LASTS: Duration = Duration::from_secs(6);

/// How long Redisson's clients take one who is first in the queue for alive: their
/// `fairLockWaitTimeout`.
pub(crate) const FAIR_WAIT: Duration = Duration::from_mins(5);

/// Acquisitions posted and not answered, at most; more callers wait for their turn.
pub(crate) const MAX_OUTSTANDING: usize = 4096;

/// How releases are heard of by those who wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PubSub {
    /// What Redisson would use with the same topology: plain on one server and with Sentinel.
    #[default]
    Auto,
    /// `PUBLISH` and `SUBSCRIBE`.
    Plain,
    /// `SPUBLISH` and `SSUBSCRIBE` (Redis 7 and newer).
    Sharded,
    /// Publishes both ways, listens plainly: for a fleet in which others listen either way.
    Both,
    /// No messages, neither heard nor sent: waiters of this client poll, and those of others hear nothing of its
    /// releases, so they get fewer turns than it has.
    Off,
}

/// Settings of one client, complete and valid.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) lease: Duration,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) label: Option<String>,
    /// The server as it was named, without credentials; `None` for one in this process.
    pub(crate) server: Option<String>,
    pub(crate) scheme: KeyScheme,
    pub(crate) command_timeout: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) pubsub: PubSub,
    pub(crate) token_retention: Option<Duration>,
    pub(crate) replica_acks: u32,
    pub(crate) digest_names: bool,
    /// [`RUSH`], or what a simulation says.
    pub(crate) rush: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            lease: DEFAULT_LEASE,
            max_hold: None,
            label: None,
            server: None,
            scheme: KeyScheme::default(),
            command_timeout: DEFAULT_COMMAND_TIMEOUT,
            connect_timeout: DEFAULT_CONNECT_TIMEOUT,
            pubsub: PubSub::default(),
            token_retention: Some(DEFAULT_TOKEN_RETENTION),
            replica_acks: 0,
            digest_names: false,
            rush: RUSH,
        }
    }
}

impl Config {
    pub(crate) fn validate(&self) -> Result<(), Error> {
        validate_lease("the default lease", self.lease)?;
        if let Some(max_hold) = self.max_hold {
            validate_lease("max_hold", max_hold)?;
        }
        if self.command_timeout.is_zero() || self.command_timeout > self.lease / 3 {
            return Err(Error::config(format!(
                "a command timeout is above zero and at most a third of the lease, not {:?}",
                self.command_timeout
            )));
        }
        if self.connect_timeout.is_zero() {
            return Err(Error::config("a connect timeout is above zero"));
        }
        if let Some(retention) = self.token_retention
            && retention > MAX_LEASE
        {
            return Err(Error::config(
                "token retention is at most one year; `None` is for ever",
            ));
        }
        self.scheme.validate()
    }

    /// How long to wait for the answer to one request about a hold of this lease: so that several
    /// tries fit between a renewal's due time and the lease's end.
    pub(crate) fn command_timeout_for(&self, lease: Duration) -> Duration {
        self.command_timeout.min(lease / 6)
    }

    /// Retention sent to the server, in milliseconds.
    pub(crate) fn retention_ms(&self) -> Option<u64> {
        self.token_retention.map(millis)
    }
}

/// Whole milliseconds, rounded up, without overflow.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// Refuses a lease, or another limit of a hold, that cannot work.
pub(crate) fn validate_lease(what: &str, lease: Duration) -> Result<(), Error> {
    if lease < MIN_LEASE || lease > MAX_LEASE {
        return Err(Error::config(format!(
            "{what} is between {MIN_LEASE:?} and one year, not {lease:?}"
        )));
    }
    if !lease.subsec_nanos().is_multiple_of(1_000_000) {
        return Err(Error::config(format!(
            "{what} is in whole milliseconds, not {lease:?}"
        )));
    }
    Ok(())
}
