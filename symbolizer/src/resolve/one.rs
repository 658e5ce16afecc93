//! The symbols of one executable, asked for by path or build-id: what `stackwire symbolize` and embedders use.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
    pub fn of_build_id(build_id: &[u8], sources: &Sources) -> Result<Self, String> {
        let executable = Err(String::new());
        let wanted = Wanted { build_id: build_id.to_vec(), executable, code: None, kernel: None };
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

fn deadline(sources: &Sources) -> Instant {
    Instant::now() + sources.debuginfod.as_ref().map_or(Duration::ZERO, |servers| servers.timeout())
}
