//! The manifest: the one small file that names the current state, and the order of the steps
//! around it.

use std::sync::Arc;
use std::time::Duration;

use idemlog::testing::sim::{CrashOptions, Fault, FaultKind, Op, SimDisk, for_each_crash_point};
use idemlog::{DedupLog, Durability, ErrorKind, KeyState, ObserveOptions, Repeatable};

use super::{Twin, aftermath, clock, compare, filter, image, long, options, small};
use crate::golden::bytes;

fn open(disk: &SimDisk) -> DedupLog {
    options(&clock()).open_on(disk.dir()).unwrap()
}

/// A store of sealed segments, and what it must answer.
fn sealed() -> (SimDisk, Twin) {
    let disk = SimDisk::new();
    let log = open(&disk);
    let mut twin = Twin::new();
    while log.stats().seals_count < 4 {
        let key = long("key", twin.len());
        assert!(filter(&log).observe(&key).unwrap().is_new());
        twin.insert(key, true);
    }
    log.close().unwrap();
    twin.insert("stranger".into(), false);
    (disk, twin)
}

#[test]
fn c64_a_manifest_cut_at_any_byte_zeroed_from_any_or_doubled_is_never_a_fresh_store() {
    let (disk, twin) = sealed();
    let whole = disk.read_file("MANIFEST").unwrap();
    let mut bad: Vec<(String, Option<Vec<u8>>)> = vec![
        ("twice".into(), Some([&whole[..], &whole].concat())),
        ("its last line twice".into(), {
            Some([&whole[..], &whole[whole.len() - 24..]].concat())
        }),
        ("deleted".into(), None),
    ];
    for cut in 0..whole.len() {
        bad.push((format!("cut at {cut}"), Some(whole[..cut].to_vec())));
        let mut zeroed = whole.clone();
        zeroed[cut..].fill(0);
        if zeroed != whole {
            bad.push((format!("zeroed from {cut}"), Some(zeroed)));
        }
    }
    for (what, content) in bad {
        for leftover in [false, true] {
            let copy = disk.after_kill();
            match &content {
                Some(content) => copy.write_file("MANIFEST", content.clone()),
                None => assert!(copy.remove_file("MANIFEST")),
            }
            if leftover {
                // The next manifest, half written: never taken for the one in force.
                copy.write_file("MANIFEST.new", &whole[..whole.len() / 2]);
            }
            let before = image(&copy);
            for create in [true, false] {
                let error = options(&clock())
                    .create(create)
                    .open_on(copy.dir())
                    .unwrap_err();
                // Without its format number it is of another format; missing, of no store.
                let other = what == "zeroed from 8" || what == "zeroed from 9" || !create;
                let kinds: &[ErrorKind] = if other {
                    &[ErrorKind::Damaged, ErrorKind::Incompatible]
                } else {
                    &[ErrorKind::Damaged]
                };
                assert!(kinds.contains(&error.kind()), "{what}: {error:?}");
                assert!(error.file().is_some(), "{what}: {error:?}");
            }
            assert!(before == image(&copy), "{what}: files were changed");
            // Restored, everything acknowledged is there.
            copy.write_file("MANIFEST", whole.clone());
            let log = open(&copy);
            compare(&filter(&log), &twin, &what);
        }
    }
}

/// Checks the steps around each change of the manifest, and returns how many changes there were.
fn check_switches(log: &[String]) -> usize {
    let mut switches = 0;
    let mut written = false;
    let mut synced = false;
    for (index, step) in log.iter().enumerate() {
        if step.starts_with("write MANIFEST.new") || step.starts_with("create MANIFEST.new") {
            (written, synced) = (true, false);
        } else if step.starts_with("sync MANIFEST.new") {
            synced = true;
        } else if step.starts_with("rename MANIFEST.new MANIFEST") {
            assert!(written && synced, "renamed before it was synced: {index}");
            let next = &log[index + 1];
            assert!(next.starts_with("sync_dir"), "after the rename: {next}");
            (written, synced) = (false, false);
            switches += 1;
        }
    }
    switches
}

#[test]
fn c64_each_switch_syncs_the_content_renames_syncs_the_directory_and_then_removes() {
    let disk = SimDisk::new();
    let clock = clock();
    let log = options(&clock).open_on(disk.dir()).unwrap();
    let minute = ObserveOptions::new().retention(Duration::from_secs(60));
    for n in 0..150 {
        assert!(filter(&log).observe(long("kept", n)).unwrap().is_new());
    }
    for round in 0..3 {
        for n in 0..120 {
            let key = long(&format!("round{round}"), n);
            assert!(filter(&log).observe_with(&key, &minute).unwrap().is_new());
        }
        clock.advance_ms(61_000);
        for _ in 0..3 {
            log.maintain().unwrap();
        }
    }
    let stats = log.stats();
    assert!(stats.drops_count > 3 && stats.merges_count > 0, "{stats:?}");
    log.close().unwrap();
    let steps = disk.step_log();
    assert!(check_switches(&steps) > 10);
    // A segment goes only after a manifest without it is in force.
    for (index, step) in steps.iter().enumerate() {
        let Some(name) = step
            .strip_prefix("unlink seg-")
            .or(step.strip_prefix("unlink run-"))
        else {
            continue;
        };
        if name.ends_with(".tmp") {
            continue;
        }
        let before = steps[..index]
            .iter()
            .rposition(|step| step.starts_with("rename MANIFEST"));
        let before = before.expect("nothing goes before the first manifest");
        assert!(steps[before + 1].starts_with("sync_dir"), "{step}");
    }
}

#[test]
fn c05_a_new_name_is_synced_before_anything_is_acknowledged_that_needs_it() {
    let disk = SimDisk::new();
    let log = open(&disk);
    let mut twin = Twin::new();
    let mut checked = 0;
    for n in 0..130 {
        let key = long("key", n);
        let from = disk.step_log().len();
        assert!(filter(&log).observe(&key).unwrap().is_new());
        twin.insert(key, true);
        // No name is made, renamed or removed after the last sync of the directory that a
        // promise could need: what is still open at the answer are temporaries and removals.
        let steps = disk.step_log();
        let synced = steps
            .iter()
            .rposition(|step| step.starts_with("sync_dir"))
            .unwrap();
        let open: Vec<&String> = steps[synced..]
            .iter()
            .filter(|s| s.starts_with("create seg-") || s.starts_with("rename"))
            .collect();
        assert!(open.is_empty(), "acknowledged before {open:?} is durable");
        checked += usize::from(steps.len() > from + 4);
    }
    assert!(checked > 3, "no call made a new segment");
    // Everything acknowledged survives although names that were not synced are lost.
    let cut = disk.after_power_cut(&mut idemlog::testing::sim::PowerCut::drop_all());
    aftermath(&cut, &open, &twin, "names lost");
}

#[test]
fn c05_names_that_a_power_cut_loses_cost_no_acknowledged_key() {
    let base = SimDisk::new();
    open(&base).close().unwrap();
    let told = std::cell::Cell::new(0);
    let clock = clock();
    let crash = CrashOptions {
        base,
        outcomes_max: 16,
        seeded_count: 2,
        inside_count: 0,
        ..CrashOptions::default()
    };
    let minute = ObserveOptions::new().retention(Duration::from_secs(60));
    let scenario = |disk: &SimDisk| {
        told.set(0);
        let clock = super::clock();
        let Ok(log) = options(&clock).open_on(disk.dir()) else {
            return;
        };
        let Ok(filter) = log.filter("f", small()) else {
            return;
        };
        for n in 0..45 {
            if filter.observe(long("key", n)).is_err() {
                return;
            }
            told.set(n + 1);
            let _unused = filter.observe_with(long("short", n), &minute);
        }
        clock.advance_ms(61_000);
        let _unused = log.maintain();
        let _unused = log.maintain();
    };
    for_each_crash_point(&crash, scenario, |state| {
        let log = options(&clock).open_on(state.disk.dir()).unwrap();
        for n in 0..told.get() {
            let seen = filter(&log).get(long("key", n)).unwrap();
            assert_eq!(seen, KeyState::Seen, "{state}: key {n}");
        }
        assert_eq!(filter(&log).get("stranger").unwrap(), KeyState::Absent);
    });
}

#[test]
fn c05_a_directory_that_cannot_be_synced_is_an_error_and_costs_nothing() {
    // Which sync of the directory fails: of the creation, of a roll, of a seal, of a drop.
    for nth in 0..12 {
        for sticky in [false, true] {
            let what = format!("directory sync {nth}, sticky {sticky}");
            let (disk, clock) = (SimDisk::new(), clock());
            let syncs = Arc::new(std::sync::atomic::AtomicU64::new(0));
            let counted = Arc::clone(&syncs);
            let dir = crate::support::rigged::rigged(disk.dir(), move |op, _| {
                let failing = op == Op::DirSync && {
                    let count = counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    count == nth || sticky && count > nth
                };
                if failing {
                    Err(FaultKind::Io.error())
                } else {
                    Ok(())
                }
            });
            let mut twin = Twin::new();
            let mut errors = 0;
            match options(&clock).open_on(dir) {
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Io, "{what}: {error:?}");
                    errors += 1;
                }
                Ok(log) => {
                    for n in 0..100 {
                        let key = long("key", n);
                        match log.filter("f", small()).and_then(|f| f.observe(&key)) {
                            Ok(_) => {
                                twin.insert(key, true);
                            }
                            Err(error) => {
                                let kinds = [ErrorKind::Io, ErrorKind::Poisoned];
                                assert!(kinds.contains(&error.kind()), "{what}: {error:?}");
                                errors += 1;
                            }
                        }
                    }
                    let _unused = log.close();
                }
            }
            assert!(errors > 0 || syncs.load(std::sync::atomic::Ordering::Relaxed) <= nth);
            for disk in [
                disk.after_kill(),
                disk.after_power_cut(&mut idemlog::testing::sim::PowerCut::drop_all()),
            ] {
                aftermath(
                    &disk,
                    &|disk| options(&clock).open_on(disk.dir()).unwrap(),
                    &twin,
                    &what,
                );
            }
        }
    }
}

#[test]
fn c53_a_process_killed_on_a_full_disk_opens_on_it_or_says_so_and_opens_when_there_is_space() {
    // Sizes from "the first segment does not fit" to "several index runs fit".
    for free in (0..24 * 1024).step_by(1536) {
        let base = SimDisk::new();
        let log = open(&base);
        assert!(filter(&log).observe("first").unwrap().is_new());
        log.close().unwrap();
        let disk = base.after_kill();
        disk.set_free_bytes(Some(free));
        let mut twin = Twin::from([("first".to_owned(), true)]);
        fill_until_refused(&disk, &mut twin);
        let steps = disk.steps();
        // Killed at different points while the disk is full: also inside the refused call.
        for back in [0, 1, 2, 3, 5, 8, 13] {
            let what = format!("{free} bytes free, killed {back} steps before the end");
            let disk = base.after_kill();
            disk.set_free_bytes(Some(free));
            disk.stop_at(steps.saturating_sub(back));
            let mut twin = Twin::from([("first".to_owned(), true)]);
            fill_until_refused(&disk, &mut twin);
            let killed = disk.after_kill();
            killed.set_free_bytes(disk.free_bytes());
            let before = image(&killed);
            match options(&clock()).open_on(killed.dir()) {
                Ok(log) => {
                    compare(&filter_or_known(&log), &twin, &what);
                    drop(log);
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Full, "{what}: {error:?}");
                    // Recovery may have cut a torn tail again; no record is touched.
                    let after = image(&killed);
                    let is_log = |name: &str, content: &[u8]| {
                        name.starts_with("seg-") && content.starts_with(b"idemlogS")
                    };
                    for (name, content) in before.iter().filter(|(n, c)| is_log(n, c)) {
                        let (was, is) = (bytes::frames(content), bytes::frames(&after[name]));
                        assert_eq!(was.len(), is.len(), "{what}: {name} was changed");
                    }
                }
            }
            // Space is freed: no option, no repair, nothing lost.
            killed.set_free_bytes(None);
            let log = open(&killed);
            compare(&filter(&log), &twin, &what);
            for n in 0..30 {
                assert!(
                    filter(&log).observe(long("late", n)).unwrap().is_new(),
                    "{what}"
                );
            }
            drop(log);
            let mut twin = twin.clone();
            twin.extend((0..30).map(|n| (long("late", n), true)));
            twin.insert("stranger".into(), false);
            aftermath(&killed, &open, &twin, &what);
        }
    }
}

/// The filter was made before the disk was full.
fn filter_or_known(log: &DedupLog) -> idemlog::Filter {
    log.filter("f", small()).unwrap()
}

fn fill_until_refused(disk: &SimDisk, twin: &mut Twin) {
    let Ok(log) = options(&clock()).open_on(disk.dir()) else {
        return;
    };
    let Ok(filter) = log.filter("f", small()) else {
        return;
    };
    let mut refused = 0;
    for n in 0..400 {
        let key = long("key", n);
        match filter.observe(&key) {
            Ok(observed) => {
                assert!(observed.is_new());
                twin.insert(key, true);
            }
            Err(_) => refused += 1,
        }
        if refused == 4 {
            break;
        }
    }
    let _unused = log.maintain();
}

#[test]
fn c53_claims_owed_on_a_full_disk_survive_a_kill_on_it() {
    let disk = SimDisk::new();
    let log = open(&disk);
    let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
    let mut claims: Vec<_> = (0..30)
        .map(|n| super::new(jobs.claim(long("job", n)).unwrap()))
        .collect();
    disk.set_free_bytes(Some(0));
    for claim in claims.iter_mut().take(20) {
        let commit = idemlog::Commit::without_outcome().durability(Durability::Power);
        let _committed = claim.commit_with(commit).unwrap();
    }
    let killed = disk.after_kill();
    killed.set_free_bytes(Some(0));
    match options(&clock()).open_on(killed.dir()) {
        Ok(log) => check_jobs(&log),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Full, "{error:?}"),
    }
    killed.set_free_bytes(None);
    check_jobs(&open(&killed));
}

fn check_jobs(log: &DedupLog) {
    let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
    for n in 0..30 {
        let state = jobs.get(long("job", n)).unwrap();
        assert_eq!(matches!(state, KeyState::Done(_)), n < 20, "{n}: {state:?}");
    }
}

/// A planned error for the unused kinds of calls: each is typed, and none harms what is there.
#[test]
fn c53_quotas_and_file_size_limits_are_a_full_disk_too() {
    for kind in [FaultKind::NoSpace, FaultKind::Quota, FaultKind::TooLarge] {
        for op in [Op::Write, Op::Allocate, Op::Create] {
            let (disk, twin) = sealed();
            let log = open(&disk);
            disk.fail(Fault::sticky(disk.steps(), kind).only(op));
            let mut errors = 0;
            for n in 0..60 {
                if let Err(error) = filter(&log).observe(long("late", n)) {
                    assert_eq!(error.kind(), ErrorKind::Full, "{kind:?} {op:?}: {error:?}");
                    errors += 1;
                }
            }
            assert!(errors > 0, "{kind:?} {op:?}");
            assert!(log.health().poisoned.is_none(), "{kind:?} {op:?}");
            compare(&filter(&log), &twin, "full");
            disk.clear_faults();
            assert!(
                filter(&log).observe("after").unwrap().is_new(),
                "{kind:?} {op:?}"
            );
            let mut twin = twin;
            twin.insert("after".into(), true);
            aftermath(&disk.after_kill(), &open, &twin, "no longer full");
        }
    }
}

#[test]
fn c09_a_file_of_another_format_is_refused_or_built_again_and_never_decoded() {
    let (disk, twin) = sealed();
    for (name, whole) in image(&disk) {
        let head = match name.rsplit('.').next().unwrap() {
            "MANIFEST" => whole.len(),
            "log" | "flt" => 64,
            "idx" => 4096,
            _ => continue,
        };
        let own = u64::from(name.ends_with("flt")) + 1;
        for format in [0, 3 - own, 255, 0xffff] {
            // With a checksum of today and with one that today cannot compute.
            for fixed in [true, false] {
                let what = format!("{name} of format {format}, checksum right: {fixed}");
                let copy = disk.after_kill();
                let mut other = whole.clone();
                bytes::put(&mut other, 8, 2, format);
                if fixed {
                    bytes::fix_end(&mut other[..head]);
                }
                copy.write_file(&name, other);
                let before = image(&copy);
                match options(&clock()).open_on(copy.dir()) {
                    // An index is derived: it is built again, and every answer is right.
                    Ok(log) => {
                        assert!(name.starts_with("run-"), "{what} was opened");
                        assert!(log.open_report().rebuilt_runs_count > 0, "{what}");
                        compare(&filter(&log), &twin, &what);
                    }
                    Err(error) => {
                        assert!(!name.starts_with("run-"), "{what}: {error:?}");
                        assert!(before == image(&copy), "{what}: files were changed");
                        assert!(error.file().is_some_and(|file| file == name), "{error:?}");
                        if name == "MANIFEST" {
                            assert_eq!(error.kind(), ErrorKind::Incompatible, "{what}: {error:?}");
                            let text = error.to_string();
                            let facts = format!("found={format} readable=1");
                            assert!(text.contains(&facts), "{text}");
                        } else {
                            let kinds = [ErrorKind::Incompatible, ErrorKind::Damaged];
                            assert!(kinds.contains(&error.kind()), "{what}: {error:?}");
                        }
                    }
                }
            }
        }
    }
}
