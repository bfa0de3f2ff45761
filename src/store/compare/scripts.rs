//! What the model cannot show: how the scripts meet a server that refuses.

use fred::types::Value;

use super::server::{Redis, Server, text};
use super::steps::{op, owner};
use crate::key::KeyScheme;
use crate::kind::Kind;
use crate::store::redis::script::{self, Publish};
use crate::store::{Answer, Instead, Op, RefusalKind, Stay, TokenRule, Verb};

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
    let reply = connection.eval(script::clock(), &[], &script::clock_args(7).to_strings());
    let decoded = script::decode(&reply.unwrap(), &[]).unwrap();
    assert_eq!(decoded.attempt, 7);
    assert!((seconds..seconds + 60).contains(&(decoded.server_now_us / 1_000_000)));
}

#[test]
fn a_malformed_call_is_an_error_and_leaves_no_key() {
    let server = Server::start();
    let mut redis = Redis::new(server.connect());
    let good = |op| {
        let (keys, args) = script::encode(&KeyScheme::Redisson, Publish::Plain, 1, 2, &[op]);
        (keys.to_strings(), args.to_strings())
    };
    for (op, numbers) in [
        (plain(0, acquire(0, 1)), vec![1, 3, 4, 5, 6]),
        (plain(0, renew(0, 1)), vec![1, 2, 3]),
        (plain(0, release(0, 1)), vec![1, 4]),
        (plain(0, hand_off(0, 1)), vec![1, 4, 5, 6]),
        (plain(0, remember(7)), vec![1, 2, 3, 4]),
        (fair(acquire(0, 1)), vec![1, 4, 5, 6, 7]),
        (fair(enqueue(0)), vec![1, 4, 5, 6, 7, 8]),
        (fair(beat(0)), vec![1, 4, 5]),
        (fair(release(0, 1)), vec![1, 4]),
    ] {
        let (keys, args) = good(op.clone());
        let verb = op.verb.clone();
        let script = script::script_for(&op);
        for at in numbers {
            for bad in ["", "x", "-1", "1.5", "nan", "inf", "9007199254740993"] {
                let mut args = args.clone();
                bad.clone_into(&mut args[at]);
                let reply = redis.connection.eval(script, &keys, &args);
                assert!(reply.is_err(), "{verb:?} {at} {bad:?}: {reply:?}");
            }
        }
        for (keys, args) in [
            (vec![], args.clone()),
            (keys, args[..args.len() - 1].to_vec()),
        ] {
            let reply = redis.connection.eval(script, &keys, &args);
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
    let ops: Vec<_> = (0..4).map(|name| plain(name, acquire(0, 1))).collect();
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
    let answers = redis.submit(&[plain(0, acquire(0, 1))]);
    let token = 8_999_999_999_999_999;
    assert!(matches!(answers[0], Answer::Granted { token: t, .. } if t == token));
    assert_eq!(
        text(redis.connection.ask(&["GET", key]).unwrap()),
        token.to_string()
    );
    let again = redis.submit(&[plain(0, acquire(0, 1))]);
    assert!(matches!(again[0], Answer::Granted { token: t, .. } if t == token));
}

/// Whoever gets the lock next is above what was remembered; what is below it already changes nothing, however
/// late it comes.
#[test]
fn a_remembered_token_is_never_lowered() {
    let server = Server::start();
    let mut redis = Redis::new(server.connect());
    let high = 8_000_000_000_000_001;
    assert_eq!(
        redis.submit(&[plain(0, remember(high)), plain(0, remember(high - 1))]),
        vec![Answer::Remembered { token: high }; 2]
    );
    let answers = redis.submit(&[plain(0, acquire(0, 1))]);
    assert!(matches!(answers[0], Answer::Granted { token, .. } if token == high + 1));
    let answers = redis.submit(&[plain(0, remember(high))]);
    assert_eq!(answers, [Answer::Remembered { token: high + 1 }]);
}

#[test]
fn without_memory_nothing_is_taken_and_holds_go_on() {
    let server = Server::start();
    let mut redis = Redis::new(server.connect());
    redis.submit(&[plain(0, acquire(0, 1)), plain(0, acquire(0, 2))]);
    redis
        .connection
        .ask(&["CONFIG", "SET", "maxmemory", "1"])
        .unwrap();
    let taken = redis.submit(&[plain(1, acquire(0, 1)), plain(2, acquire(0, 1))]);
    assert_eq!(refused(&taken[0]), RefusalKind::OutOfMemory);
    assert_eq!(refused(&taken[1]), RefusalKind::OutOfMemory);
    let nested = redis.submit(&[plain(0, acquire(0, 3))]);
    assert_eq!(refused(&nested[0]), RefusalKind::OutOfMemory);
    let inner = redis.submit(&[plain(0, release(0, 1))]);
    assert!(matches!(inner[0], Answer::StillHeld { remaining_ms: 1.. }));
    let passed = redis.submit(&[plain(0, hand_off(0, 4))]);
    assert_eq!(refused(&passed[0]), RefusalKind::OutOfMemory);
    let renewed = redis.submit(&[plain(0, renew(0, 1))]);
    assert!(matches!(renewed[0], Answer::Renewed { remaining_ms: 1.. }));
    assert_eq!(redis.keys(), 2, "the hold and its counter");
    assert_eq!(
        redis.submit(&[plain(0, release(0, 0))]),
        [Answer::Released { heard: 0 }]
    );
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
        let answers = redis.submit(&[plain(0, acquire(0, 1))]);
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
    admin.submit(&[plain(0, acquire(0, 1))]);
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
    let renewed = redis.submit(&[plain(0, renew(0, 2))]);
    assert!(matches!(renewed[0], Answer::Renewed { .. }), "{renewed:?}");
    assert_eq!(
        redis.submit(&[plain(0, release(0, 0))]),
        [Answer::Released { heard: 0 }]
    );
    let gone = [Answer::Gone(Instead::Free)];
    assert_eq!(redis.submit(&[plain(0, release(0, 0))]), gone);
}

#[test]
fn a_server_that_takes_no_writes_is_unavailable() {
    let server = Server::start();
    let mut redis = Redis::new(server.connect());
    let min_replicas = ["CONFIG", "SET", "min-replicas-to-write", "1"];
    redis.connection.ask(&min_replicas).unwrap();
    let answers = redis.submit(&[plain(0, acquire(0, 1))]);
    assert_eq!(refused(&answers[0]), RefusalKind::Unavailable);
    let min_replicas = ["CONFIG", "SET", "min-replicas-to-write", "0"];
    redis.connection.ask(&min_replicas).unwrap();
    redis
        .connection
        .ask(&["REPLICAOF", "127.0.0.1", "1"])
        .unwrap();
    let answers = redis.submit(&[plain(0, acquire(0, 1))]);
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
        redis.submit(&[plain(0, acquire(0, 1)), plain(0, acquire(0, 2))]);
        redis.submit(&[plain(0, release(0, 1)), plain(0, release(1, 0))]);
        redis
            .connection
            .ask(&["PUBLISH", told[1], "not yet"])
            .unwrap();
        redis.submit(&[plain(0, last)]);
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

fn plain(name: usize, verb: Verb) -> Op {
    op(Kind::Plain, name, verb)
}

/// With ten thousand in the queue no op but giving up looks at more than one: the same commands as with ten, and
/// none that goes through the list or a zset.
#[test]
fn what_an_op_of_a_fair_lock_costs_does_not_grow_with_the_queue() {
    let server = Server::start();
    let mut redis = Redis::new(server.connect());
    let mut costs = Vec::new();
    for waiters in [10, 10_000] {
        redis.connection.ask(&["FLUSHALL"]).unwrap();
        redis.submit(&[fair(acquire(0, 1))]);
        let ids: Vec<_> = (1..=waiters).collect();
        for ids in ids.chunks(32) {
            let ops: Vec<_> = ids.iter().map(|id| fair(enqueue(*id))).collect();
            for answer in redis.submit(&ops) {
                assert!(matches!(answer, Answer::Queued { .. }), "{answer:?}");
            }
        }
        let (middle, new) = (waiters / 2 + 1, waiters + 1);
        let ops = [
            fair(enqueue(new)),
            fair(enqueue(middle)),
            fair(beat(middle)),
            fair(acquire(0, 2)),
            fair(release(0, 1)),
            fair(acquire(waiters + 2, 1)),
            fair(release(0, 0)),
            fair(release(new, 0)),
            fair(enqueue(1)),
        ];
        costs.push(ops.map(|op| {
            let mut cost = redis.cost_of(&op);
            // Written only when a millisecond has passed.
            cost.retain(|command, _| command != "pexpire" && command != "zadd");
            cost
        }));
        let granted = redis.submit(&[fair(enqueue(1))]);
        assert!(matches!(granted[0], Answer::Granted { .. }), "{granted:?}");
    }
    assert_eq!(costs[0], costs[1]);
    let through = |command: &str| ["lrange", "zrange", "lpos", "zrangebyscore"].contains(&command);
    for (at, cost) in costs[1].iter().enumerate() {
        assert!(!cost.keys().any(|command| through(command)), "{cost:?}");
        assert_eq!(
            cost.contains_key("lrem"),
            at == 7,
            "only to leave: {cost:?}"
        );
    }
}

/// However many are dead before one who is alive, one call skips them all, and the next one is told.
#[test]
fn ten_thousand_dead_heads_are_skipped_in_one_call() {
    let server = Server::start();
    let mut redis = Redis::with_time_as_argument(server.connect());
    let mut at = |now_ms: u64, ops: &[Op]| {
        let deadline_us = now_ms * 1000 + 1_000_000;
        redis.call(1, deadline_us, Some(now_ms * 1000), ops).answers
    };
    let began = 1_700_000_000_000;
    at(began, &[fair(acquire(0, 1))]);
    let ids: Vec<_> = (1..=10_000).collect();
    for ids in ids.chunks(32) {
        let ops: Vec<_> = ids.iter().map(|id| fair(enqueue(*id))).collect();
        at(began, &ops);
    }
    at(began + 5_000, &[fair(beat(10_000))]);
    at(began + 6_000, &[fair(release(0, 0))]);
    let behind = at(began + 6_001, &[fair(enqueue(10_001))]);
    let left = Answer::Queued {
        first: false,
        remaining_ms: Some(4_999),
    };
    assert_eq!(behind, [left]);
    let first = at(began + 6_002, &[fair(enqueue(10_000))]);
    assert!(matches!(first[0], Answer::Granted { .. }), "{first:?}");
}

/// Without memory nobody comes into the queue, not even half; who is there can leave it.
#[test]
fn without_memory_nobody_queues() {
    let server = Server::start();
    let mut redis = Redis::new(server.connect());
    redis.submit(&[fair(acquire(0, 1))]);
    redis.submit(&[fair(enqueue(1))]);
    let limit = |redis: &mut Redis, bytes: &str| {
        let set = ["CONFIG", "SET", "maxmemory", bytes];
        redis.connection.ask(&set).unwrap();
    };
    limit(&mut redis, "1");
    let before = redis.everything();
    for verb in [enqueue(2), enqueue(1), beat(1)] {
        let answers = redis.submit(&[fair(verb)]);
        assert_eq!(refused(&answers[0]), RefusalKind::OutOfMemory);
    }
    let lists =
        |all: &[super::Everything]| all.iter().map(|one| one.list.clone()).collect::<Vec<_>>();
    assert_eq!(lists(&redis.everything()), lists(&before));
    let left = redis.submit(&[fair(release(1, 0))]);
    assert_eq!(left, [Answer::Gone(Instead::Taken)]);
    let released = redis.submit(&[fair(release(0, 0))]);
    assert_eq!(released, [Answer::Released { heard: 0 }]);
    assert_eq!(redis.keys(), 1, "the counter");
}

fn fair(verb: Verb) -> Op {
    op(Kind::Fair, 0, verb)
}

fn enqueue(id: u64) -> Verb {
    Verb::Enqueue {
        owner: owner(id),
        lease_ms: 60_000,
        token: TokenRule {
            floor: 0,
            retention_ms: Some(3_600_000),
            reserve: 0,
        },
        stay: STAY,
    }
}

fn beat(id: u64) -> Verb {
    Verb::Beat {
        owner: owner(id),
        stay: STAY,
    }
}

const STAY: Stay = Stay {
    beat_ms: 6_000,
    wait_ms: 300_000,
};

fn acquire(id: u64, count: u32) -> Verb {
    Verb::Acquire {
        owner: owner(id),
        count,
        lease_ms: 60_000,
        token: TokenRule {
            floor: 0,
            retention_ms: Some(3_600_000),
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

fn hand_off(from: u64, to: u64) -> Verb {
    Verb::HandOff {
        from: owner(from),
        to: owner(to),
        lease_ms: 60_000,
        token: TokenRule {
            floor: 0,
            retention_ms: Some(3_600_000),
            reserve: 0,
        },
    }
}

fn remember(token: u64) -> Verb {
    Verb::Remember {
        lease_ms: 60_000,
        token: TokenRule {
            floor: token,
            retention_ms: Some(3_600_000),
            reserve: 0,
        },
    }
}

fn renew(id: u64, count: u32) -> Verb {
    Verb::Renew {
        owner: owner(id),
        count,
        lease_ms: 60_000,
    }
}

fn refused(answer: &Answer) -> RefusalKind {
    match answer {
        Answer::Refused(refusal) => refusal.kind,
        other => panic!("{other:?} for a refusal"),
    }
}
