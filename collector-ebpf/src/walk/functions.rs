//! Functions of V8: puts together what names one. Called by `names.rs`, and by `scripts.rs`, which
//! looks for characters.

use stackwire_collector_ebpf::managed::{ADDRESS, CodeHead, Entry, MAX_LINES, MAX_NAME, MAX_PATH};
use stackwire_collector_ebpf::v8::{
    FIRST_OTHER, LEADS, Layout, SCRIPT_NAME, SCRIPT_SOURCE, SHARED_BYTES, SHARED_DATA, TABLE,
    TABLE_LENGTH, TAG, TEXT, TEXT_LENGTH, TEXT_REST, scope, text,
};
use stackwire_collector_ebpf::{SampleHeader, masked};

use super::objects::{copy, read, type_of, word, word_in};
use crate::hash::mixed;
use crate::maps::{Characters, Code, LISTS, List};

/// Which string of a [`List`] is looked for.
pub const NAME: u32 = 0;
/// See [`NAME`].
pub const PATH: u32 = 1;
/// See [`NAME`].
pub const SOURCE: u32 = 2;
/// Strings that stand for another, one after the other.
const MAX_STRINGS: u32 = 4;
/// Variables of a scope for which there is a table; names of fewer stand in front of its own
/// (`kScopeInfoMaxInlinedLocalNamesSize`).
const MAX_NAMES: u64 = 75;

/// Finds the name of a function, and where its script is; none: it is not readable.
#[inline(always)]
pub fn begin(all: &mut List, to: &mut Code, layout: &Layout, entry: Entry) -> Option<()> {
    read(all, (entry.code & ADDRESS).wrapping_sub(TAG), SHARED_BYTES)?;
    let [name, script, data] =
        [layout.name, layout.script, SHARED_DATA].map(|offset| word_in(&all.bytes, offset));
    to.head.code = entry.code;
    to.head.cookie = entry.cookie();
    to.head.version = layout.version;
    to.head.index_bytes = 0;
    to.head.first_line = 0;
    to.head.span = [0; 2];
    all.text = name;
    if type_of(name)? == layout.scope_type {
        read_scope(all, to, name, layout)?;
    }
    let is_script = type_of(script).is_some_and(|kind| kind == layout.script_type);
    all.path = if is_script { word(script - TAG, SCRIPT_NAME)? } else { 0 };
    to.head.script = if is_script { script_key(all.start, script)? } else { 0 };
    all.table = 0;
    all.table_bytes = 0;
    find_table(all, data, layout);
    Some(())
}

/// Where positions in the source are, by place in the bytecode.
#[inline(always)]
fn find_table(all: &mut List, data: u64, layout: &Layout) -> Option<()> {
    let mut bytecode = data;
    let is_it = |of: u64| type_of(of).is_some_and(|kind| kind == layout.bytecode_type);
    for lead in LEADS {
        if is_it(bytecode) {
            break;
        }
        bytecode = word(data.wrapping_sub(TAG), lead)?;
    }
    if !is_it(bytecode) {
        return None;
    }
    let table = word(bytecode - TAG, layout.source_positions)?;
    if type_of(table)? == layout.table_type {
        all.table_bytes = word(table - TAG, TABLE_LENGTH)? >> 32;
        all.table = table - TAG + u64::from(TABLE);
    }
    Some(())
}

/// Reads the name in a description of a scope, and from where to where in its script it is.
#[inline(always)]
fn read_scope(all: &mut List, to: &mut Code, scope_info: u64, layout: &Layout) -> Option<()> {
    let first = scope_info - TAG + 8;
    // A small number, or a number.
    let flags = word(first, 0)?;
    let flags = (flags | flags >> 32) as u32;
    let variables = word(first, 16)? >> 32;
    let names = if variables >= MAX_NAMES { 1 } else { variables };
    let before = u64::from(layout.before_variables)
        + names
        + variables
        + u64::from(flags & scope::CLASS_VARIABLE != 0);
    let mut at = first.wrapping_add(before * 8);
    all.text = 0;
    if flags & scope::FUNCTION_NAME != 0 {
        all.text = word(at, 0)?;
        at = at.wrapping_add(16);
    }
    if flags & scope::INFERRED_NAME != 0 {
        let is_named =
            word(all.text.wrapping_sub(TAG), TEXT_LENGTH).is_some_and(|it| it as u32 != 0);
        if !is_named {
            all.text = word(at, 0)?;
        }
        at = at.wrapping_add(8);
    }
    // In later versions they stand in front of the variables.
    if layout.before_variables > scope::WITHOUT_SPAN {
        at = first.wrapping_add(u64::from(scope::WITHOUT_SPAN) * 8);
    }
    to.head.span = [(word(at, 0)? >> 32) as u32, (word(at, 8)? >> 32) as u32];
    Some(())
}

/// Which script it is, of which process. By its source as well: others come to be at its address.
#[inline(always)]
pub fn script_key(start: u64, script: u64) -> Option<u64> {
    let source = word(script.wrapping_sub(TAG), SCRIPT_SOURCE)?;
    Some(mixed(mixed(start, script), source) | 1)
}

/// Copies the name, the path and the table behind the head; returns the bytes of the record.
#[inline(always)]
pub fn end(to: &mut Code, slot: u32) -> Option<usize> {
    let name = found(slot, NAME)?;
    to.head.name_state = name.width << 2;
    to.head.name_length = name.length;
    let name_bytes = copy::<{ MAX_NAME as u64 }, 1023>(&mut to.bytes, 0, name.at, name.bytes);
    to.head.name_bytes = name_bytes as u32;
    let path = found(slot, PATH)?;
    to.head.path_state = path.width << 2;
    to.head.path_length = path.length;
    let path_bytes =
        copy::<{ MAX_PATH as u64 }, 2047>(&mut to.bytes, name_bytes, path.at, path.bytes);
    to.head.path_bytes = path_bytes as u32;
    let all = LISTS.get_ptr(slot)?;
    // SAFETY: as in `lists::found`.
    let (table, length) = unsafe { ((*all).table, (*all).table_bytes) };
    to.head.lines_length = length;
    // A part of it would be of no use.
    let wanted = if length <= MAX_LINES as u64 { length } else { 0 };
    let before = name_bytes + path_bytes;
    let lines_bytes = copy::<{ MAX_LINES as u64 }, 8191>(&mut to.bytes, before, table, wanted);
    to.head.lines_bytes = lines_bytes as u32;
    let bytes = masked::<8191>(before + lines_bytes);
    Some(size_of::<SampleHeader>() + size_of::<CodeHead>() + bytes)
}

/// The characters of one of the strings. Read in a reference of its own, as `is_wanted`.
#[inline(always)]
pub fn found(slot: u32, which: u32) -> Option<Characters> {
    find_characters(slot, which);
    let all = LISTS.get_ptr(slot)?;
    // SAFETY: as in `lists::found`; plain words.
    Some(unsafe { core::ptr::read_volatile(&raw const (*all).characters) })
}

/// Finds the characters of one of the strings. A global function, as `walk_frame`.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn find_characters(slot: u32, which: u32) -> u64 {
    let Some(all) = LISTS.get_ptr_mut(slot) else { return 0 };
    // SAFETY: as in `lists::found`.
    let all = unsafe { &mut *all };
    all.characters = Characters { at: 0, bytes: 0, length: 0, width: 1 };
    let of = match which {
        NAME => all.text,
        PATH => all.path,
        _ => all.source,
    };
    characters(all, of).is_some().into()
}

#[inline(always)]
fn characters(all: &mut List, of: u64) -> Option<()> {
    let (mut at, mut skipped, mut length) = (of, 0u64, u64::MAX);
    for _ in 0..MAX_STRINGS {
        let kind = type_of(at)?;
        if kind >= FIRST_OTHER {
            return None;
        }
        let own = u64::from(word(at - TAG, TEXT_LENGTH)? as u32);
        if length == u64::MAX {
            length = own;
        }
        let first = word(at - TAG, TEXT)?;
        let width = if kind & text::ONE_BYTE != 0 { 1 } else { 2 };
        let characters = match kind & text::KIND {
            text::SEQUENTIAL => at - TAG + u64::from(TEXT),
            // The resource has its own functions first, then where the characters are.
            text::EXTERNAL => word(first, 8)?,
            text::SLICED => {
                skipped = skipped.wrapping_add(word(at - TAG, TEXT_REST)? >> 32);
                at = first;
                continue;
            }
            // One that was put together has all in its first part.
            text::CONS | text::THIN => {
                at = first;
                continue;
            }
            _ => return None,
        };
        let left = own.saturating_sub(skipped);
        all.characters.at = characters.wrapping_add(skipped * u64::from(width));
        all.characters.bytes = if length < left { length } else { left } * u64::from(width);
        all.characters.length = length * u64::from(width);
        all.characters.width = width;
        return Some(());
    }
    None
}
