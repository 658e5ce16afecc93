//! An ELF file around what is fuzzed, so that every input gets past headers: sections from pieces
//! of the input, each with its length of four bytes in front.

use object::write::{Object, StandardSegment};
use object::{Architecture, BinaryFormat, Endianness, SectionFlags, SectionKind};

/// Wraps pieces of the input as these sections, beside some code at the usual place.
pub fn wrap(names: &[&str], mut input: &[u8]) -> Option<Vec<u8>> {
    let mut out = Object::new(BinaryFormat::Elf, Architecture::X86_64, Endianness::Little);
    let text = out.section_id(object::write::StandardSection::Text);
    out.append_section_data(text, &[0xc3; 4096], 16);
    for name in names {
        let (length, rest) = input.split_first_chunk::<4>()?;
        let length = (u32::from_le_bytes(*length) as usize).min(rest.len());
        let (content, rest) = rest.split_at(length);
        input = rest;
        let loaded = *name == ".gopclntab";
        let segment = if loaded { StandardSegment::Data } else { StandardSegment::Debug };
        let kind = if loaded { SectionKind::ReadOnlyData } else { SectionKind::Debug };
        let segment = out.segment_name(segment).to_vec();
        let section = out.add_section(segment, name.as_bytes().to_vec(), kind);
        out.append_section_data(section, content, 1);
        if !loaded {
            out.section_mut(section).flags = SectionFlags::Elf { sh_flags: 0 };
        }
    }
    out.write().ok()
}
