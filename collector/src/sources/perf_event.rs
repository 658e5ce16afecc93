//! perf events: the system calls, and the rings that carry mapping, exec, fork and exit records.
//!
//! The first event of a CPU does both jobs: its overflow runs the sampling program, which writes no
//! perf record, and its ring carries the side band. Others have no ring of their own: what the
//! kernel says of them goes into that of the first. Unsafe lives here and in `mapped.rs` only.
//! Decodes nothing: `side_band.rs` does. Called by `sampler/mod.rs`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use perf_event_open_sys::bindings as abi;
use perf_event_open_sys::ioctls;
use stackwire_model::PerfType;

use crate::sampler::mapped::Mapped;

/// Pages of records a CPU's ring holds: 256 KiB, half of what `kernel.perf_event_mlock_kb` allows
/// an unprivileged user per CPU.
const RING_PAGES: usize = 64;
/// Bytes of events that wake the collector: a quarter of the ring. The kernel side wakes it where
/// it matters, see `WAKEUPS`. Not every event: the interrupt costs the process that maps, a loop of
/// dlopen a tenth of its time.
const WAKEUP_BYTES: u32 = 64 << 10;

/// When an event takes a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampled {
    /// Never: it is there for its ring.
    Never,
    /// So many times a second: the kernel adapts the period.
    PerSecond(u32),
    /// Once in this many occurrences.
    EachOf(u64),
}

/// One open event, with its ring if it is the first of its CPU.
#[derive(Debug)]
pub struct PerfEvent {
    fd: OwnedFd,
    ring: Option<Ring>,
    /// Nanoseconds it had been enabled for at the last look.
    enabled_ns: u64,
}

/// Records of a CPU.
#[derive(Debug)]
struct Ring {
    memory: Mapped,
    data_offset: usize,
    data_size: usize,
}

impl PerfEvent {
    /// Opens an event on `cpu` for all tasks but idle, disabled. `first`: of this CPU, if it is not
    /// the first itself.
    ///
    /// # Errors
    /// The system calls': `EACCES` without `CAP_PERFMON`, `ENOENT` where the hardware has no such
    /// event, `ENODEV` where the CPU is offline, `EINVAL` above
    /// `kernel.perf_event_max_sample_rate`.
    pub fn open(
        cpu: u32,
        event: PerfType,
        sampled: Sampled,
        first: Option<&Self>,
    ) -> io::Result<Self> {
        let mut attr = abi::perf_event_attr {
            type_: event.kind,
            config: event.config,
            size: size_of::<abi::perf_event_attr>() as u32,
            clockid: libc::CLOCK_MONOTONIC,
            read_format: abi::PERF_FORMAT_TOTAL_TIME_ENABLED.into(),
            sample_type: u64::from(
                abi::PERF_SAMPLE_TID | abi::PERF_SAMPLE_TIME | abi::PERF_SAMPLE_CPU,
            ),
            ..Default::default()
        };
        match sampled {
            Sampled::Never => {}
            Sampled::PerSecond(frequency) => {
                attr.__bindgen_anon_1.sample_freq = u64::from(frequency);
                attr.set_freq(1);
            }
            Sampled::EachOf(period) => attr.__bindgen_anon_1.sample_period = period,
        }
        attr.set_disabled(1);
        attr.set_exclude_idle(1);
        attr.set_sample_id_all(1);
        attr.set_use_clockid(1);
        if first.is_none() {
            attr.set_mmap(1);
            attr.set_mmap2(1);
            attr.set_build_id(1);
            attr.set_comm(1);
            attr.set_comm_exec(1);
            attr.set_task(1);
        }
        attr.set_watermark(1);
        attr.__bindgen_anon_2.wakeup_watermark = WAKEUP_BYTES;

        let fd = open(attr, cpu)?;
        let ring = match first {
            None => {
                let page = rustix::param::page_size();
                let memory = Mapped::read_write(fd.as_fd(), (RING_PAGES + 1) * page)?;
                Some(Ring { memory, data_offset: page, data_size: RING_PAGES * page })
            }
            Some(first) => {
                // SAFETY: both descriptors are open for the length of the call.
                check(unsafe {
                    ioctls::SET_OUTPUT(fd.as_raw_fd(), first.fd.as_raw_fd() as u32 as _)
                })?;
                None
            }
        };
        Ok(Self { fd, ring, enabled_ns: 0 })
    }

    /// Opens an event on `cpu` that counts and takes no sample, enabled. It counts idle time too.
    ///
    /// # Errors
    /// The system call's, as of [`PerfEvent::open`].
    pub fn count(cpu: u32, event: PerfType) -> io::Result<Self> {
        let attr = abi::perf_event_attr {
            type_: event.kind,
            config: event.config,
            size: size_of::<abi::perf_event_attr>() as u32,
            read_format: abi::PERF_FORMAT_TOTAL_TIME_ENABLED.into(),
            ..Default::default()
        };
        Ok(Self { fd: open(attr, cpu)?, ring: None, enabled_ns: 0 })
    }

    /// Runs `program` at each overflow.
    ///
    /// # Errors
    /// The ioctl's.
    pub fn set_program(&self, program: BorrowedFd<'_>) -> io::Result<()> {
        // SAFETY: both descriptors are open for the length of the call.
        check(unsafe { ioctls::SET_BPF(self.fd.as_raw_fd(), program.as_raw_fd() as u32) })
    }

    /// Starts the event.
    ///
    /// # Errors
    /// The ioctl's.
    pub fn enable(&self) -> io::Result<()> {
        // SAFETY: the descriptor is open for the length of the call.
        check(unsafe { ioctls::ENABLE(self.fd.as_raw_fd(), 0) })
    }

    /// Changes the period of an event opened with [`Sampled::EachOf`]. The next occurrence takes a
    /// sample.
    ///
    /// # Errors
    /// The ioctl's.
    pub fn set_period(&self, period: u64) -> io::Result<()> {
        // SAFETY: the descriptor is open and the number is there for the length of the call, which
        // reads it, though the signature says that it takes the number itself.
        check(unsafe { ioctls::PERIOD(self.fd.as_raw_fd(), (&raw const period).addr() as u64) })
    }

    /// Stops the event; what is in the ring stays.
    ///
    /// # Errors
    /// The ioctl's.
    pub fn disable(&self) -> io::Result<()> {
        // SAFETY: the descriptor is open for the length of the call.
        check(unsafe { ioctls::DISABLE(self.fd.as_raw_fd(), 0) })
    }

    /// Whether it has run since the last look. One whose CPU went offline never does again, not
    /// even when the CPU is back: the kernel has taken it off for good.
    pub fn advances(&mut self) -> bool {
        // value, then time enabled: struct read_format of perf_event.h.
        let mut counts = [0u8; 16];
        let read = rustix::io::read(&self.fd, &mut counts).unwrap_or(0);
        let enabled_ns = u64::from_ne_bytes(std::array::from_fn(|index| counts[8 + index]));
        let advanced = read == counts.len() && enabled_ns > self.enabled_ns;
        self.enabled_ns = enabled_ns;
        advanced
    }

    /// Becomes readable when the ring has [`WAKEUP_BYTES`] of new records.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Takes all records out of its ring, if it has one, handing each to `each`, header first.
    pub fn drain(&mut self, buffer: &mut Vec<u8>, each: impl FnMut(&[u8])) {
        if let Some(ring) = &mut self.ring {
            ring.drain(buffer, each);
        }
    }
}

impl Ring {
    fn drain(&mut self, buffer: &mut Vec<u8>, mut each: impl FnMut(&[u8])) {
        let (head, tail) = self.positions();
        // The kernel writes head with release order after the records (perf_event.h, data_head).
        let end = head.load(Ordering::Acquire);
        let mut at = tail.load(Ordering::Relaxed);
        while at < end {
            buffer.clear();
            self.copy(at, 8, buffer);
            let size = buffer.get(6..8).map_or(0, |size| u16::from_ne_bytes([size[0], size[1]]));
            if size < 8 || u64::from(size) > end - at {
                break; // never seen; the rest of the ring cannot be told apart
            }
            self.copy(at + 8, usize::from(size) - 8, buffer);
            each(buffer);
            at += u64::from(size);
        }
        tail.store(end, Ordering::Release);
    }

    fn positions(&self) -> (&AtomicU64, &AtomicU64) {
        let head = std::mem::offset_of!(abi::perf_event_mmap_page, data_head);
        let tail = std::mem::offset_of!(abi::perf_event_mmap_page, data_tail);
        (self.memory.atomic(head), self.memory.atomic(tail))
    }

    fn copy(&self, position: u64, length: usize, into: &mut Vec<u8>) {
        let start = (position % self.data_size as u64) as usize;
        let first = length.min(self.data_size - start);
        self.memory.copy(self.data_offset + start, first, into);
        self.memory.copy(self.data_offset, length - first, into);
    }
}

/// Opens an event of all tasks on a CPU.
fn open(mut attr: abi::perf_event_attr, cpu: u32) -> io::Result<OwnedFd> {
    // SAFETY: attr is fully initialised and outlives the call; the other arguments are integers.
    let fd = unsafe {
        perf_event_open_sys::perf_event_open(
            &mut attr,
            -1,
            cpu as i32,
            -1,
            abi::PERF_FLAG_FD_CLOEXEC.into(),
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just returned this descriptor to us and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn check(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
