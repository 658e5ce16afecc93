//! The broker: a process of its own that opens files of other processes and passes the descriptors
//! on.
//!
//! It may trace processes and read files that others may not, and never looks at content, but to
//! find what a process says of itself (`said.rs`). The process that asks it may look at content and
//! holds no such privilege. `main.rs` starts it before there are threads. [`Broker::open`] is
//! called for perf-maps and jitdumps (`host/`), and for files that the symbolizer wants
//! (`handover.rs`). What a process says of itself is copied to a file as well, for `host/whose.rs`.
//! `open.rs` says what may be opened; `serve.rs` is the process itself.

mod inject;
mod open;
mod request;
mod said;
mod serve;

use std::fs::File;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::io::Errno;

use stackwire_model::PythonOutcome;

pub use self::inject::{Function, Places};
use self::request::{PythonRequest, Request, decode_outcomes};
use super::channel::{Client, NoAnswer};
use crate::process::Wanted;

/// How long an open may take: what hangs is on a file system that a process of the host made up, or
/// a server that is gone.
pub const LIMIT: Duration = Duration::from_secs(1);
/// The broker's own answer that it took too long comes before this.
const PATIENCE: Duration = Duration::from_secs(5);

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
    /// Starts the process. Gives up nothing of the caller's. `python`: it may have Python processes
    /// name their functions.
    ///
    /// # Errors
    /// When there is more than one thread, or no process to be had.
    pub fn start(python: bool) -> io::Result<Self> {
        let serve = if python { serve::with_python } else { serve::files };
        let client = Client::start(c"sw-broker", PATIENCE, serve)?;
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
                let answer = client.ask(&Request::Open(wanted.clone(), limit).encode(), None);
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

/// Processes whose perf trampolines are switched on, and off again. There is no way without the
/// process.
impl Broker {
    /// Begins to switch one on. What comes of it, [`Broker::python_outcomes`] says.
    ///
    /// # Errors
    /// When the broker does not answer.
    pub fn switch_python_on(&self, pid: u32, places: Places) -> Result<(), NoAnswer> {
        self.ask_python(PythonRequest::SwitchOn { pid, places: Box::new(places) })
            .map(|_outcomes| ())
    }

    /// Pids of all that were asked, each with what came of it so far.
    ///
    /// # Errors
    /// When the broker does not answer.
    pub fn python_outcomes(&self) -> Result<Vec<(u32, PythonOutcome)>, NoAnswer> {
        self.ask_python(PythonRequest::Outcomes)
    }

    /// Switches all off, which takes up to four seconds; what came of each in the end.
    ///
    /// # Errors
    /// When the broker does not answer. It switches them off when this process ends.
    pub fn switch_pythons_off(&self) -> Result<Vec<(u32, PythonOutcome)>, NoAnswer> {
        self.ask_python(PythonRequest::SwitchOff)
    }

    fn ask_python(&self, request: PythonRequest) -> Result<Vec<(u32, PythonOutcome)>, NoAnswer> {
        let client = self.client.as_ref().ok_or(NoAnswer::Gone)?;
        let client = client.lock().unwrap_or_else(PoisonError::into_inner);
        let (answer, _) = client.ask(&Request::Python(request).encode(), None)?;
        Ok(decode_outcomes(&answer))
    }
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
    fn reasons_survive_their_way() {
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
