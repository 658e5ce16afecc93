//! What a flame graph says of the function under the pointer, besides its number of samples: its
//! file, the line with most samples, and its module. Pure. Called by `write.rs`.
//!
//! inferno writes either the number of samples or a text of ours, never both. So our text is added
//! to what inferno wrote.

use std::cmp::Reverse;
use std::collections::HashMap;

use rustc_hash::FxHashMap;
use stackwire_model::profile::{LocationId, Named};

use crate::folded::clean;
use crate::plain;

/// Texts by the names of functions, both as XML has them.
#[derive(Debug, Default)]
pub(super) struct Tooltips(HashMap<String, String>);

impl Tooltips {
    /// Those of all functions of a profile.
    pub fn of(profile: Named<'_>) -> Self {
        let mut counts: FxHashMap<LocationId, u64> = FxHashMap::default();
        for sample in profile.samples_of(profile.shown()) {
            for location in profile.frames(sample.key) {
                *counts.entry(location).or_default() += profile.share_of(sample);
            }
        }
        let mut functions: HashMap<String, Places> = HashMap::new();
        for (location, count) in counts {
            let executable = profile.locations[location.index()].executable;
            let module = plain(&profile.executables[executable.index()].name());
            for line in profile.lines(location) {
                let places = functions.entry(clean(&line.function)).or_default();
                *places.modules.entry(module.clone()).or_default() += count;
                if !line.file.is_empty() {
                    *places.lines.entry((plain(&line.file), line.line)).or_default() += count;
                }
            }
        }
        let texts =
            functions.into_iter().map(|(name, places)| (escape(&name), escape(&places.text())));
        Self(texts.collect())
    }

    /// A picture of inferno with them.
    pub fn add_to(&self, svg: &str) -> String {
        let mut out = String::with_capacity(svg.len() * 5 / 4);
        let mut parts = svg.split(END);
        let mut part = parts.next().unwrap_or_default();
        for next in parts {
            out.push_str(part);
            // The name is followed by the number of samples.
            let title = part.rsplit_once(BEGIN).and_then(|(_, title)| title.rsplit_once(" ("));
            if let Some(text) = title.and_then(|(name, _)| self.0.get(name)) {
                out.push('\n');
                out.push_str(text);
            }
            out.push_str(END);
            part = next;
        }
        out.push_str(part);
        // What is written on a frame is what its title has in front of the number.
        out.replace(LABEL, FIRST_LINE)
    }
}

const BEGIN: &str = "<title>";
const END: &str = "</title>";
const LABEL: &str = r#".textContent.replace(/\([^(]*\)$/,"")"#;
const FIRST_LINE: &str = r#".textContent.split("\n")[0].replace(/\([^(]*\)$/,"")"#;

/// Where a function was met, and how often.
#[derive(Default)]
struct Places {
    modules: HashMap<String, u64>,
    lines: HashMap<(String, u32), u64>,
}

impl Places {
    fn text(&self) -> String {
        let module = self.modules.iter().max_by_key(|&(name, count)| (count, Reverse(name)));
        let module = module.map(|(name, _)| name.as_str()).unwrap_or_default();
        let module = match self.modules.len() - 1 {
            0 => module.to_owned(),
            more => format!("{module} and {more} more"),
        };
        match self.lines.iter().max_by_key(|&(line, count)| (count, Reverse(line))) {
            Some(((file, 0), _)) => format!("{file}\n{module}"),
            Some(((file, line), _)) => format!("most often at {file}:{line}\n{module}"),
            None => module,
        }
    }
}

/// As inferno writes text.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_title_of_a_function_gets_its_text_and_others_none() {
        let text = ("a(b) &lt;c&gt;".to_owned(), "/x\n/y".to_owned());
        let svg = "<title>all (9 samples, 100%)</title><g><title>a(b) &lt;c&gt; (7 samples, 70%)</title></g>";
        let expected = "<title>all (9 samples, 100%)</title><g><title>a(b) &lt;c&gt; (7 samples, 70%)\n/x\n/y</title></g>";
        assert_eq!(Tooltips(HashMap::from([text])).add_to(svg), expected);
    }

    #[test]
    fn the_place_met_most_is_told() {
        let lines =
            [(("a.c".to_owned(), 3), 5), (("a.c".to_owned(), 4), 5), (("b.h".to_owned(), 0), 2)];
        let modules = [("/x".to_owned(), 9), ("/y".to_owned(), 3)];
        let mut places = Places { modules: modules.into(), lines: lines.into() };
        assert_eq!(places.text(), "most often at a.c:3\n/x and 1 more");
        places.lines.retain(|(_, line), _| *line == 0);
        assert_eq!(places.text(), "b.h\n/x and 1 more");
        places.lines.clear();
        assert_eq!(places.text(), "/x and 1 more");
    }

    #[test]
    fn inferno_takes_labels_from_titles_as_it_did() {
        let mut svg = Vec::new();
        let mut options = inferno::flamegraph::Options::default();
        assert!(inferno::flamegraph::from_lines(&mut options, ["a;b 1"], &mut svg).is_ok());
        assert_eq!(String::from_utf8_lossy(&svg).matches(LABEL).count(), 2);
    }
}
