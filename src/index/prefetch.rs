//! Asking the processor for a cache line before it is needed. Never changes an answer.
#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "there is no safe call for it")
)]

/// Starts to fetch the line of this element, if there is one.
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) fn prefetch<T>(all: &[T], index: usize) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    if let Some(one) = all.get(index) {
        // SAFETY: the instruction reads and writes nothing that a program can see, and does not
        // fault, whatever the address; this one is that of a reference, so it is valid anyway.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(one).cast()) };
    }
}

/// Does nothing where there is no stable way.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(super) fn prefetch<T>(_all: &[T], _index: usize) {}
