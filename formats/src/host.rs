//! What readers ask of the host they run on. They ask their caller, and open nothing themselves.

use std::fs::File;

use stackwire_model::profile::{ArtifactHash, Executable};
use stackwire_model::{BuildId, KernelAddr};

/// A module of a kernel, and where it lay.
#[derive(Clone, Copy, Debug)]
pub struct Module<'a> {
    /// First address.
    pub start: KernelAddr,
    /// First address behind it.
    pub end: KernelAddr,
    /// Its name.
    pub name: &'a str,
}

/// What a host knows of a profile that may have been taken on it. The host keeps the content and
/// returns its hash. Everything may be unknown.
pub trait Host {
    /// Symbols of the kernel with this build-id. `text` is where its `_text` lay in the profile,
    /// `modules` where its modules lay.
    fn kernel_symbols(
        &mut self,
        _kernel: BuildId,
        _text: KernelAddr,
        _modules: &[Module<'_>],
    ) -> Option<ArtifactHash> {
        None
    }

    /// The vDSO of the kernel with this build-id.
    fn vdso(&mut self, _kernel: BuildId) -> Option<ArtifactHash> {
        None
    }

    /// What a process wrote of the code it made.
    fn perf_map(&mut self, _pid: u32) -> Option<ArtifactHash> {
        None
    }

    /// The file of an executable, for its call frame information.
    fn open(&mut self, _executable: &Executable) -> Option<File> {
        None
    }
}

/// A host that knows nothing of the profile.
#[derive(Clone, Copy, Debug, Default)]
pub struct Elsewhere;

impl Host for Elsewhere {}
