//! Options of `resolve` and `report`, which read captures.

use std::path::PathBuf;

use clap::{Args as ClapArgs, ValueEnum};

use super::outputs::{Flames, Outputs, PmuAs};
use super::symbols::SymbolOptions;
use super::values::{Labels, labels, stretch};

#[derive(Debug, ClapArgs)]
pub struct Resolve {
    /// Captures, perf.data, pprof, gperftools or folded stacks; several become one profile.
    #[arg(required = true, value_name = "FILE")]
    pub captures: Vec<PathBuf>,
    /// Where the pprof goes; without it, beside the first capture with the ending .pb.gz.
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Write a pprof of where threads waited, and leave it out of the other one.
    #[arg(long, value_name = "FILE")]
    pub offcpu_output: Option<PathBuf>,
    /// Write how threads were scheduled: all of it, there are no parts.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["wanted", "time"])]
    pub pmu_output: Option<PathBuf>,
    #[command(flatten)]
    pub pmu_as: PmuAs,
    #[command(flatten)]
    pub slice: Slice,
    #[command(flatten)]
    pub outputs: Outputs,
    #[command(flatten)]
    pub symbols: SymbolOptions,
}

#[derive(Debug, ClapArgs)]
pub struct Report {
    /// Captures, perf.data, pprof, gperftools or folded stacks; several are reported as one.
    #[arg(required = true, value_name = "FILE")]
    pub captures: Vec<PathBuf>,
    #[command(flatten)]
    pub slice: Slice,
    /// Functions listed; without it 20, and on a terminal no more than its window has room for.
    #[arg(long, value_name = "N")]
    pub top: Option<usize>,
    /// Which functions come first: those that take most themselves, or with all they call.
    #[arg(long, value_enum, value_name = "BY", default_value = "self")]
    pub sort: Sort,
    /// Print how threads were scheduled, and nothing else. It was added up while it was recorded:
    /// there are no parts of it.
    #[arg(long, conflicts_with_all = ["by", "event", "wanted", "focus", "ignore", "time", "diff", "flamegraph", "folded"])]
    pub pmu: bool,
    #[command(flatten)]
    pub pmu_as: PmuAs,
    /// On a terminal, too, print everything: what each executable's names are from, where stacks
    /// end.
    #[arg(long)]
    pub full: bool,
    /// Compare two: which functions take more of the time in the second than in the first.
    #[arg(long)]
    pub diff: bool,
    /// Draw a flame graph (SVG); with --diff one of the second, red what grew and blue what shrank.
    #[arg(long, value_name = "FILE")]
    pub flamegraph: Option<PathBuf>,
    #[command(flatten)]
    pub flames: Flames,
    /// Write folded stacks; with --diff with both counts.
    #[arg(long, value_name = "FILE")]
    pub folded: Option<PathBuf>,
    #[command(flatten)]
    pub symbols: SymbolOptions,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Sort {
    #[value(name = "self")]
    Own,
    Total,
}

/// Which part of a profile, and how it is divided.
#[derive(Clone, Debug, Default, ClapArgs)]
pub struct Slice {
    /// Divide samples by a label: comm, thread, tid, pid, cpu, container_id, pod_uid, cgroup_path,
    /// any a profile has, or kind: what the innermost function is, native, kernel, jit, cpython or
    /// ruby.
    /// The report shows their shares; flame graphs and folded stacks begin with it.
    #[arg(long, value_name = "LABEL")]
    pub by: Option<String>,
    /// Keep the samples of one event, off-cpu and run-queue among them. Without it pprof, perf.data
    /// and report have all events, and flame graphs, folded stacks and comparisons the first. Flame
    /// graphs draw waits together with CPU time.
    #[arg(long, short, visible_alias = "series", value_name = "EVENT")]
    pub event: Option<String>,
    /// Keep samples with these labels, as "comm=postgres,thread=worker"; of one label several
    /// values may be given (repeatable).
    #[arg(long = "where", value_name = "LABEL=VALUE,…", value_parser = labels)]
    pub wanted: Vec<Labels>,
    /// Show the interpreter's own functions, where it runs Python, instead of those of the program.
    #[arg(long)]
    pub native_only: bool,
    /// Keep stacks that have a function this regular expression matches.
    #[arg(long, value_name = "REGEX")]
    pub focus: Option<regex::Regex>,
    /// Leave out stacks that have a function this regular expression matches.
    #[arg(long, value_name = "REGEX")]
    pub ignore: Option<regex::Regex>,
    /// Keep a stretch of time, seconds from the start, as "10..20", "10.." or "..20". A wait is in
    /// the stretch it ends in, with all its length.
    #[arg(long, value_name = "A..B", value_parser = stretch)]
    pub time: Option<std::ops::Range<f64>>,
}
