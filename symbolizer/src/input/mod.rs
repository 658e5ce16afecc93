//! Profiles of every kind, read into one: our captures, perf.data, pprof, gperftools, folded
//! stacks. By what is in a file, never by its name.

mod folded;
mod gperftools;
mod host;
mod kernel;
mod perf_data;
mod perf_guard;
mod pprof;
mod stack_copy;
mod tasks;

use std::fs::File;
use std::io::{BufReader, Read, Seek};

use self::host::Kallsyms;
use crate::capture::{Artifacts, Assembler, CaptureError, read_into};
use crate::profile::{Full, Profile, ValueError};
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
    /// A perf.data.
    #[error("not a perf.data that can be read: {0}")]
    PerfData(String),
    /// A pprof.
    #[error("not a pprof that can be read: {0}")]
    Pprof(String),
    /// A profile of gperftools.
    #[error("not a profile of gperftools that can be read: {0}")]
    Gperftools(String),
    /// Folded stacks.
    #[error(
        "not a Stackwire capture, nor a perf.data, pprof or profile of gperftools, and line {line} is no folded stack: {what}"
    )]
    Folded {
        /// The line.
        line: u64,
        /// What is wrong with it.
        what: String,
    },
    /// Values of another kind than those before: time and counts, bytes and samples.
    #[error("its samples weigh something else than those before: they cannot be added up")]
    Mixed,
    /// Values of a pprof.
    #[error(transparent)]
    Values(#[from] ValueError),
    /// More than a profile holds.
    #[error(transparent)]
    Full(#[from] Full),
}

/// Puts files together.
#[derive(Debug, Default)]
pub struct Inputs {
    assembler: Assembler,
    kallsyms: Kallsyms,
}

impl Inputs {
    /// None yet. What only the privileged may read of this host is opened now. With a timeline each
    /// sample is kept with its time and CPU.
    #[must_use]
    pub fn new(timeline: bool) -> Self {
        let assembler = if timeline { Assembler::with_timeline() } else { Assembler::default() };
        Self { assembler, kallsyms: Kallsyms::open() }
    }

    /// Gives each sample its CPU as a label, where it is known.
    pub fn label_cpus(&mut self) {
        self.assembler.label_cpus();
    }

    /// Adds a file. Stacks in a perf.data that are copies of memory are walked with executables
    /// from `sources`.
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
            let input = BufReader::with_capacity(1 << 18, file);
            read_into(input, &mut self.assembler)?;
        } else {
            let (into, artifacts, number) = self.assembler.other();
            match kind {
                Kind::Capture => {}
                Kind::PerfData => {
                    perf_data::read(file, (into, artifacts), number, (sources, &self.kallsyms))?;
                }
                Kind::Gperftools => gperftools::read(BufReader::new(file), into, number)?,
                Kind::Pprof { gzip } => {
                    pprof::read(
                        BufReader::new(file),
                        gzip,
                        (into, artifacts),
                        number,
                        &self.kallsyms,
                    )?;
                }
                Kind::Folded => folded::read(file, into, number)?,
            }
        }
        if self.assembler.is_mixed() { Err(InputError::Mixed) } else { Ok(()) }
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

/// Reads a file from memory and writes it as everything.
pub(crate) fn fuzz(bytes: &[u8]) {
    use std::io::Write;

    let Ok(mut file) = tempfile::tempfile() else { return };
    let written = file.write_all(bytes).and_then(|()| file.rewind());
    let mut inputs = Inputs::new(true);
    if written.is_ok() && inputs.add(file, &Sources::default()).is_ok() {
        fuzz_outputs(&inputs.finish().0);
    }
}

/// A pprof that is not compressed.
pub(crate) fn fuzz_pprof(bytes: &[u8]) {
    let mut into = crate::profile::Builder::new();
    if pprof::read(bytes, false, (&mut into, &mut Artifacts::default()), 0, &Kallsyms::default())
        .is_ok()
    {
        fuzz_outputs(&into.build());
    }
}

/// A profile of gperftools.
pub(crate) fn fuzz_gperftools(bytes: &[u8]) {
    let mut into = crate::profile::Builder::new();
    if gperftools::read(bytes, &mut into, 0).is_ok() {
        fuzz_outputs(&into.build());
    }
}

/// Folded stacks.
pub(crate) fn fuzz_folded(bytes: &[u8]) {
    let mut into = crate::profile::Builder::new();
    if folded::read(bytes, &mut into, 0).is_ok() {
        fuzz_outputs(&into.build());
    }
}

fn fuzz_outputs(profile: &Profile) {
    let _ = crate::export::pprof(profile, &Default::default(), std::io::sink());
    let options = crate::export::ReportOptions { by: Some("comm"), ..Default::default() };
    let _ = crate::export::report(profile, &options, std::io::sink());
    let _ = crate::export::folded(profile, None, std::io::sink());
    let out = std::io::Cursor::new(Vec::new());
    let _ = crate::export::perf_data(profile, &Default::default(), out);
}
