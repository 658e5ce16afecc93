//! Makes perf's build-id cache (`perf --buildid-dir DIR report`) of the files that names were found
//! in. With it, perf on another host names what was named here.
//!
//! The layout is perf's own: `DIR/NAME/BUILD-ID/{elf,debug,kallsyms}`, and `DIR/.build-id/NN/REST`
//! that leads there (`build-id.c`). Files are copied, and none is parsed.

use std::collections::{BTreeSet, HashSet};
use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::path::{Component, Path, PathBuf};

use stackwire_cache::{Key, Kind};
use stackwire_formats::kernel_places;
use stackwire_formats::perf_data::{interpreted_image, jitted_images, stand_in};
use stackwire_model::BuildId;
use tempfile::NamedTempFile;

use super::local::Local;
use super::{Sources, running_in};
use crate::artifacts::Artifacts;
use crate::profile::{Executable, ExecutableId, Named, Profile};

/// Puts executables, debug files, kernel symbols and files for code made at run time and for
/// functions of interpreters below a directory; what is there already stays.
///
/// # Errors
/// When the directory cannot be written. What cannot be found is left out: the report says what has
/// no names.
pub fn lay_out(
    named: Named<'_>,
    artifacts: &Artifacts,
    sources: &Sources,
    directory: &Path,
) -> io::Result<()> {
    let profile = named.profile;
    for image in jitted_images(named).chain(interpreted_image(named)) {
        let (name, id, image) = image?;
        if let Some(place) = place(directory, &name, BuildId::new(&id))? {
            put(&place, "elf", &mut &*image)?;
        }
    }
    for (index, executable) in profile.executables.iter().enumerate() {
        let (index, id) = (ExecutableId(index as u32), executable.build_id());
        match executable {
            Executable::File { path, .. } => {
                let Some(place) = place(directory, path, id)? else { continue };
                let pids = running_in(profile, index);
                let cached = |kind| Some(sources.cached(&Key::new(id?.into(), kind))?.file);
                let opened = sources.pinned.open(executable, &pids, artifacts.handed()).ok();
                let elf = match opened {
                    Some(opened) if opened.handed_over.is_none() => Some(opened.file),
                    other => cached(Kind::Executable).or(other.map(|opened| opened.file)),
                };
                let local = id.and_then(|id| Local(sources).by_build_id(id));
                let local = local.and_then(|at| std::fs::File::open(at.path).ok());
                let debug = local.or_else(|| cached(Kind::Debuginfo));
                let is_gone = elf.is_none() && debug.is_none();
                for (mut file, name) in [(elf, "elf"), (debug, "debug")] {
                    if let Some(file) = &mut file {
                        io::Seek::rewind(file)?;
                        put(&place, name, file)?;
                    }
                }
                // Names that were known from before.
                if is_gone && let Some(image) = stand_in(named, index)? {
                    put(&place, "elf", &mut &*image)?;
                }
            }
            Executable::Kernel { module, kallsyms: Some(hash), .. } if module.is_empty() => {
                if let Some(snapshot) = artifacts.kernel_symbols(profile, hash)
                    && let Some(place) = place(directory, "[kernel.kallsyms]", id)?
                {
                    let text = absolute(profile, &String::from_utf8_lossy(&snapshot));
                    add_symbols(&place, &text)?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// `DIR/NAME/BUILD-ID`, which `DIR/.build-id/NN/REST` leads to. None without a build-id.
fn place(directory: &Path, name: &str, id: Option<BuildId>) -> io::Result<Option<PathBuf>> {
    let Some(hex) = id.map(|id| id.to_string()) else { return Ok(None) };
    let (first, rest) = hex.split_at(2);
    // Processes choose their paths: below the directory, whatever it says.
    let parts = Path::new(name).components().filter_map(|part| match part {
        Component::Normal(part) => Some(part),
        _ => None,
    });
    let inside = parts.collect::<PathBuf>().join(&hex);
    std::fs::create_dir_all(directory.join(&inside))?;
    let links = directory.join(".build-id").join(first);
    std::fs::create_dir_all(&links)?;
    let link = links.join(rest);
    match std::os::unix::fs::symlink(Path::new("../..").join(inside), &link) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        // It may lead to the same file under another name.
        _ => Ok(Some(link)),
    }
}

/// Marks where a function ends when the next one is not in the profile: perf lets a function reach
/// to the next symbol.
const UNNAMED: &str = "[unknown]";

/// Adds kernel symbols to those that are there of other captures. A file that is whole, as perf
/// writes it, stays.
fn add_symbols(place: &Path, text: &str) -> io::Result<()> {
    let path = place.join("kallsyms");
    let before = match std::fs::read_to_string(&path) {
        Ok(before) if !before.contains(UNNAMED) => return Ok(()),
        Ok(before) => before,
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(error),
    };
    // Addresses have sixteen digits each.
    let mut lines: BTreeSet<&str> = before.lines().chain(text.lines()).collect();
    let named = lines.iter().filter(|line| !line.contains(UNNAMED));
    let named: HashSet<&str> = named.filter_map(|line| line.get(..16)).collect();
    lines.retain(|line| {
        !line.contains(UNNAMED) || line.get(..16).is_some_and(|at| !named.contains(at))
    });
    let mut file = NamedTempFile::new_in(place)?;
    for line in lines {
        writeln!(file, "{line}")?;
    }
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// Writes a file, whole or not at all, unless it is there.
fn put(place: &Path, name: &str, content: &mut dyn Read) -> io::Result<()> {
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

/// A snapshot (`module TAB offset TAB name`) as `/proc/kallsyms` would have it, were the kernel
/// where perf.data shows it.
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
        let name = if name.is_empty() { UNNAMED } else { name };
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
