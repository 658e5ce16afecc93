//! DWARF → ranges of the table: units in parallel, in batches, merged in their order.
//!
//! What a unit says is worked out by `scopes.rs` (functions, inlined calls) and `lines.rs` (files,
//! lines), and laid over each other by `overlay.rs`. Here are the sections they come from;
//! `debug.rs` has how references between units are followed.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gimli::{
    DebugInfoOffset, Dwarf, DwarfPackage, DwarfPackageSections, DwarfSections, EndianSlice,
    RunTimeEndian, SectionId, UnitHeader,
};
use object::Endianness;
use stackwire_elf::{Bytes, Elf};

use super::debug::{Debug, DwarfError, Part, PartOf, Place, Slice, Units};
use super::overlay::{self, UnitTable};
use super::symbols::{Symbols, code};
use super::{Files, lines, scopes};
use crate::table::Writer;

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
    /// See [`DwarfError`].
    pub fn load(elf: &Elf, files: &Files<'_>) -> Result<Self, DwarfError> {
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
                Ok::<_, DwarfError>(bytes)
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
        let work = Work::new(self, files);
        let mut failed: Option<(usize, DwarfError)> = None;
        let mut write = |tables: Vec<Result<UnitTable, DwarfError>>| {
            for table in tables {
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
        };
        let mut rest = &work.debug.main.headers[..];
        let mut done = Vec::new();
        while !rest.is_empty() {
            let (batch, after) = rest.split_at(batch(rest));
            rest = after;
            // One batch is written while the next is worked out.
            let before = std::mem::take(&mut done);
            done = std::thread::scope(|scope| {
                let next = scope.spawn(|| work.compile_batch(batch, symbols));
                write(before);
                next.join().unwrap_or_default()
            });
        }
        write(done);
        if let Some((count, error)) = failed {
            let all = work.debug.main.headers.len();
            notes.push(format!(
                "{count} of {all} units of its debug information do not parse: {error}"
            ));
        }
        match work.without_split.load(Ordering::Relaxed) {
            0 => {}
            count => notes.push(format!("{count} .dwo files of it are missing")),
        }
    }
}

/// A section, empty when there is none.
fn section(elf: &Elf, name: &str) -> Result<Bytes, DwarfError> {
    Ok(elf.section(name)?.unwrap_or_else(|| Bytes::from(Vec::new())))
}

/// Units of a batch have this many bytes of entries together: what is worked out at once, two
/// batches, fits in memory.
const BATCH: usize = 8 << 20;

/// How many units the next batch has.
fn batch(headers: &[UnitHeader<Slice<'_>>]) -> usize {
    let mut bytes = 0;
    let fits = headers.iter().take_while(|header| {
        bytes += header.length_including_self();
        bytes <= BATCH
    });
    fits.count().max(1).min(headers.len())
}

/// What is worked out of a file.
#[derive(Debug)]
struct Work<'a> {
    debug: Debug<'a>,
    package: Option<DwarfPackage<Slice<'a>>>,
    sections: &'a Sections,
    files: &'a Files<'a>,
    /// Units whose other half was not found.
    without_split: AtomicUsize,
}

/// Threads that parse: more want memory, not time.
const MAX_WORKERS: usize = 4;

impl<'a> Work<'a> {
    fn new(sections: &'a Sections, files: &'a Files<'a>) -> Self {
        let slice = |bytes: &'a Bytes| EndianSlice::new(&bytes[..], sections.endian);
        let sup = sections.alt.as_ref();
        let main = Part::new(sections.main.borrow_with_sup(sup, slice));
        let sup = sup.map(|sup| Part::new(sup.borrow(slice)));
        let package = sections.package.as_ref().and_then(|package| {
            // One that does not parse is as none: its units are then counted as missing.
            package.borrow(slice, EndianSlice::new(&[], sections.endian)).ok()
        });
        let debug = Debug::new(main, sup, &sections.code, sections.lengths);
        Self { debug, package, sections, files, without_split: AtomicUsize::new(0) }
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
        let main = &self.debug.main.dwarf;
        let unit = Arc::new(main.unit(*header)?);
        let place = Place { dwarf: Arc::clone(main), unit, part: PartOf::Main };
        // What `dwz` shares between units names the lines of all of them, and has no code.
        if place.unit.entry(place.unit.header.root_offset())?.tag() == gimli::DW_TAG_partial_unit {
            return Ok(UnitTable::default());
        }
        let rows = lines::read(&self.debug, &place)?;
        if place.unit.dwo_id.is_none() || place.unit.dwo_name()?.is_none() {
            let scopes = scopes::read(&self.debug, units, &place)?;
            return Ok(overlay::overlay(&place, &scopes, &rows, symbols));
        }
        // The lines are here, the functions in the other half.
        if let Some(dwarf) = self.packaged(&place)? {
            if let Some(split) = split_unit(dwarf, &place)? {
                let scopes = scopes::read(&self.debug, units, &split)?;
                return Ok(overlay::overlay(&place, &scopes, &rows, symbols));
            }
        } else if let Some(sections) = self.split_sections(&place) {
            let skeleton = place.unit.header.debug_info_offset().unwrap_or(DebugInfoOffset(0));
            let all = self.sections;
            if let Some(table) = overlay_split(all, skeleton, &sections, &rows, symbols)? {
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

/// Lines of a unit and functions of its other half, which is in a file of its own.
///
/// gimli's types are invariant in the lifetime of what they borrow: all that meets the other half's
/// sections, which live for this call alone, is borrowed anew with them.
fn overlay_split<'b>(
    sections: &'b Sections,
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
    let debug = Debug::new(main, None, &sections.code, sections.lengths);
    let scopes = scopes::read(&debug, &mut Units::default(), &split)?;
    Ok(Some(overlay::overlay(&place, &scopes, rows, symbols)))
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
