//! Object files: addresses for their code, and debug sections adjusted to them. Kernel modules are
//! object files.
//!
//! Only what debug sections need: absolute relocations with addends. Addresses are ours alone and
//! mean nothing outside; who asks about a kernel module finds its functions by name.

use object::elf::{self, Rela64, Sym64};
use object::read::elf::{Rela, Sym};
use object::{Endianness, LittleEndian, pod};
use stackwire_model::VirtAddr;

use super::{Bytes, Elf};
use crate::{ElfError, Section};

/// Where the first section is put: address 0 stands for what the linker removed.
const BASE: u64 = 0x1000;
/// Largest section adjusted, which is done in memory; the largest of a kernel module has some 100
/// MB.
const MAX_BYTES: usize = 512 << 20;

/// Puts the code sections one behind the other.
pub(super) fn place(sections: &mut [Section]) {
    let mut at = BASE;
    for section in sections.iter_mut().filter(|section| section.is_code()) {
        let align = section.align.clamp(1, 1 << 16);
        at = at.next_multiple_of(align);
        section.address = VirtAddr(at);
        // A hostile size wraps into nonsense, which is what it gets.
        at = at.saturating_add(section.size).min(u64::MAX / 2);
    }
}

/// Writes addresses where relocations want them.
pub(super) fn apply(elf: &Elf, content: Bytes, relocations: &Section) -> Result<Bytes, ElfError> {
    if content.len() > MAX_BYTES {
        return Err(ElfError::RelocatedTooLarge(content.len()));
    }
    let symbols = elf
        .sections
        .get(relocations.link as usize)
        .filter(|symbols| symbols.kind == elf::SHT_SYMTAB)
        .ok_or(ElfError::NoRelocationSymbols)?;
    // As they are, whatever they are called: one that refers to itself is not followed.
    let (symbols, entries) = (elf.as_it_is(symbols)?, elf.as_it_is(relocations)?);
    let mut content = content.to_vec();
    if !elf.is_64 || elf.endian != Endianness::Little {
        return Err(ElfError::ForeignObject);
    }
    let (entries, _) = entries.as_chunks::<{ size_of::<Rela64<LittleEndian>>() }>();
    for entry in entries {
        let Ok((entry, _)) = pod::from_bytes::<Rela64<LittleEndian>>(entry) else { continue };
        let (offset, addend) = (entry.r_offset(LittleEndian), entry.r_addend(LittleEndian));
        let width = match entry.r_type(LittleEndian, false) {
            elf::R_X86_64_64 | elf::R_AARCH64_ABS64 => 8,
            elf::R_X86_64_32 | elf::R_X86_64_32S | elf::R_AARCH64_ABS32 => 4,
            _ => continue,
        };
        let Some(value) = symbol(elf, &symbols, entry.r_sym(LittleEndian, false)) else { continue };
        let value = value.wrapping_add_signed(addend).to_le_bytes();
        let place =
            usize::try_from(offset).ok().and_then(|at| content.get_mut(at..at.checked_add(width)?));
        // One that points outside changes nothing.
        if let Some(place) = place {
            place.copy_from_slice(&value[..width]);
        }
    }
    Ok(Bytes::from(content))
}

/// The address a symbol stands for.
fn symbol(elf: &Elf, symbols: &[u8], number: u32) -> Option<u64> {
    let at = (number as usize).checked_mul(size_of::<Sym64<LittleEndian>>())?;
    let (symbol, _) = pod::from_bytes::<Sym64<LittleEndian>>(symbols.get(at..)?).ok()?;
    let section = usize::from(symbol.st_shndx(LittleEndian));
    let base = elf.sections.get(section).filter(|section| section.is_code());
    Some(symbol.st_value(LittleEndian).wrapping_add(base.map_or(0, |section| section.address.0)))
}
