//! Completes samples of perf events, which say neither when their process began nor how their
//! thread is called. Called by `pipeline.rs`.

use stackwire_collector_ebpf::SampleHeader;

use crate::process::{Processes, ThreadNames};
use crate::sources::side_band::Event;

/// What is known of threads.
#[derive(Debug, Default)]
pub struct PerfSamples {
    threads: ThreadNames,
}

impl PerfSamples {
    /// Notes what an event says of a thread.
    pub fn apply(&mut self, event: &Event) {
        self.threads.apply(event);
    }

    /// Adds to a sample what it does not say.
    pub fn complete(&mut self, header: &mut SampleHeader, processes: &mut Processes) {
        let pid = header.pid;
        header.start_boottime_ns = processes.start_of(pid);
        let process = processes.sampled(pid, header.start_boottime_ns, header.cgroup_id);
        header.comm = self.threads.of(pid, header.tid, &process.comm);
    }
}
