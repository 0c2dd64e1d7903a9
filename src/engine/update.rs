//! One decision about one key: search without the lock, decide and append under it, then wait
//! for durability without it.

use super::Engine;
use super::append::Appended;
use super::core::{Core, Older, Snapshot, UnsettledEntry};
use super::lookup::{Completed, Hit, Searched, Wanted};
use super::namespace::Space;
use super::room::{Need, Room};
use crate::clock::Now;
use crate::error::{Error, ErrorKind, Result};
use crate::format::record::{FLAG_DETACHED, HEADER_BYTES, Kind, PART_HEADER_BYTES, STATE_BYTES};
use crate::format::{to_u32, to_usize};
use crate::key::{EVIDENCE_BYTES_MAX, NamespaceKind};
use crate::log::sync::FailureCount;
use crate::model::claim::{Entry, Env};
use crate::options::{Durability, Retention};
use crate::position::Position;

/// What a decision wants to be done.
#[derive(Debug)]
pub(crate) enum Step<R> {
    /// Append this state, then answer.
    Write(Write, R),
    /// Answer without writing. The answer rests on the key's newest record.
    Answer(R),
}

/// A state to append.
#[derive(Debug)]
pub(crate) struct Write {
    pub(crate) entry: Entry,
    /// It is a new claim: it needs a stamp, and room for what its owner will write later.
    pub(crate) is_claim: bool,
    /// End of the lease on the boot clock, where this opener grants or prolongs it.
    pub(crate) deadline_boot_ms: Option<u64>,
}

/// The durability of a decision's record, and of the record that an answer rests on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Levels {
    pub(crate) write: Durability,
    pub(crate) answer: Durability,
}

/// A decision that was carried out.
#[derive(Debug)]
pub(crate) struct Decided<R> {
    pub(crate) answer: R,
    /// The state that was appended, with its stamp.
    pub(crate) written: Option<(Entry, Position)>,
}

/// What an answer rests on, and how durable that must be before the answer is told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Basis {
    pub(crate) end: Position,
    pub(crate) failures: FailureCount,
    pub(crate) level: Durability,
}

/// What a decision under the lock came to.
pub(crate) enum Attempt<R> {
    Done {
        decided: Decided<R>,
        end: Position,
        failures: FailureCount,
    },
    /// The store changed since the search: search again.
    Again,
    /// A record of the active segment must be read from its file first.
    InFile,
    /// The active segment has no room for so many bytes.
    NoRoom(Room),
}

/// A search that is to be completed under the lock.
pub(crate) struct Search<'a> {
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) wanted: Wanted<'a>,
    pub(crate) searched: Searched<Entry>,
}

impl Engine {
    /// Decides about one key, which is mostly new. `decide` may be called several times; the last
    /// call counts.
    pub(crate) fn update<R>(
        &self,
        space: &Space,
        key: &[u8],
        levels: Levels,
        retention: Retention,
        decide: impl FnMut(Option<&Entry>, &Env) -> Step<R>,
    ) -> Result<Decided<R>> {
        let (decided, basis) =
            self.update_undurable(false, space, key, levels, retention, decide)?;
        self.ensure_basis(basis)?;
        Ok(decided)
    }

    /// The same without the wait at the end. Whoever waits for the key is told at once. `is_known`:
    /// the key is there, and mostly in the active segment, which is asked first.
    pub(crate) fn update_undurable<R>(
        &self,
        is_known: bool,
        space: &Space,
        key: &[u8],
        levels: Levels,
        retention: Retention,
        decide: impl FnMut(Option<&Entry>, &Env) -> Step<R>,
    ) -> Result<(Decided<R>, Basis)> {
        let done = self.try_update(is_known, space, key, levels, retention, decide);
        match &done {
            Ok((Decided { written, .. }, _)) => {
                if let Some((entry, _)) = written {
                    self.waits.changed(space.id, key, entry.ends_waits());
                }
            }
            // What failed may have changed other keys: a write that was taken back does.
            Err(_) => self.pay_waiters(),
        }
        done
    }

    fn try_update<R>(
        &self,
        mut in_file: bool,
        space: &Space,
        key: &[u8],
        levels: Levels,
        retention: Retention,
        mut decide: impl FnMut(Option<&Entry>, &Env) -> Step<R>,
    ) -> Result<(Decided<R>, Basis)> {
        self.check_home()?;
        let wanted = self.wanted_in(space, key);
        loop {
            let snapshot = self.snapshot(wanted);
            let search = Search {
                searched: self.search(&snapshot, wanted, in_file, &Entry::of_record)?,
                snapshot: &snapshot,
                wanted,
            };
            let now = self.now();
            let attempt = {
                let mut core = self.turn()?;
                self.check_writable(&core)?;
                let tried = self.attempt(
                    &mut core,
                    space,
                    search,
                    now,
                    retention,
                    levels.answer,
                    &mut decide,
                )?;
                if let Attempt::Done {
                    decided:
                        Decided {
                            written: Some(_), ..
                        },
                    ..
                } = &tried
                {
                    self.finish_append(&mut core, levels.write)?;
                }
                tried
            };
            match attempt {
                Attempt::Again => {}
                Attempt::InFile => in_file = true,
                Attempt::NoRoom(room) => {
                    // It may be the last to hold the table of a segment that is sealed now.
                    drop(snapshot);
                    self.make_room(room)?;
                }
                Attempt::Done {
                    decided,
                    end,
                    failures,
                } => {
                    let level = match decided.written {
                        Some(_) => Engine::level_left(levels.write),
                        None => levels.answer,
                    };
                    let basis = Basis {
                        end,
                        failures,
                        level,
                    };
                    return Ok((decided, basis));
                }
            }
        }
    }

    /// Decides under the lock, on the basis of a search made before.
    #[expect(
        clippy::too_many_arguments,
        reason = "one call site a batch form; all are inputs"
    )]
    pub(crate) fn attempt<R>(
        &self,
        core: &mut Core,
        space: &Space,
        search: Search<'_>,
        now: Now,
        retention: Retention,
        answer_level: Durability,
        decide: &mut impl FnMut(Option<&Entry>, &Env) -> Step<R>,
    ) -> Result<Attempt<R>> {
        let wanted = search.wanted;
        let searched = search.searched;
        let hit = match self.complete(core, search.snapshot, wanted, searched, &Entry::of_record)? {
            Completed::Current(hit) => hit,
            Completed::Changed => return Ok(Attempt::Again),
            Completed::InFile => return Ok(Attempt::InFile),
        };
        core.check_namespace(space)?;
        let hit = hit.as_ref();
        let taken = hit.map(|hit| &hit.taken);
        let entry = self.alive(taken, &now)?;
        let env = self.env(core, space, hit, now, retention);
        let (mut write, answer) = match decide(entry, &env) {
            Step::Write(write, answer) => (write, answer),
            Step::Answer(answer) => {
                // Only what is final is told to a duplicate, and must be durable first.
                let rests_on = hit.filter(|hit| hit.taken.is_final());
                if let Some(hit) = rests_on {
                    core.rest_on(hit.older.position, answer_level);
                }
                let end = rests_on.map_or(Position::START, |hit| hit.older.position.after());
                let decided = Decided {
                    answer,
                    written: None,
                };
                return Ok(Attempt::Done {
                    decided,
                    end,
                    failures: FailureCount::new(core.failures),
                });
            }
        };
        write.entry.cut_texts(self.evidence_bytes_max());
        let older = hit.map(|hit| hit.older);
        let mut has_stamp = true;
        if write.is_claim {
            self.check_unsettled(core, hit)?;
            // A stamp that goes unused because there is no room is a gap, not a fault.
            match core.stamps.take() {
                Some(stamp) => write.entry.state.stamp = stamp.get(),
                None => has_stamp = false,
            }
        }
        let mut record = write.entry.to_record(space.id, wanted.key);
        record.parts.inherit_s = core.inherit(older, now.trusted_ms);
        let frame_bytes = record.frame_bytes();
        self.check_frame(frame_bytes)?;
        let behind = self.owed_behind_write(space, wanted.key, older, &write);
        let need = need_of(core, older, &write, behind);
        let room = Room::of_one(frame_bytes, need);
        if !has_stamp || !core.has_room(room) {
            return Ok(Attempt::NoRoom(room));
        }
        let unsettled = unsettled_entry(space, &write, behind);
        let appended = self.append(core, &record, wanted.h, older, unsettled);
        let Appended { position, failures } = appended;
        let decided = Decided {
            answer,
            written: Some((write.entry, position)),
        };
        Ok(Attempt::Done {
            decided,
            end: position.after(),
            failures,
        })
    }

    /// Returns the log space that is kept for what is written behind this record. The one renewal
    /// that is kept for a claim, which repeats what the start left behind, is used up by the first
    /// one.
    fn owed_behind_write(
        &self,
        space: &Space,
        key: &[u8],
        older: Option<Older>,
        write: &Write,
    ) -> u32 {
        let kind = write.entry.kind;
        if !kind.is_unsettled() {
            return 0;
        }
        let is_start = kind == Kind::Started && older.is_some_and(|o| o.kind == Kind::Claimed);
        let owed_bytes = self.owed_bytes(space, key);
        if write.is_claim || is_start {
            to_u32(owed_bytes + write.entry.evidence.len())
        } else {
            to_u32(owed_bytes - state_bytes(key.len()))
        }
    }

    pub(crate) fn env(
        &self,
        core: &Core,
        space: &Space,
        hit: Option<&Hit<Entry>>,
        now: Now,
        retention: Retention,
    ) -> Env {
        let unsettled = hit.and_then(|hit| core.unsettled.get(&hit.older.position.get()));
        Env {
            now,
            kind: space.kind,
            generation: self.generation,
            alive: hit.and_then(|hit| self.alive_owner(&hit.taken)),
            pid: self.pid,
            retention,
            attempts_max: space.options.attempts_max,
            settle_ms: space.options.settle.map(crate::engine::namespace::to_ms),
            deadline_boot_ms: unsettled.and_then(|entry| entry.deadline_boot_ms),
            position: hit.map(|hit| hit.older.position),
        }
    }

    /// Returns the owner of a claim if that is another opener who is alive.
    pub(crate) fn alive_owner(&self, entry: &Entry) -> Option<u64> {
        let is_alive = |owner| match (&self.shared, &self.reader) {
            (Some(shared), _) => shared.is_alive(owner),
            (_, Some(reader)) => reader.is_alive(owner),
            _ => false,
        };
        let owner = entry.state.owner;
        let asks = entry.is_pending() && owner != self.generation;
        (asks && is_alive(owner)).then_some(owner)
    }

    fn check_unsettled<T>(&self, core: &Core, hit: Option<&Hit<T>>) -> Result<()> {
        let replaces = hit.is_some_and(|hit| hit.older.kind.is_unsettled());
        let max = self.options.unsettled_count_max;
        if !replaces && core.unsettled.len() >= max {
            return Err(Error::new(
                ErrorKind::Full,
                format!(
                    "too many open claims and keys in doubt: unsettled_count_max={max}; commit, \
                     fail or resolve some, or raise the bound"
                ),
            ));
        }
        Ok(())
    }
}

impl Core {
    /// Refuses a namespace that was purged while handles of it were alive.
    pub(crate) fn check_namespace(&self, space: &Space) -> Result<()> {
        if self.namespaces.contains_key(&space.id) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "namespace was purged: name={}; open it again to create it anew",
            space.name
        )))
    }
}

/// Says whether a record still counts: not a deletion, and unsettled or within its retention.
pub(crate) fn is_alive(entry: &Entry, now: &Now) -> bool {
    entry.kind != Kind::Forgotten
        && (entry.kind.is_unsettled()
            || entry.expires_at_s == 0
            || now.trusted_ms < u64::from(entry.expires_at_s) * 1000)
}

impl Engine {
    /// Returns a key's state if it still counts. In what is left of a damaged store no key is
    /// absent: what makes it known may be among the records that are lost.
    pub(crate) fn alive<'a>(
        &self,
        entry: Option<&'a Entry>,
        now: &Now,
    ) -> Result<Option<&'a Entry>> {
        let alive = entry.filter(|entry| is_alive(entry, now));
        if alive.is_none() {
            self.check_whole()?;
        }
        Ok(alive)
    }

    /// Returns the limit of an error's or evidence's bytes: less where segments are tiny.
    pub(crate) fn evidence_bytes_max(&self) -> usize {
        EVIDENCE_BYTES_MAX.min(to_usize(self.options.segment_bytes) / 8)
    }

    /// Returns the bytes of the largest record of a namespace, with a key of usual length.
    pub(crate) fn largest_frame_bytes(&self, space: &Space) -> usize {
        let texts = 2 * self.evidence_bytes_max();
        let outcome = match space.kind {
            NamespaceKind::Filter => 0,
            _ => space.options.outcome_bytes_max.max(texts),
        };
        512.min(to_usize(self.options.segment_bytes) / 8)
            + outcome
            + space.options.attached_bytes_max
            + space.options.marks.stretches_max.saturating_mul(16)
    }

    /// Returns the log space that the owner of a claim may still need after its effect: one
    /// renewal, and one end with the largest outcome or error. A start that finds no room is
    /// refused before the effect, which is harmless.
    pub(crate) fn owed_bytes(&self, space: &Space, key: &[u8]) -> usize {
        let texts = self.evidence_bytes_max();
        2 * state_bytes(key.len())
            + space.options.outcome_bytes_max.max(texts)
            + space.options.attached_bytes_max
    }

    /// Returns the log space that a job may need which was accepted: a claim, what its owner may
    /// need after it, and the end of the job's entry together with that of the claim.
    pub(crate) fn owed_by_job(&self, jobs: &Space, key: &[u8], entry_key: &[u8]) -> usize {
        state_bytes(key.len()) + self.owed_bytes(jobs, key) + end_bytes(entry_key.len())
    }
}

fn need_of(core: &Core, older: Option<Older>, write: &Write, behind: u32) -> Need {
    let owed_bytes = behind.into();
    if write.is_claim {
        return Need::New { owed_bytes };
    }
    Need::Change {
        own_bytes: older.map_or(0, |older| core.owed_at(older.position)),
        owed_bytes,
    }
}

/// Returns what is kept in memory of a record that may not be forgotten.
fn unsettled_entry(space: &Space, write: &Write, owed_bytes: u32) -> Option<UnsettledEntry> {
    let entry = &write.entry;
    let is_detached = entry.flags & FLAG_DETACHED != 0;
    entry.kind.is_unsettled().then(|| UnsettledEntry {
        namespace: space.id,
        deadline_boot_ms: write.deadline_boot_ms.filter(|_| !is_detached),
        owed_bytes,
        origin: 0,
    })
}

/// Returns the bytes of a record that is a state without texts, at most.
fn state_bytes(key_bytes: usize) -> usize {
    HEADER_BYTES + STATE_BYTES + 2 + key_bytes + 4 * PART_HEADER_BYTES + 16
}

/// Returns the bytes that the end of an entry adds to a frame, at most.
pub(crate) fn end_bytes(entry_key_bytes: usize) -> usize {
    HEADER_BYTES + state_bytes(entry_key_bytes)
}
