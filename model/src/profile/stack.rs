//! Stacks as a tree: stacks that share their callers share the frames of them, as on the wire.
//! Readers add a stack whole or frame by frame; writers walk it from its leaf.

use super::{FrameId, LocationId, Profile, SampleKey, StackId};
use crate::EndReason;

/// A frame with its callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    /// Where it is.
    pub location: LocationId,
    /// What called it; none: nothing above it is known.
    pub caller: Option<FrameId>,
}

/// A stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stack {
    /// Its innermost frame; none: it has no frames.
    pub leaf: Option<FrameId>,
    /// Why it ends.
    pub end: EndReason,
}

impl Profile {
    /// The frames of a stack, leaf first.
    pub fn stack(&self, stack: StackId) -> impl Iterator<Item = LocationId> + Clone + '_ {
        // A caller comes before what it calls in the table, so that this ends.
        std::iter::successors(self.stacks[stack.index()].leaf, |frame| {
            self.tree[frame.index()].caller
        })
        .map(|frame| self.tree[frame.index()].location)
    }

    /// The frames of a sample, leaf first: kernel, then user.
    pub fn frames(&self, key: SampleKey) -> impl Iterator<Item = LocationId> + Clone + '_ {
        [key.kernel, key.user].into_iter().flatten().flat_map(|stack| self.stack(stack))
    }
}
