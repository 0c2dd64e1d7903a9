//! Kills, power cuts and failing calls at every step.
//!
//! `IDEMLOG_IMAGES` asks for that many distinct disk images of each scenario: random outcomes are
//! added until there are as many, or no new ones turn up; then crashes of the next open, too.
//! `IDEMLOG_SCALE` multiplies how many outcomes of each power cut, and which calls, are tried at
//! least. Each scenario prints one line of `name=value` words, and after it the totals of this
//! process so far, in which an image that two scenarios share counts once.

mod alphabet;
mod attached;
mod errors;
mod faults;
mod handler;
mod scenarios;
mod shared;
mod table;
mod upkeep;

use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use idemlog::testing::sim::{
    CrashKind, CrashOptions, CrashTotals, PowerCut, Rng, SimDisk, for_each_crash_point,
};
use idemlog::{Durability, Failure, Resolution, Result, Retention};

use crate::support::crew::{CLASSES, Crew, Ended, FILTER, NON_REPEATABLE, Promised, REPEATABLE};
use crate::support::env_u64;

const SEGMENT_BYTES: u32 = 8192;
const KEY: &[u8] = b"key";

type Script<'a> = dyn Fn(Crew) -> Ended + 'a;

fn scale() -> u32 {
    env_u64("IDEMLOG_SCALE", 1) as u32
}

/// How many distinct images a scenario is asked for.
fn images_min() -> u64 {
    env_u64("IDEMLOG_IMAGES", 0)
}

fn promised(level: Durability) -> Promised {
    Promised::new(SEGMENT_BYTES, level)
}

/// Runs steps until one fails, then closes, so that guards end nothing.
fn run(mut crew: Crew, steps: impl FnOnce(&mut Crew) -> Result<()>) -> Ended {
    let result = steps(&mut crew);
    let (promised, closed) = crew.close();
    (promised, result.and(closed))
}

/// Opens on the disk and runs the script there.
fn play(disk: &SimDisk, promised: Promised, script: &Script<'_>) -> Ended {
    match Crew::open(disk, promised) {
        Ok(crew) => script(crew),
        Err(ended) => ended,
    }
}

fn is_kill(kind: CrashKind) -> bool {
    matches!(kind, CrashKind::Kill | CrashKind::KillInside { .. })
}

/// Opens what a crash has left, compares it with what was promised, writes on, and looks again
/// after another kill and after two more power cuts.
fn check(disk: &SimDisk, mut promised: Promised, killed: bool, doubly: bool) -> Promised {
    if !killed {
        promised.clock.reboot();
        promised.oracle.boot_ms = 1000;
    }
    let mut crew = reopen(disk, promised);
    crew.settle(if killed {
        crew.p.floor_kill
    } else {
        crew.p.floor_power
    });
    if !doubly {
        return crew.close().0;
    }
    // What was answered just now stays, also without another sync.
    let bare = disk.after_power_cut(&mut PowerCut::drop_all());
    let answered = copy(&crew.p);
    let mut again = reopen(&bare, answered);
    again.settle(crew.p.oracle.journal.len());
    drop(again.close());
    crew.write_ten("a");
    let disks = [
        disk.after_kill(),
        disk.after_power_cut(&mut PowerCut::drop_all()),
        disk.after_power_cut(&mut PowerCut::keep_all()),
    ];
    let before = crew.p.floor_power;
    let (mut promised, _) = crew.close();
    for disk in disks {
        let mut crew = reopen(&disk, promised);
        crew.settle(before);
        promised = crew.close().0;
    }
    promised
}

fn reopen(disk: &SimDisk, promised: Promised) -> Crew {
    match Crew::open(disk, promised) {
        Ok(crew) => crew,
        Err((_, error)) => panic!("the store does not open: {error:?}"),
    }
}

/// How much is tried of each scenario.
fn crash_options(base: &SimDisk) -> CrashOptions {
    CrashOptions {
        base: base.clone(),
        seed: 1,
        outcomes_max: 24 * u64::from(scale()),
        seeded_count: 3 * scale(),
        recycled_count: scale().min(4),
        inside_count: 1,
        images_min: images_min(),
        ..CrashOptions::default()
    }
}

/// Stops a script at every step, in every way, and checks every disk that is left.
fn crash_everywhere(
    name: &str,
    base: &SimDisk,
    level: Durability,
    script: &Script<'_>,
) -> CrashTotals {
    crash_with(name, &crash_options(base), &promised(level), script)
}

fn crash_with(
    name: &str,
    options: &CrashOptions,
    start: &Promised,
    script: &Script<'_>,
) -> CrashTotals {
    // A script that ends early would crash nowhere in its rest.
    let whole = options.base.after_kill();
    play(&whole, copy(start), script).1.unwrap();
    let ended = RefCell::new(None);
    let scenario = |disk: &SimDisk| {
        *ended.borrow_mut() = Some(Rc::new(play(disk, copy(start), script).0));
    };
    let mut explorer = Explorer::default();
    explorer.explore(options, scenario, &ended);
    explorer.tell(name, start.level)
}

/// Counts what crashes have left, and goes deeper where there is too little of it.
#[derive(Default)]
struct Explorer {
    totals: CrashTotals,
    images: HashSet<u64>,
}

/// Disks kept to crash their next open, at most.
const KEPT_MAX: usize = 4096;

/// How deep crashes are put inside each other, at most.
const DEPTH_MAX: u32 = 3;

impl Explorer {
    /// Explores a scenario of the crew, which leaves in `ended` what was promised.
    fn explore(
        &mut self,
        options: &CrashOptions,
        scenario: impl Fn(&SimDisk),
        ended: &RefCell<Option<Rc<Promised>>>,
    ) {
        let mut count = 0u64;
        let doubly_every = if options.images_min > 0 { 6 } else { 3 };
        self.judge_all(
            options,
            scenario,
            || ended.borrow().clone().unwrap(),
            |disk, promised| {
                let promised = copy(promised);
                promised.clock.reboot();
                if let Ok(crew) = Crew::open(disk, promised) {
                    drop(crew.close());
                }
            },
            |disk, promised, killed| {
                count += 1;
                let doubly = count.is_multiple_of(doubly_every);
                check(disk, copy(promised), killed, doubly);
            },
        );
    }

    /// Stops a scenario at every step, in every way, and hands every disk to `judge`, with what
    /// the scenario has left by then. If that makes fewer images than asked for, the `open` of
    /// what is left is stopped at every step, and the open of what that leaves.
    fn judge_all<T: Clone>(
        &mut self,
        options: &CrashOptions,
        scenario: impl Fn(&SimDisk),
        told: impl Fn() -> T,
        open: impl Fn(&SimDisk, &T),
        mut judge: impl FnMut(&SimDisk, &T, bool),
    ) {
        let goal = self.images.len() + options.images_min as usize;
        let mut rng = Rng::new(options.seed);
        let mut kept: Vec<(SimDisk, T)> = Vec::new();
        let mut seen = 0;
        let totals = for_each_crash_point(options, scenario, |state| {
            self.images.insert(state.image);
            let told = told();
            if options.images_min > 0 {
                seen += 1;
                keep(
                    &mut kept,
                    (state.disk.after_kill(), told.clone()),
                    seen,
                    &mut rng,
                );
            }
            self.totals.checked += 1;
            judge(&state.disk, &told, is_kill(state.kind));
        });
        self.add(totals, options.first_step);
        for _ in 1..DEPTH_MAX {
            let mut deeper = Vec::new();
            let mut seen = 0;
            for (disk, told) in kept {
                if self.images.len() >= goal {
                    return;
                }
                let inner = CrashOptions {
                    base: disk,
                    seed: rng.next_u64(),
                    outcomes_max: 8,
                    images_min: 50,
                    ..options.clone()
                };
                let inner = CrashOptions {
                    first_step: 0,
                    ..inner
                };
                let totals = for_each_crash_point(
                    &inner,
                    |disk| open(disk, &told),
                    |state| {
                        // Nothing was promised since: what is known was judged.
                        if !self.images.insert(state.image) {
                            return;
                        }
                        seen += 1;
                        let left = (state.disk.after_kill(), told.clone());
                        keep(&mut deeper, left, seen, &mut rng);
                        self.totals.checked += 1;
                        judge(&state.disk, &told, false);
                    },
                );
                self.add(totals, 0);
            }
            kept = deeper;
        }
    }

    fn add(&mut self, totals: CrashTotals, first_step: u64) {
        self.totals.steps += totals.steps - first_step;
        self.totals.states += totals.states;
    }

    fn tell(mut self, name: &str, level: Durability) -> CrashTotals {
        self.totals.distinct = self.images.len() as u64;
        tell(name, level, self.totals, self.images);
        self.totals
    }
}

/// Keeps a fair sample of all that were seen.
fn keep<T>(kept: &mut Vec<T>, next: T, seen: usize, rng: &mut Rng) {
    if kept.len() < KEPT_MAX {
        kept.push(next);
    } else if let Some(place) = kept.get_mut(rng.below(seen)) {
        *place = next;
    }
}

/// What all scenarios of this process have come to.
static ALL: Mutex<Option<(u64, u64, HashSet<u64>)>> = Mutex::new(None);

fn tell(name: &str, level: Durability, totals: CrashTotals, images: HashSet<u64>) {
    let CrashTotals {
        steps,
        states,
        checked,
        distinct,
        ..
    } = totals;
    println!(
        "crash: scenario={name} level={level:?} steps={steps} states={states} checked={checked} \
         distinct={distinct}"
    );
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let (scenarios, checks, union) = all.get_or_insert_default();
    *scenarios += 1;
    *checks += checked;
    union.extend(images);
    println!(
        "crash total: scenarios={scenarios} checked={checks} distinct={}",
        union.len()
    );
}

/// A copy with a clock of its own at the same time.
fn copy(promised: &Promised) -> Promised {
    use idemlog::testing::{Clock, ManualClock};
    let reading = promised.clock.read();
    let clock = ManualClock::new(reading.wall_ms);
    clock.advance_ms(reading.boot_ms - 1000);
    clock.set_wall_ms(reading.wall_ms);
    Promised {
        oracle: promised.oracle.clone(),
        clock: std::sync::Arc::new(clock),
        ..*promised
    }
}

fn long_key(n: u32) -> Vec<u8> {
    format!("long-{n:04}-{}", "k".repeat(180)).into_bytes()
}

fn secs(n: u64) -> Retention {
    Retention::For(Duration::from_secs(n))
}

/// Every call of every class once.
fn all_calls(crew: &mut Crew, level: Durability) -> Result<()> {
    crew.observe(b"seen", None, level)?;
    crew.observe(b"seen", None, level)?;
    for space in CLASSES {
        for key in [
            &b"done"[..],
            b"started",
            b"rejected",
            b"failed",
            b"unknown",
            b"released",
        ] {
            crew.claim(space, key, false)?;
        }
        crew.claim(space, b"held", true)?;
        for key in [&b"done"[..], b"started", b"unknown"] {
            crew.start(space, key, b"evidence")?;
        }
        crew.commit(space, b"done", b"outcome", level)?;
        crew.claim(space, b"done", false)?;
        crew.fail(
            space,
            b"rejected",
            &Failure::Permanent {
                error: b"no".to_vec(),
            },
        )?;
        let after = Duration::from_secs(5);
        crew.fail(
            space,
            b"failed",
            &Failure::Retryable {
                after,
                error: b"later".to_vec(),
            },
        )?;
        crew.fail(
            space,
            b"unknown",
            &Failure::Unknown {
                evidence: b"?".to_vec(),
            },
        )?;
        crew.fail(space, b"released", &Failure::Release)?;
        crew.renew(space, b"held", 9000)?;
    }
    crew.resolve(
        NON_REPEATABLE,
        b"unknown",
        Resolution::Applied(b"found".to_vec()),
    )?;
    crew.forget(REPEATABLE, b"done")?;
    crew.forget(FILTER, b"seen")?;
    crew.observe(b"seen", None, level)
}

fn created(level: Durability) -> SimDisk {
    created_as(promised(level))
}

/// A disk with a new store. All have the same identity, so that images of two scenarios can be
/// the same.
fn created_as(promised: Promised) -> SimDisk {
    let disk = SimDisk::seeded(1);
    play(&disk, promised, &|crew| crew.close()).1.unwrap();
    disk
}

/// Fills several segments while claims are open and keys are in doubt.
fn fill(
    crew: &mut Crew,
    level: Durability,
    from: u32,
    segments: u32,
    retention: Retention,
) -> Result<()> {
    for batch in 0..segments * 3 {
        let start = from + batch * 12;
        let keys: Vec<_> = (start..start + 12).map(long_key).collect();
        crew.observe_many(&keys, retention, level)?;
    }
    Ok(())
}

/// Says what was tried if what follows panics.
struct Said(String);

impl Drop for Said {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}
