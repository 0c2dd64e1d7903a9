//! `idemlog filter`: writes only the first copy of each line, also over restarts.
//!
//! A. The store is open only within a batch: nobody waits for a slow producer.
//! B. Emit first: a line is printed, and stdout flushed, before its commit. A crash between the
//!    two repeats at most this batch.
//! C. Mark first: a line is printed only after its record is durable. A crash between the two
//!    loses at most this batch.
//! D. No claim is held while a line that is busy elsewhere is waited for.

use std::collections::HashSet;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use idemlog::{
    ClaimOptions, ClaimVerdict, Commit, CommitVerdict, KEY_BYTES_MAX, NamespaceOptions, Observed,
    Repeatable,
};
use indicatif::ProgressBar;
use serde_json::json;

use crate::args::{self, Common, Order};
use crate::exit::{Code, Stop, say};
use crate::lines::{Line, Lines};

/// The namespace of `emit-first`, a Repeatable one.
const NAMESPACE_EMIT: &str = "emit";
/// The namespace of `mark-first`, a filter.
const NAMESPACE_FILTER: &str = "filter";
/// The longest pause before a line that is busy elsewhere is asked for again.
const BUSY_PAUSE_MAX: Duration = Duration::from_millis(200);
/// The key of an empty line: a byte that no line can contain.
const EMPTY_LINE_KEY: &[u8] = b"\n";

/// A line and its key.
struct Item {
    line: Line,
    key: Vec<u8>,
}

#[derive(Default)]
struct Counts {
    lines: u64,
    new: u64,
    duplicates: u64,
    batches: u64,
}

struct Job<'a> {
    common: &'a Common,
    options: &'a args::Filter,
    counts: Counts,
}

pub(crate) fn filter(common: &Common, options: &args::Filter) -> Result<u8, Stop> {
    common.store_path()?;
    let mut job = Job {
        common,
        options,
        counts: Counts::default(),
    };
    let mut lines = Lines::new(options.key_field.is_some());
    let progress = progress_line();
    let lines_max = usize::try_from(options.batch).unwrap_or(usize::MAX);
    let end = loop {
        let batch = lines.next_batch(lines_max);
        let done = job.batch(batch.lines);
        progress.set_position(job.counts.lines);
        progress.set_message(format!("{} new", job.counts.new));
        match (done, batch.end) {
            (Err(stop), _) | (Ok(()), Some(Err(stop))) => break Err(stop),
            (Ok(()), Some(Ok(()))) => break Ok(Code::Done as u8),
            (Ok(()), None) => {}
        }
    };
    progress.finish_and_clear();
    job.summary();
    end
}

/// Makes the progress line: on stderr, and only where it disturbs no output.
fn progress_line() -> ProgressBar {
    if io::stderr().is_terminal() && !io::stdout().is_terminal() {
        let style = indicatif::ProgressStyle::with_template("{spinner} {pos} lines, {msg}");
        let progress = ProgressBar::new_spinner();
        return match style {
            Ok(style) => progress.with_style(style),
            Err(_) => progress,
        };
    }
    ProgressBar::hidden()
}

impl Job<'_> {
    /// Does the lines up to the first that has no key.
    fn batch(&mut self, lines: Vec<Line>) -> Result<(), Stop> {
        let mut items = Vec::with_capacity(lines.len());
        let mut keys = HashSet::with_capacity(lines.len());
        let mut end = Ok(());
        for line in lines {
            match self.key_of(&line) {
                Ok(key) => {
                    self.counts.lines += 1;
                    // A repeat inside the batch would find our own claim, and wait for ourselves.
                    if keys.insert(key.clone()) {
                        items.push(Item { line, key });
                    } else {
                        self.counts.duplicates += 1;
                    }
                }
                Err(stop) => {
                    end = Err(stop);
                    break;
                }
            }
        }
        drop(keys);
        if !items.is_empty() {
            self.counts.batches += 1;
            match self.options.order {
                Order::EmitFirst => self.emit_first(items)?,
                Order::MarkFirst => self.mark_first(&items)?,
            }
        }
        end
    }

    fn key_of(&self, line: &Line) -> Result<Vec<u8>, Stop> {
        let key = match &self.options.key_field {
            Some(path) => {
                let path: Vec<&str> = path.split('.').collect();
                idemlog::json_field(&line.text, &path)
                    .map_err(|why| Stop::usage(format!("line={}: {why}", line.number)))?
            }
            None if line.text.is_empty() => EMPTY_LINE_KEY.to_vec(),
            None => line.text.clone(),
        };
        if key.len() > KEY_BYTES_MAX {
            return Err(Stop::usage(format!(
                "line={}: key over the limit: bytes={} bytes_max={KEY_BYTES_MAX}; use a shorter \
                 field",
                line.number,
                key.len()
            )));
        }
        Ok(key)
    }

    /// Claims, prints and commits until no line is left that was busy elsewhere.
    fn emit_first(&mut self, mut items: Vec<Item>) -> Result<(), Stop> {
        while !items.is_empty() {
            let pause;
            (items, pause) = self.emit_once(items)?;
            if !items.is_empty() {
                std::thread::park_timeout(pause.min(BUSY_PAUSE_MAX));
            }
        }
        Ok(())
    }

    /// Returns the items that were busy, and when to ask for them again.
    fn emit_once(&mut self, items: Vec<Item>) -> Result<(Vec<Item>, Duration), Stop> {
        let store = self.common.open(true)?;
        let name = self.common.namespace_or(NAMESPACE_EMIT);
        // No outcome: else room for one is kept free for every line of the batch.
        let options = NamespaceOptions::new()
            .retention(self.options.retain)
            .outcome_bytes_max(0);
        let space = store.namespace::<Repeatable>(name, options)?;
        let keys: Vec<_> = items.iter().map(|item| &item.key).collect();
        let verdicts = space.claim_many(&keys, &ClaimOptions::new())?;
        let mut claims = Vec::new();
        let mut busy = Vec::new();
        let mut pause = BUSY_PAUSE_MAX;
        let mut out = Vec::new();
        for (item, verdict) in items.into_iter().zip(verdicts) {
            let number = item.line.number;
            match verdict.map_err(|e| Stop::from(e).while_doing(&format!("line={number}")))? {
                ClaimVerdict::New(claim)
                | ClaimVerdict::Takeover { claim, .. }
                | ClaimVerdict::Retry { claim, .. } => {
                    claims.push((claim, Commit::new([])));
                    out.extend_from_slice(&item.line.text);
                    out.push(b'\n');
                }
                ClaimVerdict::Duplicate(_) => self.counts.duplicates += 1,
                ClaimVerdict::Busy {
                    lease_left: left, ..
                }
                | ClaimVerdict::Backoff { after: left, .. } => {
                    pause = pause.min(left);
                    busy.push(item);
                }
                // Only calls by hand lead here; the line is neither new nor a duplicate.
                ClaimVerdict::Rejected { .. }
                | ClaimVerdict::Dead { .. }
                | ClaimVerdict::InDoubt(_)
                | ClaimVerdict::Mismatch => {
                    return Err(Stop::new(
                        Code::Refused,
                        format!("line={number}: its key was settled by hand; forget it first"),
                    ));
                }
            }
        }
        write_out(&out)?;
        self.counts.new += u64::try_from(claims.len()).unwrap_or(u64::MAX);
        commit_all(&space, &mut claims)?;
        drop(claims);
        store.close()?;
        Ok((busy, pause))
    }

    fn mark_first(&mut self, items: &[Item]) -> Result<(), Stop> {
        let store = self.common.open(true)?;
        let name = self.common.namespace_or(NAMESPACE_FILTER);
        let options = NamespaceOptions::new().retention(self.options.retain);
        let space = store.filter(name, options)?;
        let keys: Vec<_> = items.iter().map(|item| &item.key).collect();
        let observed = space.observe_many(&keys)?;
        store.close()?;
        let mut out = Vec::new();
        let mut failed = None;
        for (item, observed) in items.iter().zip(observed) {
            match observed {
                Ok(Observed::New) => {
                    self.counts.new += 1;
                    out.extend_from_slice(&item.line.text);
                    out.push(b'\n');
                }
                Ok(Observed::Duplicate) => self.counts.duplicates += 1,
                // The marked ones are printed all the same: they will not come again.
                Err(error) if failed.is_none() => {
                    let line = format!("line={}", item.line.number);
                    failed = Some(Stop::from(error).while_doing(&line));
                }
                Err(_) => {}
            }
        }
        write_out(&out)?;
        failed.map_or(Ok(()), Err)
    }

    fn summary(&self) {
        let Counts {
            lines,
            new,
            duplicates,
            batches,
        } = self.counts;
        if self.common.json {
            let counts = json!({
                "lines": lines, "new": new, "duplicates": duplicates, "batches": batches,
            });
            say(&counts.to_string());
        } else {
            say(&format!(
                "idemlog: lines={lines} new={new} duplicates={duplicates} batches={batches}"
            ));
        }
    }
}

fn commit_all(
    space: &idemlog::Namespace<Repeatable>,
    claims: &mut [(idemlog::Claim<Repeatable>, Commit)],
) -> Result<(), Stop> {
    let what = "printed but not committed, so the batch may be printed again";
    let verdicts = space
        .commit_many(claims)
        .map_err(|e| Stop::from(e).while_doing(what))?;
    for verdict in verdicts {
        match verdict.map_err(|e| Stop::from(e).while_doing(what))? {
            CommitVerdict::Committed { .. } | CommitVerdict::AlreadyCommitted => {}
            CommitVerdict::Conflict { .. }
            | CommitVerdict::Fenced { .. }
            | CommitVerdict::CellConflict { .. } => {
                return Err(Stop::new(Code::Failed, format!("{what}: fenced")));
            }
        }
    }
    Ok(())
}

/// Writes to stdout what the consumer must have before anything is committed.
fn write_out(bytes: &[u8]) -> Result<(), Stop> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)
        .and_then(|()| out.flush())
        .map_err(|e| Stop::io("cannot write the lines of this batch to stdout", &e))
}
