//! Samples beside the CPU time that processes used: of samples that nobody took, stacks do not
//! tell. Pure.

use std::collections::BTreeMap;

use super::{EndReason, Named, Profile};

/// What processes of one name used, and how much of it samples with whole stacks stand for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuTime {
    /// CPU time, nanoseconds.
    pub used_ns: u64,
    /// What all their samples stand for, nanoseconds.
    pub sampled_ns: u64,
    /// What those with whole stacks stand for, nanoseconds.
    pub whole_ns: u64,
    /// How many samples they are.
    pub samples: u64,
}

impl CpuTime {
    /// What a sample stands for, nanoseconds.
    #[must_use]
    pub fn period_ns(&self) -> u64 {
        self.sampled_ns / self.samples.max(1)
    }
}

impl<'a> Named<'a> {
    /// By names of processes. `None` where it is not known how much CPU time they used, or where
    /// their CPU time was not sampled.
    #[must_use]
    pub fn cpu_times(self) -> Option<BTreeMap<&'a str, CpuTime>> {
        let profile: &'a Profile = self.profile;
        let unsampled = profile.unsampled_cpu_ns.as_ref()?;
        let is_clock = |id| profile.series_of(id).event.is_clock();
        let clock = profile.sampled_series().find(|&id| is_clock(id))?;
        let of = |(comm, &used_ns): (&'a String, &u64)| {
            (comm.as_str(), CpuTime { used_ns, ..CpuTime::default() })
        };
        let mut times: BTreeMap<&str, CpuTime> = unsampled.iter().map(of).collect();
        for process in profile.processes.iter().filter(|process| process.cpu_ns > 0) {
            let time = times.entry(&process.comm).or_default();
            time.used_ns = time.used_ns.saturating_add(process.cpu_ns);
        }
        for sample in profile.samples_of(clock) {
            let thread = &profile.threads[sample.key.thread.index()];
            let comm = &profile.processes[thread.process.index()].comm;
            let time = times.entry(comm).or_default();
            time.sampled_ns += sample.value;
            time.samples += sample.count;
            // One without a user stack has nothing to walk: a kernel thread, a task that ends.
            let is_whole = |stack| self.end(stack) == EndReason::Root;
            time.whole_ns += if sample.key.user.is_none_or(is_whole) { sample.value } else { 0 };
        }
        Some(times)
    }
}

impl Profile {
    /// Keeps the CPU times of processes that have these labels, whose samples alone are left. Of a
    /// part of a process's samples nobody knows how much CPU time is theirs.
    pub(super) fn narrow_cpu_times(&mut self, labels: &[(String, String)]) {
        let Some(mut unsampled) = self.unsampled_cpu_ns.take() else { return };
        if !labels.iter().all(|(label, _)| is_of_process(label)) {
            return;
        }
        // None of them has the number of one that was sampled.
        let by_number = labels.iter().any(|(label, _)| label != COMM);
        unsampled.retain(|comm, _| {
            !by_number && labels.iter().any(|(label, value)| label == COMM && value == comm)
        });
        self.unsampled_cpu_ns = Some(unsampled);
        let mut has_samples = vec![false; self.processes.len()];
        for sample in &self.samples {
            has_samples[self.threads[sample.key.thread.index()].process.index()] = true;
        }
        for (process, has) in self.processes.iter_mut().zip(has_samples) {
            process.cpu_ns = if has { process.cpu_ns } else { 0 };
        }
    }
}

/// The label that is known of processes without samples.
pub(super) const COMM: &str = "comm";

/// Whether all samples of a process have the same value of this label, and processes without
/// samples are told from them by it.
pub(super) fn is_of_process(label: &str) -> bool {
    [COMM, "pid", "host_pid"].contains(&label)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Event;
    use crate::profile::{
        Builder, Names, Origin, Process, SampleKey, SeriesId, Taken, Thread, ThreadId,
    };

    /// Two processes, the second of which has a stack that is not whole, and one without samples.
    fn builder(used: Option<u64>) -> Builder {
        let mut into = Builder::new();
        let series = into.series(vec![(Event::cpu_clock(), 99)]).unwrap()[0];
        into.unsampled_cpu(used.map(|used_ns| [("cut".to_owned(), used_ns)]));
        let ends = [EndReason::Root, EndReason::Unreadable];
        for (index, end) in ends.into_iter().enumerate() {
            let (pid, comm) = (index as u32 + 1, ["whole", "cut"][index].to_owned());
            let process = into.process(Process { pid, comm, ..Process::default() }).unwrap();
            into.cpu_time(process, 100);
            let thread = Thread { process, tid: pid, comm: String::new() };
            let thread = into.thread(thread).unwrap();
            let user = Some(into.stack_from(None, end).unwrap());
            let key = SampleKey { series, thread, user, kernel: None, labels: 0 };
            let taken = Taken { count: 1, value: 90, time_ns: Some(1), cpu: None };
            into.sample(key, taken).unwrap();
            into.sample(SampleKey { user: None, ..key }, Taken { value: 5, ..taken }).unwrap();
        }
        into
    }

    #[test]
    fn whole_stacks_are_compared_with_what_was_used() {
        let profile = builder(Some(7)).build();
        let names = Names::default();
        let times = names.of(&profile).cpu_times().unwrap();
        let time = |used_ns, whole_ns| CpuTime { used_ns, sampled_ns: 95, whole_ns, samples: 2 };
        assert_eq!(times, BTreeMap::from([("whole", time(100, 95)), ("cut", time(107, 5))]));
    }

    #[test]
    fn what_is_not_known_of_all_samples_is_not_known() {
        let is_known = |it: Builder| Names::default().of(&it.build()).cpu_times().is_some();
        assert!(is_known(builder(Some(7))) && !is_known(builder(None)));
        let mut into = builder(Some(7));
        into.capture(1, Origin::default(), 0);
        let (series, thread) = (SeriesId(0), ThreadId(0));
        let key = SampleKey { series, thread, user: None, kernel: None, labels: 0 };
        into.weighted(key, 1, 1).unwrap();
        assert!(!is_known(into), "another capture does not tell");
    }

    #[test]
    fn of_chosen_processes_it_is_theirs_and_of_threads_it_is_not_known() {
        let keep = |label: &str, value: &str| {
            let mut profile = builder(Some(7)).build();
            profile.keep_labels(&[(label.to_owned(), value.to_owned())]);
            let names = Names::default();
            let times = names.of(&profile).cpu_times()?;
            Some(times.values().map(|it| it.used_ns).sum::<u64>())
        };
        assert_eq!((keep("comm", "whole"), keep("comm", "cut")), (Some(100), Some(107)));
        assert_eq!(keep("pid", "2"), Some(100));
        assert_eq!(keep("tid", "1"), None);
    }
}
