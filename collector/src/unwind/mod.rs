//! Unwind tables at run time: which are wanted, where they come from, how they get into the kernel
//! side's maps.
//!
//! `processes.rs` tells what is mapped where, `known.rs` which file is which executable,
//! `catalog.rs` numbers executables and lays out their tables, `loader.rs` brings them from
//! `disk.rs` or from the unwind compiler (`helpers/`), a process without privileges; `no_table.rs`
//! has the reasons why there is none, and `no_layout.rs` why frames of an interpreter are not seen.
//! `copied.rs` walks copied stacks by the same tables,
//! which `reader.rs` reads; `code.rs` reads code for it. Called by `session.rs` and `pipeline.rs`.

mod catalog;
mod code;
mod copied;
mod disk;
mod known;
mod loader;
mod maps;
mod no_layout;
mod no_table;
mod owner;
mod processes;
mod reader;
mod rules;
mod space;

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use self::catalog::Catalog;
pub use self::catalog::Stats;
pub use self::code::Code;
pub use self::copied::{CopiedStacks, Of, Tally};
use self::loader::Loader;
pub use self::maps::Descriptors;
pub use self::no_layout::NoLayout;
pub use self::no_table::NoTable;
pub use self::processes::Held;
use self::processes::Published;
use crate::clock::now_ns;
use crate::helpers::broker::Broker;
use crate::helpers::compiler::Compiler;
use crate::process::executable::Kind;
use crate::process::{Mapping, Processes};
use crate::sources::side_band::Event;

/// How long a capture of single processes waits for their tables before the first sample.
const WARM_UP: Duration = Duration::from_millis(100);

/// What tables are made with.
#[derive(Debug)]
pub struct Sources {
    /// Opens files.
    pub broker: Arc<Broker>,
    /// Compile them, one at a time each.
    pub compilers: Vec<Compiler>,
    /// Where tables are kept from run to run.
    pub cache: Option<PathBuf>,
}

/// The unwind tables of a capture.
#[derive(Debug)]
pub struct Unwind {
    published: Published,
    catalog: Arc<Catalog>,
    /// Processes for which the kernel side was told the effect of events that are not applied yet.
    told_ahead: HashSet<u32>,
    /// Ends the loading threads. They may be waiting for a file that does not come, for seconds:
    /// nobody waits for it.
    stop: Arc<AtomicBool>,
}

impl Unwind {
    /// Tells the kernel side of all processes known by now, and starts to bring tables. `warm`:
    /// those of all that is mapped by now or later, and waits a moment for the first.
    ///
    /// # Errors
    /// When the maps cannot be written, or there is no thread to be had.
    pub fn start(
        maps: Descriptors,
        sources: Sources,
        processes: &mut Processes,
        warm: bool,
    ) -> io::Result<Self> {
        let (process_maps, table_maps, keys) = maps::open(maps)?;
        let keys = Arc::new(keys);
        let catalog = Arc::new(Catalog::new(table_maps));
        let mut published = Published::new(process_maps, Arc::clone(&catalog));
        processes.walk_by_tables();
        published.update(processes);
        catalog.begin();
        let stop = Arc::new(AtomicBool::new(false));
        let Sources { broker, compilers, cache } = sources;
        let (told, warmed) = mpsc::channel();
        for (index, compiler) in compilers.into_iter().enumerate() {
            let loader = Loader {
                catalog: Arc::clone(&catalog),
                broker: Arc::clone(&broker),
                keys: Arc::clone(&keys),
                compiler,
                cache: cache.clone(),
                is_first: index == 0,
                stop: Arc::clone(&stop),
            };
            let told = warm.then(|| told.clone());
            std::thread::Builder::new()
                .name("tables".to_owned())
                .spawn(move || loader.run(told))?;
        }
        if warm {
            // In time or not, sampling begins.
            let _ = warmed.recv_timeout(WARM_UP);
        }
        Ok(Self { published, catalog, told_ahead: HashSet::new(), stop })
    }

    /// Tells the kernel side what has changed, and in a `hurry` what `ahead` is going to change.
    pub fn update(&mut self, processes: &mut Processes, ahead: &[Event], hurry: bool) {
        self.published.update(processes);
        processes.told(now_ns());
        // What was told ahead must not be taken back by what is older.
        self.told_ahead.retain(|pid| ahead.iter().any(|event| event.pid == *pid));
        if hurry {
            self.told_ahead.extend(ahead.iter().map(|event| event.pid));
        }
        if !self.told_ahead.is_empty() {
            self.published.preview(processes, ahead, &self.told_ahead);
        }
    }

    /// See [`Published::hold`].
    pub fn hold(&mut self, pid: u32, mappings: &Rc<Vec<Mapping>>) -> Option<Held> {
        self.published.hold(pid, mappings)
    }

    /// See [`Published::release_held`].
    pub fn release(&mut self, held: Held) {
        self.published.release_held(held);
    }

    /// Forgets processes that were forgotten.
    pub fn end_epoch(&mut self, processes: &Processes) {
        self.published.retain(processes);
    }

    /// Why there is no table of an executable, if there will be none.
    #[must_use]
    pub fn missing(&self, kind: &Kind) -> Option<Arc<NoTable>> {
        self.catalog.missing(kind)
    }

    /// Offsets in an executable of the code that Go compiled; empty: it has none, or that is not
    /// known now.
    #[must_use]
    pub fn go_code(&self, kind: &Kind) -> Range<u64> {
        self.catalog.go_code(kind)
    }

    /// Why the functions that an interpreter runs are not seen.
    #[must_use]
    pub fn no_layout(&self, kind: &Kind) -> Option<NoLayout> {
        self.catalog.no_layout(kind)
    }

    /// What became of tables so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.catalog.stats()
    }
}

impl Drop for Unwind {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
