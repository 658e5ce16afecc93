//! Threads that write the profiles of closed windows: one for each CPU, so that memory does not
//! grow with the number of collectors. They are not nice: on a host that others keep busy they
//! would never be done, and threads that acknowledge sleep most of the time and need not wait.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use stackwire_proto::ReadError;

use super::id::{CaptureId, WindowId};
use super::index::{Due, State};
use super::store::Store;
use super::{Config, profiles};
use crate::capture::{Assembler, CaptureError};
use crate::receive::handed::Handed;
use crate::resolve::Pins;

/// Files that collectors hand over.
#[derive(Debug, Default)]
pub(super) struct AllHanded(Mutex<HandedFiles>);

#[derive(Debug, Default)]
struct HandedFiles {
    /// While a collector may come back.
    by_capture: HashMap<CaptureId, Arc<Handed>>,
    /// Until their windows are resolved.
    by_window: HashMap<WindowId, Arc<Handed>>,
}

/// Most captures whose files are remembered between streams. Beyond that, captures without a stream
/// lose their files: they may never come back.
const MAX_REMEMBERED: usize = 256;

impl AllHanded {
    /// Those of a capture, made if there are none.
    pub(super) fn of(&self, capture: CaptureId, make: impl FnOnce() -> Handed) -> Arc<Handed> {
        let mut all = self.lock();
        if all.by_capture.len() >= MAX_REMEMBERED && !all.by_capture.contains_key(&capture) {
            // Held by no stream.
            all.by_capture.retain(|_, handed| Arc::strong_count(handed) > 1);
        }
        Arc::clone(all.by_capture.entry(capture).or_insert_with(|| Arc::new(make())))
    }

    /// A window is about to be closed.
    pub(super) fn keep_for(&self, window: WindowId, handed: &Arc<Handed>) {
        self.lock().by_window.insert(window, Arc::clone(handed));
    }

    /// A capture has ended.
    pub(super) fn forget(&self, capture: CaptureId) {
        self.lock().by_capture.remove(&capture);
    }

    fn lock(&self) -> MutexGuard<'_, HandedFiles> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the threads share.
#[derive(Debug)]
pub(super) struct Closing {
    pub config: Arc<Config>,
    pub store: Arc<Store>,
    pub pins: Arc<Pins>,
    pub handed: Arc<AllHanded>,
}

impl Closing {
    /// Starts the threads; they end when the store is drained.
    ///
    /// # Errors
    /// When there can be no thread at all.
    pub(super) fn start(self) -> io::Result<Vec<JoinHandle<()>>> {
        let shared = Arc::new(self);
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let mut threads = Vec::new();
        for _ in 0..cpus {
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
        let assembler = Assembler::default();
        let handed = self.handed.lock().by_window.get(&due.id).cloned();
        let assembler = match handed {
            Some(handed) => assembler.beside(handed),
            None => assembler,
        };
        match profiles::write(&self.config, due, assembler, &self.pins) {
            Ok(written) => {
                for (name, _) in &written {
                    tracing::info!("wrote {}", self.config.output_dir.join(name).display());
                }
                self.done(due, State::Written, &written);
            }
            Err(error) if is_final(&error, due.id, &self.config) => {
                tracing::warn!("window {} has no profile: {error}", due.id);
                self.done(due, State::GivenUp, &[]);
            }
            Err(error) => {
                let wait = self.store.failed(due);
                tracing::warn!(
                    "cannot write the profile of window {}: {error}; the next attempt is in {} s",
                    due.id,
                    wait.as_secs()
                );
            }
        }
    }

    fn done(&self, due: Due, state: State, profiles: &[(String, u64)]) {
        self.store.done(due, state, profiles);
        self.handed.lock().by_window.remove(&due.id);
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
