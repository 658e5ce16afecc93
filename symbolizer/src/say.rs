//! Words to the person at the terminal, who may have closed it: nothing depends on them being read.

use std::io::Write;

use crate::export::plain::plain;

/// Writes lines to standard error, where names of strangers do nothing but be read; `eprintln!`
/// would panic when nobody listens any more.
pub fn say(text: &str) {
    for line in text.lines() {
        // See above.
        let _ = writeln!(std::io::stderr(), "{}", plain(line));
    }
}
