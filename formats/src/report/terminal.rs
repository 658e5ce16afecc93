//! A report on a terminal: no line is longer than the window, and what is hot is coloured as perf
//! does it.

use std::io::{self, Write};

/// From this share on red, from the next on green.
const HOT: f64 = 5.0;
const WARM: f64 = 0.5;

/// Cuts and colours lines on their way to a terminal.
#[derive(Debug)]
pub struct Terminal<W: Write> {
    out: W,
    width: usize,
    coloured: bool,
    line: Vec<u8>,
}

impl<W: Write> Terminal<W> {
    /// For a window of so many columns.
    pub fn new(out: W, width: usize, coloured: bool) -> Self {
        Self { out, width: width.max(20), coloured, line: Vec::new() }
    }

    fn end_line(&mut self) -> io::Result<()> {
        let text = String::from_utf8_lossy(&self.line).into_owned();
        self.line.clear();
        let mut shown: String = text.chars().take(self.width).collect();
        if text.chars().count() > self.width {
            shown = shown.chars().take(self.width - 1).chain(['…']).collect();
        }
        // A line begins with the share it is about, if it is about one.
        let colour = shown.split_once(" %").filter(|_| self.coloured).and_then(|(before, _)| {
            match before.trim().parse::<f64>().ok()? {
                HOT.. => Some("\x1b[31m"),
                WARM.. => Some("\x1b[32m"),
                _ => None,
            }
        });
        match colour {
            Some(colour) => {
                let (before, after) = shown.split_once(" %").unwrap_or((&shown, ""));
                writeln!(self.out, "{colour}{before} %\x1b[0m{after}")
            }
            None => writeln!(self.out, "{shown}"),
        }
    }
}

impl<W: Write> Write for Terminal<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            let (text, ends) = match piece.strip_suffix(b"\n") {
                Some(text) => (text, true),
                None => (piece, false),
            };
            self.line.extend_from_slice(text);
            if ends {
                self.end_line()?;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_to_the_window_and_hot_ones_red() {
        let mut out = Vec::new();
        let mut terminal = Terminal::new(&mut out, 24, true);
        let text = " 57.77 %    1152  a_function_with_a_long_name\n  0.70 %  warm\n  0.10 %  cold\nnote: ä 9 %\n   120  93.5 %  x\n";
        assert!(terminal.write_all(text.as_bytes()).is_ok());
        let text = String::from_utf8_lossy(&out);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "\x1b[31m 57.77 %\x1b[0m    1152  a_fun…");
        assert_eq!(lines[1], "\x1b[32m  0.70 %\x1b[0m  warm");
        assert_eq!(lines[2..], ["  0.10 %  cold", "note: ä 9 %", "   120  93.5 %  x"]);
    }
}
