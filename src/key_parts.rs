//! Keys made of parts: which bytes stand for a sequence of texts and numbers? `docs/keys.md`.
//!
//! A. Different sequences have different bytes: each part says its kind and where it ends.
//! B. The bytes are the same in every version and on every machine: keys outlive both.

use std::fmt;

use crate::error::{Error, ErrorKind, Result};
use crate::key::show_key;

/// A text or bytes: their length, then themselves.
const TAG_BYTES: u8 = 1;
/// A number from zero on: itself.
const TAG_NUMBER: u8 = 2;
/// A number below zero: how far below minus one.
const TAG_NEGATIVE: u8 = 3;
/// A scalar of a JSON text: the length of its text, then that.
#[cfg(feature = "json")]
const TAG_JSON: u8 = 4;

/// A key made of parts, without ambiguity: `("ab", "c")` is not `("a", "bc")`, nor is the text
/// `"7"` the number 7.
///
/// It is given to any call that takes a key. Its bytes never change between versions and
/// machines; `docs/keys.md` describes them. No part begins with a printable character, so
/// such a key never equals a plain text that is used as a key in the same namespace.
///
/// A key without parts is empty, and one over [`crate::KEY_BYTES_MAX`] is too long: the calls
/// that take it refuse both with `Invalid`.
///
/// ```
/// use idemlog::{DedupLog, KeyParts, NamespaceOptions, Observed};
///
/// let log = DedupLog::in_memory()?;
/// let events = log.filter("events", NamespaceOptions::new())?;
/// let key = KeyParts::new().part("order").number(17).part("paid");
/// assert_eq!(events.observe(&key)?, Observed::New);
/// assert_eq!(events.observe(&key)?, Observed::Duplicate);
/// assert_ne!(KeyParts::of(["ab", "c"]), KeyParts::of(["a", "bc"]));
/// # Ok::<(), idemlog::Error>(())
/// ```
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[must_use]
pub struct KeyParts(Vec<u8>);

impl KeyParts {
    /// Returns a key without parts.
    pub fn new() -> Self {
        KeyParts::default()
    }

    /// Makes a key of texts, or of byte strings, in this order.
    pub fn of<P: AsRef<[u8]>>(parts: impl IntoIterator<Item = P>) -> Self {
        parts.into_iter().fold(KeyParts::new(), KeyParts::part)
    }

    /// Makes the key of a Kafka record: the same on every delivery, and of no other record of the
    /// same cluster, as long as the topic is not deleted and created anew.
    ///
    /// It is that of `part(topic)`, `number(partition)`, `number(offset)`.
    ///
    /// # Errors
    /// `Invalid` for an empty topic, and for a partition or an offset below zero: clients use
    /// those for "none" and "not yet known".
    pub fn kafka(topic: &str, partition: i32, offset: i64) -> Result<Self> {
        if topic.is_empty() || partition < 0 || offset < 0 {
            return Err(Error::invalid(format!(
                "not the place of a Kafka record: topic={topic:?} partition={partition} \
                 offset={offset}"
            )));
        }
        Ok(KeyParts::new().part(topic).number(partition).number(offset))
    }

    /// Adds a text or bytes. The text `"a"` and the bytes `b"a"` are the same part.
    pub fn part(mut self, part: impl AsRef<[u8]>) -> Self {
        self.push_bytes(TAG_BYTES, part.as_ref());
        self
    }

    /// Adds an integer. Its type makes no difference: 7 is the same part as `u8` and as `i64`.
    pub fn number(mut self, number: impl Into<i128>) -> Self {
        let number = number.into();
        if number < 0 {
            self.0.push(TAG_NEGATIVE);
            // -1 is 0, -2 is 1: all bits turned over, so that the smallest number has one, too.
            self.push_varint(!number.cast_unsigned());
        } else {
            self.0.push(TAG_NUMBER);
            self.push_varint(number.cast_unsigned());
        }
        self
    }

    /// Adds the scalar at a path of a JSON text; see [`crate::json_field`].
    ///
    /// ```
    /// use idemlog::KeyParts;
    ///
    /// let message = br#"{"shop": {"id": 7}, "order": "A-17", "retries": 3}"#;
    /// let key = KeyParts::new()
    ///     .json_field(message, &["shop", "id"])?
    ///     .json_field(message, &["order"])?;
    /// let redelivered = br#"{"retries": 4, "order": "\u0041-17", "shop": {"id": 7}}"#;
    /// let same = KeyParts::new()
    ///     .json_field(redelivered, &["shop", "id"])?
    ///     .json_field(redelivered, &["order"])?;
    /// assert_eq!(key, same);
    /// # Ok::<(), idemlog::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`crate::json_field`].
    #[cfg(feature = "json")]
    pub fn json_field(mut self, json: &[u8], path: &[&str]) -> Result<Self> {
        let text = crate::json_field::json_field(json, path)?;
        self.push_bytes(TAG_JSON, &text);
        Ok(self)
    }

    /// Returns the bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the bytes, to keep.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    fn push_bytes(&mut self, tag: u8, bytes: &[u8]) {
        self.0.push(tag);
        self.push_varint(bytes.len() as u128);
        self.0.extend_from_slice(bytes);
    }

    /// Seven bits a byte, the lowest first, the top bit set in all but the last: one form for
    /// each number.
    fn push_varint(&mut self, mut number: u128) {
        loop {
            let [low, ..] = number.to_le_bytes();
            number >>= 7;
            if number == 0 {
                return self.0.push(low & 0x7f);
            }
            self.0.push(low | 0x80);
        }
    }
}

impl AsRef<[u8]> for KeyParts {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for KeyParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyParts({})", show_key(&self.0))
    }
}

/// Returns the key of a Snowflake: its 8 bytes, the highest first, as
/// [`KeyTime::Snowflake`](crate::KeyTime::Snowflake) reads them.
///
/// ```
/// assert_eq!(idemlog::snowflake_key(0x0102_0304_0506_0708), [1, 2, 3, 4, 5, 6, 7, 8]);
/// ```
pub fn snowflake_key(id: u64) -> [u8; 8] {
    let mut key = id.to_le_bytes();
    key.reverse();
    key
}

/// Makes a key that nobody else makes: 16 bytes from the system's generator. For whoever sends a
/// message and retries it: make the key once, and send it along with every retry.
///
/// # Errors
/// `Io` if the system has no randomness to give.
pub fn random_key() -> Result<[u8; 16]> {
    let mut key = [0; 16];
    getrandom::fill(&mut key).map_err(|e| {
        Error::new(
            ErrorKind::Io,
            format!("no random bytes from the system: {e}"),
        )
    })?;
    Ok(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(key: &KeyParts) -> String {
        key.0.iter().map(|b| format!("{b:02x}")).collect()
    }

    /// Keys outlive versions and machines: whoever changes one of these makes every remembered
    /// key new again.
    #[test]
    fn fixed_vectors_never_change() {
        let parts = KeyParts::new;
        for (key, expected) in [
            (parts(), ""),
            (parts().part(""), "0100"),
            (KeyParts::of(["ab", "c"]), "01026162010163"),
            (KeyParts::of(["a", "bc"]), "01016101026263"),
            (parts().part([0xff, 0x00]), "0102ff00"),
            (parts().number(0), "0200"),
            (parts().number(127), "027f"),
            (parts().number(128), "028001"),
            (parts().number(u64::MAX), "02ffffffffffffffffff01"),
            (
                parts().number(i128::MAX),
                "02ffffffffffffffffffffffffffffffffffff01",
            ),
            (parts().number(-1), "0300"),
            (parts().number(-129), "038001"),
            (parts().number(i64::MIN), "03ffffffffffffffff7f"),
            (
                parts().number(i128::MIN),
                "03ffffffffffffffffffffffffffffffffffff01",
            ),
            (
                KeyParts::kafka("orders", 3, 1_000_000).unwrap(),
                "01066f7264657273020302c0843d",
            ),
        ] {
            assert_eq!(hex(&key), expected);
        }
        let long = parts().part("x".repeat(300));
        assert!(hex(&long).starts_with("01ac0278"));
        assert_eq!(long.as_bytes().len(), 303);
        assert_eq!(
            snowflake_key(u64::MAX - 1),
            [255, 255, 255, 255, 255, 255, 255, 254]
        );
    }

    #[cfg(feature = "json")]
    #[test]
    fn fixed_vectors_of_json_fields_never_change() {
        let json = br#"{"id":7,"name":"\u0061","on":true}"#;
        let field = |name| KeyParts::new().json_field(json, &[name]).unwrap();
        assert_eq!(hex(&field("id")), "040137");
        assert_eq!(hex(&field("name")), "0403226122");
        assert_eq!(hex(&field("on")), "040474727565");
    }

    #[test]
    fn places_that_are_none_are_no_keys() {
        for (topic, partition, offset) in [("", 0, 0), ("t", -1, 0), ("t", 0, -1)] {
            let error = KeyParts::kafka(topic, partition, offset).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
        }
        assert!(KeyParts::kafka("t", i32::MAX, i64::MAX).is_ok());
    }

    #[test]
    fn random_keys_differ() {
        assert_ne!(random_key().unwrap(), random_key().unwrap());
    }
}
