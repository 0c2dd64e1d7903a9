//! Keeps a detached claim alive while its command runs.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use idemlog::{Change, NamespaceOptions, Ticket};

use crate::args::Common;
use crate::calls::with_ticket;
use crate::exit::{Stop, say};

/// How many renewals fit into one lease: two may fail before it lapses.
const RENEWALS_COUNT: u32 = 3;

/// When a lease lapses, on the clock that counts suspension.
#[derive(Clone, Debug)]
pub(crate) struct LeaseEnd(Arc<AtomicU64>);

impl LeaseEnd {
    /// Reads the clock; called before the claim or renewal, so that the end is never too late.
    pub(crate) fn from_now(lease: Duration) -> u64 {
        let lease_ms = u64::try_from(lease.as_millis()).unwrap_or(u64::MAX);
        boot_ms().saturating_add(lease_ms)
    }

    pub(crate) fn new(end_boot_ms: u64) -> Self {
        LeaseEnd(Arc::new(AtomicU64::new(end_boot_ms)))
    }

    /// Returns what is left of it.
    pub(crate) fn left(&self) -> Duration {
        // Relaxed: a number of its own; the thread that writes it is joined before this matters.
        let end_ms = self.0.load(Ordering::Relaxed);
        Duration::from_millis(end_ms.saturating_sub(boot_ms()))
    }
}

fn boot_ms() -> u64 {
    #[cfg(target_os = "linux")]
    let clock = rustix::time::ClockId::Boottime;
    #[cfg(not(target_os = "linux"))]
    let clock = rustix::time::ClockId::Monotonic;
    let now = rustix::time::clock_gettime(clock);
    let (seconds, nanos) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    seconds
        .unwrap_or(0)
        .saturating_mul(1000)
        .saturating_add(nanos.unwrap_or(0) / 1_000_000)
}

/// A thread that renews a claim until it is stopped or the claim is lost.
pub(crate) struct Renewer {
    stop: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl Renewer {
    pub(crate) fn start(
        common: &Common,
        ticket: &Ticket,
        lease: Duration,
        end: &LeaseEnd,
    ) -> io::Result<Renewer> {
        let (stop, stopped) = mpsc::channel();
        let (common, ticket, end) = (common.clone(), ticket.clone(), end.clone());
        let pause = lease / RENEWALS_COUNT;
        let work = move || {
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(pause) {
                let end_boot_ms = LeaseEnd::from_now(lease);
                match with_ticket(&common, &ticket, NamespaceOptions::new(), |claims| {
                    claims.renew(&ticket, lease)
                }) {
                    Ok(Change::Applied(_)) => end.0.store(end_boot_ms, Ordering::Relaxed),
                    Ok(Change::Fenced { current }) => {
                        say(&format!(
                            "idemlog: the claim is lost: key is {}",
                            current.name()
                        ));
                        return;
                    }
                    Err(stop) => not_renewed(&stop, &end),
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("idemlog-renew".to_string())
            .spawn(work)?;
        Ok(Renewer { stop, thread })
    }

    /// Ends the thread; a renewal under way is finished first.
    pub(crate) fn stop(self) {
        drop(self.stop);
        if self.thread.join().is_err() {
            say("idemlog: the thread that renews the claim panicked");
        }
    }
}

fn not_renewed(stop: &Stop, end: &LeaseEnd) {
    say(&format!(
        "idemlog: not renewed, lease_left={}: {}",
        crate::output::show_duration(end.left()),
        stop.message()
    ));
}
