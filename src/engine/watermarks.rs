//! Watermarks: which numbers of a source are done, in one record a source.

use std::sync::Arc;

use super::group::{GroupLevels, Grouped, Member, MemberStep};
use super::handle::Handle;
use super::namespace::Space;
use crate::error::{Error, ErrorKind, Result};
use crate::format::record::Kind;
use crate::format::watermark::Marks;
use crate::key::check_key;
use crate::model::claim::{Entry, Env};
use crate::model::watermark::Unmarked;
use crate::options::{MarkOptions, Retention};
use crate::verdict::{Reset, Sequenced};

/// A namespace of sources whose messages are numbered: of each it keeps which numbers are done.
///
/// A number is done when a commit that carries it is ([`Commit::advance`](crate::Commit::advance)),
/// not when it is observed. Numbers below the contiguous mark cost no record of their own.
/// Nothing expires. Clones are handles of the same watermarks.
#[derive(Clone, Debug)]
pub struct Watermarks {
    pub(super) handle: Arc<Handle>,
    pub(super) space: Arc<Space>,
}

impl Watermarks {
    pub(crate) fn new(handle: Arc<Handle>, space: Arc<Space>) -> Self {
        Watermarks { handle, space }
    }

    /// Returns the namespace's name.
    pub fn name(&self) -> &str {
        &self.space.name
    }

    /// Says whether a number of a source is done. Changes nothing.
    ///
    /// # Errors
    /// `Invalid` for an empty or oversized source, or one that was begun in the other mode,
    /// `Damaged`, `Io`, `Closed`, `Poisoned`.
    pub fn observe(&self, source: impl AsRef<[u8]>, number: u64) -> Result<Sequenced> {
        let marks = self.read(source.as_ref())?;
        Ok(marks
            .unwrap_or_else(|| unknown(self.space.options.marks))
            .observe(number))
    }

    /// Returns the highest number up to which all are done; `None` if the first one is not.
    /// It is as durable as the namespace says: a consumer of Kafka commits it plus one.
    ///
    /// # Errors
    /// As [`Watermarks::observe`].
    pub fn safe_position(&self, source: impl AsRef<[u8]>) -> Result<Option<u64>> {
        let marks = self.read(source.as_ref())?;
        Ok(marks
            .unwrap_or_else(|| unknown(self.space.options.marks))
            .safe_position())
    }

    /// Returns the epoch of a source: 0 until it is reset.
    ///
    /// # Errors
    /// As [`Watermarks::observe`].
    pub fn epoch(&self, source: impl AsRef<[u8]>) -> Result<u64> {
        Ok(self.read(source.as_ref())?.map_or(0, |marks| marks.epoch))
    }

    /// Makes a source known whose lowest number is `first`; of one that is known nothing changes.
    /// Without it a source begins at the first number of the namespace's options.
    ///
    /// # Errors
    /// As [`Watermarks::observe`]; `Full`.
    pub fn begin(&self, source: impl AsRef<[u8]>, first: u64) -> Result<()> {
        let sparse = self.space.options.marks.sparse;
        self.update(source.as_ref(), |marks, _| {
            Ok(match marks {
                Some(_) => MemberStep::Nothing,
                None => MemberStep::Refuse(Marks::begin(sparse, 0, first)),
            })
        })
        .map(|_| ())
    }

    /// Marks a number as done, apart from any commit, and says what was known of it before.
    ///
    /// # Errors
    /// As [`Watermarks::observe`]; `Full` when too many numbers before it are not done (see
    /// [`WatermarkOptions::sparse`](crate::WatermarkOptions::sparse)): nothing was written.
    pub fn advance(&self, source: impl AsRef<[u8]>, number: u64) -> Result<Sequenced> {
        let options = self.space.options.marks;
        let mut before = Sequenced::Duplicate;
        self.update(source.as_ref(), |marks, _| {
            let marks = marks.unwrap_or_else(|| unknown(options));
            before = marks.observe(number);
            let next = advanced(&marks, options, None, &[number])?;
            Ok(next.map_or(MemberStep::Nothing, MemberStep::Refuse))
        })?;
        Ok(before)
    }

    /// Numbers a source anew, under a higher epoch: everything below `first` counts as done, and
    /// nothing else. For a topic that was made again, or a partition whose log was cut.
    ///
    /// # Errors
    /// As [`Watermarks::observe`]; `Full`.
    pub fn reset(&self, source: impl AsRef<[u8]>, epoch: u64, first: u64) -> Result<Reset> {
        let sparse = self.space.options.marks.sparse;
        let mut answer = Reset::Applied;
        // The mode may change with the epoch.
        self.update_entry(source.as_ref(), |entry, _| {
            let current = decode(entry)?.map_or(0, |marks| marks.epoch);
            Ok(if epoch > current {
                answer = Reset::Applied;
                MemberStep::Refuse(Marks::begin(sparse, epoch, first))
            } else {
                answer = Reset::Fenced { current };
                MemberStep::Nothing
            })
        })?;
        Ok(answer)
    }

    fn read(&self, source: &[u8]) -> Result<Option<Marks>> {
        let entry = self.handle.engine.read_entry(&self.space, source)?;
        marks_of(entry.as_ref(), self.space.options.marks)
    }

    /// Carries out one change; `decide` says by `Refuse` what to write.
    fn update(
        &self,
        source: &[u8],
        mut decide: impl FnMut(Option<Marks>, &Env) -> Result<MemberStep<Marks>>,
    ) -> Result<()> {
        let options = self.space.options.marks;
        self.update_entry(source, |entry, env| decide(marks_of(entry, options)?, env))
    }

    fn update_entry(
        &self,
        source: &[u8],
        mut decide: impl FnMut(Option<&Entry>, &Env) -> Result<MemberStep<Marks>>,
    ) -> Result<()> {
        check_key(source)?;
        let engine = &self.handle.engine;
        let member = [Member {
            space: &self.space,
            key: source,
            retention: Retention::Forever,
        }];
        let levels = GroupLevels {
            level: engine.level(self.space.options.durability, None),
            reserved_bytes: 0,
        };
        let grouped: Grouped<()> = engine.update_group(&member, levels, |_, entry, env| {
            Ok(match decide(entry, env)? {
                MemberStep::Refuse(marks) => MemberStep::Write {
                    entry: entry_of(&marks, env),
                    stamped: true,
                },
                _ => MemberStep::Nothing,
            })
        })?;
        drop(grouped);
        Ok(())
    }
}

/// A source that nobody has begun.
fn unknown(options: MarkOptions) -> Marks {
    Marks::begin(options.sparse, 0, options.first)
}

fn decode(entry: Option<&Entry>) -> Result<Option<Marks>> {
    let Some(entry) = entry.filter(|entry| entry.kind == Kind::Watermark) else {
        return Ok(None);
    };
    let marks = Marks::decode(&entry.outcome).map_err(|why| {
        let what = format!("watermark is damaged: {}; see docs/operations.md", why.0);
        Error::new(ErrorKind::Damaged, what)
    })?;
    Ok(Some(marks))
}

fn marks_of(entry: Option<&Entry>, options: MarkOptions) -> Result<Option<Marks>> {
    let Some(marks) = decode(entry)? else {
        return Ok(None);
    };
    if marks.sparse != options.sparse {
        let mode = |sparse| if sparse { "sparse" } else { "strict" };
        return Err(Error::invalid(format!(
            "source was begun in another mode: found={} asked={}; reset it under a higher epoch, \
             or open the namespace in the mode it has",
            mode(marks.sparse),
            mode(options.sparse)
        )));
    }
    Ok(Some(marks))
}

fn entry_of(marks: &Marks, env: &Env) -> Entry {
    let mut entry = Entry::new(Kind::Watermark);
    entry.state.at_ms = env.now.trusted_ms;
    entry.outcome = marks.encode();
    entry
}

fn advanced(
    marks: &Marks,
    options: MarkOptions,
    epoch: Option<u64>,
    numbers: &[u64],
) -> Result<Option<Marks>> {
    if numbers.contains(&u64::MAX) {
        return Err(Error::invalid(
            "number is the largest one there is: nothing could come after it",
        ));
    }
    match marks.advanced(epoch, numbers, options.stretches_max) {
        Ok(next) => Ok(next),
        Err(Unmarked::OldEpoch) => Ok(None),
        Err(Unmarked::UnknownEpoch) => Err(Error::invalid(format!(
            "epoch of the source was not begun: current={} asked={}; reset the source first",
            marks.epoch,
            epoch.unwrap_or_default()
        ))),
        Err(Unmarked::Overflow) => Err(Error::new(
            ErrorKind::Full,
            format!(
                "too many numbers are done beyond one that is not: lowest_not_done={} \
                 stretches_max={}; finish that one, or raise the bound",
                marks.next, options.stretches_max
            ),
        )),
    }
}

/// Decides what a commit does to a source; `None`: nothing.
pub(crate) fn advance_step(
    entry: Option<&Entry>,
    env: &Env,
    options: MarkOptions,
    epoch: Option<u64>,
    numbers: &[u64],
) -> Result<Option<Entry>> {
    let marks = marks_of(entry, options)?.unwrap_or_else(|| unknown(options));
    let next = advanced(&marks, options, epoch, numbers)?;
    Ok(next.map(|next| entry_of(&next, env)))
}
