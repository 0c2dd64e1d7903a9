//! Is this still the process that opened the store? Asked before every write, so without a call
//! of the system: a page that the kernel empties in a forked child.

use std::fmt;

use memmap2::MmapMut;

const PAGE_BYTES: usize = 4096;

/// Knows the process that made it.
pub(crate) struct ForkGuard {
    /// Holds a 1 here and zeros in a child; `None` where the system cannot do that.
    page: Option<MmapMut>,
    pid: u32,
}

impl ForkGuard {
    pub(crate) fn new() -> Self {
        ForkGuard {
            page: wiped_on_fork(),
            pid: std::process::id(),
        }
    }

    /// Says whether the caller is the process that made this, and not a fork of it.
    #[inline]
    pub(crate) fn is_at_home(&self) -> bool {
        match &self.page {
            Some(page) => page.first() == Some(&1),
            None => std::process::id() == self.pid,
        }
    }
}

impl fmt::Debug for ForkGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForkGuard")
            .field("pid", &self.pid)
            .finish_non_exhaustive()
    }
}

#[cfg(all(target_os = "linux", not(miri)))]
#[expect(unsafe_code, reason = "advice that changes what is in the page")]
fn wiped_on_fork() -> Option<MmapMut> {
    use rustix::mm::{Advice, madvise};
    let mut page = MmapMut::map_anon(PAGE_BYTES).ok()?;
    // SAFETY: the range is that of a private anonymous map that is ours alone. The advice changes
    // its bytes in a child only, at the moment of the fork, when the child has no thread that
    // could be reading them: to the child it is as if they had been zero all along.
    unsafe {
        madvise(
            page.as_mut_ptr().cast(),
            page.len(),
            Advice::LinuxWipeOnFork,
        )
    }
    .ok()?;
    *page.first_mut()? = 1;
    Some(page)
}

#[cfg(not(all(target_os = "linux", not(miri))))]
fn wiped_on_fork() -> Option<MmapMut> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_opener_is_at_home_with_and_without_the_page() {
        assert!(ForkGuard::new().is_at_home());
        let pid = std::process::id();
        assert!(ForkGuard { page: None, pid }.is_at_home());
        let other = ForkGuard {
            page: None,
            pid: pid + 1,
        };
        assert!(!other.is_at_home());
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    #[expect(unsafe_code, reason = "there is no safe way to fork")]
    #[test]
    fn a_forked_child_is_not_at_home() {
        unsafe extern "C" {
            fn fork() -> i32;
            fn _exit(code: i32) -> !;
            fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
        }
        let guard = ForkGuard::new();
        assert!(guard.page.is_some());
        // SAFETY: the child of a program with threads may call only what is safe in a signal
        // handler: it reads one byte and calls `_exit`.
        let child = unsafe { fork() };
        assert!(child >= 0);
        if child == 0 {
            let code = if guard.is_at_home() { 3 } else { 7 };
            // SAFETY: ends the child at once, without destructors.
            unsafe { _exit(code) };
        }
        let mut status = 0;
        // SAFETY: `status` is valid for the write, and the child is ours and not waited for yet.
        assert_eq!(unsafe { waitpid(child, &raw mut status, 0) }, child);
        assert_eq!((status >> 8) & 0xff, 7, "status={status}");
        assert!(guard.is_at_home());
    }
}
