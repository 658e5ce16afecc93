//! What records of perf events say: samples go into the batch, to be walked or as the kernel walked
//! them, changes go beside them, and losses are counted. Called by `perf.rs`, which reads the
//! rings.

use std::collections::HashMap;

use stackwire_collector_ebpf::arch::RSP;
use stackwire_collector_ebpf::unwind::Cursor;
use stackwire_collector_ebpf::{
    KernelEnd, MAX_KERNEL_FRAMES, MAX_USER_FRAMES, Part, SampleHeader, UserEnd,
};
use zeroize::Zeroizing;

use super::drained::{Batch, Copy};
use crate::host::pid_namespace;
use crate::sources::perf_event::{Contents, PerfEvent};
use crate::sources::perf_sample::{PerfSample, Registers, SAMPLE};
use crate::sources::side_band::{self, Change, without_id};

/// What came out of the rings so far.
#[derive(Debug, Default)]
pub struct Seen {
    /// Records of samples.
    samples: u64,
    /// Samples that were lost, as the rings tell it.
    lost: u64,
    /// Likewise, as events tell it that were closed.
    lost_by_events: u64,
    /// Samples of processes outside this pid namespace.
    outside: u64,
    /// This is the first pid namespace, outside which there are none.
    is_first_namespace: bool,
}

/// What is known of an event by its number.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// In `kinds`.
    pub number: u8,
    /// Of its samples.
    pub contents: Contents,
}

impl Seen {
    /// Before the first record.
    pub fn nothing_yet() -> Self {
        Self { is_first_namespace: pid_namespace().is_none(), ..Self::default() }
    }

    /// Samples that were taken, and those lost.
    pub fn taken(&self) -> u64 {
        self.samples + self.lost()
    }

    /// Samples that were lost.
    pub fn lost(&self) -> u64 {
        self.lost.max(self.lost_by_events)
    }

    /// Samples of processes outside this pid namespace.
    pub fn outside(&self) -> u64 {
        self.outside
    }

    /// Stops these events, each once, and asks them for what they have lost.
    pub fn end<'a>(&mut self, events: impl Iterator<Item = &'a mut PerfEvent>) {
        for event in events {
            // Fails only for events of a CPU that went offline, which take no samples.
            let _ = event.disable();
            self.lost_by_events += event.lost().unwrap_or(0);
        }
    }

    /// Takes a record, header first.
    pub fn take(&mut self, record: &[u8], by_id: &HashMap<u64, Place>, batch: &mut Batch) {
        if record.first_chunk() != Some(&SAMPLE.to_ne_bytes()) {
            let event = side_band::decode(without_id(record));
            batch.events.extend(event.map(|mut event| {
                if let Change::Lost(count) = &mut event.change {
                    // Which of them were samples nobody can tell; nearly all are.
                    self.lost += std::mem::take(count);
                }
                event
            }));
            return;
        }
        let place = PerfSample::event_id(record).and_then(|id| by_id.get(&id));
        let Some(Place { number, contents }) = place else {
            self.samples += 1;
            batch.malformed += 1;
            return;
        };
        match PerfSample::decode(record, contents) {
            // As the kernel numbers those that this namespace does not have
            // (perf_event_pid_type of kernel/events/core.c).
            Ok(sample) if sample.pid == 0 && self.is_first_namespace => {
                // What a CPU does that has nothing to do. With eBPF it is no sample, too.
            }
            Ok(sample) if matches!(sample.pid, 0 | u32::MAX) => {
                self.samples += 1;
                self.outside += 1;
            }
            Ok(sample) => {
                self.samples += 1;
                add(&sample, record, *number, batch);
            }
            Err(_) => {
                self.samples += 1;
                batch.malformed += 1;
            }
        }
    }
}

/// Adds a sample to those that are to be walked, or that the kernel has walked.
fn add(sample: &PerfSample<'_>, record: &[u8], event: u8, batch: &mut Batch) {
    let start = batch.frames.len();
    batch.frames.extend(sample.user().take(if sample.compat { 1 } else { MAX_USER_FRAMES }));
    let user_frames = batch.frames.len() - start;
    batch.frames.extend(sample.kernel().take(MAX_KERNEL_FRAMES));
    let kernel_frames = batch.frames.len() - start - user_frames;
    let user_end = match user_frames {
        _ if sample.compat => UserEnd::Compat,
        0 => UserEnd::NoUserStack,
        _ => UserEnd::NotSaid,
    };
    let kernel_end = match kernel_frames {
        0 => KernelEnd::None,
        MAX_KERNEL_FRAMES => KernelEnd::DepthLimit,
        _ => KernelEnd::Complete,
    };
    let header = SampleHeader {
        time_ns: sample.time_ns,
        period: sample.period,
        cgroup_id: sample.cgroup_id,
        pid: sample.pid,
        tid: sample.tid,
        cpu: sample.cpu,
        user_frames: user_frames as u16,
        kernel_frames: kernel_frames as u16,
        user_end: user_end as u8,
        kernel_end: kernel_end as u8,
        event,
        ..SampleHeader::default()
    };
    let copy = sample.registers.map(|Registers { by_number, ip }| {
        let cursor = Cursor { registers: by_number, ip, known: 0xffff, exact: 1, ..<_>::default() };
        let bytes = Zeroizing::new(record[sample.stack.clone()].to_vec());
        let parts = Part::alone(by_number[RSP as usize], bytes.len());
        Copy { cursor, parts, bytes }
    });
    batch.push(header, start, copy, None);
}
