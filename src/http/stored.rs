//! Which outcome bytes stand for a response, and back?

use ::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use bytes::Bytes;

use super::body::HttpBody;

/// The first byte of the only layout there is.
const LAYOUT: u8 = 1;
const FLAG_BODY: u8 = 1;

/// A response as an outcome of [`IdempotencyLayer`](crate::IdempotencyLayer).
///
/// The layer makes these itself. Probes and whoever resolves a key make them, too, to say what
/// the client is to be answered when the effect turns out to have happened:
/// `Probed::Applied(StoredResponse::new(201, "").into_bytes())`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct StoredResponse {
    status: u16,
    headers: Vec<(Vec<u8>, Vec<u8>)>,
    /// `None`: the response had a body that was not kept.
    body: Option<Bytes>,
}

impl StoredResponse {
    /// Makes a response of a status and a body.
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        StoredResponse {
            status,
            headers: Vec::new(),
            body: Some(Bytes::from(body.into())),
        }
    }

    /// Adds a header.
    pub fn header(mut self, name: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Self {
        let (name, value) = (name.as_ref().to_vec(), value.as_ref().to_vec());
        self.headers.push((name, value));
        self
    }

    /// Returns the outcome bytes.
    pub fn into_bytes(self) -> Vec<u8> {
        let flags = if self.body.is_some() { FLAG_BODY } else { 0 };
        let mut bytes = vec![LAYOUT, flags];
        bytes.extend(self.status.to_le_bytes());
        // More headers, or longer ones, than the length fields can say are over every outcome
        // limit: cut here, and refused with `Invalid` when it is committed.
        push_len(&mut bytes, self.headers.len());
        for (name, value) in &self.headers {
            push_len(&mut bytes, name.len());
            bytes.extend(name);
            push_len(&mut bytes, value.len());
            bytes.extend(value);
        }
        bytes.extend(self.body.unwrap_or_default());
        bytes
    }

    pub(super) fn of(status: StatusCode, headers: &HeaderMap, kept: &[HeaderName]) -> Self {
        let pairs = kept.iter().flat_map(|name| {
            let values = headers.get_all(name).iter();
            values.map(move |value| (name.as_str().as_bytes().to_vec(), value.as_bytes().to_vec()))
        });
        StoredResponse {
            status: status.as_u16(),
            headers: pairs.collect(),
            body: None,
        }
    }

    pub(super) fn with_body(self, body: Bytes) -> Self {
        StoredResponse {
            body: Some(body),
            ..self
        }
    }

    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        let [layout, flags] = *take(&mut rest, 2)? else {
            return None;
        };
        if layout != LAYOUT || flags & !FLAG_BODY != 0 {
            return None;
        }
        let status = take_u16(&mut rest)?;
        let mut headers = Vec::new();
        for _ in 0..take_u32(&mut rest)? {
            let name = take_sized(&mut rest)?;
            headers.push((name, take_sized(&mut rest)?));
        }
        let body = match (flags & FLAG_BODY, rest) {
            (FLAG_BODY, body) => Some(Bytes::copy_from_slice(body)),
            (_, []) => None,
            _ => return None,
        };
        Some(StoredResponse {
            status,
            headers,
            body,
        })
    }

    pub(super) fn status(&self) -> u16 {
        self.status
    }

    /// Makes the response again; `None` if its body was not kept, or if it never was a response.
    pub(super) fn response(self) -> Option<Response<HttpBody>> {
        let mut response = Response::new(HttpBody::whole(self.body?, None));
        *response.status_mut() = StatusCode::from_u16(self.status).ok()?;
        for (name, value) in &self.headers {
            let name = HeaderName::from_bytes(name).ok()?;
            let value = HeaderValue::from_bytes(value).ok()?;
            response.headers_mut().append(name, value);
        }
        Some(response)
    }
}

fn push_len(bytes: &mut Vec<u8>, len: usize) {
    bytes.extend(u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes());
}

fn take<'a>(rest: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (taken, left) = rest.split_at_checked(len)?;
    *rest = left;
    Some(taken)
}

fn take_u16(rest: &mut &[u8]) -> Option<u16> {
    Some(u16::from_le_bytes(take(rest, 2)?.try_into().ok()?))
}

fn take_u32(rest: &mut &[u8]) -> Option<u32> {
    Some(u32::from_le_bytes(take(rest, 4)?.try_into().ok()?))
}

fn take_sized(rest: &mut &[u8]) -> Option<Vec<u8>> {
    let len = usize::try_from(take_u32(rest)?).ok()?;
    Some(take(rest, len)?.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// These bytes are in stores: they never change.
    #[test]
    fn the_bytes_are_what_the_page_says() {
        let stored = StoredResponse::new(201, "hi").header("etag", "x");
        let bytes = stored.clone().into_bytes();
        let golden = b"\x01\x01\xc9\0\x01\0\0\0\x04\0\0\0etag\x01\0\0\0xhi";
        assert_eq!(bytes, golden);
        assert_eq!(StoredResponse::parse(&bytes), Some(stored));

        let headless = StoredResponse::of(StatusCode::OK, &HeaderMap::new(), &[]);
        let bytes = headless.clone().into_bytes();
        assert_eq!(bytes, b"\x01\0\xc8\0\0\0\0\0");
        assert_eq!(StoredResponse::parse(&bytes), Some(headless));
    }

    #[test]
    fn cut_or_foreign_bytes_are_no_response() {
        let bytes = StoredResponse::new(201, "")
            .header("etag", "x")
            .into_bytes();
        for len in 0..bytes.len() {
            assert_eq!(StoredResponse::parse(&bytes[..len]), None, "{len}");
        }
        for foreign in [
            &b"done"[..],
            b"\x02\x01\xc9\0\0\0\0\0",
            b"\x01\x03\xc9\0\0\0\0\0",
        ] {
            assert_eq!(StoredResponse::parse(foreign), None);
        }
        assert_eq!(StoredResponse::parse(b"\x01\0\xc8\0\0\0\0\0x"), None);
        let huge = b"\x01\x01\xc9\0\xff\xff\xff\xff";
        assert_eq!(StoredResponse::parse(huge), None);
        let no_status = StoredResponse::new(7, "").into_bytes();
        assert!(
            StoredResponse::parse(&no_status)
                .unwrap()
                .response()
                .is_none()
        );
    }
}
