use std::cell::Cell;
use std::collections::BTreeSet;

use super::*;

const DROP: fn() -> PowerCut = PowerCut::drop_all;
const KEEP: fn() -> PowerCut = PowerCut::keep_all;

fn cut(disk: &SimDisk, cut: fn() -> PowerCut) -> SimDisk {
    disk.after_power_cut(&mut cut())
}

/// A disk with the durable file `a` of these bytes, and the file open for writing.
fn disk_with(bytes: &[u8]) -> (SimDisk, Arc<dyn File>) {
    let disk = SimDisk::new();
    disk.write_file("a", bytes);
    let file = disk.dir().open("a", Access::Write).unwrap();
    (disk, file)
}

fn content(disk: &SimDisk) -> Vec<u8> {
    disk.read_file("a").unwrap()
}

fn errno<T: fmt::Debug>(result: io::Result<T>) -> Option<i32> {
    result.unwrap_err().raw_os_error()
}

#[test]
fn an_unsynced_write_is_lost_or_kept_and_a_synced_one_kept() {
    let (disk, file) = disk_with(b"old");
    file.write_at(b"new", 0).unwrap();
    assert_eq!(content(&disk), b"new");
    assert_eq!(content(&cut(&disk, DROP)), b"old");
    assert_eq!(content(&cut(&disk, KEEP)), b"new");
    file.sync().unwrap();
    assert_eq!(content(&cut(&disk, DROP)), b"new");
}

#[test]
fn a_kill_keeps_the_cache_but_makes_nothing_durable() {
    let (disk, file) = disk_with(b"old");
    file.write_at(b"new", 0).unwrap();
    let next = disk.after_kill();
    assert_eq!(content(&next), b"new");
    assert_eq!(content(&cut(&next, DROP)), b"old");
    let file = next.dir().open("a", Access::Write).unwrap();
    file.sync().unwrap();
    assert_eq!(content(&cut(&next, DROP)), b"new");
    assert_eq!(
        content(&cut(&disk, DROP)),
        b"old",
        "the old disk stays as it is"
    );
}

#[test]
fn writes_tear_at_sectors_of_the_file() {
    let (disk, file) = disk_with(&[0; 1536]);
    file.write_at(&[1; 1000], 100).unwrap();
    let images: BTreeSet<Vec<u8>> = disk
        .after_power_cut_exhaustive(8)
        .map(|disk| content(&disk))
        .collect();
    let torn = |kept: [bool; 3]| {
        let mut bytes = vec![0; 1536];
        for (range, kept) in [100..512, 512..1024, 1024..1100].into_iter().zip(kept) {
            bytes[range].fill(u8::from(kept));
        }
        bytes
    };
    let all = (0..8)
        .map(|bits| torn([bits & 1 == 1, bits & 2 == 2, bits & 4 == 4]))
        .collect();
    assert_eq!(images, all);
}

#[test]
fn the_size_is_any_since_the_last_sync_and_lost_bytes_inside_it_are_zeros() {
    let (disk, file) = disk_with(b"ab");
    file.write_at(b"cd", 2).unwrap();
    file.set_len(6).unwrap();
    let cuts = disk.after_power_cut_exhaustive(6);
    assert!(cuts.is_exhaustive());
    let images: Vec<Vec<u8>> = cuts.map(|disk| content(&disk)).collect();
    let expected: [&[u8]; 6] = [b"ab", b"ab\0\0", b"ab\0\0\0\0", b"ab", b"abcd", b"abcd\0\0"];
    assert_eq!(images, expected);
}

#[test]
fn a_truncation_may_be_lost_and_the_size_with_it_or_alone() {
    let (disk, file) = disk_with(b"abcd");
    file.set_len(1).unwrap();
    file.set_len(3).unwrap();
    assert_eq!(content(&disk), b"a\0\0");
    assert_eq!(content(&cut(&disk, DROP)), b"abcd");
    assert_eq!(content(&cut(&disk, KEEP)), b"a\0\0");
    let images: BTreeSet<Vec<u8>> = disk
        .after_power_cut_exhaustive(64)
        .map(|disk| content(&disk))
        .collect();
    let expected: [&[u8]; 5] = [b"a", b"a\0\0", b"a\0\0\0", b"abc", b"abcd"];
    assert_eq!(images, expected.map(<[u8]>::to_vec).into());
    file.sync().unwrap();
    assert_eq!(content(&cut(&disk, DROP)), b"a\0\0");
}

#[test]
fn syncing_a_file_does_not_make_its_name_durable() {
    let disk = SimDisk::new();
    let dir = disk.dir();
    let file = dir.open("a", Access::Create).unwrap();
    file.write_at(b"x", 0).unwrap();
    file.sync().unwrap();
    assert!(cut(&disk, DROP).file_names().is_empty());
    dir.sync().unwrap();
    assert_eq!(content(&cut(&disk, DROP)), b"x");
}

#[test]
fn syncing_a_directory_does_not_make_contents_durable() {
    let disk = SimDisk::new();
    let dir = disk.dir();
    dir.open("a", Access::Create)
        .unwrap()
        .write_at(b"x", 0)
        .unwrap();
    dir.sync().unwrap();
    assert_eq!(content(&cut(&disk, DROP)), b"");
}

#[test]
fn a_rename_replaces_atomically_and_may_be_lost() {
    let (disk, _file) = disk_with(b"old");
    let dir = disk.dir();
    let tmp = dir.open("tmp", Access::Create).unwrap();
    tmp.write_at(b"new", 0).unwrap();
    tmp.sync().unwrap();
    dir.rename("tmp", "a").unwrap();
    let images: BTreeSet<(Vec<String>, Vec<u8>)> = disk
        .after_power_cut_exhaustive(4)
        .map(|disk| (disk.file_names(), content(&disk)))
        .collect();
    let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
    let expected = [
        (names(&["a"]), b"old".to_vec()),
        (names(&["a", "tmp"]), b"old".to_vec()),
        // The rename alone is enough for the file to exist.
        (names(&["a"]), b"new".to_vec()),
    ];
    assert_eq!(images, expected.into());
    dir.sync().unwrap();
    assert_eq!(content(&cut(&disk, DROP)), b"new");
}

#[test]
fn a_removal_may_be_lost_and_open_files_outlive_it() {
    let (disk, file) = disk_with(b"old");
    let dir = disk.dir();
    dir.unlink("a").unwrap();
    assert_eq!(disk.read_file("a"), None);
    assert_eq!(content(&cut(&disk, DROP)), b"old");
    dir.sync().unwrap();
    assert!(cut(&disk, DROP).file_names().is_empty());
    let mut buf = [0; 3];
    file.read_at(&mut buf, 0).unwrap();
    assert_eq!(&buf, b"old");
    drop(file);
    assert!(
        disk.state().inodes.is_empty(),
        "nothing refers to the file any more"
    );
}

#[test]
fn pages_marked_clean_show_bytes_that_are_not_on_the_disk() {
    let (disk, file) = disk_with(b"old!");
    file.write_at(b"new", 0).unwrap();
    disk.fail(Fault::once(disk.steps(), FaultKind::Io));
    assert_eq!(errno(file.sync()), Some(Errno::IO.raw_os_error()));
    file.sync().unwrap();
    let next = disk.after_kill();
    assert_eq!(content(&next), b"new!");
    let file = next.dir().open("a", Access::Write).unwrap();
    file.write_at(b"?", 3).unwrap();
    file.sync().unwrap();
    assert_eq!(content(&next), b"new?");
    assert_eq!(
        content(&cut(&next, KEEP)),
        b"old?",
        "only what was written later is written"
    );
}

#[test]
fn dropped_pages_show_the_durable_bytes_again() {
    let (disk, file) = disk_with(b"old");
    file.write_at(b"longer", 0).unwrap();
    let fault = Fault::once(disk.steps(), FaultKind::Io).on_sync(SyncFailure::DropPages);
    disk.fail(fault);
    assert!(file.sync().is_err());
    assert_eq!(content(&disk), b"old");
}

#[test]
fn pages_kept_dirty_are_written_by_a_later_sync() {
    let (disk, file) = disk_with(b"old");
    file.write_at(b"new", 0).unwrap();
    let fault = Fault::once(disk.steps(), FaultKind::Io).on_sync(SyncFailure::KeepDirty);
    disk.fail(fault);
    assert!(file.sync().is_err());
    assert_eq!(content(&cut(&disk, DROP)), b"old");
    file.sync().unwrap();
    assert_eq!(content(&cut(&disk, DROP)), b"new");
}

#[test]
fn a_failed_directory_sync_may_lose_names_that_reads_still_show() {
    for (sync, durable) in [
        (SyncFailure::MarkClean, false),
        (SyncFailure::KeepDirty, true),
    ] {
        let disk = SimDisk::new();
        let dir = disk.dir();
        dir.open("a", Access::Create).unwrap();
        disk.fail(Fault::once(disk.steps(), FaultKind::Io).on_sync(sync));
        assert!(dir.sync().is_err());
        dir.sync().unwrap();
        assert_eq!(disk.file_names(), ["a"]);
        assert_eq!(cut(&disk, KEEP).read_file("a").is_some(), durable);
    }
}

#[test]
fn one_opener_holds_a_lock_until_it_drops_it_or_dies() {
    let disk = SimDisk::new();
    let missing = disk.dir().lock("LOCK", false, "").unwrap_err();
    assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    let held = disk.dir().lock("LOCK", true, "first").unwrap().unwrap();
    assert_eq!(
        disk.dir()
            .lock("LOCK", true, "second")
            .unwrap()
            .unwrap_err(),
        "first"
    );
    assert_eq!(disk.read_file("LOCK").unwrap(), b"first");
    for next in [disk.after_kill(), cut(&disk, KEEP)] {
        let _held = next.dir().lock("LOCK", true, "next").unwrap().unwrap();
        assert!(disk.dir().lock("LOCK", true, "").unwrap().is_err());
    }
    drop(held);
    let _held = disk.dir().lock("LOCK", false, "third").unwrap().unwrap();
}

#[test]
fn a_dead_process_neither_writes_nor_reads() {
    let (disk, file) = disk_with(b"abc");
    disk.stop_at(1);
    file.write_at(b"x", 0).unwrap();
    assert_eq!(disk.died_doing(), None);
    let death = file.write_at(b"y", 1).unwrap_err();
    assert_eq!(death.to_string(), "simulated process death");
    assert_eq!(disk.died_doing().unwrap(), "write a 1+1");
    assert!(file.read_at(&mut [0], 0).is_err());
    assert!(file.size().is_err());
    assert!(file.sync().is_err());
    assert!(disk.dir().list().is_err());
    assert!(disk.dir().lock("LOCK", true, "").is_err());
    assert!(disk.dir().open("a", Access::Read).is_err());
    assert_eq!((disk.steps(), content(&disk)), (1, b"xbc".to_vec()));
}

#[test]
fn a_death_inside_a_write_leaves_a_prefix_in_the_cache() {
    let (disk, file) = disk_with(b"....");
    disk.stop_inside(0, 3);
    assert!(file.write_at(b"abcd", 0).is_err());
    assert_eq!(content(&disk.after_kill()), b"abc.");
    assert_eq!(content(&cut(&disk, DROP)), b"....");
    assert!(file.write_at(b"zzzz", 0).is_err());
    assert_eq!(content(&disk), b"abc.");
}

#[test]
fn errors_strike_once_or_for_good_and_look_like_the_systems() {
    let (disk, file) = disk_with(b"");
    disk.fail(Fault::once(1, FaultKind::Quota).after_bytes(2));
    disk.fail(Fault::sticky(3, FaultKind::ReadOnly));
    file.write_at(b"a", 0).unwrap();
    assert_eq!(
        file.write_at(b"bcd", 1).unwrap_err().kind(),
        io::ErrorKind::QuotaExceeded
    );
    assert_eq!(content(&disk), b"abc");
    file.sync().unwrap();
    for _ in 0..2 {
        assert_eq!(errno(file.set_len(9)), Some(Errno::ROFS.raw_os_error()));
    }
    disk.clear_faults();
    file.set_len(1).unwrap();
    let log = [
        "write a 0+1",
        "write a 1+3 -> Quota",
        "sync a",
        "set_len a 9 -> ReadOnly",
    ];
    assert_eq!(disk.step_log()[..4], log);
    let out = |kind: FaultKind| kind.error().raw_os_error().unwrap();
    let distinct: BTreeSet<i32> = FaultKind::ALL.map(out).into();
    // A short transfer is no error, and looks like an interrupted one where it must be one.
    assert_eq!(distinct.len(), FaultKind::ALL.len() - 1);
}

#[test]
fn short_and_interrupted_transfers_go_on() {
    for kind in [FaultKind::Short, FaultKind::Interrupted] {
        for fault in [Fault::once(0, kind), Fault::sticky(0, kind).after_bytes(1)] {
            let (disk, file) = disk_with(b"");
            disk.fail(fault);
            disk.fail(fault.reads());
            file.write_at(b"abcdef", 0).unwrap();
            let mut bytes = [0; 8];
            assert_eq!(file.read_at(&mut bytes, 1).unwrap(), 5);
            assert_eq!(&bytes, b"bcdef\0\0\0");
            assert_eq!(content(&disk), b"abcdef");
            assert_eq!(disk.steps(), 1, "one call is one step");
        }
    }
    // Other calls are given up.
    let (disk, file) = disk_with(b"");
    disk.fail(Fault::sticky(0, FaultKind::Interrupted));
    let interrupted = Some(Errno::INTR.raw_os_error());
    assert_eq!(errno(file.sync()), interrupted);
    assert_eq!(errno(disk.dir().sync()), interrupted);
    // Space that ends inside a transfer still ends it.
    let (disk, file) = disk_with(b"");
    disk.set_free_bytes(Some(512));
    disk.fail(Fault::once(0, FaultKind::Short).after_bytes(100));
    let full = file.write_at(&[1; 1000], 0);
    assert_eq!(full.unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert_eq!(content(&disk), [1; 512]);
}

#[test]
fn a_file_over_the_limit_is_refused_before_a_byte_of_it_is_read() {
    let (disk, file) = disk_with(&[7; 100]);
    assert_eq!(crate::vfs::read_all(&*file, 100).unwrap(), [7; 100]);
    let before = disk.counts();
    let refused = crate::vfs::read_all(&*file, 99).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    assert_eq!(disk.counts().read_bytes, before.read_bytes);
}

#[test]
fn reading_calls_fail_by_number_and_by_kind() {
    let (disk, file) = disk_with(b"a");
    let at = disk.counts().reads;
    disk.fail(Fault::once(at + 1, FaultKind::NoMemory).reads());
    disk.fail(Fault::sticky(at + 2, FaultKind::Io).reads().only(Op::Map));
    file.sync().unwrap();
    file.size().unwrap();
    let out_of_memory = Some(Errno::NOMEM.raw_os_error());
    assert_eq!(errno(file.read_at(&mut [0], 0)), out_of_memory);
    file.read_at(&mut [0], 0).unwrap();
    assert!(file.map().is_err());
    disk.dir().list().unwrap();
    assert!(file.map().is_err());
    let read_kinds = Op::READS.map(|op| op.to_string());
    assert_eq!(read_kinds, ["open", "read", "size", "map", "list"]);
    assert!(Op::STEPS.iter().all(|op| !Op::READS.contains(op)));
}

#[test]
fn a_seeded_disk_repeats_its_random_bytes_and_never_gives_them_twice() {
    let draw = |disk: &SimDisk| {
        let mut bytes = [0; 12];
        disk.dir().fill_random(&mut bytes).unwrap();
        bytes
    };
    let disk = SimDisk::seeded(7);
    let first = draw(&disk);
    assert_eq!(first, draw(&SimDisk::seeded(7)));
    assert_ne!(first, draw(&SimDisk::seeded(8)));
    assert_ne!(draw(&SimDisk::new()), draw(&SimDisk::new()));
    assert_ne!(draw(&SimDisk::memory()), draw(&SimDisk::memory()));
    let after = disk.after_kill();
    assert_ne!(draw(&after), first, "the next process draws on");
    let cut = cut(&disk, DROP);
    assert_eq!(draw(&cut), draw(&disk), "so does the one after a power cut");
}

#[test]
fn an_error_can_be_restricted_to_one_kind_of_step() {
    let (disk, file) = disk_with(b"");
    disk.fail(Fault::once(0, FaultKind::Io).only(Op::Sync));
    file.write_at(b"a", 0).unwrap();
    assert!(file.sync().is_err());
    file.sync().unwrap();
    disk.fail(Fault::sticky(0, FaultKind::NoSpace).only(Op::Write));
    assert!(file.write_at(b"a", 0).is_err());
    assert!(file.write_at(b"a", 0).is_err());
    file.sync().unwrap();
}

#[test]
fn reads_fail_after_a_number_of_them() {
    let (disk, file) = disk_with(b"a");
    disk.fail_reads_after(2);
    file.read_at(&mut [0], 0).unwrap();
    file.map().unwrap();
    assert_eq!(errno(file.size()), Some(Errno::IO.raw_os_error()));
    assert!(disk.dir().open("a", Access::Read).is_err());
    file.write_at(b"b", 0).unwrap();
    disk.clear_faults();
    file.size().unwrap();
}

#[test]
fn a_full_disk_takes_a_prefix_and_reserved_space_stays_writable() {
    let disk = SimDisk::new();
    disk.set_free_bytes(Some(2048));
    let dir = disk.dir();
    let file = dir.open("a", Access::Create).unwrap();
    file.set_len(4096).unwrap();
    let too_much = file.allocate(512, 2049).unwrap_err();
    assert_eq!(too_much.kind(), io::ErrorKind::StorageFull);
    assert_eq!(disk.free_bytes(), Some(0), "a part of it is reserved");
    assert_eq!(file.size().unwrap(), 4096);
    file.set_len(0).unwrap();
    assert_eq!(disk.free_bytes(), Some(2048));
    file.set_len(4096).unwrap();
    file.allocate(0, 600).unwrap();
    file.allocate(512, 512).unwrap();
    assert_eq!((disk.free_bytes(), disk.used_bytes()), (Some(1024), 1024));
    let hole = dir.open("b", Access::Create).unwrap();
    hole.set_len(5000).unwrap();
    assert_eq!(disk.free_bytes(), Some(1024), "holes cost nothing");
    assert!(hole.write_at(&[1; 2000], 100).is_err());
    assert_eq!(
        disk.read_file("b")
            .unwrap()
            .iter()
            .filter(|b| **b == 1)
            .count(),
        924
    );
    file.write_at(&[2; 1024], 0).unwrap();
    assert!(file.write_at(&[2], 1024).is_err());
    drop(hole);
    dir.unlink("b").unwrap();
    dir.sync().unwrap();
    assert_eq!(
        disk.free_bytes(),
        Some(1024),
        "space comes back with the removal"
    );
    file.set_len(512).unwrap();
    assert_eq!(disk.free_bytes(), Some(1536));
    assert_eq!(
        errno(file.set_len(u64::MAX)),
        Some(Errno::FBIG.raw_os_error())
    );
}

#[test]
fn space_is_found_again_after_a_power_cut() {
    let disk = SimDisk::new();
    disk.set_free_bytes(Some(2048));
    let file = disk.dir().open("a", Access::Create).unwrap();
    file.write_at(&[1; 600], 0).unwrap();
    assert_eq!(disk.free_bytes(), Some(1024));
    assert_eq!(cut(&disk, DROP).free_bytes(), Some(2048));
    assert_eq!(cut(&disk, KEEP).free_bytes(), Some(1024));
}

#[test]
fn every_outcome_is_enumerated_once_and_too_many_are_sampled() {
    let disk = SimDisk::new();
    let dir = disk.dir();
    dir.open("a", Access::Create)
        .unwrap()
        .write_at(&[1; 1024], 0)
        .unwrap();
    dir.open("b", Access::Create).unwrap().set_len(1).unwrap();
    // Without a and b: 1; a: 2 sectors and 2 sizes; b: 2 sizes; both: the product.
    let count = 1 + 8 + 2 + 16;
    let cuts = disk.after_power_cut_exhaustive(count);
    assert!(cuts.is_exhaustive());
    let images: Vec<u64> = cuts.map(|disk| disk.image_hash()).collect();
    assert_eq!(images.len() as u64, count);
    // Kept or lost sectors of an empty file look the same, so that a has 5 contents.
    assert_eq!(images.iter().collect::<BTreeSet<_>>().len(), 1 + 5 + 2 + 10);
    let sampled = disk.after_power_cut_exhaustive(count - 1);
    assert!(!sampled.is_exhaustive());
    assert_eq!(sampled.count() as u64, count - 1);
    assert_eq!(SimDisk::new().after_power_cut_exhaustive(1).count(), 1);
}

#[test]
fn a_seed_gives_the_same_outcomes_and_only_possible_ones() {
    let (disk, file) = disk_with(&[0; 700]);
    file.write_at(&[1; 2000], 300).unwrap();
    disk.dir().rename("a", "b").unwrap();
    let possible: BTreeSet<u64> = disk
        .after_power_cut_exhaustive(128)
        .map(|disk| disk.image_hash())
        .collect();
    let sample = |seed| {
        let mut cut = PowerCut::seeded(seed);
        [(); 200].map(|()| disk.after_power_cut(&mut cut).image_hash())
    };
    assert_eq!(sample(7), sample(7));
    assert_ne!(sample(7), sample(8));
    let seen: BTreeSet<u64> = sample(7).into();
    assert!(seen.is_subset(&possible));
    assert!(
        seen.len() > possible.len() / 2,
        "{} of {}",
        seen.len(),
        possible.len()
    );
}

#[test]
fn recycled_blocks_show_old_bytes_only_where_nothing_was_durable() {
    let (disk, file) = disk_with(&[1; 512]);
    disk.write_file("old", [7; 512]);
    file.write_at(&[2; 1024], 0).unwrap();
    let mut cut = PowerCut::recycled(3);
    let mut shown = BTreeSet::new();
    for _ in 0..100 {
        let bytes = content(&disk.after_power_cut(&mut cut));
        assert!(bytes[..512].iter().all(|b| [1, 2].contains(b)));
        shown.extend(bytes[512..].iter().copied());
    }
    assert_eq!(shown, [0, 2, 7].into());
}

#[test]
fn tampering_is_durable_and_takes_no_step() {
    let (disk, file) = disk_with(b"abc");
    file.write_at(b"xyz", 0).unwrap();
    disk.write_file("a", *b"damaged");
    disk.dir().open("b", Access::Create).unwrap();
    disk.write_file("b", []);
    let steps = disk.steps();
    assert_eq!(file.size().unwrap(), 7);
    for next in [disk.after_kill(), cut(&disk, DROP), cut(&disk, KEEP)] {
        assert_eq!(next.read_file("a").unwrap(), b"damaged");
        assert_eq!(next.file_names(), ["a", "b"]);
        assert!(next.remove_file("a"));
        assert!(!next.remove_file("a"));
        assert_eq!(cut(&next, KEEP).file_names(), ["b"]);
    }
    assert_eq!(disk.steps(), steps);
}

#[test]
fn a_disk_without_history_is_empty_after_a_power_cut_and_forgets_removed_files() {
    let disk = SimDisk::memory();
    let dir = disk.dir();
    for name in ["a", "b"] {
        let file = dir.open(name, Access::Create).unwrap();
        file.write_at(&[1; 600], 0).unwrap();
        file.sync().unwrap();
    }
    dir.rename("b", "a").unwrap();
    assert_eq!(disk.state().inodes.len(), 1);
    assert_eq!(disk.after_kill().file_names(), ["a"]);
    assert!(cut(&disk, KEEP).file_names().is_empty());
    assert!(disk.step_log().is_empty());
    assert_eq!(
        disk.state()
            .inodes
            .values()
            .map(|inode| inode.pending.len())
            .sum::<usize>(),
        0
    );
}

#[test]
fn opening_obeys_the_access_and_the_names() {
    let (disk, file) = disk_with(b"abc");
    let dir = disk.dir();
    assert_eq!(
        dir.open("a", Access::Create).unwrap_err().kind(),
        io::ErrorKind::AlreadyExists
    );
    assert_eq!(
        dir.open("b", Access::Write).unwrap_err().kind(),
        io::ErrorKind::NotFound
    );
    assert_eq!(
        dir.rename("b", "c").unwrap_err().kind(),
        io::ErrorKind::NotFound
    );
    assert_eq!(dir.unlink("b").unwrap_err().kind(), io::ErrorKind::NotFound);
    assert_eq!(
        dir.open("../a", Access::Read).unwrap_err().kind(),
        io::ErrorKind::InvalidInput
    );
    let read_only = dir.open("a", Access::Read).unwrap();
    assert!(read_only.write_at(b"x", 0).is_err());
    let map = read_only.map().unwrap();
    file.write_at(b"xyz", 0).unwrap();
    assert_eq!(&*map, b"abc", "a map is not changed under its reader");
    assert_eq!(file.read_at(&mut [0; 9], 1).unwrap(), 2);
    assert_eq!(file.read_at(&mut [0; 9], u64::MAX).unwrap(), 0);
    assert_eq!(dir.list().unwrap(), ["a"]);
}

#[test]
fn counts_tell_what_was_asked() {
    let disk = SimDisk::new();
    let dir = disk.dir();
    let file = dir.open("a", Access::Create).unwrap();
    file.write_at(b"abc", 0).unwrap();
    file.allocate(0, 9).unwrap();
    file.set_len(2).unwrap();
    file.sync().unwrap();
    file.read_at(&mut [0; 9], 0).unwrap();
    dir.rename("a", "b").unwrap();
    dir.sync().unwrap();
    dir.unlink("b").unwrap();
    let expected = Counts {
        creates: 1,
        writes: 1,
        written_bytes: 3,
        set_lens: 1,
        allocates: 1,
        syncs: 1,
        dir_syncs: 1,
        renames: 1,
        unlinks: 1,
        reads: 1,
        read_bytes: 2,
    };
    assert_eq!(disk.counts(), expected);
    assert_eq!(disk.steps(), 8);
}

/// Replaces `a` the safe way, unless `forget` leaves one of the two syncs out.
fn replace(disk: &SimDisk, forget: Option<Op>, done: &Cell<bool>) -> io::Result<()> {
    done.set(false);
    let dir = disk.dir();
    let tmp = dir.open("tmp", Access::Create)?;
    tmp.write_at(&[2; 700], 0)?;
    if forget != Some(Op::Sync) {
        tmp.sync()?;
    }
    dir.rename("tmp", "a")?;
    if forget != Some(Op::DirSync) {
        dir.sync()?;
    }
    done.set(true);
    Ok(())
}

/// Crashes [`replace`] everywhere; returns the totals and the lines of the wrong states.
fn crash_replace(forget: Option<Op>) -> (CrashTotals, Vec<(CrashState, String)>) {
    let options = CrashOptions::default();
    options.base.write_file("a", [1; 700]);
    let done = Cell::new(false);
    let mut wrong = Vec::new();
    let scenario = |disk: &SimDisk| drop(replace(disk, forget, &done));
    let totals = for_each_crash_point(&options, scenario, |state| {
        let bytes = state.disk.read_file("a").unwrap();
        let right = bytes == [2; 700] || (bytes == [1; 700] && !done.get());
        if !right {
            let line = state.to_string();
            wrong.push((state, line));
        }
    });
    for (state, _) in &wrong {
        let again = options.replay(state.step, state.kind, scenario);
        assert_eq!(again.image_hash(), state.disk.image_hash());
    }
    (totals, wrong)
}

#[test]
fn a_careful_replacement_survives_every_crash() {
    let (totals, wrong) = crash_replace(None);
    assert!(wrong.is_empty(), "{wrong:?}");
    assert_eq!(totals.steps, 5);
    assert!(
        totals.states > totals.checked && totals.checked > totals.distinct,
        "{totals:?}"
    );
    assert_eq!(
        crash_replace(None).0,
        totals,
        "the same seed gives the same states"
    );
}

#[test]
fn a_forgotten_file_sync_is_found() {
    let (_, wrong) = crash_replace(Some(Op::Sync));
    assert!(wrong.iter().all(|(state, _)| state.kind != CrashKind::Kill));
    let line = "crash seed=1 step=3 doing=\"sync_dir\" kind=Outcome";
    assert!(
        wrong.iter().any(|(_, printed)| printed.starts_with(line)),
        "{wrong:?}"
    );
}

#[test]
fn a_forgotten_directory_sync_is_found_although_the_same_disk_was_right_earlier() {
    let (_, wrong) = crash_replace(Some(Op::DirSync));
    assert!(!wrong.is_empty());
    assert!(
        wrong
            .iter()
            .all(|(state, _)| state.step == 4 && state.doing.is_empty())
    );
}

#[test]
fn deaths_inside_writes_are_tried() {
    let options = CrashOptions {
        inside_count: 9,
        ..CrashOptions::default()
    };
    let mut seen = BTreeSet::new();
    let scenario = |disk: &SimDisk| {
        if let Ok(file) = disk.dir().open("a", Access::Create) {
            file.write_at(b"abc", 0).unwrap_or_default();
        }
    };
    for_each_crash_point(&options, scenario, |state| {
        if let CrashKind::KillInside { kept_bytes } = state.kind {
            seen.insert((state.step, kept_bytes, content(&state.disk)));
        }
    });
    assert_eq!(seen, [(1, 1, b"a".to_vec()), (1, 2, b"ab".to_vec())].into());
}

/// Takes a random step; answers what a caller can see of it.
fn random_step(dir: &dyn Dir, rng: &mut Rng) -> String {
    let names = ["a", "b", "c"];
    let name = names[rng.below(3)];
    let other = names[rng.below(3)];
    let kind = |result: io::Result<()>| format!("{:?}", result.map_err(|error| error.kind()));
    let on_file = |step: &dyn Fn(&dyn File) -> io::Result<()>| {
        kind(dir.open(name, Access::Write).and_then(|file| step(&*file)))
    };
    let number = rng.below(3000) as u64;
    match rng.below(9) {
        0 | 1 => kind(dir.open(name, Access::Create).map(drop)),
        2 => kind(dir.rename(name, other)),
        3 => kind(dir.unlink(name)),
        4 => on_file(&|file| file.set_len(number)),
        5 => on_file(&|file| file.allocate(number, 700)),
        6 => on_file(&|file| file.sync()),
        7 => kind(dir.sync()),
        _ => {
            let bytes = vec![rng.next_u64().to_le_bytes()[0]; rng.below(1500)];
            on_file(&|file| file.write_at(&bytes, number))
        }
    }
}

/// Returns all names and contents, through the calls that the store uses.
fn image(dir: &dyn Dir) -> Vec<(String, Vec<u8>)> {
    let mut names = dir.list().unwrap();
    names.sort();
    let read = |name: String| {
        let file = dir.open(&name, Access::Read).unwrap();
        (name, crate::vfs::read_all(&*file, 1 << 20).unwrap())
    };
    names.into_iter().map(read).collect()
}

#[test]
fn random_steps_look_the_same_on_a_simulated_and_on_a_real_disk() {
    for seed in 0..20 {
        let parent = tempfile::tempdir().unwrap();
        let real = crate::vfs::disk::DiskDir::open(parent.path(), false).unwrap();
        let (disk, memory) = (SimDisk::new(), SimDisk::memory());
        let mut rngs = [(); 3].map(|()| Rng::new(seed));
        for step in 0..60 {
            let [a, b, c] = &mut rngs;
            let expected = random_step(&real, a);
            assert_eq!(
                random_step(&*disk.dir(), b),
                expected,
                "seed={seed} step={step}"
            );
            assert_eq!(
                random_step(&*memory.dir(), c),
                expected,
                "seed={seed} step={step}"
            );
            assert_eq!(image(&*disk.dir()), image(&real), "seed={seed} step={step}");
        }
        assert_eq!(image(&*memory.dir()), image(&real), "seed={seed}");
    }
}

#[test]
fn keeping_all_is_the_cache_and_syncing_all_leaves_nothing_to_lose() {
    for seed in 0..50 {
        let disk = SimDisk::new();
        let mut rng = Rng::new(seed);
        for step in 0..60 {
            random_step(&*disk.dir(), &mut rng);
            let kept = cut(&disk, KEEP);
            assert_eq!(
                image(&*kept.dir()),
                image(&*disk.dir()),
                "seed={seed} step={step}"
            );
        }
        let synced = disk.after_kill();
        for name in synced.file_names() {
            synced
                .dir()
                .open(&name, Access::Write)
                .unwrap()
                .sync()
                .unwrap();
        }
        synced.dir().sync().unwrap();
        assert_eq!(
            cut(&synced, DROP).image_hash(),
            disk.image_hash(),
            "seed={seed}"
        );
        assert_eq!(
            synced.after_power_cut_exhaustive(9).count(),
            1,
            "seed={seed}"
        );
    }
}

#[test]
fn the_generator_is_splitmix64() {
    // First outputs of the reference implementation for seed 1234567.
    let mut rng = Rng::new(1_234_567);
    assert_eq!(rng.next_u64(), 6_457_827_717_110_365_317);
    assert_eq!(rng.next_u64(), 3_203_168_211_198_807_973);
    assert!((0..1000).all(|_| rng.below(3) < 3));
    assert_eq!(rng.below(0), 0);
}
