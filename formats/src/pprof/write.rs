//! pprof: gzip of `profile.proto`, leaf first, all inlined functions in one Location, addresses
//! inside their mappings. Equal profiles give equal bytes.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

use bytestring::ByteString;
use flate2::{Compression, GzBuilder};
use prost::Message;
use rustc_hash::FxHashMap;
use stackwire_model::ValueKind;
use stackwire_model::profile::labels::LabelValue;
use stackwire_model::profile::{
    Line, LocationId, Missing, Named, Profile, Resolution, Series, SeriesId, StackId,
};

use super::mappings::{Mappings, Strings};
use super::proto;
use crate::{folded, plain};

/// What is written besides the profile.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// `key=value` comments.
    pub tags: Vec<String>,
    /// Without names: addresses and build-ids alone.
    pub unsymbolized: bool,
    /// Which series.
    pub part: Part,
}

/// Which series of a profile are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    /// All.
    #[default]
    All,
    /// Time that threads wait.
    Waits,
    /// All but that.
    Sampled,
}

impl Part {
    /// Whether it has the samples of a series.
    #[must_use]
    pub fn has(self, series: &Series) -> bool {
        match self {
            Self::All => true,
            Self::Waits => series.event.is_wait,
            Self::Sampled => !series.event.is_wait,
        }
    }
}

/// Writes the profile.
///
/// # Errors
/// Those of the writer.
pub fn write(profile: Named<'_>, options: &Options, out: impl Write) -> io::Result<()> {
    let message = build(profile, options).encode_to_vec();
    // No name and no time in the header: nothing that is not in the stream. Level 1 of zlib-rs is
    // no faster by much, and its files are a sixth larger.
    let mut out = GzBuilder::new().mtime(0).write(out, Compression::new(2));
    out.write_all(&message)?;
    out.finish()?.flush()
}

fn build(profile: Named<'_>, options: &Options) -> proto::Profile {
    let mut writer = Writer::new(profile, options);
    let kinds = writer.columns.kinds.clone();
    let sample_type = kinds.iter().map(|kind| writer.value_type(kind)).collect();
    let of_part = |id: SeriesId| options.part.has(profile.series_of(id));
    let samples = profile.samples.iter().enumerate();
    let samples = samples.filter(|(_, sample)| of_part(sample.key.series));
    let samples = samples.map(|(index, sample)| writer.sample(index, sample)).collect();
    let first = profile.sampled_series().find(|&id| of_part(id));
    let first = first.unwrap_or_else(|| profile.shown());
    let shown = profile.series_of(first);
    let default = writer.columns.shown(first, shown);
    let default_sample_type = writer.value_type(&default).r#type;
    let (period_type, period) = match &shown.types {
        Some(types) => (types.period_type.clone(), types.period),
        None => {
            let weight = shown.event.weight.clone();
            let period = match (shown.frequency, weight.unit.as_str()) {
                (frequency @ 1.., "nanoseconds") => 1_000_000_000 / i64::from(frequency),
                _ => 1,
            };
            (weight, period)
        }
    };
    let period_type = writer.value_type(&period_type);
    let comments = comments(profile, options);
    let comment = comments.iter().map(|comment| writer.strings.index(comment)).collect();
    proto::Profile {
        sample_type,
        sample: samples,
        mapping: writer.mappings.list,
        location: writer.locations,
        function: writer.functions,
        time_nanos: profile.start_ns as i64,
        duration_nanos: profile.duration_ns as i64,
        period_type: Some(period_type),
        period,
        comment,
        default_sample_type,
        string_table: writer.strings.table,
        ..proto::Profile::default()
    }
}

/// For each executable, how good its names are and where they are from, or why there are none.
fn coverage(profile: Named<'_>) -> Vec<String> {
    // By locations and not by samples, which a reader can weigh himself.
    let mut found: Vec<BTreeMap<Cow<'_, str>, usize>> =
        vec![BTreeMap::new(); profile.executables.len()];
    for (location, resolution) in profile.locations.iter().zip(&profile.names.resolutions) {
        let what = match resolution {
            Resolution::Found { quality, .. } => Cow::Borrowed(quality.text()),
            Resolution::Missing(missing) => Cow::Owned(missing.reason.to_string()),
        };
        *found[location.executable.index()].entry(what).or_default() += 1;
    }
    let used = found.into_iter().enumerate().filter(|(_, found)| !found.is_empty());
    used.map(|(index, found)| {
        let found: Vec<_> = found.iter().map(|(what, count)| format!("{what} {count}")).collect();
        let mut parts =
            vec![format!("{}: {}", profile.executables[index].name(), found.join(", "))];
        parts.extend(crate::report::sources(profile, index));
        plain(&format!("symbols of {}", parts.join("; ")))
    })
    .collect()
}

/// Tags, then what a reader must know to believe the numbers.
fn comments(profile: Named<'_>, options: &Options) -> Vec<String> {
    let origin = &profile.origin;
    let mut comments = options.tags.clone();
    if !origin.hostname.is_empty() {
        comments.push(format!(
            "host {}, kernel {} {}",
            origin.hostname, origin.kernel_release, origin.machine
        ));
    }
    if profile.series.iter().all(|series| series.types.is_none()) {
        comments.push(match profile.taken {
            Some(taken) => format!(
                "samples taken {taken}, in this profile {}, {}lost {}",
                profile.sample_count(),
                match profile.left_out {
                    0 => String::new(),
                    count => format!("left out {count}, "),
                },
                profile.lost_samples()
            ),
            None => format!(
                "samples in this profile {}, lost {} and those of the missing parts",
                profile.sample_count(),
                profile.lost_samples()
            ),
        });
    }
    let lost = profile.lost.iter();
    comments.extend(lost.map(|(reason, (count, _))| format!("lost {count} {}", reason.text())));
    comments.extend(profile.notes.iter().cloned());
    comments.extend(profile.comments.iter().cloned());
    if !options.unsymbolized {
        comments.extend(coverage(profile));
    }
    comments
}

struct Writer<'a> {
    profile: Named<'a>,
    unsymbolized: bool,
    strings: Strings,
    mappings: Mappings,
    locations: Vec<proto::Location>,
    location_ids: FxHashMap<LocationId, u64>,
    functions: Vec<proto::Function>,
    function_ids: HashMap<(u64, ByteString, ByteString), u64>,
    /// Texts of labels that are stacks, by their user part and kernel part.
    stack_labels: FxHashMap<(Option<StackId>, Option<StackId>), i64>,
    columns: Columns,
}

/// What the values of samples are: those of each series have their own, and are 0 in all others.
#[derive(Default)]
struct Columns {
    kinds: Vec<ValueKind>,
    /// By series: its first.
    first: Vec<usize>,
}

impl Columns {
    fn of(profile: &Profile, part: Part) -> Self {
        let mut columns = Self::default();
        for series in &profile.series {
            if !part.has(series) {
                // None of its own; no sample of it is written.
                columns.first.push(columns.kinds.len());
                continue;
            }
            // As perf_to_profile calls them, where there are several.
            let count = match columns.kinds.as_slice() {
                [] => series.event.count(),
                _ => ValueKind::new(&format!("{}_sample", series.event.name), "count"),
            };
            columns.first.push(columns.kinds.len());
            // A kind that is there twice is none for readers.
            let mut weight = series.event.weight.clone();
            if columns.kinds.contains(&weight) {
                weight.kind.clone_from(&series.event.name);
            }
            match &series.types {
                Some(types) => columns.kinds.extend_from_slice(&types.kinds),
                None => columns.kinds.extend([count, weight]),
            }
        }
        columns
    }

    /// What is shown of a series unless told otherwise.
    fn shown(&self, id: SeriesId, series: &Series) -> ValueKind {
        let value = series.types.as_ref().map_or(1, |types| types.default);
        let first = self.first.get(id.index()).copied().unwrap_or(0);
        self.kinds.get(first + value).cloned().unwrap_or_default()
    }
}

impl<'a> Writer<'a> {
    fn new(profile: Named<'a>, options: &Options) -> Self {
        let mut strings = Strings::default();
        strings.index("");
        let mappings = Mappings::plan(&profile, &mut strings);
        Self {
            profile,
            unsymbolized: options.unsymbolized,
            strings,
            mappings,
            locations: Vec::new(),
            location_ids: FxHashMap::default(),
            functions: Vec::new(),
            function_ids: HashMap::new(),
            stack_labels: FxHashMap::default(),
            columns: Columns::of(&profile, options.part),
        }
    }

    fn value_type(&mut self, of: &ValueKind) -> proto::ValueType {
        proto::ValueType {
            r#type: self.strings.index(&of.kind),
            unit: self.strings.index(&of.unit),
        }
    }

    fn sample(&mut self, index: usize, sample: &stackwire_model::profile::Sample) -> proto::Sample {
        let profile = self.profile;
        let location_id =
            profile.frames(sample.key).map(|location| self.location(location)).collect();
        let thread = &profile.threads[sample.key.thread.index()];
        let process = &profile.processes[thread.process.index()];
        let mut label = Vec::with_capacity(5 + process.labels.len());
        // What came from elsewhere may have no process.
        if process.pid != 0 || !process.comm.is_empty() {
            label.push(self.text_label("comm", &process.comm));
        }
        let types = &profile.series_of(sample.key.series).types;
        if types.is_none() || process.pid != 0 {
            label.push(self.number_label("pid", process.pid));
            label.push(self.text_label("thread", &thread.comm));
            label.push(self.number_label("tid", thread.tid));
        }
        if process.host_pid != 0 {
            label.push(self.number_label("host_pid", process.host_pid));
        }
        label.extend(process.labels.iter().map(|(key, value)| self.text_label(key, value)));
        let given = sample.key.labels.checked_sub(1).map(|at| &profile.label_sets[at as usize]);
        for found in given.into_iter().flatten() {
            label.push(match &found.value {
                // It has no addresses to be named elsewhere.
                LabelValue::Stack { .. } if self.unsymbolized => continue,
                LabelValue::Text(text) => self.text_label(&found.key, text),
                LabelValue::Stack { user, kernel } => self.stack_label(&found.key, *user, *kernel),
                LabelValue::Number(num, unit) => proto::Label {
                    key: self.strings.index(&found.key),
                    str: 0,
                    num: *num,
                    num_unit: self.strings.index(unit),
                },
            });
        }
        let of_captured = [sample.count as i64, sample.value as i64];
        let own = match types {
            Some(_) => profile.values.get(index).map_or(&[][..], Vec::as_slice),
            None => &of_captured,
        };
        let mut value = vec![0; self.columns.kinds.len()];
        let columns = value
            .iter_mut()
            .skip(self.columns.first.get(sample.key.series.index()).copied().unwrap_or(0));
        columns.zip(own).for_each(|(column, own)| *column = *own);
        proto::Sample { location_id, value, label }
    }

    fn text_label(&mut self, key: &str, text: &str) -> proto::Label {
        // An empty string would read as a number of 0.
        let text = if text.is_empty() { "?".to_owned() } else { plain(text) };
        let (key, str) = (self.strings.index(key), self.strings.index(&text));
        proto::Label { key, str, ..proto::Label::default() }
    }

    fn stack_label(
        &mut self,
        key: &str,
        user: Option<StackId>,
        kernel: Option<StackId>,
    ) -> proto::Label {
        if let Some(&str) = self.stack_labels.get(&(user, kernel)) {
            return proto::Label { key: self.strings.index(key), str, ..proto::Label::default() };
        }
        let label = self.text_label(key, &folded::stack(self.profile, user, kernel));
        self.stack_labels.insert((user, kernel), label.str);
        label
    }

    fn number_label(&mut self, key: &str, number: u32) -> proto::Label {
        let key = self.strings.index(key);
        proto::Label { key, num: number.into(), ..proto::Label::default() }
    }

    fn location(&mut self, id: LocationId) -> u64 {
        if let Some(&known) = self.location_ids.get(&id) {
            return known;
        }
        let (mapping, address) = self.mappings.place(&self.profile, id);
        let resolution = self.profile.names.resolutions.get(id.index());
        let unnamed;
        let (lines, named) = match resolution {
            _ if self.unsymbolized => (&[][..], false),
            Some(Resolution::Found { lines, .. }) => (&lines[..], true),
            // One row a function, though nobody knows what it is called.
            Some(Resolution::Missing(Missing { start: Some(_), .. })) => {
                unnamed = self.profile.lines(id);
                (&unnamed[..], false)
            }
            _ => (&[][..], false),
        };
        if let Some(mapping) = mapping.filter(|_| named) {
            let mapping = &mut self.mappings.list[mapping as usize - 1];
            mapping.has_functions |= !lines.is_empty();
            mapping.has_filenames |= lines.iter().any(|line| !line.file.is_empty());
            mapping.has_line_numbers |= lines.iter().any(|line| line.line != 0);
            mapping.has_inline_frames |= lines.len() > 1;
        }
        let mapping_id = mapping.unwrap_or(0);
        let line = lines.iter().map(|line| self.line(mapping_id, line)).collect();
        let new = self.locations.len() as u64 + 1;
        self.locations.push(proto::Location {
            id: new,
            mapping_id,
            address,
            line,
            is_folded: false,
        });
        self.location_ids.insert(id, new);
        new
    }

    fn line(&mut self, mapping: u64, line: &Line) -> proto::Line {
        let key = (mapping, line.function.clone(), line.file.clone());
        let next = self.functions.len() as u64 + 1;
        let function_id = *self.function_ids.entry(key).or_insert(next);
        if function_id == next {
            let name = self.strings.index(&line.function);
            let filename = self.strings.index(&line.file);
            // Without a system name, readers take this name as it is. From a name they take for
            // mangled they cut off everything in brackets: `<Apple as Eat>` of
            // `<Apple as Eat>::eat`.
            let function = proto::Function { id: next, name, filename, ..Default::default() };
            self.functions.push(function);
        }
        proto::Line { function_id, line: line.line.into(), ..Default::default() }
    }
}
