//! A runtime in which nothing happens by itself: chance, from one seed, says who runs next, and time
//! moves only when everybody waits for it.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use parking_lot::Mutex;

use super::chance::Chance;
use crate::env::BoxFuture;
use crate::store::clock::micros;

/// Tasks, timers and the true time, since the start.
pub(super) struct Executor {
    state: Mutex<State>,
    woken: Arc<Mutex<Vec<usize>>>,
}

struct State {
    now: Duration,
    chance: Chance,
    /// In order of spawning; a task that is done leaves its place empty.
    tasks: Vec<Option<Task>>,
    /// By time, then by order of asking.
    timers: BTreeMap<(Duration, u64), Waker>,
    timers_set: u64,
    /// Until when the tasks of a process are not run.
    frozen: Vec<Duration>,
    polls: u64,
    ended: bool,
    /// How often, in a thousand, a task that could run is put off, and by how much at most.
    put_off: (u32, Duration),
}

struct Task {
    process: usize,
    /// Absent while it is polled.
    future: Option<BoxFuture<()>>,
    waker: Arc<TaskWaker>,
}

struct TaskWaker {
    id: usize,
    queued: AtomicBool,
    woken: Arc<Mutex<Vec<usize>>>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::Relaxed) {
            self.woken.lock().push(self.id);
        }
    }
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The time given has come.
    OnTime,
    /// More polls than any sound run needs: something spins.
    Spinning,
}

impl Executor {
    pub(super) fn new(seed: u64) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                now: Duration::ZERO,
                chance: Chance::new(seed),
                tasks: Vec::new(),
                timers: BTreeMap::new(),
                timers_set: 0,
                frozen: Vec::new(),
                polls: 0,
                ended: false,
                put_off: (0, Duration::ZERO),
            }),
            woken: Arc::default(),
        })
    }

    pub(super) fn now(&self) -> Duration {
        self.state.lock().now
    }

    pub(super) fn bits(&self) -> u64 {
        self.state.lock().chance.bits()
    }

    pub(super) fn put_off(&self, in_a_thousand: u32, at_most: Duration) {
        self.state.lock().put_off = (in_a_thousand, at_most);
    }

    pub(super) fn spawn(&self, process: usize, future: BoxFuture<()>) {
        let mut state = self.state.lock();
        if state.ended {
            drop(state);
            return;
        }
        let id = state.tasks.len();
        let waker = Arc::new(TaskWaker {
            id,
            queued: AtomicBool::new(true),
            woken: Arc::clone(&self.woken),
        });
        state.tasks.push(Some(Task {
            process,
            future: Some(future),
            waker,
        }));
        drop(state);
        self.woken.lock().push(id);
    }

    /// Runs nothing of `process` for so long from now.
    pub(super) fn freeze(&self, process: usize, length: Duration) {
        let mut state = self.state.lock();
        let until = state.now + length;
        if state.frozen.len() <= process {
            state.frozen.resize(process + 1, Duration::ZERO);
        }
        state.frozen[process] = state.frozen[process].max(until);
    }

    /// Until when `process` does not run; in the past if it does.
    pub(super) fn frozen_until(&self, process: usize) -> Duration {
        let state = self.state.lock();
        state.frozen.get(process).copied().unwrap_or_default()
    }

    /// Drops everything there is; what that spawns is dropped as well.
    pub(super) fn end(&self) {
        loop {
            let (tasks, timers) = {
                let mut state = self.state.lock();
                state.ended = true;
                (
                    std::mem::take(&mut state.tasks),
                    std::mem::take(&mut state.timers),
                )
            };
            self.woken.lock().clear();
            if tasks.is_empty() {
                return;
            }
            drop((tasks, timers));
        }
    }

    /// A future that completes at `at`.
    pub(super) fn sleep_until(self: &Arc<Self>, at: Duration) -> Sleep {
        Sleep {
            executor: Arc::clone(self),
            at,
            key: None,
        }
    }

    /// Runs everything until the time is `end`.
    pub(super) fn run_until(self: &Arc<Self>, end: Duration, most_polls: u64) -> Ended {
        loop {
            let next = {
                let mut woken = self.woken.lock();
                let waiting = woken.len();
                (waiting > 0).then(|| {
                    let chosen = self.state.lock().chance.below(waiting as u64);
                    woken.swap_remove(usize::try_from(chosen).unwrap_or(0))
                })
            };
            match next {
                Some(id) => {
                    if !self.poll(id) {
                        continue;
                    }
                    let mut state = self.state.lock();
                    state.polls += 1;
                    if state.polls > most_polls {
                        return Ended::Spinning;
                    }
                }
                None => {
                    if !self.advance(end) {
                        return Ended::OnTime;
                    }
                }
            }
        }
    }

    /// Moves the time to the next timer and fires it, and what else is due then.
    fn advance(&self, end: Duration) -> bool {
        let mut state = self.state.lock();
        let next = state.timers.first_key_value().map(|((at, _), _)| *at);
        let Some(next) = next.filter(|next| *next <= end) else {
            state.now = state.now.max(end);
            return false;
        };
        state.now = state.now.max(next);
        let mut due = Vec::new();
        while let Some(entry) = state.timers.first_entry() {
            if entry.key().0 > next {
                break;
            }
            due.push(entry.remove());
        }
        drop(state);
        for waker in due {
            waker.wake();
        }
        true
    }

    /// Polls one task, unless it is put off. Whether it was polled.
    fn poll(self: &Arc<Self>, id: usize) -> bool {
        let (mut future, waker) = {
            let mut state = self.state.lock();
            let State {
                now,
                chance,
                tasks,
                timers,
                timers_set,
                frozen,
                put_off,
                ..
            } = &mut *state;
            let Some(task) = tasks.get_mut(id).and_then(Option::as_mut) else {
                return false;
            };
            let mut later = frozen.get(task.process).copied().unwrap_or_default();
            if later <= *now && chance.happens(put_off.0) {
                later = *now + Duration::from_micros(chance.below(micros(put_off.1)));
            }
            if later > *now {
                // Still queued as far as others can see; its own timer brings it back.
                *timers_set += 1;
                let again = Arc::new(Again(Arc::clone(&task.waker)));
                timers.insert((later, *timers_set), Waker::from(again));
                return false;
            }
            let Some(future) = task.future.take() else {
                return false;
            };
            task.waker.queued.store(false, Ordering::Relaxed);
            (future, Arc::clone(&task.waker))
        };
        let waker = Waker::from(waker);
        let done = future
            .as_mut()
            .poll(&mut Context::from_waker(&waker))
            .is_ready();
        let mut state = self.state.lock();
        match state.tasks.get_mut(id) {
            Some(Some(task)) if !done => {
                task.future = Some(future);
                return true;
            }
            // Done, or the end came while it ran.
            Some(place) => *place = None,
            None => {}
        }
        drop(state);
        drop(future);
        true
    }
}

/// Brings a task that was put off back into the queue.
struct Again(Arc<TaskWaker>);

impl Wake for Again {
    fn wake(self: Arc<Self>) {
        self.0.woken.lock().push(self.0.id);
    }
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executor").finish_non_exhaustive()
    }
}

/// Completes when the true time has come.
#[derive(Debug)]
pub(super) struct Sleep {
    executor: Arc<Executor>,
    at: Duration,
    key: Option<(Duration, u64)>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let mut state = this.executor.state.lock();
        if state.now >= this.at {
            return Poll::Ready(());
        }
        let key = *this.key.get_or_insert_with(|| {
            state.timers_set += 1;
            (this.at, state.timers_set)
        });
        state.timers.insert(key, cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            let removed = self.executor.state.lock().timers.remove(&key);
            drop(removed);
        }
    }
}
