//! Reads of files that may never answer: on a thread that is given up when it hangs. `host/jit.rs` takes what JIT compilers wrote
//! this way, `sink/sending.rs` reads it again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use stackwire_rights::capabilities;

/// How long a file may take to read.
const LIMIT: Duration = Duration::from_secs(2);
/// Threads that may hang at once before no more are started.
const MAX_HANGING: usize = 8;

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
/// The reason in words: it took longer than two seconds, or eight threads hang already.
pub fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    static TAKEN: AtomicUsize = AtomicUsize::new(0);
    let slot = Slot::of(&TAKEN).ok_or("too many files hang already")?;
    let (done, result) = mpsc::channel();
    std::thread::Builder::new()
        .name("snapshot".to_owned())
        .spawn(move || {
            let _slot = slot;
            // It needs none, and the file is not ours.
            let _ = capabilities::drop_all();
            // Who asked may have given up.
            let _ = done.send(work());
        })
        .map_err(|error| error.to_string())?;
    let seconds = LIMIT.as_secs();
    result.recv_timeout(LIMIT).map_err(|_late| format!("it was not read within {seconds} s"))
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn what_hangs_is_given_up() {
        let started = std::time::Instant::now();
        let (_hold, forever) = mpsc::channel::<()>();
        let hung = in_time(move || {
            let _ = forever.recv_timeout(Duration::from_secs(60));
        });
        assert!(hung.unwrap_err().contains("not read within"));
        assert!(started.elapsed() < Duration::from_secs(30));
    }
}
