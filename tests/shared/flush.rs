//! A process dies within its flush: nobody knows whether the kernel told it of a failure, so the
//! next one looks at what the device holds.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use idemlog::testing::sim::{Fault, FaultKind, Op, PowerCut, SimDisk, SyncFailure};
use idemlog::{Applied, Durability, ErrorKind, ObserveOptions};

use super::{Member, big, clock, options, small};
use crate::support::rigged::Rigged;

/// Says whether a flush is marked as under way: docs/format.md section 10.
fn is_flushing(disk: &SimDisk) -> bool {
    let cells = disk.read_file("SHARED").unwrap();
    u64::from_le_bytes(cells[200..208].try_into().unwrap()) == 1
}

/// What the next one finds when it looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// What the disk says.
    AsItIs,
    /// There is no way to look.
    CannotLook,
    /// Other bytes.
    Other,
    /// The device fails.
    Fails,
}

#[test]
fn who_flushes_behind_a_dead_one_looks_first() {
    for found in [Found::AsItIs, Found::CannotLook, Found::Other, Found::Fails] {
        let mut caught = 0;
        for step in 0..40 {
            let (disk, clock) = (SimDisk::seeded(3), clock());
            let a = Member::open(&disk, &clock);
            let looks = Arc::new(AtomicUsize::new(0));
            let counted = Arc::clone(&looks);
            let process = disk.process();
            let dir = Rigged::new(process.dir(), |_, _| Ok(())).on_holds(move |held| {
                counted.fetch_add(1, Ordering::SeqCst);
                match found {
                    Found::AsItIs => Ok(held),
                    Found::CannotLook => Ok(None),
                    Found::Other => Ok(Some(false)),
                    Found::Fails => Err(io::Error::from_raw_os_error(5)),
                }
            });
            let log = options(&clock).open_on(dir.dir()).unwrap();
            let filter = log.filter("f", small()).unwrap();
            // Some of it is in a segment that is full, and not flushed.
            for n in 0..18 {
                assert!(filter.observe(big(n)).unwrap().is_new());
            }
            let power = ObserveOptions::new().durability(Durability::Power);
            a.process.kill_at(disk.steps() + step, 0);
            let killed = a.filter.observe_with("k", &power).is_err();
            if !killed || !is_flushing(&disk) {
                // Before the flush, or behind it.
                a.kill();
                assert!(filter.observe_with("next", &power).unwrap().is_new());
                assert_eq!(looks.load(Ordering::SeqCst), 0, "{found:?} {step}");
                continue;
            }
            caught += 1;
            a.kill();
            let before = disk.step_log().len();
            let next = filter.observe_with("next", &power);
            let looked = looks.load(Ordering::SeqCst);
            assert!(looked > 0, "{found:?} {step}");
            match found {
                Found::AsItIs | Found::CannotLook => {
                    assert!(next.unwrap().is_new(), "{found:?} {step}");
                    assert!(!is_flushing(&disk), "{found:?} {step}");
                    let steps = disk.step_log().split_off(before);
                    let syncs = steps.iter().filter(|step| step.starts_with("sync seg-"));
                    let syncs_count = syncs.count();
                    if found == Found::CannotLook {
                        // All that was looked at was written and flushed once more.
                        assert!(syncs_count > looked, "{step} {looked} {steps:?}");
                    }
                    // Nothing is left to look at.
                    assert!(filter.observe_with("more", &power).unwrap().is_new());
                    assert_eq!(looks.load(Ordering::SeqCst), looked, "{found:?} {step}");
                    let cut = disk.after_power_cut(&mut PowerCut::drop_all());
                    let log = options(&clock).shared(false).open_on(cut.dir()).unwrap();
                    let filter = log.filter("f", small()).unwrap();
                    for key in ["next".to_owned(), "more".to_owned(), big(0), big(17)] {
                        assert!(!filter.observe(&key).unwrap().is_new(), "{step} {key}");
                    }
                }
                Found::Other | Found::Fails => {
                    let error = next.unwrap_err();
                    assert_eq!(
                        error.kind(),
                        ErrorKind::Poisoned,
                        "{found:?} {step} {error}"
                    );
                    assert_eq!(error.applied(), Applied::Maybe, "{found:?} {step} {error}");
                    let refused = options(&clock).open_on(disk.dir()).unwrap_err();
                    assert_eq!(refused.kind(), ErrorKind::Poisoned, "{refused}");
                    log.close().unwrap_err();
                    let c = Member::open(&disk, &clock);
                    assert!(!c.filter.observe(big(3)).unwrap().is_new());
                    assert!(c.filter.observe_with("later", &power).unwrap().is_new());
                }
            }
        }
        println!("{found:?}: killed within a flush {caught} times");
        assert!(caught >= 2, "{found:?} {caught}");
    }
}

/// The flush of the dead one had failed, and the kernel told nobody else: its pages are clean now.
#[test]
fn a_failure_that_only_a_dead_one_was_told_of_is_found() {
    for (sync, is_lost) in [
        (SyncFailure::MarkClean, true),
        (SyncFailure::StuckSectors, true),
        (SyncFailure::KeepDirty, false),
    ] {
        let (disk, clock) = (SimDisk::seeded(3), clock());
        let a = Member::open(&disk, &clock);
        let b = Member::open(&disk, &clock);
        let power = ObserveOptions::new().durability(Durability::Power);
        assert!(b.filter.observe_with("before", &power).unwrap().is_new());
        assert!(b.filter.observe("quick").unwrap().is_new());
        let mut fault = Fault::once(disk.steps(), FaultKind::Io).only(Op::Sync);
        fault.sync = sync;
        disk.fail(fault);
        // Its next step would be to tell the others: append, mark, end of the turn, flush.
        let steps = {
            let log = disk.step_log().len() as u64;
            log + 4
        };
        a.process.kill_at(steps, 0);
        a.filter.observe_with("k", &power).unwrap_err();
        assert!(a.process.is_dead());
        assert!(is_flushing(&disk), "{sync:?}");
        let last = disk.step_log().pop().unwrap();
        assert!(last.starts_with("sync seg-"), "{sync:?} {last}");
        a.kill();
        let next = b.filter.observe_with("next", &power);
        if is_lost {
            let error = next.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Poisoned, "{sync:?} {error}");
        } else {
            assert!(next.unwrap().is_new(), "{sync:?}");
        }
        let cut = disk.after_power_cut(&mut PowerCut::drop_all());
        let log = options(&clock).shared(false).open_on(cut.dir()).unwrap();
        let filter = log.filter("f", small()).unwrap();
        assert!(!filter.observe("before").unwrap().is_new(), "{sync:?}");
        assert_eq!(
            filter.observe("next").unwrap().is_new(),
            is_lost,
            "{sync:?}"
        );
    }
}
