//! Where names are looked for and kept: options that several commands have.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args as ClapArgs;

use super::values::{bytes, time};

/// Where names are looked for.
#[derive(Clone, Debug, ClapArgs)]
pub struct SymbolOptions {
    /// Directory with separate debug files (repeatable).
    #[arg(long = "debug-dir", value_name = "DIR", default_value = stackwire::DEBUG_DIR)]
    pub debug_dirs: Vec<PathBuf>,
    /// Leave names as the compiler mangled them.
    #[arg(long)]
    pub no_demangle: bool,
    #[command(flatten)]
    pub cache: CacheOptions,
    /// debuginfod server to ask for what is not here (repeatable, asked in order); without it,
    /// those in DEBUGINFOD_URLS.
    #[arg(long = "debuginfod-url", value_name = "URL", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub debuginfod_urls: Vec<String>,
    /// How long servers are waited for, all together.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "30s")]
    pub symbol_fetch_timeout: Duration,
    /// Fail when a server was asked for symbols and did not give them.
    #[arg(long)]
    pub symbol_fail_closed: bool,
}

/// Which symbol cache.
#[derive(Clone, Debug, ClapArgs)]
pub struct CacheOptions {
    /// Where fetched files and compiled symbols are kept; without it, $XDG_CACHE_HOME/stackwire.
    #[arg(long, value_name = "DIR")]
    pub symbol_cache_dir: Option<PathBuf>,
    /// Most bytes kept, as "2GiB" or "500MB"; the least recently used go first.
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value = "2GiB")]
    pub symbol_cache_max: u64,
}

/// Counters for Prometheus.
#[derive(Clone, Debug, ClapArgs)]
pub struct MetricsOption {
    /// Serve counters for Prometheus on http://HOST:PORT/metrics.
    #[arg(long, value_name = "HOST:PORT")]
    pub metrics_listen: Option<String>,
}
