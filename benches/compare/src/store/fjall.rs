//! fjall 3.

use std::collections::HashSet;
use std::ops::Bound;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fjall::{Database, Keyspace, KeyspaceCreateOptions, PersistMode};

use super::gate::Gate;
use super::grouped::Group;
use super::{CACHE_BYTES, Session, Store};
use crate::Fallible;
use crate::cell::Level;
use crate::workload::Key;

pub(crate) const SETTINGS: &str = "cache 256 MiB, no compression, get and insert under a lock of \
     the key; lazy: its default, each write handed to the system; durable: `SyncAll` after each \
     call or batch; `fjall-grouped` is the same behind group commit in the application";

pub(crate) struct Fjall {
    database: Database,
    keys: Keyspace,
    gate: Gate,
    level: Level,
    group: Option<Group>,
    /// How many writes the journal has got.
    written: AtomicU64,
}

impl Fjall {
    pub(crate) fn open(dir: &Path, level: Level, grouped: bool) -> Fallible<Fjall> {
        let database = Database::builder(dir)
            .cache_size(CACHE_BYTES as u64)
            .open()?;
        let keys = database.keyspace("keys", KeyspaceCreateOptions::default)?;
        Ok(Fjall {
            database,
            keys,
            gate: Gate::default(),
            level,
            group: grouped.then(Group::default),
            written: AtomicU64::new(0),
        })
    }

    /// Makes durable what was written before `position`, if verdicts have to be.
    fn commit(&self, position: u64) -> Fallible<()> {
        if self.level != Level::Durable {
            return Ok(());
        }
        let flush = || {
            // Acquire: pairs with the writers' Release; what they wrote is in the journal.
            let upto = self.written.load(Ordering::Acquire);
            self.database.persist(PersistMode::SyncAll)?;
            Ok(upto)
        };
        match &self.group {
            Some(group) => group.wait(position, flush),
            None => flush().map(|_| ()),
        }
    }
}

impl Store for Fjall {
    fn session(&self) -> Fallible<Box<dyn Session + '_>> {
        Ok(Box::new(FjallSession(self)))
    }

    fn settle(&self) -> Fallible<()> {
        self.database.persist(PersistMode::SyncAll)?;
        // There is no call that waits for compactions.
        while self.database.outstanding_flushes() > 0 || self.database.active_compactions() > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn close(self: Box<Self>) -> Fallible<()> {
        Ok(self.database.persist(PersistMode::SyncAll)?)
    }

    fn scan(&self, after: &[u8], count_max: usize) -> Fallible<Vec<(Key, u64)>> {
        let range = (Bound::Excluded(after), Bound::<&[u8]>::Unbounded);
        let items = self.keys.range::<&[u8], _>(range).take(count_max);
        items
            .map(|item| {
                let (key, value) = item.into_inner()?;
                super::item(&key, &value)
            })
            .collect()
    }

    fn remove(&self, keys: &[Key]) -> Fallible<()> {
        let mut batch = self.database.batch();
        keys.iter().for_each(|key| batch.remove(&self.keys, *key));
        Ok(batch.commit()?)
    }
}

struct FjallSession<'a>(&'a Fjall);

impl Session for FjallSession<'_> {
    fn insert(&mut self, key: &Key, expiry: u64) -> Fallible<bool> {
        let store = self.0;
        let (fresh, position) = {
            let _one = store.gate.one(key);
            let fresh = !store.keys.contains_key(key)?;
            if fresh {
                store.keys.insert(*key, expiry.to_le_bytes())?;
                (true, store.written.fetch_add(1, Ordering::Release) + 1)
            } else {
                (false, store.written.load(Ordering::Acquire))
            }
        };
        // A duplicate may rest on an insert that is not durable yet.
        store.commit(position)?;
        Ok(fresh)
    }

    fn insert_many(&mut self, keys: &[Key], expiry: u64, fresh: &mut Vec<bool>) -> Fallible<()> {
        let store = self.0;
        let _alone = store.gate.all();
        let mut batch = store.database.batch();
        let mut seen = HashSet::with_capacity(keys.len());
        for key in keys {
            let new = seen.insert(key) && !store.keys.contains_key(key)?;
            if new {
                batch.insert(&store.keys, *key, expiry.to_le_bytes());
            }
            fresh.push(new);
        }
        batch.commit()?;
        store.commit(store.written.fetch_add(1, Ordering::Release) + 1)
    }

    fn contains(&mut self, key: &Key) -> Fallible<bool> {
        Ok(self.0.keys.contains_key(key)?)
    }
}
