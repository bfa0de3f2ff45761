//! The locks, notes and counters that threads share.
//!
//! In a build these are the own ones of `parking_lot`, Tokio and the standard library, under one name. In
//! the unit tests they are wrapped: inside a run of `shuttle` each use is a point at which another thread
//! may go on first, and a taken lock blocks the run's thread instead of the machine's. Outside of one
//! they do what is wrapped.

#[cfg(not(test))]
pub(crate) use parking_lot::Mutex;
#[cfg(not(test))]
pub(crate) use std::sync::atomic::AtomicUsize;
#[cfg(not(test))]
pub(crate) use tokio::sync::Notify;

#[cfg(test)]
pub(crate) use wrapped::{AtomicUsize, Mutex, Notify, point};

#[cfg(test)]
mod wrapped {
    use std::fmt;
    use std::ops::{Deref, DerefMut};
    use std::sync::atomic::Ordering;

    use shuttle::current::try_get_current_task;
    use shuttle::thread::{self, Thread};
    use tokio::sync::futures::Notified;

    /// Here another thread may go on first. One before each use of what is shared is enough: what a
    /// thread does between two of them nobody else sees.
    pub(crate) fn point() {
        if try_get_current_task().is_some() {
            shuttle::sync::atomic::AtomicBool::new(false).load(Ordering::SeqCst);
        }
    }

    #[derive(Default)]
    pub(crate) struct Mutex<T> {
        inner: parking_lot::Mutex<T>,
        /// Threads of a run that found it locked.
        blocked: parking_lot::Mutex<Vec<Thread>>,
    }

    pub(crate) struct MutexGuard<'a, T> {
        mutex: &'a Mutex<T>,
        inner: Option<parking_lot::MutexGuard<'a, T>>,
    }

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self {
                inner: parking_lot::Mutex::new(value),
                blocked: parking_lot::Mutex::default(),
            }
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            let inner = if try_get_current_task().is_none() {
                self.inner.lock()
            } else {
                point();
                loop {
                    if let Some(inner) = self.inner.try_lock() {
                        break inner;
                    }
                    // Nobody goes on between the try and this: the unlocking is not missed.
                    self.blocked.lock().push(thread::current());
                    thread::park();
                }
            };
            MutexGuard {
                mutex: self,
                inner: Some(inner),
            }
        }
    }

    impl<T> Drop for MutexGuard<'_, T> {
        fn drop(&mut self) {
            self.inner = None;
            let blocked = std::mem::take(&mut *self.mutex.blocked.lock());
            for thread in blocked {
                thread.unpark();
            }
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.inner.as_ref().expect("locked until dropped")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.inner.as_mut().expect("locked until dropped")
        }
    }

    impl<T: fmt::Debug> fmt::Debug for Mutex<T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.inner.fmt(f)
        }
    }

    #[derive(Debug, Default)]
    pub(crate) struct Notify {
        inner: tokio::sync::Notify,
    }

    impl Notify {
        pub(crate) fn new() -> Self {
            Self::default()
        }

        pub(crate) fn notify_one(&self) {
            point();
            self.inner.notify_one();
        }

        pub(crate) fn notify_waiters(&self) {
            point();
            self.inner.notify_waiters();
        }

        pub(crate) fn notified(&self) -> Notified<'_> {
            point();
            self.inner.notified()
        }
    }

    #[derive(Debug, Default)]
    pub(crate) struct AtomicUsize {
        inner: std::sync::atomic::AtomicUsize,
    }

    impl AtomicUsize {
        pub(crate) fn load(&self, order: Ordering) -> usize {
            point();
            self.inner.load(order)
        }

        pub(crate) fn fetch_add(&self, value: usize, order: Ordering) -> usize {
            point();
            self.inner.fetch_add(value, order)
        }

        pub(crate) fn fetch_sub(&self, value: usize, order: Ordering) -> usize {
            point();
            self.inner.fetch_sub(value, order)
        }
    }
}
