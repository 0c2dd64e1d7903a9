//! Atomic insert-if-absent for stores that have only get and put: keys share out locks.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::workload::Key;

const STRIPES_COUNT: usize = 256;

/// Single calls on different keys go on side by side; a batch is alone.
pub(crate) struct Gate {
    all: RwLock<()>,
    stripes: Vec<Mutex<()>>,
}

impl Default for Gate {
    fn default() -> Self {
        Gate {
            all: RwLock::new(()),
            stripes: (0..STRIPES_COUNT).map(|_| Mutex::new(())).collect(),
        }
    }
}

/// Held while one key is read and written.
pub(crate) struct One<'a> {
    _all: RwLockReadGuard<'a, ()>,
    _stripe: Option<MutexGuard<'a, ()>>,
}

impl Gate {
    pub(crate) fn one(&self, key: &Key) -> One<'_> {
        let [first, ..] = *key;
        let stripe = self.stripes.get(usize::from(first) % STRIPES_COUNT);
        One {
            _all: self.all.read().unwrap_or_else(PoisonError::into_inner),
            _stripe: stripe.map(|stripe| stripe.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    pub(crate) fn all(&self) -> RwLockWriteGuard<'_, ()> {
        self.all.write().unwrap_or_else(PoisonError::into_inner)
    }
}
