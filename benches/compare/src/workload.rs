//! The sequence of operations: the same for every store, and known in advance.

/// A key, as every store gets it.
pub(crate) type Key = [u8; 16];

/// One operation in this many is a duplicate.
const DUPLICATE_EVERY: u64 = 10;
/// Half of the duplicates are among this many newest keys.
const RECENT_COUNT: u64 = 10_000;
/// The expiry that peers store with each key: far ahead.
pub(crate) const EXPIRY: u64 = 4_102_444_800_000;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    pub(crate) key: Key,
    /// The verdict that is right.
    pub(crate) fresh: bool,
}

/// Endless; each thread has a sequence over keys of its own, so that every verdict is known
/// whatever the threads do.
#[derive(Debug)]
pub(crate) struct Sequence {
    state: u64,
    base: u64,
    inserted: u64,
}

impl Sequence {
    pub(crate) fn new(thread: usize) -> Sequence {
        let thread = thread as u64;
        Sequence {
            state: 0x1de_a106 ^ thread,
            base: thread << 40,
            inserted: 0,
        }
    }

    /// How many new keys there were so far.
    pub(crate) fn inserted(&self) -> u64 {
        self.inserted
    }

    pub(crate) fn next(&mut self) -> Op {
        let draw = self.draw();
        if self.inserted > 0 && draw.is_multiple_of(DUPLICATE_EVERY) {
            let reach = if (draw >> 32) & 1 == 0 {
                self.inserted.min(RECENT_COUNT)
            } else {
                self.inserted
            };
            let back = self.draw() % reach;
            return Op {
                key: key(self.base + self.inserted - 1 - back),
                fresh: false,
            };
        }
        self.inserted += 1;
        Op {
            key: key(self.base + self.inserted - 1),
            fresh: true,
        }
    }

    fn draw(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state)
    }
}

/// The key with this number: random bytes, so that no store profits from order.
pub(crate) fn key(number: u64) -> Key {
    let mut key = [0; 16];
    let (low, high) = key.split_at_mut(8);
    low.copy_from_slice(&mix(number ^ 0x5bd1_e995_7b93_5a2d).to_le_bytes());
    high.copy_from_slice(&mix(number.wrapping_mul(0xd134_2543_de82_ef95)).to_le_bytes());
    key
}

/// A key that is never inserted.
pub(crate) fn absent_key(number: u64) -> Key {
    key(number | 1 << 63)
}

/// The finalizer of SplitMix64: a permutation of 64-bit numbers.
pub(crate) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
