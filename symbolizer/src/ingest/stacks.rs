//! The stacks of an epoch: from its tree to the profile's. Each node is looked up once, and again
//! only where its places depend on the process or the time.

use rustc_hash::FxHashMap;
use stackwire_proto::v1;

use super::IngestError;
use super::tables::{Node, Reader};
use crate::profile::{
    Builder, ExecutableId, Frame, FrameId, Location, LocationId, ProcessId, StackId, lookup_address,
};

/// Deepest stack taken: nodes are shared, so a small message could describe very many deep stacks.
pub(super) const MAX_DEPTH: u32 = 4096;
/// Most frames that an epoch makes, for the same reason: each is in three tables. Shared stacks
/// make one for each node.
pub(super) const MAX_FRAMES: u64 = 2 << 20;
/// Most frames of all stacks, shared ones among them: as many are written. A collector cuts at some
/// millions.
const MAX_WALKED: u64 = 16 << 20;
/// Bytes a frame takes, in those tables.
pub(super) const FRAME_BYTES: u64 = 160;

/// What the places of a node and its callers depend on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Private {
    /// They are the same for all.
    No,
    /// On the process: its memory is its own.
    ToProcess,
    /// On the time as well: the process writes code.
    ToTime,
}

/// The process of a sample, and the time that tells what code was there.
pub(super) type Of = (ProcessId, u64);

pub(super) struct Stacks<'e> {
    reader: Reader<'e>,
    nodes: Vec<Node>,
    executables: Vec<ExecutableId>,
    /// By node.
    private: Vec<Private>,
    /// By node: it and its callers.
    depth: Vec<u32>,
    frames: FxHashMap<(u32, Option<Of>), FrameId>,
    stacks: FxHashMap<(u32, Of), StackId>,
    /// Frames of all stacks, and those that were made for them.
    total: u64,
    pub(super) made: u64,
    /// Of a stack, until its callers are known.
    new: Vec<((u32, Option<Of>), LocationId)>,
}

impl<'e> Stacks<'e> {
    /// `executables`: those of the epoch, and what places that cannot be are taken for.
    pub(super) fn new(
        reader: Reader<'e>,
        nodes: Vec<Node>,
        executables: Vec<ExecutableId>,
    ) -> Result<Self, IngestError> {
        for stack in &reader.epoch.stacks {
            if stack.node as usize > nodes.len() {
                return Err(reader.undefined("node", stack.node));
            }
        }
        let (mut private, mut depth) = (Vec::new(), Vec::<u32>::new());
        for node in &nodes {
            let own = private_to(&reader, node.executable);
            let caller = node.parent.checked_sub(1).map(|at| at as usize);
            private.push(caller.map_or(own, |at| own.max(private[at])));
            depth.push(1 + caller.map_or(0, |at| depth[at]));
        }
        Ok(Self {
            reader,
            nodes,
            executables,
            private,
            depth,
            frames: FxHashMap::default(),
            stacks: FxHashMap::default(),
            total: 0,
            made: 0,
            new: Vec::new(),
        })
    }

    /// The stack of a sample; 0: it has none.
    pub(super) fn stack(
        &mut self,
        index: u32,
        (process, seen_ns): Of,
        into: &mut Builder,
    ) -> Result<Option<StackId>, IngestError> {
        let Some(at) = index.checked_sub(1) else { return Ok(None) };
        let wire = self.reader.epoch.stacks.get(at as usize);
        let wire = wire.ok_or_else(|| self.reader.undefined("stack", at))?;
        let leaf = wire.node.checked_sub(1).map(|node| node as usize);
        let to_time = leaf.is_some_and(|node| self.private[node] == Private::ToTime);
        // Of many deep stacks there is not one for each time.
        let seen_ns = if to_time && self.made < MAX_FRAMES / 4 { seen_ns } else { 0 };
        let of = (process, seen_ns);
        if let Some(&known) = self.stacks.get(&(at, of)) {
            return Ok(Some(known));
        }
        let depth = leaf.map_or(0, |node| self.depth[node]);
        self.total += u64::from(depth);
        if depth > MAX_DEPTH || self.total > MAX_WALKED || self.made > MAX_FRAMES {
            return Err(self.reader.invalid("stacks are deeper than any collector records"));
        }
        let leaf = self.frame(wire.node, of, into)?;
        let end = wire.end().into();
        let stack = into.stack_from(leaf, end).map_err(|full| self.reader.invalid(full))?;
        self.stacks.insert((at, of), stack);
        Ok(Some(stack))
    }

    /// The frame of a node, with its callers.
    fn frame(
        &mut self,
        mut node: u32,
        of: Of,
        into: &mut Builder,
    ) -> Result<Option<FrameId>, IngestError> {
        let mut caller = None;
        self.new.clear();
        while let Some(at) = node.checked_sub(1) {
            let found = &self.nodes[at as usize];
            let key = (at, self.of(self.private[at as usize], of));
            if let Some(&known) = self.frames.get(&key) {
                caller = Some(known);
                break;
            }
            let own = self.of(private_to(&self.reader, found.executable), of);
            let executable = self.executables[found.executable as usize];
            let address = into.executable_of(executable).address(found.offset);
            let location = Location {
                executable,
                process: own.map(|(process, _)| process),
                address: lookup_address(address, found.kind),
                seen_ns: own.map_or(0, |(_, seen_ns)| seen_ns),
            };
            let location = into.location(location).map_err(|full| self.reader.invalid(full))?;
            self.new.push((key, location));
            node = found.parent;
        }
        self.made += self.new.len() as u64;
        for (key, location) in self.new.drain(..).rev() {
            let frame = into.frame(Frame { location, caller });
            let frame = frame.map_err(|full| self.reader.invalid(full))?;
            self.frames.insert(key, frame);
            caller = Some(frame);
        }
        Ok(caller)
    }

    /// The process and time that tell places of this kind apart; `None` when neither does.
    fn of(&self, private: Private, (process, seen_ns): Of) -> Option<Of> {
        match private {
            Private::No => None,
            Private::ToProcess => Some((process, 0)),
            Private::ToTime => Some((process, seen_ns)),
        }
    }
}

/// On what places of an executable depend. One that the epoch does not define is nowhere.
fn private_to(reader: &Reader<'_>, executable: u32) -> Private {
    match reader.epoch.executables.get(executable as usize).map(v1::Executable::kind) {
        Some(v1::ExecutableKind::Anonymous) => Private::ToTime,
        Some(v1::ExecutableKind::Unmapped) | None => Private::ToProcess,
        Some(_) => Private::No,
    }
}
