//! A process that is stopped, or killed, where it holds something up.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use idemlog::testing::sim::Rng;
use idemlog::{
    Applied, DedupLog, Durability, ErrorKind, Filter, ObserveOptions, Observed, Options, Repeatable,
};
use rustix::process::{Pid, Signal, kill_process};

use super::{Worker, number, open, say, small};

const GATES: [&str; 5] = ["turn", "edit", "upkeep", "merge", "flush"];
const TURN: Duration = Duration::from_millis(150);
/// What a loaded machine may add.
const SLACK: Duration = Duration::from_secs(5);

fn options(level: Durability) -> Options {
    Options::new()
        .shared(true)
        .durability(level)
        .segment_bytes(16 * 1024)
}

fn long(name: &str, n: u64) -> String {
    format!("{name}-{n:0>600}")
}

/// Is at all the gates, again and again, and counts in a file what it has done.
pub fn work(dir: &Path) {
    let log = options(Durability::Power).background(false);
    let log = log.open(dir.join("store")).unwrap();
    let filter = log.filter("f", small()).unwrap();
    let done = AtomicU64::new(0);
    let progress = File::create(dir.join("progress")).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0.. {
                let key = long(&std::process::id().to_string(), n);
                assert!(filter.observe(key).unwrap().is_new());
                let done = done.fetch_add(1, Ordering::SeqCst) + 1;
                progress.write_all_at(&done.to_le_bytes(), 0).unwrap();
                if n == 20 {
                    say("ready");
                }
            }
        });
        scope.spawn(|| {
            loop {
                log.maintain().unwrap();
            }
        });
        scope.spawn(|| {
            for n in 0u64.. {
                let name = format!("n{}", n % 4);
                let _made = log.filter(&name, small()).unwrap();
                log.purge(&name, true).unwrap();
                thread::sleep(Duration::from_millis(1));
            }
        });
    });
}

/// Flushes for ever.
pub fn flush(dir: &Path) {
    let log = options(Durability::Power).background(false);
    let log = log.open(dir.join("store")).unwrap();
    let filter = log.filter("f", small()).unwrap();
    for n in 0.. {
        let key = long(&std::process::id().to_string(), n);
        assert!(filter.observe(key).unwrap().is_new());
        if n == 5 {
            say("ready");
        }
    }
}

/// Returns the bytes that this process has had read from a device.
fn device_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("read_bytes: "));
    line.map_or(0, |count| count.parse().unwrap())
}

/// Says how much reading one block around the cache counts, where that can be done.
fn probe(dir: &Path) -> u64 {
    let path = dir.join("probe");
    std::fs::write(&path, vec![7; 8192]).unwrap();
    File::open(&path).unwrap().sync_all().unwrap();
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    let before = device_bytes();
    let opened = File::options().read(true).custom_flags(direct).open(&path);
    let mut buffer = vec![0; 3 * 4096];
    let at = buffer.as_ptr().align_offset(4096);
    let read = opened.and_then(|file| file.read_at(&mut buffer[at..at + 4096], 0));
    if read.is_err() {
        return 0;
    }
    device_bytes() - before
}

/// Flushes when it is told to, and says how much it has read from the device for that.
pub fn look(dir: &Path, count: u64) {
    let log = options(Durability::Power).background(false);
    let log = log.open(dir.join("store")).unwrap();
    let filter = log.filter("f", small()).unwrap();
    say(&format!("probe {}", probe(dir)));
    say("ready");
    for n in 0..count {
        let mut go = String::new();
        std::io::stdin().read_line(&mut go).unwrap();
        // What others have appended is read here, through the cache.
        let quickly = ObserveOptions::new().durability(Durability::Process);
        assert!(
            filter
                .observe_with(format!("quick-{n}"), &quickly)
                .unwrap()
                .is_new()
        );
        let before = device_bytes();
        assert!(filter.observe(format!("look-{n}")).unwrap().is_new());
        say(&format!("read {}", device_bytes() - before));
        say("looked");
    }
    log.close().unwrap();
}

/// Stops a process, and waits until all its threads have stopped.
fn stop(worker: &Worker) {
    send(worker, Signal::STOP);
    let began = Instant::now();
    let tasks = format!("/proc/{}/task", worker.child.id());
    let is_stopped = |path: PathBuf| {
        let mut text = String::new();
        let read =
            File::open(path.join("stat")).and_then(|mut file| file.read_to_string(&mut text));
        // A thread may have ended.
        read.is_err()
            || text
                .rsplit(')')
                .next()
                .unwrap()
                .trim_start()
                .starts_with(['T', 't'])
    };
    loop {
        let mut threads = std::fs::read_dir(&tasks).unwrap();
        if threads.all(|thread| is_stopped(thread.unwrap().path())) {
            return;
        }
        assert!(began.elapsed() < SLACK * 2, "it does not stop");
        thread::sleep(Duration::from_micros(200));
    }
}

fn send(worker: &Worker, signal: Signal) {
    let pid = Pid::from_raw(worker.child.id() as i32).unwrap();
    kill_process(pid, signal).unwrap();
}

/// Which gates somebody holds; asked while the only other process is stopped.
fn held_gates(dir: &Path) -> Vec<&'static str> {
    let is_held = |gate: &&str| {
        let path = dir.join("store").join(format!("LOCK.{gate}"));
        let file = File::options().read(true).write(true).open(path).unwrap();
        file.try_lock_shared().is_err()
    };
    GATES.into_iter().filter(is_held).collect()
}

fn is_flushing(dir: &Path) -> bool {
    let cells = std::fs::read(dir.join("store/SHARED")).unwrap();
    u64::from_le_bytes(cells[200..208].try_into().unwrap()) == 1
}

/// Makes calls while somebody holds these gates. `Err` is `Locked`, in time.
struct Calls<'a> {
    held: &'a [&'static str],
    locked_count: usize,
    went_on_count: usize,
}

impl Calls<'_> {
    /// `needed`: without these the call ends with `Locked`; `wanted`: without these it may.
    fn make<T>(
        &mut self,
        name: &str,
        (needed, wanted): (&[&str], &[&str]),
        call: impl FnOnce() -> idemlog::Result<T>,
    ) -> idemlog::Result<T> {
        let what = format!("call={name:?} held={:?}", self.held);
        let began = Instant::now();
        let called = call();
        let took = began.elapsed();
        // Which of several gates it waits for, and whether for more than one, is up to the call.
        assert!(took < TURN * 3 + SLACK, "{what} took={took:?}");
        let is_any = |gates: &[&str]| gates.iter().any(|gate| self.held.contains(gate));
        match &called {
            Ok(_) => {
                assert!(!is_any(needed), "{what} went on");
                self.went_on_count += 1;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Locked, "{what} {error}");
                assert!(is_any(needed) || is_any(wanted), "{what} {error}");
                assert!(
                    took + Duration::from_millis(5) >= TURN,
                    "{what} took={took:?}"
                );
                self.locked_count += 1;
            }
        }
        called
    }
}

/// Stopped at each gate, a process makes those wait who need it, to the end of their time and no
/// longer, and nobody else. It goes on, or is killed, and so do all.
#[test]
fn a_process_that_is_stopped_at_any_gate_holds_up_no_more_than_that() {
    let seed = number("IDEMLOG_SEED", 5);
    println!("seed={seed}");
    let mut rng = Rng::new(seed);
    let dir = tempfile::tempdir().unwrap();
    let member = options(Durability::Process)
        .background(false)
        .turn_timeout(TURN);
    let member = member.open(dir.path().join("store")).unwrap();
    let filter = member.filter("f", small()).unwrap();
    let mut worker = Worker::start("work", 0, dir.path());
    worker.read_to("ready");
    let mut caught: BTreeMap<&str, u64> = BTreeMap::new();
    let (mut locked, mut went_on, mut rounds, mut kills) = (0, 0, 0, 0);
    let mut keys = Vec::new();
    let began = Instant::now();
    for n in 0.. {
        if GATES
            .iter()
            .all(|gate| caught.get(gate).is_some_and(|count| *count >= 2))
        {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(120), "{caught:?}");
        thread::sleep(Duration::from_micros(rng.below(4000) as u64));
        stop(&worker);
        let held = held_gates(dir.path());
        let is_rare = |gate: &&&str| caught.get(**gate).is_none_or(|count| *count < 2);
        if held.iter().filter(is_rare).count() == 0 {
            worker.signal("CONT");
            continue;
        }
        let mut calls = Calls {
            held: &held,
            locked_count: 0,
            went_on_count: 0,
        };
        let tried = try_all((&member, &filter), dir.path(), &mut calls, n);
        println!(
            "{n}: held={held:?} locked={} went_on={}",
            calls.locked_count, calls.went_on_count
        );
        (locked, went_on) = (locked + calls.locked_count, went_on + calls.went_on_count);
        for gate in &held {
            *caught.entry(gate).or_default() += 1;
        }
        let progress = dir.path().join("progress");
        let done =
            || u64::from_le_bytes(std::fs::read(&progress).unwrap()[..8].try_into().unwrap());
        rounds += 1;
        if rounds % 3 == 0 {
            drop(worker);
            kills += 1;
            let began = Instant::now();
            assert!(filter.observe(format!("killed-{n}")).unwrap().is_new());
            member.purge("f-none", true).or_else(unknown).unwrap();
            assert!(began.elapsed() < SLACK, "{:?}", began.elapsed());
            worker = Worker::start("work", 0, dir.path());
            worker.read_to("ready");
        } else {
            let before = done();
            worker.signal("CONT");
            let began = Instant::now();
            while done() < before + 3 {
                assert!(began.elapsed() < SLACK * 2, "it does not go on: {held:?}");
                thread::sleep(Duration::from_millis(1));
            }
        }
        for (key, applied) in tried {
            let is_new = match filter.observe(&key) {
                Ok(observed) => observed.is_new(),
                // The other one may have the upkeep for as long as it takes.
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Locked);
                    continue;
                }
            };
            assert_eq!(is_new, applied == Applied::No, "{key} {held:?}");
            keys.push(key);
        }
    }
    drop(worker);
    println!("caught={caught:?} locked={locked} went_on={went_on} kills={kills}");
    assert!(
        locked >= 20 && went_on >= 5 && kills >= 1,
        "{locked} {went_on} {kills}"
    );
    assert!(!keys.is_empty());
    for observed in filter.observe_many(&keys).unwrap() {
        assert_eq!(observed.unwrap(), Observed::Duplicate);
    }
    member.maintain().unwrap();
    member.close().unwrap();
}

/// Returns the keys that were observed, and whether they are in the log.
fn try_all(
    (member, filter): (&DedupLog, &Filter),
    dir: &Path,
    calls: &mut Calls<'_>,
    n: u64,
) -> Vec<(String, Applied)> {
    const UPKEEP: &[&str] = &["turn", "edit", "upkeep", "flush"];
    let mut tried = Vec::new();
    let names = (&["turn", "edit", "upkeep"][..], UPKEEP);
    calls
        .make("filter", names, || member.filter("f", small()))
        .ok();
    calls
        .make("purge", names, || {
            member.purge("f-none", true).or_else(unknown)
        })
        .ok();
    calls
        .make("maintain", (&[], UPKEEP), || member.maintain())
        .ok();
    calls
        .make("pending", (&["turn"], &[]), || member.pending())
        .ok();
    calls
        .make("sync", (&["turn"], &["flush"]), || member.sync())
        .ok();
    let levels = [Durability::Buffered, Durability::Process, Durability::Power];
    for (at, level) in levels.into_iter().enumerate() {
        let key = format!("stopped-{n}-{at}");
        let asked = ObserveOptions::new().durability(level);
        let needed: &[&str] = match level {
            Durability::Power => &["turn", "flush"],
            _ => &["turn"],
        };
        let called = calls.make("observe", (needed, UPKEEP), || {
            filter.observe_with(&key, &asked)
        });
        tried.push(match called {
            Ok(observed) => {
                assert!(observed.is_new());
                (key, Applied::Maybe)
            }
            Err(error) => (key, error.applied()),
        });
    }
    let opened = calls.make("open", (&["turn", "edit", "upkeep"], UPKEEP), || {
        // With threads of its own, which wait, too.
        let options = options(Durability::Process).turn_timeout(TURN);
        options.open(dir.join("store"))
    });
    if let Ok(opened) = opened {
        calls.make("close", (&[], UPKEEP), || opened.close()).ok();
    }
    tried
}

fn unknown(error: idemlog::Error) -> idemlog::Result<()> {
    if error.kind() == ErrorKind::Invalid {
        Ok(())
    } else {
        Err(error)
    }
}

/// Killed within its flush, a process leaves a mark: whoever flushes next compares what the device
/// holds with the log, and takes the mark away.
#[test]
fn who_flushes_behind_a_killed_process_looks_at_the_device() {
    let dir = tempfile::tempdir().unwrap();
    let mut look = Worker::start("look", 2, dir.path());
    let probe: u64 = told(&mut look, "probe ", "ready");
    let mut input = look.child.stdin.take().unwrap();
    let mut ask = |look: &mut Worker| -> u64 {
        std::io::Write::write_all(&mut input, b"go\n").unwrap();
        told(look, "read ", "looked")
    };
    let mut caught = false;
    for n in 0..2000 {
        let mut worker = Worker::start("flush", n, dir.path());
        worker.read_to("ready");
        for _ in 0..200 {
            thread::sleep(Duration::from_micros(n * 137 % 1500));
            stop(&worker);
            if is_flushing(dir.path()) {
                caught = true;
                break;
            }
            send(&worker, Signal::CONT);
        }
        drop(worker);
        if caught {
            break;
        }
    }
    assert!(caught && is_flushing(dir.path()));
    let read = ask(&mut look);
    assert!(!is_flushing(dir.path()));
    let again = ask(&mut look);
    println!("probe={probe} read={read} and_without_a_mark={again}");
    assert!(read >= probe, "{read}");
    if probe > 0 {
        assert!(again < probe, "{again}");
    }
    drop(look);
    let log = open(dir.path(), Durability::Process);
    let filter = log.filter("f", small()).unwrap();
    for n in 0..2 {
        for name in ["quick", "look"] {
            let observed = filter.observe(format!("{name}-{n}")).unwrap();
            assert_eq!(observed, Observed::Duplicate);
        }
    }
    assert!(log.namespace::<Repeatable>("j", small()).is_ok());
}

fn told(worker: &mut Worker, start: &str, last: &str) -> u64 {
    let lines = worker.read_to(last);
    let found = lines.iter().find_map(|line| line.strip_prefix(start));
    found
        .unwrap_or_else(|| panic!("{lines:?}"))
        .parse()
        .unwrap()
}
