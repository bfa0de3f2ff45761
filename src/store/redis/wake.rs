//! Messages: one connection that listens to all channels, and nothing else goes over it.
//!
//! 1. fred calls a subscription done when it is written, and gives an error reply to `SUBSCRIBE` to
//!    whatever waits next. So this task alone uses the connection, one step at a time, and each step
//!    ends with a `PING` whose token must come back: then all before it has been executed, and every
//!    reply belongs to its request again.
//! 2. A topic is `Live` only while its channel is in `Session::live`, and is woken when it becomes so:
//!    what was published before that was not heard.
//! 3. Channels, not topics, are compared: one that was left and taken up again between two passes is
//!    still subscribed, and its new topic becomes `Live`.
//! 4. A refused channel costs its listeners the messages, never an error: they poll.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fred::clients::Client;
use fred::error::Error as FredError;
use fred::interfaces::{ClientLike, EventInterface, PubsubInterface};
use fred::types::{Message, Value};
use parking_lot::Mutex;
use tokio::sync::broadcast;
use tokio::time::Instant;

use super::connection::{BackOff, ConnectFailure, Connection, Fault, ask, one_attempt};
use super::script::Publish;
use super::{Cause, Channel, Listening, Shared};
use crate::env::{later, until};

/// Keeps the subscriptions of the server equal to the topics of this process until the store is
/// closed.
pub(super) async fn listen(shared: Arc<Shared>) {
    let closing = shared.closing.clone();
    let mut hub = Hub {
        refused: BTreeMap::new(),
        all_refused: None,
        warned: false,
        shared,
    };
    tokio::select! {
        biased;
        () = closing.cancelled() => {}
        () = hub.run() => {}
    }
}

struct Hub {
    shared: Arc<Shared>,
    /// Channels the server would not have, and when to ask again.
    refused: BTreeMap<Channel, Instant>,
    /// Set when it seems to have none at all.
    all_refused: Option<Instant>,
    warned: bool,
}

impl Hub {
    async fn run(&mut self) {
        let mut back_off = BackOff::default();
        let mut down_since = None;
        loop {
            self.wait_for_listeners().await;
            let env = Arc::clone(&self.shared.env);
            let wait = back_off.next(&*env);
            env.sleep_until(later(env.now(), wait)).await;
            let down = *down_since.get_or_insert_with(|| env.now());
            let why = match Connection::open(&*env, &self.shared.config, MESSAGES).await {
                Ok(mut connection) => {
                    tracing::debug!(target: "leasehold", "connected for messages");
                    let opened = env.now();
                    let why = self.session(&mut connection).await;
                    drop(connection);
                    for topic in self.shared.topics.all() {
                        if topic.listening() == Listening::Live {
                            topic.set(Listening::Pending);
                        }
                    }
                    if env.now().saturating_duration_since(opened) > LONG_ENOUGH {
                        back_off.reset();
                        down_since = None;
                    }
                    why
                }
                Err(ConnectFailure::Refused(refusal)) => {
                    self.refuse_all(&refusal.message);
                    Cause::new(refusal.message)
                }
                Err(ConnectFailure::Unreachable(why)) => why,
                Err(ConnectFailure::Closed) => return,
            };
            tracing::debug!(target: "leasehold", %why, "no connection for messages");
            // Nobody has to wait for ever to hear whether there will be messages.
            if down_since.is_some() && env.now() >= later(down, self.shared.config.command_timeout)
            {
                self.set_pending_to(Listening::Refused);
            }
        }
    }

    /// Without listeners there is no connection, and without permission none is tried.
    async fn wait_for_listeners(&mut self) {
        let shared = Arc::clone(&self.shared);
        loop {
            let now = shared.env.now();
            match self.all_refused {
                Some(again) if now < again => {
                    self.set_pending_to(Listening::Refused);
                    let _ = until(&*shared.env, again, shared.topics.changed()).await;
                }
                _ => {
                    self.all_refused = None;
                    if !shared.topics.all().is_empty() {
                        return;
                    }
                    shared.topics.changed().await;
                }
            }
        }
    }

    fn set_pending_to(&self, listening: Listening) {
        for topic in self.shared.topics.all() {
            if topic.listening() == Listening::Pending {
                topic.set(listening);
            }
        }
    }

    /// One connection's life; returns why it ended.
    async fn session(&mut self, connection: &mut Connection) -> Cause {
        let messages = connection.client.message_rx();
        let session = Session {
            shared: Arc::clone(&self.shared),
            client: connection.client.clone(),
            by_wire: Mutex::default(),
            tokens: AtomicU64::new(0),
        };
        tokio::select! {
            biased;
            why = connection.ended() => why,
            why = session.pump(messages) => why,
            result = self.follow(&session) => match result {
                Ok(never) => match never {},
                Err(why) => why,
            },
        }
    }

    /// Brings the server's subscriptions after the topics, again and again.
    async fn follow(&mut self, session: &Session) -> Result<std::convert::Infallible, Cause> {
        let shared = Arc::clone(&self.shared);
        let mut live = BTreeSet::new();
        loop {
            let topics = shared.topics.all();
            let wanted: BTreeSet<_> = topics.iter().map(|topic| topic.channel().clone()).collect();
            let left: Vec<_> = live.difference(&wanted).cloned().collect();
            for batch in batches(&left, session.batch()) {
                if let Some(words) = session.unsubscribe(&batch).await? {
                    // Then the server goes on telling us what we do not need.
                    tracing::debug!(target: "leasehold", %words, "cannot unsubscribe");
                }
                for channel in &batch {
                    live.remove(channel);
                }
            }

            let now = shared.env.now();
            self.refused
                .retain(|channel, again| now < *again && wanted.contains(channel));
            let mut new = Vec::new();
            for topic in &topics {
                let listening = topic.listening();
                if live.contains(topic.channel()) {
                    if listening != Listening::Live {
                        topic.set(Listening::Live);
                        topic.wake();
                    }
                } else if self.refused.contains_key(topic.channel()) {
                    if listening != Listening::Refused {
                        topic.set(Listening::Refused);
                    }
                } else {
                    new.push(topic.channel().clone());
                }
            }
            for batch in batches(&new, session.batch()) {
                self.subscribe(session, batch, &mut live).await?;
            }

            let next = later(shared.env.now(), PING_INTERVAL);
            if until(&*shared.env, next, shared.topics.changed())
                .await
                .is_none()
            {
                session.confirm().await?;
            }
        }
    }

    /// Subscribes to all of `batch`; where the server refuses, to parts of it, until it is known
    /// which channels it will not have.
    async fn subscribe(
        &mut self,
        session: &Session,
        batch: Vec<Channel>,
        live: &mut BTreeSet<Channel>,
    ) -> Result<(), Cause> {
        let mut refusals = 0;
        let mut rest = vec![batch];
        while let Some(mut batch) = rest.pop() {
            let Some(words) = session.subscribe(&batch).await? else {
                for channel in batch {
                    // By channel: the topic may be another by now.
                    if let Some(topic) = self.shared.topics.get(&channel) {
                        topic.set(Listening::Live);
                        topic.wake();
                    }
                    live.insert(channel);
                }
                continue;
            };
            if concerns_command(&words) {
                self.refuse_all(&words);
                return Err(Cause::new(words));
            }
            if batch.len() > 1 {
                // By turns, not by halves: the first ones tried alone are then from all over the
                // batch, and say something about the rest.
                let mut turn = 0;
                let even;
                (even, batch) = batch.into_iter().partition(|_| {
                    turn += 1;
                    turn % 2 == 1
                });
                rest.push(batch);
                rest.push(even);
                continue;
            }
            refusals += 1;
            if live.is_empty() && refusals == HOPELESS_AFTER && !session.sharded() {
                self.refuse_all(&words);
                return Err(Cause::new(words));
            }
            self.warn(&words);
            let again = later(self.shared.env.now(), ASK_AGAIN);
            for channel in batch {
                if let Some(topic) = self.shared.topics.get(&channel) {
                    topic.set(Listening::Refused);
                }
                self.refused.insert(channel, again);
            }
        }
        Ok(())
    }

    fn refuse_all(&mut self, words: &str) {
        self.warn(words);
        self.all_refused = Some(later(self.shared.env.now(), ASK_AGAIN));
        self.set_pending_to(Listening::Refused);
    }

    fn warn(&mut self, words: &str) {
        if !std::mem::replace(&mut self.warned, true) {
            let channel = Channel::Lock(Arc::from(""));
            let channel = self.shared.config.scheme.channel(&channel);
            let prefix = channel.split('{').next().unwrap_or_default();
            tracing::warn!(target: "leasehold", server = words,
                "the server refuses to tell of releases, waiters will poll: the user needs \
                 `&{prefix}*`, `+subscribe`, `+unsubscribe` and `+ping` (with sharded messages \
                 `+ssubscribe` and `+sunsubscribe`)"
            );
        }
    }
}

/// One connection and what it listens to.
struct Session {
    shared: Arc<Shared>,
    client: Client,
    /// Channels by what they are called on the wire, from before that is subscribed until after it is
    /// unsubscribed. `x` and `{x}` share one, as with Redisson.
    by_wire: Mutex<HashMap<String, BTreeSet<Channel>>>,
    tokens: AtomicU64,
}

impl Session {
    /// Hands each message to its topic.
    async fn pump(&self, mut messages: broadcast::Receiver<Message>) -> Cause {
        let topics = &self.shared.topics;
        loop {
            match messages.recv().await {
                Ok(message) => {
                    let channels = self.by_wire.lock().get(&*message.channel).cloned();
                    for channel in channels.into_iter().flatten() {
                        if let Some(topic) = topics.get(&channel) {
                            topic.wake();
                        }
                    }
                }
                Err(broadcast::error::RecvError::Lagged(missed)) => {
                    tracing::debug!(target: "leasehold", missed, "messages missed");
                    topics.wake_all();
                }
                Err(broadcast::error::RecvError::Closed) => {
                    return Cause::new("no more messages");
                }
            }
        }
    }

    fn sharded(&self) -> bool {
        self.shared.publish == Publish::Sharded
    }

    /// Channels per command. Sharded: fred mixes up replies with more than one.
    fn batch(&self) -> usize {
        if self.sharded() { 1 } else { BATCH_CHANNELS }
    }

    /// `Some` of the server's words when it refuses.
    async fn subscribe(&self, channels: &[Channel]) -> Result<Option<String>, Cause> {
        let wires = self.wires(channels);
        {
            let mut known = self.by_wire.lock();
            for (wire, channel) in wires.iter().zip(channels) {
                let all = known.entry(wire.clone()).or_default();
                all.insert(channel.clone());
            }
        }
        let client = self.client.with_options(&self.options());
        let refused = if self.sharded() {
            // Answered by itself, error or not.
            self.bounded(client.ssubscribe(wires.clone())).await?
        } else {
            match self.bounded(client.subscribe(wires.clone())).await? {
                None => self.confirm().await?,
                refused => refused,
            }
        };
        if refused.is_some() {
            self.forget(channels);
        }
        Ok(refused)
    }

    async fn unsubscribe(&self, channels: &[Channel]) -> Result<Option<String>, Cause> {
        let wires = self.wires_of_these_alone(channels);
        // Without a channel it would mean all of them.
        if wires.is_empty() {
            self.forget(channels);
            return Ok(None);
        }
        let client = self.client.with_options(&self.options());
        let refused = if self.sharded() {
            self.bounded(client.sunsubscribe(wires.clone())).await?
        } else {
            self.bounded(client.unsubscribe(wires.clone())).await?
        };
        let refused = match refused {
            None => self.confirm().await?,
            refused => refused,
        };
        self.forget(channels);
        Ok(refused)
    }

    /// Completes when everything before has been executed and answered, with the first error reply
    /// to it. An error reply takes the place of the reply to our `PING`; that one then comes as the
    /// answer to the next `PING`, or to nothing. Only a token that comes back to its own `PING`
    /// proves that nothing is outstanding.
    async fn confirm(&self) -> Result<Option<String>, Cause> {
        let env = &*self.shared.env;
        let mut refused = None;
        for round in 0..OUT_OF_STEP {
            let token = format!("leasehold-{}", self.tokens.fetch_add(1, Ordering::Relaxed));
            let deadline = later(env.now(), self.shared.config.command_timeout);
            match ask(
                env,
                &self.client,
                "PING",
                vec![token.as_str().into()],
                deadline,
            )
            .await
            {
                Ok(reply) if echoes(&reply, &token) => return Ok(refused),
                // One reply behind. It has to come while no `PING` waits, or we stay behind.
                Ok(_) => {
                    let pause = later(env.now(), ONE_BEHIND * (1 << round));
                    env.sleep_until(pause).await;
                }
                Err(Fault::Server(words)) => {
                    // No `PING` will ever prove anything.
                    if concerns_command(&words) && words.contains("'ping'") {
                        return Ok(Some(words));
                    }
                    refused.get_or_insert(words);
                }
                Err(fault) => return Err(fault.cause()),
            }
        }
        Err(Cause::new(
            "replies on the connection for messages are out of step",
        ))
    }

    async fn bounded(
        &self,
        command: impl Future<Output = Result<(), FredError>>,
    ) -> Result<Option<String>, Cause> {
        let env = &*self.shared.env;
        let deadline = later(env.now(), self.shared.config.command_timeout);
        match until(env, deadline, Box::pin(command)).await {
            Some(Ok(())) => Ok(None),
            Some(Err(error)) => match Fault::from_fred(&error) {
                Fault::Server(words) => Ok(Some(words)),
                fault => Err(fault.cause()),
            },
            None => Err(Fault::TimedOut.cause()),
        }
    }

    fn options(&self) -> fred::types::config::Options {
        one_attempt(self.shared.config.command_timeout)
    }

    fn wires(&self, channels: &[Channel]) -> Vec<String> {
        let scheme = &self.shared.config.scheme;
        channels
            .iter()
            .map(|channel| scheme.channel(channel))
            .collect()
    }

    /// Those on which nobody else is left to listen.
    fn wires_of_these_alone(&self, channels: &[Channel]) -> Vec<String> {
        let known = self.by_wire.lock();
        let mut wires = self.wires(channels);
        wires.sort_unstable();
        wires.dedup();
        wires.retain(|wire| {
            known
                .get(wire)
                .is_none_or(|all| all.iter().all(|channel| channels.contains(channel)))
        });
        wires
    }

    fn forget(&self, channels: &[Channel]) {
        let mut known = self.by_wire.lock();
        for (wire, channel) in self.wires(channels).into_iter().zip(channels) {
            if let Some(all) = known.get_mut(&wire) {
                all.remove(channel);
                if all.is_empty() {
                    known.remove(&wire);
                }
            }
        }
    }
}

/// Whether a command as such is refused, not a channel.
fn concerns_command(words: &str) -> bool {
    words.contains("no permissions to run the '") || words.starts_with("ERR unknown command")
}

/// `["pong", token]` while subscribed, else the token alone.
fn echoes(reply: &Value, token: &str) -> bool {
    let reply = match reply {
        Value::Array(parts) => parts.last(),
        other => Some(other),
    };
    reply.is_some_and(|reply| reply.as_str().is_some_and(|text| text == token))
}

/// Pieces of at most `most` channels, and not too many bytes, for one command each.
fn batches(channels: &[Channel], most: usize) -> Vec<Vec<Channel>> {
    let mut batches = Vec::new();
    let mut batch = Vec::new();
    let mut bytes = 0;
    for channel in channels {
        let length = channel.name().len();
        if batch.len() == most || bytes + length > BATCH_BYTES && !batch.is_empty() {
            batches.push(std::mem::take(&mut batch));
            bytes = 0;
        }
        bytes += length;
        batch.push(channel.clone());
    }
    if !batch.is_empty() {
        batches.push(batch);
    }
    batches
}

/// Messages that may wait to be read; more, and everybody is woken instead.
const MESSAGES: usize = 1024;

const BATCH_CHANNELS: usize = 500;
const BATCH_BYTES: usize = 64 * 1024;

/// While somebody listens: how soon a dead connection is noticed, together with a command timeout.
const PING_INTERVAL: Duration = Duration::from_millis(1500);

/// `PING`s in a row that may come back with another's token.
const OUT_OF_STEP: usize = 8;

/// First wait for a reply that is one behind; then doubled.
const ONE_BEHIND: Duration = Duration::from_millis(1);

/// Refusals in a row, and nothing else, after which no more channels are tried.
const HOPELESS_AFTER: usize = 8;

/// How long a refusal is believed: rules may change.
const ASK_AGAIN: Duration = Duration::from_secs(30);

/// A connection that lasted this long was a good one.
const LONG_ENOUGH: Duration = Duration::from_millis(200);
