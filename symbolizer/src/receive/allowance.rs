//! What may be asked of whoever sends a stream. Decided by `serve/limits.rs`; a session asks its
//! own collector for everything.

use stackwire_model::ExecutableKey;

/// Says no in words for the report.
pub trait Allowance: std::fmt::Debug + Send + Sync {
    /// Whether an executable may be handed over.
    ///
    /// # Errors
    /// Why it may not.
    fn executable(&self, key: ExecutableKey) -> Result<(), String>;

    /// Takes this many bytes of artifacts and executables.
    ///
    /// # Errors
    /// Why they are not taken.
    fn artifact(&self, bytes: u64) -> Result<(), String>;
}
