//! Errors on demand: the k-th call fails, for every k, in every way that a system has, once or
//! from then on, also inside an open; and after each the store is opened again without the error,
//! after a kill and after power cuts.
//!
//! `IDEMLOG_SCALE` multiplies how many of these trials are made; from about 100 on it is all.

use idemlog::testing::sim::{Fault, FaultKind, Op, PowerCut, Rng, SimDisk, SyncFailure};
use idemlog::{Applied, Durability, Error, ErrorKind, Failure, KeyState, Result};

use super::{KEY, Said, check, copy, created, fill, play, promised, run, scale, secs};
use crate::support::crew::{
    Crew, Ended, FILTER, INTERNAL, NON_REPEATABLE, PROBEABLE, Promised, REPEATABLE,
};

/// Trials of one sweep at scale 1.
const TRIALS: usize = 250;

const SYNC_FAILURES: [SyncFailure; 4] = [
    SyncFailure::MarkClean,
    SyncFailure::StuckSectors,
    SyncFailure::DropPages,
    SyncFailure::KeepDirty,
];

/// A little of everything that touches files: calls, a full segment, a seal, an expiry, and
/// look-ups in what is sealed.
fn workload(crew: &mut Crew, level: Durability) -> Result<()> {
    crew.observe(KEY, None, level)?;
    crew.claim(REPEATABLE, KEY, true)?;
    for space in [PROBEABLE, NON_REPEATABLE] {
        crew.claim(space, KEY, false)?;
        crew.start(space, KEY, b"evidence")?;
    }
    crew.commit(PROBEABLE, KEY, b"outcome", level)?;
    crew.claim(INTERNAL, KEY, false)?;
    crew.fail(INTERNAL, KEY, &Failure::Release)?;
    fill(crew, level, 0, 2, secs(10))?;
    crew.log.maintain()?;
    crew.claim(PROBEABLE, KEY, false)?;
    crew.observe(KEY, None, level)?;
    crew.advance(11_000);
    crew.log.maintain()?;
    crew.observe(b"new", None, level)?;
    crew.claim(NON_REPEATABLE, KEY, false)?;
    crew.forget(FILTER, KEY)?;
    crew.log.maintain()
}

/// Lists every way in which every call of a run can fail: `lines` are its steps.
fn all_faults(lines: &[String], reads: u64) -> Vec<Fault> {
    let mut faults = Vec::new();
    for (k, line) in lines.iter().enumerate() {
        let op = line.split(' ').next().unwrap();
        let bytes = line.rsplit('+').next().and_then(|n| n.parse().ok());
        for kind in FaultKind::ALL {
            for fault in [Fault::once(k as u64, kind), Fault::sticky(k as u64, kind)] {
                match (op, kind) {
                    ("sync" | "sync_dir", FaultKind::Short) => {}
                    ("sync" | "sync_dir", _) => {
                        faults.extend(SYNC_FAILURES.map(|sync| fault.on_sync(sync)));
                    }
                    ("write", FaultKind::Short | FaultKind::Interrupted) => {
                        faults.push(fault.only(Op::Write));
                    }
                    ("write", _) => {
                        let half = bytes.map_or(0, |bytes: usize| bytes / 2);
                        faults.extend([fault, fault.after_bytes(half)]);
                    }
                    (_, FaultKind::Short) => {}
                    _ => faults.push(fault),
                }
            }
        }
    }
    for k in 0..reads {
        for kind in FaultKind::ALL {
            let once = Fault::once(k, kind).reads();
            faults.extend(match kind {
                FaultKind::Short | FaultKind::Interrupted => vec![once.only(Op::Read)],
                _ => vec![once, Fault::sticky(k, kind).reads()],
            });
        }
    }
    faults
}

/// Those of a list that the scale has room for, spread over all of it.
fn sampled(faults: Vec<Fault>) -> Vec<Fault> {
    let stride = faults.len().div_ceil(TRIALS * scale() as usize).max(1);
    // Neighbours differ in kind: a stride that shares no factor with their number meets all.
    let stride = (stride..).find(|s| s % 2 != 0 && s % 3 != 0 && s % 5 != 0);
    faults.into_iter().step_by(stride.unwrap()).collect()
}

/// What the error of a call may be after a fault.
fn judge_kind(fault: &Fault, error: &Error) {
    let expected = match fault.error {
        FaultKind::NoSpace | FaultKind::Quota | FaultKind::TooLarge => ErrorKind::Full,
        _ => ErrorKind::Io,
    };
    let kind = error.kind();
    assert!(kind == expected || kind == ErrorKind::Poisoned, "{error:?}");
}

/// Whether the last step that failed is one after which nothing more may be promised: a flush of
/// records, or a manifest of which nobody knows whether it is in force.
fn must_poison(log: &[String]) -> bool {
    let Some(at) = log.iter().rposition(|line| line.contains(" -> ")) else {
        return false;
    };
    let line = &log[at];
    if let Some(rest) = line.strip_prefix("sync seg-") {
        let record = format!("write seg-{} ", rest.split(' ').next().unwrap());
        return log[..at].iter().any(|before| {
            let offset = before.strip_prefix(&record);
            offset.is_some_and(|rest| !rest.starts_with("0+"))
        });
    }
    let renames = |line: &String| line.starts_with("rename MANIFEST.new MANIFEST");
    renames(line) || line.starts_with("sync_dir") && at > 0 && renames(&log[at - 1])
}

/// After an error: a poisoned store says nothing is new, any other goes on.
fn go_on(crew: &mut Crew, disk: &SimDisk, fault: &Fault, error: Error) -> Error {
    judge_kind(fault, &error);
    let poisoned = crew.log.health().poisoned.is_some();
    if poisoned {
        let answers = [
            crew.filter.observe(b"fresh").map(|_| ()),
            crew.filter.get(b"fresh").map(|_| ()),
            crew.filter.forget(b"fresh").map(|_| ()),
            crew.desk(REPEATABLE)
                .claim(b"fresh", &Default::default())
                .map(|_| ()),
            crew.log.sync(),
        ];
        for answer in answers {
            assert_eq!(answer.unwrap_err().kind(), ErrorKind::Poisoned);
        }
        // What was durable before is told still.
        let durable = crew.p.floor_power > 0 && crew.p.oracle.journal[0].0 == (FILTER, KEY.into());
        let is_moved = crew.log.stats().carried_count > 0;
        if durable && !is_moved && crew.p.oracle.get(FILTER, KEY) == KeyState::Seen {
            assert_eq!(crew.filter.get(KEY).unwrap(), KeyState::Seen);
        }
        return error;
    }
    assert!(!must_poison(&disk.step_log()), "not poisoned: {error:?}");
    if !fault.sticky {
        crew.observe(b"after the error", None, Durability::Power)
            .unwrap();
        crew.log.maintain().unwrap();
    }
    error
}

/// Plays with a fault, and judges what is left.
fn trial(base: &SimDisk, start: &Promised, fault: Fault, rng: &mut Rng) {
    let disk = base.after_kill();
    disk.fail(fault);
    let _said = Said(format!("fault={fault:?}"));
    let level = start.level;
    let (promised, result) = play(&disk, copy(start), &|crew| {
        run(crew, |crew| {
            workload(crew, level).map_err(|error| go_on(crew, &disk, &fault, error))
        })
    });
    judge_result(&fault, &result);
    disk.clear_faults();
    let kept = fault.sync != SyncFailure::DropPages;
    judge_disks(&disk, &promised, kept, rng);
}

fn judge_result(fault: &Fault, result: &Result<()>) {
    if let Err(error) = result {
        judge_kind(fault, error);
    }
    // A short or interrupted transfer is nobody's business.
    let is_transfer = matches!(fault.only, Some(Op::Read | Op::Write));
    if is_transfer && matches!(fault.error, FaultKind::Short | FaultKind::Interrupted) {
        result.as_ref().unwrap();
    }
}

/// Pages that a failed sync has dropped are lost to a kill as to a power cut.
fn judge_disks(disk: &SimDisk, promised: &Promised, kept: bool, rng: &mut Rng) {
    let cut = |mut cut| disk.after_power_cut(&mut cut);
    check(&disk.after_kill(), copy(promised), kept, true);
    check(&cut(PowerCut::drop_all()), copy(promised), false, false);
    let seed = rng.next_u64();
    check(&cut(PowerCut::seeded(seed)), copy(promised), false, true);
}

/// I2, I9, P3, P7.
#[test]
fn every_call_fails_in_turn() {
    for level in [Durability::Process, Durability::Power] {
        let base = created(level);
        let whole = base.after_kill();
        let script = move |crew: Crew| run(crew, |crew| workload(crew, level));
        play(&whole, promised(level), &script).1.unwrap();
        let (lines, reads) = (whole.step_log(), whole.counts().reads);
        let faults = sampled(all_faults(&lines, reads));
        let mut rng = Rng::new(3);
        for fault in &faults {
            trial(&base, &promised(level), *fault, &mut rng);
        }
        println!(
            "faults: scenario=calls level={level:?} steps={} reads={reads} trials={}",
            lines.len(),
            faults.len()
        );
    }
}

/// A store whose process died while a segment was full and claims were open.
fn left_behind(level: Durability) -> (SimDisk, Promised) {
    let base = created(level);
    let script = move |crew: Crew| {
        run(crew, |crew| {
            crew.claim(NON_REPEATABLE, KEY, false)?;
            crew.start(NON_REPEATABLE, KEY, b"")?;
            fill(crew, level, 0, 3, secs(600))
        })
    };
    let whole = base.after_kill();
    play(&whole, promised(level), &script).1.unwrap();
    let died = base.after_kill();
    died.stop_at(whole.steps() - 12);
    let (promised, _) = play(&died, promised(level), &script);
    (died.after_kill(), promised)
}

/// Errors inside recovery: the next open, without them, finds everything.
#[test]
fn an_open_that_fails_at_any_call_loses_nothing() {
    let level = Durability::Process;
    let (left, promised) = left_behind(level);
    let open = |disk: &SimDisk| -> Ended {
        match Crew::open(disk, copy(&promised)) {
            Ok(crew) => crew.close(),
            Err(ended) => ended,
        }
    };
    let whole = left.after_kill();
    open(&whole).1.unwrap();
    let (lines, reads) = (whole.step_log(), whole.counts().reads);
    let faults = sampled(all_faults(&lines, reads));
    let mut rng = Rng::new(5);
    for fault in &faults {
        let disk = left.after_kill();
        disk.fail(*fault);
        let _said = Said(format!("open fault={fault:?}"));
        judge_result(fault, &open(&disk).1);
        disk.clear_faults();
        let kept = fault.sync != SyncFailure::DropPages;
        judge_disks(&disk, &promised, kept, &mut rng);
    }
    println!(
        "faults: scenario=open level={level:?} steps={} reads={reads} trials={}",
        lines.len(),
        faults.len()
    );
}

/// Reads that fail outside of an open: the answer is an error, and right once they work again.
#[test]
fn a_look_up_that_cannot_read_says_so() {
    let level = Durability::Process;
    let (left, promised) = left_behind(level);
    let mut failed = 0;
    for k in 0..16 {
        for kind in FaultKind::ALL {
            let disk = left.after_kill();
            let mut crew = super::reopen(&disk, copy(&promised));
            crew.settle(promised.floor_kill);
            // Written to the active segment, which is read by calls; what is sealed is mapped.
            let keys: Vec<_> = (500..512).map(super::long_key).collect();
            crew.observe_many(&keys, secs(600), level).unwrap();
            let first = disk.counts().reads + k;
            disk.fail(Fault::sticky(first, kind).reads().only(Op::Read));
            let _said = Said(format!("read k={k} kind={kind:?}"));
            for n in (0..40).chain(500..512) {
                let key = super::long_key(n);
                match crew.filter.get(&key) {
                    Ok(state) => assert_eq!(state, crew.p.oracle.get(FILTER, &key)),
                    Err(error) => {
                        failed += 1;
                        assert_eq!(error.applied(), Applied::No);
                        judge_kind(&Fault::once(0, kind), &error);
                    }
                }
            }
            assert_eq!(crew.log.health().poisoned, None);
            disk.clear_faults();
            crew.observe(b"again", None, level).unwrap();
            crew.settle(crew.p.oracle.journal.len());
            crew.close().1.unwrap();
        }
    }
    println!("faults: scenario=look-up errors={failed}");
    assert!(failed > 0);
}
