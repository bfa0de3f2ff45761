//! Lua against the model: the same ops on a real server and on `memory::apply`, which must agree in
//! every answer and in everything they leave behind.
//!
//! Random sequences run with the time as an argument, and waiting is done by shortening what is
//! left of every key, so that minutes pass in microseconds. Needs `redis-server` on the path, or
//! another server named by `LEASEHOLD_REDIS_SERVER`.

use std::borrow::Borrow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;

use fred::types::Value;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestRunner};
use tempfile::TempDir;
use uuid::Uuid;

use super::memory::{self, State};
use super::redis::script::{self, Decoded, Publish, Script};
use super::{Answer, Instead, Op, OwnerId, RefusalKind, TokenRule, Verb};
use crate::key::KeyScheme;

#[test]
fn lua_does_what_the_model_does() {
    let server = Server::start();
    let redis = RefCell::new(Redis::with_time_as_argument(server.connect()));
    let mut runner = TestRunner::new(Config {
        failure_persistence: None,
        ..Config::with_cases(CASES)
    });
    runner
        .run(&prop::collection::vec(any_step(), 1..25), |steps| {
            let mut redis = redis.borrow_mut();
            redis.connection.ask(&["FLUSHALL"]).unwrap();
            let mut both = Both::new(&mut redis);
            for step in &steps {
                both.run(step)?;
            }
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

/// A copy that arrives in the same moment finds its work done. (`lua_does_what_the_model_does`
/// carries this over to Lua.)
#[test]
fn a_second_copy_of_any_op_changes_nothing() {
    let mut runner = TestRunner::new(Config {
        failure_persistence: None,
        ..Config::with_cases(CASES)
    });
    runner
        .run(&prop::collection::vec(any_step(), 1..25), |steps| {
            let mut state = State::default();
            let mut now_us = EPOCH_US;
            for step in steps {
                match step {
                    Step::Call { ops, past } => {
                        let deadline_us = deadline(now_us, past);
                        for op in &ops {
                            let (first, _) = memory::apply(&mut state, now_us, deadline_us, op);
                            let left = everything(&mut state, now_us);
                            let (second, wake) = memory::apply(&mut state, now_us, deadline_us, op);
                            prop_assert_eq!(&left, &everything(&mut state, now_us));
                            prop_assert_eq!(wake, None);
                            match first {
                                Answer::Released => {
                                    prop_assert!(matches!(second, Answer::Gone(_)));
                                }
                                Answer::Removed => prop_assert_eq!(second, Answer::Nothing),
                                first => prop_assert_eq!(first, second),
                            }
                        }
                    }
                    Step::Again { .. } => {}
                    Step::Wait { ms } => now_us += ms * 1000,
                    Step::Foreign { name, what } => what.put_in_model(&mut state, name, now_us),
                }
            }
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn the_server_knows_each_script_by_our_hash() {
    let server = Server::start();
    let mut connection = server.connect();
    for (name, script) in script::all() {
        let sha = connection.ask(&["SCRIPT", "LOAD", &script.text]).unwrap();
        assert_eq!(text(&sha), script.sha, "{name}");
    }
}

#[test]
fn the_clock_script_tells_the_servers_time() {
    let server = Server::start();
    let mut connection = server.connect();
    let time = connection.ask(&["TIME"]).unwrap();
    let Value::Array(parts) = time else {
        panic!("{time:?}");
    };
    let seconds: u64 = text(&parts[0]).parse().unwrap();
    let reply = connection.eval(script::clock(), &[], &script::clock_args(7));
    let decoded = script::decode(&reply.unwrap(), &[]).unwrap();
    assert_eq!(decoded.attempt, 7);
    assert!((seconds..seconds + 60).contains(&(decoded.server_now_us / 1_000_000)));
}

#[test]
fn a_malformed_call_is_an_error_and_leaves_no_key() {
    let server = Server::start();
    let mut redis = Redis::new(server.connect());
    let good = |verb| script::encode(&KeyScheme::Redisson, Publish::Plain, 1, 2, &[op(0, verb)]);
    for (verb, numbers) in [
        (acquire(0, 1), vec![1, 3, 4, 5, 6]),
        (renew(0, 1), vec![1, 3, 4]),
        (release(0, 1), vec![1, 4]),
    ] {
        let (keys, args) = good(verb.clone());
        for at in numbers {
            for bad in ["", "x", "-1", "1.5", "nan", "inf", "9007199254740993"] {
                let mut args = args.clone();
                bad.clone_into(&mut args[at]);
                let reply = redis
                    .connection
                    .eval(script::script_for(&verb), &keys, &args);
                assert!(reply.is_err(), "{verb:?} {at} {bad:?}: {reply:?}");
            }
        }
        for (keys, args) in [
            (vec![], args.clone()),
            (keys, args[..args.len() - 1].to_vec()),
        ] {
            let reply = redis
                .connection
                .eval(script::script_for(&verb), &keys, &args);
            assert!(reply.is_err(), "{verb:?}: {reply:?}");
        }
    }
    assert_eq!(redis.keys(), 0);
}

#[test]
fn a_bad_op_answers_for_itself() {
    let server = Server::start();
    let mut redis = Redis::new(server.connect());
    redis.connection.ask(&["SET", "n1", "a string"]).unwrap();
    redis
        .connection
        .ask(&["SET", "redisson_lock_token:{n2}", "many"])
        .unwrap();
    let ops: Vec<_> = (0..4).map(|name| op(name, acquire(0, 1))).collect();
    let answers = redis.submit(&ops);
    assert!(matches!(answers[0], Answer::Granted { .. }));
    assert_eq!(refused(&answers[1]), RefusalKind::Conflict);
    assert_eq!(refused(&answers[2]), RefusalKind::Conflict);
    assert!(matches!(answers[3], Answer::Granted { .. }));
    assert_eq!(
        redis.connection.ask(&["EXISTS", "n2"]),
        Ok(Value::Integer(0))
    );
}

/// Lua prints numbers with 14 digits; a time in µs has 16.
#[test]
fn tokens_keep_all_their_digits() {
    let server = Server::start();
    let mut redis = Redis::new(server.connect());
    let key = "redisson_lock_token:{n0}";
    redis
        .connection
        .ask(&["SET", key, "8999999999999998"])
        .unwrap();
    let answers = redis.submit(&[op(0, acquire(0, 1))]);
    let token = 8_999_999_999_999_999;
    assert!(matches!(answers[0], Answer::Granted { token: t, .. } if t == token));
    assert_eq!(
        text(redis.connection.ask(&["GET", key]).unwrap()),
        token.to_string()
    );
    let again = redis.submit(&[op(0, acquire(0, 1))]);
    assert!(matches!(again[0], Answer::Granted { token: t, .. } if t == token));
}

#[test]
fn without_memory_nothing_is_taken_and_holds_go_on() {
    let server = Server::start();
    let mut redis = Redis::new(server.connect());
    redis.submit(&[op(0, acquire(0, 1)), op(0, acquire(0, 2))]);
    redis
        .connection
        .ask(&["CONFIG", "SET", "maxmemory", "1"])
        .unwrap();
    let taken = redis.submit(&[op(1, acquire(0, 1)), op(2, acquire(0, 1))]);
    assert_eq!(refused(&taken[0]), RefusalKind::OutOfMemory);
    assert_eq!(refused(&taken[1]), RefusalKind::OutOfMemory);
    let nested = redis.submit(&[op(0, acquire(0, 3))]);
    assert_eq!(refused(&nested[0]), RefusalKind::OutOfMemory);
    let inner = redis.submit(&[op(0, release(0, 1))]);
    assert!(matches!(inner[0], Answer::StillHeld { remaining_ms: 1.. }));
    let renewed = redis.submit(&[op(0, renew(0, 1))]);
    assert!(matches!(renewed[0], Answer::Renewed { remaining_ms: 1.. }));
    assert_eq!(redis.keys(), 2, "the hold and its counter");
    assert_eq!(redis.submit(&[op(0, release(0, 0))]), [Answer::Released]);
}

#[test]
fn a_missing_permission_is_named_and_leaves_nothing_held() {
    let server = Server::start();
    let mut admin = server.connect();
    for forbidden in ["pttl", "get", "set", "hset", "pexpire"] {
        let rule = format!("-{forbidden}");
        let rules = [
            "ACL", "SETUSER", forbidden, "on", "nopass", "~*", "&*", "+@all", &rule,
        ];
        admin.ask(&rules).unwrap();
        let mut redis = Redis::new(server.connect());
        redis.connection.ask(&["AUTH", forbidden, ""]).unwrap();
        let answers = redis.submit(&[op(0, acquire(0, 1))]);
        let Answer::Refused(refusal) = &answers[0] else {
            panic!("{forbidden}: {answers:?}");
        };
        assert_eq!(refusal.kind, RefusalKind::Denied, "{}", refusal.message);
        assert!(refusal.message.to_lowercase().contains(forbidden));
        assert_eq!(admin.ask(&["EXISTS", "n0"]), Ok(Value::Integer(0)));
    }
}

/// The looks and messages that surround a release decide nothing.
#[test]
fn a_release_needs_no_permission_but_its_own() {
    let server = Server::start();
    let rules = "+@all -exists -publish -spublish -hset";
    let mut admin = Redis::new(server.connect());
    admin.submit(&[op(0, acquire(0, 1))]);
    let mut setup = vec![
        "ACL",
        "SETUSER",
        "few",
        "on",
        "nopass",
        "~*",
        "resetchannels",
    ];
    setup.extend(rules.split(' '));
    if admin.connection.ask(&setup).is_err() {
        setup.retain(|rule| *rule != "-spublish"); // before 7.0
        admin.connection.ask(&setup).unwrap();
    }
    let mut redis = Redis::new(server.connect());
    redis.connection.ask(&["AUTH", "few", ""]).unwrap();
    let renewed = redis.submit(&[op(0, renew(0, 2))]);
    assert!(matches!(renewed[0], Answer::Renewed { .. }), "{renewed:?}");
    assert_eq!(redis.submit(&[op(0, release(0, 0))]), [Answer::Released]);
    let gone = [Answer::Gone(Instead::Free)];
    assert_eq!(redis.submit(&[op(0, release(0, 0))]), gone);
}

#[test]
fn a_server_that_takes_no_writes_is_unavailable() {
    let server = Server::start();
    let mut redis = Redis::new(server.connect());
    let min_replicas = ["CONFIG", "SET", "min-replicas-to-write", "1"];
    redis.connection.ask(&min_replicas).unwrap();
    let answers = redis.submit(&[op(0, acquire(0, 1))]);
    assert_eq!(refused(&answers[0]), RefusalKind::Unavailable);
    let min_replicas = ["CONFIG", "SET", "min-replicas-to-write", "0"];
    redis.connection.ask(&min_replicas).unwrap();
    redis
        .connection
        .ask(&["REPLICAOF", "127.0.0.1", "1"])
        .unwrap();
    let answers = redis.submit(&[op(0, acquire(0, 1))]);
    assert_eq!(refused(&answers[0]), RefusalKind::Unavailable);
}

#[test]
fn who_waits_is_told_when_the_lock_is_free_and_only_then() {
    let server = Server::start();
    let mut redis = Redis::new(server.connect());
    let mut waiter = server.connect();
    waiter
        .ask(&["SUBSCRIBE", "redisson_lock__channel:{n0}"])
        .unwrap();
    let told = ["message", "redisson_lock__channel:{n0}", "0"];
    for last in [
        release(0, 0),
        Verb::ForceRelease {
            owner: owner(0).to_string(),
        },
    ] {
        redis.submit(&[op(0, acquire(0, 1)), op(0, acquire(0, 2))]);
        redis.submit(&[op(0, release(0, 1)), op(0, release(1, 0))]);
        redis
            .connection
            .ask(&["PUBLISH", told[1], "not yet"])
            .unwrap();
        redis.submit(&[op(0, last)]);
        let Ok(Value::Array(first)) = waiter.read() else {
            panic!("no message");
        };
        assert_eq!(text(&first[2]), "not yet");
        let Ok(Value::Array(message)) = waiter.read() else {
            panic!("no message");
        };
        assert_eq!(message.iter().map(text).collect::<Vec<_>>(), told);
    }
}

/// A step of a random sequence.
#[derive(Clone, Debug)]
enum Step {
    /// One call; `past`: it comes after its deadline.
    Call { ops: Vec<Op>, past: bool },
    /// The call before it once more, perhaps after its deadline.
    Again { past: bool },
    /// Time goes by.
    Wait { ms: u64 },
    /// Somebody else writes.
    Foreign { name: usize, what: Foreign },
}

/// What others may do to our keys.
#[derive(Clone, Debug)]
enum Foreign {
    String,
    Hash {
        fields: Vec<(String, &'static str)>,
        ttl_ms: Option<u64>,
    },
    Delete,
    Persist,
    Counter(&'static str),
    CounterOfOtherType,
    DeleteCounter,
    PersistCounter,
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => (any_ops(), prop::bool::weighted(0.1)).prop_map(|(ops, past)| Step::Call { ops, past }),
        2 => any::<bool>().prop_map(|past| Step::Again { past }),
        2 => (1..400_000_u64).prop_map(|ms| Step::Wait { ms }),
        2 => (0..NAMES, any_foreign()).prop_map(|(name, what)| Step::Foreign { name, what }),
    ]
}

/// One to four ops of one verb.
fn any_ops() -> impl Strategy<Value = Vec<Op>> {
    let list = |verb: BoxedStrategy<Verb>| {
        prop::collection::vec(
            (0..NAMES, verb).prop_map(|(name, verb)| op(name, verb)),
            1..5,
        )
    };
    let counts = || prop_oneof![4 => Just(1_u32), 2 => 2..5_u32];
    let leases = || select(vec![60_000_u64, 120_000, 300_000]);
    let floors = || select(vec![0, 5, EPOCH_US + 7_000_000, TOKEN_END - 5_000_000_000]);
    let retentions = || select(vec![None, Some(1_000_u64), Some(200_000), Some(3_600_000)]);
    let acquire = (0..OWNERS, counts(), leases(), floors(), retentions());
    let acquire = acquire.prop_map(|(id, count, lease_ms, floor, retention_ms)| Verb::Acquire {
        owner: owner(id),
        count,
        lease_ms,
        token: TokenRule {
            floor,
            retention_ms,
        },
    });
    let release = (0..OWNERS, 0..4_u32, prop::option::of(0..OWNERS));
    let release = release.prop_map(|(id, count, also)| Verb::Release {
        owner: owner(id),
        count,
        also: also.map(owner),
    });
    let renew = (0..OWNERS, counts(), leases()).prop_map(|(id, count, lease_ms)| Verb::Renew {
        owner: owner(id),
        count,
        lease_ms,
    });
    let force = prop_oneof![
        (0..OWNERS).prop_map(|id| owner(id).to_string()),
        Just(java())
    ];
    let force = force.prop_map(|owner| Verb::ForceRelease { owner });
    prop_oneof![
        4 => list(acquire.boxed()),
        3 => list(release.boxed()),
        2 => list(renew.boxed()),
        1 => list(force.boxed()),
    ]
}

fn any_foreign() -> impl Strategy<Value = Foreign> {
    let field = (
        prop_oneof![
            4 => Just(java()),
            4 => (0..OWNERS).prop_map(|id| owner(id).to_string()),
            1 => select(vec!["mode", "x", ":1", "a:", "a:-", "a:1x", "b:c:9", "x:--1"])
                .prop_map(str::to_owned),
        ],
        prop_oneof![
            4 => Just("1"),
            1 => select(vec!["2", "0", "-1", "01", "1.0", "read", "", "99999999999999999999"]),
        ],
    );
    let crowd = (14..19_usize).prop_map(|size| {
        (0..size)
            .map(|thread| (format!("crowd:{thread}"), "1"))
            .collect()
    });
    let fields = prop_oneof![4 => prop::collection::vec(field, 1..3), 1 => crowd];
    let counters = select(vec![
        "0",
        "12",
        "007",
        "-3",
        "abc",
        "",
        " 5",
        "1e5",
        "0x10",
        "12.0",
        "1700000500000000",
        "9006099743113214",
        "9006099743113215",
        "9006099743113216",
        "9007199254740993",
        "99999999999999999999999999",
    ]);
    prop_oneof![
        1 => Just(Foreign::String),
        3 => (fields, prop::option::of(10_000..100_000_u64))
            .prop_map(|(fields, ttl_ms)| Foreign::Hash { fields, ttl_ms }),
        2 => Just(Foreign::Delete),
        2 => Just(Foreign::Persist),
        3 => counters.prop_map(Foreign::Counter),
        1 => Just(Foreign::CounterOfOtherType),
        2 => Just(Foreign::DeleteCounter),
        1 => Just(Foreign::PersistCounter),
    ]
}

impl Foreign {
    fn put_in_model(&self, state: &mut State, name: usize, now_us: u64) {
        let name = name_of(name);
        match self {
            Self::String => state.put(&name, memory::Value::Other, None),
            Self::Hash { fields, ttl_ms } => {
                let fields = fields
                    .iter()
                    .map(|(field, value)| (field.clone(), (*value).to_owned()))
                    .collect();
                let expires_ms = ttl_ms.map(|ms| now_us / 1000 + ms);
                state.put(&name, memory::Value::Hash(fields), expires_ms);
            }
            Self::Delete => state.delete(&name),
            Self::Persist => {
                if let Some(key) = state.key(&name, now_us).cloned() {
                    state.put(&name, key.value, None);
                }
            }
            Self::Counter(text) => state.put_counter(&name, (*text).to_owned(), None),
            Self::CounterOfOtherType => state.put_counter(&name, "a list".to_owned(), None),
            Self::DeleteCounter => state.delete_counter(&name),
            Self::PersistCounter => {
                if let Some(counter) = state.counter(&name, now_us).cloned() {
                    state.put_counter(&name, counter.text, None);
                }
            }
        }
    }

    fn put_in_redis(&self, connection: &mut Connection, name: usize) {
        let key = &*name_of(name);
        let counter = KeyScheme::Redisson.token(key);
        match self {
            Self::String => connection.send(&["SET", key, "a string"]),
            Self::Hash { fields, ttl_ms } => {
                connection.ask(&["DEL", key]).unwrap();
                for (field, value) in fields {
                    connection.ask(&["HSET", key, field, value]).unwrap();
                }
                match ttl_ms {
                    Some(ms) => connection.send(&["PEXPIRE", key, &ms.to_string()]),
                    None => connection.send(&["PING"]),
                }
            }
            Self::Delete => connection.send(&["DEL", key]),
            Self::Persist => connection.send(&["PERSIST", key]),
            Self::Counter(text) => connection.send(&["SET", &counter, text]),
            Self::CounterOfOtherType => {
                connection.ask(&["DEL", &counter]).unwrap();
                connection.send(&["RPUSH", &counter, "x"]);
            }
            Self::DeleteCounter => connection.send(&["DEL", &counter]),
            Self::PersistCounter => connection.send(&["PERSIST", &counter]),
        }
        connection.read().unwrap();
    }
}

/// The model and the server, side by side.
struct Both<'a> {
    redis: &'a mut Redis,
    state: State,
    now_us: u64,
    before: Option<(u64, Vec<Op>)>,
    attempt: u64,
}

impl<'a> Both<'a> {
    fn new(redis: &'a mut Redis) -> Self {
        Self {
            redis,
            state: State::default(),
            now_us: EPOCH_US,
            before: None,
            attempt: 0,
        }
    }

    fn run(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match step {
            Step::Call { ops, past } => {
                let deadline_us = deadline(self.now_us, *past);
                self.before = Some((deadline_us, ops.clone()));
                self.call(deadline_us, ops)?;
            }
            Step::Again { past } => {
                if let Some((mut deadline_us, ops)) = self.before.clone() {
                    if *past {
                        deadline_us = deadline(self.now_us, true);
                    }
                    self.call(deadline_us, &ops)?;
                }
            }
            Step::Wait { ms } => self.wait(*ms),
            Step::Foreign { name, what } => {
                what.put_in_model(&mut self.state, *name, self.now_us);
                what.put_in_redis(&mut self.redis.connection, *name);
            }
        }
        let model = everything(&mut self.state, self.now_us);
        let lua = self.redis.everything();
        for (model, lua) in model.iter().zip(&lua) {
            prop_assert_eq!(&model.fields, &lua.fields);
            prop_assert_eq!(&model.counter, &lua.counter);
            let ttls = [
                (model.ttl_ms, lua.ttl_ms),
                (model.counter_ttl_ms, lua.counter_ttl_ms),
            ];
            for (model, lua) in ttls {
                prop_assert!(is_near(model, lua), "model {:?}, lua {:?}", model, lua);
            }
        }
        Ok(())
    }

    fn call(&mut self, deadline_us: u64, ops: &[Op]) -> Result<(), TestCaseError> {
        self.attempt += 1;
        let decoded = self
            .redis
            .call(self.attempt, deadline_us, Some(self.now_us), ops);
        prop_assert_eq!(decoded.attempt, self.attempt);
        prop_assert_eq!(decoded.server_now_us, self.now_us);
        for (op, lua) in ops.iter().zip(decoded.answers) {
            let (model, _) = memory::apply(&mut self.state, self.now_us, deadline_us, op);
            let ((model, model_left), (lua, lua_left)) = (without_left(model), without_left(lua));
            prop_assert_eq!(model, lua, "{:?}", op);
            prop_assert!(
                is_near(model_left, lua_left),
                "model {:?}, lua {:?}: {:?}",
                model_left,
                lua_left,
                op
            );
        }
        Ok(())
    }

    /// Lets time pass, and a little more if that would end next to somebody's deadline.
    fn wait(&mut self, mut ms: u64) {
        let left: Vec<_> = everything(&mut self.state, self.now_us)
            .iter()
            .flat_map(|name| [name.ttl_ms, name.counter_ttl_ms])
            .flatten()
            .collect();
        while left
            .iter()
            .any(|left| left.abs_diff(ms) <= SAFE_DISTANCE_MS)
        {
            ms += SAFE_DISTANCE_MS;
        }
        self.now_us += ms * 1000;
        self.redis.shorten(ms);
    }
}

/// All there is of one name.
#[derive(Debug, PartialEq)]
struct Everything {
    /// `None`: no key; without fields: another type.
    fields: Option<BTreeMap<String, String>>,
    ttl_ms: Option<u64>,
    counter: Option<String>,
    counter_ttl_ms: Option<u64>,
}

fn everything(state: &mut State, now_us: u64) -> Vec<Everything> {
    let left = |expires_ms: Option<u64>| expires_ms.map(|at| at - now_us / 1000);
    (0..NAMES)
        .map(|name| {
            let name = name_of(name);
            let key = state.key(&name, now_us).cloned();
            let counter = state.counter(&name, now_us).cloned();
            Everything {
                ttl_ms: left(key.as_ref().and_then(|key| key.expires_ms)),
                fields: key.map(|key| match key.value {
                    memory::Value::Hash(fields) => fields,
                    memory::Value::Other => BTreeMap::new(),
                }),
                counter_ttl_ms: left(counter.as_ref().and_then(|counter| counter.expires_ms)),
                counter: counter.map(|counter| counter.text),
            }
        })
        .collect()
}

/// The answer with nothing left, and what was left. A refusal is compared by its kind.
fn without_left(mut answer: Answer) -> (Answer, Option<u64>) {
    let left = match &mut answer {
        Answer::Granted { remaining_ms, .. }
        | Answer::Taken {
            remaining_ms: Some(remaining_ms),
        }
        | Answer::Held { remaining_ms }
        | Answer::StillHeld { remaining_ms }
        | Answer::Renewed { remaining_ms } => Some(std::mem::take(remaining_ms)),
        Answer::Refused(refusal) => {
            refusal.message.clear();
            None
        }
        _ => None,
    };
    (answer, left)
}

/// The server's own clock runs on while a sequence is tried.
fn is_near(model: Option<u64>, lua: Option<u64>) -> bool {
    match (model, lua) {
        (Some(model), Some(lua)) => model.abs_diff(lua) < SAFE_DISTANCE_MS,
        (model, lua) => model == lua,
    }
}

/// Calls of our scripts on a server.
struct Redis {
    connection: Connection,
    time_as_argument: bool,
    dump: Script,
    shorten: Script,
}

impl Redis {
    fn new(connection: Connection) -> Self {
        Self {
            connection,
            time_as_argument: false,
            dump: Script::new(DUMP.to_owned()),
            shorten: Script::new(SHORTEN.to_owned()),
        }
    }

    fn with_time_as_argument(connection: Connection) -> Self {
        let mut redis = Self::new(connection);
        redis.time_as_argument = true;
        for (_, script) in script::all() {
            let text = script.with_time_as_argument().text;
            redis.connection.ask(&["SCRIPT", "LOAD", &text]).unwrap();
        }
        redis
    }

    /// As the store does it, with a deadline far away.
    fn submit(&mut self, ops: &[Op]) -> Vec<Answer> {
        self.call(1, u64::MAX, None, ops).answers
    }

    fn call(&mut self, attempt: u64, deadline_us: u64, now_us: Option<u64>, ops: &[Op]) -> Decoded {
        let (keys, mut args) = script::encode(
            &KeyScheme::Redisson,
            Publish::Plain,
            attempt,
            deadline_us,
            ops,
        );
        let script = script::script_for(&ops[0].verb);
        let reply = match now_us {
            None => self.connection.eval(script, &keys, &args),
            Some(now_us) => {
                args.push(now_us.to_string());
                let script = script.with_time_as_argument();
                self.connection.eval(&script, &keys, &args)
            }
        };
        script::decode(&reply.unwrap(), ops).unwrap()
    }

    fn keys(&mut self) -> usize {
        match self.connection.ask(&["DBSIZE"]) {
            Ok(Value::Integer(keys)) => usize::try_from(keys).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    fn everything(&mut self) -> Vec<Everything> {
        let reply = self.connection.eval(&self.dump, &all_keys(), &[]);
        let Ok(Value::Array(names)) = reply else {
            panic!("{reply:?}");
        };
        names
            .chunks_exact(4)
            .map(|name| Everything {
                fields: match &name[0] {
                    Value::Array(pairs) => Some(
                        pairs
                            .chunks_exact(2)
                            .map(|pair| (text(&pair[0]), text(&pair[1])))
                            .collect(),
                    ),
                    Value::Integer(1) => Some(BTreeMap::new()),
                    _ => None,
                },
                ttl_ms: ttl(&name[1]),
                counter: match &name[2] {
                    Value::Integer(0) => None,
                    value => Some(text(value)),
                },
                counter_ttl_ms: ttl(&name[3]),
            })
            .collect()
    }

    fn shorten(&mut self, ms: u64) {
        let args = [ms.to_string()];
        self.connection
            .eval(&self.shorten, &all_keys(), &args)
            .unwrap();
    }
}

/// A server of our own, ended when dropped.
struct Server {
    process: Child,
    _output: BufReader<ChildStdout>,
    dir: TempDir,
}

impl Server {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let binary = std::env::var("LEASEHOLD_REDIS_SERVER");
        let binary = binary.unwrap_or_else(|_| "redis-server".to_owned());
        let mut process = Command::new(&binary)
            .args(["--port", "0", "--save", "", "--unixsocket"])
            .arg(dir.path().join("socket"))
            .arg("--dir")
            .arg(dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|problem| {
                panic!(
                    "{binary}: {problem}; install a server (Debian: apt-get install redis-server) \
                     or name one in LEASEHOLD_REDIS_SERVER"
                )
            });
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        while !line.to_lowercase().contains("ready to accept connections") {
            line.clear();
            let read = output.read_line(&mut line).unwrap();
            assert!(read > 0, "{binary} ended while starting");
        }
        Self {
            process,
            _output: output,
            dir,
        }
    }

    fn connect(&self) -> Connection {
        let stream = UnixStream::connect(self.dir.path().join("socket")).unwrap();
        Connection {
            replies: BufReader::new(stream.try_clone().unwrap()),
            stream,
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A connection that waits for each reply: no client library, no runtime.
struct Connection {
    stream: UnixStream,
    replies: BufReader<UnixStream>,
}

impl Connection {
    fn send<S: AsRef<str>>(&mut self, parts: &[S]) {
        let mut bytes = format!("*{}\r\n", parts.len()).into_bytes();
        for part in parts.iter().map(AsRef::as_ref) {
            bytes.extend_from_slice(format!("${}\r\n", part.len()).as_bytes());
            bytes.extend_from_slice(part.as_bytes());
            bytes.extend_from_slice(b"\r\n");
        }
        self.stream.write_all(&bytes).unwrap();
    }

    fn ask<S: AsRef<str>>(&mut self, parts: &[S]) -> Result<Value, String> {
        self.send(parts);
        self.read()
    }

    /// By hash, and by text if the server does not know it.
    fn eval(&mut self, script: &Script, keys: &[String], args: &[String]) -> Result<Value, String> {
        let count = keys.len().to_string();
        let mut parts = vec!["EVALSHA", &script.sha, &count];
        parts.extend(keys.iter().chain(args).map(String::as_str));
        match self.ask(&parts) {
            Err(problem) if problem.starts_with("NOSCRIPT") => {
                parts[0] = "EVAL";
                parts[1] = &script.text;
                self.ask(&parts)
            }
            reply => reply,
        }
    }

    fn read(&mut self) -> Result<Value, String> {
        let mut line = String::new();
        self.replies.read_line(&mut line).unwrap();
        let (kind, rest) = line.trim_end().split_at(1);
        let number = || rest.parse::<i64>().unwrap();
        match kind {
            "+" => Ok(rest.into()),
            "-" => Err(rest.to_owned()),
            ":" => Ok(Value::Integer(number())),
            "$" => Ok(match usize::try_from(number()) {
                Err(_) => Value::Null,
                Ok(size) => {
                    let mut bytes = vec![0; size + 2];
                    self.replies.read_exact(&mut bytes).unwrap();
                    bytes.truncate(size);
                    String::from_utf8(bytes).unwrap().into()
                }
            }),
            "*" => (0..number())
                .map(|_| self.read())
                .collect::<Result<_, _>>()
                .map(Value::Array),
            other => panic!("{other:?}"),
        }
    }
}

fn op(name: usize, verb: Verb) -> Op {
    Op {
        name: name_of(name),
        verb,
    }
}

fn acquire(id: u64, count: u32) -> Verb {
    Verb::Acquire {
        owner: owner(id),
        count,
        lease_ms: 60_000,
        token: TokenRule {
            floor: 0,
            retention_ms: Some(3_600_000),
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

fn renew(id: u64, count: u32) -> Verb {
    Verb::Renew {
        owner: owner(id),
        count,
        lease_ms: 60_000,
    }
}

fn owner(id: u64) -> OwnerId {
    OwnerId::new(Uuid::from_u128(0xabc), id << 1)
}

/// The owner id of a Java thread, with a number that only Java gives.
fn java() -> String {
    "b983c153-7421-469a-addb-44fb92259a1b:-9223372036854775808".to_owned()
}

fn name_of(name: usize) -> Arc<str> {
    Arc::from(format!("n{name}"))
}

fn all_keys() -> Vec<String> {
    (0..NAMES)
        .map(name_of)
        .flat_map(|name| {
            [
                KeyScheme::Redisson.hash(&name),
                KeyScheme::Redisson.token(&name),
            ]
        })
        .collect()
}

fn deadline(now_us: u64, past: bool) -> u64 {
    if past { now_us - 1 } else { now_us + 1_000_000 }
}

fn refused(answer: &Answer) -> RefusalKind {
    match answer {
        Answer::Refused(refusal) => refusal.kind,
        other => panic!("{other:?} for a refusal"),
    }
}

fn ttl(value: &Value) -> Option<u64> {
    match value {
        Value::Integer(ms) => u64::try_from(*ms).ok(),
        other => panic!("{other:?}"),
    }
}

fn text(value: impl Borrow<Value>) -> String {
    value.borrow().as_string().unwrap()
}

/// For each lock and counter: fields (1: another type, 0: none), PTTL, text (0: none), PTTL.
const DUMP: &str = r"
local all = {}
for i = 1, #KEYS, 2 do
  local lock, counter = KEYS[i], KEYS[i + 1]
  local type_of_lock = redis.call('TYPE', lock).ok
  local type_of_counter = redis.call('TYPE', counter).ok
  local fields, text = 1, 'a list'
  if type_of_lock == 'hash' then fields = redis.call('HGETALL', lock) end
  if type_of_lock == 'none' then fields = 0 end
  if type_of_counter == 'string' then text = redis.call('GET', counter) end
  if type_of_counter == 'none' then text = 0 end
  for _, item in ipairs({fields, redis.call('PTTL', lock), text, redis.call('PTTL', counter)}) do
    all[#all + 1] = item
  end
end
return all
";

/// Lets ARGV[1] milliseconds pass for every key.
const SHORTEN: &str = r"
for _, key in ipairs(KEYS) do
  local left = redis.call('PTTL', key)
  if left >= 0 then
    redis.call('PEXPIRE', key, left - ARGV[1])
  end
end
";

const CASES: u32 = 1500;
const NAMES: usize = 3;
const OWNERS: u64 = 3;
const EPOCH_US: u64 = 1_700_000_000_000_000;
const TOKEN_END: u64 = (1 << 53) - (1 << 40);

/// Two clocks that differ by less than this agree; no wait ends this close to a deadline.
const SAFE_DISTANCE_MS: u64 = 1000;
