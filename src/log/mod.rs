//! The log: the only truth. Segments hold records; the writer appends to the active one; the
//! syncer makes positions durable for many callers with one flush; replay reads a segment back.
//! Nothing here knows the index.

pub(crate) mod bell;
pub(crate) mod replay;
pub(crate) mod salvage;
pub(crate) mod segment;
pub(crate) mod sync;
pub(crate) mod writer;
