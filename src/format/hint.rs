//! Hints: an image of the active table up to a durable position. `docs/format.md` section 7.

use super::le::{Put, Reader, check_crc_at_end, put_crc_at_end};
use super::record::KIND_COUNT;
use super::segment::SEGMENT_HEADER_BYTES;
use super::{FORMAT, Malformed, StoreId, to_u32, to_usize};

pub(crate) const MAGIC: [u8; 8] = *b"idemlogH";
/// The largest hint that is read: every record of a full segment, and some.
pub(crate) const HINT_BYTES_MAX: u64 = 128 * 1024 * 1024;

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
    /// Hash and offset of each key's newest record, ascending.
    pub(crate) entries: Vec<(u64, u32)>,
}

impl Hint {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(192 + self.unsettled.len() * 8 + self.entries.len() * 12);
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
        out.put_u32(to_u32(self.entries.len()));
        for (offset, namespace) in &self.unsettled {
            out.put_u32(*offset);
            out.put_u16(*namespace);
            out.put_u16(0);
        }
        for (h, offset) in &self.entries {
            out.put_u64(*h);
            out.put_u32(*offset);
        }
        put_crc_at_end(&mut out);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Hint, Malformed> {
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
            entries: Vec::new(),
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
        for _ in 0..entries {
            let h = r.u64()?;
            hint.entries.push((h, offset(r.u32()?)?));
        }
        if r.is_empty() {
            Ok(hint)
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
            entries: vec![(9, 64), (10, 128)],
        }
    }

    #[test]
    fn a_hint_reads_back_and_every_changed_byte_and_cut_is_noticed() {
        let bytes = sample().encode();
        assert_eq!(Hint::decode(&bytes), Ok(sample()));
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 4;
            assert!(Hint::decode(&bad).is_err(), "byte {at}");
            assert!(Hint::decode(&bytes[..at]).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn offsets_outside_of_the_log_are_refused_even_with_a_good_checksum() {
        for bad in [0, 56, 65, 4096] {
            let mut hint = sample();
            hint.entries = vec![(9, bad), (10, 128)];
            assert!(Hint::decode(&hint.encode()).is_err(), "offset {bad}");
        }
    }
}
