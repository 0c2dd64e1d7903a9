//! The header of a log segment. `docs/format.md` section 2.

use super::le::{Put, Reader, check_crc_at_end, put_crc_at_end};
use super::{FORMAT, Malformed, StoreId};

pub(crate) const MAGIC: [u8; 8] = *b"idemlogS";
pub(crate) const SEGMENT_HEADER_BYTES: usize = 64;

/// Says which store and which life of the file the records behind it belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentHeader {
    pub(crate) store: StoreId,
    pub(crate) id: u64,
    /// Random for each life of the file: old bytes of a recycled file never validate.
    pub(crate) nonce: u32,
    pub(crate) bytes: u32,
    /// Identity of the hash key, so that an index built under another one is not believed.
    pub(crate) hash_key_id: u64,
    /// The file had another life: what lies behind the records may be old bytes, not zeros.
    pub(crate) recycled: bool,
}

impl SegmentHeader {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(SEGMENT_HEADER_BYTES);
        out.put(&MAGIC);
        out.put_u16(FORMAT);
        out.put_u16(0);
        out.put_u32(self.nonce);
        out.put(&self.store);
        out.put_u64(self.id);
        out.put_u64(self.hash_key_id);
        out.put_u32(self.bytes);
        out.put_u32(u32::from(self.recycled));
        out.put_zeros(4);
        put_crc_at_end(&mut out);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<SegmentHeader, Malformed> {
        let bytes = bytes
            .get(..SEGMENT_HEADER_BYTES)
            .ok_or(Malformed("segment header cut short"))?;
        let mut r = Reader::new(check_crc_at_end(bytes)?);
        if r.array()? != MAGIC {
            return Err(Malformed("not a segment"));
        }
        if r.u16()? != FORMAT {
            return Err(Malformed("segment of another format"));
        }
        r.zeros(2)?;
        let nonce = r.u32()?;
        let store = r.array()?;
        let id = r.u64()?;
        let hash_key_id = r.u64()?;
        let bytes = r.u32()?;
        let recycled = match r.u32()? {
            0 => false,
            1 => true,
            _ => return Err(Malformed("unknown segment flags")),
        };
        r.zeros(4)?;
        Ok(SegmentHeader {
            store,
            id,
            nonce,
            bytes,
            hash_key_id,
            recycled,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_reads_back_and_every_changed_byte_is_noticed() {
        let header = SegmentHeader {
            store: [1; 16],
            id: 2,
            nonce: 3,
            bytes: 65_536,
            hash_key_id: 4,
            recycled: true,
        };
        let bytes = header.encode();
        assert_eq!(bytes.len(), SEGMENT_HEADER_BYTES);
        assert_eq!(SegmentHeader::decode(&bytes), Ok(header));
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 0x10;
            assert!(SegmentHeader::decode(&bad).is_err(), "byte {at}");
        }
    }
}
