//! Whoever is put on a rig: a workload in processes of its own, and a check.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::guard::Guard;
use crate::child::plan_words;
use crate::context::Fallible;
use crate::process::{self, Ended, How};
use crate::store::work::Plan;

/// A workload or a check that has not ended by then hangs.
pub(crate) const TIME_MAX: Duration = Duration::from_secs(120);

pub(crate) trait Subject {
    /// The processes of the workload, one after the other, and how each ends.
    fn work(&self, dir: &Path, notes: &Path, seed: u64) -> Fallible<Vec<(Command, How)>>;

    /// The check of what is left: exit code 0 if all is as it was promised.
    fn check(&self, dir: &Path, notes: &Path) -> Fallible<Command>;
}

/// The store of this repository.
pub(crate) struct Store {
    /// Calls of each thread in each part.
    pub(crate) calls: u64,
    /// Its flushes do nothing: the rig must see that.
    pub(crate) unflushed: bool,
}

impl Store {
    /// A process of the workload.
    pub(crate) fn part(&self, dir: &Path, notes: &Path, plan: &Plan) -> Fallible<Command> {
        let program = std::env::current_exe()?;
        let mut command = if self.unflushed {
            without_flushes(&program)
        } else {
            Command::new(program)
        };
        command
            .arg("work")
            .arg(dir)
            .arg(notes)
            .args(plan_words(plan));
        Ok(command)
    }
}

impl Subject for Store {
    fn work(&self, dir: &Path, notes: &Path, seed: u64) -> Fallible<Vec<(Command, How)>> {
        let plan = |part| Plan {
            seed,
            part,
            calls: self.calls,
            killed: part == 0,
            drops: part == 1,
            fault_at: None,
            fault_open: false,
            foreground: part == 2 && seed % 2 == 1,
        };
        let ends = |part| {
            if part == 0 {
                How::Signal(9)
            } else {
                How::Code(0)
            }
        };
        (0..3)
            .map(|part| Ok((self.part(dir, notes, &plan(part))?, ends(part))))
            .collect()
    }

    fn check(&self, dir: &Path, notes: &Path) -> Fallible<Command> {
        child("check", dir, notes)
    }
}

/// This program with a task on a store.
pub(crate) fn child(task: &str, dir: &Path, notes: &Path) -> Fallible<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(task).arg(dir).arg(notes);
    Ok(command)
}

/// A command whose flushes answer at once and do nothing.
pub(crate) fn without_flushes(program: &Path) -> Command {
    let mut command = Command::new("strace");
    command.args(["-f", "--seccomp-bpf", "-o", "/dev/null"]);
    command.args([
        "-e",
        "trace=fdatasync,fsync",
        "-e",
        "inject=fdatasync,fsync:retval=0",
    ]);
    command.arg(program);
    command
}

/// Runs a marked child to its end.
pub(crate) fn run(guard: &Guard, mut command: Command) -> Fallible<Ended> {
    guard.mark(&mut command);
    process::run(&mut command, TIME_MAX)
}

/// Runs the whole workload; it must end as it is meant to.
pub(crate) fn work(
    guard: &Guard,
    subject: &dyn Subject,
    dir: &Path,
    notes: &Path,
    seed: u64,
) -> Fallible<()> {
    for (part, (command, ends)) in subject.work(dir, notes, seed)?.into_iter().enumerate() {
        let ended = run(guard, command)?;
        if ended.how != ends {
            let (how, said) = (ended.how, ended.last_line());
            return Err(format!("part {part} of the workload ended with {how:?}: {said}").into());
        }
    }
    Ok(())
}

/// Where the store lies on a volume.
pub(crate) fn store_on(point: &Path) -> PathBuf {
    point.join("store")
}
