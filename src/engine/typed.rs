//! Typed outcomes, encoded with bincode. Only the bytes inside a committed outcome are bincode's:
//! the record around them is framed and checksummed by the log, and its format is our own.

use super::claim::Commit;
use crate::error::{Error, ErrorKind, Result};
use crate::key::OUTCOME_BYTES_MAX;
use crate::verdict::{Done, Outcome};

/// Little-endian, variable-length integers, and no value larger than the largest outcome: a
/// damaged length must not ask for more memory than that.
fn config() -> impl bincode::config::Config {
    bincode::config::standard().with_limit::<OUTCOME_BYTES_MAX>()
}

impl Commit {
    /// Commits with an outcome encoded by bincode; [`Outcome::decode`] reads it back.
    ///
    /// ```
    /// use idemlog::{Commit, CommitVerdict, DedupLog, NamespaceOptions, Repeatable, RunVerdict};
    ///
    /// let log = DedupLog::in_memory()?;
    /// let orders = log.namespace::<Repeatable>("orders", NamespaceOptions::new())?;
    /// let mut claim = orders.claim("order-1")?.claim().expect("a new key");
    /// let verdict = claim.commit_with(Commit::encoded(&(7u32, "shipped".to_string()))?)?;
    /// assert!(matches!(verdict, CommitVerdict::Committed { .. }));
    ///
    /// let RunVerdict::Replayed(done) = orders.run_once("order-1", |_| unreachable!())? else {
    ///     panic!("the order was committed");
    /// };
    /// assert_eq!(done.decode()?, Some((7u32, "shipped".to_string())));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// `Invalid` for a value that bincode cannot encode.
    pub fn encoded<T: bincode::Encode>(value: &T) -> Result<Commit> {
        let bytes = bincode::encode_to_vec(value, config())
            .map_err(|e| Error::invalid(format!("encoding an outcome failed: {e}")))?;
        Ok(Commit::new(bytes))
    }
}

impl Outcome {
    /// Decodes an outcome that [`Commit::encoded`] made; `None` if it was not kept.
    ///
    /// # Errors
    /// `Incompatible` for bytes that are not a whole value of this type.
    pub fn decode<T: bincode::Decode<()>>(&self) -> Result<Option<T>> {
        let Some(bytes) = self.bytes() else {
            return Ok(None);
        };
        let not_a_value = |why: String| {
            Error::new(
                ErrorKind::Incompatible,
                format!("outcome is of another type: {why}"),
            )
        };
        let (value, len) =
            bincode::decode_from_slice(bytes, config()).map_err(|e| not_a_value(e.to_string()))?;
        if len != bytes.len() {
            return Err(not_a_value(format!("bytes={} decoded={len}", bytes.len())));
        }
        Ok(Some(value))
    }
}

impl Done {
    /// Decodes the outcome; see [`Outcome::decode`].
    ///
    /// # Errors
    /// As [`Outcome::decode`].
    pub fn decode<T: bincode::Decode<()>>(&self) -> Result<Option<T>> {
        self.outcome.decode()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_encoding_has_these_bytes() {
        let commit = Commit::encoded(&(1u32, 300u64, "ab".to_string(), Some(true))).unwrap();
        let golden = [1, 251, 44, 1, 2, b'a', b'b', 1, 1];
        assert_eq!(commit.outcome.as_deref(), Some(golden.as_slice()));
    }

    #[test]
    fn bytes_of_another_type_are_a_typed_error_and_ask_for_no_memory() {
        let huge = Outcome::Kept(vec![253, 255, 255, 255, 255, 255, 255, 255, 255]);
        let error = huge.decode::<Vec<u64>>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Incompatible);
        let longer = Outcome::Kept(vec![1, 2]);
        assert_eq!(
            longer.decode::<u8>().unwrap_err().kind(),
            ErrorKind::Incompatible
        );
        assert_eq!(Outcome::Dropped.decode::<u8>().unwrap(), None);
    }
}
