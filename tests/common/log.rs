//! What the crate tells a log: the events of this thread, one line each.

use std::io;
use std::sync::{Arc, Mutex};

use tracing::subscriber::DefaultGuard;
use tracing_subscriber::fmt::MakeWriter;

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
            _recording: tracing::subscriber::set_default(subscriber),
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
