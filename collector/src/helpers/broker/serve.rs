//! The broker's process: takes requests one at a time, opens each in a child that may be killed
//! when it hangs.
//!
//! Keeps the three capabilities it needs, if it has them, and nothing else; ends when the collector
//! does.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, waitpid};
use stackwire_rights::capabilities::{self, CapabilitySet};

use super::{OpenError, decode, encode_error, open};
use crate::helpers::channel::{Question, Server, ends};

/// Follows the links of `map_files`, through roots of others, to files of others.
const KEPT: CapabilitySet = CapabilitySet::SYS_PTRACE
    .union(CapabilitySet::CHECKPOINT_RESTORE)
    .union(CapabilitySet::DAC_READ_SEARCH);
/// Opens that may hang at once before no more are tried.
const MAX_HANGING: u32 = 4;

/// Serves until the other end is gone.
pub(super) fn serve(server: &Server) -> io::Result<()> {
    capabilities::keep(KEPT)?;
    let mut children = 0;
    while let Some(question) = server.next()? {
        let Some((wanted, limit)) = decode(&question.content) else { continue };
        // Those that were killed and do not die are on a file system that does not answer.
        while let Ok(Some(_)) = waitpid(None, WaitOptions::NOHANG) {
            children -= 1;
        }
        if children >= MAX_HANGING {
            answer(server, &question, Err(OpenError::OthersHang))?;
            continue;
        }
        // SAFETY: there is one thread, so the child has all of the state it may use.
        match unsafe { libc::fork() } {
            -1 => {
                let error = Errno::from_io_error(&io::Error::last_os_error());
                answer(server, &question, Err(error.unwrap_or(Errno::AGAIN).into()))?;
            }
            0 => {
                let sent = answer(server, &question, open::open(&wanted));
                // SAFETY: ends this process; nothing of the parent's is run.
                unsafe { libc::_exit(i32::from(sent.is_err())) }
            }
            child => {
                children += 1;
                if !Pid::from_raw(child).is_none_or(|child| ends(child, limit)) {
                    answer(server, &question, Err(OpenError::Hangs(limit)))?;
                }
            }
        }
    }
    Ok(())
}

fn answer(server: &Server, question: &Question, opened: Result<File, OpenError>) -> io::Result<()> {
    match opened {
        Ok(file) => server.answer(question, &[], Some(file.as_fd())),
        Err(error) => server.answer(question, &encode_error(error), None),
    }
}
