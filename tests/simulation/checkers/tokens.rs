//! S2: each hold that the server grants gets a token greater than all before; a hold keeps its own.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use leasehold::LockKind;
use leasehold::testing::{Answered, Done, HoldId, Holder, Ran, What};

use super::story::Story;
use super::{Conditions, Verdict, Violation};

pub fn check(story: &Story<'_>, conditions: &Conditions) -> Vec<Violation> {
    let mut verdict = Verdict::of("tokens", story);
    if !conditions.clock_never_back && !conditions.counters_kept {
        return verdict.found;
    }
    // The greatest so far and where; what each hold was told, in order. A copy of a request can make a
    // hold anew that was removed by force.
    let mut greatest: BTreeMap<&Arc<str>, Given> = BTreeMap::new();
    let mut told: BTreeMap<HoldId, Vec<(u64, usize)>> = BTreeMap::new();
    // The token each was claimed with last; which of them were passed on since.
    let mut claimed: BTreeMap<HoldId, (u64, usize)> = BTreeMap::new();
    let mut passed = BTreeSet::new();
    for (index, _, what) in story.iter() {
        match what {
            What::Ran(ran) => {
                let Answered::Granted(token) = ran.answer else {
                    continue;
                };
                let hold = ran.did.hold;
                let reads = ran.did.kind == LockKind::Read && ran.did.verb == Done::Acquire;
                if makes(ran) {
                    let before = greatest.get(&ran.did.name).copied();
                    let wrong = before.is_some_and(|before| {
                        // One who joins readers has what they have, unless the counter was lost
                        // meanwhile; the first may find the lock of readers who are dead.
                        if reads && joins(ran) && conditions.counters_kept {
                            token != before.token
                        } else if reads && (before.reads || !conditions.counters_kept) {
                            token < before.token && conditions.counters_kept
                        } else {
                            token <= before.token
                        }
                    });
                    if let Some(before) = before.filter(|_| wrong) {
                        let (hold, greatest) = (Holder(hold), before.token);
                        let what = format!("token {token} of {hold} after {greatest}");
                        verdict.broken(&[before.index, index], what);
                    } else if before.is_none_or(|before| before.token <= token) {
                        let given = Given {
                            token,
                            index,
                            reads,
                        };
                        greatest.insert(&ran.did.name, given);
                    }
                } else if let Some((before, shown)) = told.get(&hold).and_then(|told| told.last())
                    && token != *before
                    && conditions.counters_kept
                {
                    let what = format!("{} has two tokens: {before}, {token}", Holder(hold));
                    verdict.broken(&[*shown, index], what);
                }
                told.entry(hold).or_default().push((token, index));
            }
            What::Passed { hold } => {
                passed.insert(*hold);
            }
            What::Claimed {
                hold, token, name, ..
            } => {
                let before = claimed.insert(*hold, (*token, index));
                // Whoever has it from another of the same client has the next of the tokens given with it.
                if let Some(before) = before.filter(|_| passed.remove(hold)) {
                    if *token != before.0 + 1 {
                        let what = format!("token {token} of {} after {}", Holder(*hold), before.0);
                        verdict.broken(&[before.1, index], what);
                    }
                    if let Some(greatest) = greatest.get_mut(name) {
                        greatest.token = greatest.token.max(*token);
                    }
                    continue;
                }
                let told = told.get(hold).map(Vec::as_slice).unwrap_or_default();
                if told.iter().all(|(granted, _)| granted != token) {
                    let records: Vec<_> = told.iter().map(|(_, at)| *at).chain([index]).collect();
                    let what = format!("{} was not granted token {token}", Holder(*hold));
                    verdict.broken(&records, what);
                }
            }
            _ => {}
        }
    }
    verdict.found
}

/// The greatest token so far.
#[derive(Clone, Copy)]
struct Given {
    token: u64,
    index: usize,
    /// By one who reads.
    reads: bool,
}

/// Whether somebody was there before.
fn joins(ran: &Ran) -> bool {
    ran.change
        .as_ref()
        .is_some_and(|(before, _)| !before.is_empty())
}

/// Whether the hold is there because of this op.
fn makes(ran: &Ran) -> bool {
    let has = |owners: &[(HoldId, u32)]| owners.iter().any(|(hold, _)| *hold == ran.did.hold);
    ran.change
        .as_ref()
        .is_some_and(|(before, after)| !has(before) && has(after))
}

#[cfg(test)]
mod tests {
    use leasehold::LockKind;
    use leasehold::testing::{Answered, Done};

    use super::super::tale::{Tale, rough, stormy};

    fn one_after_another(tokens: [u64; 2]) -> Tale {
        let [first, second] = tokens;
        Tale::new()
            .granted_as(0, 1, first)
            .claimed_as(0, 1, 990, first)
            .left(1)
            .released(0, 1)
            .granted_as(1, 2, second)
            .claimed_as(1, 2, 990, second)
            .left(2)
            .released(1, 2)
    }

    #[test]
    fn a_token_that_comes_again_is_caught() {
        assert_eq!(one_after_another([7, 7]).caught(), ["tokens"]);
        assert_eq!(one_after_another([7, 6]).caught(), ["tokens"]);
        assert_eq!(one_after_another([7, 8]).caught(), [""; 0]);
    }

    /// Who reads beside another has his token; a writer's is greater than both.
    #[test]
    fn a_reader_with_a_token_of_his_own_is_caught() {
        let tale = |joined, written| {
            let both = [(1, 1), (2, 1)];
            let granted = Answered::Granted(joined);
            Tale::new()
                .side(LockKind::Read)
                .granted_as(0, 1, 7)
                .does(1, Done::Acquire, 2, 1, granted, &both, None)
                .does(0, Done::Release, 1, 0, Answered::Done, &both[1..], None)
                .released(1, 2)
                .side(LockKind::Write)
                .granted_as(0, 3, written)
                .released(0, 3)
        };
        assert_eq!(tale(7, 8).caught_under(rough), [""; 0]);
        assert_eq!(tale(8, 9).caught_under(rough), ["tokens"]);
        assert_eq!(tale(6, 9).caught_under(rough), ["tokens"]);
        assert_eq!(tale(7, 7).caught_under(rough), ["tokens"]);
    }

    #[test]
    fn nothing_is_promised_if_the_clock_goes_back_and_the_counter_is_lost() {
        let tale = one_after_another([7, 6]);
        assert_eq!(tale.caught_under(stormy), ["tokens"]);
        let caught = tale.caught_under(|conditions| {
            stormy(conditions);
            conditions.clock_never_back = false;
        });
        assert_eq!(caught, [""; 0]);
    }

    /// A copy of the request is answered as the first was.
    #[test]
    fn a_second_token_for_one_hold_is_caught() {
        let copied = |answer| {
            Tale::new()
                .granted_as(0, 1, 7)
                .unchanged(0, Done::Acquire, 1, 1, Answered::Granted(answer))
                .claimed_as(0, 1, 990, answer)
                .left(1)
                .released(0, 1)
        };
        assert_eq!(copied(8).caught(), ["tokens"]);
        assert_eq!(copied(7).caught(), [""; 0]);
    }

    /// By a copy of the request, whose first answer is the one that is read.
    #[test]
    fn a_hold_removed_by_force_and_made_anew_may_keep_its_first_token() {
        let tale = Tale::new()
            .granted_as(0, 1, 7)
            .does(1, Done::Force, 1, 0, Answered::Done, &[], None)
            .granted_as(0, 1, 8)
            .claimed_as(0, 1, 990, 7)
            .left(1)
            .released(0, 1);
        assert_eq!(tale.caught(), [""; 0]);
    }

    #[test]
    fn a_token_that_was_never_granted_is_caught() {
        let tale = Tale::new()
            .granted_as(0, 1, 7)
            .claimed_as(0, 1, 990, 9)
            .left(1)
            .released(0, 1);
        assert_eq!(tale.caught(), ["tokens"]);
    }

    /// Within one client the lock goes on with a token for each, of those that were given with it.
    #[test]
    fn a_token_of_the_one_before_is_caught() {
        let passed = |token, next| {
            Tale::new()
                .granted_as(0, 1, 7)
                .claimed_as(0, 1, 990, 7)
                .passed(1)
                .claimed_as(0, 1, 990, token)
                .left(1)
                .released(0, 1)
                .granted_as(1, 2, next)
                .claimed_as(1, 2, 990, next)
                .left(2)
                .released(1, 2)
        };
        assert_eq!(passed(8, 9).caught(), [""; 0]);
        assert_eq!(passed(7, 9).caught(), ["tokens"]);
        assert_eq!(passed(9, 10).caught(), ["tokens"]);
        // The server did not know that it was given away.
        assert_eq!(passed(8, 8).caught(), ["tokens"]);
    }
}
