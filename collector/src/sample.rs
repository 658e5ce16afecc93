//! Ring-buffer records: bytes in, header and frames out. The only decoder of the eBPF ABI. Pure.
//!
//! Called by `sampler/mod.rs` for every record.

use stackwire_collector_ebpf::{MAX_KERNEL_FRAMES, MAX_USER_FRAMES, SampleHeader};

/// A record that is not what the eBPF side writes.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("ring record of {length} bytes does not hold what its header says")]
pub struct MalformedRecord {
    /// Bytes of the record.
    pub length: usize,
}

const HEADER: usize = size_of::<SampleHeader>();

/// Decodes a record; appends its user frames, then its kernel frames to `frames`.
///
/// # Errors
/// When the lengths do not add up; `frames` is left as it was.
pub fn decode(record: &[u8], frames: &mut Vec<u64>) -> Result<SampleHeader, MalformedRecord> {
    let malformed = MalformedRecord { length: record.len() };
    let Some((head, tail)) = record.split_at_checked(HEADER) else { return Err(malformed) };
    let header = SampleHeader {
        time_ns: u64_at(head, 0),
        start_boottime_ns: u64_at(head, 8),
        cgroup_id: u64_at(head, 16),
        period: u64_at(head, 24),
        pid: u32_at(head, 32),
        tid: u32_at(head, 36),
        cpu: u32_at(head, 40),
        user_frames: u16::from_ne_bytes([head[44], head[45]]),
        kernel_frames: u16::from_ne_bytes([head[46], head[47]]),
        user_end: head[48],
        kernel_end: head[49],
        event: head[50],
        reserved: [0; 5],
        comm: std::array::from_fn(|index| head[56 + index]),
    };
    let (user, kernel) = (usize::from(header.user_frames), usize::from(header.kernel_frames));
    if user > MAX_USER_FRAMES || kernel > MAX_KERNEL_FRAMES || tail.len() < (user + kernel) * 8 {
        return Err(malformed);
    }
    // The ring rounds lengths up to 8, so there is no tail beyond the frames worth a complaint.
    frames.extend(tail.chunks_exact(8).take(user + kernel).map(|frame| u64_at(frame, 0)));
    Ok(header)
}

/// A thread's name as text.
#[must_use]
pub fn comm_text(comm: &[u8; 16]) -> String {
    let end = comm.iter().position(|&byte| byte == 0).unwrap_or(comm.len());
    String::from_utf8_lossy(&comm[..end]).into_owned()
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(std::array::from_fn(|index| bytes[at + index]))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(std::array::from_fn(|index| bytes[at + index]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn decodes_what_the_kernel_side_writes() {
        let mut record = vec![0; HEADER];
        record[..8].copy_from_slice(&5u64.to_ne_bytes());
        record[32..36].copy_from_slice(&77u32.to_ne_bytes());
        record[44] = 2;
        record[46] = 1;
        record[56..60].copy_from_slice(b"node");
        for frame in [1u64, 2, 3] {
            record.extend(frame.to_ne_bytes());
        }
        let mut frames = vec![9];
        let header = decode(&record, &mut frames).unwrap();
        assert_eq!((header.time_ns, header.pid, frames), (5, 77, vec![9, 1, 2, 3]));
        assert_eq!(comm_text(&header.comm), "node");
        assert!(decode(&record[..record.len() - 8], &mut Vec::new()).is_err());
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
