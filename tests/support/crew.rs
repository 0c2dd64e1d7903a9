//! One opener of a simulated disk, in step with the oracle, and the check of what a crash left.
//!
//! Every call is told to the oracle *before* it is made, so that a call that never returned may
//! be found applied or not. What was acknowledged at which level sets the floors below which no
//! crash of that kind may go: everything above a floor may be lost, but only as a suffix.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idemlog::testing::ManualClock;
use idemlog::testing::sim::SimDisk;
use idemlog::{
    Applied, DedupLog, Durability, Error, Failure, Filter, KeyState, NamespaceKind, ObserveOptions,
    Options, Outcome, Probed, Resolution, Result, Retention, Stamp,
};

use super::desk::{Desk, Give, Probe, open_desk, options_of, ticket_of};
use super::oracle::{Answer, Ask, Changed, Key, Oracle, Spec};

pub const FILTER: usize = 0;
pub const REPEATABLE: usize = 1;
pub const PROBEABLE: usize = 2;
pub const NON_REPEATABLE: usize = 3;
pub const INTERNAL: usize = 4;
pub const CLASSES: [usize; 4] = [REPEATABLE, PROBEABLE, NON_REPEATABLE, INTERNAL];
pub const LEVELS: [Durability; 3] = [Durability::Buffered, Durability::Process, Durability::Power];
const START_MS: u64 = 1_700_000_000_000;
/// Stands for the epoch of a claim of which nobody was told.
const UNTOLD: u64 = u64::MAX;

/// What survives the run: what was promised, and to whom.
#[derive(Debug)]
pub struct Promised {
    pub oracle: Oracle,
    /// How many changes a kill must leave.
    pub floor_kill: usize,
    /// How many changes a power cut must leave.
    pub floor_power: usize,
    /// From here on changes belong to a call that failed: they may be there or not.
    pub uncertain_from: Option<usize>,
    pub clock: Arc<ManualClock>,
    pub segment_bytes: u32,
    pub level: Durability,
    pub settings: Settings,
    /// A namespace whose purge was begun, and of which nobody was told what came of it.
    pub purging: Option<usize>,
}

/// What only some scenarios set.
#[derive(Clone, Copy, Debug, Default)]
pub struct Settings {
    pub stamps_per_generation: Option<u64>,
    pub hint_keys_min: Option<usize>,
}

impl Promised {
    pub fn new(segment_bytes: u32, level: Durability) -> Promised {
        let spec = |kind: NamespaceKind| Spec {
            name: kind.name().to_owned(),
            kind,
            retention: Retention::For(Duration::from_secs(3600)),
            lease_ms: 20_000,
            settle_ms: Some(0),
            attempts_max: None,
            outcome_bytes_max: 200,
            sliding: false,
            has_probe: true,
        };
        let kinds = [
            NamespaceKind::Filter,
            NamespaceKind::Repeatable,
            NamespaceKind::Probeable,
            NamespaceKind::NonRepeatable,
            NamespaceKind::Internal,
        ];
        Promised {
            oracle: Oracle {
                specs: kinds.into_iter().map(spec).collect(),
                trusted_ms: START_MS,
                wall_ms: START_MS,
                boot_ms: 1000,
                opener: 0,
                ..Oracle::default()
            },
            floor_kill: 0,
            floor_power: 0,
            uncertain_from: None,
            clock: Arc::new(ManualClock::new(START_MS)),
            segment_bytes,
            level,
            settings: Settings::default(),
            purging: None,
        }
    }

    fn options(&self) -> Options {
        let mut options = Options::new()
            .background(false)
            .durability(self.level)
            .segment_bytes(self.segment_bytes)
            .clock(self.clock.clone());
        if let Some(count) = self.settings.stamps_per_generation {
            options = options.stamps_per_generation(count);
        }
        if let Some(count) = self.settings.hint_keys_min {
            options = options.hint_keys_min(count);
        }
        options
    }

    /// Takes everything of a purged namespace out of what must be there.
    fn purged(&mut self, space: usize) {
        let Promised {
            oracle,
            floor_kill,
            floor_power,
            uncertain_from,
            ..
        } = self;
        oracle.keys.retain(|(of, _), _| *of != space);
        let kept_before = |at: usize| {
            let before = oracle.journal.iter().take(at);
            before.filter(|((of, _), _)| *of != space).count()
        };
        *floor_kill = kept_before(*floor_kill);
        *floor_power = kept_before(*floor_power);
        *uncertain_from = uncertain_from.map(kept_before);
        oracle.journal.retain(|((of, _), _)| *of != space);
    }
}

/// One open store in step with its oracle.
pub struct Crew {
    pub log: DedupLog,
    pub filter: Filter,
    pub desks: Vec<Option<Box<dyn Desk>>>,
    pub p: Promised,
    pub probe: Probe,
    disk: SimDisk,
}

/// A run that has ended: by itself, or because the disk did.
pub type Ended = (Promised, Result<()>);

impl Crew {
    /// Opens; hands back what was promised if that fails.
    pub fn open(disk: &SimDisk, mut p: Promised) -> std::result::Result<Crew, Ended> {
        p.oracle.opener += 1;
        let probe: Probe = Arc::new(Mutex::new((Probed::Unknown, Vec::new())));
        let opened = (|| {
            let log = p.options().open_on(disk.dir())?;
            if let Some(space) = p.purging.take() {
                let name = &p.oracle.specs[space].name;
                if log.kind_of(name).is_none() {
                    p.purged(space);
                }
            }
            let filter = log.filter("filter", options_of(&p.oracle.specs[FILTER]))?;
            let mut desks = vec![None];
            for spec in &p.oracle.specs[1..] {
                desks.push(Some(open_desk(&log, spec, options_of(spec), &probe)?));
            }
            Ok((log, filter, desks))
        })();
        match opened {
            Ok((log, filter, desks)) => Ok(Crew {
                log,
                filter,
                desks,
                p,
                probe,
                disk: disk.clone(),
            }),
            Err(error) => Err((p, Err(error))),
        }
    }

    /// Closes first, so that guards end nothing, as if the process were gone.
    pub fn close(self) -> Ended {
        let Crew {
            log,
            filter,
            desks,
            mut p,
            ..
        } = self;
        let closed = log.close();
        drop((filter, desks));
        if closed.is_ok() {
            p.floor_kill = p.uncertain_from.unwrap_or(p.oracle.journal.len());
            p.floor_power = p.floor_kill;
        }
        (p, closed)
    }

    /// Closes, and opens the same disk again.
    pub fn reopen(self) -> std::result::Result<Crew, Ended> {
        let disk = self.disk.clone();
        let (p, closed) = self.close();
        match closed {
            Ok(()) => Crew::open(&disk, p),
            Err(error) => Err((p, Err(error))),
        }
    }

    pub fn desk(&mut self, space: usize) -> &mut dyn Desk {
        self.desks[space].as_mut().unwrap().as_mut()
    }

    fn acked(&mut self, level: Durability) {
        let len = self.p.oracle.journal.len();
        if level >= Durability::Process {
            self.p.floor_kill = len;
        }
        if level >= Durability::Power {
            self.p.floor_power = len;
        }
    }

    /// A duplicate promises that what it rests on stays.
    fn relied(&mut self, space: usize, key: &[u8], level: Durability) {
        let key = (space, key.to_vec());
        let journal = &self.p.oracle.journal;
        let len = journal
            .iter()
            .rposition(|(changed, _)| *changed == key)
            .map_or(0, |at| at + 1);
        if level >= Durability::Process {
            self.p.floor_kill = self.p.floor_kill.max(len);
        }
        if level >= Durability::Power {
            self.p.floor_power = self.p.floor_power.max(len);
        }
    }

    /// A call that says it was not applied is not.
    fn failed(&mut self, before: usize, error: Error) -> Error {
        if error.applied() == Applied::No {
            while self.p.oracle.journal.len() > before {
                self.p.oracle.lose_one();
            }
        }
        let len = self.p.oracle.journal.len();
        if len > before {
            self.p.uncertain_from.get_or_insert(before);
        }
        error
    }

    /// Asks the store what came of changes of which it has not said whether they are applied,
    /// and takes back those that are not. If it does not say, all of them stay uncertain.
    fn look(&mut self, before: usize) {
        let journal = &self.p.oracle.journal;
        let keys: BTreeSet<Key> = journal[before..]
            .iter()
            .map(|(key, _)| key.clone())
            .collect();
        for key in keys {
            let state = match key.0 {
                FILTER => self.filter.get(&key.1),
                space => self.desk(space).get(&key.1),
            };
            let Ok(state) = state else {
                self.p.uncertain_from.get_or_insert(before);
                return;
            };
            while !same(&self.p.oracle.get(key.0, &key.1), &state) {
                let lost = self.p.oracle.lose_last_of(&key, before);
                assert!(
                    lost,
                    "{} is neither as before nor as after",
                    key.1.escape_ascii()
                );
            }
        }
    }

    pub fn observe(
        &mut self,
        key: &[u8],
        retention: Option<Retention>,
        level: Durability,
    ) -> Result<()> {
        let before = self.p.oracle.journal.len();
        let new = self.p.oracle.observe(FILTER, key, retention);
        let mut options = ObserveOptions::new().durability(level);
        if let Some(retention) = retention {
            options = options.retention(retention);
        }
        match self.filter.observe_with(key, &options) {
            Ok(observed) => {
                assert_eq!(observed.is_new(), new, "observe {}", key.escape_ascii());
                self.relied(FILTER, key, level);
                Ok(())
            }
            Err(error) => Err(self.failed(before, error)),
        }
    }

    pub fn observe_many(
        &mut self,
        keys: &[Vec<u8>],
        retention: Retention,
        level: Durability,
    ) -> Result<()> {
        let before = self.p.oracle.journal.len();
        // The batch as a whole may be applied in part even when it says "no": its keys may or
        // may not be remembered, says its documentation.
        let news: Vec<bool> = keys
            .iter()
            .map(|key| self.p.oracle.observe(FILTER, key, Some(retention)))
            .collect();
        let options = ObserveOptions::new().durability(level).retention(retention);
        let answered = self.filter.observe_many_with(keys, &options);
        if answered.is_err() {
            self.look(before);
        }
        let observed = answered?;
        for ((key, observed), new) in keys.iter().zip(observed).zip(news) {
            assert_eq!(
                observed?.is_new(),
                new,
                "observe_many {}",
                key.escape_ascii()
            );
            self.relied(FILTER, key, level);
        }
        Ok(())
    }

    pub fn claim(&mut self, space: usize, key: &[u8], detached: bool) -> Result<Answer> {
        let ask = Ask {
            detached,
            ..Ask::default()
        };
        let probed = self.probe.lock().unwrap().0.clone();
        let before = self.p.oracle.clone();
        let untold = Some(Stamp::from_u64(UNTOLD));
        self.p.oracle.claim(space, key, &ask, untold, &probed);
        self.p.oracle.epoch_max = before.epoch_max;
        let len = before.journal.len();
        match self.desk(space).claim(key, &ask) {
            Ok(said) => {
                self.p.oracle = before;
                let expected = self.p.oracle.claim(space, key, &ask, said.epoch, &probed);
                assert_eq!(
                    said.answer,
                    expected,
                    "claim {space} {}",
                    key.escape_ascii()
                );
                if detached && said.epoch.is_some() {
                    self.acked(Durability::Process);
                }
                if matches!(said.answer, Answer::Duplicate(_) | Answer::Rejected { .. }) {
                    self.relied(space, key, self.p.level);
                }
                Ok(said.answer)
            }
            Err(error) => Err(self.failed(len, error)),
        }
    }

    fn changed(
        &mut self,
        before: usize,
        actual: Result<Changed>,
        expected: Changed,
        level: Durability,
    ) -> Result<()> {
        match actual {
            Ok(actual) => {
                if actual != Changed::Unseen {
                    assert_eq!(actual, expected);
                }
                if matches!(
                    actual,
                    Changed::Committed | Changed::Applied(_) | Changed::Unseen
                ) {
                    self.acked(level);
                }
                Ok(())
            }
            Err(error) => Err(self.failed(before, error)),
        }
    }

    fn guard(&mut self, space: usize, key: &[u8]) -> (usize, Stamp) {
        let held = self.desk(space).held();
        let index = held
            .iter()
            .rposition(|held| held.key == key)
            .expect("a guard of this key");
        (index, held[index].epoch)
    }

    pub fn start(&mut self, space: usize, key: &[u8], evidence: &[u8]) -> Result<()> {
        let (index, epoch) = self.guard(space, key);
        let before = self.p.oracle.journal.len();
        let expected = self.p.oracle.start(space, key, epoch, evidence);
        let actual = self.desk(space).start(index, evidence);
        self.changed(before, actual, expected, start_level(space))
    }

    pub fn renew(&mut self, space: usize, key: &[u8], lease_ms: u64) -> Result<()> {
        let (index, epoch) = self.guard(space, key);
        let before = self.p.oracle.journal.len();
        let expected = self.p.oracle.renew(space, key, epoch, lease_ms);
        let actual = self.desk(space).renew(index, lease_ms);
        self.changed(before, actual, expected, Durability::Process)
    }

    pub fn commit(
        &mut self,
        space: usize,
        key: &[u8],
        outcome: &[u8],
        level: Durability,
    ) -> Result<()> {
        self.commit_for(space, key, outcome, level, None)
    }

    pub fn commit_for(
        &mut self,
        space: usize,
        key: &[u8],
        outcome: &[u8],
        level: Durability,
        retention: Option<Retention>,
    ) -> Result<()> {
        let (index, epoch) = self.guard(space, key);
        let give = Give {
            retention,
            durability: Some(level),
            ..Give::new(outcome)
        };
        let before = self.p.oracle.journal.len();
        let expected = self
            .p
            .oracle
            .commit(space, key, epoch, &give.outcome, retention);
        let actual = self
            .desk(space)
            .commit(index, &give)
            .expect("class allows it");
        self.changed(before, actual, expected, level)
    }

    pub fn commit_ticket(
        &mut self,
        space: usize,
        key: &[u8],
        epoch: Stamp,
        outcome: &[u8],
    ) -> Result<Changed> {
        let ticket = ticket_of(&self.p.oracle.specs[space].name, key, epoch);
        let kept = Outcome::Kept(outcome.to_vec());
        let before = self.p.oracle.journal.len();
        let expected = self.p.oracle.commit(space, key, epoch, &kept, None);
        let actual = self.desk(space).commit_ticket(&ticket, &Give::new(outcome));
        let level = self.p.level;
        let changed = expected.clone();
        self.changed(before, actual, expected, level)?;
        Ok(changed)
    }

    /// Hands a claim over to whoever has its ticket.
    pub fn detach(&mut self, space: usize, key: &[u8]) -> Stamp {
        let (index, epoch) = self.guard(space, key);
        self.desk(space).detach(index);
        epoch
    }

    pub fn start_ticket(&mut self, space: usize, key: &[u8], epoch: Stamp) -> Result<()> {
        let ticket = ticket_of(&self.p.oracle.specs[space].name, key, epoch);
        let before = self.p.oracle.journal.len();
        let expected = self.p.oracle.start(space, key, epoch, b"by ticket");
        let actual = self.desk(space).start_ticket(&ticket, b"by ticket");
        self.changed(before, actual, expected, start_level(space))
    }

    pub fn renew_ticket(
        &mut self,
        space: usize,
        key: &[u8],
        epoch: Stamp,
        lease_ms: u64,
    ) -> Result<()> {
        let ticket = ticket_of(&self.p.oracle.specs[space].name, key, epoch);
        let before = self.p.oracle.journal.len();
        let expected = self.p.oracle.renew(space, key, epoch, lease_ms);
        let actual = self.desk(space).renew_ticket(&ticket, lease_ms);
        self.changed(before, actual, expected, Durability::Process)
    }

    pub fn fail_ticket(
        &mut self,
        space: usize,
        key: &[u8],
        epoch: Stamp,
        failure: &Failure,
    ) -> Result<()> {
        let ticket = ticket_of(&self.p.oracle.specs[space].name, key, epoch);
        let before = self.p.oracle.journal.len();
        let expected = self.p.oracle.fail(space, key, epoch, failure);
        let actual = self.desk(space).fail_ticket(&ticket, failure);
        let level = match failure {
            Failure::Release => Durability::Buffered,
            _ => self.p.level,
        };
        self.changed(before, actual, expected, level)
    }

    /// Purges a namespace by force, and makes it anew.
    pub fn purge(&mut self, space: usize) -> Result<()> {
        let name = self.p.oracle.specs[space].name.clone();
        self.p.purging = Some(space);
        self.log.purge(&name, true)?;
        self.p.purging = None;
        self.p.purged(space);
        let spec = &self.p.oracle.specs[space];
        if space == FILTER {
            self.filter = self.log.filter(&name, options_of(spec))?;
        } else {
            let desk = open_desk(&self.log, spec, options_of(spec), &self.probe)?;
            // The old guards have no key any more: that they end nothing is part of the test.
            drop(self.desks[space].replace(desk));
        }
        Ok(())
    }

    pub fn fail(&mut self, space: usize, key: &[u8], failure: &Failure) -> Result<()> {
        let (index, epoch) = self.guard(space, key);
        let before = self.p.oracle.journal.len();
        let expected = self.p.oracle.fail(space, key, epoch, failure);
        let started = self.desk(space).held()[index].started;
        let actual = self.desk(space).fail(index, failure.clone());
        if let Err(error) = actual {
            // The guard is gone, and ends the claim as if it had been dropped, if it can.
            let error = self.failed(before, error);
            let evidence = b"owner gave up without an answer".to_vec();
            let dropped = if started {
                Failure::Unknown { evidence }
            } else {
                Failure::Release
            };
            let before = self.p.oracle.journal.len();
            self.p.oracle.fail(space, key, epoch, &dropped);
            self.look(before);
            return Err(error);
        }
        let level = match failure {
            Failure::Release => Durability::Buffered,
            _ => self.p.level,
        };
        self.changed(before, actual, expected, level)
    }

    pub fn resolve(&mut self, space: usize, key: &[u8], resolution: Resolution) -> Result<()> {
        let epoch = self
            .p
            .oracle
            .entry(space, key)
            .expect("a key in doubt")
            .common
            .epoch;
        let before = self.p.oracle.journal.len();
        let expected = self.p.oracle.resolve(space, key, epoch, &resolution);
        let actual = self.desk(space).resolve(key, epoch, resolution);
        let level = self.p.level;
        self.changed(before, actual, expected, level)
    }

    pub fn forget(&mut self, space: usize, key: &[u8]) -> Result<()> {
        let before = self.p.oracle.journal.len();
        let expected = self.p.oracle.forget(space, key, true);
        let wrote = self.p.oracle.journal.len() > before;
        let actual = if space == FILTER {
            self.filter.forget(key).map(super::desk::changed)
        } else {
            self.desk(space).forget(key, true)
        };
        let level = if wrote {
            self.p.level
        } else {
            Durability::Buffered
        };
        self.changed(before, actual, expected, level)
    }

    /// Commits all claims of a namespace in one batch.
    pub fn commit_all_started(
        &mut self,
        space: usize,
        outcome: &[u8],
        level: Durability,
    ) -> Result<()> {
        let held: Vec<_> = self
            .desk(space)
            .held()
            .into_iter()
            .filter(|held| held.started)
            .collect();
        let before = self.p.oracle.journal.len();
        let give = Give {
            durability: Some(level),
            ..Give::new(outcome)
        };
        for held in &held {
            self.p
                .oracle
                .commit(space, &held.key, held.epoch, &give.outcome, None);
        }
        let gives = vec![give; held.len()];
        let answered = self.desk(space).commit_started(&gives);
        if answered.is_err() {
            self.p.uncertain_from.get_or_insert(before);
        }
        for (_, verdict) in answered? {
            assert_eq!(verdict, Changed::Committed);
        }
        self.acked(level);
        Ok(())
    }

    pub fn advance(&mut self, ms: u64) {
        self.p.clock.advance_ms(ms);
        self.p.oracle.trusted_ms += ms;
        self.p.oracle.wall_ms += ms;
        self.p.oracle.boot_ms += ms;
    }

    pub fn sync(&mut self) -> Result<()> {
        self.log.sync()?;
        self.acked(Durability::Power);
        Ok(())
    }

    fn get(&mut self, key: &Key) -> KeyState {
        let (space, key) = key;
        let state = match *space {
            FILTER => self.filter.get(key),
            space => self.desk(space).get(key),
        };
        state.unwrap_or_else(|error| panic!("get {space} {}: {error:?}", key.escape_ascii()))
    }

    /// Finds which of the answered calls are still there: all but a suffix, and at least `floor`
    /// changes. From here on the oracle is what was found.
    pub fn settle(&mut self, floor: usize) {
        let mut keys: Vec<Key> = self.p.oracle.keys.keys().cloned().collect();
        keys.extend(self.p.oracle.journal.iter().map(|(key, _)| key.clone()));
        keys.sort();
        keys.dedup();
        let actual: BTreeMap<Key, KeyState> = keys
            .into_iter()
            .map(|key| {
                let state = self.get(&key);
                (key, state)
            })
            .collect();
        let oracle = &mut self.p.oracle;
        let mut wrong: BTreeMap<Key, String> = BTreeMap::new();
        let judge = |oracle: &Oracle, key: &Key, wrong: &mut BTreeMap<Key, String>| {
            let (expected, found) = (oracle.get(key.0, &key.1), &actual[key]);
            if same(&expected, found) {
                wrong.remove(key);
            } else {
                wrong.insert(
                    key.clone(),
                    format!("expected {expected:?} found {found:?}"),
                );
            }
        };
        for key in actual.keys() {
            judge(oracle, key, &mut wrong);
        }
        let complete = wrong.clone();
        while !wrong.is_empty() {
            let key = (oracle.journal.len() > floor)
                .then(|| oracle.lose_one())
                .flatten();
            let Some(key) = key else {
                panic!(
                    "no prefix of at least {floor} changes explains these keys; with all changes: \
                     {:#?}\nat the floor: {:#?}",
                    shown(&complete),
                    shown(&wrong)
                );
            };
            judge(oracle, &key, &mut wrong);
        }
        // A claim of which nobody was told has an epoch now.
        for (key, entry) in &mut oracle.keys {
            if entry.common.epoch.get() == UNTOLD
                && let KeyState::Pending { epoch, .. } = &actual[key]
            {
                entry.common.epoch = *epoch;
            }
        }
        let len = self.p.oracle.journal.len();
        self.p.uncertain_from = None;
        self.p.floor_kill = len;
        self.p.floor_power = len;
        self.check_lists();
    }

    pub fn check_lists(&self) {
        for in_doubt in [false, true] {
            let list = if in_doubt {
                self.log.in_doubt()
            } else {
                self.log.pending()
            };
            let mut actual: Vec<_> = list
                .unwrap()
                .into_iter()
                .map(|entry| (entry.namespace, entry.key, entry.state, entry.age))
                .collect();
            actual.sort_by(|a, b| (&a.0, &a.1).cmp(&(&b.0, &b.1)));
            assert_eq!(
                actual,
                self.p.oracle.list(in_doubt),
                "list in_doubt={in_doubt}"
            );
        }
    }

    /// Writes ten more keys, durably; all epochs are above all that were ever handed out.
    pub fn write_ten(&mut self, salt: &str) {
        for n in 0..6 {
            let key = format!("more-{salt}-{n}");
            self.observe(key.as_bytes(), None, Durability::Power)
                .unwrap();
        }
        for space in CLASSES {
            let key = format!("more-{salt}").into_bytes();
            self.claim(space, &key, false).unwrap();
            self.start(space, &key, b"").unwrap();
            self.commit(space, &key, b"more", Durability::Power)
                .unwrap();
        }
    }
}

/// Where the effect may not be repeated unseen, its start is durable whatever the level.
fn start_level(space: usize) -> Durability {
    match space {
        PROBEABLE | NON_REPEATABLE => Durability::Power,
        _ => Durability::Buffered,
    }
}

fn shown(wrong: &BTreeMap<Key, String>) -> Vec<String> {
    let line = |((space, key), why): (&Key, &String)| {
        let key: String = key.escape_ascii().to_string().chars().take(20).collect();
        format!("{space} {key}: {why}")
    };
    wrong.iter().map(line).collect()
}

/// Compares, leaving out an epoch that nobody was told.
fn same(expected: &KeyState, found: &KeyState) -> bool {
    let mut found = found.clone();
    if let (KeyState::Pending { epoch: untold, .. }, KeyState::Pending { epoch, .. }) =
        (expected, &mut found)
        && untold.get() == UNTOLD
    {
        *epoch = *untold;
    }
    *expected == found
}
