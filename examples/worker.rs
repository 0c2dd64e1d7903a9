//! The main job: workers of every effect class consume an at-least-once queue and are killed.
//!
//! ```text
//! cargo run --release --example worker [-- --seed 7 --kills 60]
//! ```
//!
//! The program starts itself as a child that works, kills it with SIGKILL at random moments, and
//! starts it again. Queue and ledger live in the parent, which no kill reaches. The queue
//! delivers again what was not acknowledged, repeats messages, and changes their order. At the
//! end the ledger is judged by code that does not know idemlog (`worker/judge.rs`).
//!
//! What a user of the library writes is `mod worker` and `mod operator`.

#![expect(
    clippy::disallowed_methods,
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "a stand-in for queue, network and clock, not a part of the store"
)]

#[path = "worker/judge.rs"]
mod judge;
#[path = "worker/link.rs"]
mod link;
#[path = "worker/random.rs"]
mod random;
#[path = "worker/server.rs"]
mod server;
#[path = "worker/world.rs"]
mod world;

use std::error::Error;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Child, Command, ExitCode};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use judge::{Judgement, judge};
use world::{Class, Phase, World};

type Fallible<T> = Result<T, Box<dyn Error + Send + Sync>>;

const KILLS_DEFAULT: u64 = 60;
const KILLS_MIN: u64 = 50;
/// A child that has not finished by then hangs.
const CHILD_TIME_MAX: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let done = match words.first().map(String::as_str) {
        Some("--child") => worker::work(Path::new(&words[1])).map(|()| true),
        _ => parent(&words),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            drop(writeln!(io::stderr(), "worker: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// What a user of the library writes: a consumer that charges accounts.
mod worker {
    use std::path::Path;
    use std::sync::Mutex;
    use std::time::Duration;

    use idemlog::{
        AckAdvice, Attempt, CommitVerdict, EffectClass, Failure, Internal, Namespace,
        NamespaceOptions, NonRepeatable, Options, ProbeRequest, Probeable, Probed, Repeatable,
        RunVerdict,
    };

    use crate::Fallible;
    use crate::link::{Charged, Delivery, Link};
    use crate::world::Class;

    const THREADS_COUNT: usize = 6;
    /// The ledger answers within milliseconds, and refuses what comes after a probe.
    const SETTLE: Duration = Duration::from_millis(25);

    struct Shop {
        repeatable: Namespace<Repeatable>,
        probeable: Namespace<Probeable>,
        non_repeatable: Namespace<NonRepeatable>,
        internal: Namespace<Internal>,
    }

    /// Works until the queue says that there is nothing left.
    pub(crate) fn work(dir: &Path) -> Fallible<()> {
        let log = Options::new().open(dir.join("store"))?;
        let options = || {
            NamespaceOptions::new()
                .settle(SETTLE)
                .outcome_bytes_max(256)
        };
        let target = Mutex::new(Link::connect(dir)?);
        let probe = move |asked: &ProbeRequest| match target.lock() {
            Ok(mut target) => target.probe(asked.key, asked.doubt.epoch.get()),
            Err(_) => Probed::Unknown,
        };
        let shop = Shop {
            repeatable: log.namespace("repeatable", options())?,
            probeable: log.namespace("probeable", options())?.with_probe(probe),
            non_repeatable: log.namespace("non-repeatable", options())?,
            internal: log.namespace("internal", options())?,
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS_COUNT)
                .map(|_| scope.spawn(|| consume(&shop, dir)))
                .collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap())
        })?;
        Ok(log.close()?)
    }

    fn consume(shop: &Shop, dir: &Path) -> Fallible<()> {
        let mut link = Link::connect(dir)?;
        while let Some(delivery) = link.next()? {
            match delivery.class {
                Class::Repeatable => handle(&shop.repeatable, &mut link, &delivery)?,
                Class::Probeable => handle(&shop.probeable, &mut link, &delivery)?,
                Class::NonRepeatable => handle(&shop.non_repeatable, &mut link, &delivery)?,
                Class::Internal => handle(&shop.internal, &mut link, &delivery)?,
            }
        }
        Ok(())
    }

    /// Charges once, whatever was delivered how often, and tells the queue what to do.
    fn handle<C: EffectClass>(
        space: &Namespace<C>,
        link: &mut Link,
        delivery: &Delivery,
    ) -> Fallible<()> {
        let mut how = "ran";
        let verdict = space.run_once(&delivery.key, |attempt| {
            // A failed attempt leaves an error; one whose owner was killed does not.
            if attempt
                .previous()
                .is_some_and(|previous| previous.error.is_empty())
            {
                how = "takeover";
            }
            charge(link, delivery, attempt)
        })?;
        let advice = verdict.ack_advice();
        match (verdict, advice) {
            (RunVerdict::Ran { outcome, commit }, _) => match commit {
                CommitVerdict::Committed { .. } | CommitVerdict::AlreadyCommitted => {
                    link.done(delivery, how, &outcome)
                }
                _ => link.later(delivery, "fenced", Duration::ZERO),
            },
            (RunVerdict::Replayed(done), _) => link.done(
                delivery,
                "replayed",
                done.outcome.bytes().unwrap_or_default(),
            ),
            (RunVerdict::Busy { .. }, AckAdvice::Redeliver { after }) => {
                link.later(delivery, "busy", after)
            }
            (_, AckAdvice::Redeliver { after }) => link.later(delivery, "failed", after),
            (_, AckAdvice::Hold) => link.hold(delivery),
            (_, AckAdvice::Ack | AckAdvice::DeadLetter) => Err("nothing here is refused".into()),
        }
    }

    /// The effect. Its outcome is the receipt, which every duplicate gets.
    fn charge(link: &mut Link, delivery: &Delivery, attempt: &Attempt) -> Result<Vec<u8>, Failure> {
        if delivery.class == Class::Internal {
            // The effect is the commit itself; the epoch shows which attempt it was.
            std::thread::sleep(Duration::from_millis(1));
            return Ok(attempt.epoch().to_string().into_bytes());
        }
        let derived_key = attempt.derived_key("charge");
        match link.charge(delivery, &derived_key, attempt.epoch().get()) {
            Ok(Charged::Receipt(receipt)) => Ok(receipt),
            Ok(Charged::TimedOut) => Err(Failure::unknown("time-out")),
            // The link broke: the message may have got through.
            Err(error) => Err(Failure::unknown(error)),
        }
    }
}

/// What a person, or a job, does about keys in doubt.
mod operator {
    use std::path::Path;

    use idemlog::{Internal, KeyState, NamespaceOptions, NonRepeatable, Options, Resolution};

    use crate::Fallible;

    /// Ends every doubt with what the ledger says; returns (applied, not applied).
    pub(crate) fn resolve_all(
        dir: &Path,
        receipt_of: impl Fn(&str) -> Option<String>,
    ) -> Fallible<(usize, usize)> {
        let log = Options::new().open(dir.join("store"))?;
        let space = log.namespace::<NonRepeatable>("non-repeatable", NamespaceOptions::new())?;
        let mut resolved = (0, 0);
        for unsettled in log.in_doubt()? {
            let KeyState::InDoubt(doubt) = &unsettled.state else {
                continue;
            };
            let resolution = match receipt_of(std::str::from_utf8(&unsettled.key)?) {
                Some(receipt) => {
                    resolved.0 += 1;
                    Resolution::Applied(receipt.into_bytes())
                }
                None => {
                    resolved.1 += 1;
                    Resolution::NotApplied
                }
            };
            if !space
                .resolve(&unsettled.key, doubt.epoch, resolution)?
                .is_applied()
            {
                return Err("a doubt ended by itself".into());
            }
        }
        log.close()?;
        Ok(resolved)
    }

    /// Reads the outcomes of `Internal` keys: the only effect they have.
    pub(crate) fn internal_outcomes(
        dir: &Path,
        keys: &[String],
    ) -> Fallible<Vec<(String, String)>> {
        let log = Options::new().create(false).open(dir.join("store"))?;
        let space = log.namespace::<Internal>("internal", NamespaceOptions::new())?;
        let mut outcomes = Vec::new();
        for key in keys {
            if let KeyState::Done(done) = space.get(key)? {
                let bytes = done.outcome.bytes().unwrap_or_default().to_vec();
                outcomes.push((key.clone(), String::from_utf8(bytes)?));
            }
        }
        log.close()?;
        Ok(outcomes)
    }
}

fn parent(words: &[String]) -> Fallible<bool> {
    let started = Instant::now();
    let (seed, kills) = parse(words)?;
    say(&format!(
        "seed {seed} (again with: --seed {seed}), {kills} kills"
    ))?;
    let dir = tempfile::Builder::new()
        .prefix("idemlog-worker-")
        .tempdir()?;
    let world = Arc::new(Mutex::new(World::new(seed)));
    server::listen(dir.path(), &world)?;
    let mut random = random::Random::new(seed);
    for kill in 0..kills {
        let mut child = spawn(dir.path())?;
        // Most kills hit the work, every eighth the start: recovery is interrupted, too.
        if kill % 8 == 7 {
            std::thread::sleep(random.up_to_ms(30));
        } else {
            wait_for_delivery(&world, &mut child)?;
            std::thread::sleep(random.up_to_ms(60));
        }
        child.kill()?;
        child.wait()?;
        server::wait_closed(&world);
    }
    world.lock().unwrap().phase = Phase::Drain;
    run_to_end(dir.path(), &world)?;
    let receipt_of = |key: &str| world.lock().unwrap().ledger.receipt_of(key);
    let resolved = operator::resolve_all(dir.path(), receipt_of)?;
    world.lock().unwrap().unpark();
    run_to_end(dir.path(), &world)?;
    let keys = world.lock().unwrap().keys_of(Class::Internal);
    let outcomes = operator::internal_outcomes(dir.path(), &keys)?;
    let world = world.lock().unwrap();
    let judgement = judge(
        &world.messages,
        &world.ledger.entries,
        &world.reports,
        &outcomes,
    );
    report(&world, &judgement, resolved, started.elapsed())
}

fn parse(words: &[String]) -> Fallible<(u64, u64)> {
    let (mut seed, mut kills) = (getrandom::u64()? % 1_000_000, KILLS_DEFAULT);
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let value = words
            .next()
            .ok_or("usage: worker [--seed N] [--kills N]")?
            .parse()?;
        match word.as_str() {
            "--seed" => seed = value,
            "--kills" => kills = value.max(KILLS_MIN),
            _ => return Err("usage: worker [--seed N] [--kills N]".into()),
        }
    }
    Ok((seed, kills))
}

fn spawn(dir: &Path) -> io::Result<Child> {
    Command::new(std::env::current_exe()?)
        .arg("--child")
        .arg(dir)
        .spawn()
}

fn wait_for_delivery(world: &Mutex<World>, child: &mut Child) -> Fallible<()> {
    let before = world.lock().unwrap().deliveries();
    let started = Instant::now();
    while world.lock().unwrap().deliveries() == before {
        if let Some(status) = child.try_wait()? {
            return Err(format!("the child ended by itself: {status}").into());
        }
        if started.elapsed() > CHILD_TIME_MAX {
            child.kill()?;
            return Err("the child did not ask for a message".into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Runs a child, unharmed, until the queue is empty.
fn run_to_end(dir: &Path, world: &Mutex<World>) -> Fallible<()> {
    let mut child = spawn(dir)?;
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if started.elapsed() > CHILD_TIME_MAX {
            child.kill()?;
            child.wait()?;
            return Err("the child did not empty the queue".into());
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    server::wait_closed(world);
    if status.success() {
        Ok(())
    } else {
        Err(format!("the child failed: {status}").into())
    }
}

/// Prints the table and says whether all of it is as promised.
fn report(
    world: &World,
    judgement: &Judgement,
    resolved: (usize, usize),
    elapsed: Duration,
) -> Fallible<bool> {
    say("class           messages deliveries effects absorbed replayed takeovers in-doubt  once")?;
    let mut sum = [0; 7];
    for class in Class::ALL {
        let counts = &world.counts[class as usize];
        let row = [
            judgement.messages[class as usize],
            counts.deliveries,
            judgement.effects[class as usize],
            counts.absorbed,
            counts.replayed,
            counts.takeovers,
            counts.in_doubt,
        ];
        sum.iter_mut()
            .zip(row)
            .for_each(|(total, one)| *total += one);
        let once = if judgement.is_once[class as usize] {
            "yes"
        } else {
            "NO"
        };
        say(&line(class.name(), row, once))?;
    }
    let once = judgement.faults.is_empty();
    say(&line("all", sum, if once { "yes" } else { "NO" }))?;
    say(&format!(
        "absorbed: deliveries answered without an effect; {} more stopped at the target by the \
         derived key",
        world.ledger.repeats_count
    ))?;
    say(&format!(
        "probes: {} found applied, {} not; in doubt, resolved by looking into the ledger: {} \
         applied, {} not applied and run again",
        world.ledger.probes_applied, world.ledger.probes_not, resolved.0, resolved.1
    ))?;
    for fault in judgement.faults.iter().take(20) {
        say(&format!("fault: {fault}"))?;
    }
    let [.., absorbed, replayed, takeovers, in_doubt] = sum;
    let seen = [absorbed, replayed, takeovers, in_doubt]
        .iter()
        .all(|count| *count > 0);
    if !seen {
        say("fault: a kind of trouble did not happen; use another --seed or more --kills")?;
    }
    say(&format!(
        "exactly once: {}",
        if once { "yes" } else { "no" }
    ))?;
    say(&format!("{:.1} s", elapsed.as_secs_f64()))?;
    Ok(once && seen)
}

fn line(name: &str, row: [u64; 7], once: &str) -> String {
    let [
        messages,
        deliveries,
        effects,
        absorbed,
        replayed,
        takeovers,
        in_doubt,
    ] = row;
    format!(
        "{name:<15} {messages:>8} {deliveries:>10} {effects:>7} {absorbed:>8} {replayed:>8} \
         {takeovers:>9} {in_doubt:>8} {once:>5}"
    )
}

fn say(line: &str) -> io::Result<()> {
    writeln!(io::stdout(), "{line}")
}
