//! What the collector says of its unwind tables.

/// What became of the collector's unwind tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnwindTables {
    /// Put to use.
    pub loaded: u64,
    /// Of those, compiled and not kept from an earlier run.
    pub compiled: u64,
    /// Time that took, nanoseconds.
    pub compile_ns: u64,
    /// Executables without one.
    pub failed: u64,
    /// Dropped to make room for others.
    pub evicted: u64,
}
