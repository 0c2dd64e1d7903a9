//! Memory of a large table: the system gives it in pages, and has it back when the table goes. An
//! allocator keeps what it was given back for the next request of about that size, and a store
//! would hold the memory of tables that it dropped long ago.

use std::fmt;

use memmap2::MmapMut;

/// Smaller tables are the allocator's. No large page would fit into them, either.
const MAPPED_BYTES_MIN: usize = 2 << 20;
const WORD_BYTES: usize = 8;

/// One word, as the processor reads and writes it where it is little-endian.
pub(crate) type Word = [u8; WORD_BYTES];

/// So many words, zero at first.
pub(crate) struct Words(Source);

enum Source {
    Mapped(MmapMut),
    Owned(Vec<Word>),
}

impl Words {
    pub(crate) fn zeroed(count: usize) -> Words {
        Words(match mapped(count * WORD_BYTES) {
            Some(map) => Source::Mapped(map),
            None => Source::Owned(vec![[0; WORD_BYTES]; count]),
        })
    }

    #[inline]
    pub(crate) fn all(&self) -> &[Word] {
        match &self.0 {
            Source::Mapped(map) => map.as_chunks().0,
            Source::Owned(words) => words,
        }
    }

    #[inline]
    pub(crate) fn all_mut(&mut self) -> &mut [Word] {
        match &mut self.0 {
            Source::Mapped(map) => map.as_chunks_mut().0,
            Source::Owned(words) => words,
        }
    }
}

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Words")
            .field("count", &self.all().len())
            .finish_non_exhaustive()
    }
}

/// Maps so many bytes of a large table, and asks for large pages: a place in it then costs one
/// miss, not two. `None`: the allocator is asked instead.
#[cfg(all(target_os = "linux", not(miri)))]
fn mapped(bytes: usize) -> Option<MmapMut> {
    if bytes < MAPPED_BYTES_MIN {
        return None;
    }
    let map = MmapMut::map_anon(bytes).ok()?;
    // Only a hint: failures are of no consequence.
    map.advise(memmap2::Advice::HugePage).unwrap_or_default();
    Some(map)
}

#[cfg(not(all(target_os = "linux", not(miri))))]
fn mapped(_bytes: usize) -> Option<MmapMut> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_tables_are_zero_at_first_and_keep_what_is_written() {
        for count in [0, 1, 1000, MAPPED_BYTES_MIN / WORD_BYTES, 300_001] {
            let mut words = Words::zeroed(count);
            assert_eq!(words.all().len(), count);
            assert!(words.all().iter().all(|word| *word == [0; WORD_BYTES]));
            for (index, word) in words.all_mut().iter_mut().enumerate() {
                *word = (index as u64).to_le_bytes();
            }
            let read = words.all().iter().map(|word| u64::from_le_bytes(*word));
            assert!(read.eq(0..count as u64));
        }
    }

    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn a_large_table_is_not_the_allocators() {
        let is_mapped = |count| matches!(Words::zeroed(count).0, Source::Mapped(_));
        assert!(is_mapped(MAPPED_BYTES_MIN / WORD_BYTES));
        assert!(!is_mapped(MAPPED_BYTES_MIN / WORD_BYTES - 1));
    }
}
