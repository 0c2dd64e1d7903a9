//! The binary, as scripts see it: what it prints, its exit codes, and what a kill leaves.

use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

mod bench;
mod filter;
mod refuse;
mod run;

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

    #[track_caller]
    fn refuses_two_lines(&self, status: i32, says: &str) {
        assert_eq!(self.status, status, "{self:?}");
        assert!(self.stderr.contains(says), "{self:?}");
    }
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

/// What only reads answers beside a process that shares the store; where nobody has it open, it
/// makes no file and changes none.
#[test]
fn commands_that_read_change_nothing_beside_others() {
    let place = Place::new();
    let log = idemlog::Options::new().shared(true).open(place.store());
    let log = log.unwrap();
    let options = idemlog::NamespaceOptions::new();
    let claims = log.namespace::<idemlog::Repeatable>("default", options);
    let claims = claims.unwrap();
    let ran = claims.run_once("k", |_| Ok(b"receipt-7".to_vec()));
    assert!(ran.is_ok());
    log.maintain().unwrap();
    let held = place.say("claim --key held --effects repeatable");
    assert_eq!(held.status, 0, "{held:?}");
    let look = || {
        place.say("get --key k --outcome").is(0, "receipt-7");
        assert_eq!(place.say("get --key held").status, 3);
        place.say("get --key other").is(0, "absent key=other\n");
        assert!(place.say("pending").stdout.contains("held"));
        place.say("in-doubt").is(0, "");
        assert!(place.say("stats").stdout.contains("unsettled count"));
    };
    look();
    place
        .say("stats --exclusive --lock-timeout 100ms")
        .refuses(1, &["open elsewhere"]);
    drop(claims);
    log.close().unwrap();
    // Nobody else changes anything now.
    let before = refuse::snapshot(&place.store());
    look();
    assert_eq!(refuse::snapshot(&place.store()), before);
}
