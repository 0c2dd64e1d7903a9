//! Random calls, clock steps, kills and reopens against an independent oracle.
//!
//! `IDEMLOG_SEED` repeats one case, `IDEMLOG_CASES` says how many are run; of many it tells after
//! each `CASES_TOLD` how far it is.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idemlog::testing::ManualClock;
use idemlog::testing::sim::{Rng, SimDisk};
use idemlog::{
    DedupLog, Durability, Failure, Filter, Fingerprint, KeyState, NamespaceKind, ObserveOptions,
    Options, Outcome, Probed, Resolution, Retention, Stamp,
};

use crate::support::desk::{Desk, Give, Probe, Said, open_desk, options_of, ticket_of};
use crate::support::env_u64;
use crate::support::oracle::{Answer, Ask, Changed, How, Key, Oracle, Spec};

const START_MS: u64 = 1_700_000_000_000;
const SLACK_MS: u64 = 5 * 60 * 1000;
const DAY_MS: u64 = 86_400_000;
const LEVELS: [Durability; 3] = [Durability::Buffered, Durability::Process, Durability::Power];
/// The scratch key fails until this much later: what is left of it tells trusted time.
const FAR_MS: u64 = 10 * 365 * DAY_MS;
/// After so many cases progress is told.
const CASES_TOLD: u64 = 10_000;
const FILTER: usize = 0;
const SCRATCH: usize = 1;

#[test]
fn random_calls_agree_with_the_oracle() {
    let only = std::env::var("IDEMLOG_SEED")
        .ok()
        .map(|seed| seed.parse().unwrap());
    let seeds = match only {
        Some(seed) => seed..seed + 1,
        None => 0..env_u64("IDEMLOG_CASES", 1000),
    };
    let cases = seeds.end - seeds.start;
    // Goes on after failures, to count them by message.
    let survey = env_u64("IDEMLOG_SURVEY", 0) > 0;
    let mut failures: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    let mut totals = BTreeMap::new();
    for seed in seeds {
        if survey {
            eprintln!("seed {seed}");
        }
        let mut case = Case::new(seed);
        let ran = catch_unwind(AssertUnwindSafe(|| case.run()));
        if let Err(panic) = ran {
            if survey {
                let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
                let text = text.chars().take(40).collect();
                failures.entry(text).or_insert((0, seed)).0 += 1;
                std::mem::forget(case);
                continue;
            }
            eprintln!("model: IDEMLOG_SEED={seed} repeats this");
            let shown = if only.is_some() { usize::MAX } else { 40 };
            for line in case.trace.iter().rev().take(shown).rev() {
                eprintln!("  {line}");
            }
            // Guards must not be dropped into a store that panicked.
            std::mem::forget(case);
            std::panic::resume_unwind(panic);
        }
        for (name, count) in case.counts {
            *totals.entry(name).or_insert(0) += count;
        }
        let done = seed + 1;
        if done.is_multiple_of(CASES_TOLD) && done < cases {
            let calls: u64 = totals.values().sum();
            println!("model: cases={done} of={cases} counted={calls}");
        }
    }
    println!("model: cases={cases} counts={totals:?}");
    for (text, (count, seed)) in &failures {
        println!("model: failures={count} IDEMLOG_SEED={seed} {text}");
    }
    assert!(failures.is_empty());
}

/// One open store.
struct Opened {
    log: DedupLog,
    filter: Filter,
    /// By namespace; none for the filter.
    desks: Vec<Option<Box<dyn Desk>>>,
}

struct Case {
    rng: Rng,
    disk: SimDisk,
    clock: Arc<ManualClock>,
    oracle: Oracle,
    probe: Probe,
    opened: Option<Opened>,
    segment_bytes: u32,
    level: Durability,
    slack_used_ms: u64,
    /// Trusted time never goes back behind this, whatever crash comes.
    time_floor_ms: u64,
    filler: u32,
    /// Epochs that were held once: tickets of the past.
    past: Vec<(usize, Vec<u8>, Stamp)>,
    /// Epochs of detached claims: dropping their guards ends nothing.
    detached: BTreeSet<Stamp>,
    trace: Vec<String>,
    counts: BTreeMap<&'static str, u64>,
}

impl Case {
    fn new(seed: u64) -> Case {
        let mut rng = Rng::new(seed);
        let segment_bytes = [4096, 8192, 16384][rng.below(3)];
        let outcome_bytes_max = (segment_bytes as usize / 4).saturating_sub(1024).min(700);
        let level = LEVELS[rng.below(3)];
        let mut oracle = Oracle {
            trusted_ms: START_MS,
            wall_ms: START_MS,
            boot_ms: 1000,
            opener: 1,
            ..Oracle::default()
        };
        let spec = |rng: &mut Rng, name: &str, kind| Spec {
            name: name.to_owned(),
            kind,
            retention: retention(rng),
            lease_ms: [500, 2000, 20_000][rng.below(3)],
            settle_ms: [None, None, Some(0), Some(3000)][rng.below(4)],
            attempts_max: [None, None, Some(1), Some(3)][rng.below(4)],
            outcome_bytes_max,
            sliding: rng.below(2) == 0,
            has_probe: rng.below(3) > 0,
        };
        oracle
            .specs
            .push(spec(&mut rng, "filter", NamespaceKind::Filter));
        let scratch = spec(&mut rng, "scratch", NamespaceKind::Internal);
        oracle.specs.push(Spec {
            attempts_max: None,
            retention: Retention::Forever,
            ..scratch
        });
        let kinds = [
            NamespaceKind::Repeatable,
            NamespaceKind::Probeable,
            NamespaceKind::NonRepeatable,
            NamespaceKind::Internal,
        ];
        for kind in kinds {
            oracle.specs.push(spec(&mut rng, kind.name(), kind));
        }
        Case {
            rng,
            disk: SimDisk::memory(),
            clock: Arc::new(ManualClock::new(START_MS)),
            oracle,
            probe: Arc::new(Mutex::new((Probed::Unknown, Vec::new()))),
            opened: None,
            segment_bytes,
            level,
            slack_used_ms: 0,
            time_floor_ms: START_MS,
            filler: 0,
            past: Vec::new(),
            detached: BTreeSet::new(),
            trace: Vec::new(),
            counts: BTreeMap::new(),
        }
    }

    fn run(&mut self) {
        self.open();
        self.plant_scratch();
        for _ in 0..200 {
            self.step();
        }
        self.check_all();
        self.opened.take().unwrap().log.close().unwrap();
    }

    fn log(&self) -> &DedupLog {
        &self.opened.as_ref().unwrap().log
    }

    fn desk(&mut self, space: usize) -> &mut dyn Desk {
        self.opened.as_mut().unwrap().desks[space]
            .as_mut()
            .unwrap()
            .as_mut()
    }

    fn note(&mut self, what: &'static str, line: String) {
        *self.counts.entry(what).or_insert(0) += 1;
        // Long keys and outcomes are one letter repeated.
        let mut short = String::new();
        for word in line.split_inclusive(' ') {
            short.extend(word.chars().take(24));
        }
        let now_ms = self.oracle.trusted_ms.saturating_sub(START_MS);
        self.trace.push(format!("{now_ms} {what} {short}"));
    }

    fn open(&mut self) {
        let log = Options::new()
            .background(false)
            .durability(self.level)
            .segment_bytes(self.segment_bytes)
            .clock(self.clock.clone())
            .open_on(self.disk.dir())
            .unwrap();
        let specs = &self.oracle.specs;
        let filter = log.filter("filter", options_of(&specs[FILTER])).unwrap();
        let mut desks = vec![None];
        for spec in &specs[1..] {
            desks.push(Some(
                open_desk(&log, spec, options_of(spec), &self.probe).unwrap(),
            ));
        }
        self.opened = Some(Opened { log, filter, desks });
    }

    /// Leaves a key behind of which `get` tells trusted time, without writing.
    fn plant_scratch(&mut self) {
        let after = Duration::from_millis(FAR_MS);
        let said = self.desk(SCRATCH).claim(b"t", &Ask::default()).unwrap();
        let failure = Failure::Retryable {
            after,
            error: b"scratch".to_vec(),
        };
        self.oracle
            .claim(SCRATCH, b"t", &Ask::default(), said.epoch, &Probed::Unknown);
        let actual = self.desk(SCRATCH).fail(0, failure.clone()).unwrap();
        assert_eq!(
            actual,
            self.oracle
                .fail(SCRATCH, b"t", said.epoch.unwrap(), &failure)
        );
        self.log().sync().unwrap();
        self.oracle.written();
    }

    /// Reads trusted time, and checks that it moved as it may: `at_least` of `from`, and the wall
    /// clock pushed it by at most `push_max`.
    fn read_time(&mut self, at_least: u64, push_max: u64) -> u64 {
        let KeyState::Failed { retry_after, .. } = self.desk(SCRATCH).get(b"t").unwrap() else {
            panic!("scratch key has changed")
        };
        let now = START_MS + FAR_MS - retry_after.as_millis() as u64;
        assert!(
            now >= at_least,
            "trusted time went back by {} ms",
            at_least - now
        );
        let pushed = now - at_least;
        let lead = self.oracle.wall_ms.saturating_sub(at_least);
        assert!(
            at_least == 0 || pushed <= lead,
            "trusted time ran ahead of the wall clock"
        );
        assert!(
            pushed <= push_max,
            "wall clock pushed by {pushed} of {push_max} ms"
        );
        self.oracle.trusted_ms = now;
        pushed
    }

    fn after_clock(&mut self, boot_passed: u64) {
        let at_least = self.oracle.trusted_ms + boot_passed;
        let left = SLACK_MS - self.slack_used_ms;
        let pushed = self.read_time(at_least, left);
        self.slack_used_ms += pushed;
        if pushed > 0 {
            // A push is durable before it counts.
            self.time_floor_ms = self.oracle.trusted_ms;
        }
    }

    fn step(&mut self) {
        match self.rng.below(100) {
            0..=9 => self.observe(),
            10..=17 => self.observe_fillers(),
            18..=39 => self.claim(),
            40..=43 => self.claim_many(),
            44..=69 => self.guard_op(),
            70..=76 => self.ticket_op(),
            77..=80 => self.resolve(),
            81..=83 => self.forget(),
            84..=89 => self.move_clock(),
            90..=93 => {
                self.note("maintain", String::new());
                self.log().maintain().unwrap();
                self.after_clock(0);
            }
            94 => {
                self.note("sync", String::new());
                self.log().sync().unwrap();
                self.oracle.written();
            }
            95 => self.check_lists(),
            96..=97 => self.reopen(),
            _ => self.kill(),
        }
    }

    fn space(&mut self) -> usize {
        2 + self.rng.below(4)
    }

    fn key(&mut self) -> Vec<u8> {
        let n = self.rng.below(6);
        let len = [1, 8, 16, 40, 200, 300][n];
        vec![b'a' + n as u8; len]
    }

    fn level_of(&mut self) -> (Option<Durability>, Durability) {
        match self.rng.below(6) {
            n @ 0..=2 => (Some(LEVELS[n]), LEVELS[n]),
            _ => (None, self.level),
        }
    }

    fn settle(&mut self, level: Durability) {
        if level >= Durability::Process {
            self.oracle.written();
        }
    }

    fn check_key(&mut self, space: usize, key: &[u8]) {
        let actual = if space == FILTER {
            self.opened.as_ref().unwrap().filter.get(key).unwrap()
        } else {
            self.desk(space).get(key).unwrap()
        };
        let expected = self.oracle.get(space, key);
        assert_eq!(actual, expected, "get space={space} key={}", show(key));
    }

    fn observe(&mut self) {
        let key = self.key();
        let (given, level) = self.level_of();
        let retention = (self.rng.below(3) == 0).then(|| retention(&mut self.rng));
        self.note("observe", format!("{} {retention:?} {level:?}", show(&key)));
        let mut options = ObserveOptions::new();
        if let Some(retention) = retention {
            options = options.retention(retention);
        }
        if let Some(level) = given {
            options = options.durability(level);
        }
        let filter = self.opened.as_ref().unwrap().filter.clone();
        let actual = filter.observe_with(&key, &options).unwrap();
        let expected = self.oracle.observe(FILTER, &key, retention);
        assert_eq!(actual.is_new(), expected);
        if level >= Durability::Process {
            self.oracle.pin(FILTER, &key);
        }
        if expected && level == Durability::Power {
            // The flush came with a mark, which says what time it is.
            self.time_floor_ms = self.oracle.trusted_ms;
        }
        self.check_key(FILTER, &key);
    }

    fn filler_key(n: u32) -> Vec<u8> {
        format!("filler-{n:06}-{}", "x".repeat(n as usize % 7)).into_bytes()
    }

    fn observe_fillers(&mut self) {
        let count = 1 + self.rng.below(90) as u32;
        let mut keys: Vec<Vec<u8>> = Vec::new();
        for _ in 0..count {
            // Some are repeats: of this batch, or of long ago.
            let n = if self.filler > 0 && self.rng.below(8) == 0 {
                self.rng.below(self.filler as usize) as u32
            } else {
                self.filler += 1;
                self.filler
            };
            keys.push(Self::filler_key(n));
        }
        let (given, level) = self.level_of();
        let retention = Retention::For(Duration::from_secs(1 + self.rng.below(30) as u64));
        self.note(
            "observe_many",
            format!("{count} until {} {retention:?} {level:?}", self.filler),
        );
        let mut options = ObserveOptions::new().retention(retention);
        if let Some(level) = given {
            options = options.durability(level);
        }
        let filter = self.opened.as_ref().unwrap().filter.clone();
        let actual = filter.observe_many_with(&keys, &options).unwrap();
        for (key, actual) in keys.iter().zip(actual) {
            let expected = self.oracle.observe(FILTER, key, Some(retention));
            assert_eq!(actual.unwrap().is_new(), expected, "{}", show(key));
        }
        if level >= Durability::Process {
            for key in &keys {
                self.oracle.pin(FILTER, key);
            }
        }
    }

    fn ask(&mut self) -> Ask {
        let fingerprint = match self.rng.below(4) {
            0 => Some(Fingerprint::of(b"one")),
            1 if self.rng.below(4) == 0 => Some(Fingerprint::of(b"two")),
            _ => None,
        };
        let lease_ms = (self.rng.below(4) == 0).then(|| 1 + self.rng.below(5000) as u64);
        Ask {
            fingerprint,
            lease_ms,
            detached: self.rng.below(4) == 0,
        }
    }

    fn plan_probe(&mut self) -> Probed {
        let probed = match self.rng.below(3) {
            0 => Probed::Applied(b"probed".to_vec()),
            1 => Probed::NotApplied,
            _ => Probed::Unknown,
        };
        let probed = match probed {
            Probed::Applied(_) if self.oracle.specs[2].outcome_bytes_max == 0 => {
                Probed::Applied(Vec::new())
            }
            probed => probed,
        };
        *self.probe.lock().unwrap() = (probed.clone(), Vec::new());
        probed
    }

    fn claim(&mut self) {
        let (space, key, ask) = (self.space(), self.key(), self.ask());
        let probed = self.plan_probe();
        self.note(
            "claim",
            format!("{space} {} {ask:?} {probed:?}", show(&key)),
        );
        let asks = self.oracle.asks_probe(space, &key, &ask);
        let said = self.desk(space).claim(&key, &ask).unwrap();
        assert_eq!(
            self.probe.lock().unwrap().1.len(),
            usize::from(asks),
            "probe asked"
        );
        self.judge_claim(space, &key, &ask, said, &probed);
        self.check_key(space, &key);
        if asks {
            if matches!(probed, Probed::Applied(_)) {
                self.settle(self.level);
            }
            *self.counts.entry("probed").or_insert(0) += 1;
        }
    }

    /// What a duplicate rests on survives a kill at the level asked; its prolonging need not.
    fn pin_duplicate(&mut self, space: usize, key: &[u8], said: &Said) {
        if matches!(said.answer, Answer::Duplicate(_)) && self.level >= Durability::Process {
            self.oracle.pin(space, key);
        }
    }

    fn judge_claim(&mut self, space: usize, key: &[u8], ask: &Ask, said: Said, probed: &Probed) {
        self.pin_duplicate(space, key, &said);
        let mut expected = self.oracle.claim(space, key, ask, said.epoch, probed);
        let mut actual = said.answer;
        // What a failed attempt leaves to its retry beside its error is not promised.
        for answer in [&mut expected, &mut actual] {
            if let Answer::Granted {
                how: How::Retry(previous),
                ..
            } = answer
            {
                previous.started = false;
                previous.evidence.clear();
            }
        }
        assert_eq!(actual, expected, "claim space={space} key={}", show(key));
        let name = match &actual {
            Answer::Granted { how, .. } => match how {
                How::New => "new",
                How::Takeover(_) => "takeover",
                How::Retry(_) => "retry",
            },
            Answer::Busy { .. } => "busy",
            Answer::Duplicate(_) => "duplicate",
            Answer::Backoff { .. } => "backoff",
            Answer::Rejected { .. } => "rejected",
            Answer::Dead { .. } => "dead",
            Answer::InDoubt(_) => "in_doubt",
            Answer::Mismatch => "mismatch",
        };
        *self.counts.entry(name).or_insert(0) += 1;
        if let Answer::Granted { .. } = actual {
            let epoch = said.epoch.unwrap();
            self.past.push((space, key.to_vec(), epoch));
            if ask.detached {
                self.detached.insert(epoch);
            }
            if ask.detached || self.oracle.specs[space].attempts_max.is_some() {
                self.oracle.written();
            }
        }
    }

    fn claim_many(&mut self) {
        let (space, ask) = (self.space(), self.ask());
        let count = 1 + self.rng.below(5);
        let keys: Vec<Vec<u8>> = (0..count).map(|_| self.key()).collect();
        let probed = self.plan_probe();
        self.note("claim_many", format!("{space} {count} {ask:?} {probed:?}"));
        // Probes of a batch are asked after the rest of it is decided.
        let (late, early): (Vec<_>, Vec<_>) =
            (0..count).partition(|i| self.oracle.asks_probe(space, &keys[*i], &ask));
        let said = self.desk(space).claim_many(&keys, &ask).unwrap();
        for index in early.into_iter().chain(late) {
            let (key, said) = (keys[index].clone(), said[index].clone());
            self.judge_claim(space, &key, &ask, said, &probed);
        }
        for key in keys {
            self.check_key(space, &key);
        }
    }

    fn give(&mut self, space: usize) -> (Give, Durability) {
        let (durability, level) = self.level_of();
        let max = self.oracle.specs[space].outcome_bytes_max;
        let outcome = match self.rng.below(4) {
            0 => Outcome::Dropped,
            1 => Outcome::Kept(vec![b'o'; max]),
            _ => Outcome::Kept(vec![b'k'; self.rng.below(3).min(max)]),
        };
        let retention = (self.rng.below(3) == 0).then(|| retention(&mut self.rng));
        (
            Give {
                outcome,
                retention,
                durability,
            },
            level,
        )
    }

    fn failure(&mut self) -> Failure {
        let text = vec![b'e'; self.rng.below(20)];
        match self.rng.below(5) {
            0 => Failure::Permanent { error: text },
            1 => Failure::Release,
            2 | 3 => Failure::Unknown { evidence: text },
            _ => {
                let after = Duration::from_millis([0, 1, 700, 60_000][self.rng.below(4)]);
                Failure::Retryable { after, error: text }
            }
        }
    }

    fn compare(
        &mut self,
        space: usize,
        key: &[u8],
        actual: Changed,
        expected: Changed,
        level: Durability,
    ) {
        assert_eq!(actual, expected, "{:?}", self.trace.last());
        match actual {
            Changed::Committed | Changed::Applied(_) => self.settle(level),
            Changed::AlreadyCommitted if level >= Durability::Process => {
                self.oracle.pin(space, key);
            }
            _ => {}
        }
        self.check_key(space, key);
    }

    fn start_level(&self, space: usize) -> Durability {
        match self.oracle.specs[space].kind {
            NamespaceKind::Probeable | NamespaceKind::NonRepeatable => Durability::Power,
            _ => Durability::Buffered,
        }
    }

    fn guard_op(&mut self) {
        let spaces: Vec<usize> = (2..6)
            .filter(|s| !self.desk(*s).held().is_empty())
            .collect();
        if spaces.is_empty() {
            return self.claim();
        }
        let space = spaces[self.rng.below(spaces.len())];
        let held = self.desk(space).held();
        let index = self.rng.below(held.len());
        let held = held[index].clone();
        let key = held.key.clone();
        let shown = format!("{space} {} started={}", show(&key), held.started);
        match self.rng.below(12) {
            0..=2 => {
                let evidence = vec![b'v'; self.rng.below(30)];
                self.note("start", shown);
                let actual = self.desk(space).start(index, &evidence).unwrap();
                let expected = self.oracle.start(space, &key, held.epoch, &evidence);
                let level = self.start_level(space);
                self.compare(space, &key, actual, expected, level);
            }
            3 => {
                let lease = 1 + self.rng.below(30_000) as u64;
                self.note("renew", shown);
                let actual = self.desk(space).renew(index, lease).unwrap();
                let expected = self.oracle.renew(space, &key, held.epoch, lease);
                self.compare(space, &key, actual, expected, Durability::Process);
            }
            4..=6 => {
                let (give, level) = self.give(space);
                self.note("commit", format!("{shown} {give:?}"));
                if let Some(actual) = self.desk(space).commit(index, &give) {
                    let expected =
                        self.oracle
                            .commit(space, &key, held.epoch, &give.outcome, give.retention);
                    self.compare(space, &key, actual.unwrap(), expected, level);
                }
            }
            7 => self.commit_many(space),
            8..=9 => {
                let failure = self.failure();
                self.note("fail", format!("{shown} {failure:?}"));
                let actual = self.desk(space).fail(index, failure.clone()).unwrap();
                let expected = self.oracle.fail(space, &key, held.epoch, &failure);
                let level = match failure {
                    Failure::Release => Durability::Buffered,
                    _ => self.level,
                };
                self.compare(space, &key, actual, expected, level);
            }
            10 => {
                self.note("drop", shown);
                let detached = self.detached.contains(&held.epoch);
                self.desk(space).drop_guard(index);
                let failure = if held.started {
                    Failure::Unknown {
                        evidence: b"owner gave up without an answer".to_vec(),
                    }
                } else {
                    Failure::Release
                };
                if !detached {
                    self.oracle.fail(space, &key, held.epoch, &failure);
                }
                self.check_key(space, &key);
            }
            _ => {
                self.note("detach", shown);
                let ticket = self.desk(space).detach(index);
                assert_eq!(ticket.epoch(), held.epoch);
                assert_eq!(
                    ticket.to_string().parse::<idemlog::Ticket>().unwrap(),
                    ticket
                );
            }
        }
    }

    fn commit_many(&mut self, space: usize) {
        let count = 1 + self.rng.below(4);
        let gives: Vec<(Give, Durability)> = (0..count).map(|_| self.give(space)).collect();
        let (gives, levels): (Vec<Give>, Vec<Durability>) = gives.into_iter().unzip();
        let claims = self.rng.below(2) == 0;
        self.note("commit_many", format!("{space} {count} claims={claims}"));
        let verdicts = if claims {
            let Some(verdicts) = self.desk(space).commit_claims(&gives) else {
                return;
            };
            verdicts
        } else {
            self.desk(space).commit_started(&gives)
        };
        let verdicts = verdicts.unwrap();
        let level = levels.iter().take(verdicts.len()).max().copied();
        let mut wrote = false;
        let mut seen = Vec::new();
        for ((held, actual), give) in verdicts.into_iter().zip(&gives) {
            let expected =
                self.oracle
                    .commit(space, &held.key, held.epoch, &give.outcome, give.retention);
            assert_eq!(actual, expected, "commit_many {}", show(&held.key));
            wrote |= actual == Changed::Committed;
            seen.push(held.key);
        }
        if wrote {
            self.settle(level.unwrap());
        }
        for key in seen {
            self.check_key(space, &key);
        }
    }

    fn ticket_op(&mut self) {
        if self.past.is_empty() {
            return;
        }
        let recent = self.past.len().min(12);
        let index = self.past.len() - 1 - self.rng.below(recent);
        let (space, key, epoch) = self.past[index].clone();
        let ticket = ticket_of(&self.oracle.specs[space].name, &key, epoch);
        let shown = format!("{space} {} epoch={epoch}", show(&key));
        match self.rng.below(4) {
            0 => {
                self.note("start_ticket", shown);
                let actual = self
                    .desk(space)
                    .start_ticket(&ticket, b"by ticket")
                    .unwrap();
                let expected = self.oracle.start(space, &key, epoch, b"by ticket");
                let level = self.start_level(space);
                self.compare(space, &key, actual, expected, level);
            }
            1 => {
                let lease = 1 + self.rng.below(30_000) as u64;
                self.note("renew_ticket", shown);
                let actual = self.desk(space).renew_ticket(&ticket, lease).unwrap();
                let expected = self.oracle.renew(space, &key, epoch, lease);
                self.compare(space, &key, actual, expected, Durability::Process);
            }
            2 => {
                let (give, level) = self.give(space);
                self.note("commit_ticket", format!("{shown} {give:?}"));
                let actual = self.desk(space).commit_ticket(&ticket, &give);
                let expected =
                    self.oracle
                        .commit(space, &key, epoch, &give.outcome, give.retention);
                if expected == Changed::NotStarted {
                    assert_eq!(actual.unwrap_err().kind(), idemlog::ErrorKind::Invalid);
                    return;
                }
                self.compare(space, &key, actual.unwrap(), expected, level);
            }
            _ => {
                let failure = self.failure();
                self.note("fail_ticket", format!("{shown} {failure:?}"));
                let actual = self.desk(space).fail_ticket(&ticket, &failure).unwrap();
                let expected = self.oracle.fail(space, &key, epoch, &failure);
                let level = match failure {
                    Failure::Release => Durability::Buffered,
                    _ => self.level,
                };
                self.compare(space, &key, actual, expected, level);
            }
        }
    }

    fn resolve(&mut self) {
        let doubtful: Vec<Key> = self
            .oracle
            .keys
            .keys()
            .filter(|(space, key)| matches!(self.oracle.get(*space, key), KeyState::InDoubt(_)))
            .cloned()
            .collect();
        let (space, key, epoch) = if doubtful.is_empty() || self.rng.below(4) == 0 {
            let Some(past) = self.past.last().cloned() else {
                return;
            };
            past
        } else {
            let (space, key) = doubtful[self.rng.below(doubtful.len())].clone();
            let epoch = self.oracle.entry(space, &key).unwrap().common.epoch;
            (space, key, epoch)
        };
        let resolution = match self.rng.below(3) {
            0 => Resolution::Applied(Vec::new()),
            1 => Resolution::NotApplied,
            _ => Resolution::Abandon,
        };
        self.note("resolve", format!("{space} {} {resolution:?}", show(&key)));
        let actual = self
            .desk(space)
            .resolve(&key, epoch, resolution.clone())
            .unwrap();
        let expected = self.oracle.resolve(space, &key, epoch, &resolution);
        let level = self.level;
        self.compare(space, &key, actual, expected, level);
    }

    fn forget(&mut self) {
        let key = self.key();
        if self.rng.below(3) == 0 {
            self.note("forget", format!("filter {}", show(&key)));
            let filter = self.opened.as_ref().unwrap().filter.clone();
            assert!(filter.forget(&key).unwrap().is_applied());
            self.oracle.forget(FILTER, &key, true);
            if self.level >= Durability::Process {
                self.oracle.pin(FILTER, &key);
            }
            return self.check_key(FILTER, &key);
        }
        let (space, forced) = (self.space(), self.rng.below(2) == 0);
        self.note("forget", format!("{space} {} forced={forced}", show(&key)));
        let was = self.oracle.entry(space, &key).is_some();
        let actual = self.desk(space).forget(&key, forced).unwrap();
        let expected = self.oracle.forget(space, &key, forced);
        let level = if was {
            self.level
        } else {
            Durability::Buffered
        };
        self.compare(space, &key, actual, expected, level);
    }

    fn move_clock(&mut self) {
        match self.rng.below(8) {
            0..=4 => {
                let ms = match self.rng.below(4) {
                    0 => self.rng.below(5) as u64,
                    1 => self.rng.below(3000) as u64,
                    // To the very millisecond of somebody's expiry, or just before it.
                    2 => self.ms_to_an_expiry(),
                    _ => self.rng.below(40_000) as u64,
                };
                self.note("advance", format!("{ms}"));
                self.clock.advance_ms(ms);
                self.oracle.wall_ms += ms;
                self.oracle.boot_ms += ms;
                self.after_clock(ms);
            }
            n => {
                let wall = match n {
                    5 => self.oracle.wall_ms + self.rng.below(60_000) as u64,
                    6 => self.oracle.wall_ms - self.rng.below(100_000) as u64,
                    _ if self.rng.below(2) == 0 => self.oracle.wall_ms + 30 * DAY_MS,
                    _ => self.oracle.trusted_ms,
                };
                self.note("wall", format!("{wall}"));
                self.clock.set_wall_ms(wall);
                self.oracle.wall_ms = wall;
                self.after_clock(0);
            }
        }
    }

    fn ms_to_an_expiry(&mut self) -> u64 {
        let now = self.oracle.trusted_ms;
        let ends: Vec<u64> = self
            .oracle
            .keys
            .values()
            .filter_map(|entry| Some(entry.expires_s? * 1000))
            .filter(|end| *end > now && *end < now + 100_000)
            .collect();
        match ends.len() {
            0 => 1,
            n => ends[self.rng.below(n)] - now - self.rng.below(2) as u64,
        }
    }

    fn reopen(&mut self) {
        let reboot = self.rng.below(4) == 0;
        let wipe = self.rng.below(3) == 0;
        self.tally();
        self.note("reopen", format!("reboot={reboot} wipe={wipe}"));
        let Opened { log, filter, desks } = self.opened.take().unwrap();
        log.close().unwrap();
        drop((filter, desks));
        self.oracle.written();
        self.next_open(reboot, wipe, false);
        self.check_all();
    }

    fn next_open(&mut self, reboot: bool, wipe: bool, killed: bool) {
        if wipe {
            self.wipe_index();
        }
        if reboot {
            self.clock.reboot();
            self.oracle.boot_ms = 1000;
            self.slack_used_ms = 0;
        }
        self.oracle.opener += 1;
        self.open();
        let bound = if reboot { DAY_MS } else { 0 };
        let left = SLACK_MS - self.slack_used_ms;
        if killed && reboot {
            // What passed since the last durable reading is known to the lost boot clock only.
            let before = self.oracle.trusted_ms;
            self.read_time(0, u64::MAX);
            let now = self.oracle.trusted_ms;
            let floor = self.time_floor_ms;
            assert!(now >= floor, "trusted time went back by {} ms", floor - now);
            let pushed = self.oracle.wall_ms.min(before + DAY_MS + SLACK_MS);
            assert!(now <= before.max(pushed), "trusted time ran ahead to {now}");
            self.time_floor_ms = now;
            return;
        }
        let pushed = self.read_time(self.oracle.trusted_ms, bound + left);
        // The jump after a reboot has a bound of its own.
        self.slack_used_ms += if reboot { 0 } else { pushed };
        self.time_floor_ms = self.oracle.trusted_ms;
    }

    /// Index runs and filters are derived: an open does without them.
    fn wipe_index(&mut self) {
        for name in self.disk.file_names() {
            if name.ends_with(".idx") || name.ends_with(".flt") {
                assert!(self.disk.remove_file(&name));
            }
        }
    }

    /// Adds up what the store has done in the background.
    fn tally(&mut self) {
        let stats = self.log().stats();
        let done = [
            ("stat_seals", stats.seals_count),
            ("stat_drops", stats.drops_count),
            ("stat_carried", stats.carried_count),
        ];
        for (name, count) in done {
            *self.counts.entry(name).or_insert(0) += count;
        }
    }

    /// A kill keeps a prefix of what was answered, and all that was as durable as asked.
    fn kill(&mut self) {
        self.tally();
        let reboot = self.rng.below(4) == 0;
        let wipe = self.rng.below(3) == 0;
        self.note("kill", format!("reboot={reboot} wipe={wipe}"));
        if self.oracle.risks_hidden_loss() {
            self.log().sync().unwrap();
            self.oracle.written();
        }
        self.disk = self.disk.after_kill();
        self.opened = None;
        self.next_open(reboot, wipe, true);
        let mut wrong: BTreeMap<Key, KeyState> = BTreeMap::new();
        let mut actual = BTreeMap::new();
        for (space, key) in self.oracle.at_risk() {
            let state = if space == FILTER {
                self.opened.as_ref().unwrap().filter.get(&key).unwrap()
            } else {
                self.desk(space).get(&key).unwrap()
            };
            actual.insert((space, key), state);
        }
        for (key, state) in &actual {
            if self.oracle.get(key.0, &key.1) != *state {
                wrong.insert(key.clone(), state.clone());
            }
        }
        let mut lost = 0u64;
        while !wrong.is_empty() {
            let Some(key) = self.oracle.lose_one() else {
                panic!("no prefix of what was answered explains {wrong:?}");
            };
            lost += 1;
            let state = &actual[&key];
            if self.oracle.get(key.0, &key.1) == *state {
                wrong.remove(&key);
            } else {
                wrong.insert(key, state.clone());
            }
        }
        *self.counts.entry("lost").or_insert(0) += lost;
        // Every record that is there says from when it is: time is not before any of them.
        let newest = self.oracle.newest_ms();
        let now = self.oracle.trusted_ms;
        assert!(
            now >= newest,
            "trusted time is {} ms behind a record",
            newest - now
        );
        self.time_floor_ms = self.time_floor_ms.max(newest);
        self.oracle.written();
        self.check_all();
    }

    fn check_lists(&mut self) {
        self.note("lists", String::new());
        for in_doubt in [false, true] {
            let list = if in_doubt {
                self.log().in_doubt()
            } else {
                self.log().pending()
            };
            let mut actual: Vec<_> = list
                .unwrap()
                .into_iter()
                .map(|entry| (entry.namespace, entry.key, entry.state, entry.age))
                .collect();
            actual.sort_by(|a, b| (&a.0, &a.1).cmp(&(&b.0, &b.1)));
            assert_eq!(
                actual,
                self.oracle.list(in_doubt),
                "list in_doubt={in_doubt}"
            );
        }
    }

    /// Compares every key ever used.
    fn check_all(&mut self) {
        self.check_lists();
        let keys: Vec<Vec<u8>> = (1..=self.filler).map(Self::filler_key).collect();
        let filter = self.opened.as_ref().unwrap().filter.clone();
        let remembered = filter.check_many(&keys).unwrap();
        for (key, actual) in keys.iter().zip(remembered) {
            let expected = self.oracle.get(FILTER, key) == KeyState::Seen;
            assert_eq!(actual.unwrap(), expected, "check {}", show(key));
        }
        for n in 0..6u8 {
            let len = [1, 8, 16, 40, 200, 300][n as usize];
            let key = vec![b'a' + n; len];
            self.check_key(FILTER, &key);
            for space in 2..6 {
                self.check_key(space, &key);
            }
        }
    }
}

fn retention(rng: &mut Rng) -> Retention {
    match rng.below(5) {
        0 => Retention::For(Duration::from_millis(1 + rng.below(2000) as u64)),
        1 => Retention::For(Duration::from_secs(300)),
        2 => Retention::Forever,
        _ => Retention::For(Duration::from_secs(1 + rng.below(60) as u64)),
    }
}

/// A key's first letter: all its letters are the same.
fn show(key: &[u8]) -> String {
    key.iter()
        .take(if key.len() > 20 { 1 } else { 20 })
        .map(|b| char::from(*b))
        .collect()
}
