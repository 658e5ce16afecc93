//! What `/v1/captures` answers and what `/v1/profile` may be asked for, for the server and for who
//! asks.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Captures that somebody may see.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Captures {
    /// By host and time.
    pub captures: Vec<Capture>,
}

/// What a collector sent since it was started. Counts are of windows that are kept.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Capture {
    /// Its name, 32 hexadecimal digits.
    pub capture: String,
    /// Who sent it.
    pub client: String,
    /// Name of the host.
    pub host: String,
    /// Version of the collector.
    pub collector: String,
    /// Release of the kernel.
    pub kernel: String,
    /// It has a stream now.
    pub live: bool,
    /// When the collector was started.
    pub since: jiff::Timestamp,
    /// When something came last.
    pub last: jiff::Timestamp,
    /// In the last minute.
    pub samples_per_second: f64,
    /// Samples.
    pub samples: u64,
    /// Samples that were lost.
    pub lost_samples: u64,
    /// Samples with a user stack.
    pub stacks: u64,
    /// Those whose stacks reach their roots.
    pub whole_stacks: u64,
    /// How far its windows are.
    pub windows: Windows,
}

/// Windows by state, each in one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Windows {
    /// Epochs are added.
    pub open: u64,
    /// Closed, and without a profile.
    pub waiting: u64,
    /// With their profiles.
    pub written: u64,
    /// Without a profile, for good.
    pub given_up: u64,
    /// With their profiles, which are where they are pushed to as well.
    pub pushed: u64,
    /// With profiles of which some was refused there.
    pub not_pushed: u64,
}

/// What `/v1/profile` is written as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// For pprof and what reads its files.
    Pprof,
    /// A line a stack.
    Folded,
    /// An SVG.
    Flamegraph,
    /// For perf.
    PerfData,
    /// How threads were scheduled, for people.
    PmuText,
    /// The same for programs.
    PmuJson,
}

/// No format is called like this.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0:?} is no format")]
pub struct NoFormat(String);

impl Format {
    /// Every one.
    pub const ALL: [Self; 6] =
        [Self::Pprof, Self::Folded, Self::Flamegraph, Self::PerfData, Self::PmuText, Self::PmuJson];

    /// As it is asked for.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pprof => "pprof",
            Self::Folded => "folded",
            Self::Flamegraph => "flamegraph",
            Self::PerfData => "perf-data",
            Self::PmuText => "pmu-text",
            Self::PmuJson => "pmu-json",
        }
    }

    /// For HTTP.
    pub(super) fn content_type(self) -> &'static str {
        match self {
            Self::Pprof | Self::PerfData => "application/octet-stream",
            Self::Folded | Self::PmuText => "text/plain; charset=utf-8",
            Self::Flamegraph => "image/svg+xml",
            Self::PmuJson => "application/json",
        }
    }

    /// Whether it has no samples.
    pub(super) fn is_pmu(self) -> bool {
        matches!(self, Self::PmuText | Self::PmuJson)
    }
}

impl FromStr for Format {
    type Err = NoFormat;

    fn from_str(name: &str) -> Result<Self, NoFormat> {
        let found = Self::ALL.into_iter().find(|format| format.name() == name);
        found.ok_or_else(|| NoFormat(name.to_owned()))
    }
}
