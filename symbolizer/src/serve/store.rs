//! What a server keeps on disk: logs of windows, the index of them, profiles. Begins and closes
//! windows, and decides when there is room for one.
//!
//! A window is in the index before its log is made, and its log is whole before the index says so.
//! A restart at any point finds either, and goes on from there. Nothing here reads what a log is
//! about. What becomes of closed windows is in `queue.rs`, what is removed in `retention.rs`.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::mem::Discriminant;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use stackwire_proto::v1;
use stackwire_proto::v1::collector_message::Body;

use super::ServeError;
use super::counts::Now;
use super::id::{CaptureId, EXTENSION, WindowId};
use super::identity::Identity;
use super::index::{Before, Due, Index, State};
use crate::receive::log::{Log, recover};

/// How much is kept, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct Keep {
    /// Bytes; the oldest go first.
    pub bytes: u64,
    /// Time since it was written, if that matters.
    pub age: Option<Duration>,
}

/// Where things are kept, and how much of them.
#[derive(Clone, Debug)]
pub(super) struct Places {
    pub logs: PathBuf,
    pub profiles: PathBuf,
    pub keep_logs: Keep,
    pub keep_profiles: Keep,
    /// Profiles are pushed, too.
    pub is_pushing: bool,
}

/// Something cannot be done now.
#[derive(Debug, thiserror::Error)]
pub(super) enum StoreError {
    #[error(
        "the disk of {path} is full: {free} MiB are free of the {least} MiB that are kept free"
    )]
    Full { path: PathBuf, free: u64, least: u64 },
    #[error("{bytes} MiB of windows wait to be resolved, and no more than --log-max may")]
    Behind { bytes: u64 },
    #[error("this capture was begun by somebody else")]
    NotTheirs,
    #[error("cannot use the index of windows: {0}")]
    Index(#[from] rusqlite::Error),
    #[error("cannot use the directory {path}: {error}")]
    Directory { path: PathBuf, error: io::Error },
    #[error(transparent)]
    Log(#[from] crate::receive::log::LogError),
    #[error(transparent)]
    Unusable(#[from] ServeError),
}

/// See the top of this file.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) places: Places,
    inner: Mutex<Inner>,
    pub(super) changed: Condvar,
    /// There is a profile to push.
    pub(super) written: Condvar,
    /// Held while windows without a stream are closed: what is known of a capture is known after.
    closing: Mutex<()>,
    /// What was wrong when it was said last.
    said: Mutex<Option<(Discriminant<StoreError>, Instant)>>,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub index: Index,
    /// Two servers in one directory would finish each other's windows.
    lock: File,
    /// Windows that streams of this server add to.
    live: HashSet<WindowId>,
    /// Windows a server before this one left open, by capture.
    pub orphans: HashMap<CaptureId, Vec<WindowId>>,
    /// Windows whose streams are over, and which could not be closed.
    pub unclosed: Vec<Unclosed>,
    pub working: HashMap<WindowId, Due>,
    /// Bytes of logs of windows that are done with, and of those that are closed and are not.
    pub done: u64,
    pub waiting: u64,
    pub profiles: u64,
    /// No window is taken any more.
    pub stopping: bool,
    pub no_push_before: Option<Instant>,
    /// Profiles that are to be pushed.
    pub pushes: u64,
    pub swept: Instant,
}

#[derive(Debug)]
pub(super) struct Unclosed {
    id: WindowId,
    log: Log,
    more: Vec<v1::Lost>,
}

/// Free space that logs leave to the index and to profiles: a twentieth of a small disk.
const LEAST_FREE: u64 = 64 << 20;
/// Held by the server of a directory.
const LOCK: &str = "lock";
/// How often the same trouble is told.
const SAY_AGAIN: Duration = Duration::from_secs(60);

impl Store {
    /// Opens what is there.
    ///
    /// # Errors
    /// When a directory, the lock or the index cannot be had.
    pub(super) fn open(places: Places) -> Result<Self, ServeError> {
        let mut inner = Inner::open(&places, HashSet::new())?;
        if !places.is_pushing {
            let forgotten = inner.index.forget_pushes();
            forgotten.map_err(|error| ServeError::Index(error.to_string()))?;
            if inner.pushes > 0 {
                tracing::warn!(
                    "{} profiles were to be pushed by a server before this one, and are not: this one does not push",
                    inner.pushes
                );
            }
            inner.pushes = 0;
        }
        Ok(Self {
            places,
            inner: Mutex::new(inner),
            changed: Condvar::new(),
            written: Condvar::new(),
            closing: Mutex::default(),
            said: Mutex::default(),
        })
    }

    /// Whether a window may grow.
    ///
    /// # Errors
    /// Why it may not now.
    pub(super) fn room(&self) -> Result<(), StoreError> {
        let bytes = self.lock().waiting;
        if bytes > self.places.keep_logs.bytes {
            return Err(StoreError::Behind { bytes: bytes >> 20 });
        }
        let path = &self.places.logs;
        // A directory that is gone is made again when a window begins.
        let Ok(found) = rustix::fs::statvfs(path) else { return Ok(()) };
        let least = LEAST_FREE.min(found.f_blocks.saturating_mul(found.f_frsize) / 20);
        let free = found.f_bavail.saturating_mul(found.f_frsize);
        if free < least {
            let path = path.clone();
            return Err(StoreError::Full { path, free: free >> 20, least: least >> 20 });
        }
        Ok(())
    }

    /// The index, for questions.
    pub(super) fn reader(&self) -> Result<Index, StoreError> {
        Ok(Index::reader(&self.places.logs)?)
    }

    /// How much there is.
    pub(super) fn now(&self) -> Now {
        let inner = self.lock();
        Now {
            open: inner.live.len() as u64,
            // An index that cannot be used is told elsewhere.
            waiting: inner.index.waiting().unwrap_or(0),
            log_bytes: inner.done,
            waiting_bytes: inner.waiting,
            profile_bytes: inner.profiles,
            pushes: inner.pushes,
            ..Now::default()
        }
    }

    /// What is known of a capture. Windows of it that have no stream any more are closed first.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub(super) fn before(
        &self,
        capture: CaptureId,
        owner: &Identity,
        hello: &v1::Hello,
    ) -> Result<Before, StoreError> {
        // An index that is made again finds windows that are to be closed.
        drop(self.usable()?);
        self.close_left(capture)?;
        let owner = owner.to_string();
        let before = self.usable()?.index.claim(capture, &owner, hello)?;
        if before.owner == owner { Ok(before) } else { Err(StoreError::NotTheirs) }
    }

    /// Closes windows of a capture that could not be closed, or that a server before this one left
    /// open.
    fn close_left(&self, capture: CaptureId) -> Result<(), StoreError> {
        let _closing = self.closing.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let mut inner = self.lock();
            let is_meant = |it: &mut Unclosed| it.id.capture == capture;
            let unclosed = inner.unclosed.extract_if(.., is_meant).next();
            if let Some(mut it) = unclosed {
                drop(inner);
                if let Err(error) = self.close(it.id, &mut it.log, &it.more) {
                    self.lock().unclosed.push(it);
                    return Err(error);
                }
                continue;
            }
            let Some(&id) = inner.orphans.get(&capture).and_then(|of| of.last()) else {
                inner.orphans.remove(&capture);
                return Ok(());
            };
            drop(inner);
            self.close_orphan(id)?;
            if let Some(of_capture) = self.lock().orphans.get_mut(&capture) {
                of_capture.retain(|orphan| *orphan != id);
            }
        }
    }

    /// The same, of whichever capture. False when there is none, or when it cannot be done now.
    pub(super) fn close_one(&self) -> bool {
        let inner = self.lock();
        let orphan = inner.orphans.keys().next().copied();
        let unclosed = inner.unclosed.first().map(|it| it.id.capture);
        drop(inner);
        let Some(capture) = orphan.or(unclosed) else { return false };
        self.close_left(capture)
            .inspect_err(|error| self.warn("cannot close a window", error))
            .is_ok()
    }

    /// Says what is wrong, and not again within a minute: it is tried each second.
    pub(super) fn warn(&self, what: &str, error: &StoreError) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let kind = std::mem::discriminant(error);
        if said.is_none_or(|(before, at)| before != kind || at.elapsed() > SAY_AGAIN) {
            tracing::warn!("{what}: {error}; it is tried again");
            *said = Some((kind, Instant::now()));
        }
    }

    fn close_orphan(&self, id: WindowId) -> Result<(), StoreError> {
        let path = id.log(&self.places.logs);
        match recover(&path) {
            Ok(mut log) => self.close(id, &mut log, &[]),
            // Nothing was acknowledged of a window whose log was never made or begun.
            Err(failed) if failed.error.kind() == io::ErrorKind::NotFound => {
                Ok(self.usable()?.index.forget(id)?)
            }
            Err(failed) if failed.error.kind() == io::ErrorKind::InvalidData => {
                let is_empty = fs::metadata(&path).is_ok_and(|found| found.len() == 0);
                if is_empty {
                    return self.discard(id);
                }
                tracing::warn!("{failed}: it is kept, without a profile");
                Ok(self.usable()?.index.done(id, State::GivenUp, &[], false).map(|_| ())?)
            }
            Err(failed) => Err(failed.into()),
        }
    }

    /// Begins a window.
    ///
    /// # Errors
    /// See [`StoreError`]. Then there is no such window, and it may be tried again.
    pub(super) fn begin(
        &self,
        id: WindowId,
        owner: &Identity,
        hello: &v1::CollectorMessage,
    ) -> Result<Log, StoreError> {
        self.room()?;
        let mut inner = self.usable()?;
        // Silent for so long that it was forgotten, or of an index that is gone.
        if let Some(Body::Hello(hello)) = &hello.body
            && !inner.index.is_known(id.capture)?
        {
            inner.index.claim(id.capture, &owner.to_string(), hello)?;
        }
        inner.index.begin(id)?;
        drop(inner);
        match Log::create(id.log(&self.places.logs), hello) {
            Ok(log) => match sync_directory(&self.places.logs) {
                Ok(()) => {
                    self.lock().live.insert(id);
                    Ok(log)
                }
                Err(error) => self.discard(id).and(Err(error)),
            },
            Err(failed) if failed.error.kind() == io::ErrorKind::AlreadyExists => {
                // Of an index that is lost. It may hold what was acknowledged.
                self.lock().orphans.entry(id.capture).or_default().push(id);
                Err(failed.into())
            }
            Err(failed) => {
                self.usable()?.index.forget(id)?;
                Err(failed.into())
            }
        }
    }

    /// Closes a window, or does so as soon as it can be done; what was lost beside what its epochs
    /// say is `more`.
    pub(super) fn close_later(&self, id: WindowId, mut log: Log, more: Vec<v1::Lost>) {
        if let Err(error) = self.close(id, &mut log, &more) {
            self.warn("cannot close a window", &error);
            self.lock().unclosed.push(Unclosed { id, log, more });
        }
    }

    /// Closes a window; what was lost beside what its epochs say is `more`.
    ///
    /// # Errors
    /// See [`StoreError`]. It may be tried again.
    pub(super) fn close(
        &self,
        id: WindowId,
        log: &mut Log,
        more: &[v1::Lost],
    ) -> Result<(), StoreError> {
        if log.is_removed() {
            tracing::warn!(
                "{} was removed: {} samples that were acknowledged are lost",
                log.path().display(),
                log.tally().samples
            );
            let mut inner = self.usable()?;
            inner.live.remove(&id);
            return Ok(inner.index.forget(id)?);
        }
        if log.tally().is_empty() && more.is_empty() {
            // Nothing happened in it that anyone could miss. Its epochs must not come again.
            self.usable()?.index.close(id, 0, log.tally(), None)?;
            return self.discard(id);
        }
        log.end_window(more)?;
        let mut inner = self.usable()?;
        inner.index.close(id, log.bytes(), log.tally(), log.span_ms())?;
        inner.live.remove(&id);
        inner.waiting += log.bytes();
        drop(inner);
        self.changed.notify_one();
        Ok(())
    }

    fn discard(&self, id: WindowId) -> Result<(), StoreError> {
        let path = id.log(&self.places.logs);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(StoreError::Directory { path, error })
            }
            _ => {
                let mut inner = self.usable()?;
                inner.live.remove(&id);
                Ok(inner.index.forget(id)?)
            }
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic elsewhere leaves it whole: the index has transactions.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The index, made again if its directory was removed.
    pub(super) fn usable(&self) -> Result<MutexGuard<'_, Inner>, StoreError> {
        let mut inner = self.lock();
        if !inner.index.is_there() {
            tracing::warn!(
                "{} was removed: what was in it is lost, and it is made again",
                self.places.logs.display()
            );
            inner.open_again(&self.places)?;
        }
        Ok(inner)
    }
}

impl Inner {
    /// `live`: windows that streams add to, and that are nobody's to close.
    fn open(places: &Places, live: HashSet<WindowId>) -> Result<Self, ServeError> {
        for path in [&places.profiles, &places.logs] {
            make_directory(path)?;
            // Perhaps made by a server that was killed before it could say so.
            sync_above(path)
                .map_err(|error| ServeError::Directory { path: path.clone(), error })?;
        }
        let path = &places.logs;
        let lock = File::create(path.join(LOCK))
            .map_err(|error| ServeError::Directory { path: path.clone(), error })?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive)
            .map_err(|_held| ServeError::Taken { path: path.clone() })?;
        Self::with(path, lock, live)
    }

    /// The same of a server whose index was removed, alone or with its directory. Streams go on
    /// adding to their windows.
    fn open_again(&mut self, places: &Places) -> Result<(), ServeError> {
        let path = &places.logs;
        let is_held =
            |found: fs::Metadata| self.lock.metadata().is_ok_and(|held| held.ino() == found.ino());
        let new = if fs::metadata(path.join(LOCK)).is_ok_and(is_held) {
            let error = |error| ServeError::Directory { path: path.clone(), error };
            Self::with(path, self.lock.try_clone().map_err(error)?, self.live.clone())?
        } else {
            Self::open(places, self.live.clone())?
        };
        let unclosed = std::mem::take(&mut self.unclosed);
        *self = Self { unclosed, stopping: self.stopping, ..new };
        Ok(())
    }

    fn with(path: &Path, lock: File, live: HashSet<WindowId>) -> Result<Self, ServeError> {
        let (mut index, is_new) =
            Index::open(path).map_err(|error| ServeError::Index(error.to_string()))?;
        let index_error = |error: rusqlite::Error| ServeError::Index(error.to_string());
        if is_new {
            // Logs of an index that is lost.
            for id in logs(path) {
                index.begin(id).map_err(index_error)?;
            }
        }
        let mut orphans: HashMap<CaptureId, Vec<WindowId>> = HashMap::new();
        let open = index.open_windows().map_err(index_error)?;
        for id in open.into_iter().filter(|id| !live.contains(id)) {
            orphans.entry(id.capture).or_default().push(id);
        }
        let (done, waiting) = index.log_bytes().map_err(index_error)?;
        let profiles = index.profile_bytes().map_err(index_error)?;
        let pushes = index.pushes().map_err(index_error)?;
        Ok(Self {
            index,
            lock,
            live,
            orphans,
            unclosed: Vec::new(),
            working: HashMap::new(),
            done,
            waiting,
            profiles,
            stopping: false,
            no_push_before: None,
            pushes,
            swept: Instant::now(),
        })
    }
}

/// Makes a directory that is there after a power cut, with those above it.
pub(super) fn make_directory(path: &Path) -> Result<(), ServeError> {
    let failed = |error| ServeError::Directory { path: path.to_owned(), error };
    let new: Vec<&Path> = path.ancestors().take_while(|it| !it.is_dir()).collect();
    fs::create_dir_all(path).map_err(failed)?;
    new.into_iter().try_for_each(sync_above).map_err(failed)
}

/// The name of a directory is there after a power cut.
fn sync_above(path: &Path) -> io::Result<()> {
    // Of a relative path of one name, this is "".
    let above = path.parent().filter(|above| !above.as_os_str().is_empty());
    File::open(above.unwrap_or(Path::new(".")))?.sync_all()
}

/// New names in a directory are there after a power cut.
pub(super) fn sync_directory(path: &Path) -> Result<(), StoreError> {
    File::open(path)
        .and_then(|directory| directory.sync_all())
        .map_err(|error| StoreError::Directory { path: path.to_owned(), error })
}

/// Windows whose logs are in a directory; nothing else that may lie there.
fn logs(directory: &Path) -> Vec<WindowId> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    let logs = paths.filter(|path| path.extension().is_some_and(|found| found == EXTENSION));
    logs.filter_map(|path| WindowId::of_file(&path)).collect()
}
