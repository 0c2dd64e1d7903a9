//! What callers identify things by: keys, namespaces, fingerprints, and their limits.

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher13};

use crate::error::{Error, Result};

/// The largest key, in bytes.
pub const KEY_BYTES_MAX: usize = 64 * 1024 - 1;
/// The largest outcome, error text or evidence, in bytes; a namespace may declare less.
pub const OUTCOME_BYTES_MAX: usize = 256 * 1024;
/// The largest error text or evidence kept with a key, in bytes.
pub const EVIDENCE_BYTES_MAX: usize = 4 * 1024;
/// The largest namespace name, in bytes.
pub const NAMESPACE_BYTES_MAX: usize = 255;

/// What a namespace holds: observed keys, or claims of effects of one class.
///
/// It is declared when the namespace is created, kept in the store, and compared at every open:
/// another kind is a typed error. There is no default because none is right for everyone: an
/// effect that may run twice must not be held back by a crash, and one that may not must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NamespaceKind {
    /// Only `observe`: keys are marked before the effect, so an effect happens at most once.
    Filter,
    /// Running the effect twice is harmless, or the target honours the derived key.
    Repeatable,
    /// The target can be asked whether the effect happened.
    Probeable,
    /// Neither: after a crash between start and commit the key is in doubt until `resolve`.
    NonRepeatable,
    /// All effects are writes into this store; nothing happens outside.
    Internal,
    /// Versioned values: see [`Cells`](crate::Cells).
    Cells,
    /// Which numbers of a source are done: see [`Watermarks`](crate::Watermarks).
    Watermarks,
    /// Entries to be dispatched: see [`Outbox`](crate::Outbox).
    Outbox,
}

impl NamespaceKind {
    /// All kinds, in the order of their codes.
    pub const ALL: [NamespaceKind; 8] = [
        NamespaceKind::Filter,
        NamespaceKind::Repeatable,
        NamespaceKind::Probeable,
        NamespaceKind::NonRepeatable,
        NamespaceKind::Internal,
        NamespaceKind::Cells,
        NamespaceKind::Watermarks,
        NamespaceKind::Outbox,
    ];

    /// Returns the name used by the command line and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            NamespaceKind::Filter => "filter",
            NamespaceKind::Repeatable => "repeatable",
            NamespaceKind::Probeable => "probeable",
            NamespaceKind::NonRepeatable => "non-repeatable",
            NamespaceKind::Internal => "internal",
            NamespaceKind::Cells => "cells",
            NamespaceKind::Watermarks => "watermarks",
            NamespaceKind::Outbox => "outbox",
        }
    }

    /// Finds a kind by its [`NamespaceKind::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        NamespaceKind::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
    }

    /// Says whether the keys of such a namespace are claimed.
    pub(crate) const fn has_claims(self) -> bool {
        matches!(
            self,
            NamespaceKind::Repeatable
                | NamespaceKind::Probeable
                | NamespaceKind::NonRepeatable
                | NamespaceKind::Internal
        )
    }

    /// Says whether `start` must be durable before the effect and an unstarted claim may not be
    /// committed.
    pub(crate) const fn starts_durably(self) -> bool {
        matches!(
            self,
            NamespaceKind::Probeable | NamespaceKind::NonRepeatable
        )
    }
}

/// A 16-byte hash of a message's payload, compared on every call for the same key.
///
/// Two calls with the same key and different fingerprints are a `Mismatch`. A call without a
/// fingerprint is compared with nothing and matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 16]);

impl Fingerprint {
    /// Hashes exactly these bytes, the same in every process, build and architecture.
    ///
    /// SipHash-1-3 with 128 bits of output and a fixed public key: it finds a caller's mistake,
    /// not an adversary who builds two payloads of one hash. Against those, pass the first 16
    /// bytes of a cryptographic hash to [`Fingerprint::from_bytes`].
    ///
    /// ```
    /// use idemlog::Fingerprint;
    /// assert_eq!(Fingerprint::of(b"amount=5"), Fingerprint::of(b"amount=5"));
    /// assert_ne!(Fingerprint::of(b"amount=5"), Fingerprint::of(b"amount=6"));
    /// ```
    pub fn of(payload: &[u8]) -> Self {
        let mut hasher = SipHasher13::new_with_keys(0x6964_656d_6c6f_6731, 0x6669_6e67_6572_3031);
        hasher.write(payload);
        let hash = hasher.finish128();
        let mut bytes = [0; 16];
        for (to, from) in bytes.iter_mut().zip(
            hash.h1
                .to_le_bytes()
                .into_iter()
                .chain(hash.h2.to_le_bytes()),
        ) {
            *to = from;
        }
        Fingerprint(bytes)
    }

    /// Makes a fingerprint of 16 bytes that the caller computed.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Fingerprint(bytes)
    }

    /// Returns the 16 bytes.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

/// Refuses empty and oversized keys.
pub(crate) fn check_key(key: &[u8]) -> Result<()> {
    if key.is_empty() {
        return Err(Error::invalid(
            "key is empty: every operation needs an identity of its own",
        ));
    }
    if key.len() > KEY_BYTES_MAX {
        return Err(Error::invalid(format!(
            "key over the limit: bytes={} bytes_max={KEY_BYTES_MAX} key_start={}; hash it first",
            key.len(),
            show_key(key)
        )));
    }
    Ok(())
}

/// Refuses names that are empty, too long, or hold control characters.
pub(crate) fn check_namespace(name: &str) -> Result<()> {
    if name.is_empty() || name.len() > NAMESPACE_BYTES_MAX {
        return Err(Error::invalid(format!(
            "namespace name must have 1 to {NAMESPACE_BYTES_MAX} bytes: bytes={}",
            name.len()
        )));
    }
    if name.chars().any(char::is_control) {
        return Err(Error::invalid(format!(
            "namespace name holds a control character: name={name:?}"
        )));
    }
    Ok(())
}

/// Shows a key in a message: printable ASCII as it is, other bytes escaped, cut at 64 bytes.
pub(crate) fn show_key(key: &[u8]) -> String {
    let mut text: String = key
        .iter()
        .take(64)
        .map(|b| b.escape_ascii().to_string())
        .collect();
    if key.len() > 64 {
        text.push_str("...");
    }
    text
}

/// Makes the derived key of one step: the same bytes on every attempt of the same key.
///
/// 128 bits of SipHash-1-3 over namespace, key and step, each length-prefixed, under a public
/// key: stable between versions and machines, short enough for every target.
pub(crate) fn derive_key(namespace: &str, key: &[u8], step: &str) -> String {
    let mut hasher = SipHasher13::new_with_keys(0x6964_656d_6c6f_6731, 0x6465_7269_7665_6431);
    for part in [namespace.as_bytes(), key, step.as_bytes()] {
        hasher.write_u64((part.len() as u64).to_le());
        hasher.write(part);
    }
    let hash = hasher.finish128();
    format!("{:016x}{:016x}", hash.h1, hash.h2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_vectors_never_change() {
        assert_eq!(hex(Fingerprint::of(b"").as_bytes()), FINGERPRINT_EMPTY);
        assert_eq!(
            hex(Fingerprint::of(b"amount=5").as_bytes()),
            FINGERPRINT_AMOUNT
        );
        assert_eq!(derive_key("payments", b"order-1", "charge"), DERIVED);
    }

    const FINGERPRINT_EMPTY: &str = "39335c28ac19e263127af3ae986f8536";
    const FINGERPRINT_AMOUNT: &str = "a2e44eb8e4a388d86928a6109ea76680";
    const DERIVED: &str = "b7d4b273839e3070e2a65896cf6e0efe";

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    #[test]
    fn derived_keys_are_unambiguous() {
        assert_ne!(derive_key("ab", b"c", ""), derive_key("a", b"bc", ""));
        assert_ne!(derive_key("a", b"b", "c"), derive_key("a", b"bc", ""));
    }

    #[test]
    fn bad_keys_and_names_are_refused() {
        assert!(check_key(b"").is_err());
        assert!(check_key(&vec![7; KEY_BYTES_MAX + 1]).is_err());
        assert!(check_key(&vec![7; KEY_BYTES_MAX]).is_ok());
        assert!(check_namespace("").is_err());
        assert!(check_namespace("a\nb").is_err());
        assert!(check_namespace(&"n".repeat(256)).is_err());
        assert!(check_namespace("payments").is_ok());
    }
}
