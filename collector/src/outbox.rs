//! Epochs waiting to be taken: in memory up to a cap, then in a spool file up to a cap, then the
//! oldest are dropped and counted.
//!
//! Filled by the pipeline, emptied by a sink (`sink/`) on another thread. An epoch stays until it
//! is acknowledged, so that a new connection can send it again.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use stackwire_proto::v1::{End, SealedEpoch};
use tokio::sync::Notify;

use crate::artifact::{Artifact, Hash};

/// How much may wait.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of epochs in memory.
    pub memory: usize,
    /// Directory of the spool file and its largest size in bytes; none: no spool.
    pub spool: Option<(PathBuf, u64)>,
    /// Bytes of artifacts in memory, kallsyms and vDSO aside.
    pub artifacts: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { memory: 16 << 20, spool: None, artifacts: 32 << 20 }
    }
}

/// What a sink is to do next.
#[derive(Debug)]
pub enum Next {
    /// Deliver this.
    Epoch(SealedEpoch),
    /// Everything before was handed out: deliver this and finish.
    End(End),
}

/// The queue. Shared between threads; no lock is held across an await or a wait.
#[derive(Debug)]
pub struct Outbox {
    inner: Mutex<Inner>,
    changed: Notify,
    limits: Limits,
}

#[derive(Debug, Default)]
struct Inner {
    waiting: VecDeque<Waiting>,
    memory: usize,
    spool: Option<Spool>,
    artifacts: HashMap<Hash, Artifact>,
    /// Oldest first; those that may be forgotten.
    evictable: VecDeque<Hash>,
    end: Option<End>,
    dropped_samples: u64,
    stopped: Option<String>,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    samples: u64,
    length: u32,
    body: Body,
}

#[derive(Debug)]
enum Body {
    Memory(Vec<u8>),
    Spooled { offset: u64, bytes: usize },
}

#[derive(Debug)]
struct Spool {
    file: File,
    end: u64,
}

impl Outbox {
    /// An empty queue.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { inner: Mutex::default(), changed: Notify::new(), limits }
    }

    /// Adds an epoch of `samples` samples, dropping the oldest if there is no room.
    pub fn push(&self, epoch: SealedEpoch, samples: u64) {
        let mut inner = self.lock();
        let bytes = epoch.zstd.len();
        let mut body = Body::Memory(epoch.zstd);
        if inner.memory + bytes > self.limits.memory {
            body = match inner.spool(&body, &self.limits) {
                Some(spooled) => spooled,
                None => {
                    inner.make_room(bytes, self.limits.memory);
                    body
                }
            };
        }
        if let Body::Memory(_) = body {
            inner.memory += bytes;
        }
        inner.waiting.push_back(Waiting {
            number: epoch.number,
            samples,
            length: epoch.length,
            body,
        });
        drop(inner);
        self.changed.notify_one();
    }

    /// Keeps an artifact for a symbolizer that may want it. `pinned` ones are never forgotten.
    pub fn add_artifact(&self, artifact: Artifact, pinned: bool) {
        let mut inner = self.lock();
        if inner.artifacts.contains_key(&artifact.hash) {
            return;
        }
        if !pinned {
            inner.evictable.push_back(artifact.hash);
        }
        inner.artifacts.insert(artifact.hash, artifact);
        while inner.evictable.len() > 1 && inner.evictable_bytes() > self.limits.artifacts {
            let oldest = inner.evictable.pop_front();
            oldest.and_then(|hash| inner.artifacts.remove(&hash));
        }
    }

    /// An artifact, if it is still there.
    #[must_use]
    pub fn artifact(&self, hash: Hash) -> Option<Artifact> {
        self.lock().artifacts.get(&hash).cloned()
    }

    /// All artifacts, in no order.
    #[must_use]
    pub fn all_artifacts(&self) -> Vec<Artifact> {
        self.lock().artifacts.values().cloned().collect()
    }

    /// Samples in epochs dropped since the last call.
    pub fn take_dropped(&self) -> u64 {
        std::mem::take(&mut self.lock().dropped_samples)
    }

    /// Nothing follows but this.
    pub fn close(&self, end: End) {
        self.lock().end = Some(end);
        self.changed.notify_one();
    }

    /// [`Outbox::close`] was called.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.lock().end.is_some()
    }

    /// The sink gave up: why. The pipeline stops at its next look.
    pub fn stop(&self, why: String) {
        self.lock().stopped = Some(why);
    }

    /// Why the sink gave up, if it did.
    #[must_use]
    pub fn stopped(&self) -> Option<String> {
        self.lock().stopped.clone()
    }

    /// Waits for the first epoch numbered `from` or higher, or for the end.
    ///
    /// # Errors
    /// When the spool cannot be read back.
    pub async fn next(&self, from: u64) -> io::Result<Next> {
        loop {
            if let Some(next) = self.lock().next(from)? {
                return Ok(next);
            }
            self.changed.notified().await;
        }
    }

    /// Epochs up to and including `number` are durable elsewhere.
    pub fn acknowledge(&self, number: u64) {
        let mut inner = self.lock();
        while inner.waiting.front().is_some_and(|epoch| epoch.number <= number) {
            inner.pop_front();
        }
    }

    /// Epochs not acknowledged yet.
    #[must_use]
    pub fn unacknowledged(&self) -> usize {
        self.lock().waiting.len()
    }

    /// A panic elsewhere leaves the queue whole: every change is made under one lock.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn next(&self, from: u64) -> io::Result<Option<Next>> {
        let Some(found) = self.waiting.iter().find(|epoch| epoch.number >= from) else {
            return Ok(self.end.clone().map(Next::End));
        };
        let zstd = match &found.body {
            Body::Memory(bytes) => bytes.clone(),
            Body::Spooled { offset, bytes } => {
                let mut buffer = vec![0; *bytes];
                let spool = self.spool.as_ref().ok_or(io::ErrorKind::NotFound)?;
                spool.file.read_exact_at(&mut buffer, *offset)?;
                buffer
            }
        };
        Ok(Some(Next::Epoch(SealedEpoch { number: found.number, length: found.length, zstd })))
    }

    /// Writes a body to the spool; `None` when there is no spool, no room, or no luck.
    fn spool(&mut self, body: &Body, limits: &Limits) -> Option<Body> {
        let Body::Memory(content) = body else { return None };
        let (directory, most) = limits.spool.as_ref()?;
        if self.spool.is_none() {
            // Without a name: nobody else opens it, and it is gone with this process.
            self.spool = rustix::fs::openat(
                rustix::fs::CWD,
                directory,
                rustix::fs::OFlags::TMPFILE
                    | rustix::fs::OFlags::RDWR
                    | rustix::fs::OFlags::CLOEXEC,
                rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            )
            .ok()
            .map(|fd| Spool { file: File::from(fd), end: 0 });
        }
        let spool = self.spool.as_mut()?;
        if spool.end + content.len() as u64 > *most {
            return None;
        }
        let offset = spool.end;
        spool.file.write_all_at(content, offset).ok()?;
        spool.end += content.len() as u64;
        Some(Body::Spooled { offset, bytes: content.len() })
    }

    fn make_room(&mut self, bytes: usize, most: usize) {
        while self.memory + bytes > most {
            let Some(dropped) = self.pop_front() else { break };
            self.dropped_samples += dropped.samples;
        }
    }

    fn pop_front(&mut self) -> Option<Waiting> {
        let first = self.waiting.pop_front()?;
        match &first.body {
            Body::Memory(bytes) => self.memory -= bytes.len(),
            Body::Spooled { .. } => {
                let left =
                    self.waiting.iter().any(|epoch| matches!(epoch.body, Body::Spooled { .. }));
                if !left && let Some(spool) = &mut self.spool {
                    // On failure the file stays as long as it was, and is used again all the same.
                    let _ = spool.file.set_len(0);
                    spool.end = 0;
                }
            }
        }
        Some(first)
    }

    fn evictable_bytes(&self) -> usize {
        self.evictable
            .iter()
            .filter_map(|hash| self.artifacts.get(hash))
            .map(|a| a.content.len())
            .sum()
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::artifact::Kind;

    fn epoch(number: u64) -> SealedEpoch {
        SealedEpoch { number, length: 1, zstd: vec![number as u8; 100] }
    }

    fn take(outbox: &Outbox, from: u64) -> Next {
        tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap()
            .block_on(outbox.next(from))
            .unwrap()
    }

    fn number(next: Next) -> Option<u64> {
        match next {
            Next::Epoch(epoch) => {
                assert_eq!(epoch.zstd, vec![epoch.number as u8; 100]);
                Some(epoch.number)
            }
            Next::End(_) => None,
        }
    }

    #[test]
    fn epochs_stay_until_acknowledged_and_the_end_comes_last() {
        let outbox = Outbox::new(Limits::default());
        (0..3).for_each(|n| outbox.push(epoch(n), 1));
        outbox.close(End::default());
        assert_eq!(number(take(&outbox, 0)), Some(0));
        assert_eq!(number(take(&outbox, 0)), Some(0), "a new connection asks again");
        outbox.acknowledge(1);
        assert_eq!(number(take(&outbox, 0)), Some(2));
        assert_eq!(number(take(&outbox, 3)), None);
        assert_eq!(outbox.unacknowledged(), 1);
    }

    #[test]
    fn beyond_memory_epochs_are_spooled_then_the_oldest_dropped_and_counted() {
        let directory = tempfile::tempdir().unwrap();
        let spool = Some((directory.path().to_owned(), 250));
        let outbox = Outbox::new(Limits { memory: 250, spool, ..Limits::default() });
        (0..7).for_each(|n| outbox.push(epoch(n), 10));
        // 0 and 1 were in memory, 2 and 3 in the spool; each later one pushed the oldest out.
        assert!(outbox.take_dropped() >= 20);
        assert_eq!(outbox.take_dropped(), 0);
        let first = number(take(&outbox, 0)).unwrap();
        let left: Vec<_> = (first..7).map(|n| number(take(&outbox, n)).unwrap()).collect();
        assert_eq!(left, (first..7).collect::<Vec<_>>());
        assert!(left.len() >= 2);
        outbox.acknowledge(6);
        assert_eq!(outbox.unacknowledged(), 0);
    }

    #[test]
    fn artifacts_are_kept_within_the_cap_pinned_ones_always() {
        let outbox = Outbox::new(Limits { artifacts: 250, ..Limits::default() });
        let make = |byte: u8| Artifact::new(Kind::PerfMap, vec![byte; 100]);
        outbox.add_artifact(make(0), true);
        (1..5).for_each(|byte| outbox.add_artifact(make(byte), false));
        let there: Vec<bool> =
            (0..5).map(|byte| outbox.artifact(make(byte).hash).is_some()).collect();
        assert_eq!(there, [true, false, false, true, true]);
    }
}
