//! Programs of interpreters that use time in known functions, on known lines, or wait there:
//! whether a profile says so. Languages differ in how they call a function; how a profile is judged
//! is the same.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use super::pprof::Sample;
use super::shares::is_about;
use super::{Pprof, Ran, binary};

/// Frames in a file, leaf first: function and line.
pub(crate) fn in_file<'a>(profile: &'a Pprof, sample: &Sample, file: &str) -> Vec<(&'a str, u64)> {
    let lines = sample.locations.iter().flat_map(|id| &profile.locations[id].lines);
    let lines = lines.filter(|(_, path, _)| path == file);
    lines.map(|(function, _, line)| (function.as_str(), *line)).collect()
}

/// A program that uses CPU time in known shares.
pub(crate) struct Shares<'a> {
    /// Its source.
    pub(crate) program: &'a Path,
    /// What is on its stack while it uses time, leaf first, and the share of that.
    pub(crate) known: &'a [(&'a [&'a str], f64)],
    /// Lines on which the second function of the first stack spends two thirds and one third; none:
    /// they are not known.
    pub(crate) lines: &'a [&'a str],
    /// What may stand above all others, and what may stand below.
    pub(crate) leaf: &'a str,
    pub(crate) root: &'a str,
}

impl Shares<'_> {
    /// Every sample has a stack that is known, and each of them its share; both lines, too.
    #[track_caller]
    pub(crate) fn assert_are_in<'p>(
        &self,
        name: &str,
        profile: &'p Pprof,
        samples: impl IntoIterator<Item = &'p Sample>,
    ) {
        let file = self.program.to_str().unwrap();
        let mut counts: BTreeMap<Vec<&str>, u64> = BTreeMap::new();
        let (mut lines, mut without, mut total) = (BTreeMap::<u64, u64>::new(), 0, 0);
        for sample in samples {
            let mut frames = in_file(profile, sample, file);
            total += sample.count;
            if frames.is_empty() {
                without += sample.count;
                continue;
            }
            frames.pop_if(|(function, _)| *function == self.root);
            if frames.first().is_some_and(|(function, _)| *function == self.leaf) {
                frames.remove(0);
            }
            // CPython's names were not qualified before 3.11.
            let function = |name: &'p str| if name == "method" { "Class.method" } else { name };
            let called: Vec<&str> = frames.iter().map(|(name, _)| function(name)).collect();
            // On its way there or back.
            let is_known = self.known.iter().any(|(all, _)| all.ends_with(&called));
            assert!(is_known, "{name}: {called:?}");
            if called == self.known[0].0 {
                *lines.entry(frames[1].1).or_default() += sample.count;
            }
            *counts.entry(called).or_default() += sample.count;
        }
        eprintln!("{name}: {total} samples, {without} without functions, {counts:?}, {lines:?}");
        assert!(total > 300 && without * 100 <= total * 2, "{name}: {without} of {total}");
        for (functions, share) in self.known {
            is_about(name, functions, counts[*functions], total, *share);
        }
        let text = std::fs::read_to_string(self.program).unwrap();
        let of_lines: Vec<u64> =
            self.lines.iter().map(|line| lines[&line_of(&text, line)]).collect();
        if let [two_thirds, third] = of_lines[..] {
            assert_eq!(lines.len(), 2, "{name}: {lines:?}");
            is_about(name, &["line"], two_thirds, two_thirds + third, 2.0 / 3.0);
        }
    }
}

/// The number of a line.
fn line_of(text: &str, wanted: &str) -> u64 {
    1 + text.lines().position(|line| line.trim() == wanted).unwrap() as u64
}

/// A function, its file and its line.
type Frame<'a> = (&'a str, &'a str, u64);

/// What a program says of its threads: the number of each, and its frames behind it, the innermost
/// first.
pub(crate) fn frames_it_knows(text: &str) -> BTreeMap<&str, Vec<Frame<'_>>> {
    let mut threads: BTreeMap<&str, Vec<Frame<'_>>> = BTreeMap::new();
    let mut thread = "";
    for line in text.lines() {
        match line.split('\t').collect::<Vec<_>>()[..] {
            [function, file, line] => {
                let frame = (function, file, line.parse().unwrap());
                threads.entry(thread).or_default().push(frame);
            }
            _ => thread = line,
        }
    }
    threads
}

/// Lines that are compared.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lines {
    All,
    /// The innermost function goes from line to line.
    OfCallers,
    /// Likewise, and some are not known.
    OfCallersIfKnown,
}

/// Every sample of a thread that is known has its frames, in files of these names. How many samples
/// of each thread.
#[track_caller]
pub(crate) fn assert_frames<'k>(
    name: &str,
    profile: &Pprof,
    known: &BTreeMap<&'k str, Vec<Frame<'_>>>,
    files: &str,
    compared: Lines,
) -> BTreeMap<&'k str, u64> {
    let mut equal = BTreeMap::new();
    for sample in &profile.samples {
        let Some((&thread, known)) = known.get_key_value(sample.labels["tid"].as_str()) else {
            continue;
        };
        let lines = sample.locations.iter().flat_map(|id| &profile.locations[id].lines);
        let lines = lines.filter(|(_, path, _)| path.ends_with(files));
        let mut found: Vec<Frame<'_>> =
            lines.map(|(function, file, line)| (&**function, &**file, *line)).collect();
        for (index, (found, known)) in found.iter_mut().zip(known).enumerate() {
            let is_unknown = compared == Lines::OfCallersIfKnown && found.2 == 0;
            if is_unknown || index == 0 && compared != Lines::All {
                found.2 = known.2;
            }
        }
        assert_eq!(&found, known, "{name}");
        *equal.entry(thread).or_default() += sample.count;
    }
    equal
}

/// A program whose threads wait at known places.
pub(crate) struct Waits<'a> {
    /// Its source.
    pub(crate) program: &'a Path,
    /// What each thread waits in, the innermost first. The last has the name of the thread, and
    /// waits without end.
    pub(crate) known: &'a [(&'a str, &'a [&'a str])],
    /// Lines on which the second function of the first waits two thirds and one third.
    pub(crate) lines: [&'a str; 2],
    /// What each thread begins with, where it does.
    pub(crate) root: Option<&'a str>,
    /// What the main thread is in.
    pub(crate) main: &'a str,
}

impl Waits<'_> {
    /// Records the process for three seconds: each thread waits where it is known to, and nearly
    /// all of that time.
    #[track_caller]
    pub(crate) fn assert_are_of(&self, name: &str, pid: u32) {
        let directory = tempfile::tempdir().unwrap();
        let output = directory.path().join("off.pb.gz");
        let mut collector = Command::new(binary("stackwire"));
        collector.args(["record", "--offcpu", "--no-capture", "--duration=3s"]);
        collector.arg(format!("--pid={pid}")).current_dir(directory.path());
        collector.arg(format!("--offcpu-output={}", output.display()));
        Ran::of(&mut collector).succeeded();
        let profile = Pprof::read(&output);
        let off_cpu = profile.kinds.iter().position(|kind| kind == "off_cpu/nanoseconds").unwrap();
        let file = self.program.to_str().unwrap();
        let mut found = BTreeMap::<&str, f64>::new();
        let mut lines = BTreeMap::<u64, f64>::new();
        for sample in &profile.samples {
            let seconds = sample.values[off_cpu] as f64 / 1e9;
            let mut frames = in_file(&profile, sample, file);
            if let Some(root) = self.root
                && frames.pop_if(|(function, _)| *function == root).is_none()
            {
                continue;
            }
            let functions: Vec<&str> = frames.iter().map(|(function, _)| *function).collect();
            // The main thread waits from before to after.
            if functions.is_empty() || functions == [self.main] {
                continue;
            }
            let thread = functions.last().unwrap();
            let Some((thread, known)) = self.known.iter().find(|(of, _)| of == thread) else {
                panic!("{name}: {functions:?}");
            };
            // On its way from one wait to the next it may wait for the interpreter's lock.
            assert!(known.ends_with(&functions), "{name}: {functions:?}");
            if functions == *known {
                *found.entry(thread).or_default() += seconds;
            }
            if functions == self.known[0].1 {
                *lines.entry(frames[1].1).or_default() += seconds;
            }
        }
        eprintln!("{name}: {found:?}, {lines:?}");
        let (_endless, waits) = self.known.split_last().unwrap();
        for (thread, _) in waits {
            let seconds = found[thread];
            assert!((2.7..3.1).contains(&seconds), "{name}: {thread}: {seconds} s");
        }
        let text = std::fs::read_to_string(self.program).unwrap();
        let [first, second] = self.lines.map(|line| lines[&line_of(&text, line)]);
        assert_eq!(lines.len(), 2, "{name}: {lines:?}");
        let share = first / (first + second);
        assert!((share - 2.0 / 3.0).abs() < 0.02, "{name}: {share} of the time on the first line");
    }
}
