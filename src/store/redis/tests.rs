//! The store against a real server, and a proxy that loses, delays and swallows.
#![allow(
    clippy::disallowed_methods,
    reason = "tests drive real time and tasks of their own"
)]

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener as StdListener, TcpStream as StdStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Instant as StdInstant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use fred::clients::Client;
use fred::interfaces::ClientLike as _;

use super::*;
use crate::env::RealEnv;
use crate::kind::Kind;
use crate::store::{Answer, Call, Instead, NoReply, Op, OwnerId, Reply, TokenRule, Verb};

mod server {
    use super::*;

    /// A redis-server of this test's own; killed when dropped.
    pub(super) struct Server {
        pub(super) port: u16,
        child: Child,
        dir: tempfile::TempDir,
        args: Vec<String>,
    }

    impl Server {
        pub(super) fn start() -> Self {
            Self::with(&[])
        }

        pub(super) fn with(args: &[&str]) -> Self {
            let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
            loop {
                let port = free_port();
                let dir = tempfile::tempdir().unwrap();
                let child = spawn(port, dir.path(), &args);
                let mut server = Self {
                    port,
                    child,
                    dir,
                    args: args.clone(),
                };
                server.wait_ready();
                // Another process may have been quicker to take the port: then ours has ended.
                std::thread::sleep(Duration::from_millis(20));
                if server.child.try_wait().unwrap().is_none() {
                    return server;
                }
            }
        }

        /// A Sentinel that watches the server at `port` under the name `main`.
        pub(super) fn sentinel(port: u16) -> Self {
            let own = free_port();
            let dir = tempfile::tempdir().unwrap();
            let file = dir.path().join("sentinel.conf");
            let text = format!(
                "port {own}\nbind 127.0.0.1\ndir {}\n\
                 sentinel monitor main 127.0.0.1 {port} 1\n\
                 sentinel down-after-milliseconds main 500\n\
                 sentinel failover-timeout main 2000\n",
                dir.path().display()
            );
            std::fs::write(&file, text).unwrap();
            let child = Command::new(binary())
                .arg(&file)
                .arg("--sentinel")
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let server = Self {
                port: own,
                child,
                dir,
                args: Vec::new(),
            };
            server.wait_ready();
            server
        }

        fn wait_ready(&self) {
            let start = StdInstant::now();
            while StdStream::connect(("127.0.0.1", self.port)).is_err() {
                assert!(start.elapsed() < Duration::from_secs(10), "no server");
                std::thread::sleep(Duration::from_millis(5));
            }
        }

        pub(super) fn kill(&mut self) {
            self.child.kill().unwrap();
            self.child.wait().unwrap();
        }

        pub(super) fn restart(&mut self) {
            self.child = spawn(self.port, self.dir.path(), &self.args);
            self.wait_ready();
        }

        pub(super) fn signal(&self, signal: &str) {
            let status = Command::new("kill")
                .args([signal, &self.child.id().to_string()])
                .status()
                .unwrap();
            assert!(status.success());
        }

        /// One command, its reply as text, one line per element.
        pub(super) fn cli(&self, command: &str) -> String {
            let args: Vec<&str> = command.split(' ').collect();
            cli(self.port, &args)
        }

        pub(super) fn calls(&self, command: &str) -> u64 {
            let prefix = format!("cmdstat_{command}:calls=");
            self.cli("INFO commandstats")
                .lines()
                .find_map(|line| line.strip_prefix(&prefix)?.split(',').next()?.parse().ok())
                .unwrap_or(0)
        }

        pub(super) fn clients(&self, kind: &str) -> usize {
            let list = self.cli(&format!("CLIENT LIST TYPE {kind}"));
            list.lines()
                .filter(|line| line.contains("addr=") && !line.contains("cmd=client"))
                .count()
        }

        pub(super) fn listeners(&self, name: &str) -> String {
            let channel = KeyScheme::Redisson.channel(&name.into());
            let reply = cli(self.port, &["PUBSUB", "NUMSUB", &channel]);
            reply.lines().last().unwrap_or_default().to_owned()
        }

        pub(super) fn publish(&self, name: &str) {
            cli(
                self.port,
                &["PUBLISH", &KeyScheme::Redisson.channel(&name.into()), "0"],
            );
        }
    }

    impl Drop for Server {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    fn free_port() -> u16 {
        let listener = StdListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port()
    }

    fn binary() -> String {
        std::env::var("LEASEHOLD_REDIS_SERVER").unwrap_or_else(|_| "redis-server".into())
    }

    fn spawn(port: u16, dir: &std::path::Path, args: &[String]) -> Child {
        Command::new(binary())
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
            .args(["--save", "", "--enable-debug-command", "yes"])
            .arg("--dir")
            .arg(dir)
            .args(args)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server, or the one of LEASEHOLD_REDIS_SERVER")
    }

    fn cli(port: u16, args: &[&str]) -> String {
        let mut stream = StdStream::connect(("127.0.0.1", port)).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(5)))
            .unwrap();
        let mut request = format!("*{}\r\n", args.len());
        for arg in args {
            let _ = write!(request, "${}\r\n{arg}\r\n", arg.len());
        }
        stream.write_all(request.as_bytes()).unwrap();
        read(&mut BufReader::new(stream))
    }

    fn read(reader: &mut BufReader<StdStream>) -> String {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let (kind, rest) = line.trim_end().split_at(1);
        match kind {
            "$" => {
                let Ok(length) = rest.parse::<usize>() else {
                    return String::new();
                };
                let mut body = vec![0; length + 2];
                reader.read_exact(&mut body).unwrap();
                String::from_utf8_lossy(&body[..length]).into_owned()
            }
            "*" => {
                let count = rest.parse::<usize>().unwrap_or(0);
                let parts: Vec<_> = (0..count).map(|_| read(reader)).collect();
                parts.join("\n")
            }
            _ => line.trim_end().trim_start_matches([':', '+']).to_owned(),
        }
    }
}

mod proxy {
    use super::*;

    const PASS: u8 = 0;
    const SWALLOW: u8 = 1;
    const BLACK_HOLE: u8 = 2;
    const REPLAY: u8 = 3;

    /// Stands between store and server.
    #[derive(Clone)]
    pub(super) struct Proxy {
        pub(super) port: u16,
        mode: Arc<AtomicU8>,
        delay_ms: Arc<AtomicU64>,
    }

    impl Proxy {
        pub(super) async fn start(upstream: u16) -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let proxy = Self {
                port: listener.local_addr().unwrap().port(),
                mode: Arc::default(),
                delay_ms: Arc::default(),
            };
            let this = proxy.clone();
            tokio::spawn(async move {
                while let Ok((client, _)) = listener.accept().await {
                    tokio::spawn(this.clone().relay(client, upstream));
                }
            });
            proxy
        }

        /// The next reply is lost and its connection closed.
        pub(super) fn swallow_next_reply(&self) {
            self.mode.store(SWALLOW, Ordering::SeqCst);
        }

        /// Instead of the next reply the one before comes again.
        pub(super) fn repeat_last_reply(&self) {
            self.mode.store(REPLAY, Ordering::SeqCst);
        }

        /// Sockets stay open, nothing passes.
        pub(super) fn black_hole(&self) {
            self.mode.store(BLACK_HOLE, Ordering::SeqCst);
        }

        pub(super) fn pass(&self) {
            self.mode.store(PASS, Ordering::SeqCst);
        }

        pub(super) fn delay_replies(&self, ms: u64) {
            self.delay_ms.store(ms, Ordering::SeqCst);
        }

        async fn relay(self, client: TcpStream, upstream: u16) {
            let Ok(server) = TcpStream::connect(("127.0.0.1", upstream)).await else {
                return;
            };
            let _ = client.set_nodelay(true);
            let _ = server.set_nodelay(true);
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = server.into_split();
            let up = self.clone();
            let upwards = async move {
                let mut buffer = vec![0; 64 * 1024];
                loop {
                    match from_client.read(&mut buffer).await {
                        Ok(0) | Err(_) => return,
                        Ok(_) if up.mode.load(Ordering::SeqCst) == BLACK_HOLE => {}
                        Ok(n) => {
                            if to_server.write_all(&buffer[..n]).await.is_err() {
                                return;
                            }
                        }
                    }
                }
            };
            let downwards = async move {
                let mut buffer = vec![0; 64 * 1024];
                let mut last = Vec::new();
                loop {
                    let Ok(n) = from_server.read(&mut buffer).await else {
                        return;
                    };
                    if n == 0 {
                        return;
                    }
                    let delay = self.delay_ms.load(Ordering::SeqCst);
                    if delay > 0 {
                        sleep(Duration::from_millis(delay)).await;
                    }
                    let once = |mode| {
                        let order = Ordering::SeqCst;
                        self.mode.compare_exchange(mode, PASS, order, order).is_ok()
                    };
                    if once(SWALLOW) {
                        return;
                    }
                    if self.mode.load(Ordering::SeqCst) == BLACK_HOLE {
                        continue;
                    }
                    if !once(REPLAY) {
                        last = buffer[..n].to_vec();
                    }
                    if to_client.write_all(&last).await.is_err() {
                        return;
                    }
                }
            };
            tokio::select! {
                () = upwards => {}
                () = downwards => {}
            }
        }
    }
}

use proxy::Proxy;
use server::Server;

static ATTEMPTS: AtomicU64 = AtomicU64::new(1);

fn config(port: u16) -> RedisConfig {
    RedisConfig::from_url(&format!("redis://127.0.0.1:{port}")).unwrap()
}

fn store_of(config: RedisConfig) -> Arc<RedisStore> {
    let env: SharedEnv = Arc::new(RealEnv::current());
    RedisStore::connect(config, &env, Uuid::new_v4())
}

async fn connected(config: RedisConfig) -> Arc<RedisStore> {
    let store = store_of(config);
    let deadline = Instant::now() + Duration::from_secs(5);
    store.first_connect(deadline).await.unwrap();
    store
}

fn acquire(name: &str) -> Op {
    Op {
        kind: Kind::Plain,
        name: name.into(),
        verb: Verb::Acquire {
            owner: owner(),
            count: 1,
            lease_ms: 30_000,
            token: TokenRule {
                floor: 0,
                retention_ms: Some(60_000),
                reserve: 0,
            },
        },
    }
}

fn owner() -> OwnerId {
    OwnerId::new(Uuid::new_v4(), 42)
}

fn call(op: Op, timeout_ms: u64) -> Call {
    Call {
        attempt: ATTEMPTS.fetch_add(1, Ordering::Relaxed),
        timeout: Duration::from_millis(timeout_ms),
        ops: vec![op],
    }
}

/// Submits as the dispatcher does: when there is a connection.
async fn submit(store: &RedisStore, call: Call) -> Result<Reply, NoReply> {
    if let Some(ready) = store.ready(call.timeout) {
        ready.await;
    }
    store.submit(call).await
}

/// Loads the scripts of acquisition and shows that all is well.
async fn warm_up(store: &RedisStore) {
    let warm_up = call(acquire("warm-up"), 1000);
    let reply = submit(store, warm_up).await.unwrap();
    assert!(matches!(
        reply.answers[0],
        Answer::Granted { .. } | Answer::Taken { .. }
    ));
}

async fn up_within(store: &RedisStore, limit: Duration) -> Duration {
    let start = Instant::now();
    let mut health = store.health();
    timeout(
        limit,
        health.wait_for(|health| matches!(health, Health::Up { .. })),
    )
    .await
    .expect("up in time")
    .unwrap();
    start.elapsed()
}

async fn down_within(store: &RedisStore, limit: Duration) {
    let mut health = store.health();
    timeout(
        limit,
        health.wait_for(|health| matches!(health, Health::Down { .. })),
    )
    .await
    .expect("down in time")
    .unwrap();
}

fn generation(store: &RedisStore) -> u64 {
    match *store.health().borrow() {
        Health::Up { generation, .. } => generation,
        _ => 0,
    }
}

async fn settles(subscription: &Subscription, limit: Duration) -> Listening {
    timeout(limit, subscription.settled())
        .await
        .expect("settled in time")
}

async fn live_within(subscription: &Subscription, limit: Duration) {
    let start = Instant::now();
    while subscription.listening() != Listening::Live {
        assert!(start.elapsed() < limit, "not live in time");
        sleep(Duration::from_millis(2)).await;
    }
}

const MINUTE: Duration = Duration::from_mins(1);
const SECOND: Duration = Duration::from_secs(1);

#[tokio::test]
async fn calls_are_answered_and_tell_the_servers_time() {
    let server = Server::start();
    let store = connected(config(server.port)).await;
    let before = Instant::now();
    let reply = store.submit(call(acquire("job"), 1000)).await.unwrap();
    assert!(matches!(
        reply.answers[..],
        [Answer::Granted {
            remaining_ms: 30_000,
            ..
        }]
    ));
    assert!(reply.sent >= before);
    assert!(reply.server_now_us > 1_600_000_000_000_000);
    let reply = store.submit(call(acquire("job"), 1000)).await.unwrap();
    assert!(matches!(reply.answers[..], [Answer::Taken { .. }]));
    let release = Op {
        kind: Kind::Plain,
        name: "free".into(),
        verb: Verb::Release {
            owner: owner(),
            count: 0,
            also: None,
        },
    };
    let reply = store.submit(call(release, 1000)).await.unwrap();
    assert_eq!(reply.answers, [Answer::Gone(Instead::Free)]);
}

#[tokio::test]
async fn timeout_of_a_call_holds_while_the_server_pauses() {
    let server = Server::start();
    let store = connected(config(server.port)).await;
    warm_up(&store).await;
    server.cli("CLIENT PAUSE 1500 ALL");
    let start = Instant::now();
    let result = store.submit(call(acquire("job"), 200)).await;
    let took = start.elapsed();
    assert!(
        matches!(result, Err(NoReply::Unanswered { .. })),
        "{result:?}"
    );
    assert!(took < Duration::from_millis(300), "{took:?}");
    // What was written runs after the pause, finds itself late, and does nothing.
    sleep(Duration::from_millis(1600)).await;
    assert_eq!(server.cli("EXISTS job"), "0");
}

#[tokio::test]
async fn swallowed_reply_is_unanswered_and_the_script_ran_once() {
    let server = Server::start();
    let proxy = Proxy::start(server.port).await;
    let store = connected(config(proxy.port)).await;
    warm_up(&store).await;
    let calls = server.calls("hset");
    proxy.swallow_next_reply();
    let result = store.submit(call(acquire("job"), 1000)).await;
    assert!(
        matches!(result, Err(NoReply::Unanswered { .. })),
        "{result:?}"
    );
    up_within(&store, SECOND).await;
    sleep(Duration::from_millis(300)).await;
    assert_eq!(server.cli("EXISTS job"), "1");
    assert_eq!(server.calls("hset"), calls + 1);
    warm_up(&store).await;
}

#[tokio::test]
async fn reply_of_another_request_is_noticed_and_the_connection_rebuilt() {
    let server = Server::start();
    let proxy = Proxy::start(server.port).await;
    let store = connected(config(proxy.port)).await;
    warm_up(&store).await;
    let before = generation(&store);
    let first = store.submit(call(acquire("a"), 1000)).await;
    assert!(first.is_ok(), "{first:?}");
    // Somebody else's "granted".
    server.cli("HSET b other 1");
    proxy.repeat_last_reply();
    let second = store.submit(call(acquire("b"), 1000)).await;
    assert!(
        matches!(second, Err(NoReply::Unanswered { .. })),
        "{second:?}"
    );
    warm_up(&store).await;
    assert!(generation(&store) > before);
}

#[tokio::test]
async fn killed_server_is_found_again_and_nothing_queued_runs() {
    let mut server = Server::start();
    let store = connected(config(server.port)).await;
    warm_up(&store).await;
    server.kill();
    down_within(&store, SECOND).await;
    let start = Instant::now();
    let result = store.submit(call(acquire("late"), 200)).await;
    assert!(matches!(result, Err(NoReply::NotSent(_))), "{result:?}");
    assert!(start.elapsed() < Duration::from_millis(300));
    // After a command timeout of outage nobody waits any more.
    sleep(SECOND).await;
    let start = Instant::now();
    let result = store.submit(call(acquire("late"), 1000)).await;
    assert!(matches!(result, Err(NoReply::NotSent(_))), "{result:?}");
    assert!(start.elapsed() < Duration::from_millis(50));
    server.restart();
    let took = up_within(&store, SECOND).await;
    assert!(took < SECOND, "{took:?}");
    sleep(Duration::from_millis(300)).await;
    assert_eq!(server.cli("EXISTS late"), "0");
    // The restarted server knows no script.
    warm_up(&store).await;
}

#[tokio::test]
async fn call_waits_for_a_connection_that_comes_back_soon() {
    let mut server = Server::start();
    let store = connected(config(server.port)).await;
    server.kill();
    down_within(&store, SECOND).await;
    let waiting = submit(&store, call(acquire("job"), 1000));
    let restarting = async {
        tokio::task::yield_now().await;
        server.restart();
    };
    let (reply, ()) = tokio::join!(waiting, restarting);
    let reply = reply.unwrap();
    assert!(matches!(reply.answers[..], [Answer::Granted { .. }]));
}

#[tokio::test]
async fn stopped_server_is_unanswered_then_not_sent_then_back() {
    let server = Server::start();
    let mut config = config(server.port);
    config.command_timeout = Duration::from_millis(300);
    let store = connected(config).await;
    warm_up(&store).await;
    server.signal("-STOP");
    let start = Instant::now();
    let result = store.submit(call(acquire("job"), 200)).await;
    assert!(
        matches!(result, Err(NoReply::Unanswered { .. })),
        "{result:?}"
    );
    assert!(start.elapsed() < Duration::from_millis(300));
    down_within(&store, SECOND).await;
    sleep(Duration::from_millis(350)).await;
    let start = Instant::now();
    let result = store.submit(call(acquire("job"), 200)).await;
    assert!(matches!(result, Err(NoReply::NotSent(_))), "{result:?}");
    assert!(start.elapsed() < Duration::from_millis(50), "fails at once");
    server.signal("-CONT");
    up_within(&store, SECOND).await;
    warm_up(&store).await;
}

#[tokio::test]
async fn black_hole_is_left_within_three_seconds() {
    let server = Server::start();
    let proxy = Proxy::start(server.port).await;
    let store = connected(config(proxy.port)).await;
    let subscription = store.subscribe(&"job".into());
    assert_eq!(settles(&subscription, SECOND).await, Listening::Live);
    subscription.woken().await;
    warm_up(&store).await;
    proxy.black_hole();
    let start = Instant::now();
    let result = store.submit(call(acquire("job"), 500)).await;
    assert!(
        matches!(result, Err(NoReply::Unanswered { .. })),
        "{result:?}"
    );
    down_within(&store, 2 * SECOND).await;
    // The connection for messages is noticed to be dead without any help.
    while subscription.listening() == Listening::Live {
        assert!(start.elapsed() < 4 * SECOND);
        sleep(Duration::from_millis(10)).await;
    }
    proxy.pass();
    up_within(&store, SECOND).await;
    live_within(&subscription, SECOND).await;
    timeout(SECOND, subscription.woken())
        .await
        .expect("woken on reconnect");
    warm_up(&store).await;
}

#[tokio::test]
async fn forgotten_scripts_go_unnoticed() {
    let server = Server::start();
    let store = connected(config(server.port)).await;
    for round in 0..20 {
        server.cli("SCRIPT FLUSH");
        let reply = store
            .submit(call(acquire(&format!("job-{round}")), 1000))
            .await
            .unwrap();
        assert!(matches!(reply.answers[..], [Answer::Granted { .. }]));
    }
}

#[tokio::test]
async fn demoted_server_is_not_sent_and_the_connection_rebuilt() {
    let server = Server::start();
    let store = connected(config(server.port)).await;
    warm_up(&store).await;
    sleep(REBUILD_INTERVAL).await;
    server.cli("REPLICAOF 127.0.0.1 1");
    let before = generation(&store);
    let reply = store.submit(call(acquire("job"), 1000)).await;
    match reply {
        Err(NoReply::NotSent(cause)) => assert!(cause.0.contains("READONLY"), "{cause}"),
        // The script catches it op by op.
        Ok(reply) => match &reply.answers[..] {
            [Answer::Refused(refusal)] => assert_eq!(refusal.kind, RefusalKind::Unavailable),
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
    server.cli("REPLICAOF NO ONE");
    let start = Instant::now();
    while generation(&store) <= before {
        assert!(start.elapsed() < SECOND, "not rebuilt");
        sleep(Duration::from_millis(5)).await;
    }
    warm_up(&store).await;
}

fn with_user(server: &Server, rules: &str) -> RedisConfig {
    server.cli(&format!("ACL SETUSER app reset on >pw {rules}"));
    RedisConfig::from_url(&format!("redis://app:pw@127.0.0.1:{}", server.port)).unwrap()
}

#[tokio::test]
async fn missing_permission_for_scripts_is_named() {
    let server = Server::start();
    let config = with_user(&server, "~* &* +@all -evalsha");
    let store = connected(config).await;
    match store.submit(call(acquire("job"), 1000)).await {
        Err(NoReply::Refused(refusal)) => {
            assert_eq!(refusal.kind, RefusalKind::Denied);
            assert!(refusal.message.contains("+evalsha"), "{}", refusal.message);
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn wrong_password_is_refused_at_once_and_never_shown() {
    let server = Server::start();
    server.cli("ACL SETUSER app reset on >right ~* &* +@all");
    let url = format!("redis://app:WRONGSECRET@127.0.0.1:{}", server.port);
    let config = RedisConfig::from_url(&url).unwrap();
    let shown = format!("{config:?}");
    assert!(
        !shown.contains("WRONGSECRET") && !shown.contains("app"),
        "{shown}"
    );
    let store = store_of(config);
    let start = Instant::now();
    let failure = store.first_connect(start + 5 * SECOND).await.unwrap_err();
    assert!(start.elapsed() < SECOND);
    let shown = format!("{failure:?} {store:?}");
    assert!(!shown.contains("WRONGSECRET"), "{shown}");
    let ConnectFailure::Refused(refusal) = failure else {
        panic!("{failure:?}");
    };
    assert_eq!(refusal.kind, RefusalKind::Denied);
    let result = store.submit(call(acquire("job"), 1000)).await;
    assert!(matches!(result, Err(NoReply::Refused(_))), "{result:?}");
    // Mended: connects without being built anew.
    server.cli("ACL SETUSER app >WRONGSECRET");
    up_within(&store, 2 * SECOND).await;
}

#[tokio::test]
async fn missing_password_and_missing_database_are_refused_at_once() {
    let server = Server::with(&["--requirepass", "pw", "--databases", "4"]);
    for (url, kind) in [
        (
            format!("redis://127.0.0.1:{}", server.port),
            RefusalKind::Denied,
        ),
        (
            format!("redis://:pw@127.0.0.1:{}/7", server.port),
            RefusalKind::Other,
        ),
    ] {
        let store = store_of(RedisConfig::from_url(&url).unwrap());
        let failure = store
            .first_connect(Instant::now() + 5 * SECOND)
            .await
            .unwrap_err();
        let ConnectFailure::Refused(refusal) = failure else {
            panic!("{failure:?}");
        };
        assert_eq!(refusal.kind, kind, "{}", refusal.message);
    }
}

#[tokio::test]
async fn unreachable_server_is_told_at_the_deadline() {
    let store = store_of(config(1));
    let start = Instant::now();
    let failure = store.first_connect(start + SECOND / 2).await.unwrap_err();
    let ConnectFailure::Unreachable(cause) = failure else {
        panic!("{failure:?}");
    };
    assert!(cause.0.contains("refused"), "{cause}");
    assert!(start.elapsed() < SECOND);
}

#[tokio::test]
async fn least_privilege_user_works() {
    let server = Server::start();
    let config = with_user(
        &server,
        "~* &* -@all +evalsha +eval +time +hset +hget +hgetall +hexists +hlen +hdel +exists +del +type \
         +get +set +incr +incrby +pttl +pexpire +persist +publish +subscribe +unsubscribe +ping +hkeys +hscan +unlink",
    );
    let store = connected(config).await;
    warm_up(&store).await;
    let subscription = store.subscribe(&"job".into());
    assert_eq!(settles(&subscription, SECOND).await, Listening::Live);
}

#[tokio::test]
async fn release_wakes_and_leaving_unsubscribes() {
    let server = Server::start();
    let store = connected(config(server.port)).await;
    let channel: Channel = "job".into();
    let subscription = store.subscribe(&channel);
    assert_eq!(settles(&subscription, SECOND).await, Listening::Live);
    assert_eq!(server.listeners("job"), "1");
    timeout(SECOND, subscription.woken())
        .await
        .expect("woken when live");
    server.publish("job");
    timeout(SECOND, subscription.woken())
        .await
        .expect("woken by the message");
    drop(subscription);
    let start = Instant::now();
    while server.listeners("job") != "0" {
        assert!(start.elapsed() < SECOND);
        sleep(Duration::from_millis(5)).await;
    }
    // Taken up again at once, again and again: always ends up live.
    for _ in 0..200 {
        drop(store.subscribe(&channel));
        let subscription = store.subscribe(&channel);
        live_within(&subscription, SECOND).await;
        assert_eq!(server.listeners("job"), "1");
    }
}

#[tokio::test]
async fn refused_channel_polls_and_the_others_live() {
    let server = Server::start();
    let allowed = KeyScheme::Redisson
        .channel(&"ok-*".into())
        .replace("{ok-*}", "{ok-*");
    let config = with_user(&server, &format!("~* resetchannels &{allowed} +@all"));
    let store = connected(config).await;
    let names =
        |kind: &str| -> Vec<Channel> { (0..40).map(|i| format!("{kind}-{i}").into()).collect() };
    let first = store.subscribe(&"ok-first".into());
    assert_eq!(settles(&first, SECOND).await, Listening::Live);
    let all: Vec<_> = names("ok")
        .iter()
        .chain(&names("no"))
        .map(|n| store.subscribe(n))
        .collect();
    for (i, subscription) in all.iter().enumerate() {
        let expected = if i < 40 {
            Listening::Live
        } else {
            Listening::Refused
        };
        assert_eq!(settles(subscription, 2 * SECOND).await, expected, "{i}");
    }
    assert_eq!(server.clients("pubsub"), 1, "one connection did it all");
    first.woken().await;
    server.publish("ok-first");
    timeout(SECOND, first.woken())
        .await
        .expect("others are not disturbed");
    // No reply of it went to a command.
    for i in 0..20 {
        let reply = store
            .submit(call(acquire(&format!("job-{i}")), 1000))
            .await
            .unwrap();
        assert!(matches!(reply.answers[..], [Answer::Granted { .. }]));
    }
}

#[tokio::test]
async fn user_without_channels_polls() {
    let server = Server::start();
    let config = with_user(&server, "~* resetchannels +@all");
    let store = connected(config).await;
    let subscriptions: Vec<_> = (0..2000)
        .map(|i| store.subscribe(&format!("job-{i}").into()))
        .collect();
    for subscription in &subscriptions {
        assert_eq!(settles(subscription, 2 * SECOND).await, Listening::Refused);
    }
    let later = store.subscribe(&"later".into());
    assert_eq!(settles(&later, SECOND).await, Listening::Refused);
}

#[tokio::test]
async fn users_without_ping_or_subscribe_poll() {
    let server = Server::start();
    for rules in ["~* &* +@all -ping", "~* &* +@all -subscribe"] {
        let store = connected(with_user(&server, rules)).await;
        warm_up(&store).await;
        let subscription = store.subscribe(&"job".into());
        assert_eq!(
            settles(&subscription, SECOND).await,
            Listening::Refused,
            "{rules}"
        );
    }
}

#[tokio::test]
async fn switched_off_means_polling_and_no_connection() {
    let server = Server::start();
    let mut config = config(server.port);
    config.pubsub = PubSub::Off;
    let store = connected(config).await;
    let subscription = store.subscribe(&"job".into());
    assert_eq!(subscription.settled().await, Listening::Refused);
    assert_eq!(server.clients("normal"), 1);
}

#[tokio::test]
async fn sharded_messages_wake() {
    let server = Server::start();
    let mut config = config(server.port);
    config.pubsub = PubSub::Sharded;
    let store = connected(config).await;
    let subscriptions: Vec<_> = (0..50)
        .map(|i| store.subscribe(&format!("job-{i}").into()))
        .collect();
    for subscription in &subscriptions {
        assert_eq!(settles(subscription, SECOND).await, Listening::Live);
        subscription.woken().await;
    }
    server.cli(&format!(
        "SPUBLISH {} 0",
        KeyScheme::Redisson.channel(&"job-7".into())
    ));
    timeout(SECOND, subscriptions[7].woken())
        .await
        .expect("woken");
    drop(subscriptions);
    sleep(Duration::from_millis(200)).await;
    assert_eq!(server.cli("PUBSUB SHARDCHANNELS"), "");
}

#[tokio::test]
async fn flood_of_messages_wakes_everybody() {
    let server = Server::start();
    let store = connected(config(server.port)).await;
    let quiet = store.subscribe(&"quiet".into());
    let noisy = store.subscribe(&"noisy".into());
    for subscription in [&quiet, &noisy] {
        assert_eq!(settles(subscription, SECOND).await, Listening::Live);
        subscription.woken().await;
    }
    let channel = KeyScheme::Redisson.channel(&"noisy".into());
    let flood = format!("for i = 1, 20000 do redis.call('PUBLISH', '{channel}', '0') end");
    // One runtime thread, and it is busy: the messages pile up.
    let port = server.port;
    let mut stream = StdStream::connect(("127.0.0.1", port)).unwrap();
    let request = format!(
        "*3\r\n$4\r\nEVAL\r\n${}\r\n{flood}\r\n$1\r\n0\r\n",
        flood.len()
    );
    stream.write_all(request.as_bytes()).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    timeout(SECOND, noisy.woken())
        .await
        .expect("woken by messages");
    timeout(SECOND, quiet.woken())
        .await
        .expect("woken by the lag");
    quiet.listening();
    server.publish("quiet");
    timeout(SECOND, quiet.woken())
        .await
        .expect("messages still come");
}

#[tokio::test]
async fn killed_subscriber_is_back_and_woken_within_a_second() {
    let server = Server::start();
    let store = connected(config(server.port)).await;
    let subscription = store.subscribe(&"job".into());
    assert_eq!(settles(&subscription, SECOND).await, Listening::Live);
    subscription.woken().await;
    for _ in 0..5 {
        server.cli("CLIENT KILL TYPE pubsub");
        server.publish("job");
        timeout(SECOND, subscription.woken()).await.expect("woken");
        live_within(&subscription, SECOND).await;
        // And now for real.
        server.publish("job");
        timeout(SECOND, subscription.woken()).await.expect("woken");
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(generation(&store), 1, "commands were not disturbed");
}

#[tokio::test]
async fn late_confirmation_is_waited_for_and_wakes() {
    let server = Server::start();
    let proxy = Proxy::start(server.port).await;
    let store = connected(config(proxy.port)).await;
    let first = store.subscribe(&"first".into());
    assert_eq!(settles(&first, SECOND).await, Listening::Live);
    proxy.delay_replies(500);
    let subscription = store.subscribe(&"job".into());
    sleep(Duration::from_millis(200)).await;
    assert_eq!(subscription.listening(), Listening::Pending);
    // Released in the gap: heard of by the confirmation itself.
    assert_eq!(settles(&subscription, SECOND).await, Listening::Live);
    timeout(Duration::from_millis(50), subscription.woken())
        .await
        .expect("woken");
}

#[tokio::test]
async fn ten_thousand_names_on_one_connection() {
    let server = Server::start();
    let store = connected(config(server.port)).await;
    let start = Instant::now();
    let subscriptions: Vec<_> = (0..10_000)
        .map(|i| store.subscribe(&format!("job-{i}").into()))
        .collect();
    for subscription in &subscriptions {
        assert_eq!(settles(subscription, 5 * SECOND).await, Listening::Live);
    }
    let took = start.elapsed();
    assert!(took < 3 * SECOND, "{took:?}");
    assert_eq!(server.clients("pubsub"), 1);
    for subscription in &subscriptions {
        timeout(SECOND, subscription.woken()).await.unwrap();
    }
    server.cli("CLIENT KILL TYPE pubsub");
    for subscription in &subscriptions {
        timeout(2 * SECOND, subscription.woken())
            .await
            .expect("woken on reconnect");
    }
    drop(subscriptions);
    let start = Instant::now();
    while !server.cli("PUBSUB CHANNELS").is_empty() {
        assert!(start.elapsed() < 2 * SECOND);
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn closing_ends_sockets_and_tasks() {
    let server = Server::start();
    let store = connected(config(server.port)).await;
    let subscription = store.subscribe(&"job".into());
    assert_eq!(settles(&subscription, SECOND).await, Listening::Live);
    assert_eq!(server.clients("normal") + server.clients("pubsub"), 2);
    let shared = Arc::downgrade(&store.shared);
    store.close();
    assert_eq!(*store.health().borrow(), Health::Closed);
    let result = store.submit(call(acquire("job"), 1000)).await;
    assert!(matches!(result, Err(NoReply::NotSent(_))), "{result:?}");
    let start = Instant::now();
    while server.clients("normal") + server.clients("pubsub") > 0 {
        assert!(start.elapsed() < SECOND, "sockets left");
        sleep(Duration::from_millis(5)).await;
    }
    drop((store, subscription));
    while shared.strong_count() > 0 {
        assert!(start.elapsed() < SECOND, "tasks left");
        sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn ended_runtime_closes_the_store() {
    let server = Server::start();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let (store, subscription) = runtime.block_on(async {
        let store = connected(config(server.port)).await;
        warm_up(&store).await;
        let subscription = store.subscribe(&"job".into());
        settles(&subscription, SECOND).await;
        (store, subscription)
    });
    // Polled outside of any runtime while ours lives: works.
    let reply = futures_executor(store.submit(call(acquire("job"), 1000))).unwrap();
    assert!(matches!(reply.answers[..], [Answer::Granted { .. }]));
    runtime.shutdown_timeout(SECOND);
    assert_eq!(*store.health().borrow(), Health::Closed);
    let result = futures_executor(store.submit(call(acquire("job"), 1000)));
    assert!(result.is_err());
    drop(subscription);
}

/// Blocks this thread on a future, without a runtime.
fn futures_executor<T>(future: BoxFuture<T>) -> T {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    let mut future = future;
    loop {
        match future.as_mut().poll(&mut context) {
            std::task::Poll::Ready(value) => return value,
            std::task::Poll::Pending => std::thread::park_timeout(SECOND),
        }
    }
}

#[tokio::test]
async fn inspection_tells_the_holder_and_what_its_client_says() {
    let server = Server::start();
    let store = connected(config(server.port)).await;
    let mut op = acquire("job");
    let client = store.shared.client_id;
    if let Verb::Acquire { owner, .. } = &mut op.verb {
        *owner = OwnerId::new(client, 7);
    }
    store.submit(call(op, 1000)).await.unwrap();
    let info = BTreeMap::from([("label".to_owned(), "it's me".to_owned())]);
    store.announce(info.clone(), MINUTE).await;
    let subscription = store.subscribe(&"job".into());
    settles(&subscription, SECOND).await;
    let snapshot = store
        .inspect(Kind::Plain, &"job".into(), SECOND)
        .await
        .unwrap();
    assert_eq!(snapshot.holders, [(OwnerId::new(client, 7).to_string(), 1)]);
    assert!(snapshot.remaining_ms.is_some_and(|ms| ms > 29_000));
    assert!(snapshot.token.is_some_and(|token| token > 0));
    assert_eq!(snapshot.waiting, Some(1));
    assert_eq!(snapshot.holder_info, info);
    store.retract().await;
    let snapshot = store
        .inspect(Kind::Plain, &"job".into(), SECOND)
        .await
        .unwrap();
    assert!(snapshot.holder_info.is_empty());
    let free = store
        .inspect(Kind::Plain, &"free".into(), SECOND)
        .await
        .unwrap();
    assert!(free.holders.is_empty() && free.remaining_ms.is_none() && free.token.is_none());
    server.cli("SET other x");
    match store.inspect(Kind::Plain, &"other".into(), SECOND).await {
        Err(NoReply::Refused(refusal)) => assert_eq!(refusal.kind, RefusalKind::Conflict),
        other => panic!("{other:?}"),
    }
    // What an access rule hides is missing, no more.
    let config = with_user(&server, "~* &* +@all -pubsub -get");
    let store = connected(config).await;
    let snapshot = store
        .inspect(Kind::Plain, &"job".into(), SECOND)
        .await
        .unwrap();
    assert_eq!(snapshot.holders.len(), 1);
    assert_eq!((snapshot.waiting, snapshot.token), (None, None));
}

#[tokio::test]
async fn client_of_the_user_is_left_alone() {
    let server = Server::start();
    let url = format!("redis://127.0.0.1:{}/0", server.port);
    let theirs = Client::new(FredConfig::from_url(&url).unwrap(), None, None, None);
    theirs.init().await.unwrap();
    let store = connected(RedisConfig::new(theirs.client_config()).unwrap()).await;
    warm_up(&store).await;
    store.close();
    drop(store);
    let pong: String = theirs.ping(None).await.unwrap();
    assert_eq!(pong, "PONG");
    theirs.quit().await.unwrap();
}

#[tokio::test]
async fn commands_killed_every_20_ms_leave_no_double_work() {
    let server = Server::start();
    let store = connected(config(server.port)).await;
    warm_up(&store).await;
    let end = Instant::now() + 2 * SECOND;
    let killer = async {
        while Instant::now() < end {
            sleep(Duration::from_millis(20)).await;
            server.cli("CLIENT KILL TYPE normal SKIPME yes");
        }
    };
    let mut answered = 0;
    let worker = async {
        let mut i = 0;
        while Instant::now() < end {
            i += 1;
            let acquire = call(acquire(&format!("k-{i}")), 500);
            if submit(&store, acquire).await.is_ok() {
                answered += 1;
            }
        }
    };
    tokio::join!(killer, worker);
    assert!(answered > 20, "{answered}");
    // The last kill may not have been noticed yet.
    let start = Instant::now();
    while let Err(failure) = submit(&store, call(acquire("after"), 500)).await {
        assert!(start.elapsed() < 3 * SECOND, "{failure:?}");
    }
}

/// A primary, its replica and a Sentinel that takes the primary for dead after half a second.
struct Watched {
    primary: Server,
    replica: Server,
    sentinel: Server,
}

impl Watched {
    fn start() -> Self {
        let primary = Server::start();
        let port = primary.port.to_string();
        let replica = Server::with(&["--replicaof", "127.0.0.1", &port]);
        let sentinel = Server::sentinel(primary.port);
        let start = StdInstant::now();
        while !sentinel.cli("SENTINEL REPLICAS main").contains("ip")
            || !replica
                .cli("INFO replication")
                .contains("master_link_status:up")
        {
            assert!(start.elapsed() < 15 * SECOND, "replica not seen");
            std::thread::sleep(Duration::from_millis(50));
        }
        Self {
            primary,
            replica,
            sentinel,
        }
    }

    fn config(&self) -> RedisConfig {
        let port = self.sentinel.port;
        let url = format!("redis-sentinel://127.0.0.1:{port}?sentinelServiceName=main");
        RedisConfig::from_url(&url).unwrap()
    }
}

#[tokio::test]
async fn sentinel_leads_to_the_new_primary_with_commands_and_messages() {
    let mut watched = Watched::start();
    let store = connected(watched.config()).await;
    warm_up(&store).await;
    let subscription = store.subscribe(&"job".into());
    assert_eq!(settles(&subscription, SECOND).await, Listening::Live);
    watched.primary.kill();
    let start = Instant::now();
    loop {
        let result = store.submit(call(acquire("job"), 500)).await;
        match result.map(|reply| reply.answers) {
            Ok(answers)
                if matches!(answers[..], [Answer::Granted { .. } | Answer::Taken { .. }]) =>
            {
                break;
            }
            _ => sleep(Duration::from_millis(20)).await,
        }
        assert!(start.elapsed() < 10 * SECOND, "no new primary");
    }
    assert_eq!(watched.replica.cli("EXISTS job"), "1");
    live_within(&subscription, 2 * SECOND).await;
    assert_eq!(watched.replica.listeners("job"), "1");
}

#[tokio::test]
async fn url_of_a_sentinel_as_if_it_were_a_server_is_refused() {
    let server = Server::start();
    let sentinel = Server::sentinel(server.port);
    let store = store_of(config(sentinel.port));
    let failure = store.first_connect(Instant::now() + 5 * SECOND).await;
    match failure {
        Err(ConnectFailure::Refused(refusal)) => {
            assert!(
                refusal.message.contains("redis-sentinel://"),
                "{}",
                refusal.message
            );
        }
        other => panic!("{other:?}"),
    }
}
