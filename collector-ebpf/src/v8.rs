//! Where a V8 keeps its functions: what the unwind compiler finds out of a file.
//!
//! Offsets are of V8 10.2 to 13.6 (Node 18 to 24), without compressed pointers. Pure; the walk is
//! `walk/by_frames_of_v8.rs`.

#[cfg(not(target_arch = "bpf"))]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Where things are in the heap of one build of V8, in bytes from the start of an object, and the
/// numbers of types.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, IntoBytes, Immutable, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Layout {
    /// Major, minor and build version: 8, 8 and 16 bits; 0: not known.
    pub version: u32,
    /// Types of functions: the first and the last; 0 where all else is, too, but the version:
    /// nothing is known of this one.
    pub first_function: u16,
    /// See [`Layout::first_function`].
    pub last_function: u16,
    /// Types of contexts: the first and the last.
    pub first_context: u16,
    /// See [`Layout::first_context`].
    pub last_context: u16,
    /// Type of bytecode.
    pub bytecode_type: u16,
    /// Type of the description of a scope.
    pub scope_type: u16,
    /// Type of a script.
    pub script_type: u16,
    /// `shared_function_info` of a function.
    pub shared: u16,
    /// `name_or_scope_info` of what functions share.
    pub name: u16,
    /// `script` of that.
    pub script: u16,
    /// Words in front of the names of variables in the description of a scope, its flags first.
    pub before_variables: u16,
    /// `source_position_table` of bytecode, and where its instructions begin.
    pub source_positions: u16,
    /// See [`Layout::source_positions`].
    pub instructions: u16,
    /// Type of tables of bytes.
    pub table_type: u16,
}

/// The last bit of a pointer into the heap (`v8dbg_HeapObjectTag`).
pub const TAG: u64 = 1;
/// Offset of the type in a map, and of the map in an object (`v8dbg_class_Map__instance_type`).
pub const TYPE: u16 = 12;
/// Types below this are strings (`v8dbg_FirstNonstringType`).
pub const FIRST_OTHER: u16 = 128;
/// `length` of a string, in characters.
pub const TEXT_LENGTH: u16 = 12;
/// Characters of a string that has them itself; `resource`, `actual` and `first` of others.
pub const TEXT: u16 = 16;
/// `second` of a string of two, `offset` of a part of one.
pub const TEXT_REST: u16 = 24;
/// `source` and `name` of a script.
pub const SCRIPT_SOURCE: u16 = 8;
/// See [`SCRIPT_SOURCE`].
pub const SCRIPT_NAME: u16 = 16;

/// What kind a string is, among the bits of its type (`v8dbg_StringRepresentationMask`).
pub mod text {
    /// The mask.
    pub const KIND: u16 = 7;
    /// It has its characters itself.
    pub const SEQUENTIAL: u16 = 0;
    /// It is made of two.
    pub const CONS: u16 = 1;
    /// Somebody else has its characters.
    pub const EXTERNAL: u16 = 2;
    /// It is a part of another.
    pub const SLICED: u16 = 3;
    /// It stands for another.
    pub const THIN: u16 = 5;
    /// A character has one byte, otherwise two.
    pub const ONE_BYTE: u16 = 8;
}

/// Flags of a scope (src/objects/scope-info.tq): a word more is in front of what follows them.
pub mod scope {
    /// Information of a class.
    pub const CLASS_VARIABLE: u32 = 1 << 10;
    /// The name of the function and where it is kept.
    pub const FUNCTION_NAME: u32 = 3 << 12;
    /// The name that V8 made up from where the function stands.
    pub const INFERRED_NAME: u32 = 1 << 14;
    /// Words in front of the names of variables in versions before 13, which have from where to
    /// where the function is behind its name.
    pub const WITHOUT_SPAN: u16 = 3;
}

/// Bytes that are read of a stack frame, up to where its frame pointer points.
pub const FRAME_BYTES: usize = 40;
/// In those: offset in the bytecode, the bytecode, the function, its context.
pub const FRAME_OFFSET: u16 = 0;
/// See [`FRAME_OFFSET`].
pub const FRAME_BYTECODE: u16 = 8;
/// See [`FRAME_OFFSET`].
pub const FRAME_FUNCTION: u16 = 24;
/// See [`FRAME_OFFSET`].
pub const FRAME_CONTEXT: u16 = 32;
/// `function_data` of what functions share: bytecode, or what leads to it.
pub const SHARED_DATA: u16 = 8;
/// Where bytecode is in what leads to it: `InterpreterData` and `Code` of V8 12 and later, `Code`
/// of V8 11.
pub const LEADS: [u16; 2] = [8, 16];
/// `length` and bytes of a table.
pub const TABLE_LENGTH: u16 = 8;
/// See [`TABLE_LENGTH`].
pub const TABLE: u16 = 16;
/// Bytes that are read of what functions share.
pub const SHARED_BYTES: usize = 64;

#[cfg(not(target_arch = "bpf"))]
impl Layout {
    /// That of a V8 of which nothing but its version is known.
    #[must_use]
    pub fn unknown(version: u32) -> Self {
        Self { version, ..Self::default() }
    }

    /// Whether nothing but its version is known.
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        self.first_function == 0
    }

    /// Whether what the kernel side reads is within what it has room for.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let inside = |offset: u16| usize::from(offset) + 8 <= SHARED_BYTES;
        let is_known = [self.name, self.script].into_iter().all(inside)
            && self.shared < 512
            && self.source_positions < 512
            && (3..=8).contains(&self.before_variables)
            && self.first_function > FIRST_OTHER
            && self.first_function <= self.last_function;
        is_known || *self == Self::unknown(self.version)
    }
}
