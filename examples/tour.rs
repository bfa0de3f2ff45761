//! Three worker processes fight for one lock, and no update is lost.
//!
//! ```text
//! $ scripts/demo
//! ```
//!
//! starts a Redis server of its own (or uses `REDIS_URL`) and runs this program, which starts itself
//! three times as workers. They read, think, and write one number, which would lose updates if two
//! did it at once. One is killed while it holds the lock, one is stopped past its lease and woken.
//! What happens is printed as it happens; at the end the number is compared with the writes that
//! the workers were told had succeeded. The exit status is 0 only if everything came out as claimed.
#![allow(
    clippy::disallowed_methods,
    reason = "only the crate itself takes its time from elsewhere"
)]

use std::env;
use std::error::Error;
use std::future;
use std::process::Stdio;
use std::time::{Duration, Instant};

use fred::clients::Client;
use fred::interfaces::ClientLike as _;
use fred::types::config::Config;
use fred::types::{ClusterHash, CustomCommand, FromValue, Value};
use leasehold::{FencingToken, KeyScheme, LockClient, LockContext};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines, Stdin};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::mpsc;

const LEASE: Duration = Duration::from_secs(2);
const LOCK: &str = "order:10";
const ROUNDS: u64 = 8;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Result<()> {
    let args: Vec<String> = env::args().collect();
    let url = env::var("REDIS_URL").map_err(|_| "REDIS_URL is not set: run scripts/demo")?;
    if let [_, role, prefix] = &args[..]
        && role == "worker"
    {
        return worker(&url, prefix).await;
    }
    tokio::select! {
        toured = tour(&url) => toured,
        _ = tokio::signal::ctrl_c() => Err("interrupted".into()),
    }
}

async fn locks(url: &str, prefix: &str) -> Result<LockClient> {
    // A prefix of its own, so that nothing else on the server is touched.
    let scheme = KeyScheme::Prefix(prefix.to_owned());
    let builder = LockClient::builder().url(url).lease(LEASE).label("tour");
    Ok(builder.key_scheme(scheme).build().await?)
}

// ---- A worker: does as it is told, line by line.

async fn worker(url: &str, prefix: &str) -> Result<()> {
    let client = locks(url, prefix).await?;
    let store = Store::open(url, prefix).await?;
    let mut orders = BufReader::new(tokio::io::stdin()).lines();
    while let Some(order) = orders.next_line().await? {
        match order.as_str() {
            "without" => {
                for _ in 0..10 * ROUNDS {
                    let number = store.plain_number().await?;
                    think().await;
                    store.write_plainly(number + 1).await?;
                }
            }
            "once" => round(&client, &store).await?,
            "rounds" => {
                for _ in 0..ROUNDS {
                    round(&client, &store).await?;
                }
            }
            "hold" => hold(&client, &store, &mut orders).await?,
            _ => break,
        }
        println!("done");
    }
    client.close(Duration::from_secs(1)).await;
    Ok(())
}

/// Read, think, write: under the lock.
async fn round(client: &LockClient, store: &Store) -> Result<()> {
    let mut ctx = client.context();
    println!("waits");
    let asked = Instant::now();
    let guard = ctx.lock(LOCK).acquire().await?;
    let waited = asked.elapsed();
    let number = store.number().await?;
    let depth = write_next(&mut ctx, store, number).await?;
    let token = guard.fencing_token()?;
    // Said before the release, so that the timeline shows what happened in the order it happened.
    println!(
        "wrote {} with token {token}, at depth {depth}, after waiting {} ms",
        number + 1,
        waited.as_millis()
    );
    guard
        .release()
        .await
        .into_result()
        .map_err(|r| r.to_string())?;
    Ok(())
}

/// Takes the lock that its caller has: the same flow of work enters it again.
async fn write_next(ctx: &mut LockContext, store: &Store, number: u64) -> Result<u32> {
    let inner = ctx.lock(LOCK).acquire().await?;
    think().await;
    if !store.write(number + 1, inner.fencing_token()?).await? {
        return Err("the store refused a holder".into());
    }
    Ok(inner.depth())
}

/// Takes the lock and keeps it until it is lost, then writes all the same, as it should not.
async fn hold(
    client: &LockClient,
    store: &Store,
    orders: &mut Lines<BufReader<Stdin>>,
) -> Result<()> {
    let guard = client.lock(LOCK).acquire().await?;
    let number = store.number().await?;
    let token = guard.fencing_token()?;
    println!("holds {LOCK}, has read {number}, token {token}, thinks on");
    tokio::select! {
        told = guard.run(future::pending::<()>()) => {
            if let Err(lost) = told {
                println!("told {lost}");
            }
        }
        _ = orders.next_line() => return Ok(()),
    }
    let written = store.write(number + 1, token).await?;
    println!(
        "late write of {} {}",
        number + 1,
        if written { "ACCEPTED" } else { "refused" }
    );
    println!("released: {:?}", guard.release().await);
    Ok(())
}

async fn think() {
    tokio::time::sleep(Duration::from_millis(5)).await;
}

// ---- What the lock protects: a number that remembers the greatest token it was written with.

struct Store {
    redis: Client,
    prefix: String,
}

/// Refuses a token smaller than the greatest so far; else writes, and notes the token.
const WRITE: &str = "
    local last = tonumber(redis.call('HGET', KEYS[1], 'token') or 0)
    if tonumber(ARGV[2]) < last then return 0 end
    redis.call('HSET', KEYS[1], 'number', ARGV[1], 'token', ARGV[2])
    return 1";

impl Store {
    async fn open(url: &str, prefix: &str) -> Result<Self> {
        let redis = Client::new(Config::from_url(url)?, None, None, None);
        redis.init().await?;
        let prefix = prefix.to_owned();
        Ok(Self { redis, prefix })
    }

    async fn call<T: FromValue>(&self, command: &'static str, args: Vec<Value>) -> Result<T> {
        let command = CustomCommand::new_static(command, ClusterHash::Random, false);
        Ok(self.redis.custom(command, args).await?)
    }

    fn key(&self, what: &str) -> Value {
        format!("{}:{what}", self.prefix).into()
    }

    async fn number(&self) -> Result<u64> {
        let args = vec![self.key("data"), "number".into()];
        Ok(self.call::<Option<u64>>("HGET", args).await?.unwrap_or(0))
    }

    async fn write(&self, number: u64, token: FencingToken) -> Result<bool> {
        let (number, token) = (number.to_string().into(), token.to_string().into());
        let args = vec![WRITE.into(), "1".into(), self.key("data"), number, token];
        Ok(self.call::<i64>("EVAL", args).await? == 1)
    }

    async fn plain_number(&self) -> Result<u64> {
        let number = self
            .call::<Option<u64>>("GET", vec![self.key("plain")])
            .await?;
        Ok(number.unwrap_or(0))
    }

    async fn write_plainly(&self, number: u64) -> Result<()> {
        self.call("SET", vec![self.key("plain"), number.to_string().into()])
            .await
    }

    /// Removes everything of this tour: also the lock's token counter, which would last an hour.
    async fn remove(&self) -> Result<()> {
        let counter = self.key(&format!("token:{{{LOCK}}}"));
        self.call("DEL", vec![self.key("data"), self.key("plain"), counter])
            .await
    }
}

// ---- The tour: starts the workers, tells them what to do, and says what they say.

struct Worker {
    child: Child,
    stdin: ChildStdin,
}

impl Worker {
    async fn tell(&mut self, order: &str) -> Result<()> {
        Ok(self
            .stdin
            .write_all(format!("{order}\n").as_bytes())
            .await?)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = self.child.id().ok_or("the worker has ended")?;
        let pid = Pid::from_raw(pid.cast_signed()).ok_or("no such process")?;
        Ok(kill_process(pid, signal)?)
    }
}

struct Tour {
    started: Instant,
    said: mpsc::UnboundedReceiver<(usize, String)>,
    /// Writes that the store confirmed to a worker.
    confirmed: u64,
}

impl Tour {
    fn note(&self, who: &str, what: &str) {
        println!(
            "{:7.3} s  {who:<9}  {what}",
            self.started.elapsed().as_secs_f32()
        );
    }

    /// Says what the workers say until `which` says something that begins with `what`.
    async fn until(&mut self, which: impl Fn(usize) -> bool, what: &str) -> Result<String> {
        loop {
            let next = tokio::time::timeout(Duration::from_secs(30), self.said.recv()).await;
            let (worker, line) = next
                .map_err(|_| format!("nobody said `{what}`"))?
                .ok_or("no workers")?;
            if line.starts_with("wrote") {
                self.confirmed += 1;
            }
            if line != "done" && line != "waits" {
                self.note(&format!("worker {}", NAMES[worker]), &line);
            }
            if which(worker) && line.starts_with(what) {
                return Ok(line);
            }
        }
    }
}

const NAMES: [&str; 3] = ["a", "b", "c"];

async fn tour(url: &str) -> Result<()> {
    let prefix = format!("leasehold-tour-{}", uuid::Uuid::new_v4().simple());
    let client = locks(url, &prefix).await?;
    let store = Store::open(url, &prefix).await?;
    let (say, said) = mpsc::unbounded_channel();
    let mut tour = Tour {
        started: Instant::now(),
        said,
        confirmed: 0,
    };
    let mut workers = Vec::new();
    for (number, name) in NAMES.iter().enumerate() {
        let mut command = Command::new(env::current_exe()?);
        command.args(["worker", &prefix]).kill_on_drop(true);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        tour.note(
            "tour",
            &format!("starts worker {name}, process {}", child.id().unwrap_or(0)),
        );
        let stdin = child.stdin.take().ok_or("no stdin")?;
        let mut lines = BufReader::new(child.stdout.take().ok_or("no stdout")?).lines();
        let say = say.clone();
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                let _ = say.send((number, line));
            }
        });
        workers.push(Worker { child, stdin });
    }

    tour.note(
        "tour",
        "first without the lock: each worker reads, thinks, and writes a number",
    );
    for worker in &mut workers {
        worker.tell("without").await?;
    }
    for _ in &workers {
        tour.until(|_| true, "done").await?;
    }
    let (wanted, plain) = (30 * ROUNDS, store.plain_number().await?);
    tour.note(
        "tour",
        &format!(
            "{wanted} updates, and the number is {plain}: {} lost",
            wanted - plain
        ),
    );
    ensure(
        plain < wanted,
        "updates are lost without the lock, or this would prove nothing",
    )?;

    tour.note(
        "tour",
        &format!("now under the lock `{LOCK}`, and twice nested"),
    );
    for worker in &mut workers {
        worker.tell("rounds").await?;
    }
    for _ in &workers {
        tour.until(|_| true, "done").await?;
    }

    killed(&mut tour, &mut workers).await?;
    stopped(&mut tour, &mut workers).await?;

    tour.note(
        "tour",
        "b and c once more, with what they have been through",
    );
    for worker in &mut workers[1..] {
        worker.tell("rounds").await?;
    }
    for _ in 1..workers.len() {
        tour.until(|_| true, "done").await?;
    }
    for worker in &mut workers[1..] {
        worker.tell("quit").await?;
        ensure(
            worker.child.wait().await?.success(),
            "a worker ends in order",
        )?;
    }

    let number = store.number().await?;
    let free = client.inspect(LOCK).await?.holder.is_none();
    store.remove().await?;
    tour.note(
        "tour",
        &format!(
            "{} writes were confirmed, and the number is {number}",
            tour.confirmed
        ),
    );
    ensure(number == tour.confirmed, "no update was lost")?;
    ensure(free, "the lock is free at the end")?;
    tour.note("tour", "no update was lost");
    Ok(())
}

/// Worker a dies while it holds the lock.
async fn killed(tour: &mut Tour, workers: &mut [Worker]) -> Result<()> {
    workers[0].tell("hold").await?;
    tour.until(|worker| worker == 0, "holds").await?;
    workers[1].tell("once").await?;
    tour.until(|worker| worker == 1, "waits").await?;
    workers[0].signal(Signal::KILL)?;
    let killed = Instant::now();
    tour.note(
        "tour",
        "kill -9 to worker a, which holds the lock; worker b waits",
    );
    tour.until(|worker| worker == 1, "wrote").await?;
    let after = killed.elapsed();
    let what = format!(
        "worker b took over {} ms after the kill; the lease is {} ms",
        after.as_millis(),
        LEASE.as_millis()
    );
    tour.note("tour", &what);
    tour.until(|worker| worker == 1, "done").await?;
    // One lease, one command timeout (a sixth of it), and a moment for a busy machine.
    ensure(
        after < LEASE + LEASE / 6 + Duration::from_millis(500),
        "a crash frees the lock within its lease",
    )
}

/// Worker b is frozen past its lease, and woken when c has the lock.
async fn stopped(tour: &mut Tour, workers: &mut [Worker]) -> Result<()> {
    workers[1].tell("hold").await?;
    tour.until(|worker| worker == 1, "holds").await?;
    workers[1].signal(Signal::STOP)?;
    tour.note(
        "tour",
        "kill -STOP to worker b, which holds the lock: it is frozen, and knows nothing",
    );
    workers[2].tell("once").await?;
    tour.until(|worker| worker == 2, "wrote").await?;
    tour.until(|worker| worker == 2, "done").await?;
    workers[1].signal(Signal::CONT)?;
    tour.note(
        "tour",
        "kill -CONT to worker b: it wakes, and thinks on where it was",
    );
    tour.until(|worker| worker == 1, "told").await?;
    let late = tour.until(|worker| worker == 1, "late write").await?;
    tour.until(|worker| worker == 1, "released: Lost").await?;
    tour.until(|worker| worker == 1, "done").await?;
    ensure(
        late.ends_with("refused"),
        "the late write is refused by its token",
    )
}

fn ensure(holds: bool, claim: &str) -> Result<()> {
    if holds {
        Ok(())
    } else {
        Err(format!("this does not hold: {claim}").into())
    }
}
