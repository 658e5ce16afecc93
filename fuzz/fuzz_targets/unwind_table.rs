//! Tables as the collector takes them from the compiler and from disk.

#![no_main]

use stackwire_model::FileOffset;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // The checksum is not what is looked for.
    let mut bytes = bytes.to_vec();
    if bytes.len() > 36 {
        let crc = crc32fast::hash(&bytes[16..]);
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    }
    if let Ok(table) = stackwire_unwind::Table::parse(&bytes) {
        assert_eq!(table.to_bytes(), bytes);
        for offset in (0..u64::from(table.pages.len() as u32) << 16).step_by(0x1235) {
            let _ = table.rule(FileOffset((u64::from(table.base) << 16) + offset));
        }
    }
});
