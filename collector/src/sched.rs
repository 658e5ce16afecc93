//! How threads were scheduled since the last look: the kernel side's sums, less those of the look
//! before. Pure. Called by `scheduling.rs` at the end of an epoch.

use rustc_hash::FxHashMap;
use stackwire_collector_ebpf::sched_stats::{self as abi, SwitchReason, THE_REST};
use stackwire_model::sched::{CounterSum, Histogram, Switches};
use stackwire_model::{AddUp, SchedStats};

/// What somebody did since the last look.
#[derive(Clone, Debug)]
pub struct Done {
    /// Whose it is; none: of all those there was no room to tell apart.
    pub of: Option<Scheduled>,
    /// The sums.
    pub stats: SchedStats,
}

/// A process, or a thread of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheduled {
    /// The process.
    pub pid: u32,
    /// Its pid in the initial pid namespace; 0: not known.
    pub host_pid: u32,
    /// The thread; none: all threads of the process.
    pub tid: Option<u32>,
    /// Start of the process, `CLOCK_BOOTTIME` nanoseconds.
    pub start_boottime_ns: u64,
    /// The program is that of this time, `CLOCK_MONOTONIC` nanoseconds.
    pub since_ns: u64,
    /// Its cgroup.
    pub cgroup_id: u64,
    /// Name of the thread, or of the first that was met, NUL-padded.
    pub comm: [u8; 16],
}

/// The sums at the last look.
#[derive(Debug)]
pub struct Totals {
    before: FxHashMap<u64, Sums>,
    add_up: AddUp,
    counters: usize,
    in_cgroup: bool,
}

/// Sums of the kernel side, without the buckets that are empty.
#[derive(Clone, Debug, Default)]
struct Sums {
    of: Option<Scheduled>,
    slices: Times,
    run_queue: Times,
    switches: [u64; 5],
    migrations: u64,
    counters: Vec<abi::CounterSum>,
}

#[derive(Clone, Debug, Default)]
struct Times {
    sum_ns: u64,
    buckets: Vec<(u16, u32)>,
}

impl Times {
    fn of(all: &abi::Times) -> Self {
        let buckets = all.buckets.iter().zip(0..).filter(|(count, _)| **count != 0);
        Self { sum_ns: all.sum_ns, buckets: buckets.map(|(count, at)| (at, *count)).collect() }
    }

    /// What came since `before`. The numbers in buckets wrap.
    fn since(&self, before: &Self) -> Histogram {
        let mut old: FxHashMap<u16, u32> = before.buckets.iter().copied().collect();
        let mut all: Vec<(u16, u64)> = Vec::with_capacity(self.buckets.len());
        for &(bucket, count) in &self.buckets {
            let new = count.wrapping_sub(old.remove(&bucket).unwrap_or(0));
            all.push((bucket, new.into()));
        }
        // Those that have wrapped to 0.
        all.extend(
            old.into_iter().map(|(bucket, count)| (bucket, 0u32.wrapping_sub(count).into())),
        );
        Histogram::new(self.sum_ns.wrapping_sub(before.sum_ns), all)
    }
}

impl Totals {
    /// Nothing was looked at yet; `counters` of them are read. `in_cgroup`: of tasks of one cgroup.
    #[must_use]
    pub fn new(add_up: AddUp, counters: usize, in_cgroup: bool) -> Self {
        Self { before: FxHashMap::default(), add_up, counters, in_cgroup }
    }

    /// What somebody did since the last look; none if nothing.
    pub fn look(&mut self, key: u64, now: &abi::SchedStats) -> Option<Done> {
        let of = (key != THE_REST).then_some(Scheduled {
            pid: now.pid,
            host_pid: now.host_pid,
            tid: (self.add_up == AddUp::Threads).then_some(now.tid),
            start_boottime_ns: now.start_boottime_ns,
            since_ns: now.since_ns,
            cgroup_id: now.cgroup_id,
            comm: now.comm,
        });
        let sums = Sums {
            of,
            slices: Times::of(&now.slices),
            run_queue: Times::of(&now.run_queue),
            switches: now.switches,
            migrations: now.migrations,
            counters: now.counters.iter().take(self.counters).copied().collect(),
        };
        let before = self.before.insert(key, sums.clone()).unwrap_or_default();
        let switch = |reason: SwitchReason| {
            sums.switches[reason as usize].wrapping_sub(before.switches[reason as usize])
        };
        let counter = |(index, now): (usize, &abi::CounterSum)| {
            let before = before.counters.get(index).copied().unwrap_or_default();
            CounterSum {
                value: now.value.wrapping_sub(before.value),
                enabled_ns: now.enabled_ns.wrapping_sub(before.enabled_ns),
                running_ns: now.running_ns.wrapping_sub(before.running_ns),
            }
        };
        let stats = SchedStats {
            slices: sums.slices.since(&before.slices),
            run_queue: sums.run_queue.since(&before.run_queue),
            switches: Switches {
                preempted: switch(SwitchReason::Preempted),
                voluntary: switch(SwitchReason::Voluntary),
                io: switch(SwitchReason::Io),
                stopped: switch(SwitchReason::Stopped),
                exited: switch(SwitchReason::Exited),
            },
            migrations: sums.migrations.wrapping_sub(before.migrations),
            counters: sums.counters.iter().enumerate().map(counter).collect(),
        };
        // A slice ends without a switch where the process becomes another program.
        let slices = stats.slices.count();
        if slices == 0 && stats.switches.all() == 0 && stats.migrations == 0 {
            return None;
        }
        Some(Done { of, stats })
    }

    /// What a thread does that has run since `running.since_ns` and was not switched out, its
    /// counters since then.
    /// `unmet` says who it is if it never was.
    pub fn still_runs(
        &self,
        running: &abi::OnCpu,
        now_ns: u64,
        unmet: impl FnOnce() -> Option<Scheduled>,
    ) -> Option<Done> {
        let is_it =
            |of: &&Scheduled| of.pid == running.pid && of.tid.is_none_or(|tid| tid == running.tid);
        let met = self.before.values().filter_map(|sums| sums.of.as_ref()).filter(is_it);
        // Numbers are used again: the last.
        let met = met.max_by_key(|of| (of.start_boottime_ns, of.since_ns)).copied();
        let ran_ns = now_ns.saturating_sub(running.since_ns);
        let slices = Histogram::new(ran_ns, [(abi::bucket_of(ran_ns) as u16, 1)]);
        // Only the kernel side knows whether one it never met is in the cgroup.
        let of = met.or_else(|| unmet().filter(|_| !self.in_cgroup))?;
        let of = Scheduled { since_ns: running.since_ns, ..of };
        let counter = |now: &abi::CounterSum| CounterSum {
            value: now.value,
            enabled_ns: now.enabled_ns,
            running_ns: now.running_ns,
        };
        let counters = running.counters.iter().take(self.counters).map(counter).collect();
        Some(Done { of: Some(of), stats: SchedStats { slices, counters, ..SchedStats::default() } })
    }

    /// Whether it is threads that are told apart.
    #[must_use]
    pub fn of_threads(&self) -> bool {
        self.add_up == AddUp::Threads
    }

    /// Forgets one that ended.
    pub fn forget(&mut self, key: u64) {
        self.before.remove(&key);
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;

    #[test]
    fn a_look_tells_what_came_since_the_one_before() {
        let mut totals = Totals::new(AddUp::Processes, 1, false);
        let mut sums = abi::SchedStats::new_zeroed();
        (sums.pid, sums.start_boottime_ns) = (7, 5);
        sums.slices.buckets[3] = u32::MAX;
        sums.slices.sum_ns = 3;
        sums.switches[SwitchReason::Io as usize] = 1;
        assert!(totals.look(7, &sums).is_some());
        assert!(totals.look(7, &sums).is_none(), "nothing came");
        // It wraps.
        sums.slices.buckets[3] = 1;
        sums.slices.sum_ns = 9;
        sums.switches[SwitchReason::Voluntary as usize] = 2;
        sums.counters[0].value = 40;
        let done = totals.look(7, &sums).unwrap();
        assert_eq!(done.stats.slices, Histogram::new(6, [(3, 2)]));
        assert_eq!((done.stats.switches.voluntary, done.stats.switches.io), (2, 0));
        assert_eq!(done.stats.counters[0].value, 40);
        assert_eq!((done.of.unwrap().pid, done.of.unwrap().tid), (7, None));
        // It becomes another program, and has not been switched since.
        (sums.slices.buckets[3], sums.slices.sum_ns) = (2, 12);
        let done = totals.look(7, &sums).unwrap();
        assert_eq!((done.stats.slices.sum_ns(), done.stats.switches.all()), (3, 0));
        // Another process of this number has another key.
        assert_eq!(totals.look(8, &sums).unwrap().stats.switches.io, 1);
        let mut running = abi::OnCpu { since_ns: 10, pid: 7, tid: 9, ..abi::OnCpu::default() };
        running.counters[0].value = 6;
        let done = totals.still_runs(&running, 30, || None).unwrap();
        assert_eq!(done.stats.counters[0].value, 6);
        assert_eq!(done.stats.slices, Histogram::new(20, [(20, 1)]));
        let stranger = abi::OnCpu { pid: 6, ..running };
        assert!(totals.still_runs(&stranger, 30, || None).is_none());
    }

    #[test]
    fn both_sides_have_the_same_buckets() {
        for bucket in 0..Histogram::BUCKETS {
            let at = |ns| abi::bucket_of(ns) as u16;
            let (start, end) = (Histogram::start_of(bucket), Histogram::end_of(bucket));
            assert_eq!((at(start), at(end)), (bucket, bucket), "{start} to {end}");
        }
        assert_eq!(abi::bucket_of(u64::MAX) as u16, Histogram::BUCKETS - 1);
        assert_eq!(abi::BUCKETS, usize::from(Histogram::BUCKETS));
    }
}
