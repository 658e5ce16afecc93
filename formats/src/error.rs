//! Why a file cannot be read as what it seems to be.

use stackwire_model::profile::{Full, ValueError};

/// A file that is no profile, or a damaged one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// Reading it.
    #[error(transparent)]
    Io(#[from] std::io::Error),
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
    /// Values of a pprof.
    #[error(transparent)]
    Values(#[from] ValueError),
    /// More than a profile holds.
    #[error(transparent)]
    Full(#[from] Full),
}
