//! Other embedded stores, and ours, behind one small interface, for the rigs of `xtask`.
//!
//! ```text
//! peers ENGINE work DIR NOTES COUNT [FAULT_AT]   inserts key n durably, then notes "ACK n"
//! peers ENGINE fill DIR COUNT                    the same without notes, and a clean close
//! peers ENGINE check DIR NOTES [read]            is every noted key there, with its value?
//! peers ENGINE look DIR NOTES                    says what it finds, and dies
//! ```
//!
//! Exit codes: 0 all as promised, 1 lost keys or wrong answers, 3 the store gave an error, 101 a
//! panic. Every insert is followed by the strongest flush that the store documents.

mod engine;

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use engine::{Engine, open};

pub(crate) type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

/// Keys behind the last asked one that must be absent, and keys written after a check.
const MORE_COUNT: u64 = 10;
/// Inserts after the first failed one.
const AFTER_COUNT: u64 = 5;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match *words.as_slice() {
        [engine, "work", dir, notes, count] => work(engine, dir, Some(notes), count, None),
        [engine, "work", dir, notes, count, fault_at] => {
            work(engine, dir, Some(notes), count, fault_at.parse().ok())
        }
        [engine, "fill", dir, count] => work(engine, dir, None, count, None),
        [engine, "check", dir, notes] => check(engine, dir, notes, true),
        [engine, "check", dir, notes, "read"] => check(engine, dir, notes, false),
        [engine, "look", dir, notes] => look(engine, dir, notes),
        _ => Err("usage: see the head of main.rs".into()),
    };
    done.unwrap_or_else(|error| {
        eprintln!("{error}");
        ExitCode::from(3)
    })
}

fn key(number: u64) -> Vec<u8> {
    format!("key-{number:08}").into_bytes()
}

fn value(number: u64) -> Vec<u8> {
    format!("value of {number}; ").repeat(4).into_bytes()
}

fn work(
    engine: &str,
    dir: &str,
    notes: Option<&str>,
    count: &str,
    fault_at: Option<u64>,
) -> Fallible<ExitCode> {
    let notes = notes.map(|path| OpenOptions::new().append(true).create(true).open(path));
    let notes = notes.transpose()?;
    let say = |line: String| -> Fallible<()> {
        if let Some(mut notes) = notes.as_ref() {
            notes.write_all(line.as_bytes())?;
        }
        Ok(())
    };
    let mut store = open(engine, Path::new(dir))?;
    for number in 0..count.parse()? {
        if fault_at == Some(number) {
            say("fault on\n".to_owned())?;
        }
        say(format!("ASK {number}\n"))?;
        match store.put(&key(number), &value(number)) {
            Ok(()) => say(format!("ACK {number}\n"))?,
            Err(error) if fault_at.is_none() => return Err(error),
            Err(_) => {
                say("fault off\n".to_owned())?;
                after_failure(store.as_mut(), number, &say)?;
                break;
            }
        }
    }
    if fault_at.is_some() {
        say("fault off\n".to_owned())?;
        die()?;
    }
    store.close()?;
    Ok(ExitCode::SUCCESS)
}

/// The device works again: what is acknowledged from here on counts like everything else.
fn after_failure(
    store: &mut dyn Engine,
    failed: u64,
    say: &impl Fn(String) -> Fallible<()>,
) -> Fallible<()> {
    for number in failed + 1..=failed + AFTER_COUNT {
        say(format!("ASK {number}\n"))?;
        if store.put(&key(number), &value(number)).is_ok() {
            say(format!("ACK {number}\n"))?;
        }
    }
    Ok(())
}

struct Asked {
    acknowledged: Vec<u64>,
    /// The first number that was never asked for.
    end: u64,
}

fn read_notes(path: &str) -> Fallible<Asked> {
    let text = std::fs::read_to_string(path)?;
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let numbers = |mark: &str| -> Vec<u64> {
        whole
            .lines()
            .filter_map(|line| line.strip_prefix(mark)?.trim().parse().ok())
            .collect()
    };
    let end = numbers("ASK ")
        .into_iter()
        .max()
        .map_or(0, |number| number + 1);
    Ok(Asked {
        acknowledged: numbers("ACK "),
        end,
    })
}

fn check(engine: &str, dir: &str, notes: &str, writes: bool) -> Fallible<ExitCode> {
    let asked = read_notes(notes)?;
    let mut store = open(engine, Path::new(dir))?;
    let (mut lost, mut wrong, mut unanswered) = (0, 0, 0);
    for number in &asked.acknowledged {
        match store.get(&key(*number)) {
            Ok(Some(found)) if found == value(*number) => {}
            Ok(Some(_)) => wrong += 1,
            Ok(None) => lost += 1,
            Err(_) => unanswered += 1,
        }
    }
    for number in asked.end..asked.end + MORE_COUNT {
        wrong += i32::from(matches!(store.get(&key(number)), Ok(Some(_))));
    }
    println!("RESULT lost={lost} wrong={wrong} unanswered={unanswered}");
    if writes && lost + wrong == 0 {
        for number in asked.end..asked.end + MORE_COUNT {
            store.put(&key(number), &value(number))?;
        }
        store.close()?;
        let store = open(engine, Path::new(dir))?;
        for number in asked.end..asked.end + MORE_COUNT {
            if store.get(&key(number))? != Some(value(number)) {
                lost += 1;
            }
        }
        store.close()?;
    }
    Ok(if lost + wrong == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    })
}

/// Says which asked keys are there, and dies without closing.
fn look(engine: &str, dir: &str, notes: &str) -> Fallible<ExitCode> {
    let asked = read_notes(notes)?;
    let store = open(engine, Path::new(dir))?;
    let mut out = File::options().write(true).open("/dev/stdout")?;
    for number in 0..asked.end {
        let state = match store.get(&key(number))? {
            Some(found) if found == value(number) => "there",
            Some(_) => "wrong",
            None => "absent",
        };
        writeln!(out, "FOUND {number} {state}")?;
    }
    die()
}

fn die() -> Fallible<ExitCode> {
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)?;
    Ok(ExitCode::from(1))
}
