//! What can happen next: to the clients, on the network, and to time.

use super::rules::Config;
use super::world::World;

/// Something that can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// A request reaches the server and runs.
    Run(usize),
    /// A client reads a reply.
    Read(usize),
    /// The network copies a request.
    Copy(usize),
    /// Wants the lock: sends the first acquire.
    Start(usize),
    /// Sends what it waits for once more.
    SendAgain(usize),
    /// The waiter leaves.
    Cancel(usize),
    /// The holder enters once more.
    Nest(usize),
    /// The inner waiter leaves.
    CancelNested(usize),
    /// A guard is dropped; the last one releases.
    Leave(usize),
    Renew(usize),
    /// The last guard is dropped, and somebody waits: hands it on.
    HandOff(usize),
    /// The hand-off is given up.
    GiveUp(usize),
    /// The server refuses a hand-off: before it has done anything, or half-way.
    Refuse(usize, bool),
    /// The operator, who sees this hold on the server, removes it.
    Force(usize),
    /// The server comes back without its memory.
    LoseMemory,
    /// The server's clock is set.
    SetClock,
    Tick,
}

pub(super) const STEPS: [Step; 52] = [
    Step::Run(0),
    Step::Run(1),
    Step::Run(2),
    Step::Run(3),
    Step::Read(0),
    Step::Read(1),
    Step::Read(2),
    Step::Copy(0),
    Step::Copy(1),
    Step::Copy(2),
    Step::Copy(3),
    Step::Start(0),
    Step::Start(1),
    Step::Start(2),
    Step::SendAgain(0),
    Step::SendAgain(1),
    Step::SendAgain(2),
    Step::Cancel(0),
    Step::Cancel(1),
    Step::Cancel(2),
    Step::Nest(0),
    Step::CancelNested(0),
    Step::Leave(0),
    Step::Leave(1),
    Step::Leave(2),
    Step::Renew(0),
    Step::Renew(1),
    Step::Renew(2),
    Step::Force(0),
    Step::Force(1),
    Step::Force(2),
    Step::Start(3),
    Step::SendAgain(3),
    Step::Cancel(3),
    Step::Leave(3),
    Step::Renew(3),
    Step::Force(3),
    Step::HandOff(0),
    Step::HandOff(1),
    Step::GiveUp(0),
    Step::GiveUp(1),
    Step::Refuse(0, false),
    Step::Refuse(0, true),
    Step::Refuse(1, false),
    Step::Refuse(1, true),
    Step::Refuse(2, false),
    Step::Refuse(2, true),
    Step::Refuse(3, false),
    Step::Refuse(3, true),
    Step::LoseMemory,
    Step::SetClock,
    Step::Tick,
];

impl Step {
    /// Whether it can happen at all, within these bounds.
    pub(super) fn is_within(self, config: &Config) -> bool {
        let budget = config.budget;
        let some = |left: i8| left > 0;
        let lives = |hold: usize| {
            let handed_on = match hold {
                1 => some(budget.hand_offs),
                3 => budget.hand_offs > 1,
                _ => false,
            };
            handed_on || config.holds.contains(&hold)
        };
        match self {
            Self::Run(_) | Self::Read(_) | Self::Tick => true,
            Self::Copy(_) => some(budget.copies),
            Self::Start(hold) | Self::SendAgain(hold) | Self::Leave(hold) => lives(hold),
            Self::Cancel(hold) => some(budget.cancels) && lives(hold),
            Self::Nest(_) => some(budget.nests),
            Self::CancelNested(_) => some(budget.nests) && some(budget.cancels),
            Self::Renew(hold) => some(budget.renewals) && lives(hold),
            Self::HandOff(_) | Self::GiveUp(_) => some(budget.hand_offs),
            Self::Refuse(..) => some(budget.refusals),
            Self::Force(hold) => some(budget.forces) && lives(hold),
            Self::LoseMemory => some(budget.losses),
            Self::SetClock => some(budget.steps),
        }
    }

    /// In words, seen from the world before it.
    pub(super) fn describe(self, before: &World) -> String {
        let message = |what: &str, message: Option<String>| {
            format!("{what}: {}", message.unwrap_or_default())
        };
        match self {
            Self::Run(slot) => message(
                "runs",
                before.requests.get(slot).map(|request| request.to_string()),
            ),
            Self::Read(slot) => message(
                "read",
                before.replies.get(slot).map(|reply| reply.to_string()),
            ),
            Self::Copy(slot) => message(
                "copied",
                before.requests.get(slot).map(|request| request.to_string()),
            ),
            Self::Start(hold) => format!("hold {hold} sends acquire(1)"),
            Self::SendAgain(hold) => format!("hold {hold} sends again"),
            Self::Cancel(hold) => format!("hold {hold} gives up waiting"),
            Self::Nest(hold) => format!("hold {hold} sends acquire(2)"),
            Self::CancelNested(hold) => format!("hold {hold} gives up the inner wait"),
            Self::Leave(hold) => format!("hold {hold} drops a guard"),
            Self::Renew(hold) => format!("hold {hold} sends renew"),
            Self::HandOff(hold) => format!("hold {hold} is left and handed on"),
            Self::GiveUp(hold) => format!("hold {hold} gives up the hand-off"),
            Self::Refuse(slot, half) => message(
                if half { "refused half-way" } else { "refused" },
                before.requests.get(slot).map(|request| request.to_string()),
            ),
            Self::Force(hold) => format!("the operator forces hold {hold}"),
            Self::LoseMemory => "the server loses its memory".to_owned(),
            Self::SetClock => "the server's clock is set".to_owned(),
            Self::Tick => "a tick".to_owned(),
        }
    }
}
