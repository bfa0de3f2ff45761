//! The shape of the API, and documents that tell the truth about it.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use leasehold::{
    CloseReport, Error, Fence, FencingToken, Holder, Inspection, KeyScheme, Lock, LockClient,
    LockClientBuilder, LockContext, LockGuard, LossReason, MultiGuard, MultiLock, MultiRelease,
    NotAToken, PubSub, ReleaseOutcome, Stale,
};

use crate::common::{self, secs};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn goes_anywhere<T: Send + Sync + 'static>() {}

fn may_move<F: Future + Send>(future: F) -> F {
    future
}

/// B78: pinned, so that no later field takes it away.
#[test]
fn guards_locks_and_contexts_go_anywhere() {
    goes_anywhere::<LockGuard>();
    goes_anywhere::<Lock>();
    goes_anywhere::<LockContext>();
    goes_anywhere::<MultiLock>();
    goes_anywhere::<MultiGuard>();
    goes_anywhere::<MultiRelease>();
    goes_anywhere::<LockClient>();
    goes_anywhere::<LockClientBuilder>();
    goes_anywhere::<Error>();
    goes_anywhere::<LossReason>();
    goes_anywhere::<ReleaseOutcome>();
    goes_anywhere::<FencingToken>();
    goes_anywhere::<Fence>();
    goes_anywhere::<NotAToken>();
    goes_anywhere::<Stale>();
    goes_anywhere::<CloseReport>();
    goes_anywhere::<Inspection>();
    goes_anywhere::<Holder>();
    goes_anywhere::<KeyScheme>();
    goes_anywhere::<PubSub>();
}

/// Every future of the API is `Send`, by itself and inside others.
#[tokio::test]
async fn futures_may_be_spawned_wherever_they_stand() {
    let client = may_move(LockClient::builder().in_memory().build())
        .await
        .unwrap();
    let mut ctx = client.context();
    let guard = may_move(ctx.lock("a").acquire()).await.unwrap();
    let inner = may_move(ctx.lock("a").acquire_timeout(secs(1))).await;
    may_move(guard.run(async {})).await.unwrap();
    may_move(guard.confirm()).await.unwrap();
    may_move(guard.extend(secs(40))).await.unwrap();
    let _ = may_move(inner.unwrap().release()).await;
    may_move(ctx.scope(async {})).await;
    may_move(client.inspect("a")).await.unwrap();
    may_move(ctx.lock("a").inspect()).await.unwrap();
    assert!(
        may_move(client.lock("a").try_acquire())
            .await
            .unwrap()
            .is_none()
    );
    assert!(may_move(client.force_release("a")).await.unwrap());
    drop(guard);
    let mut multi = MultiLock::new([ctx.lock("a"), ctx.rw_lock("b").read()]);
    let guard = may_move(multi.acquire()).await.unwrap();
    may_move(guard.run(async {})).await.unwrap();
    may_move(guard.confirm()).await.unwrap();
    let _ = may_move(guard.release()).await;
    let _ = may_move(multi.acquire_timeout(secs(1))).await.unwrap();
    let _ = may_move(multi.try_acquire()).await.unwrap();
    let work = multi.run(async |_| Ok::<_, Error>(()));
    may_move(work).await.unwrap();
    let work = multi.run_timeout(secs(1), async |_| Ok::<_, Error>(()));
    may_move(work).await.unwrap();
    may_move(client.close(secs(1))).await;
}

/// A nested acquisition in a function, called through a boxed future, in a spawned task.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nested_work_may_be_boxed_and_spawned() {
    type Boxed<'a> = std::pin::Pin<Box<dyn Future<Output = Result<u32, Error>> + Send + 'a>>;

    fn descend(ctx: &mut LockContext, levels: u32) -> Boxed<'_> {
        Box::pin(async move {
            let guard = ctx.lock("a").acquire().await?;
            match levels {
                1 => Ok(guard.depth()),
                _ => descend(ctx, levels - 1).await,
            }
        })
    }

    let client = LockClient::in_memory();
    let mut ctx = client.context();
    let depth = tokio::spawn(async move { descend(&mut ctx, 5).await });
    assert_eq!(depth.await.unwrap().unwrap(), 5);
    let next = client.lock("a").acquire_timeout(secs(1)).await;
    assert_eq!(next.unwrap().depth(), 1);
}

/// `run` takes closures that borrow, and its future may still be spawned.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_may_borrow_and_be_spawned() {
    async fn count(client: &LockClient, words: &[String], total: &mut usize) -> Result<u32, Error> {
        let mut lock = client.lock("a");
        let work = lock.run(async |guard: &LockGuard| {
            for word in words {
                *total += word.len();
                tokio::task::yield_now().await;
            }
            Ok::<_, Error>(guard.depth())
        });
        may_move(work).await
    }

    let client = LockClient::in_memory();
    let task = tokio::spawn(async move {
        let words = ["one".to_owned(), "three".to_owned()];
        let mut total = 0;
        let depth = count(&client, &words, &mut total).await.unwrap();
        let mut ctx = client.context();
        let mut lock = ctx.lock("b");
        let nested = lock.run(async |_| {
            // The context is free while its lock is held: another level, through it.
            let inner = ctx.lock("b").acquire().await?;
            Ok::<_, Error>(inner.depth())
        });
        (total, depth, nested.await.unwrap())
    });
    assert_eq!(task.await.unwrap(), (8, 1, 2));
}

/// `run` speaks the caller's own error type.
#[tokio::test]
async fn run_returns_the_error_of_the_work() {
    #[derive(Debug)]
    enum Mine {
        Lock,
        Work,
    }
    impl From<Error> for Mine {
        fn from(_: Error) -> Self {
            Self::Lock
        }
    }
    let client = LockClient::in_memory();
    let mut lock = client.lock("a");
    let failed = lock.run(async |_| Err::<(), _>(Mine::Work)).await;
    assert!(matches!(failed, Err(Mine::Work)));
    // Released in the background.
    let next = client.lock("a").acquire_timeout(secs(1)).await;
    assert_eq!(next.unwrap().depth(), 1);
    let mut lock = client.lock("");
    let refused = lock.run(async |_| Ok::<(), Mine>(())).await;
    assert!(matches!(refused, Err(Mine::Lock)));
}

/// What the README shows first is what `cargo run --example quickstart` runs.
#[test]
fn the_readme_begins_with_the_quickstart() {
    let readme = read("README.md");
    let (_, rest) = readme.split_once("```rust\n").unwrap();
    let (program, _) = rest.split_once("```").unwrap();
    let example = read("examples/quickstart.rs");
    let (header, example) = example.split_once("\n\n").unwrap();
    assert!(header.lines().all(|line| line.starts_with("//!")));
    assert_eq!(program, example);
    for command in ["scripts/demo", "scripts/test"] {
        assert!(root().join(command).is_file() && readme.contains(command));
    }
}

/// The rows of the tables of `text`, cell by cell, without the ticks.
fn rows(text: &str) -> Vec<Vec<String>> {
    text.lines()
        .filter_map(|line| line.strip_prefix("| ")?.strip_suffix('|'))
        .map(|row| {
            row.split('|')
                .map(|cell| cell.trim().replace('`', ""))
                .collect()
        })
        .collect()
}

/// docs/protocol.md names every script, with its keys as the script's own head has them.
#[test]
fn the_protocol_names_every_script_and_its_keys() {
    let protocol = read("docs/protocol.md");
    let documented: BTreeSet<(String, String)> = rows(&protocol)
        .into_iter()
        .filter(|row| {
            Path::new(&row[0])
                .extension()
                .is_some_and(|ext| ext == "lua")
        })
        .map(|row| (row[0].clone(), row[1].clone()))
        .collect();
    let folder = fs::read_dir(root().join("src/store/redis/lua")).unwrap();
    let there: BTreeSet<(String, String)> = folder
        .map(|entry| {
            let path = entry.unwrap().path();
            let text = read(&path);
            let keys = text.lines().find_map(|line| line.strip_prefix("-- KEYS"));
            let keys = keys.map_or("none".to_owned(), |keys| {
                let keys = keys.trim().strip_prefix("per op: ").unwrap();
                keys.replace(" (field: owner id, value: hold count)", "")
            });
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, keys)
        })
        .collect();
    assert_eq!(documented, there);
}

/// The keys and channels of docs/protocol.md are those that a server sees, and it sees no others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_protocol_names_every_key_and_channel() {
    let protocol = rows(&read("docs/protocol.md"));
    let row = |what: &str| {
        let row = protocol.iter().find(|row| row[0] == what);
        row.unwrap_or_else(|| panic!("no row `{what}`")).clone()
    };
    let (lock, token, channel, client) = (
        row("lock"),
        row("token counter"),
        row("channel"),
        row("client"),
    );
    let server = common::Server::start();
    let cli = server.cli().await;
    for (column, scheme) in [
        (2, KeyScheme::Redisson),
        (3, KeyScheme::Prefix("app".to_owned())),
    ] {
        cli.cmd(&["FLUSHALL"]).await.ok();
        let builder = LockClient::builder().url(server.url()).key_scheme(scheme);
        let locks = builder.build().await.unwrap();
        let guard = locks.lock("name").acquire().await.unwrap();
        let mut second = locks.lock("name");
        let waiting = tokio::spawn(async move { second.acquire().await.unwrap() });
        cli.until_subscribers(&channel[column], 1).await;

        let uuid = cli.hash(&lock[column]).await;
        let (uuid, _) = uuid.keys().next().unwrap().rsplit_once(':').unwrap();
        let client = client[column].replace("<uuid>", uuid);
        let expected = BTreeSet::from([lock[column].clone(), token[column].clone(), client]);
        // What the client says of itself is written after the first grant, on its own.
        common::eventually(secs(5), "these keys and no others", async || {
            let keys = cli.cmd(&["KEYS", "*"]).await.texts();
            BTreeSet::from_iter(keys) == expected
        })
        .await;
        let channels = cli.cmd(&["PUBSUB", "CHANNELS", "*"]).await.texts();
        assert_eq!(channels, [channel[column].clone()]);
        drop(guard);
        drop(waiting.await.unwrap());
        locks.close(secs(2)).await;
    }
}

/// Each `file::test` that a document names is there. A renamed test is renamed in them, too.
#[test]
fn the_documents_name_tests_that_exist() {
    let mut named = 0;
    for document in [
        "guarantees",
        "failure-modes",
        "testing",
        "protocol",
        "compatibility",
    ] {
        let text = read(format!("docs/{document}.md"));
        for code in text.split('`').skip(1).step_by(2) {
            let path = code.replace("::", "/");
            let Some((file, test)) = path.rsplit_once('/') else {
                continue;
            };
            let word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            let is_file = file.chars().all(|c| word(c) || c == '/');
            if !(code.contains("::") && is_file && test.chars().all(word) && test.contains('_')) {
                continue;
            }
            let files = [
                format!("tests/it/{file}.rs"),
                format!("tests/{file}/mod.rs"),
                format!("tests/{file}.rs"),
                format!("{file}.rs"),
                format!("src/{file}.rs"),
                format!("src/store/{file}.rs"),
            ];
            let found = files.iter().filter(|file| root().join(file).is_file());
            let found = found
                .map(read)
                .any(|text| text.contains(&format!("fn {test}(")));
            assert!(found, "docs/{document}.md names `{code}`");
            named += 1;
        }
    }
    assert!(named > 10, "{named}");
}
