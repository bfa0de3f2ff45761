//! The quorum lock: one lock on three servers, of which any one may be slow, silent, dead or forgetful.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold::{Error, LockClient, LossReason, QuorumGuard, QuorumLock, ReleaseOutcome};
use tokio::sync::OnceCell;

use crate::common::*;
use crate::support::*;

const LEASE: Duration = secs(2);

/// Longest time for what should happen at once, on a busy machine.
const SOON: Duration = secs(10);

fn three() -> [Server; 3] {
    std::array::from_fn(|_| Server::start())
}

/// Servers that nobody stops, and that are old enough to count.
async fn old_servers() -> &'static [Server; 3] {
    static SERVERS: OnceCell<[Server; 3]> = OnceCell::const_new();
    let start = async || {
        let servers = three();
        grown_up(&servers).await;
        servers
    };
    SERVERS.get_or_init(start).await
}

/// Waits until all count for a new hold, for a client who has just come.
async fn grown_up(servers: &[Server]) {
    let name = unique_name();
    eventually(LEASE + SOON, "all servers count", async || {
        let clients = clients(servers).await;
        let answers = clients.iter().map(|client| old(client, &name));
        let answers = futures_util::future::join_all(answers).await;
        answers.into_iter().all(|old| old)
    })
    .await;
}

/// Whether this server counts: it is needed beside one that does, as the third is taken.
async fn old(client: &LockClient, name: &str) -> bool {
    let others = [LockClient::in_memory(), LockClient::in_memory()];
    let _taken = others[0].lock(name).acquire().await.unwrap();
    let clients = others.into_iter().chain([client.clone()]);
    let mut lock = QuorumLock::new(clients, name).lease(LEASE);
    let guard = lock.try_acquire().await;
    guard.is_ok_and(|guard| guard.is_some())
}

/// A client of each server, whether it runs or not.
async fn clients(servers: &[Server]) -> Vec<LockClient> {
    let urls: Vec<_> = servers.iter().map(Server::url).collect();
    clients_at(&urls, LEASE).await
}

async fn clients_at(urls: &[String], lease: Duration) -> Vec<LockClient> {
    let mut clients = Vec::new();
    for url in urls {
        let builder = LockClient::builder().url(url).lease(lease);
        clients.push(builder.lazy_connect(true).build().await.unwrap());
    }
    clients
}

fn quorum(clients: &[LockClient], name: &str) -> QuorumLock {
    QuorumLock::new(clients.iter().cloned(), name)
}

fn in_memory() -> Vec<LockClient> {
    (0..3).map(|_| LockClient::in_memory()).collect()
}

fn token(guard: &QuorumGuard) -> u64 {
    guard.token().unwrap().value()
}

async fn taken(clients: &[LockClient], name: &str) -> QuorumGuard {
    let taken = quorum(clients, name).acquire_timeout(LEASE + SOON).await;
    taken.unwrap_or_else(|error| panic!("{}", words(&error)))
}

/// The counters of a name run a day ahead of the clock from now on: what they say is memory.
async fn counters_ahead(servers: &[Server], name: &str) -> u64 {
    let now = std::time::SystemTime::now();
    let now = now.duration_since(std::time::UNIX_EPOCH).unwrap();
    let ahead = (now + Duration::from_hours(24)).as_micros();
    for server in servers {
        let key = token_key(name);
        server.cmd(&["SET", &key, &ahead.to_string()]).await.ok();
    }
    ahead.try_into().unwrap()
}

async fn on_all(guard: &QuorumGuard, servers: usize) {
    let what = format!("held by {servers} servers");
    eventually(LEASE + SOON, &what, async || guard.servers() == servers).await;
}

async fn all_clean(servers: &[Server], name: &str) {
    for server in servers {
        nothing_left(server, name).await;
    }
}

// ---- exclusion ----

#[tokio::test]
async fn a_majority_keeps_all_others_out() {
    let apart = old_servers().await;
    let (ours, theirs) = (clients(apart).await, clients(apart).await);
    let memory = in_memory();
    for (ours, theirs) in [(&ours, &theirs), (&memory, &memory)] {
        let name = unique_name();
        let guard = taken(ours, &name).await;
        assert!(guard.is_held() && guard.remaining() > Duration::ZERO);
        assert_eq!(guard.name(), name);
        assert!(quorum(theirs, &name).try_acquire().await.unwrap().is_none());
        let late = quorum(theirs, &name).acquire_timeout(ms(100)).await;
        assert!(matches!(late, Err(Error::TimedOut { .. })), "{late:?}");
        let before = token(&guard);
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
        let next = taken(theirs, &name).await;
        assert!(token(&next) > before);
        drop(next);
    }
}

/// Also those within one client, whose holds may pass from hand to hand, and those who use it as a plain lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_two_hold_and_tokens_rise_among_many() {
    let servers = old_servers().await;
    let name: Arc<str> = unique_name().into();
    let inside = Arc::new(AtomicBool::new(false));
    let last = Arc::new(AtomicU64::new(0));
    let shared = clients(servers).await;
    let done = Arc::new(AtomicBool::new(false));
    let mut plain = Vec::new();
    for _ in 0..3 {
        let (client, name, done) = (shared[0].clone(), Arc::clone(&name), Arc::clone(&done));
        plain.push(tokio::spawn(async move {
            while !done.load(Ordering::SeqCst) {
                drop(client.lock(Arc::clone(&name)).acquire().await.unwrap());
                tokio::time::sleep(ms(20)).await;
            }
        }));
    }
    let mut tasks = Vec::new();
    for task in 0..4 {
        let clients = if task < 2 {
            shared.clone()
        } else {
            clients(servers).await
        };
        let (inside, last) = (Arc::clone(&inside), Arc::clone(&last));
        let mut lock = quorum(&clients, &name);
        tasks.push(tokio::spawn(async move {
            for _ in 0..10 {
                let guard = lock.acquire().await.unwrap();
                assert!(!inside.swap(true, Ordering::SeqCst), "two hold it");
                let own = token(&guard);
                let before = last.swap(own, Ordering::SeqCst);
                assert!(own > before, "{own} after {before}");
                tokio::task::yield_now().await;
                inside.store(false, Ordering::SeqCst);
                assert!(guard.release().await.into_result().is_ok());
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    done.store(true, Ordering::SeqCst);
    for task in plain {
        task.await.unwrap();
    }
}

/// What one server has is a minority: it keeps nobody out.
#[tokio::test]
async fn a_minority_keeps_nobody_out_and_a_majority_does() {
    let clients = in_memory();
    let name = unique_name();
    let one = clients[0].lock(name.as_str()).acquire().await.unwrap();
    let guard = taken(&clients, &name).await;
    assert_eq!(guard.servers(), 2);
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    let two = clients[1].lock(name.as_str()).acquire().await.unwrap();
    assert!(
        quorum(&clients, &name)
            .try_acquire()
            .await
            .unwrap()
            .is_none()
    );
    drop((one, two));
    drop(taken(&clients, &name).await);
}

// ---- servers that fail ----

/// The median of some acquisitions, with their releases.
async fn usual_time(clients: &[LockClient]) -> Duration {
    let name = unique_name();
    let mut times = Vec::new();
    for _ in 0..21 {
        let start = Instant::now();
        let guard = taken(clients, &name).await;
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
        times.push(start.elapsed());
    }
    times.sort_unstable();
    times[times.len() / 2]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_or_frozen_server_is_not_waited_for() {
    let servers = three();
    grown_up(&servers).await;
    let clients = clients(&servers).await;
    let usual = usual_time(&clients).await;
    let ruler = Ruler::start();
    servers[0].stop();
    let frozen = usual_time(&clients).await;
    servers[0].kill();
    let dead = usual_time(&clients).await;
    // The command timeout, which would be waited for, is 333 ms.
    let allowed = usual * 3 + ms(20) + ruler.allowance();
    assert!(frozen < allowed, "{frozen:?} for {usual:?}");
    assert!(dead < allowed, "{dead:?} for {usual:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_majority_nothing_is_granted_and_the_error_says_why() {
    let servers = three();
    grown_up(&servers).await;
    let clients = clients(&servers).await;
    let name = unique_name();
    drop(taken(&clients, &name).await);
    servers[0].stop();
    servers[1].kill();
    for _ in 0..2 {
        let start = Instant::now();
        let error = quorum(&clients, &name).try_acquire().await.unwrap_err();
        assert!(
            matches!(
                error,
                Error::Unreachable { .. } | Error::Indeterminate { .. }
            ),
            "{error:?}"
        );
        assert!(start.elapsed() < SOON);
        let start = Instant::now();
        let error = quorum(&clients, &name).acquire_timeout(ms(600)).await;
        let error = error.unwrap_err();
        assert!(
            matches!(
                error,
                Error::Unreachable { .. } | Error::Indeterminate { .. }
            ),
            "{error:?}"
        );
        assert!(start.elapsed() < SOON);
        nothing_left(&servers[2], &name).await;
        servers[0].kill();
    }
    // Without a limit: one lease.
    let error = quorum(&clients, &name).acquire().await.unwrap_err();
    assert!(words(&error).contains("majority"), "{}", words(&error));
    nothing_left(&servers[2], &name).await;
}

/// Its grant comes late and is not for nobody: it becomes a member, and goes with the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_server_joins_late_and_is_released_with_the_others() {
    let servers = old_servers().await;
    let proxy = Proxy::start(servers[2].port());
    let urls = [servers[0].url(), servers[1].url(), proxy.url()];
    let clients = clients_at(&urls, LEASE).await;
    let name = unique_name();
    counters_ahead(&servers[..2], &name).await;
    let first = taken(&clients, &name).await;
    on_all(&first, 3).await;
    assert_eq!(first.release().await, ReleaseOutcome::Released);
    all_clean(servers, &name).await;
    proxy.inject(Fault::Delay {
        requests: ms(60),
        replies: ms(60),
    });
    let guard = taken(&clients, &name).await;
    assert_eq!(guard.servers(), 2);
    on_all(&guard, 3).await;
    let cli = servers[2].cli().await;
    let counter = cli.cmd(&["GET", &token_key(&name)]).await;
    assert_eq!(
        counter.text(),
        token(&guard).to_string(),
        "it knows the token"
    );
    drop(guard);
    all_clean(servers, &name).await;
    // Gone before the slow one has answered at all.
    drop(taken(&clients, &name).await);
    all_clean(servers, &name).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_replies_leave_nothing() {
    let servers = old_servers().await;
    let proxies = servers.each_ref().map(|server| Proxy::start(server.port()));
    let urls = proxies.each_ref().map(Proxy::url);
    let clients = clients_at(&urls, LEASE).await;
    let name = unique_name();
    drop(taken(&clients, &name).await);
    all_clean(servers, &name).await;
    for lost in 1..=3 {
        for nth in 1..=2 {
            let faults: Vec<_> = proxies[..lost]
                .iter()
                .map(|proxy| {
                    let act = Act::Swallow(Then::Discard);
                    let fault = Fault::reply(bytes(&name), act);
                    proxy.inject(fault.nth(nth))
                })
                .collect();
            let got = quorum(&clients, &name).acquire_timeout(LEASE + SOON).await;
            let guard = got.unwrap_or_else(|error| panic!("{lost} {nth}: {}", words(&error)));
            assert!(guard.is_held());
            for fault in &faults {
                let hit = tokio::time::timeout(SOON, fault.hit()).await;
                hit.unwrap_or_else(|_| panic!("{lost} {nth}"));
            }
            drop(guard);
            for proxy in &proxies {
                proxy.heal();
                proxy.cut(Then::Reset);
            }
            all_clean(servers, &name).await;
        }
    }
}

// ---- servers that forget ----

/// Ours, by a proxy for each: they can be cut off from a server without a sign.
async fn by_proxies(servers: &[Server; 3]) -> ([Proxy; 3], Vec<LockClient>) {
    let proxies = servers.each_ref().map(|server| Proxy::start(server.port()));
    let urls = proxies.each_ref().map(Proxy::url);
    let clients = clients_at(&urls, LEASE).await;
    (proxies, clients)
}

/// The holder does not hear of the restart, and goes on by its lease; the others find a majority free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_forgot_lets_no_second_holder_in() {
    let servers = three();
    grown_up(&servers).await;
    let (proxies, ours) = by_proxies(&servers).await;
    let theirs = clients(&servers).await;
    let name = unique_name();
    drop(taken(&theirs, &name).await);
    all_clean(&servers, &name).await;
    // Held by the first two only.
    proxies[2].refuse();
    proxies[2].cut(Then::Reset);
    let guard = taken(&ours, &name).await;
    assert_eq!(guard.servers(), 2);
    proxies[0].black_hole();
    servers[0].restart().await;
    assert!(guard.is_held(), "too late to be of use");
    let next = taken(&theirs, &name).await;
    assert!(!guard.is_held(), "two hold it");
    drop((guard, next));
}

/// The same for one who has just come: he knows what the servers tell.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_has_just_come_does_not_count_on_servers_that_forgot() {
    let servers = three();
    grown_up(&servers).await;
    let (proxies, ours) = by_proxies(&servers).await;
    let name = unique_name();
    let guard = taken(&ours, &name).await;
    on_all(&guard, 3).await;
    proxies.iter().for_each(Proxy::black_hole);
    servers[0].restart().await;
    servers[1].restart().await;
    assert!(guard.is_held(), "too late to be of use");
    let new = clients(&servers).await;
    let next = taken(&new, &name).await;
    assert!(!guard.is_held(), "two hold it");
    drop((guard, next));
}

/// The first start is no other: nobody knows what was before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_server_counts_after_one_longest_lease() {
    let servers = three();
    let started = Instant::now();
    let clients = clients(&servers).await;
    for client in &clients {
        next_one_enters(client, &unique_name(), SOON).await;
    }
    let name = unique_name();
    let error = quorum(&clients, &name).try_acquire().await.unwrap_err();
    assert!(
        words(&error).contains("started less than"),
        "{}",
        words(&error)
    );
    all_clean(&servers, &name).await;
    let guard = taken(&clients, &name).await;
    assert!(started.elapsed() + secs(1) >= LEASE);
    drop(guard);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_outlives_the_restart_of_any_one_server() {
    let servers = three();
    grown_up(&servers).await;
    let clients = clients(&servers).await;
    let name = unique_name();
    counters_ahead(&servers, &name).await;
    let guard = taken(&clients, &name).await;
    let lost = guard.lost();
    let own = token(&guard);
    for server in &servers {
        on_all(&guard, 3).await;
        server.restart().await;
        // It was held there before; so it counts before others may count on it.
        let cli = server.cli().await;
        eventually(SOON, "joined again", async || {
            cli.count(&name).await == Some(1)
        })
        .await;
        assert!(guard.is_held() && !lost.is_cancelled());
        on_all(&guard, 3).await;
        let counter = cli.cmd(&["GET", &token_key(&name)]).await;
        let counter: u64 = counter.text().parse().unwrap();
        assert!(counter >= own, "it does not know the token");
    }
    assert_eq!(token(&guard), own);
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    all_clean(&servers, &name).await;
}

/// By memory, not by clocks: the counters run a day ahead of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_rise_though_all_servers_forget_one_after_the_other() {
    let servers = three();
    let name = unique_name();
    let mut last = counters_ahead(&servers, &name).await;
    for server in servers.iter().cycle().take(6) {
        // New ones, who have seen no token.
        let clients = clients(&servers).await;
        let guard = taken(&clients, &name).await;
        let own = token(&guard);
        assert!(own > last, "{own} after {last}");
        last = own;
        on_all(&guard, 3).await;
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
        server.restart().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_rise_over_200_holds_while_servers_are_killed() {
    const SHORT: Duration = ms(500);
    let servers = three();
    let urls = servers.each_ref().map(Server::url);
    let name = unique_name();
    let mut last = 0;
    let mut clients = clients_at(&urls, SHORT).await;
    for turn in 0..200_usize {
        let kill = turn % 25 == 12;
        let victim = &servers[uuid::Uuid::new_v4().as_fields().0 as usize % 3];
        if kill {
            victim.kill();
        }
        let guard = taken(&clients, &name).await;
        let own = token(&guard);
        assert!(own > last, "{own} after {last}");
        last = own;
        if kill {
            victim.restart().await;
            clients = clients_at(&urls, SHORT).await;
        }
        drop(guard);
    }
}

// ---- loss ----

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_majority_is_told_before_the_lease_ends() {
    let servers = three();
    grown_up(&servers).await;
    let (ours, theirs) = (clients(&servers).await, clients(&servers).await);
    let name = unique_name();
    let guard = taken(&ours, &name).await;
    on_all(&guard, 3).await;
    let lost = guard.lost();
    let ruler = Ruler::start();
    servers[0].stop();
    servers[1].stop();
    let start = Instant::now();
    let work = guard.run(std::future::pending::<()>()).await;
    let told = start.elapsed();
    assert!(told < LEASE + ruler.taken(), "{told:?}");
    assert!(matches!(
        work,
        Err(Error::Lost {
            reason: LossReason::DeadlinePassed,
            ..
        })
    ));
    lost.cancelled().await;
    assert!(!guard.is_held() && guard.token().is_err() && guard.servers() == 0);
    assert_eq!(guard.remaining(), Duration::ZERO);
    assert_eq!(
        guard.release().await,
        ReleaseOutcome::Lost(LossReason::DeadlinePassed)
    );
    servers[0].cont();
    servers[1].cont();
    drop(taken(&theirs, &name).await);
    all_clean(&servers, &name).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_that_is_deleted_is_not_mended_and_most_of_them_are_a_loss() {
    let servers = old_servers().await;
    let clients = clients(servers).await;
    let name = unique_name();
    let guard = taken(&clients, &name).await;
    on_all(&guard, 3).await;
    let lost = guard.lost();
    servers[0].cmd(&["DEL", &name]).await;
    on_all(&guard, 2).await;
    // The subject is what does not happen in this time.
    tokio::time::sleep(LEASE / 2).await;
    assert!(guard.is_held() && guard.servers() == 2 && !lost.is_cancelled());
    servers[1].cmd(&["DEL", &name]).await;
    let told = tokio::time::timeout(LEASE + SOON, lost.cancelled()).await;
    told.expect("told");
    assert_eq!(guard.loss_reason(), Some(LossReason::KeyGone));
    // Nothing is kept of a lock that is lost.
    all_clean(servers, &name).await;
    drop(guard);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_under_a_lost_lock_is_an_error() {
    let clients = in_memory();
    let name = unique_name();
    let mut lock = quorum(&clients, &name);
    let value = lock.run(async |guard| Ok::<_, Error>(token(guard))).await;
    assert!(value.unwrap() > 0);
    let robbed = lock.run(async |guard| {
        on_all(guard, 3).await;
        for client in &clients[..2] {
            assert!(client.force_release(name.as_str()).await?);
        }
        std::future::pending::<Result<(), Error>>().await
    });
    let robbed = robbed.await;
    assert!(
        matches!(
            robbed,
            Err(Error::Lost {
                reason: LossReason::Forced,
                ..
            })
        ),
        "{robbed:?}"
    );
    drop(taken(&clients, &name).await);
}

/// One client more or less is a server more or less.
#[tokio::test]
async fn closing_one_client_costs_nothing_and_closing_most_is_a_loss() {
    let clients = in_memory();
    let name = unique_name();
    let guard = taken(&clients, &name).await;
    let lost = guard.lost();
    let _ = clients[0].close(Duration::ZERO).await;
    assert!(guard.is_held() && !lost.is_cancelled());
    drop(guard);
    let guard = taken(&clients, &name).await;
    assert_eq!(guard.servers(), 2);
    let lost = guard.lost();
    let _ = clients[1].close(Duration::ZERO).await;
    lost.cancelled().await;
    assert_eq!(guard.loss_reason(), Some(LossReason::ClientClosed));
    let error = quorum(&clients, &name).acquire().await.unwrap_err();
    assert!(matches!(error, Error::Closed), "{error:?}");
}

// ---- nothing left behind ----

#[test]
fn a_taking_dropped_at_any_poll_leaves_nothing() {
    turn_by_turn(async {
        let servers = old_servers().await;
        let clients = clients(servers).await;
        let prefix = unique_name();
        let mut polls = 0;
        loop {
            let name = format!("{prefix}-{polls}");
            let mut lock = quorum(&clients, &name);
            let done = polled(polls, lock.acquire()).await.is_some();
            // Nobody is kept out, on any server.
            for client in &clients {
                next_one_enters(client, &name, SOON).await;
            }
            if done {
                break;
            }
            polls = next(polls);
            assert!(polls < 20_000);
        }
        assert!(polls > 3);
        for server in servers {
            nothing_goes_on(server, &prefix, LEASE).await;
        }
    });
}

#[test]
fn a_wait_or_release_dropped_at_any_poll_leaves_nothing() {
    turn_by_turn(async {
        let servers = old_servers().await;
        let (ours, theirs) = (clients(servers).await, clients(servers).await);
        let prefix = unique_name();
        let mut polls = 0;
        while polls < 300 {
            let name = format!("{prefix}-{polls}");
            let guard = taken(&theirs, &name).await;
            assert!(
                polled(polls, quorum(&ours, &name).acquire())
                    .await
                    .is_none()
            );
            let _ = polled(polls, guard.release()).await;
            for client in &ours {
                next_one_enters(client, &name, SOON).await;
            }
            polls = next(polls);
        }
        for server in servers {
            nothing_goes_on(server, &prefix, LEASE).await;
        }
    });
}

#[tokio::test]
async fn a_dropped_guard_releases_everywhere() {
    let servers = old_servers().await;
    let clients = clients(servers).await;
    let name = unique_name();
    let guard = taken(&clients, &name).await;
    on_all(&guard, 3).await;
    let lost = guard.lost();
    // On a thread that no runtime knows.
    std::thread::spawn(move || drop(guard)).join().unwrap();
    all_clean(servers, &name).await;
    assert!(!lost.is_cancelled());
}

// ---- bad input ----

#[tokio::test]
async fn what_cannot_work_is_refused_and_leaves_nothing() {
    let servers = old_servers().await;
    let good = clients(servers).await;
    let name = unique_name();
    let twice = [good[0].clone(), good[1].clone(), good[1].clone()];
    // Two clients of one server, by other names and databases.
    let again = format!("redis://localhost:{}/1", servers[0].port());
    let again = client_of(&again, LEASE).await;
    let same = [good[0].clone(), good[1].clone(), again];
    let all = || good.iter().cloned();
    for (what, mut lock) in [
        ("none", QuorumLock::new([], name.as_str())),
        ("two", QuorumLock::new(good[..2].to_vec(), name.as_str())),
        ("a client twice", QuorumLock::new(twice, name.as_str())),
        ("a server twice", QuorumLock::new(same, name.as_str())),
        ("no name", QuorumLock::new(all(), "")),
        ("short", QuorumLock::new(all(), name.as_str()).lease(ms(1))),
        (
            "longer",
            QuorumLock::new(all(), name.as_str()).longest_lease(LEASE / 2),
        ),
    ] {
        let error = lock.acquire().await.unwrap_err();
        assert!(matches!(error, Error::Config { .. }), "{what}: {error:?}");
        let error = lock.try_acquire().await.unwrap_err();
        assert!(matches!(error, Error::Config { .. }), "{what}: {error:?}");
        all_clean(servers, &name).await;
    }
    // Five, and an even number, are fine.
    for n in [4, 5] {
        let clients: Vec<_> = (0..n).map(|_| LockClient::in_memory()).collect();
        drop(taken(&clients, &name).await);
    }
}

#[tokio::test]
async fn a_key_in_other_use_on_most_servers_is_a_conflict() {
    let servers = old_servers().await;
    let clients = clients(servers).await;
    let name = unique_name();
    servers[0].cmd(&["SET", &name, "theirs"]).await.ok();
    let guard = taken(&clients, &name).await;
    assert_eq!(guard.servers(), 2);
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    servers[1].cmd(&["SET", &name, "theirs"]).await.ok();
    let error = quorum(&clients, &name).acquire().await.unwrap_err();
    assert!(matches!(error, Error::Conflict { .. }), "{error:?}");
    for server in &servers[..2] {
        assert_eq!(server.cmd(&["GET", &name]).await.text(), "theirs");
        server.cmd(&["DEL", &name]).await;
    }
    all_clean(servers, &name).await;
}
