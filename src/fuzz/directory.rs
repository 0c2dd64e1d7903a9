//! Directories that the target `recovery` starts from, and checksums for what it has changed.
//!
//! All of them are made from the committed store of `tests/data`, so that an input means the same
//! in every process: a fresh store would draw another identity and other nonces each time.

use std::sync::{Arc, OnceLock};

use super::{START_MS, must};
use crate::clock::ManualClock;
use crate::format::filter::FILTER_HEADER_BYTES;
use crate::format::le::{put_crc_at_end, set_u32};
use crate::format::manifest::Manifest;
use crate::format::names::FileName;
use crate::format::record::{HEADER_BYTES, Kind, claimed_bytes, seed};
use crate::format::run::{PAGE_BYTES, RunHeader, checksum, header_crc, run_seed};
use crate::format::segment::{SEGMENT_HEADER_BYTES, SegmentHeader};
use crate::format::{to_u32, to_usize};
use crate::vfs::sim::{PowerCut, SimDisk};
use crate::{
    Commit, DedupLog, Durability, Expected, Internal, Namespace, NamespaceOptions, ObserveOptions,
    Options, Retention, WatermarkOptions, ZeroFill,
};

macro_rules! committed {
    ($($name:literal),+ $(,)?) => {
        [$(($name, include_bytes!(concat!("../../tests/data/v1/", $name)).as_slice())),+]
    };
}

/// Segments with every kind of record, with runs and unsettled records, closed cleanly.
const COMMITTED: [(&str, &[u8]); 12] = committed![
    "MANIFEST",
    "run-000000000001-000000000001-0.flt",
    "run-000000000001-000000000001-0.idx",
    "run-000000000002-000000000002-0.flt",
    "run-000000000002-000000000002-0.idx",
    "run-000000000003-000000000003-0.flt",
    "run-000000000003-000000000003-0.idx",
    "seg-000000000001.log",
    "seg-000000000002.log",
    "seg-000000000003.log",
    "seg-000000000004.log",
    "seg-000000000005.log",
];

pub(super) fn options(clock: &Arc<ManualClock>) -> Options {
    Options::new()
        .segment_bytes(8192)
        .background(false)
        .zero_fill(ZeroFill::Never)
        .clock(Arc::clone(clock) as _)
}

pub(super) fn kept() -> NamespaceOptions {
    NamespaceOptions::new()
        .outcome_bytes_max(512)
        .retention(Retention::Forever)
}

/// How many directories there are to start from.
pub(super) const STARTS: u8 = 6;

/// Nothing, a store that was closed, and what kills and a power cut have left of it.
pub(super) fn start(number: u8) -> SimDisk {
    static ALL: OnceLock<Vec<SimDisk>> = OnceLock::new();
    let all = ALL.get_or_init(|| {
        let closed = committed();
        let killed = grown(&closed, 30, false);
        let rolled = grown(&closed, 200, false);
        let merged = grown(&closed, 200, true);
        let cut = killed.after_power_cut(&mut PowerCut::seeded(1));
        vec![SimDisk::memory(), closed, killed, rolled, merged, cut]
    });
    all.get(usize::from(number))
        .map_or_else(SimDisk::memory, SimDisk::after_kill)
}

fn committed() -> SimDisk {
    let disk = SimDisk::new();
    for (name, bytes) in COMMITTED {
        disk.write_file(name, bytes);
    }
    disk
}

/// The store after so many more keys, and a kill.
fn grown(from: &SimDisk, keys: u32, maintained: bool) -> SimDisk {
    let disk = from.after_kill();
    let clock = Arc::new(ManualClock::new(START_MS));
    let log: DedupLog = must(options(&clock).open_on(disk.dir()));
    attach(&log);
    let seen = must(log.filter("seen", kept()));
    let quickly = ObserveOptions::new().durability(Durability::Process);
    for n in 0..keys {
        // Some with a flush: marks in the log prove how far it was durable.
        let observed = if n % 8 == 0 {
            seen.observe(format!("more-{n}"))
        } else {
            seen.observe_with(format!("more-{n}"), &quickly)
        };
        assert!(must(observed).is_new());
    }
    if maintained {
        must(log.maintain());
    }
    disk.after_kill()
}

/// A commit with everything that can be attached to it, and an entry put aside.
fn attach(log: &DedupLog) {
    let orders: Namespace<Internal> = must(log.namespace("orders", kept()));
    let cells = must(log.cells("cells", kept()));
    let marks = must(log.watermarks("marks", WatermarkOptions::sparse(8)));
    let outbox = must(log.outbox("outbox", kept()));
    let commit = Commit::new("outcome")
        .put(&cells, "a", Expected::Anything, "1")
        .put(&cells, "b", Expected::Anything, "2")
        .advance(&marks, "source", 0)
        .advance(&marks, "source", 2)
        .publish_ordered(&outbox, "order", "queued")
        .publish(&outbox, "parked");
    if let Some(mut claim) = must(orders.claim("order")).claim() {
        let _committed = must(claim.commit_with(commit));
    }
    for entry in must(outbox.lease(9)) {
        if entry.payload == b"parked" {
            must(outbox.park(&entry, b"why"));
        }
    }
}

/// Makes every checksum right that a patch has made wrong, so that what lies behind the checksums
/// is reached: no checksum keeps out who can write files.
pub(super) fn make_checksums_right(disk: &SimDisk) {
    let read = |name: &FileName| disk.read_file(&name.to_string());
    let write = |name: &FileName, bytes: Vec<u8>| disk.write_file(&name.to_string(), bytes);
    let names = disk.file_names();
    let names: Vec<FileName> = names.iter().filter_map(|n| FileName::parse(n)).collect();
    for name in &names {
        let Some(mut bytes) = read(name) else {
            continue;
        };
        match name {
            FileName::Segment(_) => right_segment(&mut bytes),
            FileName::Run { .. } => right_run(&mut bytes),
            FileName::Hint(_) => right_end(&mut bytes),
            _ => continue,
        }
        write(name, bytes);
    }
    for name in &names {
        // A filter's checksums depend on its run's.
        if let FileName::Filter { lo, hi, generation } = *name
            && let Some(mut filter) = read(name)
            && let Some(run) = read(&FileName::Run { lo, hi, generation })
        {
            right_filter(&mut filter, &run);
            write(name, filter);
        }
    }
    if let Some(mut manifest) = read(&FileName::Manifest) {
        right_end(&mut manifest);
        if let Ok(mut decoded) = Manifest::decode(&manifest) {
            for entry in &mut decoded.segments {
                if let Some(sealed) = &mut entry.sealed
                    && let Some(bytes) = read(&FileName::Segment(entry.id))
                {
                    let whole = bytes.get(..to_usize(sealed.end)).unwrap_or_default();
                    sealed.crc = crc32fast::hash(whole);
                }
            }
            manifest = decoded.encode();
        }
        write(&FileName::Manifest, manifest);
    }
}

fn right_end(bytes: &mut Vec<u8>) {
    bytes.truncate(bytes.len().saturating_sub(4));
    put_crc_at_end(bytes);
}

/// The header and the frames behind it, as far as their lengths lead.
fn right_segment(bytes: &mut [u8]) {
    let Some(head) = bytes.get(..SEGMENT_HEADER_BYTES) else {
        return;
    };
    let mut head = head.to_vec();
    right_end(&mut head);
    if let Some(place) = bytes.get_mut(..SEGMENT_HEADER_BYTES) {
        place.copy_from_slice(&head);
    }
    let Ok(header) = SegmentHeader::decode(&head) else {
        return;
    };
    let mut at = SEGMENT_HEADER_BYTES;
    while at < bytes.len() {
        let len = right_frame(bytes, at, header.nonce);
        if len == 0 {
            return;
        }
        at += len;
    }
}

/// One frame and, of a group, those in it first; returns its length, or 0 if none can start here.
pub(super) fn right_frame(bytes: &mut [u8], at: usize, nonce: u32) -> usize {
    let rest = bytes.get(at..).unwrap_or_default();
    let Some(len) = claimed_bytes(rest).filter(|len| *len <= rest.len()) else {
        return 0;
    };
    if rest.get(6) == Some(&(Kind::Group as u8)) {
        let mut inner = at + HEADER_BYTES;
        while inner < at + len {
            match right_frame(bytes, inner, nonce) {
                0 => break,
                inner_len => inner += inner_len,
            }
        }
    }
    let body = bytes.get(at + 4..at + len).unwrap_or_default();
    let crc = checksum(seed(nonce, to_u32(at)), body);
    set_u32(bytes, at, crc);
    len
}

/// The header page and all pages behind it.
pub(super) fn right_run(bytes: &mut [u8]) {
    let Some((head, pages)) = bytes.split_at_mut_checked(PAGE_BYTES) else {
        return;
    };
    let mut fixed = head.to_vec();
    right_end(&mut fixed);
    head.copy_from_slice(&fixed);
    let whole = [fixed.as_slice(), pages].concat();
    let Ok(header) = RunHeader::decode(&whole) else {
        return;
    };
    let seed = run_seed(header.store, header.lo, header.hi, header.generation);
    for page in pages.chunks_exact_mut(PAGE_BYTES) {
        let crc = checksum(seed, page.get(4..).unwrap_or_default());
        set_u32(page, 0, crc);
    }
}

/// The header and the blocks of a filter; the header is made to belong to the run.
pub(super) fn right_filter(filter: &mut [u8], run: &[u8]) {
    let Ok(header) = RunHeader::decode(run) else {
        return;
    };
    let Some((head, blocks)) = filter.split_at_mut_checked(FILTER_HEADER_BYTES) else {
        return;
    };
    let seed = run_seed(header.store, header.lo, header.hi, header.generation);
    let mut fixed = head.to_vec();
    set_u32(&mut fixed, 12, header.generation);
    if let Some(place) = fixed.get_mut(16..32) {
        place.copy_from_slice(&header.store);
    }
    if let Some(place) = fixed.get_mut(32..48) {
        let numbers = [header.hash_key_id, header.hashes_count].map(u64::to_le_bytes);
        place.copy_from_slice(numbers.as_flattened());
    }
    set_u32(&mut fixed, 52, checksum(seed, blocks));
    set_u32(&mut fixed, 56, header_crc(run));
    right_end(&mut fixed);
    head.copy_from_slice(&fixed);
}
