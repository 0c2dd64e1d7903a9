//! The limits: what a store cannot be better than, because each leaves out most of the work.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::{File, OpenOptions};
use std::hash::BuildHasher;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use siphasher::sip::SipHasher13;

use super::{Session, Store};
use crate::Fallible;
use crate::cell::Level;
use crate::workload::Key;

pub(crate) const SETTINGS: &str = "`ram`: a hash map behind a mutex, SipHash-1-3 like idemlog \
     (keyed, the crate `siphasher`), grown as it fills; `append`: a raw log of 28-byte records \
     behind a 32-KiB buffer, which answers nothing; `pwrite64`, `pwrite4k`: one write of 64 or \
     4096 bytes an operation into a file filled with zeros before the clock starts, with \
     `fdatasync` where durable; a batch is one write of 64 bytes a key";

/// SipHash-1-3 under a key, as idemlog hashes.
#[derive(Clone, Debug)]
pub(crate) struct Sip(u64, u64);

impl Default for Sip {
    fn default() -> Self {
        Sip(0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210)
    }
}

impl BuildHasher for Sip {
    type Hasher = SipHasher13;

    fn build_hasher(&self) -> SipHasher13 {
        SipHasher13::new_with_keys(self.0, self.1)
    }
}

/// A key as one number: it is hashed by one write of 16 bytes, without a length before it.
pub(crate) type KeyMap = HashMap<u128, u64, Sip>;

pub(crate) fn number(key: &Key) -> u128 {
    u128::from_le_bytes(*key)
}

/// A hash map in memory, nothing kept.
#[derive(Default)]
pub(crate) struct Ram(Mutex<KeyMap>);

impl Store for Ram {
    fn session(&self) -> Fallible<Box<dyn Session + '_>> {
        Ok(Box::new(RamSession(&self.0)))
    }

    fn settle(&self) -> Fallible<()> {
        Ok(())
    }

    fn close(self: Box<Self>) -> Fallible<()> {
        Ok(())
    }
}

struct RamSession<'a>(&'a Mutex<KeyMap>);

fn put(map: &mut KeyMap, key: &Key, expiry: u64) -> bool {
    match map.entry(number(key)) {
        Entry::Occupied(_) => false,
        Entry::Vacant(vacant) => {
            vacant.insert(expiry);
            true
        }
    }
}

impl Session for RamSession<'_> {
    fn insert(&mut self, key: &Key, expiry: u64) -> Fallible<bool> {
        let mut map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(put(&mut map, key, expiry))
    }

    fn insert_many(&mut self, keys: &[Key], expiry: u64, fresh: &mut Vec<bool>) -> Fallible<()> {
        let mut map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        fresh.extend(keys.iter().map(|key| put(&mut map, key, expiry)));
        Ok(())
    }

    fn contains(&mut self, key: &Key) -> Fallible<bool> {
        let map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(map.contains_key(&number(key)))
    }
}

/// Bytes that `append` and `ramlog` hold back before they write.
pub(crate) const BUFFER_BYTES: usize = 32 * 1024;
/// Key, expiry and checksum.
pub(crate) const RECORD_BYTES: usize = 28;

pub(crate) fn record(key: &Key, expiry: u64) -> [u8; RECORD_BYTES] {
    let mut record = [0; RECORD_BYTES];
    let (body, checksum) = record.split_at_mut(24);
    let (front, back) = body.split_at_mut(16);
    front.copy_from_slice(key);
    back.copy_from_slice(&expiry.to_le_bytes());
    checksum.copy_from_slice(&crc32fast::hash(body).to_le_bytes());
    record
}

/// A raw log that answers nothing.
pub(crate) struct Append(Mutex<std::io::BufWriter<File>>);

impl Append {
    pub(crate) fn open(dir: &Path) -> Fallible<Append> {
        let file = File::create(dir.join("log"))?;
        Ok(Append(Mutex::new(std::io::BufWriter::with_capacity(
            BUFFER_BYTES,
            file,
        ))))
    }
}

impl Store for Append {
    fn session(&self) -> Fallible<Box<dyn Session + '_>> {
        Ok(Box::new(AppendSession(&self.0)))
    }

    fn settle(&self) -> Fallible<()> {
        let mut writer = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        writer.flush()?;
        Ok(writer.get_ref().sync_data()?)
    }

    fn close(self: Box<Self>) -> Fallible<()> {
        self.settle()
    }

    fn answers(&self) -> bool {
        false
    }
}

struct AppendSession<'a>(&'a Mutex<std::io::BufWriter<File>>);

impl Session for AppendSession<'_> {
    fn insert(&mut self, key: &Key, expiry: u64) -> Fallible<bool> {
        let mut writer = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        writer.write_all(&record(key, expiry))?;
        Ok(true)
    }

    fn insert_many(&mut self, keys: &[Key], expiry: u64, fresh: &mut Vec<bool>) -> Fallible<()> {
        let mut writer = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for key in keys {
            writer.write_all(&record(key, expiry))?;
            fresh.push(true);
        }
        Ok(())
    }

    fn contains(&mut self, _key: &Key) -> Fallible<bool> {
        Err("a raw log answers nothing".into())
    }
}

/// One write an operation, into a file whose blocks are there and hold zeros.
pub(crate) struct Pwrite {
    file: File,
    durable: bool,
    bytes: usize,
    file_bytes: u64,
    end: AtomicU64,
}

/// The file is used again from its start when it is full.
const PWRITE_FILE_BYTES_MAX: u64 = 64 << 20;

impl Pwrite {
    pub(crate) fn open(dir: &Path, level: Level, bytes: usize, keys: u64) -> Fallible<Pwrite> {
        let wanted = (keys + 4096) * 2 * bytes as u64;
        let file_bytes = wanted.clamp(4 << 20, PWRITE_FILE_BYTES_MAX);
        Ok(Pwrite {
            file: zero_filled(&dir.join("log"), file_bytes)?,
            durable: level == Level::Durable,
            bytes,
            file_bytes,
            end: AtomicU64::new(0),
        })
    }

    fn write(&self, bytes: &[u8]) -> Fallible<()> {
        let length = bytes.len() as u64;
        // Relaxed: the offset orders nothing.
        let at = self.end.fetch_add(length, Ordering::Relaxed) % (self.file_bytes - length);
        // A write of 4 KiB is one of whole pages.
        self.file
            .write_all_at(bytes, at / self.bytes as u64 * self.bytes as u64)?;
        if self.durable {
            self.file.sync_data()?;
        }
        Ok(())
    }
}

/// Makes a file of zeros whose blocks are allocated and written. Written page by page: the page
/// cache keeps what is written at once in one piece, and counts the whole piece as written again
/// when a byte of it changes.
pub(crate) fn zero_filled(path: &Path, bytes: u64) -> Fallible<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)?;
    let zeros = [0; 4096];
    let mut at = 0;
    while at < bytes {
        file.write_all_at(&zeros, at)?;
        at += zeros.len() as u64;
    }
    file.sync_all()?;
    Ok(file)
}

impl Store for Pwrite {
    fn session(&self) -> Fallible<Box<dyn Session + '_>> {
        let bytes = vec![1; self.bytes];
        Ok(Box::new(PwriteSession { store: self, bytes }))
    }

    fn settle(&self) -> Fallible<()> {
        Ok(self.file.sync_data()?)
    }

    fn close(self: Box<Self>) -> Fallible<()> {
        self.settle()
    }

    fn answers(&self) -> bool {
        false
    }
}

struct PwriteSession<'a> {
    store: &'a Pwrite,
    bytes: Vec<u8>,
}

impl Session for PwriteSession<'_> {
    fn insert(&mut self, key: &Key, _expiry: u64) -> Fallible<bool> {
        if let Some(front) = self.bytes.first_chunk_mut::<16>() {
            *front = *key;
        }
        self.store.write(&self.bytes)?;
        Ok(true)
    }

    fn insert_many(&mut self, keys: &[Key], _expiry: u64, fresh: &mut Vec<bool>) -> Fallible<()> {
        let batch: Vec<u8> = keys
            .iter()
            .flat_map(|key| [*key, *key, *key, *key])
            .flatten()
            .collect();
        self.store.write(&batch)?;
        fresh.extend(keys.iter().map(|_| true));
        Ok(())
    }

    fn contains(&mut self, _key: &Key) -> Fallible<bool> {
        Err("a bare write answers nothing".into())
    }
}
