//! Folded stacks: `comm;root;…;leaf count`, a line a stack, as flame graph tools read them.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, Write};

use rustc_hash::FxHashMap;
use stackwire_model::profile::{Executable, LocationId, Named, Sample, StackId};

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

const KERNEL_MARK: &str = "_[k]";
/// After functions a thread waits in, as wakeuptime.py has it.
pub(crate) const WAIT_MARK: &str = "_[w]";

impl Marks {
    /// Folded stacks as most tools write them.
    pub const KERNEL: Self = Self { all: false, inlined: true };
}

/// Stacks with what their samples count for, in order of their text: of the first series that has
/// samples.
pub(crate) fn lines(profile: Named<'_>, by: Option<&str>, marks: Marks) -> BTreeMap<String, u64> {
    let samples = profile.samples_of(profile.shown());
    lines_of(profile, samples.map(|sample| (sample, profile.share_of(sample))), by, marks)
}

/// Of these samples, each with what it counts for. With all marks, `_[w]` is after the kernel
/// functions a thread waits in, or after the innermost function where there is none.
pub(crate) fn lines_of<'a>(
    profile: Named<'a>,
    samples: impl Iterator<Item = (&'a Sample, u64)>,
    by: Option<&str>,
    marks: Marks,
) -> BTreeMap<String, u64> {
    // Threads of one name share stacks: each is put into words once.
    let mut counts = FxHashMap::default();
    for (sample, weight) in samples {
        let thread = &profile.threads[sample.key.thread.index()];
        let first = match by {
            None => Cow::Borrowed(profile.processes[thread.process.index()].comm.as_str()),
            Some(key) => profile.label(sample.key, key).unwrap_or("?".into()),
        };
        let waits = marks.all && profile.series_of(sample.key.series).event.is_wait;
        let stack = (first, sample.key.kernel, sample.key.user, waits);
        counts.entry(stack).or_insert((sample.key, 0)).1 += weight;
    }
    let frames: Vec<String> = (0..profile.locations.len() as u32)
        .map(|index| frames_at(profile, LocationId(index), marks))
        .collect();
    let (mut folded, mut stack) = (BTreeMap::new(), Vec::new());
    for ((first, .., waits), (key, count)) in counts {
        let mut line = clean(&first);
        stack.extend(profile.frames(key));
        for location in stack.drain(..).rev() {
            let frames = &frames[location.index()];
            if waits {
                line.push_str(&frames.replace(KERNEL_MARK, WAIT_MARK));
            } else {
                line.push_str(frames);
            }
        }
        if waits && !line.ends_with(WAIT_MARK) {
            line.push_str(WAIT_MARK);
        }
        // A profile without names of processes begins with functions.
        let line = line.strip_prefix(';').map(str::to_owned).unwrap_or(line);
        *folded.entry(line).or_insert(0) += count;
    }
    folded
}

/// A stack as text, `root;…;leaf`.
pub(crate) fn stack(profile: Named<'_>, user: Option<StackId>, kernel: Option<StackId>) -> String {
    let frames = [kernel, user].into_iter().flatten().flat_map(|part| profile.profile.stack(part));
    let frames: Vec<LocationId> = frames.collect();
    let of = |&location: &LocationId| frames_at(profile, location, Marks::KERNEL);
    let text: String = frames.iter().rev().map(of).collect();
    text.strip_prefix(';').unwrap_or_default().to_owned()
}

/// The functions at a location, the outermost first, each after a semicolon.
fn frames_at(profile: Named<'_>, location: LocationId, marks: Marks) -> String {
    let executable = &profile.executables[profile.locations[location.index()].executable.index()];
    let functions = profile.lines(location).into_iter().rev().enumerate();
    let shown = functions.take_while(|(depth, _)| *depth == 0 || marks.inlined);
    let marked = shown.map(|(depth, line)| {
        let mark = match executable {
            kernel if kernel.is_kernel() => KERNEL_MARK,
            _ if marks.all && depth > 0 => "_[i]",
            Executable::Anonymous | Executable::Code(_) if marks.all => "_[j]",
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
