//! Where a token counts: stores that refuse a late writer. The stores are those of the examples, which are
//! run here too.

use std::ops::Range;

use leasehold::{Fence, FencingToken, NotAToken};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use rusqlite::Connection;

use crate::common::*;

#[path = "../../examples/fencing_http.rs"]
mod fencing_http;
#[path = "../../examples/fencing_redis.rs"]
#[allow(dead_code, reason = "its `main` asks the environment for a server")]
mod fencing_redis;
#[path = "../../examples/fencing_sql.rs"]
mod fencing_sql;

use fencing_sql::Outcome;

/// Tokens in the order in which their writes arrive: few different ones, so that some come late and some
/// come again.
fn tokens() -> impl Strategy<Value = Vec<u64>> {
    const REAL: u64 = 1_764_500_000_000_000;
    const LAST: Range<u64> = (1 << 53) - 5..1 << 53;
    vec(prop_oneof![1..9_u64, REAL..REAL + 9, LAST], 1..12)
}

fn token(value: u64) -> FencingToken {
    value.try_into().unwrap()
}

/// What is written to whom, by the definition: a write stays if no greater token was there before.
fn model(tokens: &[u64]) -> Vec<bool> {
    let admitted =
        (0..tokens.len()).map(|now| tokens[..now].iter().all(|seen| *seen <= tokens[now]));
    admitted.collect()
}

/// Each list is checked by a store that admits exactly what it should.
fn for_each_list(cases: u32, mut admits: impl FnMut(&[u64]) -> Vec<bool>) {
    let admits = std::cell::RefCell::new(&mut admits);
    let mut runner = TestRunner::new(Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    });
    let verdict = runner.run(&tokens(), |tokens| {
        prop_assert_eq!(admits.borrow_mut()(&tokens), model(&tokens));
        Ok(())
    });
    verdict.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn the_fence_of_a_process_admits_what_it_should() {
    for_each_list(500, |tokens| {
        let mut fence = Fence::new();
        let mut greatest = None;
        let admitted = tokens.iter().map(|value| {
            let before = fence.greatest();
            let admitted = fence.admit(token(*value));
            match admitted {
                Ok(()) => greatest = greatest.max(Some(token(*value))),
                Err(stale) => {
                    assert_eq!(stale.token, token(*value));
                    assert_eq!(Some(stale.greatest), before);
                }
            }
            assert_eq!(fence.greatest(), greatest);
            // One that was kept and read again goes on alike.
            fence = Fence::from(fence.greatest().unwrap());
            admitted.is_ok()
        });
        admitted.collect()
    });
}

/// Two connections to one file, as two processes have them.
#[test]
fn a_row_and_a_transaction_admit_what_they_should() {
    let folder = tempfile::tempdir().unwrap();
    let open = || Connection::open(folder.path().join("orders.sqlite")).unwrap();
    let mut writers = [open(), open()];
    fencing_sql::create_tables(&writers[0]).unwrap();
    let mut order = 0;
    for_each_list(25, |tokens| {
        order += 1;
        let mut lines = 0;
        let mut last = String::new();
        let mut writer = (0..2).cycle();
        let mut write = |value: &u64| {
            let db = &mut writers[writer.next().unwrap()];
            let (text, token) = (format!("under {value}"), token(*value));
            let written = fencing_sql::write(db, order, &text, token).unwrap();
            assert_eq!(fencing_sql::note(db, order, &text, token).unwrap(), written);
            if written == Outcome::Done {
                lines += 1;
                last = text;
            }
            let (state, seen) = fencing_sql::state(db, order).unwrap();
            assert_eq!(state, last);
            assert_eq!(state, format!("under {seen}"));
            assert_eq!(fencing_sql::lines(db, order).unwrap(), lines);
            written == Outcome::Done
        };
        tokens.iter().map(&mut write).collect()
    });
}

#[test]
fn a_redis_value_admits_what_it_should() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let url = server().url();
    for_each_list(25, |tokens| {
        runtime.block_on(async {
            let value = fencing_redis::Fenced::open(&url, unique_name())
                .await
                .unwrap();
            let mut admitted = Vec::new();
            let mut last = String::new();
            for given in tokens {
                let text = format!("under {given}");
                let written = value.write(&text, token(*given)).await.unwrap();
                if written {
                    last = text;
                }
                assert_eq!(value.read().await.unwrap(), Some(last.clone()));
                let seen = value.token().await.unwrap().unwrap();
                assert_eq!(last, format!("under {seen}"));
                admitted.push(written);
            }
            value.remove().await.unwrap();
            admitted
        })
    });
}

#[test]
fn a_resource_behind_http_admits_what_it_should() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let resource = runtime.block_on(fencing_http::serve()).unwrap();
    let mut report = 0;
    for_each_list(25, |tokens| {
        report += 1;
        runtime.block_on(async {
            let mut admitted = Vec::new();
            for given in tokens {
                let given = given.to_string();
                let answer = fencing_http::put(resource, report, &given, &given).await;
                admitted.push(match answer.unwrap() {
                    (204, _) => true,
                    (412, why) => {
                        assert!(why.contains(&given), "{why}");
                        false
                    }
                    other => panic!("{other:?}"),
                });
                let there = fencing_http::call(resource, "GET", report, "", "").await;
                let last = (0..admitted.len()).rfind(|at| admitted[*at]).unwrap();
                assert_eq!(there.unwrap(), (200, tokens[last].to_string()));
            }
            admitted
        })
    });
    // What is no token is not taken for a small one, nor for a great one.
    runtime.block_on(async {
        for bad in ["", "-1", "+1", "1 2", "1e3", "0x7", "9007199254740992"] {
            let answer = fencing_http::put(resource, report, "bad", bad).await;
            assert_eq!(answer.unwrap().0, 400, "{bad}");
        }
    });
}

/// The examples assert what they print.
#[test]
fn the_example_with_sql_refuses_the_late_writer() {
    fencing_sql::main().unwrap();
}

/// As above.
#[test]
fn the_example_with_http_refuses_the_late_writer() {
    fencing_http::main().unwrap();
}

/// As above; its `main` takes the server from the environment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_example_with_redis_refuses_the_late_writer() {
    let name = unique_name();
    fencing_redis::late_writer(&server().url(), &name)
        .await
        .unwrap();
    nothing_left(server(), &name).await;
}

/// As text and as a column there and back; what is not a token is an error.
#[test]
fn tokens_are_read_back_as_they_were_written() {
    for value in [0, 1, 1_764_500_000_000_000, (1 << 53) - 1] {
        let token = token(value);
        assert_eq!(token.to_string().parse(), Ok(token));
        assert_eq!(FencingToken::try_from(i64::from(token)), Ok(token));
        assert_eq!(FencingToken::try_from(u64::from(token)), Ok(token));
        assert_eq!(token.value(), value);
    }
    let bad = [
        "",
        " 1",
        "1 ",
        "-1",
        "+1",
        "1.0",
        "١",
        "9007199254740992",
        "18446744073709551616",
    ];
    for bad in bad {
        assert!(bad.parse::<FencingToken>().is_err(), "{bad}");
    }
    assert!(FencingToken::try_from(1_u64 << 53).is_err());
    assert!(FencingToken::try_from(i64::MAX).is_err());
    let negative: Result<FencingToken, NotAToken> = (-1_i64).try_into();
    assert_eq!(
        negative.unwrap_err().to_string(),
        "not a fencing token: less than zero"
    );
}
