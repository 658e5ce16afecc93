//! How whole user stacks are: records programs, and reads in the report how their stacks ended.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Pprof, Ran, Running, binary, report, stackwire};

/// Share of user stacks that ended like this, in percent, of a report.
pub(crate) fn ended(report: &str, how: &str) -> f64 {
    let line = report.lines().find(|line| line.ends_with(how));
    let share = line.and_then(|line| line.split_whitespace().nth(1)).map(str::parse);
    share.unwrap_or(Ok(0.0)).unwrap()
}

/// Share of those that reached their thread's root.
pub(crate) fn complete(report: &str) -> f64 {
    ended(report, "reached the thread's root")
}

/// Records at 997 Hz; the report, and the profile.
#[track_caller]
pub(crate) fn recorded(what: &[&str], cache: &Path) -> (String, Pprof) {
    let mut record = Command::new(binary("stackwire"));
    record.args(["record", "--profile"]);
    read(&mut record, "--capture", what, cache)
}

/// Likewise, of several processes.
#[track_caller]
pub(crate) fn collected(
    pids: impl IntoIterator<Item = u32>,
    duration: &str,
    cache: &Path,
) -> (String, Pprof) {
    let mut what: Vec<String> = pids.into_iter().map(|pid| format!("--pid={pid}")).collect();
    what.push(format!("--duration={duration}"));
    let what: Vec<&str> = what.iter().map(String::as_str).collect();
    read(&mut Command::new(binary("stackwire-collector")), "--output", &what, cache)
}

#[track_caller]
fn read(command: &mut Command, capture: &str, what: &[&str], cache: &Path) -> (String, Pprof) {
    let directory = tempfile::tempdir().unwrap();
    let (report, output) = read_into(directory.path(), command, capture, what, cache);
    (report, Pprof::read(&output))
}

/// The report, and where the pprof is.
#[track_caller]
fn read_into(
    directory: &Path,
    command: &mut Command,
    capture: &str,
    what: &[&str],
    cache: &Path,
) -> (String, PathBuf) {
    let [file, output] = ["x.stackwire", "x.pb.gz"].map(|name| directory.join(name));
    command.arg("--sample-rate=997").arg(capture).arg(&file).args(what);
    Ran::of(command.current_dir(directory).env("XDG_CACHE_HOME", cache)).succeeded();
    let resolve = ["resolve".as_ref(), file.as_os_str(), "-o".as_ref()];
    stackwire(resolve.into_iter().chain([output.as_os_str()])).succeeded();
    (report(&file), output)
}

/// Records programs whose unwind tables are not there yet. How long that takes depends on the
/// machine: the loading threads share its CPUs with all of them. So a capture goes on until the
/// tables of those asked for are there; walks by them are what is judged.
#[track_caller]
pub(crate) fn read_with_tables(
    directory: &Path,
    programs: &[Running],
    cache: &Path,
    is_asked: impl Fn(&Path) -> bool,
) -> Reports {
    let pids: Vec<String> = programs.iter().map(|it| format!("--pid={}", it.pid())).collect();
    let mut reports = Reports::default();
    for seconds in [8, 16, 32, 64] {
        let duration = format!("--duration={seconds}s");
        let what: Vec<&str> = pids.iter().chain([&duration]).map(String::as_str).collect();
        let collector = &mut Command::new(binary("stackwire-collector"));
        let (all, _) = read_into(directory, collector, "--output", &what, cache);
        let capture = directory.join("x.stackwire").display().to_string();
        let last = format!("--time={}..", seconds - 6);
        reports.last = stackwire(["report", &capture, &last]).succeeded().stdout;
        if reports.first.is_empty() {
            reports.first.clone_from(&all);
        }
        reports.all = all;
        let waits = |it: &Through<'_>| {
            let is_early = |end: &&str| end.ends_with("no unwind table yet");
            is_asked(Path::new(it.path)) && it.ends.iter().any(is_early)
        };
        if !through(&reports.last).iter().any(waits) {
            break;
        }
    }
    reports
}

/// What [`read_with_tables`] reads.
#[derive(Default)]
pub(crate) struct Reports {
    /// Of the first capture.
    pub(crate) first: String,
    /// Of the last one.
    pub(crate) all: String,
    /// Of its last six seconds.
    pub(crate) last: String,
}

/// What a report says of user stacks through an executable.
#[derive(Clone)]
pub(crate) struct Through<'a> {
    pub(crate) path: &'a str,
    pub(crate) stacks: u64,
    /// That reached the thread's root, percent.
    pub(crate) share: f64,
    /// Where the others ended.
    pub(crate) ends: Vec<&'a str>,
}

/// What a report says of each executable.
pub(crate) fn through(report: &str) -> Vec<Through<'_>> {
    let (_, through) = report.split_once("user stacks through\n").unwrap();
    let mut found: Vec<Through> = Vec::new();
    for line in through.lines().take_while(|line| !line.is_empty()) {
        if line.starts_with("            ") {
            found.last_mut().unwrap().ends.push(line.trim());
            continue;
        }
        let mut words = line.split_whitespace();
        let stacks = words.next().unwrap().parse().unwrap();
        let share = words.next().unwrap().parse().unwrap();
        let path = line.split_once(" % ").unwrap().1.trim();
        found.push(Through { path, stacks, share, ends: Vec::new() });
    }
    found
}

/// What it says of this one.
#[track_caller]
pub(crate) fn through_file<'a>(found: &[Through<'a>], path: &Path) -> Through<'a> {
    let of = found.iter().find(|it| Path::new(it.path) == path).cloned();
    of.unwrap_or_else(|| panic!("the report has no {}", path.display()))
}
