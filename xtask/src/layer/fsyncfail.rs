//! A device that refuses writes for a moment, under real file systems.
//!
//! The kernel marks pages clean after a failed flush and goes on showing them: a restarted
//! process reads what is not on the disk. So: after the fault nothing is promised; a process
//! restarted in the same boot, and one after the cache is gone, find every promised key and the
//! same states; what the first one found is still so for the second.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::child::REFUSED;
use crate::context::{Context, Counts, Fallible, Outcome};
use crate::process::{Ended, How};
use crate::rig::device::Device;
use crate::rig::file_systems;
use crate::rig::guard::Guard;
use crate::rig::random::Random;
use crate::rig::subject::{self, Store, child, store_on};
use crate::rig::volume::{Kind, Mounted};
use crate::store::work::Plan;

const CALLS: u64 = 120;

pub(crate) fn run(context: &Context) -> Fallible<Outcome> {
    let (mut counts, mut whats) = (Counts::default(), Vec::new());
    let kinds = file_systems(context, "fsyncfail");
    if kinds.is_empty() {
        return Ok(Outcome::skipped("no file system can be used"));
    }
    for kind in kinds {
        let mut random = Random::new(context.seed ^ kind as u64);
        for trial in 0..context.count(6, 100) {
            if context.is_over() {
                break;
            }
            let plan = Plan {
                seed: random.next() % 1_000_000,
                part: 0,
                calls: CALLS,
                killed: false,
                drops: random.percent(25),
                fault_at: Some(random.below(CALLS)),
                fault_open: false,
                foreground: random.percent(30),
            };
            let found = point(context, kind, &plan, trial, &mut counts)?;
            counts.check(found.is_empty());
            whats.extend(found.into_iter().map(|what| {
                format!(
                    "{} seed={} fault={:?}: {what}",
                    kind.name(),
                    plan.seed,
                    plan.fault_at
                )
            }));
        }
    }
    let shown = whats.get(..whats.len().min(12)).unwrap_or_default();
    Ok(Outcome::judge(
        counts,
        format!("seed {}: {}", context.seed, shown.join("\n  ")),
    ))
}

/// One fault and what two restarts find; returns what is wrong.
fn point(
    context: &Context,
    kind: Kind,
    plan: &Plan,
    trial: u64,
    counts: &mut Counts,
) -> Fallible<Vec<String>> {
    let guard = Guard::new(context.scratch())?;
    let image = guard.dir().join("image");
    kind.make(&image)?;
    let device = Device::serve(&image, &guard.dir().join("device"))?;
    let mut mounted = Mounted::file(kind, &device.disk(), &guard.dir().join("volume"))?;
    let store = store_on(mounted.point());
    let trial = Trial {
        guard: &guard,
        device: &device,
        store: &store,
        number: trial,
    };
    let mut wrong = trial.fault(plan)?;
    counts.add("refused-writes", device.refused_count());
    counts.add("untriggered", u64::from(device.refused_count() == 0));

    let restarted = trial.look()?;
    // A file system that has shut down refuses everybody.
    let is_excused = restarted.is_refused && !takes_files(mounted.point());
    if !restarted.is_right && !is_excused {
        wrong.push(format!("restarted: {}", restarted.what));
    }
    counts.add("refused-after-restart", u64::from(restarted.is_refused));
    if trial.goes_on() && !restarted.is_refused {
        wrong.extend(trial.go_on(plan)?);
    }
    mounted.unmount()?;
    if let Err(error) = mounted.mount(kind) {
        println!("  {} did not mount after the fault: {error}", kind.name());
        counts.add("unmountable", 1);
        return Ok(wrong);
    }
    let later = trial.look()?;
    if !later.is_right {
        wrong.push(format!("after the cache was gone: {}", later.what));
    }
    for (key, state) in restarted.found.iter().filter(|_| !trial.goes_on()) {
        counts.add("keys-compared", 1);
        let now = later.found.get(key);
        if now != Some(state) && !key.starts_with("short ") {
            let said = history(&device.noted(), key);
            wrong.push(format!(
                "{key} was {state} after the restart, {now:?} later; {said}"
            ));
        }
    }
    let checked = subject::run(&guard, child("check", &store, &trial.notes()?)?)?;
    if !checked.is_success() {
        wrong.push(format!("at the end: {}", what_of(&checked)));
    }
    mounted.end()?;
    device.end()?;
    Ok(wrong)
}

struct Trial<'a> {
    guard: &'a Guard,
    device: &'a Device,
    store: &'a Path,
    number: u64,
}

impl Trial<'_> {
    /// Some restarted processes go on working before the cache goes.
    fn goes_on(&self) -> bool {
        self.number % 2 == 1
    }

    fn work(&self, plan: &Plan) -> Fallible<Ended> {
        let subject = Store {
            calls: CALLS,
            unflushed: false,
        };
        subject::run(
            self.guard,
            subject.part(self.store, &self.device.notes(), plan)?,
        )
    }

    /// Works until the device has refused something, and dies.
    fn fault(&self, plan: &Plan) -> Fallible<Vec<String>> {
        let plans = if self.number % 6 == 5 {
            // The first process is killed without a fault, the next one opens under it.
            let first = Plan {
                fault_at: None,
                killed: true,
                ..*plan
            };
            vec![
                first,
                Plan {
                    fault_at: None,
                    fault_open: true,
                    part: 1,
                    ..*plan
                },
            ]
        } else {
            vec![Plan { ..*plan }]
        };
        let mut wrong = Vec::new();
        for plan in plans {
            let ended = self.work(&plan)?;
            if ended.how != How::Signal(9) {
                let said = ended.last_line();
                wrong.push(format!("the workload ended with {:?}: {said}", ended.how));
            }
        }
        Ok(wrong)
    }

    fn go_on(&self, plan: &Plan) -> Fallible<Option<String>> {
        let more = Plan {
            fault_at: None,
            part: 2,
            calls: 15,
            drops: false,
            ..*plan
        };
        let ended = self.work(&more)?;
        Ok((!ended.is_success()).then(|| format!("going on: {}", what_of(&ended))))
    }

    /// A file with everything noted so far.
    fn notes(&self) -> Fallible<PathBuf> {
        let notes = self.guard.dir().join("notes");
        std::fs::write(&notes, self.device.noted())?;
        Ok(notes)
    }

    /// Lets a process open the store, say what it finds, and die.
    fn look(&self) -> Fallible<Look> {
        let ended = subject::run(self.guard, child("look", self.store, &self.notes()?)?)?;
        let found = ended
            .stdout
            .lines()
            .filter_map(|line| line.strip_prefix("FOUND "));
        let found = found.filter_map(|line| line.rsplit_once(' '));
        Ok(Look {
            is_right: ended.how == How::Signal(9) && !ended.stdout.contains("BAD "),
            is_refused: ended.how == How::Code(i32::from(REFUSED)),
            found: found
                .map(|(key, state)| (key.to_owned(), state.to_owned()))
                .collect(),
            what: what_of(&ended),
        })
    }
}

struct Look {
    is_right: bool,
    is_refused: bool,
    found: BTreeMap<String, String>,
    what: String,
}

/// What was noted about one key.
fn history(notes: &[u8], key: &str) -> String {
    let text = String::from_utf8_lossy(notes);
    let lines: Vec<&str> = text.lines().collect();
    let ends_so = format!(" {key}");
    let mut said = Vec::new();
    for ask in lines.iter().filter(|line| line.ends_with(&ends_so)) {
        let id = ask.split(' ').nth(1).unwrap_or_default();
        let of_it = |line: &&&str| line.split(' ').nth(1) == Some(id);
        said.extend(lines.iter().filter(of_it).copied());
    }
    said.join("; ")
}

fn what_of(ended: &Ended) -> String {
    let bad = ended.stdout.lines().find(|line| line.starts_with("BAD "));
    format!(
        "{:?} {}",
        ended.how,
        bad.unwrap_or_else(|| ended.last_line())
    )
}

/// Says whether the file system still takes writes: after an error some do not.
fn takes_files(point: &Path) -> bool {
    let probe = point.join("probe");
    let written = std::fs::write(&probe, b"probe").is_ok();
    written && std::fs::File::open(&probe).is_ok_and(|file| file.sync_all().is_ok())
}
