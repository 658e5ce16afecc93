//! What blobs are called. Ids are checked here, before they touch a path.

use std::path::{Path, PathBuf};

use stackwire_model::BuildId;

/// Lower-case hex of 8 to 64 digits, an even number of them.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(String);

/// Text that is no id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an id: hex of 8 to 64 digits is")]
pub struct BadId;

impl Id {
    /// Of a SHA-256.
    #[must_use]
    pub fn of_hash(hash: [u8; 32]) -> Self {
        Self(hash.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// The digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<BuildId> for Id {
    fn from(id: BuildId) -> Self {
        Self(id.to_string())
    }
}

impl std::str::FromStr for Id {
    type Err = BadId;

    fn from_str(text: &str) -> Result<Self, BadId> {
        let hex = text.bytes().all(|digit| digit.is_ascii_hexdigit());
        let good = hex && (8..=64).contains(&text.len()) && text.len().is_multiple_of(2);
        if good { Ok(Self(text.to_ascii_lowercase())) } else { Err(BadId) }
    }
}

impl std::fmt::Display for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a blob is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// An executable as it was mapped.
    Executable,
    /// A separate debug file.
    Debuginfo,
    /// A compiled table of this format.
    Table(u8),
    /// An executable that a collector handed over, by what it is and whose.
    Handed,
    /// A compiled table of this format, of such an executable.
    HandedTable(u8),
    /// Anything else, by hash or boot id.
    Other,
}

impl Kind {
    /// For the index and for people.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Executable => "executable".to_owned(),
            Self::Debuginfo => "debuginfo".to_owned(),
            Self::Table(version) => format!("table.v{version}"),
            Self::Handed => "handed-over".to_owned(),
            Self::HandedTable(version) => format!("handed-over-table.v{version}"),
            Self::Other => "other".to_owned(),
        }
    }

    /// The kind of this name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        match name {
            "executable" => Some(Self::Executable),
            "debuginfo" => Some(Self::Debuginfo),
            "other" => Some(Self::Other),
            "handed-over" => Some(Self::Handed),
            _ => match name.strip_prefix("handed-over-table.v") {
                Some(version) => version.parse().ok().map(Self::HandedTable),
                None => name.strip_prefix("table.v")?.parse().ok().map(Self::Table),
            },
        }
    }
}

/// A blob's name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Whose.
    pub id: Id,
    /// What.
    pub kind: Kind,
}

impl Key {
    /// A name.
    #[must_use]
    pub fn new(id: Id, kind: Kind) -> Self {
        Self { id, kind }
    }

    /// Where the blob lies below `directory`.
    #[must_use]
    pub fn path(&self, directory: &Path) -> PathBuf {
        let (first, rest) = self.id.0.split_at(2);
        match self.kind {
            Kind::Executable => directory.join(".build-id").join(first).join(rest),
            Kind::Debuginfo => {
                directory.join(".build-id").join(first).join(format!("{rest}.debug"))
            }
            Kind::Table(version) => {
                directory.join("tables").join(first).join(format!("{rest}.v{version}"))
            }
            Kind::Handed => directory.join("handed-over").join(first).join(rest),
            Kind::HandedTable(version) => {
                directory.join("handed-over").join(first).join(format!("{rest}.v{version}"))
            }
            Kind::Other => directory.join("blobs").join(first).join(rest),
        }
    }

    /// The key of a file found at `first/name` below one of the directories of blobs.
    pub(crate) fn of_path(directory: &str, first: &str, name: &str) -> Option<Self> {
        let number = |version: &str| version.strip_prefix('v')?.parse().ok();
        let (rest, kind) = match (directory, name.rsplit_once('.')) {
            (".build-id", None) => (name, Kind::Executable),
            (".build-id", Some((rest, "debug"))) => (rest, Kind::Debuginfo),
            ("tables", Some((rest, version))) => (rest, Kind::Table(number(version)?)),
            ("handed-over", None) => (name, Kind::Handed),
            ("handed-over", Some((rest, version))) => (rest, Kind::HandedTable(number(version)?)),
            ("blobs", None) => (name, Kind::Other),
            _ => return None,
        };
        let id = format!("{first}{rest}").parse().ok()?;
        (first.len() == 2).then_some(Self { id, kind })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ids_are_hex_of_8_to_64_digits() {
        for bad in [
            "",
            "1234567",
            "123456789",
            "../../../etc/passwd",
            "abcdefgh",
            "ab cd ef",
            &"a".repeat(66),
        ] {
            assert_eq!(bad.parse::<Id>(), Err(BadId), "{bad}");
        }
        assert_eq!("DEADBEEF".parse::<Id>().unwrap().as_str(), "deadbeef");
    }

    proptest! {
        #[test]
        fn a_key_is_known_by_its_path(bytes in prop::collection::vec(any::<u8>(), 4..32), kind in 0usize..6) {
            let kind = [
                Kind::Executable,
                Kind::Debuginfo,
                Kind::Table(3),
                Kind::Handed,
                Kind::HandedTable(3),
                Kind::Other,
            ][kind];
            let key = Key::new(BuildId::new(&bytes).unwrap().into(), kind);
            let path = key.path(Path::new(""));
            let parts: Vec<_> = path.iter().map(|part| part.to_str().unwrap()).collect();
            prop_assert_eq!(Key::of_path(parts[0], parts[1], parts[2]), Some(key));
            prop_assert_eq!(Kind::of_name(&kind.name()), Some(kind));
        }
    }
}
