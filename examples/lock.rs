//! Several workers share one account through a lock, and one of them hangs for longer than its
//! lease: the target's fence keeps what it writes too late out.
//!
//! `cargo run --release --example lock`: ends with 0 if the books balance, else with 1.
#![allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "an example talks, and spawns its workers"
)]

use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idemlog::{DedupLog, Lock, LockVerdict, Locks};

const WORKERS: u64 = 4;
const ROUNDS: u64 = 200;
const LEASE: Duration = Duration::from_millis(200);
const DEADLINE: Duration = Duration::from_secs(30);

/// What the lock protects. It lives elsewhere, and knows nothing of the lock but the epochs.
#[derive(Debug, Default)]
struct Account {
    balance: u64,
    highest_epoch: u64,
    refused_count: u64,
}

impl Account {
    fn read(account: &Mutex<Account>) -> Result<u64, String> {
        Ok(account.lock().map_err(|e| e.to_string())?.balance)
    }

    /// Writes what an owner has computed, unless a later owner was here.
    fn write(account: &Mutex<Account>, epoch: u64, balance: u64) -> Result<(), String> {
        let mut account = account.lock().map_err(|e| e.to_string())?;
        if epoch < account.highest_epoch {
            account.refused_count += 1;
            return Ok(());
        }
        account.highest_epoch = epoch;
        account.balance = balance;
        Ok(())
    }
}

fn lock(locks: &Locks) -> Result<Lock, String> {
    match locks.lock_wait("account", LEASE, DEADLINE) {
        Ok(LockVerdict::Locked(lock)) => Ok(lock),
        Ok(LockVerdict::Busy { lease_left }) => Err(format!("still busy for {lease_left:?}")),
        Err(error) => Err(error.to_string()),
    }
}

/// Adds one, round by round: read, compute, write, which is wrong when two do it at a time.
fn work(locks: &Locks, account: &Mutex<Account>) -> Result<(), String> {
    for _ in 0..ROUNDS {
        let mut lock = lock(locks)?;
        // A worker that is only slow keeps its lock; one that hangs loses it at the ceiling.
        lock.keep_alive(DEADLINE).map_err(|e| e.to_string())?;
        let balance = Account::read(account)?;
        Account::write(account, lock.epoch().get(), balance + 1)?;
        if !lock.unlock().map_err(|e| e.to_string())?.is_applied() {
            return Err("a worker lost its lock: raise LEASE on this machine".to_owned());
        }
    }
    Ok(())
}

fn run() -> Result<(), String> {
    let log = DedupLog::in_memory().map_err(|e| e.to_string())?;
    let locks = log.locks("accounts").map_err(|e| e.to_string())?;
    let account = Arc::new(Mutex::new(Account::default()));

    // One owner hangs with what it has read, and its lease lapses.
    let hung = lock(&locks)?;
    let stale = Account::read(&account)?;

    let workers: Vec<_> = (0..WORKERS)
        .map(|_| {
            let (locks, account) = (locks.clone(), Arc::clone(&account));
            std::thread::spawn(move || work(&locks, &account))
        })
        .collect();
    for worker in workers {
        worker.join().map_err(|_panic| "a worker panicked")??;
    }

    // It wakes up and writes, as if nothing had happened.
    Account::write(&account, hung.epoch().get(), stale + 1)?;
    if hung.unlock().map_err(|e| e.to_string())?.is_applied() {
        return Err("the lock was taken over, and its old owner was not told".to_owned());
    }

    let account = account.lock().map_err(|e| e.to_string())?;
    println!("{account:?}");
    if account.balance != WORKERS * ROUNDS {
        return Err(format!("expected {} on the account", WORKERS * ROUNDS));
    }
    if account.refused_count != 1 {
        return Err("the fence should have refused one write".to_owned());
    }
    println!("the books balance, and the late write was refused");
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            println!("FAILED: {why}");
            ExitCode::FAILURE
        }
    }
}
