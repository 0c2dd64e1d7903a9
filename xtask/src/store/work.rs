//! The workload: every kind of call and of background work, written down before and after.
//!
//! Parts follow each other in processes of their own. Part 0 makes the store and is killed while
//! it works, part 1 recovers it, part 2 opens it after a clean close. With a fault the workload
//! lets the device refuse writes from a call on, and goes on after the first error, to see that
//! nothing is promised any more.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use idemlog::{
    ClaimOptions, ClaimVerdict, CommitVerdict, DedupLog, Durability, EffectClass, Error, Failure,
    Filter, Internal, Namespace, NonRepeatable, ObserveOptions, Observed, Probeable, Repeatable,
    StartError,
};

use super::notes::{Notes, Op};
use super::{AFTER, LOOSE, MAIN, SHORT, error_of, options, outcome_of, space_options};
use crate::context::Fallible;
use crate::rig::device::{FAULT_OFF, FAULT_ON};
use crate::rig::random::Random;

const THREADS_COUNT: u64 = 3;
/// How long the workload waits for expired segments to go.
const DROPS_TIME_MAX: Duration = Duration::from_secs(20);
const SHORT_RETENTION: Duration = Duration::from_secs(1);

/// What one process of the workload does.
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) part: u64,
    /// Calls of each thread.
    pub(crate) calls: u64,
    /// Ends by SIGKILL in the middle of its calls.
    pub(crate) killed: bool,
    /// Fills segments with keys that expire, and waits until they are dropped.
    pub(crate) drops: bool,
    /// The device refuses writes from this call of the first thread on.
    pub(crate) fault_at: Option<u64>,
    /// The device refuses writes while the store is opened.
    pub(crate) fault_open: bool,
    /// Opens without background threads, and does their work now and then.
    pub(crate) foreground: bool,
}

struct Shop<'a> {
    log: DedupLog,
    main: Filter,
    loose: Filter,
    short: Filter,
    repeatable: Namespace<Repeatable>,
    probeable: Namespace<Probeable>,
    non_repeatable: Namespace<NonRepeatable>,
    internal: Namespace<Internal>,
    notes: &'a Notes,
    plan: &'a Plan,
    /// A call has failed.
    failed: AtomicBool,
}

pub(crate) fn run(dir: &Path, notes: &Notes, plan: &Plan) -> Fallible<()> {
    notes.fact("opening")?;
    if plan.fault_open {
        notes.line(FAULT_ON)?;
    }
    let opened = options().background(!plan.foreground).open(dir);
    if plan.fault_open {
        notes.line(FAULT_OFF)?;
        notes.fact(if opened.is_ok() {
            "opened under fault"
        } else {
            "open refused"
        })?;
        std::mem::forget(opened);
        return kill_self();
    }
    let log = opened?;
    notes.fact("opened")?;
    let shop = Shop {
        main: log.filter(MAIN, space_options())?,
        loose: log.filter(LOOSE, space_options().durability(Durability::Buffered))?,
        short: log.filter(SHORT, space_options().retention(SHORT_RETENTION))?,
        repeatable: log.namespace("repeatable", space_options())?,
        probeable: log.namespace("probeable", space_options())?,
        non_repeatable: log.namespace("non-repeatable", space_options())?,
        internal: log.namespace("internal", space_options())?,
        log,
        notes,
        plan,
        failed: AtomicBool::new(false),
    };
    if plan.drops {
        shop.fill_short()?;
    }
    let shop_ref = &shop;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS_COUNT)
            .map(|thread| scope.spawn(move || shop_ref.call_all(thread)))
            .collect();
        threads.into_iter().try_for_each(|thread| {
            thread
                .join()
                .unwrap_or_else(|_panic| Err("a thread of the workload panicked".into()))
        })
    })?;
    if plan.drops {
        shop.wait_for_drops()?;
    }
    shop.end()
}

impl Shop<'_> {
    fn call_all(&self, thread: u64) -> Fallible<()> {
        let plan = self.plan;
        let mut random = Random::new(plan.seed ^ (plan.part << 32) ^ (thread << 48));
        for number in 0..plan.calls {
            let is_first = thread == 0;
            if is_first && plan.fault_at == Some(number) {
                self.notes.line(FAULT_ON)?;
            }
            if is_first && plan.killed && number == plan.calls * 2 / 3 {
                kill_self()?;
            }
            self.call_once(thread, number, &mut random)?;
            if self.failed.load(Ordering::Relaxed) {
                return self.after_failure(thread);
            }
        }
        Ok(())
    }

    /// Draws one thing to do.
    fn call_once(&self, thread: u64, number: u64, random: &mut Random) -> Fallible<()> {
        let part = self.plan.part;
        let key = format!("p{part}-t{thread}-{number}");
        match random.below(20) {
            0..6 => self.see(&self.main, MAIN, &key),
            // A key of this or an earlier part again, whatever became of it.
            6..8 => {
                let earlier = random.below(part + 1);
                let again = format!("p{earlier}-t{thread}-{}", random.below(number + 1));
                self.see(&self.main, MAIN, &again)
            }
            8 => self.forget(&format!("p{part}-t{thread}-{}", random.below(number + 1))),
            9 => self.see_many(&key, 1 + random.below(12)),
            10..12 if thread == 0 => self.loose(number),
            12 if thread == 0 && random.percent(30) => self.sync(),
            13 if self.plan.foreground => self.tolerate(&self.log.maintain()),
            _ => self.live(thread, number, random),
        }
    }

    fn live(&self, thread: u64, number: u64, random: &mut Random) -> Fallible<()> {
        let part = self.plan.part;
        let number = if random.percent(15) {
            random.below(number + 1)
        } else {
            number
        };
        let owner = if random.percent(10) {
            random.below(part + 1)
        } else {
            part
        };
        let key = format!("p{owner}-t{thread}-{number}");
        match random.below(4) {
            0 => self.life(&self.repeatable, &key, random),
            1 => self.life(&self.probeable, &key, random),
            2 => self.life(&self.non_repeatable, &key, random),
            _ => self.life(&self.internal, &key, random),
        }
    }

    /// Takes a failure down; only a workload with a fault goes on after one.
    fn fail(&self, id: u64, error: &Error) -> Fallible<()> {
        self.notes.failed(id, error)?;
        self.failed.store(true, Ordering::Relaxed);
        if self.plan.fault_at.is_some() {
            Ok(())
        } else {
            Err(error.to_string().into())
        }
    }

    fn tolerate(&self, done: &idemlog::Result<()>) -> Fallible<()> {
        match done {
            Err(error) if self.plan.fault_at.is_none() => Err(error.to_string().into()),
            Err(_) => {
                self.failed.store(true, Ordering::Relaxed);
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    fn see(&self, filter: &Filter, space: &str, key: &str) -> Fallible<()> {
        let id = self.notes.ask(Op::See, space, key)?;
        match filter.observe(key) {
            Ok(observed) => self.notes.answered(id, word_of(observed)),
            Err(error) => self.fail(id, &error),
        }
    }

    fn see_many(&self, stem: &str, count: u64) -> Fallible<()> {
        let keys: Vec<String> = (0..count)
            .map(|number| format!("{stem}-b{number}"))
            .collect();
        let ids: Vec<u64> = keys
            .iter()
            .map(|key| self.notes.ask(Op::See, MAIN, key))
            .collect::<Fallible<_>>()?;
        match self.main.observe_many_with(&keys, &ObserveOptions::new()) {
            Ok(answers) => ids
                .into_iter()
                .zip(answers)
                .try_for_each(|(id, answer)| match answer {
                    Ok(observed) => self.notes.answered(id, word_of(observed)),
                    Err(error) => self.fail(id, &error),
                }),
            // What the batch did before it failed is not known: not one of them is answered.
            Err(error) => self.tolerate(&Err(error)),
        }
    }

    /// Loose keys have numbers without gaps.
    fn loose(&self, number: u64) -> Fallible<()> {
        // The call's number names the burst; numbers within the part are counted here.
        for _ in 0..3 + number % 3 {
            let next = LOOSE_NEXT.fetch_add(1, Ordering::Relaxed);
            self.see(&self.loose, LOOSE, &format!("p{}-{next}", self.plan.part))?;
            if self.failed.load(Ordering::Relaxed) {
                break;
            }
        }
        Ok(())
    }

    fn forget(&self, key: &str) -> Fallible<()> {
        let id = self.notes.ask(Op::Forget, MAIN, key)?;
        match self.main.forget(key) {
            Ok(_change) => self.notes.answered(id, "ok"),
            Err(error) => self.fail(id, &error),
        }
    }

    fn sync(&self) -> Fallible<()> {
        let id = self.notes.ask(Op::Sync, MAIN, "-")?;
        match self.log.sync() {
            Ok(()) => self.notes.answered(id, "ok"),
            Err(error) => self.fail(id, &error),
        }
    }

    /// One claim to whatever end is drawn.
    fn life<C: EffectClass>(
        &self,
        space: &Namespace<C>,
        key: &str,
        random: &mut Random,
    ) -> Fallible<()> {
        let id = self.notes.ask(Op::Claim, space.name(), key)?;
        let verdict = match space.claim_with(key, &ClaimOptions::new()) {
            Ok(verdict) => verdict,
            Err(error) => return self.fail(id, &error),
        };
        if let ClaimVerdict::Duplicate(done) = &verdict
            && done.outcome.bytes() != Some(&outcome_of(key))
        {
            self.notes.answered(id, "wrong-outcome")?;
            return Err(format!("wrong outcome of {key}").into());
        }
        self.notes.answered(id, claim_word(&verdict))?;
        let Some(claim) = verdict.claim() else {
            return Ok(());
        };
        // Some owners die before they start.
        if random.percent(8) {
            std::mem::forget(claim);
            return Ok(());
        }
        let id = self.notes.ask(Op::Start, space.name(), key)?;
        let mut started = match claim.start(b"evidence") {
            Ok(started) => started,
            Err(StartError::Failed { claim, error }) => {
                std::mem::forget(claim);
                return self.fail(id, &error);
            }
            Err(StartError::Fenced { .. }) => return self.notes.answered(id, "fenced"),
        };
        self.notes.answered(id, "ok")?;
        let fate = random.below(100);
        if fate < 15 {
            std::mem::forget(started);
            return Ok(());
        }
        if fate < 75 {
            let id = self.notes.ask(Op::Commit, space.name(), key)?;
            let committed = started.commit(&outcome_of(key));
            if committed.is_err() {
                std::mem::forget(started);
            }
            return match committed {
                Ok(CommitVerdict::Committed { .. }) => self.notes.answered(id, "ok"),
                Ok(other) => self
                    .notes
                    .answered(id, &format!("{other:?}").replace(' ', "")),
                Err(error) => self.fail(id, &error),
            };
        }
        let text = String::from_utf8_lossy(&error_of(key)).into_owned();
        let (op, failure) = match fate {
            75..83 => (Op::Reject, Failure::permanent(text)),
            83..90 => (
                Op::Retry,
                Failure::retryable(Duration::from_secs(3600), text),
            ),
            90..95 if space.name() == "non-repeatable" => (Op::Doubt, Failure::unknown(text)),
            _ => (Op::Release, Failure::Release),
        };
        let id = self.notes.ask(op, space.name(), key)?;
        match started.fail(failure) {
            Ok(change) if change.is_applied() => self.notes.answered(id, "ok"),
            Ok(_) => self.notes.answered(id, "fenced"),
            Err(error) => self.fail(id, &error),
        }
    }

    /// Fills several segments with keys that expire, and puts unsettled ones between them.
    fn fill_short(&self) -> Fallible<()> {
        let part = self.plan.part;
        let mut random = Random::new(self.plan.seed ^ 0x5055);
        for number in 0..70 {
            let stem = format!("p{part}-s{number}-{}", "x".repeat(30));
            let keys: Vec<String> = (0..12).map(|index| format!("{stem}-{index}")).collect();
            let ids: Vec<u64> = keys
                .iter()
                .map(|key| self.notes.ask(Op::See, SHORT, key))
                .collect::<Fallible<_>>()?;
            for (id, answer) in ids.into_iter().zip(self.short.observe_many(&keys)?) {
                match answer {
                    Ok(observed) => self.notes.answered(id, word_of(observed))?,
                    Err(error) => self.fail(id, &error)?,
                }
            }
            if number % 20 == 7 {
                self.unsettled(&format!("p{part}-u{number}"), &mut random)?;
            }
        }
        Ok(())
    }

    /// A start that stays: the drop of its segment must carry it over.
    fn unsettled(&self, key: &str, random: &mut Random) -> Fallible<()> {
        let space = &self.non_repeatable;
        let id = self.notes.ask(Op::Claim, space.name(), key)?;
        let verdict = space.claim(key)?;
        self.notes.answered(id, claim_word(&verdict))?;
        let Some(claim) = verdict.claim() else {
            return Ok(());
        };
        let id = self.notes.ask(Op::Start, space.name(), key)?;
        std::mem::forget(claim.start(b"evidence")?);
        self.notes.answered(id, "ok")?;
        self.see(
            &self.main,
            MAIN,
            &format!("{key}-{}", random.below(1_000_000)),
        )
    }

    fn wait_for_drops(&self) -> Fallible<()> {
        let began = Instant::now();
        let mut number = 0;
        let waits = || self.log.stats().drops_count == 0 && !self.failed.load(Ordering::Relaxed);
        while waits() && began.elapsed() < DROPS_TIME_MAX {
            self.see(&self.main, MAIN, &format!("p{}-w-{number}", self.plan.part))?;
            self.tolerate(&self.log.maintain())?;
            std::thread::sleep(Duration::from_millis(20));
            number += 1;
        }
        Ok(())
    }

    /// The device works again; the store must not pretend that nothing was lost.
    fn after_failure(&self, thread: u64) -> Fallible<()> {
        if self.plan.fault_at.is_none() || thread != 0 {
            return Ok(());
        }
        self.notes.line(FAULT_OFF)?;
        let poisoned = self.log.health().poisoned.is_some();
        self.notes.fact(&format!("poisoned {poisoned}"))?;
        for number in 0..5 {
            let key = format!("p{}{AFTER}{number}", self.plan.part);
            self.see(&self.main, MAIN, &key)?;
        }
        Ok(())
    }

    fn end(self) -> Fallible<()> {
        let stats = self.log.stats();
        self.notes.fact(&format!(
            "stats seals={} merges={} drops={} carried={} takeovers={} flushes={}",
            stats.seals_count,
            stats.merges_count,
            stats.drops_count,
            stats.carried_count,
            stats.takeovers_count,
            stats.flushes_count
        ))?;
        if self.plan.fault_at.is_some() {
            // A restart of the process, with everything in the cache.
            self.notes.line(FAULT_OFF)?;
            return kill_self();
        }
        self.log.close()?;
        self.notes.fact("closed")
    }
}

static LOOSE_NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

fn word_of(observed: Observed) -> &'static str {
    if observed.is_new() { "new" } else { "dup" }
}

fn claim_word<C: EffectClass>(verdict: &ClaimVerdict<C>) -> &'static str {
    match verdict {
        ClaimVerdict::New(_) | ClaimVerdict::Takeover { .. } | ClaimVerdict::Retry { .. } => {
            "granted"
        }
        ClaimVerdict::Busy { .. } => "busy",
        ClaimVerdict::Duplicate(_) => "dup",
        ClaimVerdict::Backoff { .. } => "backoff",
        ClaimVerdict::Rejected { .. } => "rejected",
        ClaimVerdict::InDoubt(_) => "in-doubt",
        _ => "other",
    }
}

fn kill_self() -> Fallible<()> {
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)?;
    Ok(())
}
