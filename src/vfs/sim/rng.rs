//! A small reproducible generator for simulated disks and tests.

/// SplitMix64: the same seed gives the same numbers on every machine. Not for secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rng(u64);

impl Rng {
    /// Starts from a seed; all seeds are good.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// Returns the next number.
    pub fn next_u64(&mut self) -> u64 {
        // Steele, Lea, Flood: Fast splittable pseudorandom number generators (2014).
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Fills the buffer.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            for (to, from) in chunk.iter_mut().zip(self.next_u64().to_le_bytes()) {
                *to = from;
            }
        }
    }

    /// Returns a number below `bound`, or 0 if `bound` is 0. The bias is below 2^-32 for
    /// bounds below 2^32.
    pub fn below(&mut self, bound: usize) -> usize {
        let wide = u128::from(self.next_u64()) * bound as u128;
        usize::try_from(wide >> 64).unwrap_or(0)
    }
}
