//! The privileged half of Stackwire: samples stacks with eBPF and streams them unsymbolized.
//!
//! A sample's way through the files: `sampler/` (rings) → `sources/` (records) →
//! `pipeline.rs` (merge by time) → `process/` (what was mapped) → `normalize.rs` (address →
//! executable and offset) → `batch.rs` (epoch) → `wire.rs` (message) → `outbox.rs` (queue) →
//! `sink/` (file or gRPC).
//!
//! Parses no ELF, listens nowhere. Files of others are opened by the broker (`helpers/`), a process
//! of its own, and sent unread when the symbolizer asks (`handover.rs`).
//!
//! ```no_run
//! use stackwire_collector::Session;
//!
//! let file = std::fs::File::create("app.stackwire")?;
//! let session = Session::builder().pid(1234).profile().sample_rate(199).start(file)?;
//! std::thread::sleep(std::time::Duration::from_secs(10));
//! let summary = session.stop()?;
//! println!("{} samples", summary.delivered);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod adding;
mod arch;
mod artifact;
mod batch;
mod clock;
mod codes;
mod config;
mod context;
mod count;
mod cpu_time;
mod definitions;

mod handover;
mod helpers;
mod host;
mod in_time;
mod late;
mod list;
mod managed;
mod normalize;
mod off_cpu;
mod outbox;
mod perf_samples;
mod pipeline;
mod priority;
mod process;
mod python;
mod replay;
mod sampler;
mod sched;
mod scheduling;
mod scripts;
mod session;
mod sink;
mod sources;
mod summary;
mod unwind;
mod waits;
mod wire;

pub use config::{Config, ConfigError, Destination, Scope};
pub use count::{Count, CountError, Counters, Counting};
pub use list::{Listed, list_events};
pub use outbox::Limits;
pub use replay::{Progress, Replay, ReplayConfig};
pub use sampler::SamplerError;
pub use session::{Builder, Helpers, Session, SessionError};
pub use sink::{Address, AddressError, Broken, Credentials, SinkError, Target};
pub use sources::tracepoint::TracepointError;
pub use stackwire_model::{
    AddUp, Choice, Event, LostReason, OffCpu, Share, Source, StackCopies, Unwind, WaitState,
};
pub use stackwire_rights::capabilities::drop_all as drop_capabilities;
pub use summary::Summary;
pub use unwind::Stats as TableStats;

/// Version of this crate with the commit it was built from.
pub const VERSION: &str = env!("STACKWIRE_VERSION");

/// Entry points for fuzzing: parsers of what other processes or the kernel wrote. For `fuzz/`.
#[cfg(feature = "fuzzing")]
pub mod fuzz {
    /// Looks for the functions of an interpreter in a file.
    pub fn interpreter(bytes: &[u8]) {
        use std::io::Write;
        let memory = rustix::fs::memfd_create(c"fuzz", rustix::fs::MemfdFlags::CLOEXEC);
        let mut file = std::fs::File::from(memory.expect("a memfd"));
        file.write_all(bytes).expect("memory");
        let _ = crate::helpers::interpreter::Interpreter::find(&file);
    }

    /// Decodes a ring record.
    pub fn ring_record(bytes: &[u8]) {
        let _ = crate::sources::record::decode(bytes, &mut Vec::new());
        let _ = crate::sources::side_band::decode(bytes);
        let _ = crate::sources::side_band::forked(bytes);
        for stack_bytes in [0, 8] {
            let kernel = crate::sources::perf_event::Kernel::WithStacks;
            for period in [None, Some(1)] {
                use crate::sources::perf_event::Contents;
                let contents = Contents { kernel, stack_bytes, cgroup: true, period };
                let _ = crate::sources::perf_sample::PerfSample::decode(bytes, &contents);
            }
        }
    }
}
