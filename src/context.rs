//! `LockContext`: one logical flow of work, the contender.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::sync::Arc;

use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

use crate::engine::Handle;
use crate::hold::Hold;
use crate::kind::{Kind, RwLock};
use crate::lock::Lock;
use crate::sync::Mutex;

/// One logical flow of work: the contender for locks, who may re-enter those it holds.
///
/// A lock acquired twice through one context is entered twice; two contexts exclude each other, in
/// one process as between processes. Ownership is this value and nothing else: no thread, no task.
/// Pass `&mut LockContext` down to the functions that take part in the work.
///
/// It is not `Clone`, because a copy could mean two things: [`share`](Self::share) is the same flow
/// of work seen from a second task, [`fork`](Self::fork) is another contender.
///
/// # Why `&mut`
///
/// Taking a lock from a context wants `&mut`, as a query on a transaction does: so two branches of a
/// `join!` over one context do not compile by accident. Say `share()` or `fork()` there. (A [`Lock`]
/// that was made is a value of its own: two of them, made before, enter the same flow of work.)
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::{LockClient, LockContext};
///
/// async fn charge(ctx: &mut LockContext) -> Result<(), leasehold::Error> {
///     let _again = ctx.lock("order:10").acquire().await?; // re-enters
///     Ok(())
/// }
///
/// let client = LockClient::in_memory();
/// let mut ctx = client.context();
/// let guard = ctx.lock("order:10").acquire().await?;
/// charge(&mut ctx).await?;
/// guard.release().await.into_result().expect("held all the time");
/// # Ok(()) }
/// ```
pub struct LockContext {
    handle: Arc<Handle>,
    flow: Arc<Flow>,
}

impl LockContext {
    /// A new contender.
    pub(crate) fn new(handle: Arc<Handle>) -> Self {
        Self {
            handle,
            flow: Arc::default(),
        }
    }

    pub(crate) fn of(handle: Arc<Handle>, flow: Arc<Flow>) -> Self {
        Self { handle, flow }
    }

    /// The lock called `name`, for this contender. No round trip; a bad name is an error of the verb.
    pub fn lock(&mut self, name: impl Into<Arc<str>>) -> Lock {
        Lock::new(
            Arc::clone(&self.handle),
            Arc::clone(&self.flow),
            Kind::Plain,
            name.into(),
        )
    }

    /// The fair lock called `name`, for this contender: first come, first served, across processes.
    ///
    /// A [`Lock`] like any other, but for the order: who asks for it stands in a queue on the server,
    /// also with services that use Redisson's fair lock. It costs more than [`lock`](Self::lock): each
    /// waiter is known to the server, and nothing is handed on without it. docs/guarantees.md says
    /// what the order is, and what it is not.
    ///
    /// The same key as that of the plain lock of this name: the two exclude each other, but a plain one
    /// does not queue and may overtake, and a flow of work that has the one cannot enter the other.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::LockClient;
    ///
    /// let client = LockClient::in_memory();
    /// let held = client.fair_lock("printer").acquire().await?;
    /// let mut next = client.fair_lock("printer");
    /// let waits = next.acquire();
    /// tokio::pin!(waits);
    /// assert!(futures_util::poll!(&mut waits).is_pending()); // stands in the queue now
    /// drop(held);
    /// // Nobody overtakes: it is another's turn.
    /// assert!(client.fair_lock("printer").try_acquire().await?.is_none());
    /// waits.await?.release().await.into_result().expect("held all the time");
    /// # Ok(()) }
    /// ```
    pub fn fair_lock(&mut self, name: impl Into<Arc<str>>) -> Lock {
        Lock::new(
            Arc::clone(&self.handle),
            Arc::clone(&self.flow),
            Kind::Fair,
            name.into(),
        )
    }

    /// The read/write lock called `name`, for this contender: many may read at once, one may write. No
    /// round trip; a bad name is an error of the verb.
    pub fn rw_lock(&mut self, name: impl Into<Arc<str>>) -> RwLock {
        RwLock::new(
            Arc::clone(&self.handle),
            Arc::clone(&self.flow),
            name.into(),
        )
    }

    /// The same flow of work, for another task that takes part in it: it may enter what this context
    /// holds.
    ///
    /// Acquisitions of one name through shared contexts go one after the other: the second waits for
    /// the first one's answer, then re-enters.
    pub fn share(&self) -> Self {
        Self {
            handle: Arc::clone(&self.handle),
            flow: Arc::clone(&self.flow),
        }
    }

    /// Another contender of the same client: the two exclude each other.
    pub fn fork(&self) -> Self {
        Self::new(Arc::clone(&self.handle))
    }

    /// Runs `work` with this context as the [`current`](Self::current) one of its task.
    ///
    /// For code that cannot be given a context as an argument. Nothing in this crate reads it but
    /// `current`. Tasks spawned inside do not inherit it.
    pub async fn scope<F: Future>(&self, work: F) -> F::Output {
        CURRENT.scope(self.share(), work).await
    }

    /// A [`share`](Self::share) of the context whose [`scope`](Self::scope) this runs in.
    pub fn current() -> Option<Self> {
        CURRENT.try_with(Self::share).ok()
    }
}

impl fmt::Debug for LockContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockContext").finish_non_exhaustive()
    }
}

tokio::task_local! {
    static CURRENT: LockContext;
}

/// What a flow of work holds, by kind and name.
#[derive(Default)]
pub(crate) struct Flow {
    names: Mutex<Names>,
}

type Key = (Kind, Arc<str>);

/// Most flows have one name at a time: that one needs no table.
#[derive(Default)]
struct Names {
    first: Option<(Key, Named)>,
    others: BTreeMap<Key, Named>,
}

/// One name of a flow.
#[derive(Default)]
struct Named {
    /// Held through each acquisition, so that those of one name go one after the other.
    gate: Arc<AsyncMutex<()>>,
    /// The hold whose guards are alive, be it lost or not.
    hold: Option<Arc<Hold>>,
    /// Places taken; the entry goes with the last.
    places: usize,
}

impl Names {
    fn get(&mut self, key: &Key) -> Option<&mut Named> {
        match &mut self.first {
            Some((first, named)) if first == key => Some(named),
            _ => self.others.get_mut(key),
        }
    }

    fn insert(&mut self, key: Key, named: Named) {
        if self.first.is_none() {
            self.first = Some((key, named));
        } else {
            self.others.insert(key, named);
        }
    }

    fn remove(&mut self, key: &Key) -> Option<Named> {
        match self.first.take_if(|(first, _)| first == key) {
            Some((_, named)) => Some(named),
            None => self.others.remove(key),
        }
    }
}

/// A use of one name of a flow; the flow forgets the name with its last use.
pub(crate) struct Place {
    flow: Arc<Flow>,
    key: Key,
    gate: Arc<AsyncMutex<()>>,
}

impl Flow {
    pub(crate) fn place(self: &Arc<Self>, kind: Kind, name: &Arc<str>) -> Place {
        // One for both sides of a read/write lock: who writes may read as well.
        let key = (kind.sides()[0], Arc::clone(name));
        let mut names = self.names.lock();
        let gate = if let Some(named) = names.get(&key) {
            named.places += 1;
            Arc::clone(&named.gate)
        } else {
            let named = Named {
                places: 1,
                ..Named::default()
            };
            let gate = Arc::clone(&named.gate);
            names.insert(key.clone(), named);
            gate
        };
        Place {
            flow: Arc::clone(self),
            key,
            gate,
        }
    }
}

impl Place {
    /// Waits for acquisitions of this name through this flow to be over.
    pub(crate) async fn enter(&self) -> OwnedMutexGuard<()> {
        Arc::clone(&self.gate).lock_owned().await
    }

    /// As [`enter`](Self::enter), without waiting.
    pub(crate) fn try_enter(&self) -> Option<OwnedMutexGuard<()>> {
        Arc::clone(&self.gate).try_lock_owned().ok()
    }

    /// The hold of this flow, lost or not.
    pub(crate) fn hold(&self) -> Option<Arc<Hold>> {
        self.flow.names.lock().get(&self.key)?.hold.clone()
    }

    pub(crate) fn remember(&self, hold: &Arc<Hold>) {
        self.replace(Some(Arc::clone(hold)), |_| true);
    }

    /// The hold has no guards any more: the name is fresh for this flow.
    pub(crate) fn forget(&self, hold: &Arc<Hold>) {
        self.replace(None, |held| {
            held.is_some_and(|held| Arc::ptr_eq(held, hold))
        });
    }

    /// What is replaced is dropped when nothing is locked any more.
    fn replace(&self, new: Option<Arc<Hold>>, when: impl Fn(Option<&Arc<Hold>>) -> bool) {
        let mut names = self.flow.names.lock();
        let Some(named) = names.get(&self.key) else {
            return;
        };
        if when(named.hold.as_ref()) {
            let old = std::mem::replace(&mut named.hold, new);
            drop(names);
            drop(old);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut names = self.flow.names.lock();
        if let Some(named) = names.get(&self.key) {
            named.places -= 1;
            if named.places == 0 {
                let over = names.remove(&self.key);
                drop(names);
                drop(over);
            }
        }
    }
}
