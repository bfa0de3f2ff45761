//! The client's side of the network: a store that reaches a simulated server, sometimes.
//!
//! It does what the real one does (`store::redis`): a connection has a clock of its own and is never
//! used again once it was given up; a call without an answer in time makes the connection suspect;
//! what was sent on a connection that breaks may still run.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::history::{Did, What};
use super::server::{Fate, Inner};
use crate::bug::{Bug, seeded};
use crate::config::Config;
use crate::env::{BoxFuture, SharedEnv, later, until};
use crate::kind::Kind;
use crate::store::clock::{Clock, micros};
use crate::store::topic::{Listening, Topics};
use crate::store::{
    Answer, Belief, Call, Cause, Channel, Health, NoReply, Op, Reply, Run, Snapshot, Store,
    Subscription,
};

/// A client's store on a simulated server.
#[derive(Debug)]
pub(crate) struct NetStore(Arc<Net>);

/// One client's connection to a simulated server.
pub(super) struct Net {
    server: Arc<Inner>,
    /// The client's, with its own idea of time.
    env: SharedEnv,
    client: Uuid,
    /// How much faster its clock goes than true time, in millionths.
    ppm: i64,
    /// Its place among the server's clients.
    index: usize,
    connect_timeout: Duration,
    command_timeout: Duration,
    topics: Arc<Topics>,
    health: watch::Sender<Health>,
    /// Not a `watch`: that one wakes in an order that no seed decides.
    link: Mutex<Option<Arc<Link>>>,
    linked: Notify,
    closed: CancellationToken,
    generations: Mutex<u64>,
}

/// One connection.
struct Link {
    generation: u64,
    /// Given up: nothing is sent on it any more, nothing read from it.
    over: CancellationToken,
    why: Mutex<Arc<str>>,
    clock: Clock,
    state: Mutex<LinkState>,
}

#[derive(Default)]
struct LinkState {
    /// Requests and replies keep their order: none arrives before these, in true time.
    last_request: Option<Instant>,
    last_reply: Option<Instant>,
    mute_requests: bool,
    mute_replies: bool,
    probing: bool,
}

impl Net {
    /// A client's store. Connected, unless the server is down.
    pub(super) fn join(
        server: &Arc<Inner>,
        env: SharedEnv,
        client: Uuid,
        ppm: i64,
        config: &Config,
    ) -> NetStore {
        let net = Arc::new_cyclic(|weak| Self {
            index: server.join(weak),
            server: Arc::clone(server),
            env,
            client,
            ppm,
            connect_timeout: config.connect_timeout,
            command_timeout: config.command_timeout,
            topics: Arc::default(),
            health: watch::Sender::new(Health::Connecting),
            link: Mutex::new(None),
            linked: Notify::new(),
            closed: CancellationToken::new(),
            generations: Mutex::new(0),
        });
        if !server.is_down() {
            let link = net.new_link();
            let now = net.env.now();
            link.clock.learn(now, now, server.clock());
            net.up(&link);
        }
        let own = Arc::clone(&net);
        net.env
            .spawn(Box::pin(async move { own.supervise().await }));
        NetStore(net)
    }

    fn new_link(&self) -> Arc<Link> {
        let mut generations = self.generations.lock();
        *generations += 1;
        Arc::new(Link {
            generation: *generations,
            over: CancellationToken::new(),
            why: Mutex::new(Arc::from("connection reset")),
            clock: Clock::default(),
            state: Mutex::default(),
        })
    }

    fn up(&self, link: &Arc<Link>) {
        *self.link.lock() = Some(Arc::clone(link));
        self.health.send_replace(Health::Up {
            generation: link.generation,
            server: self.server.number(),
        });
        self.linked.notify_waiters();
    }

    /// Keeps a connection until the store is closed.
    async fn supervise(self: Arc<Self>) {
        loop {
            let link = self.link.lock().clone();
            match link {
                Some(link) => {
                    tokio::select! {
                        biased;
                        () = self.closed.cancelled() => return,
                        () = link.over.cancelled() => {}
                    }
                    *self.link.lock() = None;
                    self.health.send_replace(Health::Down {
                        since: self.env.now(),
                        why: Arc::clone(&link.why.lock()),
                    });
                }
                None => {
                    tokio::select! {
                        biased;
                        () = self.closed.cancelled() => return,
                        () = self.connect() => {}
                    }
                }
            }
        }
    }

    /// One attempt to connect, with a pause behind it if it fails.
    async fn connect(self: &Arc<Self>) {
        let link = self.new_link();
        let (sent, run) = (self.env.now(), self.server.run());
        let hello = async {
            self.wait(self.server.delay()).await;
            if !self.server.until_running().await {
                return None;
            }
            let clock = self.server.clock();
            self.wait(self.server.delay()).await;
            Some(clock)
        };
        let deadline = later(sent, self.connect_timeout);
        let told = until(&*self.env, deadline, hello).await.flatten();
        match told {
            Some(clock) if run == self.server.run() => {
                link.clock.learn(sent, self.env.now(), clock);
                self.up(&link);
                // Those who listened are not sure to have heard everything.
                for topic in self.topics.all() {
                    topic.set(Listening::Pending);
                    self.listen(topic.channel().clone(), &link);
                }
            }
            _ => {
                let pause = Duration::from_millis(20 + self.env.random() % 180);
                self.env.sleep_until(later(self.env.now(), pause)).await;
            }
        }
    }

    /// Lets true time pass.
    async fn wait(&self, length: Duration) {
        if !length.is_zero() {
            let env = &self.server.env;
            env.sleep_until(later(env.now(), length)).await;
        }
    }

    /// Breaks the connection there is.
    pub(super) fn reset(&self, why: &str) {
        let link = self.link.lock().clone();
        if let Some(link) = link {
            link.give_up(why);
        }
    }

    /// Lets nothing through on the connection there is.
    pub(super) fn silence(&self) {
        if let Some(link) = &*self.link.lock() {
            let mut state = link.state.lock();
            state.mute_requests = true;
            state.mute_replies = true;
        }
    }

    /// A message has come to a connection.
    pub(super) fn message(&self, channel: &Channel, generation: u64) {
        let current = match &*self.link.lock() {
            Some(link) => {
                let mute = link.state.lock().mute_replies;
                link.generation == generation && !link.over.is_cancelled() && !mute
            }
            None => false,
        };
        if current && let Some(topic) = self.topics.get(channel) {
            topic.wake();
        }
    }

    /// Subscribes on a connection; the topic is live when that is confirmed.
    fn listen(self: &Arc<Self>, channel: Channel, link: &Arc<Link>) {
        let (net, link) = (Arc::clone(self), Arc::clone(link));
        self.env.spawn(Box::pin(async move {
            net.wait(net.server.delay()).await;
            if link.over.is_cancelled() || link.state.lock().mute_requests {
                return;
            }
            net.server.listen(&channel, net.index, link.generation);
            net.wait(net.server.delay()).await;
            if link.over.is_cancelled() || link.state.lock().mute_replies {
                return;
            }
            if let Some(topic) = net.topics.get(&channel) {
                topic.set(Listening::Live);
                if !seeded(Bug::NoTryAfterSubscribing) {
                    topic.wake();
                }
            }
        }));
    }

    /// The connection, once there is one, or `None` at `end`.
    async fn link(&self, end: Instant) -> Option<Arc<Link>> {
        let wait = async {
            loop {
                let linked = self.linked.notified();
                if let Some(link) = self.link_now() {
                    return link;
                }
                linked.await;
            }
        };
        tokio::select! {
            biased;
            () = self.closed.cancelled() => None,
            link = until(&*self.env, end, wait) => link,
        }
    }

    async fn call(self: Arc<Self>, call: Call) -> Result<Reply, NoReply> {
        let Call {
            attempt,
            timeout,
            ops,
        } = call;
        let end = later(self.env.now(), timeout);
        let Some(link) = self.link_now() else {
            return Err(NoReply::NotSent(Cause::new("no connection")));
        };
        let sent = self.env.now();
        let left = end.saturating_duration_since(sent);
        let deadline_us = link.clock.estimate(sent).saturating_add(micros(left));
        if self.server.history.is_some() {
            self.server.note(What::Sent {
                client: self.index,
                attempt,
                ops: ops.iter().map(Did::of).collect(),
            });
        }
        let unanswered = |cause: &str| NoReply::Unanswered {
            sent,
            deadline_us,
            cause: Cause::new(cause),
        };
        let answer = self.send(&link, attempt, deadline_us, ops);
        let outcome = tokio::select! {
            biased;
            () = link.over.cancelled() => Err(unanswered("connection reset")),
            answer = until(&*self.env, end, answer) => match answer {
                Some(Ok((answers, server_now_us))) => {
                    link.clock.learn(sent, self.env.now(), server_now_us);
                    Ok(Reply { sent, server_now_us, answers })
                }
                _ => Err(unanswered("no answer in time")),
            },
        };
        if outcome.is_err() && !link.over.is_cancelled() {
            self.probe(link);
        }
        outcome
    }

    /// Sends a request on its way, and is told the answer if one arrives.
    fn send(
        self: &Arc<Self>,
        link: &Arc<Link>,
        attempt: u64,
        deadline_us: u64,
        ops: Vec<Op>,
    ) -> oneshot::Receiver<(Vec<Answer>, u64)> {
        let (answer, answered) = oneshot::channel();
        let fate = self.server.fate();
        let now = self.server.env.now();
        let arrives = {
            let mut state = link.state.lock();
            let arrives = later(now, fate.request).max(state.last_request.unwrap_or(now));
            state.last_request = Some(arrives);
            state.mute_requests |= fate.request_lost;
            arrives
        };
        if let Some(after) = fate.reset {
            let (net, link) = (Arc::clone(self), Arc::clone(link));
            self.env.spawn(Box::pin(async move {
                net.wait(after).await;
                link.give_up("connection reset");
            }));
        }
        let (net, link) = (Arc::clone(self), Arc::clone(link));
        // On the server's side: a client that has died has sent what it has sent.
        self.server.env.spawn(Box::pin(async move {
            net.server.env.sleep_until(arrives).await;
            net.arrived(&link, fate, attempt, deadline_us, &ops, answer)
                .await;
        }));
        answered
    }

    async fn arrived(
        &self,
        link: &Link,
        fate: Fate,
        attempt: u64,
        deadline_us: u64,
        ops: &[Op],
        answer: oneshot::Sender<(Vec<Answer>, u64)>,
    ) {
        if link.state.lock().mute_requests || (link.over.is_cancelled() && !fate.survives) {
            return;
        }
        let run = self.server.run();
        if !self.server.until_running().await {
            return;
        }
        // What waited for a server that is no more is gone.
        if run != self.server.run() && !fate.survives {
            return;
        }
        let mut told = self.server.execute(self.index, attempt, deadline_us, ops);
        if let Some(after) = fate.copy {
            // Nobody is told before the copy has run, and then of the copy: a transport that made copies
            // of what it had answered would be one that nothing can be built on (docs/protocol.md).
            self.wait(after).await;
            if !self.server.until_running().await {
                return;
            }
            told = self.server.execute(self.index, attempt, deadline_us, ops);
        }
        let env = &self.server.env;
        let leaves = {
            let now = env.now();
            let mut state = link.state.lock();
            let leaves = later(now, fate.reply).max(state.last_reply.unwrap_or(now));
            state.last_reply = Some(leaves);
            state.mute_replies |= fate.reply_lost;
            leaves
        };
        env.sleep_until(leaves).await;
        if !link.state.lock().mute_replies && !link.over.is_cancelled() {
            let _ = answer.send(told);
        }
    }

    /// How long `length` of the client's clock takes.
    fn truly(&self, length: Duration) -> Duration {
        let nanos = i128::try_from(length.as_nanos()).unwrap_or(i128::MAX);
        let truly = nanos * 1_000_000 / (1_000_000 + i128::from(self.ppm));
        Duration::from_nanos(u64::try_from(truly).unwrap_or(u64::MAX))
    }

    fn link_now(&self) -> Option<Arc<Link>> {
        let link = self.link.lock();
        link.as_ref()
            .filter(|link| !link.over.is_cancelled())
            .cloned()
    }

    fn believes(&self, belief: Belief<'_>) {
        let Some(history) = &self.server.history else {
            return;
        };
        let at = self.server.elapsed();
        let truly =
            |deadline: Instant| at + self.truly(deadline.saturating_duration_since(self.env.now()));
        let client = self.index;
        history.push(
            at,
            match belief {
                Belief::Claimed {
                    name,
                    owner,
                    token,
                    deadline,
                } => What::Claimed {
                    client,
                    name: Arc::clone(name),
                    hold: owner.hold,
                    token,
                    until: truly(deadline),
                },
                Belief::Prolonged { owner, deadline } => What::Prolonged {
                    hold: owner.hold,
                    until: truly(deadline),
                },
                Belief::Lost { owner, reason } => What::Lost {
                    hold: owner.hold,
                    reason,
                },
                Belief::Left { owner } => What::Left { hold: owner.hold },
                Belief::Passed { owner } => What::Passed { hold: owner.hold },
                Belief::Joined { kind, name, place } => What::Joined {
                    kind: kind.into(),
                    client,
                    name: Arc::clone(name),
                    place,
                },
                Belief::Departed {
                    kind,
                    name,
                    place,
                    served,
                } => What::Departed {
                    kind: kind.into(),
                    client,
                    name: Arc::clone(name),
                    place,
                    served,
                },
            },
        );
    }

    /// Asks a connection that did not answer whether it lives, and gives it up if not.
    fn probe(self: &Arc<Self>, link: Arc<Link>) {
        if std::mem::replace(&mut link.state.lock().probing, true) {
            return;
        }
        let net = Arc::clone(self);
        self.env.spawn(Box::pin(async move {
            let end = later(net.env.now(), net.command_timeout);
            let ping = net.send(&link, 0, 0, Vec::new());
            let alive = until(&*net.env, end, ping)
                .await
                .is_some_and(|pong| pong.is_ok());
            link.state.lock().probing = false;
            if !alive {
                link.give_up("silent server");
            }
        }));
    }
}

impl Link {
    fn give_up(&self, why: &str) {
        *self.why.lock() = Arc::from(why);
        self.over.cancel();
    }
}

impl Store for NetStore {
    fn ready(&self, timeout: Duration) -> Option<BoxFuture<()>> {
        if self.0.link_now().is_some() {
            return None;
        }
        let net = Arc::clone(&self.0);
        let end = later(net.env.now(), timeout);
        Some(Box::pin(async move {
            let _ = net.link(end).await;
        }))
    }

    fn submit(&self, call: Call) -> BoxFuture<Result<Reply, NoReply>> {
        Box::pin(Arc::clone(&self.0).call(call))
    }

    fn subscribe(&self, channel: &Channel) -> Subscription {
        let net = &self.0;
        if net.server.no_messages() || net.closed.is_cancelled() {
            return net.topics.subscribe(channel, Listening::Refused);
        }
        let new = net.topics.get(channel).is_none();
        let subscription = net.topics.subscribe(channel, Listening::Pending);
        if new && let Some(link) = net.link_now() {
            net.listen(channel.clone(), &link);
        }
        subscription
    }

    fn inspect(
        &self,
        _kind: Kind,
        name: &Arc<str>,
        timeout: Duration,
    ) -> BoxFuture<Result<Snapshot, NoReply>> {
        let (net, name) = (Arc::clone(&self.0), Arc::clone(name));
        Box::pin(async move {
            let end = later(net.env.now(), timeout);
            if net.link(end).await.is_none() {
                return Err(NoReply::NotSent(Cause::new("no connection")));
            }
            net.wait(net.server.delay()).await;
            let snapshot = net.server.look(&name).map_err(NoReply::Refused);
            net.wait(net.server.delay()).await;
            snapshot
        })
    }

    fn announce(&self, info: BTreeMap<String, String>, _: Duration) -> BoxFuture<()> {
        self.0.server.announce(self.0.client, Some(info));
        Box::pin(std::future::ready(()))
    }

    fn retract(&self) -> BoxFuture<()> {
        self.0.server.announce(self.0.client, None);
        Box::pin(std::future::ready(()))
    }

    fn health(&self) -> watch::Receiver<Health> {
        self.0.health.subscribe()
    }

    fn run(&self) -> Option<Run> {
        let up = matches!(*self.0.health.borrow(), Health::Up { .. });
        up.then(|| self.0.server.run_of_memory())
    }

    fn close(&self) {
        self.0.closed.cancel();
        self.0.reset("closed");
        self.0.health.send_replace(Health::Closed);
    }

    fn believes(&self, belief: Belief<'_>) {
        self.0.believes(belief);
    }
}

impl fmt::Debug for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Net")
            .field("client", &self.client)
            .finish_non_exhaustive()
    }
}
