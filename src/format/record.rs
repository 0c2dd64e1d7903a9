//! Records: the frames of the log. `docs/format.md` section 3.
//!
//! A frame is a 16-byte header, the state header of claim kinds, the key, and tagged parts,
//! zero-padded to 8 bytes. Its checksum covers kind and length too and is seeded with the
//! segment's nonce and the frame's offset, so bytes of a recycled or misplaced block never
//! validate. The newest record of a key is its whole state: no record is a difference to another.
//!
//! A group is a frame whose body is whole frames: its own checksum makes them valid together or
//! not at all, and each of them is read at its own offset like any other.

use super::le::{Fields, Put, Reader, set_u32};
use super::{Malformed, to_u32, to_usize};
use crate::stamp::Stamp;

pub(crate) const HEADER_BYTES: usize = 16;
pub(crate) const STATE_BYTES: usize = 64;
pub(crate) const PART_HEADER_BYTES: usize = 8;
pub(crate) const ALIGN: usize = 8;
/// The largest frame: its length is kept in 16 bits, in units of 8 bytes.
pub(crate) const FRAME_BYTES_MAX: usize = 65_535 * ALIGN;
const KEY_LEN_LONG: usize = 255;

const _: () = assert!(FRAME_BYTES_MAX == 512 * 1024 - 8);

/// What a record says. The numbers are part of the format; 20 and above are for later versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Kind {
    Seen = 1,
    Forgotten = 2,
    Claimed = 3,
    Started = 4,
    Done = 5,
    Failed = 6,
    Rejected = 7,
    InDoubt = 8,
    Dead = 9,
    Cell = 10,
    Watermark = 11,
    Queued = 12,
    Parked = 13,
    SyncMark = 16,
    Unsettled = 17,
    Seal = 18,
    Group = 19,
}

/// One more than the largest kind: the width of per-kind counts.
pub(crate) const KIND_COUNT: usize = 20;

impl Kind {
    pub(crate) fn from_u8(code: u8) -> Option<Kind> {
        Some(match code {
            1 => Kind::Seen,
            2 => Kind::Forgotten,
            3 => Kind::Claimed,
            4 => Kind::Started,
            5 => Kind::Done,
            6 => Kind::Failed,
            7 => Kind::Rejected,
            8 => Kind::InDoubt,
            9 => Kind::Dead,
            10 => Kind::Cell,
            11 => Kind::Watermark,
            12 => Kind::Queued,
            13 => Kind::Parked,
            16 => Kind::SyncMark,
            17 => Kind::Unsettled,
            18 => Kind::Seal,
            19 => Kind::Group,
            _ => return None,
        })
    }

    /// Says whether the record is about a key, and so has an entry in the index.
    pub(crate) fn has_key(self) -> bool {
        (self as u8) < 16
    }

    /// Says whether a state header precedes the key.
    pub(crate) fn has_state(self) -> bool {
        self.has_key() && self as u8 > 2
    }

    /// Says whether the record may not be dropped with its segment while it is the key's newest.
    pub(crate) fn is_unsettled(self) -> bool {
        self.is_open_claim() || self.is_attached()
    }

    /// Says whether somebody has yet to end what the record says of its key.
    pub(crate) fn is_open_claim(self) -> bool {
        matches!(self, Kind::Claimed | Kind::Started | Kind::InDoubt)
    }

    /// Says whether the record is something that commits together with a key.
    pub(crate) fn is_attached(self) -> bool {
        self.is_queued() || matches!(self, Kind::Cell | Kind::Watermark)
    }

    /// Says whether the record is an entry of an outbox.
    pub(crate) fn is_queued(self) -> bool {
        matches!(self, Kind::Queued | Kind::Parked)
    }

    /// Says whether part 1 is always there: a value, whatever its length.
    pub(crate) fn has_value(self) -> bool {
        self == Kind::Done || self.is_attached()
    }
}

/// The frame was carried over from an older segment; part `ORIGIN` names where it first was.
pub(crate) const FLAG_CARRIED: u16 = 1 << 4;
/// The state has a fingerprint.
pub(crate) const FLAG_FINGERPRINT: u16 = 1 << 5;
/// The claim outlives its process; only its lease ends it.
pub(crate) const FLAG_DETACHED: u16 = 1 << 6;
/// The outcome was over the limit and was not kept.
pub(crate) const FLAG_OUTCOME_DROPPED: u16 = 1 << 7;
/// The owner said that it does not know whether the effect happened.
pub(crate) const FLAG_UNKNOWN: u16 = 1 << 8;
/// The commit had something attached.
pub(crate) const FLAG_ATTACHED: u16 = 1 << 9;
/// Low bits of the flags: how many zero bytes end the frame.
const PAD_MASK: u16 = 0b111;
const FLAGS_KNOWN: u16 = PAD_MASK
    | FLAG_CARRIED
    | FLAG_FINGERPRINT
    | FLAG_DETACHED
    | FLAG_OUTCOME_DROPPED
    | FLAG_UNKNOWN
    | FLAG_ATTACHED;

/// The fixed fields of claim kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StateHeader {
    /// The epoch.
    pub(crate) stamp: u64,
    /// The generation of the opener that holds the claim.
    pub(crate) owner: u64,
    /// Trusted time of the event: claimed, started, committed, failed, in doubt since.
    pub(crate) at_ms: u64,
    /// Claimed, Started: end of the lease. Failed: not before. Otherwise 0.
    pub(crate) until_ms: u64,
    pub(crate) fingerprint: [u8; 16],
    pub(crate) attempt: u32,
    /// Trusted time of the key's first claim.
    pub(crate) first_seen_s: u32,
    pub(crate) lease_ms: u32,
    pub(crate) pid: u32,
}

impl StateHeader {
    pub(crate) fn epoch(&self) -> Stamp {
        Stamp::from_u64(self.stamp)
    }
}

/// The tagged parts of a record. Unknown tags are refused: a later version wrote them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Parts<'a> {
    /// The outcome, or the value of what is attached.
    pub(crate) outcome: Option<&'a [u8]>,
    pub(crate) error: Option<&'a [u8]>,
    pub(crate) evidence: Option<&'a [u8]>,
    /// Where a carried record first was.
    pub(crate) origin: Option<u64>,
    /// The drop time of the segment that holds the superseded record (0: never): this record's
    /// segment is not dropped before it.
    pub(crate) inherit_s: Option<u32>,
    /// Entries of an outbox with the same one are dispatched in order.
    pub(crate) ordering: Option<&'a [u8]>,
    /// Trusted second from which on the outcome is not told any more.
    pub(crate) outcome_until_s: Option<u32>,
}

impl Parts<'_> {
    /// Returns the length of all parts in the frame. Most records have none.
    #[inline]
    fn bytes(&self) -> usize {
        let has_none = matches!(
            self,
            Parts {
                outcome: None,
                error: None,
                evidence: None,
                origin: None,
                inherit_s: None,
                ordering: None,
                outcome_until_s: None,
            }
        );
        if has_none {
            return 0;
        }
        let part = |bytes: Option<&[u8]>| bytes.map_or(0, |b| PART_HEADER_BYTES + b.len());
        part(self.outcome)
            + part(self.error)
            + part(self.evidence)
            + self.origin.map_or(0, |_| PART_HEADER_BYTES + 8)
            + self.inherit_s.map_or(0, |_| PART_HEADER_BYTES + 4)
            + part(self.ordering)
            + self.outcome_until_s.map_or(0, |_| PART_HEADER_BYTES + 4)
    }
}

const TAG_OUTCOME: u16 = 1;
const TAG_ERROR: u16 = 2;
const TAG_EVIDENCE: u16 = 3;
const TAG_ORIGIN: u16 = 4;
const TAG_INHERIT: u16 = 5;
const TAG_ORDERING: u16 = 6;
const TAG_OUTCOME_UNTIL: u16 = 7;

/// One record, as written and as read; borrows its key and parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record<'a> {
    pub(crate) kind: Kind,
    pub(crate) namespace: u16,
    pub(crate) flags: u16,
    /// End of retention in seconds of trusted time, exclusive; 0 is never.
    pub(crate) expires_at_s: u32,
    pub(crate) key: &'a [u8],
    pub(crate) state: StateHeader,
    pub(crate) parts: Parts<'a>,
}

impl<'a> Record<'a> {
    pub(crate) fn new(kind: Kind, namespace: u16, key: &'a [u8]) -> Self {
        Record {
            kind,
            namespace,
            flags: 0,
            expires_at_s: 0,
            key,
            state: StateHeader::default(),
            parts: Parts::default(),
        }
    }

    /// Returns the length of the frame, in bytes.
    pub(crate) fn frame_bytes(&self) -> usize {
        self.body_bytes().next_multiple_of(ALIGN)
    }

    fn body_bytes(&self) -> usize {
        HEADER_BYTES
            + if self.kind.has_state() {
                STATE_BYTES
            } else {
                0
            }
            + if self.key.len() >= KEY_LEN_LONG { 2 } else { 0 }
            + self.key.len()
            + self.parts.bytes()
    }

    /// Appends the frame to `out`, with its checksum. The caller has checked the size.
    pub(crate) fn encode(&self, out: &mut Vec<u8>, seed: u32) {
        let start = out.len();
        let body = self.body_bytes();
        let frame = body.next_multiple_of(ALIGN);
        assert!(
            frame <= FRAME_BYTES_MAX,
            "the size was to be checked before"
        );
        let pad = frame - body;
        out.resize(start + frame, 0);
        let bytes = out.get_mut(start..).unwrap_or_default();
        let mut out = Fields::new(bytes);
        let key_len = self.key.len().min(KEY_LEN_LONG);
        let flags = self.flags & !PAD_MASK | to_u16(pad);
        let words = [
            u64::from(to_u16(frame / ALIGN)) << 32
                | u64::from(self.kind as u8) << 48
                | u64::from(u8::try_from(key_len).unwrap_or(u8::MAX)) << 56,
            u64::from(self.expires_at_s) | u64::from(self.namespace) << 32 | u64::from(flags) << 48,
        ];
        for word in words {
            out.put_u64(word);
        }
        if self.kind.has_state() {
            self.encode_state(&mut out);
        }
        if key_len == KEY_LEN_LONG {
            out.put_u16(to_u16(self.key.len()));
        }
        out.put(self.key);
        if self.parts.bytes() > 0 {
            self.encode_parts(&mut out);
        }
        set_crc(bytes, seed);
    }

    fn encode_state(&self, out: &mut impl Put) {
        let s = &self.state;
        out.put_u64(s.stamp);
        out.put_u64(s.owner);
        out.put_u64(s.at_ms);
        out.put_u64(s.until_ms);
        out.put(&s.fingerprint);
        out.put_u32(s.attempt);
        out.put_u32(s.first_seen_s);
        out.put_u32(s.lease_ms);
        out.put_u32(s.pid);
    }

    fn encode_parts(&self, out: &mut impl Put) {
        let mut part = |tag: u16, bytes: &[u8]| {
            out.put_u16(tag);
            out.put_u16(0);
            out.put_u32(to_u32(bytes.len()));
            out.put(bytes);
        };
        if let Some(bytes) = self.parts.outcome {
            part(TAG_OUTCOME, bytes);
        }
        if let Some(bytes) = self.parts.error {
            part(TAG_ERROR, bytes);
        }
        if let Some(bytes) = self.parts.evidence {
            part(TAG_EVIDENCE, bytes);
        }
        if let Some(origin) = self.parts.origin {
            part(TAG_ORIGIN, &origin.to_le_bytes());
        }
        if let Some(seconds) = self.parts.inherit_s {
            part(TAG_INHERIT, &seconds.to_le_bytes());
        }
        if let Some(bytes) = self.parts.ordering {
            part(TAG_ORDERING, bytes);
        }
        if let Some(seconds) = self.parts.outcome_until_s {
            part(TAG_OUTCOME_UNTIL, &seconds.to_le_bytes());
        }
    }
}

fn to_u16(value: usize) -> u16 {
    u16::try_from(value).unwrap_or(u16::MAX)
}

fn put_header(out: &mut Vec<u8>, frame_bytes: usize, kind: Kind, key_len: usize) {
    out.put_u32(0);
    out.put_u16(to_u16(frame_bytes / ALIGN));
    out.put_u8(kind as u8);
    out.put_u8(u8::try_from(key_len).unwrap_or(u8::MAX));
}

fn set_crc(frame: &mut [u8], seed: u32) {
    let crc = checksum(frame, seed);
    set_u32(frame, 0, crc);
}

fn checksum(frame: &[u8], seed: u32) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(seed);
    hasher.update(frame.get(4..).unwrap_or_default());
    hasher.finalize()
}

/// The checksum's seed: another segment or another offset is another seed, and CRC-32 maps
/// different seeds of the same bytes to different sums.
pub(crate) fn seed(nonce: u32, offset: u32) -> u32 {
    nonce.wrapping_add((offset / 8).wrapping_mul(0x9e37_79b1))
}

/// The bytes are what was written, by a version that knows more than this one.
pub(crate) const NEWER: Malformed = Malformed("record of a newer version");

/// What a record says that is header and key and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bare<'a> {
    pub(crate) namespace: u16,
    pub(crate) expires_at_s: u32,
    pub(crate) key: &'a [u8],
}

/// A frame whose checksum was compared; not parsed yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame<'a> {
    pub(crate) kind: Kind,
    bytes: &'a [u8],
}

/// Reads the length that a frame's first 8 bytes claim; `None` if no frame can start so.
pub(crate) fn claimed_bytes(header: &[u8]) -> Option<usize> {
    let mut reader = Reader::new(header.get(4..8)?);
    let len = usize::from(reader.u16().ok()?) * ALIGN;
    let kind = reader.u8().ok()?;
    // A kind of a later version may be any but 0, which is what empty space looks like.
    (len >= HEADER_BYTES && kind != 0).then_some(len)
}

/// Says whether these bytes look like a frame's header of this version: a cheap test before a
/// checksum, where a frame is looked for among bytes of any kind.
pub(crate) fn may_start(bytes: &[u8]) -> bool {
    let Some(header) = bytes.get(..HEADER_BYTES) else {
        return false;
    };
    let mut reader = Reader::new(header.get(6..).unwrap_or_default());
    let kind = reader.u8().ok().and_then(Kind::from_u8);
    let flags = header.get(14..).map(Reader::new).map(|mut r| r.u16());
    kind.is_some() && matches!(flags, Some(Ok(flags)) if flags & !FLAGS_KNOWN == 0)
}

impl<'a> Frame<'a> {
    /// Verifies the frame at the start of `bytes`.
    pub(crate) fn verify(bytes: &'a [u8], seed: u32) -> Result<Frame<'a>, Malformed> {
        let len = claimed_bytes(bytes).ok_or(Malformed("no frame starts here"))?;
        let frame = bytes
            .get(..len)
            .ok_or(Malformed("frame longer than what is left"))?;
        let crc = Reader::new(frame).u32()?;
        if checksum(frame, seed) != crc {
            return Err(Malformed("checksum differs"));
        }
        let kind = frame.get(6).and_then(|b| Kind::from_u8(*b)).ok_or(NEWER)?;
        Ok(Frame { kind, bytes: frame })
    }

    /// Returns the frame at the start of bytes in which it was verified before.
    pub(crate) fn verified(bytes: &'a [u8]) -> Result<Frame<'a>, Malformed> {
        let missing = Malformed("no frame starts here");
        let len = claimed_bytes(bytes).ok_or(missing)?;
        let frame = bytes.get(..len).ok_or(missing)?;
        let kind = frame.get(6).and_then(|b| Kind::from_u8(*b)).ok_or(NEWER)?;
        Ok(Frame { kind, bytes: frame })
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Parses a record about a key.
    #[inline]
    pub(crate) fn record(&self) -> Result<Record<'a>, Malformed> {
        match self.bare() {
            Some(bare) => Ok(Record {
                expires_at_s: bare.expires_at_s,
                ..Record::new(self.kind, bare.namespace, bare.key)
            }),
            None => self.record_in_full(),
        }
    }

    /// Parses a record that is header and key and nothing else, as most are. `None`: it is another
    /// one, or malformed.
    #[inline]
    pub(crate) fn bare(&self) -> Option<Bare<'a>> {
        if !matches!(self.kind, Kind::Seen | Kind::Forgotten) {
            return None;
        }
        let (header, rest) = self.bytes.split_first_chunk::<HEADER_BYTES>()?;
        let [_, _, _, _, _, _, _, key_len, e0, e1, e2, e3, n0, n1, f0, f1] = *header;
        let (key, pad) = rest.split_at_checked(usize::from(key_len))?;
        let is_bare = !key.is_empty()
            && key.len() < KEY_LEN_LONG
            && pad.len() < ALIGN
            && usize::from(u16::from_le_bytes([f0, f1])) == pad.len()
            && pad.iter().all(|byte| *byte == 0);
        is_bare.then_some(Bare {
            namespace: u16::from_le_bytes([n0, n1]),
            expires_at_s: u32::from_le_bytes([e0, e1, e2, e3]),
            key,
        })
    }

    fn record_in_full(&self) -> Result<Record<'a>, Malformed> {
        if !self.kind.has_key() {
            return Err(Malformed("record has no key"));
        }
        let mut r = Reader::new(self.bytes);
        r.bytes(7)?;
        let key_len = usize::from(r.u8()?);
        let expires_at_s = r.u32()?;
        let namespace = r.u16()?;
        let flags = r.u16()?;
        if flags & !FLAGS_KNOWN != 0 {
            return Err(NEWER);
        }
        let state = if self.kind.has_state() {
            read_state(&mut r)?
        } else {
            StateHeader::default()
        };
        let key_len = if key_len == KEY_LEN_LONG {
            usize::from(r.u16()?)
        } else {
            key_len
        };
        let key = r.bytes(key_len)?;
        let pad = usize::from(flags & PAD_MASK);
        let body = r
            .rest()
            .len()
            .checked_sub(pad)
            .ok_or(Malformed("padding too long"))?;
        let parts = read_parts(Reader::new(r.bytes(body)?))?;
        r.zeros(pad)?;
        if key.is_empty() {
            return Err(Malformed("empty key"));
        }
        let flags = flags & !PAD_MASK;
        Ok(Record {
            kind: self.kind,
            namespace,
            flags,
            expires_at_s,
            key,
            state,
            parts,
        })
    }

    /// Parses a sync mark: everything before this log position was durable when it was written.
    pub(crate) fn sync_mark(&self) -> Result<SyncMark, Malformed> {
        let mut r = self.body(Kind::SyncMark)?;
        Ok(SyncMark {
            durable: r.u64()?,
            trusted_ms: r.u64()?,
        })
    }

    /// Parses one list of unsettled offsets.
    pub(crate) fn unsettled(&self) -> Result<Vec<u32>, Malformed> {
        let mut r = self.body(Kind::Unsettled)?;
        let count = to_usize(r.u32()?);
        if count > r.rest().len() / 4 {
            return Err(Malformed("list longer than its frame"));
        }
        (0..count)
            .map(|_| r.u32().map(|at| at.saturating_mul(8)))
            .collect()
    }

    /// Parses the seal that ends a segment.
    pub(crate) fn seal(&self) -> Result<Seal, Malformed> {
        let mut r = self.body(Kind::Seal)?;
        let mut seal = Seal {
            trusted_ms: r.u64()?,
            ..Seal::default()
        };
        for count in &mut seal.by_kind {
            *count = r.u32()?;
        }
        seal.superseded_count = r.u32()?;
        seal.unsettled_count = r.u32()?;
        seal.drop_at_s = r.u32()?;
        r.zeros(4)?;
        Ok(seal)
    }

    /// Parses the records of a group that stands at this offset, with theirs.
    pub(crate) fn group(&self, nonce: u32, offset: u32) -> Result<Vec<GroupItem<'a>>, Malformed> {
        let mut rest = self.body(Kind::Group)?.rest();
        let mut at = offset + to_u32(HEADER_BYTES);
        let mut records = Vec::new();
        while !rest.is_empty() {
            let frame = Frame::verify(rest, seed(nonce, at))?;
            records.push((at, frame.record()?));
            at += to_u32(frame.len());
            rest = rest.get(frame.len()..).unwrap_or_default();
        }
        if records.is_empty() {
            return Err(Malformed("group of no records"));
        }
        Ok(records)
    }

    fn body(&self, kind: Kind) -> Result<Reader<'a>, Malformed> {
        if self.kind != kind {
            return Err(Malformed("another kind of record was expected"));
        }
        let mut r = Reader::new(self.bytes);
        r.bytes(7)?;
        r.zeros(HEADER_BYTES - 7)?;
        Ok(r)
    }
}

fn read_state(r: &mut Reader<'_>) -> Result<StateHeader, Malformed> {
    Ok(StateHeader {
        stamp: r.u64()?,
        owner: r.u64()?,
        at_ms: r.u64()?,
        until_ms: r.u64()?,
        fingerprint: r.array()?,
        attempt: r.u32()?,
        first_seen_s: r.u32()?,
        lease_ms: r.u32()?,
        pid: r.u32()?,
    })
}

fn read_parts(mut r: Reader<'_>) -> Result<Parts<'_>, Malformed> {
    let mut parts = Parts::default();
    while !r.is_empty() {
        let tag = r.u16()?;
        r.zeros(2)?;
        let len = to_usize(r.u32()?);
        let bytes = r.bytes(len)?;
        match tag {
            TAG_OUTCOME => parts.outcome = Some(bytes),
            TAG_ERROR => parts.error = Some(bytes),
            TAG_EVIDENCE => parts.evidence = Some(bytes),
            TAG_ORIGIN => parts.origin = Some(Reader::new(bytes).u64()?),
            TAG_INHERIT => parts.inherit_s = Some(Reader::new(bytes).u32()?),
            TAG_ORDERING => parts.ordering = Some(bytes),
            TAG_OUTCOME_UNTIL => parts.outcome_until_s = Some(Reader::new(bytes).u32()?),
            _ => return Err(NEWER),
        }
    }
    Ok(parts)
}

/// One record of a group, and where its own frame starts.
pub(crate) type GroupItem<'a> = (u32, Record<'a>);

/// Appends the header of a group, whose records follow.
pub(crate) fn begin_group(out: &mut Vec<u8>) {
    out.put_zeros(HEADER_BYTES);
}

/// Completes a group that goes from `start` to the end of `out`. The caller has checked the size.
pub(crate) fn end_group(out: &mut [u8], start: usize, seed: u32) {
    let Some(group) = out.get_mut(start..) else {
        return;
    };
    assert!(
        group.len() <= FRAME_BYTES_MAX,
        "the size was to be checked before"
    );
    let mut header = Vec::with_capacity(HEADER_BYTES);
    put_header(&mut header, group.len(), Kind::Group, 0);
    if let Some(place) = group.get_mut(..header.len()) {
        place.copy_from_slice(&header);
    }
    set_crc(group, seed);
}

/// Proof, inside the log, of how far an earlier flush had reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SyncMark {
    /// The position below which everything was durable.
    pub(crate) durable: u64,
    pub(crate) trusted_ms: u64,
}

pub(crate) const SYNC_MARK_BYTES: usize = HEADER_BYTES + 16;

impl SyncMark {
    pub(crate) fn encode(&self, out: &mut Vec<u8>, seed: u32) {
        let start = out.len();
        put_header(out, SYNC_MARK_BYTES, Kind::SyncMark, 0);
        out.put_zeros(8);
        out.put_u64(self.durable);
        out.put_u64(self.trusted_ms);
        set_crc(out.get_mut(start..).unwrap_or_default(), seed);
    }
}

/// The last record of a full segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seal {
    pub(crate) trusted_ms: u64,
    /// Records about keys, by kind.
    pub(crate) by_kind: [u32; KIND_COUNT],
    /// Records of this segment that a later record of this segment supersedes.
    pub(crate) superseded_count: u32,
    /// Offsets listed in the frames before this one.
    pub(crate) unsettled_count: u32,
    /// From this trusted second on nothing in the segment is needed; 0 is never.
    pub(crate) drop_at_s: u32,
}

pub(crate) const SEAL_BYTES: usize = HEADER_BYTES + 8 + KIND_COUNT * 4 + 16;
const _: () = assert!(SEAL_BYTES.is_multiple_of(ALIGN));

/// Offsets in one list frame at the most.
pub(crate) const UNSETTLED_LIST_MAX: usize = 100_000;

impl Seal {
    pub(crate) fn encode(&self, out: &mut Vec<u8>, seed: u32) {
        let start = out.len();
        put_header(out, SEAL_BYTES, Kind::Seal, 0);
        out.put_zeros(8);
        out.put_u64(self.trusted_ms);
        for count in self.by_kind {
            out.put_u32(count);
        }
        out.put_u32(self.superseded_count);
        out.put_u32(self.unsettled_count);
        out.put_u32(self.drop_at_s);
        out.put_zeros(4);
        set_crc(out.get_mut(start..).unwrap_or_default(), seed);
    }
}

/// Returns the bytes of a list of so many unsettled offsets.
pub(crate) fn unsettled_list_bytes(count: usize) -> usize {
    (HEADER_BYTES + 4 + count * 4).next_multiple_of(ALIGN)
}

/// Appends one list of unsettled offsets, at most [`UNSETTLED_LIST_MAX`].
pub(crate) fn encode_unsettled(offsets: &[u32], out: &mut Vec<u8>, seed: u32) {
    let start = out.len();
    let frame = unsettled_list_bytes(offsets.len());
    put_header(out, frame, Kind::Unsettled, 0);
    out.put_zeros(8);
    out.put_u32(to_u32(offsets.len()));
    for offset in offsets {
        out.put_u32(offset / 8);
    }
    out.put_zeros(frame - (out.len() - start));
    set_crc(out.get_mut(start..).unwrap_or_default(), seed);
}

/// Returns the bytes that the end of a segment needs with so many unsettled records.
pub(crate) fn footer_bytes(unsettled_count: usize) -> usize {
    let full = unsettled_count / UNSETTLED_LIST_MAX;
    let rest = unsettled_count % UNSETTLED_LIST_MAX;
    let rest_bytes = if rest == 0 {
        0
    } else {
        unsettled_list_bytes(rest)
    };
    full * unsettled_list_bytes(UNSETTLED_LIST_MAX) + rest_bytes + SEAL_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full_record(key: &[u8]) -> Record<'_> {
        let mut record = Record::new(Kind::Done, 3, key);
        record.flags = FLAG_FINGERPRINT | FLAG_CARRIED;
        record.expires_at_s = 77;
        record.state = StateHeader {
            stamp: 1,
            owner: 2,
            at_ms: 3,
            until_ms: 4,
            fingerprint: [5; 16],
            attempt: 6,
            first_seen_s: 7,
            lease_ms: 8,
            pid: 9,
        };
        record.parts = Parts {
            outcome: Some(b"paid"),
            error: Some(b""),
            evidence: Some(b"evidence"),
            origin: Some(11),
            inherit_s: Some(12),
            ordering: Some(b"account-1"),
            outcome_until_s: Some(13),
        };
        record
    }

    #[test]
    fn a_record_reads_back_as_it_was_written() {
        for key_len in [1, 16, 254, 255, 256, 65_535] {
            let key = vec![b'k'; key_len];
            for record in [full_record(&key), Record::new(Kind::Seen, 1, &key)] {
                let mut bytes = Vec::new();
                record.encode(&mut bytes, 42);
                assert_eq!(bytes.len(), record.frame_bytes());
                let frame = Frame::verify(&bytes, 42).unwrap();
                assert_eq!(frame.record().unwrap(), record);
            }
        }
    }

    /// What the short way says, the long one says, too: of whole records, and of any byte in them
    /// under a checksum that was made right again.
    #[test]
    fn a_record_is_the_same_by_the_short_way_and_by_the_long_one() {
        let mut short_count = 0;
        let mut agree = |bytes: &[u8]| {
            let Ok(frame) = Frame::verify(bytes, 42) else {
                return;
            };
            let in_full = frame.record_in_full();
            assert_eq!(frame.record(), in_full);
            if let Some(bare) = frame.bare() {
                let record = in_full.unwrap();
                let (namespace, expires_at_s) = (record.namespace, record.expires_at_s);
                let key = record.key;
                let expected = Bare {
                    namespace,
                    expires_at_s,
                    key,
                };
                assert_eq!(bare, expected);
                assert_eq!((record.flags, record.parts), (0, Parts::default()));
                short_count += 1;
            }
        };
        for key_len in [1, 7, 8, 16, 254, 255] {
            let key = vec![b'k'; key_len];
            let mut with_part = Record::new(Kind::Seen, 1, &key);
            with_part.parts.inherit_s = Some(7);
            let seen = Record::new(Kind::Seen, 1, &key);
            let forgotten = Record::new(Kind::Forgotten, 2, &key);
            for record in [seen, forgotten, with_part, full_record(&key)] {
                let mut bytes = Vec::new();
                record.encode(&mut bytes, 42);
                agree(&bytes);
                for bit in 32..bytes.len() * 8 {
                    let mut bad = bytes.clone();
                    bad[bit / 8] ^= 1 << (bit % 8);
                    set_crc(&mut bad, 42);
                    agree(&bad);
                }
            }
        }
        assert!(short_count > 1000, "{short_count}");
    }

    #[test]
    fn a_seen_record_of_a_16_byte_key_has_32_bytes() {
        assert_eq!(Record::new(Kind::Seen, 1, &[0; 16]).frame_bytes(), 32);
    }

    #[test]
    fn every_changed_bit_and_every_cut_is_noticed() {
        let mut bytes = Vec::new();
        full_record(b"order-1").encode(&mut bytes, 42);
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Frame::verify(&bad, 42).is_err(), "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert!(Frame::verify(&bytes[..len], 42).is_err(), "cut at {len}");
        }
    }

    #[test]
    fn bytes_at_another_offset_or_of_another_segment_do_not_validate() {
        let mut bytes = Vec::new();
        full_record(b"order-1").encode(&mut bytes, seed(9, 64));
        assert!(Frame::verify(&bytes, seed(9, 64)).is_ok());
        assert!(Frame::verify(&bytes, seed(9, 72)).is_err());
        assert!(Frame::verify(&bytes, seed(10, 64)).is_err());
    }

    fn group(nonce: u32, offset: u32, keys: &[&[u8]]) -> Vec<u8> {
        let mut bytes = vec![0; to_usize(offset)];
        begin_group(&mut bytes);
        for key in keys {
            let at = to_u32(bytes.len());
            full_record(key).encode(&mut bytes, seed(nonce, at));
        }
        end_group(&mut bytes, to_usize(offset), seed(nonce, offset));
        bytes.split_off(to_usize(offset))
    }

    #[test]
    fn a_group_is_valid_as_a_whole_or_not_at_all() {
        let keys: [&[u8]; 3] = [b"order-1", b"account-1", b"account-2"];
        let bytes = group(9, 64, &keys);
        let read = |bytes: &[u8]| {
            let frame = Frame::verify(bytes, seed(9, 64))?;
            let records = frame.group(9, 64)?;
            assert_eq!(frame.len(), bytes.len());
            Ok::<_, Malformed>(records.iter().map(|r| r.1.key.to_vec()).collect::<Vec<_>>())
        };
        assert_eq!(read(&bytes).unwrap(), keys);
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&bad).is_err(), "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert!(read(&bytes[..len]).is_err(), "cut at {len}");
        }
        // Its records are read at their own offsets, too.
        let inner = Frame::verify(&bytes[HEADER_BYTES..], seed(9, 64 + 16)).unwrap();
        assert_eq!(inner.record().unwrap().key, keys[0]);
        assert!(read(&group(9, 64, &[])).is_err());
    }

    /// A right checksum over wrong records: somebody's invention, or a fault of the writer.
    #[test]
    fn a_group_of_frames_that_are_no_records_is_refused() {
        let mut bytes = group(9, 64, &[b"order-1"]);
        bytes[HEADER_BYTES + 20] ^= 1;
        set_crc(&mut bytes, seed(9, 64));
        let frame = Frame::verify(&bytes, seed(9, 64)).unwrap();
        assert!(frame.group(9, 64).is_err());
        let mut bytes = vec![0; HEADER_BYTES];
        SyncMark {
            durable: 1,
            trusted_ms: 2,
        }
        .encode(&mut bytes, seed(9, 64 + 16));
        end_group(&mut bytes, 0, seed(9, 64));
        let frame = Frame::verify(&bytes, seed(9, 64)).unwrap();
        assert!(frame.group(9, 64).is_err());
    }

    #[test]
    fn marks_lists_and_seals_read_back() {
        let mut bytes = Vec::new();
        let mark = SyncMark {
            durable: 5,
            trusted_ms: 6,
        };
        mark.encode(&mut bytes, 1);
        assert_eq!(bytes.len(), SYNC_MARK_BYTES);
        assert_eq!(Frame::verify(&bytes, 1).unwrap().sync_mark().unwrap(), mark);

        bytes.clear();
        encode_unsettled(&[64, 128, 4096], &mut bytes, 1);
        assert_eq!(
            Frame::verify(&bytes, 1).unwrap().unsettled().unwrap(),
            [64, 128, 4096]
        );

        bytes.clear();
        let mut seal = Seal {
            trusted_ms: 1,
            superseded_count: 2,
            ..Seal::default()
        };
        seal.by_kind[1] = 9;
        seal.drop_at_s = 8;
        seal.encode(&mut bytes, 1);
        assert_eq!(bytes.len(), SEAL_BYTES);
        assert_eq!(Frame::verify(&bytes, 1).unwrap().seal().unwrap(), seal);
    }

    #[test]
    fn a_list_that_claims_more_than_its_frame_is_refused_without_allocating() {
        let mut bytes = Vec::new();
        encode_unsettled(&[64], &mut bytes, 1);
        bytes[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
        set_crc(&mut bytes, 1);
        let frame = Frame::verify(&bytes, 1).unwrap();
        assert_eq!(
            frame.unsettled(),
            Err(Malformed("list longer than its frame"))
        );
    }
}
