//! The directory that a benchmark works in: new, and gone afterwards however the program ends.
//!
//! A second process waits until the first one is over, which it sees by the end of a pipe, and
//! removes what is left: also after Ctrl-C, or a kill that no program can catch. It is in a process
//! group of its own, so that the terminal's signal does not reach it.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};

use crate::child::own_program;
use crate::exit::{Code, Stop, say};

/// The hidden word: `idemlog __remove DIR`.
pub(crate) const REMOVE_WORD: &str = "__remove";
/// How the names of such directories begin; no others are removed.
const NAME_START: &str = "idemlog-bench-";
/// The file by which a directory is a store.
const MANIFEST: &str = "MANIFEST";

/// A new directory, and the process that removes it.
#[derive(Debug)]
pub(crate) struct Place {
    path: PathBuf,
    remover: Option<Child>,
}

impl Place {
    /// Makes a directory that nobody has used.
    pub(crate) fn new_in(parent: &Path) -> Result<Place, Stop> {
        if parent.join(MANIFEST).exists() {
            return Err(Stop::usage(format!(
                "dir={} is a store, which bench does not touch; use another --dir",
                parent.display()
            )));
        }
        let failed = |error: &io::Error| {
            let what = format!("no directory can be made in dir={}", parent.display());
            Stop::io(&what, error)
        };
        let path = make_in(parent).map_err(|e| failed(&e))?;
        let mut place = Place {
            path,
            remover: None,
        };
        let remover = Command::new(own_program().map_err(|e| failed(&e))?)
            .arg(REMOVE_WORD)
            .arg(&place.path)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        place.remover = Some(remover.map_err(|e| failed(&e))?);
        Ok(place)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the directory with everything in it.
    pub(crate) fn remove(mut self) -> Result<(), Stop> {
        let removed = remove(&self.path);
        self.end_remover();
        removed.map_err(|e| Stop::io(&format!("{} is left behind", self.path.display()), &e))
    }

    fn end_remover(&mut self) {
        if let Some(mut remover) = self.remover.take() {
            // `wait` closes the pipe first, which ends it.
            drop(remover.wait());
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // An error is on its way already, or `remove` has told.
        drop(remove(&self.path));
        self.end_remover();
    }
}

fn make_in(parent: &Path) -> io::Result<PathBuf> {
    // Absolute: the other process need not care where it is.
    let parent = parent.canonicalize()?;
    let mut number = 0u32;
    loop {
        let path = parent.join(format!("{NAME_START}{}-{number}", std::process::id()));
        match fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            // Left by a process of the same number: not ours.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            Err(error) => return Err(error),
        }
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Waits for the end of the process at the other end of stdin, and removes its directory.
pub(crate) fn remove_when_over(words: &[OsString]) -> ExitCode {
    let path = words.first().map(Path::new);
    let is_ours = |path: &&Path| {
        let name = path.file_name().unwrap_or_default();
        name.to_string_lossy().starts_with(NAME_START)
    };
    let Some(path) = path.filter(is_ours) else {
        say("idemlog: the hidden word is used by bench only");
        return ExitCode::from(Code::Usage as u8);
    };
    // Nothing is ever written: a read ends when the other end is closed.
    drop(io::stdin().read_to_end(&mut Vec::new()));
    match remove(path) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
