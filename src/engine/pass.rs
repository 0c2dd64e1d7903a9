//! How a batch goes through its keys: pass by pass, each on one snapshot, with a look ahead; and
//! what of it may be in the log when it fails.

use super::Engine;
use super::core::{Core, Snapshot};
use super::lookup::{Searched, Wanted};
use super::namespace::Space;
use crate::error::{Error, Result};
use crate::format::record::Record;
use crate::key::check_key;
use crate::log::sync::FailureCount;
use crate::position::Position;

/// The highest record that a verdict of a batch rests on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rests {
    pub(crate) end: Position,
    pub(crate) failures: FailureCount,
}

/// One key of a batch.
pub(super) struct Item<'a, R> {
    pub(super) wanted: Wanted<'a>,
    pub(super) in_file: bool,
    pub(super) answer: Option<Result<R>>,
}

impl<'a, R> Item<'a, R> {
    /// A bad key is answered at once.
    pub(super) fn new(engine: &Engine, space: &Space, key: &'a [u8]) -> Self {
        Item {
            wanted: engine.wanted_in(space, key),
            in_file: false,
            answer: check_key(key).err().map(Err),
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.answer.is_none()
    }
}

/// How far a pass looks ahead: more lines than this are not fetched at a time.
const AHEAD: usize = 12;

/// Has the processor fetch, before a pass goes on to the item at `index`, what those some places
/// further on will need: while one key waits for memory, so do the next ones.
#[inline]
fn fetch_ahead<R>(items: &[Item<'_, R>], index: usize, fetch: impl Fn(Wanted<'_>)) {
    let first = if index == 0 { 0 } else { index + AHEAD - 1 };
    let near = items.get(first..items.len().min(index + AHEAD));
    for item in near.unwrap_or_default() {
        fetch(item.wanted);
    }
}

/// The same for the table of the active segment.
#[inline]
pub(super) fn fetch_table_ahead<R>(items: &[Item<'_, R>], index: usize, core: &Core) {
    fetch_ahead(items, index, |wanted| core.table.prefetch(wanted.h));
}

/// A batch waits for the furthest record that any of its verdicts rests on. A failure between
/// two passes concerns the earlier one, so the earliest count is kept.
pub(super) fn later(rests: Option<Rests>, on: Rests) -> Option<Rests> {
    Some(match rests {
        None => on,
        Some(before) => Rests {
            end: before.end.max(on.end),
            failures: before.failures,
        },
    })
}

/// Keys of one pass over a batch. What changes in the store meanwhile costs the work of one pass.
const PASS_KEYS: usize = 1024;

/// Returns the keys of the next pass: those from the first one without an answer on. `done` counts
/// those before it.
pub(super) fn next_pass<'a, 'k, R>(
    items: &'a mut [Item<'k, R>],
    done: &mut usize,
) -> Option<&'a mut [Item<'k, R>]> {
    let left = items.get(*done..).unwrap_or_default();
    *done += left.iter().take_while(|item| !item.is_open()).count();
    let end = (*done + PASS_KEYS).min(items.len());
    items.get_mut(*done..end).filter(|pass| !pass.is_empty())
}

/// Which passes of a batch have appended: what of it may be in the log when it fails.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Written {
    pub(super) now: bool,
    before: bool,
    /// Something was answered in this pass, be it from what was there before.
    pub(super) answered: bool,
    passes_count: u32,
}

impl Written {
    pub(super) fn end_pass(&mut self) {
        self.passes_count += u32::from(self.answered);
        self.before |= self.now;
        (self.now, self.answered) = (false, false);
    }

    /// Between two writes: what was appended stays, and is written with what comes next.
    pub(super) fn error(self, error: Error) -> Error {
        if self.before || self.now {
            error.maybe_applied()
        } else {
            error
        }
    }

    /// A write that failed was taken back, and what was written before it was not.
    pub(super) fn error_of_write(self, error: Error) -> Error {
        if self.before {
            error.maybe_applied()
        } else {
            error
        }
    }

    /// A batch of one pass is written and taken back as a whole.
    pub(super) fn error_of_wait(self, error: Error) -> Error {
        if self.passes_count > 1 {
            error.maybe_applied()
        } else {
            error
        }
    }
}

/// What the verdicts of a batch rest on: its own records, and older ones.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Resting {
    pub(super) written: Option<Rests>,
    pub(super) read: Option<Rests>,
}

impl Resting {
    pub(super) fn add(&mut self, is_written: bool, on: Rests) {
        if is_written {
            self.written = later(self.written, on);
        } else {
            self.read = later(self.read, on);
        }
    }
}

impl Engine {
    /// Takes a snapshot for a pass over a batch, and notes which keys may have records that must be
    /// read from the active segment's file; with `is_known`, which may have any there.
    pub(super) fn snapshot_many<R>(&self, items: &mut [Item<'_, R>], is_known: bool) -> Snapshot {
        let core = self.core();
        for index in 0..items.len() {
            fetch_table_ahead(items, index, &core);
            let Some(item) = items.get_mut(index) else {
                break;
            };
            let mut candidates = core.table.candidates(item.wanted.h);
            item.in_file = candidates.any(|at| is_known || !core.writer.is_in_memory(at));
        }
        Snapshot::of(&core)
    }

    /// Searches for all keys that have no answer yet. One that cannot be searched for is answered
    /// with the error.
    pub(super) fn search_many<R, T>(
        &self,
        snapshot: &Snapshot,
        items: &mut [Item<'_, R>],
        extract: &impl Fn(&Record<'_>) -> T,
    ) -> Vec<Option<Searched<T>>> {
        let mut all = Vec::with_capacity(items.len());
        for index in 0..items.len() {
            fetch_ahead(items, index, |wanted| snapshot.prefetch(wanted));
            let open = items.get_mut(index).filter(|item| item.is_open());
            all.push(open.and_then(|item| {
                match self.search(snapshot, item.wanted, item.in_file, extract) {
                    Ok(searched) => Some(searched),
                    Err(error) => {
                        item.answer = Some(Err(error));
                        None
                    }
                }
            }));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Story: the first pass of a batch told a duplicate of another thread's record, the second
    /// appended; that record was taken back before the batch waited. It said that nothing of it was
    /// applied, and its own record was in the log.
    #[test]
    fn a_batch_of_two_passes_does_not_say_that_nothing_was_applied() {
        use crate::{Applied, ErrorKind};
        let error = || Error::new(ErrorKind::Io, "taken back");
        let mut written = Written {
            answered: true,
            ..Written::default()
        };
        written.end_pass();
        (written.answered, written.now) = (true, true);
        assert_eq!(written.error_of_write(error()).applied(), Applied::No);
        written.end_pass();
        assert_eq!(written.error_of_wait(error()).applied(), Applied::Maybe);
        let mut one = Written {
            answered: true,
            now: true,
            ..Written::default()
        };
        one.end_pass();
        assert_eq!(one.error_of_wait(error()).applied(), Applied::No);
    }
}
