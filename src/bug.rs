//! Mistakes that other libraries made, kept so that the simulation can show it would have found them.

/// A mistake to be built in on purpose. Only with the feature `testing` does any of them do something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    not(feature = "testing"),
    allow(
        unreachable_pub,
        dead_code,
        reason = "public, and seeded, with the feature `testing`"
    )
)]
#[non_exhaustive]
pub enum Bug {
    /// An acquisition adds one to the count, also the second copy of it.
    CountByIncrement,
    /// A release removes whatever owner is there.
    ReleaseWithoutOwnerCheck,
    /// A renewal of a hold that is gone makes it anew.
    RenewalThatCreates,
    /// After subscribing a waiter sleeps, without a second try.
    NoTryAfterSubscribing,
    /// The deadline counts from when the answer was read, not from when the question was sent.
    DeadlineFromReply,
    /// The watchdog keeps one entry for each name: the next hold of it is not renewed.
    WatchdogByName,
    /// A grant that nobody waits for any more is kept, and renewed.
    RenewalOfAnAbandonedAcquire,
    /// A release whose future is dropped is not sent.
    ReleaseDropsItsJob,
    /// A waiter that leaves after it was woken does not pass the turn on.
    WakeUpSwallowed,
    /// A nested acquisition of a hold that is gone takes the lock anew.
    NestedRecreates,
    /// A token is the last one plus one, whatever the time.
    BareCounter,
    /// A hold is lost only when the server says so.
    LossOnlyOnNo,
    /// The server grants an acquisition however late it arrives.
    LateAcquire,
    /// A clean-up is sent once, and may overtake the acquisition it cleans up after.
    CleanUpOnce,
    /// The last release removes the hold only if its count is 1.
    ReleaseInsistsOnCount,
    /// A nested acquisition counts as a level only once it is answered.
    NestedNotCounted,
    /// An offer to a waiter is renewed until the waiter comes for it.
    OfferRenewed,
    /// A message is taken for the lock itself.
    WakeWithoutCheck,
    /// A waiter for a lock without expiry sleeps until a message comes.
    UnboundedSleep,
    /// The clean-up of a nested acquisition releases the whole hold.
    NestedCleanUpReleasesAll,
    /// A grant read after its own deadline counts.
    LateGrantCounts,
    /// A renewal shortens a lease that was longer.
    RenewalShortens,
    /// A hand-off that comes to an empty line is forgotten.
    HandOffStranded,
    /// A hand-off keeps the token of the hold before.
    HandOffKeepsToken,
    /// A hand-off takes the lock whether or not the old hold is there.
    HandOffCreates,
    /// One op of a call that is refused spoils those after it.
    BatchSpoilt,
    /// The waiters of one client pass a lock on among themselves for ever.
    EndlessChain,
    /// Who gets a lock within a client has the token of who had it before.
    PassKeepsToken,
    /// Who gets a lock within a client believes in a lease of his own, of which the server was not told.
    PassRenews,
    /// A reader's renewal lengthens the leases of all who read, also of those who are dead.
    RenewalOfAllReaders,
    /// Where writing ends and reading goes on nobody is told.
    DowngradeTellsNobody,
    /// The last release of one who reads where he wrote removes the writer, whoever that is.
    LateReleaseAfterDowngrade,
    /// To write while one reads waits, for oneself.
    UpgradeThatWaits,
    /// The only reader writes though others have come in.
    UpgradeAmongReaders,
    /// Each reader makes a token of his own.
    TokenPerReader,
    /// The lock is forgotten when one of several readers leaves.
    ReadersForgotten,
    /// A waiter of a fair lock who is dead and first stays first.
    DeadNotSkipped,
    /// A waiter of a fair lock who leaves stays in the queue.
    PlaceKept,
    /// A fair lock that becomes free is told to nobody.
    QueueNotTold,
    /// A fair lock that is free goes to who asks, whoever waits.
    QueueOvertaken,
    /// A waiter of a fair lock who asks again stands in the queue once more.
    QueuedTwice,
}

#[cfg(feature = "testing")]
mod switch {
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use uuid::Uuid;

    use super::Bug;

    thread_local! {
        static SEEDED: Cell<Option<Bug>> = const { Cell::new(None) };
        /// What a watchdog has by name, for [`Bug::WatchdogByName`].
        static ENTRIES: RefCell<BTreeSet<(Uuid, Arc<str>)>> = const { RefCell::new(BTreeSet::new()) };
    }

    /// Builds `bug` in on this thread, or none.
    pub(crate) fn seed(bug: Option<Bug>) {
        SEEDED.set(bug);
        ENTRIES.take();
    }

    /// Makes an entry for a name; whether there was one.
    pub(crate) fn enter(client: Uuid, name: &Arc<str>) -> bool {
        ENTRIES.with_borrow_mut(|entries| !entries.insert((client, Arc::clone(name))))
    }

    pub(crate) fn leave(client: Uuid, name: &Arc<str>) {
        ENTRIES.with_borrow_mut(|entries| entries.remove(&(client, Arc::clone(name))));
    }

    pub(crate) fn seeded(bug: Bug) -> bool {
        SEEDED.get() == Some(bug)
    }
}

#[cfg(feature = "testing")]
pub(crate) use switch::{enter, leave, seed, seeded};

/// Whether this bug is built in.
#[cfg(not(feature = "testing"))]
pub(crate) const fn seeded(_bug: Bug) -> bool {
    false
}

#[cfg(not(feature = "testing"))]
pub(crate) const fn enter(_client: uuid::Uuid, _name: &std::sync::Arc<str>) -> bool {
    false
}

#[cfg(not(feature = "testing"))]
pub(crate) const fn leave(_client: uuid::Uuid, _name: &std::sync::Arc<str>) {}
