//! A ring may run the waker of a task, and a waker may call the store: no lock of the store is
//! held then, whoever rings.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use idemlog::testing::ManualClock;
use idemlog::testing::sim::SimDisk;
use idemlog::{
    ClaimVerdict, DedupLog, Durability, Filter, NamespaceOptions, ObserveOptions, Options,
    Repeatable, WhenFull, ZeroFill,
};

const START_MS: u64 = 1_700_000_000_000;
const LONG: Duration = Duration::from_secs(20);
const RETENTION: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_secs(30);

/// A waker that does something instead of having a task polled later.
struct Inline<F>(F);

impl<F: Fn() + Send + Sync + 'static> Wake for Inline<F> {
    fn wake(self: Arc<Self>) {
        (self.0)();
    }
}

fn inline(act: impl Fn() + Send + Sync + 'static) -> Waker {
    Waker::from(Arc::new(Inline(act)))
}

fn poll<F: Future + ?Sized>(future: Pin<&mut F>, waker: &Waker) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(waker))
}

/// Runs what may lock itself out on a thread that is given up then.
fn within(what: &str, run: impl FnOnce() + Send + 'static) {
    let (told, ended) = mpsc::channel();
    std::thread::spawn(move || {
        run();
        told.send(()).unwrap();
    });
    let ended = ended.recv_timeout(LONG);
    ended.unwrap_or_else(|_| panic!("stuck or panicked: {what}"));
}

fn options(clock: &Arc<ManualClock>) -> Options {
    Options::new()
        .segment_bytes(8192)
        .zero_fill(ZeroFill::Never)
        // Nothing is flushed but for those who wait.
        .sync_interval(Duration::from_secs(3600))
        .clock(Arc::clone(clock) as _)
}

fn filter(log: &DedupLog) -> Filter {
    let options = NamespaceOptions::new().retention(RETENTION);
    log.filter("f", options.outcome_bytes_max(0)).unwrap()
}

fn observe(filter: &Filter, n: u32) {
    let buffered = ObserveOptions::new().durability(Durability::Buffered);
    let key = format!("{n:0>200}");
    assert!(filter.observe_with(key, &buffered).unwrap().is_new());
}

fn is_on(thread: &str) -> bool {
    std::thread::current().name() == Some(thread)
}

/// Keeps the thread that flushes for tasks busy until the answer is dropped: whoever needs a flush
/// then leads it on its own thread.
fn hold_up_flushes(filter: &Filter) -> mpsc::Sender<()> {
    for n in 0.. {
        let (release, released) = mpsc::channel::<()>();
        let (told, rung) = mpsc::channel();
        let released = Mutex::new(released);
        let waker = inline(move || {
            let is_flusher = is_on("idemlog-flush");
            told.send(is_flusher).unwrap_or_default();
            if is_flusher {
                released.lock().unwrap().recv().unwrap_or_default();
            }
        });
        let mut observing = Box::pin(filter.observe_async(format!("flush {n}")));
        if poll(observing.as_mut(), &waker).is_ready() {
            // A flush of the store's own has come in between.
            continue;
        }
        // Another thread may pay what this one owes.
        if rung.recv_timeout(LONG).expect("nobody flushes") {
            return release;
        }
    }
    unreachable!()
}

/// A task waits for the disk, and its waker makes this call on the thread that `lead` makes flush.
/// Both end.
fn a_waker_calls(
    log: &DedupLog,
    call: impl Fn(&DedupLog) + Send + Sync + 'static,
    lead: impl FnOnce(),
) {
    let filter = filter(log);
    let _held_up = hold_up_flushes(&filter);
    let space = NamespaceOptions::new().outcome_bytes_max(64);
    let jobs = log.namespace::<Repeatable>("jobs", space);
    let jobs = jobs.unwrap();
    let ClaimVerdict::New(mut claim) = jobs.claim("k").unwrap() else {
        panic!("it is new")
    };
    let (told, called) = mpsc::channel();
    let inner = log.clone();
    let waker = inline(move || {
        call(&inner);
        told.send(()).unwrap_or_default();
    });
    let mut commit = Box::pin(claim.commit_async(b"done"));
    assert!(poll(commit.as_mut(), &waker).is_pending());
    assert!(called.try_recv().is_err());
    lead();
    called.recv_timeout(LONG).expect("nobody rang for the task");
    assert!(poll(commit.as_mut(), &waker).is_ready());
}

#[test]
fn a_waker_may_have_the_store_maintained_while_a_sweep_drops_segments() {
    within("a sweep that drops", || {
        let clock = Arc::new(ManualClock::new(START_MS));
        let log = options(&clock).open_on(SimDisk::new().dir()).unwrap();
        let filter = filter(&log);
        (0..80).for_each(|n| observe(&filter, n));
        log.maintain().unwrap();
        a_waker_calls(
            &log,
            |log| log.maintain().unwrap(),
            || {
                clock.advance_ms(2 * RETENTION.as_millis() as u64);
                let started = Instant::now();
                while log.stats().drops_count == 0 {
                    assert!(started.elapsed() < LONG, "nothing is dropped");
                    log.maintain().unwrap();
                }
            },
        );
    });
}

#[test]
fn a_waker_may_make_a_namespace_while_a_call_evicts() {
    within("an eviction", || {
        let clock = Arc::new(ManualClock::new(START_MS));
        let options = options(&clock).log_bytes_max(6 * 8192);
        let options = options.when_full(WhenFull::EvictOldest);
        let log = options.open_on(SimDisk::new().dir()).unwrap();
        a_waker_calls(
            &log,
            |log| {
                log.filter("another", NamespaceOptions::new().outcome_bytes_max(0))
                    .unwrap();
            },
            || {
                let filter = filter(&log);
                let mut numbers = 0..1_000;
                while log.stats().evicted_count == 0 {
                    observe(&filter, numbers.next().expect("nothing is evicted"));
                }
            },
        );
    });
}

#[cfg(feature = "token")]
#[test]
fn a_waker_may_open_tokens_while_their_policy_is_declared() {
    use idemlog::{TokenOptions, TokenPolicy};
    let single = || TokenOptions::new(TokenPolicy::Single);
    within("a policy", move || {
        let clock = Arc::new(ManualClock::new(START_MS));
        let log = options(&clock).open_on(SimDisk::new().dir()).unwrap();
        a_waker_calls(
            &log,
            move |log| {
                for name in ["a", "b"] {
                    log.tokens(name, single()).unwrap();
                }
            },
            || drop(log.tokens("a", single()).unwrap()),
        );
    });
}

/// A renewal tells who waits for the key, on the thread that renews; what is told drops the guard.
#[test]
fn a_waker_may_end_the_claim_whose_renewal_it_is_told_of() {
    within("a renewal", || {
        let clock = Arc::new(ManualClock::new(START_MS));
        let log = options(&clock).open_on(SimDisk::new().dir()).unwrap();
        let space = NamespaceOptions::new().lease(LEASE).outcome_bytes_max(64);
        let jobs = log.namespace::<Repeatable>("jobs", space).unwrap();
        let ClaimVerdict::New(mut claim) = jobs.claim("k").unwrap() else {
            panic!("it is new")
        };
        claim.keep_alive(LEASE * 10).unwrap();
        let claim = Arc::new(Mutex::new(Some(claim)));
        let (told, ended) = mpsc::channel();
        let held = Arc::clone(&claim);
        let once = AtomicBool::new(false);
        let waker = inline(move || {
            if is_on("idemlog-timer") && !once.swap(true, Ordering::SeqCst) {
                drop(held.lock().unwrap().take());
                told.send(()).unwrap();
            }
        });
        let mut waiting = Box::pin(jobs.claim_wait_async("k", LEASE * 20));
        assert!(poll(waiting.as_mut(), &waker).is_pending());
        let records = log.stats().records_count;
        let started = Instant::now();
        let mut inherited = None;
        let mut renewals_due = 0;
        while ended.try_recv().is_err() {
            let waited = started.elapsed();
            assert!(waited < LONG, "no renewal, or it is stuck");
            // A ring comes unheard while the task is being polled: then the next renewal's is.
            if renewals_due < 20 && waited.as_millis() >= renewals_due * 20 {
                renewals_due += 1;
                clock.advance_ms(LEASE.as_millis() as u64 / 3 + 1);
            }
            if inherited.is_none()
                && let Poll::Ready(verdict) = poll(waiting.as_mut(), &waker)
            {
                // The claim had ended already, and this thread was not told yet.
                inherited = Some(verdict.unwrap());
            }
            std::thread::yield_now();
        }
        let verdict = match inherited {
            Some(verdict) => verdict,
            None => match poll(waiting.as_mut(), Waker::noop()) {
                Poll::Ready(verdict) => verdict.unwrap(),
                Poll::Pending => panic!("the claim has ended"),
            },
        };
        assert!(matches!(verdict, ClaimVerdict::New(_)), "{verdict:?}");
        // A renewal, the end, the new claim; and nothing is renewed behind the end.
        let after = log.stats().records_count;
        assert!(after >= records + 3, "{records} {after}");
        clock.advance_ms(LEASE.as_millis() as u64);
        log.maintain().unwrap();
        assert_eq!(log.stats().records_count, after);
    });
}
