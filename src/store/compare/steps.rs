//! What can happen in a random sequence: calls of ours, time, and writes of others.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::sample::select;
use uuid::Uuid;

use super::server::Connection;
use super::{EPOCH_US, NAMES, name_of};
use crate::key::KeyScheme;
use crate::kind::Kind;
use crate::store::memory::{self, State, Typed};
use crate::store::{Op, OwnerId, Stay, TokenRule, Verb};

/// A step of a random sequence.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// One call, and when its deadline is, seen from its arrival.
    Call { ops: Vec<Op>, ends_in_us: i64 },
    /// An earlier call once more, so many back: as a copy with the deadline it had (`None`), or as
    /// another attempt.
    Again {
        back: usize,
        ends_in_us: Option<i64>,
    },
    /// Time goes by.
    Wait { ms: u64 },
    /// Somebody else writes.
    Foreign { name: usize, what: Foreign },
}

/// What others may do to our keys.
#[derive(Clone, Debug)]
pub(super) enum Foreign {
    String,
    Hash {
        fields: Vec<(String, &'static str)>,
        ttl_ms: Option<u64>,
    },
    Delete,
    Persist,
    /// A read/write lock of Java's, with the leases of its reader.
    ReadWrite {
        mode: &'static str,
        fields: Vec<(String, &'static str)>,
        leases: Vec<(String, u32, Option<u64>)>,
        ttl_ms: Option<u64>,
    },
    /// The lease of a reader ends, or is made to last for ever.
    DeleteReader(String),
    PersistReader(String),
    Counter(&'static str),
    CounterOfOtherType,
    DeleteCounter,
    PersistCounter,
    /// Java's client enters the queue behind the others, with a deadline so far from now.
    JavaEnters {
        ends_in_ms: i64,
    },
    /// Java's client took a lock or gave up: it takes its own wait off all deadlines.
    JavaSubtracts {
        wait_ms: u64,
    },
    /// Java's client takes the first for dead.
    JavaPurges,
    /// One key of the queue, by number, is gone, or of another type.
    DeleteQueue(usize),
    SpoilQueue(usize),
}

/// A sequence about locks of one kind, or of several under the same names.
pub(super) fn any_steps() -> impl Strategy<Value = Vec<Step>> {
    let steps = |kinds: &'static [Kind]| prop::collection::vec(any_step(kinds), 1..25);
    prop_oneof![
        3 => steps(&[Kind::Plain]),
        6 => steps(&[Kind::Read, Kind::Write]),
        6 => steps(&[Kind::Plain, Kind::Fair]),
        1 => steps(&[Kind::Plain, Kind::Read, Kind::Write]),
        1 => steps(&[Kind::Plain, Kind::Fair, Kind::Read, Kind::Write]),
    ]
}

fn any_step(kinds: &'static [Kind]) -> impl Strategy<Value = Step> {
    let any_ops = || select(kinds).prop_flat_map(any_ops);
    prop_oneof![
        12 => (any_ops(), ends()).prop_map(|(ops, ends_in_us)| Step::Call { ops, ends_in_us }),
        3 => (0..6_usize, prop::option::of(ends()))
            .prop_map(|(back, ends_in_us)| Step::Again { back, ends_in_us }),
        2 => (1..400_000_u64).prop_map(|ms| Step::Wait { ms }),
        2 => (0..NAMES, any_foreign()).prop_map(|(name, what)| Step::Foreign { name, what }),
    ]
}

/// Deadlines: mostly ahead, some just reached, some just past, some long past.
fn ends() -> impl Strategy<Value = i64> {
    prop_oneof![8 => Just(1_000_000), 1 => Just(0), 1 => Just(-1), 1 => Just(-60_000_000)]
}

/// How tokens are made, with so many set aside.
fn token_rules(reserves: std::ops::Range<u64>) -> impl Strategy<Value = TokenRule> {
    let floors = select(vec![0, 5, EPOCH_US + 7_000_000, TOKEN_END - 5_000_000_000]);
    let retentions = select(vec![None, Some(1_000_u64), Some(200_000), Some(3_600_000)]);
    (floors, retentions, reserves).prop_map(|(floor, retention_ms, reserve)| TokenRule {
        floor,
        retention_ms,
        reserve,
    })
}

/// Ops of one verb: one to four, sometimes as many as the dispatcher sends in one call; sometimes
/// each of them twice.
fn any_ops(kind: Kind) -> impl Strategy<Value = Vec<Op>> {
    let list = move |verb: BoxedStrategy<Verb>| {
        let op = (0..NAMES, verb).prop_map(move |(name, verb)| op(kind, name, verb));
        let few = prop::collection::vec(op.clone(), 1..5);
        let ops = prop_oneof![12 => few, 1 => prop::collection::vec(op, 5..33)];
        (ops, prop::bool::weighted(0.1)).prop_map(|(ops, twice)| {
            let copies = if twice { 2 } else { 1 };
            let each = ops.into_iter();
            each.flat_map(|op| std::iter::repeat_n(op, copies))
                .collect::<Vec<_>>()
        })
    };
    let counts = || prop_oneof![4 => Just(1_u32), 2 => 2..5_u32];
    let leases = || select(vec![60_000_u64, 120_000, 300_000]);
    let acquire = (0..OWNERS, counts(), leases(), token_rules(0..1));
    let acquire = acquire.prop_map(|(id, count, lease_ms, token)| Verb::Acquire {
        owner: owner(id),
        count,
        lease_ms,
        token,
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
    let hand_off = (0..OWNERS, 0..OWNERS, leases(), token_rules(0..40));
    let hand_off = hand_off.prop_map(|(from, to, lease_ms, token)| Verb::HandOff {
        from: owner(from),
        to: owner(to),
        lease_ms,
        token,
    });
    let force = any_field().prop_map(|owner| Verb::ForceRelease { owner });
    let downgrade = (0..OWNERS, counts(), leases());
    let downgrade = downgrade.prop_map(|(id, count, lease_ms)| Verb::Downgrade {
        owner: owner(id),
        count,
        lease_ms,
    });
    let upgrade = (0..OWNERS, 0..OWNERS, leases(), token_rules(0..1));
    let upgrade = upgrade.prop_map(|(from, to, lease_ms, token)| Verb::Upgrade {
        from: owner(from),
        to: owner(to),
        lease_ms,
        token,
    });
    let stays = || {
        (
            select(vec![6_000_u64, 60_000, 400_000]),
            select(vec![30_000_u64, 300_000]),
        )
            .prop_map(|(beat_ms, wait_ms)| Stay { beat_ms, wait_ms })
    };
    let enqueue = (0..OWNERS, leases(), token_rules(0..1), stays());
    let enqueue = enqueue.prop_map(|(id, lease_ms, token, stay)| Verb::Enqueue {
        owner: owner(id),
        lease_ms,
        token: TokenRule {
            retention_ms: Some(200_000),
            ..token
        },
        stay,
    });
    let remember = (leases(), token_rules(0..1));
    let remember = remember.prop_map(|(lease_ms, token)| {
        let floor = token.floor.max(1);
        let token = TokenRule { floor, ..token };
        Verb::Remember { lease_ms, token }
    });
    let beat = (0..OWNERS, stays()).prop_map(|(id, stay)| Verb::Beat {
        owner: owner(id),
        stay,
    });
    // A plain lock has no side to go to, and no queue.
    let sides = u32::from(matches!(kind, Kind::Read | Kind::Write));
    let queues = u32::from(kind == Kind::Fair);
    prop_oneof![
        2 * sides => list(downgrade.boxed()),
        2 * sides => list(upgrade.boxed()),
        8 * queues => list(enqueue.boxed()),
        4 * queues => list(beat.boxed()),
        4 => list(acquire.boxed()),
        3 => list(release.boxed()),
        2 => list(renew.boxed()),
        2 => list(hand_off.boxed()),
        1 => list(force.boxed()),
        1 => list(remember.boxed()),
    ]
}

/// A field that somebody may hold a lock by, or that only looks so.
fn any_field() -> impl Strategy<Value = String> {
    let writing = |field: String| format!("{field}:write");
    prop_oneof![
        3 => (0..OWNERS).prop_map(|id| owner(id).to_string()),
        2 => (0..OWNERS).prop_map(move |id| writing(owner(id).to_string())),
        2 => Just(java()),
        1 => Just(writing(java())),
        1 => Just("mode".to_owned()),
    ]
}

fn any_read_write() -> impl Strategy<Value = Foreign> {
    let field = (
        any_field(),
        prop_oneof![
            12 => select(vec!["1", "2", "3"]),
            1 => select(vec!["99999999999999999999", "x"]),
        ],
    );
    let ttl = || prop::option::weighted(0.9, 10_000..100_000_u64);
    let lease = (any_field(), 1..4_u32, ttl());
    (
        prop_oneof![4 => Just("read"), 2 => Just("write"), 1 => Just("x")],
        prop::collection::vec(field, 0..3),
        prop::collection::vec(lease, 0..4),
        ttl(),
    )
        .prop_map(|(mode, fields, leases, ttl_ms)| Foreign::ReadWrite {
            mode,
            fields,
            leases,
            ttl_ms,
        })
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
    // Around the size up to which a hash is looked through, with a field that is not ours.
    let crowd = (14..19_usize).prop_map(|size| {
        let owners = (1..size).map(|thread| (format!("crowd:{thread}"), "1"));
        owners.chain([("mode".to_owned(), "read")]).collect()
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
        3 => any_read_write(),
        2 => any_field().prop_map(Foreign::DeleteReader),
        1 => any_field().prop_map(Foreign::PersistReader),
        2 => Just(Foreign::Delete),
        2 => Just(Foreign::Persist),
        3 => counters.prop_map(Foreign::Counter),
        1 => Just(Foreign::CounterOfOtherType),
        2 => Just(Foreign::DeleteCounter),
        1 => Just(Foreign::PersistCounter),
        6 => (-1000_i64..1_000_000).prop_map(|ends_in_ms| Foreign::JavaEnters { ends_in_ms }),
        3 => select(vec![10_000_u64, 300_000]).prop_map(|wait_ms| Foreign::JavaSubtracts { wait_ms }),
        1 => Just(Foreign::JavaPurges),
        2 => (0..3_usize).prop_map(Foreign::DeleteQueue),
        1 => (0..3_usize).prop_map(Foreign::SpoilQueue),
    ]
}

impl Foreign {
    pub(super) fn put_in_model(&self, state: &mut State, name: usize, now_us: u64) {
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
            Self::ReadWrite {
                mode,
                fields,
                leases,
                ttl_ms,
            } => {
                let fields = fields.iter().filter(|(field, _)| field != "mode").cloned();
                let mut fields: BTreeMap<_, _> = fields
                    .map(|(field, value)| (field, value.to_owned()))
                    .collect();
                fields.insert("mode".to_owned(), (*mode).to_owned());
                let at = |ttl_ms: Option<u64>| ttl_ms.map(|ms| now_us / 1000 + ms);
                state.put(&name, memory::Value::Hash(fields), at(*ttl_ms));
                for (reader, number, ttl_ms) in leases {
                    state.put_reader(&name, reader, *number, at(*ttl_ms));
                }
            }
            Self::DeleteReader(reader) => state.delete_reader(&name, reader, 1),
            Self::PersistReader(reader) => {
                // As the server does it: what is over is not there.
                let _ = state.key(&name, now_us);
                if state.readers(&name).contains_key(&(reader.clone(), 1)) {
                    state.put_reader(&name, reader, 1, None);
                }
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
            _ => {
                let now_ms = now_us / 1000;
                let mut queue = state.take_queue(&name, now_ms);
                self.put_in_queue(&mut queue, now_ms);
                state.put_queue(&name, queue);
            }
        }
    }

    fn put_in_queue(&self, queue: &mut memory::Queue, now_ms: u64) {
        match self {
            Self::JavaEnters { ends_in_ms } => {
                if let (Typed::Proper(list), Typed::Proper(deadlines)) =
                    (&mut queue.list, &mut queue.deadlines)
                {
                    let at = now_ms.checked_add_signed(*ends_in_ms).unwrap();
                    if deadlines.insert(java(), at).is_none() {
                        list.push_back(java());
                    }
                }
            }
            Self::JavaSubtracts { wait_ms } => {
                if let Typed::Proper(deadlines) = &mut queue.deadlines {
                    for at in deadlines.values_mut() {
                        *at -= wait_ms;
                    }
                }
            }
            Self::JavaPurges => {
                if let (Typed::Proper(list), Typed::Proper(deadlines)) =
                    (&mut queue.list, &mut queue.deadlines)
                    && let Some(head) = list.pop_front()
                {
                    deadlines.remove(&head);
                }
            }
            Self::DeleteQueue(0) => queue.list = Typed::default(),
            Self::DeleteQueue(1) => queue.deadlines = Typed::default(),
            Self::DeleteQueue(_) => queue.beats = Typed::default(),
            Self::SpoilQueue(0) => queue.list = Typed::Other,
            Self::SpoilQueue(1) => queue.deadlines = Typed::Other,
            Self::SpoilQueue(_) => {
                queue.beats = Typed::Other;
                queue.beats_expire_ms = None;
            }
            _ => {}
        }
    }

    pub(super) fn put_in_redis(&self, connection: &mut Connection, name: usize, now_us: u64) {
        let key = &*name_of(name);
        let queue = KeyScheme::Redisson.queue(key);
        let [list, deadlines, _] = &queue;
        let now_ms = now_us / 1000;
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
            Self::ReadWrite {
                mode,
                fields,
                leases,
                ttl_ms,
            } => {
                connection.ask(&["DEL", key]).unwrap();
                for (field, value) in fields {
                    connection.ask(&["HSET", key, field, value]).unwrap();
                }
                connection.ask(&["HSET", key, "mode", mode]).unwrap();
                if let Some(ms) = ttl_ms {
                    connection.ask(&["PEXPIRE", key, &ms.to_string()]).unwrap();
                }
                for (reader, number, ttl_ms) in leases {
                    let lease = lease(key, reader, *number);
                    connection.ask(&["SET", &lease, "1"]).unwrap();
                    if let Some(ms) = ttl_ms {
                        let ms = ms.to_string();
                        connection.ask(&["PEXPIRE", &lease, &ms]).unwrap();
                    }
                }
                connection.send(&["PING"]);
            }
            Self::DeleteReader(reader) => connection.send(&["DEL", &lease(key, reader, 1)]),
            Self::PersistReader(reader) => connection.send(&["PERSIST", &lease(key, reader, 1)]),
            Self::Delete => connection.send(&["DEL", key]),
            Self::Persist => connection.send(&["PERSIST", key]),
            Self::Counter(text) => connection.send(&["SET", &counter, text]),
            Self::CounterOfOtherType => {
                connection.ask(&["DEL", &counter]).unwrap();
                connection.send(&["RPUSH", &counter, "x"]);
            }
            Self::DeleteCounter => connection.send(&["DEL", &counter]),
            Self::PersistCounter => connection.send(&["PERSIST", &counter]),
            Self::JavaEnters { ends_in_ms } => {
                let at = now_ms.checked_add_signed(*ends_in_ms).unwrap().to_string();
                let enter = "if redis.call('TYPE', KEYS[1]).ok:find('li') == nil and redis.call('EXISTS', KEYS[1]) == 1 \
                             or redis.call('TYPE', KEYS[2]).ok ~= 'zset' and redis.call('EXISTS', KEYS[2]) == 1 \
                             then return end \
                             if redis.call('ZADD', KEYS[2], ARGV[1], ARGV[2]) == 1 then \
                             redis.call('RPUSH', KEYS[1], ARGV[2]) end";
                connection.send(&["EVAL", enter, "2", list, deadlines, &at, &java()]);
            }
            Self::JavaSubtracts { wait_ms } => {
                let subtract = "if redis.call('TYPE', KEYS[1]).ok ~= 'zset' then return end \
                                for _, member in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do \
                                redis.call('ZINCRBY', KEYS[1], -tonumber(ARGV[1]), member) end";
                connection.send(&["EVAL", subtract, "1", deadlines, &wait_ms.to_string()]);
            }
            Self::JavaPurges => {
                let purge = "if redis.call('TYPE', KEYS[1]).ok ~= 'list' or redis.call('TYPE', KEYS[2]).ok == 'string' \
                             then return end \
                             redis.call('ZREM', KEYS[2], redis.call('LPOP', KEYS[1]))";
                connection.send(&["EVAL", purge, "2", list, deadlines]);
            }
            Self::DeleteQueue(which) => connection.send(&["DEL", &queue[*which]]),
            Self::SpoilQueue(which) => connection.send(&["SET", &queue[*which], "a string"]),
        }
        connection.read().unwrap();
    }
}

/// The key with a lease of a reader, as Java spells it.
fn lease(name: &str, reader: &str, number: u32) -> String {
    format!("{{{name}}}:{reader}:rwlock_timeout:{number}")
}

pub(super) fn op(kind: Kind, name: usize, verb: Verb) -> Op {
    Op {
        kind,
        name: name_of(name),
        verb,
    }
}

pub(super) fn owner(id: u64) -> OwnerId {
    OwnerId::new(Uuid::from_u128(0xabc), id << 1)
}

/// Everybody who can stand in a queue.
pub(super) fn members() -> impl Iterator<Item = String> {
    let ours = (0..OWNERS).map(|id| owner(id).to_string());
    ours.chain([java()])
}

/// The owner id of a Java thread, with a number that only Java gives.
fn java() -> String {
    "b983c153-7421-469a-addb-44fb92259a1b:-9223372036854775808".to_owned()
}

const OWNERS: u64 = 3;

const TOKEN_END: u64 = (1 << 53) - (1 << 40);
