//! What a server keeps of each stream: a log for each window, which is ended and resolved in its
//! time.
//!
//! A window is resolved when the artifacts asked for with it have come. By then the next window has
//! begun. Called by `receive/grpc.rs`, on threads that may block.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use stackwire_elf::Scratch;
use stackwire_proto::v1;
use stackwire_proto::v1::collector_message::Body;

use super::{Config, window};
use crate::capture::Assembler;
use crate::profile::hex;
use crate::receive::grpc::{Accept, Keep, NotKept};
use crate::receive::handed::Handed;
use crate::receive::log::{Answer, Files, Held, Log, LogError, inspect};
use crate::resolve::Pinned;

/// Windows that may be resolved at once before collectors are asked to pause.
const MAX_UNRESOLVED: usize = 4;
/// A window ends early when its log has this many bytes.
const MAX_WINDOW_BYTES: u64 = 512 << 20;
/// How long a collector that came back waits for its old stream to be finished.
const OLD_STREAM: Duration = Duration::from_secs(30);

/// Makes a keeper for each stream.
#[derive(Debug)]
pub(super) struct Keepers {
    config: Arc<Config>,
    shared: Arc<Shared>,
    /// Held by every keeper, so that the server can wait for the last.
    alive: tokio::sync::mpsc::Sender<()>,
}

#[derive(Debug, Default)]
struct Shared {
    unresolved: AtomicUsize,
    /// Captures with a stream: one capture has one at a time.
    streaming: Mutex<HashSet<String>>,
    freed: Condvar,
    /// Files handed over, by capture, until it has ended.
    handed: Mutex<HashMap<String, Arc<Handed>>>,
}

/// Most captures whose files are remembered between streams. Beyond that, captures without a stream
/// lose their files: they may never come back.
const MAX_REMEMBERED: usize = 256;

impl Shared {
    fn handed(&self, capture: &str, scratch: &Scratch) -> Arc<Handed> {
        let mut handed = self.handed.lock().unwrap_or_else(PoisonError::into_inner);
        if handed.len() >= MAX_REMEMBERED && !handed.contains_key(capture) {
            let streaming = self.streaming.lock().unwrap_or_else(PoisonError::into_inner);
            handed.retain(|capture, _| streaming.contains(capture));
        }
        let of_capture = handed.entry(capture.to_owned());
        Arc::clone(of_capture.or_insert_with(|| Arc::new(Handed::new(scratch.clone()))))
    }

    fn forget(&self, capture: &str) {
        self.handed.lock().unwrap_or_else(PoisonError::into_inner).remove(capture);
    }
}

impl Keepers {
    pub(super) fn new(config: Arc<Config>, alive: tokio::sync::mpsc::Sender<()>) -> Self {
        Self { config, shared: Arc::default(), alive }
    }

    /// Finishes what a server before this one left open.
    pub(super) fn finish_old(&self) {
        // One that ended a server while it was resolved would end every server after it.
        for path in window::files(&self.config.log_dir, window::TRIED) {
            window::give_up(&path);
        }
        for path in window::files(&self.config.log_dir, "open") {
            let tried = path.with_extension(window::TRIED);
            match fs::rename(&path, &tried) {
                Ok(()) => window::finish_old(&self.config, &tried),
                Err(_) => window::finish_old(&self.config, &path),
            }
        }
    }
}

impl Accept for Keepers {
    fn accept(
        &self,
        hello: &v1::Hello,
        message: &v1::CollectorMessage,
    ) -> Result<Box<dyn Keep>, NotKept> {
        if hello.capture_id.len() != 16 {
            return Err(NotKept::Refused("a capture id has 16 bytes".to_owned()));
        }
        let epoch = Duration::from_nanos(hello.epoch_ns);
        if epoch > self.config.window {
            let [epoch, window] = [epoch, self.config.window].map(humantime::format_duration);
            return Err(NotKept::Refused(format!(
                "epochs of {epoch} do not fit into windows of {window}: the collector needs shorter ones, or the \
                 server longer ones"
            )));
        }
        let id = hex(&hello.capture_id);
        let turn = Turn::take(Arc::clone(&self.shared), id.clone())?;
        // What is held of the capture from before: of a broken connection, or a server before this
        // one.
        let mut held = Held::default();
        let mut next_window = 0;
        for path in window::files(&self.config.log_dir, "stackwire") {
            let Some((_, number)) = window::parts(&path).filter(|(of, _)| *of == id) else {
                continue;
            };
            next_window = next_window.max(number + 1);
            let found = inspect(&path);
            held.next_epoch = held.next_epoch.max(found.next_epoch);
            held.lost.extend(found.lost);
        }
        let local = fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .is_ok_and(|boot_id| boot_id.trim() == hello.boot_id);
        // A transfer that broke off goes on in this stream.
        let handed = self.shared.handed(&id, &self.config.sources.scratch);
        let mut keeper = Keeper {
            config: Arc::clone(&self.config),
            hello: message.clone(),
            id,
            epoch,
            window: next_window,
            log: None,
            closing: None,
            end: None,
            next_epoch: held.next_epoch,
            lost_before: held.lost,
            local,
            handed,
            turn,
            _alive: self.alive.clone(),
        };
        let opened = keeper.open(Pinned::default());
        opened.map_err(|error| NotKept::Failed(error.to_string()))?;
        Ok(Box::new(keeper))
    }
}

/// The right to write the logs of a capture.
struct Turn {
    shared: Arc<Shared>,
    id: String,
}

impl Turn {
    /// Waits until no other stream of the capture is there.
    fn take(shared: Arc<Shared>, id: String) -> Result<Self, NotKept> {
        let streaming = shared.streaming.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut streaming, waited) = shared
            .freed
            .wait_timeout_while(streaming, OLD_STREAM, |streaming| streaming.contains(&id))
            .unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return Err(NotKept::Failed("this capture is streamed already".to_owned()));
        }
        streaming.insert(id.clone());
        drop(streaming);
        Ok(Self { shared, id })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut streaming = self.shared.streaming.lock().unwrap_or_else(PoisonError::into_inner);
        streaming.remove(&self.id);
        drop(streaming);
        self.shared.freed.notify_all();
    }
}

/// Keeps one stream.
struct Keeper {
    config: Arc<Config>,
    hello: v1::CollectorMessage,
    id: String,
    /// Length of the collector's epochs, zero if it is not told.
    epoch: Duration,
    window: u64,
    log: Option<Log>,
    /// The window before, while artifacts it asked for are on their way.
    closing: Option<Log>,
    /// Came while artifacts were on their way.
    end: Option<v1::End>,
    next_epoch: u64,
    /// Said by windows before this one.
    lost_before: Vec<v1::Lost>,
    local: bool,
    /// Files handed over, in whichever window.
    handed: Arc<Handed>,
    turn: Turn,
    _alive: tokio::sync::mpsc::Sender<()>,
}

impl Keeper {
    fn open(&mut self, pinned: Pinned) -> Result<(), LogError> {
        let cache = self.config.sources.cache.clone();
        // What was opened while its processes lived serves every window after.
        let files = Files { local: self.local, pinned, cache };
        let path = self.config.log_dir.join(format!("{}-{:06}.open", self.id, self.window));
        let assembler = Assembler::default().beside(Arc::clone(&self.handed));
        self.log = Some(Log::create(path, &self.hello, self.next_epoch, files, assembler)?);
        Ok(())
    }

    /// Begins the next window; the one that ends waits for its artifacts.
    fn turn_window(&mut self) -> Result<(), LogError> {
        self.finish_closing()?;
        let Some(log) = self.log.take() else { return Ok(()) };
        self.next_epoch = log.next_epoch;
        self.window += 1;
        let pinned = log.pinned();
        self.lost_before.extend(log.totals().1);
        self.closing = Some(log);
        self.open(pinned)
    }

    fn finish_closing(&mut self) -> Result<(), LogError> {
        let Some(mut log) = self.closing.take() else { return Ok(()) };
        log.end_window(&[])?;
        self.resolve(log);
        Ok(())
    }

    fn resolve(&self, log: Log) {
        let (samples, lost) = log.totals();
        let scheduled = !log.profile().sched.is_empty();
        let closed = log.close();
        if samples == 0 && lost.is_empty() && !scheduled {
            // Nothing happened in it that anyone could miss.
            let _ = fs::remove_file(&closed.path);
            return;
        }
        self.turn.shared.unresolved.fetch_add(1, Ordering::Relaxed);
        window::finish(&self.config, closed);
        self.turn.shared.unresolved.fetch_sub(1, Ordering::Relaxed);
    }

    /// What the capture lost beyond what its windows said.
    fn lost_beyond(&self, total: &[v1::Lost]) -> Vec<v1::Lost> {
        let said = self.log.as_ref().map(|log| log.totals().1).unwrap_or_default();
        let beyond = total.iter().filter_map(|lost| {
            let known =
                said.iter().chain(&self.lost_before).filter(|known| known.reason == lost.reason);
            let known: u64 = known.map(|known| known.count).sum();
            (lost.count > known).then(|| v1::Lost { count: lost.count - known, ..*lost })
        });
        beyond.collect()
    }
}

impl Keep for Keeper {
    fn next_epoch(&self) -> u64 {
        self.next_epoch
    }

    fn add(&mut self, message: &v1::CollectorMessage) -> Result<Answer, LogError> {
        let length = self.config.window.as_nanos() as u64;
        match &message.body {
            Some(Body::Epoch(_)) => {
                // Epochs are not split: where they do not fill a window exactly, it ends with the
                // one that comes nearest.
                let half = self.epoch.as_nanos() as u64 / 2;
                let full = self.log.as_ref().is_some_and(|log| {
                    log.span.is_some_and(|(start, end)| end.saturating_sub(start) + half >= length)
                        || log.bytes > MAX_WINDOW_BYTES
                });
                if full {
                    self.turn_window()?;
                }
            }
            Some(Body::Artifact(_)) => {
                if let Some(closing) = &mut self.closing {
                    closing.add(message)?;
                    if closing.has_its_artifacts() {
                        self.finish_closing()?;
                    }
                }
            }
            // Of the whole capture; a window among several gets an end of its own, in `finish`,
            // when the artifacts have come as well.
            Some(Body::End(end)) if self.window > 0 => {
                self.end = Some(end.clone());
                return Ok(Answer::default());
            }
            _ => {}
        }
        self.log.as_mut().map_or(Ok(Answer::default()), |log| log.add(message))
    }

    fn pause(&self) -> Option<Duration> {
        let unresolved = self.turn.shared.unresolved.load(Ordering::Relaxed);
        (unresolved > MAX_UNRESOLVED).then_some(Duration::from_secs(1))
    }

    fn finish(mut self: Box<Self>) {
        // A log that cannot be ended is resolved as what it is: one without an end.
        let _ = self.finish_closing();
        let end = self.end.take();
        let beyond = end.map(|end| self.lost_beyond(&end.lost));
        let Some(mut log) = self.log.take() else { return };
        if beyond.is_some() || log.has_ended() {
            self.turn.shared.forget(&self.id);
        }
        if let Some(beyond) = beyond {
            let _ = log.end_window(&beyond);
        }
        self.resolve(log);
    }
}
