//! DWARF → ranges of the table: units in parallel, in batches, merged in their order.
//!
//! What a unit says is worked out by `scopes.rs` (functions, inlined calls) and `lines.rs` (files, lines), and laid over
//! each other by `overlay.rs`. Here are the sections they come from, and how references between units are followed.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gimli::{
    AbbreviationsCacheStrategy, AttributeValue, DebugInfoOffset, Dwarf, DwarfPackage,
    DwarfPackageSections, DwarfSections, EndianSlice, RunTimeEndian, SectionId, Unit, UnitHeader,
    UnitOffset,
};
use object::Endianness;
use rustc_hash::FxHashMap;

use super::overlay::{self, UnitTable};
use super::symbols::{Symbols, code};
use super::{Files, lines, scopes};
use crate::elf::{Elf, ElfError};
use crate::table::{Bytes, Writer};

/// A piece of a section.
pub type Slice<'a> = EndianSlice<'a, RunTimeEndian>;

/// A unit that says nothing.
#[derive(Debug, thiserror::Error)]
pub enum DwarfError {
    /// It does not parse.
    #[error("{0}")]
    Malformed(#[from] gimli::Error),
    /// It describes more than its bytes can, by naming the same lists over and over.
    #[error("more ranges than the file has bytes for")]
    TooMuch,
}

/// How much a file may still describe.
#[derive(Debug)]
pub struct Budget(AtomicUsize);

impl Budget {
    /// Spends some.
    ///
    /// # Errors
    /// When there is not as much left.
    pub fn spend(&self, some: usize) -> Result<(), DwarfError> {
        let spend = |left: usize| left.checked_sub(some);
        match self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend) {
            Ok(_) => Ok(()),
            Err(_) => Err(DwarfError::TooMuch),
        }
    }
}

/// The sections of a file, and of the one with its common parts.
#[derive(Debug)]
pub struct Sections {
    main: DwarfSections<Bytes>,
    alt: Option<DwarfSections<Bytes>>,
    package: Option<DwarfPackageSections<Bytes>>,
    endian: RunTimeEndian,
    code: Vec<Range<u64>>,
    /// Those read from front to back.
    sequential: Vec<Bytes>,
    /// Bytes of all.
    lengths: usize,
}

impl Sections {
    /// Reads and decompresses them.
    ///
    /// # Errors
    /// See [`ElfError`].
    pub fn load(elf: &Elf, files: &Files<'_>) -> Result<Self, ElfError> {
        let mut sequential = Vec::new();
        let mut lengths = 0;
        let mut all = |elf: &Elf| {
            DwarfSections::load(|id: SectionId| {
                let bytes = match id {
                    SectionId::DebugAbbrev
                    | SectionId::DebugAddr
                    | SectionId::DebugInfo
                    | SectionId::DebugLine
                    | SectionId::DebugLineStr
                    | SectionId::DebugRanges
                    | SectionId::DebugRngLists
                    | SectionId::DebugStr
                    | SectionId::DebugStrOffsets => section(elf, id.name())?,
                    _ => Bytes::from(Vec::new()),
                };
                lengths += bytes.len();
                if matches!(id, SectionId::DebugInfo | SectionId::DebugLine) {
                    sequential.push(bytes.clone());
                }
                Ok::<_, ElfError>(bytes)
            })
        };
        let main = all(elf)?;
        let alt = files.alt.map(&mut all).transpose()?;
        let package = files.package.map(|elf| {
            DwarfPackageSections::load(|id| {
                id.dwo_name().map_or(Ok(Bytes::from(Vec::new())), |name| section(elf, name))
            })
        });
        let package = package.transpose()?;
        Ok(Self {
            main,
            alt,
            package,
            sequential,
            lengths,
            endian: match elf.endian {
                Endianness::Little => RunTimeEndian::Little,
                Endianness::Big => RunTimeEndian::Big,
            },
            code: code(elf),
        })
    }

    /// Adds all ranges to a table.
    pub fn compile(
        &self,
        files: &Files<'_>,
        symbols: &Symbols,
        writer: &mut Writer,
        notes: &mut Vec<String>,
    ) {
        let debug = Debug::new(self, files);
        let mut failed: Option<(usize, DwarfError)> = None;
        let mut rest = &debug.main.headers[..];
        while !rest.is_empty() {
            let (batch, after) = rest.split_at(batch(rest));
            rest = after;
            for table in debug.compile_batch(batch, symbols) {
                match table {
                    Ok(table) => table.write(writer),
                    Err(error) => match &mut failed {
                        Some((count, _)) => *count += 1,
                        None => failed = Some((1, error)),
                    },
                }
            }
            // What was read of mapped sections so far need not stay in memory.
            self.sequential.iter().for_each(Bytes::forget_pages);
        }
        if let Some((count, error)) = failed {
            let all = debug.main.headers.len();
            notes.push(format!(
                "{count} of {all} units of its debug information do not parse: {error}"
            ));
        }
        match debug.without_split.load(Ordering::Relaxed) {
            0 => {}
            count => notes.push(format!("{count} .dwo files of it are missing")),
        }
    }
}

/// A section, empty when there is none.
fn section(elf: &Elf, name: &str) -> Result<Bytes, ElfError> {
    Ok(elf.section(name)?.unwrap_or_else(|| Bytes::from(Vec::new())))
}

/// What even a file with hardly a byte may describe: its other halves are not counted into its length.
const MIN_BUDGET: usize = 8 << 20;

/// Units of a batch have this many bytes of entries together: what is worked out at once fits in memory.
const BATCH: usize = 16 << 20;

/// How many units the next batch has.
fn batch(headers: &[UnitHeader<Slice<'_>>]) -> usize {
    let mut bytes = 0;
    let fits = headers.iter().take_while(|header| {
        bytes += header.length_including_self();
        bytes <= BATCH
    });
    fits.count().max(1).min(headers.len())
}

/// A file's debug information, parsed as far as its list of units.
#[derive(Debug)]
pub struct Debug<'a> {
    main: Part<'a>,
    sup: Option<Part<'a>>,
    code: &'a [Range<u64>],
    ranges: Budget,
    rows: Budget,
    names: Budget,
    package: Option<DwarfPackage<Slice<'a>>>,
    sections: &'a Sections,
    files: &'a Files<'a>,
    /// Units whose other half was not found.
    without_split: AtomicUsize,
}

#[derive(Debug)]
struct Part<'a> {
    dwarf: Arc<Dwarf<Slice<'a>>>,
    headers: Vec<UnitHeader<Slice<'a>>>,
}

impl<'a> Part<'a> {
    fn new(mut dwarf: Dwarf<Slice<'a>>) -> Self {
        dwarf.populate_abbreviations_cache(AbbreviationsCacheStrategy::Duplicates);
        let mut headers = Vec::new();
        let mut units = dwarf.units();
        // After one that does not parse, where the next begins is unknown.
        while let Ok(Some(header)) = units.next() {
            headers.push(header);
        }
        Self { dwarf: Arc::new(dwarf), headers }
    }
}

/// Threads that parse: more want memory, not time.
const MAX_WORKERS: usize = 4;

impl<'a> Debug<'a> {
    fn new(sections: &'a Sections, files: &'a Files<'a>) -> Self {
        let slice = |bytes: &'a Bytes| EndianSlice::new(&bytes[..], sections.endian);
        let sup = sections.alt.as_ref();
        let main = Part::new(sections.main.borrow_with_sup(sup, slice));
        let mut debug =
            Self::of_parts(sections, files, main, sup.map(|sup| Part::new(sup.borrow(slice))));
        debug.package = sections.package.as_ref().and_then(|package| {
            // One that does not parse is as none: its units are then counted as missing.
            package.borrow(slice, EndianSlice::new(&[], sections.endian)).ok()
        });
        debug
    }

    fn of_parts(
        sections: &'a Sections,
        files: &'a Files<'a>,
        main: Part<'a>,
        sup: Option<Part<'a>>,
    ) -> Self {
        // A range costs two bytes at least, a row one.
        let budget = || Budget(AtomicUsize::new(sections.lengths.max(MIN_BUDGET)));
        // Each unit names the functions inlined into it anew: an entry of some ten bytes, a name of some hundred.
        let names = Budget(AtomicUsize::new(sections.lengths.saturating_mul(16).max(MIN_BUDGET)));
        Self {
            main,
            sup,
            code: &sections.code,
            ranges: budget(),
            rows: budget(),
            names,
            package: None,
            sections,
            files,
            without_split: AtomicUsize::new(0),
        }
    }

    /// Whether there is code at an address; what the linker dropped was moved to where there is none.
    #[must_use]
    pub fn is_code(&self, address: u64) -> bool {
        self.code.is_empty() || self.code.iter().any(|range| range.contains(&address))
    }

    /// What the ranges of functions may be spent from.
    #[must_use]
    pub fn ranges(&self) -> &Budget {
        &self.ranges
    }

    /// What bytes of names may be spent from.
    #[must_use]
    pub fn names(&self) -> &Budget {
        &self.names
    }

    /// What rows of line programs may be spent from.
    #[must_use]
    pub fn rows(&self) -> &Budget {
        &self.rows
    }

    /// Works out some units, in their order.
    fn compile_batch(
        &self,
        batch: &[UnitHeader<Slice<'a>>],
        symbols: &Symbols,
    ) -> Vec<Result<UnitTable, DwarfError>> {
        let next = AtomicUsize::new(0);
        let work = || {
            let mut units = Units::default();
            let mut done = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(header) = batch.get(index) else { break };
                done.push((index, self.compile_unit(&mut units, header, symbols)));
            }
            done
        };
        let workers = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_WORKERS);
        let mut done: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..workers.min(batch.len())).map(|_| scope.spawn(work)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap_or_default()).collect()
        });
        done.sort_by_key(|&(index, _)| index);
        done.into_iter().map(|(_, table)| table).collect()
    }

    fn compile_unit(
        &self,
        units: &mut Units<'a>,
        header: &UnitHeader<Slice<'a>>,
        symbols: &Symbols,
    ) -> Result<UnitTable, DwarfError> {
        let unit = Arc::new(self.main.dwarf.unit(*header)?);
        let place = Place { dwarf: Arc::clone(&self.main.dwarf), unit, part: PartOf::Main };
        // What `dwz` shares between units names the lines of all of them, and has no code.
        if place.unit.entry(place.unit.header.root_offset())?.tag() == gimli::DW_TAG_partial_unit {
            return Ok(UnitTable::default());
        }
        let rows = lines::read(self, &place)?;
        if place.unit.dwo_id.is_none() || place.unit.dwo_name()?.is_none() {
            let scopes = scopes::read(self, units, &place)?;
            return Ok(overlay::overlay(&place, &scopes, &rows, symbols));
        }
        // The lines are here, the functions in the other half.
        if let Some(dwarf) = self.packaged(&place)? {
            if let Some(split) = split_unit(dwarf, &place)? {
                let scopes = scopes::read(self, units, &split)?;
                return Ok(overlay::overlay(&place, &scopes, &rows, symbols));
            }
        } else if let Some(sections) = self.split_sections(&place) {
            let skeleton = place.unit.header.debug_info_offset().unwrap_or(DebugInfoOffset(0));
            let (all, files) = (self.sections, self.files);
            if let Some(table) = overlay_split(all, files, skeleton, &sections, &rows, symbols)? {
                return Ok(table);
            }
        }
        self.without_split.fetch_add(1, Ordering::Relaxed);
        Ok(overlay::overlay(&place, &scopes::Scopes::default(), &rows, symbols))
    }

    /// The other half of a unit, from the package.
    fn packaged(&self, place: &Place<'a>) -> gimli::Result<Option<Dwarf<Slice<'a>>>> {
        match (&self.package, place.unit.dwo_id) {
            (Some(package), Some(id)) => package.find_cu(id, &place.dwarf),
            _ => Ok(None),
        }
    }

    /// The file with the other half of a unit.
    fn split_sections(&self, place: &Place<'a>) -> Option<DwarfSections<Bytes>> {
        let text = |slice: Slice<'a>| String::from_utf8_lossy(slice.slice()).into_owned();
        let name = place.dwarf.attr_string(&place.unit, place.unit.dwo_name().ok()??).ok()?;
        let directory = place.unit.comp_dir.map(text).unwrap_or_default();
        let elf = self.files.split?(&directory, &text(name))?;
        DwarfSections::load(|id| {
            id.dwo_name().map_or(Ok(Bytes::from(Vec::new())), |name| section(&elf, name))
        })
        .ok()
    }
}

/// A unit with the sections it is in.
#[derive(Clone, Debug)]
pub struct Place<'a> {
    /// Its sections.
    pub dwarf: Arc<Dwarf<Slice<'a>>>,
    /// The unit.
    pub unit: Arc<Unit<Slice<'a>>>,
    part: PartOf,
}

/// Which file a unit is in: references lead elsewhere from each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PartOf {
    /// The executable's own, or its debug file.
    Main,
    /// The one with common parts.
    Sup,
    /// The other half of a unit.
    Split,
}

/// Lines of a unit and functions of its other half, which is in a file of its own.
///
/// gimli's types are invariant in the lifetime of what they borrow: all that meets the other half's sections,
/// which live for this call alone, is borrowed anew with them.
fn overlay_split<'b>(
    sections: &'b Sections,
    files: &'b Files<'b>,
    skeleton: DebugInfoOffset,
    other: &'b DwarfSections<Bytes>,
    rows: &lines::Rows,
    symbols: &Symbols,
) -> Result<Option<UnitTable>, DwarfError> {
    let slice = |bytes: &'b Bytes| EndianSlice::new(&bytes[..], sections.endian);
    let main = sections.main.borrow(slice);
    let unit = Arc::new(main.unit(main.unit_header(skeleton)?)?);
    let place = Place { dwarf: Arc::new(main), unit, part: PartOf::Main };
    let mut dwarf = other.borrow(slice);
    dwarf.make_dwo(&place.dwarf);
    let Some(split) = split_unit(dwarf, &place)? else { return Ok(None) };
    let main = Part { dwarf: Arc::clone(&place.dwarf), headers: Vec::new() };
    let debug = Debug::of_parts(sections, files, main, None);
    let scopes = scopes::read(&debug, &mut Units::default(), &split)?;
    Ok(Some(overlay::overlay(&place, &scopes, rows, symbols)))
}

impl From<gimli::Error> for ElfError {
    fn from(error: gimli::Error) -> Self {
        Self::Broken(error.to_string())
    }
}

/// The unit of the other half that belongs to `skeleton`.
fn split_unit<'b>(
    dwarf: Dwarf<Slice<'b>>,
    skeleton: &Place<'b>,
) -> Result<Option<Place<'b>>, DwarfError> {
    let mut headers = dwarf.units();
    while let Some(header) = headers.next()? {
        let mut unit = dwarf.unit(header)?;
        if unit.dwo_id == skeleton.unit.dwo_id {
            unit.copy_relocated_attributes(&skeleton.unit);
            let unit = Arc::new(unit);
            return Ok(Some(Place { dwarf: Arc::new(dwarf), unit, part: PartOf::Split }));
        }
    }
    Ok(None)
}

impl<'a> Place<'a> {
    /// What a reference leads to, as a key: the file, and the offset there.
    #[must_use]
    pub fn key(&self, reference: &AttributeValue<Slice<'a>>) -> Option<(PartOf, usize)> {
        match reference {
            AttributeValue::UnitRef(offset) => {
                let DebugInfoOffset(base) = self.unit.header.debug_info_offset()?;
                Some((self.part, base.checked_add(offset.0)?))
            }
            AttributeValue::DebugInfoRef(offset) => Some((self.part, offset.0)),
            AttributeValue::DebugInfoRefSup(offset) => Some((PartOf::Sup, offset.0)),
            _ => None,
        }
    }
}

/// Units that others refer to, kept for the next reference: with link-time optimization nearly all are between units.
#[derive(Debug, Default)]
pub struct Units<'a> {
    known: FxHashMap<(PartOf, usize), Arc<Unit<Slice<'a>>>>,
}

/// Units kept by each thread; each holds the file table of its line program.
const MAX_KNOWN: usize = 16;

impl<'a> Units<'a> {
    /// The unit and entry a reference of `from` leads to.
    pub fn follow(
        &mut self,
        debug: &Debug<'a>,
        from: &Place<'a>,
        reference: &AttributeValue<Slice<'a>>,
    ) -> Option<(Place<'a>, UnitOffset)> {
        if let AttributeValue::UnitRef(offset) = reference {
            return Some((from.clone(), *offset));
        }
        let (part_of, offset) = from.key(reference)?;
        let part = match part_of {
            PartOf::Main => &debug.main,
            PartOf::Sup => debug.sup.as_ref()?,
            // Nothing in one half refers to that of another unit.
            PartOf::Split => return None,
        };
        let begin =
            |header: &UnitHeader<Slice<'a>>| header.debug_info_offset().map_or(0, |at| at.0);
        let after = part.headers.partition_point(|header| begin(header) <= offset);
        let header = part.headers.get(after.checked_sub(1)?)?;
        let inside = UnitOffset(offset - begin(header));
        if self.known.len() >= MAX_KNOWN {
            self.known.clear();
        }
        let unit = match self.known.entry((part_of, after)) {
            std::collections::hash_map::Entry::Occupied(known) => Arc::clone(known.get()),
            std::collections::hash_map::Entry::Vacant(place) => {
                Arc::clone(place.insert(Arc::new(part.dwarf.unit(*header).ok()?)))
            }
        };
        Some((Place { dwarf: Arc::clone(&part.dwarf), unit, part: part_of }, inside))
    }
}
