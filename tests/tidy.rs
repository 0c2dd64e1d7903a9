//! The house style, as far as a program can check it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Modules by rank: each imports lower ranks only, and none of its own but rank 0 and the engine.
const RANKS: [&[&str]; 5] = [
    &[
        "key",
        "key_parts",
        "json_field",
        "key_time",
        "stamp",
        "position",
        "error",
        "options",
        "clock",
        "stats",
        "verdict",
    ],
    &["format", "vfs"],
    &["model", "log", "index"],
    &["engine"],
    &["http"],
];

const LINES_MAX: usize = 800;
const COLUMNS_MAX: usize = 100;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All Rust files below a folder, with their contents.
fn files(folder: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&folder) else {
            continue;
        };
        for path in entries.map(|entry| entry.unwrap().path()) {
            if path.is_dir() && !path.ends_with("target") {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                found.push((path.strip_prefix(root()).unwrap().to_owned(), text));
            }
        }
    }
    found.sort();
    found
}

/// The part of a file before its tests.
fn code(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod tests").next().unwrap()
}

fn is_tests(path: &Path) -> bool {
    path.ends_with("tests.rs")
}

/// The library module that a file belongs to; `None` for lib.rs, the binary and test bodies.
fn module(path: &Path) -> Option<String> {
    let first = path.strip_prefix("src").ok()?.components().next()?;
    let name = first.as_os_str().to_str()?.trim_end_matches(".rs");
    (!["lib", "bin", "fuzz"].contains(&name)).then(|| name.to_owned())
}

fn rank(module: &str) -> Option<usize> {
    RANKS.iter().position(|names| names.contains(&module))
}

/// Modules named as `crate::<module>` in code, not in comments.
fn imports(text: &str) -> BTreeSet<String> {
    let lines = code(text)
        .lines()
        .map(|line| line.split("//").next().unwrap());
    lines
        .flat_map(|line| {
            line.split("crate::")
                .skip(1)
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .map(|rest| {
            rest.chars()
                .take_while(|c| c.is_alphanumeric() || *c == '_')
                .collect()
        })
        .filter(|name: &String| !name.is_empty())
        .collect()
}

fn complain(problems: Vec<String>) {
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

#[test]
fn modules_import_lower_ranks_only() {
    let mut problems = Vec::new();
    for (path, text) in files("src") {
        let Some(here) = module(&path) else { continue };
        let Some(own) = rank(&here) else {
            problems.push(format!("{}: module {here} has no rank", path.display()));
            continue;
        };
        for name in imports(&text) {
            let Some(other) = rank(&name) else { continue };
            let fine = other < own || name == here || (other == own && own == 0);
            if !fine && !is_tests(&path) {
                problems.push(format!("{}: {here} imports {name}", path.display()));
            }
        }
    }
    complain(problems);
}

#[test]
fn files_are_short_narrow_and_ascii() {
    let mut problems = Vec::new();
    for folder in ["src", "tests", "examples", "benches", "fuzz/fuzz_targets"] {
        for (path, text) in files(folder) {
            let name = path.display();
            let lines = code(&text).lines().count();
            if lines > LINES_MAX && folder == "src" && !is_tests(&path) {
                problems.push(format!("{name}: {lines} lines without tests"));
            }
            for (index, line) in text.lines().enumerate() {
                let at = format!("{name}:{}", index + 1);
                if line.chars().count() > COLUMNS_MAX {
                    problems.push(format!("{at}: over {COLUMNS_MAX} columns"));
                }
                if !line.is_ascii() && folder == "src" && index < lines {
                    problems.push(format!("{at}: not ASCII"));
                }
                if line.ends_with([' ', '\t']) || line.contains('\t') {
                    problems.push(format!("{at}: tab or trailing space"));
                }
                let unfinished = ["TODO", "FIXME", "XXX"];
                let is_rule = path.ends_with("tidy.rs");
                if unfinished.iter().any(|word| line.contains(word)) && !is_rule {
                    let has_issue = line.contains("(#");
                    if !has_issue {
                        problems.push(format!("{at}: unfinished without an issue's number"));
                    }
                }
            }
        }
    }
    complain(problems);
}

#[test]
fn every_test_file_is_listed_in_the_one_binary() {
    let main = std::fs::read_to_string(root().join("tests/main.rs")).unwrap();
    let mut problems = Vec::new();
    for entry in std::fs::read_dir(root().join("tests")).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let is_module = path.extension().is_some_and(|extension| extension == "rs")
            || path.join("mod.rs").exists();
        if is_module && stem != "main" && !main.contains(&format!("mod {stem};")) {
            problems.push(format!("tests/{stem} is not in tests/main.rs"));
        }
    }
    complain(problems);
}

/// Words that only some files may hold, in code and not in comments.
const CONFINED: [(&str, &[&str]); 9] = [
    ("std::fs", &["src/vfs/", "src/bin/"]),
    ("memmap2", &["src/vfs/"]),
    ("rustix::fs", &["src/vfs/", "src/clock.rs", "src/bin/"]),
    ("SystemTime", &["src/clock.rs", "src/bin/"]),
    ("Instant::now", &["src/clock.rs", "src/bin/"]),
    ("clock_gettime", &["src/clock.rs", "src/bin/"]),
    ("thread::sleep", &[]),
    (
        "unsafe {",
        &["src/vfs/map.rs", "src/vfs/fork.rs", "src/index/prefetch.rs"],
    ),
    ("static mut", &[]),
];

#[test]
fn disk_time_and_unsafe_stay_where_they_belong() {
    let mut problems = Vec::new();
    for (path, text) in files("src") {
        if is_tests(&path) {
            continue;
        }
        let name = path.to_str().unwrap();
        for (index, line) in code(&text).lines().enumerate() {
            let line = line.split("//").next().unwrap();
            for (word, allowed) in CONFINED {
                if line.contains(word) && !allowed.iter().any(|place| name.starts_with(place)) {
                    problems.push(format!("{name}:{}: {word}", index + 1));
                }
            }
        }
    }
    complain(problems);
}

#[test]
fn bytes_and_decisions_know_no_disk_no_clock_and_no_panic() {
    let forbidden = [
        "std::fs",
        "std::io",
        "crate::vfs",
        "Instant",
        "SystemTime",
        "thread",
    ];
    let panics = [
        ".unwrap()",
        ".expect(",
        "panic!(",
        "unreachable!(",
        "todo!(",
    ];
    let mut problems = Vec::new();
    for (path, text) in files("src") {
        let name = path.to_str().unwrap();
        let bytes = name.starts_with("src/format/");
        let pure = bytes || name.starts_with("src/model/");
        let from_disk = bytes || name == "src/log/replay.rs" || name == "src/vfs/disk.rs";
        for (index, line) in code(&text).lines().enumerate() {
            let line = line.split("//").next().unwrap();
            for word in forbidden.iter().filter(|_| pure) {
                if line.contains(word) {
                    problems.push(format!("{name}:{}: {word}", index + 1));
                }
            }
            for word in panics.iter().filter(|_| from_disk) {
                if line.contains(word) {
                    problems.push(format!("{name}:{}: {word}", index + 1));
                }
            }
        }
    }
    complain(problems);
}

#[test]
fn fuzz_targets_are_short_and_have_a_corpus() {
    let mut problems = Vec::new();
    for (path, text) in files("fuzz/fuzz_targets") {
        if text.lines().count() > 15 {
            problems.push(format!("{}: over 15 lines", path.display()));
        }
        let stem = path.file_stem().unwrap();
        let corpus = root().join("fuzz/corpus").join(stem);
        if !std::fs::read_dir(&corpus).is_ok_and(|mut entries| entries.next().is_some()) {
            problems.push(format!("{}: no corpus", path.display()));
        }
    }
    complain(problems);
}

#[test]
fn tests_have_no_ignored_ones_and_every_file_says_what_it_is_about() {
    let mut problems = Vec::new();
    for folder in ["src", "tests", "examples"] {
        for (path, text) in files(folder) {
            if text
                .lines()
                .any(|line| line.trim_start().starts_with("#[ignore"))
            {
                problems.push(format!("{}: ignored test", path.display()));
            }
            if !text.starts_with("//!") && !is_tests(&path) {
                problems.push(format!("{}: does not say what it is about", path.display()));
            }
        }
    }
    complain(problems);
}

/// A table that names a test which is gone promises what nothing shows.
#[test]
fn the_tests_that_the_documents_name_exist() {
    let doc = std::fs::read_to_string(root().join("docs/testing.md")).unwrap();
    let table = doc
        .split("## Which test shows which invariant")
        .nth(1)
        .unwrap();
    let table = table.split("\n## ").next().unwrap();
    let sources: String = files("tests").into_iter().map(|(_, text)| text).collect();
    let mut named = 0;
    for name in table
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|word| !word.contains(' '))
    {
        assert!(sources.contains(&format!("fn {name}(")), "{name}");
        named += 1;
    }
    assert!(named > 20);
}
