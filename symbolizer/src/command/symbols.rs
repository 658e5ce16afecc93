//! The options every command that looks for symbols has, as sources.

use stackwire::Sources;

use crate::cli::SymbolOptions;

impl SymbolOptions {
    /// Where to look.
    pub fn sources(&self) -> Sources {
        let mut sources = Sources::default();
        sources.debug_dirs.clone_from(&self.debug_dirs);
        sources.demangle = !self.no_demangle;
        sources
    }
}
