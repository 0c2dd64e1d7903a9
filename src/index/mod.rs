//! The index: derived from the log, may be deleted and rebuilt at any time. It knows hashes and
//! places, never keys: whether a place holds the asked key is decided by who reads the log.

pub(crate) mod active;
pub(crate) mod build;
mod fuse;
pub(crate) mod merge;
mod prefetch;
pub(crate) mod run;

use std::hash::Hasher;

use siphasher::sip::SipHasher13;

use crate::format::StoreId;
use crate::format::run::HASH_BITS;

/// Namespace and key of usual length.
const SHORT_BYTES: usize = 66;

/// The keyed hash of one store. The key is random: whoever chooses keys cannot choose hashes.
#[derive(Clone, Debug)]
pub(crate) struct KeyHash {
    empty: SipHasher13,
    id: u64,
}

impl KeyHash {
    pub(crate) fn new(hash_key: &[u8; 16], store: StoreId) -> Self {
        let empty = SipHasher13::new_with_key(hash_key);
        let mut mac = empty;
        mac.write(&store);
        KeyHash {
            empty,
            id: mac.finish(),
        }
    }

    /// Returns what stands in files that depend on the hash key: a MAC of the store's identity.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Hashes namespace id, then key, to [`HASH_BITS`] bits.
    #[inline]
    pub(crate) fn hash(&self, namespace: u16, key: &[u8]) -> u64 {
        // In one piece where it is short: a third of the instructions of two pieces.
        let mut whole = [0; SHORT_BYTES];
        let hash = match whole.get_mut(..2 + key.len()) {
            Some(bytes) => {
                let (head, tail) = bytes.split_at_mut(2);
                head.copy_from_slice(&namespace.to_le_bytes());
                tail.copy_from_slice(key);
                self.empty.hash(bytes)
            }
            None => {
                let mut hasher = self.empty;
                hasher.write(&namespace.to_le_bytes());
                hasher.write(key);
                hasher.finish()
            }
        };
        hash >> (64 - HASH_BITS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_hash_key_or_namespace_is_another_hash() {
        let one = KeyHash::new(&[1; 16], [0; 16]);
        let two = KeyHash::new(&[2; 16], [0; 16]);
        assert_ne!(one.id(), two.id());
        assert_ne!(one.hash(1, b"k"), two.hash(1, b"k"));
        assert_ne!(one.hash(1, b"k"), one.hash(2, b"k"));
        assert!(one.hash(1, b"k") < 1 << HASH_BITS);
    }

    #[test]
    fn short_and_long_keys_are_hashed_alike() {
        let hash = KeyHash::new(&[7; 16], [0; 16]);
        for len in 0..2 * SHORT_BYTES {
            let key: Vec<u8> = (0..len).map(|n| u8::try_from(n).unwrap()).collect();
            let mut hasher = hash.empty;
            hasher.write(&[3, 1]);
            hasher.write(&key);
            let expected = hasher.finish() >> (64 - HASH_BITS);
            assert_eq!(hash.hash(0x0103, &key), expected, "len={len}");
        }
    }
}
