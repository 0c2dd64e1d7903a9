//! Openers come and go beside a process that rolls, seals and merges all the time.

use std::io::BufRead;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use idemlog::testing::sim::Rng;
use idemlog::{Durability, ErrorKind, Observed, Options};

use super::{Worker, number, say, small};

const BATCH: u64 = 20;

fn options() -> Options {
    Options::new()
        .shared(true)
        .durability(Durability::Process)
        .segment_bytes(16 * 1024)
}

fn key(n: u64) -> String {
    format!("key-{n:0>200}")
}

/// Observes keys for ever, and says how many are answered.
pub fn roll(dir: &Path) {
    let log = options().open(dir.join("store")).unwrap();
    let filter = log.filter("f", small()).unwrap();
    for batch in 0.. {
        let keys: Vec<String> = (0..BATCH).map(|n| key(batch * BATCH + n)).collect();
        for observed in filter.observe_many(&keys).unwrap() {
            assert!(observed.unwrap().is_new());
        }
        say(&format!("ack {}", (batch + 1) * BATCH));
        if batch % 20 == 0 {
            log.wait_idle().unwrap();
        }
        if batch == 50 {
            say("ready");
        }
        thread::sleep(Duration::from_micros(500));
    }
}

#[test]
fn openers_find_everything_beside_a_process_that_rolls_all_the_time() {
    let (opens, seed) = (number("IDEMLOG_OPENS", 60), number("IDEMLOG_SEED", 11));
    println!("opens={opens} seed={seed}");
    let mut rng = Rng::new(seed);
    let dir = tempfile::tempdir().unwrap();
    let mut worker = Worker::start("roll", 0, dir.path());
    worker.read_to("ready");
    let acked = Arc::new(AtomicU64::new(0));
    let told = Arc::clone(&acked);
    let pid = worker.child.id().to_string();
    let reader = thread::spawn(move || {
        let mut line = String::new();
        while worker.lines.read_line(&mut line).unwrap() > 0 {
            if let Some(count) = line.trim_end().strip_prefix("ack ") {
                told.store(count.parse().unwrap(), Ordering::SeqCst);
            }
            line.clear();
        }
    });
    let mut segments = Vec::new();
    let mut longest = Duration::ZERO;
    for n in 0..opens {
        let known = acked.load(Ordering::SeqCst);
        let began = Instant::now();
        let log = options().open(dir.path().join("store")).unwrap();
        longest = longest.max(began.elapsed());
        let filter = log.filter("f", small()).unwrap();
        let mut keys: Vec<String> = (0..known.min(40))
            .map(|back| key(known - 1 - back))
            .collect();
        keys.extend(
            (0..40)
                .filter(|_| known > 0)
                .map(|_| key(rng.below(known as usize) as u64)),
        );
        keys.extend((0..n).map(|before| format!("opener-{before}")));
        for (key, observed) in keys.iter().zip(filter.observe_many(&keys).unwrap()) {
            assert_eq!(observed.unwrap(), Observed::Duplicate, "{n} {key}");
        }
        assert!(filter.observe(format!("opener-{n}")).unwrap().is_new());
        segments.push(log.stats().segments_count);
        if n % 2 == 0 {
            log.close().unwrap();
        }
    }
    assert!(!reader.is_finished(), "it goes on");
    let kill = Command::new("kill").args(["-s", "KILL", &pid]).status();
    assert!(kill.unwrap().success());
    reader.join().unwrap();
    let known = acked.load(Ordering::SeqCst);
    println!(
        "acked={known} longest_open={longest:?} segments={:?}",
        segments.last()
    );
    assert!(
        segments[segments.len() - 1] > segments[0] + 5,
        "{segments:?}"
    );
    let log = options().open(dir.path().join("store")).unwrap();
    let filter = log.filter("f", small()).unwrap();
    let keys: Vec<String> = (0..known).map(key).collect();
    for observed in filter.observe_many(&keys).unwrap() {
        assert_eq!(observed.unwrap(), Observed::Duplicate);
    }
    log.close().unwrap();
}

/// How often each of those who come and go does so.
const ROUNDS: u64 = 40;

/// Opens, looks, adds a key and closes, again and again; the first one has the store for itself.
pub fn come_and_go(dir: &Path, number: u64) {
    let alone = number == 0;
    let (mut came, mut clean, mut tries) = (0, 0, 0);
    while came < ROUNDS {
        tries += 1;
        let opened = match alone {
            true => Options::new()
                .segment_bytes(16 * 1024)
                .open(dir.join("store")),
            false => options()
                .lock_timeout(Duration::from_secs(60))
                .open(dir.join("store")),
        };
        let log = match opened {
            Ok(log) => log,
            // The others are in it: they do not wait for this one.
            Err(error) if alone && error.kind() == ErrorKind::Locked && tries < 100_000 => {
                thread::sleep(Duration::from_micros(200));
                continue;
            }
            Err(error) => panic!("{number} {came} {error}"),
        };
        clean += u64::from(log.open_report().clean);
        let filter = log.filter("f", small()).unwrap();
        let own = |n: u64| format!("{number}-{n}");
        let before: Vec<String> = (0..came).map(own).collect();
        for observed in filter.observe_many(&before).unwrap() {
            assert_eq!(observed.unwrap(), Observed::Duplicate, "{number} {came}");
        }
        assert!(filter.observe(own(came)).unwrap().is_new());
        log.close().unwrap();
        came += 1;
        thread::sleep(Duration::from_micros((number * 791 + came * 337) % 4000));
    }
    say(&format!("clean {clean}"));
    say("done");
}

/// Some processes open and close at any moment, one of them to have the store for itself: all opens
/// but its own come through, whoever is the last one closes cleanly, and nothing is lost.
#[test]
fn processes_come_and_go_and_the_last_one_closes_cleanly() {
    let dir = tempfile::tempdir().unwrap();
    let count = 4;
    let workers = (0..count).map(|number| Worker::start("come", number, dir.path()));
    let mut clean = Vec::new();
    for mut worker in workers.collect::<Vec<_>>() {
        let lines = worker.read_to("done");
        assert!(worker.child.wait().unwrap().success(), "{lines:?}");
        let said = lines.iter().find_map(|line| line.strip_prefix("clean "));
        clean.push(said.unwrap().parse::<u64>().unwrap());
    }
    println!("first ones behind a clean end: {clean:?}");
    assert!(clean.iter().sum::<u64>() >= ROUNDS - 1, "{clean:?}");
    assert!(clean[0] >= ROUNDS - 1, "{clean:?}");
    let log = Options::new().open(dir.path().join("store")).unwrap();
    assert!(log.open_report().clean);
    let filter = log.filter("f", small()).unwrap();
    let keys = (0..count).flat_map(|number| (0..ROUNDS).map(move |n| format!("{number}-{n}")));
    let keys: Vec<String> = keys.collect();
    for (key, observed) in keys.iter().zip(filter.observe_many(&keys).unwrap()) {
        assert_eq!(observed.unwrap(), Observed::Duplicate, "{key}");
    }
}
