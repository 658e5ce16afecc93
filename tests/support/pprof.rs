//! Profiles, from their protobuf by a decoder of the tests' own; and as `go tool pprof -raw` prints
//! them, another reader.

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;
use std::process::Command;

use prost::Message;

/// A frame: functions inlined into each other, innermost first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) address: u64,
    pub(crate) mapping: u64,
    /// Function, file, line.
    pub(crate) lines: Vec<(String, String, u64)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sample {
    pub(crate) count: u64,
    pub(crate) value: u64,
    /// All, by [`Pprof::kinds`].
    pub(crate) values: Vec<u64>,
    /// Leaf first.
    pub(crate) locations: Vec<u64>,
    pub(crate) labels: HashMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) start: u64,
    pub(crate) limit: u64,
    pub(crate) offset: u64,
    pub(crate) file: String,
    pub(crate) build_id: String,
}

/// A profile.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pprof {
    pub(crate) samples: Vec<Sample>,
    pub(crate) locations: HashMap<u64, Location>,
    pub(crate) mappings: HashMap<u64, Mapping>,
    pub(crate) period: i64,
    /// Nanoseconds since 1970. 0 of one that was read as text.
    pub(crate) start: i64,
    /// Nanoseconds, likewise.
    pub(crate) duration: i64,
    /// Kind and unit of each value, as "cpu/nanoseconds".
    pub(crate) kinds: Vec<String>,
    /// None of one that was read as text.
    pub(crate) comments: Vec<String>,
}

/// Runs `go tool pprof` and returns what it prints.
#[track_caller]
pub(crate) fn go(arguments: &[&str], files: &[&Path]) -> String {
    let home = tempfile::tempdir().unwrap();
    let output = Command::new("go")
        .args(["tool", "pprof"])
        .args(arguments)
        .args(files)
        .env("HOME", home.path())
        .env("PPROF_TMPDIR", home.path())
        // From Go 1.26 on it is built when it is asked for, and kept there.
        .env("GOCACHE", super::test_cache().join("gocache/pprof"))
        .output()
        .expect("go is installed by tests/setup.sh");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "go tool pprof {arguments:?}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

/// The bytes in a compressed profile.
#[track_caller]
pub(crate) fn unpack(path: &Path) -> Vec<u8> {
    let file = std::fs::File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut bytes = Vec::new();
    flate2::read::MultiGzDecoder::new(file).read_to_end(&mut bytes).unwrap();
    bytes
}

fn hex(text: &str) -> u64 {
    u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap()
}

impl Pprof {
    #[track_caller]
    pub(crate) fn read(path: &Path) -> Self {
        let wire = wire::Profile::decode(&*unpack(path)).unwrap();
        let text = |at: i64| wire.string_table[at as usize].clone();
        let functions: HashMap<u64, &wire::Function> =
            wire.function.iter().map(|function| (function.id, function)).collect();
        let samples = wire.sample.iter().map(|sample| {
            let label = |label: &wire::Label| {
                let value = if label.str != 0 { text(label.str) } else { label.num.to_string() };
                (text(label.key), value)
            };
            Sample {
                count: sample.value[0] as u64,
                value: sample.value.get(1).copied().unwrap_or(0) as u64,
                values: sample.value.iter().map(|value| *value as u64).collect(),
                locations: sample.location_id.clone(),
                labels: sample.label.iter().map(label).collect(),
            }
        });
        let locations = wire.location.iter().map(|location| {
            let line = |line: &wire::Line| {
                let function = functions[&line.function_id];
                (text(function.name), text(function.filename), line.line as u64)
            };
            let lines = location.line.iter().map(line).collect();
            let (address, mapping) = (location.address, location.mapping_id);
            (location.id, Location { address, mapping, lines })
        });
        let mappings = wire.mapping.iter().map(|mapping| {
            let of = Mapping {
                start: mapping.memory_start,
                limit: mapping.memory_limit,
                offset: mapping.file_offset,
                file: text(mapping.filename),
                build_id: text(mapping.build_id),
            };
            (mapping.id, of)
        });
        Self {
            samples: samples.collect(),
            locations: locations.collect(),
            mappings: mappings.collect(),
            period: wire.period,
            start: wire.time_nanos,
            duration: wire.duration_nanos,
            kinds: wire
                .sample_type
                .iter()
                .map(|kind| format!("{}/{}", text(kind.r#type), text(kind.unit)))
                .collect(),
            comments: wire.comment.iter().map(|comment| text(*comment)).collect(),
        }
    }

    /// The same, as `go tool pprof` reads it.
    #[track_caller]
    pub(crate) fn read_by_go(path: &Path) -> Self {
        Self::parse(&go(&["-raw"], &[path]))
    }

    fn parse(text: &str) -> Self {
        let mut profile = Self::default();
        let mut section = "";
        let mut last = 0;
        for line in text.lines() {
            match line.trim_end() {
                "Samples:" | "Locations" | "Mappings" => {
                    section = line.trim_end();
                    continue;
                }
                _ => {}
            }
            match section {
                "Samples:"
                    if ["samples/count", "events/count"].iter().any(|it| line.contains(it)) =>
                {
                    profile.kinds = line.split_whitespace().map(str::to_owned).collect();
                }
                "Samples:" => profile.sample(line),
                "Locations" => profile.location(line, &mut last),
                "Mappings" => profile.mapping(line),
                _ => {
                    if let Some(period) = line.strip_prefix("Period: ") {
                        profile.period = period.parse().unwrap();
                    }
                }
            }
        }
        profile
    }

    /// `   1   1003009: 4 5 6`, then lines of labels `comm:[x] thread:[y]` or `pid:[7] tid:[8]`.
    fn sample(&mut self, line: &str) {
        if let Some((values, locations)) = line.split_once(": ").filter(|_| !line.contains(":[")) {
            let values: Vec<u64> =
                values.split_whitespace().map(|value| value.parse().unwrap()).collect();
            self.samples.push(Sample {
                count: values[0],
                value: values[1],
                values,
                locations: locations.split_whitespace().map(|id| id.parse().unwrap()).collect(),
                labels: HashMap::new(),
            });
        } else if let Some(sample) = self.samples.last_mut() {
            for label in line.trim().split("] ") {
                if let Some((key, value)) = label.split_once(":[") {
                    sample.labels.insert(key.to_owned(), value.trim_end_matches(']').to_owned());
                }
            }
        }
    }

    /// `   12: 0x1234 M=1 function /file.c:12:0 s=0` (up to Go 1.22 without the column), then lines
    /// of what it is inlined into.
    fn location(&mut self, line: &str, last: &mut u64) {
        let mut rest = line.trim();
        if let Some((id, tail)) =
            rest.split_once(": 0x").filter(|(id, _)| id.parse::<u64>().is_ok())
        {
            *last = id.parse().unwrap();
            let mut words = tail.splitn(2, ' ');
            let address = hex(words.next().unwrap());
            rest = words.next().unwrap_or("").trim();
            let mut mapping = 0;
            if let Some(tail) = rest.strip_prefix("M=") {
                let mut words = tail.splitn(2, ' ');
                mapping = words.next().unwrap().parse().unwrap();
                rest = words.next().unwrap_or("").trim();
            }
            self.locations.insert(*last, Location { address, mapping, lines: Vec::new() });
        }
        // `function file:line s=start`; the file may be missing, the function may hold spaces.
        let Some((place, _)) = rest.rsplit_once(" s=") else { return };
        let (function, at) = place.rsplit_once(' ').unwrap_or((place, ""));
        let number = |text: &str| text.parse::<u64>().ok();
        let last_number = |text: &str| {
            text.rsplit_once(':').and_then(|(rest, last)| Some((rest.to_owned(), number(last)?)))
        };
        let (file, line) = last_number(at).unwrap_or_default();
        let (file, number) = match last_number(&file) {
            Some((file, before_column)) => (file, before_column),
            None => (file, line),
        };
        let location = self.locations.get_mut(last).unwrap();
        location.lines.push((function.to_owned(), file, number));
    }

    /// `1: 0x1000/0x2000/0x0 /path build-id [FN][FL]`.
    fn mapping(&mut self, line: &str) {
        let Some((id, rest)) = line.split_once(": 0x") else { return };
        let mut words = rest.split_whitespace();
        let mut range = words.next().unwrap().split('/').map(hex);
        self.mappings.insert(
            id.trim().parse().unwrap(),
            Mapping {
                start: range.next().unwrap(),
                limit: range.next().unwrap(),
                offset: range.next().unwrap(),
                file: words.next().unwrap_or("").to_owned(),
                build_id: words.next().unwrap_or("").to_owned(),
            },
        );
    }

    pub(crate) fn count(&self) -> u64 {
        self.samples.iter().map(|sample| sample.count).sum()
    }

    /// Functions of a sample, leaf first, inlined ones included.
    pub(crate) fn functions<'a>(&'a self, sample: &'a Sample) -> Vec<&'a str> {
        let lines = sample.locations.iter().flat_map(|id| &self.locations[id].lines);
        lines.map(|(function, ..)| function.as_str()).collect()
    }

    /// Share of the samples whose leaf is in `function`, in percent. What the kernel does on top of
    /// a program is its own: beside a busy neighbour it handles interrupts of others there.
    pub(crate) fn share_of(&self, function: &str) -> f64 {
        let leaf = |sample: &&Sample| {
            let user = sample.locations.iter().find(|id| self.file_of(**id) != "[kernel]");
            let lines = user.and_then(|id| self.locations[id].lines.first());
            lines.is_some_and(|(leaf, ..)| leaf == function)
        };
        let count: u64 = self.samples.iter().filter(leaf).map(|sample| sample.count).sum();
        count as f64 * 100.0 / self.count() as f64
    }

    /// The file a location lies in.
    pub(crate) fn file_of(&self, location: u64) -> &str {
        self.mappings.get(&self.locations[&location].mapping).map_or("", |mapping| &mapping.file)
    }

    /// Asserts that every address lies inside its mapping.
    #[track_caller]
    pub(crate) fn assert_addresses_in_mappings(&self) {
        for (id, location) in &self.locations {
            let Some(mapping) = self.mappings.get(&location.mapping) else { continue };
            assert!(
                (mapping.start..mapping.limit).contains(&location.address),
                "location {id} at {:#x} lies outside {mapping:?}",
                location.address
            );
        }
    }
}

/// Frames in an object by symbol, each as often as it was sampled; of inlined functions that they
/// are in.
pub(crate) fn frames_of(profile: &Pprof, object: &str) -> std::collections::BTreeMap<String, u64> {
    let mut found = std::collections::BTreeMap::new();
    for sample in &profile.samples {
        for id in &sample.locations {
            let line = profile.locations[id].lines.last();
            if profile.file_of(*id) == object
                && let Some((function, ..)) = line
            {
                let name = function.strip_prefix("__pi_").unwrap_or(function);
                *found.entry(name.to_owned()).or_default() += sample.count;
            }
        }
    }
    found
}

/// The messages of `profile.proto`, as far as the tests read them. Field numbers:
/// <https://github.com/google/pprof/blob/main/proto/profile.proto>.
mod wire {
    use prost::Message;

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Profile {
        #[prost(message, repeated, tag = "1")]
        pub(super) sample_type: Vec<ValueType>,
        #[prost(message, repeated, tag = "2")]
        pub(super) sample: Vec<Sample>,
        #[prost(message, repeated, tag = "3")]
        pub(super) mapping: Vec<Mapping>,
        #[prost(message, repeated, tag = "4")]
        pub(super) location: Vec<Location>,
        #[prost(message, repeated, tag = "5")]
        pub(super) function: Vec<Function>,
        #[prost(string, repeated, tag = "6")]
        pub(super) string_table: Vec<String>,
        #[prost(int64, tag = "9")]
        pub(super) time_nanos: i64,
        #[prost(int64, tag = "10")]
        pub(super) duration_nanos: i64,
        #[prost(int64, tag = "12")]
        pub(super) period: i64,
        #[prost(int64, repeated, tag = "13")]
        pub(super) comment: Vec<i64>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct ValueType {
        #[prost(int64, tag = "1")]
        pub(super) r#type: i64,
        #[prost(int64, tag = "2")]
        pub(super) unit: i64,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Sample {
        #[prost(uint64, repeated, tag = "1")]
        pub(super) location_id: Vec<u64>,
        #[prost(int64, repeated, tag = "2")]
        pub(super) value: Vec<i64>,
        #[prost(message, repeated, tag = "3")]
        pub(super) label: Vec<Label>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Label {
        #[prost(int64, tag = "1")]
        pub(super) key: i64,
        #[prost(int64, tag = "2")]
        pub(super) str: i64,
        #[prost(int64, tag = "3")]
        pub(super) num: i64,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Mapping {
        #[prost(uint64, tag = "1")]
        pub(super) id: u64,
        #[prost(uint64, tag = "2")]
        pub(super) memory_start: u64,
        #[prost(uint64, tag = "3")]
        pub(super) memory_limit: u64,
        #[prost(uint64, tag = "4")]
        pub(super) file_offset: u64,
        #[prost(int64, tag = "5")]
        pub(super) filename: i64,
        #[prost(int64, tag = "6")]
        pub(super) build_id: i64,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Location {
        #[prost(uint64, tag = "1")]
        pub(super) id: u64,
        #[prost(uint64, tag = "2")]
        pub(super) mapping_id: u64,
        #[prost(uint64, tag = "3")]
        pub(super) address: u64,
        #[prost(message, repeated, tag = "4")]
        pub(super) line: Vec<Line>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Line {
        #[prost(uint64, tag = "1")]
        pub(super) function_id: u64,
        #[prost(int64, tag = "2")]
        pub(super) line: i64,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Function {
        #[prost(uint64, tag = "1")]
        pub(super) id: u64,
        #[prost(int64, tag = "2")]
        pub(super) name: i64,
        #[prost(int64, tag = "4")]
        pub(super) filename: i64,
    }
}
