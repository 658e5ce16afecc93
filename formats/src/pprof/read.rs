//! pprof of any agent, with names or without: `profile.proto`, gzip or plain.
//!
//! Names that came with a profile stay. Code without a name is looked up by build-id like any other
//! code. Values keep their types: a heap profile stays a heap profile.

use std::io::Read;
use std::sync::Arc;

use flate2::read::MultiGzDecoder;
use prost::Message;
use rustc_hash::{FxHashMap, FxHashSet};
use stackwire_model::profile::labels::{Label, LabelValue};
use stackwire_model::profile::{
    Builder, EndReason, Executable, ExecutableId, Line, Location, LocationId, Mapping, Origin,
    Process, ProcessId, SampleKey, SeriesId, Thread, ThreadId, Types, ValueError, is_place,
};

use stackwire_model::{Address, BuildId, Event, FileOffset, KernelAddr, UserAddr, ValueKind};

use super::proto;
use crate::{Host, ReadError};

/// Bytes of a profile, opened: some bytes of it become thirty times as many in memory.
const MAX_BYTES: u64 = 256 << 20;

/// Reads a profile.
///
/// # Errors
/// When it does not decode, refers to something that is not in it, or has values that cannot be
/// added to those before.
pub fn read(
    input: impl Read,
    gzip: bool,
    into: &mut Builder,
    number: usize,
    host: &mut dyn Host,
) -> Result<(), ReadError> {
    let wire = open(input, gzip)?;
    Reader::new(&wire, into, number, host)?.run()
}

/// Decodes a profile that is not too large.
pub(super) fn open(mut input: impl Read, gzip: bool) -> Result<proto::Profile, ReadError> {
    let mut bytes = Vec::new();
    let error = |error: std::io::Error| ReadError::Pprof(error.to_string());
    if gzip {
        MultiGzDecoder::new(input).take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(error)?;
    } else {
        input.by_ref().take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(error)?;
    }
    if bytes.len() as u64 > MAX_BYTES {
        let message = format!("it has more than {} MiB when it is opened", MAX_BYTES >> 20);
        return Err(ReadError::Pprof(message));
    }
    proto::Profile::decode(&*bytes).map_err(|error| ReadError::Pprof(error.to_string()))
}

struct Reader<'a> {
    wire: &'a proto::Profile,
    into: &'a mut Builder,
    host: &'a mut dyn Host,
    /// Build-id of its kernel.
    kernel: Option<BuildId>,
    mappings: FxHashMap<u64, (ExecutableId, &'a proto::Mapping)>,
    locations: FxHashMap<u64, &'a proto::Location>,
    functions: FxHashMap<u64, &'a proto::Function>,
    known: FxHashMap<u64, LocationId>,
    processes: FxHashMap<(u32, String), ProcessId>,
    told: FxHashSet<u64>,
    main: String,
    /// One; or several, of two values each.
    series: Vec<SeriesId>,
}

impl<'a> Reader<'a> {
    fn new(
        wire: &'a proto::Profile,
        into: &'a mut Builder,
        number: usize,
        host: &'a mut dyn Host,
    ) -> Result<Self, ReadError> {
        let mut reader = Self {
            wire,
            into,
            host,
            kernel: None,
            mappings: FxHashMap::default(),
            locations: wire.location.iter().map(|it| (it.id, it)).collect(),
            functions: wire.function.iter().map(|it| (it.id, it)).collect(),
            known: FxHashMap::default(),
            processes: FxHashMap::default(),
            told: FxHashSet::default(),
            main: String::new(),
            series: Vec::new(),
        };
        for mapping in &wire.mapping {
            if is_kernel(reader.text(mapping.filename)?) {
                reader.kernel = reader.text(mapping.build_id)?.parse().ok();
            }
        }
        for mapping in &wire.mapping {
            let executable = reader.executable(mapping)?;
            let executable = reader.into.executable(executable)?;
            reader.mappings.insert(mapping.id, (executable, mapping));
        }
        let main = wire.mapping.first().map(|first| reader.text(first.filename)).transpose()?;
        main.unwrap_or_default()
            .rsplit('/')
            .next()
            .unwrap_or_default()
            .clone_into(&mut reader.main);
        reader.head(number)?;
        Ok(reader)
    }

    fn head(&mut self, number: usize) -> Result<(), ReadError> {
        let wire = self.wire;
        let of = |kind: &proto::ValueType| {
            Ok::<_, ReadError>(ValueKind::new(self.text(kind.r#type)?, self.text(kind.unit)?))
        };
        let kinds: Vec<ValueKind> = wire.sample_type.iter().map(of).collect::<Result<_, _>>()?;
        let default = self.text(wire.default_sample_type)?;
        let default = kinds.iter().position(|it| it.kind == default && !default.is_empty());
        let shown = default.unwrap_or(kinds.len().saturating_sub(1));
        let period_type = wire.period_type.as_ref().map(of).transpose()?;
        let period_type = period_type.unwrap_or_default();
        let counts = [ValueKind::samples(), ValueKind::events()];
        let of = if kinds.first().is_some_and(|it| counts.contains(it)) { 1 } else { shown };
        let event = Event::by_name(kinds.get(of).map_or("", |kind| &kind.kind));
        // Waits are not sampled at a rate.
        let frequency = match (period_type.unit.as_str(), wire.period) {
            ("nanoseconds", period @ 1..) if !event.is_wait => 1_000_000_000 / period,
            _ => 0,
        };
        let frequency = u32::try_from(frequency).unwrap_or(0);
        let comments = wire.comment.iter().map(|&at| self.text(at).map(str::to_owned));
        let comments: Vec<String> = comments.collect::<Result<_, _>>()?;
        self.into.capture(number, Origin::default(), 0);
        let others = self.into.has_other_values();
        if let Some(events) = several(&kinds).filter(|_| !others) {
            let events = events.into_iter().map(|event| (event, frequency));
            self.series = self.into.series(events.collect())?;
        } else {
            let types = Types { default: shown, kinds, period: wire.period, period_type };
            self.series = vec![self.into.series_of(event, frequency, types)?];
        }
        for comment in comments {
            self.into.comment(comment);
        }
        let start = u64::try_from(wire.time_nanos).unwrap_or(0);
        if start > 0 {
            self.into
                .span(start, start.saturating_add(u64::try_from(wire.duration_nanos).unwrap_or(0)));
        }
        Ok(())
    }

    fn run(mut self) -> Result<(), ReadError> {
        let mut taken = 0u64;
        for sample in &self.wire.sample {
            let (thread, process, labels) = self.labels(sample)?;
            let mut locations = Vec::with_capacity(sample.location_id.len());
            for &id in &sample.location_id {
                locations.push(self.location(id, process)?);
            }
            let user = if locations.is_empty() {
                None
            } else {
                Some(self.into.stack(&locations, EndReason::NotSaid)?)
            };
            let key = |series| SampleKey { series, thread, user, kernel: None, labels };
            if let [only] = *self.series {
                taken = taken.saturating_add(self.into.values(key(only), &sample.value)?);
                continue;
            }
            let (values, kinds) = (sample.value.len(), 2 * self.series.len());
            if values != kinds {
                return Err(ValueError::Ragged { values, kinds }.into());
            }
            for (&series, values) in self.series.iter().zip(sample.value.chunks_exact(2)) {
                if values != [0, 0] {
                    taken = taken.saturating_add(self.into.values(key(series), values)?);
                }
            }
        }
        self.into.taken(Some(taken));
        Ok(())
    }

    /// The thread a sample is of, and labels that are nobody's but its own.
    fn labels(&mut self, sample: &proto::Sample) -> Result<(ThreadId, ProcessId, u32), ReadError> {
        let (mut pid, mut tid) = (0, 0);
        let (mut comm, mut thread) = (None, None);
        let mut rest = Vec::new();
        for label in &sample.label {
            let key = self.text(label.key)?;
            let number = u32::try_from(label.num).unwrap_or(0);
            match (key, label.str) {
                ("pid", 0) => pid = number,
                ("tid", 0) => tid = number,
                ("comm", 1..) => comm = Some(self.text(label.str)?.to_owned()),
                ("thread", 1..) => thread = Some(self.text(label.str)?.to_owned()),
                _ => {
                    let value = match label.str {
                        0 => LabelValue::Number(label.num, self.text(label.num_unit)?.to_owned()),
                        text => LabelValue::Text(self.text(text)?.to_owned()),
                    };
                    rest.push(Label { key: key.to_owned(), value });
                }
            }
        }
        let comm = comm.unwrap_or_else(|| self.main.clone());
        let next = self.processes.len() as u32;
        let process = match self.processes.get(&(pid, comm.clone())) {
            Some(&known) => known,
            None => {
                let new =
                    Process { pid, generation: next, comm: comm.clone(), ..Process::default() };
                let id = self.into.process(new)?;
                self.processes.insert((pid, comm.clone()), id);
                id
            }
        };
        let comm = thread.unwrap_or_default();
        let thread = self.into.thread(Thread { process, tid, comm })?;
        Ok((thread, process, self.into.labels(rest)?))
    }

    fn location(&mut self, id: u64, process: ProcessId) -> Result<LocationId, ReadError> {
        let wire = *self.locations.get(&id).ok_or_else(|| undefined("location", id))?;
        let mapping = match wire.mapping_id {
            0 => None,
            of => Some(*self.mappings.get(&of).ok_or_else(|| undefined("mapping", of))?),
        };
        if let Some((executable, mapping)) = mapping
            && self.told.insert(mapping.id)
        {
            self.into.mapping(Mapping {
                process,
                executable,
                start: UserAddr(mapping.memory_start),
                length: mapping.memory_limit.saturating_sub(mapping.memory_start),
                file_offset: FileOffset(mapping.file_offset),
                since_ns: 0,
            })?;
        }
        if let Some(&known) = self.known.get(&id) {
            return Ok(known);
        }
        let mut lines = Vec::with_capacity(wire.line.len());
        for line in &wire.line {
            let function = self.functions.get(&line.function_id);
            let function = *function.ok_or_else(|| undefined("function", line.function_id))?;
            let name = match self.text(function.name)? {
                "" => self.text(function.system_name)?,
                name => name,
            };
            lines.push(Line {
                function: name.into(),
                file: self.text(function.filename)?.into(),
                line: u32::try_from(line.line).unwrap_or(0),
            });
        }
        // Nor is a place in the file a name: there may be one to be found.
        let path = mapping.map(|(_, mapping)| self.text(mapping.filename)).transpose()?;
        let is_place = |name: &str| path.is_some_and(|path| is_place(path, name));
        lines.retain(|line| !line.function.is_empty() && !is_place(&line.function));
        let lines: Arc<[Line]> = Arc::from(lines);
        let inside = mapping.and_then(|(executable, mapping)| {
            let offset = wire.address.checked_sub(mapping.memory_start)?;
            // Who has no limit says 0.
            let fits = wire.address < mapping.memory_limit || mapping.memory_limit == 0;
            let known = !matches!(self.into.executable_of(executable), Executable::Unmapped);
            (fits && known).then(|| (executable, offset.wrapping_add(mapping.file_offset)))
        });
        let found = match inside {
            // Without an address it is its names that tell it apart.
            _ if wire.address == 0 && !lines.is_empty() => {
                let nowhere = self.into.executable(Executable::Names { kernel: false })?;
                self.into.named(nowhere, lines)?
            }
            inside => {
                let location = match inside {
                    Some((executable, number)) => {
                        let address = self.into.executable_of(executable).address(number);
                        Location { executable, process: None, address, seen_ns: 0 }
                    }
                    // Of memory that is no file's, addresses mean something in one process alone.
                    None => Location {
                        executable: self.into.executable(Executable::Unmapped)?,
                        process: Some(process),
                        address: Address::User(UserAddr(wire.address)),
                        seen_ns: 0,
                    },
                };
                if lines.is_empty() {
                    self.into.location(location)?
                } else {
                    self.into.location_named(location, lines)?
                }
            }
        };
        self.known.insert(id, found);
        Ok(found)
    }

    fn executable(&mut self, mapping: &proto::Mapping) -> Result<Executable, ReadError> {
        let path = self.text(mapping.filename)?;
        // What is none counts as unknown: Go writes its own kind there.
        let build_id: Option<BuildId> = self.text(mapping.build_id)?.parse().ok();
        Ok(match path {
            "[vdso]" => {
                Executable::Vdso { image: self.kernel.and_then(|kernel| self.host.vdso(kernel)) }
            }
            _ if is_kernel(path) => {
                let kallsyms =
                    build_id.and_then(|id| self.host.kernel_symbols(id, KernelAddr(0), &[]));
                Executable::Kernel { module: String::new(), build_id, kallsyms }
            }
            "" | "[jit]" | "//anon" | "[unmapped]" => Executable::Unmapped,
            _ => match path.strip_prefix('[').and_then(|path| path.strip_suffix(']')) {
                Some(module) if build_id.is_some() => {
                    Executable::Kernel { module: module.to_owned(), build_id, kallsyms: None }
                }
                _ => Executable::File { path: path.to_owned(), key: build_id.map(Into::into) },
            },
        })
    }

    fn text(&self, index: i64) -> Result<&'a str, ReadError> {
        let found = usize::try_from(index).ok().and_then(|at| self.wire.string_table.get(at));
        match found {
            Some(text) => Ok(text),
            // An empty profile may have an empty table.
            None if index == 0 => Ok(""),
            None => Err(undefined("string", index as u64)),
        }
    }
}

fn is_kernel(path: &str) -> bool {
    matches!(path, "[kernel]" | "[kernel.kallsyms]")
}

fn undefined(what: &str, id: u64) -> ReadError {
    ReadError::Pprof(format!("{what} {id} is not in it"))
}

/// The events of a profile of several series, as `write.rs` calls their values: how many samples,
/// and what they weigh, each.
fn several(kinds: &[ValueKind]) -> Option<Vec<Event>> {
    let (first, others) = kinds.split_first_chunk::<2>()?;
    let event = Event { weight: first[1].clone(), ..Event::by_name(&first[1].kind) };
    if first[0] != event.count() || others.is_empty() || !others.len().is_multiple_of(2) {
        return None;
    }
    let mut events = vec![event];
    for pair in others.chunks_exact(2) {
        let name = pair[0].kind.strip_suffix("_sample").filter(|_| pair[0].unit == "count")?;
        let event = Event::by_name(name);
        // What others weigh, too, has the name of its event.
        let weight = if pair[1].kind == name { event.weight.clone() } else { pair[1].clone() };
        events.push(Event { weight, ..event });
    }
    Some(events)
}

#[cfg(test)]
mod tests {
    use super::*;
    use stackwire_model::profile::Profile;

    /// A program without a build-id, a function at 0x401000 of it, kernel addresses without a
    /// mapping, and two processes with code of their own at one place.
    fn wire(function: &str) -> proto::Profile {
        let strings =
            ["", "samples", "count", "cpu", "nanoseconds", "/opt/none", "pid", "[jit]", function];
        let label = |pid| vec![proto::Label { key: 6, num: pid, ..Default::default() }];
        let sample = |location, pid, count| proto::Sample {
            location_id: vec![location],
            value: vec![count, count * 10],
            label: label(pid),
        };
        let location = |id, mapping_id, address| proto::Location {
            id,
            mapping_id,
            address,
            ..Default::default()
        };
        let mapping = |id, memory_start, filename| proto::Mapping {
            id,
            memory_start,
            memory_limit: memory_start + 0x1000,
            filename,
            ..Default::default()
        };
        let named = proto::Location {
            line: vec![proto::Line { function_id: 1, line: 7, ..Default::default() }],
            ..location(1, 1, 0x40_1000)
        };
        proto::Profile {
            sample_type: vec![
                proto::ValueType { r#type: 1, unit: 2 },
                proto::ValueType { r#type: 3, unit: 4 },
            ],
            sample: vec![
                sample(1, 10, 1),
                sample(2, 10, 2),
                sample(3, 10, 4),
                sample(4, 10, 8),
                sample(5, 11, 16),
            ],
            mapping: vec![mapping(1, 0x40_1000, 5), mapping(2, 0x7000, 7), mapping(3, 0x9000, 7)],
            location: vec![
                named,
                location(2, 0, 0xffff_ffff_8100_0010),
                location(3, 0, 0xffff_ffff_8199_9990),
                location(4, 2, 0x7010),
                location(5, 3, 0x9010),
            ],
            function: vec![proto::Function { id: 1, name: 8, ..Default::default() }],
            string_table: strings.map(str::to_owned).to_vec(),
            ..Default::default()
        }
    }

    fn read_all(profiles: &[proto::Profile]) -> Result<Profile, ReadError> {
        let mut into = Builder::new();
        for (number, wire) in profiles.iter().enumerate() {
            let bytes = wire.encode_to_vec();
            read(&*bytes, false, &mut into, number, &mut crate::Elsewhere)?;
        }
        Ok(into.build())
    }

    #[test]
    fn what_is_apart_stays_apart() {
        let profile = read_all(&[wire("one"), wire("two")]).unwrap();
        assert_eq!(profile.sample_count(), 62);
        let mut names: Vec<_> = profile.given.values().map(|lines| &*lines[0].function).collect();
        names.sort_unstable();
        assert_eq!(names, ["one", "two"], "two builds of one path");
        let unmapped: Vec<_> = profile
            .locations
            .iter()
            .filter(|it| it.process.is_some())
            .map(|it| it.address.number())
            .collect();
        let expected = [0xffff_ffff_8100_0010, 0xffff_ffff_8199_9990, 0x7010, 0x9010];
        assert_eq!(unmapped, [expected, expected].concat(), "addresses are kept");
    }

    #[test]
    fn a_place_in_a_file_is_no_name() {
        let given = |name: &str| read_all(&[wire(name)]).unwrap().given.len();
        assert_eq!((given("none+0x1000"), given("none+0xg"), given("other+0x1000")), (0, 1, 1));
    }

    #[test]
    fn several_series_are_read_as_they_were_written() {
        let mut two = wire("x");
        two.string_table.extend(["faults_sample", "faults"].map(str::to_owned));
        two.sample_type
            .extend([(9, 2), (10, 2)].map(|(r#type, unit)| proto::ValueType { r#type, unit }));
        for (index, sample) in two.sample.iter_mut().enumerate() {
            // The last two are of the second series, the first of both.
            match index {
                0 => sample.value.extend([3, 30]),
                1 | 2 => sample.value.extend([0, 0]),
                _ => sample.value.splice(..0, [0, 0]).for_each(drop),
            }
        }
        let profile = read_all(&[two.clone()]).unwrap();
        // 1 + 2 + 4, and 30 + 80 + 160 in 3 + 8 + 16.
        assert_eq!(profile.amount(), "7 samples of cpu + 270 faults in 27 samples");
        two.sample[1].value.pop();
        let error = read_all(&[two]).unwrap_err().to_string();
        assert!(error.contains("3 values of 4 kinds"), "{error}");
    }

    #[test]
    fn values_that_cannot_be_added_are_refused() {
        let mut negative = wire("x");
        negative.sample[0].value[0] = -1;
        let mut short = wire("x");
        short.sample[0].value.pop();
        let mut other = wire("x");
        other.string_table[4] = "microseconds".to_owned();
        for (profiles, why) in [
            (vec![negative], "negative"),
            (vec![short], "1 values of 2 kinds"),
            (vec![wire("x"), other.clone()], "cannot be added"),
            (vec![other, wire("x")], "cannot be added"),
        ] {
            let error = read_all(&profiles).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
