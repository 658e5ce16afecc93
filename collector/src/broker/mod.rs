//! The broker: a process of its own that opens files of other processes and passes the descriptors on.
//!
//! It may trace and read what others may not, and never looks at content; who asks it may look, and holds no
//! such privilege. Started by `main.rs` before there are threads. [`Broker::open`] is called for perf-maps,
//! jitdumps (`host/`) and files the symbolizer wants (`handover.rs`). What may be opened is in `open.rs`, the
//! process itself in `serve.rs`.

mod open;
mod serve;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::channel::{self, readable, receive};

/// How long an open may take: what hangs is on a file system that a process of the host made up, or a server
/// that is gone.
pub const LIMIT: Duration = Duration::from_secs(1);
/// The broker's own answer that it took too long comes before this.
const PATIENCE: Duration = Duration::from_secs(3);

/// The reason when there is no such file.
pub const NONE: &str = "there is none";
/// The reason when nobody can tell.
const UNREACHABLE: &str = "the root directory of its process is out of reach";
/// How a reason begins when whoever opens the file is not heard of again: nobody here tries.
pub const HANGS: &str = "its file system does not answer";

/// What is to be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The file mapped there, which the process calls `path`.
    Mapped {
        /// Process.
        pid: u32,
        /// First address of the mapping.
        start: u64,
        /// First address behind it.
        end: u64,
        /// Path as the process has it.
        path: String,
    },
    /// A file of the process's user, by its path in the process's root directory.
    Own {
        /// Process.
        pid: u32,
        /// Absolute path.
        path: String,
        /// Where that root is out of reach, the same path here will do.
        here: bool,
    },
}

/// The way to the broker, or to files without one. Shared between threads.
#[derive(Debug)]
pub struct Broker {
    /// `None`: files are opened here, with what this thread may.
    socket: Option<Mutex<Socket>>,
}

#[derive(Debug)]
struct Socket {
    fd: OwnedFd,
    serial: u64,
}

impl Broker {
    /// Starts the process. Gives up nothing of the caller's.
    ///
    /// # Errors
    /// When there is more than one thread, or no process to be had.
    pub fn start() -> io::Result<Self> {
        let ours = channel::start(c"sw-broker", serve::serve)?;
        Ok(Self { socket: Some(Mutex::new(Socket { fd: ours, serial: 0 })) })
    }

    /// One that opens in this process, as its user may.
    #[must_use]
    pub fn none() -> Self {
        Self { socket: None }
    }

    /// Opens a file, a regular one: with the privileges of the broker what is certain, without any what is called
    /// so. Whoever calls this holds none.
    ///
    /// # Errors
    /// In words for the report.
    pub fn open(&self, wanted: &Wanted) -> Result<File, String> {
        self.open_within(wanted, LIMIT)
    }

    /// As [`Broker::open`], with less patience: others wait meanwhile.
    ///
    /// # Errors
    /// As [`Broker::open`]; a reason that begins with [`HANGS`] when it takes longer.
    pub fn open_within(&self, wanted: &Wanted, limit: Duration) -> Result<File, String> {
        let opened = match &self.socket {
            None => open::open(wanted),
            Some(socket) => {
                socket.lock().unwrap_or_else(PoisonError::into_inner).open(wanted, limit)
            }
        };
        opened.or_else(|reason| match wanted {
            _ if reason.starts_with(HANGS) => Err(reason),
            Wanted::Own { here, .. } if !here || reason != UNREACHABLE => Err(reason),
            _ => open::open_here(wanted).map_err(|_here| reason),
        })
    }
}

impl Socket {
    fn open(&mut self, wanted: &Wanted, limit: Duration) -> Result<File, String> {
        let gone = |error: rustix::io::Errno| format!("the collector's broker is gone: {error}");
        self.serial += 1;
        let request = encode(self.serial, wanted, limit);
        channel::send(&self.fd, &request, None).map_err(gone)?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if !readable(&self.fd, left).map_err(gone)? {
                return Err(format!("{HANGS}, nor does the collector's broker"));
            }
            let (message, file) = receive(&self.fd).map_err(gone)?;
            let Some((serial, reason)) = message.split_first_chunk::<8>() else {
                return Err("the collector's broker is gone".to_owned());
            };
            // An answer to a question nobody waits for any more.
            if u64::from_ne_bytes(*serial) != self.serial {
                continue;
            }
            return file.ok_or_else(|| String::from_utf8_lossy(reason).into_owned());
        }
    }
}

/// Serial, pid, kind, start, end, limit in milliseconds; then the path.
fn encode(serial: u64, wanted: &Wanted, limit: Duration) -> Vec<u8> {
    let (pid, kind, start, end, path) = match wanted {
        Wanted::Mapped { pid, start, end, path } => (*pid, 0u32, *start, *end, path),
        Wanted::Own { pid, path, here } => (*pid, 1, u64::from(*here), 0, path),
    };
    let mut message = Vec::with_capacity(40 + path.len());
    message.extend(serial.to_ne_bytes());
    message.extend(pid.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(start.to_ne_bytes());
    message.extend(end.to_ne_bytes());
    message.extend((limit.as_millis() as u64).to_ne_bytes());
    message.extend(path.as_bytes());
    message
}

fn decode(message: &[u8]) -> Option<(u64, Wanted, Duration)> {
    let (head, path) = message.split_first_chunk::<40>()?;
    let long = |at: usize| -> u64 {
        u64::from_ne_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|byte| head[at + byte]))
    };
    let word = |at: usize| -> u32 { u32::from_ne_bytes([0, 1, 2, 3].map(|byte| head[at + byte])) };
    let (pid, path) = (word(8), std::str::from_utf8(path).ok()?.to_owned());
    let wanted = match word(12) {
        0 => Wanted::Mapped { pid, start: long(16), end: long(24), path },
        1 => Wanted::Own { pid, path, here: long(16) != 0 },
        _ => return None,
    };
    Some((long(0), wanted, Duration::from_millis(long(32)).min(LIMIT)))
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn requests_survive_their_way() {
        let path = "/a b/c".to_owned();
        for wanted in [
            Wanted::Mapped { pid: 7, start: 0x1000, end: 0x2000, path: path.clone() },
            Wanted::Own { pid: 8, path, here: true },
        ] {
            let limit = Duration::from_millis(50);
            assert_eq!(decode(&encode(5, &wanted, limit)).unwrap(), (5, wanted, limit));
        }
        assert_eq!(decode(b"short"), None);
    }
}
