//! `stackwire cache`: what is in the symbol cache, and changes to it.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write;

use anyhow::{Context, anyhow};
use stackwire::cache::{Cache, Id};

use super::beginning::whole;
use super::{Failure, symbols};
use crate::cli::{CacheAction, CacheCommand};

pub fn run(arguments: &CacheCommand) -> Result<(), Failure> {
    let directory = arguments.cache.directory().ok_or_else(|| {
        Failure::Usage(
            "neither XDG_CACHE_HOME nor HOME is set: name a cache with --symbol-cache-dir"
                .to_owned(),
        )
    })?;
    let cache = Cache::open(&directory, arguments.cache.symbol_cache_max)
        .context("cannot open the symbol cache")?;
    let mut text = String::new();
    match &arguments.action {
        CacheAction::Stats => stats(&cache, arguments.cache.symbol_cache_max, &mut text)?,
        CacheAction::Ls => list(&cache, &mut text)?,
        CacheAction::Verify => return verify(&cache),
        CacheAction::Prune { to } => {
            for row in cache.prune(*to)? {
                let _ = writeln!(
                    text,
                    "removed {} {} ({} bytes)",
                    row.key.id,
                    row.key.kind.name(),
                    row.size
                );
            }
        }
        CacheAction::Add { files } => {
            return files.iter().try_for_each(|file| symbols::add(file, &cache));
        }
        CacheAction::Rm { ids } => return ids.iter().try_for_each(|id| remove(&cache, id)),
    }
    print(&text)
}

fn stats(cache: &Cache, max: u64, text: &mut String) -> Result<(), Failure> {
    let stats = cache.stats()?;
    let _ = writeln!(text, "{}", cache.directory().display());
    let _ = writeln!(text, "{} blobs, {} bytes of at most {max}", stats.blobs, stats.bytes);
    let _ = writeln!(
        text,
        "{} known to be missing, {} to be malformed",
        stats.missing, stats.malformed
    );
    Ok(())
}

fn list(cache: &Cache, text: &mut String) -> Result<(), Failure> {
    for row in cache.rows()? {
        let used = jiff::Timestamp::from_millisecond(row.last_use as i64).unwrap_or_default();
        let origin = row.meta.origin.lines().next().unwrap_or_default().to_owned();
        let _ = writeln!(
            text,
            "{:>12} {:10} {} {} {origin}",
            row.size,
            row.key.kind.name(),
            used.strftime("%Y-%m-%dT%H:%M:%SZ"),
            row.key.id
        );
    }
    Ok(())
}

fn verify(cache: &Cache) -> Result<(), Failure> {
    let found = cache.verify()?;
    let mut text = format!("{} whole\n", found.good);
    if found.repaired > 0 {
        let _ = writeln!(text, "{} left by a kill, put right", found.repaired);
    }
    for key in &found.damaged {
        let _ = writeln!(text, "damaged, removed: {} {}", key.id, key.kind.name());
    }
    print(&text)?;
    match found.damaged.len() {
        0 => Ok(()),
        count => Err(anyhow!("{count} damaged").into()),
    }
}

fn remove(cache: &Cache, id: &str) -> Result<(), Failure> {
    let id: Id = id.parse().map_err(|error| Failure::Usage(format!("{id:?}: {error}")))?;
    let rows = cache.rows()?;
    let known: BTreeSet<Id> = rows.iter().map(|row| row.key.id.clone()).collect();
    // What a server did not have is remembered without a row.
    let id = whole(id.as_str(), &known)?.unwrap_or(id);
    let mut found = cache.forget_negatives(&id)?;
    for row in rows.iter().filter(|row| row.key.id == id) {
        found |= cache.remove(&row.key)?;
    }
    if found { Ok(()) } else { Err(anyhow!("nothing in the cache has build-id {id}").into()) }
}

fn print(text: &str) -> Result<(), Failure> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        // `cache ls | head` has seen enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other.context("cannot print")?),
    }
}
