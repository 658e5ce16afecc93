//! Files of this host that hold symbols of another file, in the places where distributions and
//! debuggers put them.
//!
//! The build-id of a file, or the checksum its link demands, shows that it is the right one. Called
//! by `ladder.rs`.

use std::path::{Path, PathBuf};

use stackwire_elf::{Elf, Scratch};
use stackwire_model::BuildId;

use super::kernel_files::{Kernel, places};
use super::{Sources, file};
use crate::metrics::Rung;

/// An ELF file and where it was found.
pub(super) struct At {
    pub(super) elf: Elf,
    /// Where it lies.
    pub(super) path: PathBuf,
    /// For people: a path or an address.
    pub(super) origin: String,
    pub(super) rung: Rung,
}

/// The places to look in.
pub(super) struct Local<'s>(pub(super) &'s Sources);

impl Local<'_> {
    /// `DIR/.build-id/NN/REST.debug`.
    pub(super) fn by_build_id(&self, build_id: BuildId) -> Option<At> {
        let hex = build_id.to_string();
        let (first, rest) = hex.split_at(2);
        self.0.debug_dirs.iter().find_map(|dir| {
            let path = dir.join(".build-id").join(first).join(format!("{rest}.debug"));
            open(&path, &self.0.scratch).filter(|at| at.elf.ids.gnu == Some(build_id))
        })
    }

    /// Where distributions put the debug files of kernels, which are by release and not by
    /// build-id.
    pub(super) fn kernel(&self, kernel: &Kernel, build_id: BuildId) -> Option<At> {
        let paths = places(kernel, &self.0.debug_dirs);
        paths.into_iter().find_map(|path| {
            open(&path, &self.0.scratch)
                .filter(|at| at.elf.ids.gnu == Some(build_id))
                // The module itself lies where its debug file does and knows no more than kallsyms.
                .filter(|at| at.elf.has(".debug_info"))
        })
    }

    /// The places gdb looks in, with the checksum the link demands.
    pub(super) fn by_link(&self, executable: &At) -> Option<At> {
        let link = executable.elf.debug_link()?;
        let directory = executable.path.parent()?;
        // Of a file seen through /proc/PID/root, the path it has in there.
        let inside: PathBuf = match directory.strip_prefix("/proc") {
            Ok(rest) => rest.components().skip(2).collect(),
            Err(_) => directory.strip_prefix("/").unwrap_or(directory).to_owned(),
        };
        let beside = [directory.join(&link.name), directory.join(".debug").join(&link.name)];
        let below = self.0.debug_dirs.iter().map(|dir| dir.join(&inside).join(&link.name));
        beside.into_iter().chain(below).find_map(|path| {
            open(&path, &self.0.scratch).filter(|at| at.elf.crc().is_ok_and(|crc| crc == link.crc))
        })
    }

    /// `PROGRAM.dwp` beside the program.
    pub(super) fn package(&self, program: &Path) -> Option<At> {
        let mut path = program.as_os_str().to_owned();
        path.push(".dwp");
        open(Path::new(&path), &self.0.scratch)
    }

    /// A `.dwo` where it was written, or beside the program. That it is the right one its id tells.
    pub(super) fn split(&self, program: &Path, directory: &str, name: &str) -> Option<Elf> {
        let written = Path::new(directory).join(name);
        let moved =
            program.parent().and_then(|parent| Some(parent.join(Path::new(name).file_name()?)));
        let paths = [Some(written), moved].into_iter().flatten();
        paths.into_iter().find_map(|path| open(&path, &self.0.scratch)).map(|at| at.elf)
    }
}

/// Opens an ELF file, if it is a regular one.
pub(super) fn open(path: &Path, scratch: &Scratch) -> Option<At> {
    let file = file::open_regular(path.to_str()?).ok()?;
    let origin = file::shown(path.to_str()?);
    let elf = Elf::open(file, scratch).ok()?;
    Some(At { elf, path: path.to_owned(), origin, rung: Rung::DebugFile })
}
