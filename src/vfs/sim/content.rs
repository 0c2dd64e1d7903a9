//! The bytes of a simulated file: shared until somebody writes, and hashed at most once.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

/// Bytes that clones share, together with their hash once somebody has asked for it.
#[derive(Clone, Default)]
pub(super) struct Content {
    bytes: Arc<Vec<u8>>,
    /// Shared by clones of the same bytes, so that none of them hashes a second time.
    hash: Arc<OnceLock<u64>>,
}

impl Content {
    pub(super) fn new(bytes: Vec<u8>) -> Content {
        Content {
            bytes: Arc::new(bytes),
            hash: Arc::default(),
        }
    }

    /// Returns the bytes to change them, copied first if somebody else has them.
    pub(super) fn make_mut(&mut self) -> &mut Vec<u8> {
        if self.hash.get().is_some() || Arc::strong_count(&self.hash) > 1 {
            self.hash = Arc::default();
        }
        Arc::make_mut(&mut self.bytes)
    }

    pub(super) fn shared(&self) -> Arc<Vec<u8>> {
        Arc::clone(&self.bytes)
    }

    pub(super) fn hash64(&self) -> u64 {
        *self.hash.get_or_init(|| hash64(&self.bytes))
    }
}

impl Deref for Content {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

const ODD: u64 = 0x9e37_79b9_7f4a_7c15;

/// Hashes bytes for telling images apart. Each round is a bijection of the state, so that long
/// files do not lose what their beginnings have put in. No defence against chosen bytes.
pub(super) fn hash64(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut tail = [0; 8];
    for (to, from) in tail.iter_mut().zip(rest) {
        *to = *from;
    }
    let mut state = (bytes.len() as u64).wrapping_mul(ODD);
    for word in words.iter().chain([&tail]) {
        state = (state ^ u64::from_le_bytes(*word)).wrapping_mul(ODD);
        state ^= state >> 29;
    }
    state = (state ^ (state >> 32)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state ^ (state >> 27)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_shows_in_the_hash_and_not_in_that_of_a_clone() {
        let mut content = Content::new(vec![7; 100]);
        let clone = content.clone();
        let before = clone.hash64();
        assert_eq!(content.hash64(), before);
        content.make_mut()[50] ^= 1;
        assert_ne!(content.hash64(), before);
        assert_eq!(clone.hash64(), before);
        assert_eq!(&clone[..], [7; 100]);
        // Changed before anybody has asked, with a clone about.
        let mut content = Content::new(vec![7; 100]);
        let clone = content.clone();
        content.make_mut().push(1);
        assert_eq!(clone.hash64(), before);
        assert_ne!(content.hash64(), before);
    }

    #[test]
    fn lengths_bits_and_places_are_told_apart() {
        let mut seen = std::collections::HashSet::new();
        for len in 0..40 {
            assert!(seen.insert(hash64(&vec![0; len])));
            for bit in 0..len * 8 {
                let mut bytes = vec![0; len];
                bytes[bit / 8] = 1 << (bit % 8);
                assert!(seen.insert(hash64(&bytes)));
            }
        }
    }
}
