//! Who waits for which key, in which order, and who must be woken?
//!
//! Safety properties:
//! A. A waiter is in its line before it looks at the key, and whoever changes the key looks at the
//!    line afterwards. Both look at the key under the append lock: so either the waiter sees the
//!    change, or the changer sees the waiter.
//! B. The first of a line is rung for every change of its key; the others for those that end the
//!    wait of all, and when they become the first. Who only watches a key stands in nobody's way,
//!    and is rung for every change: also a claim matters to it, whose lease may lapse.
//! C. No bell is rung while a lock of the store is held: a ring may run a task's waker. What is
//!    found out under a lock is owed, and paid by whoever holds none.
//! D. A place is held until its waiter's deadline, not longer: a future that nobody polls any more
//!    must not keep the key from others. Everybody sleeps no longer than the next one before it
//!    may, and passes it then.

use std::collections::{BTreeMap, VecDeque};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use crate::log::bell::{Bell, Listening};
use crate::log::sync::primitives::{AtomicBool, AtomicUsize, Mutex, MutexGuard};

/// All waiters for keys, in the order in which they came.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    /// How many there are: all that a call reads while nobody waits.
    count: AtomicUsize,
    /// Everybody is to be rung (C).
    owed: AtomicBool,
    lines: Mutex<Lines>,
}

#[derive(Debug, Default)]
struct Lines {
    /// By namespace and key; never empty.
    lines: BTreeMap<u16, BTreeMap<Vec<u8>, Line>>,
}

/// Who stands at one key.
#[derive(Debug, Default)]
struct Line {
    /// Who wants the key, in the order in which they came.
    waiters: VecDeque<Waiter>,
    /// Who only wants to know what becomes of it.
    watchers: Vec<Bell>,
}

#[derive(Debug)]
struct Waiter {
    bell: Bell,
    /// When its wait is over, on the boot clock.
    until_ms: u64,
    /// That time has come, and somebody behind it goes before it (D).
    passed: bool,
}

impl Line {
    fn is_empty(&self) -> bool {
        self.waiters.is_empty() && self.watchers.is_empty()
    }

    /// Returns the bells from this place on, up to that of the first who was not passed.
    fn turn_from(&self, at: usize) -> Vec<Bell> {
        let rest = || self.waiters.iter().skip(at);
        let passed_count = rest().take_while(|waiter| waiter.passed).count();
        let turn = rest().take(passed_count + 1);
        turn.map(|waiter| waiter.bell.clone()).collect()
    }

    fn all(&self) -> impl Iterator<Item = &Bell> {
        let waiters = self.waiters.iter().map(|waiter| &waiter.bell);
        waiters.chain(&self.watchers)
    }

    fn at(&self, bell: &Bell) -> Option<usize> {
        let own = |waiter: &Waiter| waiter.bell.is(bell);
        self.waiters.iter().position(own)
    }

    /// Takes a bell out; returns those to whom that matters.
    fn leave(&mut self, bell: &Bell) -> Vec<Bell> {
        if let Some(at) = self.at(bell) {
            self.waiters.remove(at);
            return self.turn_from(at);
        }
        self.watchers.retain(|watcher| !watcher.is(bell));
        Vec::new()
    }
}

impl Lines {
    fn line(&self, namespace: u16, key: &[u8]) -> Option<&Line> {
        self.lines.get(&namespace)?.get(key)
    }

    fn line_mut(&mut self, namespace: u16, key: &[u8]) -> Option<&mut Line> {
        self.lines.get_mut(&namespace)?.get_mut(key)
    }

    fn line_or_new(&mut self, namespace: u16, key: &[u8]) -> &mut Line {
        let keys = self.lines.entry(namespace).or_default();
        keys.entry(key.to_vec()).or_default()
    }

    fn leave(&mut self, namespace: u16, key: &[u8], bell: &Bell) -> Vec<Bell> {
        let Some(keys) = self.lines.get_mut(&namespace) else {
            return Vec::new();
        };
        let Some(line) = keys.get_mut(key) else {
            return Vec::new();
        };
        let next = line.leave(bell);
        if line.is_empty() {
            keys.remove(key);
            if keys.is_empty() {
                self.lines.remove(&namespace);
            }
        }
        next
    }
}

impl Waits {
    /// A panic elsewhere does not tear the lines: every change is one step.
    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says whether anybody waits for anything. Relaxed: the append lock orders what matters (A).
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }

    /// Returns how many wait.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed) as u64
    }

    /// Says whether anybody waits for this key.
    pub(crate) fn has_line(&self, namespace: u16, key: &[u8]) -> bool {
        let is_waited_for = |line: &Line| !line.waiters.is_empty();
        self.any() && self.lines().line(namespace, key).is_some_and(is_waited_for)
    }

    /// Joins the end of a key's line, until a moment on the boot clock.
    pub(crate) fn join(&self, namespace: u16, key: &[u8], until_ms: u64) -> Place<'_> {
        let bell = Bell::default();
        let mut lines = self.lines();
        let waiter = Waiter {
            bell: bell.clone(),
            until_ms,
            passed: false,
        };
        let line = lines.line_or_new(namespace, key);
        line.waiters.push_back(waiter);
        self.count.fetch_add(1, Ordering::Relaxed);
        drop(lines);
        Place {
            waits: self,
            keys: vec![(namespace, key.to_vec())],
            bell,
        }
    }

    /// Watches keys, and stands in nobody's way (B).
    pub(crate) fn watch(&self, keys: &[(u16, &[u8])]) -> Place<'_> {
        let bell = Bell::default();
        let mut lines = self.lines();
        for (namespace, key) in keys {
            let line = lines.line_or_new(*namespace, key);
            line.watchers.push(bell.clone());
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        drop(lines);
        Place {
            waits: self,
            keys: keys.iter().map(|(n, key)| (*n, key.to_vec())).collect(),
            bell,
        }
    }

    /// Tells of a change of a key (A, B).
    #[inline]
    pub(crate) fn changed(&self, namespace: u16, key: &[u8], is_final: bool) {
        if self.any() {
            self.ring_line(namespace, key, is_final);
        }
    }

    fn ring_line(&self, namespace: u16, key: &[u8], all: bool) {
        let bells: Vec<Bell> = match self.lines().line(namespace, key) {
            Some(line) if all => line.all().cloned().collect(),
            Some(line) => {
                let mut bells = line.turn_from(0);
                bells.extend(line.watchers.iter().cloned());
                bells
            }
            None => return,
        };
        bells.iter().for_each(|bell| bell.ring());
    }

    /// Rings for everybody: for what concerns all keys, such as time.
    pub(crate) fn ring_all(&self) {
        if !self.any() {
            return;
        }
        let bells: Vec<Bell> = {
            let lines = self.lines();
            let all = lines.lines.values().flat_map(BTreeMap::values);
            all.flat_map(Line::all).cloned().collect()
        };
        bells.iter().for_each(|bell| bell.ring());
    }

    /// Says, with locks held, that everybody is to be rung (C).
    pub(crate) fn owe(&self) {
        // Release pairs with the Acquire of whoever pays: the change owed for is seen.
        self.owed.store(true, Ordering::Release);
    }

    /// Rings if that is owed; says whether it was.
    pub(crate) fn pay(&self) -> bool {
        let owed = self.owed.load(Ordering::Relaxed) && self.owed.swap(false, Ordering::AcqRel);
        if owed {
            self.ring_all();
        }
        owed
    }
}

/// A place in a line, given up when dropped: whoever comes next then is rung.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    waits: &'a Waits,
    /// One, but for those who watch.
    keys: Vec<(u16, Vec<u8>)>,
    bell: Bell,
}

impl Place<'_> {
    pub(crate) fn listen(&self) -> Listening {
        self.bell.listen()
    }

    pub(crate) fn bell(&self) -> &Bell {
        &self.bell
    }

    /// Says whose turn it is: this one's (`None`), or that of others until this moment on the boot
    /// clock at most, when this one looks again (D).
    pub(crate) fn behind_until(&self, now_ms: u64) -> Option<u64> {
        let mut lines = self.waits.lines();
        let (namespace, key) = self.keys.first()?;
        let line = lines.line_mut(*namespace, key)?;
        let at = line.at(&self.bell)?;
        for before in line.waiters.iter_mut().take(at).rev() {
            if before.until_ms > now_ms {
                return Some(before.until_ms);
            }
            before.passed = true;
        }
        None
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut lines = self.waits.lines();
        self.waits.count.fetch_sub(1, Ordering::Relaxed);
        let mut next = Vec::new();
        for (namespace, key) in &self.keys {
            next.extend(lines.leave(*namespace, key, &self.bell));
        }
        drop(lines);
        next.iter().for_each(|bell| bell.ring());
    }
}

#[cfg(all(test, not(idemlog_shuttle)))]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Says whether the bell rings without anybody to ring it any more.
    fn rang(listening: Listening) -> bool {
        use std::future::Future;
        let waker = std::task::Waker::noop();
        let mut listening = listening;
        std::pin::Pin::new(&mut listening)
            .poll(&mut std::task::Context::from_waker(waker))
            .is_ready()
    }

    const NEVER: u64 = u64::MAX;

    fn join<'a>(waits: &'a Waits, until_ms: u64) -> Place<'a> {
        waits.join(1, b"k", until_ms)
    }

    #[test]
    fn the_first_is_rung_for_a_change_and_all_for_a_final_one() {
        let waits = Waits::default();
        let (first, second) = (join(&waits, NEVER), join(&waits, NEVER));
        let other = waits.join(2, b"k", NEVER);
        let heard = [&first, &second, &other].map(Place::listen);
        waits.changed(1, b"k", false);
        assert_eq!(heard.map(rang), [true, false, false]);
        let heard = [&first, &second, &other].map(Place::listen);
        waits.changed(1, b"k", true);
        assert_eq!(heard.map(rang), [true, true, false]);
        let heard = [&first, &second, &other].map(Place::listen);
        waits.owe();
        assert!(waits.pay() && !waits.pay());
        assert_eq!(heard.map(rang), [true, true, true]);
    }

    #[test]
    fn a_place_that_is_given_up_is_the_next_ones() {
        let waits = Waits::default();
        let [first, second, third] = [NEVER; 3].map(|until| join(&waits, until));
        assert_eq!(first.behind_until(0), None);
        assert_eq!(second.behind_until(0), Some(NEVER));
        let heard = [&second, &third].map(Place::listen);
        drop(first);
        assert_eq!(heard.map(rang), [true, false]);
        let heard = second.listen();
        drop(third);
        assert!(!rang(heard), "only who comes next is rung");
        assert_eq!(second.behind_until(0), None);
        assert!(waits.has_line(1, b"k"));
        drop(second);
        assert!(!waits.any() && !waits.has_line(1, b"k"));
        assert!(waits.lines().lines.is_empty());
    }

    #[test]
    fn who_watches_is_rung_for_every_change_and_stands_in_nobodys_way() {
        let waits = Waits::default();
        let watcher = waits.watch(&[(1, b"k"), (2, b"own")]);
        assert!(waits.any() && !waits.has_line(1, b"k"));
        let first = join(&waits, NEVER);
        assert_eq!((first.behind_until(0), waits.count()), (None, 2));
        for (namespace, key, is_final) in
            [(1, &b"k"[..], false), (1, b"k", true), (2, b"own", false)]
        {
            let heard = watcher.listen();
            waits.changed(namespace, key, is_final);
            assert!(rang(heard));
        }
        let heard = [watcher.listen(), first.listen()];
        waits.changed(3, b"k", true);
        assert_eq!(heard.map(rang), [false, false]);
        let heard = first.listen();
        drop(watcher);
        assert!(!rang(heard));
        drop(first);
        assert!(!waits.any() && waits.lines().lines.is_empty());
    }

    #[test]
    fn who_is_over_its_deadline_is_passed() {
        let waits = Waits::default();
        let [left, short, long, last] = [10, 20, 90, 95].map(|until| join(&waits, until));
        assert_eq!(long.behind_until(9), Some(20));
        assert_eq!(short.behind_until(9), Some(10));
        // The second passes the first, and is rung beside it from then on.
        assert_eq!(short.behind_until(10), None);
        let heard = [&left, &short, &long].map(Place::listen);
        waits.changed(1, b"k", false);
        assert_eq!(heard.map(rang), [true, true, false]);
        assert_eq!(
            (long.behind_until(19), long.behind_until(20)),
            (Some(20), None)
        );
        let heard = [&left, &long, &last].map(Place::listen);
        drop(short);
        assert_eq!(heard.map(rang), [false, true, false]);
        // One that leaves from among them has the next one look whom it waits for now.
        let heard = last.listen();
        drop(long);
        assert!(rang(heard));
        assert_eq!(last.behind_until(20), None);
        drop(left);
    }

    #[test]
    fn a_sleep_ends_with_its_time() {
        let waits = Waits::default();
        let place = join(&waits, NEVER);
        place.listen().sleep(Some(Duration::from_millis(1)));
        assert_eq!(place.behind_until(0), None);
    }
}
