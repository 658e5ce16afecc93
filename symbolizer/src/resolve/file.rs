//! The file behind an executable. It is opened, and trusted only when it is the one that was
//! mapped.
//!
//! A path is a hint: the file there may have been replaced since, or belong to another container.
//! The build-id decides. Without one, inode and device of the mapping decide. Without these, the
//! file at the path is taken, and the report says so. Files are opened without blocking and read
//! only when they are regular, because the process chose the path.

use std::fs::{File, Metadata};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::mpsc;
use std::time::Duration;

use rustix::fs::{CWD, FileType, MemfdFlags, Mode, OFlags, fstat, memfd_create, openat};
use rustix::io::Errno;
use stackwire_cache::{Absent, Id};
use stackwire_elf::{ElfError, Headers};
use stackwire_model::{BuildId, Device, ExecutableKey};

use crate::profile::Executable;
use crate::receive::handed::{Handed, HandedFile, NotHanded};

/// Why there is no file.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It is of memory, or of the kernel.
    #[error("not a file")]
    NotAFile,
    /// Only its path is known. The collector would have said more of a file that it could tell.
    #[error("the capture says neither its build-id nor its inode")]
    NoIdentity,
    /// Nobody could tell which file is meant.
    #[error("the profile has neither its build-id nor its path")]
    Unknown,
    /// What tells it from others means nothing here.
    #[error("it has no build-id, and is on another host")]
    OtherHost,
    /// Nothing is at any of the places.
    #[error("no file found")]
    NotFound,
    /// Another inode.
    #[error("it has no build-id, and the file at its path is not the one that was mapped")]
    OtherFile,
    /// Another build-id than this.
    #[error("the file at its path does not have build-id {0}")]
    OtherBuildId(BuildId),
    /// A FIFO, a device, a directory.
    #[error("not a regular file")]
    NotRegular,
    /// No system call may take that long.
    #[error("its file system has not answered within {} s", PATIENCE.as_secs())]
    Hangs,
    /// It is not ELF.
    #[error(transparent)]
    Elf(#[from] ElfError),
    /// The system says why.
    #[error(transparent)]
    System(#[from] io::Error),
    /// At its path.
    #[error("{path}: {error}")]
    At {
        /// The path.
        path: String,
        /// What is wrong there.
        error: Box<Self>,
    },
    /// Neither here nor with the collector.
    #[error("{here}; {there}")]
    Neither {
        /// Why not here.
        here: Box<Self>,
        /// Why it was not handed over.
        there: NotHanded,
    },
    /// The image of a vDSO did not come with the capture.
    #[error("its image was not sent")]
    NoImage,
    /// It did, and is none.
    #[error("its image has {0} bytes, more than any vDSO")]
    ImageTooLarge(usize),
    /// A server had nothing either.
    #[error(transparent)]
    Fetch(#[from] Absent),
}

impl From<Errno> for FileError {
    fn from(error: Errno) -> Self {
        Self::System(error.into())
    }
}

/// An opened and verified file.
#[derive(Debug)]
pub struct Opened {
    /// The file.
    pub file: File,
    /// Where it was found, for the report.
    pub path: String,
    /// The collector handed it over, whose host has it at this path: what it is and whose.
    pub handed_over: Option<Id>,
}

impl Opened {
    pub(super) fn of(file: File, path: String) -> Self {
        Self { file, path, handed_over: None }
    }
}

/// Opens the file of an executable: through a process's root, at its path, or as the collector
/// handed it over.
///
/// # Errors
/// See [`FileError`].
pub fn open(executable: &Executable, pids: &[u32], handed: &Handed) -> Result<Opened, FileError> {
    match find(executable, pids) {
        Ok(opened) => Ok(opened),
        Err(here) => or_handed(here, executable, handed),
    }
}

/// The same, of a capture of another host: by its build-id alone.
///
/// # Errors
/// See [`FileError`].
pub fn open_elsewhere(executable: &Executable, handed: &Handed) -> Result<Opened, FileError> {
    if executable.build_id().is_some() {
        return open(executable, &[], handed);
    }
    or_handed(FileError::OtherHost, executable, handed)
}

fn or_handed(
    here: FileError,
    executable: &Executable,
    handed: &Handed,
) -> Result<Opened, FileError> {
    match handed.get(executable) {
        Some(Ok(HandedFile { file, id })) => {
            Ok(Opened { file, path: executable.name(), handed_over: Some(id) })
        }
        Some(Err(there)) => Err(FileError::Neither { here: Box::new(here), there }),
        None => Err(here),
    }
}

/// An image that is not in a file, as one.
///
/// # Errors
/// See [`FileError`].
pub fn of_image(image: &[u8]) -> Result<Opened, FileError> {
    if image.len() > MAX_IMAGE {
        return Err(FileError::ImageTooLarge(image.len()));
    }
    let mut file = File::from(memfd_create("image", MemfdFlags::CLOEXEC)?);
    file.write_all(image)?;
    Ok(Opened::of(file, "vDSO image".to_owned()))
}

/// Largest image of a vDSO taken; real ones have two to four pages.
const MAX_IMAGE: usize = 1 << 20;

/// A path as its process had it: the same however it was reached.
#[must_use]
pub fn shown(path: &str) -> String {
    let inside = || {
        let (pid, rest) = path.strip_prefix("/proc/")?.split_once('/')?;
        pid.parse::<u32>().ok()?;
        rest.strip_prefix("root").filter(|rest| rest.starts_with('/'))
    };
    inside().unwrap_or(path).to_owned()
}

/// A file system may never answer (FUSE, a dead NFS server), and nothing wakes a thread that waits
/// for it. So a thread of its own asks, and is left behind when there is no answer.
pub(super) fn find(executable: &Executable, pids: &[u32]) -> Result<Opened, FileError> {
    let (sender, receiver) = mpsc::channel();
    let (of, pids) = (executable.clone(), pids.to_vec());
    let started = std::thread::Builder::new().name("open".to_owned()).spawn(move || {
        // Who asked may have given up.
        let _ = sender.send(look_for(&of, &pids));
    });
    started?;
    receiver.recv_timeout(PATIENCE).unwrap_or(Err(FileError::Hangs))
}

/// How long a file system may take to open a file and read its head.
const PATIENCE: Duration = Duration::from_secs(2);

fn look_for(executable: &Executable, pids: &[u32]) -> Result<Opened, FileError> {
    let Executable::File { path, key } = executable else {
        return Err(FileError::NotAFile);
    };
    // Through the process's own root, its executable as the kernel holds it, then as we see the
    // path.
    let through = pids
        .iter()
        .take(8)
        .flat_map(|pid| [format!("/proc/{pid}/root{path}"), format!("/proc/{pid}/exe")]);
    let mut reason = None;
    // Of a profile that says neither, whose processes may be of another host: its path alone.
    let unknown = key.is_none();
    if unknown && !path.starts_with('/') {
        return Err(FileError::Unknown);
    }
    let through = through.filter(|_| !unknown);
    for candidate in through.chain([path.clone()]) {
        match open_regular(&candidate) {
            Ok(file) => match is_same(&file, *key) {
                Ok(true) => {
                    // What /proc/PID/exe is a link to is the path the process had.
                    let exe = candidate.ends_with("/exe") && candidate.starts_with("/proc/");
                    return Ok(Opened::of(file, if exe { path.clone() } else { candidate }));
                }
                Err(error) => reason = Some(error),
                Ok(false) if candidate == *path => {
                    let other = executable.build_id().map(FileError::OtherBuildId);
                    reason = Some(other.unwrap_or(FileError::OtherFile));
                }
                Ok(false) => {}
            },
            Err(error) if candidate == *path => {
                let (path, error) = (path.clone(), Box::new(error));
                reason = Some(FileError::At { path, error });
            }
            Err(_) => {}
        }
    }
    Err(reason.unwrap_or(FileError::NotFound))
}

/// Opens a file without waiting, if it is a regular one.
///
/// # Errors
/// See [`FileError`].
pub fn open_regular(path: &str) -> Result<File, FileError> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let fd = openat(CWD, path, flags, Mode::empty())?;
    let stat = fstat(fd.as_fd())?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(FileError::NotRegular);
    }
    Ok(File::from(fd))
}

fn is_same(file: &File, wanted: Option<ExecutableKey>) -> Result<bool, FileError> {
    match wanted {
        // From a profile that says neither; the report says so.
        None => Ok(true),
        Some(ExecutableKey::BuildId(id)) => Ok(build_id(file)? == Some(id)),
        Some(ExecutableKey::File(id)) => {
            let metadata = file.metadata()?;
            // gperftools writes no device.
            let same_device = [Device::default(), device(&metadata)].contains(&id.device());
            Ok(metadata.ino() == id.inode() && same_device)
        }
    }
}

fn device(metadata: &Metadata) -> Device {
    let dev = metadata.dev();
    Device { major: rustix::fs::major(dev), minor: rustix::fs::minor(dev) }
}

/// GNU build-id of an ELF file.
fn build_id(file: &File) -> Result<Option<BuildId>, FileError> {
    let headers = Headers::read(file)?;
    // A copy that was cut short must not stand for the whole file that may be had elsewhere.
    headers.check_all()?;
    Ok(headers.ids.gnu)
}

#[cfg(test)]
mod tests {
    use stackwire_model::FileId;

    use super::*;

    fn this_program() -> (String, BuildId) {
        let path = std::fs::read_link("/proc/self/exe").unwrap().to_str().unwrap().to_owned();
        let id = build_id(&File::open(&path).unwrap()).unwrap().unwrap();
        (path, id)
    }

    #[test]
    fn a_path_is_trusted_only_with_the_right_build_id() {
        let (path, build_id) = this_program();
        let mut executable = Executable::File { path, key: Some(build_id.into()) };
        assert!(open(&executable, &[], &Handed::default()).is_ok());
        if let Executable::File { key, .. } = &mut executable {
            *key = BuildId::new(&[1; 20]).map(Into::into);
        }
        let reason = open(&executable, &[], &Handed::default()).unwrap_err();
        let reason = reason.to_string();
        assert!(reason.contains("does not have build-id"), "{reason}");
    }

    #[test]
    fn without_a_build_id_the_inode_decides() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("plain");
        std::fs::write(&path, "x").unwrap();
        let metadata = std::fs::metadata(&path).unwrap();
        let path = path.to_str().unwrap().to_owned();
        let file = |inode| {
            let key = FileId::new(inode, device(&metadata)).map(Into::into);
            Executable::File { path: path.clone(), key }
        };
        assert!(open(&file(metadata.ino()), &[], &Handed::default()).is_ok());
        assert!(open(&file(metadata.ino() + 1), &[], &Handed::default()).is_err());
    }

    #[test]
    fn what_is_not_a_regular_file_is_not_opened() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fifo").to_str().unwrap().to_owned();
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let key = BuildId::new(&[1; 20]).map(Into::into);
        let executable = Executable::File { path, key };
        let reason = open(&executable, &[], &Handed::default()).unwrap_err();
        let reason = reason.to_string();
        assert!(reason.contains("not a regular file"), "{reason}");
    }
}
