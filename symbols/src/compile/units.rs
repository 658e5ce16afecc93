//! Units → their tables, several at a time: lines and functions of each, and the other half of
//! those that have one in another file.
//!
//! Called by `dwarf.rs` with all units of a file and by `pieces.rs` with some.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gimli::{DebugInfoOffset, Dwarf, DwarfPackage, DwarfSections, EndianSlice, UnitHeader};
use stackwire_elf::Bytes;

use super::debug::{Budgets, Debug, DwarfError, Part, PartOf, Place, Slice, Units};
use super::overlay::{self, UnitTable};
use super::sections::{Sections, section};
use super::symbols::Symbols;
use super::{Files, lines, scopes};
use crate::table::Writer;

/// What is worked out of a file.
#[derive(Debug)]
pub struct Work<'a> {
    /// Its units, and what they refer to.
    pub debug: Debug<'a>,
    package: Option<DwarfPackage<Slice<'a>>>,
    sections: &'a Sections,
    units: &'a [u8],
    files: &'a Files<'a>,
    /// Units whose other half was not found.
    pub without_split: AtomicUsize,
}

/// Threads that compile: more want memory, not time.
pub const MAX_WORKERS: usize = 4;

impl<'a> Work<'a> {
    /// `units` are all of the file, or a piece of them.
    pub fn new(
        sections: &'a Sections,
        units: &'a [u8],
        files: &'a Files<'a>,
        budgets: &'a Budgets,
        is_piece: bool,
    ) -> Self {
        let slice = |bytes: &'a Bytes| EndianSlice::new(&bytes[..], sections.endian);
        let sup = sections.alt.as_ref();
        let mut main = sections.main.borrow_with_sup(sup, slice);
        main.debug_info = EndianSlice::new(units, sections.endian).into();
        let main = Part::new(main);
        let sup = sup.map(|sup| Part::new(sup.borrow(slice)));
        let package = sections.package.as_ref().and_then(|package| {
            // One that does not parse is as none: its units are then counted as missing.
            package.borrow(slice, EndianSlice::new(&[], sections.endian)).ok()
        });
        let debug = Debug { main, sup, code: &sections.code, budgets, is_piece };
        Self { debug, package, sections, units, files, without_split: AtomicUsize::new(0) }
    }

    /// The units in a part of the section whose header does not parse.
    pub fn malformed(
        &self,
        offsets: Range<usize>,
    ) -> impl Iterator<Item = Result<UnitTable, DwarfError>> {
        let malformed = self.debug.main.malformed.iter();
        let inside = malformed.filter(move |unit| offsets.contains(&unit.offset));
        inside.map(|unit| Err(unit.error.into()))
    }

    /// Compiles some units one after the other. Ends after the first that leads out of the piece.
    pub fn compile_in_order(
        &self,
        headers: &[UnitHeader<Slice<'a>>],
        symbols: &Symbols,
    ) -> Vec<Result<UnitTable, DwarfError>> {
        let mut units = Units::default();
        let mut done = Vec::new();
        for header in headers {
            let table = self.compile_unit(&mut units, header, symbols);
            if units.led_out {
                done.push(Err(DwarfError::LeadsOut));
                break;
            }
            done.push(table);
        }
        done
    }

    /// Compiles some units, several at a time; gives their tables in the order of the units.
    pub fn compile_batch(
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
        if self.debug.is_piece {
            return Err(DwarfError::LeadsOut);
        }
        // The lines are here, the functions in the other half.
        if let Some(dwarf) = self.packaged(&place)? {
            if let Some(split) = split_unit(dwarf, &place)? {
                let scopes = scopes::read(&self.debug, units, &split)?;
                return Ok(overlay::overlay(&place, &scopes, &rows, symbols));
            }
        } else if let Some(sections) = self.split_sections(&place)
            && let Some(table) = self.overlay_split(header, &sections, &rows, symbols)?
        {
            return Ok(table);
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
            id.dwo_name().map_or(Ok(Bytes::default()), |name| section(&elf, name))
        })
        .ok()
    }

    /// Lines of a unit and functions of its other half, which is in a file of its own.
    ///
    /// gimli's types are invariant in the lifetime of what they borrow. The sections of the other
    /// half live for this call alone. So everything used together with them is borrowed again here.
    fn overlay_split<'b>(
        &'b self,
        skeleton: &UnitHeader<Slice<'a>>,
        other: &'b DwarfSections<Bytes>,
        rows: &lines::Rows,
        symbols: &Symbols,
    ) -> Result<Option<UnitTable>, DwarfError> {
        let slice = |bytes: &'b Bytes| EndianSlice::new(&bytes[..], self.sections.endian);
        let mut main = self.sections.main.borrow(slice);
        main.debug_info = EndianSlice::new(self.units, self.sections.endian).into();
        let unit = Arc::new(main.unit(main.unit_header(offset(skeleton))?)?);
        let place = Place { dwarf: Arc::new(main), unit, part: PartOf::Main };
        let mut dwarf = other.borrow(slice);
        dwarf.make_dwo(&place.dwarf);
        let Some(split) = split_unit(dwarf, &place)? else { return Ok(None) };
        let dwarf = Arc::clone(&place.dwarf);
        let main = Part { dwarf, headers: Vec::new(), malformed: Vec::new() };
        let (code, budgets) = (&self.sections.code[..], self.debug.budgets);
        let debug = Debug { main, sup: None, code, budgets, is_piece: false };
        let scopes = scopes::read(&debug, &mut Units::default(), &split)?;
        Ok(Some(overlay::overlay(&place, &scopes, rows, symbols)))
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

/// A table that units are added to.
#[derive(Debug)]
pub struct Written<'a> {
    writer: &'a mut Writer,
    /// Those added, and those that do not parse.
    pub units: usize,
    /// How many do not parse, and why the first does not.
    pub failed: Option<(usize, DwarfError)>,
    /// Units whose other half was not found.
    pub without_split: usize,
}

impl<'a> Written<'a> {
    /// Nothing is in it.
    pub fn new(writer: &'a mut Writer) -> Self {
        Self { writer, units: 0, failed: None, without_split: 0 }
    }

    /// Adds units, in their order.
    pub fn write(&mut self, tables: Vec<Result<UnitTable, DwarfError>>) {
        self.units += tables.len();
        for table in tables {
            match table {
                Ok(table) => table.write(self.writer),
                Err(error) => match &mut self.failed {
                    Some((count, _)) => *count += 1,
                    None => self.failed = Some((1, error)),
                },
            }
        }
    }
}

/// Where a unit begins.
pub fn offset(header: &UnitHeader<Slice<'_>>) -> DebugInfoOffset {
    header.debug_info_offset().unwrap_or(DebugInfoOffset(0))
}
