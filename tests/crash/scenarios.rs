//! Scenarios that die, or lose power, at each of their steps in turn.

use std::cell::RefCell;

use idemlog::testing::sim::{
    CrashKind, CrashOptions, PowerCut, Rng, SimDisk, for_each_crash_point,
};
use idemlog::{Durability, Failure, Probed, Result, Retention};

use super::{
    Explorer, SEGMENT_BYTES, all_calls, check, copy, crash_everywhere, created, fill, images_min,
    long_key, play, promised, run, scale, secs,
};
use crate::support::crew::{
    CLASSES, Crew, Ended, FILTER, INTERNAL, LEVELS, NON_REPEATABLE, PROBEABLE, Promised, REPEATABLE,
};

#[test]
fn creation_is_atomic() {
    let totals = crash_everywhere(
        "creation",
        &SimDisk::seeded(1),
        Durability::Power,
        &|crew| crew.close(),
    );
    assert!(totals.steps > 10);
}

#[test]
fn calls_of_every_class_at_every_level() {
    for level in LEVELS {
        let script = move |crew: Crew| run(crew, |crew| all_calls(crew, level));
        let totals = crash_everywhere("calls", &SimDisk::seeded(1), level, &script);
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

/// Fills four segments while claims are open and a key is in doubt.
fn rolls(crew: Crew, level: Durability) -> Ended {
    run(crew, |crew| {
        crew.claim(NON_REPEATABLE, b"doubt", false)?;
        crew.start(NON_REPEATABLE, b"doubt", b"left")?;
        crew.claim(REPEATABLE, b"pending", true)?;
        crew.claim(INTERNAL, b"moves", false)?;
        fill(crew, level, 0, 2, secs(60))?;
        crew.commit(INTERNAL, b"moves", b"moved", level)?;
        let evidence = b"x".to_vec();
        crew.fail(NON_REPEATABLE, b"doubt", &Failure::Unknown { evidence })?;
        fill(crew, level, 100, 2, secs(60))?;
        crew.log.maintain()?;
        crew.claim(INTERNAL, b"moves", false).map(|_| ())
    })
}

#[test]
fn rolls_and_seals() {
    for level in LEVELS {
        let script = move |crew: Crew| rolls(crew, level);
        crash_everywhere("rolls", &created(level), level, &script);
    }
}

/// Story: a process died between the list of unsettled records and the seal that end a segment.
/// The list was taken for a part of the log, the next footer went behind it and over the end of
/// the file, and the open after that found durable records missing.
#[test]
fn a_torn_footer_is_cut_and_written_again() {
    let level = Durability::Power;
    let script = move |crew: Crew| rolls(crew, level);
    let options = CrashOptions {
        base: created(level),
        outcomes_max: 0,
        seeded_count: 0,
        inside_count: u32::MAX,
        ..CrashOptions::default()
    };
    let ended = RefCell::new(None);
    let scenario = |disk: &SimDisk| {
        *ended.borrow_mut() = Some(play(disk, promised(level), &script).0);
    };
    let mut footers = 0;
    for_each_crash_point(&options, scenario, |state| {
        let CrashKind::KillInside { kept_bytes } = state.kind else {
            return;
        };
        let is_near = write_end(&state.doing).is_some_and(|end| end + 128 > SEGMENT_BYTES);
        if is_near && kept_bytes.is_multiple_of(4) {
            footers += 1;
            check(
                &state.disk,
                copy(ended.borrow().as_ref().unwrap()),
                true,
                true,
            );
        }
    });
    assert!(footers > 60, "{footers}");
}

/// Returns where a write to a segment ends, by its line in the step log.
fn write_end(line: &str) -> Option<u32> {
    let (_, range) = line.strip_prefix("write seg-")?.split_once(' ')?;
    let (offset, bytes) = range.split_once('+')?;
    Some(offset.parse::<u32>().ok()? + bytes.parse::<u32>().ok()?)
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
                let steps = |crew: &mut Crew| {
                    crew.claim(REPEATABLE, &[b'k', n], false)?;
                    crew.claim(INTERNAL, b"same", false)?;
                    crew.observe(&[n], None, level)
                };
                if let Err(error) = steps(&mut crew) {
                    return (crew.close().0, Err(error));
                }
                crew = match crew.reopen() {
                    Ok(crew) => crew,
                    Err(ended) => return ended,
                };
            }
            crew.close()
        };
        crash_everywhere("stamps", &created(level), level, &script);
    }
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
    play(&whole, promised(level), &script).1.unwrap();
    let steps = whole.steps();
    let mut rng = Rng::new(7);
    let mut all = Explorer::default();
    let rounds_min = 6 * u64::from(scale());
    for round in 0.. {
        if round >= rounds_min && all.images.len() as u64 >= images_min() {
            break;
        }
        let died = disk.after_kill();
        died.stop_at(steps / 2 + rng.below(steps as usize / 2) as u64);
        let (promised, _) = play(&died, promised(level), &script);
        let cut = died.after_power_cut(&mut PowerCut::seeded(rng.next_u64()));
        all.nest(&cut, &promised, 3, &mut rng);
    }
    all.tell("nested", level);
}

impl Explorer {
    /// Stops an open at every step, and the open of what that left, and compares.
    pub(super) fn nest(&mut self, disk: &SimDisk, promised: &Promised, depth: u32, rng: &mut Rng) {
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
            self.images.insert(state.image);
            self.totals.checked += 1;
            check(&state.disk.after_kill(), copy(promised), false, false);
            if rng.below(12) == 0 {
                deeper.push(state.disk);
            }
        });
        self.add(totals, 0);
        if depth > 1 {
            for disk in deeper.into_iter().take(2) {
                self.nest(&disk, promised, depth - 1, rng);
            }
        }
    }
}

/// Scripts that nobody has thought of.
#[test]
fn random_scripts() {
    for seed in 0..u64::from(4 * scale()) {
        let level = LEVELS[seed as usize % 3];
        let script = move |crew: Crew| run(crew, |crew| random_steps(crew, seed));
        crash_everywhere(&format!("random-{seed}"), &created(level), level, &script);
    }
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
