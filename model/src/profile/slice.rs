//! Parts of a profile: a stretch of time, stacks with some function in them. Pure; what is left out
//! is counted.

use std::ops::Range;

use super::{Executable, ExecutableId, FrameId, LocationId, Names, Profile, Sample, SeriesId};
use crate::Runtime;

impl Profile {
    /// Keeps the samples of a stretch of time, seconds from the start of the profile. Needs the
    /// timeline.
    pub fn keep_time(&mut self, seconds: &Range<f64>) {
        let at = |seconds: f64| self.start_ns.saturating_add((seconds * 1e9) as u64);
        let range = at(seconds.start)..at(seconds.end);
        let before = self.sample_count();
        self.timeline.retain(|moment| range.contains(&moment.time_ns));
        for sample in &mut self.samples {
            (sample.count, sample.value) = (0, 0);
        }
        for moment in &self.timeline {
            let sample = &mut self.samples[moment.sample as usize];
            sample.count += moment.count();
            sample.value = sample.value.saturating_add(moment.value);
        }
        self.retain(|_, sample| sample.count > 0);
        self.left_out += before - self.sample_count();
        let end = self.start_ns.saturating_add(self.duration_ns).min(range.end);
        self.start_ns = self.start_ns.max(range.start);
        self.duration_ns = end.saturating_sub(self.start_ns);
        self.unsampled_cpu_ns = None;
    }

    /// Keeps the samples of one event, which is the profile's only one then; whether it has it.
    pub fn keep_event(&mut self, name: &str) -> bool {
        let Some(series) = self.series.iter().position(|series| series.event.name == name) else {
            return false;
        };
        let before = self.sample_count();
        self.retain(|_, sample| sample.key.series.index() == series);
        self.left_out += before - self.sample_count();
        self.series = vec![self.series.swap_remove(series)];
        for sample in &mut self.samples {
            sample.key.series = SeriesId(0);
        }
        true
    }

    /// Keeps the samples that have, for each label in `wanted`, one of the values given there.
    pub fn keep_labels(&mut self, wanted: &[(String, String)]) {
        if wanted.is_empty() {
            return;
        }
        let has = |sample: &Sample| {
            let is = |(key, value): &(String, String)| {
                self.label(sample.key, key).is_some_and(|found| found == value.as_str())
            };
            let any = |(key, _): &(String, String)| wanted.iter().any(|it| it.0 == *key && is(it));
            wanted.iter().all(any)
        };
        let keep: Vec<bool> = self.samples.iter().map(has).collect();
        let before = self.sample_count();
        self.retain(|index, _| keep[index]);
        self.left_out += before - self.sample_count();
        self.narrow_cpu_times(wanted);
    }

    /// Keeps the samples whose stack has a function that `focus` matches, and none that `ignore`
    /// does.
    pub fn keep_functions<F: Fn(&str) -> bool>(
        &mut self,
        names: &Names,
        focus: Option<F>,
        ignore: Option<F>,
    ) {
        let matches = |matches: F| -> Vec<bool> {
            let of = |index| {
                let lines = names.of(self).lines(LocationId(index as u32));
                lines.iter().any(|line| matches(&line.function))
            };
            (0..self.locations.len()).map(of).collect()
        };
        let (focused, ignored) = (focus.map(matches), ignore.map(matches));
        let keep: Vec<bool> = self
            .samples
            .iter()
            .map(|sample| {
                let any = |of: &Vec<bool>| self.frames(sample.key).any(|at| of[at.index()]);
                focused.as_ref().is_none_or(any) && !ignored.as_ref().is_some_and(any)
            })
            .collect();
        let before = self.sample_count();
        self.retain(|index, _| keep[index]);
        self.left_out += before - self.sample_count();
        if focused.is_some() || ignored.is_some() {
            self.unsampled_cpu_ns = None;
        }
    }

    /// Takes out the evaluators that run functions of an interpreter: of both there is one frame,
    /// that of the function. Where V8 has written itself what the code is that it made, with lines
    /// and inlined functions, the frame of the code stays instead.
    pub fn hide_evaluators(&mut self) {
        let mut is_hidden = vec![false; self.tree.len()];
        for index in 0..self.tree.len() {
            // A caller comes before what it calls.
            if let Some(caller) = self.tree[index].caller.filter(|at| is_hidden[at.index()]) {
                self.tree[index].caller = self.tree[caller.index()].caller;
            }
            let Some(runtime) = self.runtime(index) else { continue };
            let Some(first) = self.tree[index].caller.map(FrameId::index) else { continue };
            if matches!(runtime, Runtime::V8(_)) && self.is_told_by_jit(first) {
                is_hidden[index] = true;
                continue;
            }
            for _ in 0..runtime.evaluators() {
                let Some(caller) = self.tree[index].caller else { break };
                let caller = caller.index();
                let is_of_it = self.executable(caller) == self.executable(first);
                if self.runtime(caller).is_some() || !is_of_it {
                    break;
                }
                self.tree[index].caller = self.tree[caller].caller;
            }
        }
        for index in 0..self.stacks.len() {
            if let Some(leaf) = self.stacks[index].leaf.filter(|at| is_hidden[at.index()]) {
                self.stacks[index].leaf = self.tree[leaf.index()].caller;
            }
        }
    }

    /// Of code that a process made itself, and wrote down what it is.
    fn is_told_by_jit(&self, frame: usize) -> bool {
        let location = &self.locations[self.tree[frame].location.index()];
        let is_made = self.executables[location.executable.index()] == Executable::Anonymous;
        location.process.filter(|_| is_made).is_some_and(|process| {
            let process = &self.processes[process.index()];
            !process.perf_map.is_empty() || !process.jitdump.is_empty()
        })
    }

    /// Takes out the functions of interpreters: what is left is how the interpreters run them.
    pub fn keep_native(&mut self) {
        // A caller comes before what it calls: it has been led past them already.
        for index in 0..self.tree.len() {
            self.tree[index].caller = self.native(self.tree[index].caller);
        }
        for index in 0..self.stacks.len() {
            self.stacks[index].leaf = self.native(self.stacks[index].leaf);
        }
    }

    fn native(&self, frame: Option<FrameId>) -> Option<FrameId> {
        match frame {
            Some(at) if self.runtime(at.index()).is_some() => self.tree[at.index()].caller,
            frame => frame,
        }
    }

    /// Of a function of an interpreter.
    fn runtime(&self, frame: usize) -> Option<Runtime> {
        match &self.executables[self.executable(frame).index()] {
            Executable::Code(code) => Some(code.runtime),
            _ => None,
        }
    }

    fn executable(&self, frame: usize) -> ExecutableId {
        self.locations[self.tree[frame].location.index()].executable
    }

    fn retain(&mut self, mut keep: impl FnMut(usize, &Sample) -> bool) {
        let mut places = Vec::with_capacity(self.samples.len());
        let (mut samples, mut values) = (Vec::new(), Vec::new());
        for (index, sample) in self.samples.iter().enumerate() {
            let kept = keep(index, sample);
            places.push(kept.then_some(samples.len() as u32));
            if kept {
                samples.push(*sample);
                values.extend(self.values.get_mut(index).map(std::mem::take));
            }
        }
        (self.samples, self.values) = (samples, values);
        self.timeline.retain_mut(|moment| match places[moment.sample as usize] {
            Some(place) => {
                moment.sample = place;
                true
            }
            None => false,
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::{Builder, EndReason, Executable, Frame, Location, StackId};
    use super::*;
    use crate::{Address, Code, FileOffset, Runtime, Text};

    /// A function that is called by another, which an evaluator runs: leaf first `c`, `g`, `f`,
    /// `eval`, and its native callers in files of these names, the last first.
    fn profile(runtime: Runtime, callers: &[&str]) -> Profile {
        let mut into = Builder::new();
        let mut caller = None;
        let natives = callers.iter().map(|&file| (file, None));
        let rest = [("lib", None), ("", Some("f")), ("", Some("g")), ("lib", None)];
        for ((file, name), number) in natives.chain(rest).zip(1..) {
            let file = Executable::File { path: file.into(), key: None };
            let file = into.executable(file).unwrap();
            let function = |name: &str| {
                let name = Text { width: 1, bytes: name.into(), is_cut: false };
                let code = Code { name, ..Code::unknown(runtime) };
                Executable::Code(Arc::new(code))
            };
            let executable = name.map_or(file, |name| into.executable(function(name)).unwrap());
            let address = match name {
                Some(_) => Address::Code(number),
                None => Address::File(FileOffset(number)),
            };
            let location = Location { executable, process: None, address, seen_ns: 0 };
            let location = into.location(location).unwrap();
            caller = Some(into.frame(Frame { location, caller }).unwrap());
        }
        into.stack_from(caller, EndReason::Root).unwrap();
        into.build()
    }

    fn numbers(profile: &Profile) -> Vec<u64> {
        let frames = profile.stack(StackId(0));
        frames.map(|at| profile.locations[at.index()].address.number()).collect()
    }

    #[test]
    fn a_function_stands_for_the_evaluator_that_runs_it() {
        let hidden = |runtime, callers: &[&str]| {
            let mut profile = profile(runtime, callers);
            profile.hide_evaluators();
            numbers(&profile)
        };
        let (python, ruby) = (Runtime::Cpython(0x030d_0000), Runtime::Ruby(0x0003_0300));
        assert_eq!(hidden(python, &["lib"]), [5, 4, 3, 1]);
        // Ruby's has two functions, of the same file.
        assert_eq!(hidden(ruby, &["lib", "lib"]), [6, 5, 4, 1]);
        assert_eq!(hidden(ruby, &["other"]), [5, 4, 3, 1]);
        assert_eq!(hidden(ruby, &[]), [4, 3, 2]);
    }

    #[test]
    fn native_frames_alone_have_the_evaluator() {
        let mut profile = profile(Runtime::Cpython(0x030d_0000), &["lib"]);
        profile.keep_native();
        assert_eq!(numbers(&profile), [5, 2, 1]);
    }
}
