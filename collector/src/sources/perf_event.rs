//! perf events: how they are opened, and the rings their records come in.
//!
//! With eBPF, the first event of a CPU does both jobs: its overflow runs the sampling program,
//! which writes no perf record, and its ring carries the side band. Others have no ring of their
//! own: what the kernel says of them goes into that of the first. Without eBPF, all events of a CPU
//! write their samples and the side band into one ring ([`PerfEvent::ring`]).
//!
//! The system calls are perf-event2's; those it has no method for are of the crate below it.
//! Decodes nothing: `side_band.rs` and `perf_sample.rs` do. Called by `sampler/`.

use std::ffi::CStr;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::LazyLock;
use std::time::Duration;

use perf_event::events::Software;
use perf_event::{Builder, Clock, Counter, ReadFormat, SampleFlag, Sampler};
use perf_event_open_sys::ioctls;
use rustix::process::{Resource, getrlimit, setrlimit};
use stackwire_collector_ebpf::arch::{PERF_IP, PERF_REGISTERS};
use stackwire_collector_ebpf::sched_stats::CounterSum;
use stackwire_model::PerfType;

/// Bytes of records the ring of a CPU holds that carries the side band alone: half of what
/// `kernel.perf_event_mlock_kb` allows an unprivileged user per CPU.
const SIDE_BAND_BYTES: usize = 256 << 10;
/// Bytes of events that wake the collector: a quarter of that ring. The kernel side wakes it where
/// it matters, see `WAKEUPS`. Not every event: the interrupt costs the process that maps, a loop of
/// dlopen a tenth of its time.
const WAKEUP_BYTES: usize = SIDE_BAND_BYTES / 4;

/// Bytes taken out of a ring at once: more than any holds.
const MAX_DRAINED: usize = 1 << 20;
/// Bytes of a record with the longest path.
const LARGEST_RECORD: usize = 4096 + 256;

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

/// What an event watches on its CPU.
#[derive(Clone, Copy, Debug)]
pub enum Watched<'a> {
    /// Every task.
    All,
    /// A thread, and the threads it starts.
    Thread {
        /// Its id.
        tid: u32,
        /// The processes it starts, too.
        children: bool,
    },
    /// The tasks of the cgroup whose directory this is.
    Cgroup(&'a File),
}

/// A ring that is not to be had.
#[derive(Debug)]
pub enum RingError {
    /// No event may be opened: `EPERM` where a container forbids the system call, `EACCES` where
    /// Debian's kernels do (`kernel.perf_event_paranoid` above 2).
    Open(io::Error),
    /// Its memory: `EPERM` above `kernel.perf_event_mlock_kb` and `RLIMIT_MEMLOCK`.
    Map(io::Error),
}

/// What a sample holds beside its time and place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contents {
    /// All but [`Kernel::Excluded`] takes `kernel.perf_event_paranoid` at 1 or below, or
    /// `CAP_PERFMON`.
    pub kernel: Kernel,
    /// Bytes of the user stack that are copied, with the registers; 0: neither.
    pub stack_bytes: u32,
    /// The cgroup of the task. Kernels may be built without (CONFIG_CGROUP_PERF).
    pub cgroup: bool,
    /// What each sample weighs, where samples do not say it: the kernel takes one at each
    /// occurrence of a software event or tracepoint that is to say it and has a fixed period
    /// (`perf_swevent_event` of kernel/events/core.c).
    pub period: Option<u64>,
}

/// What is sampled of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Nothing: time spent there does not count.
    Excluded,
    /// Its time, without its stacks.
    WithoutStacks,
    /// Its time and its stacks.
    WithStacks,
}

/// One open event, with its ring if it has one.
pub struct PerfEvent {
    event: Opened,
    /// For how long it had been enabled at the last look.
    enabled: Duration,
}

enum Opened {
    Counter(Counter),
    Ring(Sampler),
}

impl fmt::Debug for PerfEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerfEvent").field("id", &self.id()).finish_non_exhaustive()
    }
}

impl PerfEvent {
    /// Opens an event on `cpu` for all tasks, disabled. Clocks leave out idle time. `first`: of
    /// this CPU, if it is not the first itself.
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
        let mut builder = of_cpu(cpu, event, sampled);
        builder.any_pid().exclude_kernel(false).exclude_hv(false);
        builder.sample(SampleFlag::TID | SampleFlag::TIME | SampleFlag::CPU);
        builder.wakeup_watermark(WAKEUP_BYTES);
        if first.is_none() {
            tell_of_processes(&mut builder);
        }
        let counter = builder.build()?;
        match first {
            None => Self::with_ring(counter, SIDE_BAND_BYTES),
            Some(first) => Self::writing_into(counter, first),
        }
    }

    /// Opens a ring of this many bytes, a power of two, for events on `cpu` that samples are copied
    /// from. It is of this thread: the ring of a thread that ends would look readable for ever.
    ///
    /// # Errors
    /// See [`RingError`].
    pub fn ring(cpu: u32, bytes: usize) -> Result<Self, RingError> {
        let mut builder = Builder::new(Software::DUMMY);
        builder.observe_self().one_cpu(cpu as usize).clockid(Clock::MONOTONIC);
        builder.wakeup_watermark(bytes / 4);
        let counter = builder.build().map_err(RingError::Open)?;
        Self::with_ring(counter, bytes).map_err(RingError::Map)
    }

    /// Opens an event on `cpu` that writes samples into a [`PerfEvent::ring`] of that CPU,
    /// disabled. The `first` of its task writes the side band, too.
    ///
    /// # Errors
    /// As of [`PerfEvent::open`]; `ESRCH` for a thread that has ended, `EACCES` for one of another
    /// user.
    pub fn open_copying(
        cpu: u32,
        event: PerfType,
        sampled: Sampled,
        watched: Watched<'_>,
        contents: Contents,
        ring: &Self,
        first: bool,
    ) -> io::Result<Self> {
        let mut builder: Builder<'_> = of_cpu(cpu, event, sampled);
        if first {
            tell_of_processes(&mut builder);
        }
        if *TELLS_LOST {
            builder.read_format(ReadFormat::TOTAL_TIME_ENABLED | ReadFormat::LOST);
        }
        let excluded = contents.kernel == Kernel::Excluded;
        builder.exclude_kernel(excluded).exclude_hv(excluded);
        builder.exclude_callchain_kernel(contents.kernel != Kernel::WithStacks);
        let parts = SampleFlag::IDENTIFIER | SampleFlag::TID | SampleFlag::TIME | SampleFlag::CPU;
        builder.sample(parts | SampleFlag::CALLCHAIN);
        if contents.period.is_none() {
            builder.sample(SampleFlag::PERIOD);
        }
        if contents.stack_bytes > 0 {
            let all = PERF_REGISTERS.into_iter().chain([PERF_IP]);
            builder.sample(SampleFlag::REGS_USER | SampleFlag::STACK_USER);
            builder.sample_regs_user(all.fold(0, |bits, register| bits | 1 << register));
            builder.sample_stack_user(contents.stack_bytes);
        }
        if contents.cgroup {
            builder.sample(SampleFlag::CGROUP);
        }
        match watched {
            Watched::All => builder.any_pid(),
            Watched::Cgroup(directory) => builder.observe_cgroup(directory),
            Watched::Thread { tid, children } => {
                builder.observe_pid(tid as i32).inherit(true).inherit_thread(!children)
            }
        };
        Self::writing_into(builder.build()?, ring)
    }

    /// Opens an event on `cpu` that counts and takes no sample, enabled. It counts idle time too.
    ///
    /// # Errors
    /// The system call's, as of [`PerfEvent::open`].
    pub fn count(cpu: u32, event: PerfType) -> io::Result<Self> {
        let mut builder = of_cpu(cpu, event, Sampled::Never);
        builder.any_pid().exclude_kernel(false).exclude_hv(false).enabled(true);
        builder.read_format(ReadFormat::TOTAL_TIME_ENABLED | ReadFormat::TOTAL_TIME_RUNNING);
        Ok(Self { event: Opened::Counter(builder.build()?), enabled: Duration::ZERO })
    }

    /// Whether this process may count this event of itself, in user mode at least.
    #[must_use]
    pub fn is_there(event: PerfType) -> bool {
        let mut builder = builder(event);
        builder.observe_self().any_cpu().exclude_kernel(true).exclude_hv(true);
        builder.build().is_ok()
    }

    /// Has a tracepoint count only where its fields fit, as the kernel's
    /// Documentation/trace/events.rst writes it: `prev_pid == 1`.
    ///
    /// # Errors
    /// The ioctl's: `EINVAL` for a filter the kernel does not understand, or of no tracepoint.
    pub fn set_filter(&self, filter: &CStr) -> io::Result<()> {
        // SAFETY: the descriptor is open and the text is there for the length of the call, which
        // only reads it.
        check(unsafe { ioctls::SET_FILTER(self.counter().as_raw_fd(), filter.as_ptr().cast_mut()) })
    }

    fn with_ring(counter: Counter, bytes: usize) -> io::Result<Self> {
        Ok(Self { event: Opened::Ring(counter.sampled(bytes)?), enabled: Duration::ZERO })
    }

    fn writing_into(counter: Counter, ring: &Self) -> io::Result<Self> {
        let to = ring.counter().as_raw_fd();
        // SAFETY: both descriptors are open for the length of the call.
        check(unsafe { ioctls::SET_OUTPUT(counter.as_raw_fd(), to) })?;
        Ok(Self { event: Opened::Counter(counter), enabled: Duration::ZERO })
    }

    /// What samples call it: the number it has in the kernel. Events that threads inherit have the
    /// number of the one they have it from.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.counter().id()
    }

    /// Runs `program` at each overflow.
    ///
    /// # Errors
    /// The ioctl's.
    pub fn set_program(&mut self, program: BorrowedFd<'_>) -> io::Result<()> {
        self.counter_mut().set_bpf(program.as_raw_fd())
    }

    /// Starts the event.
    ///
    /// # Errors
    /// The ioctl's.
    pub fn enable(&mut self) -> io::Result<()> {
        self.counter_mut().enable()
    }

    /// Changes the period of an event opened with [`Sampled::EachOf`]. The next occurrence takes a
    /// sample.
    ///
    /// # Errors
    /// The ioctl's.
    pub fn set_period(&self, period: u64) -> io::Result<()> {
        // SAFETY: the descriptor is open and the number is there for the length of the call, which
        // reads it, though the signature says that it takes the number itself.
        check(unsafe {
            ioctls::PERIOD(self.counter().as_raw_fd(), (&raw const period).addr() as u64)
        })
    }

    /// Stops the event; what is in the ring stays.
    ///
    /// # Errors
    /// The ioctl's.
    pub fn disable(&mut self) -> io::Result<()> {
        self.counter_mut().disable()
    }

    /// Whether it has run since the last look. One whose CPU went offline never does again, not
    /// even when the CPU is back: the kernel has taken it off for good.
    pub fn advances(&mut self) -> bool {
        let read = self.counter_mut().read_full().ok();
        let enabled = read.and_then(|read| read.time_enabled()).unwrap_or_default();
        let advanced = enabled > self.enabled;
        self.enabled = enabled;
        advanced
    }

    /// What a [`PerfEvent::count`] has counted so far. `None`: it cannot be read.
    pub fn counted(&mut self) -> Option<CounterSum> {
        let read = self.counter_mut().read_count_and_time().ok()?;
        let (enabled_ns, running_ns) = (read.time_enabled, read.time_running);
        Some(CounterSum { value: read.count, enabled_ns, running_ns })
    }

    /// Samples of [`PerfEvent::open_copying`], inherited ones among them, for which the ring had no
    /// room. `None` before Linux 6.0.
    pub fn lost(&mut self) -> Option<u64> {
        self.counter_mut().read_full().ok()?.lost()
    }

    /// Becomes readable when the ring has many new records.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the event, which is borrowed as long.
        unsafe { BorrowedFd::borrow_raw(self.counter().as_raw_fd()) }
    }

    /// Takes records out of its ring, if it has one, handing each to `each`, header first. Not
    /// without end: it may be filled as fast as it is emptied. Whether it was full: the kernel says
    /// that records are lost only in front of the next that fits, which may be long after.
    pub fn drain(&mut self, buffer: &mut Vec<u8>, mut each: impl FnMut(&[u8])) -> bool {
        let Opened::Ring(ring) = &mut self.event else { return false };
        let mut left = MAX_DRAINED;
        while left > 0
            && let Some(record) = ring.next_record()
        {
            buffer.clear();
            buffer.extend(record.ty().to_ne_bytes());
            buffer.extend(record.misc().to_ne_bytes());
            buffer.extend((record.len() as u16 + 8).to_ne_bytes());
            record.data().iter().for_each(|part| buffer.extend_from_slice(part));
            drop(record);
            left = left.saturating_sub(buffer.len());
            each(buffer);
        }
        MAX_DRAINED - left > SIDE_BAND_BYTES - LARGEST_RECORD
    }

    fn counter(&self) -> &Counter {
        match &self.event {
            Opened::Counter(counter) => counter,
            Opened::Ring(ring) => ring.as_counter(),
        }
    }

    fn counter_mut(&mut self) -> &mut Counter {
        match &mut self.event {
            Opened::Counter(counter) => counter,
            Opened::Ring(ring) => ring.as_counter_mut(),
        }
    }
}

/// Whether events tell how many samples were lost (`PERF_FORMAT_LOST`, Linux 6.0). A ring tells it
/// as well, but only in front of the next record that fits: what is lost last it never tells.
static TELLS_LOST: LazyLock<bool> = LazyLock::new(|| {
    let mut builder = Builder::new(Software::DUMMY);
    builder.observe_self().any_cpu().exclude_kernel(true).exclude_hv(true);
    builder.read_format(ReadFormat::LOST).build().is_ok()
});

/// As many descriptors as this process may allow itself.
///
/// # Errors
/// Those of setrlimit(2).
pub fn raise_descriptors() -> rustix::io::Result<()> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit)
}

/// An event by its numbers.
pub fn builder(event: PerfType) -> Builder<'static> {
    let mut builder = Builder::new(Software::DUMMY);
    builder.attrs_mut().type_ = event.kind;
    builder.attrs_mut().config = event.config;
    builder
}

/// What all events of a CPU have in common.
fn of_cpu(cpu: u32, event: PerfType, sampled: Sampled) -> Builder<'static> {
    let mut builder = builder(event);
    builder.one_cpu(cpu as usize).read_format(ReadFormat::TOTAL_TIME_ENABLED);
    match sampled {
        Sampled::Never => {}
        Sampled::PerSecond(frequency) => {
            builder.sample_frequency(frequency.into());
        }
        Sampled::EachOf(period) => {
            builder.sample_period(period);
        }
    }
    // Clocks alone know idle time: x86 counters go on, those of arm64 are refused with EOPNOTSUPP
    // (`armv8pmu_set_event_filter` of drivers/perf/arm_pmuv3.c).
    builder.exclude_idle(sampled != Sampled::Never && event.is_software());
    builder.sample_id_all(true).clockid(Clock::MONOTONIC);
    builder
}

fn tell_of_processes(builder: &mut Builder<'_>) {
    builder.mmap(true).mmap2(true).build_id(true).comm(true).comm_exec(true).task(true);
}

fn check(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
