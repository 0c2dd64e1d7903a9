//! `cargo xtask rel LAYER..`: the reliability layers, each with its counts.
//!
//! ```text
//! cargo xtask rel list                        which layers there are
//! cargo xtask rel block fsyncfail --full      these two, at their full size
//! cargo xtask rel all --ci --record           everything, small; one ledger line for each
//! cargo xtask rel totals                      adds the ledger up
//! ```
//!
//! A layer lives in `src/layer/`. What it needs and this machine has not (root, FUSE, strace)
//! makes it `SKIPPED` with a reason, never failed.

mod args;
mod child;
mod context;
mod layer;
mod ledger;
mod process;
mod rig;
mod store;

use std::process::ExitCode;
use std::time::Instant;

use args::{Request, Run};
use context::{Context, Fallible, Outcome};
use layer::Layer;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    if let Some(code) = child::run(&words) {
        return code;
    }
    let done = match args::parse(&words) {
        Ok(Request::List) => {
            for layer in layer::LAYERS {
                println!("{:<10} {}", layer.name, layer.question);
            }
            Ok(true)
        }
        Ok(Request::Totals { ledger }) => ledger::print_totals(&ledger).map(|()| true),
        Ok(Request::Run(run)) => run_layers(&run),
        Err(error) => Err(error),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::from(2)
        }
    }
}

/// Runs the layers one after the other; says whether none failed.
fn run_layers(run: &Run) -> Fallible<bool> {
    let mut all_passed = true;
    for layer in &run.layers {
        let context = Context::new(run)?;
        println!("== {} (seed {})", layer.name, context.seed);
        all_passed &= run_layer(layer, &context, run)?;
    }
    Ok(all_passed)
}

fn run_layer(layer: &Layer, context: &Context, run: &Run) -> Fallible<bool> {
    let (began, cpu_before) = (Instant::now(), process::cpu_seconds());
    let outcome = (layer.run)(context).unwrap_or_else(|error| Outcome::broken(&*error));
    let took = began.elapsed().as_secs_f64();
    println!("{}", outcome.line(layer.name));
    if let Some(file) = &run.ledger {
        let entry = ledger::Entry {
            layer: layer.name,
            context,
            seconds: took,
            cpu_seconds: process::cpu_seconds() - cpu_before,
            outcome: &outcome,
        };
        ledger::append(file, &entry)?;
    }
    Ok(!matches!(outcome, Outcome::Failed { .. }))
}
