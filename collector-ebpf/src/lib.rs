//! What the eBPF programs share with the collector and the unwind compiler: records and
//! configuration, the tables programs search, the step up a stack.
//!
//! Compiled twice, for `bpfel-unknown-none` and for the host, from these files. The programs are in
//! `main.rs` and the files it names, the only host-side decoder of records in
//! `collector/src/sources/record.rs`.

#![cfg_attr(target_arch = "bpf", no_std, feature(asm_experimental_arch))]

pub mod arch;
pub mod cpython;
pub mod managed;
mod picker;
mod record;
pub mod ruby;
pub mod sched_stats;
pub mod v8;
mod wait;
/// What walking by tables takes: the tables, a rule, the step, the kernel's tree of mappings.
mod walk {
    #[cfg(not(target_arch = "bpf"))]
    pub mod copied;
    pub mod frame;
    pub mod handed_over;
    pub mod masked;
    pub mod memory;
    pub mod rule;
    pub mod tables;
    pub mod unwind;
    pub mod vma;
}

pub use picker::Picker;
pub use record::{
    ANY_LEVEL, COPY, COUNTERS_PER_CPU, Config, Counter, INTERRUPTED, KernelEnd, LIST, MAX_CPUS,
    MAX_EVENTS, MAX_KERNEL_FRAMES, MAX_TARGETS, MAX_USER_FRAMES, PICK, RING_BYTES, RecordKind,
    SAMPLE, SampleHeader, Scope, Unwind, UserEnd, WAIT_COPY, WAIT_LIST, WALK,
};
pub use wait::{
    MAX_WAITING, Stratum, TOLD_STACKS, WAIT_WORDS, WOKEN_WORDS, Wait, WaitState, Waiting, Waker,
    Woken, waits_behind,
};
#[cfg(not(target_arch = "bpf"))]
pub use walk::copied::CopiedStack;
pub use walk::handed_over::{CopyHead, MAX_COPY_BYTES, OF_LEFT, OF_POINTER, PARTS, Part};
pub use walk::masked::masked;
pub use walk::memory::Memory;
pub use walk::rule::{NO_RULE, Rule, cfa, fp, ra};
pub use walk::{frame, tables, unwind, vma};
