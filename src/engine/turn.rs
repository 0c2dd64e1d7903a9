//! The turn: who decides and appends now. In a store of one process it is the append lock; in a
//! shared one also a lock among processes, and whoever has it knows all that the others appended.

use std::ops::{Deref, DerefMut};

use super::Engine;
use super::core::Core;
use super::reader::{Reader, Reading};
use super::shared::{Flush, Held, Shared};
use crate::error::{Error, Result};
use crate::format::shared::Cell;
use crate::format::to_usize;
use crate::log::segment::SegmentFile;
use crate::log::sync::WaitError;
use crate::log::sync::primitives::MutexGuard;
use crate::options::Durability;
use crate::position::Position;
use crate::vfs::Access;

/// The append lock, held, and in a shared store the turn.
pub(crate) struct Turn<'a> {
    core: MutexGuard<'a, Core>,
    shared: Option<SharedTurn<'a>>,
    /// Of a reader: no other thread follows meanwhile.
    _reading: Option<Reading<'a>>,
}

/// What is let go behind the append lock.
struct SharedTurn<'a> {
    engine: &'a Engine,
    shared: &'a Shared,
    /// What the others were told of the end of the log, and of the newest stamp.
    told: (u64, u64),
    /// The edit that the log needed up to there.
    edit_told: u64,
    _gate: Held<'a>,
}

impl Deref for Turn<'_> {
    type Target = Core;

    #[inline]
    fn deref(&self) -> &Core {
        &self.core
    }
}

impl DerefMut for Turn<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Core {
        &mut self.core
    }
}

impl Drop for Turn<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(turn) = &mut self.shared {
            turn.end(&mut self.core);
        }
    }
}

impl SharedTurn<'_> {
    /// Leaves nothing in memory that the others do not see in the file, and tells them where the
    /// log ends.
    #[cold]
    fn end(&self, core: &mut Core) {
        if std::thread::panicking() && core.writer.has_unwritten() {
            return;
        }
        // Every path that appends has done so: what is left here nobody was told of.
        if core.writer.has_unwritten() && self.engine.write_out(core).is_err() {
            self.engine
                .poison_with("appending without writing failed".to_owned());
        }
        let (end, stamp) = (core.writer.written().get(), core.stamps.newest());
        self.shared.note_end(end);
        if (end, stamp) != self.told {
            // Whoever appended before may have known more than this opener was told of.
            let edit = core.edit_seen.max(self.edit_told);
            if let Err(error) = self.shared.write(&Cell::End { end, stamp, edit }) {
                self.engine.poison_with(error.to_string());
            }
        }
    }
}

impl Engine {
    /// Takes the turn. In a store of one process that is the append lock.
    ///
    /// # Errors
    /// In a shared store `Locked` if another process does not let it go, and whatever reading the
    /// log comes to.
    #[inline]
    pub(crate) fn turn(&self) -> Result<Turn<'_>> {
        match (&self.shared, &self.reader) {
            (None, None) => Ok(Turn {
                core: self.core(),
                shared: None,
                _reading: None,
            }),
            (Some(shared), _) => self.shared_turn(shared, shared.end_ms(self.clock())),
            (None, Some(reader)) => self.reading_turn(reader),
        }
    }

    #[cold]
    fn reading_turn<'a>(&'a self, reader: &'a Reader) -> Result<Turn<'a>> {
        let reading = self.follow_told(reader)?;
        Ok(Turn {
            core: self.core(),
            shared: None,
            _reading: Some(reading),
        })
    }

    /// Takes the turn, and waits for it until then.
    pub(crate) fn turn_until(&self, end_ms: u64) -> Result<Turn<'_>> {
        match &self.shared {
            None => self.turn(),
            Some(shared) => self.shared_turn(shared, end_ms),
        }
    }

    /// Makes sure that everything is known that was appended before this call.
    #[inline]
    pub(crate) fn refresh(&self) -> Result<()> {
        if !self.is_alone() {
            drop(self.turn()?);
        }
        Ok(())
    }

    /// In a shared store: takes over what this process has edited in the manifest, together with
    /// whatever others have.
    pub(crate) fn take_over_edit(&self) -> Result<()> {
        let core = self.turn()?;
        // Where nothing is followed any more, nothing is taken over: whoever asks must not go on.
        self.check_writable(&core)
    }

    #[cold]
    fn shared_turn<'a>(&'a self, shared: &'a Shared, end_ms: u64) -> Result<Turn<'a>> {
        // A forked child has the parent's locks.
        self.check_home()?;
        let gate = shared.turn_gate(self.clock(), end_ms, || self.follow_ahead(shared))?;
        let cells = shared.read()?;
        if let Some(cause) = &cells.poison {
            self.poison_with(cause.clone());
        }
        let is_over = self.poisoned().is_some() || self.core().closed;
        if !is_over {
            shared.note_begin(cells.end);
            self.follow(&cells)?;
        }
        Ok(Turn {
            core: self.core(),
            shared: (!is_over).then_some(SharedTurn {
                engine: self,
                shared,
                told: (cells.end, cells.stamp),
                edit_told: cells.end_edit,
                _gate: gate,
            }),
            _reading: None,
        })
    }

    /// In a shared store nothing waits in memory: what is appended is written before the turn ends.
    pub(crate) fn write_level(&self, level: Durability) -> Durability {
        if self.shared.is_some() && level == Durability::Buffered {
            Durability::Process
        } else {
            level
        }
    }

    /// Flushes for all processes (the leader's part of a group commit), or takes what another
    /// process has flushed.
    pub(crate) fn lead_shared(
        &self,
        shared: &Shared,
        target: Position,
        end_ms: u64,
    ) -> Result<Position> {
        self.check_home()?;
        let flush = shared.flush_gate(target, self.clock(), end_ms);
        let _gate = match flush.map_err(Error::maybe_applied)? {
            Flush::Own(gate) => gate,
            Flush::Done(durable) => return Ok(durable),
        };
        let cells = shared.read().map_err(Error::maybe_applied)?;
        let durable = Position::from_u64(cells.durable);
        if durable >= target {
            return Ok(durable);
        }
        let (segment, frozen, end) = {
            let core = self.turn_until(end_ms).map_err(Error::maybe_applied)?;
            self.check_writable(&core).map_err(Error::maybe_applied)?;
            let segment = std::sync::Arc::clone(&core.writer.segment);
            (segment, core.view().frozen.clone(), core.writer.end())
        };
        let flushing = |durable: Position, flushing| Cell::Durable {
            durable: durable.get(),
            flushing,
        };
        shared
            .write(&flushing(durable, true))
            .map_err(Error::maybe_applied)?;
        for frozen in &frozen {
            self.sync_frozen(frozen)?;
        }
        self.sync_segment(&segment)?;
        if cells.flushing {
            let frozen = frozen.iter().map(|frozen| (&frozen.segment, frozen.end));
            for (segment, end) in frozen.chain([(&segment, end.offset())]) {
                self.check_flushed(segment, durable, end)?;
            }
        }
        shared
            .write(&flushing(end, false))
            .map_err(Error::maybe_applied)?;
        Ok(end)
    }

    /// Compares with what the device holds, with the gate of flushes held: the flush before was one
    /// of a process that died in it, and nobody knows whether the kernel told it of a failure.
    fn check_flushed(&self, segment: &SegmentFile, durable: Position, end: u32) -> Result<()> {
        let from = match durable.segment().cmp(&segment.id) {
            std::cmp::Ordering::Less => 0,
            std::cmp::Ordering::Equal => durable.offset(),
            std::cmp::Ordering::Greater => return Ok(()),
        };
        let check = || {
            // An opening of its own: the other one is in use.
            let file = self.dir.open(&segment.name(), Access::Write)?;
            let mut bytes = vec![0; to_usize(end.saturating_sub(from))];
            let got = file.read_at(&mut bytes, u64::from(from))?;
            bytes.truncate(got);
            let held = file.holds(&bytes, u64::from(from))?;
            if held.is_none() {
                // Where nobody can look: written and flushed once more.
                file.write_at(&bytes, u64::from(from))?;
                file.sync()?;
            }
            Ok(held)
        };
        match check() {
            Ok(None | Some(true)) => return Ok(()),
            Ok(Some(false)) => {
                self.poison_with("a flush of a process that died has failed".to_owned());
            }
            // A second flush would prove nothing, whatever this one has failed at.
            Err(source) => {
                let what = "comparing the log with the device failed";
                let error = Error::io(what, source).in_file(segment.name());
                self.poison_with(error.to_string());
            }
        }
        Err(self.wait_error(WaitError::Poisoned))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::record::{Kind, Record};
    use crate::vfs::sim::SimDisk;
    use crate::{NamespaceOptions, Observed, Options};

    /// Whoever appends and gives up before the write has told nobody; but where another process
    /// appends behind that, it must not be overwritten or run over.
    #[test]
    fn what_was_appended_is_written_when_the_turn_ends() {
        let disk = SimDisk::new();
        let open = || {
            let options = Options::new().shared(true).background(false);
            let log = options.durability(Durability::Process);
            log.open_on(disk.process().dir()).unwrap()
        };
        let (a, b) = (open(), open());
        let filter = b.filter("f", NamespaceOptions::new()).unwrap();
        let engine = &a.handle.engine;
        {
            let mut turn = engine.turn().unwrap();
            let record = Record::new(Kind::Seen, 1, b"left");
            let h = engine.hash.hash(1, b"left");
            engine.append(&mut turn, &record, h, None, None);
        }
        assert_eq!(filter.observe("left").unwrap(), Observed::Duplicate);
        assert_eq!(filter.observe("next").unwrap(), Observed::New);
        let filter = a.filter("f", NamespaceOptions::new()).unwrap();
        for key in ["left", "next"] {
            assert_eq!(filter.observe(key).unwrap(), Observed::Duplicate);
        }
    }
}
