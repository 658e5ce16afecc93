//! Gives up root's rights, and keeps the few that outputs need.
//!
//! `stackwire` started as root holds every capability, and anybody may have written what it parses.
//! So it gives up its rights before it parses the first byte. Outputs are put in their places at
//! the end, and a place may be in a directory of somebody else. A second process
//! (`stackwire place`) keeps the right to do that, for the files it was told of before. Afterwards
//! it reads nothing but numbers.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use stackwire_rights::capabilities::{self, CapabilitySet};
use tempfile::NamedTempFile;

use super::Failure;

/// Renames and removes in directories of others, sticky ones too.
const KEPT: CapabilitySet = CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::FOWNER);

/// What is asked of the second process: a byte, then what it says here.
mod asked {
    /// Two paths, each with its length in front (u32, little endian): what lies at the first is to
    /// be put at the second.
    pub const PROMISE: u8 = b'+';
    /// No more promises.
    pub const SEAL: u8 = b'=';
    /// The number of a promise (u8): to be kept. Answered by an error number, 0 for none (i32,
    /// little endian).
    pub const PUT: u8 = b'>';
    /// The same: what was put is removed.
    pub const REMOVE: u8 = b'-';
}

/// Puts files in their places when this process may not do so any more.
#[derive(Clone, Debug)]
pub struct Placer {
    /// `None`: this process has nothing to give up, and does it itself.
    helper: Option<Arc<Helper>>,
}

#[derive(Debug)]
struct Helper {
    child: Mutex<Child>,
    /// With the number of promises.
    stream: Mutex<(UnixStream, u8)>,
}

/// A file that will be put in its place.
#[derive(Clone, Debug)]
pub struct Promise {
    helper: Option<(Arc<Helper>, u8)>,
    to: PathBuf,
}

impl Placer {
    /// Starts the second process, if this one holds capabilities.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start() -> anyhow::Result<Self> {
        if capabilities::effective().is_empty() {
            return Ok(Self { helper: None });
        }
        let (ours, theirs) = UnixStream::pair().context("cannot make a socket pair")?;
        let child = Command::new(std::env::current_exe()?)
            .arg("place")
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .context("cannot start the process that puts outputs in their places")?;
        let helper = Helper { child: Mutex::new(child), stream: Mutex::new((ours, 0)) };
        Ok(Self { helper: Some(Arc::new(helper)) })
    }

    /// Announces that `from` is to be put at `to`.
    ///
    /// # Errors
    /// When the second process is gone.
    pub fn promise(&self, from: &Path, to: &Path) -> io::Result<Promise> {
        let helper = match &self.helper {
            None => None,
            Some(helper) => {
                let mut stream = helper.stream.lock().unwrap_or_else(PoisonError::into_inner);
                let mut message = vec![asked::PROMISE];
                for path in [from, to] {
                    let path = path.as_os_str().as_bytes();
                    message.extend((path.len() as u32).to_le_bytes());
                    message.extend(path);
                }
                stream.0.write_all(&message)?;
                stream.1 += 1;
                Some((Arc::clone(helper), stream.1 - 1))
            }
        };
        Ok(Promise { helper, to: to.to_owned() })
    }

    /// Gives up all rights of this process, for good. Call it while it has one thread: others keep
    /// theirs.
    ///
    /// # Errors
    /// When that fails: nothing may be parsed then.
    pub fn confine(&self) -> anyhow::Result<()> {
        if let Some(helper) = &self.helper {
            let mut stream = helper.stream.lock().unwrap_or_else(PoisonError::into_inner);
            stream.0.write_all(&[asked::SEAL]).context("cannot write outputs")?;
        }
        capabilities::drop_all().context("cannot give up capabilities")
    }
}

/// For commands whose outputs are none but standard output.
///
/// # Errors
/// See [`Placer::confine`].
pub fn confine() -> anyhow::Result<()> {
    Placer { helper: None }.confine()
}

impl Promise {
    /// Puts the file in its place.
    ///
    /// # Errors
    /// Those of renaming.
    pub fn put(&self, file: NamedTempFile) -> io::Result<()> {
        match &self.helper {
            None => Ok(file.persist(&self.to).map(drop)?),
            Some((helper, number)) => helper.ask(asked::PUT, *number),
        }
    }

    /// Removes it again.
    ///
    /// # Errors
    /// Those of removing.
    pub fn remove(&self) -> io::Result<()> {
        match &self.helper {
            None => std::fs::remove_file(&self.to),
            Some((helper, number)) => helper.ask(asked::REMOVE, *number),
        }
    }
}

impl Helper {
    fn ask(&self, what: u8, number: u8) -> io::Result<()> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        stream.0.write_all(&[what, number])?;
        let mut answer = [0; 4];
        stream.0.read_exact(&mut answer)?;
        match i32::from_le_bytes(answer) {
            0 => Ok(()),
            number => Err(io::Error::from_raw_os_error(number)),
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let stream = self.stream.get_mut().unwrap_or_else(PoisonError::into_inner);
        // It removes what was not put in its place, then ends.
        let _ = stream.0.shutdown(Shutdown::Both);
        let _ = self.child.get_mut().unwrap_or_else(PoisonError::into_inner).wait();
    }
}

/// `stackwire place`: the second process.
pub fn run() -> Result<(), Failure> {
    // The end of the first one ends it; what ends that from a terminal would end both at once.
    for signal in
        [signal_hook::consts::SIGHUP, signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM]
    {
        signal_hook::flag::register(signal, Arc::default()).context("cannot handle signals")?;
    }
    capabilities::keep(KEPT).context("cannot give up capabilities")?;
    let mut stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut promises = Vec::new();
    let served = serve(&mut stream, &mut promises);
    for (from, _) in promises.iter().filter(|(_, put)| !put) {
        // A half of a file is of no use.
        let _ = std::fs::remove_file(&from.0);
    }
    match served {
        Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => Err(error.into()),
        _ => Ok(()),
    }
}

/// From and to, and whether it is done.
type Promised = ((PathBuf, PathBuf), bool);

fn serve(stream: &mut UnixStream, promises: &mut Vec<Promised>) -> io::Result<()> {
    let byte = |stream: &mut UnixStream| {
        let mut byte = [0];
        stream.read_exact(&mut byte).map(|()| byte[0])
    };
    loop {
        match byte(stream)? {
            asked::PROMISE => {
                let from = read_path(stream)?;
                promises.push(((from, read_path(stream)?), false));
            }
            asked::SEAL => break,
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
    loop {
        let (what, number) = (byte(stream)?, byte(stream)?);
        let promise = promises.get_mut(usize::from(number)).ok_or(io::ErrorKind::InvalidData)?;
        let ((from, to), put) = promise;
        let done = match (what, *put) {
            (asked::PUT, false) => std::fs::rename(from, to),
            (asked::REMOVE, true) => std::fs::remove_file(to),
            _ => return Err(io::ErrorKind::InvalidData.into()),
        };
        *put |= what == asked::PUT && done.is_ok();
        let answer = done.map_or_else(|error| error.raw_os_error().unwrap_or(libc::EIO), |()| 0);
        stream.write_all(&answer.to_le_bytes())?;
    }
}

fn read_path(stream: &mut UnixStream) -> io::Result<PathBuf> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let mut path = vec![0; u32::from_le_bytes(length).min(libc::PATH_MAX as u32) as usize];
    stream.read_exact(&mut path)?;
    Ok(std::ffi::OsString::from_vec(path).into())
}
