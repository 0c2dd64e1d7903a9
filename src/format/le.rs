//! Checked little-endian reads and writes.

use super::Malformed;

/// Reads fields one after the other; every read is checked against what is left.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Reader(bytes)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn rest(&self) -> &'a [u8] {
        self.0
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (head, tail) = self
            .0
            .split_at_checked(len)
            .ok_or(Malformed("field cut short"))?;
        self.0 = tail;
        Ok(head)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, tail) = self
            .0
            .split_first_chunk::<N>()
            .ok_or(Malformed("field cut short"))?;
        self.0 = tail;
        Ok(*head)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Malformed> {
        self.array::<1>().map(|[b]| b)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads bytes that must be zero: reserved for later versions, checked in this one.
    pub(crate) fn zeros(&mut self, len: usize) -> Result<(), Malformed> {
        if self.bytes(len)?.iter().any(|b| *b != 0) {
            return Err(Malformed("reserved bytes are not zero"));
        }
        Ok(())
    }
}

/// Appends fields to a buffer.
pub(crate) trait Put {
    fn put(&mut self, bytes: &[u8]);

    fn put_u8(&mut self, value: u8) {
        self.put(&[value]);
    }

    fn put_u16(&mut self, value: u16) {
        self.put(&value.to_le_bytes());
    }

    fn put_u32(&mut self, value: u32) {
        self.put(&value.to_le_bytes());
    }

    fn put_u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }

    fn put_zeros(&mut self, len: usize);
}

impl Put for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }

    fn put_zeros(&mut self, len: usize) {
        self.resize(self.len() + len, 0);
    }
}

/// Fills zeros that were appended before, field after field: what is appended in one piece needs
/// no look at the buffer's room for each of them.
#[derive(Debug)]
pub(crate) struct Fields<'a>(&'a mut [u8]);

impl<'a> Fields<'a> {
    pub(crate) fn new(zeros: &'a mut [u8]) -> Self {
        Fields(zeros)
    }
}

impl Put for Fields<'_> {
    #[inline]
    fn put(&mut self, bytes: &[u8]) {
        let place = std::mem::take(&mut self.0);
        debug_assert!(place.len() >= bytes.len(), "field cut short");
        if let Some((place, rest)) = place.split_at_mut_checked(bytes.len()) {
            place.copy_from_slice(bytes);
            self.0 = rest;
        }
    }

    fn put_zeros(&mut self, len: usize) {
        let place = std::mem::take(&mut self.0);
        self.0 = place.get_mut(len..).unwrap_or_default();
    }
}

/// Overwrites the four bytes at `at`, which the caller has reserved.
pub(crate) fn set_u32(bytes: &mut [u8], at: usize, value: u32) {
    if let Some(place) = bytes.get_mut(at..).and_then(|b| b.first_chunk_mut::<4>()) {
        *place = value.to_le_bytes();
    }
}

/// Splits off a trailing CRC-32 and compares it with the bytes before it.
pub(crate) fn check_crc_at_end(bytes: &[u8]) -> Result<&[u8], Malformed> {
    let (body, crc) = bytes
        .split_last_chunk::<4>()
        .ok_or(Malformed("too short for a checksum"))?;
    if crc32fast::hash(body) != u32::from_le_bytes(*crc) {
        return Err(Malformed("checksum differs"));
    }
    Ok(body)
}

/// Appends the CRC-32 of everything in the buffer.
pub(crate) fn put_crc_at_end(bytes: &mut Vec<u8>) {
    let crc = crc32fast::hash(bytes);
    bytes.put_u32(crc);
}
