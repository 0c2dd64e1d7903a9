//! Whoever joins while another one rolls, seals, merges or drops finds all of it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use idemlog::testing::sim::SimDisk;
use idemlog::{DedupLog, Filter, KeyState, Options, Repeatable};

use super::{Member, clock, key, options, small};
use crate::support::rigged::{Rigged, rigged};

/// How long a join gets to come as far as it can.
const SOON: Duration = Duration::from_millis(2);

const KEYS: usize = 340;

/// A store with some runs, and more to seal and to merge.
fn prepare(log: &DedupLog, filter: &Filter) {
    for n in 0..KEYS {
        assert!(filter.observe(key("k", n)).unwrap().is_new());
    }
    let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
    let _ran = jobs.run_once("job", |_| Ok(b"out".to_vec())).unwrap();
}

fn upkeep(log: &DedupLog, filter: &Filter) -> idemlog::Result<()> {
    for n in KEYS..KEYS + 100 {
        let _new = filter.observe(key("k", n))?;
    }
    log.maintain()
}

/// What happens at one step of the upkeep.
struct Stage {
    /// Counts down to the step at which it happens.
    left: AtomicUsize,
    is_armed: AtomicBool,
    act: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

#[test]
fn a_join_beside_each_step_of_the_upkeep_finds_everything() {
    let (mut joined, mut waited, mut merges) = (0, 0, 0);
    for kills in [false, true] {
        for step in 0.. {
            let (disk, clock) = (SimDisk::seeded(9), clock());
            let stage = Arc::new(Stage {
                left: AtomicUsize::new(step),
                is_armed: AtomicBool::new(false),
                act: Mutex::new(None),
            });
            let process = disk.process();
            let at = Arc::clone(&stage);
            let dir = rigged(process.dir(), move |_, _| {
                if at.is_armed.load(Ordering::SeqCst)
                    && at.left.fetch_sub(1, Ordering::SeqCst) == 0
                    && let Some(act) = at.act.lock().unwrap().take()
                {
                    act();
                }
                Ok(())
            });
            let log = options(&clock).open_on(dir).unwrap();
            let filter = log.filter("f", small()).unwrap();
            prepare(&log, &filter);
            let (told, opened) = mpsc::channel();
            let (disk_of_join, clock_of_join) = (disk.clone(), Arc::clone(&clock));
            let dies = kills.then(|| process.clone());
            let was_waiting = Arc::new(AtomicBool::new(false));
            let waiting = Arc::clone(&was_waiting);
            *stage.act.lock().unwrap() = Some(Box::new(move || {
                let (began, begun) = mpsc::channel();
                thread::spawn(move || {
                    began.send(()).unwrap();
                    let member = Member::open(&disk_of_join, &clock_of_join);
                    told.send(member).unwrap();
                });
                begun.recv().unwrap();
                thread::sleep(SOON);
                waiting.store(true, Ordering::SeqCst);
                if let Some(dies) = dies {
                    dies.kill();
                }
            }));
            stage.is_armed.store(true, Ordering::SeqCst);
            let done = upkeep(&log, &filter);
            stage.is_armed.store(false, Ordering::SeqCst);
            if stage.act.lock().unwrap().take().is_some() {
                // That was the last step.
                done.unwrap();
                merges += log.stats().merges_count;
                assert!(step > 60, "{step}");
                break;
            }
            assert_eq!(done.is_err(), kills, "{step} {done:?}");
            let member = opened.recv_timeout(Duration::from_secs(20));
            let member = member.unwrap_or_else(|_| panic!("no join: step={step} kills={kills}"));
            joined += 1;
            waited += usize::from(was_waiting.load(Ordering::SeqCst));
            check(&member, &format!("step={step} kills={kills}"), kills);
            if !kills {
                assert!(!filter.observe("late").unwrap().is_new(), "{step}");
            }
        }
    }
    println!("joins={joined} beside_a_step={waited} merges={merges}");
    assert!(joined > 120 && merges > 0, "{joined} {merges}");
}

fn check(member: &Member, what: &str, kills: bool) {
    let keys: Vec<String> = (0..KEYS + 100).map(|n| key("k", n)).collect();
    let seen = member.filter.observe_many(&keys).unwrap();
    for (n, observed) in seen.into_iter().enumerate() {
        // Behind a kill, what was not answered may be either.
        let is_new = observed.unwrap().is_new();
        assert!(!is_new || (kills && n >= KEYS), "{what} {n}");
    }
    let jobs = member.claims::<Repeatable>("j");
    let ran = jobs.run_once("job", |_| Ok(b"again".to_vec())).unwrap();
    assert!(matches!(ran, idemlog::RunVerdict::Replayed(_)), "{what}");
    assert!(member.filter.observe("late").unwrap().is_new(), "{what}");
    member.log.maintain().unwrap();
}

/// Whole segments are read by whoever joins while the others go on: each such read finds a key of
/// theirs appended in the middle of it.
#[test]
fn who_reads_whole_segments_to_join_holds_nobody_up() {
    let (disk, options) = (SimDisk::new(), waiting());
    let log = options.clone().open_on(disk.process().dir()).unwrap();
    let filter = log.filter("f", small()).unwrap();
    for n in 0..KEYS * 3 {
        assert!(filter.observe(key("k", n)).unwrap().is_new());
        if n % 50 == 0 {
            log.maintain().unwrap();
        }
    }
    let reads = Arc::new(AtomicUsize::new(0));
    let dir = {
        let (filter, reads) = (filter.clone(), Arc::clone(&reads));
        Rigged::new(disk.process().dir(), |_, _| Ok(())).on_read(move |name, bytes| {
            if name.starts_with("seg-") && bytes >= 4096 {
                let n = reads.fetch_add(1, Ordering::SeqCst);
                assert!(filter.observe(key("between", n)).unwrap().is_new());
            }
        })
    };
    let other = options.open_on(dir.dir()).unwrap();
    let others = other.filter("f", small()).unwrap();
    let reads = reads.load(Ordering::SeqCst);
    assert!(
        reads > 0 && log.stats().segments_count > 5,
        "{:?}",
        log.stats()
    );
    let keys = (0..KEYS * 3).map(|n| key("k", n));
    for key in keys.chain((0..reads).map(|n| key("between", n))) {
        assert_eq!(others.get(&key).unwrap(), KeyState::Seen, "{key}");
    }
    assert!(others.observe("own").unwrap().is_new());
    assert!(!filter.observe("own").unwrap().is_new());
}

/// By real time, so that a wait ends.
fn waiting() -> Options {
    let options = options(&clock()).turn_timeout(Duration::from_millis(300));
    options.clock(Arc::new(idemlog::testing::SystemClock))
}

/// Without the turn nothing can be read where the one who told died in it: with the turn, then.
#[test]
fn a_join_behind_one_who_died_telling_takes_the_turn() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    for n in 0..KEYS {
        assert!(a.filter.observe(key("k", n)).unwrap().is_new());
    }
    // Half of the cell that says where the log ends.
    let mut torn = disk.read_file("SHARED").unwrap();
    torn[70] ^= 1;
    disk.write_file("SHARED", torn);
    let b = Member::open(&disk, &clock);
    for n in 0..KEYS {
        assert!(!b.filter.observe(key("k", n)).unwrap().is_new(), "{n}");
    }
    assert!(b.filter.observe("own").unwrap().is_new());
    assert!(!a.filter.observe("own").unwrap().is_new());
}
