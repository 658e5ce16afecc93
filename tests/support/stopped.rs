//! A thread that is stopped, with its process: its registers and memory, as ptrace has them, and
//! what is mapped where.

#![expect(unsafe_code, reason = "ptrace has no safe interface")]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// An executable mapping of a file, or of none.
#[derive(Clone, Debug)]
pub(crate) struct Mapping {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) offset: u64,
    /// Empty: made at run time.
    pub(crate) path: PathBuf,
}

impl Mapping {
    pub(crate) const fn contains(&self, address: u64) -> bool {
        self.start <= address && address < self.end
    }
}

/// The thread; its process runs on when this is dropped.
pub(crate) struct Stopped {
    _held: Vec<Held>,
    memory: File,
    /// By DWARF number, rip last.
    pub(crate) registers: [u64; 17],
    /// Base of fs: where the thread's own variables are.
    pub(crate) thread: u64,
    /// By address.
    pub(crate) mappings: Vec<Mapping>,
}

impl Stopped {
    /// Stops a thread, the main one if that is its process's id, wherever it is, and then all
    /// others of its process: Go's garbage collector moves the stack of one thread from another.
    /// `None` when it is gone.
    pub(crate) fn stop(tid: u32) -> Option<Self> {
        let pid = tid as i32;
        let mut held = vec![Held::stop(pid)?];
        // SAFETY: a plain system call; the structure outlives it.
        let regs = unsafe {
            let mut regs: libc::user_regs_struct = std::mem::zeroed();
            let got = libc::ptrace(libc::PTRACE_GETREGS, pid, 0, &raw mut regs);
            (got == 0).then_some(regs)?
        };
        // Until the last is stopped, others may start more.
        loop {
            let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten();
            let threads = threads.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
            let new: Vec<i32> =
                threads.filter(|tid| held.iter().all(|held| held.0 != *tid)).collect();
            let before = held.len();
            held.extend(new.into_iter().filter_map(Held::stop));
            if held.len() == before {
                break;
            }
        }
        let memory = File::open(format!("/proc/{pid}/mem"));
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        let registers = [
            regs.rax, regs.rdx, regs.rcx, regs.rbx, regs.rsi, regs.rdi, regs.rbp, regs.rsp,
            regs.r8, regs.r9, regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15, regs.rip,
        ];
        let mappings = maps.lines().filter_map(mapping).collect();
        let thread = regs.fs_base;
        Some(Self { _held: held, memory: memory.ok()?, registers, thread, mappings })
    }

    /// Eight bytes of its memory.
    pub(crate) fn word(&self, address: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.memory.read_exact_at(&mut bytes, address).ok()?;
        Some(u64::from_le_bytes(bytes))
    }

    /// Bytes of its memory.
    pub(crate) fn read(&self, address: u64, length: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.memory.read_exact_at(&mut bytes, address).ok()?;
        Some(bytes)
    }

    /// The mapping an address lies in.
    pub(crate) fn mapping(&self, address: u64) -> Option<&Mapping> {
        let after = self.mappings.partition_point(|mapping| mapping.start <= address);
        self.mappings.get(after.checked_sub(1)?).filter(|mapping| mapping.contains(address))
    }
}

/// A thread that is stopped until dropped.
struct Held(i32);

impl Held {
    fn stop(tid: i32) -> Option<Self> {
        // SAFETY: plain system calls; the status outlives the one that fills it.
        unsafe {
            if libc::ptrace(libc::PTRACE_SEIZE, tid, 0, 0) != 0 {
                return None;
            }
            let held = Self(tid);
            libc::ptrace(libc::PTRACE_INTERRUPT, tid, 0, 0);
            let mut status = 0;
            // A signal may stop it before; it is given again when it runs on.
            let waited = libc::waitpid(tid, &raw mut status, libc::__WALL);
            (waited == tid && libc::WIFSTOPPED(status)).then_some(held)
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: a plain system call. One that has ended meanwhile needs no more.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0, 0, 0) };
    }
}

fn mapping(line: &str) -> Option<Mapping> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let (start, end) = (hex(start)?, hex(end)?);
    fields.next()?.contains('x').then_some(())?;
    let offset = hex(fields.next()?)?;
    let path = fields.nth(2).unwrap_or_default();
    let path = if path.starts_with('/') || path == "[vdso]" { path } else { "" };
    Some(Mapping { start, end, offset, path: path.into() })
}
