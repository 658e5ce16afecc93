//! What resolving gives: functions at a place, how good that answer is, where it is from.

use std::sync::Arc;

use bytestring::ByteString;

use super::{LocationId, Missing, Profile, Quality};
use crate::Address;

/// What one resolution of a profile found.
#[derive(Clone, Debug, Default)]
pub struct Names {
    /// By location; empty: nobody has looked.
    pub resolutions: Vec<Resolution>,
    /// By executable: where its names came from or why there are none.
    pub sources: Vec<Source>,
}

impl Names {
    /// A profile with these names, which must be its own.
    #[must_use]
    pub fn of<'a>(&'a self, profile: &'a Profile) -> Named<'a> {
        Named { profile, names: self }
    }
}

/// A profile with its names: what writers take.
#[derive(Clone, Copy, Debug)]
pub struct Named<'a> {
    /// What was captured.
    pub profile: &'a Profile,
    /// What it is called.
    pub names: &'a Names,
}

impl std::ops::Deref for Named<'_> {
    type Target = Profile;

    fn deref(&self) -> &Profile {
        self.profile
    }
}

impl Named<'_> {
    /// Names of a location, the innermost inlined function first. Without a name, it is the place
    /// where its function begins, or else its own address.
    #[must_use]
    pub fn lines(&self, location: LocationId) -> Vec<Line> {
        match self.names.resolutions.get(location.index()) {
            Some(Resolution::Found { lines, .. }) => lines.to_vec(),
            missing => {
                let found = &self.locations[location.index()];
                let start = match missing {
                    Some(Resolution::Missing(missing)) => missing.start,
                    _ => None,
                };
                let path = self.executables[found.executable.index()].name();
                let function = place(&path, start.unwrap_or(found.address));
                vec![Line { function: function.into(), ..Line::default() }]
            }
        }
    }
}

/// What became of a location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// Names were found.
    Found {
        /// Innermost inlined function first, the function that exists last.
        lines: Arc<[Line]>,
        /// Where they came from.
        quality: Quality,
    },
    /// There is no name.
    Missing(Missing),
}

/// What outputs show of code without a name: the file and an offset in it, as `nginx+0x4a00`.
#[must_use]
pub fn place(path: &str, address: Address) -> String {
    format!("{}+0x{:x}", base(path), address.number())
}

/// Whether a name is none but such a [`place`] in this file.
#[must_use]
pub fn is_place(path: &str, name: &str) -> bool {
    let offset = name.strip_prefix(base(path)).and_then(|rest| rest.strip_prefix("+0x"));
    offset.is_some_and(|hex| u64::from_str_radix(hex, 16).is_ok())
}

fn base(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// A function at a place in a source file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Line {
    /// Demangled name.
    pub function: ByteString,
    /// Source file, empty when unknown.
    pub file: ByteString,
    /// Line, 0 when unknown.
    pub line: u32,
}

/// Where the names of an executable are from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// A file or an address; empty when there are no names.
    pub origin: String,
    /// What was looked for and not found, or is broken.
    pub notes: Vec<String>,
    /// A server was asked and did not give what it was asked for.
    pub fetch_failed: bool,
    /// How good the names were that the symbol cache had before (`Some(None)`: it had none).
    pub upgraded_from: Option<Option<Quality>>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FileOffset;

    #[test]
    fn a_place_is_not_taken_for_a_name() {
        let at = |number| Address::File(FileOffset(number));
        assert_eq!(place("/usr/sbin/nginx", at(0x4a00)), "nginx+0x4a00");
        assert!(is_place("/opt/nginx", &place("/usr/sbin/nginx", at(u64::MAX))));
        assert!(is_place("[jit]", "[jit]+0x7f00"));
        for name in ["nginx", "nginx+0x", "nginx+0xg", "other+0x10", "nginx+16"] {
            assert!(!is_place("/usr/sbin/nginx", name), "{name}");
        }
    }
}
