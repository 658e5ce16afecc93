//! The decoders of ring records and side-band events.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| stackwire_collector::fuzz::ring_record(bytes));
