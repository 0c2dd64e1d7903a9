//! What the processes of a shared store tell each other, in one small file that is never durable:
//! the first opener makes it anew. `docs/format.md` section 10.
//!
//! Each cell is written by whoever holds the gate that it belongs to, as one write inside one page.

use super::le::{Put, Reader, check_crc_at_end, put_crc_at_end};
use super::{FORMAT, Malformed, StoreId, to_u32};

pub(crate) const MAGIC: [u8; 8] = *b"idemlogS";
pub(crate) const SHARED_BYTES: usize = 512;
const HEADER_BYTES: usize = 64;
/// Largest text of why the store is poisoned.
const CAUSE_BYTES_MAX: usize = 240;

/// One cell, by its place in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cell {
    /// The end of the log, the newest stamp, and the edit of the manifest that the log up to there
    /// needs. Gate: turn; read without it, so it has a checksum.
    End { end: u64, stamp: u64, edit: u64 },
    /// The newest edit of the manifest. Gate: edit.
    Edit(u64),
    /// Everything below is durable. Gate: flush; read without it, so it has a checksum.
    Durable {
        durable: u64,
        /// A flush is under way: found by the next one, its owner has died within it.
        flushing: bool,
    },
    /// The store is poisoned, and why. No gate: it stays.
    Poison(String),
}

impl Cell {
    /// Returns the cell's bytes, and where they belong.
    pub(crate) fn encode(&self) -> (u64, Vec<u8>) {
        let mut bytes = Vec::with_capacity(16);
        let at = match self {
            Cell::End { end, stamp, edit } => {
                bytes.put_u64(*end);
                bytes.put_u64(*stamp);
                bytes.put_u64(*edit);
                put_crc_at_end(&mut bytes);
                64
            }
            Cell::Edit(edit) => {
                bytes.put_u64(*edit);
                128
            }
            Cell::Durable { durable, flushing } => {
                bytes.put_u64(*durable);
                bytes.put_u64(u64::from(*flushing));
                put_crc_at_end(&mut bytes);
                192
            }
            Cell::Poison(cause) => {
                let cause = cause.as_bytes();
                let cause = cause.get(..CAUSE_BYTES_MAX).unwrap_or(cause);
                bytes.put_u32(1);
                bytes.put_u32(to_u32(cause.len()));
                bytes.put(cause);
                256
            }
        };
        (at, bytes)
    }
}

/// All cells, as read at one moment; those of other gates than one's own may be older.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SharedCells {
    /// The generation of the opener that made the file: another one has come first since.
    pub(crate) epoch: u64,
    pub(crate) end: u64,
    pub(crate) stamp: u64,
    /// The edit that the log up to its end needs.
    pub(crate) end_edit: u64,
    /// The newest edit.
    pub(crate) edit: u64,
    pub(crate) durable: u64,
    pub(crate) flushing: bool,
    pub(crate) poison: Option<String>,
}

impl SharedCells {
    /// Says whether the end of the log was told: not in the middle of telling, nor by who died in
    /// it.
    pub(crate) fn is_told(&self) -> bool {
        self.end != 0
    }

    /// Returns a new file's bytes.
    pub(crate) fn encode(&self, store: &StoreId) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(SHARED_BYTES);
        bytes.put(&MAGIC);
        bytes.put(store);
        bytes.put_u16(FORMAT);
        bytes.put_u64(self.epoch);
        bytes.put_zeros(HEADER_BYTES - 4 - bytes.len());
        put_crc_at_end(&mut bytes);
        bytes.resize(SHARED_BYTES, 0);
        let cells = [
            Cell::End {
                end: self.end,
                stamp: self.stamp,
                edit: self.end_edit,
            },
            Cell::Edit(self.edit),
            Cell::Durable {
                durable: self.durable,
                flushing: self.flushing,
            },
        ];
        for (at, cell) in cells.iter().map(Cell::encode) {
            let at = usize::try_from(at).unwrap_or(usize::MAX);
            let place = bytes.get_mut(at..).and_then(|b| b.get_mut(..cell.len()));
            if let Some(place) = place {
                place.copy_from_slice(&cell);
            }
        }
        bytes
    }

    pub(crate) fn decode(bytes: &[u8], store: &StoreId) -> Result<Self, Malformed> {
        let header = bytes
            .get(..HEADER_BYTES)
            .ok_or(Malformed("shared file is cut short"))?;
        let mut header = Reader::new(check_crc_at_end(header)?);
        if header.array()? != MAGIC || header.array::<16>()? != *store || header.u16()? != FORMAT {
            return Err(Malformed("shared file of another store or format"));
        }
        let epoch = header.u64()?;
        let cell = |at: usize| Reader::new(bytes.get(at..).unwrap_or_default());
        let (end, stamp, end_edit) = decode_end(bytes);
        let (durable, flushing) = decode_durable(bytes);
        let mut poison = cell(256);
        let is_poisoned = poison.u32()? != 0;
        let len = poison.u32()?;
        let mut cause = || -> Result<String, Malformed> {
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            let cause = poison.bytes(len.min(CAUSE_BYTES_MAX))?;
            Ok(String::from_utf8_lossy(cause).into_owned())
        };
        Ok(SharedCells {
            epoch,
            end,
            stamp,
            end_edit,
            edit: cell(128).u64()?,
            durable,
            flushing,
            poison: if is_poisoned { Some(cause()?) } else { None },
        })
    }
}

/// A cell with a checksum. One that was read while it was written says that nothing is known.
fn checked_cell(bytes: &[u8], at: usize, len: usize) -> Result<Reader<'_>, Malformed> {
    let cell = bytes.get(at..at + len);
    let cell = cell.ok_or(Malformed("cell is cut short"))?;
    Ok(Reader::new(check_crc_at_end(cell)?))
}

fn decode_end(bytes: &[u8]) -> (u64, u64, u64) {
    let read = || {
        let mut cell = checked_cell(bytes, 64, 28)?;
        Ok::<_, Malformed>((cell.u64()?, cell.u64()?, cell.u64()?))
    };
    read().unwrap_or_default()
}

fn decode_durable(bytes: &[u8]) -> (u64, bool) {
    let read = || {
        let mut cell = checked_cell(bytes, 192, 20)?;
        Ok::<_, Malformed>((cell.u64()?, cell.u64()? != 0))
    };
    read().unwrap_or((0, true))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cell_is_read_back_and_leaves_the_others() {
        let store = [7; 16];
        let made = SharedCells {
            epoch: 3,
            ..SharedCells::default()
        };
        let mut bytes = made.encode(&store);
        assert_eq!(bytes.len(), SHARED_BYTES);
        let cells = [
            Cell::End {
                end: 1 << 40 | 5,
                stamp: 77,
                edit: 8,
            },
            Cell::Edit(9),
            Cell::Durable {
                durable: 1 << 40,
                flushing: true,
            },
            Cell::Poison("flushing the log failed".to_owned()),
        ];
        for (at, cell) in cells.iter().map(Cell::encode) {
            let at = usize::try_from(at).unwrap();
            bytes[at..at + cell.len()].copy_from_slice(&cell);
        }
        let read = SharedCells::decode(&bytes, &store).unwrap();
        assert_eq!(
            read,
            SharedCells {
                epoch: 3,
                end: 1 << 40 | 5,
                stamp: 77,
                end_edit: 8,
                edit: 9,
                durable: 1 << 40,
                flushing: true,
                poison: Some("flushing the log failed".to_owned()),
            }
        );
        let mut torn = bytes.clone();
        torn[195] ^= 1;
        torn[70] ^= 1;
        let torn = SharedCells::decode(&torn, &store).unwrap();
        assert_eq!((torn.durable, torn.flushing), (0, true));
        assert_eq!(
            (torn.end, torn.stamp, torn.end_edit, torn.edit),
            (0, 0, 0, 9)
        );
        assert!(SharedCells::decode(&bytes, &[8; 16]).is_err());
        assert!(SharedCells::decode(&bytes[..100], &store).is_err());
        bytes[3] ^= 1;
        assert!(SharedCells::decode(&bytes, &store).is_err());
    }

    #[test]
    fn a_long_cause_is_cut() {
        let (at, cell) = Cell::Poison("x".repeat(1000)).encode();
        assert!(usize::try_from(at).unwrap() + cell.len() <= SHARED_BYTES);
    }
}
