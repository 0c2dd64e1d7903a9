//! What was asked for on the command line.

use std::path::PathBuf;
use std::time::Duration;

use crate::context::{Fallible, Mode, repository_root};
use crate::layer::{LAYERS, Layer};

const USAGE: &str = "usage: cargo xtask rel LAYER..|all [--ci|--full] [--seed S] [--hours H] \
                     [--count N] [--fs NAME] [--sanity] [--update] [--record] [--ledger FILE] \
                     | rel list | rel totals";

pub(crate) enum Request {
    List,
    Totals { ledger: PathBuf },
    Run(Run),
}

pub(crate) struct Run {
    pub(crate) layers: Vec<&'static Layer>,
    pub(crate) mode: Mode,
    pub(crate) seed: u64,
    /// How long one layer may take, if it can choose.
    pub(crate) budget: Option<Duration>,
    /// Replaces the layer's own count of states, trials or cases.
    pub(crate) count: Option<u64>,
    pub(crate) sanity: bool,
    /// Write what was measured as the new bounds.
    pub(crate) update: bool,
    /// Only this file system, if it was told.
    pub(crate) file_system: Option<String>,
    /// Where a line is appended for each layer, if anywhere.
    pub(crate) ledger: Option<PathBuf>,
}

pub(crate) fn parse(words: &[&str]) -> Fallible<Request> {
    let Some((&"rel", words)) = words.split_first() else {
        return Err(USAGE.into());
    };
    let default_ledger = repository_root().join("xtask/ledger.jsonl");
    let mut run = Run {
        layers: Vec::new(),
        mode: Mode::Ci,
        seed: fresh_seed(),
        budget: None,
        count: None,
        sanity: false,
        update: false,
        file_system: None,
        ledger: None,
    };
    let (mut list, mut totals) = (false, false);
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
        match *word {
            "list" => list = true,
            "totals" => totals = true,
            "all" => run
                .layers
                .extend(LAYERS.iter().filter(|layer| layer.in_all)),
            "--ci" => run.mode = Mode::Ci,
            "--full" => run.mode = Mode::Full,
            "--seed" => run.seed = value()?.parse()?,
            "--hours" => {
                run.budget = Some(Duration::from_secs_f64(value()?.parse::<f64>()? * 3600.0))
            }
            "--count" => run.count = Some(value()?.parse()?),
            "--fs" => run.file_system = Some((*value()?).to_owned()),
            "--sanity" => run.sanity = true,
            "--update" => run.update = true,
            "--record" => run.ledger = Some(default_ledger.clone()),
            "--ledger" => run.ledger = Some(PathBuf::from(value()?)),
            name => match LAYERS.iter().find(|layer| layer.name == name) {
                Some(layer) => run.layers.push(layer),
                None => return Err(format!("no layer called {name}; {USAGE}").into()),
            },
        }
    }
    if list {
        return Ok(Request::List);
    }
    if totals {
        let ledger = run.ledger.unwrap_or(default_ledger);
        return Ok(Request::Totals { ledger });
    }
    if run.layers.is_empty() {
        return Err(USAGE.into());
    }
    Ok(Request::Run(run))
}

/// A seed that is not the last run's; it is printed and recorded.
fn fresh_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    u64::from(now.map_or(1, |since| since.subsec_nanos())) % 1_000_000
}
