//! One program image of a process: who it is, and what is mapped where. Pure.

use std::ops::Range;
use std::rc::Rc;

use stackwire_collector_ebpf::INTERRUPTED;
use stackwire_model::{FileOffset, UserAddr};

use super::cgroup::Membership;
use super::executable::{Executable, Executables};
use crate::sources::side_band::Mapped;

/// An executable mapping.
#[derive(Clone, Debug)]
pub struct Mapping {
    /// First address.
    pub start: UserAddr,
    /// First address behind it.
    pub end: UserAddr,
    /// Offset in the file of `start`.
    pub file_offset: FileOffset,
    /// What is mapped.
    pub executable: Rc<Executable>,
    /// Since when, monotonic nanoseconds; 0: it was there when the process was first looked at.
    pub since_ns: u64,
}

impl Mapping {
    /// The byte of the file that is at an address in it.
    #[must_use]
    pub fn offset(&self, address: UserAddr) -> FileOffset {
        FileOffset(address.0.wrapping_sub(self.start.0).wrapping_add(self.file_offset.0))
    }
}

/// What is known of a process's mappings.
#[derive(Clone, Debug)]
pub enum Mappings {
    /// By address, without overlaps.
    Known(Rc<Vec<Mapping>>),
    /// `/proc` refused.
    Denied,
    /// It was gone before it could be asked.
    Gone,
}

/// One program image of a process.
#[derive(Clone, Debug)]
pub struct Process {
    /// Unique among all images of all processes in this collector; changes at each exec.
    pub image: u64,
    /// Process id.
    pub pid: u32,
    /// Its pid in the initial pid namespace; 0: not known.
    pub host_pid: u32,
    /// Start in boottime nanoseconds; 0 until the first sample tells.
    pub start_ns: u64,
    /// Name of the main thread.
    pub comm: String,
    /// Counts images of this process.
    pub generation: u32,
    /// Where its code is.
    pub mappings: Mappings,
    /// Changes whenever `mappings` does.
    pub version: u32,
    /// Since when it is known to run this, monotonic nanoseconds.
    pub since_ns: u64,
    /// Its beginning was witnessed, and `since_ns` is that.
    pub witnessed: bool,
    /// The process that made it; 0: unknown.
    pub parent: u32,
    /// When its main thread ended, monotonic nanoseconds; 0: it has not.
    pub end_ns: u64,
    /// Where it is.
    pub cgroup: Membership,
    /// It was sampled since the capture began.
    pub sampled: bool,
    /// Address ranges where other code was mapped over existing code. With each is the time until
    /// which stacks through it were walked by the tables of the old code.
    pub(super) replaced: Vec<(Range<UserAddr>, u64)>,
    /// Sampled in this epoch.
    pub(super) touched: bool,
    /// Events were lost since its mappings were read: they are read again at the next sample.
    pub(super) stale: bool,
    /// When the process was made, monotonic nanoseconds; 0: nobody saw it.
    pub born_ns: u64,
    /// The kernel side has told of its end.
    pub is_told: bool,
    /// When its mappings were read from `/proc`, monotonic nanoseconds; 0 when events told them.
    /// Events from before are in them already.
    pub(super) read_ns: u64,
}

impl Process {
    /// An image of which nothing but this is known.
    pub(super) fn new(image: u64, pid: u32, comm: String, mappings: Mappings) -> Self {
        Self {
            image,
            pid,
            host_pid: 0,
            start_ns: 0,
            comm,
            generation: 0,
            mappings,
            version: 0,
            since_ns: 0,
            witnessed: false,
            parent: 0,
            end_ns: 0,
            cgroup: Membership::default(),
            sampled: false,
            replaced: Vec::new(),
            touched: false,
            stale: false,
            born_ns: 0,
            is_told: false,
            read_ns: 0,
        }
    }

    /// Its main thread ended; others may go on, so it is forgotten only when no sample comes any
    /// more.
    #[must_use]
    pub fn exited(&self) -> bool {
        self.end_ns != 0
    }

    /// The mapping `address` lies in.
    #[must_use]
    pub fn mapping(&self, address: UserAddr) -> Option<&Mapping> {
        let Mappings::Known(mappings) = &self.mappings else { return None };
        let after = mappings.partition_point(|mapping| mapping.start <= address);
        mappings.get(after.checked_sub(1)?).filter(|mapping| address < mapping.end)
    }

    /// How many frames of a stack are certain, given the time of the walk. A frame in code that has
    /// just replaced other code is the last certain one: its caller was found by the tables of the
    /// old code.
    #[must_use]
    pub fn certain(&mut self, time_ns: u64, addresses: &[u64]) -> usize {
        self.replaced.retain(|(_, until)| time_ns < *until);
        if self.replaced.is_empty() {
            return addresses.len();
        }
        let is_in = |(index, &address): (usize, &u64)| {
            let returns = index > 0 && address & INTERRUPTED == 0;
            let address = (address & !INTERRUPTED).wrapping_sub(returns.into());
            self.replaced.iter().any(|(range, _)| range.contains(&UserAddr(address)))
        };
        let first = addresses.iter().enumerate().position(is_in);
        first.map_or(addresses.len(), |first| first + 1)
    }

    /// Notes that something was mapped; what it covers is gone.
    pub(super) fn map(&mut self, time_ns: u64, mapped: &Mapped, executables: &mut Executables) {
        let start = mapped.start;
        let end = mapped.end();
        let new = Mapping {
            start,
            end,
            file_offset: mapped.file_offset,
            executable: executables.of_mapping(mapped),
            since_ns: time_ns,
        };
        let Mappings::Known(mappings) = &mut self.mappings else { return };
        let at = mappings.partition_point(|old| old.end <= start);
        // Told again, as by a runtime that makes its code writable and back: nothing changes.
        if mappings.get(at).is_some_and(|old| {
            old.start <= start
                && end <= old.end
                && old.executable.id == new.executable.id
                && new.file_offset == old.offset(start)
        }) {
            return;
        }
        let mappings = Rc::make_mut(mappings);
        let first = mappings.partition_point(|old| old.end <= start);
        let last = mappings.partition_point(|old| old.start < end);
        // What the new mapping covers is gone; what sticks out of it on either side stays.
        if first < last {
            self.replaced.push((start..end, u64::MAX));
        }
        let mut replacement = Vec::with_capacity(3);
        if let Some(old) = mappings.get(first).filter(|old| first < last && old.start < start) {
            replacement.push(Mapping { end: start, ..old.clone() });
        }
        replacement.push(new);
        if let Some(old) = last
            .checked_sub(1)
            .and_then(|at| mappings.get(at))
            .filter(|old| first < last && old.end > end)
        {
            let file_offset = old.offset(end);
            replacement.push(Mapping { start: end, file_offset, ..old.clone() });
        }
        mappings.splice(first..last, replacement);
        self.version += 1;
    }
}
