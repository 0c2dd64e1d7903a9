//! The child's end of a link.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use idemlog::Probed;

use crate::Fallible;
use crate::world::Class;

pub(crate) struct Delivery {
    pub(crate) key: String,
    pub(crate) class: Class,
}

pub(crate) enum Charged {
    Receipt(Vec<u8>),
    TimedOut,
}

pub(crate) struct Link {
    requests: UnixStream,
    replies: BufReader<UnixStream>,
}

impl Link {
    pub(crate) fn connect(dir: &Path) -> Fallible<Link> {
        let requests = UnixStream::connect(dir.join("socket"))?;
        let replies = BufReader::new(requests.try_clone()?);
        Ok(Link { requests, replies })
    }

    fn ask(&mut self, request: &str) -> Fallible<String> {
        writeln!(self.requests, "{request}")?;
        let mut reply = String::new();
        if self.replies.read_line(&mut reply)? == 0 {
            return Err("the link broke".into());
        }
        Ok(reply.trim_end().to_owned())
    }

    /// Waits for a message; `None` when there will be no more.
    pub(crate) fn next(&mut self) -> Fallible<Option<Delivery>> {
        loop {
            let reply = self.ask("next")?;
            match *reply.split(' ').collect::<Vec<_>>().as_slice() {
                ["message", key, class] => {
                    let class = Class::from_name(class).ok_or("an unknown class")?;
                    return Ok(Some(Delivery {
                        key: key.to_owned(),
                        class,
                    }));
                }
                ["wait"] => std::thread::sleep(Duration::from_millis(2)),
                _ => return Ok(None),
            }
        }
    }

    pub(crate) fn charge(
        &mut self,
        delivery: &Delivery,
        derived_key: &str,
        epoch: u64,
    ) -> Fallible<Charged> {
        let reply = self.ask(&format!("charge {} {derived_key} {epoch}", delivery.key))?;
        Ok(match reply.as_str() {
            "time-out" => Charged::TimedOut,
            receipt => Charged::Receipt(receipt.as_bytes().to_vec()),
        })
    }

    pub(crate) fn probe(&mut self, key: &[u8], epoch: u64) -> Probed {
        let request = format!("probe {} {epoch}", String::from_utf8_lossy(key));
        match self.ask(&request) {
            Ok(reply) if reply == "none" => Probed::NotApplied,
            Ok(receipt) => Probed::Applied(receipt.into_bytes()),
            Err(_) => Probed::Unknown,
        }
    }

    pub(crate) fn done(&mut self, _: &Delivery, how: &str, receipt: &[u8]) -> Fallible<()> {
        let receipt = String::from_utf8_lossy(receipt);
        self.ask(&format!("done {how} {receipt}")).map(drop)
    }

    pub(crate) fn later(&mut self, _: &Delivery, how: &str, after: Duration) -> Fallible<()> {
        self.ask(&format!("later {how} {}", after.as_millis()))
            .map(drop)
    }

    pub(crate) fn hold(&mut self, _: &Delivery) -> Fallible<()> {
        self.ask("hold").map(drop)
    }
}
