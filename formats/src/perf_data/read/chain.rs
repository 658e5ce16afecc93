//! The call chain that the kernel took with a sample. Pure.

use linux_perf_data::linux_perf_event_reader::{CpuMode, SampleRecord};
use stackwire_model::profile::FrameKind;
use stackwire_model::{KernelAddr, UserAddr};

/// Above this, entries of a call chain say in what mode those after them are: `PERF_CONTEXT_MAX`
/// and below.
const CONTEXT_MAX: u64 = -4095i64 as u64;
const CONTEXT_KERNEL: u64 = -128i64 as u64;
const CONTEXT_USER: u64 = -512i64 as u64;

/// Kernel and user addresses, leaf first, each with how it is to be read.
#[derive(Debug, Default)]
pub struct Chain {
    /// In the kernel.
    pub kernel: Vec<(KernelAddr, FrameKind)>,
    /// In the process.
    pub user: Vec<(UserAddr, FrameKind)>,
}

/// What the next addresses of a chain are of.
#[derive(Clone, Copy)]
enum Mode {
    Kernel,
    User,
    /// A guest, a hypervisor: not code of this host.
    Other,
}

impl Chain {
    /// That of a sample. One without a chain has the address it was taken at.
    pub fn of(sample: &SampleRecord<'_>) -> Self {
        let Self { mut kernel, mut user } = Self::default();
        let mut mode = match sample.cpu_mode {
            CpuMode::Kernel => Mode::Kernel,
            _ => Mode::User,
        };
        let chain = sample.callchain;
        let kind = |is_first| if is_first { FrameKind::Exact } else { FrameKind::Caller };
        for index in 0..chain.map_or(0, |chain| chain.len()) {
            let Some(address) = chain.and_then(|chain| chain.get(index)) else { break };
            match (address, mode) {
                (CONTEXT_KERNEL, _) => mode = Mode::Kernel,
                (CONTEXT_USER, _) => mode = Mode::User,
                (CONTEXT_MAX.., _) => mode = Mode::Other,
                (_, Mode::Kernel) => kernel.push((KernelAddr(address), kind(kernel.is_empty()))),
                (_, Mode::User) => user.push((UserAddr(address), kind(user.is_empty()))),
                (_, Mode::Other) => {}
            }
        }
        if chain.is_none_or(|chain| chain.is_empty())
            && let Some(ip) = sample.ip
        {
            match sample.cpu_mode {
                CpuMode::Kernel => kernel.push((KernelAddr(ip), FrameKind::Exact)),
                _ => user.push((UserAddr(ip), FrameKind::Exact)),
            }
        }
        Self { kernel, user }
    }
}
