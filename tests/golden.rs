//! The bytes on disk: `docs/format.md` against a decoder written from its tables alone, and a
//! store written by format 1 that must open and answer for ever.
//!
//! `IDEMLOG_WRITE_GOLDEN=1` makes `the_committed_store_opens_and_answers_as_recorded` write the
//! store first; do that only together with a new format number and a new directory.

/// Decodes what `docs/format.md` describes, without any code of the crate.
pub(crate) mod bytes {
    /// CRC-32 (IEEE 802.3, reflected, polynomial 0xEDB88320) continued from `start`.
    pub(crate) fn crc32(start: u32, bytes: &[u8]) -> u32 {
        let mut crc = !start;
        for byte in bytes {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = if crc & 1 == 1 {
                    crc >> 1 ^ 0xedb8_8320
                } else {
                    crc >> 1
                };
            }
        }
        !crc
    }

    /// The checksum's seed of a frame at `offset` of a segment with this nonce.
    pub(crate) fn seed(nonce: u32, offset: usize) -> u32 {
        let words = u32::try_from(offset / 8).unwrap();
        nonce.wrapping_add(words.wrapping_mul(0x9e37_79b1))
    }

    pub(crate) fn number(bytes: &[u8], at: usize, width: usize) -> u64 {
        bytes[at..at + width]
            .iter()
            .rev()
            .fold(0, |sum, b| sum << 8 | u64::from(*b))
    }

    pub(crate) fn u16_at(bytes: &[u8], at: usize) -> usize {
        usize::try_from(number(bytes, at, 2)).unwrap()
    }

    pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::try_from(number(bytes, at, 4)).unwrap()
    }

    pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
        number(bytes, at, 8)
    }

    /// Puts a number of `width` bytes.
    pub(crate) fn put(bytes: &mut [u8], at: usize, width: usize, value: u64) {
        bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
    }

    /// Computes the checksum of the frame at `offset` anew.
    pub(crate) fn fix_frame(segment: &mut [u8], offset: usize, frame_bytes: usize) {
        let nonce = u32_at(segment, 12);
        let end = segment.len().min(offset + frame_bytes);
        let crc = crc32(seed(nonce, offset), &segment[offset + 4..end]);
        put(segment, offset, 4, u64::from(crc));
    }

    /// Computes anew the checksum that ends a manifest or a header.
    pub(crate) fn fix_end(bytes: &mut [u8]) {
        let at = bytes.len() - 4;
        let crc = crc32(0, &bytes[..at]);
        put(bytes, at, 4, u64::from(crc));
    }

    /// One frame of a segment, by the table "Frame".
    #[derive(Clone, Debug)]
    pub(crate) struct Frame {
        pub(crate) offset: usize,
        pub(crate) kind: u8,
        pub(crate) bytes: Vec<u8>,
    }

    /// What a record says, by the tables "Frame", "State header" and "Parts".
    #[derive(Clone, Debug, Default, PartialEq, Eq)]
    pub(crate) struct Record {
        pub(crate) kind: u8,
        pub(crate) expires_at_s: u32,
        pub(crate) namespace: usize,
        pub(crate) flags: usize,
        pub(crate) state: Option<Vec<u8>>,
        pub(crate) key: Vec<u8>,
        pub(crate) parts: Vec<(usize, Vec<u8>)>,
    }

    /// Splits a segment into its frames, up to the first that is not valid.
    pub(crate) fn frames(segment: &[u8]) -> Vec<Frame> {
        let nonce = u32_at(segment, 12);
        let mut frames = Vec::new();
        let mut offset = 64;
        while offset + 16 <= segment.len() {
            let len = u16_at(segment, offset + 4) * 8;
            let kind = segment[offset + 6];
            if len < 16 || offset + len > segment.len() {
                break;
            }
            let bytes = segment[offset..offset + len].to_vec();
            if u32_at(&bytes, 0) != crc32(seed(nonce, offset), &bytes[4..]) {
                break;
            }
            frames.push(Frame {
                offset,
                kind,
                bytes,
            });
            offset += len;
            if kind == 18 {
                break;
            }
        }
        frames
    }

    impl Frame {
        /// Decodes a frame about a key.
        pub(crate) fn record(&self) -> Record {
            let b = &self.bytes;
            let flags = u16_at(b, 14);
            let mut record = Record {
                kind: self.kind,
                expires_at_s: u32_at(b, 8),
                namespace: u16_at(b, 12),
                flags: flags & !7,
                ..Record::default()
            };
            let mut at = 16;
            if self.kind >= 3 {
                record.state = Some(b[16..80].to_vec());
                at = 80;
            }
            let mut key_len = usize::from(b[7]);
            if key_len == 255 {
                key_len = u16_at(b, at);
                at += 2;
            }
            record.key = b[at..at + key_len].to_vec();
            at += key_len;
            let end = b.len() - (flags & 7);
            while at < end {
                let len = usize::try_from(u32_at(b, at + 4)).unwrap();
                assert_eq!(u16_at(b, at + 2), 0);
                record
                    .parts
                    .push((u16_at(b, at), b[at + 8..at + 8 + len].to_vec()));
                at += 8 + len;
            }
            assert_eq!(at, end);
            assert!(b[end..].iter().all(|b| *b == 0));
            record
        }
    }
}

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use idemlog::testing::ManualClock;
use idemlog::{
    ClaimOptions, ClaimVerdict, Commit, DedupLog, Failure, Fingerprint, KeyState, NamespaceOptions,
    NonRepeatable, Options, Outcome, Probeable, Repeatable, Retention, Ticket,
};

use self::bytes::{u16_at, u32_at, u64_at};

const START_MS: u64 = 1_700_000_000_000;
const DETACHED: &str = "detached";

fn committed() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/v1")
}

fn open(path: &Path) -> DedupLog {
    let options = Options::new()
        .segment_bytes(8192)
        .background(false)
        .create(true);
    options
        .clock(Arc::new(ManualClock::new(START_MS)))
        .open(path)
        .unwrap()
}

fn kept() -> NamespaceOptions {
    NamespaceOptions::new()
        .outcome_bytes_max(512)
        .retention(Retention::Forever)
}

/// Writes the store that is committed: every kind of record, sealed segments and an active one.
fn write_store(path: &Path) {
    let log = open(path);
    let seen = log.filter("seen", kept()).unwrap();
    let short = log
        .filter("short", kept().retention(Duration::from_secs(100)))
        .unwrap();
    let jobs = log
        .namespace::<Repeatable>("jobs", kept().attempts_max(2))
        .unwrap();
    let pays = log.namespace::<NonRepeatable>("pays", kept()).unwrap();
    let asks = log.namespace::<Probeable>("asks", kept()).unwrap();
    let print = ClaimOptions::new().fingerprint(Fingerprint::of(b"payload"));
    let claim = |key: &str| jobs.claim_with(key, &print).unwrap().claim().unwrap();
    let _done = claim("done").commit(b"outcome").unwrap();
    let _dropped = claim("dropped")
        .commit_with(Commit::without_outcome())
        .unwrap();
    let later = Failure::retryable(Duration::from_secs(3600), "later");
    let _failed = claim("failed").fail(later).unwrap();
    let _rejected = claim("rejected").fail(Failure::permanent("never")).unwrap();
    for _ in 0..2 {
        let _dead = claim("dead")
            .fail(Failure::retryable(Duration::ZERO, "gone"))
            .unwrap();
    }
    let started = pays
        .claim("doubt")
        .unwrap()
        .claim()
        .unwrap()
        .start(b"sent")
        .unwrap();
    let _doubt = started.fail(Failure::unknown("timeout")).unwrap();
    let detached = ClaimOptions::new()
        .detached(true)
        .lease(Duration::from_secs(1 << 31));
    let held = pays
        .claim_with(DETACHED, &detached)
        .unwrap()
        .claim()
        .unwrap();
    std::fs::write(path.with_extension("ticket"), held.detach().to_string()).unwrap();
    let asked = asks
        .claim("asked")
        .unwrap()
        .claim()
        .unwrap()
        .start(b"asked")
        .unwrap();
    let _asked = asked.fail(Failure::unknown("timeout")).unwrap();
    for number in 0..400 {
        assert!(seen.observe(format!("key-{number}")).unwrap().is_new());
    }
    assert!(seen.forget("key-0").unwrap().is_applied());
    assert!(short.observe("expires").unwrap().is_new());
    assert!(seen.observe(vec![b'l'; 300]).unwrap().is_new());
    log.maintain().unwrap();
    drop((seen, short, jobs, pays, asks));
    log.close().unwrap();
    // Ballast: 64 KiB of nothing.
    let _missing = std::fs::remove_file(path.join("RESERVE"));
}

/// A copy that may be opened: the committed files are never written to.
fn copy_of_committed() -> (tempfile::TempDir, PathBuf) {
    let from = committed();
    if std::env::var_os("IDEMLOG_WRITE_GOLDEN").is_some() && !from.join("MANIFEST").exists() {
        write_store(&from);
    }
    let parent = tempfile::tempdir().unwrap();
    let to = parent.path().join("store");
    std::fs::create_dir(&to).unwrap();
    for entry in std::fs::read_dir(&from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    (parent, to)
}

fn read(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(Result::unwrap);
    entries
        .map(|e| {
            (
                e.file_name().into_string().unwrap(),
                std::fs::read(e.path()).unwrap(),
            )
        })
        .collect()
}

fn check_answers(log: &DedupLog) {
    let seen = log.filter("seen", kept()).unwrap();
    for number in 0..410 {
        let expected = match number {
            1..400 => KeyState::Seen,
            _ => KeyState::Absent,
        };
        assert_eq!(
            seen.get(format!("key-{number}")).unwrap(),
            expected,
            "{number}"
        );
    }
    assert_eq!(seen.get(vec![b'l'; 300]).unwrap(), KeyState::Seen);
    let short = log.filter("short", kept()).unwrap();
    assert_eq!(short.get("expires").unwrap(), KeyState::Seen);
    let jobs = log.namespace::<Repeatable>("jobs", kept()).unwrap();
    let other = ClaimOptions::new().fingerprint(Fingerprint::of(b"other"));
    for (key, state) in [
        ("done", "done"),
        ("dropped", "done"),
        ("failed", "failed"),
        ("rejected", "rejected"),
        ("dead", "dead"),
    ] {
        assert_eq!(jobs.get(key).unwrap().name(), state, "{key}");
        assert!(matches!(
            jobs.claim_with(key, &other).unwrap(),
            ClaimVerdict::Mismatch
        ));
    }
    let KeyState::Done(done) = jobs.get("done").unwrap() else {
        panic!()
    };
    assert_eq!(done.outcome, Outcome::Kept(b"outcome".to_vec()));
    assert_eq!((done.attempt, done.committed_at_ms), (1, START_MS));
    let KeyState::Done(done) = jobs.get("dropped").unwrap() else {
        panic!()
    };
    assert_eq!(done.outcome, Outcome::Dropped);
    let pays = log.namespace::<NonRepeatable>("pays", kept()).unwrap();
    let ClaimVerdict::InDoubt(doubt) = pays.claim("doubt").unwrap() else {
        panic!()
    };
    assert_eq!(doubt.evidence, b"sent\ntimeout");
    assert!(matches!(
        pays.claim(DETACHED).unwrap(),
        ClaimVerdict::Busy { .. }
    ));
    let asks = log.namespace::<Probeable>("asks", kept()).unwrap();
    assert!(matches!(
        asks.get("asked").unwrap(),
        KeyState::Pending { started: true, .. }
    ));
}

#[test]
fn the_committed_store_opens_and_answers_as_recorded() {
    let (_parent, path) = copy_of_committed();
    for is_first in [true, false] {
        let log = open(&path);
        assert!(log.open_report().clean && !log.open_report().created);
        // Its filters are those of an earlier version: they are built again, once.
        assert_eq!(log.open_report().rebuilt_runs_count > 0, is_first);
        check_answers(&log);
        log.close().unwrap();
    }
    let names = std::fs::read_dir(&path).unwrap().map(|e| e.unwrap().path());
    for index in names.filter(|path| path.extension().is_some_and(|e| e == "idx" || e == "flt")) {
        std::fs::remove_file(index).unwrap();
    }
    let log = open(&path);
    assert!(log.open_report().rebuilt_runs_count > 0);
    check_answers(&log);
    let ticket = std::fs::read_to_string(committed().with_extension("ticket")).unwrap();
    let ticket: Ticket = ticket.parse().unwrap();
    let pays = log.namespace::<NonRepeatable>("pays", kept()).unwrap();
    assert!(pays.start_ticket(&ticket, b"").unwrap().is_applied());
}

/// The manifest by section 4.
struct Manifest {
    store: Vec<u8>,
    namespaces: Vec<(usize, u8, String)>,
    /// id, nonce, size, and the seven fields of a sealed segment.
    segments: Vec<(u64, u32, u32, [u32; 7])>,
    runs: Vec<(u64, u64, u32)>,
    closed_at: u64,
}

fn decode_manifest(b: &[u8]) -> Manifest {
    assert_eq!(&b[..8], b"idemlogM");
    assert_eq!((u16_at(b, 8), u32_at(b, 12)), (1, 0));
    assert_eq!(u32_at(b, b.len() - 4), bytes::crc32(0, &b[..b.len() - 4]));
    let counts = [120, 124, 128, 132].map(|at| usize::try_from(u32_at(b, at)).unwrap());
    let mut at = 136;
    let mut manifest = Manifest {
        store: b[16..32].to_vec(),
        namespaces: Vec::new(),
        segments: Vec::new(),
        runs: Vec::new(),
        closed_at: u64_at(b, 112),
    };
    for _ in 0..counts[0] {
        let len = usize::from(b[at + 3]);
        let name = String::from_utf8(b[at + 4..at + 4 + len].to_vec()).unwrap();
        manifest.namespaces.push((u16_at(b, at), b[at + 2], name));
        at += 4 + len;
    }
    for _ in 0..counts[1] {
        let rest = [0, 1, 2, 3, 4, 5, 6].map(|field| u32_at(b, at + 16 + field * 4));
        manifest
            .segments
            .push((u64_at(b, at), u32_at(b, at + 8), u32_at(b, at + 12), rest));
        at += 44;
    }
    for _ in 0..counts[2] {
        manifest
            .runs
            .push((u64_at(b, at), u64_at(b, at + 8), u32_at(b, at + 16)));
        at += 20;
    }
    at += counts[3] * 8;
    assert_eq!(at, b.len() - 4);
    assert!(u64_at(b, 104) > manifest.segments.last().unwrap().0);
    manifest
}

#[test]
fn the_manifest_is_what_the_tables_say() {
    let files = read(&committed());
    let manifest = decode_manifest(&files["MANIFEST"]);
    let names: Vec<_> = manifest
        .namespaces
        .iter()
        .map(|(id, kind, name)| (*id, *kind, name.as_str()))
        .collect();
    let expected = [
        (1, 0, "seen"),
        (2, 0, "short"),
        (3, 1, "jobs"),
        (4, 3, "pays"),
        (5, 2, "asks"),
    ];
    assert_eq!(names, expected);
    assert!(manifest.segments.len() >= 3);
    for (id, nonce, size, sealed) in &manifest.segments {
        let file = &files[&format!("seg-{id:012}.log")];
        assert_eq!(file.len(), usize::try_from(*size).unwrap());
        assert_eq!(&file[..8], b"idemlogS");
        assert_eq!(
            (u16_at(file, 8), u16_at(file, 10), u32_at(file, 12)),
            (1, 0, *nonce)
        );
        assert_eq!(file[16..32], manifest.store[..]);
        assert_eq!((u64_at(file, 32), u32_at(file, 48)), (*id, *size));
        assert_eq!((u32_at(file, 52), u32_at(file, 56)), (0, 0));
        assert_eq!(u32_at(file, 60), bytes::crc32(0, &file[..60]));
        let [end, records, unsettled, drop_at, began, _sparse, crc] = *sealed;
        if end == 0 {
            assert_eq!(*sealed, [0; 7]);
            continue;
        }
        let whole = &file[..usize::try_from(end).unwrap()];
        assert_eq!(crc, bytes::crc32(0, whole));
        let frames = bytes::frames(file);
        let keyed = frames.iter().filter(|frame| frame.kind < 16).count();
        assert_eq!(u32::try_from(keyed).unwrap(), records);
        let seal = frames.last().unwrap();
        assert_eq!((seal.kind, seal.bytes.len()), (18, 120));
        assert_eq!(seal.offset + 120, whole.len());
        assert_eq!(u32_at(&seal.bytes, 108), unsettled);
        assert_eq!(u32_at(&seal.bytes, 112), drop_at);
        assert_eq!(u64::from(began), START_MS / 1000);
    }
    let active = manifest
        .segments
        .iter()
        .find(|segment| segment.3[0] == 0)
        .unwrap();
    let frames = bytes::frames(&files[&format!("seg-{:012}.log", active.0)]);
    let end = frames
        .last()
        .map_or(64, |frame| frame.offset + frame.bytes.len());
    assert_eq!(
        manifest.closed_at,
        active.0 << 23 | u64::try_from(end / 8).unwrap()
    );
}

#[test]
fn the_records_are_what_the_tables_say() {
    let files = read(&committed());
    let manifest = decode_manifest(&files["MANIFEST"]);
    let mut newest = BTreeMap::new();
    let mut kinds = BTreeMap::new();
    for (id, ..) in &manifest.segments {
        let file = &files[&format!("seg-{id:012}.log")];
        let frames = bytes::frames(file);
        let mut counts = [0u32; 20];
        for frame in &frames {
            *kinds.entry(frame.kind).or_insert(0) += 1;
            assert_eq!(frame.offset % 8, 0);
            match frame.kind {
                16 => {
                    assert_eq!((frame.bytes.len(), &frame.bytes[8..16]), (32, &[0; 8][..]));
                    assert!(u64_at(&frame.bytes, 16) >> 23 <= *id);
                    assert_eq!(u64_at(&frame.bytes, 24), START_MS);
                }
                17 => {
                    let count = usize::try_from(u32_at(&frame.bytes, 16)).unwrap();
                    for index in 0..count {
                        let at = usize::try_from(u32_at(&frame.bytes, 20 + index * 4)).unwrap() * 8;
                        let listed = frames.iter().find(|f| f.offset == at).unwrap();
                        assert!([3, 4, 8].contains(&listed.kind));
                    }
                }
                18 => {
                    let said: Vec<u32> = (0..20)
                        .map(|kind| u32_at(&frame.bytes, 24 + kind * 4))
                        .collect();
                    assert_eq!(said, counts);
                    assert_eq!(u64_at(&frame.bytes, 16), START_MS);
                    assert_eq!(u32_at(&frame.bytes, 116), 0);
                }
                _ => {
                    counts[usize::from(frame.kind)] += 1;
                    let record = frame.record();
                    newest.insert((record.namespace, record.key.clone()), record);
                }
            }
        }
    }
    for kind in [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 18] {
        assert!(kinds.contains_key(&kind), "kind {kind} is not in the store");
    }
    let find = |namespace, key: &[u8]| &newest[&(namespace, key.to_vec())];
    assert_eq!((find(1, b"key-1").kind, find(1, b"key-0").kind), (1, 2));
    assert_eq!(
        find(2, b"expires").expires_at_s,
        u32::try_from(START_MS / 1000 + 100).unwrap()
    );
    assert_eq!(find(1, &[b'l'; 300]).kind, 1);
    let done = find(3, b"done");
    assert_eq!((done.kind, done.flags, done.expires_at_s), (5, 1 << 5, 0));
    assert!(done.parts.contains(&(1, b"outcome".to_vec())));
    let state = done.state.as_deref().unwrap();
    assert_eq!(u64_at(state, 0) >> 22, u64_at(state, 8));
    assert!(u64_at(state, 8) >= START_MS);
    assert_eq!((u64_at(state, 16), u64_at(state, 24)), (START_MS, 0));
    assert_eq!(state[32..48], Fingerprint::of(b"payload").as_bytes()[..]);
    assert_eq!(
        (u32_at(state, 48), u64::from(u32_at(state, 52))),
        (1, START_MS / 1000)
    );
    assert_eq!(u32_at(state, 56), 60_000);
    assert_eq!(
        (find(3, b"dropped").flags, find(3, b"dropped").parts.len()),
        (1 << 5 | 1 << 7, 0)
    );
    let failed = find(3, b"failed");
    assert_eq!(
        u64_at(failed.state.as_deref().unwrap(), 24),
        START_MS + 3_600_000
    );
    assert_eq!(
        (failed.kind, failed.parts[0].clone()),
        (6, (2, b"later".to_vec()))
    );
    assert_eq!((find(3, b"rejected").kind, find(3, b"dead").kind), (7, 9));
    let doubt = find(4, b"doubt");
    assert_eq!(
        (doubt.kind, doubt.parts[0].clone()),
        (8, (3, b"sent\ntimeout".to_vec()))
    );
    assert_eq!(
        (
            find(4, DETACHED.as_bytes()).kind,
            find(4, DETACHED.as_bytes()).flags
        ),
        (3, 1 << 6)
    );
    assert_eq!(
        (find(5, b"asked").kind, find(5, b"asked").flags),
        (4, 1 << 8)
    );
}

/// SipHash-1-3 of the reference paper, for keys of any length.
fn siphash13(key: &[u8], data: &[u8]) -> u64 {
    let (k0, k1) = (u64_at(key, 0), u64_at(key, 8));
    let mut v = [
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ];
    let round = |v: &mut [u64; 4]| {
        v[0] = v[0].wrapping_add(v[1]);
        v[1] = v[1].rotate_left(13) ^ v[0];
        v[0] = v[0].rotate_left(32);
        v[2] = v[2].wrapping_add(v[3]);
        v[3] = v[3].rotate_left(16) ^ v[2];
        v[0] = v[0].wrapping_add(v[3]);
        v[3] = v[3].rotate_left(21) ^ v[0];
        v[2] = v[2].wrapping_add(v[1]);
        v[1] = v[1].rotate_left(17) ^ v[2];
        v[2] = v[2].rotate_left(32);
    };
    let mut padded = data.to_vec();
    padded.resize((data.len() + 1).next_multiple_of(8), 0);
    *padded.last_mut().unwrap() = data.len().to_le_bytes()[0];
    for word in padded.chunks(8) {
        let word = u64_at(word, 0);
        v[3] ^= word;
        round(&mut v);
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    for _ in 0..3 {
        round(&mut v);
    }
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

#[test]
fn runs_and_filters_are_what_the_tables_say_and_hold_every_key() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("store");
    write_store(&path);
    // Four runs are merged, and some are not.
    let log = open(&path);
    let seen = log.filter("seen", kept()).unwrap();
    for number in 400..900 {
        assert!(seen.observe(format!("key-{number}")).unwrap().is_new());
    }
    log.maintain().unwrap();
    log.maintain().unwrap();
    drop(seen);
    log.close().unwrap();
    let files = read(&path);
    let manifest = decode_manifest(&files["MANIFEST"]);
    let hash_key = &files["MANIFEST"][40..56];
    let key_id = siphash13(hash_key, &manifest.store);
    let kinds: Vec<bool> = manifest.runs.iter().map(|(lo, hi, _)| lo == hi).collect();
    assert!(kinds.contains(&true) && kinds.contains(&false), "{kinds:?}");
    for (lo, hi, generation) in &manifest.runs {
        let stem = format!("run-{lo:012}-{hi:012}-{generation}");
        let run = &files[&format!("{stem}.idx")];
        assert_eq!(&run[..8], b"idemlogR");
        assert_eq!((u16_at(run, 8), u32_at(run, 12)), (1, *generation));
        assert_eq!(run[16..32], manifest.store[..]);
        assert_eq!(
            (u64_at(run, 32), u64_at(run, 40), u64_at(run, 48)),
            (key_id, *lo, *hi)
        );
        let header_crc = u32_at(run, 4092);
        assert_eq!(header_crc, bytes::crc32(0, &run[..4092]));
        assert_eq!(u64::from(u32_at(run, 92)), hi - lo + 1);
        assert!(run[96..4092].iter().all(|byte| *byte == 0));
        let named = [&run[16..32], &run[40..56], &run[12..16]].concat();
        let seed = bytes::crc32(0, &named);
        let (offset_bits, ordinal_bits) = (u32::from(run[10]), u32::from(run[11]));
        let (home_pages, slots_count) = (u64_at(run, 56), u64_at(run, 64));
        assert_eq!(u32_at(run, 88), 0);
        assert_eq!(run.len() as u64, (1 + home_pages) * 4096);
        let mut entries = BTreeMap::new();
        for page in 0..home_pages {
            let at = usize::try_from((page + 1) * 4096).unwrap();
            let b = &run[at..at + 4096];
            assert_eq!(u32_at(b, 0), bytes::crc32(seed, &b[4..]), "page checksum");
            assert_eq!((u64::from(u32_at(b, 4)), u32_at(b, 12)), (page, 0));
            let first = (page << 44).div_ceil(home_pages);
            for slot in 0..u16_at(b, 8) {
                let slot = u64_at(b, 16 + slot * 8);
                let h = first + (slot >> (offset_bits + ordinal_bits));
                let ordinal = slot >> offset_bits & ((1 << ordinal_bits) - 1);
                let offset = (slot & ((1 << offset_bits) - 1)) * 8;
                entries.insert((lo + ordinal, usize::try_from(offset).unwrap()), h);
            }
        }
        assert_eq!(entries.len() as u64, slots_count);
        let filter = &files[&format!("{stem}.flt")];
        check_filter(filter, header_crc, *generation, key_id, &manifest.store);
        if lo == hi {
            check_blocks(filter, seed);
        } else {
            check_partitions(filter, seed);
        }
        for id in *lo..=*hi {
            let mut newest = BTreeMap::new();
            for frame in bytes::frames(&files[&format!("seg-{id:012}.log")]) {
                if frame.kind < 16 {
                    let record = frame.record();
                    newest.insert((record.namespace, record.key), frame.offset);
                }
            }
            for ((namespace, key), offset) in newest {
                let mut hashed = u16::try_from(namespace).unwrap().to_le_bytes().to_vec();
                hashed.extend_from_slice(&key);
                let h = siphash13(hash_key, &hashed) >> 20;
                assert_eq!(entries.remove(&(id, offset)), Some(h));
                assert!(may_contain(filter, h));
            }
        }
        assert!(entries.is_empty(), "entries of no record: {entries:?}");
        // Places in every block and partition: one block alone may be fuller than most.
        let passed = (0..10_000u64)
            .filter(|n| may_contain(filter, n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20))
            .count();
        assert!(passed < 300, "passed={passed}");
    }
}

fn check_filter(filter: &[u8], run_crc: u32, generation: u32, key_id: u64, store: &[u8]) {
    assert_eq!(&filter[..8], b"idemlogF");
    assert_eq!(
        (u16_at(filter, 8), u16_at(filter, 10), u32_at(filter, 12)),
        (2, u16_at(filter, 10), generation)
    );
    assert_eq!((&filter[16..32], u64_at(filter, 32)), (store, key_id));
    assert_eq!(u32_at(filter, 56), run_crc);
    assert_eq!(u32_at(filter, 60), bytes::crc32(0, &filter[..60]));
}

fn check_blocks(filter: &[u8], seed: u32) {
    assert_eq!(u16_at(filter, 10), 1);
    assert_eq!(u32_at(filter, 52), bytes::crc32(seed, &filter[64..]));
    let (keys, blocks) = (u64_at(filter, 40), u32_at(filter, 48));
    assert_eq!(filter.len(), 64 + usize::try_from(blocks).unwrap() * 32);
    assert_eq!(u64::from(blocks), (keys * 12).div_ceil(256).max(1));
}

/// Returns the table of a fuse filter and the fingerprints.
fn partitions(filter: &[u8]) -> (&[u8], &[u8]) {
    let count = usize::try_from(u32_at(filter, 48)).unwrap();
    filter[64..].split_at(count * 32)
}

fn check_partitions(filter: &[u8], seed: u32) {
    assert_eq!(u16_at(filter, 10), 2);
    let (table, fingerprints) = partitions(filter);
    assert_eq!(u32_at(filter, 52), bytes::crc32(seed, table));
    let (mut end, mut keys) = (0, 0);
    for entry in table.chunks(32) {
        let (at, length, count) = (u64_at(entry, 8), u32_at(entry, 16), u32_at(entry, 20));
        assert!(length.is_power_of_two() && count % length == 0);
        assert_eq!(at, end);
        end += u64::from(count + 2 * length);
        let own = &fingerprints[usize::try_from(at).unwrap()..usize::try_from(end).unwrap()];
        assert_eq!(u32_at(entry, 28), bytes::crc32(seed, own));
        keys += u64::from(u32_at(entry, 24));
    }
    assert_eq!((end, keys), (fingerprints.len() as u64, u64_at(filter, 40)));
}

fn may_contain(filter: &[u8], h: u64) -> bool {
    if u16_at(filter, 10) == 1 {
        may_be_in_block(filter, h)
    } else {
        may_be_in_partition(filter, h)
    }
}

fn may_be_in_partition(filter: &[u8], h: u64) -> bool {
    let (table, fingerprints) = partitions(filter);
    let number = (h * u64::from(u32_at(filter, 48))) >> 44;
    let entry = &table[usize::try_from(number * 32).unwrap()..];
    let (seed, at) = (u64_at(entry, 0), u64_at(entry, 8));
    let (length, count) = (u64::from(u32_at(entry, 16)), u32_at(entry, 20));
    let mut x = h.wrapping_add(seed);
    for factor in [0xff51_afd7_ed55_8ccd_u64, 0xc4ce_b9fe_1a85_ec53] {
        x = (x ^ x >> 33).wrapping_mul(factor);
    }
    x ^= x >> 33;
    let first = u64::try_from((u128::from(x) * u128::from(count)) >> 64).unwrap();
    let second = (first + length) ^ ((x >> 18) % length);
    let third = (first + 2 * length) ^ (x % length);
    let byte = |place: u64| fingerprints[usize::try_from(at + place).unwrap()];
    let found = byte(first) ^ byte(second) ^ byte(third);
    found == (x ^ x >> 32).to_le_bytes()[0]
}

fn may_be_in_block(filter: &[u8], h: u64) -> bool {
    let salts: [u32; 8] = [
        0x47b6_137b,
        0x4497_4d91,
        0x8824_ad5b,
        0xa2b7_289d,
        0x7054_95c7,
        0x2df1_424b,
        0x9efc_4947,
        0x5c6b_fb31,
    ];
    let block = (h * u64::from(u32_at(filter, 48))) >> 44;
    let low = u32::try_from(h.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32).unwrap();
    (0..8).all(|word| {
        let at = 64 + usize::try_from(block).unwrap() * 32 + word * 4;
        u32_at(filter, at) >> (low.wrapping_mul(salts[word]) >> 27) & 1 == 1
    })
}

#[test]
fn siphash_and_crc_agree_with_their_published_vectors() {
    assert_eq!(bytes::crc32(0, b"123456789"), 0xcbf4_3926);
    assert_eq!(
        bytes::crc32(bytes::crc32(0, b"1234"), b"56789"),
        0xcbf4_3926
    );
    let key: Vec<u8> = (0..16).collect();
    // SipHash-1-3 of the empty input and of 0, 1, 2, as in Rust's own test vectors.
    assert_eq!(siphash13(&key, &[]), 0xabac_0158_050f_c4dc);
    assert_eq!(siphash13(&key, &[0]), 0xc9f4_9bf3_7d57_ca93);
}
