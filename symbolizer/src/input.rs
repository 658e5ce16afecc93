//! Profiles of every kind, read into one: our captures, perf.data, pprof, gperftools, folded
//! stacks. By what is in a file, never by its name.

use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::sync::Arc;

use stackwire_formats::{ReadError, folded, gperftools, perf_data, pprof};

use crate::artifacts::Artifacts;
use crate::capture::{Assembler, CaptureError, read_into};
use crate::here::{Here, Kallsyms};
use crate::profile::Profile;
use crate::receive::handed::Handed;
use crate::receive::tenant::Tenant;
use crate::resolve::Sources;

/// A file that is no profile, or a damaged one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InputError {
    /// Reading it.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A capture.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// Another profiler's file.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Values of another kind than those before: time and counts, bytes and samples.
    #[error("its samples weigh something else than those before: they cannot be added up")]
    Mixed,
}

/// Puts files together.
#[derive(Debug, Default)]
pub struct Inputs {
    assembler: Assembler,
    kallsyms: Kallsyms,
    /// For files that captures bring.
    has_place: bool,
}

impl Inputs {
    /// None yet. What only the privileged may read of this host is opened now. With a timeline each
    /// sample is kept with its time and CPU.
    #[must_use]
    pub fn new(timeline: bool) -> Self {
        let assembler = if timeline { Assembler::with_timeline() } else { Assembler::default() };
        Self { assembler, kallsyms: Kallsyms::open(), has_place: false }
    }

    /// Takes native frames alone, and none of the functions that interpreters run.
    pub fn keep_native(&mut self) {
        self.assembler.keep_native();
    }

    /// Gives each sample its CPU as a label, where it is known.
    pub fn label_cpus(&mut self) {
        self.assembler.label_cpus();
    }

    /// Adds a file. Stacks in a perf.data that are copies of memory are walked with executables
    /// from `sources`; files that a capture speaks of may be in their cache.
    ///
    /// # Errors
    /// See [`InputError`].
    pub fn add(&mut self, mut file: File, sources: &Sources) -> Result<(), InputError> {
        let mut head = Vec::new();
        file.by_ref().take(64).read_to_end(&mut head)?;
        // What cannot be read twice is read once, into where it can be.
        if file.rewind().is_err() {
            let mut kept = tempfile::tempfile()?;
            std::io::copy(&mut head.as_slice(), &mut kept)?;
            std::io::copy(&mut file, &mut kept)?;
            kept.rewind()?;
            file = kept;
        }
        let kind = Kind::of(&head);
        if self.assembler.has_other_values() && !matches!(kind, Kind::Pprof { .. }) {
            return Err(InputError::Mixed);
        }
        if let Kind::Capture = kind {
            if !std::mem::replace(&mut self.has_place, true) {
                let tenant = Tenant { owner: String::new(), cache: sources.cache.clone() };
                let handed = Handed::new(sources.scratch.clone(), tenant);
                self.assembler = std::mem::take(&mut self.assembler).beside(Arc::new(handed));
            }
            let input = BufReader::with_capacity(1 << 18, file);
            read_into(input, &mut self.assembler)?;
        } else {
            let (into, artifacts, number) = self.assembler.other();
            let host = &mut Here::new(&self.kallsyms, sources, artifacts);
            match kind {
                Kind::Capture => {}
                Kind::PerfData => perf_data::read(file, into, number, host)?,
                Kind::Gperftools => gperftools::read(BufReader::new(file), into, number)?,
                Kind::Pprof { gzip } => {
                    pprof::read(BufReader::new(file), gzip, into, number, host)?;
                }
                Kind::Folded => folded::read(file, into, number)?,
            }
        }
        Ok(())
    }

    /// The profile with what it needs to be resolved.
    #[must_use]
    pub fn finish(self) -> (Profile, Artifacts) {
        self.assembler.finish()
    }
}

/// What a file is.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Capture,
    PerfData,
    Gperftools,
    Pprof { gzip: bool },
    Folded,
}

impl Kind {
    /// By how it begins; what is nothing else may be a damaged capture.
    fn of(head: &[u8]) -> Self {
        let is_text = |&byte: &u8| byte >= b' ' || matches!(byte, b'\n' | b'\t' | b'\r');
        match head {
            [b'P', b'E', b'R', b'F', b'I', b'L', b'E', b'2', ..] => Self::PerfData,
            [b'2', b'E', b'L', b'I', b'F', b'R', b'E', b'P', ..] => Self::PerfData,
            [b'S', b'W', b'F', ..] | [] => Self::Capture,
            [0x1f, 0x8b, ..] => Self::Pprof { gzip: true },
            head if head.iter().all(is_text) => Self::Folded,
            head if gperftools::is_one(head) => Self::Gperftools,
            // Tags of the first fields of profile.proto, all length-delimited.
            [0x0a | 0x12 | 0x1a | 0x22 | 0x2a | 0x32, ..] => Self::Pprof { gzip: false },
            _ => Self::Capture,
        }
    }
}
