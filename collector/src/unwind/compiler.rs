//! The unwind compiler: a process without any privilege that turns ELF files it is handed into unwind tables.
//!
//! It can open nothing and reach nothing: no capabilities, Landlock, and only the system calls that compiling takes. Each
//! file is compiled in a child with limits of memory and time, whose death costs that file its table.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use landlock::{ABI, Access, AccessFs, AccessNet, Ruleset, RulesetAttr};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, Resource, Rlimit, WaitOptions, setrlimit, waitpid};
use seccompiler::{SeccompAction, SeccompFilter, TargetArch};
use stackwire_rights::capabilities;
use stackwire_unwind::{build_id, compile};

use crate::channel::{self, ends, readable, receive};

/// How long a file may take; the largest libraries take a quarter of a second.
const LIMIT: Duration = Duration::from_secs(10);
/// The compiler's own answer that it took too long comes before this.
const PATIENCE: Duration = Duration::from_secs(12);
/// Address space of a child. libLLVM, of 1.1 million rows, takes 90 MB.
const MAX_MEMORY: u64 = 1 << 30;
/// Largest table taken from it.
const MAX_TABLE: u64 = 64 << 20;

/// What is asked of a file: its table, or its build-id.
const COMPILE: u8 = 0;
const IDENTIFY: u8 = 1;

/// The way to the compiler.
#[derive(Debug)]
pub struct Compiler {
    socket: OwnedFd,
    serial: Cell<u64>,
}

impl Compiler {
    /// Starts the process. Gives up nothing of the caller's.
    ///
    /// # Errors
    /// When there is more than one thread, or no process to be had.
    pub fn start() -> io::Result<Self> {
        Ok(Self { socket: channel::start(c"sw-unwind", serve)?, serial: Cell::new(0) })
    }

    /// Compiles the table of a file, as bytes that [`Table::parse`](stackwire_unwind::Table::parse) is yet to check.
    ///
    /// # Errors
    /// In words for the report.
    pub fn compile(&self, file: &File) -> Result<Vec<u8>, String> {
        self.ask(file, COMPILE)
    }

    /// The build-id of a file, empty when it has none.
    ///
    /// # Errors
    /// In words for the report.
    pub fn build_id(&self, file: &File) -> Result<Vec<u8>, String> {
        self.ask(file, IDENTIFY)
    }

    fn ask(&self, file: &File, what: u8) -> Result<Vec<u8>, String> {
        let gone = |error: rustix::io::Errno| format!("the unwind compiler is gone: {error}");
        self.serial.set(self.serial.get() + 1);
        let serial = self.serial.get().to_ne_bytes();
        let request = [&serial[..], &[what]].concat();
        channel::send(&self.socket, &request, Some(file.as_fd())).map_err(gone)?;
        let deadline = Instant::now() + PATIENCE;
        let mut table = loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if !readable(&self.socket, left).map_err(gone)? {
                return Err("the unwind compiler does not answer".to_owned());
            }
            let (message, table) = receive(&self.socket).map_err(gone)?;
            let Some((of, reason)) = message.split_first_chunk::<8>() else {
                return Err("the unwind compiler is gone".to_owned());
            };
            // An answer to a question nobody waits for any more.
            if *of != serial {
                continue;
            }
            break table.ok_or_else(|| String::from_utf8_lossy(reason).into_owned())?;
        };
        let mut bytes = Vec::new();
        let read = table.rewind().and_then(|()| table.take(MAX_TABLE).read_to_end(&mut bytes));
        read.map(|_| bytes).map_err(|error| error.to_string())
    }
}

fn serve(socket: &OwnedFd) -> io::Result<()> {
    confine()?;
    loop {
        let (message, file) = receive(socket)?;
        if message.is_empty() {
            return Ok(()); // the collector is gone
        }
        let parts = message.split_first_chunk::<8>();
        let (Some(file), Some((serial, [what]))) = (file, parts) else { continue };
        let answer = |reason: &str, table: Option<BorrowedFd<'_>>| {
            channel::send(socket, &[serial, reason.as_bytes()].concat(), table)
        };
        // SAFETY: there is one thread, so the child has all of the state it may use.
        match unsafe { libc::fork() } {
            -1 => answer(&io::Error::last_os_error().to_string(), None)?,
            0 => {
                let code = match in_child(&file, *what) {
                    Ok(found) => answer("", Some(found.as_fd())),
                    Err(reason) => answer(&reason, None),
                };
                // SAFETY: ends this process; nothing of the parent's is run.
                unsafe { libc::_exit(i32::from(code.is_err())) }
            }
            child => {
                let Some(child) = Pid::from_raw(child) else { continue };
                let in_time = ends(child, LIMIT);
                let status = waitpid(Some(child), WaitOptions::empty())?;
                let answered = status.is_some_and(|(_, status)| status.exit_status() == Some(0));
                if !answered {
                    let reason = match in_time {
                        true => "its call frame information ended the compiler".to_owned(),
                        false => format!("it was not compiled within {} s", LIMIT.as_secs()),
                    };
                    answer(&reason, None)?;
                }
            }
        }
    }
}

fn in_child(file: &File, what: u8) -> Result<OwnedFd, String> {
    let limit = |amount| Rlimit { current: Some(amount), maximum: Some(amount) };
    setrlimit(Resource::As, limit(MAX_MEMORY)).map_err(|error| error.to_string())?;
    setrlimit(Resource::Cpu, limit(LIMIT.as_secs())).map_err(|error| error.to_string())?;
    setrlimit(Resource::Core, limit(0)).map_err(|error| error.to_string())?;
    let found = match what {
        IDENTIFY => build_id(file),
        _ => compile(file).map(|table| table.to_bytes()),
    };
    let found = found.map_err(|error| error.to_string())?;
    let memory = memfd_create(c"table", MemfdFlags::CLOEXEC).map_err(|error| error.to_string())?;
    let mut memory = File::from(memory);
    memory.write_all(&found).map_err(|error| error.to_string())?;
    Ok(memory.into())
}

/// Gives up everything but what compiling takes, for good and for all children.
fn confine() -> io::Result<()> {
    capabilities::drop_all()?;
    let abi = ABI::V5;
    // As much of it as the kernel knows: before 5.13 there is none, and the filter below has no call that opens.
    let _ = Ruleset::default()
        .handle_access(AccessFs::from_all(abi))
        .and_then(|rules| rules.handle_access(AccessNet::from_all(abi)))
        .and_then(|rules| rules.create())
        .and_then(|rules| rules.restrict_self());
    let rules: BTreeMap<i64, _> = ALLOWED.iter().map(|&call| (call, Vec::new())).collect();
    let kill = SeccompAction::KillProcess;
    let filter = SeccompFilter::new(rules, kill, SeccompAction::Allow, TargetArch::x86_64)
        .and_then(seccompiler::BpfProgram::try_from)
        .map_err(io::Error::other)?;
    seccompiler::apply_filter(&filter).map_err(io::Error::other)
}

/// System calls of compiling: memory, the files that are handed over, children, and messages.
const ALLOWED: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fcntl,
    libc::SYS_fork,
    libc::SYS_fstat,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_kill,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_memfd_create,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_pidfd_open,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_prlimit64,
    libc::SYS_read,
    libc::SYS_recvmsg,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sendmsg,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_sigaltstack,
    libc::SYS_statx,
    libc::SYS_tgkill,
    libc::SYS_wait4,
    libc::SYS_write,
];
