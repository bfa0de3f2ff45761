//! Real servers, each in a folder of its own, none of which outlives the test process.
//!
//! A test binary runs no static destructors and may be killed, so each server has a watcher: a
//! subshell that reads from a pipe which only the test process holds open. When the pipe ends,
//! the watcher kills the server and removes its folder.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use tempfile::TempDir;

use super::cli::{Cli, Monitor};
use super::process;
use super::resp::{self, Reply};

/// A `redis-server` on a port of its own. Dropping it kills it.
///
/// Everything takes `&self`, so that one task may stop the server under the others.
pub struct Server {
    inner: Arc<Inner>,
}

struct Inner {
    port: u16,
    args: Vec<String>,
    dir: TempDir,
    /// `None` after `kill`.
    running: Mutex<Option<Running>>,
}

/// A process that has not been reaped, so that its id is surely still its own.
struct Running {
    child: Child,
}

/// The memory of a server at one moment, to go back to.
pub struct Snapshot(Vec<u8>);

impl Server {
    /// Starts a server without persistence.
    ///
    /// # Panics
    ///
    /// If there is no `redis-server` to start.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts a server with more arguments: `&["--maxmemory-policy", "noeviction"]`.
    pub fn start_with(args: &[&str]) -> Self {
        let mut trouble = String::new();
        // Somebody else may take a port between our look at it and the server's.
        for _ in 0..20 {
            let port = free_port();
            let dir = tempfile::Builder::new()
                .prefix("leasehold-")
                .tempdir()
                .unwrap();
            let args = args.iter().map(|&arg| arg.to_owned()).collect();
            let inner = Arc::new(Inner {
                port,
                args,
                dir,
                running: Mutex::new(None),
            });
            match inner.launch() {
                Ok(()) => return Self { inner },
                Err(error) => trouble = error,
            }
        }
        panic!("the server does not start: {trouble}");
    }

    pub fn port(&self) -> u16 {
        self.inner.port
    }

    /// `redis://127.0.0.1:<port>`.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port())
    }

    /// The folder the server runs in.
    pub fn dir(&self) -> &Path {
        self.inner.dir.path()
    }

    /// The server's process id.
    ///
    /// # Panics
    ///
    /// If it was killed.
    pub fn pid(&self) -> u32 {
        self.inner.with(|running| running.child.id())
    }

    /// Freezes the server (SIGSTOP): connections stay open, nothing is answered. Its clock goes on.
    pub fn stop(&self) {
        self.inner
            .with(|running| process::freeze(running.process()));
    }

    /// Lets a frozen server go on (SIGCONT).
    pub fn cont(&self) {
        self.inner.with(|running| running.signal(Signal::CONT));
    }

    /// Kills the server (SIGKILL). Its port stays reserved for [`restart`](Self::restart).
    pub fn kill(&self) {
        if let Some(running) = self.inner.lock().take() {
            running.end(Folder::Keep);
        }
    }

    /// Kills the server if it runs, and starts it on the same port with an empty memory.
    pub async fn restart(&self) {
        self.restart_with(None).await;
    }

    /// Kills the server, and starts it with the memory it has now.
    pub async fn restart_keeping(&self) {
        let now = self.snapshot().await;
        self.restart_from(&now).await;
    }

    /// Kills the server, and starts it with the memory of an earlier moment.
    pub async fn restart_from(&self, snapshot: &Snapshot) {
        self.restart_with(Some(snapshot.0.clone())).await;
    }

    /// Writes down the server's memory.
    pub async fn snapshot(&self) -> Snapshot {
        self.cmd(&["SAVE"]).await.ok();
        Snapshot(fs::read(self.inner.dump()).unwrap())
    }

    async fn restart_with(&self, dump: Option<Vec<u8>>) {
        self.kill();
        let inner = Arc::clone(&self.inner);
        let launch = move || {
            match dump {
                Some(dump) => fs::write(inner.dump(), dump).unwrap(),
                None => drop(fs::remove_file(inner.dump())),
            }
            inner
                .launch()
                .unwrap_or_else(|error| panic!("the server does not restart: {error}"));
        };
        tokio::task::spawn_blocking(launch).await.unwrap();
    }

    /// A connection to look at the server by another road than the crate's.
    pub async fn cli(&self) -> Cli {
        Cli::connect(self.port()).await
    }

    /// One command, on a connection of its own. For more than a few use [`cli`](Self::cli).
    pub async fn cmd(&self, args: &[&str]) -> Reply {
        self.cli().await.cmd(args).await
    }

    /// Starts to record every command that the server runs.
    pub async fn monitor(&self) -> Monitor {
        Monitor::start(self.port()).await
    }
}

impl Inner {
    fn dump(&self) -> PathBuf {
        self.dir.path().join("dump.rdb")
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, work: impl FnOnce(&Running) -> T) -> T {
        work(self.lock().as_ref().expect("the server was killed"))
    }

    /// Starts the process and waits until it answers. An error says why it did not.
    fn launch(&self) -> Result<(), String> {
        let log = self.dir.path().join("log");
        let running = Running::spawn(self.port, self.dir.path(), &log, &self.args);
        let start = Instant::now();
        loop {
            if answers(self.port, running.child.id()).unwrap_or(false) {
                *self.lock() = Some(running);
                return Ok(());
            }
            if running.has_exited() || start.elapsed() > Duration::from_secs(30) {
                let log = fs::read_to_string(&log).unwrap_or_default();
                running.end(Folder::Keep);
                return Err(format!("port {}, log:\n{log}", self.port));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(running) = self.lock().take() {
            running.end(Folder::Remove);
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Folder {
    Keep,
    Remove,
}

/// The watcher is forked before the shell becomes the server, so `$$` is the server and there is
/// no moment in which a server has no watcher. When the parent of a stopped group dies, the kernel
/// sends SIGHUP to all in it: the watcher must outlive that (a server ignores it anyway).
const WATCHED: &str = r#"
trap '' HUP
dir=$1; shift
exec 3<&0
( read -r keep <&3 || keep=
  kill -KILL $$
  [ -n "$keep" ] || rm -rf -- "$dir" ) &
exec "$@" </dev/null 3<&-
"#;

impl Running {
    fn spawn(port: u16, dir: &Path, log: &Path, args: &[String]) -> Self {
        let binary = binary();
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(log)
            .unwrap();
        let mut sh = Command::new("sh");
        sh.arg("-c")
            .arg(WATCHED)
            .arg("sh")
            .arg(dir)
            .arg(&binary.path);
        sh.args([
            "--port",
            &port.to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
        ]);
        sh.args(["--appendonly", "no"]).arg("--dir").arg(dir);
        if binary.major >= 7 {
            // Before 7.0 DEBUG needs no permission, and the option is not known.
            sh.args(["--enable-debug-command", "yes"]);
        }
        sh.args(args);
        sh.stdin(Stdio::piped())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        // A Ctrl-C must not reach the watcher before the pipe's end does.
        sh.process_group(0);
        Self {
            child: sh.spawn().expect("there is no `sh` to start a server with"),
        }
    }

    fn process(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.process(), signal).unwrap();
    }

    fn has_exited(&self) -> bool {
        // NOWAIT: the process stays a zombie, and its id its own.
        let how = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(self.process()), how).unwrap().is_some()
    }

    /// Has the watcher kill the server, and reaps it.
    fn end(mut self, folder: Folder) {
        let mut lifeline = self.child.stdin.take().unwrap();
        if folder == Folder::Keep {
            let _ = lifeline.write_all(b"keep\n");
        }
        drop(lifeline);
        self.child.wait().unwrap();
    }
}

/// Whether the server on `port` answers and is the process we started, not a stranger's.
fn answers(port: u16, pid: u32) -> io::Result<bool> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(&resp::request(&["INFO", "server"]))?;
    let (mut wire, mut chunk) = (Vec::new(), [0; 4096]);
    loop {
        match stream.read(&mut chunk)? {
            0 => return Ok(false),
            len => wire.extend_from_slice(&chunk[..len]),
        }
        if let Some((reply, _)) = resp::parse(&wire)? {
            assert!(
                !(reply.is_error() && reply.error().starts_with("NOAUTH")),
                "a server that asks for a password cannot be looked at: start it without, \
                 then CONFIG SET requirepass"
            );
            let ours = format!("process_id:{pid}\r\n");
            return Ok(!reply.is_error() && reply.text().contains(&ours));
        }
    }
}

struct Binary {
    path: OsString,
    major: u32,
}

/// The server's binary: `redis-server`, or what `LEASEHOLD_REDIS_SERVER` names.
fn binary() -> &'static Binary {
    static BINARY: OnceLock<Result<Binary, String>> = OnceLock::new();
    BINARY
        .get_or_init(find_binary)
        .as_ref()
        .unwrap_or_else(|missing| panic!("{missing}"))
}

fn find_binary() -> Result<Binary, String> {
    let path = std::env::var_os("LEASEHOLD_REDIS_SERVER").unwrap_or_else(|| "redis-server".into());
    let output = Command::new(&path)
        .arg("--version")
        .stdin(Stdio::null())
        .output();
    let output = output.map_err(|error| {
        format!(
            "cannot run `{}` ({error}): `apt-get install redis-server`, or set \
             LEASEHOLD_REDIS_SERVER to the path of a Redis or Valkey server",
            path.display()
        )
    })?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // `Redis server v=7.0.15 sha=...`, `Valkey server v=8.1.8 ...`.
    let version = text
        .split_whitespace()
        .find_map(|word| word.strip_prefix("v="));
    let major = version.and_then(|version| version.split('.').next()?.parse().ok());
    let unknown = || format!("`{}` does not tell its version: {text:?}", path.display());
    Ok(Binary {
        major: major.ok_or_else(unknown)?,
        path,
    })
}

/// A port nobody listens on, below the ranges from which systems take ports for outgoing
/// connections: so it is still free when a killed server comes back to it.
pub fn free_port() -> u16 {
    loop {
        let (_, random, ..) = uuid::Uuid::new_v4().as_fields();
        let port = 10_000 + random % 20_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
