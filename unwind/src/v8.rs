//! Where a V8 keeps its functions, out of its file: it exports numbers that debuggers need
//! (`v8dbg_*`, tools/gen-postmortem-metadata.py), also where it is stripped.
//!
//! What those leave out is the same in V8 10.2 to 13.6, or follows from them. Where they say
//! something else, as with compressed pointers, the layout says so: a wrong one would give wrong
//! names.

use stackwire_collector_ebpf::v8::{FIRST_OTHER, Layout, TEXT, TEXT_LENGTH, TEXT_REST, TYPE};
use stackwire_elf::Exports;

use crate::elf::Elf;

/// From `JSFunction` on, its kinds, where the last is not told (V8 before 12).
const FUNCTION_KINDS: i32 = 15;
/// What has to be so.
const EXPECTED: [(&str, i32); 13] = [
    ("TaggedSize", 8),
    ("SmiValueShift", 1),
    ("SmiShiftSize", 31),
    ("HeapObjectTag", 1),
    ("FirstNonstringType", FIRST_OTHER as i32),
    ("class_Map__instance_type__uint16_t", TYPE as i32),
    ("class_String__length__int32_t", TEXT_LENGTH as i32),
    ("class_SeqOneByteString__chars__char", TEXT as i32),
    ("class_SlicedString__offset__SMI", TEXT_REST as i32),
    ("off_fp_context", -8),
    ("off_fp_function", -16),
    ("off_fp_bytecode_array", -32),
    ("off_fp_bytecode_offset", -40),
];

/// The layout; none where the file is no V8.
pub(crate) fn layout(elf: &Elf<'_>) -> Option<Layout> {
    let exports = elf.exports()?;
    exports.symbol("v8dbg_off_fp_function")?;
    let version = version(&exports).unwrap_or(0);
    Some(known(&exports, version).unwrap_or_else(|| Layout::unknown(version)))
}

/// The layout of one that says what is known.
fn known(exports: &Exports<'_>, version: u32) -> Option<Layout> {
    let number = |name: &str| number(exports, &format!("v8dbg_{name}"));
    if EXPECTED.iter().any(|&(name, expected)| number(name) != Some(expected)) {
        return None;
    }
    let any = |names: &[&str]| {
        let found = names.iter().find_map(|name| number(name));
        found.and_then(|number| u16::try_from(number).ok())
    };
    let function = number("type_JSFunction__JS_FUNCTION_TYPE")?;
    let [first, last] =
        [("FirstJSFunctionType", function), ("LastJSFunctionType", function + FUNCTION_KINDS)]
            .map(|(name, otherwise)| u16::try_from(number(name).unwrap_or(otherwise)).ok());
    let has_wrapper = number("class_BytecodeArray__wrapper__Tagged_BytecodeWrapper_").is_some();
    let layout = Layout {
        version,
        first_function: first?,
        last_function: last?,
        bytecode_type: any(&["type_BytecodeArray__BYTECODE_ARRAY_TYPE"])?,
        scope_type: any(&["type_ScopeInfo__SCOPE_INFO_TYPE"])?,
        script_type: any(&["type_Script__SCRIPT_TYPE"])?,
        first_context: any(&["FirstContextType"])?,
        last_context: any(&["LastContextType"])?,
        shared: any(&["class_JSFunction__shared__SharedFunctionInfo"])?,
        name: any(&[
            "class_SharedFunctionInfo__name_or_scope_info__Tagged_NameOrScopeInfoT_",
            "class_SharedFunctionInfo__name_or_scope_info__Tagged_Object_",
            "class_SharedFunctionInfo__name_or_scope_info__Object",
        ])?,
        script: any(&[
            "class_SharedFunctionInfo__raw_script__Tagged_Object_",
            "class_SharedFunctionInfo__script__Tagged_HeapObject_",
            "class_SharedFunctionInfo__script_or_debug_info__HeapObject",
        ])?,
        before_variables: any(&["scopeinfo_idx_first_vars"])?,
        // Behind its length, its wrapper if it has one; in front of that are constants and handlers
        // (src/objects/bytecode-array.tq).
        source_positions: if has_wrapper { 24 } else { 32 },
        instructions: any(&["class_BytecodeArray__data__uintptr_t"])?,
        table_type: any(&[
            "type_TrustedByteArray__TRUSTED_BYTE_ARRAY_TYPE",
            "type_ByteArray__BYTE_ARRAY_TYPE",
        ])?,
    };
    layout.is_sound().then_some(layout)
}

/// Major, minor and build version.
fn version(exports: &Exports<'_>) -> Option<u32> {
    let part = |name: &str| number(exports, &format!("_ZN2v88internal7Version6{name}_E"));
    let byte = |name: &str| part(name).and_then(|number| u8::try_from(number).ok());
    let (major, minor) = (byte("major")?, byte("minor")?);
    let [high, low] = u16::try_from(part("build")?).ok()?.to_be_bytes();
    Some(u32::from_be_bytes([major, minor, high, low]))
}

/// A number that is exported. What is zero may not be in the file.
fn number(exports: &Exports<'_>, name: &str) -> Option<i32> {
    exports.symbol(name)?;
    let Some(export) = exports.find(name) else { return Some(0) };
    exports.content(export).map(i32::from_le_bytes)
}
