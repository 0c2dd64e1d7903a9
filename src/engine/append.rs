//! Appending and making durable: from a record under the lock to a promise to the caller.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Engine;
use super::core::{Core, Frozen, Older, UnsettledEntry};
use super::update::Basis;
use crate::error::{Error, ErrorKind, Result, is_out_of_space};
use crate::format::record::Record;
use crate::log::segment::SegmentFile;
use crate::log::sync::{FailureCount, WaitError};
use crate::options::Durability;
use crate::position::Position;

/// Buffered records are written out when so many bytes have gathered.
const IMAGE_BYTES_MAX: usize = 256 * 1024;

/// An append that has not been promised to anybody yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Appended {
    pub(crate) position: Position,
    pub(crate) failures: FailureCount,
}

impl Engine {
    /// Appends one record. The caller has checked that it fits.
    pub(crate) fn append(
        &self,
        core: &mut Core,
        record: &Record<'_>,
        h: u64,
        older: Option<Older>,
        entry: Option<UnsettledEntry>,
    ) -> Appended {
        let failures = FailureCount::new(core.failures);
        let was_empty = !core.writer.has_unwritten();
        let position = core.append(record, h, older, entry);
        self.counters.records.add_alone(1);
        let frame_bytes = core.writer.end_offset() - position.offset();
        self.counters
            .appended_bytes
            .add_alone(u64::from(frame_bytes));
        if was_empty {
            self.background.dirty();
        }
        if core.wants_next() {
            self.background.wake();
        }
        Appended { position, failures }
    }

    /// Does what a level asks for under the lock, after one or several appends.
    pub(crate) fn finish_append(&self, core: &mut Core, level: Durability) -> Result<()> {
        match self.write_level(level) {
            Durability::Buffered => {
                core.promise();
                if core.writer.unwritten_bytes() >= IMAGE_BYTES_MAX {
                    self.write_out(core)?;
                }
                Ok(())
            }
            Durability::Process if self.shared.is_none() => self.write_out(core),
            Durability::Power if self.shared.is_none() => Ok(()),
            Durability::Process | Durability::Power => {
                // Nobody who flushes has anything to write with a mark in front.
                core.mark(self.syncer.durable(), self.now().trusted_ms);
                self.write_out(core)
            }
        }
    }

    /// Returns the level that is still to be waited for once [`Engine::finish_append`] has
    /// returned: at `Process` the record is written.
    pub(crate) fn level_left(level: Durability) -> Durability {
        match level {
            Durability::Process => Durability::Buffered,
            level => level,
        }
    }

    /// Hands the log image to the system. On failure everything since the last write is taken
    /// back, or the store is poisoned.
    pub(crate) fn write_out(&self, core: &mut Core) -> Result<()> {
        if !core.writer.has_unwritten() {
            return Ok(());
        }
        self.counters.writes.add_alone(1);
        let Err(source) = core.writer.write_out() else {
            core.note_written();
            return Ok(());
        };
        let name = core.writer.segment.name();
        let full = is_out_of_space(&source);
        let error = Error::io("writing to the log failed", source).in_file(name);
        // Alone, as every flush: taking back flushes, too. Whoever holds this takes no other lock.
        let _one_at_a_time = self.syncer.alone();
        if self.poisoned().is_none() && core.take_back() {
            self.syncer.taken_back(core.writer.written());
            self.owe_waiters();
            return Err(error);
        }
        self.poison_with(error.to_string());
        Err(if full {
            Error::new(ErrorKind::Poisoned, error.to_string())
        } else {
            error
        }
        .maybe_applied())
    }

    /// Waits until what an answer rests on is as durable as it must be.
    pub(crate) fn ensure_basis(&self, basis: Basis) -> Result<()> {
        self.ensure(basis.end, basis.failures, basis.level)
    }

    /// Waits until everything below `end` is as durable as asked. Call it with no lock held: what
    /// fails may be owed to others who wait.
    pub(crate) fn ensure(
        &self,
        end: Position,
        failures: FailureCount,
        level: Durability,
    ) -> Result<()> {
        let ensured = match level {
            Durability::Buffered => return Ok(()),
            Durability::Process => self.ensure_written(end, failures),
            Durability::Power => self.ensure_durable(end, failures),
        };
        if ensured.is_err() {
            self.pay_waiters();
        }
        ensured
    }

    fn ensure_written(&self, end: Position, failures: FailureCount) -> Result<()> {
        let mut core = self.core();
        // Asked first: what stands in the place of a record that was taken back is another one.
        if self.syncer.was_taken_back(end, failures) {
            return Err(taken_back());
        }
        if core.writer.written() >= end {
            return Ok(());
        }
        self.check_writable(&core)?;
        self.write_out(&mut core)
    }

    /// The syncer alone says what is durable: the position reached says nothing of a record that
    /// was taken back and whose place another one has taken.
    fn ensure_durable(&self, end: Position, failures: FailureCount) -> Result<()> {
        if self.reader.is_some() {
            // Whoever only reads flushes nothing, and tells what is written.
            return Ok(());
        }
        self.ensure_durable_until(end, failures, self.gate_end_ms())
    }

    fn ensure_durable_until(
        &self,
        end: Position,
        failures: FailureCount,
        end_ms: u64,
    ) -> Result<()> {
        self.waited(self.syncer.wait(end, failures, || self.lead(end, end_ms)))
    }

    /// The same for a caller that holds `maintenance`: whoever waits for the flush as a task is
    /// rung by [`Engine::pay_waiters`], which the caller's caller calls behind the lock.
    pub(crate) fn ensure_durable_held(&self, end: Position, failures: FailureCount) -> Result<()> {
        let end_ms = self.gate_end_ms();
        self.waited(
            self.syncer
                .wait_held(end, failures, || self.lead(end, end_ms)),
        )
    }

    fn waited(&self, waited: std::result::Result<(), Result<WaitError>>) -> Result<()> {
        match waited {
            Ok(()) => Ok(()),
            Err(Err(error)) => Err(error),
            Err(Ok(error)) => Err(self.wait_error(error)),
        }
    }

    pub(crate) fn wait_error(&self, error: WaitError) -> Error {
        match error {
            WaitError::TakenBack => taken_back(),
            WaitError::Poisoned => self
                .poison
                .error()
                .unwrap_or_else(|| Error::new(ErrorKind::Poisoned, "store is poisoned"))
                .maybe_applied(),
        }
    }

    /// Flushes everything appended so far, for everybody: the leader's part of a group commit.
    /// `target` is what the leader itself waits for, `end_ms` how long for other processes.
    pub(crate) fn lead(&self, target: Position, end_ms: u64) -> Result<Position> {
        if let Some(shared) = &self.shared {
            return self.lead_shared(shared, target, end_ms);
        }
        let now = self.now();
        let (segment, frozen, end) = {
            let mut core = self.core();
            self.check_writable(&core).map_err(Error::maybe_applied)?;
            core.mark(self.syncer.durable(), now.trusted_ms);
            self.write_out(&mut core)?;
            (
                Arc::clone(&core.writer.segment),
                core.view().frozen.clone(),
                core.writer.end(),
            )
        };
        // The durable position crosses a segment's end only after that segment's own flush.
        for frozen in &frozen {
            self.sync_frozen(frozen)?;
        }
        self.sync_segment(&segment)?;
        Ok(end)
    }

    pub(crate) fn sync_frozen(&self, frozen: &Frozen) -> Result<()> {
        // Acquire pairs with the Release below: who sees `true` sees a flush that returned.
        if !frozen.synced.load(Ordering::Acquire) {
            self.sync_segment(&frozen.segment)?;
            frozen.synced.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Flushes one segment. A failure poisons: the kernel may have marked the pages clean, so a
    /// second flush that succeeds would prove nothing.
    ///
    /// For the same reason flushes are one at a time, and there is none behind a failed one: of a
    /// leader and a seal that flush the same file at once, only one might be told.
    pub(super) fn sync_segment(&self, segment: &SegmentFile) -> Result<()> {
        let _one_at_a_time = self.syncer.alone();
        if let Some(error) = self.poison.error() {
            return Err(error.maybe_applied());
        }
        self.counters.flushes.add(1);
        let synced = segment.file().and_then(|file| file.sync());
        synced.map_err(|source| {
            let error = Error::io("flushing the log failed", source).in_file(segment.name());
            self.poison_with(error.to_string());
            error.maybe_applied()
        })
    }

    /// Makes everything answered so far durable.
    pub(crate) fn sync_all(&self) -> Result<()> {
        self.check_home()?;
        let end_ms = self.gate_end_ms();
        let (end, failures) = {
            let core = self.turn_until(end_ms)?;
            self.check_writable(&core)?;
            (core.writer.end(), FailureCount::new(core.failures))
        };
        self.ensure_durable_until(end, failures, end_ms)
    }
}

fn taken_back() -> Error {
    Error::new(
        ErrorKind::Io,
        "writing to the log failed and the record was taken back; try again",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::record::Kind;
    use crate::vfs::sim::{Fault, FaultKind, Op, SimDisk};
    use crate::{NamespaceOptions, ObserveOptions, Options};

    /// Story: a record was appended, another caller's write failed and took both back, and a third
    /// caller's record was flushed in their place before the first one asked whether its own was.
    /// The position was durable, so it was told that its record was.
    #[test]
    fn a_record_taken_back_is_not_durable_because_its_place_is() {
        for level in [Durability::Process, Durability::Power] {
            let disk = SimDisk::new();
            let log = Options::new()
                .background(false)
                .open_on(disk.dir())
                .unwrap();
            let options = NamespaceOptions::new().outcome_bytes_max(0);
            let filter = log.filter("f", options).unwrap();
            let engine = &log.handle.engine;
            let appended = append_first(engine, &mut engine.core());
            let asked = ObserveOptions::new().durability(level);
            disk.fail(Fault::once(disk.steps(), FaultKind::NoSpace).only(Op::Write));
            assert!(filter.observe_with("second", &asked).is_err());
            assert!(filter.observe_with("third", &asked).unwrap().is_new());
            let end = appended.position.after();
            let ensured = engine.ensure(end, appended.failures, level);
            let error = ensured.unwrap_err();
            assert_eq!(error.applied(), crate::Applied::No, "{error}");
            assert!(filter.observe_with("first", &asked).unwrap().is_new());
        }
    }

    fn append_first(engine: &Engine, core: &mut Core) -> Appended {
        let record = Record::new(Kind::Seen, 1, b"first");
        let h = engine.hash.hash(1, b"first");
        engine.append(core, &record, h, None, None)
    }

    /// At `Process` a record is written before the lock is released: another caller's failure does
    /// not reach it.
    #[test]
    fn a_record_at_process_is_out_of_reach_of_another_ones_failure() {
        let disk = SimDisk::new();
        let log = Options::new()
            .background(false)
            .open_on(disk.dir())
            .unwrap();
        let options = NamespaceOptions::new().outcome_bytes_max(0);
        let filter = log.filter("f", options).unwrap();
        let engine = &log.handle.engine;
        let appended = {
            let mut core = engine.core();
            let appended = append_first(engine, &mut core);
            engine
                .finish_append(&mut core, Durability::Process)
                .unwrap();
            appended
        };
        let asked = ObserveOptions::new().durability(Durability::Process);
        disk.fail(Fault::once(disk.steps(), FaultKind::NoSpace).only(Op::Write));
        assert!(filter.observe_with("second", &asked).is_err());
        let end = appended.position.after();
        engine
            .ensure(end, appended.failures, Durability::Process)
            .unwrap();
        assert!(!filter.observe_with("first", &asked).unwrap().is_new());
    }

    /// A close says "clean" only of what its flush has covered: not of a record that comes between
    /// the flush and the end.
    #[test]
    fn a_record_behind_the_last_flush_makes_the_close_unclean() {
        let disk = SimDisk::new();
        let log = Options::new()
            .background(false)
            .open_on(disk.dir())
            .unwrap();
        let options = NamespaceOptions::new().outcome_bytes_max(0);
        let filter = log.filter("f", options).unwrap();
        let engine = Arc::clone(&log.handle.engine);
        let buffered = ObserveOptions::new().durability(Durability::Buffered);
        assert!(filter.observe_with("first", &buffered).unwrap().is_new());
        let end = engine.core().writer.end();
        std::thread::scope(|scope| {
            let held = engine.maintenance().unwrap();
            let closing = scope.spawn(|| engine.close());
            // The close has flushed and waits for the upkeep.
            while engine.syncer.durable() < end {
                std::thread::yield_now();
            }
            assert!(filter.observe_with("second", &buffered).unwrap().is_new());
            drop(held);
            closing.join().unwrap().unwrap();
        });
        let log = Options::new()
            .background(false)
            .open_on(disk.after_kill().dir());
        assert!(!log.unwrap().open_report().clean);
    }
}
