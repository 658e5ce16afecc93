//! Samples whose user stack comes later, in a record of its own: since Linux 6.19 the kernel can
//! walk it when the thread returns to user mode (`perf record --call-graph fp,defer`). Pure.

use rustc_hash::FxHashMap;
use stackwire_model::UserAddr;
use stackwire_model::profile::{ProcessId, SampleKey, Taken};

/// `PERF_RECORD_CALLCHAIN_DEFERRED` of include/uapi/linux/perf_event.h: a cookie, the count of
/// addresses, addresses.
pub const CALLCHAIN_DEFERRED: u32 = 22;

/// What is known of a sample without its user stack.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// In this process.
    pub pid: u32,
    /// The same.
    pub process: ProcessId,
    /// Without the user stack.
    pub key: SampleKey,
    /// What it stands for.
    pub taken: Taken,
    /// Where it was taken, if that was in user mode.
    pub ip: Option<UserAddr>,
}

/// Those that wait, by the cookie in their chain. Several samples of one stay in the kernel have
/// the same one. The kernel gives out each once (`unwind_deferred_request` of
/// kernel/unwind/deferred.c).
#[derive(Debug, Default)]
pub struct Deferred {
    waiting: FxHashMap<u64, Vec<Known>>,
}

impl Deferred {
    /// Keeps one.
    pub fn keep(&mut self, cookie: u64, sample: Known) {
        self.waiting.entry(cookie).or_default().push(sample);
    }

    /// Those of a cookie.
    pub fn take(&mut self, cookie: u64) -> Vec<Known> {
        self.waiting.remove(&cookie).unwrap_or_default()
    }

    /// Those whose stack never came, in the order of their time.
    pub fn take_rest(&mut self) -> Vec<Known> {
        let mut rest: Vec<_> = self.waiting.drain().flat_map(|(_, samples)| samples).collect();
        rest.sort_by_key(|sample| sample.taken.time_ns);
        rest
    }
}
