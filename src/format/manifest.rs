//! The manifest: which namespaces, segments and runs exist. `docs/format.md` section 4.
//!
//! The file is the whole state under one checksum and is replaced by rename.

use super::le::{Put, Reader, check_crc_at_end, put_crc_at_end};
use super::{FORMAT, Malformed, StoreId, to_u32, to_usize};
use crate::clock::Anchor;
use crate::key::NamespaceKind;
use crate::options::{SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN};
use crate::position::OFFSET_BITS;
use crate::stamp::GENERATION_MAX;

pub(crate) const MAGIC: [u8; 8] = *b"idemlogM";
/// The largest manifest that is read: about a million segments.
pub(crate) const MANIFEST_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// The largest counter or segment id: ids have 41 bits in a position.
const ID_MAX: u64 = (1 << 41) - 2;

/// One namespace of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamespaceEntry {
    pub(crate) id: u16,
    pub(crate) kind: NamespaceKind,
    pub(crate) name: String,
}

/// One segment of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentEntry {
    pub(crate) id: u64,
    pub(crate) nonce: u32,
    pub(crate) bytes: u32,
    /// What the seal said; `None` while the segment is active, frozen or prepared.
    pub(crate) sealed: Option<SealedEntry>,
}

/// What a sealed segment must contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SealedEntry {
    /// Offset behind the seal record.
    pub(crate) end: u32,
    pub(crate) records_count: u32,
    pub(crate) unsettled_count: u32,
    /// From this trusted second on nothing settled in it is needed; 0 is never.
    pub(crate) drop_at_s: u32,
    /// Trusted second from which on its records were written.
    pub(crate) began_at_s: u32,
    /// From this trusted second on less than a quarter of its bytes is needed; 0 is never.
    pub(crate) sparse_at_s: u32,
    /// CRC-32 of the whole file up to `end`.
    pub(crate) crc: u32,
}

/// One index run over the segments `lo..=hi`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RunEntry {
    pub(crate) lo: u64,
    pub(crate) hi: u64,
    pub(crate) generation: u32,
}

/// The whole state of the store besides the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Manifest {
    pub(crate) store: StoreId,
    /// Counts replacements; only ever rises.
    pub(crate) edit: u64,
    pub(crate) hash_key: [u8; 16],
    /// No stamp of a larger generation has left the store.
    pub(crate) generation_reserved: u64,
    pub(crate) anchor: Anchor,
    pub(crate) segment_next: u64,
    pub(crate) namespace_next: u16,
    /// Position of the end of the log, if the store was closed cleanly.
    pub(crate) closed_at: Option<u64>,
    pub(crate) namespaces: Vec<NamespaceEntry>,
    /// In order of their ids.
    pub(crate) segments: Vec<SegmentEntry>,
    /// In order of `lo`.
    pub(crate) runs: Vec<RunEntry>,
    /// Segments whose removal may not be durable yet.
    pub(crate) dropped: Vec<u64>,
}

impl Manifest {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(256 + self.segments.len() * 40);
        out.put(&MAGIC);
        out.put_u16(FORMAT);
        out.put_u16(self.namespace_next);
        out.put_u32(0);
        out.put(&self.store);
        out.put_u64(self.edit);
        out.put(&self.hash_key);
        out.put_u64(self.generation_reserved);
        out.put(&self.anchor.boot_id);
        out.put_u64(self.anchor.boot_ms);
        out.put_u64(self.anchor.trusted_ms);
        out.put_u64(self.anchor.slack_used_ms);
        out.put_u64(self.segment_next);
        out.put_u64(self.closed_at.unwrap_or(0));
        out.put_u32(to_u32(self.namespaces.len()));
        out.put_u32(to_u32(self.segments.len()));
        out.put_u32(to_u32(self.runs.len()));
        out.put_u32(to_u32(self.dropped.len()));
        for n in &self.namespaces {
            out.put_u16(n.id);
            out.put_u8(n.kind as u8);
            out.put_u8(u8::try_from(n.name.len()).unwrap_or(0));
            out.put(n.name.as_bytes());
        }
        for s in &self.segments {
            encode_segment(s, &mut out);
        }
        for r in &self.runs {
            out.put_u64(r.lo);
            out.put_u64(r.hi);
            out.put_u32(r.generation);
        }
        for id in &self.dropped {
            out.put_u64(*id);
        }
        put_crc_at_end(&mut out);
        out
    }

    /// Decodes a manifest; `Err(Some(format))` says that it is one of another format.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Manifest, ManifestError> {
        let mut head = Reader::new(bytes);
        if head.array() != Ok(MAGIC) {
            return Err(ManifestError::Malformed(Malformed("not a manifest")));
        }
        // The format is looked at before anything else, the checksum included: a newer format
        // may keep its checksum elsewhere.
        let format = head.u16().map_err(ManifestError::Malformed)?;
        if format != FORMAT {
            return Err(ManifestError::Format(format));
        }
        check_crc_at_end(bytes)
            .and_then(decode_body)
            .map_err(ManifestError::Malformed)
    }
}

/// Why a manifest could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ManifestError {
    Malformed(Malformed),
    Format(u16),
}

fn encode_segment(s: &SegmentEntry, out: &mut Vec<u8>) {
    out.put_u64(s.id);
    out.put_u32(s.nonce);
    out.put_u32(s.bytes);
    let sealed = s.sealed.unwrap_or(SealedEntry {
        end: 0,
        records_count: 0,
        unsettled_count: 0,
        drop_at_s: 0,
        began_at_s: 0,
        sparse_at_s: 0,
        crc: 0,
    });
    out.put_u32(sealed.end);
    out.put_u32(sealed.records_count);
    out.put_u32(sealed.unsettled_count);
    out.put_u32(sealed.drop_at_s);
    out.put_u32(sealed.began_at_s);
    out.put_u32(sealed.sparse_at_s);
    out.put_u32(sealed.crc);
}

fn decode_body(body: &[u8]) -> Result<Manifest, Malformed> {
    let mut r = Reader::new(body);
    r.bytes(MAGIC.len() + 2)?;
    let namespace_next = r.u16()?;
    r.zeros(4)?;
    let mut manifest = Manifest {
        store: r.array()?,
        edit: r.u64()?,
        hash_key: r.array()?,
        generation_reserved: r.u64()?,
        anchor: Anchor {
            boot_id: r.array()?,
            boot_ms: r.u64()?,
            trusted_ms: r.u64()?,
            slack_used_ms: r.u64()?,
        },
        segment_next: r.u64()?,
        namespace_next,
        closed_at: Some(r.u64()?).filter(|at| *at != 0),
        namespaces: Vec::new(),
        segments: Vec::new(),
        runs: Vec::new(),
        dropped: Vec::new(),
    };
    let counts = [r.u32()?, r.u32()?, r.u32()?, r.u32()?].map(to_usize);
    let [namespaces, segments, runs, dropped] = counts;
    for _ in 0..namespaces {
        manifest.namespaces.push(decode_namespace(&mut r)?);
    }
    for _ in 0..segments {
        manifest.segments.push(decode_segment(&mut r)?);
    }
    for _ in 0..runs {
        manifest.runs.push(RunEntry {
            lo: r.u64()?,
            hi: r.u64()?,
            generation: r.u32()?,
        });
    }
    for _ in 0..dropped {
        manifest.dropped.push(r.u64()?);
    }
    if !r.is_empty() {
        return Err(Malformed("bytes behind the end"));
    }
    check_numbers(&manifest)?;
    check_order(&manifest)?;
    Ok(manifest)
}

fn decode_namespace(r: &mut Reader<'_>) -> Result<NamespaceEntry, Malformed> {
    let id = r.u16()?;
    let code = usize::from(r.u8()?);
    let kind = *NamespaceKind::ALL
        .get(code)
        .ok_or(Malformed("unknown kind of namespace"))?;
    let len = usize::from(r.u8()?);
    let name = std::str::from_utf8(r.bytes(len)?);
    let Ok(name) = name else {
        return Err(Malformed("namespace name is not UTF-8"));
    };
    Ok(NamespaceEntry {
        id,
        kind,
        name: name.to_owned(),
    })
}

fn decode_segment(r: &mut Reader<'_>) -> Result<SegmentEntry, Malformed> {
    let (id, nonce, bytes) = (r.u64()?, r.u32()?, r.u32()?);
    if !(SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&bytes) {
        return Err(Malformed("segment of an impossible size"));
    }
    let sealed = SealedEntry {
        end: r.u32()?,
        records_count: r.u32()?,
        unsettled_count: r.u32()?,
        drop_at_s: r.u32()?,
        began_at_s: r.u32()?,
        sparse_at_s: r.u32()?,
        crc: r.u32()?,
    };
    if sealed.end > bytes || !sealed.end.is_multiple_of(8) {
        return Err(Malformed("sealed segment ends outside of its file"));
    }
    Ok(SegmentEntry {
        id,
        nonce,
        bytes,
        sealed: (sealed.end != 0).then_some(sealed),
    })
}

/// Counters that only rise start small: a number near the end of its range is no number of ours,
/// and would overflow where it is counted on.
fn check_numbers(m: &Manifest) -> Result<(), Malformed> {
    let ids = m.dropped.iter().copied().chain([m.edit, m.segment_next]);
    let closed_in = m.closed_at.unwrap_or(0) >> OFFSET_BITS;
    let runs = m.runs.iter().flat_map(|r| [r.lo, r.hi]);
    let times = [
        m.anchor.boot_ms,
        m.anchor.trusted_ms,
        m.anchor.slack_used_ms,
    ];
    if ids.chain(runs).chain([closed_in]).any(|n| n > ID_MAX)
        || m.generation_reserved > GENERATION_MAX - 1_000_000
        || times.into_iter().any(|t| t > u64::MAX / 2)
    {
        return Err(Malformed("number out of range"));
    }
    Ok(())
}

/// What recovery relies on: ids rise, and sealed segments come before open ones.
fn check_order(manifest: &Manifest) -> Result<(), Malformed> {
    let ids = manifest.segments.iter().map(|s| s.id);
    if !ids.clone().zip(ids.skip(1)).all(|(a, b)| a < b) {
        return Err(Malformed("segments out of order"));
    }
    if manifest
        .segments
        .last()
        .is_some_and(|s| s.id >= manifest.segment_next)
    {
        return Err(Malformed("segment above the next id"));
    }
    if !manifest.segments.is_sorted_by_key(|s| s.sealed.is_none()) {
        return Err(Malformed("sealed segment behind an open one"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Manifest {
        let sealed = SealedEntry {
            end: 4096,
            records_count: 3,
            unsettled_count: 1,
            drop_at_s: 9,
            began_at_s: 2,
            sparse_at_s: 8,
            crc: 7,
        };
        Manifest {
            store: [1; 16],
            edit: 2,
            hash_key: [3; 16],
            generation_reserved: 4,
            anchor: Anchor {
                boot_id: [5; 16],
                boot_ms: 6,
                trusted_ms: 7,
                slack_used_ms: 8,
            },
            segment_next: 12,
            namespace_next: 2,
            closed_at: Some(99),
            namespaces: vec![NamespaceEntry {
                id: 1,
                kind: NamespaceKind::NonRepeatable,
                name: "payments".into(),
            }],
            segments: vec![
                SegmentEntry {
                    id: 9,
                    nonce: 1,
                    bytes: 4096,
                    sealed: Some(sealed),
                },
                SegmentEntry {
                    id: 11,
                    nonce: 2,
                    bytes: 8192,
                    sealed: None,
                },
            ],
            runs: vec![RunEntry {
                lo: 9,
                hi: 9,
                generation: 0,
            }],
            dropped: vec![8],
        }
    }

    #[test]
    fn a_manifest_reads_back() {
        assert_eq!(Manifest::decode(&sample().encode()), Ok(sample()));
    }

    #[test]
    fn every_changed_bit_every_cut_and_every_doubling_is_noticed() {
        let bytes = sample().encode();
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Manifest::decode(&bad).is_err(), "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert!(Manifest::decode(&bytes[..len]).is_err(), "cut at {len}");
        }
        assert!(Manifest::decode(&[bytes.clone(), bytes].concat()).is_err());
    }

    #[test]
    fn a_newer_format_is_told_apart_from_damage() {
        let mut bytes = sample().encode();
        bytes[8] = 9;
        assert_eq!(Manifest::decode(&bytes), Err(ManifestError::Format(9)));
    }

    #[test]
    fn a_manifest_out_of_order_is_refused_even_with_a_good_checksum() {
        let mut bad = sample();
        bad.segments.reverse();
        assert!(Manifest::decode(&bad.encode()).is_err());
        let mut bad = sample();
        bad.segment_next = 11;
        assert!(Manifest::decode(&bad.encode()).is_err());
    }
}
