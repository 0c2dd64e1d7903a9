//! Transfers between accounts, exactly once: two cells, the key and a receipt in one record.
//!
//! ```text
//! cargo run --release --features testing --example transfer [-- --seed 7 --kills 25 --count 10000]
//! ```
//!
//! A child makes 10,000 transfers between 16 accounts on four threads, each delivered at least
//! twice, and is killed with SIGKILL again and again. With the feature `testing` the same number
//! is made on a simulated disk that loses its power every now and then. Judged by arithmetic: the
//! sum is what it was, every balance is what all transfers once come to, and there is one receipt
//! for each.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a program that prints, and kills its child at moments of its own"
)]

mod common;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;

use common::{Fallible, Random, number, run_and_kill, start};
use idemlog::{
    AckAdvice, Cell, Cells, ClaimVerdict, Commit, CommitVerdict, DedupLog, Expected, Internal,
    Namespace, NamespaceOptions, Outbox,
};

const ACCOUNTS: u64 = 16;
const OPENING: i64 = 1_000;
const THREADS: u64 = 4;

fn main() -> ExitCode {
    start("transfer", child, parent)
}

/// Transfer number `n`: from, to, amount. The same in every life.
fn transfer(n: u64) -> (u64, u64, i64) {
    let mut random = Random::new(n + 1);
    random.below(9);
    let from = random.below(ACCOUNTS);
    let to = (from + 1 + random.below(ACCOUNTS - 1)) % ACCOUNTS;
    let amount = i64::try_from(1 + random.below(100)).unwrap_or(1);
    (from, to, amount)
}

struct Bank {
    transfers: Namespace<Internal>,
    accounts: Cells,
    receipts: Outbox,
}

impl Bank {
    fn open(log: &DedupLog) -> Fallible<Bank> {
        Ok(Bank {
            transfers: log.namespace("transfers", NamespaceOptions::new())?,
            accounts: log.cells("accounts", NamespaceOptions::new())?,
            receipts: log.outbox("receipts", NamespaceOptions::new())?,
        })
    }

    fn balance(&self, account: u64) -> Fallible<(i64, Expected)> {
        let found = self.accounts.get(format!("account-{account}"))?;
        Ok(match found {
            None => (OPENING, Expected::Absent),
            Some(Cell { value, version }) => {
                let value = std::str::from_utf8(&value)?.parse()?;
                (value, Expected::Version(version))
            }
        })
    }

    /// Makes one transfer, if it was not made before.
    fn make(&self, n: u64) -> Fallible<()> {
        let (from, to, amount) = transfer(n);
        let mut claim = match self.transfers.claim(format!("transfer-{n}"))? {
            ClaimVerdict::Duplicate(_) => return Ok(()),
            claimed => claimed
                .claim()
                .ok_or("a transfer is held by somebody else")?,
        };
        loop {
            let (taken, from_version) = self.balance(from)?;
            let (given, to_version) = self.balance(to)?;
            let commit = Commit::without_outcome()
                .put(
                    &self.accounts,
                    format!("account-{from}"),
                    from_version,
                    (taken - amount).to_string(),
                )
                .put(
                    &self.accounts,
                    format!("account-{to}"),
                    to_version,
                    (given + amount).to_string(),
                )
                .publish(&self.receipts, n.to_string());
            match claim.commit_with(commit)? {
                // Another transfer has changed one of the two: with fresh balances, again.
                CommitVerdict::CellConflict { .. } => {}
                verdict if verdict.ack_advice() == AckAdvice::Ack => return Ok(()),
                verdict => return Err(format!("transfer {n}: {verdict:?}").into()),
            }
        }
    }

    /// Compares with arithmetic. Receipts are taken out.
    fn judge(&self, count: u64) -> Fallible<bool> {
        let mut expected = vec![OPENING; usize::try_from(ACCOUNTS)?];
        for n in 0..count {
            let (from, to, amount) = transfer(n);
            for (account, by) in [(from, -amount), (to, amount)] {
                if let Some(balance) = expected.get_mut(usize::try_from(account)?) {
                    *balance += by;
                }
            }
        }
        let found: Vec<i64> = (0..ACCOUNTS)
            .map(|account| self.balance(account).map(|balance| balance.0))
            .collect::<Fallible<_>>()?;
        let sum: i64 = found.iter().sum();
        let mut ids = BTreeSet::new();
        let mut receipts = BTreeSet::new();
        let leased = self.receipts.lease(usize::try_from(count * 2)?)?;
        for entry in &leased {
            ids.insert(entry.id.clone());
            receipts.insert(entry.payload.clone());
        }
        let wanted = usize::try_from(count)?;
        println!("  sum {sum}, receipts {} of {count}", receipts.len());
        Ok(found == expected
            && sum == OPENING * i64::try_from(ACCOUNTS)?
            && [leased.len(), ids.len(), receipts.len()] == [wanted; 3])
    }
}

fn child(dir: &Path) -> Fallible<()> {
    let log = DedupLog::open(dir.join("store"))?;
    let bank = Bank::open(&log)?;
    let count = std::fs::read_to_string(dir.join("count"))?.parse()?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let bank = &bank;
                scope.spawn(move || {
                    let own = |n: &u64| n % THREADS == thread;
                    // What was not acknowledged is delivered again from the start, and once more.
                    (0..count)
                        .chain(0..count)
                        .filter(own)
                        .try_for_each(|n| bank.make(n))
                })
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_panic| "a thread panicked")?)
    })?;
    Ok(log.close()?)
}

fn parent(dir: &Path) -> Fallible<bool> {
    let (seed, kills) = (number("--seed", 1), number("--kills", 25));
    let count = number("--count", 10_000);
    println!("seed {seed} (again with: --seed {seed})");
    std::fs::write(dir.join("count"), count.to_string())?;
    let killed = run_and_kill(dir, kills, 250, seed)?;
    println!("killed {killed} times with SIGKILL:");
    let log = DedupLog::open(dir.join("store"))?;
    let by_kills = Bank::open(&log)?.judge(count)?;
    let by_power = power::cuts(count, seed)?;
    let right = by_kills && by_power;
    println!(
        "every transfer exactly once: {}",
        if right { "yes" } else { "NO" }
    );
    Ok(right)
}

#[cfg(feature = "testing")]
mod power {
    use std::sync::Arc;

    use idemlog::Options;
    use idemlog::testing::ManualClock;
    use idemlog::testing::sim::{PowerCut, SimDisk};

    use super::{Bank, Fallible, Random};

    /// Makes the transfers on a simulated disk, whose power fails in the middle of calls.
    pub(crate) fn cuts(count: u64, seed: u64) -> Fallible<bool> {
        let mut random = Random::new(seed);
        let mut disk = SimDisk::seeded(seed);
        let clock = Arc::new(ManualClock::new(1_700_000_000_000));
        let mut cuts_count = 0;
        let (mut from, mut done) = (0, false);
        while !done {
            // A step is one call of the file system: the next loss of power comes in one of these.
            disk.stop_at(disk.steps() + 50 + random.below(1500));
            let lived = lives(&disk, &clock, &mut from, count);
            done = lived.is_ok();
            if disk.died_doing().is_none() {
                // Nothing but the loss of power may end a life early.
                lived?;
            }
            if !done {
                cuts_count += 1;
                disk = disk.after_power_cut(&mut PowerCut::seeded(seed + cuts_count));
                clock.reboot();
            }
        }
        println!("power lost {cuts_count} times on a simulated disk:");
        let log = open(&disk.after_kill(), &clock)?;
        Bank::open(&log)?.judge(count)
    }

    fn open(disk: &SimDisk, clock: &Arc<ManualClock>) -> Fallible<idemlog::DedupLog> {
        let options = Options::new()
            .background(false)
            .clock(Arc::clone(clock) as _);
        Ok(options.open_on(disk.dir())?)
    }

    /// One life: goes on where the broker does, a little before what was acknowledged.
    fn lives(disk: &SimDisk, clock: &Arc<ManualClock>, at: &mut u64, count: u64) -> Fallible<()> {
        let log = open(disk, clock)?;
        let bank = Bank::open(&log)?;
        *at = at.saturating_sub(20);
        while *at < count {
            bank.make(*at)?;
            *at += 1;
        }
        Ok(log.close()?)
    }
}

#[cfg(not(feature = "testing"))]
mod power {
    /// There is no simulated disk without the feature.
    pub(crate) fn cuts(_count: u64, _seed: u64) -> super::Fallible<bool> {
        println!("power cuts: not built in (add --features testing)");
        Ok(true)
    }
}
