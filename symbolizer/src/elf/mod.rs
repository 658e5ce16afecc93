//! ELF files, hostile ones included: identity, segments, links to debug files, and sections on demand.
//!
//! Reads with pread into memory or unlinked temporary files, never maps a file others may cut short. Knows
//! nothing of DWARF or symbols, which is `compile/`'s. Used by `resolve/` to find files and by `compile/`.

mod relocate;
mod section;

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

use object::elf::{self, FileHeader32, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader as _, SectionHeader as _};
use object::{Endianness, FileKind, ReadCache, ReadRef};
use sha2::{Digest, Sha256};

pub use self::section::Scratch;
use crate::table::{Bytes, Segment};

/// An ELF file that cannot be used, in words for the report.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ElfError {
    /// No ELF file at all.
    #[error("not an ELF file")]
    NotElf,
    /// Its structure does not hold together.
    #[error("not a readable ELF file: {0}")]
    Broken(String),
    /// It asks for more than any real file does.
    #[error("{0}")]
    TooLarge(String),
    /// The file cannot be read.
    #[error("cannot read it: {0}")]
    Read(String),
}

impl From<std::io::Error> for ElfError {
    fn from(error: std::io::Error) -> Self {
        Self::Read(error.to_string())
    }
}

impl From<object::Error> for ElfError {
    fn from(error: object::Error) -> Self {
        Self::Broken(error.to_string())
    }
}

/// What a file says it is known by.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ids {
    /// `NT_GNU_BUILD_ID`.
    pub gnu: Option<Vec<u8>>,
    /// Go's, as `go tool buildid` prints it.
    pub go: Option<String>,
}

/// A `.gnu_debuglink`: name of the debug file and the CRC-32 of its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DebugLink {
    /// File name without directory.
    pub name: String,
    /// Checksum of the whole file.
    pub crc: u32,
}

/// A `.gnu_debugaltlink`: path and build-id of the file `dwz` moved common parts to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AltLink {
    /// Path, often relative to the file that holds the link.
    pub path: String,
    /// Build-id.
    pub build_id: Vec<u8>,
}

/// A section as its header describes it.
#[derive(Clone, Debug)]
pub struct Section {
    /// Name.
    pub name: String,
    kind: u32,
    flags: u64,
    /// Address.
    pub address: u64,
    offset: u64,
    size: u64,
    /// Number of the section it refers to.
    pub link: u32,
    /// Likewise, for one with relocations.
    info: u32,
    align: u64,
}

impl Section {
    /// Whether it holds code that is loaded.
    #[must_use]
    pub fn is_code(&self) -> bool {
        self.flags & u64::from(elf::SHF_EXECINSTR) != 0
            && self.flags & u64::from(elf::SHF_ALLOC) != 0
    }

    /// Addresses it covers.
    #[must_use]
    pub fn range(&self) -> std::ops::Range<u64> {
        self.address..self.address.saturating_add(self.size)
    }
}

/// A loadable segment.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Where in the file and at which address.
    pub segment: Segment,
    /// Executable.
    pub code: bool,
    /// First address and size in memory.
    pub memory: (u64, u64),
}

/// An ELF file in our hands: what was verified is what is read.
#[derive(Debug)]
pub struct Elf {
    file: File,
    length: u64,
    /// 64-bit.
    pub is_64: bool,
    /// Byte order.
    pub endian: Endianness,
    /// `e_machine`.
    pub machine: u16,
    /// Sections, by number.
    pub sections: Vec<Section>,
    /// Loadable segments.
    pub loads: Vec<Load>,
    /// Identity.
    pub ids: Ids,
    /// An object file, which no linker has given addresses, so that its code has those of [`Elf::open`]; `.dwo` files
    /// and those `dwz` moves common parts to are such as well.
    pub relocatable: bool,
    scratch: Scratch,
}

/// Most sections; programs built with a section a function have tens of thousands before linking.
const MAX_SECTIONS: usize = 1 << 16;
/// Most segments.
const MAX_SEGMENTS: usize = 1 << 12;
/// Most bytes of notes looked at.
const MAX_NOTES: u64 = 1 << 20;

impl Elf {
    /// Reads headers and notes. The code of object files (kernel modules are such) gets addresses, section after
    /// section, and what refers to them is adjusted when it is read.
    ///
    /// # Errors
    /// See [`ElfError`].
    pub fn open(file: File, scratch: &Scratch) -> Result<Self, ElfError> {
        let length = file.metadata()?.len();
        let cache = ReadCache::new(Positioned { file: &file, at: 0, length });
        let Headers { is_64, endian, machine, mut sections, loads, ids, relocatable } =
            match FileKind::parse(&cache) {
                Ok(FileKind::Elf64) => headers::<FileHeader64<Endianness>, _>(&cache, length)?,
                Ok(FileKind::Elf32) => headers::<FileHeader32<Endianness>, _>(&cache, length)?,
                _ => return Err(ElfError::NotElf),
            };
        drop(cache);
        if relocatable {
            relocate::place(&mut sections);
        }
        let scratch = scratch.clone();
        Ok(Self {
            file,
            length,
            is_64,
            endian,
            machine,
            sections,
            loads,
            ids,
            relocatable,
            scratch,
        })
    }

    /// Whether there is a section of this name that has content.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// The content of a section, decompressed; `None` when there is no such section or it is empty here.
    ///
    /// # Errors
    /// See [`ElfError`].
    pub fn section(&self, name: &str) -> Result<Option<Bytes>, ElfError> {
        self.find(name).map(|section| self.content(section)).transpose()
    }

    /// The content of a section, decompressed.
    ///
    /// # Errors
    /// See [`ElfError`].
    pub fn content(&self, section: &Section) -> Result<Bytes, ElfError> {
        let content = self.as_it_is(section)?;
        match self.relocations_of(section) {
            Some(relocations) => relocate::apply(self, content, relocations),
            None => Ok(content),
        }
    }

    /// The content of a section without regard to relocations.
    fn as_it_is(&self, section: &Section) -> Result<Bytes, ElfError> {
        section::read(&self.file, section, self.is_64, self.endian, &self.scratch)
    }

    /// The section that says what in this one depends on addresses.
    fn relocations_of(&self, section: &Section) -> Option<&Section> {
        // Of kernel modules alone: nothing else is loaded that no linker has seen.
        let is_module = self.relocatable && self.is_kernel();
        let is_debug = is_module && section.name.starts_with(".debug_");
        let number = is_debug.then(|| {
            self.sections.iter().position(|found| std::ptr::eq(found, section)).unwrap_or(0)
        })?;
        self.sections.iter().find(|found| {
            found.kind == elf::SHT_RELA && found.info as usize == number && found.size > 0
        })
    }

    /// Whether it is the kernel or a module of it.
    #[must_use]
    pub fn is_kernel(&self) -> bool {
        let marks = ["__ksymtab", ".gnu.linkonce.this_module"];
        self.sections.iter().any(|section| marks.contains(&section.name.as_str()))
    }

    /// Addresses of its code, from the first to behind the last, which have gaps between them.
    #[must_use]
    pub fn code_range(&self) -> Option<std::ops::Range<u64>> {
        let code = || self.sections.iter().filter(|section| section.is_code()).map(Section::range);
        Some(code().map(|range| range.start).min()?..code().map(|range| range.end).max()?)
    }

    /// The file inside this one that holds the symbols stripped from it (`.gnu_debugdata`, as Fedora has it).
    ///
    /// # Errors
    /// See [`ElfError`].
    pub fn mini_debug_info(&self) -> Result<Option<Self>, ElfError> {
        let Some(compressed) = self.section(".gnu_debugdata")? else { return Ok(None) };
        let file = section::unxz(&compressed, &self.scratch)?;
        Self::open(file, &self.scratch).map(Some)
    }

    /// The link to its debug file.
    #[must_use]
    pub fn debug_link(&self) -> Option<DebugLink> {
        let content = self.section(".gnu_debuglink").ok()??;
        let end = content.iter().position(|&byte| byte == 0)?;
        let crc = content.get((end + 4) & !3..)?.first_chunk::<4>()?;
        let crc = match self.endian {
            Endianness::Little => u32::from_le_bytes(*crc),
            Endianness::Big => u32::from_be_bytes(*crc),
        };
        let name = std::str::from_utf8(&content[..end]).ok()?;
        // A name and never a path: it is looked for in directories of ours.
        let is_name = !name.is_empty() && !name.contains('/') && name != ".." && name != ".";
        is_name.then(|| DebugLink { name: name.to_owned(), crc })
    }

    /// The link to the file with its common parts.
    #[must_use]
    pub fn alt_link(&self) -> Option<AltLink> {
        let content = self.section(".gnu_debugaltlink").ok()??;
        let end = content.iter().position(|&byte| byte == 0)?;
        let path = std::str::from_utf8(&content[..end]).ok()?.to_owned();
        let build_id = content[end + 1..].to_vec();
        (!path.is_empty() && (4..=64).contains(&build_id.len()))
            .then_some(AltLink { path, build_id })
    }

    /// What is loaded at an address, as far as it is in the file.
    ///
    /// # Errors
    /// When not all of it is.
    pub fn loaded(&self, address: u64, size: u64) -> Result<Vec<u8>, ElfError> {
        let outside = || ElfError::Broken(format!("{size} bytes at {address:#x} are not in it"));
        let segment = self.loads.iter().map(|load| load.segment).find(|segment| {
            let inside = address.checked_sub(segment.address);
            inside
                .and_then(|inside| inside.checked_add(size))
                .is_some_and(|end| end <= segment.size)
        });
        let segment = segment.ok_or_else(outside)?;
        let offset = segment.offset.checked_add(address - segment.address).ok_or_else(outside)?;
        if offset.checked_add(size).is_none_or(|end| end > self.length) {
            return Err(outside());
        }
        let mut bytes = vec![0; usize::try_from(size).map_err(|_size| outside())?];
        self.file.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }

    /// Whether its code was left out, as in a debug file: its program headers then say nothing of offsets.
    #[must_use]
    pub fn is_without_code(&self) -> bool {
        let mut code = self.sections.iter().filter(|section| section.is_code()).peekable();
        code.peek().is_some() && code.all(|section| section.kind == elf::SHT_NOBITS)
    }

    /// SHA-256 of the whole file.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn sha256(&self) -> Result<[u8; 32], ElfError> {
        let mut hasher = Sha256::new();
        let mut reader = Positioned { file: &self.file, at: 0, length: self.length };
        io::copy(&mut reader, &mut hasher)?;
        Ok(hasher.finalize().into())
    }

    /// CRC-32 of the whole file, as `.gnu_debuglink` has it.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn crc(&self) -> Result<u32, ElfError> {
        let mut hasher = crc32fast::Hasher::new();
        let mut buffer = vec![0; 1 << 16];
        let mut at = 0;
        loop {
            let read = self.file.read_at(&mut buffer, at)?;
            if read == 0 {
                return Ok(hasher.finalize());
            }
            hasher.update(&buffer[..read]);
            at += read as u64;
        }
    }

    fn find(&self, name: &str) -> Option<&Section> {
        self.sections.iter().find(|section| {
            section.name == name && section.kind != elf::SHT_NOBITS && section.size > 0
        })
    }
}

/// A file read from a position of its own: descriptors that were duplicated share one.
struct Positioned<'a> {
    file: &'a File,
    at: u64,
    length: u64,
}

impl Read for Positioned<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(into, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

impl Seek for Positioned<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let (from, offset) = match to {
            SeekFrom::Start(at) => (at, 0),
            SeekFrom::Current(offset) => (self.at, offset),
            SeekFrom::End(offset) => (self.length, offset),
        };
        let at = from.checked_add_signed(offset);
        self.at = at.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(self.at)
    }
}

struct Headers {
    is_64: bool,
    endian: Endianness,
    machine: u16,
    sections: Vec<Section>,
    loads: Vec<Load>,
    ids: Ids,
    relocatable: bool,
}

fn headers<'a, E, R>(data: R, length: u64) -> Result<Headers, ElfError>
where
    E: FileHeader<Endian = Endianness>,
    R: ReadRef<'a>,
{
    let header = E::parse(data)?;
    let endian = header.endian()?;
    let relocatable = header.e_type(endian) == elf::ET_REL;
    // Before the tables are read: the counts may be of 32 bits.
    let (sections, segments) = (header.shnum(endian, data)?, header.phnum(endian, data)?);
    if sections > MAX_SECTIONS {
        return Err(ElfError::TooLarge(format!("it declares {sections} sections")));
    }
    if segments > MAX_SEGMENTS {
        return Err(ElfError::TooLarge(format!("it declares {segments} segments")));
    }
    let mut notes_left = MAX_NOTES;
    let table = header.sections(endian, data)?;
    let mut sections = Vec::with_capacity(table.len());
    let mut ids = Ids::default();
    for section in table.iter() {
        let name = table.section_name(endian, section).unwrap_or_default();
        if let Some((offset, size)) = section.file_range(endian)
            && offset.checked_add(size).is_none_or(|end| end > length)
        {
            return Err(ElfError::Broken("a section of it lies outside the file".to_owned()));
        }
        if section.sh_type(endian) == elf::SHT_NOTE
            && let Some(left) = notes_left.checked_sub(section.sh_size(endian).into())
            && let Ok(Some(mut notes)) = section.notes(endian, data)
        {
            notes_left = left;
            while let Ok(Some(note)) = notes.next() {
                ids.take(note.name(), note.n_type(endian), note.desc());
            }
        }
        sections.push(Section {
            name: String::from_utf8_lossy(name).into_owned(),
            kind: section.sh_type(endian),
            flags: section.sh_flags(endian).into(),
            address: section.sh_addr(endian).into(),
            offset: section.sh_offset(endian).into(),
            size: section.sh_size(endian).into(),
            link: section.sh_link(endian),
            info: section.sh_info(endian),
            align: section.sh_addralign(endian).into(),
        });
    }
    let segments = header.program_headers(endian, data)?;
    let mut loads = Vec::new();
    for segment in segments {
        let segment_of_file = Segment {
            offset: segment.p_offset(endian).into(),
            address: segment.p_vaddr(endian).into(),
            size: segment.p_filesz(endian).into(),
        };
        match segment.p_type(endian) {
            elf::PT_LOAD => loads.push(Load {
                segment: segment_of_file,
                code: segment.p_flags(endian) & elf::PF_X != 0,
                memory: (segment_of_file.address, segment.p_memsz(endian).into()),
            }),
            // Files without section headers still say who they are.
            elf::PT_NOTE if ids == Ids::default() && segment_of_file.size <= notes_left => {
                notes_left -= segment_of_file.size;
                if let Ok(Some(mut notes)) = segment.notes(endian, data) {
                    while let Ok(Some(note)) = notes.next() {
                        ids.take(note.name(), note.n_type(endian), note.desc());
                    }
                }
            }
            _ => {}
        }
    }
    let (is_64, machine) = (header.is_class_64(), header.e_machine(endian));
    Ok(Headers { is_64, endian, machine, sections, loads, ids, relocatable })
}

/// Type of Go's build-id note, of cmd/internal/buildid.
const NT_GO_BUILD_ID: u32 = 4;

impl Ids {
    fn take(&mut self, owner: &[u8], kind: u32, content: &[u8]) {
        match (owner, kind) {
            (elf::ELF_NOTE_GNU, elf::NT_GNU_BUILD_ID) if (4..=64).contains(&content.len()) => {
                self.gnu.get_or_insert_with(|| content.to_vec());
            }
            (b"Go", NT_GO_BUILD_ID) => {
                let text = String::from_utf8_lossy(content).into_owned();
                self.go.get_or_insert(text);
            }
            _ => {}
        }
    }
}
