//! Crash images: what a disk may hold when the power fails at a point of the tape.
//!
//! Everything written before the last flush is there. Of what was written since, any part may
//! be: whole writes or single 512-byte sectors, kept with a chance that is drawn for each image.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::device::Event;
use super::random::Random;
use super::volume::text;
use crate::context::Fallible;
use crate::process::must;

const SECTOR_BYTES: usize = 512;

/// One moment at which the power fails, and what happens to what was not flushed.
#[derive(Debug, Clone)]
pub(crate) struct Cut {
    /// How many events of the tape have happened.
    pub(crate) point: usize,
    pub(crate) kept_percent: u64,
    pub(crate) by_sector: bool,
    seed: u64,
}

/// Draws moments, in the order of the tape: a third of them anywhere; a third right after
/// something was noted, where a promise is youngest; a third right before a flush, where most is
/// in the air.
pub(crate) fn draw(events: &[Event], count: u64, random: &mut Random) -> Vec<Cut> {
    let where_is = |wanted: fn(&Event) -> bool| -> Vec<usize> {
        let found = events.iter().enumerate().filter(|(_, event)| wanted(event));
        found.map(|(index, _)| index).collect()
    };
    let notes = where_is(|event| matches!(event, Event::Note(_)));
    let flushes = where_is(|event| matches!(event, Event::Flush));
    let mut cuts: Vec<Cut> = (0..count)
        .map(|_| {
            let anywhere = random.index(events.len() + 1);
            let point = match random.below(3) {
                0 => notes.get(random.index(notes.len())).map(|index| index + 1),
                1 => flushes.get(random.index(flushes.len())).copied(),
                _ => None,
            };
            Cut {
                point: point.unwrap_or(anywhere),
                kept_percent: random.below(5) * 25,
                by_sector: random.percent(50),
                seed: random.next(),
            }
        })
        .collect();
    cuts.sort_by_key(|cut| cut.point);
    cuts
}

/// Makes images for cuts in the order of the tape.
pub(crate) struct Builder<'a> {
    events: &'a [Event],
    /// The base with everything up to `flushed` applied.
    settled: PathBuf,
    settled_file: File,
    flushed: usize,
    notes: Vec<u8>,
    noted: usize,
    /// Pieces of unflushed writes that were kept and dropped.
    pub(crate) kept_count: u64,
    pub(crate) dropped_count: u64,
}

impl<'a> Builder<'a> {
    /// Starts from the image as it was before the tape; the image is changed.
    pub(crate) fn new(base: &Path, events: &'a [Event]) -> Fallible<Self> {
        Ok(Builder {
            events,
            settled: base.to_owned(),
            settled_file: OpenOptions::new().write(true).open(base)?,
            flushed: 0,
            notes: Vec::new(),
            noted: 0,
            kept_count: 0,
            dropped_count: 0,
        })
    }

    /// Writes the image of a cut, and returns what had been noted by then.
    pub(crate) fn build(&mut self, cut: &Cut, image: &Path) -> Fallible<&[u8]> {
        let before = self.events.get(..cut.point).unwrap_or(self.events);
        let flush = before
            .iter()
            .rposition(|event| matches!(event, Event::Flush));
        let flushed = flush.unwrap_or(0).max(self.flushed);
        for event in before.get(self.flushed..flushed).unwrap_or_default() {
            if let Event::Write { offset, data } = event {
                self.settled_file.write_all_at(data, *offset)?;
            }
        }
        self.flushed = flushed;
        must(
            "cp",
            &["--sparse=always", text(&self.settled)?, text(image)?],
        )?;
        let image = OpenOptions::new().write(true).open(image)?;
        let mut random = Random::new(cut.seed);
        for event in before.get(flushed..).unwrap_or_default() {
            let Event::Write { offset, data } = event else {
                continue;
            };
            let step = if cut.by_sector {
                SECTOR_BYTES
            } else {
                data.len().max(1)
            };
            let mut at = *offset;
            for piece in data.chunks(step) {
                if random.percent(cut.kept_percent) {
                    image.write_all_at(piece, at)?;
                    self.kept_count += 1;
                } else {
                    self.dropped_count += 1;
                }
                at += piece.len() as u64;
            }
        }
        for event in before.get(self.noted..).unwrap_or_default() {
            if let Event::Note(bytes) = event {
                self.notes.extend_from_slice(bytes);
            }
        }
        self.noted = before.len();
        Ok(&self.notes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(offset: u64, byte: u8) -> Event {
        Event::Write {
            offset,
            data: vec![byte; 1024].into(),
        }
    }

    #[test]
    fn what_was_flushed_is_there_and_what_was_not_may_be_gone() {
        let dir = tempfile::tempdir().unwrap();
        let (base, image) = (dir.path().join("base"), dir.path().join("image"));
        std::fs::write(&base, vec![0; 8192]).unwrap();
        let note = |text: &str| Event::Note(text.as_bytes().into());
        let events = [
            write(0, 1),
            note("a\n"),
            Event::Flush,
            note("b\n"),
            write(4096, 2),
            note("c\n"),
        ];
        let mut builder = Builder::new(&base, &events).unwrap();
        let cut = |point, kept_percent| Cut {
            point,
            kept_percent,
            by_sector: true,
            seed: 1,
        };
        assert_eq!(builder.build(&cut(2, 0), &image).unwrap(), b"a\n");
        assert_eq!(std::fs::read(&image).unwrap()[0], 0);
        assert_eq!(builder.build(&cut(5, 0), &image).unwrap(), b"a\nb\n");
        let bytes = std::fs::read(&image).unwrap();
        assert_eq!((bytes[0], bytes[1023], bytes[4096]), (1, 1, 0));
        assert_eq!(builder.build(&cut(6, 100), &image).unwrap(), b"a\nb\nc\n");
        assert_eq!(std::fs::read(&image).unwrap()[4096 + 1023], 2);
    }
}
