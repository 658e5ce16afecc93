//! What is looked at of a process that is asked: its memory, threads and mappings.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2};
use stackwire_model::PythonOutcome;

use super::{Function, Places};

/// Time between two looks.
pub(super) const PAUSE: Duration = Duration::from_micros(300);
/// How long an interpreter may take to begin.
const BEGINS_IN: Duration = Duration::from_secs(3);
/// `SECCOMP_MODE_STRICT` of include/uapi/linux/seccomp.h: all but four system calls kill.
const STRICT: &str = "1";
/// Most bytes of the text of mappings: ten times what the largest known process has.
const MAX_MAPS: u64 = 64 << 20;

/// A process. Its memory stays that of the program it is now, whatever it becomes.
pub(super) struct Process {
    pid: i32,
    memory: File,
}

impl Process {
    /// Opens its memory, which the kernel lets its user and root do: `/proc/PID/mem` is theirs to
    /// write. Makes sure that things are where they are thought to be: the process may be another
    /// by now, or its files others than those it has mapped. Waits until its interpreter has begun.
    ///
    /// # Errors
    /// Why it may not be looked at, or asked.
    pub(super) fn open(pid: u32, places: &Places) -> Result<Self, PythonOutcome> {
        let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem"));
        let memory = memory.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => PythonOutcome::Ended,
            _ => PythonOutcome::Denied,
        })?;
        let process = Self { pid: pid as i32, memory };
        if !has_functions(&process.memory, places) {
            return Err(PythonOutcome::Unknown);
        }
        if process.field("Seccomp:").is_some_and(|mode| mode == STRICT) {
            return Err(PythonOutcome::Sandboxed);
        }
        if !process.may_write_map() {
            return Err(PythonOutcome::NoMap);
        }
        if !in_time(BEGINS_IN, || process.is_initialized(places)) {
            return Err(PythonOutcome::NoSafePoint);
        }
        Ok(process)
    }

    /// Whether its interpreter has begun: before, there is no thread to run anything.
    fn is_initialized(&self, places: &Places) -> bool {
        let read = self.read::<4>(places.runtime.wrapping_add(places.state.initialized));
        read.is_some_and(|it| it != [0; 4])
    }

    /// Whether its interpreter is there and not about to end. To be asked while the main thread,
    /// which ends it, is stopped.
    pub(super) fn may_run(&self, places: &Places) -> bool {
        let finalizing = self.read::<8>(places.runtime.wrapping_add(places.state.finalizing));
        self.is_initialized(places) && finalizing == Some([0; 8])
    }

    /// Whether Python can write names: there may be something else at the place of its perf map,
    /// and to open a FIFO takes until somebody reads from it.
    fn may_write_map(&self) -> bool {
        let path = format!("tmp/perf-{}.map", self.own_pid());
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let there = self.root().and_then(|root| {
            let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
            Ok(fstat(openat2(root, path, flags, Mode::empty(), resolve)?)?)
        });
        there.is_err()
            || there.is_ok_and(|it| FileType::from_raw_mode(it.st_mode) == FileType::RegularFile)
    }

    /// Its root directory, from which paths may be followed.
    ///
    /// # Errors
    /// When it is out of reach.
    pub(super) fn root(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        Ok(openat(CWD, format!("/proc/{}/root", self.pid), flags, Mode::empty())?)
    }

    /// Its number as it has it itself.
    pub(super) fn own_pid(&self) -> i32 {
        let numbers = self.field("NSpid:").unwrap_or_default();
        let own = numbers.split_whitespace().next_back().and_then(|own| own.parse().ok());
        own.unwrap_or(self.pid)
    }

    /// State of a thread, as ps(1) has it.
    pub(super) fn state(&self, tid: i32) -> Option<char> {
        self.field_of(tid, "State:")?.chars().next()
    }

    /// Time that the main thread has been on a CPU. Zero: nobody knows.
    pub(super) fn main_thread_ran(&self) -> Duration {
        let text = std::fs::read_to_string(format!("/proc/{0}/task/{0}/schedstat", self.pid));
        let ns = text.ok().and_then(|text| text.split_whitespace().next()?.parse().ok());
        Duration::from_nanos(ns.unwrap_or_default())
    }

    /// What the kernel says of the process under a name.
    fn field(&self, name: &str) -> Option<String> {
        self.field_of(self.pid, name)
    }

    fn field_of(&self, tid: i32, name: &str) -> Option<String> {
        let status =
            std::fs::read_to_string(format!("/proc/{}/task/{tid}/status", self.pid)).ok()?;
        let field = status.lines().find_map(|line| line.strip_prefix(name));
        field.map(|field| field.trim().to_owned())
    }

    /// Its number.
    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    /// The memory of a thread that is stopped, opened now. None: it is another program's.
    pub(super) fn memory_of(&self, tid: i32, places: &Places) -> Option<File> {
        let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{tid}/mem"));
        memory.ok().filter(|memory| has_functions(memory, places))
    }

    /// Whether its memory is gone.
    pub(super) fn has_ended(&self, places: &Places) -> bool {
        !has_functions(&self.memory, places)
    }

    /// Bytes of its memory. None: there are none, or it has ended.
    pub(super) fn read<const N: usize>(&self, at: u64) -> Option<[u8; N]> {
        read(&self.memory, at)
    }

    /// Writes to its memory.
    ///
    /// # Errors
    /// [`PythonOutcome::Ended`]: there is none, or it has ended.
    pub(super) fn write(&self, bytes: &[u8], at: u64) -> Result<(), PythonOutcome> {
        self.memory.write_all_at(bytes, at).map_err(|_error| PythonOutcome::Ended)
    }

    /// The text of its mappings.
    pub(super) fn maps(&self) -> Vec<u8> {
        let mut text = Vec::new();
        if let Ok(file) = File::open(format!("/proc/{}/maps", self.pid)) {
            // What has been read until an error is whole lines, and of the rest nothing is done.
            let _ = file.take(MAX_MAPS).read_to_end(&mut text);
        }
        text
    }

    /// Its threads, the main thread first: its system calls end when the others' would not.
    pub(super) fn threads(&self, at_most: usize) -> Vec<i32> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid));
        let names = tasks.into_iter().flatten().flatten().map(|task| task.file_name());
        let mut tids: Vec<i32> = names.filter_map(|name| name.to_str()?.parse().ok()).collect();
        tids.sort_by_key(|&tid| (tid != self.pid, tid));
        tids.truncate(at_most);
        tids
    }

    /// Why the kernel does not let a thread be traced. None: it has ended, and others may be.
    pub(super) fn why_refused(&self, tid: i32) -> Option<PythonOutcome> {
        match (self.state(tid), self.field_of(tid, "TracerPid:")) {
            (Some(state), Some(tracer)) if !['Z', 'X'].contains(&state) => {
                let is_free = tracer == "0";
                Some(if is_free { PythonOutcome::Denied } else { PythonOutcome::Traced })
            }
            _ => None,
        }
    }
}

/// Whether functions are where they are thought to be.
fn has_functions(memory: &File, places: &Places) -> bool {
    let Places { add_pending_call, run_string, map, unmap, restorer, .. } = places;
    let is_there = |it: &Function| read(memory, it.at) == Some(it.head);
    [add_pending_call, run_string, map, unmap, restorer].into_iter().all(is_there)
}

fn read<const N: usize>(memory: &File, at: u64) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    memory.read_exact_at(&mut bytes, at).ok().map(|()| bytes)
}

/// Whether it becomes true in time.
pub(super) fn in_time(time: Duration, is_true: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + time;
    loop {
        if is_true() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
}
