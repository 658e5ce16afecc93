//! Words to the person at the terminal, who may have closed it: nothing depends on them being read.

use std::io::Write;

/// Writes a line to standard error; `eprintln!` would panic when nobody listens any more.
pub fn say(line: &str) {
    // See above.
    let _ = writeln!(std::io::stderr(), "{line}");
}
