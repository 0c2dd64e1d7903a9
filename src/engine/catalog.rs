//! The manifest on disk: replaced as a whole, never half.
//!
//! Safety properties:
//! A. The file named MANIFEST is always a complete manifest: the new one is written and synced
//!    under another name, renamed, and the directory is synced.
//! B. Memory and disk agree: an edit that fails before the rename, or because the rename is
//!    denied, leaves both as they were; one that fails after it poisons, because nobody knows which
//!    of the two a power cut would leave.
//! C. A full disk does not wedge the store: ballast is given up once, and made again later.

use std::io;
use std::sync::Arc;

use crate::error::{Error, Result, is_out_of_space};
use crate::format::manifest::Manifest;
use crate::format::names::FileName;
use crate::vfs::{Access, Dir, File};

/// Size of the ballast: room for a manifest of 1,500 segments.
const RESERVE_BYTES: u64 = 64 * 1024;

/// The manifest in force, and how it is replaced.
#[derive(Debug)]
pub(crate) struct Catalog {
    dir: Arc<dyn Dir>,
    manifest: Manifest,
}

/// A failed edit.
#[derive(Debug)]
pub(crate) struct EditError {
    pub(crate) error: Error,
    /// The rename may have happened: poison (B).
    pub(crate) uncertain: bool,
}

impl Catalog {
    pub(crate) fn new(dir: Arc<dyn Dir>, manifest: Manifest) -> Self {
        Catalog { dir, manifest }
    }

    pub(crate) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Reads the manifest again: another process may have replaced it.
    pub(crate) fn reload(&mut self) -> Result<()> {
        if let Some(manifest) = read_manifest(self.dir.as_ref())? {
            self.manifest = manifest;
        }
        Ok(())
    }

    /// Changes the manifest and makes the change durable.
    pub(crate) fn edit(
        &mut self,
        change: impl FnOnce(&mut Manifest),
    ) -> std::result::Result<(), EditError> {
        let mut next = self.manifest.clone();
        change(&mut next);
        next.edit += 1;
        let bytes = next.encode();
        let name = FileName::ManifestNew.to_string();
        let failed = |source: io::Error, what: &str, uncertain: bool| EditError {
            error: Error::io(what, source).in_file(name.clone()),
            uncertain,
        };
        if let Err(first) = self.write_new(&bytes) {
            if !is_out_of_space(&first) || !self.give_up_reserve() {
                return Err(failed(
                    first,
                    "writing the manifest failed; it is unchanged",
                    false,
                ));
            }
            self.write_new(&bytes)
                .map_err(|e| failed(e, "writing the manifest failed; it is unchanged", false))?;
        }
        let target = FileName::Manifest.to_string();
        self.dir.rename(&name, &target).map_err(|e| {
            // Who has no right to rename has not renamed; any other failure may have come later.
            let uncertain = e.kind() != io::ErrorKind::PermissionDenied;
            failed(e, "renaming the manifest failed", uncertain)
        })?;
        self.dir
            .sync()
            .map_err(|e| failed(e, "syncing the directory failed", true))?;
        self.manifest = next;
        Ok(())
    }

    fn write_new(&self, bytes: &[u8]) -> io::Result<()> {
        let name = FileName::ManifestNew.to_string();
        remove_if_there(self.dir.as_ref(), &name)?;
        let file = self.dir.open(&name, Access::Create)?;
        let written = file.write_at(bytes, 0).and_then(|()| file.sync());
        if written.is_err() {
            remove_if_there(self.dir.as_ref(), &name).unwrap_or_default();
        }
        written
    }

    /// Removes the ballast; `false` if there was none.
    fn give_up_reserve(&self) -> bool {
        let name = FileName::Reserve.to_string();
        self.dir.unlink(&name).is_ok() && self.dir.sync().is_ok()
    }

    /// Makes the ballast if it is missing. Failure is of no consequence: the disk is full now.
    /// A store of one segment needs none.
    pub(crate) fn keep_reserve(&self) {
        if self.manifest.segments.len() < 2 {
            return;
        }
        let name = FileName::Reserve.to_string();
        let make = |file: &dyn File| {
            // Asked first: a part may stay reserved of what does not fit.
            if file.free_space()? < RESERVE_BYTES {
                return Err(io::ErrorKind::StorageFull.into());
            }
            file.set_len(RESERVE_BYTES)?;
            file.allocate(0, RESERVE_BYTES)
        };
        if let Ok(file) = self.dir.open(&name, Access::Create)
            && make(file.as_ref()).is_err()
        {
            self.dir.unlink(&name).unwrap_or_default();
        }
    }
}

/// Removes a file; a missing one is fine.
pub(crate) fn remove_if_there(dir: &dyn Dir, name: &str) -> io::Result<()> {
    match dir.unlink(name) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl From<EditError> for Error {
    fn from(failed: EditError) -> Error {
        failed.error
    }
}

/// Reads the manifest file.
pub(crate) fn read_manifest(dir: &dyn Dir) -> Result<Option<Manifest>> {
    use crate::error::ErrorKind;
    use crate::format::manifest::{MANIFEST_BYTES_MAX, ManifestError};
    let name = FileName::Manifest.to_string();
    let file = match dir.open(&name, Access::Read) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("opening the manifest failed", error).in_file(name)),
    };
    let bytes = crate::vfs::read_all(file.as_ref(), MANIFEST_BYTES_MAX)
        .map_err(|e| Error::io("reading the manifest failed", e).in_file(name.clone()))?;
    match Manifest::decode(&bytes) {
        Ok(manifest) => Ok(Some(manifest)),
        Err(ManifestError::Format(found)) => Err(Error::new(
            ErrorKind::Incompatible,
            format!(
                "store has another format: found={found} readable={}; use a version that reads it",
                crate::format::FORMAT
            ),
        )
        .in_file(name)),
        Err(ManifestError::Malformed(why)) => Err(Error::damaged(
            name,
            0,
            format!("manifest is damaged: {}; nothing was changed", why.0),
        )),
    }
}
