//! A child of the broker for each Python process: it switches the trampoline on, waits until the
//! broker says so or is gone, and switches it off. What cannot be done at once, because the main
//! thread sleeps, it does within some minutes after.
//!
//! So the trampoline goes off when the collector dies, when the broker does, and when both do. A
//! keeper that is killed leaves its process running, untraced, with the trampoline on. Called by
//! `serve.rs`.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, recv, send, shutdown,
    socketpair,
};
use rustix::process::Pid;
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};
use stackwire_model::PythonOutcome;

use super::Places;
use super::process::Process;
use super::target::Target;
use crate::helpers::channel::keep_only;

/// Most of them at once.
const MAX_KEEPERS: usize = 256;
/// Most processes that are told apart: as many have room in an answer.
const MAX_TOLD: usize = 768;
/// How long the main thread may take to switch it off, while who records waits.
const PATIENCE: Duration = Duration::from_secs(2);
/// For so long after that it is tried again, and so often.
const LINGERS: Duration = Duration::from_secs(300);
const TRIES: Duration = Duration::from_millis(500);
/// Threads are looked at for half a second until one may be interrupted. On a busy host a thread
/// stops when it has its turn, so few are seen in that time: it is done again after these pauses,
/// each twice as long as the one before.
const PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_millis(320);
/// How long the calls before and after that may take.
const CALLS: Duration = Duration::from_secs(2);
/// How long the main thread may take before it counts as one that sleeps. Where many threads want
/// the interpreter's lock, each has it for 5 ms.
const AT_ONCE: Duration = Duration::from_millis(100);
/// How soon one looks whether the main thread came, and whether it is still there; each time twice
/// as long after, up to a second.
const LOOKS: Duration = Duration::from_millis(20);
const MAX_LOOKS: Duration = Duration::from_secs(1);

/// Keepers, and what they have said.
#[derive(Default)]
pub(in super::super) struct Keepers(Vec<Keeper>);

struct Keeper {
    pid: u32,
    /// None: nothing was said yet.
    outcome: Option<PythonOutcome>,
    child: Option<Pid>,
    /// None: it has said all.
    socket: Option<OwnedFd>,
}

impl Keepers {
    /// Starts one for a process. Of more processes than are told apart nothing is heard.
    pub(in super::super) fn start(&mut self, pid: u32, places: &Places) {
        if self.0.len() >= MAX_TOLD {
            return;
        }
        let running = self.0.iter().filter(|keeper| keeper.child.is_some()).count();
        let is_full = running >= MAX_KEEPERS;
        let started = if is_full { None } else { fork(pid, places).unwrap_or_default() };
        let (child, socket) = started.unzip();
        let outcome = match child {
            Some(_) => None,
            None if is_full => Some(PythonOutcome::TooMany),
            None => Some(PythonOutcome::Lost),
        };
        self.0.push(Keeper { pid, outcome, child, socket });
    }

    /// Notes that a child has ended; whether it was one of them.
    pub(in super::super) fn ended(&mut self, child: Pid) -> bool {
        let keeper = self.0.iter_mut().find(|keeper| keeper.child == Some(child));
        keeper.is_some_and(|keeper| keeper.child.take().is_some())
    }

    /// Pids of those of which something was heard, each with what came of it so far.
    pub(in super::super) fn outcomes(&mut self) -> impl Iterator<Item = (u32, PythonOutcome)> {
        for keeper in &mut self.0 {
            keeper.listen(Duration::ZERO);
        }
        self.0.iter().filter_map(|keeper| Some((keeper.pid, keeper.outcome?)))
    }

    /// Has them switch all off, and waits for them a while.
    pub(in super::super) fn switch_off(&mut self) {
        for socket in self.0.iter().filter_map(|keeper| keeper.socket.as_ref()) {
            // It may have ended.
            let _ = shutdown(socket, Shutdown::Write);
        }
        let deadline = Instant::now() + PATIENCE + CALLS;
        for keeper in &mut self.0 {
            let left = || deadline.saturating_duration_since(Instant::now());
            while keeper.socket.is_some() && !left().is_zero() {
                keeper.listen(left());
            }
            // It has begun to ask, and is not through.
            keeper.outcome = keeper.outcome.or(Some(PythonOutcome::NoSafePoint));
        }
    }
}

impl Keeper {
    /// Hears what it has to say, for which it waits so long.
    fn listen(&mut self, within: Duration) {
        let mut said = [0];
        while let Some(socket) = self.socket.as_ref().filter(|it| is_readable(it, within)) {
            match recv(socket, &mut said, RecvFlags::DONTWAIT) {
                Ok((1, _)) => {
                    self.outcome = PythonOutcome::of_number(said[0]).or(self.outcome);
                    return;
                }
                Err(rustix::io::Errno::AGAIN) => return,
                _ => {
                    self.socket = None;
                    // Without a word: it was killed.
                    self.outcome = self.outcome.or(Some(PythonOutcome::Lost));
                }
            }
        }
    }
}

/// The child, and the way to it.
fn fork(pid: u32, places: &Places) -> io::Result<Option<(Pid, OwnedFd)>> {
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    // SAFETY: there is one thread, so the child has all of the state it may use.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // Among the others are ends of other keepers, which would not see the broker go.
            if let Ok(socket) = keep_only(theirs) {
                keep(pid, places, socket);
            }
            // SAFETY: ends this process; nothing of the parent's is run.
            unsafe { libc::_exit(0) }
        }
        child => Ok(Pid::from_raw(child).map(|child| (child, ours))),
    }
}

/// The child. Returns when all is done.
fn keep(pid: u32, places: &Places, socket: OwnedFd) {
    let say = |outcome: PythonOutcome| {
        // The broker may be gone.
        let _ = send(&socket, &[outcome.number()], SendFlags::NOSIGNAL);
    };
    let process = match Process::open(pid, places) {
        Ok(process) => process,
        Err(why) => return say(why),
    };
    let target = match Target::open(&process, places) {
        Ok(target) => target,
        Err(why) => return say(why),
    };
    let mut pause = PAUSE;
    let asked = loop {
        let asked = target.switch_on();
        let is_over = asked != Err(PythonOutcome::NoSafePoint) || pause > LAST_PAUSE;
        if is_over || is_readable(&socket, pause) {
            break asked;
        }
        pause *= 2;
    };
    match asked {
        Ok(()) => attend(&target, &socket, say),
        Err(why) => say(why),
    }
    if !target.is_clean() && is_silent() {
        // Nobody waits for this any more.
        drop(socket);
        target.clean_up(LINGERS, TRIES);
    }
}

/// While it is on, or is to be: says what comes of it until the broker wants it off or is gone.
fn attend(target: &Target<'_>, socket: &OwnedFd, say: impl Fn(PythonOutcome)) {
    let mut outcome = target.outcome_in(AT_ONCE);
    say(outcome.unwrap_or(PythonOutcome::Waiting));
    let mut looks = LOOKS;
    while !is_readable(socket, looks) {
        let now = target.outcome();
        if target.is_stuck() {
            return say(PythonOutcome::Unresponsive);
        }
        if now == Some(PythonOutcome::Ended) {
            return;
        }
        if outcome.is_none() {
            outcome = now;
            outcome.map(&say);
        }
        looks = (looks * 2).min(MAX_LOOKS);
    }
    if target.switch_off(PATIENCE) == PythonOutcome::LeftOn {
        say(PythonOutcome::LeftOn);
    }
}

/// Lets go of where the collector writes to: whoever reads from there waits for the end of it.
fn is_silent() -> bool {
    let null = OpenOptions::new().read(true).write(true).open("/dev/null");
    null.is_ok_and(|null| {
        dup2_stdin(&null).is_ok() && dup2_stdout(&null).is_ok() && dup2_stderr(&null).is_ok()
    })
}

fn is_readable(fd: impl AsFd, within: Duration) -> bool {
    let timeout =
        Timespec { tv_sec: within.as_secs() as i64, tv_nsec: i64::from(within.subsec_nanos()) };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).is_ok_and(|ready| ready > 0)
}
