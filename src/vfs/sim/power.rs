//! Power cuts: which unsynced changes survive.
//!
//! Everything is a decision with a number of answers: each directory operation and each sector
//! of each write is lost (0) or kept (1), each truncation likewise, and each file has one of the
//! sizes it had since its last sync. Answer 0 to everything is "all lost", the last answer to
//! everything is "all kept", and walking through all answers is every possible outcome.

use super::SimDisk;
use super::content::Content;
use super::rng::Rng;
use super::state::{Change, Entries, Inode, SECTOR_BYTES, State, overlay};

/// A strategy for [`SimDisk::after_power_cut`].
#[derive(Clone, Debug)]
pub struct PowerCut(Strategy);

#[derive(Clone, Debug)]
enum Strategy {
    DropAll,
    KeepAll,
    Random {
        rng: Rng,
        kept_of_8: usize,
        recycle: bool,
    },
    Walk(Walk),
}

/// An odometer over decisions whose number depends on the earlier answers.
#[derive(Clone, Debug, Default)]
struct Walk {
    /// The answers of this round, each with the number of possible answers.
    digits: Vec<(usize, usize)>,
    at: usize,
}

impl PowerCut {
    /// Nothing unsynced survives.
    pub fn drop_all() -> PowerCut {
        PowerCut(Strategy::DropAll)
    }

    /// Everything unsynced survives.
    pub fn keep_all() -> PowerCut {
        PowerCut(Strategy::KeepAll)
    }

    /// A random subset survives; each use gives another one. The same seed gives the same
    /// sequence of subsets.
    pub fn seeded(seed: u64) -> PowerCut {
        PowerCut(Strategy::Random {
            rng: Rng::new(seed),
            kept_of_8: 4,
            recycle: false,
        })
    }

    /// Like [`PowerCut::seeded`], but lost sectors that lie beyond the durable content may show
    /// what some block of the disk held before: bytes of other files, or of this one elsewhere.
    pub fn recycled(seed: u64) -> PowerCut {
        PowerCut(Strategy::Random {
            rng: Rng::new(seed),
            kept_of_8: 4,
            recycle: true,
        })
    }

    /// Starts a new file or directory: some lose little, some nearly everything.
    fn begin_part(&mut self) {
        if let Strategy::Random { rng, kept_of_8, .. } = &mut self.0 {
            *kept_of_8 = [0, 1, 4, 4, 7, 7, 8]
                .get(rng.below(7))
                .copied()
                .unwrap_or(4);
        }
    }

    fn keeps(&mut self) -> bool {
        match &mut self.0 {
            Strategy::Random { rng, kept_of_8, .. } => rng.below(8) < *kept_of_8,
            _ => self.choose(2) == 1,
        }
    }

    fn choose(&mut self, answer_count: usize) -> usize {
        match &mut self.0 {
            Strategy::DropAll => 0,
            Strategy::KeepAll => answer_count.saturating_sub(1),
            Strategy::Random { rng, .. } => rng.below(answer_count),
            Strategy::Walk(walk) => walk.choose(answer_count),
        }
    }

    /// Returns where in the scrap a lost sector's bytes come from, if it shows old bytes.
    fn recycles(&mut self, scrap: &[u8]) -> Option<usize> {
        let Strategy::Random {
            rng, recycle: true, ..
        } = &mut self.0
        else {
            return None;
        };
        let shows = rng.below(2) == 1;
        shows.then(|| rng.below(scrap.len() / SECTOR_BYTES) * SECTOR_BYTES)
    }
}

impl Walk {
    fn choose(&mut self, answer_count: usize) -> usize {
        if self.at == self.digits.len() {
            self.digits.push((0, answer_count));
        }
        let digit = self.digits.get(self.at).map_or(0, |(digit, _)| *digit);
        self.at += 1;
        digit
    }

    /// Goes to the next combination; false after the last one.
    fn advance(&mut self) -> bool {
        self.at = 0;
        while let Some((digit, answer_count)) = self.digits.pop() {
            if digit + 1 < answer_count {
                self.digits.push((digit + 1, answer_count));
                return true;
            }
        }
        false
    }
}

impl State {
    /// Returns the disk after a power cut.
    pub(super) fn after_power_cut(&self, cut: &mut PowerCut) -> State {
        let mut next = State::new(self.history, self.rng.clone());
        cut.begin_part();
        let mut entries = self.durable.clone();
        for op in &self.entry_ops {
            if cut.keeps() {
                op.apply(&mut entries);
            }
        }
        let scrap = self.scrap(cut);
        for (name, id) in entries {
            if let Some(inode) = self.inodes.get(&id) {
                let known = next.inodes.contains_key(&id);
                let survivor = (!known).then(|| inode.after_power_cut(cut, &scrap));
                next.adopt(name, id, survivor);
            }
        }
        let total = self
            .free_bytes
            .map(|free| free.saturating_add(self.charged_bytes()));
        next.free_bytes = total.map(|total| total.saturating_sub(next.charged_bytes()));
        next
    }

    /// Counts the possible outcomes of a power cut, up to `u64::MAX`.
    pub(super) fn outcome_count(&self, limit: u64) -> u64 {
        let op_count = u32::try_from(self.entry_ops.len()).unwrap_or(u32::MAX);
        let Some(masks) = 1_u64.checked_shl(op_count).filter(|masks| *masks <= limit) else {
            return u64::MAX;
        };
        let mut count = 0_u64;
        for mask in 0..masks {
            let mut entries: Entries = self.durable.clone();
            for (index, op) in self.entry_ops.iter().enumerate() {
                if mask >> index & 1 == 1 {
                    op.apply(&mut entries);
                }
            }
            let mut ids: Vec<_> = entries.values().collect();
            ids.sort_unstable();
            ids.dedup();
            let product = ids
                .iter()
                .filter_map(|id| self.inodes.get(id))
                .fold(1, |product: u64, inode| {
                    product.saturating_mul(inode.outcome_count())
                });
            count = count.saturating_add(product);
        }
        count
    }

    /// Returns old bytes for [`PowerCut::recycled`]: all files one after the other.
    fn scrap(&self, cut: &PowerCut) -> Vec<u8> {
        let mut scrap = Vec::new();
        if matches!(cut.0, Strategy::Random { recycle: true, .. }) {
            for inode in self.inodes.values() {
                scrap.extend_from_slice(&inode.cached);
                scrap.resize(scrap.len().next_multiple_of(SECTOR_BYTES), 0);
            }
        }
        scrap
    }
}

impl Inode {
    fn after_power_cut(&self, cut: &mut PowerCut, scrap: &[u8]) -> Inode {
        self.with_content(self.surviving(cut, scrap))
    }

    fn surviving(&self, cut: &mut PowerCut, scrap: &[u8]) -> Content {
        if self.pending.is_empty() {
            return self.durable.clone();
        }
        cut.begin_part();
        let mut content = self.durable.to_vec();
        self.recycle(&mut content, cut, scrap);
        for op in &self.pending {
            match &op.change {
                Change::Write { offset, bytes } => {
                    for (offset, sector) in sectors(*offset, bytes) {
                        if cut.keeps() {
                            overlay(&mut content, offset, sector);
                        }
                    }
                }
                Change::Shrink => {
                    if cut.keeps() {
                        content.truncate(op.size);
                    }
                }
                Change::Grow => {}
            }
        }
        let sizes = self.sizes();
        let size = sizes.get(cut.choose(sizes.len())).copied();
        content.resize(size.unwrap_or(self.durable.len()), 0);
        Content::new(content)
    }

    /// Shows old bytes where sectors were written for the first time, before any is kept.
    fn recycle(&self, content: &mut Vec<u8>, cut: &mut PowerCut, scrap: &[u8]) {
        if scrap.is_empty() {
            return;
        }
        for op in &self.pending {
            let Change::Write { offset, bytes } = &op.change else {
                continue;
            };
            for (offset, sector) in sectors(*offset, bytes) {
                if offset >= self.durable.len()
                    && let Some(start) = cut.recycles(scrap)
                {
                    let start = start + offset % SECTOR_BYTES;
                    let old = scrap.get(start..start + sector.len());
                    overlay(content, offset, old.unwrap_or_default());
                }
            }
        }
    }

    /// Returns the sizes since the last sync, oldest first, without repetitions in a row.
    fn sizes(&self) -> Vec<usize> {
        let mut sizes = vec![self.durable.len()];
        sizes.extend(self.pending.iter().map(|op| op.size));
        sizes.dedup();
        sizes
    }

    fn outcome_count(&self) -> u64 {
        let mut count = self.sizes().len() as u64;
        for op in &self.pending {
            let bits = match &op.change {
                Change::Write { offset, bytes } => sectors(*offset, bytes).count(),
                Change::Shrink => 1,
                Change::Grow => 0,
            };
            let bits = u32::try_from(bits).unwrap_or(u32::MAX);
            count = count.saturating_mul(2_u64.saturating_pow(bits));
        }
        count
    }
}

/// Splits a write at the sector borders of the file.
fn sectors(offset: usize, bytes: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let head_bytes = (SECTOR_BYTES - offset % SECTOR_BYTES).min(bytes.len());
    let (head, rest) = bytes.split_at(head_bytes);
    let rest_offset = offset + head_bytes;
    let rest = rest.chunks(SECTOR_BYTES).enumerate();
    let rest = rest.map(move |(index, sector)| (rest_offset + index * SECTOR_BYTES, sector));
    std::iter::once((offset, head)).chain(rest)
}

/// Disks after a power cut, one for each outcome; see [`SimDisk::after_power_cut_exhaustive`].
pub struct PowerCuts {
    before: State,
    cut: PowerCut,
    exhaustive: bool,
    left: u64,
}

impl PowerCuts {
    pub(super) fn new(before: State, limit: u64, seed: u64) -> PowerCuts {
        let count = before.outcome_count(limit);
        let exhaustive = count <= limit;
        let cut = if exhaustive {
            PowerCut(Strategy::Walk(Walk::default()))
        } else {
            PowerCut::seeded(seed)
        };
        PowerCuts {
            before,
            cut,
            exhaustive,
            left: count.min(limit),
        }
    }

    /// Returns whether these are all possible outcomes; otherwise they are random samples.
    pub fn is_exhaustive(&self) -> bool {
        self.exhaustive
    }
}

impl Iterator for PowerCuts {
    type Item = SimDisk;

    fn next(&mut self) -> Option<SimDisk> {
        self.left = self.left.checked_sub(1)?;
        let after = self.before.after_power_cut(&mut self.cut);
        if let Strategy::Walk(walk) = &mut self.cut.0
            && !walk.advance()
        {
            self.left = 0;
        }
        Some(SimDisk::from_state(after))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = usize::try_from(self.left).unwrap_or(usize::MAX);
        (left, Some(left))
    }
}

impl std::fmt::Debug for PowerCuts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PowerCuts")
            .field("left", &self.left)
            .finish_non_exhaustive()
    }
}
