//! The text of a token, and who can have made it: `docs/tokens.md`.
//!
//! A. Nobody without the store's secret makes a text that opens as this store's: 128 bits of
//!    HMAC-SHA256 cover every byte of it, and are compared in constant time.
//! B. A token has one text: each other text is another token, or none.
//! C. Nothing here depends on what the store holds: a forged token costs no look-up.

use hmac::digest::Key;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use super::StoreId;
use super::le::{Put as _, Reader};

type HmacSha256 = Hmac<Sha256>;

/// What a token's text begins with; the digit is the version of everything behind it.
const PREFIX: &str = "it1_";
/// Bytes of the body: of 3 bytes each 4 characters, so that no bit of the text is left over.
const BODY_BYTES: usize = 63;
const TEXT_CHARS: usize = PREFIX.len() + BODY_BYTES / 3 * 4;
const _: () = assert!(BODY_BYTES.is_multiple_of(3));
/// Bytes of the body before the MAC.
const SIGNED_BYTES: usize = BODY_BYTES - 16;

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// What a token stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TokenBody {
    pub(crate) id: [u8; 16],
    /// Trusted second from which on it is not valid; 0 is never.
    pub(crate) expires_at_s: u32,
}

/// What a text turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opened {
    /// No token, or not made by whoever it says.
    Forged,
    /// Says that it is of another store, or is of another namespace of this one.
    Unknown,
    /// This namespace's, for another principal.
    WrongBinding,
    Valid(TokenBody),
}

/// The keys of one namespace's tokens.
#[derive(Clone)]
pub(crate) struct TokenKeys {
    namespace: u16,
    /// Names the store and its secret: a store that lost something and was repaired has another
    /// secret and knows no older token, because the marks of used ones may be lost.
    issuer: [u8; 8],
    mac: HmacSha256,
    binding: HmacSha256,
}

impl TokenKeys {
    /// Derives the keys from the secret in the manifest. Each use has a key of its own, and none
    /// is the hash key itself.
    pub(crate) fn new(hash_key: &[u8; 16], store: StoreId, namespace: u16) -> Self {
        let derive = |purpose: &[u8]| {
            let keyed = keyed(hash_key).chain_update(b"idemlog token 1 ");
            sum(keyed.chain_update(store).chain_update(purpose))
        };
        TokenKeys {
            namespace,
            issuer: first(&derive(b"issuer")),
            mac: keyed(&derive(b"mac")),
            binding: keyed(&derive(b"binding")),
        }
    }

    /// Makes a token's text.
    pub(crate) fn seal(&self, body: &TokenBody, bind: &[u8]) -> String {
        let mut bytes = Vec::with_capacity(BODY_BYTES);
        bytes.put_u8(0);
        bytes.put(&self.issuer);
        bytes.put_u16(self.namespace);
        bytes.put_u32(body.expires_at_s);
        bytes.put(&body.id);
        let binding = sum(self.binding_of(&body.id, bind));
        bytes.put(&first::<16>(&binding));
        let mac = sum(self.mac.clone().chain_update(&bytes));
        bytes.put(&first::<16>(&mac));
        to_text(&bytes)
    }

    /// Says what a text is. The issuer is looked at first, because a MAC says nothing about a
    /// token of another one.
    pub(crate) fn open(&self, text: &str, bind: &[u8]) -> Opened {
        let Some(bytes) = from_text(text) else {
            return Opened::Forged;
        };
        let (signed, mac) = bytes.split_at(SIGNED_BYTES.min(bytes.len()));
        let mut r = Reader::new(signed);
        let fields = (|| {
            r.zeros(1)?;
            Ok::<_, super::Malformed>((r.array()?, r.u16()?, r.u32()?, r.array()?, r.array()?))
        })();
        let Ok((issuer, namespace, expires_at_s, id, binding)) = fields else {
            return Opened::Forged;
        };
        let binding: [u8; 16] = binding;
        if self.issuer != issuer {
            return Opened::Unknown;
        }
        let whole = self.mac.clone().chain_update(signed);
        if whole.verify_truncated_left(mac).is_err() {
            return Opened::Forged;
        }
        if self.namespace != namespace {
            return Opened::Unknown;
        }
        let bound = self.binding_of(&id, bind);
        if bound.verify_truncated_left(&binding).is_err() {
            return Opened::WrongBinding;
        }
        Opened::Valid(TokenBody { id, expires_at_s })
    }

    /// The id makes it another one for each token: two tokens of one principal do not show it.
    fn binding_of(&self, id: &[u8; 16], bind: &[u8]) -> HmacSha256 {
        self.binding.clone().chain_update(id).chain_update(bind)
    }
}

/// Starts a MAC: a key shorter than a block is filled up with zeros, as HMAC says.
fn keyed(key: &[u8]) -> HmacSha256 {
    let mut block = Key::<HmacSha256>::default();
    for (to, from) in block.iter_mut().zip(key) {
        *to = *from;
    }
    HmacSha256::new(&block)
}

fn sum(mac: HmacSha256) -> [u8; 32] {
    mac.finalize().into_bytes().into()
}

fn first<const N: usize>(bytes: &[u8; 32]) -> [u8; N] {
    let mut head = [0; N];
    for (to, from) in head.iter_mut().zip(bytes) {
        *to = *from;
    }
    head
}

/// Writes 6 bits a character, the highest first (the alphabet of RFC 4648, section 5).
fn to_text(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(TEXT_CHARS);
    text.push_str(PREFIX);
    for three in bytes.chunks(3) {
        let bits = three
            .iter()
            .fold(0usize, |bits, b| bits << 8 | usize::from(*b));
        for shift in [18, 12, 6, 0] {
            let digit = DIGITS.get(bits >> shift & 63);
            text.push(digit.map_or('A', |d| char::from(*d)));
        }
    }
    text
}

fn from_text(text: &str) -> Option<Vec<u8>> {
    if text.len() != TEXT_CHARS {
        return None;
    }
    let digits = text.strip_prefix(PREFIX)?.as_bytes();
    let mut bytes = Vec::with_capacity(BODY_BYTES);
    for four in digits.chunks(4) {
        let bits = four
            .iter()
            .try_fold(0u32, |bits, c| Some(bits << 6 | digit(*c)?))?;
        let [low, middle, high, _] = bits.to_le_bytes();
        bytes.extend([high, middle, low]);
    }
    Some(bytes)
}

fn digit(c: u8) -> Option<u32> {
    Some(match c {
        b'A'..=b'Z' => u32::from(c - b'A'),
        b'a'..=b'z' => u32::from(c - b'a') + 26,
        b'0'..=b'9' => u32::from(c - b'0') + 52,
        b'-' => 62,
        b'_' => 63,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: TokenBody = TokenBody {
        id: *b"0123456789abcdef",
        expires_at_s: 1_700_000_000,
    };

    fn keys(namespace: u16) -> TokenKeys {
        TokenKeys::new(&[7; 16], *b"store-number-one", namespace)
    }

    /// Computed apart from this code, from the description in `docs/tokens.md`.
    #[test]
    fn a_fixed_vector_never_changes() {
        let text = keys(3).seal(&BODY, b"anna");
        assert_eq!(text, VECTOR);
        assert_eq!(keys(3).open(VECTOR, b"anna"), Opened::Valid(BODY));
    }

    const VECTOR: &str =
        "it1_AONREfhFeQuHAwAA8VNlMDEyMzQ1Njc4OWFiY2RlZv3fMKvHb98IXQ8BT_OJVfDmLiuO4_bMiAZX25Z1W8-p";

    #[test]
    fn every_changed_bit_and_character_is_noticed() {
        let keys = keys(3);
        let text = keys.seal(&BODY, b"anna");
        let bytes = from_text(&text).unwrap();
        for bit in 0..BODY_BYTES * 8 {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            // Of whoever the issuer's bytes name, nothing can be known.
            let expected = if (1..9).contains(&(bit / 8)) {
                Opened::Unknown
            } else {
                Opened::Forged
            };
            assert_eq!(
                keys.open(&to_text(&changed), b"anna"),
                expected,
                "bit={bit}"
            );
        }
        let mut chars = 0;
        for at in 0..text.len() {
            for c in 0..128u8 {
                let mut changed = text.clone().into_bytes();
                if changed[at] == c {
                    continue;
                }
                changed[at] = c;
                let changed = String::from_utf8(changed).unwrap();
                let opened = keys.open(&changed, b"anna");
                assert!(
                    matches!(opened, Opened::Forged | Opened::Unknown),
                    "at={at} c={c}"
                );
                chars += 1;
            }
        }
        assert_eq!(chars, TEXT_CHARS * 127);
    }

    #[test]
    fn a_text_that_is_longer_shorter_or_padded_is_none() {
        let keys = keys(3);
        let text = keys.seal(&BODY, b"");
        for len in 0..text.len() {
            assert_eq!(keys.open(&text[..len], b""), Opened::Forged);
        }
        for other in [
            format!("{text}A"),
            format!("{text}="),
            format!(" {text}"),
            format!("{text}\n"),
            text.replacen("it1", "it2", 1),
            text.replacen("it1", "IT1", 1),
            "\u{e9}".repeat(TEXT_CHARS / 2),
        ] {
            assert_eq!(keys.open(&other, b""), Opened::Forged, "{other}");
        }
    }

    #[test]
    fn another_namespace_store_secret_or_principal_is_told_apart() {
        let text = keys(3).seal(&BODY, b"anna");
        assert_eq!(keys(4).open(&text, b"anna"), Opened::Unknown);
        let store = TokenKeys::new(&[7; 16], *b"store-number-two", 3);
        assert_eq!(store.open(&text, b"anna"), Opened::Unknown);
        let secret = TokenKeys::new(&[8; 16], *b"store-number-one", 3);
        assert_eq!(secret.open(&text, b"anna"), Opened::Unknown);
        for bind in [&b""[..], b"ann", b"annA", b"anna "] {
            assert_eq!(keys(3).open(&text, bind), Opened::WrongBinding);
        }
        // Whoever is told the issuer, but has no secret, still makes no token.
        let mut thief = TokenKeys::new(&[8; 16], *b"store-number-one", 3);
        thief.issuer = keys(3).issuer;
        let made = thief.seal(&BODY, b"anna");
        assert_eq!(keys(3).open(&made, b"anna"), Opened::Forged);
    }

    #[test]
    fn all_bytes_have_a_text_of_their_own() {
        for start in 0..=255u8 {
            let bytes: Vec<u8> = (0..63).map(|n| start.wrapping_add(n)).collect();
            assert_eq!(from_text(&to_text(&bytes)), Some(bytes));
        }
    }
}
