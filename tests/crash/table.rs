//! The crash table of the contract, row by row: `docs/guarantees.md`.

use idemlog::testing::sim::PowerCut;
use idemlog::{Durability, KeyState, Probed, Resolution, Result};

use super::{KEY, Said, copy, created, promised, reopen, secs};
use crate::support::crew::{CLASSES, Crew, LEVELS, NON_REPEATABLE, PROBEABLE};
use crate::support::oracle::{Answer, Changed, How};

/// Runs `before` for each class, level and kind of crash, and hands what is left to `after`, with
/// the fact whether everything acknowledged at that level is bound to be there.
fn for_each_cell(
    before: impl Fn(&mut Crew, usize, Durability) -> Result<()>,
    after: impl Fn(&mut Crew, usize, bool),
) {
    for level in LEVELS {
        for space in CLASSES {
            for crash in 0..4u64 {
                let disk = created(level);
                let mut crew = reopen(&disk, promised(level));
                before(&mut crew, space, level).unwrap();
                let left = match crash {
                    0 => disk.after_kill(),
                    1 => disk.after_power_cut(&mut PowerCut::drop_all()),
                    2 => disk.after_power_cut(&mut PowerCut::keep_all()),
                    _ => disk.after_power_cut(&mut PowerCut::seeded(space as u64)),
                };
                let killed = crash == 0;
                let floor = if killed {
                    crew.p.floor_kill
                } else {
                    crew.p.floor_power
                };
                let mut promised = copy(&crew.p);
                drop(crew.close());
                if !killed {
                    promised.clock.reboot();
                    promised.oracle.boot_ms = 1000;
                }
                let mut crew = reopen(&left, promised);
                crew.settle(floor);
                let bound = level == Durability::Power || killed && level == Durability::Process;
                let _said = Said(format!("cell class={space} level={level:?} crash={crash}"));
                after(&mut crew, space, bound);
                crew.close().1.unwrap();
            }
        }
    }
}

fn how(answer: &Answer) -> Option<&How> {
    match answer {
        Answer::Granted { how, .. } => Some(how),
        _ => None,
    }
}

fn begin(crew: &mut Crew, space: usize) -> Result<()> {
    crew.claim(space, KEY, false)?;
    crew.start(space, KEY, b"evidence")
}

/// What a started effect of which nothing more is known comes to.
fn judge_unknown(crew: &mut Crew, space: usize) {
    let answer = crew.claim(space, KEY, false).unwrap();
    match space {
        // `Probeable` and `NonRepeatable` wait for `start` at Power, whatever the level.
        NON_REPEATABLE => assert!(matches!(answer, Answer::InDoubt(_)), "{answer:?}"),
        // The probe of these tests does not know, unless told otherwise.
        PROBEABLE => assert!(matches!(answer, Answer::InDoubt(_)), "{answer:?}"),
        _ => assert!(
            matches!(how(&answer), Some(How::New | How::Takeover(_))),
            "{answer:?}"
        ),
    }
}

#[test]
fn row_before_claim_runs() {
    for_each_cell(
        |_, _, _| Ok(()),
        |crew, space, _| {
            let answer = crew.claim(space, KEY, false).unwrap();
            assert_eq!(how(&answer), Some(&How::New));
        },
    );
}

#[test]
fn row_claimed_not_started_is_run_again() {
    for_each_cell(
        |crew, space, _| crew.claim(space, KEY, false).map(|_| ()),
        |crew, space, _| {
            let answer = crew.claim(space, KEY, false).unwrap();
            match how(&answer) {
                Some(How::New) => {}
                Some(How::Takeover(previous)) => assert!(!previous.started),
                _ => panic!("{answer:?}"),
            }
        },
    );
}

#[test]
fn row_started_effect_unknown() {
    for_each_cell(
        |crew, space, _| begin(crew, space),
        |crew, space, _| judge_unknown(crew, space),
    );
    for found in [Probed::Applied(b"found".to_vec()), Probed::NotApplied] {
        for_each_cell(
            |crew, space, _| begin(crew, space),
            |crew, space, _| {
                crew.probe.lock().unwrap().0 = found.clone();
                let answer = crew.claim(space, KEY, false).unwrap();
                match (space, &found) {
                    (PROBEABLE, Probed::Applied(_)) => {
                        assert!(matches!(answer, Answer::Duplicate(_)), "{answer:?}");
                    }
                    (PROBEABLE, _) => {
                        assert!(matches!(how(&answer), Some(How::Takeover(p)) if p.started));
                    }
                    _ => {}
                }
            },
        );
    }
}

#[test]
fn row_committed_ack_lost_is_replayed() {
    for_each_cell(
        |crew, space, level| {
            begin(crew, space)?;
            crew.commit(space, KEY, b"outcome", level)
        },
        |crew, space, bound| {
            let state = crew.p.oracle.get(space, KEY);
            if bound || matches!(state, KeyState::Done(_)) {
                let answer = crew.claim(space, KEY, false).unwrap();
                let Answer::Duplicate(done) = answer else {
                    panic!("{answer:?}")
                };
                assert_eq!(done.outcome.bytes(), Some(&b"outcome"[..]));
            } else {
                judge_unknown(crew, space);
            }
        },
    );
}

#[test]
fn row_lease_lapsed_nobody_took_over_commit_is_accepted() {
    for_each_cell(
        |crew, space, level| {
            begin(crew, space)?;
            crew.advance(60_000);
            if space == NON_REPEATABLE {
                let answer = crew.claim(space, KEY, false)?;
                assert!(matches!(answer, Answer::InDoubt(_)), "{answer:?}");
            }
            crew.commit(space, KEY, b"late", level)
        },
        |crew, space, bound| {
            if bound {
                assert!(matches!(crew.p.oracle.get(space, KEY), KeyState::Done(_)));
            }
        },
    );
    // Over the crash: the old owner has its ticket.
    for_each_cell(
        |crew, space, _| {
            begin(crew, space)?;
            crew.sync()
        },
        |crew, space, _| {
            let epoch = crew.p.oracle.entry(space, KEY).unwrap().common.epoch;
            let verdict = crew.commit_ticket(space, KEY, epoch, b"late").unwrap();
            assert_eq!(verdict, Changed::Committed);
        },
    );
}

#[test]
fn row_taken_over_old_owner_is_fenced() {
    for_each_cell(
        |crew, space, _| {
            begin(crew, space)?;
            crew.sync()
        },
        |crew, space, _| {
            let epoch = crew.p.oracle.entry(space, KEY).unwrap().common.epoch;
            match space {
                NON_REPEATABLE => {
                    crew.claim(space, KEY, false).unwrap();
                    let applied = Resolution::Applied(b"found".to_vec());
                    crew.resolve(space, KEY, applied).unwrap();
                }
                PROBEABLE => {
                    crew.probe.lock().unwrap().0 = Probed::Applied(b"found".to_vec());
                    crew.claim(space, KEY, false).unwrap();
                }
                _ => {
                    crew.claim(space, KEY, false).unwrap();
                }
            }
            let same = crew.commit_ticket(space, KEY, epoch, b"found").unwrap();
            let other = crew.commit_ticket(space, KEY, epoch, b"other").unwrap();
            if matches!(space, NON_REPEATABLE | PROBEABLE) {
                assert_eq!(same, Changed::AlreadyCommitted);
                assert!(matches!(other, Changed::Conflict(_)), "{other:?}");
            } else {
                assert!(matches!(same, Changed::Fenced(_)), "{same:?}");
                assert!(matches!(other, Changed::Fenced(_)), "{other:?}");
            }
        },
    );
    // Taken over by another attempt, or resolved as not applied: fenced.
    for_each_cell(
        |crew, space, _| {
            begin(crew, space)?;
            crew.sync()
        },
        |crew, space, _| {
            let epoch = crew.p.oracle.entry(space, KEY).unwrap().common.epoch;
            crew.probe.lock().unwrap().0 = Probed::NotApplied;
            crew.claim(space, KEY, false).unwrap();
            if space == NON_REPEATABLE {
                crew.resolve(space, KEY, Resolution::NotApplied).unwrap();
            }
            let verdict = crew.commit_ticket(space, KEY, epoch, b"late").unwrap();
            assert!(matches!(verdict, Changed::Fenced(_)), "{verdict:?}");
        },
    );
}

#[test]
fn row_key_expired_runs_again() {
    for_each_cell(
        |crew, space, level| {
            begin(crew, space)?;
            crew.commit_for(space, KEY, b"old", level, Some(secs(5)))?;
            crew.sync()?;
            crew.advance(5_000);
            // Somebody reads the time before the crash, so that it counts.
            crew.log.maintain()
        },
        |crew, space, _| {
            let answer = crew.claim(space, KEY, false).unwrap();
            assert_eq!(how(&answer), Some(&How::New));
        },
    );
}
