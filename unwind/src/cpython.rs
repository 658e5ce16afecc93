//! Where a CPython keeps its frames, out of its file. From 3.13 on `_PyRuntime` begins with a table
//! of offsets, initialised in the file (`_Py_DebugOffsets` of pycore_debug_offsets.h). Before, they
//! are those of the version, by its headers; DWARF of Debian's and PyPI's builds has the same.
//!
//! Of a version that is not known, or of a build without the global interpreter lock of 3.14 and
//! later, the layout says that alone: a wrong one would give wrong frames.

use stackwire_collector_ebpf::cpython::{Layout, NO_FIELD, evaluators};
use stackwire_elf::Exports;

use crate::elf::Elf;

/// `_Py_Debug_Cookie`.
const COOKIE: u64 = u64::from_le_bytes(*b"xdebugpy");
/// Words of the table that are read: cookie, version, whether it is free-threaded, groups.
const WORDS: usize = 72;
/// The function that runs Python code.
const EVALUATOR: &str = "_PyEval_EvalFrameDefault";

/// The layout; none where the file is no CPython.
pub(crate) fn layout(elf: &Elf<'_>) -> Option<Layout> {
    let exports = elf.exports()?;
    exports.symbol("_PyRuntime")?;
    let version = version(&exports);
    let table = table(&exports).unwrap_or_default();
    let offsets = offsets(version, &table);
    let known = offsets.and_then(|offsets| with_places(offsets, version, elf, &exports));
    let is_free_threaded = table.first() == Some(&COOKIE) && table.get(2) == Some(&1);
    Some(known.unwrap_or_else(|| Layout::unknown(version, is_free_threaded)))
}

/// Offsets in the objects of a version; none where they are not known.
fn offsets(version: u32, table: &[u64]) -> Option<Layout> {
    // Before the first candidate of a release what is where still changes.
    let is_release = version >> 4 & 0xf >= 0xc;
    match version >> 16 {
        0x0308 | 0x0309 => Some(of_3_8()),
        0x030a => Some(of_3_10()),
        0x030b if is_release => Some(of_3_11()),
        0x030c if is_release => Some(of_3_12()),
        0x030d..=0x030f if is_release => of_table(version, table),
        _ => None,
    }
}

/// The layout with the places of what the file exports.
fn with_places(
    offsets: Layout,
    version: u32,
    elf: &Elf<'_>,
    exports: &Exports<'_>,
) -> Option<Layout> {
    let origin = elf.origin()?;
    let inside = |name: &str| Some(exports.symbol(name)?.0.0.wrapping_sub(origin));
    let (_, evaluator_bytes) = exports.symbol(EVALUATOR)?;
    let layout = Layout {
        runtime: inside("_PyRuntime")?,
        code_type: inside("PyCode_Type")?,
        text_type: inside("PyUnicode_Type")?,
        bytes_type: inside("PyBytes_Type")?,
        evaluator: inside(EVALUATOR)?,
        evaluator_bytes: u32::try_from(evaluator_bytes).ok()?,
        version,
        ..offsets
    };
    layout.is_sound().then_some(layout)
}

/// As `PY_VERSION_HEX`; of one that does not export it without its last parts. 0: not known.
fn version(exports: &Exports<'_>) -> u32 {
    if let Some(version) = exports.find("Py_Version") {
        return exports.content(version).map_or(0, u32::from_le_bytes);
    }
    // What came with each of them and is there in all later ones (Include/ of the version).
    let came = |name: &str| exports.symbol(name).is_some();
    match () {
        () if came("PyFrame_GetLasti") => 0,
        () if came("PyIter_Send") => 0x030a_0000,
        () if came("PyFrame_GetBack") => 0x0309_0000,
        () if came("PyCode_NewWithPosOnlyArgs") => 0x0308_0000,
        () => 0,
    }
}

/// The table that `_PyRuntime` begins with.
fn table(exports: &Exports<'_>) -> Option<Vec<u64>> {
    let bytes: [u8; WORDS * 8] = exports.content(exports.find("_PyRuntime")?)?;
    Some(bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect())
}

/// Include/internal/pycore_interp.h, Include/cpython/pystate.h, Include/frameobject.h and
/// Include/code.h of 3.8; those of 3.9 have the same offsets.
fn of_3_8() -> Layout {
    Layout {
        interpreters: 32,
        next_interpreter: 0,
        threads: 8,
        next_thread: 8,
        thread_id: 176,
        c_frame: NO_FIELD,
        current_frame: 24,
        previous_c_frame: NO_FIELD,
        previous: 24,
        code: 32,
        instruction: 104,
        unit: 1,
        evaluators: evaluators::IN_RANGE,
        owner: 0,
        path: 104,
        name: 112,
        lines: 120,
        first_line: 40,
        instructions: 0,
        ascii: 48,
        characters: 72,
        ..objects()
    }
}

/// Include/object.h, Include/cpython/unicodeobject.h and bytesobject.h of 3.8 and all later ones.
fn objects() -> Layout {
    Layout {
        object_type: 8,
        text_length: 16,
        text_state: 32,
        bytes_length: 16,
        bytes: 32,
        ..Layout::default()
    }
}

/// Likewise, of 3.10.
fn of_3_10() -> Layout {
    Layout {
        previous_c_frame: 8,
        c_frame: 48,
        instruction: 96,
        unit: 2,
        evaluators: evaluators::EACH,
        ..of_3_8()
    }
}

/// Include/internal/pycore_frame.h, pycore_interp.h and Include/cpython/{pystate,code}.h of 3.11.
fn of_3_11() -> Layout {
    Layout {
        interpreters: 40,
        next_interpreter: 0,
        threads: 16,
        next_thread: 8,
        thread_id: 152,
        c_frame: 56,
        current_frame: 8,
        previous_c_frame: 16,
        previous: 48,
        code: 32,
        instruction: 56,
        evaluators: evaluators::AT_ENTRY,
        owner: 68,
        path: 112,
        name: 128,
        lines: 136,
        first_line: 72,
        instructions: 184,
        ascii: 48,
        characters: 72,
        ..objects()
    }
}

/// Likewise, of 3.12.
fn of_3_12() -> Layout {
    Layout {
        threads: 72,
        thread_id: 136,
        current_frame: 0,
        previous_c_frame: NO_FIELD,
        previous: 8,
        code: 0,
        evaluators: evaluators::SHIMS,
        owner: 70,
        first_line: 68,
        instructions: 192,
        ascii: 40,
        characters: 56,
        ..of_3_11()
    }
}

/// By the table; none where it is none of a release, or says what cannot be.
fn of_table(version: u32, table: &[u64]) -> Option<Layout> {
    // Words of the groups of runtime, interpreter, thread, what stands between, frame.
    let groups: [usize; 5] = match version >> 16 {
        0x030d => [3, 13, 9, 0, 6],
        0x030e => [3, 16, 9, 0, 8],
        _ => [3, 16, 16, 1, 8],
    };
    let at = |group: usize, word: usize| {
        let before: usize = groups[..group].iter().sum();
        let offset = u16::try_from(*table.get(3 + before + word)?).ok()?;
        (offset != NO_FIELD).then_some(offset)
    };
    let thread_id = if version >> 16 == 0x030f { 8 } else { 5 };
    if table.first() != Some(&COOKIE) || table.get(1) != Some(&u64::from(version)) {
        return None;
    }
    // What comes behind the code object is where it is in 3.13. Later ones have copies of their
    // instructions for each thread where there is no global lock: their lines are not known.
    let objects = match (table.get(2)?, version >> 16) {
        (0, _) => of_3_12(),
        (1, 0x030d) => {
            // Words of code object, object, type, tuple, list, dict, float, int, bytes.
            let behind = |words: usize| {
                let offset = table.get(3 + groups.iter().sum::<usize>() + 10 + words)?;
                u16::try_from(*offset).ok()
            };
            let ascii = behind(26)?;
            Layout {
                object_type: behind(1)?,
                bytes_length: behind(21)?,
                bytes: behind(22)?,
                text_state: behind(24)?,
                text_length: behind(25)?,
                ascii,
                // `utf8_length` and `utf8` are between them.
                characters: ascii.checked_add(16)?,
                ..of_3_12()
            }
        }
        _ => return None,
    };
    Some(Layout {
        interpreters: at(0, 2)?,
        next_interpreter: at(1, 2)?,
        threads: at(1, 3)?,
        next_thread: at(2, 2)?,
        current_frame: at(2, 4)?,
        thread_id: at(2, thread_id)?,
        previous: at(4, 1)?,
        code: at(4, 2)?,
        instruction: at(4, 3)?,
        owner: at(4, 5)?,
        path: at(5, 1)?,
        name: at(5, 3)?,
        lines: at(5, 4)?,
        first_line: at(5, 5)?,
        instructions: at(5, 9)?,
        c_frame: NO_FIELD,
        ..objects
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of Debian's python3.14 3.14.10: `_PyRuntime` of /usr/bin/python3.14, words by `readelf -x`.
    const OF_3_14: [u64; 50] = [
        COOKIE,
        0x030e_0af0,
        0,
        316_616,
        784,
        808,
        225_864,
        7280,
        7272,
        7344,
        7360,
        7408,
        7688,
        7672,
        7680,
        16,
        7784,
        0,
        7800,
        7792,
        7992,
        0,
        832,
        0,
        8,
        16,
        72,
        152,
        160,
        232,
        32,
        88,
        8,
        0,
        56,
        80,
        74,
        64,
        0,
        216,
        112,
        120,
        128,
        136,
        68,
        52,
        96,
        104,
        208,
        0,
    ];

    /// Likewise, of 3.13.5 with `--disable-gil`: `_PyRuntime` of `python` as tests/python.sh builds
    /// it.
    const WITHOUT_LOCK: [u64; 71] = [
        COOKIE,
        0x030d_05f0,
        1,
        328_320,
        608,
        632,
        215_616,
        7272,
        7264,
        7344,
        7400,
        7664,
        7648,
        7656,
        16,
        7760,
        0,
        7784,
        7776,
        304,
        0,
        8,
        16,
        72,
        152,
        160,
        232,
        32,
        80,
        8,
        0,
        56,
        72,
        70,
        224,
        128,
        136,
        144,
        152,
        84,
        68,
        112,
        120,
        216,
        32,
        24,
        432,
        40,
        104,
        184,
        48,
        40,
        32,
        56,
        40,
        32,
        64,
        48,
        56,
        40,
        32,
        48,
        32,
        40,
        56,
        32,
        48,
        80,
        48,
        32,
        56,
    ];

    #[test]
    fn a_build_without_the_lock_has_larger_objects() {
        let layout = of_table(0x030d_05f0, &WITHOUT_LOCK).unwrap();
        assert_eq!((layout.object_type, layout.name, layout.instructions), (24, 144, 216));
        assert_eq!((layout.text_length, layout.text_state, layout.ascii), (32, 48, 56));
        assert_eq!((layout.bytes_length, layout.bytes, layout.characters), (32, 48, 72));
        assert!(layout.is_sound());
        assert_eq!(of_table(0x030d_05f0, &WITHOUT_LOCK[..60]), None);
    }

    #[test]
    fn the_table_says_where_frames_are() {
        let layout = of_table(0x030e_0af0, &OF_3_14).unwrap();
        assert_eq!((layout.interpreters, layout.threads, layout.current_frame), (808, 7344, 72));
        assert_eq!((layout.thread_id, layout.previous, layout.owner), (152, 8, 74));
        assert_eq!((layout.name, layout.lines, layout.instructions), (128, 136, 208));
    }

    #[test]
    fn another_python_has_no_layout() {
        assert_eq!(of_table(0x030e_0bf0, &OF_3_14), None, "not that of the version");
        let mut free_threaded = OF_3_14;
        free_threaded[2] = 1;
        assert_eq!(of_table(0x030e_0af0, &free_threaded), None, "without the lock");
        assert_eq!(of_table(0x030e_0af0, &OF_3_14[..40]), None);
        assert_eq!(offsets(0x030e_00a1, &OF_3_14), None, "an alpha");
        assert_eq!(offsets(0x0310_00f0, &OF_3_14), None, "3.16");
        assert_eq!(offsets(0, &[]), None);
    }
}
