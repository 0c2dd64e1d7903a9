//! Records replayed and bytes read when a store opens: bounded, however many keys there are.

use idemlog::testing::sim::SimDisk;
use idemlog::{DedupLog, Durability, SEGMENT_BYTES_DEFAULT};

use super::{RECORD_BYTES, filter, observe_new, options};

const SEGMENT_BYTES: u32 = 256 * 1024;
/// The active segment, and at most one that is being sealed.
const REPLAYED_MAX: u64 = 2 * SEGMENT_BYTES as u64 / RECORD_BYTES;
/// The same two segments twice, once to find the end of the log and once to prove that it is on
/// the disk, and the footers of runs.
const READ_BYTES_MAX: u64 = 5 * SEGMENT_BYTES as u64;

const _: () = assert!(
    2 * SEGMENT_BYTES_DEFAULT <= 64 << 20,
    "no open replays more than 64 MiB of the log"
);

/// What an open costs.
#[derive(Debug)]
struct Reopened {
    replayed: u64,
    read_bytes: u64,
}

fn reopen(disk: &SimDisk) -> Reopened {
    let before = disk.counts().read_bytes;
    let log = open(disk);
    Reopened {
        replayed: log.open_report().replayed_count,
        read_bytes: disk.counts().read_bytes - before,
    }
}

fn open(disk: &SimDisk) -> DedupLog {
    let options = options(Durability::Process).segment_bytes(SEGMENT_BYTES);
    options.open_on(disk.dir()).unwrap()
}

/// From less than a segment to sixty, with upkeep up to the end and without its last part.
const KEYS: [u64; 4] = [7_000, 50_000, 200_000, 500_000];

#[test]
fn after_a_kill_only_the_newest_segments_are_replayed() {
    for keys in KEYS {
        for maintained in [true, false] {
            let disk = SimDisk::memory();
            let log = open(&disk);
            observe_new(&filter(&log), 0..keys);
            if maintained {
                log.maintain().unwrap();
            }
            let found = reopen(&disk.after_kill());
            println!("killed, keys={keys} maintained={maintained}: {found:?}");
            assert!(found.replayed <= REPLAYED_MAX, "{found:?}");
            assert!(found.read_bytes <= READ_BYTES_MAX, "{found:?}");
        }
    }
}

/// With fewer keys the segment is replayed faster than a hint is read.
const HINT_KEYS_MIN: u64 = 4096;

/// The close leaves a hint that reaches to the end of the log.
#[test]
fn after_a_clean_close_less_than_a_hint_is_worth_is_replayed() {
    for keys in KEYS {
        let disk = SimDisk::memory();
        let log = open(&disk);
        observe_new(&filter(&log), 0..keys);
        log.maintain().unwrap();
        log.close().unwrap();
        let found = reopen(&disk);
        println!("closed, keys={keys}: {found:?}");
        assert!(found.replayed < HINT_KEYS_MIN, "{found:?}");
        assert!(found.read_bytes <= READ_BYTES_MAX, "{found:?}");
    }
}
