//! Real processes on real files: killed, stopped, started beside each other, outlived by children,
//! copied while they write.
//!
//! A child is this test binary under the name of the test `child`, told what to do by an
//! environment variable; what it says on stdout is what it has acknowledged. `IDEMLOG_KILLS`
//! raises the number of rounds.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use idemlog::{
    ClaimOptions, ClaimVerdict, DedupLog, Durability, Error, ErrorKind, KeyState, ObserveOptions,
    Observed, Options, Repeatable,
};
use rustix::process::{Pid, Signal, kill_process};

use super::{claims, filter, long, small};

const TASK: &str = "IDEMLOG_TEST_CASE_TASK";
const READY: &str = "ready";

/// Not a test of its own: what the children do.
#[test]
fn child() {
    let Ok(task) = std::env::var(TASK) else {
        return;
    };
    let words: Vec<&str> = task.splitn(3, ' ').collect();
    let [what, argument, dir] = words.as_slice() else {
        panic!("{task}")
    };
    let dir = Path::new(dir);
    match *what {
        "hold" => hold(dir, argument.parse().unwrap()),
        "try" => say(&try_open(dir)),
        "outlived" => be_outlived(dir),
        "claim" => hold_a_claim(dir),
        "fork" => fork_beside_an_unwritten_record(dir),
        "vectors" => {
            let (prints, derived) = claims::vectors();
            prints
                .iter()
                .chain(&derived)
                .for_each(|line| say(&format!("vector {line}")));
        }
        _ => super::limits::child(what, argument, dir),
    }
    say(READY);
}

pub fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // The test harness leaves an unfinished line behind.
    write!(out, "\n{line}\n").unwrap();
    out.flush().unwrap();
}

/// Small segments: the log rolls, seals and merges all the time.
pub fn settings() -> Options {
    // Another test's child inherits our lock between its fork and its exec: wait for that.
    Options::new()
        .segment_bytes(8192)
        .lock_timeout(Duration::from_secs(20))
}

pub fn open(store: &Path) -> DedupLog {
    settings().open(store).unwrap()
}

/// Observes keys for ever, from this one on, and says each that is acknowledged.
fn hold(store: &Path, start: usize) -> ! {
    let log = open(store);
    let filter = filter(&log);
    say("open");
    for n in start.. {
        assert_eq!(
            filter.observe(long("key", n)).unwrap(),
            Observed::New,
            "{n}"
        );
        say(&format!("ack {n}"));
    }
    unreachable!()
}

fn try_open(store: &Path) -> String {
    match Options::new().open(store) {
        Ok(_) => "opened".to_owned(),
        Err(error) => format!("refused {:?} {error}", error.kind()),
    }
}

fn be_outlived(store: &Path) -> ! {
    let log = open(store);
    assert!(filter(&log).observe("before").unwrap().is_new());
    // It inherits every descriptor that is not closed on exec, and outlives us.
    let mut survivor = Command::new("sleep").arg("300").spawn().unwrap();
    say(&format!("survivor {}", survivor.id()));
    say(READY);
    survivor.wait().unwrap();
    panic!("the child was not to end first");
}

fn hold_a_claim(store: &Path) -> ! {
    let log = open(store);
    let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
    let asked = ClaimOptions::new().lease(Duration::from_secs(3600));
    let claim = jobs.claim_with("k", &asked).unwrap().claim().unwrap();
    log.sync().unwrap();
    say(READY);
    loop {
        std::thread::park();
        let _held = &claim;
    }
}

/// The parent's side of a child. Killed when it is dropped.
pub struct Worker {
    pub process: Child,
    lines: BufReader<ChildStdout>,
}

pub fn command(mut command: Command, what: &str, argument: &str, dir: &Path) -> Command {
    command
        .args([
            "cases::process::child",
            "--exact",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(TASK, format!("{what} {argument} {}", dir.display()))
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    command
}

impl Worker {
    pub fn start(what: &str, argument: &str, dir: &Path) -> Worker {
        let own = Command::new(std::env::current_exe().unwrap());
        Worker::spawn(command(own, what, argument, dir))
    }

    pub fn spawn(mut command: Command) -> Worker {
        let mut process = command.spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap());
        Worker { process, lines }
    }

    /// Reads on until a line that begins like this, and returns all lines.
    pub fn until(&mut self, start: &str) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            let count = self.lines.read_line(&mut line).unwrap();
            assert!(count > 0, "the child ended by itself after {lines:?}");
            let is_it = line.starts_with(start);
            lines.push(line.trim_end().to_owned());
            if is_it {
                return lines;
            }
        }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.process.id().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Kills, and returns what was said since.
    pub fn kill(mut self) -> Vec<String> {
        self.process.kill().unwrap();
        self.rest()
    }

    /// Waits for the end, and returns what was said until then.
    pub fn rest(&mut self) -> Vec<String> {
        let lines = self.lines.by_ref().split(b'\n');
        let said = lines
            .map(|line| String::from_utf8_lossy(&line.unwrap()).into_owned())
            .collect();
        self.process.wait().unwrap();
        said
    }

    /// Waits for an end without panic or signal.
    pub fn finish(mut self) -> Vec<String> {
        let said = self.rest();
        let status = self.process.wait().unwrap();
        assert!(status.success(), "{status}: {said:?}");
        said
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _killed = self.process.kill();
        let _reaped = self.process.wait();
    }
}

pub fn last_ack(lines: &[String]) -> Option<usize> {
    let numbers = lines.iter().filter_map(|line| line.strip_prefix("ack "));
    numbers.filter_map(|number| number.parse().ok()).next_back()
}

/// The next line that says what an attempt to open came to.
fn attempt(store: &Path) -> String {
    let said = Worker::start("try", "-", store).finish();
    said.into_iter()
        .find(|line| line.starts_with("opened") || line.starts_with("refused"))
        .unwrap()
}

fn rounds(default: u64) -> u64 {
    let count = std::env::var("IDEMLOG_KILLS").map(|count| count.parse().unwrap());
    count.unwrap_or(default).max(default)
}

#[test]
fn c33_killed_and_opened_at_once_again_and_again_no_lock_is_left_and_no_key_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let mut start = 0;
    for round in 0..rounds(20) {
        let mut victim = Worker::start("hold", &start.to_string(), &store);
        let mut lines = victim.until("ack ");
        if round % 3 != 0 {
            lines.extend(victim.until(&format!("ack {}", start + (round as usize * 7) % 60)));
        }
        lines.extend(victim.kill());
        // No waiting: the kernel has let go of the lock with the process.
        let log = Options::new().segment_bytes(8192).open(&store);
        let log = log.unwrap_or_else(|error| {
            // Only a child that another test starts at this very moment may hold a copy of it.
            assert_eq!(error.kind(), ErrorKind::Locked, "{error:?}");
            open(&store)
        });
        let acked = last_ack(&lines).unwrap();
        for n in 0..=acked {
            let seen = filter(&log).get(long("key", n)).unwrap();
            assert_eq!(seen, KeyState::Seen, "round {round}: key {n} of {acked}");
        }
        let next = filter(&log).get(long("key", acked + 1)).unwrap() == KeyState::Seen;
        assert_eq!(
            filter(&log).get(long("key", acked + 2)).unwrap(),
            KeyState::Absent
        );
        start = acked + 1 + usize::from(next);
        drop(log);
    }
    assert!(idemlog::verify(&store).unwrap().is_ok());
}

#[test]
fn c33_the_lock_names_a_living_process_that_does_not_hold_it_and_the_open_works() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    open(&store).close().unwrap();
    let mut other = Command::new("sleep").arg("300").spawn().unwrap();
    for note in [
        format!("pid={}", other.id()),
        "pid=1".into(),
        "x".repeat(5000),
        String::new(),
    ] {
        std::fs::write(store.join("LOCK"), &note).unwrap();
        assert_eq!(attempt(&store), "opened", "{note}");
        let log = open(&store);
        let refused = attempt(&store);
        let own = format!("holder=pid={}", std::process::id());
        assert!(
            refused.starts_with("refused Locked") && refused.contains(&own),
            "{refused}"
        );
        drop(log);
    }
    other.kill().unwrap();
    other.wait().unwrap();
}

#[test]
fn c21_no_other_name_and_no_dropped_failure_lets_a_second_or_third_process_in() {
    let dir = tempfile::tempdir().unwrap();
    let (store, link) = (dir.path().join("store"), dir.path().join("link"));
    std::os::unix::fs::symlink(&store, &link).unwrap();
    let here = std::env::current_dir().unwrap();
    let mut relative: PathBuf = here.components().skip(1).map(|_| "..").collect();
    relative.push(store.strip_prefix("/").unwrap());
    let names = [
        &store,
        &link,
        &relative,
        &store.join("."),
        &dir.path().join("link/../store"),
    ];
    let first = open(&store);
    let mut n = 0;
    let mut record = |first: &DedupLog| {
        n += 1;
        assert!(filter(first).observe(long("key", n)).unwrap().is_new());
    };
    for name in names {
        for _ in 0..2 {
            record(&first);
            let error: Error = Options::new().open(name).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Locked, "{error:?}");
            // The failed handle is gone; another process finds the store locked as before.
            drop(error);
            let refused = attempt(name);
            assert!(
                refused.starts_with("refused Locked"),
                "{}: {refused}",
                name.display()
            );
            assert!(
                refused.contains(&format!("pid={}", std::process::id())),
                "{refused}"
            );
        }
    }
    record(&first);
    assert!(
        idemlog::verify(&store).is_err(),
        "a check of an open store reads a moving one"
    );
    drop(first);
    assert_eq!(attempt(&relative), "opened");
    let log = open(&link);
    for key in 1..=n {
        assert_eq!(filter(&log).get(long("key", key)).unwrap(), KeyState::Seen);
    }
    drop(log);
    assert!(idemlog::verify(&store).unwrap().is_ok());
}

#[test]
fn c21_a_child_that_outlives_its_parent_holds_no_lock() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let mut parent = Worker::start("outlived", "-", &store);
    let lines = parent.until(READY);
    let survivor = lines.iter().find_map(|line| line.strip_prefix("survivor "));
    let survivor = Pid::from_raw(survivor.unwrap().parse().unwrap()).unwrap();
    let refused = attempt(&store);
    assert!(refused.starts_with("refused Locked"), "{refused}");
    assert!(
        refused.contains(&format!("pid={}", parent.process.id())),
        "{refused}"
    );
    // The survivor holds the pipe of stdout: reading to its end would wait for it.
    parent.process.kill().unwrap();
    parent.process.wait().unwrap();
    rustix::process::test_kill_process(survivor).unwrap();
    let log = open(&store);
    assert_eq!(filter(&log).observe("before").unwrap(), Observed::Duplicate);
    rustix::process::test_kill_process(survivor).unwrap();
    kill_process(survivor, Signal::KILL).unwrap();
}

#[test]
fn c33_a_stopped_process_keeps_its_lock_goes_on_when_continued_and_frees_it_when_killed() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let mut worker = Worker::start("hold", "0", &store);
    worker.until("ack 5");
    for _ in 0..3 {
        worker.signal(Signal::STOP);
        let refused = attempt(&store);
        assert!(refused.starts_with("refused Locked"), "{refused}");
        worker.signal(Signal::CONT);
        // What was said before the stop comes first; then it goes on.
        for _ in 0..20 {
            worker.until("ack ");
        }
    }
    worker.signal(Signal::STOP);
    let lines = worker.kill();
    let log = open(&store);
    for n in 0..last_ack(&lines).unwrap_or(60) {
        assert_eq!(
            filter(&log).get(long("key", n)).unwrap(),
            KeyState::Seen,
            "{n}"
        );
    }
}

#[test]
fn c43_the_claim_of_a_killed_worker_does_not_wait_for_its_lease() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    // A second store of this process is no help and no hindrance.
    let beside = open(&dir.path().join("beside"));
    let mut worker = Worker::start("claim", "-", &store);
    worker.until(READY);
    worker.kill();
    let log = open(&store);
    let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
    let verdict = jobs.claim("k").unwrap();
    assert!(
        matches!(verdict, ClaimVerdict::Takeover { .. }),
        "{verdict:?}"
    );
    assert!(filter(&beside).observe("k").unwrap().is_new() && beside.health().ok);
}

#[test]
fn c51_another_process_computes_the_same_fingerprints_and_derived_keys() {
    let (prints, derived) = claims::vectors();
    let expected: Vec<String> = prints.into_iter().chain(derived).collect();
    for _ in 0..2 {
        let said = Worker::start("vectors", "-", Path::new("-")).finish();
        let found: Vec<&str> = said
            .iter()
            .filter_map(|line| line.strip_prefix("vector "))
            .collect();
        assert_eq!(found, expected);
    }
}

fn copy_files(from: &Path, to: &Path, order: &dyn Fn(&mut Vec<PathBuf>)) {
    std::fs::create_dir(to).unwrap();
    let entries = std::fs::read_dir(from).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    order(&mut files);
    for file in files {
        // A file may be gone again before its turn comes, as with `cp -r`.
        if let Ok(content) = std::fs::read(&file) {
            std::fs::write(to.join(file.file_name().unwrap()), content).unwrap();
        }
    }
}

#[test]
fn c07_a_copy_of_a_store_that_is_being_written_opens_with_all_its_keys_or_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let mut worker = Worker::start("hold", "0", &store);
    let mut acked = last_ack(&worker.until("ack 40")).unwrap();
    let orders: [&dyn Fn(&mut Vec<PathBuf>); 4] = [
        &|files| files.sort(),
        &|files| {
            files.sort();
            files.reverse();
        },
        // The manifest first, and last.
        &|files| files.sort_by_key(|file| !file.ends_with("MANIFEST")),
        &|files| files.sort_by_key(|file| file.ends_with("MANIFEST")),
    ];
    let (mut opened, mut refused) = (0, 0);
    for round in 0..12 {
        let copy = dir.path().join(format!("copy-{round}"));
        if round % 3 == 2 {
            let copied = Command::new("cp").arg("-r").arg(&store).arg(&copy).status();
            copied.unwrap();
        } else {
            copy_files(&store, &copy, orders[round % 4]);
        }
        let before = acked;
        acked = last_ack(&worker.until(&format!("ack {}", acked + 30))).unwrap();
        // The copy's files may be older than its manifest, or younger.
        match Options::new().segment_bytes(8192).create(false).open(&copy) {
            Err(error) => {
                let kinds = [ErrorKind::Damaged, ErrorKind::Incompatible];
                assert!(kinds.contains(&error.kind()), "{error:?}");
                assert!(error.file().is_some(), "{error:?}");
                refused += 1;
            }
            Ok(log) => {
                opened += 1;
                for n in 0..=before {
                    match filter(&log).get(long("key", n)) {
                        Ok(state) => assert_eq!(state, KeyState::Seen, "copy {round}: key {n}"),
                        Err(error) => assert_eq!(error.kind(), ErrorKind::Damaged, "{error:?}"),
                    }
                }
                let strangers = filter(&log).get("stranger").unwrap();
                assert_eq!(strangers, KeyState::Absent);
            }
        }
    }
    println!("copies of a live store: opened={opened} refused={refused}");
    assert_eq!(opened + refused, 12);
    // Being copied has done the original no harm.
    worker.kill();
    let log = open(&store);
    for n in 0..=acked {
        assert_eq!(
            filter(&log).get(long("key", n)).unwrap(),
            KeyState::Seen,
            "{n}"
        );
    }
    drop(log);
    assert!(idemlog::verify(&store).unwrap().is_ok());
}

/// A copy that was made while nobody had the store open is the store.
#[test]
fn c09_a_copy_of_a_closed_store_opens_beside_the_original() {
    let dir = tempfile::tempdir().unwrap();
    let (store, copy) = (dir.path().join("store"), dir.path().join("copy"));
    let log = open(&store);
    for n in 0..200 {
        let options = idemlog::ObserveOptions::new().durability(Durability::Process);
        let observed = filter(&log).observe_with(long("key", n), &options).unwrap();
        assert!(observed.is_new());
    }
    log.close().unwrap();
    copy_files(&store, &copy, &|files| files.sort());
    let (one, two) = (open(&store), open(&copy));
    for n in 0..200 {
        for log in [&one, &two] {
            assert_eq!(
                filter(log).observe(long("key", n)).unwrap(),
                Observed::Duplicate
            );
        }
    }
    assert!(filter(&one).observe("late").unwrap().is_new());
    assert!(filter(&two).observe("late").unwrap().is_new());
}

/// Forks while a record is in memory only, has the child ask for it and do upkeep, and goes on.
#[expect(unsafe_code, reason = "there is no safe way to fork")]
fn fork_beside_an_unwritten_record(dir: &Path) {
    unsafe extern "C" {
        fn fork() -> i32;
        fn _exit(code: i32) -> !;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    }
    let log = settings().background(false).open(dir).unwrap();
    let seen = filter(&log);
    for n in 0..100 {
        assert!(seen.observe(long("before", n)).unwrap().is_new());
    }
    let buffered = ObserveOptions::new().durability(Durability::Buffered);
    assert!(seen.observe_with("unwritten", &buffered).unwrap().is_new());
    // SAFETY: the harness waits and holds no lock, and the store has no threads: the child can do
    // what any program can.
    let child = unsafe { fork() };
    assert!(child >= 0);
    if child == 0 {
        let closed = |error: Error| error.kind() == ErrorKind::Closed;
        let refused = [
            seen.get("unwritten").is_err_and(closed),
            seen.observe("unwritten").is_err_and(closed),
            seen.forget("unwritten").is_err_and(closed),
            log.sync().is_err_and(closed),
            log.filter("another", small()).is_err_and(closed),
            log.maintain().is_err_and(closed),
            log.wait_idle().is_err_and(closed),
        ];
        let code = refused.iter().position(|refused| !refused);
        // SAFETY: ends the child at once, without destructors.
        unsafe { _exit(code.map_or(0, |at| at as i32 + 1)) };
    }
    let mut status = 0;
    // SAFETY: `status` is valid for the write, and the child is ours and not waited for yet.
    assert_eq!(unsafe { waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "call {} of the child", status >> 8);
    let durable = ObserveOptions::new().durability(Durability::Power);
    assert!(seen.observe_with("after", &durable).unwrap().is_new());
    for n in 0..100 {
        assert!(seen.observe(long("after", n)).unwrap().is_new());
    }
    log.maintain().unwrap();
    say("fork went well");
    std::process::abort();
}

/// Story: a forked child that asked whether a key was remembered led a flush, and wrote what its
/// copy of the parent's memory held over what the parent had written since.
#[test]
fn a_forked_child_is_refused_and_writes_nothing() {
    let parent = tempfile::tempdir().unwrap();
    let store = parent.path().join("store");
    let exe = Command::new(std::env::current_exe().unwrap());
    let output = command(exe, "fork", "-", &store).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("fork went well"), "{said}");
    let log = open(&store);
    for key in ["unwritten", "after"] {
        assert_eq!(filter(&log).get(key).unwrap(), KeyState::Seen, "{key}");
    }
    for n in 0..100 {
        for name in ["before", "after"] {
            let state = filter(&log).get(long(name, n)).unwrap();
            assert_eq!(state, KeyState::Seen, "{name} {n}");
        }
    }
}
