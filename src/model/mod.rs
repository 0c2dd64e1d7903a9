//! Decisions only: from a key's state, a call and the time to a new state and a verdict. No I/O,
//! no locks, no clock: everything here runs in a test without a disk.

pub(crate) mod claim;
pub(crate) mod retention;
