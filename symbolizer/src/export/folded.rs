//! Folded stacks: `comm;root;…;leaf count`, a line a stack, as flame graph tools read them.

use std::collections::BTreeMap;
use std::io::{self, Write};

use super::plain::plain;
use crate::profile::Profile;

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
    let mut folded = BTreeMap::new();
    for sample in &profile.samples {
        let thread = &profile.threads[sample.key.thread.index()];
        let process = &profile.processes[thread.process.index()];
        let mut line = match by {
            None => clean(&process.comm),
            Some(key) => clean(&profile.label(sample.key, key).unwrap_or("?".into())),
        };
        for location in profile.frames(sample.key).rev() {
            let executable = profile.locations[location.index()].executable;
            let kernel = profile.executables[executable.index()].is_kernel();
            for function in profile.lines(location).iter().rev() {
                line.push(';');
                line.push_str(&clean(&function.function));
                if kernel {
                    line.push_str("_[k]");
                }
            }
        }
        *folded.entry(line).or_insert(0) += sample.count;
    }
    folded
}

/// Semicolons separate frames and newlines stacks.
fn clean(name: &str) -> String {
    plain(name).replace(';', ":")
}
