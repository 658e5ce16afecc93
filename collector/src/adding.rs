//! Records become samples and waits of the epoch: at once, or when the copy of their stack has been
//! walked. How waits are put together, `off_cpu.rs` says. Called by `pipeline.rs`.

use stackwire_collector_ebpf::{RecordKind, SampleHeader};

use crate::context::Context;
use crate::late::{Late, LateWalks, Walked};
use crate::managed::UserStack;
use crate::off_cpu::OffCpu;
use crate::perf_samples::PerfSamples;
use crate::sampler::{Batch, RawSample};
use crate::unwind::Unwind;
use crate::waits::Taken;

/// What adds records to the epoch.
#[derive(Debug)]
pub struct Adding<'a> {
    /// What they are added to.
    pub context: Context<'a>,
    /// What they are of.
    pub batch: &'a mut Batch,
    /// Samples before this, monotonic nanoseconds, do not count.
    pub begun_ns: u64,
    /// Walks on in copies of stacks.
    pub late: Option<(&'a mut LateWalks, &'a mut Unwind)>,
    /// Completes samples of perf events.
    pub perf: Option<&'a mut PerfSamples>,
    /// Knows where threads wait.
    pub off_cpu: Option<&'a mut OffCpu>,
}

impl Adding<'_> {
    /// Adds a record. False: it is a sample, of no time or process that counts.
    pub fn add(&mut self, record: &RawSample) -> bool {
        if record.header.kind == RecordKind::Sample as u8 {
            return self.add_sample(record);
        }
        self.add_wait(record);
        true
    }

    fn add_sample(&mut self, sample: &RawSample) -> bool {
        let mut header = sample.header;
        if header.time_ns < self.begun_ns || !self.context.processes.counts(&header) {
            return false;
        }
        if let Some(perf) = &mut self.perf {
            perf.complete(&mut header, self.context.processes);
        }
        if self.walks_later(&header, sample) {
            return true;
        }
        let (user, kernel) = (self.batch.user(sample), self.batch.kernel(sample));
        let list = self.batch.list(sample);
        let Context { codes, processes, layout, epoch } = &mut self.context;
        let managed = (!list.is_empty()).then_some((list, *codes));
        epoch.add(
            &header,
            UserStack { native: user, managed },
            kernel,
            Taken::ONE,
            processes,
            layout,
        );
        true
    }

    /// Learns of a stack that threads wait with, or adds a wait.
    fn add_wait(&mut self, record: &RawSample) {
        let header = &record.header;
        let counts = |it: &mut Self| it.context.processes.counts(header);
        if record.has_copy() && counts(self) && self.walks_later(header, record) {
            return;
        }
        if let Some(off_cpu) = &mut self.off_cpu {
            off_cpu.take(record, self.batch, &mut self.context);
        }
    }

    /// Whether the user stack of a sample or of a wait is walked from its copy, now or later.
    fn walks_later(&mut self, header: &SampleHeader, record: &RawSample) -> bool {
        let Self { context, batch, late, off_cpu, .. } = self;
        let copy = batch.take_copy(record);
        let (user, kernel) = (batch.user(record), batch.kernel(record));
        let (Some(copy), Some((late, unwind))) = (copy, late) else { return false };
        let (pid, start_ns) = (header.pid, header.start_boottime_ns);
        let process = context.processes.sampled(pid, start_ns, header.cgroup_id);
        if header.host_pid != 0 {
            process.host_pid = header.host_pid;
        }
        if !late.takes(header, user, process) {
            return false;
        }
        let (user, kernel, process) = (user.to_vec(), kernel.to_vec(), process.clone());
        let list = batch.take_list(record);
        if header.kind == RecordKind::Stack as u8
            && let Some(off_cpu) = off_cpu
        {
            off_cpu.expect(header);
        }
        let it = Late { header: *header, user, kernel, list, copy, process };
        late.take(it, unwind, &mut |it, user| add_walked(it, user, off_cpu, context));
        true
    }

    /// Adds the samples that need wait no more for their tables.
    pub fn walk_on(&mut self, look: fn(&mut LateWalks, &mut Unwind, Walked<'_>)) {
        let Self { context, late, off_cpu, .. } = self;
        if let Some((late, unwind)) = late {
            look(late, unwind, &mut |it, user| add_walked(it, user, off_cpu, context));
        }
    }
}

/// Adds a sample whose user stack has been walked, or the waits with that stack.
fn add_walked(
    it: &Late,
    user: &[u64],
    off_cpu: &mut Option<&mut OffCpu>,
    context: &mut Context<'_>,
) {
    match off_cpu {
        Some(off_cpu) if it.header.kind == RecordKind::Stack as u8 => {
            off_cpu.learn_late(it, user, context);
        }
        _ => {
            let Context { codes, processes, layout, epoch } = context;
            epoch.add_late(it, user, codes, processes, layout);
        }
    }
}
