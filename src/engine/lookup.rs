//! Finding a key's newest record: the active table first, then the frozen table, then runs from
//! the newest to the oldest. The first record with the same namespace and key, byte for byte,
//! ends the search, expired or not. Absent is answered only if everything answered.
//!
//! Who reads goes that way ([`Engine::locate`]). Who decides goes the other way round, because
//! most keys are new: what is immutable is searched without the lock, and the active table is
//! asked once, under the lock under which the record is appended ([`Engine::complete`]).

use std::cell::Cell;
use std::sync::Arc;

use arc_swap::Guard;

use super::Engine;
use super::core::{Core, Older, Part, Snapshot, View};
use super::namespace::Space;
use crate::error::{Error, ErrorKind, Result};
use crate::format::Malformed;
use crate::format::record::{Frame, Record};
use crate::key_time::KeyBucket;
use crate::log::segment::{ReadError, SegmentFile};
use crate::log::sync::FailureCount;
use crate::position::Position;

thread_local! {
    /// Places that a run names: kept between searches, so that none of them allocates.
    static PLACES: Cell<Vec<(u64, u32)>> = const { Cell::new(Vec::new()) };
}

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
    /// When the key was made, if it tells.
    pub(crate) time: Option<KeyBucket>,
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

impl Snapshot {
    /// Has the processor fetch what a search for this key reads first.
    pub(crate) fn prefetch(&self, wanted: Wanted<'_>) {
        for frozen in &self.view.frozen {
            frozen.table.prefetch(wanted.h);
        }
        for part in &self.view.parts {
            if !part.run.excludes(wanted.namespace, wanted.time) {
                part.run.prefetch(wanted.h);
            }
        }
    }
}

/// What was found without the lock.
#[derive(Debug)]
pub(crate) enum Searched<T> {
    /// Only what lies behind the active segment was searched.
    Behind(Result<Option<Hit<T>>>),
    /// Everything was, because records of the active segment had to be read from its file.
    All(Located<T>),
}

/// A search that was completed under the lock.
#[derive(Debug)]
pub(crate) enum Completed<T> {
    /// The key's newest record as of now.
    Current(Option<Hit<T>>),
    /// Something was appended, sealed, rolled or dropped since: search again.
    Changed,
    /// A record of the active segment must be read from its file, which is not done under the
    /// lock: search everything.
    InFile,
}

impl Engine {
    /// Takes a snapshot without the append lock, and has the processor fetch what
    /// [`Engine::search`] and [`Engine::complete`] will ask of it.
    pub(crate) fn snapshot(&self, wanted: Wanted<'_>) -> Guard<Arc<Snapshot>> {
        let snapshot = self.published.load();
        snapshot.table.prefetch(wanted.h);
        snapshot.prefetch(wanted);
        snapshot
    }

    /// Searches for one key without the lock: all of the store if `in_file`, otherwise what lies
    /// behind the active segment.
    pub(crate) fn search<T>(
        &self,
        snapshot: &Snapshot,
        wanted: Wanted<'_>,
        in_file: bool,
        extract: &impl Fn(&Record<'_>) -> T,
    ) -> Result<Searched<T>> {
        Ok(if in_file {
            Searched::All(self.locate(wanted, extract)?)
        } else {
            Searched::Behind(self.search_view(&snapshot.view, wanted, extract))
        })
    }

    /// Completes a search under the lock.
    pub(crate) fn complete<T>(
        &self,
        core: &Core,
        snapshot: &Snapshot,
        wanted: Wanted<'_>,
        searched: Searched<T>,
        extract: &impl Fn(&Record<'_>) -> T,
    ) -> Result<Completed<T>> {
        let behind = match searched {
            Searched::All(located) if located.is_current(core, wanted.h) => {
                return Ok(Completed::Current(located.hit));
            }
            _ if !snapshot.is_current(core) => return Ok(Completed::Changed),
            Searched::Behind(behind) => Some(behind),
            // A record with this hash was appended since: perhaps the key's.
            Searched::All(_) => None,
        };
        let mut in_file = false;
        for offset in core.table.candidates(wanted.h) {
            match self.read_image(core, wanted, offset, extract)? {
                None => in_file = true,
                Some(None) => {}
                Some(hit) => return Ok(Completed::Current(hit)),
            }
        }
        match behind {
            None => Ok(Completed::Changed),
            Some(_) if in_file => Ok(Completed::InFile),
            // An index that is damaged is of no matter to a key that was found before it.
            Some(behind) => behind.map(Completed::Current),
        }
    }

    /// Reads a record of the active segment if it is in memory.
    fn read_image<T>(
        &self,
        core: &Core,
        wanted: Wanted<'_>,
        offset: u32,
        extract: &impl Fn(&Record<'_>) -> T,
    ) -> Result<Option<Option<Hit<T>>>> {
        let segment = &core.writer.segment;
        let position = Position::new(segment.id, offset);
        let read = core
            .writer
            .read_image(offset, |f| wanted.take(f, position, extract));
        read.transpose()
            .map_err(|error| read_error(error, segment, offset))
    }

    pub(crate) fn wanted<'a>(&self, namespace: u16, key: &'a [u8]) -> Wanted<'a> {
        Wanted {
            namespace,
            key,
            h: self.hash.hash(namespace, key),
            time: None,
        }
    }

    /// The same for a key of an open namespace, which may know how its keys tell their time.
    pub(crate) fn wanted_in<'a>(&self, space: &Space, key: &'a [u8]) -> Wanted<'a> {
        Wanted {
            time: space.options.key_time.and_then(|time| time.bucket(key)),
            ..self.wanted(space.id, key)
        }
    }

    /// Searches for a key's newest record and extracts from it.
    #[inline]
    pub(crate) fn locate<T>(
        &self,
        wanted: Wanted<'_>,
        extract: impl Fn(&Record<'_>) -> T,
    ) -> Result<Located<T>> {
        self.refresh()?;
        if self.reader.is_none() {
            return self.locate_known(wanted, extract);
        }
        self.read_again(|| self.locate_known(wanted, &extract))
    }

    /// The same among what this process has read of the log.
    pub(crate) fn locate_known<T>(
        &self,
        wanted: Wanted<'_>,
        extract: impl Fn(&Record<'_>) -> T,
    ) -> Result<Located<T>> {
        self.check_home()?;
        let core = self.core();
        let mut located = Located {
            hit: None,
            view: Arc::clone(core.view()),
            candidates: core.table.candidates(wanted.h).collect(),
            active: core.writer.segment.id,
            failures: FailureCount::new(core.failures),
        };
        let in_file = self.locate_in_memory(&core, wanted, &mut located, &extract)?;
        drop(core);
        if let Some(segment) = in_file
            && let Some(hit) =
                self.read_candidates(&segment, &located.candidates, wanted, &extract)?
        {
            located.hit = Some(hit);
        }
        if located.hit.is_none()
            && let Some(hit) = self.search_view(&located.view, wanted, &extract)?
        {
            located.hit = Some(hit);
        }
        Ok(located)
    }

    /// Searches the part of the active segment that is in memory. Returns the segment if some
    /// candidates must be read from its file, which is done without the lock.
    fn locate_in_memory<T>(
        &self,
        core: &Core,
        wanted: Wanted<'_>,
        located: &mut Located<T>,
        extract: &impl Fn(&Record<'_>) -> T,
    ) -> Result<Option<Arc<SegmentFile>>> {
        let mut in_file = false;
        for offset in &located.candidates {
            match self.read_image(core, wanted, *offset, extract)? {
                None => in_file = true,
                Some(None) => {}
                Some(hit) => {
                    located.hit = hit;
                    return Ok(None);
                }
            }
        }
        Ok(in_file.then(|| Arc::clone(&core.writer.segment)))
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
            if let Some(hit) = self.read_candidates(&frozen.segment, &offsets, wanted, extract)? {
                return Ok(Some(hit));
            }
        }
        for part in &view.parts {
            if part.run.excludes(wanted.namespace, wanted.time) {
                continue;
            }
            // A part of a filter that is damaged excludes nothing; the run itself may be whole.
            if !part.is_damaged() {
                match part.run.may_contain(wanted.h) {
                    Ok(false) => continue,
                    Ok(true) => {}
                    Err(_) => self.rebuild_soon(part),
                }
            }
            let mut places = PLACES.take();
            let hit = self.search_run(view, part, wanted, extract, &mut places);
            PLACES.set(places);
            if let Some(hit) = hit? {
                return Ok(Some(hit));
            }
        }
        Ok(None)
    }

    /// Searches one run, whose filter does not exclude the key.
    fn search_run<T>(
        &self,
        view: &View,
        part: &Part,
        wanted: Wanted<'_>,
        extract: &impl Fn(&Record<'_>) -> T,
        places: &mut Vec<(u64, u32)>,
    ) -> Result<Option<Hit<T>>> {
        places.clear();
        if let Err(why) = part.run.find(wanted.h, places) {
            self.rebuild_soon(part);
            return Err(self.damaged_run(part, why));
        }
        for (segment, offset) in places.iter() {
            // An entry of a segment that was dropped out of the middle of a run.
            let Some(segment) = view.segment(*segment) else {
                continue;
            };
            if let Some(hit) = self.read_candidates(segment, &[*offset], wanted, extract)? {
                return Ok(Some(hit));
            }
        }
        Ok(None)
    }
}

impl Engine {
    fn rebuild_soon(&self, part: &Part) {
        part.mark_damaged();
        self.background.wake();
    }

    #[cold]
    fn damaged_run(&self, part: &Part, why: Malformed) -> Error {
        let header = &part.run.header;
        let rebuilds = if self.reader.is_some() {
            "; whoever writes rebuilds it"
        } else {
            " and is being rebuilt"
        };
        let what = format!(
            "index run is damaged{rebuilds}: {}; segments={}..={}; try again",
            why.0, header.lo, header.hi
        );
        Error::new(ErrorKind::Damaged, what)
    }
}

impl<T> Located<T> {
    /// Says, under the lock, whether the search would find the same now: nothing with this hash
    /// was appended, and nothing was sealed, rolled or dropped.
    pub(crate) fn is_current(&self, core: &Core, h: u64) -> bool {
        self.active == core.writer.segment.id
            && self.failures == FailureCount::new(core.failures)
            && Arc::ptr_eq(&self.view, core.view())
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
    use crate::{Durability, KeyTime, NamespaceOptions, ObserveOptions, Options};

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
                    time: None,
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

    #[test]
    fn runs_of_other_times_are_not_asked() {
        let disk = SimDisk::new();
        let options = Options::new().segment_bytes(4096).background(false);
        let log = options.open_on(disk.dir()).unwrap();
        let time = KeyTime::Snowflake { epoch_ms: 0 };
        let options = NamespaceOptions::new().outcome_bytes_max(0).key_time(time);
        let filter = log.filter("f", options).unwrap();
        let key = |hour: u64, n: u64| ((hour * 3_600_000) << 22 | n).to_string();
        let all: Vec<String> = (0..2000).map(|n| key(10 + n / 60, n)).collect();
        for answer in filter.observe_many(&all).unwrap() {
            assert!(answer.unwrap().is_new());
        }
        for _ in 0..4 {
            log.maintain().unwrap();
        }
        let engine = &log.handle.engine;
        let space = &filter.space;
        let asked = |key: &str| {
            let wanted = engine.wanted_in(space, key.as_bytes());
            let view = Arc::clone(engine.core().view());
            let parts = view.parts.iter();
            parts
                .filter(|part| !part.run.excludes(1, wanted.time))
                .count()
        };
        let runs = engine.core().view().parts.len();
        assert!(runs >= 3, "runs={runs}");
        assert_eq!(asked(&key(9, 1)), 0);
        assert!(
            (1..=2).contains(&asked(&key(10, 1))),
            "{}",
            asked(&key(10, 1))
        );
        assert_eq!(asked("no time"), runs);
    }
}
