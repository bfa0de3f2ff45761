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
mod idle;
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

/// Two holds one after the other in one flow of work, and one of another process.
#[test]
fn nothing_is_found_with_three_holds() {
    let config = Config {
        holds: &[0, 1, 2],
        ..two(Budget { cancels: 1, ..NONE })
    };
    assert_eq!(all(&config), Verdict::SearchedAll { states: 179_693 });
}

#[test]
fn nothing_is_found_when_requests_are_copied() {
    let config = two(Budget {
        copies: 1,
        cancels: 1,
        renewals: 1,
        ..NONE
    });
    assert_eq!(all(&config), Verdict::SearchedAll { states: 96_560 });
}

#[test]
fn nothing_is_found_when_requests_are_sent_again() {
    let config = two(Budget {
        resends: 1,
        cancels: 1,
        ..NONE
    });
    assert_eq!(all(&config), Verdict::SearchedAll { states: 151_602 });
}

#[test]
fn nothing_is_found_when_holds_are_entered_again() {
    let config = two(Budget {
        nests: 1,
        copies: 1,
        cancels: 1,
        ..NONE
    });
    assert_eq!(all(&config), Verdict::SearchedAll { states: 143_668 });
}

#[test]
fn nothing_is_found_wrong_with_tokens() {
    let config = Config {
        tokens: true,
        properties: &[Property::TokensRise, Property::OneBeliever],
        ..two(Budget {
            copies: 1,
            cancels: 1,
            ..NONE
        })
    };
    assert_eq!(all(&config), Verdict::SearchedAll { states: 107_969 });
}

/// Who leaves hands it on to who waits behind, who may leave as well.
#[test]
fn nothing_is_found_when_holds_are_handed_on() {
    let config = two(Budget {
        hand_offs: 1,
        cancels: 1,
        renewals: 1,
        ..NONE
    });
    assert_eq!(all(&config), Verdict::SearchedAll { states: 61_621 });
}

#[test]
fn nothing_is_found_when_hand_offs_are_copied() {
    let config = two(Budget {
        hand_offs: 1,
        copies: 1,
        ..NONE
    });
    assert_eq!(all(&config), Verdict::SearchedAll { states: 29_075 });
}

#[test]
fn nothing_is_found_when_hand_offs_are_sent_again() {
    let config = two(Budget {
        hand_offs: 1,
        resends: 1,
        ..NONE
    });
    assert_eq!(all(&config), Verdict::SearchedAll { states: 89_132 });
}

/// Before anything was done, or half-way, with an answer or without.
#[test]
fn nothing_is_found_when_hand_offs_are_refused() {
    let config = two(Budget {
        hand_offs: 1,
        refusals: 1,
        resends: 1,
        ..NONE
    });
    assert_eq!(all(&config), Verdict::SearchedAll { states: 139_870 });
}

/// From one to the next to the one behind; the chain may end at each turn.
#[test]
fn nothing_is_found_in_a_chain_of_hand_offs() {
    let config = Config {
        tokens: true,
        properties: &[
            Property::TokensRise,
            Property::OneBeliever,
            Property::OnlyItsOwn,
            Property::UnwantedEnds,
            Property::ReleasedIsGone,
            Property::BelievedIsHeld,
            Property::NeverRefused,
        ],
        ..two(Budget {
            hand_offs: 2,
            cancels: 1,
            ..NONE
        })
    };
    assert_eq!(all(&config), Verdict::SearchedAll { states: 115_379 });
}

/// The memory is lost, or the lock taken by force, at any moment of a hand-off.
#[test]
fn the_rest_holds_when_what_is_handed_on_is_gone() {
    let handed_on = |budget| Config {
        tokens: true,
        properties: WHATEVER_HAPPENS,
        ..two(Budget {
            hand_offs: 1,
            ..budget
        })
    };
    let lost = handed_on(Budget { losses: 1, ..NONE });
    assert_eq!(all(&lost), Verdict::SearchedAll { states: 25_813 });
    let forced = handed_on(Budget { forces: 1, ..NONE });
    assert_eq!(all(&forced), Verdict::SearchedAll { states: 48_818 });
}

/// An operator takes the lock from somebody who believes in it: that S1 and V1 do not outlive.
#[test]
fn the_rest_holds_when_a_hold_is_forced() {
    let config = Config {
        tokens: true,
        properties: WHATEVER_HAPPENS,
        ..two(Budget {
            forces: 1,
            copies: 1,
            ..NONE
        })
    };
    assert_eq!(all(&config), Verdict::SearchedAll { states: 58_103 });
    assert_breaks(&believers(&config), 8);
}

#[test]
fn the_rest_holds_when_the_memory_is_lost() {
    let config = Config {
        tokens: true,
        properties: WHATEVER_HAPPENS,
        ..two(Budget {
            losses: 1,
            cancels: 1,
            renewals: 1,
            ..NONE
        })
    };
    assert_eq!(all(&config), Verdict::SearchedAll { states: 68_145 });
    assert_breaks(&believers(&config), 7);
}

/// It costs time only: leases, and acquires that were abandoned, live longer by that much.
#[test]
fn nobody_is_harmed_when_the_servers_clock_is_set_back() {
    let config = Config {
        tokens: true,
        clock_step: -2,
        properties: &[
            Property::OneBeliever,
            Property::TokensRise,
            Property::OnlyItsOwn,
            Property::BelievedIsHeld,
        ],
        ..two(Budget { steps: 1, ..NONE })
    };
    assert_eq!(all(&config), Verdict::SearchedAll { states: 60_279 });
    let unwanted = Config {
        properties: &[Property::UnwantedEnds],
        ..config
    };
    assert_breaks(&unwanted, 8);
}

/// Expiry is by the server's wall clock, so nothing of ours can help: hence the margin's condition in
/// docs/guarantees.md.
#[test]
fn two_believe_when_the_servers_clock_is_set_forward() {
    let config = Config {
        clock_step: 2,
        properties: &[Property::OneBeliever],
        ..two(Budget { steps: 1, ..NONE })
    };
    assert_breaks(&config, 10);
}

/// Tokens follow the server's clock, so they need one that does not go back with the memory.
#[test]
fn tokens_fall_when_the_clock_goes_back_with_the_memory() {
    let lost = two(Budget { losses: 1, ..NONE });
    let config = Config {
        tokens: true,
        properties: &[Property::TokensRise],
        ..lost
    };
    assert!(!is_broken(&search(&config, ALL)));
    let back = Config {
        clock_at_loss: -3,
        ..config
    };
    assert_breaks(&back, 5);
}

/// The same claims in wider bounds: minutes, and a gigabyte.
#[test]
fn nothing_is_found_in_wider_bounds() {
    if !std::env::var("LEASEHOLD_LONG").is_ok_and(|value| value == "1") {
        return;
    }
    let three = |budget| Config {
        holds: &[0, 1, 2],
        ..two(budget)
    };
    let searches = [
        (
            "three holds, copied, sent again",
            three(Budget {
                copies: 1,
                resends: 1,
                cancels: 1,
                renewals: 1,
                ..NONE
            }),
        ),
        (
            "entered twice, a longer lease",
            Config {
                lease: 3,
                ..two(Budget {
                    nests: 2,
                    copies: 1,
                    resends: 1,
                    cancels: 1,
                    renewals: 1,
                    ..NONE
                })
            },
        ),
        (
            "forced, and the memory lost",
            Config {
                tokens: true,
                properties: WHATEVER_HAPPENS,
                ..three(Budget {
                    forces: 1,
                    losses: 1,
                    cancels: 1,
                    ..NONE
                })
            },
        ),
        (
            "handed on twice, copied, sent again",
            two(Budget {
                hand_offs: 2,
                copies: 1,
                resends: 1,
                cancels: 1,
                ..NONE
            }),
        ),
        (
            "the clock set back",
            Config {
                clock_step: -2,
                properties: &[Property::OneBeliever, Property::BelievedIsHeld],
                ..two(Budget {
                    steps: 1,
                    copies: 1,
                    cancels: 1,
                    renewals: 1,
                    ..NONE
                })
            },
        ),
    ];
    for (what, config) in searches {
        let verdict = search(&config, LONG);
        assert!(!is_broken(&verdict), "{what}: {verdict:?}");
        println!("{what}: {verdict:?}");
    }
}

#[test]
fn an_acquire_needs_its_deadline() {
    let config = two(Budget { cancels: 1, ..NONE });
    assert_needed(Rule::AcquireDeadline, &config, Property::UnwantedEnds, 6);
}

#[test]
fn a_renewal_needs_its_deadline() {
    let config = Config {
        lease: 3,
        ..two(Budget {
            renewals: 1,
            ..NONE
        })
    };
    assert_needed(Rule::RenewDeadline, &config, Property::UnwantedEnds, 10);
}

/// A copy of an inner release counts down twice; a copy of an acquire is a level that nobody leaves.
#[test]
fn counts_need_to_be_set() {
    let config = two(Budget {
        nests: 1,
        copies: 1,
        ..NONE
    });
    assert_needed(Rule::CountsAreSet, &config, Property::OneBeliever, 13);
    assert_needed(Rule::CountsAreSet, &config, Property::ReleasedIsGone, 8);
}

/// The last release overtakes an inner one.
#[test]
fn counts_must_not_be_tested() {
    let config = two(Budget { nests: 1, ..NONE });
    let property = Property::NeverRefused;
    assert_needed(Rule::CountsAreNotTested, &config, property, 9);
}

/// The release of an abandoned attempt meets the next one of the same flow.
#[test]
fn a_hold_needs_an_owner_id_of_its_own() {
    let config = Config {
        holds: &[0, 1, 2],
        ..two(Budget { cancels: 1, ..NONE })
    };
    assert_needed(Rule::OwnerPerHold, &config, Property::OnlyItsOwn, 5);
    assert_needed(Rule::OwnerPerHold, &config, Property::OneBeliever, 9);
}

#[test]
fn a_deadline_counts_from_the_sending() {
    let config = two(NONE);
    assert_needed(Rule::DeadlineFromSend, &config, Property::OneBeliever, 8);
}

#[test]
fn a_deadline_counts_from_the_attempt_that_was_answered() {
    let config = two(Budget { resends: 1, ..NONE });
    assert_needed(Rule::AnsweredAttempt, &config, Property::OneBeliever, 9);
}

#[test]
fn a_renewal_must_not_take_the_lock() {
    let config = two(Budget {
        renewals: 1,
        ..NONE
    });
    let property = Property::ReleasedIsGone;
    assert_needed(Rule::RenewCreatesNothing, &config, property, 8);
}

#[test]
fn an_inner_clean_up_leaves_the_outer_levels() {
    let config = two(Budget {
        nests: 1,
        cancels: 1,
        ..NONE
    });
    assert_needed(Rule::CleanUpToDepth, &config, Property::OneBeliever, 9);
}

#[test]
fn a_nested_acquire_counts_while_it_is_open() {
    let config = two(Budget { nests: 1, ..NONE });
    assert_needed(Rule::OpenLevelCounts, &config, Property::OneBeliever, 11);
}

#[test]
fn a_release_sits_out_the_acquires_before_it() {
    let config = two(Budget { cancels: 1, ..NONE });
    assert_needed(Rule::SitOut, &config, Property::ReleasedIsGone, 5);
}

/// Hence the transport makes one attempt only.
#[test]
fn only_we_may_send_twice() {
    let config = two(Budget { copies: 1, ..NONE });
    assert_needed(Rule::OnlyOwnCopies, &config, Property::ReleasedIsGone, 8);
}

#[test]
fn tokens_need_the_servers_clock() {
    let config = Config {
        tokens: true,
        ..two(Budget { losses: 1, ..NONE })
    };
    assert_needed(Rule::TokenFollowsClock, &config, Property::TokensRise, 5);
}

/// Who has left, or was never there, hands nothing on: the lock is of another by then.
#[test]
fn a_hand_off_must_not_overwrite() {
    let config = two(Budget {
        hand_offs: 1,
        ..NONE
    });
    assert_needed(Rule::HandOffFromItsOwn, &config, Property::OneBeliever, 11);
    assert_needed(Rule::HandOffFromItsOwn, &config, Property::OnlyItsOwn, 9);
}

#[test]
fn a_hand_off_must_not_take_a_free_lock() {
    let config = two(Budget {
        hand_offs: 1,
        resends: 1,
        ..NONE
    });
    let property = Property::ReleasedIsGone;
    assert_needed(Rule::HandOffCreatesNothing, &config, property, 14);
}

#[test]
fn a_hand_off_needs_its_deadline() {
    let config = Config {
        lease: 3,
        ..two(Budget {
            hand_offs: 1,
            cancels: 1,
            ..NONE
        })
    };
    assert_needed(Rule::HandOffDeadline, &config, Property::UnwantedEnds, 10);
}

#[test]
fn each_turn_needs_a_token_of_its_own() {
    let config = Config {
        tokens: true,
        ..two(Budget {
            hand_offs: 1,
            ..NONE
        })
    };
    assert_needed(Rule::HandOffMakesToken, &config, Property::TokensRise, 5);
}

/// The acquire makes the old hold anew, when the new one is over.
#[test]
fn what_may_come_back_is_not_handed_on() {
    let config = two(Budget {
        hand_offs: 1,
        resends: 1,
        ..NONE
    });
    let property = Property::ReleasedIsGone;
    assert_needed(Rule::OpenIsNotHandedOn, &config, property, 10);
}

#[test]
fn the_next_in_line_begins_when_it_is_told() {
    let config = two(Budget {
        hand_offs: 1,
        ..NONE
    });
    assert_needed(Rule::HeirWaits, &config, Property::OneBeliever, 9);
}

#[test]
fn what_is_handed_to_nobody_is_given_back() {
    let config = two(Budget {
        hand_offs: 1,
        cancels: 1,
        ..NONE
    });
    let property = Property::ReleasedIsGone;
    assert_needed(Rule::StrandedIsReleased, &config, property, 7);
}

/// Which of the two the server has is not known, and after a refusal it may be both.
#[test]
fn a_hand_off_that_was_given_up_is_undone_on_both_sides() {
    let property = Property::ReleasedIsGone;
    let given_up = two(Budget {
        hand_offs: 1,
        ..NONE
    });
    assert_needed(Rule::BothAreReleased, &given_up, property, 10);
    let refused = two(Budget {
        hand_offs: 1,
        refusals: 1,
        ..NONE
    });
    assert_needed(Rule::BothAreReleased, &refused, property, 8);
}

/// The old hold is gone, and a hand-off that comes after makes nothing: so this release is conclusive
/// at once, and the second one that is sent costs a call and changes nothing.
#[test]
fn a_release_of_both_needs_no_second() {
    let config = Config {
        without: Some(Rule::HandOffSitOut),
        ..two(Budget {
            hand_offs: 1,
            cancels: 1,
            ..NONE
        })
    };
    assert_eq!(all(&config), Verdict::SearchedAll { states: 23_219 });
}

/// What a failing test prints has to be understood.
#[test]
fn a_trace_tells_what_happened() {
    let config = Config {
        without: Some(Rule::SitOut),
        ..two(Budget { cancels: 1, ..NONE })
    };
    let told = format!("{:?}", search(&config, ALL));
    let (_, lines) = told.split_once(":\n").unwrap();
    let lines: Vec<_> = lines.lines().map(str::trim).collect();
    assert_eq!(
        lines,
        [
            "t0  hold 0 sends acquire(1)                    | server free; 0: waiting",
            "t0  hold 0 gives up waiting                    | server free; 0: ending",
            "t0  runs: release(0) of hold 0                 | server free; 0: ending",
            "t0  runs: acquire(1) of hold 0                 | server: hold 0 x1, 2 left; 0: ending",
            "t0  read: release(0) of hold 0: gone           | server: hold 0 x1, 2 left; 0: done",
        ]
    );
}

/// One hold of each process.
fn two(budget: Budget) -> Config {
    Config {
        lease: 2,
        budget,
        properties: UNHARMED,
        without: None,
        tokens: false,
        clock_step: 0,
        clock_at_loss: 0,
        holds: &[0, 2],
    }
}

fn believers(config: &Config) -> Config {
    Config {
        properties: &[Property::OneBeliever],
        ..config.clone()
    }
}

/// The whole search.
fn all(config: &Config) -> Verdict {
    search(config, ALL)
}

/// Without `rule` the search finds `property` broken, after as many steps; with it, it does not.
fn assert_needed(rule: Rule, config: &Config, property: Property, steps: usize) {
    let only: &'static [Property] = match property {
        Property::OneBeliever => &[Property::OneBeliever],
        Property::TokensRise => &[Property::TokensRise],
        Property::OnlyItsOwn => &[Property::OnlyItsOwn],
        Property::UnwantedEnds => &[Property::UnwantedEnds],
        Property::ReleasedIsGone => &[Property::ReleasedIsGone],
        Property::BelievedIsHeld => &[Property::BelievedIsHeld],
        Property::NeverRefused => &[Property::NeverRefused],
    };
    let with = Config {
        properties: only,
        ..config.clone()
    };
    let verdict = search(&with, CONTROL);
    assert!(!is_broken(&verdict), "with {rule:?}: {verdict:?}");
    let without = Config {
        without: Some(rule),
        ..with
    };
    assert_breaks(&without, steps);
}

/// The shortest trace to the one property that is checked has so many steps. A shorter one would be a
/// fault of the model, more likely than not.
fn assert_breaks(config: &Config, steps: usize) {
    let verdict = search(config, ALL);
    match &verdict {
        Verdict::Broken { trace, .. } if trace.len() == steps => {}
        _ => panic!("not in {steps} steps, but {verdict:?}"),
    }
}

fn is_broken(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Broken { .. })
}

const NONE: Budget = Budget {
    copies: 0,
    resends: 0,
    renewals: 0,
    cancels: 0,
    nests: 0,
    forces: 0,
    losses: 0,
    steps: 0,
    hand_offs: 0,
    refusals: 0,
};

/// While the server keeps its memory and its clock, and nobody forces anything.
const UNHARMED: &[Property] = &[
    Property::OneBeliever,
    Property::OnlyItsOwn,
    Property::UnwantedEnds,
    Property::ReleasedIsGone,
    Property::BelievedIsHeld,
    Property::NeverRefused,
];

/// Also when the memory is lost or a hold is forced.
const WHATEVER_HAPPENS: &[Property] = &[
    Property::TokensRise,
    Property::OnlyItsOwn,
    Property::UnwantedEnds,
    Property::ReleasedIsGone,
];

/// States at which a search is cut: none of the short ones has so many.
const ALL: usize = 1_000_000;

/// The same for the search with a rule, beside the one without.
const CONTROL: usize = 30_000;

/// The same in the long form.
const LONG: usize = 3_000_000;
