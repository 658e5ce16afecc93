//! Mangled names made readable. Pure.
//!
//! Only names that are mangled: `cpp_demangle` takes any that parses as a type, and would call the C function
//! `i` "int" and `t` "unsigned short".

use crate::profile::Line;
use crate::table::Frame;

/// A frame of a table as a line of a profile.
#[must_use]
pub fn line(frame: Frame<'_>, readable: bool) -> Line {
    Line {
        function: if readable { demangle(frame.function) } else { frame.function.to_owned() },
        file: frame.file.to_owned(),
        line: frame.line,
    }
}

/// The readable form of a mangled name; any other name as it is.
#[must_use]
pub fn demangle(name: &str) -> String {
    let is = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    // Rust first: its old mangling is C++'s with a hash at the end, which the alternate form leaves out.
    if is(&["_R", "_ZN", "__ZN"])
        && let Ok(readable) = rustc_demangle::try_demangle(name)
    {
        return format!("{readable:#}");
    }
    if is(&["_Z", "__Z"])
        && let Ok(symbol) = cpp_demangle::Symbol::new(name)
        && let Ok(readable) = symbol.demangle()
    {
        return readable;
    }
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mangled_names_are_made_readable() {
        assert_eq!(demangle("_Z4workm"), "work(unsigned long)");
        assert_eq!(demangle("_ZN4core3fmt5write17h0123456789abcdefE"), "core::fmt::write");
        assert_eq!(demangle("_RNvC6_123foo3bar"), "123foo::bar");
    }

    #[test]
    fn names_of_c_stay_what_they_are() {
        for name in [
            "a", "i", "t", "z", "Pc", "PKc", "St", "Ss", "Dn", "main", "_start", "_Zebra", "_R", "",
        ] {
            assert_eq!(demangle(name), name);
        }
    }
}
