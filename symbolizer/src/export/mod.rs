//! Outputs. Each reads a resolved profile and writes to any `Write`; none resolves, none opens a
//! file.

mod compare;
mod flamegraph;
mod folded;
mod kernel_place;
mod percent;
mod perf_data;
pub(crate) mod plain;
mod pprof;
mod problems;
mod report;
mod short;
mod terminal;
mod tooltip;
mod unwinding;

pub use self::compare::{folded as folded_diff, write as diff};
pub use self::flamegraph::{Flames, diff as flamegraph_diff, write as flamegraph};
pub use self::folded::write as folded;
pub(crate) use self::kernel_place::places as kernel_places;
pub(crate) use self::perf_data::jitted::{images as jitted_images, stand_in};
pub use self::perf_data::{Options as PerfDataOptions, write as perf_data};
pub use self::pprof::{Options as PprofOptions, write as pprof};
pub use self::report::{Options as ReportOptions, Sort, Window, write as report};
pub use self::terminal::Terminal;
