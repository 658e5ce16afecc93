//! `stackwire serve`: the server until Ctrl-C.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use stackwire::{Allowed, Keep, Limits, Pyroscope, ServeConfig, Tls, serve};
use tokio::signal::unix::{SignalKind, signal};

use super::Failure;
use super::ask::is_here;
use super::place::confine;
use crate::cli::serve::{LimitOptions, PushOptions, Serve};
use crate::say::set_format;

pub fn run(arguments: Serve) -> Result<(), Failure> {
    set_format(arguments.log_format);
    if arguments.window.is_zero() {
        return Err(Failure::Usage("a window of 0 holds no samples: use --window 5m".to_owned()));
    }
    let tls = arguments.tls_cert.zip(arguments.tls_key).map(|(certificate, key)| Tls {
        certificate,
        key,
        client_ca: arguments.tls_client_ca,
        client_crl: arguments.tls_client_crl,
        is_certificate_optional: arguments.token_file.is_some(),
    });
    if tls.as_ref().is_some_and(|tls| tls.client_ca.is_none() && !tls.is_certificate_optional) {
        return Err(Failure::Usage(
            "nobody could prove who they are: add --tls-client-ca or --token-file".to_owned(),
        ));
    }
    let push = push(arguments.push)?;
    if push.is_some() && arguments.tags.len() > MOST_TAGS {
        let why = format!("Pyroscope takes 30 labels: use {MOST_TAGS} times --tag at most");
        return Err(Failure::Usage(why));
    }
    if push.is_some() && arguments.window > REJECTED / 2 {
        tracing::warn!(
            "Pyroscope refuses profiles that begin more than an hour ago: use a shorter --window, or set its reject_older_than"
        );
    }
    stackwire_rights::descriptors::raise_limit().context("cannot raise the limit of open files")?;
    confine()?;
    let mut sources = arguments.symbols.sources()?;
    sources.trust_executables = arguments.trust_executables;
    arguments.metrics.start(&sources)?;
    let config = ServeConfig {
        listen: arguments.listen,
        tls,
        is_insecure: arguments.insecure,
        allowed: Allowed {
            uids: arguments.allow_uid,
            gids: arguments.allow_gid,
            tokens: arguments.token_file,
        },
        readers: arguments.reader,
        log_dir: arguments.log_dir.unwrap_or_else(|| arguments.output_dir.join("captures")),
        output_dir: arguments.output_dir,
        keep_logs: Keep { bytes: mib(arguments.log_max), age: arguments.log_max_age },
        keep_profiles: Keep { bytes: mib(arguments.output_max), age: arguments.output_max_age },
        drain_timeout: arguments.drain_timeout,
        limits: limits(&arguments.limits),
        window: arguments.window,
        push,
        tags: arguments.tags,
        sources: Arc::new(sources),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .build()
        .context("cannot start the runtime")?;
    let served = runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut hang_up = signal(SignalKind::hangup())?;
        let shutdown = async move {
            tokio::select! {
                _ = hang_up.recv() => {}
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        };
        let ready = |address: &str| tracing::info!(address, "listening on {address}");
        serve(config, ready, shutdown).await?;
        Ok(())
    });
    // A profile that is being made for somebody keeps nothing waiting.
    runtime.shutdown_timeout(Duration::from_secs(1));
    served
}

/// With those of a piece, what Pyroscope takes.
const MOST_TAGS: usize = 20;
/// Pyroscope takes nothing that is older, unless its `reject_older_than` says otherwise.
const REJECTED: Duration = Duration::from_secs(3600);
/// They open epochs and sync logs. What these take in memory is limited elsewhere.
const BLOCKING_THREADS: usize = 128;

fn limits(options: &LimitOptions) -> Limits {
    Limits {
        streams: options.streams_max,
        rate: mib(options.rate_max),
        epoch: mib(options.epoch_max),
        artifacts: mib(options.artifacts_max),
        executables: options.executables_max,
        label: options.label_max,
        memory: mib(options.memory_max),
    }
}

fn push(options: PushOptions) -> Result<Option<Pyroscope>, Failure> {
    let Some(url) = options.pyroscope_url else { return Ok(None) };
    if !url.username().is_empty() || url.password().is_some() {
        return Err(Failure::Usage(
            "--pyroscope-url has a password in it, and others can read the command line: use --pyroscope-token-file".to_owned(),
        ));
    }
    let wrong = |why: &str| Err(Failure::Usage(format!("--pyroscope-url {url}: {why}")));
    if !matches!(url.scheme(), "http" | "https") {
        return wrong("write http://host:port or https://host:port");
    }
    let is_told = options.pyroscope_token_file.is_some() && url.scheme() == "http";
    if is_told && !is_here(&url) && !options.pyroscope_insecure {
        return wrong(
            "a token would go there in clear text; write https://, or add --pyroscope-insecure",
        );
    }
    Ok(Some(Pyroscope {
        url,
        tenant: options.pyroscope_tenant,
        user: options.pyroscope_user,
        token: options.pyroscope_token_file,
        ca: options.pyroscope_ca,
    }))
}

fn mib(mib: u64) -> u64 {
    mib.saturating_mul(1 << 20)
}
