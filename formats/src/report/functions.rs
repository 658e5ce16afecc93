//! Functions of a series, and what of it is spent in each. Called by the report and comparisons.

use std::collections::{BTreeMap, HashMap};

use bytestring::ByteString;
use stackwire_model::profile::{Line, LocationId, Named, Sample, SeriesId};

/// Samples of a function.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    /// In it.
    pub own: u64,
    /// In it or in what it called.
    pub all: u64,
}

/// Functions of a series, by name and file name of what they lie in.
pub(crate) fn functions(
    profile: Named<'_>,
    series: SeriesId,
    weight: impl Fn(&Sample) -> u64,
) -> BTreeMap<(ByteString, String), Counts> {
    // Names are compared once a location, not once a frame of each sample.
    let mut numbers: HashMap<(ByteString, String), usize> = HashMap::new();
    let mut number_of = |function, module: &str| {
        let next = numbers.len();
        *numbers.entry((function, module.to_owned())).or_insert(next)
    };
    let of_location = profile.locations.iter().enumerate().map(|(index, location)| {
        let executable = &profile.executables[location.executable.index()];
        let name = executable.name();
        let lines = profile.lines(LocationId(index as u32)).into_iter();
        let number = |line: Line| {
            // Functions of an interpreter lie in a source file and in no other.
            let is_named = executable.is_code() && !line.file.is_empty();
            let path = if is_named { &*line.file } else { &name };
            number_of(line.function.clone(), path.rsplit('/').next().unwrap_or_default())
        };
        lines.map(number).collect()
    });
    let of_location: Vec<Vec<usize>> = of_location.collect();
    let mut counts = vec![Counts::default(); numbers.len()];
    // The sample each was last counted for: a function that calls itself counts once.
    let mut counted = vec![usize::MAX; numbers.len()];
    for (index, sample) in profile.samples_of(series).enumerate() {
        let share = weight(sample);
        let mut frames =
            profile.frames(sample.key).flat_map(|at| &of_location[at.index()]).peekable();
        if let Some(&&leaf) = frames.peek() {
            counts[leaf].own += share;
        }
        for &function in frames {
            if counted[function] != index {
                counted[function] = index;
                counts[function].all += share;
            }
        }
    }
    let found = numbers.into_iter().map(|(name, number)| (name, counts[number]));
    found.filter(|(_, counts)| counts.all > 0).collect()
}
