//! End-to-end tests: the real binaries on real programs, judged by tools we did not write.
//!
//! Run by `make test`, which installs what they need. Most need root to load eBPF programs; one that cannot
//! run says `SKIPPED`, and fails where `STACKWIRE_NO_SKIP` is set, as in CI.

#![expect(clippy::unwrap_used, reason = "tests")]

/// Shares of time in programs whose answer is known.
mod ground_truth;
/// Live, resolved and served profiles of one stream are the same bytes.
mod identical;
/// Inlined chains against llvm-symbolizer, for every sampled address.
mod inlined;
/// User stacks under kernel stacks.
mod kernel_stacks;
/// `go tool pprof` in every view, flame graph and folded stacks.
mod pprof_reads;
/// The whole host: short processes, labels, accounting, a full ring.
mod system_wide;

mod support;
