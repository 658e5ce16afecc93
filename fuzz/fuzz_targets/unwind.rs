//! Whole files, ELF or jitdump, into unwind tables, as the unwind compiler gets them; what comes
//! out must be a table it would take.

#![no_main]

use std::io::Write;
use std::sync::OnceLock;

/// In memory: the compiler reads files.
fn file(bytes: &[u8]) -> std::fs::File {
    static PATH: OnceLock<std::path::PathBuf> = OnceLock::new();
    let path =
        PATH.get_or_init(|| format!("/dev/shm/stackwire-fuzz-{}", std::process::id()).into());
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.read(true).write(true).create(true).truncate(true).open(path).unwrap();
    file.write_all(bytes).unwrap();
    std::fs::remove_file(path).unwrap();
    file
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let file = file(bytes);
    for table in [stackwire_unwind::compile(&file), stackwire_unwind::jitdump::compile(&file, 0)] {
        if let Ok(table) = table {
            assert_eq!(stackwire_unwind::Table::parse(&table.to_bytes()).as_ref(), Ok(&table));
        }
    }
});
