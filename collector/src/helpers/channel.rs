//! Starts a helper process by fork without exec, and sends it questions that carry a descriptor.
//!
//! [`Client`] is the collector's side, [`Server`] that of the process. What is asked and answered
//! is the business of `broker/` and `compiler.rs`, which call this.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

/// Longest message: numbers and a path.
const MAX_MESSAGE: usize = 64 + libc::PATH_MAX as usize;

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoAnswer {
    /// The process has ended.
    #[error("is gone")]
    Gone,
    /// It cannot be reached.
    #[error("cannot be reached: {0}")]
    Broken(#[from] Errno),
    /// It took too long.
    #[error("does not answer")]
    Late,
    /// Neither a file nor a reason came: the kernel drops a descriptor there is no number left for.
    #[error("sent a file that did not arrive; raise the limit of open files")]
    Lost,
}

/// The way to such a process, for one thread at a time.
#[derive(Debug)]
pub(super) struct Client {
    socket: OwnedFd,
    serial: Cell<u64>,
    patience: Duration,
}

impl Client {
    /// Starts a process that runs `serve` and has no descriptor of ours. `patience`: how long an
    /// answer may take.
    ///
    /// # Errors
    /// When there is more than one thread, or no process to be had.
    pub(super) fn start(
        name: &'static std::ffi::CStr,
        patience: Duration,
        serve: fn(&Server) -> io::Result<()>,
    ) -> io::Result<Self> {
        Ok(Self { socket: fork(name, serve)?, serial: Cell::new(0), patience })
    }

    /// Asks a question, and waits for the answer to it: bytes and a descriptor.
    ///
    /// # Errors
    /// See [`NoAnswer`].
    pub(super) fn ask(
        &self,
        question: &[u8],
        with: Option<BorrowedFd<'_>>,
    ) -> Result<(Vec<u8>, Option<File>), NoAnswer> {
        self.serial.set(self.serial.get() + 1);
        let serial = self.serial.get().to_ne_bytes();
        send(&self.socket, &[&serial, question], with)?;
        let deadline = Instant::now() + self.patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if !readable(&self.socket, left)? {
                return Err(NoAnswer::Late);
            }
            let (message, file) = receive(&self.socket)?;
            let (of, answer) = message.split_first_chunk().ok_or(NoAnswer::Gone)?;
            // Others are answers to questions nobody waits for any more.
            if *of == serial {
                return Ok((answer.to_vec(), file));
            }
        }
    }
}

/// The process's end.
#[derive(Debug)]
pub(super) struct Server(OwnedFd);

/// What is asked of it.
#[derive(Debug)]
pub(super) struct Question {
    serial: [u8; 8],
    /// What was asked.
    pub content: Vec<u8>,
    /// What came with it.
    pub file: Option<File>,
}

impl Server {
    /// The next question; none when the collector is gone.
    ///
    /// # Errors
    /// Those of recvmsg(2).
    pub(super) fn next(&self) -> io::Result<Option<Question>> {
        let (message, file) = receive(&self.0)?;
        let parts = message.split_first_chunk();
        Ok(parts.map(|(&serial, content)| Question { serial, content: content.to_vec(), file }))
    }

    /// Answers a question.
    ///
    /// # Errors
    /// Those of sendmsg(2).
    pub(super) fn answer(
        &self,
        question: &Question,
        content: &[u8],
        with: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        Ok(send(&self.0, &[&question.serial, content], with)?)
    }
}

/// Returns our end.
fn fork(
    name: &'static std::ffi::CStr,
    serve: fn(&Server) -> io::Result<()>,
) -> io::Result<OwnedFd> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("a process with several threads cannot be forked"));
    }
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    // SAFETY: this thread is the only one, so the child has all of the state it may use.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            drop(ours);
            let served = alone(name, theirs).and_then(|socket| serve(&Server(socket)));
            // SAFETY: ends this process; nothing of the parent's, buffers or handlers, is run.
            unsafe { libc::_exit(i32::from(served.is_err())) }
        }
        _ => Ok(ours),
    }
}

/// Separates the new process from the process that forked it.
fn alone(name: &std::ffi::CStr, socket: OwnedFd) -> io::Result<OwnedFd> {
    // Ctrl-C and a service manager mean all processes of the group: the collector still has to
    // deliver.
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
    drop(null);
    let kept = keep_only(socket)?;
    rustix::thread::set_name(name)?;
    Ok(kept)
}

/// Closes all descriptors but this one and those of standard input and output.
///
/// # Errors
/// Those of dup2(2) and close_range(2).
pub(super) fn keep_only(socket: OwnedFd) -> io::Result<OwnedFd> {
    // The others are the way to processes that may do more.
    const KEPT: i32 = 3;
    // SAFETY: plain system calls on descriptors, of which this process uses the one that is kept.
    unsafe {
        if socket.as_raw_fd() != KEPT && libc::dup2(socket.as_raw_fd(), KEPT) < 0 {
            return Err(io::Error::last_os_error());
        }
        std::mem::forget(socket);
        if libc::syscall(libc::SYS_close_range, KEPT + 1, u32::MAX, 0) < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(KEPT))
    }
}

/// Whether there is something to read in time.
fn readable(fd: impl AsFd, within: Duration) -> rustix::io::Result<bool> {
    let timeout =
        Timespec { tv_sec: within.as_secs() as i64, tv_nsec: i64::from(within.subsec_nanos()) };
    match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)) {
        Err(Errno::INTR) => Ok(true),
        other => other.map(|ready| ready > 0),
    }
}

/// A message and the descriptor that came with it; an empty one when the other end is gone.
fn receive(fd: impl AsFd) -> rustix::io::Result<(Vec<u8>, Option<File>)> {
    let mut bytes = vec![0; MAX_MESSAGE];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(fd, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    bytes.truncate(got.bytes);
    Ok((bytes, file.map(File::from)))
}

fn send(fd: impl AsFd, parts: &[&[u8]], with: Option<BorrowedFd<'_>>) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds;
    if let Some(with) = with {
        fds = [with];
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let parts: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
    sendmsg(fd, &parts, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Whether a child ends by itself in time; else it is killed.
#[must_use]
pub(super) fn ends(child: Pid, within: Duration) -> bool {
    // Without a descriptor it is not waited for: its answer comes all the same.
    let Ok(pidfd) = pidfd_open(child, PidfdFlags::empty()) else { return true };
    let ended = readable(&pidfd, within).unwrap_or(true);
    if !ended {
        // It may have ended this moment.
        let _ = kill_process(child, Signal::KILL);
    }
    ended
}
