//! The stores, each with the strongest flush that it documents.

use std::path::Path;

use crate::Fallible;

pub(crate) trait Engine {
    /// Inserts, and returns when the insert survives a power cut.
    fn put(&mut self, key: &[u8], value: &[u8]) -> Fallible<()>;
    fn get(&self, key: &[u8]) -> Fallible<Option<Vec<u8>>>;
    fn close(self: Box<Self>) -> Fallible<()>;
}

/// Opens a store, or makes it.
pub(crate) fn open(engine: &str, dir: &Path) -> Fallible<Box<dyn Engine>> {
    Ok(match engine {
        "idemlog" => {
            let log = idemlog::DedupLog::open(dir)?;
            let space = log.namespace("keys", idemlog::NamespaceOptions::new())?;
            Box::new(Idemlog { log, space })
        }
        "sled" => Box::new(Sled(sled::Config::new().path(dir).open()?)),
        "redb" => {
            std::fs::create_dir_all(dir)?;
            Box::new(Redb(redb::Database::create(dir.join("data.redb"))?))
        }
        "fjall" => {
            let database = fjall::Database::builder(dir).open()?;
            let items = database.keyspace("items", fjall::KeyspaceCreateOptions::default)?;
            Box::new(Fjall { database, items })
        }
        other => return Err(format!("no engine called {other}").into()),
    })
}

/// Durability `Power`, its default. An insert is a claim and its commit.
struct Idemlog {
    log: idemlog::DedupLog,
    space: idemlog::Namespace<idemlog::Internal>,
}

impl Engine for Idemlog {
    fn put(&mut self, key: &[u8], value: &[u8]) -> Fallible<()> {
        let claim = self.space.claim(key)?.claim();
        let mut claim = claim.ok_or("the key is taken")?;
        match claim.commit(value)? {
            idemlog::CommitVerdict::Committed { .. } => Ok(()),
            other => Err(format!("not committed: {other:?}").into()),
        }
    }

    fn get(&self, key: &[u8]) -> Fallible<Option<Vec<u8>>> {
        Ok(match self.space.get(key)? {
            idemlog::KeyState::Done(done) => done.outcome.bytes().map(<[u8]>::to_vec),
            _ => None,
        })
    }

    fn close(self: Box<Self>) -> Fallible<()> {
        drop(self.space);
        Ok(self.log.close()?)
    }
}

/// `flush()` after each insert.
struct Sled(sled::Db);

impl Engine for Sled {
    fn put(&mut self, key: &[u8], value: &[u8]) -> Fallible<()> {
        self.0.insert(key, value)?;
        self.0.flush()?;
        Ok(())
    }

    fn get(&self, key: &[u8]) -> Fallible<Option<Vec<u8>>> {
        Ok(self.0.get(key)?.map(|value| value.to_vec()))
    }

    fn close(self: Box<Self>) -> Fallible<()> {
        self.0.flush()?;
        Ok(())
    }
}

const TABLE: redb::TableDefinition<'_, &[u8], &[u8]> = redb::TableDefinition::new("items");

/// `Durability::Immediate`, a transaction an insert.
struct Redb(redb::Database);

impl Engine for Redb {
    fn put(&mut self, key: &[u8], value: &[u8]) -> Fallible<()> {
        let mut transaction = self.0.begin_write()?;
        transaction.set_durability(redb::Durability::Immediate)?;
        transaction.open_table(TABLE)?.insert(key, value)?;
        transaction.commit()?;
        Ok(())
    }

    fn get(&self, key: &[u8]) -> Fallible<Option<Vec<u8>>> {
        use redb::{ReadableDatabase, TableError};
        let transaction = self.0.begin_read()?;
        let table = match transaction.open_table(TABLE) {
            // Nothing was ever inserted.
            Err(TableError::TableDoesNotExist(_)) => return Ok(None),
            table => table?,
        };
        Ok(table.get(key)?.map(|value| value.value().to_vec()))
    }

    fn close(self: Box<Self>) -> Fallible<()> {
        Ok(())
    }
}

/// `PersistMode::SyncAll` after each insert.
struct Fjall {
    database: fjall::Database,
    items: fjall::Keyspace,
}

impl Engine for Fjall {
    fn put(&mut self, key: &[u8], value: &[u8]) -> Fallible<()> {
        self.items.insert(key, value)?;
        self.database.persist(fjall::PersistMode::SyncAll)?;
        Ok(())
    }

    fn get(&self, key: &[u8]) -> Fallible<Option<Vec<u8>>> {
        Ok(self.items.get(key)?.map(|value| value.to_vec()))
    }

    fn close(self: Box<Self>) -> Fallible<()> {
        self.database.persist(fjall::PersistMode::SyncAll)?;
        Ok(())
    }
}
