//! A copy of the repository in which faults can be switched on, one at a time.
//!
//! The copy is edited once and built once: each fault is an `if` on a number that the environment
//! names, so that trying another one costs no build. Number 0 switches nothing on: with it all
//! tests must pass, or a later failure would prove nothing.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::{mutants, syncs};
use crate::context::{Context, Fallible};

/// The environment variable that names the fault.
const VARIABLE: &str = "IDEMLOG_FAULT";

/// Where builds and what is kept between runs belong.
pub(crate) fn target_folder(root: &Path) -> PathBuf {
    let told = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    told.unwrap_or_else(|| root.join("target"))
}

/// What every edited file may call.
const SWITCH: &str = r#"
/// Is the fault with this number switched on?
#[doc(hidden)]
pub fn fault_is(number: u32) -> bool {
    static CHOSEN: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    *CHOSEN.get_or_init(|| {
        std::env::var("IDEMLOG_FAULT").map_or(0, |text| text.parse().unwrap_or(0))
    }) == number
}
"#;

/// The edited copy.
pub(crate) struct Copy {
    folder: PathBuf,
    target: PathBuf,
    programs: Vec<PathBuf>,
}

/// How a fault was noticed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// By this test.
    Killed(String),
    /// The tests did not end in time: the fault hangs the store.
    Hung(String),
    /// The whole test program went down.
    Aborted(String),
    Survived,
}

/// One run of the tests: a filter, and how long it may take.
#[derive(Clone, Copy, Debug)]
struct Stage {
    filter: &'static str,
    seconds_max: u64,
}

/// How often a failed test may pass before it counts for nothing: races do not show every time.
const REPEATS_MAX: u32 = 5;

/// The quick ones first: most faults end here, and only survivors pay for the rest.
const STAGES: [Stage; 15] = [
    stage("lib", 120),
    stage("order::", 120),
    stage("golden::", 120),
    stage("api::", 180),
    stage("attached::", 180),
    stage("shared::", 180),
    stage("repair::", 120),
    stage("future::", 180),
    stage("intake::", 180),
    stage("crash::", 600),
    stage("clock::", 120),
    stage("concurrent::", 180),
    stage("cases::", 300),
    stage("damage::", 600),
    stage("model::", 600),
];

const fn stage(filter: &'static str, seconds_max: u64) -> Stage {
    Stage {
        filter,
        seconds_max,
    }
}

impl Copy {
    /// Copies the repository, makes all faults in the copy, and builds it.
    pub(crate) fn build_with_faults(context: &Context) -> Fallible<(Copy, Vec<syncs::Call>)> {
        let mut copy = Copy::new(&context.root)?;
        mutants::make_all(&copy)?;
        let calls = syncs::switch_all(&copy)?;
        copy.build()?;
        Ok((copy, calls))
    }

    /// Copies what git knows of, and what is new, into a folder of its own that is kept: the next
    /// build is short then.
    fn new(root: &Path) -> Fallible<Copy> {
        let scratch = target_folder(root).join("faults");
        let folder = scratch.join("copy");
        let target = scratch.join("target");
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        let listed = Command::new("git")
            .args([
                "ls-files",
                "-z",
                "--cached",
                "--others",
                "--exclude-standard",
            ])
            .current_dir(root)
            .output()
            .map_err(|e| format!("git: {e}"))?;
        for name in String::from_utf8_lossy(&listed.stdout).split('\0') {
            let from = root.join(name);
            if name.is_empty() || name.starts_with("xtask/") || !from.is_file() {
                continue;
            }
            let to = folder.join(name);
            let parent = to.parent().unwrap_or(&folder);
            fs::create_dir_all(parent)?;
            if fs::read(&to).ok() != Some(fs::read(&from)?) {
                fs::copy(&from, &to).map_err(|e| format!("{name}: {e}"))?;
            }
        }
        let copy = Copy {
            folder,
            target,
            programs: Vec::new(),
        };
        let lib = copy.read("src/lib.rs")? + SWITCH;
        copy.write("src/lib.rs", &lib)?;
        Ok(copy)
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn read(&self, file: &str) -> Fallible<String> {
        fs::read_to_string(self.folder.join(file)).map_err(|e| format!("{file}: {e}").into())
    }

    /// Writes a file of the copy.
    pub(crate) fn write(&self, file: &str, text: &str) -> Fallible<()> {
        fs::write(self.folder.join(file), text).map_err(|e| format!("{file}: {e}").into())
    }

    /// Replaces a text that must be there exactly once.
    pub(crate) fn replace(&self, file: &str, from: &str, to: &str) -> Fallible<()> {
        let text = self.read(file)?;
        match text.matches(from).count() {
            1 => self.write(file, &text.replacen(from, to, 1)),
            count => Err(format!(
                "{file}: the text to change is there {count} times instead of once:\n{from}"
            )
            .into()),
        }
    }

    /// Builds the unit tests and the tests. What does not compile is an error.
    pub(crate) fn build(&mut self) -> Fallible<()> {
        let built = Command::new("cargo")
            .args([
                "test",
                "--features",
                "testing",
                "--lib",
                "--test",
                "main",
                "--no-run",
            ])
            .arg("--message-format=json-render-diagnostics")
            .current_dir(&self.folder)
            .env("CARGO_TARGET_DIR", &self.target)
            .env("RUSTFLAGS", "--cap-lints allow")
            .stderr(Stdio::inherit())
            .output()
            .map_err(|e| format!("cargo: {e}"))?;
        if !built.status.success() {
            return Err("the edited copy does not compile; the messages are above".into());
        }
        self.programs = String::from_utf8_lossy(&built.stdout)
            .lines()
            .filter_map(|line| line.split("\"executable\":\"").nth(1))
            .filter_map(|rest| rest.split('"').next())
            .map(PathBuf::from)
            .collect();
        match self.programs.len() {
            2 => Ok(()),
            count => Err(format!("cargo built {count} test programs instead of 2").into()),
        }
    }

    /// Makes sure that nothing fails while no fault is switched on.
    pub(crate) fn check_sound(&self) -> Fallible<()> {
        match self.fate(0, None)? {
            Fate::Survived => Ok(()),
            fate => Err(format!("without any fault: {fate:?}").into()),
        }
    }

    /// Switches a fault on and runs tests until one fails: the expected one first.
    pub(crate) fn fate(&self, number: u32, expected: Option<&str>) -> Fallible<Fate> {
        let expected = expected.map(|filter| (filter, 300));
        let stages = STAGES.iter().map(|stage| (stage.filter, stage.seconds_max));
        for (filter, seconds_max) in expected.into_iter().chain(stages) {
            let fate = self.run(number, filter, seconds_max)?;
            if fate != Fate::Survived && (number == 0 || self.is_repeated(number, &fate)?) {
                return Ok(fate);
            }
        }
        Ok(Fate::Survived)
    }

    /// A test that fails once and then no more has not noticed the fault: this machine has.
    fn is_repeated(&self, number: u32, fate: &Fate) -> Fallible<bool> {
        let Fate::Killed(test) = fate else {
            return Ok(true);
        };
        for _ in 0..REPEATS_MAX {
            if self.run(number, test, 300)? != Fate::Survived {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Runs the tests that a filter names; ends at the first failure.
    fn run(&self, number: u32, filter: &str, seconds_max: u64) -> Fallible<Fate> {
        let (is_lib, filter) = match filter.strip_prefix("lib") {
            Some(test) => (true, test.trim_start()),
            None => (false, filter),
        };
        let program = self
            .programs
            .iter()
            .find(|program| {
                let name = program.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with(if is_lib { "idemlog-" } else { "main-" })
            })
            .ok_or("the test program is missing")?;
        let mut command = Command::new(program);
        if !filter.is_empty() {
            command.arg(filter);
        }
        let mut child = command
            .arg("--test-threads=2")
            .current_dir(&self.folder)
            .env(VARIABLE, number.to_string())
            .env("CARGO_MANIFEST_DIR", &self.folder)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| format!("{}: {e}", program.display()))?;
        let output = child.stdout.take().ok_or("no output")?;
        let (send, lines) = mpsc::channel();
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        let deadline = Instant::now() + Duration::from_secs(seconds_max);
        let mut fate = Fate::Survived;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match lines.recv_timeout(left) {
                Ok(line) => {
                    if let Some(test) = failed_test(&line) {
                        fate = Fate::Killed(if is_lib { format!("lib {test}") } else { test });
                        break;
                    }
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    fate = Fate::Hung(filter.to_owned());
                    break;
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
        }
        if fate != Fate::Survived {
            // It may have ended by itself meanwhile.
            let _ended = child.kill();
        }
        drop(lines);
        let status = child.wait()?;
        let _joined = reader.join();
        if fate == Fate::Survived && !status.success() {
            // An abort takes the whole program down without naming a test.
            fate = Fate::Aborted(if is_lib {
                "lib".into()
            } else {
                filter.to_owned()
            });
        }
        Ok(fate)
    }
}

fn failed_test(line: &str) -> Option<String> {
    let rest = line.strip_prefix("test ")?;
    let name = rest.strip_suffix(" ... FAILED")?;
    Some(name.to_owned())
}

impl Fate {
    /// How a table says it.
    pub(crate) fn cell(&self) -> String {
        match self {
            Fate::Killed(test) => format!("`{test}`"),
            Fate::Hung(filter) => format!("`{filter}` does not end"),
            Fate::Aborted(filter) => format!("`{filter}` aborts"),
            Fate::Survived => "**SURVIVED**".into(),
        }
    }
}
