//! Where lines end in the source of a script. It comes in pieces, is looked through once and kept
//! by nobody. Pure. Called by `codes.rs`.

use stackwire_collector_ebpf::managed::ScriptHead;

/// Line ends of a script, as far as its source has come.
#[derive(Debug, Default)]
pub struct Lines {
    /// Bytes of a character, and of all of it.
    width: u32,
    length: u64,
    /// Bytes that have come.
    known: u64,
    /// The last character was a carriage return: it ends a line unless a line feed follows.
    after_return: bool,
    /// Characters that end a line.
    ends: Vec<u32>,
}

impl Lines {
    /// Takes the next piece. One that is not the next tells nothing.
    pub fn add(&mut self, head: &ScriptHead, bytes: &[u8]) {
        let Some(bytes) = bytes.get(..head.bytes as usize) else { return };
        let is_known = self.length > 0 && self.known >= self.length;
        if is_known && (head.width, head.length) == (self.width, self.length) {
            return;
        }
        if head.offset == 0 {
            *self = Self { width: head.width, length: head.length, ..Self::default() };
        }
        let is_next =
            (head.width, head.length, head.offset) == (self.width, self.length, self.known);
        if !is_next || self.length / u64::from(self.width.max(1)) > u64::from(u32::MAX) {
            return;
        }
        match self.width {
            1 => bytes.iter().for_each(|&byte| self.character(byte.into())),
            2 => {
                let (characters, _half) = bytes.as_chunks();
                characters.iter().for_each(|it| self.character(u16::from_le_bytes(*it)));
            }
            _ => return,
        }
        if self.known >= self.length && self.after_return {
            self.end_before();
        }
    }

    /// As V8 has it (`IsLineTerminatorSequence`, src/strings/char-predicates.h).
    fn character(&mut self, character: u16) {
        const SEPARATORS: [u16; 2] = [0x2028, 0x2029];
        if self.after_return && character != u16::from(b'\n') {
            self.end_before();
        }
        self.after_return = character == u16::from(b'\r');
        if character == u16::from(b'\n') || SEPARATORS.contains(&character) {
            self.ends.push(self.characters());
        }
        self.known += u64::from(self.width);
    }

    fn end_before(&mut self) {
        self.after_return = false;
        self.ends.push(self.characters().saturating_sub(1));
    }

    /// Characters that have come.
    fn characters(&self) -> u32 {
        u32::try_from(self.known / u64::from(self.width.max(1))).unwrap_or(u32::MAX)
    }

    /// Line of the first of these characters, and characters among them that end a line; none: not
    /// all of them have come.
    #[must_use]
    pub fn of(&self, [from, to]: [u32; 2]) -> Option<(u32, &[u32])> {
        let before = |character: u32| self.ends.partition_point(|&end| end < character);
        let (first, last) = (before(from), before(to));
        let has_come = self.width > 0 && from <= to && to <= self.characters();
        has_come.then(|| (first as u32 + 1, &self.ends[first..last]))
    }

    /// Bytes it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of::<Self>() + self.ends.capacity() * size_of::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes a source in pieces of so many characters.
    fn lines(source: &str, width: u32, piece: usize) -> Lines {
        let characters: Vec<u16> = source.encode_utf16().collect();
        let bytes = |of: &[u16]| -> Vec<u8> {
            of.iter().flat_map(|it| it.to_le_bytes()[..width as usize].to_vec()).collect()
        };
        let (mut lines, mut offset) = (Lines::default(), 0);
        let length = bytes(&characters).len() as u64;
        for piece in characters.chunks(piece) {
            let piece = bytes(piece);
            let head = ScriptHead { script: 1, offset, length, width, bytes: piece.len() as u32 };
            lines.add(&head, &piece);
            offset += piece.len() as u64;
        }
        lines
    }

    #[test]
    fn lines_end_where_v8_says_so_however_the_source_is_cut() {
        let source = "a\nb\r\nc\rd\r\r\n\ne";
        let of_two = "a\nb\u{2028}c\u{2029}ä\r";
        for piece in 1..8 {
            let known = lines(source, 1, piece);
            let all = [0, source.len() as u32];
            assert_eq!(known.of(all), Some((1, &[1, 4, 6, 8, 10, 11][..])), "{piece}");
            assert_eq!(known.of([5, 9]), Some((3, &[6, 8][..])));
            assert_eq!(known.of([0, 14]), None, "there are no more than 13");
            assert_eq!(lines(of_two, 2, piece).of([0, 8]), Some((1, &[1, 3, 5, 7][..])), "{piece}");
        }
    }

    #[test]
    fn a_piece_that_is_missing_ends_what_is_known() {
        let mut known = lines("a\nb\n", 1, 4);
        let head = ScriptHead { script: 1, offset: 9, length: 4, width: 1, bytes: 1 };
        known.add(&head, b"\n");
        assert_eq!(known.of([0, 4]), Some((1, &[1, 3][..])));
        assert_eq!((known.of([0, 5]), known.of([3, 2])), (None, None));
        // Another script at the same address.
        let head = ScriptHead { script: 1, offset: 0, length: 9, width: 1, bytes: 2 };
        known.add(&head, b"\nx");
        assert_eq!((known.of([0, 2]), known.of([0, 4])), (Some((1, &[0][..])), None));
        // A width that there is not, and fewer bytes than are said.
        known.add(&ScriptHead { width: 3, ..head }, b"\nx");
        assert_eq!(known.of([0, 1]), None);
        known.add(&head, b"");
        assert_eq!(Lines::default().of([0, 0]), None);
    }
}
