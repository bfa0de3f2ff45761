//! Fencing tokens: each hold's is greater than those of all holds granted before, whatever the server
//! forgets.

use std::sync::Arc;

use leasehold::{Error, FencingToken, LockClient, LossReason};
use tokio::sync::Mutex;

use crate::common::*;
use crate::support::client_of;

async fn client(server: &Server) -> LockClient {
    client_of(&server.url(), secs(30)).await
}

/// Holds the lock once, and says with which token.
async fn hold_once(client: &LockClient, name: &str) -> FencingToken {
    let guard = client.lock(name).acquire().await.unwrap();
    let token = guard.fencing_token().unwrap();
    guard.release().await.into_result().unwrap();
    token
}

/// B60: what the lock protects sees only growing tokens: here it is a counter that is written to by
/// 8 tasks of two clients, 10 000 times.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_rise_over_ten_thousand_holds_of_eight_tasks() {
    const HOLDS: usize = 10_000;
    let server = server();
    let name = unique_name();
    let seen = Arc::new(Mutex::new(Vec::with_capacity(HOLDS)));
    let clients = [client(server).await, client(server).await];
    let tasks: Vec<_> = (0..8)
        .map(|task| {
            let (client, name, seen) = (clients[task % 2].clone(), name.clone(), seen.clone());
            tokio::spawn(async move {
                loop {
                    let guard = client.lock(name.as_str()).acquire().await.unwrap();
                    {
                        // Nobody else is inside: that is what the lock is for.
                        let mut seen = seen.try_lock().unwrap();
                        if seen.len() == HOLDS {
                            return;
                        }
                        seen.push(guard.fencing_token().unwrap());
                    }
                    guard.release().await.into_result().unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let seen = seen.lock().await;
    assert_eq!(seen.len(), HOLDS);
    for pair in seen.windows(2) {
        assert!(pair[0] < pair[1], "{pair:?}");
    }
    assert!(i64::from(seen[HOLDS - 1]) < 1 << 53);
    nothing_left(server, &name).await;
}

/// B60: data that is lost takes the counter with it. Each time another client comes, who has no memory
/// of its own of what was.
#[tokio::test]
async fn tokens_rise_over_lost_data() {
    let server = Server::start();
    let name = unique_name();
    let key = token_key(&name);
    let cli = server.cli().await;
    let mut last = hold_once(&client(&server).await, &name).await;
    let mut check = async |what: &str| {
        let token = hold_once(&client(&server).await, &name).await;
        assert!(token > last, "{what}: {token} after {last}");
        last = token;
    };
    let old = server.snapshot().await;
    check("nothing lost").await;
    cli.cmd(&["FLUSHALL"]).await.ok();
    check("FLUSHALL").await;
    cli.cmd(&["DEL", &key]).await.ok();
    check("key deleted or evicted").await;
    cli.cmd(&["PEXPIRE", &key, "1"]).await.ok();
    eventually(secs(1), "expired", async || !cli.exists(&key).await).await;
    check("key expired").await;
    server.restart().await;
    check("restart with empty memory").await;
    server.restart_from(&old).await;
    check("restart with old memory").await;
    server.cmd(&["SET", &key, "5"]).await.ok();
    check("counter set back").await;
}

/// B60: a counter that runs ahead of the clock (another kind of counter was there before, or somebody
/// set it) is continued, one by one, and remembered by the clients that saw it when it is lost.
#[tokio::test]
async fn tokens_of_a_counter_in_the_future_rise_also_when_it_is_lost() {
    let server = Server::start();
    let name = unique_name();
    let key = token_key(&name);
    let cli = server.cli().await;
    let witness = client(&server).await;
    let future: u64 = 5_000_000_000_000_000;
    cli.cmd(&["SET", &key, &future.to_string()]).await.ok();
    let first = hold_once(&witness, &name).await;
    assert_eq!(first.value(), future + 1);
    assert_eq!(
        hold_once(&client(&server).await, &name).await.value(),
        future + 2
    );
    let last = hold_once(&witness, &name).await;
    assert_eq!(last.value(), future + 3);
    cli.cmd(&["FLUSHALL"]).await.ok();
    assert!(hold_once(&witness, &name).await > last);
    // Other names have nothing to do with it.
    let other = hold_once(&witness, &unique_name()).await;
    assert!(other.value() < future, "{other}");
}

/// A token that is beyond what a double counts exactly cannot be continued: nothing is granted.
#[tokio::test]
async fn counter_at_its_end_is_a_conflict_and_never_repeats() {
    let server = server();
    let client = client(server).await;
    for spoiled in [
        "9007199254740991",
        "9006099743113215",
        "18446744073709551615",
    ] {
        let name = unique_name();
        server.cmd(&["SET", &token_key(&name), spoiled]).await.ok();
        let result = client.lock(name.as_str()).acquire().await;
        assert!(matches!(result, Err(Error::Conflict { .. })), "{result:?}");
        let cli = server.cli().await;
        assert_eq!(cli.cmd(&["GET", &token_key(&name)]).await.text(), spoiled);
        nothing_left(server, &name).await;
    }
}

/// The counter goes when nobody has used it for long: after an hour to an hour and a half by default, never
/// before twice a lease;
/// `None` keeps it, and what has no expiry (Java's) gets none.
#[tokio::test]
async fn counters_expire_after_their_retention_unless_they_are_to_stay() {
    let server = server();
    let cli = server.cli().await;
    let by_default = unique_name();
    hold_once(&client(server).await, &by_default).await;
    let left = cli.pttl(&token_key(&by_default)).await;
    assert!((3_600_000..=5_400_000).contains(&left), "{left}");
    let with = async |retention| {
        let builder = LockClient::builder().url(server.url());
        builder.token_retention(retention).build().await.unwrap()
    };
    let short = unique_name();
    hold_once(&with(Some(ms(1))).await, &short).await;
    let left = cli.pttl(&token_key(&short)).await;
    assert!((60_000..=90_000).contains(&left), "{left}");
    let kept = unique_name();
    hold_once(&with(None).await, &kept).await;
    assert_eq!(cli.pttl(&token_key(&kept)).await, -1);
    // Java's: a bare number without expiry, which we continue.
    hold_once(&with(Some(secs(60))).await, &kept).await;
    assert_eq!(cli.pttl(&token_key(&kept)).await, -1);
    cli.cmd(&["DEL", &token_key(&kept)]).await.ok();
}

/// All levels of a hold have its token; the next hold has another.
#[tokio::test]
async fn re_entry_keeps_the_token_and_the_next_hold_takes_a_new_one() {
    let server = server();
    let name = unique_name();
    let client = client(server).await;
    let mut ctx = client.context();
    let outer = ctx.lock(name.as_str()).acquire().await.unwrap();
    let token = outer.fencing_token().unwrap();
    let inner = ctx.lock(name.as_str()).acquire().await.unwrap();
    assert_eq!(inner.fencing_token().unwrap(), token);
    // The outer guard may go first.
    let _ = outer.release().await;
    assert_eq!(inner.fencing_token().unwrap(), token);
    let third = ctx.lock(name.as_str()).acquire().await.unwrap();
    assert_eq!(third.fencing_token().unwrap(), token);
    drop((inner, third));
    assert!(hold_once(&client, &name).await > token);
    nothing_left(server, &name).await;
}

/// A token read after the loss would look like a good one.
#[tokio::test]
async fn token_of_a_lost_hold_is_refused() {
    let server = server();
    let name = unique_name();
    let client = client(server).await;
    let mut ctx = client.context();
    let guard = ctx.lock(name.as_str()).lease(ms(1500)).acquire().await;
    let guard = guard.unwrap();
    assert!(guard.fencing_token().is_ok());
    guard.lost().cancelled().await;
    let Err(Error::Lost { reason, .. }) = guard.fencing_token() else {
        panic!("{:?}", guard.fencing_token());
    };
    assert_eq!(reason, LossReason::DeadlinePassed);
    drop(guard);

    let guard = client.lock(name.as_str()).acquire().await.unwrap();
    server.cmd(&["DEL", &name]).await.ok();
    let confirmed = guard.confirm().await;
    assert!(matches!(
        confirmed,
        Err(Error::Lost {
            reason: LossReason::KeyGone,
            ..
        })
    ));
    assert!(guard.fencing_token().is_err());
    drop(guard);
    nothing_left(server, &name).await;
}

/// However many counters were seen ahead of the clock, none is forgotten.
#[tokio::test]
async fn no_floor_is_forgotten_however_many_there_are() {
    let server = Server::start();
    let client = client_of(&server.url(), secs(10)).await;
    let cli = server.cli().await;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let ahead = now.unwrap() + secs(3600);
    let names: Vec<_> = (0..1100).map(|i| format!("ahead:{i:04}")).collect();
    let mut first = Vec::new();
    for name in &names {
        let counter = ahead.as_micros().to_string();
        cli.cmd(&["SET", &token_key(name), &counter]).await.ok();
        let guard = client.lock(name.as_str()).acquire().await.unwrap();
        first.push(guard.fencing_token().unwrap());
    }
    cli.cmd(&["FLUSHALL"]).await.ok();
    for (name, before) in names.iter().zip(first) {
        let guard = client.lock(name.as_str()).acquire().await.unwrap();
        assert!(guard.fencing_token().unwrap() > before, "{name}");
    }
}
