//! Faults that the tests must notice: a rig that cannot fail proves nothing.
//!
//! Each is a change of the source, made in a copy and switched on alone. A text that is not there
//! any more is an error: the fault has to be written anew, not forgotten.

use std::fmt::Write as _;

use super::switched::{Copy, Fate};
use crate::context::{Context, Counts, Fallible, Mode, Outcome};

/// Faults are numbered from here on; the calls that are left out have the numbers below.
const FIRST: u32 = 1001;
/// Of the list, those that every run has to notice.
const SANITY_COUNT: u64 = 7;

/// One fault.
struct Fault {
    name: &'static str,
    /// What the changed code does not keep any more.
    breaks: &'static str,
    /// File, text, and what stands there instead; `FAULT` becomes the question whether it is on.
    edits: &'static [(&'static str, &'static str, &'static str)],
    /// The test that is tried first; others may notice as well.
    noticed_by: &'static str,
}

/// The seven that every rig has to notice, then those of claims, recovery, expiry and merging.
const FAULTS: &[Fault] = &[
    Fault {
        name: "a flush of a file does nothing",
        breaks: "P1",
        edits: &[
            (
                "src/vfs/sim.rs",
                "self.dir.state().sync(self.id, &self.name)",
                "if FAULT { return Ok(()); }\n        self.dir.state().sync(self.id, &self.name)",
            ),
            (
                "src/vfs/disk.rs",
                "self.0.sync_data()",
                "if FAULT { return Ok(()); }\n        self.0.sync_data()",
            ),
        ],
        noticed_by: "crash::",
    },
    Fault {
        name: "a flush of the directory does nothing",
        breaks: "I7",
        edits: &[
            (
                "src/vfs/sim.rs",
                "self.state().sync_dir()",
                "if FAULT { return Ok(()); }\n        self.state().sync_dir()",
            ),
            (
                "src/vfs/disk.rs",
                "sync_dir(&self.fd)\n",
                "if FAULT { return Ok(()); }\n        sync_dir(&self.fd)\n",
            ),
        ],
        noticed_by: "crash::",
    },
    Fault {
        name: "an answer does not wait for its flush",
        breaks: "P1, I3",
        edits: &[(
            "src/engine/append.rs",
            "        self.waited(self.syncer.wait(end, failures, || self.lead(end, end_ms)))",
            "        if FAULT {\n            return Ok(());\n        }\n        \
             self.waited(self.syncer.wait(end, failures, || self.lead(end, end_ms)))",
        )],
        noticed_by: "crash::",
    },
    Fault {
        name: "an open trusts the page cache",
        breaks: "P2, I9",
        edits: &[(
            "src/engine/settle.rs",
            "    if file.holds(unproven",
            "    if FAULT || file.holds(unproven",
        )],
        noticed_by: "crash::",
    },
    Fault {
        name: "the log is cut at the first bad checksum, also where it was durable",
        breaks: "P5, I8",
        edits: &[(
            "src/engine/recovery.rs",
            "    if proven > end {",
            "    if !FAULT && proven > end {",
        )],
        noticed_by: "damage::",
    },
    Fault {
        name: "a frame's length is believed",
        breaks: "P10",
        edits: &[(
            "src/format/record.rs",
            "        let frame = bytes\n            .get(..len)",
            "        let frame = bytes\n            .get(..if FAULT { assert!(len <= bytes.len()); len } else { len })",
        )],
        noticed_by: "lib",
    },
    Fault {
        name: "the replay goes on behind a hole",
        breaks: "P4, I8",
        edits: &[(
            "src/log/replay.rs",
            "                self.not_understood = why == NEWER;\n                None",
            "                while FAULT && self.at + ALIGN < self.bytes.len() {\n                    \
             self.at += ALIGN;\n                    if let Ok(Some(item)) = self.read() {\n                        \
             return Some(item);\n                    }\n                }\n                \
             self.not_understood = why == NEWER;\n                None",
        )],
        noticed_by: "lib",
    },
    Fault {
        name: "a record with parts is taken for one without",
        breaks: "P4",
        edits: &[(
            "src/format/record.rs",
            "        let is_bare = !key.is_empty()\n",
            "        let is_bare = FAULT || !key.is_empty()\n",
        )],
        noticed_by: "lib",
    },
    Fault {
        name: "a file is read whatever its size",
        breaks: "P10",
        edits: &[(
            "src/vfs/mod.rs",
            ".filter(|_| size <= bytes_max)",
            ".filter(|_| FAULT || size <= bytes_max)",
        )],
        noticed_by: "lib",
    },
    Fault {
        name: "a search compares hashes alone",
        breaks: "I4",
        edits: &[(
            "src/engine/lookup.rs",
            "if record.namespace != self.namespace || record.key != self.key {",
            "if !FAULT && (record.namespace != self.namespace || record.key != self.key) {",
        )],
        noticed_by: "lib",
    },
    Fault {
        name: "a replay compares hashes alone",
        breaks: "I4",
        edits: &[(
            "src/engine/recovery.rs",
            "same.is_ok_and(|r| r.namespace == record.namespace && r.key == record.key)",
            "same.is_ok_and(|r| FAULT || r.namespace == record.namespace && r.key == record.key)",
        )],
        noticed_by: "lib",
    },
    Fault {
        name: "a search goes on behind a deletion",
        breaks: "I4",
        edits: &[(
            "src/engine/lookup.rs",
            "        let older = Older::of(&record, position);\n        Ok(Some(Hit {",
            "        if FAULT && record.kind == crate::format::record::Kind::Forgotten {\n\
             return Ok(None);\n        }\n\
             let older = Older::of(&record, position);\n        Ok(Some(Hit {",
        )],
        noticed_by: "api::",
    },
    Fault {
        name: "an append does not check that the search is still right",
        breaks: "I2",
        edits: &[(
            "src/engine/lookup.rs",
            "        self.active == core.writer.segment.id\n",
            "        FAULT || self.active == core.writer.segment.id\n",
        )],
        noticed_by: "concurrent::",
    },
    Fault {
        name: "a record that supersedes another one does not outlive it",
        breaks: "I6b",
        edits: &[(
            "src/engine/core.rs",
            "        let older = older?;\n        let id",
            "        let older = older.filter(|_| !FAULT)?;\n        let id",
        )],
        noticed_by: "crash::",
    },
    Fault {
        name: "nothing is carried over",
        breaks: "I6a",
        edits: &[(
            "src/engine/carry.rs",
            "            self.copy_all(upkeep, &records)?;\n",
            "            if !FAULT { self.copy_all(upkeep, &records)?; }\n",
        )],
        noticed_by: "api::",
    },
    Fault {
        name: "a record is carried over although it is not its key's newest",
        breaks: "I6c",
        edits: &[(
            "src/engine/carry.rs",
            "let is_newest = hit.is_some_and(|hit| hit.older.position == position);",
            "let is_newest = FAULT || hit.is_some_and(|hit| hit.older.position == position);",
        )],
        noticed_by: "crash::",
    },
    Fault {
        name: "who has slept goes on behind segments that are gone",
        breaks: "I6",
        edits: &[(
            "src/engine/follow.rs",
            "    let is_gapless = known",
            "    let is_gapless = FAULT || known",
        )],
        noticed_by: "shared::",
    },
    Fault {
        name: "a lease ends where another opener has carried its claim over",
        breaks: "I13",
        edits: &[(
            "src/engine/follow.rs",
            "granted.get(at).or_else(|| copied(at))",
            "granted.get(at).or_else(|| copied(at).filter(|_| !FAULT))",
        )],
        noticed_by: "shared::",
    },
    Fault {
        name: "what the footers list as unsettled is not read",
        breaks: "I6a",
        edits: &[(
            "src/engine/recovery.rs",
            "    for offset in footer_offsets(sealed)? {",
            "    if FAULT { return Ok(records); }\n    for offset in footer_offsets(sealed)? {",
        )],
        noticed_by: "api::",
    },
    Fault {
        name: "a segment goes although it has not expired",
        breaks: "P8, I12",
        edits: &[(
            "src/engine/sweep.rs",
            "if DropTime::from_disk(sealed.entry.drop_at_s).has_come(trusted_ms) {",
            "if FAULT || DropTime::from_disk(sealed.entry.drop_at_s).has_come(trusted_ms) {",
        )],
        noticed_by: "api::",
    },
    Fault {
        name: "a dropped segment's number is forgotten with the drop",
        breaks: "I7",
        edits: &[(
            "src/engine/sweep.rs",
            "            manifest.segments.retain(|s| !gone.contains(&s.id));",
            "            if !FAULT { manifest.segments.retain(|s| !gone.contains(&s.id)); }",
        )],
        noticed_by: "api::",
    },
    Fault {
        name: "any epoch may change a claim",
        breaks: "I13",
        edits: &[(
            "src/model/claim.rs",
            "    entry.filter(|e| e.epoch() == epoch && (e.is_pending()",
            "    entry.filter(|e| (FAULT || e.epoch() == epoch) && (e.is_pending()",
        )],
        noticed_by: "api::",
    },
    Fault {
        name: "fingerprints are not compared",
        breaks: "the contract of `Mismatch`",
        edits: &[(
            "src/model/claim.rs",
            "        && stored != asked\n",
            "        && stored != asked\n        && !FAULT\n",
        )],
        noticed_by: "api::",
    },
    Fault {
        name: "an effect that must not be repeated is granted again after its start",
        breaks: "the contract of `NonRepeatable`",
        edits: &[(
            "src/model/claim.rs",
            "        NamespaceKind::NonRepeatable => ClaimDecision::Settle {\n            entry: in_doubt(entry, env),",
            "        NamespaceKind::NonRepeatable if !FAULT => ClaimDecision::Settle {\n            entry: in_doubt(entry, env),",
        )],
        noticed_by: "api::",
    },
    Fault {
        name: "a living owner does not exclude others",
        breaks: "the contract of `Busy`",
        edits: &[(
            "src/model/claim.rs",
            "    if left_ms > 0 {\n",
            "    if !FAULT && left_ms > 0 {\n",
        )],
        noticed_by: "api::",
    },
    Fault {
        name: "a second commit is not compared with the first",
        breaks: "the contract of `Conflict`",
        edits: &[(
            "src/model/claim.rs",
            "        let same = outcome.map_or(dropped, |o| !dropped && o == done.outcome);",
            "        let same = FAULT || outcome.map_or(dropped, |o| !dropped && o == done.outcome);",
        )],
        noticed_by: "api::",
    },
    Fault {
        name: "a read does not ask whether the record has expired",
        breaks: "P8, I12",
        edits: &[(
            "src/engine/update.rs",
            "            || entry.expires_at_s == 0\n",
            "            || FAULT || entry.expires_at_s == 0\n",
        )],
        noticed_by: "api::",
    },
    Fault {
        name: "the wall clock is believed whatever it says",
        breaks: "P8, I12",
        edits: &[(
            "src/clock.rs",
            "        let due = confirmed || lead <= slack_left(&state);",
            "        let due = FAULT || confirmed || lead <= slack_left(&state);",
        )],
        noticed_by: "clock::",
    },
    Fault {
        name: "a merged run leaves out the newest of its inputs",
        breaks: "I5",
        edits: &[(
            "src/index/merge.rs",
            "        if is_live(plan.lo.wrapping_add(entry.1)) {",
            "        if is_live(plan.lo.wrapping_add(entry.1)) && !(FAULT && entry.1 > 0 && plan.lo + entry.1 == plan.hi) {",
        )],
        noticed_by: "lib",
    },
    Fault {
        name: "a filter is built without one of its keys",
        breaks: "I5",
        edits: &[(
            "src/index/build.rs",
            "                Filter::Bloom(filter) => filter.insert(h, write)?,",
            "                Filter::Bloom(filter) => {\n                    \
             if !(FAULT && self.hashes_count == 1) { filter.insert(h, write)?; }\n                }",
        )],
        noticed_by: "lib",
    },
    Fault {
        name: "a run is not asked for its pages' checksums",
        breaks: "P5",
        edits: &[(
            "src/index/run.rs",
            "(!known).then_some(self.seed)",
            "(!known && !FAULT).then_some(self.seed)",
        )],
        noticed_by: "damage::",
    },
    Fault {
        name: "an open does not raise the generation of stamps",
        breaks: "I13",
        edits: &[(
            "src/stamp.rs",
            "    let next = reserved.saturating_add(1);",
            "    if FAULT { return reserved.saturating_sub(16).max(1); }\n    let next = reserved.saturating_add(1);",
        )],
        noticed_by: "lib",
    },
    Fault {
        name: "the reserved generation is not written down",
        breaks: "I13",
        edits: &[(
            "src/engine/recovery.rs",
            "        manifest.generation_reserved = parts.reserved;",
            "        if !FAULT { manifest.generation_reserved = parts.reserved; }",
        )],
        noticed_by: "clock::",
    },
    Fault {
        name: "a poisoned store recovers by itself",
        breaks: "P7, I9",
        edits: &[(
            "src/engine/poison.rs",
            "        self.0.set(cause).is_ok()",
            "        !FAULT && self.0.set(cause).is_ok()",
        )],
        noticed_by: "api::",
    },
    Fault {
        name: "a failed write leaves its places in the table",
        breaks: "I2",
        edits: &[(
            "src/engine/core.rs",
            "            self.table.undo(undo.slot);",
            "            if !FAULT { self.table.undo(undo.slot); }",
        )],
        noticed_by: "crash::",
    },
    Fault {
        name: "a failed write leaves its bytes in the log",
        breaks: "P3, I8",
        edits: &[(
            "src/log/writer.rs",
            "        let at = u64::from(self.written);\n        let file = self.segment.file()?;\n",
            "        if FAULT { return Ok(()); }\n        \
             let at = u64::from(self.written);\n        let file = self.segment.file()?;\n",
        )],
        noticed_by: "crash::",
    },
    Fault {
        name: "a failed write does not reach those who wait for it",
        breaks: "P3",
        edits: &[(
            "src/log/sync.rs",
            "    failure.is_some_and(|failure| target > failure.kept)",
            "    failure.is_some_and(|failure| !FAULT && target > failure.kept)",
        )],
        noticed_by: "lib",
    },
    Fault {
        name: "a record counts as durable because its place does",
        breaks: "P1, P3",
        edits: &[(
            "src/engine/append.rs",
            "    fn ensure_durable(&self, end: Position, failures: FailureCount) -> Result<()> {\n",
            "    fn ensure_durable(&self, end: Position, failures: FailureCount) -> Result<()> {\n        \
             if FAULT && self.syncer.durable() >= end {\n            return Ok(());\n        }\n",
        )],
        noticed_by: "lib",
    },
    Fault {
        name: "a flush beside a failing one is believed",
        breaks: "P7, I9",
        edits: &[(
            "src/engine/append.rs",
            "let _one_at_a_time = self.syncer.alone();\n        \
             if let Some(error) = self.poison.error() {",
            "let _one_at_a_time = (!FAULT).then(|| self.syncer.alone());\n        \
             if let Some(error) = self.poison.error().filter(|_| !FAULT) {",
        )],
        noticed_by: "order::",
    },
    Fault {
        name: "what lies behind the end of the log is left there",
        breaks: "P4, I8",
        edits: &[(
            "src/engine/settle.rs",
            "        if junk > 0 {\n",
            "        if !FAULT && junk > 0 {\n",
        )],
        noticed_by: "order::",
    },
    Fault {
        name: "a sync mark says more than was flushed",
        breaks: "P4",
        edits: &[(
            "src/engine/core.rs",
            "                durable: durable.get(),\n",
            "                durable: if FAULT { self.writer.end().get() } else { durable.get() },\n",
        )],
        noticed_by: "crash::",
    },
    Fault {
        name: "a recycled file keeps the number that makes its old bytes invalid",
        breaks: "I8",
        edits: &[(
            "src/engine/prepare.rs",
            "        let nonce = random_u32(self.dir.as_ref())?;",
            "        let nonce = if FAULT { self.core().writer.segment.nonce } else { random_u32(self.dir.as_ref())? };",
        )],
        noticed_by: "order::",
    },
    Fault {
        name: "a file is recycled while somebody reads it",
        breaks: "the first condition of `vfs/map.rs`",
        edits: &[(
            "src/engine/prepare.rs",
            "                && Arc::strong_count(sealed) == 1\n                && Arc::strong_count(&sealed.segment) == 1\n                && sealed.former.strong_count() == 0\n",
            "                && (FAULT || Arc::strong_count(sealed) == 1\n                && Arc::strong_count(&sealed.segment) == 1\n                && sealed.former.strong_count() == 0)\n",
        )],
        noticed_by: "lib",
    },
    Fault {
        name: "a hint is written of what is not durable",
        breaks: "I1, I8",
        edits: &[(
            "src/engine/hint.rs",
            "        if end != durable\n",
            "        if (!FAULT && end != durable)\n",
        )],
        noticed_by: "crash::upkeep::hints",
    },
    Fault {
        name: "a push of time by the wall clock is not durable before it decides",
        breaks: "P8",
        edits: &[(
            "src/engine/mod.rs",
            "        self.edit_manifest_at(Some(confirmed), |_| ())?;",
            "        if let (true, Some(push)) = \
             (FAULT, self.time.push_due(self.clock(), confirmed)) {\n            \
             self.time.push(push, confirmed);\n            return Ok(());\n        }\n        \
             self.edit_manifest_at(Some(confirmed), |_| ())?;",
        )],
        noticed_by: "clock::",
    },
    Fault {
        name: "an open does not finish a segment that was being written anew",
        breaks: "I10",
        edits: &[(
            "src/engine/recovery.rs",
            "    finish_writing_anew(dir.as_ref(), &manifest, hash.id())?;",
            "    if !FAULT {\n        finish_writing_anew(dir.as_ref(), &manifest, hash.id())?;\n    }",
        )],
        noticed_by: "crash::faults::",
    },
    Fault {
        name: "a hint is believed without a look at the log",
        breaks: "I1",
        edits: &[(
            "src/engine/hint.rs",
            " || !ends_a_frame(&hint, segment, image) {",
            " || !FAULT && !ends_a_frame(&hint, segment, image) {",
        )],
        noticed_by: "order::",
    },
    Fault {
        name: "a second opener gets in",
        breaks: "P9",
        edits: &[(
            "src/vfs/sim/locks.rs",
            "        if let Some(other) = other {",
            "        if let Some(other) = other.filter(|_| !FAULT) {",
        )],
        noticed_by: "api::",
    },
    Fault {
        name: "a store is made anew where only its manifest is missing",
        breaks: "I7",
        edits: &[(
            "src/engine/open.rs",
            "        Some((_, true)) => Err(manifest_missing(name)),",
            "        Some((_, true)) if !FAULT => Err(manifest_missing(name)),",
        )],
        noticed_by: "damage::",
    },
    Fault {
        name: "a close says that all is durable whatever is",
        breaks: "P4",
        edits: &[(
            "src/engine/background.rs",
            "        let clean = self.syncer.durable() == end;",
            "        let clean = FAULT || self.syncer.durable() == end;",
        )],
        noticed_by: "lib",
    },
    Fault {
        name: "what commits with a key has checksums of its own only",
        breaks: "I8",
        edits: &[(
            "src/engine/group.rs",
            "        let is_group = ready.len() > 1;",
            "        let is_group = ready.len() > 1 && !FAULT;",
        )],
        noticed_by: "crash::attached::",
    },
    Fault {
        name: "what is attached is forgotten with its segment",
        breaks: "I6",
        edits: &[(
            "src/format/record.rs",
            "self.is_open_claim() || self.is_attached()",
            "self.is_open_claim() || self.is_attached() && !FAULT",
        )],
        noticed_by: "attached::",
    },
    Fault {
        name: "a cell is written whatever its version is",
        breaks: "I13",
        edits: &[(
            "src/model/cell.rs",
            "current.is_some_and(|cell| cell.epoch() == version),",
            "current.is_some_and(|cell| FAULT || cell.epoch() == version),",
        )],
        noticed_by: "attached::",
    },
    Fault {
        name: "an outbox entry loses its place when it is carried over",
        breaks: "I6",
        edits: &[(
            "src/engine/group.rs",
            "    match origin_of(entry) {",
            "    match if FAULT { 0 } else { origin_of(entry) } {",
        )],
        noticed_by: "attached::",
    },
    Fault {
        name: "a write that is taken back takes the outbox entry from the queue",
        breaks: "I2",
        edits: &[(
            "src/engine/group.rs",
            "planned.entry.kind == Kind::Queued && origin_of(&planned.entry) == 0",
            "planned.entry.kind == Kind::Queued && (FAULT || origin_of(&planned.entry) == 0)",
        )],
        noticed_by: "attached::",
    },
    Fault {
        name: "a number is done when another one is",
        breaks: "I4",
        edits: &[(
            "src/model/watermark.rs",
            "number < self.next || before.is_some_and(|(_, last)| number <= *last)",
            "number < self.next || before.is_some_and(|(_, last)| FAULT || number <= *last)",
        )],
        noticed_by: "lib",
    },
    Fault {
        name: "half a frame of a dead process stays in the log",
        breaks: "P4, shared",
        edits: &[(
            "src/engine/follow.rs",
            ".and_then(|file| file.write_at(&vec![0; bytes], at));",
            ".and_then(|file| if FAULT { Ok(()) } else { file.write_at(&vec![0; bytes], at) });",
        )],
        noticed_by: "shared::",
    },
    Fault {
        name: "the files of other processes are not followed",
        breaks: "I2, shared",
        edits: &[(
            "src/engine/follow.rs",
            "            self.with_listed(|manifest| self.follow_files(manifest))?;",
            "            if !FAULT {\n                \
             self.with_listed(|manifest| self.follow_files(manifest))?;\n            }",
        )],
        noticed_by: "shared::",
    },
    Fault {
        name: "a dead owner is taken for alive",
        breaks: "P5, shared",
        edits: &[(
            "src/engine/shared.rs",
            "        !gone\n",
            "        FAULT || !gone\n",
        )],
        noticed_by: "shared::",
    },
    Fault {
        name: "a living owner is taken for dead",
        breaks: "P5, shared",
        edits: &[(
            "src/engine/shared.rs",
            "        if dead().contains(&generation) {",
            "        if FAULT || dead().contains(&generation) {",
        )],
        noticed_by: "shared::",
    },
    Fault {
        name: "a flush that its process did not survive is trusted",
        breaks: "P1, shared",
        edits: &[(
            "src/engine/turn.rs",
            "        if cells.flushing {",
            "        if cells.flushing && !FAULT {",
        )],
        noticed_by: "shared::",
    },
    Fault {
        name: "what poisons one process is not told to the others",
        breaks: "P3, shared",
        edits: &[(
            "src/engine/turn.rs",
            "        if let Some(cause) = &cells.poison {",
            "        if let Some(cause) = cells.poison.as_ref().filter(|_| !FAULT) {",
        )],
        noticed_by: "shared::",
    },
    Fault {
        name: "stamps of other processes are not followed",
        breaks: "I5, shared",
        edits: &[(
            "src/engine/follow.rs",
            "            core.stamps.follow(Stamp::from_u64(cells.stamp));",
            "            if !FAULT {\n                \
             core.stamps.follow(Stamp::from_u64(cells.stamp));\n            }",
        )],
        noticed_by: "shared::",
    },
    Fault {
        name: "who has followed half-way goes on as if it were all",
        breaks: "I2, shared",
        edits: &[(
            "src/engine/follow.rs",
            "        // From here on there is no way back but to start again.\n        \
             core.is_behind = true;",
            "        core.is_behind = !FAULT;",
        )],
        noticed_by: "shared::",
    },
    Fault {
        name: "what others append is read before it is told",
        breaks: "I2, shared",
        edits: &[(
            "src/engine/follow.rs",
            "        let all = to_usize(end - at);",
            "        let all = if FAULT { CHUNK_BYTES } else { to_usize(end - at) };",
        )],
        noticed_by: "lib",
    },
    Fault {
        name: "a hint of two moments has a checksum",
        breaks: "I8",
        edits: &[(
            "src/engine/hint.rs",
            "                if is_stale.get() {",
            "                if !FAULT && is_stale.get() {",
        )],
        noticed_by: "lib engine::hint",
    },
    Fault {
        name: "an edit that a dead one has not made durable is built upon",
        breaks: "I6, shared",
        edits: &[(
            "src/engine/mod.rs",
            "        if shared.read()?.edit < edit {",
            "        if !FAULT && shared.read()?.edit < edit {",
        )],
        noticed_by: "shared::left",
    },
    Fault {
        name: "a reader keeps what a recovery has not found",
        breaks: "I1, shared",
        edits: &[(
            "src/engine/reader.rs",
            "            if reader.epoch.swap(seen.epoch, Ordering::Relaxed) != seen.epoch {",
            "            if reader.epoch.swap(seen.epoch, Ordering::Relaxed) != seen.epoch && !FAULT {",
        )],
        noticed_by: "reader::",
    },
    Fault {
        name: "a reader reads what nobody has told",
        breaks: "I2, shared",
        edits: &[(
            "src/engine/reader.rs",
            "            std::cmp::Ordering::Equal => image.truncate(to_usize(told.offset())),",
            "            std::cmp::Ordering::Equal => \
             image.truncate(if FAULT { image.len() } else { to_usize(told.offset()) }),",
        )],
        noticed_by: "reader::",
    },
    Fault {
        name: "a reader does not look whether somebody recovers the store",
        breaks: "I2, shared",
        edits: &[(
            "src/engine/reader.rs",
            "        Ok(locked.then(|| Presence::Still(Some(Held::new(members)))))",
            "        Ok((locked || FAULT).then(|| Presence::Still(Some(Held::new(members)))))",
        )],
        noticed_by: "reader::",
    },
    Fault {
        name: "who could not follow a roll goes on in the segment before it",
        breaks: "I2, shared",
        edits: &[(
            "src/engine/follow.rs",
            "        // Behind a seal nothing is appended, whatever fails here.\n        \
             core.is_behind = true;",
            "        core.is_behind = !FAULT;",
        )],
        noticed_by: "shared::",
    },
];

/// Makes all faults in the copy, each behind its own switch.
pub(crate) fn make_all(copy: &Copy) -> Fallible<()> {
    for (number, fault) in (FIRST..).zip(FAULTS) {
        for (file, from, to) in fault.edits {
            let to = to.replace("FAULT", &format!("crate::fault_is({number})"));
            copy.replace(file, from, &to)
                .map_err(|error| format!("fault \"{}\": {error}", fault.name))?;
        }
    }
    Ok(())
}

/// Switches one fault on after the other. `--count` says how many of the list.
pub(crate) fn run(context: &Context) -> Fallible<Outcome> {
    let (copy, _) = Copy::build_with_faults(context)?;
    if context.mode == Mode::Full {
        copy.check_sound()?;
    }
    let count = context.count(SANITY_COUNT, FAULTS.len() as u64);
    let mut counts = Counts::default();
    let mut table = String::from("| Fault | Breaks | Noticed by |\n|---|---|---|\n");
    let mut survived = Vec::new();
    for ((number, fault), _) in (FIRST..).zip(FAULTS).zip(0..count) {
        let fate = copy.fate(number, Some(fault.noticed_by))?;
        println!("  {}: {}", fault.name, fate.cell());
        counts.check(fate != Fate::Survived);
        if fate == Fate::Survived {
            survived.push(fault.name);
        }
        writeln!(
            table,
            "| {} | {} | {} |",
            fault.name,
            fault.breaks,
            fate.cell()
        )?;
    }
    println!("\n{table}");
    let what = format!("faults that no test notices: {}", survived.join("; "));
    Ok(Outcome::judge(counts, what))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::repository_root;

    #[test]
    fn every_text_that_a_fault_changes_is_there_once() {
        let mut stale = Vec::new();
        for fault in FAULTS {
            for (file, from, _) in fault.edits {
                let text = std::fs::read_to_string(repository_root().join(file)).unwrap();
                if text.matches(from).count() != 1 {
                    stale.push(format!("{}: {file}:\n{from}", fault.name));
                }
            }
        }
        assert!(stale.is_empty(), "{}", stale.join("\n\n"));
    }
}
