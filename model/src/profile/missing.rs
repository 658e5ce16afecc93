//! Why a place in code has no name.

use std::fmt;

use super::Quality;
use crate::Address;

/// A place without a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Why.
    pub reason: MissingReason,
    /// Where the function begins, or for want of anything smaller the mapping: an offset as that of
    /// a location.
    pub start: Option<Address>,
}

impl Missing {
    /// Of a place of which nothing is known.
    #[must_use]
    pub fn because(reason: MissingReason) -> Self {
        Self { reason, start: None }
    }
}

/// Why a place has no name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MissingReason {
    /// Nobody has looked.
    NotLookedUp,
    /// Nothing known was mapped there.
    Unmapped,
    /// There is no file with names; what was looked for and why there is none, in words.
    NoSource(String),
    /// The file has no code at this offset.
    NotLoaded,
    /// No function of the file lies there.
    NoSymbol,
    /// No function lies there, and the file has lost its symbols.
    Stripped,
    /// No function of the kernel's list lies there.
    NotInKallsyms,
    /// The kernel's list was not sent with the capture.
    KallsymsNotSent,
    /// The collector was not allowed to read the kernel's list.
    KallsymsHidden,
    /// The profile does not say which kernel it was.
    UnknownKernel,
    /// The kernel's list is not in the profile, and nothing else has the kernel's names.
    NoKernelSymbols,
    /// What the process wrote of its code does not have this place.
    NotInJitFile(Quality),
    /// What the process wrote of its code was not sent with the capture.
    JitFileNotSent(Quality),
    /// The collector could not take what the process wrote of its code; why, in its words.
    JitFileNotTaken(String),
    /// The process wrote nothing of its code.
    NoJitFile,
    /// What names a function of an interpreter did not come with its frames.
    CodeNotTaken,
}

impl fmt::Display for MissingReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::NotLookedUp => "not looked up",
            Self::Unmapped => "no mapping known at this address",
            Self::NoSource(words) | Self::JitFileNotTaken(words) => words,
            Self::NotLoaded => "not in a loaded segment of the file",
            Self::NoSymbol => "no symbol covers it",
            Self::Stripped => "no symbol covers it, and the file is stripped",
            Self::NotInKallsyms => "not in kallsyms",
            Self::KallsymsNotSent => "its symbols were not sent",
            Self::KallsymsHidden => {
                "the collector could not read kallsyms (kernel.kptr_restrict, or no CAP_SYSLOG)"
            }
            Self::UnknownKernel => {
                "the profile does not say which kernel it was: its build-id is not in it"
            }
            Self::NoKernelSymbols => {
                "its symbols are not in the profile, and no debug information has its build-id"
            }
            Self::NotInJitFile(quality) => return write!(f, "not in the {}", quality.text()),
            Self::JitFileNotSent(quality) => {
                return write!(f, "its {} was not sent", quality.text());
            }
            Self::NoJitFile => "the process wrote no perf-map",
            Self::CodeNotTaken => {
                "its name could not be read in the process, or there was no room for it"
            }
        };
        f.write_str(text)
    }
}
