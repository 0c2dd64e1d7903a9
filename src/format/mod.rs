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

/// Looked at together: the compiler uses wide registers for that.
const ZEROS_BYTES: usize = 4096;

/// Returns how many bytes there are up to the last one that is not zero.
pub(crate) fn used_len(bytes: &[u8]) -> usize {
    let is_zero = |chunk: &&[u8]| chunk.iter().fold(0, |all, byte| all | byte) == 0;
    let chunks = bytes.rchunks(ZEROS_BYTES).take_while(is_zero);
    let zeros: usize = chunks.map(<[u8]>::len).sum();
    let rest = bytes.get(..bytes.len() - zeros).unwrap_or_default();
    rest.iter()
        .rposition(|byte| *byte != 0)
        .map_or(0, |last| last + 1)
}

/// Converts a 32-bit length from disk to an index.
pub(crate) fn to_usize(value: u32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_at_the_end_are_not_used() {
        for len in [
            0,
            1,
            7,
            ZEROS_BYTES - 1,
            ZEROS_BYTES,
            ZEROS_BYTES + 1,
            3 * ZEROS_BYTES + 9,
        ] {
            let mut bytes = vec![0; len];
            assert_eq!(used_len(&bytes), 0);
            for last in [0, 1, len / 2, len.saturating_sub(1)] {
                if let Some(byte) = bytes.get_mut(last) {
                    *byte = 0x80;
                    assert_eq!(used_len(&bytes), last + 1, "{len}");
                    bytes[..last].fill(3);
                    assert_eq!(used_len(&bytes), last + 1, "{len}");
                    bytes.fill(0);
                }
            }
        }
    }
}
