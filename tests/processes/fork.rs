//! A child that is forked without `exec` has the memory and the descriptors of its parent: it uses
//! neither, and lets go of nothing.
#![expect(unsafe_code, reason = "there is no safe way to fork")]

use std::fs::File;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread;
use std::time::Duration;

use idemlog::testing::{Clock, Reading, SystemClock};
use idemlog::{
    Claim, ClaimOptions, ClaimVerdict, DedupLog, Durability, Error, ErrorKind, Filter, Namespace,
    ObserveOptions, Observed, Options, Repeatable,
};

use super::{Worker, open, say, small};

unsafe extern "C" {
    fn fork() -> i32;
    fn _exit(code: i32) -> !;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    fn alarm(seconds: u32) -> u32;
}

/// How often a busy parent forks: a lock of its memory that somebody holds at that moment is held
/// for ever in the child.
const FORKS: usize = 60;

fn options() -> Options {
    Options::new()
        .shared(true)
        .durability(Durability::Process)
        .segment_bytes(16 * 1024)
}

fn long(n: usize) -> String {
    format!("{n:0>300}")
}

/// Runs in a child that is killed if it hangs; returns its wait status.
fn in_child(run: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child calls the store and nothing else that another thread may be in the middle
    // of; memory is allocated through glibc, whose locks a fork takes along.
    let child = unsafe { fork() };
    assert!(child >= 0);
    if child == 0 {
        // SAFETY: sets a timer of the child, whose signal ends it.
        unsafe { alarm(10) };
        let code = std::panic::catch_unwind(AssertUnwindSafe(run)).unwrap_or(99);
        // SAFETY: ends the child at once, without destructors.
        unsafe { _exit(code) };
    }
    let mut status = 0;
    // SAFETY: `status` is valid for the write, and the child is ours and not waited for yet.
    assert_eq!(unsafe { waitpid(child, &raw mut status, 0) }, child);
    status
}

fn is_locked(dir: &Path, name: &str) -> bool {
    let path = dir.join("store").join(name);
    File::open(path).unwrap().try_lock().is_err()
}

fn is_closed(error: Error) -> bool {
    error.kind() == ErrorKind::Closed
}

/// Says whether all calls of a child are refused.
fn refuses(
    log: &DedupLog,
    filter: &Filter,
    jobs: &Namespace<Repeatable>,
    held: &Claim<Repeatable>,
    at: &dyn Fn(&str),
) -> bool {
    let second = Duration::from_secs(1);
    let calls: [(&str, &dyn Fn() -> bool); 15] = [
        ("maintain", &|| log.maintain().is_err_and(is_closed)),
        ("get", &|| filter.get("k").is_err_and(is_closed)),
        ("observe", &|| filter.observe("k").is_err_and(is_closed)),
        ("observe many", &|| {
            filter.observe_many(&["k"]).is_err_and(is_closed)
        }),
        ("forget", &|| filter.forget("k").is_err_and(is_closed)),
        ("claim", &|| jobs.claim("k").is_err_and(is_closed)),
        ("claim many", &|| {
            jobs.claim_many(&["k"], &ClaimOptions::new())
                .is_err_and(is_closed)
        }),
        ("renew", &|| held.renew(second).is_err_and(is_closed)),
        ("sync", &|| log.sync().is_err_and(is_closed)),
        ("pending", &|| log.pending().is_err_and(is_closed)),
        ("filter", &|| log.filter("x", small()).is_err_and(is_closed)),
        ("purge", &|| log.purge("f", true).is_err_and(is_closed)),
        ("confirm time", &|| log.confirm_time().is_err_and(is_closed)),
        ("close", &|| log.clone().close().is_err_and(is_closed)),
        ("close again", &|| log.clone().close().is_err_and(is_closed)),
    ];
    calls.into_iter().all(|(what, call)| {
        at(what);
        call()
    })
}

/// Forks beside busy threads; each child calls, closes and drops what it has inherited: of a shared
/// store, and of one that its parent has for itself.
pub fn fork_and_go_on(dir: &Path) {
    let log = options().open(dir.join("store")).unwrap();
    let filter = log.filter("f", small()).unwrap();
    let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
    let lease = ClaimOptions::new().lease(Duration::from_secs(3600));
    let ClaimVerdict::New(held) = jobs.claim_with("held", &lease).unwrap() else {
        panic!("the key is new");
    };
    // Others of this process, for the children to drop as a whole.
    let open_more = |options: Options, store: &str| {
        let more = options.open(dir.join(store)).unwrap();
        let claims = more.namespace::<Repeatable>("j", small()).unwrap();
        let key = format!("held-{}", more.pending().unwrap().len());
        let claim = claims.claim_with(key, &lease).unwrap().claim().unwrap();
        (more, claims, claim)
    };
    let mut more = vec![
        open_more(options(), "store"),
        open_more(options().shared(false), "alone"),
        // Without threads, which keep what they work on: of this one nothing is left in a child.
        open_more(options().background(false), "store"),
    ];
    let filters = [&log, &more[0].0, &more[1].0].map(|log| log.filter("f", small()).unwrap());
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for (thread, filter) in filters.iter().enumerate() {
            let (stop, log) = (&stop, &log);
            scope.spawn(move || {
                let power = ObserveOptions::new().durability(Durability::Power);
                for n in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let key = long(n * 3 + thread);
                    assert!(filter.observe_with(key, &power).unwrap().is_new());
                    if n % 10 == 0 {
                        log.maintain().unwrap();
                    }
                }
            });
        }
        for n in 0..FORKS {
            let status = in_child(|| {
                // What it is at is left behind for whoever finds it hanging.
                let at = |what: &str| std::fs::write(dir.join("at"), what).unwrap();
                let (_, jobs_alone, held_alone) = &more[1];
                let shared = refuses(&log, &filters[0], &jobs, &held, &at);
                let alone = refuses(&more[1].0, &filters[2], jobs_alone, held_alone, &at);
                if !(shared && alone) {
                    return 97;
                }
                for (log, claims, claim) in more.drain(..) {
                    at("drop");
                    drop((claim, claims));
                    at("close another");
                    if !log.close().is_err_and(is_closed) {
                        return 98;
                    }
                }
                0
            });
            if status != 0 {
                stop.store(true, Ordering::Relaxed);
            }
            let at = std::fs::read_to_string(dir.join("at")).unwrap();
            assert_eq!(
                status,
                0,
                "fork {n}: {at} signal={} code={}",
                status & 0x7f,
                status >> 8
            );
            thread::sleep(Duration::from_micros(n as u64 * 331 % 3000));
        }
        stop.store(true, Ordering::Relaxed);
    });
    for claim in more.iter().map(|(_, _, claim)| claim).chain([&held]) {
        assert!(claim.renew(Duration::from_secs(3600)).is_ok());
    }
    assert!(filter.observe("parent").unwrap().is_new());
    assert!(!filters[1].observe("parent").unwrap().is_new());
    assert!(filters[2].observe("parent").unwrap().is_new());
    assert!(is_locked(dir, "../alone/LOCK"));
    say("forked");
    let mut go = String::new();
    std::io::stdin().read_line(&mut go).unwrap();
    assert!(!filter.observe("other").unwrap().is_new());
    assert!(held.renew(Duration::from_secs(3600)).is_ok());
    say("went on");
    std::io::stdin().read_line(&mut go).unwrap();
}

#[test]
fn a_forked_child_is_refused_and_lets_go_of_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut worker = Worker::start("fork", 0, dir.path());
    let lines = worker.read_to("forked");
    assert!(worker.child.try_wait().unwrap().is_none(), "{lines:?}");
    // Its parent is a member, and alive.
    let alone = Options::new().open(dir.path().join("store"));
    assert_eq!(alone.unwrap_err().kind(), ErrorKind::Locked);
    let log = open(dir.path(), Durability::Process);
    let filter = log.filter("f", small()).unwrap();
    let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
    for key in ["held", "held-1", "held-2"] {
        let verdict = jobs.claim(key).unwrap();
        assert!(
            matches!(verdict, ClaimVerdict::Busy { .. }),
            "{key} {verdict:?}"
        );
    }
    assert_eq!(filter.observe("parent").unwrap(), Observed::Duplicate);
    assert!(filter.observe("other").unwrap().is_new());
    let mut input = worker.child.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, b"go\n").unwrap();
    let lines = worker.read_to("went on");
    assert!(worker.child.try_wait().unwrap().is_none(), "{lines:?}");
    drop(worker);
    for key in ["held", "held-1", "held-2"] {
        let verdict = jobs.claim(key).unwrap();
        assert!(
            matches!(verdict, ClaimVerdict::Takeover { .. }),
            "{key} {verdict:?}"
        );
    }
    log.close().unwrap();
    let log = Options::new().open(dir.path().join("store")).unwrap();
    assert!(log.open_report().clean);
}

/// Forks once, when it is read with the turn held.
#[derive(Debug)]
struct Forking {
    turn: PathBuf,
    is_armed: AtomicBool,
    status: AtomicI32,
}

/// Ends the child's call.
struct InChild;

impl Clock for Forking {
    fn read(&self) -> Reading {
        let is_held = || File::open(&self.turn).unwrap().try_lock().is_err();
        if self.is_armed.load(Ordering::SeqCst) && is_held() {
            self.is_armed.store(false, Ordering::SeqCst);
            // SAFETY: this process has no other thread that is at anything.
            let child = unsafe { fork() };
            assert!(child >= 0);
            if child == 0 {
                std::panic::resume_unwind(Box::new(InChild));
            }
            let mut status = 0;
            // SAFETY: `status` is valid for the write, and the child is ours.
            assert_eq!(unsafe { waitpid(child, &raw mut status, 0) }, child);
            self.status.store(status, Ordering::SeqCst);
        }
        SystemClock.read()
    }

    fn boot_id(&self) -> [u8; 16] {
        SystemClock.boot_id()
    }
}

/// Forks in the middle of its turn. The child leaves the call, and with it the turn.
pub fn fork_in_turn(dir: &Path) {
    let clock = Arc::new(Forking {
        turn: dir.join("store/LOCK.turn"),
        is_armed: AtomicBool::new(false),
        status: AtomicI32::new(-1),
    });
    let log = options().background(false).clock(Arc::clone(&clock) as _);
    let log = log.open(dir.join("store")).unwrap();
    let filter = log.filter("f", small()).unwrap();
    clock.is_armed.store(true, Ordering::SeqCst);
    let observed = std::panic::catch_unwind(AssertUnwindSafe(|| filter.observe("k").unwrap()));
    let Ok(observed) = observed else {
        // The child, while its parent has the turn.
        let kept = is_locked(dir, "LOCK.turn") && is_locked(dir, "LOCK");
        // SAFETY: ends the child at once, without destructors.
        unsafe { _exit(if kept { 0 } else { 7 }) };
    };
    assert!(observed.is_new());
    let status = clock.status.load(Ordering::SeqCst);
    assert_eq!(status, 0, "signal={} code={}", status & 0x7f, status >> 8);
    assert!(!is_locked(dir, "LOCK.turn"));
    assert!(!filter.observe("k").unwrap().is_new());
    log.close().unwrap();
    say("done");
}

/// Also a child that was in the middle of a turn at the fork leaves it to its parent.
#[test]
fn a_child_that_is_forked_in_a_turn_does_not_end_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut worker = Worker::start("turn", 0, dir.path());
    let lines = worker.read_to("done");
    assert!(worker.child.wait().unwrap().success(), "{lines:?}");
}

/// Holds a claim, and has a child that does nothing.
pub fn be_outlived(dir: &Path) {
    let log = options().open(dir.join("store")).unwrap();
    let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
    let lease = ClaimOptions::new().lease(Duration::from_secs(3600));
    let _held = jobs.claim_with("held", &lease).unwrap();
    // SAFETY: the child sleeps, and ends without destructors.
    let child = unsafe { fork() };
    assert!(child >= 0);
    if child == 0 {
        // SAFETY: sets a timer of the child, whose signal ends it.
        unsafe { alarm(60) };
        loop {
            thread::park();
        }
    }
    say(&format!("child {child}"));
    say("ready");
    loop {
        thread::park();
    }
}

/// As documented: such a child keeps its parent's locks for as long as it lives.
#[test]
fn a_child_that_outlives_its_parent_keeps_it_alive() {
    let dir = tempfile::tempdir().unwrap();
    let mut worker = Worker::start("outlived", 0, dir.path());
    let lines = worker.read_to("ready");
    let child = lines.iter().find_map(|line| line.strip_prefix("child "));
    let child: i32 = child.unwrap().parse().unwrap();
    drop(worker);
    let log = open(dir.path(), Durability::Process);
    let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
    assert!(matches!(
        jobs.claim("held").unwrap(),
        ClaimVerdict::Busy { .. }
    ));
    let child = rustix::process::Pid::from_raw(child).unwrap();
    rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
    let ended = jobs.claim_wait("held", Duration::from_secs(20)).unwrap();
    assert!(matches!(ended, ClaimVerdict::Takeover { .. }), "{ended:?}");
}
