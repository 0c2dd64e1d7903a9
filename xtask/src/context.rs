//! What a layer is given, and what it gives back.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::args::Run;

pub(crate) type Fallible<T> = Result<T, Box<dyn Error + Send + Sync>>;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Small: part of what is checked for every change.
    Ci,
    /// The long run.
    Full,
}

impl Mode {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Mode::Ci => "ci",
            Mode::Full => "full",
        }
    }
}

/// What a layer runs with.
pub(crate) struct Context {
    pub(crate) mode: Mode,
    /// Everything random comes from here.
    pub(crate) seed: u64,
    /// The repository.
    pub(crate) root: PathBuf,
    /// An empty directory, removed afterwards. In memory where the machine allows.
    scratch: tempfile::TempDir,
    /// When a layer that can choose stops, if it was told.
    pub(crate) deadline: Option<Instant>,
    /// How many states, trials or cases, if it was told.
    pub(crate) count: Option<u64>,
    /// Run the workload that must fail, and fail if it does not.
    pub(crate) sanity: bool,
    /// Write what was measured as the new bounds.
    pub(crate) update: bool,
    /// Only this file system, if it was told.
    pub(crate) file_system: Option<String>,
}

impl Context {
    pub(crate) fn new(run: &Run) -> Fallible<Self> {
        let shared = Path::new("/dev/shm");
        let parent = if shared.is_dir() {
            shared.to_owned()
        } else {
            std::env::temp_dir()
        };
        Ok(Context {
            mode: run.mode,
            seed: run.seed,
            root: repository_root(),
            scratch: tempfile::Builder::new()
                .prefix("idemlog-rel-")
                .tempdir_in(parent)?,
            deadline: run.budget.map(|budget: Duration| Instant::now() + budget),
            count: run.count,
            sanity: run.sanity,
            update: run.update,
            file_system: run.file_system.clone(),
        })
    }

    pub(crate) fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    /// The count that was asked for, or the layer's own for this mode.
    pub(crate) fn count(&self, ci: u64, full: u64) -> u64 {
        self.count.unwrap_or(match self.mode {
            Mode::Ci => ci,
            Mode::Full => full,
        })
    }

    /// Says whether the time budget is used up.
    pub(crate) fn is_over(&self) -> bool {
        self.deadline
            .is_some_and(|deadline| Instant::now() >= deadline)
    }
}

/// What was counted: how many checks held, how many did not, and what else is worth a number.
#[derive(Clone, Default)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) more: BTreeMap<String, u64>,
}

impl Counts {
    /// Adds to one of the further numbers.
    pub(crate) fn add(&mut self, name: &str, count: u64) {
        *self.more.entry(name.to_owned()).or_default() += count;
    }

    pub(crate) fn check(&mut self, holds: bool) {
        if holds {
            self.passed += 1;
        } else {
            self.failed += 1;
        }
    }
}

pub(crate) enum Outcome {
    Passed(Counts),
    Failed { counts: Counts, what: String },
    Skipped { reason: String },
}

impl Outcome {
    /// Passed if nothing failed and something was checked; otherwise failed with this.
    pub(crate) fn judge(counts: Counts, what: impl Into<String>) -> Self {
        let what = what.into();
        if counts.failed > 0 {
            Outcome::Failed { counts, what }
        } else if counts.passed == 0 {
            let what = format!("nothing was checked; {what}");
            Outcome::Failed { counts, what }
        } else {
            Outcome::Passed(counts)
        }
    }

    pub(crate) fn skipped(reason: impl Into<String>) -> Self {
        Outcome::Skipped {
            reason: reason.into(),
        }
    }

    /// The layer itself could not run to its end: that is a failure, too.
    pub(crate) fn broken(error: &(dyn Error + Send + Sync)) -> Self {
        Outcome::Failed {
            counts: Counts {
                failed: 1,
                ..Counts::default()
            },
            what: format!("the rig broke: {error}"),
        }
    }

    /// The one line that a run ends with.
    pub(crate) fn line(&self, layer: &str) -> String {
        let (counts, what) = match self {
            Outcome::Passed(counts) => (counts, ""),
            Outcome::Failed { counts, what } => (counts, what.as_str()),
            Outcome::Skipped { reason } => return format!("SKIPPED {layer}: {reason}"),
        };
        let mut line = format!(
            "LAYER {layer}: {} passed, {} failed",
            counts.passed, counts.failed
        );
        for (name, count) in &counts.more {
            write!(line, ", {name} {count}").unwrap_or_default();
        }
        if !what.is_empty() {
            write!(line, "\n  {what}").unwrap_or_default();
        }
        line
    }
}

pub(crate) fn repository_root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}
