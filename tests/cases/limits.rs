//! Real limits on real files: space, file size, descriptors, address space, rights and paths.
//!
//! What needs a right that the machine does not give prints `SKIPPED` and its reason.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use idemlog::testing::sim::SimDisk;
use idemlog::{DedupLog, Durability, ErrorKind, KeyState, Observed, Options};
use rustix::process::{Resource, Rlimit, setrlimit};

use super::process::{Worker, command, last_ack, open, say, settings};
use super::{clock, filter, image, long, options, segments, small};
use crate::golden::bytes;

const MIB: u64 = 1024 * 1024;

/// The tasks of children that are about limits.
pub fn child(what: &str, argument: &str, dir: &Path) {
    match what {
        "fill" => fill(dir, argument),
        "images" => open_images(dir),
        "memory" => measure_memory(dir, argument.parse().unwrap()),
        "user" => as_ordinary_user(dir),
        "read-only" => on_a_read_only_mount(dir),
        "small-disk" => on_a_small_disk(dir),
        "umask" => under_umask(dir, argument),
        _ => panic!("{what}"),
    }
}

fn limit(resource: Resource, value: u64) {
    let limit = Rlimit {
        current: Some(value),
        maximum: Some(value),
    };
    setrlimit(resource, limit).unwrap();
}

fn status_kib(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Observes keys under a limit until several calls were refused; says what was acknowledged.
fn fill(store: &Path, argument: &str) {
    let (name, value) = argument.split_once('=').unwrap();
    let value: u64 = value.parse().unwrap();
    match name {
        "fsize" => limit(Resource::Fsize, value),
        "nofile" => {
            let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64 - 1;
            limit(Resource::Nofile, open + value);
        }
        "none" => {}
        _ => panic!("{argument}"),
    }
    let log = match settings().open(store) {
        Ok(log) => log,
        Err(error) => return say(&format!("refused {:?} {error}", error.kind())),
    };
    say("open");
    let mut refused = 0;
    for n in 0..400 {
        match log
            .filter("f", small())
            .and_then(|f| f.observe(long("key", n)))
        {
            Ok(observed) => {
                assert!(observed.is_new());
                say(&format!("ack {n}"));
            }
            Err(error) => {
                say(&format!("error {:?} {error}", error.kind()));
                refused += 1;
                if refused == 5 {
                    break;
                }
            }
        }
    }
    // Whatever was refused: what was acknowledged is still known.
    let Ok(filter) = log.filter("f", small()) else {
        return;
    };
    if filter.get(long("key", 0)).unwrap() == KeyState::Seen {
        say("known");
    }
}

fn errors_of(said: &[String]) -> Vec<&String> {
    let refused = |line: &&String| line.starts_with("error ") || line.starts_with("refused ");
    said.iter().filter(refused).collect()
}

/// Opens without the limit, and finds what was acknowledged and nothing else.
fn judge(store: &Path, said: &[String], what: &str) {
    let log = open(store);
    let end = last_ack(said).map_or(0, |ack| ack + 1);
    for n in 0..end {
        assert_eq!(
            filter(&log).get(long("key", n)).unwrap(),
            KeyState::Seen,
            "{what}: key {n}"
        );
    }
    // A refused key is new.
    for n in end..end + 8 {
        assert_eq!(
            filter(&log).get(long("key", n)).unwrap(),
            KeyState::Absent,
            "{what}: key {n}"
        );
        assert!(
            filter(&log).observe(long("key", n)).unwrap().is_new(),
            "{what}: key {n}"
        );
    }
    drop(log);
    let report = loop {
        match idemlog::verify(store) {
            // Another test's child inherits our lock between its fork and its exec.
            Err(error) if error.kind() == ErrorKind::Locked => std::thread::yield_now(),
            report => break report.unwrap(),
        }
    };
    assert!(report.is_ok(), "{what}: {:?}", report.problems);
}

#[test]
fn c53_a_file_size_limit_is_a_full_disk_and_not_the_end_of_the_store() {
    // Below the first segment, below the manifest, below the index, and enough.
    for fsize in [0, 100, 4000, 8000, 8192, 12_000, 100_000] {
        let dir = tempfile::tempdir().unwrap();
        let store = dir.path().join("store");
        // Ignored, the signal of a write over the limit leaves the error to the program.
        let mut shell = Command::new("sh");
        shell.args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\""]);
        shell.arg(std::env::current_exe().unwrap());
        let said = Worker::spawn(command(shell, "fill", &format!("fsize={fsize}"), &store));
        let said = said.finish();
        let what = format!("files of {fsize} bytes");
        for error in errors_of(&said) {
            assert!(error.contains(" Full "), "{what}: {error}");
        }
        if fsize < 8192 {
            assert!(!errors_of(&said).is_empty(), "{what}: nothing was refused");
        }
        if fsize >= 100_000 {
            assert!(errors_of(&said).is_empty(), "{what}: {said:?}");
        }
        judge(&store, &said, &what);
    }
}

#[test]
fn c53_a_process_that_dies_of_the_file_size_signal_leaves_what_it_acknowledged() {
    for fsize in [4000, 8192, 10_000] {
        let dir = tempfile::tempdir().unwrap();
        let store = dir.path().join("store");
        open(&store).close().unwrap();
        let mut worker = Worker::start("fill", &format!("fsize={fsize}"), &store);
        let said = worker.rest();
        judge(&store, &said, &format!("killed at {fsize} bytes"));
    }
}

#[test]
fn c63_too_few_descriptors_are_a_typed_error_and_harm_nothing() {
    let mut opened = 0;
    for nofile in 0..12 {
        let dir = tempfile::tempdir().unwrap();
        let store = dir.path().join("store");
        let fresh = nofile % 2 == 0;
        if !fresh {
            let log = open(&store);
            for n in 500..560 {
                assert!(filter(&log).observe(long("key", n)).unwrap().is_new());
            }
        }
        let said = Worker::start("fill", &format!("nofile={nofile}"), &store).finish();
        let what = format!("{nofile} descriptors");
        for error in errors_of(&said) {
            assert!(error.contains(" Io "), "{what}: {error}");
        }
        opened += usize::from(said.iter().any(|line| line == "open"));
        judge(&store, &said, &what);
        if !fresh {
            let log = open(&store);
            for n in 500..560 {
                let seen = filter(&log).observe(long("key", n)).unwrap();
                assert_eq!(seen, Observed::Duplicate, "{what}: key {n}");
            }
        }
    }
    assert!(
        (1..12).contains(&opened),
        "opened with {opened} of 12 limits"
    );
}

/// Numbers that a damaged length likes to be.
const EXTREMES: [u64; 6] = [0, 1, 0x7fff_ffff, 0xffff_ffff, 1 << 63, u64::MAX];

/// Opens every store of a folder, under a limit of address space: its size and 64 MiB more.
fn open_images(dir: &Path) {
    let stores: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    // The threads and allocator arenas of this process are there before the limit.
    limit(Resource::As, status_kib("VmSize") * 1024 + MIB + 64 * MIB);
    for store in stores {
        let opened = Options::new()
            .segment_bytes(4096)
            .background(false)
            .open(&store);
        if let Ok(log) = opened {
            let _answers = log.filter("f", small()).map(|filter| {
                (0..40)
                    .map(|n| filter.get(long("key", n)).is_ok())
                    .collect::<Vec<_>>()
            });
            let _done = log.maintain();
        }
        say("survived");
    }
}

#[test]
fn c11_lengths_of_gigabytes_are_refused_within_the_store_and_64_mib_of_address_space() {
    let disk = SimDisk::memory();
    let log = options(&clock()).open_on(disk.dir()).unwrap();
    for n in 0..80 {
        assert!(filter(&log).observe(long("key", n)).unwrap().is_new());
    }
    log.maintain().unwrap();
    let killed = disk.after_kill();
    // (file, where the checksum ends, widths, first and last offset)
    let mut damages = Vec::new();
    let mut add = |name: &str, at: usize, width: usize, fix: &dyn Fn(&mut Vec<u8>)| {
        for value in EXTREMES {
            let mut bad = killed.read_file(name).unwrap();
            bytes::put(&mut bad, at, width, value & (u64::MAX >> (64 - 8 * width)));
            fix(&mut bad);
            damages.push((name.to_owned(), bad));
        }
    };
    // Counts and sizes of the manifest, of a segment's header, of a run's and of a filter's.
    for at in [112, 116, 120, 124] {
        add("MANIFEST", at, 4, &|bad| bytes::fix_end(bad));
    }
    let first = segments(&killed)[0].clone();
    add(&first, 48, 4, &|bad| bytes::fix_end(&mut bad[..64]));
    // The length of the first and of a later record.
    let frames = bytes::frames(&killed.read_file(&first).unwrap());
    for frame in [&frames[0], &frames[5]] {
        let at = frame.offset;
        add(&first, at + 4, 2, &|bad| {
            bytes::fix_frame(bad, at, frame.bytes.len())
        });
    }
    for name in killed.file_names() {
        if name.ends_with(".idx") {
            for at in (56..100).step_by(4) {
                add(&name, at, 4, &|bad| bytes::fix_end(&mut bad[..4096]));
            }
        }
        if name.ends_with(".flt") {
            for at in (32..60).step_by(4) {
                add(&name, at, 4, &|bad| bytes::fix_end(&mut bad[..64]));
            }
        }
    }
    let dir = tempfile::tempdir().unwrap();
    for (number, (name, bad)) in damages.iter().enumerate() {
        let store = dir.path().join(number.to_string());
        std::fs::create_dir(&store).unwrap();
        for (other, content) in image(&killed) {
            let content = if other == *name { bad } else { &content };
            std::fs::write(store.join(other), content).unwrap();
        }
    }
    let said = Worker::start("images", "-", dir.path()).finish();
    let survived = said.iter().filter(|line| *line == "survived").count();
    assert_eq!(survived, damages.len());
    assert!(survived >= 150, "{survived} damaged stores");
}

/// Fills a store with so many keys, and says how much memory that took beside the page cache.
fn measure_memory(store: &Path, keys: usize) {
    let log = Options::new()
        .durability(Durability::Buffered)
        .segment_bytes(256 * 1024)
        .open(store)
        .unwrap();
    let short = small().retention(Duration::from_secs(1));
    let filter = log.filter("f", short).unwrap();
    let names: Vec<String> = (0..500).map(|_| String::new()).collect();
    let mut peak = 0;
    for chunk in 0..keys / 500 {
        let keys: Vec<String> = (0..names.len())
            .map(|n| format!("key-{chunk}-{n}"))
            .collect();
        for answer in filter.observe_many(&keys).unwrap() {
            assert!(answer.unwrap().is_new());
        }
        if chunk % 20 == 0 {
            peak = peak.max(status_kib("RssAnon"));
        }
    }
    log.maintain().unwrap();
    say(&format!("peak {}", peak.max(status_kib("RssAnon"))));
}

#[test]
fn c58_resident_memory_does_not_follow_the_number_of_keys() {
    let peak = |keys: usize| -> u64 {
        let dir = tempfile::tempdir().unwrap();
        let store = dir.path().join("store");
        let said = Worker::start("memory", &keys.to_string(), &store).finish();
        let peak = said.iter().find_map(|line| line.strip_prefix("peak "));
        peak.unwrap().parse().unwrap()
    };
    let (few, many) = (peak(25_000), peak(200_000));
    println!("anonymous memory: {few} KiB with 25,000 keys, {many} KiB with 200,000");
    // 175,000 keys more; a table of them would need 30 bytes each at the least.
    assert!(many < few + 4 * 1024, "{few} KiB, then {many} KiB");
}

fn mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

fn content(store: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let entries = std::fs::read_dir(store).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
        .into_iter()
        .map(|file| (file.clone(), std::fs::read(&file).unwrap_or_default()))
        .collect()
}

/// A closed store of some sealed segments.
fn make_store(store: &Path) {
    let log = open(store);
    for n in 0..200 {
        assert!(filter(&log).observe(long("key", n)).unwrap().is_new());
    }
    log.maintain().unwrap();
    log.close().unwrap();
}

fn is_whole(log: &DedupLog) {
    for n in 0..200 {
        assert_eq!(
            filter(log).get(long("key", n)).unwrap(),
            KeyState::Seen,
            "{n}"
        );
    }
}

/// What an open without a right says: that it has no right, of which file, and nothing else.
fn refused(store: &Path, kind: std::io::ErrorKind, file: &str) {
    let error = settings().open(store).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io, "{error:?}");
    let source = std::error::Error::source(&error).and_then(|e| e.downcast_ref::<std::io::Error>());
    assert_eq!(source.map(std::io::Error::kind), Some(kind), "{error:?}");
    let named = error.file().unwrap_or_default().to_owned() + &error.to_string();
    assert!(named.contains(file), "{file} is not named: {error}");
}

/// The case as an ordinary user. The folder is that user's own.
fn as_ordinary_user(dir: &Path) {
    let denied = std::io::ErrorKind::PermissionDenied;
    let store = dir.join("store");
    make_store(&store);
    let whole = content(&store);
    // A store in a place where nothing can be made.
    mode(dir, 0o555);
    refused(&dir.join("other"), denied, "other");
    mode(dir, 0o755);
    // The store's own folder cannot be written.
    mode(&store, 0o555);
    refused(&store, denied, "");
    assert!(
        idemlog::verify(&store).unwrap().is_ok(),
        "a check needs no right to write"
    );
    mode(&store, 0o700);
    assert!(
        content(&store)
            .iter()
            .map(|f| &f.0)
            .eq(whole.iter().map(|f| &f.0))
    );
    is_whole(&open(&store));
    // Its files cannot.
    let files: Vec<PathBuf> = content(&store).into_iter().map(|(file, _)| file).collect();
    files.iter().for_each(|file| mode(file, 0o444));
    refused(&store, denied, "LOCK");
    assert!(idemlog::verify(&store).unwrap().is_ok());
    files.iter().for_each(|file| mode(file, 0o600));
    is_whole(&open(&store));
    // One segment cannot even be read: no right, not damage.
    let sealed = store.join("seg-000000000002.log");
    mode(&sealed, 0o000);
    refused(&store, denied, "seg-000000000002.log");
    mode(&sealed, 0o600);
    is_whole(&open(&store));
    // A folder that cannot be entered.
    mode(&store, 0o000);
    refused(&store, denied, "store");
    mode(&store, 0o700);
    is_whole(&open(&store));
    say("checked");
}

#[test]
fn c63_missing_rights_are_said_as_such_and_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("place");
    std::fs::create_dir(&place).unwrap();
    let own = std::env::current_exe().unwrap();
    let said = if rustix::process::geteuid().is_root() {
        // Rights bind others than root only.
        mode(dir.path(), 0o755);
        std::os::unix::fs::chown(&place, Some(65_534), Some(65_534)).unwrap();
        let mut user = Command::new("setpriv");
        user.args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(&own);
        let probe = Command::new("setpriv")
            .args([
                "--reuid=65534",
                "--regid=65534",
                "--clear-groups",
                "test",
                "-x",
            ])
            .arg(&own)
            .stderr(Stdio::null())
            .status();
        if !probe.is_ok_and(|status| status.success()) {
            println!("SKIPPED rights: no setpriv, or another user cannot run this binary");
            return;
        }
        Worker::spawn(command(user, "user", "-", &place)).finish()
    } else {
        Worker::start("user", "-", &place).finish()
    };
    assert!(said.iter().any(|line| line == "checked"), "{said:?}");
}

/// Runs a task in a mount namespace of its own, after this shell command; `None` if that is not
/// allowed here.
fn in_namespace(mount: &str, what: &str, dir: &Path) -> Option<Vec<String>> {
    let wrap = |script: &str| {
        let mut shell = Command::new("unshare");
        shell.args(["-m", "sh", "-c", script]);
        shell
    };
    let mut probe = wrap(&format!("{mount} && true"));
    let probe = probe.stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !probe.is_ok_and(|status| status.success()) {
        println!("SKIPPED {what}: no private mounts here");
        return None;
    }
    let mut shell = wrap(&format!("{mount} && exec \"$0\" \"$@\""));
    shell.arg(std::env::current_exe().unwrap());
    let said = Worker::spawn(command(shell, what, "-", dir)).finish();
    assert!(said.iter().any(|line| line == "checked"), "{said:?}");
    Some(said)
}

fn on_a_read_only_mount(dir: &Path) {
    let read_only = std::io::ErrorKind::ReadOnlyFilesystem;
    let store = dir.join("store");
    let before = content(&store);
    refused(&store, read_only, "");
    refused(&dir.join("other"), read_only, "other");
    assert!(idemlog::verify(&store).unwrap().is_ok());
    is_whole(&settings().open_read_only(&store).unwrap());
    assert!(content(&store) == before);
    say("checked");
}

#[test]
fn c63_a_read_only_mount_is_said_as_such_and_can_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("place");
    std::fs::create_dir(&place).unwrap();
    let store = place.join("store");
    make_store(&store);
    let at = place.display();
    let mount = format!("mount --bind {at} {at} && mount -o remount,ro,bind {at}");
    in_namespace(&mount, "read-only", &place);
    is_whole(&open(&store));
}

/// Kills writers at different points while a small file system is full.
fn on_a_small_disk(dir: &Path) {
    for round in 0..6 {
        let store = dir.join(format!("store-{round}"));
        let ballast = dir.join("ballast");
        // What can be freed later.
        std::fs::write(&ballast, vec![1; 48 << 10]).unwrap();
        open(&store).close().unwrap();
        let mut worker = Worker::start("fill", "none=0", &store);
        let said = if round % 2 == 0 {
            // Killed in the middle of the refusals.
            let mut said = worker.until("error ");
            said.extend(worker.until("error "));
            said.extend(worker.kill());
            said
        } else {
            worker.finish()
        };
        assert!(
            said.iter().any(|line| line.starts_with("error Full")),
            "{said:?}"
        );
        assert!(
            errors_of(&said).iter().all(|line| line.contains(" Full ")),
            "{said:?}"
        );
        // The last byte goes, too.
        let rest = dir.join("rest");
        let _full = std::fs::write(&rest, vec![1; 4 << 20]);
        let acked = last_ack(&said).unwrap();
        match settings().open(&store) {
            Ok(log) => {
                let filter = filter(&log);
                for n in 0..=acked {
                    assert_eq!(filter.get(long("key", n)).unwrap(), KeyState::Seen, "{n}");
                }
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::Full, "{error:?}"),
        }
        std::fs::remove_file(&ballast).unwrap();
        std::fs::remove_file(&rest).unwrap();
        let log = open(&store);
        for n in 0..=acked {
            assert_eq!(
                filter(&log).get(long("key", n)).unwrap(),
                KeyState::Seen,
                "{round}: {n}"
            );
        }
        assert_eq!(
            filter(&log).get(long("key", acked + 6)).unwrap(),
            KeyState::Absent
        );
        drop(log);
        assert!(idemlog::verify(&store).unwrap().is_ok());
        std::fs::remove_dir_all(&store).unwrap();
    }
    say("checked");
}

#[test]
fn c53_killed_on_a_small_real_disk_that_is_full_the_store_opens_or_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("place");
    std::fs::create_dir(&place).unwrap();
    let mount = format!("mount -t tmpfs -o size=192k none {}", place.display());
    in_namespace(&mount, "small-disk", &place);
}

/// Makes a store under a mask, by a relative path, and goes elsewhere while it is open.
fn under_umask(dir: &Path, mask: &str) {
    let mask = u32::from_str_radix(mask, 8).unwrap();
    std::fs::create_dir(dir.join("elsewhere")).unwrap();
    std::env::set_current_dir(dir).unwrap();
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(mask));
    let log = settings().background(false).open("store").unwrap();
    std::env::set_current_dir(dir.join("elsewhere")).unwrap();
    for n in 0..200 {
        assert!(filter(&log).observe(long("key", n)).unwrap().is_new());
    }
    log.maintain().unwrap();
    assert!(log.stats().seals_count > 2);
    log.close().unwrap();
    say("checked");
}

#[test]
fn c63_whatever_the_umask_files_are_private_and_lie_where_the_store_was_opened() {
    for mask in ["0", "022", "077", "0277"] {
        let dir = tempfile::tempdir().unwrap();
        let said = Worker::start("umask", mask, dir.path()).finish();
        assert!(said.iter().any(|line| line == "checked"), "{said:?}");
        assert_eq!(
            std::fs::read_dir(dir.path().join("elsewhere"))
                .unwrap()
                .count(),
            0
        );
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
        let store = dir.path().join("store");
        let bits = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(bits(&store) & 0o077, 0, "umask {mask}");
        let files = content(&store);
        assert!(files.len() > 6);
        for (file, _) in files {
            assert_eq!(bits(&file), 0o600, "umask {mask}: {}", file.display());
        }
        mode(&store, 0o700);
        is_whole(&open(&store));
    }
}

#[test]
fn c63_paths_near_the_limit_odd_names_and_links_work_as_they_are_or_are_refused() {
    use std::os::unix::ffi::OsStrExt;
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("place");
    std::fs::create_dir(&place).unwrap();
    let odd: Vec<Vec<u8>> = vec![
        b"with space and\nline".to_vec(),
        "\u{1f980}\u{0301}".as_bytes().to_vec(),
        b"not-utf8-\xff\xfe".to_vec(),
        vec![b'x'; 255],
        vec![0xff; 255],
        b"MANIFEST".to_vec(),
        b"-rf".to_vec(),
    ];
    for name in &odd {
        let path = place.join(std::ffi::OsStr::from_bytes(name));
        let log = open(&path);
        assert!(filter(&log).observe("k").unwrap().is_new());
        log.close().unwrap();
        assert!(path.join("MANIFEST").is_file());
        assert_eq!(
            filter(&open(&path)).observe("k").unwrap(),
            Observed::Duplicate
        );
    }
    // Nothing was made elsewhere, and nothing twice.
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), odd.len());
    // A path of nearly 4,096 bytes, and one of more.
    let mut deep = place.clone();
    while deep.as_os_str().len() < 3800 {
        deep.push("d".repeat(200));
    }
    std::fs::create_dir_all(&deep).unwrap();
    let near = deep.join("s".repeat(4095 - deep.as_os_str().len() - 2));
    assert!(filter(&open(&near)).observe("k").unwrap().is_new());
    assert_eq!(
        filter(&open(&near)).observe("k").unwrap(),
        Observed::Duplicate
    );
    for over in [
        deep.join("s".repeat(250)).join("t".repeat(250)),
        place.join("x".repeat(256)),
    ] {
        let error = Options::new().open(&over).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io, "{error:?}");
        assert!(!error.to_string().contains("damaged"), "{error}");
    }
    // Links: to a store, to nothing, to itself, to a file; a parent that is a file or missing.
    let link = |name: &str, to: &Path| {
        let link = place.join(name);
        std::os::unix::fs::symlink(to, &link).unwrap();
        link
    };
    let good = link("good", &place.join("MANIFEST"));
    assert_eq!(
        filter(&open(&good)).observe("k").unwrap(),
        Observed::Duplicate
    );
    let file = place.join("file");
    std::fs::write(&file, "precious").unwrap();
    let bad = [
        link("dangling", &place.join("nowhere")),
        link("looping", &place.join("looping")),
        link("of-file", &file),
        file.clone(),
        file.join("below"),
        place.join("missing/below"),
    ];
    let before = std::fs::read_dir(&place).unwrap().count();
    for path in bad {
        let error = Options::new().open(&path).unwrap_err();
        let kinds = [ErrorKind::Incompatible, ErrorKind::Io];
        assert!(
            kinds.contains(&error.kind()),
            "{}: {error:?}",
            path.display()
        );
        let said = format!("{error}{}", error.file().unwrap_or_default());
        assert!(
            said.contains(path.to_str().unwrap()),
            "the path is not named: {error}"
        );
    }
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), before);
}

/// Runs a task with this error injected into one system call; `None` if tracing is not allowed.
fn traced(inject: &str, dir: &Path) -> Option<Vec<String>> {
    let tracer = |words: &[&str]| {
        let mut strace = Command::new("strace");
        strace.args(["-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync", "-e"]);
        strace
            .arg(format!("inject=fsync:error={inject}"))
            .args(words);
        strace
    };
    let probe = tracer(&["true"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if !probe.is_ok_and(|status| status.success()) {
        println!("SKIPPED directory sync {inject}: no strace, or it may not trace");
        return None;
    }
    let mut strace = tracer(&[]);
    strace.arg(std::env::current_exe().unwrap());
    Some(Worker::spawn(command(strace, "fill", "none=0", dir)).finish())
}

#[test]
fn c05_a_file_system_that_cannot_sync_directories_is_tolerated_and_one_that_fails_is_not() {
    for (error, tolerated) in [("EINVAL", true), ("EOPNOTSUPP", true), ("EIO", false)] {
        let dir = tempfile::tempdir().unwrap();
        let store = dir.path().join("store");
        // Created before: what is refused is not the creation alone.
        open(&store).close().unwrap();
        let Some(said) = traced(error, &store) else {
            return;
        };
        if tolerated {
            assert!(errors_of(&said).is_empty(), "{error}: {said:?}");
            assert_eq!(last_ack(&said), Some(399), "{error}");
        } else {
            let refused = errors_of(&said);
            assert!(!refused.is_empty(), "{error}: {said:?}");
            let typed = |line: &&String| line.contains(" Io ") || line.contains(" Poisoned ");
            assert!(refused.iter().all(typed), "{error}: {refused:?}");
        }
        judge(&store, &said, error);
    }
}
