//! `processes`: one name wanted by the tasks of several processes.
//!
//! The driver starts the workers: `COMMAND worker --url URL --name NAME --tasks N`. A worker connects,
//! writes `ready`, and reads a line with two moments, in microseconds since 1970. Its tasks take the
//! lock and give it back from the first moment to the second. Then it writes a line
//! `TASK ACQUIRED RELEASED` for each time one of them had the lock, and ends.
//!
//! The driver puts all these in order of time. A hand-off is a change of task, in whichever process.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::task::JoinSet;

use crate::library::Library;
use crate::measure::{Counters, Line, Server, own_cpu_us, percentile, sort};
use crate::scenarios::Options;

fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    since.as_nanos() as u64 / 1000
}

/// Sleeps until that moment.
fn sleep_until(moment_us: u64) {
    std::thread::sleep(Duration::from_micros(moment_us.saturating_sub(now_us())));
}

pub async fn worker<L: Library>(options: Options) {
    let library = L::connect(&options.url).await;
    println!("ready");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let moments: Vec<u64> = line
        .split_whitespace()
        .map(|n| n.parse().unwrap())
        .collect();
    let (start, end) = (moments[0], moments[1]);
    sleep_until(start);
    let had: Arc<Mutex<Vec<(usize, u64, u64)>>> = Arc::default();
    let mut tasks = JoinSet::new();
    for task in 0..options.tasks {
        let (library, name, had) = (library.clone(), options.name.clone(), had.clone());
        tasks.spawn(async move {
            while now_us() < end {
                let held = library.lock(&name).await;
                let acquired = now_us();
                had.lock().unwrap().push((task, acquired, now_us()));
                library.unlock(held).await;
            }
        });
    }
    let rest = Duration::from_micros(end.saturating_sub(now_us()));
    let finish = tokio::time::timeout(rest + Duration::from_millis(300), async {
        while tasks.join_next().await.is_some() {}
    });
    let _cut_short = finish.await;
    tasks.abort_all();
    let mut text = String::new();
    for (task, acquired, released) in had.lock().unwrap().iter() {
        text.push_str(&format!("{task} {acquired} {released}\n"));
    }
    if let Some(cpu) = own_cpu_us() {
        text.push_str(&format!("cpu {cpu}\n"));
    }
    let _ = std::io::stdout().write_all(text.as_bytes());
    let _ = std::io::stdout().flush();
    std::process::exit(0);
}

/// One time somebody had the lock.
#[derive(Clone, Copy, Debug)]
struct Hold {
    process: usize,
    task: usize,
    acquired: u64,
    released: u64,
}

/// Starts `processes` workers by `command`, and says how they shared the lock.
pub async fn drive(options: Options, processes: usize, command: Vec<String>, settle: f64) {
    let server = Server::connect(&options.url).await;
    let mut children = Vec::new();
    for _ in 0..processes {
        let mut child = Command::new(&command[0])
            .args(&command[1..])
            .args(["--url", &options.url, "--name", &options.name])
            .args(["--tasks", &options.tasks.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        children.push((child, output));
    }
    for (_, output) in &mut children {
        let mut line = String::new();
        while line.trim() != "ready" {
            line.clear();
            assert!(
                output.read_line(&mut line).unwrap() > 0,
                "a worker has ended"
            );
        }
    }
    // The first part is for getting warm, and is not counted.
    let settle_us = (settle * 1e6) as u64;
    let start = now_us() + 200_000;
    let (from, end) = (
        start + settle_us,
        start + settle_us + (options.seconds * 1e6) as u64,
    );
    for (child, _) in &mut children {
        let input = child.stdin.as_mut().unwrap();
        writeln!(input, "{start} {end}").unwrap();
    }
    sleep_until(from);
    let before = server.counters().await;
    sleep_until(end);
    let after = server.counters().await;

    let mut holds = Vec::new();
    let mut worker_cpu_us = 0.0;
    for (process, (mut child, output)) in children.into_iter().enumerate() {
        for line in output.lines() {
            let line = line.unwrap();
            let parts: Vec<&str> = line.split_whitespace().collect();
            match parts[..] {
                ["cpu", us] => worker_cpu_us += us.parse::<f64>().unwrap(),
                [task, acquired, released] => holds.push(Hold {
                    process,
                    task: task.parse().unwrap(),
                    acquired: acquired.parse().unwrap(),
                    released: released.parse().unwrap(),
                }),
                _ => {}
            }
        }
        child.wait().unwrap();
    }
    holds.sort_unstable_by_key(|hold| hold.acquired);
    let (mut hand_offs, mut between, mut overlaps) = (0.0, 0.0, 0.0);
    let mut gaps = Vec::new();
    let mut shares = vec![0.0; processes];
    let mut served = vec![0.0; processes * options.tasks];
    for pair in holds.windows(2) {
        let [before, now] = [pair[0], pair[1]];
        if now.acquired < from || now.acquired >= end {
            continue;
        }
        served[now.process * options.tasks + now.task] += 1.0;
        if now.acquired < before.released {
            overlaps += 1.0;
        }
        if (before.process, before.task) != (now.process, now.task) {
            hand_offs += 1.0;
            shares[now.process] += 1.0;
            gaps.push(now.acquired.saturating_sub(before.released) as f64);
        }
        if before.process != now.process {
            between += 1.0;
        }
    }
    sort(&mut gaps);
    sort(&mut served);
    let total: f64 = shares.iter().sum();
    let shares: Vec<f64> = shares.iter().map(|times| 100.0 * times / total).collect();
    let delta = |what: &dyn Fn(&Counters) -> f64| what(&after) - what(&before);
    // A real release removes the holder and says so by a message; a hand-off by the server removes it and says
    // nothing.
    let releases = delta(&|counters| counters.calls("publish"));
    let handed_over = delta(&|counters| counters.calls("hdel")) - releases;
    let calls = delta(&Counters::script_calls);
    let ours = options.library == "leasehold";
    Line::new(&options.library, "processes")
        .add("processes", processes as f64)
        .add("tasks", options.tasks as f64)
        .add("seconds", options.seconds)
        .add("hand_offs_per_s", hand_offs / options.seconds)
        .add("between_processes_per_s", between / options.seconds)
        .add(
            "least_share_percent",
            shares.iter().copied().fold(f64::MAX, f64::min),
        )
        .add("most_served", percentile(&served, 1.0))
        .add("least_served", percentile(&served, 0.0))
        .add(
            "starved",
            served.iter().filter(|times| **times == 0.0).count() as f64,
        )
        .add("overlaps", overlaps)
        .add("hand_off_p50_us", percentile(&gaps, 0.5))
        .add("hand_off_p99_us", percentile(&gaps, 0.99))
        .add(
            "server_cpu_us_per_hand_off",
            delta(&|counters| counters.cpu_us) / hand_offs,
        )
        .add(
            "server_cpu_percent",
            delta(&|counters| counters.cpu_us) / options.seconds / 1e4,
        )
        .add("worker_cpu_us_per_hand_off", worker_cpu_us / hand_offs)
        .add("script_calls_per_hand_off", calls / hand_offs)
        .add("releases_per_s", releases / options.seconds)
        .add(
            "by_server_per_release",
            ours.then_some(handed_over / releases),
        )
        .add(
            "calls_per_release",
            ours.then_some((calls - handed_over) / releases),
        )
        .list("shares_percent", &shares)
        .print();
}
