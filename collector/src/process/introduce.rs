//! Who a thread is, where the kernel does not say it with a sample: the name of the thread, and
//! when its process began. Perf events say neither.

use std::collections::HashMap;

use super::{Processes, text};
use crate::clock::{boottime_of_namespace_ns, boottime_offset_ns};
use crate::sources::record::comm_bytes;
use crate::sources::side_band::{Change, Event};

/// Names remembered.
const MAX_NAMES: usize = 65_536;
/// Nanoseconds of a tick of `/proc/PID/stat`: `USER_HZ` is 100 on every architecture Linux runs on
/// today (include/asm-generic/param.h).
const TICK_NS: u64 = 10_000_000;

/// Names of threads.
#[derive(Debug, Default)]
pub struct ThreadNames {
    by_tid: HashMap<u32, [u8; 16]>,
}

impl ThreadNames {
    /// Notes what an event says.
    pub fn apply(&mut self, event: &Event) {
        match &event.change {
            Change::Comm { tid, comm, .. } => self.insert(*tid, comm.as_bytes()),
            Change::Exit { tid } => drop(self.by_tid.remove(tid)),
            _ => {}
        }
    }

    /// The name of a thread, NUL-padded; `otherwise` is that of its process.
    pub fn of(&mut self, pid: u32, tid: u32, otherwise: &str) -> [u8; 16] {
        if !self.by_tid.contains_key(&tid) {
            let read = std::fs::read(format!("/proc/{pid}/task/{tid}/comm"));
            let name = read.unwrap_or_else(|_| otherwise.as_bytes().to_vec());
            self.insert(tid, name.strip_suffix(b"\n").unwrap_or(&name));
        }
        self.by_tid.get(&tid).copied().unwrap_or_default()
    }

    fn insert(&mut self, tid: u32, name: &[u8]) {
        if self.by_tid.len() >= MAX_NAMES {
            self.by_tid.clear();
        }
        self.by_tid.insert(tid, comm_bytes(name));
    }
}

impl Processes {
    /// When a process began, `CLOCK_BOOTTIME` nanoseconds: the same at each call. 0: nobody can
    /// tell.
    #[must_use]
    pub fn start_of(&self, pid: u32) -> u64 {
        let known = self.get(pid);
        if let Some(start_ns) = known.map(|process| process.start_ns).filter(|&start| start != 0) {
            return start_ns;
        }
        let stat = text::read(format!("/proc/{pid}/stat")).unwrap_or_default();
        let born = known.filter(|process| process.witnessed);
        start(&stat)
            // It has ended. An exec is later than the beginning, and no other process's.
            .or_else(|| Some(born?.since_ns.saturating_add_signed(boottime_offset_ns())))
            .unwrap_or(0)
    }
}

/// Whether the process that has this number now began then, `CLOCK_BOOTTIME` nanoseconds, as far as
/// is known.
pub(super) fn began(pid: u32, start_ns: u64) -> bool {
    let stat = text::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    let Some(found) = start(&stat).filter(|_| start_ns != 0) else { return true };
    // /proc has the time of the reader's time namespace (timens_add_boottime_ns of
    // fs/proc/array.c), cut to ticks.
    found.saturating_add_signed(-boottime_of_namespace_ns()).abs_diff(start_ns) <= TICK_NS
}

/// proc_pid_stat(5): starttime is field 22, in ticks. Pure.
fn start(stat: &str) -> Option<u64> {
    let ticks: u64 = stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()?;
    Some(ticks * TICK_NS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_the_name_it_was_given_last() {
        let mut names = ThreadNames::default();
        let pid = std::process::id();
        let comm = |comm: &str| Change::Comm { tid: pid, comm: comm.to_owned(), exec: false };
        let own = names.of(pid, pid, "x");
        assert!(own[0] != 0 && own != *b"x\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        names.apply(&Event { time_ns: 1, pid, change: comm("a name of 20 letters") });
        assert_eq!(&names.of(pid, pid, "x"), b"a name of 20 le\0");
        names.apply(&Event { time_ns: 2, pid, change: Change::Exit { tid: pid } });
        assert_eq!(names.of(pid, pid, "x"), own);
        assert_eq!(&names.of(4_000_001, 4_000_001, "gone")[..5], b"gone\0");
    }

    #[test]
    fn a_process_begins_once() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 5000 9 9";
        assert_eq!(start(stat), Some(50_000_000_000));
        assert_eq!(start("7 (sh"), None);
        let mut processes = Processes::new(None, false);
        let pid = std::process::id();
        let first = processes.start_of(pid);
        assert!(first > 0);
        processes.sampled(pid, first, 0);
        assert_eq!(processes.start_of(pid), first);
    }
}
