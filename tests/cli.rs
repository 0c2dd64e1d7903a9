//! The binary, as scripts see it: what it prints, its exit codes, and what a kill leaves.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use idemlog::Options;

/// What `run` adds to the codes.
const RUN: i32 = 90;

/// A directory for one test, and the commands run in it.
struct Place {
    dir: tempfile::TempDir,
}

/// What a command left behind.
#[derive(Debug, PartialEq, Eq)]
struct Done {
    status: i32,
    stdout: String,
    stderr: String,
}

impl Place {
    fn new() -> Place {
        Place {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn store(&self) -> PathBuf {
        self.path("store")
    }

    fn command<W: AsRef<OsStr>>(&self, words: &[W]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_idemlog"));
        command
            .args(words)
            .current_dir(self.dir.path())
            .env("IDEMLOG_STORE", self.store());
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn run<W: AsRef<OsStr>>(&self, words: &[W]) -> Done {
        done(self.command(words).output().unwrap())
    }

    /// Splits at blanks: none of the words has one.
    fn say(&self, line: &str) -> Done {
        self.run(&line.split_whitespace().collect::<Vec<_>>())
    }

    fn run_with_input<W: AsRef<OsStr>>(&self, words: &[W], input: &[u8]) -> Done {
        let file = tempfile::NamedTempFile::new_in(self.dir.path()).unwrap();
        fs::write(file.path(), input).unwrap();
        let input = fs::File::open(file.path()).unwrap();
        done(self.command(words).stdin(input).output().unwrap())
    }

    fn filter(&self, words: &str, input: &[u8]) -> Done {
        let mut all = vec!["filter"];
        all.extend(words.split_whitespace());
        self.run_with_input(&all, input)
    }

    /// Runs a shell command under a key.
    fn run_once(&self, words: &str, script: &str) -> Done {
        self.run(&run_words(words, script))
    }

    fn spawn_once(&self, words: &str, script: &str) -> Child {
        self.command(&run_words(words, script)).spawn().unwrap()
    }

    fn ledger(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path("ledger")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Finds the epoch of the one key in doubt.
    fn epoch(&self) -> u64 {
        let list = self.say("in-doubt --json");
        let list: serde_json::Value = serde_json::from_str(&list.stdout).unwrap();
        assert_eq!(list.as_array().unwrap().len(), 1, "{list}");
        list[0]["epoch"].as_u64().unwrap()
    }

    fn wait_for_file(&self, name: &str) {
        while !self.path(name).exists() {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn run_words<'a>(words: &'a str, script: &'a str) -> Vec<&'a str> {
    let mut all = vec!["run"];
    all.extend(words.split_whitespace());
    all.extend(["--", "sh", "-c", script]);
    all
}

fn done(output: Output) -> Done {
    Done {
        // A signal shows as -1.
        status: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

impl Done {
    #[track_caller]
    fn is(&self, status: i32, stdout: &str) {
        assert_eq!(
            (self.status, self.stdout.as_str()),
            (status, stdout),
            "{self:?}"
        );
    }

    /// Checks the code, and that stderr is one line that says all of this.
    #[track_caller]
    fn refuses(&self, status: i32, says: &[&str]) {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.stderr.trim_end().lines().count(), 1, "{self:?}");
        for word in says {
            assert!(self.stderr.contains(word), "{word:?} is missing: {self:?}");
        }
    }
}

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

#[test]
fn run_gives_a_duplicate_the_stdout_and_status() {
    let place = Place::new();
    let script = "echo paid >> ledger; echo receipt $RANDOM_WORD; printf '\\000\\001'";
    let first = place.run_once("--key order-1 --effects non-repeatable", script);
    first.is(0, "receipt\n\0\u{1}");
    assert_eq!(first.stderr, "");
    let again = place.run_once("--key order-1", script);
    again.is(0, "receipt\n\0\u{1}");
    assert_eq!(place.ledger(), ["paid"]);
    let other = place.run_once("--key order-1 --effects repeatable", "true");
    other.refuses(RUN + 2, &["name=default", "found=non-repeatable"]);
    place
        .run_once("--key order-2", "cat; echo to stderr >&2")
        .is(0, "");
}

#[test]
fn run_wants_a_class_before_it_creates_anything() {
    let place = Place::new();
    place
        .run_once("--key k", "true")
        .refuses(RUN + 2, &["--effects"]);
    assert!(!place.store().exists());
    place
        .say("run --effects repeatable -- true")
        .refuses(RUN + 2, &["--key"]);
    place
        .say("run --key k --effects sometimes -- true")
        .refuses(RUN + 2, &["sometimes"]);
    place
        .say("run --key k --effects repeatable")
        .refuses(RUN + 2, &["CMD"]);
    assert!(!place.store().exists());
    let missing = [
        "run",
        "--key",
        "k",
        "--effects",
        "non-repeatable",
        "--",
        "no-such-command",
    ];
    place
        .run(&missing)
        .refuses(RUN + 2, &["no-such-command", "free again"]);
    place.run_once("--key k", "echo ran").is(0, "ran\n");
}

#[test]
fn a_command_that_pays_and_times_out_is_in_doubt_until_somebody_resolves_it() {
    let place = Place::new();
    let script = "echo paid >> ledger; exit 75";
    let words = "--key order-1 --effects non-repeatable";
    place
        .run_once(words, script)
        .refuses(75, &["in-doubt", "status 75"]);
    for _ in 0..2 {
        let refused = place.run_once(words, script);
        refused.refuses(
            RUN + 4,
            &["in doubt", "resolve --namespace default --key order-1"],
        );
    }
    assert_eq!(place.ledger(), ["paid"]);
    let epoch = place.epoch();
    place
        .say(&format!(
            "resolve --key order-1 --epoch {} applied",
            epoch + 1
        ))
        .refuses(4, &[]);
    place
        .say(&format!(
            "resolve --key order-1 --epoch {epoch} not-applied"
        ))
        .is(0, "");
    place.run_once(words, script).refuses(75, &["in-doubt"]);
    assert_eq!(place.ledger(), ["paid", "paid"]);
    let epoch = place.epoch();
    let resolve = format!("resolve --key order-1 --epoch {epoch} applied --outcome by-hand");
    place.say(&resolve).is(0, "");
    place.run_once(words, script).is(0, "by-hand");
    assert_eq!(place.ledger().len(), 2);
    assert_eq!(place.say("in-doubt").stdout, "");
}

#[test]
fn run_runs_again_what_surely_did_not_happen() {
    let place = Place::new();
    let script = "echo tried >> ledger; test $(wc -l < ledger) -gt 2 || exit 69; echo done";
    for class in ["non-repeatable", "probeable", "internal"] {
        let words =
            format!("--namespace {class} --key k --effects {class} --retry-on 7,69 --lease 10s");
        place.run_once(&words, script).refuses(69, &["failed"]);
        place.run_once(&words, script).refuses(69, &["failed"]);
        place.run_once(&words, script).is(0, "done\n");
        place.run_once(&words, script).is(0, "done\n");
        assert_eq!(place.ledger().len(), 3);
        fs::remove_file(place.path("ledger")).unwrap();
    }
    let words = "--namespace repeatable --key k --effects repeatable";
    place.run_once(words, script).refuses(69, &["failed"]);
    place
        .run_once(words, "kill -9 $$")
        .refuses(128 + 9, &["failed"]);
    place
        .run_once(words, "exit 93")
        .refuses_two_lines(90, "status=93");
    place.run_once(words, "echo done").is(0, "done\n");
    let words = "--namespace few --key k --effects repeatable --max-attempts 2";
    place.run_once(words, "exit 1").refuses(1, &["failed"]);
    place.run_once(words, "exit 1").refuses(1, &["dead"]);
    place
        .run_once(words, "true")
        .refuses(RUN + 6, &["dead", "attempts=2"]);
}

impl Done {
    #[track_caller]
    fn refuses_two_lines(&self, status: i32, says: &str) {
        assert_eq!(self.status, status, "{self:?}");
        assert!(self.stderr.contains(says), "{self:?}");
    }
}

#[test]
fn a_long_stdout_passes_through_and_is_not_kept() {
    let place = Place::new();
    let words = "--key k --effects repeatable";
    let first = place.run_once(words, "seq 1 20000");
    assert_eq!((first.status, first.stdout.lines().count()), (0, 20_000));
    assert!(first.stderr.contains("without outcome"), "{}", first.stderr);
    let again = place.run_once(words, "seq 1 20000");
    again.is(0, "");
    assert!(
        again.stderr.contains("nothing to replay"),
        "{}",
        again.stderr
    );
}

#[test]
fn processes_at_once_pay_once_even_if_some_are_killed() {
    let place = Place::new();
    for round in 0..3u64 {
        let words = format!("--key order-{round} --effects non-repeatable --lease 300ms");
        let script = format!("echo order-{round} >> ledger");
        let mut children: Vec<_> = (0..10).map(|_| place.spawn_once(&words, &script)).collect();
        std::thread::sleep(Duration::from_millis(10 + round * 15));
        for child in children.iter_mut().step_by(3) {
            child.kill().unwrap();
        }
        for child in children {
            let done = done(child.wait_with_output().unwrap());
            let allowed = [-1, 0, RUN + 3, RUN + 4];
            assert!(allowed.contains(&done.status), "{done:?}");
        }
        std::thread::sleep(Duration::from_millis(350));
        let last = place.run_once(&words, &script);
        assert!([0, RUN + 4].contains(&last.status), "{last:?}");
        let lines = place
            .ledger()
            .iter()
            .filter(|line| **line == format!("order-{round}"))
            .count();
        assert!(lines <= 1, "paid {lines} times");
        assert!(
            lines == 1 || last.status == RUN + 4,
            "not paid, and not in doubt"
        );
    }
}

#[test]
fn a_killed_run_takes_its_command_along_and_is_in_doubt_after_the_lease() {
    let place = Place::new();
    let words = "--key order-1 --effects non-repeatable --lease 500ms";
    let script = "touch begun; read -r line < fifo; echo paid >> ledger";
    assert!(
        Command::new("mkfifo")
            .arg(place.path("fifo"))
            .status()
            .unwrap()
            .success()
    );
    let mut child = place.spawn_once(words, script);
    place.wait_for_file("begun");
    let busy = place.run_once(words, script);
    busy.refuses(RUN + 3, &["busy", "order-1", "lease_left="]);
    let pending = place.say("pending");
    assert!(
        pending.stdout.contains("order-1") && pending.stdout.contains("started"),
        "{pending:?}"
    );
    child.kill().unwrap();
    child.wait().unwrap();
    std::thread::sleep(Duration::from_millis(550));
    // The command, too, is gone: nobody reads the line that it would have paid after.
    let open = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::NONBLOCK;
    let writer = rustix::fs::open(place.path("fifo"), open, rustix::fs::Mode::empty());
    assert_eq!(writer.unwrap_err(), rustix::io::Errno::NXIO);
    place
        .run_once(words, script)
        .refuses(RUN + 4, &["in doubt", "command=sh"]);
    assert!(place.ledger().is_empty());
}

#[test]
fn a_running_command_keeps_its_claim_beyond_the_lease() {
    let place = Place::new();
    let words = "--key k --effects repeatable --lease 200ms";
    let script = "touch begun; sleep 0.7; echo once >> ledger; echo done";
    let child = place.spawn_once(words, script);
    place.wait_for_file("begun");
    std::thread::sleep(Duration::from_millis(450));
    place.run_once(words, script).refuses(RUN + 3, &["busy"]);
    done(child.wait_with_output().unwrap()).is(0, "done\n");
    place.run_once(words, script).is(0, "done\n");
    assert_eq!(place.ledger(), ["once"]);
}

#[test]
fn a_commit_that_finds_the_store_held_leaves_a_ticket() {
    let place = Place::new();
    let words = "--key k --effects non-repeatable --lease 400ms --lock-timeout 50ms";
    let child = place.spawn_once(words, "touch begun; sleep 0.1; echo receipt");
    place.wait_for_file("begun");
    let held = Options::new()
        .lock_timeout(Duration::from_secs(5))
        .open(place.store())
        .unwrap();
    let run = done(child.wait_with_output().unwrap());
    held.close().unwrap();
    assert_eq!(
        (run.status, run.stdout.as_str()),
        (RUN + 1, "receipt\n"),
        "{run:?}"
    );
    let ticket = run
        .stderr
        .split("ticket=")
        .nth(1)
        .unwrap()
        .split([':', ' '])
        .next()
        .unwrap();
    place
        .say(&format!("commit {ticket} --outcome receipt"))
        .is(0, "");
    place.run_once("--key k", "echo again").is(0, "receipt");
}

#[test]
fn scripts_claim_and_commit_by_ticket() {
    let place = Place::new();
    let claim = "claim --key k --effects repeatable --fingerprint amount=5 --lease 1m";
    let ticket = place.say(claim);
    assert_eq!(ticket.status, 0, "{ticket:?}");
    let ticket = ticket.stdout.trim();
    place.say(claim).refuses(3, &["busy", "lease_left="]);
    place
        .say("claim --key k --fingerprint amount=6")
        .refuses(5, &["mismatch"]);
    assert_eq!(place.say("get --key k").status, 3);
    place.say(&format!("renew {ticket} --lease 2m")).is(0, "");
    place.say("forget --key k").refuses(3, &["--force"]);
    place
        .say(&format!("commit {ticket} --outcome receipt-7"))
        .is(0, "");
    place
        .say(&format!("commit {ticket} --outcome receipt-7"))
        .is(0, "");
    place
        .say(&format!("commit {ticket} --outcome receipt-8"))
        .refuses(5, &["conflict"]);
    let duplicate = place.say(claim);
    duplicate.is(0, "");
    duplicate.refuses(0, &["duplicate", "receipt-7"]);
    place.say("get --key k --outcome").is(0, "receipt-7");
    let get = place.say("get --key k --json");
    let get: serde_json::Value = serde_json::from_str(&get.stdout).unwrap();
    assert_eq!(
        (&get["state"], &get["outcome"]),
        (&"done".into(), &"receipt-7".into()),
        "{get}"
    );
    place
        .say("claim --key k --fingerprint amount=6")
        .refuses(5, &["mismatch"]);
    place.say("forget --key k").is(0, "");
    assert!(place.say("get --key k").stdout.starts_with("absent"));
    place
        .say(&format!("commit {ticket}"))
        .refuses(5, &["fenced", "absent"]);
    let json = place.say("claim --key k --json");
    let json: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(
        (&json["verdict"], &json["attempt"]),
        (&"new".into(), &1.into()),
        "{json}"
    );
    let ticket = json["ticket"].as_str().unwrap();
    let from_stdin = ["commit", ticket, "--outcome-stdin"];
    assert_eq!(place.run_with_input(&from_stdin, b"\x01\xff\0").status, 0);
    let get = place
        .command(&["get", "--key", "k", "--outcome"])
        .output()
        .unwrap();
    assert_eq!(get.stdout, b"\x01\xff\0");
}

#[test]
fn scripts_fail_by_ticket() {
    let place = Place::new();
    let claim = |key: &str| {
        let ticket = place.say(&format!(
            "claim --key {key} --effects probeable --evidence e-1"
        ));
        assert_eq!(ticket.status, 0, "{ticket:?}");
        ticket.stdout.trim().to_owned()
    };
    let ticket = claim("later");
    place
        .say(&format!("fail {ticket} retryable --after 1h --error down"))
        .is(0, "");
    place
        .say("claim --key later")
        .refuses(3, &["backoff", "down", "59m"]);
    assert_eq!(place.say("get --key later").status, 3);
    let ticket = claim("never");
    place
        .say(&format!("fail {ticket} permanent --error closed"))
        .is(0, "");
    place
        .say("claim --key never")
        .refuses(6, &["rejected", "closed"]);
    assert_eq!(place.say("get --key never").status, 6);
    let ticket = claim("not-begun");
    place.say(&format!("fail {ticket} release")).is(0, "");
    place
        .say(&format!("fail {ticket} release"))
        .refuses(5, &["fenced"]);
    claim("not-begun");
    let words = "claim --namespace once --key k --effects non-repeatable --evidence e-2";
    let ticket = place.say(words).stdout.trim().to_owned();
    place
        .say(&format!("fail {ticket} unknown --error time-out"))
        .is(0, "");
    place
        .say(words)
        .refuses(4, &["in doubt", "e-2", "time-out", "--namespace once"]);
    let list = place.say("in-doubt").stdout;
    assert!(list.contains("once") && list.contains("e-2"), "{list}");
    assert_eq!(place.say("in-doubt --namespace default").stdout, "");
    let epoch = place.epoch();
    place
        .say(&format!(
            "resolve --namespace once --key k --epoch {epoch} abandon"
        ))
        .is(0, "");
    place.say(words).refuses(6, &["dead", "abandoned"]);
    place
        .say(&format!("renew {ticket}"))
        .refuses(6, &["fenced"]);
    let other = format!("renew {ticket} --namespace default");
    place.say(&other).refuses(2, &["namespace=once"]);
}

#[test]
fn a_wrong_call_is_told_apart_and_creates_nothing() {
    let place = Place::new();
    for words in [
        "get --key k",
        "stats",
        "in-doubt",
        "pending",
        "forget --key k",
    ] {
        place.say(words).refuses(2, &["no store at"]);
    }
    place.say("filter --batch 0").refuses(2, &["--batch"]);
    place.say("filter --retain 7").refuses(2, &["10s"]);
    place
        .say("no-such-command")
        .refuses(2, &["no-such-command"]);
    assert!(!place.store().exists());
    let no_store = place
        .command(&["stats"])
        .env_remove("IDEMLOG_STORE")
        .output()
        .unwrap();
    done(no_store).refuses(2, &["--store"]);
    assert_eq!(place.say("--help").status, 0);
    place.filter("", b"a\n").is(0, "a\n");
    place
        .say("get --key k")
        .refuses(2, &["namespace=default", "emit"]);
    place
        .say("get --namespace emit --key=")
        .refuses(2, &["empty"]);
    let absent = "{\"key\":\"k\",\"state\":\"absent\"}
";
    place
        .say("get --namespace emit --key k --json")
        .is(0, absent);
    place
        .say("claim --namespace emit --key k --effects internal")
        .refuses(2, &["repeatable"]);
    let mark = place.filter("--order mark-first --namespace emit", b"a\n");
    assert_eq!(mark.status, 2, "{mark:?}");
    let error = place.say("get --key k --json");
    let error: serde_json::Value = serde_json::from_str(&error.stderr).unwrap();
    assert_eq!(error["exit"], 2);
}

#[test]
fn stats_tell_what_is_there() {
    let place = Place::new();
    place.filter("", b"a\nb\n").is(0, "a\nb\n");
    let text = place.say("stats").stdout;
    assert!(
        text.contains("namespace emit") && text.contains("repeatable"),
        "{text}"
    );
    let json = place.say("stats --json").stdout;
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (&json["namespaces"]["emit"], &json["ok"]),
        (&"repeatable".into(), &true.into())
    );
}

/// Returns every file of a directory, with a hash of its bytes; of `LOCK`, which holds the newest
/// opener's pid, only that it is there.
fn snapshot(dir: &Path) -> Vec<(PathBuf, u64)> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let is_compared = path.is_file() && !path.ends_with("LOCK");
        let bytes = if is_compared {
            fs::read(&path).unwrap()
        } else {
            Vec::new()
        };
        files.push((
            path,
            BuildHasherDefault::<DefaultHasher>::default().hash_one(bytes),
        ));
    }
    files.sort();
    files
}

const CALLS: [&str; 5] = [
    "filter",
    "run --key k --effects repeatable -- true",
    "claim --key k --effects repeatable",
    "get --key k",
    "stats",
];

#[test]
fn a_directory_that_is_not_a_store_gets_no_file() {
    let place = Place::new();
    fs::create_dir(place.store()).unwrap();
    fs::write(place.store().join("thesis.txt"), "mine").unwrap();
    let before = snapshot(&place.store());
    for words in CALLS {
        let start = if words.starts_with("run") { RUN } else { 0 };
        let input = if words == "filter" { &b"a\n"[..] } else { b"" };
        let words: Vec<_> = words.split_whitespace().collect();
        let refused = place.run_with_input(&words, input);
        assert_eq!(refused.status, start + 1, "{words:?}: {refused:?}");
        assert_eq!(snapshot(&place.store()), before, "{words:?}");
    }
}

#[test]
fn a_file_in_place_of_the_directory_stays_as_it_is() {
    let place = Place::new();
    fs::write(place.store(), "mine").unwrap();
    for words in CALLS {
        let start = if words.starts_with("run") { RUN } else { 0 };
        let words: Vec<_> = words.split_whitespace().collect();
        let refused = place.run_with_input(&words, b"a\n");
        assert_eq!(refused.status, start + 1, "{words:?}: {refused:?}");
        assert_eq!(fs::read(place.store()).unwrap(), b"mine");
    }
}

#[test]
fn a_store_is_private_and_its_files_are_not_links() {
    let place = Place::new();
    place.filter("", b"a\n").is(0, "a\n");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&place.store()), 0o700);
    let names: Vec<_> = snapshot(&place.store())
        .into_iter()
        .map(|(path, _)| path)
        .collect();
    for path in &names {
        assert_eq!(mode(path), 0o600, "{}", path.display());
    }
    for name in ["MANIFEST", "LOCK"] {
        let (file, aside) = (place.store().join(name), place.path("aside"));
        fs::rename(&file, &aside).unwrap();
        std::os::unix::fs::symlink(&aside, &file).unwrap();
        let before = fs::read(&aside).unwrap();
        let refused = place.filter("", b"b\n");
        assert_eq!(
            (refused.status, refused.stdout.as_str()),
            (1, ""),
            "{name}: {refused:?}"
        );
        assert!(refused.stderr.contains(name), "{refused:?}");
        assert_eq!(fs::read(&aside).unwrap(), before);
        fs::remove_file(&file).unwrap();
        fs::rename(&aside, &file).unwrap();
    }
    place.filter("", b"a\nb\n").is(0, "b\n");
}

#[test]
fn a_second_opener_is_told_who_has_the_store() {
    let place = Place::new();
    let held = Options::new().open(place.store()).unwrap();
    let refused = place.say("stats --lock-timeout 100ms");
    refused.refuses(
        1,
        &[&format!("pid={}", std::process::id()), "--lock-timeout"],
    );
    let waiting = place
        .command(&["stats", "--lock-timeout", "10s"])
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(50));
    held.close().unwrap();
    assert_eq!(done(waiting.wait_with_output().unwrap()).status, 0);
}

#[test]
fn a_store_of_a_newer_format_is_refused_untouched() {
    let place = Place::new();
    place.filter("", b"a\n").is(0, "a\n");
    let path = place.store().join("MANIFEST");
    let mut manifest = fs::read(&path).unwrap();
    // The format's number stands behind eight bytes of magic.
    manifest[8] += 1;
    fs::write(&path, &manifest).unwrap();
    let before = snapshot(&place.store());
    place.filter("", b"b\n").is(1, "");
    let refused = place.say("stats");
    refused.refuses(1, &["format"]);
    assert_eq!(snapshot(&place.store()), before);
}

#[test]
fn a_damaged_store_is_never_replaced_by_an_empty_one() {
    let place = Place::new();
    place.filter("", b"a\n").is(0, "a\n");
    let path = place.store().join("MANIFEST");
    let manifest = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    place.filter("", b"a\n").is(1, "");
    fs::write(&path, &manifest[..manifest.len() / 2]).unwrap();
    place.filter("", b"a\n").is(1, "");
    fs::write(&path, &manifest).unwrap();
    place.filter("", b"a\nb\n").is(0, "b\n");
}

#[test]
fn a_directory_without_permission_is_a_plain_error() {
    let place = Place::new();
    place.filter("", b"a\n").is(0, "a\n");
    let open_to_all = fs::Permissions::from_mode(0o755);
    fs::set_permissions(place.dir.path(), open_to_all).unwrap();
    let before = snapshot(&place.store());
    let mode = |mode| fs::set_permissions(place.store(), fs::Permissions::from_mode(mode)).unwrap();
    for closed in [0o000, 0o500] {
        mode(closed);
        let refused = as_nobody(&place, &["get", "--namespace", "emit", "--key", "a"]);
        mode(0o700);
        let Some(refused) = refused else { return };
        assert_eq!(
            (refused.status, refused.stdout.as_str()),
            (1, ""),
            "{refused:?}"
        );
        assert!(
            refused.stderr.to_lowercase().contains("denied"),
            "{refused:?}"
        );
        assert_eq!(snapshot(&place.store()), before);
    }
}

/// Runs a command as somebody whom permissions bind; `None` where that cannot be arranged.
fn as_nobody(place: &Place, words: &[&str]) -> Option<Done> {
    if !rustix::process::geteuid().is_root() {
        return Some(place.run(words));
    }
    let copy = place.path("idemlog");
    if !copy.exists() {
        fs::copy(env!("CARGO_BIN_EXE_idemlog"), &copy).unwrap();
    }
    let run = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&copy)
        .args(words)
        .env("IDEMLOG_STORE", place.store())
        .current_dir("/")
        .output();
    run.ok().map(done)
}
