//! What the headers and notes of an ELF file say: machine, segments, sections, ids. Reads no
//! section's content but notes.
//!
//! Reads with pread and within limits; a file is refused where nothing of it can be used, or where
//! its reader wants it whole ([`Headers::check_all`]).

use std::fs::File;
use std::ops::Range;

use object::elf::{self, FileHeader32, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader as _, SectionHeader as _};
use object::{Endianness, FileKind, ReadCache, ReadRef};

use stackwire_model::{FileOffset, VirtAddr};

use crate::ElfError;
use crate::notes::{Ids, take_all};
use crate::positioned::Positioned;

/// Most sections; programs built with a section a function have tens of thousands before linking.
const MAX_SECTIONS: usize = 1 << 16;
/// Most segments.
const MAX_SEGMENTS: usize = 1 << 12;
/// Most bytes of notes looked at.
const MAX_NOTES: u64 = 1 << 20;

/// A part of the file, and the address it is loaded at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First offset in the file.
    pub offset: FileOffset,
    /// First address.
    pub address: VirtAddr,
    /// Bytes in the file.
    pub size: u64,
}

impl Segment {
    /// Where an address of it is in the file.
    #[must_use]
    pub fn offset_of(&self, address: VirtAddr) -> Option<FileOffset> {
        self.offset.checked_add(self.inside(address)?)
    }

    /// How far into it an address is.
    #[must_use]
    pub fn inside(&self, address: VirtAddr) -> Option<u64> {
        address.since(self.address).filter(|inside| *inside < self.size)
    }
}

/// A loadable segment.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Where in the file and at which address.
    pub segment: Segment,
    /// Executable.
    pub code: bool,
    /// Bytes in memory.
    pub memory_size: u64,
}

/// A section as its header describes it.
#[derive(Clone, Debug)]
pub struct Section {
    /// Name.
    pub name: String,
    /// `sh_type`.
    pub kind: u32,
    /// `sh_flags`.
    pub flags: u64,
    /// Address.
    pub address: VirtAddr,
    /// Where in the file.
    pub offset: FileOffset,
    /// Bytes, in the file and, unless it is compressed, in memory.
    pub size: u64,
    /// Number of the section it refers to.
    pub link: u32,
    /// Likewise, for one with relocations.
    pub info: u32,
    /// Power of two its address is a multiple of.
    pub align: u64,
}

impl Section {
    /// Whether it holds code that is loaded.
    #[must_use]
    pub fn is_code(&self) -> bool {
        self.flags & u64::from(elf::SHF_EXECINSTR) != 0
            && self.flags & u64::from(elf::SHF_ALLOC) != 0
    }

    /// Whether the file has something of it.
    #[must_use]
    pub fn has_content(&self) -> bool {
        self.kind != elf::SHT_NOBITS && self.size > 0
    }

    /// Whether it is compressed in the file.
    #[must_use]
    pub fn is_compressed(&self) -> bool {
        self.flags & u64::from(elf::SHF_COMPRESSED) != 0
    }

    /// Addresses it covers.
    #[must_use]
    pub fn range(&self) -> Range<VirtAddr> {
        self.address..self.address.saturating_add(self.size)
    }
}

/// The headers of an ELF file.
#[derive(Debug)]
pub struct Headers {
    /// 64-bit.
    pub is_64: bool,
    /// Byte order.
    pub endian: Endianness,
    /// `e_machine`.
    pub machine: u16,
    /// Address of its first instruction.
    pub entry: VirtAddr,
    /// An object file, which no linker has given addresses.
    pub relocatable: bool,
    /// Bytes of the file.
    pub length: u64,
    /// Sections, by number.
    pub sections: Vec<Section>,
    /// Loadable segments.
    pub loads: Vec<Load>,
    /// The index of `.eh_frame`, which is there without section headers, too (`PT_GNU_EH_FRAME`).
    pub eh_frame_index: Option<Segment>,
    /// Identity.
    pub ids: Ids,
}

impl Headers {
    /// Reads them.
    ///
    /// # Errors
    /// When it is no ELF file, declares more than any real one, or its tables of headers cannot be
    /// read.
    pub fn read(file: &File) -> Result<Self, ElfError> {
        let length = file.metadata()?.len();
        let cache = ReadCache::new(Positioned::new(file, length));
        match FileKind::parse(&cache) {
            Ok(FileKind::Elf64) => read::<FileHeader64<Endianness>, _>(&cache, length),
            Ok(FileKind::Elf32) => read::<FileHeader32<Endianness>, _>(&cache, length),
            _ => Err(ElfError::NotElf),
        }
    }

    /// A section of this name that has content.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&Section> {
        self.sections.iter().find(|section| section.name == name && section.has_content())
    }

    /// Whether there is a section of this name that has content.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// Where an address is in the file.
    #[must_use]
    pub fn offset_of(&self, address: VirtAddr) -> Option<FileOffset> {
        self.loads.iter().find_map(|load| {
            let inside = load.segment.inside(address)?;
            load.segment.offset.checked_add(inside)
        })
    }

    /// Whether a section lies in the file.
    ///
    /// # Errors
    /// [`ElfError::OutsideFile`] when it does not.
    pub fn check(&self, section: &Section) -> Result<(), ElfError> {
        let end = section.offset.checked_add(section.size);
        if end.is_some_and(|end| end.0 <= self.length) {
            return Ok(());
        }
        Err(ElfError::OutsideFile {
            name: section.name.clone(),
            size: section.size,
            offset: section.offset,
            length: self.length,
        })
    }

    /// Whether all of its sections lie in the file. The headers of a file that was cut short still
    /// describe sections that it no longer has.
    ///
    /// # Errors
    /// [`ElfError::OutsideFile`] with the first that does not.
    pub fn check_all(&self) -> Result<(), ElfError> {
        // The size of section 0 is the number of sections where there are very many.
        let has_bytes = |section: &&Section| section.has_content() && section.kind != elf::SHT_NULL;
        self.sections.iter().filter(has_bytes).try_for_each(|section| self.check(section))
    }

    /// Whether it is the kernel or a module of it.
    #[must_use]
    pub fn is_kernel(&self) -> bool {
        let marks = ["__ksymtab", ".gnu.linkonce.this_module"];
        self.sections.iter().any(|section| marks.contains(&section.name.as_str()))
    }

    /// Addresses of its code, from the first to behind the last, which have gaps between them.
    #[must_use]
    pub fn code_range(&self) -> Option<Range<VirtAddr>> {
        let code = || self.sections.iter().filter(|section| section.is_code()).map(Section::range);
        Some(code().map(|range| range.start).min()?..code().map(|range| range.end).max()?)
    }

    /// Whether its code was left out, as in a debug file: its program headers then say nothing of
    /// offsets.
    #[must_use]
    pub fn is_without_code(&self) -> bool {
        let mut code = self.sections.iter().filter(|section| section.is_code()).peekable();
        code.peek().is_some() && code.all(|section| section.kind == elf::SHT_NOBITS)
    }
}

fn read<'a, E, R>(data: R, length: u64) -> Result<Headers, ElfError>
where
    E: FileHeader<Endian = Endianness>,
    R: ReadRef<'a>,
{
    let header = E::parse(data)?;
    let endian = header.endian()?;
    // Before the tables are read: the counts may be of 32 bits.
    let (sections, segments) = (header.shnum(endian, data)?, header.phnum(endian, data)?);
    if sections > MAX_SECTIONS {
        return Err(ElfError::TooManySections(sections));
    }
    if segments > MAX_SEGMENTS {
        return Err(ElfError::TooManySegments(segments));
    }
    let mut headers = Headers {
        is_64: header.is_class_64(),
        endian,
        machine: header.e_machine(endian),
        entry: VirtAddr(header.e_entry(endian).into()),
        relocatable: header.e_type(endian) == elf::ET_REL,
        length,
        sections: Vec::new(),
        loads: Vec::new(),
        eh_frame_index: None,
        ids: Ids::default(),
    };
    let mut notes_left = MAX_NOTES;
    let table = header.sections(endian, data)?;
    for section in table.iter() {
        let name = table.section_name(endian, section).unwrap_or_default();
        if section.sh_type(endian) == elf::SHT_NOTE
            && let Some(left) = notes_left.checked_sub(section.sh_size(endian).into())
            && let Ok(Some(notes)) = section.notes(endian, data)
        {
            notes_left = left;
            take_all(&mut headers.ids, endian, notes);
        }
        headers.sections.push(Section {
            name: String::from_utf8_lossy(name).into_owned(),
            kind: section.sh_type(endian),
            flags: section.sh_flags(endian).into(),
            address: VirtAddr(section.sh_addr(endian).into()),
            offset: FileOffset(section.sh_offset(endian).into()),
            size: section.sh_size(endian).into(),
            link: section.sh_link(endian),
            info: section.sh_info(endian),
            align: section.sh_addralign(endian).into(),
        });
    }
    for header in header.program_headers(endian, data)? {
        let segment = Segment {
            offset: FileOffset(header.p_offset(endian).into()),
            address: VirtAddr(header.p_vaddr(endian).into()),
            size: header.p_filesz(endian).into(),
        };
        match header.p_type(endian) {
            elf::PT_LOAD => headers.loads.push(Load {
                segment,
                code: header.p_flags(endian) & elf::PF_X != 0,
                memory_size: header.p_memsz(endian).into(),
            }),
            elf::PT_GNU_EH_FRAME => {
                headers.eh_frame_index.get_or_insert(segment);
            }
            // Files without section headers still say who they are.
            elf::PT_NOTE if headers.ids.gnu.is_none() && segment.size <= notes_left => {
                notes_left -= segment.size;
                if let Ok(Some(notes)) = header.notes(endian, data) {
                    take_all(&mut headers.ids, endian, notes);
                }
            }
            _ => {}
        }
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_section_behind_the_end_of_the_file_is_found() {
        let mut bytes = std::fs::read("/proc/self/exe").unwrap();
        let read = |bytes: &[u8]| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(bytes).unwrap();
            Headers::read(&file).unwrap()
        };
        let whole = read(&bytes);
        whole.check_all().unwrap();
        let text = whole.sections.iter().position(|section| section.name == ".text").unwrap();
        // e_shoff of the ELF header; sh_size of a section header of 64 bytes.
        let table = u64::from_le_bytes(*bytes[0x28..].first_chunk().unwrap()) as usize;
        let size = table + text * 64 + 0x20;
        bytes[size..size + 8].copy_from_slice(&(1u64 << 40).to_le_bytes());
        let found = read(&bytes).check_all();
        assert!(matches!(found, Err(ElfError::OutsideFile { name, .. }) if name == ".text"));
    }
}
