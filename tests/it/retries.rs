//! Replies that never arrive, and what is sent again because of it.

use std::time::{Duration, Instant};

use leasehold::{Error, LockClient, ReleaseOutcome};

use crate::common::*;
use crate::support::{all_scripts_known, calls_but_releases};

/// Long against everything that happens here: a renewal says the count as well, and none comes.
const LEASE: Duration = secs(30);
const COMMAND_TIMEOUT: Duration = secs(1);

async fn client(url: &str, lease: Duration, command_timeout: Duration) -> LockClient {
    let builder = LockClient::builder().url(url).lease(lease);
    builder
        .command_timeout(command_timeout)
        .connect_timeout(secs(5))
        .build()
        .await
        .unwrap()
}

/// B01, B07: an acquisition that ran and was not answered is sent again, and counts once. The client
/// library would have sent it again by itself, and the server would have counted two.
#[tokio::test]
async fn an_acquisition_whose_reply_is_lost_counts_once() {
    let proxy = Proxy::start(server().port());
    let cli = server().cli().await;
    for then in [Then::Close, Then::Reset, Then::Discard] {
        let client = client(&proxy.url(), LEASE, COMMAND_TIMEOUT).await;
        all_scripts_known(&client).await;
        let mut monitor = server().monitor().await;
        let name = unique_name();
        let mut ctx = client.context();
        let lost = proxy.inject(Fault::reply(bytes(&name), Act::Swallow(then)));
        let outer = ctx.lock(name.as_str()).acquire().await.unwrap();
        assert!(lost.is_hit());
        assert!(
            calls_but_releases(&mut monitor, &name).await.len() >= 2,
            "it ran twice"
        );
        assert_eq!(cli.count(&name).await, Some(1), "{then:?}");

        // The same for the next level.
        let lost = proxy.inject(Fault::reply(bytes(&name), Act::Swallow(then)));
        let inner = ctx.lock(name.as_str()).acquire().await.unwrap();
        assert!(lost.is_hit());
        assert_eq!(cli.count(&name).await, Some(2), "{then:?}");
        assert_eq!(
            inner.release().await,
            ReleaseOutcome::StillHeld { depth: 1 }
        );
        assert_eq!(cli.count(&name).await, Some(1), "{then:?}");
        assert_eq!(outer.release().await, ReleaseOutcome::Released);
        assert!(!cli.exists(&name).await);
        nothing_left(server(), &name).await;
    }
}

/// B01: every reply lost for a while, whatever the number of copies.
#[tokio::test]
async fn an_acquisition_that_ran_many_times_counts_once() {
    let proxy = Proxy::start(server().port());
    let cli = server().cli().await;
    let client = client(&proxy.url(), LEASE, COMMAND_TIMEOUT).await;
    all_scripts_known(&client).await;
    let mut monitor = server().monitor().await;
    let name = unique_name();
    proxy.inject(Fault::HoldReplies);
    let acquiring = {
        let mut lock = client.lock(name.as_str());
        tokio::spawn(async move { lock.acquire().await })
    };
    eventually(secs(4), "it ran twice", async || {
        calls_but_releases(&mut monitor, &name).await.len() >= 2
    })
    .await;
    proxy.heal();
    let guard = acquiring.await.unwrap().unwrap();
    assert_eq!(cli.count(&name).await, Some(1));
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    nothing_left(server(), &name).await;
}

/// B03: the second run of a release finds nothing, and that is not "you never held it". A lock taken
/// meanwhile is untouched.
#[tokio::test]
async fn a_release_whose_reply_is_lost_is_still_released() {
    let proxy = Proxy::start(server().port());
    let cli = server().cli().await;
    let other = client(&server().url(), LEASE, COMMAND_TIMEOUT).await;
    for then in [Then::Close, Then::Reset, Then::Discard] {
        let client = client(&proxy.url(), LEASE, COMMAND_TIMEOUT).await;
        all_scripts_known(&client).await;
        let name = unique_name();
        let guard = client.lock(name.as_str()).acquire().await.unwrap();
        let first = guard.fencing_token().unwrap();
        let mut lock = other.lock(name.as_str());
        let waiting = tokio::spawn(async move { lock.acquire().await });
        cli.until_waiters(&name, 1).await;
        // Its copy is sent only after the other one has the lock.
        proxy.inject(Fault::reply(bytes(&name), Act::Swallow(then)));
        proxy.refuse();
        let releasing = tokio::spawn(guard.release());
        let next = waiting.await.unwrap().unwrap();
        proxy.heal();
        let outcome = releasing.await.unwrap();
        match then {
            // The copy is sent when the first attempt's time is over, and so is the release's.
            Then::Discard => assert!(
                matches!(
                    outcome,
                    ReleaseOutcome::Released | ReleaseOutcome::Unconfirmed { .. }
                ),
                "{outcome:?}"
            ),
            Then::Close | Then::Reset => assert_eq!(outcome, ReleaseOutcome::Released),
        }
        assert!(next.fencing_token().unwrap() > first);
        next.confirm().await.unwrap();
        assert_eq!(cli.count(&name).await, Some(1));
        assert_eq!(next.release().await, ReleaseOutcome::Released);
        nothing_left(server(), &name).await;
    }
}

/// B03: "released" and "was not there any more" are different answers.
#[tokio::test]
async fn a_release_of_a_hold_that_was_gone_says_so() {
    let client = client(&server().url(), LEASE, COMMAND_TIMEOUT).await;
    let cli = server().cli().await;
    let name = unique_name();
    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    cli.cmd(&["DEL", &name]).await.ok();
    let outcome = guard.release().await;
    assert!(matches!(outcome, ReleaseOutcome::Lost(_)), "{outcome:?}");
    nothing_left(server(), &name).await;
}

/// B04: an old release that arrives in the time of the next hold of the same client, or of the same
/// flow of work, does not end it.
#[tokio::test]
async fn a_late_release_does_not_touch_the_next_hold_of_the_same_client() {
    let proxy = Proxy::start(server().port());
    let cli = server().cli().await;
    let name = unique_name();
    let client = client(&proxy.url(), LEASE, COMMAND_TIMEOUT).await;
    all_scripts_known(&client).await;
    let mut ctx = client.context();
    for same_flow in [false, true] {
        let mut monitor = server().monitor().await;
        let sent_before = proxy.count(&bytes(channel(&name)));
        let old = ctx.lock(name.as_str()).acquire().await.unwrap();
        let frozen = proxy.inject(Fault::request(bytes(&name), Act::Hold));
        // In the background: the answer is not needed, and would be waited for.
        drop(old);
        frozen.hit().await;
        // Its lease ends, or an operator helps.
        cli.cmd(&["DEL", &name]).await.ok();
        // The frozen connection is given up for another one.
        let mut fork = ctx.fork();
        let next = if same_flow { &mut ctx } else { &mut fork };
        let held = next.lock(name.as_str()).acquire().await.unwrap();
        let hash = cli.hash(&name).await;
        assert_eq!(hash.len(), 1);

        frozen.release();
        let sent = proxy.count(&bytes(channel(&name))) - sent_before;
        eventually(secs(2), "all copies of the release have run", async || {
            let release = |line: &str| line.contains("\"EVAL") && line.contains(&channel(&name));
            monitor.count(release).await >= sent
        })
        .await;
        assert!(sent > 1, "the release was sent again meanwhile");
        assert_eq!(cli.hash(&name).await, hash);
        held.confirm().await.unwrap();
        assert_eq!(held.release().await, ReleaseOutcome::Released);
        nothing_left(server(), &name).await;
    }
}

/// B05: a release that went unanswered while the server stood still; the same task comes again. It
/// does not re-enter what it left behind, and others get in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_orphan_of_a_stopped_server_is_not_re_entered() {
    let server = Server::start();
    let (lease, timeout) = (LEASE, COMMAND_TIMEOUT);
    let client = client(&server.url(), lease, timeout).await;
    let other = self::client(&server.url(), lease, timeout).await;
    let name = unique_name();
    let mut ctx = client.context();
    for awaited in [false, true] {
        let guard = ctx.lock(name.as_str()).acquire().await.unwrap();
        let first = guard.fencing_token().unwrap();
        server.stop();
        if awaited {
            let outcome = guard.release().await;
            assert!(
                matches!(outcome, ReleaseOutcome::Unconfirmed { .. }),
                "{outcome:?}"
            );
        } else {
            drop(guard);
        }
        server.cont();
        let again = ctx.lock(name.as_str()).acquire().await.unwrap();
        assert_eq!(again.depth(), 1);
        assert!(
            again.fencing_token().unwrap() > first,
            "the orphan was re-entered"
        );
        assert_eq!(server.cli().await.count(&name).await, Some(1));
        assert_eq!(again.release().await, ReleaseOutcome::Released);
        let next = other
            .lock(name.as_str())
            .acquire_timeout(lease)
            .await
            .unwrap();
        assert_eq!(next.release().await, ReleaseOutcome::Released);
    }
    nothing_left(&server, &name).await;
}

/// B07: connections killed all the time under load. All calls end, all counts are right, and in the
/// end nothing is held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_connections_leave_no_wrong_count() {
    let server = Server::start();
    let client = client(&server.url(), LEASE, COMMAND_TIMEOUT).await;
    let cli = server.cli().await;
    let prefix = unique_name();
    let end = Instant::now() + scaled(ms(1500), secs(60));
    let mut flows = Vec::new();
    let port = server.port();
    for flow in 0..8 {
        let (client, prefix) = (client.clone(), prefix.clone());
        flows.push(tokio::spawn(async move {
            let name = format!("{prefix}-{}", flow % 4);
            let mut ctx = client.context();
            let mut done = 0;
            while Instant::now() < end {
                let Ok(outer) = ctx.lock(name.as_str()).acquire_timeout(secs(5)).await else {
                    continue;
                };
                if let Ok(inner) = ctx.lock(name.as_str()).acquire_timeout(secs(5)).await {
                    assert_eq!(inner.depth(), 2);
                    drop(inner);
                }
                if outer.confirm().await.is_ok() {
                    // A road of its own each time: the last one was killed, like all others.
                    let count = count(port, &name).await;
                    assert!(matches!(count, Some(1) | None), "{count:?}");
                }
                assert!(outer.is_held());
                drop(outer);
                done += 1;
            }
            done
        }));
    }
    while Instant::now() < end {
        let kill = ["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"];
        let killed = cli.cmd(&kill).await;
        assert!(killed.int() >= 0);
        tokio::time::sleep(ms(20)).await; // the rhythm of the fault
    }
    for flow in flows {
        assert!(flow.await.unwrap() > 0);
    }
    nothing_left(&server, &prefix).await;
    let report = client.close(secs(1)).await;
    assert_eq!((report.lost, report.unconfirmed), (0, 0));
}

/// The count of a held lock, unless the connection is killed before it is told.
async fn count(port: u16, name: &str) -> Option<i64> {
    let cli = Cli::connect(port).await;
    let counts = cli.try_cmd(&["HVALS", name]).await.ok()?.texts();
    Some(
        counts
            .iter()
            .map(|count| count.parse::<i64>().unwrap())
            .sum(),
    )
}

/// B08: the time limit of a call holds for scripts too. The client library ignores it there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_time_limit_holds_while_the_server_is_paused() {
    let server = Server::start();
    let client = client(&server.url(), LEASE, ms(100)).await;
    let patient = self::client(&server.url(), LEASE, COMMAND_TIMEOUT).await;
    all_scripts_known(&patient).await;
    let name = unique_name();
    server.stop();

    let unanswered = |error: &Error| {
        matches!(
            error,
            Error::Indeterminate { .. } | Error::Unreachable { .. }
        )
    };
    let (start, ruler) = (Instant::now(), Ruler::start());
    let late = client.lock(name.as_str()).acquire_timeout(ms(200)).await;
    let took = start.elapsed();
    assert!(took < ms(450) + ruler.allowance(), "{took:?}");
    assert!(unanswered(&late.unwrap_err()));

    let start = Instant::now();
    let tried = client.lock(name.as_str()).try_acquire().await;
    let took = start.elapsed();
    assert!(took < ms(350) + ruler.allowance(), "{took:?}");
    assert!(unanswered(&tried.unwrap_err()));

    // What had been sent runs when the pause is over, and leaves nothing.
    server.cont();
    let mut lock = patient.lock(name.as_str());
    let guard = lock.acquire_timeout(secs(5)).await.unwrap();
    assert_eq!(server.cli().await.count(&name).await, Some(1));
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    nothing_left(&server, &name).await;
}

/// B09: a release against a busy server says that it does not know, goes on trying, and nothing is
/// renewed meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unconfirmed_release_is_done_right_after_the_server_is_free_again() {
    let server = Server::start();
    let client = client(&server.url(), secs(3), ms(100)).await;
    let cli = server.cli().await;
    let name = unique_name();
    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    let mut monitor = server.monitor().await;
    server.stop();
    let (start, ruler) = (Instant::now(), Ruler::start());
    let outcome = guard.release().await;
    let took = start.elapsed();
    assert!(took < ms(350) + ruler.allowance(), "{took:?}");
    let ReleaseOutcome::Unconfirmed { at_most } = outcome else {
        panic!("{outcome:?}");
    };
    assert!(
        at_most > Duration::ZERO && at_most <= secs(3),
        "{at_most:?}"
    );

    server.cont();
    let awake = Instant::now();
    cli.until_free(&name).await;
    let took = awake.elapsed();
    assert!(took < secs(1) + ruler.allowance(), "{took:?}");
    // A renewal would have come by now.
    tokio::time::sleep(ms(1100)).await;
    let calls = calls_but_releases(&mut monitor, &name).await;
    assert!(calls.is_empty(), "{calls:#?}");
    nothing_left(&server, &name).await;
}
