//! The unprivileged half of Stackwire: finds names for captured stacks and writes profiles.
//!
//! A sample's way through the files: `receive/` (gRPC, then on disk) → `capture.rs` (messages)
//! → `ingest/` (the only reader of the wire) → `Profile` of the crate `model` (tables) →
//! `resolve/` (names, by the crate `symbols`) → the crate `formats` (pprof, perf.data, folded,
//! flame graph, report). Profiles of others come in through `input.rs`, read by the same crate.
//!
//! ```no_run
//! use stackwire::{Session, formats};
//!
//! let session = Session::builder().pid(1234).profile().start()?;
//! std::thread::sleep(std::time::Duration::from_secs(10));
//! let (profile, names) = session.stop()?;
//! let out = std::fs::File::create("app.pb.gz")?;
//! formats::pprof::write(names.of(&profile), &Default::default(), out)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A capture taken elsewhere needs no session:
//!
//! ```no_run
//! use stackwire::{Sources, formats, profile::unite, read_capture, resolve};
//!
//! let (mut profile, artifacts) = read_capture(std::fs::File::open("host7.stackwire")?)?;
//! let names = resolve(&profile, &artifacts, &Sources::default());
//! unite(&mut profile, &names); // places in code made at run time, which have a time until now
//! formats::report::write(names.of(&profile), &Default::default(), std::io::stdout())?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! What goes wrong beside a capture is told as events of `tracing`.

mod artifacts;
mod capture;
mod causes;
mod few;
#[cfg(feature = "fuzzing")]
pub mod fuzz;
mod here;
mod ingest;
mod input;
pub mod labels;
pub mod metrics;
mod receive;
mod resolve;
mod serve;
mod session;

pub use artifacts::Artifacts;
pub use capture::{Assembler, CaptureError, read as read_capture, read_into, read_with};
pub use input::{InputError, Inputs};
pub use resolve::{
    AddError, Answer, DEBUG_DIR, Debuginfod, DebuginfodError, FileError, Sources, Symbols,
    SymbolsError, add_to_cache, build_ids, lay_out, resolve,
};
pub use serve::{
    Allowed, Capture, Captures, Config as ServeConfig, Format as FetchFormat, Keep, Limits, Listen,
    Pyroscope, ServeError, Tls, Windows, run as serve,
};
pub use session::{
    Builder, Kept, MetricsExporter, Session, SessionError, Spawned, WriteExporter, find_collector,
};
pub use stackwire_cache as cache;
pub use stackwire_elf::Scratch;
pub use stackwire_formats as formats;
pub use stackwire_model::profile::Names;
pub use stackwire_model::{
    AddUp, Choice, ContainerId, Event, Groups, OffCpu, PodUid, Profile, Share, Source, StackCopies,
    Unwind, VirtAddr, WaitState, profile,
};

/// Version of this crate with the commit it was built from.
pub const VERSION: &str = env!("STACKWIRE_VERSION");
