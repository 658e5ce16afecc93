//! The tables of an epoch: each entry checked and turned into the profile's, and what its numbers
//! mean.

use std::cell::Cell;
use std::sync::Arc;

use stackwire_model::{Code, ExecutableKey};
use stackwire_proto::v1;

use super::{Context, IngestError, service};
use crate::profile::{ArtifactHash, Executable, FrameKind, JitFile, Mark, Process};

/// Beyond any file and any user address (57 bits with five-level page tables).
const MAX_OFFSET: u64 = 1 << 57;

pub(super) struct Node {
    pub(super) parent: u32,
    pub(super) executable: u32,
    pub(super) offset: u64,
    pub(super) kind: FrameKind,
}

/// Bytes of names that the entries of an epoch may have, however often they share one.
pub(super) const MAX_NAMES: usize = 64 << 20;

#[derive(Clone, Copy)]
pub(super) struct Reader<'a> {
    pub(super) epoch: &'a v1::Epoch,
    pub(super) context: &'a Context,
    /// Bytes of names that may still be read: of [`MAX_NAMES`].
    pub(super) names_left: &'a Cell<usize>,
}

impl Reader<'_> {
    pub(super) fn string(&self, index: u32) -> Result<String, IngestError> {
        let found = self.epoch.strings.get(index as usize);
        let found = found.ok_or_else(|| self.undefined("string", index))?;
        self.take(found.len())?;
        Ok(found.clone())
    }

    fn take(&self, bytes: usize) -> Result<(), IngestError> {
        let left = self.names_left.get().checked_sub(bytes);
        let too_long = || self.invalid(format_args!("its names have more than {MAX_NAMES} bytes"));
        self.names_left.set(left.ok_or_else(too_long)?);
        Ok(())
    }

    /// A reason that need not be there.
    pub(super) fn reason(&self, index: u32) -> Result<Option<String>, IngestError> {
        if index == 0 { Ok(None) } else { self.string(index).map(Some) }
    }

    pub(super) fn at<T: Copy>(
        &self,
        table: &[T],
        index: u32,
        what: &'static str,
    ) -> Result<T, IngestError> {
        table.get(index as usize).copied().ok_or_else(|| self.undefined(what, index))
    }

    pub(super) fn executable(&self, wire: &v1::Executable) -> Result<Executable, IngestError> {
        let key = wire.key();
        let build_id = key.and_then(ExecutableKey::build_id);
        let artifact = self.hash(&wire.artifact)?;
        let symbols = self.hash(&wire.symbols)?.or(artifact);
        Ok(match wire.kind() {
            v1::ExecutableKind::File => Executable::File { path: self.string(wire.path)?, key },
            v1::ExecutableKind::Vdso => Executable::Vdso { image: artifact },
            v1::ExecutableKind::Anonymous => Executable::Anonymous,
            v1::ExecutableKind::Kernel => {
                Executable::Kernel { module: String::new(), build_id, kallsyms: symbols }
            }
            v1::ExecutableKind::Module => {
                Executable::Kernel { module: self.string(wire.path)?, build_id, kallsyms: symbols }
            }
            v1::ExecutableKind::Code => self.code(wire)?,
            // Of a kind that came later nothing is known.
            v1::ExecutableKind::Unmapped | v1::ExecutableKind::Unspecified => Executable::Unmapped,
        })
    }

    /// One of a run-time that is not known is nowhere.
    fn code(&self, wire: &v1::Executable) -> Result<Executable, IngestError> {
        let code = wire.code.as_ref().and_then(Option::<Code>::from);
        let Some(code) = code else { return Ok(Executable::Unmapped) };
        if !code.is_bounded() {
            return Err(self.invalid("a function with more of a name than any collector takes"));
        }
        self.take(code.bytes())?;
        Ok(Executable::Code(Arc::new(code)))
    }

    pub(super) fn process(&self, wire: &v1::Process) -> Result<Process, IngestError> {
        let jit_missing = self.reason(wire.jit_missing)?;
        let mut labels = self.context.labels(&self.string(wire.cgroup_path)?);
        labels.extend(service::labels(wire));
        Ok(Process {
            pid: wire.pid,
            host_pid: wire.host_pid,
            start_ns: wire.start_ns,
            generation: wire.generation,
            comm: self.string(wire.comm)?,
            labels,
            parent: wire.parent_pid,
            since_ns: self.context.known(wire.since_ns),
            end_ns: self.context.known(wire.end_ns),
            clock_zero_ns: self.context.wall(0),
            perf_map: self.jit_file(&wire.perf_map, &wire.perf_map_growth)?,
            jitdump: self.jit_file(&wire.jitdump, &wire.jitdump_growth)?,
            jit_missing,
            cpu_ns: 0,
        })
    }

    fn jit_file(&self, pieces: &[Vec<u8>], growth: &[v1::Growth]) -> Result<JitFile, IngestError> {
        let wall =
            |mark: &v1::Growth| Mark { time_ns: self.context.wall(mark.time_ns), size: mark.size };
        let growth = growth.iter().map(wall).collect();
        Ok(JitFile::of(self.hashes(pieces)?, self.context.wall(self.epoch.end_ns), growth))
    }

    pub(super) fn hashes(&self, wire: &[Vec<u8>]) -> Result<Vec<ArtifactHash>, IngestError> {
        wire.iter().filter_map(|bytes| self.hash(bytes).transpose()).collect()
    }

    pub(super) fn hash(&self, bytes: &[u8]) -> Result<Option<ArtifactHash>, IngestError> {
        if bytes.is_empty() {
            return Ok(None);
        }
        let hash = bytes.try_into();
        hash.map(Some).map_err(|_length: std::array::TryFromSliceError| {
            self.invalid(format!("an artifact hash of {} bytes", bytes.len()))
        })
    }

    /// The nodes with absolute offsets; parents come before their children, so there is no cycle.
    /// An offset that no file and no process has is one of `nowhere`, an executable: it costs its
    /// own frame.
    pub(super) fn nodes(&self, executables: usize, nowhere: u32) -> Result<Vec<Node>, IngestError> {
        let empty = v1::StackNodes::default();
        let wire = self.epoch.nodes.as_ref().unwrap_or(&empty);
        let count = wire.parent.len();
        if wire.executable.len() != count
            || wire.offset_delta.len() != count
            || wire.kind.len() != count
        {
            return Err(self.ragged("nodes"));
        }
        let mut offset = 0u64;
        (0..count)
            .map(|index| {
                let (parent, executable) = (wire.parent[index], wire.executable[index]);
                if parent as usize > index {
                    return Err(self.undefined("parent node", parent));
                }
                if executable as usize >= executables {
                    return Err(self.undefined("executable", executable));
                }
                offset = offset.wrapping_add(wire.offset_delta[index] as u64);
                let inside = offset < MAX_OFFSET;
                let (executable, offset) = if inside { (executable, offset) } else { (nowhere, 0) };
                let caller = inside && wire.kind[index] == v1::FrameKind::Caller as u32;
                let kind = if caller { FrameKind::Caller } else { FrameKind::Exact };
                Ok(Node { parent, executable, offset, kind })
            })
            .collect()
    }

    pub(super) fn undefined(&self, what: &'static str, index: u32) -> IngestError {
        IngestError::Undefined { epoch: self.epoch.number, what, index }
    }

    pub(super) fn ragged(&self, what: &'static str) -> IngestError {
        IngestError::Ragged { epoch: self.epoch.number, what }
    }

    pub(super) fn invalid(&self, what: impl ToString) -> IngestError {
        IngestError::Invalid { epoch: self.epoch.number, what: what.to_string() }
    }
}
