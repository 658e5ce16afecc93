//! The rings that samples are copied into, and a thread that empties them.
//!
//! A user may have half a megabyte for each CPU: a few dozen samples. What is done with a sample
//! takes ten times as long as to take it out. On a busy host a thread that does both uses more than
//! its share of a CPU, waits for it, and finds the ring full. The thread here does nothing else.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use stackwire_model::Event;
use stackwire_rights::capabilities;
use zeroize::Zeroizing;

use super::{SamplerError, open_error};
use crate::priority::Raised;
use crate::sources::perf_event::{PerfEvent, RingError};

/// Bytes of a ring. With its first page it is what `kernel.perf_event_mlock_kb` allows a user for
/// each CPU, 516 KiB, unless that was changed.
const RING_BYTES: usize = 512 << 10;
/// The smallest of use: a record has up to 64 KiB.
const LEAST_RING_BYTES: usize = 64 << 10;
/// Bytes of records that may wait to be looked at; more stay in the rings.
const MAX_TAKEN: usize = 64 << 20;
/// Longest time between two looks at the rings of the thread.
const AT_MOST: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// How long the thread may take to answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// The rings, by CPU.
#[derive(Debug)]
pub struct Rings {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    inner: Mutex<Inner>,
    /// Wakes the thread.
    call: OwnedFd,
    /// Told when it has taken what there was.
    answered: Condvar,
    stop: AtomicBool,
}

#[derive(Debug, Default)]
struct Inner {
    rings: BTreeMap<u32, Ring>,
    /// Records, one behind the other, each with its header. They hold memory of processes, which is
    /// wiped.
    taken: Zeroizing<Vec<u8>>,
    buffer: Zeroizing<Vec<u8>>,
    /// How often the thread was called, and how many of the calls it has answered.
    calls: u64,
    answers: u64,
}

#[derive(Debug)]
struct Ring {
    event: PerfEvent,
    /// The same once more, to wait for.
    readable: Arc<OwnedFd>,
}

impl Rings {
    /// A ring for each of these CPUs, all of a size, as large as the user is allowed; and the
    /// thread.
    ///
    /// # Errors
    /// See [`SamplerError`].
    pub fn start(cpus: &[u32]) -> Result<Self, SamplerError> {
        let failed = |error: io::Error| open_error(0, &Event::dummy(), error);
        let inner = Mutex::new(Inner { rings: open(cpus)?, ..Inner::default() });
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let call = eventfd(0, flags).map_err(|error| failed(error.into()))?;
        let (answered, stop) = (Condvar::new(), AtomicBool::new(false));
        let rings = Self { shared: Arc::new(Shared { inner, call, answered, stop }) };
        let shared = Arc::clone(&rings.shared);
        let started = std::thread::Builder::new().name("rings".to_owned()).spawn(move || {
            // What it does late is lost.
            let _raised = Raised::for_now();
            // Started with the privileges of the caller, of which it needs no others.
            let _ = capabilities::drop_all();
            shared.run();
        });
        started.map_err(failed)?;
        Ok(rings)
    }

    /// CPUs that have one.
    #[must_use]
    pub fn cpus(&self) -> Vec<u32> {
        self.shared.lock().rings.keys().copied().collect()
    }

    /// Opens one for a CPU.
    ///
    /// # Errors
    /// See [`SamplerError`].
    pub fn add(&self, cpu: u32) -> Result<(), SamplerError> {
        let mut ring = open(&[cpu])?;
        self.shared.lock().rings.append(&mut ring);
        Ok(())
    }

    /// Closes those of other CPUs, after taking what is in them.
    pub fn keep(&self, cpus: &[u32]) {
        let mut inner = self.shared.lock();
        inner.take();
        inner.rings.retain(|cpu, _| cpus.contains(cpu));
    }

    /// Opens an event that writes into the ring of its CPU.
    ///
    /// # Errors
    /// Those of `open`; none where the CPU has no ring.
    pub fn open_into<T>(
        &self,
        cpu: u32,
        open: impl FnOnce(&PerfEvent) -> io::Result<T>,
    ) -> io::Result<Option<T>> {
        self.shared.lock().rings.get(&cpu).map(|ring| open(&ring.event)).transpose()
    }

    /// Takes all records that came, each with its header.
    ///
    /// The thread takes them out of the rings: whoever is interrupted between lock and unlock keeps
    /// it waiting.
    pub fn drain(&self) -> Zeroizing<Vec<u8>> {
        let mut inner = self.shared.lock();
        inner.calls += 1;
        let call = inner.calls;
        self.shared.wake();
        let late = |inner: &mut Inner| inner.answers < call;
        let waited = self.shared.answered.wait_timeout_while(inner, PATIENCE, late);
        let (mut inner, _) = waited.unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut inner.taken)
    }

    /// Looks at all records that have come and were not drained; returns how many bytes they have.
    pub fn look(&self, from: usize, each: impl FnMut(&[u8])) -> usize {
        let mut inner = self.shared.lock();
        inner.take();
        records(&inner.taken, from).for_each(each);
        inner.taken.len()
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.wake();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        while !self.stop.load(Ordering::Relaxed) {
            self.wait();
            let mut inner = self.lock();
            inner.take();
            inner.answers = inner.calls;
            drop(inner);
            self.answered.notify_all();
        }
    }

    fn wake(&self) {
        // Fails only where it is called already.
        let _ = rustix::io::write(&self.call, &1u64.to_ne_bytes());
    }

    /// Waits until a ring is a quarter full, for a call, or for a while.
    fn wait(&self) {
        let readable: Vec<_> =
            self.lock().rings.values().map(|ring| Arc::clone(&ring.readable)).collect();
        let all = readable.iter().map(|fd| &**fd).chain([&self.call]);
        let mut fds: Vec<_> = all.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        // A wait that is interrupted or fails only leads to an early look at the rings.
        let _ = poll(&mut fds, Some(&AT_MOST));
        // Nobody has called, if it fails.
        let _ = rustix::io::read(&self.call, &mut [0u8; 8]);
    }
}

impl Inner {
    /// Takes all there is out of the rings.
    fn take(&mut self) {
        let Self { rings, taken, buffer, .. } = self;
        for ring in rings.values_mut() {
            if taken.len() < MAX_TAKEN {
                ring.event.drain(buffer, |record| append(taken, record));
            }
        }
    }
}

/// As `extend_from_slice`, which leaves behind what was there where it moves to more memory.
fn append(to: &mut Zeroizing<Vec<u8>>, bytes: &[u8]) {
    if to.capacity() - to.len() < bytes.len() {
        let mut larger = Vec::with_capacity((to.len() + bytes.len()) * 2);
        larger.extend_from_slice(to);
        *to = Zeroizing::new(larger);
    }
    to.extend_from_slice(bytes);
}

/// Records in bytes from `from` on.
pub fn records(bytes: &[u8], from: usize) -> impl Iterator<Item = &[u8]> {
    let mut at = from;
    std::iter::from_fn(move || {
        let size = bytes.get(at + 6..at + 8)?;
        let size = usize::from(u16::from_ne_bytes([size[0], size[1]])).max(8);
        let record = bytes.get(at..at + size)?;
        at += size;
        Some(record)
    })
}

fn open(cpus: &[u32]) -> Result<BTreeMap<u32, Ring>, SamplerError> {
    let mut bytes = RING_BYTES;
    let ring = |cpu, bytes| {
        let event = PerfEvent::ring(cpu, bytes)?;
        let readable = Arc::new(event.fd().try_clone_to_owned().map_err(RingError::Open)?);
        Ok((cpu, Ring { event, readable }))
    };
    loop {
        match cpus.iter().map(|&cpu| ring(cpu, bytes)).collect() {
            Ok(rings) => return Ok(rings),
            Err(RingError::Open(error)) => {
                return Err(open_error(cpus.first().copied().unwrap_or(0), &Event::dummy(), error));
            }
            Err(RingError::Map(error)) if bytes == LEAST_RING_BYTES => {
                return Err(SamplerError::Ring { kib: bytes >> 10, cpus: cpus.len(), error });
            }
            Err(RingError::Map(_)) => bytes /= 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::records;

    #[test]
    fn records_lie_one_behind_the_other() {
        let mut bytes = vec![1, 0, 0, 0, 0, 0, 16, 0, 7, 7, 7, 7, 7, 7, 7, 7];
        bytes.extend([2, 0, 0, 0, 0, 0, 8, 0]);
        let found: Vec<_> = records(&bytes, 0).map(<[u8]>::len).collect();
        assert_eq!(found, [16, 8]);
        assert_eq!(records(&bytes, 16).count(), 1);
        assert_eq!(records(&bytes[..20], 0).count(), 1, "the second is cut");
    }
}
