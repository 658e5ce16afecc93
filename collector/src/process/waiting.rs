//! Threads that wait when a capture begins: nobody saw them leave their CPU, and some never run
//! until it ends.
//!
//! Where they wait is unknown; how they wait, `/proc/PID/task/TID/stat` says, which does not tell
//! those that wait for a CPU from those that have one. Called by `session/prepare.rs`, and in the
//! end by `sampler/ebpf.rs`.

use std::path::{Path, PathBuf};

use stackwire_collector_ebpf::{Stratum, WaitState, Waiting};

use super::text;
use crate::sources::record::comm_bytes;

/// Those of these processes, each with its thread id, as waiting since `now_ns`.
#[must_use]
pub fn threads(
    pids: &[u32],
    states: &[WaitState],
    threshold_ns: u32,
    now_ns: u64,
) -> Vec<(u32, Waiting)> {
    let proc = Path::new("/proc");
    let mut all: Vec<_> =
        pids.iter().flat_map(|&pid| of_process(proc, pid, states, now_ns)).collect();
    for (tid, waiting) in &mut all {
        // Fibonacci hashing: any numbers that are spread well will do.
        waiting.stratum = Stratum::new(threshold_ns, tid.wrapping_mul(0x9e37_79b9));
    }
    all
}

/// All processes there are.
#[must_use]
pub fn processes() -> Vec<u32> {
    numbers(Path::new("/proc"))
}

/// The processes of a cgroup and of those below it.
#[must_use]
pub fn processes_of(cgroup: &Path) -> Vec<u32> {
    let mut found = Vec::new();
    let mut left: Vec<PathBuf> = vec![cgroup.to_owned()];
    while let Some(directory) = left.pop() {
        let pids = text::read(directory.join("cgroup.procs")).unwrap_or_default();
        found.extend(pids.lines().filter_map(|pid| pid.parse::<u32>().ok()));
        let below = std::fs::read_dir(&directory).into_iter().flatten().flatten();
        let is_one = |entry: &std::fs::DirEntry| entry.file_type().is_ok_and(|it| it.is_dir());
        left.extend(below.filter(is_one).map(|entry| entry.path()));
    }
    found
}

fn of_process(
    proc: &Path,
    pid: u32,
    states: &[WaitState],
    now_ns: u64,
) -> impl Iterator<Item = (u32, Waiting)> {
    let tasks = proc.join(pid.to_string()).join("task");
    numbers(&tasks).into_iter().filter_map(move |tid| {
        let stat = text::read(tasks.join(tid.to_string()).join("stat")).ok()?;
        let (state, comm) = parse(&stat)?;
        let woken_ns = if state == WaitState::Preempted { now_ns } else { 0 };
        let (since_ns, state_number) = (now_ns, state as u32);
        let waiting =
            Waiting { since_ns, woken_ns, pid, state: state_number, comm, ..Waiting::default() };
        states.contains(&state).then_some((tid, waiting))
    })
}

/// How long a thread has run so far, nanoseconds: the first number of its `schedstat`
/// (Documentation/scheduler/sched-stats.rst). None of one that has ended.
#[must_use]
pub fn ran_ns(pid: u32, tid: u32) -> Option<u64> {
    let text = text::read(format!("/proc/{pid}/task/{tid}/schedstat")).ok()?;
    text.split(' ').next()?.parse().ok()
}

/// How a thread waits, and its name; none of one that has ended. One that runs may wait for a CPU.
/// Pure.
///
/// proc_pid_stat(5): the name is field 2, in parentheses, and may hold anything; the state is field
/// 3.
fn parse(stat: &str) -> Option<(WaitState, [u8; 16])> {
    let (before, after) = stat.rsplit_once(") ")?;
    let state = match after.chars().next()? {
        'S' | 'I' => WaitState::Sleep,
        'D' => WaitState::Disk,
        'T' | 't' => WaitState::Stopped,
        'R' => WaitState::Preempted,
        _ => return None,
    };
    Some((state, comm_bytes(before.split_once('(')?.1.as_bytes())))
}

fn numbers(directory: &Path) -> Vec<u32> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_says_how_it_waits() {
        let comm = |text: &[u8]| {
            let mut comm = [0; 16];
            comm[..text.len()].copy_from_slice(text);
            comm
        };
        assert_eq!(parse("7 (a) b) S 1 7 7"), Some((WaitState::Sleep, comm(b"a) b"))));
        assert_eq!(parse("7 (sh) D 1"), Some((WaitState::Disk, comm(b"sh"))));
        assert_eq!(parse("7 (sh) R 1"), Some((WaitState::Preempted, comm(b"sh"))));
        assert_eq!(parse("7 (sh) Z 1"), None);
        assert_eq!(parse("7 sh"), None);
    }

    #[test]
    fn threads_that_sleep_are_found() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let found = |states: &[WaitState]| {
            threads(&[child.id()], states, 1000, 5)
                .first()
                .map(|&(tid, it)| (tid, it.since_ns, it.pid))
        };
        let asleep = std::time::Instant::now();
        while found(&[WaitState::Sleep]).is_none() && asleep.elapsed().as_secs() < 10 {
            std::thread::yield_now();
        }
        let (asleep, stopped) = (found(&[WaitState::Sleep]), found(&[WaitState::Stopped]));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(asleep, Some((child.id(), 5, child.id())));
        assert_eq!(stopped, None);
    }
}
