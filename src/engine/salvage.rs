//! What can still be read of a damaged store, in the order of the log.
//!
//! A lost stretch is told between the records around it, because it matters what was written
//! before it: what a later record has changed may be in there. Changes nothing.

use std::collections::BTreeSet;
use std::io;

use crate::error::{Error, ErrorKind, Result};
use crate::format::manifest::{Manifest, SealedEntry};
use crate::format::names::FileName;
use crate::format::record::Record;
use crate::format::segment::{SEGMENT_HEADER_BYTES, SegmentHeader};
use crate::format::{to_u32, to_usize};
use crate::log::replay::{Item, Replay, proven_behind};
use crate::log::salvage::{Salvage, Stretch};
use crate::options::SEGMENT_BYTES_MAX;
use crate::position::Position;
use crate::stats::LostRange;
use crate::vfs::{Access, Dir, File};

/// Where reading goes around what the device refuses to read.
const READ_CHUNK_BYTES: usize = 4096;

/// One segment, as the manifest or the file itself describes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source {
    pub(super) id: u64,
    pub(super) nonce: u32,
    pub(super) bytes: u32,
    pub(super) sealed: Option<SealedEntry>,
}

impl Source {
    fn name(&self) -> String {
        FileName::Segment(self.id).to_string()
    }
}

/// What the log says, one after the other.
pub(super) enum Piece<'a> {
    Record(Record<'a>),
    /// Something is missing here.
    Lost,
}

/// What reading the log has come to.
#[derive(Debug, Default)]
pub(super) struct Salvaged {
    pub(super) records_count: u64,
    pub(super) lost: Vec<LostRange>,
    pub(super) trusted_ms: u64,
    /// The largest generation that a stamp or an owner names.
    pub(super) generation: u64,
    /// Lost ranges whose end in time is not known yet, from this index on.
    open_from: usize,
}

impl Salvaged {
    fn note_time(&mut self, at_ms: u64) {
        if at_ms == 0 {
            return;
        }
        for lost in self.lost.iter_mut().skip(self.open_from) {
            lost.before_ms = Some(at_ms);
        }
        self.open_from = self.lost.len();
        self.trusted_ms = self.trusted_ms.max(at_ms);
    }

    fn note(&mut self, item: &Item<'_>) {
        match item {
            Item::Record(_, record) => {
                self.records_count += 1;
                let stamp = crate::stamp::Stamp::from_u64(record.state.stamp);
                self.generation = self
                    .generation
                    .max(stamp.generation())
                    .max(record.state.owner);
                self.note_time(record.state.at_ms);
            }
            Item::Mark(mark) => self.note_time(mark.trusted_ms),
            Item::Seal(seal) => self.note_time(seal.trusted_ms),
            Item::Unsettled => {}
        }
    }

    fn lose(&mut self, file: &str, from: u32, to: u32) {
        self.lost.push(LostRange {
            file: file.to_owned(),
            from: u64::from(from),
            to: u64::from(to),
            after_ms: Some(self.trusted_ms).filter(|ms| *ms > 0),
            before_ms: None,
        });
    }
}

/// How the log ends: what was durable there, and where the last valid frame is.
struct End {
    proven: Position,
    last: Position,
    /// Everything below `proven` is a valid prefix: what lies behind it is an unfinished write.
    whole: bool,
}

/// Returns the segments that the manifest lists.
pub(super) fn listed(manifest: &Manifest) -> Vec<Source> {
    let source = |entry: &crate::format::manifest::SegmentEntry| Source {
        id: entry.id,
        nonce: entry.nonce,
        bytes: entry.bytes,
        sealed: entry.sealed,
    };
    manifest.segments.iter().map(source).collect()
}

/// Finds the segments of a store whose manifest cannot be read, by their headers.
pub(super) fn found(dir: &dyn Dir) -> Result<(Vec<Source>, [u8; 16])> {
    let names = dir
        .list()
        .map_err(|e| Error::io("listing the directory failed", e))?;
    let mut ids: Vec<u64> = names
        .iter()
        .filter_map(|name| match FileName::parse(name) {
            Some(FileName::Segment(id)) => Some(id),
            _ => None,
        })
        .collect();
    ids.sort_unstable();
    let mut sources = Vec::new();
    let mut stores = BTreeSet::new();
    for id in ids {
        let name = FileName::Segment(id).to_string();
        let head = open_source(dir, &name)?.map_or_else(Vec::new, |file| {
            read_around(file.as_ref(), SEGMENT_HEADER_BYTES)
        });
        // Without manifest and header nothing tells which frames are of this file.
        let Ok(header) = SegmentHeader::decode(&head) else {
            continue;
        };
        stores.insert(header.store);
        sources.push(Source {
            id,
            nonce: header.nonce,
            bytes: header.bytes,
            sealed: None,
        });
    }
    let mut stores = stores.into_iter();
    match (stores.next(), stores.next()) {
        (Some(store), None) => Ok((sources, store)),
        (None, _) => Err(Error::new(
            ErrorKind::Damaged,
            "neither MANIFEST nor any segment's header can be read: nothing can be repaired",
        )),
        (Some(_), Some(_)) => Err(Error::new(
            ErrorKind::Damaged,
            "MANIFEST cannot be read and segments of several stores are here; move the foreign \
             ones away",
        )),
    }
}

/// Opens a segment's file; `None` if it is missing.
fn open_source(dir: &dyn Dir, name: &str) -> Result<Option<std::sync::Arc<dyn File>>> {
    match dir.open(name, Access::Read) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("opening a segment failed", error).in_file(name)),
    }
}

/// Reads up to `len` bytes; zeros stand for what the device refuses to read.
fn read_around(file: &dyn File, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    if let Ok(got) = file.read_at(&mut bytes, 0) {
        bytes.truncate(got);
        return bytes;
    }
    let mut at = 0;
    for chunk in bytes.chunks_mut(READ_CHUNK_BYTES) {
        if file.read_at(chunk, at).is_err() {
            chunk.fill(0);
        }
        at += chunk.len() as u64;
    }
    bytes
}

fn image_of(dir: &dyn Dir, source: &Source) -> Result<Vec<u8>> {
    let len = to_usize(source.bytes.min(SEGMENT_BYTES_MAX));
    let file = open_source(dir, &source.name())?;
    Ok(file.map_or_else(Vec::new, |file| read_around(file.as_ref(), len)))
}

/// Reads every segment and hands what it says to `visit`, in the order of the log.
pub(super) fn read_log(
    dir: &dyn Dir,
    sources: &[Source],
    closed_at: Option<u64>,
    visit: &mut dyn FnMut(Piece<'_>) -> Result<()>,
) -> Result<Salvaged> {
    let end = find_end(dir, sources, closed_at)?;
    let mut out = Salvaged::default();
    for source in sources {
        let goes_on = read_segment(dir, source, &end, &mut out, visit)?;
        if !goes_on {
            break;
        }
    }
    Ok(out)
}

/// Finds the end of the log among the unsealed segments, as an open does.
fn find_end(dir: &dyn Dir, sources: &[Source], closed_at: Option<u64>) -> Result<End> {
    let mut proven = closed_at.unwrap_or(0);
    let mut prefix = Position::START;
    let mut last = Position::START;
    let mut ended = false;
    for source in sources.iter().filter(|s| s.sealed.is_none()) {
        let image = image_of(dir, source)?;
        let mut replay = Replay::new(&image, source.nonce);
        for item in replay.by_ref() {
            if let Item::Mark(mark) = item {
                proven = proven.max(mark.durable);
            }
        }
        proven = proven.max(proven_behind(&image, source.nonce, replay.end()));
        if !ended {
            prefix = Position::new(source.id, replay.end());
            ended = !replay.is_sealed();
        }
        for stretch in Salvage::new(&image, source.nonce, source.bytes) {
            if let Stretch::Found(_, behind) = stretch {
                last = last.max(Position::new(source.id, behind));
            }
        }
    }
    let proven = Position::from_u64(proven);
    Ok(End {
        proven,
        last,
        whole: proven <= prefix,
    })
}

/// Reads one segment. `false`: behind it lies only what was never finished.
fn read_segment(
    dir: &dyn Dir,
    source: &Source,
    end: &End,
    out: &mut Salvaged,
    visit: &mut dyn FnMut(Piece<'_>) -> Result<()>,
) -> Result<bool> {
    let name = source.name();
    let image = image_of(dir, source)?;
    let until = source.sealed.map_or(source.bytes, |sealed| sealed.end);
    let mut at = to_u32(SEGMENT_HEADER_BYTES);
    let mut sealed = false;
    for stretch in Salvage::new(&image, source.nonce, until) {
        match stretch {
            Stretch::Found(item, behind) => {
                out.note(&item);
                sealed = matches!(item, Item::Seal(_));
                if let Item::Record(_, record) = item {
                    visit(Piece::Record(record))?;
                }
                at = behind;
            }
            Stretch::Gap(..) if source.sealed.is_none() && end.whole => return Ok(false),
            // The last gap is judged below.
            Stretch::Gap(_, to) if to_usize(to) >= image.len() => {}
            Stretch::Gap(from, to) => {
                out.lose(&name, from, to);
                visit(Piece::Lost)?;
                at = to;
            }
            Stretch::NotUnderstood(offset) => {
                return Err(Error::new(
                    ErrorKind::Incompatible,
                    "record of a newer version; nothing was changed; use a version that reads it",
                )
                .in_file(name)
                .at(u64::from(offset)));
            }
        }
    }
    let lost_to = match source.sealed {
        Some(sealed) => sealed.end,
        None if sealed || end.whole => at,
        // The log goes on in a later segment: this one was full.
        None if end.proven.max(end.last).segment() > source.id => source.bytes,
        None if end.proven.segment() == source.id => end.proven.offset(),
        None => at,
    };
    if lost_to > at {
        out.lose(&name, at, lost_to);
        visit(Piece::Lost)?;
    }
    Ok(sealed || source.sealed.is_some() || !end.whole)
}
