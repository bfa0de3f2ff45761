//! A server that misbehaves on demand: the crate's own model of Redis, behind a network.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use uuid::Uuid;

use super::chance::Chance;
use super::history::{Answered, Did, History, HoldId, Note, Owners, Ran, What, hold_of};
use super::net::{Net, NetStore};
use crate::bug::{Bug, seeded};
use crate::config::Config;
use crate::env::{RealEnv, SharedEnv, later};
use crate::store::clock::micros;
use crate::store::memory::{EPOCH_US, Gone, Key, State, Value, apply};
use crate::store::{Answer, Channel, Op, Refusal, Run, Snapshot};

/// How the network between clients and a [`Server`] behaves. Chances are in a thousand.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Faults {
    /// How long a request, a reply or a message takes.
    pub delay: RangeInclusive<Duration>,
    /// Requests and replies that take longer, and how much at most.
    pub stray: (u32, Duration),
    /// Requests that never arrive. Nothing else arrives on that connection any more.
    pub lost_requests: u32,
    /// Replies that never arrive. Nothing else does, on that connection.
    pub lost_replies: u32,
    /// Requests that run twice before they are answered, or once more after nobody waits.
    pub doubled: u32,
    /// Calls during which the connection is reset.
    pub resets: u32,
    /// Messages that do not arrive.
    pub lost_messages: u32,
    /// No messages at all: waiters poll.
    pub no_messages: bool,
}

impl Faults {
    /// A network without faults, in which everything takes no time.
    pub fn none() -> Self {
        Self {
            delay: Duration::ZERO..=Duration::ZERO,
            stray: (0, Duration::ZERO),
            lost_requests: 0,
            lost_replies: 0,
            doubled: 0,
            resets: 0,
            lost_messages: 0,
            no_messages: false,
        }
    }
}

impl Default for Faults {
    fn default() -> Self {
        Self::none()
    }
}

/// A server in this process, to try a service on: it can be slow, silent, restarted or robbed.
///
/// Give it to [`LockClientBuilder::simulated`](crate::LockClientBuilder::simulated). It lives by
/// Tokio's clock, so a test under a paused one takes no time.
#[derive(Clone)]
pub struct Server {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    /// True time, and the runtime of what is under way.
    pub(super) env: SharedEnv,
    start: Instant,
    pub(super) history: Option<History>,
    state: Mutex<Inside>,
}

struct Inside {
    store: State,
    /// What a failover would go back to.
    copy: State,
    chance: Chance,
    faults: Faults,
    /// Counts restarts and failovers; connections to an earlier one are dead.
    run: u64,
    number: u64,
    /// When it was started again, or failed over.
    renewed: Option<Instant>,
    /// Not running.
    down: bool,
    paused_until: Option<Instant>,
    /// What the clock is ahead of the true time, and how much faster it goes, in millionths.
    step_us: i64,
    ppm: i64,
    nets: Vec<Weak<Net>>,
    /// Who listens for which name, by connection.
    listeners: BTreeSet<(Channel, usize, u64)>,
    announced: BTreeMap<Uuid, BTreeMap<String, String>>,
}

/// How one request fares.
pub(super) struct Fate {
    pub(super) request: Duration,
    pub(super) reply: Duration,
    pub(super) request_lost: bool,
    pub(super) reply_lost: bool,
    /// Runs once more, so long after it ran.
    pub(super) copy: Option<Duration>,
    /// The connection is reset, so long after the call was sent.
    pub(super) reset: Option<Duration>,
    /// It still runs if its connection is reset while it is on its way.
    pub(super) survives: bool,
}

impl Server {
    /// A server without faults, on the current Tokio runtime.
    ///
    /// # Panics
    ///
    /// If called outside a Tokio runtime.
    pub fn new() -> Self {
        Self::with(Arc::new(RealEnv::current()), 0, 0, None)
    }

    pub(super) fn with(env: SharedEnv, seed: u64, ppm: i64, history: Option<History>) -> Self {
        Self {
            inner: Arc::new(Inner {
                start: env.now(),
                env,
                history,
                state: Mutex::new(Inside {
                    store: State::default(),
                    copy: State::default(),
                    chance: Chance::new(seed),
                    faults: Faults::none(),
                    run: 1,
                    number: 1,
                    renewed: None,
                    down: false,
                    paused_until: None,
                    step_us: 0,
                    ppm,
                    nets: Vec::new(),
                    listeners: BTreeSet::new(),
                    announced: BTreeMap::new(),
                }),
            }),
        }
    }

    /// A client's way here.
    pub(crate) fn join(
        &self,
        env: &SharedEnv,
        client: Uuid,
        ppm: i64,
        config: &Config,
    ) -> NetStore {
        Net::join(&self.inner, Arc::clone(env), client, ppm, config)
    }

    /// Sets how the network behaves from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.inner.state.lock().faults = faults;
    }

    /// Does nothing for so long, and does then what has arrived meanwhile.
    pub fn pause(&self, length: Duration) {
        self.inner.fault(|| format!("server paused for {length:?}"));
        let until = later(self.inner.env.now(), length);
        self.inner.state.lock().paused_until = Some(until);
    }

    /// Ends: connections break, and nobody can connect.
    pub fn stop(&self) {
        self.inner.fault(|| "server stopped".to_owned());
        self.inner.state.lock().down = true;
        self.disconnect_all();
    }

    /// Runs again after [`stop`](Self::stop), with what it had in memory, or with nothing.
    pub fn start(&self, keep_memory: bool) {
        self.inner
            .fault(|| format!("server started, memory kept: {keep_memory}"));
        let mut state = self.inner.state.lock();
        let forgotten = if keep_memory {
            Vec::new()
        } else {
            state.restore(State::default())
        };
        state.down = false;
        state.number += 1;
        state.renewed = Some(self.inner.env.now());
        state.paused_until = None;
        drop(state);
        for gone in forgotten {
            self.inner.note(gone);
        }
    }

    /// Keeps a copy of the memory, for [`fail_over`](Self::fail_over) to go back to.
    pub fn copy(&self) {
        let mut state = self.inner.state.lock();
        state.copy = state.store.clone();
    }

    /// Another server takes over, with the memory of the last [`copy`](Self::copy).
    pub fn fail_over(&self) {
        self.inner.fault(|| "failover to an old copy".to_owned());
        let forgotten = {
            let mut state = self.inner.state.lock();
            let copy = state.copy.clone();
            state.number += 1;
            state.renewed = Some(self.inner.env.now());
            state.restore(copy)
        };
        for gone in forgotten {
            self.inner.note(gone);
        }
        self.disconnect_all();
    }

    /// Breaks every connection.
    pub fn disconnect_all(&self) {
        let nets = {
            let mut state = self.inner.state.lock();
            state.run += 1;
            state.listeners.clear();
            state.nets.clone()
        };
        for net in nets.iter().filter_map(Weak::upgrade) {
            net.reset("connection reset");
        }
    }

    /// From now on nothing arrives on the connections there are, in either direction.
    pub fn black_hole(&self) {
        self.inner.fault(|| "all connections silent".to_owned());
        let nets = self.inner.state.lock().nets.clone();
        for net in nets.iter().filter_map(Weak::upgrade) {
            net.silence();
        }
    }

    /// Moves the server's clock, in µs.
    pub fn step_clock(&self, by_us: i64) {
        self.inner.fault(|| format!("clock stepped by {by_us} µs"));
        self.inner.state.lock().step_us += by_us;
    }

    /// Removes a lock behind everybody's back, as an eviction or an operator would.
    pub fn delete(&self, name: &str) {
        let name = Arc::from(name);
        let owners = self.inner.owners(&name);
        self.inner.state.lock().store.delete(&name);
        self.inner.note(What::Vanished {
            name,
            owners,
            expired: false,
        });
    }

    /// Removes a lock's token counter.
    pub fn delete_counter(&self, name: &str) {
        self.inner.fault(|| format!("token counter of {name} gone"));
        self.inner
            .state
            .lock()
            .store
            .delete_counter(&Arc::from(name));
    }

    /// Takes the expiry away from a lock.
    pub fn persist(&self, name: &str) {
        self.inner.fault(|| format!("{name} made persistent"));
        let name = Arc::from(name);
        let now_us = self.inner.expire();
        let mut state = self.inner.state.lock();
        let value = state.store.key(&name, now_us).map(|key| key.value.clone());
        if let Some(value) = value {
            state.store.put(&name, value, None);
        }
    }

    /// Removes the lock if it has no expiry, as an operator would who finds one that nobody renews.
    pub fn delete_if_persistent(&self, name: &str) {
        let now_us = self.inner.expire();
        let forever = {
            let mut state = self.inner.state.lock();
            let key = state.store.key(&Arc::from(name), now_us);
            key.is_some_and(|key| key.expires_ms.is_none())
        };
        if forever {
            self.delete(name);
        }
    }

    /// Puts a key of another type in a lock's place, for so long: whoever asks for the lock is refused.
    pub fn spoil(&self, name: &str, length: Duration) {
        self.replace(name, Value::Other, length, "spoilt");
    }

    /// Puts a hold of somebody else in a lock's place, for so long.
    pub fn overwrite(&self, name: &str, lease: Duration) {
        let fields = BTreeMap::from([("stranger:1".to_owned(), "1".to_owned())]);
        self.replace(name, Value::Hash(fields), lease, "taken by a stranger");
    }

    fn replace(&self, name: &str, value: Value, lasts: Duration, what: &str) {
        let owners = self.inner.owners(&Arc::from(name));
        self.inner.note(What::Vanished {
            name: Arc::from(name),
            owners,
            expired: false,
        });
        self.inner.fault(|| format!("{name} {what}"));
        let now_us = self.inner.clock();
        let at = now_us / 1000 + micros(lasts) / 1000;
        self.inner
            .state
            .lock()
            .store
            .put(&Arc::from(name), value, Some(at));
    }

    /// Who holds a lock, with their counts.
    pub fn owners(&self, name: &str) -> Owners {
        self.inner.owners(&Arc::from(name))
    }
}

impl Default for Server {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").finish_non_exhaustive()
    }
}

impl Inner {
    /// The server's clock, µs since 1970 as it believes.
    pub(super) fn clock(&self) -> u64 {
        let elapsed = self.elapsed();
        let state = self.state.lock();
        state.at(elapsed)
    }

    /// Forgets the locks whose lease is over, and records that. What the clock shows.
    ///
    /// A lease ends without anybody's doing, so the server finds out when it is next touched.
    fn expire(&self) -> u64 {
        let elapsed = self.elapsed();
        let mut state = self.state.lock();
        let now_us = state.at(elapsed);
        if self.history.is_some() {
            let expired = state.expired(now_us);
            drop(state);
            for what in expired {
                self.note(what);
            }
        }
        now_us
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.env.now().saturating_duration_since(self.start)
    }

    pub(super) fn note(&self, what: What) {
        if let Some(history) = &self.history {
            history.push(self.elapsed(), what);
        }
    }

    fn fault(&self, text: impl FnOnce() -> String) {
        if self.history.is_some() {
            self.note(What::Fault(text()));
        }
    }

    pub(super) fn say(&self, text: String) {
        self.note(What::Note(Note::Text(text)));
    }

    /// The next connection's place among all clients.
    pub(super) fn join(&self, net: &Weak<Net>) -> usize {
        let mut state = self.state.lock();
        state.nets.push(Weak::clone(net));
        state.nets.len() - 1
    }

    pub(super) fn run(&self) -> u64 {
        self.state.lock().run
    }

    /// Which server this is: another one after each restart or failover.
    pub(super) fn number(&self) -> u64 {
        self.state.lock().number
    }

    /// Which one it is, and how old its memory.
    pub(super) fn run_of_memory(&self) -> Run {
        let state = self.state.lock();
        let now = self.env.now();
        let age = |since: Instant| now.saturating_duration_since(since);
        Run {
            id: Some(Arc::from(format!(
                "{:p}-{}",
                &raw const *self, state.number
            ))),
            asked: now,
            age: state.renewed.map_or(Duration::MAX, age),
        }
    }

    pub(super) fn is_down(&self) -> bool {
        self.state.lock().down
    }

    pub(super) fn no_messages(&self) -> bool {
        self.state.lock().faults.no_messages
    }

    pub(super) fn delay(&self) -> Duration {
        let state = &mut *self.state.lock();
        state.chance.within(&state.faults.delay)
    }

    pub(super) fn fate(&self) -> Fate {
        let state = &mut *self.state.lock();
        let (chance, faults) = (&mut state.chance, &state.faults);
        let mut one_way = || {
            let mut delay = chance.within(&faults.delay);
            if chance.happens(faults.stray.0) {
                delay += chance.within(&(Duration::ZERO..=faults.stray.1));
            }
            delay
        };
        let (request, reply) = (one_way(), one_way());
        let copy = chance
            .happens(faults.doubled)
            .then(|| one_way_of(chance, faults));
        let reset = chance
            .happens(faults.resets)
            .then(|| chance.within(&(Duration::ZERO..=(request + reply) * 2)));
        Fate {
            request,
            reply,
            request_lost: chance.happens(faults.lost_requests),
            reply_lost: chance.happens(faults.lost_replies),
            copy,
            reset,
            survives: chance.happens(500),
        }
    }

    /// Completes when the server is not paused; `false` if it went down.
    pub(super) async fn until_running(&self) -> bool {
        loop {
            let until = {
                let state = self.state.lock();
                if state.down {
                    return false;
                }
                state.paused_until
            };
            match until {
                Some(until) if self.env.now() < until => self.env.sleep_until(until).await,
                _ => return true,
            }
        }
    }

    /// Does the ops, and says what the clock showed.
    pub(super) fn execute(
        &self,
        client: usize,
        attempt: u64,
        deadline_us: u64,
        ops: &[Op],
    ) -> (Vec<Answer>, u64) {
        let elapsed = self.elapsed();
        let mut freed: Vec<(usize, Channel)> = Vec::new();
        let mut ran = Vec::new();
        let mut state = self.state.lock();
        let now_us = state.at(elapsed);
        let expired = match &self.history {
            Some(_) => state.expired(now_us),
            None => Vec::new(),
        };
        let mut spoilt = None;
        let mut answers: Vec<_> = (0..)
            .zip(ops)
            .map(|(at, op)| {
                let before = self
                    .history
                    .as_ref()
                    .map(|_| owners(&mut state.store, &op.name, now_us));
                let (answer, wake) = match &spoilt {
                    Some(refusal) => (Answer::Refused(Refusal::clone(refusal)), None),
                    None => apply(&mut state.store, now_us, deadline_us, op),
                };
                if let Answer::Refused(refusal) = &answer
                    && seeded(Bug::BatchSpoilt)
                {
                    spoilt = Some(refusal.clone());
                }
                freed.extend(wake.map(|channel| (at, channel)));
                if let Some(before) = before {
                    let after = owners(&mut state.store, &op.name, now_us);
                    let left_ms = state
                        .store
                        .lease_of(op, now_us)
                        .map(|at| at.saturating_sub(now_us / 1000));
                    ran.push(Ran {
                        client,
                        attempt,
                        did: Did::of(op),
                        late: now_us > deadline_us,
                        answer: Answered::from(&answer),
                        change: (before != after).then_some((before, after)),
                        left_ms,
                    });
                }
                answer
            })
            .collect();
        drop(state);
        for what in expired {
            self.note(what);
        }
        for ran in ran {
            self.note(What::Ran(ran));
        }
        for (at, channel) in freed {
            let listening = self.publish(&channel);
            if let Answer::Released { heard } = &mut answers[at] {
                *heard = listening;
            }
        }
        (answers, now_us)
    }

    /// Tells everybody who listens, as far as the network lets it. How many that are.
    fn publish(&self, channel: &Channel) -> u64 {
        let (told, listening) = {
            let state = &mut *self.state.lock();
            let first = (channel.clone(), 0, 0);
            let listening: Vec<_> = state
                .listeners
                .range(first..)
                .take_while(|(listened, ..)| listened == channel)
                .map(|(_, net, link)| (*net, *link))
                .collect();
            let mut told: Vec<(Arc<Net>, u64, Duration)> = Vec::new();
            let count = listening.len() as u64;
            for (net, link) in listening {
                let Some(net) = state.nets[net].upgrade() else {
                    continue;
                };
                if !state.chance.happens(state.faults.lost_messages) {
                    told.push((net, link, state.chance.within(&state.faults.delay)));
                }
            }
            (told, count)
        };
        for (net, link, delay) in told {
            let (env, channel) = (Arc::clone(&self.env), channel.clone());
            if delay.is_zero() {
                net.message(&channel, link);
                continue;
            }
            let at = later(env.now(), delay);
            self.env.spawn(Box::pin(async move {
                env.sleep_until(at).await;
                net.message(&channel, link);
            }));
        }
        listening
    }

    pub(super) fn listen(&self, channel: &Channel, net: usize, link: u64) {
        let place = (channel.clone(), net, link);
        self.state.lock().listeners.insert(place);
    }

    fn owners(&self, name: &Arc<str>) -> Owners {
        let now_us = self.expire();
        owners(&mut self.state.lock().store, name, now_us)
    }

    pub(super) fn look(&self, name: &Arc<str>) -> Result<Snapshot, Refusal> {
        let now_us = self.expire();
        let state = &mut *self.state.lock();
        let mut snapshot = state.store.look(name, now_us)?;
        let holder = snapshot.holding_client();
        if let Some(info) = holder.and_then(|client| state.announced.get(&client)) {
            snapshot.holder_info.clone_from(info);
        }
        Ok(snapshot)
    }

    pub(super) fn announce(&self, client: Uuid, info: Option<BTreeMap<String, String>>) {
        let mut state = self.state.lock();
        match info {
            Some(info) => state.announced.insert(client, info),
            None => state.announced.remove(&client),
        };
    }
}

impl Inside {
    fn at(&self, elapsed: Duration) -> u64 {
        let elapsed = i64::try_from(elapsed.as_micros()).unwrap_or(i64::MAX);
        let shown = elapsed
            + elapsed / 1_000_000 * self.ppm
            + elapsed % 1_000_000 * self.ppm / 1_000_000
            + self.step_us;
        EPOCH_US.saturating_add_signed(shown)
    }

    /// Goes back, or on, to this memory: a record of each lock that is not known there.
    fn restore(&mut self, memory: State) -> Vec<What> {
        let before = std::mem::replace(&mut self.store, memory);
        let forgotten = before.unknown_to(&self.store).into_iter();
        forgotten
            .map(|(name, key)| What::Vanished {
                name,
                owners: owners_of(&key),
                expired: false,
            })
            .collect()
    }

    /// Forgets the locks whose lease is over: a record of each.
    fn expired(&mut self, now_us: u64) -> Vec<What> {
        let expired = self.store.take_expired(now_us).into_iter();
        expired
            .map(|gone| match gone {
                Gone::Lock(name, key) => What::Vanished {
                    name,
                    owners: owners_of(&key),
                    expired: true,
                },
                Gone::Reader(name, reader) => What::ReaderGone {
                    name,
                    hold: hold_of(&reader),
                },
            })
            .collect()
    }
}

fn one_way_of(chance: &mut Chance, faults: &Faults) -> Duration {
    chance.within(&faults.delay) + chance.within(&(Duration::ZERO..=faults.stray.1))
}

fn owners(store: &mut State, name: &Arc<str>, now_us: u64) -> Owners {
    let key = store.living(name, now_us);
    key.as_ref().map(owners_of).unwrap_or_default()
}

fn owners_of(key: &Key) -> Owners {
    match &key.value {
        Value::Hash(fields) => fields
            .iter()
            .map(|(owner, count)| -> (HoldId, u32) { (hold_of(owner), count.parse().unwrap_or(0)) })
            .collect(),
        Value::Other => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Record, Simulation};
    use crate::{Error, LockClient};

    async fn client(server: &Server) -> LockClient {
        let builder = LockClient::builder().simulated(server);
        builder.build().await.unwrap()
    }

    fn put(server: &Server, name: &str, value: Value) {
        let store = &mut server.inner.state.lock().store;
        store.put(&Arc::from(name), value, None);
    }

    /// As a real server answers WRONGTYPE, to a look as to an acquisition.
    #[tokio::test(start_paused = true)]
    async fn a_key_of_another_type_is_a_conflict_to_who_looks() {
        let server = Server::new();
        let client = client(&server).await;
        put(&server, "job", Value::Other);
        let seen = client.inspect("job").await;
        assert!(matches!(seen, Err(Error::Conflict { .. })), "{seen:?}");
        let forced = client.force_release("job").await;
        assert!(matches!(forced, Err(Error::Conflict { .. })), "{forced:?}");
        let taken = client.lock("job").try_acquire().await;
        assert!(matches!(taken, Err(Error::Conflict { .. })), "{taken:?}");
        assert_eq!(server.owners("job"), []);
        server.delete("job");
        assert_eq!(client.inspect("job").await.unwrap().holder, None);
    }

    /// Whatever touches the server first, an op or a look, and once.
    #[test]
    fn a_lease_that_ends_is_recorded_before_what_finds_it_over() {
        let mut simulation = Simulation::new(1, 0);
        let server = simulation.server().clone();
        let process = simulation.process(Duration::ZERO, 0);
        let client = process.client(LockClient::builder()).unwrap();
        let over = What::Vanished {
            name: Arc::from("job"),
            owners: vec![(1, 1)],
            expired: true,
        };

        server.overwrite("job", Duration::from_millis(50));
        simulation.run_until(Duration::from_millis(100));
        simulation.history().take();
        assert_eq!(server.owners("job"), []);
        assert_eq!(server.owners("job"), []);
        let told = simulation.history().take();
        assert_eq!(told.iter().map(|it| &it.what).collect::<Vec<_>>(), [&over]);

        server.overwrite("job", Duration::from_millis(50));
        server.delete("job");
        simulation.run_until(Duration::from_millis(200));
        assert_eq!(server.owners("job"), []);
        let told = simulation.history().take();
        assert!(!told.iter().any(|it| it.what == over), "{told:?}");

        server.overwrite("job", Duration::from_millis(50));
        simulation.run_until(Duration::from_millis(300));
        process.spawn(async move {
            let taken = client.lock("job").try_acquire().await;
            assert!(taken.unwrap().is_some());
        });
        simulation.run_until(Duration::from_millis(400));
        let told = simulation.history().take();
        let ran = |it: &Record| matches!(it.what, What::Ran(_));
        let first = told.iter().position(ran).unwrap();
        assert_eq!(told[first - 1].what, over);
    }

    /// A hold that goes over to the next server is none of those that are gone.
    #[test]
    fn what_a_server_forgets_is_recorded() {
        let simulation = Simulation::new(1, 0);
        let server = simulation.server().clone();
        let gone = || {
            let told = simulation.history().take();
            let gone = told.iter().filter_map(|it| match &it.what {
                What::Vanished { name, expired, .. } if !expired => Some(name.to_string()),
                _ => None,
            });
            gone.collect::<Vec<_>>()
        };
        let lasts = Duration::from_secs(9);
        server.overwrite("kept", lasts);
        server.copy();
        server.overwrite("new", lasts);
        gone();
        server.fail_over();
        assert_eq!(gone(), ["new"]);
        server.stop();
        server.start(true);
        assert_eq!(gone(), [""; 0]);
        server.stop();
        server.start(false);
        assert_eq!(gone(), ["kept"]);
    }
}
