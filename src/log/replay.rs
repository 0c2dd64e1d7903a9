//! Reads a segment back in order: records, then the end of the valid prefix and what lies behind.

use crate::format::record::{
    ALIGN, Bare, Frame, GroupItem, Kind, NEWER, Record, SYNC_MARK_BYTES, Seal, SyncMark,
    claimed_bytes, seed,
};
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::format::{Malformed, to_u32, to_usize, used_len};

/// One valid frame, or one of the records that a group consists of.
#[derive(Debug)]
pub(crate) enum Item<'a> {
    Record(u32, Record<'a>),
    Mark(SyncMark),
    Unsettled,
    Seal(Seal),
}

/// Iterates over the valid prefix of a segment's bytes. Ends at the first frame that is not
/// valid; [`Replay::end`] is then its offset.
#[derive(Debug)]
pub(crate) struct Replay<'a> {
    bytes: &'a [u8],
    /// Where in the segment the bytes begin.
    base: usize,
    nonce: u32,
    at: usize,
    /// The frame at `at`, if it was verified already.
    verified: Option<Frame<'a>>,
    /// What is left of a group whose frame lies before `at`.
    group: std::vec::IntoIter<GroupItem<'a>>,
    sealed: bool,
    not_understood: bool,
}

/// What one frame holds.
#[derive(Debug)]
pub(super) enum Content<'a> {
    One(Item<'a>),
    Group(std::vec::IntoIter<GroupItem<'a>>),
}

/// Parses a frame whose checksum is right, whatever it holds.
#[cold]
pub(super) fn parse_frame<'a>(
    frame: &Frame<'a>,
    nonce: u32,
    offset: u32,
) -> Result<Content<'a>, Malformed> {
    Ok(Content::One(match frame.kind {
        Kind::SyncMark => Item::Mark(frame.sync_mark()?),
        Kind::Unsettled => {
            frame.unsettled()?;
            Item::Unsettled
        }
        Kind::Seal => Item::Seal(frame.seal()?),
        Kind::Group => return Ok(Content::Group(frame.group(nonce, offset)?.into_iter())),
        _ => Item::Record(offset, frame.record()?),
    }))
}

impl<'a> Replay<'a> {
    /// Starts behind the segment's header.
    pub(crate) fn new(bytes: &'a [u8], nonce: u32) -> Self {
        Replay::starting_at(bytes, nonce, to_u32(SEGMENT_HEADER_BYTES))
    }

    /// Starts at the offset of a frame.
    pub(crate) fn starting_at(bytes: &'a [u8], nonce: u32, offset: u32) -> Self {
        Replay {
            bytes,
            base: 0,
            nonce,
            at: to_usize(offset),
            verified: None,
            group: Vec::new().into_iter(),
            sealed: false,
            not_understood: false,
        }
    }

    /// Reads a part of a segment, which begins at this offset with a frame.
    pub(crate) fn of_part(bytes: &'a [u8], nonce: u32, offset: u32) -> Self {
        Replay {
            base: to_usize(offset),
            ..Replay::starting_at(bytes, nonce, offset)
        }
    }

    /// Returns the offset behind the last valid frame; within a group, behind all of it.
    pub(crate) fn end(&self) -> u32 {
        to_u32(self.at)
    }

    /// Says whether the seal record, which ends a segment, was read.
    pub(crate) fn is_sealed(&self) -> bool {
        self.sealed
    }

    /// Says whether the replay ended at a frame whose checksum is right but which this version
    /// does not understand: nothing behind it may be taken for an unfinished tail.
    pub(crate) fn is_not_understood(&self) -> bool {
        self.not_understood
    }

    #[inline]
    fn verify(&mut self) -> Result<Frame<'a>, Malformed> {
        if let Some(frame) = self.verified.take() {
            return Ok(frame);
        }
        let rest = self.bytes.get(self.at - self.base..).unwrap_or_default();
        Frame::verify(rest, seed(self.nonce, self.end()))
    }

    /// Returns the next item if it is a record that is header and key and nothing else, with its
    /// offset. `None`: whatever [`Replay::next`] says.
    #[inline]
    pub(crate) fn next_bare(&mut self) -> Option<(u32, Bare<'a>)> {
        if self.group.len() > 0 || self.sealed {
            return None;
        }
        let frame = self.verify().ok()?;
        let Some(bare) = frame.bare() else {
            self.verified = Some(frame);
            return None;
        };
        let offset = self.end();
        self.at += frame.len();
        Some((offset, bare))
    }

    #[inline]
    fn read(&mut self) -> Result<Option<Item<'a>>, Malformed> {
        let offset = self.end();
        let frame = self.verify()?;
        if !frame.kind.has_key() {
            return self.read_other(&frame, offset);
        }
        let record = frame.record()?;
        self.at += frame.len();
        Ok(Some(Item::Record(offset, record)))
    }

    #[cold]
    fn read_other(
        &mut self,
        frame: &Frame<'a>,
        offset: u32,
    ) -> Result<Option<Item<'a>>, Malformed> {
        let content = parse_frame(frame, self.nonce, offset)?;
        self.at += frame.len();
        Ok(match content {
            Content::One(item) => {
                self.sealed = matches!(item, Item::Seal(_));
                Some(item)
            }
            Content::Group(records) => {
                self.group = records;
                self.next_of_group()
            }
        })
    }

    #[cold]
    fn next_of_group(&mut self) -> Option<Item<'a>> {
        let (offset, record) = self.group.next()?;
        Some(Item::Record(offset, record))
    }
}

impl<'a> Iterator for Replay<'a> {
    type Item = Item<'a>;

    #[inline]
    fn next(&mut self) -> Option<Item<'a>> {
        if self.group.len() > 0 {
            return self.next_of_group();
        }
        if self.sealed {
            return None;
        }
        match self.read() {
            Ok(item) => item,
            Err(why) => {
                self.not_understood = why == NEWER;
                None
            }
        }
    }
}

/// Returns the furthest position that a sync mark behind `from` proves to have been durable;
/// 0 if there is none. Linear in the size: only what looks like a mark is verified, and nothing
/// is looked for among the zeros at the end.
pub(crate) fn proven_behind(bytes: &[u8], nonce: u32, from: u32) -> u64 {
    let mut proven = 0;
    let mut at = to_usize(from).next_multiple_of(ALIGN);
    let used = at + used_len(bytes.get(at..).unwrap_or_default());
    while let Some(rest) = bytes.get(at..).filter(|rest| rest.len() >= SYNC_MARK_BYTES)
        && at < used
    {
        if claimed_bytes(rest) == Some(SYNC_MARK_BYTES)
            && let Ok(frame) = Frame::verify(rest, seed(nonce, to_u32(at)))
            && let Ok(mark) = frame.sync_mark()
        {
            proven = proven.max(mark.durable);
        }
        at += ALIGN;
    }
    proven
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::record::{begin_group, encode_unsettled, end_group};

    fn segment(records: usize) -> Vec<u8> {
        let mut bytes = vec![0; SEGMENT_HEADER_BYTES];
        for n in 0..records {
            let key = [u8::try_from(n).unwrap(); 16];
            let seed = seed(7, to_u32(bytes.len()));
            Record::new(Kind::Seen, 1, &key).encode(&mut bytes, seed);
        }
        bytes
    }

    #[test]
    fn replay_keeps_the_prefix_before_the_first_invalid_frame() {
        let mut bytes = segment(5);
        bytes.resize(4096, 0);
        let mut replay = Replay::new(&bytes, 7);
        assert_eq!(replay.by_ref().count(), 5);
        assert_eq!(replay.end(), 64 + 5 * 32);
        assert!(!replay.is_sealed());
        bytes[64 + 2 * 32 + 20] ^= 1;
        let mut replay = Replay::new(&bytes, 7);
        assert_eq!(replay.by_ref().count(), 2);
        assert_eq!(replay.end(), 64 + 2 * 32);
    }

    #[test]
    fn the_records_of_a_group_are_replayed_together_or_not_at_all() {
        let mut bytes = segment(1);
        let start = bytes.len();
        begin_group(&mut bytes);
        for key in [b"first", b"other"] {
            let at = to_u32(bytes.len());
            Record::new(Kind::Seen, 1, key).encode(&mut bytes, seed(7, at));
        }
        end_group(&mut bytes, start, seed(7, to_u32(start)));
        let end = to_u32(bytes.len());
        bytes.resize(4096, 0);
        let mut replay = Replay::new(&bytes, 7);
        assert!(matches!(replay.next(), Some(Item::Record(64, _))));
        for offset in [start + 16, start + 16 + 24] {
            let Some(Item::Record(at, _)) = replay.next() else {
                panic!("a record is missing");
            };
            assert_eq!((to_usize(at), replay.end()), (offset, end));
        }
        assert!(replay.next().is_none());
        for at in start..to_usize(end) {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            let mut replay = Replay::new(&bad, 7);
            assert_eq!(replay.by_ref().count(), 1, "{at}");
            assert_eq!(to_usize(replay.end()), start);
        }
    }

    type Seen = (Vec<(u32, Vec<u8>)>, u32, bool, bool);

    fn seen(mut replay: Replay<'_>, short: bool) -> Seen {
        let mut found = Vec::new();
        loop {
            while let Some((offset, bare)) = short.then(|| replay.next_bare()).flatten() {
                found.push((offset, bare.key.to_vec()));
            }
            match replay.next() {
                Some(Item::Record(offset, record)) => found.push((offset, record.key.to_vec())),
                Some(_) => {}
                None => break,
            }
        }
        let ended = (replay.is_sealed(), replay.is_not_understood());
        (found, replay.end(), ended.0, ended.1)
    }

    /// Who takes bare records the short way sees the same records in the same order, and the same
    /// end, wherever the bytes are cut and whichever frame is of a later version.
    #[test]
    fn records_are_the_same_by_the_short_way_and_by_the_long_one() {
        let mut bytes = segment(2);
        let put = |bytes: &mut Vec<u8>, kind, key: &[u8]| {
            let at = to_u32(bytes.len());
            Record::new(kind, 1, key).encode(bytes, seed(7, at));
        };
        put(&mut bytes, Kind::Claimed, b"claim");
        put(&mut bytes, Kind::Forgotten, b"first");
        let start = bytes.len();
        begin_group(&mut bytes);
        put(&mut bytes, Kind::Seen, b"in a group");
        put(&mut bytes, Kind::Done, b"in it, too");
        end_group(&mut bytes, start, seed(7, to_u32(start)));
        put(&mut bytes, Kind::Seen, b"behind");
        let mark = SyncMark {
            durable: 9,
            trusted_ms: 1,
        };
        let at = to_u32(bytes.len());
        mark.encode(&mut bytes, seed(7, at));
        put(&mut bytes, Kind::Seen, b"behind a mark");
        let at = to_u32(bytes.len());
        encode_unsettled(&[64], &mut bytes, seed(7, at));
        let at = to_u32(bytes.len());
        Seal::default().encode(&mut bytes, seed(7, at));
        put(&mut bytes, Kind::Seen, b"late");
        let agree = |bytes: &[u8]| {
            let long = seen(Replay::new(bytes, 7), false);
            assert_eq!(seen(Replay::new(bytes, 7), true), long);
            long
        };
        for end in 64..=bytes.len() {
            agree(&bytes[..end]);
        }
        let (_, sealed_at, ..) = agree(&bytes);
        let (mut at, mut newer_count) = (64, 0);
        while at < to_usize(sealed_at) {
            let frame = Frame::verify(&bytes[at..], seed(7, to_u32(at))).unwrap();
            // A kind of a later version, under a right checksum.
            let mut other = bytes.clone();
            other[at + 6] = 99;
            let end = at + frame.len();
            let mut hasher = crc32fast::Hasher::new_with_initial(seed(7, to_u32(at)));
            hasher.update(&other[at + 4..end]);
            other[at..at + 4].copy_from_slice(&hasher.finalize().to_le_bytes());
            let (_, seen_to, _, is_newer) = agree(&other);
            assert!(is_newer && to_usize(seen_to) == at, "{at}");
            newer_count += 1;
            at = end;
        }
        assert_eq!(newer_count, 10);
    }

    #[test]
    fn nothing_is_read_behind_a_seal() {
        let mut bytes = segment(1);
        let at = to_u32(bytes.len());
        Seal::default().encode(&mut bytes, seed(7, at));
        let at = to_u32(bytes.len());
        Record::new(Kind::Seen, 1, b"late").encode(&mut bytes, seed(7, at));
        let mut replay = Replay::new(&bytes, 7);
        assert_eq!(replay.by_ref().count(), 2);
        assert!(replay.is_sealed());
    }

    #[test]
    fn a_mark_behind_a_hole_is_found_and_tells_what_it_proves() {
        let mut bytes = segment(5);
        let at = to_u32(bytes.len());
        SyncMark {
            durable: 99,
            trusted_ms: 1,
        }
        .encode(&mut bytes, seed(7, at));
        bytes.resize(4096, 0);
        bytes[70] ^= 1;
        let mut replay = Replay::new(&bytes, 7);
        assert_eq!(replay.by_ref().count(), 0);
        assert_eq!(proven_behind(&bytes, 7, replay.end()), 99);
    }

    #[test]
    fn arbitrary_bytes_end_the_replay_without_a_panic() {
        for fill in [0xff, 0x80, 0x01] {
            let bytes = vec![fill; 8192];
            assert_eq!(Replay::new(&bytes, 7).count(), 0);
            assert_eq!(proven_behind(&bytes, 7, 64), 0);
        }
    }
}
