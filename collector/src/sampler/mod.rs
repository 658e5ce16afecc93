//! The drivers of the kernel side: with eBPF (`ebpf.rs`), or through perf events alone (`perf.rs`).
//!
//! They know records, not processes: what records mean is for `pipeline.rs` and below.

mod btf;
mod drained;
mod ebpf;
mod load_error;
pub(crate) mod mapped;
mod object;
mod offsets;
mod perf;
mod rings;
mod sched_stats;
mod seen;

use std::fmt;
use std::io;
use std::time::Duration;

use stackwire_collector_ebpf::sched_stats::{OnCpu, SchedStats};
use stackwire_collector_ebpf::{Counter, Waiting};
use stackwire_model::{Event, NoBpf};

pub use self::drained::{Batch, Copy, NewCode, NewPiece, RawSample};
pub use self::ebpf::EbpfSampler;
pub use self::load_error::{BTF_PATH, LoadError};
pub use self::object::Filter;
pub use self::perf::{PerfSampler, Tasks};
use crate::host::cpu_list;
use crate::sources::pace::Pace;
use crate::sources::perf_event::Sampled;
use crate::unwind::Tally;

/// Sampling could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SamplerError {
    /// The eBPF object.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A perf event.
    #[error("cannot open a {event} perf event on CPU {cpu}: {error}{hint}")]
    Open {
        /// Name of the event.
        event: String,
        /// CPU it was for.
        cpu: u32,
        /// What the kernel said.
        error: io::Error,
        /// What to do.
        hint: &'static str,
    },
    /// No CPU list.
    #[error("cannot read {CPUS_ONLINE}: {0}")]
    Cpus(io::Error),
    /// A process of another user.
    #[error(
        "cannot sample pid {pid} through perf events: it is of another user; sample your own processes, or give the collector CAP_BPF and CAP_PERFMON (`make install` does)"
    )]
    OfAnotherUser {
        /// The process.
        pid: u32,
    },
    /// More descriptors than a process may have.
    #[error(
        "cannot open a perf event for each of {threads} threads on each of {cpus} CPUs: a process may have {limit} descriptors; raise `ulimit -n`, or give the collector CAP_BPF and CAP_PERFMON (`make install` does), which needs none of them"
    )]
    Descriptors {
        /// Threads there are.
        threads: usize,
        /// CPUs there are.
        cpus: usize,
        /// `RLIMIT_NOFILE`.
        limit: u64,
    },
    /// Neither with eBPF nor without.
    #[error("{ebpf}; nor through perf events alone: {perf}")]
    Neither {
        /// With it.
        ebpf: Box<Self>,
        /// Without.
        perf: Box<Self>,
    },
    /// A filter that is none.
    #[error(
        "the kernel does not take this filter for {event}: {error}; write it as \"prev_pid == 1 && prev_comm ~ 'sh*'\" with fields of the tracepoint"
    )]
    Filter {
        /// Name of the event.
        event: String,
        /// What the kernel said.
        error: io::Error,
    },
    /// No memory for rings.
    #[error(
        "cannot map a ring of perf events of {kib} KiB on each of {cpus} CPUs: {error}; end other profilers of this user, or raise sysctl kernel.perf_event_mlock_kb or `ulimit -l`"
    )]
    Ring {
        /// The smallest that was tried.
        kib: usize,
        /// How many.
        cpus: usize,
        /// What the kernel said.
        error: io::Error,
    },
}

impl SamplerError {
    /// Why eBPF was refused, if it was: others may do without.
    #[must_use]
    pub fn no_bpf(&self) -> Option<NoBpf> {
        Some(match self {
            Self::Load(LoadError::NoObject) => NoBpf::NoPrograms,
            Self::Load(LoadError::NoBtf(_)) => NoBpf::NoBtf,
            Self::Load(LoadError::Denied) => NoBpf::Denied,
            Self::Load(LoadError::Lockdown) => NoBpf::Lockdown,
            Self::Load(LoadError::Btf(_) | LoadError::Kernel(_)) => NoBpf::Kernel,
            _ if self.is(libc::EACCES) || self.is(libc::EPERM) => NoBpf::Denied,
            _ => return None,
        })
    }

    /// Whether it is an event that the kernel refused with this number of errno(3).
    #[must_use]
    pub fn is(&self, code: i32) -> bool {
        matches!(self, Self::Open { error, .. } if error.raw_os_error() == Some(code))
    }
}

/// How many bytes of a stack that cannot be walked yet are copied, at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToCopy {
    /// Where a sample is taken.
    pub of_sample: usize,
    /// Where a thread begins to wait.
    pub of_wait: usize,
}

/// The running kernel side. What only eBPF programs see there is none of otherwise.
pub trait Sampler: fmt::Debug {
    /// Waits until there is much to drain, or until `timeout`, less than a second, is over. True
    /// when the wait was cut short because the kernel side needs what events tell.
    fn wait(&mut self, timeout: Duration) -> bool;

    /// Moves everything in the rings into `batch`: samples first, so that every event older than a
    /// sample is in the batch with it.
    fn drain(&mut self, batch: &mut Batch);

    /// Adapts the periods of events that are counted one by one to how often they come. To be
    /// called at each turn.
    fn adapt(&mut self);

    /// Opens events on CPUs that came online, for the first time or again. Forgets the events of
    /// CPUs that went offline, after moving what is in their rings to `batch`. Leave enough time
    /// between two calls for an event to run. A CPU that is refused counts in
    /// [`Sampler::refused_cpus`] and is tried again at the next look.
    fn follow_hotplug(&mut self, batch: &mut Batch);

    /// CPUs that are online and could not be sampled at the last look.
    fn refused_cpus(&self) -> u64;

    /// Stops taking samples; what was taken stays in the rings.
    fn stop(&mut self);

    /// A counter, summed over CPUs.
    fn counter(&self, counter: Counter) -> u64;

    /// Told how many stacks were walked since the last time, and how many went on behind their
    /// copy.
    fn note_cut(&mut self, _tally: Tally) {}

    /// Has the eBPF programs copy at most so many bytes of a stack that cannot be walked yet.
    fn copy_at_most(&self, _bytes: ToCopy) {}

    /// Has the eBPF programs hand over again what names functions of interpreters.
    fn name_again(&self) {}

    /// Threads that wait, each with its id; from kernel 5.19 on it takes no capability.
    fn waiting(&self) -> Vec<(u32, Waiting)> {
        Vec::new()
    }

    /// Forgets processes that have ended, so that there is room for others. From kernel 5.19 on it
    /// takes no capability.
    fn dismiss(&mut self, _pids: &[u32]) {}

    /// Has the kernel side tell of stacks again, by their number and the place it is noted in.
    fn forget(&self, _place: u32, _number: u64) {}

    /// Sums of how threads are scheduled, by `key_of` a process or thread. From kernel 5.19 on it
    /// takes no capability.
    fn sched_sums(&self) -> Vec<(u64, SchedStats)> {
        Vec::new()
    }

    /// What has run on its CPU since the last switch there, and is not in the sums.
    fn running(&mut self) -> Vec<OnCpu> {
        Vec::new()
    }

    /// Drops the sums of one that ended.
    fn forget_sched(&mut self, _key: u64) {}
}

/// An event, and when it takes a sample at first.
#[derive(Debug)]
struct Kind {
    event: Event,
    when: Sampled,
    /// It is a period that changes.
    paced: bool,
}

impl Kind {
    /// With eBPF, events that the kernel counts one by one have a period that follows their pace:
    /// `Picker` chooses among them.
    fn new(event: &Event, sampled: Sampled) -> Self {
        let paced = event.is_counted_singly() && matches!(sampled, Sampled::PerSecond(_));
        let when = if paced { Sampled::EachOf(Pace::FIRST) } else { sampled };
        Self { event: event.clone(), when, paced }
    }
}

/// Where the kernel lists CPUs it schedules on now.
const CPUS_ONLINE: &str = "/sys/devices/system/cpu/online";

fn open_error(cpu: u32, event: &Event, error: io::Error) -> SamplerError {
    let hint = error.raw_os_error().map_or("", |code| open_hint(code, paranoid()));
    SamplerError::Open { event: event.name.clone(), cpu, error, hint }
}

/// What to do about an event that could not be opened. Pure.
fn open_hint(code: i32, paranoid: i32) -> &'static str {
    match code {
        // Debian's and Ubuntu's kernels know a level that asks for CAP_SYS_ADMIN.
        libc::EACCES | libc::EPERM if paranoid > 2 => {
            "; at kernel.perf_event_paranoid above 2 this kernel asks for CAP_SYS_ADMIN: sysctl kernel.perf_event_paranoid=2, or run the collector as root"
        }
        libc::EACCES | libc::EPERM => {
            "; give the collector CAP_BPF and CAP_PERFMON (`make install` does), or run it as root"
        }
        libc::ENOENT | libc::EOPNOTSUPP => {
            "; this machine has no counter for it; cpu-clock and page-faults are everywhere"
        }
        _ => "",
    }
}

/// Whether events can be opened once capabilities are given up: not above the level at which
/// Debian's and Ubuntu's kernels ask for CAP_SYS_ADMIN.
pub fn opens_events_later() -> bool {
    paranoid() <= 2
}

fn paranoid() -> i32 {
    let text = std::fs::read_to_string("/proc/sys/kernel/perf_event_paranoid");
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(2)
}

/// CPUs the kernel schedules on now.
fn online_cpus() -> Result<Vec<u32>, SamplerError> {
    let text = std::fs::read_to_string(CPUS_ONLINE).map_err(SamplerError::Cpus)?;
    Ok(cpu_list::parse(&text).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_that_cannot_be_opened_comes_with_what_to_do() {
        assert!(open_hint(libc::EACCES, 3).contains("sysctl kernel.perf_event_paranoid=2"));
        assert!(open_hint(libc::EACCES, 2).contains("CAP_PERFMON"));
        assert!(open_hint(libc::ENOENT, 2).contains("cpu-clock"));
        assert_eq!(open_hint(libc::EINVAL, 2), "");
    }
}
