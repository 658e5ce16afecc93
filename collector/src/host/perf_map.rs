//! Snapshots of perf-maps: the file in which a JIT lists the functions it made.
//!
//! The file belongs to the process looked at, so it may be anything: a FIFO, a directory, a link, 2 GiB of
//! zeros. It is opened without blocking and without following links, and read only when it is a regular
//! file of bounded size owned by the process's user or root. Content is not looked at: parsing is
//! for the symbolizer. This module is where the broker process will stand between (DESIGN, processes).

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;

use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, openat};

/// Largest perf-map taken.
pub const MAX_BYTES: u64 = 64 << 20;

/// There is none, or it was not taken; the text goes to the report.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Missing {
    /// No file where the JIT would write it.
    #[error("the process wrote no perf-map")]
    None,
    /// Not to be had.
    #[error("its perf-map cannot be read: {0}")]
    Unreadable(String),
    /// A FIFO, directory, device, socket or link.
    #[error("its perf-map is not a regular file")]
    NotAFile,
    /// Beyond [`MAX_BYTES`].
    #[error("its perf-map has {0} bytes, more than the {MAX_BYTES} that are read")]
    TooLarge(u64),
    /// Somebody else put it there.
    #[error("its perf-map belongs to user {0}, not to the process")]
    WrongOwner(u32),
}

/// Reads the perf-map of `pid` through its own root, under its pid in its own namespace; failing that for
/// want of permission, `/tmp` as this process sees it.
///
/// # Errors
/// See [`Missing`].
pub fn read(pid: u32) -> Result<Vec<u8>, Missing> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let own_pid = namespace_pid(&status).unwrap_or(pid);
    let uid = effective_uid(&status);
    match read_file(&format!("/proc/{pid}/root/tmp/perf-{own_pid}.map"), uid) {
        // /proc/PID/root needs CAP_SYS_PTRACE for other users, and is gone with the process.
        Err(Missing::Unreadable(_) | Missing::None) => {
            read_file(&format!("/tmp/perf-{pid}.map"), uid)
        }
        other => other,
    }
}

/// The pid in the innermost namespace: the last of `NSpid` in `/proc/PID/status`.
#[must_use]
pub fn namespace_pid(status: &str) -> Option<u32> {
    field(status, "NSpid:")?.split_whitespace().next_back()?.parse().ok()
}

fn effective_uid(status: &str) -> Option<u32> {
    field(status, "Uid:")?.split_whitespace().nth(1)?.parse().ok()
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name))
}

fn read_file(path: &str, uid: Option<u32>) -> Result<Vec<u8>, Missing> {
    let flags =
        OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NOCTTY;
    let fd = openat(CWD, path, flags, Mode::empty()).map_err(|error| match error {
        rustix::io::Errno::NOENT => Missing::None,
        rustix::io::Errno::LOOP | rustix::io::Errno::NXIO => Missing::NotAFile,
        other => Missing::Unreadable(io::Error::from(other).to_string()),
    })?;
    let stat = fstat(fd.as_fd()).map_err(|error| Missing::Unreadable(error.to_string()))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Missing::NotAFile);
    }
    // Without a living process to ask, only our own files and root's are believed.
    let uid = uid.unwrap_or_else(|| rustix::process::geteuid().as_raw());
    if stat.st_uid != uid && stat.st_uid != 0 {
        return Err(Missing::WrongOwner(stat.st_uid));
    }
    let size = u64::try_from(stat.st_size).unwrap_or(u64::MAX);
    if size > MAX_BYTES {
        return Err(Missing::TooLarge(size));
    }
    let mut content = Vec::new();
    // It may grow while it is read: the bound holds all the same.
    let taken = File::from(fd).take(MAX_BYTES).read_to_end(&mut content);
    taken.map_err(|error| Missing::Unreadable(error.to_string()))?;
    Ok(content)
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn at(dir: &tempfile::TempDir, name: &str) -> String {
        dir.path().join(name).to_str().unwrap().to_owned()
    }

    #[test]
    fn takes_regular_files_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let uid = Some(rustix::process::getuid().as_raw());
        std::fs::write(at(&dir, "map"), b"1000 10 f\n").unwrap();
        assert_eq!(read_file(&at(&dir, "map"), uid).unwrap(), b"1000 10 f\n");
        assert_eq!(read_file(&at(&dir, "none"), uid), Err(Missing::None));

        std::fs::create_dir(at(&dir, "directory")).unwrap();
        assert_eq!(read_file(&at(&dir, "directory"), uid), Err(Missing::NotAFile));
        std::os::unix::fs::symlink("/etc/passwd", at(&dir, "link")).unwrap();
        assert_eq!(read_file(&at(&dir, "link"), uid), Err(Missing::NotAFile));
        rustix::fs::mknodat(CWD, at(&dir, "fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
            .unwrap();
        assert_eq!(read_file(&at(&dir, "fifo"), uid), Err(Missing::NotAFile));

        let large = File::create(at(&dir, "large")).unwrap();
        large.set_len(2 << 30).unwrap();
        assert_eq!(read_file(&at(&dir, "large"), uid), Err(Missing::TooLarge(2 << 30)));
    }

    #[test]
    fn reads_the_innermost_pid_and_the_effective_user() {
        let status = "Name:\tx\nUid:\t1\t2\t3\t4\nNSpid:\t812\t7\n";
        assert_eq!(namespace_pid(status), Some(7));
        assert_eq!(effective_uid(status), Some(2));
        assert_eq!(namespace_pid(""), None);
    }
}
