//! Redis over a Unix socket: a server of its own for each cell.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{Session, Store};
use crate::Fallible;
use crate::cell::Level;
use crate::workload::Key;

pub(crate) const SETTINGS: &str = "`SET key value NX PXAT`, one connection a thread, batches \
     pipelined, no snapshots, no rewrites of the log; lazy: AOF `everysec`; durable: AOF \
     `always`; CPU, bytes and memory are those of client and server together";

const SERVER: &str = "redis-server";

/// Why there is no Redis; `None` if there is one.
pub(crate) fn missing() -> Option<String> {
    let started = Command::new(SERVER).arg("--version").output();
    started
        .err()
        .map(|error| format!("{SERVER} cannot be started: {error}"))
}

pub(crate) struct Redis {
    server: Child,
    socket: PathBuf,
}

impl Redis {
    pub(crate) fn open(dir: &Path, level: Level) -> Fallible<Redis> {
        let socket = dir.join("redis.sock");
        let sync = if level == Level::Durable {
            "always"
        } else {
            "everysec"
        };
        let mut command = Command::new(SERVER);
        command.args([
            "--port",
            "0",
            "--save",
            "",
            "--appendonly",
            "yes",
            "--appendfsync",
            sync,
        ]);
        command.args(["--auto-aof-rewrite-percentage", "0", "--daemonize", "no"]);
        command
            .arg("--unixsocket")
            .arg(&socket)
            .arg("--dir")
            .arg(dir);
        let server = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        let store = Redis { server, socket };
        let deadline = Instant::now() + Duration::from_secs(60);
        // It answers LOADING while it reads its log.
        while !store
            .connect()
            .and_then(|mut c| c.call(&[b"PING"]))
            .is_ok_and(|a| a == "+PONG")
        {
            if Instant::now() > deadline {
                return Err("redis-server does not answer".into());
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(store)
    }

    fn connect(&self) -> Fallible<Connection> {
        let stream = UnixStream::connect(&self.socket)?;
        Ok(Connection {
            reader: BufReader::new(stream.try_clone()?),
            stream,
            out: Vec::new(),
        })
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.server.kill().unwrap_or_default();
        if let Err(error) = self.server.wait() {
            eprintln!("redis-server was not reaped: {error}");
        }
    }
}

impl Store for Redis {
    fn session(&self) -> Fallible<Box<dyn Session + '_>> {
        Ok(Box::new(self.connect()?))
    }

    fn settle(&self) -> Fallible<()> {
        // What `everysec` leaves for the next second is not waited for.
        let mut connection = self.connect()?;
        let busy = |info: &str| {
            let idle = ["aof_buffer_length:0\r", "aof_pending_bio_fsync:0\r"];
            info.contains("aof_buffer_length") && !idle.iter().all(|line| info.contains(line))
        };
        while busy(&connection.call(&[b"INFO", b"persistence"])?) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn close(mut self: Box<Self>) -> Fallible<()> {
        let mut connection = self.connect()?;
        connection.push(&[b"SHUTDOWN"])?;
        // The server ends without an answer.
        connection.send()?;
        self.server.wait()?;
        Ok(())
    }

    fn server(&self) -> Option<u32> {
        Some(self.server.id())
    }

    /// The server expires keys by itself; this waits until it has.
    fn expire(&self, before: u64) -> Fallible<u64> {
        let mut connection = self.connect()?;
        let count = |connection: &mut Connection| -> Fallible<u64> {
            let info = connection.call(&[b"INFO", b"stats"])?;
            let line = info
                .lines()
                .find_map(|line| line.strip_prefix("expired_keys:"));
            Ok(line.unwrap_or("0").trim().parse()?)
        };
        super::sleep_until(before);
        let (mut last, mut same) = (0, 0);
        while same < 20 {
            std::thread::sleep(Duration::from_millis(100));
            let now = count(&mut connection)?;
            same = if now == last { same + 1 } else { 0 };
            last = now;
        }
        Ok(last)
    }
}

struct Connection {
    reader: BufReader<UnixStream>,
    stream: UnixStream,
    out: Vec<u8>,
}

impl Connection {
    fn push(&mut self, parts: &[&[u8]]) -> Fallible<()> {
        write!(self.out, "*{}\r\n", parts.len())?;
        for part in parts {
            write!(self.out, "${}\r\n", part.len())?;
            self.out.extend_from_slice(part);
            self.out.extend_from_slice(b"\r\n");
        }
        Ok(())
    }

    fn send(&mut self) -> Fallible<()> {
        self.stream.write_all(&self.out)?;
        self.out.clear();
        Ok(())
    }

    /// Reads one answer: a line, or the bulk text that it announces.
    fn answer(&mut self) -> Fallible<String> {
        let mut line = String::new();
        if self.reader.read_line(&mut line)? == 0 {
            return Err("redis-server closed the connection".into());
        }
        let line = line.trim_end().to_owned();
        if let Some(error) = line.strip_prefix('-') {
            return Err(format!("redis: {error}").into());
        }
        match line.strip_prefix('$') {
            Some(length) if length != "-1" => {
                let mut bulk = vec![0; length.parse::<usize>()? + 2];
                self.reader.read_exact(&mut bulk)?;
                Ok(String::from_utf8_lossy(&bulk).into_owned())
            }
            _ => Ok(line),
        }
    }

    fn call(&mut self, parts: &[&[u8]]) -> Fallible<String> {
        self.push(parts)?;
        self.send()?;
        self.answer()
    }

    fn push_set(&mut self, key: &Key, expiry: u64) -> Fallible<()> {
        let at = expiry.to_string();
        // The expiry is the server's own; the value is one byte.
        self.push(&[b"SET", key, b"1", b"NX", b"PXAT", at.as_bytes()])
    }
}

impl Session for Connection {
    fn insert(&mut self, key: &Key, expiry: u64) -> Fallible<bool> {
        self.push_set(key, expiry)?;
        self.send()?;
        Ok(self.answer()? == "+OK")
    }

    fn insert_many(&mut self, keys: &[Key], expiry: u64, fresh: &mut Vec<bool>) -> Fallible<()> {
        for key in keys {
            self.push_set(key, expiry)?;
        }
        self.send()?;
        for _ in keys {
            fresh.push(self.answer()? == "+OK");
        }
        Ok(())
    }

    fn contains(&mut self, key: &Key) -> Fallible<bool> {
        Ok(self.call(&[b"EXISTS", key])? == ":1")
    }
}
