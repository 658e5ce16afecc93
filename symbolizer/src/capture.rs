//! Captures: makes a profile, and the artifacts it needs, from frames. `record`, `serve` and
//! `resolve` all use this code, so that they give the same profile for the same stream.

use std::collections::HashSet;
use std::io::Read;
use std::sync::Arc;

use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::{FORMAT, FrameReader, ReadError, open_epoch, v1};

use crate::artifacts::Artifacts;
use crate::ingest::{self, Context, IngestError, Met};
use crate::profile::{ArtifactHash, Builder, Executable, ExecutableId, Only, Profile};
use crate::receive::handed::Handed;

/// A capture that gives no profile.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CaptureError {
    /// Framing.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Frames, but no greeting first.
    #[error(
        "the capture does not start with a greeting: it is a piece of one, or its first frame is damaged"
    )]
    NoHello,
    /// An epoch of a stream that does not hold together. In a capture it is left out, with a note.
    #[error(transparent)]
    Ingest(#[from] IngestError),
}

/// Puts messages together: those of a file as they are read, those of a stream as they come.
#[derive(Debug)]
pub struct Assembler {
    builder: Builder,
    artifacts: Artifacts,
    /// Captures met, by id; the number of each is its place.
    captures: Vec<Vec<u8>>,
    /// Epochs taken, of any capture: one that comes again is not counted again.
    taken: HashSet<(usize, u64)>,
    native_only: bool,
    current: Option<Current>,
}

/// The capture being read.
#[derive(Debug)]
struct Current {
    number: usize,
    context: Context,
    lost_said: Vec<v1::Lost>,
    epochs: u64,
    /// Epochs that could not be read.
    left_out: u64,
    ended: bool,
}

impl Default for Assembler {
    fn default() -> Self {
        Self {
            builder: Builder::new(),
            artifacts: Artifacts::default(),
            captures: Vec::new(),
            taken: HashSet::new(),
            native_only: false,
            current: None,
        }
    }
}

impl Assembler {
    /// One that keeps each sample with its time and CPU: perf.data has them, and a part of the time
    /// is cut out by them.
    #[must_use]
    pub fn with_timeline() -> Self {
        let mut new = Self::default();
        new.builder.keep_timeline();
        new
    }

    /// The same, with a place for files that are handed over.
    #[must_use]
    pub fn beside(mut self, handed: Arc<Handed>) -> Self {
        self.artifacts = Artifacts::beside(handed);
        self
    }

    /// Takes native frames alone, and none of the functions that interpreters run.
    pub fn keep_native(&mut self) {
        self.native_only = true;
    }

    /// Takes these samples alone.
    pub fn keep_only(&mut self, only: Only) {
        self.builder.keep_only(only);
    }

    /// Bytes the profile takes, roughly.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.builder.memory()
    }

    /// Ends a capture of which more is to come elsewhere: nothing is said of its end.
    pub fn pause(&mut self) {
        self.current = None;
    }

    /// What was added so far.
    #[must_use]
    pub fn profile(&self) -> &Profile {
        self.builder.profile()
    }

    /// Gives each sample its CPU as a label.
    pub fn label_cpus(&mut self) {
        self.builder.label_cpus();
    }

    /// Where another kind of input is added, and the number that tells its processes apart from
    /// others.
    pub(crate) fn other(&mut self) -> (&mut Builder, &mut Artifacts, usize) {
        self.finish_capture(0);
        self.captures.push(Vec::new());
        (&mut self.builder, &mut self.artifacts, self.captures.len() - 1)
    }

    /// Whether values have been added that are no samples of CPU time.
    pub(crate) fn has_other_values(&self) -> bool {
        self.builder.has_other_values()
    }

    /// Adds one message.
    ///
    /// # Errors
    /// Only a capture that does not begin with a greeting, or one of a newer format.
    pub fn add(&mut self, message: &v1::CollectorMessage) -> Result<(), CaptureError> {
        match &message.body {
            Some(Body::Hello(hello)) => {
                if hello.format > FORMAT {
                    return Err(ReadError::Newer { found: hello.format }.into());
                }
                self.finish_capture(0);
                let known = self.captures.iter().position(|id| *id == hello.capture_id);
                let number = known.unwrap_or_else(|| {
                    self.captures.push(hello.capture_id.clone());
                    self.captures.len() - 1
                });
                let (origin, mut context) = ingest::hello(hello);
                context.begin(&mut self.builder, number, origin);
                self.current = Some(Current {
                    number,
                    context,
                    lost_said: Vec::new(),
                    epochs: 0,
                    left_out: 0,
                    ended: false,
                });
            }
            Some(Body::Epoch(sealed)) => self.epoch(sealed)?,
            Some(Body::Artifact(chunk)) if chunk.kind() == v1::ArtifactKind::File => {
                self.artifacts.handed().take_unasked(chunk);
            }
            Some(Body::Artifact(chunk)) => {
                self.artifacts.add(chunk);
            }
            Some(Body::End(end)) => {
                let current = self.current.as_mut().ok_or(CaptureError::NoHello)?;
                // Totals of epochs that were counted before count no second time.
                if current.epochs + current.left_out > 0 || end.taken == 0 || end.epochs == 0 {
                    ingest::end(end, &current.lost_said, &mut self.builder);
                }
                current.ended = true;
            }
            None => {}
        }
        Ok(())
    }

    fn epoch(&mut self, sealed: &v1::SealedEpoch) -> Result<(), CaptureError> {
        let current = self.current.as_mut().ok_or(CaptureError::NoHello)?;
        if !self.taken.insert((current.number, sealed.number)) {
            return Ok(()); // sent again after a broken connection, or the file named twice
        }
        let opened = open_epoch(sealed).map_err(|error| error.to_string());
        let added = opened.and_then(|epoch| self.take(&epoch).map_err(|error| error.to_string()));
        if let (Err(error), Some(current)) = (added, &mut self.current) {
            current.left_out += 1;
            self.builder.note(format!("epoch {} left out: {error}", sealed.number));
        }
        Ok(())
    }

    /// Adds an epoch that has not been added before.
    ///
    /// # Errors
    /// When it does not hold together, or no greeting came before it.
    pub fn take(&mut self, epoch: &v1::Epoch) -> Result<Met, CaptureError> {
        let current = self.current.as_mut().ok_or(CaptureError::NoHello)?;
        let met = ingest::epoch(epoch, &current.context, &mut self.builder)?;
        current.epochs += 1;
        current.lost_said.extend(&epoch.lost);
        Ok(met)
    }

    /// An executable that an epoch was about.
    #[must_use]
    pub fn executable(&self, id: ExecutableId) -> &Executable {
        self.builder.executable_of(id)
    }

    /// The content behind a hash, if it has come.
    #[must_use]
    pub fn artifact(&self, hash: &ArtifactHash) -> Option<&[u8]> {
        self.artifacts.get(hash)
    }

    /// Files that were handed over.
    #[must_use]
    pub fn handed(&self) -> &Arc<Handed> {
        self.artifacts.handed()
    }

    /// The profile with what it needs to be resolved.
    #[must_use]
    pub fn finish(mut self) -> (Profile, Artifacts) {
        self.finish_capture(0);
        let mut profile = self.builder.build();
        if self.native_only {
            profile.keep_native();
        } else {
            profile.hide_evaluators();
        }
        (profile, self.artifacts)
    }

    /// Artifacts referred to that are not there.
    #[must_use]
    pub fn wanted(&self) -> Vec<ArtifactHash> {
        let missing = |hash: &ArtifactHash| self.artifacts.get(hash).is_none();
        self.builder.artifacts().into_iter().filter(missing).collect()
    }

    /// Ends the capture being read, `damaged` frames of which were passed over.
    fn finish_capture(&mut self, damaged: usize) {
        let Some(current) = self.current.take() else { return };
        if !current.ended {
            self.builder.taken(None);
            self.builder.note(format!(
                "the capture has no end: cut after {} whole epochs, samples lost with the rest are not known",
                current.epochs
            ));
        } else if damaged > 0 || current.left_out > 0 {
            self.builder.taken(None);
            self.builder.note("what was in the damaged parts is not known".to_owned());
        }
    }
}

/// Reads a capture, or several one after the other, up to the last whole epoch.
///
/// # Errors
/// When nothing of it can be read; damage further in becomes a note in the profile.
pub fn read(input: impl Read) -> Result<(Profile, Artifacts), CaptureError> {
    read_with(input, Assembler::default())
}

/// As [`read`], with an assembler of one's own.
///
/// # Errors
/// As [`read`].
pub fn read_with(
    input: impl Read,
    mut assembler: Assembler,
) -> Result<(Profile, Artifacts), CaptureError> {
    read_into(input, &mut assembler)?;
    Ok(assembler.finish())
}

/// As [`read`], into what other captures are in already.
///
/// # Errors
/// As [`read`].
pub fn read_into(input: impl Read, assembler: &mut Assembler) -> Result<(), CaptureError> {
    let mut reader = FrameReader::new(input);
    while let Some(message) = reader.next_message()? {
        assembler.add(&message)?;
    }
    let tail = reader.tail();
    assembler.finish_capture(tail.damaged.len());
    for offset in &tail.damaged {
        assembler.builder.note(format!("the frame at byte {offset} is damaged and was left out"));
    }
    if let Some(cut) = &tail.cut {
        assembler.builder.note(format!("the capture is cut: {cut}"));
    }
    Ok(())
}
