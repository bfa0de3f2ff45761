//! What only leasehold is asked: many holds, many waiters, many names.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use leasehold::{LockClient, LockGuard};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::library::{Leasehold, Library as _};
use crate::measure::{Line, Phase, Server, own_cpu_us, percentile, resident, settled, sort};
use crate::scenarios::{Options, own_names_window};

/// A pair now and then while something else goes on; the milliseconds of each acquire.
async fn probe(client: LockClient, time: Duration) -> Vec<f64> {
    let start = Instant::now();
    let mut times = Vec::new();
    while start.elapsed() < time {
        let asked = Instant::now();
        let guard = client.lock("bench:probe").acquire().await.unwrap();
        times.push(asked.elapsed().as_nanos() as f64 / 1e6);
        guard.release().await.into_result().unwrap();
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    sort(&mut times);
    times
}

const AT_ONCE: usize = 256;

/// Takes the locks `names`, 256 at once.
async fn take(client: &LockClient, prefix: &str, count: usize) -> Vec<LockGuard> {
    let next = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    for _ in 0..AT_ONCE.min(count) {
        let (client, next, prefix) = (client.clone(), next.clone(), prefix.to_owned());
        tasks.spawn(async move {
            let mut guards = Vec::new();
            loop {
                let name = next.fetch_add(1, Ordering::Relaxed);
                if name >= count {
                    return guards;
                }
                let mut lock = client.lock(format!("{prefix}:{name}"));
                guards.push(lock.acquire().await.unwrap());
            }
        });
    }
    let mut all = Vec::with_capacity(count);
    while let Some(guards) = tasks.join_next().await {
        all.append(&mut guards.unwrap());
    }
    all
}

async fn give_back(guards: Vec<LockGuard>) {
    let mut tasks = JoinSet::new();
    for guard in guards {
        tasks.spawn(guard.release());
        if tasks.len() >= AT_ONCE {
            let _released = tasks.join_next().await;
        }
    }
    while tasks.join_next().await.is_some() {}
}

/// `holds`: many holds on one client, renewed for a while.
pub async fn holds(options: Options, count: usize) {
    let client = LockClient::connect(&options.url).await.unwrap();
    let server = Server::connect(&options.url).await;
    // What a client has anyway: buffers, and the allocator's stock for what is in flight.
    give_back(take(&client, &options.name, 4096).await).await;

    let without_time = options.time().div_f64(4.0).min(Duration::from_secs(15));
    let before = server.counters().await;
    let own_before = own_cpu_us();
    let without = probe(client.clone(), without_time).await;
    let after = server.counters().await;
    // What the probe and the idle server cost by themselves.
    let each_second = |used: f64| used / without_time.as_secs_f64();
    let idle_us = each_second(after.cpu_us - before.cpu_us);
    let idle_script_us = each_second(after.script_us() - before.script_us());
    let own_idle_us = own_cpu_us()
        .zip(own_before)
        .map(|(after, before)| each_second(after - before));

    let empty = settled().await;
    let start = Instant::now();
    let guards = take(&client, &options.name, count).await;
    let taken = start.elapsed().as_secs_f64();
    let full = resident();
    let name_bytes = (options.name.len() + 1 + count.saturating_sub(1).to_string().len()) as f64;
    let bytes = empty
        .zip(full)
        .map(|(empty, full)| (full - empty) / count as f64 - name_bytes);

    let before = server.counters().await;
    let own_before = own_cpu_us();
    let start = Instant::now();
    let probing = tokio::spawn(probe(client.clone(), options.time()));
    let mut seconds_of_renewals = Vec::new();
    let mut seen = before.calls("hget");
    while start.elapsed() < options.time() {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let now = server.counters().await.calls("hget");
        seconds_of_renewals.push(now - seen);
        seen = now;
    }
    let with = probing.await.unwrap();
    let after = server.counters().await;
    let seconds = start.elapsed().as_secs_f64();
    let own = own_cpu_us()
        .zip(own_before)
        .map(|(after, before)| after - before);
    // Of our scripts only the one that renews asks for a field.
    let renewals = after.calls("hget") - before.calls("hget");
    let server_us = after.cpu_us - before.cpu_us - idle_us * seconds;
    let script_us = after.script_us() - before.script_us() - idle_script_us * seconds;
    let lost = guards.iter().filter(|guard| !guard.is_held()).count();
    let late = resident();
    let busiest = seconds_of_renewals.iter().copied().fold(0.0, f64::max);

    Line::new("leasehold", "holds")
        .add("holds", count as f64)
        .add("seconds", seconds)
        .add("lost", lost as f64)
        .add("taken_in_s", taken)
        .add("renewals", renewals)
        .add("server_cpu_us_per_renewal", server_us / renewals)
        .add("script_us_per_renewal", script_us / renewals)
        .add("script_calls", after.script_calls() - before.script_calls())
        .add("busiest_second_over_mean", busiest * seconds / renewals)
        .add(
            "client_cpu_percent",
            own.zip(own_idle_us)
                .map(|(own, idle)| (own / seconds - idle) / 1e4),
        )
        .add(
            "client_cpu_percent_with_probe",
            own.map(|us| us / seconds / 1e4),
        )
        .add("acquire_p99_ms_without", percentile(&without, 0.99))
        .add("acquire_p99_ms_with", percentile(&with, 0.99))
        .add("acquire_p50_ms_without", percentile(&without, 0.5))
        .add("acquire_p50_ms_with", percentile(&with, 0.5))
        .add("bytes_per_hold", bytes)
        .add(
            "bytes_per_hold_at_the_end",
            empty
                .zip(late)
                .map(|(empty, late)| (late - empty) / count as f64 - name_bytes),
        )
        .print();
    give_back(guards).await;
}

/// `waiters`: what a task that waits costs in memory, `on` a lock or on a `notify` of Tokio's.
pub async fn waiters(options: Options, count: usize, on: &str) {
    let client = LockClient::connect(&options.url).await.unwrap();
    let other = LockClient::connect(&options.url).await.unwrap();
    give_back(take(&client, &options.name, 4096).await).await;
    let held = other.lock(options.name.as_str()).acquire().await.unwrap();
    let notify = Arc::new(Notify::new());
    let name: Arc<str> = options.name.as_str().into();
    let mut tasks = Vec::with_capacity(count);
    let empty = settled().await;
    for _ in 0..count {
        tasks.push(if on == "notify" {
            let notify = notify.clone();
            tokio::spawn(async move { notify.notified().await })
        } else {
            let (client, name) = (client.clone(), name.clone());
            tokio::spawn(async move {
                let _guard = client.lock(name).acquire().await.unwrap();
            })
        });
    }
    let full = settled().await;
    let waiting = tasks.iter().filter(|task| !task.is_finished()).count();
    Line::new("leasehold", "waiters")
        .add("waiters", waiting as f64)
        .add(
            if on == "notify" {
                "bytes_per_notified"
            } else {
                "bytes_per_waiter"
            },
            empty
                .zip(full)
                .map(|(empty, full)| (full - empty) / count as f64),
        )
        .print();
    for task in &tasks {
        task.abort();
    }
    drop(held);
    std::process::exit(0);
}

/// `growth`: server CPU per pair when it has seen few names, and many.
///
/// One server sees a thousand names only, the other more and more; the rounds alternate between them.
pub async fn growth(options: Options, other: &str, rounds: usize, most: usize) {
    const FEW: usize = 1000;
    let few = Leasehold::connect(&options.url).await;
    let many = Leasehold::connect(other).await;
    let servers = [
        Server::connect(&options.url).await,
        Server::connect(other).await,
    ];
    let mut seen = FEW;
    visit(&few, 0, FEW).await;
    visit(&many, 0, FEW).await;
    while seen < most {
        let next = (seen * 10).min(most);
        visit(&many, seen, next).await;
        seen = next;
        let mut cpu = [Vec::new(), Vec::new()];
        let mut ratios = Vec::new();
        for _ in 0..rounds {
            for (which, (library, names)) in [(&few, FEW), (&many, seen)].into_iter().enumerate() {
                let phase = Arc::new(Phase::default());
                let (pairs, window) = own_names_window(
                    library.clone(),
                    &servers[which],
                    phase,
                    options.tasks,
                    names,
                    options.time(),
                )
                .await;
                cpu[which].push(window.server_cpu_us() / pairs);
            }
            let last = |which: usize| *cpu[which].last().unwrap();
            ratios.push(last(1) / last(0));
        }
        let [few_us, many_us] = &mut cpu;
        for numbers in [few_us, many_us, &mut ratios] {
            sort(numbers);
        }
        Line::new("leasehold", "growth")
            .add("names", seen as f64)
            .add("rounds", rounds as f64)
            .add(
                "server_cpu_us_per_pair_1000_names",
                percentile(&cpu[0], 0.5),
            )
            .add("server_cpu_us_per_pair", percentile(&cpu[1], 0.5))
            .add("ratio", percentile(&ratios, 0.5))
            .add("ratio_least", percentile(&ratios, 0.0))
            .add("ratio_most", percentile(&ratios, 1.0))
            .add(
                "client_resident_mib",
                resident().map(|bytes| bytes / 1024.0 / 1024.0),
            )
            .print();
    }
}

/// Takes each of these names once and gives it back.
async fn visit(library: &Leasehold, from: usize, to: usize) {
    let next = Arc::new(AtomicUsize::new(from));
    let mut tasks = JoinSet::new();
    for _ in 0..AT_ONCE {
        let (library, next) = (library.clone(), next.clone());
        tasks.spawn(async move {
            loop {
                let name = next.fetch_add(1, Ordering::Relaxed);
                if name >= to {
                    return;
                }
                let held = library.lock(&growth_name(name)).await;
                library.unlock(held).await;
            }
        });
    }
    while tasks.join_next().await.is_some() {}
}

/// The name of that number.
pub fn growth_name(number: usize) -> String {
    format!("bench:growth:{number}")
}
