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
}

/// A unit being read.
struct Reader<'r, 'a> {
    debug: &'r Debug<'a>,
    units: &'r mut Units<'a>,
    place: &'r Place<'a>,
    /// Functions by the entry that describes them for all their instances.
    functions: FxHashMap<(PartOf, usize), u32>,
    /// Functions by where their name lies, address and length.
    by_place: FxHashMap<(usize, usize), u32>,
    /// GHC wrote the unit: a function has the address of its first block alone, and blocks of its
    /// own for the rest; what the linker calls it is a number where nobody else does.
    of_ghc: bool,
    found: Scopes<'a>,
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
    let mut reader = Reader {
        debug,
        units,
        place,
        functions: FxHashMap::default(),
        by_place: FxHashMap::default(),
        of_ghc: false,
        found: Scopes::default(),
    };
    let unit = &*place.unit;
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
            gimli::DW_TAG_lexical_block => reader.of_ghc && parent.is_some(),
            _ => false,
        };
        let scope = if matters {
            entries.read_entry(&mut entry)?;
            reader.entry(&entry, parent)?
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
    Ok(reader.found)
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

impl<'a> Reader<'_, 'a> {
    /// Reads an entry that matters; gives the scope of its children.
    fn entry(
        &mut self,
        entry: &Entry<Slice<'a>>,
        parent: Option<u32>,
    ) -> Result<Option<u32>, DwarfError> {
        let scope = match entry.tag() {
            gimli::DW_TAG_compile_unit => {
                let language = entry.attr_value(gimli::DW_AT_language);
                self.of_ghc = language == Some(AttributeValue::Language(gimli::DW_LANG_Haskell));
                return Ok(None);
            }
            gimli::DW_TAG_subprogram => Some(self.scope(entry, None)),
            gimli::DW_TAG_inlined_subroutine => Some(self.scope(entry, parent)),
            // A block of GHC.
            _ => parent,
        };
        if let Some(scope) = scope {
            self.spans(entry, scope)?;
        }
        Ok(scope)
    }

    /// Adds the addresses of an entry to those of its scope.
    ///
    /// Not by gimli 0.34's `die_ranges`: it adds the size to the address without looking whether
    /// the sum is an address.
    fn spans(&mut self, entry: &Entry<Slice<'a>>, scope: u32) -> Result<(), DwarfError> {
        let (dwarf, unit) = (&*self.place.dwarf, &*self.place.unit);
        if let Some(value) = entry.attr_value(gimli::DW_AT_ranges)
            && let Some(mut ranges) = dwarf.attr_ranges(unit, value)?
        {
            while let Some(range) = ranges.next()? {
                self.span(range.begin, range.end, scope)?;
            }
            return Ok(());
        }
        let address = |value| dwarf.attr_address(unit, value);
        let Some(low) = entry.attr_value(gimli::DW_AT_low_pc) else { return Ok(()) };
        let (Some(start), Some(high)) = (address(low)?, entry.attr_value(gimli::DW_AT_high_pc))
        else {
            return Ok(());
        };
        let end = match high {
            AttributeValue::Udata(size) => start.checked_add(size),
            high => address(high)?,
        };
        end.map_or(Ok(()), |end| self.span(start, end, scope))
    }

    fn span(&mut self, start: u64, end: u64, scope: u32) -> Result<(), DwarfError> {
        self.debug.budgets.ranges.spend(1)?;
        if self.found.spans.len() >= MAX_SPANS {
            return Err(DwarfError::TooMuch);
        }
        if self.debug.is_code(start) {
            self.found.spans.push(Span { start, end, what: scope });
        }
        Ok(())
    }

    /// Adds a scope for an entry that has code.
    fn scope(&mut self, entry: &Entry<Slice<'a>>, parent: Option<u32>) -> u32 {
        let function = self.function(entry);
        let number = |name| entry.attr(name).and_then(gimli::Attribute::udata_value);
        let file = match entry.attr_value(gimli::DW_AT_call_file) {
            Some(AttributeValue::FileIndex(file)) => file,
            Some(value) => value.udata_value().unwrap_or(0),
            None => 0,
        };
        let line = number(gimli::DW_AT_call_line).unwrap_or(0);
        let call = (file, u32::try_from(line).unwrap_or(0));
        self.found.scopes.push(Scope { function, parent, call });
        (self.found.scopes.len() - 1) as u32
    }

    /// Number of the function an entry is an instance of.
    fn function(&mut self, entry: &Entry<Slice<'a>>) -> u32 {
        // Not of an instance with a name of its own, as GCC gives to clones and constructors.
        let own = [gimli::DW_AT_linkage_name, gimli::DW_AT_MIPS_linkage_name, gimli::DW_AT_name];
        let origin = entry
            .attr_value(gimli::DW_AT_abstract_origin)
            .filter(|_| !own.iter().any(|&name| entry.has_attr(name)))
            .and_then(|value| self.units.key(self.debug, self.place, &value));
        if let Some(&function) = origin.as_ref().and_then(|key| self.functions.get(key)) {
            return function;
        }
        let names = names(self.debug, self.units, self.place, entry, &mut MAX_HOPS.clone());
        let name =
            if self.of_ghc { names.plain.or(names.linkage) } else { names.linkage.or(names.plain) };
        let name = name.unwrap_or_default();
        let name = &name[..name.len().min(MAX_NAME)];
        let known = self.by_place.contains_key(&(name.as_ptr() as usize, name.len()));
        // What no file has bytes for stays without a name.
        let fits = known || self.debug.budgets.names.spend(name.len()).is_ok();
        let name = if fits { name } else { &[] };
        // By where it lies: many entries may name one string.
        let all = &mut self.found.names;
        let function =
            *self.by_place.entry((name.as_ptr() as usize, name.len())).or_insert_with(|| {
                all.push(name);
                (all.len() - 1) as u32
            });
        if let Some(key) = origin {
            self.functions.insert(key, function);
        }
        function
    }
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gimli::{Dwarf, EndianSlice, RunTimeEndian};

    use super::super::debug::{Budgets, Part};
    use super::*;

    #[test]
    fn a_function_that_ends_twice_has_no_end_beyond_all_addresses() {
        let endian = RunTimeEndian::Little;
        // DW_AT_high_pc twice: an address, and a size.
        let [low, high, address, data8] = [0x11, 0x12, 0x01, 0x07];
        let abbreviations = [
            &[1, 0x11, 1, 0, 0][..], // DW_TAG_compile_unit
            &[2, 0x2e, 0, high, address, low, address, high, data8, 0, 0, 0],
        ]
        .concat();
        let mut info = vec![0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 8, 1, 2];
        for value in [0x2000, 0x1000, u64::MAX - 0x10] {
            info.extend(value.to_le_bytes());
        }
        info.push(0);
        info[0] = info.len() as u8 - 4;
        let mut dwarf = Dwarf {
            debug_info: EndianSlice::new(&info, endian).into(),
            ..Dwarf::load(|_| Ok::<_, gimli::Error>(EndianSlice::new(&[], endian))).unwrap()
        };
        dwarf.debug_abbrev = gimli::DebugAbbrev::new(&abbreviations, endian);
        let budgets = Budgets::new(info.len());
        let main = Part::new(dwarf);
        let unit = Arc::new(main.dwarf.unit(main.headers[0]).unwrap());
        let place = Place { dwarf: Arc::clone(&main.dwarf), unit, part: PartOf::Main };
        let debug = Debug { main, sup: None, code: &[], budgets: &budgets, is_piece: false };
        let scopes = read(&debug, &mut Units::default(), &place).unwrap();
        assert_eq!((scopes.scopes.len(), scopes.spans.len()), (1, 1));
        assert_eq!((scopes.spans[0].start, scopes.spans[0].end), (0x1000, 0x2000));
    }
}
