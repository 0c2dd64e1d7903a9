//! The judge: opens what a crash has left, and compares every key with the book.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use idemlog::{
    ClaimVerdict, DedupLog, EffectClass, Filter, Internal, KeyState, Namespace, NamespaceKind,
    NonRepeatable, Observed, Outcome, Probeable, Repeatable,
};

use super::book::{Book, State, kind_of};
use super::{LOOSE, MAIN, SHORT, error_of, options, outcome_of, space_options};
use crate::context::Fallible;

/// Keys that were never asked for, of each space.
const STRANGERS_COUNT: usize = 40;
/// Keys written after the crash.
const NEW_COUNT: usize = 10;

/// What every key was found as, for comparison with a later look.
pub(crate) type Found = BTreeMap<(String, String), State>;

pub(crate) struct Judge {
    book: Book,
    pub(crate) faults: Vec<String>,
}

impl Judge {
    pub(crate) fn new(notes: &str) -> Self {
        let mut book = Book::read(notes);
        let faults = std::mem::take(&mut book.faults);
        Judge { book, faults }
    }

    /// Reads every key, changes nothing.
    pub(crate) fn look(&mut self, dir: &Path) -> Fallible<(DedupLog, Found)> {
        let log = options().create(!self.book.exists).open(dir)?;
        let found = self.read_all(&log)?;
        Ok((log, found))
    }

    fn read_all(&mut self, log: &DedupLog) -> Fallible<Found> {
        let spaces = Spaces::open(log)?;
        let mut found = Found::new();
        for ((space, key), page) in &self.book.pages {
            let state = spaces.get(space, key)?;
            let Some(state_found) = State::of(&state) else {
                self.faults
                    .push(format!("{space} {key} is {}", state.name()));
                continue;
            };
            found.insert((space.clone(), key.clone()), state_found);
            let expired = space == SHORT && state_found == State::Absent;
            if !expired && !page.allows(space, state_found) {
                let allowed = &page.allowed;
                self.faults
                    .push(format!("{space} {key} is {state_found:?}, not {allowed:?}"));
            }
            if !is_exact(&state, key) {
                self.faults
                    .push(format!("{space} {key} has the outcome or error of another"));
            }
        }
        for (part, loose) in &self.book.loose {
            let keys: Vec<String> = (0..loose.asked).map(|n| format!("{part}-{n}")).collect();
            let mut there = Vec::new();
            for key in &keys {
                let is_there = spaces.get(LOOSE, key)? == KeyState::Seen;
                there.push(is_there);
                let state = if is_there { State::Seen } else { State::Absent };
                found.insert((LOOSE.to_owned(), key.clone()), state);
            }
            let count = there.iter().take_while(|is_there| **is_there).count();
            if there.iter().skip(count).any(|is_there| *is_there) {
                self.faults
                    .push(format!("{LOOSE} {part}: a hole behind {count} keys"));
            }
            if (count as u64) < loose.durable {
                self.faults.push(format!(
                    "{LOOSE} {part}: {count} keys left, {} were durable",
                    loose.durable
                ));
            }
        }
        for space in Spaces::NAMES {
            for number in 0..STRANGERS_COUNT {
                let state = spaces.get(space, &format!("stranger-{number}"))?;
                if state != KeyState::Absent {
                    self.faults
                        .push(format!("{space} stranger-{number} is {}", state.name()));
                }
            }
        }
        Ok(found)
    }

    /// Everything: reads, claims, writes, reopens, verifies.
    pub(crate) fn judge(&mut self, dir: &Path) -> Fallible<()> {
        let (log, found) = self.look(dir)?;
        self.claim_all(&log, &found)?;
        let main = log.filter(MAIN, space_options())?;
        self.write_new(&main, Observed::New)?;
        let health = log.health();
        if health.poisoned.is_some() {
            self.faults
                .push(format!("poisoned after the crash: {:?}", health.poisoned));
        }
        drop(main);
        log.close()?;
        let log = options().create(false).open(dir)?;
        let main = log.filter(MAIN, space_options())?;
        self.write_new(&main, Observed::Duplicate)?;
        for ((space, key), state) in found.iter().filter(|((space, _), _)| space == MAIN) {
            if State::of(&main.get(key)?) != Some(*state) {
                self.faults.push(format!(
                    "{space} {key} was {state:?} and is not after a reopen"
                ));
            }
        }
        drop(main);
        log.close()?;
        let report = idemlog::verify(dir)?;
        for problem in &report.problems {
            self.faults.push(format!("verify: {problem:?}"));
        }
        Ok(())
    }

    fn write_new(&mut self, main: &Filter, expected: Observed) -> Fallible<()> {
        for number in 0..NEW_COUNT {
            let key = format!("new-{number}");
            if main.observe(&key)? != expected {
                self.faults
                    .push(format!("{MAIN} {key} is not {expected:?}"));
            }
        }
        Ok(())
    }

    /// Claims every key that was claimed before the crash: the answers of the crash table.
    fn claim_all(&mut self, log: &DedupLog, found: &Found) -> Fallible<()> {
        let spaces = Spaces::open(log)?;
        for ((space, key), state) in found {
            let answer = match kind_of(space) {
                NamespaceKind::Repeatable => claim(&spaces.repeatable, key)?,
                NamespaceKind::Probeable => claim(&spaces.probeable, key)?,
                NamespaceKind::NonRepeatable => claim(&spaces.non_repeatable, key)?,
                NamespaceKind::Internal => claim(&spaces.internal, key)?,
                // No other keys are claimed.
                _ => continue,
            };
            let fits = match (state, kind_of(space)) {
                (State::Done, _) => answer == "duplicate",
                (State::Rejected, _) => answer == "rejected",
                (State::Failed, _) => answer == "backoff",
                (State::InDoubt, _) | (State::Started, NamespaceKind::NonRepeatable) => {
                    answer == "in-doubt"
                }
                (State::Started, NamespaceKind::Probeable) => {
                    answer == "busy" || answer == "in-doubt"
                }
                (State::Started | State::Claimed, _) => answer == "takeover",
                (State::Absent, _) => answer == "new",
                (State::Seen, _) => false,
            };
            if !fits {
                self.faults.push(format!(
                    "{space} {key} is {state:?}, but a claim gets {answer}"
                ));
            }
        }
        Ok(())
    }

    /// Says what is wrong, if anything.
    pub(crate) fn say(&self) -> Fallible<bool> {
        let mut out = std::io::stdout().lock();
        for fault in self.faults.iter().take(8) {
            writeln!(out, "BAD {fault}")?;
        }
        writeln!(
            out,
            "{} keys, {} faults",
            self.book.pages.len(),
            self.faults.len()
        )?;
        Ok(self.faults.is_empty())
    }
}

fn is_exact(state: &KeyState, key: &str) -> bool {
    match state {
        KeyState::Done(done) => done.outcome == Outcome::Kept(outcome_of(key)),
        KeyState::Rejected { error, .. } | KeyState::Failed { error, .. } => {
            *error == error_of(key)
        }
        _ => true,
    }
}

fn claim<C: EffectClass>(space: &Namespace<C>, key: &str) -> Fallible<&'static str> {
    Ok(match space.claim(key)? {
        ClaimVerdict::New(_) => "new",
        ClaimVerdict::Takeover { .. } => "takeover",
        ClaimVerdict::Retry { .. } => "retry",
        ClaimVerdict::Busy { .. } => "busy",
        ClaimVerdict::Duplicate(done) if done.outcome == Outcome::Kept(outcome_of(key)) => {
            "duplicate"
        }
        ClaimVerdict::Duplicate(_) => "duplicate with another outcome",
        ClaimVerdict::Backoff { .. } => "backoff",
        ClaimVerdict::Rejected { .. } => "rejected",
        ClaimVerdict::InDoubt(_) => "in-doubt",
        _ => "another answer",
    })
}

struct Spaces {
    main: Filter,
    loose: Filter,
    short: Filter,
    repeatable: Namespace<Repeatable>,
    probeable: Namespace<Probeable>,
    non_repeatable: Namespace<NonRepeatable>,
    internal: Namespace<Internal>,
}

impl Spaces {
    const NAMES: [&'static str; 7] = [
        MAIN,
        LOOSE,
        SHORT,
        "repeatable",
        "probeable",
        "non-repeatable",
        "internal",
    ];

    fn open(log: &DedupLog) -> Fallible<Self> {
        Ok(Spaces {
            main: log.filter(MAIN, space_options())?,
            loose: log.filter(LOOSE, space_options())?,
            short: log.filter(SHORT, space_options())?,
            repeatable: log.namespace("repeatable", space_options())?,
            probeable: log.namespace("probeable", space_options())?,
            non_repeatable: log.namespace("non-repeatable", space_options())?,
            internal: log.namespace("internal", space_options())?,
        })
    }

    fn get(&self, space: &str, key: &str) -> Fallible<KeyState> {
        Ok(match space {
            LOOSE => self.loose.get(key)?,
            SHORT => self.short.get(key)?,
            "repeatable" => self.repeatable.get(key)?,
            "probeable" => self.probeable.get(key)?,
            "non-repeatable" => self.non_repeatable.get(key)?,
            "internal" => self.internal.get(key)?,
            _ => self.main.get(key)?,
        })
    }
}
