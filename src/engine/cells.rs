//! Cells: versioned values in the store, read, and written if they are as expected.

use std::sync::Arc;

use super::attach::check_value;
use super::group::{GroupLevels, Grouped, Member, MemberStep};
use super::handle::Handle;
use super::namespace::Space;
use crate::error::Result;
use crate::format::record::Kind;
use crate::format::to_usize;
use crate::key::check_key;
use crate::model::cell;
use crate::model::cell::CellDecision;
use crate::options::Retention;
use crate::verdict::{Cell, CellVerdict, Expected};

/// A namespace of versioned values. They are kept until they are deleted: nothing expires.
///
/// A version is the stamp of the write that made it. It is never used again, neither after a
/// deletion nor after a reopen or a lost tail, so a value that went away and came back is not
/// taken for one that never changed. Clones are handles of the same cells.
#[derive(Clone, Debug)]
pub struct Cells {
    pub(super) handle: Arc<Handle>,
    pub(super) space: Arc<Space>,
}

impl Cells {
    pub(crate) fn new(handle: Arc<Handle>, space: Arc<Space>) -> Self {
        Cells { handle, space }
    }

    /// Returns the namespace's name.
    pub fn name(&self) -> &str {
        &self.space.name
    }

    /// Reads a cell; `None` if it was never written, or deleted. It may change the moment after:
    /// write with the version that was read. What is read is as durable as the namespace says.
    ///
    /// # Errors
    /// `Invalid` for an empty or oversized key, `Damaged`, `Io`, `Closed`, `Poisoned`.
    pub fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Cell>> {
        let engine = &self.handle.engine;
        let entry = engine.read_entry(&self.space, key.as_ref())?;
        Ok(cell::view(entry.as_ref()))
    }

    /// Writes a cell, if it is as expected.
    ///
    /// # Errors
    /// `Invalid` for a bad key or a value over the limit (`outcome_bytes_max` of the namespace),
    /// `Full`, `Poisoned`, `Closed`, `Damaged`, `Io`.
    pub fn put(
        &self,
        key: impl AsRef<[u8]>,
        expected: Expected,
        value: impl AsRef<[u8]>,
    ) -> Result<CellVerdict> {
        check_value(&self.space, value.as_ref().len())?;
        self.write(key.as_ref(), expected, Some(value.as_ref()))
    }

    /// Deletes a cell, if it is as expected. An absent cell that is expected to be so stays so.
    ///
    /// # Errors
    /// As [`Cells::put`].
    pub fn delete(&self, key: impl AsRef<[u8]>, expected: Expected) -> Result<CellVerdict> {
        self.write(key.as_ref(), expected, None)
    }

    fn write(&self, key: &[u8], expected: Expected, value: Option<&[u8]>) -> Result<CellVerdict> {
        check_key(key)?;
        let engine = &self.handle.engine;
        let member = [Member {
            space: &self.space,
            key,
            retention: Retention::Forever,
        }];
        let levels = GroupLevels {
            level: engine.level(self.space.options.durability, None),
            // A deletion fits whatever the bound: it is the way back from it.
            reserved_bytes: if value.is_none() {
                to_usize(engine.options.segment_bytes)
            } else {
                0
            },
        };
        let grouped = engine.update_group(&member, levels, |_, entry, env| {
            Ok(match cell::write(entry, env, expected, value) {
                CellDecision::Write(entry) => MemberStep::Write {
                    stamped: entry.kind == Kind::Cell,
                    entry,
                },
                CellDecision::Unchanged => MemberStep::Nothing,
                CellDecision::Conflict(current) => MemberStep::Refuse(current),
            })
        })?;
        Ok(match grouped {
            Grouped::Refused(current) => CellVerdict::Conflict { current },
            Grouped::Written(written) => match written.into_iter().next().flatten() {
                Some(written) if value.is_some() => CellVerdict::Written {
                    version: written.stamp,
                },
                _ => CellVerdict::Deleted,
            },
        })
    }
}
