//! One-time tokens: each answer told apart, and no token ever takes effect twice.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use idemlog::testing::sim::{
    CrashKind, CrashOptions, Fault, FaultKind, PowerCut, Rng, SimDisk, for_each_crash_point,
};
use idemlog::testing::{Clock, ManualClock, Reading};
use idemlog::{
    CommitVerdict, DedupLog, Durability, ErrorKind, KeyState, NamespaceKind, NamespaceOptions,
    Options, Outcome, RedeemVerdict, Redemption, Repair, Result, Retention, TokenOptions,
    TokenPolicy, Tokens, WhenFull,
};

use crate::support::env_u64;

const START_MS: u64 = 1_700_000_000_000;
const POLICIES: [TokenPolicy; 2] = [TokenPolicy::Single, TokenPolicy::Replay];
const HOUR: Duration = Duration::from_secs(3600);

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(START_MS))
}

fn options(clock: Arc<dyn Clock>) -> Options {
    Options::new()
        .segment_bytes(8192)
        .background(false)
        .clock(clock)
}

fn open(disk: &SimDisk, clock: &Arc<ManualClock>) -> DedupLog {
    options(clock.clone()).open_on(disk.dir()).unwrap()
}

fn token_options(policy: TokenPolicy) -> TokenOptions {
    TokenOptions::new(policy)
        .lease(Duration::from_secs(60))
        .outcome_bytes_max(16)
}

fn tokens(log: &DedupLog, policy: TokenPolicy) -> Tokens {
    log.tokens("t", token_options(policy)).unwrap()
}

fn granted(tokens: &Tokens, token: impl AsRef<str>, bind: &str) -> Redemption {
    match tokens.redeem(token, bind).unwrap() {
        RedeemVerdict::Granted(redemption) => redemption,
        refused => panic!("{refused:?}"),
    }
}

fn commit(mut redemption: Redemption, outcome: &[u8]) {
    let verdict = redemption.commit(outcome).unwrap();
    assert!(
        matches!(verdict, CommitVerdict::Committed { .. }),
        "{verdict:?}"
    );
}

/// Says what a verdict is in one word, with the outcome where there is one.
fn word(verdict: &RedeemVerdict) -> String {
    match verdict {
        RedeemVerdict::Granted(_) => "granted".to_owned(),
        RedeemVerdict::Used { .. } => "used".to_owned(),
        RedeemVerdict::Replayed(done) => match &done.outcome {
            Outcome::Kept(bytes) => format!("replayed {}", String::from_utf8_lossy(bytes)),
            Outcome::Dropped => "replayed nothing".to_owned(),
        },
        RedeemVerdict::Busy { .. } => "busy".to_owned(),
        RedeemVerdict::Expired => "expired".to_owned(),
        RedeemVerdict::WrongBinding => "wrong binding".to_owned(),
        RedeemVerdict::Unknown => "unknown".to_owned(),
        RedeemVerdict::Forged => "forged".to_owned(),
    }
}

fn redeem(tokens: &Tokens, token: impl AsRef<str>, bind: &str) -> String {
    word(&tokens.redeem(token, bind).unwrap())
}

/// What a token that was used with this outcome is answered with.
fn after_use(policy: TokenPolicy, outcome: &str) -> String {
    match policy {
        TokenPolicy::Single => "used".to_owned(),
        TokenPolicy::Replay => format!("replayed {outcome}"),
    }
}

fn other_than(policy: TokenPolicy) -> TokenPolicy {
    match policy {
        TokenPolicy::Single => TokenPolicy::Replay,
        TokenPolicy::Replay => TokenPolicy::Single,
    }
}

#[test]
fn each_answer_is_told_apart() {
    for policy in POLICIES {
        let clock = clock();
        let log = open(&SimDisk::new(), &clock);
        let tokens = tokens(&log, policy);
        let token = tokens.issue(HOUR, "anna").unwrap();
        let late = tokens.issue(Duration::from_secs(10), "anna").unwrap();
        let never_over = tokens.issue(Retention::Forever, "").unwrap();
        assert_eq!(redeem(&tokens, &token, "bob"), "wrong binding");
        assert_eq!(redeem(&tokens, &token, ""), "wrong binding");
        assert_eq!(redeem(&tokens, "it1_", "anna"), "forged");
        let other = log.tokens("u", token_options(policy)).unwrap();
        assert_eq!(redeem(&other, &token, "anna"), "unknown");

        let first = granted(&tokens, &token, "anna");
        assert_eq!(first.attempt(), 1);
        assert_eq!(redeem(&tokens, &token, "anna"), "busy");
        commit(first, b"done");
        for _ in 0..2 {
            let again = redeem(&tokens, &token, "anna");
            assert_eq!(again, after_use(policy, "done"));
        }
        assert_eq!(redeem(&tokens, &token, "bob"), "wrong binding");
        if let RedeemVerdict::Used { at_ms } = tokens.redeem(&token, "anna").unwrap() {
            assert_eq!(at_ms, START_MS);
        }

        clock.advance_ms(9_999);
        assert_eq!(redeem(&tokens, &late, "anna"), "granted");
        clock.advance_ms(1);
        assert_eq!(redeem(&tokens, &late, "anna"), "expired");
        assert_eq!(redeem(&tokens, &late, "bob"), "wrong binding");
        clock.advance_ms(3_600_000);
        assert_eq!(redeem(&tokens, &token, "anna"), "expired");
        clock.advance_ms(100 * 365 * 86_400_000);
        assert_eq!(redeem(&tokens, &never_over, ""), "granted");
    }
}

#[test]
fn a_redemption_without_a_commit_gives_the_token_back() {
    let log = open(&SimDisk::new(), &clock());
    let tokens = tokens(&log, TokenPolicy::Replay);
    let token = tokens.issue(HOUR, "").unwrap();
    let derived = {
        let dropped = granted(&tokens, &token, "");
        dropped.derived_key("mail")
    };
    let released = granted(&tokens, &token, "");
    assert_eq!(released.derived_key("mail"), derived);
    assert!(released.release().unwrap().is_applied());
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _redemption = granted(&tokens, &token, "");
        panic!("the effect fails");
    }));
    assert!(panicked.is_err());
    commit(granted(&tokens, &token, ""), b"done");
    assert_eq!(redeem(&tokens, &token, ""), "replayed done");
}

#[test]
fn a_redeemer_that_hangs_is_taken_over_and_fenced() {
    let clock = clock();
    let log = open(&SimDisk::new(), &clock);
    let tokens = tokens(&log, TokenPolicy::Replay);
    let token = tokens.issue(HOUR, "").unwrap();
    let mut slow = granted(&tokens, &token, "");
    clock.advance_ms(59_000);
    assert!(slow.renew(Duration::from_secs(60)).unwrap().is_applied());
    clock.advance_ms(59_000);
    assert_eq!(redeem(&tokens, &token, ""), "busy");
    clock.advance_ms(1_000);
    let quick = granted(&tokens, &token, "");
    assert_eq!(quick.attempt(), 2);
    assert!(quick.epoch() > slow.epoch());
    commit(quick, b"quick");
    let verdict = slow.commit(b"slow").unwrap();
    assert!(
        matches!(verdict, CommitVerdict::Fenced { .. }),
        "{verdict:?}"
    );
    assert_eq!(redeem(&tokens, &token, ""), "replayed quick");
}

/// A commit that comes after the token's end counts, and can be repeated.
#[test]
fn what_was_granted_in_time_is_committed_also_later() {
    for policy in POLICIES {
        let clock = clock();
        let log = open(&SimDisk::new(), &clock);
        let tokens = tokens(&log, policy);
        let token = tokens.issue(Duration::from_secs(30), "").unwrap();
        let mut redemption = granted(&tokens, &token, "");
        clock.advance_ms(45_000);
        assert_eq!(redeem(&tokens, &token, ""), "expired");
        let verdict = redemption.commit(b"late").unwrap();
        assert!(matches!(verdict, CommitVerdict::Committed { .. }));
        clock.advance_ms(5_000);
        let verdict = redemption.commit(b"late").unwrap();
        assert_eq!(verdict, CommitVerdict::AlreadyCommitted);
    }
}

#[test]
fn issuing_writes_nothing_and_another_opener_knows_the_token() {
    for policy in POLICIES {
        let (disk, clock) = (SimDisk::new(), clock());
        let log = open(&disk, &clock);
        let before = tokens(&log, policy);
        let steps = disk.steps();
        let all: Vec<_> = (0..100)
            .map(|n| before.issue(HOUR, format!("user-{n}")).unwrap())
            .collect();
        assert_eq!(disk.steps(), steps);
        assert_eq!(log.stats().unsettled_count, 0);
        commit(granted(&before, &all[0], "user-0"), b"done");
        drop(before);
        // A power cut, and everything that no flush has covered is gone.
        let disk = disk.after_power_cut(&mut PowerCut::drop_all());
        let log = open(&disk, &clock);
        let after = tokens(&log, policy);
        assert_eq!(redeem(&after, &all[0], "user-0"), after_use(policy, "done"));
        assert_eq!(redeem(&after, &all[1], "user-0"), "wrong binding");
        assert_eq!(redeem(&after, &all[1], "user-1"), "granted");
    }
}

#[test]
fn the_durability_of_the_store_is_not_that_of_a_used_token() {
    let (disk, clock) = (SimDisk::new(), clock());
    let log = options(clock.clone())
        .durability(Durability::Buffered)
        .open_on(disk.dir())
        .unwrap();
    let before = tokens(&log, TokenPolicy::Single);
    let token = before.issue(HOUR, "").unwrap();
    commit(granted(&before, &token, ""), b"");
    let disk = disk.after_power_cut(&mut PowerCut::drop_all());
    let log = open(&disk, &clock);
    let after = tokens(&log, TokenPolicy::Single);
    assert_eq!(redeem(&after, &token, ""), "used");
}

#[test]
fn a_policy_is_declared_once() {
    let (disk, clock) = (SimDisk::new(), clock());
    for policy in POLICIES {
        let other = other_than(policy);
        let name = policy.name();
        let log = open(&disk, &clock);
        let first = log.tokens(name, token_options(policy)).unwrap();
        let error = log.tokens(name, token_options(other)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let found = format!("found={name}");
        assert!(error.to_string().contains(&found), "{error}");
        drop(first);
        log.close().unwrap();
        let log = open(&disk, &clock);
        let error = log.tokens(name, token_options(other)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        log.tokens(name, token_options(policy)).unwrap();
        // What they need is a namespace like others, for lists and for who knows no tokens.
        let kind = log.kind_of(&format!("token:{name}"));
        assert_eq!(kind, Some(NamespaceKind::Internal));
    }
}

/// Threads that open the same new name at once do not get in each other's way.
#[test]
fn many_declare_the_same_policy() {
    let log = DedupLog::in_memory().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for n in 0..20 {
                    let options = TokenOptions::new(TokenPolicy::Single);
                    log.tokens(&n.to_string(), options).unwrap();
                }
            });
        }
    });
}

#[test]
fn a_store_that_forgets_early_has_no_tokens() {
    let log = options(clock())
        .when_full(WhenFull::EvictOldest)
        .open_on(SimDisk::new().dir())
        .unwrap();
    let error = log.tokens("t", token_options(TokenPolicy::Single));
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn tokens_of_a_purged_name_are_unknown() {
    let log = open(&SimDisk::new(), &clock());
    let before = tokens(&log, TokenPolicy::Single);
    let used = before.issue(HOUR, "").unwrap();
    let unused = before.issue(HOUR, "").unwrap();
    commit(granted(&before, &used, ""), b"");
    log.purge("token:t", false).unwrap();
    let error = before.redeem(&unused, "").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    // Another policy may be declared now.
    let after = tokens(&log, TokenPolicy::Replay);
    assert_eq!(redeem(&after, &used, ""), "unknown");
    assert_eq!(redeem(&after, &unused, ""), "unknown");
}

/// Story: the record of a use was in a sector that went bad. A repair keeps the rest, and with it
/// the claim before that use: the token would have been granted again. So a repair that loses
/// anything lets no older token be known; one that loses nothing changes nothing.
#[test]
fn after_a_repair_that_loses_something_older_tokens_are_unknown() {
    let (disk, clock) = (SimDisk::seeded(1), clock());
    let log = open(&disk, &clock);
    let before = tokens(&log, TokenPolicy::Replay);
    let token = before.issue(HOUR, "").unwrap();
    commit(granted(&before, &token, ""), b"used-up");
    drop(before);
    log.close().unwrap();
    let disk = disk.after_kill();
    for damaged in [false, true] {
        if damaged {
            let mut names = disk.file_names().into_iter();
            let name = names.find(|name| name.starts_with("seg-")).unwrap();
            let mut bytes = disk.read_file(&name).unwrap();
            let at = bytes.windows(7).position(|part| part == b"used-up");
            bytes[at.unwrap()] ^= 1;
            disk.write_file(&name, bytes);
        }
        let target = SimDisk::seeded(2);
        let report = Repair::of("simulated")
            .clock(clock.clone())
            .write_on(disk.after_kill().dir().as_ref(), target.dir())
            .unwrap();
        assert_eq!(report.is_whole(), !damaged);
        let log = open(&target, &clock);
        let after = tokens(&log, TokenPolicy::Replay);
        let expected = if damaged {
            "unknown"
        } else {
            "replayed used-up"
        };
        assert_eq!(redeem(&after, &token, ""), expected);
        let token = after.issue(HOUR, "").unwrap();
        assert_eq!(redeem(&after, &token, ""), "granted");
    }
}

#[test]
fn a_record_that_other_calls_have_written_is_an_error() {
    let log = open(&SimDisk::new(), &clock());
    let tokens = tokens(&log, TokenPolicy::Single);
    let token = tokens.issue(HOUR, "").unwrap();
    let redemption = granted(&tokens, &token, "");
    let pending = log.pending().unwrap();
    assert_eq!(pending[0].namespace, "token:t");
    assert!(matches!(pending[0].state, KeyState::Pending { .. }));
    drop(redemption);
    let options = NamespaceOptions::new().outcome_bytes_max(16);
    let space = log.namespace::<idemlog::Internal>("token:t", options);
    let claim = space.unwrap().claim(&pending[0].key).unwrap().claim();
    let failure = idemlog::Failure::permanent("by hand");
    assert!(claim.unwrap().fail(failure).unwrap().is_applied());
    let error = tokens.redeem(&token, "").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}

#[test]
fn the_text_of_a_token_is_url_safe_and_not_shown_by_debug() {
    let log = open(&SimDisk::new(), &clock());
    let tokens = tokens(&log, TokenPolicy::Single);
    let one = tokens.issue(HOUR, "a").unwrap();
    assert_ne!(one, tokens.issue(HOUR, "a").unwrap());
    let is_safe = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    assert!(one.as_str().chars().all(is_safe), "{one}");
    assert_eq!(one.as_str().len(), 88);
    for shown in [format!("{one:?}"), format!("{tokens:?}")] {
        assert!(!shown.contains(&one.as_str()[10..20]), "{shown}");
    }
}

/// A clock in which time passes with each reading.
#[derive(Debug)]
struct Hurried {
    clock: ManualClock,
    step_ms: AtomicU64,
}

impl Clock for Hurried {
    fn read(&self) -> Reading {
        self.clock.advance_ms(self.step_ms.load(Ordering::Relaxed));
        self.clock.read()
    }

    fn boot_id(&self) -> [u8; 16] {
        self.clock.boot_id()
    }
}

/// Story: the token is still valid when it is looked at, and when its claim is decided a moment
/// later, the mark of its use has expired with it. It is not granted again.
#[test]
fn a_token_that_expires_while_it_is_redeemed_is_not_granted_again() {
    let mut words = BTreeMap::<String, u32>::new();
    for left_ms in 0..60 {
        let hurried = Arc::new(Hurried {
            clock: ManualClock::new(START_MS),
            step_ms: AtomicU64::new(0),
        });
        let log = options(hurried.clone())
            .open_on(SimDisk::memory().dir())
            .unwrap();
        // A lease over which a mark is kept anyway must not hide the case.
        let options = token_options(TokenPolicy::Single).lease(Duration::ZERO);
        let tokens = log.tokens("t", options).unwrap();
        let token = tokens.issue(Duration::from_secs(10), "").unwrap();
        commit(granted(&tokens, &token, ""), b"");
        hurried.clock.advance_ms(10_000 - left_ms);
        hurried.step_ms.store(7, Ordering::Relaxed);
        let word = redeem(&tokens, &token, "");
        assert_ne!(word, "granted", "left_ms={left_ms}");
        *words.entry(word).or_default() += 1;
    }
    assert!(words["used"] > 0 && words["expired"] > 0, "{words:?}");
}

/// What a scenario was told before it died.
struct Told {
    clock: Arc<ManualClock>,
    /// `tokens` has returned.
    declared: bool,
    issued: Vec<String>,
    committed: BTreeMap<usize, &'static str>,
}

impl Told {
    fn new() -> Told {
        Told {
            clock: clock(),
            declared: false,
            issued: Vec::new(),
            committed: BTreeMap::new(),
        }
    }
}

/// What the redeemer of each form commits; the last one commits nothing.
const OUTCOMES: [&str; 4] = ["zero", "one", "two", "none"];

/// Issues and redeems while segments fill up, are sealed and are dropped.
fn use_tokens(disk: &SimDisk, policy: TokenPolicy, told: &RefCell<Told>) -> Result<()> {
    let clock = told.borrow().clock.clone();
    let log = options(clock.clone()).open_on(disk.dir())?;
    let tokens = log.tokens("t", token_options(policy))?;
    told.borrow_mut().declared = true;
    let filter = log.filter(
        "filler",
        NamespaceOptions::new()
            .outcome_bytes_max(0)
            .durability(Durability::Buffered)
            .retention(Duration::from_secs(60)),
    )?;
    let mut fillers = 0;
    let mut fill = || -> Result<()> {
        for _ in 0..40 {
            fillers += 1;
            assert!(filter.observe(format!("{fillers:0>200}"))?.is_new());
        }
        Ok(())
    };
    for (form, ttl_s) in [3600, 30, 3600].into_iter().enumerate() {
        let token = tokens.issue(Duration::from_secs(ttl_s), "anna")?;
        told.borrow_mut().issued.push(token.to_string());
        // The first redeemer gives up, the second one commits.
        drop(tokens.redeem(&token, "anna")?);
        if let RedeemVerdict::Granted(mut redemption) = tokens.redeem(&token, "anna")? {
            fill()?;
            let verdict = redemption.commit(OUTCOMES[form].as_bytes())?;
            assert!(matches!(verdict, CommitVerdict::Committed { .. }));
            told.borrow_mut().committed.insert(form, OUTCOMES[form]);
        }
        clock.advance_ms(100_000);
        log.maintain()?;
    }
    let last = tokens.issue(HOUR, "anna")?;
    told.borrow_mut().issued.push(last.to_string());
    let held = tokens.redeem(&last, "anna")?;
    assert!(matches!(held, RedeemVerdict::Granted(_)));
    drop(log);
    Ok(())
}

/// Opens what a crash has left: every token is answered as what was told demands, takes effect
/// once if it had not, and is used then, also after another power cut.
fn judge(disk: &SimDisk, policy: TokenPolicy, told: &Told, counts: &mut BTreeMap<String, u32>) {
    let log = open(disk, &told.clock);
    if told.declared {
        let conflict = log.tokens("t", token_options(other_than(policy)));
        assert_eq!(conflict.unwrap_err().kind(), ErrorKind::Invalid);
    }
    let tokens = tokens(&log, policy);
    let mut fates = Vec::new();
    for (form, token) in told.issued.iter().enumerate() {
        let first = tokens.redeem(token, "anna").unwrap();
        let found = word(&first);
        *counts.entry(found.clone()).or_default() += 1;
        if told.committed.contains_key(&form) {
            assert_ne!(found, "granted", "{form} was used");
        }
        let fate = match first {
            RedeemVerdict::Granted(redemption) => {
                commit(redemption, b"after");
                after_use(policy, "after")
            }
            _ => {
                let fine = [after_use(policy, OUTCOMES[form]), "expired".to_owned()];
                assert!(fine.contains(&found), "{form}: {found}");
                found
            }
        };
        assert_eq!(redeem(&tokens, token, "anna"), fate, "{form}");
        assert_eq!(redeem(&tokens, token, "bob"), "wrong binding");
        fates.push(fate);
    }
    drop((tokens, log));
    let disk = disk.after_power_cut(&mut PowerCut::drop_all());
    let log = open(&disk, &told.clock);
    let again = self::tokens(&log, policy);
    for (form, (token, fate)) in told.issued.iter().zip(fates).enumerate() {
        assert_eq!(redeem(&again, token, "anna"), fate, "{form}");
    }
}

#[test]
fn no_crash_lets_a_token_take_effect_twice() {
    for policy in POLICIES {
        let told = RefCell::new(Told::new());
        let whole = SimDisk::seeded(1);
        use_tokens(&whole, policy, &told).unwrap();
        assert_eq!(told.borrow().committed.len(), 3);
        let scenario = |disk: &SimDisk| {
            told.replace(Told::new());
            drop(use_tokens(disk, policy, &told));
        };
        let options = CrashOptions {
            outcomes_max: 8,
            seeded_count: 2,
            inside_count: 1,
            images_min: env_u64("IDEMLOG_IMAGES", 0),
            ..CrashOptions::default()
        };
        let mut counts = BTreeMap::new();
        let totals = for_each_crash_point(&options, scenario, |state| {
            let told = told.borrow();
            if !matches!(state.kind, CrashKind::Kill | CrashKind::KillInside { .. }) {
                told.clock.reboot();
            }
            judge(&state.disk, policy, &told, &mut counts);
        });
        println!("counts: policy={policy:?} totals={totals:?} counts={counts:?}");
        for word in ["granted", "expired", &after_use(policy, "zero")] {
            assert!(counts[word] > 20, "nothing was at stake: {word}");
        }
    }
}

/// Each call to the disk fails in turn, once or from then on: whatever the redeemers were told
/// holds for the next opener, after a kill and after a power cut.
#[test]
fn no_failing_call_lets_a_token_take_effect_twice() {
    let whole = SimDisk::seeded(1);
    let told = RefCell::new(Told::new());
    use_tokens(&whole, TokenPolicy::Single, &told).unwrap();
    let steps = whole.steps();
    let (mut failed, mut counts) = (0, BTreeMap::new());
    for policy in POLICIES {
        for step in 0..steps {
            let kind = [FaultKind::Io, FaultKind::NoSpace][step as usize % 2];
            for fault in [Fault::once(step, kind), Fault::sticky(step, kind)] {
                let disk = SimDisk::seeded(1);
                disk.fail(fault);
                told.replace(Told::new());
                failed += u32::from(use_tokens(&disk, policy, &told).is_err());
                let told = told.borrow();
                disk.clear_faults();
                judge(&disk.after_kill(), policy, &told, &mut counts);
                told.clock.reboot();
                let cut = disk.after_power_cut(&mut PowerCut::drop_all());
                judge(&cut, policy, &told, &mut counts);
            }
        }
    }
    println!("counts: steps={steps} failed={failed} counts={counts:?}");
    assert!(failed > 100 && counts["granted"] > 100 && counts["used"] > 100);
}

/// Many redeem the same tokens at once, and some of them give up: each token is committed once,
/// and everybody gets that outcome in the end.
#[test]
fn one_of_many_redeemers_has_it() {
    const THREADS: u64 = 8;
    const TOKENS: usize = 30;
    let log = DedupLog::in_memory().unwrap();
    let tokens = log
        .tokens("t", TokenOptions::new(TokenPolicy::Replay))
        .unwrap();
    let all: Vec<_> = (0..TOKENS)
        .map(|_| tokens.issue(HOUR, "").unwrap())
        .collect();
    let committed = AtomicU64::new(0);
    let redeem_all = |thread: u64| {
        let mut rng = Rng::new(thread);
        let mut outcomes = Vec::new();
        for token in &all {
            outcomes.push(loop {
                match tokens.redeem(token, "").unwrap() {
                    RedeemVerdict::Granted(redemption) if rng.below(3) == 0 => drop(redemption),
                    RedeemVerdict::Granted(redemption) => {
                        // The effect takes its time: others come meanwhile.
                        (0..20).for_each(|_| std::thread::yield_now());
                        commit(redemption, &[thread as u8]);
                        committed.fetch_add(1, Ordering::Relaxed);
                    }
                    RedeemVerdict::Replayed(done) => break done.outcome,
                    RedeemVerdict::Busy { .. } => std::thread::yield_now(),
                    refused => panic!("{refused:?}"),
                }
            });
        }
        outcomes
    };
    let told: Vec<Vec<Outcome>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                scope.spawn({
                    let redeem_all = &redeem_all;
                    move || redeem_all(thread)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_eq!(committed.load(Ordering::Relaxed), TOKENS as u64);
    assert!(told.iter().all(|outcomes| *outcomes == told[0]));
}

/// Random redeemers, clocks that step and boots that begin with any wall time, upkeep that drops
/// what has expired, kills and power cuts: whatever happens, each token is committed once.
#[test]
fn no_clock_lets_a_token_take_effect_twice() {
    let seed = env_u64("IDEMLOG_SEED", 1);
    let cases = env_u64("IDEMLOG_CASES", 60);
    let mut counts = BTreeMap::<String, u32>::new();
    for case in seed..seed + cases {
        println!("tokens: IDEMLOG_SEED={case} IDEMLOG_CASES=1 repeats this");
        random_redeemers(case, &mut counts);
    }
    println!("counts: {counts:?}");
    if cases >= 60 {
        for word in ["granted", "used", "replayed x", "expired"] {
            assert!(counts[word] > 10, "nothing was at stake: {word}");
        }
    }
}

fn random_redeemers(seed: u64, counts: &mut BTreeMap<String, u32>) {
    let mut rng = Rng::new(seed);
    let clock = clock();
    let policy = POLICIES[rng.below(2)];
    let mut disk = SimDisk::seeded(seed);
    let mut log = open(&disk, &clock);
    let mut all: Vec<(String, u32)> = Vec::new();
    let mut fillers = 0;
    for _ in 0..60 {
        let tokens = tokens(&log, policy);
        match rng.below(10) {
            0 => {
                let ttl = Duration::from_secs([1, 60, 1800, 7200][rng.below(4)]);
                all.push((tokens.issue(ttl, "").unwrap().to_string(), 0));
            }
            1..=4 if !all.is_empty() => {
                let at = rng.below(all.len());
                let (token, used) = &mut all[at];
                let verdict = tokens.redeem(&*token, "").unwrap();
                *counts.entry(word(&verdict)).or_default() += 1;
                if let RedeemVerdict::Granted(redemption) = verdict {
                    commit(redemption, b"x");
                    *used += 1;
                    assert_eq!(*used, 1, "seed={seed}: a token took effect twice");
                }
            }
            5 => clock.advance_ms([1, 999, 60_000, 1_800_000][rng.below(4)]),
            6 => {
                let wall = clock.read().wall_ms;
                let step = [1_000, 200_000, 3_600_000, 90_000_000][rng.below(4)];
                clock.set_wall_ms(match rng.below(2) {
                    0 => wall + step,
                    _ => wall.saturating_sub(step),
                });
            }
            7 => {
                let options = NamespaceOptions::new()
                    .outcome_bytes_max(0)
                    .retention(Duration::from_secs(1));
                let filler = log.filter("filler", options).unwrap();
                for _ in 0..40 {
                    fillers += 1;
                    let key = format!("{fillers:0>200}");
                    assert!(filler.observe(key).unwrap().is_new());
                }
            }
            8 => log.maintain().unwrap(),
            _ => {
                let next = if rng.below(2) == 0 {
                    disk.after_kill()
                } else {
                    clock.reboot();
                    disk.after_power_cut(&mut PowerCut::seeded(rng.next_u64()))
                };
                drop(tokens);
                drop(log);
                disk = next;
                log = open(&disk, &clock);
            }
        }
    }
}
