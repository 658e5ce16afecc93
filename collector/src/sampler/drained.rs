//! What one look at the rings brought. Pure. Filled by `ebpf.rs` or `perf.rs`, emptied by
//! `pipeline.rs`.

use std::ops::Range;

use stackwire_collector_ebpf::SampleHeader;

use crate::sources::perf_sample::Registers;
use crate::sources::side_band;

/// A sample, its frames still in the arena of its [`Batch`].
#[derive(Clone, Copy, Debug)]
pub struct RawSample {
    /// The fixed part.
    pub header: SampleHeader,
    pub(super) start: usize,
    /// Index into [`Batch::copies`] + 1; 0: its user stack has been walked.
    copy: u32,
}

/// What a user stack is to be walked from.
#[derive(Clone, Debug)]
pub struct Copy {
    /// Registers of user mode.
    pub registers: Registers,
    /// Where memory from the stack pointer on is, in the bytes of the [`Batch`].
    pub stack: Range<usize>,
}

/// The same, to look at.
#[derive(Clone, Copy, Debug)]
pub struct Copied<'a> {
    /// Registers of user mode.
    pub registers: &'a Registers,
    /// Memory from the stack pointer on.
    pub stack: &'a [u8],
}

/// What one drain brought, samples and events each in time order.
#[derive(Debug, Default)]
pub struct Batch {
    /// Samples not yet taken by [`Batch::advance`].
    pub samples: Vec<RawSample>,
    /// Side-band events.
    pub events: Vec<side_band::Event>,
    /// Ring records that did not decode.
    pub malformed: u64,
    pub(super) frames: Vec<u64>,
    copies: Vec<Copy>,
    /// Records with copied stacks.
    pub(super) bytes: Vec<u8>,
}

impl Batch {
    /// Adds a sample whose frames from `start` on are in the arena. `copy`: its user stack is still
    /// to be walked, from this; its frames are those the kernel found by frame pointers.
    pub fn push(&mut self, header: SampleHeader, start: usize, copy: Option<Copy>) {
        let copy = copy.map_or(0, |copy| {
            self.copies.push(copy);
            self.copies.len() as u32
        });
        self.samples.push(RawSample { header, start, copy });
    }

    /// What the user stack of a sample is to be walked from; None: it has been walked.
    #[must_use]
    pub fn copied(&self, sample: &RawSample) -> Option<Copied<'_>> {
        let copy = self.copies.get((sample.copy as usize).checked_sub(1)?)?;
        Some(Copied { registers: &copy.registers, stack: self.bytes.get(copy.stack.clone())? })
    }

    /// Bytes of records with copied stacks.
    #[must_use]
    pub fn copied_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// User frames of a sample, leaf first.
    #[must_use]
    pub fn user(&self, sample: &RawSample) -> &[u64] {
        &self.frames[sample.start..][..usize::from(sample.header.user_frames)]
    }

    /// Kernel frames of a sample, leaf first.
    #[must_use]
    pub fn kernel(&self, sample: &RawSample) -> &[u64] {
        let start = sample.start + usize::from(sample.header.user_frames);
        &self.frames[start..][..usize::from(sample.header.kernel_frames)]
    }

    /// Forgets the first `samples` samples and `events` events; keeps the rest for the next drain.
    pub fn advance(&mut self, samples: usize, events: usize) {
        self.events.drain(..events);
        if samples == self.samples.len() {
            self.samples.clear();
            self.frames.clear();
            self.copies.clear();
            self.bytes.clear();
            return;
        }
        self.samples.drain(..samples);
        let mut kept = Vec::new();
        let (mut copies, mut bytes) = (Vec::new(), Vec::new());
        for sample in &mut self.samples {
            if let Some(copy) = (sample.copy as usize).checked_sub(1) {
                let Copy { registers, stack } = self.copies[copy].clone();
                let first = bytes.len();
                bytes.extend_from_slice(&self.bytes[stack]);
                copies.push(Copy { registers, stack: first..bytes.len() });
                sample.copy = copies.len() as u32;
            }
            let frames =
                usize::from(sample.header.user_frames) + usize::from(sample.header.kernel_frames);
            let start = kept.len();
            kept.extend_from_slice(&self.frames[sample.start..][..frames]);
            sample.start = start;
        }
        (self.frames, self.copies, self.bytes) = (kept, copies, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_keeps_the_frames_of_what_is_left() {
        let mut batch = Batch::default();
        for (time_ns, ip) in [(1, 10), (2, 20), (3, 30)] {
            let start = batch.frames.len();
            batch.frames.extend([ip, ip + 1]);
            let header =
                SampleHeader { time_ns, user_frames: 1, kernel_frames: 1, ..Default::default() };
            let registers = Registers { ip, ..Registers::default() };
            let stack = batch.bytes.len()..batch.bytes.len() + 3;
            batch.bytes.extend([ip as u8; 3]);
            batch.push(header, start, (ip != 10).then_some(Copy { registers, stack }));
        }
        assert!(batch.copied(&batch.samples[0]).is_none());
        batch.advance(2, 0);
        let left = batch.samples[0];
        assert_eq!((batch.user(&left), batch.kernel(&left)), (&[30][..], &[31][..]));
        let copied = batch.copied(&left).unwrap();
        assert_eq!((copied.registers.ip, copied.stack), (30, &[30; 3][..]));
        batch.advance(1, 0);
        assert!(batch.samples.is_empty() && batch.frames.is_empty() && batch.bytes.is_empty());
    }
}
