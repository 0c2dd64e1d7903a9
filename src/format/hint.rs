//! Hints: an image of the active table up to a durable position. `docs/format.md` section 7.

use super::le::{Put, Reader, check_crc_at_end};
use super::record::KIND_COUNT;
use super::segment::SEGMENT_HEADER_BYTES;
use super::{FORMAT, Malformed, StoreId, to_u32, to_usize};

pub(crate) const MAGIC: [u8; 8] = *b"idemlogH";
/// The largest hint that is read: every record of a full segment, and some.
pub(crate) const HINT_BYTES_MAX: u64 = 128 * 1024 * 1024;
/// An `h` of 44 bits in six bytes, and an offset divided by 8 in three.
const ENTRY_BYTES: usize = 9;
/// The file is handed on in chunks of about so many bytes.
const CHUNK_BYTES: usize = 64 * 1024;

/// What replaying a segment up to `end` would come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hint {
    pub(crate) store: StoreId,
    pub(crate) hash_key_id: u64,
    pub(crate) segment: u64,
    pub(crate) nonce: u32,
    /// Everything below was durable when the hint was written.
    pub(crate) end: u32,
    /// Offset of the frame that ends at `end`: if it is not there, the hint is of another log.
    pub(crate) last: u32,
    pub(crate) trusted_ms: u64,
    pub(crate) by_kind: [u32; KIND_COUNT],
    pub(crate) superseded_count: u32,
    pub(crate) drop_at_s: u32,
    /// Offset and namespace of each current unsettled record.
    pub(crate) unsettled: Vec<(u32, u16)>,
}

/// Hash and offset of each key's newest record, ascending: as they are in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HintEntries<'a>(&'a [u8]);

impl HintEntries<'_> {
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u32)> {
        let entries = self.0.chunks_exact(ENTRY_BYTES);
        entries.filter_map(|entry| {
            let entry: &[u8; ENTRY_BYTES] = entry.try_into().ok()?;
            let [a, b, c, d, e, f, x, y, z] = *entry;
            let h = u64::from_le_bytes([a, b, c, d, e, f, 0, 0]);
            Some((h, u32::from_le_bytes([x, y, z, 0]) * 8))
        })
    }
}

impl Hint {
    /// Hands the file with so many entries on, in order. `write` gets bytes and their offset.
    pub(crate) fn stream<E>(
        &self,
        entries_count: usize,
        entries: impl Iterator<Item = (u64, u32)>,
        mut write: impl FnMut(&[u8], u64) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut chunk = self.encode_front(entries_count);
        let (mut crc, mut at) = (crc32fast::Hasher::new(), 0);
        for (h, offset) in entries {
            if chunk.len() >= CHUNK_BYTES {
                crc.update(&chunk);
                write(&chunk, at)?;
                at += chunk.len() as u64;
                chunk.clear();
            }
            let [a, b, c, d, e, f, ..] = h.to_le_bytes();
            let [x, y, z, _] = (offset / 8).to_le_bytes();
            chunk.put(&[a, b, c, d, e, f, x, y, z]);
        }
        crc.update(&chunk);
        chunk.put_u32(crc.finalize());
        write(&chunk, at)
    }

    /// Returns what stands before the entries.
    fn encode_front(&self, entries_count: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(192 + self.unsettled.len() * 8);
        out.put(&MAGIC);
        out.put_u16(FORMAT);
        out.put_u16(0);
        out.put_u32(self.nonce);
        out.put(&self.store);
        out.put_u64(self.hash_key_id);
        out.put_u64(self.segment);
        out.put_u32(self.end);
        out.put_u32(self.last);
        out.put_u64(self.trusted_ms);
        for count in self.by_kind {
            out.put_u32(count);
        }
        out.put_u32(self.superseded_count);
        out.put_u32(self.drop_at_s);
        out.put_u32(to_u32(self.unsettled.len()));
        out.put_u32(to_u32(entries_count));
        for (offset, namespace) in &self.unsettled {
            out.put_u32(*offset);
            out.put_u16(*namespace);
            out.put_u16(0);
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<(Hint, HintEntries<'_>), Malformed> {
        let mut r = Reader::new(check_crc_at_end(bytes)?);
        if r.array()? != MAGIC {
            return Err(Malformed("not a hint"));
        }
        if r.u16()? != FORMAT {
            return Err(Malformed("hint of another format"));
        }
        r.zeros(2)?;
        let nonce = r.u32()?;
        let mut hint = Hint {
            nonce,
            store: r.array()?,
            hash_key_id: r.u64()?,
            segment: r.u64()?,
            end: r.u32()?,
            last: r.u32()?,
            trusted_ms: r.u64()?,
            by_kind: [0; KIND_COUNT],
            superseded_count: 0,
            drop_at_s: 0,
            unsettled: Vec::new(),
        };
        for count in &mut hint.by_kind {
            *count = r.u32()?;
        }
        hint.superseded_count = r.u32()?;
        hint.drop_at_s = r.u32()?;
        let unsettled = to_usize(r.u32()?);
        let entries = to_usize(r.u32()?);
        // Every record is indexed or superseded: other counts would overflow where they are used.
        let records: u64 = hint.by_kind.iter().map(|count| u64::from(*count)).sum();
        if records != entries as u64 + u64::from(hint.superseded_count) || unsettled > entries {
            return Err(Malformed("counts do not add up"));
        }
        let offset = |value: u32| {
            let inside = value < hint.end && value >= to_u32(SEGMENT_HEADER_BYTES);
            if inside && value.is_multiple_of(8) {
                Ok(value)
            } else {
                Err(Malformed("bad offset"))
            }
        };
        for _ in 0..unsettled {
            let at = offset(r.u32()?)?;
            hint.unsettled.push((at, r.u16()?));
            r.zeros(2)?;
        }
        let entries = HintEntries(r.bytes(entries.saturating_mul(ENTRY_BYTES))?);
        for (_, at) in entries.iter() {
            offset(at)?;
        }
        if r.is_empty() {
            Ok((hint, entries))
        } else {
            Err(Malformed("bytes behind the end"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Hint {
        Hint {
            store: [1; 16],
            hash_key_id: 2,
            segment: 3,
            nonce: 4,
            end: 4096,
            last: 4000,
            trusted_ms: 5,
            by_kind: [1; KIND_COUNT],
            superseded_count: 18,
            drop_at_s: 8,
            unsettled: vec![(64, 1)],
        }
    }

    fn encode(hint: &Hint, entries: &[(u64, u32)]) -> Vec<u8> {
        let mut file = Vec::new();
        let write = |bytes: &[u8], at| {
            assert_eq!(at, file.len() as u64);
            file.extend_from_slice(bytes);
            Ok::<(), ()>(())
        };
        let streamed = hint.stream(entries.len(), entries.iter().copied(), write);
        streamed.unwrap();
        file
    }

    /// Encodes so many entries and compares what is read.
    fn encode_whole(count: u32) -> Vec<u8> {
        let mut hint = sample();
        hint.by_kind[0] = count;
        hint.superseded_count = hint.by_kind[1..].iter().sum();
        let entries: Vec<(u64, u32)> = (0..count).map(|n| (n.into(), 64 + n % 500 * 8)).collect();
        let file = encode(&hint, &entries);
        let (read, of_file) = Hint::decode(&file).unwrap();
        assert_eq!(read, hint);
        assert_eq!(of_file.iter().collect::<Vec<_>>(), entries);
        file
    }

    #[test]
    fn a_hint_reads_back_and_every_changed_byte_and_cut_is_noticed() {
        let bytes = encode_whole(2);
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 4;
            assert!(Hint::decode(&bad).is_err(), "byte {at}");
            assert!(Hint::decode(&bytes[..at]).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn offsets_outside_of_the_log_are_refused_even_with_a_good_checksum() {
        for bad in [0, 56, 4096] {
            let bytes = encode(&sample(), &[(9, bad), (10, 128)]);
            assert!(Hint::decode(&bytes).is_err(), "offset {bad}");
        }
        assert!(Hint::decode(&encode(&sample(), &[(9, 64), (10, 128)])).is_ok());
    }

    #[test]
    fn a_hint_of_several_chunks_reads_back() {
        for count in [5_000, 5_500, 12_000] {
            let bytes = encode_whole(count);
            assert!(bytes.len() > to_usize(count) * ENTRY_BYTES);
        }
    }
}
