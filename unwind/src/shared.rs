//! Entries of call frame information that functions share (CIEs), each parsed once.
//!
//! Compilers write a few of some 30 bytes. A hostile file lets 60,000 functions share one of a
//! megabyte: parsed and run for each of them, it holds up whoever compiles tables for all processes
//! of the host.

use std::collections::HashMap;

use gimli::{BaseAddresses, CommonInformationEntry, Error, Reader, UnwindOffset, UnwindSection};

/// Longest one taken, in bytes.
const MAX_BYTES: u64 = 1024;
/// Most remembered.
const MAX_ENTRIES: usize = 4096;

/// The entries of a section that were met.
#[derive(Debug)]
pub struct Shared<R: Reader>(HashMap<R::Offset, gimli::Result<CommonInformationEntry<R>>>);

impl<R: Reader> Default for Shared<R> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<R: Reader> Shared<R> {
    /// The entry at an offset of the section.
    ///
    /// # Errors
    /// When it cannot be read, or is longer than any compiler's.
    pub fn entry<S: UnwindSection<R>>(
        &mut self,
        section: &S,
        bases: &BaseAddresses,
        offset: S::Offset,
    ) -> gimli::Result<CommonInformationEntry<R>>
    where
        S::Offset: UnwindOffset<R::Offset>,
    {
        let at = UnwindOffset::into(offset);
        if let Some(known) = self.0.get(&at) {
            return known.clone();
        }
        let found = section.cie_from_offset(bases, offset).and_then(|entry| {
            let length = gimli::ReaderOffset::into_u64(entry.entry_len());
            // The library has no error for what is whole and too long.
            if length > MAX_BYTES { Err(Error::TooManyIterations) } else { Ok(entry) }
        });
        if self.0.len() == MAX_ENTRIES {
            self.0.clear();
        }
        self.0.insert(at, found.clone());
        found
    }
}

#[cfg(test)]
mod tests {
    use gimli::{EhFrame, LittleEndian};

    use super::*;

    /// A section with one such entry that ends in this many instructions that do nothing.
    fn section(nothings: u32) -> Vec<u8> {
        // Id, version, augmentation "", code and data alignment, return address register.
        let head = [0, 0, 0, 0, 1, 0, 1, 0x78, 16];
        let mut bytes = (head.len() as u32 + nothings).to_le_bytes().to_vec();
        bytes.extend(head);
        bytes.resize(bytes.len() + nothings as usize, 0);
        bytes
    }

    #[test]
    fn those_of_compilers_are_taken_and_longer_ones_are_not() {
        let bases = BaseAddresses::default().set_eh_frame(0x1000);
        for (nothings, good) in [(16, true), (900, true), (1 << 20, false)] {
            let bytes = section(nothings);
            let frames = EhFrame::new(&bytes, LittleEndian);
            let mut shared = Shared::default();
            for _ in 0..2 {
                let found = shared.entry(&frames, &bases, 0.into());
                assert_eq!(found.is_ok(), good, "{nothings}");
            }
            assert!(shared.entry(&frames, &bases, 5.into()).is_err());
        }
    }
}
