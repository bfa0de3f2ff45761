//! Wake-ups by channel: who listens for which release. A message is a hint to try again, no more.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};

use tokio::sync::watch;

use crate::sync::{Mutex, Notify};

/// Where a release is told. What it is called on the wire, the key scheme says.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Channel {
    /// Of a lock with this name: one contender of each process may try.
    Lock(Arc<str>),
    /// Of a read/write lock: readers and writers alike may try.
    ReadWrite(Arc<str>),
    /// Of a fair lock with this name, to the one with this owner id (text) who is first in its queue.
    Fair(Arc<str>, Arc<str>),
}

impl Channel {
    /// The name of the lock.
    pub(crate) fn name(&self) -> &Arc<str> {
        match self {
            Self::Lock(name) | Self::ReadWrite(name) | Self::Fair(name, _) => name,
        }
    }
}

#[cfg(test)]
impl<T: Into<Arc<str>>> From<T> for Channel {
    fn from(name: T) -> Self {
        Self::Lock(name.into())
    }
}

/// How far a subscription has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listening {
    /// Asked for, not confirmed by the server.
    Pending,
    /// Confirmed: a release from now on wakes us, unless the connection breaks.
    Live,
    /// The server will not have it, or it is switched off: poll.
    Refused,
}

/// One channel listened to, however many listen.
#[derive(Debug)]
pub(crate) struct Topic {
    channel: Channel,
    /// One for each listener: several of one client may wait for the same channel.
    listeners: Mutex<Vec<Arc<Notify>>>,
    listening: watch::Sender<Listening>,
}

impl Topic {
    pub(crate) fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Says "try again" to each listener. Kept for one that is not waiting at the moment.
    pub(crate) fn wake(&self) {
        let listeners = self.listeners.lock().clone();
        for listener in listeners {
            listener.notify_one();
        }
    }

    pub(crate) fn set(&self, listening: Listening) {
        self.listening.send_replace(listening);
    }

    pub(crate) fn listening(&self) -> Listening {
        *self.listening.borrow()
    }
}

/// All channels a client listens to.
#[derive(Debug, Default)]
pub(crate) struct Topics {
    by_channel: Mutex<HashMap<Channel, Entry>>,
    /// Told after each change of the set: a channel came, or its last listener left.
    changed: Notify,
}

#[derive(Debug)]
struct Entry {
    topic: Arc<Topic>,
    listeners: usize,
}

impl Topics {
    /// Adds a listener. `first` is the state a topic starts in.
    pub(crate) fn subscribe(self: &Arc<Self>, channel: &Channel, first: Listening) -> Subscription {
        let mut by_channel = self.by_channel.lock();
        let entry = by_channel.entry(channel.clone()).or_insert_with(|| Entry {
            topic: Arc::new(Topic {
                channel: channel.clone(),
                listeners: Mutex::default(),
                listening: watch::Sender::new(first),
            }),
            listeners: 0,
        });
        entry.listeners += 1;
        let topic = Arc::clone(&entry.topic);
        let notify = Arc::new(Notify::new());
        topic.listeners.lock().push(Arc::clone(&notify));
        let new = entry.listeners == 1;
        drop(by_channel);
        if new {
            self.changed.notify_one();
        }
        Subscription {
            topic,
            notify,
            topics: Arc::downgrade(self),
        }
    }

    /// The topic of `channel`, if anybody listens.
    pub(crate) fn get(&self, channel: &Channel) -> Option<Arc<Topic>> {
        self.by_channel
            .lock()
            .get(channel)
            .map(|entry| Arc::clone(&entry.topic))
    }

    /// All topics listened to now, by channel.
    pub(crate) fn all(&self) -> Vec<Arc<Topic>> {
        let mut all: Vec<_> = self
            .by_channel
            .lock()
            .values()
            .map(|entry| Arc::clone(&entry.topic))
            .collect();
        all.sort_unstable_by(|a, b| a.channel.cmp(&b.channel));
        all
    }

    /// Wakes every listener: messages may have been missed.
    pub(crate) fn wake_all(&self) {
        for topic in self.all() {
            topic.wake();
        }
    }

    /// Completes when the set has changed since the last call.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }
}

/// A listener's place; ends when dropped.
pub(crate) struct Subscription {
    topic: Arc<Topic>,
    notify: Arc<Notify>,
    topics: Weak<Topics>,
}

impl Subscription {
    pub(crate) fn channel(&self) -> &Channel {
        &self.topic.channel
    }

    /// Completes with what became of the subscription, once that is known.
    pub(crate) async fn settled(&self) -> Listening {
        let mut listening = self.topic.listening.subscribe();
        match listening
            .wait_for(|state| *state != Listening::Pending)
            .await
        {
            Ok(state) => *state,
            Err(_) => Listening::Refused,
        }
    }

    pub(crate) fn listening(&self) -> Listening {
        self.topic.listening()
    }

    /// Completes at the next message, or at once if one came since the last call.
    pub(crate) async fn woken(&self) {
        self.notify.notified().await;
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let own = |listener: &Arc<Notify>| Arc::ptr_eq(listener, &self.notify);
        self.topic
            .listeners
            .lock()
            .retain(|listener| !own(listener));
        let Some(topics) = self.topics.upgrade() else {
            return;
        };
        let mut by_channel = topics.by_channel.lock();
        if let Some(entry) = by_channel.get_mut(&self.topic.channel) {
            entry.listeners -= 1;
            if entry.listeners == 0 {
                by_channel.remove(&self.topic.channel);
                drop(by_channel);
                topics.changed.notify_one();
            }
        }
    }
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscription")
            .field("topic", &self.topic)
            .finish_non_exhaustive()
    }
}
