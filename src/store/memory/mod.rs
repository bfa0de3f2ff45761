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

use super::clock::micros;
use super::topic::{Listening, Topics};
use super::{
    Answer, Call, Cause, Channel, Health, NoReply, Reply, Run, Snapshot, Store, Subscription,
};
use crate::env::{BoxFuture, SharedEnv};
use crate::kind::Kind;
#[cfg(any(test, feature = "testing"))]
pub(crate) use model::Value;
#[cfg(test)]
pub(crate) use model::fair::{Queue, Typed};
#[cfg(feature = "testing")]
pub(crate) use model::{Gone, Key};
pub(crate) use model::{State, apply};

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
    #[cfg(test)]
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
            health: watch::Sender::new(Health::Up {
                generation: 1,
                server: 1,
            }),
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
        let mut freed: Vec<(usize, Channel)> = Vec::new();
        let mut inner = self.shared.inner.lock();
        let mut answers: Vec<_> = (0..)
            .zip(&call.ops)
            .map(|(at, op)| {
                let (answer, wake) = apply(&mut inner.state, server_now_us, deadline_us, op);
                freed.extend(wake.map(|channel| (at, channel)));
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
            for (at, channel) in &freed {
                let Some(topic) = topics.get(channel) else {
                    continue;
                };
                topic.wake();
                if let Answer::Released { heard } = &mut answers[*at] {
                    *heard += 1;
                }
            }
        }
        Ok(Reply {
            sent,
            server_now_us,
            answers,
        })
    }

    fn look(&self, kind: Kind, name: &Arc<str>) -> Result<Snapshot, NoReply> {
        if self.is_closed() {
            return Err(closed());
        }
        let now_us = self.now_us();
        let mut inner = self.shared.inner.lock();
        let channel = kind.channel(name);
        let waiting = inner
            .listeners
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|topics| topics.get(&channel).is_some())
            .count();
        let mut snapshot = inner.state.look(name, now_us).map_err(NoReply::Refused)?;
        let waiting = match kind {
            Kind::Plain | Kind::Read | Kind::Write => waiting,
            Kind::Fair => inner.state.queue(name).len(),
        };
        snapshot.waiting = Some(waiting as u64);
        let holder = snapshot.holding_client();
        if let Some((info, until_us)) = holder.and_then(|client| inner.announced.get(&client))
            && now_us <= *until_us
        {
            snapshot.holder_info.clone_from(info);
        }
        Ok(snapshot)
    }
}

impl Store for MemoryStore {
    fn ready(&self, _timeout: Duration) -> Option<BoxFuture<()>> {
        None
    }

    fn submit(&self, call: Call) -> BoxFuture<Result<Reply, NoReply>> {
        Box::pin(ready(self.do_call(&call)))
    }

    fn subscribe(&self, channel: &Channel) -> Subscription {
        self.topics.subscribe(channel, Listening::Live)
    }

    fn inspect(
        &self,
        kind: Kind,
        name: &Arc<str>,
        _timeout: Duration,
    ) -> BoxFuture<Result<Snapshot, NoReply>> {
        Box::pin(ready(self.look(kind, name)))
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

    /// There is no life without it: nothing was ever forgotten.
    fn run(&self) -> Option<Run> {
        (!self.is_closed()).then(|| Run {
            id: Some(Arc::from(format!("{:p}", Arc::as_ptr(&self.shared)))),
            asked: self.shared.base,
            age: Duration::MAX,
        })
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

fn closed() -> NoReply {
    NoReply::NotSent(Cause::new("the store is closed"))
}

/// Where the clock of every store in a process begins: some day of 2023, so that tokens look as on
/// a server while the wall clock decides nothing.
pub(crate) const EPOCH_US: u64 = 1_700_000_000_000_000;

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use tokio::time::advance;

    use super::*;
    use crate::env::RealEnv;
    use crate::store::{Answer, Instead, Op, OwnerId, TokenRule, Verb};

    /// Every process that waits for a name is told of its release, as by a message of a server.
    #[tokio::test(start_paused = true)]
    async fn a_release_wakes_every_client_that_listens() {
        let (one, two) = two_clients();
        let job = Channel::from("job");
        let (first, second) = (one.subscribe(&job), two.subscribe(&job));
        assert_eq!(first.settled().await, Listening::Live);
        submit(&one, "job", acquire(1, 1));
        submit(&one, "job", acquire(1, 2));
        submit(&one, "job", release(1, 1));
        assert!(first.woken().now_or_never().is_none());
        submit(&one, "job", release(1, 0));
        assert!(first.woken().now_or_never().is_some());
        assert!(second.woken().now_or_never().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_ends_by_itself() {
        let (one, two) = two_clients();
        let first = submit(&one, "job", acquire(1, 1));
        assert!(matches!(first, Answer::Granted { .. }));
        advance(Duration::from_millis(LEASE_MS / 2)).await;
        let remaining_ms = Some(LEASE_MS / 2);
        assert_eq!(
            submit(&two, "job", acquire(2, 1)),
            Answer::Taken { remaining_ms }
        );
        advance(Duration::from_millis(LEASE_MS / 2 + 1)).await;
        assert!(matches!(
            (first, submit(&two, "job", acquire(2, 1))),
            (Answer::Granted { token: before, .. }, Answer::Granted { token, .. }) if before < token
        ));
        assert_eq!(
            submit(&one, "job", release(1, 0)),
            Answer::Gone(Instead::Taken)
        );
    }

    /// Also later, and not even the deadline: somebody may count on when it was to end.
    #[tokio::test(start_paused = true)]
    async fn a_late_copy_of_an_acquisition_changes_nothing() {
        let (one, _) = two_clients();
        let Answer::Granted { token, .. } = submit(&one, "job", acquire(1, 1)) else {
            panic!("not granted");
        };
        advance(Duration::from_millis(400)).await;
        let remaining_ms = LEASE_MS - 400;
        let granted = Answer::Granted {
            token,
            remaining_ms,
        };
        assert_eq!(submit(&one, "job", acquire(1, 1)), granted);
        assert_eq!(submit(&one, "job", acquire(1, 1)), granted);
    }

    #[tokio::test(start_paused = true)]
    async fn what_has_ended_is_forgotten() {
        let (one, _) = two_clients();
        for round in 0..10 {
            for name in 0..1000 {
                submit(&one, &format!("{round}:{name}"), acquire(1, 1));
            }
            advance(Duration::from_secs(10)).await;
        }
        for _ in 0..1000 {
            submit(&one, "last", acquire(1, 1));
        }
        assert_eq!(
            one.shared.inner.lock().state.len(),
            2,
            "a hold and its counter"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn inspection_shows_the_holder_and_what_its_client_says() {
        let (one, two) = two_clients();
        let info = BTreeMap::from([("label".to_owned(), "orders".to_owned())]);
        one.announce(info.clone(), Duration::from_secs(1)).await;
        submit(&one, "job", acquire(1, 1));
        let job = Arc::from("job");
        let _waiting = two.subscribe(&Kind::Plain.channel(&job));
        let seen = two
            .inspect(Kind::Plain, &job, Duration::ZERO)
            .await
            .unwrap();
        assert_eq!(seen.holders, [(owner(1).to_string(), 1)]);
        assert_eq!(seen.remaining_ms, Some(LEASE_MS));
        assert_eq!(seen.waiting, Some(1));
        assert_eq!(seen.holder_info, info);
        assert!(seen.token.is_some());
        one.retract().await;
        let seen = two
            .inspect(Kind::Plain, &job, Duration::ZERO)
            .await
            .unwrap();
        assert_eq!(seen.holder_info, BTreeMap::new());
    }

    #[tokio::test(start_paused = true)]
    async fn a_closed_store_does_nothing() {
        let (one, two) = two_clients();
        one.close();
        assert_eq!(*one.health().borrow(), Health::Closed);
        let call = call("job", acquire(1, 1));
        assert!(matches!(one.submit(call).await, Err(NoReply::NotSent(_))));
        let answer = submit(&two, "job", acquire(2, 1));
        assert!(matches!(answer, Answer::Granted { .. }));
    }

    fn two_clients() -> (MemoryStore, MemoryStore) {
        let one = MemoryStore::new(Arc::new(RealEnv::current()), Uuid::from_u128(1));
        let two = one.another(Uuid::from_u128(2));
        (one, two)
    }

    fn submit(store: &MemoryStore, name: &str, verb: Verb) -> Answer {
        let reply = store.submit(call(name, verb)).now_or_never();
        let mut answers = reply.expect("ready at once").unwrap().answers;
        answers.remove(0)
    }

    fn call(name: &str, verb: Verb) -> Call {
        Call {
            attempt: 1,
            timeout: Duration::from_secs(1),
            ops: vec![Op {
                kind: Kind::Plain,
                name: Arc::from(name),
                verb,
            }],
        }
    }

    fn acquire(id: u64, count: u32) -> Verb {
        Verb::Acquire {
            owner: owner(id),
            count,
            lease_ms: LEASE_MS,
            token: TokenRule {
                floor: 0,
                retention_ms: Some(2000),
                reserve: 0,
            },
        }
    }

    fn release(id: u64, count: u32) -> Verb {
        Verb::Release {
            owner: owner(id),
            count,
            also: None,
        }
    }

    fn owner(id: u64) -> OwnerId {
        OwnerId::new(Uuid::from_u128(u128::from(id)), id << 1)
    }

    const LEASE_MS: u64 = 1000;
}
