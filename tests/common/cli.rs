//! A second road to the server: a small RESP client, and a recorder of all commands.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Mutex;

use super::resp::{self, Reply};
use super::{channel, eventually, secs};

/// Longer than any server in a test takes to answer, a stopped one excepted.
const ANSWER: Duration = secs(20);

/// One connection, made anew when it broke. Takes `&self`, so that polls and joins share it.
pub struct Cli {
    port: u16,
    /// Taken out for the length of a command: one that was cut off does not shift the answers.
    wire: Mutex<Option<Wire>>,
}

pub(super) struct Wire {
    stream: TcpStream,
    unread: Vec<u8>,
}

impl Cli {
    /// Connects to the server on `port`.
    pub async fn connect(port: u16) -> Self {
        let wire = Wire::connect(port)
            .await
            .unwrap_or_else(|e| panic!("port {port}: {e}"));
        Self {
            port,
            wire: Mutex::new(Some(wire)),
        }
    }

    /// Runs one command. An error of the server is a [`Reply::Error`].
    ///
    /// # Panics
    ///
    /// If no answer comes.
    pub async fn cmd(&self, args: &[&str]) -> Reply {
        let reply = self.try_cmd(args).await;
        reply.unwrap_or_else(|error| panic!("{args:?} on port {}: {error}", self.port))
    }

    /// Runs one command, on a server that may be gone.
    pub async fn try_cmd<A: AsRef<[u8]>>(&self, args: &[A]) -> io::Result<Reply> {
        let mut slot = self.wire.lock().await;
        let mut wire = match slot.take() {
            Some(wire) => wire,
            None => Wire::connect(self.port).await?,
        };
        wire.send(&resp::request(args)).await?;
        let reply = tokio::time::timeout(ANSWER, wire.next()).await??;
        *slot = Some(wire);
        Ok(reply)
    }

    pub async fn exists(&self, key: &str) -> bool {
        self.cmd(&["EXISTS", key]).await.int() == 1
    }

    /// The fields of a hash; empty if there is no such key.
    pub async fn hash(&self, key: &str) -> BTreeMap<String, String> {
        let flat = self.cmd(&["HGETALL", key]).await.ok().texts();
        flat.chunks(2)
            .map(|pair| (pair[0].clone(), pair[1].clone()))
            .collect()
    }

    /// The same, but `None` if it is not a hash.
    pub async fn hash_if_any(&self, key: &str) -> Option<BTreeMap<String, String>> {
        let kind = self.cmd(&["TYPE", key]).await.text();
        if kind == "hash" {
            Some(self.hash(key).await)
        } else {
            None
        }
    }

    /// Remaining milliseconds; -1 without a TTL, -2 without a key.
    pub async fn pttl(&self, key: &str) -> i64 {
        self.cmd(&["PTTL", key]).await.int()
    }

    /// The hold counts of a lock, summed over its owners; `None` if nobody holds it.
    pub async fn count(&self, name: &str) -> Option<i64> {
        let hash = self.hash(name).await;
        if hash.is_empty() {
            return None;
        }
        let owners = hash.iter().filter(|(field, _)| *field != "mode");
        Some(owners.map(|(_, count)| count.parse::<i64>().unwrap()).sum())
    }

    /// Every key with `part` in its name.
    pub async fn keys_with(&self, part: &str) -> Vec<String> {
        self.cmd(&["KEYS", &containing(part)]).await.texts()
    }

    /// Every channel with `part` in its name that somebody subscribes to, sharded ones included.
    pub async fn channels_with(&self, part: &str) -> Vec<String> {
        let pattern = containing(part);
        let mut found = self.cmd(&["PUBSUB", "CHANNELS", &pattern]).await.texts();
        let sharded = self.cmd(&["PUBSUB", "SHARDCHANNELS", &pattern]).await;
        if !sharded.is_error() {
            found.extend(sharded.texts());
        }
        found
    }

    /// How many connections subscribe to `channel`, sharded subscriptions included.
    pub async fn subscribers(&self, channel: &str) -> i64 {
        let plain = self.cmd(&["PUBSUB", "NUMSUB", channel]).await.list()[1].int();
        match self.cmd(&["PUBSUB", "SHARDNUMSUB", channel]).await {
            // Before 7.0 there are none.
            Reply::Error(_) => plain,
            sharded => plain + sharded.list()[1].int(),
        }
    }

    /// Waits until exactly `n` connections subscribe to `channel`.
    pub async fn until_subscribers(&self, channel: &str, n: i64) {
        let what = format!("{n} subscribers of {channel}");
        eventually(secs(10), &what, async || {
            self.subscribers(channel).await == n
        })
        .await;
    }

    /// Waits until exactly `n` clients wait for the lock `name` (they subscribe to its channel).
    pub async fn until_waiters(&self, name: &str, n: i64) {
        self.until_subscribers(&channel(name), n).await;
    }

    /// Waits until nobody holds the lock `name`.
    pub async fn until_free(&self, name: &str) {
        let what = format!("`{name}` is free");
        eventually(secs(10), &what, async || !self.exists(name).await).await;
    }

    /// What the server's access rules have refused, kinds of it. Take a [`Server`](super::Server) of your own.
    pub async fn refusals(&self) -> usize {
        self.cmd(&["ACL", "LOG"]).await.list().len()
    }

    /// Script calls since the server started, failed ones included. Counts for the whole server:
    /// take a [`Server`](super::Server) of your own.
    pub async fn script_calls(&self) -> i64 {
        let stats = self.cmd(&["INFO", "commandstats"]).await.text();
        let scripts = [
            "eval",
            "evalsha",
            "eval_ro",
            "evalsha_ro",
            "fcall",
            "fcall_ro",
        ];
        let calls = stats.lines().filter_map(|line| {
            let (command, numbers) = line.strip_prefix("cmdstat_")?.split_once(':')?;
            let calls = numbers.strip_prefix("calls=")?.split(',').next()?;
            scripts
                .contains(&command)
                .then(|| calls.parse::<i64>().unwrap())
        });
        calls.sum()
    }
}

impl Wire {
    pub(super) async fn connect(port: u16) -> io::Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            unread: Vec::new(),
        })
    }

    pub(super) async fn send(&mut self, wire: &[u8]) -> io::Result<()> {
        self.stream.write_all(wire).await
    }

    pub(super) async fn next(&mut self) -> io::Result<Reply> {
        loop {
            if let Some((reply, len)) = resp::parse(&self.unread)? {
                self.unread.drain(..len);
                return Ok(reply);
            }
            if self.stream.read_buf(&mut self.unread).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

/// Records every command that the server runs, also those that scripts call.
pub struct Monitor {
    wire: Wire,
    marks: Cli,
    lines: Vec<String>,
}

impl Monitor {
    pub(super) async fn start(port: u16) -> Self {
        let marks = Cli::connect(port).await;
        let mut wire = Wire::connect(port).await.unwrap();
        wire.send(&resp::request(&["MONITOR"])).await.unwrap();
        wire.next().await.unwrap().ok();
        Self {
            wire,
            marks,
            lines: Vec::new(),
        }
    }

    /// Reads up to now: every command that was run before the call is in the answer. A line reads
    /// `1339518083.107412 [0 127.0.0.1:60866] "GET" "key"`, or `[0 lua]` for a script's call.
    pub async fn lines(&mut self) -> &[String] {
        let mark = super::unique_name();
        self.marks.cmd(&["ECHO", &mark]).await.ok();
        loop {
            let next = tokio::time::timeout(ANSWER, self.wire.next())
                .await
                .unwrap();
            let line = next.unwrap().text();
            if line.contains(&mark) {
                return &self.lines;
            }
            self.lines.push(line);
        }
    }

    /// How many commands up to now satisfy `which`.
    pub async fn count(&mut self, which: impl Fn(&str) -> bool) -> usize {
        self.lines().await.iter().filter(|line| which(line)).count()
    }

    /// How many script calls up to now have `part` in them (a name, say).
    pub async fn script_calls(&mut self, part: &str) -> usize {
        let script = |line: &str| {
            let command = line.split_once("] \"").map_or("", |(_, rest)| rest);
            let command = command.to_ascii_lowercase();
            command.starts_with("eval") || command.starts_with("fcall")
        };
        self.count(|line| script(line) && line.contains(part)).await
    }

    /// Forgets what was recorded up to now.
    pub async fn clear(&mut self) {
        self.lines().await;
        self.lines.clear();
    }
}

/// A glob that matches whatever has `part` in it.
fn containing(part: &str) -> String {
    let mut glob = String::from("*");
    for c in part.chars() {
        if matches!(c, '*' | '?' | '[' | ']' | '\\' | '^' | '-') {
            glob.push('\\');
        }
        glob.push(c);
    }
    glob.push('*');
    glob
}
