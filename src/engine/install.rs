//! Writing the two files of an index run, whole or not at all.
//!
//! Order of steps (each is a crash point): both files under temporary names, piece by piece, the
//! front of each last; sync run and filter; rename both; sync the directory. Nothing lists them
//! yet: what a crash leaves here, the next open removes.

use std::io;
use std::sync::Arc;

use super::catalog::remove_if_there;
use super::merge::file_names;
use crate::error::{Error, ErrorKind, Result};
use crate::format::manifest::RunEntry;
use crate::format::names::FileName;
use crate::format::run::PAGE_BYTES;
use crate::format::to_usize;
use crate::index::active::ActiveTable;
use crate::index::build::{BuildError, Output, RunPlan, build};
use crate::index::run::Run;
use crate::vfs::{Access, Dir, File, Map};

/// The files are written in aligned pieces of so many bytes: where the file system can, it caches
/// each in a large page, and a place in it then costs one miss, not two.
const PIECE_BYTES_MAX: u32 = 2 << 20;
/// Or of so much of a segment: the run of a small one is written in several pieces, too.
const PIECES_PER_SEGMENT: u32 = 16;

/// Takes bytes of one of the files, and their offset.
pub(super) type Write<'a> = dyn FnMut(Output, &[u8], u64) -> io::Result<()> + 'a;

/// Writes the two files that `make` hands on, makes them durable, and opens them.
pub(super) fn install(
    dir: &dyn Dir,
    plan: &RunPlan,
    make: impl FnOnce(&mut Write<'_>) -> std::result::Result<(), BuildError>,
) -> std::result::Result<Run, BuildError> {
    let installed = write_files(dir, plan, make);
    let [run, filter] = match installed {
        Ok(maps) => maps,
        Err(error) => {
            for name in temporary_names(plan) {
                remove_if_there(dir, &name).unwrap_or_default();
            }
            return Err(error);
        }
    };
    Ok(Run::open(run, filter)?)
}

/// Installs the run of one segment: all that its table holds.
pub(super) fn install_table(dir: &dyn Dir, plan: &RunPlan, table: &ActiveTable) -> Result<Run> {
    let installed = install(dir, plan, |write| {
        let entries = table.ascending().map(|(h, offset)| (h, 0, offset));
        build(plan, table.count() as u64, entries, write)
    });
    installed.map_err(|why| match why {
        BuildError::Io(error) => {
            let [run, _] = file_names(run_of(plan));
            Error::io("writing the index failed; the log is intact", error).in_file(run.to_string())
        }
        BuildError::Malformed(why) => Error::new(ErrorKind::Damaged, why.0),
    })
}

fn write_files(
    dir: &dyn Dir,
    plan: &RunPlan,
    make: impl FnOnce(&mut Write<'_>) -> std::result::Result<(), BuildError>,
) -> std::result::Result<[Map; 2], BuildError> {
    let temporary = temporary_names(plan);
    let create = |name: &String| -> io::Result<Arc<dyn File>> {
        remove_if_there(dir, name)?;
        dir.open(name, Access::Create)
    };
    let [run, filter] = &temporary;
    let (run, filter) = (create(run)?, create(filter)?);
    let (mut run_pieces, mut filter_pieces) = (Pieces::new(&run, plan), Pieces::new(&filter, plan));
    make(&mut |to, bytes, at| match to {
        Output::Run => run_pieces.write(bytes, at),
        Output::Filter => filter_pieces.write(bytes, at),
    })?;
    run_pieces.flush()?;
    filter_pieces.flush()?;
    run.sync()?;
    filter.sync()?;
    let names = file_names(run_of(plan)).map(|name| name.to_string());
    for (from, to) in temporary.iter().zip(&names) {
        dir.rename(from, to)?;
    }
    dir.sync()?;
    let [run, filter] = &names;
    let map = |name: &String| dir.open(name, Access::Read)?.map();
    Ok([map(run)?, map(filter)?])
}

/// Gathers what is written to a file into pieces, which begin at multiples of their size.
struct Pieces<'a> {
    file: &'a dyn File,
    piece_bytes: usize,
    /// Where what is gathered begins.
    at: u64,
    gathered: Vec<u8>,
}

impl<'a> Pieces<'a> {
    fn new(file: &'a Arc<dyn File>, plan: &RunPlan) -> Self {
        let piece_bytes = to_usize(plan.segment_bytes / PIECES_PER_SEGMENT)
            .clamp(PAGE_BYTES, to_usize(PIECE_BYTES_MAX));
        Pieces {
            file: file.as_ref(),
            piece_bytes,
            at: 0,
            gathered: Vec::with_capacity(piece_bytes),
        }
    }

    /// Adds bytes behind those before. The front of the file comes last; until then it is zeros.
    fn write(&mut self, mut bytes: &[u8], at: u64) -> io::Result<()> {
        let end = self.at + self.gathered.len() as u64;
        if at < end {
            self.flush()?;
            return self.file.write_at(bytes, at);
        }
        let missing = usize::try_from(at - end).unwrap_or(usize::MAX);
        self.gathered.resize(self.gathered.len() + missing, 0);
        while !bytes.is_empty() {
            let left = self.piece_bytes - self.gathered.len() % self.piece_bytes;
            let (first, rest) = bytes.split_at(left.min(bytes.len()));
            self.gathered.extend_from_slice(first);
            if first.len() == left {
                self.flush()?;
            }
            bytes = rest;
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if !self.gathered.is_empty() {
            self.file.write_at(&self.gathered, self.at)?;
            self.at += self.gathered.len() as u64;
            self.gathered.clear();
        }
        Ok(())
    }
}

fn run_of(plan: &RunPlan) -> RunEntry {
    RunEntry {
        lo: plan.lo,
        hi: plan.hi,
        generation: plan.generation,
    }
}

fn temporary_names(plan: &RunPlan) -> [String; 2] {
    let RunEntry { lo, hi, generation } = run_of(plan);
    [false, true].map(|filter| {
        let name = FileName::Temporary {
            lo,
            hi,
            generation,
            filter,
        };
        name.to_string()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::filter::FilterKind;
    use crate::format::run::HASH_BITS;
    use crate::vfs::sim::{Fault, FaultKind, SimDisk};

    const KEYS_COUNT: u64 = 12_000;
    const SEGMENT_BYTES: u32 = 256 * 1024;

    fn plan() -> RunPlan {
        RunPlan {
            store: [1; 16],
            hash_key_id: 2,
            lo: 3,
            hi: 3,
            generation: 0,
            segment_bytes: SEGMENT_BYTES,
            superseded_count: 0,
            segments_count: 1,
            times: Vec::new(),
            filter: FilterKind::Bloom,
        }
    }

    fn hash(n: u64) -> u64 {
        n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - HASH_BITS)
    }

    fn table() -> ActiveTable {
        let mut table = ActiveTable::new(4 * SEGMENT_BYTES);
        for n in 1..=KEYS_COUNT {
            table.insert(hash(n), u32::try_from(n * 8).unwrap());
        }
        table
    }

    fn is_whole(run: &Run) -> bool {
        let mut places = Vec::new();
        run.check_whole().is_ok()
            && (1..=KEYS_COUNT).all(|n| {
                places.clear();
                run.may_contain(hash(n)) == Ok(true)
                    && run.find(hash(n), &mut places).is_ok()
                    && places == [(3, u32::try_from(n * 8).unwrap())]
            })
    }

    #[test]
    fn both_files_are_written_in_pieces_and_synced_before_either_has_its_name() {
        let disk = SimDisk::new();
        let run = install_table(disk.dir().as_ref(), &plan(), &table()).unwrap();
        assert!(is_whole(&run));
        let log = disk.step_log();
        let named = log.iter().position(|step| step.starts_with("rename"));
        let (before, behind) = log.split_at(named.unwrap());
        for [kind, writes_min] in [["idx", "5"], ["flt", "3"]] {
            let of = |step: &&String, what: &str| step.starts_with(what) && step.contains(kind);
            let writes: Vec<_> = before.iter().filter(|step| of(step, "write")).collect();
            assert!(writes.len() >= writes_min.parse().unwrap(), "{log:?}");
            let offsets = writes.iter().map(|write| {
                let (_, place) = write.rsplit_once(' ').unwrap();
                place.split_once('+').unwrap().0.parse::<usize>().unwrap()
            });
            let offsets: Vec<_> = offsets.collect();
            let piece_bytes = to_usize(SEGMENT_BYTES / PIECES_PER_SEGMENT);
            let is_aligned = offsets.iter().all(|at| at.is_multiple_of(piece_bytes));
            assert!(is_aligned && offsets.ends_with(&[0]), "{log:?}");
            let last = before.iter().rfind(|step| step.contains(kind)).unwrap();
            assert!(last.starts_with("sync"), "{log:?}");
        }
        assert!(
            behind.len() == 3 && behind[2].starts_with("sync"),
            "{log:?}"
        );
    }

    /// Story: when the rename of a merged run failed, its two files lay there until the next open.
    #[test]
    fn whichever_step_fails_nothing_is_left_half_and_the_next_attempt_succeeds() {
        let (plan, table) = (plan(), table());
        let whole = SimDisk::new();
        install_table(whole.dir().as_ref(), &plan, &table).unwrap();
        for step in 0..whole.steps() {
            for (fault, kind) in [
                (FaultKind::Io, ErrorKind::Io),
                (FaultKind::NoSpace, ErrorKind::Full),
            ] {
                let disk = SimDisk::new();
                disk.fail(Fault::once(step, fault));
                let error = install_table(disk.dir().as_ref(), &plan, &table).unwrap_err();
                let what = &whole.step_log()[usize::try_from(step).unwrap()];
                assert_eq!(error.kind(), kind, "{what}");
                let names = disk.file_names();
                let is_half =
                    |name: &String| FileName::parse(name).is_none() || name.ends_with(".tmp");
                assert!(!names.iter().any(is_half), "{what}: {names:?}");
                let run = install_table(disk.dir().as_ref(), &plan, &table).unwrap();
                assert!(is_whole(&run), "{what}");
                for name in whole.file_names() {
                    assert_eq!(disk.read_file(&name), whole.read_file(&name), "{what}");
                }
            }
        }
    }

    #[test]
    fn a_stop_at_any_step_leaves_nothing_that_looks_whole_and_is_not() {
        let (plan, table) = (plan(), table());
        let whole = SimDisk::new();
        install_table(whole.dir().as_ref(), &plan, &table).unwrap();
        for step in 0..whole.steps() {
            let disk = SimDisk::new();
            disk.stop_at(step);
            assert!(install_table(disk.dir().as_ref(), &plan, &table).is_err());
            for disk in [
                disk.after_kill(),
                disk.after_power_cut(&mut crate::vfs::sim::PowerCut::drop_all()),
                disk.after_power_cut(&mut crate::vfs::sim::PowerCut::seeded(step)),
            ] {
                for name in file_names(run_of(&plan)).map(|name| name.to_string()) {
                    let found = disk.read_file(&name);
                    assert!(
                        found.is_none() || found == whole.read_file(&name),
                        "{step} {name}"
                    );
                }
                let run = install_table(disk.dir().as_ref(), &plan, &table).unwrap();
                assert!(is_whole(&run));
            }
        }
    }
}
