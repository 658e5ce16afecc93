//! The resolve ladder: for each executable, the first source that knows it gives the names.
//!
//! Facts in, names out: the profile does not change. Reads files and artifacts; `debuginfod/`
//! alone asks the network. Whatever fails ends in `Missing` with the reason, never in an error: a
//! profile without some names is still a profile.

mod add;
mod anonymous;
mod debuginfod;
mod file;
mod kernel;
mod kernel_files;
mod ladder;
mod lay_out;
mod local;
mod mapped_tables;
mod one;
mod pinned;
mod recent;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use stackwire_cache::{Absent, Blob, Cache, Key, Kind as CacheKind};
use stackwire_elf::Scratch;
use stackwire_model::{Code, FileOffset, VirtAddr};
use stackwire_symbols::table::{Kind, Table};
use stackwire_symbols::{interpreter, kallsyms};

pub use self::add::{AddError, add as add_to_cache};
pub use self::debuginfod::{Debuginfod, DebuginfodError};
pub use self::file::FileError;
pub(crate) use self::file::open_regular;
use self::ladder::Wanted;
pub use self::lay_out::lay_out;
use self::mapped_tables::MappedTables;
pub use self::one::{Answer, Symbols, SymbolsError, build_ids};
pub use self::pinned::{Pinned, Pins};
use self::recent::Recent;
use crate::artifacts::Artifacts;
use crate::metrics::Metrics;
use crate::profile::{
    Address, ArtifactHash, Executable, ExecutableId, LocationId, Missing, MissingReason, Names,
    Profile, Quality, Resolution, Source,
};
use crate::receive::tenant::HANDED_OVER;

/// Where names may be looked for.
#[derive(Debug)]
#[non_exhaustive]
pub struct Sources {
    /// Files opened while their processes ran.
    pub pinned: Pinned,
    /// Directories with separate debug files, `.build-id/NN/REST.debug` below each.
    pub debug_dirs: Vec<PathBuf>,
    /// Whether names are made readable.
    pub demangle: bool,
    /// Where large sections are kept while they are read.
    pub scratch: Scratch,
    /// What was fetched and compiled before.
    pub cache: Option<Arc<Cache>>,
    /// Servers to ask for what is nowhere else. Needs a cache.
    pub debuginfod: Option<Arc<Debuginfod>>,
    /// Executables that collectors hand over stand for their build-ids as those of this host do,
    /// for whoever asks. Otherwise they give names to captures of the same sender alone, and only
    /// where nothing else is found.
    pub trust_executables: bool,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    compiling: Arc<Mutex<()>>,
    recent: Arc<Recent>,
    tables: Arc<MappedTables>,
}

impl Sources {
    /// The same, with files opened while their processes ran.
    #[must_use]
    pub fn with_pinned(&self, pinned: Pinned) -> Self {
        Self {
            pinned,
            debug_dirs: self.debug_dirs.clone(),
            demangle: self.demangle,
            scratch: self.scratch.clone(),
            cache: self.cache.clone(),
            debuginfod: self.debuginfod.clone(),
            trust_executables: self.trust_executables,
            metrics: Arc::clone(&self.metrics),
            compiling: Arc::clone(&self.compiling),
            recent: Arc::clone(&self.recent),
            tables: Arc::clone(&self.tables),
        }
    }

    /// What the cache has, unless a collector handed it over while those were trusted. A cache that
    /// cannot be used is said once, where it is opened.
    fn cached(&self, key: &Key) -> Option<Blob> {
        let blob = self.cache.as_ref()?.get(key).ok()??;
        let by_build_id = !matches!(key.kind, CacheKind::Handed | CacheKind::HandedTable(_));
        let is_strange = by_build_id && blob.meta.origin.starts_with(HANDED_OVER);
        (self.trust_executables || !is_strange).then_some(blob)
    }
}

/// Where distributions put debug files.
pub const DEBUG_DIR: &str = "/usr/lib/debug";

impl Default for Sources {
    fn default() -> Self {
        Self {
            pinned: Pinned::default(),
            debug_dirs: vec![DEBUG_DIR.into()],
            demangle: true,
            scratch: Scratch::default(),
            cache: None,
            debuginfod: None,
            trust_executables: false,
            metrics: Arc::default(),
            compiling: Arc::default(),
            recent: Arc::default(),
            tables: Arc::default(),
        }
    }
}

/// Threads that parse: symbolization is bound by them, and more than four want memory, not time.
const MAX_WORKERS: usize = 4;

/// Threads that climb when servers may be asked: most of them wait.
const MAX_FETCHES: usize = 8;

/// Names every location of a profile, or says why not.
#[must_use]
pub fn resolve(profile: &Profile, artifacts: &Artifacts, sources: &Sources) -> Names {
    let unresolved = Resolution::Missing(Missing::because(MissingReason::NotLookedUp));
    let mut names = Names {
        resolutions: vec![unresolved; profile.locations.len()],
        sources: vec![Source::default(); profile.executables.len()],
    };
    let mut by_executable: BTreeMap<ExecutableId, Vec<LocationId>> = BTreeMap::new();
    for (index, location) in profile.locations.iter().enumerate() {
        by_executable.entry(location.executable).or_default().push(LocationId(index as u32));
    }
    let mut jobs = Vec::new();
    let mut texts = HashMap::new();
    for (id, locations) in by_executable {
        match &profile.executables[id.index()] {
            Executable::File { .. } | Executable::Vdso { .. } => jobs.push((id, locations)),
            Executable::Anonymous => {
                anonymous::name(profile, artifacts, id, &locations, &mut names);
            }
            Executable::Kernel { kallsyms, .. } => {
                if let Some(hash) = kallsyms
                    && let Some(text) = artifacts.kernel_symbols(profile, hash)
                {
                    texts.entry(*hash).or_insert(text);
                }
                jobs.push((id, locations));
            }
            Executable::Code(code) => name_code(profile, code, &locations, &mut names),
            Executable::Unmapped | Executable::Names { .. } => {
                miss(&mut names, id, &locations, MissingReason::Unmapped);
            }
        }
    }
    let parsed = texts.iter().map(|(hash, text)| (*hash, kallsyms::Symbols::parse(text)));
    let snapshots: Snapshots<'_> = parsed.collect();
    // The heaviest first, so that no thread is left alone with one at the end.
    jobs.sort_by_key(|(_, locations)| locations.len());
    run_jobs(profile, artifacts, &snapshots, sources, jobs, &mut names);
    // What the input knew stays: it was there.
    for (location, lines) in &profile.given {
        names.resolutions[location.index()] =
            Resolution::Found { lines: Arc::clone(lines), quality: Quality::Given };
    }
    sources.metrics.resolved(names.of(profile));
    names
}

/// Kernel symbols by the hash of their snapshot.
type Snapshots<'a> = HashMap<ArtifactHash, kallsyms::Symbols<'a>>;

fn run_jobs(
    profile: &Profile,
    artifacts: &Artifacts,
    snapshots: &Snapshots<'_>,
    sources: &Sources,
    jobs: Vec<(ExecutableId, Vec<LocationId>)>,
    names: &mut Names,
) {
    let (workers, timeout) = match &sources.debuginfod {
        Some(debuginfod) => (MAX_FETCHES, debuginfod.timeout()),
        None => {
            let cpus = std::thread::available_parallelism().map_or(1, usize::from);
            (cpus.min(MAX_WORKERS), Duration::ZERO)
        }
    };
    // One for all: a profile waits no longer for many files than for one.
    let deadline = Instant::now() + timeout;
    let jobs = Mutex::new(jobs);
    let done = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let job = jobs.lock().ok().and_then(|mut jobs| jobs.pop());
                    let Some((id, locations)) = job else { break };
                    let result = match profile.executables[id.index()] {
                        Executable::Kernel { .. } => {
                            kernel::job(profile, snapshots, sources, id, &locations, deadline)
                        }
                        _ => elf_job(profile, artifacts, sources, id, &locations, deadline),
                    };
                    if let Ok(mut done) = done.lock() {
                        done.push((id, locations, result));
                    }
                }
            });
        }
    });
    for (id, locations, result) in done.into_inner().unwrap_or_default() {
        match result {
            Ok((source, resolutions)) => {
                names.sources[id.index()] = source;
                for (location, resolution) in locations.into_iter().zip(resolutions) {
                    names.resolutions[location.index()] = resolution;
                }
            }
            Err((source, reason)) => {
                miss(names, id, &locations, reason);
                names.sources[id.index()] = source;
            }
        }
    }
}

/// Names in one ELF file, with a word on where they came from; or why there are none.
fn elf_job(
    profile: &Profile,
    artifacts: &Artifacts,
    sources: &Sources,
    id: ExecutableId,
    locations: &[LocationId],
    deadline: Instant,
) -> Result<(Source, Vec<Resolution>), Nameless> {
    let executable = &profile.executables[id.index()];
    let wanted = match executable {
        Executable::Vdso { image } => {
            let image = image
                .and_then(|hash| artifacts.get(&hash))
                .ok_or_else(|| nameless(MissingReason::NoSource(FileError::NoImage.to_string())))?;
            let executable = Some(file::of_image(image));
            Wanted { build_id: None, executable, code: None, kernel: None }
        }
        // What lies at its path may be another file.
        Executable::File { .. } if profile.ambiguous.contains(&id) => {
            let reason = FileError::NoIdentity.to_string();
            return Err(nameless(MissingReason::NoSource(reason)));
        }
        _ => Wanted {
            build_id: executable.build_id(),
            executable: Some(sources.pinned.open(
                executable,
                &running_in(profile, id),
                artifacts.handed(),
            )),
            code: code(profile, id),
            kernel: None,
        },
    };
    let found = ladder::find(wanted, sources, deadline).map_err(|missing| {
        let reason = MissingReason::NoSource(missing.notes.join("; "));
        let (notes, fetch_failed) = (missing.notes, missing.fetch_failed);
        (Source { notes, fetch_failed, ..Source::default() }, reason)
    })?;
    let addresses: Vec<Address> =
        locations.iter().map(|location| profile.locations[location.index()].address).collect();
    let address_of = |address: Address| found.table.address_of(address.file()?);
    let resolutions = resolutions(&found.table, address_of, &addresses, sources);
    // Names keep the table mapped. Its checksum has just read all of it into memory.
    found.table.forget_pages();
    let mut source = source(found);
    if matches!(executable, Executable::File { key: None, .. }) {
        source
            .notes
            .push("taken for the one that ran: the profile has no build-id of it".to_owned());
    }
    Ok((source, resolutions))
}

fn source(found: ladder::Found) -> Source {
    Source {
        origin: found.source,
        notes: found.notes,
        fetch_failed: found.fetch_failed,
        upgraded_from: found.upgraded.map(|before| before.map(quality)),
    }
}

/// Why nothing of an executable has a name.
type Nameless = (Source, MissingReason);

fn nameless(reason: MissingReason) -> Nameless {
    (Source { notes: vec![reason.to_string()], ..Source::default() }, reason)
}

/// The lowest offset at which an executable's code is mapped.
fn code(profile: &Profile, id: ExecutableId) -> Option<FileOffset> {
    let mappings = profile.mappings.iter().filter(|mapping| mapping.executable == id);
    mappings.map(|mapping| mapping.file_offset).min()
}

/// What a table says of addresses. `address_of` finds them in the table.
fn resolutions(
    table: &Table,
    address_of: impl Fn(Address) -> Option<VirtAddr>,
    asked: &[Address],
    sources: &Sources,
) -> Vec<Resolution> {
    let named_at =
        |addresses: &[VirtAddr]| sources.recent.named(table, addresses, sources.demangle);
    let missing = |reason, start| Resolution::Missing(Missing { reason, start });
    let mut found = vec![missing(MissingReason::NotLoaded, None); asked.len()];
    let loaded = asked.iter().enumerate();
    let loaded = loaded.filter_map(|(index, &address)| Some((address_of(address)?, index)));
    let (addresses, places): (Vec<VirtAddr>, Vec<usize>) = loaded.unzip();
    let mut unnamed = Vec::new();
    for (index, named) in places.into_iter().zip(named_at(&addresses)) {
        match named {
            Some((lines, quality)) => found[index] = Resolution::Found { lines, quality },
            None => unnamed.push(index),
        }
    }
    // A signal handler returns to the first byte of a function that nobody called. One byte less,
    // where return addresses are looked up, is between functions: look up the first byte.
    let behind = |address: Address| address.with_number(address.number().saturating_add(1));
    let next = unnamed.iter().map(|&index| address_of(behind(asked[index])));
    let next: Vec<Option<VirtAddr>> = next.collect();
    let addresses: Vec<VirtAddr> = next.iter().flatten().copied().collect();
    let mut named = named_at(&addresses).into_iter();
    for (index, next) in unnamed.into_iter().zip(next) {
        found[index] = match next.and_then(|_| named.next()).flatten() {
            Some((lines, quality)) => Resolution::Found { lines, quality },
            None => {
                let reason = match table.best() {
                    Some(_) => MissingReason::NoSymbol,
                    None => MissingReason::Stripped,
                };
                let address = asked[index];
                let begins = address_of(address)
                    .and_then(|at| at.since(table.bounds(at)?.start))
                    .and_then(|inside| address.number().checked_sub(inside));
                missing(reason, begins.map(|number| address.with_number(number)))
            }
        };
    }
    found
}

fn quality(kind: Kind) -> Quality {
    match kind {
        Kind::Dwarf => Quality::Dwarf,
        Kind::Gopclntab => Quality::Gopclntab,
        Kind::Symtab | Kind::MiniDebugInfo => Quality::Symtab,
        Kind::Dynsym => Quality::Dynsym,
    }
}

/// The file of an executable: of this host, from the cache, until `deadline` from a server, or
/// handed over.
///
/// # Errors
/// See [`FileError`].
pub(crate) fn open_executable(
    executable: &Executable,
    artifacts: &Artifacts,
    sources: &Sources,
    deadline: Instant,
) -> Result<std::fs::File, FileError> {
    if let Executable::Vdso { image } = executable {
        let image = image.and_then(|hash| artifacts.get(&hash)).ok_or(FileError::NoImage)?;
        return file::of_image(image).map(|opened| opened.file);
    }
    let opened = match sources.pinned.open(executable, &[], artifacts.handed()) {
        Ok(opened) if opened.handed_over.is_none() => return Ok(opened.file),
        other => other,
    };
    match elsewhere(executable, sources, deadline) {
        Some(Ok(file)) => Ok(file),
        Some(Err(absent)) => opened.map(|opened| opened.file).map_err(|_here| absent.into()),
        None => opened.map(|opened| opened.file),
    }
}

/// From the cache, or from a server; none where neither can be asked.
fn elsewhere(
    executable: &Executable,
    sources: &Sources,
    deadline: Instant,
) -> Option<Result<std::fs::File, Absent>> {
    let id = executable.build_id()?;
    if let Some(blob) = sources.cached(&Key::new(id.into(), CacheKind::Executable)) {
        return Some(Ok(blob.file));
    }
    let (server, cache) = (sources.debuginfod.as_deref()?, sources.cache.as_deref()?);
    let artifact = debuginfod::Artifact::Executable;
    let fetched = server.fetch(id, artifact, cache, deadline, &sources.metrics);
    Some(fetched.map(|blob| blob.file))
}

/// Processes that had the executable mapped: their roots may still lead to it.
fn running_in(profile: &Profile, id: ExecutableId) -> Vec<u32> {
    let mut pids: Vec<u32> = profile
        .mappings
        .iter()
        .filter(|mapping| mapping.executable == id)
        .map(|mapping| profile.processes[mapping.process.index()].pid)
        .collect();
    pids.sort_unstable();
    pids.dedup();
    pids
}

/// Names places in a function of an interpreter.
fn name_code(profile: &Profile, code: &Code, locations: &[LocationId], names: &mut Names) {
    let function = interpreter::Function::read(code);
    for location in locations {
        let position = profile.locations[location.index()].address.number();
        names.resolutions[location.index()] = match &function {
            Some(function) => {
                let lines = [function.at(position)].into();
                Resolution::Found { lines, quality: Quality::Interpreter }
            }
            None => Resolution::Missing(Missing::because(MissingReason::CodeNotTaken)),
        };
    }
}

fn miss(names: &mut Names, id: ExecutableId, locations: &[LocationId], reason: MissingReason) {
    names.sources[id.index()] = nameless(reason.clone()).0;
    let missing = Resolution::Missing(Missing::because(reason));
    for location in locations {
        names.resolutions[location.index()] = missing.clone();
    }
}
