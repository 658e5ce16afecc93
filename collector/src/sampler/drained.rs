//! What one look at the rings brought. Pure. Filled by `mod.rs`, emptied by `pipeline.rs`.

use stackwire_collector_ebpf::SampleHeader;

use crate::sources::side_band;

/// A sample, its frames still in the arena of its [`Batch`].
#[derive(Clone, Copy, Debug)]
pub struct RawSample {
    /// The fixed part.
    pub header: SampleHeader,
    pub(super) start: usize,
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
}

impl Batch {
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
            return;
        }
        self.samples.drain(..samples);
        let mut kept = Vec::new();
        for sample in &mut self.samples {
            let frames =
                usize::from(sample.header.user_frames) + usize::from(sample.header.kernel_frames);
            let start = kept.len();
            kept.extend_from_slice(&self.frames[sample.start..][..frames]);
            sample.start = start;
        }
        self.frames = kept;
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
            batch.samples.push(RawSample { header, start });
        }
        batch.advance(2, 0);
        let left = batch.samples[0];
        assert_eq!((batch.user(&left), batch.kernel(&left)), (&[30][..], &[31][..]));
        batch.advance(1, 0);
        assert!(batch.samples.is_empty() && batch.frames.is_empty());
    }
}
