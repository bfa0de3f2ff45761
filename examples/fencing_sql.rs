//! A fencing token checked by a SQL database, in the same statement or transaction as the write.
//!
//! ```text
//! $ cargo run --example fencing_sql
//! the new holder's write: Done
//! the late write: LockLost
//! the late transaction: LockLost
//! order 10 is `charged`, with 1 line in its journal
//! ```
//!
//! SQLite, so that it needs no server; PostgreSQL takes the same statements with `$1` for `?1`. Calls of
//! rusqlite block: in a service they belong on a thread of their own (`spawn_blocking`).

use std::time::Duration;

use leasehold::{FencingToken, LockClient};
use rusqlite::Connection;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// `token` is never NULL: of a NULL nothing is smaller, and nothing would ever be written.
const SCHEMA: &str = "
    CREATE TABLE orders  (id INTEGER PRIMARY KEY, state TEXT NOT NULL, token BIGINT NOT NULL);
    CREATE TABLE journal (id INTEGER NOT NULL, line TEXT NOT NULL);
    CREATE TABLE fences  (name TEXT PRIMARY KEY, token BIGINT NOT NULL);";

/// The token in the row that it protects. No row changed: a later holder was here.
const WRITE: &str = "
    INSERT INTO orders (id, state, token) VALUES (?1, ?2, ?3)
    ON CONFLICT (id) DO UPDATE SET state = excluded.state, token = excluded.token
    WHERE orders.token <= excluded.token";

/// The token in a row of its own, one for each lock, for a transaction that writes here and there. It comes
/// first: its row stays locked until the end of the transaction, so nobody passes in between.
const PASS: &str = "
    INSERT INTO fences (name, token) VALUES (?1, ?2)
    ON CONFLICT (name) DO UPDATE SET token = excluded.token
    WHERE fences.token <= excluded.token";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    /// A later holder has written: do not go on.
    LockLost,
}

impl Outcome {
    fn of(rows: usize) -> Self {
        if rows == 1 {
            Self::Done
        } else {
            Self::LockLost
        }
    }
}

pub(crate) fn create_tables(db: &Connection) -> Result<()> {
    Ok(db.execute_batch(SCHEMA)?)
}

/// One row, one statement.
pub(crate) fn write(db: &Connection, id: i64, state: &str, token: FencingToken) -> Result<Outcome> {
    let rows = db.execute(WRITE, (id, state, i64::from(token)))?;
    Ok(Outcome::of(rows))
}

/// Several rows, one transaction.
pub(crate) fn note(
    db: &mut Connection,
    id: i64,
    line: &str,
    token: FencingToken,
) -> Result<Outcome> {
    let transaction = db.transaction()?;
    let passed = transaction.execute(PASS, (format!("order:{id}"), i64::from(token)))?;
    if Outcome::of(passed) == Outcome::LockLost {
        return Ok(Outcome::LockLost); // dropped, a transaction is rolled back
    }
    transaction.execute("INSERT INTO journal (id, line) VALUES (?1, ?2)", (id, line))?;
    transaction.commit()?;
    Ok(Outcome::Done)
}

pub(crate) fn state(db: &Connection, id: i64) -> Result<(String, FencingToken)> {
    let row = "SELECT state, token FROM orders WHERE id = ?1";
    let (state, token) = db.query_row(row, [id], |row| Ok((row.get(0)?, row.get::<_, i64>(1)?)))?;
    Ok((state, token.try_into()?))
}

pub(crate) fn lines(db: &Connection, id: i64) -> Result<i64> {
    let count = "SELECT count(*) FROM journal WHERE id = ?1";
    Ok(db.query_row(count, [id], |row| row.get(0))?)
}

#[tokio::main]
pub(crate) async fn main() -> Result<()> {
    let locks = LockClient::in_memory(); // a server in earnest: its tokens outlive the process
    let mut db = Connection::open_in_memory()?;
    create_tables(&db)?;

    // A holder is stuck past the end of its lease, with its token in hand.
    let lease = Duration::from_millis(200);
    let stuck = locks.lock("order:10").lease(lease).acquire().await?;
    let old = stuck.fencing_token()?;
    stuck.lost().cancelled().await;

    // The next one gets the lock, and writes. Then the first one wakes up.
    let next = locks.lock("order:10").acquire().await?;
    let token = next.fencing_token()?;
    let written = write(&db, 10, "charged", token)?;
    let noted = note(&mut db, 10, "charged by the next", token)?;
    println!("the new holder's write: {written:?}");

    let late_write = write(&db, 10, "cancelled", old)?;
    println!("the late write: {late_write:?}");
    let late_note = note(&mut db, 10, "cancelled by the first", old)?;
    println!("the late transaction: {late_note:?}");

    let (state, seen) = state(&db, 10)?;
    let lines = lines(&db, 10)?;
    println!("order 10 is `{state}`, with {lines} line in its journal");

    assert_eq!((written, noted), (Outcome::Done, Outcome::Done));
    assert_eq!(late_write, Outcome::LockLost);
    assert_eq!(late_note, Outcome::LockLost);
    assert_eq!((state.as_str(), seen, lines), ("charged", token, 1));
    Ok(())
}
