//! Asking downstream, only when in doubt: a payment whose worker died is looked up where it would
//! have been made.
//!
//! ```text
//! cargo run --release --example resolve_in_doubt [-- --seed 7 --kills 20]
//! ```
//!
//! The payment service is an application of its own, whose state lives in sled: a table of payments
//! by their idempotency key, and one counter of questions. The child pays 200 orders, each in three
//! steps: start, pay, commit; it is killed with SIGKILL again and again. An order that was started
//! and not committed is decided by the probe, which asks sled. Judged at the end by sled alone:
//! every order was paid once, and it was asked about no more orders than were in doubt.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a program that prints, and kills its child at moments of its own"
)]

mod common;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use common::{Fallible, number, run_and_kill, start};
use idemlog::{
    AckAdvice, DedupLog, Failure, Namespace, NamespaceOptions, ProbeRequest, Probeable, Probed,
    RunVerdict,
};

const ORDERS: u64 = 200;

fn main() -> ExitCode {
    start("resolve_in_doubt", child, parent)
}

/// The payment service: what it has taken, by the caller's idempotency key.
#[derive(Clone)]
struct Payments(sled::Db);

impl Payments {
    fn open(dir: &Path) -> Fallible<Payments> {
        Ok(Payments(sled::open(dir.join("payments"))?))
    }

    /// Takes a payment. It counts what it is told, also twice: it trusts its caller.
    fn pay(&self, key: &str, order: &str) -> sled::Result<String> {
        let count = self
            .0
            .update_and_fetch(format!("paid/{key}/{order}"), add_one)?;
        self.0.flush()?;
        Ok(format!("receipt {}", read(count)))
    }

    /// Says whether a payment was taken; counted, to show how rarely it is asked.
    fn find(&self, key: &str, order: &str) -> sled::Result<Option<String>> {
        self.0.update_and_fetch("questions", add_one)?;
        let count = self.0.get(format!("paid/{key}/{order}"))?;
        Ok(count.map(|count| format!("receipt {}", read(Some(count)))))
    }
}

#[expect(clippy::unnecessary_wraps, reason = "what sled wants")]
fn add_one(old: Option<&[u8]>) -> Option<Vec<u8>> {
    let old = old.map(|bytes| read(Some(bytes.into())));
    Some((old.unwrap_or_default() + 1).to_le_bytes().to_vec())
}

fn read(bytes: Option<sled::IVec>) -> u64 {
    let bytes = bytes.and_then(|bytes| bytes.as_ref().try_into().ok());
    bytes.map_or(0, u64::from_le_bytes)
}

fn child(dir: &Path) -> Fallible<()> {
    let log = DedupLog::open(dir.join("store"))?;
    let payments = Payments::open(dir)?;
    let asked = payments.clone();
    let probe = move |request: &ProbeRequest<'_>| {
        let order = String::from_utf8_lossy(request.key);
        match asked.find(&request.derived_key("pay"), &order) {
            Ok(Some(receipt)) => Probed::Applied(receipt.into_bytes()),
            Ok(None) => Probed::NotApplied,
            Err(_) => Probed::Unknown,
        }
    };
    // The service answers within a moment: what it has not taken by then was never sent.
    let options = NamespaceOptions::new().settle(Duration::from_millis(1));
    let orders: Namespace<Probeable> = log.namespace("orders", options)?;
    let orders = orders.with_probe(probe);
    for n in 0..ORDERS {
        let order = format!("order-{n}");
        loop {
            let verdict = orders.run_once(&order, |attempt| {
                let paid = payments.pay(&attempt.derived_key("pay"), &order);
                paid.map(String::into_bytes).map_err(Failure::unknown)
            })?;
            match (&verdict, verdict.ack_advice()) {
                (_, AckAdvice::Ack) => break,
                (RunVerdict::Busy { .. }, _) => std::thread::sleep(Duration::from_millis(1)),
                _ => return Err(format!("{order}: {verdict:?}").into()),
            }
        }
    }
    Ok(log.close()?)
}

fn parent(dir: &Path) -> Fallible<bool> {
    let (seed, kills) = (number("--seed", 1), number("--kills", 20));
    println!("seed {seed} (again with: --seed {seed})");
    let killed = run_and_kill(dir, kills, 120, seed)?;
    let payments = Payments::open(dir)?;
    let questions = read(payments.0.get("questions")?);
    let (mut paid, mut twice) = (0, 0);
    for found in payments.0.scan_prefix("paid/") {
        let count = read(Some(found?.1));
        paid += 1;
        twice += u64::from(count != 1);
    }
    // Each kill leaves at most one order in doubt, and a probe may be killed, too.
    let right = paid == ORDERS && twice == 0 && questions <= 2 * killed;
    println!(
        "killed {killed} times; {paid} of {ORDERS} orders paid, {twice} of them twice; downstream \
         was asked {questions} times"
    );
    println!(
        "paid once, asked only in doubt: {}",
        if right { "yes" } else { "NO" }
    );
    Ok(right)
}
