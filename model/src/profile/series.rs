//! Series: the samples of one event, with what they weigh. A profile holds any number of them, over
//! the same processes, stacks and executables.

use super::{Profile, Sample, SeriesId};
use crate::{Event, ValueKind};

/// What the samples of one event have in common.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Series {
    /// What made the kernel take them.
    pub event: Event,
    /// Samples a second and CPU that were asked for; 0: not known.
    pub frequency: u32,
    /// What [`Profile::values`] are; `None`: there are none, and samples have a number and a
    /// weight.
    pub types: Option<Types>,
}

/// The kinds of a sample's values, when another program took the sample and it has more than a
/// number and a weight, or something else.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Types {
    /// Of each value.
    pub kinds: Vec<ValueKind>,
    /// Which of them is shown unless told otherwise.
    pub default: usize,
    /// Of the period.
    pub period_type: ValueKind,
    /// Between two events of that kind.
    pub period: i64,
}

impl Series {
    /// What is shown of it unless told otherwise.
    #[must_use]
    pub fn shown_kind(&self) -> &ValueKind {
        let given = self.types.as_ref().and_then(|types| types.kinds.get(types.default));
        given.unwrap_or(&self.event.weight)
    }

    /// Whether shares are counted in samples, because all samples weigh the same. Otherwise shares
    /// are counted in what samples weigh.
    #[must_use]
    pub fn weighs_evenly(&self) -> bool {
        self.types.is_none() && (self.event.is_clock() || self.event.name.is_empty())
    }

    /// In words, of a total of so many samples: "12 samples of cpu-clock", "4096 page-faults in 12
    /// samples", "4096 bytes of inuse_space", "3 contentions".
    #[must_use]
    pub fn amount(&self, total: u64, samples: u64) -> String {
        let ValueKind { kind, unit } = self.shown_kind();
        match (&self.types, unit.as_str()) {
            (None, _) if self.event.name.is_empty() => format!("{total} samples"),
            (None, _) if self.weighs_evenly() => format!("{total} samples of {}", self.event.name),
            (None, "nanoseconds") => {
                let seconds = total as f64 / 1e9;
                format!("{seconds:.3} s in {samples} samples of {}", self.event.name)
            }
            (None, "count") => format!("{total} {kind} in {samples} samples"),
            (None, unit) => format!("{total} {unit} in {samples} samples of {}", self.event.name),
            (Some(_), "count") => format!("{total} {kind}"),
            (Some(_), unit) => format!("{total} {unit} of {kind}"),
        }
    }
}

impl Profile {
    /// Those that have samples, in their order.
    pub fn sampled_series(&self) -> impl Iterator<Item = SeriesId> + '_ {
        (0..self.series.len() as u32)
            .map(SeriesId)
            .filter(|&id| self.samples_of(id).next().is_some())
    }

    /// The series that is shown where there is room for one: the first that has samples.
    #[must_use]
    pub fn shown(&self) -> SeriesId {
        self.sampled_series().next().unwrap_or(SeriesId(0))
    }

    /// The series with this id. For a profile without series, it is one of which nothing is known.
    #[must_use]
    pub fn series_of(&self, id: SeriesId) -> &Series {
        static NONE: Series = Series {
            event: Event {
                name: String::new(),
                weight: ValueKind { kind: String::new(), unit: String::new() },
                perf: None,
                is_wait: false,
            },
            frequency: 0,
            types: None,
        };
        self.series.get(id.index()).unwrap_or(&NONE)
    }

    /// The samples of a series.
    pub fn samples_of(&self, id: SeriesId) -> impl Iterator<Item = &Sample> + '_ {
        self.samples.iter().filter(move |sample| sample.key.series == id)
    }

    /// What a sample counts for where shares are shown.
    #[must_use]
    pub fn share_of(&self, sample: &Sample) -> u64 {
        let series = self.series_of(sample.key.series);
        let by_count = series.types.is_some() || series.weighs_evenly();
        if by_count { sample.count } else { sample.value }
    }

    /// What all samples of a series count for where shares are shown.
    #[must_use]
    pub fn total_of(&self, id: SeriesId) -> u64 {
        self.samples_of(id).map(|sample| self.share_of(sample)).sum()
    }

    /// How much there is of a series, in words.
    #[must_use]
    pub fn amount_of(&self, id: SeriesId) -> String {
        let samples = self.samples_of(id).map(|sample| sample.count).sum();
        self.series_of(id).amount(self.total_of(id), samples)
    }

    /// How much there is, in words, of each series that has samples.
    #[must_use]
    pub fn amount(&self) -> String {
        let all: Vec<String> = self.sampled_series().map(|id| self.amount_of(id)).collect();
        if all.is_empty() { "0 samples".to_owned() } else { all.join(" + ") }
    }
}
