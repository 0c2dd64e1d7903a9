//! Kills, power cuts and failing calls at every step.
//!
//! `IDEMLOG_SCALE` multiplies how many outcomes of each power cut are tried.

use std::cell::RefCell;
use std::time::Duration;

use idemlog::testing::sim::{
    CrashKind, CrashOptions, CrashState, CrashTotals, Fault, FaultKind, PowerCut, Rng, SimDisk,
    SyncFailure, for_each_crash_point,
};
use idemlog::{
    Applied, Durability, ErrorKind, Failure, KeyState, NamespaceOptions, Options, Probed,
    Resolution, Result, Retention,
};

use crate::support::crew::{
    CLASSES, Crew, Ended, FILTER, INTERNAL, LEVELS, NON_REPEATABLE, PROBEABLE, Promised, REPEATABLE,
};
use crate::support::env_u64;
use crate::support::oracle::{Answer, Changed, How};

const SEGMENT_BYTES: u32 = 8192;

type Script = dyn Fn(Crew) -> Ended;

fn scale() -> u32 {
    env_u64("IDEMLOG_SCALE", 1) as u32
}

/// Runs steps until one fails, then closes, so that guards end nothing.
fn run(mut crew: Crew, steps: impl FnOnce(&mut Crew) -> Result<()>) -> Ended {
    let result = steps(&mut crew);
    let (promised, closed) = crew.close();
    (promised, result.and(closed))
}

/// Opens on the disk and runs the script there.
fn play(disk: &SimDisk, level: Durability, script: &Script) -> Ended {
    match Crew::open(disk, Promised::new(SEGMENT_BYTES, level)) {
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
    let floor = if killed {
        promised.floor_kill
    } else {
        promised.floor_power
    };
    if !killed {
        promised.clock.reboot();
        promised.oracle.boot_ms = 1000;
    }
    let mut crew = reopen(disk, promised);
    crew.settle(floor);
    if !doubly {
        return crew.close().0;
    }
    // What was answered just now stays, also without another sync.
    let bare = disk.after_power_cut(&mut PowerCut::drop_all());
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
    drop(bare);
    promised
}

fn reopen(disk: &SimDisk, promised: Promised) -> Crew {
    match Crew::open(disk, promised) {
        Ok(crew) => crew,
        Err((_, error)) => panic!("the store does not open: {error:?}"),
    }
}

/// Stops a script at every step, in every way, and checks every disk that is left.
fn crash_everywhere(name: &str, base: &SimDisk, level: Durability, script: &Script) -> CrashTotals {
    let ended: RefCell<Option<Promised>> = RefCell::new(None);
    let options = CrashOptions {
        base: base.clone(),
        seed: 1,
        outcomes_max: 24 * u64::from(scale()),
        seeded_count: 3 * scale(),
        recycled_count: scale().min(4),
        inside_count: 1,
    };
    let scenario = |disk: &SimDisk| {
        *ended.borrow_mut() = Some(play(disk, level, script).0);
    };
    let mut count = 0u64;
    let totals = for_each_crash_point(&options, scenario, |state: CrashState| {
        let promised = copy(ended.borrow().as_ref().unwrap());
        count += 1;
        check(
            &state.disk,
            promised,
            is_kill(state.kind),
            count.is_multiple_of(3),
        );
    });
    println!("crash: scenario={name} level={level:?} {totals:?}");
    totals
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
    let disk = SimDisk::new();
    play(&disk, level, &|crew| crew.close()).1.unwrap();
    disk
}

#[test]
fn creation_is_atomic() {
    let totals = crash_everywhere("creation", &SimDisk::new(), Durability::Power, &|crew| {
        crew.close()
    });
    assert!(totals.steps > 10);
}

#[test]
fn calls_of_every_class_at_every_level() {
    for level in LEVELS {
        let script = move |crew: Crew| run(crew, |crew| all_calls(crew, level));
        let totals = crash_everywhere("calls", &SimDisk::new(), level, &script);
        assert!(totals.checked > 100);
    }
}

#[test]
fn batches() {
    for level in LEVELS {
        let script = move |crew: Crew| {
            run(crew, |crew| {
                let keys: Vec<_> = (0..20).map(long_key).collect();
                crew.observe_many(&keys, secs(60), level)?;
                for n in 0..5 {
                    crew.claim(NON_REPEATABLE, &long_key(n), false)?;
                    crew.start(NON_REPEATABLE, &long_key(n), b"")?;
                }
                crew.commit_all_started(NON_REPEATABLE, b"batch", level)?;
                crew.observe_many(&keys, secs(60), level)
            })
        };
        crash_everywhere("batches", &created(level), level, &script);
    }
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

#[test]
fn rolls_and_seals() {
    for level in LEVELS {
        let script = move |crew: Crew| {
            run(crew, |crew| {
                crew.claim(NON_REPEATABLE, b"doubt", false)?;
                crew.start(NON_REPEATABLE, b"doubt", b"left")?;
                crew.claim(REPEATABLE, b"pending", true)?;
                crew.claim(INTERNAL, b"moves", false)?;
                fill(crew, level, 0, 2, secs(60))?;
                crew.commit(INTERNAL, b"moves", b"moved", level)?;
                crew.fail(
                    NON_REPEATABLE,
                    b"doubt",
                    &Failure::Unknown {
                        evidence: b"x".to_vec(),
                    },
                )?;
                fill(crew, level, 100, 2, secs(60))?;
                crew.log.maintain()?;
                crew.claim(INTERNAL, b"moves", false).map(|_| ())
            })
        };
        crash_everywhere("rolls", &created(level), level, &script);
    }
}

/// Segments are dropped, twice, and what is not settled is carried over.
#[test]
fn expiry_carries_over_what_is_not_settled() {
    for level in [Durability::Process, Durability::Power] {
        let script = move |crew: Crew| {
            run(crew, |crew| {
                crew.claim(NON_REPEATABLE, b"doubt", false)?;
                crew.start(NON_REPEATABLE, b"doubt", b"left")?;
                crew.claim(REPEATABLE, b"pending", true)?;
                crew.claim(PROBEABLE, b"started", false)?;
                crew.start(PROBEABLE, b"started", b"")?;
                crew.claim(INTERNAL, b"short", false)?;
                crew.commit_for(INTERNAL, b"short", b"", level, Some(secs(5)))?;
                fill(crew, level, 0, 2, secs(10))?;
                crew.advance(8_000);
                fill(crew, level, 50, 2, secs(10))?;
                crew.advance(3_000);
                crew.log.maintain()?;
                crew.claim(INTERNAL, b"short", false)?;
                crew.advance(8_000);
                crew.log.maintain()?;
                fill(crew, level, 0, 1, secs(10))?;
                crew.log.maintain()?;
                crew.commit(PROBEABLE, b"started", b"late", level)
            })
        };
        let totals = crash_everywhere("expiry", &created(level), level, &script);
        assert!(totals.checked > 100);
    }
}

/// A few keys of long retention pin a segment: they move, and the segment goes.
#[test]
fn compaction_moves_the_long_lived() {
    let level = Durability::Power;
    let script = move |crew: Crew| {
        run(crew, |crew| {
            for n in 0..4 {
                crew.observe(
                    format!("ever-{n}").as_bytes(),
                    Some(Retention::Forever),
                    level,
                )?;
            }
            crew.claim(INTERNAL, b"ever", false)?;
            crew.commit_for(INTERNAL, b"ever", b"kept", level, Some(Retention::Forever))?;
            crew.observe(b"gone", Some(Retention::Forever), level)?;
            fill(crew, level, 0, 2, secs(10))?;
            crew.forget(FILTER, b"gone")?;
            fill(crew, level, 60, 2, secs(20))?;
            crew.advance(11_000);
            crew.log.maintain()?;
            crew.log.maintain()?;
            crew.advance(20_000);
            crew.log.maintain()?;
            crew.log.maintain()?;
            crew.observe(b"ever-0", None, level)
        })
    };
    let totals = crash_everywhere("compaction", &created(level), level, &script);
    assert!(totals.checked > 100);
}

/// Runs are merged, segments go out of the middle and the front of a merged run, and it is made
/// anew.
#[test]
fn merges() {
    let level = Durability::Process;
    let script = move |crew: Crew| {
        run(crew, |crew| {
            crew.claim(NON_REPEATABLE, b"doubt", false)?;
            crew.start(NON_REPEATABLE, b"doubt", b"left")?;
            fill(crew, level, 0, 2, secs(600))?;
            fill(crew, level, 100, 2, secs(10))?;
            fill(crew, level, 200, 2, secs(600))?;
            crew.log.maintain()?;
            crew.advance(11_000);
            crew.log.maintain()?;
            crew.log.maintain()?;
            fill(crew, level, 300, 3, secs(600))?;
            crew.log.maintain()?;
            crew.observe(&long_key(1), None, level)?;
            crew.observe(&long_key(101), None, level)
        })
    };
    let totals = crash_everywhere("merges", &created(level), level, &script);
    assert!(totals.checked > 100);
}

/// Every open reserves stamps before the first one leaves.
#[test]
fn stamps_rise_over_opens() {
    for level in LEVELS {
        let script = move |mut crew: Crew| {
            for n in 0..4u8 {
                let (promised, result) = run(crew, |crew| {
                    crew.claim(REPEATABLE, &[b'k', n], false)?;
                    crew.claim(INTERNAL, b"same", false)?;
                    crew.observe(&[n], None, level)
                });
                if result.is_err() {
                    return (promised, result);
                }
                let disk = DISK.with_borrow(|disk| disk.clone().unwrap());
                match Crew::open(&disk, promised) {
                    Ok(next) => crew = next,
                    Err(ended) => return ended,
                }
            }
            crew.close()
        };
        let script = &script;
        let ended: RefCell<Option<Promised>> = RefCell::new(None);
        let options = CrashOptions {
            base: created(level),
            seeded_count: 3 * scale(),
            ..CrashOptions::default()
        };
        let scenario = |disk: &SimDisk| {
            DISK.set(Some(disk.clone()));
            *ended.borrow_mut() = Some(play(disk, level, script).0);
        };
        let totals = for_each_crash_point(&options, scenario, |state| {
            let promised = copy(ended.borrow().as_ref().unwrap());
            check(&state.disk, promised, is_kill(state.kind), true);
        });
        DISK.set(None);
        println!("crash: scenario=stamps level={level:?} {totals:?}");
    }
}

thread_local! {
    static DISK: RefCell<Option<SimDisk>> = const { RefCell::new(None) };
}

/// I10: recovery killed at any step, and the recovery of that, ends in the same state.
#[test]
fn recovery_is_idempotent_three_deep() {
    let level = Durability::Process;
    let disk = created(level);
    let script = move |crew: Crew| {
        run(crew, |crew| {
            crew.claim(NON_REPEATABLE, b"doubt", false)?;
            crew.start(NON_REPEATABLE, b"doubt", b"left")?;
            fill(crew, level, 0, 4, secs(10))?;
            crew.advance(11_000);
            crew.log.maintain()?;
            fill(crew, level, 70, 2, secs(60))
        })
    };
    let whole = disk.after_kill();
    play(&whole, level, &script).1.unwrap();
    let steps = whole.steps();
    let mut rng = Rng::new(7);
    let mut distinct = 0;
    for _ in 0..6 * scale() {
        let died = disk.after_kill();
        died.stop_at(steps / 2 + rng.below(steps as usize / 2) as u64);
        let (promised, _) = play(&died, level, &script);
        let cut = died.after_power_cut(&mut PowerCut::seeded(rng.next_u64()));
        distinct += nested(&cut, &promised, 3, &mut rng);
    }
    println!("crash: scenario=nested distinct={distinct}");
}

/// Stops an open at every step, and the open of what that left, and compares.
fn nested(disk: &SimDisk, promised: &Promised, depth: u32, rng: &mut Rng) -> u64 {
    let options = CrashOptions {
        base: disk.clone(),
        seed: rng.next_u64(),
        outcomes_max: 8,
        seeded_count: 1,
        inside_count: 1,
        ..CrashOptions::default()
    };
    let start = copy(promised);
    start.clock.reboot();
    let scenario = |disk: &SimDisk| {
        let mut promised = copy(&start);
        promised.clock.reboot();
        promised.oracle.boot_ms = 1000;
        if let Ok(crew) = Crew::open(disk, promised) {
            drop(crew.close());
        }
    };
    let mut deeper = Vec::new();
    let totals = for_each_crash_point(&options, scenario, |state| {
        check(&state.disk.after_kill(), copy(promised), false, false);
        if rng.below(12) == 0 {
            deeper.push(state.disk);
        }
    });
    let mut distinct = totals.distinct;
    if depth > 1 {
        for disk in deeper.into_iter().take(2) {
            distinct += nested(&disk, promised, depth - 1, rng);
        }
    }
    distinct
}

/// Scripts that nobody has thought of.
#[test]
fn random_scripts() {
    let mut distinct = 0;
    for seed in 0..u64::from(4 * scale()) {
        let level = LEVELS[seed as usize % 3];
        let script = move |crew: Crew| run(crew, |crew| random_steps(crew, seed));
        let totals = crash_everywhere(&format!("random-{seed}"), &created(level), level, &script);
        distinct += totals.distinct;
    }
    println!("crash: scenario=random distinct={distinct}");
}

fn random_steps(crew: &mut Crew, seed: u64) -> Result<()> {
    let mut rng = Rng::new(seed);
    for n in 0..40u32 {
        let level = LEVELS[rng.below(3)];
        let space = CLASSES[rng.below(4)];
        let key = [b'a' + rng.below(4) as u8];
        let held = crew.desk(space).held();
        match rng.below(10) {
            0..=1 => crew.observe(&key, Some(secs(1 + rng.below(20) as u64)), level)?,
            2 => {
                let keys: Vec<_> = (n * 8..n * 8 + 8).map(long_key).collect();
                crew.observe_many(&keys, secs(1 + rng.below(20) as u64), level)?;
            }
            3 => {
                let found = [
                    Probed::Applied(b"p".to_vec()),
                    Probed::NotApplied,
                    Probed::Unknown,
                ];
                crew.probe.lock().unwrap().0 = found[rng.below(3)].clone();
                crew.claim(space, &key, rng.below(3) == 0)?;
            }
            4 => crew.advance(rng.below(8000) as u64),
            5 => crew.log.maintain()?,
            _ if held.is_empty() => {
                crew.claim(space, &key, false)?;
            }
            6 | 7 => {
                let held = &held[rng.below(held.len())];
                crew.start(space, &held.key, b"ev")?;
            }
            8 => {
                let last = held.iter().rfind(|held| held.started);
                if let Some(held) = last {
                    let again = crew.desk(space).held();
                    // The newest guard of the key is the one that is used.
                    if again
                        .iter()
                        .rfind(|h| h.key == held.key)
                        .is_some_and(|h| h.started)
                    {
                        crew.commit(space, &held.key.clone(), b"r", level)?;
                    }
                }
            }
            _ => {
                let key = held[rng.below(held.len())].key.clone();
                let failure = match rng.below(3) {
                    0 => Failure::Release,
                    1 => Failure::Unknown {
                        evidence: b"u".to_vec(),
                    },
                    _ => Failure::Permanent {
                        error: b"p".to_vec(),
                    },
                };
                crew.fail(space, &key, &failure)?;
            }
        }
    }
    Ok(())
}

// --- Calls that fail -----------------------------------------------------------------------------

/// Lets step `k` fail for every `k`, in every way; nothing acknowledged is lost, what was refused
/// is not there, and a poisoned store answers nothing new.
fn fail_everywhere(name: &str, level: Durability, script: &Script, faults: &[fn(u64) -> Fault]) {
    let base = created(level);
    let whole = base.after_kill();
    play(&whole, level, script).1.unwrap();
    let steps = whole.steps();
    let stride = (steps / (120 * u64::from(scale()))).max(1);
    let mut trials = 0u64;
    let mut rng = Rng::new(3);
    for (index, fault) in faults.iter().enumerate() {
        let mut k = index as u64 % stride;
        while k < steps {
            let disk = base.after_kill();
            disk.fail(fault(k));
            let (promised, result) = play(&disk, level, script);
            let what = format!("{name} k={k} fault={:?} result={result:?}", fault(k));
            let _said = Said(what);
            trials += 1;
            disk.clear_faults();
            let cuts = [PowerCut::drop_all(), PowerCut::seeded(rng.next_u64())];
            // Pages that a failed sync has dropped are lost to a kill as to a power cut.
            let kept = fault(k).sync != SyncFailure::DropPages;
            let mut disks = vec![(disk.after_kill(), kept)];
            disks.extend(
                cuts.into_iter()
                    .map(|mut cut| (disk.after_power_cut(&mut cut), false)),
            );
            for (disk, killed) in disks {
                check(&disk, copy(&promised), killed, true);
            }
            k += stride;
        }
    }
    println!("faults: scenario={name} level={level:?} steps={steps} trials={trials}");
}

struct Said(String);

impl Drop for Said {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}

const ERRORS: [fn(u64) -> Fault; 7] = [
    |k| Fault::once(k, FaultKind::Io),
    |k| Fault::sticky(k, FaultKind::Io),
    |k| Fault::once(k, FaultKind::NoSpace).after_bytes(40),
    |k| Fault::sticky(k, FaultKind::NoSpace),
    |k| Fault::once(k, FaultKind::Io).on_sync(SyncFailure::DropPages),
    |k| Fault::once(k, FaultKind::Io).on_sync(SyncFailure::KeepDirty),
    |k| Fault::once(k, FaultKind::ReadOnly).after_bytes(13),
];

/// After an error: a poisoned store says nothing is new, any other goes on as if nothing had been
/// called.
fn judge_error(crew: &mut Crew, result: Result<()>) -> Result<()> {
    let Err(error) = result else { return Ok(()) };
    if crew.log.health().poisoned.is_some() {
        assert!(
            crew.filter.observe(b"fresh").is_err(),
            "a poisoned store answered"
        );
        assert!(
            crew.filter.get(b"fresh").is_err(),
            "a poisoned store answered absent"
        );
        assert!(
            crew.desk(REPEATABLE)
                .claim(b"fresh", &Default::default())
                .is_err()
        );
    }
    Err(error)
}

#[test]
fn every_call_fails_in_turn() {
    for level in [Durability::Process, Durability::Power] {
        let script = move |crew: Crew| {
            run(crew, |crew| {
                let result = all_calls(crew, level)
                    .and_then(|()| fill(crew, level, 0, 2, secs(10)))
                    .and_then(|()| {
                        crew.advance(11_000);
                        crew.log.maintain()
                    })
                    .and_then(|()| fill(crew, level, 40, 1, secs(10)));
                judge_error(crew, result)
            })
        };
        fail_everywhere("calls", level, &script, &ERRORS);
    }
}

// --- The crash table of the contract, row by row ----------------------------------------------

/// Runs `before` for each class, level and kind of crash, and hands what is left to `after`, with
/// the fact whether everything acknowledged at that level is bound to be there.
fn for_each_cell(
    before: impl Fn(&mut Crew, usize, Durability) -> Result<()>,
    after: impl Fn(&mut Crew, usize, bool),
) {
    for level in LEVELS {
        for space in CLASSES {
            for crash in 0..4u64 {
                let disk = created(level);
                let mut crew = reopen(&disk, Promised::new(SEGMENT_BYTES, level));
                before(&mut crew, space, level).unwrap();
                let left = match crash {
                    0 => disk.after_kill(),
                    1 => disk.after_power_cut(&mut PowerCut::drop_all()),
                    2 => disk.after_power_cut(&mut PowerCut::keep_all()),
                    _ => disk.after_power_cut(&mut PowerCut::seeded(space as u64)),
                };
                let killed = crash == 0;
                let floor = if killed {
                    crew.p.floor_kill
                } else {
                    crew.p.floor_power
                };
                let mut promised = copy(&crew.p);
                drop(crew.close());
                if !killed {
                    promised.clock.reboot();
                    promised.oracle.boot_ms = 1000;
                }
                let mut crew = reopen(&left, promised);
                crew.settle(floor);
                let bound = level == Durability::Power || killed && level == Durability::Process;
                let _said = Said(format!("cell class={space} level={level:?} crash={crash}"));
                after(&mut crew, space, bound);
                crew.close().1.unwrap();
            }
        }
    }
}

fn how(answer: &Answer) -> Option<&How> {
    match answer {
        Answer::Granted { how, .. } => Some(how),
        _ => None,
    }
}

const KEY: &[u8] = b"key";

fn begin(crew: &mut Crew, space: usize) -> Result<()> {
    crew.claim(space, KEY, false)?;
    crew.start(space, KEY, b"evidence")
}

/// What a started effect of which nothing more is known comes to.
fn judge_unknown(crew: &mut Crew, space: usize) {
    let answer = crew.claim(space, KEY, false).unwrap();
    match space {
        // `Probeable` and `NonRepeatable` wait for `start` at Power, whatever the level.
        NON_REPEATABLE => assert!(matches!(answer, Answer::InDoubt(_)), "{answer:?}"),
        // The probe of these tests does not know, unless told otherwise.
        PROBEABLE => assert!(matches!(answer, Answer::InDoubt(_)), "{answer:?}"),
        _ => assert!(
            matches!(how(&answer), Some(How::New | How::Takeover(_))),
            "{answer:?}"
        ),
    }
}

#[test]
fn row_before_claim_runs() {
    for_each_cell(
        |_, _, _| Ok(()),
        |crew, space, _| {
            let answer = crew.claim(space, KEY, false).unwrap();
            assert_eq!(how(&answer), Some(&How::New));
        },
    );
}

#[test]
fn row_claimed_not_started_is_run_again() {
    for_each_cell(
        |crew, space, _| crew.claim(space, KEY, false).map(|_| ()),
        |crew, space, _| {
            let answer = crew.claim(space, KEY, false).unwrap();
            match how(&answer) {
                Some(How::New) => {}
                Some(How::Takeover(previous)) => assert!(!previous.started),
                _ => panic!("{answer:?}"),
            }
        },
    );
}

#[test]
fn row_started_effect_unknown() {
    for_each_cell(
        |crew, space, _| begin(crew, space),
        |crew, space, _| judge_unknown(crew, space),
    );
    for found in [Probed::Applied(b"found".to_vec()), Probed::NotApplied] {
        for_each_cell(
            |crew, space, _| begin(crew, space),
            |crew, space, _| {
                crew.probe.lock().unwrap().0 = found.clone();
                let answer = crew.claim(space, KEY, false).unwrap();
                match (space, &found) {
                    (PROBEABLE, Probed::Applied(_)) => {
                        assert!(matches!(answer, Answer::Duplicate(_)), "{answer:?}");
                    }
                    (PROBEABLE, _) => {
                        assert!(matches!(how(&answer), Some(How::Takeover(p)) if p.started));
                    }
                    _ => {}
                }
            },
        );
    }
}

#[test]
fn row_committed_ack_lost_is_replayed() {
    for_each_cell(
        |crew, space, level| {
            begin(crew, space)?;
            crew.commit(space, KEY, b"outcome", level)
        },
        |crew, space, bound| {
            let state = crew.p.oracle.get(space, KEY);
            if bound || matches!(state, KeyState::Done(_)) {
                let answer = crew.claim(space, KEY, false).unwrap();
                let Answer::Duplicate(done) = answer else {
                    panic!("{answer:?}")
                };
                assert_eq!(done.outcome.bytes(), Some(&b"outcome"[..]));
            } else {
                judge_unknown(crew, space);
            }
        },
    );
}

#[test]
fn row_lease_lapsed_nobody_took_over_commit_is_accepted() {
    for_each_cell(
        |crew, space, level| {
            begin(crew, space)?;
            crew.advance(60_000);
            if space == NON_REPEATABLE {
                let answer = crew.claim(space, KEY, false)?;
                assert!(matches!(answer, Answer::InDoubt(_)), "{answer:?}");
            }
            crew.commit(space, KEY, b"late", level)
        },
        |crew, space, bound| {
            if bound {
                assert!(matches!(crew.p.oracle.get(space, KEY), KeyState::Done(_)));
            }
        },
    );
    // Over the crash: the old owner has its ticket.
    for_each_cell(
        |crew, space, _| {
            begin(crew, space)?;
            crew.sync()
        },
        |crew, space, _| {
            let epoch = crew.p.oracle.entry(space, KEY).unwrap().common.epoch;
            let verdict = crew.commit_ticket(space, KEY, epoch, b"late").unwrap();
            assert_eq!(verdict, Changed::Committed);
        },
    );
}

#[test]
fn row_taken_over_old_owner_is_fenced() {
    for_each_cell(
        |crew, space, _| {
            begin(crew, space)?;
            crew.sync()
        },
        |crew, space, _| {
            let epoch = crew.p.oracle.entry(space, KEY).unwrap().common.epoch;
            match space {
                NON_REPEATABLE => {
                    crew.claim(space, KEY, false).unwrap();
                    let applied = Resolution::Applied(b"found".to_vec());
                    crew.resolve(space, KEY, applied).unwrap();
                }
                PROBEABLE => {
                    crew.probe.lock().unwrap().0 = Probed::Applied(b"found".to_vec());
                    crew.claim(space, KEY, false).unwrap();
                }
                _ => {
                    crew.claim(space, KEY, false).unwrap();
                }
            }
            let same = crew.commit_ticket(space, KEY, epoch, b"found").unwrap();
            let other = crew.commit_ticket(space, KEY, epoch, b"other").unwrap();
            if matches!(space, NON_REPEATABLE | PROBEABLE) {
                assert_eq!(same, Changed::AlreadyCommitted);
                assert!(matches!(other, Changed::Conflict(_)), "{other:?}");
            } else {
                assert!(matches!(same, Changed::Fenced(_)), "{same:?}");
                assert!(matches!(other, Changed::Fenced(_)), "{other:?}");
            }
        },
    );
    // Taken over by another attempt, or resolved as not applied: fenced.
    for_each_cell(
        |crew, space, _| {
            begin(crew, space)?;
            crew.sync()
        },
        |crew, space, _| {
            let epoch = crew.p.oracle.entry(space, KEY).unwrap().common.epoch;
            crew.probe.lock().unwrap().0 = Probed::NotApplied;
            crew.claim(space, KEY, false).unwrap();
            if space == NON_REPEATABLE {
                crew.resolve(space, KEY, Resolution::NotApplied).unwrap();
            }
            let verdict = crew.commit_ticket(space, KEY, epoch, b"late").unwrap();
            assert!(matches!(verdict, Changed::Fenced(_)), "{verdict:?}");
        },
    );
}

#[test]
fn row_key_expired_runs_again() {
    for_each_cell(
        |crew, space, level| {
            begin(crew, space)?;
            crew.commit_for(space, KEY, b"old", level, Some(secs(5)))?;
            crew.sync()?;
            crew.advance(5_000);
            // Somebody reads the time before the crash, so that it counts.
            crew.log.maintain()
        },
        |crew, space, _| {
            let answer = crew.claim(space, KEY, false).unwrap();
            assert_eq!(how(&answer), Some(&How::New));
        },
    );
}

// --- Full disks and single failures -------------------------------------------------------------

/// A full disk refuses new keys with a typed error, settles what is claimed, and is as before when
/// there is space again.
#[test]
fn a_full_disk_is_a_typed_error_and_clears() {
    for spare in [0, 512, 2048, 8192, 40_000] {
        let level = Durability::Power;
        let disk = created(level);
        let mut crew = reopen(&disk, Promised::new(SEGMENT_BYTES, level));
        crew.claim(REPEATABLE, KEY, false).unwrap();
        disk.set_free_bytes(Some(spare));
        let mut refused = 0;
        for n in 0..400 {
            if let Err(error) = crew.observe(&long_key(n), None, level) {
                assert!(
                    matches!(error.kind(), ErrorKind::Full | ErrorKind::Io),
                    "{error:?}"
                );
                refused += 1;
            }
        }
        assert!(refused > 0);
        let health = crew.log.health();
        assert_eq!(health.poisoned, None, "spare={spare}");
        // What is owed fits, also when the index of the full segment does not.
        crew.commit(REPEATABLE, KEY, b"fits", level).unwrap();
        disk.set_free_bytes(None);
        for n in 0..400 {
            crew.observe(&long_key(n), None, level).unwrap();
        }
        let floor = crew.p.floor_power;
        let promised = copy(&crew.p);
        check(
            &disk.after_power_cut(&mut PowerCut::drop_all()),
            promised,
            false,
            true,
        );
        assert_eq!(crew.p.floor_power, floor);
        crew.close().1.unwrap();
    }
}

/// A key whose call failed without being applied is new when it is tried again.
#[test]
fn a_refused_key_is_new_again() {
    let level = Durability::Power;
    let disk = created(level);
    let mut crew = reopen(&disk, Promised::new(SEGMENT_BYTES, level));
    for n in 0..50u32 {
        let key = long_key(n);
        disk.fail(Fault::once(disk.steps(), FaultKind::Io).after_bytes(n as usize * 3));
        if crew.observe(&key, None, level).is_ok() {
            continue;
        }
        if crew.log.health().poisoned.is_some() {
            break;
        }
        crew.observe(&key, None, level).unwrap();
        crew.observe(&key, None, level).unwrap();
    }
    disk.clear_faults();
    check(
        &disk.after_power_cut(&mut PowerCut::drop_all()),
        copy(&crew.p),
        false,
        true,
    );
}

/// P2, I9: bytes that a failed flush left in the page cache only are not answered from after a
/// restart, unless they are on the disk by then.
#[test]
fn a_failed_flush_poisons_and_a_restart_trusts_no_cache() {
    for sync in [
        SyncFailure::MarkClean,
        SyncFailure::DropPages,
        SyncFailure::KeepDirty,
    ] {
        let level = Durability::Power;
        let disk = created(level);
        let mut crew = reopen(&disk, Promised::new(SEGMENT_BYTES, level));
        crew.observe(b"before", None, level).unwrap();
        let fault = Fault::once(disk.steps(), FaultKind::Io);
        disk.fail(fault.only(idemlog::testing::sim::Op::Sync).on_sync(sync));
        let error = crew.observe(b"lost", None, level).unwrap_err();
        assert_eq!(error.applied(), Applied::Maybe);
        assert!(crew.log.health().poisoned.is_some());
        assert_eq!(crew.filter.get(b"before").unwrap(), KeyState::Seen);
        assert!(crew.filter.get(b"lost").is_err());
        assert!(crew.filter.get(b"absent").is_err());
        assert_eq!(
            crew.filter.observe(b"absent").unwrap_err().kind(),
            ErrorKind::Poisoned
        );
        let promised = copy(&crew.p);
        let restarted = disk.after_kill();
        check(&restarted, promised, false, true);
    }
}

/// I1: index runs and filters are derived from the log.
#[test]
fn i1_runs_and_filters_are_deletable() {
    let level = Durability::Process;
    let disk = created(level);
    let mut crew = reopen(&disk, Promised::new(SEGMENT_BYTES, level));
    crew.claim(NON_REPEATABLE, KEY, false).unwrap();
    crew.start(NON_REPEATABLE, KEY, b"").unwrap();
    fill(&mut crew, level, 0, 6, secs(600)).unwrap();
    crew.log.maintain().unwrap();
    let (mut promised, closed) = crew.close();
    closed.unwrap();
    let derived = |name: &String| name.starts_with("run-") || name.starts_with("hint-");
    let names: Vec<String> = disk.file_names().into_iter().filter(derived).collect();
    assert!(names.len() >= 4, "{names:?}");
    for name in &names {
        let copy = disk.after_kill();
        assert!(copy.remove_file(name));
        promised = check(&copy, promised, false, false);
    }
    for name in &names {
        assert!(disk.remove_file(name));
    }
    check(&disk, promised, false, true);
}

/// Story: with 4-KiB segments no prepared segment counted as room for what an open claim may
/// still write, so `make_room` prepared segments for ever.
#[test]
fn the_smallest_segments_hold_claims() {
    let disk = SimDisk::new();
    let mut promised = Promised::new(4096, Durability::Process);
    for spec in &mut promised.oracle.specs {
        spec.outcome_bytes_max = 0;
    }
    let mut crew = reopen(&disk, promised);
    crew.claim(REPEATABLE, &[b'k'; 300], false).unwrap();
    for n in 0..200 {
        crew.observe(&long_key(n), None, Durability::Process)
            .unwrap();
    }
    crew.commit(REPEATABLE, &[b'k'; 300], b"", Durability::Process)
        .unwrap();
    crew.close().1.unwrap();
}

/// Story: `claim_many` failed in its second pass and left the claims of its first pass pending,
/// with no guard to end them: busy until their lease lapsed.
#[test]
fn a_batch_of_claims_that_fails_holds_none_of_them() {
    use idemlog::{ClaimOptions, ClaimVerdict, NamespaceOptions, Options, Repeatable};
    let disk = SimDisk::new();
    let log = Options::new()
        .background(false)
        .segment_bytes(SEGMENT_BYTES)
        .log_bytes_max(3 * u64::from(SEGMENT_BYTES))
        .open_on(disk.dir())
        .unwrap();
    let options = NamespaceOptions::new().outcome_bytes_max(200);
    let namespace = log.namespace::<Repeatable>("jobs", options).unwrap();
    let keys: Vec<_> = (0..200).map(long_key).collect();
    let error = namespace
        .claim_many(&keys, &ClaimOptions::new())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full);
    let verdict = namespace.claim(&keys[0]).unwrap();
    assert!(matches!(verdict, ClaimVerdict::New(_)), "{verdict:?}");
}

/// Errors inside recovery: the next open, without them, finds everything.
#[test]
fn an_open_that_fails_at_any_call_loses_nothing() {
    let level = Durability::Process;
    let base = created(level);
    let script = move |crew: Crew| {
        run(crew, |crew| {
            crew.claim(NON_REPEATABLE, KEY, false)?;
            crew.start(NON_REPEATABLE, KEY, b"")?;
            fill(crew, level, 0, 3, secs(600))
        })
    };
    let died = base.after_kill();
    died.stop_at(u64::MAX);
    let whole = base.after_kill();
    play(&whole, level, &script).1.unwrap();
    died.stop_at(whole.steps() - 12);
    let (promised, _) = play(&died, level, &script);
    let left = died.after_kill();
    let opened = left.after_kill();
    drop(reopen(&opened, copy(&promised)).close());
    let steps = opened.steps();
    let mut trials = 0;
    for fault in ERRORS {
        for k in 0..steps {
            let disk = left.after_kill();
            disk.fail(fault(k));
            match Crew::open(&disk, copy(&promised)) {
                Ok(crew) => drop(crew.close()),
                Err((_, error)) => drop(error),
            }
            disk.clear_faults();
            let kept = fault(k).sync != SyncFailure::DropPages;
            let _said = Said(format!("open k={k} {:?}", fault(k)));
            check(&disk.after_kill(), copy(&promised), kept, false);
            check(
                &disk.after_power_cut(&mut PowerCut::drop_all()),
                copy(&promised),
                false,
                true,
            );
            trials += 1;
        }
    }
    // Reads as well.
    for count in 0..40 {
        let disk = left.after_kill();
        disk.fail_reads_after(count);
        match Crew::open(&disk, copy(&promised)) {
            Ok(crew) => drop(crew.close()),
            Err((_, error)) => drop(error),
        }
        disk.clear_faults();
        check(&disk.after_kill(), copy(&promised), true, false);
        trials += 1;
    }
    println!("faults: scenario=open steps={steps} trials={trials}");
}

/// A record behind the end of the log must not come back when the log grows up to where it
/// begins: recovery cuts at the first invalid frame, and what lies behind is as valid as before.
#[test]
fn what_recovery_cuts_does_not_come_back_when_the_log_grows_up_to_it() {
    let options = |level| {
        let options = Options::new().segment_bytes(4096).background(false);
        options.durability(level)
    };
    let disk = SimDisk::new();
    let open = || {
        let log = options(Durability::Process).open_on(disk.dir()).unwrap();
        let filter = log.filter("f", NamespaceOptions::new()).unwrap();
        (log, filter)
    };
    let key = |n: u8| [n; 16];
    let (log, filter) = open();
    for n in 0..40 {
        assert!(filter.observe(key(n)).unwrap().is_new());
    }
    let mut killed = disk.after_kill();
    drop((log, filter));
    let name = "seg-000000000001.log";
    let mut bytes = killed.read_file(name).unwrap();
    // A header of 64 bytes, then records of 32: the eleventh is lost.
    let at = 64 + 10 * 32;
    bytes[at..at + 32].fill(0);
    killed.write_file(name, bytes);
    for round in 0..2 {
        let log = options(Durability::Process).open_on(killed.dir()).unwrap();
        let filter = log.filter("f", NamespaceOptions::new()).unwrap();
        assert_eq!(filter.get(key(9)).unwrap(), KeyState::Seen);
        for n in 10..40 {
            assert_eq!(
                filter.get(key(n)).unwrap(),
                KeyState::Absent,
                "key {n} round {round}"
            );
        }
        if round == 0 {
            assert!(filter.observe(key(200)).unwrap().is_new());
        } else {
            assert_eq!(filter.get(key(200)).unwrap(), KeyState::Seen);
        }
        let next = killed.after_kill();
        drop((log, filter));
        killed = next;
    }
}
