//! The capture log: a stream as it came, on disk before it is acknowledged.
//!
//! Each window has one file, in the format of captures. What is added to the file is also put
//! together at once, so that a window is resolved without reading its file. The log knows which
//! artifacts its epochs refer to, and which of them it has. `serve/` and `session/` use it;
//! `capture.rs` reads it back.

use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use prost::Message;
use stackwire_cache::{Cache, Key, Kind};
use stackwire_model::{BuildId, ExecutableKey};
use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::{FrameReader, FrameWriter, SealError, open_epoch, v1};
use stackwire_symbols::table;

use crate::capture::{Assembler, CaptureError};
use crate::profile::{ArtifactHash, Executable, Profile};
use crate::receive::handed::{Taken, key};
use crate::resolve::Pinned;

/// A log that cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LogError {
    /// Writing.
    #[error("cannot write the capture log {path}: {error}")]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// An epoch that does not open.
    #[error(transparent)]
    Seal(#[from] SealError),
    /// An epoch that does not hold together.
    #[error(transparent)]
    Capture(#[from] CaptureError),
}

/// What to answer to a message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Artifacts to ask for, before the acknowledgement.
    pub want: Vec<ArtifactHash>,
    /// Files to ask for, with what is here of each.
    pub want_files: Vec<(ExecutableKey, u64)>,
    /// Durable up to this epoch.
    pub ack: Option<u64>,
}

/// Artifacts and files to ask for.
type Wants = (Vec<ArtifactHash>, Vec<(ExecutableKey, u64)>);

/// What is here of the files a capture is of.
#[derive(Debug, Default)]
pub struct Files {
    /// The collector is on this host, so files of its processes are worth opening while they live.
    pub local: bool,
    /// Held open while their processes live.
    pub pinned: Pinned,
    /// Files fetched and tables made before.
    pub cache: Option<Arc<Cache>>,
}

/// What a log leaves when it is closed.
#[derive(Debug, Default)]
pub struct Closed {
    /// The file.
    pub path: PathBuf,
    /// What its processes ran.
    pub pinned: Pinned,
    /// What was added to it.
    pub assembler: Assembler,
}

/// A log being written.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    out: FrameWriter<File>,
    assembler: Assembler,
    asked: HashSet<ArtifactHash>,
    files: Files,
    /// Every file is asked for.
    share_all: bool,
    /// Looked for already.
    met: HashSet<Executable>,
    /// Number of the epoch expected next.
    pub next_epoch: u64,
    epochs: u64,
    samples: u64,
    /// Said by the epochs of this file, by reason.
    lost: HashMap<i32, v1::Lost>,
    /// Start of the first epoch, end of the last; monotonic nanoseconds.
    pub span: Option<(u64, u64)>,
    /// Bytes of messages written.
    pub bytes: u64,
    ended: bool,
}

impl Log {
    /// Makes a file, or empties the one that is there, and starts it with a greeting.
    ///
    /// # Errors
    /// See [`LogError`].
    pub fn create(
        path: PathBuf,
        hello: &v1::CollectorMessage,
        next_epoch: u64,
        files: Files,
        assembler: Assembler,
    ) -> Result<Self, LogError> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        match options.open(&path) {
            Ok(file) => Self::start(path, file, hello, next_epoch, files, assembler),
            Err(error) => Err(LogError::Write { path, error }),
        }
    }

    /// Starts an empty file with a greeting; `path` is for messages. What comes is put together by
    /// `assembler`.
    ///
    /// # Errors
    /// See [`LogError`].
    pub fn start(
        path: PathBuf,
        file: File,
        hello: &v1::CollectorMessage,
        next_epoch: u64,
        files: Files,
        mut assembler: Assembler,
    ) -> Result<Self, LogError> {
        let mut out = FrameWriter::new(file);
        if let Err(error) = out.write(hello) {
            return Err(LogError::Write { path, error });
        }
        assembler.add(hello)?;
        Ok(Self {
            path,
            out,
            assembler,
            asked: HashSet::new(),
            files,
            share_all: matches!(&hello.body, Some(Body::Hello(hello)) if hello.share_all),
            met: HashSet::new(),
            next_epoch,
            epochs: 0,
            samples: 0,
            lost: HashMap::new(),
            span: None,
            bytes: 0,
            ended: false,
        })
    }

    /// What was added so far.
    #[must_use]
    pub fn profile(&self) -> &Profile {
        self.assembler.profile()
    }

    /// Adds a message; when this returns, an epoch is on disk.
    ///
    /// # Errors
    /// See [`LogError`]. A malformed epoch is refused before it is written.
    pub fn add(&mut self, message: &v1::CollectorMessage) -> Result<Answer, LogError> {
        match &message.body {
            Some(Body::Epoch(sealed)) if sealed.number < self.next_epoch => {
                // Sent again: durable since before.
                Ok(Answer { ack: Some(self.next_epoch - 1), ..Answer::default() })
            }
            Some(Body::Epoch(sealed)) => {
                let epoch = open_epoch(sealed)?;
                let (want, want_files) = self.take_epoch(&epoch)?;
                self.write(message)?;
                self.sync()?;
                self.next_epoch = sealed.number + 1;
                self.epochs += 1;
                for samples in &epoch.samples {
                    self.samples +=
                        (0..samples.thread.len()).map(|at| samples.events(at)).sum::<u64>();
                }
                let start = self.span.map_or(epoch.start_ns, |(start, _)| start);
                self.span = Some((start, epoch.end_ns));
                for lost in epoch.lost {
                    let entry =
                        self.lost.entry(lost.reason).or_insert(v1::Lost { count: 0, ..lost });
                    entry.count += lost.count;
                }
                Ok(Answer { want, want_files, ack: Some(sealed.number) })
            }
            Some(Body::Artifact(chunk)) if chunk.kind() == v1::ArtifactKind::File => {
                self.take_file(chunk)
            }
            Some(Body::Artifact(chunk)) => {
                let hash = ArtifactHash::try_from(chunk.hash.as_slice()).unwrap_or_default();
                // Unasked for, it would only fill the disk.
                if self.asked.contains(&hash) && self.assembler.artifact(&hash).is_none() {
                    self.write(message)?;
                    self.assembler.add(message)?;
                }
                Ok(Answer::default())
            }
            Some(Body::End(_)) => {
                self.write(message)?;
                self.sync()?;
                self.assembler.add(message)?;
                self.ended = true;
                Ok(Answer::default())
            }
            Some(Body::Hello(_)) | None => Ok(Answer::default()),
        }
    }

    /// Everything asked for has come.
    #[must_use]
    pub fn has_its_artifacts(&self) -> bool {
        self.asked.iter().all(|hash| self.assembler.artifact(hash).is_some())
            && self.assembler.handed().is_complete()
    }

    /// The stream has ended as it should.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Samples of this file and what its epochs said was lost.
    #[must_use]
    pub fn totals(&self) -> (u64, Vec<v1::Lost>) {
        (self.samples, self.lost.values().copied().collect())
    }

    /// Closes the file as a window of its own: with an end that speaks of its epochs only, `more`
    /// having been lost beside what they said.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn end_window(&mut self, more: &[v1::Lost]) -> Result<(), LogError> {
        let mut lost = self.lost.clone();
        for extra in more {
            let entry = lost.entry(extra.reason).or_insert(v1::Lost { count: 0, ..*extra });
            entry.count += extra.count;
        }
        let lost_samples: u64 = lost.values().filter(|l| l.samples).map(|l| l.count).sum();
        let mut lost: Vec<_> = lost.into_values().collect();
        lost.sort_by_key(|lost| lost.reason);
        let end = v1::End {
            clock_monotonic_ns: self.span.map_or(0, |(_, end)| end),
            epochs: self.epochs,
            taken: self.samples + lost_samples,
            lost,
            // Known when the capture ends.
            python: Vec::new(),
        };
        self.add(&v1::CollectorMessage { body: Some(Body::End(end)) }).map(|_| ())
    }

    /// What it holds open, a second time.
    #[must_use]
    pub fn pinned(&self) -> Pinned {
        self.files.pinned.try_clone()
    }

    /// Closes the file.
    #[must_use]
    pub fn close(self) -> Closed {
        Closed { path: self.path, pinned: self.files.pinned, assembler: self.assembler }
    }

    /// Takes a piece of a file. It is kept outside of this log until the file is whole, so that a
    /// transfer may go on in another log. Then it is kept here, for whoever resolves this log
    /// again.
    fn take_file(&mut self, chunk: &v1::ArtifactChunk) -> Result<Answer, LogError> {
        let handed = Arc::clone(self.assembler.handed());
        match handed.take(chunk) {
            Taken::Nothing => Ok(Answer::default()),
            Taken::Refused(message) => self.write(&message).map(|()| Answer::default()),
            Taken::Again => {
                let want_files = key(chunk).into_iter().map(|key| (key, 0)).collect();
                Ok(Answer { want_files, ..Answer::default() })
            }
            Taken::Whole => {
                handed.messages(chunk).try_for_each(|message| self.write(&message))?;
                Ok(Answer::default())
            }
        }
    }

    /// Adds an epoch to the profile, pins its files, and tells which artifacts and files to ask
    /// for.
    fn take_epoch(&mut self, epoch: &v1::Epoch) -> Result<Wants, LogError> {
        let met = self.assembler.take(epoch)?;
        let mut want = self.assembler.wanted();
        want.retain(|hash| !self.asked.contains(hash));
        self.asked.extend(&want);
        let mut want_files = Vec::new();
        for id in met.executables {
            let executable = self.assembler.executable(id);
            let Executable::File { key, .. } = executable else { continue };
            let pids: Vec<u32> = met
                .mapped
                .iter()
                .filter(|(mapped, _)| self.files.local && *mapped == id)
                .map(|(_, pid)| *pid)
                .collect();
            // The inodes of another host mean nothing here.
            let here = (self.files.local || executable.build_id().is_some())
                && self.files.pinned.pin(executable, &pids);
            let new = self.met.insert(executable.clone());
            if !new || (!self.share_all && (here || self.is_cached(executable.build_id()))) {
                continue;
            }
            want_files.extend(key.and_then(|key| {
                let offset = self.assembler.handed().ask(key)?;
                Some((key, offset))
            }));
        }
        Ok((want, want_files))
    }

    /// Whether the cache has the file or what was made of it.
    fn is_cached(&self, build_id: Option<BuildId>) -> bool {
        let (Some(cache), Some(id)) = (&self.files.cache, build_id) else { return false };
        let kinds = [Kind::Executable, Kind::Table(table::VERSION)];
        let has = |kind| cache.get(&Key::new(id.into(), kind)).is_ok_and(|blob| blob.is_some());
        kinds.into_iter().any(has)
    }

    fn write(&mut self, message: &v1::CollectorMessage) -> Result<(), LogError> {
        self.bytes += message.encoded_len() as u64;
        self.out.write(message).map_err(|error| LogError::Write { path: self.path.clone(), error })
    }

    fn sync(&self) -> Result<(), LogError> {
        self.out
            .get_ref()
            .sync_data()
            .map_err(|error| LogError::Write { path: self.path.clone(), error })
    }
}

/// What a log on disk holds of a capture.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Number of the first epoch it does not hold.
    pub next_epoch: u64,
    /// What its epochs said was lost, by reason.
    pub lost: Vec<v1::Lost>,
}

/// Looks into a log from before; one that cannot be read holds nothing.
#[must_use]
pub fn inspect(path: &Path) -> Held {
    let mut held = Held::default();
    let Ok(file) = File::open(path) else { return held };
    let mut reader = FrameReader::new(io::BufReader::new(file));
    while let Ok(Some(message)) = reader.next_message() {
        if let Some(Body::Epoch(sealed)) = &message.body {
            held.next_epoch = held.next_epoch.max(sealed.number + 1);
            held.lost.extend(open_epoch(sealed).map(|epoch| epoch.lost).unwrap_or_default());
        }
    }
    held
}
