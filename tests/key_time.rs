//! Keys that tell when they were made: nothing is forgotten or remembered that would not be
//! without it, whichever openers know how to read the time, and sealed runs of other times are
//! not asked.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use idemlog::testing::ManualClock;
use idemlog::testing::sim::{Rng, SimDisk};
use idemlog::{
    ClaimVerdict, DedupLog, Filter, KeyTime, NamespaceOptions, NonRepeatable, Options, Retention,
};

const START_MS: u64 = 1_700_000_000_000;
const HOUR_MS: u64 = 3_600_000;

fn open(disk: &SimDisk, clock: &Arc<ManualClock>) -> DedupLog {
    Options::new()
        .segment_bytes(4096)
        .background(false)
        .clock(clock.clone())
        .open_on(disk.dir())
        .unwrap()
}

fn space(time: Option<KeyTime>) -> NamespaceOptions {
    let options = NamespaceOptions::new()
        .outcome_bytes_max(0)
        .retention(Retention::For(Duration::from_secs(100 * 3600)));
    match time {
        Some(time) => options.key_time(time),
        None => options,
    }
}

fn filter(log: &DedupLog, time: Option<KeyTime>) -> Filter {
    log.filter("f", space(time)).unwrap()
}

fn uuid(ms: u64, rng: &mut Rng) -> Vec<u8> {
    let mut key: Vec<u8> = ms.to_le_bytes()[..6].iter().rev().copied().collect();
    key.extend_from_slice(&rng.next_u64().to_le_bytes());
    key.extend_from_slice(&[1, 2]);
    key[6] = 0x70 | key[6] & 0x0f;
    key[8] = 0x80 | key[8] & 0x3f;
    key
}

fn ulid(ms: u64, rng: &mut Rng) -> Vec<u8> {
    const DIGITS: &[u8] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";
    let digit = |value: u64| DIGITS[usize::try_from(value % 32).unwrap()];
    let mut key: Vec<u8> = (0..10).rev().map(|at| digit(ms >> (5 * at))).collect();
    key.extend((0..16).map(|_| digit(rng.next_u64())));
    key
}

fn snowflake(ms: u64, rng: &mut Rng) -> Vec<u8> {
    let id = ms << 22 | (rng.next_u64() & 0x3f_ffff);
    id.to_string().into_bytes()
}

fn key_of(time: KeyTime, ms: u64, rng: &mut Rng) -> Vec<u8> {
    match time {
        KeyTime::UuidV7 => uuid(ms, rng),
        KeyTime::Ulid => ulid(ms, rng),
        _ => snowflake(ms, rng),
    }
}

/// Times of all kinds: of now, of long ago, of the future, and keys without any.
fn any_key(time: KeyTime, now_ms: u64, rng: &mut Rng) -> Vec<u8> {
    match rng.below(20) {
        0 => format!("no time {}", rng.next_u64()).into_bytes(),
        1 => key_of(time, 0, rng),
        2 => key_of(time, now_ms + 1000 * HOUR_MS, rng),
        3..=5 => key_of(time, now_ms - rng.below(50) as u64 * HOUR_MS, rng),
        _ => key_of(time, now_ms - rng.below(60_000) as u64, rng),
    }
}

#[test]
fn every_key_is_new_once_whoever_knows_its_time() {
    let snowflake = KeyTime::Snowflake { epoch_ms: 0 };
    for (seed, time) in [(1, KeyTime::UuidV7), (2, KeyTime::Ulid), (3, snowflake)] {
        let disk = SimDisk::memory();
        let clock = Arc::new(ManualClock::new(START_MS));
        let mut rng = Rng::new(seed);
        let mut known: BTreeMap<Vec<u8>, ()> = BTreeMap::new();
        for round in 0..12 {
            // Now and then by somebody who does not know, or believes something else.
            let said = match rng.below(5) {
                0 => None,
                1 => Some(KeyTime::Snowflake { epoch_ms: 77 }),
                _ => Some(time),
            };
            let log = open(&disk, &clock);
            let filter = filter(&log, said);
            let mut keys: Vec<Vec<u8>> = (0..150)
                .map(|_| any_key(time, START_MS + round * HOUR_MS, &mut rng))
                .collect();
            let old: Vec<&Vec<u8>> = known.keys().collect();
            if !old.is_empty() {
                keys.extend((0..50).map(|_| old[rng.below(old.len())].clone()));
            }
            for (key, answer) in keys.iter().zip(filter.observe_many(&keys).unwrap()) {
                let expected = known.insert(key.clone(), ()).is_none();
                assert_eq!(answer.unwrap().is_new(), expected, "seed {seed} {key:?}");
            }
            clock.advance_ms(HOUR_MS);
            log.maintain().unwrap();
            log.maintain().unwrap();
            for key in known.keys() {
                assert!(
                    !filter.observe(key).unwrap().is_new(),
                    "seed {seed} {key:?}"
                );
            }
            drop(filter);
            log.close().unwrap();
        }
        assert!(open(&disk, &clock).stats().merges_count < 100);
    }
}

/// Records that move to the end of the log keep their keys' times.
#[test]
fn a_carried_record_is_found_by_its_old_time() {
    let disk = SimDisk::memory();
    let clock = Arc::new(ManualClock::new(START_MS));
    let log = open(&disk, &clock);
    let mut rng = Rng::new(4);
    let filter = filter(&log, Some(KeyTime::UuidV7));
    let claims = log
        .namespace::<NonRepeatable>("claims", space(Some(KeyTime::UuidV7)))
        .unwrap();
    let held = uuid(START_MS, &mut rng);
    let ClaimVerdict::New(guard) = claims.claim(&held).unwrap() else {
        panic!("the key is new")
    };
    drop(guard.start(b"left").unwrap());
    for hour in 0..300 {
        for _ in 0..40 {
            let key = uuid(START_MS + hour * HOUR_MS, &mut rng);
            assert!(filter.observe(key).unwrap().is_new());
        }
        clock.advance_ms(HOUR_MS);
        log.maintain().unwrap();
    }
    let stats = log.stats();
    assert!(
        stats.carried_count > 0 && stats.drops_count > 0,
        "{stats:?}"
    );
    assert!(matches!(
        claims.claim(&held).unwrap(),
        ClaimVerdict::InDoubt(_)
    ));
}
