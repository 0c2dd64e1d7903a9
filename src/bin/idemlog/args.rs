//! The words of the command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use idemlog::{NamespaceKind, Retention, Ticket};

/// Lines of one batch of `filter`, unless `--batch` says otherwise.
const BATCH_LINES_DEFAULT: u32 = 1000;
/// Each line of a batch is a claim in memory, so that a batch is bounded, too.
const BATCH_LINES_MAX: i64 = 100_000;

/// Where the store's directory is taken from, unless `--store` says otherwise.
pub(crate) const STORE_VARIABLE: &str = "IDEMLOG_STORE";
/// A measurement keeps the time of each commit in memory.
const BENCH_SECONDS_MAX: i64 = 600;
const BENCH_THREADS_MAX: i64 = 1024;
const BENCH_KEYS_MAX: u64 = 1_000_000_000;

/// Exit codes: 0 done, 1 store failed, 2 usage, 3 not now (busy, backoff), 4 in doubt, 5 mismatch,
/// 6 rejected or dead; `run` adds 90 to its own.
#[derive(Debug, Parser)]
#[command(
    name = "idemlog",
    version,
    about = "Embedded dedup log: remembers what has been done"
)]
#[command(
    after_help = "Exit codes: 0 done, 1 store failed, 2 usage, 3 not now (busy, backoff), \
    4 in doubt, 5 mismatch, 6 rejected or dead. `run` adds 90, so 0..89 are its command's."
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct Common {
    /// The store's directory. Only filter, run and claim create it
    #[arg(long, global = true, env = STORE_VARIABLE, value_name = "DIR")]
    pub(crate) store: Option<PathBuf>,
    /// The namespace of the key [default: default; filter: emit or filter, by --order]
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// How long to wait for another process that has the store open
    #[arg(long, global = true, value_name = "TIME", default_value = "10s", value_parser = duration)]
    pub(crate) lock_timeout: Duration,
    /// Open the store for this process alone; others wait, or are refused
    #[arg(long, global = true)]
    pub(crate) exclusive: bool,
    /// Answers in JSON, one object or array on one line; errors, too
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Write only the first copy of each line: a uniq that remembers
    Filter(Filter),
    /// Run a command once per key; a duplicate gets its stdout and status again
    Run(Run),
    /// Claim a key and print the ticket; nothing is printed for a key that is done
    Claim(Claim),
    /// Count a claim's lease from now
    Renew(Renew),
    /// Record that a claim's effect happened
    Commit(Commit),
    /// Record that a claim ended otherwise
    Fail(Fail),
    /// Tell what is known about a key
    Get(Get),
    /// Make a key absent
    Forget(Forget),
    /// End a doubt with what a person found out
    Resolve(Resolve),
    /// List keys of which nobody knows whether their effect happened
    InDoubt,
    /// List keys that are claimed
    Pending,
    /// Show counts and sizes
    Stats,
    /// Read every byte of a closed store and list what is wrong
    Verify,
    /// Write what is left of a damaged store into a new directory
    Repair(Repair),
    /// Measure durable commits per second, and a duplicate's look-up, in a store of its own
    Bench(Bench),
}

#[derive(Debug, Args)]
pub(crate) struct Bench {
    /// Where a new directory is made, and removed afterwards
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) dir: PathBuf,
    /// How many seconds each of the two takes
    #[arg(long, value_name = "COUNT", default_value_t = 3,
        value_parser = clap::value_parser!(u32).range(1..=BENCH_SECONDS_MAX))]
    pub(crate) seconds: u32,
    /// How many keys the store holds whose duplicates are looked up
    #[arg(long, value_name = "COUNT", default_value_t = 500_000,
        value_parser = clap::value_parser!(u64).range(1..=BENCH_KEYS_MAX))]
    pub(crate) keys: u64,
    /// How many threads commit at once
    #[arg(long, value_name = "COUNT", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=BENCH_THREADS_MAX))]
    pub(crate) threads: u32,
}

#[derive(Debug, Args)]
pub(crate) struct Repair {
    /// Report what would be lost, and write nothing
    #[arg(long, conflicts_with_all = ["to", "swap"])]
    pub(crate) dry_run: bool,
    /// The new directory [default: the store's name with .repair]
    #[arg(long, value_name = "DIR")]
    pub(crate) to: Option<PathBuf>,
    /// Exchange the two directories at the end: the damaged store's files are then in the new one
    #[arg(long)]
    pub(crate) swap: bool,
    /// A namespace by its number, if MANIFEST cannot be read; repeated for each
    #[arg(long, value_name = "NUMBER=NAME:KIND", value_parser = named_space)]
    pub(crate) space: Vec<NamedSpace>,
    /// The number of a namespace that was purged, if MANIFEST cannot be read; repeated for each
    #[arg(long, value_name = "NUMBER")]
    pub(crate) purged: Vec<u16>,
}

/// A namespace that the caller of `repair` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamedSpace {
    pub(crate) id: u16,
    pub(crate) name: String,
    pub(crate) kind: NamespaceKind,
}

#[derive(Debug, Args)]
pub(crate) struct Filter {
    /// Lines are JSON; the key is the string, number or boolean at this dotted path
    #[arg(long, value_name = "PATH")]
    pub(crate) key_field: Option<String>,
    /// How long lines are remembered: a time, or forever
    #[arg(long, value_name = "TIME", default_value = "7d", value_parser = retention)]
    pub(crate) retain: Retention,
    /// Lines of one batch, at most: what a crash may repeat or lose
    #[arg(long, value_name = "LINES", default_value_t = BATCH_LINES_DEFAULT,
        value_parser = clap::value_parser!(u32).range(1..=BATCH_LINES_MAX))]
    pub(crate) batch: u32,
    /// What a crash may do to one batch: repeat its lines, or lose them
    #[arg(long, value_enum, default_value_t = Order::EmitFirst)]
    pub(crate) order: Order,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Order {
    /// Claim, print, commit: a crash can repeat one batch, never lose a line
    EmitFirst,
    /// Remember, then print: a crash can lose one batch, never repeat a line
    MarkFirst,
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// The identity of the operation
    #[arg(long, value_name = "KEY")]
    pub(crate) key: OsString,
    #[command(flatten)]
    pub(crate) claiming: Claiming,
    /// How long the outcome is remembered: a time, or forever
    #[arg(long, value_name = "TIME", default_value = "7d", value_parser = retention)]
    pub(crate) retain: Retention,
    /// Exit statuses that mean: it surely did not happen, run it again
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) retry_on: Vec<u8>,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
}

/// What `run` and `claim` say about a claim.
#[derive(Debug, Args)]
pub(crate) struct Claiming {
    /// What a second run of the effect means; required when the namespace is created
    #[arg(long, value_name = "CLASS", value_parser = effects)]
    pub(crate) effects: Option<NamespaceKind>,
    /// How long the claim excludes others after its last renewal
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = duration)]
    pub(crate) lease: Duration,
    /// What the key stands for, compared at every later claim of it
    #[arg(long, value_name = "TEXT")]
    pub(crate) fingerprint: Option<OsString>,
    /// After how many attempts the key is dead
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_attempts: Option<u32>,
}

#[derive(Debug, Args)]
pub(crate) struct Claim {
    /// The identity of the operation
    #[arg(long, value_name = "KEY")]
    pub(crate) key: OsString,
    #[command(flatten)]
    pub(crate) claiming: Claiming,
    /// What helps to find out later whether the effect happened; shown by in-doubt
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) evidence: OsString,
}

#[derive(Debug, Args)]
pub(crate) struct Renew {
    /// What claim printed
    pub(crate) ticket: Ticket,
    /// The new lease, counted from now
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = duration)]
    pub(crate) lease: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Commit {
    /// What claim printed
    pub(crate) ticket: Ticket,
    #[command(flatten)]
    pub(crate) outcome: OutcomeSource,
    /// How long the outcome is remembered: a time, or forever
    #[arg(long, value_name = "TIME", default_value = "7d", value_parser = retention)]
    pub(crate) retain: Retention,
}

/// Where the bytes of an outcome come from; by default there are none.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub(crate) struct OutcomeSource {
    /// The outcome that duplicates get
    #[arg(long, value_name = "TEXT")]
    pub(crate) outcome: Option<OsString>,
    /// The outcome is what stdin holds
    #[arg(long)]
    pub(crate) outcome_stdin: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Fail {
    /// What claim printed
    pub(crate) ticket: Ticket,
    /// How it ended
    #[arg(value_enum)]
    pub(crate) how: FailKind,
    /// The pause before a retry
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = duration)]
    pub(crate) after: Duration,
    /// The error, kept for the next attempt, for duplicates, or as evidence
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) error: OsString,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FailKind {
    /// It surely did not happen, or may be repeated: retry
    Retryable,
    /// It will never succeed: duplicates get the error
    Permanent,
    /// It did not begin: the key is absent again
    Release,
    /// Nobody knows
    Unknown,
}

#[derive(Debug, Args)]
pub(crate) struct Get {
    /// The key
    #[arg(long, value_name = "KEY")]
    pub(crate) key: OsString,
    /// Write only the outcome, byte for byte
    #[arg(long)]
    pub(crate) outcome: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Forget {
    /// The key
    #[arg(long, value_name = "KEY")]
    pub(crate) key: OsString,
    /// Also when it is claimed or in doubt; its owner's commit is refused then
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Resolve {
    /// The key
    #[arg(long, value_name = "KEY")]
    pub(crate) key: OsString,
    /// The epoch in doubt, as in-doubt shows it: never resolves a later doubt by mistake
    #[arg(long, value_name = "NUMBER")]
    pub(crate) epoch: u64,
    /// What was found out
    #[arg(value_enum)]
    pub(crate) found: Found,
    #[command(flatten)]
    pub(crate) outcome: OutcomeSource,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Found {
    /// The effect happened: the key is done
    Applied,
    /// It did not happen: the key may be claimed again
    NotApplied,
    /// Nobody will ever know: the key is dead
    Abandon,
}

/// Says whether a word names a command.
pub(crate) fn is_command(word: &OsString) -> bool {
    let commands = <Arguments as clap::CommandFactory>::command();
    commands
        .get_subcommands()
        .any(|command| word == command.get_name())
}

fn effects(text: &str) -> Result<NamespaceKind, String> {
    NamespaceKind::from_name(text)
        .filter(|kind| *kind != NamespaceKind::Filter)
        .ok_or_else(|| "a class is repeatable, probeable, non-repeatable or internal".to_string())
}

/// Reads `1=orders:non-repeatable`.
fn named_space(text: &str) -> Result<NamedSpace, String> {
    let wrong = || "a namespace is NUMBER=NAME:KIND, such as 1=orders:repeatable".to_string();
    let (id, rest) = text.split_once('=').ok_or_else(wrong)?;
    let (name, kind) = rest.rsplit_once(':').ok_or_else(wrong)?;
    let kind = NamespaceKind::from_name(kind).ok_or_else(|| {
        "a kind is filter, repeatable, probeable, non-repeatable or internal".to_string()
    })?;
    Ok(NamedSpace {
        id: id.parse().map_err(|e| format!("not a number: {e}"))?,
        name: name.to_owned(),
        kind,
    })
}

fn retention(text: &str) -> Result<Retention, String> {
    if text == "forever" {
        Ok(Retention::Forever)
    } else {
        duration(text).map(Retention::For)
    }
}

/// Reads a whole number and its unit: 100ms, 10s, 5m, 12h, 7d.
fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let unit_ms: u64 = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60 * 1000,
        "h" => 3600 * 1000,
        "d" => 24 * 3600 * 1000,
        _ => return Err("a time is a whole number and ms, s, m, h or d: 10s".to_string()),
    };
    let number: u64 = number
        .parse()
        .map_err(|e| format!("not a whole number: {e}"))?;
    let ms = number
        .checked_mul(unit_ms)
        .ok_or("too long: say forever, or fewer days")?;
    Ok(Duration::from_millis(ms))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit() {
        assert_eq!(duration("100ms"), Ok(Duration::from_millis(100)));
        assert_eq!(duration("10s"), Ok(Duration::from_secs(10)));
        assert_eq!(duration("5m"), Ok(Duration::from_secs(300)));
        assert_eq!(duration("12h"), Ok(Duration::from_secs(12 * 3600)));
        assert_eq!(duration("7d"), Ok(Duration::from_secs(7 * 24 * 3600)));
        for bad in [
            "",
            "s",
            "10",
            "10 s",
            "-1s",
            "1.5s",
            "10x",
            "18446744073709551615d",
        ] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_named_namespace_has_a_number_a_name_and_a_kind() {
        let named = named_space("3=a:b=c:non-repeatable").unwrap();
        assert_eq!((named.id, named.name.as_str()), (3, "a:b=c"));
        assert_eq!(named.kind, NamespaceKind::NonRepeatable);
        for bad in [
            "",
            "orders:filter",
            "1=orders",
            "x=orders:filter",
            "1=orders:none",
        ] {
            assert!(named_space(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_class_of_effects_is_not_a_filter() {
        assert_eq!(effects("non-repeatable"), Ok(NamespaceKind::NonRepeatable));
        assert!(effects("filter").is_err());
        assert!(effects("Repeatable").is_err());
    }

    #[test]
    fn the_words_are_consistent() {
        <Arguments as clap::CommandFactory>::command().debug_assert();
    }
}
