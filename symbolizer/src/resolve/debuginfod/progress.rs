//! How much of a file has come, on a terminal that is looked at.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// How much of a file has come, on a terminal that is looked at.
pub(super) struct Progress {
    what: String,
    declared: Option<u64>,
    /// When it was shown last; `None`: nobody looks.
    shown: Option<Instant>,
    drawn: bool,
}

impl Progress {
    /// Between two lines.
    const PAUSE: Duration = Duration::from_millis(200);

    pub(super) fn of(what: &str, declared: Option<u64>) -> Self {
        let shown = io::stderr().is_terminal().then(Instant::now);
        Self { what: what.to_owned(), declared, shown, drawn: false }
    }

    pub(super) fn show(&mut self, taken: u64) {
        if let Some(shown) = self.shown.filter(|shown| shown.elapsed() >= Self::PAUSE) {
            self.shown = Some(shown + shown.elapsed());
            self.drawn = true;
            let megabytes = |bytes: u64| bytes as f64 / 1e6;
            let of =
                self.declared.map_or(String::new(), |all| format!(" of {:.1}", megabytes(all)));
            let (taken, what) = (megabytes(taken), &self.what);
            // The terminal may be gone; the file is not.
            let _ = write!(io::stderr(), "\r{taken:.1}{of} MB of {what}\x1b[K");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.drawn {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}
