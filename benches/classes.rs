//! What does claim, start and commit with an outcome of 64 bytes cost, by effect class, where each
//! must survive a power cut and where nothing must?
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    missing_docs,
    reason = "a benchmark that fails panics, prints what it is about, and reads the clock"
)]

mod common;

use std::hint::black_box;

use criterion::Criterion;
use idemlog::{
    DedupLog, Durability, EffectClass, Internal, NamespaceOptions, NonRepeatable, Probeable,
    Repeatable,
};

fn main() {
    common::run(|criterion, dir| {
        for durability in [Durability::Power, Durability::Buffered] {
            let log = common::open(&dir.join(format!("{durability:?}")), durability);
            let group = format!("claim and commit, {durability:?}");
            run_once::<Repeatable>(criterion, &log, &group, "repeatable");
            run_once::<Internal>(criterion, &log, &group, "internal");
            run_once::<Probeable>(criterion, &log, &group, "probeable");
            run_once::<NonRepeatable>(criterion, &log, &group, "non-repeatable");
            log.close().unwrap();
        }
    });
}

fn run_once<C: EffectClass>(criterion: &mut Criterion, log: &DedupLog, group: &str, class: &str) {
    let jobs = log.namespace::<C>(class, NamespaceOptions::new()).unwrap();
    let fresh = common::Fresh::new();
    common::group(criterion, group, 1).bench_function(class, |bencher| {
        bencher.iter(|| black_box(jobs.run_once(fresh.key(), |_| Ok(vec![7; 64])).unwrap()));
    });
}
