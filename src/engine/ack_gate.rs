//! The ack gate: which messages may be acknowledged to the broker now?
//!
//! A. A tag is released only when everything up to its position is durable.
//! B. For a broker that acknowledges cumulatively, a tag is released only together with or after
//!    every tag received before it.
//! C. A tag is released at most once.
//! D. A poisoned store releases nothing any more.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::handle::DedupLog;
use crate::error::{Error, ErrorKind, Result};
use crate::position::Position;

/// What one acknowledgement covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AckMode {
    /// One message: SQS, NATS, RabbitMQ without `multiple`.
    Individual,
    /// This message and all that were received before it: Kafka's offsets, RabbitMQ with
    /// `multiple`.
    Cumulative,
}

/// Holds back acknowledgements until what they rest on is durable: below
/// [`Durability::Power`](crate::Durability::Power) a commit is answered before it is, and an
/// acknowledged message is never delivered again.
///
/// It lives in memory and forgets everything with its process, which is right: the broker then
/// delivers again whatever was not acknowledged, and what was committed is a duplicate.
///
/// A tag is whatever the broker's acknowledgement needs: a number, an offset, a receipt handle.
/// One gate serves one channel, queue or partition; drop it when that is lost.
///
/// ```
/// use idemlog::{AckGate, AckMode, DedupLog, Durability, KeyParts, NamespaceOptions, Repeatable};
/// use idemlog::{ClaimVerdict, CommitVerdict};
///
/// let log = DedupLog::in_memory()?;
/// let options = NamespaceOptions::new().durability(Durability::Buffered);
/// let orders = log.namespace::<Repeatable>("orders", options)?;
/// let mut gate = AckGate::new(AckMode::Cumulative, 1000);
///
/// for offset in 41..44 {
///     gate.received(offset)?;
///     let position = match orders.claim(KeyParts::kafka("orders", 0, offset)?)? {
///         ClaimVerdict::New(mut claim) => match claim.commit(b"done")? {
///             CommitVerdict::Committed { position } => position,
///             _ => log.answered_position(),
///         },
///         // A duplicate may rest on a record that is not durable, either.
///         _ => log.answered_position(),
///     };
///     gate.push(offset, position)?;
/// }
/// log.sync()?;
/// let last = gate.ready(&log)?.pop();
/// assert_eq!(last, Some(43)); // Kafka: commit 44, the offset to go on from.
/// # Ok::<(), idemlog::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct AckGate<T> {
    mode: AckMode,
    tags_max: usize,
    /// The position of each tag held, once it is known.
    tags: BTreeMap<T, Option<Position>>,
    /// Tags held, in the order in which they were received. Empty in mode `Individual`.
    order: VecDeque<T>,
    /// Tags with their positions, the oldest first. Empty in mode `Cumulative`.
    pushed: BTreeSet<(Position, T)>,
}

impl<T: Ord + Clone> AckGate<T> {
    /// Makes a gate that holds at most this many tags. Each takes about twice its own size and
    /// 50 bytes. Let it be at least the number of messages that the broker sends ahead.
    pub fn new(mode: AckMode, tags_max: usize) -> Self {
        AckGate {
            mode,
            tags_max,
            tags: BTreeMap::new(),
            order: VecDeque::new(),
            pushed: BTreeSet::new(),
        }
    }

    /// Says that a message was received. In mode `Cumulative` every message must be, in the order
    /// of the broker, before anything is done about it; gaps between numbers do not matter. In
    /// mode `Individual` it may be left out.
    ///
    /// # Errors
    /// `Full` at the bound: receive no more until something was released. `Invalid` for a tag
    /// that is held already.
    pub fn received(&mut self, tag: T) -> Result<()> {
        self.hold(tag, None)
    }

    /// Says on which position the message's acknowledgement rests: that of its commit, or
    /// [`DedupLog::answered_position`] taken after its verdict.
    ///
    /// # Errors
    /// `Invalid` for a tag that was pushed already, or, in mode `Cumulative`, was not received or
    /// was released. `Full` as [`AckGate::received`], in mode `Individual` only.
    pub fn push(&mut self, tag: T, position: Position) -> Result<()> {
        match self.tags.get_mut(&tag) {
            Some(Some(_)) => return Err(Error::invalid("tag was pushed already")),
            Some(unknown) => *unknown = Some(position),
            None if self.mode == AckMode::Cumulative => {
                return Err(Error::invalid(
                    "tag was not received, or was released already: say received() for each \
                     message, in order",
                ));
            }
            None => self.hold(tag.clone(), Some(position))?,
        }
        if self.mode == AckMode::Individual {
            self.pushed.insert((position, tag));
        }
        Ok(())
    }

    fn hold(&mut self, tag: T, position: Option<Position>) -> Result<()> {
        if self.tags.contains_key(&tag) {
            return Err(Error::invalid("tag was received already"));
        }
        if self.tags.len() >= self.tags_max {
            return Err(Error::new(
                ErrorKind::Full,
                format!(
                    "ack gate is full: tags_max={}; receive no more until something is released",
                    self.tags_max
                ),
            ));
        }
        if self.mode == AckMode::Cumulative {
            self.order.push_back(tag.clone());
        }
        self.tags.insert(tag, position);
        Ok(())
    }

    /// Takes a tag out without releasing it, because its message was rejected, dead-lettered or
    /// given back one by one; nothing waits for it any more. Returns whether it was held.
    ///
    /// With Kafka a later offset passes over the message: withdraw it only when it is kept
    /// elsewhere.
    pub fn withdraw(&mut self, tag: &T) -> bool {
        let Some(position) = self.tags.remove(tag) else {
            return false;
        };
        if let Some(position) = position {
            self.pushed.remove(&(position, tag.clone()));
        }
        self.order.retain(|held| held != tag);
        true
    }

    /// Takes out the tags that may be acknowledged now, each once, in the order of the records
    /// they rest on, or, in mode `Cumulative`, in which they were received: acknowledge the last
    /// one then, which stands for all.
    ///
    /// It does not wait and flushes nothing: below `Power`, records become durable within the
    /// sync interval, or by [`DedupLog::sync`].
    ///
    /// # Errors
    /// `Poisoned`: nothing is released any more.
    pub fn ready(&mut self, log: &DedupLog) -> Result<Vec<T>> {
        let engine = &log.handle.engine;
        if let Some(error) = engine.poison.error() {
            return Err(error);
        }
        let durable = log.durable_position();
        Ok(self.release(durable))
    }

    fn release(&mut self, durable: Position) -> Vec<T> {
        let mut released = Vec::new();
        match self.mode {
            AckMode::Individual => {
                while let Some((position, _)) = self.pushed.first()
                    && *position < durable
                {
                    released.extend(self.pushed.pop_first().map(|(_, tag)| tag));
                }
            }
            AckMode::Cumulative => {
                while let Some(tag) = self.order.front()
                    && let Some(Some(position)) = self.tags.get(tag)
                    && *position < durable
                {
                    released.extend(self.order.pop_front());
                }
            }
        }
        for tag in &released {
            self.tags.remove(tag);
        }
        released
    }

    /// Returns how many tags are held.
    pub fn len(&self) -> usize {
        self.tags.len()
    }

    /// Says whether no tag is held.
    pub fn is_empty(&self) -> bool {
        self.tags.is_empty()
    }
}

impl DedupLog {
    /// Returns the position before which everything is durable: a record survives a power cut if
    /// its position is smaller. It rises with each flush.
    pub fn durable_position(&self) -> Position {
        self.handle.engine.syncer.durable()
    }

    /// Returns a position on which everything rests that was answered until now, by whatever
    /// call: when it is smaller than [`DedupLog::durable_position`], all of that is durable.
    pub fn answered_position(&self) -> Position {
        self.handle.engine.core().writer.end().before()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(offset: u32) -> Position {
        Position::new(1, offset)
    }

    #[test]
    fn individual_tags_are_released_as_they_become_durable_whatever_the_order() {
        let mut gate = AckGate::new(AckMode::Individual, 10);
        gate.received("a").unwrap();
        gate.push("c", at(80)).unwrap();
        gate.push("b", at(72)).unwrap();
        assert_eq!(gate.release(at(72)), Vec::<&str>::new());
        assert_eq!(gate.release(at(80)), ["b"]);
        gate.push("a", at(64)).unwrap();
        assert_eq!(gate.release(at(88)), ["a", "c"]);
        assert_eq!(gate.release(at(88)), Vec::<&str>::new());
        assert!(gate.is_empty());
    }

    #[test]
    fn cumulative_tags_wait_for_all_before_them() {
        let mut gate = AckGate::new(AckMode::Cumulative, 10);
        // Offsets have gaps.
        for tag in [1000, 1001, 1002, 1007] {
            gate.received(tag).unwrap();
        }
        gate.push(1002, at(64)).unwrap();
        gate.push(1000, at(72)).unwrap();
        gate.push(1007, at(80)).unwrap();
        assert_eq!(gate.release(at(88)), [1000]);
        gate.push(1001, at(88)).unwrap();
        assert_eq!(gate.release(at(88)), Vec::<i32>::new());
        assert_eq!(gate.release(at(96)), [1001, 1002, 1007]);
        assert_eq!(gate.len(), 0);
    }

    #[test]
    fn nothing_waits_for_a_withdrawn_tag() {
        for mode in [AckMode::Individual, AckMode::Cumulative] {
            let mut gate = AckGate::new(mode, 3);
            for tag in [1, 2, 3] {
                gate.received(tag).unwrap();
            }
            gate.push(2, at(64)).unwrap();
            gate.push(3, at(72)).unwrap();
            assert!(gate.withdraw(&1) && gate.withdraw(&2) && !gate.withdraw(&2));
            assert_eq!(gate.len(), 1);
            gate.received(2).unwrap();
            gate.received(4).unwrap();
            assert_eq!(gate.release(at(80)), [3]);
            assert_eq!(gate.len(), 2);
        }
    }

    #[test]
    fn what_would_release_twice_or_without_bound_is_refused() {
        let kind = |result: Result<()>| result.unwrap_err().kind();
        for mode in [AckMode::Individual, AckMode::Cumulative] {
            let mut gate = AckGate::new(mode, 2);
            gate.received(1).unwrap();
            assert_eq!(kind(gate.received(1)), ErrorKind::Invalid);
            gate.received(2).unwrap();
            assert_eq!(kind(gate.received(3)), ErrorKind::Full);
            gate.push(1, at(64)).unwrap();
            assert_eq!(kind(gate.push(1, at(72))), ErrorKind::Invalid);
            assert_eq!(gate.release(at(72)), [1]);
            gate.received(3).unwrap();
        }
        let mut gate = AckGate::new(AckMode::Cumulative, 2);
        assert_eq!(kind(gate.push(1, at(64))), ErrorKind::Invalid);
        gate.received(1).unwrap();
        gate.push(1, at(64)).unwrap();
        assert_eq!(gate.release(at(72)), [1]);
        assert_eq!(kind(gate.push(1, at(64))), ErrorKind::Invalid);
        let mut gate = AckGate::new(AckMode::Individual, 1);
        gate.push(1, at(64)).unwrap();
        assert_eq!(kind(gate.push(2, at(64))), ErrorKind::Full);
    }
}
