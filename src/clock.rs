//! The only reading of time, and the one trusted time of reads, retention and drops.
//!
//! Safety properties:
//! A. Trusted time never goes back: not within a boot, not over restarts and reboots.
//!    A push by the wall clock is durable before anything is decided by it.
//! B. A wrong wall clock pushes it ahead by a bounded amount at most: [`SLACK_MS`] per boot, and
//!    once after a reboot by the configured bound.
//! C. What the wall clock says beyond the bound is reported, not believed, until the operator
//!    confirms it.

use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How far ahead the wall clock may push trusted time within one boot: 5 minutes.
pub(crate) const SLACK_MS: u64 = 5 * 60 * 1000;

/// A smaller lead of the wall clock is rounding, or not worth a flush: 1 second.
const PUSH_MS_MIN: u64 = 1000;

/// One reading of the machine's clocks, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// The wall clock: since 1970-01-01, may step both ways.
    pub wall_ms: u64,
    /// The boot clock: since the boot, counts suspension, never goes back within a boot.
    pub boot_ms: u64,
}

/// A source of time. [`SystemClock`] is the one outside tests.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Reads both clocks.
    fn read(&self) -> Reading;

    /// Returns an identity of the current boot; zeros if the system has none.
    fn boot_id(&self) -> [u8; 16];

    /// Has `moved` called after each move of a clock that moves by hand, until it returns `false`.
    /// Returns whether this is such a clock: nobody sleeps by its time then. The default is a
    /// clock that moves by itself, so that nobody has to be told.
    fn tell_moves(&self, moved: Moved) -> bool {
        drop(moved);
        false
    }
}

/// A function to be called when a clock was moved; `false` says that nobody listens any more.
pub type Moved = Box<dyn Fn() -> bool + Send + Sync>;

/// The clocks of the operating system.
#[derive(Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn read(&self) -> Reading {
        use rustix::time::{ClockId, clock_gettime};
        // The wall clock as of the newest tick, some milliseconds old, takes a third of the time.
        #[cfg(target_os = "linux")]
        let (wall_clock, boot_clock) = (ClockId::RealtimeCoarse, ClockId::Boottime);
        #[cfg(not(target_os = "linux"))]
        let (wall_clock, boot_clock) = (ClockId::Realtime, ClockId::Monotonic);
        Reading {
            wall_ms: to_ms(clock_gettime(wall_clock)),
            boot_ms: to_ms(clock_gettime(boot_clock)),
        }
    }

    fn boot_id(&self) -> [u8; 16] {
        read_boot_id().unwrap_or_default()
    }
}

fn to_ms(time: rustix::time::Timespec) -> u64 {
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    seconds
        .saturating_mul(1000)
        .saturating_add(nanos / 1_000_000)
}

/// Reads the kernel's boot identity: 32 hexadecimal digits with dashes.
fn read_boot_id() -> Option<[u8; 16]> {
    use rustix::fs::{Mode, OFlags};
    let path = "/proc/sys/kernel/random/boot_id";
    let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut text = [0u8; 64];
    let len = rustix::io::read(&fd, &mut text).ok()?;
    let mut digits = text
        .get(..len)?
        .iter()
        .filter_map(|b| char::from(*b).to_digit(16));
    let mut id = [0u8; 16];
    for byte in &mut id {
        let (high, low) = (digits.next()?, digits.next()?);
        *byte = u8::try_from(high * 16 + low).ok()?;
    }
    Some(id)
}

/// A clock that stands still until told otherwise, for tests. Whoever waits for a moment is woken
/// by the call that moves the clock there.
#[cfg(any(test, feature = "testing"))]
pub struct ManualClock {
    state: Mutex<(Reading, [u8; 16])>,
    listeners: Mutex<Vec<std::sync::Arc<Moved>>>,
}

#[cfg(any(test, feature = "testing"))]
impl fmt::Debug for ManualClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ManualClock").field(&self.read()).finish()
    }
}

#[cfg(any(test, feature = "testing"))]
impl ManualClock {
    /// Makes a clock at this wall time, one second after a boot.
    pub fn new(wall_ms: u64) -> Self {
        let reading = Reading {
            wall_ms,
            boot_ms: 1000,
        };
        ManualClock {
            state: Mutex::new((reading, [1; 16])),
            listeners: Mutex::default(),
        }
    }

    fn change(&self, change: impl FnOnce(&mut Reading, &mut [u8; 16])) {
        {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let (reading, boot_id) = &mut *state;
            change(reading, boot_id);
        }
        // Called with no lock held: a listener may read this clock, and move it.
        let listeners = self.listeners().clone();
        for listener in listeners.iter().filter(|listener| !listener()) {
            self.listeners()
                .retain(|other| !std::sync::Arc::ptr_eq(other, listener));
        }
    }

    fn listeners(&self) -> MutexGuard<'_, Vec<std::sync::Arc<Moved>>> {
        self.listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets time pass: both clocks move.
    pub fn advance_ms(&self, ms: u64) {
        self.change(|reading, _| {
            reading.wall_ms = reading.wall_ms.saturating_add(ms);
            reading.boot_ms = reading.boot_ms.saturating_add(ms);
        });
    }

    /// Steps the wall clock alone, as an operator or a time server does.
    pub fn set_wall_ms(&self, wall_ms: u64) {
        self.change(|reading, _| reading.wall_ms = wall_ms);
    }

    /// Starts another boot: the boot clock begins again.
    pub fn reboot(&self) {
        self.change(|reading, boot_id| {
            reading.boot_ms = 1000;
            *boot_id = boot_id.map(|b| b.wrapping_add(1));
        });
    }
}

#[cfg(any(test, feature = "testing"))]
impl Clock for ManualClock {
    fn read(&self) -> Reading {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).0
    }

    fn boot_id(&self) -> [u8; 16] {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1
    }

    fn tell_moves(&self, moved: Moved) -> bool {
        self.listeners().push(std::sync::Arc::new(moved));
        true
    }
}

/// The durable form of trusted time: what it was, at which moment of which boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Anchor {
    pub(crate) boot_id: [u8; 16],
    pub(crate) boot_ms: u64,
    pub(crate) trusted_ms: u64,
    /// How much of the slack of this boot the wall clock has used up.
    pub(crate) slack_used_ms: u64,
}

/// One moment, as every decision sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Now {
    /// Trusted time: decides reads, retention and drops.
    pub(crate) trusted_ms: u64,
    /// The boot clock: decides leases within this process.
    pub(crate) boot_ms: u64,
    /// The larger of trusted and wall time: what an expiry is counted from.
    pub(crate) latest_ms: u64,
    /// The wall clock is ahead by more than what may be believed.
    pub(crate) suspect: bool,
}

/// Trusted time within one opener (upholds A, B, C).
#[derive(Debug)]
pub(crate) struct TrustedTime {
    boot_id: [u8; 16],
    state: Mutex<State>,
    /// The state for who only reads: each is right at some moment; trusted time rests on one.
    ahead_ms: AtomicI64,
    slack_left_ms: AtomicU64,
}

#[derive(Debug)]
struct State {
    /// Trusted time minus boot time: only ever raised (A).
    ahead_ms: i128,
    slack_used_ms: u64,
}

impl TrustedTime {
    /// Continues from a durable anchor; `None` for a new store, which starts at the wall clock.
    pub(crate) fn resume(clock: &dyn Clock, anchor: Option<Anchor>, wall_jump_max_ms: u64) -> Self {
        let reading = clock.read();
        let boot_id = clock.boot_id();
        // A wall clock behind the end of all numbers still has to fit them.
        let wall = reading.wall_ms.min(u64::MAX / 4);
        let (trusted, slack_used_ms) = match anchor {
            None => (wall, 0),
            Some(a)
                if a.boot_id == boot_id && boot_id != [0; 16] && reading.boot_ms >= a.boot_ms =>
            {
                (
                    a.trusted_ms.saturating_add(reading.boot_ms - a.boot_ms),
                    a.slack_used_ms,
                )
            }
            Some(a) => {
                let bound = a.trusted_ms.saturating_add(wall_jump_max_ms);
                (wall.min(bound).max(a.trusted_ms), 0)
            }
        };
        let ahead_ms = i128::from(trusted) - i128::from(reading.boot_ms);
        let state = State {
            ahead_ms,
            slack_used_ms,
        };
        let time = TrustedTime {
            boot_id,
            ahead_ms: AtomicI64::default(),
            slack_left_ms: AtomicU64::default(),
            state: Mutex::new(state),
        };
        time.publish(&time.state());
        time
    }

    /// Shows a change of the state to who only reads. Release and Acquire keep the order: who sees
    /// that slack was used up also sees the time that was won by it.
    fn publish(&self, state: &State) {
        let ahead = i64::try_from(state.ahead_ms).unwrap_or(i64::MAX);
        self.ahead_ms.store(ahead, Ordering::Relaxed);
        self.slack_left_ms
            .store(slack_left(state), Ordering::Release);
    }

    /// Reads the time.
    pub(crate) fn now(&self, clock: &dyn Clock) -> Now {
        let reading = clock.read();
        let slack_left_ms = self.slack_left_ms.load(Ordering::Acquire);
        let ahead = i128::from(self.ahead_ms.load(Ordering::Relaxed));
        let trusted_ms = trusted_at(ahead, reading.boot_ms);
        let lead = reading.wall_ms.saturating_sub(trusted_ms);
        Now {
            trusted_ms,
            boot_ms: reading.boot_ms,
            latest_ms: trusted_ms.max(reading.wall_ms),
            suspect: lead > slack_left_ms.max(PUSH_MS_MIN),
        }
    }

    /// Returns by how much the wall clock may push trusted time now (B), or must because somebody
    /// confirmed it. The push counts only once it is durable: see [`TrustedTime::push`].
    pub(crate) fn push_due(&self, clock: &dyn Clock, confirmed: bool) -> Option<u64> {
        let reading = clock.read();
        let state = self.state();
        let lead = reading
            .wall_ms
            .min(u64::MAX / 4)
            .saturating_sub(trusted_at(state.ahead_ms, reading.boot_ms));
        let due = confirmed || lead <= slack_left(&state);
        (due && lead >= PUSH_MS_MIN).then_some(lead)
    }

    /// Moves trusted time ahead by a push that is durable.
    pub(crate) fn push(&self, push_ms: u64, confirmed: bool) {
        let mut state = self.state();
        state.ahead_ms += i128::from(push_ms);
        if !confirmed {
            state.slack_used_ms = state.slack_used_ms.saturating_add(push_ms);
        }
        self.publish(&state);
    }

    /// A panic elsewhere does not tear the state: every change is complete under the lock.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Raises trusted time to one found in the log (A).
    pub(crate) fn raise(&self, clock: &dyn Clock, trusted_ms: u64) {
        let boot_ms = clock.read().boot_ms;
        let mut state = self.state();
        let ahead = i128::from(trusted_ms) - i128::from(boot_ms);
        if ahead > state.ahead_ms {
            let used = u64::try_from(ahead - state.ahead_ms).unwrap_or(u64::MAX);
            state.slack_used_ms = state.slack_used_ms.saturating_add(used).min(SLACK_MS);
            state.ahead_ms = ahead;
            self.publish(&state);
        }
    }

    /// Takes over what another process of this boot has pushed (A).
    pub(crate) fn adopt(&self, clock: &dyn Clock, anchor: Anchor) {
        let boot_ms = clock.read().boot_ms;
        if anchor.boot_id != self.boot_id || boot_ms < anchor.boot_ms {
            return;
        }
        let mut state = self.state();
        let ahead = i128::from(anchor.trusted_ms) - i128::from(anchor.boot_ms);
        state.ahead_ms = state.ahead_ms.max(ahead);
        state.slack_used_ms = state.slack_used_ms.max(anchor.slack_used_ms);
        self.publish(&state);
    }

    /// Returns what to make durable, so that the next opener continues from here, with a push
    /// that is to count from now on.
    pub(crate) fn anchor(&self, clock: &dyn Clock, push_ms: u64, confirmed: bool) -> Anchor {
        let now = self.now(clock);
        let used = if confirmed { 0 } else { push_ms };
        Anchor {
            boot_id: self.boot_id,
            boot_ms: now.boot_ms,
            trusted_ms: now.trusted_ms.saturating_add(push_ms),
            slack_used_ms: self.state().slack_used_ms.saturating_add(used),
        }
    }
}

fn slack_left(state: &State) -> u64 {
    SLACK_MS - state.slack_used_ms.min(SLACK_MS)
}

fn trusted_at(ahead_ms: i128, boot_ms: u64) -> u64 {
    u64::try_from((ahead_ms + i128::from(boot_ms)).max(0)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 1_700_000_000_000;
    const DAY: u64 = 86_400_000;

    /// Lets the wall clock push as the store does.
    fn read(time: &TrustedTime, clock: &ManualClock, confirmed: bool) -> Now {
        if let Some(push) = time.push_due(clock, confirmed) {
            time.push(push, confirmed);
        }
        time.now(clock)
    }

    fn reopen(time: &TrustedTime, clock: &ManualClock) -> TrustedTime {
        TrustedTime::resume(clock, Some(time.anchor(clock, 0, false)), DAY)
    }

    #[test]
    fn a_month_ahead_for_a_second_moves_nothing_and_is_reported() {
        let clock = ManualClock::new(START);
        let time = TrustedTime::resume(&clock, None, DAY);
        clock.set_wall_ms(START + 30 * DAY);
        let now = read(&time, &clock, false);
        assert_eq!(now.trusted_ms, START);
        assert!(now.suspect);
        clock.set_wall_ms(START);
        assert!(!read(&time, &clock, false).suspect);
    }

    #[test]
    fn the_slack_of_a_boot_is_used_up_once_also_over_reopens() {
        let clock = ManualClock::new(START);
        let mut time = TrustedTime::resume(&clock, None, DAY);
        for step in 1..=10 {
            clock.set_wall_ms(START + step * 60_000);
            read(&time, &clock, false);
            time = reopen(&time, &clock);
        }
        let now = read(&time, &clock, false);
        assert_eq!(now.trusted_ms, START + SLACK_MS);
        assert!(now.suspect);
    }

    #[test]
    fn a_push_counts_only_once_it_is_durable() {
        let clock = ManualClock::new(START);
        let time = TrustedTime::resume(&clock, None, DAY);
        clock.set_wall_ms(START + 20_000);
        assert_eq!(time.now(&clock).trusted_ms, START);
        let push = time.push_due(&clock, false).unwrap();
        let anchor = time.anchor(&clock, push, false);
        time.push(push, false);
        assert_eq!(time.now(&clock).trusted_ms, START + 20_000);
        clock.set_wall_ms(START);
        let killed = TrustedTime::resume(&clock, Some(anchor), DAY);
        assert_eq!(killed.now(&clock).trusted_ms, START + 20_000);
    }

    #[test]
    fn a_wall_clock_that_goes_back_moves_nothing() {
        let clock = ManualClock::new(START);
        let time = TrustedTime::resume(&clock, None, DAY);
        clock.set_wall_ms(0);
        clock.reboot();
        assert!(reopen(&time, &clock).now(&clock).trusted_ms >= START);
    }

    #[test]
    fn a_reboot_lets_the_wall_clock_push_by_the_bound_only() {
        let clock = ManualClock::new(START);
        let before = TrustedTime::resume(&clock, None, DAY);
        let anchor = before.anchor(&clock, 0, false);
        clock.reboot();
        clock.set_wall_ms(START + 30 * DAY);
        let time = TrustedTime::resume(&clock, Some(anchor), DAY);
        let now = read(&time, &clock, false);
        assert_eq!(now.trusted_ms, START + DAY);
        assert!(now.suspect);
        assert_eq!(read(&time, &clock, true).trusted_ms, START + 30 * DAY);
    }

    #[test]
    fn within_a_boot_time_moves_with_the_boot_clock_also_while_closed() {
        let clock = ManualClock::new(START);
        let time = TrustedTime::resume(&clock, None, DAY);
        let anchor = time.anchor(&clock, 0, false);
        clock.advance_ms(7 * DAY);
        let time = TrustedTime::resume(&clock, Some(anchor), DAY);
        assert_eq!(time.now(&clock).trusted_ms, START + 7 * DAY);
    }

    #[test]
    fn the_system_clock_reads_sensible_values() {
        let reading = SystemClock.read();
        assert!(reading.wall_ms > START);
        assert!(reading.boot_ms > 0);
    }
}
