//! The watchdog: one task per client that keeps every appointment in order of time.
//!
//! A held lease has its next renewal or its deadline here, an offer the end of its window. Keyed by
//! hold, never by name: a stale entry of an earlier hold cannot hide a later one.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use tokio::time::Instant;

use crate::dispatch::Job;
use crate::engine::Engine;
use crate::hold::Hold;
use crate::sync::{Mutex, Notify};

/// Something with an appointment.
pub(crate) trait Timed: Send + Sync {
    /// The time has come, `now` at the latest. The appointment is over afterwards, unless it is moved.
    /// What is to be renewed for it is posted with that of others.
    #[must_use = "it is to be posted"]
    fn due(self: Arc<Self>, now: Instant) -> Option<Job>;

    /// The hold this is about, if it is one that somebody believes in.
    fn held(self: Arc<Self>) -> Option<Arc<Hold>>;
}

/// An appointment, to move or cancel it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Appointment {
    at: Instant,
    number: u64,
}

/// All appointments of a client.
pub(crate) struct Watchdog {
    state: Mutex<State>,
    earlier: Notify,
}

#[derive(Default)]
struct State {
    appointments: BTreeMap<Appointment, Arc<dyn Timed>>,
    numbers: u64,
    /// When the task will look next; it is woken only for something earlier.
    armed: Option<Instant>,
}

impl Watchdog {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::default(),
            earlier: Notify::new(),
        }
    }

    /// Makes an appointment.
    pub(crate) fn schedule(&self, at: Instant, who: Arc<dyn Timed>) -> Appointment {
        self.reschedule(None, at, who)
    }

    /// Makes an appointment in place of an earlier one, in one step.
    pub(crate) fn reschedule(
        &self,
        old: Option<Appointment>,
        at: Instant,
        who: Arc<dyn Timed>,
    ) -> Appointment {
        let mut state = self.state.lock();
        let replaced = old.and_then(|old| state.appointments.remove(&old));
        state.numbers += 1;
        let appointment = Appointment {
            at,
            number: state.numbers,
        };
        state.appointments.insert(appointment, who);
        let wake = state.armed.is_none_or(|armed| at < armed);
        if wake {
            state.armed = Some(at);
        }
        drop(state);
        // What is dropped may have a `Drop` that comes back here.
        drop(replaced);
        if wake {
            self.earlier.notify_one();
        }
        appointment
    }

    /// Cancels an appointment; nothing happens if it is over.
    pub(crate) fn cancel(&self, appointment: Appointment) {
        let removed = self.state.lock().appointments.remove(&appointment);
        drop(removed);
    }

    /// All holds that somebody believes in, in order of their appointments.
    pub(crate) fn holds(&self) -> Vec<Arc<Hold>> {
        let all: Vec<_> = self.state.lock().appointments.values().cloned().collect();
        all.into_iter().filter_map(Timed::held).collect()
    }

    /// Has every hold ask for itself: the server may have forgotten some.
    pub(crate) fn ask_now(&self) {
        for hold in self.holds() {
            hold.ask_now();
        }
    }

    /// Keeps the appointments until the client stops.
    pub(crate) async fn run(&self, engine: &Arc<Engine>) {
        loop {
            let next = {
                let mut state = self.state.lock();
                let next = state
                    .appointments
                    .first_key_value()
                    .map(|(first, _)| first.at);
                state.armed = next;
                next
            };
            tokio::select! {
                biased;
                () = engine.stopped.cancelled() => return,
                () = self.earlier.notified() => continue,
                () = sleep(engine, next) => {}
            }
            let now = engine.now();
            let mut renewals = Vec::new();
            while let Some((appointment, due)) = self.first_due(now) {
                renewals.extend(due.due(now));
                // Whoever ended it on another thread may not have come to that yet: not to be waited
                // for in a loop.
                self.cancel(appointment);
            }
            engine.dispatcher.post_renewals(renewals);
            if self.keeps_any() {
                engine.announce(now);
            }
        }
    }

    fn first_due(&self, now: Instant) -> Option<(Appointment, Arc<dyn Timed>)> {
        let state = self.state.lock();
        let (first, who) = state.appointments.first_key_value()?;
        (first.at <= now).then(|| (*first, Arc::clone(who)))
    }

    pub(crate) fn keeps_any(&self) -> bool {
        !self.state.lock().appointments.is_empty()
    }
}

impl fmt::Debug for Watchdog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watchdog").finish_non_exhaustive()
    }
}

async fn sleep(engine: &Engine, until: Option<Instant>) {
    match until {
        Some(until) => engine.env.sleep_until(until).await,
        None => std::future::pending().await,
    }
}
