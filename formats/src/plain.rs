//! Text that processes chose (names of threads, files, functions), made fit for a terminal and for
//! one line.

/// The text with control characters, escape sequences and changes of direction among them, replaced
/// by `?`.
#[must_use]
pub fn plain(text: &str) -> String {
    let turns = |c| matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    text.chars().map(|c| if c.is_control() || turns(c) { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_reaches_the_terminal_but_text() {
        assert_eq!(plain("a\u{1b}[2Jb\nc\u{9b}d é\u{202e}"), "a?[2Jb?c?d é?");
    }
}
