//! The book: from a workload's notes, which states each key may be in after a crash.
//!
//! It knows nothing of how the store works. An answer at `Power` leaves one state. A call that
//! had not answered leaves two. A call that is not waited for adds one and takes none away.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use idemlog::{Applied, KeyState, NamespaceKind};

use super::notes::{Line, Op, parse};
use super::{AFTER, LOOSE, SHORT};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum State {
    Absent,
    Seen,
    Claimed,
    Started,
    Done,
    Rejected,
    Failed,
    InDoubt,
}

impl State {
    pub(crate) fn of(state: &KeyState) -> Option<State> {
        Some(match state {
            KeyState::Absent => State::Absent,
            KeyState::Seen => State::Seen,
            KeyState::Pending { started: false, .. } => State::Claimed,
            KeyState::Pending { started: true, .. } => State::Started,
            KeyState::Done(_) => State::Done,
            KeyState::Rejected { .. } => State::Rejected,
            KeyState::Failed { .. } => State::Failed,
            KeyState::InDoubt(_) => State::InDoubt,
            KeyState::Dead { .. } => return None,
        })
    }

    fn after(op: Op) -> State {
        match op {
            Op::See => State::Seen,
            Op::Forget | Op::Release | Op::Sync => State::Absent,
            Op::Claim => State::Claimed,
            Op::Start => State::Started,
            Op::Commit => State::Done,
            Op::Reject => State::Rejected,
            Op::Retry => State::Failed,
            Op::Doubt => State::InDoubt,
        }
    }
}

/// Which states one key may be in.
#[derive(Clone, Debug)]
pub(crate) struct Page {
    pub(crate) allowed: BTreeSet<State>,
}

impl Page {
    /// Says whether a key may be found like this.
    pub(crate) fn allows(&self, space: &str, found: State) -> bool {
        // Whoever held it is gone, and nobody can ask the target: the start is a doubt.
        let doubt_of_start = found == State::InDoubt
            && kind_of(space) == NamespaceKind::NonRepeatable
            && self.allowed.contains(&State::Started);
        self.allowed.contains(&found) || doubt_of_start
    }
}

struct Open {
    op: Op,
    space: String,
    key: String,
    before: BTreeSet<State>,
    /// How many loose keys of each part had been answered when this was asked.
    loose: BTreeMap<String, u64>,
}

/// Loose keys of one part: they are lost from the end only.
#[derive(Default)]
pub(crate) struct Loose {
    pub(crate) asked: u64,
    answered: u64,
    /// So many must be there.
    pub(crate) durable: u64,
}

#[derive(Default)]
pub(crate) struct Book {
    pub(crate) pages: BTreeMap<(String, String), Page>,
    pub(crate) loose: BTreeMap<String, Loose>,
    /// Something at `Power` was answered: the store exists.
    pub(crate) exists: bool,
    pub(crate) answers_count: u64,
    pub(crate) errors: BTreeMap<String, u64>,
    pub(crate) facts: Vec<String>,
    /// Answers that contradict earlier answers.
    pub(crate) faults: Vec<String>,
    open: HashMap<u64, Open>,
    poisoned: bool,
}

impl Book {
    pub(crate) fn read(notes: &str) -> Self {
        let mut book = Book::default();
        // What a crash has cut off is no line.
        let whole = notes
            .rfind('\n')
            .map_or("", |end| notes.get(..end).unwrap_or_default());
        for line in whole.lines() {
            match parse(line) {
                Some(Line::Asked { id, op, space, key }) => book.asked(id, op, space, key),
                Some(Line::Answered { id, word }) => book.answered(id, word),
                Some(Line::Failed { id, applied, kind }) => book.failed(id, applied, kind),
                Some(Line::Fact(text)) => book.fact(text),
                None => {}
            }
        }
        book
    }

    fn asked(&mut self, id: u64, op: Op, space: &str, key: &str) {
        let mut before = BTreeSet::new();
        if let Some((part, _)) = loose_number(space, key) {
            self.loose.entry(part.to_owned()).or_default().asked += 1;
        } else if op != Op::Sync {
            let page = self
                .pages
                .entry((space.to_owned(), key.to_owned()))
                .or_insert_with(|| Page {
                    allowed: BTreeSet::from([State::Absent]),
                });
            before.clone_from(&page.allowed);
            page.allowed.insert(State::after(op));
        }
        let loose = self
            .loose
            .iter()
            .map(|(part, loose)| (part.clone(), loose.answered));
        let open = Open {
            op,
            space: space.to_owned(),
            key: key.to_owned(),
            before,
            loose: loose.collect(),
        };
        self.open.insert(id, open);
    }

    fn answered(&mut self, id: u64, word: &str) {
        let Some(open) = self.open.remove(&id) else {
            self.faults
                .push(format!("an answer to nothing: {id} {word}"));
            return;
        };
        self.answers_count += 1;
        if let Some((part, number)) = loose_number(&open.space, &open.key) {
            let loose = self.loose.entry(part.to_owned()).or_default();
            loose.answered = loose.answered.max(number + 1);
            return;
        }
        if is_durable(open.op, &open.space) {
            self.exists = true;
        }
        // An answer that rests on an older record says nothing of what came after that one.
        let appends = match open.op {
            Op::See => word == "new",
            // What is absent is not written again.
            Op::Forget => false,
            _ => word == "ok",
        };
        if appends && is_durable(open.op, &open.space) {
            for (part, answered) in &open.loose {
                let loose = self.loose.entry(part.clone()).or_default();
                loose.durable = loose.durable.max(*answered);
            }
        }
        if open.op == Op::Sync {
            return;
        }
        if self.poisoned && word == "new" && open.key.contains(AFTER) {
            self.faults.push(format!(
                "{} {} was promised when poisoned",
                open.space, open.key
            ));
        }
        let (allowed, contradicts) = after_answer(&open, word);
        if open.space != SHORT && contradicts {
            self.faults.push(format!(
                "{} {} answered {word} to {}, but it was {:?}",
                open.space,
                open.key,
                open.op.name(),
                open.before
            ));
        }
        self.pages.insert((open.space, open.key), Page { allowed });
    }

    fn failed(&mut self, id: u64, applied: Applied, kind: &str) {
        *self.errors.entry(kind.to_owned()).or_default() += 1;
        let Some(open) = self.open.remove(&id) else {
            return;
        };
        // "Not applied" is a promise as well.
        if applied == Applied::No
            && open.op != Op::Sync
            && let Some(page) = self.pages.get_mut(&(open.space, open.key))
        {
            page.allowed = open.before;
        }
    }

    fn fact(&mut self, text: &str) {
        if text == "closed" {
            self.exists = true;
            for loose in self.loose.values_mut() {
                loose.durable = loose.durable.max(loose.answered);
            }
        }
        if text == "opening" {
            self.poisoned = false;
            // What the process before had only in memory died with it.
            for loose in self.loose.values_mut() {
                loose.answered = loose.durable;
            }
        }
        self.poisoned |= text == "poisoned true";
        self.facts.push(text.to_owned());
    }
}

/// What an answer leaves, and whether it contradicts what was known.
fn after_answer(open: &Open, word: &str) -> (BTreeSet<State>, bool) {
    let before = &open.before;
    let only = |state: State| BTreeSet::from([state]);
    let known = |states: &[State]| -> BTreeSet<State> {
        before
            .iter()
            .copied()
            .filter(|state| states.contains(state))
            .collect()
    };
    match (open.op, word) {
        (Op::See, "new") => (only(State::Seen), !before.contains(&State::Absent)),
        (Op::See, "dup") => (only(State::Seen), !before.contains(&State::Seen)),
        (Op::Claim, "granted") => {
            let mut states = known(&[State::Absent, State::Claimed, State::Failed]);
            if kind_of(&open.space) != NamespaceKind::NonRepeatable {
                states.extend(known(&[State::Started]));
            }
            let contradicts = states.is_empty();
            states.insert(State::Claimed);
            (states, contradicts)
        }
        (Op::Claim, "dup") => (only(State::Done), !before.contains(&State::Done)),
        (Op::Claim, "rejected") => (only(State::Rejected), !before.contains(&State::Rejected)),
        (Op::Claim, "in-doubt") => {
            let states = known(&[State::Started, State::InDoubt]);
            let contradicts = states.is_empty();
            (states, contradicts)
        }
        (Op::Claim, "busy") => {
            let states = known(&[State::Started, State::Claimed, State::InDoubt]);
            let contradicts = states.is_empty();
            (states, contradicts)
        }
        (Op::Claim, "backoff") => (known(&[State::Failed]), !before.contains(&State::Failed)),
        (op, "ok") if is_durable(op, &open.space) => (only(State::after(op)), false),
        (op, "ok") => {
            let mut states = before.clone();
            states.insert(State::after(op));
            (states, false)
        }
        _ => (before.clone(), true),
    }
}

/// Says whether the answer waits for a flush.
fn is_durable(op: Op, space: &str) -> bool {
    let starts_durably = matches!(
        kind_of(space),
        NamespaceKind::Probeable | NamespaceKind::NonRepeatable
    );
    let is_waited_for = op != Op::Claim;
    let needs_durable_start = matches!(op, Op::Start | Op::Release);
    space != LOOSE && is_waited_for && (!needs_durable_start || starts_durably)
}

/// Spaces of claims are called after their class.
pub(crate) fn kind_of(space: &str) -> NamespaceKind {
    NamespaceKind::from_name(space).unwrap_or(NamespaceKind::Filter)
}

/// The part and the number of a loose key, as in `p0-00017`.
pub(crate) fn loose_number<'a>(space: &str, key: &'a str) -> Option<(&'a str, u64)> {
    let (part, number) = key.split_once('-').filter(|_| space == LOOSE)?;
    Some((part, number.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(notes: &str) -> BTreeSet<State> {
        let book = Book::read(notes);
        assert!(book.faults.is_empty(), "{:?}", book.faults);
        book.pages.values().next().unwrap().allowed.clone()
    }

    #[test]
    fn answers_narrow_and_open_calls_widen() {
        assert_eq!(
            allowed("? 1 see main a\n"),
            BTreeSet::from([State::Absent, State::Seen])
        );
        assert_eq!(
            allowed("? 1 see main a\n! 1 new\n"),
            BTreeSet::from([State::Seen])
        );
        assert_eq!(
            allowed("? 1 see main a\nx 1 no Full\n"),
            BTreeSet::from([State::Absent])
        );
        let claim = "? 1 claim repeatable a\n! 1 granted\n? 2 start repeatable a\n! 2 ok\n";
        let early = [State::Absent, State::Claimed, State::Started];
        assert_eq!(allowed(claim), BTreeSet::from(early));
        let claim = claim.replace("repeatable", "probeable");
        assert_eq!(allowed(&claim), BTreeSet::from([State::Started]));
    }

    #[test]
    fn a_key_answered_new_twice_is_a_fault() {
        let book = Book::read("? 1 see main a\n! 1 new\n? 2 see main a\n! 2 new\n");
        assert_eq!(book.faults.len(), 1);
    }

    #[test]
    fn what_was_loose_before_a_flush_is_durable_with_it() {
        let notes = "? 1 see loose p0-0\n! 1 new\n? 2 see main a\n? 3 see loose p0-1\n! 3 new\n\
                     ! 2 new\n";
        assert_eq!(Book::read(notes).loose["p0"].durable, 1);
    }
}
