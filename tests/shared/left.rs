//! What a dead one has left is tidied up in an order that no power cut breaks.

use idemlog::testing::sim::{PowerCut, SimDisk};
use idemlog::{Durability, KeyState, ObserveOptions};

use super::{Member, clock, key, options, small};

const OLD: usize = 170;
const NEW: usize = 20;
const CUTS: u64 = 6;

/// One dies at each step of an upkeep that drops segments, another one at each step of its own
/// upkeep behind that, and then the power goes: what the manifest lists is there.
#[test]
fn what_a_dead_one_unlisted_is_unlisted_durably_before_it_goes() {
    let mut images = 0;
    for step in 0.. {
        for then in 0.. {
            let (disk, clock) = (SimDisk::seeded(3), clock());
            let (a, b) = (Member::open(&disk, &clock), Member::open(&disk, &clock));
            for n in 0..OLD {
                assert!(a.filter.observe(key("old", n)).unwrap().is_new());
            }
            clock.advance_ms(8 * 24 * 3_600_000);
            b.log.confirm_time().unwrap();
            let durable = ObserveOptions::new().durability(Durability::Power);
            for n in 0..NEW {
                let observed = a.filter.observe_with(key("new", n), &durable);
                assert!(observed.unwrap().is_new());
            }
            a.process.kill_at(disk.steps() + step, 0);
            if a.log.maintain().is_ok() {
                println!("steps={step} images={images}");
                assert!(step > 20 && then == 0, "{step} {then}");
                return;
            }
            a.kill();
            b.process.kill_at(disk.steps() + then, 0);
            let is_done = b.log.maintain().is_ok();
            for seed in 0..CUTS {
                let cut = disk.after_power_cut(&mut PowerCut::seeded(seed));
                let log = options(&clock).shared(false).open_on(cut.dir());
                let log = log.unwrap_or_else(|e| panic!("{step} {then} {seed} {e}"));
                let filter = log.filter("f", small()).unwrap();
                for n in 0..NEW {
                    assert_eq!(filter.get(key("new", n)).unwrap(), KeyState::Seen, "{n}");
                }
                images += 1;
            }
            if is_done {
                break;
            }
        }
    }
}
