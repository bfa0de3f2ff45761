//! What a lock costs that nobody else wants: acquire and release, one after the other.
//!
//! ```text
//! $ cargo bench --bench uncontended
//! ```
//!
//! `leasehold` is measured against `bare`: the same two scripts, with the same arguments, tokens and
//! messages included, called through fred without anything around them. Both go to one server of
//! this benchmark's own, in alternating rounds, so that what disturbs the machine disturbs both; the
//! ratio of the medians is printed. Criterion then measures each by itself.

#![allow(
    clippy::disallowed_methods,
    reason = "benchmarks run by the real clock; only the crate itself takes its time from `Env`"
)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use fred::clients::Client;
use fred::interfaces::ClientLike as _;
use fred::types::config::Config;
use fred::types::{ClusterHash, CustomCommand, Value};
use leasehold::LockClient;
use tokio::runtime::Runtime;

#[path = "../tests/common/mod.rs"]
mod common;

const PRELUDE: &str = include_str!("../src/store/redis/lua/prelude.lua");
const TOKENS: &str = include_str!("../src/store/redis/lua/tokens.lua");
const LEVELS: &str = include_str!("../src/store/redis/lua/levels.lua");
const ACQUIRE: &str = include_str!("../src/store/redis/lua/lock_acquire.lua");
const RELEASE: &str = include_str!("../src/store/redis/lua/lock_release.lua");

/// The two scripts through fred, and nothing else.
struct Bare {
    redis: Client,
    acquire: String,
    release: String,
    attempt: u64,
}

impl Bare {
    async fn connect(url: &str) -> Self {
        let redis = Client::new(Config::from_url(url).unwrap(), None, None, None);
        redis.init().await.unwrap();
        let mut hashes = Vec::new();
        let acquire = format!("{TOKENS}\n{LEVELS}\n{ACQUIRE}");
        for body in [acquire, format!("{LEVELS}\n{RELEASE}")] {
            let script = format!("{PRELUDE}\n{body}");
            let command = CustomCommand::new_static("SCRIPT", ClusterHash::Random, false);
            let args = vec!["LOAD".to_owned(), script];
            hashes.push(redis.custom::<String, _>(command, args).await.unwrap());
        }
        let release = hashes.pop().unwrap();
        let acquire = hashes.pop().unwrap();
        Self {
            redis,
            acquire,
            release,
            attempt: 0,
        }
    }

    async fn pair(&mut self, name: &str) {
        let owner = format!("9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d:{}", self.attempt);
        self.attempt += 1;
        let attempt = self.attempt.to_string();
        let token = common::token_key(name);
        let deadline = "4000000000000000";
        let acquire = [
            self.acquire.as_str(),
            "2",
            name,
            &token,
            &attempt,
            deadline,
            &owner,
            "1",
            "30000",
            "0",
            "3600000",
        ];
        let channel = common::channel(name);
        let release = [
            self.release.as_str(),
            "1",
            name,
            &attempt,
            deadline,
            "PLAIN",
            &owner,
            "0",
            "",
            &channel,
        ];
        black_box(self.evalsha(&acquire).await);
        black_box(self.evalsha(&release).await);
    }

    async fn evalsha(&self, args: &[&str]) -> Value {
        let command = CustomCommand::new_static("EVALSHA", ClusterHash::Random, false);
        let args: Vec<Value> = args.iter().map(|arg| (*arg).into()).collect();
        self.redis.custom(command, args).await.unwrap()
    }
}

async fn leasehold_pair(client: &LockClient, name: &str) {
    let guard = client.lock(name).acquire().await.unwrap();
    guard.release().await.into_result().unwrap();
}

/// Rounds of the two in turn; prints the medians and their ratio.
fn ratio(runtime: &Runtime, client: &LockClient, bare: &mut Bare) {
    const ROUNDS: usize = 60;
    const PAIRS: u32 = 200;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        ours.push(runtime.block_on(async {
            let start = Instant::now();
            for _ in 0..PAIRS {
                leasehold_pair(client, "ours").await;
            }
            start.elapsed() / PAIRS
        }));
        theirs.push(runtime.block_on(async {
            let start = Instant::now();
            for _ in 0..PAIRS {
                bare.pair("theirs").await;
            }
            start.elapsed() / PAIRS
        }));
    }
    let median = |times: &mut Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    let (ours, theirs) = (median(&mut ours), median(&mut theirs));
    let ratio = ours.as_secs_f64() / theirs.as_secs_f64();
    println!("acquire + release: leasehold {ours:?}, bare {theirs:?}, ratio {ratio:.3}");
}

fn uncontended(criterion: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let url = common::server().url();
    let client = runtime.block_on(LockClient::connect(&url)).unwrap();
    let mut bare = runtime.block_on(Bare::connect(&url));
    ratio(&runtime, &client, &mut bare);

    let mut group = criterion.benchmark_group("acquire + release");
    group.bench_function("leasehold", |bencher| {
        bencher
            .to_async(&runtime)
            .iter(|| leasehold_pair(&client, "ours"));
    });
    group.bench_function("bare", |bencher| {
        bencher.iter_custom(|pairs| {
            runtime.block_on(async {
                let start = Instant::now();
                for _ in 0..pairs {
                    bare.pair("theirs").await;
                }
                start.elapsed()
            })
        });
    });
    group.finish();
}

criterion_group!(benches, uncontended);
criterion_main!(benches);
