//! How long each operation takes, on a server of this benchmark's own and on the store in memory.
//!
//! ```text
//! $ cargo bench --bench operations
//! $ cargo bench --bench operations -- --quick redis
//! ```
//!
//! In memory there is no network and no other process: what is left is the crate's own work.

#![allow(
    clippy::disallowed_methods,
    reason = "benchmarks run by the real clock; only the crate itself takes its time from `Env`"
)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use leasehold::{Lock, LockClient, MultiLock};
use tokio::runtime::Runtime;

#[path = "../tests/common/mod.rs"]
mod common;

async fn pair(mut lock: Lock) {
    let guard = lock.acquire().await.unwrap();
    guard.release().await.into_result().unwrap();
}

/// Two tasks that want one lock, `turns` turns in all.
async fn hand_offs(client: &LockClient, turns: u64) -> Duration {
    let start = Instant::now();
    let tasks = [turns / 2, turns - turns / 2].map(|turns| {
        let mut lock = client.lock("passed");
        tokio::spawn(async move {
            for _ in 0..turns {
                let guard = lock.acquire().await.unwrap();
                // Time for the other one to get in line.
                tokio::task::yield_now().await;
                guard.release().await.into_result().unwrap();
            }
        })
    });
    for task in tasks {
        task.await.unwrap();
    }
    start.elapsed()
}

async fn several(client: &LockClient) {
    let members = ["a", "b", "c"].map(|name| client.lock(name));
    let guard = MultiLock::new(members).acquire().await.unwrap();
    let _ = black_box(guard.release().await);
}

type MakeLock = fn(&LockClient) -> Lock;

fn each(criterion: &mut Criterion, runtime: &Runtime, store: &str, client: &LockClient) {
    let mut group = criterion.benchmark_group(store);
    let pairs: [(&str, MakeLock); 4] = [
        ("acquire + release", |client| client.lock("plain")),
        ("fair", |client| client.fair_lock("fair")),
        ("read", |client| client.rw_lock("both").read()),
        ("write", |client| client.rw_lock("both").write()),
    ];
    for (name, lock) in pairs {
        group.bench_function(name, |bencher| {
            bencher.to_async(runtime).iter(|| pair(lock(client)));
        });
    }
    group.bench_function("three at once", |bencher| {
        bencher.to_async(runtime).iter(|| several(client));
    });
    group.bench_function("hand-off", |bencher| {
        bencher.iter_custom(|turns| runtime.block_on(hand_offs(client, turns)));
    });

    let held = runtime.block_on(async { client.lock("held").acquire().await.unwrap() });
    group.bench_function("enter again + leave", |bencher| {
        bencher.to_async(runtime).iter(|| async {
            let again = held.context().lock("held").acquire().await.unwrap();
            again.release().await.into_result().unwrap();
        });
    });
    group.bench_function("try, and it is taken", |bencher| {
        bencher.to_async(runtime).iter(|| async {
            assert!(client.lock("held").try_acquire().await.unwrap().is_none());
        });
    });
    group.bench_function("confirm", |bencher| {
        bencher
            .to_async(runtime)
            .iter(|| async { held.confirm().await.unwrap() });
    });
    drop(held);
    group.finish();
}

fn operations(criterion: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let memory = {
        let _inside = runtime.enter();
        LockClient::in_memory()
    };
    each(criterion, &runtime, "memory", &memory);
    let url = common::server().url();
    let redis = runtime.block_on(LockClient::connect(&url)).unwrap();
    each(criterion, &runtime, "redis", &redis);
}

criterion_group!(benches, operations);
criterion_main!(benches);
