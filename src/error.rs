//! The one error type, sorted by what the caller can do next.

use std::time::Duration;

use crate::guard::LossReason;

/// What went wrong below, boxed.
pub type Source = Box<dyn std::error::Error + Send + Sync + 'static>;

/// Why an operation did not succeed, sorted by what the caller can do next.
///
/// No message and no source ever shows a password.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The wait budget ran out while somebody else held the lock. Nothing is held; waiting again is safe.
    #[error("lock `{name}` not granted within {waited:.1?}: {}", holder(*.own_client))]
    TimedOut {
        /// The lock.
        name: String,
        /// How long the caller waited.
        waited: Duration,
        /// Another flow of work of this same client holds it: if it is the caller's own, a lock made from its
        /// [`LockContext`](crate::LockContext) re-enters. Looked for where a client holds few locks (1024).
        own_client: bool,
    },

    /// The hold is over although its guards are still there. What it protected may be in other
    /// hands: stop, drop the guards, and start afresh.
    #[error("lock `{name}` is lost: {reason}")]
    Lost {
        /// The lock.
        name: String,
        /// Why.
        reason: LossReason,
    },

    /// The server could not be reached, and nothing was done. Trying again later is safe.
    #[error("cannot reach {subject}")]
    Unreachable {
        /// Which server, or for which lock.
        subject: String,
        /// What the connection said last.
        #[source]
        source: Source,
    },

    /// The reply never came: the server may or may not have applied the request. For an acquisition,
    /// what it may have taken is released in the background; trying again is safe.
    #[error("outcome of `{operation}` on lock `{name}` is unknown")]
    Indeterminate {
        /// The lock.
        name: String,
        /// What was asked.
        operation: &'static str,
        /// What the connection said last.
        #[source]
        source: Source,
    },

    /// The key is in other use: another type, another kind of lock, somebody else's hash, or a
    /// spoiled token counter. Nothing is held. Choose another name, or mend the key.
    #[error("key of lock `{name}` is in other use")]
    Conflict {
        /// The lock.
        name: String,
        /// What was found.
        #[source]
        source: Source,
    },

    /// The server's access rules forbid it. Nothing is held. The source names the missing permission.
    #[error("access denied by {subject}")]
    Denied {
        /// Which server, or for which lock.
        subject: String,
        /// What the server said.
        #[source]
        source: Source,
    },

    /// The server has no memory left for a new hold (`maxmemory`). Nothing is held. Holds that exist
    /// are still renewed and released.
    #[error("server is out of memory, lock `{name}` not taken")]
    OutOfMemory {
        /// The lock.
        name: String,
        /// What the server said.
        #[source]
        source: Source,
    },

    /// This flow of work reads, and wants to write without letting go: it would wait for itself. Nothing
    /// was asked, and what it holds is held. Release the read guard first, or give it to
    /// [`RwLock::try_upgrade`](crate::RwLock::try_upgrade), which does not wait.
    #[error(
        "lock `{name}` is held for reading by the one who wants to write: \
         release that first, or use `RwLock::try_upgrade`"
    )]
    WouldDeadlock {
        /// The lock.
        name: String,
    },

    /// The client was closed, or the runtime it was built on has ended.
    #[error("client is closed")]
    Closed,

    /// A setting, name or URL cannot work. Nothing was sent.
    #[error("{problem}")]
    Config {
        /// What is wrong and what would be right.
        problem: String,
    },
}

/// Who holds what was waited for.
fn holder(own_client: bool) -> &'static str {
    if own_client {
        "another flow of work of this client holds it (pass on the context to re-enter)"
    } else {
        "others hold it"
    }
}

impl Error {
    /// Whether the same call may succeed later with nothing changed by the caller.
    ///
    /// False for what needs a decision first: [`Lost`](Self::Lost), [`Conflict`](Self::Conflict),
    /// [`Denied`](Self::Denied), [`WouldDeadlock`](Self::WouldDeadlock), [`Closed`](Self::Closed) and
    /// [`Config`](Self::Config).
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::TimedOut { .. }
            | Self::Unreachable { .. }
            | Self::Indeterminate { .. }
            | Self::OutOfMemory { .. } => true,
            Self::Lost { .. }
            | Self::Conflict { .. }
            | Self::Denied { .. }
            | Self::WouldDeadlock { .. }
            | Self::Closed
            | Self::Config { .. } => false,
        }
    }

    pub(crate) fn config(problem: impl Into<String>) -> Self {
        Self::Config {
            problem: problem.into(),
        }
    }
}
