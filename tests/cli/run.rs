//! `idemlog run`: commands that run once, also when it is killed.

use std::fs;
use std::process::Command;
use std::time::Duration;

use idemlog::Options;

use super::{Place, RUN, done};

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
    let script =
        "touch begun; while ! test -e go; do sleep 0.05; done; echo once >> ledger; echo done";
    let child = place.spawn_once(words, script);
    place.wait_for_file("begun");
    std::thread::sleep(Duration::from_millis(450));
    place.run_once(words, script).refuses(RUN + 3, &["busy"]);
    std::fs::write(place.path("go"), "").unwrap();
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
