//! A thread of another process: stops it, looks at it, makes it do a call, and lets it go.
//!
//! Whatever happens to this process, the kernel lets the thread go on: with the registers it had,
//! or in a call that ends by itself (`frame.rs` in `arch/`).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use libc::iovec;

use crate::arch::call::{Call, Registers, Thread, Unfit};
use crate::arch::frame;

/// How long a thread may take to stop. In an uninterruptible sleep it does not; else it takes until
/// it has a CPU.
const STOPS_IN: Duration = Duration::from_secs(1);
/// Longest XSAVE area there is, AMX included, is 11 KiB.
const MAX_VECTORS: usize = 32 << 10;
const PTRACE_GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
const PTRACE_GETSIGMASK: libc::c_uint = 0x420a;
const PTRACE_SETSIGMASK: libc::c_uint = 0x420b;
const PTRACE_EVENT_STOP: i32 = 128;

/// Why a thread does not do a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ThreadError {
    /// It has ended.
    Ended,
    /// The kernel refuses.
    Refused,
    /// It, or its process, is stopped: nothing would be done.
    Stopped,
    /// It did not stop: nobody may do anything with it but end this process, which lets it go.
    Unresponsive,
    /// Where it is, it must not be interrupted now.
    Unsafe,
    /// It cannot do calls at all.
    Unfit,
}

/// A thread that is stopped. Dropped, it goes on as if nothing had been.
pub(super) struct Stopped {
    tid: i32,
    registers: Registers,
}

impl Stopped {
    /// Stops a thread.
    ///
    /// # Errors
    /// See [`ThreadError`].
    pub(super) fn stop(tid: i32) -> Result<Self, ThreadError> {
        ask(libc::PTRACE_SEIZE, tid, 0, 0)?;
        let interrupted = ask(libc::PTRACE_INTERRUPT, tid, 0, 0);
        let is_interrupted = interrupted.and_then(|()| stops(tid));
        if is_interrupted != Ok(true) {
            // One that does not stop cannot be let go.
            if is_interrupted != Err(ThreadError::Unresponsive) {
                let_go(tid);
            }
            return Err(is_interrupted.err().unwrap_or(ThreadError::Stopped));
        }
        // SAFETY: plain numbers, of which zeros are some.
        let registers: Registers = unsafe { std::mem::zeroed() };
        let mut stopped = Self { tid, registers };
        let mut bytes = [0; size_of::<Registers>()];
        let read = stopped.read_set(libc::NT_PRSTATUS as usize, &mut bytes)?;
        if read != bytes.len() {
            return Err(ThreadError::Unfit);
        }
        // SAFETY: as many bytes as it has, each of them part of a plain number.
        stopped.registers = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) };
        Ok(stopped)
    }

    /// Its registers.
    pub(super) fn registers(&self) -> &Registers {
        &self.registers
    }

    /// Lets it go on with a call. What it was at it takes up when that has returned. `memory`: that
    /// of its process. `has_room`: whether its stack may be written between two addresses, and used
    /// below.
    ///
    /// # Errors
    /// See [`ThreadError`]. The thread goes on without the call then.
    pub(super) fn call(
        self,
        memory: &File,
        call: Call,
        restorer: u64,
        has_room: impl Fn(u64, u64) -> bool,
    ) -> Result<(), ThreadError> {
        // Returns to addresses that its shadow stack does not have end it.
        let has_shadow_stack =
            frame::SHADOW_STACK.is_some_and(|set| self.read_set(set, &mut [0; 8]).is_ok());
        if has_shadow_stack {
            return Err(ThreadError::Unfit);
        }
        if self.is_in_restartable_sequence(memory) {
            return Err(ThreadError::Unsafe);
        }
        let mut vectors = vec![0; MAX_VECTORS];
        let length = self.read_set(frame::VECTORS, &mut vectors)?;
        vectors.truncate(length);
        let mut mask = 0u64;
        ask(PTRACE_GETSIGMASK, self.tid, 8, (&raw mut mask) as usize)?;
        let thread = Thread { registers: self.registers, vectors, mask };
        let prepared =
            frame::prepare(&thread, call, restorer).map_err(|Unfit| ThreadError::Unfit)?;
        // In another place there is room later. A guard page could be written, but not used.
        let end = prepared.at.saturating_add(prepared.frame.len() as u64);
        if !has_room(prepared.at, end) {
            return Err(ThreadError::Unsafe);
        }
        memory
            .write_all_at(&prepared.frame, prepared.at)
            .map_err(|_cause: io::Error| ThreadError::Unsafe)?;
        let mut registers = prepared.registers;
        let part = iovec { iov_base: (&raw mut registers).cast(), iov_len: size_of::<Registers>() };
        let set = libc::NT_PRSTATUS as usize;
        ask(libc::PTRACE_SETREGSET, self.tid, set, (&raw const part) as usize)?;
        // Last: the frame has the mask that it had, so all signals come after the call. Should this
        // process die before, they come during the call.
        let all = u64::MAX;
        ask(PTRACE_SETSIGMASK, self.tid, 8, (&raw const all) as usize)
    }

    /// Whether it is in a restartable sequence, rseq(2), which the kernel would no longer know of.
    fn is_in_restartable_sequence(&self, memory: &File) -> bool {
        let mut configuration = [0u64; 3];
        let size = size_of_val(&configuration);
        let at = (&raw mut configuration) as usize;
        // Kernels before 5.13 do not tell.
        if ask(PTRACE_GET_RSEQ_CONFIGURATION, self.tid, size, at).is_err() || configuration[0] == 0
        {
            return false;
        }
        let mut sequence = [0; 8];
        let read = memory.read_exact_at(&mut sequence, configuration[0].wrapping_add(8));
        read.is_ok() && sequence != [0; 8]
    }

    /// Bytes that were read.
    fn read_set(&self, set: usize, into: &mut [u8]) -> Result<usize, ThreadError> {
        let mut part = iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        ask(libc::PTRACE_GETREGSET, self.tid, set, (&raw mut part) as usize)?;
        Ok(part.iov_len)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let_go(self.tid);
    }
}

/// Detaches from a thread that is stopped. One that was killed meanwhile is waited for: until then
/// an execve(2) of another thread of its process does not end, and to stop that would not, either.
fn let_go(tid: i32) {
    if ask(libc::PTRACE_DETACH, tid, 0, 0).is_ok() {
        return;
    }
    let deadline = Instant::now() + STOPS_IN;
    while Instant::now() < deadline {
        // SAFETY: a plain system call that writes nothing.
        let of = unsafe { libc::waitpid(tid, std::ptr::null_mut(), libc::__WALL | libc::WNOHANG) };
        if of != 0 {
            return;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Waits until it is stopped by the interrupt. False: something else has stopped it. Signals that
/// come first are delivered.
fn stops(tid: i32) -> Result<bool, ThreadError> {
    let deadline = Instant::now() + STOPS_IN;
    loop {
        let mut status = 0;
        // SAFETY: a plain system call that writes a number.
        let of = unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL | libc::WNOHANG) };
        if of < 0 || of == tid && !libc::WIFSTOPPED(status) {
            return Err(ThreadError::Ended);
        }
        if of == tid {
            let signal = libc::WSTOPSIG(status);
            match status >> 16 {
                PTRACE_EVENT_STOP => return Ok(signal == libc::SIGTRAP),
                0 => ask(libc::PTRACE_CONT, tid, 0, signal as usize)?,
                _ => ask(libc::PTRACE_CONT, tid, 0, 0)?,
            }
        } else if Instant::now() >= deadline {
            return Err(ThreadError::Unresponsive);
        } else {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

fn ask(request: libc::c_uint, tid: i32, at: usize, data: usize) -> Result<(), ThreadError> {
    // SAFETY: `data` is a number or points to what the request reads or writes, which outlives the
    // call; nothing of this process is changed otherwise.
    let done = unsafe { libc::ptrace(request, tid, at, data) };
    if done >= 0 {
        return Ok(());
    }
    Err(match io::Error::last_os_error().raw_os_error() {
        Some(libc::ESRCH) => ThreadError::Ended,
        _ => ThreadError::Refused,
    })
}
