//! The way to a Python before 3.14: a thread is made to call `mmap` for a page, which gets the text
//! that is to run, and `Py_AddPendingCall` with `PyRun_SimpleString` and the page, so that the main
//! thread runs it between two instructions of Python. `frame.rs` in `arch/` has why that leaves
//! no trace when we die.

use std::time::{Duration, Instant};

use stackwire_model::{MapsLine, PythonOutcome};

use super::Places;
use super::process::{PAUSE, Process, in_time};
use super::thread::{Stopped, ThreadError};
use crate::arch::call::{Call, Registers};
use crate::arch::frame::{instruction, is_in_call, thread_pointer};

/// How long threads are looked at until one is where it may be interrupted.
const FINDS_IN: Duration = Duration::from_millis(500);
/// How long a call of a thread that has been let go may take.
const CALLED_IN: Duration = Duration::from_secs(2);
/// Most threads that are looked at.
const MAX_THREADS: usize = 64;
const PAGE: u64 = 4096;
/// Bytes of stack that the called functions may need: their frames are of some hundred bytes.
const DEPTH: u64 = 16 << 10;

/// A page in a process.
pub(super) struct Page<'p> {
    process: &'p Process,
    places: &'p Places,
    /// Its address.
    pub at: u64,
}

impl<'p> Page<'p> {
    /// Chooses a place for one. It follows from `random`.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) fn choose(
        process: &'p Process,
        places: &'p Places,
        random: &[u8; 16],
    ) -> Result<Self, PythonOutcome> {
        let at = free_page(&process.maps(), random).ok_or(PythonOutcome::NoMemory)?;
        Ok(Self { process, places, at })
    }

    /// Gives the process the page.
    ///
    /// # Errors
    /// Why it has none. [`PythonOutcome::NoMemory`]: it may come later.
    pub(super) fn map(&self) -> Result<(), PythonOutcome> {
        let access = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let arguments = [self.at, PAGE, access, kind as u64, u64::MAX, 0];
        self.call(Call { function: self.places.map.at, arguments }, MAX_THREADS, || true)?;
        if in_time(CALLED_IN, || self.is_there()) { Ok(()) } else { Err(PythonOutcome::NoMemory) }
    }

    /// Whether the process has it.
    pub(super) fn is_there(&self) -> bool {
        self.process.read::<1>(self.at).is_some()
    }

    /// Has the main thread run the text that is in the page, as soon as it comes to it.
    ///
    /// # Errors
    /// Why it cannot be asked.
    pub(super) fn run(&self) -> Result<(), PythonOutcome> {
        let arguments = [self.places.run_string.at, self.at, 0, 0, 0, 0];
        let call = Call { function: self.places.add_pending_call.at, arguments };
        // The main thread ends the interpreter, so it must be stopped while that is looked at.
        self.call(call, 1, || self.process.may_run(self.places))
    }

    /// Gives the page back, which nothing may be going to read.
    ///
    /// # Errors
    /// Why it cannot be given back now.
    pub(super) fn unmap(&self) -> Result<(), PythonOutcome> {
        let arguments = [self.at, PAGE, 0, 0, 0, 0];
        let call = Call { function: self.places.unmap.at, arguments };
        self.call(call, MAX_THREADS, || true)
    }

    /// Has one of the first `threads` threads do a call, once one is where it may be interrupted,
    /// if it is still wanted then.
    fn call(
        &self,
        call: Call,
        threads: usize,
        is_wanted: impl Fn() -> bool,
    ) -> Result<(), PythonOutcome> {
        let mapped = Mapped::new(&self.process.maps(), self.places);
        let evaluator = self.places.evaluator..self.places.evaluator_end;
        let may_call = |registers: &Registers| {
            let at = instruction(registers);
            is_in_call(registers) || evaluator.contains(&at) || !mapped.is_in_library(at)
        };
        let deadline = Instant::now() + FINDS_IN;
        let mut last = PythonOutcome::NoSafePoint;
        loop {
            let threads = self.process.threads(threads);
            if threads.is_empty() {
                return Err(PythonOutcome::Ended);
            }
            for tid in threads {
                // One that waits for a disk or a server does not stop, and cannot be let go then.
                let is_deep = self.process.state(tid) == Some('D');
                match if is_deep { Err(ThreadError::Unsafe) } else { Stopped::stop(tid) } {
                    Ok(stopped) if may_call(stopped.registers()) => {
                        let pointer = thread_pointer(stopped.registers());
                        // It may have become another program, which cannot be told by memory that
                        // was opened before.
                        let Some(memory) = self.process.memory_of(tid, self.places) else {
                            return Err(PythonOutcome::Ended);
                        };
                        if !is_wanted() {
                            return Err(PythonOutcome::Ended);
                        }
                        let has_room = |from, to| mapped.has_room(from, to, pointer);
                        match stopped.call(&memory, call, self.places.restorer.at, has_room) {
                            Ok(()) => return Ok(()),
                            Err(ThreadError::Unfit) => return Err(PythonOutcome::Machine),
                            Err(_) => {}
                        }
                    }
                    Ok(_) | Err(ThreadError::Ended | ThreadError::Unsafe) => {}
                    Err(ThreadError::Unfit) => return Err(PythonOutcome::Machine),
                    Err(ThreadError::Stopped) => return Err(PythonOutcome::Stopped),
                    Err(ThreadError::Unresponsive) => return Err(PythonOutcome::Unresponsive),
                    Err(ThreadError::Refused) => match self.process.why_refused(tid) {
                        // It may be another capture, which lets it go at once.
                        Some(why @ (PythonOutcome::Traced | PythonOutcome::Denied)) => last = why,
                        Some(why) => return Err(why),
                        None => {}
                    },
                }
                std::thread::sleep(PAUSE);
                if Instant::now() >= deadline {
                    return Err(last);
                }
            }
        }
    }
}

/// What is mapped where, as far as it says where a thread may do a call.
struct Mapped {
    libraries: Vec<(u64, u64)>,
    /// Writable, each right above a guard, as the stacks of threads are.
    guarded: Vec<(u64, u64)>,
    /// That of the main thread, which grows when it is written to.
    stack: Option<(u64, u64)>,
}

impl Mapped {
    fn new(maps: &[u8], places: &Places) -> Self {
        let called = [places.add_pending_call.at, places.map.at, places.restorer.at];
        let code = || MapsLine::all(maps).filter(|line| line.is_executable);
        let holds = |line: &MapsLine<'_>, at: u64| (line.start.0..line.end.0).contains(&at);
        let paths: Vec<_> = code()
            .filter(|line| called.iter().any(|&at| holds(line, at)))
            .map(|line| line.path)
            .collect();
        let has = |path: &[u8], part: &[u8]| path.windows(part.len()).any(|it| it == part);
        let is_library = |line: &MapsLine<'_>| {
            let path = line.path;
            let others = has(path, b"/ld-") || has(path, b"/libpthread") || path == b"[vdso]";
            paths.contains(&path) || others
        };
        let range = |line: MapsLine<'_>| (line.start.0, line.end.0);
        let is_stack = |line: &MapsLine<'_>| line.path == b"[stack]";
        let pairs = MapsLine::all(maps).zip(MapsLine::all(maps).skip(1));
        let is_guarded = |(guard, line): &(MapsLine<'_>, MapsLine<'_>)| {
            let may_nothing = !guard.is_readable && !guard.is_writable && !guard.is_executable;
            may_nothing && guard.end == line.start && line.is_writable
        };
        let guarded = pairs.filter(is_guarded).map(|(_, line)| range(line)).collect();
        Self {
            libraries: code().filter(is_library).map(range).collect(),
            guarded,
            stack: MapsLine::all(maps).find(is_stack).map(range),
        }
    }

    /// Whether a thread there may hold a lock that the call takes: in the interpreter, the C
    /// library and the loader.
    fn is_in_library(&self, at: u64) -> bool {
        self.libraries.iter().any(|&(start, end)| (start..end).contains(&at))
    }

    /// Whether that is in the stack of a thread, with room below for what the called function takes
    /// of it.
    ///
    /// Stacks that a program makes for fibers and goroutines have no such room. What tells them
    /// from a thread's is that the thread's own data is above its stack, in the same mapping
    /// (`allocate_stack` of glibc's nptl, `__pthread_create` of musl).
    fn has_room(&self, from: u64, to: u64, thread_pointer: u64) -> bool {
        let is_in = |&(start, end): &(u64, u64), from: u64, to: u64| start <= from && to <= end;
        self.stack.is_some_and(|stack| is_in(&stack, from, to))
            || to <= thread_pointer
                && self
                    .guarded
                    .iter()
                    .any(|range| is_in(range, from.saturating_sub(DEPTH), thread_pointer))
    }
}

/// A page that nothing is at, nor beside it. Where it is does not follow from the process.
fn free_page(maps: &[u8], random: &[u8; 16]) -> Option<u64> {
    let taken: Vec<_> = MapsLine::all(maps).map(|line| (line.start.0, line.end.0)).collect();
    let (places, _) = random.as_chunks::<4>();
    places.iter().find_map(|&place| {
        // Between what is loaded near 0x5555_5555_5000 and libraries near 0x7fff_0000_0000.
        let page = 0x6000_0000_0000 + u64::from(u32::from_ne_bytes(place)) * PAGE;
        let around = page - PAGE..page + 2 * PAGE;
        let is_apart = |&(start, end): &(u64, u64)| end <= around.start || around.end <= start;
        taken.iter().all(is_apart).then_some(page)
    })
}

#[cfg(test)]
mod tests {
    use super::super::Function;
    use super::*;

    #[test]
    fn calls_are_done_where_there_is_room_and_no_lock() {
        let maps = b"1000-2000 r-xp 0 08:01 7 /lib/libpython3.12.so\n\
            2000-3000 r-xp 0 08:01 8 /lib/ld-linux.so\n3000-4000 r-xp 0 08:01 9 /lib/numpy.so\n\
            f000-10000 ---p 0 00:00 0\n10000-20000 rw-p 0 00:00 0\n\
            20000-21000 ---p 0 00:00 0\n23000-2b000 rw-p 0 00:00 0\n\
            30000-31000 rw-p 0 00:00 0 [stack]\n";
        let function = |at| Function { at, ..Function::default() };
        let places = Places { add_pending_call: function(0x1100), ..Places::default() };
        let mapped = Mapped::new(maps, &places);
        let is_in: Vec<_> = [0x1500, 0x2500, 0x3500].map(|at| mapped.is_in_library(at)).into();
        assert_eq!(is_in, [true, true, false]);
        assert!(mapped.has_room(0x15000, 0x16000, 0x1f000), "of a thread");
        assert!(mapped.has_room(0x30800, 0x30900, 0x70000), "of the main thread");
        assert!(!mapped.has_room(0x13000, 0x13100, 0x1f000), "too near the end");
        assert!(!mapped.has_room(0x15000, 0x16000, 0x15800), "of a fiber, above");
        assert!(!mapped.has_room(0x15000, 0x16000, 0x2a000), "of a fiber, elsewhere");
        assert!(!mapped.has_room(0x28000, 0x28100, 0x2a000), "without a guard");
        assert!(!mapped.has_room(0x20000, 0x20100, 0x2a000), "a guard");
        assert!(!mapped.has_room(0x30800, 0x31100, 0x70000), "no stack");
    }

    #[test]
    fn a_page_is_where_nothing_else_is() {
        let page = free_page(b"", &[1; 16]).unwrap();
        let beside =
            |from: u64| format!("{:x}-{:x} rw-p 0 00:00 0\n", page - PAGE + from, page + PAGE);
        for from in [0, PAGE, 2 * PAGE - 1] {
            assert_eq!(free_page(beside(from).as_bytes(), &[1; 16]), None);
        }
        let mut random = [1; 16];
        random[14] = 2;
        let other = free_page(beside(0).as_bytes(), &random).unwrap();
        assert!(other != page && other.is_multiple_of(PAGE));
    }
}
