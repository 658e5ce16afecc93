//! Cgroups as container runtimes make them, by path.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A cgroup of ours, removed in the end.
pub(crate) struct Cgroup(PathBuf);

impl Cgroup {
    /// At this path of a hierarchy.
    pub(crate) fn new(hierarchy: &str, path: &str) -> Self {
        let directory =
            Path::new("/sys/fs/cgroup").join(hierarchy).join(path.trim_start_matches('/'));
        std::fs::create_dir_all(&directory).unwrap();
        Self(directory)
    }

    /// Its directory.
    pub(crate) fn directory(&self) -> &Path {
        &self.0
    }

    /// A command that runs there, under the root elsewhere.
    pub(crate) fn command(&self, program: &str) -> Command {
        let script = format!(
            "for all in /sys/fs/cgroup/*/cgroup.procs; do echo $$ >$all; done 2>/dev/null; echo $$ >{}/cgroup.procs; exec {program}",
            self.0.display()
        );
        let mut command = Command::new("sh");
        command.args(["-c", &script]);
        command
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let mut directory = self.0.as_path();
        // Up to the hierarchy itself, which stays.
        while std::fs::remove_dir(directory).is_ok() {
            directory = directory.parent().unwrap();
        }
    }
}
