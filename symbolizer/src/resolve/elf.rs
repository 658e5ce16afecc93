//! Names in an ELF file through blazesym: functions with inlined callees, files and lines.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};

use blazesym::symbolize::source::{Elf, Source};
use blazesym::symbolize::{CodeInfo, Input, Reason, Sym, Symbolized, Symbolizer};

use crate::profile::{Line, Quality, Resolution};

/// An ELF file in our hands: what was verified is what is read.
#[derive(Debug)]
pub struct Object {
    fd: OwnedFd,
}

impl Object {
    /// A file.
    #[must_use]
    pub fn of_file(file: File) -> Self {
        Self { fd: file.into() }
    }

    /// An image in memory.
    ///
    /// # Errors
    /// When the system has no memory to give.
    pub fn of_image(image: &[u8]) -> Result<Self, String> {
        let fd = rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC);
        let mut file = File::from(fd.map_err(|error| error.to_string())?);
        file.write_all(image).map_err(|error| error.to_string())?;
        Ok(Self::of_file(file))
    }

    /// Looks up file offsets, in order.
    ///
    /// # Errors
    /// When the file is no ELF file or is broken.
    pub fn symbolize(&self, offsets: &[u64]) -> Result<Vec<Resolution>, String> {
        let symbolizer = Symbolizer::builder().enable_auto_reload(false).build();
        // By descriptor and not by path: the path may lead elsewhere by now.
        let source = Source::from(Elf::new(format!("/proc/self/fd/{}", self.fd.as_raw_fd())));
        let symbols = symbolizer
            .symbolize(&source, Input::FileOffset(offsets))
            .map_err(|error| format!("cannot read its symbols: {error:#}"))?;
        Ok(symbols.into_iter().map(resolution).collect())
    }
}

fn resolution(symbol: Symbolized<'_>) -> Resolution {
    match symbol {
        Symbolized::Sym(symbol) => {
            let quality = if symbol.code_info.is_some() { Quality::Dwarf } else { Quality::Symtab };
            Resolution::Found { lines: lines(&symbol), quality }
        }
        Symbolized::Unknown(reason) => Resolution::Missing(
            match reason {
                Reason::MissingSyms => "the file has no symbols",
                Reason::UnknownAddr => "no symbol covers it",
                Reason::InvalidFileOffset => "not in a loaded segment of the file",
                _ => "the file cannot be read there",
            }
            .to_owned(),
        ),
    }
}

/// Innermost first. blazesym lists from the function that exists inwards.
fn lines(symbol: &Sym<'_>) -> Vec<Line> {
    let inlined = symbol.inlined.iter().map(|inner| line(&inner.name, inner.code_info.as_ref()));
    let mut lines = vec![line(&symbol.name, symbol.code_info.as_deref())];
    lines.extend(inlined);
    lines.reverse();
    lines
}

fn line(name: &str, code: Option<&CodeInfo<'_>>) -> Line {
    Line {
        function: name.to_owned(),
        file: code.map_or(String::new(), |code| code.to_path().display().to_string()),
        line: code.and_then(|code| code.line).unwrap_or(0),
    }
}
