//! The parent's end of the links: one thread a connection.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::Fallible;
use crate::random::Random;
use crate::world::{Next, Order, Phase, World};

pub(crate) fn listen(dir: &Path, world: &Arc<Mutex<World>>) -> Fallible<()> {
    let listener = UnixListener::bind(dir.join("socket"))?;
    let world = world.clone();
    let accept = move || {
        for (number, stream) in listener.incoming().enumerate() {
            let (world, stream) = (world.clone(), stream.unwrap());
            world.lock().unwrap().connections += 1;
            std::thread::spawn(move || {
                let mut serving = None;
                // An error is a killed child.
                drop(serve(&world, stream, number as u64, &mut serving));
                let mut world = world.lock().unwrap();
                if let Some(key) = serving {
                    world.lost(key);
                }
                world.connections -= 1;
            });
        }
    };
    std::thread::Builder::new()
        .name("accept".to_owned())
        .spawn(accept)?;
    Ok(())
}

/// Waits until what a dead child had sent has been dealt with.
pub(crate) fn wait_closed(world: &Mutex<World>) {
    while world.lock().unwrap().connections > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn serve(
    world: &Mutex<World>,
    stream: UnixStream,
    number: u64,
    serving: &mut Option<String>,
) -> Fallible<()> {
    let mut random = Random::new(number);
    let mut requests = BufReader::new(stream.try_clone()?);
    let mut replies = stream;
    let mut request = String::new();
    loop {
        request.clear();
        if requests.read_line(&mut request)? == 0 {
            return Ok(());
        }
        let words: Vec<&str> = request.split_whitespace().collect();
        let reply = match *words.as_slice() {
            ["next"] => deliver(world, serving),
            ["charge", key, derived_key, epoch] => {
                charge(world, &mut random, key, derived_key, epoch.parse()?)
            }
            ["probe", key, epoch] => {
                let receipt = world.lock().unwrap().ledger.probe(key, epoch.parse()?);
                receipt.unwrap_or_else(|| "none".to_owned())
            }
            ["done", how, receipt] => {
                let key = serving.take().unwrap();
                world.lock().unwrap().done(&key, how, receipt);
                "ok".to_owned()
            }
            ["later", how, after_ms] => {
                let after = Duration::from_millis(after_ms.parse()?);
                let key = serving.take().unwrap();
                world.lock().unwrap().later(&key, how, after);
                "ok".to_owned()
            }
            ["hold"] => {
                let key = serving.take().unwrap();
                world.lock().unwrap().hold(&key);
                "ok".to_owned()
            }
            _ => return Err(format!("not a request: {request}").into()),
        };
        writeln!(replies, "{reply}")?;
    }
}

fn deliver(world: &Mutex<World>, serving: &mut Option<String>) -> String {
    match world.lock().unwrap().next() {
        Next::Deliver(key, message) => {
            *serving = Some(key.clone());
            format!("message {key} {}", message.class.name())
        }
        Next::Wait => "wait".to_owned(),
        Next::End => "end".to_owned(),
    }
}

/// Charges after a while, answers after a while more, and sometimes not at all.
fn charge(
    world: &Mutex<World>,
    random: &mut Random,
    key: &str,
    derived_key: &str,
    epoch: u64,
) -> String {
    std::thread::sleep(random.up_to_ms(3));
    let times_out = random.chance(3) && world.lock().unwrap().phase != Phase::Last;
    if times_out && random.chance(50) {
        return "time-out".to_owned();
    }
    let receipt = {
        let world = &mut *world.lock().unwrap();
        let order = Order {
            key,
            derived_key,
            epoch,
            message: &world.messages[key],
        };
        world.ledger.charge(&order)
    };
    std::thread::sleep(random.up_to_ms(3));
    receipt
        .filter(|_| !times_out)
        .unwrap_or_else(|| "time-out".to_owned())
}
