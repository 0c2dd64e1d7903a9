//! All tests that use the crate as its users do, in one binary.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::too_many_lines,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::disallowed_methods,
    clippy::missing_panics_doc,
    missing_docs,
    unreachable_pub,
    reason = "a test that fails panics, prints its seed, and documents itself by its name"
)]


#[cfg(feature = "cli")]
mod cli;
mod kill;
