//! Links to debug files, and the one inside.

#![no_main]

const SECTIONS: &[&str] = &[".gnu_debuglink", ".gnu_debugaltlink", ".gnu_debugdata"];

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some(elf) = stackwire_fuzz::wrap(SECTIONS, bytes) {
        stackwire_symbols::fuzz::elf(&elf);
    }
});
