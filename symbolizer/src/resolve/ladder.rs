//! The resolve ladder: from an executable to the best table of its symbols that can be had.
//!
//! Each rung is a function; [`find`] is the order. What a rung could not give is a note for the report, never
//! an error: a lower rung may have it.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::Sources;
use super::file::{self, Opened};
use crate::compile::{self, Files};
use crate::elf::{Elf, Scratch};
use crate::profile::hex;
use crate::table::{Bytes, Table};

/// What is asked for.
#[derive(Debug)]
pub struct Wanted {
    /// GNU build-id, empty when unknown.
    pub build_id: Vec<u8>,
    /// The file itself, or why it is out of reach.
    pub executable: Result<Opened, String>,
    /// Where its code was mapped: offset in the file, bytes.
    pub code: Option<(u64, u64)>,
}

/// What was found.
#[derive(Debug)]
pub struct Found {
    /// The symbols.
    pub table: Table,
    /// The file they are from.
    pub source: String,
    /// What was looked for and not found, or is broken.
    pub notes: Vec<String>,
}

/// An ELF file and where it was found.
struct At {
    elf: Elf,
    path: String,
}

/// Climbs the ladder.
///
/// # Errors
/// In words for the report, when there is nothing to take a name from.
pub fn find(wanted: Wanted, sources: &Sources) -> Result<Found, String> {
    let mut notes = Vec::new();
    let executable = wanted.executable.and_then(|opened| {
        let elf = Elf::open(opened.file, &sources.scratch).map_err(|error| error.to_string())?;
        Ok(At { elf, path: opened.path })
    });
    let executable = executable.map_err(|reason| notes.push(reason)).ok();
    let build_id = match (&executable, wanted.build_id.is_empty()) {
        (Some(at), true) => at.elf.ids.gnu.clone().unwrap_or_default(),
        _ => wanted.build_id,
    };
    let has_dwarf = executable.as_ref().is_some_and(|at| at.elf.has(".debug_info"));
    let debug = match has_dwarf {
        true => None,
        false => debug_file(executable.as_ref(), &build_id, sources),
    };
    let with_dwarf = debug.as_ref().or(executable.as_ref());
    let alt = with_dwarf.and_then(|at| alt_file(at, sources, &mut notes));
    if executable.is_none() && debug.is_none() {
        return Err(notes.pop().unwrap_or_else(|| "no file found".to_owned()));
    }
    let files = Files {
        executable: executable.as_ref().map(|at| &at.elf),
        debug: debug.as_ref().map(|at| &at.elf),
        alt: alt.as_ref().map(|at| &at.elf),
    };
    let compiled = compile::compile(&files, wanted.code).map_err(|error| error.to_string())?;
    notes.extend(compiled.notes);
    let table = Table::open(Bytes::from(compiled.bytes)).map_err(|error| error.to_string())?;
    let source = with_dwarf.map_or(String::new(), |at| at.path.clone());
    Ok(Found { table, source, notes })
}

/// The separate debug file: by build-id, else by the executable's link to it.
fn debug_file(executable: Option<&At>, build_id: &[u8], sources: &Sources) -> Option<At> {
    by_build_id(build_id, sources).or_else(|| by_debug_link(executable?, sources))
}

/// `DIR/.build-id/NN/REST.debug`.
fn by_build_id(build_id: &[u8], sources: &Sources) -> Option<At> {
    let hex = hex(build_id);
    let (first, rest) = hex.split_at_checked(2).filter(|(_, rest)| !rest.is_empty())?;
    let paths = sources
        .debug_dirs
        .iter()
        .map(|dir| dir.join(".build-id").join(first).join(format!("{rest}.debug")));
    paths.into_iter().find_map(|path| {
        open(&path, &sources.scratch).filter(|at| at.elf.ids.gnu.as_deref() == Some(build_id))
    })
}

/// The places gdb looks in, with the checksum the link demands.
fn by_debug_link(executable: &At, sources: &Sources) -> Option<At> {
    let link = executable.elf.debug_link()?;
    let path = Path::new(&executable.path);
    let directory = path.parent()?;
    // Of a file seen through /proc/PID/root, the path it has in there.
    let inside: PathBuf = match directory.strip_prefix("/proc") {
        Ok(rest) => rest.components().skip(2).collect(),
        Err(_) => directory.strip_prefix("/").unwrap_or(directory).to_owned(),
    };
    let beside = [directory.join(&link.name), directory.join(".debug").join(&link.name)];
    let below = sources.debug_dirs.iter().map(|dir| dir.join(&inside).join(&link.name));
    beside.into_iter().chain(below).find_map(|path| {
        open(&path, &sources.scratch).filter(|at| at.elf.crc().is_ok_and(|crc| crc == link.crc))
    })
}

/// The file `dwz` moved common parts to.
fn alt_file(at: &At, sources: &Sources, notes: &mut Vec<String>) -> Option<At> {
    let link = at.elf.alt_link()?;
    let written = Path::new(&link.path);
    let beside = Path::new(&at.path).parent().map(|directory| directory.join(written));
    // Debian's path is absolute below /usr/lib/debug; with --debug-dir it is below that.
    let below = sources.debug_dirs.iter().filter_map(|dir| {
        let tail = written.strip_prefix("/usr/lib/debug").ok()?;
        Some(dir.join(tail))
    });
    let found = by_build_id(&link.build_id, sources).or_else(|| {
        beside.into_iter().chain(below).find_map(|path| {
            let same = |at: &At| at.elf.ids.gnu.as_deref() == Some(link.build_id.as_slice());
            open(&path, &sources.scratch).filter(same)
        })
    });
    if found.is_none() {
        notes.push(format!(
            "its common debug information, build-id {}, is missing",
            hex(&link.build_id)
        ));
    }
    found
}

fn open(path: &Path, scratch: &Scratch) -> Option<At> {
    let path = path.to_str()?.to_owned();
    let file: File = file::open_regular(&path).ok()?;
    Some(At { elf: Elf::open(file, scratch).ok()?, path })
}
