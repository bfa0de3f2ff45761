//! A fencing token checked by Redis, in the script that writes the value.
//!
//! ```text
//! $ REDIS_URL=redis://127.0.0.1:6379 cargo run --example fencing_redis
//! the new holder's write: accepted
//! the late write: refused
//! the stock is 7
//! ```
//!
//! The value need not live on the server that has the locks. Any client of Redis will do; this is fred.

use std::env;
use std::time::Duration;

use fred::clients::Client;
use fred::interfaces::ClientLike as _;
use fred::types::config::Config;
use fred::types::scripts::Script;
use fred::types::{ClusterHash, CustomCommand, FromValue};
use leasehold::{FencingToken, LockClient};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A script runs alone: check and write are one step. Tokens are below 2^53, so that Lua's numbers
/// compare them exactly; they are stored as the text they came as.
const WRITE: &str = "
-- KEYS[1]   hash: the value, and the greatest token it was written under
-- ARGV      token; value
-- Returns   1 written; 0 a later holder has written before, nothing is changed
local last = tonumber(redis.call('HGET', KEYS[1], 'token') or '0')
if tonumber(ARGV[1]) < last then return 0 end
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'value', ARGV[2])
return 1";

/// A value that remembers the greatest token. Do not let it expire before the last late writer has come.
pub(crate) struct Fenced {
    redis: Client,
    write: Script,
    key: String,
}

impl Fenced {
    pub(crate) async fn open(url: &str, key: impl Into<String>) -> Result<Self> {
        let redis = Client::new(Config::from_url(url)?, None, None, None);
        redis.init().await?;
        Ok(Self {
            redis,
            write: Script::from_lua(WRITE),
            key: key.into(),
        })
    }

    /// Whether it was written; `false`: the lock was lost, do not go on.
    pub(crate) async fn write(&self, value: &str, token: FencingToken) -> Result<bool> {
        let args = vec![token.to_string(), value.to_owned()];
        let keys = vec![self.key.as_str()];
        let written: i64 = self
            .write
            .evalsha_with_reload(&self.redis, keys, args)
            .await?;
        Ok(written == 1)
    }

    pub(crate) async fn read(&self) -> Result<Option<String>> {
        self.call("HGET", &[&self.key, "value"]).await
    }

    pub(crate) async fn token(&self) -> Result<Option<FencingToken>> {
        let token: Option<String> = self.call("HGET", &[&self.key, "token"]).await?;
        Ok(token.map(|token| token.parse()).transpose()?)
    }

    pub(crate) async fn remove(&self) -> Result<()> {
        self.call("DEL", &[&self.key]).await
    }

    /// fred's own `hget` and `del` are behind features of it.
    async fn call<T: FromValue>(&self, command: &'static str, args: &[&str]) -> Result<T> {
        let command = CustomCommand::new_static(command, ClusterHash::FirstKey, false);
        Ok(self.redis.custom(command, args.to_vec()).await?)
    }
}

/// Two holders of the lock `name`; the first one's write comes late.
pub(crate) async fn late_writer(url: &str, name: &str) -> Result<()> {
    let locks = LockClient::connect(url).await?;
    let stock = Fenced::open(url, format!("{name}:value")).await?;

    // A holder is stuck past the end of its lease, with its token in hand.
    let lease = Duration::from_millis(200);
    let stuck = locks.lock(name).lease(lease).acquire().await?;
    let old = stuck.fencing_token()?;
    stuck.lost().cancelled().await;

    // The next one gets the lock, and writes. Then the first one wakes up.
    let next = locks.lock(name).acquire().await?;
    let token = next.fencing_token()?;
    let written = stock.write("7", token).await?;
    println!("the new holder's write: {}", verdict(written));
    let late = stock.write("3", old).await?;
    println!("the late write: {}", verdict(late));
    let value = stock.read().await?.ok_or("there is no value")?;
    println!("the stock is {value}");

    assert!(written && !late);
    assert_eq!((value.as_str(), stock.token().await?), ("7", Some(token)));
    drop((stuck, next));
    stock.remove().await?;
    locks.close(Duration::from_secs(2)).await;
    Ok(())
}

fn verdict(written: bool) -> &'static str {
    if written { "accepted" } else { "refused" }
}

#[tokio::main]
pub(crate) async fn main() -> Result<()> {
    let url = env::var("REDIS_URL").map_err(|_| "set REDIS_URL")?;
    late_writer(&url, "fencing-example").await
}
