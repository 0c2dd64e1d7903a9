//! `idemlog bench`: what it prints, what it refuses, and that it leaves nothing behind.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use super::Place;

/// What a busy machine takes at most to remove a directory.
const REMOVED_WITHIN: Duration = Duration::from_secs(60);
/// The shortest run.
const QUICK: &str = "bench --seconds 1 --keys 5000";

impl Place {
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.dir.path()).unwrap();
        let name = |entry: fs::DirEntry| entry.file_name().into_string().unwrap();
        entries.map(|entry| name(entry.unwrap())).collect()
    }
}

#[test]
fn bench_prints_two_numbers_and_what_they_hold_for() {
    let place = Place::new();
    let text = place.say(QUICK);
    assert_eq!((text.status, text.stderr.as_str()), (0, ""), "{text:?}");
    let lines: Vec<_> = text.stdout.lines().collect();
    let [machine, commits, lookup] = lines[..] else {
        panic!("{text:?}");
    };
    for word in ["cores=", "cpu=", "kernel=", "file_system=", "idemlog="] {
        assert!(machine.contains(word), "{machine}");
    }
    assert!(commits.starts_with("durable commits: "), "{commits}");
    // A lone caller shares no flush: a number below would mean that commits are not durable.
    let flushes = commits.rsplit_once("flushes_per_commit=").unwrap().1;
    assert!(flushes.parse::<f64>().unwrap() >= 1.0, "{commits}");
    assert!(commits.contains("durability=power threads=1"), "{commits}");
    assert!(lookup.starts_with("duplicate look-up: "), "{lookup}");
    let facts = "ns durability=buffered keys=5000";
    assert!(lookup.ends_with(facts), "{lookup}");
    assert_eq!(place.names(), [""; 0]);
}

#[test]
fn bench_answers_in_json() {
    let place = Place::new();
    let told = place.say(&format!("{QUICK} --threads 4 --json"));
    let json: serde_json::Value = serde_json::from_str(&told.stdout).unwrap();
    assert_eq!(json["idemlog"], env!("CARGO_PKG_VERSION"));
    assert!(json["file_system"].is_string() && json["cpu"].is_string());
    let (commits, lookup) = (&json["commits"], &json["duplicate_lookup"]);
    assert_eq!(
        (&commits["threads"], &commits["durability"]),
        (&4.into(), &"power".into()),
    );
    for number in [&commits["per_second"], &commits["p50_us"], &lookup["ns"]] {
        assert!(number.as_f64().unwrap() > 0.0, "{json}");
    }
    assert!(commits["p50_us"].as_f64() <= commits["p99_us"].as_f64());
    assert_eq!(place.names(), [""; 0]);
}

#[test]
fn bench_refuses_what_it_cannot_use_and_touches_no_store() {
    let place = Place::new();
    place
        .say("bench --dir missing")
        .refuses(1, &["dir=missing", "No such file"]);
    // Nobody can write here, not even root.
    place
        .say("bench --dir /proc")
        .refuses(1, &["dir=/proc", "no directory can be made"]);
    for words in ["--seconds 0", "--keys 0", "--threads 0"] {
        place.say(&format!("bench {words}")).refuses(2, &["1.."]);
    }
    place
        .say("bench --store other")
        .refuses(2, &["--dir", "--store"]);
    place.filter("", b"a\n").is(0, "a\n");
    place
        .say("bench --dir store")
        .refuses(2, &["is a store", "--dir"]);
    // The variable names the store of other commands.
    assert_eq!(place.say(QUICK).status, 0);
    place.filter("", b"a\n").is(0, "");
    assert_eq!(place.names(), ["store"]);
}

/// The disk gives an error in the middle: the directory goes all the same.
#[test]
fn bench_removes_its_directory_after_an_error() {
    let place = Place::new();
    let bench = format!(
        "ulimit -n 7; exec {} {QUICK}",
        env!("CARGO_BIN_EXE_idemlog")
    );
    let mut command = Command::new("sh");
    command.args(["-c", &bench]).current_dir(place.dir.path());
    let failed = super::done(command.output().unwrap());
    assert_eq!(
        (failed.status, failed.stdout.as_str()),
        (1, ""),
        "{failed:?}"
    );
    assert_eq!(place.names(), [""; 0], "{failed:?}");
}

/// A signal like Ctrl-C, which whoever runs the tests in the background has it ignore; and a kill
/// that it cannot catch.
#[test]
fn bench_removes_its_directory_when_it_is_killed() {
    for signal in ["-TERM", "-KILL"] {
        let place = Place::new();
        let words = ["bench", "--seconds", "600"];
        let mut bench = place.command(&words).spawn().unwrap();
        let is_working = || {
            let names = place.names();
            names
                .first()
                .is_some_and(|name| place.path(name).join("commits/MANIFEST").exists())
        };
        while !is_working() {
            assert!(bench.try_wait().unwrap().is_none(), "it has ended");
            std::thread::sleep(Duration::from_millis(2));
        }
        let pid = bench.id().to_string();
        assert!(
            Command::new("kill")
                .args([signal, &pid])
                .status()
                .unwrap()
                .success()
        );
        assert_eq!(bench.wait().unwrap().code(), None);
        let killed = Instant::now();
        while !place.names().is_empty() {
            assert!(killed.elapsed() < REMOVED_WITHIN, "{:?}", place.names());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
