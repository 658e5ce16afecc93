//! Debug information as the readers of units see it: sections, units and references between them,
//! and how much they may describe.
//!
//! Filled by `dwarf.rs`, read by `lines.rs` and `scopes.rs`.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gimli::{
    AbbreviationsCacheStrategy, AttributeValue, DebugInfoOffset, Dwarf, EndianSlice, RunTimeEndian,
    Unit, UnitHeader, UnitOffset,
};
use rustc_hash::FxHashMap;
use stackwire_elf::ElfError;

/// A piece of a section.
pub type Slice<'a> = EndianSlice<'a, RunTimeEndian>;

/// A unit that says nothing.
#[derive(Debug, thiserror::Error)]
pub enum DwarfError {
    /// It does not parse.
    #[error("{0}")]
    Malformed(#[from] gimli::Error),
    /// Its file cannot be read.
    #[error(transparent)]
    Elf(#[from] ElfError),
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

/// What even a file with hardly a byte may describe: its other halves are not counted into its
/// length.
const MIN_BUDGET: usize = 8 << 20;

/// A file's debug information, parsed as far as its list of units.
#[derive(Debug)]
pub struct Debug<'a> {
    /// The file's own.
    pub main: Part<'a>,
    sup: Option<Part<'a>>,
    code: &'a [Range<u64>],
    ranges: Budget,
    rows: Budget,
    names: Budget,
}

impl<'a> Debug<'a> {
    /// That of a file, with the one that has its common parts. `code`: where its code is. `length`:
    /// bytes of its sections, which limit what it may describe.
    #[must_use]
    pub fn new(
        main: Part<'a>,
        sup: Option<Part<'a>>,
        code: &'a [Range<u64>],
        length: usize,
    ) -> Self {
        // A range costs two bytes at least, a row one.
        let budget = || Budget(AtomicUsize::new(length.max(MIN_BUDGET)));
        // Each unit names the functions inlined into it anew: an entry of some ten bytes, a name of
        // some hundred.
        let names = Budget(AtomicUsize::new(length.saturating_mul(16).max(MIN_BUDGET)));
        Self { main, sup, code, ranges: budget(), rows: budget(), names }
    }

    /// Whether there is code at an address; what the linker dropped was moved to where there is
    /// none.
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
}

/// One file of it.
#[derive(Debug)]
pub struct Part<'a> {
    /// Its sections.
    pub dwarf: Arc<Dwarf<Slice<'a>>>,
    /// Its units, by offset; empty where no reference leads to them.
    pub headers: Vec<UnitHeader<Slice<'a>>>,
}

impl<'a> Part<'a> {
    /// Lists its units.
    #[must_use]
    pub fn new(mut dwarf: Dwarf<Slice<'a>>) -> Self {
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

/// A unit with the sections it is in.
#[derive(Clone, Debug)]
pub struct Place<'a> {
    /// Its sections.
    pub dwarf: Arc<Dwarf<Slice<'a>>>,
    /// The unit.
    pub unit: Arc<Unit<Slice<'a>>>,
    /// Which file it is in.
    pub part: PartOf,
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

/// Units that others refer to, kept for the next reference: with link-time optimization nearly all
/// are between units.
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
