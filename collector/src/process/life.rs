//! Whether a process lives, by what `/proc/PID/stat` says of it and of its threads.

use super::text;

/// A thread that lives on in a process whose main thread has ended; `/proc` has its memory under
/// its own number. None where the main thread lives.
#[must_use]
pub fn living_task(pid: u32) -> Option<u32> {
    let state = |task: u32| {
        let stat = text::read(format!("/proc/{task}/stat")).ok()?;
        stat.rsplit_once(") ")?.1.chars().next()
    };
    let ended = |task| matches!(state(task), Some('Z' | 'X') | None);
    if !ended(pid) {
        return None;
    }
    threads(pid).into_iter().find(|&task| task != pid && !ended(task))
}

/// Threads of a process; none where it is gone.
#[must_use]
pub fn threads(pid: u32) -> Vec<u32> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    tasks.flatten().filter_map(|task| task.file_name().to_str()?.parse().ok()).collect()
}

/// Whether the process has a thread left: its main thread may have ended before the others.
pub(super) fn is_running(pid: u32) -> bool {
    text::read(format!("/proc/{pid}/stat")).is_ok_and(|stat| !has_ended(&stat))
}

/// Whether `/proc/PID/stat` is of a process without a thread that runs: a zombie (or dead) and
/// alone.
#[must_use]
pub fn has_ended(stat: &str) -> bool {
    // proc_pid_stat(5): state is field 3, num_threads field 20; the name before them may hold
    // anything, so they are counted from behind its last parenthesis.
    let mut fields = stat.rsplit_once(") ").map_or("", |(_, rest)| rest).split(' ');
    let ended = matches!(fields.next(), Some("Z" | "X"));
    let threads: u32 = fields.nth(16).and_then(|threads| threads.parse().ok()).unwrap_or(0);
    ended && threads <= 1
}
