//! Which key does a request name in its `Idempotency-Key` header?

use ::http::{HeaderMap, HeaderName};

/// The header that carries a request's key.
pub(super) const KEY_HEADER: HeaderName = HeaderName::from_static("idempotency-key");

/// Why a request has no usable key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoKey {
    Missing,
    /// What is wrong with it.
    Malformed(&'static str),
}

/// Returns the key of a request: the text of the structured-field string, or the bare word.
pub(super) fn key_of(headers: &HeaderMap, bytes_max: usize) -> Result<String, NoKey> {
    let mut values = headers.get_all(KEY_HEADER).iter();
    let value = values.next().ok_or(NoKey::Missing)?;
    if values.next().is_some() {
        return Err(NoKey::Malformed("the header is there more than once"));
    }
    let text = value.as_bytes().trim_ascii();
    let key = match text.strip_prefix(b"\"") {
        Some(quoted) => unquote(quoted)?,
        None => bare(text)?,
    };
    if key.is_empty() {
        return Err(NoKey::Malformed("the key is empty"));
    }
    if key.len() > bytes_max {
        return Err(NoKey::Malformed("the key is too long"));
    }
    Ok(key)
}

/// Reads what follows the opening quote of a structured-field string.
fn unquote(quoted: &[u8]) -> Result<String, NoKey> {
    let mut key = String::with_capacity(quoted.len());
    let mut bytes = quoted.iter().copied();
    loop {
        match bytes.next() {
            None => return Err(NoKey::Malformed("the closing quote is missing")),
            Some(b'"') => break,
            Some(b'\\') => match bytes.next() {
                Some(escaped @ (b'"' | b'\\')) => key.push(char::from(escaped)),
                _ => return Err(NoKey::Malformed("only a quote or a backslash is escaped")),
            },
            Some(byte @ b' '..=b'~') => key.push(char::from(byte)),
            Some(_) => return Err(NoKey::Malformed("the key is not printable ASCII")),
        }
    }
    if bytes.next().is_some() {
        return Err(NoKey::Malformed("something follows the closing quote"));
    }
    Ok(key)
}

/// Reads a key that came without quotes. What would separate items or parameters is refused: such
/// a text is a list, or half of something, and not one key.
fn bare(text: &[u8]) -> Result<String, NoKey> {
    let is_fine = |byte: &u8| byte.is_ascii_graphic() && !b"\",;\\".contains(byte);
    if !text.iter().all(is_fine) {
        return Err(NoKey::Malformed("a key of such characters must be quoted"));
    }
    Ok(text.iter().copied().map(char::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::http::HeaderValue;

    fn parse(value: &[u8]) -> Result<String, NoKey> {
        let mut headers = HeaderMap::new();
        headers.insert(KEY_HEADER, HeaderValue::from_bytes(value).unwrap());
        key_of(&headers, 8)
    }

    #[test]
    fn quoted_and_bare_keys_are_the_same_text() {
        for value in [&b"abc-1"[..], b"\"abc-1\"", b"  \"abc-1\" ", b" abc-1 "] {
            assert_eq!(parse(value).as_deref(), Ok("abc-1"));
        }
        assert_eq!(parse(br#""a\"b\\ c""#).as_deref(), Ok("a\"b\\ c"));
        assert_eq!(parse(b"\"a,b;c\"").as_deref(), Ok("a,b;c"));
        assert_eq!(parse(b"12345678").as_deref(), Ok("12345678"));
    }

    #[test]
    fn everything_else_is_malformed() {
        let wrong: [&[u8]; 13] = [
            b"",
            b"\"\"",
            b"\"",
            b"\"abc",
            b"\"a\\x\"",
            b"\"a\\",
            b"\"a\";p=1",
            b"\"a\", \"b\"",
            b"a,b",
            b"a b",
            b"123456789",
            b"\"\xc3\xa4\"",
            b"\xc3\xa4",
        ];
        for value in wrong {
            assert!(
                matches!(parse(value), Err(NoKey::Malformed(_))),
                "{value:?}"
            );
        }
        assert_eq!(key_of(&HeaderMap::new(), 8), Err(NoKey::Missing));
        let mut twice = HeaderMap::new();
        for _ in 0..2 {
            twice.append(KEY_HEADER, HeaderValue::from_static("same"));
        }
        assert!(matches!(key_of(&twice, 8), Err(NoKey::Malformed(_))));
    }
}
