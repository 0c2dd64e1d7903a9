//! Builds the fuse filter of a merged run, one partition at a time, while the merge streams.

use std::io;

use xorf::BinaryFuse8;

use crate::format::filter::{FILTER_HEADER_BYTES, FilterKind, FilterPlan};
use crate::format::fuse::{Partition, partition_of, partitions_for, table_bytes};
use crate::format::run::checksum;
use crate::format::{to_u32, to_usize};

/// Gathers ascending, different hashes.
#[derive(Debug)]
pub(super) struct FuseBuilder {
    partitions_count: u32,
    seed: u32,
    /// Of the partition that is being gathered.
    hashes: Vec<u64>,
    done: Vec<Partition>,
    /// Bytes of the fingerprints of those that are done.
    fingerprints_bytes: u64,
}

impl FuseBuilder {
    /// `seed`: that of the run's checksums.
    pub(super) fn new(keys_max: u64, seed: u32) -> Self {
        FuseBuilder {
            partitions_count: partitions_for(keys_max),
            seed,
            hashes: Vec::new(),
            done: Vec::new(),
            fingerprints_bytes: 0,
        }
    }

    /// Adds a hash that is greater than the one before. `write` gets bytes and their offset.
    pub(super) fn insert(
        &mut self,
        h: u64,
        mut write: impl FnMut(&[u8], u64) -> io::Result<()>,
    ) -> io::Result<()> {
        while self.done.len() < partition_of(h, self.partitions_count) {
            self.end_partition(&mut write)?;
        }
        self.hashes.push(h);
        Ok(())
    }

    fn end_partition(
        &mut self,
        mut write: impl FnMut(&[u8], u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let at = self.fingerprints_bytes;
        let mut partition = Partition {
            seed: 0,
            at,
            segment_length: 0,
            segment_count_length: 0,
            keys_count: to_u32(self.hashes.len()),
            crc: checksum(self.seed, &[]),
        };
        // Fails for equal hashes only, and then the partition excludes nothing.
        if !self.hashes.is_empty()
            && let Ok(built) = BinaryFuse8::try_from_iterator(self.hashes.iter().copied())
        {
            let whole = Partition {
                seed: built.descriptor.seed,
                segment_length: built.descriptor.segment_length,
                segment_count_length: built.descriptor.segment_count_length,
                crc: checksum(self.seed, &built.fingerprints),
                ..partition
            };
            // A key that its filter excludes would be new again: nobody is believed.
            if self
                .hashes
                .iter()
                .all(|h| whole.may_contain(&built.fingerprints, *h))
            {
                partition = whole;
                let table = FILTER_HEADER_BYTES + table_bytes(self.partitions_count);
                write(&built.fingerprints, table as u64 + at)?;
                self.fingerprints_bytes += built.fingerprints.len() as u64;
            }
        }
        self.done.push(partition);
        self.hashes.clear();
        Ok(())
    }

    /// Hands on the rest of the fingerprints, then the header and the table, which go to the
    /// front.
    pub(super) fn finish(
        mut self,
        plan: &FilterPlan,
        mut write: impl FnMut(&[u8], u64) -> io::Result<()>,
    ) -> io::Result<()> {
        while self.done.len() < to_usize(self.partitions_count) {
            self.end_partition(&mut write)?;
        }
        let mut table = Vec::new();
        for partition in &self.done {
            partition.encode(&mut table);
        }
        let crc = checksum(self.seed, &table);
        let mut front = plan.header(FilterKind::Fuse, self.partitions_count, crc);
        front.extend_from_slice(&table);
        write(&front, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::filter;
    use crate::format::fuse::decode_table;
    use crate::format::run::HASH_BITS;

    const SEED: u32 = 5;

    fn plan(keys_count: u64) -> FilterPlan {
        FilterPlan {
            store: [1; 16],
            hash_key_id: 2,
            generation: 3,
            keys_count,
            run_crc: 4,
        }
    }

    fn hashes(count: u64, start: u64) -> Vec<u64> {
        let hash = |n: u64| (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - HASH_BITS);
        let mut all: Vec<u64> = (start..start + count).map(hash).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    fn build(keys_max: u64, hashes: &[u64]) -> Vec<u8> {
        let mut file = Vec::new();
        let mut write = |bytes: &[u8], at: u64| {
            let at = usize::try_from(at).unwrap();
            file.resize(file.len().max(at + bytes.len()), 0);
            file[at..at + bytes.len()].copy_from_slice(bytes);
            Ok(())
        };
        let mut builder = FuseBuilder::new(keys_max, SEED);
        hashes
            .iter()
            .for_each(|h| builder.insert(*h, &mut write).unwrap());
        builder.finish(&plan(hashes.len() as u64), write).unwrap();
        file
    }

    fn may_contain(file: &[u8], h: u64) -> bool {
        let (header, body) = filter::decode(file, SEED).unwrap();
        let (partitions, all) = decode_table(body, header.parts_count).unwrap();
        let partition = partitions[partition_of(h, header.parts_count)];
        let fingerprints = partition.fingerprints(all).unwrap();
        assert!(partition.is_intact(fingerprints, SEED));
        partition.may_contain(fingerprints, h)
    }

    #[test]
    fn a_filter_of_any_size_holds_its_keys_and_excludes_almost_all_others() {
        for count in [1, 2, 3, 4, 5, 7, 100, 4096, 30_000] {
            let held = hashes(count, 0);
            // Also with partitions that hold nothing.
            for keys_max in [count, 3_000_000] {
                let file = build(keys_max, &held);
                assert!(held.iter().all(|h| may_contain(&file, *h)), "{count}");
                let others = hashes(2_000, 1 << 40);
                let passed = others.iter().filter(|h| may_contain(&file, **h)).count();
                assert!(passed < 40, "count={count} passed={passed}");
            }
        }
    }

    #[test]
    fn the_documented_test_is_that_of_the_library() {
        use xorf::Filter as _;
        let held = hashes(5_000, 7);
        let library = BinaryFuse8::try_from_iterator(held.iter().copied()).unwrap();
        let file = build(5_000, &held);
        for h in hashes(20_000, 0) {
            assert_eq!(library.contains(&h), may_contain(&file, h));
        }
    }

    #[test]
    fn every_changed_byte_is_noticed() {
        let file = build(100, &hashes(100, 0));
        for at in 0..file.len() {
            let mut bad = file.clone();
            bad[at] ^= 0x10;
            let noticed = filter::decode(&bad, SEED).and_then(|(header, body)| {
                let (partitions, all) = decode_table(body, header.parts_count)?;
                let fingerprints = partitions[0].fingerprints(all).unwrap();
                Ok(!partitions[0].is_intact(fingerprints, SEED))
            });
            assert_ne!(noticed, Ok(false), "byte {at}");
        }
        assert!(filter::decode(&file[..90], SEED).is_err());
    }
}
