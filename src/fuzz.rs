//! Bodies of the fuzz targets. Each takes arbitrary bytes and panics when a rule is broken; the
//! targets in `fuzz/` call them, and `tests/corpus.rs` replays the committed inputs.
#![expect(
    clippy::missing_panics_doc,
    reason = "a panic is how a body says that a rule was broken"
)]

mod directory;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::ManualClock;
use crate::format::filter::{self, FilterKind};
use crate::format::fuse;
use crate::format::hint::Hint;
use crate::format::le::{put_crc_at_end, set_u32};
use crate::format::manifest::Manifest;
use crate::format::record::{Frame, HEADER_BYTES, Record};
use crate::format::run::PAGE_BYTES;
use crate::format::watermark::Marks;
use crate::index::build::{Output, RunPlan};
use crate::index::merge::merge;
use crate::index::run::Run;
use crate::log::replay::{Replay, proven_behind};
use crate::vfs::sim::{PowerCut, SimDisk};
use crate::vfs::{Access, Map};
use crate::{
    ClaimVerdict, DedupLog, ErrorKind, Filter, KeyState, Namespace, NamespaceOptions,
    NonRepeatable, Observed, OpenMode, Options, Repair, Repeatable, Result, Retention,
    WatermarkOptions, ZeroFill,
};

const START_MS: u64 = 1_700_000_000_000;
/// The largest segment id that the engine hands to a run.
const ID_MAX: u64 = 1 << 41;
const SECTOR_BYTES: usize = 512;
/// The widest run that is merged.
const SPAN_MAX: u64 = 512;

/// Frames: verified or refused, and what is read is what is written again. The value of a
/// watermark, too.
pub fn record(data: &[u8]) {
    let Some((seed, bytes)) = data.split_first_chunk::<4>() else {
        return;
    };
    let seed = u32::from_le_bytes(*seed);
    parse_frame(bytes, seed);
    if let Ok(marks) = Marks::decode(bytes) {
        assert_eq!(Marks::decode(&marks.encode()), Ok(marks));
    }
    let mut fixed = bytes.to_vec();
    directory::right_frame(&mut fixed, 0, seed);
    parse_frame(&fixed, seed);
    assert!(Replay::new(bytes, seed).count() <= bytes.len());
    proven_behind(bytes, seed, 64);
}

fn parse_frame(bytes: &[u8], seed: u32) {
    let Ok(frame) = Frame::verify(bytes, seed) else {
        return;
    };
    assert!(frame.len() <= bytes.len());
    let _unused = (frame.sync_mark().is_ok(), frame.seal().is_ok());
    if let Ok(list) = frame.unsettled() {
        assert!(list.len() * 4 <= frame.len());
    }
    if let Ok(records) = frame.group(seed, 0) {
        assert!(records.len() * HEADER_BYTES <= frame.len());
    }
    if let Ok(record) = frame.record() {
        let mut again = Vec::new();
        record.encode(&mut again, seed);
        let same = Frame::verify(&again, seed).map(|frame| frame.record() == Ok(record));
        assert_eq!(same, Ok(true), "a record changes when it is written again");
        sizes(&record, &again);
    }
}

fn sizes(record: &Record<'_>, encoded: &[u8]) {
    assert_eq!(
        record.frame_bytes(),
        encoded.len(),
        "size said and size written"
    );
}

/// Manifests, with the checksum as given and with the right one.
pub fn manifest(data: &[u8]) {
    let mut fixed = data.to_vec();
    put_crc_at_end(&mut fixed);
    for bytes in [data, &fixed] {
        if let Ok(manifest) = Manifest::decode(bytes) {
            let again = Manifest::decode(&manifest.encode());
            assert_eq!(
                again,
                Ok(manifest),
                "a manifest changes when it is written again"
            );
        }
    }
}

/// Runs with their filters, as given and with right checksums: the first two bytes say where the
/// filter starts.
pub fn page(data: &[u8]) {
    let Some((at, bytes)) = data.split_first_chunk::<2>() else {
        return;
    };
    let at = usize::from(u16::from_le_bytes(*at));
    let (filter, run) = bytes.split_at_checked(at).unwrap_or((bytes, &[]));
    search_run(run, filter);
    let (mut run, mut filter) = (run.to_vec(), filter.to_vec());
    directory::right_run(&mut run);
    directory::right_filter(&mut filter, &run);
    search_run(&run, &filter);
}

fn search_run(run: &[u8], filter: &[u8]) {
    let (Some(run), Some(filter)) = (map(run), map(filter)) else {
        return;
    };
    let Ok(run) = Run::open(run, filter) else {
        return;
    };
    let is_whole = run.check_whole().is_ok();
    let header = run.header;
    if header.lo >= ID_MAX || header.hi >= ID_MAX {
        return;
    }
    let mut places = Vec::new();
    for h in (0..64).map(|n| n << 38).chain([(1 << 44) - 1]) {
        let _unused = (run.find(h, &mut places).is_ok(), run.may_contain(h));
    }
    if header.lo > header.hi || header.hi - header.lo >= SPAN_MAX {
        return;
    }
    let plan = RunPlan {
        store: header.store,
        hash_key_id: header.hash_key_id,
        lo: header.lo,
        hi: header.hi,
        generation: header.generation.wrapping_add(1),
        segment_bytes: 1 << 20,
        superseded_count: header.superseded_count,
        segments_count: header.segments_count,
        times: run.times().to_vec(),
        filter: FilterKind::Fuse,
    };
    let mut written = 0;
    let merged = merge(
        &plan,
        &[&run],
        |_| true,
        |to, bytes, _| {
            if to == Output::Run {
                written += bytes.len();
            }
            Ok(())
        },
    );
    // Pages that two chains share are not noticed while merging.
    if is_whole && merged.is_ok() {
        assert!(written.is_multiple_of(PAGE_BYTES));
    }
}

fn map(bytes: &[u8]) -> Option<Map> {
    let disk = SimDisk::memory();
    disk.write_file("f", bytes);
    disk.dir().open("f", Access::Read).ok()?.map().ok()
}

fn ask_fuse(body: &[u8], partitions_count: u32, h: u64) {
    let Ok((partitions, all)) = fuse::decode_table(body, partitions_count) else {
        return;
    };
    let number = fuse::partition_of(h, partitions_count);
    let Some(partition) = partitions.get(number) else {
        return;
    };
    if let Some(fingerprints) = partition.fingerprints(all) {
        partition.may_contain(fingerprints, h);
    }
    partition.first_at(h);
}

/// Filter files and hints, with the checksum as given and with the right one.
pub fn filter(data: &[u8]) {
    let body = data.get(64..).unwrap_or_default();
    let table = body.get(..fuse::ENTRY_BYTES).unwrap_or(body);
    let fixed = [body, table].map(|summed| {
        let mut fixed = data.get(..60).unwrap_or(data).to_vec();
        set_u32(&mut fixed, 52, crc32fast::hash(summed));
        put_crc_at_end(&mut fixed);
        fixed.extend_from_slice(body);
        fixed
    });
    for bytes in [data, &fixed[0], &fixed[1]] {
        if let Ok((header, body)) = filter::decode(bytes, 0) {
            for h in (0..64).map(|n| n << 38) {
                match header.kind {
                    FilterKind::Bloom => {
                        filter::may_contain(body, header.parts_count, h);
                    }
                    FilterKind::Fuse => ask_fuse(body, header.parts_count, h),
                }
            }
        }
    }
    let mut hint = data.to_vec();
    put_crc_at_end(&mut hint);
    for bytes in [data, &hint] {
        if let Ok((hint, entries)) = Hint::decode(bytes) {
            let mut again = Vec::new();
            let count = entries.iter().count();
            let written = hint.stream(count, entries.iter(), |bytes, _| {
                again.extend_from_slice(bytes);
                Ok::<(), ()>(())
            });
            assert!(written.is_ok());
            assert_eq!(Hint::decode(&again), Ok((hint, entries)));
        }
    }
}

fn options(clock: &Arc<ManualClock>) -> Options {
    Options::new()
        .segment_bytes(4096)
        .background(false)
        .zero_fill(ZeroFill::Never)
        .clock(Arc::clone(clock) as _)
}

fn small() -> NamespaceOptions {
    NamespaceOptions::new().outcome_bytes_max(0)
}

/// Any directory: one of several stores, or nothing, with patches applied. The first byte chooses
/// the store and whether checksums are made right after the patches. Each patch is one byte for
/// the file, one for what to do with it, two for the offset, one for a length, then bytes.
///
/// Opening answers or refuses; what it answers it answers again after a reopen. That is not asked
/// of forged files, whose checksums are right: from them no panic may come.
pub fn recovery(data: &[u8]) {
    let Some((disk, forged)) = patched(data) else {
        return;
    };
    let clock = Arc::new(ManualClock::new(START_MS));
    let Ok(log) = directory::options(&clock).open_on(disk.dir()) else {
        return;
    };
    let answers = ask(&log);
    drop(log);
    let log = match directory::options(&clock).open_on(disk.dir()) {
        Ok(log) => log,
        Err(_) if forged => return,
        Err(error) => panic!("opened once, then refused: {error}"),
    };
    let again = ask(&log);
    for (key, before) in answers.into_iter().filter(|_| !forged) {
        assert_eq!(again.get(&key), Some(&before), "{key}");
    }
}

/// Any directory, as for [`recovery`], repaired: the damaged one is not touched, and the repaired
/// one opens and needs no repair. What the damaged one answers when it is open to salvage, the
/// repaired one answers too.
pub fn repair(data: &[u8]) {
    let Some((disk, forged)) = patched(data) else {
        return;
    };
    let clock = Arc::new(ManualClock::new(START_MS));
    let before = disk.image_hash();
    let target = SimDisk::memory();
    let repair = || Repair::of("patched").clock(Arc::clone(&clock) as _);
    let repaired = repair().write_on(disk.dir().as_ref(), target.dir());
    assert_eq!(disk.image_hash(), before, "the damaged store was changed");
    let Ok(report) = repaired else { return };
    assert!(report.kept_count + report.purged_count == report.found_count);
    let again = match repair().dry_run_on(target.dir().as_ref()) {
        Ok(again) => again,
        Err(_) if forged => return,
        Err(error) => panic!("repaired, then refused: {error}"),
    };
    assert!(again.is_whole(), "{again:?}");
    let log = match directory::options(&clock).open_on(target.dir()) {
        Ok(log) => log,
        Err(_) if forged => return,
        Err(error) => panic!("repaired, then refused: {error}"),
    };
    let kept = ask(&log);
    let salvage = directory::options(&clock).open_mode(OpenMode::Salvage);
    let Ok(log) = salvage.open_on(disk.dir()) else {
        return;
    };
    if log.open_report().salvaged && !forged {
        for (key, state) in ask(&log) {
            assert_eq!(kept.get(&key), Some(&state), "{key}");
        }
    }
}

/// Makes the directory that the bytes describe; says too whether a checksum was made right.
fn patched(data: &[u8]) -> Option<(SimDisk, bool)> {
    let (first, mut rest) = data.split_first()?;
    let all_right = first & 0x80 != 0;
    let mut forged = all_right;
    let disk = directory::start(first % directory::STARTS);
    while let Some((head, tail)) = rest.split_first_chunk::<5>() {
        let [file, what, low, high, len] = *head;
        let (bytes, tail) = tail
            .split_at_checked(usize::from(len))
            .unwrap_or((tail, &[]));
        rest = tail;
        forged |= patch(
            &disk,
            file,
            what,
            usize::from(u16::from_le_bytes([low, high])),
            bytes,
        );
    }
    if all_right {
        directory::make_checksums_right(&disk);
    }
    Some((disk, forged))
}

/// Changes one file; says whether its checksum was made right.
fn patch(disk: &SimDisk, file: u8, what: u8, offset: usize, bytes: &[u8]) -> bool {
    let mut names = disk.file_names();
    names.extend([
        "MANIFEST".into(),
        "MANIFEST.new".into(),
        "seg-000000000009.log".into(),
    ]);
    let Some(name) = names.get(usize::from(file) % names.len()) else {
        return false;
    };
    let mut forged = false;
    let mut content = disk.read_file(name).unwrap_or_default();
    match what % 6 {
        0 => {
            disk.remove_file(name);
            return false;
        }
        1 => content.truncate(offset),
        2 => content.resize((content.len() + offset).min(1 << 17), what),
        3 => {
            // A block that was meant for another file, or another file's place.
            let other = bytes
                .first()
                .and_then(|n| names.get(usize::from(*n) % names.len()));
            let other = other.and_then(|name| disk.read_file(name));
            let at = offset / SECTOR_BYTES * SECTOR_BYTES;
            if let Some(block) = other.as_deref().and_then(|b| b.get(at..at + SECTOR_BYTES))
                && let Some(place) = content.get_mut(at..at + SECTOR_BYTES)
            {
                place.copy_from_slice(block);
            }
        }
        _ => {
            let end = (offset + bytes.len()).max(content.len());
            content.resize(end, 0);
            if let Some(place) = content.get_mut(offset..offset + bytes.len()) {
                place.copy_from_slice(bytes);
            }
            if what % 6 == 4 && name == "MANIFEST" {
                content.truncate(content.len().saturating_sub(4));
                put_crc_at_end(&mut content);
                forged = true;
            }
        }
    }
    disk.write_file(name, content);
    forged
}

fn must<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

/// Asks for some keys; an error is no answer.
fn ask(log: &DedupLog) -> BTreeMap<String, String> {
    let kept = directory::kept;
    let mut states = BTreeMap::new();
    let _listed = (log.pending().is_ok(), log.in_doubt().is_ok());
    if let Ok(jobs) = log.namespace::<Repeatable>("jobs", kept()) {
        for key in ["done", "dropped", "failed", "rejected", "dead"] {
            states.extend(jobs.get(key).map(|state| (key.to_owned(), show(state))));
        }
        if let Some(mut claim) = jobs.claim("claimed").ok().and_then(ClaimVerdict::claim) {
            let _committed = claim.commit(b"outcome").is_ok();
        }
    }
    if let Ok(pays) = log.namespace::<NonRepeatable>("pays", kept()) {
        for key in ["doubt", "detached"] {
            states.extend(pays.get(key).map(|state| (key.to_owned(), show(state))));
            let _claimed = pays.claim(key).is_ok();
        }
    }
    if let Ok(filter) = log.filter("seen", kept()) {
        for n in 0..40 {
            for key in [format!("key-{}", n * 11), format!("more-{}", n * 7)] {
                states.extend(filter.get(&key).map(|state| (key, show(state))));
            }
        }
        if let Ok(observed) = filter.observe("written by the fuzzer") {
            let again = filter.observe("written by the fuzzer");
            assert!(
                matches!(again, Ok(Observed::Duplicate)),
                "{observed:?}, then {again:?}"
            );
        }
    }
    ask_attached(log, &mut states);
    let _done = log.maintain();
    states
}

fn ask_attached(log: &DedupLog, states: &mut BTreeMap<String, String>) {
    if let Ok(cells) = log.cells("cells", directory::kept()) {
        for key in ["a", "b"] {
            states.extend(
                cells
                    .get(key)
                    .map(|cell| (format!("cell {key}"), show(cell))),
            );
        }
    }
    if let Ok(marks) = log.watermarks("marks", WatermarkOptions::sparse(8)) {
        let safe = marks.safe_position("source");
        states.extend(safe.map(|safe| ("source".to_owned(), show(safe))));
        let told = marks.observe("source", 2);
        states.extend(told.map(|told| ("number".to_owned(), show(told))));
    }
    if let Ok(outbox) = log.outbox("outbox", directory::kept()) {
        let parked = outbox
            .parked()
            .map(|all| all.into_iter().map(|e| (e.id, e.payload)));
        let parked: Result<Vec<_>> = parked.map(Iterator::collect);
        states.extend(parked.map(|parked| ("parked".to_owned(), show(parked))));
        let queued = outbox.lease(9).map(|all| all.len());
        states.extend(queued.map(|queued| ("queued".to_owned(), show(queued))));
    }
}

fn show(state: impl std::fmt::Debug) -> String {
    format!("{state:?}")
}

/// Calls, crashes, power cuts and clock steps against a map: each byte is one step.
pub fn ops(data: &[u8]) {
    let clock = Arc::new(ManualClock::new(START_MS));
    let mut disk = SimDisk::new();
    let mut model = Model::default();
    let mut world = Some(World::open(&disk, &clock));
    for byte in data.iter().take(300) {
        let key = byte & 0x0f;
        let open = world.take().unwrap_or_else(|| World::open(&disk, &clock));
        match byte >> 4 {
            0..=3 => model.observe(&open.filter, key, 60),
            4 => model.observe(&open.sliding, key + 16, 60),
            5 => {
                let forgotten = must(open.filter.forget([b'k', key]));
                assert!(forgotten.is_applied());
                model.expires_ms.remove(&key);
            }
            6 => model.claim(&open.jobs, key, true),
            7 => model.claim(&open.jobs, key, false),
            8 => model.check(&open),
            9 => must(open.log.maintain()),
            10 => model.pass(&clock, u64::from(key) * 7_000),
            11 => model.pass(&clock, 61_000),
            // The wall clock alone may do what it likes within the slack's reach and beyond.
            12 => clock.set_wall_ms(model.wall_ms.saturating_sub(u64::from(key) * 3_600_000)),
            13 => {
                drop(open);
                continue;
            }
            14 => {
                let killed = disk.after_kill();
                drop(open);
                disk = killed;
                continue;
            }
            _ => {
                let cut = disk.after_power_cut(&mut PowerCut::seeded(u64::from(key)));
                drop(open);
                disk = cut;
                continue;
            }
        }
        world = Some(open);
    }
    let open = world.take().unwrap_or_else(|| World::open(&disk, &clock));
    model.check(&open);
}

struct World {
    log: DedupLog,
    filter: Filter,
    sliding: Filter,
    jobs: Namespace<Repeatable>,
}

impl World {
    fn open(disk: &SimDisk, clock: &Arc<ManualClock>) -> World {
        let log = must(options(clock).open_on(disk.dir()));
        let minute = || small().retention(Duration::from_secs(60));
        World {
            filter: must(log.filter("f", minute())),
            sliding: must(log.filter("s", minute().sliding(true))),
            jobs: must(log.namespace("j", small().retention(Retention::Forever))),
            log,
        }
    }
}

/// What the store must answer. Everything is asked at `Power`: no crash takes anything away.
#[derive(Default)]
struct Model {
    passed_ms: u64,
    wall_ms: u64,
    /// Keys of the filters, those of the sliding one from 16 on, and when they expire.
    expires_ms: BTreeMap<u8, u64>,
    done: BTreeMap<u8, ()>,
}

impl Model {
    fn pass(&mut self, clock: &ManualClock, ms: u64) {
        self.passed_ms += ms;
        self.wall_ms = START_MS + self.passed_ms;
        clock.advance_ms(ms);
        clock.set_wall_ms(self.wall_ms);
    }

    fn is_live(&self, key: u8) -> bool {
        self.expires_ms
            .get(&key)
            .is_some_and(|at| *at > self.passed_ms)
    }

    fn observe(&mut self, filter: &Filter, key: u8, seconds: u64) {
        let observed = must(filter.observe([b'k', key]));
        assert_eq!(
            observed.is_new(),
            !self.is_live(key),
            "key {key} at {} ms",
            self.passed_ms
        );
        if observed.is_new() || key >= 16 {
            let end = (self.passed_ms + seconds * 1000).next_multiple_of(1000);
            self.expires_ms.insert(key, end);
        }
    }

    fn claim(&mut self, jobs: &Namespace<Repeatable>, key: u8, commits: bool) {
        match must(jobs.claim([b'k', key])) {
            ClaimVerdict::Duplicate(_) => assert!(self.done.contains_key(&key), "key {key}"),
            ClaimVerdict::New(mut claim) => {
                assert!(!self.done.contains_key(&key), "key {key} is new again");
                if commits {
                    must(claim.commit(b"").map(drop));
                    self.done.insert(key, ());
                }
            }
            other => {
                // A release that a crash took away leaves a claim without an owner.
                let mut claim = other
                    .claim()
                    .unwrap_or_else(|| panic!("key {key} is stuck"));
                assert!(!self.done.contains_key(&key));
                must(claim.commit(b"").map(drop));
                self.done.insert(key, ());
            }
        }
    }

    fn check(&self, world: &World) {
        for key in 0..32 {
            let filter = if key < 16 {
                &world.filter
            } else {
                &world.sliding
            };
            let found = must(filter.get([b'k', key])) == KeyState::Seen;
            assert_eq!(
                found,
                self.is_live(key),
                "key {key} at {} ms",
                self.passed_ms
            );
        }
        for key in 0..16 {
            let done = matches!(must(world.jobs.get([b'k', key])), KeyState::Done(_));
            assert_eq!(done, self.done.contains_key(&key), "job {key}");
        }
        let empty = world.filter.observe("");
        assert_eq!(
            empty.err().map(|error| error.kind()),
            Some(ErrorKind::Invalid)
        );
    }
}
