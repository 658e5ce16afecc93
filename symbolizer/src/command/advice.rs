//! Advice for profiles where few frames have names or few stacks are whole: one sentence for each
//! of the two, about the worst case.
//!
//! It is printed under the last line of `record` and `resolve`.

use std::collections::HashMap;
use std::io::BufRead;
use std::path::Path;

use stackwire::Profile;
use stackwire::profile::{EndReason, Executable, ExecutableId, Named, ProcessId, Share, ThreadId};

use super::run_time::RunTime;

/// Below this much there is something to say, in percent.
const ENOUGH: f64 = 90.0;

/// The sentences.
pub fn advice(profile: Named<'_>, unsymbolized: bool) -> Vec<String> {
    let enough = |share: Share| share.of == 0 || share.percent() >= ENOUGH;
    let names = (!unsymbolized && !enough(profile.named())).then(|| unnamed(profile)).flatten();
    let stacks = (!enough(profile.whole())).then(|| cut(profile)).flatten();
    names.into_iter().chain(stacks).collect()
}

/// The heaviest of what is counted, with its share of all.
fn heaviest<K: Copy + Eq + std::hash::Hash + Ord>(counts: &HashMap<K, u64>) -> Option<(K, f64)> {
    let total: u64 = counts.values().sum();
    let (&key, &most) = counts.iter().max_by_key(|(key, count)| (**count, **key))?;
    Some((key, most as f64 * 100.0 / total as f64))
}

/// The process, for code that it made itself. Code of a file is the same for all: `None`.
fn process_of(profile: &Profile, thread: ThreadId, executable: ExecutableId) -> Option<ProcessId> {
    let made = profile.executables[executable.index()] == Executable::Anonymous;
    made.then_some(profile.threads[thread.index()].process)
}

/// Where most frames without a name are, and how they get names.
fn unnamed(profile: Named<'_>) -> Option<String> {
    let mut counts: HashMap<(ExecutableId, Option<ProcessId>), u64> = HashMap::new();
    for frames in profile.unnamed() {
        let process = process_of(&profile, frames.thread, frames.executable);
        *counts.entry((frames.executable, process)).or_default() += frames.count;
    }
    let ((id, process), share) = heaviest(&counts)?;
    let executable = &profile.executables[id.index()];
    let process = process.unwrap_or(ProcessId(0));
    let (pid, comm) =
        (profile.processes[process.index()].pid, &profile.processes[process.index()].comm);
    let name = executable.name();
    let what = match executable {
        Executable::Anonymous => {
            let how = match run_time(&profile, process).map(RunTime::names) {
                Some(how) => how.replace("PID", &pid.to_string()),
                None => "let its run-time write a perf-map or a jitdump".to_owned(),
            };
            format!("code that {comm} (pid {pid}) made at run time: {how}")
        }
        Executable::Kernel { .. } => {
            let why = profile.names.sources.get(id.index()).map(|source| source.notes.join("; "));
            format!("the kernel: {}", why.unwrap_or_default())
        }
        Executable::Unmapped | Executable::Names { .. } => {
            "code of processes that ended before their mappings could be read".to_owned()
        }
        Executable::File { path, .. } => {
            let package = match debug_package(Path::new(path)) {
                Some(package) => format!("install {package}, or "),
                None => String::new(),
            };
            format!("{name}: {package}name a server that has its symbols with --debuginfod-url")
        }
        Executable::Code(code) => format!("{}: their names could not be read", code.runtime),
        Executable::Vdso { .. } => name,
    };
    Some(format!("{share:.0} % of the frames without a name are in {what}"))
}

/// Why most stacks that are not whole end, and what helps.
fn cut(profile: Named<'_>) -> Option<String> {
    type Key = (EndReason, Option<ExecutableId>, Option<ProcessId>);
    let mut counts: HashMap<Key, u64> = HashMap::new();
    for stacks in profile.cut() {
        let process = stacks.executable.and_then(|id| process_of(&profile, stacks.thread, id));
        *counts.entry((stacks.end, stacks.executable, process)).or_default() += stacks.count;
    }
    let ((end, executable, process), share) = heaviest(&counts)?;
    let executable = executable.map(|id| &profile.executables[id.index()]);
    let name = executable.map(Executable::name).unwrap_or_default();
    let with_ebpf = !profile.origin.collector.is_empty() && !profile.origin.perf_events;
    let how = match (end, executable) {
        (EndReason::NoMappingsYet | EndReason::NoTableYet, _) => {
            "their processes are young: the next capture has the tables"
        }
        (EndReason::CopyEnded | EndReason::NotCopied, _) if with_ebpf => {
            "their processes are young, and what was copied of their stacks ends there: the next capture has the tables"
        }
        (EndReason::NoMappings, _) => {
            "run the collector with CAP_PERFMON (kernel 6.15 or later) or as root"
        }
        (_, Some(Executable::Anonymous)) => {
            match process.and_then(|process| run_time(&profile, process)) {
                Some(RunTime::Java) => "start java with -XX:+PreserveFramePointer",
                _ => {
                    "this code has no unwind table; let its compiler keep frame pointers, or describe it in a jitdump"
                }
            }
        }
        (EndReason::NoFramePointer, _) => "if it was walked with --unwind fp, try --unwind auto",
        (EndReason::NoTable | EndReason::NoUnwindRule, Some(Executable::File { .. })) => {
            "build it with -fasynchronous-unwind-tables, or with -fno-omit-frame-pointer for --unwind fp"
        }
        (EndReason::CopyEnded, _) => {
            "copy more of it (here --stack-bytes 64512, with perf --call-graph dwarf,65528), or build with -fno-omit-frame-pointer"
        }
        (EndReason::NotCopied, _) => {
            "only the stack that a thread runs on is copied; eBPF, where it is allowed, reads the others"
        }
        (EndReason::DepthLimit, _) => "1,024 frames are kept of a stack",
        (EndReason::Compat, _) => {
            "stacks of 32-bit processes are not walked by tables; frame pointers are followed with --source perf --unwind fp"
        }
        _ => "`stackwire report` of the capture lists them all",
    };
    let place = if name.is_empty() { String::new() } else { format!(" in {name}") };
    Some(format!("{share:.0} % of the stacks that are not whole end{place}: {}; {how}", end.text()))
}

/// The run-time of a process, by the files that ran in it.
fn run_time(profile: &Profile, process: ProcessId) -> Option<RunTime> {
    let ran: Vec<String> = profile
        .mappings
        .iter()
        .filter(|mapping| mapping.process == process)
        .map(|mapping| profile.executables[mapping.executable.index()].name())
        .collect();
    RunTime::of(&ran)
}

/// Where dpkg keeps which file is of which package.
const DPKG: &str = "/var/lib/dpkg/info";

/// The Debian package with the debug information of a file of this host.
pub fn debug_package(path: &Path) -> Option<String> {
    // On systems with a merged /usr packages may have either path; and packages hold files, not
    // links to them.
    let whole = path.canonicalize().ok()?;
    let short = whole.strip_prefix("/usr").ok().map(|rest| Path::new("/").join(rest));
    let names: Vec<&str> = [Some(&whole), short.as_ref()]
        .into_iter()
        .flatten()
        .filter_map(|path| path.to_str())
        .collect();
    for entry in std::fs::read_dir(DPKG).ok()?.flatten() {
        let name = entry.file_name();
        let Some(package) = name.to_str().and_then(|name| name.strip_suffix(".list")) else {
            continue;
        };
        let Ok(list) = std::fs::File::open(entry.path()) else { continue };
        let mut lines = std::io::BufReader::new(list).lines().map_while(Result::ok);
        if lines.any(|line| names.contains(&line.as_str())) {
            let package = package.split(':').next().unwrap_or(package);
            // Debian's C library and kernel have packages of the old kind.
            return Some(match package {
                "libc6" => "libc6-dbg".to_owned(),
                _ => format!("{package}-dbgsym (of the debian-debug archive)"),
            });
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_debug_package_of_an_installed_file_is_named() {
        if !Path::new(DPKG).exists() {
            assert_eq!(debug_package(Path::new("/bin/sh")), None);
            return;
        }
        let dash = debug_package(Path::new("/bin/dash"));
        assert!(dash.as_deref().is_none_or(|it| it.starts_with("dash-dbgsym")), "{dash:?}");
        assert_eq!(debug_package(Path::new("/proc/self/exe")), None);
    }
}
