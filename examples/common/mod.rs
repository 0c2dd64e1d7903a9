//! A parent that starts its own program as a child, kills it with SIGKILL at random moments, and
//! starts it again until it has come to its end.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

pub(crate) type Fallible<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A child that has not come to its end by then hangs.
const TIME_MAX: Duration = Duration::from_secs(120);

/// Numbers that look random and can be repeated.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound.max(1)
    }
}

/// Returns the number behind a word of the command line, such as `--seed 7`.
pub(crate) fn number(word: &str, default: u64) -> u64 {
    let mut words = std::env::args().skip_while(|found| found != word);
    let found = words.nth(1).and_then(|number| number.parse().ok());
    found.unwrap_or(default)
}

/// Runs the child so often that it is killed `kills` times, and then to its end. A kill comes
/// within the first `millis` of a life. Returns how often it was killed.
pub(crate) fn run_and_kill(dir: &Path, kills: u64, millis: u64, seed: u64) -> Fallible<u64> {
    let mut random = Random::new(seed);
    let mut killed = 0;
    let began = Instant::now();
    loop {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("--child")
            .arg(dir)
            .args(["--life", &killed.to_string()])
            .spawn()?;
        if killed < kills {
            std::thread::sleep(Duration::from_millis(1 + random.below(millis)));
            child.kill()?;
        }
        let ended = child.wait()?;
        if ended.success() {
            return Ok(killed);
        }
        if ended.code().is_some() || began.elapsed() > TIME_MAX {
            return Err(format!("the child has failed: {ended}").into());
        }
        killed += 1;
    }
}

/// Does what the command line says: the child's part, or the parent's, in a directory of its own.
pub(crate) fn start(
    name: &str,
    child: fn(&Path) -> Fallible<()>,
    parent: fn(&Path) -> Fallible<bool>,
) -> ExitCode {
    let mut words = std::env::args().skip_while(|word| word != "--child");
    let done = match words.nth(1) {
        Some(dir) => child(Path::new(&dir)).map(|()| true),
        None => tempfile::tempdir()
            .map_err(Into::into)
            .and_then(|dir| parent(dir.path())),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::FAILURE
        }
    }
}
