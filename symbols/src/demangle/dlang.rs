//! Names of D: the qualified name of a mangled symbol, without parameters. Pure.
//!
//! Grammar: "Name Mangling" of the D ABI, with the back references of 2018. Types are parsed only
//! to skip them, and arguments of templates are left out: `std.stdio.writeln!`. When any part of a
//! name is not D, the result is `None`.

/// Deepest nesting taken.
const MAX_DEPTH: u32 = 64;
/// Longest name made: back references let a short one stand for a long one.
const MAX_NAME: usize = 1 << 12;

/// The readable form of a name that begins with `_D`.
#[must_use]
pub fn demangle(mangled: &str) -> Option<String> {
    if mangled == "_Dmain" {
        return Some("D main".to_owned());
    }
    let mut parser = Parser { text: mangled.as_bytes(), at: 2, depth: 0 };
    mangled.starts_with("_D").then_some(())?;
    let mut name = String::new();
    parser.qualified(Some(&mut name))?;
    // `Z` stands in place of a type where there is none.
    if !parser.take(b'Z') {
        parser.take(b'M');
        parser.type_()?;
    }
    (parser.at == parser.text.len()).then_some(name)
}

struct Parser<'t> {
    text: &'t [u8],
    at: usize,
    depth: u32,
}

type Out<'o> = Option<&'o mut String>;

impl<'t> Parser<'t> {
    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn next(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    fn take(&mut self, byte: u8) -> bool {
        let is = self.peek() == Some(byte);
        self.at += usize::from(is);
        is
    }

    fn number(&mut self) -> Option<usize> {
        let digits = self.text[self.at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        let number = std::str::from_utf8(&self.text[self.at..self.at + digits]).ok()?;
        self.at += digits;
        number.parse().ok()
    }

    fn deeper<T>(&mut self, parse: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        self.depth += 1;
        let parsed = if self.depth <= MAX_DEPTH { parse(self) } else { None };
        self.depth -= 1;
        parsed
    }

    /// Where a back reference that begins here (at its `Q`) leads.
    fn target(&mut self) -> Option<usize> {
        let start = self.at;
        self.take(b'Q').then_some(())?;
        let mut distance = 0usize;
        loop {
            let digit = self.next()?;
            let (value, last) = match digit {
                b'A'..=b'Z' => (digit - b'A', false),
                b'a'..=b'z' => (digit - b'a', true),
                _ => return None,
            };
            distance = distance.checked_mul(26)?.checked_add(value.into())?;
            if last {
                return start.checked_sub(distance).filter(|_| distance > 0);
            }
        }
    }

    /// Whether a name begins here.
    fn is_name(&self) -> bool {
        match self.peek() {
            Some(b'0'..=b'9') => true,
            Some(b'_') => self.is_template(),
            Some(b'Q') => {
                let mut ahead = Parser { text: self.text, at: self.at, depth: 0 };
                ahead.target().is_some_and(|to| self.text[to].is_ascii_digit())
            }
            _ => false,
        }
    }

    fn is_template(&self) -> bool {
        let rest = &self.text[self.at..];
        rest.starts_with(b"__T") || rest.starts_with(b"__U")
    }

    /// Names, one in the other; functions have their parameters between.
    fn qualified(&mut self, mut out: Out<'_>) -> Option<()> {
        self.deeper(|parser| {
            loop {
                parser.name(out.as_deref_mut())?;
                if parser.is_name() {
                    continue;
                }
                // Of a function with another in it, or the type of the whole.
                let before = parser.at;
                parser.take(b'M');
                let nested = parser.modifiers().and_then(|()| parser.function(false));
                if nested.is_none() || !parser.is_name() {
                    parser.at = before;
                    return Some(());
                }
            }
        })
    }

    fn name(&mut self, mut out: Out<'_>) -> Option<()> {
        if let Some(out) = &mut out
            && !out.is_empty()
        {
            out.push('.');
        }
        if self.is_template() {
            return self.template(out);
        }
        if self.peek() == Some(b'Q') {
            let at = self.target()?;
            // Followed for the name alone: in arguments it would be followed over and over.
            return match out {
                Some(_) => Parser { text: self.text, at, depth: self.depth }.plain(out),
                None => Some(()),
            };
        }
        self.plain(out)
    }

    /// Length and identifier; an older template has a length as well.
    fn plain(&mut self, out: Out<'_>) -> Option<()> {
        let length = self.number()?;
        if self.is_template() {
            let end = self.at.checked_add(length)?;
            self.template(out)?;
            return (self.at == end).then_some(());
        }
        let identifier = self.text.get(self.at..self.at.checked_add(length)?)?;
        self.at += length;
        if let Some(out) = out {
            out.push_str(std::str::from_utf8(identifier).ok()?);
            (out.len() <= MAX_NAME).then_some(())?;
        }
        Some(())
    }

    /// `__T name arguments Z`.
    fn template(&mut self, mut out: Out<'_>) -> Option<()> {
        self.at += 3;
        self.deeper(|parser| {
            match parser.peek()? {
                b'Q' => {
                    let at = parser.target()?;
                    Parser { text: parser.text, at, depth: parser.depth }
                        .plain(out.as_deref_mut())?;
                }
                _ => parser.plain(out.as_deref_mut())?,
            }
            if let Some(out) = out {
                out.push('!');
            }
            while !parser.take(b'Z') {
                parser.take(b'H');
                match parser.next()? {
                    b'T' => parser.type_()?,
                    b'V' => {
                        parser.type_()?;
                        parser.value()?;
                    }
                    b'S' => parser.qualified(None)?,
                    b'X' => {
                        let length = parser.number()?;
                        parser.text.get(parser.at..parser.at.checked_add(length)?)?;
                        parser.at += length;
                    }
                    _ => return None,
                }
            }
            Some(())
        })
    }

    fn value(&mut self) -> Option<()> {
        self.deeper(|parser| match parser.peek()? {
            b'0'..=b'9' => parser.number().map(|_| ()),
            b'n' => parser.next().map(|_| ()),
            b'i' | b'N' => {
                parser.at += 1;
                parser.number().map(|_| ())
            }
            b'a' | b'w' | b'd' => {
                parser.at += 1;
                let length = parser.number()?;
                parser.take(b'_').then_some(())?;
                let end = parser.at.checked_add(length.checked_mul(2)?)?;
                parser.text.get(parser.at..end)?;
                parser.at = end;
                Some(())
            }
            b'A' | b'S' => {
                parser.at += 1;
                (0..parser.number()?).try_for_each(|_| parser.value())
            }
            b'e' => {
                let is_float = |byte: &u8| byte.is_ascii_hexdigit() || b"PNI".contains(byte);
                parser.at += 1;
                parser.at +=
                    parser.text[parser.at..].iter().take_while(|byte| is_float(byte)).count();
                Some(())
            }
            _ => None,
        })
    }

    fn modifiers(&mut self) -> Option<()> {
        loop {
            match self.text[self.at..] {
                [b'x' | b'y' | b'O', ..] => self.at += 1,
                [b'N', b'g', ..] => self.at += 2,
                _ => return Some(()),
            }
        }
    }

    fn type_(&mut self) -> Option<()> {
        self.deeper(|parser| match parser.peek()? {
            b'F' | b'U' | b'W' | b'V' | b'R' | b'Y' => parser.function(true),
            b'Q' => {
                let at = parser.target()?;
                // Only backwards, so that it ends; and not parsed again, since it was once.
                (at < parser.at).then_some(())
            }
            first => {
                parser.at += 1;
                match first {
                    b'A' | b'P' | b'x' | b'y' | b'O' => parser.type_(),
                    b'G' => {
                        parser.number()?;
                        parser.type_()
                    }
                    b'H' => {
                        parser.type_()?;
                        parser.type_()
                    }
                    b'N' => match parser.next()? {
                        b'g' | b'h' => parser.type_(),
                        b'n' => Some(()),
                        _ => None,
                    },
                    b'C' | b'S' | b'E' | b'T' | b'I' => parser.qualified(None),
                    b'D' => {
                        parser.modifiers()?;
                        match parser.peek()? {
                            b'Q' => parser.type_(),
                            _ => parser.function(true),
                        }
                    }
                    b'B' => (0..parser.number()?).try_for_each(|_| parser.type_()),
                    b'z' => parser.next().filter(|byte| b"ik".contains(byte)).map(|_| ()),
                    basic => b"vghstikmlfdeopjqrcbauwn".contains(&basic).then_some(()),
                }
            }
        })
    }

    /// Calling convention, attributes, parameters and, if asked for, what it returns.
    fn function(&mut self, returns: bool) -> Option<()> {
        self.deeper(|parser| {
            b"FUWVRY".contains(&parser.next()?).then_some(())?;
            while let [b'N', b'a'..=b'f' | b'i' | b'j' | b'l' | b'm', ..] = parser.text[parser.at..]
            {
                parser.at += 2;
            }
            loop {
                match parser.text[parser.at..] {
                    [b'X' | b'Y' | b'Z', ..] => {
                        parser.at += 1;
                        return if returns { parser.type_() } else { Some(()) };
                    }
                    [b'I' | b'J' | b'K' | b'L' | b'M', ..] => parser.at += 1,
                    [b'N', b'k', ..] => parser.at += 2,
                    _ => parser.type_()?,
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn qualified_names_as_binutils_has_them() {
        for (mangled, readable) in [
            ("_Dmain", "D main"),
            ("_D8demangle4testFaZv", "demangle.test"),
            ("_D8demangle4testFHiaZv", "demangle.test"),
            ("_D8demangle4testFDFiZaZv", "demangle.test"),
            ("_D8demangle4test6__initZ", "demangle.test.__init"),
            ("_D8demangle3foo3barMFNfxAyaJPiZi", "demangle.foo.bar"),
            ("_D8demangle3fooFiZ5innerMFZv", "demangle.foo.inner"),
            ("_D3std5stdio__T7writelnTAyaZQnFNfQjZv", "std.stdio.writeln!.writeln"),
            ("_D8demangle17__T4testTaTbTcTdZ4testFZv", "demangle.test!.test"),
            ("_D8demangle14__T4testVai97Z4testFZv", "demangle.test!.test"),
        ] {
            assert_eq!(demangle(mangled).as_deref(), Some(readable), "{mangled}");
        }
    }

    #[test]
    fn what_is_not_all_of_it_d_is_none() {
        for name in ["_D", "_D3", "_Dispatch", "_D3foo", "_D3foo3barFaZvx", "_D9999foo", "_D3fooQa"]
        {
            assert_eq!(demangle(name), None, "{name}");
        }
    }

    proptest! {
        #[test]
        fn never_panics(rest in "[0-9A-Za-z_]{0,60}") {
            let _ = demangle(&format!("_D{rest}"));
        }
    }
}
