//! The broker's process: takes requests one at a time, opens each file in a child that may be
//! killed when it hangs, and has a child for each Python process that is to name its functions.
//!
//! Keeps the three capabilities it needs, if it has them, and nothing else; ends when the collector
//! does.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, waitpid};
use stackwire_rights::capabilities::{self, CapabilitySet};

use super::inject::Keepers;
use super::request::{PythonRequest, Request, encode_outcomes};
use super::{OpenError, encode_error, open};
use crate::helpers::channel::{Question, Server, ends};

/// Follows the links of `map_files`, through roots of others, to files of others.
const KEPT: CapabilitySet = CapabilitySet::SYS_PTRACE
    .union(CapabilitySet::CHECKPOINT_RESTORE)
    .union(CapabilitySet::DAC_READ_SEARCH);
/// Opens that may hang at once before no more are tried.
const MAX_HANGING: u32 = 4;
/// Between two looks whether one of them hangs no more.
const LOOK: Duration = Duration::from_millis(1);

/// Opens files until the other end is gone.
pub(super) fn files(server: &Server) -> io::Result<()> {
    serve(server, None)
}

/// Has Python processes name their functions, too.
pub(super) fn with_python(server: &Server) -> io::Result<()> {
    serve(server, Some(Keepers::default()))
}

fn serve(server: &Server, mut keepers: Option<Keepers>) -> io::Result<()> {
    capabilities::keep(KEPT)?;
    let mut children = 0;
    while let Some(question) = server.next()? {
        reap(&mut children, &mut keepers);
        let (wanted, limit) = match Request::decode(&question.content) {
            None => continue,
            Some(Request::Open(wanted, limit)) => (wanted, limit),
            Some(Request::Python(request)) => {
                // What nobody asked for when this began, a collector that was taken over asks for.
                let Some(keepers) = &mut keepers else { continue };
                match request {
                    PythonRequest::SwitchOn { pid, places } => keepers.start(pid, &places),
                    PythonRequest::Outcomes => {}
                    PythonRequest::SwitchOff => keepers.switch_off(),
                }
                server.answer(&question, &encode_outcomes(keepers.outcomes()), None)?;
                continue;
            }
        };
        // Where all of a busy machine has stalled, they die soon.
        let asked = Instant::now();
        while children >= MAX_HANGING && asked.elapsed() < limit {
            std::thread::sleep(LOOK);
            reap(&mut children, &mut keepers);
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
                // With those of keepers, one that hangs would keep trampolines on.
                drop(keepers);
                let sent = answer(server, &question, open::open(&wanted));
                // SAFETY: ends this process; nothing of the parent's is run.
                unsafe { libc::_exit(i32::from(sent.is_err())) }
            }
            child => {
                children += 1;
                if !Pid::from_raw(child).is_none_or(|child| ends(child, limit)) {
                    answer(server, &question, Err(OpenError::Hangs(limit)))?;
                }
                // Where no other question comes, it would be a zombie until the end.
                reap(&mut children, &mut keepers);
            }
        }
    }
    Ok(())
}

/// Forgets children that have ended. Those that were killed and do not die are on a file system
/// that does not answer.
fn reap(children: &mut u32, keepers: &mut Option<Keepers>) {
    while let Ok(Some((child, _))) = waitpid(None, WaitOptions::NOHANG) {
        if !keepers.as_mut().is_some_and(|keepers| keepers.ended(child)) {
            *children -= 1;
        }
    }
}

fn answer(server: &Server, question: &Question, opened: Result<File, OpenError>) -> io::Result<()> {
    match opened {
        Ok(file) => server.answer(question, &[], Some(file.as_fd())),
        Err(error) => server.answer(question, &encode_error(error), None),
    }
}
