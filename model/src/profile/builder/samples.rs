//! Samples and their values, added up by what they share.

use super::{Builder, Full, MAX_ENTRIES};
use crate::profile::labels::{Label, LabelValue};
use crate::profile::{Moment, Sample, SampleKey, Series, SeriesId, Types};
use crate::{Event, ValueKind};

/// Most samples, most weight of all of them, and most frames of them: sums of them are not checked
/// again. 2^62 ns are 146 years.
const MAX_TOTAL: u64 = 1 << 62;

/// Values that cannot be taken.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ValueError {
    /// There are none.
    #[error("its samples have no values")]
    None,
    /// They are of other kinds.
    #[error("its values ({new}) cannot be added to those before ({known})")]
    Others {
        /// What they are.
        new: String,
        /// What those before are.
        known: String,
    },
    /// A profile has no negative ones.
    #[error("a value is negative: it is the difference of two profiles")]
    Negative,
    /// A sample has too few, or too many.
    #[error("a sample has {values} values of {kinds} kinds")]
    Ragged {
        /// It has so many.
        values: usize,
        /// It should have so many.
        kinds: usize,
    },
    /// No sample fits any more.
    #[error(transparent)]
    Full(#[from] Full),
}

/// How a sample was taken.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// How many events it stands for, at most [`Moment::MOST_EVENTS`].
    pub count: u64,
    /// Its weight, in the unit of its event.
    pub value: u64,
    /// When, nanoseconds since the Unix epoch, if known.
    pub time_ns: Option<u64>,
    /// On which CPU, if known.
    pub cpu: Option<u32>,
}

impl Builder {
    /// Adds one sample.
    pub fn sample(&mut self, key: SampleKey, taken: Taken) -> Result<(), Full> {
        let Taken { count, value, time_ns, cpu } = taken;
        let count = count.min(Moment::MOST_EVENTS);
        let mut key = key;
        if let Some(cpu) = cpu.filter(|_| self.by_cpu) {
            let value = LabelValue::Number(cpu.into(), String::new());
            let given = key.labels.checked_sub(1).map(|at| &self.profile.label_sets[at as usize]);
            let mut labels = given.cloned().unwrap_or_default();
            labels.push(Label { key: "cpu".to_owned(), value });
            key.labels = self.labels(labels)?;
        }
        let id = self.add(key, count, value)?;
        if let Some(time_ns) = time_ns.filter(|_| self.timeline) {
            let cpu = cpu.unwrap_or(0);
            if self.profile.timeline.len() >= MAX_ENTRIES {
                return Err(Full("samples"));
            }
            self.profile.timeline.push(Moment::new(time_ns, value, id, cpu, count));
        }
        Ok(())
    }

    /// Adds samples of which no time is known, with their weight.
    pub fn weighted(&mut self, key: SampleKey, count: u64, value: u64) -> Result<(), Full> {
        self.add(key, count, value).map(|_| ())
    }

    fn add(&mut self, key: SampleKey, count: u64, value: u64) -> Result<u32, Full> {
        self.lacks_cpu_times |= !self.knows_cpu_times;
        let table = &mut self.profile.samples;
        let new = |key| Sample { key, count: 0, value: 0 };
        let id = self.samples.intern(table, key, |sample| &sample.key, new, "samples")?;
        // Single samples, which is what comes from a kernel, never have as many frames.
        let frames = if count > 1 { self.profile.frames(key).count() as u64 } else { 0 };
        let more = [count, value, count.saturating_mul(frames)];
        let total = std::array::from_fn(|of| self.total[of].saturating_add(more[of]));
        if total.into_iter().any(|sum| sum > MAX_TOTAL) {
            return Err(Full("samples, or time or frames of them,"));
        }
        self.total = total;
        let sample = &mut self.profile.samples[id as usize];
        sample.count += count;
        sample.value += value;
        Ok(id)
    }

    /// The series for an event whose samples have these values, as another program took them.
    /// Samples of CPU time get an ordinary series, as in all profiles.
    pub fn series_of(
        &mut self,
        event: Event,
        frequency: u32,
        types: Types,
    ) -> Result<SeriesId, ValueError> {
        let shown = |types: &Types| {
            types.kinds.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
        };
        if types.kinds.is_empty() {
            return Err(ValueError::None);
        }
        let cycles = ValueKind::new("cycles", "cycles");
        let is_cpu_time = types.kinds.len() == 2
            && types.kinds[0] == ValueKind::samples()
            && [ValueKind::cpu(), cycles].contains(&types.kinds[1]);
        let mut all = self.profile.series.iter().zip(0..);
        let known = all.find_map(|(series, id)| Some((series.types.as_ref()?, SeriesId(id))));
        match (known, is_cpu_time) {
            (None, true) => Ok(self.series(vec![(event, frequency)])?[0]),
            (Some((known, id)), false) if known.kinds == types.kinds => Ok(id),
            (None, false) if self.profile.samples.is_empty() => {
                self.profile.series.push(Series { event, frequency, types: Some(types) });
                Ok(SeriesId(self.profile.series.len() as u32 - 1))
            }
            (known, _) => {
                let known = known
                    .map_or("samples/count, cpu/nanoseconds".to_owned(), |(known, _)| shown(known));
                Err(ValueError::Others { new: shown(&types), known })
            }
        }
    }

    /// Adds a sample with the values of its series, and tells what it counts for.
    pub fn values(&mut self, key: SampleKey, values: &[i64]) -> Result<u64, ValueError> {
        if values.iter().any(|value| *value < 0) {
            return Err(ValueError::Negative);
        }
        let positive = |index: usize| values.get(index).map_or(0, |value| *value as u64);
        let types = self.profile.series[key.series.index()].types.as_ref();
        let (kinds, default) = types.map_or((2, 0), |types| (types.kinds.len(), types.default));
        if values.len() != kinds {
            return Err(ValueError::Ragged { values: values.len(), kinds });
        }
        if types.is_none() {
            self.add(key, positive(0), positive(1))?;
            return Ok(positive(0));
        }
        let id = self.add(key, positive(default), 0)? as usize;
        let all = &mut self.profile.values;
        if all.len() <= id {
            all.resize(id + 1, vec![0; kinds]);
        }
        for (sum, value) in all[id].iter_mut().zip(values) {
            *sum = sum.saturating_add(*value);
        }
        Ok(positive(default))
    }

    /// Whether values are no samples of CPU time.
    #[must_use]
    pub fn has_other_values(&self) -> bool {
        self.profile.series.iter().any(|series| series.types.is_some())
    }

    /// Keeps each sample with its time and CPU, 24 bytes each.
    pub fn keep_timeline(&mut self) {
        self.timeline = true;
    }

    /// Gives each sample its CPU as a label.
    pub fn label_cpus(&mut self) {
        self.by_cpu = true;
    }
}
