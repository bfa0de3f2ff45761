//! One library, one scenario, one line of JSON.
//!
//! ```text
//! peers LIBRARY SCENARIO --url redis://127.0.0.1:6379 [--tasks N] [--seconds S] ...
//! ```
//!
//! Libraries: leasehold, bare-fred, bare-redis, rslock, rlock, nadis; leasehold-fair, -read, -write, -multi;
//! ping-fred, ping-tcp. Scenarios: pair, own-names, contended, processes; and for leasehold alone mix, holds,
//! waiters, growth. `peers NAME processes -- COMMAND` drives
//! workers of any program (see `processes.rs`).

mod holds;
mod library;
mod measure;
mod processes;
mod scenarios;

use library::{
    Bare, Fair, Fred, Leasehold, Library, Multi, Nadis, Ping, RedisRs, Rlock, Rslock, Side, TcpPing,
};
use scenarios::Options;

/// Arguments of the form `--key value`; what follows `--` is a command.
#[derive(Debug)]
struct Arguments {
    positional: Vec<String>,
    named: Vec<(String, String)>,
    command: Vec<String>,
}

impl Arguments {
    fn read() -> Self {
        let mut read = Self {
            positional: Vec::new(),
            named: Vec::new(),
            command: Vec::new(),
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            if argument == "--" {
                read.command = arguments.by_ref().collect();
            } else if let Some(key) = argument.strip_prefix("--") {
                let value = arguments.next().unwrap_or_default();
                read.named.push((key.to_owned(), value));
            } else {
                read.positional.push(argument);
            }
        }
        read
    }

    fn text(&self, key: &str) -> Option<&str> {
        let found = self.named.iter().find(|(name, _)| name == key);
        found.map(|(_, value)| value.as_str())
    }

    fn number(&self, key: &str, default: f64) -> f64 {
        self.text(key)
            .map_or(default, |value| value.parse().unwrap())
    }
}

async fn run<L: Library>(scenario: &str, options: Options, arguments: &Arguments) {
    match scenario {
        "pair" | "own-names" => scenarios::own_names::<L>(scenario, options).await,
        "contended" => scenarios::contended::<L>(options).await,
        "worker" => processes::worker::<L>(options).await,
        "processes" => {
            let own = std::env::current_exe().unwrap();
            let mut command = arguments.command.clone();
            if command.is_empty() {
                command = vec![
                    own.display().to_string(),
                    options.library.clone(),
                    "worker".into(),
                ];
            }
            let processes = arguments.number("processes", 4.0) as usize;
            let settle = arguments.number("settle", 0.5);
            processes::drive(options, processes, command, settle).await;
        }
        other => panic!("no scenario `{other}`"),
    }
}

#[tokio::main]
async fn main() {
    let arguments = Arguments::read();
    let [library, scenario] = &arguments.positional[..] else {
        panic!("peers LIBRARY SCENARIO --url URL [--tasks N] [--seconds S]");
    };
    let default_tasks = match scenario.as_str() {
        "pair" => 1.0,
        "processes" | "worker" => 16.0,
        _ => 64.0,
    };
    let options = Options {
        library: library.clone(),
        url: arguments
            .text("url")
            .unwrap_or("redis://127.0.0.1:6379")
            .to_owned(),
        tasks: arguments.number("tasks", default_tasks) as usize,
        seconds: arguments.number("seconds", 2.0),
        name: (arguments.text("name")).map_or_else(
            || format!("bench:{library}:{}", std::process::id()),
            str::to_owned,
        ),
    };
    match (library.as_str(), scenario.as_str()) {
        ("leasehold", "holds") => {
            holds::holds(options, arguments.number("holds", 1e5) as usize).await;
        }
        ("leasehold", "waiters") => {
            let waiters = arguments.number("waiters", 1e5) as usize;
            holds::waiters(options, waiters, arguments.text("on").unwrap_or("lock")).await;
        }
        ("leasehold", "growth") => {
            let other = arguments
                .text("url2")
                .expect("--url2: a second, empty server");
            let rounds = arguments.number("rounds", 5.0) as usize;
            let most = arguments.number("names", 1e6) as usize;
            holds::growth(options, other, rounds, most).await;
        }
        ("leasehold", "mix") => scenarios::mix(options).await,
        ("leasehold", _) => run::<Leasehold>(scenario, options, &arguments).await,
        ("leasehold-fair", _) => run::<Fair>(scenario, options, &arguments).await,
        ("leasehold-read", _) => run::<Side<false>>(scenario, options, &arguments).await,
        ("leasehold-write", _) => run::<Side<true>>(scenario, options, &arguments).await,
        ("leasehold-multi", _) => run::<Multi>(scenario, options, &arguments).await,
        ("ping-fred", _) => run::<Ping>(scenario, options, &arguments).await,
        ("ping-tcp", _) => run::<TcpPing>(scenario, options, &arguments).await,
        ("bare-fred", _) => run::<Bare<Fred>>(scenario, options, &arguments).await,
        ("bare-redis", _) => run::<Bare<RedisRs>>(scenario, options, &arguments).await,
        ("rslock", _) => run::<Rslock>(scenario, options, &arguments).await,
        ("rlock", _) => run::<Rlock>(scenario, options, &arguments).await,
        ("nadis", _) => run::<Nadis>(scenario, options, &arguments).await,
        (_, "processes") if !arguments.command.is_empty() => {
            run::<Leasehold>(scenario, options, &arguments).await;
        }
        (other, _) => panic!("no library `{other}`"),
    }
}
