//! What one look at the rings brought. Pure. Filled by `ebpf.rs` or `perf.rs`, emptied by
//! `pipeline.rs`.

use stackwire_collector_ebpf::managed::{CodeHead, Entry, ScriptHead};
use stackwire_collector_ebpf::unwind::Cursor;
use stackwire_collector_ebpf::{PARTS, Part, SampleHeader};
use zeroize::{Zeroize, Zeroizing};

use crate::managed::List;
use crate::sources::record::Ended;
use crate::sources::side_band;

/// A sample, its frames still in the arena of its [`Batch`].
#[derive(Clone, Copy, Debug)]
pub struct RawSample {
    /// The fixed part.
    pub header: SampleHeader,
    pub(super) start: usize,
    /// Index into [`Batch::copies`] + 1; 0: its user stack has been walked.
    copy: u32,
    /// Likewise, into [`Batch::lists`]; 0: it has no frames of an interpreter.
    list: u32,
}

impl RawSample {
    /// Whether its user stack has not been walked.
    #[must_use]
    pub fn has_copy(&self) -> bool {
        self.copy != 0
    }
}

/// What names a function of an interpreter.
#[derive(Clone, Debug)]
pub struct NewCode {
    /// The process.
    pub of: SampleHeader,
    /// How long each part is.
    pub head: CodeHead,
    /// The parts.
    pub bytes: Vec<u8>,
}

/// A piece of the source of a script. It is wiped when it is dropped.
#[derive(Clone, Debug)]
pub struct NewPiece {
    /// The process.
    pub of: SampleHeader,
    /// Which piece.
    pub head: ScriptHead,
    /// The piece.
    pub bytes: Zeroizing<Vec<u8>>,
}

/// What the walk of a user stack goes on from. It is wiped when it is dropped.
#[derive(Debug, Default)]
pub struct Copy {
    /// The frame whose caller is not known.
    pub cursor: Cursor,
    /// Parts of memory: the first from its stack pointer on.
    pub parts: [Part; PARTS],
    /// These, one behind the other.
    pub bytes: Zeroizing<Vec<u8>>,
}

impl Drop for Copy {
    fn drop(&mut self) {
        self.cursor.registers.zeroize();
    }
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
    /// Functions of interpreters that these samples are the first to have.
    pub codes: Vec<NewCode>,
    /// Pieces of scripts that they are of.
    pub pieces: Vec<NewPiece>,
    /// Processes that have ended.
    pub ended: Vec<Ended>,
    pub(super) frames: Vec<u64>,
    copies: Vec<Copy>,
    lists: Vec<List>,
}

impl Batch {
    /// Adds a sample whose frames from `start` on are in the arena. `copy`: the walk of its user
    /// stack is to go on from this. `list`: its frames of an interpreter.
    pub fn push(
        &mut self,
        header: SampleHeader,
        start: usize,
        copy: Option<Copy>,
        list: Option<List>,
    ) {
        let list = list.map_or(0, |list| {
            self.lists.push(list);
            self.lists.len() as u32
        });
        let copy = copy.map_or(0, |copy| {
            self.copies.push(copy);
            self.copies.len() as u32
        });
        self.samples.push(RawSample { header, start, copy, list });
    }

    /// Takes out what the walk of a sample's user stack goes on from; None: it is over.
    pub fn take_copy(&mut self, sample: &RawSample) -> Option<Copy> {
        let index = (sample.copy as usize).checked_sub(1)?;
        self.copies.get_mut(index).map(std::mem::take)
    }

    /// Takes out frames of an interpreter.
    pub fn take_list(&mut self, sample: &RawSample) -> List {
        let index = (sample.list as usize).checked_sub(1);
        let list = index.and_then(|index| self.lists.get_mut(index));
        list.map(std::mem::take).unwrap_or_default()
    }

    /// Frames of an interpreter, the innermost first.
    #[must_use]
    pub fn list(&self, sample: &RawSample) -> &[Entry] {
        let index = (sample.list as usize).checked_sub(1);
        index.and_then(|index| self.lists.get(index)).map_or(&[], |list| &list.entries)
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
        self.samples.drain(..samples);
        if self.samples.is_empty() {
            self.frames.clear();
            self.copies.clear();
            self.lists.clear();
            return;
        }
        let (mut kept, mut copies, mut lists) = (Vec::new(), Vec::new(), Vec::new());
        for sample in &mut self.samples {
            if let Some(copy) = (sample.copy as usize).checked_sub(1) {
                copies.push(std::mem::take(&mut self.copies[copy]));
                sample.copy = copies.len() as u32;
            }
            if let Some(list) = (sample.list as usize).checked_sub(1) {
                lists.push(std::mem::take(&mut self.lists[list]));
                sample.list = lists.len() as u32;
            }
            let frames =
                usize::from(sample.header.user_frames) + usize::from(sample.header.kernel_frames);
            let start = kept.len();
            kept.extend_from_slice(&self.frames[sample.start..][..frames]);
            sample.start = start;
        }
        (self.frames, self.copies, self.lists) = (kept, copies, lists);
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
            let cursor = Cursor { ip, ..Cursor::default() };
            let bytes = Zeroizing::new(vec![ip as u8; 3]);
            let copy = Copy { cursor, bytes, ..Copy::default() };
            let entries = vec![Entry { code: ip, rest: 0 }];
            let list = (ip != 20).then(|| List { entries, ..List::default() });
            batch.push(header, start, (ip != 10).then_some(copy), list);
        }
        let first = batch.samples[0];
        assert!(batch.take_copy(&first).is_none());
        batch.advance(2, 0);
        let left = batch.samples[0];
        assert_eq!((batch.user(&left), batch.kernel(&left)), (&[30][..], &[31][..]));
        assert_eq!(batch.list(&left), [Entry { code: 30, rest: 0 }]);
        let copied = batch.take_copy(&left).unwrap();
        assert_eq!((copied.cursor.ip, &copied.bytes[..]), (30, &[30; 3][..]));
        batch.advance(1, 0);
        assert!(batch.samples.is_empty() && batch.frames.is_empty() && batch.copies.is_empty());
    }
}
