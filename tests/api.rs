//! Each documented behaviour and each error of the public calls.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idemlog::testing::ManualClock;
use idemlog::testing::sim::{Fault, FaultKind, Op, SimDisk};
use idemlog::{
    AckAdvice, Change, Claim, ClaimOptions, ClaimVerdict, Commit, CommitVerdict, DedupLog,
    Durability, EffectClass, Error, ErrorKind, Event, Failure, Fingerprint, Internal,
    KEY_BYTES_MAX, KeyState, Namespace, NamespaceKind, NamespaceOptions, NonRepeatable,
    ObserveOptions, Observed, Options, Outcome, Probeable, Probed, Repeatable, Resolution,
    Retention, RunVerdict, Stamp, Ticket, WhenFull, ZeroFill,
};

const START_MS: u64 = 1_700_000_000_000;
const MINUTE_MS: u64 = 60_000;

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(START_MS))
}

/// A store on a simulated disk with a clock that stands still, and no background threads.
fn options(clock: &Arc<ManualClock>) -> Options {
    Options::new()
        .background(false)
        .zero_fill(ZeroFill::Never)
        .segment_bytes(64 * 1024)
        .clock(Arc::clone(clock) as _)
}

fn namespace() -> NamespaceOptions {
    NamespaceOptions::new().outcome_bytes_max(1024)
}

fn memory() -> DedupLog {
    options(&clock()).open_in_memory().unwrap()
}

fn kind<T: std::fmt::Debug>(result: idemlog::Result<T>) -> ErrorKind {
    result.unwrap_err().kind()
}

fn new<C: EffectClass>(verdict: ClaimVerdict<C>) -> Claim<C> {
    match verdict {
        ClaimVerdict::New(claim) => claim,
        other => panic!("{other:?}"),
    }
}

/// What is in a directory, with contents.
fn files(path: &Path) -> Vec<(std::path::PathBuf, Vec<u8>)> {
    let mut all: Vec<_> = std::fs::read_dir(path)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.clone(), std::fs::read(&path).unwrap_or_default()))
        .collect();
    all.sort();
    all
}

// Bad input

#[test]
fn bad_keys_are_invalid_for_every_call() {
    let log = memory();
    let filter = log.filter("f", namespace()).unwrap();
    let jobs = log.namespace::<Repeatable>("j", namespace()).unwrap();
    let epoch = Stamp::from_u64(1);
    for key in [Vec::new(), vec![1; KEY_BYTES_MAX + 1]] {
        let errors: Vec<Error> = vec![
            filter.observe(&key).unwrap_err(),
            filter
                .observe_with(&key, &ObserveOptions::new())
                .unwrap_err(),
            filter
                .observe_many(&[&key])
                .unwrap()
                .pop()
                .unwrap()
                .unwrap_err(),
            filter
                .check_many(&[&key])
                .unwrap()
                .pop()
                .unwrap()
                .unwrap_err(),
            filter.get(&key).unwrap_err(),
            filter.forget(&key).unwrap_err(),
            jobs.claim(&key).unwrap_err(),
            jobs.claim_many(&[&key], &ClaimOptions::new())
                .unwrap()
                .pop()
                .unwrap()
                .unwrap_err(),
            jobs.run_once(&key, |_| panic!("ran")).unwrap_err(),
            jobs.get(&key).unwrap_err(),
            jobs.resolve(&key, epoch, Resolution::NotApplied)
                .unwrap_err(),
            jobs.forget(&key, true).unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
            assert!(error.to_string().contains("key"), "{error}");
        }
    }
    assert_eq!(log.stats().records_count, 0);
}

#[test]
fn keys_of_all_lengths_up_to_the_limit_are_told_apart() {
    let log = options(&clock())
        .segment_bytes(1 << 20)
        .open_in_memory()
        .unwrap();
    let filter = log.filter("f", namespace()).unwrap();
    let long = vec![7; KEY_BYTES_MAX];
    for len in [
        1,
        7,
        8,
        253,
        254,
        255,
        256,
        257,
        4096,
        KEY_BYTES_MAX - 1,
        KEY_BYTES_MAX,
    ] {
        assert_eq!(
            filter.observe(&long[..len]).unwrap(),
            Observed::New,
            "{len}"
        );
        assert_eq!(
            filter.observe(&long[..len]).unwrap(),
            Observed::Duplicate,
            "{len}"
        );
    }
    for key in [
        &b"a\0"[..],
        b"a",
        b"\0a",
        b"\xff\xfe",
        "\u{1f980}".as_bytes(),
    ] {
        assert_eq!(filter.observe(key).unwrap(), Observed::New);
    }
}

#[test]
fn bad_names_and_other_kinds_are_invalid() {
    let log = memory();
    log.filter("taken", namespace()).unwrap();
    for name in ["", "a\nb", "\0", &"n".repeat(256)] {
        assert_eq!(kind(log.filter(name, namespace())), ErrorKind::Invalid);
        assert_eq!(
            kind(log.namespace::<Internal>(name, namespace())),
            ErrorKind::Invalid
        );
    }
    let error = log
        .namespace::<Repeatable>("taken", namespace())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("found=filter"), "{error}");
    log.namespace::<Probeable>("p", namespace()).unwrap();
    assert_eq!(
        kind(log.namespace::<NonRepeatable>("p", namespace())),
        ErrorKind::Invalid
    );
    assert_eq!(kind(log.filter("p", namespace())), ErrorKind::Invalid);
    assert_eq!(log.kind_of("p"), Some(NamespaceKind::Probeable));
    assert_eq!(log.kind_of("nobody"), None);
    let listed = log.namespaces();
    assert_eq!(
        listed,
        [
            ("p".into(), NamespaceKind::Probeable),
            ("taken".into(), NamespaceKind::Filter)
        ]
    );
}

#[test]
fn the_kind_of_a_namespace_survives_a_reopen() {
    let disk = SimDisk::new();
    let clock = clock();
    let log = options(&clock).open_on(disk.dir()).unwrap();
    log.namespace::<NonRepeatable>("pay", namespace()).unwrap();
    drop(log);
    let log = options(&clock).open_on(disk.dir()).unwrap();
    assert_eq!(log.kind_of("pay"), Some(NamespaceKind::NonRepeatable));
    assert_eq!(
        kind(log.namespace::<Repeatable>("pay", namespace())),
        ErrorKind::Invalid
    );
}

#[test]
fn bad_options_are_invalid_and_make_no_store() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("store");
    for bytes in [0, 4095, 4097, 128 << 20] {
        assert_eq!(
            kind(Options::new().segment_bytes(bytes).open(&path)),
            ErrorKind::Invalid
        );
    }
    assert_eq!(
        kind(Options::new().unsettled_count_max(0).open(&path)),
        ErrorKind::Invalid
    );
    assert!(!path.exists());
    let log = memory();
    let too_big = NamespaceOptions::new().outcome_bytes_max(idemlog::OUTCOME_BYTES_MAX + 1);
    assert_eq!(
        kind(log.namespace::<Repeatable>("a", too_big)),
        ErrorKind::Invalid
    );
    let none = namespace().attempts_max(0);
    assert_eq!(
        kind(log.namespace::<Repeatable>("a", none)),
        ErrorKind::Invalid
    );
    let no_room = NamespaceOptions::new().outcome_bytes_max(64 * 1024);
    assert_eq!(
        kind(log.namespace::<Repeatable>("a", no_room)),
        ErrorKind::Invalid
    );
}

#[test]
fn a_filter_opens_with_default_options_at_every_segment_size() {
    for bytes in [4096, 8192, 64 << 20] {
        let log = options(&clock())
            .segment_bytes(bytes)
            .open_in_memory()
            .unwrap();
        let filter = log.filter("f", NamespaceOptions::new()).unwrap();
        assert!(filter.observe("k").unwrap().is_new());
    }
}

#[test]
fn c34_an_outcome_over_the_limit_is_invalid_and_the_claim_is_still_held() {
    let log = memory();
    let jobs = log.namespace::<Repeatable>("j", namespace()).unwrap();
    for len in [0, 1, 1024] {
        let mut claim = new(jobs.claim(format!("fits-{len}")).unwrap());
        assert!(matches!(
            claim.commit(&vec![3; len]).unwrap(),
            CommitVerdict::Committed { .. }
        ));
        let ClaimVerdict::Duplicate(done) = jobs.claim(format!("fits-{len}")).unwrap() else {
            panic!()
        };
        assert_eq!(done.outcome, Outcome::Kept(vec![3; len]));
    }
    let mut claim = new(jobs.claim("k").unwrap());
    for len in [1025, 1 << 20] {
        let error = claim.commit(&vec![0; len]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("bytes_max=1024"), "{error}");
        assert!(matches!(
            jobs.claim("k").unwrap(),
            ClaimVerdict::Busy { .. }
        ));
    }
    let verdict = claim.commit_with(Commit::without_outcome()).unwrap();
    assert!(matches!(verdict, CommitVerdict::Committed { .. }));
    let ClaimVerdict::Duplicate(done) = jobs.claim("k").unwrap() else {
        panic!()
    };
    assert_eq!(done.outcome, Outcome::Dropped);
}

#[test]
fn errors_and_evidence_of_any_size_never_break_the_store() {
    let disk = SimDisk::memory();
    let clock = clock();
    let log = options(&clock)
        .segment_bytes(4 << 20)
        .open_on(disk.dir())
        .unwrap();
    let jobs = log.namespace::<Repeatable>("j", namespace()).unwrap();
    let pays = log.namespace::<NonRepeatable>("p", namespace()).unwrap();
    for len in [4096, 4097, 70_000, 600_000] {
        let text = vec![b'x'; len];
        let failures = [
            Failure::Permanent {
                error: text.clone(),
            },
            Failure::Retryable {
                after: Duration::ZERO,
                error: text.clone(),
            },
            Failure::Unknown {
                evidence: text.clone(),
            },
        ];
        for (number, failure) in failures.into_iter().enumerate() {
            let key = format!("{len}-{number}");
            match new(jobs.claim(&key).unwrap()).fail(failure.clone()) {
                Ok(change) => assert!(change.is_applied()),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Invalid, "{error}"),
            }
            let ran = jobs.run_once(format!("run-{key}"), |_| Err(failure.clone()));
            assert!(!matches!(ran, Ok(RunVerdict::Ran { .. })));
            let started = new(pays.claim(&key).unwrap()).start(b"evidence").unwrap();
            match started.fail(failure) {
                Ok(change) => assert!(change.is_applied()),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Invalid, "{error}"),
            }
        }
        let started = new(pays.claim(format!("start-{len}")).unwrap()).start(&text);
        assert_eq!(started.is_ok(), len <= 4096);
    }
    let mut claim = new(jobs.claim("after").unwrap());
    let _verdict = claim.commit(b"fine").unwrap();
    drop((claim, jobs, pays));
    log.close().unwrap();
    let log = options(&clock)
        .segment_bytes(4 << 20)
        .open_on(disk.dir())
        .unwrap();
    let jobs = log.namespace::<Repeatable>("j", namespace()).unwrap();
    assert!(matches!(jobs.get("after").unwrap(), KeyState::Done(_)));
}

// Opening

#[test]
fn a_directory_that_is_not_a_store_gets_no_file() {
    let parent = tempfile::tempdir().unwrap();
    for (name, content) in [
        ("notes.txt", "hello"),
        ("MANIFEST", "setup.py\n"),
        ("MANIFEST", ""),
    ] {
        let path = parent.path().join(format!("{name}{}", content.len()));
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join(name), content).unwrap();
        let before = files(&path);
        for options in [Options::new(), Options::new().create(false)] {
            let error = options.open(&path).unwrap_err();
            let typed = [ErrorKind::Incompatible, ErrorKind::Damaged];
            assert!(typed.contains(&error.kind()), "{error}");
            assert_eq!(files(&path), before, "{error}");
        }
    }
}

#[test]
fn without_create_nothing_is_made() {
    let parent = tempfile::tempdir().unwrap();
    let missing = parent.path().join("missing");
    assert_eq!(
        kind(Options::new().create(false).open(&missing)),
        ErrorKind::Incompatible
    );
    assert!(!missing.exists());
    let empty = parent.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    assert_eq!(
        kind(Options::new().create(false).open(&empty)),
        ErrorKind::Incompatible
    );
    assert!(files(&empty).is_empty());
    let nested = parent.path().join("no/such/parent");
    assert_eq!(kind(Options::new().open(&nested)), ErrorKind::Incompatible);
}

#[test]
fn c63_a_file_in_place_of_the_directory_is_refused_and_kept() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("store");
    std::fs::write(&path, "precious").unwrap();
    let error = DedupLog::open(&path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Incompatible);
    assert!(error.to_string().contains("not a directory"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    let dangling = parent.path().join("dangling");
    std::os::unix::fs::symlink(parent.path().join("nowhere"), &dangling).unwrap();
    assert!(DedupLog::open(&dangling).is_err());
    assert!(!parent.path().join("nowhere").exists());
}

#[test]
fn c63_odd_paths_work_as_they_are() {
    use std::os::unix::ffi::OsStrExt;
    let parent = tempfile::tempdir().unwrap();
    for name in [&b"with space"[..], "\u{1f980}".as_bytes(), b"not-utf8-\xff"] {
        let path = parent.path().join(std::ffi::OsStr::from_bytes(name));
        let log = DedupLog::open(&path).unwrap();
        assert!(
            log.filter("f", namespace())
                .unwrap()
                .observe("k")
                .unwrap()
                .is_new()
        );
        log.close().unwrap();
        assert!(path.join("MANIFEST").is_file());
    }
    assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 3);
}

#[test]
fn c09_a_store_of_a_newer_format_is_incompatible_and_untouched() {
    let disk = SimDisk::memory();
    let clock = clock();
    options(&clock)
        .open_on(disk.dir())
        .unwrap()
        .close()
        .unwrap();
    let mut manifest = disk.read_file("MANIFEST").unwrap();
    manifest[8..10].copy_from_slice(&7u16.to_le_bytes());
    manifest.truncate(40);
    disk.write_file("MANIFEST", manifest.clone());
    let before = disk.file_names();
    let error = options(&clock).open_on(disk.dir()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Incompatible);
    let text = error.to_string();
    assert!(
        text.contains("found=7") && text.contains("readable=1"),
        "{text}"
    );
    assert_eq!(disk.file_names(), before);
    assert_eq!(disk.read_file("MANIFEST").unwrap(), manifest);
}

#[test]
fn c63_a_directory_that_cannot_be_written_is_an_io_error_and_stays_empty() {
    for op in [Op::Create, Op::Write, Op::DirSync, Op::Sync, Op::Rename] {
        let disk = SimDisk::new();
        disk.fail(Fault::sticky(0, FaultKind::ReadOnly).only(op));
        let error = options(&clock()).open_on(disk.dir()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io, "{op:?}: {error}");
        disk.clear_faults();
        let log = options(&clock()).open_on(disk.dir()).unwrap();
        assert!(log.open_report().created);
    }
}

#[test]
fn c21_a_second_opener_is_told_who_holds_the_store_and_the_first_goes_on() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("store");
    let link = parent.path().join("link");
    let first = DedupLog::open(&path).unwrap();
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let here = std::env::current_dir().unwrap();
    let mut relative = std::path::PathBuf::new();
    for _ in here.components().skip(1) {
        relative.push("..");
    }
    relative.push(path.strip_prefix("/").unwrap());
    let filter = first.filter("f", namespace()).unwrap();
    for (number, other) in [&path, &link, &relative, &path].into_iter().enumerate() {
        let error = DedupLog::open(other).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Locked, "{error}");
        assert!(
            error
                .to_string()
                .contains(&format!("pid={}", std::process::id())),
            "{error}"
        );
        assert!(filter.observe(format!("k{number}")).unwrap().is_new());
    }
    drop(filter);
    first.close().unwrap();
    DedupLog::open(&link).unwrap();
}

#[test]
fn c33_a_lock_file_that_nobody_holds_is_no_obstacle() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("store");
    DedupLog::open(&path).unwrap().close().unwrap();
    std::fs::write(path.join("LOCK"), "pid=1").unwrap();
    let log = DedupLog::open(&path).unwrap();
    assert!(!log.open_report().created && log.open_report().clean);
}

#[test]
fn a_lock_timeout_waits_for_the_other_opener() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("store");
    let first = DedupLog::open(&path).unwrap();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| {
            Options::new()
                .lock_timeout(Duration::from_secs(30))
                .open(&path)
                .map(|_| ())
        });
        first.close().unwrap();
        second.join().unwrap().unwrap();
    });
}

#[test]
fn files_are_private_whatever_the_umask() {
    use std::os::unix::fs::PermissionsExt;
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("store");
    let before = rustix::process::umask(rustix::fs::Mode::empty());
    let log = Options::new()
        .segment_bytes(4096)
        .background(false)
        .open(&path)
        .unwrap();
    rustix::process::umask(before);
    let filter = log.filter("f", namespace().outcome_bytes_max(0)).unwrap();
    for n in 0..300 {
        assert!(filter.observe(format!("key-{n}")).unwrap().is_new());
    }
    log.maintain().unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(&path), 0o700);
    let made = files(&path);
    assert!(made.len() > 8, "{made:?}");
    for (file, _) in made {
        assert_eq!(mode(&file), 0o600, "{}", file.display());
    }
}

#[test]
fn a_store_file_that_is_a_link_is_refused() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("store");
    DedupLog::open(&path).unwrap().close().unwrap();
    for name in ["MANIFEST", "seg-000000000001.log", "LOCK"] {
        let (inside, outside) = (path.join(name), parent.path().join("outside"));
        std::fs::rename(&inside, &outside).unwrap();
        std::os::unix::fs::symlink(&outside, &inside).unwrap();
        let before = std::fs::read(&outside).unwrap();
        let error = DedupLog::open(&path).unwrap_err();
        assert!(!matches!(error.kind(), ErrorKind::Locked), "{error}");
        assert_eq!(std::fs::read(&outside).unwrap(), before);
        std::fs::remove_file(&inside).unwrap();
        std::fs::hard_link(&outside, &inside).unwrap();
        assert!(DedupLog::open(&path).is_err(), "{name} with two names");
        std::fs::remove_file(&inside).unwrap();
        std::fs::rename(&outside, &inside).unwrap();
        DedupLog::open(&path).unwrap().close().unwrap();
    }
}

#[test]
fn c25_a_foreign_file_inside_is_left_alone() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("store");
    DedupLog::open(&path).unwrap().close().unwrap();
    std::fs::write(path.join("README.txt"), "mine").unwrap();
    std::fs::write(path.join("MANIFEST.new"), "junk").unwrap();
    let log = DedupLog::open(&path).unwrap();
    assert_eq!(log.open_report().orphans_count, 1);
    assert_eq!(std::fs::read(path.join("README.txt")).unwrap(), b"mine");
    assert!(!path.join("MANIFEST.new").exists());
}

#[test]
fn the_open_report_says_what_was_found() {
    let disk = SimDisk::new();
    let clock = clock();
    let log = options(&clock).open_on(disk.dir()).unwrap();
    assert!(log.open_report().created);
    let jobs = log.namespace::<Repeatable>("j", namespace()).unwrap();
    let _held = new(jobs.claim("k").unwrap());
    log.sync().unwrap();
    let killed = options(&clock).open_on(disk.after_kill().dir()).unwrap();
    let report = killed.open_report();
    assert!(!report.created && !report.clean);
    assert_eq!((report.replayed_count, report.unsettled_count), (1, 1));
    killed.close().unwrap();
}

// Handles and guards

#[test]
fn guards_hold_the_store_until_they_are_dropped() {
    let disk = SimDisk::new();
    let clock = clock();
    let log = options(&clock).open_on(disk.dir()).unwrap();
    let jobs = log.namespace::<NonRepeatable>("j", namespace()).unwrap();
    let claim = new(jobs.claim("a").unwrap());
    let started = new(jobs.claim("b").unwrap()).start(b"").unwrap();
    drop(jobs);
    log.close().unwrap();
    for _ in 0..2 {
        assert_eq!(kind(options(&clock).open_on(disk.dir())), ErrorKind::Locked);
    }
    drop(claim);
    assert_eq!(kind(options(&clock).open_on(disk.dir())), ErrorKind::Locked);
    drop(started);
    let log = options(&clock).open_on(disk.dir()).unwrap();
    let jobs = log.namespace::<NonRepeatable>("j", namespace()).unwrap();
    // Its owner is gone; it was never started, so it is claimed again.
    assert!(matches!(
        jobs.claim("a").unwrap(),
        ClaimVerdict::Takeover { .. }
    ));
    assert!(matches!(jobs.claim("b").unwrap(), ClaimVerdict::InDoubt(_)));
}

#[test]
fn after_close_every_call_says_closed() {
    let log = memory();
    let filter = log.filter("f", namespace()).unwrap();
    let jobs = log.namespace::<Repeatable>("j", namespace()).unwrap();
    let mut claim = new(jobs.claim("k").unwrap());
    let other = log.clone();
    log.close().unwrap();
    let closed = ErrorKind::Closed;
    assert_eq!(kind(filter.observe("x")), closed);
    assert_eq!(kind(filter.observe_many(&["x"])), closed);
    assert_eq!(kind(filter.check_many(&["x"])), closed);
    assert_eq!(kind(filter.get("x")), closed);
    assert_eq!(kind(filter.forget("x")), closed);
    assert_eq!(kind(jobs.claim("x")), closed);
    assert_eq!(kind(jobs.claim_many(&["x"], &ClaimOptions::new())), closed);
    assert_eq!(kind(jobs.run_once("x", |_| panic!("ran"))), closed);
    assert_eq!(kind(jobs.get("x")), closed);
    assert_eq!(kind(jobs.forget("x", true)), closed);
    assert_eq!(kind(claim.commit(b"late")), closed);
    assert_eq!(kind(claim.renew(Duration::from_secs(1))), closed);
    assert_eq!(kind(other.filter("f", namespace())), closed);
    assert_eq!(kind(other.pending()), closed);
    assert_eq!(kind(other.in_doubt()), closed);
    assert_eq!(kind(other.sync()), closed);
    assert_eq!(kind(other.purge("f", true)), closed);
    other.close().unwrap();
}

#[test]
fn c05_a_clean_close_is_found_by_the_next_open() {
    let disk = SimDisk::new();
    let clock = clock();
    for round in 0..3 {
        let log = options(&clock).open_on(disk.dir()).unwrap();
        assert_eq!(log.open_report().clean, round > 0);
        assert_eq!(log.open_report().dropped_bytes, 0);
        let filter = log.filter("f", namespace()).unwrap();
        let buffered = ObserveOptions::new().durability(Durability::Buffered);
        assert!(
            filter
                .observe_with(format!("{round}"), &buffered)
                .unwrap()
                .is_new()
        );
        log.close().unwrap();
    }
    // Everything answered before the close survives a power cut after it.
    let cut = disk.after_power_cut(&mut idemlog::testing::sim::PowerCut::drop_all());
    let log = options(&clock).open_on(cut.dir()).unwrap();
    let filter = log.filter("f", namespace()).unwrap();
    assert_eq!(filter.observe("2").unwrap(), Observed::Duplicate);
}

#[test]
fn dropping_the_last_handle_closes_cleanly() {
    let disk = SimDisk::new();
    let clock = clock();
    let log = options(&clock).open_on(disk.dir()).unwrap();
    let filter = log.filter("f", namespace()).unwrap();
    drop(log);
    assert!(filter.observe("k").unwrap().is_new());
    assert_eq!(kind(options(&clock).open_on(disk.dir())), ErrorKind::Locked);
    drop(filter);
    assert!(
        options(&clock)
            .open_on(disk.dir())
            .unwrap()
            .open_report()
            .clean
    );
}

// Filters

#[test]
fn c24_fifty_copies_are_one_new_and_a_refused_duplicate_changes_nothing() {
    let disk = SimDisk::new();
    let clock = clock();
    for round in 0..2 {
        let log = options(&clock).open_on(disk.dir()).unwrap();
        let filter = log
            .filter("f", namespace().retention(Duration::from_secs(600)))
            .unwrap();
        let longer = ObserveOptions::new().retention(Retention::Forever);
        for copy in 0..50 {
            let expected = if round == 0 && copy == 0 {
                Observed::New
            } else {
                Observed::Duplicate
            };
            assert_eq!(filter.observe("k").unwrap(), expected);
            assert_eq!(
                filter.observe_with("k", &longer).unwrap(),
                Observed::Duplicate
            );
            assert_eq!(filter.get("k").unwrap(), KeyState::Seen);
        }
        assert_eq!(log.stats().records_count, u64::from(round == 0));
    }
    // No duplicate has extended the window.
    clock.advance_ms(600_001);
    let log = options(&clock).open_on(disk.dir()).unwrap();
    let filter = log.filter("f", namespace()).unwrap();
    assert_eq!(filter.observe("k").unwrap(), Observed::New);
}

#[test]
fn c24_losers_of_a_claim_change_nothing() {
    let log = memory();
    let jobs = log.namespace::<Repeatable>("j", namespace()).unwrap();
    let mut claim = new(jobs.claim("k").unwrap());
    let before = jobs.get("k").unwrap();
    for _ in 0..50 {
        drop(jobs.claim("k").unwrap());
        let ran = jobs.run_once("k", |_| panic!("ran")).unwrap();
        assert!(matches!(ran, RunVerdict::Busy { .. }));
        assert!(!jobs.forget("k", false).unwrap().is_applied());
        let resolved = jobs
            .resolve("k", claim.epoch(), Resolution::NotApplied)
            .unwrap();
        assert!(!resolved.is_applied());
    }
    assert_eq!(jobs.get("k").unwrap(), before);
    let _verdict = claim.commit(b"one").unwrap();
    let done = jobs.get("k").unwrap();
    for _ in 0..50 {
        assert!(matches!(
            jobs.claim("k").unwrap(),
            ClaimVerdict::Duplicate(_)
        ));
        let ran = jobs.run_once("k", |_| panic!("ran")).unwrap();
        assert!(matches!(ran, RunVerdict::Replayed(_)));
    }
    assert_eq!(jobs.get("k").unwrap(), done);
}

#[test]
fn c10_a_batch_answers_each_item_in_order_and_one_bad_key_spoils_nothing() {
    let log = memory();
    let filter = log.filter("f", namespace()).unwrap();
    assert!(filter.observe("key-500").unwrap().is_new());
    let mut keys: Vec<Vec<u8>> = (0..1000).map(|n| format!("key-{n}").into_bytes()).collect();
    keys[10] = b"key-9".to_vec();
    keys[700] = b"key-9".to_vec();
    keys[20] = vec![1; KEY_BYTES_MAX + 1];
    keys[21] = Vec::new();
    let flushes = log.stats().flushes_count;
    let answers = filter.observe_many(&keys).unwrap();
    assert!(log.stats().flushes_count - flushes <= 4);
    for (index, answer) in answers.iter().enumerate() {
        match index {
            10 | 500 | 700 => assert_eq!(*answer.as_ref().unwrap(), Observed::Duplicate, "{index}"),
            20 | 21 => assert_eq!(answer.as_ref().unwrap_err().kind(), ErrorKind::Invalid),
            _ => assert_eq!(*answer.as_ref().unwrap(), Observed::New, "{index}"),
        }
    }
    let checked = filter.check_many(&keys).unwrap();
    assert_eq!(
        checked
            .iter()
            .filter(|answer| matches!(answer, Ok(true)))
            .count(),
        998
    );
    assert_eq!(filter.observe_many(&[] as &[&str]).unwrap().len(), 0);
    let stats = log.stats();
    assert_eq!((stats.new_count, stats.duplicates_count), (996, 3));
}

#[test]
fn c10_a_key_that_fits_no_segment_is_an_error_of_its_own_item() {
    let log = options(&clock())
        .segment_bytes(4096)
        .open_in_memory()
        .unwrap();
    let filter = log.filter("f", namespace().outcome_bytes_max(0)).unwrap();
    let keys = [b"a".to_vec(), vec![1; 6000], b"b".to_vec()];
    let answers = filter.observe_many(&keys).unwrap();
    assert_eq!(answers[0].as_ref().unwrap(), &Observed::New);
    assert_eq!(answers[1].as_ref().unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(answers[2].as_ref().unwrap(), &Observed::New);
}

#[test]
fn c10_claims_and_commits_in_batches_answer_each_item() {
    let log = memory();
    let jobs = log.namespace::<Internal>("j", namespace()).unwrap();
    let other = log.namespace::<Internal>("o", namespace()).unwrap();
    let _done = new(jobs.claim("done").unwrap()).commit(b"old").unwrap();
    let keys = ["a", "b", "a", "done", "", "c"];
    let verdicts = jobs.claim_many(&keys, &ClaimOptions::new()).unwrap();
    let mut claims = Vec::new();
    for (key, verdict) in keys.iter().zip(verdicts) {
        match (*key, verdict) {
            ("done", Ok(ClaimVerdict::Duplicate(done))) => {
                assert_eq!(done.outcome, Outcome::Kept(b"old".to_vec()));
            }
            ("", Err(error)) => assert_eq!(error.kind(), ErrorKind::Invalid),
            ("a", Ok(ClaimVerdict::Busy { attempt: 1, .. })) if !claims.is_empty() => {}
            (_, Ok(ClaimVerdict::New(claim))) => claims.push(claim),
            (key, verdict) => panic!("{key}: {verdict:?}"),
        }
    }
    assert_eq!(claims.len(), 3);
    let foreign = new(other.claim("x").unwrap());
    let mut items: Vec<_> = claims
        .into_iter()
        .map(|claim| (claim, Commit::new(b"out".to_vec())))
        .collect();
    items[1].1 = Commit::new(vec![0; 2000]);
    items.push((foreign, Commit::new(b"".to_vec())));
    let flushes = log.stats().flushes_count;
    let verdicts = jobs.commit_many(&mut items).unwrap();
    assert_eq!(log.stats().flushes_count - flushes, 1);
    assert!(matches!(verdicts[0], Ok(CommitVerdict::Committed { .. })));
    assert_eq!(verdicts[1].as_ref().unwrap_err().kind(), ErrorKind::Invalid);
    assert!(matches!(verdicts[2], Ok(CommitVerdict::Committed { .. })));
    assert_eq!(verdicts[3].as_ref().unwrap_err().kind(), ErrorKind::Invalid);
    assert!(matches!(
        jobs.claim("b").unwrap(),
        ClaimVerdict::Busy { .. }
    ));
    assert!(matches!(other.get("x").unwrap(), KeyState::Pending { .. }));
    drop(items);
    assert_eq!(jobs.get("b").unwrap(), KeyState::Absent);
    assert!(matches!(jobs.get("a").unwrap(), KeyState::Done(_)));
}

#[test]
fn claims_of_a_batch_that_fails_are_released() {
    let clock = clock();
    let log = options(&clock)
        .segment_bytes(8192)
        .log_bytes_max(16 * 1024)
        .open_in_memory()
        .unwrap();
    let jobs = log
        .namespace::<Internal>("j", namespace().outcome_bytes_max(512))
        .unwrap();
    let keys: Vec<String> = (0..200).map(|n| format!("key-{n}")).collect();
    assert_eq!(
        kind(jobs.claim_many(&keys, &ClaimOptions::new())),
        ErrorKind::Full
    );
    for key in &keys {
        assert_eq!(jobs.get(key).unwrap(), KeyState::Absent, "{key}");
    }
    assert!(matches!(jobs.claim("key-0").unwrap(), ClaimVerdict::New(_)));
}

#[test]
fn forgotten_keys_are_new_again_also_after_reopen_and_seal() {
    let disk = SimDisk::new();
    let clock = clock();
    let open = || {
        options(&clock)
            .segment_bytes(4096)
            .open_on(disk.dir())
            .unwrap()
    };
    let small = namespace()
        .outcome_bytes_max(0)
        .retention(Retention::Forever);
    let log = open();
    let filter = log.filter("f", small.clone()).unwrap();
    for n in 0..400 {
        assert!(filter.observe(format!("key-{n}")).unwrap().is_new());
    }
    for n in (0..400).step_by(3) {
        let forgotten = filter.forget(format!("key-{n}")).unwrap();
        assert_eq!(forgotten, Change::Applied(KeyState::Absent));
    }
    drop((filter, log));
    for _ in 0..2 {
        let log = open();
        log.maintain().unwrap();
        let filter = log.filter("f", small.clone()).unwrap();
        for n in 0..400 {
            let expected = if n % 3 == 0 {
                KeyState::Absent
            } else {
                KeyState::Seen
            };
            assert_eq!(filter.get(format!("key-{n}")).unwrap(), expected, "{n}");
        }
    }
    let filter = open().filter("f", small).unwrap();
    assert!(filter.observe("key-3").unwrap().is_new());
    assert!(filter.forget("never there").unwrap().is_applied());
}

#[test]
fn a_sliding_window_is_extended_by_duplicates_and_a_fixed_one_is_not() {
    let clock = clock();
    let log = options(&clock).open_in_memory().unwrap();
    let window = namespace().retention(Duration::from_secs(60));
    let fixed = log.filter("fixed", window.clone()).unwrap();
    let sliding = log.filter("sliding", window.sliding(true)).unwrap();
    for filter in [&fixed, &sliding] {
        assert!(filter.observe("k").unwrap().is_new());
    }
    clock.advance_ms(40_000);
    for filter in [&fixed, &sliding] {
        assert_eq!(filter.observe("k").unwrap(), Observed::Duplicate);
    }
    clock.advance_ms(40_000);
    assert_eq!(fixed.observe("k").unwrap(), Observed::New);
    assert_eq!(sliding.observe("k").unwrap(), Observed::Duplicate);
    clock.advance_ms(61_000);
    assert_eq!(sliding.observe("k").unwrap(), Observed::New);
}

#[test]
fn retention_can_be_said_for_each_key() {
    let clock = clock();
    let log = options(&clock).open_in_memory().unwrap();
    let filter = log
        .filter("f", namespace().retention(Duration::from_secs(60)))
        .unwrap();
    let day = ObserveOptions::new().retention(Duration::from_secs(86_400));
    assert!(filter.observe_with("day", &day).unwrap().is_new());
    assert!(filter.observe("minute").unwrap().is_new());
    let jobs = log.namespace::<Internal>("j", namespace()).unwrap();
    let mut claim = new(jobs.claim("k").unwrap());
    let _v = claim
        .commit_with(Commit::new("x").retention(Duration::from_secs(60)))
        .unwrap();
    clock.advance_ms(61_000);
    assert_eq!(filter.observe("minute").unwrap(), Observed::New);
    assert_eq!(
        filter.observe_with("day", &day).unwrap(),
        Observed::Duplicate
    );
    assert_eq!(jobs.get("k").unwrap(), KeyState::Absent);
}

#[test]
fn c38_a_key_is_remembered_for_at_least_its_retention_and_expires_at_a_whole_second() {
    let second = Duration::from_secs(1);
    let table = [
        (Duration::ZERO, 999, 1_000),
        (Duration::from_nanos(1), 999, 1_000),
        (Duration::from_millis(1), 999, 1_000),
        (Duration::from_millis(1), 0, 1_000),
        (second, 999, 2_000),
        (second, 0, 1_000),
        (Duration::from_millis(1_500), 0, 2_000),
    ];
    for (retention, offset_ms, expires_ms) in table {
        let disk = SimDisk::new();
        let clock = clock();
        clock.advance_ms(offset_ms);
        let open = || options(&clock).open_on(disk.dir()).unwrap();
        let log = open();
        let filter = log.filter("f", namespace().retention(retention)).unwrap();
        assert!(filter.observe("k").unwrap().is_new());
        drop((filter, log));
        if expires_ms - 1 > offset_ms {
            clock.advance_ms(expires_ms - 1 - offset_ms);
            let log = open();
            let filter = log.filter("f", namespace()).unwrap();
            log.maintain().unwrap();
            assert_eq!(filter.get("k").unwrap(), KeyState::Seen, "{retention:?}");
            drop((filter, log));
            clock.advance_ms(1);
        } else {
            clock.advance_ms(expires_ms - offset_ms);
        }
        // At the very moment of expiry the key is gone.
        let log = open();
        let filter = log.filter("f", namespace()).unwrap();
        assert_eq!(filter.get("k").unwrap(), KeyState::Absent, "{retention:?}");
        log.maintain().unwrap();
        assert_eq!(filter.get("k").unwrap(), KeyState::Absent, "{retention:?}");
    }
    // More than what a u32 of seconds holds is for ever.
    for retention in [Duration::from_secs(100 * 365 * 86_400), Duration::MAX] {
        let clock = clock();
        let log = options(&clock).open_in_memory().unwrap();
        let filter = log.filter("f", namespace().retention(retention)).unwrap();
        assert!(filter.observe("k").unwrap().is_new());
        clock.advance_ms(200 * 365 * 86_400_000);
        assert_eq!(filter.observe("k").unwrap(), Observed::Duplicate);
    }
}

#[test]
fn c27_the_last_write_decides_about_expiry_also_after_a_reopen() {
    let disk = SimDisk::new();
    let (clock, twin_clock) = (clock(), clock());
    let twin = options(&twin_clock).open_in_memory().unwrap();
    let seconds = |s| ObserveOptions::new().retention(Duration::from_secs(s));
    let write = |log: &DedupLog| {
        let filter = log.filter("f", namespace().sliding(true)).unwrap();
        let forever = ObserveOptions::new().retention(Retention::Forever);
        assert!(filter.observe_with("a", &forever).unwrap().is_new());
        assert!(filter.forget("a").unwrap().is_applied());
        assert!(filter.observe_with("a", &seconds(3)).unwrap().is_new());
        assert!(filter.observe_with("b", &seconds(10)).unwrap().is_new());
        assert!(!filter.observe_with("b", &seconds(60)).unwrap().is_new());
        assert!(filter.observe_with("c", &seconds(60)).unwrap().is_new());
        assert!(filter.forget("c").unwrap().is_applied());
        assert!(filter.observe_with("c", &seconds(5)).unwrap().is_new());
    };
    write(&twin);
    let log = options(&clock).open_on(disk.dir()).unwrap();
    write(&log);
    drop(log);
    let twin = twin.filter("f", namespace()).unwrap();
    for at in 0..65 {
        if at % 7 == 0 {
            for name in disk
                .file_names()
                .iter()
                .filter(|name| name.starts_with("run-"))
            {
                disk.remove_file(name);
            }
        }
        let log = options(&clock).open_on(disk.after_kill().dir()).unwrap();
        let filter = log.filter("f", namespace()).unwrap();
        for key in ["a", "b", "c"] {
            assert_eq!(
                filter.get(key).unwrap(),
                twin.get(key).unwrap(),
                "{key} at {at} s"
            );
        }
        clock.advance_ms(1000);
        twin_clock.advance_ms(1000);
    }
    assert_eq!(twin.get("b").unwrap(), KeyState::Absent);
}

#[test]
fn c61_an_expired_key_that_is_observed_again_is_not_removed_with_its_past() {
    let clock = clock();
    let log = options(&clock)
        .segment_bytes(4096)
        .open_in_memory()
        .unwrap();
    let filter = log
        .filter(
            "f",
            namespace()
                .outcome_bytes_max(0)
                .retention(Duration::from_secs(60)),
        )
        .unwrap();
    for round in 0..6 {
        for n in 0..100 {
            assert_eq!(
                filter.observe(format!("key-{n}")).unwrap(),
                Observed::New,
                "{round} {n}"
            );
        }
        log.maintain().unwrap();
        clock.advance_ms(59_000);
        log.maintain().unwrap();
        for n in 0..100 {
            let key = format!("key-{n}");
            assert_eq!(
                filter.observe(key).unwrap(),
                Observed::Duplicate,
                "{round} {n}"
            );
        }
        clock.advance_ms(1_000);
    }
    log.maintain().unwrap();
    assert!(log.stats().drops_count > 3);
}

#[test]
fn c19_an_idle_store_frees_its_space_and_nothing_comes_back() {
    let disk = SimDisk::new();
    let clock = clock();
    let open = || options(&clock).open_on(disk.dir()).unwrap();
    let log = open();
    let filter = log
        .filter("f", namespace().retention(Duration::from_secs(60)))
        .unwrap();
    let keys: Vec<String> = (0..20_000).map(|n| format!("key-{n:08}")).collect();
    for chunk in keys.chunks(1000) {
        for answer in filter.observe_many(chunk).unwrap() {
            assert!(answer.unwrap().is_new());
        }
    }
    log.maintain().unwrap();
    let full = log.stats();
    assert!(full.segments_count > 5);
    clock.advance_ms(61_000);
    log.maintain().unwrap();
    let empty = log.stats();
    assert!(empty.log_bytes * 4 < full.log_bytes, "{empty:?}");
    assert_eq!((empty.run_bytes, empty.filter_bytes), (0, 0));
    drop((filter, log));
    let mut sizes = Vec::new();
    for _ in 0..3 {
        let log = open();
        log.maintain().unwrap();
        let filter = log.filter("f", namespace()).unwrap();
        assert!(
            filter
                .check_many(&keys)
                .unwrap()
                .into_iter()
                .all(|seen| !seen.unwrap())
        );
        sizes.push((log.stats().log_bytes, disk.file_names().len()));
    }
    assert_eq!(sizes[0], sizes[2]);
}

#[test]
fn the_window_is_the_age_of_the_oldest_record_kept() {
    let clock = clock();
    let log = options(&clock)
        .segment_bytes(4096)
        .open_in_memory()
        .unwrap();
    let filter = log.filter("f", namespace().outcome_bytes_max(0)).unwrap();
    for n in 0..300 {
        assert!(filter.observe(format!("key-{n}")).unwrap().is_new());
        clock.advance_ms(1000);
    }
    log.maintain().unwrap();
    let window = log.stats().window;
    assert!(
        window > Duration::from_secs(200) && window < Duration::from_secs(400),
        "{window:?}"
    );
}

// Bounds

#[test]
fn c65_at_its_bound_a_store_refuses_new_keys_and_forgets_none() {
    let clock = clock();
    let log = options(&clock)
        .segment_bytes(4096)
        .log_bytes_max(32 * 1024)
        .open_in_memory()
        .unwrap();
    let filter = log.filter("f", namespace().outcome_bytes_max(0)).unwrap();
    let mut kept = Vec::new();
    let mut full = None;
    for n in 0..5000 {
        match filter.observe(format!("key-{n}")) {
            Ok(observed) => {
                assert_eq!(observed, Observed::New);
                kept.push(n);
            }
            Err(error) => full = Some(error),
        }
    }
    let full = full.unwrap();
    assert_eq!(full.kind(), ErrorKind::Full, "{full}");
    assert!(full.to_string().contains("log_bytes_max=32768"), "{full}");
    assert!(kept.len() > 100);
    for n in &kept {
        assert_eq!(
            filter.observe(format!("key-{n}")).unwrap(),
            Observed::Duplicate,
            "{n}"
        );
    }
    assert!(log.stats().log_bytes <= 32 * 1024, "{:?}", log.stats());
    assert_eq!(log.stats().evicted_count, 0);
    // Deletions always fit, and expiry makes room again.
    assert!(
        filter
            .forget(format!("key-{}", kept[0]))
            .unwrap()
            .is_applied()
    );
    clock.advance_ms(8 * 86_400_000);
    log.maintain().unwrap();
    assert_eq!(filter.observe("key-1").unwrap(), Observed::New);
}

#[test]
fn c65_eviction_is_opt_in_counted_and_takes_the_oldest_first() {
    let events = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&events);
    let log = options(&clock())
        .segment_bytes(4096)
        .log_bytes_max(32 * 1024)
        .when_full(WhenFull::EvictOldest)
        .on_event(move |event| told.lock().unwrap().push(event.clone()))
        .open_in_memory()
        .unwrap();
    let filter = log.filter("f", namespace().outcome_bytes_max(0)).unwrap();
    for n in 0..3000 {
        assert_eq!(
            filter.observe(format!("key-{n}")).unwrap(),
            Observed::New,
            "{n}"
        );
    }
    assert!(log.stats().evicted_count > 1000);
    log.maintain().unwrap();
    let told = events.lock().unwrap();
    assert!(
        told.iter()
            .any(|event| matches!(event, Event::Evicted { .. }))
    );
    drop(told);
    assert_eq!(filter.get("key-2999").unwrap(), KeyState::Seen);
    assert_eq!(filter.get("key-0").unwrap(), KeyState::Absent);
    let seen: Vec<bool> = (0..3000)
        .map(|n| filter.get(format!("key-{n}")).unwrap() == KeyState::Seen)
        .collect();
    assert!(seen.is_sorted(), "only the oldest may go");
    assert!(log.stats().log_bytes <= 32 * 1024);
}

#[test]
fn commits_of_open_claims_fit_although_the_store_is_full() {
    let log = options(&clock())
        .segment_bytes(8192)
        .log_bytes_max(48 * 1024)
        .open_in_memory()
        .unwrap();
    let jobs = log
        .namespace::<NonRepeatable>("j", namespace().outcome_bytes_max(1000))
        .unwrap();
    let mut claims = Vec::new();
    let error = loop {
        match jobs.claim(format!("key-{}", claims.len())) {
            Ok(verdict) => claims.push(new(verdict)),
            Err(error) => break error,
        }
        assert!(claims.len() < 1000);
    };
    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
    assert!(claims.len() > 5);
    for (number, claim) in claims.into_iter().enumerate() {
        assert!(claim.renew(Duration::from_secs(90)).unwrap().is_applied());
        let mut started = claim.start(&[5; 100]).unwrap();
        let verdict = started.commit(&[7; 1000]).unwrap();
        assert!(
            matches!(verdict, CommitVerdict::Committed { .. }),
            "{number}"
        );
    }
}

#[test]
fn unsettled_claims_are_bounded_and_the_rest_goes_on() {
    let log = options(&clock())
        .unsettled_count_max(3)
        .open_in_memory()
        .unwrap();
    let jobs = log.namespace::<Repeatable>("j", namespace()).unwrap();
    let mut claims: Vec<_> = (0..3)
        .map(|n| new(jobs.claim(format!("{n}")).unwrap()))
        .collect();
    let error = jobs.claim("x").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full);
    assert!(
        error.to_string().contains("unsettled_count_max=3"),
        "{error}"
    );
    assert!(matches!(
        jobs.claim("1").unwrap(),
        ClaimVerdict::Busy { .. }
    ));
    let _verdict = claims[0].commit(b"").unwrap();
    assert_eq!(log.stats().unsettled_count, 2);
    drop(new(jobs.claim("x").unwrap()));
    drop(claims);
    assert_eq!(log.stats().unsettled_count, 0);
}

#[test]
fn a_full_disk_is_full_and_space_makes_the_store_go_on() {
    let disk = SimDisk::new();
    let clock = clock();
    let log = options(&clock)
        .segment_bytes(8192)
        .open_on(disk.dir())
        .unwrap();
    let filter = log.filter("f", namespace()).unwrap();
    disk.set_free_bytes(Some(40 * 1024));
    let mut kept = Vec::new();
    let error = loop {
        let key = format!("key-{}", kept.len());
        match filter.observe(&key) {
            Ok(_) => kept.push(key),
            Err(error) => break error,
        }
        assert!(kept.len() < 5000);
    };
    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
    for key in &kept {
        assert_eq!(filter.observe(key).unwrap(), Observed::Duplicate);
    }
    disk.set_free_bytes(Some(1 << 20));
    for n in 0..500 {
        assert!(filter.observe(format!("later-{n}")).unwrap().is_new());
    }
    let log = options(&clock).open_on(disk.after_kill().dir()).unwrap();
    let filter = log.filter("f", namespace()).unwrap();
    assert!(
        filter
            .check_many(&kept)
            .unwrap()
            .into_iter()
            .all(Result::unwrap)
    );
}

// Claims

#[test]
fn c45_only_an_explicit_commit_is_final() {
    let log = memory();
    let jobs = log.namespace::<Repeatable>("j", namespace()).unwrap();
    let runs = std::cell::Cell::new(0);
    let run = |failure: Option<Failure>| {
        jobs.run_once("k", |attempt| {
            runs.set(runs.get() + 1);
            assert_eq!(attempt.attempt(), runs.get());
            failure.map_or(Ok(Vec::new()), Err)
        })
        .unwrap()
    };
    let unknown = run(Some(Failure::unknown("timeout")));
    assert!(
        matches!(
            unknown,
            RunVerdict::Failed {
                state: KeyState::Failed { .. }
            }
        ),
        "{unknown:?}"
    );
    assert_eq!(
        unknown.ack_advice(),
        AckAdvice::Redeliver {
            after: Duration::ZERO
        }
    );
    let retryable = run(Some(Failure::retryable(Duration::ZERO, "again")));
    assert!(matches!(retryable, RunVerdict::Failed { .. }));
    // An empty outcome is an outcome.
    let RunVerdict::Ran {
        outcome,
        commit: CommitVerdict::Committed { .. },
    } = run(None)
    else {
        panic!()
    };
    assert_eq!(outcome, b"");
    let RunVerdict::Replayed(done) = run(None) else {
        panic!()
    };
    assert_eq!((done.outcome, done.attempt), (Outcome::Kept(Vec::new()), 3));
    assert_eq!(runs.get(), 3);
    // A permanent error is kept by choice, and replayed.
    let rejected = jobs
        .run_once("r", |_| Err(Failure::permanent("bad card")))
        .unwrap();
    assert_eq!(rejected.ack_advice(), AckAdvice::Ack);
    let again = jobs.run_once("r", |_| panic!("ran")).unwrap();
    assert_eq!(
        again,
        RunVerdict::Rejected {
            error: b"bad card".to_vec()
        }
    );
}

#[test]
fn a_panic_in_an_effect_is_of_unknown_outcome_and_goes_on() {
    fn after_panic<C: EffectClass>(log: &DedupLog) -> KeyState {
        let jobs = log.namespace::<C>(C::KIND.name(), namespace()).unwrap();
        let run = std::panic::AssertUnwindSafe(|| jobs.run_once("k", |_| panic!("boom")));
        let panic = std::panic::catch_unwind(run).unwrap_err();
        assert_eq!(*panic.downcast_ref::<&str>().unwrap(), "boom");
        jobs.get("k").unwrap()
    }
    let log = memory();
    assert!(matches!(
        after_panic::<Repeatable>(&log),
        KeyState::Failed { .. }
    ));
    assert!(matches!(
        after_panic::<Internal>(&log),
        KeyState::Failed { .. }
    ));
    assert!(matches!(
        after_panic::<NonRepeatable>(&log),
        KeyState::InDoubt(_)
    ));
    let probeable = after_panic::<Probeable>(&log);
    assert!(
        matches!(probeable, KeyState::Pending { started: true, .. }),
        "{probeable:?}"
    );
    assert!(log.health().ok);
}

#[test]
fn c34_an_outcome_too_large_is_an_error_and_the_effect_counts_as_done() {
    let log = memory();
    let jobs = log.namespace::<NonRepeatable>("j", namespace()).unwrap();
    let error = jobs.run_once("k", |_| Ok(vec![0; 2000])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let RunVerdict::Replayed(done) = jobs.run_once("k", |_| panic!("ran twice")).unwrap() else {
        panic!()
    };
    assert_eq!(done.outcome, Outcome::Dropped);
}

#[test]
fn c34_after_a_failed_commit_the_claim_is_still_held_and_may_commit_again() {
    let disk = SimDisk::new();
    let log = options(&clock()).open_on(disk.dir()).unwrap();
    let jobs = log.namespace::<Repeatable>("j", namespace()).unwrap();
    let mut claim = new(jobs.claim("k").unwrap());
    log.sync().unwrap();
    for fault in [FaultKind::NoSpace, FaultKind::Io] {
        disk.fail(Fault::once(disk.steps(), fault).only(Op::Write));
        let error = claim.commit(b"outcome").unwrap_err();
        assert!(
            [ErrorKind::Full, ErrorKind::Io].contains(&error.kind()),
            "{error:?}"
        );
        assert_eq!(error.applied(), idemlog::Applied::No);
        assert!(matches!(
            jobs.claim("k").unwrap(),
            ClaimVerdict::Busy { .. }
        ));
    }
    assert!(matches!(
        claim.commit(b"outcome").unwrap(),
        CommitVerdict::Committed { .. }
    ));
    assert!(matches!(
        jobs.claim("k").unwrap(),
        ClaimVerdict::Duplicate(_)
    ));
}

#[test]
fn c01_the_fingerprint_is_compared_on_every_path() {
    let disk = SimDisk::new();
    let clock = clock();
    let open = || {
        options(&clock)
            .segment_bytes(8192)
            .open_on(disk.dir())
            .unwrap()
    };
    let same = ClaimOptions::new().fingerprint(Fingerprint::of(b"amount=5"));
    let other = ClaimOptions::new().fingerprint(Fingerprint::of(b"amount=6"));
    let small = || namespace().outcome_bytes_max(256);
    let mut log = open();
    let mut jobs = log.namespace::<Repeatable>("j", small()).unwrap();
    let mut claim = new(jobs.claim_with("k", &same).unwrap());
    let mismatch = |jobs: &Namespace<Repeatable>| {
        let before = jobs.get("k").unwrap();
        assert!(matches!(
            jobs.claim_with("k", &other).unwrap(),
            ClaimVerdict::Mismatch
        ));
        let ran = jobs.run_once_with("k", &other, |_| panic!("ran")).unwrap();
        assert_eq!(ran, RunVerdict::Mismatch);
        assert_eq!(ran.ack_advice(), AckAdvice::DeadLetter);
        assert_eq!(jobs.get("k").unwrap(), before);
    };
    // In progress.
    mismatch(&jobs);
    assert!(matches!(
        jobs.claim_with("k", &same).unwrap(),
        ClaimVerdict::Busy { .. }
    ));
    assert!(claim.renew(Duration::from_secs(70)).unwrap().is_applied());
    mismatch(&jobs);
    // Failed, and claimed anew without saying a fingerprint.
    let _failed = claim
        .fail(Failure::retryable(Duration::ZERO, "again"))
        .unwrap();
    mismatch(&jobs);
    claim = jobs.claim("k").unwrap().claim().unwrap();
    mismatch(&jobs);
    // Done: now, reopened, sealed, index gone.
    let _verdict = claim.commit(b"outcome").unwrap();
    drop(claim);
    for step in 0..4 {
        mismatch(&jobs);
        for options in [&same, &ClaimOptions::new()] {
            let ClaimVerdict::Duplicate(done) = jobs.claim_with("k", options).unwrap() else {
                panic!()
            };
            assert_eq!(done.outcome, Outcome::Kept(b"outcome".to_vec()));
        }
        if step == 1 {
            for n in 0..200 {
                let _ran = jobs
                    .run_once(format!("fill-{n}"), |_| Ok(vec![1; 100]))
                    .unwrap();
            }
            log.maintain().unwrap();
        }
        drop(jobs);
        log.close().unwrap();
        if step == 2 {
            let runs = disk
                .file_names()
                .into_iter()
                .filter(|name| name.starts_with("run-"));
            assert!(runs.filter(|name| disk.remove_file(name)).count() >= 2);
        }
        log = open();
        jobs = log.namespace::<Repeatable>("j", small()).unwrap();
    }
}

#[test]
fn c01_a_mismatch_survives_rejection_death_and_doubt() {
    let log = memory();
    let jobs = log
        .namespace::<NonRepeatable>("j", namespace().attempts_max(1))
        .unwrap();
    let same = ClaimOptions::new().fingerprint(Fingerprint::of(b"a"));
    let other = ClaimOptions::new().fingerprint(Fingerprint::of(b"b"));
    let claim = |key: &str| new(jobs.claim_with(key, &same).unwrap());
    let _rejected = claim("rejected").fail(Failure::permanent("no")).unwrap();
    let _dead = claim("dead")
        .fail(Failure::retryable(Duration::ZERO, "last"))
        .unwrap();
    drop(claim("doubt").start(b"").unwrap());
    for key in ["rejected", "dead", "doubt"] {
        assert_eq!(jobs.get(key).unwrap().name().replace("in-", ""), key);
        assert!(
            matches!(
                jobs.claim_with(key, &other).unwrap(),
                ClaimVerdict::Mismatch
            ),
            "{key}"
        );
    }
}

#[test]
fn c02_a_late_owner_changes_nothing_of_its_successor() {
    type End = fn(Claim<Repeatable>) -> bool;
    let ends: [(&str, End); 6] = [
        ("commit", |mut c| {
            matches!(c.commit(b"late").unwrap(), CommitVerdict::Fenced { .. })
        }),
        ("fail", |c| {
            !c.fail(Failure::permanent("late")).unwrap().is_applied()
        }),
        ("release", |c| {
            !c.fail(Failure::Release).unwrap().is_applied()
        }),
        ("renew", |c| {
            !c.renew(Duration::from_secs(900)).unwrap().is_applied()
        }),
        ("start", |c| c.start(b"late").is_err()),
        ("drop", |c| {
            drop(c);
            true
        }),
    ];
    for (name, end) in ends {
        let clock = clock();
        let log = options(&clock).open_in_memory().unwrap();
        let lease = Duration::from_secs(30);
        let jobs = log
            .namespace::<Repeatable>("j", namespace().lease(lease))
            .unwrap();
        let late = new(jobs.claim("k").unwrap());
        clock.advance_ms(30_001);
        let ClaimVerdict::Takeover {
            claim: mut second,
            previous,
        } = jobs.claim("k").unwrap()
        else {
            panic!()
        };
        assert_eq!((previous.epoch, previous.attempt), (late.epoch(), 1));
        assert!(second.epoch() > late.epoch() && second.attempt() == 2);
        let before = jobs.get("k").unwrap();
        assert!(end(late), "{name}");
        assert_eq!(jobs.get("k").unwrap(), before, "{name}");
        assert!(matches!(
            second.commit(b"mine").unwrap(),
            CommitVerdict::Committed { .. }
        ));
    }
}

#[test]
fn c02_stamps_never_repeat_over_forget_release_expiry_and_reopen() {
    let disk = SimDisk::new();
    let clock = clock();
    let mut last = Stamp::from_u64(0);
    for round in 0..4 {
        let log = options(&clock).open_on(disk.dir()).unwrap();
        let jobs = log.namespace::<Repeatable>("j", namespace()).unwrap();
        for _ in 0..3 {
            let old = jobs.claim("k").unwrap().claim().unwrap();
            assert!(old.epoch() > last, "round {round}");
            last = old.epoch();
            assert!(jobs.forget("k", true).unwrap().is_applied());
            let mut new = new(jobs.claim("k").unwrap());
            assert!(new.epoch() > last);
            last = new.epoch();
            assert!(!old.fail(Failure::Release).unwrap().is_applied());
            let _verdict = new.commit(b"").unwrap();
            assert!(jobs.forget("k", false).unwrap().is_applied());
        }
        // Also when the wall clock has gone back to 1970 between two openers.
        clock.set_wall_ms(if round % 2 == 0 { 0 } else { START_MS });
    }
}

#[test]
fn a_lapsed_claim_that_nobody_took_over_commits_late() {
    let events = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&events);
    let clock = clock();
    let log = options(&clock)
        .on_event(move |event| told.lock().unwrap().push(event.clone()))
        .open_in_memory()
        .unwrap();
    let jobs = log.namespace::<NonRepeatable>("j", namespace()).unwrap();
    let mut started = new(jobs.claim("k").unwrap()).start(b"sent").unwrap();
    clock.advance_ms(10 * MINUTE_MS);
    let ClaimVerdict::InDoubt(doubt) = jobs.claim("k").unwrap() else {
        panic!()
    };
    assert_eq!(
        (doubt.epoch, doubt.evidence),
        (started.epoch(), b"sent".to_vec())
    );
    assert_eq!(log.in_doubt().unwrap().len(), 1);
    assert!(matches!(
        started.commit(b"x").unwrap(),
        CommitVerdict::Committed { .. }
    ));
    log.maintain().unwrap();
    assert!(matches!(
        events.lock().unwrap()[..],
        [Event::LateCommit { .. }]
    ));
    assert_eq!(
        started.commit(b"x").unwrap(),
        CommitVerdict::AlreadyCommitted
    );
    let CommitVerdict::Conflict { current, outcome } = started.commit(b"y").unwrap() else {
        panic!()
    };
    assert_eq!(
        (current.outcome, outcome),
        (Outcome::Kept(b"x".to_vec()), b"y".to_vec())
    );
}

#[test]
fn each_resolution_ends_the_doubt_and_the_old_owner_learns_it() {
    let log = memory();
    let jobs = log.namespace::<NonRepeatable>("j", namespace()).unwrap();
    let doubt = |key: &str| {
        let started = new(jobs.claim(key).unwrap()).start(b"e").unwrap();
        let ticket = started.detach();
        let unknown = Failure::Unknown {
            evidence: b"timeout".to_vec(),
        };
        assert!(jobs.fail_ticket(&ticket, &unknown).unwrap().is_applied());
        ticket
    };
    let applied = doubt("applied");
    let wrong = Stamp::from_u64(applied.epoch().get() + 1);
    let refused = jobs
        .resolve("applied", wrong, Resolution::NotApplied)
        .unwrap();
    assert!(!refused.is_applied());
    let resolution = Resolution::Applied(b"out".to_vec());
    let change = jobs
        .resolve("applied", applied.epoch(), resolution)
        .unwrap();
    assert!(matches!(change, Change::Applied(KeyState::Done(_))));
    let verdict = jobs.commit_ticket(&applied, Commit::new("out")).unwrap();
    assert_eq!(verdict, CommitVerdict::AlreadyCommitted);
    let verdict = jobs.commit_ticket(&applied, Commit::new("other")).unwrap();
    assert!(matches!(verdict, CommitVerdict::Conflict { .. }));

    let not = doubt("not");
    let change = jobs
        .resolve("not", not.epoch(), Resolution::NotApplied)
        .unwrap();
    assert!(matches!(change, Change::Applied(KeyState::Failed { .. })));
    let verdict = jobs.commit_ticket(&not, Commit::new("late")).unwrap();
    assert!(matches!(verdict, CommitVerdict::Fenced { .. }));
    let ClaimVerdict::Retry { claim, previous } = jobs.claim("not").unwrap() else {
        panic!()
    };
    assert_eq!((claim.attempt(), previous.attempt), (2, 1));

    let given_up = doubt("dead");
    let _dead = jobs
        .resolve("dead", given_up.epoch(), Resolution::Abandon)
        .unwrap();
    let dead = jobs.claim("dead").unwrap();
    assert_eq!(dead.ack_advice(), Some(AckAdvice::DeadLetter));
    assert!(matches!(dead, ClaimVerdict::Dead { attempts: 1, .. }));
}

#[test]
fn detached_claims_outlive_their_process_and_only_their_lease_ends_them() {
    let disk = SimDisk::new();
    let clock = clock();
    let open = || options(&clock).open_on(disk.dir()).unwrap();
    let detached = ClaimOptions::new()
        .detached(true)
        .lease(Duration::from_secs(300));
    let log = open();
    let jobs = log.namespace::<Probeable>("j", namespace()).unwrap();
    let ticket = new(jobs.claim_with("k 1", &detached).unwrap()).detach();
    let plain = new(jobs.claim("plain").unwrap()).detach();
    let word = ticket.to_string();
    drop((jobs, log));

    let log = open();
    let jobs = log.namespace::<Probeable>("j", namespace()).unwrap();
    let ticket: Ticket = word.parse().unwrap();
    assert_eq!((ticket.namespace(), ticket.key()), ("j", &b"k 1"[..]));
    assert!(
        matches!(jobs.claim("k 1").unwrap(), ClaimVerdict::Busy { owner, .. } if owner.detached)
    );
    assert!(matches!(
        jobs.claim("plain").unwrap(),
        ClaimVerdict::Takeover { .. }
    ));
    assert!(
        !jobs
            .fail_ticket(&plain, &Failure::Release)
            .unwrap()
            .is_applied()
    );
    let unstarted = jobs.commit_ticket(&ticket, Commit::new("x"));
    assert_eq!(kind(unstarted), ErrorKind::Invalid);
    let other = log.namespace::<Probeable>("other", namespace()).unwrap();
    assert_eq!(
        kind(other.renew_ticket(&ticket, Duration::ZERO)),
        ErrorKind::Invalid
    );
    assert!(jobs.start_ticket(&ticket, b"e").unwrap().is_applied());
    assert!(
        jobs.renew_ticket(&ticket, Duration::from_secs(600))
            .unwrap()
            .is_applied()
    );
    drop((jobs, other, log));

    clock.advance_ms(400_000);
    let log = open();
    let jobs = log.namespace::<Probeable>("j", namespace()).unwrap();
    assert!(matches!(
        jobs.claim("k 1").unwrap(),
        ClaimVerdict::Busy { .. }
    ));
    let verdict = jobs.commit_ticket(&ticket, Commit::new("x")).unwrap();
    assert!(matches!(verdict, CommitVerdict::Committed { .. }));
    assert!(matches!(
        jobs.claim("k 1").unwrap(),
        ClaimVerdict::Duplicate(_)
    ));
}

#[test]
fn a_probe_decides_after_the_settle_time_and_may_call_back() {
    let clock = clock();
    let log = options(&clock).open_in_memory().unwrap();
    let answers = Arc::new(Mutex::new(vec![
        Probed::Unknown,
        Probed::Applied(b"found".to_vec()),
        Probed::NotApplied,
    ]));
    let store = log.clone();
    let jobs = log
        .namespace::<Probeable>("j", namespace().settle(Duration::from_secs(120)))
        .unwrap()
        .with_probe(move |request| {
            assert_eq!(request.doubt.evidence, b"sent");
            assert_eq!(store.pending().unwrap().len(), 1);
            assert!(store.stats().unsettled_count > 0);
            answers.lock().unwrap().pop().unwrap()
        });
    for (key, expected) in [
        ("not", "takeover"),
        ("applied", "duplicate"),
        ("unknown", "doubt"),
    ] {
        let started = new(jobs.claim(key).unwrap()).start(b"sent").unwrap();
        clock.advance_ms(61_000);
        // The lease has lapsed, but the effect may still be on its way.
        let ClaimVerdict::Busy { lease_left, .. } = jobs.claim(key).unwrap() else {
            panic!()
        };
        assert_eq!(lease_left, Duration::from_secs(59));
        clock.advance_ms(59_000);
        let found = match jobs.claim(key).unwrap() {
            ClaimVerdict::Takeover { claim, previous } => {
                assert_eq!((claim.attempt(), previous.started), (2, true));
                let mut second = claim.start(b"sent again").unwrap();
                let _verdict = second.commit(b"second").unwrap();
                "takeover"
            }
            ClaimVerdict::Duplicate(done) => {
                assert_eq!(
                    (done.outcome, done.attempt),
                    (Outcome::Kept(b"found".to_vec()), 1)
                );
                "duplicate"
            }
            ClaimVerdict::InDoubt(doubt) => {
                let again = jobs.resolve(key, doubt.epoch, Resolution::Abandon).unwrap();
                assert!(again.is_applied());
                "doubt"
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(found, expected);
        drop(started);
    }
}

#[test]
fn a_message_that_kills_its_worker_reaches_dead() {
    let disk = SimDisk::new();
    let clock = clock();
    let mut disk_now = disk.clone();
    for attempt in 1..=4 {
        let log = options(&clock).open_on(disk_now.dir()).unwrap();
        let jobs = log
            .namespace::<Repeatable>("j", namespace().attempts_max(3))
            .unwrap();
        match jobs.claim("k").unwrap() {
            ClaimVerdict::Dead { attempts: 3, .. } if attempt == 4 => {
                let run = jobs.run_once("k", |_| panic!("ran")).unwrap();
                assert_eq!(run.ack_advice(), AckAdvice::DeadLetter);
                return;
            }
            ClaimVerdict::New(claim) => assert_eq!((attempt, claim.attempt()), (1, 1)),
            ClaimVerdict::Takeover { claim, .. } => assert_eq!(claim.attempt(), attempt),
            other => panic!("attempt {attempt}: {other:?}"),
        }
        // Killed inside the effect: only what was written survives.
        disk_now = disk_now.after_kill();
    }
    panic!("never dead");
}

#[test]
fn attempts_are_counted_over_failures_and_the_last_error_is_kept() {
    let events = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&events);
    let log = options(&clock())
        .on_event(move |event| told.lock().unwrap().push(event.clone()))
        .open_in_memory()
        .unwrap();
    let jobs = log
        .namespace::<Internal>("j", namespace().attempts_max(2))
        .unwrap();
    for attempt in 1..=2 {
        let run = jobs.run_once("k", |a| {
            Err(Failure::retryable(Duration::ZERO, a.attempt()))
        });
        let RunVerdict::Failed { state } = run.unwrap() else {
            panic!()
        };
        assert_eq!(state.name(), if attempt == 2 { "dead" } else { "failed" });
    }
    let ClaimVerdict::Dead { attempts, error } = jobs.claim("k").unwrap() else {
        panic!()
    };
    assert_eq!((attempts, error), (2, b"2".to_vec()));
    log.maintain().unwrap();
    assert!(
        events
            .lock()
            .unwrap()
            .iter()
            .any(|event| matches!(event, Event::Dead { .. }))
    );
    // Released claims do not count.
    for _ in 0..5 {
        drop(new(jobs.claim("released").unwrap()));
    }
    assert_eq!(new(jobs.claim("released").unwrap()).attempt(), 1);
}

#[test]
fn a_backoff_is_waited_for_and_says_how_long() {
    let clock = clock();
    let log = options(&clock).open_in_memory().unwrap();
    let jobs = log.namespace::<Repeatable>("j", namespace()).unwrap();
    let failure = Failure::retryable(Duration::from_secs(10), "busy downstream");
    let _failed = new(jobs.claim("k").unwrap()).fail(failure).unwrap();
    clock.advance_ms(4_000);
    let backoff = jobs.claim("k").unwrap();
    let advice = AckAdvice::Redeliver {
        after: Duration::from_secs(6),
    };
    assert_eq!(backoff.ack_advice(), Some(advice));
    let ClaimVerdict::Backoff { after, error } = backoff else {
        panic!("{backoff:?}")
    };
    assert_eq!(
        (after, error),
        (Duration::from_secs(6), b"busy downstream".to_vec())
    );
    clock.advance_ms(6_000);
    let ClaimVerdict::Retry { claim, previous } = jobs.claim("k").unwrap() else {
        panic!()
    };
    assert_eq!(
        (claim.attempt(), previous.error),
        (2, b"busy downstream".to_vec())
    );
}

#[test]
fn a_failed_key_outlives_its_pause_however_short_the_retention() {
    let clock = clock();
    let log = options(&clock).open_in_memory().unwrap();
    let short = namespace()
        .retention(Duration::from_secs(1))
        .attempts_max(2);
    let jobs = log.namespace::<Repeatable>("j", short).unwrap();
    let failure = Failure::retryable(Duration::from_secs(3600), "later");
    let _failed = new(jobs.claim("k").unwrap()).fail(failure).unwrap();
    clock.advance_ms(3_600_000);
    log.maintain().unwrap();
    assert!(matches!(
        jobs.claim("k").unwrap(),
        ClaimVerdict::Retry { .. }
    ));
}

#[test]
fn c08_retention_counts_from_commit_and_no_claim_dies_of_it() {
    let disk = SimDisk::new();
    let clock = clock();
    let log = options(&clock)
        .segment_bytes(8192)
        .open_on(disk.dir())
        .unwrap();
    let jobs = log
        .namespace::<Repeatable>(
            "j",
            namespace()
                .outcome_bytes_max(512)
                .retention(Duration::from_secs(300))
                .lease(Duration::from_secs(900)),
        )
        .unwrap();
    let mut claim = new(jobs.claim("k").unwrap());
    // Fill segments, so that the claim's own is dropped and the claim carried over.
    for n in 0..300 {
        let _ran = jobs
            .run_once(format!("fill-{n}"), |_| Ok(Vec::new()))
            .unwrap();
    }
    clock.advance_ms(6 * MINUTE_MS);
    log.maintain().unwrap();
    assert!(
        log.stats().drops_count > 0 && log.stats().carried_count == 1,
        "{:?}",
        log.stats()
    );
    assert!(matches!(
        jobs.claim("k").unwrap(),
        ClaimVerdict::Busy { .. }
    ));
    clock.advance_ms(MINUTE_MS);
    assert!(matches!(
        claim.commit(b"x").unwrap(),
        CommitVerdict::Committed { .. }
    ));
    clock.advance_ms(4 * MINUTE_MS);
    let ClaimVerdict::Duplicate(done) = jobs.claim("k").unwrap() else {
        panic!()
    };
    assert_eq!(done.first_seen_ms, START_MS);
    assert_eq!(done.committed_at_ms, START_MS + 7 * MINUTE_MS);
    clock.advance_ms(MINUTE_MS);
    assert!(matches!(jobs.claim("k").unwrap(), ClaimVerdict::New(_)));
}

#[test]
fn keys_in_doubt_never_expire_and_survive_the_drop_of_their_segment() {
    let disk = SimDisk::new();
    let clock = clock();
    let small = namespace()
        .outcome_bytes_max(512)
        .retention(Duration::from_secs(60));
    let log = options(&clock)
        .segment_bytes(8192)
        .open_on(disk.dir())
        .unwrap();
    let jobs = log.namespace::<NonRepeatable>("j", small.clone()).unwrap();
    drop(
        new(jobs.claim("doubt").unwrap())
            .start(b"evidence")
            .unwrap(),
    );
    let filter = log.filter("f", small.clone()).unwrap();
    for round in 0..4 {
        for n in 0..500 {
            assert!(filter.observe(format!("{round}-{n}")).unwrap().is_new());
        }
        clock.advance_ms(30 * 86_400_000);
        log.maintain().unwrap();
    }
    assert!(log.stats().carried_count > 0);
    drop((filter, jobs, log));
    let log = options(&clock)
        .segment_bytes(8192)
        .open_on(disk.after_kill().dir())
        .unwrap();
    let jobs = log.namespace::<NonRepeatable>("j", small).unwrap();
    let listed = log.in_doubt().unwrap();
    assert_eq!((listed.len(), listed[0].key.as_slice()), (1, &b"doubt"[..]));
    let ClaimVerdict::InDoubt(doubt) = jobs.claim("doubt").unwrap() else {
        panic!()
    };
    assert!(doubt.evidence.starts_with(b"evidence"));
}

// The rest

#[test]
fn derived_keys_are_the_same_on_every_attempt_and_for_ever() {
    let clock = clock();
    let log = options(&clock).open_in_memory().unwrap();
    let jobs = log
        .namespace::<Repeatable>("payments", namespace())
        .unwrap();
    let mut seen = Vec::new();
    for _ in 0..3 {
        let _run = jobs
            .run_once("order-1", |attempt| {
                seen.push(attempt.derived_key("charge"));
                Err(Failure::retryable(Duration::ZERO, "again"))
            })
            .unwrap();
    }
    let claim = jobs.claim("order-1").unwrap().claim().unwrap();
    seen.push(claim.derived_key("charge"));
    assert!(
        seen.iter()
            .all(|key| key == "b7d4b273839e3070e2a65896cf6e0efe"),
        "{seen:?}"
    );
    assert_ne!(claim.derived_key("refund"), seen[0]);
}

#[test]
fn a_purged_namespace_is_forgotten_and_its_handles_say_so() {
    let disk = SimDisk::new();
    let clock = clock();
    let log = options(&clock).open_on(disk.dir()).unwrap();
    let jobs = log.namespace::<Repeatable>("j", namespace()).unwrap();
    let filter = log.filter("f", namespace()).unwrap();
    let mut held = new(jobs.claim("held").unwrap());
    assert!(filter.observe("k").unwrap().is_new());
    assert_eq!(kind(log.purge("nobody", false)), ErrorKind::Invalid);
    assert_eq!(kind(log.purge("j", false)), ErrorKind::Invalid);
    log.purge("j", true).unwrap();
    log.purge("f", false).unwrap();
    assert_eq!(log.stats().unsettled_count, 0);
    assert_eq!(kind(held.commit(b"late")), ErrorKind::Invalid);
    assert_eq!(kind(filter.observe("k")), ErrorKind::Invalid);
    assert_eq!(kind(filter.get("k")), ErrorKind::Invalid);
    drop((held, filter, jobs));
    let filter = log.filter("f", namespace()).unwrap();
    assert_eq!(filter.observe("k").unwrap(), Observed::New);
    drop((filter, log));
    let log = options(&clock).open_on(disk.dir()).unwrap();
    assert_eq!(log.kind_of("j"), None);
    // The name is free for another kind.
    let again = log.namespace::<Internal>("j", namespace()).unwrap();
    assert!(matches!(again.claim("held").unwrap(), ClaimVerdict::New(_)));
}

#[test]
fn c35_equal_keys_of_two_namespaces_are_two_keys() {
    let log = memory();
    let filters: Vec<_> = (0..20)
        .map(|n| log.filter(&format!("f{n}"), namespace()).unwrap())
        .collect();
    for filter in &filters {
        assert_eq!(filter.observe("k").unwrap(), Observed::New);
    }
    for filter in &filters {
        assert_eq!(filter.observe("k").unwrap(), Observed::Duplicate);
    }
}

#[test]
fn c60_a_failed_flush_poisons_and_nothing_resting_on_it_is_answered() {
    let events = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&events);
    let disk = SimDisk::new();
    let clock = clock();
    let log = options(&clock)
        .on_event(move |event| told.lock().unwrap().push(event.clone()))
        .open_on(disk.dir())
        .unwrap();
    let filter = log.filter("f", namespace()).unwrap();
    assert!(filter.observe("before").unwrap().is_new());
    disk.fail(Fault::once(disk.steps(), FaultKind::Io).only(Op::Sync));
    let error = filter.observe("k").unwrap_err();
    assert_eq!(error.applied(), idemlog::Applied::Maybe, "{error:?}");
    for _ in 0..3 {
        let error = filter.observe("k").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Poisoned, "{error:?}");
        assert_eq!(kind(filter.get("k")), ErrorKind::Poisoned);
        assert_eq!(kind(filter.observe("other")), ErrorKind::Poisoned);
        assert_eq!(kind(log.sync()), ErrorKind::Poisoned);
    }
    assert_eq!(filter.get("before").unwrap(), KeyState::Seen);
    let health = log.health();
    assert!(!health.ok && health.poisoned.is_some());
    let _told = log.maintain();
    assert!(
        events
            .lock()
            .unwrap()
            .iter()
            .any(|e| matches!(e, Event::Poisoned { .. }))
    );
    drop(filter);
    assert_eq!(kind(log.close()), ErrorKind::Poisoned);
    let log = options(&clock).open_on(disk.dir()).unwrap();
    let filter = log.filter("f", namespace()).unwrap();
    assert_eq!(filter.observe("before").unwrap(), Observed::Duplicate);
    let first = filter.observe("k").unwrap();
    assert_eq!(
        (filter.observe("k").unwrap(), first.is_new()),
        (Observed::Duplicate, first.is_new())
    );
}

#[test]
fn c15_a_failed_write_is_taken_back_and_later_keys_survive() {
    for after_bytes in [0, 1, 16, 31] {
        let disk = SimDisk::new();
        let clock = clock();
        let log = options(&clock).open_on(disk.dir()).unwrap();
        let filter = log.filter("f", namespace()).unwrap();
        assert!(filter.observe("first").unwrap().is_new());
        let fault = Fault::once(disk.steps(), FaultKind::NoSpace).only(Op::Write);
        disk.fail(fault.after_bytes(after_bytes));
        let error = filter.observe("failed").unwrap_err();
        assert_eq!(
            (error.kind(), error.applied()),
            (ErrorKind::Full, idemlog::Applied::No)
        );
        assert_eq!(filter.get("failed").unwrap(), KeyState::Absent);
        for n in 0..100 {
            assert!(filter.observe(format!("later-{n}")).unwrap().is_new());
        }
        let mut killed = disk.after_kill();
        for _ in 0..2 {
            let log = options(&clock).open_on(killed.dir()).unwrap();
            assert_eq!(log.open_report().dropped_bytes, 0);
            let filter = log.filter("f", namespace()).unwrap();
            for n in 0..100 {
                assert_eq!(filter.get(format!("later-{n}")).unwrap(), KeyState::Seen);
            }
            assert_eq!(filter.get("failed").unwrap(), KeyState::Absent);
            killed = killed.after_kill();
        }
    }
}

/// `fail(Release)` of a started claim answered "absent" at once, and a power cut brought the start
/// back: the key was in doubt, although its owner had been told that it is free.
#[test]
fn a_started_claim_that_is_released_stays_absent_after_a_power_cut() {
    use idemlog::testing::sim::PowerCut;
    let disk = SimDisk::new();
    let log = options(&clock()).open_on(disk.dir()).unwrap();
    let pays = log
        .namespace::<NonRepeatable>("pays", NamespaceOptions::new())
        .unwrap();
    let ClaimVerdict::New(claim) = pays.claim("k").unwrap() else {
        panic!("new");
    };
    let started = claim.start(b"").unwrap();
    assert!(started.fail(Failure::Release).unwrap().is_applied());
    let cut = disk.after_power_cut(&mut PowerCut::drop_all());
    let log = options(&clock()).open_on(cut.dir()).unwrap();
    let pays = log
        .namespace::<NonRepeatable>("pays", NamespaceOptions::new())
        .unwrap();
    assert_eq!(pays.get("k").unwrap(), KeyState::Absent);
}

#[test]
fn durability_below_power_loses_what_it_says_and_sync_keeps_the_rest() {
    use idemlog::testing::sim::PowerCut;
    let disk = SimDisk::new();
    let clock = clock();
    let log = options(&clock)
        .durability(Durability::Process)
        .open_on(disk.dir())
        .unwrap();
    let filter = log.filter("f", namespace()).unwrap();
    let power = ObserveOptions::new().durability(Durability::Power);
    let buffered = ObserveOptions::new().durability(Durability::Buffered);
    assert!(filter.observe_with("power", &power).unwrap().is_new());
    assert!(filter.observe("process").unwrap().is_new());
    assert!(filter.observe_with("buffered", &buffered).unwrap().is_new());
    let states = |disk: SimDisk| {
        let log = options(&clock).open_on(disk.dir()).unwrap();
        let filter = log.filter("f", namespace()).unwrap();
        ["power", "process", "buffered"].map(|key| filter.get(key).unwrap() == KeyState::Seen)
    };
    assert_eq!(states(disk.after_kill()), [true, true, false]);
    assert_eq!(
        states(disk.after_power_cut(&mut PowerCut::drop_all())),
        [true, false, false]
    );
    log.sync().unwrap();
    assert_eq!(
        states(disk.after_power_cut(&mut PowerCut::drop_all())),
        [true; 3]
    );
}

#[test]
fn a_duplicate_of_an_unsynced_key_waits_for_its_flush() {
    let disk = SimDisk::new();
    let log = options(&clock()).open_on(disk.dir()).unwrap();
    let filter = log.filter("f", namespace()).unwrap();
    let buffered = ObserveOptions::new().durability(Durability::Buffered);
    assert!(filter.observe_with("k", &buffered).unwrap().is_new());
    let flushes = log.stats().flushes_count;
    assert_eq!(
        filter.observe_with("k", &buffered).unwrap(),
        Observed::Duplicate
    );
    assert_eq!(log.stats().flushes_count, flushes);
    assert_eq!(filter.observe("k").unwrap(), Observed::Duplicate);
    assert_eq!(log.stats().flushes_count, flushes + 1);
    assert_eq!(filter.observe("k").unwrap(), Observed::Duplicate);
    assert_eq!(log.stats().flushes_count, flushes + 1);
}

#[test]
fn each_class_flushes_as_often_as_the_documentation_says() {
    fn flushes<C: EffectClass>(log: &DedupLog) -> u64 {
        let jobs = log.namespace::<C>(C::KIND.name(), namespace()).unwrap();
        let before = log.stats().flushes_count;
        let ran = jobs.run_once("k", |_| Ok(b"x".to_vec())).unwrap();
        assert!(matches!(ran, RunVerdict::Ran { .. }));
        log.stats().flushes_count - before
    }
    let log = memory();
    assert_eq!(flushes::<Repeatable>(&log), 1);
    assert_eq!(flushes::<Internal>(&log), 1);
    assert_eq!(flushes::<Probeable>(&log), 2);
    assert_eq!(flushes::<NonRepeatable>(&log), 2);
    // Below Power too, a start that must not be forgotten is flushed.
    let log = options(&clock())
        .durability(Durability::Buffered)
        .open_in_memory()
        .unwrap();
    assert_eq!(flushes::<Repeatable>(&log), 0);
    assert_eq!(flushes::<NonRepeatable>(&log), 1);
}

#[test]
fn lists_name_namespace_key_state_and_age() {
    let clock = clock();
    let log = options(&clock).open_in_memory().unwrap();
    let jobs = log.namespace::<Repeatable>("jobs", namespace()).unwrap();
    let pays = log.namespace::<NonRepeatable>("pays", namespace()).unwrap();
    let _claim = new(jobs.claim("a").unwrap());
    let _started = new(pays.claim("b").unwrap()).start(b"").unwrap();
    clock.advance_ms(5_000);
    let pending = log.pending().unwrap();
    let names: Vec<_> = pending
        .iter()
        .map(|p| (p.namespace.as_str(), p.key.as_slice()))
        .collect();
    assert_eq!(names, [("jobs", &b"a"[..]), ("pays", &b"b"[..])]);
    assert!(pending.iter().all(|p| p.age == Duration::from_secs(5)));
    assert!(log.in_doubt().unwrap().is_empty());
    clock.advance_ms(100_000);
    assert_eq!(log.pending().unwrap().len(), 1);
    assert_eq!(log.in_doubt().unwrap().len(), 1);
}

#[test]
fn every_verdict_has_its_advice() {
    let log = memory();
    let jobs = log.namespace::<NonRepeatable>("j", namespace()).unwrap();
    let claim = new(jobs.claim("busy").unwrap());
    let advice = |key: &str| jobs.claim(key).unwrap().ack_advice();
    let lease = Duration::from_secs(60);
    assert_eq!(advice("busy"), Some(AckAdvice::Redeliver { after: lease }));
    drop(claim);
    assert_eq!(advice("busy"), None);
    drop(new(jobs.claim("doubt").unwrap()).start(b"").unwrap());
    assert_eq!(advice("doubt"), Some(AckAdvice::Hold));
    let ran = jobs.run_once("done", |_| Ok(Vec::new())).unwrap();
    assert_eq!(ran.ack_advice(), AckAdvice::Ack);
    assert_eq!(advice("done"), Some(AckAdvice::Ack));
    let ran = jobs.run_once("doubt", |_| panic!("ran")).unwrap();
    assert_eq!(ran.ack_advice(), AckAdvice::Hold);
}

#[test]
fn events_are_told_and_their_callback_may_call_back() {
    let (send, receive) = std::sync::mpsc::channel();
    let store: Arc<Mutex<Option<DedupLog>>> = Arc::default();
    let within = Arc::clone(&store);
    let send = Mutex::new(send);
    let disk = SimDisk::new();
    let clock = clock();
    let log = options(&clock)
        .segment_bytes(4096)
        .log_bytes_max(32 * 1024)
        .when_full(WhenFull::EvictOldest)
        .on_event(move |event| {
            let log = within.lock().unwrap().clone();
            if let Some(log) = log {
                let _stats = log.stats();
                let _health = log.health();
                let _pending = log.pending();
                let _filter = log.filter("from-callback", namespace().outcome_bytes_max(0));
                let _done = log.maintain();
            }
            send.lock().unwrap().send(event.clone()).unwrap();
        })
        .open_on(disk.dir())
        .unwrap();
    *store.lock().unwrap() = Some(log.clone());
    // On a thread of its own: a deadlock is a failed test, not one that hangs.
    let (done, finished) = std::sync::mpsc::channel();
    let body = move || {
        let filter = log.filter("f", namespace().outcome_bytes_max(0)).unwrap();
        for n in 0..1000 {
            assert!(filter.observe(format!("key-{n}")).unwrap().is_new());
        }
        clock.set_wall_ms(START_MS + 40 * 86_400_000);
        assert!(filter.observe("suspect").unwrap().is_new());
        log.maintain().unwrap();
        clock.set_wall_ms(START_MS);
        disk.fail(Fault::once(disk.steps(), FaultKind::Io).only(Op::Sync));
        assert!(filter.observe("poison").is_err());
        let _unused = log.maintain();
        done.send(()).unwrap();
    };
    let thread = std::thread::Builder::new()
        .name("events".into())
        .spawn(body)
        .unwrap();
    finished
        .recv_timeout(Duration::from_secs(20))
        .expect("a callback is stuck");
    thread.join().unwrap();
    *store.lock().unwrap() = None;
    let events: Vec<Event> = receive.try_iter().collect();
    let told = |wanted: fn(&Event) -> bool| assert!(events.iter().any(wanted), "{events:?}");
    told(|event| matches!(event, Event::Evicted { .. }));
    told(|event| matches!(event, Event::ClockSuspect));
    told(|event| matches!(event, Event::Poisoned { .. }));
}

#[test]
fn takeovers_and_fenced_calls_are_told_and_counted() {
    let events = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&events);
    let clock = clock();
    let log = options(&clock)
        .on_event(move |event| told.lock().unwrap().push(event.clone()))
        .open_in_memory()
        .unwrap();
    let jobs = log.namespace::<Repeatable>("j", namespace()).unwrap();
    let mut late = new(jobs.claim("k").unwrap());
    clock.advance_ms(60_000);
    let second = jobs.claim("k").unwrap().claim().unwrap();
    let CommitVerdict::Fenced { current, outcome } = late.commit(b"mine").unwrap() else {
        panic!()
    };
    assert_eq!(outcome, b"mine");
    assert!(matches!(current, KeyState::Pending { epoch, .. } if epoch == second.epoch()));
    let stats = log.stats();
    assert_eq!(
        (stats.new_count, stats.takeovers_count, stats.fenced_count),
        (1, 1, 1)
    );
    log.maintain().unwrap();
    let (namespace, key) = ("j".to_owned(), b"k".to_vec());
    let takeover = Event::Takeover {
        namespace: namespace.clone(),
        key: key.clone(),
        attempt: 2,
    };
    assert_eq!(
        *events.lock().unwrap(),
        [takeover, Event::Fenced { namespace, key }]
    );
}

#[test]
fn memory_stores_are_apart_and_have_background_threads_by_default() {
    let (one, two) = (
        DedupLog::in_memory().unwrap(),
        DedupLog::in_memory().unwrap(),
    );
    for log in [&one, &two] {
        let filter = log.filter("f", NamespaceOptions::new()).unwrap();
        assert_eq!(filter.observe("k").unwrap(), Observed::New);
        assert!(log.health().ok);
    }
    one.close().unwrap();
    two.wait_idle().unwrap();
}

#[test]
fn errors_are_one_line_with_facts_and_no_debug_text() {
    let log = memory();
    let filter = log.filter("f", namespace()).unwrap();
    for error in [
        filter.observe("").unwrap_err(),
        filter.observe(vec![b'k'; KEY_BYTES_MAX + 1]).unwrap_err(),
        log.purge("x", false).unwrap_err(),
        "t9".parse::<Ticket>().unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(!text.contains('\n') && !text.ends_with('.'), "{text}");
        assert!(
            text.len() < 400 && text.starts_with(char::is_lowercase),
            "{text}"
        );
    }
}
