//! What is measured beside time: the server's counters, this process's CPU and memory, percentiles.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The server, asked on a connection of our own.
#[derive(Clone)]
pub struct Server(redis::aio::MultiplexedConnection);

/// Its counters at one moment.
#[derive(Clone, Debug)]
pub struct Counters {
    pub cpu_us: f64,
    commands: HashMap<String, (f64, f64)>,
}

impl Server {
    pub async fn connect(url: &str) -> Self {
        let client = redis::Client::open(url).unwrap();
        Self(client.get_multiplexed_async_connection().await.unwrap())
    }

    pub async fn counters(&self) -> Counters {
        let mut command = redis::cmd("INFO");
        command.arg("all");
        let text: String = command.query_async(&mut self.0.clone()).await.unwrap();
        let mut cpu_us = 0.0;
        let mut commands = HashMap::new();
        for line in text.lines() {
            let Some((key, value)) = line.split_once(':') else {
                continue;
            };
            if key == "used_cpu_sys" || key == "used_cpu_user" {
                cpu_us += value.parse::<f64>().unwrap() * 1e6;
            } else if let Some(command) = key.strip_prefix("cmdstat_") {
                let field = |name: &str| {
                    let found = value.split(',').find_map(|part| part.strip_prefix(name));
                    found.map_or(0.0, |number| number.parse().unwrap())
                };
                commands.insert(command.to_owned(), (field("calls="), field("usec=")));
            }
        }
        Counters { cpu_us, commands }
    }
}

impl Counters {
    pub fn calls(&self, command: &str) -> f64 {
        self.commands.get(command).map_or(0.0, |found| found.0)
    }

    pub fn usec(&self, command: &str) -> f64 {
        self.commands.get(command).map_or(0.0, |found| found.1)
    }

    /// Microseconds in scripts, however they were called.
    pub fn script_us(&self) -> f64 {
        self.usec("evalsha") + self.usec("eval")
    }

    pub fn script_calls(&self) -> f64 {
        self.calls("evalsha") + self.calls("eval")
    }
}

/// CPU time of this process, user and system. `None` where there is no procfs.
pub fn own_cpu_us() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?;
    Some(ticks * 1e4) // 100 ticks a second, on every Linux
}

/// Resident memory of this process in bytes. `None` where there is no procfs.
pub fn resident() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<f64>().ok()? * 1024.0)
}

/// Waits until the resident memory has not changed by 1 % for a second, at most 20 s.
pub async fn settled() -> Option<f64> {
    let mut before = resident()?;
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let now = resident()?;
        if (now - before).abs() < before * 0.01 {
            return Some(now);
        }
        before = now;
    }
    Some(before)
}

/// The value below which this share of the sorted numbers lies.
pub fn percentile(sorted: &[f64], share: f64) -> f64 {
    if sorted.is_empty() {
        return f64::NAN;
    }
    let at = (sorted.len() as f64 * share) as usize;
    sorted[at.min(sorted.len() - 1)]
}

pub fn sort(numbers: &mut [f64]) {
    numbers.sort_unstable_by(f64::total_cmp);
}

/// Shares at which a distribution is drawn.
pub const SHARES: [f64; 13] = [
    0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 0.999,
];

/// Whether what happens now counts.
#[derive(Debug, Default)]
pub struct Phase {
    measuring: AtomicBool,
    over: AtomicBool,
}

impl Phase {
    pub fn measuring(&self) -> bool {
        self.measuring.load(Ordering::Relaxed)
    }

    pub fn over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    pub fn begin(&self) {
        self.measuring.store(true, Ordering::Relaxed);
    }

    pub fn end(&self) {
        self.measuring.store(false, Ordering::Relaxed);
        self.over.store(true, Ordering::Relaxed);
    }
}

/// One line of JSON.
#[derive(Debug)]
pub struct Line(String);

impl Line {
    pub fn new(library: &str, scenario: &str) -> Self {
        Self(format!(
            "{{\"library\":\"{library}\",\"scenario\":\"{scenario}\""
        ))
    }

    /// Leaves out what is not known.
    pub fn add(mut self, key: &str, number: impl Into<Option<f64>>) -> Self {
        if let Some(number) = number.into().filter(|number| number.is_finite()) {
            let _ = write!(self.0, ",\"{key}\":{}", (number * 1e4).round() / 1e4);
        }
        self
    }

    pub fn list(mut self, key: &str, numbers: &[f64]) -> Self {
        let texts: Vec<String> = numbers.iter().map(|n| format!("{n:.2}")).collect();
        let _ = write!(self.0, ",\"{key}\":[{}]", texts.join(","));
        self
    }

    pub fn print(self) {
        println!("{}}}", self.0);
    }
}
