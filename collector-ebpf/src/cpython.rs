//! Where a CPython keeps its frames: what the unwind compiler finds out of a file, and what the
//! kernel side hands over of Python frames and of code objects.
//!
//! Offsets are of CPython 3.8 to 3.15 (Include/internal/pycore_frame.h, pycore_runtime.h and
//! pycore_debug_offsets.h). Pure; the walk is `walk/by_frame_list.rs`.

#[cfg(not(target_arch = "bpf"))]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Layouts that may be known at once; number 0 is none.
pub const LAYOUTS: u32 = 64;
/// Python frames and places of evaluators that a sample may carry.
pub const MAX_ENTRIES: usize = 512;
/// Evaluators on a stack at most: each runs Python frames up to where C called it. Before 3.11 each
/// runs one.
pub const MAX_EVALUATORS: usize = MAX_ENTRIES / 2;
/// Code objects of which a sample hands over what names them, a power of two. Others come with
/// later samples.
pub const MAX_NEW: usize = 64;
/// Words of the table of code objects that were handed over, a power of two.
pub const KNOWN_CODES: u32 = 1 << 16;
/// Bytes of a name, of a path, and of a line table that are handed over.
pub const MAX_NAME: usize = 512;
/// See [`MAX_NAME`].
pub const MAX_PATH: usize = 1024;
/// See [`MAX_NAME`].
pub const MAX_LINES: usize = 4096;

/// Offset of a field that there is none of.
pub const NO_FIELD: u16 = u16::MAX;

/// Where things are in the memory of one build of CPython, in bytes.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, IntoBytes, Immutable, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Layout {
    /// `_PyRuntime`: from where the file's first byte would be, if all of it were mapped as its
    /// code is.
    pub runtime: u64,
    /// `PyCode_Type`, likewise.
    pub code_type: u64,
    /// `PyUnicode_Type` and `PyBytes_Type`, likewise.
    pub text_type: u64,
    /// See [`Layout::text_type`].
    pub bytes_type: u64,
    /// `_PyEval_EvalFrameDefault`, likewise, with [`evaluators::IN_RANGE`].
    pub evaluator: u64,
    /// `PY_VERSION_HEX`.
    pub version: u32,
    /// Bytes of `_PyEval_EvalFrameDefault`, with [`evaluators::IN_RANGE`].
    pub evaluator_bytes: u32,
    /// `interpreters.head` in `_PyRuntime`.
    pub interpreters: u16,
    /// `next` of an interpreter.
    pub next_interpreter: u16,
    /// `threads.head` of an interpreter.
    pub threads: u16,
    /// `next` of a thread.
    pub next_thread: u16,
    /// `thread_id` of a thread: what `pthread_self` gives.
    pub thread_id: u16,
    /// `current_frame` of a thread, or of what `c_frame` leads to.
    pub current_frame: u16,
    /// `cframe` of a thread (3.10 to 3.12), else [`NO_FIELD`].
    pub c_frame: u16,
    /// `previous` of a `CFrame`, with [`evaluators::AT_ENTRY`] and [`evaluators::EACH`].
    pub previous_c_frame: u16,
    /// `previous` of a frame.
    pub previous: u16,
    /// `f_code` or `f_executable` of a frame.
    pub code: u16,
    /// `f_lasti`, `prev_instr` or `instr_ptr` of a frame.
    pub instruction: u16,
    /// Bytes that `f_lasti` counts in (3.8 to 3.10); 0: it is an address.
    pub unit: u16,
    /// What tells where an evaluator's frames end: one of [`evaluators`].
    pub evaluators: u16,
    /// `owner` of a frame, or `is_entry`, with [`evaluators::SHIMS`] and [`evaluators::AT_ENTRY`].
    pub owner: u16,
    /// `co_filename` of a code object.
    pub path: u16,
    /// `co_qualname`, before 3.11 `co_name`.
    pub name: u16,
    /// `co_linetable`, before 3.10 `co_lnotab`.
    pub lines: u16,
    /// `co_firstlineno`.
    pub first_line: u16,
    /// `co_code_adaptive`: its instructions.
    pub instructions: u16,
    /// Where the characters of a string begin that has ASCII alone.
    pub ascii: u16,
    /// Likewise, of another string.
    pub characters: u16,
    /// Zero; keeps the size a multiple of 8.
    pub reserved: [u16; 3],
}

/// What tells where the frames of an evaluator end, which is called anew where C calls Python.
pub mod evaluators {
    /// A frame that is a local variable of the evaluator (3.12 and later).
    pub const SHIMS: u16 = 0;
    /// A mark in the first of its frames; a `_PyCFrame` is its local variable (3.11).
    pub const AT_ENTRY: u16 = 1;
    /// It runs one frame, and has a `CFrame` as a local variable (3.10).
    pub const EACH: u16 = 2;
    /// It runs one frame; it is known by its code alone (3.8, 3.9).
    pub const IN_RANGE: u16 = 3;
    /// Nothing is known of this version: the layout has that alone.
    pub const UNKNOWN: u16 = 4;
    /// Likewise, of a build without the global interpreter lock.
    pub const FREE_THREADED: u16 = 5;
}

/// Bytes that are read of a frame.
pub const FRAME_BYTES: usize = 112;
/// Bytes that are read of a code object.
pub const CODE_BYTES: usize = 152;

#[cfg(not(target_arch = "bpf"))]
impl Layout {
    /// That of a CPython of which nothing but its version is known; 0: not even that.
    #[must_use]
    pub fn unknown(version: u32, is_free_threaded: bool) -> Self {
        let evaluators =
            if is_free_threaded { evaluators::FREE_THREADED } else { evaluators::UNKNOWN };
        Self { version, evaluators, ..Self::default() }
    }

    /// Whether what the kernel side reads is within what it has room for.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        if [evaluators::UNKNOWN, evaluators::FREE_THREADED].contains(&self.evaluators) {
            return *self
                == Self { evaluators: self.evaluators, ..Self::unknown(self.version, false) };
        }
        let of_frame = [self.previous, self.code, self.instruction, self.owner];
        let of_code = [self.path, self.name, self.lines, self.first_line];
        let inside = |offset: u16, bytes: usize| usize::from(offset) + 8 <= bytes;
        of_frame.into_iter().all(|offset| inside(offset, FRAME_BYTES))
            && of_code.into_iter().all(|offset| inside(offset, CODE_BYTES))
            && self.unit <= 2
            && self.evaluators <= evaluators::IN_RANGE
    }
}

/// `FRAME_OWNED_BY_CSTACK` (3.12, 3.13), `FRAME_OWNED_BY_INTERPRETER` (3.14 and later): the frame
/// is a local variable of the evaluator that runs those before it. All above are such, too.
pub const OWNED_BY_EVALUATOR: u8 = 3;

/// Set in the first word of an [`Entry`]: it is no Python frame, but where an evaluator ends. Below
/// it there is the number of the evaluator's frame among the native ones, or [`NOT_FOUND`].
pub const EVALUATOR: u64 = 1 << 63;
/// Instead of an address in the stack frame of an evaluator: it is the next native frame in its
/// code. Where one of them is not found, or one more, which is which is not known.
pub const ANY: u64 = 1;
/// The native walk has not come by the evaluator.
pub const NOT_FOUND: u64 = 0xffff;

/// A Python frame, or the end of an evaluator's.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, IntoBytes, Immutable, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Entry {
    /// Address of the code object. Of an evaluator: [`EVALUATOR`] and the number of a native frame.
    pub code: u64,
    /// [`Entry::cookie`] above the position: bytes from the first instruction to the one that runs
    /// or calls, as an `i32`. Of an evaluator: an address in its stack frame, or [`ANY`].
    pub rest: u64,
}

impl Entry {
    /// Tells the code object from others that are or were at its address.
    #[inline(always)]
    #[must_use]
    pub fn cookie(self) -> u32 {
        (self.rest >> 32) as u32
    }

    /// Bytes from the first instruction; negative before the first has run.
    #[inline(always)]
    #[must_use]
    pub fn position(self) -> i32 {
        self.rest as i32
    }
}

/// In a record of [`RecordKind::Managed`](crate::RecordKind), behind the head: `entries` of
/// [`Entry`] follow, the innermost first.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, IntoBytes, Immutable, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ManagedHead {
    /// Number of entries.
    pub entries: u32,
    /// [`ListEnd`] as a number.
    pub end: u32,
}

/// Why the list of Python frames ended where it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ListEnd {
    /// The first function of the thread.
    Root = 0,
    /// The thread runs no Python.
    NoThread = 1,
    /// Memory could not be read.
    Unreadable = 2,
    /// [`MAX_ENTRIES`] or [`MAX_EVALUATORS`] reached.
    DepthLimit = 3,
    /// The thread was not among the first of the process.
    ManyThreads = 4,
    /// There are more evaluators than frames for them: a frame was being made or unmade.
    Changing = 5,
    /// The ring buffer had no room for it.
    RingFull = 6,
}

impl ListEnd {
    /// By its number.
    #[must_use]
    pub fn new(number: u8) -> Option<Self> {
        use ListEnd::{Changing, DepthLimit, ManyThreads, NoThread, RingFull, Root, Unreadable};
        let all = [Root, NoThread, Unreadable, DepthLimit, ManyThreads, Changing, RingFull];
        all.get(usize::from(number)).copied()
    }
}

/// In a record of [`RecordKind::Code`](crate::RecordKind), behind the head: what names a code
/// object. The bytes of its name, its path and its line table follow, without gaps.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, IntoBytes, Immutable, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CodeHead {
    /// Its address.
    pub code: u64,
    /// See [`Entry::cookie`].
    pub cookie: u32,
    /// `PY_VERSION_HEX`.
    pub version: u32,
    /// Line it begins in.
    pub first_line: i32,
    /// `state` of the name: its bits 2 to 4 are the bytes of a character.
    pub name_state: u32,
    /// Likewise, of the path.
    pub path_state: u32,
    /// Bytes of the name that follow.
    pub name_bytes: u32,
    /// Bytes of the path that follow.
    pub path_bytes: u32,
    /// Bytes of the line table that follow.
    pub lines_bytes: u32,
    /// Bytes the name has.
    pub name_length: u64,
    /// Bytes the path has.
    pub path_length: u64,
    /// Bytes the line table has. Where not all of them follow, none do.
    pub lines_length: u64,
}

/// Mixes what tells a code object from others at its address: where its name, its path and its line
/// table are, and its first line.
#[inline(always)]
#[must_use]
pub fn cookie(name: u64, path: u64, lines: u64, first_line: u32) -> u32 {
    const PRIME: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut mixed = (name ^ u64::from(first_line)).wrapping_mul(PRIME);
    mixed = (mixed ^ mixed >> 29 ^ path).wrapping_mul(PRIME);
    mixed = (mixed ^ mixed >> 32 ^ lines).wrapping_mul(PRIME);
    (mixed >> 32) as u32
}

/// The word of a code object that was handed over; its last bits are its place in the table.
#[inline(always)]
#[must_use]
pub fn known_word(process_start: u64, code: u64, cookie: u32) -> u64 {
    const PRIME: u64 = 0x9e37_79b9_7f4a_7c15;
    let mixed = (process_start ^ code << 16 ^ u64::from(cookie)).wrapping_mul(PRIME);
    (mixed ^ mixed >> 31).wrapping_mul(PRIME) | 1 << 63
}
