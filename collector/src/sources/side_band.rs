//! perf side-band records: bytes in, [`Event`] out. Pure.
//!
//! Formats: `enum perf_event_type` in include/uapi/linux/perf_event.h. The ids behind every record
//! are those `perf_event.rs` asks for: TID, TIME, CPU. Called by `sampler/mod.rs`.

use stackwire_model::{BuildId, Device, ExecutableKey, FileId, FileOffset, UserAddr};

/// A change of some process, at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub time_ns: u64,
    /// Process it happened to.
    pub pid: u32,
    /// What happened.
    pub change: Change,
}

/// What the kernel tells about processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Executable memory was mapped.
    Map(Mapped),
    /// A thread got a name.
    Comm {
        /// The thread.
        tid: u32,
        /// Its name.
        comm: String,
        /// The name comes from an exec: the process has a new program image.
        exec: bool,
    },
    /// The process was forked off `parent` (threads are not reported).
    Fork {
        /// Process it was forked from.
        parent: u32,
    },
    /// A thread ended.
    Exit {
        /// The thread.
        tid: u32,
    },
    /// The kernel had no room for this many records.
    Lost(u64),
    /// Sampling was throttled.
    Throttle,
}

/// An executable mapping as the kernel reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mapped {
    /// First address.
    pub start: UserAddr,
    /// Bytes.
    pub length: u64,
    /// Offset in the file of the first address.
    pub file_offset: FileOffset,
    /// Path as the process has it, or `//anon`, `[vdso]` and the like.
    pub path: String,
    /// By what its file is known, if it is of one. A record tells the build-id or the inode, never
    /// both.
    pub key: Option<ExecutableKey>,
    /// Its build-id is too short to tell it from others, and the record has no inode.
    pub is_ambiguous: bool,
}

impl Mapped {
    /// First address behind it.
    #[must_use]
    pub fn end(&self) -> UserAddr {
        self.start.saturating_add(self.length)
    }

    /// Its path without the kernel's remark that the file has been deleted since.
    #[must_use]
    pub fn path_when_mapped(&self) -> &str {
        self.path.strip_suffix(" (deleted)").unwrap_or(&self.path)
    }

    /// Whether it is of a file that has code, and not of memory.
    #[must_use]
    pub fn is_of_file(&self) -> bool {
        self.path.starts_with('/')
            && !self.path.starts_with("//anon")
            && !self.path.starts_with("/dev/zero")
            // .NET maps what it compiles twice, to have it writable elsewhere.
            && !self.path.starts_with("/memfd:doublemapper")
    }
}

const MMAP2: u32 = 10;
const LOST: u32 = 2;
const COMM: u32 = 3;
const EXIT: u32 = 4;
const THROTTLE: u32 = 5;
const FORK: u32 = 7;
const MISC_COMM_EXEC: u16 = 1 << 13;
const MISC_MMAP_BUILD_ID: u16 = 1 << 14;
/// pid, tid, time, cpu, reserved.
const ID_BYTES: usize = 24;

/// Decodes one record, header included; `None` for a kind of no interest or one that is cut.
#[must_use]
pub fn decode(record: &[u8]) -> Option<Event> {
    let kind = u32_at(record, 0)?;
    let misc = u16_at(record, 4)?;
    let ids = record.len().checked_sub(ID_BYTES).filter(|&at| at >= 8)?;
    let time_ns = u64_at(record, ids + 8)?;
    let body = &record[8..ids];
    let pid = u32_at(body, 0)?;
    let change = match kind {
        MMAP2 => Change::Map(mapped(body, misc & MISC_MMAP_BUILD_ID != 0)?),
        COMM => Change::Comm {
            tid: u32_at(body, 4)?,
            comm: text(body.get(8..)?),
            exec: misc & MISC_COMM_EXEC != 0,
        },
        FORK => {
            let parent = u32_at(body, 4)?;
            if parent == pid {
                return None; // a new thread
            }
            Change::Fork { parent }
        }
        EXIT => Change::Exit { tid: u32_at(body, 8)? },
        LOST => Change::Lost(u64_at(body, 8)?),
        THROTTLE => Change::Throttle,
        _ => return None,
    };
    let of_process = !matches!(change, Change::Lost(_) | Change::Throttle);
    // So the kernel numbers those outside the pid namespace (perf_event_pid_type of
    // kernel/events/core.c).
    if of_process && matches!(pid, 0 | u32::MAX) {
        return None;
    }
    Some(Event { time_ns, pid, change })
}

/// A thread or process that was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forked {
    /// Its first thread.
    pub tid: u32,
    /// The thread that started it.
    pub by: u32,
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub time_ns: u64,
}

/// Reads a record of a fork, header included, threads among them; `None` for any other.
#[must_use]
pub fn forked(record: &[u8]) -> Option<Forked> {
    if u32_at(record, 0)? != FORK {
        return None;
    }
    // pid, ppid, tid, ptid, time.
    Some(Forked { tid: u32_at(record, 16)?, by: u32_at(record, 20)?, time_ns: u64_at(record, 24)? })
}

/// A record without the number of its event, which `PERF_SAMPLE_IDENTIFIER` puts behind it.
#[must_use]
pub fn without_id(record: &[u8]) -> &[u8] {
    &record[..record.len().saturating_sub(8)]
}

fn mapped(body: &[u8], has_build_id: bool) -> Option<Mapped> {
    let mut mapped = Mapped {
        start: UserAddr(u64_at(body, 8)?),
        length: u64_at(body, 16)?,
        file_offset: FileOffset(u64_at(body, 24)?),
        path: text(body.get(64..)?),
        ..Mapped::default()
    };
    if has_build_id {
        let length = usize::from(*body.get(32)?).min(20);
        mapped.key = ExecutableKey::of(BuildId::new(body.get(36..36 + length)?), None);
        mapped.is_ambiguous = mapped.key.is_none();
    } else {
        let device = Device { major: u32_at(body, 32)?, minor: u32_at(body, 36)? };
        mapped.key = ExecutableKey::of(None, FileId::new(u64_at(body, 40)?, device));
    }
    Some(mapped)
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8)?.try_into().ok().map(u64::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(kind: u32, misc: u16, body: &[&[u8]], time: u64) -> Vec<u8> {
        let body = body.concat();
        let size = (8 + body.len() + ID_BYTES) as u16;
        let mut record = Vec::new();
        record.extend(kind.to_ne_bytes());
        record.extend(misc.to_ne_bytes());
        record.extend(size.to_ne_bytes());
        record.extend(body);
        record.extend(7u64.to_ne_bytes());
        record.extend(time.to_ne_bytes());
        record.extend(0u64.to_ne_bytes());
        record
    }

    fn two(first: u32, second: u32) -> Vec<u8> {
        [first.to_ne_bytes(), second.to_ne_bytes()].concat()
    }

    #[test]
    fn decodes_a_mapping_with_a_build_id() {
        let numbers: Vec<u8> =
            [0x1000u64, 0x2000, 0x3000].iter().flat_map(|n| n.to_ne_bytes()).collect();
        // One of two bytes is the same for too many.
        for (length, key) in [(20, BuildId::new(&[0xab; 20]).map(Into::into)), (2, None)] {
            let mut id = vec![length, 0, 0, 0];
            id.extend([0xab; 20]);
            let bytes = record(
                MMAP2,
                MISC_MMAP_BUILD_ID,
                &[&two(5, 6), &numbers, &id, &two(5, 2), b"/bin/x\0\0"],
                99,
            );
            let expected = Mapped {
                start: UserAddr(0x1000),
                length: 0x2000,
                file_offset: FileOffset(0x3000),
                path: "/bin/x".into(),
                key,
                is_ambiguous: key.is_none(),
            };
            assert_eq!(
                decode(&bytes),
                Some(Event { time_ns: 99, pid: 5, change: Change::Map(expected) })
            );
        }
    }

    #[test]
    fn tells_exec_from_a_renamed_thread_and_a_process_from_a_thread() {
        let exec = record(COMM, MISC_COMM_EXEC, &[&two(5, 5), b"sh\0\0\0\0\0\0"], 1);
        assert_eq!(
            decode(&exec).map(|event| event.change),
            Some(Change::Comm { tid: 5, comm: "sh".into(), exec: true })
        );
        let child = record(FORK, 0, &[&two(8, 5), &two(8, 5), &[0; 8]], 1);
        assert_eq!(decode(&child).map(|event| event.change), Some(Change::Fork { parent: 5 }));
        let thread = record(FORK, 0, &[&two(5, 5), &two(9, 5), &7u64.to_ne_bytes()], 1);
        assert_eq!(decode(&thread), None);
        assert_eq!(forked(&thread), Some(Forked { tid: 9, by: 5, time_ns: 7 }));
        assert_eq!(forked(&exec), None);
    }

    #[test]
    fn of_what_is_outside_the_namespace_nothing_is_told_but_losses() {
        for pid in [0, u32::MAX] {
            let exec = record(COMM, MISC_COMM_EXEC, &[&two(pid, pid), b"sh\0\0\0\0\0\0"], 1);
            assert_eq!(decode(&exec), None);
            let lost = record(LOST, 0, &[&two(pid, 0), &5u64.to_ne_bytes()], 1);
            assert_eq!(decode(&lost).map(|event| event.change), Some(Change::Lost(5)));
        }
    }

    proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0u32..12) {
            let _ = decode(&bytes);
            let _ = decode(&record(kind, 1 << 14, &[&bytes], 0));
        }
    }
}
