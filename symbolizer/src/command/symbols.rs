//! The options of every command that looks for symbols. Makes sources of them, and checks whether
//! everything came that was asked for.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::anyhow;
use stackwire::profile::Named;
use stackwire::{Debuginfod, Scratch, Sources, cache::Cache};

use super::Failure;
use crate::cli::symbols::{CacheOptions, MetricsOption, SymbolOptions};
use crate::say::say;

impl CacheOptions {
    /// The cache; `None`, with a word about it, where none can be had.
    pub fn open(&self) -> Option<Cache> {
        let Some(directory) = self.directory() else {
            tracing::warn!(
                "no symbol cache: neither XDG_CACHE_HOME nor HOME is set; name one with --symbol-cache-dir",
            );
            return None;
        };
        match Cache::open(&directory, self.symbol_cache_max) {
            Ok(cache) => Some(cache),
            Err(error) => {
                tracing::warn!("no symbol cache: {error}");
                None
            }
        }
    }

    /// `$XDG_CACHE_HOME/stackwire`, else `~/.cache/stackwire`, unless named.
    pub fn directory(&self) -> Option<PathBuf> {
        let absolute = |name: &str| {
            let path = PathBuf::from(std::env::var_os(name)?);
            path.is_absolute().then_some(path)
        };
        let named = self.symbol_cache_dir.clone();
        named
            .or_else(|| Some(absolute("XDG_CACHE_HOME")?.join("stackwire")))
            .or_else(|| Some(absolute("HOME")?.join(".cache/stackwire")))
    }
}

impl MetricsOption {
    /// Begins to serve what is counted, if it is to be served.
    pub fn start(&self, sources: &Sources) -> Result<(), Failure> {
        let Some(address) = &self.metrics_listen else { return Ok(()) };
        let bound = stackwire::metrics::listen(address, Arc::clone(&sources.metrics))
            .map_err(|error| anyhow!("cannot listen on {address} for --metrics-listen: {error}"))?;
        tracing::info!("metrics on http://{bound}/metrics");
        Ok(())
    }
}

impl SymbolOptions {
    /// Where to look.
    pub fn sources(&self) -> Result<Sources, Failure> {
        let mut sources = Sources::default();
        sources.debug_dirs.clone_from(&self.debug_dirs);
        sources.demangle = !self.no_demangle;
        sources.cache = self.cache.open().map(Arc::new);
        if let Some(cache) = &sources.cache {
            sources.scratch = Scratch::new(cache.scratch());
        }
        let urls = self.urls();
        if !urls.is_empty() {
            if sources.cache.is_none() {
                tracing::warn!("without a symbol cache no debuginfod server is asked");
            }
            let servers = Debuginfod::new(&urls, self.symbol_fetch_timeout)
                .map_err(|error| Failure::Usage(error.to_string()))?;
            if let Some(warning) = servers.warning() {
                tracing::warn!(
                    "servers with https cannot be asked: {warning}; install ca-certificates, or name a file of certificates in SSL_CERT_FILE"
                );
            }
            sources.debuginfod = sources.cache.as_ref().map(|_| Arc::new(servers));
        }
        Ok(sources)
    }

    /// Servers named, else those of the environment, where elfutils has them separated by spaces.
    fn urls(&self) -> Vec<String> {
        if !self.debuginfod_urls.is_empty() {
            return self.debuginfod_urls.clone();
        }
        let urls = std::env::var("DEBUGINFOD_URLS").unwrap_or_default();
        // elfutils knows words there that are no servers: `ima:enforcing`, `file:///directory`.
        let is_server = |url: &&str| url.starts_with("http://") || url.starts_with("https://");
        urls.split_whitespace().filter(is_server).map(str::to_owned).collect()
    }

    /// With `--symbol-fail-closed`, whether everything came that servers were asked for.
    pub fn check(&self, profile: Named<'_>) -> Result<(), Failure> {
        let failed = profile
            .names
            .sources
            .iter()
            .zip(&profile.executables)
            .find(|(source, _)| source.fetch_failed);
        match failed.filter(|_| self.symbol_fail_closed) {
            Some((source, executable)) => {
                let (name, why) = (executable.name(), source.notes.join("; "));
                Err(anyhow!("symbols of {name} could not be fetched: {why}").into())
            }
            None => Ok(()),
        }
    }
}

/// `stackwire cache add`: a file into the cache.
pub fn add(path: &Path, cache: &Cache) -> Result<(), Failure> {
    let key = stackwire::add_to_cache(path, cache)
        .map_err(|reason| anyhow!("cannot add {}: {reason}", path.display()))?;
    if cache.get(&key)?.is_none() {
        let path = path.display();
        return Err(
            anyhow!("{path} is larger than --symbol-cache-max, and was removed at once").into()
        );
    }
    say(&format!("added {} as {} of {}", path.display(), key.kind.name(), key.id));
    Ok(())
}
