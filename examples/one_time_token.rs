//! One-time tokens: an order form that is sent twice, by impatient users and over kills.
//!
//! ```text
//! cargo run --example one_time_token --features token [-- --seed 7]
//! ```
//!
//! Each form carries a token. A child process places the orders, and is killed with SIGKILL again
//! and again; forms come back until one pass finds every order placed. The parent judges by what
//! it was told: no token has two orders. Then tokens are forged, stolen, too old, of elsewhere, and
//! redeemed by many threads at once. The exit status is 1 if anything is not as it should be.

#![expect(
    clippy::indexing_slicing,
    reason = "a program of its own, which may fail by a panic"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use idemlog::{CommitVerdict, DedupLog, Outcome, RedeemVerdict, TokenOptions, TokenPolicy, Tokens};

type Fallible<T> = Result<T, Box<dyn Error>>;

const FORMS: usize = 40;
const THREADS: usize = 16;
const HOUR: Duration = Duration::from_secs(3600);

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let done = match words.first().map(String::as_str) {
        Some("--child") => place_orders(Path::new(&words[1])),
        Some("--seed") if words.len() == 2 => parent(words[1].parse().unwrap_or(1)),
        None => parent(1),
        Some(word) => Err(format!("unknown word: {word}").into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            drop(writeln!(io::stderr(), "one_time_token: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn user(form: usize) -> String {
    format!("user-{form}")
}

fn open(dir: &Path) -> Fallible<(DedupLog, Tokens)> {
    let log = idemlog::Options::new()
        .lock_timeout(Duration::from_secs(10))
        .open(dir.join("store"))?;
    let forms = log.tokens("order-form", TokenOptions::new(TokenPolicy::Replay))?;
    Ok((log, forms))
}

/// What a user of the library writes: each form is handled, whether it was before or not.
fn place_orders(dir: &Path) -> Fallible<()> {
    let (log, forms) = open(dir)?;
    for (form, line) in io::stdin().lock().lines().enumerate() {
        let (order, how) = match forms.redeem(line?.trim(), user(form))? {
            RedeemVerdict::Granted(mut redemption) => {
                // The order is this outcome: nothing happens outside of the store.
                let order = format!("order-{}-{form}", std::process::id());
                say(&format!("granted {form} {order}"))?;
                match redemption.commit(order.as_bytes())? {
                    CommitVerdict::Committed { .. } | CommitVerdict::AlreadyCommitted => {}
                    lost => return Err(format!("form {form}: {lost:?}").into()),
                }
                (order, "placed")
            }
            RedeemVerdict::Replayed(done) => match done.outcome {
                Outcome::Kept(order) => (String::from_utf8(order)?, "again"),
                Outcome::Dropped => return Err(format!("form {form}: no outcome").into()),
            },
            refused => return Err(format!("form {form}: {refused:?}").into()),
        };
        say(&format!("{how} {form} {order}"))?;
    }
    log.close()?;
    say("end")
}

fn say(line: &str) -> Fallible<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()?;
    Ok(())
}

fn parent(seed: u64) -> Fallible<()> {
    let place = tempfile::tempdir()?;
    let dir = place.path().to_owned();
    let (log, forms) = open(&dir)?;
    let tokens = (0..FORMS)
        .map(|form| Ok(forms.issue(HOUR, user(form))?.to_string()))
        .collect::<Fallible<Vec<String>>>()?;
    drop(forms);
    log.close()?;

    let mut told: BTreeMap<usize, BTreeSet<String>> = BTreeMap::new();
    let mut numbers = seed;
    let (mut kills, mut placed) = (0, 0);
    loop {
        // A small generator is enough to choose when to kill.
        numbers = numbers
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let lines = 1 + usize::try_from(numbers >> 32)? % (FORMS * 3 / 2);
        let heard = run_child(&dir, &tokens, (kills < 25).then_some(lines))?;
        for line in &heard {
            let words: Vec<&str> = line.split(' ').collect();
            if let ["placed" | "again", form, order] = words[..] {
                told.entry(form.parse()?)
                    .or_default()
                    .insert(order.to_owned());
                placed += usize::from(words[0] == "placed");
            }
        }
        if heard.last().is_some_and(|line| line == "end") {
            break;
        }
        kills += 1;
    }
    check(told.len() == FORMS, "every form was answered")?;
    let orders: usize = told.values().map(BTreeSet::len).sum();
    check(orders == FORMS, "every form has one order")?;
    check(placed <= FORMS, "no order was placed twice")?;
    let all: BTreeSet<_> = told.values().flatten().collect();
    check(all.len() == FORMS, "no order is of two forms")?;
    refused(&dir, &tokens)?;
    race(&dir)?;
    say(&format!(
        "one_time_token: seed={seed} forms={FORMS} kills={kills} orders={orders}: each once"
    ))
}

/// Gives all forms to a child, and kills it after so many lines of its answer.
fn run_child(dir: &PathBuf, tokens: &[String], lines: Option<usize>) -> Fallible<Vec<String>> {
    let mut child: Child = Command::new(std::env::current_exe()?)
        .arg("--child")
        .arg(dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    if let Some(mut input) = child.stdin.take() {
        input.write_all(tokens.join("\n").as_bytes())?;
    }
    let out = child.stdout.take().ok_or("no output")?;
    let mut heard = Vec::new();
    for line in BufReader::new(out).lines() {
        heard.push(line?);
        if Some(heard.len()) == lines {
            // What it says from here on is heard, too: it was said before it died.
            child.kill()?;
        }
    }
    let status = child.wait()?;
    check(
        lines.is_some() || status.success(),
        "a child that is left alone ends well",
    )?;
    Ok(heard)
}

/// Each way of not being redeemed is told apart.
fn refused(dir: &Path, tokens: &[String]) -> Fallible<()> {
    let (log, forms) = open(dir)?;
    let resets = log.tokens("password-reset", TokenOptions::new(TokenPolicy::Single))?;
    let token = resets.issue(HOUR, "anna")?;
    let forged = token
        .as_str()
        .replace(&token.as_str()[60..], &"A".repeat(28));
    let old = resets.issue(Duration::ZERO, "anna")?;
    let elsewhere = DedupLog::in_memory()?
        .tokens("password-reset", TokenOptions::new(TokenPolicy::Single))?
        .issue(HOUR, "anna")?;
    let is =
        |verdict: RedeemVerdict, name: &str| check(format!("{verdict:?}").starts_with(name), name);
    is(resets.redeem(&forged, "anna")?, "Forged")?;
    is(resets.redeem("no token at all", "anna")?, "Forged")?;
    is(resets.redeem(&token, "bob")?, "WrongBinding")?;
    is(resets.redeem(&tokens[0], user(0))?, "Unknown")?;
    is(resets.redeem(&elsewhere, "anna")?, "Unknown")?;
    // Expiry is rounded up to a second, never down.
    let mut verdict = resets.redeem(&old, "anna")?;
    for _ in 0..100 {
        if matches!(verdict, RedeemVerdict::Expired) {
            break;
        }
        drop(verdict);
        std::thread::park_timeout(Duration::from_millis(20));
        verdict = resets.redeem(&old, "anna")?;
    }
    is(verdict, "Expired")?;
    let Some(mut redemption) = resets.redeem(&token, "anna")?.granted() else {
        return Err("a valid token is granted".into());
    };
    is(resets.redeem(&token, "anna")?, "Busy")?;
    let verdict = redemption.commit(b"")?;
    check(
        matches!(verdict, CommitVerdict::Committed { .. }),
        "it is used up",
    )?;
    is(resets.redeem(&token, "anna")?, "Used")?;
    is(forms.redeem(&tokens[0], user(0))?, "Replayed")?;
    drop((redemption, forms, resets));
    log.close()?;
    Ok(())
}

/// Many redeem one token at once, and one has it.
fn race(dir: &Path) -> Fallible<()> {
    let (log, _forms) = open(dir)?;
    let resets = log.tokens("password-reset", TokenOptions::new(TokenPolicy::Single))?;
    let token = resets.issue(HOUR, "anna")?;
    let redeem = || -> idemlog::Result<usize> {
        let Some(mut redemption) = resets.redeem(&token, "anna")?.granted() else {
            return Ok(0);
        };
        let committed = matches!(redemption.commit(b"")?, CommitVerdict::Committed { .. });
        Ok(usize::from(committed))
    };
    let used = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(redeem)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_panic| "a thread panicked"))
            .collect::<Result<Vec<_>, _>>()
    })?;
    let used: usize = used.into_iter().sum::<idemlog::Result<usize>>()?;
    check(used == 1, "one of many has it")
}

fn check(holds: bool, what: &str) -> Fallible<()> {
    if holds {
        return Ok(());
    }
    Err(format!("this does not hold: {what}").into())
}
