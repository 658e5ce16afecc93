//! Mangled names made readable. Pure.
//!
//! Only names that are mangled: `cpp_demangle` takes any that parses as a type, and would call the
//! C function `i` "int" and `t` "unsigned short".

mod dlang;

use std::borrow::Cow;

use cpp_demangle::DemangleOptions;

/// The readable form of a mangled name; any other name as it is.
#[must_use]
pub fn demangle(name: &str) -> Cow<'_, str> {
    let readable = at_once(name).or_else(|| in_pieces(name, usize::MAX)?.0);
    readable.map_or(Cow::Borrowed(name), Cow::Owned)
}

/// The readable form of a name that is mangled as its compiler says. Takes time in proportion to
/// the name and its readable form; [`demangle`] may try a part of a name many times.
#[must_use]
pub fn at_once(name: &str) -> Option<String> {
    let is = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    // Rust first: its old mangling is C++'s with a hash at the end, which the alternate form leaves
    // out.
    if is(&["_R", "_ZN", "__ZN"])
        && let Ok(readable) = rustc_demangle::try_demangle(name)
    {
        return Some(format!("{readable:#}"));
    }
    if is(CPP) {
        return cpp(name);
    }
    // Names of Swift stay as they are: nothing but Swift's own library reads all of them.
    if is(&["_D"]) { dlang::demangle(name) } else { None }
}

/// What mangled names of C++ begin with.
const CPP: &[&str] = &["_Z", "__Z"];

fn cpp(name: &str) -> Option<String> {
    let symbol = cpp_demangle::Symbol::new(name).ok()?;
    let mut readable = Bounded(String::new());
    // Substitutions let a kilobyte stand for gigabytes; what is beyond the bound stays mangled.
    symbol.structured_demangle(&mut readable, &DemangleOptions::default()).ok()?;
    // An empty pack of parameters leaves its comma behind.
    Some(if readable.0.contains("operator,") {
        readable.0
    } else {
        readable.0.replace(", >", ">").replace(", )", ")")
    })
}

/// Ends of names tried, and the longest mangled name they are tried in.
const MAX_ENDS: usize = 64;
const MAX_MANGLED: usize = 4096;

/// The name alone of what has types that cannot be read, and how many bytes were parsed for it;
/// `None` when that would take more than `most`. GCC mangles `enable_if<…::value>` in a way of its
/// own (cpp_demangle's issue 308), as in the return type of `std::swap<int>`.
pub fn in_pieces(name: &str, most: usize) -> Option<(Option<String>, usize)> {
    let mut parsed = 0;
    if !CPP.iter().any(|prefix| name.starts_with(prefix)) {
        return Some((None, parsed));
    }
    let name = name.get(..name.len().min(MAX_MANGLED)).unwrap_or_default();
    // Names with parameters of a template, which alone have such types, end in E.
    let ends = name.bytes().enumerate().filter(|(_, byte)| *byte == b'E').take(MAX_ENDS);
    for (end, _) in ends {
        parsed += end;
        if parsed > most {
            return None;
        }
        let readable = cpp(&name[..=end]);
        if readable.is_some() {
            return Some((readable, parsed));
        }
    }
    Some((None, parsed))
}

/// Longest readable name made of a mangled one.
const MAX_READABLE: usize = 1 << 16;

/// Text that refuses to grow beyond a bound.
struct Bounded(String);

impl std::fmt::Write for Bounded {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        if self.0.len() + text.len() > MAX_READABLE {
            return Err(std::fmt::Error);
        }
        self.0.push_str(text);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mangled_names_are_made_readable() {
        assert_eq!(demangle("_Z4workm"), "work(unsigned long)");
        assert_eq!(demangle("_ZN4core3fmt5write17h0123456789abcdefE"), "core::fmt::write");
        assert_eq!(demangle("_RNvC6_123foo3bar"), "123foo::bar");
        assert_eq!(demangle("_ZN2AMI2FnJEE2goEPS1_"), "AM<Fn>::go(AM<Fn>*)");
        // GCC 12's, of `nm` on `template void std::swap<int>(int&, int&)` and the same of strings.
        let of_gcc = "NSt9enable_ifIXsrSt6__and_IJSt6__not_ISt15__is_tuple_likeIT_EESt21is_move_constructibleIS4_ESt18is_move_assignableIS4_EEE5valueEvE4typeERS4_SE_";
        assert_eq!(demangle(&format!("_ZSt4swapIiE{of_gcc}")), "std::swap<int>");
        assert_eq!(demangle(&format!("_ZN1a4swapIPKcEE{of_gcc}")), "a::swap<char const*>");
        assert_eq!(demangle("_ZSt4swapE!"), "_ZSt4swapE!");
    }

    #[test]
    fn names_of_c_stay_what_they_are() {
        for name in [
            "$s4main3fooyyF",
            "_$s4main3fooyyF",
            "_T04main3fooyyF",
            "_Dispatch",
            "a",
            "i",
            "t",
            "z",
            "Pc",
            "PKc",
            "St",
            "Ss",
            "Dn",
            "main",
            "_start",
            "_Zebra",
            "_R",
            "",
        ] {
            assert_eq!(demangle(name), name);
        }
    }
}
