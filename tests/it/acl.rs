//! The access rules of docs/acl.md, word for word: enough for a whole life, and what happens without
//! some of them.

use std::time::{Duration, Instant};

use leasehold::{Error, KeyScheme, LockClient, LossReason, PubSub, ReleaseOutcome};

use crate::common::*;
use crate::support::words;

/// The rules in docs/acl.md under this heading: the lines of the first fenced block after it.
fn documented(heading: &str) -> Vec<String> {
    let text = include_str!("../../docs/acl.md");
    let (_, section) = text.split_once(&format!("## {heading}\n")).unwrap();
    let (_, block) = section.split_once("```text\n").unwrap();
    let (block, _) = block.split_once("```").unwrap();
    block.split_whitespace().map(str::to_owned).collect()
}

/// The rules in docs/acl.md for this setting, in the table of what some settings need.
fn documented_for(setting: &str) -> Vec<String> {
    let text = include_str!("../../docs/acl.md");
    let (_, row) = text.split_once(&format!("| {setting} | `")).unwrap();
    let (rules, _) = row.split_once('`').unwrap();
    let rules = rules.replace("\\|", "|");
    rules.split_whitespace().map(str::to_owned).collect()
}

/// The rules for `PubSub::Sharded`: in place of the plain ones.
fn documented_sharded(heading: &str) -> Vec<String> {
    let plain = ["+publish", "+subscribe", "+unsubscribe", "+pubsub|numsub"];
    let mut rules = documented(heading);
    rules.retain(|rule| !plain.contains(&rule.as_str()));
    rules.extend(documented_for("`PubSub::Sharded`"));
    rules
}

/// The rules for `PubSub::Both`: the plain ones, and more.
fn documented_both(heading: &str) -> Vec<String> {
    let mut rules = documented(heading);
    rules.extend(documented_for("`PubSub::Both`"));
    rules
}

/// A server with the user `app`, who has these rules and no others.
async fn server_with(rules: &[String]) -> Server {
    let server = Server::start();
    allow(&server, rules).await;
    server
}

async fn allow(server: &Server, rules: &[String]) {
    let mut command = vec!["ACL", "SETUSER", "app", "reset", "on", ">pw"];
    command.extend(rules.iter().map(String::as_str));
    server.cmd(&command).await.ok();
}

fn builder(server: &Server, scheme: &KeyScheme) -> leasehold::LockClientBuilder {
    LockClient::builder()
        .url(format!("redis://app:pw@127.0.0.1:{}", server.port()))
        .key_scheme(scheme.clone())
        .lease(secs(3))
        .connect_timeout(secs(5))
        .label("acl")
}

/// Everything a lock does, all of it permitted: nothing is refused, not even silently.
async fn a_whole_life(server: &Server, client: LockClient, messages: bool) {
    let cli = server.cli().await;
    cli.cmd(&["ACL", "LOG", "RESET"]).await.ok();
    let name = format!("order:{}", unique_name());
    let mut ctx = client.context();
    let outer = ctx.lock(name.as_str()).acquire().await.unwrap();
    let inner = ctx.lock(name.as_str()).acquire().await.unwrap();
    outer.confirm().await.unwrap();
    outer.extend(ms(3100)).await.unwrap();
    assert_eq!(
        inner.release().await,
        ReleaseOutcome::StillHeld { depth: 1 }
    );
    let mut second = client.lock(name.as_str());
    let waiting = tokio::spawn(async move { second.acquire().await });
    if messages {
        eventually(secs(5), "listened for", async || {
            let seen = client.inspect(name.as_str()).await;
            seen.is_ok_and(|seen| seen.waiting == Some(1))
        })
        .await;
    }
    let mut last = None;
    eventually(secs(5), "announced", async || {
        last = client.inspect(name.as_str()).await.ok();
        let holder = last.as_ref().and_then(|seen| seen.holder.as_ref());
        holder.is_some_and(|holder| holder.label.as_deref() == Some("acl"))
    })
    .await;
    let seen = last.unwrap();
    assert_eq!(seen.token, outer.fencing_token().ok());
    assert!(seen.holder.unwrap().remaining.is_some());
    // Longer than the lease: it is renewed. The passing of time is the subject.
    tokio::time::sleep(ms(3400)).await;
    assert_eq!(outer.loss_reason(), None);
    // The scripts are forgotten: in full again.
    cli.cmd(&["SCRIPT", "FLUSH"]).await.ok();
    assert_eq!(outer.release().await, ReleaseOutcome::Released);
    let granted = waiting.await.unwrap().unwrap();
    assert!(client.force_release(name.as_str()).await.unwrap());
    assert_eq!(
        granted.release().await,
        ReleaseOutcome::Lost(LossReason::Forced)
    );
    drop(client.lock(name.as_str()).acquire().await.unwrap());
    nothing_left(server, &name).await;
    let report = client.close(secs(2)).await;
    assert_eq!((report.lost, report.unconfirmed), (0, 0));
    let infos = cli.keys_with("client:").await;
    assert!(infos.is_empty(), "{infos:?}");
    let refused = cli.cmd(&["ACL", "LOG"]).await.list();
    assert!(!messages || refused.is_empty(), "{refused:?}");
}

fn prefix() -> KeyScheme {
    KeyScheme::Prefix("app".to_owned())
}

/// B72: the documented rules are enough for names under one prefix in Redisson's scheme.
#[tokio::test]
async fn documented_rules_for_redissons_names_are_enough() {
    let server = server_with(&documented("Redisson's names")).await;
    let client = builder(&server, &KeyScheme::Redisson)
        .build()
        .await
        .unwrap();
    a_whole_life(&server, client, true).await;
}

/// B72: the documented rules are enough for a prefix of ours.
#[tokio::test]
async fn documented_rules_for_a_prefix_are_enough() {
    let server = server_with(&documented("A prefix")).await;
    let client = builder(&server, &prefix()).build().await.unwrap();
    a_whole_life(&server, client, true).await;
}

/// B72: the documented rules for sharded messages are enough, and the plain ones are not needed.
#[tokio::test]
async fn documented_rules_for_sharded_messages_are_enough() {
    for (heading, scheme) in schemes() {
        let server = server_with(&documented_sharded(heading)).await;
        let client = builder(&server, &scheme).pubsub(PubSub::Sharded);
        a_whole_life(&server, client.build().await.unwrap(), true).await;
    }
}

/// B72: the documented rules for both kinds of messages are enough.
#[tokio::test]
async fn documented_rules_for_both_kinds_of_messages_are_enough() {
    for (heading, scheme) in schemes() {
        let server = server_with(&documented_both(heading)).await;
        let client = builder(&server, &scheme).pubsub(PubSub::Both);
        a_whole_life(&server, client.build().await.unwrap(), true).await;
    }
}

/// B72: what fair locks need besides is enough: to take one, to wait for one, to leave, to be looked at.
#[tokio::test]
async fn documented_rules_for_fair_locks_are_enough() {
    for (heading, scheme) in schemes() {
        let mut rules = documented(heading);
        rules.extend(documented_for("`fair_lock`"));
        if scheme == KeyScheme::Redisson {
            rules.extend(documented_for("`fair_lock`, Redisson's names"));
        }
        let server = server_with(&rules).await;
        let client = builder(&server, &scheme).build().await.unwrap();
        let name = format!("order:{}", unique_name());
        let cli = server.cli().await;
        cli.cmd(&["ACL", "LOG", "RESET"]).await.ok();
        let held = client.fair_lock(name.as_str()).acquire().await.unwrap();
        let tried = client.fair_lock(name.as_str()).try_acquire().await;
        assert!(tried.unwrap().is_none());
        let mut waits = client.fair_lock(name.as_str());
        let left = waits.acquire_timeout(ms(200)).await;
        assert!(matches!(left, Err(Error::TimedOut { .. })), "{left:?}");
        let waiting = tokio::spawn(async move { waits.acquire().await });
        eventually(secs(5), "queued", async || {
            let seen = client.fair_lock(name.as_str()).inspect().await;
            seen.is_ok_and(|seen| seen.waiting == Some(1))
        })
        .await;
        // Until it has said that it is there.
        tokio::time::sleep(ms(2300)).await;
        assert_eq!(held.release().await, ReleaseOutcome::Released);
        let next = waiting.await.unwrap().unwrap();
        assert!(
            client
                .fair_lock(name.as_str())
                .force_release()
                .await
                .unwrap()
        );
        drop(next);
        nothing_left(&server, &name).await;
        let refused = cli.cmd(&["ACL", "LOG"]).await.list();
        assert!(refused.is_empty(), "{refused:?}");
    }
}

/// The key schemes, by their headings in docs/acl.md.
fn schemes() -> [(&'static str, KeyScheme); 2] {
    [
        ("Redisson's names", KeyScheme::Redisson),
        ("A prefix", prefix()),
    ]
}

/// Starts to wait for what `holder` holds, has it released once the wait is asleep, and says how long
/// the waiter then took.
async fn heard_after(server: &Server, holder: &LockClient, waiter: LockClient) -> Duration {
    let name = unique_name();
    let guard = holder.lock(name.as_str()).acquire().await.unwrap();
    let mut monitor = server.monitor().await;
    let mut lock = waiter.lock(name.as_str());
    let waiting = tokio::spawn(async move {
        let guard = lock.acquire().await.unwrap();
        (guard, Instant::now())
    });
    // Once at first, and once behind its subscription.
    eventually(secs(5), "it asked twice", async || {
        monitor.script_calls(&name).await >= 2
    })
    .await;
    let released = Instant::now();
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    let (guard, granted) = waiting.await.unwrap();
    assert_eq!(guard.release().await, ReleaseOutcome::Released);
    // What may not be unsubscribed ends with its connection.
    waiter.close(secs(2)).await;
    nothing_left(server, &name).await;
    granted.saturating_duration_since(released)
}

/// Whoever publishes both ways is heard either way: no waiter sleeps to its cap of two seconds.
#[tokio::test]
async fn both_kinds_of_messages_are_heard_by_either_kind_of_listener() {
    let server = server_with(&documented_both("A prefix")).await;
    let holder = builder(&server, &prefix()).lease(secs(30));
    let holder = holder.pubsub(PubSub::Both).build().await.unwrap();
    let mut rules = documented_sharded("A prefix");
    rules.extend(documented_both("A prefix"));
    allow(&server, &rules).await;
    for kind in [PubSub::Plain, PubSub::Sharded, PubSub::Both] {
        is_heard(&server, &holder, kind).await;
    }
    // Without the right to publish the sharded way the plain one is heard all the same.
    rules.push("-spublish".to_owned());
    allow(&server, &rules).await;
    is_heard(&server, &holder, PubSub::Both).await;
}

/// Asserts that a waiter with this kind of messages hears of `holder`'s releases. On a busy machine it
/// may be slow to; who hears nothing is never fast.
async fn is_heard(server: &Server, holder: &LockClient, kind: PubSub) {
    let mut took = Vec::new();
    while took.len() < 10 {
        let waiter = builder(server, &prefix()).pubsub(kind).build().await;
        let now = heard_after(server, holder, waiter.unwrap()).await;
        if now < ms(800) {
            return;
        }
        took.push(now);
    }
    panic!("{kind:?}: {took:?}");
}

/// B72: without what sharded messages need waiters poll, and who may not subscribe is told once which
/// rule is missing.
#[tokio::test]
async fn without_sharded_messages_waiters_poll_and_the_missing_rule_is_named() {
    for missing in ["-ssubscribe", "-sunsubscribe", "-spublish", "resetchannels"] {
        let log = Log::start();
        let mut rules = documented_sharded("A prefix");
        rules.push(missing.to_owned());
        let server = server_with(&rules).await;
        let client = async || {
            let builder = builder(&server, &prefix()).pubsub(PubSub::Sharded);
            builder.lease(secs(30)).build().await.unwrap()
        };
        let (holder, waiter) = (client().await, client().await);
        let ruler = Ruler::start();
        let took = heard_after(&server, &holder, waiter).await;
        assert!(took < secs(3) + ruler.allowance(), "{missing}: {took:?}");
        let named = log.count(&["WARN", "waiters will poll", "&app:channel:*", "+ssubscribe"]);
        let refused = matches!(missing, "-ssubscribe" | "resetchannels");
        assert_eq!(named, usize::from(refused), "{missing}: {}", log.text());
    }
}

/// B72: every one of the documented commands is there for something: without it something fails, or
/// is refused silently. Else the list would grow for ever.
#[tokio::test]
async fn every_documented_command_is_needed() {
    let rules = documented("A prefix");
    let server = server_with(&rules).await;
    let mut monitor = server.monitor().await;
    let client = builder(&server, &prefix()).build().await.unwrap();
    a_whole_life(&server, client, true).await;
    // A full hash in other use, and the user's last wait ended: what else there is to call.
    let client = builder(&server, &prefix()).build().await.unwrap();
    let cli = server.cli().await;
    cli.cmd(&["HSET", "app:lock:{odd}", "a", "b"]).await.ok();
    let odd = client.lock("odd").try_acquire().await;
    assert!(matches!(odd, Err(Error::Conflict { .. })), "{odd:?}");
    // Not every server shows this one to a monitor; nobody else here calls it.
    let stats = cli.cmd(&["INFO", "commandstats"]).await.text();
    let lines = monitor.lines().await;
    let called = |command: &str| {
        let quoted = format!("\"{command}\"");
        lines
            .iter()
            .any(|line| line.to_lowercase().contains(&quoted))
    };
    for rule in rules.iter().filter(|rule| rule.starts_with('+')) {
        let command = rule[1..].split('|').next().unwrap();
        let counted = command == "client" && stats.contains("cmdstat_client");
        assert!(called(command) || counted, "nobody calls {command}");
    }
}

/// B72: new users of Redis 7 have no channels. Locks work, by polling, and it is said once what is
/// missing.
#[tokio::test]
async fn without_channels_waiters_poll_and_the_missing_rule_is_named() {
    for scheme in [KeyScheme::Redisson, prefix()] {
        let log = Log::start();
        let heading = match scheme {
            KeyScheme::Redisson => "Redisson's names",
            _ => "A prefix",
        };
        let mut rules = documented(heading);
        rules.retain(|rule| !rule.starts_with('&'));
        rules.push("resetchannels".to_owned());
        let server = server_with(&rules).await;
        let client = builder(&server, &scheme).build().await.unwrap();
        a_whole_life(&server, client, false).await;
        let channel = match scheme {
            KeyScheme::Redisson => "&redisson_lock__channel:*",
            _ => "&app:channel:*",
        };
        assert_eq!(log.count(&["WARN", channel]), 1, "{}", log.text());
    }
}

/// B72: without `PUBLISH` or `SUBSCRIBE` the same.
#[tokio::test]
async fn without_publish_or_subscribe_waiters_poll() {
    for missing in ["publish", "subscribe", "unsubscribe", "ping"] {
        let mut rules = documented("A prefix");
        rules.push(format!("-{missing}"));
        let server = server_with(&rules).await;
        let client = builder(&server, &prefix()).build().await.unwrap();
        let guard = client.lock("job").acquire().await.unwrap();
        let mut lock = client.lock("job");
        let waiting = tokio::spawn(async move { lock.acquire_timeout(secs(5)).await });
        // Let it find the lock taken.
        tokio::task::yield_now().await;
        assert_eq!(guard.release().await, ReleaseOutcome::Released, "{missing}");
        let granted = waiting.await.unwrap().unwrap();
        assert_eq!(granted.release().await, ReleaseOutcome::Released);
    }
}

/// B72: messages switched off need no channel at all.
#[tokio::test]
async fn switched_off_messages_need_no_channel() {
    let mut rules = documented("A prefix");
    rules.retain(|rule| !rule.starts_with('&'));
    rules.extend(["resetchannels", "-publish", "-subscribe", "-unsubscribe"].map(str::to_owned));
    let server = server_with(&rules).await;
    let log = Log::start();
    let client = builder(&server, &prefix()).pubsub(PubSub::Off);
    a_whole_life(&server, client.build().await.unwrap(), false).await;
    assert_eq!(log.count(&["poll"]), 0, "asked for, so nobody is warned");
}

/// B72, B83: what is missing is named, and nothing is held.
#[tokio::test]
async fn missing_permission_is_denied_and_named() {
    for (missing, named) in [
        ("-evalsha", "+evalsha"),
        ("-eval", "+eval"),
        ("-hset", "hset"),
        ("-pexpire", "pexpire"),
        ("-set", "set"),
        ("-get", "get"),
        ("-time", "time"),
        ("resetkeys", "key"),
    ] {
        let mut rules = documented("A prefix");
        rules.push(missing.to_owned());
        let server = server_with(&rules).await;
        let client = builder(&server, &prefix()).build().await.unwrap();
        let result = client.lock("job").acquire().await;
        let Err(error @ Error::Denied { .. }) = result else {
            panic!("{missing}: {result:?}");
        };
        assert!(!error.is_retryable());
        let words = words(&error);
        assert!(words.to_lowercase().contains(named), "{missing}: {words}");
        assert!(words.contains("job"), "{words}");
        assert!(
            !server.cli().await.exists("app:lock:{job}").await,
            "{missing}"
        );
        // Permitted now: the next call works, without a new client.
        allow(&server, &documented("A prefix")).await;
        let guard = client.lock("job").acquire().await.unwrap();
        assert_eq!(guard.release().await, ReleaseOutcome::Released);
    }
}

/// B72: permission taken away while the lock is held: the holder's own clock decides.
#[tokio::test]
async fn permission_withdrawn_is_not_a_loss_before_the_deadline() {
    let server = server_with(&documented("A prefix")).await;
    let client = builder(&server, &prefix()).build().await.unwrap();
    let guard = client.lock("job").acquire().await.unwrap();
    server
        .cmd(&["ACL", "SETUSER", "app", "-evalsha", "-eval"])
        .await
        .ok();
    let confirmed = guard.confirm().await;
    assert!(
        matches!(confirmed, Err(Error::Denied { .. })),
        "{confirmed:?}"
    );
    assert!(guard.is_held());
    guard.lost().cancelled().await;
    assert_eq!(guard.loss_reason(), Some(LossReason::DeadlinePassed));
}
