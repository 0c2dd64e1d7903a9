//! Reads what is left of a damaged segment: every valid frame, and the gaps between them.
//!
//! A frame is found again behind a gap by its checksum, which is bound to the file's nonce and to
//! the frame's offset. Only what looks like a header of this version is checksummed there, and how
//! many bytes are checksummed in vain is bounded, so that hostile bytes cost linear time.
//!
//! Of a group whose own checksum is wrong, the records that are whole are found one by one.

use super::replay::{Content, Item, parse_frame};
use crate::format::record::{ALIGN, Frame, GroupItem, NEWER, claimed_bytes, may_start, seed};
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::format::{Malformed, to_u32, to_usize};

/// Bytes that may be checksummed in vain, in sizes of the segment.
const VAIN_FACTOR: usize = 8;

/// One stretch of a segment.
#[derive(Debug)]
pub(crate) enum Stretch<'a> {
    /// A valid frame, and the offset behind it.
    Found(Item<'a>, u32),
    /// From here to there no valid frame starts.
    Gap(u32, u32),
    /// A frame whose checksum is right but which this version does not understand.
    NotUnderstood(u32),
}

/// Iterates over a segment's bytes up to `end`. Ends behind a seal.
#[derive(Debug)]
pub(crate) struct Salvage<'a> {
    bytes: &'a [u8],
    nonce: u32,
    at: usize,
    /// A frame found behind a gap, told after the gap.
    found: Option<(Content<'a>, usize)>,
    /// What is left of a group that ends at `at`.
    group: std::vec::IntoIter<GroupItem<'a>>,
    vain_bytes: usize,
    over: bool,
}

impl<'a> Salvage<'a> {
    /// Reads `bytes` up to `end`, or to their own end.
    pub(crate) fn new(bytes: &'a [u8], nonce: u32, end: u32) -> Self {
        let bytes = bytes.get(..to_usize(end)).unwrap_or(bytes);
        Salvage {
            bytes,
            nonce,
            at: SEGMENT_HEADER_BYTES,
            found: None,
            group: Vec::new().into_iter(),
            vain_bytes: bytes.len().saturating_mul(VAIN_FACTOR),
            over: false,
        }
    }

    fn parse(&mut self, at: usize) -> Result<(Content<'a>, usize), Malformed> {
        let rest = self.bytes.get(at..).unwrap_or_default();
        let len = claimed_bytes(rest).filter(|len| *len <= rest.len());
        let len = len.ok_or(Malformed("no frame starts here"))?;
        let verified = Frame::verify(rest, seed(self.nonce, to_u32(at)));
        if verified.as_ref().is_err_and(|why| *why != NEWER) {
            self.vain_bytes = self.vain_bytes.saturating_sub(len);
        }
        let frame = verified?;
        Ok((parse_frame(&frame, self.nonce, to_u32(at))?, len))
    }

    fn tell(&mut self, content: Content<'a>, len: usize) -> Option<Stretch<'a>> {
        self.at += len;
        match content {
            Content::One(item) => {
                self.over = matches!(item, Item::Seal(_));
                Some(Stretch::Found(item, to_u32(self.at)))
            }
            Content::Group(records) => {
                self.group = records;
                self.next()
            }
        }
    }
}

impl<'a> Iterator for Salvage<'a> {
    type Item = Stretch<'a>;

    fn next(&mut self) -> Option<Stretch<'a>> {
        if let Some((offset, record)) = self.group.next() {
            return Some(Stretch::Found(
                Item::Record(offset, record),
                to_u32(self.at),
            ));
        }
        if let Some((content, len)) = self.found.take() {
            return self.tell(content, len);
        }
        if self.over || self.at >= self.bytes.len() {
            return None;
        }
        let from = self.at;
        let mut at = from;
        while at < self.bytes.len() && self.vain_bytes > 0 {
            let rest = self.bytes.get(at..).unwrap_or_default();
            if at > from && !may_start(rest) {
                at += ALIGN;
                continue;
            }
            match self.parse(at) {
                Ok((content, len)) if at == from => return self.tell(content, len),
                Ok(found) => {
                    self.found = Some(found);
                    self.at = at;
                    return Some(Stretch::Gap(to_u32(from), to_u32(at)));
                }
                Err(why) if why == NEWER => {
                    self.over = true;
                    return Some(Stretch::NotUnderstood(to_u32(at)));
                }
                Err(_not_a_frame) => at += ALIGN,
            }
        }
        self.over = true;
        Some(Stretch::Gap(to_u32(from), to_u32(self.bytes.len())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::record::{Kind, Record, Seal, begin_group, end_group};

    const NONCE: u32 = 7;

    fn segment(records: u8) -> Vec<u8> {
        let mut bytes = vec![0; SEGMENT_HEADER_BYTES];
        for n in 0..records {
            let seed = seed(NONCE, to_u32(bytes.len()));
            Record::new(Kind::Seen, 1, &[n; 16]).encode(&mut bytes, seed);
        }
        bytes
    }

    /// Keys found, and gaps.
    fn read(bytes: &[u8]) -> (Vec<u8>, Vec<(u32, u32)>) {
        let (mut keys, mut gaps) = (Vec::new(), Vec::new());
        for stretch in Salvage::new(bytes, NONCE, u32::MAX) {
            match stretch {
                Stretch::Found(Item::Record(_, record), _) => keys.push(record.key[0]),
                Stretch::Found(..) => {}
                Stretch::Gap(from, to) => gaps.push((from, to)),
                Stretch::NotUnderstood(_) => panic!("nothing newer was written"),
            }
        }
        (keys, gaps)
    }

    #[test]
    fn of_a_damaged_group_the_records_that_are_whole_are_found() {
        let mut bytes = segment(1);
        let start = bytes.len();
        begin_group(&mut bytes);
        for n in 1..4 {
            let seed = seed(NONCE, to_u32(bytes.len()));
            Record::new(Kind::Seen, 1, &[n; 16]).encode(&mut bytes, seed);
        }
        end_group(&mut bytes, start, seed(NONCE, to_u32(start)));
        let end = bytes.len();
        let at = to_u32(end);
        Record::new(Kind::Seen, 1, &[9; 16]).encode(&mut bytes, seed(NONCE, at));
        assert_eq!(read(&bytes), (vec![0, 1, 2, 3, 9], vec![]));
        // The second record of the group.
        bytes[start + 16 + 32 + 20] ^= 1;
        let (keys, gaps) = read(&bytes);
        assert_eq!(keys, [0, 1, 3, 9]);
        let header = (to_u32(start), to_u32(start + 16));
        let record = (to_u32(start + 48), to_u32(start + 80));
        assert_eq!(gaps, [header, record]);
    }

    #[test]
    fn each_damaged_sector_costs_the_frames_in_it_and_no_other() {
        let whole = segment(100);
        assert_eq!(read(&whole), ((0..100).collect(), Vec::new()));
        for sector in (512..whole.len()).step_by(512) {
            for fill in [0, 0xff, 0x55] {
                let mut bytes = whole.clone();
                let end = (sector + 512).min(bytes.len());
                bytes[sector..end].fill(fill);
                let (keys, gaps) = read(&bytes);
                let lost = (end - sector) / 32;
                assert_eq!(keys.len(), 100 - lost, "{sector} {fill}");
                assert_eq!(gaps, [(to_u32(sector), to_u32(end))], "{sector} {fill}");
            }
        }
    }

    #[test]
    fn a_frame_of_another_place_or_segment_is_not_taken() {
        let mut bytes = segment(4);
        let moved = bytes[64..96].to_vec();
        bytes[128..160].copy_from_slice(&moved);
        assert_eq!(read(&bytes), (vec![0, 1, 3], vec![(128, 160)]));
        let foreign = Salvage::new(&bytes, NONCE + 1, u32::MAX);
        assert!(foreign.into_iter().all(|s| matches!(s, Stretch::Gap(..))));
    }

    #[test]
    fn nothing_is_read_behind_a_seal() {
        let mut bytes = segment(1);
        let at = to_u32(bytes.len());
        Seal::default().encode(&mut bytes, seed(NONCE, at));
        bytes.resize(4096, 0xff);
        assert_eq!(read(&bytes), (vec![0], Vec::new()));
    }

    #[test]
    fn hostile_lengths_cost_linear_time() {
        // Every 8 bytes claim to start a frame of 512 KiB.
        let header = [0, 0, 0, 0, 0xff, 0xff, 1, 0];
        let bytes = header.repeat(512 * 1024);
        let mut salvage = Salvage::new(&bytes, NONCE, u32::MAX);
        assert!(matches!(salvage.next(), Some(Stretch::Gap(64, _))));
        assert!(salvage.next().is_none());
        assert_eq!(salvage.vain_bytes, 0);
    }
}
