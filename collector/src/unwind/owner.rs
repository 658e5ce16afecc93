//! For whom an unwind table is, and how much of the maps they may have.
//!
//! A user may give a file the path and the build-id of another's, in a mount namespace of their own. So a table made of a
//! user's file is used for that user's processes alone; one made of root's file is for all.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use stackwire_collector_ebpf::tables::{CHUNKS, PAGES, RULES};

use crate::process::user;

/// Parts of each map that are not one user's.
pub const SHARES: u32 = 4;

/// For whose processes a table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Owner {
    /// Nobody else could have written the file: for all.
    Everyone,
    /// Those that act with the rights of this user.
    User(u32),
    /// This one, whose user is not known.
    Process(u32),
}

impl Owner {
    /// Of files a process has mapped, before their owner is known.
    #[must_use]
    pub fn of_process(pid: u32) -> Self {
        user::of(pid).map_or(Self::Process(pid), |users| Self::User(users.effective))
    }

    /// Whether there is a limit to what they may have.
    #[must_use]
    pub fn is_limited(self) -> bool {
        !matches!(self, Self::Everyone | Self::User(0))
    }
}

/// Whether a table of this file may be used for everybody: only root, or the collector's user, can have written it.
///
/// # Errors
/// Those of fstat(2) and fstatfs(2).
pub fn is_everyones(file: &File) -> io::Result<bool> {
    let found = file.metadata()?;
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    let by_user = found.uid() == 0 || found.uid() == user.as_raw();
    let by_group = found.mode() & 0o020 == 0 || found.gid() == 0 || found.gid() == group.as_raw();
    let by_others = found.mode() & 0o002 != 0;
    // The server of such a file system is a user's program, and says what it likes.
    let is_fuse = rustix::fs::fstatfs(file)?.f_type == FUSE;
    Ok(by_user && by_group && !by_others && !is_fuse)
}

/// `FUSE_SUPER_MAGIC` of include/uapi/linux/magic.h.
const FUSE: rustix::fs::FsWord = 0x6573_5546;

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
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_others_may_write_is_not_everyones() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("program");
        std::fs::write(&path, b"x").unwrap();
        for (mode, expected) in [(0o755, true), (0o775, true), (0o757, false)] {
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
    fn one_map_is_enough_to_be_over_the_share() {
        let half = Amount { pages: 1, chunks: 1, rules: RULES / SHARES / 2 };
        assert!(!half.and(half).is_over_share());
        assert!(half.and(half).and(half).is_over_share());
        assert_eq!(half.part(), 125);
    }
}
