//! Every call that makes something durable, or that orders it, is left out in turn: some test must
//! notice each.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use super::switched::{Copy, Fate};
use crate::context::{Context, Counts, Fallible, Mode, Outcome};

/// Calls of these names return `Result<()>` and can be left out as a whole.
const NAMES: [&str; 9] = [
    "sync_segment",
    "sync_frozen",
    "sync_all",
    "sync_drops",
    "ensure",
    "ensure_written",
    "ensure_durable",
    "finish_append",
    "write_out",
];

/// One call that can be left out.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    number: u32,
    file: String,
    /// The function that it is in.
    within: String,
    text: String,
}

/// Files of the library that call the disk: all but the disk itself, the command and the bodies of
/// the fuzz targets.
fn sources(root: &Path) -> Fallible<Vec<String>> {
    let mut found = Vec::new();
    let mut folders = vec![root.join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            let name = path
                .strip_prefix(root)
                .unwrap_or(&path)
                .to_string_lossy()
                .into_owned();
            if path.is_dir() {
                if !["src/vfs", "src/bin"].contains(&name.as_str()) {
                    folders.push(path);
                }
            } else if name.ends_with(".rs") && name != "src/fuzz.rs" && !name.ends_with("tests.rs")
            {
                found.push(name);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Puts a switch around every call of the copy and lists them, numbered from 1.
pub(crate) fn switch_all(copy: &Copy) -> Fallible<Vec<Call>> {
    let mut calls = Vec::new();
    for file in sources(copy.folder())? {
        let text = copy.read(&file)?;
        let code_len = text.find("#[cfg(test)]\nmod tests").unwrap_or(text.len());
        let places = places(text.get(..code_len).unwrap_or_default());
        if places.is_empty() {
            continue;
        }
        let mut changed = String::new();
        let mut at = 0;
        for place in places {
            let number = 1 + u32::try_from(calls.len())?;
            let call = &text[place.start..place.end];
            changed.push_str(&text[at..place.start]);
            write!(
                changed,
                "(if crate::fault_is({number}) {{ Ok(()) }} else {{ {call} }})"
            )?;
            at = place.end;
            calls.push(Call {
                number,
                file: file.clone(),
                within: function_at(&text, place.start),
                text: call.split_whitespace().collect(),
            });
        }
        changed.push_str(&text[at..]);
        copy.write(&file, &changed)?;
    }
    Ok(calls)
}

struct Place {
    start: usize,
    end: usize,
}

fn places(code: &str) -> Vec<Place> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some((name, len)) = next_name(code, at) {
        at = name + len;
        let before = code[..name].trim_end();
        let line = code[..name].rsplit('\n').next().unwrap_or_default();
        if before.ends_with("fn") || line.contains("//") {
            continue;
        }
        let Some(end) = closing(code, at) else {
            continue;
        };
        if code[at..end].contains("Durability::Buffered") {
            // It makes nothing durable, and orders nothing.
            at = end;
            continue;
        }
        found.push(Place {
            start: receiver_start(code, name),
            end,
        });
        at = end;
    }
    found
}

/// The next name that is followed by a parenthesis: one of the list, or `.sync`.
fn next_name(code: &str, from: usize) -> Option<(usize, usize)> {
    let listed = NAMES.iter().copied();
    let all = listed.chain(["sync"]);
    let found = all.filter_map(|name| {
        let mut at = from;
        loop {
            let here = at + code.get(at..)?.find(&format!("{name}("))?;
            let before = code[..here].chars().next_back();
            let whole = before.is_none_or(|c| !c.is_alphanumeric() && c != '_');
            if whole && (name != "sync" || before == Some('.')) {
                return Some((here, name.len()));
            }
            at = here + 1;
        }
    });
    found.min()
}

/// The end of the parenthesis that opens at `open`.
fn closing(code: &str, open: usize) -> Option<usize> {
    let mut depth = 0;
    for (index, c) in code.get(open..)?.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => {
                depth -= 1;
                if depth == 0 {
                    return Some(open + index + 1);
                }
            }
            _ => {}
        }
    }
    None
}

/// Walks back over `self.dir`, `self.engine()`, `dir` and line breaks between them.
fn receiver_start(code: &str, name: usize) -> usize {
    let mut start = name;
    loop {
        let before = code[..start].trim_end();
        // The full stop at the end of a comment is not a call.
        let is_comment = before
            .rsplit('\n')
            .next()
            .is_some_and(|line| line.contains("//"));
        let Some(mut receiver) = before.strip_suffix('.').filter(|_| !is_comment) else {
            return start;
        };
        receiver = receiver.trim_end();
        if receiver.ends_with(')') {
            let mut depth = 0;
            let open = receiver.char_indices().rev().find(|(_, c)| {
                depth += i32::from(*c == ')') - i32::from(*c == '(');
                depth == 0
            });
            receiver = &receiver[..open.map_or(0, |(at, _)| at)];
        }
        let word = |c: char| c.is_alphanumeric() || c == '_';
        start = receiver.trim_end_matches(word).len();
    }
}

fn function_at(text: &str, at: usize) -> String {
    let before = &text[..at];
    let name = before.rfind("fn ").map(|start| &before[start + 3..]);
    let name = name.unwrap_or_default();
    name.chars()
        .take_while(|c| c.is_alphanumeric() || *c == '_')
        .collect()
}

/// Leaves out one call after the other; a small run takes some of them, drawn by the seed.
pub(crate) fn run(context: &Context) -> Fallible<Outcome> {
    let (copy, calls) = Copy::build_with_faults(context)?;
    if context.mode == Mode::Full {
        copy.check_sound()?;
    }
    let all = calls.len();
    let count = usize::try_from(context.count(6, all as u64))?.min(all);
    let start = usize::try_from(context.seed % all.max(1) as u64)?;
    let mut counts = Counts::default();
    let mut table = String::from("| Call left out | In | Noticed by |\n|---|---|---|\n");
    let mut survived = Vec::new();
    // Neighbours in the source are alike: a small run takes every n-th.
    let step = (all / count.max(1)).max(1);
    for call in calls.iter().cycle().skip(start).step_by(step).take(count) {
        let fate = copy.fate(call.number, None)?;
        let place = format!("{} {}", call.file.trim_start_matches("src/"), call.within);
        println!("  {place}: {} -> {}", call.text, fate.cell());
        counts.check(fate != Fate::Survived);
        if fate == Fate::Survived {
            survived.push(format!("{place}: {}", call.text));
        }
        writeln!(table, "| `{}` | `{place}` | {} |", call.text, fate.cell())?;
    }
    println!("\n{table}");
    let what = format!("calls that no test misses: {}", survived.join("; "));
    Ok(Outcome::judge(counts, what))
}
