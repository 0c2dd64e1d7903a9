//! What can still be read of a damaged store, in the order of the log.
//!
//! A lost stretch is told between the records around it, because it matters what was written
//! before it: what a later record has changed may be in there. What a crash can explain is no
//! loss: an unfinished write at the end. What it cannot explain is: a missing or foreign file, a
//! damaged header, a place that the device refuses to read, a gap below what was proven durable.
//! Changes nothing.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use super::settle::{is_cut, read_copy};
use crate::error::{Error, ErrorKind, Result};
use crate::format::hint::{HINT_BYTES_MAX, Hint};
use crate::format::manifest::{Manifest, SealedEntry};
use crate::format::names::FileName;
use crate::format::record::{FLAG_CARRIED, Record};
use crate::format::segment::{SEGMENT_HEADER_BYTES, SegmentHeader};
use crate::format::{StoreId, to_u32, to_usize, used_len};
use crate::log::replay::{Item, Replay, proven_behind};
use crate::log::salvage::{Salvage, Stretch};
use crate::options::{SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN};
use crate::position::Position;
use crate::stamp::{GENERATION_MAX, Stamp};
use crate::stats::LostRange;
use crate::vfs::{Access, Dir, File, is_media_error, read_all};

/// Where reading goes around what the device refuses to read.
const READ_CHUNK_BYTES: usize = 4096;
/// Lost ranges that are told one by one.
const LOST_RANGES_MAX: usize = 10_000;
/// The largest segment id: no number of ours is near it.
const ID_MAX: u64 = 1 << 41;

/// One segment, as the manifest or the file itself describes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source {
    pub(super) id: u64,
    /// `None`: neither says which frames are of this file.
    nonce: Option<u32>,
    pub(super) bytes: u32,
    sealed: Option<SealedEntry>,
    /// Segments that should come before it are not here, or nobody knows whether they should.
    is_behind_a_hole: bool,
}

impl Source {
    fn name(&self) -> String {
        FileName::Segment(self.id).to_string()
    }
}

/// The log of a damaged store.
#[derive(Debug)]
pub(super) struct OldLog {
    pub(super) store: StoreId,
    pub(super) sources: Vec<Source>,
    closed_at: Option<u64>,
    /// There is no manifest: how far the log went is not known.
    is_pieced_together: bool,
}

/// What the log says, one after the other.
pub(super) enum Piece<'a> {
    /// A record, and where it was.
    Record(Position, Record<'a>),
    /// Something is missing here.
    Lost,
}

/// What reading the log has come to.
#[derive(Debug, Default)]
pub(super) struct Salvaged {
    pub(super) records_count: u64,
    /// The first [`LOST_RANGES_MAX`] lost ranges.
    pub(super) lost: Vec<LostRange>,
    pub(super) lost_count: u64,
    pub(super) lost_bytes: u64,
    pub(super) trusted_ms: u64,
    /// The largest generation that a stamp or an owner names.
    pub(super) generation: u64,
    pub(super) namespace_max: u16,
    /// Lost ranges whose end in time is not known yet, from this index on.
    open_from: usize,
}

impl Salvaged {
    /// Notes the time of an event; a copy of an older record says nothing about its place.
    fn note_time(&mut self, at_ms: u64) {
        // A time that no clock of ours has shown is somebody's invention.
        if at_ms < self.trusted_ms || at_ms == 0 || at_ms > u64::MAX / 4 {
            return;
        }
        for lost in self.lost.iter_mut().skip(self.open_from) {
            lost.before_ms = Some(at_ms);
        }
        self.open_from = self.lost.len();
        self.trusted_ms = at_ms;
    }

    fn note(&mut self, item: &Item<'_>) {
        match item {
            Item::Record(_, record) => {
                self.records_count += 1;
                self.namespace_max = self.namespace_max.max(record.namespace);
                let stamp = Stamp::from_u64(record.state.stamp).generation();
                for generation in [stamp, record.state.owner] {
                    if generation <= GENERATION_MAX / 2 {
                        self.generation = self.generation.max(generation);
                    }
                }
                if record.flags & FLAG_CARRIED == 0 {
                    self.note_time(record.state.at_ms);
                }
            }
            Item::Mark(mark) => self.note_time(mark.trusted_ms),
            Item::Seal(seal) => self.note_time(seal.trusted_ms),
            Item::Unsettled => {}
        }
    }

    fn lose(&mut self, file: &str, from: u32, to: u32) {
        self.lost_count += 1;
        self.lost_bytes += u64::from(to.saturating_sub(from));
        if self.lost.len() < LOST_RANGES_MAX {
            self.lost.push(LostRange {
                file: file.to_owned(),
                from: u64::from(from),
                to: u64::from(to),
                after_ms: Some(self.trusted_ms).filter(|ms| *ms > 0),
                before_ms: None,
            });
        }
    }
}

impl OldLog {
    /// Takes the segments that the manifest lists.
    pub(super) fn listed(manifest: &Manifest) -> OldLog {
        let sources = manifest.segments.iter().map(|entry| Source {
            id: entry.id,
            nonce: Some(entry.nonce),
            bytes: entry.bytes,
            sealed: entry.sealed,
            is_behind_a_hole: false,
        });
        OldLog {
            store: manifest.store,
            sources: sources.collect(),
            closed_at: manifest.closed_at,
            is_pieced_together: false,
        }
    }

    /// Finds the segments of a store whose manifest cannot be read, by their names and headers.
    pub(super) fn found(dir: &dyn Dir) -> Result<OldLog> {
        let names = dir
            .list()
            .map_err(|e| Error::io("listing the directory failed", e))?;
        let mut ids: Vec<u64> = names.iter().filter_map(|name| segment_id(name)).collect();
        ids.sort_unstable();
        let mut stores = BTreeMap::new();
        let mut sources: Vec<Source> = Vec::new();
        for id in ids {
            let header = read_header(dir, id)?;
            if let Some(header) = &header {
                stores.insert(header.store, ());
            }
            // A header of another id is of the file's former life, or of a copy: not of this log.
            let own = header.filter(|header| header.id == id);
            let before = sources.last().map(|source| source.id);
            sources.push(Source {
                id,
                nonce: own.as_ref().map(|header| header.nonce),
                bytes: own.map_or(SEGMENT_BYTES_MIN, |header| header.bytes),
                sealed: None,
                is_behind_a_hole: before.is_some_and(|before| before + 1 != id),
            });
        }
        let mut stores = stores.into_keys();
        match (stores.next(), stores.next()) {
            (Some(store), None) => Ok(OldLog {
                store,
                sources,
                closed_at: None,
                is_pieced_together: true,
            }),
            (None, _) => Err(Error::new(
                ErrorKind::Damaged,
                "neither MANIFEST nor any segment's header can be read: nothing can be repaired",
            )),
            (Some(_), Some(_)) => Err(Error::new(
                ErrorKind::Damaged,
                "MANIFEST cannot be read and segments of several stores are here; move the \
                 foreign ones away",
            )),
        }
    }

    /// Returns the id that the next segment may have.
    pub(super) fn segment_next(&self) -> u64 {
        self.sources.iter().map(|s| s.id).max().unwrap_or(0) + 1
    }

    /// Reads every segment and hands what it says to `visit`, in the order of the log.
    pub(super) fn read(
        &self,
        dir: &dyn Dir,
        visit: &mut dyn FnMut(Piece<'_>) -> Result<()>,
    ) -> Result<Salvaged> {
        let end = self.find_end(dir)?;
        let mut out = Salvaged::default();
        for source in &self.sources {
            if source.is_behind_a_hole {
                out.lose(&format!("segments before {}", source.name()), 0, 0);
                visit(Piece::Lost)?;
            }
            let goes_on = read_segment(dir, source, &end, &mut out, visit)?;
            if !goes_on {
                break;
            }
        }
        if self.is_pieced_together {
            // How far it went on is not known.
            visit(Piece::Lost)?;
        }
        Ok(out)
    }

    /// Finds the end of the log among the unsealed segments, as an open does.
    fn find_end(&self, dir: &dyn Dir) -> Result<End> {
        let mut proven = self.closed_at.unwrap_or(0);
        let mut prefix = Position::START;
        let mut last = Position::START;
        let mut ended = false;
        let mut explained = !self.is_pieced_together;
        for source in self.sources.iter().filter(|s| s.sealed.is_none()) {
            let image = Image::read(dir, source, self.store)?;
            explained &= image.is_explained_by_a_crash();
            let nonce = source.nonce.unwrap_or_default();
            let mut replay = Replay::new(&image.bytes, nonce);
            for item in replay.by_ref() {
                if let Item::Mark(mark) = item {
                    proven = proven.max(mark.durable);
                }
            }
            proven = proven
                .max(proven_behind(&image.bytes, nonce, replay.end()))
                .max(hinted(dir, source, self.store));
            if !ended {
                prefix = Position::new(source.id, replay.end());
                ended = !replay.is_sealed();
            }
            for stretch in Salvage::new(&image.bytes, nonce, source.bytes) {
                if let Stretch::Found(_, behind) = stretch {
                    last = last.max(Position::new(source.id, behind));
                }
            }
        }
        let proven = Position::from_u64(proven);
        Ok(End {
            store: self.store,
            proven,
            last,
            whole: explained && proven <= prefix,
        })
    }
}

/// How the log ends: what was durable there, and where the last valid frame is.
struct End {
    store: StoreId,
    proven: Position,
    last: Position,
    /// What lies behind the valid prefix is an unfinished write.
    whole: bool,
}

fn segment_id(name: &str) -> Option<u64> {
    match FileName::parse(name) {
        Some(FileName::Segment(id)) if id <= ID_MAX => Some(id),
        _ => None,
    }
}

fn read_header(dir: &dyn Dir, id: u64) -> Result<Option<SegmentHeader>> {
    let name = FileName::Segment(id).to_string();
    let Some(file) = open_source(dir, &name)? else {
        return Ok(None);
    };
    let (head, _) = read_around(file.as_ref(), SEGMENT_HEADER_BYTES, &name)?;
    Ok(SegmentHeader::decode(&head).ok())
}

/// Opens a segment's file; `None` if it is missing.
fn open_source(dir: &dyn Dir, name: &str) -> Result<Option<std::sync::Arc<dyn File>>> {
    match dir.open(name, Access::Read) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("opening a segment failed", error).in_file(name)),
    }
}

/// Returns how far a hint proves its segment to have been durable.
fn hinted(dir: &dyn Dir, source: &Source, store: StoreId) -> u64 {
    let read = || {
        let name = FileName::Hint(source.id).to_string();
        let file = dir.open(&name, Access::Read).ok()?;
        let bytes = read_all(file.as_ref(), HINT_BYTES_MAX).ok()?;
        Hint::decode(&bytes).ok().map(|(hint, _)| hint)
    };
    let own = |hint: &Hint| {
        hint.store == store
            && (hint.segment, Some(hint.nonce)) == (source.id, source.nonce)
            && hint.end <= source.bytes
    };
    let hint = read().filter(own);
    hint.map_or(0, |hint| Position::new(source.id, hint.end).get())
}

/// What a segment's file holds.
struct Image {
    /// As far as the file goes, and with zeros for what the device refuses to read.
    bytes: Vec<u8>,
    refused: Vec<Range<u32>>,
    /// The file is here, and its header is that of the segment.
    is_own: bool,
}

impl Image {
    fn read(dir: &dyn Dir, source: &Source, store: StoreId) -> Result<Image> {
        let name = source.name();
        let Some(file) = open_source(dir, &name)? else {
            return Ok(Image {
                bytes: Vec::new(),
                refused: Vec::new(),
                is_own: false,
            });
        };
        let len = to_usize(source.bytes.min(SEGMENT_BYTES_MAX));
        let (bytes, refused) = read_around(file.as_ref(), len, &name)?;
        if let Some(copy) = copy_of_cut(dir, source, store, &bytes) {
            return Ok(Image {
                bytes: copy,
                refused: Vec::new(),
                is_own: true,
            });
        }
        Ok(Image {
            is_own: is_of(&bytes, source, store),
            bytes,
            refused,
        })
    }

    /// Size and header are durable before a segment is listed, and no crash makes a device refuse
    /// to read.
    fn is_explained_by_a_crash(&self) -> bool {
        self.is_own && self.refused.is_empty()
    }

    fn refused_end(&self) -> u32 {
        self.refused.last().map_or(0, |range| range.end)
    }
}

fn is_of(bytes: &[u8], source: &Source, store: StoreId) -> bool {
    SegmentHeader::decode(bytes).is_ok_and(|header| {
        header.store == store
            && header.id == source.id
            && source.nonce.is_none_or(|nonce| nonce == header.nonce)
    })
}

/// Returns the copy beside a segment that an open was writing anew when it was stopped.
fn copy_of_cut(dir: &dyn Dir, source: &Source, store: StoreId, bytes: &[u8]) -> Option<Vec<u8>> {
    let nonce = source.nonce.filter(|_| source.sealed.is_none())?;
    let copy = read_copy(dir, source.id).ok()??;
    let cut = is_of(&copy, source, store) && is_cut(bytes, &copy, source.id, nonce);
    cut.then_some(copy)
}

/// Reads up to `len` bytes, and says where the device refused: zeros stand for that.
fn read_around(file: &dyn File, len: usize, name: &str) -> Result<(Vec<u8>, Vec<Range<u32>>)> {
    let failed = |e| Error::io("reading a segment failed", e).in_file(name);
    let mut bytes = vec![0; len];
    match file.read_at(&mut bytes, 0) {
        Ok(got) => {
            bytes.truncate(got);
            return Ok((bytes, Vec::new()));
        }
        Err(error) if is_media_error(&error) => {}
        Err(error) => return Err(failed(error)),
    }
    let mut refused = Vec::new();
    let mut at: u32 = 0;
    for chunk in bytes.chunks_mut(READ_CHUNK_BYTES) {
        let behind = at + to_u32(chunk.len());
        match file.read_at(chunk, u64::from(at)) {
            Ok(_) => {}
            Err(error) if is_media_error(&error) => {
                chunk.fill(0);
                refused.push(at..behind);
            }
            Err(error) => return Err(failed(error)),
        }
        at = behind;
    }
    Ok((bytes, refused))
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
    let image = Image::read(dir, source, end.store)?;
    let until = source.sealed.map_or(source.bytes, |sealed| sealed.end);
    let mut at = to_u32(SEGMENT_HEADER_BYTES);
    let mut sealed = false;
    // Read again: a device that is dying may refuse now what it gave before.
    let is_tail_cut = source.sealed.is_none() && end.whole && image.is_explained_by_a_crash();
    for stretch in Salvage::new(&image.bytes, source.nonce.unwrap_or_default(), until) {
        match stretch {
            Stretch::Found(item, behind) => {
                out.note(&item);
                sealed = matches!(item, Item::Seal(_));
                if let Item::Record(at_record, record) = item {
                    visit(Piece::Record(Position::new(source.id, at_record), record))?;
                }
                at = behind;
            }
            Stretch::Gap(..) if is_tail_cut => return Ok(false),
            // The last gap is judged below.
            Stretch::Gap(_, to) if to_usize(to) >= image.bytes.len() => {}
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
    let lost_to = lost_to(source, &image, end, at);
    if lost_to > at && !(sealed && source.sealed.is_none()) {
        out.lose(&name, at, lost_to);
        visit(Piece::Lost)?;
    }
    Ok(sealed || !is_tail_cut)
}

/// Returns where the loss ends that begins behind the last frame of a segment, at `at`.
fn lost_to(source: &Source, image: &Image, end: &End, at: u32) -> u32 {
    if let Some(sealed) = source.sealed {
        return sealed.end;
    }
    if end.whole && image.is_explained_by_a_crash() {
        return at;
    }
    // The log went on in a later segment, so this one was full; or nothing is known of it.
    let is_unknown = !image.is_own && at == to_u32(SEGMENT_HEADER_BYTES);
    if end.proven.max(end.last).segment() > source.id || is_unknown {
        return source.bytes;
    }
    let behind = image.bytes.get(to_usize(at)..).unwrap_or_default();
    let junk = used_len(behind);
    let proven = if end.proven.segment() == source.id {
        end.proven.offset()
    } else {
        at
    };
    proven.max(image.refused_end()).max(at + to_u32(junk))
}
