//! Names of the files in a store: one way to write each, one way to read it back.

use std::fmt;

/// A file of ours, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum FileName {
    /// The lifecycle lock; never unlinked.
    Lock,
    /// The list of what exists.
    Manifest,
    /// The next manifest, before its rename.
    ManifestNew,
    /// Ballast given up when the disk is full, so that the manifest can still be replaced.
    Reserve,
    /// The mark of a repaired store that is not complete.
    Repairing,
    /// A log segment.
    Segment(u64),
    /// A copy of a segment that an open is writing anew.
    SegmentCopy(u64),
    /// An index run over the segments `lo..=hi`.
    Run { lo: u64, hi: u64, generation: u32 },
    /// The filter of a run.
    Filter { lo: u64, hi: u64, generation: u32 },
    /// A run or filter before its rename.
    Temporary {
        lo: u64,
        hi: u64,
        generation: u32,
        filter: bool,
    },
    /// Image of the active table.
    Hint(u64),
    /// What the processes of a shared store tell each other.
    Shared,
    /// A lock among the processes of a shared store; never unlinked.
    Gate(GateName),
    /// Held by every process that shares the store for writing; never unlinked.
    Members,
    /// Locked by the opener of this generation for as long as it lives.
    Owner(u64),
}

/// What only one process of a shared store does at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum GateName {
    /// Decide and append.
    Turn,
    /// Replace the manifest.
    Edit,
    /// Roll, seal, prepare, expire.
    Upkeep,
    /// Merge index runs.
    Merge,
    /// Flush the log.
    Flush,
}

impl GateName {
    pub(crate) const ALL: [GateName; 5] = [
        GateName::Turn,
        GateName::Edit,
        GateName::Upkeep,
        GateName::Merge,
        GateName::Flush,
    ];

    fn as_str(self) -> &'static str {
        match self {
            GateName::Turn => "turn",
            GateName::Edit => "edit",
            GateName::Upkeep => "upkeep",
            GateName::Merge => "merge",
            GateName::Flush => "flush",
        }
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            FileName::Lock => f.write_str("LOCK"),
            FileName::Manifest => f.write_str("MANIFEST"),
            FileName::ManifestNew => f.write_str("MANIFEST.new"),
            FileName::Reserve => f.write_str("RESERVE"),
            FileName::Repairing => f.write_str("REPAIRING"),
            FileName::Segment(id) => write!(f, "seg-{id:012}.log"),
            FileName::SegmentCopy(id) => write!(f, "seg-{id:012}.copy"),
            FileName::Run { lo, hi, generation } => {
                write!(f, "run-{lo:012}-{hi:012}-{generation}.idx")
            }
            FileName::Filter { lo, hi, generation } => {
                write!(f, "run-{lo:012}-{hi:012}-{generation}.flt")
            }
            FileName::Temporary {
                lo,
                hi,
                generation,
                filter,
            } => {
                let kind = if filter { "flt" } else { "idx" };
                write!(f, "run-{lo:012}-{hi:012}-{generation}.{kind}.tmp")
            }
            FileName::Hint(id) => write!(f, "hint-{id:012}"),
            FileName::Shared => f.write_str("SHARED"),
            FileName::Gate(name) => write!(f, "LOCK.{}", name.as_str()),
            FileName::Members => f.write_str("LOCK.members"),
            FileName::Owner(generation) => write!(f, "owner-{generation:014}"),
        }
    }
}

impl FileName {
    /// Reads a name back; `None` for a file that is not ours.
    pub(crate) fn parse(name: &str) -> Option<FileName> {
        let found = match name {
            "LOCK" => FileName::Lock,
            "MANIFEST" => FileName::Manifest,
            "MANIFEST.new" => FileName::ManifestNew,
            "RESERVE" => FileName::Reserve,
            "REPAIRING" => FileName::Repairing,
            "SHARED" => FileName::Shared,
            "LOCK.members" => FileName::Members,
            _ => parse_numbered(name)?,
        };
        // Only the one way to write a name counts: `seg-7.log` is not ours.
        (found.to_string() == name).then_some(found)
    }
}

fn parse_numbered(name: &str) -> Option<FileName> {
    if let Some(rest) = name.strip_prefix("seg-") {
        let (id, ending) = rest.split_once('.')?;
        let id = id.parse().ok()?;
        return match ending {
            "log" => Some(FileName::Segment(id)),
            "copy" => Some(FileName::SegmentCopy(id)),
            _ => None,
        };
    }
    if let Some(gate) = name.strip_prefix("LOCK.") {
        let named = |found: &GateName| found.as_str() == gate;
        return GateName::ALL.into_iter().find(named).map(FileName::Gate);
    }
    if let Some(generation) = name.strip_prefix("owner-") {
        return Some(FileName::Owner(generation.parse().ok()?));
    }
    if let Some(id) = name.strip_prefix("hint-") {
        return Some(FileName::Hint(id.parse().ok()?));
    }
    let (stem, kind) = name.strip_prefix("run-")?.split_once('.')?;
    let mut numbers = stem.splitn(3, '-');
    let lo = numbers.next()?.parse().ok()?;
    let hi = numbers.next()?.parse().ok()?;
    let generation = numbers.next()?.parse().ok()?;
    match kind {
        "idx" => Some(FileName::Run { lo, hi, generation }),
        "flt" => Some(FileName::Filter { lo, hi, generation }),
        "idx.tmp" => Some(FileName::Temporary {
            lo,
            hi,
            generation,
            filter: false,
        }),
        "flt.tmp" => Some(FileName::Temporary {
            lo,
            hi,
            generation,
            filter: true,
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back_and_foreign_names_do_not() {
        let names = [
            FileName::Lock,
            FileName::Manifest,
            FileName::ManifestNew,
            FileName::Reserve,
            FileName::Repairing,
            FileName::Segment(7),
            FileName::Segment(u64::MAX),
            FileName::SegmentCopy(7),
            FileName::Run {
                lo: 1,
                hi: 9,
                generation: 2,
            },
            FileName::Filter {
                lo: 1,
                hi: 9,
                generation: 2,
            },
            FileName::Temporary {
                lo: 1,
                hi: 9,
                generation: 2,
                filter: true,
            },
            FileName::Temporary {
                lo: 1,
                hi: 9,
                generation: 2,
                filter: false,
            },
            FileName::Hint(3),
            FileName::Shared,
            FileName::Gate(GateName::Turn),
            FileName::Gate(GateName::Flush),
            FileName::Members,
            FileName::Owner(1_700_000_000_000),
        ];
        for name in names {
            assert_eq!(FileName::parse(&name.to_string()), Some(name));
        }
        for foreign in [
            "",
            "seg-7.log",
            "seg-.log",
            "notes.txt",
            "run-1-2.idx",
            "seg-é.log",
        ] {
            assert_eq!(FileName::parse(foreign), None, "{foreign}");
        }
    }
}
