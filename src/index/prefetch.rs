//! Asking the processor for a cache line before it is needed. Never changes an answer.
#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "there is no safe call for it")
)]

/// Starts to fetch the line of this element, if there is one.
#[inline]
pub(super) fn prefetch<T>(all: &[T], index: usize) {
    if let Some(one) = all.get(index) {
        prefetch_at(std::ptr::from_ref(one).addr());
    }
}

/// Starts to fetch the line at this address, whatever is there, if anything is.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
pub(super) fn prefetch_at(address: usize) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: the instruction reads and writes nothing that a program can see, and does not fault,
    // whatever the address; a page that is not mapped ends it without an effect.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::without_provenance(address)) };
}

/// Does nothing where there is no stable way.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
#[inline]
pub(super) fn prefetch_at(_address: usize) {}
