//! How much CPU time processes used, to compare their samples with: of samples that were never
//! taken nothing else tells.
//!
//! A process that runs is asked by its CPU clock. Of one that ended the kernel side tells, some
//! milliseconds after its parent was told. Called by `pipeline.rs`.

use std::collections::{HashMap, HashSet};

use crate::batch::Epoch;
use crate::clock::{boottime_ns, cpu_time_ns, now_ns};
use crate::process::{Process, Processes};
use crate::sources::record::Ended;

/// Words of the kernel side that wait for the process they are about to be heard of.
const MAX_PENDING: usize = 65_536;
/// How long they wait: by then the events of before are in.
const PATIENCE_NS: u64 = 1_000_000_000;
/// A process begins at most so long before the event that tells of it.
const FORK_NS: u64 = 100_000_000;
/// Names of processes without samples in an epoch. All others are added up without a name.
const MAX_NAMES: usize = 1024;

/// What has been added up of each process.
#[derive(Debug)]
pub struct CpuTimes {
    /// When the capture began, `CLOCK_BOOTTIME` nanoseconds.
    begun_ns: u64,
    /// By pid.
    added: HashMap<u32, Added>,
    /// What was told of processes that are not known yet.
    pending: Vec<Ended>,
    /// Processes with samples whose end has not been told, by pid.
    awaited: HashSet<u32>,
    /// CPU times when sampling ended, by pid.
    at_end: Option<HashMap<u32, u64>>,
}

#[derive(Clone, Copy, Debug)]
struct Added {
    /// When the process began, `CLOCK_BOOTTIME` nanoseconds; 0: not known.
    start_ns: u64,
    /// It ran when the capture began.
    is_old: bool,
    /// CPU time up to here, nanoseconds.
    cpu_ns: u64,
}

impl CpuTimes {
    /// From now on, of these processes and those that begin later.
    #[must_use]
    pub fn begin(pids: impl IntoIterator<Item = u32>) -> Self {
        let of = |pid| {
            let added = Added { start_ns: 0, is_old: true, cpu_ns: cpu_time_ns(pid)? };
            Some((pid, added))
        };
        Self {
            begun_ns: boottime_ns(),
            added: pids.into_iter().filter_map(of).collect(),
            pending: Vec::new(),
            awaited: HashSet::new(),
            at_end: None,
        }
    }

    /// Takes what the kernel side told, after the events that came with it.
    pub fn take(&mut self, ended: &mut Vec<Ended>, processes: &mut Processes, epoch: &mut Epoch) {
        let now = now_ns();
        let mut pending = std::mem::take(&mut self.pending);
        pending.append(ended);
        pending.retain(|ended| {
            let process = processes.get(ended.host_pid).filter(|it| self.is_of(ended, it));
            let Some(process) = process else {
                return processes.is_wanted(ended.host_pid) && ended.time_ns + PATIENCE_NS > now;
            };
            self.ended(process, ended, processes, epoch);
            processes.told_of_end(ended.host_pid);
            false
        });
        // The time of those beyond it is missing.
        pending.truncate(MAX_PENDING);
        self.pending = pending;
    }

    /// Nothing is sampled any more. Asks these processes.
    pub fn end(&mut self, pids: impl IntoIterator<Item = u32>) {
        let of = |pid| Some((pid, cpu_time_ns(pid)?));
        self.at_end = Some(pids.into_iter().filter_map(of).collect());
    }

    /// Whether some process with samples was gone at the end and the kernel side has not told of
    /// it.
    #[must_use]
    pub fn awaits_any(&self, processes: &Processes, epoch: &Epoch) -> bool {
        let ran = |pid: &u32| self.at_end.as_ref().is_some_and(|at_end| at_end.contains_key(pid));
        let is_awaited = |pid: u32| processes.get(pid).is_some_and(|process| !process.is_told);
        let of_epoch = epoch.processes.iter().map(|process| process.pid);
        let mut all = self.awaited.iter().copied().chain(of_epoch);
        all.any(|pid| !ran(&pid) && is_awaited(pid))
    }

    /// Adds what processes have used since they were asked last: those of this epoch and those that
    /// nobody has reaped. After the end: all.
    pub fn add_up(&mut self, processes: &Processes, epoch: &mut Epoch) {
        epoch.unsampled_cpu_ns.get_or_insert_default();
        match self.at_end.take() {
            Some(at_end) => {
                for process in processes.all().filter(|process| !process.is_told) {
                    if let Some(&cpu_ns) = at_end.get(&process.pid) {
                        self.add(process, process.start_ns, cpu_ns, processes, epoch);
                    }
                }
            }
            None => {
                let is_asked = |process: &&Process| {
                    let unreaped = process.exited() && !process.is_told;
                    unreaped || epoch.program_of(process.pid, process.start_ns).is_some()
                };
                let asked: Vec<&Process> = processes.all().filter(is_asked).collect();
                for process in asked {
                    if let Some(cpu_ns) = cpu_time_ns(process.pid) {
                        self.add(process, process.start_ns, cpu_ns, processes, epoch);
                    }
                }
            }
        }
        self.added.retain(|&pid, _| processes.get(pid).is_some());
        self.awaited.retain(|&pid| processes.get(pid).is_some_and(|it| !it.is_told));
        for process in &epoch.processes {
            if processes.get(process.pid).is_some_and(|it| !it.is_told) {
                self.awaited.insert(process.pid);
            }
        }
        divide(epoch);
    }

    fn ended(
        &mut self,
        process: &Process,
        ended: &Ended,
        processes: &Processes,
        epoch: &mut Epoch,
    ) {
        // What it used after the end does not count.
        let at_end = self.at_end.as_ref().and_then(|at_end| at_end.get(&process.pid));
        let cpu_ns = at_end.copied().unwrap_or(ended.cpu_ns);
        self.add(process, ended.start_boottime_ns, cpu_ns, processes, epoch);
        self.added.remove(&process.pid);
        self.awaited.remove(&process.pid);
    }

    /// Whether it is this process, and not another that had its number before.
    fn is_of(&self, ended: &Ended, process: &Process) -> bool {
        let start_ns = ended.start_boottime_ns;
        match (process.start_ns, process.born_ns) {
            (0, 0) => start_ns < self.begun_ns,
            (0, born_ns) => {
                let suspended_ns = boottime_ns().saturating_sub(now_ns());
                start_ns.saturating_sub(suspended_ns).abs_diff(born_ns) < FORK_NS
            }
            (known, _) => known == start_ns,
        }
    }

    /// Adds what a process has used up to here.
    fn add(
        &mut self,
        process: &Process,
        start_ns: u64,
        cpu_ns: u64,
        processes: &Processes,
        epoch: &mut Epoch,
    ) {
        let used_ns = self.used_since(process, start_ns, cpu_ns);
        if used_ns == 0 {
            return;
        }
        // Another program that it was before may have its samples.
        if let Some(program) = epoch.program_of(process.pid, start_ns) {
            epoch.processes[program].cpu_ns += used_ns;
        } else if process.sampled {
            epoch.add_cpu_time(process, used_ns);
        } else if processes.counts_by_name(process) {
            let unsampled = epoch.unsampled_cpu_ns.get_or_insert_default();
            let is_known = unsampled.len() < MAX_NAMES || unsampled.contains_key(&process.comm);
            let comm = if is_known { process.comm.clone() } else { String::new() };
            *unsampled.entry(comm).or_default() += used_ns;
        }
    }

    /// What a process has used since it was asked last, nanoseconds.
    fn used_since(&mut self, process: &Process, start_ns: u64, cpu_ns: u64) -> u64 {
        let is_new = process.born_ns != 0 || start_ns >= self.begun_ns;
        // Of one that ran before and was not asked then, nobody knows what it had used.
        let first = Added { start_ns, is_old: !is_new, cpu_ns: if is_new { 0 } else { cpu_ns } };
        let added = self.added.entry(process.pid).or_insert(first);
        let differs = added.start_ns != 0 && start_ns != 0 && added.start_ns != start_ns;
        // Nobody has told that the one before has ended.
        if differs || added.is_old && is_new {
            *added = first;
        }
        let used_ns = cpu_ns.saturating_sub(added.cpu_ns);
        added.start_ns = added.start_ns.max(start_ns);
        added.cpu_ns = added.cpu_ns.max(cpu_ns);
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
        Ended { time_ns: now_ns(), host_pid, start_boottime_ns, cpu_ns }
    }

    #[test]
    fn what_a_process_used_before_is_not_counted_and_what_nobody_sampled_is() {
        let mut processes = Processes::new(None, false);
        let born_ns = now_ns();
        let fork = |pid| Event { time_ns: born_ns, pid, change: Change::Fork { parent: BEFORE } };
        let exec = |pid| {
            let change = Change::Comm { tid: pid, comm: "x".into(), exec: true };
            Event { time_ns: born_ns, pid, change }
        };
        processes.apply(&exec(BEFORE));
        for pid in [BORN, UNSEEN] {
            processes.apply(&fork(pid));
            processes.apply(&exec(pid));
        }
        let mut times = CpuTimes::begin([]);
        let begun_ns = times.begun_ns;
        let added = Added { start_ns: 0, is_old: true, cpu_ns: 1_000 };
        times.added.insert(BEFORE, added);
        processes.sampled(BEFORE, 5, 1);
        processes.sampled(BORN, begun_ns + 1, 1);
        let told = [(BEFORE, 5, 1_300), (BORN, begun_ns + 1, 70), (UNSEEN, begun_ns + 2, 8)];
        let mut told = told.map(|(pid, start_ns, cpu_ns)| ended(pid, start_ns, cpu_ns)).into();
        let mut epoch = Epoch::default();
        times.take(&mut told, &mut processes, &mut epoch);
        times.add_up(&processes, &mut epoch);
        let found: Vec<_> = epoch.processes.iter().map(|it| (it.pid, it.cpu_ns)).collect();
        assert_eq!(found, [(BEFORE, 300), (BORN, 70)]);
        assert_eq!(
            epoch.unsampled_cpu_ns.unwrap().into_iter().collect::<Vec<_>>(),
            [("x".to_owned(), 8)]
        );
        assert!(times.pending.is_empty() && times.awaited.is_empty());
        // Another process of that number, and one of which nobody has heard.
        let mut epoch = Epoch::default();
        times.take(&mut vec![ended(BORN, 77, 5), ended(1, 77, 9)], &mut processes, &mut epoch);
        times.add_up(&processes, &mut epoch);
        assert!(epoch.processes.is_empty() && epoch.unsampled_cpu_ns.unwrap().is_empty());
        assert_eq!(times.pending.len(), 2);
    }

    #[test]
    fn one_that_ended_after_the_end_used_what_its_clock_said() {
        let mut processes = Processes::new(None, false);
        let mut times = CpuTimes::begin([]);
        let start_ns = times.begun_ns + 1;
        processes.apply(&Event { time_ns: 1, pid: BORN, change: Change::Fork { parent: 1 } });
        processes.sampled(BORN, start_ns, 1);
        let mut epoch = Epoch::default();
        times.at_end = Some(HashMap::from([(BORN, 40)]));
        times.take(&mut vec![ended(BORN, start_ns, 50)], &mut processes, &mut epoch);
        times.add_up(&processes, &mut epoch);
        assert_eq!(epoch.processes.iter().map(|it| it.cpu_ns).collect::<Vec<_>>(), [40]);
    }

    #[test]
    fn programs_of_one_process_have_their_parts() {
        let mut processes = Processes::new(None, false);
        let mut times = CpuTimes::begin([]);
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
        times.take(&mut vec![ended(BORN, start_ns, 400)], &mut processes, &mut epoch);
        times.add_up(&processes, &mut epoch);
        let found: Vec<_> = epoch.processes.iter().map(|it| (&*it.comm, it.cpu_ns)).collect();
        assert_eq!(found, [("shell", 100), ("program", 300)]);
    }

    #[test]
    fn a_process_that_runs_is_asked_by_its_clock() {
        let own = std::process::id();
        let mut processes = Processes::new(Some(&[own]), false);
        processes.scan();
        let mut times = CpuTimes::begin([own]);
        let before_ns = times.added[&own].cpu_ns;
        let until = cpu_time_ns(own).unwrap() + 5_000_000;
        while cpu_time_ns(own).unwrap() < until {}
        processes.sampled(own, 1, 1);
        let mut epoch = Epoch::default();
        times.end([own]);
        times.add_up(&processes, &mut epoch);
        let used_ns = epoch.processes[0].cpu_ns;
        assert!(used_ns >= 5_000_000 && used_ns <= cpu_time_ns(own).unwrap() - before_ns);
    }
}
