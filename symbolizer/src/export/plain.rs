//! Text that processes chose (names of threads, files, functions), made fit for a terminal and for one line.

/// The text with control characters, escape sequences among them, replaced by `?`.
pub(crate) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_reaches_the_terminal_but_text() {
        assert_eq!(plain("a\u{1b}[2Jb\nc\u{9b}d é"), "a?[2Jb?c?d é");
    }
}
