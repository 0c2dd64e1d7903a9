//! idemlog beside other stores, and beside the limits that no store can pass, at equal
//! durability.
//!
//! ```text
//! cargo run --release --manifest-path benches/compare/Cargo.toml -- \
//!     [--quick] [--keys 1M|10M|100M|N] [--only STORE,..] [--scenario NAME,..] [--rounds N] \
//!     [--dir DIR] [--results FILE] [--report docs/performance.md]
//! ```
//!
//! One operation for everybody: insert a 16-byte key with an 8-byte expiry if it is absent, and
//! say whether it was. One operation in ten is a duplicate; half of the duplicates are among the
//! last 10,000 keys, half are uniform over all keys. The sequence is the same for every store,
//! and each verdict is checked.
//!
//! A *cell* is one scenario, row, number of keys and store. Each runs in a child process of its
//! own, in an empty directory of its own; rounds are interleaved over the stores. A finished cell
//! is a line of the results file, and a run that finds it there goes on with the next one. The
//! clock, the CPU clock and the bytes of a cell stop when the store is idle, not at the last
//! answer.
//!
//! RocksDB is built from source: it needs libclang (`LIBCLANG_PATH`); `--no-default-features`
//! leaves it out. Redis is used if there is a `redis-server`. A store that is not there is
//! reported as skipped, with the reason.

mod args;
mod cell;
mod figures;
mod measure;
mod plan;
mod process;
mod report;
mod runner;
mod scenario;
mod store;
mod trace;
mod workload;

use std::process::ExitCode;

/// What fails says so in a sentence; nothing here is recovered from.
pub(crate) type Fallible<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.split_first() {
        Some((first, rest)) if first == cell::CHILD => runner::child_main(rest),
        Some((first, rest)) if first == scenario::WRITER => scenario::writer(rest),
        _ => args::Args::parse(&arguments).and_then(|args| runner::run(&args)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("compare: {error}");
            ExitCode::FAILURE
        }
    }
}
