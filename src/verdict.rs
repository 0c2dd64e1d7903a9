//! What calls answer: plain data. Verdicts that hand out a claim live beside the claim.

use std::time::Duration;

use crate::position::Position;
use crate::stamp::Stamp;

/// The answer of `observe`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "a duplicate must not take effect"]
pub enum Observed {
    /// The key was not remembered; it is now, as durably as asked.
    New,
    /// The key is remembered, as durably as asked.
    Duplicate,
}

impl Observed {
    /// Says whether the key was new.
    pub fn is_new(self) -> bool {
        self == Observed::New
    }
}

/// Bytes kept by `commit`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The bytes that the effect produced, as they were committed.
    Kept(Vec<u8>),
    /// The effect was committed without keeping its outcome.
    Dropped,
}

impl Outcome {
    /// Returns the bytes, if they were kept.
    pub fn bytes(&self) -> Option<&[u8]> {
        match self {
            Outcome::Kept(bytes) => Some(bytes),
            Outcome::Dropped => None,
        }
    }
}

/// A committed effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    /// What was kept of it.
    pub outcome: Outcome,
    /// Epoch of the claim that committed.
    pub epoch: Stamp,
    /// Number of the attempt that committed, from 1.
    pub attempt: u32,
    /// Trusted time of the key's first claim, in milliseconds (to the second).
    pub first_seen_ms: u64,
    /// Trusted time of the commit, in milliseconds.
    pub committed_at_ms: u64,
}

/// A started effect of which nobody knows whether it happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Doubt {
    /// Epoch of the claim in doubt; `resolve` wants it back.
    pub epoch: Stamp,
    /// Number of the attempt in doubt, from 1.
    pub attempt: u32,
    /// Trusted time of the start, or of the moment the owner gave up, in milliseconds.
    pub since_ms: u64,
    /// What `start` or the owner's `fail` left behind.
    pub evidence: Vec<u8>,
}

/// Who holds a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Process id of the opener.
    pub pid: u32,
    /// The claim outlives its process: only its lease ends it.
    pub detached: bool,
}

/// The attempt before the one that a verdict hands out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Previous {
    /// Its epoch.
    pub epoch: Stamp,
    /// Its number, from 1.
    pub attempt: u32,
    /// Whether its effect may have begun.
    pub started: bool,
    /// What `start` or `fail` left behind.
    pub evidence: Vec<u8>,
    /// The error it failed with.
    pub error: Vec<u8>,
}

/// The state of one key, as `get` reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyState {
    /// Never claimed, released, forgotten, or expired.
    Absent,
    /// Observed (filters only).
    Seen,
    /// Claimed, by an owner that is alive or whose fate no claim has asked for yet.
    Pending {
        /// Epoch of the claim.
        epoch: Stamp,
        /// Number of the attempt, from 1.
        attempt: u32,
        /// Whether the effect may have begun.
        started: bool,
        /// Who holds it.
        owner: Owner,
        /// How long the lease still excludes others; zero when lapsed or the owner is gone.
        lease_left: Duration,
        /// Trusted time of the claim or start, in milliseconds.
        since_ms: u64,
        /// What `start` left behind.
        evidence: Vec<u8>,
    },
    /// Committed.
    Done(Done),
    /// Ended with an error that may be retried.
    Failed {
        /// Epoch of the attempt.
        epoch: Stamp,
        /// Its number, from 1.
        attempt: u32,
        /// Its error.
        error: Vec<u8>,
        /// How long until it may be claimed again; zero when due.
        retry_after: Duration,
    },
    /// Ended with an error that is replayed to duplicates.
    Rejected {
        /// Epoch of the attempt.
        epoch: Stamp,
        /// Its error.
        error: Vec<u8>,
    },
    /// Started, and nobody knows whether it happened.
    InDoubt(Doubt),
    /// Attempts are used up, or it was abandoned.
    Dead {
        /// How many attempts there were.
        attempts: u32,
        /// The last error.
        error: Vec<u8>,
    },
}

impl KeyState {
    /// Says what to tell the broker about a message whose key is in this state.
    pub fn ack_advice(&self) -> AckAdvice {
        match self {
            KeyState::Done(_) | KeyState::Rejected { .. } | KeyState::Seen => AckAdvice::Ack,
            KeyState::Absent => AckAdvice::Redeliver {
                after: Duration::ZERO,
            },
            KeyState::Pending { lease_left, .. } => AckAdvice::Redeliver { after: *lease_left },
            KeyState::Failed { retry_after, .. } => AckAdvice::Redeliver {
                after: *retry_after,
            },
            KeyState::InDoubt(_) => AckAdvice::Hold,
            KeyState::Dead { .. } => AckAdvice::DeadLetter,
        }
    }

    /// Returns the state's name, as used in messages.
    pub fn name(&self) -> &'static str {
        match self {
            KeyState::Absent => "absent",
            KeyState::Seen => "seen",
            KeyState::Pending { .. } => "pending",
            KeyState::Done(_) => "done",
            KeyState::Failed { .. } => "failed",
            KeyState::Rejected { .. } => "rejected",
            KeyState::InDoubt(_) => "in-doubt",
            KeyState::Dead { .. } => "dead",
        }
    }
}

/// The answer of `commit`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a fenced commit wrote nothing"]
pub enum CommitVerdict {
    /// The effect is recorded, as durably as asked.
    Committed {
        /// Where.
        position: Position,
    },
    /// This epoch was committed before, with the same outcome.
    AlreadyCommitted,
    /// This epoch was committed before, with another outcome; that one stays.
    Conflict {
        /// The outcome that stays.
        current: Done,
        /// The outcome that was not written.
        outcome: Vec<u8>,
    },
    /// The claim is not this owner's any more; nothing was written.
    Fenced {
        /// What the key is now.
        current: KeyState,
        /// The outcome that was not written.
        outcome: Vec<u8>,
    },
    /// A cell is not what the commit expected. Nothing was written, neither the outcome nor
    /// anything attached; the claim is still held.
    CellConflict {
        /// Which of the commit's cells, counted from 0 in the order in which they were attached.
        index: usize,
        /// What the cell is.
        current: Option<Cell>,
        /// The outcome that was not written.
        outcome: Vec<u8>,
    },
}

impl CommitVerdict {
    /// Says what to tell the broker: a fenced owner's message belongs to whoever took over, and
    /// one whose cells have changed is to be done again.
    pub fn ack_advice(&self) -> AckAdvice {
        match self {
            CommitVerdict::Fenced { current, .. } => current.ack_advice(),
            CommitVerdict::CellConflict { .. } => AckAdvice::Redeliver {
                after: Duration::ZERO,
            },
            _ => AckAdvice::Ack,
        }
    }
}

/// A versioned value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Cell {
    /// The value.
    pub value: Vec<u8>,
    /// The stamp of the write that made it so: never used again, also not for an equal value.
    pub version: Stamp,
}

/// What a write of a cell expects to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Expected {
    /// Any value or none: the write is unconditional.
    Anything,
    /// No value: never written, or deleted.
    Absent,
    /// The value of this version.
    Version(Stamp),
}

/// The answer of a write of a cell.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a conflict wrote nothing"]
pub enum CellVerdict {
    /// The cell has this value, as durably as asked.
    Written {
        /// Its version.
        version: Stamp,
    },
    /// The cell is absent, as durably as asked.
    Deleted,
    /// The cell is not what was expected; nothing was written.
    Conflict {
        /// What it is.
        current: Option<Cell>,
    },
}

/// What is known of a number of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "a duplicate must not take effect"]
pub enum Sequenced {
    /// It is not done, and everything before it is.
    Fresh,
    /// It is not done, and neither are earlier ones.
    Gap {
        /// The lowest number that is not done.
        expected: u64,
    },
    /// It is done.
    Duplicate,
}

/// The answer of a reset of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "a fenced reset changed nothing"]
pub enum Reset {
    /// The source is numbered anew from here on.
    Applied,
    /// The source has this epoch, which is not lower; nothing was changed.
    Fenced {
        /// The epoch in force.
        current: u64,
    },
}

/// How an attempt ended other than by a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It surely did not take effect, or repeating it is harmless: retry after a pause.
    Retryable {
        /// The pause.
        after: Duration,
        /// The error, kept for the next attempt.
        error: Vec<u8>,
    },
    /// It will never succeed: duplicates get this error.
    Permanent {
        /// The error.
        error: Vec<u8>,
    },
    /// It surely did not begin: the key is absent again.
    Release,
    /// Nobody knows whether it took effect.
    Unknown {
        /// What may help to find out.
        evidence: Vec<u8>,
    },
}

impl Failure {
    /// Makes an unknown failure out of any error's message.
    pub fn unknown(error: impl std::fmt::Display) -> Self {
        Failure::Unknown {
            evidence: error.to_string().into_bytes(),
        }
    }

    /// Makes a retryable failure, due after `after`.
    pub fn retryable(after: Duration, error: impl std::fmt::Display) -> Self {
        Failure::Retryable {
            after,
            error: error.to_string().into_bytes(),
        }
    }

    /// Makes a permanent failure.
    pub fn permanent(error: impl std::fmt::Display) -> Self {
        Failure::Permanent {
            error: error.to_string().into_bytes(),
        }
    }
}

/// The answer of `fail`, `start`, `renew`, `resolve` and `forget` where nothing is handed out.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a fenced call wrote nothing"]
pub enum Change {
    /// The key is now in this state, as durably as asked.
    Applied(KeyState),
    /// The claim is not this owner's any more, or the key is not in a state that allows the call;
    /// nothing was written.
    Fenced {
        /// What the key is.
        current: KeyState,
    },
}

impl Change {
    /// Says whether the call took effect.
    pub fn is_applied(&self) -> bool {
        matches!(self, Change::Applied(_))
    }
}

/// What somebody found out about a key in doubt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// The effect happened, with this outcome.
    Applied(Vec<u8>),
    /// The effect did not happen: it may be claimed again at once.
    NotApplied,
    /// Nobody will ever know: the key is dead.
    Abandon,
}

/// What a probe found out downstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probed {
    /// The effect happened, with this outcome.
    Applied(Vec<u8>),
    /// The effect did not happen.
    NotApplied,
    /// The target cannot tell: the key is in doubt.
    Unknown,
}

/// What to tell the broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AckAdvice {
    /// The message has had its effect, or has its final answer: acknowledge it.
    Ack,
    /// Not now: let it be delivered again after this pause.
    Redeliver {
        /// The pause.
        after: Duration,
    },
    /// Nobody knows: hold it, or park it for a person.
    Hold,
    /// It will not be processed: the store has no payload, so keep the message elsewhere.
    DeadLetter,
}

/// One key of `pending` or `in_doubt`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsettled {
    /// The namespace's name.
    pub namespace: String,
    /// The key.
    pub key: Vec<u8>,
    /// `Pending` or `InDoubt`.
    pub state: KeyState,
    /// How long it has been so, by trusted time.
    pub age: Duration,
}
