//! DWARF → ranges of the table: units in parallel, in batches, merged in their order.
//!
//! What a unit says is worked out by `scopes.rs` (functions, inlined calls) and `lines.rs` (files, lines), and laid over
//! each other by `overlay.rs`. Here are the sections they come from, and how references between units are followed.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gimli::{
    AbbreviationsCacheStrategy, AttributeValue, DebugInfoOffset, Dwarf, DwarfSections, EndianSlice,
    IncompleteLineProgram, RunTimeEndian, SectionId, Unit, UnitHeader, UnitOffset,
};
use object::Endianness;
use rustc_hash::FxHashMap;

use super::overlay::{self, UnitTable};
use super::symbols::{Symbols, code};
use super::{lines, scopes};
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
    /// Spends one.
    ///
    /// # Errors
    /// When there is nothing left.
    pub fn spend(&self) -> Result<(), DwarfError> {
        let left = self.0.fetch_sub(1, Ordering::Relaxed);
        if left == 0 || left > usize::MAX / 2 { Err(DwarfError::TooMuch) } else { Ok(()) }
    }
}

/// The sections of a file, and of the one with its common parts.
#[derive(Debug)]
pub struct Sections {
    main: DwarfSections<Bytes>,
    alt: Option<DwarfSections<Bytes>>,
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
    pub fn load(elf: &Elf, alt: Option<&Elf>) -> Result<Self, ElfError> {
        let mut sequential = Vec::new();
        let mut lengths = 0;
        let mut all = |elf: &Elf| {
            DwarfSections::load(|id: SectionId| {
                let wanted = match id {
                    SectionId::DebugAbbrev
                    | SectionId::DebugAddr
                    | SectionId::DebugInfo
                    | SectionId::DebugLine
                    | SectionId::DebugLineStr
                    | SectionId::DebugRanges
                    | SectionId::DebugRngLists
                    | SectionId::DebugStr
                    | SectionId::DebugStrOffsets => elf.section(id.name())?,
                    _ => None,
                };
                let bytes = wanted.unwrap_or_else(|| Bytes::from(Vec::new()));
                lengths += bytes.len();
                if matches!(id, SectionId::DebugInfo | SectionId::DebugLine) {
                    sequential.push(bytes.clone());
                }
                Ok::<_, ElfError>(bytes)
            })
        };
        let main = all(elf)?;
        let alt = alt.map(all).transpose()?;
        Ok(Self {
            main,
            alt,
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
    pub fn compile(&self, symbols: &Symbols, writer: &mut Writer, notes: &mut Vec<String>) {
        let debug = Debug::new(self);
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
    }
}

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
    fn new(sections: &'a Sections) -> Self {
        let slice = |bytes: &'a Bytes| EndianSlice::new(&bytes[..], sections.endian);
        let sup = sections.alt.as_ref();
        // A range costs two bytes at least, a row one.
        let bytes: usize = sections.lengths;
        Self {
            main: Part::new(sections.main.borrow_with_sup(sup, slice)),
            sup: sup.map(|sup| Part::new(sup.borrow(slice))),
            code: &sections.code,
            ranges: Budget(AtomicUsize::new(bytes)),
            rows: Budget(AtomicUsize::new(bytes)),
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
        let place = Place { dwarf: Arc::clone(&self.main.dwarf), unit, sup: false };
        let scopes = scopes::read(self, units, &place)?;
        let rows = lines::read(self, &place)?;
        Ok(overlay::overlay(&place, &scopes, &rows, symbols))
    }
}

/// A unit with the sections it is in.
#[derive(Clone, Debug)]
pub struct Place<'a> {
    /// Its sections.
    pub dwarf: Arc<Dwarf<Slice<'a>>>,
    /// The unit.
    pub unit: Arc<Unit<Slice<'a>>>,
    sup: bool,
}

impl<'a> Place<'a> {
    /// Its line program.
    #[must_use]
    pub fn line_program(&self) -> Option<IncompleteLineProgram<Slice<'a>>> {
        self.unit.line_program.clone()
    }

    /// What a reference leads to, as a key: whether into the file with common parts, and the offset there.
    #[must_use]
    pub fn key(&self, reference: &AttributeValue<Slice<'a>>) -> Option<(bool, usize)> {
        match reference {
            AttributeValue::UnitRef(offset) => {
                let DebugInfoOffset(base) = self.unit.header.debug_info_offset()?;
                Some((self.sup, base.checked_add(offset.0)?))
            }
            AttributeValue::DebugInfoRef(offset) => Some((self.sup, offset.0)),
            AttributeValue::DebugInfoRefSup(offset) => Some((true, offset.0)),
            _ => None,
        }
    }
}

/// Units that others refer to, kept for the next reference: with link-time optimization nearly all are between units.
#[derive(Debug, Default)]
pub struct Units<'a> {
    known: FxHashMap<(bool, usize), Arc<Unit<Slice<'a>>>>,
}

/// Units kept by each thread; each holds the file table of its line program.
const MAX_KNOWN: usize = 256;

impl<'a> Units<'a> {
    /// The unit and entry a key leads to.
    pub fn find(
        &mut self,
        debug: &Debug<'a>,
        (sup, offset): (bool, usize),
    ) -> Option<(Place<'a>, UnitOffset)> {
        let part = if sup { debug.sup.as_ref()? } else { &debug.main };
        let begin =
            |header: &UnitHeader<Slice<'a>>| header.debug_info_offset().map_or(0, |at| at.0);
        let after = part.headers.partition_point(|header| begin(header) <= offset);
        let header = part.headers.get(after.checked_sub(1)?)?;
        let inside = UnitOffset(offset - begin(header));
        if self.known.len() >= MAX_KNOWN {
            self.known.clear();
        }
        let unit = match self.known.entry((sup, after)) {
            std::collections::hash_map::Entry::Occupied(known) => Arc::clone(known.get()),
            std::collections::hash_map::Entry::Vacant(place) => {
                Arc::clone(place.insert(Arc::new(part.dwarf.unit(*header).ok()?)))
            }
        };
        Some((Place { dwarf: Arc::clone(&part.dwarf), unit, sup }, inside))
    }
}
