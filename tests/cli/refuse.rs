//! What is not a store, or is one that may not be touched, stays as it is.

use std::fs;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use idemlog::Options;

use super::{Done, Place, RUN, done};

/// Returns every file of a directory, with a hash of its bytes; of `LOCK`, which holds the newest
/// opener's pid, only that it is there.
pub(super) fn snapshot(dir: &Path) -> Vec<(PathBuf, u64)> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let is_compared = path.is_file() && !path.ends_with("LOCK");
        let bytes = if is_compared {
            fs::read(&path).unwrap()
        } else {
            Vec::new()
        };
        files.push((
            path,
            BuildHasherDefault::<DefaultHasher>::default().hash_one(bytes),
        ));
    }
    files.sort();
    files
}

const CALLS: [&str; 5] = [
    "filter",
    "run --key k --effects repeatable -- true",
    "claim --key k --effects repeatable",
    "get --key k",
    "stats",
];

#[test]
fn a_directory_that_is_not_a_store_gets_no_file() {
    let place = Place::new();
    fs::create_dir(place.store()).unwrap();
    fs::write(place.store().join("thesis.txt"), "mine").unwrap();
    let before = snapshot(&place.store());
    for words in CALLS {
        let start = if words.starts_with("run") { RUN } else { 0 };
        let input = if words == "filter" { &b"a\n"[..] } else { b"" };
        let words: Vec<_> = words.split_whitespace().collect();
        let refused = place.run_with_input(&words, input);
        assert_eq!(refused.status, start + 1, "{words:?}: {refused:?}");
        assert_eq!(snapshot(&place.store()), before, "{words:?}");
    }
}

#[test]
fn a_file_in_place_of_the_directory_stays_as_it_is() {
    let place = Place::new();
    fs::write(place.store(), "mine").unwrap();
    for words in CALLS {
        let start = if words.starts_with("run") { RUN } else { 0 };
        let words: Vec<_> = words.split_whitespace().collect();
        let refused = place.run_with_input(&words, b"a\n");
        assert_eq!(refused.status, start + 1, "{words:?}: {refused:?}");
        assert_eq!(fs::read(place.store()).unwrap(), b"mine");
    }
}

#[test]
fn a_store_is_private_and_its_files_are_not_links() {
    let place = Place::new();
    place.filter("", b"a\n").is(0, "a\n");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&place.store()), 0o700);
    let names: Vec<_> = snapshot(&place.store())
        .into_iter()
        .map(|(path, _)| path)
        .collect();
    for path in &names {
        assert_eq!(mode(path), 0o600, "{}", path.display());
    }
    for name in ["MANIFEST", "LOCK"] {
        let (file, aside) = (place.store().join(name), place.path("aside"));
        fs::rename(&file, &aside).unwrap();
        std::os::unix::fs::symlink(&aside, &file).unwrap();
        let before = fs::read(&aside).unwrap();
        let refused = place.filter("", b"b\n");
        assert_eq!(
            (refused.status, refused.stdout.as_str()),
            (1, ""),
            "{name}: {refused:?}"
        );
        assert!(refused.stderr.contains(name), "{refused:?}");
        assert_eq!(fs::read(&aside).unwrap(), before);
        fs::remove_file(&file).unwrap();
        fs::rename(&aside, &file).unwrap();
    }
    place.filter("", b"a\nb\n").is(0, "b\n");
}

#[test]
fn a_second_opener_is_told_who_has_the_store() {
    let place = Place::new();
    let held = Options::new().open(place.store()).unwrap();
    let refused = place.say("stats --lock-timeout 100ms");
    refused.refuses(
        1,
        &[&format!("pid={}", std::process::id()), "--lock-timeout"],
    );
    let waiting = place
        .command(&["stats", "--lock-timeout", "10s"])
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(50));
    held.close().unwrap();
    assert_eq!(done(waiting.wait_with_output().unwrap()).status, 0);
}

#[test]
fn a_store_of_a_newer_format_is_refused_untouched() {
    let place = Place::new();
    place.filter("", b"a\n").is(0, "a\n");
    let path = place.store().join("MANIFEST");
    let mut manifest = fs::read(&path).unwrap();
    // The format's number stands behind eight bytes of magic.
    manifest[8] += 1;
    fs::write(&path, &manifest).unwrap();
    let before = snapshot(&place.store());
    place.filter("", b"b\n").is(1, "");
    let refused = place.say("stats");
    refused.refuses(1, &["format"]);
    assert_eq!(snapshot(&place.store()), before);
}

#[test]
fn a_damaged_store_is_never_replaced_by_an_empty_one() {
    let place = Place::new();
    place.filter("", b"a\n").is(0, "a\n");
    let path = place.store().join("MANIFEST");
    let manifest = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    place.filter("", b"a\n").is(1, "");
    fs::write(&path, &manifest[..manifest.len() / 2]).unwrap();
    place.filter("", b"a\n").is(1, "");
    fs::write(&path, &manifest).unwrap();
    place.filter("", b"a\nb\n").is(0, "b\n");
}

#[test]
fn a_directory_without_permission_is_a_plain_error() {
    let place = Place::new();
    place.filter("", b"a\n").is(0, "a\n");
    let open_to_all = fs::Permissions::from_mode(0o755);
    fs::set_permissions(place.dir.path(), open_to_all).unwrap();
    let before = snapshot(&place.store());
    let mode = |mode| fs::set_permissions(place.store(), fs::Permissions::from_mode(mode)).unwrap();
    for closed in [0o000, 0o500] {
        mode(closed);
        let refused = as_nobody(&place, &["get", "--namespace", "emit", "--key", "a"]);
        mode(0o700);
        let Some(refused) = refused else { return };
        assert_eq!(
            (refused.status, refused.stdout.as_str()),
            (1, ""),
            "{refused:?}"
        );
        assert!(
            refused.stderr.to_lowercase().contains("denied"),
            "{refused:?}"
        );
        assert_eq!(snapshot(&place.store()), before);
    }
}

/// Runs a command as somebody whom permissions bind; `None` where that cannot be arranged.
fn as_nobody(place: &Place, words: &[&str]) -> Option<Done> {
    if !rustix::process::geteuid().is_root() {
        return Some(place.run(words));
    }
    let copy = place.path("idemlog");
    if !copy.exists() {
        fs::copy(env!("CARGO_BIN_EXE_idemlog"), &copy).unwrap();
    }
    let run = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&copy)
        .args(words)
        .env("IDEMLOG_STORE", place.store())
        .current_dir("/")
        .output();
    run.ok().map(done)
}

#[test]
fn verify_reads_every_byte_changes_nothing_and_says_what_is_wrong() {
    let place = Place::new();
    let lines: String = (0..5000).map(|n| format!("line {n}\n")).collect();
    assert_eq!(
        place.filter("--order mark-first", lines.as_bytes()).status,
        0
    );
    let before = snapshot(&place.store());
    let done = place.say("verify");
    assert_eq!(done.status, 0, "{done:?}");
    assert!(done.stdout.contains("records=5000"), "{done:?}");
    assert!(done.stdout.contains("problems=0"), "{done:?}");
    assert_eq!(snapshot(&place.store()), before);

    let segment = place.store().join("seg-000000000001.log");
    let mut bytes = fs::read(&segment).unwrap();
    bytes[200] ^= 1;
    fs::write(&segment, bytes).unwrap();
    let done = place.say("verify --json");
    assert_eq!(done.status, 1, "{done:?}");
    assert!(done.stdout.contains("seg-000000000001.log"), "{done:?}");

    let none = place.say("verify --store nowhere");
    assert_ne!(none.status, 0, "{none:?}");
}

#[test]
fn repair_keeps_what_is_left_and_says_what_is_lost() {
    let place = Place::new();
    let lines: String = (0..5000).map(|n| format!("line {n}\n")).collect();
    let filter = || place.filter("--order mark-first", lines.as_bytes());
    assert_eq!(filter().status, 0);
    let whole = place.say("repair --dry-run --json");
    assert_eq!(whole.status, 0, "{whole:?}");
    assert!(whole.stdout.contains("\"whole\":true"), "{whole:?}");

    // One sector in the middle of the log is gone, and so is the index.
    let store = place.store();
    for entry in fs::read_dir(&store).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name.starts_with("run-") || name.starts_with("hint-") {
            fs::remove_file(path).unwrap();
        }
    }
    let segment = store.join("seg-000000000001.log");
    let mut bytes = fs::read(&segment).unwrap();
    bytes[8192..8704].fill(0);
    fs::write(&segment, bytes).unwrap();
    let refused = place.say("stats");
    assert_eq!(refused.status, 1, "{refused:?}");
    assert!(refused.stderr.contains("damaged"), "{refused:?}");
    let named = |dir: &Path| -> Vec<_> {
        let files = snapshot(dir).into_iter();
        files
            .map(|(path, hash)| (path.file_name().unwrap().to_owned(), hash))
            .collect()
    };
    let damaged = named(&store);

    let dry = place.say("repair --dry-run");
    assert_eq!(dry.status, 1, "{dry:?}");
    assert!(
        dry.stdout
            .contains("lost: file=seg-000000000001.log from=8"),
        "{dry:?}"
    );
    let done = place.say("repair --swap --json");
    assert_eq!(done.status, 0, "{done:?}");
    let report: serde_json::Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!(report["lost"].as_array().unwrap().len(), 1, "{report}");
    let kept = report["kept_count"].as_u64().unwrap();
    assert_eq!(report["found_count"].as_u64(), Some(kept));
    assert_eq!(named(&store.with_extension("repair")), damaged);
    let verified = place.say("verify");
    assert_eq!(verified.status, 0, "{verified:?}");
    // The lines that are lost are new again, the others are not.
    let again = filter();
    assert_eq!(again.status, 0);
    let lost = again.stdout.lines().count() as u64;
    assert_eq!(lost, 5000 - kept);
    assert!(
        (1..=23).contains(&lost),
        "{lost} lines were lost with a sector"
    );
    // A target that is in use is refused.
    let other = place.say("repair --to store.repair");
    assert_eq!(other.status, 2, "{other:?}");
}
