//! Replays the committed inputs of the fuzz targets, and some made up on the spot.
//!
//! `IDEMLOG_FUZZ_ROUNDS` raises the number of made-up inputs; each failure prints its input.

use std::path::Path;

use idemlog::testing::fuzz;
use idemlog::testing::sim::Rng;

type Body = fn(&[u8]);

const TARGETS: [(&str, Body); 7] = [
    ("record", fuzz::record),
    ("manifest", fuzz::manifest),
    ("page", fuzz::page),
    ("filter", fuzz::filter),
    ("recovery", fuzz::recovery),
    ("repair", fuzz::repair),
    ("ops", fuzz::ops),
];

const ROUNDS_DEFAULT: u64 = 300;

/// Prints the input of a body that panics.
struct Announce<'a>(&'a str, &'a [u8]);

impl Drop for Announce<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let hex: String = self.1.iter().map(|byte| format!("{byte:02x}")).collect();
            eprintln!("fuzz target={} input={hex}", self.0);
        }
    }
}

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz/corpus")
        .join(target);
    let entries = std::fs::read_dir(folder).unwrap();
    entries
        .map(|entry| std::fs::read(entry.unwrap().path()).unwrap())
        .collect()
}

#[test]
fn the_committed_corpus_breaks_no_rule() {
    for (target, body) in TARGETS {
        let inputs = corpus(target);
        assert!(!inputs.is_empty(), "{target}");
        for input in inputs {
            let _announce = Announce(target, &input);
            body(&input);
        }
    }
}

#[test]
fn changed_and_random_inputs_break_no_rule() {
    let rounds = std::env::var("IDEMLOG_FUZZ_ROUNDS")
        .ok()
        .and_then(|text| text.parse().ok());
    let seed = std::env::var("IDEMLOG_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(1);
    let mut rng = Rng::new(seed);
    for (target, body) in TARGETS {
        let inputs = corpus(target);
        for _ in 0..rounds.unwrap_or(ROUNDS_DEFAULT) {
            let mut input = inputs[rng.below(inputs.len())].clone();
            if rng.below(4) == 0 {
                let len = rng.below(400);
                input = (0..len).map(|_| rng.next_u64().to_le_bytes()[0]).collect();
            }
            for _ in 0..1 + rng.below(4) {
                change(&mut rng, &mut input);
            }
            let _announce = Announce(target, &input);
            body(&input);
        }
    }
}

fn change(rng: &mut Rng, input: &mut Vec<u8>) {
    let at = rng.below(input.len() + 1);
    let byte = rng.next_u64().to_le_bytes()[0];
    match rng.below(5) {
        0 => input.insert(at, byte),
        1 => input.truncate(at),
        2 if at < input.len() => input[at] ^= 1 << (byte % 8),
        3 if at + 8 <= input.len() => input[at..at + 8].fill([0, 0xff][rng.below(2)]),
        _ if at < input.len() => input[at] = byte,
        _ => input.push(byte),
    }
}
