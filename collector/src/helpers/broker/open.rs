//! What is opened, and what is refused: the rules of the broker, and of a collector without one.
//!
//! A process chooses its paths, its root directory and what is mounted there, so a path may lead to
//! a FIFO, a device, or a file of somebody else that only a privileged opener could read. What is
//! passed on is a regular file: one that was mapped and that its process may read, or one of the
//! process's user in its own root. Nothing is opened for reading before it is known what it is: to
//! open a device can have an effect.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat, openat2};

use super::{OpenError, said};
use crate::process::{Wanted, living_task};

/// Opens what is wanted, with the privileges of the caller.
///
/// # Errors
/// See [`OpenError`].
pub(super) fn open(wanted: &Wanted) -> Result<File, OpenError> {
    match wanted {
        Wanted::Mapped { pid, start, end, .. } => {
            // The file itself, deleted, replaced or hidden as it may be; proc_pid_map_files(5).
            let task = living_task(*pid).unwrap_or(*pid);
            let linked = format!("/proc/{task}/map_files/{start:x}-{end:x}");
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            let found = openat(CWD, linked, flags, Mode::empty())?;
            let user = user(*pid);
            read_if(found, |stat| may_read(stat, user))
        }
        Wanted::Own { pid, path, .. } => {
            let root = openat(
                CWD,
                format!("/proc/{}/root", living_task(*pid).unwrap_or(*pid)),
                OFlags::PATH | OFlags::CLOEXEC,
                Mode::empty(),
            )
            .map_err(|_cause| OpenError::RootOutOfReach)?;
            // Links in there are of that root, and lead nowhere else.
            let within = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
            let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let found = openat2(&root, path.as_str(), flags, Mode::empty(), within)?;
            let user = user(*pid).ok_or(OpenError::RootOutOfReach)?;
            read_if(found, |stat| stat.st_uid == user)
        }
        Wanted::Said { pid, context } => said::copy(living_task(*pid).unwrap_or(*pid), *context),
    }
}

/// Opens it by its path as this process sees it, with what its user may do and no more.
///
/// # Errors
/// See [`OpenError`].
pub(super) fn open_here(wanted: &Wanted) -> Result<File, OpenError> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    match wanted {
        Wanted::Mapped { pid, path, .. } => {
            let places = [format!("/proc/{pid}/root{path}"), path.clone()];
            let mut reason = OpenError::NotFound;
            // Root may read what the user of the process may not, capabilities or none.
            let (root, user) = (rustix::process::geteuid().is_root(), user(*pid));
            for place in places {
                let found = openat(CWD, place, flags, Mode::empty()).map_err(OpenError::from);
                match found.and_then(|found| read_if(found, |stat| !root || may_read(stat, user))) {
                    Ok(file) => return Ok(file),
                    Err(why) => reason = why,
                }
            }
            Err(reason)
        }
        Wanted::Own { pid, path, .. } => {
            // Of a process that is gone nobody can tell the user: then only what is our own.
            let user = user(*pid).unwrap_or(rustix::process::geteuid().as_raw());
            let found = openat(CWD, path.as_str(), flags | OFlags::NOFOLLOW, Mode::empty());
            read_if(found?, |stat| stat.st_uid == user)
        }
        // Who may not be looked at there may not be here.
        Wanted::Said { .. } => Err(OpenError::NotFound),
    }
}

/// Opens what was found for reading, if it is a regular file that is allowed.
fn read_if(found: OwnedFd, allowed: impl Fn(&Stat) -> bool) -> Result<File, OpenError> {
    let stat = fstat(&found)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(OpenError::NotRegular);
    }
    if !allowed(&stat) {
        return Err(OpenError::OfAnother { owner: stat.st_uid });
    }
    let itself = format!("/proc/self/fd/{}", found.as_fd().as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    Ok(openat(CWD, itself, flags, Mode::empty())?.into())
}

/// Whether the user of a process may read what it has mapped: what may be executed and not read
/// stays unread.
fn may_read(stat: &Stat, user: Option<u32>) -> bool {
    let mode = Mode::from_raw_mode(stat.st_mode);
    mode.contains(Mode::ROTH) || (mode.contains(Mode::RUSR) && Some(stat.st_uid) == user)
}

/// The user who started a process, as this process sees it. The effective user of a set-user-ID
/// program has rights that this user lacks. So this user may not read what such a program maps.
fn user(pid: u32) -> Option<u32> {
    crate::process::user::of(pid).map(|users| users.real)
}

#[cfg(test)]
mod tests {
    use stackwire_model::UserAddr;

    use super::*;

    fn own(path: &std::path::Path) -> Result<Vec<u8>, OpenError> {
        let pid = std::process::id();
        let path = path.to_str().unwrap().to_owned();
        let mut content = Vec::new();
        let mut file = open(&Wanted::Own { pid, path, here: true })?;
        std::io::Read::read_to_end(&mut file, &mut content).unwrap();
        Ok(content)
    }

    #[test]
    fn regular_files_of_the_user_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("map"), b"1000 10 f\n").unwrap();
        assert_eq!(own(&at("map")).unwrap(), b"1000 10 f\n");
        assert_eq!(own(&at("none")).unwrap_err(), OpenError::NotFound);

        std::fs::create_dir(at("directory")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", at("link")).unwrap();
        rustix::fs::mknodat(CWD, at("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        for name in ["directory", "link", "fifo"] {
            assert_eq!(own(&at(name)).unwrap_err(), OpenError::NotRegular, "{name}");
        }
    }

    #[test]
    fn a_file_of_another_user_is_refused_whoever_may_read_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("map");
        std::fs::write(&path, b"x").unwrap();
        if std::os::unix::fs::chown(&path, Some(65534), None).is_err() {
            eprintln!(
                "SKIPPED a_file_of_another_user_is_refused_whoever_may_read_it: it needs root"
            );
            assert!(std::env::var_os("STACKWIRE_NO_SKIP").is_none());
            return;
        }
        for mode in [0o600, 0o644] {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
            std::fs::set_permissions(&path, mode).unwrap();
            assert_eq!(own(&path).unwrap_err(), OpenError::OfAnother { owner: 65534 });
        }
    }

    #[test]
    fn a_directory_that_is_a_link_leads_nowhere_else() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("map"), b"x").unwrap();
        let link = dir.path().join("link");
        // Out of the process's root it would be another file.
        std::os::unix::fs::symlink("/proc/self/root", &link).unwrap();
        let inside = link.join(dir.path().strip_prefix("/").unwrap()).join("map");
        assert!(own(&inside).is_err());
    }

    #[test]
    fn a_mapped_file_is_itself_however_it_is_called() {
        let code = UserAddr(a_mapped_file_is_itself_however_it_is_called as fn() as usize as u64);
        let pid = std::process::id();
        let maps = crate::process::maps::read(pid).unwrap();
        let found = maps.iter().find(|m| (m.start..m.end()).contains(&code)).unwrap();
        let (start, end) = (found.start, found.end());
        let path = "/nowhere".to_owned();
        let file = open(&Wanted::Mapped { pid, start, end, path });
        if rustix::process::geteuid().is_root() {
            use std::os::unix::fs::MetadataExt;
            let own = std::fs::metadata("/proc/self/exe").unwrap();
            assert_eq!(file.unwrap().metadata().unwrap().ino(), own.ino());
        }
        let path = std::fs::read_link("/proc/self/exe").unwrap().to_str().unwrap().to_owned();
        let nowhere = Wanted::Mapped { pid, start: UserAddr(0), end: UserAddr(1), path };
        assert!(open(&nowhere).is_err() && open_here(&nowhere).is_ok(), "by its path");
    }
}
