//! The one mutable table: from hash to place, for the records of the active segment.
//!
//! Open addressing in eight parts by the top bits of h, so that part and slot give h back when
//! the table is sealed. A slot is the low 41 bits of h and the offset in units of 8 bytes; zero is
//! empty, because no record starts at offset 0. Keys are not removed: a later record of a key
//! takes over its slot.

use std::ops::Range;

use crate::format::run::HASH_BITS;
use crate::vfs::words::{Word, Words};

const OFFSET_BITS: u32 = 23;
const OFFSET_MASK: u64 = (1 << OFFSET_BITS) - 1;
const TAG_BITS: u32 = 64 - OFFSET_BITS;
const PART_BITS: u32 = HASH_BITS - TAG_BITS;
pub(crate) const PARTS: usize = 1 << PART_BITS;
/// The smallest record that has a key: a 16-byte header, a key of 1 to 8 bytes.
const RECORD_BYTES_MIN: u64 = 24;

const _: () = assert!(PARTS == 8);

/// See the module's description.
#[derive(Debug)]
pub(crate) struct ActiveTable {
    slots: Words,
    /// Slots of one part, as a power of two.
    part_slot_bits: u32,
    counts: [usize; PARTS],
    /// The largest of the counts.
    most: usize,
    #[cfg(test)]
    _counted: counted::Counted,
}

/// Where in memory a table is, for who has no access to it: good for a hint to the processor, even
/// when the table is gone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    address: usize,
    part_slot_bits: u32,
}

impl Place {
    /// Has the processor fetch the first slot of a hash.
    #[inline]
    pub(crate) fn prefetch(self, h: u64) {
        let index = first_index(h, self.part_slot_bits);
        let address = self.address.wrapping_add(index * size_of::<Word>());
        super::prefetch::prefetch_at(address);
    }
}

/// What undoes one change of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotUndo {
    index: usize,
    before: u64,
}

impl ActiveTable {
    /// Makes a table for a segment of so many bytes. It is sized for records of 32 bytes at a
    /// load of a half; smaller records fill it up, which ends the segment early.
    pub(crate) fn new(segment_bytes: u32) -> Self {
        let part_slot_bits = ActiveTable::slot_bits(segment_bytes);
        ActiveTable {
            slots: Words::zeroed(PARTS << part_slot_bits),
            part_slot_bits,
            counts: [0; PARTS],
            most: 0,
            #[cfg(test)]
            _counted: counted::Counted::new(),
        }
    }

    /// Returns how many keys have a slot.
    pub(crate) fn count(&self) -> usize {
        self.counts.iter().sum()
    }

    /// Says whether a part has reached a load of three quarters: the segment must end.
    pub(crate) fn is_full(&self) -> bool {
        self.most * 4 >= (3 << self.part_slot_bits)
    }

    /// Says whether so many more keys find room, whichever part they fall into.
    #[inline]
    pub(crate) fn has_room(&self, keys_count: usize) -> bool {
        let most = self.most + keys_count;
        most * 4 < (3 << self.part_slot_bits) + 4
    }

    /// Returns how many keys find room in an empty table of such a segment, whichever part they
    /// fall into.
    pub(crate) fn keys_max(segment_bytes: u32) -> usize {
        (3 << ActiveTable::slot_bits(segment_bytes)) / 4
    }

    fn slot_bits(segment_bytes: u32) -> u32 {
        let records = u64::from(segment_bytes) / (RECORD_BYTES_MIN + 8);
        let part_slots = (records * 2 / PARTS as u64).next_power_of_two().max(32);
        part_slots.trailing_zeros()
    }

    /// Returns the bytes of memory held.
    pub(crate) fn memory_bytes(&self) -> usize {
        size_of_val(self.slots.all())
    }

    /// Returns the offsets of all records whose key may have this hash, in probe order.
    #[inline]
    pub(crate) fn candidates(&self, h: u64) -> Candidates<'_> {
        let (part, tag) = split(h);
        Candidates {
            table: self,
            part,
            tag,
            index: self.home(tag),
            left: self.part_slots(),
        }
    }

    /// Has the processor fetch the first slot of a hash.
    #[inline]
    pub(crate) fn prefetch(&self, h: u64) {
        let index = first_index(h, self.part_slot_bits);
        super::prefetch::prefetch(self.slots.all(), index);
    }

    /// Returns where in memory the table is.
    pub(crate) fn place(&self) -> Place {
        Place {
            address: self.slots.all().as_ptr().addr(),
            part_slot_bits: self.part_slot_bits,
        }
    }

    /// Adds a record of a key that has no slot yet.
    pub(crate) fn insert(&mut self, h: u64, offset: u32) -> SlotUndo {
        let (part, tag) = split(h);
        let mut index = self.home(tag);
        // Ends: the segment is rolled before a part is more than three quarters full.
        while self.slot(part, index) != 0 {
            index = (index + 1) & (self.part_slots() - 1);
        }
        if let Some(count) = self.counts.get_mut(part) {
            *count += 1;
            self.most = self.most.max(*count);
        }
        self.set(part, index, tag, offset)
    }

    /// Lets a later record of the same key take over the slot that holds `before`.
    pub(crate) fn replace(&mut self, h: u64, before: u32, offset: u32) -> Option<SlotUndo> {
        let (part, tag) = split(h);
        let mut found = None;
        let mut candidates = self.candidates(h);
        while let Some(at) = candidates.next() {
            if at == before {
                found = Some((candidates.index + self.part_slots() - 1) & (self.part_slots() - 1));
                break;
            }
        }
        found.map(|index| self.set(part, index, tag, offset))
    }

    /// Takes back the newest change that was not taken back yet.
    pub(crate) fn undo(&mut self, undo: SlotUndo) {
        let part = undo.index >> self.part_slot_bits;
        if undo.before == 0
            && let Some(count) = self.counts.get_mut(part)
        {
            *count -= 1;
            self.most = self.counts.iter().max().copied().unwrap_or(0);
        }
        if let Some(slot) = self.slots.all_mut().get_mut(undo.index) {
            *slot = undo.before.to_le_bytes();
        }
    }

    /// Returns all entries as (h, offset), ascending, without a list of them all.
    pub(crate) fn ascending(&self) -> Ascending<'_> {
        self.ascending_in(0..PARTS)
    }

    /// Returns the entries of these parts, of which each is all less than the next.
    pub(crate) fn ascending_in(&self, parts: Range<usize>) -> Ascending<'_> {
        Ascending {
            table: self,
            part: parts.start,
            end: parts.end.min(PARTS),
            index: 0,
            cluster: Vec::new(),
            next: 0,
        }
    }

    /// Returns all slots of a part.
    fn part(&self, part: usize) -> &[Word] {
        let slots = self.slots.all().get(part << self.part_slot_bits..);
        slots
            .and_then(|slots| slots.get(..self.part_slots()))
            .unwrap_or_default()
    }

    /// Returns what lies before the first gap of a part: what went round its end, whose home is
    /// behind its place, or the rest.
    fn at_start(&self, slots: &[Word], wrapped: bool) -> impl Iterator<Item = u64> {
        let before = until_gap(slots).enumerate();
        before.filter_map(move |(index, slot)| {
            let is_wrapped = self.home(slot >> OFFSET_BITS) > index;
            (is_wrapped == wrapped).then_some(slot)
        })
    }

    fn part_slots(&self) -> usize {
        1 << self.part_slot_bits
    }

    #[inline]
    fn home(&self, tag: u64) -> usize {
        home(tag, self.part_slot_bits)
    }

    #[inline]
    fn slot(&self, part: usize, index: usize) -> u64 {
        let slot = self.slots.all().get((part << self.part_slot_bits) + index);
        slot.map_or(0, |slot| u64::from_le_bytes(*slot))
    }

    fn set(&mut self, part: usize, index: usize, tag: u64, offset: u32) -> SlotUndo {
        let index = (part << self.part_slot_bits) + index;
        let mut undo = SlotUndo { index, before: 0 };
        if let Some(slot) = self.slots.all_mut().get_mut(index) {
            undo.before = u64::from_le_bytes(*slot);
            *slot = (tag << OFFSET_BITS | u64::from(offset / 8)).to_le_bytes();
        }
        undo
    }
}

/// Returns the slots before the first that is empty.
fn until_gap(slots: &[Word]) -> impl Iterator<Item = u64> {
    let slots = slots.iter().map(|slot| u64::from_le_bytes(*slot));
    slots.take_while(|slot| *slot != 0)
}

#[inline]
fn split(h: u64) -> (usize, u64) {
    (
        usize::try_from(h >> TAG_BITS).unwrap_or(0),
        h & ((1 << TAG_BITS) - 1),
    )
}

#[inline]
fn home(tag: u64, part_slot_bits: u32) -> usize {
    usize::try_from(tag >> (TAG_BITS - part_slot_bits)).unwrap_or(0)
}

/// Returns the index of the first slot of a hash.
#[inline]
fn first_index(h: u64, part_slot_bits: u32) -> usize {
    let (part, tag) = split(h);
    (part << part_slot_bits) + home(tag, part_slot_bits)
}

fn to_offset(slot: u64) -> u32 {
    u32::try_from((slot & OFFSET_MASK) * 8).unwrap_or(u32::MAX)
}

/// Iterator over the offsets of one hash.
#[derive(Clone, Debug)]
pub(crate) struct Candidates<'a> {
    table: &'a ActiveTable,
    part: usize,
    tag: u64,
    index: usize,
    left: usize,
}

impl Iterator for Candidates<'_> {
    type Item = u32;

    #[inline]
    fn next(&mut self) -> Option<u32> {
        while self.left > 0 {
            let slot = self.table.slot(self.part, self.index);
            if slot == 0 {
                self.left = 0;
                return None;
            }
            self.index = (self.index + 1) & (self.table.part_slots() - 1);
            self.left -= 1;
            if slot >> OFFSET_BITS == self.tag {
                return Some(to_offset(slot));
            }
        }
        None
    }
}

/// Iterator over all entries, ascending by hash, then offset.
///
/// An entry lies between its home and the next gap, and homes ascend with the hash. So what lies
/// between two gaps, a cluster, is all less than what the next cluster holds, and only one cluster
/// is sorted at a time: a few slots, or at most one part, if hashes were chosen to bring that
/// about.
#[derive(Clone, Debug)]
pub(crate) struct Ascending<'a> {
    table: &'a ActiveTable,
    part: usize,
    /// The part behind the last.
    end: usize,
    /// Where in the part the next cluster is looked for.
    index: usize,
    cluster: Vec<u64>,
    /// The next slot of the cluster.
    next: usize,
}

impl Ascending<'_> {
    /// Gathers and sorts the next cluster that is not empty; `None` if there is none.
    fn gather(&mut self) -> Option<()> {
        self.cluster.clear();
        self.next = 0;
        while self.cluster.is_empty() {
            if self.part >= self.end {
                return None;
            }
            let slots = self.table.part(self.part);
            let rest = slots.get(self.index..).unwrap_or_default();
            let Some(empty) = rest.iter().position(|slot| *slot != [0; 8]) else {
                self.part += 1;
                self.index = 0;
                continue;
            };
            let start = self.index + empty;
            let behind = rest.get(empty..).unwrap_or_default();
            self.cluster.extend(until_gap(behind));
            self.index = start + self.cluster.len();
            // What had to go round the end of the part belongs to its last cluster.
            let (first, last) = (start == 0, self.index == slots.len());
            if first && !last {
                self.cluster.clear();
                self.cluster.extend(self.table.at_start(slots, false));
            } else if last && !first {
                self.cluster.extend(self.table.at_start(slots, true));
            }
        }
        self.cluster.sort_unstable();
        Some(())
    }
}

impl Iterator for Ascending<'_> {
    type Item = (u64, u32);

    #[inline]
    fn next(&mut self) -> Option<(u64, u32)> {
        if self.next == self.cluster.len() {
            self.gather()?;
        }
        let slot = self.cluster.get(self.next)?;
        self.next += 1;
        let part = (self.part as u64) << TAG_BITS;
        Some((part | slot >> OFFSET_BITS, to_offset(*slot)))
    }
}

/// How many tables there are: each is the largest that a store has in memory.
#[cfg(test)]
pub(crate) mod counted {
    use std::cell::Cell;

    thread_local! {
        /// Those of this thread, now and at most.
        static TABLES: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
    }

    #[derive(Debug)]
    pub(super) struct Counted;

    impl Counted {
        pub(super) fn new() -> Self {
            let (now, most) = TABLES.get();
            TABLES.set((now + 1, most.max(now + 1)));
            Counted
        }
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            let (now, most) = TABLES.get();
            TABLES.set((now.saturating_sub(1), most));
        }
    }

    /// Returns how many there were at most since the last call.
    pub(crate) fn take_most() -> usize {
        let (now, most) = TABLES.get();
        TABLES.set((now, now));
        most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted(table: &ActiveTable) -> Vec<(u64, u32)> {
        table.ascending().collect()
    }

    fn h(n: u64) -> u64 {
        n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - HASH_BITS)
    }

    #[test]
    fn every_entry_is_found_and_comes_back_sorted_with_its_whole_hash() {
        let mut table = ActiveTable::new(64 * 1024);
        let mut expected = Vec::new();
        for n in 1..=2000u64 {
            let offset = u32::try_from(n * 8 + 64).unwrap();
            table.insert(h(n), offset);
            expected.push((h(n), offset));
        }
        assert!(!table.is_full());
        for (h, offset) in &expected {
            assert!(table.candidates(*h).any(|at| at == *offset));
        }
        expected.sort_unstable();
        assert_eq!(sorted(&table), expected);
    }

    #[test]
    fn entries_come_back_sorted_from_a_table_that_wraps_round_and_from_a_crowded_one() {
        for crowded in [false, true] {
            let mut table = ActiveTable::new(64 * 1024);
            let mut expected = Vec::new();
            for n in 0..300u32 {
                // The last home of a part, or all homes of a part the wrong way round.
                let tag = (1 << TAG_BITS) - 1 - u64::from(if crowded { 0 } else { n % 7 });
                let h = u64::from(n % 3) << TAG_BITS | tag;
                let offset = if crowded { 4096 - n } else { n + 8 } * 8;
                table.insert(h, offset);
                expected.push((h, offset));
            }
            expected.sort_unstable();
            assert_eq!(sorted(&table), expected);
        }
    }

    #[test]
    fn what_went_round_the_end_comes_last_and_what_is_at_home_there_first() {
        let mut table = ActiveTable::new(64 * 1024);
        let mut expected = Vec::new();
        let home = 1 << (TAG_BITS - table.part_slot_bits);
        for n in 0..40u32 {
            // The last homes of each part and the first ones, in turn.
            let at_end = u64::from(n / 4 % 3) * home;
            let tag = if n.is_multiple_of(2) {
                (1 << TAG_BITS) - 1 - at_end
            } else {
                at_end
            };
            let h = u64::from(n % 4 / 2) << TAG_BITS | tag;
            table.insert(h, (n + 8) * 8);
            expected.push((h, (n + 8) * 8));
        }
        expected.sort_unstable();
        assert_eq!(sorted(&table), expected);
    }

    #[test]
    fn a_full_table_comes_back_sorted_a_few_slots_at_a_time() {
        let mut table = ActiveTable::new(1 << 20);
        let mut expected = Vec::new();
        while !table.is_full() {
            let n = expected.len() as u64 + 1;
            let offset = u32::try_from(n * 8).unwrap();
            table.insert(h(n), offset);
            expected.push((h(n), offset));
        }
        expected.sort_unstable();
        let mut entries = table.ascending();
        assert!(entries.by_ref().eq(expected));
        assert!(entries.cluster.capacity() < 2048, "{entries:?}");
    }

    #[test]
    fn equal_hashes_keep_a_slot_each_and_a_replacement_takes_over_only_its_own() {
        let mut table = ActiveTable::new(4096);
        table.insert(5, 64);
        table.insert(5, 128);
        assert_eq!(table.candidates(5).collect::<Vec<_>>(), [64, 128]);
        assert!(table.replace(5, 128, 256).is_some());
        assert!(table.replace(5, 999 * 8, 512).is_none());
        assert_eq!(table.candidates(5).collect::<Vec<_>>(), [64, 256]);
        assert_eq!(table.count(), 2);
    }

    #[test]
    fn undone_changes_leave_the_table_as_it_was() {
        let mut table = ActiveTable::new(4096);
        table.insert(5, 64);
        let one = table.insert(6, 128);
        let two = table.replace(5, 64, 256).unwrap();
        table.undo(two);
        table.undo(one);
        assert_eq!(sorted(&table), [(5, 64)]);
        assert_eq!(table.count(), 1);
    }

    #[test]
    fn a_table_says_when_it_is_full() {
        let mut table = ActiveTable::new(4096);
        let mut count = 0;
        while !table.is_full() {
            count += 1;
            table.insert(h(count), 64);
        }
        assert!(count >= 128, "count={count}");
    }
}
