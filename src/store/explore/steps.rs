//! What can happen next: to the clients, on the network, and to time.

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
    /// The operator, who sees this hold on the server, removes it.
    Force(usize),
    /// The server comes back without its memory.
    LoseMemory,
    /// The server's clock is set.
    SetClock,
    Tick,
}

pub(super) const STEPS: [Step; 34] = [
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
    Step::LoseMemory,
    Step::SetClock,
    Step::Tick,
];

impl Step {
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
            Self::Force(hold) => format!("the operator forces hold {hold}"),
            Self::LoseMemory => "the server loses its memory".to_owned(),
            Self::SetClock => "the server's clock is set".to_owned(),
            Self::Tick => "a tick".to_owned(),
        }
    }
}
