//! Profiles as `go tool pprof -raw` prints them: an independent decoder decides what is in the file.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

/// A frame: functions inlined into each other, innermost first.
#[derive(Clone, Debug)]
pub(crate) struct Location {
    pub(crate) address: u64,
    pub(crate) mapping: u64,
    /// Function, file, line.
    pub(crate) lines: Vec<(String, String, u64)>,
}

#[derive(Clone, Debug)]
pub(crate) struct Sample {
    pub(crate) count: u64,
    pub(crate) value: u64,
    /// Leaf first.
    pub(crate) locations: Vec<u64>,
    pub(crate) labels: HashMap<String, String>,
}

#[derive(Clone, Debug)]
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
    pub(crate) head: String,
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
        .output()
        .expect("go is installed by tests/setup.sh");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "go tool pprof {arguments:?}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

fn hex(text: &str) -> u64 {
    u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap()
}

impl Pprof {
    #[track_caller]
    pub(crate) fn read(path: &Path) -> Self {
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
                "Samples:" if line.contains("samples/count") => {}
                "Samples:" => profile.sample(line),
                "Locations" => profile.location(line, &mut last),
                "Mappings" => profile.mapping(line),
                _ => {
                    profile.head.push_str(line);
                    profile.head.push('\n');
                }
            }
        }
        profile
    }

    /// `   1   1003009: 4 5 6`, then lines of labels `comm:[x] thread:[y]` or `pid:[7] tid:[8]`.
    fn sample(&mut self, line: &str) {
        if let Some((values, locations)) = line.split_once(": ").filter(|_| !line.contains(":[")) {
            let mut values = values.split_whitespace().map(|value| value.parse().unwrap());
            self.samples.push(Sample {
                count: values.next().unwrap(),
                value: values.next().unwrap(),
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

    /// `   12: 0x1234 M=1 function /file.c:12:0 s=0`, then lines of what it is inlined into.
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
        let mut parts = at.rsplitn(2, ':');
        let number = parts.next().unwrap_or("0").parse().unwrap_or(0);
        let file = parts.next().unwrap_or("").to_owned();
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

    /// Share of the samples whose leaf is in `function`, in percent.
    pub(crate) fn share_of(&self, function: &str) -> f64 {
        let leaf = |sample: &&Sample| self.functions(sample).first() == Some(&function);
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

/// Frames in an object by symbol, each as often as it was sampled; of inlined functions that they are in.
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
