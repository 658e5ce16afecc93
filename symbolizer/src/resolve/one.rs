//! The symbols of one executable, asked for by path or build-id: what `stackwire symbolize` and
//! embedders use.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use stackwire_cache::{Key, Kind};
use stackwire_model::{BuildId, VirtAddr};
use stackwire_symbols::table::Table;

use super::file::FileError;
use super::ladder::{self, Found, Nothing, Wanted};
use super::recent::Recent;
use super::{Sources, file};
use crate::profile::{Line, Quality};

/// Symbols of one executable, whichever rung of the ladder had them.
#[derive(Debug)]
pub struct Symbols {
    found: Found,
    demangle: bool,
    recent: Arc<Recent>,
}

/// Why there are none.
#[derive(Debug, thiserror::Error)]
pub enum SymbolsError {
    /// Paths are printed, so they are text.
    #[error("its path is not UTF-8")]
    NotUtf8,
    /// It cannot be opened.
    #[error(transparent)]
    File(#[from] FileError),
    /// Nothing has a name in it.
    #[error(transparent)]
    Nothing(#[from] Nothing),
}

/// What an address is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Innermost first; empty when no symbol covers the address.
    pub frames: Arc<[Line]>,
    /// How good the symbols are, if there are any.
    pub quality: Option<Quality>,
}

impl Symbols {
    /// Of a file.
    ///
    /// # Errors
    /// When it is no ELF file or has nothing to offer.
    pub fn of_file(path: &Path, sources: &Sources) -> Result<Self, SymbolsError> {
        let path = path.to_str().ok_or(SymbolsError::NotUtf8)?;
        let file = file::open_regular(path)?;
        let opened = file::Opened { file, path: path.to_owned(), handed_over: None };
        let executable = Some(Ok(opened));
        Self::find(Wanted { build_id: None, executable, code: None, kernel: None }, sources)
    }

    /// Of whatever has this GNU build-id.
    ///
    /// # Errors
    /// When nothing was found.
    pub fn of_build_id(build_id: BuildId, sources: &Sources) -> Result<Self, SymbolsError> {
        let build_id = Some(build_id);
        let wanted = Wanted { build_id, executable: None, code: None, kernel: None };
        Self::find(wanted, sources)
    }

    fn find(wanted: Wanted, sources: &Sources) -> Result<Self, SymbolsError> {
        Ok(Self {
            found: ladder::find(wanted, sources, deadline(sources))?,
            demangle: sources.demangle,
            recent: Arc::clone(&sources.recent),
        })
    }

    /// What each address is, as the ELF file counts them (`llvm-symbolizer --obj` does the same).
    #[must_use]
    pub fn lookup(&self, addresses: &[VirtAddr]) -> Vec<Answer> {
        let named = self.recent.named(&self.found.table, addresses, self.demangle);
        let answers = named.into_iter().map(|named| match named {
            Some((frames, quality)) => Answer { frames, quality: Some(quality) },
            None => Answer { frames: Arc::default(), quality: None },
        });
        answers.collect()
    }

    /// The table the answers are from.
    #[must_use]
    pub fn table(&self) -> &Table {
        &self.found.table
    }

    /// The file the symbols are from.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.found.source
    }

    /// What was looked for and not found, or is broken.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.found.notes
    }
}

/// Build-ids that begin with these digits, of what is in the cache and in directories of debug
/// files: reports print the first twelve.
#[must_use]
pub fn build_ids(beginning: &str, sources: &Sources) -> BTreeSet<BuildId> {
    let beginning = beginning.to_ascii_lowercase();
    let rows = sources.cache.as_ref().and_then(|cache| cache.rows().ok()).unwrap_or_default();
    let by_build_id = |key: &Key| !matches!(key.kind, Kind::Handed | Kind::HandedTable(_));
    let rows = rows.into_iter().filter(|row| by_build_id(&row.key));
    let ids = rows.filter_map(|row| row.key.id.as_str().parse().ok());
    let mut found: BTreeSet<BuildId> = ids.collect();
    if let Some((first, _)) = beginning.split_at_checked(2) {
        for directory in &sources.debug_dirs {
            let entries = std::fs::read_dir(directory.join(".build-id").join(first));
            let names = entries.into_iter().flatten().flatten().map(|entry| entry.file_name());
            found.extend(names.filter_map(|name| {
                let rest = name.to_str()?.strip_suffix(".debug")?;
                format!("{first}{rest}").parse::<BuildId>().ok()
            }));
        }
    }
    found.retain(|id| id.to_string().starts_with(&beginning));
    found
}

fn deadline(sources: &Sources) -> Instant {
    Instant::now() + sources.debuginfod.as_ref().map_or(Duration::ZERO, |servers| servers.timeout())
}
