//! Lists of what is not settled.

use super::Engine;
use super::core::{KnownNamespace, NAMESPACE_UNKNOWN, UnsettledEntry};
use super::namespace::{Space, age};
use crate::error::Result;
use crate::model::claim::{Entry, view};
use crate::options::NamespaceOptions;
use crate::position::Position;
use crate::verdict::{KeyState, Unsettled};

impl Engine {
    /// Lists pending keys, or keys in doubt. Keys change while the list is made: each entry was
    /// true when it was read.
    pub(crate) fn list_unsettled(&self, in_doubt: bool) -> Result<Vec<Unsettled>> {
        self.check_home()?;
        let entries: Vec<(u64, UnsettledEntry, Option<KnownNamespace>)> = {
            let core = self.turn()?;
            super::check_open(&core)?;
            core.unsettled
                .iter()
                .map(|(at, entry)| (*at, *entry, core.namespaces.get(&entry.namespace).cloned()))
                .collect()
        };
        let mut list = Vec::new();
        for (at, entry, namespace) in entries {
            if entry.namespace == NAMESPACE_UNKNOWN {
                // A list without it would not be true: this is an error.
                self.read_again(|| self.read_at(Position::from_u64(at), |_| ()))?;
                continue;
            }
            let Some(namespace) = namespace.filter(|n| n.kind.has_claims()) else {
                continue;
            };
            if let Some(found) = self.unsettled_at(Position::from_u64(at), entry, namespace)?
                && matches!(found.state, KeyState::InDoubt(_)) == in_doubt
            {
                list.push(found);
            }
        }
        Ok(list)
    }

    /// Reads the record at this position; `None` if it was settled meanwhile and is gone.
    fn unsettled_at(
        &self,
        position: Position,
        unsettled: UnsettledEntry,
        namespace: KnownNamespace,
    ) -> Result<Option<Unsettled>> {
        let now = self.now();
        let own = |record: &crate::format::record::Record<'_>| {
            (record.key.to_vec(), Entry::of_record(record))
        };
        let Some((key, entry)) = self.read_again(|| self.read_at(position, own))? else {
            return Ok(None);
        };
        let space = Space {
            id: unsettled.namespace,
            name: namespace.name,
            kind: namespace.kind,
            options: NamespaceOptions::new(),
        };
        let env = {
            let core = self.core();
            let mut env = self.env(&core, &space, None, now, space.options.retention);
            env.deadline_boot_ms = unsettled.deadline_boot_ms;
            env.alive = self.alive_owner(&entry);
            env
        };
        let state = view(Some(&entry), &env);
        let age = age(&now, entry.state.at_ms);
        Ok(Some(Unsettled {
            namespace: space.name,
            key,
            state,
            age,
        }))
    }
}
