//! The broker: a process of its own that opens files of other processes and passes the descriptors
//! on.
//!
//! It may trace processes and read files that others may not, and never looks at content, but to
//! find what a process says of itself (`said.rs`). The process that asks it may look at content and
//! holds no such privilege. `main.rs` starts it before there are threads. [`Broker::open`] is
//! called for perf-maps and jitdumps (`host/`), and for files that the symbolizer wants
//! (`handover.rs`). What a process says of itself is copied to a file as well, for `host/whose.rs`.
//! `open.rs` says what may be opened; `serve.rs` is the process itself.

mod open;
mod said;
mod serve;

use std::fs::File;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::io::Errno;

use super::channel::{Client, NoAnswer};
use stackwire_model::UserAddr;

use crate::process::Wanted;

/// How long an open may take: what hangs is on a file system that a process of the host made up, or
/// a server that is gone.
pub const LIMIT: Duration = Duration::from_secs(1);
/// The broker's own answer that it took too long comes before this.
const PATIENCE: Duration = Duration::from_secs(3);

/// Why a file is not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// There is no such file.
    #[error("there is none")]
    NotFound,
    /// Nobody can tell whether there is.
    #[error("the root directory of its process is out of reach")]
    RootOutOfReach,
    /// It is a FIFO, a device, a directory or a link.
    #[error("it is not a regular file")]
    NotRegular,
    /// It is not the process's.
    #[error("it belongs to user {owner}, not to the process")]
    OfAnother {
        /// Its user ID.
        owner: u32,
    },
    /// The kernel refuses.
    #[error("{}", io::Error::from(*.0))]
    System(Errno),
    /// Opening it takes too long.
    #[error("its file system does not answer within {} ms", .0.as_millis())]
    Hangs(Duration),
    /// Too many others hang.
    #[error("its file system does not answer, nor do those of others")]
    OthersHang,
    /// The broker cannot be asked.
    #[error("the collector's broker {0}")]
    Broker(#[from] NoAnswer),
}

impl OpenError {
    /// Whether an attempt to open the file may never return. The collector then does not try it
    /// itself.
    #[must_use]
    pub fn hangs(self) -> bool {
        matches!(self, Self::Hangs(_) | Self::OthersHang | Self::Broker(NoAnswer::Late))
    }
}

impl From<Errno> for OpenError {
    fn from(error: Errno) -> Self {
        match error {
            Errno::NOENT => Self::NotFound,
            other => Self::System(other),
        }
    }
}

/// The way to the broker, or to files without one. Shared between threads.
#[derive(Debug)]
pub struct Broker {
    /// `None`: files are opened here, with what this thread may.
    client: Option<Mutex<Client>>,
}

impl Broker {
    /// Starts the process. Gives up nothing of the caller's.
    ///
    /// # Errors
    /// When there is more than one thread, or no process to be had.
    pub fn start() -> io::Result<Self> {
        let client = Client::start(c"sw-broker", PATIENCE, serve::serve)?;
        Ok(Self { client: Some(Mutex::new(client)) })
    }

    /// One that opens in this process, as its user may.
    #[must_use]
    pub fn none() -> Self {
        Self { client: None }
    }

    /// Opens a regular file. The broker uses its privileges when it is certain which file is meant.
    /// Otherwise the file with the wanted path is opened without any privileges. The caller holds
    /// none.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(&self, wanted: &Wanted) -> Result<File, OpenError> {
        self.open_within(wanted, LIMIT)
    }

    /// As [`Broker::open`], with less patience: others wait meanwhile.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_within(&self, wanted: &Wanted, limit: Duration) -> Result<File, OpenError> {
        let opened = match &self.client {
            None => open::open(wanted),
            Some(client) => {
                let client = client.lock().unwrap_or_else(PoisonError::into_inner);
                let answer = client.ask(&encode(wanted, limit), None);
                answer.map_err(OpenError::from).and_then(|(answer, file)| {
                    file.ok_or_else(|| decode_error(&answer).unwrap_or(NoAnswer::Lost.into()))
                })
            }
        };
        opened.or_else(|reason| match wanted {
            _ if reason.hangs() => Err(reason),
            Wanted::Own { here, .. } if !here || reason != OpenError::RootOutOfReach => Err(reason),
            _ => open::open_here(wanted).map_err(|_here| reason),
        })
    }
}

/// Pid, kind, start, end, limit in milliseconds; then the path.
fn encode(wanted: &Wanted, limit: Duration) -> Vec<u8> {
    let (pid, kind, start, end, path) = match wanted {
        Wanted::Mapped { pid, start, end, path } => (*pid, 0u32, start.0, end.0, path.as_str()),
        Wanted::Own { pid, path, here } => (*pid, 1, u64::from(*here), 0, path.as_str()),
        Wanted::Said { pid, context } => (*pid, 2, context.map_or(0, |at| at.0), 0, ""),
    };
    let mut message = Vec::with_capacity(32 + path.len());
    message.extend(pid.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(start.to_ne_bytes());
    message.extend(end.to_ne_bytes());
    message.extend((limit.as_millis() as u64).to_ne_bytes());
    message.extend(path.as_bytes());
    message
}

fn decode(message: &[u8]) -> Option<(Wanted, Duration)> {
    let (head, path) = message.split_first_chunk::<32>()?;
    let long = |at: usize| -> u64 {
        u64::from_ne_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|byte| head[at + byte]))
    };
    let word = |at: usize| -> u32 { u32::from_ne_bytes([0, 1, 2, 3].map(|byte| head[at + byte])) };
    let (pid, path) = (word(0), std::str::from_utf8(path).ok()?.to_owned());
    let wanted = match word(4) {
        0 => Wanted::Mapped { pid, start: UserAddr(long(8)), end: UserAddr(long(16)), path },
        1 => Wanted::Own { pid, path, here: long(8) != 0 },
        2 => Wanted::Said { pid, context: Some(UserAddr(long(8))).filter(|at| at.0 != 0) },
        _ => return None,
    };
    Some((wanted, Duration::from_millis(long(24)).min(LIMIT)))
}

/// Kind, and a number: a user ID, milliseconds, or an error of the system.
fn encode_error(error: OpenError) -> [u8; 8] {
    let (kind, number) = match error {
        OpenError::NotFound => (0u32, 0),
        OpenError::RootOutOfReach => (1, 0),
        OpenError::NotRegular => (2, 0),
        OpenError::OfAnother { owner } => (3, owner),
        OpenError::System(error) => (4, error.raw_os_error().unsigned_abs()),
        OpenError::Hangs(limit) => (5, limit.as_millis() as u32),
        OpenError::OthersHang => (6, 0),
        // It does not say so of itself.
        OpenError::Broker(_) => (7, 0),
    };
    let mut message = [0; 8];
    message[..4].copy_from_slice(&kind.to_ne_bytes());
    message[4..].copy_from_slice(&number.to_ne_bytes());
    message
}

fn decode_error(message: &[u8]) -> Option<OpenError> {
    let (kind, number) = message.split_first_chunk()?;
    let number = u32::from_ne_bytes(*number.first_chunk()?);
    Some(match u32::from_ne_bytes(*kind) {
        0 => OpenError::NotFound,
        1 => OpenError::RootOutOfReach,
        2 => OpenError::NotRegular,
        3 => OpenError::OfAnother { owner: number },
        // As errno(3) has them; others the kernel never returns.
        4 if (1..4096).contains(&number) => {
            OpenError::System(Errno::from_raw_os_error(number as i32))
        }
        5 => OpenError::Hangs(Duration::from_millis(number.into())),
        6 => OpenError::OthersHang,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_survive_their_way() {
        let path = "/a b/c".to_owned();
        for wanted in [
            Wanted::Mapped {
                pid: 7,
                start: UserAddr(0x1000),
                end: UserAddr(0x2000),
                path: path.clone(),
            },
            Wanted::Own { pid: 8, path, here: true },
            Wanted::Said { pid: 9, context: Some(UserAddr(0x1000)) },
            Wanted::Said { pid: 9, context: None },
        ] {
            let limit = Duration::from_millis(50);
            assert_eq!(decode(&encode(&wanted, limit)).unwrap(), (wanted, limit));
        }
        assert_eq!(decode(b"short"), None);
    }

    #[test]
    fn so_do_reasons() {
        for error in [
            OpenError::NotFound,
            OpenError::RootOutOfReach,
            OpenError::NotRegular,
            OpenError::OfAnother { owner: 65_534 },
            OpenError::System(Errno::LOOP),
            OpenError::Hangs(Duration::from_millis(50)),
            OpenError::OthersHang,
        ] {
            assert_eq!(decode_error(&encode_error(error)), Some(error));
        }
        assert_eq!(decode_error(b"short"), None);
        for no_error in [0u32, 4096, u32::MAX] {
            let message = [4u32.to_ne_bytes(), no_error.to_ne_bytes()].concat();
            assert_eq!(decode_error(&message), None);
        }
    }
}
