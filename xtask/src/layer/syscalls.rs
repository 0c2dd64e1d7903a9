//! Calls of the system that fail, in real programs: strace refuses the k-th call of a kind on the
//! store's files, once or from then on, or kills at it; then the store is judged.
//!
//! Programs: the workload of `block`, and the commands `filter` (both orders) and `run`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::cargo;
use crate::child::{REFUSED, plan_words};
use crate::context::{Context, Counts, Fallible, Outcome};
use crate::process::{self, Ended, How, has};
use crate::rig::guard::Guard;
use crate::rig::random::Random;
use crate::rig::subject::child;
use crate::store::work::Plan;

const SYSCALLS: [&str; 17] = [
    "openat",
    "read",
    "pread64",
    "write",
    "pwrite64",
    "fsync",
    "fdatasync",
    "ftruncate",
    "renameat",
    "unlinkat",
    "mmap",
    "fallocate",
    "flock",
    "fcntl",
    "statx",
    "getdents64",
    "fstat",
];
const ERRORS: [&str; 6] = ["EIO", "ENOSPC", "EINTR", "EDQUOT", "EMFILE", "ENOMEM"];
const TIME_MAX: Duration = Duration::from_secs(60);
/// Lines that a filter is fed with.
const LINES_COUNT: usize = 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Program {
    Work,
    FilterEmit,
    FilterMark,
    Run,
}

impl Program {
    const ALL: [Program; 4] = [
        Program::Work,
        Program::FilterEmit,
        Program::FilterMark,
        Program::Run,
    ];

    /// Says whether this is a code for a failure of the store.
    fn fails_with(self, code: i32) -> bool {
        match self {
            Program::Work => code == i32::from(REFUSED),
            Program::FilterEmit | Program::FilterMark => code == 1,
            Program::Run => (91..=99).contains(&code),
        }
    }
}

/// `run` answers this while the lease of a claim lasts whose owner may be alive.
const BUSY: How = How::Code(93);

#[derive(Clone, Copy, Debug)]
enum Way {
    Once(&'static str),
    Sticky(&'static str),
    Kill,
}

struct Bench {
    guard: Guard,
    cli: PathBuf,
    input: PathBuf,
}

/// One program's calls, counted in a run without a fault.
struct Profile {
    program: Program,
    paths: BTreeSet<String>,
    calls: Vec<(&'static str, u64)>,
}

pub(crate) fn run(context: &Context) -> Fallible<Outcome> {
    if !has("strace") {
        return Ok(Outcome::skipped("needs strace"));
    }
    let cli = cargo::build(
        context,
        &context.root.join("Cargo.toml"),
        &["--features", "cli", "--bin", "idemlog"],
    )?;
    let guard = Guard::new(context.scratch())?;
    let input = guard.dir().join("input");
    let lines: String = (0..LINES_COUNT)
        .map(|number| format!("line {number}\n"))
        .collect();
    std::fs::write(&input, lines)?;
    let bench = Bench { guard, cli, input };
    let mut profiles = Vec::new();
    for program in Program::ALL {
        profiles.push(bench.profile(program)?);
    }
    let (mut counts, mut whats) = (Counts::default(), Vec::new());
    let mut random = Random::new(context.seed);
    for _ in 0..context.count(250, 20_000) {
        if context.is_over() {
            break;
        }
        let Some(profile) = profiles.get(random.index(profiles.len())) else {
            break;
        };
        let Some((call, times)) = profile.calls.get(random.index(profile.calls.len())) else {
            continue;
        };
        let error = ERRORS
            .get(random.index(ERRORS.len()))
            .copied()
            .unwrap_or("EIO");
        let way = match random.below(3) {
            0 => Way::Once(error),
            // No system interrupts for ever; to try again for ever is right.
            1 if error == "EINTR" => Way::Once(error),
            // `run` tries for as long as its lease lasts, which is longer than a trial.
            1 if profile.program == Program::Run => Way::Once(error),
            1 => Way::Sticky(error),
            _ => Way::Kill,
        };
        let k = 1 + random.below(*times);
        let (wrong, injected) = bench.trial(profile, call, way, k)?;
        counts.check(wrong.is_none());
        counts.add("injected", u64::from(injected));
        if let Some(wrong) = wrong {
            whats.push(format!(
                "{:?} {call} {way:?} k={k}: {wrong}",
                profile.program
            ));
        }
    }
    let shown = whats.get(..whats.len().min(12)).unwrap_or_default();
    Ok(Outcome::judge(
        counts,
        format!("seed {}: {}", context.seed, shown.join("\n  ")),
    ))
}

impl Bench {
    fn store(&self) -> PathBuf {
        self.guard.dir().join("store")
    }

    fn notes(&self) -> PathBuf {
        self.guard.dir().join("notes")
    }

    fn counter(&self) -> PathBuf {
        self.guard.dir().join("counter")
    }

    fn clear(&self) -> Fallible<()> {
        if self.store().exists() {
            std::fs::remove_dir_all(self.store())?;
        }
        std::fs::write(self.notes(), "")?;
        std::fs::write(self.counter(), "")?;
        Ok(())
    }

    /// The program and its words.
    fn words(&self, program: Program) -> Fallible<Vec<String>> {
        let text = |path: &Path| path.display().to_string();
        let store = text(&self.store());
        if program == Program::Work {
            let plan = Plan {
                seed: 3,
                part: 0,
                calls: 12,
                killed: false,
                drops: false,
                fault_at: None,
                fault_open: false,
                foreground: false,
            };
            let this = text(&std::env::current_exe()?);
            let mut words = vec![this, "work".to_owned(), store, text(&self.notes())];
            words.extend(plan_words(&plan));
            return Ok(words);
        }
        let tail: Vec<String> = match program {
            Program::Run => {
                let script = format!("echo x >> {}; echo done", text(&self.counter()));
                let fixed = [
                    "run",
                    "--effects",
                    "repeatable",
                    "--key",
                    "k",
                    "--",
                    "sh",
                    "-c",
                ];
                fixed
                    .iter()
                    .map(|word| (*word).to_owned())
                    .chain([script])
                    .collect()
            }
            Program::FilterEmit => vec!["filter".to_owned(), "--batch=7".to_owned()],
            _ => ["filter", "--batch=7", "--order=mark-first"]
                .map(str::to_owned)
                .to_vec(),
        };
        Ok([text(&self.cli), "--store".to_owned(), store]
            .into_iter()
            .chain(tail)
            .collect())
    }

    fn execute(&self, mut command: Command) -> Fallible<Ended> {
        self.guard.mark(&mut command);
        process::run_with(
            &mut command,
            Stdio::from(std::fs::File::open(&self.input)?),
            TIME_MAX,
        )
    }

    /// Counts the calls of a run without a fault, and finds the files that they concern.
    fn profile(&self, program: Program) -> Fallible<Profile> {
        self.clear()?;
        let trace = self.guard.dir().join("trace");
        let mut strace = Command::new("strace");
        strace
            .args(["-f", "-qq", "-y", "-o"])
            .arg(&trace)
            .args(["-e", "trace=%file,%desc"]);
        strace.args(self.words(program)?);
        let ended = self.execute(strace)?;
        if !ended.is_success() {
            let said = ended.last_line();
            return Err(format!("{program:?} without a fault: {:?} {said}", ended.how).into());
        }
        let (store, text) = (
            self.store().display().to_string(),
            std::fs::read_to_string(trace)?,
        );
        let mut paths = BTreeSet::from([store.clone()]);
        for part in text
            .split(['<', '"'])
            .filter(|part| part.starts_with(&store))
        {
            paths.insert(part.split(['>', '"']).next().unwrap_or_default().to_owned());
        }
        let times = |call: &str| {
            let begins = format!(" {call}(");
            text.lines()
                .filter(|line| line.contains(&begins) && line.contains(&store))
                .count()
        };
        let calls = SYSCALLS.iter().map(|call| (*call, times(call) as u64));
        let calls = calls.filter(|(_, times)| *times > 0).collect();
        Ok(Profile {
            program,
            paths,
            calls,
        })
    }

    /// One fault; returns what is wrong, and whether the fault came.
    fn trial(
        &self,
        profile: &Profile,
        call: &str,
        way: Way,
        k: u64,
    ) -> Fallible<(Option<String>, bool)> {
        self.clear()?;
        let trace = self.guard.dir().join("trace");
        let inject = match way {
            Way::Once(error) => format!("inject={call}:error={error}:when={k}"),
            Way::Sticky(error) => format!("inject={call}:error={error}:when={k}+"),
            Way::Kill => format!("inject={call}:signal=SIGKILL:when={k}"),
        };
        let mut strace = Command::new("strace");
        strace.args(["-f", "-qq", "-o"]).arg(&trace);
        for path in &profile.paths {
            strace.arg("-P").arg(path);
        }
        strace.args(["-e", &format!("trace={call}"), "-e", &inject]);
        strace.args(self.words(profile.program)?);
        let ended = self.execute(strace)?;
        let traced = std::fs::read_to_string(&trace)?;
        let injected = traced.contains("INJECTED") || traced.contains("killed by SIGKILL");
        let is_kill = matches!(way, Way::Kill);
        let wrong = match manners(profile.program, &ended, is_kill) {
            Some(wrong) => Some(wrong),
            None => self.judge(profile.program, &ended)?,
        };
        Ok((wrong, injected))
    }

    /// What is left must agree with what was answered.
    fn judge(&self, program: Program, ended: &Ended) -> Fallible<Option<String>> {
        if program == Program::Work {
            let checked = self.execute(child("check", &self.store(), &self.notes())?)?;
            let bad = checked.stdout.lines().find(|line| line.starts_with("BAD "));
            let said = bad.unwrap_or_else(|| checked.last_line());
            return Ok((!checked.is_success()).then(|| format!("{:?} {said}", checked.how)));
        }
        let words = self.words(program)?;
        let (first, rest) = words.split_first().ok_or("no program")?;
        let mut again = Command::new(first);
        again.args(rest);
        let again = self.execute(again)?;
        if program == Program::Run && again.how == BUSY && !ended.is_success() {
            return Ok(None);
        }
        if !again.is_success() {
            return Ok(Some(format!(
                "run again: {:?} {}",
                again.how,
                again.last_line()
            )));
        }
        let before: BTreeSet<&str> = ended.stdout.lines().collect();
        let after: BTreeSet<&str> = again.stdout.lines().collect();
        let runs = std::fs::read_to_string(self.counter())?.lines().count();
        let (all, done) = (before.union(&after).count(), ended.is_success());
        Ok(match program {
            Program::Run if done && runs != 1 => Some(format!("ran {runs} times after a success")),
            Program::Run if runs == 0 || !after.contains("done") => {
                Some("a duplicate has no outcome".to_owned())
            }
            Program::FilterMark if before.intersection(&after).next().is_some() => {
                Some("a line was let through twice".to_owned())
            }
            Program::FilterEmit if all != LINES_COUNT => {
                Some(format!("{} lines were lost", LINES_COUNT - all))
            }
            Program::FilterEmit if done && !after.is_empty() => {
                Some("a line was forgotten after a success".to_owned())
            }
            _ => None,
        })
    }
}

/// A program that cannot go on says so, in a line of its own, and with its code. A filter also
/// says how far it came.
fn manners(program: Program, ended: &Ended, is_kill: bool) -> Option<String> {
    let said: Vec<&str> = ended
        .stderr
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    let lines_max = if program == Program::Work { 1 } else { 2 };
    let ours = |line: &&str| program == Program::Work || line.starts_with("idemlog: ");
    let is_polite = (1..=lines_max).contains(&said.len()) && said.iter().all(ours);
    match ended.how {
        How::Code(0) => None,
        How::Signal(9) | How::Code(137) if is_kill => None,
        How::Code(code) if program.fails_with(code) && is_polite => None,
        how => {
            let last = said.last().copied().unwrap_or_default();
            Some(format!(
                "ended with {how:?} and {} lines: {last}",
                said.len()
            ))
        }
    }
}
