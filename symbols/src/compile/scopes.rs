//! The functions of a compilation unit and what is inlined into them, from its tree of entries.

use gimli::{
    Abbreviation, AttributeSpecification, AttributeValue, DebuggingInformationEntry as Entry,
    EntriesRaw, UnitOffset,
};
use rustc_hash::FxHashMap;

use super::debug::{Debug, DwarfError, PartOf, Place, Slice, Units};
use super::paint::Span;

/// A function, or a call inlined into one.
#[derive(Clone, Copy, Debug)]
pub struct Scope {
    /// Number in [`Scopes::names`].
    pub function: u32,
    /// What it is inlined into.
    pub parent: Option<u32>,
    /// File and line of the call, as the unit's line program numbers files.
    pub call: (u64, u32),
}

/// All of a unit.
#[derive(Debug, Default)]
pub struct Scopes<'a> {
    /// Names, raw; empty where there is none.
    pub names: Vec<&'a [u8]>,
    /// Functions and inlined calls, callers before what is inlined into them.
    pub scopes: Vec<Scope>,
    /// Addresses of the scopes, what is inlined behind what it is inlined into.
    pub spans: Vec<Span>,
    by_place: FxHashMap<(usize, usize), u32>,
    /// GHC wrote them: a function has the address of its first block alone, and blocks of its own
    /// for the rest; what the linker calls it is a number where nobody else does.
    of_ghc: bool,
}

/// An entry around others.
struct Level {
    depth: isize,
    /// The scope in force inside.
    scope: Option<u32>,
    /// It is a function, or inside one.
    in_function: bool,
}

/// References followed for a name, all together; compilers make two or three.
const MAX_HOPS: usize = 16;
/// Deepest tree of entries looked at.
const MAX_DEPTH: usize = 1024;
/// Longest name taken; C++ has some of many kilobytes.
const MAX_NAME: usize = 1 << 16;
/// Most ranges a unit has; the largest seen have a hundred thousand.
const MAX_SPANS: usize = 4 << 20;

/// Reads the scopes of a unit.
///
/// # Errors
/// See [`DwarfError`].
pub fn read<'a>(
    debug: &Debug<'a>,
    units: &mut Units<'a>,
    place: &Place<'a>,
) -> Result<Scopes<'a>, DwarfError> {
    let unit = &*place.unit;
    let mut found = Scopes::default();
    let mut functions: FxHashMap<(PartOf, usize), u32> = FxHashMap::default();
    // The entries around the one at hand.
    let mut stack: Vec<Level> = Vec::new();
    let mut entries = unit.entries_raw(None)?;
    let mut entry = Entry::null();
    // Depth of what `entries` began with.
    let mut base = 0;
    while !entries.is_empty() {
        let depth = base + entries.next_depth();
        let mut ahead = entries.clone();
        let Some(abbreviation) = ahead.read_abbreviation()? else {
            entries = ahead;
            continue;
        };
        while stack.last().is_some_and(|level| level.depth >= depth) {
            stack.pop();
        }
        let parent = stack.last().and_then(|level| level.scope);
        let in_function = stack.last().is_some_and(|level| level.in_function);
        let matters = match abbreviation.tag() {
            gimli::DW_TAG_compile_unit => true,
            gimli::DW_TAG_subprogram => has_code(abbreviation),
            gimli::DW_TAG_inlined_subroutine => parent.is_some() && has_code(abbreviation),
            gimli::DW_TAG_lexical_block => found.of_ghc && parent.is_some(),
            _ => false,
        };
        let scope = if matters {
            entries.read_entry(&mut entry)?;
            self::entry(debug, units, place, &entry, parent, &mut functions, &mut found)?
        } else {
            let sibling = sibling(&mut ahead, abbreviation)?;
            if let Some(sibling) = sibling.filter(|_| !in_function) {
                (entries, base) = (unit.entries_raw(Some(sibling))?, depth);
                continue;
            }
            entries = ahead;
            match abbreviation.tag() {
                gimli::DW_TAG_subprogram => None,
                gimli::DW_TAG_inlined_subroutine if parent.is_some() => None,
                // Blocks and namespaces are transparent; types are looked into for methods defined
                // in them.
                _ => parent,
            }
        };
        if abbreviation.has_children() && stack.len() < MAX_DEPTH {
            let is_function = abbreviation.tag() == gimli::DW_TAG_subprogram;
            stack.push(Level { depth, scope, in_function: in_function || is_function });
        }
    }
    Ok(found)
}

/// Passes over the attributes of an entry whose abbreviation was read. Gives where the next entry
/// beside it is, if it is a type whose producer says so.
///
/// Most entries are variables, types and calls. Many of those of C++ are inside classes. GCC, which
/// alone writes where the next one is, puts no code there, but for classes inside functions: a
/// method that is defined in its class has its code in an entry of the unit or of a namespace.
fn sibling<'a>(
    entries: &mut EntriesRaw<'_, Slice<'a>>,
    abbreviation: &Abbreviation,
) -> Result<Option<UnitOffset>, DwarfError> {
    let is_type = matches!(
        abbreviation.tag(),
        gimli::DW_TAG_class_type
            | gimli::DW_TAG_structure_type
            | gimli::DW_TAG_union_type
            | gimli::DW_TAG_enumeration_type
    );
    let attributes = abbreviation.attributes();
    let says = |it: &AttributeSpecification| it.name() == gimli::DW_AT_sibling;
    if !is_type || !abbreviation.has_children() || !attributes.iter().any(says) {
        entries.skip_attributes(attributes)?;
        return Ok(None);
    }
    let mut sibling = None;
    for &attribute in attributes {
        let attribute = entries.read_attribute(attribute)?;
        if let (gimli::DW_AT_sibling, AttributeValue::UnitRef(offset)) =
            (attribute.name(), attribute.value())
        {
            sibling = Some(offset);
        }
    }
    // Forwards only: a hostile file must not lead in a circle.
    Ok(sibling.filter(|&sibling| sibling > entries.next_offset()))
}

/// Whether entries of this form have code. Declarations and abstract instances have none.
fn has_code(abbreviation: &Abbreviation) -> bool {
    let names = [gimli::DW_AT_low_pc, gimli::DW_AT_ranges];
    abbreviation.attributes().iter().any(|attribute| names.contains(&attribute.name()))
}

/// Reads an entry that matters; gives the scope of its children.
fn entry<'a>(
    debug: &Debug<'a>,
    units: &mut Units<'a>,
    place: &Place<'a>,
    entry: &Entry<Slice<'a>>,
    parent: Option<u32>,
    functions: &mut FxHashMap<(PartOf, usize), u32>,
    found: &mut Scopes<'a>,
) -> Result<Option<u32>, DwarfError> {
    let (dwarf, unit) = (&*place.dwarf, &*place.unit);
    let scope = match entry.tag() {
        gimli::DW_TAG_compile_unit => {
            let language = entry.attr_value(gimli::DW_AT_language);
            found.of_ghc = language == Some(AttributeValue::Language(gimli::DW_LANG_Haskell));
            return Ok(None);
        }
        gimli::DW_TAG_subprogram => Some(scope(debug, units, place, entry, None, functions, found)),
        gimli::DW_TAG_inlined_subroutine => {
            Some(scope(debug, units, place, entry, parent, functions, found))
        }
        // A block of GHC.
        _ => parent,
    };
    if let Some(scope) = scope
        && !ends_beyond(dwarf, unit, entry)
    {
        let mut ranges = dwarf.die_ranges(unit, entry)?;
        while let Some(range) = ranges.next()? {
            debug.budgets.ranges.spend(1)?;
            if found.spans.len() >= MAX_SPANS {
                return Err(DwarfError::TooMuch);
            }
            if debug.is_code(range.begin) {
                found.spans.push(Span { start: range.begin, end: range.end, what: scope });
            }
        }
    }
    Ok(scope)
}

/// Whether an entry's code would end beyond all addresses: gimli 0.34 adds without looking.
fn ends_beyond<'a>(
    dwarf: &gimli::Dwarf<Slice<'a>>,
    unit: &gimli::Unit<Slice<'a>>,
    entry: &Entry<Slice<'a>>,
) -> bool {
    let Some(AttributeValue::Udata(size)) = entry.attr_value(gimli::DW_AT_high_pc) else {
        return false;
    };
    let low = entry.attr_value(gimli::DW_AT_low_pc);
    let low = low.and_then(|low| dwarf.attr_address(unit, low).ok().flatten());
    low.is_some_and(|low| low.checked_add(size).is_none())
}

/// Adds a scope for an entry that has code.
fn scope<'a>(
    debug: &Debug<'a>,
    units: &mut Units<'a>,
    place: &Place<'a>,
    entry: &Entry<Slice<'a>>,
    parent: Option<u32>,
    functions: &mut FxHashMap<(PartOf, usize), u32>,
    found: &mut Scopes<'a>,
) -> u32 {
    let function = function(debug, units, place, entry, functions, found);
    let number = |name| entry.attr(name).and_then(gimli::Attribute::udata_value);
    let file = match entry.attr_value(gimli::DW_AT_call_file) {
        Some(AttributeValue::FileIndex(file)) => file,
        Some(value) => value.udata_value().unwrap_or(0),
        None => 0,
    };
    let line = number(gimli::DW_AT_call_line).unwrap_or(0);
    found.scopes.push(Scope { function, parent, call: (file, u32::try_from(line).unwrap_or(0)) });
    (found.scopes.len() - 1) as u32
}

/// Number of the function an entry is an instance of.
fn function<'a>(
    debug: &Debug<'a>,
    units: &mut Units<'a>,
    place: &Place<'a>,
    entry: &Entry<Slice<'a>>,
    functions: &mut FxHashMap<(PartOf, usize), u32>,
    found: &mut Scopes<'a>,
) -> u32 {
    // Not of an instance with a name of its own, as GCC gives to clones and constructors.
    let own = [gimli::DW_AT_linkage_name, gimli::DW_AT_MIPS_linkage_name, gimli::DW_AT_name];
    let origin = entry
        .attr_value(gimli::DW_AT_abstract_origin)
        .filter(|_| !own.iter().any(|&name| entry.has_attr(name)))
        .and_then(|value| units.key(debug, place, &value));
    if let Some(&function) = origin.as_ref().and_then(|key| functions.get(key)) {
        return function;
    }
    let names = names(debug, units, place, entry, &mut MAX_HOPS.clone());
    let name =
        if found.of_ghc { names.plain.or(names.linkage) } else { names.linkage.or(names.plain) };
    let name = name.unwrap_or_default();
    let name = &name[..name.len().min(MAX_NAME)];
    let known = found.by_place.contains_key(&(name.as_ptr() as usize, name.len()));
    // What no file has bytes for stays without a name.
    let name = if known || debug.budgets.names.spend(name.len()).is_ok() { name } else { &[] };
    // By where it lies: many entries may name one string.
    let function =
        *found.by_place.entry((name.as_ptr() as usize, name.len())).or_insert_with(|| {
            found.names.push(name);
            (found.names.len() - 1) as u32
        });
    if let Some(key) = origin {
        functions.insert(key, function);
    }
    function
}

/// What an entry and those it refers to are called.
#[derive(Clone, Copy, Debug, Default)]
struct Names<'a> {
    linkage: Option<&'a [u8]>,
    plain: Option<&'a [u8]>,
}

fn names<'a>(
    debug: &Debug<'a>,
    units: &mut Units<'a>,
    place: &Place<'a>,
    entry: &Entry<Slice<'a>>,
    hops: &mut usize,
) -> Names<'a> {
    let text = |name| {
        let value = entry.attr_value(name)?;
        let text = place.dwarf.attr_string(&place.unit, value).ok()?.slice();
        // GHC writes empty ones: those are none.
        (!text.is_empty()).then_some(text)
    };
    let mut names = Names {
        linkage: text(gimli::DW_AT_linkage_name).or_else(|| text(gimli::DW_AT_MIPS_linkage_name)),
        plain: text(gimli::DW_AT_name),
    };
    for reference in [gimli::DW_AT_abstract_origin, gimli::DW_AT_specification] {
        if names.linkage.is_some() || *hops == 0 {
            break;
        }
        let Some(value) = entry.attr_value(reference) else { continue };
        let Some((place, offset)) = units.follow(debug, place, &value) else { continue };
        let Ok(entry) = place.unit.entry(offset) else { continue };
        *hops -= 1;
        let more = self::names(debug, units, &place, &entry, hops);
        names.linkage = more.linkage;
        names.plain = names.plain.or(more.plain);
    }
    names
}
