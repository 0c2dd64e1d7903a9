//! What several test modules share.

pub mod crew;
pub mod desk;
pub mod gate;
pub mod oracle;
pub mod rigged;

/// Returns a number from the environment, or the default.
pub fn env_u64(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}
