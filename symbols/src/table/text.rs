//! The text of a table: UTF-8, checked once when the table is opened. Names are pieces of it.

use bytestring::ByteString;
use stackwire_elf::Bytes;

/// The end of a table's bytes, as text.
#[derive(Clone, Debug)]
pub(super) struct Text {
    text: ByteString,
    /// Whether pieces share the table's memory, see [`Text::keep`].
    shared: bool,
}

impl Text {
    /// `None` when it is not UTF-8, or begins behind the end of the bytes.
    pub(super) fn new(bytes: Bytes, start: usize) -> Option<Self> {
        let shared = bytes.are_mapped();
        let len = bytes.len();
        let text = bytes::Bytes::from_owner(bytes).slice(start.min(len)..);
        let text = ByteString::try_from(text).ok()?;
        (start <= len).then_some(Self { text, shared })
    }

    /// Whether pieces that are kept share the table's memory.
    pub(super) fn is_shared(&self) -> bool {
        self.shared
    }

    /// The piece at a place, of a length; empty when there is none such.
    pub(super) fn get(&self, (at, length): (u32, u32)) -> &str {
        let at = at as usize;
        self.text.get(at..at + length as usize).unwrap_or("")
    }

    /// The same piece, for longer than the table lives. Pieces of a mapped table share its
    /// mapping: nothing is copied. Pieces of a table in our own memory are copied, so that
    /// one name does not keep megabytes alive.
    pub(super) fn keep(&self, place: (u32, u32)) -> ByteString {
        let piece = self.get(place);
        if self.shared { self.text.slice_ref(piece) } else { piece.into() }
    }
}
