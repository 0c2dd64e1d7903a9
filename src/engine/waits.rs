//! Who waits for which key, in which order, and who must be woken?
//!
//! Safety properties:
//! A. A waiter is in its line before it looks at the key, and whoever changes the key looks at the
//!    line afterwards. Both look at the key under the append lock: so either the waiter sees the
//!    change, or the changer sees the waiter.
//! B. The first of a line is rung for every change of its key; the others for those that end the
//!    wait of all, and when they become the first.
//! C. No bell is rung while a lock of the store is held: a ring may run a task's waker. What is
//!    found out under a lock is owed, and paid by whoever holds none.

use std::collections::{BTreeMap, VecDeque};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use crate::log::bell::{Bell, Listening};
use crate::log::sync::primitives::{Arc, AtomicBool, AtomicUsize, Mutex, MutexGuard};

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
    lines: BTreeMap<u16, BTreeMap<Vec<u8>, VecDeque<Arc<Bell>>>>,
}

impl Lines {
    fn line(&self, namespace: u16, key: &[u8]) -> Option<&VecDeque<Arc<Bell>>> {
        self.lines.get(&namespace)?.get(key)
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
        self.any() && self.lines().line(namespace, key).is_some()
    }

    /// Joins the end of a key's line.
    pub(crate) fn join(&self, namespace: u16, key: &[u8]) -> Place<'_> {
        let bell = Arc::new(Bell::default());
        let mut lines = self.lines();
        let keys = lines.lines.entry(namespace).or_default();
        match keys.get_mut(key) {
            Some(line) => line.push_back(Arc::clone(&bell)),
            None => {
                let line = VecDeque::from([Arc::clone(&bell)]);
                keys.insert(key.to_vec(), line);
            }
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        drop(lines);
        Place {
            waits: self,
            namespace,
            key: key.to_vec(),
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
        let most = if all { usize::MAX } else { 1 };
        let bells: Vec<Arc<Bell>> = match self.lines().line(namespace, key) {
            Some(line) => line.iter().take(most).cloned().collect(),
            None => return,
        };
        bells.iter().for_each(|bell| bell.ring());
    }

    /// Rings for everybody: for what concerns all keys, such as time.
    pub(crate) fn ring_all(&self) {
        if !self.any() {
            return;
        }
        let bells: Vec<Arc<Bell>> = {
            let lines = self.lines();
            let all = lines.lines.values().flat_map(BTreeMap::values);
            all.flatten().cloned().collect()
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

/// A place in a line, given up when dropped: whoever is first then is rung.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    waits: &'a Waits,
    namespace: u16,
    key: Vec<u8>,
    bell: Arc<Bell>,
}

impl Place<'_> {
    pub(crate) fn listen(&self) -> Listening {
        self.bell.listen()
    }

    pub(crate) fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    /// Says whether this is the first of its line, whose turn it is.
    pub(crate) fn is_first(&self) -> bool {
        let lines = self.waits.lines();
        let first = lines
            .line(self.namespace, &self.key)
            .and_then(VecDeque::front);
        first.is_some_and(|first| Arc::ptr_eq(first, &self.bell))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut lines = self.waits.lines();
        self.waits.count.fetch_sub(1, Ordering::Relaxed);
        let Some(keys) = lines.lines.get_mut(&self.namespace) else {
            return;
        };
        let Some(line) = keys.get_mut(&self.key) else {
            return;
        };
        let at = line.iter().position(|bell| Arc::ptr_eq(bell, &self.bell));
        if let Some(at) = at {
            line.remove(at);
        }
        let next = (at == Some(0)).then(|| line.front().cloned()).flatten();
        if line.is_empty() {
            keys.remove(&self.key);
            if keys.is_empty() {
                lines.lines.remove(&self.namespace);
            }
        }
        drop(lines);
        if let Some(next) = next {
            next.ring();
        }
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

    #[test]
    fn the_first_is_rung_for_a_change_and_all_for_a_final_one() {
        let waits = Waits::default();
        let (first, second) = (waits.join(1, b"k"), waits.join(1, b"k"));
        let other = waits.join(2, b"k");
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
        let (first, second, third) = (
            waits.join(1, b"k"),
            waits.join(1, b"k"),
            waits.join(1, b"k"),
        );
        assert!(first.is_first() && !second.is_first());
        let heard = [&second, &third].map(Place::listen);
        drop(first);
        assert_eq!(heard.map(rang), [true, false]);
        let heard = second.listen();
        drop(third);
        assert!(!rang(heard), "only who becomes the first is rung");
        assert!(second.is_first() && waits.has_line(1, b"k"));
        drop(second);
        assert!(!waits.any() && !waits.has_line(1, b"k"));
        assert!(waits.lines().lines.is_empty());
    }

    #[test]
    fn a_sleep_ends_with_its_time() {
        let waits = Waits::default();
        let place = waits.join(1, b"k");
        place.listen().sleep(Some(Duration::from_millis(1)));
        assert!(place.is_first());
    }
}
