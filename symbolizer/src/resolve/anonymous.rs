//! Places in anonymous memory → names, by what their processes wrote. Called by `resolve/mod.rs`.

use std::collections::{BTreeMap, HashMap};

use stackwire_symbols::jit::{Functions, Made, parse_jitdump, parse_perf_map};

use crate::artifacts::Artifacts;
use crate::profile::{
    Address, ArtifactHash, ExecutableId, JitFile, Line, Location, LocationId, Missing,
    MissingReason, Names, Process, ProcessId, Profile, Quality, Resolution, Snapshot, UserAddr,
};

/// Names every place in anonymous memory, or says why not.
pub fn name(
    profile: &Profile,
    artifacts: &Artifacts,
    id: ExecutableId,
    locations: &[LocationId],
    names: &mut Names,
) {
    let mappings = Mappings::of(profile, id);
    let known = Known::of(profile, artifacts, locations);
    for location in locations {
        let at = profile.locations[location.index()];
        let Some(process) = at.process else { continue };
        let process = &profile.processes[process.index()];
        let mut missing = None;
        let found = sources(process).into_iter().find_map(|source| {
            let quality = source.quality;
            let Some((snapshot, pieces)) = source.at(at.seen_ns, artifacts) else {
                if !source.file.is_empty() {
                    missing.get_or_insert(MissingReason::JitFileNotSent(quality));
                }
                return None;
            };
            let line = known.line(pieces, &at, |made| source.written_ns(process, snapshot, made));
            if line.is_none() {
                missing = Some(MissingReason::NotInJitFile(quality));
            }
            Some(Resolution::Found { lines: [line?].into(), quality })
        });
        let not_taken = || process.jit_missing.clone().map(MissingReason::JitFileNotTaken);
        let reason = missing.or_else(not_taken).unwrap_or(MissingReason::NoJitFile);
        let start = at.process.and_then(|process| mappings.start(process, at.address.user()?));
        let start = start.map(Address::User);
        let missing = Resolution::Missing(Missing { reason, start });
        names.resolutions[location.index()] = found.unwrap_or(missing);
    }
    // Names there are, and they may be of code that is there no more.
    let old = profile.processes.iter().filter_map(|process| {
        let has_names = !(process.perf_map.is_empty() && process.jitdump.is_empty());
        let reason = process.jit_missing.as_ref().filter(|_| has_names)?;
        Some(format!("pid {}: names are from before: {reason}", process.pid))
    });
    let mut notes: Vec<String> = old.collect();
    notes.dedup();
    notes.truncate(MAX_NOTES);
    names.sources[id.index()].notes = notes;
}

/// Most processes named in the notes of JIT code.
const MAX_NOTES: usize = 20;

/// One of the files a process writes.
struct Source<'a> {
    file: &'a JitFile,
    parse: fn(&[u8]) -> Functions,
    quality: Quality,
}

/// The better one first.
fn sources(process: &Process) -> [Source<'_>; 2] {
    let (dump, map) = (&process.jitdump, &process.perf_map);
    [
        Source { file: dump, parse: parse_jitdump, quality: Quality::Jitdump },
        Source { file: map, parse: parse_perf_map, quality: Quality::PerfMap },
    ]
}

impl<'a> Source<'a> {
    fn at(
        &self,
        seen_ns: u64,
        artifacts: &Artifacts,
    ) -> Option<(&'a Snapshot, &'a [ArtifactHash])> {
        self.file.at(seen_ns, |hash| artifacts.get(hash).is_some())
    }

    /// When a function was put there, nanoseconds since the Unix epoch.
    fn written_ns(&self, process: &Process, snapshot: &Snapshot, made: &Made) -> u64 {
        let (written, late) = self.file.written_ns(snapshot, made.record);
        let said = made.time_ns.map(|time_ns| process.clock_zero_ns.saturating_add(time_ns));
        // Its clock may be another, as in a time namespace: later than it was read nothing was
        // written.
        said.filter(|said| late == 0 || *said <= late).unwrap_or(written)
    }
}

/// What was parsed, by content, since many processes may have inherited one map.
struct Known<'a>(HashMap<&'a [ArtifactHash], Parsed>);

#[derive(Default)]
struct Parsed {
    functions: Functions,
    /// See [`Functions::versions`], of the addresses that have a time.
    versions: HashMap<UserAddr, Vec<u32>>,
}

impl<'a> Known<'a> {
    fn of(profile: &'a Profile, artifacts: &Artifacts, locations: &[LocationId]) -> Self {
        let mut known: HashMap<&[ArtifactHash], Parsed> = HashMap::new();
        for location in locations {
            let at = &profile.locations[location.index()];
            let Some(process) = at.process else { continue };
            for source in sources(&profile.processes[process.index()]) {
                let Some((_, pieces)) = source.at(at.seen_ns, artifacts) else { continue };
                let parsed = known.entry(pieces).or_insert_with(|| {
                    let content = pieces.iter().filter_map(|hash| artifacts.get(hash));
                    let functions = (source.parse)(&content.collect::<Vec<_>>().concat());
                    Parsed { functions, ..Parsed::default() }
                });
                if at.seen_ns != 0
                    && let Some(address) = at.address.user()
                {
                    parsed.versions.insert(address, Vec::new());
                }
            }
        }
        for Parsed { functions, versions } in known.values_mut() {
            let mut addresses: Vec<UserAddr> = versions.keys().copied().collect();
            addresses.sort_unstable();
            let found = functions.versions(&addresses);
            *versions = addresses.into_iter().zip(found).collect();
        }
        Self(known)
    }

    /// The function that was there at a place's time: the last one put there by then. If there is
    /// none, it is the first one put there after it, since compilers write later than they make.
    fn line(
        &self,
        pieces: &[ArtifactHash],
        at: &Location,
        written_ns: impl Fn(&Made) -> u64,
    ) -> Option<Line> {
        let Parsed { functions, versions } = self.0.get(pieces)?;
        let address = at.address.user()?;
        let Some(versions) = versions.get(&address).filter(|_| at.seen_ns != 0) else {
            return functions.line(address);
        };
        let mut made = versions.iter().filter_map(|&number| functions.made(number));
        let then = made.clone().find(|made| written_ns(made) <= at.seen_ns);
        functions.line_of(then.or_else(|| made.next_back())?, address)
    }
}

/// Where anonymous memory is mapped: end by process and start.
struct Mappings(BTreeMap<(ProcessId, UserAddr), UserAddr>);

impl Mappings {
    fn of(profile: &Profile, id: ExecutableId) -> Self {
        let anonymous = profile.mappings.iter().filter(|mapping| mapping.executable == id);
        let entry =
            anonymous.map(|it| ((it.process, it.start), it.start.saturating_add(it.length)));
        Self(entry.collect())
    }

    /// First address of the mapping around an address.
    fn start(&self, process: ProcessId, address: UserAddr) -> Option<UserAddr> {
        let (&(of, start), &end) = self.0.range(..=(process, address)).next_back()?;
        (of == process && address < end).then_some(start)
    }
}
