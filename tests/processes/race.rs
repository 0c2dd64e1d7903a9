//! Eight processes of four threads go for the same hundred thousand keys; twenty are killed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use idemlog::testing::sim::Rng;
use idemlog::{Durability, Namespace, Observed, Options, Outcome, Repeatable, RunVerdict};

use super::{THREADS, Worker, number, say, small};

const PROCESSES: u64 = 8;
/// Keys that are observed together.
const BATCH: u64 = 100;
/// One key of so many is also a job.
const JOB: u64 = 200;

fn open(dir: &Path) -> idemlog::DedupLog {
    let options = Options::new().shared(true).durability(Durability::Process);
    // Whoever needs room waits for the upkeep of others, whose flushes are slow on a busy disk.
    let options = options
        .segment_bytes(1024 * 1024)
        .turn_timeout(Duration::from_secs(120));
    options.open(dir.join("store")).unwrap()
}

fn keys_count() -> u64 {
    number("IDEMLOG_KEYS", 100_000)
}

fn key(n: u64) -> String {
    format!("key-{n}")
}

fn keys_of(batch: u64) -> Vec<String> {
    (batch * BATCH..(batch + 1) * BATCH).map(key).collect()
}

/// One whole line, which a kill of the process does not take back.
fn note(journal: &mut File, line: &str) {
    journal.write_all(format!("{line}\n").as_bytes()).unwrap();
}

/// Goes through half of the keys in each thread, from another one on, and notes before each batch
/// that it asks, and behind it what it was answered.
pub fn crowd(dir: &Path, start: u64) {
    let log = open(dir);
    let filter = log.filter("f", small()).unwrap();
    let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
    let batches = keys_count() / BATCH;
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (filter, jobs) = (&filter, &jobs);
            scope.spawn(move || {
                let name = format!("journal-{}-{thread}", std::process::id());
                let mut journal = File::create(dir.join(name)).unwrap();
                // Every key is asked for by two threads of each process.
                let first = start * batches / PROCESSES + thread * batches / THREADS;
                for n in 0..batches / 2 {
                    let batch = (first + n) % batches;
                    note(&mut journal, &format!("ask {batch}"));
                    let answers = filter.observe_many(&keys_of(batch)).unwrap();
                    let mut line = format!("told {batch}");
                    for (at, answer) in (0..BATCH).zip(answers) {
                        if answer.unwrap() == Observed::New {
                            line += &format!(" {}", batch * BATCH + at);
                        }
                    }
                    note(&mut journal, &line);
                    for n in (batch * BATCH..(batch + 1) * BATCH).filter(|n| n.is_multiple_of(JOB))
                    {
                        run_one(jobs, n, &mut journal);
                    }
                }
            });
        }
    });
    log.close().unwrap();
    say("done");
}

fn run_one(jobs: &Namespace<Repeatable>, n: u64, journal: &mut File) {
    let outcome = format!("{n}-by-{}", std::process::id());
    let run = || Ok(outcome.clone().into_bytes());
    let ran = jobs.run_once_wait(format!("job-{n}"), Duration::from_secs(60), |_| run());
    match ran.unwrap() {
        RunVerdict::Ran { .. } => note(journal, &format!("ran {n} {outcome}")),
        RunVerdict::Replayed(done) => {
            let Outcome::Kept(found) = done.outcome else {
                panic!("{n} has no outcome");
            };
            let found = String::from_utf8(found).unwrap();
            note(journal, &format!("replayed {n} {found}"));
        }
        other => panic!("{n} {other:?}"),
    }
}

/// What all journals say together.
#[derive(Default)]
struct Told {
    /// How often each key was new.
    news: BTreeMap<u64, u64>,
    /// Batches of which nobody was told what became of them.
    unanswered: BTreeSet<u64>,
    outcomes: BTreeMap<u64, String>,
    ran: BTreeMap<u64, u64>,
    replayed_count: u64,
}

impl Told {
    fn read(&mut self, text: &str) {
        let mut asked = None;
        // A line that a kill has cut was not told.
        for line in text
            .split_inclusive('\n')
            .filter(|line| line.ends_with('\n'))
        {
            let mut words = line.trim_end().split(' ');
            let what = words.next().unwrap();
            let n: u64 = words.next().unwrap().parse().unwrap();
            match what {
                "ask" => asked = Some(n),
                "told" => {
                    assert_eq!(asked.take(), Some(n));
                    for word in words {
                        *self.news.entry(word.parse().unwrap()).or_default() += 1;
                    }
                }
                "ran" | "replayed" => {
                    let outcome = words.next().unwrap();
                    let known = self.outcomes.entry(n).or_insert_with(|| outcome.to_owned());
                    assert_eq!(known, outcome, "job {n}");
                    if what == "ran" {
                        *self.ran.entry(n).or_default() += 1;
                    } else {
                        self.replayed_count += 1;
                    }
                }
                _ => panic!("{line:?}"),
            }
        }
        self.unanswered.extend(asked);
    }
}

/// Each key is new to exactly one thread of one process; or to one that was killed before it could
/// note the answer, whose journal then ends with the question. Every outcome is told alike by all,
/// and nothing is lost.
#[test]
fn a_hundred_thousand_keys_are_new_once_although_twenty_processes_are_killed() {
    let seed = number("IDEMLOG_SEED", 17);
    let (keys, kills) = (keys_count(), number("IDEMLOG_KILLS", 20));
    println!("seed={seed} keys={keys} kills={kills}");
    assert_eq!(keys % BATCH, 0, "whole batches");
    let mut rng = Rng::new(seed);
    let began = Instant::now();
    let dir = tempfile::tempdir().unwrap();
    let start = |number: u64| {
        let mut worker = Worker::start("crowd", number, dir.path());
        let pid = worker.child.id();
        let ended = thread::spawn(move || {
            let _said = worker.read_to("never");
            worker.child.wait().unwrap().success()
        });
        (pid, ended)
    };
    let mut running: Vec<_> = (0..PROCESSES).map(start).collect();
    let mut ended = Vec::new();
    let mut killed_count = 0;
    for n in 0..kills {
        thread::sleep(Duration::from_millis(20 + rng.below(100) as u64));
        let (pid, end) = running.swap_remove(rng.below(running.len()));
        let kill = Command::new("kill")
            .args(["-s", "KILL", &pid.to_string()])
            .status();
        let is_success = end.join().unwrap();
        killed_count += u64::from(kill.unwrap().success() && !is_success);
        ended.push(is_success);
        running.push(start(PROCESSES + n));
    }
    ended.extend(running.into_iter().map(|(_, end)| end.join().unwrap()));
    let raced = began.elapsed();
    let successes = ended.iter().filter(|success| **success).count() as u64;
    assert_eq!(
        successes + killed_count,
        PROCESSES + kills,
        "nobody failed otherwise"
    );
    assert!(
        successes >= PROCESSES && killed_count > kills / 2,
        "{successes} {killed_count}"
    );
    let mut told = Told::default();
    let mut journals = 0;
    for entry in fs::read_dir(dir.path()).unwrap() {
        let path = entry.unwrap().path();
        if path
            .file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with("journal-")
        {
            told.read(&fs::read_to_string(path).unwrap());
            journals += 1;
        }
    }
    let mut silent = 0;
    for n in 0..keys {
        match told.news.get(&n) {
            Some(1) => {}
            None => {
                assert!(
                    told.unanswered.contains(&(n / BATCH)),
                    "{} is new to nobody",
                    key(n)
                );
                silent += 1;
            }
            Some(count) => panic!("{} is new {count} times", key(n)),
        }
    }
    assert_eq!(told.news.len() as u64 + silent, keys);
    assert!(told.unanswered.len() as u64 <= killed_count * THREADS);
    assert!(told.ran.values().all(|count| *count == 1), "{:?}", told.ran);
    assert_eq!(told.outcomes.len() as u64, keys.div_ceil(JOB));
    println!(
        "journals={journals} killed={killed_count} raced={raced:?} unanswered_batches={} \
         new_to_nobody={silent} ran={} replayed={}",
        told.unanswered.len(),
        told.ran.len(),
        told.replayed_count
    );
    // All of it is there for who comes alone.
    let options = Options::new().durability(Durability::Process);
    let log = options.open(dir.path().join("store")).unwrap();
    let filter = log.filter("f", small()).unwrap();
    let mut known = 0;
    for batch in 0..keys / BATCH {
        for observed in filter.observe_many(&keys_of(batch)).unwrap() {
            assert_eq!(observed.unwrap(), Observed::Duplicate, "{batch}");
            known += 1;
        }
    }
    assert_eq!(known, keys);
    let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
    for (n, outcome) in told.outcomes {
        let ran = jobs.run_once(format!("job-{n}"), |_| Ok(b"again".to_vec()));
        let RunVerdict::Replayed(done) = ran.unwrap() else {
            panic!("job {n} is lost");
        };
        assert_eq!(done.outcome, Outcome::Kept(outcome.into_bytes()), "{n}");
    }
    println!("all={:?}", began.elapsed());
}
