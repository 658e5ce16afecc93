//! What code came from: a file, the kernel, memory a process filled itself.

use std::sync::Arc;

use crate::{Address, BuildId, Code, ExecutableKey, FileOffset, KernelOffset, UserAddr};

/// SHA-256 of an artifact.
pub type ArtifactHash = [u8; 32];

/// What code came from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Executable {
    /// A mapped file.
    File {
        /// Path as the process had it.
        path: String,
        /// By what it is known, if by more than its path.
        key: Option<ExecutableKey>,
    },
    /// The vDSO, with its image.
    Vdso {
        /// The ELF image.
        image: Option<ArtifactHash>,
    },
    /// Anonymous executable memory; addresses are those of the process.
    Anonymous,
    /// The kernel or a module of it (empty name: the kernel itself).
    Kernel {
        /// Module.
        module: String,
        /// GNU build-id, if known.
        build_id: Option<BuildId>,
        /// Of all its symbols; those that are there are in the artifacts of
        /// [`kernel_symbols`](super::Profile::kernel_symbols), else in the artifact with this hash.
        kallsyms: Option<ArtifactHash>,
    },
    /// A function of an interpreter.
    Code(Arc<Code>),
    /// Nothing known is mapped there.
    Unmapped,
    /// Names that came without addresses.
    Names {
        /// They are of the kernel.
        kernel: bool,
    },
}

impl Executable {
    /// The name outputs show: a path, or `[kernel]`, `[module]`, `[vdso]`, `[jit]`,
    /// `[cpython]`, `[ruby]`.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::File { path, .. } => path.clone(),
            Self::Vdso { .. } => "[vdso]".to_owned(),
            Self::Anonymous => "[jit]".to_owned(),
            Self::Kernel { module, .. } if module.is_empty() => "[kernel]".to_owned(),
            Self::Kernel { module, .. } => format!("[{module}]"),
            Self::Code(code) => format!("[{}]", code.runtime.frame_type()),
            Self::Unmapped => "[unmapped]".to_owned(),
            Self::Names { .. } => "[names]".to_owned(),
        }
    }

    /// An address in it by its number, as the wire has it.
    #[must_use]
    pub fn address(&self, number: u64) -> Address {
        match self {
            Self::File { .. } | Self::Vdso { .. } => Address::File(FileOffset(number)),
            Self::Kernel { .. } => Address::Kernel(KernelOffset(number)),
            Self::Anonymous | Self::Unmapped => Address::User(UserAddr(number)),
            Self::Code(_) => Address::Code(number),
            Self::Names { .. } => Address::Name(number),
        }
    }

    /// Whether it is a function of an interpreter.
    #[must_use]
    pub fn is_code(&self) -> bool {
        matches!(self, Self::Code(_))
    }

    /// Whether it is code of the kernel.
    #[must_use]
    pub fn is_kernel(&self) -> bool {
        matches!(self, Self::Kernel { .. } | Self::Names { kernel: true })
    }

    /// GNU build-id, if known.
    #[must_use]
    pub fn build_id(&self) -> Option<BuildId> {
        match self {
            Self::File { key, .. } => key.and_then(ExecutableKey::build_id),
            Self::Kernel { build_id, .. } => *build_id,
            _ => None,
        }
    }
}

/// Lower-case hex.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
