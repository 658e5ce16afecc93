//! Completes samples of perf events. They say neither when their process began nor how their thread
//! is called, and their stack may be a copy that is to be walked. Called by `pipeline.rs`.

use std::time::Duration;

use stackwire_collector_ebpf::{SampleHeader, UserEnd};

use crate::clock::now_ns;
use crate::process::{Processes, ThreadNames};
use crate::sampler::{Batch, RawSample};
use crate::sources::side_band::Event;
use crate::unwind::{CopiedStacks, Tally, Unwind};

/// How long a sample waits for the table its stack is to be walked by.
const PATIENCE: Duration = Duration::from_secs(3);
/// Bytes of copied stacks that may wait. Beyond it, stacks are walked as far as tables are there.
const MAX_COPIED: usize = 64 << 20;

/// What is known of threads, and the walker.
#[derive(Debug)]
pub struct PerfSamples {
    threads: ThreadNames,
    /// `None`: stacks are those the kernel found by frame pointers.
    walker: Option<CopiedStacks>,
    walked: Vec<u64>,
}

impl PerfSamples {
    /// Before the first sample.
    #[must_use]
    pub fn new(walker: Option<CopiedStacks>) -> Self {
        Self { threads: ThreadNames::default(), walker, walked: Vec::new() }
    }

    /// Notes what an event says of a thread.
    pub fn apply(&mut self, event: &Event) {
        self.threads.apply(event);
    }

    /// See [`CopiedStacks::take_tally`].
    pub fn take_tally(&mut self) -> Option<Tally> {
        self.walker.as_mut()?.take_tally()
    }

    /// The sample with what it does not say, and its user stack, leaf first. `None`: ask again
    /// later, the table is not there yet by which the stack is to be walked.
    pub fn complete(
        &mut self,
        sample: &RawSample,
        batch: &Batch,
        processes: &mut Processes,
        unwind: Option<&mut Unwind>,
    ) -> Option<(SampleHeader, &[u64])> {
        let mut header = sample.header;
        let pid = header.pid;
        header.start_boottime_ns = processes.start_of(pid);
        let process = processes.sampled(pid, header.start_boottime_ns, header.cgroup_id);
        header.comm = self.threads.of(pid, header.tid, &process.comm);
        let user = batch.user(sample);
        self.walked.clear();
        if let Some(copied) = batch.copied(sample)
            && let Some(walker) = &mut self.walker
        {
            // Walked by what was mapped when it was taken.
            processes.told(header.time_ns);
            if let Some(unwind) = unwind {
                unwind.update(processes, &[], false);
            }
            let process = processes.sampled(pid, header.start_boottime_ns, header.cgroup_id);
            let end = walker.walk(&copied, process, user, &mut self.walked);
            let age_ns = now_ns().saturating_sub(header.time_ns);
            if end == UserEnd::NoTableYet
                && age_ns < PATIENCE.as_nanos() as u64
                && batch.copied_bytes() < MAX_COPIED
            {
                return None;
            }
            header.user_end = end as u8;
        } else {
            self.walked.extend_from_slice(user);
        }
        Some((header, &self.walked))
    }
}
