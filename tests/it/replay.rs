//! Copies of requests: twice, late, out of order, after their hold has moved on. They change nothing
//! but, at most, the count shown for a live hold, which the next thing said about it puts right.
//!
//! The requests are those that a client sent, recorded on their way and sent again on a connection
//! of their own. A copy that arrives before the deadline of its request, after the answer to that
//! request *and* after the release was answered, cannot come from a network: an answered request
//! has no copies under way. So the copies of an acquisition wait for the deadline to pass, where
//! the lock is free.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use leasehold::{LockClient, LossReason, ReleaseOutcome};

use crate::common::*;
use crate::support::{SIDES, Side, all_scripts_known, client_of, connected};

const LEASE: Duration = secs(30);
const COMMAND_TIMEOUT: Duration = secs(1);

/// A client behind a proxy that records what it sends about one name.
struct Recorded {
    proxy: Proxy,
    client: LockClient,
    cli: Cli,
    name: String,
}

/// What the server has of a name, the count apart.
#[derive(Clone, Debug, PartialEq)]
struct Shown {
    owners: Vec<String>,
    token: Option<String>,
}

impl Recorded {
    async fn start() -> Self {
        let proxy = Proxy::start(server().port());
        let client = client(&proxy.url()).await;
        all_scripts_known(&client).await;
        Self {
            client,
            cli: server().cli().await,
            proxy,
            name: unique_name(),
        }
    }

    /// Every script call about the name so far, oldest first.
    fn requests(&self) -> Vec<Vec<u8>> {
        let mut all = self.proxy.requests(&bytes(&self.name));
        all.retain(|wire| {
            let start = wire[..wire.len().min(40)].to_ascii_uppercase();
            start.windows(4).any(|part| part == b"EVAL")
        });
        all
    }

    async fn shown(&self) -> Shown {
        Shown {
            owners: self.hash().await.into_keys().collect(),
            token: self
                .cli
                .cmd(&["GET", &token_key(&self.name)])
                .await
                .text_if_any(),
        }
    }

    async fn hash(&self) -> BTreeMap<String, String> {
        self.cli.hash(&self.name).await
    }

    /// Sends all of these, in this order, and asserts that they changed nothing but the count, and
    /// made no lease longer than a lease from now.
    async fn send_again<'a>(&self, requests: impl IntoIterator<Item = &'a Vec<u8>>) {
        let before = self.shown().await;
        for request in requests {
            self.proxy.replay(request).await.ok();
        }
        assert_eq!(self.shown().await, before);
        let left = self.cli.pttl(&self.name).await;
        assert!(
            left <= LEASE.as_millis().try_into().unwrap(),
            "{left} ms left"
        );
    }

    /// Sends everything again in many orders: forwards, backwards, each twice, and by chance.
    async fn send_all_again(&self) {
        let all = self.requests();
        assert!(!all.is_empty());
        self.send_again(&all).await;
        self.send_again(all.iter().rev()).await;
        self.send_again(all.iter().flat_map(|one| [one, one])).await;
        for seed in 1..=scaled(3, 100) {
            self.send_again(shuffled(&all, seed)).await;
        }
    }

    /// Asserts that no script call so far can still run in time. The passing of time is the subject.
    async fn until_past_all_deadlines(&self) {
        tokio::time::sleep(COMMAND_TIMEOUT + ms(10)).await;
    }
}

async fn client(url: &str) -> LockClient {
    connected(|| {
        let builder = LockClient::builder().url(url).lease(LEASE);
        builder.command_timeout(COMMAND_TIMEOUT)
    })
    .await
}

fn shuffled(all: &[Vec<u8>], seed: u64) -> Vec<&Vec<u8>> {
    let mut order: Vec<_> = all.iter().collect();
    let mut chance = seed;
    for at in (1..order.len()).rev() {
        // Knuth's constants; any orders will do, but the same ones every time.
        chance = chance
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        order.swap(at, usize::try_from(chance >> 33).unwrap() % (at + 1));
    }
    order
}

/// Copies while the hold is live: only the count can be wrong, and not for long.
#[tokio::test]
async fn copies_of_all_requests_leave_a_live_hold_as_it_is() {
    for side in SIDES {
        copies_of_all_requests_leave_a_live_hold_as_it_is_of(side).await;
    }
}

async fn copies_of_all_requests_leave_a_live_hold_as_it_is_of(side: Side) {
    let it = Recorded::start().await;
    let mut ctx = it.client.context();
    let name = it.name.as_str();

    let outer = side.of(&mut ctx, name).acquire().await.unwrap();
    let alone = it.cli.pttl(name).await;
    it.send_all_again().await;
    assert_eq!(it.cli.count(name).await, Some(1));
    // The copy of an acquisition does not even lengthen the lease.
    assert!(it.cli.pttl(name).await <= alone);

    let inner = side.of(&mut ctx, name).acquire().await.unwrap();
    it.send_all_again().await;
    assert_eq!(it.cli.count(name).await, Some(2));

    let third = side.of(&mut ctx, name).acquire().await.unwrap();
    assert_eq!(
        third.release().await,
        ReleaseOutcome::StillHeld { depth: 2 }
    );
    outer.confirm().await.unwrap();
    for _ in 0..2 {
        it.send_all_again().await;
        // In time, or late: the next thing said about the hold puts the count right.
        outer.confirm().await.unwrap();
        assert_eq!(it.cli.count(name).await, Some(2));
        it.until_past_all_deadlines().await;
    }
    it.send_all_again().await;
    assert_eq!(
        it.cli.count(name).await,
        Some(2),
        "late copies count nothing"
    );

    assert_eq!(
        inner.release().await,
        ReleaseOutcome::StillHeld { depth: 1 }
    );
    it.send_all_again().await;
    assert!(outer.is_held());
    outer.confirm().await.unwrap();
    assert_eq!(it.cli.count(name).await, Some(1));

    // A count that is wrong at the end does not keep the lock.
    it.send_all_again().await;
    assert_eq!(outer.release().await, ReleaseOutcome::Released);
    assert!(!it.cli.exists(name).await);
    nothing_left(server(), name).await;
}

/// The watchdog's own next renewal puts the count right, without anybody asking.
#[tokio::test]
async fn a_renewal_puts_right_the_count_that_a_copy_left() {
    let proxy = Proxy::start(server().port());
    let lease = secs(6);
    let client = client_of(&proxy.url(), lease).await;
    let (cli, name) = (server().cli().await, unique_name());
    let mut ctx = client.context();
    let outer = ctx.lock(name.as_str()).acquire().await.unwrap();
    let mut rounds = 0;
    loop {
        let asked = Instant::now();
        let inner = ctx.lock(name.as_str()).acquire().await.unwrap();
        let nested = proxy.requests(&bytes(&name)).pop().unwrap();
        assert_eq!(
            inner.release().await,
            ReleaseOutcome::StillHeld { depth: 1 }
        );
        proxy.replay(&nested).await.ok();
        if cli.count(&name).await == Some(2) {
            break;
        }
        // It came too late, or a renewal came between.
        rounds += 1;
        let late = asked.elapsed() > ms(500);
        assert!(late || rounds < 3, "the copy came in time");
        assert!(rounds < 10, "never quick enough");
    }
    eventually(lease / 2, "the count is right", async || {
        cli.count(&name).await == Some(1)
    })
    .await;
    assert_eq!(outer.release().await, ReleaseOutcome::Released);
    nothing_left(server(), &name).await;
}

/// S3: what is left of an ended hold makes none, keeps none, and frees none.
#[tokio::test]
async fn late_copies_of_an_ended_hold_leave_a_free_lock_free() {
    for side in SIDES {
        late_copies_of_an_ended_hold_leave_a_free_lock_free_of(side).await;
    }
}

async fn late_copies_of_an_ended_hold_leave_a_free_lock_free_of(side: Side) {
    let it = Recorded::start().await;
    let mut ctx = it.client.context();
    let name = it.name.as_str();
    let outer = side.of(&mut ctx, name).acquire().await.unwrap();
    let inner = side.of(&mut ctx, name).acquire().await.unwrap();
    outer.confirm().await.unwrap();
    outer.extend(LEASE).await.unwrap();
    drop(inner);
    assert_eq!(outer.release().await, ReleaseOutcome::Released);

    // All but the acquisitions do nothing at any time.
    let all = it.requests();
    let token = token_key(name).into_bytes();
    let acquires = |wire: &Vec<u8>| wire.windows(token.len()).any(|part| part == token);
    it.send_again(all.iter().filter(|wire| !acquires(wire)))
        .await;
    assert!(!it.cli.exists(name).await);

    it.until_past_all_deadlines().await;
    it.send_all_again().await;
    assert!(!it.cli.exists(name).await);
    nothing_left(server(), name).await;
}

/// S3: nor do they touch the hold of the next owner: another process, or the same flow of work.
#[tokio::test]
async fn copies_of_an_ended_hold_do_not_touch_the_next_one() {
    for side in SIDES {
        copies_of_an_ended_hold_do_not_touch_the_next_one_of(side).await;
    }
}

async fn copies_of_an_ended_hold_do_not_touch_the_next_one_of(side: Side) {
    let it = Recorded::start().await;
    let other = client(&server().url()).await;
    let name = it.name.as_str();
    for own in [false, true] {
        let mut ctx = it.client.context();
        let outer = side.of(&mut ctx, name).acquire().await.unwrap();
        let inner = side.of(&mut ctx, name).acquire().await.unwrap();
        outer.extend(LEASE).await.unwrap();
        drop(inner);
        let first = outer.fencing_token().unwrap();
        assert_eq!(outer.release().await, ReleaseOutcome::Released);
        let old = it.requests();

        let mut others = other.context();
        let next = if own { &mut ctx } else { &mut others };
        let held = side.of(next, name).acquire().await.unwrap();
        let nested = side.of(next, name).acquire().await.unwrap();
        let hash = it.hash().await;
        let mut left = it.cli.pttl(name).await;
        if side == Side::Read {
            // Until then a copy of the acquisition may enter beside those who read.
            it.until_past_all_deadlines().await;
        }
        // In time and late, in every order.
        for _ in 0..2 {
            for seed in 1..=scaled(5, 200) {
                it.send_again(shuffled(&old, seed)).await;
                assert_eq!(it.hash().await, hash);
                let now = it.cli.pttl(name).await;
                assert!(now <= left && now > 0, "{left} ms left, then {now} ms");
                left = now;
            }
            it.until_past_all_deadlines().await;
        }
        held.confirm().await.unwrap();
        assert!(held.fencing_token().unwrap() > first);
        assert_eq!(
            nested.release().await,
            ReleaseOutcome::StillHeld { depth: 1 }
        );
        assert_eq!(held.release().await, ReleaseOutcome::Released);
    }
    nothing_left(server(), name).await;
}

/// An operator's forced release names the owner: a copy of it frees nobody else.
#[tokio::test]
async fn a_copy_of_a_forced_release_does_not_touch_the_next_hold() {
    let it = Recorded::start().await;
    let name = it.name.as_str();
    let forced = it.client.lock(name).acquire().await.unwrap();
    assert!(it.client.force_release(name).await.unwrap());
    assert_eq!(forced.loss_reason(), Some(LossReason::Forced));
    let old = it.requests();
    drop(forced);
    let held = it.client.lock(name).acquire().await.unwrap();
    let hash = it.hash().await;
    for seed in 1..=5 {
        it.send_again(shuffled(&old, seed)).await;
        assert_eq!(it.hash().await, hash);
    }
    held.confirm().await.unwrap();
    assert_eq!(held.release().await, ReleaseOutcome::Released);
    nothing_left(server(), name).await;
}

/// Copies of a hold that was lost do not bring it back, nor do they touch who came after.
#[tokio::test]
async fn copies_of_a_lost_hold_do_not_bring_it_back() {
    let it = Recorded::start().await;
    let name = it.name.as_str();
    let lost = it.client.lock(name).acquire().await.unwrap();
    lost.extend(LEASE).await.unwrap();
    it.cli.cmd(&["DEL", name]).await.ok();
    // Past the deadline of the acquisition: as long as that, a copy may still be on its way.
    it.until_past_all_deadlines().await;
    it.send_all_again().await;
    assert!(!it.cli.exists(name).await);
    assert!(lost.confirm().await.is_err());
    assert_eq!(lost.loss_reason(), Some(LossReason::KeyGone));

    let next = it.client.lock(name).acquire().await.unwrap();
    let hash = it.hash().await;
    it.send_all_again().await;
    assert_eq!(
        lost.release().await,
        ReleaseOutcome::Lost(LossReason::KeyGone)
    );
    it.send_all_again().await;
    assert_eq!(it.hash().await, hash);
    next.confirm().await.unwrap();
    assert_eq!(next.release().await, ReleaseOutcome::Released);
    nothing_left(server(), name).await;
}

/// Everything of a busy minute, sent again while others go in and out: nobody notices.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_under_load_disturb_nobody() {
    let it = Recorded::start().await;
    let other = client(&server().url()).await;
    let name = it.name.as_str();
    for round in 0..scaled(15, 300) {
        let mut ctx = it.client.context();
        let outer = ctx.lock(name).acquire().await.unwrap();
        let inner = ctx.lock(name).acquire().await.unwrap();
        let _ = inner.release().await;
        let waiting = {
            let mut lock = other.lock(name);
            tokio::spawn(async move { lock.acquire().await })
        };
        let old = it.requests();
        let late = old.iter().skip(old.len().saturating_sub(40));
        // While it is held, of all earlier holds; then of this one too, while the other holds it.
        for request in late.clone() {
            it.proxy.replay(request).await.ok();
        }
        assert_eq!(outer.release().await, ReleaseOutcome::Released);
        let granted = waiting.await.unwrap().unwrap();
        for request in late {
            it.proxy.replay(request).await.ok();
        }
        granted
            .confirm()
            .await
            .unwrap_or_else(|error| panic!("round {round}: {error:?}"));
        assert_eq!(granted.release().await, ReleaseOutcome::Released);
    }
    nothing_left(server(), name).await;
}
