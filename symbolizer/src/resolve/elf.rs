//! Names in an ELF file through blazesym: functions with inlined callees, files and lines.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};

use blazesym::symbolize::source::{Elf, Source};
use blazesym::symbolize::{CodeInfo, Input, Reason, Sym, Symbolized, Symbolizer};
use object::elf::{FileHeader32, FileHeader64};
use object::read::elf::{CompressionHeader as _, FileHeader, SectionHeader as _};
use object::{Endianness, FileKind, ReadCache, ReadRef};

use super::demangle::demangle;
use crate::profile::{Line, Quality, Resolution};

/// An ELF file in our hands: what was verified is what is read.
#[derive(Debug)]
pub struct Object {
    fd: OwnedFd,
}

impl Object {
    /// A file.
    #[must_use]
    pub fn of_file(file: File) -> Self {
        Self { fd: file.into() }
    }

    /// An image in memory.
    ///
    /// # Errors
    /// When the system has no memory to give.
    pub fn of_image(image: &[u8]) -> Result<Self, String> {
        let fd = rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC);
        if image.len() > MAX_IMAGE {
            return Err(format!("its image has {} bytes, more than any vDSO", image.len()));
        }
        let mut file = File::from(fd.map_err(|error| error.to_string())?);
        file.write_all(image).map_err(|error| error.to_string())?;
        Ok(Self::of_file(file))
    }

    /// Refuses files that would make a reader allocate or decompress without measure.
    ///
    /// blazesym believes the sizes compressed sections declare, and a failed allocation ends the process.
    ///
    /// # Errors
    /// In words, for the report.
    pub fn check(&self) -> Result<(), String> {
        let file = File::from(self.fd.try_clone().map_err(|error| error.to_string())?);
        let cache = ReadCache::new(file);
        match FileKind::parse(&cache) {
            Ok(FileKind::Elf64) => check_sections::<FileHeader64<Endianness>, _>(&cache),
            Ok(FileKind::Elf32) => check_sections::<FileHeader32<Endianness>, _>(&cache),
            Ok(_) => Err("not an ELF file".to_owned()),
            Err(error) => Err(format!("not an ELF file: {error}")),
        }
    }

    /// Looks up file offsets, in order.
    ///
    /// # Errors
    /// When the file is no ELF file or is broken.
    pub fn symbolize(&self, offsets: &[u64]) -> Result<Vec<Resolution>, String> {
        let symbolizer =
            Symbolizer::builder().enable_auto_reload(false).enable_demangling(false).build();
        // By descriptor and not by path: the path may lead elsewhere by now.
        let source = Source::from(Elf::new(format!("/proc/self/fd/{}", self.fd.as_raw_fd())));
        let symbols = symbolizer
            .symbolize(&source, Input::FileOffset(offsets))
            .map_err(|error| format!("cannot read its symbols: {error:#}"))?;
        let mut found: Vec<Resolution> = symbols.into_iter().map(resolution).collect();
        // A signal handler returns to the first byte of a function nobody called. Less one, as return
        // addresses are looked up, that is in nothing; and nothing is what lies in front of it.
        let missing: Vec<usize> =
            (0..found.len()).filter(|&at| matches!(found[at], Resolution::Missing(_))).collect();
        let behind: Vec<u64> = missing.iter().map(|&at| offsets[at].saturating_add(1)).collect();
        if let Ok(symbols) = symbolizer.symbolize(&source, Input::FileOffset(&behind)) {
            for (at, symbol) in missing.into_iter().zip(symbols) {
                if matches!(&symbol, Symbolized::Sym(symbol) if symbol.offset == 0) {
                    found[at] = resolution(symbol);
                }
            }
        }
        Ok(found)
    }
}

/// Largest image of a vDSO taken; real ones have two to four pages.
const MAX_IMAGE: usize = 1 << 20;
/// Most bytes a section may have once decompressed. The 156 MB libjvm has one of 300 MB.
const MAX_SECTION: u64 = 2 << 30;
/// Most sections; programs built with a section a function have tens of thousands before linking.
const MAX_SECTIONS: usize = 1 << 16;

fn check_sections<'a, E, R>(data: R) -> Result<(), String>
where
    E: FileHeader<Endian = Endianness>,
    R: ReadRef<'a>,
{
    let broken = |error: object::Error| format!("not a readable ELF file: {error}");
    let header = E::parse(data).map_err(broken)?;
    let endian = header.endian().map_err(broken)?;
    let sections = header.section_headers(endian, data).map_err(broken)?;
    if sections.len() > MAX_SECTIONS {
        return Err(format!("it declares {} sections", sections.len()));
    }
    let length = data.len().unwrap_or(0);
    for section in sections {
        let Some((offset, size)) = section.file_range(endian) else { continue };
        if offset.checked_add(size).is_none_or(|end| end > length) {
            return Err("a section of it lies outside the file".to_owned());
        }
        if let Ok(Some((compressed, ..))) = section.compression(endian, data)
            && compressed.ch_size(endian).into() > MAX_SECTION
        {
            return Err("a compressed section of it declares more than 2 GiB".to_owned());
        }
    }
    Ok(())
}

fn resolution(symbol: Symbolized<'_>) -> Resolution {
    match symbol {
        Symbolized::Sym(symbol) => {
            let quality = if symbol.code_info.is_some() { Quality::Dwarf } else { Quality::Symtab };
            Resolution::Found { lines: lines(&symbol), quality }
        }
        Symbolized::Unknown(reason) => Resolution::Missing(
            match reason {
                Reason::MissingSyms => "no symbol covers it, and the file is stripped",
                Reason::UnknownAddr => "no symbol covers it",
                Reason::InvalidFileOffset => "not in a loaded segment of the file",
                _ => "the file cannot be read there",
            }
            .to_owned(),
        ),
    }
}

/// Innermost first. blazesym lists from the function that exists inwards.
fn lines(symbol: &Sym<'_>) -> Vec<Line> {
    let inlined = symbol.inlined.iter().map(|inner| line(&inner.name, inner.code_info.as_ref()));
    let mut lines = vec![line(&symbol.name, symbol.code_info.as_deref())];
    lines.extend(inlined);
    lines.reverse();
    lines
}

fn line(name: &str, code: Option<&CodeInfo<'_>>) -> Line {
    Line {
        function: demangle(name),
        file: code.map_or(String::new(), |code| code.to_path().display().to_string()),
        line: code.and_then(|code| code.line).unwrap_or(0),
    }
}
