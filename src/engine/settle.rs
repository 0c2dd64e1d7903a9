//! Settling the end of the log at open: what the log was found to be is all that the disk holds.
//!
//! The safety properties A to C are those of `recovery.rs`.

use std::io;

use super::catalog::remove_if_there;
use crate::error::{Error, Result};
use crate::format::manifest::{Manifest, SegmentEntry};
use crate::format::names::FileName;
use crate::format::segment::SegmentHeader;
use crate::format::{to_usize, used_len};
use crate::log::replay::{Replay, proven_behind};
use crate::log::segment::SegmentFile;
use crate::options::SEGMENT_BYTES_MAX;
use crate::position::Position;
use crate::vfs::{Access, Dir, File, read_all};

/// Reads a whole segment: one at a time is in memory. Bytes that a shorter file lacks are zeros,
/// those that a longer one has are nobody's.
pub(super) fn read_image(segment: &SegmentFile) -> Result<Vec<u8>> {
    let mut image = vec![0; to_usize(segment.bytes)];
    segment
        .file()
        .and_then(|file| file.read_at(&mut image, 0))
        .map_err(|e| Error::io("reading a segment failed", e).in_file(segment.name()))?;
    Ok(image)
}

/// Makes the valid prefix of an unsealed segment, and zeros behind it, all that the device holds:
/// the bytes read before may be in the page cache only (A). Returns how many bytes of unfinished
/// writes were cut; old bytes of a recycled file do not count.
pub(super) fn settle_segment(
    dir: &dyn Dir,
    segment: &SegmentFile,
    valid: u32,
    proven: Position,
) -> Result<u64> {
    let image = read_image(segment)?;
    let failed = |e| Error::io("settling the end of the log failed", e).in_file(segment.name());
    let file = segment.file().map_err(failed)?;
    if file.size().map_err(failed)? != u64::from(segment.bytes) {
        file.set_len(u64::from(segment.bytes)).map_err(failed)?;
    }
    file.sync().map_err(failed)?;
    let (prefix, behind) = image
        .split_at_checked(to_usize(valid))
        .unwrap_or((&image, &[]));
    let from = match proven.segment().cmp(&segment.id) {
        std::cmp::Ordering::Less => 0,
        std::cmp::Ordering::Equal => to_usize(proven.offset()).min(prefix.len()),
        std::cmp::Ordering::Greater => prefix.len(),
    };
    let junk = used_len(behind);
    let unproven = image.get(from..prefix.len() + junk).unwrap_or_default();
    if file.holds(unproven, from as u64).map_err(failed)? == Some(true) {
        if junk > 0 {
            file.write_at(&vec![0; junk], u64::from(valid))
                .map_err(failed)?;
            file.sync().map_err(failed)?;
        }
    } else {
        write_anew(dir, segment, prefix)?;
    }
    Ok(if segment.recycled { 0 } else { junk as u64 })
}

/// Gives a segment new blocks: a copy of its prefix is made durable beside it, then it is cut to
/// nothing and written again, and the copy goes. Killed on the way, the next open finds the copy.
fn write_anew(dir: &dyn Dir, segment: &SegmentFile, prefix: &[u8]) -> Result<()> {
    let copy = FileName::SegmentCopy(segment.id).to_string();
    let write = || {
        remove_if_there(dir, &copy)?;
        let file = dir.open(&copy, Access::Create)?;
        file.write_at(prefix, 0)?;
        file.sync()?;
        dir.sync()?;
        fill_anew(segment.file()?.as_ref(), segment.bytes, prefix)?;
        remove_if_there(dir, &copy)
    };
    write().map_err(|e| {
        let what = "writing a segment anew failed; nothing is lost: free space or mend the disk, \
                    and open again";
        Error::io(what, e).in_file(segment.name())
    })
}

/// Writes a file into new blocks. Behind the prefix there are none, and they read as zeros.
fn fill_anew(file: &dyn File, bytes: u32, prefix: &[u8]) -> io::Result<()> {
    file.set_len(0)?;
    file.set_len(u64::from(bytes))?;
    file.write_at(prefix, 0)?;
    file.sync()
}

/// Goes on where an open was stopped that was writing a segment anew (C).
pub(super) fn finish_writing_anew(
    dir: &dyn Dir,
    manifest: &Manifest,
    hash_key_id: u64,
) -> Result<()> {
    for entry in manifest.segments.iter().filter(|s| s.sealed.is_none()) {
        let name = FileName::Segment(entry.id).to_string();
        let failed = |e| Error::io("finishing an interrupted open failed", e).in_file(name.clone());
        let copy = read_copy(dir, entry.id).map_err(failed)?;
        let own = |copy: &Vec<u8>| is_of(copy, manifest, entry, hash_key_id);
        let Some(copy) = copy.filter(own) else {
            continue;
        };
        let file = match dir.open(&name, Access::Write) {
            Ok(file) => file,
            // That it is missing is told by whoever needs it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(failed(error)),
        };
        let mut found = vec![0; to_usize(entry.bytes)];
        file.read_at(&mut found, 0).map_err(failed)?;
        if is_cut(&found, &copy, entry.id, entry.nonce) {
            fill_anew(file.as_ref(), entry.bytes, &copy).map_err(failed)?;
        }
    }
    Ok(())
}

/// Reads the copy beside a segment, if there is one.
pub(super) fn read_copy(dir: &dyn Dir, id: u64) -> io::Result<Option<Vec<u8>>> {
    match dir.open(&FileName::SegmentCopy(id).to_string(), Access::Read) {
        Ok(file) => read_all(file.as_ref(), u64::from(SEGMENT_BYTES_MAX)).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_of(copy: &[u8], manifest: &Manifest, entry: &SegmentEntry, hash_key_id: u64) -> bool {
    SegmentHeader::decode(copy).is_ok_and(|header| {
        header.store == manifest.store
            && header.hash_key_id == hash_key_id
            && (header.id, header.nonce, header.bytes) == (entry.id, entry.nonce, entry.bytes)
    })
}

/// Says whether a segment was cut while it was written anew: its copy says more, and nothing in it
/// was durable behind the copy's end. A copy that is not whole says less; one that came back after
/// the segment had grown must not take what has grown since, whatever has happened to the rest.
pub(super) fn is_cut(segment: &[u8], copy: &[u8], id: u64, nonce: u32) -> bool {
    let end = |bytes: &[u8]| {
        if SegmentHeader::decode(bytes).is_err() {
            return 0;
        }
        let mut replay = Replay::new(bytes, nonce);
        replay.by_ref().for_each(drop);
        replay.end()
    };
    let copied = end(copy);
    let proven = proven_behind(segment, nonce, 0);
    end(segment) < copied && proven <= Position::new(id, copied).get()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::record::{Kind, Record, SyncMark, seed};
    use crate::format::to_u32;

    const ID: u64 = 1;
    const NONCE: u32 = 7;

    /// A segment of so many records, each behind a mark that proves the ones before it.
    fn image(records: u8) -> Vec<u8> {
        let header = SegmentHeader {
            store: [0; 16],
            id: ID,
            nonce: NONCE,
            bytes: 4096,
            hash_key_id: 0,
            recycled: false,
        };
        let mut bytes = header.encode();
        for n in 0..records {
            let at = to_u32(bytes.len());
            let durable = Position::new(ID, at).get();
            let mark = SyncMark {
                durable,
                trusted_ms: 1,
            };
            mark.encode(&mut bytes, seed(NONCE, at));
            let at = to_u32(bytes.len());
            Record::new(Kind::Seen, 1, &[n; 16]).encode(&mut bytes, seed(NONCE, at));
        }
        bytes
    }

    fn whole(records: u8) -> Vec<u8> {
        let mut bytes = image(records);
        bytes.resize(4096, 0);
        bytes
    }

    #[test]
    fn a_cut_segment_is_known_by_its_copy() {
        let copy = image(9);
        // Nothing of it is there, or some sectors, or all.
        assert!(is_cut(&[0; 4096], &copy, ID, NONCE));
        let mut some = whole(9);
        some[512..1024].fill(0);
        assert!(is_cut(&some, &copy, ID, NONCE));
        assert!(!is_cut(&whole(9), &copy, ID, NONCE));
    }

    #[test]
    fn a_copy_that_is_not_whole_or_is_old_takes_nothing() {
        assert!(!is_cut(&whole(9), &image(9)[..300], ID, NONCE));
        assert!(!is_cut(&whole(9), &[], ID, NONCE));
        // The copy came back after the segment had grown, and the segment is damaged.
        let mut grown = whole(20);
        grown[80] ^= 1;
        assert!(!is_cut(&grown, &image(9), ID, NONCE));
    }
}
