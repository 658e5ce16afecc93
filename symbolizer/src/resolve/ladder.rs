//! The resolve ladder: from an executable to the best table of its symbols that can be had.
//!
//! [`find`] is the order of the rungs, each a function below it; files of this host are found by
//! `local.rs`. What a rung could not give is a note for the report, never an error: a lower rung
//! may have it.

use std::io;
use std::path::Path;
use std::time::Instant;

use stackwire_cache::{Absent, Blob, Id, Key, Kind as CacheKind, Meta};
use stackwire_elf::{Bytes, Elf, ElfError};
use stackwire_model::{BuildId, FileOffset};
use stackwire_symbols::compile::{self, Files, SymbolTable};
use stackwire_symbols::table::{self, Kind, Table};

use super::Sources;
use super::debuginfod::Artifact;
use super::file::{self, FileError, Opened};
use super::kernel_files::Kernel;
use super::local::{At, Local, open};
use crate::metrics::Rung;
use crate::receive::tenant::{HANDED_OVER, copy};

/// What is asked for.
#[derive(Debug)]
pub struct Wanted {
    /// GNU build-id, if known.
    pub build_id: Option<BuildId>,
    /// The file itself, or why it is out of reach; none where none is looked for.
    pub executable: Option<Result<Opened, FileError>>,
    /// Where its code was mapped: offset in the file, bytes.
    pub code: Option<FileOffset>,
    /// It is the kernel, or a module of it.
    pub kernel: Option<Kernel>,
}

/// What was found.
#[derive(Debug)]
pub struct Found {
    /// The symbols.
    pub table: Table,
    /// Where they are from.
    pub source: String,
    /// Likewise, in one word.
    pub rung: Rung,
    /// What was looked for and not found, or is broken; the same for the same files.
    pub notes: Vec<String>,
    /// A server was asked and did not give what it was asked for.
    pub fetch_failed: bool,
    /// What the cache had before something better was found (`Some(None)`: no names at all).
    pub upgraded: Option<Option<Kind>>,
}

/// There is nothing to take a name from.
#[derive(Debug, thiserror::Error)]
#[error("{}", notes.join("; "))]
pub struct Nothing {
    /// Why, in words for the report.
    pub notes: Vec<String>,
    /// A server was asked and did not give what it was asked for.
    pub fetch_failed: bool,
}

/// A file that was opened and is of no use.
#[derive(Debug, thiserror::Error)]
enum NotUsable {
    #[error("an object file: its functions have no addresses yet")]
    Object,
    #[error(transparent)]
    Elf(#[from] ElfError),
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Climbs the ladder. Servers are waited for until `deadline`.
///
/// # Errors
/// See [`Nothing`].
pub fn find(wanted: Wanted, sources: &Sources, deadline: Instant) -> Result<Found, Nothing> {
    let is_kernel = wanted.kernel.is_some();
    let found = best(wanted, sources, deadline);
    match &found {
        Ok(found) => sources.metrics.looked_up(found.rung),
        // Of the kernel kallsyms knows.
        Err(_) if is_kernel => {}
        Err(_) => sources.metrics.looked_up(Rung::Nothing),
    }
    found
}

/// Whoever handed a file over may have made it up: what is known of its build-id comes first.
fn best(mut wanted: Wanted, sources: &Sources, deadline: Instant) -> Result<Found, Nothing> {
    let id = |opened: &Opened| opened.handed_over.clone();
    let handed = wanted.executable.as_ref().and_then(|found| id(found.as_ref().ok()?));
    let handed = handed.filter(|_| !sources.trust_executables);
    if handed.is_some() && wanted.build_id.is_some() {
        let opened = wanted.executable.take();
        let is_usable = |found: &Found| wanted.code.is_none() || has_segments(&found.table);
        if let Ok(found) = climb(&wanted, None, sources, deadline)
            && is_usable(&found)
        {
            return Ok(found);
        }
        wanted.executable = opened;
    }
    climb(&wanted, handed, sources, deadline)
}

/// It knows where offsets in its file are loaded.
fn has_segments(table: &Table) -> bool {
    table.segments().next().is_some()
}

fn climb(
    wanted: &Wanted,
    handed: Option<Id>,
    sources: &Sources,
    deadline: Instant,
) -> Result<Found, Nothing> {
    let notes = Vec::new();
    let mut climb =
        Climb { handed, sources, deadline, notes, fetch_failed: false, too_large: false };
    // Not opened when its table is there and whole: what names need is all in that.
    let known = climb.cached_table(wanted.build_id, wanted.code.is_some());
    if is_best(known.as_ref()) {
        return climb.with_table(known, None);
    }
    let mut executable = climb.executable(wanted);
    // A debug file, named in the place of its executable: what is loaded was left out of it.
    let mut named = None;
    if executable.as_ref().is_some_and(|at| at.elf.is_without_code()) {
        named = executable.take();
    }
    let file = executable.as_ref().or(named.as_ref());
    let build_id = wanted.build_id.or_else(|| file?.elf.ids.gnu);
    let key = climb.table_key(build_id, file);
    // Of a file whose id only it knows, now.
    let known = known.or_else(|| climb.cached(key.as_ref()?, wanted.code.is_some()));
    if is_best(known.as_ref()) {
        return climb.with_table(known, None);
    }
    let in_itself = executable.as_ref().is_some_and(|at| at.elf.has(".debug_info"));
    let debug = if in_itself {
        None
    } else {
        named.or_else(|| climb.debug_file(executable.as_ref(), build_id, wanted.kernel.as_ref()))
    };
    if executable.is_none()
        && wanted.kernel.is_none()
        && (debug.is_none() || climb.needs_executable(debug.as_ref(), &wanted.code))
    {
        executable = climb.fetch(build_id, Artifact::Executable);
    }
    // Nothing the table in the cache does not have.
    let offered = executable.as_ref().and_then(|at| offers(&at.elf));
    let had = known.as_ref().and_then(|known| known.table.best());
    let is_better = offered.is_some_and(|offered| had.is_none_or(|had| offered < had));
    // Of a debug file that is too large, its functions.
    let symbols = if climb.too_large && had.is_none_or(|had| Kind::Symtab < had) {
        executable.as_ref().and_then(|_| climb.symbol_table(build_id))
    } else {
        None
    };
    if known.is_some() && !in_itself && debug.is_none() && symbols.is_none() && !is_better {
        return climb.with_table(known, None);
    }
    if executable.is_none() && debug.is_none() {
        return Err(climb.nothing());
    }
    // Stripped files keep the link: what it leads to completes DWARF, and without any is of no use.
    let with_dwarf = debug.as_ref().or(executable.as_ref()).filter(|at| at.elf.has(".debug_info"));
    let wants_alt = with_dwarf.is_some_and(|at| at.elf.alt_link().is_some());
    let alt = with_dwarf.and_then(|at| climb.alt_file(at));
    let beside =
        debug.as_ref().or(executable.as_ref()).map(|at| at.path.clone()).unwrap_or_default();
    let package = climb.local().package(&beside);
    let split = |directory: &str, name: &str| climb.local().split(&beside, directory, name);
    let files = Files {
        executable: executable.as_ref().map(|at| &at.elf),
        debug: debug.as_ref().map(|at| &at.elf),
        symbols: symbols.as_ref().map(|(table, _)| table),
        alt: alt.as_ref().map(|at| &at.elf),
        package: package.as_ref().map(|at| &at.elf),
        split: Some(&split),
    };
    let compiled = {
        // One at a time: it has threads of its own, and memory is what there is least of.
        let _turn = sources.compiling.lock();
        let started = Instant::now();
        let compiled = compile::compile(&files, wanted.code);
        sources.metrics.converted(started.elapsed());
        compiled
    };
    let whole = compiled.notes.is_empty() && (alt.is_some() || !wants_alt);
    let has_segments = executable.is_some() || debug.as_ref().is_some_and(|at| at.elf.is_kernel());
    let (origin, rung) = match symbols {
        Some((_, origin)) => (origin, Rung::Debuginfod),
        None => {
            debug.or(executable).map_or((String::new(), Rung::Nothing), |at| (at.origin, at.rung))
        }
    };
    // What the file itself lacks belongs to the table; what servers said today does not. A line
    // each.
    let line = |text: &String| text.replace('\n', "?");
    let origin: Vec<String> = [&[origin], &compiled.notes[..]].concat().iter().map(line).collect();
    let origin = origin.join("\n");
    let before = known.as_ref().map(|known| known.table.best());
    // Without the executable it cannot serve who knows offsets only: not kept.
    let key = key.filter(|_| has_segments);
    let Some(table) = climb.keep(key.as_ref(), compiled.bytes, &origin, whole) else {
        return Err(climb.nothing());
    };
    let better = before
        .filter(|before| table.best().is_some_and(|now| before.is_none_or(|before| now < before)));
    climb.with_table(Some(Known { table, origin, whole, rung }), better)
}

/// A table with where it is from.
struct Known {
    table: Table,
    /// The file it was made from and, a line each, what was wrong with it.
    origin: String,
    /// Everything its file refers to was there.
    whole: bool,
    rung: Rung,
}

struct Climb<'s> {
    /// Of a file that was handed over: what is made of it is kept under this, and not under its
    /// build-id.
    handed: Option<Id>,
    sources: &'s Sources,
    deadline: Instant,
    notes: Vec<String>,
    fetch_failed: bool,
    /// The debug file is known to be larger than the cache.
    too_large: bool,
}

impl Climb<'_> {
    /// The end of the climb.
    fn with_table(
        self,
        known: Option<Known>,
        upgraded: Option<Option<Kind>>,
    ) -> Result<Found, Nothing> {
        let Some(Known { table, origin, rung, .. }) = known else { return Err(self.nothing()) };
        let mut lines = origin.lines().map(str::to_owned);
        let source = lines.next().unwrap_or_default();
        let mut notes: Vec<String> = lines.collect();
        for note in self.notes {
            if !notes.contains(&note) {
                notes.push(note);
            }
        }
        Ok(Found { table, source, rung, notes, fetch_failed: self.fetch_failed, upgraded })
    }

    fn note(&mut self, note: String) {
        if !note.is_empty() && !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    fn nothing(self) -> Nothing {
        Nothing { notes: self.notes, fetch_failed: self.fetch_failed }
    }

    // The cache's table.

    fn cached_table(&self, build_id: Option<BuildId>, by_offset: bool) -> Option<Known> {
        let key = match &self.handed {
            Some(id) => handed_table(id),
            None => Key::new(build_id?.into(), CacheKind::Table(table::VERSION)),
        };
        self.cached(&key, by_offset)
    }

    /// `by_offset`: the table must know where offsets in the file are loaded.
    fn cached(&self, key: &Key, by_offset: bool) -> Option<Known> {
        let blob = self.sources.cached(key)?;
        let table = self.sources.tables.open(&blob.file)?;
        let usable = !by_offset || has_segments(&table);
        let whole = blob.meta.quality == WHOLE;
        usable.then_some(Known { table, origin: blob.meta.origin, whole, rung: Rung::Cache })
    }

    /// What the table is kept under: the build-id, else a hash of all of the file.
    fn table_key(&self, build_id: Option<BuildId>, executable: Option<&At>) -> Option<Key> {
        if let Some(id) = &self.handed {
            return Some(handed_table(id));
        }
        let id = match build_id {
            Some(id) => id.into(),
            None => Id::of_hash(executable?.elf.sha256().ok()?),
        };
        Some(Key::new(id, CacheKind::Table(table::VERSION)))
    }

    /// Into the cache, and from there.
    fn keep(&self, key: Option<&Key>, bytes: Vec<u8>, origin: &str, whole: bool) -> Option<Table> {
        if let (Some(cache), Some(key)) = (&self.sources.cache, key) {
            let quality = if whole { WHOLE } else { 0 };
            let meta = Meta { quality, origin: origin.to_owned() };
            let kept = cache.put(key, &bytes, meta).ok();
            if let Some(table) = kept.and_then(|blob| self.sources.tables.open(&blob.file)) {
                return Some(table);
            }
        }
        Table::open(Bytes::from(bytes)).ok()
    }

    // The executable: as it was mapped, else the cache's copy.

    fn executable(&mut self, wanted: &Wanted) -> Option<At> {
        let found = match &wanted.executable {
            Some(Ok(opened)) => self.read(opened, wanted.build_id).map_err(|why| why.to_string()),
            Some(Err(why)) => Err(why.to_string()),
            None => return self.cached_file(wanted.build_id, CacheKind::Executable),
        };
        match found {
            Ok(at) => Some(at),
            Err(reason) => {
                let cached = self.cached_file(wanted.build_id, CacheKind::Executable);
                if cached.is_none() {
                    self.note(reason);
                }
                cached
            }
        }
    }

    fn read(&self, opened: &Opened, build_id: Option<BuildId>) -> Result<At, NotUsable> {
        let elf = Elf::open(opened.file.try_clone()?, &self.sources.scratch)?;
        if elf.relocatable {
            return Err(NotUsable::Object);
        }
        let (origin, rung) = if opened.handed_over.is_none() {
            (file::shown(&opened.path), Rung::Executable)
        } else {
            let bytes = opened.file.metadata().map_or(0, |metadata| metadata.len());
            if self.sources.trust_executables {
                self.keep_handed(&opened.file, build_id);
            }
            (format!("{HANDED_OVER} ({bytes} bytes)"), Rung::HandedOver)
        };
        Ok(At { elf, path: opened.path.clone().into(), origin, rung })
    }

    /// Into the cache, for whoever asks for the build-id.
    fn keep_handed(&self, file: &std::fs::File, build_id: Option<BuildId>) {
        let key = build_id.map(|id| Key::new(id.into(), CacheKind::Executable));
        if let (Some(cache), Some(key)) = (&self.sources.cache, key)
            && !cache.get(&key).is_ok_and(|blob| blob.is_some())
        {
            let meta = Meta { quality: 0, origin: HANDED_OVER.to_owned() };
            // A cache that cannot be written costs others these names.
            if let Ok(mut pending) = cache.begin()
                && copy(file, &mut pending).is_ok()
            {
                let _ = pending.keep(&key, meta);
            }
        }
    }

    fn local(&self) -> Local<'_> {
        Local(self.sources)
    }

    // The debug file: by build-id, by link, from the cache, from servers.

    fn debug_file(
        &mut self,
        executable: Option<&At>,
        build_id: Option<BuildId>,
        kernel: Option<&Kernel>,
    ) -> Option<At> {
        build_id
            .and_then(|id| self.local().by_build_id(id))
            .filter(has_addresses)
            .or_else(|| self.local().kernel(kernel?, build_id?))
            .or_else(|| self.local().by_link(executable?).filter(has_addresses))
            .or_else(|| self.cached_file(build_id, CacheKind::Debuginfo).filter(has_addresses))
            .or_else(|| self.fetch(build_id, Artifact::Debuginfo).filter(has_addresses))
    }

    /// The file `dwz` moved common parts to.
    fn alt_file(&mut self, at: &At) -> Option<At> {
        let link = at.elf.alt_link()?;
        let written = Path::new(&link.path);
        let beside = at.path.parent().map(|directory| directory.join(written));
        // Debian's path is absolute below /usr/lib/debug; with --debug-dir it is below that.
        let below = self.sources.debug_dirs.iter().filter_map(|dir| {
            let tail = written.strip_prefix(super::DEBUG_DIR).ok()?;
            Some(dir.join(tail))
        });
        let id = link.build_id;
        let same = |at: &At| at.elf.ids.gnu == Some(id);
        let found = self
            .local()
            .by_build_id(id)
            .or_else(|| {
                let mut paths = beside.into_iter().chain(below);
                paths.find_map(|path| open(&path, &self.sources.scratch).filter(same))
            })
            .or_else(|| self.cached_file(Some(id), CacheKind::Debuginfo))
            .or_else(|| self.fetch(Some(id), Artifact::Debuginfo));
        if found.is_none() {
            self.note(format!("its common debug information, build-id {id}, is missing"));
        }
        found
    }

    /// Whether offsets cannot become addresses with the debug file alone.
    fn needs_executable(&self, debug: Option<&At>, code: &Option<FileOffset>) -> bool {
        let files = Files { debug: debug.map(|at| &at.elf), ..Files::default() };
        code.is_some() && compile::segments(&files, *code).is_empty()
    }

    // What was fetched before, and what servers have.

    fn cached_file(&self, build_id: Option<BuildId>, kind: CacheKind) -> Option<At> {
        let blob = self.sources.cached(&Key::new(build_id?.into(), kind))?;
        self.of_blob(blob)
    }

    fn fetch(&mut self, build_id: Option<BuildId>, artifact: Artifact) -> Option<At> {
        let blob = self.fetch_blob(build_id, artifact)?;
        self.of_blob(blob)
    }

    /// Functions of a debug file that was too large, by the sections that have them; and where they
    /// are from.
    fn symbol_table(&mut self, build_id: Option<BuildId>) -> Option<(SymbolTable, String)> {
        let entries = self.fetch_blob(build_id, Artifact::Section(".symtab"))?;
        let strings = self.fetch_blob(build_id, Artifact::Section(".strtab"))?;
        let bytes = |blob: &Blob| blob.file.metadata().map_or(0, |metadata| metadata.len());
        let total = bytes(&entries) + bytes(&strings);
        let origin = format!("{} and .strtab ({total} bytes)", entries.meta.origin);
        let [entries, strings] = [entries, strings].map(|blob| Bytes::map(&blob.file));
        Some((SymbolTable { entries: entries.ok()?, strings: strings.ok()? }, origin))
    }

    fn fetch_blob(&mut self, build_id: Option<BuildId>, artifact: Artifact) -> Option<Blob> {
        let (debuginfod, cache) = (self.sources.debuginfod.as_ref()?, self.sources.cache.as_ref()?);
        let Some(build_id) = build_id else {
            self.note("it has no build-id to ask servers for".to_owned());
            return None;
        };
        match debuginfod.fetch(build_id, artifact, cache, self.deadline, &self.sources.metrics) {
            Ok(blob) => Some(blob),
            Err(error) => {
                self.fetch_failed = true;
                self.too_large |=
                    artifact == Artifact::Debuginfo && matches!(error, Absent::TooLarge(_));
                self.note(match error {
                    Absent::Missing(_) => error.to_string(),
                    error => format!("{}: {error}", artifact.path()),
                });
                None
            }
        }
    }

    fn of_blob(&self, blob: Blob) -> Option<At> {
        let bytes = blob.file.metadata().ok()?.len();
        let elf = Elf::open(blob.file, &self.sources.scratch).ok()?;
        let origin = if blob.meta.origin.is_empty() {
            "the symbol cache".to_owned()
        } else {
            format!("{} ({bytes} bytes)", blob.meta.origin)
        };
        Some(At { elf, path: blob.path, origin, rung: Rung::Debuginfod })
    }
}

/// What the table of a file is kept under that was handed over.
fn handed_table(id: &Id) -> Key {
    Key::new(id.clone(), CacheKind::HandedTable(table::VERSION))
}

/// Quality of a table from which nothing is missing.
const WHOLE: u8 = 1;

/// Nothing better can be found.
fn is_best(known: Option<&Known>) -> bool {
    known.is_some_and(|known| known.whole && known.table.best() == Some(Kind::Dwarf))
}

/// The best kind of symbols an executable has of its own, as its sections say.
fn offers(elf: &Elf) -> Option<Kind> {
    let sections = [
        (".debug_info", Kind::Dwarf),
        (".gopclntab", Kind::Gopclntab),
        (".data.rel.ro.gopclntab", Kind::Gopclntab),
        (".symtab", Kind::Symtab),
        (".gnu_debugdata", Kind::MiniDebugInfo),
        (".dynsym", Kind::Dynsym),
    ];
    sections.into_iter().find(|(name, _)| elf.has(name)).map(|(_, kind)| kind)
}

/// Whether its functions have addresses: not in an object file, unless it is a kernel module's.
fn has_addresses(at: &At) -> bool {
    !at.elf.relocatable || at.elf.is_kernel()
}
