//! Decisions only: from a key's state, a call and the time to a new state and a verdict. No I/O,
//! no locks, no clock: everything here runs in a test without a disk.

pub(crate) mod cell;
pub(crate) mod claim;
pub(crate) mod outbox;
pub(crate) mod retention;
pub(crate) mod watermark;
