//! GNU build-ids: what a linker calls a file by its content (`NT_GNU_BUILD_ID`).

use std::fmt;
use std::str::FromStr;

/// A GNU build-id of 4 to 32 bytes.
///
/// `ld --build-id` writes 20 bytes (SHA-1), 16 (MD5, UUID) or, when told, any number. Fewer than
/// four would be the same for different files; more than 32 no linker makes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BuildId {
    bytes: [u8; Self::MAX],
    length: u8,
}

/// No build-id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a build-id has 8 to 64 hexadecimal digits")]
pub struct BadBuildId;

impl BuildId {
    /// Fewest bytes.
    pub const MIN: usize = 4;
    /// Most bytes.
    pub const MAX: usize = 32;

    /// Of these bytes; none when they are too few or too many.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        if !(Self::MIN..=Self::MAX).contains(&bytes.len()) {
            return None;
        }
        let mut id = Self { bytes: [0; Self::MAX], length: bytes.len() as u8 };
        id.bytes[..bytes.len()].copy_from_slice(bytes);
        Some(id)
    }

    /// Its bytes, 4 to 32.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }
}

impl AsRef<[u8]> for BuildId {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
    }
}

/// In lower-case hexadecimal digits, as all tools write it; `{:.12}` gives the first twelve.
impl fmt::Display for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut digits = [0; 2 * Self::MAX];
        let pairs = digits.as_chunks_mut::<2>().0.iter_mut().zip(self.as_bytes());
        let digit = |value: u8| b"0123456789abcdef"[usize::from(value)];
        pairs.for_each(|(pair, byte)| *pair = [digit(byte >> 4), digit(byte & 15)]);
        let digits = &digits[..2 * usize::from(self.length)];
        f.pad(std::str::from_utf8(digits).unwrap_or_default())
    }
}

impl fmt::Debug for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BuildId({self})")
    }
}

/// From hexadecimal digits of either case.
impl FromStr for BuildId {
    type Err = BadBuildId;

    fn from_str(text: &str) -> Result<Self, BadBuildId> {
        let digits = text.as_bytes().as_chunks::<2>();
        let (pairs, []) = digits else { return Err(BadBuildId) };
        let digit = |byte: u8| char::from(byte).to_digit(16).map(|value| value as u8);
        let byte = |&[high, low]: &[u8; 2]| Some(digit(high)? << 4 | digit(low)?);
        let bytes: Option<Vec<u8>> = pairs.iter().take(Self::MAX + 1).map(byte).collect();
        bytes.and_then(|bytes| Self::new(&bytes)).ok_or(BadBuildId)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn has_four_to_thirty_two_bytes() {
        let lengths = (0..80).filter(|&length| BuildId::new(&vec![7; length]).is_some());
        assert_eq!(lengths.collect::<Vec<_>>(), (4..=32).collect::<Vec<_>>());
    }

    #[test]
    fn is_read_from_digits_of_either_case_and_nothing_else() {
        let id = BuildId::new(&[0x0a, 0xbc, 0, 0xff]).unwrap();
        assert_eq!(id.to_string(), "0abc00ff");
        assert_eq!(format!("{id:.6} {id:.12}"), "0abc00 0abc00ff");
        assert_eq!("0ABC00ff".parse(), Ok(id));
        for text in ["", "0abc", "0abc00f", "0abc00fg", "+abc00ff", &"00".repeat(33)] {
            assert_eq!(text.parse::<BuildId>(), Err(BadBuildId), "{text}");
        }
    }

    proptest! {
        #[test]
        fn survives_its_text(bytes in prop::collection::vec(any::<u8>(), 4..=32)) {
            let id = BuildId::new(&bytes).unwrap();
            prop_assert_eq!(id.as_bytes(), &bytes[..]);
            prop_assert_eq!(id.to_string().parse(), Ok(id));
        }
    }
}
