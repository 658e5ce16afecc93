//! Where a Ruby keeps its frames: what the unwind compiler finds out of a file.
//!
//! Offsets are of Ruby 3.0 to 4.0 (vm_core.h and iseq.h). Pure; the walk is
//! `walk/by_control_frames.rs`.

#[cfg(not(target_arch = "bpf"))]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Where things are in the memory of one build of Ruby, in bytes. Addresses are from where the
/// file's first byte would be, if all of it were mapped as its code is.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, IntoBytes, Immutable, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Layout {
    /// Where the loader writes the number of the file's thread-local storage; 0 where all else is
    /// too, but the version: nothing is known of this one.
    pub module: u64,
    /// `vm_exec_core`, which runs instructions.
    pub core: u64,
    /// `rb_vm_exec`, which calls it and catches what is thrown.
    pub entry: u64,
    /// Bytes of `vm_exec_core`.
    pub core_bytes: u32,
    /// Bytes of `rb_vm_exec`.
    pub entry_bytes: u32,
    /// Major, minor and patch version, a byte each.
    pub version: u32,
    /// Words of that thread-local storage: one of them is the execution context, which says itself
    /// that it is.
    pub words: u32,
    /// Bytes of a control frame.
    pub frame: u16,
    /// Non-zero: the first line is a `VALUE`, twice the number and one.
    pub line_is_value: u16,
    /// `insns_info.body` of the body of an instruction sequence; its size is 16 behind it, the
    /// index 24.
    pub lines: u16,
    /// Bytes of an entry there.
    pub line_entry: u16,
    /// Non-zero: a short string has its length in its flags (before 3.2).
    pub length_in_flags: u16,
    /// Zero; keeps the size a multiple of 8.
    pub reserved: [u16; 3],
}

/// Words of thread-local storage that are looked at. Where Ruby has a JIT, the storage of that
/// (Rust's library) comes first: 4.0.5 has 22 words, and the ninth is the one.
pub const MAX_WORDS: u32 = 32;
/// Of an execution context: first word and size in words of the stack it runs on, and its innermost
/// control frame.
pub const CONTEXT_BYTES: usize = 24;
/// Bytes that are read of a control frame: `pc`, `sp`, `iseq`, `self` and `ep`.
pub const FRAME_BYTES: usize = 40;
/// See [`FRAME_BYTES`].
pub const FRAME_ISEQ: u16 = 16;
/// See [`FRAME_BYTES`].
pub const FRAME_EP: u16 = 32;
/// Bytes that are read of the body of an instruction sequence.
pub const BODY_BYTES: usize = 152;
/// `iseq_encoded`, `location.pathobj`, `location.label` and `location.first_lineno` of a body; at 4
/// `iseq_size`.
pub const BODY_ENCODED: u16 = 8;
/// See [`BODY_ENCODED`].
pub const BODY_PATH: u16 = 64;
/// See [`BODY_ENCODED`].
pub const BODY_LABEL: u16 = 80;
/// See [`BODY_ENCODED`].
pub const BODY_LINE: u16 = 88;
/// Flags of a frame: the last that its `rb_vm_exec` runs (`VM_FRAME_FLAG_FINISH`), and one of a C
/// function (`VM_FRAME_FLAG_CFRAME`).
pub const FINISH: u64 = 0x20;
/// See [`FINISH`].
pub const C_FRAME: u64 = 0x80;
/// What a frame is of, among its flags, and that it is of nothing (`VM_FRAME_MAGIC_DUMMY`), as the
/// first of each thread.
pub const KIND: u64 = 0x7fff_0001;
/// See [`KIND`].
pub const DUMMY: u64 = 0x7999_0001;
/// A position that no instruction has: the frame does not say where it is. JIT code does not write
/// it for the innermost.
pub const NOWHERE: u32 = i32::MAX as u32;
/// Control frames that a sample looks at, those of C functions included.
/// One less than the steps of five programs (`walk/lists.rs`).
pub const MAX_FRAMES: u64 = 639;

/// Bytes of the index of a line table, for so many instruction words: nine ranks in each word of
/// its head, of 54 at most, and a block for 512 others each (`succ_index_table_create` of iseq.c).
#[inline(always)]
#[must_use]
pub fn index_bytes(words: u32) -> u32 {
    if words < IMMEDIATE {
        return words.div_ceil(9) * 8;
    }
    let blocks = (words - IMMEDIATE).saturating_add(511) / 512;
    blocks.saturating_mul(INDEX_BLOCK).saturating_add(INDEX_HEAD)
}

const IMMEDIATE: u32 = 54;
const INDEX_HEAD: u32 = 48;
const INDEX_BLOCK: u32 = 80;

#[cfg(not(target_arch = "bpf"))]
impl Layout {
    /// That of a Ruby of which nothing but its version is known.
    #[must_use]
    pub fn unknown(version: u32) -> Self {
        Self { version, ..Self::default() }
    }

    /// Whether what the kernel side reads is within what it has room for.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let is_known = self.words <= MAX_WORDS
            && self.frame as usize >= FRAME_BYTES
            && usize::from(self.lines) + 32 <= BODY_BYTES
            && self.line_entry > 0;
        is_known || *self == Self::unknown(self.version)
    }

    /// Whether nothing but its version is known.
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        self.frame == 0
    }
}

#[cfg(test)]
mod tests {
    use super::index_bytes;

    #[test]
    fn an_index_has_no_more_than_its_sequence_needs() {
        let bytes = [0, 1, 9, 10, 53, 54, 55, 566, 567].map(index_bytes);
        assert_eq!(bytes, [0, 8, 8, 16, 48, 48, 128, 128, 208]);
        assert_eq!(index_bytes(u32::MAX), 671_088_608);
    }
}
