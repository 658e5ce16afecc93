//! Servers under test, and the profiles they write.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use super::binary;

/// A `stackwire serve` on a port of its own.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: String,
    /// Lines it said since it listens.
    log: Arc<Mutex<Vec<String>>>,
}

impl Server {
    pub(crate) fn start(output: &Path, listen: &str, more: &[&str]) -> Self {
        Self::of(
            Command::new(binary("stackwire"))
                .args(["serve", "--listen", listen, "--output-dir"])
                .arg(output)
                .args(more),
        )
    }

    pub(crate) fn of(command: &mut Command) -> Self {
        Self::and_what_it_said(command).0
    }

    /// The same, with the lines before the one that says where it listens.
    pub(crate) fn and_what_it_said(command: &mut Command) -> (Self, Vec<String>) {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let (mut address, mut said) = (String::new(), Vec::new());
        while address.is_empty() {
            let mut line = String::new();
            assert_ne!(stderr.read_line(&mut line).unwrap(), 0, "the server ended");
            if let Some((_, found)) = line.trim().split_once("listening on ") {
                let end = found.find('"').unwrap_or(found.len());
                found[..end].clone_into(&mut address);
            }
            said.push(line.trim().to_owned());
        }
        // Read on, so that it never blocks on a full pipe.
        let log = Arc::<Mutex<Vec<String>>>::default();
        let lines = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                lines.lock().unwrap().push(line);
            }
        });
        (Self { child, address, log }, said)
    }

    /// What it has logged.
    pub(crate) fn log(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn kill(self) {
        drop(self);
    }

    /// Ends it as an operator would, and waits for its last profiles.
    pub(crate) fn terminate(mut self) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

/// What a test leaves running keeps the output of all tests open, and who reads it waits for ever.
impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Profiles in a directory.
pub(crate) fn profiles(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> =
        entries.filter(|path| path.extension().is_some_and(|e| e == "gz")).collect();
    found.sort();
    found
}
