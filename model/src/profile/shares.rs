//! How many frames of a profile have names, and how many of its stacks are whole. A frame counts
//! once for each sample it is in, so hot code weighs most.

use super::{
    EndReason, ExecutableId, LocationId, Missing, Named, Resolution, Sample, StackId, ThreadId,
};

/// Parts of a whole, in samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// The part.
    pub part: u64,
    /// The whole.
    pub of: u64,
}

impl Share {
    /// In percent; 100 of nothing.
    #[must_use]
    pub fn percent(self) -> f64 {
        if self.of == 0 { 100.0 } else { self.part as f64 * 100.0 / self.of as f64 }
    }
}

/// Frames without a name.
#[derive(Clone, Copy, Debug)]
pub struct Unnamed<'a> {
    /// Whose they are.
    pub thread: ThreadId,
    /// In which code.
    pub executable: ExecutableId,
    /// Why they have no name; `None`: nobody has looked for one.
    pub missing: Option<&'a Missing>,
    /// How many.
    pub count: u64,
}

/// User stacks that end before the root of their thread.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// Whose they are.
    pub thread: ThreadId,
    /// Why they end.
    pub end: EndReason,
    /// The code of their last frame, if they have any frame.
    pub executable: Option<ExecutableId>,
    /// How many.
    pub count: u64,
}

/// Where threads begin in glibc and musl, and fibers (`makecontext`). glibc calls `main` without a
/// frame pointer, so that a walk ends there for want of one, though nothing is missing.
const FIRST_FUNCTIONS: [&str; 7] = [
    "_start",
    "__libc_start_call_main",
    "__libc_start_main",
    "__libc_start_main_impl",
    "libc_start_main_stage2",
    "start_thread",
    "__start_context",
];
/// They call the first function of a thread. A thread that is in one of them and has not called
/// that function is starting a thread or a process, and has callers.
const CLONES: [&str; 2] = ["clone", "clone3"];

impl<'a> Named<'a> {
    /// Frames with a name, of all.
    #[must_use]
    pub fn named(self) -> Share {
        let frames = |sample: &Sample| self.frames(sample.key).count() as u64 * sample.count;
        let of = self.samples.iter().map(frames).sum();
        let unnamed: u64 = self.unnamed().map(|frames| frames.count).sum();
        Share { part: of - unnamed, of }
    }

    /// Frames without a name, sample by sample.
    pub fn unnamed(self) -> impl Iterator<Item = Unnamed<'a>> {
        let Self { profile, names } = self;
        let places = profile
            .samples
            .iter()
            .flat_map(move |sample| profile.frames(sample.key).map(move |at| (sample, at)));
        places.filter_map(move |(sample, at)| {
            let missing = match names.resolutions.get(at.index()) {
                Some(Resolution::Found { .. }) => return None,
                Some(Resolution::Missing(missing)) => Some(missing),
                None => None,
            };
            let executable = profile.locations[at.index()].executable;
            Some(Unnamed { thread: sample.key.thread, executable, missing, count: sample.count })
        })
    }

    /// User stacks that reach the root of their thread, of those whose end is known.
    #[must_use]
    pub fn whole(self) -> Share {
        let ends = self.samples.iter().filter_map(|it| Some((self.end(it.key.user?), it.count)));
        let known = ends.filter(|(end, _)| *end != EndReason::NotSaid);
        let of = known.map(|(_, count)| count).sum();
        let cut: u64 = self.cut().map(|stacks| stacks.count).sum();
        Share { part: of - cut, of }
    }

    /// User stacks that end before the root, sample by sample.
    pub fn cut(self) -> impl Iterator<Item = Cut> + use<'a> {
        self.profile.samples.iter().filter_map(move |sample| {
            let stack = sample.key.user?;
            let end = self.end(stack);
            let last = self.native(stack).last();
            let executable = last.map(|at| self.locations[at.index()].executable);
            let thread = sample.key.thread;
            let is_cut = !matches!(end, EndReason::Root | EndReason::NotSaid);
            is_cut.then_some(Cut { thread, end, executable, count: sample.count })
        })
    }

    /// Frames of a user stack but those of functions that an interpreter runs: how a stack ends is
    /// said of the others.
    fn native(self, stack: StackId) -> impl Iterator<Item = LocationId> + use<'a> {
        let profile = self.profile;
        let executable = |at: LocationId| profile.locations[at.index()].executable;
        let is_native =
            move |at: &LocationId| !profile.executables[executable(*at).index()].is_code();
        profile.stack(stack).filter(is_native)
    }

    /// Why a user stack ends.
    #[must_use]
    pub fn end(self, stack: StackId) -> EndReason {
        let mut frames = self.native(stack).enumerate();
        let begun = frames.by_ref().last().is_some_and(|(callers, at)| {
            let Some(Resolution::Found { lines, .. }) = self.names.resolutions.get(at.index())
            else {
                return false;
            };
            let called = callers > 0;
            let Some(first) = lines.last() else { return false };
            let name = first.function.trim_start_matches("__GI_");
            let known = |names: &[&str]| {
                names.contains(&name) || names.contains(&name.trim_start_matches('_'))
            };
            known(&FIRST_FUNCTIONS) || called && known(&CLONES)
        });
        if begun { EndReason::Root } else { self.stacks[stack.index()].end }
    }
}
