//! Bytes of perf.data's records, as `include/uapi/linux/perf_event.h` and perf's `event.h` lay them
//! out. Pure.

use std::io::{self, Write};

use stackwire_model::BuildId;
use stackwire_model::profile::SeriesId;

/// `PERF_RECORD_*`.
mod kind {
    pub const MMAP: u32 = 1;
    pub const LOST: u32 = 2;
    pub const COMM: u32 = 3;
    pub const EXIT: u32 = 4;
    pub const FORK: u32 = 7;
    pub const SAMPLE: u32 = 9;
    pub const MMAP2: u32 = 10;
    /// perf's own: what came before the last round is complete.
    pub const FINISHED_ROUND: u32 = 68;
}

/// `PERF_SAMPLE_IP | TID | TIME | CALLCHAIN | ID | CPU | PERIOD`.
pub const SAMPLE_TYPE: u64 = 1 | 1 << 1 | 1 << 2 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8;
/// The id of the first series, which what is no sample carries, too.
const FIRST_ID: u64 = 1;

/// The id of a series.
#[must_use]
pub fn event_id(series: SeriesId) -> u64 {
    FIRST_ID + u64::from(series.0)
}

/// `PERF_RECORD_MISC_CPUMODE_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Kernel.
    Kernel = 1,
    /// User.
    User = 2,
}

/// `PERF_RECORD_MISC_COMM_EXEC`.
const COMM_EXEC: u16 = 1 << 13;
/// `PERF_RECORD_MISC_MMAP_BUILD_ID`: a build-id where inode and device would be.
const MMAP_BUILD_ID: u16 = 1 << 14;
/// `PERF_CONTEXT_KERNEL` and `PERF_CONTEXT_USER` in call chains.
const CONTEXT_KERNEL: u64 = -128i64 as u64;
const CONTEXT_USER: u64 = -512i64 as u64;
/// 64-bit words, little-endian.
pub(super) fn words<const N: usize>(out: &mut Vec<u8>, words: [u64; N]) {
    for word in words {
        out.extend(word.to_le_bytes());
    }
}

/// Frames of one sample: a record's size has 16 bits.
pub const MAX_FRAMES: usize = 8000;

/// Who, when and where: the trailer of records that are not samples (`sample_id_all`).
#[derive(Clone, Copy, Debug, Default)]
pub struct At {
    /// Process.
    pub pid: u32,
    /// Thread.
    pub tid: u32,
    /// On the clock of samples, nanoseconds.
    pub time: u64,
    /// CPU.
    pub cpu: u32,
}

/// A mapping.
#[derive(Clone, Copy, Debug)]
pub struct Map<'a> {
    /// First address.
    pub start: u64,
    /// Bytes.
    pub length: u64,
    /// File offset of the first address.
    pub file_offset: u64,
    /// Build-id, if known: perf has room for 20 bytes of it.
    pub build_id: Option<BuildId>,
    /// Path.
    pub path: &'a str,
}

/// Writes records one after the other.
#[derive(Debug)]
pub struct Records<W> {
    out: W,
    record: Vec<u8>,
    /// Bytes written.
    pub bytes: u64,
}

impl<W: Write> Records<W> {
    /// Writes to `out`.
    pub fn new(out: W) -> Self {
        Self { out, record: Vec::new(), bytes: 0 }
    }

    /// The thread has this name; `exec`: by becoming another program.
    pub fn comm(&mut self, at: At, comm: &str, exec: bool) -> io::Result<()> {
        self.begin();
        self.words([at.pid, at.tid]);
        self.text(comm);
        self.trailer(at);
        self.end(kind::COMM, Mode::User as u16 | if exec { COMM_EXEC } else { 0 })
    }

    /// A process was made by another.
    pub fn fork(&mut self, at: At, parent: u32) -> io::Result<()> {
        self.task(kind::FORK, at, parent)
    }

    /// A process ended.
    pub fn exit(&mut self, at: At, parent: u32) -> io::Result<()> {
        self.task(kind::EXIT, at, parent)
    }

    fn task(&mut self, kind: u32, at: At, parent: u32) -> io::Result<()> {
        self.begin();
        self.words([at.pid, parent, at.tid, parent]);
        self.record.extend(at.time.to_le_bytes());
        self.trailer(at);
        self.end(kind, Mode::User as u16)
    }

    /// A process has mapped executable memory.
    pub fn map(&mut self, at: At, map: Map<'_>) -> io::Result<()> {
        const PROTECTION: u32 = 1 | 4; // PROT_READ | PROT_EXEC
        const FLAGS: u32 = 2; // MAP_PRIVATE
        self.begin();
        self.words([at.pid, at.tid]);
        for word in [map.start, map.length, map.file_offset] {
            self.record.extend(word.to_le_bytes());
        }
        let mut id = [0; 24];
        let known = map.build_id.as_ref().map_or(&[][..], BuildId::as_bytes);
        let size = known.len().min(20);
        id[0] = size as u8;
        id[4..4 + size].copy_from_slice(&known[..size]);
        self.record.extend(id);
        self.words([PROTECTION, FLAGS]);
        self.text(map.path);
        self.trailer(at);
        let misc = if size == 0 { 0 } else { MMAP_BUILD_ID };
        self.end(kind::MMAP2, Mode::User as u16 | misc)
    }

    /// The kernel's image or a module of it.
    pub fn kernel_map(&mut self, map: Map<'_>) -> io::Result<()> {
        self.begin();
        self.words([u32::MAX, 0]);
        for word in [map.start, map.length, map.file_offset] {
            self.record.extend(word.to_le_bytes());
        }
        self.text(map.path);
        self.trailer(At { pid: u32::MAX, ..At::default() });
        self.end(kind::MMAP, Mode::Kernel as u16)
    }

    /// Samples that are missing.
    pub fn lost(&mut self, at: At, count: u64) -> io::Result<()> {
        self.begin();
        self.record.extend(FIRST_ID.to_le_bytes());
        self.record.extend(count.to_le_bytes());
        self.trailer(at);
        self.end(kind::LOST, 0)
    }

    /// A sample; `chain` is from [`chain`].
    pub fn sample(
        &mut self,
        at: At,
        series: SeriesId,
        period: u64,
        chain: &Chain,
    ) -> io::Result<()> {
        self.begin();
        self.record.extend(chain.ip.to_le_bytes());
        self.words([at.pid, at.tid]);
        self.record.extend(at.time.to_le_bytes());
        self.record.extend(event_id(series).to_le_bytes());
        self.words([at.cpu, 0]);
        self.record.extend(period.to_le_bytes());
        self.record.extend_from_slice(&chain.bytes);
        self.end(kind::SAMPLE, chain.mode as u16)
    }

    /// What came before the round before this one is complete: readers sort no farther back.
    pub fn finished_round(&mut self) -> io::Result<()> {
        self.begin();
        self.end(kind::FINISHED_ROUND, 0)
    }

    fn begin(&mut self) {
        self.record.clear();
        self.record.extend([0; 8]);
    }

    fn words<const N: usize>(&mut self, words: [u32; N]) {
        for word in words {
            self.record.extend(word.to_le_bytes());
        }
    }

    /// NUL-terminated, to a multiple of eight bytes.
    fn text(&mut self, text: &str) {
        let text = text.as_bytes();
        // Longer than any path: a record's size has 16 bits.
        self.record.extend_from_slice(&text[..text.len().min(8192)]);
        let end = self.record.len() + 1;
        self.record.resize(end.next_multiple_of(8), 0);
    }

    fn trailer(&mut self, at: At) {
        self.words([at.pid, at.tid]);
        self.record.extend(at.time.to_le_bytes());
        self.record.extend(FIRST_ID.to_le_bytes());
        self.words([at.cpu, 0]);
    }

    fn end(&mut self, kind: u32, misc: u16) -> io::Result<()> {
        let size = self.record.len() as u16;
        self.record[..4].copy_from_slice(&kind.to_le_bytes());
        self.record[4..6].copy_from_slice(&misc.to_le_bytes());
        self.record[6..8].copy_from_slice(&size.to_le_bytes());
        self.bytes += u64::from(size);
        self.out.write_all(&self.record)
    }
}

/// A call chain as a sample has it.
#[derive(Clone, Debug)]
pub struct Chain {
    /// What was running.
    pub ip: u64,
    /// In which mode.
    pub mode: Mode,
    /// Count and addresses, with context markers.
    pub bytes: Box<[u8]>,
}

/// Encodes a call chain, leaf first.
#[must_use]
pub fn chain(kernel: &[u64], user: &[u64]) -> Chain {
    let kernel = &kernel[..kernel.len().min(MAX_FRAMES)];
    let user = &user[..user.len().min(MAX_FRAMES - kernel.len())];
    let mut words = vec![0];
    for (context, addresses) in [(CONTEXT_KERNEL, kernel), (CONTEXT_USER, user)] {
        if !addresses.is_empty() {
            words.push(context);
            words.extend_from_slice(addresses);
        }
    }
    words[0] = words.len() as u64 - 1;
    let mode = if kernel.is_empty() { Mode::User } else { Mode::Kernel };
    let ip = kernel.first().or(user.first()).copied().unwrap_or(0);
    Chain { ip, mode, bytes: words.iter().flat_map(|word| word.to_le_bytes()).collect() }
}
