//! Where an output goes: a file that is replaced whole, or whatever else a path leads to, which is
//! written and never replaced.
//!
//! Called by `output.rs`; knows no format.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Seek};
use std::os::fd::AsFd;
use std::path::Path;

use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use tempfile::NamedTempFile;

use super::place::{Placer, Promise};

/// Where an output goes.
#[derive(Debug)]
pub enum Target {
    /// Renamed to the path at the end: who reads there finds the old file or the whole new one.
    New(NamedTempFile, Promise),
    /// A descriptor, a pipe, a device, or what a link leads to. It is written when all output is
    /// there; until then the output is in a file without a name. A regular file is cut first,
    /// unless it is a descriptor that somebody else has written to.
    Written { file: File, cut: bool, first: File },
}

impl Target {
    /// Opens it. `-` is standard output.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn open(path: &Path, placer: &Placer) -> io::Result<Self> {
        if let Some(file) = descriptor(path)? {
            return Ok(Self::Written { file, cut: false, first: tempfile::tempfile()? });
        }
        match std::fs::symlink_metadata(path) {
            Ok(found) if !found.is_file() => {
                // A link may lead to nothing yet.
                let options = &mut OpenOptions::new();
                let file =
                    options.write(true).create(found.is_symlink()).truncate(false).open(path)?;
                let cut = file.metadata()?.is_file();
                Ok(Self::Written { file, cut, first: tempfile::tempfile()? })
            }
            _ => {
                let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
                let file = NamedTempFile::new_in(directory.unwrap_or(Path::new(".")))?;
                let promise = placer.promise(file.path(), path)?;
                Ok(Self::New(file, promise))
            }
        }
    }

    /// Lets `write` fill it, then puts it in its place.
    ///
    /// # Errors
    /// Those of `write`, or when it cannot be put there.
    pub fn fill(self, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
        match self {
            Self::New(mut file, promise) => {
                write(file.as_file_mut())?;
                promise.put(file)
            }
            // A pipe has no beginning to go back to.
            Self::Written { file: mut to, cut, first: mut file } => {
                write(&mut file)?;
                file.rewind()?;
                if cut {
                    to.set_len(0)?;
                }
                match io::copy(&mut file, &mut to) {
                    // `… | head` has seen enough.
                    Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
                    copied => copied.map(drop),
                }
            }
        }
    }
}

/// Whether a path names standard output.
#[must_use]
pub fn is_stdout(path: &Path) -> bool {
    ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"].iter().any(|name| path == Path::new(name))
}

/// The descriptor of this process that a path names. It is used as it is: a file that is opened
/// again would be written from its first byte, over what is there already.
fn descriptor(path: &Path) -> io::Result<Option<File>> {
    if is_stdout(path) {
        return Ok(Some(io::stdout().as_fd().try_clone_to_owned()?.into()));
    }
    if path == Path::new("/dev/stderr") {
        return Ok(Some(io::stderr().as_fd().try_clone_to_owned()?.into()));
    }
    let number = ["/dev/fd", "/proc/self/fd"].iter().find_map(|of| path.strip_prefix(of).ok());
    let number = number.and_then(|number| number.to_str()?.parse().ok());
    let Some(number) = number else { return Ok(None) };
    let own = pidfd_open(getpid(), PidfdFlags::empty())?;
    Ok(Some(pidfd_getfd(own, number, PidfdGetfdFlags::empty())?.into()))
}
