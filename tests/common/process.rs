//! Second processes: tests that start themselves again, stop, continue and kill.
//!
//! A worker is a test function of the same binary. In an ordinary run it returns at once; started
//! by [`Worker::spawn`] it talks with the test line by line, over its stdin and stdout.
//!
//! ```ignore
//! #[tokio::test]
//! async fn echo_worker() {
//!     let Some(mut me) = WorkerSide::if_spawned() else { return };
//!     while let Some(line) = me.line().await {
//!         me.say(&line);
//!     }
//! }
//!
//! let mut worker = Worker::spawn("harness::echo_worker", &[("GREETING", "hello")]);
//! worker.say("one").await;
//! worker.expect("one").await;
//! ```

use std::io::BufRead as _;
use std::path::Path;
use std::process::{ExitStatus, Stdio};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc;

use super::secs;

/// Tells a worker that it is one.
const SPAWNED: &str = "LEASEHOLD_WORKER";

/// Begins each line of a worker: libtest writes to stdout too, and not always whole lines.
const MARK: &str = "worker> ";

/// A process that a test started. Dropping it kills it, as does the end of the test process.
pub struct Worker {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
    mark: &'static str,
    lifeline: Option<Lifeline>,
}

impl Worker {
    /// Starts this test binary again as the worker `entry`: the path of a test function,
    /// `module::name`, that begins with [`WorkerSide::if_spawned`].
    pub fn spawn(entry: &str, envs: &[(&str, &str)]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([entry, "--exact", "--nocapture", "--test-threads=1"]);
        command.env(SPAWNED, entry).envs(envs.iter().copied());
        Self::start(command, MARK)
    }

    /// Starts another executable; its lines are taken as they are.
    pub fn spawn_program(program: &Path, args: &[&str], envs: &[(&str, &str)]) -> Self {
        let mut command = Command::new(program);
        command.args(args).envs(envs.iter().copied());
        Self::start(command, "")
    }

    fn start(mut command: Command, mark: &'static str) -> Self {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let lifeline = Lifeline::tie(child.id().unwrap());
        let stdin = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self {
            child,
            stdin,
            lines,
            mark,
            lifeline: Some(lifeline),
        }
    }

    /// The worker's process id.
    ///
    /// # Panics
    ///
    /// If it has ended and was waited for.
    pub fn pid(&self) -> u32 {
        self.child.id().expect("the worker has ended")
    }

    /// Writes a line to the worker.
    pub async fn say(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().expect("the worker's stdin was closed");
        stdin
            .write_all(format!("{line}\n").as_bytes())
            .await
            .unwrap();
    }

    /// The worker's next line; `None` when it has ended.
    ///
    /// # Panics
    ///
    /// If none comes within 30 seconds; in the long form, in which workers do more, within five minutes.
    pub async fn line(&mut self) -> Option<String> {
        loop {
            let patience = super::scaled(secs(30), secs(300));
            let next = tokio::time::timeout(patience, self.lines.next_line()).await;
            let line = next.expect("no line from the worker in time").unwrap()?;
            if let Some((_, said)) = line.split_once(self.mark) {
                return Some(said.to_owned());
            }
        }
    }

    /// Reads the worker's next line, which must be this one.
    pub async fn expect(&mut self, line: &str) {
        let next = self.line().await;
        assert_eq!(next.as_deref(), Some(line), "from the worker");
    }

    /// SIGSTOP: frozen; its sockets stay open.
    pub fn stop(&self) {
        freeze(self.process());
    }

    /// SIGCONT.
    pub fn cont(&self) {
        self.signal(Signal::CONT);
    }

    /// SIGKILL.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// SIGTERM.
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Ends the worker's stdin.
    pub fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// Waits for the worker's end. Its stdin stays open.
    pub async fn wait(&mut self) -> ExitStatus {
        // `Child::wait` closes a stdin that it still has; ours was taken out.
        let waited = tokio::time::timeout(secs(30), self.child.wait()).await;
        let status = waited
            .expect("the worker has not ended within 30 s")
            .unwrap();
        self.lifeline = None;
        status
    }

    fn process(&self) -> Pid {
        Pid::from_raw(self.pid().cast_signed()).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.process(), signal).unwrap();
    }
}

/// Stops a child of ours, and returns when all its threads rest: until then they may still act.
pub fn freeze(child: Pid) {
    kill_process(child, Signal::STOP).unwrap();
    let how = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    waitid(WaitId::Pid(child), how).unwrap();
}

/// Kills a process, stopped or not, when this one ends without having done so.
struct Lifeline(std::process::Child);

impl Lifeline {
    fn tie(pid: u32) -> Self {
        let mut sh = std::process::Command::new("sh");
        sh.args(["-c", "read -r _ || kill -KILL $1", "sh", &pid.to_string()]);
        sh.stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // A Ctrl-C must not reach it before the pipe's end does.
        std::os::unix::process::CommandExt::process_group(&mut sh, 0);
        Self(sh.spawn().expect("there is no `sh`"))
    }
}

impl Drop for Lifeline {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// The worker's own end of the talk.
pub struct WorkerSide {
    lines: mpsc::UnboundedReceiver<String>,
}

impl WorkerSide {
    /// `None` in an ordinary run of the tests, in which a worker has nothing to do.
    pub fn if_spawned() -> Option<Self> {
        std::env::var_os(SPAWNED)?;
        let (sender, lines) = mpsc::unbounded_channel();
        // Not tokio's stdin: the runtime's end would wait for a read that may never come.
        std::thread::spawn(move || {
            for line in std::io::stdin().lock().lines() {
                let Ok(line) = line else { return };
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Some(Self { lines })
    }

    /// The test's next line; `None` when it has closed the pipe.
    pub async fn line(&mut self) -> Option<String> {
        self.lines.recv().await
    }

    /// Writes a line to the test.
    #[expect(clippy::unused_self, reason = "only a worker may talk")]
    pub fn say(&self, line: &str) {
        println!("{MARK}{line}");
    }
}
