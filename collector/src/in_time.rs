//! Reads of files that may never answer: on a thread that is given up when it hangs. `host/jit.rs`
//! takes what JIT compilers wrote this way, `sink/sending.rs` reads it again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use stackwire_rights::capabilities;

/// How long a file may take to read.
const LIMIT: Duration = Duration::from_secs(2);
/// Threads that may hang at once before no more are started.
const MAX_HANGING: usize = 8;

/// Why there is no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotInTime {
    /// Nothing was begun.
    #[error("too many files hang already, or there is no thread to be had")]
    NoThread,
    /// It takes too long.
    #[error("it was not read within {} s", LIMIT.as_secs())]
    Late,
}

/// Room for one thread that may hang, given back when it ends.
#[derive(Debug)]
pub struct Slot(&'static AtomicUsize);

impl Slot {
    /// One of eight; none when as many threads hang already.
    #[must_use]
    pub fn of(taken: &'static AtomicUsize) -> Option<Self> {
        let slot = Self(taken);
        (taken.fetch_add(1, Ordering::Relaxed) < MAX_HANGING).then_some(slot)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Does something on a thread of its own and without capabilities.
///
/// # Errors
/// See [`NotInTime`]: it took longer than two seconds, or eight threads hang already.
pub fn in_time<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, NotInTime> {
    static TAKEN: AtomicUsize = AtomicUsize::new(0);
    let result = later(&TAKEN, work).ok_or(NotInTime::NoThread)?;
    result.recv_timeout(LIMIT).map_err(|_late| NotInTime::Late)
}

/// Like [`in_time`], but does not wait for the result. `None` when no thread can be started, or
/// when all eight threads that `taken` counts are in use.
pub fn later<T: Send + 'static>(
    taken: &'static AtomicUsize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<mpsc::Receiver<T>> {
    let slot = Slot::of(taken)?;
    let (done, result) = mpsc::channel();
    let thread = std::thread::Builder::new().name("snapshot".to_owned()).spawn(move || {
        let _slot = slot;
        // It needs none, and the file is not ours.
        let _ = capabilities::drop_all();
        // Who asked may have given up.
        let _ = done.send(work());
    });
    thread.is_ok().then_some(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_hangs_is_given_up() {
        let started = std::time::Instant::now();
        let (_hold, forever) = mpsc::channel::<()>();
        let hung = in_time(move || {
            let _ = forever.recv_timeout(Duration::from_secs(60));
        });
        assert_eq!(hung.unwrap_err(), NotInTime::Late);
        assert!(started.elapsed() < Duration::from_secs(30));
    }
}
