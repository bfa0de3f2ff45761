//! Scripts on the wire: which one does a verb, what goes in, what comes out.
//!
//! Each script is a file in `lua/`, with `prelude.lua` before it. This room alone knows the order
//! of their arguments and the numbers of their answers.

use std::fmt::{Display, Write as _};
use std::sync::LazyLock;

use fred::bytes::Bytes;
use fred::types::Value;

use crate::key::KeyScheme;
use crate::kind::Kind;
use crate::store::{Answer, Instead, Op, OwnerId, Refusal, RefusalKind, Stay, TokenRule, Verb};

/// A script and the hash the server knows it by.
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) text: String,
    pub(crate) sha: String,
}

impl Script {
    pub(crate) fn new(text: String) -> Self {
        let sha = fred::util::sha1_hash(&text);
        Self { text, sha }
    }

    fn with_prelude(body: &str) -> Self {
        Self::new(format!("{PRELUDE}\n{body}"))
    }

    /// What the script shares with others comes before it, in this order.
    fn of(parts: &[&str]) -> Self {
        Self::with_prelude(&parts.join("\n"))
    }

    fn of_both_sides(body: &str) -> Self {
        Self::of(&[TOKENS, RW, body])
    }

    /// The same script, told the time (µs) by its last argument instead of the server.
    #[cfg(test)]
    pub(crate) fn with_time_as_argument(&self) -> Self {
        const READING: &str = "redis.pcall('TIME')";
        assert_eq!(self.text.matches(READING).count(), 1, "one reading of time");
        Self::new(self.text.replace(READING, "{0, ARGV[#ARGV]}"))
    }
}

/// The script that does ops like this one.
pub(crate) fn script_for(op: &Op) -> &'static Script {
    match (op.kind, &op.verb) {
        (Kind::Plain, Verb::Acquire { .. }) => &SCRIPTS.acquire,
        (Kind::Plain, Verb::Release { .. }) => &SCRIPTS.release,
        (Kind::Plain, Verb::ForceRelease { .. }) => &SCRIPTS.force_release,
        (Kind::Read, Verb::Acquire { .. }) => &SCRIPTS.read_acquire,
        (Kind::Write, Verb::Acquire { .. }) => &SCRIPTS.write_acquire,
        (Kind::Read | Kind::Write, Verb::Release { .. }) => &SCRIPTS.rw_release,
        (Kind::Read | Kind::Write, Verb::Renew { .. }) => &SCRIPTS.rw_renew,
        (Kind::Read | Kind::Write, Verb::ForceRelease { .. }) => &SCRIPTS.rw_force_release,
        // No plain hold has a side to go to, and none of its owner ids is found.
        (_, Verb::Downgrade { .. }) => &SCRIPTS.rw_downgrade,
        (_, Verb::Upgrade { .. }) => &SCRIPTS.rw_upgrade,
        (Kind::Fair, Verb::Acquire { .. }) => &SCRIPTS.fair_acquire,
        (Kind::Fair, Verb::Release { .. }) => &SCRIPTS.fair_release,
        (Kind::Fair, Verb::ForceRelease { .. }) => &SCRIPTS.fair_force_release,
        // The same of both: the hash alone is looked at.
        (Kind::Plain | Kind::Fair, Verb::Renew { .. }) => &SCRIPTS.renew,
        // Also from one writer to the next, of which nobody else is told: the mode stays as it is.
        (_, Verb::HandOff { .. }) => &SCRIPTS.hand_off,
        // There is no other queue.
        (_, Verb::Enqueue { .. }) => &SCRIPTS.fair_enqueue,
        (_, Verb::Beat { .. }) => &SCRIPTS.fair_beat,
        // One counter, whatever the name is used as.
        (_, Verb::Remember { .. }) => &SCRIPTS.remember,
    }
}

/// The script that tells the server's time; called with no keys and [`clock_args`].
pub(crate) fn clock() -> &'static Script {
    &SCRIPTS.clock
}

/// All scripts by file name, for loading them ahead and for tests.
#[cfg(test)]
pub(crate) fn all() -> [(&'static str, &'static Script); 19] {
    [
        ("lock_acquire", &SCRIPTS.acquire),
        ("lock_release", &SCRIPTS.release),
        ("lock_renew", &SCRIPTS.renew),
        ("lock_hand_off", &SCRIPTS.hand_off),
        ("lock_force_release", &SCRIPTS.force_release),
        ("lock_remember", &SCRIPTS.remember),
        ("read_acquire", &SCRIPTS.read_acquire),
        ("write_acquire", &SCRIPTS.write_acquire),
        ("rw_release", &SCRIPTS.rw_release),
        ("rw_renew", &SCRIPTS.rw_renew),
        ("rw_downgrade", &SCRIPTS.rw_downgrade),
        ("rw_upgrade", &SCRIPTS.rw_upgrade),
        ("rw_force_release", &SCRIPTS.rw_force_release),
        ("fair_acquire", &SCRIPTS.fair_acquire),
        ("fair_enqueue", &SCRIPTS.fair_enqueue),
        ("fair_beat", &SCRIPTS.fair_beat),
        ("fair_release", &SCRIPTS.fair_release),
        ("fair_force_release", &SCRIPTS.fair_force_release),
        ("clock", &SCRIPTS.clock),
    ]
}

/// How a release is told to those who wait.
///
/// Plain and sharded messages are separate worlds: all clients of a name must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Publish {
    Plain,
    Sharded,
    Both,
    Off,
}

impl Publish {
    fn as_arg(self) -> &'static str {
        match self {
            Self::Plain => "PLAIN",
            Self::Sharded => "SHARDED",
            Self::Both => "BOTH",
            Self::Off => "OFF",
        }
    }
}

/// Many short texts in one buffer, so that not each is allocated by itself.
#[derive(Clone, Debug, Default)]
pub(crate) struct Texts {
    all: String,
    ends: Vec<usize>,
}

impl Texts {
    pub(crate) fn push(&mut self, text: impl Display) {
        // Writing to a string cannot fail.
        let _ = write!(self.all, "{text}");
        self.ends.push(self.all.len());
    }

    fn extend<T: Display>(&mut self, texts: impl IntoIterator<Item = T>) {
        for text in texts {
            self.push(text);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// As arguments of a command, all in one piece of memory.
    pub(crate) fn values(&self) -> impl Iterator<Item = Value> {
        let all = Bytes::copy_from_slice(self.all.as_bytes());
        self.ranges()
            .map(move |(from, to)| Value::Bytes(all.slice(from..to)))
    }

    #[cfg(test)]
    pub(crate) fn to_strings(&self) -> Vec<String> {
        self.ranges()
            .map(|(from, to)| self.all[from..to].to_owned())
            .collect()
    }

    fn ranges(&self) -> impl Iterator<Item = (usize, usize)> {
        let mut from = 0;
        self.ends
            .iter()
            .map(move |&to| (std::mem::replace(&mut from, to), to))
    }
}

/// `KEYS` and `ARGV` of a call. `ops` are of one kind and one verb, at least one.
pub(crate) fn encode(
    scheme: &KeyScheme,
    publish: Publish,
    attempt: u64,
    deadline_us: u64,
    ops: &[Op],
) -> (Texts, Texts) {
    let (mut keys, mut args) = (Texts::default(), Texts::default());
    args.push(attempt);
    args.push(deadline_us.min(MAX_NUMBER));
    if ops.first().is_some_and(publishes) {
        args.push(publish.as_arg());
    }
    if ops.first().is_some_and(tells_exceptions) {
        encode_renewals(scheme, ops, &mut keys, &mut args);
        return (keys, args);
    }
    for op in ops {
        encode_op(scheme, op, &mut keys, &mut args);
        if publishes(op) {
            args.push(scheme.channel(&op.kind.channel(&op.name)));
        }
    }
    (keys, args)
}

/// Renewals of holds that are one hash: count and lease are those of the first, where not said otherwise.
fn encode_renewals(scheme: &KeyScheme, ops: &[Op], keys: &mut Texts, args: &mut Texts) {
    let renewals = || {
        ops.iter().filter_map(|op| match &op.verb {
            Verb::Renew {
                owner,
                count,
                lease_ms,
            } => Some((&op.name, owner, (count, lease_ms))),
            _ => None,
        })
    };
    let Some((_, _, (count, lease_ms))) = renewals().next() else {
        return;
    };
    args.push(count);
    args.push(lease_ms);
    for (name, owner, _) in renewals() {
        keys.push(scheme.hash(name));
        args.push(owner);
    }
    for (number, (_, _, others)) in (1..).zip(renewals()) {
        if others != (count, lease_ms) {
            let number: usize = number;
            args.push(number);
            args.push(others.0);
            args.push(others.1);
        }
    }
}

/// The keys that are the same whatever the owner.
fn encode_keys(scheme: &KeyScheme, op: &Op, keys: &mut Texts) {
    keys.push(scheme.hash(&op.name));
    if let Verb::Acquire { .. }
    | Verb::Enqueue { .. }
    | Verb::HandOff { .. }
    | Verb::Upgrade { .. } = op.verb
    {
        keys.push(scheme.token(&op.name));
    }
    if knows_the_queue(op) {
        keys.extend(scheme.queue(&op.name));
    }
}

/// What one op brings, but for its channel.
fn encode_op(scheme: &KeyScheme, op: &Op, keys: &mut Texts, args: &mut Texts) {
    if let Verb::Remember { lease_ms, token } = &op.verb {
        keys.push(scheme.token(&op.name));
        args.push(lease_ms);
        args.extend(token_args(token));
        return;
    }
    encode_keys(scheme, op, keys);
    // What the scripts of the read/write lock need besides.
    let rw = op.kind.sides().contains(&Kind::Write);
    let own = |owner: &OwnerId| rw.then(|| scheme.reader(&op.name, *owner));
    let readers = || rw.then(|| scheme.readers(&op.name));
    match &op.verb {
        Verb::Acquire {
            owner,
            count,
            lease_ms,
            token,
        } => {
            keys.extend(own(owner));
            args.push(owner);
            args.push(count);
            args.push(lease_ms);
            args.extend(token_args(token));
            args.extend(readers());
        }
        Verb::Release { owner, count, also } => {
            keys.extend(own(owner));
            args.push(owner);
            args.push(count);
            args.push(also.map(|also| also.to_string()).unwrap_or_default());
            args.extend(readers());
        }
        Verb::Renew {
            owner,
            count,
            lease_ms,
        } => {
            keys.extend(own(owner));
            args.push(owner);
            args.push(count);
            args.push(lease_ms);
            args.extend(readers());
        }
        Verb::HandOff {
            from,
            to,
            lease_ms,
            token,
        } => {
            let field = |owner: &OwnerId| if rw { writer(owner) } else { owner.to_string() };
            args.extend([field(from), field(to), lease_ms.to_string()]);
            args.extend(token_args(token));
            args.push(token.reserve);
        }
        Verb::Downgrade {
            owner,
            count,
            lease_ms,
        } => {
            keys.push(scheme.reader(&op.name, *owner));
            args.extend([owner.to_string(), count.to_string(), lease_ms.to_string()]);
        }
        Verb::Upgrade {
            from,
            to,
            lease_ms,
            token,
        } => {
            keys.push(scheme.reader(&op.name, *from));
            args.extend([from.to_string(), to.to_string(), lease_ms.to_string()]);
            args.extend(token_args(token));
            args.push(scheme.readers(&op.name));
        }
        Verb::ForceRelease { owner } => {
            args.push(owner);
            args.extend(readers());
        }
        Verb::Enqueue {
            owner,
            lease_ms,
            token,
            stay,
        } => {
            args.extend([owner.to_string(), lease_ms.to_string()]);
            args.extend(token_args(token));
            args.extend(stay_args(stay));
        }
        Verb::Beat { owner, stay } => {
            args.push(owner);
            args.extend(stay_args(stay));
        }
        // Done above.
        Verb::Remember { .. } => {}
    }
}

/// Whether its script answers only for those it did something else with than it was asked to.
fn tells_exceptions(op: &Op) -> bool {
    matches!(op.verb, Verb::Renew { .. }) && !op.kind.sides().contains(&Kind::Write)
}

/// Whether its script may have something to tell those who wait.
fn publishes(op: &Op) -> bool {
    match op.verb {
        Verb::Release { .. } | Verb::ForceRelease { .. } | Verb::Downgrade { .. } => true,
        Verb::Renew { .. }
        | Verb::HandOff { .. }
        | Verb::Upgrade { .. }
        | Verb::Remember { .. } => false,
        Verb::Acquire { .. } | Verb::Enqueue { .. } | Verb::Beat { .. } => knows_the_queue(op),
    }
}

/// Whether its script is given the keys of a queue.
fn knows_the_queue(op: &Op) -> bool {
    match op.verb {
        Verb::Enqueue { .. } | Verb::Beat { .. } => true,
        Verb::Renew { .. }
        | Verb::HandOff { .. }
        | Verb::Downgrade { .. }
        | Verb::Upgrade { .. }
        | Verb::Remember { .. } => false,
        Verb::Acquire { .. } | Verb::Release { .. } | Verb::ForceRelease { .. } => {
            op.kind == Kind::Fair
        }
    }
}

fn stay_args(stay: &Stay) -> [u64; 2] {
    [stay.beat_ms, stay.wait_ms]
}

fn token_args(rule: &TokenRule) -> [u64; 2] {
    let retention_ms = rule.retention_ms.map_or(0, |ms| ms.clamp(1, MAX_NUMBER));
    [rule.floor, retention_ms]
}

/// The field of a read/write lock's writer.
fn writer(owner: &OwnerId) -> String {
    format!("{owner}:write")
}

/// `ARGV` of [`clock`].
pub(crate) fn clock_args(attempt: u64) -> Texts {
    let mut args = Texts::default();
    args.extend([attempt, 0]);
    args
}

/// What a script answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Decoded {
    /// The attempt it answers; another than ours means that replies are mixed up.
    pub(crate) attempt: u64,
    /// The server's clock when it ran, µs since 1970.
    pub(crate) server_now_us: u64,
    /// One per op, in order.
    pub(crate) answers: Vec<Answer>,
}

/// A reply that no script of ours gives.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed reply of a script: {0}")]
pub(crate) struct Malformed(String);

/// Reads the reply to a call with these `ops`; for [`clock`], none.
pub(crate) fn decode(value: &Value, ops: &[Op]) -> Result<Decoded, Malformed> {
    let Value::Array(items) = value else {
        return Err(Malformed(format!("{:?} for an array", value.kind())));
    };
    let [attempt, server_now_us, slots @ ..] = items.as_slice() else {
        return Err(Malformed(format!("{} items", items.len())));
    };
    let answers = if ops.first().is_some_and(tells_exceptions) {
        decode_exceptions(slots, ops)?
    } else {
        decode_all(slots, ops)?
    };
    Ok(Decoded {
        attempt: unsigned(attempt)?,
        server_now_us: unsigned(server_now_us)?,
        answers,
    })
}

fn decode_all(slots: &[Value], ops: &[Op]) -> Result<Vec<Answer>, Malformed> {
    if slots.len() != SLOTS * ops.len() {
        let (slots, ops) = (slots.len(), ops.len());
        return Err(Malformed(format!("{slots} slots for {ops} ops")));
    }
    slots
        .chunks_exact(SLOTS)
        .zip(ops)
        .map(|(slot, op)| decode_answer(slot, &op.verb))
        .collect()
}

/// The number of an op and its answer, in order; those not named were renewed by just their lease.
fn decode_exceptions(slots: &[Value], ops: &[Op]) -> Result<Vec<Answer>, Malformed> {
    let exceptions = slots.chunks_exact(1 + SLOTS);
    if !exceptions.remainder().is_empty() {
        return Err(Malformed(format!("{} slots for exceptions", slots.len())));
    }
    let mut exceptions = exceptions.peekable();
    let mut answers = Vec::with_capacity(ops.len());
    for (number, op) in (1..).zip(ops) {
        let of_this = |slot: &&[Value]| integer(&slot[0]) == Ok(number);
        answers.push(match (exceptions.next_if(of_this), &op.verb) {
            (Some(slot), verb) => decode_answer(&slot[1..], verb)?,
            (None, Verb::Renew { lease_ms, .. }) => Answer::Renewed {
                remaining_ms: *lease_ms,
            },
            (None, verb) => return Err(Malformed(format!("no answer to {verb:?}"))),
        });
    }
    match exceptions.next() {
        Some(slot) => Err(Malformed(format!("an answer to op {:?}", slot[0]))),
        None => Ok(answers),
    }
}

/// One triple, which must be an answer that `verb` can have.
fn decode_answer(slot: &[Value], verb: &Verb) -> Result<Answer, Malformed> {
    let [code, a, b] = slot else {
        return Err(Malformed(format!("{} slots for an answer", slot.len())));
    };
    Ok(match (integer(code)?, verb) {
        (
            1,
            Verb::Acquire { count: 1, .. }
            | Verb::HandOff { .. }
            | Verb::Upgrade { .. }
            | Verb::Enqueue { .. },
        ) => Answer::Granted {
            token: unsigned(a)?,
            remaining_ms: unsigned(b)?,
        },
        (2, Verb::Acquire { count: 1, .. } | Verb::Upgrade { .. }) => Answer::Taken {
            remaining_ms: left_or_none(a)?,
        },
        (
            3,
            Verb::Acquire { .. }
            | Verb::Enqueue { .. }
            | Verb::Beat { .. }
            | Verb::Renew { .. }
            | Verb::Release { count: 1.., .. }
            | Verb::HandOff { .. }
            | Verb::Downgrade { .. }
            | Verb::Upgrade { .. }
            | Verb::Remember { .. },
        ) => Answer::Late,
        (
            4,
            Verb::Acquire { count: 2.., .. }
            | Verb::Release { .. }
            | Verb::Renew { .. }
            | Verb::HandOff { .. }
            | Verb::Beat { .. }
            | Verb::Downgrade { .. }
            | Verb::Upgrade { .. },
        ) => Answer::Gone(match integer(a)? {
            0 => Instead::Free,
            1 => Instead::Taken,
            other => return Err(Malformed(format!("{other} instead of a hold"))),
        }),
        (5, Verb::Acquire { count: 2.., .. }) => Answer::Held {
            remaining_ms: unsigned(a)?,
        },
        (6, Verb::Release { count: 0, .. }) => Answer::Released {
            heard: unsigned(a)?,
        },
        (7, Verb::Release { count: 1.., .. } | Verb::Downgrade { .. }) => Answer::StillHeld {
            remaining_ms: unsigned(a)?,
        },
        (8, Verb::Renew { .. }) => Answer::Renewed {
            remaining_ms: unsigned(a)?,
        },
        (9, Verb::ForceRelease { .. }) => Answer::Removed,
        (10, Verb::ForceRelease { .. }) => Answer::Nothing,
        (11, _) => Answer::Refused(refusal(&text(a)?)),
        (12, Verb::Enqueue { .. } | Verb::Beat { .. }) => Answer::Queued {
            first: match integer(a)? {
                0 => false,
                1 => true,
                other => return Err(Malformed(format!("{other} for first or not"))),
            },
            remaining_ms: left_or_none(b)?,
        },
        (13, Verb::Remember { .. }) => Answer::Remembered {
            token: unsigned(a)?,
        },
        (other, _) => return Err(Malformed(format!("answer {other} to {verb:?}"))),
    })
}

/// A refusal from the server's words.
pub(crate) fn refusal(message: &str) -> Refusal {
    Refusal {
        kind: classify(message),
        message: plain_text(message).to_owned(),
    }
}

/// What kind of "no" the error text of a server (or of our scripts) is, by the word it begins with.
pub(crate) fn classify(message: &str) -> RefusalKind {
    let message = plain_text(message);
    // Inside a script some servers say this, after "ERR", where others say "NOPERM".
    if message.contains("The user executing the script")
        || message.contains("ACL failure in script")
    {
        return RefusalKind::Denied;
    }
    match message.split([' ', '\r', '\n']).next().unwrap_or_default() {
        "CONFLICT" | "WRONGTYPE" => RefusalKind::Conflict,
        "NOPERM" | "NOAUTH" | "WRONGPASS" => RefusalKind::Denied,
        "OOM" => RefusalKind::OutOfMemory,
        "READONLY" | "LOADING" | "MASTERDOWN" | "MISCONF" | "NOREPLICAS" | "BUSY"
        | "CLUSTERDOWN" | "TRYAGAIN" | "UNBLOCKED" => RefusalKind::Unavailable,
        _ => RefusalKind::Other,
    }
}

/// Without what Redis 6.2 puts before an error raised in a script: `@user_script: 12: -OOM ...`.
fn plain_text(message: &str) -> &str {
    let message = message.trim();
    let bare = message
        .strip_prefix("@user_script: ")
        .and_then(|rest| rest.split_once(": "))
        .map_or(message, |(_line, bare)| bare);
    bare.strip_prefix('-').unwrap_or(bare)
}

fn integer(value: &Value) -> Result<i64, Malformed> {
    match value {
        Value::Integer(number) => Ok(*number),
        Value::String(_) | Value::Bytes(_) => text(value)?
            .parse()
            .map_err(|_| Malformed("text for a number".to_owned())),
        other => Err(Malformed(format!("{:?} for a number", other.kind()))),
    }
}

fn unsigned(value: &Value) -> Result<u64, Malformed> {
    let number = integer(value)?;
    u64::try_from(number).map_err(|_| Malformed(format!("{number}, which is below zero")))
}

/// What is left, in ms; -1: it has no end.
fn left_or_none(value: &Value) -> Result<Option<u64>, Malformed> {
    match integer(value)? {
        -1 => Ok(None),
        _ => unsigned(value).map(Some),
    }
}

fn text(value: &Value) -> Result<String, Malformed> {
    match value {
        Value::String(text) => Ok(text.to_string()),
        Value::Bytes(bytes) => Ok(String::from_utf8_lossy(bytes).into_owned()),
        other => Err(Malformed(format!("{:?} for a text", other.kind()))),
    }
}

#[derive(Debug)]
struct Scripts {
    acquire: Script,
    release: Script,
    renew: Script,
    hand_off: Script,
    force_release: Script,
    remember: Script,
    read_acquire: Script,
    write_acquire: Script,
    rw_release: Script,
    rw_renew: Script,
    rw_downgrade: Script,
    rw_upgrade: Script,
    rw_force_release: Script,
    fair_acquire: Script,
    fair_enqueue: Script,
    fair_beat: Script,
    fair_release: Script,
    fair_force_release: Script,
    clock: Script,
}

static SCRIPTS: LazyLock<Scripts> = LazyLock::new(|| Scripts {
    acquire: Script::of(&[TOKENS, LEVELS, include_str!("lua/lock_acquire.lua")]),
    release: Script::of(&[LEVELS, include_str!("lua/lock_release.lua")]),
    renew: Script::with_prelude(include_str!("lua/lock_renew.lua")),
    hand_off: Script::of(&[TOKENS, include_str!("lua/lock_hand_off.lua")]),
    force_release: Script::with_prelude(include_str!("lua/lock_force_release.lua")),
    remember: Script::of(&[TOKENS, include_str!("lua/lock_remember.lua")]),
    read_acquire: Script::of_both_sides(include_str!("lua/read_acquire.lua")),
    write_acquire: Script::of_both_sides(include_str!("lua/write_acquire.lua")),
    rw_release: Script::of_both_sides(include_str!("lua/rw_release.lua")),
    rw_renew: Script::of_both_sides(include_str!("lua/rw_renew.lua")),
    rw_downgrade: Script::of_both_sides(include_str!("lua/rw_downgrade.lua")),
    rw_upgrade: Script::of_both_sides(include_str!("lua/rw_upgrade.lua")),
    rw_force_release: Script::of_both_sides(include_str!("lua/rw_force_release.lua")),
    fair_acquire: Script::of(&[TOKENS, LEVELS, QUEUE, include_str!("lua/fair_acquire.lua")]),
    fair_enqueue: Script::of(&[
        TOKENS,
        LEVELS,
        QUEUE,
        KEEPING,
        include_str!("lua/fair_enqueue.lua"),
    ]),
    fair_beat: Script::of(&[QUEUE, KEEPING, include_str!("lua/fair_beat.lua")]),
    fair_release: Script::of(&[LEVELS, QUEUE, include_str!("lua/fair_release.lua")]),
    fair_force_release: Script::of(&[QUEUE, include_str!("lua/fair_force_release.lua")]),
    clock: Script::with_prelude(include_str!("lua/clock.lua")),
});

const PRELUDE: &str = include_str!("lua/prelude.lua");

const TOKENS: &str = include_str!("lua/tokens.lua");

const RW: &str = include_str!("lua/rw.lua");
const LEVELS: &str = include_str!("lua/levels.lua");

const QUEUE: &str = include_str!("lua/queue.lua");

const KEEPING: &str = include_str!("lua/keeping.lua");

/// Values per answer in a reply.
const SLOTS: usize = 3;

/// Greatest number the scripts accept: below 2^53 - 2^40.
const MAX_NUMBER: u64 = (1 << 53) - (1 << 40) - 1;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use uuid::Uuid;

    use super::*;

    #[test]
    fn odd_replies_are_errors_and_never_a_panic() {
        let ops = [renewal(Kind::Write)];
        let number = Value::Integer;
        for odd in [
            Value::Null,
            Value::Integer(8),
            Value::Array(vec![]),
            Value::Array(vec![number(1), number(2)]),
            Value::Array(vec![number(1), number(-2), number(8), number(9), number(0)]),
            Value::Array(vec![number(1), number(2), number(1), number(9), number(0)]),
            Value::Array(vec![number(1), number(2), number(8), number(-9), number(0)]),
            Value::Array(vec![number(1), number(2), number(4), number(7), number(0)]),
            Value::Array(vec![number(1), number(2), number(99), number(7), number(0)]),
            Value::Array(vec![number(1), number(2), number(11), number(7), number(0)]),
            Value::Array(vec!["x".into(), number(2), number(8), number(9), number(0)]),
            Value::Array(vec![
                number(1),
                number(2),
                Value::Null,
                number(9),
                number(0),
            ]),
        ] {
            assert!(decode(&odd, &ops).is_err(), "{odd:?}");
        }
        let good = Value::Array(vec!["1".into(), number(2), number(8), number(9), number(0)]);
        let decoded = decode(&good, &ops).unwrap();
        assert_eq!(decoded.answers, [Answer::Renewed { remaining_ms: 9 }]);
    }

    #[test]
    fn an_op_that_is_not_named_was_renewed_as_asked_and_no_other_can_be() {
        let ops = [(); 3].map(|()| renewal(Kind::Plain));
        let reply = |slots: &[i64]| {
            let items = [1, 2].iter().chain(slots).copied();
            Value::Array(items.map(Value::Integer).collect())
        };
        let renewed = |remaining_ms| Answer::Renewed { remaining_ms };
        let answers = |slots| decode(&reply(slots), &ops).unwrap().answers;
        assert_eq!(answers(&[]), [(); 3].map(|()| renewed(1000)));
        assert_eq!(
            answers(&[2, 4, 0, 0, 3, 8, 9, 0]),
            [renewed(1000), Answer::Gone(Instead::Free), renewed(9)]
        );
        for odd in [
            &[1][..],
            &[1, 4, 0],
            &[0, 4, 0, 0],
            &[4, 4, 0, 0],
            &[-1, 4, 0, 0],
            &[2, 4, 0, 0, 1, 4, 0, 0],
            &[2, 4, 0, 0, 2, 4, 0, 0],
            &[2, 1, 7, 7],
        ] {
            assert!(decode(&reply(odd), &ops).is_err(), "{odd:?}");
        }
    }

    #[test]
    fn texts_come_out_as_they_went_in() {
        let mut texts = Texts::default();
        texts.extend(["a", "", "ü b"]);
        texts.push(7);
        assert_eq!(texts.len(), 4);
        assert_eq!(texts.to_strings(), ["a", "", "ü b", "7"]);
        let values: Vec<_> = texts.values().map(Value::into_string).collect();
        assert_eq!(
            values,
            ["a", "", "ü b", "7"].map(|text| Some(text.to_owned()))
        );
    }

    #[test]
    fn error_texts_are_told_apart_by_their_first_word() {
        use RefusalKind::{Conflict, Denied, Other, OutOfMemory, Unavailable};
        for (message, kind) in [
            (
                "OOM command not allowed when used memory > 'maxmemory'.",
                OutOfMemory,
            ),
            (
                "@user_script: 12: -OOM command not allowed.\r\n",
                OutOfMemory,
            ),
            (
                "NOPERM this user has no permissions to run the 'hset' command",
                Denied,
            ),
            (
                "@user_script: 31: -NOPERM The user executing the script can't run this",
                Denied,
            ),
            (
                "ERR The user executing the script can't run this command or subcommand (PTTL)",
                Denied,
            ),
            (
                "ERR ACL failure in script: User x has no permissions",
                Denied,
            ),
            ("NOAUTH Authentication required.", Denied),
            (
                "READONLY You can't write against a read only replica.",
                Unavailable,
            ),
            (
                "LOADING Redis is loading the dataset in memory",
                Unavailable,
            ),
            ("CLUSTERDOWN The cluster is down", Unavailable),
            ("WRONGTYPE Operation against a key", Conflict),
            ("ERR syntax error", Other),
            ("", Other),
        ] {
            assert_eq!(classify(message), kind, "{message}");
        }
    }

    fn renewal(kind: Kind) -> Op {
        Op {
            kind,
            name: Arc::from("job"),
            verb: Verb::Renew {
                owner: OwnerId::new(Uuid::nil(), 2),
                count: 1,
                lease_ms: 1000,
            },
        }
    }
}
