//! The log itself: junk of unfinished appends, torn tails, holes, and recoveries that are killed.

use std::sync::Arc;
use std::time::Duration;

use idemlog::testing::sim::{
    CrashOptions, Fault, FaultKind, Op, PowerCut, Rng, SimDisk, SyncFailure, for_each_crash_point,
};
use idemlog::{
    Applied, DedupLog, Durability, ErrorKind, KeyState, ObserveOptions, Observed, Repeatable,
    Retention,
};

use super::{
    Twin, aftermath, bytes_of_files, clock, compare, filter, image, long, new, options,
    remove_index, segments, small,
};
use crate::golden::bytes;

fn open(disk: &SimDisk) -> DedupLog {
    options(&clock()).open_on(disk.dir()).unwrap()
}

/// A store in which one key is durable.
fn started() -> SimDisk {
    let disk = SimDisk::new();
    let log = open(&disk);
    assert!(filter(&log).observe("first").unwrap().is_new());
    disk.after_kill()
}

fn numbered(word: &str, count: usize) -> Twin {
    (0..count).map(|n| (format!("{word}-{n}"), true)).collect()
}

fn observe_all(log: &DedupLog, twin: &Twin) {
    for key in twin.keys() {
        assert!(filter(log).observe(key).unwrap().is_new(), "{key}");
    }
}

/// Counts the records of all segments, and shows that nothing unreadable lies between them.
fn records_of(disk: &SimDisk) -> usize {
    let mut count = 0;
    for name in segments(disk) {
        let content = disk.read_file(&name).unwrap();
        let frames = bytes::frames(&content);
        let end = frames.last().map_or(64, |f| f.offset + f.bytes.len());
        assert!(
            content[end..].iter().all(|byte| *byte == 0),
            "{name}: bytes behind the last frame at {end}"
        );
        count += frames.iter().filter(|frame| frame.kind < 16).count();
    }
    count
}

#[test]
fn c15_a_write_that_fails_after_any_byte_leaves_no_junk_and_no_key() {
    let base = started();
    let dry = base.after_kill();
    let before = dry.counts().written_bytes;
    let log = open(&dry);
    let opened = dry.counts().written_bytes;
    assert!(filter(&log).observe("failed").unwrap().is_new());
    let record_bytes = (dry.counts().written_bytes - opened) as usize;
    assert!(opened >= before && (24..200).contains(&record_bytes));
    for error in [FaultKind::NoSpace, FaultKind::Io] {
        for kept in 0..record_bytes {
            let disk = base.after_kill();
            let log = open(&disk);
            let fault = Fault::once(disk.steps(), error).only(Op::Write);
            disk.fail(fault.after_bytes(kept));
            let failed = filter(&log).observe("failed").unwrap_err();
            assert_eq!(failed.applied(), Applied::No, "{kept}: {failed:?}");
            let mut twin = numbered("later", 100);
            observe_all(&log, &twin);
            let killed = disk.after_kill();
            assert_eq!(records_of(&killed), 101, "{error:?} after {kept} bytes");
            twin.insert("first".into(), true);
            twin.insert("failed".into(), false);
            aftermath(
                &killed,
                &open,
                &twin,
                &format!("{error:?} after {kept} bytes"),
            );
        }
    }
}

#[test]
fn c15_a_process_killed_inside_an_append_leaves_no_junk_before_what_is_written_next() {
    let base = started();
    for kept in 0..120 {
        let disk = base.after_kill();
        let log = open(&disk);
        disk.stop_inside(disk.steps(), kept);
        assert!(filter(&log).observe("torn").is_err());
        let killed = disk.after_kill();
        drop(log);
        let log = open(&killed);
        // Whole or absent, and the same for ever.
        let torn = filter(&log).get("torn").unwrap() == KeyState::Seen;
        let mut twin = numbered("later", 100);
        observe_all(&log, &twin);
        let killed = killed.after_kill();
        assert_eq!(records_of(&killed), 101 + usize::from(torn), "{kept}");
        twin.insert("first".into(), true);
        twin.insert("torn".into(), torn);
        aftermath(&killed, &open, &twin, &format!("killed after {kept} bytes"));
    }
}

#[test]
fn c30_of_ten_thousand_keys_a_last_record_cut_at_every_byte_costs_itself_only() {
    let mib = |disk: &SimDisk| {
        let options = options(&clock()).segment_bytes(1 << 20);
        options.open_on(disk.dir()).unwrap()
    };
    let disk = SimDisk::memory();
    let log = mib(&disk);
    let keys: Vec<String> = (0..10_000).map(|n| format!("key-{n}")).collect();
    for chunk in keys.chunks(500) {
        let answers = filter(&log).observe_many(chunk).unwrap();
        assert!(answers.into_iter().all(|answer| answer.unwrap().is_new()));
    }
    assert!(filter(&log).observe("last").unwrap().is_new());
    let killed = disk.after_kill();
    let name = segments(&killed)
        .into_iter()
        .rfind(|name| !bytes::frames(&killed.read_file(name).unwrap()).is_empty())
        .unwrap();
    let whole = killed.read_file(&name).unwrap();
    // Behind the last key stands the mark that proves the one before it.
    let frames = bytes::frames(&whole);
    let last = frames.iter().rfind(|frame| frame.kind < 16).unwrap();
    let end = last.offset + last.bytes.len();
    for cut in last.offset..=end {
        for shorter in [false, true] {
            let copy = killed.after_kill();
            let mut bad = whole[..cut].to_vec();
            if !shorter {
                bad.resize(whole.len(), 0);
            }
            copy.write_file(&name, bad);
            let log = mib(&copy);
            let kept = filter(&log).get("last").unwrap() == KeyState::Seen;
            assert!(kept || cut < end, "whole");
            // What is cut was not acknowledged as far as the bytes can tell, and is reported.
            let torn = !kept && whole[last.offset..cut].iter().any(|byte| *byte != 0);
            assert_eq!(log.open_report().dropped_bytes > 0, torn, "cut at {cut}");
            let mut twin = numbered("late", 10);
            observe_all(&log, &twin);
            twin.insert("last".into(), kept);
            twin.extend(keys.iter().step_by(97).map(|key| (key.clone(), true)));
            twin.insert("key-9999".into(), true);
            let log = mib(&copy.after_kill());
            compare(&filter(&log), &twin, &format!("cut at {cut}"));
        }
    }
}

/// A store of sealed segments, of keys that a flush has covered, and of keys that none has.
fn unsynced() -> (SimDisk, Twin, Twin, String) {
    let disk = SimDisk::memory();
    let clock = clock();
    let log = options(&clock)
        .segment_bytes(64 * 1024)
        .sync_interval(Duration::from_secs(3600))
        .open_on(disk.dir())
        .unwrap();
    let mut synced: Twin = (0..600).map(|n| (long("synced", n), true)).collect();
    observe_all(&log, &synced);
    synced.insert(long("synced", 600), true);
    assert!(filter(&log).observe(long("synced", 600)).unwrap().is_new());
    let process = ObserveOptions::new().durability(Durability::Process);
    let unsynced: Twin = (0..150).map(|n| (long("unsynced", n), true)).collect();
    for key in unsynced.keys() {
        let seen = filter(&log).observe_with(key, &process).unwrap();
        assert!(seen.is_new());
    }
    let killed = disk.after_kill();
    let name = segments(&killed)
        .into_iter()
        .rfind(|name| !bytes::frames(&killed.read_file(name).unwrap()).is_empty())
        .unwrap();
    (killed, synced, unsynced, name)
}

/// The first offset of the newest segment that no flush has covered.
fn unsynced_from(content: &[u8], unsynced: &Twin) -> usize {
    let frames = bytes::frames(content);
    let of_unsynced = |frame: &&bytes::Frame| {
        frame.kind < 16
            && unsynced
                .keys()
                .any(|key| frame.record().key == key.as_bytes())
    };
    frames.iter().find(of_unsynced).unwrap().offset
}

#[test]
fn c28_behind_a_hole_in_the_unsynced_part_nothing_counts_and_nothing_before_it_is_lost() {
    let (killed, synced, unsynced, name) = unsynced();
    let whole = killed.read_file(&name).unwrap();
    let from = unsynced_from(&whole, &unsynced);
    let end = bytes::frames(&whole).last().unwrap().offset;
    assert!(end - from > 5 * 4096, "the unsynced part is too short");
    let pages: Vec<usize> = (from.next_multiple_of(4096)..end - 4096)
        .step_by(4096)
        .collect();
    let mut rng = Rng::new(28);
    for fill in ["zeros", "random", "old"] {
        for lost in [vec![0], vec![1], vec![0, 2], vec![1, 2, 3]] {
            for indexed in [true, false] {
                let what = format!("{fill} in pages {lost:?}, index {indexed}");
                let mut bad = whole.clone();
                for page in &lost {
                    let at = pages[*page];
                    match fill {
                        "zeros" => bad[at..at + 4096].fill(0),
                        "random" => {
                            bad[at..at + 4096].fill_with(|| rng.next_u64().to_le_bytes()[0]);
                        }
                        // Valid frames of this very segment, in another place.
                        _ => bad.copy_within(64..64 + 4096, at),
                    }
                }
                let copy = killed.after_kill();
                copy.write_file(&name, bad);
                if !indexed {
                    assert!(remove_index(&copy) > 0);
                }
                let log = options(&clock())
                    .segment_bytes(64 * 1024)
                    .open_on(copy.dir())
                    .unwrap();
                compare(&filter(&log), &synced, &what);
                // A prefix: the keys in order, up to the hole.
                let keys: Vec<&String> = unsynced.keys().collect();
                let seen = filter(&log).check_many(&keys).unwrap();
                let seen: Vec<bool> = seen.into_iter().map(Result::unwrap).collect();
                let kept = seen.iter().take_while(|seen| **seen).count();
                assert!(
                    !seen[kept..].contains(&true),
                    "{what}: a key behind the hole"
                );
                let behind = bytes::frames(&whole)
                    .iter()
                    .filter(|f| f.kind < 16 && f.offset + f.bytes.len() > pages[lost[0]])
                    .count();
                assert_eq!(kept, keys.len() - behind, "{what}: keys before the hole");
                assert!(log.open_report().dropped_bytes > 0, "{what}");
                // What was cut does not come back when the log grows up to a place where an old
                // record begins: the same keys again end where they ended before.
                let mut twin: Twin = synced.clone();
                let hole_end = pages[*lost.last().unwrap()] + 4096;
                let again = bytes::frames(&whole)
                    .iter()
                    .filter(|f| f.kind < 16 && f.offset + f.bytes.len() > pages[lost[0]])
                    .filter(|f| f.offset < hole_end)
                    .count();
                let process = ObserveOptions::new().durability(Durability::Process);
                for key in &keys[kept..kept + again] {
                    assert!(filter(&log).observe_with(key, &process).unwrap().is_new());
                }
                for (index, key) in keys.iter().enumerate() {
                    twin.insert((*key).clone(), index < kept + again);
                }
                let copy = copy.after_kill();
                let wide = |disk: &SimDisk| {
                    let options = options(&clock()).segment_bytes(64 * 1024);
                    options.open_on(disk.dir()).unwrap()
                };
                aftermath(&copy, &wide, &twin, &what);
            }
        }
    }
}

#[test]
fn c28_a_hole_in_the_synced_part_is_damage_and_not_a_tail() {
    let (killed, synced, unsynced, newest) = unsynced();
    let wide = || options(&clock()).segment_bytes(64 * 1024);
    for name in segments(&killed) {
        let whole = killed.read_file(&name).unwrap();
        let frames = bytes::frames(&whole);
        let Some(last) = frames.last() else {
            continue;
        };
        let end = if name == newest {
            unsynced_from(&whole, &unsynced)
        } else {
            last.offset
        };
        for at in (4096..end.saturating_sub(4096)).step_by(3 * 4096) {
            for indexed in [true, false] {
                let copy = killed.after_kill();
                let mut bad = whole.clone();
                bad[at..at + 4096].fill(0);
                copy.write_file(&name, bad);
                if !indexed {
                    remove_index(&copy);
                }
                let before = image(&copy);
                match wide().open_on(copy.dir()) {
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Damaged, "{error:?}");
                        assert!(error.file().is_some(), "{error:?}");
                        let mut after = image(&copy);
                        after.remove("LOCK");
                        let mut before = before;
                        before.remove("LOCK");
                        assert!(before == after, "an open that is refused changes nothing");
                    }
                    // A sealed segment with its index: the keys of the page are errors.
                    Ok(log) => {
                        assert!(
                            indexed && name != newest,
                            "{name} at {at} was taken for a tail"
                        );
                        let mut errors = 0;
                        for key in synced.keys() {
                            match filter(&log).observe(key) {
                                Ok(observed) => assert_eq!(observed, Observed::Duplicate, "{key}"),
                                Err(error) => {
                                    assert_eq!(error.kind(), ErrorKind::Damaged, "{error:?}");
                                    errors += 1;
                                }
                            }
                        }
                        assert!((1..=40).contains(&errors), "{errors} keys in one page");
                    }
                }
            }
        }
    }
}

#[test]
fn c28_old_bytes_of_a_reused_file_are_not_revived_by_a_lost_page() {
    let disk = SimDisk::new();
    let clock = clock();
    let wide = |disk: &SimDisk| {
        let options = options(&clock).segment_bytes(32 * 1024);
        options.open_on(disk.dir()).unwrap()
    };
    let log = wide(&disk);
    let minute = ObserveOptions::new().retention(Duration::from_secs(60));
    let mut old = Vec::new();
    let mut contents = Vec::new();
    for round in 0..4 {
        for n in 0..300 {
            let key = long(&format!("old{round}"), n);
            assert!(filter(&log).observe_with(&key, &minute).unwrap().is_new());
            old.push(key);
        }
        contents.extend(
            image(&disk)
                .into_iter()
                .filter(|(name, _)| name.starts_with("seg-")),
        );
        clock.advance_ms(61_000);
        log.maintain().unwrap();
    }
    assert!(
        disk.step_log()
            .iter()
            .any(|step| step.starts_with("rename seg-")),
        "no file was reused"
    );
    // The clock goes back: what was forgotten would be remembered again if it were found.
    let process = ObserveOptions::new().durability(Durability::Process);
    for n in 0..150 {
        let key = long("young", n);
        assert!(filter(&log).observe_with(&key, &process).unwrap().is_new());
    }
    let newest = segments(&disk)
        .into_iter()
        .rfind(|name| bytes::frames(&disk.read_file(name).unwrap()).len() > 20)
        .unwrap();
    let forever = numbered("forever", 1);
    observe_all(&log, &forever);
    let killed = disk.after_kill();
    let whole = killed.read_file(&newest).unwrap();
    for (_, content) in &contents {
        for page in 1..whole.len().min(content.len()) / 4096 {
            let mut bad = whole.clone();
            bad[page * 4096..][..4096].copy_from_slice(&content[page * 4096..][..4096]);
            let copy = killed.after_kill();
            copy.write_file(&newest, bad);
            let Ok(log) = options(&clock).segment_bytes(32 * 1024).open_on(copy.dir()) else {
                continue;
            };
            for key in old.iter().step_by(7) {
                assert_eq!(
                    filter(&log).get(key).unwrap(),
                    KeyState::Absent,
                    "page {page}"
                );
            }
            assert!(log.stats().unsettled_count == 0);
        }
    }
    for seed in 0..20 {
        let cut = disk.after_power_cut(&mut PowerCut::recycled(seed));
        let log = wide(&cut);
        compare(&filter(&log), &forever, "after a power cut");
        for key in old.iter().step_by(7) {
            assert_eq!(
                filter(&log).get(key).unwrap(),
                KeyState::Absent,
                "seed {seed}"
            );
        }
    }
}

/// Three unsealed segments with a torn tail: the disk was full, so none could be sealed.
fn three_unsealed() -> (SimDisk, Vec<(String, Option<u64>)>) {
    let disk = SimDisk::new();
    let log = options(&clock()).open_on(disk.dir()).unwrap();
    let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
    let mut claims: Vec<_> = (0..40)
        .map(|n| new(jobs.claim(long("job", n)).unwrap()))
        .collect();
    log.sync().unwrap();
    let sealed = log.stats().seals_count;
    disk.set_free_bytes(Some(0));
    let times = [Some(60), Some(600), None];
    let mut kept = Vec::new();
    for (n, claim) in claims.iter_mut().enumerate() {
        let time = times[n % 3];
        let retention = time.map_or(Retention::Forever, |s| Duration::from_secs(s).into());
        let commit = idemlog::Commit::without_outcome().retention(retention);
        let _committed = claim.commit_with(commit).unwrap();
        kept.push((long("job", n), time));
    }
    let stats = log.stats();
    assert_eq!(
        stats.seals_count, sealed,
        "a full disk has no room for an index"
    );
    // A torn tail: the next write is cut.
    disk.set_free_bytes(None);
    let late = new_claim_that_dies(&disk, &jobs);
    assert!(late);
    let killed = disk.after_kill();
    let unsealed = segments(&killed)
        .iter()
        .filter(|name| !bytes::frames(&killed.read_file(name).unwrap()).is_empty())
        .count();
    assert!(
        unsealed >= 3 + sealed as usize,
        "{unsealed} segments hold records"
    );
    (killed, kept)
}

fn new_claim_that_dies(disk: &SimDisk, jobs: &idemlog::Namespace<Repeatable>) -> bool {
    disk.stop_inside(disk.steps(), 20);
    jobs.run_once(long("torn", 0), |_| Ok(Vec::new())).is_err()
}

/// Opens whole, and shows that keys and times of expiry are those of `kept`.
fn recovered(disk: &SimDisk, kept: &[(String, Option<u64>)], what: &str) {
    let clock = clock();
    let log = options(&clock).open_on(disk.dir()).unwrap();
    let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
    for at in [0, 59, 61, 599, 601] {
        clock.advance_ms(at * 1000 - passed(&clock));
        for (key, time) in kept {
            let seen = matches!(jobs.get(key).unwrap(), KeyState::Done(_));
            let expected = time.is_none_or(|time| at < time);
            assert_eq!(seen, expected, "{what}: {key} after {at} s");
        }
    }
    assert_eq!(
        jobs.get(long("torn", 0)).unwrap(),
        KeyState::Absent,
        "{what}"
    );
}

fn passed(clock: &Arc<idemlog::testing::ManualClock>) -> u64 {
    use idemlog::testing::Clock;
    clock.read().wall_ms - super::START_MS
}

/// Kills an open at each of its steps; every `stride`-th of what that leaves is opened and killed
/// in the same way, so many levels deep.
fn nested(
    disk: &SimDisk,
    depth: u32,
    rng: &mut Rng,
    check: &dyn Fn(&SimDisk, &str),
    opens: &mut u64,
) {
    let crash = CrashOptions {
        base: disk.clone(),
        seed: rng.next_u64(),
        outcomes_max: 4,
        seeded_count: 1,
        inside_count: 1,
        ..CrashOptions::default()
    };
    let scenario = |disk: &SimDisk| {
        drop(options(&clock()).open_on(disk.dir()));
    };
    let mut deeper = Vec::new();
    let totals = for_each_crash_point(&crash, scenario, |state| {
        *opens += 1;
        check(&state.disk.after_kill(), &state.to_string());
        deeper.push(state.disk);
    });
    assert!(totals.steps > 5, "recovery takes {} steps", totals.steps);
    if depth > 1 {
        let count = if depth == 3 { 6 } else { 2 };
        for _ in 0..count.min(deeper.len()) {
            let disk = deeper.swap_remove(rng.below(deeper.len()));
            nested(&disk, depth - 1, rng, check, opens);
        }
    }
}

#[test]
fn c57_three_recoveries_killed_at_every_step_end_in_the_same_keys_and_times() {
    let (killed, kept) = three_unsealed();
    recovered(&killed.after_kill(), &kept, "one recovery");
    let whole = killed.after_kill();
    options(&clock())
        .open_on(whole.dir())
        .unwrap()
        .close()
        .unwrap();
    let bytes = bytes_of_files(&whole);
    let mut opens = 0;
    let check = |disk: &SimDisk, what: &str| {
        recovered(&disk.after_kill(), &kept, what);
        // Ten keys written after a whole recovery survive one more kill.
        let log = options(&clock()).open_on(disk.dir()).unwrap();
        let late = numbered("late", 10);
        let grown = bytes_of_files(disk);
        assert!(grown <= bytes + 4096, "{what}: {grown} bytes after {bytes}");
        observe_all(&log, &late);
        let again = disk.after_kill();
        let log = options(&clock()).open_on(again.dir()).unwrap();
        compare(&filter(&log), &late, what);
        drop(log);
        recovered(&again, &kept, what);
    };
    nested(&killed, 3, &mut Rng::new(57), &check, &mut opens);
    assert!(opens > 500, "{opens} killed recoveries");
}

#[test]
fn c25_a_process_killed_while_it_creates_the_store_leaves_nothing_in_the_way() {
    let scenario = |disk: &SimDisk| {
        drop(options(&clock()).open_on(disk.dir()));
    };
    let crash = CrashOptions::default();
    let totals = for_each_crash_point(&crash, scenario, |state| {
        let what = state.to_string();
        for stray in ["MANIFEST.new", "run-000000000009-000000000009-0.idx.tmp"] {
            let disk = state.disk.after_kill();
            disk.write_file(stray, vec![0x5a; 700]);
            let log = open(&disk);
            observe_all(&log, &numbered("key", 5));
            drop(log);
            let mut twin = numbered("key", 5);
            twin.insert("stranger".into(), false);
            aftermath(&disk, &open, &twin, &what);
            assert!(
                !disk.file_names().iter().any(|name| name == stray),
                "{what}"
            );
        }
        // A file that is not ours stays as it is, and is never taken for ours.
        let disk = state.disk.after_kill();
        disk.write_file("notes.txt", "mine");
        match options(&clock()).open_on(disk.dir()) {
            Ok(log) => observe_all(&log, &numbered("key", 5)),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Incompatible, "{what}: {error:?}"),
        }
        assert_eq!(disk.read_file("notes.txt").unwrap(), b"mine", "{what}");
    });
    assert!(totals.steps > 5, "{totals:?}");
}

#[test]
fn c25_a_process_killed_while_it_saves_an_index_a_hint_or_a_manifest_leaves_no_stray_file() {
    let base = SimDisk::new();
    let wide = |disk: &SimDisk| options(&clock()).segment_bytes(1 << 20).open_on(disk.dir());
    let log = wide(&base).unwrap();
    let keys: Vec<String> = (0..13_000).map(|n| format!("key-{n}")).collect();
    for answer in filter(&log).observe_many(&keys).unwrap() {
        assert!(answer.unwrap().is_new());
    }
    let base = base.after_kill();
    drop(log);
    let saved = base.after_kill();
    let log = wide(&saved).unwrap();
    assert!(filter(&log).observe("one more").unwrap().is_new());
    log.close().unwrap();
    for start in ["run-", "hint-", "MANIFEST"] {
        assert!(
            saved
                .file_names()
                .iter()
                .any(|name| name.starts_with(start)),
            "{start}"
        );
    }
    let crash = CrashOptions {
        base,
        seeded_count: 1,
        inside_count: 1,
        ..CrashOptions::default()
    };
    let scenario = |disk: &SimDisk| {
        if let Ok(log) = wide(disk) {
            let _unused = filter_of(&log).and_then(|f| f.observe("one more"));
            let _unused = log.maintain();
            let _unused = log.close();
        }
    };
    for_each_crash_point(&crash, scenario, |state| {
        let log = wide(&state.disk).unwrap();
        let names = state.disk.file_names();
        let stray = |name: &&String| name.ends_with(".tmp") || name.ends_with(".new");
        assert_eq!(names.iter().find(stray), None, "{state}");
        for key in keys.iter().step_by(101) {
            assert_eq!(filter(&log).get(key).unwrap(), KeyState::Seen, "{state}");
        }
        assert_eq!(filter(&log).get("nobody").unwrap(), KeyState::Absent);
    });
}

#[test]
fn c62_killed_at_each_step_of_a_roll_the_store_rolls_on_under_higher_numbers() {
    let base = SimDisk::new();
    let log = open(&base);
    let mut twin = Twin::new();
    // Until the next record needs the next segment, and none is prepared.
    while segments(&base).len() < 2 {
        let key = long("early", twin.len());
        assert!(filter(&log).observe(&key).unwrap().is_new());
        twin.insert(key, true);
    }
    let base = base.after_kill();
    drop(log);
    let crash = CrashOptions {
        base,
        seeded_count: 2,
        inside_count: 2,
        ..CrashOptions::default()
    };
    let scenario = |disk: &SimDisk| {
        let Ok(log) = options(&clock()).open_on(disk.dir()) else {
            return;
        };
        let Ok(filter) = log.filter("f", small()) else {
            return;
        };
        for n in 0..40 {
            if filter.observe(long("roll", n)).is_err() {
                return;
            }
        }
    };
    for_each_crash_point(&crash, scenario, |state| {
        let what = state.to_string();
        let disk = state.disk;
        let number = |name: &String| name[4..16].parse::<u64>().unwrap();
        let highest = segments(&disk).iter().map(number).max().unwrap();
        let log = open(&disk);
        let mut all = twin.clone();
        for n in 0..40 {
            // Recorded before the kill or not: from here on a duplicate.
            let seen = filter(&log).observe(long("roll", n)).unwrap();
            all.insert(long("roll", n), true);
            assert_eq!(
                filter(&log).observe(long("roll", n)).unwrap(),
                Observed::Duplicate
            );
            assert!(seen.is_new() || n < 40);
        }
        for n in 0..40 {
            assert!(
                filter(&log).observe(long("late", n)).unwrap().is_new(),
                "{what}"
            );
            all.insert(long("late", n), true);
        }
        log.maintain().unwrap();
        drop(log);
        let grown = segments(&disk).iter().map(number).max().unwrap();
        assert!(grown > highest, "{what}: {grown} after {highest}");
        aftermath(&disk, &open, &all, &what);
    });
}

/// Everything that may follow after the n-th flush of the log has failed.
#[test]
fn c60_after_the_nth_flush_fails_no_answer_rests_on_it_whatever_the_kernel_did_with_the_pages() {
    let ways = [
        SyncFailure::MarkClean,
        SyncFailure::DropPages,
        SyncFailure::KeepDirty,
    ];
    for way in ways {
        let stride = if way == SyncFailure::MarkClean { 1 } else { 6 };
        let mut poisoned = 0;
        for nth in (0..36).step_by(stride) {
            let what = format!("{way:?}, flush {nth}");
            let disk = started();
            let log = open(&disk);
            let mut acknowledged = Twin::from([("first".to_owned(), true)]);
            let mut failed = None;
            for n in 0..60 {
                if n == nth {
                    let fault = Fault::once(disk.steps(), FaultKind::Io).only(Op::Sync);
                    disk.fail(fault.on_sync(way));
                }
                let key = long("key", n);
                match filter_of(&log).and_then(|f| f.observe(&key)) {
                    Ok(observed) => {
                        assert!(failed.is_none(), "{what}: a promise after the failure");
                        assert!(observed.is_new());
                        acknowledged.insert(key, true);
                    }
                    // The flush of a file that no promise rests on: nothing has happened.
                    Err(error) if error.applied() == Applied::No && failed.is_none() => {
                        assert!(filter(&log).observe(&key).unwrap().is_new(), "{what}");
                        acknowledged.insert(key, true);
                    }
                    Err(error) => {
                        if failed.is_none() {
                            assert_eq!(error.applied(), Applied::Maybe, "{what}: {error:?}");
                            failed = Some(key.clone());
                        }
                        // The same key again: never "duplicate", never "new".
                        let again = filter_of(&log).and_then(|f| f.observe(&key)).unwrap_err();
                        assert_eq!(again.kind(), ErrorKind::Poisoned, "{what}: {again:?}");
                    }
                }
            }
            poisoned += usize::from(failed.is_some());
            let disks = [
                disk.after_kill(),
                disk.after_power_cut(&mut PowerCut::drop_all()),
                disk.after_power_cut(&mut PowerCut::keep_all()),
            ];
            for disk in disks {
                let log = open(&disk);
                let mut twin = acknowledged.clone();
                if let Some(failed) = &failed {
                    let kept = filter(&log).get(failed).unwrap() == KeyState::Seen;
                    twin.insert(failed.clone(), kept);
                }
                compare(&filter(&log), &twin, &what);
                // What was answered once stays so, also when the cache is gone.
                let cut = disk.after_power_cut(&mut PowerCut::drop_all());
                drop(log);
                aftermath(&cut, &open, &twin, &what);
            }
        }
        assert!(
            poisoned > 24 / stride,
            "{way:?}: {poisoned} flushes of the log failed"
        );
    }
}

fn filter_of(log: &DedupLog) -> idemlog::Result<idemlog::Filter> {
    log.filter("f", small())
}

#[test]
fn c07_five_segments_and_every_way_to_lose_or_exchange_one_are_noticed() {
    let disk = SimDisk::memory();
    let log = open(&disk);
    let mut twin = Twin::new();
    while log.stats().seals_count < 5 {
        let key = long("key", twin.len());
        assert!(filter(&log).observe(&key).unwrap().is_new());
        twin.insert(key, true);
    }
    log.close().unwrap();
    let other = SimDisk::memory();
    let log = open(&other);
    for key in twin.keys() {
        assert!(filter(&log).observe(key).unwrap().is_new());
    }
    log.close().unwrap();
    let names = segments(&disk);
    let (second, third) = (&names[1], &names[2]);
    let read = |name: &String| disk.read_file(name).unwrap();
    let frames = bytes::frames(&read(third));
    let border = frames[frames.len() / 2].offset;
    for indexed in [true, false] {
        let broken: [(&str, &dyn Fn(&SimDisk)); 6] = [
            ("deleted", &|d| assert!(d.remove_file(third))),
            ("cut at a border", &|d| {
                d.write_file(third, &read(third)[..border])
            }),
            ("cut inside", &|d| {
                d.write_file(third, &read(third)[..border + 5])
            }),
            ("swapped", &|d| {
                d.write_file(third, read(second));
                d.write_file(second, read(third));
            }),
            ("doubled", &|d| d.write_file(third, read(second))),
            ("foreign", &|d| {
                d.write_file(third, other.read_file(third).unwrap())
            }),
        ];
        for (what, broken) in broken {
            let copy = disk.after_kill();
            broken(&copy);
            if !indexed {
                assert!(remove_index(&copy) > 0);
            }
            let before = image(&copy);
            let error = options(&clock()).open_on(copy.dir()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Damaged, "{what}: {error:?}");
            assert!(
                error.file().is_some_and(|file| file.starts_with("seg-")),
                "{error:?}"
            );
            assert!(before == image(&copy), "{what}: files were changed");
            // Put right again, everything is there.
            for name in &names {
                copy.write_file(name, read(name));
            }
            aftermath(&copy, &open, &twin, what);
        }
    }
    // The clean end of the newest segment cut off, after a clean close and after a kill.
    let newest = names
        .iter()
        .rfind(|name| !bytes::frames(&read(name)).is_empty());
    let newest = newest.unwrap();
    let frames = bytes::frames(&read(newest));
    let border = frames[frames.len() - 1].offset;
    let copy = disk.after_kill();
    let mut bad = read(newest);
    bad[border..].fill(0);
    copy.write_file(newest, bad);
    let error = options(&clock()).open_on(copy.dir()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged, "{error:?}");
}

#[test]
fn c15_below_power_a_failed_write_takes_back_what_nobody_was_promised() {
    for level in [Durability::Process, Durability::Buffered] {
        let disk = SimDisk::new();
        let log = options(&clock())
            .durability(level)
            .open_on(disk.dir())
            .unwrap();
        observe_all(&log, &numbered("before", 3));
        log.sync().unwrap();
        let fault = Fault::once(disk.steps(), FaultKind::NoSpace).only(Op::Write);
        disk.fail(fault.after_bytes(13));
        let failed = filter(&log).observe("failed");
        let lost = failed.is_err();
        let synced = log.sync();
        let poisoned = log.health().poisoned.is_some();
        // At Buffered the key was promised before it was written: then nothing more is promised.
        assert_eq!(
            (lost, synced.is_err()),
            (level == Durability::Process, poisoned),
            "{level:?}"
        );
        assert_eq!(poisoned, level == Durability::Buffered);
        let killed = disk.after_kill();
        let mut twin = numbered("before", 3);
        twin.insert("failed".into(), false);
        aftermath(&killed, &open, &twin, &format!("{level:?}"));
    }
}
