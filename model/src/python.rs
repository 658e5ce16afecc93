//! What became of switching a Python process's perf trampoline on.

/// The outcome, for one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PythonOutcome {
    /// It is on, and is switched off when the capture ends.
    Activated,
    /// It was on before, and stays so.
    WasActive,
    /// The main thread has not come to it yet: it sleeps, or runs code that is not Python. Or it
    /// may not open its own memory, by which it would say so.
    Waiting,
    /// The interpreter has refused: it was built without, or something else evaluates its frames.
    Refused,
    /// A Python before 3.12, which has no trampoline.
    TooOld,
    /// A version that may crash when it is switched on or off.
    Broken,
    /// It was on once, and this version may crash when it is switched on a second time.
    Spent,
    /// What is needed of it was not found: it has no dynamic symbols, a C library that is not
    /// known, or its files are others by now than those it runs.
    Unknown,
    /// Somebody else traces it: a debugger, strace.
    Traced,
    /// The kernel does not let the collector trace it, or write to its memory.
    Denied,
    /// It is stopped.
    Stopped,
    /// None of its threads was where it may be interrupted, or had room on its stack.
    NoSafePoint,
    /// It got no memory for a page.
    NoMemory,
    /// No directory for temporary files could be written to.
    NoScript,
    /// A thread did not stop: it waits for a disk or a server.
    Unresponsive,
    /// Not a 64-bit program, or of a processor it is not done on.
    Machine,
    /// It has ended, or become another program.
    Ended,
    /// Who was to do it has ended.
    Lost,
    /// More processes than are traced in one capture, or at once.
    TooMany,
    /// It was switched on, and was not off at the end: the main thread had not come to it.
    LeftOn,
    /// Seccomp lets it make no system call that is needed.
    Sandboxed,
    /// At the place of its perf map is something else than a file.
    NoMap,
}

impl PythonOutcome {
    /// All of them.
    pub const ALL: [Self; 22] = [
        Self::Activated,
        Self::WasActive,
        Self::Waiting,
        Self::Refused,
        Self::TooOld,
        Self::Unknown,
        Self::Traced,
        Self::Denied,
        Self::Stopped,
        Self::NoSafePoint,
        Self::NoMemory,
        Self::NoScript,
        Self::Broken,
        Self::Spent,
        Self::Unresponsive,
        Self::Machine,
        Self::Ended,
        Self::Lost,
        Self::TooMany,
        Self::LeftOn,
        Self::Sandboxed,
        Self::NoMap,
    ];

    /// Its place among [`PythonOutcome::ALL`].
    #[must_use]
    pub fn number(self) -> u8 {
        Self::ALL.iter().position(|&it| it == self).unwrap_or_default() as u8
    }

    /// The one with this place.
    #[must_use]
    pub fn of_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// Whether its functions have names, or will have when its main thread comes to it.
    #[must_use]
    pub fn is_good(self) -> bool {
        matches!(self, Self::Activated | Self::WasActive | Self::Waiting | Self::LeftOn)
    }

    /// For reports and messages.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Activated => "switched on, and off again at the end",
            Self::WasActive => "was on before and stays on",
            Self::Waiting => {
                "not on yet: the main thread sleeps, runs no Python, or may not open /proc/self/mem"
            }
            Self::Refused => {
                "the interpreter refused: it was built without perf trampolines, a debugger evaluates its frames, or -X disable-remote-debug is set"
            }
            Self::Broken => {
                "this version of CPython may crash with it (3.12.0, 3.13.12, 3.14.3); use a later one"
            }
            Self::Spent => {
                "it was on once, and this version of CPython may crash when it is switched on again; restart it"
            }
            Self::TooOld => "Python before 3.12 has no perf trampoline",
            Self::Unknown => {
                "its interpreter has no dynamic symbols, its C library is not known, or its files were replaced"
            }
            Self::Traced => "a debugger or strace traces it",
            Self::Denied => {
                "the kernel does not let the collector trace it; run the collector as root, with CAP_SYS_PTRACE"
            }
            Self::Stopped => "it is stopped; let it go on with kill -CONT",
            Self::NoSafePoint => "no thread was where it may be interrupted; try again",
            Self::NoMemory => "it could not map a page of memory",
            Self::NoScript => "the collector can write to none of its /tmp, /var/tmp and /dev/shm",
            Self::Unresponsive => "a thread does not stop: it waits for a disk or a server",
            Self::Machine => "only 64-bit programs on x86-64 can be asked",
            Self::Ended => "it has ended or become another program",
            Self::Lost => "the process that was to do it has ended",
            Self::TooMany => "too many Python processes in one capture",
            Self::LeftOn => {
                "switched on, and still on at the end: the main thread did not come to it"
            }
            Self::Sandboxed => "seccomp lets it make no system call",
            Self::NoMap => "what is at its /tmp/perf-PID.map is no regular file; remove it",
        }
    }
}
