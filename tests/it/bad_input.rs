//! What cannot work is refused with an error of its type: ours before anything is sent, the server's
//! in its own words, and nothing is lost by it.

use std::net::SocketAddr;
use std::time::Duration;

use leasehold::{Error, KeyScheme, LockClient, LockContext, ReleaseOutcome};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::common::*;

async fn client(server: &Server) -> LockClient {
    crate::support::client_of(&server.url(), secs(30)).await
}

/// The messages of an error and of all that caused it, and their `Debug`.
fn words(error: &Error) -> String {
    let mut words = format!("{error} {error:?}");
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        words = format!("{words}: {cause} {cause:?}");
        source = cause.source();
    }
    words
}

fn problem<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    match result {
        Err(error @ Error::Config { .. }) => {
            assert!(!error.is_retryable());
            error.to_string()
        }
        other => panic!("a `Config` error was expected, not {other:?}"),
    }
}

const BAD_LEASES: [Duration; 8] = [
    Duration::ZERO,
    Duration::from_nanos(1),
    Duration::from_micros(400),
    Duration::from_millis(1),
    Duration::from_millis(99),
    Duration::from_micros(200_500),
    Duration::from_millis(365 * 24 * 3_600_000 + 1),
    Duration::MAX,
];

/// B75: a lease that is zero, negative when cut to milliseconds, or too long for the server would
/// delete the key at once or leave it for ever. Refused before anything is sent.
#[tokio::test]
async fn bad_leases_are_refused_before_anything_is_sent() {
    let server = Server::start();
    let client = client(&server).await;
    let mut monitor = server.monitor().await;
    for bad in BAD_LEASES {
        let name = unique_name();
        let mut ctx = client.context();
        let mut lock = ctx.lock(name.as_str()).lease(bad);
        assert!(problem(lock.acquire().await).contains("lease"), "{bad:?}");
        problem(lock.try_acquire().await);
        problem(lock.acquire_timeout(secs(1)).await);
        let run = lock.run(async |_| Ok::<_, Error>(())).await;
        problem(run);
        let mut lock = ctx.lock(name.as_str()).max_hold(bad);
        assert!(
            problem(lock.acquire().await).contains("max_hold"),
            "{bad:?}"
        );
        let builder = || LockClient::builder().url(server.url());
        problem(builder().lease(bad).build().await);
        problem(builder().max_hold(bad).build().await);
    }
    assert_eq!(monitor.count(|line| line.contains("EVAL")).await, 0);
    let guard = client.lock(unique_name()).acquire().await.unwrap();
    for bad in BAD_LEASES {
        problem(guard.extend(bad).await);
    }
    assert!(guard.is_held());
    // The limits themselves are good.
    for good in [ms(100), Duration::from_hours(365 * 24)] {
        let guard = client.lock(unique_name()).lease(good).acquire().await;
        guard.unwrap().release().await.into_result().unwrap();
    }
}

/// B75: a bad lease in the middle of a flow of work costs the holder nothing.
#[tokio::test]
async fn bad_settings_of_a_nested_lock_leave_the_hold_as_it_was() {
    let server = server();
    let name = unique_name();
    let client = client(server).await;
    let mut ctx: LockContext = client.context();
    let guard = ctx.lock(name.as_str()).acquire().await.unwrap();
    problem(
        ctx.lock(name.as_str())
            .lease(Duration::ZERO)
            .acquire()
            .await,
    );
    problem(ctx.lock(name.as_str()).max_hold(ms(1)).try_acquire().await);
    assert_eq!(guard.depth(), 1);
    assert_eq!(server.cli().await.count(&name).await, Some(1));
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    nothing_left(server, &name).await;
}

/// B75: other settings that cannot work, before a connection is made.
#[tokio::test]
async fn bad_settings_of_a_client_are_refused() {
    // Nobody listens there: what is refused for its settings is not tried.
    let builder = || LockClient::builder().url("redis://127.0.0.1:1");
    problem(LockClient::builder().build().await);
    problem(builder().command_timeout(Duration::ZERO).build().await);
    problem(builder().command_timeout(secs(11)).build().await);
    problem(builder().command_timeout(Duration::MAX).build().await);
    problem(builder().connect_timeout(Duration::ZERO).build().await);
    problem(builder().token_retention(Some(Duration::MAX)).build().await);
    for prefix in ["", "a{b", "a}b", &"x".repeat(257)] {
        let scheme = KeyScheme::Prefix(prefix.to_owned());
        problem(builder().key_scheme(scheme).build().await);
    }
    let fine = builder().build().await;
    assert!(matches!(fine, Err(Error::Unreachable { .. })), "{fine:?}");
}

/// B75: waits without end, or so long that the sum overflows, are waits.
#[tokio::test]
async fn endless_waits_do_not_overflow() {
    let server = server();
    let name = unique_name();
    let client = client(server).await;
    let guard = client
        .lock(name.as_str())
        .acquire_timeout(Duration::MAX)
        .await;
    let mut second = client.lock(name.as_str());
    let waiting = tokio::spawn(async move { second.acquire_timeout(Duration::MAX).await });
    server.cli().await.until_waiters(&name, 1).await;
    drop(guard.unwrap());
    drop(waiting.await.unwrap().unwrap());
    nothing_left(server, &name).await;
}

/// Names have 1 to 65 536 bytes; within that any bytes that are UTF-8, in both key schemes.
#[tokio::test]
async fn bad_names_are_refused_and_odd_ones_work() {
    let server = Server::start();
    let plain = client(&server).await;
    let prefixed = LockClient::builder()
        .url(server.url())
        .key_scheme(KeyScheme::Prefix("app".into()))
        .build()
        .await
        .unwrap();
    for client in [&plain, &prefixed] {
        for bad in [String::new(), "x".repeat(64 * 1024 + 1)] {
            problem(client.lock(bad.as_str()).acquire().await);
            problem(client.inspect(bad.as_str()).await);
            problem(client.force_release(bad.as_str()).await);
        }
        let long = "x".repeat(64 * 1024);
        for name in [
            "}",
            "{}",
            "{",
            "a}b",
            "a{b}c",
            "{}x",
            "a b\r\n",
            "\0",
            "%7B",
            "ä€😀",
            "*?[",
            &long,
        ] {
            let guard = client.lock(name).acquire().await.unwrap();
            let busy = client.lock(name).try_acquire().await.unwrap();
            assert!(busy.is_none(), "{name:?}");
            let waiter = client.clone();
            let mut lock = waiter.lock(name);
            let waiting = tokio::spawn(async move { lock.acquire().await });
            // The server tells of a waiter, hence knows its channel.
            eventually(secs(5), "waits", async || {
                client.inspect(name).await.unwrap().waiting == Some(1)
            })
            .await;
            assert_eq!(guard.release().await, ReleaseOutcome::Released);
            let granted = waiting.await.unwrap().unwrap();
            assert_eq!(granted.release().await, ReleaseOutcome::Released);
        }
    }
    // Not one key but token counters, in whichever scheme, and the infos of the clients.
    let cli = server.cli().await;
    let keys = cli.keys_with("").await;
    let left: Vec<_> = keys
        .iter()
        .filter(|key| {
            !key.contains("token:")
                && !key.starts_with("leasehold_client:")
                && !key.starts_with("app:client:")
        })
        .collect();
    assert!(left.is_empty(), "{left:?}");
    for key in &keys {
        assert!(cli.pttl(key).await > 0, "{key} would stay for ever");
    }
}

/// URLs that cannot work, by what they lack. None of what they say is repeated, as it may be a
/// password.
#[tokio::test]
async fn bad_urls_are_refused_before_anything_is_sent() {
    for (url, reason) in [
        ("", "not a server URL"),
        ("redis://", "no host"),
        ("redis://:s3cret@", "no host"),
        ("http://s3cret.example", "unknown scheme"),
        ("redis-cluster://h:1", "not supported yet"),
        ("redis://h/s3cret", "not a number"),
        ("redis://h/256", "not a number"),
        ("redis://h:s3cret", "cannot be read"),
        ("redis://s3cret@h", "user name without a password"),
        ("redis-sentinel://h:1", "sentinelServiceName"),
    ] {
        let problem = problem(LockClient::connect(url).await);
        assert!(problem.contains(reason), "{url}: {problem}");
        assert!(!problem.contains("s3cret"), "{problem}");
    }
}

/// Without the feature there is no TLS, and no silent plaintext instead.
#[cfg(not(feature = "tls"))]
#[tokio::test]
async fn tls_without_the_feature_is_refused() {
    let server = server();
    let url = format!("rediss://127.0.0.1:{}", server.port());
    assert!(problem(LockClient::connect(&url).await).contains("feature `tls`"));
}

/// With the feature a server that speaks plaintext is not spoken to in plaintext.
#[cfg(feature = "tls")]
#[tokio::test]
async fn tls_to_a_server_without_it_is_unreachable() {
    let server = Server::start();
    let url = format!("rediss://:s3cret@127.0.0.1:{}", server.port());
    let mut monitor = server.monitor().await;
    let result = LockClient::connect(&url).await;
    let Err(error @ Error::Unreachable { .. }) = result else {
        panic!("{result:?}");
    };
    assert!(!words(&error).contains("s3cret"));
    assert_eq!(monitor.count(|line| line.contains("s3cret")).await, 0);
}

/// Wrong password, missing password, wrong user: denied at once, and neither password is shown.
#[tokio::test]
async fn wrong_password_is_denied_and_never_shown() {
    let log = Log::start();
    let server = Server::start();
    let set = server
        .cmd(&["CONFIG", "SET", "requirepass", "r1ght-s3cret"])
        .await;
    set.ok();
    let at = format!("127.0.0.1:{}", server.port());
    for url in [
        format!("redis://:wr0ng-s3cret@{at}"),
        format!("redis://nobody:wr0ng-s3cret@{at}"),
        format!("redis://{at}"),
    ] {
        let result = LockClient::connect(&url).await;
        let Err(error @ Error::Denied { .. }) = result else {
            panic!("{result:?}");
        };
        assert!(!error.is_retryable());
        assert!(!words(&error).contains("s3cret"), "{}", words(&error));
    }
    let url = format!("redis://:r1ght-s3cret@{at}");
    let builder = LockClient::builder().url(url.as_str()).label("l");
    assert!(!format!("{builder:?}").contains("s3cret"));
    let client = builder.build().await.unwrap();
    let name = unique_name();
    let mut ctx = client.context();
    let mut lock = ctx.lock(name.as_str());
    let guard = lock.acquire().await.unwrap();
    let seen = client.inspect(name.as_str()).await.unwrap();
    let shown = format!("{client:?} {ctx:?} {lock:?} {guard:?} {seen:?}");
    assert!(!shown.contains("s3cret"), "{shown}");
    assert_eq!(guard.release().await, ReleaseOutcome::Released);

    // A lazy client hears of it with the first call.
    let url = format!("redis://:wr0ng-s3cret@{at}");
    let lazy = LockClient::builder().url(url).lazy_connect(true);
    let lazy = lazy.build().await.unwrap();
    let result = lazy.lock(name.as_str()).acquire().await;
    let Err(error @ Error::Denied { .. }) = result else {
        panic!("{result:?}");
    };
    assert!(!words(&error).contains("s3cret"), "{}", words(&error));
    assert!(log.count(&["refused"]) > 0, "the log works");
    assert_eq!(log.count(&["s3cret"]), 0, "{}", log.text());
}

/// A database the server does not have.
#[tokio::test]
async fn database_out_of_range_is_refused_at_connecting() {
    let server = Server::start_with(&["--databases", "4"]);
    let url = |database| format!("redis://127.0.0.1:{}/{database}", server.port());
    let problem = problem(LockClient::connect(&url(7)).await);
    assert!(problem.contains("out of range"), "{problem}");
    let client = LockClient::connect(&url(3)).await.unwrap();
    let guard = client.lock("job").acquire().await.unwrap();
    assert!(!server.cli().await.exists("job").await, "in database 0");
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
}

/// B75, B83: a key that is something else is a conflict: not waited for, and left as it is.
#[tokio::test]
async fn keys_in_other_use_are_a_conflict_and_left_alone() {
    let server = server();
    let client = client(server).await;
    let cli = server.cli().await;
    for (setup, what) in [
        (vec!["SET", "", "text"], "WRONGTYPE"),
        (vec!["RPUSH", "", "item"], "WRONGTYPE"),
        (vec!["SADD", "", "member"], "WRONGTYPE"),
        (vec!["HSET", "", "field", "value"], "other use"),
        (vec!["HSET", "", "user:7", "Ann"], "other use"),
        (vec!["HSET", "", "mode", "read", "a:1", "1"], "read/write"),
    ] {
        let name = unique_name();
        let setup: Vec<_> = setup
            .into_iter()
            .map(|arg| if arg.is_empty() { name.as_str() } else { arg })
            .collect();
        cli.cmd(&setup).await.ok();
        let before = cli.cmd(&["DUMP", &name]).await;
        for result in [
            client.lock(name.as_str()).acquire().await,
            client.lock(name.as_str()).acquire_timeout(secs(5)).await,
            client
                .lock(name.as_str())
                .try_acquire()
                .await
                .map(Option::unwrap),
        ] {
            let Err(error @ Error::Conflict { .. }) = result else {
                panic!("{setup:?}: {result:?}");
            };
            assert!(!error.is_retryable());
            assert!(words(&error).contains(what), "{}", words(&error));
            assert!(words(&error).contains(&name));
        }
        assert_eq!(cli.cmd(&["DUMP", &name]).await, before, "{setup:?}");
        assert!(!cli.exists(&token_key(&name)).await);
        cli.cmd(&["DEL", &name]).await.ok();
    }
    // A token counter that no number can follow.
    for spoiled in ["text", "", "-5", "1.5", "007", "1e3"] {
        let name = unique_name();
        cli.cmd(&["SET", &token_key(&name), spoiled]).await.ok();
        let result = client.lock(name.as_str()).acquire().await;
        assert!(matches!(result, Err(Error::Conflict { .. })), "{result:?}");
        assert!(!cli.exists(&name).await);
        cli.cmd(&["DEL", &token_key(&name)]).await.ok();
    }
    let name = unique_name();
    cli.cmd(&["RPUSH", &token_key(&name), "x"]).await.ok();
    let result = client.lock(name.as_str()).acquire().await;
    assert!(matches!(result, Err(Error::Conflict { .. })), "{result:?}");
    cli.cmd(&["DEL", &token_key(&name)]).await.ok();
}

/// What becomes of a hold whose key is put to other use: it is lost, and the key is left as it is.
#[tokio::test]
async fn hold_whose_key_is_overwritten_is_lost_and_the_key_left_alone() {
    let server = server();
    let client = client(server).await;
    let cli = server.cli().await;
    let name = unique_name();
    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    cli.cmd(&["SET", &name, "text"]).await.ok();
    let confirmed = guard.confirm().await;
    assert!(
        matches!(confirmed, Err(Error::Lost { .. })),
        "{confirmed:?}"
    );
    assert!(matches!(guard.release().await, ReleaseOutcome::Lost(_)));
    assert_eq!(cli.cmd(&["GET", &name]).await.text(), "text");
    cli.cmd(&["DEL", &name]).await.ok();
}

/// A lock that another program holds without expiry is waited for, not taken for a mistake.
#[tokio::test]
async fn holder_without_expiry_is_waited_for() {
    let server = server();
    let client = client(server).await;
    let name = unique_name();
    let cli = server.cli().await;
    cli.cmd(&["HSET", &name, "b983c153-7421-469a-addb-44fb92259a1b:1", "1"])
        .await
        .ok();
    let busy = client.lock(name.as_str()).acquire_timeout(secs(1)).await;
    assert!(matches!(busy, Err(Error::TimedOut { .. })), "{busy:?}");
    assert!(
        client
            .lock(name.as_str())
            .try_acquire()
            .await
            .unwrap()
            .is_none()
    );
    cli.cmd(&["DEL", &name]).await.ok();
    drop(client.lock(name.as_str()).acquire().await.unwrap());
    nothing_left(server, &name).await;
}

/// A replica from the start: an error of its type, in the caller's time.
#[tokio::test]
async fn read_only_replica_is_a_typed_error_within_the_callers_time() {
    let primary = server();
    let replica = Server::start_with(&["--replicaof", "127.0.0.1", &primary.port().to_string()]);
    let cli = replica.cli().await;
    eventually(secs(15), "linked", async || {
        let info = cli.cmd(&["INFO", "replication"]).await.text();
        info.contains("master_link_status:up")
    })
    .await;
    let client = client(&replica).await;
    let (started, ruler) = (std::time::Instant::now(), Ruler::start());
    let result = client.lock(unique_name()).acquire_timeout(secs(1)).await;
    let Err(error @ Error::Unreachable { .. }) = result else {
        panic!("{result:?}");
    };
    assert!(words(&error).contains("READONLY"), "{}", words(&error));
    let took = started.elapsed();
    assert!(took < ms(1300) + ruler.allowance(), "{took:?}");
}

/// A server of ours, in a few lines: says that it is of some version, and `OK` to the rest.
async fn fake_server(info: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut unread = Vec::new();
                loop {
                    while let Some((request, len)) = resp::parse(&unread).unwrap() {
                        unread.drain(..len);
                        let reply = match request.texts()[0].to_uppercase().as_str() {
                            "INFO" => format!("${}\r\n{info}\r\n", info.len()),
                            _ => "+OK\r\n".to_owned(),
                        };
                        stream.write_all(reply.as_bytes()).await.unwrap();
                    }
                    if stream.read_buf(&mut unread).await.unwrap_or(0) == 0 {
                        return;
                    }
                }
            });
        }
    });
    address
}

/// A version whose scripts cannot do what ours need: said at connecting.
#[tokio::test]
async fn server_too_old_is_refused_at_connecting() {
    for (info, reason) in [
        ("redis_version:6.0.16\r\n", "6.0 is too old"),
        ("redis_version:5.0.7\r\n", "5.0 is too old"),
        ("redis_version:7.0.0\r\nredis_mode:cluster\r\n", "Cluster"),
        ("redis_version:7.0.0\r\nredis_mode:sentinel\r\n", "Sentinel"),
    ] {
        let at = fake_server(info).await;
        let problem = problem(LockClient::connect(&format!("redis://{at}")).await);
        assert!(problem.contains(reason), "{problem}");
    }
}

/// A server that answers nonsense is no server: no hold comes of it, no panic either.
#[tokio::test]
async fn server_that_answers_nonsense_grants_nothing() {
    let at = fake_server("redis_version:7.0.0\r\n").await;
    let client = LockClient::builder()
        .url(format!("redis://{at}"))
        .lease(ms(600))
        .build()
        .await
        .unwrap();
    let result = client.lock(unique_name()).acquire_timeout(ms(300)).await;
    assert!(
        matches!(
            result,
            Err(Error::Indeterminate { .. } | Error::Unreachable { .. })
        ),
        "{result:?}"
    );
}

/// B75: whoever calls the scripts by hand, or has another version of this crate: arguments out of
/// range are refused before the first write, or a key would stay without TTL.
#[tokio::test]
async fn scripts_refuse_bad_arguments_before_the_first_write() {
    let server = Server::start();
    let cli = server.cli().await;
    let prelude = include_str!("../../src/store/redis/lua/prelude.lua");
    let acquire = include_str!("../../src/store/redis/lua/lock_acquire.lua");
    let renew = include_str!("../../src/store/redis/lua/lock_renew.lua");
    let release = include_str!("../../src/store/redis/lua/lock_release.lua");
    let in_full = |script: &str| format!("{prelude}\n{script}");
    let far = "9000000000000000";
    let owner = "b983c153-7421-469a-addb-44fb92259a1b:1";
    let bad_numbers = [
        "0",
        "-1",
        "1.5",
        "",
        "x",
        "nan",
        "inf",
        "9223372036854775807",
        "1e300",
    ];
    let eval = async |script: &str, rest: &[&str]| {
        let script = in_full(script);
        let reply = cli.cmd(&[&["EVAL", &script][..], rest].concat()).await;
        assert!(
            reply.is_error() && reply.error().contains("leasehold"),
            "{rest:?}: {reply:?}"
        );
    };
    for bad in bad_numbers {
        eval(
            acquire,
            &["2", "k", "t", "1", far, owner, "1", bad, "0", "0"],
        )
        .await;
        eval(
            acquire,
            &["2", "k", "t", "1", far, owner, bad, "1000", "0", "0"],
        )
        .await;
        eval(renew, &["1", "k", "1", far, "1", bad, owner]).await;
        eval(renew, &["1", "k", "1", far, bad, "1000", owner]).await;
        let of_one = ["1", "k", "1", far, "1", "1000", owner];
        for others in [[bad, "1", "1000"], ["1", bad, "1000"], ["1", "1", bad]] {
            eval(renew, &[&of_one[..], &others].concat()).await;
        }
        if bad != "0" {
            eval(
                acquire,
                &["2", "k", "t", "1", far, owner, "1", "1000", bad, "0"],
            )
            .await;
            eval(
                acquire,
                &["2", "k", "t", "1", far, owner, "1", "1000", "0", bad],
            )
            .await;
            eval(
                acquire,
                &["2", "k", "t", "1", bad, owner, "1", "1000", "0", "0"],
            )
            .await;
            eval(release, &["1", "k", "1", far, "PLAIN", owner, bad, "", "c"]).await;
        }
    }
    // Too few of them; and in a batch the second op is bad: the first must not have run.
    eval(acquire, &["2", "k", "t", "1", far, owner, "1", "1000", "0"]).await;
    eval(acquire, &["1", "k", "1", far, owner, "1", "1000", "0", "0"]).await;
    eval(acquire, &["0", "1", far]).await;
    eval(
        acquire,
        &[
            "4", "k", "t", "k2", "t2", "1", far, owner, "1", "1000", "0", "0", owner, "1", "0",
            "0", "0",
        ],
    )
    .await;
    assert_eq!(cli.cmd(&["DBSIZE"]).await.int(), 0);
}

/// B77: the lease belongs to one hold: an inner level neither shortens nor lengthens it when it goes,
/// and the next hold has its own.
#[tokio::test]
async fn lease_of_one_hold_does_not_leak_into_another() {
    let server = server();
    let cli = server.cli().await;
    let client = client(server).await;
    let name = unique_name();
    let mut ctx = client.context();
    let about = async |wanted: i64| {
        let left = cli.pttl(&name).await;
        assert!((wanted - 2000..=wanted).contains(&left), "{left}");
    };
    let outer = ctx.lock(name.as_str()).lease(secs(10)).acquire().await;
    let inner = ctx.lock(name.as_str()).lease(secs(10)).acquire().await;
    let outer = outer.unwrap();
    assert_eq!(
        inner.unwrap().release().await,
        ReleaseOutcome::StillHeld { depth: 1 }
    );
    about(10_000).await;
    // A shorter inner lease does not shorten, neither coming nor going.
    let inner = ctx.lock(name.as_str()).lease(secs(5)).acquire().await;
    about(10_000).await;
    let _ = inner.unwrap().release().await;
    about(10_000).await;
    assert_eq!(outer.release().await, ReleaseOutcome::Released);

    let long = ctx.lock(name.as_str()).lease(secs(3600)).acquire().await;
    about(3_600_000).await;
    assert_eq!(long.unwrap().release().await, ReleaseOutcome::Released);
    let plain = ctx.lock(name.as_str()).acquire().await.unwrap();
    about(30_000).await;
    assert!(plain.remaining() <= secs(30));
    assert_eq!(plain.release().await, ReleaseOutcome::Released);
    let short = ctx.lock(name.as_str()).lease(secs(2)).acquire().await;
    about(2000).await;
    assert_eq!(short.unwrap().release().await, ReleaseOutcome::Released);
    nothing_left(server, &name).await;
}
