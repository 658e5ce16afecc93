//! The call chain that the kernel took with a sample, or later. Pure.

use linux_perf_data::linux_perf_event_reader::{CpuMode, SampleRecord};
use stackwire_model::profile::FrameKind;
use stackwire_model::{KernelAddr, UserAddr};

/// Above this, entries of a call chain say in what mode those after them are: `PERF_CONTEXT_MAX`
/// and below.
const CONTEXT_MAX: u64 = -4095i64 as u64;
const CONTEXT_KERNEL: u64 = -128i64 as u64;
const CONTEXT_USER: u64 = -512i64 as u64;
/// The next entry is the cookie of a chain that comes later.
const CONTEXT_USER_DEFERRED: u64 = -640i64 as u64;

/// Kernel and user addresses, leaf first, each with how it is to be read.
#[derive(Debug, Default)]
pub struct Chain {
    /// In the kernel.
    pub kernel: Vec<(KernelAddr, FrameKind)>,
    /// In the process.
    pub user: Vec<(UserAddr, FrameKind)>,
    /// The cookie of the record that brings the addresses in the process, if they come later.
    pub deferred: Option<u64>,
}

/// What the next addresses of a chain are of.
#[derive(Clone, Copy)]
enum Mode {
    Kernel,
    User,
    Cookie,
    /// A guest, a hypervisor: not code of this host.
    Other,
}

impl Chain {
    /// That of a sample. One without a chain has the address it was taken at.
    pub fn of(sample: &SampleRecord<'_>) -> Self {
        let mode = match sample.cpu_mode {
            CpuMode::Kernel => Mode::Kernel,
            _ => Mode::User,
        };
        let entries = sample.callchain.into_iter();
        let mut chain = Self::read(
            mode,
            entries.flat_map(|chain| (0..chain.len()).map_while(move |index| chain.get(index))),
        );
        if sample.callchain.is_none_or(|chain| chain.is_empty())
            && let Some(ip) = sample.ip
        {
            match sample.cpu_mode {
                CpuMode::Kernel => chain.kernel.push((KernelAddr(ip), FrameKind::Exact)),
                _ => chain.user.push((UserAddr(ip), FrameKind::Exact)),
            }
        }
        chain
    }

    /// That of a record which brings the addresses in the process.
    pub fn brought(entries: impl Iterator<Item = u64>) -> Self {
        Self::read(Mode::User, entries)
    }

    fn read(mut mode: Mode, entries: impl Iterator<Item = u64>) -> Self {
        let Self { mut kernel, mut user, mut deferred } = Self::default();
        let kind = |is_first| if is_first { FrameKind::Exact } else { FrameKind::Caller };
        let mut is_marked_user = false;
        for entry in entries {
            // Those of user mode come last: a mark among them is an address that the process made
            // up.
            if is_marked_user && entry >= CONTEXT_MAX {
                break;
            }
            match (entry, mode) {
                (_, Mode::Cookie) => (deferred, mode) = (Some(entry), Mode::Other),
                (CONTEXT_KERNEL, _) => mode = Mode::Kernel,
                (CONTEXT_USER, _) => (mode, is_marked_user) = (Mode::User, true),
                (CONTEXT_USER_DEFERRED, _) => mode = Mode::Cookie,
                (CONTEXT_MAX.., _) => mode = Mode::Other,
                (_, Mode::Kernel) => kernel.push((KernelAddr(entry), kind(kernel.is_empty()))),
                (_, Mode::User) => user.push((UserAddr(entry), kind(user.is_empty()))),
                (_, Mode::Other) => {}
            }
        }
        Self { kernel, user, deferred }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entry_behind_the_mark_is_a_cookie_whatever_it_looks_like() {
        for cookie in [7, 1 << 48 | 1, CONTEXT_USER] {
            let entries = [CONTEXT_KERNEL, 10, 20, CONTEXT_USER_DEFERRED, cookie];
            let chain = Chain::read(Mode::User, entries.into_iter());
            assert_eq!(chain.deferred, Some(cookie));
            let kernel = [(10, FrameKind::Exact), (20, FrameKind::Caller)];
            assert_eq!(chain.kernel, kernel.map(|(ip, kind)| (KernelAddr(ip), kind)));
            assert_eq!(chain.user, []);
        }
        let brought = Chain::brought([CONTEXT_USER, 30, 40].into_iter());
        let user = [(30, FrameKind::Exact), (40, FrameKind::Caller)];
        assert_eq!(brought.user, user.map(|(ip, kind)| (UserAddr(ip), kind)));
        // A process may put any address on its stack.
        let made_up = [CONTEXT_USER, 30, CONTEXT_KERNEL, 10].into_iter();
        assert_eq!(Chain::read(Mode::User, made_up).kernel, []);
        // One that is cut promises nothing.
        let cut = Chain::read(Mode::User, [CONTEXT_USER_DEFERRED].into_iter());
        assert_eq!((cut.deferred, cut.user), (None, Vec::new()));
    }
}
