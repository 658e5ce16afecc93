//! Files that a process has mapped and calls an interpreter.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| stackwire_collector::fuzz::interpreter(bytes));
