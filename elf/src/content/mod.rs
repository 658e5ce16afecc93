//! Whole sections of ELF files, decompressed and adjusted, and links to debug files.
//!
//! Reads with pread into memory or unlinked temporary files, never maps a file others may cut
//! short.

mod bytes;
mod relocate;
mod section;

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::unix::fs::FileExt;

use object::Endianness;
use object::elf;
use sha2::{Digest, Sha256};
use stackwire_model::{BuildId, VirtAddr};

pub use self::bytes::{Bytes, WeakBytes};
pub use self::section::{Scratch, Stream};
use crate::positioned::Positioned;
use crate::{ElfError, Headers, Section};

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
    pub build_id: BuildId,
}

/// An ELF file in our hands: what was verified is what is read.
#[derive(Debug)]
pub struct Elf {
    file: File,
    headers: Headers,
    scratch: Scratch,
}

impl Deref for Elf {
    type Target = Headers;

    fn deref(&self) -> &Headers {
        &self.headers
    }
}

impl Elf {
    /// Reads headers and notes; all sections lie in the file. The code of object files (kernel
    /// modules are such) gets addresses, section after section, and what refers to them is adjusted
    /// when it is read.
    ///
    /// # Errors
    /// See [`ElfError`].
    pub fn open(file: File, scratch: &Scratch) -> Result<Self, ElfError> {
        let mut headers = Headers::read(&file)?;
        headers.check_all()?;
        if headers.relocatable {
            relocate::place(&mut headers.sections);
        }
        Ok(Self { file, headers, scratch: scratch.clone() })
    }

    /// The content of a section, decompressed; `None` when there is no such section or it is empty
    /// here.
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

    /// The content of a compressed section, as it is decompressed. `None` when there is no such
    /// section, when it is not compressed, and when it has to be adjusted as a whole.
    ///
    /// # Errors
    /// See [`ElfError`].
    pub fn stream(&self, name: &str) -> Result<Option<Stream<'_>>, ElfError> {
        let section = self.find(name).filter(|section| section.is_compressed());
        let Some(section) = section.filter(|section| self.relocations_of(section).is_none()) else {
            return Ok(None);
        };
        self.check(section)?;
        section::decompress(&self.file, section, self.is_64, self.endian).map(Some)
    }

    /// The content of a section without regard to relocations.
    fn as_it_is(&self, section: &Section) -> Result<Bytes, ElfError> {
        self.check(section)?;
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

    /// The file inside this one that holds the symbols stripped from it (`.gnu_debugdata`, as
    /// Fedora has it).
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
        let build_id = BuildId::new(&content[end + 1..])?;
        (!path.is_empty()).then_some(AltLink { path, build_id })
    }

    /// What is loaded at an address, as far as it is in the file.
    ///
    /// # Errors
    /// When not all of it is.
    pub fn loaded(&self, address: VirtAddr, size: u64) -> Result<Vec<u8>, ElfError> {
        let outside = || ElfError::NotLoaded { address, size };
        let segment = self.loads.iter().map(|load| load.segment).find(|segment| {
            let inside = segment.inside(address);
            inside
                .and_then(|inside| inside.checked_add(size))
                .is_some_and(|end| end <= segment.size)
        });
        let offset = segment.and_then(|segment| segment.offset_of(address)).ok_or_else(outside)?;
        if offset.checked_add(size).is_none_or(|end| end.0 > self.length) {
            return Err(outside());
        }
        let mut bytes = vec![0; usize::try_from(size).map_err(|_size| outside())?];
        self.file.read_exact_at(&mut bytes, offset.0)?;
        Ok(bytes)
    }

    /// SHA-256 of the whole file.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn sha256(&self) -> Result<[u8; 32], ElfError> {
        let mut hasher = Sha256::new();
        let mut reader = Positioned::new(&self.file, self.length);
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
}
