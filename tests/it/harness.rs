//! The ground the other tests stand on, tested.

use std::net::TcpStream as StdStream;
use std::time::Instant;

use crate::common::faults::{Leg, Matching};
use crate::common::*;

/// A client of a proxy, and what it thinks of a request.
async fn through(proxy: &Proxy) -> Cli {
    Cli::connect(proxy.port()).await
}

async fn fails(cli: &Cli, args: &[&str]) -> std::io::ErrorKind {
    cli.try_cmd(args).await.expect_err("an answer came").kind()
}

/// Whether an answer stays away. The wait is the subject here: silence cannot be signalled.
async fn is_silent(cli: &Cli, args: &[&str]) -> bool {
    tokio::time::timeout(ms(60), cli.try_cmd(args))
        .await
        .is_err()
}

/// Whether a process runs: neither gone nor a zombie.
fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ")
        .is_some_and(|(_, state)| !state.starts_with('Z'))
}

// ---- servers ----

#[tokio::test]
async fn a_lock_left_behind_is_found() {
    let name = unique_name();
    let cli = server().cli().await;
    nothing_left(server(), &name).await;
    cli.cmd(&["HSET", &name, "owner", "2", "other", "1"])
        .await
        .ok();
    cli.cmd(&["SET", &token_key(&name), "7"]).await.ok();
    assert_eq!(cli.count(&name).await, Some(3));
    assert_eq!(cli.pttl(&name).await, -1);
    assert_eq!(cli.keys_with(&name).await.len(), 2);
    cli.cmd(&["DEL", &name]).await.ok();
    assert_eq!(cli.count(&name).await, None);
    nothing_left(server(), &name).await;
}

#[tokio::test]
#[should_panic(expected = "has left")]
async fn nothing_left_panics_on_a_key() {
    let name = unique_name();
    server()
        .cmd(&["HSET", &format!("app:lock:{{{name}}}"), "owner", "1"])
        .await
        .ok();
    nothing_left(server(), &name).await;
}

#[tokio::test]
async fn subscribers_are_counted_by_the_server() {
    let name = unique_name();
    let (cli, waiter) = (server().cli().await, server().cli().await);
    cli.until_waiters(&name, 0).await;
    waiter.cmd(&["SUBSCRIBE", &channel(&name)]).await.ok();
    cli.until_waiters(&name, 1).await;
    assert_eq!(cli.channels_with(&name).await, [channel(&name)]);
    drop(waiter);
    nothing_left(server(), &name).await;
}

#[test]
fn channels_are_redissons() {
    assert_eq!(channel("job"), "redisson_lock__channel:{job}");
    assert_eq!(channel("a:{t}:b"), "redisson_lock__channel:a:{t}:b");
    assert_eq!(token_key("job"), "redisson_lock_token:{job}");
}

#[tokio::test]
async fn scripts_are_counted_and_monitored() {
    let server = Server::start();
    let mut monitor = server.monitor().await;
    let cli = server.cli().await;
    let before = cli.script_calls().await;
    for _ in 0..3 {
        cli.cmd(&["EVAL", "return redis.call('SET', KEYS[1], 'x')", "1", "job"])
            .await
            .ok();
    }
    assert_eq!(cli.script_calls().await - before, 3);
    assert_eq!(monitor.script_calls("job").await, 3);
    assert_eq!(
        monitor
            .count(|line| line.contains("lua] \"SET\" \"job\""))
            .await,
        3
    );
    monitor.clear().await;
    assert_eq!(monitor.script_calls("job").await, 0);
}

#[tokio::test]
async fn a_stopped_server_is_silent_and_goes_on() {
    let server = Server::start_with(&["--maxmemory-policy", "noeviction"]);
    let cli = server.cli().await;
    server.stop();
    assert!(is_silent(&cli, &["PING"]).await);
    server.cont();
    assert_eq!(cli.cmd(&["PING"]).await.text(), "PONG");
    let policy = cli
        .cmd(&["CONFIG", "GET", "maxmemory-policy"])
        .await
        .texts();
    assert_eq!(policy[1], "noeviction");
}

#[tokio::test]
async fn a_restarted_server_has_the_memory_that_was_asked_for() {
    let server = Server::start();
    let cli = server.cli().await;
    cli.cmd(&["SET", "key", "old"]).await.ok();
    let old = server.snapshot().await;
    cli.cmd(&["SET", "key", "new"]).await.ok();
    let pid = server.pid();

    server.restart_keeping().await;
    assert_ne!(server.pid(), pid);
    assert!(
        cli.try_cmd(&["PING"]).await.is_err(),
        "the connection survived"
    );
    assert_eq!(cli.cmd(&["GET", "key"]).await.text(), "new");

    server.restart_from(&old).await;
    assert_eq!(server.cmd(&["GET", "key"]).await.text(), "old");

    server.kill();
    assert!(StdStream::connect(("127.0.0.1", server.port())).is_err());
    server.restart().await;
    assert!(server.cmd(&["GET", "key"]).await.is_nil());
}

#[tokio::test]
async fn a_dropped_server_is_gone_even_if_it_was_stopped() {
    let server = Server::start();
    let (pid, dir) = (server.pid(), server.dir().to_owned());
    server.stop();
    assert!(is_alive(pid));
    drop(server);
    assert!(!is_alive(pid));
    assert!(!dir.exists());
}

/// SIGKILL leaves a test process no time to clean up.
#[tokio::test]
async fn no_server_and_no_worker_outlives_a_killed_test_process() {
    let mut worker = Worker::spawn("harness::parent_worker", &[]);
    let server_pid: u32 = worker.line().await.unwrap().parse().unwrap();
    let inner_pid: u32 = worker.line().await.unwrap().parse().unwrap();
    let dir = worker.line().await.unwrap();
    assert!(is_alive(server_pid) && is_alive(inner_pid));
    worker.kill();
    worker.wait().await;
    let gone = async || {
        !is_alive(server_pid) && !is_alive(inner_pid) && !std::path::Path::new(&dir).exists()
    };
    eventually(secs(10), "server, worker and folder are gone", gone).await;
}

/// A test process with a server and a worker, both stopped.
#[tokio::test]
async fn parent_worker() {
    let Some(mut me) = WorkerSide::if_spawned() else {
        return;
    };
    let server = Server::start();
    let mut inner = Worker::spawn("harness::echo_worker", &[]);
    inner.expect("ready ").await;
    server.stop();
    inner.stop();
    me.say(&server.pid().to_string());
    me.say(&inner.pid().to_string());
    me.say(server.dir().to_str().unwrap());
    me.line().await;
}

// ---- workers ----

#[tokio::test]
async fn echo_worker() {
    let Some(mut me) = WorkerSide::if_spawned() else {
        return;
    };
    me.say(&format!(
        "ready {}",
        std::env::var("GREETING").unwrap_or_default()
    ));
    while let Some(line) = me.line().await {
        me.say(&line);
    }
}

#[tokio::test]
async fn a_worker_talks_stops_goes_on_and_ends() {
    let mut worker = Worker::spawn("harness::echo_worker", &[("GREETING", "hello")]);
    worker.expect("ready hello").await;
    worker.say("one").await;
    worker.expect("one").await;

    worker.stop();
    worker.say("two").await;
    // The wait is the subject: a stopped process says nothing.
    assert!(tokio::time::timeout(ms(60), worker.line()).await.is_err());
    worker.cont();
    worker.expect("two").await;

    worker.close_stdin();
    assert_eq!(worker.line().await, None);
    assert!(worker.wait().await.success());
}

#[tokio::test]
async fn another_program_is_a_worker_too_and_can_be_killed() {
    let program = std::path::Path::new("/bin/cat");
    let mut worker = Worker::spawn_program(program, &[], &[]);
    worker.say("as it is").await;
    worker.expect("as it is").await;
    worker.kill();
    assert!(!worker.wait().await.success());
}

// ---- the proxy ----

#[tokio::test]
async fn the_proxy_is_invisible_without_faults() {
    let proxy = Proxy::start(server().port());
    let cli = through(&proxy).await;
    let name = unique_name();
    let big = "x".repeat(300_000);
    cli.cmd(&["SET", &name, &big]).await.ok();
    assert_eq!(cli.cmd(&["GET", &name]).await.text(), big);
    let nested = cli
        .cmd(&["EVAL", "return {1, {'two', {}}, false}", "0"])
        .await;
    assert_eq!(format!("{nested:?}"), r#"[1, ["two", []], nil]"#);
    cli.cmd(&["DEL", &name]).await.ok();
    assert_eq!(proxy.count(&bytes(&name)), 3);
    assert_eq!(proxy.count(&command("get")), 1);
    assert_eq!(proxy.connections(), 1);
    drop(cli);
    eventually(secs(5), "the connection is closed", async || {
        proxy.connections() == 0
    })
    .await;
}

/// After every kind of value in one go, the reply that is swallowed is still the one that was
/// meant.
#[tokio::test]
async fn the_proxy_counts_the_replies_of_resp3_too() {
    const KINDS: &str = "string integer double bignum null array set map attrib push true verbatim";
    let proxy = Proxy::start(server().port());
    let name = unique_name();
    let other = format!("{name}:2");
    let swallowed = proxy.inject(Fault::reply(bytes("second"), Act::Swallow(Then::Close)));
    let mut wire = raw(&proxy).await;
    write(&mut wire, &["HELLO", "3"]).await;
    write(&mut wire, &["SUBSCRIBE", &name, &other]).await;
    for kind in KINDS.split(' ') {
        write(&mut wire, &["DEBUG", "PROTOCOL", kind]).await;
    }
    write(&mut wire, &["UNSUBSCRIBE"]).await;
    write(&mut wire, &["ECHO", "first"]).await;
    write(&mut wire, &["ECHO", "second"]).await;
    swallowed.hit().await;
    let all = read(&mut wire, 100_000).await;
    assert!(all.contains("Some real reply"), "{all}");
    assert!(all.contains(">3\r\n$11\r\nunsubscribe"), "{all}");
    assert!(all.ends_with("$5\r\nfirst\r\n"), "{all}");
}

#[tokio::test]
async fn a_swallowed_reply_was_run_and_closes_the_connection() {
    let proxy = Proxy::start(server().port());
    let direct = server().cli().await;
    for (then, error) in [
        (Then::Close, std::io::ErrorKind::UnexpectedEof),
        (Then::Reset, std::io::ErrorKind::ConnectionReset),
    ] {
        let name = unique_name();
        let cli = through(&proxy).await;
        let fault = Fault::reply(bytes(&name), Act::Swallow(then)).nth(2);
        let swallowed = proxy.inject(fault);
        assert_eq!(cli.cmd(&["INCR", &name]).await.int(), 1);
        assert_eq!(cli.cmd(&["PING"]).await.text(), "PONG");
        assert!(!swallowed.is_hit());
        assert_eq!(fails(&cli, &["INCR", &name]).await, error, "{then:?}");
        swallowed.hit().await;
        assert_eq!(direct.cmd(&["GET", &name]).await.int(), 2);
        // A new connection, and the fault is over.
        assert_eq!(cli.cmd(&["INCR", &name]).await.int(), 3);
        direct.cmd(&["DEL", &name]).await.ok();
    }
}

#[tokio::test]
async fn after_a_discarded_reply_requests_arrive_and_replies_do_not() {
    let proxy = Proxy::start(server().port());
    let name = unique_name();
    let cli = through(&proxy).await;
    proxy.inject(Fault::reply(command("INCR"), Act::Swallow(Then::Discard)));
    let mut wire = raw(&proxy).await;
    for _ in 0..3 {
        write(&mut wire, &["INCR", &name]).await;
    }
    let direct = server().cli().await;
    let all = async || direct.cmd(&["GET", &name]).await.text_if_any().as_deref() == Some("3");
    eventually(secs(5), "three requests arrived", all).await;
    assert!(is_mute(&mut wire).await);
    proxy.heal();
    write(&mut wire, &["INCR", &name]).await;
    assert!(
        is_mute(&mut wire).await,
        "a connection came back that had lost bytes"
    );
    assert_eq!(cli.cmd(&["PING"]).await.text(), "PONG");
    direct.cmd(&["DEL", &name]).await.ok();
}

#[tokio::test]
async fn a_swallowed_request_never_runs() {
    let proxy = Proxy::start(server().port());
    let name = unique_name();
    let cli = through(&proxy).await;
    proxy.inject(Fault::request(bytes(&name), Act::Swallow(Then::Reset)));
    cli.cmd(&["PING"]).await.ok();
    assert_eq!(
        fails(&cli, &["INCR", &name]).await,
        std::io::ErrorKind::ConnectionReset
    );
    assert!(!server().cli().await.exists(&name).await);
}

/// The request arrives although its client has long gone: the late copy.
#[tokio::test]
async fn a_held_request_arrives_when_it_is_released() {
    let proxy = Proxy::start(server().port());
    let name = unique_name();
    let cli = through(&proxy).await;
    let held = proxy.inject(Fault::request(bytes(&name), Act::Hold));
    assert!(is_silent(&cli, &["SET", &name, "late"]).await);
    drop(cli);
    held.hit().await;
    let direct = server().cli().await;
    assert!(!direct.exists(&name).await);
    held.release();
    eventually(secs(5), "the held request arrived", async || {
        direct.exists(&name).await
    })
    .await;
    direct.cmd(&["DEL", &name]).await.ok();
}

#[tokio::test]
async fn a_held_reply_holds_back_what_follows_it() {
    let proxy = Proxy::start(server().port());
    let mut wire = raw(&proxy).await;
    let held = proxy.inject(Fault::reply(bytes("first"), Act::Hold));
    write(&mut wire, &["ECHO", "first"]).await;
    write(&mut wire, &["ECHO", "second"]).await;
    held.hit().await;
    assert!(is_mute(&mut wire).await);
    assert_eq!(
        through(&proxy).await.cmd(&["ECHO", "other"]).await.text(),
        "other"
    );
    held.release();
    let both = "$5\r\nfirst\r\n$6\r\nsecond\r\n";
    assert_eq!(read(&mut wire, both.len()).await, both);
}

#[tokio::test]
async fn a_confirmation_can_be_late_and_a_message_lost() {
    let proxy = Proxy::start(server().port());
    let (name, direct) = (unique_name(), server().cli().await);
    let mut wire = raw(&proxy).await;
    let held = proxy.inject(Fault::reply(command("SUBSCRIBE"), Act::Hold));
    write(&mut wire, &["SUBSCRIBE", &name]).await;
    held.hit().await;
    direct.until_subscribers(&name, 1).await;
    assert!(is_mute(&mut wire).await);
    held.release();
    let confirmation = format!("*3\r\n$9\r\nsubscribe\r\n$37\r\n{name}\r\n:1\r\n");
    assert_eq!(read(&mut wire, confirmation.len()).await, confirmation);

    let lost = Fault::message(bytes("two"), Act::Swallow(Then::Close));
    let lost = proxy.inject(lost);
    direct.cmd(&["PUBLISH", &name, "one"]).await.ok();
    direct.cmd(&["PUBLISH", &name, "two"]).await.ok();
    lost.hit().await;
    let message = format!("*3\r\n$7\r\nmessage\r\n$37\r\n{name}\r\n$3\r\none\r\n");
    assert_eq!(read(&mut wire, message.len()).await, message);
    assert_eq!(read(&mut wire, 1).await, "", "the connection is still open");
}

#[tokio::test]
async fn delays_add_up_and_do_not_queue_up() {
    let proxy = Proxy::start(server().port());
    let mut wire = raw(&proxy).await;
    proxy.inject(Fault::Delay {
        requests: ms(30),
        replies: ms(50),
    });
    let (start, ruler) = (Instant::now(), Ruler::start());
    for _ in 0..20 {
        write(&mut wire, &["ECHO", "x"]).await;
    }
    assert_eq!(read(&mut wire, 20 * 7).await.len(), 20 * 7);
    let took = start.elapsed();
    assert!(took >= ms(80), "{took:?}");
    assert!(took < ms(800) + ruler.allowance(), "{took:?}");

    // One that is under way arrives at once when the link heals.
    proxy.inject(Fault::Delay {
        requests: ms(0),
        replies: secs(60),
    });
    let echo = proxy.inject(Fault::reply(bytes("y"), Act::Delay(secs(60))));
    write(&mut wire, &["ECHO", "y"]).await;
    echo.hit().await;
    proxy.heal();
    assert_eq!(read(&mut wire, 7).await.len(), 7);
}

#[tokio::test]
async fn held_directions_lose_nothing() {
    let proxy = Proxy::start(server().port());
    let (name, direct) = (unique_name(), server().cli().await);
    let mut wire = raw(&proxy).await;
    proxy.inject(Fault::HoldReplies);
    write(&mut wire, &["INCR", &name]).await;
    eventually(secs(5), "the request arrived", async || {
        direct.exists(&name).await
    })
    .await;
    assert!(is_mute(&mut wire).await);
    proxy.heal();
    assert_eq!(read(&mut wire, 4).await, ":1\r\n");

    proxy.inject(Fault::HoldRequests);
    write(&mut wire, &["INCR", &name]).await;
    assert!(is_mute(&mut wire).await);
    assert_eq!(direct.cmd(&["GET", &name]).await.int(), 1);
    proxy.heal();
    assert_eq!(read(&mut wire, 4).await, ":2\r\n");
    direct.cmd(&["DEL", &name]).await.ok();
}

#[tokio::test]
async fn a_black_hole_takes_connections_old_and_new() {
    for fault in [Fault::BlackHole, Fault::HalfOpen] {
        let server = Server::start();
        let proxy = Proxy::start(server.port());
        let (old, direct) = (through(&proxy).await, server.cli().await);
        old.cmd(&["PING"]).await.ok();
        let clients = async || direct.cmd(&["CLIENT", "LIST"]).await.text().lines().count();
        assert_eq!(clients().await, 2);
        proxy.inject(fault.clone());
        let new = through(&proxy).await;
        assert!(is_silent(&old, &["SET", "key", "old"]).await, "{fault:?}");
        assert!(is_silent(&new, &["SET", "key", "new"]).await, "{fault:?}");
        proxy.heal();
        assert!(
            through(&proxy).await.cmd(&["GET", "key"]).await.is_nil(),
            "{fault:?}"
        );
    }
}

#[tokio::test]
async fn half_open_closes_at_the_server_only() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let direct = server.cli().await;
    let clients = async || direct.cmd(&["CLIENT", "LIST"]).await.text().lines().count();
    let mut wire = raw(&proxy).await;
    write(&mut wire, &["ECHO", "x"]).await;
    read(&mut wire, 7).await;
    assert_eq!(clients().await, 2);
    proxy.inject(Fault::HalfOpen);
    eventually(secs(5), "the server's end is closed", async || {
        clients().await == 1
    })
    .await;
    assert!(is_mute(&mut wire).await);
}

#[tokio::test]
async fn new_connections_are_refused_until_the_proxy_heals() {
    let proxy = Proxy::start(server().port());
    let cli = through(&proxy).await;
    cli.cmd(&["PING"]).await.ok();
    proxy.refuse();
    let refused = tokio::net::TcpStream::connect(("127.0.0.1", proxy.port())).await;
    assert_eq!(
        refused.unwrap_err().kind(),
        std::io::ErrorKind::ConnectionRefused
    );
    cli.cmd(&["PING"]).await.ok();
    proxy.cut(Then::Close);
    assert!(cli.try_cmd(&["PING"]).await.is_err());
    assert_eq!(
        fails(&cli, &["PING"]).await,
        std::io::ErrorKind::ConnectionRefused
    );
    proxy.heal();
    cli.cmd(&["PING"]).await.ok();
}

#[tokio::test]
async fn a_recorded_request_can_be_sent_again() {
    let proxy = Proxy::start(server().port());
    let name = unique_name();
    let cli = through(&proxy).await;
    let script = "return redis.call('INCRBY', KEYS[1], ARGV[1])";
    for by in ["1", "10"] {
        cli.cmd(&["EVAL", script, "1", &name, by]).await.ok();
    }
    cli.cmd(&["PING"]).await.ok();
    assert_eq!(proxy.replay_last(&bytes(&name)).await.int(), 21);
    let first = &proxy.requests(&bytes(&name))[0];
    assert_eq!(proxy.replay(first).await.int(), 22);
    cli.cmd(&["DEL", &name]).await.ok();
}

#[tokio::test]
async fn a_restarted_server_is_reached_through_the_same_proxy() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let cli = through(&proxy).await;
    cli.cmd(&["PING"]).await.ok();
    server.kill();
    assert!(cli.try_cmd(&["PING"]).await.is_err());
    server.restart().await;
    cli.cmd(&["PING"]).await.ok();
}

#[test]
fn faults_are_printed_as_they_are_written() {
    let fault = Fault::reply(bytes("job\r"), Act::Swallow(Then::Reset)).nth(2);
    let printed = r#"One { leg: Reply, of: bytes("job\r"), nth: 2, act: Swallow(Reset) }"#;
    assert_eq!(format!("{fault:?}"), printed);
    let any = Fault::One {
        leg: Leg::Message,
        of: Matching::Any,
        nth: 1,
        act: Act::Hold,
    };
    assert_eq!(any, Fault::message(Matching::Any, Act::Hold));
}

// ---- a client that does not wait for its answers ----

async fn raw(proxy: &Proxy) -> tokio::net::TcpStream {
    tokio::net::TcpStream::connect(("127.0.0.1", proxy.port()))
        .await
        .unwrap()
}

async fn write(wire: &mut tokio::net::TcpStream, args: &[&str]) {
    use tokio::io::AsyncWriteExt as _;
    wire.write_all(&resp::request(args)).await.unwrap();
}

/// Reads this many bytes, or fewer if the connection ends.
async fn read(wire: &mut tokio::net::TcpStream, len: usize) -> String {
    use tokio::io::AsyncReadExt as _;
    let mut text = String::new();
    let reading = wire.take(len as u64);
    let mut reading = std::pin::pin!(reading);
    let read = tokio::time::timeout(secs(10), reading.read_to_string(&mut text)).await;
    read.expect("no bytes within 10 s").unwrap();
    text
}

/// Whether nothing comes. The wait is the subject here: silence cannot be signalled.
async fn is_mute(wire: &mut tokio::net::TcpStream) -> bool {
    tokio::time::timeout(ms(60), wire.peek(&mut [0]))
        .await
        .is_err()
}
