//! Ring-buffer records: bytes in, header and frames out. The only decoder of the eBPF ABI. Pure.
//!
//! Called by `sampler/mod.rs` for every record.

use stackwire_collector_ebpf::managed::{
    CodeHead, Entry, Evaluator, ListEnd, ManagedHead, ScriptHead,
};
use stackwire_collector_ebpf::{
    CopyHead, MAX_KERNEL_FRAMES, MAX_USER_FRAMES, RecordKind, SampleHeader,
};
use zerocopy::FromBytes;

/// A record that is not what the eBPF side writes.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("ring record of {length} bytes does not hold what its header says")]
pub struct MalformedRecord {
    /// Bytes of the record.
    pub length: usize,
}

/// What a record has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Record<'a> {
    /// A sample, a stack or a wait, whose words were appended.
    Framed(SampleHeader),
    /// A part of a stack that is to be walked on, of the sample with this time and CPU.
    Copy {
        /// Head of the sample: its time and its CPU.
        of: SampleHeader,
        /// The frame whose caller is not known, and which parts of memory there are.
        head: CopyHead,
        /// These, one behind the other.
        bytes: &'a [u8],
    },
    /// Frames of an interpreter, of the sample or the stack with this time and CPU.
    Managed {
        /// Head of either: its time and its CPU.
        of: SampleHeader,
        /// The innermost first.
        entries: &'a [Entry],
        /// Where evaluators are known by their code.
        evaluator: Evaluator,
    },
    /// What names a function of an interpreter.
    Code {
        /// Head: the process.
        of: SampleHeader,
        /// How long each part is.
        head: CodeHead,
        /// The parts.
        bytes: &'a [u8],
    },
    /// A piece of the source of a script.
    Script {
        /// Head: the process.
        of: SampleHeader,
        /// Which piece.
        head: ScriptHead,
        /// The piece.
        bytes: &'a [u8],
    },
    /// A process that has ended.
    Ended(Ended),
}

/// What the kernel side tells of a process that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// When it was told, monotonic nanoseconds.
    pub time_ns: u64,
    /// Process id in the initial pid namespace.
    pub host_pid: u32,
    /// Its start, `CLOCK_BOOTTIME` nanoseconds.
    pub start_boottime_ns: u64,
    /// CPU time that all its threads used, nanoseconds.
    pub cpu_ns: u64,
}

/// Decodes a record; appends its user frames, then its kernel frames to `frames`.
///
/// # Errors
/// When the lengths do not add up; `frames` is left as it was.
pub fn decode<'a>(record: &'a [u8], frames: &mut Vec<u64>) -> Result<Record<'a>, MalformedRecord> {
    let malformed = MalformedRecord { length: record.len() };
    let Ok((header, tail)) = SampleHeader::read_from_prefix(record) else { return Err(malformed) };
    if header.kind == RecordKind::Copy as u8 {
        let Ok((head, tail)) = CopyHead::read_from_prefix(tail) else { return Err(malformed) };
        let length = head.parts.iter().try_fold(0u64, |sum, part| sum.checked_add(part.bytes));
        let length = length.and_then(|length| usize::try_from(length).ok());
        let bytes = length.and_then(|length| tail.get(..length));
        return bytes.map(|bytes| Record::Copy { of: header, head, bytes }).ok_or(malformed);
    }
    if header.kind == RecordKind::Managed as u8 {
        let Ok((head, tail)) = ManagedHead::read_from_prefix(tail) else { return Err(malformed) };
        let bytes = (head.entries as usize).checked_mul(size_of::<Entry>());
        let entries = bytes.and_then(|bytes| tail.get(..bytes));
        let entries = entries.and_then(|bytes| <[Entry]>::ref_from_bytes(bytes).ok());
        // Which frames are whose is not known then.
        let is_changing = head.end == ListEnd::Changing as u32;
        let entries = entries.map(|entries| if is_changing { &[] } else { entries });
        let evaluator = head.evaluator;
        let managed = entries.map(|entries| Record::Managed { of: header, entries, evaluator });
        return managed.ok_or(malformed);
    }
    if header.kind == RecordKind::Code as u8 {
        let Ok((head, bytes)) = CodeHead::read_from_prefix(tail) else { return Err(malformed) };
        return Ok(Record::Code { of: header, head, bytes });
    }
    if header.kind == RecordKind::Script as u8 {
        let Ok((head, bytes)) = ScriptHead::read_from_prefix(tail) else { return Err(malformed) };
        return Ok(Record::Script { of: header, head, bytes });
    }
    if header.kind == RecordKind::Ended as u8 {
        let SampleHeader { time_ns, host_pid, start_boottime_ns, period: cpu_ns, .. } = header;
        return Ok(Record::Ended(Ended { time_ns, host_pid, start_boottime_ns, cpu_ns }));
    }
    let (user, kernel) = (usize::from(header.user_frames), usize::from(header.kernel_frames));
    if user > MAX_USER_FRAMES || kernel > MAX_KERNEL_FRAMES || tail.len() < (user + kernel) * 8 {
        return Err(malformed);
    }
    // The ring rounds lengths up to 8, so there is no tail beyond the frames worth a complaint.
    let (tail, _rounded) = tail.as_chunks();
    frames.extend(tail[..user + kernel].iter().map(|frame| u64::from_ne_bytes(*frame)));
    Ok(Record::Framed(header))
}

/// A thread's name as text.
#[must_use]
pub fn comm_text(comm: &[u8; 16]) -> String {
    let end = comm.iter().position(|&byte| byte == 0).unwrap_or(comm.len());
    String::from_utf8_lossy(&comm[..end]).into_owned()
}

/// A name as the kernel has it: cut, and NUL-padded.
#[must_use]
pub fn comm_bytes(name: &[u8]) -> [u8; 16] {
    let mut comm = [0; 16];
    let length = name.len().min(comm.len() - 1);
    comm[..length].copy_from_slice(&name[..length]);
    comm
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEADER: usize = size_of::<SampleHeader>();

    #[test]
    fn decodes_what_the_kernel_side_writes() {
        let mut record = vec![0; HEADER];
        record[..8].copy_from_slice(&5u64.to_ne_bytes());
        record[32..36].copy_from_slice(&77u32.to_ne_bytes());
        record[48] = 2;
        record[50] = 1;
        record[64..68].copy_from_slice(b"node");
        for frame in [1u64, 2, 3] {
            record.extend(frame.to_ne_bytes());
        }
        let mut frames = vec![9];
        let Record::Framed(header) = decode(&record, &mut frames).unwrap() else { panic!() };
        assert_eq!((header.time_ns, header.pid, frames), (5, 77, vec![9, 1, 2, 3]));
        assert_eq!(comm_text(&header.comm), "node");
        assert!(decode(&record[..record.len() - 8], &mut Vec::new()).is_err());
    }

    #[test]
    fn a_copied_stack_is_as_long_as_it_says() {
        let mut record = vec![0; HEADER + size_of::<CopyHead>()];
        record[..8].copy_from_slice(&5u64.to_ne_bytes());
        record[55] = RecordKind::Copy as u8;
        // Of the last part and of the one before.
        let length = record.len() - 8;
        record[length..].copy_from_slice(&1u64.to_ne_bytes());
        record[length - 16..][..8].copy_from_slice(&2u64.to_ne_bytes());
        assert!(decode(&record, &mut Vec::new()).is_err());
        record.extend([1, 2, 3, 4]);
        let Record::Copy { of, bytes, .. } = decode(&record, &mut Vec::new()).unwrap() else {
            panic!()
        };
        assert_eq!((of.time_ns, bytes), (5, &[1, 2, 3][..]));
        record[length..][..8].copy_from_slice(&u64::MAX.to_ne_bytes());
        assert!(decode(&record, &mut Vec::new()).is_err());
    }

    proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut frames = Vec::new();
            if decode(&bytes, &mut frames).is_err() {
                prop_assert!(frames.is_empty());
            }
        }
    }
}
