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
    clippy::result_large_err,
    clippy::too_many_arguments,
    clippy::type_complexity,
    missing_docs,
    unreachable_pub,
    reason = "a test that fails panics, prints its seed, and documents itself by its name"
)]

#[cfg(feature = "testing")]
mod support;

#[cfg(feature = "testing")]
mod ack_gate;
#[cfg(feature = "testing")]
mod api;
#[cfg(feature = "testing")]
mod attached;
#[cfg(feature = "testing")]
mod cases;
#[cfg(feature = "cli")]
mod cli;
#[cfg(feature = "testing")]
mod clock;
#[cfg(feature = "testing")]
mod concurrent;
#[cfg(feature = "testing")]
mod corpus;
#[cfg(feature = "testing")]
mod crash;
#[cfg(feature = "testing")]
mod damage;
#[cfg(feature = "testing")]
mod future;
#[cfg(feature = "testing")]
mod golden;
#[cfg(feature = "testing")]
mod intake;
mod key_time;
#[cfg(feature = "testing")]
mod keys;
mod kill;
#[cfg(feature = "testing")]
mod lock;
#[cfg(feature = "testing")]
mod model;
#[cfg(feature = "testing")]
mod order;
#[cfg(feature = "testing")]
mod processes;
#[cfg(feature = "testing")]
mod reader;
#[cfg(feature = "testing")]
mod repair;
#[cfg(feature = "testing")]
mod rings;
#[cfg(feature = "testing")]
mod shared;
mod tidy;
#[cfg(all(feature = "testing", feature = "token"))]
mod token;
#[cfg(all(feature = "testing", feature = "tower"))]
mod tower;
#[cfg(feature = "testing")]
mod wait;
