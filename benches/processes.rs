//! How many keys a second do several processes get through one store, in batches of 100?
//!
//! ```text
//! cargo bench --bench processes
//! ```
//!
//! Each round runs every arrangement once, one after the other; the medians of the rounds are
//! printed, and the ratio to one process that has the store for itself. The keys are new, at the
//! level `Process`. Memory is the largest resident set of one process, and the part of it that is
//! not shared with others.

#![expect(
    clippy::print_stdout,
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a program that measures and prints"
)]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use idemlog::{DedupLog, Durability, NamespaceOptions, Options};

const ROUNDS: usize = 5;
const BATCHES: u64 = 20_000;
const BATCH_KEYS: u64 = 100;

/// How many processes, and whether they share.
const ARRANGEMENTS: [(u64, bool); 4] = [(1, false), (1, true), (2, true), (4, true)];

fn main() {
    let words: Vec<String> = std::env::args().collect();
    match words.iter().position(|word| word == "--child") {
        Some(at) => child(&words[at + 1..]),
        None => parent(),
    }
}

fn open(dir: &Path, shared: bool) -> DedupLog {
    let options = Options::new()
        .durability(Durability::Process)
        .shared(shared);
    options.open(dir).unwrap()
}

/// Says that it is ready, waits for the start, and observes its own keys.
fn child(words: &[String]) {
    let [dir, number, batches, shared] = words else {
        panic!("{words:?}");
    };
    let log = open(Path::new(dir), shared == "true");
    let filter = log.filter("f", NamespaceOptions::new()).unwrap();
    println!("ready");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let first: u64 = number.parse::<u64>().unwrap() << 40;
    for batch in 0..batches.parse().unwrap() {
        let keys: Vec<[u8; 16]> = (0..BATCH_KEYS)
            .map(|n| u128::from(first + batch * BATCH_KEYS + n).to_le_bytes())
            .collect();
        for observed in filter.observe_many(&keys).unwrap() {
            assert!(observed.unwrap().is_new());
        }
    }
    let (resident, shared) = memory_kib();
    println!("memory {resident} {}", resident - shared);
    log.close().unwrap();
}

/// Returns the resident set, and the part of it that comes from files.
fn memory_kib() -> (u64, u64) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name));
        let number = line.and_then(|line| line.split_whitespace().nth(1));
        number.map_or(0, |number| number.parse().unwrap())
    };
    (field("VmRSS:"), field("RssFile:"))
}

/// Returns keys a second of all together, and the largest memory of one.
fn run(processes: u64, shared: bool) -> (f64, u64, u64) {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let batches = BATCHES / processes;
    let spawn = |number: u64| {
        Command::new(std::env::current_exe().unwrap())
            .arg("--child")
            .arg(&store)
            .args([number.to_string(), batches.to_string(), shared.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let mut children: Vec<Child> = (0..processes).map(spawn).collect();
    let mut outputs: Vec<_> = children
        .iter_mut()
        .map(|child| BufReader::new(child.stdout.take().unwrap()).lines())
        .collect();
    for lines in &mut outputs {
        assert_eq!(lines.next().unwrap().unwrap(), "ready");
    }
    let began = Instant::now();
    for child in &mut children {
        child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    }
    let (mut resident, mut own) = (0, 0);
    for lines in &mut outputs {
        let line = lines.next().unwrap().unwrap();
        let mut numbers = line.split(' ').skip(1).map(|n| n.parse::<u64>().unwrap());
        resident = resident.max(numbers.next().unwrap());
        own = own.max(numbers.next().unwrap());
    }
    let seconds = began.elapsed().as_secs_f64();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let keys = (processes * batches * BATCH_KEYS) as f64;
    (keys / seconds, resident, own)
}

fn parent() {
    let mut rates = vec![Vec::new(); ARRANGEMENTS.len()];
    let mut memory = vec![(0, 0); ARRANGEMENTS.len()];
    for _ in 0..ROUNDS {
        for (at, (processes, shared)) in ARRANGEMENTS.into_iter().enumerate() {
            let (rate, resident, own) = run(processes, shared);
            rates[at].push(rate);
            memory[at] = memory[at].max((resident, own));
        }
    }
    let medians: Vec<f64> = rates
        .iter_mut()
        .map(|rates| {
            rates.sort_by(f64::total_cmp);
            rates[rates.len() / 2]
        })
        .collect();
    println!("| processes | keys a second, all together | to one alone | memory, MiB | own, MiB |");
    println!("|---|---|---|---|---|");
    for (at, (processes, shared)) in ARRANGEMENTS.into_iter().enumerate() {
        let kind = if shared { "sharing" } else { "alone" };
        let (resident, own) = memory[at];
        println!(
            "| {processes} {kind} | {:.0} | {:.2} | {:.0} | {:.0} |",
            medians[at],
            medians[at] / medians[0],
            resident as f64 / 1024.0,
            own as f64 / 1024.0,
        );
    }
}
