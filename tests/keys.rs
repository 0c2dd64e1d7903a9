//! Keys made of parts, as calls take them: no two sequences of parts are one key.

use std::collections::HashMap;

use idemlog::testing::sim::Rng;
use idemlog::{
    ClaimVerdict, DedupLog, ErrorKind, KEY_BYTES_MAX, KeyParts, NamespaceOptions, Observed,
    Repeatable, random_key,
};

use crate::support::env_u64;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Part {
    Bytes(Vec<u8>),
    Number(i128),
}

fn key_of(parts: &[Part]) -> KeyParts {
    parts.iter().fold(KeyParts::new(), |key, part| match part {
        Part::Bytes(bytes) => key.part(bytes),
        Part::Number(number) => key.number(*number),
    })
}

/// Reads a key back as `docs/keys.md` describes it. What can be read back in one way only is the
/// key of one sequence only.
fn parts_of(mut key: &[u8]) -> Vec<Part> {
    let mut parts = Vec::new();
    while let Some((tag, rest)) = key.split_first() {
        key = rest;
        let mut number = 0u128;
        for shift in (0..).step_by(7) {
            let byte = key[0];
            key = &key[1..];
            number |= u128::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                assert!(byte != 0 || shift == 0, "a number has one form");
                break;
            }
        }
        parts.push(match tag {
            1 => {
                let (bytes, rest) = key.split_at(number.try_into().unwrap());
                key = rest;
                Part::Bytes(bytes.to_vec())
            }
            2 => Part::Number(number.try_into().unwrap()),
            3 => Part::Number(-1 - i128::try_from(number).unwrap()),
            tag => panic!("unknown tag: {tag}"),
        });
    }
    parts
}

fn random_part(rng: &mut Rng) -> Part {
    if rng.below(2) == 0 {
        // Short, and of bytes that also stand for tags and lengths: what could be confused.
        let len = [0, 1, 2, 3, 127, 128, 200][rng.below(7)];
        return Part::Bytes((0..len).map(|_| rng.below(5) as u8).collect());
    }
    let wide = i128::from(rng.next_u64() as i64) << 64 | i128::from(rng.next_u64());
    Part::Number(wide >> rng.below(128))
}

#[test]
fn different_sequences_of_parts_are_different_keys() {
    let seed = env_u64("IDEMLOG_SEED", 1);
    println!("keys: IDEMLOG_SEED={seed} repeats this");
    let mut rng = Rng::new(seed);
    let mut seen: HashMap<Vec<u8>, Vec<Part>> = HashMap::new();
    for _ in 0..env_u64("IDEMLOG_CASES", 20_000) {
        let parts: Vec<Part> = (0..rng.below(5)).map(|_| random_part(&mut rng)).collect();
        let key = key_of(&parts).into_bytes();
        assert_eq!(parts_of(&key), parts);
        let same = seen.entry(key).or_insert_with(|| parts.clone());
        assert_eq!(*same, parts);
    }
    assert!(seen.len() > 100);
}

#[test]
fn a_part_moved_over_a_border_is_another_key() {
    let all = [
        KeyParts::of(["ab", "c"]),
        KeyParts::of(["a", "bc"]),
        KeyParts::of(["abc"]),
        KeyParts::of(["abc", ""]),
        KeyParts::of(["", "abc"]),
        KeyParts::new().part("7"),
        KeyParts::new().number(7),
        KeyParts::new().number(-7),
        KeyParts::new().part([2, 7]),
        KeyParts::kafka("t", 1, 23).unwrap(),
        KeyParts::kafka("t", 12, 3).unwrap(),
        KeyParts::kafka("t1", 2, 3).unwrap(),
    ];
    for (at, key) in all.iter().enumerate() {
        assert!(!all[at + 1..].contains(key), "{key:?}");
        assert!(!key.as_bytes()[0].is_ascii_graphic(), "{key:?}");
    }
    assert_eq!(KeyParts::new().number(7u8), KeyParts::new().number(7i64));
}

#[test]
fn calls_take_keys_of_parts_and_refuse_what_is_no_key() {
    let log = DedupLog::in_memory().unwrap();
    let filter = log.filter("f", NamespaceOptions::new()).unwrap();
    let jobs = log
        .namespace::<Repeatable>("jobs", NamespaceOptions::new())
        .unwrap();
    let key = KeyParts::kafka("orders", 0, 5).unwrap();
    assert_eq!(filter.observe(&key).unwrap(), Observed::New);
    assert_eq!(filter.observe(&key).unwrap(), Observed::Duplicate);
    let verdict = jobs.claim(&key).unwrap();
    assert!(matches!(verdict, ClaimVerdict::New(_)));
    assert_eq!(
        filter.observe(random_key().unwrap()).unwrap(),
        Observed::New
    );
    // Four bytes say what the part is and how long.
    let fits = KeyParts::of([vec![7; KEY_BYTES_MAX - 4]]);
    assert_eq!(fits.as_bytes().len(), KEY_BYTES_MAX);
    assert_eq!(filter.observe(&fits).unwrap(), Observed::New);
    for bad in [KeyParts::new(), fits.part("")] {
        let error = filter.observe(&bad).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        let error = jobs.claim(&bad).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
}

#[cfg(feature = "snowflake")]
mod snowflakes {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use idemlog::testing::ManualClock;
    use idemlog::testing::sim::SimDisk;
    use idemlog::{DedupLog, ErrorKind, Options};

    const EPOCH_MS: u64 = 1_735_689_600_000;

    fn open(disk: &SimDisk, clock: &Arc<ManualClock>) -> DedupLog {
        let options = Options::new().background(false).clock(clock.clone());
        options.open_on(disk.dir()).unwrap()
    }

    /// Lets time pass while an id is waited for.
    fn make_later(ids: &idemlog::Snowflakes, clock: &ManualClock) -> u64 {
        clock.advance_ms(1);
        ids.make().unwrap()
    }

    #[test]
    fn an_id_has_its_time_its_machine_and_its_number() {
        let clock = Arc::new(ManualClock::new(EPOCH_MS + 5_000));
        let log = open(&SimDisk::new(), &clock);
        let ids = log.snowflakes(7, EPOCH_MS).unwrap();
        let first = make_later(&ids, &clock);
        assert_eq!(first, 5_001 << 22 | 7 << 12);
        assert_eq!(ids.make().unwrap(), 5_001 << 22 | 7 << 12 | 1);
        let again = log.snowflakes(7, EPOCH_MS).unwrap();
        assert_eq!(again.make().unwrap(), 5_001 << 22 | 7 << 12 | 2);
        let other = log.snowflakes(1023, EPOCH_MS).unwrap();
        assert_eq!(make_later(&other, &clock), 5_002 << 22 | 1023 << 12);
    }

    #[test]
    fn an_opener_in_the_same_millisecond_makes_no_id_again() {
        let disk = SimDisk::new();
        let clock = Arc::new(ManualClock::new(EPOCH_MS + 5_000));
        let log = open(&disk, &clock);
        let ids = log.snowflakes(7, EPOCH_MS).unwrap();
        let last = make_later(&ids, &clock);
        log.close().unwrap();
        assert_eq!(ids.make().unwrap_err().kind(), ErrorKind::Closed);
        let log = open(&disk, &clock);
        // The wall clock is set back meanwhile: that is none of trusted time's business.
        clock.set_wall_ms(EPOCH_MS + 10);
        let ids = log.snowflakes(7, EPOCH_MS).unwrap();
        let error = ids.make().unwrap_err();
        assert_eq!(
            error.kind(),
            ErrorKind::Io,
            "this millisecond may be used up"
        );
        assert!(make_later(&ids, &clock) > last);
    }

    #[test]
    fn four_thousand_ids_are_all_a_millisecond_has() {
        let clock = Arc::new(ManualClock::new(EPOCH_MS));
        let log = open(&SimDisk::new(), &clock);
        let ids = log.snowflakes(0, EPOCH_MS).unwrap();
        let mut made = BTreeSet::from([make_later(&ids, &clock)]);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3)
                .map(|_| scope.spawn(|| (0..1365).map(|_| ids.make().unwrap()).collect()))
                .collect();
            for thread in threads {
                let some: Vec<u64> = thread.join().unwrap();
                made.extend(some);
            }
        });
        assert_eq!(made.len(), 4096);
        let error = ids.make().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        assert!(!made.contains(&make_later(&ids, &clock)));
    }

    #[test]
    fn what_cannot_be_unique_is_refused() {
        let clock = Arc::new(ManualClock::new(EPOCH_MS));
        let log = open(&SimDisk::new(), &clock);
        let ids = log.snowflakes(7, EPOCH_MS).unwrap();
        for (machine, epoch_ms) in [(1024, EPOCH_MS), (8, EPOCH_MS + 1), (7, EPOCH_MS - 1)] {
            let error = log.snowflakes(machine, epoch_ms).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        }
        drop(log);
        assert_eq!(ids.make().unwrap_err().kind(), ErrorKind::Closed);
    }
}
