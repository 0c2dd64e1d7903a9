//! A process that fills a store, and then closes it or waits to be killed.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal};

use super::insert::Driver;
use super::{Bounds, WRITER};
use crate::Fallible;
use crate::cell::{Cell, Level};
use crate::store;
use crate::workload::Sequence;

/// The newest keys: they are inserted by single calls, the others in batches.
pub(crate) const NEWEST_COUNT: u64 = 20_000;
const BATCH: usize = 1000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Close,
    Kill,
}

/// Fills the store of a cell in a process of its own; the store is not open when this returns.
pub(crate) fn fill(cell: &Cell, dir: &Path, end: End) -> Fallible<()> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args([WRITER, &cell.to_string()]).arg(dir);
    command.arg(if end == End::Close { "close" } else { "kill" });
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let killed = answered(&mut child).and_then(|server| match end {
        End::Close => Ok(()),
        End::Kill => kill(&mut child, server),
    });
    if killed.is_err() {
        child.kill().unwrap_or_default();
    }
    let status = child.wait()?;
    killed?;
    if end == End::Close && !status.success() {
        return Err(format!("the writer failed: {status}").into());
    }
    Ok(())
}

/// Waits for the writer's line after its last answer; the line names the server, or 0.
fn answered(child: &mut Child) -> Fallible<i32> {
    let output = child.stdout.as_mut().ok_or("the writer has no output")?;
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line)?;
    let server = line.trim().parse();
    server.map_err(|_| format!("the writer failed: it said {line:?}").into())
}

fn kill(child: &mut Child, server: i32) -> Fallible<()> {
    if let Some(server) = Pid::from_raw(server) {
        rustix::process::kill_process(server, Signal::KILL)?;
    }
    Ok(child.kill()?)
}

/// The process that [`fill`] starts.
pub(crate) fn main(arguments: &[String]) -> Fallible<()> {
    let [id, dir, end] = arguments else {
        return Err("a writer needs a cell, a directory and an end".into());
    };
    let cell = Cell::parse(id)?;
    let store = store::open(&cell.store, Path::new(dir), Level::Lazy, cell.keys)?;
    {
        let mut session = store.session()?;
        let mut driver = Driver::new(Sequence::new(0), BATCH, 1)?;
        let bounds = |ops_max| Bounds {
            ops_max,
            seconds_max: 24 * 3600,
        };
        driver.drive(
            session.as_mut(),
            bounds(cell.keys.saturating_sub(NEWEST_COUNT)),
        )?;
        if end == "close" {
            // A store is asked for its keys after it has come to rest, not in the middle of work.
            store.settle()?;
        }
        driver.single();
        driver.drive(session.as_mut(), bounds(cell.keys))?;
    }
    if end == "close" {
        store.settle()?;
    }
    let server = store.server().unwrap_or(0);
    let mut output = std::io::stdout().lock();
    writeln!(output, "{server}")?;
    output.flush()?;
    if end == "kill" {
        // The parent holds the other end: this ends by its kill alone.
        std::io::stdin().read_to_end(&mut Vec::new())?;
    }
    store.close()
}
