//! Threads that write the profiles of closed windows: one for each CPU that there is memory for,
//! whatever the number of collectors. They are not nice: on a host that others keep busy they
//! would never be done, and threads that acknowledge sleep most of the time and need not wait.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use stackwire_proto::ReadError;

use super::counts::{Counts, Outcome};
use super::id::WindowId;
use super::index::{Due, State};
use super::limits::{Ledger, RESOLVED};
use super::store::Store;
use super::{Config, profiles};
use crate::capture::{Assembler, CaptureError};
use crate::receive::handed::Handed;
use crate::receive::tenant::Tenant;
use crate::resolve::Pins;

/// What the threads share.
#[derive(Debug)]
pub(super) struct Closing {
    pub config: Arc<Config>,
    pub store: Arc<Store>,
    pub counts: Counts,
    pub ledger: Arc<Ledger>,
    pub pins: Arc<Pins>,
}

impl Closing {
    /// Starts the threads; they end when the store is drained.
    ///
    /// # Errors
    /// When there can be no thread at all.
    pub(super) fn start(self) -> io::Result<Vec<JoinHandle<()>>> {
        let shared = Arc::new(self);
        let mut threads = Vec::new();
        for _ in 0..shared.config.limits.closings() {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name("close".to_owned());
            match thread.spawn(move || shared.run()) {
                Ok(thread) => threads.push(thread),
                Err(error) if threads.is_empty() => return Err(error),
                Err(error) => tracing::warn!("fewer windows are resolved at a time: {error}"),
            }
        }
        Ok(threads)
    }

    fn run(&self) {
        while let Some(due) = self.store.next_due() {
            self.write(due);
        }
    }

    fn write(&self, due: Due) {
        let sources = &self.config.sources;
        // Of a capture whose owner is not known, what came with it.
        let tenant = due
            .owner
            .clone()
            .map_or_else(Tenant::default, |owner| Tenant { owner, cache: sources.cache.clone() });
        let handed = Handed::new(sources.scratch.clone(), tenant);
        let assembler = Assembler::default().beside(Arc::new(handed));
        // One that is larger than all of it is resolved alone.
        let _memory = self.ledger.resolving.take(due.memory.saturating_mul(RESOLVED));
        let begun = Instant::now();
        let written = profiles::write(&self.config, &due, assembler, &self.pins);
        let count = |outcome| self.counts.window(outcome, begun.elapsed());
        match written {
            Ok(written) => {
                for (name, _) in &written {
                    let path = self.config.output_dir.join(name);
                    let path = path.display();
                    tracing::info!(window = %due.id, client = due.owner, %path, "wrote {path}");
                }
                count(Outcome::Written);
                self.store.done(&due, State::Written, &written);
            }
            Err(error) if is_final(&error, due.id, &self.config) => {
                let window = due.id;
                tracing::warn!(%window, client = due.owner, "window {window} has no profile: {error}");
                count(Outcome::GivenUp);
                self.store.done(&due, State::GivenUp, &[]);
            }
            Err(error) => {
                count(Outcome::Failed);
                let wait = self.store.failed(&due);
                let (window, wait) = (due.id, wait.as_secs());
                tracing::warn!(
                    %window,
                    client = due.owner,
                    wait,
                    "cannot write the profile of window {window}: {error}; the next attempt is in {wait} s"
                );
            }
        }
    }
}

/// The log was removed, or is damaged: it will not be better later.
fn is_final(error: &anyhow::Error, id: WindowId, config: &Config) -> bool {
    let damaged = match error.downcast_ref::<CaptureError>() {
        Some(CaptureError::Read(ReadError::Io(_))) | None => false,
        Some(_) => true,
    };
    damaged
        || std::fs::metadata(id.log(&config.log_dir))
            .is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
}
