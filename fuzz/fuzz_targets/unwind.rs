//! Whole files, ELF or jitdump, into unwind tables, as the unwind compiler gets them; what comes
//! out must be a table it would take.

#![no_main]

use std::io::Write;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // In memory: the compiler reads files.
    let mut file = tempfile::tempfile_in("/dev/shm").expect("a file in memory");
    file.write_all(bytes).expect("memory");
    let tables = [stackwire_unwind::compile(&file), stackwire_unwind::jitdump::compile(&file, 0)];
    for table in tables.into_iter().flatten() {
        assert_eq!(stackwire_unwind::Table::parse(&table.to_bytes()).as_ref(), Ok(&table));
    }
});
