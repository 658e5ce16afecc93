//! Places in anonymous memory → names, by what their processes wrote. Called by `resolve/mod.rs`.

use std::collections::{BTreeMap, HashMap};

use super::{Functions, parse_jitdump, parse_perf_map};
use crate::capture::Artifacts;
use crate::profile::{
    ArtifactHash, ExecutableId, LocationId, Missing, ProcessId, Profile, Quality, Resolution,
};

/// Names every place in anonymous memory, or says why not.
pub fn name(
    profile: &mut Profile,
    artifacts: &Artifacts,
    id: ExecutableId,
    locations: &[LocationId],
) {
    // By content, since many processes may have inherited one map.
    let mut known: HashMap<&[ArtifactHash], Functions> = HashMap::new();
    let mappings = Mappings::of(profile, id);
    let mut resolutions = Vec::with_capacity(locations.len());
    for location in locations {
        let at = profile.locations[location.index()];
        let Some(process) = at.process else { continue };
        let process = &profile.processes[process.index()];
        let sources: [(&[Vec<ArtifactHash>], Parse, Quality); 2] = [
            (&process.jitdumps, parse_jitdump, Quality::Jitdump),
            (&process.perf_maps, parse_perf_map, Quality::PerfMap),
        ];
        let mut missing = None;
        let found = sources.into_iter().find_map(|(snapshots, parse, quality)| {
            // The newest that came: a later one may have been cut off with the end of the capture.
            let has = |hash: &&ArtifactHash| artifacts.get(hash).is_some();
            let came = |snapshot: &&Vec<ArtifactHash>| snapshot.iter().take_while(has).count();
            let snapshot = snapshots
                .iter()
                .max_by_key(|snapshot| (came(snapshot) == snapshot.len(), came(snapshot) > 0))?;
            let pieces = &snapshot[..came(&snapshot)];
            if pieces.is_empty() {
                missing.get_or_insert_with(|| format!("its {} was not sent", quality.text()));
                return None;
            }
            let functions = known.entry(pieces).or_insert_with(|| {
                let content = pieces.iter().filter_map(|hash| artifacts.get(hash));
                parse(&content.collect::<Vec<_>>().concat())
            });
            let line = functions.line(at.offset);
            if line.is_none() {
                missing = Some(format!("not in the {}", quality.text()));
            }
            Some(Resolution::Found { lines: [line?].into(), quality })
        });
        let missing = missing.or_else(|| process.jit_missing.clone());
        let missing = missing.unwrap_or_else(|| "the process wrote no perf-map".to_owned());
        let start = at.process.and_then(|process| mappings.start(process, at.offset));
        let missing = Resolution::Missing(Missing { reason: missing, start });
        resolutions.push((*location, found.unwrap_or(missing)));
    }
    for (location, resolution) in resolutions {
        profile.resolutions[location.index()] = resolution;
    }
    // Names there are, and they may be of code that is there no more.
    let old = profile.processes.iter().filter_map(|process| {
        let has_names = !(process.perf_maps.is_empty() && process.jitdumps.is_empty());
        let reason = process.jit_missing.as_ref().filter(|_| has_names)?;
        Some(format!("pid {}: names are from before: {reason}", process.pid))
    });
    let mut notes: Vec<String> = old.collect();
    notes.dedup();
    notes.truncate(MAX_NOTES);
    profile.sources[id.index()].notes = notes;
}

/// Most processes named in the notes of JIT code.
const MAX_NOTES: usize = 20;

type Parse = fn(&[u8]) -> Functions;

/// Where anonymous memory is mapped: end by process and start.
struct Mappings(BTreeMap<(ProcessId, u64), u64>);

impl Mappings {
    fn of(profile: &Profile, id: ExecutableId) -> Self {
        let anonymous = profile.mappings.iter().filter(|mapping| mapping.executable == id);
        let end = |start: u64, length| start.saturating_add(length);
        let entry = anonymous.map(|it| ((it.process, it.start), end(it.start, it.length)));
        Self(entry.collect())
    }

    /// First address of the mapping around an address.
    fn start(&self, process: ProcessId, address: u64) -> Option<u64> {
        let (&(of, start), &end) = self.0.range(..=(process, address)).next_back()?;
        (of == process && address < end).then_some(start)
    }
}
