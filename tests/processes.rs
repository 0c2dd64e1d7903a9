//! Real processes in one store: they race for keys, are killed and stopped, and flush for each
//! other.
//!
//! A child is this test binary under the name of the test `child`, told what to do by an
//! environment variable. `IDEMLOG_KEYS`, `IDEMLOG_KILLS` and `IDEMLOG_SEED` make more of it.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use idemlog::testing::sim::Rng;
use idemlog::{
    DedupLog, Durability, ErrorKind, IntakeOptions, JobStatus, KeyState, NamespaceOptions,
    Observed, Options, Outcome, Repeatable, RunVerdict, Submitted,
};

#[cfg(target_os = "linux")]
mod fork;
#[cfg(target_os = "linux")]
mod gates;
mod joins;
mod race;
mod waits;

const TASK: &str = "IDEMLOG_TEST_PROCESSES_TASK";
const THREADS: u64 = 4;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

fn open(dir: &Path, level: Durability) -> DedupLog {
    let options = Options::new()
        .shared(true)
        .durability(level)
        .segment_bytes(256 * 1024)
        .turn_timeout(Duration::from_millis(number("IDEMLOG_TURN_MS", 10_000)));
    options.open(dir.join("store")).unwrap()
}

fn small() -> NamespaceOptions {
    NamespaceOptions::new().outcome_bytes_max(64)
}

/// One whole line, which a kill does not cut.
fn say(line: &str) {
    let line = format!("\n{line}\n");
    let mut out = std::io::stdout().lock();
    out.write_all(line.as_bytes()).unwrap();
    out.flush().unwrap();
}

/// Not a test of its own: what another process does.
#[test]
fn child() {
    let Ok(task) = std::env::var(TASK) else {
        return;
    };
    let words: Vec<&str> = task.splitn(3, ' ').collect();
    let [what, number, dir] = words.as_slice() else {
        panic!("{task}")
    };
    let (number, dir) = (number.parse().unwrap(), Path::new(dir));
    match *what {
        "race" => race(dir, number),
        "busy" => busy(dir),
        "commit" => commit(dir, number),
        "tell" => tell(dir),
        "crowd" => race::crowd(dir, number),
        "hold" => waits::hold(dir),
        "roll" => joins::roll(dir),
        "come" => joins::come_and_go(dir, number),
        #[cfg(target_os = "linux")]
        "work" => gates::work(dir),
        #[cfg(target_os = "linux")]
        "flush" => gates::flush(dir),
        #[cfg(target_os = "linux")]
        "look" => gates::look(dir, number),
        #[cfg(target_os = "linux")]
        "fork" => fork::fork_and_go_on(dir),
        #[cfg(target_os = "linux")]
        "turn" => fork::fork_in_turn(dir),
        #[cfg(target_os = "linux")]
        "outlived" => fork::be_outlived(dir),
        _ => panic!("{task}"),
    }
}

/// Goes through all keys, from another one on in each thread, and says what it was answered.
fn race(dir: &Path, start: u64) {
    let log = open(dir, Durability::Process);
    let keys = number("IDEMLOG_KEYS", 1500);
    let filter = log.filter("f", small()).unwrap();
    let claims = log.namespace::<Repeatable>("c", small()).unwrap();
    let (filter, claims) = (&filter, &claims);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                for n in 0..keys {
                    let n = (n + (start * THREADS + thread) * 37) % keys;
                    if filter.observe(format!("key-{n}")).unwrap() == Observed::New {
                        say(&format!("new {n}"));
                    }
                    if n.is_multiple_of(10) {
                        claim_one(claims, n);
                    }
                }
            });
        }
    });
    log.close().unwrap();
    say("done");
}

fn claim_one(claims: &idemlog::Namespace<Repeatable>, n: u64) {
    let deadline = Duration::from_secs(60);
    let outcome = format!("{n} by {}", std::process::id()).into_bytes();
    let ran = claims.run_once_wait(format!("job-{n}"), deadline, |_| Ok(outcome));
    let outcome = match ran.unwrap() {
        RunVerdict::Ran { outcome, .. } => outcome,
        RunVerdict::Replayed(done) => match done.outcome {
            Outcome::Kept(outcome) => outcome,
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    };
    say(&format!("out {}", String::from_utf8(outcome).unwrap()));
}

/// Appends for ever, as fast as it can.
fn busy(dir: &Path) {
    let log = open(dir, Durability::Process);
    let filter = log.filter("f", small()).unwrap();
    for n in 0u64.. {
        let key = format!("busy-{}-{n}", std::process::id());
        match filter.observe(key) {
            Ok(observed) => assert_eq!(observed, Observed::New),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Locked, "{error}"),
        }
        if n == 100 {
            say("ready");
        }
    }
}

/// Commits, each durably.
fn commit(dir: &Path, count: u64) {
    let log = open(dir, Durability::Power);
    let claims = log.namespace::<Repeatable>("c", small()).unwrap();
    say("ready");
    let mut go = String::new();
    std::io::stdin().read_line(&mut go).unwrap();
    let before = log.stats().flushes_count;
    for n in 0..count {
        let key = format!("{}-{n}", std::process::id());
        let ran = claims.run_once(key, |_| Ok(vec![1])).unwrap();
        assert!(matches!(ran, RunVerdict::Ran { .. }), "{ran:?}");
    }
    say(&format!("flushes {}", log.stats().flushes_count - before));
    log.close().unwrap();
    say("done");
}

/// The parent's side of a child.
struct Worker {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Worker {
    fn start(what: &str, number: u64, dir: &Path) -> Worker {
        let name = concat!(module_path!(), "::child");
        let name = name.split_once("::").unwrap().1;
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([name, "--exact", "--nocapture", "--test-threads=1"])
            .env(TASK, format!("{what} {number} {}", dir.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Worker { child, lines }
    }

    /// Reads to the end, or to this line.
    fn read_to(&mut self, last: &str) -> Vec<String> {
        let mut read = Vec::new();
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line).unwrap_or(0) == 0 || line.trim_end() == last {
                return read;
            }
            read.push(line.trim_end().to_owned());
        }
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let status = Command::new("kill").args(["-s", name, &pid]).status();
        assert!(status.unwrap().success());
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Eight processes of four threads race for all keys, and some are killed and replaced: each key is
/// new once (to a process that was killed before it could say so, or to one that did), and every
/// outcome is told alike by all.
#[test]
fn many_processes_race_for_the_same_keys_and_some_are_killed() {
    let seed = number("IDEMLOG_SEED", 3);
    let (keys, kills) = (number("IDEMLOG_KEYS", 1500), number("IDEMLOG_KILLS", 6));
    println!("seed={seed} keys={keys} kills={kills}");
    let mut rng = Rng::new(seed);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    let spawn = move |number: u64| {
        let path = path.clone();
        let mut worker = Worker::start("race", number, &path);
        let pid = worker.child.id();
        let reader = std::thread::spawn(move || {
            let lines = worker.read_to("never");
            let ended = worker.child.wait().unwrap();
            (lines, ended.success())
        });
        (pid, reader)
    };
    let mut running: Vec<_> = (0..8).map(&spawn).collect();
    let mut all = Vec::new();
    let mut killed_count = 0;
    for n in 0..kills {
        std::thread::sleep(Duration::from_millis(30 + rng.below(150) as u64));
        let (pid, reader) = running.swap_remove(rng.below(running.len()));
        let status = Command::new("kill")
            .args(["-s", "KILL", &pid.to_string()])
            .status();
        killed_count += u64::from(status.unwrap().success());
        all.push(reader);
        running.push(spawn(8 + n));
    }
    let mut news = BTreeMap::<u64, u64>::new();
    let mut outcomes = BTreeMap::<String, String>::new();
    let mut ended_well = 0;
    for reader in all
        .into_iter()
        .chain(running.into_iter().map(|(_, reader)| reader))
    {
        let (lines, success) = reader.join().unwrap();
        ended_well += u64::from(success && lines.iter().any(|line| line == "done"));
        for line in lines {
            if let Some(n) = line.strip_prefix("new ") {
                *news.entry(n.parse().unwrap()).or_default() += 1;
            } else if let Some(outcome) = line.strip_prefix("out ") {
                let job = outcome.split(' ').next().unwrap().to_owned();
                let told = outcomes.entry(job).or_insert_with(|| outcome.to_owned());
                assert_eq!(told, outcome);
            }
        }
    }
    assert!(ended_well >= 8, "{ended_well}");
    assert!(news.values().all(|count| *count == 1), "{news:?}");
    let lost = keys - news.len() as u64;
    assert!(
        lost <= killed_count * THREADS,
        "{lost} of {keys}, kills={killed_count}"
    );
    assert_eq!(outcomes.len() as u64, keys.div_ceil(10));
    println!("killed={killed_count} told_by_nobody={lost}");
    // All of it is there for who comes alone.
    let log = Options::new().open(dir.path().join("store")).unwrap();
    let filter = log.filter("f", small()).unwrap();
    let all: Vec<String> = (0..keys).map(|n| format!("key-{n}")).collect();
    for observed in filter.observe_many(&all).unwrap() {
        assert_eq!(observed.unwrap(), Observed::Duplicate);
    }
}

/// Whoever is killed, at whatever moment, lets go at once.
#[test]
fn a_killed_process_is_in_nobodys_way() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path(), Durability::Process);
    let filter = log.filter("f", small()).unwrap();
    let mut waits = Vec::new();
    for n in 0..number("IDEMLOG_KILLS", 10) {
        let mut worker = Worker::start("busy", n, dir.path());
        worker.read_to("ready");
        std::thread::sleep(Duration::from_micros(n * 731 % 5000));
        worker.child.kill().unwrap();
        let began = Instant::now();
        assert_eq!(filter.observe(format!("after-{n}")).unwrap(), Observed::New);
        waits.push(began.elapsed());
        drop(worker);
    }
    waits.sort();
    println!("longest wait: {:?}", waits.last());
    // Also the process that was killed needs the processor to die: on a loaded machine some wait.
    assert!(
        waits[waits.len() / 2] < Duration::from_millis(100),
        "{waits:?}"
    );
    log.close().unwrap();
}

/// Stopped in the middle of its turn, a process makes the others wait, and end with `Locked` by
/// their deadline; continued, it goes on, and so do they.
#[test]
fn a_stopped_process_makes_others_end_with_locked() {
    let dir = tempfile::tempdir().unwrap();
    let turn = Duration::from_millis(300);
    let log = Options::new()
        .shared(true)
        .durability(Durability::Process)
        .segment_bytes(256 * 1024)
        .turn_timeout(turn)
        .open(dir.path().join("store"))
        .unwrap();
    let filter = log.filter("f", small()).unwrap();
    let mut worker = Worker::start("busy", 0, dir.path());
    worker.read_to("ready");
    let mut locked_count = 0;
    for n in 0..200 {
        worker.signal("STOP");
        let began = Instant::now();
        let key = format!("stopped-{n}");
        match filter.observe(&key) {
            Ok(observed) => assert_eq!(observed, Observed::New),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Locked, "{error}");
                assert!(
                    began.elapsed() + Duration::from_millis(5) >= turn,
                    "{:?}",
                    began.elapsed()
                );
                locked_count += 1;
            }
        }
        assert!(
            began.elapsed() < turn + Duration::from_secs(5),
            "{:?}",
            began.elapsed()
        );
        worker.signal("CONT");
        if locked_count == 3 {
            break;
        }
        std::thread::sleep(Duration::from_micros(n * 97 % 3000));
    }
    assert!(locked_count > 0);
    assert!(worker.child.try_wait().unwrap().is_none(), "it goes on");
    drop(worker);
    assert_eq!(filter.observe("last").unwrap(), Observed::New);
}

/// What one process flushes serves all that was appended before, by whomever: without that it would
/// be one flush a commit. How many wait at that moment is up to the machine; it is printed.
#[test]
fn one_flush_serves_many_processes() {
    let best = (0..3).map(|_| flushes_per_commit()).fold(1.0, f64::min);
    assert!(best <= 0.5, "{best}");
}

fn flushes_per_commit() -> f64 {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path(), Durability::Power));
    let (count, each) = (16, number("IDEMLOG_KEYS", 40));
    let mut workers: Vec<Worker> = (0..count)
        .map(|_| Worker::start("commit", each, dir.path()))
        .collect();
    for worker in &mut workers {
        worker.read_to("ready");
    }
    for worker in &mut workers {
        worker
            .child
            .stdin
            .take()
            .unwrap()
            .write_all(b"go\n")
            .unwrap();
    }
    let mut flushes = 0;
    for mut worker in workers {
        let lines = worker.read_to("done");
        let counted = lines.iter().find_map(|line| line.strip_prefix("flushes "));
        flushes += counted.unwrap().parse::<u64>().unwrap();
    }
    let per_commit = flushes as f64 / (count * each) as f64;
    println!(
        "commits={} flushes={flushes} flushes_per_commit={per_commit:.3}",
        count * each
    );
    per_commit
}

/// Observes keys of its own for ever, and says each when it was answered.
fn tell(dir: &Path) {
    let log = open(dir, Durability::Process);
    let filter = log.filter("f", small()).unwrap();
    for n in 0u64.. {
        let key = format!("told-{}-{n}", std::process::id());
        assert_eq!(filter.observe(&key).unwrap(), Observed::New);
        say(&key);
    }
}

/// A reader beside processes that are killed and replaced, until nobody is left: what they were
/// answered it finds at once, what nobody has seen it does not, and it makes and changes no file.
#[test]
fn a_reader_is_beside_processes_that_are_killed() {
    let dir = tempfile::tempdir().unwrap();
    {
        let log = open(dir.path(), Durability::Process);
        log.filter("f", small()).unwrap();
        log.close().unwrap();
    }
    let read = || {
        let log = Options::new().open_read_only(dir.path().join("store"));
        let log = log.unwrap();
        let filter = log.filter("f", small()).unwrap();
        (log, filter)
    };
    let (log, filter) = read();
    let mut workers: Vec<_> = (0..2)
        .map(|n| Worker::start("tell", n, dir.path()))
        .collect();
    let mut told = Vec::new();
    for round in 0..number("IDEMLOG_KILLS", 8) {
        for _ in 0..200 {
            for worker in &mut workers {
                let mut line = String::new();
                worker.lines.read_line(&mut line).unwrap();
                let Some(at) = line.find("told-") else {
                    continue;
                };
                let key = line[at..].trim_end().to_owned();
                assert_eq!(filter.get(&key).unwrap(), KeyState::Seen, "{key}");
                told.push(key);
            }
        }
        let (_fresh, other) = read();
        assert_eq!(other.get(told.last().unwrap()).unwrap(), KeyState::Seen);
        assert_eq!(other.get("never").unwrap(), KeyState::Absent);
        let mut killed = workers.remove(0);
        killed.child.kill().unwrap();
        drop(killed);
        workers.push(Worker::start("tell", round, dir.path()));
    }
    drop(workers);
    let files = || {
        let mut files: Vec<_> = std::fs::read_dir(dir.path().join("store"))
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| (entry.file_name(), std::fs::read(entry.path()).unwrap()))
            .collect();
        files.sort();
        files
    };
    let before = files();
    let (_fresh, other) = read();
    for filter in [&filter, &other] {
        for key in &told {
            assert_eq!(filter.get(key).unwrap(), KeyState::Seen, "{key}");
        }
        assert_eq!(filter.get("never").unwrap(), KeyState::Absent);
    }
    assert!(log.stats().segments_count > 0);
    assert!(files() == before, "a reader changes nothing");
    // Whoever comes next recovers the store beside the readers.
    let sharing = open(dir.path(), Durability::Process);
    let writes = sharing.filter("f", small()).unwrap();
    assert_eq!(writes.observe("next").unwrap(), Observed::New);
    assert_eq!(filter.get("next").unwrap(), KeyState::Seen);
    println!("told={}", told.len());
}

/// Nobody rings for a reader: it looks again.
#[test]
fn a_reader_waits_for_what_another_one_does() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path(), Durability::Process);
    let intake = |log: &DedupLog| {
        let options = IntakeOptions::new().jobs(small());
        log.intake::<Repeatable>("work", options).unwrap()
    };
    let jobs = intake(&log);
    assert_eq!(jobs.submit("j", b"do it").unwrap(), Submitted::Queued);
    let reader = Options::new().open_read_only(dir.path().join("store"));
    let seen = intake(&reader.unwrap());
    std::thread::scope(|scope| {
        let began = Instant::now();
        let waits = scope.spawn(|| seen.wait_outcome("j", Duration::from_secs(60)));
        std::thread::sleep(Duration::from_millis(50));
        let job = jobs.take(1).unwrap().pop().unwrap();
        let ran = job.run(|_| Ok(b"done".to_vec())).unwrap();
        assert!(matches!(ran, RunVerdict::Ran { .. }));
        let status = waits.join().unwrap().unwrap();
        assert!(
            matches!(status, JobStatus::Begun(KeyState::Done(_))),
            "{status:?}"
        );
        assert!(began.elapsed() < Duration::from_secs(30));
    });
}
