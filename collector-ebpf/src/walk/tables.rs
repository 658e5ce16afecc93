//! How unwind tables lie in maps: what the collector writes there and the kernel side searches.
//!
//! process id → its executable mappings by address → the executable's pages of 64 KiB → rows by
//! address → rule. All of it in a few arrays of final size, written through mmap: no capability is
//! needed at run time, and no map is made then.

/// Slots of the table of processes, a power of two.
pub const PROCESS_SLOTS: u32 = 1 << 16;
/// Slots a process may be in, from its first on.
pub const PROCESS_PROBES: u32 = 8;
/// Executable mappings of all processes.
pub const MAPPINGS: u32 = 1 << 17;
/// Executables; number 0 is code that was made at run time and has no file.
pub const EXECUTABLES: u32 = 1 << 13;
/// Pages of 64 KiB, of all executables.
pub const PAGES: u32 = 1 << 17;
/// Rules, of all executables. Number 0 is no rule.
pub const RULES: u32 = 1 << 15;
/// Rows in an entry of their map.
pub const CHUNK: u32 = 1024;
/// Entries of the map of rows: 40 MiB.
pub const CHUNKS: u32 = 10 << 10;

/// Number of anonymous code.
pub const ANONYMOUS: u32 = 0;
/// Flag of a number: code made at run time that its compiler has described. Where there is no rule,
/// it is as `ANONYMOUS`.
pub const DESCRIBED: u32 = 1 << 15;
/// Addresses of such code are cut into windows of so many bytes, each with a table of its own: its
/// offsets are what is below.
pub const WINDOW: u64 = 1 << 33;

/// The slot to look at first.
#[inline(always)]
#[must_use]
pub fn first_slot(pid: u32) -> u32 {
    pid.wrapping_mul(0x9e37_79b1) >> 16 & (PROCESS_SLOTS - 1)
}

/// A process in its slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Process {
    /// See [`process_word`].
    pub word: u64,
    /// When it began to be the program whose mappings these are: [`moment`].
    pub since: u64,
}

/// What a child has of its parent until the collector has heard of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Inherited {
    /// The child, with the mappings its parent has.
    pub process: Process,
    /// When it was written: as soon as mappings have moved it holds no more.
    pub generation: u64,
}

/// A time of `CLOCK_MONOTONIC` in nanoseconds, in units of 1,024 and 42 bits: it comes round after
/// 52 days.
#[inline(always)]
#[must_use]
pub fn moment(time_ns: u64) -> u64 {
    time_ns >> 10 & MOMENT
}

const MOMENT: u64 = (1 << 42) - 1;

/// What the kernel side notes of an exec: who and when.
#[inline(always)]
#[must_use]
pub fn exec_word(pid: u32, time_ns: u64) -> u64 {
    u64::from(pid) << 42 | moment(time_ns)
}

/// Whether mappings that hold since a moment are of the program before an exec that was noted.
#[inline(always)]
#[must_use]
pub fn is_outdated(pid: u32, since: u64, exec: u64) -> bool {
    exec >> 42 == u64::from(pid) && exec.wrapping_sub(since).wrapping_sub(1) & MOMENT < MOMENT / 2
}

/// What is in a process's slot, one word that is replaced at once: pid, first mapping, number of
/// mappings. 0 is an empty slot.
#[inline(always)]
#[must_use]
pub fn process_word(pid: u32, first: u32, count: u32) -> u64 {
    u64::from(pid) << 40 | u64::from(first) << 20 | u64::from(count)
}

/// Pid, first mapping and number of mappings of a slot.
#[inline(always)]
#[must_use]
pub fn process_of(word: u64) -> (u32, u32, u32) {
    ((word >> 40) as u32, (word >> 20) as u32 & 0xf_ffff, word as u32 & 0xf_ffff)
}

/// An executable mapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// See [`mapping_word`].
    pub word: u64,
}

/// What is mapped: number of the executable, and the offset in the file in pages of 4 KiB.
#[inline(always)]
#[must_use]
pub fn mapping_word(executable: u32, file_page: u64) -> u64 {
    u64::from(executable) << 48 | file_page & 0xffff_ffff_ffff
}

/// Number of the executable and offset in the file.
#[inline(always)]
#[must_use]
pub fn mapping_of(word: u64) -> (u32, u64) {
    ((word >> 48) as u32, word << 16 >> 4)
}

/// An executable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Executable {
    /// See [`pages_word`]; with [`state::READY`] only.
    pub pages: u64,
    /// One of [`state`].
    pub state: u64,
    /// How often a frame of it was looked up: who is used least is evicted, who is used most
    /// compiled first.
    pub uses: u64,
    /// Number of the layout of the interpreter it has, see `managed.rs`; 0: none.
    pub layout: u64,
}

/// What is known of an executable.
pub mod state {
    /// Its table is not there yet.
    pub const NOT_YET: u64 = 0;
    /// Its table is there.
    pub const READY: u64 = 1;
    /// There will be none.
    pub const NONE: u64 = 2;
    /// There is none because its user has had their share of the maps.
    pub const OVER_SHARE: u64 = 3;
}

/// Where its pages are: the first, how many, and the number of the first among all pages of its
/// file.
#[inline(always)]
#[must_use]
pub fn pages_word(first: u32, count: u32, base: u32) -> u64 {
    u64::from(first) << 40 | u64::from(count & 0xf_ffff) << 20 | u64::from(base & 0xf_ffff)
}

/// First page, number of pages, number of the first in the file.
#[inline(always)]
#[must_use]
pub fn pages_of(word: u64) -> (u32, u32, u32) {
    ((word >> 40) as u32, (word >> 20) as u32 & 0xf_ffff, word as u32 & 0xf_ffff)
}

/// A page: its first row and how many it has.
#[inline(always)]
#[must_use]
pub fn page_word(first: u32, count: u32) -> u64 {
    u64::from(first) << 32 | u64::from(count)
}

/// First row and number of rows.
#[inline(always)]
#[must_use]
pub fn page_of(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

/// A row: where in its page a rule begins to hold, and which.
#[inline(always)]
#[must_use]
pub fn row(low: u16, rule: u16) -> u32 {
    (low as u32) << 16 | rule as u32
}

#[cfg(not(target_arch = "bpf"))]
mod layout {
    //! What the two compilations must agree on.
    use super::{Executable, Mapping, Process};
    use crate::walk::rule::Rule;
    const _: () = assert!(size_of::<Rule>() == 24 && size_of::<Mapping>() == 24);
    const _: () = assert!(size_of::<Executable>() == 32 && size_of::<Process>() == 16);
}

#[cfg(test)]
mod tests {
    use super::{exec_word, is_outdated, moment};

    #[test]
    fn mappings_are_outdated_by_a_later_exec_of_the_same_process() {
        let outdated = |since, exec| is_outdated(7, moment(since), exec_word(7, exec));
        assert!(outdated(5 << 20, 6 << 20) && !outdated(6 << 20, 5 << 20));
        assert!(!outdated(6 << 20, 6 << 20) && outdated((1 << 52) - 5000, (1 << 52) + 5000));
        assert!(!is_outdated(8, 0, exec_word(7, 6 << 20)) && !is_outdated(7, 9, 0));
    }
}
