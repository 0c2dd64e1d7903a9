//! The command line of idemlog: a persistent `uniq`, commands that run once, and the calls of the
//! library for scripts.
//!
//! Every command opens the store, does its part and closes it again: the store is never held
//! while a line is read, a command runs, or anybody waits.

mod answer;
mod args;
mod bench;
mod calls;
mod child;
mod exit;
mod filter;
mod frame;
mod lines;
mod list;
mod output;
mod renewer;
mod repair;
mod run;
mod space;
mod stats;
mod verify;

use std::ffi::OsStr;
use std::process::ExitCode;

use clap::Parser;

use args::{Arguments, Command};
use bench::place::{REMOVE_WORD, remove_when_over};
use exit::{Code, Stop};

/// Added to a code by `run`: its own answers stay apart from the statuses of the command it runs.
const RUN_CODES_START: u8 = 90;

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args_os().collect();
    if words.get(1).is_some_and(|word| word == child::EXEC_WORD) {
        return child::exec(words.get(2..).unwrap_or_default());
    }
    if words.get(1).is_some_and(|word| word == REMOVE_WORD) {
        return remove_when_over(words.get(2..).unwrap_or_default());
    }
    match Arguments::try_parse_from(&words) {
        Ok(arguments) => match dispatch(&arguments) {
            Ok(status) => ExitCode::from(status),
            Err(stop) => {
                let is_run = matches!(arguments.command, Command::Run(_));
                stop.report(
                    arguments.common.json,
                    if is_run { RUN_CODES_START } else { 0 },
                )
            }
        },
        Err(error) if error.use_stderr() => {
            let options = words
                .iter()
                .skip(1)
                .take_while(|word| *word != OsStr::new("--"));
            // Not parsed, so guessed: the first word that is a command.
            let is_run = options.clone().find(|word| args::is_command(word));
            let start = if is_run.is_some_and(|word| word == "run") {
                RUN_CODES_START
            } else {
                0
            };
            let as_json = options.clone().any(|word| word == "--json");
            Stop::new(Code::Usage, output::one_line(&error)).report(as_json, start)
        }
        // `--help` and `--version` arrive as errors that belong on stdout.
        Err(error) => match error.print() {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        },
    }
}

fn dispatch(arguments: &Arguments) -> Result<u8, Stop> {
    let common = &arguments.common;
    match &arguments.command {
        Command::Filter(options) => filter::filter(common, options),
        Command::Run(options) => run::run(common, options),
        Command::Claim(options) => calls::claim(common, options),
        Command::Renew(options) => calls::renew(common, options),
        Command::Commit(options) => calls::commit(common, options),
        Command::Fail(options) => calls::fail(common, options),
        Command::Get(options) => calls::get(common, options),
        Command::Forget(options) => calls::forget(common, options),
        Command::Resolve(options) => calls::resolve(common, options),
        Command::InDoubt => list::in_doubt(common),
        Command::Pending => list::pending(common),
        Command::Stats => stats::stats(common),
        Command::Verify => verify::verify(common),
        Command::Repair(options) => repair::repair(common, options),
        Command::Bench(options) => bench::bench(common, options),
    }
}
