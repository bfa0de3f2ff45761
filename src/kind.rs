//! The kinds of lock: what a name is used as.

mod multi;
mod quorum;
mod read_write;

use std::sync::Arc;

use crate::store::Channel;
pub use multi::{MultiGuard, MultiLock, MultiRelease};
pub use quorum::{QuorumGuard, QuorumLock};
pub use read_write::RwLock;

/// A kind of lock. Two of one name may share a key, and then exclude each other or say `Conflict`; they
/// never share a line, an owner id or a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// One owner, in no order across processes.
    Plain,
    /// The reading side of a read/write lock: any number of owners, while nobody writes.
    Read,
    /// Its writing side: one owner. A hold of this kind may go on as a reader's.
    Write,
    /// One owner, in the order in which they came to the server.
    Fair,
}

impl Kind {
    /// Where a release of `name` is told. Of a fair lock it is told to one waiter, on a channel of its
    /// own, which begins with this one.
    pub(crate) fn channel(self, name: &Arc<str>) -> Channel {
        match self {
            Self::Plain | Self::Fair => Channel::Lock(Arc::clone(name)),
            Self::Read | Self::Write => Channel::ReadWrite(Arc::clone(name)),
        }
    }

    /// All sides of the same lock, who reads first. What frees one of them may free the others; a flow of
    /// work has one hold of them together.
    pub(crate) fn sides(self) -> &'static [Self] {
        match self {
            Self::Plain => &[Self::Plain],
            Self::Fair => &[Self::Fair],
            Self::Read | Self::Write => &[Self::Read, Self::Write],
        }
    }

    /// Whether several owners may have it at once.
    pub(crate) fn is_shared(self) -> bool {
        self == Self::Read
    }
}
