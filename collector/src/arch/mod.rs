//! What the collector knows of the processor it runs on: a file a processor, each with the same
//! words. Nothing outside asks which it is.

#[cfg(target_arch = "aarch64")]
mod aarch64;
pub mod call;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub use self::aarch64::{
    MACHINE, OBJECT, OLDER_CALLS, OPENING_CALLS, SECCOMP, THREAD_POINTER, frame, is_interrupt_entry,
};
#[cfg(target_arch = "x86_64")]
pub use self::x86_64::{
    MACHINE, OBJECT, OLDER_CALLS, OPENING_CALLS, SECCOMP, THREAD_POINTER, frame, is_interrupt_entry,
};
