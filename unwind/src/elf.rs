//! What the compiler needs of an ELF file: sections by name, and what is at an address. Reads with
//! pread.

use std::fs::File;
use std::os::unix::fs::FileExt;

use gimli::{BaseAddresses, EhFrameHdr, Pointer};
use object::{Endianness, elf};
use stackwire_elf::{ElfError, Exports, Headers, Section, Segment};
use stackwire_model::{BuildId, Machine, VirtAddr};

use crate::error::CompileError;
use crate::table::MACHINE;

/// Largest section read: that of a browser with all its symbols has 60 MB.
const MAX_SECTION: u64 = 256 << 20;
/// Where `.eh_frame` begins stands before the table of its index.
const MAX_INDEX_HEAD: u64 = 64;

/// A 64-bit little-endian x86-64 file.
#[derive(Debug)]
pub struct Elf<'f> {
    file: &'f File,
    headers: Headers,
    /// `.eh_frame`, found by its index where section headers are stripped: what the loader needs
    /// stays.
    eh_frame: Option<Section>,
}

/// `.eh_frame` as its index says where it begins (`.eh_frame_hdr`, Linux Standard Base Core
/// 10.6.2); it may reach to the end of its segment, and has an end of its own.
fn eh_frame(file: &File, headers: &Headers) -> Option<Section> {
    let Segment { address, size, offset } = headers.eh_frame_index?;
    let mut index = vec![0; usize::try_from(size.min(MAX_INDEX_HEAD)).ok()?];
    file.read_exact_at(&mut index, offset.0).ok()?;
    let bases = BaseAddresses::default().set_eh_frame_hdr(address.0);
    let parsed = EhFrameHdr::new(&index, gimli::LittleEndian).parse(&bases, 8).ok()?;
    let Pointer::Direct(address) = parsed.eh_frame_ptr() else { return None };
    let address = VirtAddr(address);
    headers.loads.iter().find_map(|load| {
        let inside = load.segment.inside(address)?;
        Some(Section {
            name: ".eh_frame".to_owned(),
            kind: elf::SHT_PROGBITS,
            flags: elf::SHF_ALLOC.into(),
            address,
            offset: load.segment.offset.checked_add(inside)?,
            size: load.segment.size - inside,
            link: 0,
            info: 0,
            align: 8,
        })
    })
}

impl<'f> Elf<'f> {
    /// Reads the headers.
    ///
    /// # Errors
    /// When it is none, or not of this machine.
    pub fn open(file: &'f File) -> Result<Self, CompileError> {
        let headers = Headers::read(file)?;
        let is_known = headers.is_64 && headers.endian == Endianness::Little;
        match Machine::of_elf(headers.machine).filter(|_| is_known) {
            Some(MACHINE) => {}
            Some(other) => return Err(CompileError::Foreign(other)),
            None => return Err(CompileError::Unknown),
        }
        let eh_frame = if headers.has(".eh_frame") { None } else { eh_frame(file, &headers) };
        Ok(Self { file, headers, eh_frame })
    }

    /// What it exports; none where that cannot be read.
    #[must_use]
    pub fn exports(&self) -> Option<Exports<'f>> {
        Exports::read(self.file).ok()
    }

    /// GNU build-id, if it has one.
    #[must_use]
    pub fn build_id(&self) -> Option<BuildId> {
        self.headers.ids.gnu
    }

    /// Address of its first instruction.
    #[must_use]
    pub fn entry(&self) -> u64 {
        self.headers.entry.0
    }

    /// A section by name that has content.
    #[must_use]
    pub fn section(&self, name: &str) -> Option<&Section> {
        let found_by_index = self.eh_frame.as_ref().filter(|section| section.name == name);
        found_by_index.or_else(|| self.headers.find(name))
    }

    /// Whether an address is in a linkage table, of jumps to other files.
    #[must_use]
    pub fn is_linkage_table(&self, address: u64) -> bool {
        let inside = |section: &&Section| address.wrapping_sub(section.address.0) < section.size;
        let mut sections = self.headers.sections.iter().filter(inside);
        sections.any(|section| section.name.starts_with(".plt") || section.name == ".iplt")
    }

    /// Content of a section.
    ///
    /// # Errors
    /// When the file is too short for it, or it is too large.
    pub fn content(&self, section: &Section) -> Result<Vec<u8>, CompileError> {
        if section.is_compressed() {
            return Err(CompileError::Compressed(section.name.clone()));
        }
        self.headers.check(section)?;
        if section.size > MAX_SECTION {
            let (name, size) = (section.name.clone(), section.size);
            return Err(ElfError::SectionTooLarge { name, size }.into());
        }
        let mut content = vec![0; section.size as usize];
        self.file.read_exact_at(&mut content, section.offset.0).map_err(ElfError::from)?;
        Ok(content)
    }

    /// What is at an address.
    #[must_use]
    pub fn code(&self, address: u64, length: u64) -> Option<Vec<u8>> {
        let mut content = vec![0; usize::try_from(length.min(MAX_SECTION)).ok()?];
        self.file.read_exact_at(&mut content, self.offset(address)?).ok()?;
        Some(content)
    }

    /// Words of 8 bytes from an address on, as they are once the program is loaded: of
    /// position-independent ones in relocations.
    #[must_use]
    pub fn words(&self, address: u64, count: usize) -> Option<Vec<u64>> {
        let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
        let content = self.code(address, 8 * count as u64)?;
        let mut words: Vec<u64> = content.chunks_exact(8).map(word).collect();
        let relocations = self.section(".rela.dyn").and_then(|section| self.content(section).ok());
        for one in relocations.as_deref().unwrap_or_default().chunks_exact(24) {
            let inside = word(&one[..8]).wrapping_sub(address);
            if word(&one[8..16]) == u64::from(elf::R_X86_64_RELATIVE)
                && inside.is_multiple_of(8)
                && let Some(changed) = words.get_mut((inside / 8) as usize)
            {
                *changed = word(&one[16..]);
            }
        }
        Some(words)
    }

    /// Bytes of the storage that each thread has of this file.
    #[must_use]
    pub fn thread_storage(&self) -> u64 {
        let is_it = |section: &&Section| section.flags & u64::from(elf::SHF_TLS) != 0;
        let ranges = || self.headers.sections.iter().filter(is_it).map(Section::range);
        let (start, end) = (ranges().map(|it| it.start).min(), ranges().map(|it| it.end).max());
        start.zip(end).map_or(0, |(start, end)| end.0 - start.0)
    }

    /// Whether the file has these bytes at an offset.
    #[must_use]
    pub fn has_at(&self, offset: u64, bytes: &[u8]) -> bool {
        let mut found = vec![0; bytes.len()];
        self.file.read_exact_at(&mut found, offset).is_ok() && found == bytes
    }

    /// What is at an address and after it in the same segment, at most so many bytes.
    #[must_use]
    pub fn code_until(&self, address: u64, length: u64) -> Vec<u8> {
        let left = self
            .headers
            .loads
            .iter()
            .find_map(|load| Some(load.segment.size - load.segment.inside(VirtAddr(address))?));
        self.code(address, length.min(left.unwrap_or(0))).unwrap_or_default()
    }

    /// Address of a function, by its name as symbols have it.
    #[must_use]
    pub fn function(&self, name: &str) -> Option<u64> {
        let find = |symbols: &str, names: &str| {
            let symbols = self.content(self.section(symbols)?).ok()?;
            let names = self.content(self.section(names)?).ok()?;
            let is_it = |symbol: &&[u8]| {
                let at = u32::from_le_bytes([symbol[0], symbol[1], symbol[2], symbol[3]]) as usize;
                let rest = names.get(at..).and_then(|rest| rest.strip_prefix(name.as_bytes()));
                symbol[4] & 0xf == elf::STT_FUNC
                    && rest.is_some_and(|rest| rest.first() == Some(&0))
            };
            let symbol = symbols.chunks_exact(24).find(is_it)?;
            Some(u64::from_le_bytes(symbol[8..16].try_into().ok()?))
        };
        find(".dynsym", ".dynstr").or_else(|| find(".symtab", ".strtab"))
    }

    /// Where the first byte of the file would be if all of it were loaded as its code is; none
    /// where its code is loaded in more than one way.
    #[must_use]
    pub fn origin(&self) -> Option<u64> {
        let code = self.headers.loads.iter().filter(|load| load.code);
        let mut origins =
            code.map(|load| load.segment.address.0.wrapping_sub(load.segment.offset.0));
        let first = origins.next()?;
        origins.all(|origin| origin == first).then_some(first)
    }

    /// Where an address is in the file.
    #[must_use]
    pub fn offset(&self, address: u64) -> Option<u64> {
        self.headers.offset_of(VirtAddr(address)).map(|offset| offset.0)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use stackwire_model::FileOffset;

    #[test]
    fn a_program_of_another_machine_has_a_reason_and_no_table() {
        let bytes = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let of_machine = |number: u16| {
            let mut other = bytes.clone();
            other[18..20].copy_from_slice(&number.to_le_bytes());
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&other).unwrap();
            crate::compile(&file).unwrap_err().to_string()
        };
        let said = of_machine(Machine::Aarch64.elf());
        assert_eq!(said, "a program for aarch64, and the rules are those of x86_64");
        assert_eq!(of_machine(3), "not a 64-bit x86_64 program");
    }

    #[test]
    fn call_frame_information_is_found_without_section_headers() {
        let path = std::env::current_exe().unwrap();
        let whole = File::open(&path).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        // e_shoff; e_shentsize, e_shnum, e_shstrndx.
        bytes[0x28..0x30].fill(0);
        bytes[0x3a..0x40].fill(0);
        let mut stripped = tempfile::tempfile().unwrap();
        stripped.write_all(&bytes).unwrap();
        let [whole, stripped] = [&whole, &stripped].map(|file| Elf::open(file).unwrap());
        assert!(stripped.section(".text").is_none());
        let [one, other] = [&whole, &stripped].map(|elf| elf.section(".eh_frame").unwrap());
        assert_eq!((one.address, one.offset), (other.address, other.offset));
        assert!(other.size >= one.size);
        let [rules, same] = [&whole, &stripped].map(|elf| crate::compile(elf.file).unwrap());
        // Code that has none is found by section headers: entries of a PLT, and what GCC adds
        // (`startup.rs`).
        let at = |table: &crate::Table, at| table.rule(FileOffset(at)).copied();
        let differ = |it: &u64| at(&rules, *it).is_some() && at(&rules, *it) != at(&same, *it);
        let text = whole.section(".text").unwrap();
        let places = (text.offset.0..text.offset.0 + text.size).step_by(97);
        assert!(places.clone().filter(|it| at(&rules, *it).is_some()).count() > 1000);
        assert!(places.clone().filter(differ).all(|it| at(&same, it).is_none()));
        assert!(places.filter(differ).count() < 5);
    }
}
