//! Go's own table.

#![no_main]

const SECTIONS: &[&str] = &[".gopclntab"];

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some(elf) = stackwire_fuzz::wrap(SECTIONS, bytes) {
        stackwire_symbols::fuzz::elf(&elf);
    }
});
