//! Everything at once: clients behind links that break, tasks that leave at any moment, a server that
//! stops. What must never happen is watched for all the time; what must be gone, at the end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use leasehold::{Error, LockClient, LockGuard};
use parking_lot::Mutex;

use crate::common::{self, Fault, Proxy, Server, Then, ms, secs};

/// What is watched for one name.
#[derive(Default)]
struct Watched {
    name: String,
    holder: Mutex<Option<Arc<LockGuard>>>,
    newest_token: AtomicU64,
    grants: AtomicUsize,
}

impl Watched {
    fn granted(&self, guard: &Arc<LockGuard>) {
        let mut holder = self.holder.lock();
        // Ours first: if both say "held" now, then at one moment both did.
        let Ok(token) = guard.fencing_token() else {
            return;
        };
        if let Some(other) = &*holder {
            assert!(
                !(other.is_held() && guard.is_held()),
                "two hold {}",
                self.name
            );
        }
        let before = self.newest_token.fetch_max(token.value(), Ordering::SeqCst);
        assert!(
            token.value() > before,
            "{}: token {token} after {before}",
            self.name
        );
        self.grants.fetch_add(1, Ordering::SeqCst);
        *holder = Some(Arc::clone(guard));
    }

    fn leaving(&self, guard: &Arc<LockGuard>) {
        let mut holder = self.holder.lock();
        if holder.as_ref().is_some_and(|held| Arc::ptr_eq(held, guard)) {
            *holder = None;
        }
    }
}

/// Chance with a seed, so that a run can be told.
struct Chance(u64);

impl Chance {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

async fn contend(client: LockClient, names: Arc<Vec<Watched>>, mut chance: Chance, end: Instant) {
    while Instant::now() < end {
        let watched = &names[usize::try_from(chance.below(names.len() as u64)).unwrap()];
        let mut ctx = client.context();
        let mut lock = ctx.lock(watched.name.as_str());
        let acquired = match chance.below(4) {
            0 => lock.try_acquire().await,
            1 => lock.acquire_timeout(ms(chance.below(300))).await.map(Some),
            // Leaves in the middle.
            2 => {
                let limit = ms(chance.below(20));
                match tokio::time::timeout(limit, lock.acquire()).await {
                    Ok(guard) => guard.map(Some),
                    Err(_) => Ok(None),
                }
            }
            _ => lock.acquire_timeout(secs(2)).await.map(Some),
        };
        let guard = match acquired {
            Ok(Some(guard)) => Arc::new(guard),
            Ok(None) => continue,
            Err(error) => {
                assert!(error.is_retryable(), "{error:?}");
                continue;
            }
        };
        watched.granted(&guard);
        if chance.below(3) == 0 {
            match ctx
                .lock(watched.name.as_str())
                .acquire_timeout(ms(100))
                .await
            {
                Ok(_inner) => {}
                Err(Error::Lost { .. }) => {}
                Err(error) => assert!(error.is_retryable(), "{error:?}"),
            }
        }
        if chance.below(4) == 0 {
            // Now and then past a renewal.
            tokio::time::sleep(ms(chance.below(400))).await;
        } else {
            tokio::time::sleep(ms(chance.below(3))).await;
        }
        watched.leaving(&guard);
        let guard = Arc::into_inner(guard).expect("nobody else keeps it");
        if chance.below(2) == 0 {
            let _ = guard.release().await;
        } else {
            drop(guard);
        }
    }
}

async fn break_things(server: &Server, proxies: &[Proxy], mut chance: Chance, end: Instant) {
    while Instant::now() < end {
        let proxy = &proxies[usize::try_from(chance.below(proxies.len() as u64)).unwrap()];
        let long = ms(chance.below(500));
        match chance.below(6) {
            0 => proxy.cut(Then::Close),
            1 => proxy.cut(Then::Reset),
            2 => {
                proxy.black_hole();
                tokio::time::sleep(long).await;
                proxy.heal();
            }
            3 => {
                server.stop();
                tokio::time::sleep(long).await;
                server.cont();
            }
            4 => {
                let delay = ms(chance.below(80));
                let _delayed = proxy.inject(Fault::Delay {
                    requests: delay / 2,
                    replies: delay,
                });
                tokio::time::sleep(long).await;
                proxy.heal();
            }
            _ => {
                proxy.refuse();
                proxy.cut(Then::Close);
                tokio::time::sleep(long).await;
                proxy.heal();
            }
        }
        tokio::time::sleep(ms(20 + chance.below(150))).await;
    }
    proxies.iter().for_each(Proxy::heal);
}

/// Whatever breaks, no two hold one name, tokens grow, and in the end nothing is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_two_hold_and_nothing_stays_behind_whatever_breaks() {
    let seed = std::env::var("LEASEHOLD_SEED").map_or_else(
        |_| u64::from(std::process::id()) | 1 << 40,
        |seed| seed.parse().unwrap(),
    );
    println!("LEASEHOLD_SEED={seed}");
    let server = Server::start();
    let proxies: Vec<_> = (0..3).map(|_| Proxy::start(server.port())).collect();
    let names: Arc<Vec<_>> = Arc::new(
        (0..4)
            .map(|_| Watched {
                name: common::unique_name(),
                ..Watched::default()
            })
            .collect(),
    );
    let end = Instant::now() + common::scaled(secs(4), secs(120));
    let mut tasks = Vec::new();
    let mut clients = Vec::new();
    for (i, proxy) in (0_u64..).zip(&proxies) {
        let client = LockClient::builder()
            .url(proxy.url())
            .lease(ms(600))
            .build()
            .await
            .unwrap();
        for j in 0..5 {
            let chance = Chance(seed.wrapping_mul(2 * (10 * i + j) + 3));
            tasks.push(tokio::spawn(contend(
                client.clone(),
                Arc::clone(&names),
                chance,
                end,
            )));
        }
        clients.push(client);
    }
    break_things(&server, &proxies, Chance(seed), end).await;
    for task in tasks {
        task.await.unwrap();
    }
    for watched in &*names {
        let grants = watched.grants.load(Ordering::SeqCst);
        assert!(grants > 10, "only {grants} grants of {}", watched.name);
        common::nothing_left(&server, &watched.name).await;
    }
    for client in clients {
        let guard = client
            .lock(names[0].name.as_str())
            .acquire_timeout(secs(3))
            .await
            .unwrap();
        assert_eq!(guard.release().await.into_result(), Ok(()));
        assert_eq!(client.close(secs(2)).await.unconfirmed, 0);
    }
}
