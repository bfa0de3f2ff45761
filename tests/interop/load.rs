//! Both languages at once, in earnest.

use std::collections::VecDeque;
use std::time::Duration;

use leasehold::{KeyScheme, LockClient, ReleaseOutcome};

use crate::java::{Asked, Java, Kind};
use crate::{LEASE, common::*, connected, nothing_of_ours_left, ours};

/// Threads there, and tasks here.
const EACH: usize = 4;

/// Counts up under a lock of this kind, each in its own way; answers with the counter in the end. `n` sections each.
async fn count(kind: Kind, java: &Java, rust: &LockClient, name: &str, n: usize) -> usize {
    let there = java.client(&server().url(), LEASE).await;
    let counter = format!("count-{name}");
    let threads: Vec<_> = (0..EACH)
        .map(|_| there.lock(kind, name).count_up(&counter, n))
        .collect();
    let tasks: Vec<_> = (0..EACH)
        .map(|_| {
            let (rust, name, counter) = (rust.clone(), name.to_owned(), counter.clone());
            tokio::spawn(async move {
                let cli = server().cli().await;
                let mut lock = match kind {
                    Kind::Fair => rust.fair_lock(&*name),
                    Kind::Write => rust.rw_lock(&*name).write(),
                    _ => rust.lock(&*name),
                };
                for _ in 0..n {
                    let guard = lock.acquire().await.unwrap();
                    // Reads, and writes one more: what two at once would spoil.
                    let before = cli.cmd(&["GET", &counter]).await.text_if_any();
                    let before: usize = before.map_or(0, |text| text.parse().unwrap());
                    let after = (before + 1).to_string();
                    cli.cmd(&["SET", &counter, &after]).await.ok();
                    assert_eq!(guard.release().await, ReleaseOutcome::Released);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    for thread in threads {
        assert_eq!(thread.int().await, i64::try_from(n).unwrap());
    }
    let cli = server().cli().await;
    let count = cli.cmd(&["GET", &counter]).await.text().parse().unwrap();
    cli.cmd(&["DEL", &counter]).await.ok();
    count
}

/// S1 over both languages: 4 threads and 4 tasks, and no update of a counter is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_update_is_lost_between_the_languages() {
    none_is_lost(Kind::Plain, scaled(250, 2500)).await;
}

/// The same by the fair lock, whose queue all eight stand in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_update_is_lost_under_a_fair_lock() {
    none_is_lost(Kind::Fair, scaled(100, 2500)).await;
}

/// The same by the writing side of a read/write lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_update_is_lost_under_a_write_lock() {
    none_is_lost(Kind::Write, scaled(100, 2500)).await;
}

/// `n` sections each; 20 000 in all in the long form.
async fn none_is_lost(kind: Kind, n: usize) {
    let Some(java) = Java::shared() else { return };
    let (rust, name) = (ours(LEASE).await, unique_name());
    assert_eq!(count(kind, &java, &rust, &name, n).await, 2 * EACH * n);
    server().cmd(&["DEL", &token_key(&name)]).await.ok();
    nothing_of_ours_left(&name).await;
}

/// The test above proves something only if this loses updates: here each language has a lock of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn updates_are_lost_if_the_lock_is_not_shared() {
    let Some(java) = Java::shared() else { return };
    let (url, name) = (server().url(), unique_name());
    let scheme = || KeyScheme::Prefix("app".into());
    let rust = connected(|| LockClient::builder().url(&url).key_scheme(scheme())).await;
    let n = 250;
    let counted = count(Kind::Plain, &java, &rust, &name, n).await;
    assert!(counted < 2 * EACH * n, "{counted}");
}

/// A register that takes tokens: who reads it shuts out all with smaller ones, and so does who writes. It
/// remembers with which tokens it was written, and how often by whom.
const ENTER: &str = "
    if tonumber(ARGV[1]) < tonumber(redis.call('HGET', KEYS[1], 'fence') or '0') then
      return 'refused'
    end
    redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'inside', ARGV[2])
    return redis.call('HGET', KEYS[1], 'value') or '0'";
const WRITE: &str = "
    if tonumber(ARGV[1]) < tonumber(redis.call('HGET', KEYS[1], 'fence') or '0') then
      return 'refused'
    end
    redis.call('HSET', KEYS[1], 'value', ARGV[3])
    redis.call('HINCRBY', KEYS[1], 'writes', 1)
    redis.call('HINCRBY', KEYS[1], ARGV[2], 1)
    redis.call('RPUSH', KEYS[1] .. ':tokens', ARGV[1])
    return 'accepted'";

/// How long they think with the lock in their hands, so that they can be met there.
const PAUSE: Duration = ms(10);

/// How many write in one process.
const WRITERS: usize = 2;

/// Short, because each death in the lock stops everybody for that long.
const SHORT: Duration = secs(2);

fn register(name: &str) -> String {
    format!("register-{name}")
}

/// A process that writes to the register until it is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writing_worker() {
    let Some(mut me) = WorkerSide::if_spawned() else {
        return;
    };
    let env = |key| std::env::var(key).unwrap();
    let (url, name, who) = (env("URL"), env("NAME"), env("WHO"));
    let port = env("PORT").parse().unwrap();
    let builder = || {
        let builder = LockClient::builder().url(&url).lease(SHORT);
        builder.token_retention(None)
    };
    let client = connected(builder).await;
    for _ in 0..WRITERS {
        let (client, name, who) = (client.clone(), name.clone(), who.clone());
        tokio::spawn(async move {
            let cli = Cli::connect(port).await;
            let register = register(&name);
            let run = async |script, args: &[&str]| {
                let words = [&["EVAL", script, "1", &register], args].concat();
                cli.cmd(&words).await.text()
            };
            loop {
                let guard = match client.lock(&*name).acquire().await {
                    Ok(guard) => guard,
                    // On a busy machine the server may be silent for a lease as short as this.
                    Err(error) if error.is_retryable() => continue,
                    Err(error) => panic!("{error:?}"),
                };
                // Lost before we looked: there is nothing to write with.
                let Ok(token) = guard.fencing_token() else {
                    continue;
                };
                let token = token.to_string();
                let before = run(ENTER, &[&token, &who]).await;
                tokio::time::sleep(PAUSE).await;
                if before != "refused" {
                    let after = (before.parse::<u64>().unwrap() + 1).to_string();
                    run(WRITE, &[&token, &who, &after]).await;
                }
                // Lost or not: the fence has seen to it.
                let _ = guard.release().await;
            }
        });
    }
    me.line().await;
}

/// A process that writes, and may be killed.
struct Mortal {
    who: String,
    process: Process,
}

enum Process {
    Rust(Box<Worker>),
    Java(Java, [Asked; WRITERS]),
}

impl Mortal {
    /// The `n`-th of them; each third is Rust.
    async fn new(name: &str, n: usize) -> Self {
        let url = server().url();
        if n.is_multiple_of(3) {
            let who = format!("rust-{n}");
            let port = server().port().to_string();
            let envs = [
                ("URL", &*url),
                ("NAME", name),
                ("WHO", &who),
                ("PORT", &port),
            ];
            let process = Process::Rust(Box::new(Worker::spawn("load::writing_worker", &envs)));
            return Self { who, process };
        }
        let who = format!("java-{n}");
        let java = Java::another();
        let there = java.client(&url, SHORT).await;
        let writers = [(); WRITERS].map(|()| {
            let lock = there.lock(Kind::Fenced, name);
            lock.write_register(&register(name), (ENTER, WRITE), &who, PAUSE)
        });
        let process = Process::Java(java, writers);
        Self { who, process }
    }

    fn stop(&self) {
        match &self.process {
            Process::Rust(worker) => worker.stop(),
            Process::Java(java, _) => java.stop(),
        }
    }

    fn cont(&self) {
        match &self.process {
            Process::Rust(worker) => worker.cont(),
            Process::Java(java, _) => java.cont(),
        }
    }

    async fn kill(self) {
        match self.process {
            Process::Rust(mut worker) => {
                worker.kill();
                worker.wait().await;
            }
            Process::Java(java, writers) => {
                java.kill();
                for writer in writers {
                    // It had no exception before its end.
                    assert!(writer.if_any().await.is_none());
                }
            }
        }
    }
}

/// S1 and S2 over both languages, and deaths: processes of both are killed, every second time in the lock. Who comes
/// after reads what was written before, every accepted write counts, and tokens rise from write to write.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_write_is_lost_or_late_when_processes_are_killed() {
    if Java::shared().is_none() {
        return;
    }
    let name = unique_name();
    let (cli, register) = (server().cli().await, register(&name));
    let writes = async |who: &str| {
        let text = cli.cmd(&["HGET", &register, who]).await.text_if_any();
        text.map_or(0, |text| text.parse::<u64>().unwrap())
    };
    let mut living = VecDeque::new();
    for n in 0..3 {
        living.push_back(Mortal::new(&name, n).await);
    }
    for round in 0..scaled(6, 60) {
        // The one that has lived longest. It has its share before it dies.
        let mortal = living.pop_front().unwrap();
        let what = format!("{} writes", mortal.who);
        eventually(secs(60), &what, async || writes(&mortal.who).await >= 5).await;
        if round % 4 < 2 {
            // Frozen when it was seen inside; and it has the lock if nobody else goes on.
            for attempt in 0.. {
                let inside = async || {
                    let inside = cli.cmd(&["HGET", &register, "inside"]).await;
                    inside.text() == mortal.who
                };
                eventually(secs(60), &what, inside).await;
                mortal.stop();
                let before = (cli.hash(&name).await, writes("writes").await);
                // Many times what a turn of the others takes.
                tokio::time::sleep(ms(150)).await;
                if before == (cli.hash(&name).await, writes("writes").await) {
                    break;
                }
                mortal.cont();
                assert!(attempt < 100, "{} is never met in the lock", mortal.who);
            }
        }
        mortal.kill().await;
        living.push_back(Mortal::new(&name, 3 + round).await);
    }
    // Also those that came last have had their share.
    for mortal in living {
        let what = format!("{} writes", mortal.who);
        eventually(secs(60), &what, async || writes(&mortal.who).await >= 5).await;
        mortal.kill().await;
    }
    let end = cli.hash(&register).await;
    assert_eq!(end["value"], end["writes"]);
    let list = format!("{register}:tokens");
    let tokens = cli.cmd(&["LRANGE", &list, "0", "-1"]).await.texts();
    let tokens: Vec<u64> = tokens.iter().map(|token| token.parse().unwrap()).collect();
    assert_eq!(tokens.len().to_string(), end["writes"]);
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
    // What the dead held ends by itself; and what their last unlock left, later.
    cli.until_free(&name).await;
    for left in cli.keys_with(&name).await {
        cli.cmd(&["DEL", &left]).await.ok();
    }
}
