//! Epochs waiting to be taken: in memory up to a cap, then in a spool file up to a cap, then the
//! oldest are dropped and counted. With them wait the artifacts that they refer to (`kept.rs`).
//!
//! Filled by the pipeline, emptied by a sink (`sink/`) on another thread. An epoch stays until it
//! is acknowledged, so that a new connection can send it again.

mod kept;
mod spool;

use std::collections::{HashSet, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use stackwire_model::LostReason;
use stackwire_proto::v1::{self, End, SealedEpoch};
use tokio::sync::Notify;

use self::kept::Kept;
use self::spool::{Place, Spool};
use crate::artifact::{Artifact, Hash};

/// How much may wait.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of epochs in memory.
    pub memory: usize,
    /// Directory of the spool file and its largest size in bytes; none: no spool.
    pub spool: Option<(PathBuf, u64)>,
    /// Bytes of artifacts, in memory or in files, the vDSO aside.
    pub artifacts: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { memory: 16 << 20, spool: None, artifacts: 64 << 20 }
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
    kept: Kept,
    end: Option<End>,
    /// Epochs below this number were handed out, and may be where they are to go: they are not
    /// dropped, because nobody could say whether they are lost.
    in_flight: u64,
    dropped_samples: u64,
    dropped_losses: Vec<(LostReason, u64)>,
    stopped: Option<String>,
    trouble: Option<String>,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    samples: u64,
    /// What it says was lost.
    lost: Vec<(LostReason, u64)>,
    length: u32,
    body: Body,
}

#[derive(Debug)]
enum Body {
    Memory(Vec<u8>),
    Spooled(Place),
}

impl Waiting {
    fn bytes(&self) -> usize {
        match &self.body {
            Body::Memory(bytes) => bytes.len(),
            Body::Spooled(place) => place.bytes,
        }
    }

    fn is_spooled(&self) -> bool {
        matches!(self.body, Body::Spooled(_))
    }
}

impl Outbox {
    /// An empty queue.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { inner: Mutex::default(), changed: Notify::new(), limits }
    }

    /// Adds an epoch of `samples` samples that says `lost`, dropping the oldest while there is no
    /// room.
    pub fn push(&self, epoch: SealedEpoch, samples: u64, lost: Vec<(LostReason, u64)>) {
        let SealedEpoch { number, length, zstd } = epoch;
        let mut inner = self.lock();
        let body = loop {
            // One that is larger than all the memory is kept alone.
            if inner.memory + zstd.len() <= self.limits.memory || inner.waiting.is_empty() {
                inner.memory += zstd.len();
                break Body::Memory(zstd);
            }
            if let Some(spooled) = inner.spool(&zstd, &self.limits) {
                break spooled;
            }
            if !inner.drop_oldest() {
                // What is there is in flight, which is little.
                inner.memory += zstd.len();
                break Body::Memory(zstd);
            }
        };
        inner.waiting.push_back(Waiting { number, samples, lost, length, body });
        drop(inner);
        self.changed.notify_one();
    }

    /// Keeps an artifact for a symbolizer that may ask for it, until the epoch that refers to it is
    /// delivered or later ones need the room; without `epoch` for good. False when there is no
    /// room.
    pub fn add_artifact(&self, artifact: Artifact, epoch: Option<u64>) -> bool {
        self.lock().kept.add(artifact, epoch, self.limits.artifacts)
    }

    /// Artifacts of earlier epochs that this one refers to as well; false when one is not there any
    /// more.
    pub fn keep_for(&self, hashes: &[Hash], epoch: u64) -> bool {
        self.lock().kept.keep_for(hashes, epoch)
    }

    /// An artifact cannot be read any more, or is not what it was: epochs to come do not refer to
    /// it.
    pub fn forget(&self, hash: Hash) {
        self.lock().kept.forget(hash);
    }

    /// An artifact, if it is still there.
    #[must_use]
    pub fn artifact(&self, hash: Hash) -> Option<Artifact> {
        self.lock().kept.get(hash)
    }

    /// All artifacts but these, in no order.
    #[must_use]
    pub fn artifacts_beside(&self, known: &HashSet<Hash>) -> Vec<Artifact> {
        self.lock().kept.beside(known)
    }

    /// Samples in epochs dropped since the last call.
    pub fn take_dropped(&self) -> u64 {
        std::mem::take(&mut self.lock().dropped_samples)
    }

    /// Nothing follows but this.
    pub fn close(&self, end: End) {
        let mut inner = self.lock();
        inner.end = Some(end);
        // Dropped since whoever made the end asked.
        let dropped = inner.dropped_samples;
        inner.add_to_end(dropped);
        drop(inner);
        self.changed.notify_one();
    }

    /// What epochs dropped since the last call had to say of losses.
    pub fn take_dropped_losses(&self) -> Vec<(LostReason, u64)> {
        std::mem::take(&mut self.lock().dropped_losses)
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

    /// Notes why nothing can be delivered now, or that it can be.
    pub fn set_trouble(&self, why: Option<String>) {
        self.lock().trouble = why;
    }

    /// Why nothing can be delivered now.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        self.lock().trouble.clone()
    }

    /// Waits for the first epoch numbered `from` or higher, or for the end; and before, while half
    /// of what may be kept in memory is in flight, for acknowledgements.
    ///
    /// # Errors
    /// When the spool cannot be read back.
    pub async fn next(&self, from: u64) -> io::Result<Next> {
        loop {
            if let Some(next) = self.lock().next(from, self.limits.memory / 2)? {
                return Ok(next);
            }
            self.changed.notified().await;
        }
    }

    /// A symbolizer says which epoch it expects next: those before are durable there, and others
    /// that were handed out are not.
    pub fn expected(&self, number: u64) {
        if let Some(durable) = number.checked_sub(1) {
            self.acknowledge(durable);
        }
        self.lock().in_flight = number;
    }

    /// The oldest epoch is refused wherever it is sent: it is dropped and counted.
    pub fn refused(&self) {
        let mut inner = self.lock();
        if let Some(dropped) = inner.pop_front() {
            inner.count_dropped(dropped);
        }
    }

    /// Number of the oldest epoch that is not acknowledged.
    #[must_use]
    pub fn oldest(&self) -> Option<u64> {
        self.lock().waiting.front().map(|epoch| epoch.number)
    }

    /// Samples of epochs that are not acknowledged.
    #[must_use]
    pub fn samples(&self) -> u64 {
        self.lock().waiting.iter().map(|epoch| epoch.samples).sum()
    }

    /// Epochs up to and including `number` are durable elsewhere.
    pub fn acknowledge(&self, number: u64) {
        let mut inner = self.lock();
        inner.kept.delivered(number);
        while inner.waiting.front().is_some_and(|epoch| epoch.number <= number) {
            inner.pop_front();
        }
        drop(inner);
        self.changed.notify_one();
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
    fn next(&mut self, from: u64, most_in_flight: usize) -> io::Result<Option<Next>> {
        let Some(at) = self.waiting.iter().position(|epoch| epoch.number >= from) else {
            return Ok(self.end.clone().map(Next::End));
        };
        let in_flight: usize = self.waiting.iter().take(at).map(Waiting::bytes).sum();
        // One is sent in any case.
        if at > 0 && in_flight >= most_in_flight {
            return Ok(None);
        }
        let found = &self.waiting[at];
        self.in_flight = self.in_flight.max(found.number + 1);
        let zstd = match &found.body {
            Body::Memory(bytes) => bytes.clone(),
            Body::Spooled(place) => {
                self.spool.as_ref().ok_or(io::ErrorKind::NotFound)?.read(place)?
            }
        };
        Ok(Some(Next::Epoch(SealedEpoch { number: found.number, length: found.length, zstd })))
    }

    /// Writes a body to the spool; `None` when there is no spool, no room, or no luck.
    fn spool(&mut self, content: &[u8], limits: &Limits) -> Option<Body> {
        let (directory, most) = limits.spool.as_ref()?;
        if self.spool.is_none() {
            self.spool = Spool::open(directory, *most).ok();
        }
        self.spool.as_mut()?.write(content).map(Body::Spooled)
    }

    fn pop_front(&mut self) -> Option<Waiting> {
        self.remove(0)
    }

    fn remove(&mut self, at: usize) -> Option<Waiting> {
        let removed = self.waiting.remove(at)?;
        match &removed.body {
            Body::Memory(bytes) => self.memory -= bytes.len(),
            Body::Spooled(place) => {
                // A ring: what is free begins behind the oldest that is gone.
                let is_oldest = !self.waiting.iter().take(at).any(Waiting::is_spooled);
                if let Some(spool) = self.spool.as_mut().filter(|_| is_oldest) {
                    spool.free(place);
                }
            }
        }
        Some(removed)
    }

    /// Drops the oldest that is not in flight; of those in memory, while what is in flight keeps
    /// the spool from getting room. False when there is none.
    fn drop_oldest(&mut self) -> bool {
        let in_flight = self.waiting.iter().take_while(|epoch| epoch.number < self.in_flight);
        let (count, spooled) = in_flight
            .fold((0, false), |(count, spooled), epoch| (count + 1, spooled || epoch.is_spooled()));
        let mut rest = self.waiting.iter().skip(count);
        let Some(at) = rest.position(|epoch| !spooled || !epoch.is_spooled()) else { return false };
        if let Some(dropped) = self.remove(count + at) {
            self.count_dropped(dropped);
        }
        true
    }

    fn count_dropped(&mut self, dropped: Waiting) {
        self.dropped_samples += dropped.samples;
        self.dropped_losses.extend(dropped.lost);
        // What it said is in the end's totals.
        self.add_to_end(dropped.samples);
    }

    /// No epoch follows that could say so.
    fn add_to_end(&mut self, dropped: u64) {
        let Some(end) = self.end.as_mut().filter(|_| dropped > 0) else { return };
        let reason = v1::LostReason::EpochDropped as i32;
        match end.lost.iter_mut().find(|lost| lost.reason == reason) {
            Some(lost) => lost.count += dropped,
            None => end.lost.push(v1::Lost { reason, count: dropped, samples: true }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    /// However much is in flight.
    fn any(outbox: &Outbox, from: u64) -> Next {
        outbox.lock().next(from, usize::MAX).unwrap().unwrap()
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
        (0..3).for_each(|n| outbox.push(epoch(n), 1, Vec::new()));
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
        let spool = Some((directory.path().to_owned(), 350));
        let outbox = Outbox::new(Limits { memory: 250, spool, ..Limits::default() });
        for number in 0..40 {
            outbox.push(epoch(number), 10, vec![(LostReason::RingFull, number)]);
            // Two fit into memory, three into the spool; at a turn of the file it may hold one
            // less.
            let kept = outbox.unacknowledged() as u64;
            assert!(kept >= (number + 1).min(4), "{kept} epochs are left of {}", number + 1);
            let first = number + 1 - kept;
            let left: Vec<_> =
                (first..=number).filter_map(|n| super::tests::number(any(&outbox, n))).collect();
            assert_eq!(left, (first..=number).collect::<Vec<_>>());
            // The connection broke, and nothing had come.
            outbox.expected(0);
        }
        let kept = outbox.unacknowledged() as u64;
        assert_eq!(outbox.take_dropped(), (40 - kept) * 10);
        assert_eq!(outbox.take_dropped(), 0);
        let losses: u64 = outbox.take_dropped_losses().iter().map(|(_, count)| count).sum();
        assert_eq!(losses, (0..40 - kept).sum());
        outbox.acknowledge(39);
        assert_eq!(outbox.unacknowledged(), 0);
    }

    #[test]
    fn what_is_refused_at_the_end_is_in_what_the_end_says() {
        let outbox = Outbox::new(Limits { memory: 1000, ..Limits::default() });
        (0..3).for_each(|number| outbox.push(epoch(number), 10, Vec::new()));
        outbox.refused();
        outbox.close(End::default());
        outbox.refused();
        let lost = outbox.lock().end.as_ref().map(|end| end.lost.clone()).unwrap();
        let reason = v1::LostReason::EpochDropped as i32;
        assert_eq!(lost, [v1::Lost { reason, count: 20, samples: true }]);
    }

    #[test]
    fn what_is_in_flight_is_not_dropped() {
        let outbox = Outbox::new(Limits { memory: 0, ..Limits::default() });
        outbox.push(epoch(0), 10, Vec::new());
        assert_eq!(number(take(&outbox, 0)), Some(0));
        (1..4).for_each(|n| outbox.push(epoch(n), 10, Vec::new()));
        assert_eq!(outbox.take_dropped(), 20, "1 and 2 were nowhere else");
        let (runtime, waits) = (
            tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap(),
            std::time::Duration::from_millis(20),
        );
        let next = async { tokio::time::timeout(waits, outbox.next(1)).await };
        assert!(runtime.block_on(next).is_err(), "one at a time");
        outbox.acknowledge(0);
        assert_eq!(number(take(&outbox, 1)), Some(3));
        // A new connection: what was in flight has come, or is sent again and may be dropped.
        outbox.push(epoch(4), 10, Vec::new());
        outbox.expected(0);
        outbox.push(epoch(5), 10, Vec::new());
        assert_eq!((outbox.take_dropped(), outbox.samples()), (20, 10));
    }

    #[test]
    fn an_epoch_in_flight_in_the_spool_costs_no_more_than_the_room_it_takes() {
        let directory = tempfile::tempdir().unwrap();
        let spool = Some((directory.path().to_owned(), 350));
        let outbox = Outbox::new(Limits { memory: 250, spool, ..Limits::default() });
        (0..5).for_each(|n| outbox.push(epoch(n), 10, Vec::new()));
        outbox.acknowledge(1);
        assert_eq!(number(take(&outbox, 2)), Some(2));
        (5..20).for_each(|n| outbox.push(epoch(n), 10, Vec::new()));
        let dropped = outbox.take_dropped();
        assert_eq!((dropped, outbox.samples()), (130, 50), "2 to 4 and two in memory are left");
    }
}
