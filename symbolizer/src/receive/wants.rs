//! What a symbolizer asks a collector for: artifacts that epochs refer to, and files it cannot see.
//!
//! Keeps no content: artifacts go to the log of the window that asked, pieces of files to
//! [`Handed`]. Used by `session/` and `serve/`.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use stackwire_cache::{Blob, Cache, Key, Kind};
use stackwire_model::{BuildId, ExecutableKey};
use stackwire_proto::{MAX_ARTIFACT_BYTES, v1};
use stackwire_symbols::table;

use super::allowance::Allowance;
use super::handed::{Ask, FileWanted, Handed, Taken, key};
use super::log::{Log, LogError};
use super::tenant::HANDED_OVER;
use crate::capture::Assembler;
use crate::ingest::Met;
use crate::profile::{ArtifactHash, Executable};
use crate::resolve::Pins;
#[cfg(doc)]
use crate::resolve::Sources;

/// What to ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Artifacts.
    pub artifacts: Vec<ArtifactHash>,
    /// Files.
    pub files: Vec<FileWanted>,
}

impl Wanted {
    /// Adds more.
    pub fn extend(&mut self, more: Self) {
        self.artifacts.extend(more.artifacts);
        self.files.extend(more.files);
    }
}

/// What is known of the host that a stream comes from.
#[derive(Debug, Default)]
pub struct Place {
    /// The collector is on this host, so files of its processes are worth opening while they live.
    pub is_here: bool,
    /// Every file is asked for.
    pub share_all: bool,
    /// Files fetched and tables made before.
    pub cache: Option<Arc<Cache>>,
    /// See [`Sources::trust_executables`].
    pub trust_executables: bool,
    /// How much may be asked for, if not everything.
    pub allowance: Option<Arc<dyn Allowance>>,
}

/// What a window has asked for, and what has come.
#[derive(Debug)]
pub struct Wants {
    place: Arc<Place>,
    handed: Arc<Handed>,
    asked: HashMap<ArtifactHash, Progress>,
    /// Looked for already.
    met: HashSet<Executable>,
    files: Vec<ExecutableKey>,
}

/// Most artifacts that a window asks for: a perf-map for each process of a large host.
const MAX_ASKED: usize = 65_536;

/// Of an artifact.
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    /// This many bytes have come.
    Part(u64),
    Whole,
}

impl Wants {
    /// Nothing yet.
    #[must_use]
    pub fn new(place: Arc<Place>, handed: Arc<Handed>) -> Self {
        Self { place, handed, asked: HashMap::new(), met: HashSet::new(), files: Vec::new() }
    }

    /// What an epoch needs that was not asked for, and what the log is to say of files that are
    /// here. `assembler` has the epoch, `met` is what it met. Files of this host that are still
    /// mapped are held open by `pins`.
    pub fn look(
        &mut self,
        assembler: &Assembler,
        met: &Met,
        pins: &Pins,
    ) -> (Wanted, Vec<v1::CollectorMessage>) {
        let mut known = Vec::new();
        let mut wanted = Wanted { artifacts: assembler.wanted(), files: Vec::new() };
        wanted.artifacts.retain(|hash| !self.asked.contains_key(hash));
        wanted.artifacts.truncate(MAX_ASKED.saturating_sub(self.asked.len()));
        self.asked.extend(wanted.artifacts.iter().map(|hash| (*hash, Progress::Part(0))));
        for &id in &met.executables {
            let executable = assembler.executable(id);
            let Executable::File { key, .. } = executable else { continue };
            let pids: Vec<u32> = met
                .mapped
                .iter()
                .filter(|(mapped, _)| self.place.is_here && *mapped == id)
                .map(|(_, pid)| *pid)
                .collect();
            // The inodes of another host mean nothing here.
            let here = (self.place.is_here || executable.build_id().is_some())
                && pins.pin(executable, &pids);
            let new = self.met.insert(executable.clone());
            let is_known = || here || self.is_cached(executable.build_id());
            if !new || (!self.place.share_all && is_known()) {
                continue;
            }
            match key.map_or(Ask::Nothing, |key| self.handed.ask(key)) {
                Ask::Nothing => {}
                Ask::For(file) => match self.allowed(|allowance| allowance.executable(file.key)) {
                    Ok(()) => {
                        self.files.push(file.key);
                        wanted.files.push(file);
                    }
                    Err(why) => known.push(self.handed.refuse(file.key, why)),
                },
                Ask::Known(message) => known.push(*message),
            }
        }
        (wanted, known)
    }

    /// Takes note of a piece of an artifact; whether to keep it. Unasked for, it would only fill
    /// the disk.
    pub fn artifact(&mut self, chunk: &v1::ArtifactChunk) -> bool {
        let hash = ArtifactHash::try_from(chunk.hash.as_slice()).unwrap_or_default();
        let Some(progress @ Progress::Part(_)) = self.asked.get_mut(&hash) else { return false };
        // The first piece may come again, from a collector that reads it anew.
        let come = if chunk.offset == 0 { 0 } else { progress.bytes() };
        if chunk.offset != come || chunk.length > MAX_ARTIFACT_BYTES {
            return false;
        }
        let allowance = self.place.allowance.as_ref();
        let bytes = chunk.piece_length.into();
        if let Some(Err(why)) = allowance.map(|allowance| allowance.artifact(bytes)) {
            tracing::debug!("an artifact is not taken: {why}");
            *progress = Progress::Whole;
            return false;
        }
        let come = come + u64::from(chunk.piece_length);
        *progress = if come >= chunk.length { Progress::Whole } else { Progress::Part(come) };
        true
    }

    /// Takes a piece of a file. It is kept outside of the log until the file is whole, so that a
    /// transfer may go on in another stream. Then it goes into the log, for whoever resolves that
    /// again.
    ///
    /// # Errors
    /// When the log cannot be written.
    pub fn file(&mut self, chunk: &v1::ArtifactChunk, log: &mut Log) -> Result<Wanted, LogError> {
        let Some(key) = key(chunk).filter(|key| self.handed.is_wanted(*key)) else {
            return Ok(Wanted::default());
        };
        let bytes = chunk.piece_length.into();
        if let Err(why) = self.allowed(|allowance| allowance.artifact(bytes)) {
            log.append_one(&self.handed.refuse(key, why))?;
            return Ok(Wanted::default());
        }
        match self.handed.take(chunk) {
            Taken::Nothing => {}
            Taken::Known(message) if !self.place.share_all => log.append_one(&message)?,
            Taken::Refused(message) => log.append_one(&message)?,
            Taken::Again => {
                let files = vec![FileWanted { key, offset: 0, hash_only: false }];
                return Ok(Wanted { files, ..Wanted::default() });
            }
            Taken::Whole | Taken::Known(_) => {
                let mut messages = self.handed.messages(chunk);
                messages.try_for_each(|message| log.append_one(&message))?;
            }
        }
        Ok(Wanted::default())
    }

    /// Files asked for that have not come, for a log that is about to be closed.
    #[must_use]
    pub fn left(&self) -> Vec<v1::CollectorMessage> {
        self.handed.left(&self.files)
    }

    /// Everything asked for has come.
    #[must_use]
    pub fn are_fulfilled(&self) -> bool {
        self.asked.values().all(|progress| *progress == Progress::Whole)
            && self.handed.is_complete()
    }

    fn allowed(
        &self,
        ask: impl FnOnce(&dyn Allowance) -> Result<(), String>,
    ) -> Result<(), String> {
        self.place.allowance.as_deref().map_or(Ok(()), ask)
    }

    /// Whether the cache has the file or what was made of it, and not from any collector.
    fn is_cached(&self, build_id: Option<BuildId>) -> bool {
        let (Some(cache), Some(id)) = (&self.place.cache, build_id) else { return false };
        let kinds = [Kind::Executable, Kind::Table(table::VERSION)];
        let trusted =
            |blob: Blob| self.place.trust_executables || !blob.meta.origin.starts_with(HANDED_OVER);
        let has = |kind| {
            let found = cache.get(&Key::new(id.into(), kind)).ok().flatten();
            found.is_some_and(trusted)
        };
        kinds.into_iter().any(has)
    }
}

impl Progress {
    fn bytes(&self) -> u64 {
        match self {
            Self::Part(bytes) => *bytes,
            Self::Whole => 0,
        }
    }
}
