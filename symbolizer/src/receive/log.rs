//! The log of a window: a file in the format of captures, durable before its epochs are
//! acknowledged.
//!
//! Knows bytes and counts, not what they mean. What is added to it together is there whole or not
//! at all: when a disk is full, the same may be added again later. `serve/` keeps one log for each
//! window, `session/` one for all; `capture.rs` reads it back.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::{FrameReader, Unsealed, find_frame, open_epoch, v1, write_frame};

/// A file that cannot be written now.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the capture log {path}: {error}")]
pub struct LogError {
    /// The file.
    pub path: PathBuf,
    /// What the system said.
    pub error: io::Error,
}

/// More samples than any epoch has: sums of sums do not overflow.
const MOST: u64 = 1 << 40;

/// What epochs hold, added up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Epochs.
    pub epochs: u64,
    /// Samples in them.
    pub samples: u64,
    /// Samples that were lost.
    pub lost_samples: u64,
    /// Samples with a user stack, and those whose stacks reach their roots.
    pub stacks: u64,
    pub whole: u64,
    /// They say how somebody was scheduled.
    pub scheduled: bool,
    /// What was lost, by reason: as they say, and as the end says beside that.
    pub lost: BTreeMap<i32, v1::Lost>,
    /// Start of the first, end of the last; monotonic nanoseconds.
    pub span: Option<(u64, u64)>,
    /// Number of the epoch expected next, if there is one.
    pub next_epoch: u64,
    /// Bytes they take in memory, if somebody has measured that.
    pub memory: u64,
}

impl Tally {
    /// That of one epoch.
    #[must_use]
    pub fn of(epoch: &v1::Epoch, number: u64) -> Self {
        let events =
            |samples: &v1::Samples| (0..samples.thread.len()).map(|at| samples.events(at)).sum();
        let mut tally = Self {
            epochs: 1,
            samples: epoch.samples.iter().map(events).fold(0, u64::saturating_add).min(MOST),
            scheduled: !epoch.sched.is_empty(),
            span: Some((epoch.start_ns, epoch.end_ns)),
            next_epoch: number.saturating_add(1),
            lost: BTreeMap::new(),
            ..Self::default()
        };
        tally.lose(&epoch.lost);
        for samples in &epoch.samples {
            for (at, stack) in samples.user_stack.iter().enumerate() {
                let stack = stack.checked_sub(1).and_then(|at| epoch.stacks.get(at as usize));
                let Some(stack) = stack else { continue };
                let events = samples.events(at);
                tally.stacks = tally.stacks.saturating_add(events);
                if stack.end() == v1::EndReason::Root {
                    tally.whole = tally.whole.saturating_add(events);
                }
            }
        }
        (tally.stacks, tally.whole) = (tally.stacks.min(MOST), tally.whole.min(MOST));
        tally
    }

    /// Adds losses.
    fn lose(&mut self, more: &[v1::Lost]) {
        lose(&mut self.lost, more);
        let lost = self.lost.values().filter(|lost| lost.samples);
        self.lost_samples = lost.fold(0u64, |sum, lost| sum.saturating_add(lost.count)).min(MOST);
    }

    /// Adds what came after it.
    pub fn add(&mut self, other: &Self) {
        self.epochs += other.epochs;
        self.samples = self.samples.saturating_add(other.samples);
        self.lost_samples = self.lost_samples.saturating_add(other.lost_samples);
        self.stacks = self.stacks.saturating_add(other.stacks);
        self.whole = self.whole.saturating_add(other.whole);
        self.scheduled |= other.scheduled;
        lose(&mut self.lost, other.lost.values());
        self.span = self.span_with(other);
        self.next_epoch = self.next_epoch.max(other.next_epoch);
        self.memory = self.memory.saturating_add(other.memory);
    }

    /// From the start of its first epoch to the end of the last of what came after it.
    #[must_use]
    pub fn span_with(&self, other: &Self) -> Option<(u64, u64)> {
        match (self.span, other.span) {
            (Some((start, _)), Some((_, end))) => Some((start, end)),
            (own, others) => own.or(others),
        }
    }

    /// Nothing happened that anyone could miss.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.samples == 0 && self.lost.is_empty() && !self.scheduled
    }
}

/// Adds losses to others, by reason.
pub fn lose<'a>(into: &mut BTreeMap<i32, v1::Lost>, lost: impl IntoIterator<Item = &'a v1::Lost>) {
    for lost in lost {
        let entry = into.entry(lost.reason).or_insert(v1::Lost { count: 0, ..*lost });
        entry.count = entry.count.saturating_add(lost.count);
    }
}

/// What `total` has beyond `said`, of which each is a part of it.
#[must_use]
pub fn beyond(total: &[v1::Lost], said: &[&BTreeMap<i32, v1::Lost>]) -> Vec<v1::Lost> {
    let left = total.iter().filter_map(|lost| {
        let said = said.iter().filter_map(|said| said.get(&lost.reason));
        let count = said.fold(lost.count, |left, said| left.saturating_sub(said.count));
        (count > 0).then_some(v1::Lost { count, ..*lost })
    });
    left.collect()
}

/// A log being written.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    file: File,
    /// Up to here the file has whole messages; what is behind is written again.
    bytes: u64,
    tally: Tally,
    ended: bool,
    /// The same instant on two clocks, by its greeting: monotonic and wall, nanoseconds.
    clocks: (u64, u64),
}

/// Messages that are added to a log together.
#[derive(Debug, Default)]
pub struct Batch {
    frames: Vec<u8>,
    tally: Tally,
    ended: bool,
}

impl Batch {
    /// Adds an epoch, opened already.
    ///
    /// # Errors
    /// When it is larger than a frame may be.
    pub fn epoch(&mut self, message: &v1::CollectorMessage, tally: &Tally) -> io::Result<()> {
        write_frame(&mut self.frames, message)?;
        self.tally.add(tally);
        Ok(())
    }

    /// Adds anything else.
    ///
    /// # Errors
    /// When it is larger than a frame may be.
    pub fn other(&mut self, message: &v1::CollectorMessage) -> io::Result<()> {
        self.ended |= matches!(message.body, Some(Body::End(_)));
        write_frame(&mut self.frames, message)
    }

    /// Bytes in it.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.frames.len() as u64
    }

    /// What its epochs hold.
    #[must_use]
    pub fn tally(&self) -> &Tally {
        &self.tally
    }
}

impl Log {
    /// Makes a file, which must not be there, and starts it with a greeting.
    ///
    /// # Errors
    /// See [`LogError`]. Then there is no file.
    pub fn create(path: PathBuf, hello: &v1::CollectorMessage) -> Result<Self, LogError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        match options.open(&path) {
            Ok(file) => Self::start(path.clone(), file, hello).inspect_err(|_| {
                // It holds nothing.
                let _ = std::fs::remove_file(path);
            }),
            Err(error) => Err(LogError { path, error }),
        }
    }

    /// Starts an empty file with a greeting; `path` is for messages.
    ///
    /// # Errors
    /// See [`LogError`].
    pub fn start(
        path: PathBuf,
        file: File,
        hello: &v1::CollectorMessage,
    ) -> Result<Self, LogError> {
        let (tally, clocks) = (Tally::default(), clocks(hello));
        let mut log = Self { path, file, bytes: 0, tally, ended: false, clocks };
        log.append_one(hello)?;
        Ok(log)
    }

    /// Adds messages; when this returns, their epochs are on disk.
    ///
    /// # Errors
    /// See [`LogError`]. Then none of them is in the log, and all may be added again.
    pub fn append(&mut self, batch: &Batch) -> Result<(), LogError> {
        let written = self.file.write_all_at(&batch.frames, self.bytes).and_then(|()| {
            // What is not acknowledged need not be durable.
            if batch.tally.epochs > 0 || batch.ended { self.file.sync_data() } else { Ok(()) }
        });
        if let Err(error) = written {
            // Whoever reads it after a crash is not to find what was not acknowledged. If this
            // fails as well, the next attempt writes over it.
            let _ = self.file.set_len(self.bytes);
            return Err(self.error(error));
        }
        self.bytes += batch.bytes();
        self.tally.add(&batch.tally);
        self.ended |= batch.ended;
        Ok(())
    }

    /// Adds a message that is no epoch.
    ///
    /// # Errors
    /// See [`LogError`].
    pub fn append_one(&mut self, message: &v1::CollectorMessage) -> Result<(), LogError> {
        let mut batch = Batch::default();
        batch.other(message).map_err(|error| self.error(error))?;
        self.append(&batch)
    }

    /// Ends a window: with an end that speaks of its epochs only, `more` having been lost beside
    /// what they said.
    ///
    /// # Errors
    /// See [`LogError`]. It may be called again.
    pub fn end_window(&mut self, more: &[v1::Lost]) -> Result<(), LogError> {
        if self.ended {
            return Ok(());
        }
        let mut all = self.tally.clone();
        all.lose(more);
        let lost: Vec<v1::Lost> = all.lost.values().copied().collect();
        let samples = lost.iter().filter(|lost| lost.samples).map(|lost| lost.count);
        let end = v1::End {
            clock_monotonic_ns: all.span.map_or(0, |(_, end)| end),
            epochs: all.epochs,
            taken: samples.fold(all.samples, u64::saturating_add),
            lost,
            // Known when the capture ends.
            python: Vec::new(),
        };
        self.append_one(&v1::CollectorMessage { body: Some(Body::End(end)) })?;
        self.tally = all;
        Ok(())
    }

    /// What its epochs hold.
    #[must_use]
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Bytes of the file.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// From when to when its epochs are, milliseconds since the Unix epoch.
    #[must_use]
    pub fn span_ms(&self) -> Option<(u64, u64)> {
        let (monotonic, wall) = self.clocks;
        let at =
            |time: u64| (i128::from(time) - i128::from(monotonic) + i128::from(wall)) / 1_000_000;
        let ms = |time: u64| u64::try_from(at(time)).unwrap_or(0);
        self.tally.span.map(|(start, end)| (ms(start), ms(end)))
    }

    /// It has an end.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Somebody has removed the file.
    #[must_use]
    pub fn is_removed(&self) -> bool {
        self.file.metadata().is_ok_and(|found| found.nlink() == 0)
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn error(&self, error: io::Error) -> LogError {
        LogError { path: self.path.clone(), error }
    }
}

/// Opens a log that was not closed: what is behind its last whole message is cut off, as it was
/// never acknowledged. Where whole messages follow damage, nothing is cut, and the log cannot be
/// ended any more.
///
/// # Errors
/// See [`LogError`]. A file that holds nothing is an error of kind `InvalidData`.
pub fn recover(path: &Path) -> Result<Log, LogError> {
    let failed = |error| LogError { path: path.to_owned(), error };
    let file = OpenOptions::new().read(true).write(true).open(path).map_err(failed)?;
    let mut reader = FrameReader::new(BufReader::new(&file));
    let (mut tally, mut ended, mut times) = (Tally::default(), false, (0, 0));
    loop {
        let message = reader
            .next_message()
            .map_err(|error| failed(io::Error::new(io::ErrorKind::InvalidData, error)))?;
        match message.map(|message| (clocks(&message), message.body)) {
            Some((_, Some(Body::Epoch(sealed)))) => {
                // One that does not open was checked before it was written: its samples are lost
                // with the disk that lost them. Its number must not be given out again.
                let memory = Unsealed::of(&sealed).map_or(0, |unsealed| unsealed.memory());
                let epoch = open_epoch(&sealed).unwrap_or_default();
                tally.add(&Tally { memory, ..Tally::of(&epoch, sealed.number) });
            }
            Some((_, Some(Body::End(end)))) => {
                ended = true;
                let more = beyond(&end.lost, &[&tally.lost]);
                tally.lose(&more);
            }
            Some((clocks, Some(Body::Hello(_)))) => times = clocks,
            Some((_, Some(Body::Artifact(_)))) => {}
            Some((_, None)) | None => break,
        }
    }
    let bytes = reader.offset_of_the_end();
    let length = file.metadata().map_err(failed)?.len();
    if bytes < length {
        if is_whole_behind(&file, bytes).map_err(failed)? {
            tracing::warn!(
                "{}: damaged at byte {bytes}; what follows is left out of its profile",
                path.display()
            );
            ended = true;
        } else {
            file.set_len(bytes).and_then(|()| file.sync_all()).map_err(failed)?;
        }
    }
    Ok(Log { path: path.to_owned(), file, bytes, tally, ended, clocks: times })
}

fn clocks(message: &v1::CollectorMessage) -> (u64, u64) {
    match &message.body {
        Some(Body::Hello(hello)) => (hello.clock_monotonic_ns, hello.clock_realtime_ns),
        _ => (0, 0),
    }
}

/// Whether a whole message lies behind a place where none begins.
fn is_whole_behind(mut file: &File, from: u64) -> io::Result<bool> {
    file.seek(SeekFrom::Start(from.saturating_add(1)))?;
    let mut rest = Vec::new();
    BufReader::new(file).read_to_end(&mut rest)?;
    Ok(find_frame(&rest).is_some())
}

#[cfg(test)]
mod tests {
    use stackwire_proto::seal_epoch;

    use super::*;

    fn hello() -> v1::CollectorMessage {
        v1::CollectorMessage { body: Some(Body::Hello(v1::Hello::default())) }
    }

    fn batch(numbers: std::ops::Range<u64>) -> Batch {
        let mut batch = Batch::default();
        for number in numbers {
            let epoch = v1::Epoch { number, end_ns: number, ..v1::Epoch::default() };
            let body = Some(Body::Epoch(seal_epoch(&epoch)));
            let tally = Tally::of(&epoch, number);
            batch.epoch(&v1::CollectorMessage { body }, &tally).unwrap();
        }
        batch
    }

    #[test]
    fn a_log_cut_anywhere_is_recovered_up_to_its_last_whole_epoch() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let mut log = Log::create(path.clone(), &hello()).unwrap();
        let mut ends = vec![log.bytes()];
        for number in 0..3 {
            log.append(&batch(number..number + 1)).unwrap();
            ends.push(log.bytes());
        }
        let whole = std::fs::read(&path).unwrap();
        for cut in ends[0]..=ends[3] {
            std::fs::write(&path, &whole[..cut as usize]).unwrap();
            let epochs = ends.iter().filter(|&&end| end <= cut).count() as u64 - 1;
            let mut log = recover(&path).unwrap();
            assert_eq!((log.tally().epochs, log.tally().next_epoch), (epochs, epochs), "{cut}");
            log.append(&batch(epochs..epochs + 1)).unwrap();
            log.end_window(&[]).unwrap();
            let again = recover(&path).unwrap();
            assert!(again.has_ended());
            assert_eq!(again.tally().epochs, epochs + 1, "{cut}");
        }
    }

    #[test]
    fn nothing_is_cut_where_whole_epochs_follow_damage() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let mut log = Log::create(path.clone(), &hello()).unwrap();
        log.append(&batch(0..1)).unwrap();
        let damaged = log.bytes();
        log.append(&batch(1..3)).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[damaged as usize] ^= 0x20;
        std::fs::write(&path, &bytes).unwrap();
        assert!(recover(&path).unwrap().has_ended());
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
    }

    #[test]
    fn what_could_not_be_written_is_not_there_and_may_come_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let mut log = Log::create(path.clone(), &hello()).unwrap();
        log.append(&batch(0..2)).unwrap();
        let writable = std::mem::replace(&mut log.file, File::open(&path).unwrap());
        let failed = log.append(&batch(2..4)).unwrap_err();
        assert!(failed.to_string().contains("cannot write the capture log"), "{failed}");
        log.file = writable;
        log.append(&batch(2..4)).unwrap();
        assert_eq!(recover(&path).unwrap().tally(), log.tally());
        assert_eq!(log.tally().next_epoch, 4);
    }

    #[test]
    fn a_file_that_is_there_is_not_written_over() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        std::fs::write(&path, "acknowledged").unwrap();
        assert!(Log::create(path.clone(), &hello()).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"acknowledged");
    }
}
