//! Namespaces inside the engine: opening, creating, purging, and reading one key.

use super::core::{Core, KnownNamespace};
use super::namespace::Space;
use super::update::{Basis, is_alive};
use super::{Engine, check_open};
use crate::error::{Error, ErrorKind, Result};
use crate::format::manifest::NamespaceEntry;
use crate::format::to_u32;
use crate::key::{NamespaceKind, check_key, check_namespace};
use crate::model::claim::{Entry, Env, view};
use crate::options::NamespaceOptions;
use crate::position::Position;
use crate::verdict::KeyState;

/// A key's state, which may not be durable yet.
pub(crate) struct ReadKey {
    entry: Option<Entry>,
    env: Env,
    /// What a duplicate would rest on.
    pub(crate) basis: Option<Basis>,
}

impl Engine {
    /// Reads a key's state.
    pub(crate) fn get(&self, space: &Space, key: &[u8]) -> Result<KeyState> {
        let read = self.get_undurable(space, key)?;
        if let Some(basis) = read.basis {
            self.ensure_basis(basis)?;
        }
        self.state_of(&read)
    }

    /// The same without the wait: what is read may be told when its basis is durable.
    #[inline]
    pub(crate) fn get_undurable(&self, space: &Space, key: &[u8]) -> Result<ReadKey> {
        check_key(key)?;
        let located = self.locate(self.wanted_in(space, key), Entry::of_record)?;
        let now = self.now();
        let core = self.core();
        check_open(&core)?;
        core.check_namespace(space)?;
        let env = self.env(
            &core,
            space,
            located.hit.as_ref(),
            now,
            space.options.retention,
        );
        drop(core);
        let hit = located.hit.as_ref();
        self.check_trustworthy(hit.map(|hit| hit.older.position))?;
        // A duplicate is told only of what is as durable as the namespace says.
        let rests_on = hit.filter(|hit| hit.taken.is_final());
        let basis = rests_on.map(|hit| Basis {
            end: hit.older.position.after(),
            failures: located.failures,
            level: self.level(space.options.durability, None),
        });
        let entry = located.hit.map(|hit| hit.taken);
        Ok(ReadKey { entry, env, basis })
    }

    #[inline]
    pub(crate) fn state_of(&self, read: &ReadKey) -> Result<KeyState> {
        Ok(view(
            self.alive(read.entry.as_ref(), &read.env.now)?,
            &read.env,
        ))
    }

    /// Reads what is kept under a key of a namespace without claims, as durable as the namespace
    /// says.
    pub(crate) fn read_entry(&self, space: &Space, key: &[u8]) -> Result<Option<Entry>> {
        check_key(key)?;
        let located = self.locate(self.wanted_in(space, key), Entry::of_record)?;
        let now = self.now();
        {
            let core = self.core();
            check_open(&core)?;
            core.check_namespace(space)?;
        }
        self.check_trustworthy(located.hit.as_ref().map(|hit| hit.older.position))?;
        if let Some(hit) = &located.hit {
            let level = self.level(space.options.durability, None);
            self.ensure(hit.older.position.after(), located.failures, level)?;
        }
        let entry = located.hit.map(|hit| hit.taken);
        self.alive(entry.as_ref(), &now)?;
        Ok(entry.filter(|entry| is_alive(entry, &now)))
    }

    pub(crate) fn confirm_time(&self) -> Result<()> {
        let one_at_a_time = self.maintenance()?;
        self.check_whole()?;
        self.check_writable(&self.core())?;
        let pushed = self.push_time(true);
        drop(one_at_a_time);
        self.pay_waiters();
        pushed
    }

    /// A poisoned store answers only from what was durable before the fault.
    pub(crate) fn check_trustworthy(&self, hit: Option<Position>) -> Result<()> {
        let Some(error) = self.poison.error() else {
            return Ok(());
        };
        match hit {
            Some(position) if position < self.syncer.durable() => Ok(()),
            _ => Err(error),
        }
    }

    /// Finds a namespace by name, or creates it; another kind is an error.
    pub(crate) fn open_space(
        &self,
        name: &str,
        kind: NamespaceKind,
        options: NamespaceOptions,
    ) -> Result<Space> {
        check_namespace(name)?;
        options.validate(kind, self.options.segment_bytes)?;
        let _one_at_a_time = self.nothing_moves()?;
        let known = {
            let core = self.core();
            self.check_usable(&core)?;
            core.namespaces
                .iter()
                .find(|(_, n)| n.name == name)
                .map(|(id, n)| (*id, n.kind))
        };
        let id = match known {
            Some((id, found)) if found == kind => id,
            Some((_, found)) => {
                return Err(Error::invalid(format!(
                    "namespace has another kind: name={name} found={} asked={}; the kind is \
                     declared once",
                    found.name(),
                    kind.name()
                )));
            }
            None if self.reader.is_some() => {
                return Err(Error::invalid(format!(
                    "unknown namespace, and none is made by who only reads: name={name}"
                )));
            }
            None => self.create_space(name, kind)?,
        };
        let space = Space {
            id,
            name: name.to_owned(),
            kind,
            options,
        };
        let frame_bytes = to_u32(self.largest_frame_bytes(&space));
        let mut core = self.core();
        core.frame_bytes_max = core.frame_bytes_max.max(frame_bytes);
        if let (Some(known), Some(time)) = (core.namespaces.get_mut(&id), space.options.key_time) {
            known.key_time = Some(time);
        }
        drop(core);
        Ok(space)
    }

    fn create_space(&self, name: &str, kind: NamespaceKind) -> Result<u16> {
        self.check_whole()?;
        let id = self.catalog().manifest().namespace_next;
        if id == u16::MAX {
            return Err(Error::new(
                ErrorKind::Full,
                "all 65,534 namespace numbers are used up",
            ));
        }
        self.edit_manifest(|manifest| {
            manifest.namespace_next = id + 1;
            manifest.namespaces.push(NamespaceEntry {
                id,
                kind,
                name: name.to_owned(),
            });
        })?;
        let known = KnownNamespace {
            name: name.to_owned(),
            kind,
            key_time: None,
        };
        self.core().namespaces.insert(id, known);
        Ok(id)
    }

    /// Forgets a whole namespace at once: its number is never used again, so no record of it is
    /// ever found. Its bytes go with their segments.
    pub(crate) fn purge(&self, name: &str, forced: bool) -> Result<()> {
        self.check_whole()?;
        let one_at_a_time = self.maintenance()?;
        let id = {
            let core = self.turn()?;
            self.check_writable(&core)?;
            let found = core
                .namespaces
                .iter()
                .find(|(_, n)| n.name == name)
                .map(|(id, _)| *id);
            let Some(id) = found else {
                return Err(Error::invalid(format!("unknown namespace: name={name}")));
            };
            if !forced && core.unsettled.values().any(|entry| entry.namespace == id) {
                return Err(Error::invalid(format!(
                    "namespace holds what may not be forgotten (open claims, keys in doubt, cells, \
                     watermarks, outbox entries): name={name}; settle it, or force it"
                )));
            }
            id
        };
        self.edit_manifest(|manifest| manifest.namespaces.retain(|n| n.id != id))?;
        let mut core = self.core();
        core.namespaces.remove(&id);
        core.outboxes.remove(&id);
        core.forget_namespace(id);
        drop(core);
        drop(one_at_a_time);
        self.waits.ring_all();
        Ok(())
    }
}

impl Core {
    pub(crate) fn forget_namespace(&mut self, id: u16) {
        let owed: u64 = self
            .unsettled
            .values()
            .filter(|e| e.namespace == id)
            .map(|e| u64::from(e.owed_bytes))
            .sum();
        self.owed_bytes -= owed;
        let active = self.writer.segment.id;
        let mut in_active = 0;
        self.unsettled.retain(|at, entry| {
            let goes = entry.namespace == id;
            if goes && Position::from_u64(*at).segment() == active {
                in_active += 1;
            }
            !goes
        });
        self.tally.unsettled_count -= in_active;
        if self.writer.has_unwritten() {
            // Taking back a write must not bring an entry back.
            self.promise();
        }
    }
}
