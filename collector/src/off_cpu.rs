//! Where threads wait: adds waits to the epoch as they end, and at the end those that go on. How a
//! record and its stacks become a wait, `waits.rs` says. Called by `pipeline.rs`.

use stackwire_collector_ebpf::RecordKind;

use crate::batch::Epoch;
use crate::host::kallsyms::KernelLayout;
use crate::managed::Codes;
use crate::process::Processes;
use crate::sampler::{Batch, RawSample, Sampler};
use crate::waits::{Over, Stacks, Waits};

/// What is known of waits.
#[derive(Debug)]
pub struct OffCpu {
    waits: Waits,
    /// Parts of waits that were not over.
    going_on: u64,
    /// Taken, and of no process that counts.
    uncounted: u64,
}

impl OffCpu {
    /// Knows of none. `event` is the place of the series of blocked time; behind it is that of
    /// runnable time.
    #[must_use]
    pub fn new(event: u8) -> Self {
        Self { waits: Waits::new(event), going_on: 0, uncounted: 0 }
    }

    /// Parts of waits that were added though they are not over.
    #[must_use]
    pub fn going_on(&self) -> u64 {
        self.going_on
    }

    /// Parts of waits that the kernel side counted and that are of no process that counts.
    #[must_use]
    pub fn uncounted(&self) -> u64 {
        self.uncounted
    }

    /// Waits whose stacks did not come.
    #[must_use]
    pub fn without_stacks(&self) -> u64 {
        self.waits.without_stacks()
    }

    /// Whether so much was learned in this epoch that it is to end early.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.waits.is_full()
    }

    /// Learns of a stack, or adds a wait that is over.
    pub fn take(
        &mut self,
        record: &RawSample,
        batch: &Batch,
        codes: &Codes,
        processes: &mut Processes,
        layout: &KernelLayout,
        epoch: &mut Epoch,
    ) {
        let (header, user) = (&record.header, batch.user(record));
        if header.kind == RecordKind::Stack as u8 {
            let (list, kernel) = (batch.list(record), batch.kernel(record));
            self.waits.learn(header, Stacks { user, list, kernel });
            return;
        }
        let Some(mut over) = self.waits.over(header, user) else { return };
        if !processes.counts(header) {
            let parts = over.parts.iter().map(|part| u64::from(part.taken.count));
            self.uncounted += parts.sum::<u64>();
            return;
        }
        // Of another process's thread there is its name alone.
        if let Some(waker) = &mut over.waker
            && waker.header.start_boottime_ns != 0
            && !processes.counts(&waker.header)
        {
            waker.header.start_boottime_ns = 0;
        }
        epoch.add_wait(&over, codes, processes, layout);
    }

    /// Adds the waits that are not over, up to when watching ended.
    pub fn add_going_on(
        &mut self,
        sampler: &mut dyn Sampler,
        codes: &Codes,
        processes: &mut Processes,
        layout: &KernelLayout,
        epoch: &mut Epoch,
        end_ns: u64,
    ) {
        for (tid, mut waiting) in sampler.waiting() {
            if waiting.start_boottime_ns == 0 {
                let process = processes.get(waiting.pid);
                waiting.start_boottime_ns = process.map_or(0, |process| process.start_ns);
            }
            let (parts, stacks) = self.waits.going_on(tid, &waiting, end_ns);
            if !parts.first().is_some_and(|part| processes.counts(&part.header)) {
                continue;
            }
            self.going_on += parts.len() as u64;
            epoch.add_wait(&Over { parts, stacks, waker: None }, codes, processes, layout);
        }
    }

    /// Begins the next epoch: forgets stacks that nobody refers to, when there are too many.
    pub fn end_epoch(&mut self, sampler: &dyn Sampler) {
        self.waits.end_epoch(|place, number| sampler.forget(place, number), || sampler.waiting());
    }
}
