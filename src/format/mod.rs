//! Bytes only: how everything in the directory is laid out. No I/O, no clock, and no length read
//! from disk is trusted before it is compared with the bytes that are there.
//!
//! `docs/format.md` is the prose; `tests/golden.rs` proves the two equal.

pub(crate) mod filter;
pub(crate) mod fuse;
pub(crate) mod hint;
pub(crate) mod le;
pub(crate) mod manifest;
pub(crate) mod names;
pub(crate) mod record;
pub(crate) mod run;
pub(crate) mod segment;
pub(crate) mod shared;
pub(crate) mod times;
#[cfg(feature = "token")]
pub(crate) mod token;
pub(crate) mod watermark;

/// The format this version writes; it reads this one only.
pub(crate) const FORMAT: u16 = 1;

/// Why bytes are not what they should be; the engine turns it into an `Error` with a file name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed(pub(crate) &'static str);

/// Identity of a store: random, made at creation, in every file.
pub(crate) type StoreId = [u8; 16];

/// Converts a length to the width it has on disk; saturates, which a size check then refuses.
pub(crate) fn to_u32(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// Converts a 32-bit length from disk to an index.
pub(crate) fn to_usize(value: u32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}
