//! What the crate tells a log: the events of this thread, one line each.

use std::io;
use std::sync::{Arc, LazyLock, Mutex};

use tracing::subscriber::{DefaultGuard, NoSubscriber};
use tracing::{Dispatch, Subscriber};
use tracing_subscriber::fmt::MakeWriter;

/// Gives the events of this thread to `subscriber`, until the guard is dropped.
///
/// When an event is told for the first time in a process, `tracing` asks who wants it, and remembers
/// the answer. While it knows of one subscriber only, it asks the thread that tells the event: if that
/// is the thread of another test, which records nothing, the event is off for everybody. So
/// there is a second subscriber at all times, and all are asked.
pub fn record_this_thread(subscriber: impl Subscriber + Send + Sync + 'static) -> DefaultGuard {
    static SECOND: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::default()));
    LazyLock::force(&SECOND);
    tracing::subscriber::set_default(subscriber)
}

/// Records the events of the thread it was started on, until it is dropped. On a current-thread
/// runtime that is all of them.
pub struct Log {
    lines: Lines,
    _recording: DefaultGuard,
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Log {
    pub fn start() -> Self {
        let lines = Lines::default();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::DEBUG)
            .with_env_filter("leasehold=debug")
            .with_ansi(false)
            .with_writer(lines.clone())
            .finish();
        Self {
            lines,
            _recording: record_this_thread(subscriber),
        }
    }

    /// Everything up to now.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.lines.0.lock().unwrap()).into_owned()
    }

    /// How many events have all of these parts in them; a level is one: `WARN`.
    pub fn count(&self, parts: &[&str]) -> usize {
        let has_all = |line: &&str| parts.iter().all(|part| line.contains(part));
        self.text().lines().filter(has_all).count()
    }
}

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}
