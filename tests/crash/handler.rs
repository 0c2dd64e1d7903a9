//! A handler as users write them, tested as they would; and one crash made again from its line.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use idemlog::testing::sim::{CrashKind, CrashOptions, CrashState, SimDisk, for_each_crash_point};
use idemlog::{
    ClaimOptions, ClaimVerdict, Durability, NamespaceOptions, Options, Repeatable, Result,
};

use super::promised;
use crate::support::crew::Promised;

/// A handler with a fault of its own: it commits before it has the effect.
fn commits_too_early(disk: &SimDisk, sent: &RefCell<u32>) -> Result<()> {
    let Promised { clock, .. } = promised(Durability::Power);
    let log = Options::new()
        .background(false)
        .clock(clock)
        .open_on(disk.dir())?;
    let mails = log.namespace::<Repeatable>("mails", NamespaceOptions::new())?;
    if let ClaimVerdict::New(mut claim) | ClaimVerdict::Takeover { mut claim, .. } =
        mails.claim_with("mail-1", &ClaimOptions::new())?
    {
        let committed = claim.commit(b"sent")?;
        assert!(matches!(
            committed,
            idemlog::CommitVerdict::Committed { .. }
        ));
        if disk.died_doing().is_none() {
            // Something else that takes a step lies between: here the death is possible.
            log.sync()?;
            mails.claim("mail-2").map(|_| ())?;
            log.sync()?;
            *sent.borrow_mut() += 1;
        }
    }
    log.close()
}

/// The state in which a check panics is found again from what its line says, to the last byte.
#[test]
fn a_crash_is_made_again_from_its_step_and_kind() {
    let sent = RefCell::new(0);
    let scenario = |disk: &SimDisk| {
        *sent.borrow_mut() = 0;
        drop(commits_too_early(disk, &sent));
    };
    let options = CrashOptions {
        outcomes_max: 4,
        seeded_count: 8,
        recycled_count: 8,
        ..CrashOptions::default()
    };
    let mut states: Vec<(u64, CrashKind, u64)> = Vec::new();
    let mut lost = Vec::new();
    let before = RefCell::new(0);
    for_each_crash_point(&options, scenario, |state: CrashState| {
        states.push((state.step, state.kind, state.image));
        before.replace(*sent.borrow());
        commits_too_early(&state.disk, &sent).unwrap();
        // The redelivered message is a duplicate, and the mail was never sent.
        if *sent.borrow() == 0 {
            lost.push(state.to_string());
        }
        sent.replace(*before.borrow());
    });
    assert!(
        !lost.is_empty(),
        "a handler that loses its effect is caught"
    );
    let line = &lost[0];
    assert!(line.starts_with("crash seed=1 step="), "{line}");
    assert!(
        line.contains(" doing=\"") && line.contains(" kind="),
        "{line}"
    );
    let mut kinds = 0;
    for (step, kind, image) in &states {
        let disk = options.replay(*step, *kind, scenario);
        assert_eq!(disk.image_hash(), *image, "step={step} kind={kind:?}");
        kinds |= match kind {
            CrashKind::Kill => 1,
            CrashKind::KillInside { .. } => 2,
            CrashKind::DropAll => 4,
            CrashKind::KeepAll => 8,
            CrashKind::Outcome { .. } => 16,
            CrashKind::Seeded { .. } => 32,
            CrashKind::Recycled { .. } => 64,
        };
    }
    assert_eq!(kinds, 127, "every kind of crash was made again");
}

/// More images are asked for than the first round has: later rounds find them, count them by
/// hash, and can be made again too.
#[test]
fn as_many_images_as_asked_for() {
    let scenario = |disk: &SimDisk| {
        let sent = RefCell::new(0);
        drop(commits_too_early(disk, &sent));
    };
    let options = CrashOptions {
        outcomes_max: 1,
        seeded_count: 1,
        inside_count: 0,
        ..CrashOptions::default()
    };
    let few = for_each_crash_point(&options, scenario, |_| {});
    let options = CrashOptions {
        images_min: few.distinct + 10,
        ..options
    };
    let mut images = std::collections::HashSet::new();
    let mut last = None;
    let many = for_each_crash_point(&options, scenario, |state| {
        images.insert(state.image);
        last = Some((state.step, state.kind, state.image));
    });
    assert!(
        2 * many.distinct >= 3 * few.distinct - 1,
        "{few:?} {many:?}"
    );
    assert_eq!(many.distinct, images.len() as u64);
    let (step, kind, image) = last.unwrap();
    assert_eq!(options.replay(step, kind, scenario).image_hash(), image);
    // A scenario without outcomes ends all the same.
    let options = CrashOptions {
        images_min: u64::MAX,
        ..CrashOptions::default()
    };
    let none = for_each_crash_point(&options, |_| {}, |_| {});
    assert_eq!((none.steps, none.distinct), (0, 1));
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        for_each_crash_point(&options, |_| {}, |_| panic!("as planned"));
    }));
    assert!(panicked.is_err());
}
