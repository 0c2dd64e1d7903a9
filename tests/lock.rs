//! Locks: whoever holds one is alone, every end frees it, and its epoch only rises.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use idemlog::testing::ManualClock;
use idemlog::testing::sim::{CrashOptions, PowerCut, SimDisk, for_each_crash_point};
use idemlog::{
    Change, ClaimVerdict, DedupLog, ErrorKind, Internal, KeyState, Lock, LockVerdict, Locks,
    NamespaceOptions, Options, ZeroFill,
};

const LONG: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_secs(10);

fn open(disk: &SimDisk, clock: &Arc<ManualClock>) -> DedupLog {
    Options::new()
        .background(false)
        .zero_fill(ZeroFill::Never)
        .segment_bytes(4096)
        .clock(Arc::clone(clock) as _)
        .open_on(disk.dir())
        .unwrap()
}

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(1_700_000_000_000))
}

fn locked(verdict: LockVerdict) -> Lock {
    verdict.lock().expect("nobody else holds it")
}

fn take(locks: &Locks) -> Lock {
    locked(locks.try_lock("k", LEASE).unwrap())
}

#[test]
fn a_lock_excludes_until_it_is_unlocked_or_dropped() {
    let log = open(&SimDisk::new(), &clock());
    let locks = log.locks("l").unwrap();
    assert_eq!(locks.name(), "l");
    let mut last = None;
    for round in 0..4 {
        let lock = take(&locks);
        assert_eq!(lock.key(), b"k");
        assert!(last < Some(lock.epoch()), "epochs rise");
        last = Some(lock.epoch());
        let LockVerdict::Busy { lease_left } = locks.try_lock("k", LEASE).unwrap() else {
            panic!("it is held");
        };
        assert_eq!(lease_left, LEASE);
        assert!(locks.try_lock("other", LEASE).unwrap().lock().is_some());
        if round % 2 == 0 {
            assert_eq!(lock.unlock().unwrap(), Change::Applied(KeyState::Absent));
        } else {
            drop(lock);
        }
    }
}

#[test]
fn a_hung_owners_lock_is_free_after_its_lease_and_it_is_told_so() {
    let clock = clock();
    let log = open(&SimDisk::new(), &clock);
    let locks = log.locks("l").unwrap();
    let hung = take(&locks);
    clock.advance_ms(9_000);
    assert!(hung.renew(LEASE).unwrap().is_applied());
    clock.advance_ms(9_999);
    let busy = locks.try_lock("k", LEASE).unwrap();
    assert!(
        matches!(busy, LockVerdict::Busy { lease_left } if lease_left == Duration::from_millis(1))
    );
    clock.advance_ms(1);
    // Lapsed, but nobody has taken it: still the owner's.
    assert!(hung.renew(LEASE).unwrap().is_applied());
    clock.advance_ms(10_000);
    let next = take(&locks);
    assert!(next.epoch() > hung.epoch());
    assert!(!hung.renew(LEASE).unwrap().is_applied());
    assert!(matches!(hung.unlock().unwrap(), Change::Fenced { .. }));
    assert!(next.unlock().unwrap().is_applied());
}

#[test]
fn a_lock_is_kept_up_to_its_ceiling() {
    let clock = clock();
    let log = open(&SimDisk::new(), &clock);
    let locks = log.locks("l").unwrap();
    let mut lock = take(&locks);
    lock.keep_alive(Duration::from_secs(30)).unwrap();
    for _ in 0..9 {
        clock.advance_ms(3_333);
        log.maintain().unwrap();
        assert!(locks.try_lock("k", LEASE).unwrap().lock().is_none());
    }
    clock.advance_ms(3);
    let next = take(&locks);
    assert!(matches!(lock.unlock().unwrap(), Change::Fenced { .. }));
    drop(next);
}

#[test]
fn those_who_wait_get_it_one_after_the_other() {
    const THREADS: usize = 8;
    let log = DedupLog::in_memory().unwrap();
    let locks = log.locks("l").unwrap();
    let (inside, total) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let fence = Arc::new(AtomicU64::new(0));
    let threads: Vec<_> = (0..THREADS)
        .map(|_| {
            let (locks, inside) = (locks.clone(), Arc::clone(&inside));
            let (total, fence) = (Arc::clone(&total), Arc::clone(&fence));
            std::thread::spawn(move || {
                for _ in 0..50 {
                    let lock = locked(locks.lock_wait("k", LONG, LONG).unwrap());
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "not alone");
                    let seen = fence.swap(lock.epoch().get(), Ordering::SeqCst);
                    assert!(seen < lock.epoch().get(), "an older owner came later");
                    total.fetch_add(1, Ordering::SeqCst);
                    assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1);
                    assert!(lock.unlock().unwrap().is_applied());
                }
            })
        })
        .collect();
    let started = Instant::now();
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
    assert_eq!(total.load(Ordering::SeqCst), THREADS * 50);
    assert!(started.elapsed() < LONG);
    let held = take(&locks);
    let none = locks
        .lock_wait("k", LEASE, Duration::from_millis(10))
        .unwrap();
    assert!(matches!(none, LockVerdict::Busy { .. }));
    drop(held);
}

/// At every step at which a process can die or lose power: its lock is free at the next open, and
/// the next owner's epoch is above every one that was handed out.
#[test]
fn a_crashed_owners_lock_is_free_at_reopen_with_a_higher_epoch() {
    let clock = clock();
    let highest = AtomicU64::new(0);
    let script = |disk: &SimDisk| {
        highest.store(0, Ordering::SeqCst);
        let options = Options::new()
            .background(false)
            .zero_fill(ZeroFill::Never)
            .segment_bytes(4096)
            .clock(Arc::clone(&clock) as _);
        let Ok(log) = options.open_on(disk.dir()) else {
            return;
        };
        let Ok(locks) = log.locks("l") else { return };
        for _ in 0..20 {
            let Ok(LockVerdict::Locked(lock)) = locks.try_lock("k", LONG) else {
                return;
            };
            highest.fetch_max(lock.epoch().get(), Ordering::SeqCst);
            if lock.unlock().is_err() || log.sync().is_err() {
                return;
            }
        }
        // Held when the end comes.
        if let Ok(LockVerdict::Locked(lock)) = locks.try_lock("k", LONG) {
            highest.fetch_max(lock.epoch().get(), Ordering::SeqCst);
            log.sync().unwrap_or_default();
            // Closed first, so that the guard unlocks nothing.
            log.close().unwrap_or_default();
            drop(lock);
        }
    };
    let totals = for_each_crash_point(&CrashOptions::default(), script, |state| {
        let log = open(&state.disk, &clock);
        let locks = log.locks("l").unwrap();
        let lock = take(&locks);
        let highest = highest.load(Ordering::SeqCst);
        assert!(lock.epoch().get() > highest, "{state}");
        assert!(lock.unlock().unwrap().is_applied());
    });
    println!("steps={} disks={}", totals.steps, totals.checked);
    assert!(totals.checked > 100);
}

#[test]
fn a_lock_held_at_a_close_is_free_and_its_owner_gets_an_error() {
    let (disk, clock) = (SimDisk::new(), clock());
    let log = open(&disk, &clock);
    let locks = log.locks("l").unwrap();
    let lock = take(&locks);
    log.close().unwrap();
    assert_eq!(lock.renew(LEASE).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(lock.unlock().unwrap_err().kind(), ErrorKind::Closed);
    let after = disk.after_power_cut(&mut PowerCut::drop_all());
    let log = open(&after, &clock);
    drop(take(&log.locks("l").unwrap()));
}

#[test]
fn a_key_that_was_used_otherwise_is_a_typed_error() {
    let log = open(&SimDisk::new(), &clock());
    let options = NamespaceOptions::new().outcome_bytes_max(0);
    let jobs = log.namespace::<Internal>("l", options).unwrap();
    let ClaimVerdict::New(mut claim) = jobs.claim("k").unwrap() else {
        panic!("nobody else holds it");
    };
    drop(claim.commit(b"").unwrap());
    let locks = log.locks("l").unwrap();
    let error = locks.try_lock("k", LEASE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    let error = locks.try_lock("", LEASE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let filter = log.filter("f", NamespaceOptions::new().outcome_bytes_max(0));
    drop(filter.unwrap());
    assert_eq!(log.locks("f").unwrap_err().kind(), ErrorKind::Invalid);
}
