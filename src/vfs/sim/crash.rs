//! Crashes at every step of a scenario.

use std::collections::HashSet;
use std::fmt;

use super::power::PowerCuts;
use super::rng::Rng;
use super::{PowerCut, SimDisk};

/// How much [`for_each_crash_point`] tries, and where it starts.
#[derive(Clone, Debug)]
pub struct CrashOptions {
    /// The disk that the scenario starts from; it is not changed.
    pub base: SimDisk,
    /// Where all random choices come from.
    pub seed: u64,
    /// All outcomes of a power cut are tried if there are at most this many (default 64).
    pub outcomes_max: u64,
    /// Otherwise this many random ones, besides "all lost" and "all kept" (default 4).
    pub seeded_count: u32,
    /// Random outcomes in which lost sectors may show old bytes (default 0).
    pub recycled_count: u32,
    /// Deaths inside each write, at random places (default 2).
    pub inside_count: u32,
}

impl Default for CrashOptions {
    fn default() -> CrashOptions {
        CrashOptions {
            base: SimDisk::new(),
            seed: 1,
            outcomes_max: 64,
            seeded_count: 4,
            recycled_count: 0,
            inside_count: 2,
        }
    }
}

/// What happened to the disk at a crash point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CrashKind {
    /// The process died before the step.
    Kill,
    /// The process died inside the step, a write, of which a prefix is in the cache.
    KillInside {
        /// The bytes of the prefix.
        kept_bytes: usize,
    },
    /// Power was lost and all unsynced changes with it.
    DropAll,
    /// Power was lost but all unsynced changes were kept.
    KeepAll,
    /// Power was lost; one of all possible outcomes.
    Outcome {
        /// The place in [`SimDisk::after_power_cut_exhaustive`].
        index: usize,
    },
    /// Power was lost; a random outcome, see [`PowerCut::seeded`].
    Seeded {
        /// The seed of the power cut.
        seed: u64,
    },
    /// Power was lost; a random outcome with old bytes, see [`PowerCut::recycled`].
    Recycled {
        /// The seed of the power cut.
        seed: u64,
    },
}

/// One disk to check. `Display` prints what [`CrashOptions::replay`] needs to make it again.
#[derive(Clone, Debug)]
pub struct CrashState {
    /// The first step that did not happen.
    pub step: u64,
    /// The step's line in the log; empty after the last step.
    pub doing: String,
    /// What happened to the disk.
    pub kind: CrashKind,
    /// The seed in the options.
    pub seed: u64,
    /// The disk that the next process finds.
    pub disk: SimDisk,
}

impl fmt::Display for CrashState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CrashState {
            step,
            doing,
            kind,
            seed,
            ..
        } = self;
        write!(
            f,
            "crash seed={seed} step={step} doing=\"{doing}\" kind={kind:?}"
        )
    }
}

/// What [`for_each_crash_point`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CrashTotals {
    /// Steps of the whole scenario.
    pub steps: u64,
    /// Disks made.
    pub states: u64,
    /// Disks checked: those that differ from all others of the same step.
    pub checked: u64,
    /// Distinct images (names and contents) among all disks.
    pub distinct: u64,
}

/// Runs a scenario once for every step it has, lets the process die or the power fail there, and
/// hands every resulting disk to `check`.
///
/// The scenario starts from `options.base`, has to take the same steps each time, and must
/// tolerate the errors of a dead process. What it was promised before the end it can leave in a
/// cell for the check: checks for a step follow directly after the scenario's run up to that
/// step. Disks that equal one already checked *at the same step* are not checked again; equal
/// disks at different steps are, because more may have been promised meanwhile.
///
/// A check that panics leaves a line on stderr that says which disk it was.
pub fn for_each_crash_point(
    options: &CrashOptions,
    scenario: impl Fn(&SimDisk),
    mut check: impl FnMut(CrashState),
) -> CrashTotals {
    let whole = options.base.after_kill();
    scenario(&whole);
    let mut totals = CrashTotals {
        steps: whole.steps(),
        ..CrashTotals::default()
    };
    drop(whole);
    let mut images = HashSet::new();
    for step in 0..=totals.steps {
        let killed = options.run_until(step, 0, &scenario);
        let death = killed.state().death.clone();
        let doing = death
            .as_ref()
            .map_or(String::new(), |death| death.what.clone());
        let mut seen = HashSet::new();
        let mut visit = |kind, disk: SimDisk| {
            totals.states += 1;
            images.insert(disk.image_hash());
            if seen.insert(disk.state().state_hash()) {
                totals.checked += 1;
                let doing = doing.clone();
                let state = CrashState {
                    step,
                    doing,
                    kind,
                    seed: options.seed,
                    disk,
                };
                let _guard = Announce(state.to_string());
                check(state);
            }
        };
        options.power_cuts(step, &killed, &mut visit);
        let bytes = death.map_or(0, |death| death.bytes);
        for kept_bytes in options.prefixes(step, bytes) {
            let killed = options.run_until(step, kept_bytes, &scenario);
            visit(CrashKind::KillInside { kept_bytes }, killed.after_kill());
        }
    }
    totals.distinct = images.len() as u64;
    totals
}

impl CrashOptions {
    /// Makes one disk again, as printed by [`CrashState`].
    pub fn replay(&self, step: u64, kind: CrashKind, scenario: impl Fn(&SimDisk)) -> SimDisk {
        let kept_bytes = if let CrashKind::KillInside { kept_bytes } = kind {
            kept_bytes
        } else {
            0
        };
        let killed = self.run_until(step, kept_bytes, &scenario);
        match kind {
            CrashKind::Kill | CrashKind::KillInside { .. } => killed.after_kill(),
            CrashKind::DropAll => killed.after_power_cut(&mut PowerCut::drop_all()),
            CrashKind::KeepAll => killed.after_power_cut(&mut PowerCut::keep_all()),
            CrashKind::Seeded { seed } => killed.after_power_cut(&mut PowerCut::seeded(seed)),
            CrashKind::Recycled { seed } => killed.after_power_cut(&mut PowerCut::recycled(seed)),
            CrashKind::Outcome { index } => {
                let mut outcomes = killed.after_power_cut_exhaustive(self.outcomes_max);
                outcomes.nth(index).unwrap_or_else(|| killed.after_kill())
            }
        }
    }

    fn run_until(&self, step: u64, kept_bytes: usize, scenario: impl Fn(&SimDisk)) -> SimDisk {
        let disk = self.base.after_kill();
        disk.stop_inside(step, kept_bytes);
        scenario(&disk);
        disk
    }

    /// Visits a killed process's disk and the disks after a power cut at the same moment.
    fn power_cuts(&self, step: u64, killed: &SimDisk, visit: &mut impl FnMut(CrashKind, SimDisk)) {
        visit(CrashKind::Kill, killed.after_kill());
        visit(
            CrashKind::DropAll,
            killed.after_power_cut(&mut PowerCut::drop_all()),
        );
        visit(
            CrashKind::KeepAll,
            killed.after_power_cut(&mut PowerCut::keep_all()),
        );
        let mut rng = self.rng(step);
        let outcomes = PowerCuts::new(killed.state().restarted(), self.outcomes_max, 0);
        if outcomes.is_exhaustive() {
            for (index, disk) in outcomes.enumerate() {
                visit(CrashKind::Outcome { index }, disk);
            }
        } else {
            for _ in 0..self.seeded_count {
                let seed = rng.next_u64();
                let disk = killed.after_power_cut(&mut PowerCut::seeded(seed));
                visit(CrashKind::Seeded { seed }, disk);
            }
        }
        for _ in 0..self.recycled_count {
            let seed = rng.next_u64();
            let disk = killed.after_power_cut(&mut PowerCut::recycled(seed));
            visit(CrashKind::Recycled { seed }, disk);
        }
    }

    /// Chooses where inside a write to die: after 1 to `bytes - 1` bytes.
    fn prefixes(&self, step: u64, bytes: usize) -> Vec<usize> {
        let mut rng = self.rng(!step);
        let inner = bytes.saturating_sub(1);
        let count = usize::try_from(self.inside_count).unwrap_or(usize::MAX);
        if inner <= count {
            return (1..=inner).collect();
        }
        (0..count).map(|_| 1 + rng.below(inner)).collect()
    }

    fn rng(&self, stream: u64) -> Rng {
        Rng::new(self.seed ^ Rng::new(stream).next_u64())
    }
}

/// Says on stderr which disk a panicking check was looking at.
struct Announce(String);

impl Drop for Announce {
    fn drop(&mut self) {
        if std::thread::panicking() {
            #[expect(clippy::print_stderr, reason = "the only way to tell beside the panic")]
            {
                eprintln!("{}", self.0);
            }
        }
    }
}
