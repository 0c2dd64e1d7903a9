//! SIGKILL of a child at every row of the crash-window table, and at random moments, at each
//! durability level.
//!
//! The child is this test binary under the name of the test `child`, told what to do by an
//! environment variable. What it prints before the kill is what it acknowledged. `IDEMLOG_KILLS`
//! raises the number of random kills, `IDEMLOG_SEED` repeats their moments.

use std::any::Any;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use idemlog::{
    Claim, ClaimOptions, ClaimVerdict, Commit, CommitVerdict, DedupLog, Durability, EffectClass,
    Failure, Filter, Internal, KeyState, Namespace, NamespaceOptions, NonRepeatable, Options,
    ProbeRequest, Probeable, Probed, Repeatable, Resolution, RunVerdict, Ticket,
};

const LEVELS: [(&str, Durability); 3] = [
    ("buffered", Durability::Buffered),
    ("process", Durability::Process),
    ("power", Durability::Power),
];
/// Random kills of each scenario at each level.
const KILLS_DEFAULT: u64 = 8;
/// The lease of detached claims: long enough to print their tickets in.
const LEASE: Duration = Duration::from_millis(400);
/// The child says this line when it has done all it was asked to.
const READY: &str = "ready";
const TASK: &str = "IDEMLOG_TEST_KILL_TASK";

/// Not a test of its own: what the killed process does.
#[test]
fn child() {
    let Ok(task) = std::env::var(TASK) else {
        return;
    };
    let words: Vec<&str> = task.splitn(4, ' ').collect();
    let [what, level, start, dir] = words.as_slice() else {
        panic!("{task}")
    };
    let log = open(Path::new(dir), level_of(level));
    match *what {
        "observe" => observe_forever(&log, start.parse().unwrap()),
        "work" => work_forever(&log, start.parse().unwrap()),
        "stages" => hold_every_stage(&log),
        "tickets" => print_tickets(&log),
        "expire" => commit_for_a_second(&log),
        _ => panic!("{task}"),
    }
}

fn level_of(name: &str) -> Durability {
    LEVELS
        .into_iter()
        .find(|(known, _)| *known == name)
        .unwrap()
        .1
}

fn open(dir: &Path, level: Durability) -> DedupLog {
    // Another test's child inherits our lock between its fork and its exec: wait for that.
    let options = Options::new()
        .durability(level)
        .lock_timeout(Duration::from_secs(20));
    options
        .segment_bytes(64 * 1024)
        .open(dir.join("store"))
        .unwrap()
}

fn space<C: EffectClass>(log: &DedupLog, name: &str) -> Namespace<C> {
    let options = NamespaceOptions::new()
        .settle(Duration::ZERO)
        .outcome_bytes_max(256);
    log.namespace(name, options).unwrap()
}

/// The probe knows the answer from the key.
fn probed(log: &DedupLog) -> Namespace<Probeable> {
    space::<Probeable>(log, "probeable").with_probe(|asked: &ProbeRequest| {
        match String::from_utf8_lossy(asked.key) {
            key if key.ends_with("not applied") => Probed::NotApplied,
            key if key.ends_with("cannot tell") => Probed::Unknown,
            _ => Probed::Applied(b"outcome".to_vec()),
        }
    })
}

fn filter(log: &DedupLog) -> Filter {
    log.filter("filter", NamespaceOptions::new()).unwrap()
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // The test harness leaves an unfinished line behind.
    write!(out, "\n{line}\n").unwrap();
    out.flush().unwrap();
}

fn wait_for_the_kill() -> ! {
    say(READY);
    loop {
        std::thread::park();
    }
}

/// The parent's side of a child.
struct Victim {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Victim {
    fn start(what: &str, level: &str, start: u64, dir: &Path) -> Victim {
        let name = concat!(module_path!(), "::child")
            .split_once("::")
            .unwrap()
            .1;
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([name, "--exact", "--nocapture", "--test-threads=1"])
            .env(TASK, format!("{what} {level} {start} {}", dir.display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Victim { child, lines }
    }

    /// Reads on until a line that begins like this.
    fn lines_until(&mut self, start: &str) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            let count = self.lines.read_line(&mut line).unwrap();
            assert!(count > 0, "the child ended by itself after {lines:?}");
            lines.push(line.trim_end().to_owned());
            if line.starts_with(start) {
                return lines;
            }
        }
    }

    /// Kills, and returns what was said since.
    fn kill(mut self) -> Vec<String> {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        let lines = self
            .lines
            .split(b'\n')
            .map(|line| String::from_utf8(line.unwrap()).unwrap());
        lines.collect()
    }
}

struct Random(u64);

impl Random {
    fn new() -> Random {
        let seed = match std::env::var("IDEMLOG_SEED") {
            Ok(seed) => seed.parse().unwrap(),
            Err(_) => getrandom_seed(),
        };
        say(&format!("seed={seed} (again with IDEMLOG_SEED={seed})"));
        Random(seed)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) % bound
    }
}

fn getrandom_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0) % 1_000_000
}

fn kills() -> u64 {
    std::env::var("IDEMLOG_KILLS").map_or(KILLS_DEFAULT, |count| count.parse().unwrap())
}

fn observe_forever(log: &DedupLog, start: u64) -> ! {
    let filter = filter(log);
    for index in start.. {
        // One in ten is a duplicate: its answer, too, stands on a record that must stay.
        assert!(
            filter.observe(format!("key-{index}")).unwrap().is_new(),
            "key-{index}"
        );
        if index % 10 == 9 {
            assert!(
                !filter
                    .observe(format!("key-{}", index - 3))
                    .unwrap()
                    .is_new()
            );
        }
        if index % 100 == 99 {
            log.sync().unwrap();
            say(&format!("synced {index}"));
        }
        say(&format!("ack {index}"));
    }
    unreachable!()
}

#[test]
fn a_kill_loses_no_observed_key_at_process_and_power_and_only_a_suffix_at_buffered() {
    let mut random = Random::new();
    for (name, level) in LEVELS {
        let dir = tempfile::tempdir().unwrap();
        let mut start = 0;
        for kill in 0..kills() {
            let mut victim = Victim::start("observe", name, start, dir.path());
            let mut lines = victim.lines_until("ack ");
            std::thread::sleep(Duration::from_micros(random.below(40_000)));
            lines.extend(victim.kill());
            let last = |word: &str| {
                let numbers = lines.iter().filter_map(|line| line.strip_prefix(word));
                numbers
                    .filter_map(|number| number.parse::<u64>().ok())
                    .next_back()
            };
            let (acked, synced) = (last("ack ").unwrap(), last("synced "));
            let log = open(dir.path(), level);
            // The key after the last acknowledged one may be there.
            let keys: Vec<_> = (0..=acked + 10)
                .map(|index| format!("key-{index}"))
                .collect();
            let known = filter(&log).check_many(&keys).unwrap();
            let known: Vec<bool> = known.into_iter().map(Result::unwrap).collect();
            let kept = known.iter().position(|known| !known).unwrap() as u64;
            assert!(
                !known[kept as usize..].contains(&true),
                "{name}, kill {kill}: a hole"
            );
            let kept_at_least = match level {
                Durability::Buffered => synced.map_or(start, |synced| synced + 1),
                _ => acked + 1,
            };
            assert!(
                kept >= kept_at_least,
                "{name}, kill {kill}: {kept} < {kept_at_least}"
            );
            assert!(
                kept <= acked + 2,
                "{name}, kill {kill}: {kept} appeared, acked {acked}"
            );
            log.close().unwrap();
            start = kept;
        }
    }
}

/// Takes keys of all classes in turn through `run_once`, and says what it did.
fn work_forever(log: &DedupLog, start: u64) -> ! {
    let repeatable = space::<Repeatable>(log, "repeatable");
    let probeable = probed(log);
    let non_repeatable = space::<NonRepeatable>(log, "non-repeatable");
    let internal = space::<Internal>(log, "internal");
    for index in start.. {
        let key = format!("key-{index}");
        match index % 4 {
            0 => work(&repeatable, &key),
            1 => work(&probeable, &key),
            2 => work(&non_repeatable, &key),
            _ => work(&internal, &key),
        }
    }
    unreachable!()
}

fn work<C: EffectClass>(space: &Namespace<C>, key: &str) {
    let verdict = space.run_once(key, |_| {
        say(&format!("effect {key}"));
        Ok(b"outcome".to_vec())
    });
    assert!(matches!(verdict.unwrap(), RunVerdict::Ran { .. }), "{key}");
    say(&format!("done {key}"));
}

#[test]
fn a_kill_at_any_moment_of_run_once_leaves_an_allowed_verdict() {
    let mut random = Random::new();
    for (name, level) in LEVELS {
        let dir = tempfile::tempdir().unwrap();
        let mut start = 0;
        for kill in 0..kills() {
            let mut victim = Victim::start("work", name, start, dir.path());
            let mut lines = victim.lines_until("effect ");
            std::thread::sleep(Duration::from_micros(random.below(30_000)));
            lines.extend(victim.kill());
            let mut said: HashMap<u64, &str> = HashMap::new();
            for line in &lines {
                if let Some((word @ ("effect" | "done"), key)) = line.split_once(" key-")
                    && let Ok(index) = key.parse()
                {
                    said.insert(index, word);
                }
            }
            let log = open(dir.path(), level);
            let end = said.keys().max().unwrap() + 2;
            for index in start..end {
                let key = format!("key-{index}");
                let verdict = match index % 4 {
                    0 => verdict_of(&space::<Repeatable>(&log, "repeatable"), &key),
                    1 => verdict_of(&probed(&log), &key),
                    2 => verdict_of(&space::<NonRepeatable>(&log, "non-repeatable"), &key),
                    _ => verdict_of(&space::<Internal>(&log, "internal"), &key),
                };
                let said = said.get(&index).copied().unwrap_or_default();
                assert!(
                    allowed(said, index % 4, level).contains(&verdict.as_str()),
                    "{name}, kill {kill}: said {said:?} of {key}, found {verdict:?}"
                );
            }
            log.close().unwrap();
            start = end;
        }
    }
}

/// Returns what a claim may answer after a kill, by the last word about the key.
fn allowed(said: &str, class: u64, level: Durability) -> &'static [&'static str] {
    const NEW: &str = "new";
    const CLAIMED: &str = "takeover of claimed";
    const STARTED: &str = "takeover of started";
    const DONE: &str = "duplicate";
    const DOUBT: &str = "in doubt";
    let loses = level == Durability::Buffered;
    match (said, class) {
        ("done", 0 | 3) if loses => &[DONE, STARTED, CLAIMED, NEW],
        // Started is flushed at any level; without the commit the probe says: applied.
        ("done", 2) if loses => &[DONE, DOUBT],
        ("done", _) => &[DONE],
        // These classes wait for no write before the effect, at any level.
        ("effect", 0 | 3) => &[DONE, STARTED, CLAIMED, NEW],
        ("effect", 1) => &[DONE],
        ("effect", _) => &[DONE, DOUBT],
        // Not one word: at most the record of the start was written.
        (_, 1) => &[NEW, CLAIMED, DONE],
        (_, 2) => &[NEW, CLAIMED, DOUBT],
        _ => &[NEW, CLAIMED, STARTED, DONE],
    }
}

/// Claims, and returns the answer in a few words; a claim is given back.
fn verdict_of<C: EffectClass>(space: &Namespace<C>, key: &str) -> String {
    let answer = |claim: Claim<C>, text: &str| {
        assert!(claim.fail(Failure::Release).unwrap().is_applied());
        text.to_owned()
    };
    match space.claim(key).unwrap() {
        ClaimVerdict::New(claim) => answer(claim, "new"),
        ClaimVerdict::Takeover { claim, previous } if previous.started => {
            answer(claim, "takeover of started")
        }
        ClaimVerdict::Takeover { claim, .. } => answer(claim, "takeover of claimed"),
        ClaimVerdict::Retry { claim, .. } => answer(claim, "retry"),
        ClaimVerdict::Duplicate(done) => {
            assert_eq!(done.outcome.bytes(), Some(&b"outcome"[..]), "{key}");
            "duplicate".to_owned()
        }
        ClaimVerdict::InDoubt(_) => "in doubt".to_owned(),
        ClaimVerdict::Busy { .. } => "busy".to_owned(),
        _ => "another".to_owned(),
    }
}

/// Takes a key of each class to each stage, and stays there.
fn hold_every_stage(log: &DedupLog) -> ! {
    let mut held: Vec<Box<dyn Any>> = Vec::new();
    stages(&space::<Repeatable>(log, "repeatable"), &mut held);
    stages(&space::<Probeable>(log, "probeable"), &mut held);
    stages(&space::<NonRepeatable>(log, "non-repeatable"), &mut held);
    stages(&space::<Internal>(log, "internal"), &mut held);
    wait_for_the_kill()
}

fn stages<C: EffectClass>(space: &Namespace<C>, held: &mut Vec<Box<dyn Any>>) {
    let claim = |key: &str| space.claim(key).unwrap().claim().unwrap();
    let start = |key: &str| {
        claim(key)
            .start(b"evidence")
            .map_err(idemlog::Error::from)
            .unwrap()
    };
    held.push(Box::new(claim("claimed")));
    for key in ["started", "started, not applied", "started, cannot tell"] {
        held.push(Box::new(start(key)));
    }
    let verdict = start("committed").commit(b"outcome").unwrap();
    assert!(matches!(verdict, CommitVerdict::Committed { .. }));
}

#[test]
fn a_kill_at_every_stage_leaves_what_the_crash_table_says() {
    for (name, level) in LEVELS {
        let dir = tempfile::tempdir().unwrap();
        let mut victim = Victim::start("stages", name, 0, dir.path());
        victim.lines_until(READY);
        victim.kill();
        let log = open(dir.path(), level);
        let in_doubt: Vec<_> = log.in_doubt().unwrap();
        assert!(
            in_doubt.iter().all(|one| one.namespace == "non-repeatable"),
            "{in_doubt:?}"
        );
        assert_eq!(
            in_doubt
                .iter()
                .filter(|one| one.key.starts_with(b"started"))
                .count(),
            3
        );
        let free = ["takeover of started"; 3];
        check_stages(&space::<Repeatable>(&log, "repeatable"), level, free);
        check_stages(&space::<Internal>(&log, "internal"), level, free);
        let by_probe = ["duplicate", "takeover of started", "in doubt"];
        check_stages(&probed(&log), level, by_probe);
        check_stages(
            &space::<NonRepeatable>(&log, "non-repeatable"),
            level,
            ["in doubt"; 3],
        );
        log.close().unwrap();
    }
}

/// Compares every stage with its row; `started` says what follows each of the started keys.
fn check_stages<C: EffectClass>(space: &Namespace<C>, level: Durability, started: [&str; 3]) {
    let starts_durably = started[0] != "takeover of started";
    let loses = level == Durability::Buffered;
    let check = |key: &str, row: &str, earlier: &[&str]| {
        let verdict = verdict_of(space, key);
        let is_allowed = verdict == row || loses && earlier.contains(&verdict.as_str());
        assert!(
            is_allowed,
            "{level:?}: {key} should be {row:?}, or {earlier:?}; was {verdict:?}"
        );
    };
    check("absent", "new", &[]);
    check("claimed", "takeover of claimed", &["new"]);
    let earlier: &[&str] = if starts_durably {
        &[]
    } else {
        &["new", "takeover of claimed"]
    };
    for (key, row) in ["started", "started, not applied", "started, cannot tell"]
        .iter()
        .zip(started)
    {
        check(key, row, earlier);
    }
    let earlier: &[&str] = if starts_durably {
        &started[..1]
    } else {
        &["new", "takeover of claimed", started[0]]
    };
    check("committed", "duplicate", earlier);
}

/// Claims detached, starts, and prints the tickets: `class key ticket`.
fn print_tickets(log: &DedupLog) -> ! {
    tickets(log, &space::<Repeatable>(log, "repeatable"), "repeatable");
    tickets(log, &space::<Probeable>(log, "probeable"), "probeable");
    tickets(
        log,
        &space::<NonRepeatable>(log, "non-repeatable"),
        "non-repeatable",
    );
    tickets(log, &space::<Internal>(log, "internal"), "internal");
    wait_for_the_kill()
}

fn tickets<C: EffectClass>(log: &DedupLog, space: &Namespace<C>, class: &str) {
    let options = ClaimOptions::new().detached(true).lease(LEASE);
    for key in ["lapsed", "taken", "taken, not applied"] {
        let ticket = space
            .claim_with(key, &options)
            .unwrap()
            .claim()
            .unwrap()
            .detach();
        assert!(
            space
                .start_ticket(&ticket, b"evidence")
                .unwrap()
                .is_applied()
        );
        // Below Power a claim may be lost with its ticket's owner; here it is not.
        log.sync().unwrap();
        say(&format!("ticket {class}/{key}/{ticket}"));
    }
}

#[test]
fn a_late_owner_commits_unless_somebody_took_over() {
    for (name, level) in LEVELS {
        let dir = tempfile::tempdir().unwrap();
        let mut victim = Victim::start("tickets", name, 0, dir.path());
        let mut tickets: HashMap<(String, String), Ticket> = HashMap::new();
        for line in victim.lines_until(READY) {
            if let Some(rest) = line.strip_prefix("ticket ") {
                let words: Vec<&str> = rest.splitn(3, '/').collect();
                let of = (words[0].to_owned(), words[1].to_owned());
                tickets.insert(of, words[2].parse().unwrap());
            }
        }
        victim.kill();
        let log = open(dir.path(), level);
        let ticket = |class: &str, key: &str| &tickets[&(class.to_owned(), key.to_owned())];
        let repeatable = space::<Repeatable>(&log, "repeatable");
        let probeable = probed(&log);
        let non_repeatable = space::<NonRepeatable>(&log, "non-repeatable");
        let internal = space::<Internal>(&log, "internal");
        // The claims are detached: their owner's death is not known, only their lease.
        assert_eq!(verdict_of(&internal, "taken"), "busy");
        std::thread::sleep(LEASE);

        commits(&repeatable, ticket("repeatable", "lapsed"));
        commits(&probeable, ticket("probeable", "lapsed"));
        commits(&internal, ticket("internal", "lapsed"));
        let KeyState::InDoubt(_) = non_repeatable.get("lapsed").unwrap() else {
            panic!()
        };
        assert_eq!(verdict_of(&non_repeatable, "lapsed"), "in doubt");
        commits(&non_repeatable, ticket("non-repeatable", "lapsed"));

        assert_eq!(verdict_of(&repeatable, "taken"), "takeover of started");
        is_fenced(&repeatable, ticket("repeatable", "taken"));
        assert_eq!(verdict_of(&internal, "taken"), "takeover of started");
        is_fenced(&internal, ticket("internal", "taken"));

        assert_eq!(verdict_of(&probeable, "taken"), "duplicate");
        is_already_done(&probeable, ticket("probeable", "taken"));
        assert_eq!(
            verdict_of(&probeable, "taken, not applied"),
            "takeover of started"
        );
        is_fenced(&probeable, ticket("probeable", "taken, not applied"));

        let resolve = |key: &str, resolution| {
            let epoch = ticket("non-repeatable", key).epoch();
            assert!(
                non_repeatable
                    .resolve(key, epoch, resolution)
                    .unwrap()
                    .is_applied()
            );
        };
        resolve("taken", Resolution::Applied(b"outcome".to_vec()));
        is_already_done(&non_repeatable, ticket("non-repeatable", "taken"));
        resolve("taken, not applied", Resolution::NotApplied);
        is_fenced(
            &non_repeatable,
            ticket("non-repeatable", "taken, not applied"),
        );
        assert_eq!(verdict_of(&non_repeatable, "taken, not applied"), "retry");
        log.close().unwrap();
    }
}

fn commits<C: EffectClass>(space: &Namespace<C>, ticket: &Ticket) {
    let verdict = space.commit_ticket(ticket, Commit::new("outcome")).unwrap();
    assert!(
        matches!(verdict, CommitVerdict::Committed { .. }),
        "{verdict:?}"
    );
    is_already_done(space, ticket);
}

fn is_already_done<C: EffectClass>(space: &Namespace<C>, ticket: &Ticket) {
    let verdict = space.commit_ticket(ticket, Commit::new("outcome")).unwrap();
    assert!(
        matches!(verdict, CommitVerdict::AlreadyCommitted),
        "{verdict:?}"
    );
    let verdict = space.commit_ticket(ticket, Commit::new("another")).unwrap();
    let CommitVerdict::Conflict { current, outcome } = verdict else {
        panic!("{verdict:?}")
    };
    assert_eq!(current.outcome.bytes(), Some(&b"outcome"[..]));
    assert_eq!(outcome, b"another");
}

fn is_fenced<C: EffectClass>(space: &Namespace<C>, ticket: &Ticket) {
    let verdict = space.commit_ticket(ticket, Commit::new("outcome")).unwrap();
    let CommitVerdict::Fenced { outcome, .. } = verdict else {
        panic!("{verdict:?}")
    };
    assert_eq!(outcome, b"outcome", "handed back");
}

fn commit_for_a_second(log: &DedupLog) -> ! {
    commit_short(&space::<Repeatable>(log, "repeatable"));
    commit_short(&space::<Probeable>(log, "probeable"));
    commit_short(&space::<NonRepeatable>(log, "non-repeatable"));
    commit_short(&space::<Internal>(log, "internal"));
    log.sync().unwrap();
    wait_for_the_kill()
}

fn commit_short<C: EffectClass>(space: &Namespace<C>) {
    let claim = space.claim("short").unwrap().claim().unwrap();
    say(&format!("derived {}", claim.derived_key("charge")));
    let mut started = claim.start(b"").map_err(idemlog::Error::from).unwrap();
    let commit = Commit::new("outcome").retention(Duration::from_secs(1));
    let verdict = started.commit_with(commit).unwrap();
    assert!(matches!(verdict, CommitVerdict::Committed { .. }));
}

#[test]
fn a_copy_that_arrives_after_expiry_runs_again_with_the_same_derived_key() {
    let stores = LEVELS.map(|(name, level)| {
        let dir = tempfile::tempdir().unwrap();
        let mut victim = Victim::start("expire", name, 0, dir.path());
        let lines = victim.lines_until(READY);
        victim.kill();
        let derived = lines
            .iter()
            .filter_map(|line| line.strip_prefix("derived "));
        (
            open(dir.path(), level),
            derived.map(str::to_owned).collect::<Vec<_>>(),
            dir,
        )
    });
    // A second of retention, rounded up to whole seconds.
    std::thread::sleep(Duration::from_millis(2100));
    for (log, derived, _dir) in stores {
        assert_eq!(derived.len(), 4);
        is_new_again(&space::<Repeatable>(&log, "repeatable"), &derived[0]);
        is_new_again(&probed(&log), &derived[1]);
        is_new_again(&space::<NonRepeatable>(&log, "non-repeatable"), &derived[2]);
        is_new_again(&space::<Internal>(&log, "internal"), &derived[3]);
        log.close().unwrap();
    }
}

fn is_new_again<C: EffectClass>(space: &Namespace<C>, derived: &str) {
    let ClaimVerdict::New(claim) = space.claim("short").unwrap() else {
        panic!("not new")
    };
    assert_eq!(claim.derived_key("charge"), derived);
    assert!(claim.fail(Failure::Release).unwrap().is_applied());
}
