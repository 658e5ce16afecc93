//! perf's build-id cache (`perf --buildid-dir DIR report`), made of the files names were found in, so that perf on another host
//! names what was named here.
//!
//! perf looks for `DIR/.build-id/NN/REST/elf`, `debug` beside it, and for a kernel's symbols in
//! `DIR/[kernel.kallsyms]/BUILD-ID/kallsyms` (`build-id.c`). Reads and
//! copies files, parses none.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use stackwire_cache::Kind;
use tempfile::NamedTempFile;

use super::local::Local;
use super::{Sources, file, ladder, running_in};
use crate::capture::Artifacts;
use crate::export::{jitted_images, kernel_places};
use crate::profile::{Executable, ExecutableId, Profile, hex};

/// Puts executables, debug files, kernel symbols and files for code made at run time below a directory; what is there
/// already stays.
///
/// # Errors
/// When the directory cannot be written. What cannot be found is left out: the report says what has no names.
pub fn lay_out(
    profile: &Profile,
    artifacts: &Artifacts,
    sources: &Sources,
    directory: &Path,
) -> io::Result<()> {
    for (id, image) in jitted_images(profile) {
        if let Some(place) = place(directory, &id) {
            put(&place, "elf", &mut &*image)?;
        }
    }
    for (index, executable) in profile.executables.iter().enumerate() {
        let id = executable.build_id();
        let Some(place) = place(directory, id) else { continue };
        match executable {
            Executable::File { .. } => {
                let pids = running_in(profile, ExecutableId(index as u32));
                let cached = |kind| {
                    let key = ladder::key(id, kind)?;
                    sources.cache.as_ref()?.get(&key).ok().flatten().map(|blob| blob.file)
                };
                let opened = file::open(executable, &pids, &sources.pinned, artifacts.handed());
                if let Some(mut elf) =
                    opened.ok().map(|opened| opened.file).or_else(|| cached(Kind::Executable))
                {
                    io::Seek::rewind(&mut elf)?;
                    put(&place, "elf", &mut elf)?;
                }
                let local = Local(sources).by_build_id(id);
                let local = local.and_then(|at| std::fs::File::open(at.path).ok());
                if let Some(mut debug) = local.or_else(|| cached(Kind::Debuginfo)) {
                    put(&place, "debug", &mut debug)?;
                }
            }
            Executable::Kernel { module, kallsyms: Some(hash), .. } if module.is_empty() => {
                if let Some(snapshot) = artifacts.get(hash) {
                    let text = absolute(profile, &String::from_utf8_lossy(snapshot));
                    let place = directory.join("[kernel.kallsyms]").join(hex(id));
                    put(&place, "kallsyms", &mut text.as_bytes())?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// `DIR/.build-id/NN/REST`.
fn place(directory: &Path, id: &[u8]) -> Option<PathBuf> {
    let hex = hex(id);
    let (first, rest) = hex.split_at_checked(2).filter(|(_, rest)| !rest.is_empty())?;
    Some(directory.join(".build-id").join(first).join(rest))
}

/// Writes a file, whole or not at all, unless it is there.
fn put(place: &Path, name: &str, content: &mut dyn Read) -> io::Result<()> {
    std::fs::create_dir_all(place)?;
    let path = place.join(name);
    if path.exists() {
        return Ok(());
    }
    let mut file = NamedTempFile::new_in(place)?;
    io::copy(content, &mut file)?;
    file.flush()?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// A snapshot (`module TAB offset TAB name`) as `/proc/kallsyms` would have it, were the kernel where perf.data shows it.
fn absolute(profile: &Profile, snapshot: &str) -> String {
    let places = kernel_places(profile);
    let base = |wanted: &str| {
        places.iter().find_map(|(index, (start, _))| match &profile.executables[*index as usize] {
            Executable::Kernel { module, .. } if module == wanted => Some(*start),
            _ => None,
        })
    };
    let mut text = String::new();
    let mut known: (&str, Option<u64>) = ("", base(""));
    for line in snapshot.lines() {
        let mut fields = line.split('\t');
        let (Some(module), Some(offset), Some(name)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        if known.0 != module {
            known = (module, base(module));
        }
        let offset = u64::from_str_radix(offset, 16).ok();
        if let (Some(base), Some(offset)) = (known.1, offset) {
            let suffix = if module.is_empty() { String::new() } else { format!("\t[{module}]") };
            // A String takes everything.
            let _ = writeln!(text, "{:016x} t {name}{suffix}", base.saturating_add(offset));
        }
    }
    text
}
