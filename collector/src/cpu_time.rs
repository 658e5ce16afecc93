//! How much CPU time processes used, to compare their samples with: of samples that were never
//! taken nothing else tells.
//!
//! A process that runs is asked by its CPU clock. Of one that ended the kernel side tells. Called
//! by `pipeline.rs`, last when it cuts an epoch.

use std::collections::HashMap;

use crate::batch::Epoch;
use crate::clock::{boottime_ns, cpu_time_ns};
use crate::host::pid_namespace;
use crate::process::{Process, Processes};
use crate::sources::record::Ended;

/// What has been added up of each process.
#[derive(Debug)]
pub struct CpuTimes {
    /// When the capture began, `CLOCK_BOOTTIME` nanoseconds.
    begun_ns: u64,
    /// Processes without samples count, too.
    counts_unsampled: bool,
    /// The collector knows processes by other numbers than the kernel side.
    is_in_namespace: bool,
    /// By pid.
    added: HashMap<u32, Added>,
    /// Processes that have ended since the last epoch.
    ended: Vec<Ended>,
    /// CPU times when the capture ended, by pid.
    at_end: Option<HashMap<u32, u64>>,
}

#[derive(Clone, Copy, Debug)]
struct Added {
    /// When the process began, `CLOCK_BOOTTIME` nanoseconds; 0: not known.
    start_ns: u64,
    /// CPU time up to here, nanoseconds.
    cpu_ns: u64,
}

impl CpuTimes {
    /// From now on, of these processes and those that begin later.
    #[must_use]
    pub fn begin(pids: impl IntoIterator<Item = u32>, counts_unsampled: bool) -> Self {
        let of = |pid| Some((pid, Added { start_ns: 0, cpu_ns: cpu_time_ns(pid)? }));
        Self {
            begun_ns: boottime_ns(),
            counts_unsampled,
            is_in_namespace: pid_namespace().is_some(),
            added: pids.into_iter().filter_map(of).collect(),
            ended: Vec::new(),
            at_end: None,
        }
    }

    /// Takes what the kernel side told.
    pub fn take(&mut self, ended: &mut Vec<Ended>) {
        self.ended.append(ended);
    }

    /// Nothing is sampled any more.
    pub fn end(&mut self, processes: &Processes) {
        let of = |process: &Process| Some((process.pid, cpu_time_ns(process.pid)?));
        self.at_end = Some(processes.all().filter_map(of).collect());
    }

    /// Whether some process with samples has ended and the kernel side has not told of it yet.
    #[must_use]
    pub fn awaits_any(&self, processes: &Processes) -> bool {
        let is_told = |process: &Process| self.ended.iter().any(|ended| self.is_of(ended, process));
        let is_gone = |process: &Process| process.exited() && cpu_time_ns(process.pid).is_none();
        let mut sampled = processes.all().filter(|process| process.sampled);
        sampled.any(|process| is_gone(process) && process.may_be_told_of && !is_told(process))
    }

    /// Adds what processes have used since they were asked last: those of this epoch and those that
    /// ended. After the end: all.
    pub fn add_up(&mut self, processes: &Processes, epoch: &mut Epoch) {
        epoch.unsampled_cpu_ns.get_or_insert(0);
        for ended in std::mem::take(&mut self.ended) {
            if let Some(process) = self.of(&ended, processes) {
                let used_ns = self.used_since(process, ended.start_boottime_ns, ended.cpu_ns);
                self.added.remove(&process.pid);
                self.add(process, used_ns, epoch);
            }
        }
        match self.at_end.take() {
            Some(at_end) => {
                for process in processes.all() {
                    if let Some(&cpu_ns) = at_end.get(&process.pid) {
                        let used_ns = self.used_since(process, process.start_ns, cpu_ns);
                        self.add(process, used_ns, epoch);
                    }
                }
            }
            // The last program that a process has become comes last, and is asked first.
            None => {
                for index in (0..epoch.processes.len()).rev() {
                    let pid = epoch.processes[index].pid;
                    if let (Some(process), Some(cpu_ns)) = (processes.get(pid), cpu_time_ns(pid)) {
                        let used_ns = self.used_since(process, process.start_ns, cpu_ns);
                        epoch.processes[index].cpu_ns += used_ns;
                    }
                }
            }
        }
        divide(epoch);
    }

    fn of<'a>(&self, ended: &Ended, processes: &'a Processes) -> Option<&'a Process> {
        if self.is_in_namespace {
            return processes.all().find(|process| self.is_of(ended, process));
        }
        processes.get(ended.host_pid).filter(|process| self.is_of(ended, process))
    }

    fn is_of(&self, ended: &Ended, process: &Process) -> bool {
        let host_pid = match process.host_pid {
            // It has no samples that would tell.
            0 if !self.is_in_namespace => process.pid,
            known => known,
        };
        let started = [0, ended.start_boottime_ns];
        host_pid == ended.host_pid && started.contains(&process.start_ns)
    }

    fn add(&self, process: &Process, used_ns: u64, epoch: &mut Epoch) {
        if process.sampled {
            epoch.add_cpu_time(process, used_ns);
        } else if let Some(unsampled) = &mut epoch.unsampled_cpu_ns
            && self.counts_unsampled
        {
            *unsampled += used_ns;
        }
    }

    /// What a process has used since it was asked last, nanoseconds.
    fn used_since(&mut self, process: &Process, start_ns: u64, cpu_ns: u64) -> u64 {
        let now = Added { start_ns, cpu_ns };
        let is_new = process.witnessed || start_ns >= self.begun_ns;
        // Of one that ran before and was not asked then, nobody knows what it had used.
        let unknown = if is_new { Added { start_ns, cpu_ns: 0 } } else { now };
        let before = self.added.entry(process.pid).or_insert(unknown);
        let is_another = before.start_ns != 0 && start_ns != 0 && before.start_ns != start_ns;
        if is_another {
            *before = unknown;
        }
        let used_ns = cpu_ns.saturating_sub(before.cpu_ns);
        *before =
            Added { start_ns: start_ns.max(before.start_ns), cpu_ns: cpu_ns.max(before.cpu_ns) };
        used_ns
    }
}

/// Divides what a process used among the programs that it has been in this epoch, by their samples:
/// the kernel counts it for the process alone.
fn divide(epoch: &mut Epoch) {
    let mut programs: HashMap<(u32, u64), Vec<usize>> = HashMap::new();
    for (index, process) in epoch.processes.iter().enumerate() {
        programs.entry((process.pid, process.start_ns)).or_default().push(index);
    }
    programs.retain(|_, programs| programs.len() > 1);
    if programs.is_empty() {
        return;
    }
    let mut samples = vec![0; epoch.processes.len()];
    for sample in epoch.series.iter().flatten() {
        samples[epoch.threads[sample.thread as usize].process as usize] += u128::from(sample.count);
    }
    for programs in programs.values() {
        let of_all: u128 = programs.iter().map(|&index| samples[index]).sum();
        if of_all == 0 {
            continue;
        }
        let used_ns: u64 = programs.iter().map(|&index| epoch.processes[index].cpu_ns).sum();
        for &index in programs {
            let part = u128::from(used_ns) * samples[index] / of_all;
            epoch.processes[index].cpu_ns = u64::try_from(part).unwrap_or(used_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use stackwire_collector_ebpf::SampleHeader;

    use super::*;
    use crate::host::kallsyms::KernelLayout;
    use crate::managed::UserStack;
    use crate::sources::side_band::{Change, Event};
    use crate::waits::Taken;

    const BEFORE: u32 = 4_000_001; // above any pid_max, so that /proc has no such process
    const BORN: u32 = 4_000_002;
    const UNSEEN: u32 = 4_000_003;

    fn ended(host_pid: u32, start_boottime_ns: u64, cpu_ns: u64) -> Ended {
        Ended { host_pid, start_boottime_ns, cpu_ns }
    }

    #[test]
    fn what_a_process_used_before_is_not_counted_and_what_nobody_sampled_is() {
        let mut processes = Processes::new(None, false);
        for pid in [BEFORE, BORN, UNSEEN] {
            let comm = Change::Comm { tid: pid, comm: "x".into(), exec: true };
            processes.apply(&Event { time_ns: 1, pid, change: comm });
        }
        let mut times = CpuTimes::begin([], true);
        let begun_ns = times.begun_ns;
        times.added.insert(BEFORE, Added { start_ns: 0, cpu_ns: 1_000 });
        processes.sampled(BEFORE, 5, 1);
        processes.sampled(BORN, begun_ns + 1, 1);
        let told = [(BEFORE, 5, 1_300), (BORN, begun_ns + 1, 70), (UNSEEN, begun_ns + 2, 8)];
        times.take(&mut told.map(|(pid, start_ns, cpu_ns)| ended(pid, start_ns, cpu_ns)).into());
        let mut epoch = Epoch::default();
        times.add_up(&processes, &mut epoch);
        let found: Vec<_> = epoch.processes.iter().map(|it| (it.pid, it.cpu_ns)).collect();
        assert_eq!(found, [(BEFORE, 300), (BORN, 70)]);
        assert_eq!(epoch.unsampled_cpu_ns, Some(8));
        // Another process of that number, and one of which nobody has heard.
        times.take(&mut vec![ended(BORN, 77, 5), ended(1, 77, 9)]);
        let mut epoch = Epoch::default();
        times.add_up(&processes, &mut epoch);
        assert_eq!((epoch.processes.len(), epoch.unsampled_cpu_ns), (0, Some(0)));
    }

    #[test]
    fn programs_of_one_process_have_their_parts() {
        let mut processes = Processes::new(None, false);
        let mut times = CpuTimes::begin([], true);
        let start_ns = times.begun_ns + 1;
        let mut epoch = Epoch::default();
        for (comm, samples) in [("shell", 1), ("program", 3)] {
            let exec = Change::Comm { tid: BORN, comm: comm.into(), exec: true };
            processes.apply(&Event { time_ns: 1, pid: BORN, change: exec });
            let header =
                SampleHeader { pid: BORN, start_boottime_ns: start_ns, ..SampleHeader::default() };
            for _ in 0..samples {
                let (stack, layout) = (UserStack::native(&[]), KernelLayout::default());
                epoch.add(&header, stack, &[], Taken::ONE, &mut processes, &layout);
            }
        }
        times.take(&mut vec![ended(BORN, start_ns, 400)]);
        times.add_up(&processes, &mut epoch);
        let found: Vec<_> = epoch.processes.iter().map(|it| (&*it.comm, it.cpu_ns)).collect();
        assert_eq!(found, [("shell", 100), ("program", 300)]);
    }

    #[test]
    fn a_process_that_runs_is_asked_by_its_clock() {
        let own = std::process::id();
        let mut processes = Processes::new(Some(&[own]), false);
        processes.scan();
        let mut times = CpuTimes::begin([own], true);
        let before_ns = times.added[&own].cpu_ns;
        let until = cpu_time_ns(own).unwrap() + 5_000_000;
        while cpu_time_ns(own).unwrap() < until {}
        processes.sampled(own, 1, 1);
        let mut epoch = Epoch::default();
        times.end(&processes);
        times.add_up(&processes, &mut epoch);
        let used_ns = epoch.processes[0].cpu_ns;
        assert!(used_ns >= 5_000_000 && used_ns <= cpu_time_ns(own).unwrap() - before_ns);
    }
}
