//! Positions: where a record lies in the log.

use std::fmt;

/// Bits of the offset, in units of 8 bytes: segments reach to 64 MiB.
pub(crate) const OFFSET_BITS: u32 = 23;
const _: () = assert!(crate::options::SEGMENT_BYTES_MAX as u64 <= 1 << (OFFSET_BITS + 3));

/// The place of a record in the log; later records have larger positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(u64);

impl Position {
    pub(crate) const START: Position = Position(0);

    /// Offsets are multiples of 8 below 64 MiB; an offset at the very end
    /// (the end of a full 64-MiB segment) is the start of the next segment, which orders the same.
    pub(crate) const fn new(segment: u64, offset: u32) -> Self {
        Position((segment << OFFSET_BITS) + (offset / 8) as u64)
    }

    pub(crate) const fn segment(self) -> u64 {
        self.0 >> OFFSET_BITS
    }

    pub(crate) const fn offset(self) -> u32 {
        ((self.0 & ((1 << OFFSET_BITS) - 1)) as u32) * 8
    }

    /// Returns a position behind the first bytes of the record here: whatever end of a record is
    /// at or behind it is at or behind this record's end.
    pub(crate) const fn after(self) -> Position {
        Position(self.0 + 1)
    }

    /// Returns a position inside of whatever ends here: it is smaller than every position up to
    /// which something is durable, if that covers this end.
    pub(crate) const fn before(self) -> Position {
        Position(self.0 - 1)
    }

    /// Returns the position as a number that orders the same.
    pub const fn get(self) -> u64 {
        self.0
    }

    pub(crate) const fn from_u64(value: u64) -> Self {
        Position(value)
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.segment(), self.offset())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_hold_segment_and_offset_and_order_by_log_order() {
        let position = Position::new(7, 64);
        assert_eq!((position.segment(), position.offset()), (7, 64));
        assert!(Position::new(7, 72) > position);
        assert!(Position::new(8, 8) > Position::new(7, 64 * 1024 * 1024 - 8));
    }
}
