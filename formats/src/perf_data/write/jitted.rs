//! ELF files without code. With them, perf can name what was named here and is in no file. They
//! have a symbol for every address that was sampled and has a name. Some are for code made at run
//! time, as `perf inject --jit` makes them of a jitdump. The others are for executables that are
//! gone and were named by what was known from before. Pure.

use std::collections::BTreeMap;
use std::io;

use object::elf;
use object::write::elf::{FileHeader, ProgramHeader, SectionHeader, Sym, Writer};
use rustc_hash::FxHashMap;
use sha2::{Digest, Sha256};
use stackwire_model::Machine;
use stackwire_model::profile::{
    Executable, ExecutableId, Mapping, Named, ProcessId, Profile, Resolution,
};

/// Bytes of the build-ids linkers write, and of perf's.
pub(super) const SHA_1: usize = 20;

/// Name, build-id and content of such a file.
pub type Image = (String, [u8; SHA_1], Vec<u8>);

/// Address and file offset of code made at run time in such a file.
pub const TEXT: u64 = 0x1000;

/// Name and build-id of the file for a mapping of anonymous memory, by its index in
/// [`Profile::mappings`].
#[must_use]
pub fn identity(profile: &Profile, index: usize) -> (String, [u8; SHA_1]) {
    let mapping = &profile.mappings[index];
    let process = &profile.processes[mapping.process.index()];
    let origin = &profile.origin;
    // The same for the same capture, and no other's.
    let mut hash = Sha256::new();
    hash.update(origin.hostname.as_bytes());
    for number in
        [profile.start_ns, process.pid.into(), process.start_ns, mapping.start.0, index as u64]
    {
        hash.update(number.to_le_bytes());
    }
    let mut id = [0; SHA_1];
    id.copy_from_slice(&hash.finalize()[..SHA_1]);
    (format!("jitted-{}-{index}.so", process.pid), id)
}

/// All such files for code made at run time, or why one cannot be made.
pub fn images<'a>(named: Named<'a>) -> impl Iterator<Item = io::Result<Image>> + use<'a> {
    let Named { profile, .. } = named;
    let anonymous = move |mapping: &Mapping| {
        matches!(profile.executables[mapping.executable.index()], Executable::Anonymous)
    };
    let sampled = sampled(named);
    let mappings = profile.mappings.iter().enumerate();
    mappings.filter(move |(_, mapping)| anonymous(mapping)).filter_map(move |(index, mapping)| {
        let (name, id) = identity(profile, index);
        let symbols = symbols(sampled.get(&(mapping.process, mapping.executable))?, mapping);
        let image = image(&symbols, TEXT, mapping.length, &id, machine(profile));
        Some(image.map(|image| (name, id, image)).map_err(io::Error::other))
    })
}

/// What was sampled: names by address.
pub(super) type Sampled<'a> = BTreeMap<u64, Option<&'a str>>;

/// All that was sampled, by process and executable.
fn sampled<'a>(named: Named<'a>) -> FxHashMap<(ProcessId, ExecutableId), Sampled<'a>> {
    let mut all = FxHashMap::<_, Sampled<'a>>::default();
    let Named { profile, names } = named;
    for (location, resolution) in profile.locations.iter().zip(&names.resolutions) {
        if let Some(process) = location.process {
            let of = all.entry((process, location.executable)).or_default();
            of.insert(location.address.number(), name(resolution));
        }
    }
    all
}

/// Such a file of an executable with a build-id, if anything in it was named: addresses are offsets
/// in the true one.
///
/// # Errors
/// When it has more symbols than a file can hold.
pub fn stand_in(profile: Named<'_>, id: ExecutableId) -> io::Result<Option<Vec<u8>>> {
    let of_it = profile.locations.iter().zip(&profile.names.resolutions);
    let of_it = of_it.filter(|(location, _)| location.executable == id);
    let symbols: Sampled<'_> =
        of_it.map(|(location, resolution)| (location.address.number(), name(resolution))).collect();
    let last = symbols.last_key_value().filter(|_| symbols.values().any(Option::is_some));
    let known = profile.executables[id.index()].build_id();
    let (Some((last, _)), Some(known)) = (last, known) else { return Ok(None) };
    let mut build_id = [0; SHA_1];
    let known = known.as_bytes();
    let size = known.len().min(SHA_1);
    build_id[..size].copy_from_slice(&known[..size]);
    let image = image(&symbols, 0, last.saturating_add(1), &build_id, machine(&profile));
    image.map(Some).map_err(io::Error::other)
}

/// Other profilers do not say; perf looks at it for disassembling alone.
pub(super) fn machine(profile: &Profile) -> Machine {
    Machine::of_name(&profile.origin.machine).unwrap_or(Machine::X86_64)
}

/// The function that was compiled, not what is inlined there.
pub(super) fn name(resolution: &Resolution) -> Option<&str> {
    match resolution {
        Resolution::Found { lines, .. } => lines.last().map(|line| &*line.function),
        Resolution::Missing(_) => None,
    }
}

/// Names by offset in the mapping. An address without one is there, too: the function before it
/// ends before it.
fn symbols<'a>(sampled: &Sampled<'a>, mapping: &Mapping) -> Sampled<'a> {
    let start = mapping.start.0;
    let inside = sampled.range(start..start.saturating_add(mapping.length));
    inside.map(|(address, name)| (address - start, *name)).collect()
}

/// `text`: address and offset of code; `length`: how much there is.
pub(super) fn image(
    symbols: &Sampled<'_>,
    text: u64,
    length: u64,
    id: &[u8; SHA_1],
    machine: Machine,
) -> Result<Vec<u8>, object::write::Error> {
    let note =
        [&4u32.to_le_bytes()[..], &(SHA_1 as u32).to_le_bytes(), &[3, 0, 0, 0], b"GNU\0", id];
    let note = note.concat();
    let mut ahead = symbols.keys().skip(1);
    let sized = symbols.iter().map(|(&offset, name)| {
        let size = ahead.next().map_or(1, |next| next - offset);
        (offset, size, name.map(|name| name.replace('\0', "")))
    });
    let named: Vec<_> =
        sized.filter_map(|(offset, size, name)| Some((offset, size, name?))).collect();

    let mut bytes = Vec::new();
    let mut out = Writer::new(object::Endianness::Little, true, &mut bytes);
    let [text_name, note_name] =
        [&b".text"[..], b".note.gnu.build-id"].map(|name| out.add_section_name(name));
    let names: Vec<_> = named.iter().map(|(.., name)| out.add_string(name.as_bytes())).collect();
    out.reserve_null_section_index();
    let text_section = out.reserve_section_index();
    out.reserve_section_index();
    out.reserve_null_symbol_index();
    for _ in &named {
        out.reserve_symbol_index(Some(text_section));
    }
    out.reserve_symtab_section_index();
    out.reserve_strtab_section_index();
    out.reserve_shstrtab_section_index();
    out.reserve_file_header();
    out.reserve_program_headers(2);
    let note_at = out.reserve(note.len(), 4) as u64;
    out.reserve_symtab();
    out.reserve_strtab();
    out.reserve_shstrtab();
    out.reserve_section_headers();

    out.write_file_header(&FileHeader {
        os_abi: elf::ELFOSABI_NONE,
        abi_version: 0,
        e_type: elf::ET_DYN,
        e_machine: machine.elf(),
        e_entry: 0,
        e_flags: 0,
    })?;
    out.write_align_program_headers();
    // No bytes of the file.
    out.write_program_header(&ProgramHeader {
        p_type: elf::PT_LOAD,
        p_flags: elf::PF_R | elf::PF_X,
        p_offset: text,
        p_vaddr: text,
        p_paddr: text,
        p_filesz: 0,
        p_memsz: length,
        p_align: 0x1000,
    });
    out.write_program_header(&ProgramHeader {
        p_type: elf::PT_NOTE,
        p_flags: elf::PF_R,
        p_offset: note_at,
        p_vaddr: note_at,
        p_paddr: note_at,
        p_filesz: note.len() as u64,
        p_memsz: note.len() as u64,
        p_align: 4,
    });
    out.write_align(4);
    out.write(&note);
    out.write_null_symbol();
    for ((offset, size, _), name) in named.iter().zip(names) {
        out.write_symbol(&Sym {
            name: Some(name),
            section: Some(text_section),
            st_info: elf::STB_GLOBAL << 4 | elf::STT_FUNC,
            st_other: 0,
            st_shndx: 0,
            st_value: text + offset,
            st_size: *size,
        });
    }
    out.write_strtab();
    out.write_shstrtab();
    out.write_null_section_header();
    let section = SectionHeader {
        name: Some(text_name),
        sh_type: elf::SHT_NOBITS,
        sh_flags: u64::from(elf::SHF_ALLOC | elf::SHF_EXECINSTR),
        sh_addr: text,
        sh_offset: text,
        sh_size: length,
        sh_link: 0,
        sh_info: 0,
        sh_addralign: 16,
        sh_entsize: 0,
    };
    out.write_section_header(&section);
    out.write_section_header(&SectionHeader {
        name: Some(note_name),
        sh_type: elf::SHT_NOTE,
        sh_flags: u64::from(elf::SHF_ALLOC),
        sh_addr: note_at,
        sh_offset: note_at,
        sh_size: note.len() as u64,
        sh_addralign: 4,
        ..section
    });
    out.write_symtab_section_header(1);
    out.write_strtab_section_header();
    out.write_shstrtab_section_header();
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use object::{Object, ObjectSymbol};

    use super::*;

    #[test]
    fn others_read_the_file() {
        let symbols =
            BTreeMap::from([(0x10, Some("first")), (0x40, None), (0x50, Some("second one"))]);
        let bytes = image(&symbols, TEXT, 0x5000, &[7; 20], Machine::Aarch64).unwrap();
        let elf = object::File::parse(&*bytes).unwrap();
        assert_eq!(elf.architecture(), object::Architecture::Aarch64);
        assert_eq!(elf.build_id().unwrap(), Some(&[7; 20][..]));
        let found: Vec<_> = elf
            .symbols()
            .map(|it| (it.address(), it.size(), it.name().unwrap().to_owned()))
            .collect();
        let expected = [(TEXT + 0x10, 0x30, "first"), (TEXT + 0x50, 1, "second one")];
        assert_eq!(found, expected.map(|(at, size, name)| (at, size, name.to_owned())));
    }
}
