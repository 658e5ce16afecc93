//! Captures: from frames to a profile and the artifacts it needs. The one path of `record`, `serve` and
//! `resolve`, so that the three give the same profile for the same stream.

use std::collections::HashMap;
use std::io::Read;

use sha2::{Digest, Sha256};
use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::{FORMAT, FrameReader, ReadError, open_epoch, open_piece, v1};

use crate::ingest::{self, Clock};
use crate::profile::{ArtifactHash, Builder, Profile};

/// A capture that gives no profile.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CaptureError {
    /// Framing.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Frames, but no greeting first.
    #[error("the capture does not start with a greeting: it is a piece of one")]
    NoHello,
}

/// Most bytes of artifacts kept of one capture.
const MAX_ARTIFACTS: usize = 512 << 20;

/// Artifacts by hash, verified.
#[derive(Clone, Debug, Default)]
pub struct Artifacts {
    whole: HashMap<ArtifactHash, Vec<u8>>,
    partial: HashMap<ArtifactHash, Vec<u8>>,
    bytes: usize,
}

impl Artifacts {
    /// The content behind a hash.
    #[must_use]
    pub fn get(&self, hash: &ArtifactHash) -> Option<&[u8]> {
        self.whole.get(hash).map(Vec::as_slice)
    }

    /// Adds a piece; true when the artifact is whole now. Pieces that do not fit are ignored, and so
    /// the artifact stays missing.
    pub fn add(&mut self, chunk: &v1::ArtifactChunk) -> bool {
        let Ok(hash) = ArtifactHash::try_from(chunk.hash.as_slice()) else { return false };
        if self.whole.contains_key(&hash) {
            return true;
        }
        let Ok(piece) = open_piece(chunk) else { return false };
        if self.bytes + piece.len() > MAX_ARTIFACTS {
            return false;
        }
        let partial = self.partial.entry(hash).or_default();
        if chunk.offset == 0 {
            self.bytes -= partial.len();
            partial.clear();
        }
        if partial.len() as u64 != chunk.offset {
            return false;
        }
        self.bytes += piece.len();
        partial.extend(piece);
        if partial.len() as u64 != chunk.length {
            return false;
        }
        let content = self.partial.remove(&hash).unwrap_or_default();
        let honest = ArtifactHash::from(Sha256::digest(&content)) == hash;
        if honest {
            self.whole.insert(hash, content);
        } else {
            self.bytes -= content.len();
        }
        honest
    }
}

/// Puts messages together.
#[derive(Debug)]
pub struct Assembler {
    builder: Builder,
    artifacts: Artifacts,
    clock: Option<Clock>,
    lost_said: Vec<v1::Lost>,
    epochs: u64,
    next_epoch: u64,
    ended: bool,
}

impl Default for Assembler {
    fn default() -> Self {
        Self {
            builder: Builder::new(),
            artifacts: Artifacts::default(),
            clock: None,
            lost_said: Vec::new(),
            epochs: 0,
            next_epoch: 0,
            ended: true,
        }
    }
}

impl Assembler {
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
                self.finish_capture();
                let (origin, clock) = ingest::hello(hello);
                self.builder.origin(origin);
                self.clock = Some(clock);
                self.ended = false;
            }
            Some(Body::Epoch(sealed)) => {
                let clock = self.clock.ok_or(CaptureError::NoHello)?;
                self.epoch(sealed, clock);
            }
            Some(Body::Artifact(chunk)) => {
                self.artifacts.add(chunk);
            }
            Some(Body::End(end)) => {
                ingest::end(end, &self.lost_said, &mut self.builder);
                self.ended = true;
            }
            None => {}
        }
        Ok(())
    }

    fn epoch(&mut self, sealed: &v1::SealedEpoch, clock: Clock) {
        if sealed.number < self.next_epoch {
            return; // sent again after a broken connection
        }
        self.next_epoch = sealed.number + 1;
        let opened = open_epoch(sealed).map_err(|error| error.to_string());
        let added = opened.and_then(|epoch| {
            self.lost_said.extend(epoch.lost.iter().copied());
            ingest::epoch(&epoch, clock, &mut self.builder).map_err(|error| error.to_string())
        });
        match added {
            Ok(()) => self.epochs += 1,
            Err(error) => self.builder.note(format!("epoch {} left out: {error}", sealed.number)),
        }
    }

    /// The profile with what it needs to be resolved.
    #[must_use]
    pub fn finish(mut self) -> (Profile, Artifacts) {
        self.finish_capture();
        (self.builder.build(), self.artifacts)
    }

    /// Artifacts referred to that are not there.
    #[must_use]
    pub fn wanted(&self) -> Vec<ArtifactHash> {
        let missing = |hash: &ArtifactHash| self.artifacts.get(hash).is_none();
        self.builder.artifacts().into_iter().filter(missing).collect()
    }

    fn finish_capture(&mut self) {
        if !self.ended {
            self.builder.taken(None);
            self.builder.note(format!(
                "the capture has no end: cut after {} whole epochs, samples lost with the rest are not known",
                self.epochs
            ));
        }
        self.ended = true;
        self.next_epoch = 0;
        self.lost_said.clear();
    }
}

/// Reads a capture, or several one after the other, up to the last whole epoch.
///
/// # Errors
/// When nothing of it can be read; damage further in becomes a note in the profile.
pub fn read(input: impl Read) -> Result<(Profile, Artifacts), CaptureError> {
    let mut assembler = Assembler::default();
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
    for offset in &tail.damaged {
        assembler.builder.note(format!("the frame at byte {offset} is damaged and was left out"));
    }
    if let Some(cut) = &tail.cut {
        assembler.builder.note(format!("the capture is cut: {cut}"));
    }
    Ok(())
}
