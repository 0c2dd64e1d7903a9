//! The command line.

use std::path::{Path, PathBuf};

use crate::Fallible;

#[derive(Debug)]
pub(crate) struct Args {
    /// One round at small counts, in under four minutes.
    pub(crate) quick: bool,
    /// The numbers of keys of the scenarios that have one.
    pub(crate) keys: Vec<u64>,
    /// Whether `--keys` was given: small counts then hold for every scenario.
    pub(crate) keys_given: bool,
    pub(crate) only: Vec<String>,
    pub(crate) scenarios: Vec<String>,
    pub(crate) rounds: u32,
    /// Where the stores lie; the file system under it is what is measured.
    pub(crate) dir: PathBuf,
    pub(crate) results: PathBuf,
    pub(crate) report: Option<PathBuf>,
}

impl Args {
    pub(crate) fn parse(arguments: &[String]) -> Fallible<Args> {
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut args = Args {
            quick: false,
            keys: Vec::new(),
            keys_given: false,
            only: Vec::new(),
            scenarios: Vec::new(),
            rounds: 0,
            dir: package.join("target/data"),
            results: package.join("target/results.jsonl"),
            report: None,
        };
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let mut value = || {
                rest.next()
                    .ok_or_else(|| format!("{argument} needs a value"))
            };
            match argument.as_str() {
                "--quick" => args.quick = true,
                "--keys" => args.keys.extend(
                    list(value()?)
                        .iter()
                        .map(|n| count(n))
                        .collect::<Fallible<Vec<_>>>()?,
                ),
                "--only" => args.only.extend(list(value()?)),
                "--scenario" => args.scenarios.extend(list(value()?)),
                "--rounds" => args.rounds = value()?.parse()?,
                "--dir" => args.dir = value()?.into(),
                "--results" => args.results = value()?.into(),
                "--report" => args.report = Some(value()?.into()),
                other => return Err(format!("no option {other}; see the head of main.rs").into()),
            }
        }
        if args.rounds == 0 {
            args.rounds = if args.quick { 1 } else { 3 };
        }
        args.keys_given = !args.keys.is_empty();
        if !args.keys_given {
            args.keys.push(if args.quick { 100_000 } else { 1_000_000 });
        }
        Ok(args)
    }
}

fn list(text: &str) -> Vec<String> {
    text.split(',').map(str::to_owned).collect()
}

/// Reads `100k`, `1M` or a plain number.
fn count(text: &str) -> Fallible<u64> {
    let (digits, unit) = match text.strip_suffix(['k', 'K']) {
        Some(digits) => (digits, 1_000),
        None => match text.strip_suffix(['m', 'M']) {
            Some(digits) => (digits, 1_000_000),
            None => (text, 1),
        },
    };
    Ok(digits.parse::<u64>()? * unit)
}
