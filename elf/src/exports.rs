//! What an ELF file exports: functions and data by name, and where they are in the file.
//!
//! Reads the dynamic symbols of 64-bit files. Called by the collector's compiler, for interpreters:
//! those whose frames are walked, and those that are asked to name their functions.

use std::fs::File;
use std::os::unix::fs::FileExt;

use object::Endianness;
use object::elf::{self, Sym64};
use object::pod::slice_from_all_bytes;
use object::read::elf::Sym as _;
use stackwire_model::{FileOffset, VirtAddr};

use crate::{ElfError, Headers, Section};

/// Most bytes of a table of symbols, and of their names; libLLVM, of 40,000 symbols, has 3 MiB.
const MAX_TABLE: u64 = 64 << 20;
/// Most bytes of code that are searched in all; a C library has 2 MiB.
const MAX_CODE: u64 = 64 << 20;

/// Something that is exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// Where it is in the file.
    pub offset: FileOffset,
    /// Its address, before the file is loaded somewhere.
    pub address: VirtAddr,
    /// Bytes.
    pub size: u64,
}

/// Dynamic symbols of a file.
#[derive(Debug)]
pub struct Exports<'f> {
    file: &'f File,
    headers: Headers,
    symbols: Vec<u8>,
    names: Vec<u8>,
}

impl<'f> Exports<'f> {
    /// Reads them.
    ///
    /// # Errors
    /// Those of [`Headers::read`], and [`ElfError::SectionTooLarge`].
    pub fn read(file: &'f File) -> Result<Self, ElfError> {
        let headers = Headers::read(file)?;
        let is_table = |section: &&Section| section.kind == elf::SHT_DYNSYM;
        let table = headers.sections.iter().find(is_table).filter(|_| headers.is_64);
        let names = table.and_then(|table| headers.sections.get(table.link as usize));
        let (symbols, names) = match table.zip(names) {
            Some((table, names)) => {
                (content(file, &headers, table)?, content(file, &headers, names)?)
            }
            None => (Vec::new(), Vec::new()),
        };
        Ok(Self { file, headers, symbols, names })
    }

    /// Address and bytes of the one with this name, which need not be in the file: what is zero at
    /// first is not.
    #[must_use]
    pub fn symbol(&self, name: &str) -> Option<(VirtAddr, u64)> {
        let endian = self.headers.endian;
        let symbols = slice_from_all_bytes::<Sym64<Endianness>>(&self.symbols).ok()?;
        let is_it = |symbol: &&Sym64<Endianness>| {
            symbol.st_shndx(endian) != elf::SHN_UNDEF
                && self.names.get(symbol.st_name(endian) as usize..).is_some_and(|rest| {
                    rest.strip_prefix(name.as_bytes()).is_some_and(|end| end.first() == Some(&0))
                })
        };
        let symbol = symbols.iter().find(is_it)?;
        Some((VirtAddr(symbol.st_value(endian)), symbol.st_size(endian)))
    }

    /// The one with this name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<Export> {
        let (address, size) = self.symbol(name)?;
        let offset = self.headers.offset_of(address)?;
        Some(Export { offset, address, size })
    }

    /// The bytes of the file from the start of something exported on, which may be shorter.
    #[must_use]
    pub fn content<const N: usize>(&self, of: Export) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.file.read_exact_at(&mut bytes, of.offset.0).ok().map(|()| bytes)
    }

    /// Where these instructions are first.
    #[must_use]
    pub fn find_code(&self, instructions: &[u8]) -> Option<Export> {
        let mut left = MAX_CODE;
        let code = self.headers.loads.iter().filter(|load| load.code);
        code.map(|load| load.segment).find_map(|segment| {
            let mut bytes = vec![0; segment.size.min(left) as usize];
            left -= bytes.len() as u64;
            self.file.read_exact_at(&mut bytes, segment.offset.0).ok()?;
            let mut places = bytes.windows(instructions.len());
            let place = places.position(|window| window == instructions)? as u64;
            let offset = segment.offset.checked_add(place)?;
            let address = segment.address.saturating_add(place);
            Some(Export { offset, address, size: segment.size - place })
        })
    }
}

fn content(file: &File, headers: &Headers, section: &Section) -> Result<Vec<u8>, ElfError> {
    headers.check(section)?;
    if section.size > MAX_TABLE {
        return Err(ElfError::SectionTooLarge { name: section.name.clone(), size: section.size });
    }
    let mut bytes = vec![0; section.size as usize];
    file.read_exact_at(&mut bytes, section.offset.0)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_c_library_exports_its_functions() {
        // This program is linked with it statically.
        let places = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/libc.so.6", "/lib/libc.so.6"];
        let file = places.iter().find_map(|place| File::open(place).ok()).unwrap();
        let exports = Exports::read(&file).unwrap();
        let found = exports.find("munmap").unwrap();
        assert!(found.offset.0 > 0 && found.size > 0);
        assert_ne!(exports.content::<8>(found), Some([0; 8]));
        assert_eq!(exports.find("munma"), None);
        assert_eq!(exports.find("no_such_function"), None);
        assert!(exports.find_code(&exports.content::<8>(found).unwrap()).is_some());
    }

    #[test]
    fn what_is_cut_exports_nothing_or_is_refused() {
        let own = std::fs::read("/proc/self/exe").unwrap();
        for length in [0, 3, 64, 1000, 100_000.min(own.len())] {
            let mut file = tempfile::tempfile().unwrap();
            std::io::Write::write_all(&mut file, &own[..length]).unwrap();
            if let Ok(exports) = Exports::read(&file) {
                assert_eq!(exports.find("main"), None);
            }
        }
    }
}
