//! Finding a key's newest record: the active table first, then the frozen table, then runs from
//! the newest to the oldest. The first record with the same namespace and key, byte for byte,
//! ends the search, expired or not. Absent is answered only if everything answered.

use std::sync::Arc;

use super::Engine;
use super::core::{Core, Older, View};
use crate::error::{Error, ErrorKind, Result};
use crate::format::Malformed;
use crate::format::record::{Frame, Record};
use crate::log::segment::{ReadError, SegmentFile};
use crate::log::sync::FailureCount;
use crate::position::Position;

/// What a search found, and on which state of the store that rests.
#[derive(Debug)]
pub(crate) struct Located<T> {
    pub(crate) hit: Option<Hit<T>>,
    view: Arc<View>,
    /// Offsets of the active table's slots with this hash at the time of the search.
    candidates: Vec<u32>,
    active: u64,
    pub(crate) failures: FailureCount,
}

/// A key's newest record.
#[derive(Debug)]
pub(crate) struct Hit<T> {
    pub(crate) older: Older,
    pub(crate) taken: T,
}

/// The key that is looked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) namespace: u16,
    pub(crate) key: &'a [u8],
    pub(crate) h: u64,
}

impl Wanted<'_> {
    /// Compares whole keys: a hash or a filter never decides alone.
    fn take<T>(
        &self,
        frame: &Frame<'_>,
        position: Position,
        extract: &impl Fn(&Record<'_>) -> T,
    ) -> std::result::Result<Option<Hit<T>>, Malformed> {
        let record = frame.record()?;
        if record.namespace != self.namespace || record.key != self.key {
            return Ok(None);
        }
        let older = Older::of(&record, position);
        Ok(Some(Hit {
            older,
            taken: extract(&record),
        }))
    }
}

impl Engine {
    pub(crate) fn wanted<'a>(&self, namespace: u16, key: &'a [u8]) -> Wanted<'a> {
        Wanted {
            namespace,
            key,
            h: self.hash.hash(namespace, key),
        }
    }

    /// Searches for a key's newest record and extracts from it.
    pub(crate) fn locate<T>(
        &self,
        wanted: Wanted<'_>,
        extract: impl Fn(&Record<'_>) -> T,
    ) -> Result<Located<T>> {
        let mut located = {
            let core = self.core();
            let (mut located, in_file) = self.locate_active(&core, wanted, &extract)?;
            if located.hit.is_some() {
                return Ok(located);
            }
            drop(core);
            if let Some(segment) = in_file {
                located.hit =
                    self.read_candidates(&segment, &located.candidates, wanted, &extract)?;
            }
            located
        };
        if located.hit.is_none() {
            located.hit = self.search_view(&located.view, wanted, &extract)?;
        }
        Ok(located)
    }

    /// Searches the part of the active segment that is in memory. Returns the segment if some
    /// candidates must be read from its file, which is done without the lock.
    fn locate_active<T>(
        &self,
        core: &Core,
        wanted: Wanted<'_>,
        extract: &impl Fn(&Record<'_>) -> T,
    ) -> Result<(Located<T>, Option<Arc<SegmentFile>>)> {
        let mut located = Located {
            hit: None,
            view: Arc::clone(&core.view),
            candidates: core.table.candidates(wanted.h).collect(),
            active: core.writer.segment.id,
            failures: FailureCount::new(core.failures),
        };
        let mut in_file = false;
        for offset in &located.candidates {
            let position = Position::new(located.active, *offset);
            let read = core
                .writer
                .read_image(*offset, |f| wanted.take(f, position, extract));
            match read {
                None => in_file = true,
                Some(read) => {
                    let hit = read.map_err(|e| read_error(e, &core.writer.segment, *offset))?;
                    if hit.is_some() {
                        located.hit = hit;
                        return Ok((located, None));
                    }
                }
            }
        }
        Ok((located, in_file.then(|| Arc::clone(&core.writer.segment))))
    }

    fn read_candidates<T>(
        &self,
        segment: &SegmentFile,
        offsets: &[u32],
        wanted: Wanted<'_>,
        extract: &impl Fn(&Record<'_>) -> T,
    ) -> Result<Option<Hit<T>>> {
        for offset in offsets {
            let position = Position::new(segment.id, *offset);
            match segment.read(*offset, |frame| wanted.take(frame, position, extract)) {
                Ok(None) => {}
                Ok(hit) => return Ok(hit),
                Err(error) => return Err(read_error(error, segment, *offset)),
            }
        }
        Ok(None)
    }

    /// Searches everything behind the active segment.
    pub(crate) fn search_view<T>(
        &self,
        view: &View,
        wanted: Wanted<'_>,
        extract: &impl Fn(&Record<'_>) -> T,
    ) -> Result<Option<Hit<T>>> {
        for frozen in view.frozen.iter().rev() {
            let offsets: Vec<u32> = frozen.table.candidates(wanted.h).collect();
            let hit = self.read_candidates(&frozen.segment, &offsets, wanted, extract)?;
            if hit.is_some() {
                return Ok(hit);
            }
        }
        let mut places = Vec::new();
        for part in view
            .parts
            .iter()
            .filter(|part| part.run.may_contain(wanted.h))
        {
            places.clear();
            if let Err(why) = part.run.find(wanted.h, &mut places) {
                part.mark_damaged();
                self.background.wake();
                let header = &part.run.header;
                return Err(Error::new(
                    ErrorKind::Damaged,
                    format!(
                        "index run is damaged and is being rebuilt: {}; segments={}..={}; \
                         try again",
                        why.0, header.lo, header.hi
                    ),
                ));
            }
            for (segment, offset) in &places {
                // An entry of a segment that was dropped out of the middle of a run.
                let Some(segment) = view.segment(*segment) else {
                    continue;
                };
                let hit = self.read_candidates(segment, &[*offset], wanted, extract)?;
                if hit.is_some() {
                    return Ok(hit);
                }
            }
        }
        Ok(None)
    }
}

impl<T> Located<T> {
    /// Says, under the lock, whether the search would find the same now: nothing with this hash
    /// was appended, and nothing was sealed, rolled or dropped.
    pub(crate) fn is_current(&self, core: &Core, h: u64) -> bool {
        self.active == core.writer.segment.id
            && self.failures == FailureCount::new(core.failures)
            && Arc::ptr_eq(&self.view, &core.view)
            && core.table.candidates(h).eq(self.candidates.iter().copied())
    }
}

pub(crate) fn read_error(error: ReadError, segment: &SegmentFile, offset: u32) -> Error {
    let error = match error {
        ReadError::Io(source) => Error::io("reading the log failed", source),
        ReadError::Malformed(why) => Error::new(
            ErrorKind::Damaged,
            format!("record is damaged: {}; see docs/operations.md", why.0),
        ),
    };
    error.in_file(segment.name()).at(u64::from(offset))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vfs::sim::SimDisk;
    use crate::{Durability, NamespaceOptions, ObserveOptions, Options};

    /// A hash of 44 bits is shared by some keys of a large store: here one is asked for under the
    /// hash of another, wherever that one lies.
    #[test]
    fn another_key_with_the_same_hash_is_not_found() {
        let disk = SimDisk::new();
        let options = Options::new().segment_bytes(4096).background(false);
        let log = options.open_on(disk.dir()).unwrap();
        let options = NamespaceOptions::new().outcome_bytes_max(0);
        let filter = log.filter("f", options).unwrap();
        let engine = &log.handle.engine;
        let check = || {
            let wanted = engine.wanted(1, b"first");
            assert!(engine.locate(wanted, |_| ()).unwrap().hit.is_some());
            for (namespace, key) in [(1, b"other"), (2, b"first")] {
                let wanted = Wanted {
                    namespace,
                    key,
                    h: wanted.h,
                };
                assert!(engine.locate(wanted, |_| ()).unwrap().hit.is_none());
            }
        };
        let buffered = ObserveOptions::new().durability(Durability::Buffered);
        assert!(filter.observe_with("first", &buffered).unwrap().is_new());
        check();
        log.sync().unwrap();
        check();
        for n in 0..40 {
            assert!(filter.observe(format!("{n:0>200}")).unwrap().is_new());
        }
        log.maintain().unwrap();
        assert!(log.stats().runs_count > 0);
        check();
    }
}
