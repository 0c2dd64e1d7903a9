//! A disk whose flushes wait at a gate, to see what else goes on meanwhile.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use idemlog::testing::{Access, Dir, File, LockAttempt, Map};

/// Whether flushes may pass, and how many have come.
#[derive(Debug, Default)]
pub struct Gate {
    closed: Mutex<bool>,
    opened: Condvar,
    /// Flushes that have come to the gate.
    pub arrived: AtomicUsize,
    /// Flushes that have returned.
    pub passed: AtomicUsize,
}

impl Gate {
    pub fn close(&self) {
        *self.closed.lock().unwrap() = true;
    }

    pub fn open(&self) {
        *self.closed.lock().unwrap() = false;
        self.opened.notify_all();
    }

    pub fn pass(&self) {
        self.arrived.fetch_add(1, Ordering::SeqCst);
        let closed = self.closed.lock().unwrap();
        drop(self.opened.wait_while(closed, |closed| *closed).unwrap());
    }
}

/// Opens the gate also when a test fails before it does: nobody is left waiting.
pub struct OpenAtEnd<'a>(pub &'a Gate);

impl Drop for OpenAtEnd<'_> {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// A directory whose files' flushes wait at the gate.
#[derive(Debug)]
pub struct GatedDir {
    pub dir: Arc<dyn Dir>,
    pub gate: Arc<Gate>,
}

#[derive(Debug)]
struct GatedFile {
    file: Arc<dyn File>,
    gate: Arc<Gate>,
}

impl Dir for GatedDir {
    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn File>> {
        let file = self.dir.open(name, access)?;
        // Only the log: what else the store writes goes on.
        if !name.ends_with(".log") {
            return Ok(file);
        }
        let gate = Arc::clone(&self.gate);
        Ok(Arc::new(GatedFile { file, gate }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.dir.rename(from, to)
    }

    fn unlink(&self, name: &str) -> io::Result<()> {
        self.dir.unlink(name)
    }

    fn sync(&self) -> io::Result<()> {
        self.dir.sync()
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.dir.list()
    }

    fn lock(&self, name: &str, create: bool, note: &str) -> io::Result<LockAttempt> {
        self.dir.lock(name, create, note)
    }
}

impl File for GatedFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_at(buf, offset)
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.file.set_len(bytes)
    }

    fn allocated(&self) -> io::Result<u64> {
        self.file.allocated()
    }

    fn free_space(&self) -> io::Result<u64> {
        self.file.free_space()
    }

    fn allocate(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.file.allocate(offset, bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.gate.pass();
        let synced = self.file.sync();
        self.gate.passed.fetch_add(1, Ordering::SeqCst);
        synced
    }

    fn holds(&self, bytes: &[u8], offset: u64) -> io::Result<Option<bool>> {
        self.file.holds(bytes, offset)
    }

    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    fn map(&self) -> io::Result<Map> {
        self.file.map()
    }
}
