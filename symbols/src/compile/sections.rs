//! The sections DWARF is in: of a file, of the one with its common parts, of the package with the
//! other halves of its units.
//!
//! Read by `dwarf.rs`, which borrows them as gimli wants them.

use std::ops::Range;

use gimli::{DwarfPackageSections, DwarfSections, RunTimeEndian, SectionId};
use object::Endianness;
use stackwire_elf::{Bytes, Elf};
use stackwire_model::VirtAddr;

use super::Files;
use super::debug::DwarfError;
use super::symbols::code;

/// The sections of a file but for its units, and those of the file with its common parts.
#[derive(Debug)]
pub struct Sections {
    /// Those of the file, without its units.
    pub main: DwarfSections<Bytes>,
    /// Those of the file with its common parts.
    pub alt: Option<DwarfSections<Bytes>>,
    /// Those of the package.
    pub package: Option<DwarfPackageSections<Bytes>>,
    /// Byte order.
    pub endian: RunTimeEndian,
    lines: Bytes,
    /// Where its code is.
    pub code: Vec<Range<VirtAddr>>,
    /// Bytes of all, which limit what they may describe.
    pub length: usize,
}

impl Sections {
    /// Reads and decompresses them.
    ///
    /// # Errors
    /// See [`DwarfError`].
    pub fn load(elf: &Elf, files: &Files<'_>) -> Result<Self, DwarfError> {
        let mut length = 0;
        let mut lines = Bytes::default();
        let mut all = |elf: &Elf, units: bool| {
            DwarfSections::load(|id: SectionId| {
                let bytes = match id {
                    SectionId::DebugInfo if !units => Bytes::default(),
                    SectionId::DebugAbbrev
                    | SectionId::DebugAddr
                    | SectionId::DebugInfo
                    | SectionId::DebugLine
                    | SectionId::DebugLineStr
                    | SectionId::DebugRanges
                    | SectionId::DebugRngLists
                    | SectionId::DebugStr
                    | SectionId::DebugStrOffsets => section(elf, id.name())?,
                    _ => Bytes::default(),
                };
                length += bytes.len();
                if id == SectionId::DebugLine && !units {
                    lines = bytes.clone();
                }
                Ok::<_, DwarfError>(bytes)
            })
        };
        let main = all(elf, false)?;
        let alt = files.alt.map(|alt| all(alt, true)).transpose()?;
        let package = files.package.map(|elf| {
            DwarfPackageSections::load(|id| {
                id.dwo_name().map_or(Ok(Bytes::default()), |name| section(elf, name))
            })
        });
        let package = package.transpose()?;
        Ok(Self {
            main,
            alt,
            package,
            lines,
            length,
            endian: match elf.endian {
                Endianness::Little => RunTimeEndian::Little,
                Endianness::Big => RunTimeEndian::Big,
            },
            code: code(elf),
        })
    }

    /// Whether units may be compiled without the rest of their section. They may not when the file
    /// is joined with others: those need whole sections.
    pub fn stand_alone(&self) -> bool {
        self.alt.is_none() && self.package.is_none()
    }

    /// Gives memory of what was read so far back: units are read from front to back.
    pub fn forget_pages(&self) {
        self.lines.forget_pages();
    }
}

/// A section, empty when there is none.
pub fn section(elf: &Elf, name: &str) -> Result<Bytes, DwarfError> {
    Ok(elf.section(name)?.unwrap_or_default())
}
