//! Makes directories for the caches of the collector and of the symbolizer. Only their user and
//! root can redirect the path to them.
//!
//! A cache's path is often taken from the environment. If root's path leads through a directory of
//! another user, that user can put a link there, and root would make files where that user wants.
//! So every directory and every link on the way must belong to this process's user or to root. It
//! must also be closed to others, or sticky (as `/tmp`); a user's own group does not count as
//! others. Does not look at access lists, nor at files in the directory.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, Stat, fstat, mkdirat, openat, readlinkat, stat, statat,
};
use rustix::io::Errno;

/// Links followed on one path, as the kernel has it; path_resolution(7).
const MAX_LINKS: u32 = 40;

/// There is no such directory to be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// Somebody else could lead the path elsewhere.
    #[error("{0} belongs to another user or can be written by others")]
    NotOurs(PathBuf),
    /// The file system.
    #[error("{path}: {error}")]
    File {
        /// What it was about.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

/// Makes the directory, with all that is missing on the way to it, for its user alone (0700).
///
/// # Errors
/// See [`Refused`].
pub fn make(directory: &Path) -> Result<(), Refused> {
    let start = std::path::absolute(directory)
        .map_err(|error| Refused::File { path: directory.to_owned(), error })?;
    let mut way = Way::from_root()?;
    let mut left: Vec<OsString> = names(&start);
    let mut links = 0;
    while let Some(name) = left.pop() {
        match way.enter(&name)? {
            None => {}
            Some(_) if links == MAX_LINKS => return Err(way.failed(&name, Errno::LOOP)),
            Some(target) => {
                links += 1;
                if target.has_root() {
                    way = Way::from_root()?;
                }
                left.extend(names(&target));
            }
        }
    }
    if is_alone(&way.stat) { Ok(()) } else { Err(Refused::NotOurs(way.path)) }
}

/// Names on a path, the first one last.
fn names(path: &Path) -> Vec<OsString> {
    let names = path.components().rev().filter_map(|component| match component {
        Component::Normal(name) => Some(name),
        Component::ParentDir => Some(OsStr::new("..")),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    names.map(OsStr::to_owned).collect()
}

/// How far a path was gone.
struct Way {
    directory: OwnedFd,
    stat: Stat,
    path: PathBuf,
    /// Whoever owns `/` leads every path: root, or in a user namespace a user that stands for it.
    root: u32,
}

impl Way {
    fn from_root() -> Result<Self, Refused> {
        let root = stat("/").map_err(|e| Refused::File { path: "/".into(), error: e.into() })?;
        Self::at(CWD, Path::new("/"), PathBuf::from("/"), root.st_uid)
    }

    fn at(
        parent: impl std::os::fd::AsFd,
        name: &Path,
        path: PathBuf,
        root: u32,
    ) -> Result<Self, Refused> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = openat(parent, name, flags, Mode::empty());
        let found = opened.and_then(|directory| Ok((fstat(&directory)?, directory)));
        match found {
            Ok((stat, _)) if !is_safe(&stat, root) => Err(Refused::NotOurs(path)),
            Ok((stat, directory)) => Ok(Self { directory, stat, path, root }),
            Err(error) => Err(Refused::File { path, error: error.into() }),
        }
    }

    /// Goes into what has this name, made if there is nothing. Where it is a link, does not go, and
    /// tells its target.
    fn enter(&mut self, name: &OsStr) -> Result<Option<PathBuf>, Refused> {
        let look = || statat(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW);
        let found = look().or_else(|error| match error {
            Errno::NOENT => {
                let made = mkdirat(&self.directory, name, Mode::RWXU);
                made.or_else(|error| if error == Errno::EXIST { Ok(()) } else { Err(error) })?;
                look()
            }
            other => Err(other),
        });
        let found = found.map_err(|error| self.failed(name, error))?;
        if FileType::from_raw_mode(found.st_mode) != FileType::Symlink {
            *self = Self::at(&self.directory, Path::new(name), self.path.join(name), self.root)?;
            return Ok(None);
        }
        if !is_trusted(found.st_uid, self.root) {
            return Err(Refused::NotOurs(self.path.join(name)));
        }
        let target = readlinkat(&self.directory, name, Vec::new());
        let target = target.map_err(|error| self.failed(name, error))?;
        Ok(Some(PathBuf::from(OsString::from_vec(target.into_bytes()))))
    }

    fn failed(&self, name: &OsStr, error: Errno) -> Refused {
        Refused::File { path: self.path.join(name), error: error.into() }
    }
}

fn is_trusted(user: u32, root: u32) -> bool {
    user == root || user == 0 || user == rustix::process::geteuid().as_raw()
}

/// Whether what lies in a directory on the way stays what it is.
fn is_safe(stat: &Stat, root: u32) -> bool {
    let mode = Mode::from_raw_mode(stat.st_mode);
    // Most users have a group of their own, and then that group is the user. Root's may have
    // members.
    let own_group =
        stat.st_gid == rustix::process::getegid().as_raw() && !rustix::process::geteuid().is_root();
    let open = mode.contains(Mode::WOTH) || (mode.contains(Mode::WGRP) && !own_group);
    // In a sticky one nobody takes away what belongs to others.
    is_trusted(stat.st_uid, root) && (!open || mode.contains(Mode::SVTX))
}

/// Whether a directory is this user's, and nobody else writes into it.
fn is_alone(stat: &Stat) -> bool {
    let open = Mode::from_raw_mode(stat.st_mode).intersects(Mode::WOTH | Mode::WGRP);
    stat.st_uid == rustix::process::geteuid().as_raw() && !open
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    fn allow(path: &Path, mode: u32) {
        std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn what_is_missing_is_made_for_its_user_alone() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("a/../a/b/c");
        make(&path).unwrap();
        make(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        let file = place.path().join("file");
        std::fs::write(&file, b"").unwrap();
        assert!(matches!(make(&file.join("x")), Err(Refused::File { .. })));
    }

    #[test]
    fn own_links_are_followed_and_circles_end() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        std::fs::create_dir(at("real")).unwrap();
        symlink("real", at("relative")).unwrap();
        symlink(at("relative"), at("absolute")).unwrap();
        make(&at("absolute/below")).unwrap();
        assert!(at("real/below").is_dir());
        symlink("circle", at("circle")).unwrap();
        let refused = make(&at("circle/x")).unwrap_err();
        assert!(matches!(refused, Refused::File { .. }), "{refused}");
    }

    #[test]
    fn where_others_may_write_nothing_is_made() {
        let place = tempfile::tempdir().unwrap();
        let open = place.path().join("open");
        std::fs::create_dir(&open).unwrap();
        allow(&open, 0o777);
        assert!(matches!(make(&open.join("cache")), Err(Refused::NotOurs(path)) if path == open));
        assert!(!open.join("cache").exists());
        // Sticky, as /tmp.
        allow(&open, 0o1777);
        make(&open.join("cache")).unwrap();
        assert!(matches!(make(&open), Err(Refused::NotOurs(_))), "itself");
    }

    #[test]
    fn a_link_of_another_user_leads_nowhere() {
        let place = tempfile::tempdir().unwrap();
        let (open, real) = (place.path().join("open"), place.path().join("real"));
        std::fs::create_dir(&open).unwrap();
        std::fs::create_dir(&real).unwrap();
        allow(&open, 0o1777);
        let link = open.join("cache");
        symlink(&real, &link).unwrap();
        if std::os::unix::fs::lchown(&link, Some(65534), None).is_err() {
            eprintln!("SKIPPED a_link_of_another_user_leads_nowhere: it needs root");
            assert!(std::env::var_os("STACKWIRE_NO_SKIP").is_none());
            return;
        }
        assert!(matches!(make(&link.join("x")), Err(Refused::NotOurs(path)) if path == link));
        assert_eq!(std::fs::read_dir(&real).unwrap().count(), 0);
        // Nor does a directory of theirs.
        let theirs = open.join("theirs");
        std::fs::create_dir(&theirs).unwrap();
        std::os::unix::fs::chown(&theirs, Some(65534), None).unwrap();
        assert!(matches!(make(&theirs.join("x")), Err(Refused::NotOurs(path)) if path == theirs));
    }
}
