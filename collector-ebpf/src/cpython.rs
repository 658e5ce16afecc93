//! Where a CPython keeps its frames: what the unwind compiler finds out of a file.
//!
//! Offsets are of CPython 3.8 to 3.15 (Include/internal/pycore_frame.h, pycore_runtime.h and
//! pycore_debug_offsets.h). Pure; the walk is `walk/by_frame_list.rs`.

#[cfg(not(target_arch = "bpf"))]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

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
    /// `ob_type` of an object.
    pub object_type: u16,
    /// `length` of a string.
    pub text_length: u16,
    /// `state` of a string.
    pub text_state: u16,
    /// Where the characters of a string begin that has ASCII alone.
    pub ascii: u16,
    /// Likewise, of another string.
    pub characters: u16,
    /// `ob_size` of `bytes`.
    pub bytes_length: u16,
    /// `ob_sval` of `bytes`.
    pub bytes: u16,
    /// Zero; keeps the size a multiple of 8.
    pub reserved: [u16; 2],
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
pub const CODE_BYTES: usize = 160;
/// Bytes that are read of a string or of `bytes`.
pub const TEXT_BYTES: usize = 40;
/// Likewise, in a build without the global interpreter lock, where heads of objects are larger.
pub const LARGE_TEXT_BYTES: usize = 56;

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
            let Self { version, evaluators, .. } = *self;
            return *self == Self { version, evaluators, ..Self::default() };
        }
        let of_frame = [self.previous, self.code, self.instruction, self.owner];
        let of_code = [self.path, self.name, self.lines, self.first_line];
        let inside = |offset: u16, bytes: usize| usize::from(offset) + 8 <= bytes;
        let of_text = [self.text_length, self.text_state, self.bytes_length];
        of_frame.into_iter().all(|offset| inside(offset, FRAME_BYTES))
            && of_code.into_iter().all(|offset| inside(offset, CODE_BYTES))
            && of_text.into_iter().all(|offset| inside(offset, self.text_bytes()))
            && inside(self.object_type, self.text_bytes())
            && self.unit <= 2
            && self.evaluators <= evaluators::IN_RANGE
    }
}

impl Layout {
    /// Bytes to read of a string or of `bytes`: no more than each has.
    #[inline(always)]
    #[must_use]
    pub fn text_bytes(&self) -> usize {
        if self.object_type > 8 { LARGE_TEXT_BYTES } else { TEXT_BYTES }
    }
}

/// `FRAME_OWNED_BY_CSTACK` (3.12, 3.13), `FRAME_OWNED_BY_INTERPRETER` (3.14 and later): the frame
/// is a local variable of the evaluator that runs those before it. All above are such, too.
pub const OWNED_BY_EVALUATOR: u8 = 3;
