//! Copies of programs with call frame information that is not theirs.

use std::os::unix::fs::FileExt;
use std::path::Path;

use object::{Object, ObjectSection};

/// Where a section is.
pub(crate) struct Section {
    /// In the file, bytes.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) size: u64,
    /// In memory, without bias.
    pub(crate) address: u64,
    /// Where its entry among the section headers is, in the file.
    pub(crate) header: u64,
}

/// A section of an executable.
pub(crate) fn section(program: &Path, name: &str) -> Section {
    let bytes = std::fs::read(program).unwrap();
    let elf = object::File::parse(&*bytes).unwrap();
    let section = elf.section_by_name(name).unwrap();
    let (offset, size) = section.file_range().unwrap();
    // elf(5): e_shoff, and 64 bytes an entry.
    let headers = u64::from_le_bytes(bytes[40..48].try_into().unwrap());
    let header = headers + section.index().0 as u64 * 64;
    Section { offset, size, address: section.address(), header }
}

/// Overwrites bytes of a file.
pub(crate) fn write_at(path: &Path, at: u64, bytes: &[u8]) {
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(bytes, at).unwrap();
}

/// Puts call frame information at the end of a file, and its section header there.
pub(crate) fn replace_eh_frame(path: &Path, content: &[u8]) {
    let end = std::fs::metadata(path).unwrap().len().next_multiple_of(8);
    write_at(path, end, content);
    let place = [end.to_le_bytes(), (content.len() as u64).to_le_bytes()].concat();
    write_at(path, section(path, ".eh_frame").header + 24, &place);
}

/// Gives a file a build-id of its own.
pub(crate) fn new_build_id(path: &Path) {
    let name = path.file_name().unwrap().as_encoded_bytes();
    // Behind the sizes of name and id, the type, and "GNU".
    write_at(path, section(path, ".note.gnu.build-id").offset + 16, &name[..name.len().min(20)]);
}

/// An `.eh_frame` of so many functions, of one byte each from `text` on. All share a description of
/// so many instructions that do nothing; `own` gives the instructions of each.
pub(crate) fn eh_frame(
    nothings: usize,
    functions: u64,
    text: u64,
    own: impl Fn(u64) -> Vec<u8>,
) -> Vec<u8> {
    // Id, version, augmentation "", code and data alignment, return address register.
    let head = [0, 0, 0, 0, 1, 0, 1, 0x78, 16];
    let mut bytes = ((head.len() + nothings) as u32).to_le_bytes().to_vec();
    bytes.extend(head);
    bytes.resize(bytes.len() + nothings, 0);
    for function in 0..functions {
        let instructions = own(function);
        bytes.extend((20 + instructions.len() as u32).to_le_bytes());
        bytes.extend((bytes.len() as u32).to_le_bytes());
        bytes.extend((text + function).to_le_bytes());
        bytes.extend(1u64.to_le_bytes());
        bytes.extend(instructions);
    }
    bytes.extend([0; 4]);
    bytes
}
