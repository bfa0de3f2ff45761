//! What the server itself does wrong: forgets its scripts or its memory, is demoted, refuses writes,
//! evicts keys, fails over, or permits too little.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use leasehold::{Error, LockClient, LockClientBuilder, LossReason, ReleaseOutcome};

use crate::common::server::free_port;
use crate::common::*;
use crate::support::{client_of, connected, words};

fn builder(server: &Server, lease: u64) -> LockClientBuilder {
    LockClient::builder()
        .url(server.url())
        .lease(ms(lease))
        .connect_timeout(secs(5))
}

async fn client(server: &Server, lease: u64) -> LockClient {
    builder(server, lease).build().await.unwrap()
}

/// Asserts that a lock cannot be taken now, because of what the server says, and that the error
/// says the same.
async fn refused_for(client: &LockClient, reason: &str) {
    let name = unique_name();
    let result = client.lock(name).try_acquire().await;
    match result {
        Err(error @ Error::Unreachable { .. }) => {
            assert!(words(&error).contains(reason), "{}", words(&error));
            assert!(error.is_retryable());
        }
        other => panic!("{reason}: {other:?}"),
    }
}

async fn set(server: &Server, setting: &str, value: &str) {
    server.cmd(&["CONFIG", "SET", setting, value]).await.ok();
}

// ---- scripts ----

/// B62: a server forgets its scripts on restart, failover or somebody's SCRIPT FLUSH.
#[tokio::test]
async fn scripts_forgotten_before_each_step_go_unnoticed() {
    let server = Server::start();
    let cli = server.cli().await;
    let flush = async || drop(cli.cmd(&["SCRIPT", "FLUSH"]).await.ok());
    let name = unique_name();
    let client = client(&server, 30_000).await;
    let mut ctx = client.context();
    flush().await;
    let outer = ctx.lock(name.as_str()).acquire().await.unwrap();
    flush().await;
    let inner = ctx.lock(name.as_str()).acquire().await.unwrap();
    flush().await;
    outer.confirm().await.unwrap();
    flush().await;
    outer.extend(secs(40)).await.unwrap();
    assert!(cli.pttl(&name).await > 30_000);
    flush().await;
    assert_eq!(
        inner.release().await,
        ReleaseOutcome::StillHeld { depth: 1 }
    );
    flush().await;
    let busy = client.lock(name.as_str()).try_acquire().await.unwrap();
    assert!(busy.is_none());
    flush().await;
    assert_eq!(outer.release().await, ReleaseOutcome::Released);
    let forced = client.lock(name.as_str()).acquire().await.unwrap();
    flush().await;
    assert!(client.force_release(name.as_str()).await.unwrap());
    assert_eq!(
        forced.release().await,
        ReleaseOutcome::Lost(LossReason::Forced)
    );
    nothing_left(&server, &name).await;
}

/// B62: under load, a call can find the script gone at any moment, also between two of its tries.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_forgotten_every_5_ms_under_load_go_unnoticed() {
    let server = Server::start();
    let cli = server.cli().await;
    let client = client(&server, 30_000).await;
    let end = Instant::now() + scaled(ms(1500), secs(30));
    let kept = client.lock(unique_name()).acquire().await.unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let (client, over) = (client.clone(), Arc::clone(&over));
            tokio::spawn(async move {
                let name = unique_name();
                while !over.load(Ordering::Relaxed) {
                    let guard = client.lock(name.as_str()).acquire().await.unwrap();
                    assert_eq!(guard.release().await, ReleaseOutcome::Released);
                }
                name
            })
        })
        .collect();
    let mut flushes = 0;
    // A busy machine takes longer for as many.
    while Instant::now() < end || flushes < 20 {
        cli.cmd(&["SCRIPT", "FLUSH"]).await.ok();
        flushes += 1;
        // The rhythm of the fault is the subject.
        tokio::time::sleep(ms(5)).await;
        kept.confirm().await.unwrap();
    }
    over.store(true, Ordering::Relaxed);
    for task in tasks {
        nothing_left(&server, &task.await.unwrap()).await;
    }
    assert_eq!(kept.release().await, ReleaseOutcome::Released);
}

// ---- memory that is lost ----

/// B66: a server that comes back empty has no locks; the holder asks as soon as it is connected again,
/// long before a renewal is due, and does not make the lock again. A fixed lease, never renewed, is
/// asked for as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_restart_is_told_at_the_reconnection_and_nothing_is_made_again() {
    let server = Server::start();
    let (name, taken) = (unique_name(), unique_name());
    let (first, second) = (client(&server, 30_000).await, client(&server, 30_000).await);
    let free = first.lock(name.as_str()).acquire().await.unwrap();
    let mut fixed = first.lock(format!("fixed-{name}")).lease(secs(30));
    let fixed = fixed.acquire().await.unwrap();
    let contested = first.lock(taken.as_str()).acquire().await.unwrap();
    server.restart().await;
    let (restarted, ruler) = (Instant::now(), Ruler::start());
    let next = second
        .lock(taken.as_str())
        .acquire_timeout(secs(5))
        .await
        .unwrap();
    tokio::time::timeout(secs(9), free.lost().cancelled())
        .await
        .unwrap();
    for lost in [contested.lost(), fixed.lost()] {
        tokio::time::timeout(secs(9), lost.cancelled())
            .await
            .unwrap();
    }
    // A third of the lease would be ten seconds.
    let took = restarted.elapsed();
    assert!(took < secs(3) + ruler.allowance(), "{took:?}");
    assert_eq!(free.loss_reason(), Some(LossReason::KeyGone));
    assert_eq!(fixed.loss_reason(), Some(LossReason::KeyGone));
    // It may have asked before the other came.
    let reason = contested.loss_reason().unwrap();
    assert!(
        matches!(reason, LossReason::KeyGone | LossReason::TakenByOther),
        "{reason:?}"
    );
    let cli = server.cli().await;
    assert!(!cli.exists(&name).await, "made again");
    assert_eq!(contested.release().await, ReleaseOutcome::Lost(reason));
    assert_eq!(
        free.release().await,
        ReleaseOutcome::Lost(LossReason::KeyGone)
    );
    assert!(!cli.exists(&name).await, "made again");
    next.confirm().await.unwrap();
    assert_eq!(next.release().await, ReleaseOutcome::Released);
    nothing_left(&server, &taken).await;
}

// ---- servers that refuse ----

/// B67: a demoted server says READONLY; nobody may take that for "taken" or for success, and the
/// hold goes on when the server is promoted again within the lease.
#[tokio::test]
async fn demoted_server_is_a_typed_error_until_it_is_promoted() {
    let server = Server::start();
    let client = client(&server, 6000).await;
    let name = unique_name();
    let held = client.lock(name.as_str()).acquire().await.unwrap();
    server.cmd(&["REPLICAOF", "127.0.0.1", "1"]).await.ok();
    refused_for(&client, "READONLY").await;
    assert!(held.confirm().await.is_err());
    assert!(held.is_held(), "an error is not a loss");
    let patient = unique_name();
    let mut patient_lock = client.lock(patient.as_str());
    let waiting = tokio::spawn(async move { patient_lock.acquire_timeout(secs(5)).await });
    server.cmd(&["REPLICAOF", "NO", "ONE"]).await.ok();
    let granted = waiting.await.unwrap().unwrap();
    eventually(secs(2), "held again", async || held.confirm().await.is_ok()).await;
    assert_eq!(held.release().await, ReleaseOutcome::Released);
    assert_eq!(granted.release().await, ReleaseOutcome::Released);
    nothing_left(&server, &name).await;
    nothing_left(&server, &patient).await;
}

/// B67: a demoted server for longer than the lease: lost by the holder's own clock.
#[tokio::test]
async fn demoted_for_longer_than_the_lease_is_lost_in_time() {
    let server = Server::start();
    let client = client(&server, 1500).await;
    let held = client.lock(unique_name()).acquire().await.unwrap();
    server.cmd(&["REPLICAOF", "127.0.0.1", "1"]).await.ok();
    let (demoted, ruler) = (Instant::now(), Ruler::start());
    held.lost().cancelled().await;
    let took = demoted.elapsed();
    assert!(took < ms(1600) + ruler.allowance(), "{took:?}");
    assert_eq!(held.loss_reason(), Some(LossReason::DeadlinePassed));
}

/// B67: `min-replicas-to-write` refuses every write, releases too: those are repeated until they go
/// through.
#[tokio::test]
async fn too_few_replicas_is_a_typed_error_and_the_release_follows() {
    let server = Server::start();
    let client = client(&server, 6000).await;
    let name = unique_name();
    let held = client.lock(name.as_str()).acquire().await.unwrap();
    set(&server, "min-replicas-to-write", "1").await;
    refused_for(&client, "NOREPLICAS").await;
    let outcome = held.release().await;
    assert!(
        matches!(outcome, ReleaseOutcome::Unconfirmed { at_most } if at_most <= secs(6)),
        "{outcome:?}"
    );
    set(&server, "min-replicas-to-write", "0").await;
    nothing_left(&server, &name).await;
}

/// B67: a server that cannot save refuses writes (MISCONF).
#[tokio::test]
async fn failed_save_is_a_typed_error_until_it_is_mended() {
    let server = Server::start();
    let client = client(&server, 15_000).await;
    let name = unique_name();
    let held = client.lock(name.as_str()).acquire().await.unwrap();
    set(&server, "save", "3600 1").await;
    // A folder in the place of the file: cannot be replaced, not even by root.
    let dump = server.dir().join("dump.rdb");
    drop(std::fs::remove_file(&dump));
    std::fs::create_dir(&dump).unwrap();
    let cli = server.cli().await;
    let save_status = async |wanted: &str| {
        eventually(secs(5), wanted, async || {
            let info = cli.cmd(&["INFO", "persistence"]).await.text();
            info.contains(&format!("rdb_last_bgsave_status:{wanted}"))
                && info.contains("rdb_bgsave_in_progress:0")
        })
        .await;
    };
    cli.cmd(&["BGSAVE"]).await.ok();
    save_status("err").await;
    refused_for(&client, "MISCONF").await;
    std::fs::remove_dir(&dump).unwrap();
    cli.cmd(&["BGSAVE"]).await.ok();
    save_status("ok").await;
    eventually(secs(2), "works again", async || {
        held.confirm().await.is_ok()
    })
    .await;
    assert_eq!(held.release().await, ReleaseOutcome::Released);
    nothing_left(&server, &name).await;
}

/// B67: a server that comes back with its memory is silent or says LOADING for a while: the hold
/// outlives that, and callers get in.
#[tokio::test]
async fn loading_after_a_restart_is_waited_out() {
    // While it loads, a server looks at its clients once in two megabytes.
    let server = Server::start_with(&["--key-load-delay", "3000", "--rdbcompression", "no"]);
    let cli = server.cli().await;
    let filler = "x".repeat(16_000);
    for i in 0..600 {
        cli.cmd(&["SET", &format!("filler:{i}"), &filler])
            .await
            .ok();
    }
    let client = client(&server, 15_000).await;
    let name = unique_name();
    let held = client.lock(name.as_str()).acquire().await.unwrap();
    server.restart_keeping().await;
    let loading = server.cmd(&["PING"]).await;
    assert!(loading.is_error(), "the server was too fast: {loading:?}");
    let other = unique_name();
    let granted = client
        .lock(other.as_str())
        .acquire_timeout(secs(10))
        .await
        .unwrap();
    held.confirm().await.unwrap();
    assert_eq!(granted.release().await, ReleaseOutcome::Released);
    assert_eq!(held.release().await, ReleaseOutcome::Released);
    nothing_left(&server, &name).await;
    nothing_left(&server, &other).await;
}

// ---- memory that is full ----

/// B70: with `maxmemory` reached, what there is can be renewed and released, at any depth; only new
/// holds are refused, by a type of their own.
#[tokio::test]
async fn full_server_renews_and_releases_and_refuses_new_holds() {
    let server = Server::start();
    let client = client(&server, 2000).await;
    let (one, two) = (unique_name(), unique_name());
    let single = client.lock(one.as_str()).acquire().await.unwrap();
    let mut ctx = client.context();
    let outer = ctx.lock(two.as_str()).acquire().await.unwrap();
    let inner = ctx.lock(two.as_str()).acquire().await.unwrap();
    set(&server, "maxmemory", "1").await;
    let full = client.lock(unique_name()).acquire().await;
    let Err(error @ Error::OutOfMemory { .. }) = full else {
        panic!("{full:?}");
    };
    assert!(error.is_retryable() && words(&error).contains("OOM"));
    // Another level of a hold there is: refused as well, and the hold is as it was.
    let third = ctx.lock(two.as_str()).acquire().await;
    assert!(matches!(third, Err(Error::OutOfMemory { .. })), "{third:?}");
    assert_eq!(outer.depth(), 2);
    single.confirm().await.unwrap();
    // Longer than the lease: the watchdog's renewals are let through too.
    tokio::time::sleep(ms(2400)).await;
    assert!(single.is_held() && outer.is_held());
    assert_eq!(
        inner.release().await,
        ReleaseOutcome::StillHeld { depth: 1 }
    );
    outer.confirm().await.unwrap();
    assert_eq!(outer.release().await, ReleaseOutcome::Released);
    assert_eq!(single.release().await, ReleaseOutcome::Released);
    nothing_left(&server, &one).await;
    nothing_left(&server, &two).await;
}

/// B71: an evicted lock is lost: told by the next renewal, not made again; and the policy was warned
/// of.
#[tokio::test]
async fn evicted_lock_is_lost_and_the_policy_was_warned_of() {
    let log = Log::start();
    let server = Server::start_with(&["--maxmemory-policy", "volatile-lru"]);
    let client = client(&server, 2000).await;
    drop(client.lock(unique_name()).acquire().await.unwrap());
    let name = unique_name();
    let held = client.lock(name.as_str()).acquire().await.unwrap();
    let cli = server.cli().await;
    set(&server, "maxmemory", "1").await;
    cli.cmd(&["SET", "something", "else"]).await;
    assert!(!cli.exists(&name).await, "not evicted");
    let (evicted, ruler) = (Instant::now(), Ruler::start());
    held.lost().cancelled().await;
    let took = evicted.elapsed();
    assert!(took < ms(1200) + ruler.allowance(), "{took:?}");
    assert_eq!(held.loss_reason(), Some(LossReason::KeyGone));
    assert_eq!(
        held.release().await,
        ReleaseOutcome::Lost(LossReason::KeyGone)
    );
    assert!(!cli.exists(&name).await, "made again");
    // Once, also when connected anew.
    cli.cmd(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"])
        .await
        .ok();
    eventually(secs(2), "connected anew", async || {
        client.inspect(name.as_str()).await.is_ok()
    })
    .await;
    assert_eq!(log.count(&["WARN", "maxmemory-policy", "volatile-lru"]), 1);
}

#[tokio::test]
async fn a_server_that_evicts_nothing_is_not_warned_of() {
    let log = Log::start();
    let server = Server::start();
    client(&server, 900).await;
    assert_eq!(log.count(&["maxmemory-policy"]), 0);
    assert!(log.count(&["connected"]) > 0, "the log works");
}

// ---- replicas and failover ----

async fn replica_of(primary: &Server) -> Server {
    let replica = Server::start_with(&["--replicaof", "127.0.0.1", &primary.port().to_string()]);
    linked(&replica, "up").await;
    replica
}

async fn linked(replica: &Server, status: &str) {
    let cli = replica.cli().await;
    eventually(secs(10), status, async || {
        let info = cli.cmd(&["INFO", "replication"]).await.text();
        info.contains(&format!("master_link_status:{status}"))
    })
    .await;
}

/// Cuts the replica off for good: it cannot log in any more, while those who are connected stay.
async fn cut_off(primary: &Server, replica: &Server) {
    let cli = primary.cli().await;
    cli.cmd(&["CONFIG", "SET", "requirepass", "pw"]).await.ok();
    let killed = cli.cmd(&["CLIENT", "KILL", "TYPE", "replica"]).await;
    assert_eq!(killed.int(), 1);
    linked(replica, "down").await;
}

/// Lets the replica back in.
async fn let_in(primary: &Server, replica: &Server) {
    replica
        .cmd(&["CONFIG", "SET", "masterauth", "pw"])
        .await
        .ok();
    linked(replica, "up").await;
    assert!(primary.port() != replica.port());
}

/// A Sentinel that takes the primary for dead after 300 ms; dropped, it is killed.
struct Sentinel {
    port: u16,
    _dir: tempfile::TempDir,
    _process: Worker,
}

impl Sentinel {
    async fn start(primary: &Server) -> Self {
        let (dir, port) = (tempfile::tempdir().unwrap(), free_port());
        let config = dir.path().join("sentinel.conf");
        let text = format!(
            "port {port}\nbind 127.0.0.1\nlogfile /dev/null\ndir {}\n\
             sentinel monitor main 127.0.0.1 {} 1\n\
             sentinel down-after-milliseconds main 300\n\
             sentinel failover-timeout main 3000\n",
            dir.path().display(),
            primary.port()
        );
        std::fs::write(&config, text).unwrap();
        let binary =
            std::env::var_os("LEASEHOLD_REDIS_SERVER").unwrap_or_else(|| "redis-server".into());
        let args = [config.to_str().unwrap(), "--sentinel"];
        let process = Worker::spawn_program(binary.as_ref(), &args, &[]);
        eventually(secs(15), "the Sentinel knows the replica", async || {
            let Ok(stream) = tokio::net::TcpStream::connect(("127.0.0.1", port)).await else {
                return false;
            };
            drop(stream);
            let cli = Cli::connect(port).await;
            let replicas = cli.cmd(&["SENTINEL", "REPLICAS", "main"]).await;
            !replicas.is_error() && !replicas.list().is_empty()
        })
        .await;
        Self {
            port,
            _dir: dir,
            _process: process,
        }
    }

    fn url(&self) -> String {
        format!(
            "redis-sentinel://127.0.0.1:{}?sentinelServiceName=main",
            self.port
        )
    }
}

/// A server whose replicas are synchronised at once.
fn primary() -> Server {
    Server::start_with(&["--repl-diskless-sync-delay", "0"])
}

/// B65: the primary dies before a hold has reached the replica that is promoted. The lock is granted
/// again, which no setting can rule out: the first holder is told, and the tokens tell the two apart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_forgotten_by_a_failover_is_lost_and_the_next_token_is_greater() {
    let primary = primary();
    let replica = replica_of(&primary).await;
    let sentinel = Sentinel::start(&primary).await;
    let url = sentinel.url();
    let connect = || client_of(&url, secs(6));
    let (first, second) = (connect().await, connect().await);
    let name = unique_name();
    cut_off(&primary, &replica).await;
    let held = first.lock(name.as_str()).acquire().await.unwrap();
    let old = held.fencing_token().unwrap();
    assert!(!replica.cli().await.exists(&name).await);
    primary.kill();
    let again = tokio::time::timeout(secs(20), async {
        loop {
            match second.lock(name.as_str()).acquire().await {
                Ok(guard) => return guard,
                Err(error) => assert!(error.is_retryable(), "{error:?}"),
            }
        }
    })
    .await
    .unwrap();
    assert!(again.fencing_token().unwrap() > old);
    tokio::time::timeout(secs(10), held.lost().cancelled())
        .await
        .unwrap();
    assert!(matches!(
        held.loss_reason(),
        Some(LossReason::KeyGone | LossReason::TakenByOther | LossReason::DeadlinePassed)
    ));
    let _ = held.release().await;
    again.confirm().await.unwrap();
    assert_eq!(again.release().await, ReleaseOutcome::Released);
    nothing_left(&replica, &name).await;
}

/// B65: with `replica_acks`, a hold that the replica does not have is not told to anybody, and not
/// left behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_without_enough_replicas_is_undone() {
    let primary = primary();
    let replica = replica_of(&primary).await;
    let client = builder(&primary, 4500)
        .replica_acks(1)
        .build()
        .await
        .unwrap();
    let name = unique_name();
    let held = client.lock(name.as_str()).acquire().await.unwrap();
    assert!(
        replica.cli().await.exists(&name).await,
        "acknowledged means that it is there"
    );
    assert_eq!(held.release().await, ReleaseOutcome::Released);

    let kept_name = unique_name();
    let kept = client.lock(kept_name.as_str()).acquire().await.unwrap();
    // Both of our connections stay, as they are logged in already.
    cut_off(&primary, &replica).await;
    let cli = Cli::connect(primary.port()).await;
    cli.cmd(&["AUTH", "pw"]).await.ok();
    for budget in [ms(0), ms(700)] {
        let (started, ruler) = (Instant::now(), Ruler::start());
        let alone = client.lock(name.as_str()).acquire_timeout(budget).await;
        let Err(error @ Error::Indeterminate { .. }) = alone else {
            panic!("{alone:?}");
        };
        let words = words(&error);
        assert!(words.contains("0 of 1 replicas acknowledged"), "{words}");
        let took = started.elapsed();
        assert!(took < budget + ms(1500) + ruler.allowance(), "{took:?}");
        eventually(secs(2), "undone", async || !cli.exists(&name).await).await;
    }
    // What is held goes on being renewed between all the waiting.
    let mut lock = client.lock(name.as_str());
    let waiting = tokio::spawn(async move {
        loop {
            match lock.acquire_timeout(secs(5)).await {
                Ok(guard) => return guard,
                Err(error) => assert!(error.is_retryable(), "{error:?}"),
            }
        }
    });
    // Longer than the lease, which is the subject.
    tokio::time::sleep(ms(5000)).await;
    assert!(kept.is_held());
    let_in(&primary, &replica).await;
    let granted = waiting.await.unwrap();
    assert_eq!(granted.release().await, ReleaseOutcome::Released);
    assert_eq!(kept.release().await, ReleaseOutcome::Released);
    eventually(secs(2), "all released", async || {
        !cli.exists(&name).await && !cli.exists(&kept_name).await
    })
    .await;
}

/// B65: one attempt whose reply is lost is repeated over another connection; the replica must have
/// been asked about this hold there, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copy_of_a_grant_over_another_connection_waits_for_the_replica_again() {
    let primary = primary();
    let replica = replica_of(&primary).await;
    let proxy = Proxy::start(primary.port());
    let client = connected(|| {
        let builder = LockClient::builder().url(proxy.url()).lease(secs(6));
        builder.replica_acks(1)
    })
    .await;
    let warm = client.lock(unique_name()).acquire().await.unwrap();
    assert_eq!(warm.release().await, ReleaseOutcome::Released);
    let name = unique_name();
    // From here on the replica is connected, and hears nothing: it is frozen.
    replica.stop();
    let lost = proxy.inject(Fault::reply(bytes(&name), Act::Swallow(Then::Close)));
    let mut lock = client.lock(name.as_str());
    let waiting = tokio::spawn(async move { lock.acquire_timeout(secs(8)).await });
    lost.hit().await;
    let cli = primary.cli().await;
    // A second run of the script has been answered, and then its WAIT was asked for.
    eventually(secs(5), "asked again", async || {
        proxy.count(&bytes(&name)) >= 2 && proxy.count(&command("WAIT")) > 3
    })
    .await;
    assert!(!waiting.is_finished(), "believed without the replica");
    replica.cont();
    let granted = waiting.await.unwrap().unwrap();
    assert!(replica.cli().await.exists(&name).await);
    assert_eq!(granted.release().await, ReleaseOutcome::Released);
    assert_eq!(cli.count(&name).await, None);
    nothing_left(&primary, &name).await;
}

/// A user without `WAIT` hears so when connecting, not an hour later.
#[tokio::test]
async fn replica_acks_without_the_permission_is_refused_at_connecting() {
    let server = Server::start();
    server
        .cmd(&[
            "ACL", "SETUSER", "app", "reset", "on", ">pw", "~*", "&*", "+@all", "-wait",
        ])
        .await
        .ok();
    let url = format!("redis://app:pw@127.0.0.1:{}", server.port());
    let result = LockClient::builder().url(url).replica_acks(1).build().await;
    match result {
        Err(error @ Error::Denied { .. }) => {
            assert!(words(&error).contains("+wait"), "{}", words(&error));
        }
        other => panic!("{other:?}"),
    }
}
