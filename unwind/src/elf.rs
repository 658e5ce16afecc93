//! What the compiler needs of an ELF file: sections by name, and where addresses are in the file. Reads with pread.

use std::fs::File;
use std::os::unix::fs::FileExt;

use gimli::{BaseAddresses, EhFrameHdr, Pointer};
use object::elf::{self, FileHeader64, ProgramHeader64};
use object::read::ReadCache;
use object::read::elf::{FileHeader, ProgramHeader as _, SectionHeader as _};
use object::{LittleEndian, ReadRef};

use crate::compile::CompileError;
use crate::table::MAX_BUILD_ID;

/// Largest section read: that of a browser with all its symbols has 60 MB.
const MAX_SECTION: u64 = 256 << 20;

/// A 64-bit little-endian x86-64 file.
#[derive(Debug)]
pub struct Elf<'f> {
    file: &'f File,
    sections: Vec<Section>,
    /// Loadable segments: address, bytes in the file, offset.
    loads: Vec<(u64, u64, u64)>,
    /// GNU build-id, empty when it has none.
    pub build_id: Vec<u8>,
    /// Address of its first instruction.
    pub entry: u64,
}

/// A section of it.
#[derive(Debug)]
pub struct Section {
    name: String,
    /// Address.
    pub address: u64,
    offset: u64,
    /// Bytes.
    pub size: u64,
    is_compressed: bool,
}

/// Address, bytes in the file, offset.
type Place = (u64, u64, u64);

/// `.eh_frame` as its index says where it begins (`.eh_frame_hdr`, Linux Standard Base Core 10.6.2); it may reach to the end of
/// its segment, and has an end of its own.
fn eh_frame(file: &File, (address, size, offset): Place, loads: &[Place]) -> Option<Section> {
    let mut index = vec![0; usize::try_from(size.min(MAX_INDEX_HEAD)).ok()?];
    file.read_exact_at(&mut index, offset).ok()?;
    let bases = BaseAddresses::default().set_eh_frame_hdr(address);
    let parsed = EhFrameHdr::new(&index, gimli::LittleEndian).parse(&bases, 8).ok()?;
    let Pointer::Direct(address) = parsed.eh_frame_ptr() else { return None };
    loads.iter().find_map(|&(start, bytes, offset)| {
        let inside = address.checked_sub(start).filter(|&inside| inside < bytes)?;
        Some(Section {
            name: ".eh_frame".to_owned(),
            address,
            offset: offset.checked_add(inside)?,
            size: bytes - inside,
            is_compressed: false,
        })
    })
}

/// Where it begins stands before its table.
const MAX_INDEX_HEAD: u64 = 64;

impl<'f> Elf<'f> {
    /// Reads the headers.
    ///
    /// # Errors
    /// When it is none, or not of this machine.
    pub fn open(file: &'f File) -> Result<Self, CompileError> {
        let cache = ReadCache::new(file);
        let ident: &[u8] =
            ReadRef::read_bytes_at(&cache, 0, 5).map_err(|()| CompileError::NotElf)?;
        if ident[..4] != elf::ELFMAG {
            return Err(CompileError::NotElf);
        }
        if ident[4] != elf::ELFCLASS64 {
            return Err(CompileError::Foreign);
        }
        let header = FileHeader64::<LittleEndian>::parse(&cache).map_err(CompileError::broken)?;
        let endian = header.endian().map_err(|_cause| CompileError::Foreign)?;
        if header.e_machine(endian) != elf::EM_X86_64 {
            return Err(CompileError::Foreign);
        }
        let segments = header.program_headers(endian, &cache).map_err(CompileError::broken)?;
        let loads = segments.iter().filter(|segment| segment.p_type(endian) == elf::PT_LOAD);
        let place = |segment: &ProgramHeader64<LittleEndian>| {
            (segment.p_vaddr(endian), segment.p_filesz(endian), segment.p_offset(endian))
        };
        let loads: Vec<_> = loads.map(place).collect();
        let table = header.sections(endian, &cache).map_err(CompileError::broken)?;
        let sections = table.iter().filter(|section| section.sh_type(endian) != elf::SHT_NOBITS);
        let sections = sections.filter_map(|section| {
            let name = table.section_name(endian, section).ok()?;
            Some(Section {
                name: String::from_utf8_lossy(name).into_owned(),
                address: section.sh_addr(endian),
                offset: section.sh_offset(endian),
                size: section.sh_size(endian),
                is_compressed: section.sh_flags(endian) & u64::from(elf::SHF_COMPRESSED) != 0,
            })
        });
        let mut sections: Vec<Section> = sections.collect();
        // Section headers may be stripped. What the loader needs stays, and leads to the call frame information.
        if !sections.iter().any(|section| section.name == ".eh_frame") {
            let index = segments.iter().find(|it| it.p_type(endian) == elf::PT_GNU_EH_FRAME);
            sections.extend(index.and_then(|index| eh_frame(file, place(index), &loads)));
        }
        let notes = segments.iter().filter_map(|segment| segment.notes(endian, &cache).ok()?);
        let build_id = notes
            .filter_map(|mut notes| {
                while let Ok(Some(note)) = notes.next() {
                    if note.n_type(endian) == elf::NT_GNU_BUILD_ID && note.name() == b"GNU" {
                        return Some(note.desc().to_vec());
                    }
                }
                None
            })
            .find(|id| id.len() <= MAX_BUILD_ID as usize);
        let entry = header.e_entry(endian);
        Ok(Self { file, sections, loads, build_id: build_id.unwrap_or_default(), entry })
    }

    /// A section by name.
    #[must_use]
    pub fn section(&self, name: &str) -> Option<&Section> {
        self.sections.iter().find(|section| section.name == name)
    }

    /// Whether an address is in a linkage table, of jumps to other files.
    #[must_use]
    pub fn is_linkage_table(&self, address: u64) -> bool {
        let inside = |section: &&Section| address.wrapping_sub(section.address) < section.size;
        let mut sections = self.sections.iter().filter(inside);
        sections.any(|section| section.name.starts_with(".plt") || section.name == ".iplt")
    }

    /// Content of a section.
    ///
    /// # Errors
    /// When the file is too short for it, or it is too large.
    pub fn content(&self, section: &Section) -> Result<Vec<u8>, CompileError> {
        if section.is_compressed {
            return Err(CompileError::Broken(format!("its {} is compressed", section.name)));
        }
        let length = self.file.metadata().map_err(CompileError::broken)?.len();
        let fits = section.offset.checked_add(section.size).is_some_and(|end| end <= length);
        if !fits || section.size > MAX_SECTION {
            return Err(CompileError::Broken(format!(
                "its {} has {} bytes at {}, the file {length}",
                section.name, section.size, section.offset
            )));
        }
        let mut content = vec![0; section.size as usize];
        self.file.read_exact_at(&mut content, section.offset).map_err(CompileError::broken)?;
        Ok(content)
    }

    /// What is at an address.
    #[must_use]
    pub fn code(&self, address: u64, length: u64) -> Option<Vec<u8>> {
        let mut content = vec![0; usize::try_from(length.min(MAX_SECTION)).ok()?];
        self.file.read_exact_at(&mut content, self.offset(address)?).ok()?;
        Some(content)
    }

    /// Words of 8 bytes from an address on, as they are once the program is loaded: of position-independent ones in relocations.
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

    /// Whether the file has these bytes at an offset.
    #[must_use]
    pub fn has_at(&self, offset: u64, bytes: &[u8]) -> bool {
        let mut found = vec![0; bytes.len()];
        self.file.read_exact_at(&mut found, offset).is_ok() && found == bytes
    }

    /// What is at an address and after it in the same segment, at most so many bytes.
    #[must_use]
    pub fn code_until(&self, address: u64, length: u64) -> Vec<u8> {
        let inside = self.loads.iter().find_map(|&(start, size, _)| {
            let inside = address.checked_sub(start).filter(|&inside| inside < size)?;
            Some(size - inside)
        });
        self.code(address, length.min(inside.unwrap_or(0))).unwrap_or_default()
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

    /// Where an address is in the file.
    #[must_use]
    pub fn offset(&self, address: u64) -> Option<u64> {
        self.loads.iter().find_map(|&(start, size, offset)| {
            let inside = address.checked_sub(start).filter(|&inside| inside < size)?;
            offset.checked_add(inside)
        })
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::io::Write;

    use super::*;

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
        // Code that has none is found by section headers: entries of a PLT, and what GCC adds (`startup.rs`).
        let differ = |at: &u64| rules.rule(*at).is_some() && rules.rule(*at) != same.rule(*at);
        let text = whole.section(".text").unwrap();
        let places = (text.offset..text.offset + text.size).step_by(97);
        assert!(places.clone().filter(|at| rules.rule(*at).is_some()).count() > 1000);
        assert!(places.clone().filter(differ).all(|at| same.rule(at).is_none()));
        assert!(places.filter(differ).count() < 5);
    }
}
