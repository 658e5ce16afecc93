//! What is mounted for a test: a directory as `bindfs` shows it elsewhere, as long as it is not
//! stopped, and a disk in memory that can be filled.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

/// Unmounted when dropped.
pub(crate) struct Mounted {
    server: Child,
    at: PathBuf,
}

impl Mounted {
    /// Whether that can be here; said where it cannot.
    pub(crate) fn can() -> bool {
        super::can("bindfs on /dev/fuse", Path::new("/dev/fuse").exists())
    }

    /// `options`: of bindfs.
    pub(crate) fn new(directory: &Path, at: &Path, options: &[&str]) -> Self {
        let mut command = Command::new("bindfs");
        command.arg("-f").args(options).args([directory, at]);
        let server = command.spawn().unwrap();
        let mounted =
            || std::fs::read_to_string("/proc/mounts").unwrap().contains(at.to_str().unwrap());
        let is_there = (0..100).any(|_| {
            std::thread::sleep(Duration::from_millis(50));
            mounted()
        });
        assert!(is_there, "bindfs does not mount");
        Self { server, at: at.to_owned() }
    }

    pub(crate) fn signal(&self, name: &str) {
        let pid = self.server.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.signal("CONT");
        // Lazily: what still runs from it must not keep it.
        let _ = Command::new("umount").arg("-l").arg(&self.at).status();
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// A file system of its own size. Unmounted when dropped.
pub(crate) struct Tmpfs(PathBuf);

impl Tmpfs {
    pub(crate) fn mount(at: &Path, size: &str) -> Self {
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(at);
        assert!(mount.status().unwrap().success());
        Self(at.to_owned())
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
