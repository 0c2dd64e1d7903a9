//! Outbox: what is to be sent commits with the order, and is sent at least once under one id.
//!
//! ```text
//! cargo run --release --example outbox [-- --seed 7 --kills 20]
//! ```
//!
//! The child takes 300 orders, commits each with a mail, and dispatches the mails to a mail server
//! that drops ids it has seen: a file in the parent's directory, one line a delivery. It is killed
//! with SIGKILL again and again, also between a delivery and its acknowledgement. Judged at the
//! end: every order has its mail, under one id, in order for each customer, and none has two.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a program that prints, and kills its child at moments of its own"
)]

mod common;

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use common::{Fallible, number, run_and_kill, start};
use idemlog::{
    AckAdvice, Commit, DedupLog, Dispatched, Dispatcher, Internal, Namespace, NamespaceOptions,
    OutboxEntry,
};

const ORDERS: u64 = 300;
const CUSTOMERS: u64 = 7;

fn main() -> ExitCode {
    start("outbox", child, parent)
}

/// Delivers one mail: a line of its id, customer and order. Nobody knows whether it got through
/// when the process dies here, so it may come again.
fn deliver(server: &Path, entry: &OutboxEntry) -> std::io::Result<()> {
    let line = format!(
        "{} {} {}\n",
        entry.id,
        String::from_utf8_lossy(&entry.ordering_key),
        String::from_utf8_lossy(&entry.payload)
    );
    let mut file = OpenOptions::new().create(true).append(true).open(server)?;
    file.write_all(line.as_bytes())
}

fn child(dir: &Path) -> Fallible<()> {
    let log = DedupLog::open(dir.join("store"))?;
    let orders: Namespace<Internal> = log.namespace("orders", NamespaceOptions::new())?;
    let mails = log.outbox("mails", NamespaceOptions::new())?;
    let server = dir.join("server");
    let dispatcher = Dispatcher::new(&mails);
    let stopper = dispatcher.stopper();
    std::thread::scope(|scope| -> Fallible<()> {
        let sending = scope.spawn(|| {
            dispatcher.run(|entry| match deliver(&server, entry) {
                Ok(()) => Dispatched::Done,
                Err(error) => Dispatched::Retry {
                    error: error.to_string().into_bytes(),
                },
            })
        });
        for n in 0..ORDERS {
            let Some(mut claim) = orders.claim(format!("order-{n}"))?.claim() else {
                continue;
            };
            let customer = format!("customer-{}", n % CUSTOMERS);
            let commit = Commit::new("taken").publish_ordered(&mails, customer, n.to_string());
            if claim.commit_with(commit)?.ack_advice() != AckAdvice::Ack {
                return Err(format!("order {n} was not committed").into());
            }
        }
        while mails.stats()?.queued_count > 0 {
            std::thread::yield_now();
        }
        stopper.stop();
        Ok(sending
            .join()
            .map_err(|_panic| "the dispatcher panicked")??)
    })?;
    Ok(log.close()?)
}

fn parent(dir: &Path) -> Fallible<bool> {
    let (seed, kills) = (number("--seed", 1), number("--kills", 20));
    println!("seed {seed} (again with: --seed {seed})");
    let killed = run_and_kill(dir, kills, 60, seed)?;
    let received = std::fs::read_to_string(dir.join("server"))?;
    let mut by_id: BTreeMap<&str, &str> = BTreeMap::new();
    let mut last: BTreeMap<&str, u64> = BTreeMap::new();
    let (mut repeats, mut right) = (0, true);
    for line in received.lines() {
        let [id, customer, order] = line.split(' ').collect::<Vec<_>>()[..] else {
            return Err(format!("a torn line: {line}").into());
        };
        if let Some(before) = by_id.insert(id, order) {
            repeats += 1;
            right &= before == order;
            continue;
        }
        let order = order.parse()?;
        right &= last
            .insert(customer, order)
            .is_none_or(|before| before < order);
    }
    let mut orders: Vec<u64> = by_id
        .values()
        .map(|n| n.parse())
        .collect::<Result<_, _>>()?;
    orders.sort_unstable();
    right &= orders.into_iter().eq(0..ORDERS);
    println!(
        "killed {killed} times; {ORDERS} orders; {} mails, {repeats} repeats dropped by their id",
        by_id.len()
    );
    println!(
        "one mail an order, in order: {}",
        if right { "yes" } else { "NO" }
    );
    Ok(right)
}
