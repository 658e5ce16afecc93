//! Where samples and changes of processes come from, one file a source; and the decoders of what
//! the kernel side writes.
//!
//! Opens and decodes only: `sampler/` decides when each source is opened and drained.

pub mod pace;
pub mod perf_event;
pub mod perf_sample;
pub mod record;
pub mod side_band;
pub mod tracepoint;
