//! What the walk and the programs know of the processor: its registers, the frames the kernel makes
//! for signals, how its code begins, returns and calls. A directory a processor; nothing outside
//! asks which it is.

mod x86_64;

#[cfg(target_arch = "bpf")]
pub use self::x86_64::saved;
pub use self::x86_64::{
    Edge, GOROUTINE, LEFT_STACK, PERF_IP, PERF_REGISTERS, R12, RAX, RBP, RBX, REGISTERS, RSP,
    SIGNAL_FRAME, SignalFrame, edge, follows_call, interrupted,
};
