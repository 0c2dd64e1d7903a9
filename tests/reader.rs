//! Readers beside processes that share a store, and where nobody has it open: they find all that
//! was answered, nothing that may be taken back, and change nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idemlog::testing::sim::{Fault, FaultKind, Op, Rng, SimDisk, SimProcess, SyncFailure};
use idemlog::testing::{
    Access, Clock, Dir, File, LockAttempt, LockFile, ManualClock, Map, Moved, Reading,
};
use idemlog::{
    ClaimVerdict, Commit, DedupLog, Durability, ErrorKind, Filter, IntakeOptions, JobStatus,
    KeyState, Namespace, NamespaceOptions, ObserveOptions, Observed, OpenMode, Options, Repeatable,
    Retention, RunVerdict,
};

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(1_700_000_000_000))
}

fn options(clock: &Arc<ManualClock>) -> Options {
    Options::new()
        .shared(true)
        .segment_bytes(16 * 1024)
        .background(false)
        .durability(Durability::Process)
        .clock(Arc::<ManualClock>::clone(clock))
}

/// About eighty fill a segment.
fn key(name: &str, n: impl std::fmt::Display) -> String {
    format!("{name}{n}{:->150}", "")
}

fn small() -> NamespaceOptions {
    NamespaceOptions::new().outcome_bytes_max(64)
}

/// One opener, in a process of its own.
struct Member {
    process: SimProcess,
    log: DedupLog,
    filter: Filter,
    claims: Namespace<Repeatable>,
}

impl Member {
    fn open(disk: &SimDisk, clock: &Arc<ManualClock>) -> Member {
        let process = disk.process();
        let log = options(clock).open_on(process.dir()).unwrap();
        Member::of(process, log)
    }

    /// Opens for reading only; both namespaces are there.
    fn reader(disk: &SimDisk, clock: &Arc<ManualClock>) -> Member {
        let before = disk.steps();
        let process = disk.process();
        // What it tells is flushed by nobody, whatever its level.
        let options = options(clock).durability(Durability::Power);
        let log = options.open_read_only_on(process.dir()).unwrap();
        let reader = Member::of(process, log);
        assert_eq!(disk.steps(), before, "a reader changes nothing");
        reader
    }

    fn of(process: SimProcess, log: DedupLog) -> Member {
        let filter = log.filter("f", small()).unwrap();
        let claims = log.namespace("c", small()).unwrap();
        Member {
            process,
            log,
            filter,
            claims,
        }
    }

    fn kill(self) {
        self.process.kill();
        drop(self);
    }

    /// Says what is known of keys and of jobs.
    fn knows(&self, key: &str) -> bool {
        if key.starts_with("job") {
            return matches!(self.claims.get(key).unwrap(), KeyState::Done(_));
        }
        match self.filter.get(key).unwrap() {
            KeyState::Seen => true,
            KeyState::Absent => false,
            other => panic!("{key} {other:?}"),
        }
    }
}

fn never(reader: &Member) {
    for n in 0..20 {
        assert!(!reader.knows(&key("never", n)), "{n}");
        assert!(!reader.knows(&format!("job-never-{n}")), "{n}");
    }
}

#[test]
fn a_reader_knows_at_once_what_two_writers_were_answered() {
    let (disk, clock) = (SimDisk::new(), clock());
    let (a, b) = (Member::open(&disk, &clock), Member::open(&disk, &clock));
    let reader = Member::reader(&disk, &clock);
    let mut sleeper = Member::reader(&disk, &clock);
    let mut all = Vec::new();
    for n in 0..800 {
        let one = if n % 3 == 0 { &a } else { &b };
        let key = if n % 10 == 0 {
            let key = format!("job{n}");
            let ran = one.claims.run_once(&key, |_| Ok(vec![7; 40])).unwrap();
            assert!(matches!(ran, RunVerdict::Ran { .. }));
            key
        } else {
            let key = key("k", n);
            assert_eq!(one.filter.observe(&key).unwrap(), Observed::New);
            key
        };
        let before = disk.steps();
        assert!(reader.knows(&key), "{key}");
        all.push(key);
        if n % 100 == 99 {
            one.log.maintain().unwrap();
            let before = disk.steps();
            let fresh = Member::reader(&disk, &clock);
            for one in [&reader, &fresh, &sleeper] {
                assert!(all.iter().all(|key| one.knows(key)), "{n}");
                never(one);
            }
            sleeper = fresh;
            assert_eq!(disk.steps(), before);
        } else {
            assert_eq!(disk.steps(), before);
        }
    }
    for n in 0..100 {
        assert!(a.filter.observe(key("more", n)).unwrap().is_new());
    }
    a.log.maintain().unwrap();
    assert!(reader.log.stats().segments_count > 5);
    assert_eq!(
        reader.log.stats().segments_count,
        a.log.stats().segments_count
    );
    // What is declared is known, too.
    let other = a.log.filter("other", small()).unwrap();
    assert!(other.observe("x").unwrap().is_new());
    let seen = reader.log.filter("other", small()).unwrap();
    assert_eq!(seen.get("x").unwrap(), KeyState::Seen);
    a.log.purge("other", true).unwrap();
    assert!(seen.get("x").is_err());
    // The last one closes cleanly, whoever reads; and then an opener that is alone is kept out.
    let last = all.last().unwrap();
    a.log.clone().close().unwrap();
    assert!(b.filter.observe("one more").unwrap().is_new());
    b.log.clone().close().unwrap();
    drop((a, b));
    for one in [&reader, &sleeper] {
        assert!(one.knows("one more") && one.knows(last));
        never(one);
    }
    let alone = || options(&clock).shared(false).open_on(disk.dir());
    let error = alone().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked);
    assert!(error.to_string().contains("only read it"), "{error}");
    // Who shares it is not.
    let c = Member::open(&disk, &clock);
    assert!(c.log.open_report().clean);
    assert!(c.filter.observe("later").unwrap().is_new());
    assert!(reader.knows("later") && sleeper.knows("later"));
    c.log.clone().close().unwrap();
    drop((c, reader, sleeper, seen));
    assert!(alone().unwrap().open_report().clean);
}

/// What one process does while it dies at any of its steps.
fn work(log: &DedupLog, seen: &mut Vec<String>) -> idemlog::Result<()> {
    let filter = log.filter("f", small())?;
    let claims = log.namespace::<Repeatable>("c", small())?;
    for n in 0..200 {
        let key = key("k", n);
        if filter.observe(&key)? == Observed::New {
            seen.push(key);
        }
        if n % 20 == 0 {
            let key = format!("job{n}");
            if let RunVerdict::Ran { .. } = claims.run_once(&key, |_| Ok(vec![7; 40]))? {
                seen.push(key);
            }
        }
    }
    log.maintain()?;
    log.confirm_time()?;
    log.clone().close()
}

fn worked() -> Vec<String> {
    let keys = (0..200).map(|n| key("k", n));
    keys.chain((0..200).step_by(20).map(|n| format!("job{n}")))
        .collect()
}

/// Asks readers, and then a writer: what was answered is there, and what a reader has found stays.
fn judge(readers: &[&Member], seen: &[String], writer: impl FnOnce() -> Member, what: &str) {
    let mut found = BTreeSet::new();
    for reader in readers {
        for key in seen {
            assert!(reader.knows(key), "{what} {key}");
        }
        never(reader);
        found.extend(worked().into_iter().filter(|key| reader.knows(key)));
    }
    let writer = writer();
    for key in &found {
        assert!(writer.knows(key), "{what} {key}");
    }
    assert!(
        writer
            .filter
            .observe(format!("{what} more"))
            .unwrap()
            .is_new()
    );
    for reader in readers {
        assert!(reader.knows(&format!("{what} more")), "{what}");
        assert!(found.iter().all(|key| reader.knows(key)), "{what}");
        for key in worked() {
            assert_eq!(reader.knows(&key), writer.knows(&key), "{what} {key}");
        }
    }
    writer.kill();
}

/// Killed before each step, and inside each write, with another writer there or none.
#[test]
fn a_writer_dies_at_each_step_and_readers_tell_what_was_answered() {
    let steps = {
        let (disk, clock) = (SimDisk::seeded(1), clock());
        let b = Member::open(&disk, &clock);
        let before = disk.steps();
        let a = options(&clock).open_on(disk.process().dir()).unwrap();
        work(&a, &mut Vec::new()).unwrap();
        drop(b);
        disk.steps() - before
    };
    assert!(steps > 200, "{steps}");
    for step in 0..steps {
        for (kept_bytes, is_last) in [(0, true), (9, false), (21, true), (64, false), (90, true)] {
            let what = format!("step={step} kept={kept_bytes} last={is_last}");
            let (disk, clock) = (SimDisk::seeded(1), clock());
            let b = Member::open(&disk, &clock);
            assert_eq!(b.filter.observe("b").unwrap(), Observed::New);
            let reader = Member::reader(&disk, &clock);
            let a = disk.process();
            a.kill_at(disk.steps() + step, kept_bytes);
            let mut seen = Vec::new();
            let opened = options(&clock).open_on(a.dir());
            let worked = opened.and_then(|log| work(&log, &mut seen));
            assert!(a.is_dead() || worked.is_ok(), "{what} {worked:?}");
            if is_last {
                b.kill();
                let fresh = Member::reader(&disk, &clock);
                // The first one to come recovers beside them.
                let writer = || Member::open(&disk, &clock);
                judge(&[&reader, &fresh], &seen, writer, &what);
            } else {
                // What was torn while it was told is told by whoever has the next turn.
                assert!(!b.log.namespaces().is_empty());
                let fresh = Member::reader(&disk, &clock);
                judge(&[&reader, &fresh], &seen, || b, &what);
            }
        }
    }
}

/// A clock that goes on with each look at it, so that every wait of one thread has an end.
#[derive(Debug)]
struct Ticking(Arc<ManualClock>);

impl Clock for Ticking {
    fn read(&self) -> Reading {
        self.0.advance_ms(1);
        self.0.read()
    }

    fn boot_id(&self) -> [u8; 16] {
        self.0.boot_id()
    }

    fn tell_moves(&self, moved: Moved) -> bool {
        drop(moved);
        true
    }
}

type Hook = Arc<dyn Fn(&str) + Send + Sync>;

/// A directory in which somebody looks around before each change and behind it.
#[derive(Clone)]
struct Watched {
    dir: Arc<dyn Dir>,
    hook: Hook,
    /// Also before each opening of a file that is there, and each listing.
    reads: bool,
}

impl Watched {
    fn of(
        process: &SimProcess,
        reads: bool,
        hook: impl Fn(&str) + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Watched {
            dir: process.dir(),
            hook: Arc::new(hook),
            reads,
        })
    }
}

impl std::fmt::Debug for Watched {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.dir.fmt(f)
    }
}

impl Watched {
    fn around<T>(&self, what: &str, act: impl FnOnce() -> T) -> T {
        (self.hook)(&format!("before {what}"));
        let done = act();
        (self.hook)(&format!("behind {what}"));
        done
    }
}

impl Dir for Watched {
    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn File>> {
        let open = || self.dir.open(name, access);
        let file = if access == Access::Create {
            self.around(&format!("create {name}"), open)?
        } else {
            if self.reads {
                assert_eq!(access, Access::Read, "{name}");
                (self.hook)(name);
            }
            open()?
        };
        Ok(Arc::new(WatchedFile {
            file,
            name: name.to_owned(),
            dir: self.clone(),
        }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.around(&format!("rename {from}"), || self.dir.rename(from, to))
    }

    fn unlink(&self, name: &str) -> io::Result<()> {
        self.around(&format!("unlink {name}"), || self.dir.unlink(name))
    }

    fn sync(&self) -> io::Result<()> {
        self.dir.sync()
    }

    fn list(&self) -> io::Result<Vec<String>> {
        if self.reads {
            (self.hook)("list");
        }
        self.dir.list()
    }

    fn lock(&self, name: &str, create: bool, note: &str) -> io::Result<LockAttempt> {
        self.around(&format!("lock {name}"), || {
            self.dir.lock(name, create, note)
        })
    }

    fn lock_file(&self, name: &str, access: Access) -> io::Result<Arc<dyn LockFile>> {
        self.dir.lock_file(name, access)
    }
}

struct WatchedFile {
    file: Arc<dyn File>,
    name: String,
    dir: Watched,
}

impl std::fmt::Debug for WatchedFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.file.fmt(f)
    }
}

impl File for WatchedFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        let write = || self.file.write_at(buf, offset);
        self.dir
            .around(&format!("write {} at {offset}", self.name), write)
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        let resize = || self.file.set_len(bytes);
        self.dir
            .around(&format!("resize {} {bytes}", self.name), resize)
    }

    fn allocated(&self) -> io::Result<u64> {
        self.file.allocated()
    }

    fn free_space(&self) -> io::Result<u64> {
        self.file.free_space()
    }

    fn allocate(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.file.allocate(offset, bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }

    fn holds(&self, bytes: &[u8], offset: u64) -> io::Result<Option<bool>> {
        self.file.holds(bytes, offset)
    }

    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    fn map(&self) -> io::Result<Map> {
        self.file.map()
    }
}

/// What was answered, as readers see it in the middle of everything.
#[derive(Default)]
struct Watch {
    /// Whether it must be there: of a key that expires or is being asked about, nothing is known.
    keys: Mutex<BTreeMap<String, bool>>,
    reader: Mutex<Option<Member>>,
    /// The store is being opened by the first one, or closed by the last one.
    may_wait: AtomicBool,
    looks: AtomicU64,
    locked: AtomicU64,
}

impl Watch {
    fn look(&self, disk: &SimDisk, clock: &Arc<ManualClock>, at: &str) {
        let looks = self.looks.fetch_add(1, Ordering::SeqCst);
        let held = self.reader.lock().unwrap();
        let keys = self.keys.lock().unwrap();
        let before = disk.steps();
        let asked = keys.iter().rev().step_by(1 + (looks % 7) as usize).take(12);
        let asked: Vec<_> = asked.chain(keys.iter().take(4)).collect();
        let fresh = looks.is_multiple_of(5).then(|| {
            let ticking = Arc::new(Ticking(Arc::clone(clock)));
            let options = options(clock).clock(ticking);
            let options = options.lock_timeout(Duration::from_millis(20));
            options.open_read_only_on(disk.process().dir())
        });
        let mut filters: Vec<_> = held.iter().map(|reader| reader.filter.clone()).collect();
        match fresh {
            Some(Ok(log)) => filters.push(log.filter("f", small()).unwrap()),
            Some(Err(error)) => self.refused(&error, at),
            None => {}
        }
        for filter in &filters {
            for (key, must) in &asked {
                match filter.get(key) {
                    Ok(KeyState::Seen) => {}
                    Ok(state) => assert!(!**must, "{at} {key} {state:?}"),
                    Err(error) => self.refused(&error, at),
                }
            }
            match filter.get(key("never", looks % 50)) {
                Ok(state) => assert_eq!(state, KeyState::Absent, "{at}"),
                Err(error) => self.refused(&error, at),
            }
        }
        assert_eq!(disk.steps(), before, "{at}");
    }

    /// Only while one is alone who comes or goes a reader may have to wait.
    fn refused(&self, error: &idemlog::Error, at: &str) {
        assert_eq!(error.kind(), ErrorKind::Locked, "{at} {error:?}");
        assert!(self.may_wait.load(Ordering::SeqCst), "{at} {error:?}");
        self.locked.fetch_add(1, Ordering::SeqCst);
    }
}

/// Readers look before each write, rename, removal and creation of the writers, and behind it,
/// while these roll, seal, merge, drop, carry over, die, close and recover the store.
#[test]
fn readers_look_in_the_middle_of_everything() {
    let seed = std::env::var("IDEMLOG_SEED").map_or(5, |seed| seed.parse().unwrap());
    let rounds = std::env::var("IDEMLOG_CASES").map_or(2, |count| count.parse().unwrap());
    let (mut drops, mut merges, mut carried, mut waited) = (0, 0, 0, 0);
    for round in 0..rounds {
        println!("reader: IDEMLOG_SEED={seed} round={round}");
        let mut rng = Rng::new(seed + round * 1000);
        let (disk, clock) = (SimDisk::seeded(seed), clock());
        let watch = Arc::new(Watch::default());
        let open = || {
            let process = disk.process();
            let own = options(&clock);
            let (disk, clock, watch) = (disk.clone(), Arc::clone(&clock), Arc::clone(&watch));
            let look = move |at: &str| watch.look(&disk, &clock, at);
            let dir = Watched::of(&process, false, look);
            let log = own.open_on(dir).unwrap();
            Member::of(process, log)
        };
        let ticking = Arc::new(Ticking(Arc::clone(&clock)));
        let reading = options(&clock).turn_timeout(Duration::from_millis(20));
        let reading = reading.clock(ticking);
        watch.may_wait.store(true, Ordering::SeqCst);
        let mut members = vec![Member::open(&disk, &clock)];
        let reader = reading.open_read_only_on(disk.process().dir()).unwrap();
        *watch.reader.lock().unwrap() = Some(Member::of(disk.process(), reader));
        watch.may_wait.store(false, Ordering::SeqCst);
        members.push(open());
        let hour = Retention::For(Duration::from_secs(3600));
        let hour = ObserveOptions::new().retention(hour);
        let mut held = Vec::new();
        for call in 0..500 {
            let at = rng.below(members.len());
            let member = &members[at];
            match rng.below(100) {
                0 | 1 if members.len() < 4 => members.push(open()),
                2 => {
                    held.retain(|(owner, _)| *owner != at);
                    members.swap_remove(at).kill();
                    held.clear();
                }
                3 => {
                    held.clear();
                    watch.may_wait.store(members.len() == 1, Ordering::SeqCst);
                    members.swap_remove(at).log.close().unwrap();
                    watch.may_wait.store(false, Ordering::SeqCst);
                }
                4..=12 => {
                    member.log.maintain().unwrap();
                    let stats = member.log.stats();
                    drops = drops.max(stats.drops_count);
                    merges = merges.max(stats.merges_count);
                    carried = carried.max(stats.carried_count);
                }
                13 | 14 => {
                    let mut keys = watch.keys.lock().unwrap();
                    keys.iter_mut()
                        .filter(|(key, _)| key.starts_with('h'))
                        .for_each(|(_, must)| {
                            *must = false;
                        });
                    drop(keys);
                    clock.advance_ms(rng.below(2 * 3_600_000) as u64);
                }
                15 => held.push((at, member.claims.claim(format!("c{call}")).unwrap())),
                n => {
                    let is_short = n % if round % 2 == 0 { 2 } else { 12 } != 0;
                    let key = key(if is_short { "h" } else { "k" }, call);
                    watch.keys.lock().unwrap().insert(key.clone(), false);
                    let new = if is_short {
                        member.filter.observe_with(&key, &hour).unwrap()
                    } else {
                        member.filter.observe(&key).unwrap()
                    };
                    assert!(new.is_new());
                    watch.keys.lock().unwrap().insert(key, true);
                }
            }
            if members.is_empty() {
                watch.look(&disk, &clock, "nobody is there");
                watch.may_wait.store(true, Ordering::SeqCst);
                members.push(open());
                watch.may_wait.store(false, Ordering::SeqCst);
            }
        }
        drop(held);
        watch.may_wait.store(true, Ordering::SeqCst);
        drop(members);
        let (looks, locked) = (&watch.looks, &watch.locked);
        println!(
            "looks={looks:?} locked={locked:?} drops={drops} merges={merges} carried={carried}"
        );
        waited += locked.load(Ordering::SeqCst);
        *watch.reader.lock().unwrap() = None;
    }
    assert!(
        waited > 0,
        "nobody was kept out of a store that was being recovered"
    );
    assert!(
        drops > 0 && merges > 0 && carried > 0,
        "{drops} {merges} {carried}"
    );
}

/// A clock for whoever may have to wait: it lets a call try for twenty looks.
fn impatient(clock: &Arc<ManualClock>) -> Options {
    let ticking = Arc::new(Ticking(Arc::clone(clock)));
    options(clock)
        .clock(ticking)
        .lock_timeout(Duration::from_millis(20))
        .turn_timeout(Duration::from_millis(20))
}

/// What was written in a turn is not told before the turn has ended: until then it may be taken
/// back.
#[test]
fn nothing_is_read_before_its_turn_has_ended() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    let reader = Arc::new(Member::reader(&disk, &clock));
    let asked = Arc::new(AtomicU64::new(0));
    let process = disk.process();
    let hook = {
        let (disk, clock) = (disk.clone(), Arc::clone(&clock));
        let (reader, asked) = (Arc::clone(&reader), Arc::clone(&asked));
        move |at: &str| {
            if at.starts_with("behind write seg-") {
                let fresh = Member::reader(&disk, &clock);
                assert!(!reader.knows("early") && !fresh.knows("early"), "{at}");
                asked.fetch_add(1, Ordering::SeqCst);
            }
        }
    };
    let dir = Watched::of(&process, false, hook);
    let b = Member::of(process, options(&clock).open_on(dir).unwrap());
    assert_eq!(b.filter.observe("early").unwrap(), Observed::New);
    assert_eq!(asked.load(Ordering::SeqCst), 1);
    assert!(reader.knows("early") && Member::reader(&disk, &clock).knows("early"));
    // A cell that was torn by one who died tells nothing: until somebody tells again nobody knows.
    let mut torn = disk.read_file("SHARED").unwrap();
    torn[70] ^= 1;
    disk.write_file("SHARED", torn);
    let late = impatient(&clock).open_read_only_on(disk.process().dir());
    assert_eq!(late.unwrap_err().kind(), ErrorKind::Locked);
    assert!(a.filter.observe("late").unwrap().is_new());
    assert!(reader.knows("late") && Member::reader(&disk, &clock).knows("late"));
}

/// Writers go on while a reader opens its files, one after the other: they roll, seal, carry over,
/// drop, purge and make. What was answered before a read began is found by it.
#[test]
fn writers_go_on_in_the_middle_of_a_read() {
    let seed = std::env::var("IDEMLOG_SEED").map_or(9, |seed| seed.parse().unwrap());
    let (disk, clock) = (SimDisk::seeded(seed), clock());
    let writers = [Member::open(&disk, &clock), Member::open(&disk, &clock)];
    let hour = Retention::For(Duration::from_secs(3600));
    let hour = ObserveOptions::new().retention(hour);
    let forever = ObserveOptions::new().retention(Retention::Forever);
    let state = Mutex::new((Rng::new(seed), 0u64, Vec::<String>::new(), Vec::new()));
    let work = {
        let clock = Arc::clone(&clock);
        move |calls: usize, is_between: bool| {
            let mut state = state.lock().unwrap();
            let (rng, count, told, held) = &mut *state;
            for _ in 0..calls {
                let one = &writers[rng.below(2)];
                *count += 1;
                match rng.below(40) {
                    // Not within a read, whose wait would be over.
                    0 if is_between => clock.advance_ms(3 * 3_600_000),
                    1..=4 => one.log.maintain().unwrap(),
                    5 => drop(one.log.filter(&format!("n{count}"), small()).unwrap()),
                    6 => held.push(one.claims.claim(format!("held{count}")).unwrap()),
                    7 | 8 => {
                        let key = key("k", *count);
                        assert!(one.filter.observe_with(&key, &forever).unwrap().is_new());
                        told.push(key);
                    }
                    _ => {
                        let key = key("h", *count);
                        assert!(one.filter.observe_with(&key, &hour).unwrap().is_new());
                    }
                }
            }
            let stats: Vec<_> = writers.iter().map(|one| one.log.stats()).collect();
            let drops: u64 = stats.iter().map(|stats| stats.drops_count).sum();
            let carried: u64 = stats.iter().map(|stats| stats.carried_count).sum();
            (told.clone(), held.len(), drops, carried)
        }
    };
    let work = Arc::new(work);
    // How often the writers may still work within this read, and after how many openings.
    let budget = Arc::new(Mutex::new((0usize, 0usize)));
    let hook = {
        let (work, budget) = (Arc::clone(&work), Arc::clone(&budget));
        move |_: &str| {
            let goes_on = {
                let mut budget = budget.lock().unwrap();
                let is_due = budget.0 > 0 && budget.1 == 0;
                budget.0 -= usize::from(is_due);
                budget.1 = budget.1.saturating_sub(1);
                is_due
            };
            if goes_on {
                let _later = work(45, false);
            }
        }
    };
    let dir = Watched::of(&disk.process(), true, hook);
    let dir: Arc<dyn Dir> = dir;
    let open = || {
        let log = options(&clock).open_read_only_on(Arc::clone(&dir)).unwrap();
        Member::of(disk.process(), log)
    };
    let _first = work(20, true);
    let old = open();
    let mut rng = Rng::new(seed + 1);
    let mut last = (0, 0);
    for round in 0..120 {
        let (told, held, drops, carried) = work(rng.below(60), true);
        last = (drops, carried);
        *budget.lock().unwrap() = (1 + rng.below(2), rng.below(14));
        let fresh = (round % 2 == 0).then(&open);
        for reader in fresh.iter().chain([&old]) {
            for key in told.iter().rev().take(25) {
                assert!(reader.knows(key), "round={round} {key}");
            }
            for key in told.iter().take(25) {
                assert!(reader.knows(key), "round={round} {key}");
            }
            let pending = reader.log.pending().unwrap().len();
            assert!(pending >= held, "round={round} {pending} {held}");
            never(reader);
        }
    }
    assert!(last.0 > 5 && last.1 > 5, "{last:?}");
}

/// The first one to come may have to write what is not sealed anew: a read in the middle of that
/// waits, and tells nothing wrong.
#[test]
fn a_read_waits_while_a_segment_is_written_anew() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    for n in 0..20 {
        assert!(a.filter.observe(key("k", n)).unwrap().is_new());
    }
    disk.fail(Fault::once(disk.steps(), FaultKind::Io).only(Op::Sync));
    assert!(a.log.sync().is_err());
    a.kill();
    let log = impatient(&clock).open_read_only_on(disk.process().dir());
    let reader = Arc::new(Member::of(disk.process(), log.unwrap()));
    assert!(reader.knows(&key("k", 1)));
    let asked = Arc::new(AtomicU64::new(0));
    let process = disk.process();
    let hook = {
        let (disk, clock) = (disk.clone(), Arc::clone(&clock));
        let (reader, asked) = (Arc::clone(&reader), Arc::clone(&asked));
        move |at: &str| {
            if at.starts_with("behind resize seg-") {
                let known = reader.filter.get(key("k", 1));
                assert_eq!(known.unwrap_err().kind(), ErrorKind::Locked, "{at}");
                let late = impatient(&clock).open_read_only_on(disk.process().dir());
                assert_eq!(late.unwrap_err().kind(), ErrorKind::Locked, "{at}");
                asked.fetch_add(1, Ordering::SeqCst);
            }
        }
    };
    let dir = Watched::of(&process, false, hook);
    let b = Member::of(process, options(&clock).open_on(dir).unwrap());
    assert!(asked.load(Ordering::SeqCst) > 0);
    assert!(b.filter.observe("more").unwrap().is_new());
    assert!(reader.knows("more") && (0..20).all(|n| reader.knows(&key("k", n))));
}

/// SHARED is never flushed, and a power cut may leave a newer one than the log.
#[test]
fn what_was_told_before_a_power_cut_is_not_believed() {
    let (disk, clock) = (SimDisk::seeded(3), clock());
    let a = Member::open(&disk, &clock);
    assert!(a.filter.observe("kept").unwrap().is_new());
    let later = disk.after_kill();
    let lost = Member::open(&later, &clock);
    for n in 0..20 {
        assert!(lost.filter.observe(key("lost", n)).unwrap().is_new());
    }
    a.kill();
    disk.write_file("SHARED", later.read_file("SHARED").unwrap());
    let process = disk.process();
    let log = options(&clock).shared(false).open_on(process.dir());
    let alone = Member::of(process, log.unwrap());
    assert!(alone.filter.observe("alone").unwrap().is_new());
    alone.log.close().unwrap();
    let reader = Member::reader(&disk, &clock);
    for _ in 0..2 {
        assert!(reader.knows("kept") && reader.knows("alone"));
        assert!(!reader.knows(&key("lost", 1)));
    }
}

/// A store that nobody has shared yet has no file by which a writer could be kept out: if one comes
/// while a reader opens it, the reader looks again.
#[test]
fn a_first_sharer_that_comes_in_the_middle_is_noticed() {
    let (disk, clock) = (SimDisk::new(), clock());
    let process = disk.process();
    let log = options(&clock).shared(false).open_on(process.dir());
    let alone = Member::of(process, log.unwrap());
    assert!(alone.filter.observe("k").unwrap().is_new());
    alone.log.close().unwrap();
    let (opened, sharing) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(None)));
    let hook = {
        let (disk, clock) = (disk.clone(), Arc::clone(&clock));
        let (opened, sharing) = (Arc::clone(&opened), Arc::clone(&sharing));
        move |name: &str| {
            opened.lock().unwrap().push(name.to_owned());
            let mut sharing = sharing.lock().unwrap();
            if name.starts_with("seg-") && sharing.is_none() {
                *sharing = Some(Member::open(&disk, &clock));
                opened.lock().unwrap().clear();
            }
        }
    };
    let dir = Watched::of(&disk.process(), true, hook);
    let log = options(&clock).open_read_only_on(dir).unwrap();
    let again = opened.lock().unwrap().contains(&"MANIFEST".to_owned());
    let reader = Member::of(disk.process(), log);
    assert!(again, "{opened:?}");
    let sharing = sharing.lock().unwrap().take().unwrap();
    assert!(sharing.filter.observe("more").unwrap().is_new());
    assert!(reader.knows("k") && reader.knows("more"));
}

/// In a store that a failed flush has poisoned a reader tells what was durable before, and of
/// nothing that it is absent.
#[test]
fn a_reader_of_a_poisoned_store_tells_what_was_durable() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    assert_eq!(a.filter.observe("before").unwrap(), Observed::New);
    a.log.sync().unwrap();
    let early = Member::reader(&disk, &clock);
    assert!(early.knows("before") && !early.knows("lost"));
    disk.fail(Fault::once(disk.steps(), FaultKind::Io).only(Op::Sync));
    let power = ObserveOptions::new().durability(Durability::Power);
    assert!(a.filter.observe_with("lost", &power).is_err());
    let late = Member::reader(&disk, &clock);
    for reader in [&early, &late] {
        assert!(reader.log.health().poisoned.is_some());
        assert!(reader.knows("before"));
        for key in ["lost", "never"] {
            let error = reader.filter.get(key).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Poisoned, "{error}");
        }
    }
    // A reader keeps nobody from mending it.
    a.log.close().unwrap_err();
    let b = Member::open(&disk, &clock);
    assert_eq!(b.filter.observe("before").unwrap(), Observed::Duplicate);
    assert!(b.filter.observe("after").unwrap().is_new());
    assert!(Member::reader(&disk, &clock).knows("after"));
}

/// A flush fails and the system forgets the pages. Whoever recovers the store then finds less than
/// a reader has read, which goes on from what there is.
#[test]
fn a_reader_forgets_what_a_recovery_has_not_found() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    assert_eq!(a.filter.observe("before").unwrap(), Observed::New);
    a.log.sync().unwrap();
    for n in 0..20 {
        assert!(a.filter.observe(key("lost", n)).unwrap().is_new());
    }
    let reader = Member::reader(&disk, &clock);
    assert!(reader.knows("before") && reader.knows(&key("lost", 7)));
    let fault = Fault::once(disk.steps(), FaultKind::Io).only(Op::Sync);
    disk.fail(fault.on_sync(SyncFailure::DropPages));
    a.log.sync().unwrap_err();
    a.kill();
    let b = Member::open(&disk, &clock);
    // Longer than what was lost, so that its end says nothing of that.
    for n in 0..40 {
        assert!(b.filter.observe(key("after", n)).unwrap().is_new());
    }
    assert!(reader.knows("before"));
    for n in 0..40 {
        assert!(!reader.knows(&key("lost", n)), "{n}");
        assert!(reader.knows(&key("after", n)), "{n}");
    }
}

/// A store that nobody has shared yet, or whose files for that are gone.
#[test]
fn a_store_that_nobody_has_open_is_read_to_its_end() {
    let (disk, clock) = (SimDisk::new(), clock());
    let missing = options(&clock).open_read_only_on(disk.dir()).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::Incompatible, "{missing}");
    assert_eq!(disk.steps(), 0);
    let alone = disk.process();
    let log = options(&clock).shared(false).open_on(alone.dir()).unwrap();
    let member = Member::of(alone, log);
    for n in 0..300 {
        assert!(member.filter.observe(key("k", n)).unwrap().is_new());
        if n % 100 == 0 {
            member.log.maintain().unwrap();
        }
    }
    // Who is alone keeps readers out.
    let refused = options(&clock).open_read_only_on(disk.process().dir());
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Locked);
    member.process.kill_at(disk.steps(), 40);
    assert!(member.filter.observe(key("torn", 1)).is_err());
    member.kill();
    let all = |reader: &Member| {
        assert!((0..300).all(|n| reader.knows(&key("k", n))));
        assert!(!reader.knows(&key("torn", 1)));
        never(reader);
    };
    let (one, two) = (Member::reader(&disk, &clock), Member::reader(&disk, &clock));
    for reader in [&one, &two] {
        all(reader);
    }
    let sharing = Member::open(&disk, &clock);
    assert!(sharing.filter.observe("more").unwrap().is_new());
    for reader in [&one, &two, &Member::reader(&disk, &clock)] {
        all(reader);
        assert!(reader.knows("more"));
    }
    sharing.kill();
    drop((one, two));
    // What the processes told each other is older than the log now.
    let process = disk.process();
    let log = options(&clock)
        .shared(false)
        .open_on(process.dir())
        .unwrap();
    let alone = Member::of(process, log);
    assert!(alone.filter.observe("alone").unwrap().is_new());
    alone.log.close().unwrap();
    let reader = Member::reader(&disk, &clock);
    all(&reader);
    assert!(reader.knows("more") && reader.knows("alone"));
    let sharing = Member::open(&disk, &clock);
    assert!(sharing.filter.observe("last").unwrap().is_new());
    assert!(reader.knows("last"));
}

/// An open that was writing a segment anew was stopped: only its copy is whole.
#[test]
fn what_an_open_has_left_half_written_is_not_read() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    assert!(a.filter.observe("k").unwrap().is_new());
    a.kill();
    let name = "seg-000000000001";
    let whole = disk.read_file(&format!("{name}.log")).unwrap();
    disk.write_file(&format!("{name}.copy"), whole.clone());
    disk.write_file(&format!("{name}.log"), vec![0; whole.len()]);
    let refused = options(&clock).open_read_only_on(disk.process().dir());
    assert!(refused.is_err());
    disk.write_file(&format!("{name}.log"), whole);
    let refused = options(&clock).open_read_only_on(disk.process().dir());
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Incompatible);
    Member::open(&disk, &clock).kill();
    assert!(Member::reader(&disk, &clock).knows("k"));
    // Without the lock's file nobody could be kept out.
    disk.dir().unlink("LOCK").unwrap();
    let refused = options(&clock).open_read_only_on(disk.process().dir());
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Incompatible);
}

#[test]
fn a_reader_lists_and_counts_and_writes_nothing() {
    let (disk, clock) = (SimDisk::new(), clock());
    let (a, b) = (Member::open(&disk, &clock), Member::open(&disk, &clock));
    let outbox = a.log.outbox("mail", small()).unwrap();
    let intake = |log: &DedupLog| {
        let options = IntakeOptions::new().jobs(small());
        log.intake::<Repeatable>("work", options)
    };
    let _queued = intake(&a.log).unwrap().submit("j", b"do it").unwrap();
    let ClaimVerdict::New(held) = a.claims.claim("held").unwrap() else {
        panic!("the key is new");
    };
    let ClaimVerdict::New(mut claim) = b.claims.claim("sent").unwrap() else {
        panic!("the key is new");
    };
    let sent = claim.commit_with(Commit::new(b"").publish(&outbox, b"mail"));
    assert!(sent.is_ok());
    let reader = Member::reader(&disk, &clock);
    let before = disk.steps();
    let mail = reader.log.outbox("mail", small()).unwrap();
    let jobs = intake(&reader.log).unwrap();
    assert_eq!(mail.stats().unwrap().queued_count, 1);
    assert!(matches!(
        jobs.status("j").unwrap(),
        JobStatus::Queued { .. }
    ));
    let lease_left = || {
        let pending = reader.log.pending().unwrap();
        assert_eq!(pending.len(), 1);
        match pending[0].state {
            KeyState::Pending { lease_left, .. } => lease_left,
            ref other => panic!("{other:?}"),
        }
    };
    assert!(!lease_left().is_zero());
    let refused = [
        reader.filter.observe("x").map(drop),
        reader.filter.observe_many(&["x"]).map(drop),
        reader.filter.forget("x").map(drop),
        reader.claims.claim("x").map(drop),
        reader.claims.forget("held", true).map(drop),
        mail.lease(1).map(drop),
        jobs.take(1).map(drop),
        jobs.submit("x", b"").map(drop),
        reader.log.filter("new", small()).map(drop),
        reader.log.purge("f", true),
        reader.log.maintain(),
        reader.log.confirm_time(),
        reader.log.sync(),
    ];
    for (n, refused) in refused.into_iter().enumerate() {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid, "{n}");
    }
    assert_eq!(disk.steps(), before);
    a.process.kill();
    drop((held, outbox));
    a.kill();
    assert!(lease_left().is_zero(), "its owner is gone");
    // Beside a torn record that nobody has cleared yet.
    b.process.kill_at(disk.steps(), 30);
    assert!(b.filter.observe(key("torn", 1)).is_err());
    drop(claim);
    b.kill();
    let before = disk.steps();
    assert!(!reader.knows(&key("torn", 1)));
    assert!(!Member::reader(&disk, &clock).knows(&key("torn", 1)));
    let salvage = options(&clock).shared(false).open_mode(OpenMode::Salvage);
    let error = salvage.open_read_only_on(disk.dir()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    reader.log.clone().close().unwrap();
    assert_eq!(
        reader.filter.get("k").unwrap_err().kind(),
        ErrorKind::Closed
    );
    assert_eq!(disk.steps(), before);
}
