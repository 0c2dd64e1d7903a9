//! `idemlog filter`: lines that remember, also when it is killed.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use super::{Place, done};

/// Lists files as dpkg has them, or makes some like them, with repeats far apart.
fn real_input() -> Vec<u8> {
    let mut input = Vec::new();
    let dir = Path::new("/var/lib/dpkg/info");
    let lists = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .map(|entry| entry.unwrap().path());
    let mut lists: Vec<_> = lists
        .filter(|path| path.extension().is_some_and(|ext| ext == "list"))
        .collect();
    lists.sort();
    for list in lists {
        input.extend(fs::read(list).unwrap());
        if input.len() > 200_000 {
            break;
        }
    }
    if input.is_empty() {
        for index in 0..4000u64 {
            writeln!(input, "/usr/share/{}/{}", index % 7, index * index % 997).unwrap();
        }
    }
    input
}

/// What `awk '!seen[$0]++'` prints.
fn first_copies(input: &[u8]) -> Vec<u8> {
    let mut seen = HashSet::new();
    let mut out = Vec::new();
    for line in input
        .strip_suffix(b"\n")
        .unwrap_or(input)
        .split(|byte| *byte == b'\n')
    {
        if seen.insert(line) {
            out.extend_from_slice(line);
            out.push(b'\n');
        }
    }
    out
}

#[test]
fn filter_prints_the_first_copies_once_and_for_ever() {
    let input = real_input();
    let expected = String::from_utf8(first_copies(&input)).unwrap();
    let lines = input.iter().filter(|byte| **byte == b'\n').count();
    for order in ["emit-first", "mark-first"] {
        let place = Place::new();
        let first = place.filter(&format!("--order {order}"), &input);
        assert_eq!(
            (first.status, first.stdout == expected),
            (0, true),
            "{order}"
        );
        let new = expected.lines().count();
        first.refuses(
            0,
            &[&format!(
                "lines={lines} new={new} duplicates={}",
                lines - new
            )],
        );
        place.filter(&format!("--order {order}"), &input).is(0, "");
    }
}

#[test]
fn filter_takes_empty_lines_and_a_last_line_without_a_newline() {
    for order in ["emit-first", "mark-first"] {
        let place = Place::new();
        let words = format!("--order {order} --batch 2");
        place.filter(&words, b"a\n\n\nb\n\na").is(0, "a\n\nb\n");
        place.filter(&words, b"\nc").is(0, "c\n");
        place.filter(&words, b"c\r\n").is(0, "c\r\n");
        place.filter(&words, b"").is(0, "");
    }
}

#[test]
fn filter_names_the_line_that_is_over_the_limit_and_does_those_before() {
    let place = Place::new();
    let mut input = b"a\nb\n".to_vec();
    input.extend(vec![b'x'; idemlog::KEY_BYTES_MAX]);
    input.push(b'\n');
    let done = place.filter("", &input);
    assert_eq!(done.status, 0, "at the limit: {}", done.stderr);
    input.insert(4, b'y');
    input.splice(0..0, *b"c\n");
    let done = place.filter("", &input);
    done.is(2, "c\n");
    assert!(done.stderr.contains("line=4"), "{done:?}");
    let endless = place.filter("", &[b'z'; 200_000]);
    endless.is(2, "");
    assert!(endless.stderr.contains("line=1"), "{endless:?}");
}

#[test]
fn filter_finds_the_key_in_a_json_line() {
    let place = Place::new();
    let input = br#"{"user": {"id": 1}, "at": 10}
{"user": {"id": "1"}, "at": 11}
{"at": 12, "user": {"id": 1}}
{"user": {"id": 123456789012345678901}}
{"user": {"id": 123456789012345678902}}
"#;
    let done = place.filter("--key-field user.id", input);
    assert_eq!(done.stdout.lines().count(), 4, "{done:?}");
    assert!(!done.stdout.contains("12,"), "{done:?}");
    let done = place.filter(
        "--key-field user.id",
        b"{\"user\": {\"id\": 2}}\n{\"user\": 3}\n",
    );
    done.is(2, "{\"user\": {\"id\": 2}}\n");
    assert!(
        done.stderr.contains("line=2") && done.stderr.contains("user.id"),
        "{done:?}"
    );
}

#[test]
fn filter_does_not_wait_for_a_full_batch() {
    let place = Place::new();
    let mut child = place
        .command(&["filter"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    for line in [&b"one\n"[..], b"two\n"] {
        stdin.write_all(line).unwrap();
        let mut answer = vec![0; line.len()];
        std::io::Read::read_exact(&mut stdout, &mut answer).unwrap();
        assert_eq!(answer, line);
        // Between batches the store is free.
        assert_eq!(place.say("stats").status, 0);
    }
    drop(stdin);
    assert!(child.wait().unwrap().success());
}

#[test]
fn filter_asks_for_a_busy_line_after_it_has_committed_the_others() {
    let place = Place::new();
    let claim = "claim --namespace emit --effects repeatable --key b --lease 600ms";
    assert_eq!(place.say(claim).status, 0);
    let mut child = place
        .command(&["filter"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"a\nb\nc\n").unwrap();
    let mut first = [0; 4];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut first).unwrap();
    assert_eq!(&first, b"a\nc\n");
    assert_eq!(
        place.filter("", b"c\na\n").stdout,
        "",
        "committed while b is waited for"
    );
    done(child.wait_with_output().unwrap()).is(0, "b\n");
}

#[test]
fn filters_at_once_share_the_lines() {
    let place = Place::new();
    let lines: Vec<String> = (0..600).map(|index| format!("line {index}")).collect();
    fs::write(place.path("input"), lines.join("\n")).unwrap();
    for order in ["emit-first", "mark-first"] {
        let start = |_| {
            let mut command = place.command(&["filter", "--order", order, "--batch", "50"]);
            command
                .stdin(fs::File::open(place.path("input")).unwrap())
                .spawn()
                .unwrap()
        };
        let children: Vec<Child> = (0..3).map(start).collect();
        let mut printed = Vec::new();
        for child in children {
            let done = done(child.wait_with_output().unwrap());
            assert_eq!(done.status, 0, "{done:?}");
            printed.extend(done.stdout.lines().map(str::to_owned));
        }
        printed.sort();
        let mut expected = lines.clone();
        expected.sort();
        assert_eq!(printed, expected, "{order}");
    }
}

/// Feeds lines to filters that are killed, and counts how often each line came out.
fn killed_filter(order: &str, batch: usize, kills: u64) -> (HashMap<String, usize>, usize) {
    let place = Place::new();
    let lines = 4000;
    let input: String = (0..lines).map(|index| format!("line {index}\n")).collect();
    fs::write(place.path("input"), input).unwrap();
    let mut printed = HashMap::new();
    for kill in 0..=kills {
        let out = fs::File::create(place.path("out")).unwrap();
        let batch = batch.to_string();
        let mut child = place
            .command(&["filter", "--order", order, "--batch", &batch])
            .stdin(fs::File::open(place.path("input")).unwrap())
            .stdout(out)
            .spawn()
            .unwrap();
        if kill < kills {
            std::thread::sleep(Duration::from_millis(15 + kill * 13));
            child.kill().unwrap();
            child.wait().unwrap();
        } else {
            assert!(child.wait().unwrap().success());
        }
        // A line that the kill cut short was not printed as far as its reader is concerned.
        let out = fs::read_to_string(place.path("out")).unwrap();
        for line in out
            .split_inclusive('\n')
            .filter_map(|line| line.strip_suffix('\n'))
        {
            *printed.entry(line.to_owned()).or_default() += 1;
        }
    }
    (printed, lines)
}

#[test]
fn a_killed_filter_repeats_at_most_a_batch_when_it_emits_first() {
    let (printed, lines) = killed_filter("emit-first", 100, 6);
    assert_eq!(printed.len(), lines, "a line was lost");
    let repeats: usize = printed.values().map(|count| count - 1).sum();
    assert!(repeats <= 6 * 100, "{repeats}");
}

#[test]
fn a_killed_filter_repeats_nothing_when_it_marks_first() {
    let (printed, lines) = killed_filter("mark-first", 100, 6);
    assert!(
        printed.values().all(|count| *count == 1),
        "a line was repeated"
    );
    assert!(
        lines - printed.len() <= 6 * 100,
        "{} lines lost",
        lines - printed.len()
    );
}

/// Kills a filter that blocks on a full pipe in the middle of printing its only batch: after the
/// claims or marks, before the commit. Returns (lines, printed before the kill, printed after).
fn killed_while_printing(order: &str) -> (Vec<String>, Vec<String>, Vec<String>) {
    let place = Place::new();
    // A pipe holds 64 KiB: this batch is more than three times that.
    let lines: Vec<String> = (0..2000).map(|index| format!("{index:0100}")).collect();
    let input = lines.join("\n") + "\n";
    fs::write(place.path("input"), &input).unwrap();
    let words = ["filter", "--order", order, "--batch", "2000"];
    let mut command = place.command(&words);
    command.stdin(fs::File::open(place.path("input")).unwrap());
    let mut child = command.spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    let mut first = vec![0; 101];
    std::io::Read::read_exact(&mut out, &mut first).unwrap();
    // It prints now, and cannot end: nobody reads on until it is dead.
    child.kill().unwrap();
    child.wait().unwrap();
    std::io::Read::read_to_end(&mut out, &mut first).unwrap();
    let first = String::from_utf8(first).unwrap();
    let complete = first
        .split_inclusive('\n')
        .filter_map(|line| line.strip_suffix('\n'));
    let after = place.run_with_input(&words, input.as_bytes());
    assert_eq!(after.status, 0, "{}", after.stderr);
    (
        lines,
        complete.map(str::to_owned).collect(),
        after.stdout.lines().map(str::to_owned).collect(),
    )
}

#[test]
fn a_kill_between_print_and_commit_repeats_the_batch_when_it_emits_first() {
    let (lines, before, after) = killed_while_printing("emit-first");
    assert!(
        !before.is_empty() && before.len() < lines.len(),
        "{} printed",
        before.len()
    );
    assert_eq!(before, lines[..before.len()]);
    assert_eq!(
        after, lines,
        "all again: nothing was committed, so nothing may be lost"
    );
}

#[test]
fn a_kill_between_mark_and_print_loses_the_batch_when_it_marks_first() {
    let (lines, before, after) = killed_while_printing("mark-first");
    assert!(
        !before.is_empty() && before.len() < lines.len(),
        "{} printed",
        before.len()
    );
    assert_eq!(before, lines[..before.len()]);
    assert!(after.is_empty(), "a line was repeated: {:?}", after.first());
}
