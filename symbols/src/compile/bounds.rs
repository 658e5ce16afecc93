//! Where functions without a name begin and end. `.eh_frame` says so, and stripping never removes
//! it.
//!
//! All samples of such a function are then one row of a profile (`nginx+0x4a00`), not one row for
//! each address.

use gimli::{BaseAddresses, CieOrFde, EhFrame, Endianity, UnwindSection};
use object::Endianness;
use stackwire_elf::Elf;
use stackwire_unwind::Shared;

use crate::table::Writer;

/// Most functions taken from a file; a browser has half a million.
const MAX_FUNCTIONS: usize = 4 << 20;

/// Adds the bounds of all functions that `.eh_frame` describes.
pub fn write(elf: &Elf, writer: &mut Writer) {
    let Some(section) = elf.sections.iter().find(|section| section.name == ".eh_frame") else {
        return;
    };
    let Ok(content) = elf.content(section) else { return };
    let endian = match elf.endian {
        Endianness::Little => gimli::RunTimeEndian::Little,
        Endianness::Big => gimli::RunTimeEndian::Big,
    };
    let mut frames = EhFrame::new(&content, endian);
    frames.set_address_size(if elf.is_64 { 8 } else { 4 });
    let mut bases = BaseAddresses::default().set_eh_frame(section.address.0);
    if let Some(text) = elf.sections.iter().find(|section| section.name == ".text") {
        bases = bases.set_text(text.address.0);
    }
    read(&frames, &bases, |start, end| writer.bounds(start, end));
}

fn read<E: Endianity>(
    frames: &EhFrame<gimli::EndianSlice<'_, E>>,
    bases: &BaseAddresses,
    mut each: impl FnMut(u64, u64),
) {
    let mut shared = Shared::default();
    let mut entries = frames.entries(bases);
    let mut left = MAX_FUNCTIONS;
    // What does not parse ends the section: nobody knows where the next entry begins.
    while let Ok(Some(entry)) = entries.next() {
        let CieOrFde::Fde(partial) = entry else { continue };
        let Some(fewer) = left.checked_sub(1) else { break };
        left = fewer;
        let cie = |frames: &EhFrame<_>, bases: &_, offset| shared.entry(frames, bases, offset);
        let parsed = partial.parse(cie);
        if let Ok(function) = parsed
            && let Some(end) = function.initial_address().checked_add(function.len())
        {
            each(function.initial_address(), end);
        }
    }
}

#[cfg(test)]
mod tests {
    use object::{Object, ObjectSymbol};

    use stackwire_elf::Scratch;

    use super::*;

    #[test]
    fn functions_of_this_program_have_the_bounds_their_symbols_have() {
        let path = std::env::current_exe().unwrap();
        let elf = Elf::open(std::fs::File::open(&path).unwrap(), &Scratch::default()).unwrap();
        let section = elf.sections.iter().find(|section| section.name == ".eh_frame").unwrap();
        let content = elf.content(section).unwrap();
        let frames = EhFrame::new(&content, gimli::LittleEndian);
        let bases = BaseAddresses::default().set_eh_frame(section.address.0);
        let mut bounds = std::collections::HashSet::new();
        read(&frames, &bases, |start, end| _ = bounds.insert((start, end)));
        let bytes = std::fs::read(&path).unwrap();
        let file = object::File::parse(&*bytes).unwrap();
        let functions: Vec<(u64, u64)> = file
            .symbols()
            .filter(|symbol| symbol.kind() == object::SymbolKind::Text && symbol.size() > 0)
            .map(|symbol| (symbol.address(), symbol.address() + symbol.size()))
            .collect();
        let found = functions.iter().filter(|function| bounds.contains(function)).count();
        // Assembly has symbols and may say nothing of its frames.
        assert!(
            found > 1000 && found * 100 > functions.len() * 95,
            "{found} of {}",
            functions.len()
        );
    }
}
