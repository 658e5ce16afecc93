//! Folded stacks: `comm;root;…;leaf count`, a line a stack, as flame graph tools read them.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, Write};

use rustc_hash::FxHashMap;

use super::plain::plain;
use crate::profile::{LocationId, Profile};

/// Writes the profile; inlined functions are frames of their own, kernel functions end in `_[k]`. Stacks begin with the
/// command, or with the label asked for (`by`).
///
/// # Errors
/// Those of the writer.
pub fn write(profile: &Profile, by: Option<&str>, mut out: impl Write) -> io::Result<()> {
    for (stack, count) in lines(profile, by) {
        writeln!(out, "{stack} {count}")?;
    }
    out.flush()
}

/// Stacks with their sample counts, in order of their text.
pub(super) fn lines(profile: &Profile, by: Option<&str>) -> BTreeMap<String, u64> {
    // Threads of one name share stacks: each is put into words once.
    let mut counts = FxHashMap::default();
    for sample in &profile.samples {
        let thread = &profile.threads[sample.key.thread.index()];
        let first = match by {
            None => Cow::Borrowed(profile.processes[thread.process.index()].comm.as_str()),
            Some(key) => profile.label(sample.key, key).unwrap_or("?".into()),
        };
        let stack = (first, sample.key.kernel, sample.key.user);
        counts.entry(stack).or_insert((sample.key, 0)).1 += sample.count;
    }
    let frames: Vec<String> = (0..profile.locations.len() as u32)
        .map(|index| frames(profile, LocationId(index)))
        .collect();
    let mut folded = BTreeMap::new();
    for ((first, ..), (key, count)) in counts {
        let mut line = clean(&first);
        for location in profile.frames(key).rev() {
            line.push_str(&frames[location.index()]);
        }
        // A profile without names of processes begins with functions.
        let line = line.strip_prefix(';').map(str::to_owned).unwrap_or(line);
        *folded.entry(line).or_insert(0) += count;
    }
    folded
}

/// The functions at a location, the outermost first, each after a semicolon.
fn frames(profile: &Profile, location: LocationId) -> String {
    let executable = profile.locations[location.index()].executable;
    let mark = if profile.executables[executable.index()].is_kernel() { "_[k]" } else { "" };
    let functions = profile.lines(location).into_iter().rev();
    functions.map(|line| format!(";{}{mark}", clean(&line.function))).collect()
}

/// Semicolons separate frames and newlines stacks.
fn clean(name: &str) -> String {
    plain(name).replace(';', ":")
}
