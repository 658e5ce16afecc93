//! Options of `serve`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use clap::{Args as ClapArgs, ValueEnum};
use stackwire::Listen;

use super::symbols::{MetricsOption, SymbolOptions};
use super::values::{tag, time};

#[derive(Debug, ClapArgs)]
pub struct Serve {
    /// Address to listen on: host:port or unix:/path (repeatable).
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:4400")]
    pub listen: Vec<Listen>,
    /// Certificate for TLS on TCP addresses, with those between it and its CA (PEM). Read again
    /// when it changes, as the other files are.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Its key (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// CA that signs the certificates of clients (PEM). A client is known by the first URI or DNS
    /// name in its certificate, or by the SHA-256 of its key.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_client_ca: Option<PathBuf>,
    /// Certificates of clients that are revoked: a CRL of that CA (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_client_ca")]
    pub tls_client_crl: Option<PathBuf>,
    /// Tokens of clients without a certificate: lines of a name and a token. A client sends
    /// `authorization: Bearer TOKEN`, over TLS alone.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub token_file: Option<PathBuf>,
    /// Let other hosts come in clear text, without any proof of who they are.
    #[arg(long, conflicts_with = "tls_cert")]
    pub insecure: bool,
    /// User who may use the unix socket, by number (repeatable). Without --allow-uid and
    /// --allow-gid: all who may open it.
    #[arg(long, value_name = "UID")]
    pub allow_uid: Vec<u32>,
    /// Group whose processes may use the unix socket, by number (repeatable).
    #[arg(long, value_name = "GID")]
    pub allow_gid: Vec<u32>,
    /// Client that sees with `ps` and `fetch` what others sent, as token:NAME, certificate:NAME,
    /// uid:NUMBER or loopback (repeatable). Others see what they sent themselves.
    #[arg(long, value_name = "CLIENT", value_parser = reader)]
    pub reader: Vec<String>,
    /// Where profiles go.
    #[arg(long, value_name = "DIRECTORY")]
    pub output_dir: PathBuf,
    /// Where the captures are kept; without it, `captures` in the output directory.
    #[arg(long, value_name = "DIRECTORY")]
    pub log_dir: Option<PathBuf>,
    /// Most MiB of captures kept; the oldest go first. Captures whose profiles are not written yet
    /// are never removed: when they are more, collectors have to wait.
    #[arg(long, value_name = "MIB", default_value_t = 4096)]
    pub log_max: u64,
    /// Remove captures this long after their profiles were written.
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub log_max_age: Option<Duration>,
    /// Most MiB of profiles kept; the oldest go first, pushed or not.
    #[arg(long, value_name = "MIB", default_value_t = 4096)]
    pub output_max: u64,
    /// Remove profiles this long after they were written.
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub output_max_age: Option<Duration>,
    /// How long profiles may take that are written when the server stops. The next start writes
    /// what is left.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "25s")]
    pub drain_timeout: Duration,
    /// Length of the window a profile covers, in whole epochs of its collector, one at least.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "5m")]
    pub window: Duration,
    /// Put a comment into every pprof (repeatable).
    #[arg(long = "tag", value_name = "KEY=VALUE", value_parser = tag)]
    pub tags: Vec<String>,
    #[command(flatten)]
    pub limits: LimitOptions,
    /// What is logged on standard error.
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
    #[command(flatten)]
    pub push: PushOptions,
    /// Let executables that collectors hand over name the samples of everybody, before files of
    /// debuginfod. Without it, they name samples of the same client, where nothing else does.
    #[arg(long)]
    pub trust_executables: bool,
    #[command(flatten)]
    pub symbols: SymbolOptions,
    #[command(flatten)]
    pub metrics: MetricsOption,
}

/// How what happens is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// A line for people.
    Text,
    /// A JSON object a line.
    Json,
}

/// What clients of a server may take. What is beyond is refused, and the refusal names the option.
#[derive(Clone, Copy, Debug, ClapArgs)]
pub struct LimitOptions {
    /// Most streams and requests of one client at a time.
    #[arg(long, value_name = "NUMBER", default_value_t = 1024, help_heading = LIMITS)]
    pub streams_max: usize,
    /// Most MiB a second from one client, before compression. Who sends more has to wait.
    #[arg(long, value_name = "MIB", default_value_t = 256, help_heading = LIMITS)]
    pub rate_max: u64,
    /// Most MiB of memory that an epoch takes, 256 at most.
    #[arg(long, value_name = "MIB", default_value_t = 128, value_parser = clap::value_parser!(u64).range(1..=256), help_heading = LIMITS)]
    pub epoch_max: u64,
    /// Most MiB of artifacts and executables from one client in an hour, before compression.
    #[arg(long, value_name = "MIB", default_value_t = 16_384, help_heading = LIMITS)]
    pub artifacts_max: u64,
    /// Most executables that one client hands over in a day, each counted once.
    #[arg(long, value_name = "NUMBER", default_value_t = 16_384, help_heading = LIMITS)]
    pub executables_max: usize,
    /// Most bytes of a name: of a thread, a path, a cgroup, a service.
    #[arg(long, value_name = "BYTES", default_value_t = 131_072, help_heading = LIMITS)]
    pub label_max: usize,
    /// MiB of memory for what all clients send, and for windows that are resolved: half for each.
    /// Where it is short, collectors wait and windows end early.
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(128..), help_heading = LIMITS)]
    pub memory_max: u64,
}

const LIMITS: &str = "Limits of clients";

/// Where profiles go as well.
#[derive(Clone, Debug, ClapArgs)]
pub struct PushOptions {
    /// Pyroscope that profiles are pushed to once they are written, as http://host:4040. Each
    /// process name is a series. Tags are labels, but for those that a series has already.
    /// Pyroscope refuses what began more than an hour ago: --window must be shorter.
    #[arg(long, value_name = "URL", help_heading = PUSH)]
    pub pyroscope_url: Option<reqwest::Url>,
    /// Tenant there (X-Scope-OrgID).
    #[arg(long, value_name = "NAME", requires = "pyroscope_url", help_heading = PUSH)]
    pub pyroscope_tenant: Option<String>,
    /// File with a token for it, or with the password of --pyroscope-user. Read again when it
    /// changes.
    #[arg(long, value_name = "FILE", requires = "pyroscope_url", help_heading = PUSH)]
    pub pyroscope_token_file: Option<PathBuf>,
    /// User of basic authentication.
    #[arg(long, value_name = "NAME", requires = "pyroscope_token_file", help_heading = PUSH)]
    pub pyroscope_user: Option<String>,
    /// CA that signs its certificate (PEM); without it, those of this host.
    #[arg(long, value_name = "FILE", requires = "pyroscope_url", help_heading = PUSH)]
    pub pyroscope_ca: Option<PathBuf>,
    /// Send the token to another host in clear text.
    #[arg(long, requires = "pyroscope_token_file", help_heading = PUSH)]
    pub pyroscope_insecure: bool,
}

const PUSH: &str = "Pushing profiles";

fn reader(text: &str) -> anyhow::Result<String> {
    let known = ["token:", "certificate:", "uid:"];
    let is_known = |kind: &&str| text.strip_prefix(*kind).is_some_and(|name| !name.is_empty());
    ensure!(
        known.iter().any(is_known) || matches!(text, "loopback" | "anyone"),
        "write token:NAME, certificate:NAME, uid:NUMBER, loopback or anyone"
    );
    Ok(text.to_owned())
}
