//! What is written, and how: options that several commands have.

use std::path::PathBuf;

use clap::{Args as ClapArgs, ValueEnum};

use super::values::tag;

/// Outputs every profile can have.
#[derive(Clone, Debug, Default, ClapArgs)]
pub struct Outputs {
    /// Draw a flame graph (SVG).
    #[arg(long, value_name = "FILE")]
    pub flamegraph: Option<PathBuf>,
    #[command(flatten)]
    pub flames: Flames,
    /// Write folded stacks.
    #[arg(long, value_name = "FILE")]
    pub folded: Option<PathBuf>,
    /// Write perf.data, for perf, hotspot, samply and autofdo.
    #[arg(long, value_name = "FILE")]
    pub perf_data_output: Option<PathBuf>,
    /// Lay out the files names are from as perf's build-id cache, for `perf --buildid-dir DIR
    /// report` elsewhere.
    #[arg(long, value_name = "DIR")]
    pub perf_buildid_dir: Option<PathBuf>,
    /// Write the pprof without names: build-ids and addresses, to be completed elsewhere.
    #[arg(long)]
    pub pprof_unsymbolized: bool,
    /// Put a comment into the pprof (repeatable).
    #[arg(long = "tag", value_name = "KEY=VALUE", value_parser = tag)]
    pub tags: Vec<String>,
}

/// How flame graphs are drawn.
#[derive(Clone, Copy, Debug, Default, ClapArgs)]
pub struct Flames {
    /// Draw the root on top.
    #[arg(long, requires = "flamegraph")]
    pub icicle: bool,
    /// Draw inlined functions as part of what they are inlined into.
    #[arg(long, requires = "flamegraph")]
    pub no_inlines: bool,
}

/// How --pmu is written.
#[derive(Clone, Copy, Debug, ClapArgs)]
pub struct PmuAs {
    /// Write the processes of the host one by one, not all of them added up.
    #[arg(long)]
    pub per_pid: bool,
    /// As text for people, or as JSON for programs.
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "text")]
    pub pmu_format: PmuFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PmuFormat {
    Text,
    Json,
}
