//! A directory with hooks, for errors that a simulated disk does not know, for delays, and for
//! what others do in between.

use std::io;
use std::sync::Arc;

use idemlog::testing::sim::Op;
use idemlog::testing::{Access, Dir, File, LockAttempt, LockFile, LockMode, Map};

/// Asked before each call that changes a directory; an error is given in place of the call.
type Hook = Arc<dyn Fn(Op, &str) -> io::Result<()> + Send + Sync>;

/// Told of each try to take the lock of a file that is locked again and again, and what came of it.
type LockHook = Arc<dyn Fn(&str, LockMode, bool) + Send + Sync>;

/// Changes what [`File::holds`] answers.
type HoldsHook = Arc<dyn Fn(Option<bool>) -> io::Result<Option<bool>> + Send + Sync>;

/// Told of each read before it is done: of which file, and how many bytes.
type ReadHook = Arc<dyn Fn(&str, usize) + Send + Sync>;

/// A directory with hooks.
#[derive(Clone)]
pub struct Rigged {
    inner: Arc<dyn Dir>,
    hook: Hook,
    reading: ReadHook,
    locked: LockHook,
    holds: HoldsHook,
}

impl Rigged {
    pub fn new(
        inner: Arc<dyn Dir>,
        hook: impl Fn(Op, &str) -> io::Result<()> + Send + Sync + 'static,
    ) -> Rigged {
        Rigged {
            inner,
            hook: Arc::new(hook),
            reading: Arc::new(|_, _| ()),
            locked: Arc::new(|_, _, _| ()),
            holds: Arc::new(Ok),
        }
    }

    pub fn on_read(mut self, told: impl Fn(&str, usize) + Send + Sync + 'static) -> Self {
        self.reading = Arc::new(told);
        self
    }

    pub fn on_lock(mut self, told: impl Fn(&str, LockMode, bool) + Send + Sync + 'static) -> Self {
        self.locked = Arc::new(told);
        self
    }

    pub fn on_holds(
        mut self,
        answer: impl Fn(Option<bool>) -> io::Result<Option<bool>> + Send + Sync + 'static,
    ) -> Self {
        self.holds = Arc::new(answer);
        self
    }

    pub fn dir(self) -> Arc<dyn Dir> {
        Arc::new(self)
    }
}

pub fn rigged(
    inner: Arc<dyn Dir>,
    hook: impl Fn(Op, &str) -> io::Result<()> + Send + Sync + 'static,
) -> Arc<dyn Dir> {
    Rigged::new(inner, hook).dir()
}

impl std::fmt::Debug for Rigged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inner.fmt(f)
    }
}

impl Dir for Rigged {
    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn File>> {
        if access == Access::Create {
            (self.hook)(Op::Create, name)?;
        }
        Ok(Arc::new(RiggedFile {
            inner: self.inner.open(name, access)?,
            name: name.to_owned(),
            hook: Arc::clone(&self.hook),
            reading: Arc::clone(&self.reading),
            holds: Arc::clone(&self.holds),
        }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        (self.hook)(Op::Rename, from)?;
        self.inner.rename(from, to)
    }

    fn unlink(&self, name: &str) -> io::Result<()> {
        // A missing file is missing for everybody.
        if self.inner.list()?.iter().any(|found| found == name) {
            (self.hook)(Op::Unlink, name)?;
        }
        self.inner.unlink(name)
    }

    fn sync(&self) -> io::Result<()> {
        (self.hook)(Op::DirSync, "")?;
        self.inner.sync()
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.inner.list()
    }

    fn lock(&self, name: &str, create: bool, note: &str) -> io::Result<LockAttempt> {
        self.inner.lock(name, create, note)
    }

    fn lock_file(&self, name: &str, access: Access) -> io::Result<Arc<dyn LockFile>> {
        Ok(Arc::new(RiggedLock {
            inner: self.inner.lock_file(name, access)?,
            name: name.to_owned(),
            locked: Arc::clone(&self.locked),
        }))
    }
}

struct RiggedLock {
    inner: Arc<dyn LockFile>,
    name: String,
    locked: LockHook,
}

impl std::fmt::Debug for RiggedLock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inner.fmt(f)
    }
}

impl LockFile for RiggedLock {
    fn try_lock(&self, mode: LockMode) -> io::Result<bool> {
        let is_locked = self.inner.try_lock(mode)?;
        (self.locked)(&self.name, mode, is_locked);
        Ok(is_locked)
    }

    fn unlock(&self) -> io::Result<()> {
        self.inner.unlock()
    }

    fn is_in_place(&self) -> io::Result<bool> {
        self.inner.is_in_place()
    }
}

struct RiggedFile {
    inner: Arc<dyn File>,
    name: String,
    hook: Hook,
    reading: ReadHook,
    holds: HoldsHook,
}

impl std::fmt::Debug for RiggedFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inner.fmt(f)
    }
}

impl File for RiggedFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        (self.reading)(&self.name, buf.len());
        self.inner.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        (self.hook)(Op::Write, &self.name)?;
        self.inner.write_at(buf, offset)
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        (self.hook)(Op::SetLen, &self.name)?;
        self.inner.set_len(bytes)
    }

    fn allocated(&self) -> io::Result<u64> {
        self.inner.allocated()
    }

    fn free_space(&self) -> io::Result<u64> {
        self.inner.free_space()
    }

    fn allocate(&self, offset: u64, bytes: u64) -> io::Result<()> {
        (self.hook)(Op::Allocate, &self.name)?;
        self.inner.allocate(offset, bytes)
    }

    fn sync(&self) -> io::Result<()> {
        (self.hook)(Op::Sync, &self.name)?;
        self.inner.sync()
    }

    fn holds(&self, bytes: &[u8], offset: u64) -> io::Result<Option<bool>> {
        (self.holds)(self.inner.holds(bytes, offset)?)
    }

    fn size(&self) -> io::Result<u64> {
        self.inner.size()
    }

    fn map(&self) -> io::Result<Map> {
        self.inner.map()
    }
}
