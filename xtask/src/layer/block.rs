//! Power cuts on real file systems: ext4, xfs and btrfs recover an image that holds what was
//! flushed and any part of what was not; then the store recovers, and every answer is judged.

use std::path::PathBuf;

use crate::context::{Context, Counts, Fallible, Outcome};
use crate::process::{How, has, must};
use crate::rig::crash::{Builder, Cut, draw};
use crate::rig::device::{Device, Event};
use crate::rig::file_systems;
use crate::rig::guard::Guard;
use crate::rig::random::Random;
use crate::rig::subject::{self, Store, Subject, store_on};
use crate::rig::volume::{Kind, Mounted, text};

/// A workload is cut at so many moments; then another one is recorded.
const STATES_PER_WORKLOAD: u64 = 150;
const CALLS: u64 = 150;

pub(crate) fn run(context: &Context) -> Fallible<Outcome> {
    let (mut all, mut whats) = (Counts::default(), Vec::new());
    let kinds = file_systems(context, "block");
    if kinds.is_empty() {
        return Ok(Outcome::skipped("no file system can be used"));
    }
    if context.sanity && !has("strace") {
        return Ok(Outcome::skipped("--sanity needs strace"));
    }
    for kind in kinds {
        let store = Store {
            calls: CALLS,
            unflushed: context.sanity,
        };
        let states = context.count(20, 300);
        let tally = on(context, kind, &store, states)?;
        println!("{}", tally.line(kind));
        all.add(&format!("{}-states", kind.name()), tally.states);
        all.add("workloads", tally.workloads);
        all.add("dropped-pieces", tally.dropped);
        all.add("kept-pieces", tally.kept);
        all.add("unmountable", tally.unmountable);
        if context.sanity {
            // The rig is right if it sees the lost flushes.
            all.check(tally.violations > 0);
            all.add("violations-seen", tally.violations);
            continue;
        }
        all.passed += tally.states - tally.violations;
        all.failed += tally.violations;
        whats.extend(tally.whats);
    }
    Ok(Outcome::judge(
        all,
        format!("seed {}: {}", context.seed, whats.join("\n  ")),
    ))
}

/// What became of a subject on one file system.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) states: u64,
    pub(crate) workloads: u64,
    pub(crate) violations: u64,
    /// Of the violations: wrong answers, refusals, panics and signals, hangs.
    pub(crate) wrong: u64,
    pub(crate) refused: u64,
    pub(crate) crashed: u64,
    pub(crate) hung: u64,
    /// The file system itself could not be mounted; nothing was judged.
    pub(crate) unmountable: u64,
    pub(crate) kept: u64,
    pub(crate) dropped: u64,
    pub(crate) whats: Vec<String>,
}

impl Tally {
    /// Counts a check that ended like this.
    pub(crate) fn count(&mut self, how: How) {
        match how {
            How::Code(0) => return,
            How::Code(1) => self.wrong += 1,
            How::Code(101) | How::Signal(_) => self.crashed += 1,
            How::Code(_) => self.refused += 1,
            How::Hung => self.hung += 1,
        }
        self.violations += 1;
    }

    fn line(&self, kind: Kind) -> String {
        format!(
            "  {}: {} states of {} workloads, {} violations ({} wrong, {} refused, {} crashed, \
             {} hung), {} pieces kept and {} dropped, {} not mountable",
            kind.name(),
            self.states,
            self.workloads,
            self.violations,
            self.wrong,
            self.refused,
            self.crashed,
            self.hung,
            self.kept,
            self.dropped,
            self.unmountable
        )
    }
}

/// Cuts the power of a subject on one file system at so many moments.
pub(crate) fn on(
    context: &Context,
    kind: Kind,
    subject: &dyn Subject,
    states: u64,
) -> Fallible<Tally> {
    let mut tally = Tally::default();
    while tally.states < states && !context.is_over() {
        let guard = Guard::new(context.scratch())?;
        let seed = context.seed + tally.workloads;
        let (base, events) = record(&guard, kind, subject, seed)?;
        tally.workloads += 1;
        let mut random = Random::new(seed ^ kind as u64);
        let count = STATES_PER_WORKLOAD.min(states - tally.states);
        // Some more, in the place of those that the file system itself does not survive.
        let cuts = draw(&events, count + count / 8 + 1, &mut random);
        let mut builder = Builder::new(&base, &events)?;
        let enough = tally.states + count;
        for cut in &cuts {
            if tally.states == enough || context.is_over() {
                break;
            }
            judge(&guard, kind, subject, &mut builder, cut, &mut tally)?;
        }
        tally.kept += builder.kept_count;
        tally.dropped += builder.dropped_count;
    }
    Ok(tally)
}

/// Runs the workload on a recorded device; returns the image from before it, and the tape.
fn record(
    guard: &Guard,
    kind: Kind,
    subject: &dyn Subject,
    seed: u64,
) -> Fallible<(PathBuf, Vec<Event>)> {
    let (image, base) = (guard.dir().join("image"), guard.dir().join("base"));
    kind.make(&image)?;
    must("cp", &["--sparse=always", text(&image)?, text(&base)?])?;
    let device = Device::serve(&image, &guard.dir().join("device"))?;
    let mounted = Mounted::file(kind, &device.disk(), &guard.dir().join("volume"))?;
    let store = store_on(mounted.point());
    subject::work(guard, subject, &store, &device.notes(), seed)?;
    mounted.end()?;
    let events = device.end()?;
    std::fs::remove_file(&image)?;
    Ok((base, events))
}

fn judge(
    guard: &Guard,
    kind: Kind,
    subject: &dyn Subject,
    builder: &mut Builder<'_>,
    cut: &Cut,
    tally: &mut Tally,
) -> Fallible<()> {
    let (image, notes) = (guard.dir().join("crash"), guard.dir().join("notes"));
    std::fs::write(&notes, builder.build(cut, &image)?)?;
    let mounted = match Mounted::image(kind, &image, &guard.dir().join("after")) {
        Ok(mounted) => mounted,
        Err(error) => {
            tally.unmountable += 1;
            tally
                .whats
                .push(format!("{} {cut:?}: {error}", kind.name()));
            return Ok(());
        }
    };
    let ended = subject::run(guard, subject.check(&store_on(mounted.point()), &notes)?)?;
    mounted.end()?;
    tally.states += 1;
    tally.count(ended.how);
    if !ended.is_success() && tally.whats.len() < 12 {
        let bad = ended.stdout.lines().find(|line| line.starts_with("BAD "));
        let said = bad.unwrap_or_else(|| ended.last_line());
        tally
            .whats
            .push(format!("{} {cut:?} {:?}: {said}", kind.name(), ended.how));
    }
    Ok(())
}
