//! Folded stacks: `comm;root;…;leaf count`, a line a stack, as flame graph tools read them.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, Write};

use rustc_hash::FxHashMap;
use stackwire_model::profile::{Executable, LocationId, Named};

use crate::plain;

/// Writes the profile. Inlined functions are frames of their own, and kernel functions end in
/// `_[k]`. Stacks begin with the command, or with the label asked for (`by`). Only the first series
/// that has samples is written: counts of another series would mean nothing beside them.
///
/// # Errors
/// Those of the writer.
pub fn write(profile: Named<'_>, by: Option<&str>, mut out: impl Write) -> io::Result<()> {
    for (stack, count) in lines(profile, by, Marks::KERNEL) {
        writeln!(out, "{stack} {count}")?;
    }
    out.flush()
}

/// Which frames there are, and which say what they are, as stackcollapse-perf.pl has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Marks {
    /// `_[j]` after functions made at run time, `_[i]` after inlined ones; those of the kernel
    /// always end in `_[k]`.
    pub all: bool,
    /// Inlined functions are frames of their own.
    pub inlined: bool,
}

impl Marks {
    /// Folded stacks as most tools write them.
    pub const KERNEL: Self = Self { all: false, inlined: true };
}

/// Stacks with what their samples count for, in order of their text.
pub(crate) fn lines(profile: Named<'_>, by: Option<&str>, marks: Marks) -> BTreeMap<String, u64> {
    // Threads of one name share stacks: each is put into words once.
    let mut counts = FxHashMap::default();
    for sample in profile.samples_of(profile.shown()) {
        let thread = &profile.threads[sample.key.thread.index()];
        let first = match by {
            None => Cow::Borrowed(profile.processes[thread.process.index()].comm.as_str()),
            Some(key) => profile.label(sample.key, key).unwrap_or("?".into()),
        };
        let stack = (first, sample.key.kernel, sample.key.user);
        counts.entry(stack).or_insert((sample.key, 0)).1 += profile.share_of(sample);
    }
    let frames: Vec<String> = (0..profile.locations.len() as u32)
        .map(|index| frames(profile, LocationId(index), marks))
        .collect();
    let (mut folded, mut stack) = (BTreeMap::new(), Vec::new());
    for ((first, ..), (key, count)) in counts {
        let mut line = clean(&first);
        stack.extend(profile.frames(key));
        for location in stack.drain(..).rev() {
            line.push_str(&frames[location.index()]);
        }
        // A profile without names of processes begins with functions.
        let line = line.strip_prefix(';').map(str::to_owned).unwrap_or(line);
        *folded.entry(line).or_insert(0) += count;
    }
    folded
}

/// The functions at a location, the outermost first, each after a semicolon.
fn frames(profile: Named<'_>, location: LocationId, marks: Marks) -> String {
    let executable = &profile.executables[profile.locations[location.index()].executable.index()];
    let functions = profile.lines(location).into_iter().rev().enumerate();
    let shown = functions.take_while(|(depth, _)| *depth == 0 || marks.inlined);
    let marked = shown.map(|(depth, line)| {
        let mark = match executable {
            kernel if kernel.is_kernel() => "_[k]",
            _ if marks.all && depth > 0 => "_[i]",
            Executable::Anonymous if marks.all => "_[j]",
            _ => "",
        };
        format!(";{}{mark}", clean(&line.function))
    });
    marked.collect()
}

/// Semicolons separate frames and newlines stacks.
pub(crate) fn clean(name: &str) -> String {
    plain(name).replace(';', ":")
}
