//! When was a key made? A pure function of its bytes, for keys that say so: look-ups skip the
//! runs whose keys are all of other times, without asking their filters.

/// How the time when it was made stands in a key. A key that does not have the form has no time,
/// which costs speed and nothing else; so does a wrong choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeyTime {
    /// A UUID of version 7: 16 bytes, or text of 36 or 32 characters.
    UuidV7,
    /// A ULID: 16 bytes, or text of 26 characters.
    Ulid,
    /// A Snowflake: 8 bytes, big-endian, or decimal digits. The upper 42 bits are milliseconds
    /// since `epoch_ms`, itself in milliseconds since 1970.
    Snowflake {
        /// The first millisecond of the numbering: 1288834974657 for X, 1420070400000 for Discord.
        epoch_ms: u64,
    },
}

/// Milliseconds of one bucket, as a power of two: about 65 seconds.
const BUCKET_BITS: u32 = 16;

/// The time of one key, as runs know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyBucket {
    pub(crate) function: KeyFunction,
    pub(crate) bucket: u32,
}

/// The function and its parameter, as they stand on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyFunction {
    pub(crate) id: u16,
    pub(crate) parameter: u64,
}

impl KeyTime {
    pub(crate) fn function(self) -> KeyFunction {
        let (id, parameter) = match self {
            KeyTime::UuidV7 => (1, 0),
            KeyTime::Ulid => (2, 0),
            KeyTime::Snowflake { epoch_ms } => (3, epoch_ms),
        };
        KeyFunction { id, parameter }
    }

    /// Returns the time of a key in coarse steps; `None` for a key of another form.
    pub(crate) fn bucket(self, key: &[u8]) -> Option<KeyBucket> {
        let made_ms = match self {
            KeyTime::UuidV7 => uuid_ms(key)?,
            KeyTime::Ulid => ulid_ms(key)?,
            KeyTime::Snowflake { epoch_ms } => epoch_ms.saturating_add(snowflake(key)? >> 22),
        };
        Some(KeyBucket {
            function: self.function(),
            bucket: u32::try_from(made_ms >> BUCKET_BITS).ok()?,
        })
    }
}

/// The first 48 bits, if the version is 7 and the variant is that of RFC 9562.
fn uuid_ms(key: &[u8]) -> Option<u64> {
    let bytes: [u8; 16] = match key.len() {
        16 => key.try_into().ok()?,
        36 => {
            let dashes = [8, 13, 18, 23];
            if !dashes.iter().all(|at| key.get(*at) == Some(&b'-')) {
                return None;
            }
            from_hex(
                key.iter()
                    .enumerate()
                    .filter(|(at, _)| !dashes.contains(at))
                    .map(|(_, b)| *b),
            )?
        }
        32 => from_hex(key.iter().copied())?,
        _ => return None,
    };
    let [.., version, _, variant, _, _, _, _, _, _, _] = bytes;
    (version >> 4 == 7 && variant >> 6 == 2).then(|| first_48_bits(&bytes))
}

fn first_48_bits(bytes: &[u8]) -> u64 {
    big_endian(bytes.get(..6).unwrap_or_default())
}

fn big_endian(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

fn from_hex(digits: impl Iterator<Item = u8>) -> Option<[u8; 16]> {
    let mut bytes = [0; 16];
    for (at, digit) in digits.enumerate() {
        let digit = u8::try_from(char::from(digit).to_digit(16)?).ok()?;
        let byte = bytes.get_mut(at / 2)?;
        *byte = *byte << 4 | digit;
    }
    Some(bytes)
}

/// The first 48 bits: ten of the 26 characters of Crockford's base 32.
fn ulid_ms(key: &[u8]) -> Option<u64> {
    match key.len() {
        16 => Some(first_48_bits(key)),
        26 => {
            let mut digits = key.get(..10)?.iter();
            let made_ms = digits.try_fold(0u64, |sum, c| Some(sum << 5 | base_32(*c)?))?;
            (made_ms < 1 << 48).then_some(made_ms)
        }
        _ => None,
    }
}

fn base_32(c: u8) -> Option<u64> {
    const DIGITS: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";
    let c = c.to_ascii_uppercase();
    DIGITS
        .iter()
        .position(|digit| *digit == c)
        .map(|at| at as u64)
}

fn snowflake(key: &[u8]) -> Option<u64> {
    if let Ok(bytes) = <[u8; 8]>::try_from(key) {
        // Eight digits are a number that is no Snowflake of any day worth remembering.
        return (!key.iter().all(u8::is_ascii_digit)).then(|| big_endian(&bytes));
    }
    if key.is_empty() || key.len() > 20 || !key.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(key).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms_of(time: KeyTime, key: &[u8]) -> Option<u64> {
        time.bucket(key).map(|found| u64::from(found.bucket))
    }

    #[test]
    fn published_examples_have_their_times() {
        // RFC 9562, appendix A.6: 2022-02-22 19:22:22.00 UTC.
        let text = b"017F22E2-79B0-7CC3-98C4-DC0C0C07398F";
        let expected = Some(0x017f_22e2_79b0 >> BUCKET_BITS);
        assert_eq!(ms_of(KeyTime::UuidV7, text), expected);
        let bare: Vec<u8> = text.iter().copied().filter(|b| *b != b'-').collect();
        assert_eq!(ms_of(KeyTime::UuidV7, &bare), expected);
        let raw = from_hex(bare.iter().copied()).unwrap();
        assert_eq!(ms_of(KeyTime::UuidV7, &raw), expected);
        // The example of the ULID specification: 2016-07-30 23:54:10.259 UTC.
        let expected = Some(1_469_922_850_259 >> BUCKET_BITS);
        assert_eq!(
            ms_of(KeyTime::Ulid, b"01ARZ3NDEKTSV4RRFFQ69G5FAV"),
            expected
        );
        assert_eq!(
            ms_of(KeyTime::Ulid, b"01arz3ndektsv4rrffq69g5fav"),
            expected
        );
        // The example of Discord's reference: 2016-04-30 11:18:25.796 UTC.
        let discord = KeyTime::Snowflake {
            epoch_ms: 1_420_070_400_000,
        };
        let expected = Some(1_462_015_105_796 >> BUCKET_BITS);
        assert_eq!(ms_of(discord, b"175928847299117063"), expected);
        let mut raw = 175_928_847_299_117_063_u64.to_le_bytes();
        raw.reverse();
        assert_eq!(ms_of(discord, &raw), expected);
    }

    #[test]
    fn keys_of_another_form_have_no_time() {
        let snowflake = KeyTime::Snowflake { epoch_ms: 0 };
        for (time, key) in [
            // Version 4, another variant, dashes in other places, not hexadecimal.
            (
                KeyTime::UuidV7,
                &b"017F22E2-79B0-4CC3-98C4-DC0C0C07398F"[..],
            ),
            (KeyTime::UuidV7, b"017F22E2-79B0-7CC3-18C4-DC0C0C07398F"),
            (KeyTime::UuidV7, b"017F22E279B0-7CC3-98C4-DC0C0C0739-8F"),
            (KeyTime::UuidV7, b"017F22E2-79B0-7CC3-98C4-DC0C0C07398G"),
            (KeyTime::UuidV7, b"order-1"),
            (KeyTime::Ulid, b"81ARZ3NDEKTSV4RRFFQ69G5FAV"),
            (KeyTime::Ulid, b"01ARZ3NDEUTSV4RRFFQ69G5FAV"),
            (snowflake, b"99999999999999999999"),
            (snowflake, b"12x"),
            (snowflake, b"12345678"),
            (snowflake, b""),
        ] {
            assert_eq!(time.bucket(key), None, "{time:?} {key:?}");
        }
        let far = KeyTime::Snowflake { epoch_ms: u64::MAX };
        assert_eq!(far.bucket(b"1"), None);
    }
}
