//! Futures that are dropped before they are done, at every poll: nothing held, nothing renewed, no
//! waiter left.
//!
//! A future is polled exactly `k` times, and the client's background gets one turn between two
//! polls; then it is dropped. `k` grows until the future is done before. On a runtime of one thread
//! each `k` is another moment: before the first byte, on its way, on the server, answered, offered.

use std::pin::pin;
use std::time::{Duration, Instant};

use leasehold::{Error, LockClient, LockContext, LockGuard, ReleaseOutcome};

use crate::common::*;
use crate::support::*;

/// Long against everything that happens here: what is left behind is seen, and does not end by
/// itself in time. A request may take a sixth of it.
const LEASE: Duration = secs(6);
const COMMAND_TIMEOUT: Duration = secs(1);

/// For the tests in which time has to pass: a request may take half a second.
const SHORT: Duration = secs(3);
const SHORT_TIMEOUT: Duration = ms(500);

/// What a busy machine may add. With it, still well before the leases end by themselves.
const SLACK: Duration = ms(1500);

/// Longest time for the next one to enter, on a busy machine: still no lease, which is what it would
/// wait for if something was left.
const SOON: Duration = secs(2);

/// More than any of these futures needs, on a machine that is busy with other things.
const TOO_MANY: usize = 20_000;

/// The ways to take a lock.
#[derive(Clone, Copy, Debug)]
enum Way {
    Acquire,
    Timeout,
    Try,
    Run,
}

const WAYS: [Way; 4] = [Way::Acquire, Way::Timeout, Way::Try, Way::Run];

/// Each way, of each kind of lock.
fn ways() -> impl Iterator<Item = (Way, Side)> {
    WAYS.into_iter()
        .flat_map(|way| SIDES.into_iter().map(move |side| (way, side)))
}

impl Way {
    /// Takes the lock this way; the guard is dropped at once, or lives as long as the work does.
    async fn take(self, ctx: &mut LockContext, name: &str) -> Result<(), Error> {
        self.take_on(Side::Plain, ctx, name).await
    }

    /// The same of any kind of lock.
    async fn take_on(self, side: Side, ctx: &mut LockContext, name: &str) -> Result<(), Error> {
        let mut lock = side.of(ctx, name);
        match self {
            Self::Acquire => lock.acquire().await.map(drop),
            Self::Timeout => lock.acquire_timeout(secs(10)).await.map(drop),
            Self::Try => lock.try_acquire().await.map(drop),
            Self::Run => {
                lock.run(async |guard: &LockGuard| {
                    for _ in 0..10 {
                        guard.ensure_held()?;
                        tokio::task::yield_now().await;
                    }
                    Ok(())
                })
                .await
            }
        }
    }
}

/// B12, B10 on a healthy server.
#[test]
fn a_taking_dropped_at_any_poll_leaves_a_free_lock_free() {
    turn_by_turn(async {
        let server = server();
        let client = client_of(&server.url(), LEASE).await;
        let prefix = unique_name();
        for (way, side) in ways() {
            let mut polls = 0;
            loop {
                let name = format!("{prefix}-{side:?}-{way:?}-{polls}");
                let mut ctx = client.context();
                let done = polled(polls, way.take_on(side, &mut ctx, &name)).await;
                // The same flow of work has no trace of it either.
                let again = side
                    .of(&mut ctx, &name)
                    .acquire_timeout(SOON)
                    .await
                    .unwrap();
                assert_eq!(again.depth(), 1);
                assert_eq!(again.release().await, ReleaseOutcome::Released);
                next_enters(side, &client, &name, SOON).await;
                if let Some(done) = done {
                    done.unwrap();
                    break;
                }
                polls = next(polls);
                assert!(polls < TOO_MANY);
            }
        }
        nothing_goes_on(server, &prefix, LEASE).await;
    });
}

/// The attempt of somebody who has left decides nothing for those who came after it was sent.
#[test]
fn a_try_after_a_dropped_taking_is_an_attempt_of_its_own() {
    turn_by_turn(async {
        let server = server();
        let client = client_of(&server.url(), LEASE).await;
        let other = client_of(&server.url(), LEASE).await;
        let prefix = unique_name();
        for polls in (0..400).step_by(3) {
            let name = format!("{prefix}-{polls}");
            let held = other.lock(name.as_str()).acquire().await.unwrap();
            let mut ctx = client.context();
            let mut lock = ctx.lock(name.as_str());
            if let Some(done) = polled(polls, lock.try_acquire()).await {
                assert!(done.unwrap().is_none());
                break;
            }
            assert_eq!(held.release().await, ReleaseOutcome::Released);
            // Free since before this call: no reason for a no.
            let tried = client.lock(name.as_str()).try_acquire().await.unwrap();
            assert!(tried.is_some(), "refused a free lock, {polls} polls");
        }
        nothing_left(server, &prefix).await;
    });
}

/// The same without a server: every step is another turn of the client's own background.
#[test]
fn a_taking_in_memory_dropped_at_any_poll_leaves_a_free_lock_free() {
    turn_by_turn(async {
        let client = LockClient::in_memory();
        for (way, side) in ways() {
            for contended in [false, true] {
                let mut polls = 0;
                loop {
                    let name = format!("{side:?}-{way:?}-{contended}-{polls}");
                    let held = side.other().alone(&client, &name).acquire().await.unwrap();
                    let mut ctx = client.context();
                    let done = if contended {
                        let mut taking = pin!(way.take_on(side, &mut ctx, &name));
                        let early = polled(1, taking.as_mut()).await;
                        assert!(early.is_none() || matches!(way, Way::Try));
                        drop(held);
                        if early.is_some() {
                            break;
                        }
                        polled(polls, taking).await
                    } else {
                        drop(held);
                        polled(polls, way.take_on(side, &mut ctx, &name)).await
                    };
                    next_enters(side, &client, &name, SOON).await;
                    if let Some(done) = done {
                        done.unwrap();
                        break;
                    }
                    polls += 1;
                    assert!(polls < 200);
                }
            }
        }
        let report = client.close(secs(1)).await;
        assert_eq!((report.lost, report.unconfirmed), (0, 0));
    });
}

/// B12, B17: whoever gives up his place is not waited for.
#[test]
fn a_waiter_dropped_at_any_poll_leaves_the_line() {
    turn_by_turn(async {
        let server = server();
        let client = client_of(&server.url(), LEASE).await;
        let other = client_of(&server.url(), LEASE).await;
        let prefix = unique_name();
        for (way, side) in ways() {
            let name = format!("{prefix}-{side:?}-{way:?}");
            let held = side.other().alone(&other, &name).acquire().await.unwrap();
            let mut polls = 0;
            // Beyond these it sleeps, subscribed.
            while polls < 600 {
                let mut ctx = client.context();
                if let Some(done) = polled(polls, way.take_on(side, &mut ctx, &name)).await {
                    assert!(matches!(way, Way::Try), "{done:?}");
                    done.unwrap();
                    break;
                }
                polls = next(polls);
            }
            let busy = side.alone(&client, &name).try_acquire().await.unwrap();
            assert!(busy.is_none());
            let cli = server.cli().await;
            cli.until_subscribers(&side.channel(&name), 0).await;
            assert_eq!(cli.count(&name).await, Some(1));
            assert_eq!(held.release().await, ReleaseOutcome::Released);
            next_enters(side, &client, &name, SOON).await;
        }
        nothing_goes_on(server, &prefix, LEASE).await;
    });
}

/// B12, B17: the grant that was on its way to him goes back.
#[test]
fn a_waiter_dropped_at_any_poll_after_the_release_holds_nothing() {
    turn_by_turn(async {
        let server = server();
        let client = client_of(&server.url(), LEASE).await;
        let other = client_of(&server.url(), LEASE).await;
        let cli = server.cli().await;
        let prefix = unique_name();
        for (way, side) in ways().filter(|(way, _)| !matches!(way, Way::Try)) {
            let mut polls = 0;
            loop {
                let name = format!("{prefix}-{side:?}-{way:?}-{polls}");
                let held = side.other().alone(&other, &name).acquire().await.unwrap();
                let mut ctx = client.context();
                let channel = side.channel(&name);
                let done = {
                    let mut taking = pin!(way.take_on(side, &mut ctx, &name));
                    tokio::select! {
                        biased;
                        _ = &mut taking => panic!("it is held"),
                        () = cli.until_subscribers(&channel, 1) => {}
                    }
                    drop(held);
                    polled(polls, taking).await
                };
                next_enters(side, &client, &name, SOON).await;
                if let Some(done) = done {
                    done.unwrap();
                    break;
                }
                polls = next(polls);
                assert!(polls < TOO_MANY);
            }
        }
        nothing_goes_on(server, &prefix, LEASE).await;
    });
}

/// Two of one client in line, the first leaves at any moment of his turn: the second gets it, by the
/// message or by what the first leaves him.
#[test]
fn the_next_in_line_is_served_whenever_the_first_leaves() {
    turn_by_turn(async {
        let server = server();
        let client = client_of(&server.url(), LEASE).await;
        let other = client_of(&server.url(), LEASE).await;
        let cli = server.cli().await;
        let prefix = unique_name();
        let mut polls = 0;
        loop {
            let name = format!("{prefix}-{polls}");
            let held = other.lock(name.as_str()).acquire().await.unwrap();
            let mut first = client.lock(name.as_str());
            let mut second = client.lock(name.as_str());
            let mut second = pin!(second.acquire());
            let done = {
                let mut first = pin!(first.acquire());
                tokio::select! {
                    biased;
                    _ = &mut first => panic!("it is held"),
                    _ = &mut second => panic!("it is held"),
                    () = cli.until_waiters(&name, 1) => {}
                }
                drop(held);
                polled(polls, first).await
            };
            let over = done.is_some();
            drop(done);
            let guard = tokio::time::timeout(SOON, second).await;
            let guard = guard.unwrap_or_else(|_| panic!("the second waits, {polls} polls"));
            assert_eq!(guard.unwrap().release().await, ReleaseOutcome::Released);
            if over {
                break;
            }
            polls = next(polls);
            assert!(polls < TOO_MANY);
        }
        nothing_goes_on(server, &prefix, LEASE).await;
    });
}

/// Rule 1: a level that was given up is taken back, the hold under it goes on.
#[test]
fn a_nested_taking_dropped_at_any_poll_leaves_the_outer_hold_as_it_was() {
    turn_by_turn(async {
        let server = server();
        let client = client_of(&server.url(), LEASE).await;
        let cli = server.cli().await;
        let prefix = unique_name();
        for (way, side) in ways() {
            let name = format!("{prefix}-{side:?}-{way:?}");
            let mut ctx = client.context();
            let outer = side.of(&mut ctx, &name).acquire().await.unwrap();
            let token = outer.fencing_token().unwrap();
            let mut polls = 0;
            loop {
                let done = polled(polls, way.take_on(side, &mut ctx, &name)).await;
                assert_eq!(outer.depth(), 1, "{polls} polls");
                assert_eq!(outer.fencing_token().unwrap(), token);
                // Put right by the next thing that is said about the hold.
                outer.confirm().await.unwrap();
                assert_eq!(cli.count(&name).await, Some(1), "{polls} polls");
                if let Some(done) = done {
                    done.unwrap();
                    break;
                }
                polls = next(polls);
                assert!(polls < TOO_MANY);
            }
            // And one that is dropped while the outer guard goes first.
            let mut again = side.of(&mut ctx, &name);
            {
                let mut again = pin!(again.acquire());
                assert!(polled(1, again.as_mut()).await.is_none());
                assert!(matches!(
                    outer.release().await,
                    ReleaseOutcome::StillHeld { depth: 1 }
                ));
            }
            cli.until_free(&name).await;
        }
        nothing_goes_on(server, &prefix, LEASE).await;
    });
}

/// What a guard is asked, given up at any poll, leaves the hold held; and its end still ends it.
#[test]
fn a_guards_question_dropped_at_any_poll_changes_nothing() {
    turn_by_turn(async {
        let server = server();
        let client = client_of(&server.url(), LEASE).await;
        let cli = server.cli().await;
        let prefix = unique_name();
        for question in ["confirm", "extend", "run", "inspect"] {
            let mut polls = 0;
            loop {
                let name = format!("{prefix}-{question}-{polls}");
                let guard = client.lock(name.as_str()).acquire().await.unwrap();
                let asked = async {
                    match question {
                        "confirm" => guard.confirm().await,
                        "extend" => guard.extend(secs(20)).await,
                        "run" => guard.run(cli.cmd(&["PING"])).await.map(drop),
                        _ => client.inspect(name.as_str()).await.map(drop),
                    }
                };
                let done = polled(polls, asked).await;
                assert!(guard.is_held());
                assert_eq!(guard.depth(), 1);
                drop(guard);
                next_one_enters(&client, &name, SOON).await;
                if let Some(done) = done {
                    done.unwrap();
                    break;
                }
                polls = next(polls);
                assert!(polls < TOO_MANY);
            }
        }
        nothing_goes_on(server, &prefix, LEASE).await;
    });
}

/// B12: the release is handed over before the first await, or by the guard's own `Drop`.
#[test]
fn a_release_dropped_at_any_poll_releases() {
    turn_by_turn(async {
        let server = server();
        let client = client_of(&server.url(), LEASE).await;
        let cli = server.cli().await;
        let prefix = unique_name();
        let mut polls = 0;
        loop {
            let name = format!("{prefix}-{polls}");
            let mut ctx = client.context();
            let outer = ctx.lock(name.as_str()).acquire().await.unwrap();
            let inner = ctx.lock(name.as_str()).acquire().await.unwrap();
            let inner_done = polled(polls, inner.release()).await;
            assert_eq!(outer.depth(), 1);
            outer.confirm().await.unwrap();
            assert_eq!(cli.count(&name).await, Some(1));
            let outer_done = polled(polls, outer.release()).await;
            next_one_enters(&client, &name, SOON).await;
            if let (Some(inner), Some(outer)) = (inner_done, outer_done) {
                assert_eq!(inner, ReleaseOutcome::StillHeld { depth: 1 });
                assert_eq!(outer, ReleaseOutcome::Released);
                break;
            }
            polls = next(polls);
            assert!(polls < TOO_MANY);
        }
        nothing_goes_on(server, &prefix, LEASE).await;
    });
}

/// An operator's call that is given up has removed that owner or nobody, and the holder is told at
/// the latest when he asks.
#[test]
fn a_forced_release_dropped_at_any_poll_is_done_or_not() {
    turn_by_turn(async {
        let server = server();
        let client = client_of(&server.url(), LEASE).await;
        let cli = server.cli().await;
        let prefix = unique_name();
        let mut polls = 0;
        loop {
            let name = format!("{prefix}-{polls}");
            let guard = client.lock(name.as_str()).acquire().await.unwrap();
            let done = polled(polls, client.force_release(name.as_str())).await;
            let told = guard.confirm().await;
            if cli.exists(&name).await {
                told.unwrap();
            } else {
                // It may have been removed since the question was answered.
                let again = guard.confirm().await;
                assert!(matches!(again, Err(Error::Lost { .. })), "{again:?}");
            }
            drop(guard);
            next_one_enters(&client, &name, SOON).await;
            if let Some(done) = done {
                assert!(done.unwrap());
                break;
            }
            polls = next(polls);
            assert!(polls < TOO_MANY);
        }
        nothing_goes_on(server, &prefix, LEASE).await;
    });
}

/// A client whose `close` was given up is closed for acquisitions, and its holds still end.
#[test]
fn a_close_dropped_at_any_poll_can_be_called_again() {
    turn_by_turn(async {
        let server = server();
        let prefix = unique_name();
        let mut polls = 0;
        loop {
            let client = client_of(&server.url(), LEASE).await;
            let name = format!("{prefix}-{polls}");
            let guard = client.lock(name.as_str()).acquire().await.unwrap();
            // As long as one request may take: no patience for the guard.
            let done = polled(polls, client.close(COMMAND_TIMEOUT)).await;
            if polls > 0 {
                let refused = client.lock(name.as_str()).try_acquire().await;
                assert!(matches!(refused, Err(Error::Closed)), "{refused:?}");
            }
            if let Some(report) = done {
                assert_eq!((report.lost, report.unconfirmed), (1, 0));
                break;
            }
            let report = client.close(COMMAND_TIMEOUT).await;
            assert!(report.lost <= 1);
            assert_eq!(report.unconfirmed, 0, "{polls} polls");
            assert!(!guard.is_held());
            assert!(!server.cli().await.exists(&name).await, "{polls} polls");
            polls = next(polls);
            assert!(polls < TOO_MANY);
        }
        nothing_left(server, &prefix).await;
    });
}

/// B10: the server stands still while the future is dropped, and goes on in time to run what it was
/// sent.
#[test]
fn a_taking_dropped_while_the_server_is_paused_leaves_nothing() {
    turn_by_turn(async {
        let server = Server::start();
        let client = client_of(&server.url(), LEASE).await;
        let prefix = unique_name();
        let mut round = 0;
        // Early: what was sent still counts. Late: past its deadline, and the connection was replaced.
        for pause in [ms(50), COMMAND_TIMEOUT * 3] {
            round += 1;
            server.stop();
            let mut names = Vec::new();
            for way in WAYS {
                let mut polls = 0;
                while polls < 60 {
                    let name = format!("{prefix}-{round}-{way:?}-{polls}");
                    let mut ctx = client.context();
                    let done = polled(polls, way.take(&mut ctx, &name)).await;
                    assert!(done.is_none(), "{done:?}");
                    names.push(name);
                    polls += 1 + polls / 4;
                }
            }
            // The length of the pause is the subject.
            tokio::time::sleep(pause).await;
            server.cont();
            for name in &names {
                next_one_enters(&client, name, COMMAND_TIMEOUT * 2).await;
            }
            nothing_left(&server, &prefix).await;
        }
        nothing_goes_on(&server, &prefix, LEASE).await;
    });
}

/// The level of a hold that was given up in a pause does not stay, and the hold does.
#[test]
fn a_nested_taking_dropped_while_the_server_is_paused_leaves_the_outer_hold_as_it_was() {
    turn_by_turn(async {
        let server = Server::start();
        let client = client_of(&server.url(), LEASE).await;
        let cli = server.cli().await;
        let name = unique_name();
        let mut ctx = client.context();
        let outer = ctx.lock(name.as_str()).acquire().await.unwrap();
        for polls in [1, 2, 5, 10, 20] {
            server.stop();
            for way in WAYS {
                let done = polled(polls, way.take(&mut ctx, &name)).await;
                assert!(done.is_none(), "{done:?}");
                assert_eq!(outer.depth(), 1);
            }
            server.cont();
            outer.confirm().await.unwrap();
            eventually(COMMAND_TIMEOUT, "the count is right again", async || {
                cli.count(&name).await == Some(1)
            })
            .await;
        }
        assert_eq!(outer.release().await, ReleaseOutcome::Released);
        nothing_goes_on(&server, &name, LEASE).await;
    });
}

/// B11: what was dropped while the server was down is not sent to the one that comes back.
#[test]
fn a_taking_dropped_while_the_server_is_down_never_runs() {
    turn_by_turn(async {
        let server = Server::start();
        let client = client_of(&server.url(), LEASE).await;
        let prefix = unique_name();
        for round in 0..2 {
            server.kill();
            for way in WAYS {
                for polls in [0, 1, 2, 3, 5, 8, 13, 30] {
                    let name = format!("{prefix}-{round}-{way:?}-{polls}");
                    let mut ctx = client.context();
                    if let Some(done) = polled(polls, way.take(&mut ctx, &name)).await {
                        let error = done.unwrap_err();
                        assert!(
                            matches!(
                                error,
                                Error::Unreachable { .. } | Error::Indeterminate { .. }
                            ),
                            "{error:?}"
                        );
                    }
                }
            }
            server.restart().await;
            let mut monitor = server.monitor().await;
            // Connected again, and an acquisition's time over twice.
            next_one_enters(&client, &format!("after-{prefix}-{round}"), secs(2)).await;
            tokio::time::sleep(COMMAND_TIMEOUT * 2).await;
            let takings = monitor
                .count(|line| line.contains("redisson_lock_token") && !line.contains("after-"))
                .await;
            assert_eq!(takings, 0);
            nothing_left(&server, &prefix).await;
        }
    });
}

/// L1: the server granted it, nobody was told, and the one who asked has gone: one command timeout.
#[test]
fn a_taking_dropped_after_its_reply_was_lost_frees_within_one_command_timeout() {
    turn_by_turn(async {
        let server = server();
        let proxy = Proxy::start(server.port());
        let cli = server.cli().await;
        let prefix = unique_name();
        for then in [Then::Close, Then::Reset, Then::Discard] {
            for way in WAYS {
                for polls in [0, 8] {
                    // Another one each: a client whose connections break often waits before the next.
                    let client = client_of(&proxy.url(), SHORT).await;
                    all_scripts_known(&client).await;
                    let name = format!("{prefix}-{then:?}-{way:?}-{polls}");
                    let mut ctx = client.context();
                    let lost = proxy.inject(Fault::reply(bytes(&name), Act::Swallow(then)));
                    {
                        let mut taking = pin!(way.take(&mut ctx, &name));
                        tokio::select! {
                            biased;
                            done = &mut taking => panic!("{done:?}"),
                            () = lost.hit() => {}
                        }
                        // A re-send may have brought the answer by now.
                        let _ = polled(polls, taking).await;
                    }
                    let what = format!("{name} is free");
                    eventually(SHORT_TIMEOUT + SLACK, &what, async || {
                        !cli.exists(&name).await
                    })
                    .await;
                    // The connection may have to be made anew.
                    next_one_enters(&client, &name, SOON).await;
                    proxy.heal();
                }
            }
        }
        nothing_goes_on(server, &prefix, SHORT).await;
    });
}

/// The same with all replies withheld, not only one: the release needs no answer to work.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_is_free_one_command_timeout_after_the_drop_though_no_reply_comes() {
    let server = server();
    let proxy = Proxy::start(server.port());
    let client = client_of(&proxy.url(), SHORT).await;
    all_scripts_known(&client).await;
    let cli = server.cli().await;
    let name = unique_name();
    let mut lock = client.lock(name.as_str());
    proxy.inject(Fault::HoldReplies);
    {
        let mut taking = pin!(lock.acquire());
        tokio::select! {
            biased;
            done = &mut taking => panic!("{done:?}"),
            () = eventually(secs(2), "the server has granted it", async || cli.exists(&name).await) => {}
        }
    }
    eventually(SHORT_TIMEOUT + SLACK, "the lock is free", async || {
        !cli.exists(&name).await
    })
    .await;
    proxy.heal();
    next_one_enters(&client, &name, secs(1)).await;
    nothing_goes_on(server, &name, SHORT).await;
}

/// The reply comes when nobody waits for it any more, at any time up to its limit and beyond.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_that_comes_after_the_drop_is_given_back() {
    let server = server();
    let proxy = Proxy::start(server.port());
    let client = client_of(&proxy.url(), SHORT).await;
    all_scripts_known(&client).await;
    let cli = server.cli().await;
    let prefix = unique_name();
    for late in [0, 10, 80, 490, 500, 510, 1000] {
        let name = format!("{prefix}-{late}");
        let mut lock = client.lock(name.as_str());
        let held = proxy.inject(Fault::reply(bytes(&name), Act::Hold));
        {
            let mut taking = pin!(lock.acquire());
            tokio::select! {
                biased;
                done = &mut taking => panic!("{done:?}"),
                () = held.hit() => {}
            }
        }
        // How late the reply comes is the subject.
        tokio::time::sleep(ms(late)).await;
        held.release();
        eventually(SHORT_TIMEOUT + SLACK, "the lock is free", async || {
            !cli.exists(&name).await
        })
        .await;
        next_one_enters(&client, &name, SOON).await;
        proxy.heal();
    }
    nothing_goes_on(server, &prefix, SHORT).await;
}

/// A waiter in a `select!` by `&mut` whose other branches keep the task busy: those behind it do not
/// wait for it, it holds nothing that anybody would renew, and it keeps its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_is_not_polled_holds_up_nobody_and_holds_nothing() {
    let server = server();
    let client = client_of(&server.url(), LEASE).await;
    let other = client_of(&server.url(), LEASE).await;
    let cli = server.cli().await;
    let name = unique_name();
    let held = other.lock(name.as_str()).acquire().await.unwrap();
    let mut sleeper = client.lock(name.as_str());
    let mut sleeper = pin!(sleeper.acquire());
    tokio::select! {
        biased;
        _ = &mut sleeper => panic!("it is held"),
        () = cli.until_waiters(&name, 1) => {}
    }
    let mut second = client.lock(name.as_str());
    let second = tokio::spawn(async move { second.acquire().await });

    // From here on the first is not polled. The offer to it lasts a tenth of a second.
    drop(held);
    let guard = tokio::time::timeout(SOON, second).await;
    let guard = guard.expect("held up").unwrap().unwrap();
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    cli.until_free(&name).await;

    let mut monitor = server.monitor().await;
    let start = Instant::now();
    // A renewal would come after a third of a lease.
    let minutes = scaled(LEASE * 3 / 4, secs(120));
    let mut entered = 0;
    while start.elapsed() < minutes {
        // In and out by others, of the same client and not.
        for who in [&client, &other] {
            next_one_enters(who, &name, SOON).await;
            entered += 1;
        }
        cli.until_free(&name).await;
        tokio::time::sleep(ms(20)).await; // the passing of time is the subject
    }
    assert!(entered > 10, "{entered}");
    let renewed = monitor
        .count(|line| line.contains(&name) && line.contains("pexpire"))
        .await;
    assert_eq!(renewed, 0);

    // It is still in line: polled again, it gets the lock.
    let guard = tokio::time::timeout(SOON, sleeper).await.unwrap();
    assert_eq!(guard.unwrap().release().await, ReleaseOutcome::Released);
    nothing_goes_on(server, &name, LEASE).await;
}

/// The same, dropped in the end without having been polled again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_was_never_polled_again_leaves_nothing() {
    let server = server();
    let client = client_of(&server.url(), SHORT).await;
    let other = client_of(&server.url(), SHORT).await;
    let cli = server.cli().await;
    let name = unique_name();
    for pause in [0, 50, 95, 100, 105, 150, 700] {
        let held = other.lock(name.as_str()).acquire().await.unwrap();
        let mut sleeper = client.lock(name.as_str());
        {
            let mut sleeper = pin!(sleeper.acquire());
            tokio::select! {
                biased;
                _ = &mut sleeper => panic!("it is held"),
                () = cli.until_waiters(&name, 1) => {}
            }
            drop(held);
            // How long it was left alone is the subject.
            tokio::time::sleep(ms(pause)).await;
        }
        next_one_enters(&other, &name, SOON).await;
        next_one_enters(&client, &name, SOON).await;
    }
    nothing_goes_on(server, &name, SHORT).await;
}

/// L1: a lease that was asked to be long, by somebody who did not wait for the answer, is not what
/// the release gives up after.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_longer_lease_that_nobody_knows_of_is_released_too() {
    let server = server();
    let proxy = Proxy::start(server.port());
    let cli = server.cli().await;
    for nested in [false, true] {
        let client = client_of(&proxy.url(), ms(1500)).await;
        all_scripts_known(&client).await;
        let name = unique_name();
        let mut ctx = client.context();
        let outer = ctx.lock(name.as_str()).acquire().await.unwrap();
        proxy.inject(Fault::HoldReplies);
        {
            let mut again = ctx.lock(name.as_str()).lease(secs(60));
            let mut longer = pin!(async {
                if nested {
                    again.acquire().await.map(drop)
                } else {
                    outer.extend(secs(60)).await
                }
            });
            let there = eventually(secs(2), "the server has it", async || {
                cli.pttl(&name).await > 30_000
            });
            let mut there = pin!(there);
            tokio::select! {
                biased;
                () = &mut there => {}
                done = &mut longer => {
                    assert!(matches!(done, Err(Error::Indeterminate { .. })), "{done:?}");
                    there.await;
                }
            }
        }
        // Neither what was sent and not yet arrived, nor what is sent from now on, ever arrives.
        proxy.black_hole();
        drop(outer);
        // Nothing arrives for longer than the lease that was confirmed.
        tokio::time::sleep(ms(1800)).await;
        assert!(cli.exists(&name).await);
        proxy.heal();
        eventually(secs(3), "the lock is free", async || {
            !cli.exists(&name).await
        })
        .await;
        nothing_left(server, &name).await;
    }
}
