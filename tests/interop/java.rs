//! Java's side: builds the driver once, starts JVMs, and speaks with them.

use std::collections::HashMap;
use std::env;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::oneshot;

use crate::common::{process::freeze, scaled, secs};

/// A Java virtual machine with Redisson. Cheap to clone; the last clone's end kills it.
#[derive(Clone)]
pub struct Java(Arc<Jvm>);

/// One `RedissonClient`.
#[derive(Clone)]
pub struct Client {
    java: Java,
    id: u64,
}

/// One Java thread, which is what owns a lock there.
#[derive(Clone)]
pub struct Thread {
    client: Client,
    id: u64,
}

/// One `RLock`, used by one thread.
#[derive(Clone)]
pub struct Lock {
    thread: Thread,
    kind: Kind,
    /// Percent-encoded.
    name: String,
}

/// Which of Redisson's locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Plain,
    Fair,
    Fenced,
    Spin,
    Read,
    Write,
    /// Since Redisson 4.4.0; before, its commands are an `UnsupportedOperationException`.
    NonReentrant,
    /// The same.
    NonReentrantFair,
    Multi,
}

/// A command that was sent, and may not be answered yet.
#[must_use = "the answer may be an exception"]
pub struct Asked {
    command: String,
    answer: oneshot::Receiver<Answer>,
}

/// What came back, and when.
#[derive(Debug)]
pub struct Answer {
    pub text: String,
    pub at: Instant,
}

impl Java {
    /// The JVM that all tests share, with Redisson on its class path; `None` if this machine cannot have
    /// one, which a line on stderr has said then.
    ///
    /// # Panics
    ///
    /// If there is none and `LEASEHOLD_INTEROP=required` or `LEASEHOLD_REDISSON` ask for it, or if the driver
    /// does not compile.
    pub fn shared() -> Option<Self> {
        static SHARED: OnceLock<Option<Java>> = OnceLock::new();
        let shared = SHARED.get_or_init(|| Some(Self(Jvm::start(installed()?))));
        shared.clone()
    }

    /// Another JVM, for a test that has the [shared](Self::shared) one and wants one to kill.
    pub fn another() -> Self {
        Self(Jvm::start(installed().expect("the shared one was started")))
    }

    /// SIGSTOP: frozen; its sockets stay open.
    pub fn stop(&self) {
        freeze(Pid::from_child(&self.0.child.lock()));
    }

    /// SIGCONT.
    pub fn cont(&self) {
        let process = Pid::from_child(&self.0.child.lock());
        kill_process(process, Signal::CONT).unwrap();
    }

    /// SIGKILL. Returns when it has ended.
    pub fn kill(&self) {
        self.0.kill();
    }

    /// A client with this `lockWatchdogTimeout`.
    pub async fn client(&self, url: &str, watchdog: Duration) -> Client {
        self.client_with(url, watchdog, &[]).await
    }

    /// A client with more settings: `prefix` (of a `NameMapper`), `fairwait` (milliseconds).
    pub async fn client_with(
        &self,
        url: &str,
        watchdog: Duration,
        settings: &[(&str, &str)],
    ) -> Client {
        let client = Client {
            java: self.clone(),
            id: number(),
        };
        let watchdog = watchdog.as_millis().to_string();
        let settings = [&[("url", url), ("watchdog", &watchdog)], settings].concat();
        let mut words = String::new();
        for (key, value) in settings {
            write!(words, " {key}={}", encoded(value)).unwrap();
        }
        let verb = format!("client {}{words}", client.id);
        client.thread().ask(&verb).ok().await;
        client
    }
}

impl Client {
    /// A thread that no other test uses.
    pub fn thread(&self) -> Thread {
        Thread {
            client: self.clone(),
            id: number(),
        }
    }

    /// A lock on a thread of its own.
    pub fn lock(&self, kind: Kind, name: &str) -> Lock {
        self.thread().lock(kind, name)
    }

    /// `shutdown()`.
    pub fn close(&self) -> Asked {
        self.thread().ask(&format!("close {}", self.id))
    }
}

impl Thread {
    pub fn lock(&self, kind: Kind, name: &str) -> Lock {
        Lock {
            thread: self.clone(),
            kind,
            name: encoded(name),
        }
    }

    /// `getMultiLock` of plain locks, in this order.
    pub fn multi_lock(&self, names: &[&str]) -> Lock {
        let names: Vec<_> = names.iter().map(|name| encoded(name)).collect();
        Lock {
            thread: self.clone(),
            kind: Kind::Multi,
            name: names.join(","),
        }
    }

    /// The field under which this thread holds a lock.
    pub async fn owner_id(&self) -> String {
        let asked = self.ask(&format!("id {}", self.client.id));
        asked.answer().await.text
    }

    /// `Thread.interrupt()`, also while a command runs.
    pub fn interrupt(&self) -> Asked {
        self.ask("interrupt")
    }

    fn ask(&self, verb: &str) -> Asked {
        self.client.java.0.ask(&format!("{} {verb}", self.id))
    }
}

impl Lock {
    /// `lock()`.
    pub fn lock(&self) -> Asked {
        self.ask("lock", "")
    }

    /// `lock(lease)`: not renewed.
    pub fn lock_for(&self, lease: Duration) -> Asked {
        self.ask("lock", &lease.as_millis().to_string())
    }

    /// `tryLock()`.
    pub fn try_lock(&self) -> Asked {
        self.ask("try", "")
    }

    /// `tryLock(wait, lease)`; without a lease it is renewed.
    pub fn try_lock_within(&self, wait: Duration, lease: Option<Duration>) -> Asked {
        self.ask("trywait", &wait_and_lease(wait, lease))
    }

    /// `unlock()`.
    pub fn unlock(&self) -> Asked {
        self.ask("unlock", "")
    }

    /// `forceUnlock()`.
    pub fn force_unlock(&self) -> Asked {
        self.ask("force", "")
    }

    /// `getHoldCount()`: of this thread.
    pub async fn hold_count(&self) -> i64 {
        self.ask("count", "").int().await
    }

    /// `isLocked()`.
    pub async fn is_locked(&self) -> bool {
        self.ask("locked", "").yes().await
    }

    /// `remainTimeToLive()`, in milliseconds.
    pub async fn ttl(&self) -> i64 {
        self.ask("ttl", "").int().await
    }

    /// `lockAndGetToken()`, of a fenced lock.
    pub async fn lock_and_get_token(&self) -> u64 {
        let token = self.ask("locktoken", "").int().await;
        token.try_into().unwrap()
    }

    /// `tryLockAndGetToken(wait, lease)`; its answer is the token, or `false`.
    pub fn try_lock_and_get_token(&self, wait: Duration, lease: Option<Duration>) -> Asked {
        self.ask("trytoken", &wait_and_lease(wait, lease))
    }

    /// `getToken()`: the newest token of anybody.
    pub async fn token(&self) -> u64 {
        let token = self.ask("token", "").int().await;
        token.try_into().unwrap()
    }

    /// `n` times: lock, read the counter, write one more, unlock.
    pub fn count_up(&self, counter: &str, n: usize) -> Asked {
        self.ask("counter", &format!("{} {n}", encoded(counter)))
    }

    /// Without end: lock with a token, read the register by a script, think, write it by another, unlock.
    pub fn write_register(
        &self,
        register: &str,
        (enter, write): (&str, &str),
        who: &str,
        pause: Duration,
    ) -> Asked {
        let words = [register, enter, write, who].map(encoded).join(" ");
        self.ask("register", &format!("{words} {}", pause.as_millis()))
    }

    fn ask(&self, verb: &str, rest: &str) -> Asked {
        let (client, kind, name) = (self.thread.client.id, self.kind.word(), &self.name);
        let command = format!("{verb} {client} {kind} {name} {rest}");
        self.thread.ask(command.trim_end())
    }
}

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Fair => "fair",
            Self::Fenced => "fenced",
            Self::Spin => "spin",
            Self::Read => "read",
            Self::Write => "write",
            Self::NonReentrant => "nonreentrant",
            Self::NonReentrantFair => "nonreentrantfair",
            Self::Multi => "multi",
        }
    }
}

impl Asked {
    /// Whatever comes; `None` if the JVM ends first.
    pub async fn if_any(self) -> Option<Answer> {
        let limit = scaled(secs(60), secs(900));
        let answer = tokio::time::timeout(limit, self.answer).await;
        answer
            .unwrap_or_else(|_| panic!("no answer within {limit:?} to `{}`", self.command))
            .ok()
    }

    /// Whatever comes.
    pub async fn answer(self) -> Answer {
        let command = self.command.clone();
        let answer = self.if_any().await;
        answer.unwrap_or_else(|| panic!("the JVM has ended before it answered `{command}`"))
    }

    /// It went well; answers with the moment at which we heard so.
    pub async fn ok(self) -> Instant {
        let command = self.command.clone();
        let answer = self.answer().await;
        assert_eq!(answer.text, "ok", "`{command}`");
        answer.at
    }

    /// True or false.
    pub async fn yes(self) -> bool {
        let command = self.command.clone();
        match &*self.answer().await.text {
            "ok" => true,
            "false" => false,
            other => panic!("`{command}`: {other}"),
        }
    }

    pub async fn int(self) -> i64 {
        let command = self.command.clone();
        let text = self.answer().await.text;
        let parsed = text.parse();
        parsed.unwrap_or_else(|_| panic!("`{command}`: {text}"))
    }

    /// It threw; answers with the exception's class and message.
    pub async fn error(self) -> (String, String) {
        let command = self.command.clone();
        let text = self.answer().await.text;
        let mut words = text.split(' ');
        assert_eq!(words.next(), Some("error"), "`{command}`: {text}");
        let mut word = || words.next().unwrap_or_default().to_owned();
        (word(), decoded(&word()))
    }

    /// Whether it is still under way.
    pub fn is_pending(&mut self) -> bool {
        self.answer.is_empty()
    }
}

struct Jvm {
    child: Mutex<Child>,
    stdin: Mutex<ChildStdin>,
    asked: Arc<Mutex<HashMap<u64, oneshot::Sender<Answer>>>>,
}

impl Jvm {
    fn start(driver: &Path) -> Arc<Self> {
        let mut command = Command::new("java");
        // Quick to start, and content with few cores.
        command.args(["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx512m"]);
        let path = [driver.join("classes"), driver.join("lib").join("*")];
        command.arg("-cp").arg(env::join_paths(path).unwrap());
        command.arg("interop.Driver");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        // When this process ends so does the pipe, and with it the JVM.
        let stdin = Mutex::new(child.stdin.take().unwrap());
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let asked: Arc<Mutex<HashMap<u64, oneshot::Sender<Answer>>>> = Arc::default();
        let waiting = Arc::clone(&asked);
        // Not a task: it serves tests on several runtimes.
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let at = Instant::now();
                let (number, text) = line.split_once(' ').expect("an answer");
                let asker = waiting.lock().remove(&number.parse().unwrap());
                let text = text.to_owned();
                drop(asker.expect("a question").send(Answer { text, at }));
            }
            // Who still waits is told that there will be no answer.
            waiting.lock().clear();
        });
        Arc::new(Self {
            child: Mutex::new(child),
            stdin,
            asked,
        })
    }

    fn ask(&self, command: &str) -> Asked {
        let (number, (sender, answer)) = (number(), oneshot::channel());
        self.asked.lock().insert(number, sender);
        let line = format!("{number} {command}\n");
        if let Err(error) = self.stdin.lock().write_all(line.as_bytes()) {
            self.asked.lock().remove(&number);
            assert_eq!(error.kind(), io::ErrorKind::BrokenPipe, "`{command}`");
        }
        Asked {
            command: command.to_owned(),
            answer,
        }
    }

    fn kill(&self) {
        let mut child = self.child.lock();
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

impl Drop for Jvm {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The version of Redisson that is spoken with, as numbers.
pub fn redisson() -> (u32, u32, u32) {
    let version = version();
    let mut numbers = version.split('.').map(|part| part.parse().unwrap());
    let mut next = || numbers.next().unwrap_or(0);
    (next(), next(), next())
}

fn version() -> String {
    env::var("LEASEHOLD_REDISSON").unwrap_or_else(|_| DEFAULT_VERSION.to_owned())
}

/// A number that is given once in this process.
fn number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The folder with the driver's classes and libraries, built if need be; `None` if it cannot be.
fn installed() -> Option<&'static Path> {
    static INSTALLED: OnceLock<Option<PathBuf>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| match build() {
        Ok(driver) => Some(driver),
        Err(missing) => {
            let required = env::var("LEASEHOLD_INTEROP").is_ok_and(|value| value == "required");
            // Who names a version wants it.
            let required = required || env::var_os("LEASEHOLD_REDISSON").is_some();
            assert!(!required, "required, but {missing}");
            // Straight to stderr: what a passing test prints is not shown.
            let missing = missing.lines().next().unwrap_or_default();
            let line = format!("interop: skipped, no JDK/Maven: {missing}\n");
            io::stderr().write_all(line.as_bytes()).unwrap();
            None
        }
    });
    installed.as_deref()
}

/// Builds the driver, unless it is there and newer than its sources. An error says what is missing.
fn build() -> Result<PathBuf, String> {
    let javac = run(Command::new("javac").arg("-version"))?;
    let words = text(&javac);
    let major = words.split([' ', '.', '\n']).nth(1);
    if major.and_then(|major| major.parse().ok()).unwrap_or(0) < 17 {
        return Err(format!(
            "Java 17 is needed, and this is `{}`",
            words.trim_end()
        ));
    }
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop/java");
    let pom = sources.join("pom.xml");
    // Beside what cargo builds.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let target = target.join("interop").join(version());
    fs::create_dir_all(&target).unwrap();
    // Another test process may be about to build, too.
    let lock = File::create(target.join("lock")).unwrap();
    lock.lock().unwrap();
    let built = target.join("built");
    let modified = |path: &Path| fs::metadata(path).and_then(|data| data.modified()).ok();
    let driver = sources.join("src/main/java/interop/Driver.java");
    let newest = modified(&pom).max(modified(&driver));
    if modified(&built).is_some_and(|built| Some(built) > newest) {
        return Ok(target);
    }
    let maven = |offline: bool| {
        let mut mvn = Command::new("mvn");
        mvn.args(["-q", "-B", "-Dstyle.color=never"]);
        mvn.args(["process-classes", "-f"]).arg(&pom);
        mvn.args(offline.then_some("-o"));
        mvn.arg(format!("-Dredisson.version={}", version()));
        mvn.arg(format!("-Dinterop.target={}", target.display()));
        run(&mut mvn)
    };
    // Most often everything is at hand already.
    let mut done = maven(true)?;
    if !done.status.success() {
        done = maven(false)?;
    }
    let said = text(&done);
    assert!(!said.contains("COMPILATION ERROR"), "{said}");
    if !done.status.success() {
        return Err(format!("Maven fails: {said}"));
    }
    File::create(&built).unwrap();
    Ok(target)
}

fn run(command: &mut Command) -> Result<Output, String> {
    let program = command.get_program().display().to_string();
    let output = command.stdin(Stdio::null()).output();
    output.map_err(|error| format!("`{program}` cannot be run ({error})"))
}

fn text(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&both).into_owned()
}

fn wait_and_lease(wait: Duration, lease: Option<Duration>) -> String {
    let lease = lease.map_or("-1".into(), |lease| lease.as_millis().to_string());
    format!("{} {lease}", wait.as_millis())
}

/// One word, whatever is in it.
fn encoded(text: &str) -> String {
    let mut word = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.".contains(&byte) {
            word.push(byte.into());
        } else {
            write!(word, "%{byte:02X}").unwrap();
        }
    }
    word
}

fn decoded(word: &str) -> String {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let digits = [rest.next().unwrap(), rest.next().unwrap()];
            let digits = str::from_utf8(&digits).unwrap();
            bytes.push(u8::from_str_radix(digits, 16).unwrap());
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).unwrap()
}

/// What java/pom.xml has.
const DEFAULT_VERSION: &str = "4.7.0";
