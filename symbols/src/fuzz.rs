//! Entry points for fuzzing: what other hosts and other processes wrote. For `fuzz/`.

use std::io::Write;

use stackwire_model::{Code, FileOffset, Runtime, Text, UserAddr, VirtAddr};

use crate::compile::{Files, compile};
use crate::jit::{Functions, parse_jitdump, parse_perf_map};

/// Compiles an ELF file: headers, notes, links, symbols, DWARF, Go's table.
pub fn elf(bytes: &[u8]) {
    let Ok(mut file) = tempfile::tempfile() else { return };
    let Ok(()) = file.write_all(bytes) else { return };
    let Ok(elf) = stackwire_elf::Elf::open(file, &Default::default()) else { return };
    let _ = (elf.debug_link(), elf.alt_link(), elf.sha256(), elf.crc());
    let files = Files { executable: Some(&elf), ..Default::default() };
    table(&compile(&files, None).bytes);
}

/// Looks up addresses in a table, its checksum made right.
pub fn table(bytes: &[u8]) {
    let mut bytes = bytes.to_vec();
    if bytes.len() >= 16 {
        let checksum = xxhash_rust::xxh3::xxh3_64(&bytes[16..]);
        bytes[8..16].copy_from_slice(&checksum.to_le_bytes());
    }
    let Ok(table) = crate::table::Table::open(bytes.into()) else { return };
    let _ = (table.best(), table.segments().count(), table.functions().count());
    for address in [0, 1, 0x1000, 0x1234, 0x40_0000, 0x40_1000, u64::MAX] {
        let _ = table.address_of(FileOffset(address));
        let address = VirtAddr(address);
        assert!(table.lookup(address).count() <= 1024);
        for frame in table.lookup(address) {
            let _ = (frame.raw_name(), frame.readable_name(), frame.file());
        }
        assert!(table.bounds(address).is_none_or(|bounds| bounds.contains(&address)));
    }
}

/// Parses a perf-map.
pub fn perf_map(bytes: &[u8]) {
    look_around(&parse_perf_map(bytes));
}

/// Parses a jitdump.
pub fn jitdump(bytes: &[u8]) {
    look_around(&parse_jitdump(bytes));
}

/// Finds lines of a function of an interpreter. The first bytes say of which version, and where.
pub fn code(bytes: &[u8]) {
    let Some((head, bytes)) = bytes.split_at_checked(4) else { return };
    let runtime = match head[0] % 13 {
        number @ ..9 => Runtime::Cpython(0x0308_0000 + (u32::from(number) << 16)),
        12 => Runtime::V8(0x0a02_0000),
        number => Runtime::Ruby(0x0003_0000 + (u32::from(number - 9) << 8)),
    };
    let (name, lines) = bytes.split_at(bytes.len().min(usize::from(head[1])));
    let name = Text { width: head[2], bytes: name.to_vec(), is_cut: head[3] & 1 != 0 };
    let path = name.clone();
    let code = Code { runtime, name, path, first_line: head[3].into(), lines: lines.to_vec() };
    let Some(function) = crate::interpreter::Function::read(&code) else { return };
    for position in [0, 2, 3, 256, u64::MAX] {
        let _ = function.at(position);
    }
}

fn look_around(functions: &Functions) {
    for address in [0, 0x1000, u64::MAX] {
        let _ = functions.line(UserAddr(address));
    }
}
