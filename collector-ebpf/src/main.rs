//! The eBPF object: a perf_event program that samples, in steps, and tracepoint programs that watch
//! forks and execs.
//!
//! On the host this is an empty program, so that `cargo build --workspace` works; `make ebpf`
//! builds the real one. Loaded and attached by `collector/src/sampler/`.

#![cfg_attr(target_arch = "bpf", no_std, no_main, feature(asm_experimental_arch))]

#[cfg(target_arch = "bpf")]
mod atomic;
#[cfg(target_arch = "bpf")]
mod hash;
#[cfg(target_arch = "bpf")]
mod maps;
#[cfg(target_arch = "bpf")]
mod processes;
#[cfg(target_arch = "bpf")]
mod sources {
    pub mod off_cpu;
    pub mod perf_event;
    pub mod scheduler;
    pub mod wakers;
}
#[cfg(target_arch = "bpf")]
mod targets;
#[cfg(target_arch = "bpf")]
mod task;
#[cfg(target_arch = "bpf")]
mod told;
#[cfg(target_arch = "bpf")]
mod walk {
    pub mod by_control_frames;
    pub mod by_frame_list;
    pub mod by_frame_pointers;
    pub mod by_frames_of_v8;
    pub mod by_tables;
    pub mod code_objects;
    pub mod copy;
    pub mod entries;
    pub mod functions;
    pub mod goroutine;
    pub mod lists;
    pub mod names;
    pub mod objects;
    pub mod pointers;
    pub mod remembered;
    pub mod scripts;
    pub mod sequences;
    pub mod stacks;
    pub mod tree;
}

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// `Dual MIT/GPL`: the helpers that read memory and stacks are GPL-only.
#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[cfg(not(target_arch = "bpf"))]
fn main() {}
