//! The capture reader, frames to exports.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| stackwire::fuzz::capture(bytes));
