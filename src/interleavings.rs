//! Holds, lines, dispatcher and watchdog under many interleavings of threads.
//!
//! `tests/simulation` chooses which task is polled next; here a thread may be interrupted inside of a
//! poll, before each lock it takes (`sync::point`). The code is the crate's own, with the model of the
//! server behind it; `shuttle` runs its threads one at a time, in an order that the test chooses
//! ([`How`]).
//!
//! While time stands still ([`Time::Still`]) no sleep ends, so what is not woken is a deadlock, which
//! ends the test; so is a lock taken in two orders.

mod judge;
mod schedules;
mod world;

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use parking_lot::Mutex as Plain;
use shuttle::future::block_on;
use shuttle::thread::{self, JoinHandle};
use tokio::sync::oneshot;

use self::schedules::{How, explore};
use self::world::{Fate, Time, World};
use crate::contend::{Ticket, Wish};
use crate::env::Env as _;
use crate::hold::{Entered, Hold, Terms};
use crate::kind::Kind;
use crate::lock::Lock;
use crate::watchdog::Timed as _;
use crate::{Error, LockClient, LockGuard, LossReason, RwLock};

/// Whatever two things happen to a hold at once, it ends once, and is released once.
#[test]
fn any_two_events_of_a_hold_in_any_order() {
    for (index, (first, one)) in EVENTS.into_iter().enumerate() {
        for (second, other) in EVENTS.into_iter().skip(index + 1) {
            // A level is entered and left in many steps: too many for all.
            let long = if second == "entered" {
                How::Deviating(4)
            } else {
                How::All
            };
            let how = scaled(How::Deviating(3), long);
            two_events(&format!("{first}+{second}"), how, one, other);
        }
    }
}

type Event = fn(&Held);

const EVENTS: [(&str, Event); 9] = [
    ("dropped", |held| drop(held.guard.lock().take())),
    ("deadline", |held| {
        held.world.clock.jump(Duration::from_millis(29_700));
        held.is_due();
    }),
    ("renewal", |held| {
        held.world.clock.jump(Duration::from_secs(10));
        held.is_due();
    }),
    ("looked", |held| {
        let look = || held.hold.check(held.world.clock.now());
        let (first, told) = (look(), held.hold.lost().is_cancelled());
        let second = look();
        assert!(first.is_ok() || first == second, "the loss was taken back");
        assert!(!told || second.is_err(), "told, but not lost");
    }),
    ("confirmed", |held| {
        held.hold.confirmed(held.world.clock.now(), 30_000);
    }),
    ("gone", |held| {
        held.world.server.delete();
        held.hold.lose(LossReason::KeyGone);
    }),
    ("closed", |held| {
        let (reply, _) = oneshot::channel();
        held.hold.close(reply);
    }),
    ("asked", |held| held.hold.ask_now()),
    ("entered", |held| {
        if let Entered::Level { level, .. } = held.hold.enter(Kind::Plain, &RENEWED) {
            held.hold.leave(level, None);
        }
    }),
];

struct Held {
    world: Arc<World>,
    hold: Arc<Hold>,
    guard: Plain<Option<LockGuard>>,
}

impl Held {
    /// As the watchdog does it.
    fn is_due(&self) {
        let renewal = Arc::clone(&self.hold).due(self.world.clock.now());
        let dispatcher = &self.hold.engine.dispatcher;
        dispatcher.post_renewals(renewal.into_iter().collect());
    }
}

fn two_events(name: &str, how: How, one: Event, other: Event) -> usize {
    explore(name, how, move || {
        let world = World::new(Time::ByHand, 1);
        let guard = taken(&world);
        let held = Arc::new(Held {
            hold: Arc::clone(guard.hold()),
            guard: Plain::new(Some(guard)),
            world,
        });
        let events = [one, other].map(|event| {
            let held = Arc::clone(&held);
            thread::spawn(move || event(&held))
        });
        join(events);
        let held = Arc::into_inner(held).expect("the threads are over");
        let lost = held.hold.check(held.world.clock.now()).is_err();
        assert_eq!(lost, held.hold.lost().is_cancelled(), "lost, and told");
        held.world.settle();
        drop(held.guard);
        held.world.settle();
        held.world.check_idle();
        drop(held.hold);
        held.world.end();
    })
}

/// What a caller is told whose time is up is found out while the dispatcher looks at the same line.
#[test]
fn time_is_up_while_the_next_attempt_is_sent() {
    let how = scaled(How::Deviating(2), How::Deviating(3));
    explore("time-up", how, || {
        let world = World::new(Time::ByHand, 1);
        let guard = taken(&world);
        let ticket = in_line(&world);
        // The server has told that it is taken, and the line's task sleeps.
        world.settle();
        let freed = Arc::clone(&world);
        let threads = [
            thread::spawn(move || {
                assert!(matches!(ticket.out_of_time(), Error::TimedOut { .. }));
            }),
            thread::spawn(move || {
                drop(guard);
                freed.settle();
            }),
        ];
        join(threads);
        world.settle();
        world.check_idle();
        world.end();
    });
}

/// The watchdog goes on although who ends the hold, or the offer, has not come to cancel it yet.
#[test]
fn the_watchdog_does_not_wait_for_who_cancels() {
    let how = scaled(How::Deviating(2), How::Deviating(3));
    explore("due-dropped", how, || {
        let world = World::new(Time::ByHand, 1);
        let guard = taken(&world);
        while_due(world, Duration::from_secs(10), move || drop(guard));
    });
    explore("due-left", how, || {
        let (world, ticket) = on_offer();
        while_due(world, WINDOW, move || drop(ticket));
    });
    explore("due-claimed", how, || {
        let (world, mut ticket) = on_offer();
        while_due(world, WINDOW, move || {
            let mut cx = Context::from_waker(Waker::noop());
            if let Poll::Ready(claimed) = ticket.poll_claim(&mut cx) {
                let (hold, level) = claimed.expect("an answer").expect("a grant");
                hold.leave(level, None);
            }
        });
    });
}

/// Does `work` in one thread while all tasks, the watchdog among them, run in another.
fn while_due(world: Arc<World>, due: Duration, work: impl FnOnce() + Send + 'static) {
    let passing = Arc::clone(&world);
    join([
        thread::spawn(work),
        thread::spawn(move || {
            passing.clock.jump(due);
            passing.settle();
        }),
    ]);
    world.settle();
    world.check_idle();
    world.end();
}

/// Somebody in line who has an offer.
fn on_offer() -> (Arc<World>, Ticket) {
    let world = World::new(Time::ByHand, 1);
    let guard = taken(&world);
    let ticket = in_line(&world);
    world.settle();
    drop(guard);
    world.settle();
    (world, ticket)
}

/// A place in line.
fn in_line(world: &World) -> Ticket {
    let client = world.client(0);
    let engine = client.engine();
    let permit = Arc::clone(&engine.permits).try_acquire_owned();
    let wish = Wish {
        terms: RENEWED,
        once: false,
    };
    let permit = permit.expect("nothing is under way");
    let ticket = engine
        .queues
        .join(engine, Kind::Plain, &world::name(), wish, permit);
    ticket.expect("a place in line")
}

/// The lock, taken in this thread, which runs the tasks as well.
fn taken(world: &World) -> LockGuard {
    let mut lock = world.client(0).lock(world::name());
    let mut acquire = pin!(lock.acquire());
    loop {
        let mut cx = Context::from_waker(Waker::noop());
        if let Poll::Ready(guard) = acquire.as_mut().poll(&mut cx) {
            return guard.expect("the lock is free");
        }
        world.settle();
    }
}

/// No wake-up is lost among those who wait: without any time passing each gets it after the other.
#[test]
fn three_callers_hold_it_one_after_the_other() {
    check("callers", Time::Still, 1, callers);
}

fn callers(world: &Arc<World>) -> Threads {
    (0..3)
        .map(|_| {
            spawn(world, 0, |_, mut lock| {
                let guard = block_on(lock.acquire()).expect("granted");
                assert!(guard.is_held());
            })
        })
        .collect()
}

/// The next one gets it from a waiter that leaves at whatever moment, with the grant in its hands.
#[test]
fn a_waiter_that_leaves_passes_its_turn_on() {
    check("leavers", Time::Still, 1, leavers);
}

fn leavers(world: &Arc<World>) -> Threads {
    let leaver = |polls| {
        move |_: &World, mut lock: Lock| {
            let mut acquire = Box::pin(lock.acquire());
            for _ in 0..polls {
                if block_on(once(acquire.as_mut())).is_some() {
                    break;
                }
            }
        }
    };
    vec![
        spawn(world, 0, leaver(1)),
        spawn(world, 0, leaver(2)),
        spawn(world, 0, |_, mut lock| {
            drop(block_on(lock.acquire()).expect("granted"));
        }),
    ]
}

/// Two processes: the message of a release reaches who began to wait for it at any moment.
#[test]
fn two_clients_wake_each_other() {
    check("clients", Time::Still, 2, clients);
}

fn clients(world: &Arc<World>) -> Threads {
    (0..2)
        .map(|number| {
            spawn(world, number, |_, mut lock| {
                drop(block_on(lock.acquire()).expect("granted"));
            })
        })
        .collect()
}

/// A waiter that is not polled holds up nobody for longer than an offer's window.
#[test]
fn an_offer_that_is_not_taken_goes_to_the_next() {
    check("offers", Time::Passing, 1, offers);
}

fn offers(world: &Arc<World>) -> Threads {
    vec![
        spawn(world, 0, |world, mut lock| {
            let mut acquire = Box::pin(lock.acquire());
            if block_on(once(acquire.as_mut())).is_some() {
                return;
            }
            block_on(world.clock.sleep_until(world.clock.now() + 10 * WINDOW));
            // It may still come for it, and gets it in its turn.
            drop(block_on(acquire).expect("granted"));
        }),
        spawn(world, 0, |world, mut lock| {
            let asked = world.clock.now();
            drop(block_on(lock.acquire()).expect("granted"));
            // One of these is the clock's jump.
            assert!(world.clock.now() - asked <= 2 * WINDOW);
        }),
        spawn(world, 0, |world, _| world.clock.jump(WINDOW)),
    ]
}

/// A hold past its deadline is lost once, for good, before another has it.
#[test]
fn a_deadline_at_any_moment_of_a_hold() {
    check("deadlines", Time::Passing, 1, deadlines);
}

fn deadlines(world: &Arc<World>) -> Threads {
    let holder = |_: &World, lock: Lock| {
        let mut lock = lock.lease(Duration::from_secs(1));
        let guard = block_on(lock.acquire()).expect("granted in the end");
        let lost = guard.lost();
        if !guard.is_held() {
            // A moment later, by the thread that found out: never would be a deadlock.
            block_on(lost.cancelled());
            assert!(!guard.is_held(), "the loss was taken back");
        }
    };
    vec![
        spawn(world, 0, holder),
        spawn(world, 0, holder),
        spawn(world, 0, |world, _| {
            world.clock.jump(Duration::from_millis(990));
            world.clock.jump(Duration::from_millis(20));
        }),
    ]
}

/// Renewals, answered or not, while their holder leaves and the next one waits.
#[test]
fn renewals_around_a_release() {
    check("renewals", Time::Passing, 1, renewals);
}

fn renewals(world: &Arc<World>) -> Threads {
    world.server.lose_replies(&[1, 3]);
    vec![
        spawn(world, 0, |_, mut lock| {
            let Ok(guard) = block_on(lock.acquire()) else {
                return;
            };
            let confirmed = block_on(guard.confirm());
            assert!(!matches!(confirmed, Err(Error::Closed)));
            let _ = block_on(guard.release());
        }),
        spawn(world, 0, |_, mut lock| match block_on(lock.acquire()) {
            // Nothing heard for a whole lease.
            Ok(_) | Err(Error::Indeterminate { .. }) => {}
            Err(error) => panic!("{error}"),
        }),
        spawn(world, 0, |world, _| {
            world.clock.jump(Duration::from_secs(10));
            world.clock.jump(Duration::from_secs(10));
            world.clock.jump(Duration::from_secs(9));
        }),
    ]
}

/// Callers whose time is up at whatever moment of their attempt.
#[test]
fn callers_whose_time_is_up() {
    check("timeouts", Time::Passing, 1, timeouts);
}

fn timeouts(world: &Arc<World>) -> Threads {
    world.server.lose_replies(&[0]);
    let caller = |_: &World, mut lock: Lock| {
        drop(block_on(lock.acquire_timeout(Duration::from_secs(1))));
    };
    vec![
        spawn(world, 0, caller),
        spawn(world, 0, caller),
        spawn(world, 0, |_, mut lock| {
            drop(block_on(lock.try_acquire()));
        }),
        spawn(world, 0, |world, _| {
            world.clock.jump(Duration::from_secs(1));
        }),
    ]
}

/// A caller's time is up while the lock is freed, and asked for by the one behind.
#[test]
fn a_caller_whose_time_is_up_at_a_release() {
    check("expiry", Time::Passing, 1, expiry);
}

fn expiry(world: &Arc<World>) -> Threads {
    let guard = block_on(world.client(0).lock(world::name()).acquire()).expect("free");
    let caller = |_: &World, mut lock: Lock| {
        drop(block_on(lock.acquire_timeout(Duration::from_secs(1))));
    };
    let impatient = spawn(world, 0, caller);
    vec![
        impatient,
        thread::spawn(move || drop(guard)),
        spawn(world, 0, |world, mut lock| {
            world.clock.jump(Duration::from_secs(1));
            drop(block_on(lock.acquire()).expect("granted"));
        }),
    ]
}

/// One flow of work in two threads: a level is entered while another is left.
#[test]
fn levels_entered_and_left_at_once() {
    check("levels", Time::Still, 1, levels);
}

fn levels(world: &Arc<World>) -> Threads {
    let mut context = world.client(0).context();
    let guard = block_on(context.lock(world::name()).acquire()).expect("free");
    let mut shared = context.share();
    let server = Arc::clone(&world.server);
    let inner = thread::spawn(move || {
        let guard = block_on(shared.lock(world::name()).acquire()).expect("entered, or anew");
        assert!(guard.is_held() && server.holds_it());
        let _ = block_on(guard.release());
    });
    let outer = thread::spawn(move || drop(guard));
    vec![
        inner,
        outer,
        spawn(world, 0, |_, mut lock| {
            drop(block_on(lock.acquire()).expect("granted"));
        }),
    ]
}

/// A client that is closed while its callers wait, hold and leave.
#[test]
fn a_close_at_any_moment() {
    check("close", Time::Still, 1, close);
}

fn close(world: &Arc<World>) -> Threads {
    let client: LockClient = world.client(0);
    let guard = block_on(client.lock(world::name()).acquire()).expect("free");
    let caller = |_: &World, mut lock: Lock| match block_on(lock.acquire()) {
        Ok(guard) => {
            let lost = guard.lost();
            if !guard.is_held() {
                block_on(lost.cancelled());
            }
        }
        Err(Error::Closed) => {}
        Err(error) => panic!("{error}"),
    };
    vec![
        thread::spawn(move || {
            let report = block_on(client.close(Duration::from_secs(5)));
            assert_eq!((report.lost, report.unconfirmed), (0, 0));
        }),
        thread::spawn(move || drop(guard)),
        spawn(world, 0, caller),
        spawn(world, 0, caller),
    ]
}

/// The next in line leaves at each poll of its wait, in turn, while the lock is handed to it: the one behind
/// gets it.
#[test]
fn who_is_next_may_leave_at_any_moment() {
    check_moved("handed", Time::Still, 1, handed);
}

fn handed(world: &Arc<World>) -> Threads {
    let guard = block_on(world.client(0).lock(world::name()).acquire()).expect("free");
    let mut threads: Threads = (1..=3)
        .map(|polls| spawn(world, 0, move |_, lock| leaves_after(polls, lock)))
        .collect();
    threads.push(thread::spawn(move || drop(guard)));
    threads.push(spawn(world, 0, |_, mut lock| {
        drop(block_on(lock.acquire()).expect("granted"));
    }));
    threads
}

/// Waits for so many polls, then leaves, with whatever it has by then.
fn leaves_after(polls: usize, mut lock: Lock) {
    let mut acquire = Box::pin(lock.acquire());
    for _ in 0..polls {
        if block_on(once(acquire.as_mut())).is_some() {
            break;
        }
    }
}

/// All leave, at whatever moment, and the lock that was on its way to one of them is free.
#[test]
fn a_hand_off_to_a_line_that_empties() {
    check_moved("emptied", Time::Still, 1, emptied);
}

fn emptied(world: &Arc<World>) -> Threads {
    let guard = block_on(world.client(0).lock(world::name()).acquire()).expect("free");
    let mut threads: Threads = (1..=2)
        .map(|polls| spawn(world, 0, move |_, lock| leaves_after(polls, lock)))
        .collect();
    threads.push(thread::spawn(move || drop(guard)));
    threads
}

/// Hand-offs whose request or reply is lost, comes late, or that run twice: each turn is had once, and one of
/// those in line may leave meanwhile.
#[test]
fn hand_offs_that_get_lost_come_late_or_run_twice() {
    check_moved("lost", Time::Passing, 1, |world| {
        astray(world, &[Fate::LostRequest, Fate::LostReply])
    });
    check_moved("late", Time::Passing, 1, |world| {
        astray(world, &[Fate::Late, Fate::LostReply])
    });
    check_moved("doubled", Time::Passing, 1, |world| {
        astray(world, &[Fate::Doubled, Fate::Late])
    });
}

fn astray(world: &Arc<World>, fates: &[Fate]) -> Threads {
    world.server.hand_offs(fates);
    let guard = block_on(world.client(0).lock(world::name()).acquire()).expect("free");
    let mut threads: Threads = (0..2)
        .map(|_| {
            spawn(world, 0, |_, mut lock| {
                drop(block_on(lock.acquire()).expect("granted in the end"));
            })
        })
        .collect();
    threads.push(spawn(world, 0, |_, lock| leaves_after(1, lock)));
    threads.push(thread::spawn(move || drop(guard)));
    threads
}

/// The lease is over before the hand-off runs, or after: who is next has the lock, or waits for another who
/// was quicker.
#[test]
fn a_hand_off_around_the_end_of_the_lease() {
    check_moved("over", Time::Passing, 2, over);
}

fn over(world: &Arc<World>) -> Threads {
    let lease = Duration::from_secs(1);
    let short = |client| world.client(client).lock(world::name()).lease(lease);
    let guard = block_on(short(0).acquire()).expect("free");
    let takes = |mut lock: Lock| {
        let _ = block_on(lock.acquire()).expect("granted in the end");
    };
    let (next, other) = (short(0), short(1));
    vec![
        thread::spawn(move || takes(next)),
        thread::spawn(move || takes(other)),
        thread::spawn(move || drop(guard)),
        time_passes(world, Duration::from_millis(990)),
    ]
}

/// The server forgets everything in the middle of a chain: those behind get the lock all the same.
#[test]
fn a_chain_goes_on_when_the_server_forgets_it() {
    check_moved("forgotten", Time::Passing, 1, forgotten);
}

fn forgotten(world: &Arc<World>) -> Threads {
    let guard = block_on(world.client(0).lock(world::name()).acquire()).expect("free");
    let mut threads: Threads = (0..2)
        .map(|_| {
            spawn(world, 0, |_, mut lock| {
                drop(block_on(lock.acquire()).expect("granted in the end"));
            })
        })
        .collect();
    threads.push(thread::spawn(move || drop(guard)));
    threads.push(spawn(world, 0, |world, _| world.server.lose_memory()));
    threads
}

/// Waiters of a fair lock, in the order of the queue, which some leave at whatever moment.
#[test]
fn who_leaves_the_queue_of_a_fair_lock_holds_up_nobody() {
    check("queue", Time::Still, 1, queue);
    check("queues", Time::Still, 2, queues);
}

fn queue(world: &Arc<World>) -> Threads {
    let fair = world.client(0).fair_lock(world::name());
    let guard = block_on({ fair }.acquire()).expect("free");
    let mut threads: Threads = (1..=2)
        .map(|polls| fair_one(world, 0, move |lock| leaves_after(polls, lock)))
        .collect();
    threads.push(thread::spawn(move || drop(guard)));
    threads.push(fair_one(world, 0, |mut lock| {
        drop(block_on(lock.acquire()).expect("granted"));
    }));
    threads
}

fn queues(world: &Arc<World>) -> Threads {
    let holds = |mut lock: Lock| drop(block_on(lock.acquire()).expect("granted"));
    vec![
        fair_one(world, 0, holds),
        fair_one(world, 1, |lock| leaves_after(1, lock)),
        fair_one(world, 1, holds),
        fair_one(world, 0, |lock| leaves_after(2, lock)),
    ]
}

fn fair_one(
    world: &Arc<World>,
    client: usize,
    work: impl FnOnce(Lock) + Send + 'static,
) -> JoinHandle<()> {
    let lock = world.client(client).fair_lock(world::name());
    thread::spawn(move || work(lock))
}

/// Those who read let each other in and a writer not, one of whom leaves; the writer has his turn.
#[test]
fn a_writer_behind_readers_gets_in() {
    check("writer", Time::Still, 1, writer);
    check("writers", Time::Still, 2, writers);
}

fn writer(world: &Arc<World>) -> Threads {
    let guard = block_on(world.client(0).rw_lock(world::name()).read().acquire()).expect("free");
    vec![
        rw_one(world, 0, |rw| leaves_after(1, rw.write())),
        rw_one(world, 0, writes),
        rw_one(world, 0, reads),
        thread::spawn(move || drop(guard)),
    ]
}

fn writers(world: &Arc<World>) -> Threads {
    vec![
        rw_one(world, 0, reads),
        rw_one(world, 1, |rw| leaves_after(1, rw.read())),
        rw_one(world, 1, writes),
        rw_one(world, 0, writes),
    ]
}

/// Where writing ends and reading goes on others read with him, at once; at the end, or with his lease, who
/// writes gets in.
#[test]
fn writing_that_goes_on_as_reading_at_any_moment() {
    check_moved("downgrade", Time::Still, 1, |world| downgrade(world, None));
    check_moved("downgrade-over", Time::Passing, 1, |world| {
        downgrade(world, Some(Duration::from_millis(990)))
    });
}

fn downgrade(world: &Arc<World>, lease_ends: Option<Duration>) -> Threads {
    let mut context = world.client(0).context();
    let rw = context.rw_lock(world::name());
    let lease = Duration::from_secs(if lease_ends.is_some() { 1 } else { 30 });
    let write = block_on(rw.write().lease(lease).acquire()).expect("free");
    let read = block_on(rw.read().lease(lease).acquire()).expect("entered");
    let mut threads = vec![
        thread::spawn(move || {
            drop(write);
            drop(read);
        }),
        rw_one(world, 0, reads),
        rw_one(world, 0, writes),
    ];
    threads.extend(lease_ends.map(|ends| time_passes(world, ends)));
    threads
}

/// The only reader goes on to write, or does not, and leaves or is lost meanwhile.
#[test]
fn reading_that_goes_on_as_writing_at_any_moment() {
    check_moved("upgrade", Time::Still, 1, |world| upgrade(world, None));
    check_moved("upgrade-over", Time::Passing, 1, |world| {
        upgrade(world, Some(Duration::from_millis(990)))
    });
}

fn upgrade(world: &Arc<World>, lease_ends: Option<Duration>) -> Threads {
    let lease = Duration::from_secs(if lease_ends.is_some() { 1 } else { 30 });
    let one = move |polls: usize| {
        move |rw: &RwLock| {
            let read = block_on(rw.read().lease(lease).acquire()).expect("granted");
            let mut upgraded = Box::pin(RwLock::try_upgrade(read));
            for _ in 0..polls {
                if block_on(once(upgraded.as_mut())).is_some() {
                    return;
                }
            }
        }
    };
    let mut threads = vec![
        rw_one(world, 0, one(1)),
        rw_one(world, 0, one(3)),
        rw_one(world, 0, writes),
    ];
    threads.extend(lease_ends.map(|ends| time_passes(world, ends)));
    threads
}

fn reads(rw: &RwLock) {
    drop(block_on(rw.read().acquire()).expect("granted"));
}

fn writes(rw: &RwLock) {
    drop(block_on(rw.write().acquire()).expect("granted"));
}

fn rw_one(
    world: &Arc<World>,
    client: usize,
    work: impl FnOnce(&RwLock) + Send + 'static,
) -> JoinHandle<()> {
    let rw = world.client(client).rw_lock(world::name());
    thread::spawn(move || work(&rw))
}

fn time_passes(world: &Arc<World>, by: Duration) -> JoinHandle<()> {
    let world = Arc::clone(world);
    thread::spawn(move || {
        world.clock.jump(by);
        world.clock.jump(Duration::from_millis(20));
    })
}

type Threads = Vec<JoinHandle<()>>;
type Scenario = fn(&Arc<World>) -> Threads;

/// Runs a scenario under the schedules of one run of the tests.
fn check(name: &str, time: Time, clients: usize, scenario: Scenario) {
    let _ = moved_in(name, time, clients, scenario);
}

/// The same for a scenario that is about hand-offs, or the like: there must be some.
fn check_moved(name: &str, time: Time, clients: usize, scenario: Scenario) {
    let moved = moved_in(name, time, clients, scenario);
    println!("{name}: {moved} were moved");
    let replayed = std::env::var_os("LEASEHOLD_SCHEDULE").is_some();
    assert!(moved > 0 || replayed, "{name}: it never came to that");
}

/// How often a hold went to another, or to another side.
fn moved_in(name: &str, time: Time, clients: usize, scenario: Scenario) -> usize {
    let deviating = scaled(How::Deviating(1), How::Deviating(2));
    let (schedules, depth) = scaled((500, 4), (10_000, 5));
    let moved = Arc::new(AtomicUsize::new(0));
    for how in [deviating, How::Chance { schedules, depth }] {
        let moved = Arc::clone(&moved);
        explore(name, how, move || {
            let world = World::new(time, clients);
            join(scenario(&world));
            let server = Arc::clone(&world.server);
            world.end();
            moved.fetch_add(server.judge.lock().moved, Ordering::Relaxed);
        });
    }
    moved.load(Ordering::Relaxed)
}

/// Mistakes that are built in, each found by the scenario that is there for it, among the schedules of
/// one run of the tests.
#[cfg(feature = "testing")]
#[test]
fn what_is_built_in_on_purpose_is_found() {
    use crate::bug::{Bug, seed};
    use Time::{Passing, Still};

    if std::env::var_os("LEASEHOLD_SCHEDULE").is_some() {
        // One that failed without them is replayed.
        return;
    }
    let found = |bug, name: &str, time, clients, scenario: Scenario| {
        seed(Some(bug));
        let (schedules, depth) = (500, 4);
        let how = [How::Deviating(1), How::Chance { schedules, depth }];
        let outcome = std::panic::catch_unwind(|| {
            for how in how {
                run(name, how, time, clients, scenario);
            }
        });
        seed(None);
        assert!(outcome.is_err(), "{bug:?} is not found");
    };
    found(Bug::WakeUpSwallowed, "leavers", Still, 1, leavers);
    found(Bug::NoTryAfterSubscribing, "clients", Still, 2, clients);
    found(Bug::LossOnlyOnNo, "deadlines", Passing, 1, deadlines);
    found(Bug::DeadlineFromReply, "deadlines", Passing, 1, deadlines);
    found(Bug::CleanUpOnce, "timeouts", Passing, 1, timeouts);
    found(Bug::NestedNotCounted, "levels", Still, 1, levels);
    found(Bug::HandOffStranded, "emptied", Still, 1, emptied);
    found(Bug::HandOffCreates, "over", Passing, 2, over);
    found(Bug::PlaceKept, "queue", Still, 1, queue);
    found(Bug::QueueOvertaken, "queues", Still, 2, queues);
    found(Bug::UpgradeAmongReaders, "upgrade", Still, 1, |world| {
        upgrade(world, None)
    });
    found(
        Bug::RenewalOfAnAbandonedAcquire,
        "leavers",
        Still,
        1,
        leavers,
    );
}

#[cfg(feature = "testing")]
fn run(name: &str, how: How, time: Time, clients: usize, scenario: Scenario) -> usize {
    explore(name, how, move || {
        let world = World::new(time, clients);
        join(scenario(&world));
        world.end();
    })
}

fn join(threads: impl IntoIterator<Item = JoinHandle<()>>) {
    for thread in threads {
        thread.join().expect("did not panic");
    }
}

/// A thread with a contender of its own.
fn spawn(
    world: &Arc<World>,
    client: usize,
    work: impl FnOnce(&World, Lock) + Send + 'static,
) -> JoinHandle<()> {
    let lock = world.client(client).lock(world::name());
    let world = Arc::clone(world);
    thread::spawn(move || work(&world, lock))
}

/// Polls once; `None` if that was not enough.
async fn once<F: Future>(mut future: std::pin::Pin<&mut F>) -> Option<F::Output> {
    poll_fn(|cx| {
        Poll::Ready(match future.as_mut().poll(cx) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        })
    })
    .await
}

fn scaled<T>(short: T, long: T) -> T {
    if std::env::var("LEASEHOLD_LONG").is_ok_and(|value| value == "1") {
        long
    } else {
        short
    }
}

const RENEWED: Terms = Terms {
    lease: Duration::from_secs(30),
    renewed: true,
    max_hold: None,
};

const WINDOW: Duration = crate::config::OFFER_WINDOW;
