//! Crashes at every step of a scenario.

use std::collections::HashSet;
use std::fmt;

use super::power::PowerCuts;
use super::rng::Rng;
use super::state::Death;
use super::{PowerCut, SimDisk};

/// How much [`for_each_crash_point`] tries, and where it starts.
#[derive(Clone, Debug)]
pub struct CrashOptions {
    /// The disk that the scenario starts from; it is not changed.
    pub base: SimDisk,
    /// Where all random choices come from.
    pub seed: u64,
    /// The first step to crash at (default 0).
    pub first_step: u64,
    /// All outcomes of a power cut are tried if there are at most this many (default 64).
    pub outcomes_max: u64,
    /// Otherwise this many random ones, besides "all lost" and "all kept" (default 4).
    pub seeded_count: u32,
    /// Random outcomes in which lost sectors may show old bytes (default 0).
    pub recycled_count: u32,
    /// Deaths inside each write, at random places (default 2).
    pub inside_count: u32,
    /// Random outcomes are added, evenly over all steps, until there are this many distinct
    /// images or hardly any new ones turn up (default 0). Of those that are added only new images
    /// are checked.
    pub images_min: u64,
}

impl Default for CrashOptions {
    fn default() -> CrashOptions {
        CrashOptions {
            base: SimDisk::seeded(1),
            seed: 1,
            first_step: 0,
            outcomes_max: 64,
            seeded_count: 4,
            recycled_count: 0,
            inside_count: 2,
            images_min: 0,
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
    /// The disk's [`SimDisk::image_hash`].
    pub image: u64,
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

/// How often [`CrashOptions::images_min`] goes over all steps for more images, at most.
const ROUNDS_MAX: u64 = 64;

/// So many outcomes for one new image end the search: at a step, and as a whole.
const MISSES_MAX: u64 = 24;

/// Runs a scenario once for every step it has, lets the process die or the power fail there, and
/// hands every resulting disk to `check`.
///
/// The scenario starts from `options.base`, has to take the same steps each time, and must
/// tolerate the errors of a dead process. What it was promised before the end it can leave in a
/// cell for the check: checks for a step follow directly after the scenario's run up to that
/// step. Disks that equal one already checked *at the same step* are not checked again; equal
/// disks at different steps are, because more may have been promised meanwhile.
///
/// A check that panics leaves a line on stderr that says which disk it was; see
/// [`CrashOptions::replay`].
pub fn for_each_crash_point(
    options: &CrashOptions,
    scenario: impl Fn(&SimDisk),
    check: impl FnMut(CrashState),
) -> CrashTotals {
    let whole = options.base.after_kill();
    scenario(&whole);
    let steps = whole.steps();
    drop(whole);
    let mut visitor = Visitor {
        seed: options.seed,
        check,
        images: HashSet::new(),
        seen: HashSet::new(),
        totals: CrashTotals {
            steps,
            ..CrashTotals::default()
        },
    };
    let all = options.first_step..=steps;
    for step in all.clone() {
        let killed = options.run_until(step, &scenario);
        options.visit_all(step, &killed, &mut visitor);
    }
    for round in 0..ROUNDS_MAX {
        let before = visitor.images.len() as u64;
        let states = visitor.totals.states;
        let missing = options.images_min.saturating_sub(before);
        // Some steps have few outcomes: the others are asked for more than their share.
        let count = (steps + 1).saturating_sub(options.first_step).max(1);
        let share = missing.div_ceil(count).saturating_mul(2);
        for step in all.clone() {
            if visitor.images.len() as u64 >= options.images_min {
                return visitor.totals();
            }
            options.visit_more(step, round, share, &scenario, &mut visitor);
        }
        if (visitor.images.len() as u64 - before) * MISSES_MAX <= visitor.totals.states - states {
            break;
        }
    }
    visitor.totals()
}

/// Hands disks to the check, but none twice at the same step.
struct Visitor<C> {
    seed: u64,
    check: C,
    images: HashSet<u64>,
    /// Steps and disks with all that a power cut could bring to light.
    seen: HashSet<(u64, u64)>,
    totals: CrashTotals,
}

impl<C: FnMut(CrashState)> Visitor<C> {
    /// Returns whether the image is new. An image that is not is checked all the same, if it is
    /// new `at_step`.
    fn visit(
        &mut self,
        (step, killed): (u64, &SimDisk),
        kind: CrashKind,
        disk: SimDisk,
        at_step: bool,
    ) -> bool {
        let (image, whole) = disk.state().hashes();
        self.totals.states += 1;
        let is_new = self.images.insert(image);
        if self.seen.insert((step, whole)) && (is_new || at_step) {
            self.totals.checked += 1;
            let state = CrashState {
                step,
                doing: killed.died_doing().unwrap_or_default(),
                kind,
                seed: self.seed,
                image,
                disk,
            };
            let _guard = Announce(state.to_string());
            (self.check)(state);
        }
        is_new
    }

    fn totals(mut self) -> CrashTotals {
        self.totals.distinct = self.images.len() as u64;
        self.totals
    }
}

impl CrashOptions {
    /// Makes one disk again, as printed by [`CrashState`].
    pub fn replay(&self, step: u64, kind: CrashKind, scenario: impl Fn(&SimDisk)) -> SimDisk {
        let killed = self.run_until(step, &scenario);
        match kind {
            CrashKind::Kill => killed.after_kill(),
            CrashKind::KillInside { kept_bytes } => killed.after_kill_inside(kept_bytes),
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

    fn run_until(&self, step: u64, scenario: impl Fn(&SimDisk)) -> SimDisk {
        let disk = self.base.after_kill();
        disk.stop_at(step);
        scenario(&disk);
        disk
    }

    /// Visits a killed process's disk and the disks after a power cut at the same moment.
    fn visit_all<C: FnMut(CrashState)>(
        &self,
        step: u64,
        killed: &SimDisk,
        visitor: &mut Visitor<C>,
    ) {
        let mut visit = |kind, disk| visitor.visit((step, killed), kind, disk, true);
        visit(CrashKind::Kill, killed.after_kill());
        let cut = |mut cut| killed.after_power_cut(&mut cut);
        visit(CrashKind::DropAll, cut(PowerCut::drop_all()));
        visit(CrashKind::KeepAll, cut(PowerCut::keep_all()));
        let mut rng = self.rng(step);
        let outcomes = PowerCuts::new(killed.state().restarted(), self.outcomes_max, 0);
        if outcomes.is_exhaustive() {
            for (index, disk) in outcomes.enumerate() {
                visit(CrashKind::Outcome { index }, disk);
            }
        } else {
            for _ in 0..self.seeded_count {
                let seed = rng.next_u64();
                visit(CrashKind::Seeded { seed }, cut(PowerCut::seeded(seed)));
            }
        }
        for _ in 0..self.recycled_count {
            let seed = rng.next_u64();
            visit(CrashKind::Recycled { seed }, cut(PowerCut::recycled(seed)));
        }
        let bytes = killed.state().death.as_ref().map_or(0, Death::bytes);
        for kept_bytes in self.prefixes(step, bytes) {
            let disk = killed.after_kill_inside(kept_bytes);
            visit(CrashKind::KillInside { kept_bytes }, disk);
        }
    }

    /// Visits random disks of one step until `share` of them were new images, or until none is.
    fn visit_more<C: FnMut(CrashState)>(
        &self,
        step: u64,
        round: u64,
        share: u64,
        scenario: impl Fn(&SimDisk),
        visitor: &mut Visitor<C>,
    ) {
        let killed = self.run_until(step, scenario);
        let bytes = killed.state().death.as_ref().map_or(0, Death::bytes);
        let mut rng = self.rng(step ^ (round + 1) << 32);
        let (mut found, mut misses) = (0, 0);
        for turn in 0_u64.. {
            if found >= share || misses >= MISSES_MAX {
                return;
            }
            let seed = rng.next_u64();
            let (kind, disk) = match turn % 4 {
                0 if bytes > 1 => {
                    let kept_bytes = 1 + rng.below(bytes - 1);
                    let disk = killed.after_kill_inside(kept_bytes);
                    (CrashKind::KillInside { kept_bytes }, disk)
                }
                1 if self.recycled_count > 0 => {
                    let disk = killed.after_power_cut(&mut PowerCut::recycled(seed));
                    (CrashKind::Recycled { seed }, disk)
                }
                _ => {
                    let disk = killed.after_power_cut(&mut PowerCut::seeded(seed));
                    (CrashKind::Seeded { seed }, disk)
                }
            };
            if visitor.visit((step, &killed), kind, disk, false) {
                found += 1;
                misses = 0;
            } else {
                misses += 1;
            }
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
