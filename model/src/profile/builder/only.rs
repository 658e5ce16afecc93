//! Which samples a profile in the making takes: those of some threads, of some time. Stacks of
//! others are not added.

use std::borrow::Cow;
use std::ops::Range;

use super::Builder;
use crate::profile::{SampleKey, SeriesId, ThreadId, Who};

/// Samples to take.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Only {
    /// For each label, one of the values given for it here.
    pub labels: Vec<(String, String)>,
    /// When they were taken, nanoseconds since the Unix epoch.
    pub time_ns: Option<Range<u64>>,
}

impl Only {
    /// Whether something has one of the values for each label, as far as it has that label.
    fn has<'l>(&self, value: impl Fn(&str) -> Option<Cow<'l, str>>) -> bool {
        self.labels.iter().all(|(label, _)| match value(label) {
            None => true,
            Some(found) => {
                self.labels.iter().any(|(other, value)| other == label && *value == found)
            }
        })
    }
}

impl Builder {
    /// Takes these alone from now on. How many were taken in all, nobody knows then.
    pub fn keep_only(&mut self, only: Only) {
        self.only = only;
        self.profile.taken = None;
    }

    /// Whether samples of a thread are taken, as far as the thread and its process tell. Labels
    /// that belong to single samples tell later: see `Profile::keep_labels`.
    #[must_use]
    pub fn takes_thread(&self, thread: ThreadId) -> bool {
        let series = SeriesId(0);
        let key = SampleKey { series, thread, user: None, kernel: None, labels: 0 };
        self.only.has(|label| self.profile.label(key, label))
    }

    /// Whether how somebody was scheduled is taken, likewise.
    #[must_use]
    pub fn takes(&self, who: Who) -> bool {
        match who {
            Who::Thread(thread) => self.takes_thread(thread),
            Who::TheRest => self.only.labels.is_empty(),
            Who::Process(process) => {
                let process = &self.profile.processes[process.index()];
                self.only.has(|label| match label {
                    "comm" => Some(Cow::Borrowed(process.comm.as_str())),
                    "pid" => Some(Cow::Owned(process.pid.to_string())),
                    "host_pid" => Some(Cow::Owned(process.host_pid.to_string())),
                    _ => {
                        let known = process.labels.iter().find(|(key, _)| *key == label);
                        known.map(|(_, value)| Cow::Borrowed(value.as_str()))
                    }
                })
            }
        }
    }

    /// Whether an epoch from when to when has something that is taken.
    #[must_use]
    pub fn takes_span(&self, start_ns: u64, end_ns: u64) -> bool {
        // The end is not part of it, unless there is nothing else.
        let meets = |range: &Range<u64>| {
            start_ns < range.end && (end_ns > range.start || start_ns >= range.start)
        };
        self.only.time_ns.as_ref().is_none_or(meets)
    }

    /// Counts samples that are not taken.
    pub fn leave_out(&mut self, count: u64) {
        self.profile.left_out = self.profile.left_out.saturating_add(count);
    }

    /// Whether samples of this time are taken.
    #[must_use]
    pub fn takes_time(&self, time_ns: u64) -> bool {
        self.only.time_ns.as_ref().is_none_or(|range| range.contains(&time_ns))
    }

    /// Bytes its tables take, roughly.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.name_bytes + self.tables()
    }

    fn tables(&self) -> u64 {
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
