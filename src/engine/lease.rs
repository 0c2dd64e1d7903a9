//! Who is at which entry of an outbox, where several processes share the store: said in the log.

use super::group::Written;
use super::namespace::to_ms;
use super::outbox::{Bound, Outbox, OutboxEntry};
use crate::error::Result;
use crate::format::record::Kind;
use crate::model::claim::{Entry, Env};
use crate::options::Durability;

impl Outbox {
    /// Says in the log who is at entries, where other processes may be at them, too. Only those are
    /// kept that nobody else has taken meanwhile.
    pub(super) fn lease_in_log(&self, entries: &mut Vec<OutboxEntry>) -> Result<()> {
        let engine = &self.handle.engine;
        let lease_ms = to_ms(self.space.options.lease);
        let written = self.rewrite(entries, |found, env| {
            let state = &found.state;
            let is_others = state.owner != 0
                && state.owner != engine.generation
                && engine
                    .shared
                    .as_ref()
                    .is_some_and(|s| s.is_alive(state.owner));
            // Leased by somebody who is alive, or not due.
            let waits = (state.owner == 0 || is_others) && state.until_ms > env.now.trusted_ms;
            (found.kind == Kind::Queued && !waits).then(|| {
                let mut next = found.clone();
                next.state.owner = engine.generation;
                next.state.until_ms = env.now.trusted_ms.saturating_add(lease_ms);
                next
            })
        });
        let written = match written {
            Ok(written) => written,
            Err(error) => {
                self.release(entries.iter().map(|entry| entry.place))?;
                return Err(error);
            }
        };
        let mut written = written.into_iter();
        entries.retain(|_| written.next().flatten().is_some());
        Ok(())
    }

    /// Says in the log that nobody is at entries any more.
    pub(super) fn release_in_log(&self, entries: &[OutboxEntry]) -> Result<()> {
        let engine = &self.handle.engine;
        let released = self.rewrite(entries, |found, _| {
            (found.state.owner == engine.generation).then(|| {
                let mut next = found.clone();
                next.state.owner = 0;
                next.state.until_ms = 0;
                next
            })
        });
        released.map(|_| ())
    }

    /// Appends another state of entries that are still the ones that were leased, and waits for
    /// nothing: a lease lost with the power was nobody's.
    fn rewrite(
        &self,
        entries: &[OutboxEntry],
        change: impl Fn(&Entry, &Env) -> Option<Entry>,
    ) -> Result<Vec<Option<Written>>> {
        let engine = &self.handle.engine;
        let mut all = Vec::with_capacity(entries.len());
        let mut rest = entries;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(self.fits_one_frame(rest));
            rest = later;
            let (written, _) =
                self.change_some(now, Bound::Owed, Some(Durability::Process), &change)?;
            let failures = engine.core().failures;
            engine.with_queue(&self.space, |queue| {
                for (entry, written) in now.iter().zip(&written) {
                    if let Some(written) = written {
                        queue.leased_at(entry.place, written.position, failures);
                    }
                }
            })?;
            all.extend(written);
        }
        Ok(all)
    }
}
