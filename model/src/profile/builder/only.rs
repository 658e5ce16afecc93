//! Which samples a profile in the making takes: those of some threads, of some time. What is left
//! out takes no memory.

use std::ops::Range;

use super::Builder;
use crate::profile::{SampleKey, SeriesId, ThreadId};

/// Samples to take.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Only {
    /// For each label, one of the values given for it here.
    pub labels: Vec<(String, String)>,
    /// When they were taken, nanoseconds since the Unix epoch.
    pub time_ns: Option<Range<u64>>,
}

impl Builder {
    /// Takes these alone from now on.
    pub fn keep_only(&mut self, only: Only) {
        self.only = only;
    }

    /// Whether samples of a thread are taken, as far as the thread and its process tell. Labels
    /// that belong to single samples tell later: see `Profile::keep_labels`.
    #[must_use]
    pub fn takes_thread(&self, thread: ThreadId) -> bool {
        let series = SeriesId(0);
        let key = SampleKey { series, thread, user: None, kernel: None, labels: 0 };
        self.only.labels.iter().all(|(label, _)| match self.profile.label(key, label) {
            None => true,
            Some(found) => {
                self.only.labels.iter().any(|(other, value)| other == label && *value == found)
            }
        })
    }

    /// Whether samples of this time are taken.
    #[must_use]
    pub fn takes_time(&self, time_ns: u64) -> bool {
        self.only.time_ns.as_ref().is_none_or(|range| range.contains(&time_ns))
    }

    /// Bytes its tables take, roughly.
    #[must_use]
    pub fn memory(&self) -> u64 {
        // With the places of each in a table by content.
        let entries = [
            (self.profile.samples.len(), 96),
            (self.profile.timeline.len(), 32),
            (self.profile.stacks.len(), 48),
            (self.profile.tree.len(), 40),
            (self.profile.locations.len(), 96),
            (self.profile.mappings.len(), 96),
            (self.profile.threads.len(), 128),
            (self.profile.processes.len(), 512),
            (self.profile.executables.len(), 256),
        ];
        entries.into_iter().map(|(count, bytes)| count as u64 * bytes).sum()
    }
}
