//! The broker's process: takes requests one at a time, opens each in a child that may be killed when it hangs.
//!
//! Keeps the three capabilities it needs, if it has them, and nothing else; ends when the collector does.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::process::{Pid, WaitOptions, waitpid};
use stackwire_rights::capabilities::{self, CapabilitySet};

use super::{HANGS, decode, open};
use crate::channel::{self, ends, receive};

/// Follows the links of `map_files`, through roots of others, to files of others.
const KEPT: CapabilitySet = CapabilitySet::SYS_PTRACE
    .union(CapabilitySet::CHECKPOINT_RESTORE)
    .union(CapabilitySet::DAC_READ_SEARCH);

/// Serves until the other end is gone.
pub(super) fn serve(socket: &OwnedFd) -> io::Result<()> {
    capabilities::keep(KEPT)?;
    let mut children = 0;
    loop {
        let (message, _) = receive(socket)?;
        if message.is_empty() {
            return Ok(()); // the collector is gone
        }
        let Some((serial, wanted, limit)) = decode(&message) else { continue };
        // Those that were killed and do not die are on a file system that does not answer.
        while let Ok(Some(_)) = waitpid(None, WaitOptions::NOHANG) {
            children -= 1;
        }
        if children >= MAX_HANGING {
            answer(socket, serial, Err(format!("{HANGS}, nor do those of others")))?;
            continue;
        }
        // SAFETY: there is one thread, as above.
        match unsafe { libc::fork() } {
            -1 => answer(socket, serial, Err(io::Error::last_os_error().to_string()))?,
            0 => {
                let sent = answer(socket, serial, open::open(&wanted));
                // SAFETY: as above.
                unsafe { libc::_exit(if sent.is_ok() { 0 } else { 1 }) }
            }
            child => {
                children += 1;
                if !Pid::from_raw(child).is_none_or(|child| ends(child, limit)) {
                    let reason = format!("{HANGS} within {} ms", limit.as_millis());
                    answer(socket, serial, Err(reason))?;
                }
            }
        }
    }
}

/// Opens that may hang at once before no more are tried.
const MAX_HANGING: u32 = 4;

fn answer(socket: &OwnedFd, serial: u64, opened: Result<File, String>) -> io::Result<()> {
    let mut message = serial.to_ne_bytes().to_vec();
    if let Err(reason) = &opened {
        message.extend(reason.as_bytes());
    }
    Ok(channel::send(socket, &message, opened.as_ref().ok().map(AsFd::as_fd))?)
}
