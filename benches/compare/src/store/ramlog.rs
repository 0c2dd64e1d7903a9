//! The limit: a hash map in memory beside a log, with group commit where durable.

use std::collections::hash_map::Entry;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::grouped::Group;
use super::limit::{self, BUFFER_BYTES, KeyMap, RECORD_BYTES};
use super::{Session, Store};
use crate::Fallible;
use crate::cell::Level;
use crate::workload::Key;

pub(crate) const SETTINGS: &str = "`ramlog`, the limit: the same map beside a log of 28-byte \
     records (key, expiry, CRC-32); lazy: a 32-KiB buffer, never flushed to the device before \
     the end; durable: a file filled with zeros before the clock starts, one flush at a time for \
     all callers that have appended, each woken by its own position; an open reads the whole log";

pub(crate) struct RamLog {
    state: Mutex<State>,
    file: File,
    group: Group,
    level: Level,
}

struct State {
    /// Key to the end of its record in the log.
    map: KeyMap,
    buffer: Vec<u8>,
    /// Where the buffer goes in the file.
    written: u64,
}

impl State {
    fn end(&self) -> u64 {
        self.written + self.buffer.len() as u64
    }

    /// The verdict, and the position that must be durable before it is answered.
    fn put(&mut self, key: &Key, expiry: u64) -> (bool, u64) {
        let end = self.end() + RECORD_BYTES as u64;
        match self.map.entry(limit::number(key)) {
            Entry::Occupied(known) => (false, *known.get()),
            Entry::Vacant(vacant) => {
                vacant.insert(end);
                self.buffer.extend_from_slice(&limit::record(key, expiry));
                (true, end)
            }
        }
    }
}

impl RamLog {
    pub(crate) fn open(dir: &Path, level: Level, keys: u64) -> Fallible<RamLog> {
        let path = dir.join("log");
        let mut map = KeyMap::default();
        let file = if path.exists() {
            OpenOptions::new().read(true).write(true).open(&path)?
        } else if level == Level::Durable {
            limit::zero_filled(&path, (keys + 4096) * RECORD_BYTES as u64)?
        } else {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .open(&path)?
        };
        let written = replay(&file, &mut map)?;
        Ok(RamLog {
            state: Mutex::new(State {
                map,
                buffer: Vec::with_capacity(2 * BUFFER_BYTES),
                written,
            }),
            file,
            group: Group::default(),
            level,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, state: &mut State) -> Fallible<()> {
        self.file.write_all_at(&state.buffer, state.written)?;
        state.written = state.end();
        state.buffer.clear();
        Ok(())
    }

    /// Called by the leader of the group alone: nobody else writes.
    fn flush(&self) -> Fallible<u64> {
        let (bytes, at) = {
            let mut state = self.state();
            let at = state.written;
            state.written = state.end();
            (
                std::mem::replace(&mut state.buffer, Vec::with_capacity(BUFFER_BYTES)),
                at,
            )
        };
        self.file.write_all_at(&bytes, at)?;
        self.file.sync_data()?;
        Ok(at + bytes.len() as u64)
    }

    fn answer(&self, mut state: MutexGuard<'_, State>, position: u64) -> Fallible<()> {
        if self.level == Level::Durable {
            drop(state);
            return self.group.wait(position, || self.flush());
        }
        if state.buffer.len() >= BUFFER_BYTES {
            self.write(&mut state)?;
        }
        Ok(())
    }
}

/// Reads the log up to its first record that is not whole.
fn replay(mut file: &File, map: &mut KeyMap) -> Fallible<u64> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let mut end = 0;
    for record in bytes.as_chunks::<RECORD_BYTES>().0 {
        let Some((key, rest)) = record.split_first_chunk::<16>() else {
            break;
        };
        let expiry = rest
            .first_chunk()
            .map_or(0, |bytes| u64::from_le_bytes(*bytes));
        if expiry == 0 || *record != limit::record(key, expiry) {
            break;
        }
        end += RECORD_BYTES as u64;
        map.insert(limit::number(key), end);
    }
    Ok(end)
}

impl Store for RamLog {
    fn session(&self) -> Fallible<Box<dyn Session + '_>> {
        Ok(Box::new(RamLogSession(self)))
    }

    fn settle(&self) -> Fallible<()> {
        self.write(&mut self.state())?;
        Ok(self.file.sync_data()?)
    }

    fn close(self: Box<Self>) -> Fallible<()> {
        self.settle()
    }
}

struct RamLogSession<'a>(&'a RamLog);

impl Session for RamLogSession<'_> {
    fn insert(&mut self, key: &Key, expiry: u64) -> Fallible<bool> {
        let mut state = self.0.state();
        let (fresh, position) = state.put(key, expiry);
        self.0.answer(state, position)?;
        Ok(fresh)
    }

    fn insert_many(&mut self, keys: &[Key], expiry: u64, fresh: &mut Vec<bool>) -> Fallible<()> {
        let mut state = self.0.state();
        let mut last = 0;
        for key in keys {
            let (new, position) = state.put(key, expiry);
            fresh.push(new);
            last = last.max(position);
        }
        self.0.answer(state, last)
    }

    fn contains(&mut self, key: &Key) -> Fallible<bool> {
        Ok(self.0.state().map.contains_key(&limit::number(key)))
    }
}
