//! Options of `ps` and `fetch`, which ask a server.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args as ClapArgs, ValueEnum};
use stackwire::FetchFormat;

use super::values::{labels, time};

/// Which server, and how it knows us.
#[derive(Clone, Debug, ClapArgs)]
pub struct FromOptions {
    /// The server: https://host:port, http://host:port on this host, or unix:/path.
    #[arg(long, value_name = "ADDRESS")]
    pub from: String,
    /// CA that signs the certificate of the server (PEM); without it, those of this host.
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// Certificate that says who we are (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Its key (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// File with the token that says who we are.
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Send a token to other hosts in clear text.
    #[arg(long)]
    pub insecure: bool,
}

#[derive(Debug, ClapArgs)]
pub struct Ps {
    #[command(flatten)]
    pub from: FromOptions,
    /// Only captures that come in now.
    #[arg(long)]
    pub live: bool,
    /// For people, or as the server says it.
    #[arg(long, value_name = "HOW", default_value = "text")]
    pub format: PsFormat,
}

/// How captures are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PsFormat {
    /// A table.
    Text,
    /// What `/v1/captures` answers.
    Json,
}

#[derive(Debug, ClapArgs)]
pub struct Fetch {
    #[command(flatten)]
    pub from: FromOptions,
    /// From this long ago up to now, as "15m".
    #[arg(long, value_name = "TIME", value_parser = time, conflicts_with_all = ["since", "until"])]
    pub last: Option<Duration>,
    /// From this moment on, as 2026-01-31T12:00:00Z.
    #[arg(long, value_name = "TIME")]
    pub since: Option<jiff::Timestamp>,
    /// Up to this moment.
    #[arg(long, value_name = "TIME")]
    pub until: Option<jiff::Timestamp>,
    /// Samples that have these labels, as comm=postgres,pod_uid=…; of values for one label any.
    /// host and client choose captures.
    #[arg(long = "where", value_name = "LABEL=VALUE,…", value_parser = labels_as_typed)]
    pub labels: Option<String>,
    /// Samples of one event alone.
    #[arg(long, value_name = "EVENT")]
    pub event: Option<String>,
    /// What to write; without it, as the name of the output ends: .svg, .folded, .data, .txt,
    /// .json, else pprof.
    #[arg(long, value_name = "FORMAT", value_parser = PossibleValuesParser::new(FetchFormat::ALL.map(FetchFormat::name)).try_map(|name| name.parse::<FetchFormat>()))]
    pub format: Option<FetchFormat>,
    /// Where it goes; "-" is standard output.
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
}

fn labels_as_typed(text: &str) -> anyhow::Result<String> {
    labels(text).map(|_| text.to_owned())
}
