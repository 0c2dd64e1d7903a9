//! Other stores on the same rigs: power cuts, a device that refuses writes, rot at rest.
//!
//! `xtask/peers` is the program: insert key n, flush as durably as the store can, acknowledge n.
//! Only our own row decides whether the layer passes. The table is Markdown.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{block, cargo};
use crate::context::{Context, Counts, Fallible, Outcome};
use crate::process::{Ended, How, must};
use crate::rig::device::Device;
use crate::rig::file_systems;
use crate::rig::guard::Guard;
use crate::rig::random::Random;
use crate::rig::subject::{self, Subject, store_on};
use crate::rig::volume::{Kind, Mounted, text};

const OURS: &str = "idemlog";
const ENGINES: [(&str, &str); 4] = [
    (OURS, "Power"),
    ("sled", "flush()"),
    ("redb", "Durability::Immediate"),
    ("fjall", "PersistMode::SyncAll"),
];
/// Keys of the store that rots.
const ROT_KEYS: u64 = 2_000;
/// Keys that a workload inserts.
const WORK_KEYS: u64 = 300;
const SECTOR_BYTES: usize = 512;

pub(crate) fn run(context: &Context) -> Fallible<Outcome> {
    let manifest = context.root.join("xtask/peers/Cargo.toml");
    let program = cargo::build(context, &manifest, &[])?;
    let kinds = file_systems(context, "peers");
    let mut rows = Vec::new();
    for (engine, setting) in ENGINES {
        let peer = Peer {
            program: program.clone(),
            engine,
        };
        for kind in &kinds {
            rows.push(power_cuts(context, &peer, *kind)?);
            rows.push(refused_writes(context, &peer, *kind)?);
        }
        rows.push(rot(context, &peer, Rot::Bit)?);
        rows.push(rot(context, &peer, Rot::Sector)?);
        for row in rows.iter_mut().filter(|row| row.engine == engine) {
            row.setting = setting;
        }
    }
    let mut counts = Counts::default();
    println!("\n{}", Row::HEAD);
    for row in &rows {
        println!("{}", row.line());
        counts.add("trials", row.trials);
        if row.engine == OURS {
            let bad = row.lost + row.wrong + row.crashed + row.hung;
            counts.failed += bad;
            counts.passed += row.trials - bad.min(row.trials);
        }
    }
    println!();
    for row in rows.iter().filter(|row| !row.says.is_empty()) {
        println!("{}, {}: {}", row.engine, row.rig, row.says);
    }
    Ok(Outcome::judge(
        counts,
        format!("seed {}: see the rows of {OURS}", context.seed),
    ))
}

#[derive(Default)]
struct Row {
    engine: &'static str,
    setting: &'static str,
    rig: String,
    trials: u64,
    /// Trials in which acknowledged keys were answered "absent", or were there and went away.
    lost: u64,
    wrong: u64,
    refused: u64,
    crashed: u64,
    hung: u64,
    /// Trials in which some keys got an error and no key a wrong answer.
    partly: u64,
    /// What the first refusal or panic said.
    says: String,
}

impl Row {
    const HEAD: &str = "| store | flush | rig | trials | lost acknowledged keys | wrong values \
                        | refused to open or to write | panic or abort | hang | error for some \
                        keys, right otherwise |\n|---|---|---|---|---|---|---|---|---|---|";

    fn line(&self) -> String {
        format!(
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            self.engine,
            self.setting,
            self.rig,
            self.trials,
            self.lost,
            self.wrong,
            self.refused,
            self.crashed,
            self.hung,
            self.partly
        )
    }

    /// Counts one check by how it ended and what it printed.
    fn count(&mut self, checked: &Ended) {
        let (how, stdout) = (checked.how, checked.stdout.as_str());
        if matches!(how, How::Code(3 | 101) | How::Signal(_)) && self.says.is_empty() {
            self.says = checked.stderr.lines().take(2).collect::<Vec<_>>().join(" ");
        }
        let result = stdout.lines().find_map(|line| line.strip_prefix("RESULT "));
        let number = |name: &str| -> u64 {
            let mut pairs = result.unwrap_or_default().split_whitespace();
            let found = pairs.find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
            found.and_then(|number| number.parse().ok()).unwrap_or(0)
        };
        match how {
            How::Code(0) => self.partly += u64::from(number("unanswered") > 0),
            How::Code(1) if number("wrong") > 0 => self.wrong += 1,
            How::Code(1) => self.lost += 1,
            How::Code(101) | How::Signal(_) => self.crashed += 1,
            How::Code(_) => self.refused += 1,
            How::Hung => self.hung += 1,
        }
    }
}

struct Peer {
    program: PathBuf,
    engine: &'static str,
}

impl Peer {
    fn command(&self, task: &str, dir: &Path) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(self.engine).arg(task).arg(dir);
        command
    }
}

impl Subject for Peer {
    fn work(&self, dir: &Path, notes: &Path, _seed: u64) -> Fallible<Vec<(Command, How)>> {
        let mut command = self.command("work", dir);
        command.arg(notes).arg(WORK_KEYS.to_string());
        Ok(vec![(command, How::Code(0))])
    }

    fn check(&self, dir: &Path, notes: &Path) -> Fallible<Command> {
        let mut command = self.command("check", dir);
        command.arg(notes);
        Ok(command)
    }
}

fn power_cuts(context: &Context, peer: &Peer, kind: Kind) -> Fallible<Row> {
    let tally = block::on(context, kind, peer, context.count(10, 100))?;
    Ok(Row {
        engine: peer.engine,
        rig: format!("power cut, {}", kind.name()),
        trials: tally.states,
        lost: tally.wrong,
        refused: tally.refused,
        crashed: tally.crashed,
        hung: tally.hung,
        ..Row::default()
    })
}

fn refused_writes(context: &Context, peer: &Peer, kind: Kind) -> Fallible<Row> {
    let mut row = Row {
        engine: peer.engine,
        rig: format!("failed flush, {}", kind.name()),
        ..Row::default()
    };
    let mut random = Random::new(context.seed ^ 0xe10 ^ kind as u64);
    for _ in 0..context.count(3, 30) {
        row.trials += 1;
        refused_write(context, peer, kind, random.below(WORK_KEYS), &mut row)?;
    }
    Ok(row)
}

/// The device refuses writes at one insert; then a restart, and one without the cache.
fn refused_write(
    context: &Context,
    peer: &Peer,
    kind: Kind,
    at: u64,
    row: &mut Row,
) -> Fallible<()> {
    let guard = Guard::new(context.scratch())?;
    let image = guard.dir().join("image");
    kind.make(&image)?;
    let device = Device::serve(&image, &guard.dir().join("device"))?;
    let mut mounted = Mounted::file(kind, &device.disk(), &guard.dir().join("volume"))?;
    let store = store_on(mounted.point());
    let notes = guard.dir().join("notes");
    let mut work = peer.command("work", &store);
    work.arg(device.notes())
        .args([WORK_KEYS.to_string(), at.to_string()]);
    let worked = subject::run(&guard, work)?;
    std::fs::write(&notes, device.noted())?;
    let mut look = peer.command("look", &store);
    look.arg(&notes);
    let restarted = subject::run(&guard, look)?;
    // A file system that has shut down refuses everybody; only panics and hangs count here.
    let is_panic = |how: How| matches!(how, How::Code(101) | How::Signal(6 | 7 | 11) | How::Hung);
    mounted.unmount()?;
    if mounted.mount(kind).is_err() {
        return Ok(());
    }
    if is_panic(worked.how) || is_panic(restarted.how) {
        row.crashed += 1;
        return Ok(());
    }
    let mut look = peer.command("look", &store);
    look.arg(&notes);
    let later = subject::run(&guard, look)?;
    let there = |line: &&str| line.starts_with("FOUND ") && line.ends_with(" there");
    let gone = restarted.stdout.lines().filter(there).any(|line| {
        later.how == How::Signal(9) && !later.stdout.lines().any(|other| other == line)
    });
    let mut check = peer.command("check", &store);
    check.arg(&notes).arg("read");
    let checked = subject::run(&guard, check)?;
    if gone && checked.is_success() {
        row.lost += 1;
    } else {
        row.count(&checked);
    }
    mounted.end()?;
    device.end()?;
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Rot {
    Bit,
    Sector,
}

/// Makes a closed store and notes for its check. A rig that sees faults where there are none
/// would be no judge: so an unharmed copy is checked first.
fn fill(guard: &Guard, peer: &Peer, whole: &Path, copy: &Path) -> Fallible<PathBuf> {
    let mut fill = peer.command("fill", whole);
    fill.arg(ROT_KEYS.to_string());
    let filled = subject::run(guard, fill)?;
    if !filled.is_success() {
        return Err(format!(
            "{} could not be filled: {}",
            peer.engine,
            filled.last_line()
        )
        .into());
    }
    let notes = guard.dir().join("notes");
    let lines = (0..ROT_KEYS).map(|number| format!("ASK {number}\nACK {number}\n"));
    std::fs::write(&notes, lines.collect::<String>())?;
    must("cp", &["-r", "--sparse=always", text(whole)?, text(copy)?])?;
    let mut control = peer.command("check", copy);
    control.arg(&notes).arg("read");
    let control = subject::run(guard, control)?;
    if !control.is_success() {
        return Err(format!(
            "{} is wrong without a fault: {:?}",
            peer.engine, control.how
        )
        .into());
    }
    Ok(notes)
}

/// Changes one place of a closed store, where it is not empty.
fn rot(context: &Context, peer: &Peer, rot: Rot) -> Fallible<Row> {
    let (name, trials) = match rot {
        Rot::Bit => ("one bit flipped", context.count(20, 150)),
        Rot::Sector => ("one sector zeroed", context.count(10, 40)),
    };
    let guard = Guard::new(context.scratch())?;
    let (whole, copy) = (guard.dir().join("whole"), guard.dir().join("copy"));
    let notes = fill(&guard, peer, &whole, &copy)?;
    let sectors = sectors_of(&whole)?;
    let mut random = Random::new(context.seed ^ trials);
    let mut row = Row {
        engine: peer.engine,
        rig: name.to_owned(),
        trials,
        ..Row::default()
    };
    for _ in 0..trials {
        if copy.exists() {
            std::fs::remove_dir_all(&copy)?;
        }
        must(
            "cp",
            &["-r", "--sparse=always", text(&whole)?, text(&copy)?],
        )?;
        let (file, sector) = sectors
            .get(random.index(sectors.len()))
            .ok_or("an empty store")?;
        let file = copy.join(file);
        let mut bytes = std::fs::read(&file)?;
        let start = sector * SECTOR_BYTES;
        let end = (start + SECTOR_BYTES).min(bytes.len());
        let place = bytes.get_mut(start..end).ok_or("the copy is shorter")?;
        match rot {
            Rot::Bit => {
                let at = random.index(place.len());
                if let Some(byte) = place.get_mut(at) {
                    *byte ^= 1 << random.below(8);
                }
            }
            Rot::Sector => place.fill(0),
        }
        std::fs::write(&file, bytes)?;
        let mut check = peer.command("check", &copy);
        check.arg(&notes).arg("read");
        let checked = subject::run(&guard, check)?;
        row.count(&checked);
    }
    Ok(row)
}

/// All sectors that hold something, as (file below the directory, number).
fn sectors_of(dir: &Path) -> Fallible<Vec<(PathBuf, usize)>> {
    let (mut sectors, mut folders) = (Vec::new(), vec![dir.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(dir)?.to_owned();
            let bytes = std::fs::read(&path)?;
            let full = bytes.chunks(SECTOR_BYTES).enumerate();
            let full = full.filter(|(_, sector)| sector.iter().any(|byte| *byte != 0));
            sectors.extend(full.map(|(number, _)| (name.clone(), number)));
        }
    }
    sectors.sort();
    Ok(sectors)
}
