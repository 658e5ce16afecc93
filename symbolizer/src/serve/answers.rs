//! What `/v1/captures` answers, for the server that says it and for who asks.

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
