//! The broker's process: takes requests one at a time, opens each in a child that may be killed when it hangs.
//!
//! Keeps the three capabilities it needs, if it has them, and nothing else; ends when the collector does.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid};
use rustix::thread::CapabilitySet;

use super::{LIMIT, decode, open, readable, receive};
use crate::privilege;

/// Follows the links of `map_files`, through roots of others, to files of others.
const KEPT: CapabilitySet = CapabilitySet::SYS_PTRACE
    .union(CapabilitySet::CHECKPOINT_RESTORE)
    .union(CapabilitySet::DAC_READ_SEARCH);

/// Starts the process; returns the caller's end.
pub(super) fn fork(ours: OwnedFd, theirs: OwnedFd) -> io::Result<OwnedFd> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("a process with several threads cannot be forked"));
    }
    // SAFETY: this thread is the only one, so the child has all of the state it may use.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            drop(ours);
            let code = if serve(&theirs).is_ok() { 0 } else { 1 };
            // SAFETY: ends this process; nothing of the parent's, buffers or handlers, is run.
            unsafe { libc::_exit(code) }
        }
        _ => Ok(ours),
    }
}

fn serve(socket: &OwnedFd) -> io::Result<()> {
    // Ctrl-C and a service manager mean all processes of the group: the collector still has to deliver.
    rustix::process::setsid()?;
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: SIG_IGN is a disposition, not a function.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    // Who waits for the end of the collector's output must not wait for this process.
    let null = openat(CWD, "/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    rustix::thread::set_name(c"sw-broker")?;
    privilege::keep(KEPT)?;
    let mut children = 0;
    loop {
        let (message, _) = receive(socket)?;
        if message.is_empty() {
            return Ok(()); // the collector is gone
        }
        let Some((serial, wanted)) = decode(&message) else { continue };
        // Those that were killed and do not die are on a file system that does not answer.
        while let Ok(Some(_)) = waitpid(None, WaitOptions::NOHANG) {
            children -= 1;
        }
        if children >= MAX_HANGING {
            answer(socket, serial, Err("too many files hang already".to_owned()))?;
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
                if !Pid::from_raw(child).is_none_or(ends) {
                    let seconds = LIMIT.as_secs();
                    let reason = format!("it could not be opened within {seconds} s");
                    answer(socket, serial, Err(reason))?;
                }
            }
        }
    }
}

/// Opens that may hang at once before no more are tried.
const MAX_HANGING: u32 = 4;

/// Whether the child ends by itself in time.
fn ends(child: Pid) -> bool {
    // Without a descriptor it is not waited for: its answer comes all the same.
    let Ok(pidfd) = pidfd_open(child, PidfdFlags::empty()) else { return true };
    let ended = readable(&pidfd, LIMIT).unwrap_or(true);
    if !ended {
        // It may have ended this moment.
        let _ = kill_process(child, Signal::KILL);
    }
    ended
}

fn answer(socket: &OwnedFd, serial: u64, opened: Result<File, String>) -> io::Result<()> {
    let mut message = serial.to_ne_bytes().to_vec();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds;
    match &opened {
        Ok(file) => {
            fds = [file.as_fd()];
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        Err(reason) => message.extend(reason.as_bytes()),
    }
    sendmsg(socket, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}
