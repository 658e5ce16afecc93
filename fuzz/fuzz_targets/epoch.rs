//! An epoch past checksum and compression, which random bytes never get through.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| stackwire::fuzz::epoch(bytes));
