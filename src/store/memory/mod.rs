//! The store in this process: the same rules as on a server, no server.
//!
//! Clients of one process share it; it ends with the last of them. Every call is done when it
//! returns, so it works under a paused clock.

mod model;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::future::ready;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use uuid::Uuid;

use super::topic::{Listening, Topics};
use super::{
    Call, Cause, Health, NoReply, Refusal, RefusalKind, Reply, Snapshot, Store, Subscription,
};
use crate::env::{BoxFuture, SharedEnv};
pub(crate) use model::{Key, State, Value, apply};

/// One client's handle of a store in this process.
pub(crate) struct MemoryStore {
    env: SharedEnv,
    client: Uuid,
    shared: Arc<Shared>,
    topics: Arc<Topics>,
    health: watch::Sender<Health>,
}

/// What all handles of one store have in common.
struct Shared {
    /// Where the store's clock stood at [`EPOCH_US`].
    base: Instant,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    state: State,
    /// What clients say of themselves, and until when (µs).
    announced: HashMap<Uuid, (BTreeMap<String, String>, u64)>,
    /// Who listens: one entry per handle.
    listeners: Vec<Weak<Topics>>,
}

impl MemoryStore {
    /// A store of its own, empty, and the handle of `client`.
    pub(crate) fn new(env: SharedEnv, client: Uuid) -> Self {
        let shared = Arc::new(Shared {
            base: env.now(),
            inner: Mutex::default(),
        });
        Self::join(shared, env, client)
    }

    /// The handle of another client on the same store. Both run on one clock.
    pub(crate) fn another(&self, client: Uuid) -> Self {
        Self::join(Arc::clone(&self.shared), Arc::clone(&self.env), client)
    }

    fn join(shared: Arc<Shared>, env: SharedEnv, client: Uuid) -> Self {
        let topics = Arc::new(Topics::default());
        let mut inner = shared.inner.lock();
        inner.listeners.retain(|topics| topics.strong_count() > 0);
        inner.listeners.push(Arc::downgrade(&topics));
        drop(inner);
        Self {
            env,
            client,
            shared,
            topics,
            health: watch::Sender::new(Health::Up { generation: 1 }),
        }
    }

    fn now_us(&self) -> u64 {
        self.shared.at(self.env.now())
    }

    fn is_closed(&self) -> bool {
        *self.health.borrow() == Health::Closed
    }

    fn do_call(&self, call: &Call) -> Result<Reply, NoReply> {
        if self.is_closed() {
            return Err(closed());
        }
        let sent = self.env.now();
        let server_now_us = self.shared.at(sent);
        let deadline_us = server_now_us.saturating_add(micros(call.timeout));
        let mut freed = Vec::new();
        let mut inner = self.shared.inner.lock();
        let answers = call
            .ops
            .iter()
            .map(|op| {
                let (answer, wake) = apply(&mut inner.state, server_now_us, deadline_us, op);
                freed.extend(wake);
                answer
            })
            .collect();
        let listeners = if freed.is_empty() {
            Vec::new()
        } else {
            inner.listeners.clone()
        };
        drop(inner);
        for topics in listeners.iter().filter_map(Weak::upgrade) {
            for topic in freed.iter().filter_map(|name| topics.get(name)) {
                topic.wake();
            }
        }
        Ok(Reply {
            sent,
            server_now_us,
            answers,
        })
    }

    fn look(&self, name: &Arc<str>) -> Result<Snapshot, NoReply> {
        if self.is_closed() {
            return Err(closed());
        }
        let now_us = self.now_us();
        let mut inner = self.shared.inner.lock();
        let waiting = inner
            .listeners
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|topics| topics.get(name).is_some())
            .count();
        let token = inner
            .state
            .counter(name, now_us)
            .and_then(|counter| counter.text.parse().ok());
        let mut snapshot = Snapshot {
            token,
            waiting: Some(waiting as u64),
            ..Snapshot::default()
        };
        match inner.state.key(name, now_us) {
            None => {}
            Some(Key {
                value: Value::Other,
                ..
            }) => {
                return Err(NoReply::Refused(Refusal {
                    kind: RefusalKind::Conflict,
                    message: "the key is no hash".to_owned(),
                }));
            }
            Some(Key {
                value: Value::Hash(fields),
                expires_ms,
            }) => {
                snapshot.remaining_ms = expires_ms.map(|at| at.saturating_sub(now_us / 1000));
                snapshot.holders = fields
                    .iter()
                    .filter_map(|(owner, count)| Some((owner.clone(), count.parse().ok()?)))
                    .collect();
            }
        }
        let holder = snapshot
            .holders
            .first()
            .and_then(|(owner, _)| owner.rsplit_once(':'))
            .and_then(|(client, _)| client.parse::<Uuid>().ok());
        if let Some((info, until_us)) = holder.and_then(|client| inner.announced.get(&client))
            && now_us <= *until_us
        {
            snapshot.holder_info.clone_from(info);
        }
        Ok(snapshot)
    }
}

impl Store for MemoryStore {
    fn submit(&self, call: Call) -> BoxFuture<Result<Reply, NoReply>> {
        Box::pin(ready(self.do_call(&call)))
    }

    fn subscribe(&self, name: &Arc<str>) -> Subscription {
        self.topics.subscribe(name, Listening::Live)
    }

    fn inspect(&self, name: &Arc<str>, _timeout: Duration) -> BoxFuture<Result<Snapshot, NoReply>> {
        Box::pin(ready(self.look(name)))
    }

    fn announce(&self, info: BTreeMap<String, String>, ttl: Duration) -> BoxFuture<()> {
        let now_us = self.now_us();
        let mut inner = self.shared.inner.lock();
        inner
            .announced
            .retain(|_, (_, until_us)| now_us <= *until_us);
        let until_us = now_us.saturating_add(micros(ttl));
        inner.announced.insert(self.client, (info, until_us));
        Box::pin(ready(()))
    }

    fn retract(&self) -> BoxFuture<()> {
        self.shared.inner.lock().announced.remove(&self.client);
        Box::pin(ready(()))
    }

    fn health(&self) -> watch::Receiver<Health> {
        self.health.subscribe()
    }

    fn close(&self) {
        self.health.send_replace(Health::Closed);
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore")
            .field("client", &self.client)
            .field("health", &*self.health.borrow())
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// The store's clock at `now`, µs since 1970 as it believes.
    fn at(&self, now: Instant) -> u64 {
        EPOCH_US.saturating_add(micros(now.saturating_duration_since(self.base)))
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn closed() -> NoReply {
    NoReply::NotSent(Cause::new("the store is closed"))
}

/// Where the clock of every store in a process begins: some day of 2023, so that tokens look as on
/// a server while the wall clock decides nothing.
const EPOCH_US: u64 = 1_700_000_000_000_000;
