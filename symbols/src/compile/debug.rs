//! Debug information as the readers of units see it: sections, units and references between them,
//! and how much they may describe.
//!
//! Filled by `dwarf.rs`, read by `lines.rs` and `scopes.rs`.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gimli::{
    AbbreviationsCacheStrategy, AttributeValue, DebugInfoOffset, Dwarf, EndianSlice, Endianity,
    Reader, RunTimeEndian, Section, Unit, UnitHeader, UnitOffset,
};
use rustc_hash::FxHashMap;
use stackwire_elf::ElfError;
use stackwire_model::VirtAddr;

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
    /// A defect of ours.
    #[error("reading it panicked")]
    Panicked,
    /// It needs more of its section than is at hand.
    #[error("refers to other units")]
    LeadsOut,
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

/// How much the units of a file may still describe, all together.
#[derive(Debug)]
pub struct Budgets {
    /// Ranges of functions.
    pub ranges: Budget,
    /// Rows of line programs.
    pub rows: Budget,
    /// Bytes of names.
    pub names: Budget,
}

impl Budgets {
    /// Those of a file whose sections have `length` bytes.
    #[must_use]
    pub fn new(length: usize) -> Self {
        // A range costs two bytes at least, a row one.
        let budget = || Budget(AtomicUsize::new(length.max(MIN_BUDGET)));
        // Each unit names the functions inlined into it anew: an entry of some ten bytes, a name of
        // some hundred.
        let names = Budget(AtomicUsize::new(length.saturating_mul(16).max(MIN_BUDGET)));
        Self { ranges: budget(), rows: budget(), names }
    }
}

/// A file's debug information, parsed as far as its list of units.
#[derive(Debug)]
pub struct Debug<'a> {
    /// The file's own.
    pub main: Part<'a>,
    /// The one with its common parts.
    pub sup: Option<Part<'a>>,
    /// Where its code is.
    pub code: &'a [Range<VirtAddr>],
    /// How much it may describe.
    pub budgets: &'a Budgets,
    /// `main` is a piece of its section: references between units lead nowhere.
    pub is_piece: bool,
}

impl Debug<'_> {
    /// Whether there is code at an address; what the linker dropped was moved to where there is
    /// none.
    #[must_use]
    pub fn is_code(&self, address: u64) -> bool {
        self.code.is_empty() || self.code.iter().any(|range| range.contains(&VirtAddr(address)))
    }
}

/// One file of it.
#[derive(Debug)]
pub struct Part<'a> {
    /// Its sections.
    pub dwarf: Arc<Dwarf<Slice<'a>>>,
    /// Its units, by offset; empty where no reference leads to them.
    pub headers: Vec<UnitHeader<Slice<'a>>>,
    /// Units whose header does not parse.
    pub malformed: Vec<Malformed>,
}

/// A unit whose header does not parse.
#[derive(Clone, Copy, Debug)]
pub struct Malformed {
    /// Where it begins in its section.
    pub offset: usize,
    /// Why not.
    pub error: gimli::Error,
}

/// Where this many units do not parse, what follows is not debug information.
const MAX_MALFORMED: usize = 1000;

impl<'a> Part<'a> {
    /// Lists its units.
    #[must_use]
    pub fn new(mut dwarf: Dwarf<Slice<'a>>) -> Self {
        dwarf.populate_abbreviations_cache(AbbreviationsCacheStrategy::Duplicates);
        let (mut headers, mut malformed) = (Vec::new(), Vec::new());
        let section = *dwarf.debug_info.reader();
        let mut offset = 0;
        // gimli's own iterator ends at the first that does not parse.
        while offset < section.len() && malformed.len() < MAX_MALFORMED {
            match dwarf.unit_header(DebugInfoOffset(offset)) {
                Ok(header) => headers.push(header),
                Err(error) => malformed.push(Malformed { offset, error }),
            }
            match unit_length(&section.slice()[offset..], Reader::endian(&section)) {
                Some(length) => offset += length,
                None => break,
            }
        }
        Self { dwarf: Arc::new(dwarf), headers, malformed }
    }
}

/// Bytes of the unit at the front, if it is whole. The length of what follows stands in front of
/// it, in four bytes, or behind four of 0xff in eight (DWARF 5, 7.4).
#[must_use]
pub fn unit_length(bytes: &[u8], endian: RunTimeEndian) -> Option<usize> {
    let (short, after) = bytes.split_first_chunk::<4>()?;
    let (length, after) = match endian.read_u32(short) {
        0xffff_ffff => {
            let (long, after) = after.split_first_chunk::<8>()?;
            (endian.read_u64(long), after)
        }
        short => (u64::from(short), after),
    };
    let rest = after.get(usize::try_from(length).ok()?..)?;
    Some(bytes.len() - rest.len())
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
    /// What a reference leads to: the file, and the offset there.
    fn key(&self, reference: &AttributeValue<Slice<'a>>) -> Option<(PartOf, usize)> {
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
    /// A reference led out of the piece at hand: what was read since is not whole.
    pub led_out: bool,
}

/// Units kept by each thread; each holds the file table of its line program.
const MAX_KNOWN: usize = 16;

impl<'a> Units<'a> {
    /// What a reference of `from` leads to, as a key.
    pub fn key(
        &mut self,
        debug: &Debug<'a>,
        from: &Place<'a>,
        reference: &AttributeValue<Slice<'a>>,
    ) -> Option<(PartOf, usize)> {
        self.led_out |= debug.is_piece && matches!(reference, AttributeValue::DebugInfoRef(_));
        from.key(reference)
    }

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
        let (part_of, offset) = self.key(debug, from, reference)?;
        if self.led_out {
            return None;
        }
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
