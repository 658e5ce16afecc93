//! How threads were scheduled: reads what the kernel side has added up and hands on what came since
//! the last look, of those who count. What that is, `sched.rs` says. Called by `pipeline.rs`.

use stackwire_collector_ebpf::sched_stats::{SchedStats, SwitchReason, THE_REST};

use crate::batch::Epoch;
use crate::process::Processes;
use crate::sampler::Sampler;
use crate::sched::{Done, Scheduled, Totals};
use crate::sources::record::comm_bytes;

/// What is known of how threads are scheduled.
#[derive(Debug)]
pub struct Scheduling {
    totals: Totals,
}

impl Scheduling {
    /// Goes on from these totals.
    #[must_use]
    pub fn new(totals: Totals) -> Self {
        Self { totals }
    }

    /// Adds what came since the last look, and lets the kernel side forget who has ended.
    /// `known_ns`: up to when events are known. Who became another program after that has a name of
    /// before: its sums wait for the next look.
    pub fn add_up(
        &mut self,
        sampler: &mut dyn Sampler,
        processes: &mut Processes,
        epoch: &mut Epoch,
        known_ns: u64,
    ) {
        for (key, sums) in sampler.sched_sums() {
            if sums.since_ns > known_ns && key != THE_REST {
                continue;
            }
            let done = self.totals.look(key, &sums);
            // To a program that is another by now, nothing is added any more.
            let is_over = processes.before(sums.pid, sums.since_ns).is_some();
            if is_over || done.is_none() && key != THE_REST && self.has_ended(&sums, processes) {
                sampler.forget_sched(key);
                self.totals.forget(key);
            }
            if let Some(done) = done {
                add(&done, processes, epoch);
            }
        }
    }

    fn has_ended(&self, sums: &SchedStats, processes: &Processes) -> bool {
        // A thread ends once; of a process one of many may have.
        let exited = sums.switches[SwitchReason::Exited as usize] > 0;
        let runs = || processes.runs(sums.pid, sums.start_boottime_ns);
        exited && (self.totals.of_threads() || !runs())
    }

    /// Adds what has not been switched out, up to when watching ended.
    pub fn add_running(
        &self,
        sampler: &mut dyn Sampler,
        processes: &mut Processes,
        epoch: &mut Epoch,
        end_ns: u64,
    ) {
        for running in sampler.running() {
            let unmet = || {
                let process = processes.get(running.pid)?;
                let comm = comm_bytes(process.comm.as_bytes());
                Some(Scheduled {
                    pid: running.pid,
                    host_pid: process.host_pid,
                    tid: self.totals.of_threads().then_some(running.tid),
                    start_boottime_ns: process.start_ns,
                    since_ns: running.since_ns,
                    cgroup_id: process.cgroup.id,
                    comm,
                })
            };
            if let Some(done) = self.totals.still_runs(&running, end_ns, unmet) {
                add(&done, processes, epoch);
            }
        }
    }
}

/// Adds how somebody was scheduled who counts. Those that cannot be told apart do where all do.
fn add(done: &Done, processes: &mut Processes, epoch: &mut Epoch) {
    let counts = match &done.of {
        Some(of) => processes.scheduled_counts(of),
        None => processes.all_count(),
    };
    if counts {
        epoch.add_sched(done, processes);
    }
}
