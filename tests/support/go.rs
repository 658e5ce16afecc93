//! Programs of Go, as `tests/go.sh` has built them with every release.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{Running, can, test_cache};

/// What one release has built.
pub(crate) struct Release {
    /// Its number, or the Debian it is of.
    pub(crate) name: String,
    directory: PathBuf,
}

/// Every kind of program: pure Go and Go with C both ways; whole, without symbols, stripped,
/// position-independent, with the race detector; a library of Go in a program of C, and a plugin.
const PROGRAMS: [&str; 10] = [
    "server",
    "server-bare",
    "server-stripped",
    "server-pie",
    "server-race",
    "both",
    "both-bare",
    "both-pie-bare",
    "library",
    "loader",
];

/// Of those, the ones with call frame information of Go's own: each compiled differently.
const WHOLE: [&str; 6] = ["server", "server-pie", "server-race", "both", "library", "loader"];

/// Releases there should be.
const RELEASES: usize = 9;

/// Every release.
pub(crate) fn releases() -> Vec<Release> {
    let entries = std::fs::read_dir(test_cache().join("programs")).into_iter().flatten().flatten();
    let built = entries.filter(|entry| entry.path().join("stamp").is_file());
    let mut releases: Vec<Release> = built
        .map(|entry| Release {
            name: entry.file_name().to_str().unwrap().to_owned(),
            directory: entry.path(),
        })
        .collect();
    releases.sort_by(|a, b| a.name.cmp(&b.name));
    let count = releases.len();
    can(&format!("programs of {RELEASES} releases of Go, {count} are there"), count >= RELEASES);
    releases
}

impl Release {
    /// Starts every program.
    pub(crate) fn start(&self) -> Vec<Running> {
        PROGRAMS.iter().map(|name| self.run(name)).collect()
    }

    /// Programs with call frame information.
    pub(crate) fn whole(&self) -> impl Iterator<Item = (&'static str, Running)> {
        WHOLE.iter().map(|&name| (name, self.run(name)))
    }

    /// Starts one of them.
    pub(crate) fn run(&self, name: &str) -> Running {
        // They want all CPUs. What compiles their tables and reads their capture comes first.
        let mut command = Command::new("nice");
        command.args(["-n", "19"]).arg(self.directory.join(name));
        // The race detector reports there, and says what nobody asked.
        Running::start(command.stderr(Stdio::null()))
    }

    /// The name of an executable of this release.
    pub(crate) fn of<'a>(&self, path: &'a Path) -> Option<&'a str> {
        path.strip_prefix(&self.directory).ok()?.to_str()
    }
}
