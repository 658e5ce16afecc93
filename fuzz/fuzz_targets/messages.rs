//! Streams of collectors, before anything is known of them.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| stackwire::fuzz::messages(bytes));
