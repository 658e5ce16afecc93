//! The unprivileged half of Stackwire: finds names for captured stacks and writes profiles.
//!
//! A sample's way through the files: `server.rs` (gRPC) → `log.rs` (on disk) → `capture.rs`
//! (messages) → `ingest/` (the only reader of the wire) → `profile/` (tables) → `resolve/` (names)
//! → `export/` (pprof, perf.data, folded, flame graph, report). Profiles of others come in through
//! `input/`.
//!
//! ```no_run
//! use stackwire::{Session, export};
//!
//! let session = Session::builder().pid(1234).profile().start()?;
//! std::thread::sleep(std::time::Duration::from_secs(10));
//! let profile = session.stop()?;
//! export::pprof(&profile, &export::PprofOptions::default(), std::fs::File::create("app.pb.gz")?)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A capture taken elsewhere needs no session:
//!
//! ```no_run
//! use stackwire::{Sources, export, read_capture, resolve};
//!
//! let (mut profile, artifacts) = read_capture(std::fs::File::open("host7.stackwire")?)?;
//! resolve(&mut profile, &artifacts, &Sources::default());
//! export::report(&profile, &export::ReportOptions::default(), std::io::stdout())?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod capture;
pub mod compile;
pub mod export;
mod handed;
mod ingest;
mod input;
mod log;
pub mod metrics;
mod pprof_proto;
pub mod profile;
mod resolve;
mod say;
mod serve;
mod server;
mod session;
pub mod table;

pub use capture::{Artifacts, Assembler, CaptureError, read as read_capture, read_into, read_with};
pub use input::{InputError, Inputs};
pub use profile::Profile;
pub use resolve::{
    AddError, Answer, DEBUG_DIR, Debuginfod, DebuginfodError, FetchError, FileError, Sources,
    Symbols, SymbolsError, add_to_cache, build_ids, lay_out, resolve,
};
pub use say::say;
pub use serve::{Config as ServeConfig, ServeError, run as serve};
pub use session::{Builder, Kept, Session, SessionError, Spawned, find_collector};
pub use stackwire_cache as cache;
pub use stackwire_elf::Scratch;
pub use stackwire_model::{Event, Share, Unwind};

/// Version of this crate with the commit it was built from.
pub const VERSION: &str = env!("STACKWIRE_VERSION");

/// Entry points for fuzzing: parsers of what other hosts and other processes wrote.
#[doc(hidden)]
pub mod fuzz {
    /// Reads a capture.
    pub fn capture(bytes: &[u8]) {
        if let Ok((profile, _)) = crate::read_capture(bytes) {
            // What was accepted must be exportable.
            let _ = crate::export::pprof(&profile, &Default::default(), std::io::sink());
            let _ = crate::export::report(&profile, &Default::default(), std::io::sink());
        }
    }

    /// Reads a perf.data, a pprof (not compressed), a profile of gperftools or folded stacks, each
    /// by its reader.
    pub fn perf_data(bytes: &[u8]) {
        if bytes.starts_with(b"PERFILE2") {
            crate::input::fuzz(bytes);
        }
    }

    /// See [`perf_data`].
    pub fn pprof(bytes: &[u8]) {
        crate::input::fuzz_pprof(bytes);
    }

    /// See [`perf_data`].
    pub fn gperftools(bytes: &[u8]) {
        crate::input::fuzz_gperftools(bytes);
    }

    /// See [`perf_data`].
    pub fn folded(bytes: &[u8]) {
        crate::input::fuzz_folded(bytes);
    }

    /// Adds an epoch as it is inside its frame, past checksum and compression.
    pub fn epoch(bytes: &[u8]) {
        let Ok(epoch) = <stackwire_proto::v1::Epoch as prost::Message>::decode(bytes) else {
            return;
        };
        let mut builder = crate::profile::Builder::new();
        if crate::ingest::epoch(&epoch, &Default::default(), &mut builder).is_ok() {
            let profile = builder.build();
            let _ = crate::export::pprof(&profile, &Default::default(), std::io::sink());
            let _ = crate::export::report(&profile, &Default::default(), std::io::sink());
        }
    }

    /// Compiles an ELF file: headers, notes, links, symbols, DWARF, Go's table.
    pub fn elf(bytes: &[u8]) {
        use std::io::Write;

        let Ok(mut file) = tempfile::tempfile() else { return };
        let Ok(()) = file.write_all(bytes) else { return };
        let Ok(elf) = stackwire_elf::Elf::open(file, &Default::default()) else { return };
        let _ = (elf.debug_link(), elf.alt_link(), elf.sha256(), elf.crc());
        let files = crate::compile::Files { executable: Some(&elf), ..Default::default() };
        table(&crate::compile::compile(&files, None).bytes);
    }

    /// Looks up addresses in a table, its checksum made right.
    pub fn table(bytes: &[u8]) {
        let mut bytes = bytes.to_vec();
        if bytes.len() >= 16 {
            let checksum = xxhash_rust::xxh3::xxh3_64(&bytes[16..]);
            bytes[8..16].copy_from_slice(&checksum.to_le_bytes());
        }
        let Ok(table) = crate::table::Table::open(bytes.into()) else { return };
        let _ = (table.best(), table.segments().count());
        for address in [0, 1, 0x1000, 0x1234, 0x40_0000, 0x40_1000, u64::MAX] {
            let _ = table.address_of(address);
            assert!(table.lookup(address).count() <= 1024);
            assert!(table.bounds(address).is_none_or(|bounds| bounds.contains(&address)));
        }
    }

    /// Parses a perf-map.
    pub fn perf_map(bytes: &[u8]) {
        crate::resolve::fuzz_jit(crate::resolve::parse_perf_map, bytes);
    }

    /// Parses a jitdump.
    pub fn jitdump(bytes: &[u8]) {
        crate::resolve::fuzz_jit(crate::resolve::parse_jitdump, bytes);
    }
}
