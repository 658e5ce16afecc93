//! What a file has of a Python interpreter or a C library: where in it the functions are that
//! switch a perf trampoline on. Run by the compiler (`compiler.rs`), which may parse.

use std::fs::File;

use stackwire_elf::{ElfError, Export, Exports};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// How a function begins.
pub type Head = [u8; 16];

/// A function of a file; 0: it has none.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct InFile {
    /// Its offset.
    pub offset: u64,
    /// How it begins.
    pub head: Head,
}

/// What there is.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Interpreter {
    /// `Py_Version`: major, minor and patch version a byte each, above one of the level. CPython
    /// 3.11 and later have it.
    pub version: u64,
    /// `Py_AddPendingCall`.
    pub add_pending_call: InFile,
    /// `PyRun_SimpleString`.
    pub run_string: InFile,
    /// `mmap`.
    pub map: InFile,
    /// `munmap`.
    pub unmap: InFile,
    /// Where signal handlers return to.
    pub restorer: InFile,
    /// `_PyEval_EvalFrameDefault`.
    pub evaluator: u64,
    /// Its bytes.
    pub evaluator_size: u64,
    /// How far `_PyRuntime` is behind `Py_AddPendingCall` in memory, modulo 2^64.
    pub runtime: u64,
    /// What is where in it.
    pub state: StateOffsets,
    /// Likewise, of the interface for debuggers.
    pub remote: RemoteOffsets,
}

/// Where `_PyRuntime` says whether the interpreter has begun, and whether it ends. 0: it is not
/// known.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct StateOffsets {
    /// `initialized`, an `int`.
    pub initialized: u64,
    /// `_finalizing`, a pointer.
    pub finalizing: u64,
}

/// What Python 3.14's interface for debuggers (PEP 768) needs of `_Py_DebugOffsets`, with which
/// `_PyRuntime` begins.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct RemoteOffsets {
    /// Of the first interpreter, in the runtime.
    pub interpreters: u64,
    /// Of the main thread, in an interpreter.
    pub main_thread: u64,
    /// Of the word in a thread that makes it stop.
    pub eval_breaker: u64,
    /// Of what is kept for debuggers, in a thread.
    pub support: u64,
    /// Of whether it is switched on, in an interpreter.
    pub enabled: u64,
    /// Of whether a file is to be run, in what is kept for debuggers.
    pub pending: u64,
    /// Of its path, likewise.
    pub path: u64,
    /// Bytes of the path.
    pub path_size: u64,
}

impl RemoteOffsets {
    /// Whether there is one.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.path_size != 0
    }
}

/// `__restore_rt` of glibc and musl: `mov $15, %rax; syscall`, which is rt_sigreturn(2).
const RESTORER: [u8; 9] = [0x48, 0xc7, 0xc0, 0x0f, 0x00, 0x00, 0x00, 0x0f, 0x05];
/// Numbers of the table of 3.13 and of 3.14 that are looked at.
const NUMBERS_13: usize = 6;
const NUMBERS_14: usize = 95;

impl Interpreter {
    /// Looks.
    ///
    /// # Errors
    /// When it is not an ELF file that can be read.
    pub fn find(file: &File) -> Result<Self, ElfError> {
        let exports = Exports::read(file)?;
        let find = |name: &str| exports.find(name);
        let function = |found: Option<Export>| {
            let found = found.and_then(|it| Some((it.offset.0, exports.content(it)?)));
            found.map_or_else(InFile::default, |(offset, head)| InFile { offset, head })
        };
        let version = find("Py_Version").and_then(|it| exports.content(it));
        let version = version.map_or(0, u64::from_ne_bytes);
        let (call, runtime) = (find("Py_AddPendingCall"), find("_PyRuntime"));
        let distance = runtime.zip(call);
        let distance = distance.map(|(to, from)| to.address.0.wrapping_sub(from.address.0));
        let evaluator = find("_PyEval_EvalFrameDefault");
        let map = find("mmap");
        let restorer = map.and_then(|_| exports.find_code(&RESTORER));
        Ok(Self {
            version,
            add_pending_call: function(call),
            run_string: function(find("PyRun_SimpleString")),
            map: function(map),
            unmap: function(find("munmap")),
            restorer: function(restorer),
            evaluator: evaluator.map_or(0, |it| it.offset.0),
            evaluator_size: evaluator.map_or(0, |it| it.size),
            runtime: distance.unwrap_or(0),
            state: runtime.map_or_else(StateOffsets::default, |it| {
                state(version, exports.content(it).as_ref())
            }),
            remote: runtime
                .and_then(|it| exports.content(it))
                .and_then(|table| remote(&table))
                .unwrap_or_default(),
        })
    }
}

/// By Include/internal/pycore_runtime.h: `initialized` is the last `int` before the pointer. From
/// 3.13 on `_PyRuntime` begins with a table that says where that is.
fn state(version: u64, table: Option<&[u8; NUMBERS_13 * 8]>) -> StateOffsets {
    let finalizing = match version >> 16 {
        0x030c => 24,
        _ => table.filter(|it| it.starts_with(b"xdebugpy")).map_or(0, |it| number(it, 4)),
    };
    match finalizing {
        24..4096 => StateOffsets { initialized: finalizing - 8, finalizing },
        _ => StateOffsets::default(),
    }
}

/// By Include/internal/pycore_debug_offsets.h of 3.14, which does not change any more since its
/// first release candidate. None: it is not that table.
fn remote(table: &[u8; NUMBERS_14 * 8]) -> Option<RemoteOffsets> {
    let version = number(table, 1);
    let is_released = version >> 16 == 0x030e && version >> 4 & 0xf >= 0xc;
    let offsets = RemoteOffsets {
        interpreters: number(table, 5),
        main_thread: number(table, 10),
        eval_breaker: number(table, 89),
        support: number(table, 90),
        enabled: number(table, 91),
        pending: number(table, 92),
        path: number(table, 93),
        path_size: number(table, 94),
    };
    // `Py_DEBUGGER_SCRIPT_PATH_SIZE`; a shorter one has no room for what is said.
    let is_known = table.starts_with(b"xdebugpy") && is_released && offsets.path_size >= 512;
    is_known.then_some(offsets)
}

fn number(table: &[u8], place: usize) -> u64 {
    let (numbers, _) = table.as_chunks::<8>();
    u64::from_ne_bytes(numbers[place])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_is_where_the_version_has_it() {
        let mut table = [0; NUMBERS_13 * 8];
        assert_eq!(state(0x030c_01f0, Some(&table)).finalizing, 24);
        assert_eq!(state(0x030d_00f0, Some(&table)), StateOffsets::default());
        table[..8].copy_from_slice(b"xdebugpy");
        table[32..40].copy_from_slice(&632u64.to_ne_bytes());
        assert_eq!(state(0x030d_00f0, Some(&table)).initialized, 624);
        table[32] = 3;
        table[33] = 0xff;
        assert_eq!(state(0x030d_00f0, Some(&table)), StateOffsets::default());
    }

    #[test]
    fn the_table_of_another_python_is_not_guessed_at() {
        let mut table = [0; NUMBERS_14 * 8];
        table[..8].copy_from_slice(b"xdebugpy");
        table[8..16].copy_from_slice(&0x030e_0af0u64.to_ne_bytes());
        table[94 * 8..].copy_from_slice(&512u64.to_ne_bytes());
        table[89 * 8] = 24;
        assert_eq!(remote(&table).unwrap().eval_breaker, 24);
        table[8] = 0xa1;
        assert_eq!(remote(&table), None, "an alpha");
        table[8..12].copy_from_slice(&0x030f_00f0u32.to_ne_bytes());
        assert_eq!(remote(&table), None, "3.15");
    }
}
