//! The unwind compiler: a process without any privilege that turns ELF files and jitdumps it is
//! handed into unwind tables.
//!
//! It can open nothing and reach nothing: it has no capabilities, is confined by Landlock, and may
//! make only the system calls that compiling needs. Each file is compiled in a child process with
//! limits of memory and time. If the child dies, that file has no table.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use landlock::{ABI, Access, AccessFs, AccessNet, Ruleset, RulesetAttr};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, Resource, Rlimit, WaitOptions, setrlimit, waitpid};
use seccompiler::{SeccompAction, SeccompFilter};
use stackwire_elf::ElfError;
use stackwire_model::BuildId;
use stackwire_rights::capabilities;
use stackwire_unwind::{CompileError, build_id, compile, jitdump};
use zerocopy::{FromBytes, IntoBytes};

use super::channel::{Client, NoAnswer, Question, Server, ends};
use super::interpreter::Interpreter;
use crate::arch;

/// How long a file may take; the largest libraries take a quarter of a second.
const LIMIT: Duration = Duration::from_secs(10);
/// The compiler's own answer that it took too long comes before this.
const PATIENCE: Duration = Duration::from_secs(12);
/// Address space of a child. libLLVM, of 1.1 million rows, takes 90 MB.
const MAX_MEMORY: u64 = 1 << 30;
/// Largest table taken from it.
const MAX_TABLE: u64 = 64 << 20;

/// The questions about a file. They ask for its table, for its build-id, for the table of one
/// window of the code that a jitdump describes (its number follows), or for its functions of an
/// interpreter.
const COMPILE: u8 = 0;
const IDENTIFY: u8 = 1;
const DESCRIBED: u8 = 2;
const INTERPRET: u8 = 3;

/// Why there is no table.
#[derive(Debug, thiserror::Error)]
pub enum CompilerError {
    /// The compiler cannot be asked.
    #[error("the unwind compiler {0}")]
    NoAnswer(#[from] NoAnswer),
    /// What it says of the file, in its own words.
    #[error("{0}")]
    Refused(String),
    /// Its child died of the file.
    #[error("its call frame information ended the compiler")]
    Died,
    /// It took too long.
    #[error("it was not compiled within {} s", LIMIT.as_secs())]
    Late,
    /// What it made cannot be read.
    #[error("its unwind table cannot be read: {0}")]
    Read(#[from] io::Error),
}

/// The way to the compiler.
#[derive(Debug)]
pub struct Compiler(Client);

impl Compiler {
    /// Starts the process. Gives up nothing of the caller's.
    ///
    /// # Errors
    /// When there is more than one thread, or no process to be had.
    pub fn start() -> io::Result<Self> {
        Client::start(c"sw-unwind", PATIENCE, serve).map(Self)
    }

    /// Compiles the table of a file, as bytes that [`Table::parse`](stackwire_unwind::Table::parse)
    /// is yet to check.
    ///
    /// # Errors
    /// See [`CompilerError`].
    pub fn compile(&self, file: &File) -> Result<Vec<u8>, CompilerError> {
        self.ask(file, &[COMPILE])
    }

    /// Likewise, of the code in a window that a jitdump describes.
    ///
    /// # Errors
    /// See [`CompilerError`].
    pub fn compile_described(&self, file: &File, window: u64) -> Result<Vec<u8>, CompilerError> {
        self.ask(file, &[&[DESCRIBED], &window.to_ne_bytes()[..]].concat())
    }

    /// The build-id of a file, if it has one.
    ///
    /// # Errors
    /// See [`CompilerError`].
    pub fn build_id(&self, file: &File) -> Result<Option<BuildId>, CompilerError> {
        self.ask(file, &[IDENTIFY]).map(|id| BuildId::new(&id))
    }

    /// What a file has of a Python interpreter or a C library.
    ///
    /// # Errors
    /// See [`CompilerError`].
    pub fn interpreter(&self, file: &File) -> Result<Interpreter, CompilerError> {
        let found = self.ask(file, &[INTERPRET])?;
        Interpreter::read_from_bytes(&found).map_err(|_size| CompilerError::Died)
    }

    fn ask(&self, file: &File, what: &[u8]) -> Result<Vec<u8>, CompilerError> {
        let (answer, made) = self.0.ask(what, Some(file.as_fd()))?;
        let mut made = made.ok_or_else(|| match answer.split_first() {
            Some((&REFUSED, words)) => {
                CompilerError::Refused(String::from_utf8_lossy(words).into_owned())
            }
            Some((&LATE, _)) => CompilerError::Late,
            Some(_) => CompilerError::Died,
            None => NoAnswer::Lost.into(),
        })?;
        let mut bytes = Vec::new();
        made.rewind()?;
        made.take(MAX_TABLE).read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}

/// How an answer without a table begins; words follow where the file was refused.
const REFUSED: u8 = 0;
const DIED: u8 = 1;
const LATE: u8 = 2;

fn serve(server: &Server) -> io::Result<()> {
    confine()?;
    while let Some(question) = server.next()? {
        // SAFETY: there is one thread, so the child has all of the state it may use.
        match unsafe { libc::fork() } {
            -1 => refuse(server, &question, &io::Error::last_os_error().into())?,
            0 => {
                let sent = match in_child(&question) {
                    Ok(found) => server.answer(&question, &[], Some(found.as_fd())),
                    Err(refusal) => refuse(server, &question, &refusal),
                };
                // SAFETY: ends this process; nothing of the parent's is run.
                unsafe { libc::_exit(i32::from(sent.is_err())) }
            }
            child => {
                let Some(child) = Pid::from_raw(child) else { continue };
                let in_time = ends(child, LIMIT);
                let status = waitpid(Some(child), WaitOptions::empty())?;
                let answered = status.is_some_and(|(_, status)| status.exit_status() == Some(0));
                if !answered {
                    server.answer(&question, &[if in_time { DIED } else { LATE }], None)?;
                }
            }
        }
    }
    Ok(())
}

fn refuse(server: &Server, question: &Question, refusal: &Refusal) -> io::Result<()> {
    server.answer(question, &[&[REFUSED], refusal.to_string().as_bytes()].concat(), None)
}

/// Why a child makes no table.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("{0}")]
    Compile(#[from] CompileError),
    #[error("{0}")]
    Elf(#[from] ElfError),
    #[error("no such window")]
    NoSuchWindow,
    #[error("no file to compile")]
    NoFile,
    #[error("{0}")]
    System(#[from] io::Error),
}

fn in_child(question: &Question) -> Result<OwnedFd, Refusal> {
    let file = question.file.as_ref().ok_or(Refusal::NoFile)?;
    let limit = |amount| Rlimit { current: Some(amount), maximum: Some(amount) };
    let limits =
        [(Resource::As, MAX_MEMORY), (Resource::Cpu, LIMIT.as_secs()), (Resource::Core, 0)];
    for (resource, amount) in limits {
        setrlimit(resource, limit(amount)).map_err(io::Error::from)?;
    }
    let made = match *question.content {
        [IDENTIFY] => build_id(file)?.map_or(Vec::new(), |id| id.as_bytes().to_vec()),
        [INTERPRET] => Interpreter::find(file)?.as_bytes().to_vec(),
        [DESCRIBED, ref window @ ..] => {
            let window = window.try_into().map_err(|_length| Refusal::NoSuchWindow)?;
            jitdump::compile(file, u64::from_ne_bytes(window))?.to_bytes()
        }
        _ => compile(file)?.to_bytes(),
    };
    let memory = memfd_create(c"table", MemfdFlags::CLOEXEC).map_err(io::Error::from)?;
    let mut memory = File::from(memory);
    memory.write_all(&made)?;
    Ok(memory.into())
}

/// Gives up everything but what compiling takes, for good and for all children.
fn confine() -> io::Result<()> {
    capabilities::drop_all()?;
    let abi = ABI::V5;
    // As much of it as the kernel knows: before 5.13 there is none, and the filter below has no
    // call that opens.
    let _ = Ruleset::default()
        .handle_access(AccessFs::from_all(abi))
        .and_then(|rules| rules.handle_access(AccessNet::from_all(abi)))
        .and_then(|rules| rules.create())
        .and_then(|rules| rules.restrict_self());
    let allowed = ALLOWED.iter().chain(arch::OLDER_CALLS);
    let rules: BTreeMap<i64, _> = allowed.map(|&call| (call, Vec::new())).collect();
    let kill = SeccompAction::KillProcess;
    let filter = SeccompFilter::new(rules, kill, SeccompAction::Allow, arch::SECCOMP)
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
