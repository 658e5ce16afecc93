//! What is opened, and what is refused: the rules of the broker, the same where there is none.
//!
//! A process chooses its paths, its root directory and what is mounted there, so a path may lead to a FIFO, a
//! device, or a file of somebody else that only a privileged opener could read. What is passed on is a regular
//! file that was mapped, that belongs to the process's user, or that everybody may read.

use std::fs::File;
use std::os::fd::OwnedFd;

use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, openat};
use rustix::io::Errno;

use super::Wanted;

/// Opens what is wanted.
///
/// # Errors
/// In words for the report.
pub(super) fn open(wanted: &Wanted) -> Result<File, String> {
    match wanted {
        Wanted::Mapped { pid, start, end, path } => {
            // The file itself, deleted, replaced or hidden as it may be; proc_pid_map_files(5).
            let linked = format!("/proc/{pid}/map_files/{start:x}-{end:x}");
            let mapped = plain(&linked, OFlags::empty())
                .map_err(|error| error.to_string())
                .and_then(|fd| regular(fd, |_| true));
            mapped.or_else(|reason| {
                // Gone, or we may not follow that link: then as everybody may.
                let places = [format!("/proc/{pid}/root{path}"), path.clone()];
                let mut places = places.iter().filter_map(|place| {
                    let fd = plain(place, OFlags::empty()).ok()?;
                    regular(fd, for_all).ok()
                });
                places.next().ok_or(reason)
            })
        }
        Wanted::Own { pid, path } => {
            // Of a process that is gone nobody can tell the user: then only what is our own.
            let user = user(*pid).unwrap_or(rustix::process::geteuid().as_raw());
            // Where its root is out of reach, it is mostly the one we have.
            let fd = plain(&format!("/proc/{pid}/root{path}"), OFlags::NOFOLLOW)
                .or_else(|_| plain(path, OFlags::NOFOLLOW))
                .map_err(why)?;
            regular(fd, |stat| stat.st_uid == user || for_all(stat))
        }
    }
}

/// Without waiting for a writer of a FIFO, or becoming the terminal's process.
fn plain(path: &str, more: OFlags) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    openat(CWD, path, flags | more, Mode::empty())
}

fn regular(fd: OwnedFd, allowed: impl Fn(&rustix::fs::Stat) -> bool) -> Result<File, String> {
    let stat = fstat(&fd).map_err(|error| error.to_string())?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err("it is not a regular file".to_owned());
    }
    if !allowed(&stat) {
        return Err(format!("it belongs to user {}, not to the process", stat.st_uid));
    }
    Ok(File::from(fd))
}

fn for_all(stat: &rustix::fs::Stat) -> bool {
    Mode::from_raw_mode(stat.st_mode).contains(Mode::ROTH)
}

fn why(error: Errno) -> String {
    match error {
        Errno::NOENT => super::NONE.to_owned(),
        Errno::LOOP | Errno::NXIO => "it is not a regular file".to_owned(),
        other => std::io::Error::from(other).to_string(),
    }
}

/// The effective user of a process, as this process sees it.
fn user(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn own(path: &std::path::Path) -> Result<Vec<u8>, String> {
        let pid = std::process::id();
        let path = path.to_str().unwrap().to_owned();
        let mut content = Vec::new();
        let mut file = open(&Wanted::Own { pid, path })?;
        std::io::Read::read_to_end(&mut file, &mut content).unwrap();
        Ok(content)
    }

    #[test]
    fn regular_files_of_the_user_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("map"), b"1000 10 f\n").unwrap();
        assert_eq!(own(&at("map")).unwrap(), b"1000 10 f\n");
        assert_eq!(own(&at("none")).unwrap_err(), super::super::NONE);

        std::fs::create_dir(at("directory")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", at("link")).unwrap();
        rustix::fs::mknodat(CWD, at("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        for name in ["directory", "link", "fifo"] {
            assert_eq!(own(&at(name)).unwrap_err(), "it is not a regular file", "{name}");
        }
    }

    #[test]
    fn a_file_of_another_user_only_when_all_may_read_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("map");
        std::fs::write(&path, b"x").unwrap();
        if std::os::unix::fs::chown(&path, Some(65534), None).is_err() {
            eprintln!("SKIPPED a_file_of_another_user_only_when_all_may_read_it: it needs root");
            assert!(std::env::var_os("STACKWIRE_NO_SKIP").is_none());
            return;
        }
        let mode = |mode| {
            std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode))
        };
        mode(0o600).unwrap();
        assert!(own(&path).unwrap_err().contains("belongs to user 65534"));
        mode(0o644).unwrap();
        assert_eq!(own(&path).unwrap(), b"x");
    }

    #[test]
    fn a_mapped_file_is_itself_however_it_is_called() {
        let code = a_mapped_file_is_itself_however_it_is_called as fn() as usize as u64;
        let pid = std::process::id();
        let maps = crate::process::maps::read(pid).unwrap();
        let found = maps.iter().find(|m| m.start <= code && code < m.start + m.length).unwrap();
        let (start, end) = (found.start, found.start + found.length);
        let path = "/nowhere".to_owned();
        let file = open(&Wanted::Mapped { pid, start, end, path });
        if rustix::process::geteuid().is_root() {
            use std::os::unix::fs::MetadataExt;
            let own = std::fs::metadata("/proc/self/exe").unwrap();
            assert_eq!(file.unwrap().metadata().unwrap().ino(), own.ino());
        }
        let path = std::fs::read_link("/proc/self/exe").unwrap().to_str().unwrap().to_owned();
        assert!(open(&Wanted::Mapped { pid, start: 0, end: 1, path }).is_ok(), "by its path");
    }
}
