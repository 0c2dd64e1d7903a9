//! Embedded dedup log: exactly-once effects for at-least-once consumers.
//!
//! A worker opens a directory, asks "has this key been done?", and gets one atomic answer that
//! survives `kill -9` and power loss. Three rungs, each complete:
//!
//! 1. **Filter** ([`DedupLog::filter`]): [`Filter::observe`] answers `New` or `Duplicate`.
//! 2. **Run** ([`Namespace::run_once`]): claim, start, run, commit; duplicates get the outcome.
//! 3. **Claim** ([`Namespace::claim`]): the same steps one by one, and batches of them.
//!
//! What exactly is promised, and what is not, is in `docs/guarantees.md`.

#[cfg_attr(
    not(feature = "testing"),
    allow(unreachable_pub, reason = "public only for testing")
)]
mod clock;
mod error;
#[cfg(feature = "json")]
mod json_field;
mod key;
mod key_parts;
mod key_time;
mod options;
mod position;
mod stamp;
mod stats;
mod verdict;

mod format;
mod vfs;

mod index;
mod log;
mod model;

mod engine;

#[cfg(feature = "tower")]
mod http;

#[cfg(feature = "testing")]
mod fuzz;

pub use engine::ack_gate::{AckGate, AckMode};
pub use engine::cells::Cells;
pub use engine::claim::{Claim, ClaimVerdict, Commit, Committable, StartError, Started};
pub use engine::class::{
    DirectCommit, EffectClass, Internal, NonRepeatable, Probeable, Repeatable,
};
pub use engine::commit_all::{CommitAll, CommitAllVerdict};
pub use engine::dispatch::{Dispatched, Dispatcher, Stopper};
pub use engine::filter::{Filter, ObserveOptions};
pub use engine::handle::DedupLog;
pub use engine::intake::{Intake, IntakeOptions, JobStatus, Keep, Submitted};
pub use engine::job::{Job, Taken};
pub use engine::lock::{Lock, LockVerdict, Locks};
pub use engine::namespace::{ClaimOptions, Namespace, ProbeRequest};
pub use engine::outbox::{Outbox, OutboxEntry, OutboxStats};
pub use engine::repair::{Repair, RepairReport};
pub use engine::run_once::{Attempt, RunVerdict};
#[cfg(feature = "snowflake")]
pub use engine::snowflake::Snowflakes;
pub use engine::ticket::Ticket;
#[cfg(feature = "token")]
pub use engine::token::{RedeemVerdict, Redemption, Token, TokenOptions, TokenPolicy, Tokens};
pub use engine::verify::{Problem, VerifyReport, verify};
pub use engine::watermarks::Watermarks;
pub use error::{Applied, Error, ErrorKind, Result};
#[cfg(feature = "tower")]
pub use http::{
    HTTP_BODY_BYTES_DEFAULT, HTTP_KEY_BYTES_DEFAULT, HTTP_RETRY_AFTER_DEFAULT, HttpBody,
    Idempotency, IdempotencyLayer, StoredResponse,
};
#[cfg(feature = "json")]
pub use json_field::json_field;
pub use key::{
    EVIDENCE_BYTES_MAX, Fingerprint, KEY_BYTES_MAX, NAMESPACE_BYTES_MAX, NamespaceKind,
    OUTCOME_BYTES_MAX,
};
pub use key_parts::{KeyParts, random_key, snowflake_key};
pub use key_time::KeyTime;
pub use options::{
    Durability, Event, EventCallback, FLUSH_INTERVAL_DEFAULT, LEASE_DEFAULT, NamespaceOptions,
    OUTCOME_BYTES_DEFAULT, OpenMode, Options, ProgressCallback, RETENTION_DEFAULT, Retention,
    SEGMENT_BYTES_DEFAULT, SEGMENT_BYTES_FIRST, SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN,
    STRETCHES_MAX, SYNC_INTERVAL_DEFAULT, TURN_TIMEOUT_DEFAULT, UNSETTLED_COUNT_DEFAULT,
    WALL_JUMP_DEFAULT, WatermarkOptions, WhenFull, ZeroFill,
};
pub use position::Position;
pub use stamp::Stamp;
pub use stats::{Health, LostRange, OpenReport, Stats};
pub use verdict::{
    AckAdvice, Cell, CellVerdict, Change, CommitVerdict, Done, Doubt, Expected, Failure, KeyState,
    Observed, Outcome, Owner, Previous, Probed, Reset, Resolution, Sequenced, Unsettled,
};

/// Clocks, disks and hooks for tests: of this crate, and of the handlers of its users.
#[cfg(feature = "testing")]
pub mod testing {
    pub use crate::clock::{Clock, ManualClock, Moved, Reading, SystemClock};
    pub use crate::vfs::{Access, Dir, File, Lock, LockAttempt, LockFile, LockMode, Map, sim};

    /// Bodies of the fuzz targets.
    pub mod fuzz {
        pub use crate::fuzz::{filter, manifest, ops, page, record, recovery, repair};
    }
}

/// Compiles and runs the examples of the prose.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
#[doc = include_str!("../docs/attached.md")]
#[doc = include_str!("../docs/intake.md")]
#[doc = include_str!("../docs/keys.md")]
#[doc = include_str!("../docs/acks.md")]
#[cfg_attr(feature = "token", doc = include_str!("../docs/tokens.md"))]
#[doc = include_str!("../docs/shared.md")]
#[doc = include_str!("../docs/waiting.md")]
#[cfg_attr(feature = "tower", doc = include_str!("../docs/http.md"))]
#[cfg_attr(feature = "testing", doc = include_str!("../docs/testing.md"))]
struct Prose;
