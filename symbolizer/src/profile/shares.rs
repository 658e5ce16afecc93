//! How well a profile is named and how whole its stacks are. A frame of a sample counts once a sample: what is hot weighs most.

use super::{EndReason, Profile, Resolution, StackId};

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

/// Where threads begin in glibc and musl, and fibers (`makecontext`). glibc calls `main` without a frame pointer, so that a walk ends
/// there for want of one, though nothing is missing.
const FIRST_FUNCTIONS: [&str; 9] = [
    "_start",
    "__libc_start_call_main",
    "__libc_start_main",
    "__libc_start_main_impl",
    "libc_start_main_stage2",
    "start_thread",
    "clone",
    "clone3",
    "__start_context",
];

impl Profile {
    /// Frames with a name, of all.
    #[must_use]
    pub fn named(&self) -> Share {
        let mut share = Share::default();
        for sample in &self.samples {
            for location in self.frames(sample.key) {
                let found = self.resolutions.get(location.index());
                share.of += sample.count;
                share.part += match found {
                    Some(Resolution::Found { .. }) => sample.count,
                    _ => 0,
                };
            }
        }
        share
    }

    /// User stacks that reach the root of their thread, of those whose end is known.
    #[must_use]
    pub fn whole(&self) -> Share {
        let mut share = Share::default();
        for sample in &self.samples {
            match sample.key.user.map(|stack| self.end(stack)) {
                None | Some(EndReason::NotSaid) => {}
                Some(end) => {
                    share.of += sample.count;
                    share.part += if end == EndReason::Root { sample.count } else { 0 };
                }
            }
        }
        share
    }

    /// Why a user stack ends.
    #[must_use]
    pub fn end(&self, stack: StackId) -> EndReason {
        let stack = &self.stacks[stack.index()];
        let resolution = stack.locations.last().and_then(|at| self.resolutions.get(at.index()));
        let first = match resolution {
            Some(Resolution::Found { lines, .. }) => lines.last(),
            _ => None,
        };
        let begun = first.is_some_and(|line| {
            let name = line.function.trim_start_matches("__GI_");
            FIRST_FUNCTIONS.contains(&name)
                || FIRST_FUNCTIONS.contains(&name.trim_start_matches('_'))
        });
        if begun { EndReason::Root } else { stack.end }
    }
}
