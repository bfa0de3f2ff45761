//! The kinds of lock: what a name is used as.

use std::sync::Arc;

use crate::store::Channel;

/// A kind of lock. Two of one name may share a key, and then exclude each other or say `Conflict`; they
/// never share a line, an owner id or a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// One owner, in no order across processes.
    Plain,
    /// One owner, in the order in which they came to the server.
    Fair,
}

impl Kind {
    /// Where a release of `name` is told. Of a fair lock it is told to one waiter, on a channel of its
    /// own, which begins with this one.
    pub(crate) fn channel(self, name: &Arc<str>) -> Channel {
        match self {
            Self::Plain | Self::Fair => Channel::Lock(Arc::clone(name)),
        }
    }
}
