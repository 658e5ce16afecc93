//! ELF files without code, so that perf can name what was named here and is in no file: a symbol
//! for every address that was sampled and has a name. Of code made at run time, as `perf inject
//! --jit` makes of a jitdump; and of executables that are gone, whose names were known from before.
//! Pure.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use sha2::{Digest, Sha256};
use stackwire_model::profile::{
    Executable, ExecutableId, Mapping, Named, ProcessId, Profile, Resolution,
};

use super::record::words;

/// Bytes of the build-ids linkers write, and of perf's.
const SHA_1: usize = 20;

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
        [profile.start_ns, process.pid.into(), process.start_ns, mapping.start, index as u64]
    {
        hash.update(number.to_le_bytes());
    }
    let mut id = [0; SHA_1];
    id.copy_from_slice(&hash.finalize()[..SHA_1]);
    (format!("jitted-{}-{index}.so", process.pid), id)
}

/// All such files for code made at run time: name, build-id and content.
pub fn images<'a>(
    named: Named<'a>,
) -> impl Iterator<Item = (String, [u8; SHA_1], Vec<u8>)> + use<'a> {
    let Named { profile, .. } = named;
    let anonymous = move |mapping: &Mapping| {
        matches!(profile.executables[mapping.executable.index()], Executable::Anonymous)
    };
    let sampled = sampled(named);
    let mappings = profile.mappings.iter().enumerate();
    mappings.filter(move |(_, mapping)| anonymous(mapping)).filter_map(move |(index, mapping)| {
        let (name, id) = identity(profile, index);
        let symbols = symbols(sampled.get(&(mapping.process, mapping.executable))?, mapping);
        Some((name, id, image(&symbols, (TEXT, mapping.length), &id)))
    })
}

/// What was sampled: names by address.
type Sampled<'a> = BTreeMap<u64, Option<&'a str>>;

/// All that was sampled, by process and executable.
fn sampled<'a>(named: Named<'a>) -> FxHashMap<(ProcessId, ExecutableId), Sampled<'a>> {
    let mut all = FxHashMap::<_, Sampled<'a>>::default();
    let Named { profile, names } = named;
    for (location, resolution) in profile.locations.iter().zip(&names.resolutions) {
        if let Some(process) = location.process {
            let of = all.entry((process, location.executable)).or_default();
            of.insert(location.offset, name(resolution));
        }
    }
    all
}

/// Such a file of an executable with a build-id, if anything in it was named: addresses are offsets
/// in the true one.
#[must_use]
pub fn stand_in(profile: Named<'_>, id: ExecutableId) -> Option<Vec<u8>> {
    let of_it = profile.locations.iter().zip(&profile.names.resolutions);
    let of_it = of_it.filter(|(location, _)| location.executable == id);
    let symbols: Sampled<'_> =
        of_it.map(|(location, resolution)| (location.offset, name(resolution))).collect();
    let (last, _) = symbols.last_key_value().filter(|_| symbols.values().any(Option::is_some))?;
    let mut build_id = [0; SHA_1];
    let known = profile.executables[id.index()].build_id()?;
    let known = known.as_bytes();
    let size = known.len().min(SHA_1);
    build_id[..size].copy_from_slice(&known[..size]);
    Some(image(&symbols, (0, last.saturating_add(1)), &build_id))
}

/// The function that was compiled, not what is inlined there.
fn name(resolution: &Resolution) -> Option<&str> {
    match resolution {
        Resolution::Found { lines, .. } => lines.last().map(|line| line.function.as_str()),
        Resolution::Missing(_) => None,
    }
}

/// Names by offset in the mapping. An address without one is there, too: the function before it
/// ends before it.
fn symbols<'a>(sampled: &Sampled<'a>, mapping: &Mapping) -> Sampled<'a> {
    let inside = sampled.range(mapping.start..mapping.start.saturating_add(mapping.length));
    inside.map(|(address, name)| (address - mapping.start, *name)).collect()
}

/// Sizes of `Elf64_Ehdr`, `Elf64_Phdr`, `Elf64_Shdr`, `Elf64_Sym`.
const EHDR: u64 = 64;
const PHDR: u64 = 56;
const SHDR: u64 = 64;
const SYM: u64 = 24;
/// Names of sections, each at a place of its own.
const SECTIONS: &str = "\0.text\0.note.gnu.build-id\0.symtab\0.strtab\0.shstrtab\0";

/// `text`: address and offset of code, and how much there is.
fn image(symbols: &Sampled<'_>, (text, length): (u64, u64), id: &[u8; SHA_1]) -> Vec<u8> {
    const NOTE: u64 = EHDR + 2 * PHDR;
    const NOTE_SIZE: u64 = 36;
    let mut names = vec![0u8];
    let mut table = vec![0u8; SYM as usize];
    let mut ahead = symbols.keys().skip(1);
    for (&offset, name) in symbols {
        let size = ahead.next().map_or(1, |next| next - offset);
        let Some(name) = name else { continue };
        table.extend((names.len() as u32).to_le_bytes());
        // STB_GLOBAL, STT_FUNC, in section 1.
        table.extend([1 << 4 | 2, 0, 1, 0]);
        table.extend((text + offset).to_le_bytes());
        table.extend(size.to_le_bytes());
        names.extend(name.bytes().filter(|&byte| byte != 0));
        names.push(0);
    }
    let symtab = (NOTE + NOTE_SIZE).next_multiple_of(8);
    let strtab = symtab + table.len() as u64;
    let shstrtab = strtab + names.len() as u64;
    let headers = (shstrtab + SECTIONS.len() as u64).next_multiple_of(8);

    let mut out = Vec::new();
    out.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    // ET_DYN, EM_X86_64, EV_CURRENT.
    words(&mut out, [3 | 62 << 16 | 1 << 32, 0, EHDR, headers]);
    out.extend(0u32.to_le_bytes());
    for half in [EHDR, PHDR, 2, SHDR, 6, 5] {
        out.extend((half as u16).to_le_bytes());
    }
    // PT_LOAD, R + X: no bytes of the file.
    words(&mut out, [1 | 5 << 32, text, text, text, 0, length, 0x1000]);
    // PT_NOTE, R.
    words(&mut out, [4 | 4 << 32, NOTE, NOTE, NOTE, NOTE_SIZE, NOTE_SIZE, 4]);
    words(&mut out, [4 | 20 << 32]);
    out.extend(3u32.to_le_bytes());
    out.extend(b"GNU\0");
    out.extend(id);
    out.resize(symtab as usize, 0);
    out.extend(table);
    out.extend(names);
    out.extend(SECTIONS.as_bytes());
    out.resize(headers as usize, 0);
    let name = |of: &str| SECTIONS.find(of).unwrap_or(0) as u64;
    words(&mut out, [0; 8]);
    // Name and type, flags, address, offset, size, link and info, alignment, size of an entry.
    const NOBITS: u64 = 8;
    for section in [
        [name(".text") | NOBITS << 32, 2 | 4, text, text, length, 0, 16, 0],
        [name(".note") | 7 << 32, 2, NOTE, NOTE, NOTE_SIZE, 0, 4, 0],
        [name(".symtab") | 2 << 32, 0, 0, symtab, strtab - symtab, 4 | 1 << 32, 8, SYM],
        [name(".strtab") | 3 << 32, 0, 0, strtab, shstrtab - strtab, 0, 1, 0],
        [name(".shstrtab") | 3 << 32, 0, 0, shstrtab, SECTIONS.len() as u64, 0, 1, 0],
    ] {
        words(&mut out, section);
    }
    out
}

#[cfg(test)]
mod tests {
    use object::{Object, ObjectSymbol};

    use super::*;

    #[test]
    fn others_read_the_file() {
        let symbols =
            BTreeMap::from([(0x10, Some("first")), (0x40, None), (0x50, Some("second one"))]);
        let bytes = image(&symbols, (TEXT, 0x5000), &[7; 20]);
        let elf = object::File::parse(&*bytes).unwrap();
        assert_eq!(elf.build_id().unwrap(), Some(&[7; 20][..]));
        let found: Vec<_> = elf
            .symbols()
            .map(|it| (it.address(), it.size(), it.name().unwrap().to_owned()))
            .collect();
        let expected = [(TEXT + 0x10, 0x30, "first"), (TEXT + 0x50, 1, "second one")];
        assert_eq!(found, expected.map(|(at, size, name)| (at, size, name.to_owned())));
    }
}
