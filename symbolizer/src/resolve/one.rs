//! The symbols of one executable, asked for by path or build-id: what `stackwire symbolize` and embedders use.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use stackwire_cache::Id;

use super::ladder::{self, Found, Wanted};
use super::recent::Recent;
use super::{Sources, file};
use crate::profile::{Line, Quality};
use crate::table::Table;

/// Symbols of one executable, whichever rung of the ladder had them.
#[derive(Debug)]
pub struct Symbols {
    found: Found,
    demangle: bool,
    recent: Arc<Recent>,
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
    /// In words, when it is no ELF file or has nothing to offer.
    pub fn of_file(path: &Path, sources: &Sources) -> Result<Self, String> {
        let path = path.to_str().ok_or("its path is not UTF-8")?;
        let file = file::open_regular(path)?;
        let executable = Ok(file::Opened { file, path: path.to_owned(), handed_over: false });
        let wanted = Wanted { build_id: Vec::new(), executable, code: None, kernel: None };
        Ok(Self {
            found: ladder::find(wanted, sources, deadline(sources))
                .map_err(|nothing| nothing.to_string())?,
            demangle: sources.demangle,
            recent: Arc::clone(&sources.recent),
        })
    }

    /// Of whatever has this GNU build-id.
    ///
    /// # Errors
    /// In words, when nothing was found.
    pub fn of_build_id(build_id: &Id, sources: &Sources) -> Result<Self, String> {
        let executable = Err(String::new());
        let wanted = Wanted { build_id: build_id.bytes(), executable, code: None, kernel: None };
        Ok(Self {
            found: ladder::find(wanted, sources, deadline(sources))
                .map_err(|nothing| nothing.to_string())?,
            demangle: sources.demangle,
            recent: Arc::clone(&sources.recent),
        })
    }

    /// What an address is, as the ELF file counts them (`llvm-symbolizer --obj` does the same).
    #[must_use]
    pub fn lookup(&self, address: u64) -> Answer {
        match self.recent.named(&self.found.table, address, self.demangle) {
            Some((frames, quality)) => Answer { frames, quality: Some(quality) },
            None => Answer { frames: Arc::default(), quality: None },
        }
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

/// Build-ids that begin with these digits, of what is in the cache and in directories of debug files: reports print the
/// first twelve.
#[must_use]
pub fn build_ids(beginning: &str, sources: &Sources) -> BTreeSet<Id> {
    let beginning = beginning.to_ascii_lowercase();
    let rows = sources.cache.as_ref().and_then(|cache| cache.rows().ok()).unwrap_or_default();
    let mut found: BTreeSet<Id> = rows.into_iter().map(|row| row.key.id).collect();
    if let Some((first, _)) = beginning.split_at_checked(2) {
        for directory in &sources.debug_dirs {
            let entries = std::fs::read_dir(directory.join(".build-id").join(first));
            let names = entries.into_iter().flatten().flatten().map(|entry| entry.file_name());
            found.extend(names.filter_map(|name| {
                format!("{first}{}", name.to_str()?.strip_suffix(".debug")?).parse().ok()
            }));
        }
    }
    found.retain(|id| id.as_str().starts_with(&beginning));
    found
}

fn deadline(sources: &Sources) -> Instant {
    Instant::now() + sources.debuginfod.as_ref().map_or(Duration::ZERO, |servers| servers.timeout())
}
