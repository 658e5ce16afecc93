//! For whom an unwind table is, and how much of the maps they may have.
//!
//! A user may give a file the path and the build-id of another's, in a mount namespace of their
//! own. So a table made of a user's file is used for that user's processes alone; one made of
//! root's file is for all.

use std::fs::File;
use std::io;

use rustix::fs::{AtFlags, StatxFlags, statx};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use stackwire_collector_ebpf::tables::{CHUNKS, PAGES, RULES};

use crate::process::{text, user};

/// Each map has this many shares. One user may take one of them.
pub const SHARES: u32 = 4;

/// For whose processes a table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Owner {
    /// Nobody else could have written the file: for all.
    Everyone,
    /// Those that act with the rights of this user.
    User(u32),
    /// This one, whose user is hidden.
    Hidden(u32),
    /// Processes that ended before their user could be read. They get only tables of files that are
    /// everyone's.
    Gone,
}

impl Owner {
    /// Of files a process has mapped, before their owner is known.
    #[must_use]
    pub fn of_process(pid: u32) -> Self {
        if let Some(users) = user::of(pid) {
            return Self::User(users.saved);
        }
        let process = Pid::from_raw(pid as i32);
        match process.map(test_kill_process) {
            None | Some(Err(Errno::SRCH)) => Self::Gone,
            _ => Self::Hidden(pid),
        }
    }

    /// The owner to whom the space of a table is charged. Processes with a hidden user share one
    /// account, so nobody gets more by not being known.
    #[must_use]
    pub fn payer(self) -> Self {
        if let Self::Hidden(_) = self { Self::Gone } else { self }
    }

    /// Whether there is a limit to what they may have.
    #[must_use]
    pub fn is_limited(self) -> bool {
        !matches!(self, Self::Everyone | Self::User(0))
    }

    /// Whether only tables of files that are everyone's are theirs.
    #[must_use]
    pub fn takes_everyones_only(self) -> bool {
        matches!(self, Self::Everyone | Self::Gone)
    }
}

/// Whether a table of this file may be used for everybody: only root, or the collector's user, can
/// have written it.
///
/// # Errors
/// Those of statx(2).
pub fn is_everyones(file: &File) -> io::Result<bool> {
    // Without asking a file system that may not answer.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let found = statx(file, c"", flags, StatxFlags::BASIC_STATS)?;
    let user = rustix::process::geteuid().as_raw();
    let by_others = u32::from(found.stx_mode) & 0o022 != 0;
    // The init process sees the host; elsewhere what is mounted here will do.
    let mounts = text::read("/proc/1/mountinfo").or_else(|_| text::read("/proc/self/mountinfo"))?;
    let device = (found.stx_dev_major, found.stx_dev_minor);
    Ok([0, user].contains(&found.stx_uid) && !by_others && is_trusted(&mounts, device))
}

/// Whether the owners that files on a device have can be trusted. The device must be mounted here,
/// in such a way that set-user-ID programs would work, and not be served by a user's program. In a
/// namespace of their own, users can make mounts with owners of their choice.
fn is_trusted(mounts: &str, (major, minor): (u32, u32)) -> bool {
    let device = format!("{major}:{minor}");
    // proc_pid_mountinfo(5): the device is field 3, the options field 6, the type follows a dash.
    mounts.lines().any(|line| {
        let Some((mount, kind)) = line.split_once(" - ") else { return false };
        let mut fields = mount.split(' ').skip(2);
        let (of, options) = (fields.next(), fields.nth(2).unwrap_or("nosuid"));
        of == Some(device.as_str())
            && options.split(',').all(|option| option != "nosuid")
            && !kind.starts_with("fuse")
    })
}

/// What tables take of the maps.
#[derive(Clone, Copy, Debug, Default)]
pub struct Amount {
    /// Of 64 KiB.
    pub pages: u32,
    /// Of rows.
    pub chunks: u32,
    /// Those they share with others among them.
    pub rules: u32,
}

impl Amount {
    /// Both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            pages: self.pages.saturating_add(other.pages),
            chunks: self.chunks.saturating_add(other.chunks),
            rules: self.rules.saturating_add(other.rules),
        }
    }

    /// Whether it is more than one user's share of a map.
    #[must_use]
    pub fn is_over_share(self) -> bool {
        self.pages > PAGES / SHARES || self.chunks > CHUNKS / SHARES || self.rules > RULES / SHARES
    }

    /// The largest part of a map, in thousandths.
    #[must_use]
    pub fn part(self) -> u64 {
        let part = |used: u32, all: u32| u64::from(used) * 1000 / u64::from(all);
        part(self.pages, PAGES).max(part(self.chunks, CHUNKS)).max(part(self.rules, RULES))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_others_may_write_is_not_everyones() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("program");
        std::fs::write(&path, b"x").unwrap();
        for (mode, expected) in [(0o755, true), (0o775, false), (0o757, false)] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            assert_eq!(is_everyones(&File::open(&path).unwrap()).unwrap(), expected, "{mode:o}");
        }
        if std::os::unix::fs::chown(&path, Some(65534), Some(65534)).is_err() {
            eprintln!("SKIPPED a_file_others_may_write_is_not_everyones: it needs root");
            assert!(std::env::var_os("STACKWIRE_NO_SKIP").is_none());
            return;
        }
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        assert!(!is_everyones(&File::open(&path).unwrap()).unwrap());
    }

    #[test]
    fn mounts_of_users_are_not_trusted() {
        let mounts = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
            30 27 0:30 / /tmp rw,nosuid,nodev shared:5 - tmpfs tmpfs rw\n\
            31 27 0:31 / /home/a/mnt rw shared:6 - fuse.bindfs x rw\n";
        let trusted = |device| is_trusted(mounts, device);
        assert!(trusted((254, 0)));
        assert!(!trusted((0, 30)) && !trusted((0, 31)) && !trusted((0, 99)));
    }

    #[test]
    fn a_process_that_is_gone_has_no_user() {
        assert_eq!(Owner::of_process(4_000_001), Owner::Gone);
        let own = rustix::process::geteuid().as_raw();
        assert_eq!(Owner::of_process(std::process::id()), Owner::User(own));
    }

    #[test]
    fn one_map_is_enough_to_be_over_the_share() {
        let half = Amount { pages: 1, chunks: 1, rules: RULES / SHARES / 2 };
        assert!(!half.and(half).is_over_share());
        assert!(half.and(half).and(half).is_over_share());
        assert_eq!(half.part(), 125);
    }
}
