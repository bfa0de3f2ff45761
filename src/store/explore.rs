//! Every way in which clients, network and time can meet the rules, within bounds.
//!
//! `apply` says what the server does with one operation. Here a small model of the clients and of the
//! network is put around it, and every world that can be reached is looked at, breadth first: messages
//! run late, twice, in any order or never, and clients start, leave, nest and renew when they like.
//!
//! The searches with all rules find nothing. For each rule there is one without it that finds what the
//! rule is for: so the search can fail, and no rule is there by habit.
//!
//! The numbers of states are exact. One that changes means that the model or `apply` now does more or
//! less than before: see what, then write the new number.

mod client;
mod model;
mod rules;
mod search;
mod server;
mod steps;
mod time;
mod world;

use rules::{Config, Property, Rule};
use search::{Verdict, search};
use world::Budget;

#[test]
fn probe() {
    use Property::*;
    use Rule::*;
    let fewer = Budget::default();
    let two = Config { lease: 2, budget: fewer, properties: &[OneBeliever, OnlyItsOwn, UnwantedEnds, ReleasedIsGone, BelievedIsHeld, NeverRefused], without: None, tokens: false, clock_step: 0, clock_at_loss: 0, holds: &[0, 2] };
    let three = Config { holds: &[0, 1, 2], ..two.clone() };
    let b = Budget { copies: 1, cancels: 1, renewals: 1, ..fewer };
    let loss: &'static [Property] = &[TokensRise, OnlyItsOwn, UnwantedEnds, ReleasedIsGone];
    let back: &'static [Property] = &[TokensRise, OnlyItsOwn, OneBeliever, BelievedIsHeld];
    let bud = |budget, c: &Config| Config { budget, ..c.clone() };
    let all = vec![
        ("three nothing", three.clone()),
        ("three cancel", bud(Budget{cancels:1,..fewer}, &three)),
        ("three cancel renew", bud(Budget{cancels:1,renewals:1,..fewer}, &three)),
        ("three copy", bud(Budget{copies:1,..fewer}, &three)),
        ("three resend cancel", bud(Budget{resends:1,cancels:1,..fewer}, &three)),
        ("two copy cancel renew", bud(b, &two)),
        ("two resend cancel", bud(Budget{resends:1,cancels:1,..fewer}, &two)),
        ("two resend cancel renew", bud(Budget{resends:1,cancels:1,renewals:1,..fewer}, &two)),
        ("two resend copy", bud(Budget{resends:1,copies:1,..fewer}, &two)),
        ("nest cancel copy", bud(Budget{nests:1,cancels:1,copies:1,..fewer}, &two)),
        ("nest cancel resend", bud(Budget{nests:1,cancels:1,resends:1,..fewer}, &two)),
        ("nest cancel renew", bud(Budget{nests:1,cancels:1,renewals:1,..fewer}, &two)),
        ("nest2 cancel", bud(Budget{nests:2,cancels:1,..fewer}, &two)),
        ("nest2 copy", bud(Budget{nests:2,copies:1,..fewer}, &two)),
        ("token copy cancel", Config{tokens:true,properties:&[TokensRise,OnlyItsOwn,OneBeliever], ..bud(Budget{copies:1,cancels:1,..fewer}, &two)}),
        ("token force", Config{tokens:true,properties:loss, ..bud(Budget{forces:1,cancels:1,..fewer}, &two)}),
        ("token force copy", Config{tokens:true,properties:loss, ..bud(Budget{forces:1,copies:1,..fewer}, &two)}),
        ("token force three", Config{tokens:true,properties:loss, ..bud(Budget{forces:1,..fewer}, &three)}),
        ("token loss copy", Config{tokens:true,properties:loss, ..bud(Budget{losses:1,copies:1,..fewer}, &two)}),
        ("token loss renew cancel", Config{tokens:true,properties:loss, ..bud(Budget{losses:1,cancels:1,renewals:1,..fewer}, &two)}),
        ("back", Config{tokens:true,clock_step:-2,properties:back, ..bud(Budget{steps:1,..fewer}, &two)}),
        ("back cancel renew", Config{clock_step:-2,properties:back, ..bud(Budget{steps:1,cancels:1,renewals:1,..fewer}, &two)}),
        ("back copy", Config{clock_step:-2,properties:back, ..bud(Budget{steps:1,copies:1,..fewer}, &two)}),
        ("a2", Config{lease:3, without:Some(RenewDeadline),properties:&[UnwantedEnds], ..bud(Budget{renewals:1,..fewer}, &two)}),
        ("i1", Config{clock_step:2,properties:&[OneBeliever], ..bud(Budget{steps:1,..fewer}, &two)}),
        ("i2 L1", Config{clock_step:-2,properties:&[UnwantedEnds], ..bud(Budget{steps:1,..fewer}, &two)}),
        ("loss S1", Config{properties:&[OneBeliever], ..bud(Budget{losses:1,..fewer}, &two)}),
        ("force S1", Config{properties:&[OneBeliever], ..bud(Budget{forces:1,..fewer}, &two)}),
    ];
    println!("{}", size_of::<world::World>());
    for (name, config) in all {
        let start = std::time::Instant::now();
        let verdict = search(&config, 1_000_000);
        println!("{name}: {verdict:?} {:?}", start.elapsed());
    }
    let _: Option<Verdict> = None;
    let _ = (AcquireDeadline, CountsAreSet);
}
