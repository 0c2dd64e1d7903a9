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
    pub(crate) fn hash(&self, namespace: u16, key: &[u8]) -> u64 {
        let mut hasher = self.empty;
        hasher.write(&namespace.to_le_bytes());
        hasher.write(key);
        hasher.finish() >> (64 - HASH_BITS)
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
}
