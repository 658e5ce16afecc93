//! Functions that an interpreter runs: what the kernel side hands over of their frames and of what
//! names them, whichever interpreter it is.
//!
//! Pure. Where they are in memory is in `cpython.rs`, `ruby.rs` and `v8.rs`; the walks are
//! `walk/by_frame_list.rs`, `walk/by_control_frames.rs` and `walk/by_frames_of_v8.rs`.

#[cfg(not(target_arch = "bpf"))]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Layouts of an interpreter's builds that may be known at once; number 0 is none.
pub const LAYOUTS: u32 = 64;
/// Set in the number of a layout: it is one of Ruby, by the number below it.
pub const RUBY: u32 = LAYOUTS;
/// Likewise, of V8.
pub const V8: u32 = 2 * LAYOUTS;
/// Frames of an interpreter and places of evaluators that a sample may carry.
pub const MAX_ENTRIES: usize = 512;
/// Evaluators on a stack at most: each runs functions up to where C called it. Those of CPython
/// before 3.11 run one each.
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

/// Set in the first word of an [`Entry`]: it is no function, but where an evaluator ends. Below
/// it there is the number of the evaluator's frame among the native ones, or [`NOT_FOUND`].
pub const EVALUATOR: u64 = 1 << 63;
/// Set in the first word of an [`Entry`]: it is a function of Ruby.
pub const OF_RUBY: u64 = 1 << 62;
/// Likewise, of V8; of neither: of CPython.
pub const OF_V8: u64 = 1 << 61;
/// Bits of an address of a process.
pub const ADDRESS: u64 = OF_V8 - 1;
/// Instead of an address in the stack frame of an evaluator: it is the next native frame in its
/// code. Where one of them is not found, or one more, which is which is not known.
pub const ANY: u64 = 1;
/// The native walk has not come by the evaluator.
pub const NOT_FOUND: u64 = 0xffff;

/// A function that runs, or the end of an evaluator's.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, IntoBytes, Immutable, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Entry {
    /// Address of what names the function: a code object of CPython, the body of an instruction
    /// sequence of Ruby with [`OF_RUBY`], what functions share of V8 with [`OF_V8`]. Of an
    /// evaluator: [`EVALUATOR`] and the number of a native frame.
    pub code: u64,
    /// [`Entry::cookie`] above the position as an `i32`: from the first instruction to the one that
    /// runs or calls, in bytes (CPython) or words (Ruby). Of an evaluator: an address in its stack
    /// frame, or [`ANY`].
    pub rest: u64,
}

impl Entry {
    /// Tells the code object from others that are or were at its address.
    #[inline(always)]
    #[must_use]
    pub fn cookie(self) -> u32 {
        (self.rest >> 32) as u32
    }

    /// From the first instruction; negative before the first has run.
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
    /// Where evaluators are known by their code.
    pub evaluator: Evaluator,
}

/// Code of an evaluator that is known by that; 0: it is known by an address in its frame.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, IntoBytes, Immutable, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Evaluator {
    /// First address of the function that runs instructions.
    pub core: u64,
    /// Its bytes.
    pub core_bytes: u64,
    /// First address of the one that calls it; 0: there is none that counts.
    pub entry: u64,
    /// Its bytes.
    pub entry_bytes: u64,
}

impl Evaluator {
    /// Whether an address is in a native frame that counts. Of two that belong together the first
    /// does: what calls the core is there alone while it catches what was thrown. `after_core`:
    /// whether the frame before was the core.
    #[inline(always)]
    pub fn is_at(&self, ip: u64, after_core: &mut u64) -> bool {
        let is_core = ip.wrapping_sub(self.core) < self.core_bytes;
        let is_entry = ip.wrapping_sub(self.entry) < self.entry_bytes && *after_core == 0;
        *after_core = is_core.into();
        is_core || is_entry
    }
}

/// Why the list of frames ended where it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ListEnd {
    /// The first function of the thread.
    Root = 0,
    /// The thread runs none.
    NoThread = 1,
    /// Memory could not be read.
    Unreadable = 2,
    /// [`MAX_ENTRIES`] or [`MAX_EVALUATORS`] reached, or more than four interpreters run.
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

/// In a record of [`RecordKind::Code`](crate::RecordKind), behind the head: what names a function.
/// The bytes of its name, its path, the index of its line table (Ruby) and its line table follow,
/// without gaps.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, IntoBytes, Immutable, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CodeHead {
    /// As [`Entry::code`].
    pub code: u64,
    /// See [`Entry::cookie`].
    pub cookie: u32,
    /// As the interpreter's layout has it.
    pub version: u32,
    /// Line it begins in; 0 of V8.
    pub first_line: i32,
    /// Of CPython `state` of the name: its bits 2 to 4 are the bytes of a character.
    pub name_state: u32,
    /// Likewise, of the path.
    pub path_state: u32,
    /// Bytes of the index of the line table that follow; Ruby alone has one.
    pub index_bytes: u32,
    /// Of V8: its script, as in [`ScriptHead::script`], 0: it has none; and the characters of that
    /// from which and to which it is.
    pub script: u64,
    /// See [`CodeHead::script`].
    pub span: [u32; 2],
    /// Bytes of the name that follow.
    pub name_bytes: u32,
    /// Bytes of the path that follow.
    pub path_bytes: u32,
    /// Bytes of the line table that follow.
    pub lines_bytes: u32,
    /// Zero; keeps the size a multiple of 8.
    pub reserved: u32,
    /// Bytes the name has.
    pub name_length: u64,
    /// Bytes the path has.
    pub path_length: u64,
    /// Bytes the line table has. Where not all of them follow, none do.
    pub lines_length: u64,
}

/// Scripts of V8 whose source has been handed over that are known, a power of two.
pub const SCRIPTS: u32 = 1 << 12;
/// Most bytes of a source in a record.
pub const PIECE: usize = 8192;

/// In a record of [`RecordKind::Script`](crate::RecordKind), behind the head: a piece of a script's
/// source, which follows.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, IntoBytes, Immutable, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ScriptHead {
    /// Which script, of whichever process.
    pub script: u64,
    /// Where in the source the piece is, and bytes of the source.
    pub offset: u64,
    /// See [`ScriptHead::offset`].
    pub length: u64,
    /// Bytes of a character: 1 (Latin-1) or 2 (UTF-16).
    pub width: u32,
    /// Bytes that follow.
    pub bytes: u32,
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
