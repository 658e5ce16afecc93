//! `make bench`: how much slower a program runs that is watched, beside `perf record`.
//!
//! The program loads a library in a loop: each mapping is told to whoever watches. Rounds of it
//! alone, beside the collector (of each directory of binaries), and beside perf; the medians.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const ROUNDS: usize = 7;
/// Of a run of the program, in seconds.
const SECONDS: &str = "4";

fn main() -> Result<()> {
    let sides: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let directory = tempfile::tempdir()?;
    let program = directory.path().join("loads");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/loads.c");
    let compiled =
        Command::new("gcc").args(["-O2", "-o"]).arg(&program).arg(source).arg("-ldl").status()?;
    if !compiled.success() {
        return Err("gcc failed".into());
    }
    let mut names = vec!["nobody".to_owned()];
    names.extend(sides.iter().map(|side| format!("stackwire-collector of {}", side.display())));
    names.push("perf record -g".to_owned());

    let mut calls = vec![Vec::new(); names.len()];
    for _ in 0..ROUNDS {
        for (who, calls) in calls.iter_mut().enumerate() {
            let watcher = match who.checked_sub(1).map(|side| sides.get(side)) {
                None => None,
                Some(Some(side)) => Some(Watcher::start(
                    Command::new(side.join("stackwire-collector"))
                        .args(["--all", "--output"])
                        .arg(directory.path().join("out.stackwire")),
                )?),
                Some(None) => Some(Watcher::start(
                    Command::new("perf")
                        .args(["record", "-q", "-a", "-g", "-F", "99", "-e", "cpu-clock", "-o"])
                        .arg(directory.path().join("perf.data")),
                )?),
            };
            let ran = Command::new(&program).arg(SECONDS).output()?;
            drop(watcher);
            calls.push(String::from_utf8(ran.stdout)?.trim().parse::<f64>()?);
        }
    }
    println!("| watched by | calls of dlopen a CPU second | slower by |\n|---|---|---|");
    let medians: Vec<f64> = calls.into_iter().map(median).collect();
    for (name, calls) in names.iter().zip(&medians) {
        println!("| {name} | {calls:.0} | {:.1} % |", 100.0 - calls * 100.0 / medians[0]);
    }
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A profiler at work, until it is dropped.
struct Watcher(Child);

impl Watcher {
    fn start(command: &mut Command) -> Result<Self> {
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        std::thread::sleep(Duration::from_secs(1));
        Ok(Self(child))
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.0.id() as i32) {
            // It ends either way.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
        }
        let _ = self.0.wait();
    }
}
