//! Folded stacks: `comm;root;…;leaf count`, as perf's and our own tools write them.

use std::io::{BufRead, BufReader, Read};
use std::sync::Arc;

use rustc_hash::FxHashMap;
use stackwire_model::profile::{
    Builder, EndReason, Executable, Line, Origin, Process, SampleKey, StackId, Thread, ThreadId,
};
use stackwire_model::{Event, ValueKind};

use crate::ReadError;

/// Longest line: four thousand frames of a thousand characters.
const MAX_LINE: u64 = 4 << 20;

/// Reads the stacks.
///
/// # Errors
/// When a line is not a folded stack. The error has the number of the line.
pub fn read(input: impl Read, into: &mut Builder, number: usize) -> Result<(), ReadError> {
    into.capture(number, Origin::default(), 0);
    // What is counted nobody says; most often it is time.
    let event = Event { weight: ValueKind::cpu(), ..Event::default() };
    let series = into.series(vec![(event, 0)])?[0];
    let mut input = BufReader::new(input);
    let mut threads: FxHashMap<String, ThreadId> = FxHashMap::default();
    let (mut line, mut at, mut taken) = (Vec::new(), 0u64, 0u64);
    loop {
        at += 1;
        line.clear();
        if input.by_ref().take(MAX_LINE).read_until(b'\n', &mut line)? == 0 {
            break;
        }
        let bad = |what: &str| ReadError::Folded { line: at, what: what.to_owned() };
        if line.len() as u64 == MAX_LINE {
            return Err(bad("longer than any"));
        }
        let text = std::str::from_utf8(&line).map_err(|_cause| bad("not text"))?.trim_end();
        let text = if at == 1 { text.trim_start_matches('\u{feff}') } else { text };
        if text.is_empty() || text.starts_with('#') {
            continue;
        }
        let (stack, count) =
            text.rsplit_once(' ').ok_or_else(|| bad("no count behind the stack"))?;
        let count: u64 = count.parse().map_err(|_cause| bad("no count behind the stack"))?;
        // A frame alone may be a command that ends in a number.
        let is_number = |word: &str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit());
        if stack.contains(';') && stack.rsplit_once(' ').is_some_and(|(_, word)| is_number(word)) {
            return Err(bad("two counts: a comparison and no profile"));
        }
        // One frame alone is no command.
        let (comm, frames) = stack.split_once(';').unwrap_or(("", stack));
        let thread = match threads.get(comm) {
            Some(&known) => known,
            None => {
                let generation = threads.len() as u32;
                let comm = comm.to_owned();
                let process = Process { generation, comm: comm.clone(), ..Process::default() };
                let process = into.process(process)?;
                let thread = into.thread(Thread { process, tid: 0, comm: String::new() })?;
                threads.insert(comm, thread);
                thread
            }
        };
        let (kernel, user) = stacks(into, frames)?;
        into.weighted(SampleKey { series, thread, user, kernel, labels: 0 }, count, 0)?;
        taken = taken.saturating_add(count);
    }
    into.taken(Some(taken));
    Ok(())
}

fn stacks(
    into: &mut Builder,
    frames: &str,
) -> Result<(Option<StackId>, Option<StackId>), ReadError> {
    let (mut kernel, mut user) = (Vec::new(), Vec::new());
    for frame in frames.split(';').rev().filter(|frame| !frame.is_empty()) {
        let (name, in_kernel) = match frame.strip_suffix("_[k]") {
            Some(name) => (name, true),
            None => (frame, false),
        };
        let executable = into.executable(Executable::Names { kernel: in_kernel })?;
        let line = Line { function: name.into(), ..Line::default() };
        let location = into.named(executable, Arc::from([line]))?;
        // What a kernel frame has called is not the user's.
        if in_kernel && user.is_empty() { &mut kernel } else { &mut user }.push(location);
    }
    let mut stack = |locations: Vec<_>| {
        if locations.is_empty() {
            Ok(None)
        } else {
            into.stack(&locations, EndReason::NotSaid).map(Some)
        }
    };
    Ok((stack(kernel)?, stack(user)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_frame_is_kept_and_comparisons_are_refused() {
        let mut into = Builder::new();
        read(&b"sh;main;read_[k] 3\nmain 10\n\n# a word\n"[..], &mut into, 0).unwrap();
        let profile = into.build();
        let stacks: Vec<_> = profile
            .samples
            .iter()
            .map(|sample| {
                let frames = profile.frames(sample.key);
                let names = frames.map(|at| &*profile.given[&at][0].function);
                (names.collect::<Vec<_>>().join(" "), sample.count)
            })
            .collect();
        assert_eq!(stacks, [("read main".to_owned(), 3), ("main".to_owned(), 10)]);
        for (bad, why) in [
            ("a;b 3 4\n", "comparison"),
            ("a;b\n", "no count"),
            ("a;b x\n", "no count"),
            ("a;b 18446744073709551615\n", "more samples"),
        ] {
            let error = read(bad.as_bytes(), &mut Builder::new(), 0).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
