//! The kinds of lock: what a name is used as.

use std::sync::Arc;

use crate::store::Channel;

/// A kind of lock. Two of one name may share a key, and then exclude each other or say `Conflict`; they
/// never share a line, an owner id or a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// One owner, in no order across processes.
    Plain,
}

impl Kind {
    /// Where a release of `name` is told.
    pub(crate) fn channel(self, name: &Arc<str>) -> Channel {
        match self {
            Self::Plain => Channel::Lock(Arc::clone(name)),
        }
    }
}
