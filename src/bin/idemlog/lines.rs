//! Lines of stdin, a batch at a time, in bounded memory.

use std::io::{self, Stdin};
use std::time::Duration;

use idemlog::KEY_BYTES_MAX;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::exit::Stop;

/// The longest JSON line, of which the key is only a part: 16 MiB.
pub(crate) const JSON_LINE_BYTES_MAX: usize = 16 * 1024 * 1024;
/// A batch ends at this size, too, so that long lines do not pile up: 4 MiB.
const BATCH_BYTES_MAX: usize = 4 * 1024 * 1024;
/// What one read asks for: what a pipe holds.
const CHUNK_BYTES: usize = 64 * 1024;
/// A batch ends when stdin pauses this long: a reader of the output waits no longer for a line.
const PAUSE: Duration = Duration::from_millis(20);

/// One line without its newline.
#[derive(Debug)]
pub(crate) struct Line {
    /// From 1.
    pub(crate) number: u64,
    pub(crate) text: Vec<u8>,
}

/// What `next_batch` read.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) lines: Vec<Line>,
    /// Why no line follows these.
    pub(crate) end: Option<Result<(), Stop>>,
}

/// Reads stdin by lines.
pub(crate) struct Lines {
    input: Stdin,
    line_bytes_max: usize,
    buffer: Vec<u8>,
    /// Where the next line starts in the buffer.
    start: usize,
    /// Bytes from `start` on that hold no newline.
    searched: usize,
    lines_count: u64,
    ended: bool,
}

impl Lines {
    pub(crate) fn new(has_json: bool) -> Self {
        Lines {
            input: io::stdin(),
            line_bytes_max: if has_json {
                JSON_LINE_BYTES_MAX
            } else {
                KEY_BYTES_MAX
            },
            buffer: Vec::new(),
            start: 0,
            searched: 0,
            lines_count: 0,
            ended: false,
        }
    }

    /// Returns up to this many lines; fewer when stdin pauses, and none only at the end.
    pub(crate) fn next_batch(&mut self, lines_max: usize) -> Batch {
        let mut lines: Vec<Line> = Vec::new();
        let mut bytes = 0;
        while lines.len() < lines_max && bytes < BATCH_BYTES_MAX {
            match self.next_line(lines.is_empty()) {
                Ok(Some(text)) => {
                    bytes += text.len();
                    self.lines_count += 1;
                    lines.push(Line {
                        number: self.lines_count,
                        text,
                    });
                }
                Ok(None) if self.ended => {
                    return Batch {
                        lines,
                        end: Some(Ok(())),
                    };
                }
                Ok(None) => break,
                Err(stop) => {
                    return Batch {
                        lines,
                        end: Some(Err(stop)),
                    };
                }
            }
        }
        Batch { lines, end: None }
    }

    /// Returns `None` at the end, and at a pause unless told to wait.
    fn next_line(&mut self, waits: bool) -> Result<Option<Vec<u8>>, Stop> {
        loop {
            let rest = self.buffer.get(self.start..).unwrap_or_default();
            let unseen = rest.get(self.searched..).unwrap_or_default();
            if let Some(found) = unseen.iter().position(|byte| *byte == b'\n') {
                let length = self.searched + found;
                let line = rest.get(..length).unwrap_or_default().to_vec();
                self.check(line.len())?;
                self.start += length + 1;
                self.searched = 0;
                return Ok(Some(line));
            }
            self.searched = rest.len();
            self.check(self.searched)?;
            if self.ended {
                // The last line may lack its newline; it gets one, as with awk and uniq.
                let line = rest.to_vec();
                self.start = self.buffer.len();
                self.searched = 0;
                return Ok(Some(line).filter(|line| !line.is_empty()));
            }
            if !waits && !self.has_input()? {
                return Ok(None);
            }
            self.fill()?;
        }
    }

    fn check(&self, length: usize) -> Result<(), Stop> {
        if length <= self.line_bytes_max {
            return Ok(());
        }
        Err(Stop::usage(format!(
            "line={} is longer than bytes_max={}; the lines before it are done; shorten it, or \
             use --key-field",
            self.lines_count + 1,
            self.line_bytes_max
        )))
    }

    fn has_input(&self) -> Result<bool, Stop> {
        let nanos = i64::try_from(PAUSE.as_nanos()).unwrap_or(i64::MAX);
        let pause = Timespec {
            tv_sec: 0,
            tv_nsec: nanos,
        };
        let mut wanted = [PollFd::new(&self.input, PollFlags::IN)];
        let ready = rustix::io::retry_on_intr(|| poll(&mut wanted, Some(&pause)));
        ready
            .map(|count| count > 0)
            .map_err(|e| Stop::io("cannot wait for stdin", &e.into()))
    }

    fn fill(&mut self) -> Result<(), Stop> {
        self.buffer.drain(..self.start);
        self.start = 0;
        let kept = self.buffer.len();
        self.buffer.resize(kept + CHUNK_BYTES, 0);
        let chunk = self.buffer.get_mut(kept..).unwrap_or_default();
        let read = rustix::io::retry_on_intr(|| rustix::io::read(&self.input, &mut *chunk));
        let count = read.map_err(|e| Stop::io("cannot read stdin", &e.into()))?;
        self.buffer.truncate(kept + count);
        self.ended = count == 0;
        Ok(())
    }
}
