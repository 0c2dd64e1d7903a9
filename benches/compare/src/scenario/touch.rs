//! The floor under every look-up: one cache line from memory that no cache holds.

use std::hint::black_box;
use std::time::Instant;

use super::Bounds;
use crate::Fallible;
use crate::cell::Cell;
use crate::figures::Figures;
use crate::workload::mix;

const LINE_BYTES: usize = 64;
const TOUCHES: u64 = 4_000_000;

/// `keys` lines; each touch waits for the one before, as an index look-up waits for its page.
pub(crate) fn run(cell: &Cell, bounds: Bounds) -> Fallible<Figures> {
    let lines = usize::try_from(cell.keys)?;
    let memory: Vec<[u64; LINE_BYTES / 8]> =
        (0..cell.keys).map(|i| [mix(i); LINE_BYTES / 8]).collect();
    let touches = TOUCHES.min(bounds.ops_max);
    let began = Instant::now();
    let mut at = 1u64;
    for i in 0..touches {
        let index = usize::try_from(at % cell.keys)?;
        let [word, ..] = memory.get(index).copied().unwrap_or_default();
        at = mix(word ^ i);
    }
    black_box(at);
    let mut figures = Figures::default();
    figures.set(
        "touch_ns",
        began.elapsed().as_secs_f64() * 1e9 / touches.max(1) as f64,
    );
    figures.set(
        "touched_mib",
        (lines * LINE_BYTES) as f64 / f64::from(1 << 20),
    );
    Ok(figures)
}
