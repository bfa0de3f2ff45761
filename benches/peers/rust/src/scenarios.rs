//! The work that every library does.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use crate::holds::growth_name;
use crate::library::{Leasehold, Library};
use crate::measure::{Counters, Line, Phase, SHARES, Server, own_cpu_us, percentile, sort};

/// What a scenario is asked to do.
#[derive(Clone, Debug)]
pub struct Options {
    pub library: String,
    pub url: String,
    pub tasks: usize,
    pub seconds: f64,
    pub name: String,
}

impl Options {
    pub fn time(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }
}

const WARM_UP: Duration = Duration::from_millis(400);

/// The measured part of a run: the counters before and after it.
pub struct Window {
    pub seconds: f64,
    pub before: Counters,
    pub after: Counters,
    pub own_cpu_us: Option<f64>,
}

impl Window {
    pub fn server_cpu_us(&self) -> f64 {
        self.after.cpu_us - self.before.cpu_us
    }

    pub fn delta(&self, what: impl Fn(&Counters) -> f64) -> f64 {
        what(&self.after) - what(&self.before)
    }
}

/// Waits for the warm-up, then measures for `time`.
pub async fn window(server: &Server, phase: &Phase, time: Duration) -> Window {
    tokio::time::sleep(WARM_UP).await;
    let before = server.counters().await;
    let cpu = own_cpu_us();
    let start = Instant::now();
    phase.begin();
    tokio::time::sleep(time).await;
    phase.end();
    let seconds = start.elapsed().as_secs_f64();
    let own_cpu_us = own_cpu_us().zip(cpu).map(|(after, before)| after - before);
    let after = server.counters().await;
    Window {
        seconds,
        before,
        after,
        own_cpu_us,
    }
}

/// `pair` and `own-names`: each task takes a lock that nobody else wants, and gives it back.
pub async fn own_names<L: Library>(scenario: &str, options: Options) {
    let library = L::connect(&options.url).await;
    let server = Server::connect(&options.url).await;
    let phase = Arc::new(Phase::default());
    let mut tasks = JoinSet::new();
    for task in 0..options.tasks {
        let (library, phase) = (library.clone(), phase.clone());
        let name = format!("{}:{task}", options.name);
        tasks.spawn(async move {
            let mut times = Vec::new();
            while !phase.over() {
                let start = Instant::now();
                let held = library.lock(&name).await;
                library.unlock(held).await;
                if phase.measuring() {
                    times.push(start.elapsed().as_nanos() as f64 / 1e3);
                }
            }
            times
        });
    }
    let window = window(&server, &phase, options.time()).await;
    let mut times = tasks.join_all().await.concat();
    sort(&mut times);
    let pairs = times.len() as f64;
    Line::new(&options.library, scenario)
        .add("tasks", options.tasks as f64)
        .add("seconds", window.seconds)
        .add("pairs_per_s", pairs / window.seconds)
        .add("p50_us", percentile(&times, 0.5))
        .add("p99_us", percentile(&times, 0.99))
        .add("server_cpu_us_per_pair", window.server_cpu_us() / pairs)
        .add(
            "script_us_per_pair",
            window.delta(Counters::script_us) / pairs,
        )
        .add(
            "script_calls_per_pair",
            window.delta(Counters::script_calls) / pairs,
        )
        .add(
            "client_cpu_us_per_pair",
            window.own_cpu_us.map(|cpu| cpu / pairs),
        )
        .print();
}

/// Tasks that take names from the `names` that there are, no two at once the same; how many pairs
/// they made.
pub async fn own_names_window(
    library: Leasehold,
    server: &Server,
    phase: Arc<Phase>,
    tasks: usize,
    names: usize,
    time: Duration,
) -> (f64, Window) {
    let pairs = Arc::new(AtomicUsize::new(0));
    let mut running = JoinSet::new();
    for task in 0..tasks {
        let (library, phase, pairs) = (library.clone(), phase.clone(), pairs.clone());
        running.spawn(async move {
            let mut random = task as u64;
            while !phase.over() {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                let turn = (random >> 33) as usize % (names / tasks);
                let name = growth_name(turn * tasks + task);
                let held = library.lock(&name).await;
                library.unlock(held).await;
                if phase.measuring() {
                    pairs.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    }
    let window = window(server, &phase, time).await;
    while running.join_next().await.is_some() {}
    (pairs.load(Ordering::Relaxed) as f64, window)
}

/// What one contender went through.
#[derive(Debug, Default)]
struct Contender {
    /// Milliseconds of each wait.
    waits: Vec<f64>,
    /// Microseconds from the call that gave the lock up until the next one had it.
    gaps: Vec<f64>,
    waiting_since: Option<Instant>,
}

/// `contended`: all want one name.
///
/// A hand-off counts if the lock really went to another task. Waits that the end cuts short count
/// as long as they had lasted, so that who starves is seen.
pub async fn contended<L: Library>(options: Options) {
    const NOBODY: usize = usize::MAX;
    let library = L::connect(&options.url).await;
    let server = Server::connect(&options.url).await;
    let phase = Arc::new(Phase::default());
    let begun = Instant::now();
    let left_at = Arc::new(AtomicU64::new(0));
    let last = Arc::new(AtomicUsize::new(NOBODY));
    let holder = Arc::new(AtomicUsize::new(NOBODY));
    let hand_offs = Arc::new(AtomicUsize::new(0));
    let doubled = Arc::new(AtomicUsize::new(0));
    let contenders: Vec<Arc<Mutex<Contender>>> =
        (0..options.tasks).map(|_| Arc::default()).collect();
    let mut tasks = JoinSet::new();
    for (task, mine) in contenders.iter().cloned().enumerate() {
        let (library, phase, name) = (library.clone(), phase.clone(), options.name.clone());
        let (left_at, last, holder) = (left_at.clone(), last.clone(), holder.clone());
        let (hand_offs, doubled) = (hand_offs.clone(), doubled.clone());
        tasks.spawn(async move {
            let now = || begun.elapsed().as_nanos() as u64;
            while !phase.over() {
                let start = Instant::now();
                mine.lock().unwrap().waiting_since = Some(start);
                let held = library.lock(&name).await;
                let gap = now().saturating_sub(left_at.load(Ordering::SeqCst));
                let wait = start.elapsed();
                if holder.swap(task, Ordering::SeqCst) != NOBODY {
                    doubled.fetch_add(1, Ordering::SeqCst);
                }
                let other = last.swap(task, Ordering::SeqCst) != task;
                {
                    let mut mine = mine.lock().unwrap();
                    mine.waiting_since = None;
                    if phase.measuring() {
                        mine.waits.push(wait.as_secs_f64() * 1e3);
                        if other {
                            hand_offs.fetch_add(1, Ordering::Relaxed);
                            mine.gaps.push(gap as f64 / 1e3);
                        }
                    }
                }
                left_at.store(now(), Ordering::SeqCst);
                holder.store(NOBODY, Ordering::SeqCst);
                library.unlock(held).await;
            }
        });
    }
    let window = window(&server, &phase, options.time()).await;
    let ended = Instant::now();
    let hand_offs = hand_offs.load(Ordering::Relaxed) as f64;
    let finish = tokio::time::timeout(Duration::from_millis(300), async {
        while tasks.join_next().await.is_some() {}
    });
    let _cut_short = finish.await;
    tasks.abort_all();

    let (mut waits, mut gaps, mut served) = (Vec::new(), Vec::new(), Vec::new());
    for contender in &contenders {
        let mine = contender.lock().unwrap();
        served.push(mine.waits.len() as f64);
        waits.extend(&mine.waits);
        gaps.extend(&mine.gaps);
        if let Some(since) = mine.waiting_since {
            waits.push(ended.saturating_duration_since(since).as_secs_f64() * 1e3);
        }
    }
    for numbers in [&mut waits, &mut gaps, &mut served] {
        sort(numbers);
    }
    let starved = served.iter().filter(|times| **times == 0.0).count();
    let gap = percentile(&gaps, 0.5);
    let distribution: Vec<f64> = SHARES
        .iter()
        .map(|share| percentile(&gaps, *share))
        .collect();
    let per_hand_off = |us: f64| us / hand_offs;
    Line::new(&options.library, "contended")
        .add("tasks", options.tasks as f64)
        .add("seconds", window.seconds)
        .add("hand_offs_per_s", hand_offs / window.seconds)
        .add(
            "acquisitions_per_s",
            served.iter().sum::<f64>() / window.seconds,
        )
        .add("wait_p50_ms", percentile(&waits, 0.5))
        .add("wait_p99_ms", percentile(&waits, 0.99))
        .add("most_served", percentile(&served, 1.0))
        .add("least_served", percentile(&served, 0.0))
        .add("starved", starved as f64)
        .add("doubled", doubled.load(Ordering::Relaxed) as f64)
        .add("hand_off_p50_us", gap)
        .add(
            "p99_wait_over_fair",
            percentile(&waits, 0.99) * 1e3
                / (options.tasks as f64 * window.seconds * 1e6 / hand_offs),
        )
        .add(
            "server_cpu_us_per_hand_off",
            per_hand_off(window.server_cpu_us()),
        )
        .add(
            "script_calls_per_hand_off",
            per_hand_off(window.delta(Counters::script_calls)),
        )
        .add(
            "client_cpu_us_per_hand_off",
            window.own_cpu_us.map(per_hand_off),
        )
        .add(
            "messages_per_s",
            window.delta(|counters| counters.calls("publish")) / window.seconds,
        )
        .list("hand_off_us", &distribution)
        .print();
    // Some libraries leave tasks behind that would hold up the end of the runtime.
    std::process::exit(0);
}

/// `mix`: all want one read/write lock, nine times of ten to read.
pub async fn mix(options: Options) {
    let client = leasehold::LockClient::connect(&options.url).await.unwrap();
    let server = Server::connect(&options.url).await;
    let phase = Arc::new(Phase::default());
    let mut tasks = JoinSet::new();
    for task in 0..options.tasks {
        let (client, phase, name) = (client.clone(), phase.clone(), options.name.clone());
        tasks.spawn(async move {
            let (mut reads, mut writes) = (Vec::new(), Vec::new());
            // Those under way when the measuring ends: counted as waits, not as turns.
            let mut cut_off = (Vec::new(), Vec::new());
            let mut turn = task;
            while !phase.over() {
                turn += 1;
                let writing = turn % 10 == 0;
                let start = Instant::now();
                let lock = client.rw_lock(name.as_str());
                let mut side = if writing { lock.write() } else { lock.read() };
                let held = side.acquire().await.unwrap();
                let wait = start.elapsed().as_secs_f64() * 1e3;
                held.release().await.into_result().unwrap();
                if phase.measuring() {
                    if writing { &mut writes } else { &mut reads }.push(wait);
                } else if phase.over() {
                    if writing { &mut cut_off.1 } else { &mut cut_off.0 }.push(wait);
                }
            }
            ((reads, writes), cut_off)
        });
    }
    let window = window(&server, &phase, options.time()).await;
    let (done, cut_off): (Vec<_>, Vec<_>) = tasks.join_all().await.into_iter().unzip();
    let (reads, writes): (Vec<_>, Vec<_>) = done.into_iter().unzip();
    let (mut reads, mut writes) = (reads.concat(), writes.concat());
    let (turns, written) = ((reads.len() + writes.len()) as f64, writes.len() as f64);
    for (more_reads, more_writes) in cut_off {
        reads.extend(more_reads);
        writes.extend(more_writes);
    }
    sort(&mut reads);
    sort(&mut writes);
    Line::new(&options.library, "mix")
        .add("tasks", options.tasks as f64)
        .add("seconds", window.seconds)
        .add("turns_per_s", turns / window.seconds)
        .add("writes_per_s", written / window.seconds)
        .add("read_p99_ms", percentile(&reads, 0.99))
        .add("write_p99_ms", percentile(&writes, 0.99))
        .add("server_cpu_us_per_turn", window.server_cpu_us() / turns)
        .print();
}
