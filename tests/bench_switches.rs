//! `make bench`: what it costs to record each wait where threads switch all the time, beside
//! `perf sched record` and bcc's `offcputime`.
//!
//! A pair of processes on each CPU hands a byte to and fro (`perf bench sched pipe`). Rounds of it
//! alone and beside each of them; the medians. Of ours also what was lost and how memory grew.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const ROUNDS: usize = 3;
/// Hand-overs of each pair, two switches each.
const LOOPS: &str = "1500000";

fn main() -> Result<()> {
    let sides: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let directory = tempfile::tempdir()?;
    let mut names = vec!["nobody".to_owned()];
    for side in &sides {
        names.push(format!("--offcpu of {}", side.display()));
        names.push(format!("--pmu of {}", side.display()));
    }
    names.extend(["perf sched record".to_owned(), "offcputime".to_owned()]);
    let mut rates = vec![Vec::new(); names.len()];
    let mut said = vec![String::new(); names.len()];
    for _ in 0..ROUNDS {
        for (who, rates) in rates.iter_mut().enumerate() {
            let (rate, more) = round(&names, who, &sides, directory.path())?;
            rates.push(rate);
            said[who] = more;
        }
    }
    println!("\n| watched by | hand-overs a second | slower by | |\n|---|---|---|---|");
    let medians: Vec<f64> = rates.into_iter().map(median).collect();
    for ((name, rate), more) in names.iter().zip(&medians).zip(&said) {
        println!("| {name} | {rate:.0} | {:.1} % | {more} |", 100.0 - rate * 100.0 / medians[0]);
    }
    Ok(())
}

/// Hand-overs a second of all pairs, and what the watcher said.
fn round(
    names: &[String],
    who: usize,
    sides: &[PathBuf],
    directory: &Path,
) -> Result<(f64, String)> {
    let capture = directory.join("out.stackwire");
    let mut command = match names.len() - who {
        _ if who == 0 => None,
        1 => {
            let mut command = Command::new("/usr/sbin/offcputime");
            command.arg("600");
            Some(command)
        }
        2 => {
            let mut command = Command::new("perf");
            command.args(["sched", "record", "-q", "-o"]).arg(directory.join("perf.data"));
            Some(command)
        }
        _ => {
            let series = if who % 2 == 1 { "--offcpu" } else { "--pmu" };
            let mut command = Command::new(sides[(who - 1) / 2].join("stackwire-collector"));
            command.args(["--all", "--verbose", series, "--output"]).arg(&capture);
            Some(command)
        }
    };
    let ours = who > 0 && names.len() - who > 2;
    let said = directory.join("said");
    let watcher = command.as_mut().map(|command| -> Result<Watcher> {
        let file = std::fs::File::create(&said)?;
        let child = command.stdout(Stdio::null()).stderr(file).spawn()?;
        std::thread::sleep(Duration::from_secs(2));
        Ok(Watcher(child))
    });
    let watcher = watcher.transpose()?;
    let memory = || watcher.as_ref().and_then(|watcher| resident(watcher.0.id()));
    let before = memory();
    let pairs: Vec<Child> = (0..std::thread::available_parallelism()?.get())
        .map(|cpu| {
            Command::new("taskset")
                .args(["-c", &cpu.to_string(), "perf", "bench", "sched", "pipe", "-l", LOOPS])
                .stdout(Stdio::piped())
                .spawn()
        })
        .collect::<std::io::Result<_>>()?;
    let mut rate = 0.0;
    for pair in pairs {
        let text = String::from_utf8(pair.wait_with_output()?.stdout)?;
        let line = text.lines().find(|line| line.contains("ops/sec")).ok_or(text.clone())?;
        rate += line.trim().trim_end_matches("ops/sec").trim().parse::<f64>()?;
    }
    let after = memory();
    drop(watcher);
    let mut more = String::new();
    if ours {
        let text = std::fs::read_to_string(&said)?;
        let lost = text.lines().filter(|line| line.contains("lost")).collect::<Vec<_>>().join("; ");
        let (before, after) = (before.unwrap_or(0), after.unwrap_or(0));
        more = format!("RSS {before} to {after} KiB; {lost}");
    }
    Ok((rate, more))
}

fn resident(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A profiler at work, until it is dropped.
struct Watcher(Child);

impl Drop for Watcher {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.0.id() as i32) {
            // It ends either way.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
        }
        let _ = self.0.wait();
    }
}
